"""What applications may do with nested columns of streams, and what they may not."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import AdjunctError, PlanningError
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from tests.orchestration.step_world import StepWorld

ORDERS = Schema.of(
    k="bigint", customer={"id": "bigint", "since": "timestamp"}, attributes="map<string,array<int>>"
)


@pytest.fixture
def world(step_world: StepWorld) -> StepWorld:
    step_world.streams.create("orders", schema=ORDERS, key=["k"], partitions=2)
    return step_world


def test_records_are_not_partitioned_by_a_nested_column(world: StepWorld) -> None:
    for column in ("customer", "attributes"):
        app = Application("app")
        parted = app.input_stream("lake.orders").partition_by(column)
        parted.send_to(app.output_stream("lake.out", partitions=2, key="k"))
        with pytest.raises(PlanningError) as failure:
            world.run(app)
        assert failure.value.column == column
    assert world.streams.list_streams() == ["orders"]


@pytest.mark.parametrize("column", ["customer", "attributes"])
def test_no_nested_column_is_a_time_or_a_key(world: StepWorld, column: str) -> None:
    def with_event_time() -> None:
        app = Application("app")
        read = app.input_stream("lake.orders", event_time=column, delay=timedelta(minutes=1))
        read.send_to(app.output_stream("lake.out", partitions=2, key="k"))
        world.run(app)

    def with_key() -> None:
        app = Application("app")
        read = app.input_stream("lake.orders")
        read.send_to(app.output_stream("lake.out", partitions=2, key=column))
        world.run(app)

    for wrong in (with_event_time, with_key):
        with pytest.raises(AdjunctError) as failure:
            wrong()
        assert column in str(failure.value)
    assert world.streams.list_streams() == ["orders"]


def test_a_sensitive_nested_column_is_not_shown_in_errors(world: StepWorld) -> None:
    schema = ORDERS.with_sensitive("customer")
    world.streams.create("secret", schema=schema, key=["k"], partitions=1)
    record = {"k": 1, "customer": {"id": "hunter2"}}
    with pytest.raises(AdjunctError) as failure:
        world.streams.append("secret", [record], producer="p", sequence=1)
    assert "customer.id" in str(failure.value)
    assert "hunter2" not in str(failure.value)

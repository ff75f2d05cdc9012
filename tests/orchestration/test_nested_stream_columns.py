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


ROW = {"k": 1, "customer": {"id": 7, "since": None}, "attributes": {"b": [1, None], "a": []}}


def received(world: StepWorld) -> list[dict[str, object]]:
    table = world.streams.read_arrow(world.streams.all_ranges("out"))
    names = [name for name in table.column_names if not name.startswith("__")]
    rows: list[dict[str, object]] = table.select(names).to_pylist(maps_as_pydicts="strict")
    return rows


def test_an_output_gets_the_fields_that_its_input_gets(
    step_world: StepWorld, either_engine: str
) -> None:
    """The declared columns of the output follow those of what is sent."""
    world = step_world
    world.streams.create("orders", schema=ORDERS, key=["k"], partitions=2)
    world.streams.append("orders", [ROW], producer="p", sequence=1)
    app = Application("app")
    app.input_stream("lake.orders").send_to(app.output_stream("lake.out", partitions=2, key="k"))
    world.run(app)
    assert received(world) == [ROW]
    later = Schema.of(
        {
            **ORDERS.types,
            "customer": "struct<id:bigint,since:timestamp,vip:boolean>",
            "attributes": "map<string,array<bigint>>",
        }
    )
    world.streams.create("orders", schema=later, key=["k"], partitions=2)
    more = {"k": 1, "customer": {"id": 8, "since": None, "vip": True}, "attributes": {"c": [2**40]}}
    world.streams.append("orders", [more], producer="p", sequence=2)
    world.run(app)
    assert world.streams.info("out").schema == later
    first = {**ROW, "customer": {"id": 7, "since": None, "vip": None}}
    assert received(world) == [first, more]


def test_an_output_that_loses_a_field_is_rejected(step_world: StepWorld) -> None:
    """As one that loses a column."""
    world = step_world
    world.streams.create("orders", schema=ORDERS, key=["k"], partitions=2)
    wider = "struct<id:bigint,since:timestamp,vip:boolean>"
    schema = Schema.of({**ORDERS.types, "customer": wider})
    world.streams.create("out", schema=schema, key=["k"], partitions=2)
    app = Application("app")
    app.input_stream("lake.orders").send_to(app.output_stream("lake.out", partitions=2, key="k"))
    with pytest.raises(PlanningError) as failure:
        world.run(app)
    assert failure.value.stream == "lake.out"
    assert "customer" in failure.value.problem

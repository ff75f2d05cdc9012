"""Nested columns in plans: operators name columns, and the types of nested expressions are known."""

from __future__ import annotations

import pytest

from dagster_adjunct import Application, Schema
from dagster_adjunct.errors import PlanningError
from dagster_adjunct.orchestration.operators.stream_facts import StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan

ORDERS = Schema.of(id="bigint", customer={"id": "bigint"}, tags=["string"])


def planned(name: str, made: dict[str, str]) -> None:
    app = Application("app")
    orders = app.input_stream("lake.orders")
    if made:
        orders = orders.with_columns(**made)
    orders.partition_by(name).send_to(app.output_stream("lake.out", partitions=2, key="id"))
    build_plan(app, {"lake.orders": StreamFacts("lake.orders", 1, schema=ORDERS)})


def test_a_part_of_a_struct_is_made_a_column_as_the_error_advises() -> None:
    with pytest.raises(PlanningError) as failure:
        planned("customer.id", {})
    assert failure.value.column == "customer.id"
    assert '.with_columns(customer_id="customer.id")' in failure.value.next_step
    planned("customer_id", {"customer_id": "customer.id"})


@pytest.mark.parametrize("name", ["id.x", "tags.x", "costumer.id"])
def test_what_is_no_part_of_a_struct_gets_no_such_advice(name: str) -> None:
    with pytest.raises(PlanningError) as failure:
        planned(name, {})
    assert "with_columns" not in failure.value.next_step


@pytest.mark.parametrize("made", [None, "summed"])
def test_an_aggregate_of_an_array_is_no_condition(made: str | None) -> None:
    app = Application("app")
    orders = app.input_stream("lake.orders")
    condition = "aggregate(array(id), 0L, (sum, each) -> sum + each)"
    if made is not None:
        orders = orders.with_columns(**{made: condition})
        condition = made
    kept = orders.filter(condition)
    kept.send_to(app.output_stream("lake.out", partitions=2, key="id"))
    with pytest.raises(PlanningError, match="is bigint: expected boolean") as failure:
        build_plan(app, {"lake.orders": StreamFacts("lake.orders", 1, schema=ORDERS)})
    assert failure.value.operator == kept.operator

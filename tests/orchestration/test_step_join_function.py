"""Joins with a function on Spark, which gets records and entries as dictionaries."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import ConfigurationError, OperatorFailedError
from dagster_adjunct.resources.schemas.schema import Schema
from tests.orchestration.planner.planning import catalog, dataset
from tests.orchestration.step_world import StepWorld

RATES = {"a": ("gold", 2), "b": (None, 3), "c": ("gone", 0)}
ORDERS = [("a", 1), ("b", 2), ("x", 3), ("c", 4), (None, 5), ("a", 6)]
COST = Schema.of(cost="int", level="string")


def cost(record: dict[str, Any], entry: dict[str, Any] | None) -> dict[str, Any] | None:
    """Nothing of what is gone; what no rate is known of costs -1."""
    if entry is None:
        return {"cost": -1, "level": None}
    assert entry["k"] == record["k"]
    return (
        None
        if entry["rate"] == 0
        else {"level": entry["level"], "cost": record["n"] * entry["rate"]}
    )


def expected(how: str) -> list[tuple[Any, ...]]:
    made = []
    for k, n in ORDERS:
        if k in RATES:
            level, rate = RATES[k]
            made += [(k, n, n * rate, level)] if rate else []
        elif how == "left":
            made.append((k, n, -1, None))
    return sorted(made, key=str)


@pytest.mark.spark
@pytest.mark.usefixtures("either_engine")
def test_it_adds_what_the_function_returns_for_records_and_entries(step_world: StepWorld) -> None:
    step_world.stream("orders", "k", 2, k="string", n="int")
    step_world.stream("rates", "k", 2, k="string", level="string", rate="int")
    step_world.send("orders", *ORDERS)
    step_world.send(
        "rates", *((k, level, rate) for k, (level, rate) in RATES.items()), version="v1"
    )
    lying = bounded_dataset("lying", input="lake.rates", key="k", partitions=2)
    everywhere = bounded_dataset("everywhere", input="lake.rates", key="k", broadcast=True)
    app = Application("app")
    orders = app.input_stream("lake.orders")
    for name, table, how in (("left", lying, "left"), ("inner", everywhere, "inner")):
        joined = orders.join(app.table(table), on="k", how=how, function=cost, schema=COST)  # type: ignore[arg-type]
        joined.send_to(app.output_stream(f"lake.{name}", partitions=2, key="k"))
    report = step_world.run(app)
    for how in ("left", "inner"):
        rows = [(row["k"], row["n"], row["cost"], row["level"]) for row in step_world.rows(how)]
        assert sorted(rows, key=str) == expected(how)
    counted = {
        name.split("-")[2]: counts
        for name, counts in report.counters.items()
        if name.startswith("join-")
    }
    assert counted == {
        "lying": {"rows": 6, "unmatched": 2},
        "everywhere": {"rows": 6, "unmatched": 2},
    }

    wrong = Application("wrong")
    stream = wrong.input_stream("lake.orders").join(
        wrong.table(lying), on="k", how="left", function=lambda record, entry: [1], schema=COST
    )
    stream.send_to(wrong.output_stream("lake.wrong", partitions=2, key="k"))
    with pytest.raises(OperatorFailedError) as caught:
        step_world.run(wrong)
    assert (caught.value.operator, caught.value.stream) == ("join-2-lying", "lake.orders")
    assert caught.value.partition in (0, 1)
    assert str(caught.value.offset).isdigit()


def orders_and_table() -> tuple[Application, Any, Any]:
    app = Application("app")
    return app, app.input_stream("lake.orders"), app.table(dataset("rates", 2))


def test_it_is_proven_as_any_join_and_keeps_partitioning() -> None:
    app, orders, rates = orders_and_table()
    orders.join(rates, on="k", function=cost, schema=COST).join(
        rates, on="k", how="left", select=["rate"], name="again"
    )
    facts = catalog(
        StreamFacts("lake.orders", 2, ("k",), SPARK, Schema.of(k="string", n="int")),
        StreamFacts("lake.rates", 1, ("k",), SPARK, Schema.of(k="string", rate="int")),
    )
    planned = build_plan(app, facts)
    assert planned.operator("join-3-again").columns == ("k", "n", "cost", "level", "rate")
    assert [(operator.partitions, operator.partitioned_by) for operator in planned.operators] == [
        (2, ("k",))
    ] * 3
    assert "inner join rates on k, by cost()" in planned.render()


def test_what_a_function_needs_is_asked_for() -> None:
    _, orders, rates = orders_and_table()
    with pytest.raises(ConfigurationError) as failure:
        orders.join(rates, on="k", function=cost)
    assert failure.value.argument == "schema"
    with pytest.raises(ConfigurationError) as failure:
        orders.join(rates, on="k", schema=COST)
    assert failure.value.argument == "function"
    with pytest.raises(ConfigurationError) as failure:
        orders.join(rates, on="k", function=cost, schema=COST, select=["rate"])
    assert failure.value.operator == "join-2-rates"
    assert failure.value.argument == "select"
    with pytest.raises(ConfigurationError) as failure:
        orders.join(rates, on="k", how="outer", function=cost, schema=COST)
    assert failure.value.argument == "how"

"""merge on Spark: what it leaves of several streams and of several ways of one, also again, and
at which cost.
"""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.resources.errors import PlanningError
from tests.faulty_store import Crash
from tests.orchestration.executed_plans import executed_plans
from tests.orchestration.step_world import StepWorld

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("either_engine")]

PLANES = bounded_dataset("planes", input="lake.planes", key="k", partitions=2)
SEATS = {f"N{number}": 100 + number for number in range(4)}


@pytest.fixture
def world(step_world: StepWorld) -> StepWorld:
    for name in ("old", "new"):
        step_world.stream(name, "k", 2, k="string", v="int")
        step_world.send(name, *trips(name))
    step_world.stream("planes", "k", 2, k="string", seats="int")
    step_world.send("planes", *SEATS.items(), version="v1")
    return step_world


def trips(name: str) -> list[tuple[str, int]]:
    first = {"old": 0, "new": 50}[name]
    return [(f"N{number % 6}", number) for number in range(first, first + 20)]


def application(world: StepWorld) -> Application:
    """New trips and two of each old one, the first ones once more: enriched, stored, and written
    to a table.
    """
    app = Application("app")
    old, new = app.input_stream("lake.old"), app.input_stream("lake.new")
    doubled = old.flat_map("array(v, v + 1000) as v").merge(old.filter("v < 5"))
    enriched = new.merge(doubled).join(app.table(PLANES), on="k", how="left")
    stored = enriched.send_to(app.output_stream("lake.enriched", partitions=2, key="k"))
    old.merge(stored.select("k", "v")).map("k", "v", "cast(null as int) as w").send_to(
        app.table(world.table())
    )
    enriched.partition_by("v", partitions=3).send_to(app.output_stream("lake.one", partitions=1))
    return app


def expected() -> list[dict[str, Any]]:
    old, new = trips("old"), trips("new")
    merged = [
        *new,
        *((k, value) for k, v in old for value in (v, v + 1000)),
        *((k, v) for k, v in old if v < 5),
    ]
    return [{"k": k, "v": v, "seats": SEATS.get(k)} for k, v in merged]


def order(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted((row["k"], row["v"], row["seats"] or 0) for row in rows)


def test_all_records_come_once_each_way_and_again_the_same(world: StepWorld) -> None:
    def die(event: StepEvent) -> None:
        if event.what == "output" and event.detail["output"] == "lake.one":
            raise Crash

    with executed_plans(world.spark()) as plans, pytest.raises(Crash):
        world.run(application(world), on_event=die)
    assert order(world.rows("enriched")) == order(expected())
    report = world.run(application(world))  # the same bytes: others would be refused
    assert report.counters["lake.enriched"] == {"rows": len(expected()), "duplicate_batches": 1}
    assert order(world.rows("one")) == order(expected())
    assert world.rows("enriched")[0].keys() == {"k", "v", "seats"}
    # Lake streams that lie alike are merged, joined and stored where they are.
    joined = next(plan for plan in plans if "Join" in plan)
    assert "Union" in joined
    assert "Exchange hashpartitioning" not in joined


def test_records_of_one_stream_keep_their_order_and_columns_are_found_by_name(
    world: StepWorld,
) -> None:
    app = Application("app")
    old, new = app.input_stream("lake.old"), app.input_stream("lake.new")
    merged = old.merge(new.select("v", "k"))
    merged.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    world.run(app)
    rows = [(row["k"], row["v"]) for row in world.rows("out")]
    for name in ("old", "new"):
        for key in SEATS:
            came = [trip for trip in trips(name) if trip[0] == key]
            assert [trip for trip in rows if trip in came] == came
    assert len(rows) == 40


def test_types_that_only_spark_knows_are_compared_before_a_batch_begins(world: StepWorld) -> None:
    app = Application("app")
    old, new = app.input_stream("lake.old"), app.input_stream("lake.new")
    old.merge(new.with_columns(v="v + 1L")).send_to(
        app.output_stream("lake.out", partitions=2, key="k")
    )
    with pytest.raises(PlanningError, match="bigint in with-columns-3, int in") as caught:
        world.run(app)
    assert (caught.value.operator, caught.value.column) == ("merge-4", "v")
    assert world.state(app).last is None

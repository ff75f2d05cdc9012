"""Where the engine without Spark once left something else than Spark: it asks Spark, or finds
the same error.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.declaration.change_formats import Upserts
from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.message_stream import MessageStream
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.step.engines import BatchEngine, SmallBatchesInProcess
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.faulty_store import Crash
from tests.orchestration.step_world import StepWorld

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark
SHOPS = bounded_dataset("shops", input="lake.shops", key=["shop"], partitions=2)
COLUMNS = {"id": "bigint", "shop": "string", "size": "int"}


@pytest.fixture
def world(step_world: StepWorld) -> StepWorld:
    step_world.stream("orders", "id", 2, **COLUMNS)
    step_world.stream("shops", "shop", 2, shop="string", city="string")
    step_world.send("shops", ("a", "Ulm"), version="1")
    step_world.advance(SHOPS)
    return step_world


def shopping(engine: Any = "auto") -> tuple[Application, MessageStream]:
    app = Application("shopping", engine=engine)
    return app, app.input_stream("lake.orders", default_offset="oldest")


def test_a_table_that_counts_repeats_is_written_once_if_spark_must_go_on(world: StepWorld) -> None:
    """The letters that only Spark can change are met after the table was to be written."""
    world.send("orders", (1, "ä", 1), (2, "b", 1))
    app, orders = shopping()
    things = app.table(world.table())
    orders.map("shop as k").update(things, add={"w": "1"}, if_missing={"w": "0"})
    orders.map("id", "upper(shop) as shop").send_to(app.output_stream("lake.loud", partitions=1))
    report = world.run(app)
    assert report.in_process_batches == 0
    assert world.records() == {"ä": (None, 1), "b": (None, 1)}
    assert report.counters["things"]["defaults_put"] == 2
    assert sorted(row["shop"] for row in world.rows("loud")) == ["B", "Ä"]


@pytest.mark.parametrize("engine", ["spark", "auto"])
def test_columns_that_a_version_lacks_are_reported_before_the_batch(
    world: StepWorld, engine: str
) -> None:
    """The stream of the dataset has a new column, and no version has it yet."""
    newer = Schema.of(shop="string", city="string", area="string")
    world.streams.create("shops", schema=newer, key=["shop"], partitions=2)
    world.send("orders", (1, "a", 1))
    app, orders = shopping(engine)
    joined = orders.partition_by("shop", partitions=2).join(
        app.table(SHOPS), on="shop", select=["area"]
    )
    joined.send_to(app.output_stream("lake.out", partitions=1))
    with pytest.raises(PlanningError) as lacking:
        world.run(app)
    assert (lacking.value.operator, lacking.value.column) == ("join-3-shops", "area")
    app, orders = shopping(engine)
    joined = orders.partition_by("shop", partitions=2).join(app.table(SHOPS), on="shop")
    joined.map("id", "concat(area, '!') as area").send_to(
        app.output_stream("lake.out", partitions=1)
    )
    with pytest.raises(PlanningError) as unknown:
        world.run(app)
    assert unknown.value.operator == "map-4"


@pytest.mark.parametrize("engine", ["spark", "auto"])
def test_a_column_that_the_input_gains_while_a_run_stays_hides_no_other(
    world: StepWorld, engine: str
) -> None:
    world.send("orders", (1, "a", 1))
    app, orders = shopping(engine)
    orders.map("*", "1 as extra").send_to(app.output_stream("lake.out", partitions=1))

    def gain(event: object) -> None:
        if isinstance(event, StepEvent) and event.what == "batch":
            world.streams.create(
                "orders", schema=Schema.of(**COLUMNS, extra="int"), key=["id"], partitions=2
            )
            world.send("orders", (2, "a", 1, 5))

    with pytest.raises(PlanningError, match="extra"):
        run_application(
            app,
            lake=world.lake,
            spark=world.spark,
            on_event=gain,
            max_batches=2,
            follow=timedelta(minutes=1),
        )
    assert [row["extra"] for row in world.rows("out")] == [1]


@pytest.mark.parametrize(
    ("stored", "named", "needs"),
    [("ς", "Σ", True), ("ss", "ß", False), ("Größe", "größe", False), ("a", "A", False)],
)
def test_names_that_java_may_find_equal_are_left_to_spark(
    world: StepWorld, stored: str, named: str, needs: bool
) -> None:
    world.stream("named", "id", 1, **{"id": "bigint", stored: "int"})
    app = Application("naming", engine="auto")
    app.input_stream("lake.named").with_columns(**{named: "id"}).send_to(
        app.output_stream("lake.out", partitions=1)
    )
    assert bool(plan_application(app, systems=world.systems).engine.needs_spark) == needs


def test_the_plan_says_that_a_table_of_one_run_needs_spark(world: StepWorld) -> None:
    app, orders = shopping()
    live = unbounded_dataset("live", input="lake.shops", key="shop", partitions=2, persistent=False)
    joined = orders.partition_by("shop", partitions=2).join(app.table(live), on="shop")
    joined.send_to(app.output_stream("lake.out", partitions=1))
    (need,) = plan_application(app, systems=world.systems).engine.needs_spark
    assert (need.operator, need.what) == ("join-3-live", "dataset live, a table of one run")


@dataclass(frozen=True)
class OwnFormat:
    """Upserts that only Spark can decode."""

    def schema(self, records: Schema, what: str) -> Schema:
        return Upserts().schema(records, what)

    def keeps(self, columns: Sequence[str]) -> bool:
        return Upserts().keeps(columns)

    def orders(self, path: str) -> bool:
        return Upserts().orders(path)

    def decode(self, records: DataFrame, schema: Schema, what: str, **options: Any) -> DataFrame:
        return Upserts().decode(records, schema, what, **options)

    def describe(self) -> str:
        return "its own"


@pytest.mark.parametrize("engine", ["spark", "auto"])
@pytest.mark.parametrize("form", [pytest.param("its own", marks=pytest.mark.long), "dead letters"])
def test_few_changes_that_only_spark_can_decode_are_left_to_it(
    world: StepWorld, engine: str, form: str
) -> None:
    options: dict[str, Any] = {"on_bad_change": DeadLetters("lake.bad")}
    if form == "its own":
        options = {"changes": OwnFormat()}
    prices = unbounded_dataset("prices", input="lake.prices", key="k", partitions=2, **options)
    world.stream("prices", "k", 2, k="string", price="double")
    world.send("prices", ("a", 1.5), *([] if form == "its own" else [(None, 1e-7)]))
    world.send("orders", (1, "a", 1))
    app, orders = shopping(engine)
    joined = orders.partition_by("shop", partitions=2).join(app.table(prices), on={"shop": "k"})
    joined.send_to(app.output_stream("lake.out", partitions=1))
    report = run_application(app, lake=world.lake, spark=world.spark)
    assert report.step.in_process_batches == (engine == "auto")
    assert [row["price"] for row in world.rows("out")] == [1.5]
    if form == "dead letters":
        assert [row["value"] for row in world.rows("bad")] == ['{"k":null,"price":1.0E-7}']


def test_what_a_function_makes_behind_an_output_is_marked_by_both_engines_alike(
    world: StepWorld,
) -> None:
    """The table ignores what it has by the positions of its records, which are those of the
    input, not the output's.
    """
    app = Application("doubling", engine="auto")
    orders = app.input_stream("lake.orders", default_offset="oldest")
    sent = orders.send_to(app.output_stream("lake.sent", partitions=2, key="id"))
    doubled = sent.flat_map(
        lambda record: [{"k": record["shop"]}] * 2, schema=Schema.of(k="string")
    )
    counted = SqliteTable(
        world.folder / "counted.sqlite",
        "counted",
        "k",
        columns={"k": "string", "n": "int"},
        create=True,
    )
    counts = app.table(RemoteTable("counted", key="k", write_function=counted, idempotent=True))
    doubled.update(counts, add={"n": "1"}, if_missing={"n": "0"})
    orders.select("shop as k", "size as v", "size as w").send_to(app.table(world.table()))
    world.send("orders", *[(number, "abc"[number % 3], 1) for number in range(9)])

    def die(event: StepEvent) -> None:
        if event.what == "outputs":
            raise Crash

    for first, second in (
        (SmallBatchesInProcess, BatchEngine),
        (BatchEngine, SmallBatchesInProcess),
    ):
        with pytest.raises(Crash):
            run_step(world.context(app, on_event=die), first())
        run_step(world.context(app), second())
        with sqlite3.connect(world.folder / "counted.sqlite") as connection:
            stored = connection.execute("SELECT k, n FROM counted ORDER BY k").fetchall()
        assert [n for _, n in stored] == [stored[0][1]] * 3
        assert stored[0][1] == (6 if first is SmallBatchesInProcess else 12)
        world.send("orders", *[(number, "abc"[number % 3], 1) for number in range(9)])

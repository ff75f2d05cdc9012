"""Small batches that are computed without Spark leave what Spark leaves: records, digests,
counters and tables.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.step.engines import (
    BatchEngine,
    SmallBatchesInProcess,
    choose_engine,
)
from dagster_adjunct.orchestration.step.progress import StepEvent, StepReport
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.system import RECORD_META
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from dagster_adjunct.startpoints import StartpointOldest, Startpoints, StartpointUpcoming
from tests.faulty_store import Crash
from tests.orchestration.step_world import ByTasks, StepWorld, twin_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset

Engine = Callable[[], BatchEngine]
ENGINES: dict[str, Engine] = {"tasks": ByTasks, "spark": BatchEngine, "auto": SmallBatchesInProcess}


@pytest.fixture
def world(step_world: StepWorld) -> StepWorld:
    step_world.stream(
        "orders", "id", 3, id="bigint", shop="string", size="int", price="decimal(10,2)"
    )
    step_world.stream("shops", "shop", 2, shop="string", city="string", opened="date")
    step_world.stream("prices", "shop", 2, shop="string", size="int", factor="int")
    step_world.send(
        "shops", ("a", "Ulm", None), ("b", "Köln", None), ("ß", None, None), version="1"
    )
    step_world.send("prices", ("a", 1, 10), ("a", 2, 20), ("b", 1, 30))
    step_world.advance(*datasets())
    return step_world


def datasets() -> list[AdjunctDataset]:
    return [
        bounded_dataset("shops", input="lake.shops", key="shop", partitions=2),
        unbounded_dataset(
            "prices", input="lake.prices", key=("shop", "size"), partitions=2, partition_by="shop"
        ),
    ]


def declare(world: StepWorld, table: RemoteTable[Any, Any, Any]) -> Application:
    """Return joins by one and by two columns, expressions, two outputs of which one goes on, and
    an update.
    """
    app = Application("shopping", engine="auto")
    shops, prices = map(app.table, datasets())
    orders = app.input_stream("lake.orders", default_offset="oldest").partition_by(
        "shop", partitions=2
    )
    kept = orders.filter("size > 0 or shop is null").join(
        shops, on="shop", select=["city"], how="left"
    )
    kept = kept.with_columns(big="size >= 2", size="size + 1")
    enriched = kept.send_to(app.output_stream("lake.enriched", partitions=3, key="id"))
    matched = enriched.select("id", "shop", "size - 1 as size", "coalesce(city, 'none') as city")
    priced = matched.partition_by("shop", partitions=2).join(prices, on=["shop", "size"])
    priced.send_to(app.output_stream("lake.priced", partitions=1))
    things = app.table(table)
    matched.map("*", "shop as k").update(
        things,
        set={"v": "cast(size as int)"},
        if_missing={"v": "cast(size as int)", "w": "0"},
        on_null_key="skip",
    )
    return app


def exact_table(world: StepWorld) -> RemoteTable[Any, Any, Any]:
    store = world.table().write_function
    return RemoteTable("things", key="k", write_function=store, idempotent=True)


def run(world: StepWorld, engine: Engine, **options: Any) -> StepReport:
    return run_step(world.context(declare(world, exact_table(world)), **options), engine())


def rows(world: StepWorld, stream: str) -> list[dict[str, Any]]:
    """Return a stream's records with their offsets, input positions and epochs, but not when
    they were appended.
    """
    table = world.streams.read_arrow(world.streams.all_ranges(stream), positions=True)
    return table.drop_columns(["__timestamp"]).to_pylist()


def left_by(world: StepWorld) -> dict[str, Any]:
    digests = {
        stream: [sent.digest for sent in world.streams.state(stream).state.producers["shopping"]]
        for stream in ("enriched", "priced")
    }
    return {"digests": digests, "things": world.records()} | {
        s: rows(world, s) for s in ("enriched", "priced")
    }


@pytest.fixture
def twins(world: StepWorld) -> dict[str, StepWorld]:
    """The same lake twice, for one engine each; the records are in both."""
    world.send(
        "orders",
        (1, "a", 1, None),
        (2, "b", 2, None),
        (3, None, 0, None),
        (4, "x", -1, None),
        (5, "ß", 3, None),
    )
    return {"spark": world, "auto": twin_of(world, "auto"), "tasks": twin_of(world, "tasks")}


@pytest.mark.spark
def test_both_engines_leave_the_same_records_digests_counters_and_table(
    twins: dict[str, StepWorld],
) -> None:
    counters, left = {}, {}
    for name, world in twins.items():
        report = run(world, ENGINES[name])
        assert report.in_process_batches == (name == "auto")
        counters[name], left[name] = report.counters, left_by(world)
    assert len(left["spark"]["enriched"]) == 4
    assert left["auto"] == left["spark"] == left["tasks"]
    assert counters["auto"] == counters["spark"]  # tasks write to the table in more requests


@pytest.mark.spark
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("spark", "auto"),
        ("auto", "spark"),
        pytest.param("tasks", "spark", marks=pytest.mark.long),
        pytest.param("spark", "tasks", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "output",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("lake.enriched", "things")),
        "lake.priced",
    ],
)
def test_a_batch_that_one_engine_began_the_other_ends(
    world: StepWorld, first: str, second: str, output: str
) -> None:
    world.send("orders", (1, "a", 1, None), (2, "b", 2, None), (3, None, 0, None))
    written = ["lake.enriched", "lake.priced", "things"]

    def die(event: StepEvent) -> None:
        if event.what == "outputs" or (event.what == "output" and event.detail["output"] == output):
            raise Crash

    with pytest.raises(Crash):
        run(world, ENGINES[first], on_event=die)
    report = run(world, ENGINES[second])
    begun = written[: written.index(output)]
    duplicates = {stream: report.counters[stream]["duplicate_batches"] for stream in written[:2]}
    assert duplicates == {stream: int(stream in begun) for stream in written[:2]}
    assert sorted(row["id"] for row in rows(world, "enriched")) == [1, 2, 3]
    assert [row["id"] for row in rows(world, "priced")] == [1]
    assert world.records() == {"a": (1, 0), "b": (2, 0)}


def merging(world: StepWorld) -> Application:
    """Return two inputs merged, twice; looked up in a table; and records of which a table
    rejects some.
    """
    app = Application("merging", engine="auto")
    orders, others = (
        app.input_stream(f"lake.{name}", default_offset="oldest") for name in ("orders", "others")
    )
    named = [stream.select("id", "shop", "size") for stream in (orders, others)]
    merged = named[0].merge(named[1]).filter("id > 0").merge(named[1].select("size", "shop", "id"))
    known = app.table(world.table("known"))
    found = merged.partition_by("shop", partitions=2).join(
        known, on={"shop": "k"}, select={"v": "int"}, how="left"
    )
    found.send_to(app.output_stream("lake.merged", partitions=2, key="shop"))
    letters = app.output_stream("lake.letters", partitions=1)
    small = app.table(
        RemoteTable("small", key="k", write_function=small_store(world), idempotent=True)
    )
    found.select("shop as k", "size as v").send_to(
        small, on_null_key="skip", dead_letters=letters, at_most=9
    )
    return app


def small_store(world: StepWorld) -> SqliteTable:
    columns = {"k": "string", "v": "int"}
    with sqlite3.connect(world.folder / "small.sqlite") as connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS small (k TEXT PRIMARY KEY, v INT CHECK (v < 100))"
        )
    return SqliteTable(world.folder / "small.sqlite", "small", "k", columns=columns, create=True)


@pytest.mark.spark
def test_merged_looked_up_and_rejected_records_are_the_same(world: StepWorld) -> None:
    world.stream("others", "id", 2, id="bigint", shop="string", size="int", note="string")
    world.send("orders", (1, "a", 1, None), (2, "b", 200, None), (3, None, 3, None))
    world.send("others", (1, "a", 5, "x"), (-4, "c", 300, "y"))
    with BlockingTable(world.table("known")) as table:
        table.put("a", {"v": 7, "w": 1})
    left = []
    for one, engine in ((twin_of(world), SmallBatchesInProcess), (world, BatchEngine)):
        report = run_step(one.context(merging(one)), engine())
        assert report.in_process_batches == (engine is SmallBatchesInProcess)
        digest = one.streams.state("merged").state.producers["merging"][-1].digest
        with sqlite3.connect(one.folder / "small.sqlite") as connection:
            stored = connection.execute("SELECT k, v FROM small ORDER BY k").fetchall()
        letters = rows(one, "letters")
        # and names the file
        assert all("CHECK constraint" in letter.pop("problem") for letter in letters)
        left.append((rows(one, "merged"), letters, digest, stored, report.counters))
    assert len(left[0][0]) == 6
    assert sorted(letter["key"] for letter in left[0][1]) == ['"b"', '"c"']
    assert left[1] == left[0]


def calling(world: StepWorld) -> Application:
    """Return several records of each, and what a function makes of a record and its entry."""
    app = Application("calling", engine="auto")
    orders = app.input_stream("lake.orders", default_offset="oldest")

    def parts(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for number in range(record["size"] or 0):
            yield {"shop": record["shop"], "number": number}

    def place(record: dict[str, Any], entry: dict[str, Any] | None) -> dict[str, Any] | None:
        return (
            None
            if entry is None and record["number"]
            else {"place": f"{record['shop']} in {entry and entry['city']}"}
        )

    made = orders.flat_map(parts, schema=Schema.of(shop="string", number="int"))
    shops = app.table(datasets()[0])
    placed = made.partition_by("shop", partitions=2).join(
        shops, on="shop", how="left", function=place, schema=Schema.of(place="string")
    )
    placed.send_to(app.output_stream("lake.placed", partitions=2, key="shop"))
    return app


@pytest.mark.spark
def test_functions_of_records_give_the_same(world: StepWorld) -> None:
    world.send(
        "orders",
        (1, "a", 3, None),
        (2, None, 2, None),
        (3, "b", 0, None),
        (4, "ß", 1, None),
        (5, "x", 2, None),
    )
    left = []
    for one, engine in ((twin_of(world), SmallBatchesInProcess), (world, BatchEngine)):
        report = run_step(one.context(calling(one)), engine())
        assert report.in_process_batches == (engine is SmallBatchesInProcess)
        sent = one.streams.state("placed").state.producers["calling"][-1].digest
        left.append((rows(one, "placed"), sent, report.counters))
    places = ["None in None", "a in Ulm", "a in Ulm", "a in Ulm", "x in None", "ß in None"]
    assert sorted(row["place"] for row in left[0][0]) == places
    assert left[1] == left[0]


def no_session() -> SparkSession:
    raise AssertionError("a session was started")


def without_spark(world: StepWorld) -> StepWorld:
    return replace(world, spark=IN_PROCESS)


def test_no_session_is_started(world: StepWorld) -> None:
    world = without_spark(world)
    for number in range(3):
        world.send("orders", (number, "a", 1, None))
        assert run(world, SmallBatchesInProcess).in_process_batches == 1
    assert [row["id"] for row in rows(world, "priced")] == [0, 1, 2]


def test_a_batch_of_many_records_is_left_to_spark(world: StepWorld) -> None:
    app, world = declare(world, exact_table(world)), replace(world, spark=no_session)
    world.send("orders", (1, "a", 1, None), (2, "a", 1, None))
    app.few_records = 1
    with pytest.raises(AssertionError, match="a session was started"):
        run_step(world.context(app))
    # which has nobody to leave it to
    app, world = (declare(world, exact_table(world)), without_spark(world))
    app.few_records = 1
    assert run_step(world.context(app)).in_process_batches == 1


def test_what_needs_spark_is_refused_by_name_where_there_is_none(world: StepWorld) -> None:
    world = without_spark(world)
    world.send("orders", (1, "a", 2**31 - 1, None))
    with pytest.raises(
        errors.ConfigurationError, match=r"with-columns-\d+: an overflow"
    ) as refused:
        run(world, SmallBatchesInProcess)
    assert refused.value.application == "shopping"
    app = Application("loud", engine="auto")
    app.input_stream("lake.orders").filter("shop rlike 'a'").send_to(
        app.output_stream("lake.loud", partitions=1)
    )
    with pytest.raises(errors.ConfigurationError, match=r"filter-2: .* in shop rlike 'a'"):
        run_application(app, lake=world.lake, spark=IN_PROCESS)
    assert world.state(app).open is None


@pytest.mark.spark
def test_a_bounded_replay_leaves_the_same(twins: dict[str, StepWorld]) -> None:
    left = []
    for name, world in twins.items():
        run(world, ENGINES[name])
        app = declare(world, exact_table(world))
        startpoints = Startpoints(app, lake=world.lake)
        startpoints.request(
            "lake.orders", StartpointOldest(), until=StartpointUpcoming(), reason="again", by="test"
        )
        report = run(world, ENGINES[name])
        assert report.in_process_batches == (report.batches if name == "auto" else 0)
        left.append((left_by(world), report.counters))
    assert len(left[0][0]["enriched"]) == 8
    assert left[1] == left[0]


@pytest.mark.spark
def test_spark_computes_a_batch_whose_values_it_must_judge(world: StepWorld) -> None:
    """The sum exceeds an int."""
    world.send("orders", (1, "a", 2**31 - 1, None))
    events: list[StepEvent] = []
    with pytest.raises(errors.AdjunctError, match="overflow"):
        run(world, SmallBatchesInProcess, on_event=events.append)
    assert any("Spark computes the batch" in str(event.detail.get("text")) for event in events)


def test_few_changes_and_small_versions_of_datasets_need_no_session(world: StepWorld) -> None:
    app = declare(world, exact_table(world))
    world.send("shops", ("c", "Bonn", None), version="2")
    world.send("prices", ("c", 1, 40), deleted=[("a", 1, None)])
    world.send("orders", (1, "c", 1, None))
    report = run_application(app, lake=world.lake, spark=no_session)
    assert [done.version is not None for done in report.datasets] == [True, True]
    assert report.step.in_process_batches == 1
    assert [(row["id"], row["city"]) for row in rows(world, "priced")] == [(1, "Bonn")]
    app.few_records, app.engine = 0, "spark"
    world.send("shops", ("d", "Kiel", None), version="3")
    with pytest.raises(AssertionError, match="a session was started"):
        run_application(app, lake=world.lake, spark=no_session)


def test_the_plan_says_what_needs_spark(world: StepWorld) -> None:
    app = Application("shouting", engine="auto")
    loud = app.input_stream("lake.orders").with_columns(loud="regexp_replace(shop, 'a', 'b')")
    loud.send_to(app.output_stream("lake.loud", partitions=1))
    plan = plan_application(app, systems=world.systems)
    (need,) = plan.engine.needs_spark
    assert need.operator == "with-columns-2"
    assert "regexp_replace" in need.what
    assert f"with-columns-2: {need.what}" in plan.render()
    context = world.context(app)
    assert type(choose_engine(context)) is BatchEngine


def test_the_default_engine_is_spark(world: StepWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Application("one").engine == "spark"
    monkeypatch.setenv("ADJUNCT_ENGINE", "auto")
    assert Application("two").engine == "auto"
    monkeypatch.setenv("ADJUNCT_ENGINE", "sparc")
    with pytest.raises(errors.ConfigurationError) as refused:
        Application("three")
    assert refused.value.setting == "ADJUNCT_ENGINE"


def test_records_keep_their_hidden_columns(world: StepWorld) -> None:
    world = without_spark(world)
    world.send("orders", (1, "a", 1, None), (2, "b", 1, None))
    run(world, SmallBatchesInProcess)
    for row in rows(world, "enriched"):
        assert set(RECORD_META) - {"__timestamp"} < set(row)
        assert row["__source"].startswith("lake.orders.")

"""Few records are read and written by this process, around one query of Spark: the same as by
tasks, and kept short.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step import batch as spark_batch
from dagster_adjunct.orchestration.step.context import BatchMetrics, StepContext
from dagster_adjunct.orchestration.step.engines import BatchEngine
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.tables.shared_rate import RunCredits
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.step_world import ByTasks, StepWorld, twin_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.step.progress import StepEvent

pytestmark = pytest.mark.spark

TYPES = {
    "b": "boolean",
    "i1": "tinyint",
    "i2": "smallint",
    "i8": "bigint",
    "f4": "float",
    "f8": "double",
    "d": "decimal(38,10)",
    "s": "string",
    "x": "binary",
    "day": "date",
    "at": "timestamp",
}
MOMENT = dt.datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=dt.UTC)
FULL: dict[str, Any] = {
    "b": True,
    "i1": -128,
    "i2": 32767,
    "i8": -(2**63),
    "f4": 0.1,
    "f8": float("nan"),
    "d": Decimal("-12345678901234567890.0123456789"),
    "s": "ß" * 40,
    "x": b"\x00\xff",
    "day": dt.date(1582, 10, 4),
    "at": MOMENT,
}
EMPTY: dict[str, Any] = dict.fromkeys(TYPES)
HALF: dict[str, Any] = EMPTY | {"f8": -0.0, "f4": float("inf"), "s": "", "x": b""}


def typed(world: StepWorld) -> Application:
    """Records of all types, joined with entries of all types, sent on by way of one stream to the
    next, and to a table of another."""
    world.stream("things", "k", 3, k="int", **TYPES)
    world.stream("kinds", "k", 2, k="int", **TYPES)
    app = Application("typed")
    kinds = app.table(bounded_dataset("kinds", input="lake.kinds", key="k", partitions=2))
    things = app.input_stream("lake.things").partition_by("k", partitions=2)
    found = things.join(kinds, on="k", how="left", prefix="of_")
    nested = found.with_columns(
        made="if(k = 2, null, struct(1 as one, array(map(coalesce(s, ''), d)) as several))"
    )
    whole = nested.select(
        "k",
        *TYPES,
        *(f"of_{name}" for name in TYPES),
        "made.one as one",
        "map_values(made.several[0])[0] as deep",
    )
    sent = whole.send_to(app.output_stream("lake.whole", partitions=3, key="k"))
    sent.filter("k > 1").send_to(app.output_stream("lake.again", partitions=1))
    return app


def left_by(world: StepWorld, producer: str, *streams: str) -> list[Any]:
    """Return what streams hold: records with their positions, but not when they were appended,
    and digests.
    """
    left: list[Any] = []
    for stream in streams:
        rows = world.streams.read_arrow(
            world.streams.all_ranges(stream), positions=True
        ).drop_columns(["__timestamp"])
        left.append((rows.schema, repr(rows.to_pylist())))
        left.append([sent.digest for sent in world.streams.state(stream).state.producers[producer]])
    return left


def test_records_of_all_types_are_those_that_tasks_write(step_world: StepWorld) -> None:
    app = typed(step_world)
    step_world.send(
        "kinds", *[(k, *row.values()) for k, row in ((1, FULL), (2, EMPTY), (3, HALF))], version="1"
    )
    step_world.send(
        "things", *[(k, *row.values()) for k, row in ((1, EMPTY), (2, HALF), (3, FULL), (4, FULL))]
    )
    step_world.advance(*app.datasets)
    other = twin_of(step_world)
    reports = [run_step(step_world.context(app)), run_step(other.context(app), ByTasks())]
    assert reports[0].counters == reports[1].counters
    assert left_by(step_world, "typed", "whole", "again") == left_by(
        other, "typed", "whole", "again"
    )


def cached(spark: SparkSession) -> int:
    """Return how many frames the session keeps."""
    manager = spark._jsparkSession.sharedState().cacheManager()  # type: ignore[union-attr]
    field = manager.getClass().getDeclaredField("cachedData")
    field.setAccessible(True)
    return int(field.get(manager).size())


def joined(dataset: AdjunctDataset, **options: Any) -> Application:
    app = Application("app", max_batch_records=2, **options)
    trips = app.input_stream("lake.trips").join(app.table(dataset), on="k", how="left")
    trips.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    return app


@pytest.fixture
def world(step_world: StepWorld) -> StepWorld:
    step_world.stream("trips", "k", 2, k="string", v="int")
    step_world.stream("planes", "k", 2, k="string", seats="int")
    return step_world


PLANES = bounded_dataset("planes", input="lake.planes", key="k", partitions=2)
FOLLOWED = unbounded_dataset("planes", input="lake.planes", key="k", partitions=2)


class Kept(BatchEngine):
    """Notes how many frames the session keeps after each batch."""

    def __init__(self) -> None:
        self.frames: list[int] = []

    def run(self, context: Any, inputs: Any, before_output: Any) -> Any:
        done = super().run(context, inputs, before_output)
        self.frames.append(cached(context.spark()))
        return done


def test_a_version_is_kept_over_the_batches_that_read_it_and_let_go_at_the_end_of_the_run(
    world: StepWorld,
) -> None:
    world.send("planes", ("a", 1), ("b", 2), version="1")
    world.send("trips", *[("a", number) for number in range(6)])
    world.advance(PLANES)
    before, kept = cached(world.spark()), Kept()
    report = run_step(world.context(joined(PLANES)), kept)
    assert report.batches == 3
    assert kept.frames == [before + 1] * 3
    assert cached(world.spark()) == before


def test_what_tasks_read_has_the_memory_of_what_is_kept(world: StepWorld) -> None:
    app = joined(PLANES)

    def leave_to_tasks(event: StepEvent) -> None:
        if event.what == "batch" and event.batch == 2:
            app.few_records = 0

    world.send("planes", ("a", 1), ("b", 2), version="1")
    world.send("trips", *[("a", number) for number in range(6)])
    world.advance(PLANES)
    before, kept = cached(world.spark()), Kept()
    assert run_step(world.context(app, on_event=leave_to_tasks), kept).batches == 3
    assert kept.frames == [before + 1, before + 1, before]


def test_batches_read_the_versions_that_are_served_by_then(world: StepWorld) -> None:
    def deliver(event: StepEvent) -> None:
        if event.what == "batch" and event.batch == 1:
            world.send("planes", ("a", 2))
            world.advance(FOLLOWED)

    world.send("planes", ("a", 1))
    world.advance(FOLLOWED)
    world.send("trips", ("a", 0), ("a", 1), ("a", 2))
    before, kept = cached(world.spark()), Kept()
    run_step(world.context(joined(FOLLOWED), on_event=deliver), kept)
    assert sorted((row["v"], row["seats"]) for row in world.rows("out")) == [(0, 1), (1, 1), (2, 2)]
    assert kept.frames == [before + 1] * 2
    assert cached(world.spark()) == before


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the applications of the small batches that are made, as they are made."""
    made: list[str] = []

    def noted(context: StepContext, *given: Any) -> BatchMetrics:
        made.append(context.app.name)
        return spark_batch.run_small_batch(context, *given)

    monkeypatch.setattr("dagster_adjunct.orchestration.step.engines.run_small_batch", noted)
    return made


def exploding(app: Application) -> None:
    app.input_stream("lake.trips").flat_map("array(v, v + 1) as v").send_to(
        app.output_stream("lake.out", partitions=1)
    )


def plain(app: Application) -> None:
    app.input_stream("lake.trips").filter("v > 0").send_to(
        app.output_stream("lake.out", partitions=1)
    )


def called(app: Application) -> None:
    trips = app.input_stream("lake.trips").map(lambda frame: frame.where("v > 0"))
    trips.send_to(app.output_stream("lake.out", partitions=1))


@pytest.mark.parametrize(("declare", "small"), [(plain, 1), (exploding, 0), (called, 0)])
def test_what_may_become_many_is_left_to_tasks(
    world: StepWorld,
    declare: Callable[[Application], None],
    small: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = Application("app")
    declare(app)
    world.send("trips", ("a", 1), ("b", 2))
    made = counting(monkeypatch)
    run_step(world.context(app))
    assert len(made) == small
    assert len(world.rows("out")) == (4 if declare is exploding else 2)


LIMITS = {
    "records": {"SMALL_BYTES": 60},
    "entries": {"SMALL_BYTES": 400},
    "rows": {"SMALL_ROWS": 1},
}


@pytest.mark.parametrize("large", ["records", "entries", "rows"])
def test_what_is_large_is_left_to_tasks(
    world: StepWorld, large: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.send("planes", ("a", 1), ("b", 2), version="1")
    world.advance(PLANES)
    app = joined(PLANES)
    made = counting(monkeypatch)
    for limits in ({}, LIMITS[large]):
        for name, limit in limits.items():
            monkeypatch.setattr(spark_batch, name, limit)
        world.send("trips", ("a", 1), ("b", 2))
        run_step(world.context(app))
    assert len(made) == 1
    assert len(world.rows("out")) == 4


def test_rows_that_are_large_are_written_by_tasks_alike(
    world: StepWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def declare(world: StepWorld) -> Application:
        app = Application("app")
        table = app.table(world.table())
        trips = app.input_stream("lake.trips").with_columns(
            text="repeat(k, 80000)", small="named_struct('of', k)"
        )
        sent = trips.select("k", "v", "text", "small.of as of").send_to(
            app.output_stream("lake.out", partitions=2, key="k")
        )
        sent.filter("v > 0").select("k", "of").send_to(
            app.output_stream("lake.again", partitions=1)
        )
        sent.select("of as k", "v", "length(text) as w").send_to(table)
        sent.map("concat(k, text) as k", "v", "1 as w").send_to(table)
        return app

    monkeypatch.setattr(spark_batch, "SMALL_BYTES", 100_000)
    world.send("trips", ("a", 0), ("b", 1), ("c", 2))
    made, other = counting(monkeypatch), twin_of(world)
    reports = [
        run_step(world.context(declare(world))),
        run_step(other.context(declare(other)), ByTasks()),
    ]
    assert made == ["app"]
    assert reports[0].counters["lake.out"] == reports[1].counters["lake.out"]
    assert left_by(world, "app", "out", "again") == left_by(other, "app", "out", "again")
    assert world.records() == other.records()
    assert len(world.records()) == 6


def unreadable(world: StepWorld) -> Application:
    app = Application("app")
    trips = app.input_stream("lake.trips").with_columns(day="make_date(10000 + v, 1, 1)")
    trips.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    return app


def differing(world: StepWorld) -> Application:
    app = Application("app")
    store = world.table().read_function
    table = RemoteTable(
        "things", key="k", read_function=store, write_function=store, idempotent=True
    )
    trips = app.input_stream("lake.trips").with_columns(part="rand()")
    trips.merge(trips).update(app.table(table), add={"w": "1"}, if_missing=[])
    return app


@pytest.mark.parametrize("declare", [unreadable, differing])
def test_errors_are_those_of_tasks(
    world: StepWorld, declare: Callable[[StepWorld], Application]
) -> None:
    world.send("trips", ("a", 1), ("a", 2), ("a", 3), ("a", 4), *[("a", 5)] * 20)
    other, reported = twin_of(world), []
    for one, engine in ((world, None), (other, ByTasks())):
        with pytest.raises(AdjunctError) as raised:
            run_step(one.context(declare(one)), engine)
        reported.append((type(raised.value), str(raised.value), raised.value.facts))
    assert reported[0] == reported[1]


def test_tables_are_given_as_tasks_may_use_them(
    world: StepWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, given = Application("app"), []
    table, sink = app.table(world.table()), app.table(world.table("others"))
    found = app.input_stream("lake.trips").join(
        table, on="k", select={"v": "int"}, how="left", prefix="of_"
    )
    found.select("k", "v", "of_v as w").send_to(sink)

    def with_credits(credits: RunCredits, table: Any, spark: object) -> Any:
        given.append((table.name, spark))
        return table

    monkeypatch.setattr(RunCredits, "with_credits", with_credits)
    world.send("trips", ("a", 1))
    made = counting(monkeypatch)
    run_step(world.context(app))
    assert made == ["app"]
    # the first stays open for large batches
    assert given == [("things", world.spark()), ("others", world.spark())]

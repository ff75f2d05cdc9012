"""Applications beside change streams: plain, bootstrap, broadcast and failover (the seed's plan),
and freshness.

Each is a whole run over streams of a lake. Physical plans must be what the planner proved
(conftest.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.transient_table import is_transient
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.maintenance.expire import versions_in_open_batches
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.orchestration.step.run import RunReport, run_application
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import (
    BadChangeError,
    ConfigurationError,
    NoSealedVersionError,
    OffsetOutOfRangeError,
    StaleDatasetError,
)
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.lake.manifest import Retention, list_segments
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.clocks import on_clock
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.orchestration.executed_plans import executed_plans
from tests.orchestration.step_world import StepWorld, crash_at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

Heard = Callable[[StepEvent | AdvanceReport], None]
MINUTES = timedelta(minutes=10)


@pytest.fixture
def world(step_world: StepWorld) -> StepWorld:
    step_world.stream("trips", "tailnum", 2, tailnum="string", v="int")
    step_world.stream("planes", "tailnum", 2, tailnum="string", seats="int")
    return step_world


def planes(*, broadcast: bool = False, **options: Any) -> AdjunctDataset:
    spread: dict[str, Any] = {"broadcast": True} if broadcast else {"partitions": 2}
    return unbounded_dataset("planes", input="lake.planes", key="tailnum", **spread, **options)


def enriching(
    dataset: AdjunctDataset, *, limit: int = 100, max_staleness: timedelta | None = None
) -> Application:
    app = Application("app", max_batch_records=limit, few_records=0)
    trips = app.input_stream("lake.trips")
    joined = trips.join(app.table(dataset, max_staleness=max_staleness), on="tailnum", how="left")
    joined.send_to(app.output_stream("lake.out", partitions=2, key="tailnum"))
    return app


def run(
    world: StepWorld, app: Application, *, run: str = "run-1", on_event: Heard = lambda event: None
) -> RunReport:
    return run_application(
        app, lake=world.lake, systems=world.systems, spark=world.spark, run=run, on_event=on_event
    )


def enriched(world: StepWorld) -> list[tuple[int, int | None]]:
    return sorted((row["v"], row["seats"]) for row in world.rows("out"))


def after_batch(number: int, do: Callable[[], None]) -> Heard:
    def received(event: StepEvent | AdvanceReport) -> None:
        if isinstance(event, StepEvent) and (event.what, event.batch) == ("batch", number):
            do()

    return received


# -- the seed's plan


def test_plain_a_dataset_is_followed_while_its_records_are_joined(world: StepWorld) -> None:
    """Not marked for bootstrap: followed at the same time as the main input, so a later batch
    meets more.
    """
    world.send("planes", ("N1", 100))
    world.send("trips", ("N1", 1), ("N1", 2), ("N1", 3))
    app = enriching(planes(bootstrap=False), limit=1)
    report = run(world, app, on_event=after_batch(1, lambda: world.send("planes", ("N1", 111))))
    assert enriched(world) == [(1, 100), (2, 111), (3, 111)]
    assert [(advanced.dataset, advanced.action) for advanced in report.datasets] == [
        ("planes", "applied"),
        ("planes", "applied"),
    ]
    assert len(report.step.versions["planes"]) == 2
    assert set(map(str, report.step.state.checkpoint)) == {"lake.trips.0", "lake.trips.1"}, (
        "what it takes is not delivered"
    )


def test_plain_a_dataset_that_is_marked_is_advanced_once_before_the_batches(
    world: StepWorld,
) -> None:
    world.send("planes", ("N1", 100))
    world.send("trips", ("N1", 1), ("N1", 2))
    app = enriching(planes(), limit=1)
    run(world, app, on_event=after_batch(1, lambda: world.send("planes", ("N1", 111))))
    assert enriched(world) == [(1, 100), (2, 100)]


def test_plain_a_stream_that_the_application_reads_also_feeds_its_dataset(world: StepWorld) -> None:
    world.send("planes", ("N1", 100), ("N2", 200))
    app = Application("app", few_records=0)
    table = app.table(planes())
    app.input_stream("lake.planes").join(table, on="tailnum", select=["seats as known"]).send_to(
        app.output_stream("lake.out", partitions=2, key="tailnum")
    )
    report = run(world, app)
    assert sorted((row["seats"], row["known"]) for row in world.rows("out")) == [
        (100, 100),
        (200, 200),
    ]
    assert set(map(str, report.step.state.checkpoint)) == {"lake.planes.0", "lake.planes.1"}


@pytest.mark.parametrize("persistent", [True, False], ids=["stored", "one run"])
def test_bootstrap_no_record_of_the_main_input_is_read_before_the_snapshot(
    world: StepWorld, persistent: bool
) -> None:
    planes_then = [(f"N{i}", i) for i in range(20)]
    world.send("planes", *planes_then)
    world.send("planes", ("N1", 111), deleted=[("N2", None)])
    world.send("trips", *planes_then)
    app = enriching(planes(persistent=persistent))
    if persistent:
        with pytest.raises(NoSealedVersionError) as caught:
            run_step(world.context(app))
        assert caught.value.dataset == "planes"
        assert BatchLog(world.lake, "app").read()[0] is None
    events: list[str] = []

    def received(event: StepEvent | AdvanceReport) -> None:
        events.append(event.what if isinstance(event, StepEvent) else event.action)

    run(world, app, on_event=received)
    built = "bootstrapped" if persistent else "table"
    assert events == [
        "planned",
        built,
        "analysis",
        "intent",
        "output",
        "outputs",
        "batch",
        "caught-up",
    ]
    expected: dict[int, int | None] = {i: i for i in range(20)}
    expected |= {1: 111, 2: None}
    assert enriched(world) == sorted(expected.items())


@pytest.mark.parametrize(
    "persistent",
    [pytest.param(True, id="stored", marks=pytest.mark.long), pytest.param(False, id="one run")],
)
def test_broadcast_one_copy_is_read_by_all_tasks(world: StepWorld, persistent: bool) -> None:
    world.stream("airports", "faa", 1, faa="string", name="string")
    world.stream("stops", "v", 3, v="int", at="string")
    world.send("airports", ("JFK", "Kennedy"), ("LGA", "La Guardia"))
    airports = unbounded_dataset(
        "airports", input="lake.airports", key="faa", broadcast=True, persistent=persistent
    )
    app = Application("app", max_batch_records=12, few_records=0)
    stops = app.input_stream("lake.stops").join(app.table(airports), on={"at": "faa"}, how="left")
    stops.send_to(app.output_stream("lake.out", partitions=3, key="v"))
    world.send("stops", *[(i, "JFK" if i % 2 else "LGA") for i in range(12)])
    run(world, app)
    assert {row["v"]: row["name"] for row in world.rows("out")} == {
        i: "Kennedy" if i % 2 else "La Guardia" for i in range(12)
    }
    partitions = world.streams.upcoming(world.streams.partitions("stops"))
    assert all(end != "0" for end in partitions.values()), "each task had records"


@pytest.mark.parametrize(
    ("crash", "persistent"),
    [
        pytest.param("intent", True, id="intent-stored", marks=pytest.mark.long),
        pytest.param("outputs", False, id="outputs-one run"),
        pytest.param("outputs", True, id="outputs-stored", marks=pytest.mark.long),
        pytest.param("intent", False, id="intent-one run", marks=pytest.mark.long),
    ],
)
def test_failover_another_run_goes_on_with_the_versions_of_the_one_that_was_killed(
    world: StepWorld, persistent: bool, crash: str
) -> None:
    world.send("planes", ("N1", 100), ("N2", 200), ("N3", 300))
    world.send("planes", ("N3", 333), deleted=[("N2", None)])
    world.send("trips", ("N1", 1), ("N2", 2), ("N3", 3))
    app = enriching(planes(persistent=persistent))
    with pytest.raises(Crash):
        run(world, app, on_event=crash_at(crash))
    written = world.state(app).open
    assert written is not None
    assert is_transient(str(written.versions["planes"])) is not persistent
    world.send("planes", ("N1", 999), ("N2", 222), deleted=[("N3", None)])
    world.send("trips", ("N1", 4), ("N3", 5))
    intents = []

    def received(event: StepEvent | AdvanceReport) -> None:
        if isinstance(event, StepEvent) and event.what == "intent":
            intents.append(event.detail["versions"])

    report = run(world, app, run="run-2", on_event=received)
    assert intents[0] == written.versions != intents[1]
    assert report.step.counters["lake.out"]["duplicate_batches"] == (1 if crash == "outputs" else 0)
    assert enriched(world) == [(1, 100), (2, None), (3, 333), (4, 999), (5, None)]


def test_failover_a_batch_whose_changes_retention_deleted_is_rejected_by_name(
    world: StepWorld,
) -> None:
    world.send("planes", ("N1", 100), ("N2", 200), ("N3", 300))
    world.send("trips", ("N1", 1))
    app = enriching(planes(persistent=False))
    with pytest.raises(Crash):
        run(world, app, on_event=crash_at("intent"))
    written = world.state(app).open
    world.send("planes", ("N1", 1))
    world.streams.configure("planes", retention=Retention(max_bytes=1), compaction=None)
    world.streams.maintain("planes")
    with pytest.raises(
        OffsetOutOfRangeError, match="the open batch began with offsets 0 to"
    ) as caught:
        run(world, app, run="run-2")
    assert caught.value.dataset == "planes"
    assert world.state(app).open == written


# -- followed between batches


def test_a_followed_dataset_that_somebody_else_advances_too_does_not_end_the_run(
    world: StepWorld,
) -> None:
    """Somebody else commits the change that comes after the first batch a moment before the run
    would.
    """
    world.send("planes", ("N1", 100))
    world.send("trips", ("N1", 1), ("N1", 2))
    dataset, store = planes(bootstrap=False), FaultyStore(world.lake.store)
    pointer = f"{world.lake.dataset_prefix('planes')}/CURRENT"
    others: list[str] = []

    def overtake() -> None:
        world.advance(dataset)
        others.append(StoredVersions(world.lake, "planes").require_current().version)

    def hear(event: StepEvent | AdvanceReport) -> None:
        if isinstance(event, StepEvent) and (event.what, event.batch) == ("batch", 1):
            world.send("planes", ("N1", 101))
            made = store.requests.count(("put_if_match", pointer))
            store.plan = (Fault("put_if_match", made + 1, "meanwhile", overtake, below=pointer),)

    over = replace(world, lake=Lake(store, world.lake.id))
    report = run(over, enriching(dataset, limit=1), on_event=hear)
    assert report.step.batches == 2
    assert others == [StoredVersions(world.lake, "planes").require_current().version]
    assert enriched(world) == [(1, 100), (2, 101)]


# -- max_staleness


def late_change(world: StepWorld, sequence: int, tailnum: str, seats: int) -> None:
    """Append a change as of an hour ago."""
    schema = world.streams.info("planes").schema
    assert schema is not None
    row = pa.table(
        {"tailnum": [tailnum], "seats": pa.array([seats], pa.int32())}, schema.to_arrow()
    )
    LakeStreams(on_clock(world.lake, lambda: datetime.now(UTC) - timedelta(hours=1))).append(
        "planes", row, producer="late", sequence=sequence
    )


def test_a_batch_does_not_begin_with_a_table_that_is_staler_than_is_allowed(
    world: StepWorld,
) -> None:
    table = planes()
    world.advance(table)
    world.send("trips", ("N1", 1))
    app = enriching(table, max_staleness=MINUTES)
    late_change(world, 1, "N1", 100)
    with pytest.raises(StaleDatasetError, match="0:10:00 is allowed") as caught:
        run_step(world.context(app))
    assert caught.value.dataset == "planes"
    assert world.state(app).open is None
    world.advance(table)
    run_step(world.context(app))
    world.send("planes", ("N1", 111))
    world.send("trips", ("N1", 2))
    run_step(world.context(app))
    assert enriched(world) == [(1, 100), (2, 100)], "what is missing then is young enough"


def test_an_open_batch_is_run_as_it_was_written_however_stale_its_table_is(
    world: StepWorld,
) -> None:
    table = planes()
    world.advance(table)
    world.send("trips", ("N1", 1))
    app = enriching(table, max_staleness=MINUTES)
    with pytest.raises(Crash):
        run_step(world.context(app, on_event=crash_at("intent")))
    late_change(world, 1, "N1", 111)
    world.send("trips", ("N1", 2))
    with pytest.raises(StaleDatasetError):
        run_step(world.context(app, run="run-2"))
    assert world.state(app).batch == 1
    assert enriched(world) == [(1, None)]


def test_a_table_that_has_taken_in_nothing_is_not_fresh(world: StepWorld) -> None:
    world.send("trips", ("N1", 1))
    app = enriching(planes(bootstrap=False), max_staleness=MINUTES)
    with pytest.raises(StaleDatasetError, match="no entries yet") as caught:
        run_step(world.context(app))
    assert caught.value.dataset == "planes"


def test_freshness_can_be_demanded_of_change_streams_only(world: StepWorld) -> None:
    app = Application("app", few_records=0)
    fixed = bounded_dataset("fixed", input="lake.planes", key="tailnum", partitions=2)
    with pytest.raises(ConfigurationError) as caught:
        app.table(fixed, max_staleness=MINUTES)
    assert (caught.value.table, caught.value.argument) == ("fixed", "max_staleness")
    with pytest.raises(ConfigurationError) as caught:
        app.table(world.table(), max_staleness=MINUTES)  # type: ignore[call-overload]
    assert (caught.value.table, caught.value.argument) == ("things", "max_staleness")
    for limit in (timedelta(0), 5, "10m"):
        with pytest.raises(ConfigurationError) as failure:
            app.table(planes(), max_staleness=limit)  # type: ignore[arg-type]
        assert failure.value.argument == "max_staleness"
    assert app.table(planes(), max_staleness=MINUTES).max_staleness == MINUTES
    assert app.max_staleness == {"planes": MINUTES}


# -- tables of one run


def test_a_table_of_one_run_is_kept_current_between_batches_and_let_go_after(
    world: StepWorld, spark: SparkSession
) -> None:
    def kept() -> int:
        return int(spark.sparkContext._jsc.getPersistentRDDs().size())

    before = kept()
    world.send("planes", ("N1", 100), ("N2", 200))
    world.send("trips", ("N1", 1), ("N1", 2), ("N2", 3))
    app = enriching(planes(persistent=False), limit=1, max_staleness=MINUTES)
    during: list[int] = []

    def changed() -> None:
        during.append(kept() - before)
        world.send("planes", ("N1", 111), deleted=[("N2", None)])

    summaries: list[str] = []

    def received(event: StepEvent | AdvanceReport) -> None:
        after_batch(1, changed)(event)
        if isinstance(event, StepEvent) and event.what == "table":
            summaries.append(event.summary())

    report = run(world, app, on_event=received)
    joined = dict(enriched(world))
    assert joined in ({1: 100, 2: 111, 3: None}, {1: 111, 2: 111, 3: 200}), (
        "the first batch met the first version"
    )
    assert (during, kept()) == ([1], before)
    assert [text.split(";")[0] for text in summaries] == [
        "dataset planes: bootstrapped",
        "dataset planes: applied",
    ]
    assert report.datasets == (), "nothing is stored, so nothing is advanced before"
    assert len(report.step.versions["planes"]) == 2
    assert StoredVersions(world.lake, "planes").manifest() is None


def test_a_table_of_one_run_that_is_not_marked_goes_on_where_the_last_batch_ended(
    world: StepWorld,
) -> None:
    app = enriching(planes(persistent=False, bootstrap=False))
    world.send("planes", ("N1", 100))
    world.send("trips", ("N1", 1))
    run(world, app)
    world.send("planes", ("N2", 200))
    world.send("trips", ("N1", 2), ("N2", 3))
    run(world, app)
    assert enriched(world) == [(1, 100), (2, None), (3, 200)]


def test_an_open_batch_meets_what_retention_left_of_a_table_of_one_run(world: StepWorld) -> None:
    app = enriching(planes(persistent=False, bootstrap=False))
    world.send("planes", ("N1", 100))
    world.send("planes", ("N2", 200))
    world.send("trips", ("N1", 1), ("N2", 2))
    with pytest.raises(Crash):
        run(world, app, on_event=crash_at("outputs"))
    assert enriched(world) == [(1, 100), (2, 200)]
    newest = list(
        list_segments(world.streams.state("planes").state, world.streams.files_of("planes"))
    )[-1]
    world.streams.configure("planes", retention=Retention(max_bytes=newest.size), compaction=None)
    world.streams.maintain("planes")
    world.send("trips", ("N1", 3), ("N2", 4))
    reported: list[str] = []
    run(world, app, on_event=lambda event: reported.append(event.summary()))
    assert [text for text in reported if "retention has deleted changes" in text]
    assert enriched(world) == [(1, 100), (2, 200), (3, None), (4, 200)], "what the output had stays"


@pytest.mark.parametrize("broadcast", [False, True], ids=["partitioned", "broadcast"])
def test_a_join_with_a_table_of_one_run_moves_neither_side(
    world: StepWorld, broadcast: bool
) -> None:
    """Bucket i belongs to task i, also by a part of the key; of a broadcast copy only the copy
    is sent.
    """
    world.stream("seen", "tailnum", 2, tailnum="string", v="int", where="string")
    spread: dict[str, Any] = (
        {"broadcast": True} if broadcast else {"partitions": 2, "partition_by": "tailnum"}
    )
    seen = unbounded_dataset(
        "seen", input="lake.seen", key=["tailnum", "v"], persistent=False, **spread
    )
    app = Application("app", few_records=0)
    trips = app.input_stream("lake.trips").join(app.table(seen), on=["tailnum", "v"])
    trips.send_to(app.output_stream("lake.out", partitions=2, key="tailnum"))
    world.send("seen", ("N1", 1, "JFK"), ("N1", 2, "LGA"), ("N2", 1, "EWR"))
    world.send("trips", ("N1", 2), ("N2", 1), ("N2", 2))
    with executed_plans(world.spark()) as plans:
        run(world, app)
    assert sorted(row["where"] for row in world.rows("out")) == ["EWR", "LGA"]
    (plan,) = (plan for plan in plans if "Join" in plan)
    assert ("BroadcastExchange" in plan, "SortMergeJoin" in plan) == (broadcast, not broadcast)
    assert "Exchange" not in plan.replace("BroadcastExchange", "")


def test_an_empty_table_of_one_run_needs_no_exchange_either(world: StepWorld) -> None:
    world.send("trips", ("N1", 1))
    run(world, enriching(planes(persistent=False)))
    assert enriched(world) == [(1, None)]


def test_a_run_with_nothing_to_read_does_not_build_it(world: StepWorld) -> None:
    world.send("planes", ("N1", 100))

    def no_spark() -> SparkSession:
        raise AssertionError("there was nothing to compute")

    app = enriching(planes(persistent=False))
    report = run_application(
        app, lake=world.lake, systems=world.systems, spark=no_spark, run="run-1"
    )
    assert (report.step.batches, report.step.caught_up) == (0, True)


def test_a_bad_change_is_matched_before_the_batch_begins_and_leaves_no_open_intent(
    world: StepWorld,
) -> None:
    world.stream("unkeyed", [], 1, tailnum="string", seats="int")
    dataset = unbounded_dataset(
        "planes", input="lake.unkeyed", key="tailnum", partitions=2, persistent=False
    )
    world.send("unkeyed", (None, 1))
    world.send("trips", ("N1", 1))
    app = enriching(dataset)
    with pytest.raises(BadChangeError, match="null key column 'tailnum'"):
        run(world, app)
    assert world.state(app).open is None


def test_a_table_of_one_run_is_nothing_that_discarding_spares(world: StepWorld) -> None:
    world.send("trips", ("N1", 1))
    app = enriching(planes(persistent=False))
    with pytest.raises(Crash):
        run(world, app, on_event=crash_at("intent"))
    assert versions_in_open_batches(world.lake) == {}


def test_a_batch_that_was_begun_with_another_kind_of_table_is_run_with_that(
    world: StepWorld,
) -> None:
    world.send("planes", ("N1", 100))
    world.send("trips", ("N1", 1))
    with pytest.raises(Crash):
        run(world, enriching(planes(persistent=False)), on_event=crash_at("intent"))
    world.send("planes", ("N1", 111))
    world.send("trips", ("N1", 2))
    stored = enriching(planes())
    with pytest.raises(Crash):
        run(world, stored, run="run-2", on_event=crash_at("intent"))
    assert world.state(stored).batch == 0, "the open batch was taken over, with its ranges"
    run(world, stored, run="run-3")
    assert enriched(world) == [(1, 100), (2, 111)]
    world.send("trips", ("N1", 3))
    with pytest.raises(Crash):
        run(world, stored, run="run-4", on_event=crash_at("intent"))
    world.send("planes", ("N1", 122))
    run(world, enriching(planes(persistent=False)), run="run-5")
    assert enriched(world) == [(1, 100), (2, 111), (3, 111)]

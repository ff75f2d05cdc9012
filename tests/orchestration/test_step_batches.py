"""Batches: what is promised of intents, checkpoints, limits and runs that meet."""

from __future__ import annotations

import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, bounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    MalformedDocumentError,
    NoSealedVersionError,
    OffsetOutOfRangeError,
)
from dagster_adjunct.resources.streams.lake.manifest import Retention
from tests.faulty_store import Crash
from tests.orchestration.step_world import StepWorld, crash_at

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("either_engine")]


def planes(*, bootstrap: bool = True) -> AdjunctDataset:
    return bounded_dataset(
        "planes", input="lake.planes", key="tailnum", partitions=2, bootstrap=bootstrap
    )


def world_of_trips(world: StepWorld) -> None:
    world.stream("trips", "tailnum", 2, tailnum="string", v="int")
    world.stream("planes", "tailnum", 2, tailnum="string", seats="int")


def enriching(
    *, bootstrap: bool = True, limit: int = 100, offset: str | None = None
) -> Application:
    app = Application("app", max_batch_records=limit)
    trips = app.input_stream("lake.trips", default_offset=offset)  # type: ignore[arg-type]
    joined = trips.join(app.table(planes(bootstrap=bootstrap)), on="tailnum", how="left")
    joined.send_to(app.output_stream("lake.out", partitions=2, key="tailnum"))
    return app


def enriched(world: StepWorld) -> list[tuple[int, int | None]]:
    return sorted((row["v"], row["seats"]) for row in world.rows("out"))


def test_a_step_reads_nothing_while_a_dataset_it_must_wait_for_has_no_version(
    step_world: StepWorld,
) -> None:
    world_of_trips(step_world)
    step_world.send("trips", ("N1", 1))
    step_world.send("planes", ("N1", 100))
    step_world.streams.append_markers("planes", "v1", producer="marks", sequence=1, partitions=[1])
    app = enriching()
    with pytest.raises(
        NoSealedVersionError, match=r"'planes'.*'v1' waits since .* for .*lake\.planes\.0"
    ):
        step_world.run(app)
    assert BatchLog(step_world.lake, "app").read()[0] is None
    step_world.streams.append_markers("planes", "v1", producer="marks", sequence=2, partitions=[0])
    step_world.run(app)
    assert enriched(step_world) == [(1, 100)]


def test_a_dataset_that_holds_nothing_back_may_be_empty_at_first(step_world: StepWorld) -> None:
    world_of_trips(step_world)
    step_world.send("trips", ("N1", 1))
    app = enriching(bootstrap=False)
    step_world.run(app)
    assert enriched(step_world) == [(1, None)]


@pytest.mark.parametrize(
    "crash",
    [*(pytest.param(stage, marks=pytest.mark.long) for stage in ("intent", "output")), "outputs"],
)
def test_an_open_intent_is_run_again_as_written_whatever_has_arrived_since(
    step_world: StepWorld, crash: str
) -> None:
    world_of_trips(step_world)
    step_world.send("planes", ("N1", 100), version="v1")
    step_world.send("trips", ("N1", 1), ("N2", 2))
    app = enriching()
    with pytest.raises(Crash):
        step_world.run(app, on_event=crash_at(crash))
    written = step_world.state(app).open
    assert written is not None
    step_world.send("planes", ("N1", 999), ("N2", 222), version="v2")
    step_world.send("trips", ("N1", 3), ("N2", 4))
    batches = []
    report = step_world.run(app, run="run-2", on_event=lambda event: batches.append(event))
    assert report.batches == 2
    again, new = [event for event in batches if event.what == "intent"]
    assert again.detail["versions"] == written.versions
    assert again.detail["records"] == 2
    assert new.detail["versions"] != written.versions
    assert enriched(step_world) == [(1, 100), (2, None), (3, 999), (4, 222)]
    history = [
        state.last for _, state in BatchLog(step_world.lake, "app").history(20) if state.last
    ]
    first = next(done.intent for done in history if done.intent.batch == 1)
    assert first.model_copy(update={"run": written.run}) == written
    assert first.run == "run-2"


def test_a_second_run_takes_over_and_the_first_stops_before_it_writes(
    step_world: StepWorld,
) -> None:
    world_of_trips(step_world)
    step_world.send("planes", ("N1", 100), version="v1")
    step_world.send("trips", ("N1", 1))
    app = enriching()

    def overtaken(event: StepEvent) -> None:
        if event.what == "intent":
            assert step_world.run(app, run="second").batches == 1

    with pytest.raises(
        CommitConflictError, match=r"'app' was taken over by another run \(last commit by second"
    ):
        step_world.run(app, run="first", on_event=overtaken)
    assert enriched(step_world) == [(1, 100)]
    assert step_world.state(app).batch == 1


def test_a_run_that_is_overtaken_after_its_outputs_can_not_close_the_batch(
    step_world: StepWorld,
) -> None:
    world_of_trips(step_world)
    step_world.send("planes", ("N1", 100), version="v1")
    step_world.send("trips", ("N1", 1))
    app = enriching()

    def overtaken(event: StepEvent) -> None:
        if event.what == "outputs":
            step_world.run(app, run="second")

    with pytest.raises(CommitConflictError, match="second") as caught:
        step_world.run(app, run="first", on_event=overtaken)
    assert caught.value.application == "app"
    assert enriched(step_world) == [(1, 100)]
    last = step_world.state(app).last
    assert last is not None
    assert last.intent.run == "second"


def test_where_a_reader_begins_is_stored_before_it_reads(step_world: StepWorld) -> None:
    world_of_trips(step_world)
    step_world.send("planes", ("N1", 100), version="v1")
    step_world.send("trips", ("N1", 1), ("N2", 2))
    app = enriching(offset="upcoming")
    report = step_world.run(app)
    assert (report.batches, report.caught_up) == (0, True)
    stored = step_world.state(app).checkpoint
    upcoming = step_world.streams.upcoming(step_world.streams.partitions("trips"))
    assert stored == dict(upcoming)
    step_world.send("trips", ("N1", 3), ("N2", 4))
    step_world.run(app)
    assert enriched(step_world) == [(3, 100), (4, None)]


def test_batches_keep_to_the_limit_of_records_and_a_run_to_its_limit_of_batches(
    step_world: StepWorld,
) -> None:
    world_of_trips(step_world)
    step_world.send("planes", ("N1", 100), version="v1")
    step_world.send("trips", *[(f"N{i}", i) for i in range(10)])
    app = enriching(limit=4)
    first = step_world.run(app, max_batches=2)
    assert (first.batches, first.caught_up, first.state.records) == (2, False, 8)
    rest = step_world.run(app)
    assert (rest.batches, rest.caught_up, rest.state.records) == (1, True, 10)
    assert rest.versions["planes"] == first.versions["planes"]
    assert [value for value, _ in enriched(step_world)] == list(range(10))
    assert step_world.run(app).batches == 0


def test_a_checkpoint_behind_retention_is_rejected_before_an_intent_is_written(
    step_world: StepWorld,
) -> None:
    world_of_trips(step_world)
    step_world.send("planes", ("N1", 100), version="v1")
    step_world.send("trips", ("N1", 1))
    app = enriching()
    step_world.run(app)
    step_world.send("trips", ("N1", 2))
    step_world.send("trips", ("N1", 3))
    step_world.streams.configure("trips", retention=Retention(max_bytes=1), compaction=None)
    step_world.streams.maintain("trips")
    with pytest.raises(OffsetOutOfRangeError) as caught:
        step_world.run(app)
    assert caught.value.application == "app"
    assert step_world.state(app).open is None
    assert enriched(step_world) == [(1, 100)]


def test_a_malformed_batch_log_is_named_and_nothing_is_run(step_world: StepWorld) -> None:
    world_of_trips(step_world)
    step_world.send("planes", ("N1", 100), version="v1")
    step_world.send("trips", ("N1", 1))
    app = enriching()
    log = step_world.lake.commit_log("applications/app", "application")
    log.commit(None, {"checkpoint": {"lake.trips.0": 3}}, by="somebody")
    step_world.advance(planes())
    with pytest.raises(MalformedDocumentError) as caught:
        run_step(step_world.context(app))
    assert "applications/app/manifests/" in str(caught.value.document)
    assert "out" not in step_world.streams.list_streams()

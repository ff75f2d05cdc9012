"""A run that stays: what it looks at, how often, and for what it goes on, begins again or ends."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

from dagster_adjunct import (
    Application,
    Lake,
    LakeStreams,
    Schema,
    bounded_dataset,
    open_lake,
    run_application,
)
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.errors import (
    AdjunctError,
    ApplicationBusyError,
    CommitConflictError,
    ConfigurationError,
    RunLeaseLostError,
    StoreUnavailableError,
    StreamNotFoundError,
)
from dagster_adjunct.maintenance import delete_stream
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog, ClosedBatch
from dagster_adjunct.orchestration.batch_log.intent import Intent, JoinedVersions
from dagster_adjunct.orchestration.batch_log.run_lease import ask_to_end, asked_key, describe_runner
from dagster_adjunct.orchestration.step import following as module
from dagster_adjunct.orchestration.step import run as running
from dagster_adjunct.orchestration.step import step as step_module
from dagster_adjunct.orchestration.step.context import (
    BatchInputs,
    BatchMetrics,
    BatchVersions,
    StepContext,
    StepState,
)
from dagster_adjunct.orchestration.step.following import MAX_MEMORY, Following, Machine, Watched
from dagster_adjunct.orchestration.step.progress import MAX_VERSIONS, StepEvent, StepReport
from dagster_adjunct.orchestration.step.run import RunReport
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.objects import commit_log
from dagster_adjunct.resources.objects.store import ObjectInfo, ObjectStore
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.startpoints import StartpointOldest, Startpoints
from tests.assets.cycle import make_older
from tests.faulty_store import Crash, Fault, FaultyStore, deaths
from tests.orchestration.step_world import StepWorld
from tests.orchestration.stub_engine import StubEngine
from tests.rounds import rounds

HOUR = timedelta(hours=1)


@dataclass
class World:
    """What a run looks at, with a clock that only its pauses move; `due` has what happens at a
    time.
    """

    now: float = 0.0
    texts: dict[str, object] = field(
        default_factory=lambda: {"lake.a": "1", "lake.b": "1", "startpoints": None}
    )
    who: str | Exception = ""
    failure: Exception | None = None
    memory: int = 1
    asked: list[tuple[float, str]] = field(default_factory=list)
    due: dict[float, Callable[[], None]] = field(default_factory=dict)
    refreshed: list[float] = field(default_factory=list)
    holds: bool = True

    def look(self, name: str) -> object:
        self.asked.append((self.now, name))
        text = self.texts[name]
        if isinstance(text, Exception):
            raise text
        return text

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        for at in [at for at in self.due if at <= self.now]:
            self.due.pop(at)()

    def refresh(self) -> bool:
        self.refreshed.append(self.now)
        if self.failure is not None:
            raise self.failure
        return self.holds

    def ask(self) -> str:
        self.asked.append((self.now, "who"))
        if isinstance(self.who, Exception):
            raise self.who
        return self.who

    def following(
        self, lasts: timedelta = HOUR, say: Callable[[str], None] = print, **more: Any
    ) -> Following:
        watched = Watched(
            streams={
                name: lambda name=name: self.look(name)
                for name in self.texts
                if name != "startpoints"
            },
            startpoints=lambda: self.look("startpoints"),
            asked=self.ask,
            refresh=self.refresh,
            **more,
        )
        machine = Machine(lambda: self.now, self.sleep, lambda: self.memory)
        made = Following(lasts, watched, say=say, machine=machine)
        made.begin()
        self.asked.clear()
        return made

    def put(self, name: str, text: object) -> None:
        self.texts[name] = text


def test_it_goes_on_for_a_stream_that_changes_after_its_datasets_are_up_to_date() -> None:
    world = World()
    following = world.following()
    for at, name in ((10, "lake.b"), (20, "lake.a")):
        world.due[at] = lambda name=name: world.put(name, "2")
        assert following.wait()
        assert at <= world.now <= at + 2, "a stream of two is looked at within two seconds"
    assert (len(world.refreshed), following.ended) == (2, "")


def test_a_dataset_that_changes_while_a_batch_runs_advances_before_the_next() -> None:
    world = World()
    following = world.following(datasets=["lake.b"])
    assert following.go_on()
    world.put("lake.a", "2")
    assert following.go_on()
    assert world.refreshed == []
    world.put("lake.b", "2")
    world.failure = StoreUnavailableError("away.")
    assert following.go_on()
    world.failure = None
    assert following.go_on()
    assert following.go_on()
    assert len(world.refreshed) == 2
    world.put("lake.b", "3")
    world.holds = False
    assert not following.go_on()


def test_it_looks_twice_as_often_for_some_seconds_after_something_new() -> None:
    world = World()
    following = world.following(timedelta(minutes=10))
    world.due[60] = lambda: world.put("lake.a", "2")
    assert following.wait()
    changed = world.now
    assert not following.wait()
    pauses = [(at, later - at) for (at, _), (later, _) in pairwise(world.asked)]
    assert {pause for at, pause in pauses if at < changed - 0.5 or at > changed + 11} == {0.5}
    assert {pause for at, pause in pauses if changed + 0.5 < at < changed + 9} == {0.25}


def test_a_change_between_its_first_look_and_its_reading_is_not_missed() -> None:
    world = World()
    following = world.following()
    world.put("lake.a", "2")
    assert following.wait()
    assert world.now <= 2


def test_records_that_wait_for_a_dataset_are_looked_at_every_five_seconds() -> None:
    world = World()
    following = world.following()
    assert following.wait(True)
    assert world.refreshed == [pytest.approx(5, abs=0.6)]
    world.holds = False
    assert not following.wait(True)
    assert following.ended == ""


def test_it_sends_at_most_two_requests_a_second_and_looks_at_everything() -> None:
    world = World()
    following = world.following(timedelta(minutes=10))
    assert not following.wait()
    times = [at for at, _ in world.asked]
    assert min(later - at for at, later in pairwise(times)) >= 0.5
    for name in ("lake.a", "lake.b", "startpoints", "who"):
        seen = [at for at, asked in world.asked if asked == name]
        assert max(later - at for at, later in pairwise(seen)) <= 4


@pytest.mark.parametrize("what", ["startpoints", "a plan that no longer holds"])
def test_the_step_begins_again_for_startpoints_and_for_another_plan(what: str) -> None:
    world = World()
    following = world.following()
    world.holds = what == "startpoints"
    name = "startpoints" if world.holds else "lake.a"
    world.due[5] = lambda: world.put(name, "new")
    assert not following.wait()
    assert following.ended == ""
    following.begin()
    world.due[100] = lambda: world.put("lake.b", "2")
    assert following.wait() == world.holds


@pytest.mark.parametrize("what", ["its end", "another run", "memory"])
def test_it_ends_at_its_end_for_another_run_and_for_its_memory(what: str) -> None:
    world, reported = World(), list[str]()
    following = world.following(timedelta(minutes=5), say=reported.append)
    if what == "another run":
        world.due[30] = lambda: setattr(world, "who", "run x on host y")
    if what == "memory":
        world.due[30] = lambda: setattr(world, "memory", MAX_MEMORY + 1)
    assert not following.wait()
    assert world.now == 300 if what == "its end" else 30 <= world.now <= 34
    assert {"its end": "0:05:00", "another run": "run x on host y", "memory": "4.0 GiB"}[
        what
    ] in following.ended
    assert reported == [
        "caught up; staying for 0:05:00 from the start of the run",
        f"this run ends: {following.ended}",
    ]


def test_a_failing_store_is_looked_at_again_and_a_missing_stream_ends_the_run() -> None:
    world = World()
    following = world.following()
    world.put("lake.a", StoreUnavailableError("no answer.", ""))
    world.due[20] = lambda: world.put("lake.a", "1")
    world.due[40] = lambda: world.put("lake.a", StreamNotFoundError("no stream lake.a.", ""))
    with pytest.raises(StreamNotFoundError):
        following.wait()
    assert world.now >= 40


def test_a_lease_that_was_lost_while_nothing_came_ends_the_run() -> None:
    world = World()
    following = world.following()
    world.who = StoreUnavailableError("no answer.", "")
    world.due[10] = lambda: setattr(world, "who", RunLeaseLostError("it was lost.", ""))
    with pytest.raises(RunLeaseLostError):
        following.wait()
    assert 10 <= world.now <= 14


def test_datasets_that_a_store_keeps_from_advancing_are_tried_again_for_two_minutes() -> None:
    world = World(failure=StoreUnavailableError("no answer.", ""))
    following = world.following()
    world.put("lake.a", "2")
    world.due[60] = lambda: setattr(world, "failure", None)
    assert following.wait(), "what had come is not forgotten"
    assert world.now == pytest.approx(60, abs=2)
    world.failure = StoreUnavailableError("no answer.", "")
    world.put("lake.a", "3")
    with pytest.raises(StoreUnavailableError):
        following.wait()
    assert world.now == pytest.approx(180, abs=5)


@pytest.mark.parametrize("what", ["its end", "another run", "memory"])
def test_a_run_that_never_waits_ends_as_one_that_does(what: str) -> None:
    world, reported = World(), list[str]()
    following = world.following(timedelta(minutes=5), say=reported.append)
    assert following.go_on()
    world.now = 300 if what == "its end" else 20
    world.who = "run x" if what == "another run" else ""
    world.memory = MAX_MEMORY + 1 if what == "memory" else 1
    assert not following.go_on()
    assert following.ended
    assert reported == [f"this run ends: {following.ended}"]


def test_a_run_that_never_waits_takes_startpoints_and_advances_its_datasets() -> None:
    world = World()
    following = world.following()
    for second in range(60):
        world.now = second
        assert following.go_on()
    assert world.refreshed == [10, 20, 30, 40, 50]
    world.put("startpoints", "new")
    assert not following.go_on()
    assert not following.ended
    following.begin()
    world.now, world.holds = 80, False
    assert not following.go_on(), "its plan no longer holds"
    assert not following.ended


def test_files_and_queries_are_looked_at_twice_a_minute() -> None:
    world = World()
    following = world.following(sources=True)
    for _ in range(3):
        assert following.wait()
    assert world.refreshed == pytest.approx([30, 60, 90], abs=0.5)


@pytest.mark.parametrize("follow", [0, -1, True, "1h", float("nan"), timedelta(0), timedelta.max])
def test_a_time_to_stay_that_is_none_is_refused(tmp_path: Path, follow: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        run_application(Application("a"), lake=open_lake(tmp_path / "lake"), follow=follow)
    assert caught.value.argument == "follow"


def copy_app(**options: Any) -> Application:
    app = Application("copies", **options)
    orders = app.input_stream("lake.orders", default_offset="oldest")
    orders.send_to(app.output_stream("lake.copies", partitions=2, key="k"))
    return app


def empty_streams(folder: Path) -> LakeStreams:
    streams = LakeStreams(open_lake(folder / "lake"))
    streams.create("orders", schema=Schema.of(k="string", n="int"), key=["k"], partitions=2)
    return streams


def test_a_run_that_is_interrupted_while_it_waits_gives_up_its_lease(tmp_path: Path) -> None:
    lake = empty_streams(tmp_path).lake

    def interrupt(event: StepEvent | AdvanceReport) -> None:
        if isinstance(event, StepEvent) and event.what == "follow":
            assert describe_runner(lake, "copies")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_application(copy_app(), lake=lake, on_event=interrupt, follow=HOUR)
    assert describe_runner(lake, "copies") == ""
    assert run_application(copy_app(), lake=lake, wait=0).step.caught_up


@pytest.mark.lengthy
def test_a_run_that_asks_for_the_application_gets_it_from_one_that_stays(tmp_path: Path) -> None:
    lake, reported = empty_streams(tmp_path).lake, list[str]()
    waits, reports = threading.Event(), list[RunReport]()

    def hear(event: StepEvent | AdvanceReport) -> None:
        reported.append(event.summary())
        waits.set()

    def stay() -> None:
        reports.append(
            run_application(copy_app(), lake=lake, on_event=hear, follow=HOUR, run="staying")
        )

    staying = threading.Thread(target=stay)
    staying.start()
    assert waits.wait(60)
    with pytest.raises(ApplicationBusyError):
        run_application(copy_app(), lake=lake, wait=0)
    assert run_application(copy_app(), lake=lake, wait=60, run="other").step.caught_up
    staying.join(60)
    assert reports[0].step.caught_up
    assert any("run other" in text and "asks for the application" in text for text in reported)
    # Who asked is forgotten: the next one stays.
    assert run_application(copy_app(), lake=lake, follow=3, on_event=hear).step.caught_up
    assert "it has stayed for 0:00:03" in reported[-2]


def send(lake: Lake, stream: str, sequence: int, marker: str | None = None) -> None:
    schema = Schema.of(k="string", n="int").to_arrow()
    table = pa.Table.from_pylist([{"k": "a", "n": sequence}], schema)
    LakeStreams(lake).append(
        stream, table, producer="test", sequence=sequence, end_of_dataset=marker
    )


class Copies(StubEngine):
    """Writes nothing; `during` is called in each batch."""

    def __init__(self, during: Callable[[StepContext, BatchInputs], object]) -> None:
        self.during = during

    def run(
        self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]
    ) -> BatchMetrics:
        before_output("lake.copies")
        self.during(context, inputs)
        return BatchMetrics({}, {})


def stay(
    lake: Lake,
    app: Application,
    *waits: Callable[[], object],
    during: Callable[[StepContext, BatchInputs], object] = lambda context, inputs: None,
    follow: timedelta = HOUR,
) -> RunReport:
    """Run the application without Spark; each time that it waits the next of `waits` is called,
    and then it ends.
    """
    due = iter(waits)

    class Waiting(Following):
        def wait(self, held: bool = False) -> bool:
            act = next(due, None)
            if act is None:
                self._end = self._clock()
            else:
                act()
            return super().wait(held)

    step = partial(run_step, engine=Copies(during))
    with (
        patch("dagster_adjunct.orchestration.step.run.run_step", step),
        patch.object(module, "Following", Waiting),
        patch.object(module, "_PAUSE", 0.0),
    ):
        return run_application(app, lake=lake, spark=IN_PROCESS, follow=follow)


@pytest.mark.lengthy
def test_a_run_with_always_something_to_read_ends_at_its_end(tmp_path: Path) -> None:
    lake, numbers = empty_streams(tmp_path).lake, iter(range(2, 1000))
    send(lake, "orders", 1)
    more = lambda context, inputs: send(lake, "orders", next(numbers))  # noqa: E731
    report = stay(lake, copy_app(), during=more, follow=timedelta(seconds=2))
    assert report.step.batches > 0
    assert not report.step.caught_up


def test_a_stream_that_is_recreated_is_taken_as_a_new_run_takes_it(tmp_path: Path) -> None:
    streams = empty_streams(tmp_path)
    lake, app = streams.lake, Application("copies")
    orders = app.input_stream("lake.orders", default_offset="oldest", reset_offset=True)
    orders.send_to(app.output_stream("lake.copies", partitions=2, key="k"))
    send(lake, "orders", 1)

    def recreate() -> None:
        delete_stream(lake, "orders", reason="again", by="test", force=True)
        empty_streams(tmp_path)
        send(lake, "orders", 1)

    report = stay(lake, app, recreate)
    assert (report.step.batches, report.step.caught_up) == (2, True)


@pytest.mark.parametrize("default", ["oldest", "upcoming"])
def test_a_stream_is_reset_at_the_start_of_a_run_and_not_again_while_it_stays(
    tmp_path: Path, default: Any
) -> None:
    streams, again = empty_streams(tmp_path), iter([True])
    streams.create("returns", schema=Schema.of(k="string", n="int"), key=["k"], partitions=2)
    lake, app = streams.lake, Application("copies")
    orders = app.input_stream("lake.orders", default_offset=default, reset_offset=True)
    both = orders.merge(app.input_stream("lake.returns", default_offset="oldest"))
    both.send_to(app.output_stream("lake.copies", partitions=2, key="k"))
    send(lake, "orders", 1)
    send(lake, "returns", 1)

    def request(context: StepContext, inputs: BatchInputs) -> None:
        if next(again, False):
            send(lake, "orders", 2)
            Startpoints(app, lake=lake).request(
                "lake.returns", StartpointOldest(), reason="again", by="test"
            )

    stay(lake, app, during=request)
    read = {
        (offset, epoch): times
        for (ssp, offset, epoch), times in offsets_read(lake).items()
        if ssp.stream == "orders"
    }
    assert read == {(offset, 0): 1 for offset in ((0, 1) if default == "oldest" else (1,))}


def joined_app(streams: LakeStreams) -> Application:
    streams.create("rates", schema=Schema.of(k="string", n="int"), key=["k"], partitions=2)
    app = Application("copies")
    rates = app.table(bounded_dataset("rates", input="lake.rates", key="k", partitions=2))
    orders = app.input_stream("lake.orders", default_offset="oldest").join(
        rates, on="k", select=["n as rate"]
    )
    orders.send_to(app.output_stream("lake.copies", partitions=2, key="k"))
    return app


def test_a_lease_of_a_version_that_was_lost_while_nothing_came_is_taken_again(
    tmp_path: Path,
) -> None:
    streams = empty_streams(tmp_path)
    lake, app, held = streams.lake, joined_app(streams), list[BatchVersions]()
    send(lake, "rates", 1, "v1")
    send(lake, "orders", 1)

    def lose() -> None:
        held[0]._leases["rates"]._heartbeat._failure = "the machine slept"
        send(lake, "orders", 2)

    assert (
        stay(
            lake, app, lose, during=lambda context, inputs: held.append(context.versions)
        ).step.batches
        == 2
    )


def test_readers_of_former_versions_are_not_kept(tmp_path: Path) -> None:
    streams = empty_streams(tmp_path)
    lake, app, kept = streams.lake, joined_app(streams), list[int]()
    send(lake, "rates", 1, "v1")
    send(lake, "orders", 1)

    def deliver(number: int) -> None:
        send(lake, "rates", number, f"v{number}")
        send(lake, "orders", number)

    def count(context: StepContext, inputs: BatchInputs) -> None:
        kept.append(len(context.versions._readers))

    report = stay(lake, app, *(partial(deliver, number) for number in range(2, 6)), during=count)
    assert len(report.step.versions["rates"]) == 5
    assert kept == [1] * 5


def test_a_report_names_the_last_versions_of_each_dataset_and_does_not_grow(tmp_path: Path) -> None:
    logged = BatchLog(empty_streams(tmp_path).lake, "copies").read()
    state = StepState(logged, StepReport(0, False, {}, {}, {}, logged.state))
    for number in range(MAX_VERSIONS + 50):
        versions = {"rates": f"v{number}", "zones": "v0"}
        intent = Intent(
            batch=number + 1,
            run="r",
            clock=datetime.now(UTC),
            ranges={},
            joined=JoinedVersions(versions=versions),
        )
        done = ClosedBatch(
            intent=intent, closed_at=intent.clock, records=1, counters={}, seconds={}
        )
        state = state.with_batch(done, 0.0, BatchMetrics({}, {}), few=False)
    newest = [f"v{number}" for number in range(50, MAX_VERSIONS + 50)]
    assert state.report.versions == {"rates": newest, "zones": ["v0"]}


def test_a_dataset_that_another_process_advances_at_the_same_time_is_advanced_again(
    tmp_path: Path,
) -> None:
    streams = empty_streams(tmp_path)
    lake, app, failing = streams.lake, joined_app(streams), list[bool]()
    send(lake, "rates", 1, "v1")
    send(lake, "orders", 1)
    advance = running.advance_datasets

    def conflict(*given: Any, **options: Any) -> Any:
        if failing:
            failing.pop()
            raise CommitConflictError("another one was faster.", "")
        return advance(*given, **options)

    def deliver() -> None:
        send(lake, "rates", 2, "v2")
        send(lake, "orders", 2)
        failing.append(True)

    with patch.object(running, "advance_datasets", conflict):
        report = stay(lake, app, deliver)
    assert len(report.step.versions["rates"]) == 2


def test_a_run_that_asked_and_gave_up_leaves_nothing_behind(tmp_path: Path) -> None:
    lake, refused = empty_streams(tmp_path).lake, list[Exception]()
    send(lake, "orders", 1)

    def ask(context: StepContext, inputs: BatchInputs) -> None:
        with pytest.raises(ApplicationBusyError) as caught:
            run_application(copy_app(), lake=lake, spark=IN_PROCESS, wait=0.5)
        refused.append(caught.value)
        assert lake.store.head(asked_key(lake, "copies")) is None

    assert stay(lake, copy_app(), during=ask).step.batches == 1
    assert len(refused) == 1


def run_once(lake: Lake, app: Application) -> RunReport:
    """Run the application as a new run, without Spark."""
    step = partial(run_step, engine=Copies(lambda context, inputs: None))
    with patch("dagster_adjunct.orchestration.step.run.run_step", step):
        return run_application(app, lake=lake, spark=IN_PROCESS, wait=0)


@pytest.mark.parametrize("failing", [None, StoreUnavailableError, ConfigurationError])
@pytest.mark.parametrize("retention", [timedelta(days=20), None])
def test_old_batches_go_from_the_log_while_a_run_stays(
    tmp_path: Path,
    retention: timedelta | None,
    failing: type[AdjunctError] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commit_log, "MANIFESTS_KEPT", 4)
    monkeypatch.setattr(step_module, "_FORGETTING", 5)
    lake, numbers = empty_streams(tmp_path).lake, iter(range(2, 14))
    manifests = f"{lake.application_prefix('copies')}/manifests/"
    send(lake, "orders", 1)

    def more(context: StepContext, inputs: BatchInputs) -> None:
        make_older(lake, timedelta(days=30), manifests)
        if number := next(numbers, None):
            send(lake, "orders", number)

    app = copy_app(log_retention=retention)
    store: ObjectStore = lake.store
    if failing is not None:
        store = Unlisted(lake.store)
        store.failure = failing("it can't be listed.", "")
    assert stay(Lake(store, lake.id), app, during=more).step.batches == 13
    kept = len(list(lake.store.list(manifests)))
    assert kept == (27 if failing or retention is None else 11), (
        "batch 10 was the last to delete some"
    )


class Unlisted(FaultyStore):
    """A store that does not list the batch log."""

    failure: AdjunctError

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if prefix.endswith("/manifests/"):
            raise self.failure
        return super().list(prefix)


def what_comes(lake: Lake, app: Application) -> list[Callable[[], object]]:
    """Return what comes while a run waits, in order; the last is another run that asks."""

    def deliver() -> None:
        send(lake, "rates", 2, "v2")
        send(lake, "orders", 3)

    def request() -> None:
        Startpoints(app, lake=lake).request(
            "lake.orders", StartpointOldest(), reason="again", by="test"
        )

    return [
        partial(send, lake, "orders", 2),
        deliver,
        request,
        partial(send, lake, "orders", 4),
        partial(send, lake, "rates", 3, "v3"),
        partial(ask_to_end, lake.store, asked_key(lake, "copies"), "another run"),
    ]


def offsets_read(lake: Lake) -> Counter[tuple[SystemStreamPartition, int, int]]:
    """Return how often each offset was read in each epoch, by the batches that were closed."""
    states = (state for _, state in BatchLog(lake, "copies").history(None))
    intents = {
        state.last.intent.batch: state.last.intent for state in states if state.last is not None
    }
    return Counter(
        (ssp, offset, intent.epochs.get(ssp, 0))
        for intent in intents.values()
        for ssp, span in intent.ranges.items()
        for offset in range(int(span.start), int(span.end))
    )


@pytest.mark.rounds
@pytest.mark.lengthy
def test_a_run_that_stays_and_is_killed_at_any_write_is_taken_over_by_the_next(
    tmp_path: Path,
) -> None:
    def prepare(folder: Path) -> tuple[Lake, Application]:
        streams = empty_streams(folder)
        app = joined_app(streams)
        send(streams.lake, "rates", 1, "v1")
        send(streams.lake, "orders", 1)
        return streams.lake, app

    lake, app = prepare(tmp_path / "whole")
    counted = FaultyStore(lake.store)
    assert stay(Lake(counted, lake.id), app, *what_comes(lake, app)).step.batches == 4
    written = deaths(counted.requests)
    for nth in rounds(written[::2], written):
        lake, app = prepare(tmp_path / str(nth))
        coming = iter(what_comes(lake, app))
        waits = [lambda coming=coming: next(coming, lambda: None)()] * 6
        with suppress(Crash):
            stay(
                Lake(FaultyStore(lake.store, [Fault("*", nth, "crash-before")]), lake.id),
                app,
                *waits,
            )
        for act in coming:
            act()
        run_once(lake, app)
        state, read, killed = (
            BatchLog(lake, "copies").read().state,
            offsets_read(lake),
            (nth, counted.requests[nth - 1]),
        )
        ends = LakeStreams(lake).upcoming(state.checkpoint)
        assert (state.open, state.checkpoint) == (None, ends), killed
        assert set(read.values()) == {1}, killed
        again = {(ssp, offset) for ssp, offset, epoch in read if epoch == 1}
        assert again == {
            (ssp, offset) for ssp, end in ends.items() for offset in range(int(end))
        }, killed
        listed = Startpoints(app, lake=lake).list()
        assert (listed["waiting"], listed["handed"]) == ([], []), killed
        manifest = StoredVersions(lake, "rates").manifest()
        assert manifest is not None
        assert manifest.version is not None
        assert (manifest.version.name, describe_runner(lake, "copies")) == ("v3", ""), killed


@pytest.mark.spark
def test_it_takes_records_versions_and_startpoints_as_new_runs_do(step_world: StepWorld) -> None:
    world = step_world
    world.stream("orders", "k", 2, k="string", n="int")
    world.stream("rates", "k", 2, k="string", rate="int")
    rates = bounded_dataset("rates", input="lake.rates", key="k", partitions=2)
    app = Application("priced")
    table = app.table(rates)
    orders = app.input_stream("lake.orders", default_offset="oldest")
    orders.join(table, on="k").send_to(app.output_stream("lake.priced", partitions=2, key="k"))
    world.send("rates", ("a", 10), ("b", 20), version="v1")
    world.send("orders", ("a", 1), ("b", 2))
    reported = list[str]()

    def hear(event: StepEvent | AdvanceReport) -> None:
        reported.append(event.summary())
        if not isinstance(event, StepEvent):
            return
        if event.what == "follow" and len(world.rows("priced")) == 2:
            world.send("rates", ("a", 11), ("b", 21), version="v2")
            world.send("orders", ("a", 3))
        if event.what == "batch" and event.batch == 2:
            startpoints = Startpoints(app, lake=world.lake)
            startpoints.request("lake.orders", StartpointOldest(), reason="again", by="test")
        if event.what == "batch" and event.batch == 3:
            world.send("orders", ("b", 4))

    report = run_application(
        app, lake=world.lake, spark=world.spark, on_event=hear, max_batches=4, follow=HOUR
    )
    assert (report.step.batches, report.step.state.batch, len(report.step.versions["rates"])) == (
        4,
        4,
        2,
    )
    assert sorted((row["k"], row["n"], row["rate"]) for row in world.rows("priced")) == [
        *[("a", 1, 10), ("a", 1, 11), ("a", 3, 11), ("a", 3, 11)],
        *[("b", 2, 20), ("b", 2, 21), ("b", 4, 21)],
    ]
    assert report.step.counters["lake.priced"]["rows"] == 7
    kinds = [one.action for one in report.datasets]
    assert kinds == ["sealed", "sealed", "up-to-date", "up-to-date"], (
        "the last are of the steps that began again"
    )
    assert sum("planned" in text for text in reported) == 1
    # As a new run: nothing is left to do.
    assert run_application(app, lake=world.lake, spark=world.spark).step.batches == 0

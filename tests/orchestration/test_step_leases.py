"""What a step reads is held while its batches run, and after it died. Without Spark: only
reading counts here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.bounded.advance import advance_version_set
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, bounded_dataset, version_set
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.versions.leases import list_leases
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.maintenance.expire import expire_all_versions
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.startpoints.coordinator import fan_out_for_run
from dagster_adjunct.orchestration.step import step as outputs_module
from dagster_adjunct.orchestration.step.context import BatchMetrics, RunHooks, StepContext
from dagster_adjunct.orchestration.step.progress import StepEvent, StepReport
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources import times
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    LeaseLostError,
    RunLeaseLostError,
    StoreUnavailableError,
)
from dagster_adjunct.resources.objects import fence as renewal_module
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.manifest import Retention
from tests.assets.conftest import World
from tests.faulty_store import Fault, FaultyStore
from tests.orchestration.stub_engine import StubEngine
from tests.rounds import rounds

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.store import ObjectStore

AT_ONCE = DiscardPolicy(keep=1, grace=timedelta(0))
NAMES = ("planes", "fares")
KEYS = ("a", "b")


class Crash(Exception):
    """Ends a run where a test wants it to end."""


def declared(name: str) -> AdjunctDataset:
    return bounded_dataset(name, input=f"lake.{name}", key="k", partitions=1, discard=AT_ONCE)


ALONE = tuple(map(declared, NAMES))
TOGETHER = version_set("both", *ALONE)


@dataclass
class Reading(StubEngine):
    """Takes the place of a batch's work: reads every dataset whole, and writes nothing."""

    seen: list[dict[str, int]] = field(default_factory=list)
    meanwhile: Callable[[], object] = lambda: None

    def run(
        self, context: StepContext, inputs: Any, before_output: Callable[[str], None]
    ) -> BatchMetrics:
        self.meanwhile()
        matched = {
            name: {entry["n"] for _, entry in view.items()} for name, view in inputs.views.items()
        }
        assert all(len(numbers) == 1 for numbers in matched.values()), f"not whole: {matched}"
        self.seen.append({name: numbers.pop() for name, numbers in matched.items()})
        before_output("out")
        return BatchMetrics({}, {})


@dataclass
class Trips:
    """A lake with trips to read and two datasets to read them with."""

    world: World
    reading: Reading
    datasets: tuple[AdjunctDataset, ...] = ALONE
    events: list[str] = field(default_factory=list)

    def publish(self, number: int) -> None:
        for name in NAMES:
            self.world.send(name, [(key, number) for key in KEYS], version=f"v{number}")
        if self.datasets is TOGETHER:
            advance_version_set(
                TOGETHER,
                lake=self.world.lake,
                systems=self.world.systems,
                spark=IN_PROCESS,
                by="test",
            )
        else:
            for dataset in self.datasets:
                self.world.advance(dataset)

    def discard(self) -> None:
        expire_all_versions(
            self.world.lake, {dataset.name: dataset for dataset in self.datasets}, by="test"
        )

    def run(
        self, lake: Lake | None = None, still_ours: Callable[[], None] | None = None
    ) -> StepReport:
        app = Application("app")
        trips = app.input_stream("lake.trips", default_offset="oldest", on_lost="oldest")
        for dataset in self.datasets:
            trips = trips.join(app.table(dataset), on="k", how="left", prefix=f"{dataset.name}_")
        trips.send_to(app.output_stream("lake.out", partitions=1, key="k"))
        planned = plan_application(app, systems=self.world.systems)

        def received(event: StepEvent) -> None:
            self.events.append(event.what)

        runtime = Runtime(lake or self.world.lake, self.world.systems, IN_PROCESS, by="me")
        context = StepContext(
            runtime, app, planned, fan_out_for_run(runtime, app, planned), RunHooks(received)
        )
        return run_step(dataclasses.replace(context, still_ours=still_ours), self.reading)

    def held(self) -> set[tuple[str, str]]:
        """Return who holds which version."""
        leases = [lease for name in NAMES for lease in list_leases(self.world.lake, name)]
        return {(lease.holder, version) for lease in leases for version in lease.versions}

    def current(self) -> set[tuple[str, str]]:
        return {
            ("me", StoredVersions(self.world.lake, name).require_current().version)
            for name in NAMES
        }


@pytest.fixture
def new_trips() -> Callable[..., Trips]:
    def make(datasets: tuple[AdjunctDataset, ...] = ALONE) -> Trips:
        world = World(lake_in(InMemoryStore()), IN_PROCESS)
        world.stream("trips", Schema.of(k="string", trip="int"), ["k"], 1)
        for name in NAMES:
            world.stream(name, Schema.of(k="string", n="int"), ["k"], 1)
        world.send("trips", [(key, 1) for key in KEYS])
        trips = Trips(world, Reading(), datasets)
        return trips

    return make


def test_a_step_holds_what_it_reads_until_it_ends(new_trips) -> None:
    trips = new_trips()
    trips.publish(1)
    held = []
    trips.reading.meanwhile = lambda: held.append(trips.held() == trips.current())
    trips.run()
    assert held == [True]
    assert trips.held() == set()


def test_a_step_with_nothing_to_read_writes_no_lease(new_trips) -> None:
    trips = new_trips()
    trips.publish(1)
    trips.run()
    lake = Lake(FaultyStore(trips.world.lake.store), trips.world.lake.id)
    assert trips.run(lake).caught_up
    assert not [key for _, key in lake.store.requests if "/leases/" in key]  # type: ignore[attr-defined]


def test_a_step_that_fails_lets_go_and_its_open_batch_keeps_what_it_was_begun_with(
    new_trips,
) -> None:
    trips = new_trips()
    trips.publish(1)

    def fail() -> None:
        raise Crash

    trips.reading.meanwhile = fail
    with pytest.raises(Crash):
        trips.run()
    assert trips.held() == set()
    trips.publish(2)
    trips.publish(3)
    trips.discard()
    trips.reading.meanwhile = lambda: None
    trips.world.send("trips", [(key, 2) for key in KEYS])
    trips.run()
    assert trips.reading.seen == [{"planes": 1, "fares": 1}, {"planes": 3, "fares": 3}], (
        "then a batch with what is new"
    )
    trips.discard()
    assert [len(StoredVersions(trips.world.lake, name).versions()) for name in NAMES] == [1, 1]


def test_a_step_whose_lease_was_lost_fails_before_it_writes(
    new_trips, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips = new_trips()
    trips.publish(1)
    now = times.read_clocks

    def sleep() -> None:
        for module in (times, renewal_module):
            monkeypatch.setattr(
                module, "read_clocks", lambda: tuple(seconds + 601 for seconds in now())
            )

    trips.reading.meanwhile = sleep
    with pytest.raises(LeaseLostError) as failure:
        trips.run()
    assert failure.value.dataset == "fares"
    assert trips.events == ["analysis", "intent"], "no output was begun"
    trips.reading.meanwhile = lambda: None
    trips.run()
    assert trips.events[3:] == ["intent", "output", "outputs", "batch", "caught-up"]


@pytest.mark.parametrize(
    ("nth", "events"),
    [(1, []), (2, ["analysis", "intent"]), (3, ["analysis", "intent", "output", "outputs"])],
    ids=["batch", "output", "commit"],
)
def test_a_step_stops_before_batch_output_and_commit_if_the_run_may_not_continue(
    new_trips, nth, events
) -> None:
    trips = new_trips()
    trips.publish(1)
    asked = 0

    def still_ours() -> None:
        nonlocal asked
        asked += 1
        if asked == nth:
            raise RunLeaseLostError("it was taken over.")

    with pytest.raises(RunLeaseLostError):
        trips.run(still_ours=still_ours)
    assert trips.events == events
    trips.run()
    assert trips.events[-1] == "caught-up"


def begun(trips: Trips) -> Trips:
    """Return them with a batch done, so that its positions are stored, and something more to
    read.
    """
    trips.publish(1)
    trips.run()
    trips.events.clear()
    trips.world.send("trips", [("a", 2)])
    return trips


def commits_late(trips: Trips) -> None:
    """Let another run begin a batch, and end there, just before the next run does."""

    def end() -> None:
        raise Crash

    def late() -> None:
        trips.reading.rehearsed = lambda: None
        trips.reading.meanwhile = end
        with pytest.raises(Crash):
            trips.run()
        trips.reading.meanwhile = lambda: None

    trips.reading.rehearsed = late


def test_who_holds_the_lease_begins_from_what_the_run_before_it_still_committed(new_trips) -> None:
    trips = begun(new_trips())
    commits_late(trips)
    assert trips.run(still_ours=lambda: None).batches == 1
    events = [event for event in trips.events if event != "analysis"]
    assert events == ["intent", "lease", "intent", "output", "outputs", "batch", "caught-up"]
    _, state = BatchLog(trips.world.lake, "app").read()
    assert (state.batch, state.records, state.open) == (2, 3, None)
    assert trips.held() == set()


def test_who_has_lost_the_lease_or_has_none_is_ended_by_anothers_commit(new_trips) -> None:
    trips = begun(new_trips())
    commits_late(trips)
    with pytest.raises(CommitConflictError):
        trips.run()
    commits_late(trips)
    asked = iter((False, True))

    def still_ours() -> None:
        if next(asked):
            raise RunLeaseLostError("it was taken over.")

    with pytest.raises(RunLeaseLostError):
        trips.run(still_ours=still_ours)


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_work_that_the_store_broke_off_is_begun_again_before_anybody_hears_of_it(
    new_trips, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    monkeypatch.setattr(outputs_module, "_RETRY_PAUSES", (0.0, 0.0))
    trips = new_trips()
    trips.publish(1)
    tried = 0

    def broken_off() -> None:
        nonlocal tried
        tried += 1
        if tried <= broken:
            raise StoreUnavailableError("a read was broken off.")

    trips.reading.meanwhile = broken_off
    if broken <= 2:
        trips.run()
        assert trips.events == [
            "analysis",
            "intent",
            *["again"] * broken,
            "output",
            "outputs",
            "batch",
            "caught-up",
        ]
    else:
        with pytest.raises(StoreUnavailableError):
            trips.run()
        trips.run()
    assert trips.reading.seen == [{"planes": 1, "fares": 1}]


@pytest.mark.rounds
@pytest.mark.lengthy
@pytest.mark.parametrize(
    "datasets",
    [
        pytest.param(ALONE, id="alone", marks=pytest.mark.long),
        pytest.param(TOGETHER, id="in a version set"),
    ],
)
def test_a_step_reads_whole_versions_replaced_and_discarded_at_any_request(
    new_trips, datasets
) -> None:
    """Before the nth request of the step, for every n, another version is published and the one
    before discarded.
    """
    begun_again = 0
    for nth in range(1, 100, rounds(2, 1)):
        trips = new_trips(datasets)
        trips.publish(1)

        def replace(trips: Trips = trips) -> None:
            trips.publish(2)
            trips.discard()

        lake = Lake(
            FaultyStore(trips.world.lake.store, [Fault("*", nth, "meanwhile", replace)]),
            trips.world.lake.id,
        )
        trips.run(lake)
        (seen,) = trips.reading.seen
        assert set(seen.values()) <= {1, 2}
        if datasets is TOGETHER:
            assert len(set(seen.values())) == 1, "all of a set or none of it"
        done = BatchLog(trips.world.lake, "app").read()[1].last
        assert done is not None
        meant = {name: int(str(version)[1:7]) for name, version in done.intent.versions.items()}
        assert seen == meant, "what its intent names, and would be read again"
        asked = [
            key
            for request, key in lake.store.requests
            if request == "put_if_absent" and "/leases/" in key
        ]  # type: ignore[attr-defined]
        begun_again += len(asked) > len(NAMES)
        assert trips.held() == set()
        if len(lake.store.requests) < nth:  # type: ignore[attr-defined]
            break
    assert begun_again, "some came between the choice of a version and its lease"


class BeforeTheFirstLease(FaultyStore):
    """Has something done once, before a lease is written."""

    def __init__(self, inner: ObjectStore, action: Callable[[], object]) -> None:
        super().__init__(inner)
        self.action: Callable[[], object] | None = action

    def put_if_absent(self, key: str, data: bytes) -> str:
        if "/leases/" in key and self.action is not None:
            action, self.action = self.action, None
            action()
        return super().put_if_absent(key, data)


def test_what_is_lost_is_reported_once_though_all_is_looked_at_again(new_trips) -> None:
    trips = new_trips()
    trips.publish(1)
    trips.run()
    streams = trips.world.streams
    trips.world.send("trips", [("a", 2)])
    streams.configure("trips", retention=Retention(max_age=timedelta(seconds=1)), compaction=None)
    assert streams.maintain("trips", datetime.now(UTC) + timedelta(seconds=2)).dropped_segments
    trips.world.send("trips", [("b", 3)])
    trips.events.clear()

    def replace() -> None:
        trips.publish(2)
        trips.discard()

    lake = Lake(BeforeTheFirstLease(trips.world.lake.store, replace), trips.world.lake.id)
    assert trips.run(lake).counters["lake.trips"]["lost_offsets"] == 1
    assert trips.reading.seen[-1] == {"planes": 2, "fares": 2}
    assert trips.events.count("lost") == 1

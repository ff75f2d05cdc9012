"""Replays of recorded versions: each record meets again what it met first. Without Spark: only
what is met counts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.retention.discard import discard as discard_sparing
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, BatchLog
from dagster_adjunct.orchestration.maintenance.expire import expire_all_versions, needed_versions
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.startpoints import recorded_replay as plan_module
from dagster_adjunct.orchestration.startpoints.coordinator import fan_out_for_run
from dagster_adjunct.orchestration.startpoints.startpoints import (
    AskedStartpoints,
    Startpoints,
    build_requests,
    request_startpoints,
)
from dagster_adjunct.orchestration.step.context import BatchMetrics, StepContext
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import ConfigurationError, VersionDiscardedError
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.startpoint import (
    StartpointOldest,
    StartpointSpecific,
    StartpointUpcoming,
)
from dagster_adjunct.resources.streams.system import StreamSystem
from dagster_adjunct.startpoints import StartpointRequest
from dagster_adjunct.windows import Count, Tumbling
from tests.assets.conftest import World
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.orchestration.offsets.offsets_world import ssp
from tests.orchestration.stub_engine import StubEngine
from tests.rounds import rounds

PLANES = bounded_dataset(
    "planes",
    input="lake.planes",
    key="k",
    partitions=2,
    discard=DiscardPolicy(keep=1, grace=timedelta(0)),
)
WHO: dict[str, Any] = {"by": "ada", "reason": "an audit"}
P0, P1 = ssp("lake.trips.0"), ssp("lake.trips.1")
Met = dict[tuple[Any, int], int]


def at(offset: int) -> StartpointSpecific:
    return StartpointSpecific(offset=str(offset))


@dataclass
class Recording(StubEngine):
    """Takes the place of a batch's work: remembers, once for each batch, which version each
    record met.
    """

    batches: dict[int, dict[str, Any]] = field(default_factory=dict)
    meanwhile: Callable[[], object] = lambda: None

    def run(
        self, context: StepContext, inputs: Any, before_output: Callable[[str], None]
    ) -> BatchMetrics:
        (number,) = {entry["n"] for _, entry in inputs.views["planes"].items()}
        taken = {
            "main": inputs.consumed is not None,
            "reading": inputs.intent.joined.reading,
            "met": {
                (partition, offset): number
                for partition, span in inputs.intent.ranges.items()
                for offset in range(int(span.start), int(span.end))
            },
        }
        self.meanwhile()
        before_output("out")
        assert self.batches.setdefault(inputs.intent.batch, taken) == taken, (
            "a batch came again as another one"
        )
        return BatchMetrics({}, {})


@dataclass
class Trips:
    """A lake with trips in two partitions, and the planes that they meet."""

    world: World
    work: Recording
    numbers: int = 0
    sent: int = 0

    @property
    def lake(self) -> Lake:
        return self.world.lake

    @property
    def startpoints(self) -> Startpoints:
        return Startpoints(self.app(), lake=self.lake)

    def app(self, limit: int = 1000, **options: Any) -> Application:
        app = Application("app", max_batch_records=limit, **options)
        joined = app.input_stream("lake.trips", default_offset="oldest").join(
            app.table(PLANES), on="k", how="left"
        )
        joined.send_to(app.output_stream("lake.out", partitions=2, key="k"))
        return app

    def publish(self) -> None:
        """Serve a new version of planes, whose entries all have its number."""
        self.numbers += 1
        self.world.send("planes", [("a", self.numbers)], version=f"v{self.numbers}")
        self.world.advance(PLANES)

    def depart(self, count: int) -> None:
        self.world.send(
            "trips", [(f"k{number}", number) for number in range(self.sent, self.sent + count)]
        )
        self.sent += count

    def run(self, limit: int = 1000, lake: Lake | None = None, **options: Any) -> None:
        app = self.app(limit)
        planned = plan_application(app, systems=self.world.systems)
        runtime = Runtime(lake or self.lake, self.world.systems, IN_PROCESS, by="me")
        run_step(
            StepContext(runtime, app, planned, fan_out_for_run(runtime, app, planned), **options),
            self.work,
        )

    def discard(self) -> None:
        expire_all_versions(self.lake, {"planes": PLANES}, by="test")

    def state(self) -> ApplicationState:
        return BatchLog(self.lake, "app").read()[1]

    def ends(self) -> dict[Any, int]:
        return {partition: int(end) for partition, end in self.state().checkpoint.items()}

    def first_run(self) -> Met:
        """Read trips in six batches with four versions of planes; return what each met."""
        for count in (7, 5, 9):
            self.publish()
            self.depart(count)
            self.run(limit=4)
        self.publish()
        return self.matched()

    def matched(self, *, main: bool = True) -> Met:
        matched: Met = {}
        for _, batch in sorted(self.work.batches.items()):
            if batch["main"] == main:
                assert not matched.keys() & batch["met"].keys(), "a record was read twice"
                matched |= batch["met"]
        return matched

    def again(
        self, asked: str, first: int, last: dict[Any, int] | int | None = None, **more: Any
    ) -> AskedStartpoints:
        """Ask that these trips are read again up to their ends."""
        return self.startpoints.request(
            asked, at(first), until=at(int(last)), versions="recorded", **WHO, **more
        )  # type: ignore[arg-type]

    def held(self) -> set[str]:
        return set(needed_versions(self.lake, "planes"))


@pytest.fixture
def trips() -> Trips:
    return new_trips()


def new_trips() -> Trips:
    world = World(lake_in(InMemoryStore()), IN_PROCESS)
    world.stream("trips", Schema.of(k="string", trip="int"), ["k"], 2)
    world.stream("planes", Schema.of(k="string", n="int"), ["k"], 2)
    trips = Trips(world, Recording())
    return trips


def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan is young: it holds for what needs it alone."""
    monkeypatch.setattr(plan_module, "_GRACE", timedelta(0))


def test_each_record_meets_the_version_that_it_matched_first_wherever_the_range_is_cut(
    trips: Trips,
) -> None:
    first = trips.first_run()
    assert len(set(first.values())) == 3
    last = min(trips.ends().values())
    for start, end in ((0, last), (1, last - 1), (2, 3)):
        before = set(trips.work.batches)
        trips.again("lake.trips", start, end)
        trips.run()
        replayed = [batch for number, batch in trips.work.batches.items() if number not in before]
        matched: Met = {}
        for batch in replayed:
            assert (batch["main"], batch["reading"]) == (False, "recorded")
            matched |= batch["met"]
        assert matched == {
            (partition, offset): first[partition, offset]
            for partition in (P0, P1)
            for offset in range(start, end)
        }
    assert trips.matched() == first, "the main position has not moved"


def test_what_was_in_one_batch_is_in_one_again(trips: Trips) -> None:
    trips.first_run()
    first = [batch["met"].keys() for _, batch in sorted(trips.work.batches.items())]
    last = min(trips.ends().values())
    trips.again("lake.trips", 0, last)
    trips.run(limit=1)
    again = [
        batch["met"].keys() for _, batch in sorted(trips.work.batches.items()) if not batch["main"]
    ]
    cut = [{place for place in batch if place[1] < last} for batch in first]
    assert again == [batch for batch in cut if batch]


def test_versions_are_held_from_the_request_until_the_replay_has_ended(
    trips: Trips, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_all(monkeypatch)
    first = trips.first_run()
    asked = trips.again("lake.trips", 0, 3)
    trips.discard()
    assert len(trips.held()) > 0
    trips.run(max_batches=1)  # handed out, resolved, and begun
    trips.discard()
    assert len(trips.held()) > 0
    trips.run()
    matched = trips.matched(main=False)
    assert matched == {place: first[place] for place in matched}
    assert {place[1] for place in matched} == {0, 1, 2}
    assert trips.held() == set()
    trips.discard()
    assert not [*trips.lake.store.list("applications/app/recorded/")]
    with pytest.raises(ConfigurationError) as failure:
        trips.again("lake.trips", 0, 3)
    assert failure.value.stream == "lake.trips"
    assert asked.written


@pytest.mark.parametrize("begun", [False, True])
def test_what_is_taken_back_holds_nothing(
    trips: Trips, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    keep_all(monkeypatch)
    trips.first_run()
    trips.again("lake.trips", 0, 3)
    if begun:
        trips.run(max_batches=1)
    assert len(trips.held()) > 0
    trips.startpoints.clear(**WHO)
    assert trips.held() == set()
    assert trips.state().offsets.replays == {}


def test_a_request_that_has_expired_holds_nothing(
    trips: Trips, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_all(monkeypatch)
    trips.first_run()
    trips.again("lake.trips", 0, 3)
    (item,) = trips.lake.store.list("applications/app/recorded/")
    plan = plan_module.read_plan(
        trips.lake, "app", item.key.rsplit("/", 1)[1].removesuffix(".json")
    )
    old = plan.model_copy(update={"expires_at": plan.expires_at - timedelta(days=2)})
    trips.lake.store.put(item.key, old.model_dump_json().encode())
    assert trips.held() == set()


def test_a_request_that_never_expires_retains_its_versions(trips: Trips) -> None:
    trips.first_run()
    startpoints = Startpoints(trips.app(startpoints_expire_after=timedelta.max), lake=trips.lake)
    startpoints.request("lake.trips", at(0), until=at(3), versions="recorded", **WHO)
    (item,) = trips.lake.store.list("applications/app/recorded/")
    plan = plan_module.read_plan(
        trips.lake, "app", item.key.rsplit("/", 1)[1].removesuffix(".json")
    )
    assert plan.expires_at.year == 9999
    assert trips.held()


def test_a_version_that_is_gone_is_named_in_the_dry_run_and_nothing_is_written(
    trips: Trips,
) -> None:
    trips.first_run()
    (kept,) = trips.startpoints.preview(
        "lake.trips.0", at(0), until=at(2), versions="recorded"
    ).previews
    assert kept.error is None
    trips.discard()
    (displayed,) = trips.startpoints.preview(
        "lake.trips.0", at(0), until=at(2), versions="recorded"
    ).previews
    for part in (
        "planes",
        "which batch",
        "of application 'app' read, is gone",
        "versions=as-of",
        "versions=current",
    ):
        assert part in str(displayed.error)
    with pytest.raises(ConfigurationError) as failure:
        trips.again("lake.trips.0", 0, 2)
    assert failure.value.stream == "lake.trips"
    assert trips.startpoints.list()["waiting"] == []
    assert not [*trips.lake.store.list("applications/app/recorded/")]


def test_a_version_that_goes_all_the_same_is_refused_at_the_start(trips: Trips) -> None:
    trips.first_run()
    trips.again("lake.trips.0", 0, 2)
    # as an erasure, which heeds no replay
    discard_sparing(trips.lake, "planes", PLANES.discard, by="test")
    with pytest.raises(VersionDiscardedError) as failure:
        trips.run()
    assert failure.value.dataset == "planes"


def test_records_that_no_batch_has_read_are_refused_by_name(trips: Trips) -> None:
    trips.publish()
    trips.depart(6)
    trips.run()
    ends = trips.ends()
    trips.depart(6)
    (displayed,) = trips.startpoints.preview(
        "lake.trips.0", at(0), until=at(ends[P0] + 1), versions="recorded"
    ).previews
    assert f"offsets {ends[P0]} up to {ends[P0] + 1}: no batch has read them yet" in str(
        displayed.error
    )


def test_the_first_main_batch_counts_not_a_replay_or_a_later_startpoint(trips: Trips) -> None:
    first = trips.first_run()
    trips.startpoints.request("lake.trips.0", at(0), until=at(2), versions="current", **WHO)
    trips.run()
    trips.startpoints.request("lake.trips.0", at(0), **WHO)
    trips.run()
    assert {batch["reading"] for batch in trips.work.batches.values()} == {"as-of", "current"}
    trips.work.batches.clear()
    trips.again("lake.trips.0", 0, 3)
    trips.run()
    assert trips.matched(main=False) == {(P0, offset): first[P0, offset] for offset in range(3)}


def test_a_startpoint_that_the_log_has_forgotten_refuses_no_later_records(trips: Trips) -> None:
    trips.first_run()
    trips.startpoints.request("lake.trips.0", at(0), **WHO)
    trips.run()
    forgotten = trips.ends()[P0]
    commits = len(list(BatchLog(trips.lake, "app").history(None)))
    trips.publish()
    trips.depart(6)
    trips.work.batches.clear()
    trips.run()
    later = trips.matched()
    prefix = trips.lake.application_prefix("app")
    for number in range(1, commits):
        (item,) = trips.lake.store.list(f"{prefix}/manifests/{number:012d}")
        trips.lake.store.delete(item.key)
    (displayed,) = trips.startpoints.preview(
        "lake.trips.0", at(forgotten - 1), until=at(trips.ends()[P0]), versions="recorded"
    ).previews
    assert "history from before its commit" in str(displayed.error)
    trips.work.batches.clear()
    trips.again("lake.trips.0", forgotten, trips.ends()[P0])
    trips.run()
    read = {place: number for place, number in later.items() if place[0] == P0}
    assert read
    assert trips.matched(main=False) == read


def test_two_replays_at_once_meet_each_its_own(trips: Trips) -> None:
    first = trips.first_run()
    trips.again("lake.trips.0", 0, 3)
    trips.startpoints.request("lake.trips.1", at(0), until=at(3), versions="current", **WHO)
    trips.run(max_batches=1)
    trips.again("lake.trips", 1, 3)
    trips.run()
    matched: dict[Any, list[int]] = {}
    for _, batch in sorted(trips.work.batches.items()):
        if not batch["main"]:
            for place, number in batch["met"].items():
                matched.setdefault(place, []).append(number)
    for place in ((P0, 1), (P0, 2)):
        assert matched[place] == [first[place]] * 2
    for place in ((P1, 1), (P1, 2)):
        assert sorted(matched[place]) == sorted([trips.numbers, first[place]])
    assert (matched[P0, 0], matched[P1, 0]) == ([first[P0, 0]], [trips.numbers])


@pytest.mark.lengthy
def test_a_replay_that_dies_at_any_request_goes_on_and_meets_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed after each so many requests, with everything discarded between: nothing is met
    twice or otherwise.
    """
    keep_all(monkeypatch)
    for nth in range(1, 74, 8):
        trips = new_trips()
        first = trips.first_run()
        trips.again("lake.trips", 0, 4)
        faulty = FaultyStore(trips.lake.store, [Fault("*", nth, "crash-before")])
        try:
            trips.run(lake=Lake(faulty, trips.lake.id))
        except Crash:
            trips.discard()
        trips.run()
        assert trips.matched(main=False) == {
            (partition, offset): first[partition, offset]
            for partition in (P0, P1)
            for offset in range(4)
        }


@pytest.mark.rounds
@pytest.mark.lengthy
@pytest.mark.parametrize("first", ["request", "discard"])
def test_of_a_request_and_a_discard_at_any_request_of_either_one_sees_the_other(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """One does all of its work before a request of the other: what was asked for is met as it
    was, or was refused.
    """
    outcomes = set()
    for nth in range(1, 100, rounds(2, 1)):
        trips = new_trips()
        trips.publish()
        trips.depart(4)
        trips.run()
        trips.publish()
        matched = trips.matched()
        meanwhile = trips.discard if first == "request" else partial(asked_for, trips, trips.lake)
        faulty = FaultyStore(trips.lake.store, [Fault("*", nth, "meanwhile", meanwhile)])
        lake = Lake(faulty, trips.lake.id)
        if first == "request":
            asked_for(trips, lake)
        else:
            expire_all_versions(lake, {"planes": PLANES}, by="test")
        waiting = trips.startpoints.list()["waiting"]
        trips.discard()
        trips.run()
        assert trips.matched(main=False) == (matched if waiting else {})
        outcomes.add(bool(waiting))
        if nth > len(faulty.requests):
            break
    assert outcomes == {True, False}


def asked_for(trips: Trips, lake: Lake) -> None:
    """Ask for all trips as they were recorded, unless that is refused."""
    with suppress(ConfigurationError, VersionDiscardedError):
        Startpoints(trips.app(), lake=lake).request(
            "lake.trips", StartpointOldest(), until=StartpointUpcoming(), versions="recorded", **WHO
        )


def test_a_batch_of_a_replay_that_was_given_up_is_read_again_with_what_it_matched(
    trips: Trips,
) -> None:
    first = trips.first_run()
    trips.again("lake.trips", 0, 4)

    def fail() -> None:
        raise Crash("within the batch")

    trips.work.meanwhile = fail
    with pytest.raises(Crash):
        trips.run()
    BatchLog(trips.lake, "app").abandon(reason="a test", by="me", skip=False)
    trips.work.meanwhile = lambda: None
    trips.again("lake.trips", 2, 4)
    trips.run()
    matched = [
        (place, number)
        for _, batch in sorted(trips.work.batches.items())
        for place, number in batch["met"].items()
    ]
    replayed = matched[len(first) :]
    assert sorted(replayed, key=str) == sorted(
        [
            ((partition, offset), first[partition, offset])
            for partition in (P0, P1)
            for offset in (0, 1, 2, 3, 2, 3)
        ],
        key=str,
    )


def test_without_an_end_versions_are_refused_with_the_reason(trips: Trips) -> None:
    trips.first_run()
    with pytest.raises(ConfigurationError) as failure:
        trips.startpoints.request("lake.trips.0", at(0), versions="recorded", **WHO)
    assert failure.value.stream == "lake.trips"
    with pytest.raises(ConfigurationError) as failure:
        trips.startpoints.request("lake.trips.0", at(0), until=at(1), versions="as-of", **WHO)
    assert failure.value.stream == "lake.trips"
    with pytest.raises(ConfigurationError) as failure:
        trips.startpoints.request("lake.trips.0", at(0), until=at(1), versions="newest", **WHO)  # type: ignore[arg-type]
    assert failure.value.argument == "versions"
    assert trips.startpoints.list()["waiting"] == []


def test_a_request_that_was_written_without_looking_is_refused_at_the_start(trips: Trips) -> None:
    from dagster_adjunct.orchestration.startpoints.store import open_startpoints

    trips.first_run()
    request = StartpointRequest(ssp=P0, startpoint=at(0), until=at(1), versions="recorded", **WHO)
    open_startpoints(trips.lake, trips.app()).write_startpoints([request])
    with pytest.raises(ConfigurationError) as failure:
        trips.run()
    assert failure.value.argument == "versions"


def test_a_request_is_read_as_it_was_stored() -> None:
    plain = StartpointRequest(ssp=P0, startpoint=at(0), until=at(1), **WHO)
    recorded = StartpointRequest(
        ssp=P0, startpoint=at(0), until=at(1), versions="recorded", recorded="0" * 32, **WHO
    )
    assert StartpointRequest.from_json(plain.to_json()) == plain
    assert StartpointRequest.from_json(recorded.to_json()) == recorded


def test_the_dry_run_says_what_is_matched_and_held(trips: Trips) -> None:
    trips.first_run()
    asked = trips.startpoints.preview("lake.trips", at(0), until=at(3), versions="recorded")
    assert asked.notes[0].startswith(
        "recorded: what 2 batches, 1 to 2 read, kept until the replay has ended"
    ) or (asked.notes[0].startswith("recorded: what "))
    assert any(note.startswith("recorded: dataset planes: v") for note in asked.notes)
    assert {row["versions"] for row in asked.to_json()["partitions"]} == {"recorded"}
    assert trips.startpoints.preview("lake.trips", at(0), until=at(3)).notes == ()
    current = trips.startpoints.preview("lake.trips", at(0), until=at(3), versions="current")
    assert current.notes == (
        "versions current: every join uses what is served when the replay runs",
    )


class Looked(LakeStreams):
    """The lake's streams; keeps which of them were looked at."""

    def __init__(self, lake: Lake) -> None:
        super().__init__(lake)
        self.looks: list[str] = []

    def snapshot(self, stream: str) -> StreamSystem:
        self.looks.append(stream)
        return super().snapshot(stream)


def test_recorded_versions_are_looked_for_in_the_streams_as_the_previews_saw_them(
    trips: Trips,
) -> None:
    trips.first_run()
    streams = Looked(trips.lake)
    requests = build_requests([P0, P1], at(0), at(3), versions="recorded", **WHO)
    asked = request_startpoints(trips.lake, {"lake": streams}, trips.app(), requests, dry_run=True)
    assert asked.notes[0].startswith("recorded: what ")
    assert streams.looks == ["trips"]


def test_the_dry_run_names_what_keeps_state_and_leaves_out_what_is_read_again() -> None:
    world = World(lake_in(InMemoryStore()), IN_PROCESS)
    world.stream("clicks", Schema.of(k="string", at="timestamp"), ["k"], 2)
    app = Application("counting")
    clicks = app.input_stream("lake.clicks", event_time="at", delay=timedelta(0))
    windows = clicks.window(
        Tumbling(timedelta(hours=1)), by="k", name="views", aggregates={"views": Count()}
    )
    windows.send_to(app.output_stream("lake.views", partitions=2, key="k"))
    notes = Startpoints(app, lake=world.lake).preview("lake.clicks", StartpointOldest()).notes
    (note,) = notes
    assert "views keeps state: it leaves out records that were read before" in note

"""StartpointManager: requests, expiry, which request counts, fan-outs, and what they cost."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.startpoints.fan_out import (
    FanOut,
    describe_dropped,
    describe_unapplied,
)
from dagster_adjunct.orchestration.startpoints.request import StartpointRequest
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints, collect_startpoints
from dagster_adjunct.orchestration.startpoints.store import StartpointManager
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.startpoint import (
    Startpoint,
    StartpointOldest,
    StartpointSpecific,
    StartpointUpcoming,
)
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.clocks import Clock, on_clock
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.orchestration.offsets.stored_startpoints import handed_to, waiting_at, write_startpoint

S0, S1, S10 = (SystemStreamPartition("lake", "s", number) for number in (0, 1, 10))
T0, T1 = "Partition 0", "Partition 1"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
WHO: dict[str, Any] = {"by": "ada", "reason": "ticket 7"}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lake() -> Lake:
    return lake_in(InMemoryStore())


@pytest.fixture
def manager(lake: Lake, clock: Clock) -> StartpointManager:
    return on(lake, clock)


def on(lake: Lake, clock: Clock, *plan: Fault) -> StartpointManager:
    return StartpointManager(
        MetadataStore(on_clock(Lake(FaultyStore(lake.store, plan), lake.id), clock)), "app"
    )


def made(clock: Clock, **ago: float) -> StartpointOldest:
    """Return a startpoint created this long ago."""
    return StartpointOldest(
        creation_timestamp_ms=round((clock.now - timedelta(**ago)).timestamp() * 1000)
    )


def pending(manager: StartpointManager) -> dict[str, dict[SystemStreamPartition, Any]]:
    return {
        t: {ssp: request.startpoint for ssp, request in held.items()}
        for t, held in manager.get_fan_outs().items()
    }


def stranded(report: FanOut) -> dict[str, dict[SystemStreamPartition, Any]]:
    return {
        t: {ssp: request.startpoint for ssp, request in held.items()}
        for t, held in report.stranded.items()
    }


def test_each_target_has_a_request_of_its_own(manager: StartpointManager, clock: Clock) -> None:
    broadcast, specific = made(clock), made(clock)
    write_startpoint(manager, S1, broadcast, **WHO)
    write_startpoint(manager, S1, specific, task=T1, **WHO, on_unresolved="checkpoint")
    assert waiting_at(manager, S1) == broadcast
    assert waiting_at(manager, S1, T1) == specific
    assert waiting_at(manager, S10) is None
    assert waiting_at(manager, S1, T0) is None
    written = [
        (request.task, request.by, request.reason, request.on_unresolved)
        for request in manager.read().waiting
    ]
    assert written == [(None, "ada", "ticket 7", "fail"), (T1, "ada", "ticket 7", "checkpoint")]
    assert manager.delete_startpoint(S1)
    assert not manager.delete_startpoint(S1)
    assert waiting_at(manager, S1) is None
    assert waiting_at(manager, S1, T1) == specific


def test_the_last_request_for_a_target_counts_whatever_its_clock_reported(
    manager: StartpointManager, clock: Clock
) -> None:
    write_startpoint(manager, S0, made(clock), **WHO)
    late = made(clock, hours=1)
    write_startpoint(manager, S0, late, **WHO)
    assert waiting_at(manager, S0) == late
    manager.fan_out({T0: [S0]})
    later = made(clock, hours=2)
    write_startpoint(manager, S0, later, **WHO)
    manager.fan_out({T0: [S0]})
    assert pending(manager) == {T0: {S0: later}}


@pytest.mark.parametrize(
    ("age", "there"), [(timedelta(hours=12, milliseconds=-1), True), (timedelta(hours=12), False)]
)
def test_a_request_expires_at_twelve_hours_sharp(
    manager: StartpointManager, clock: Clock, age: timedelta, there: bool
) -> None:
    startpoint = made(clock)
    write_startpoint(manager, S0, startpoint, **WHO)
    clock.now += age
    assert (waiting_at(manager, S0) == startpoint) is there
    assert bool(manager.read().waiting) is there
    report = manager.fan_out({T0: [S0]})
    assert bool(report.tasks) is there
    assert [request.startpoint for request in report.expired] == ([] if there else [startpoint])
    assert not manager.delete_startpoint(S0), "it was cleaned up"


def test_what_was_fanned_out_does_not_expire(manager: StartpointManager, clock: Clock) -> None:
    startpoint = made(clock)
    write_startpoint(manager, S0, startpoint, **WHO)
    manager.fan_out({T0: [S0]})
    clock.now += timedelta(days=30)
    assert manager.fan_out({T0: [S0]}).tasks[T0][S0].startpoint == startpoint


@pytest.mark.parametrize("fan_out_between", [False, True])
@pytest.mark.parametrize("specific_first", [False, True])
@pytest.mark.parametrize(
    ("broadcast_age", "specific_age", "winner"), [(1, 2, "b"), (2, 1, "s"), (1, 1, "s")]
)
def test_the_newer_of_broadcast_and_specific_counts_and_a_tie_goes_to_the_task(
    manager: StartpointManager,
    clock: Clock,
    broadcast_age: int,
    specific_age: int,
    winner: str,
    specific_first: bool,
    fan_out_between: bool,
) -> None:
    broadcast, specific = made(clock, hours=broadcast_age), made(clock, hours=specific_age)
    writes = [(broadcast, None), (specific, T0)]
    for startpoint, task in reversed(writes) if specific_first else writes:
        write_startpoint(manager, S0, startpoint, task=task, **WHO)
        if fan_out_between:
            manager.fan_out({T0: [S0], T1: [S0]})
    manager.fan_out({T0: [S0], T1: [S0]})
    assert pending(manager) == {
        T0: {S0: broadcast if winner == "b" else specific},
        T1: {S0: broadcast},
    }
    assert manager.read().waiting == []


def test_a_fan_out_joins_what_is_not_committed_yet(
    manager: StartpointManager, clock: Clock
) -> None:
    first, second, third = made(clock), made(clock), made(clock)
    write_startpoint(manager, S0, first, **WHO)
    manager.fan_out({T0: [S0, S1]})
    write_startpoint(manager, S1, second, **WHO)
    manager.fan_out({T0: [S0, S1]})
    assert pending(manager) == {T0: {S0: first, S1: second}}
    write_startpoint(manager, S0, third, **WHO)
    manager.fan_out({T0: [S0, S1]})
    assert pending(manager) == {T0: {S0: third, S1: second}}


def test_removal_names_partitions_or_ids_or_takes_all(
    manager: StartpointManager, clock: Clock
) -> None:
    first, second = made(clock), made(clock)
    for ssp in (S0, S1, S10):
        write_startpoint(manager, ssp, first, **WHO)
    manager.fan_out({T0: [S0, S1, S10]})
    manager.remove_fan_out_for_task(T0, [S10])
    assert pending(manager) == {T0: {S0: first, S1: first}}
    write_startpoint(manager, S0, second, **WHO)
    manager.fan_out({T0: [S0, S1, S10]})
    manager.remove_fan_outs({T0: {S0: first.id, S1: first.id}})
    assert pending(manager) == {T0: {S0: second}}, "what joined after it was read stays"
    manager.remove_fan_out_for_task(T0)
    manager.remove_fan_out_for_task(T0)
    manager.remove_fan_out_for_task("never there")
    assert pending(manager) == {}
    assert handed_to(manager, T0) == {}


def test_requests_nobody_can_take_stay_and_are_reported(
    manager: StartpointManager, clock: Clock
) -> None:
    write_startpoint(manager, S1, made(clock), **WHO)
    write_startpoint(manager, S0, made(clock), task=T1, **WHO)
    report = manager.fan_out({T0: [S0], T1: []})
    assert report.tasks == {}
    assert {(request.ssp, request.task) for request in report.unknown} == {(S1, None), (S0, T1)}
    assert len(manager.read().waiting) == 2
    assert set(manager.fan_out({T0: [S0], T1: [S0, S1]}).tasks) == {T1}
    assert set(handed_to(manager, T1)) == {S0, S1}


def test_startpoints_of_removed_tasks_go_to_the_next_reader_of_the_partition(
    manager: StartpointManager, clock: Clock
) -> None:
    broadcast, specific = made(clock, hours=1), made(clock)
    write_startpoint(manager, S0, broadcast, **WHO)
    write_startpoint(manager, S1, specific, task=T0, **WHO)
    manager.fan_out({T0: [S0, S1]})
    report = manager.fan_out({T1: [S0, S1]})
    assert pending(manager) == {T1: {S0: broadcast}, T0: {S1: specific}}
    assert (set(report.tasks), stranded(report)) == ({T1}, {T0: {S1: specific}})
    (text,) = describe_unapplied(report)
    assert (
        "lake.s.1: a startpoint (ada: ticket 7), handed to 'Partition 0', waits, and no task reads"
        in text
    )
    report = manager.fan_out({T1: [S1]})  # nobody reads S0
    assert stranded(report) == {T0: {S1: specific}, T1: {S0: broadcast}}
    assert report.tasks == {}
    clock.now += timedelta(days=30)
    report = manager.fan_out({"new": [S0], T0: [S1]})
    assert pending(manager) == {"new": {S0: broadcast}, T0: {S1: specific}}
    assert (set(report.tasks), report.stranded, describe_unapplied(report)) == ({"new", T0}, {}, [])


def test_what_a_task_has_applied_does_not_come_back_from_a_task_that_is_gone(
    manager: StartpointManager, clock: Clock
) -> None:
    startpoint = made(clock)
    write_startpoint(manager, S0, startpoint, **WHO)
    manager.fan_out({T0: [S0], T1: [S0]})
    manager.remove_fan_out_for_task(T1)
    manager.fan_out({T1: [S0], "new": [S0]})
    assert pending(manager) == {"new": {S0: startpoint}}
    manager.fan_out({T0: [S0]})
    assert pending(manager) == {T0: {S0: startpoint}}, (
        "it had been taken from this task before it was applied"
    )


def test_a_later_request_without_a_task_does_not_restore_an_applied_one(
    manager: StartpointManager, clock: Clock
) -> None:
    broadcast, specific = made(clock), made(clock)
    write_startpoint(manager, S0, broadcast, **WHO)
    manager.fan_out({T0: [S0], T1: [S0]})
    manager.remove_fan_out_for_task(T0)
    write_startpoint(manager, S0, specific, task=T0, **WHO)
    manager.fan_out({T0: [S0], T1: [S0]})
    assert stranded(manager.fan_out({T1: [S0]})) == {T0: {S0: specific}}
    manager.fan_out({T0: [S0]}, complete=True)
    assert pending(manager) == {T0: {S0: specific}}


@pytest.mark.parametrize("kind", ["crash-before", "crash-after"])
def test_a_fan_out_that_dies_anywhere_is_repeated_without_handing_out_twice(
    clock: Clock, kind: Any
) -> None:
    crashes = 0
    for nth in range(1, 60):
        lake = lake_in(InMemoryStore())
        honest, startpoint = on(lake, clock), made(clock)
        write_startpoint(honest, S0, startpoint, **WHO)
        store = FaultyStore(lake.store, [Fault("*", nth, kind)])
        try:
            StartpointManager(MetadataStore(on_clock(Lake(store, lake.id), clock)), "app").fan_out(
                {T0: [S0]}
            )
        except Crash:
            crashes += 1
        handed = bool(pending(honest))
        assert handed or honest.read().waiting
        honest.remove_fan_out_for_task(T0)  # a run that was started meanwhile has applied it
        honest.fan_out({T0: [S0]})
        assert pending(honest) == ({} if handed else {T0: {S0: startpoint}})
        assert honest.read().waiting == []
        if len(store.requests) < nth:
            break
    assert 8 < crashes < 50


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("nth", range(1, 16))
def test_of_two_coordinators_each_request_is_handed_out_once(
    lake: Lake, clock: Clock, nth: int, again: bool
) -> None:
    honest, first, second = on(lake, clock), made(clock), made(clock)
    write_startpoint(honest, S0, first, **WHO)

    def meanwhile() -> None:
        """Another coordinator hands it out, a run applies it, all is tidied, and perhaps
        somebody asks again.
        """
        honest.fan_out({T0: [S0]})
        honest.remove_fan_out_for_task(T0)
        honest.fan_out({T0: [S0]})
        if again:
            write_startpoint(honest, S0, second, **WHO)
        came.append(nth)

    came: list[int] = []
    on(lake, clock, Fault("*", nth, "meanwhile", meanwhile)).fan_out({T0: [S0]})
    honest.fan_out({T0: [S0]})
    expected = {} if came and not again else {T0: {S0: second if came else first}}
    assert pending(honest) == expected
    assert came or nth > 8
    assert honest.read().waiting == []


@pytest.mark.parametrize("nth", range(1, 16))
def test_a_coordinator_without_changes_has_seen_what_another_handed_out(
    lake: Lake, clock: Clock, nth: int
) -> None:
    honest, startpoint = on(lake, clock), made(clock)
    write_startpoint(honest, S0, startpoint, **WHO)
    another = Fault(
        "*", nth, "meanwhile", lambda: honest.fan_out({T1: [S0]}, complete=True) and None
    )
    report = on(lake, clock, another).fan_out({T0: [S0]}, complete=True)
    assert {
        task: {ssp: request.startpoint for ssp, request in held.items()}
        for task, held in report.tasks.items()
    } == {T0: {S0: startpoint}}


def test_no_name_can_pass_for_another_key(manager: StartpointManager, clock: Clock) -> None:
    names = [
        "a",
        'a"',
        '"a',
        "lake.s.0",
        '["task","a"]',
        "a\n",
        "ä",
        '["settled","lake.s.0",null]',
        " ",
        "null",
    ]
    wanted = {}
    for name in names:
        wanted[name] = made(clock)
        write_startpoint(manager, S0, wanted[name], task=name, **WHO)
    assert {name: waiting_at(manager, S0, name) for name in names} == wanted
    manager.fan_out({name: [S0] for name in names})
    assert pending(manager) == {name: {S0: startpoint} for name, startpoint in wanted.items()}
    manager.remove_fan_out_for_task(names[4])
    assert set(pending(manager)) == {*names} - {names[4]}


@pytest.mark.parametrize("task", ["", "x" * 501, "\ud800", 3])
def test_a_task_that_can_not_be_kept_is_refused(manager: StartpointManager, task: Any) -> None:
    with pytest.raises(ConfigurationError) as failure:
        write_startpoint(manager, S0, StartpointOldest(), task=task, **WHO)
    assert failure.value.facts["argument"] == "task"
    with pytest.raises(ConfigurationError) as failure:
        manager.fan_out({task: [S0]})
    assert failure.value.facts["argument"] in ("task", "tasks")


def test_a_request_says_who_and_why(manager: StartpointManager) -> None:
    with pytest.raises(ConfigurationError) as failure:
        write_startpoint(manager, S0, StartpointOldest(), by="", reason="because")
    assert failure.value.facts["argument"] == "by"
    with pytest.raises(ConfigurationError) as failure:
        write_startpoint(manager, S0, StartpointOldest(), by="ada", reason=" ")
    assert failure.value.facts["argument"] == "reason"
    with pytest.raises(ConfigurationError) as failure:
        write_startpoint(manager, S0, StartpointOldest(), **WHO, on_unresolved="skip")  # type: ignore[arg-type]
    assert failure.value.facts["argument"] == "on_unresolved"


def test_a_fan_out_without_tasks_and_an_expiry_of_nothing_are_refused(
    manager: StartpointManager, lake: Lake
) -> None:
    with pytest.raises(ConfigurationError) as failure:
        manager.fan_out({})
    assert failure.value.facts["argument"] == "tasks"
    with pytest.raises(ConfigurationError) as failure:
        StartpointManager(MetadataStore(lake), "app", expires_after=timedelta(0))
    assert failure.value.facts["argument"] == "expires_after"


def test_a_request_of_a_newer_version_is_refused_by_name_and_can_be_deleted(
    manager: StartpointManager, lake: Lake
) -> None:
    namespace = MetadataStore(lake).namespace("startpoints", "app")
    stored = StartpointRequest(ssp=S0, startpoint=StartpointUpcoming(), **WHO).to_json()
    namespace.transact(
        lambda _: ({'["lake.s.0",null]': {**stored, "version": 2}}, None), by="newer"
    )
    assert waiting_at(manager, S0) is None
    (unreadable,) = manager.read().unreadable
    assert (unreadable.ssp, unreadable.task) == (S0, None)
    assert re.search(r"lake\.s\.0.*'app' has version 2; .* Upgrade", unreadable.error)
    write_startpoint(manager, S1, StartpointOldest(), **WHO)
    assert [request.ssp for request in manager.read().waiting] == [S1]
    handed = manager.fan_out({"Partition 0": [S0], "Partition 1": [S1]})
    assert list(handed.tasks) == ["Partition 1"]
    assert handed.unreadable == (unreadable,)
    assert manager.delete_startpoint(S0)
    assert (manager.read().waiting, manager.read().unreadable) == ([], [])


def test_writing_the_same_request_again_changes_nothing(
    manager: StartpointManager, lake: Lake, clock: Clock
) -> None:
    startpoint = made(clock)
    for _ in range(2):
        write_startpoint(manager, S0, startpoint, **WHO)
    assert MetadataStore(lake).namespace("startpoints", "app").read().version == 1


@pytest.mark.lengthy
def test_ten_thousand_partitions_of_a_thousand_tasks_take_few_requests(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake")
    tasks = {
        f"Partition {task}": [
            SystemStreamPartition("lake", f"s{stream}", task) for stream in range(10)
        ]
        for task in range(1000)
    }
    store = FaultyStore(lake.store)
    manager = StartpointManager(MetadataStore(Lake(store, lake.id)), "app")
    manager.write_startpoints(
        StartpointRequest(ssp=ssp, startpoint=StartpointSpecific("7"), **WHO)
        for ssps in tasks.values()
        for ssp in ssps
    )
    reader = StartpointManager(MetadataStore(Lake(store, lake.id)), "app")
    store.requests.clear()
    report = reader.fan_out(tasks)
    assert sum(map(len, report.tasks.values())) == 10_000
    assert len(store.requests) < 100
    assert (
        sum("/startpoints/app/pages/" in key for request, key in store.requests if request == "get")
        < 25
    )
    store.requests.clear()
    reader.remove_fan_outs(
        {
            task: {ssp: request.startpoint.id for ssp, request in held.items()}
            for task, held in report.tasks.items()
        }
    )
    assert reader.get_fan_outs() == {}
    assert len(store.requests) < 60


def test_expired_requests_are_displayed_until_they_are_deleted_and_that_is_reported(
    manager: StartpointManager, clock: Clock
) -> None:
    write_startpoint(manager, S0, made(clock), **WHO)
    assert manager.read().expired == []
    clock.now += timedelta(hours=12)
    assert [request.ssp for request in manager.read().expired] == [S0]
    assert describe_dropped(manager.fan_out({T0: [S0]})) == [
        "lake.s.0: a startpoint (ada: ticket 7) has expired: no run has taken it up in time"
    ]
    assert manager.read().expired == []


def test_a_startpoint_that_is_written_again_after_it_was_handed_out_is_a_new_request(
    manager: StartpointManager, clock: Clock
) -> None:
    startpoint, ids = made(clock), set()
    for _ in range(3):
        write_startpoint(manager, S0, startpoint, **WHO)
        ids.add(manager.fan_out({T0: [S0]}).tasks[T0][S0].id)
    assert len(ids) == 3
    assert pending(manager) == {T0: {S0: startpoint}}


def test_a_request_that_is_written_again_is_applied_once_and_that_is_reported(
    manager: StartpointManager, clock: Clock
) -> None:
    request = StartpointRequest(ssp=S0, startpoint=made(clock), **WHO)
    manager.write_startpoints([request])
    manager.fan_out({T0: [S0]})
    manager.write_startpoints([request])
    manager.fan_out({T0: [S0]})
    assert handed_to(manager, T0)[S0].id == request.id
    manager.write_startpoints([request])
    report = manager.fan_out({T0: [S0]}, taken=lambda task, handed: handed.id == request.id)
    assert report.tasks == {}, "a commit has taken it in"
    assert [passed.id for passed in report.already_applied] == [request.id]
    assert "had been applied already" in describe_dropped(report)[0]
    assert manager.read().waiting == []


def test_one_that_loses_to_a_later_one_at_its_task_is_reported(
    manager: StartpointManager, clock: Clock
) -> None:
    write_startpoint(manager, S0, made(clock), **WHO)
    manager.fan_out({T0: [S0]})
    write_startpoint(manager, S0, made(clock, hours=1), task=T0, **WHO)
    report = manager.fan_out({T0: [S0]})
    assert [request.task for request in report.superseded] == [T0]
    assert "is skipped: a later request waits there" in describe_dropped(report)[0]


def test_an_applied_request_does_not_outrank_one_with_a_slow_clock(
    manager: StartpointManager, clock: Clock
) -> None:
    applied, behind = made(clock), made(clock, hours=1)
    write_startpoint(manager, S0, applied, **WHO)
    manager.fan_out({T0: [S0]})
    write_startpoint(manager, S0, behind, task=T0, **WHO)
    report = manager.fan_out({T0: [S0]}, taken=lambda task, handed: handed.startpoint == applied)
    assert report.tasks[T0][S0].startpoint == behind
    assert (report.superseded, report.already_applied) == ((), ())


@pytest.mark.parametrize("expires_after", [5, timedelta, "12 hours"])
def test_an_expiry_that_is_no_span_is_refused(lake: Lake, expires_after: Any) -> None:
    with pytest.raises(ConfigurationError) as failure:
        StartpointManager(MetadataStore(lake), "app", expires_after=expires_after)
    assert failure.value.facts["argument"] == "expires_after"


def test_no_expiry_and_no_time_of_creation_is_too_long_to_be_counted(
    lake: Lake, clock: Clock
) -> None:
    manager = StartpointManager(
        MetadataStore(on_clock(lake, clock)), "app", expires_after=timedelta.max
    )
    for number, creation in enumerate((-62_135_596_800_000, 253_402_300_799_999)):
        ssp = SystemStreamPartition("lake", "s", number)
        write_startpoint(manager, ssp, StartpointOldest(creation_timestamp_ms=creation), **WHO)
    assert len(manager.read().waiting) == 2
    rows = collect_startpoints(
        lake, {}, Application("app", startpoints_expire_after=timedelta.max), clock.now
    )["waiting"]
    assert all("days" in row["age"] or "days" in row["expires_in"] for row in rows)


def test_a_map_of_some_tasks_takes_nothing_from_the_others(
    manager: StartpointManager, clock: Clock
) -> None:
    shared, own = made(clock), made(clock)
    write_startpoint(manager, S0, shared, **WHO)
    write_startpoint(manager, S1, own, task=T1, **WHO)
    manager.fan_out({T0: [S0], T1: [S0, S1]})
    manager.fan_out({T0: [S0]})
    assert pending(manager) == {T0: {S0: shared}, T1: {S0: shared, S1: own}}
    manager.remove_fan_out_for_task(T0)
    manager.fan_out({T0: [S0]})
    assert pending(manager) == {T1: {S0: shared, S1: own}}, "what it has applied does not come back"
    manager.fan_out({T0: [S0]}, complete=True)
    assert pending(manager) == {T1: {S1: own}}, "T1 is gone, and all who read the partition got it"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartpointYesterday(Startpoint):
    """A position that a user has invented."""

    kind: ClassVar[str] = "yesterday"

    def apply(self, given: Any, visitor: Any) -> Any:
        return visitor.visit_oldest(given, StartpointOldest())


@dataclass(frozen=True, slots=True, kw_only=True)
class StartpointSpecificWhy(StartpointSpecific):
    """A position of a kind that is known, with a field that nobody knows."""

    why: str = ""


class StartpointMine(StartpointOldest):
    """A position of a kind that is known, under another name."""


@pytest.mark.parametrize(
    "own", [StartpointYesterday(), StartpointSpecificWhy(offset="0"), StartpointMine()]
)
def test_a_startpoint_of_a_class_of_ones_own_is_refused_when_it_is_asked_for(
    lake: Lake, manager: StartpointManager, own: Startpoint
) -> None:
    app = Application("app")
    app.input_stream("lake.s", default_offset="oldest")
    LakeStreams(lake).create("s", schema=Schema.of(k="int"), partitions=1)
    startpoints = Startpoints(app, lake=lake)
    for ask, argument in (
        (lambda: startpoints.preview("lake.s", own), "position"),
        (lambda: startpoints.request("lake.s", own, **WHO), "position"),
        (lambda: startpoints.request("lake.s", StartpointOldest(), until=own, **WHO), "until"),
        (lambda: StartpointRequest(ssp=S0, startpoint=own, **WHO), "startpoint"),
        (
            lambda: StartpointRequest(ssp=S0, startpoint=StartpointOldest(), until=own, **WHO),
            "startpoint",
        ),
    ):
        with pytest.raises(ConfigurationError) as refused:
            ask()
        assert refused.value.argument == argument
        assert type(own).__name__ in refused.value.problem
    assert manager.read().waiting == manager.read().unreadable == []
    assert startpoints.request("lake.s", StartpointOldest(), **WHO).written


def test_a_request_of_a_class_of_ones_own_is_refused_by_the_manager(
    manager: StartpointManager,
) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Ticketed(StartpointRequest):
        ticket: int = 7

    with pytest.raises(ConfigurationError):
        manager.write_startpoints([Ticketed(ssp=S0, startpoint=StartpointOldest(), **WHO)])
    assert manager.read().waiting == manager.read().unreadable == []

"""Asking for startpoints and taking them back: all or none, what takes whose place, and what
can't be taken back.
"""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.startpoints.startpoints import (
    AskedStartpoints,
    TakenBack,
    build_requests,
    collect_startpoints,
    request_startpoints,
    take_back_startpoints,
)
from dagster_adjunct.orchestration.startpoints.store import open_startpoints
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.streams.startpoint import (
    Startpoint,
    StartpointOldest,
    StartpointSpecific,
    StartpointUpcoming,
)
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.faulty_store import Crash, Fault
from tests.orchestration.offsets.offsets_world import Batch, OffsetsWorld, ssp

WHO: dict[str, Any] = {"by": "ada", "reason": "ticket 7"}

S = [SystemStreamPartition("fake", "s", number) for number in range(4)]


@pytest.fixture
def world() -> OffsetsWorld:
    """Stream fake.s with 4 partitions of 9 records each."""
    world = OffsetsWorld()
    world.fake.make("s", 4)
    for partition in range(4):
        world.fake.write("s", partition, *range(1000, 10_000, 1000))
    return world


@pytest.fixture
def app() -> Application:
    app = Application("orders", max_batch_records=4)
    app.input_stream("fake.s")
    return app


def at(*numbers: int) -> list[SystemStreamPartition]:
    return [S[number] for number in numbers]


def asked(
    world: OffsetsWorld,
    app: Application,
    position: Startpoint,
    *numbers: int,
    until: Startpoint | None = None,
    task: str | None = None,
    **how: Any,
) -> AskedStartpoints:
    requests = build_requests(
        at(*numbers), position, until, task=task, **{**WHO, **how.pop("who", {})}
    )
    return request_startpoints(world.lake, world.systems(), app, requests, **how)


def back(
    world: OffsetsWorld, app: Application, *numbers: int, task: str | None = None
) -> TakenBack:
    return take_back_startpoints(world.lake, app, at(*numbers) or None, task=task, **WHO)


def waiting(world: OffsetsWorld, app: Application) -> dict[str, str]:
    return {
        str(request.ssp): request.startpoint.kind
        for request in world.startpoints(app).read().waiting
    }


def fan_out(world: OffsetsWorld, app: Application) -> None:
    world.startpoints(app).fan_out(
        plan_application(app, systems=world.systems()).partitions_by_task()
    )


def crash_in_a_batch(world: OffsetsWorld, app: Application) -> None:
    """Run until the output of the next batch, and die there: its intent stays open."""

    def die(batch: Batch) -> None:
        raise Crash

    world.output.before = die
    with pytest.raises(Crash):
        world.run(app)
    world.output.before = lambda batch: None


# -- asking


def test_all_are_asked_for_or_none(world: OffsetsWorld, app: Application) -> None:
    with pytest.raises(ConfigurationError) as error:
        asked(world, app, StartpointSpecific(offset="@90"), 0, 1, 2)
    assert "nothing is written. fake.s.0: the startpoint's offset @90" in str(error.value)
    assert "The same goes for 2 more of the 3 partitions" in str(error.value)
    with pytest.raises(ConfigurationError) as failure:
        asked(world, app, StartpointOldest(), 1, task="Partition 9")
    assert failure.value.facts["stream"] == "fake.s"
    assert waiting(world, app) == {}
    assert asked(world, app, StartpointOldest(), 0, 1).written
    assert waiting(world, app) == {"fake.s.0": "oldest", "fake.s.1": "oldest"}


def test_a_dry_run_writes_nothing_and_refuses_nothing(
    world: OffsetsWorld, app: Application
) -> None:
    answer = asked(world, app, StartpointSpecific(offset="@90"), 0, dry_run=True)
    assert (answer.written, answer.to_json()["written"]) == (False, False)
    assert "@90" in answer.previews[0].effect
    assert waiting(world, app) == {}


def test_one_that_goes_on_from_the_checkpoint_is_written_though_it_has_no_offset_yet(
    world: OffsetsWorld, app: Application
) -> None:
    world.run(app)
    assert asked(
        world, app, StartpointSpecific(offset="@10"), 0, who={"on_unresolved": "checkpoint"}
    ).written
    assert world.delivered(app) == []
    world.fake.write("s", 0, 10_000, 11_000)
    (batch,) = world.delivered(app)
    assert batch.read() == {S[0]: ("@10", "@11")}


def test_what_is_not_applied_is_replaced_and_reported_so(
    world: OffsetsWorld, app: Application
) -> None:
    asked(world, app, StartpointOldest(), 0)
    fan_out(world, app)
    asked(world, app, StartpointUpcoming(), 1, 2)
    answer = asked(world, app, StartpointSpecific(offset="@3"), 0, 1, 3, who={"by": "eve"})
    assert [replaced.summary() for replaced in answer.replaced] == [
        "fake.s.0: oldest, handed to Partition 0 (ada: ticket 7)",
        "fake.s.1: upcoming, waiting (ada: ticket 7)",
    ]
    world.run(app)
    applied = world.state(app).offsets.applied
    assert {ssp: (start.by, start.offset) for ssp, start in applied.items()} == {
        ssp("fake.s.0"): ("eve", "@3"),
        ssp("fake.s.1"): ("eve", "@3"),
        ssp("fake.s.2"): ("ada", "@9"),
        ssp("fake.s.3"): ("eve", "@3"),
    }
    assert asked(world, app, StartpointOldest(), 0, dry_run=True).replaced == ()


def test_one_for_a_task_takes_the_place_of_one_for_all(
    world: OffsetsWorld, app: Application
) -> None:
    asked(world, app, StartpointOldest(), 0, 1)
    answer = asked(world, app, StartpointUpcoming(), 1, task="Partition 1")
    assert [str(replaced.request.ssp) for replaced in answer.replaced] == ["fake.s.1"]
    world.run(app)
    assert world.state(app).offsets.applied[S[1]].position == "upcoming"


def test_a_replay_that_would_read_nothing_is_rejected_as_its_dry_run_says(
    world: OffsetsWorld, app: Application
) -> None:
    with pytest.raises(ConfigurationError, match="there are no records") as error:
        asked(world, app, StartpointOldest(), 0, until=StartpointOldest())
    notes = asked(world, app, StartpointOldest(), 0, until=StartpointOldest(), dry_run=True).notes
    assert notes == (f"would be rejected: {error.value}",)


@pytest.mark.parametrize("handed", [False, True])
@pytest.mark.parametrize("bounded_first", [False, True])
def test_a_replay_and_a_startpoint_replace_each_other_only_when_reported_to(
    world: OffsetsWorld, app: Application, bounded_first: bool, handed: bool
) -> None:
    ends = (
        [StartpointSpecific(offset="@5"), None]
        if bounded_first
        else [None, StartpointSpecific(offset="@5")]
    )
    asked(world, app, StartpointOldest(), 0, until=ends[0])
    if handed:
        fan_out(world, app)
    before = waiting(world, app)
    with pytest.raises(ConfigurationError) as error:
        asked(world, app, StartpointSpecific(offset="@2"), 0, 1, until=ends[1])
    assert "would replace" in str(error.value)
    assert "--replace" in str(error.value)
    (reported,) = asked(
        world, app, StartpointSpecific(offset="@2"), 0, 1, until=ends[1], dry_run=True
    ).notes
    assert reported == f"would be rejected: {error.value}"
    assert (
        asked(
            world,
            app,
            StartpointSpecific(offset="@2"),
            0,
            until=ends[1],
            dry_run=True,
            replace=True,
        ).notes
        == ()
    )
    assert waiting(world, app) == before
    assert (
        len(
            asked(
                world, app, StartpointSpecific(offset="@2"), 0, until=ends[1], replace=True
            ).replaced
        )
        == 1
    )
    world.run(app)
    applied = world.state(app).offsets.applied
    assert {ssp: start.offset for ssp, start in applied.items()} == (
        {S[0]: "@2"} if bounded_first else {}
    )


def test_requests_for_a_dataset_and_for_tasks_of_its_stream_are_independent(
    world: OffsetsWorld, app: Application
) -> None:
    world.stream("both", 1)
    app.input_stream("lake.both")
    app.table(unbounded_dataset("rates", input="lake.both", key="k", partitions=1))
    ssp = [SystemStreamPartition("lake", "both", 0)]
    every, table = (
        build_requests(ssp, StartpointOldest(), task=task, **WHO)
        for task in (None, "dataset rates")
    )
    for first, second in ((every, table), (table, every)):
        world.startpoints(app).write_startpoints(first)
        assert (
            request_startpoints(world.lake, world.systems(), app, second, dry_run=True).replaced
            == ()
        )
        back(world, app)


# -- taking back


def test_after_requests_are_taken_back_the_next_run_continues_from_its_checkpoint(
    world: OffsetsWorld, app: Application
) -> None:
    world.run(app)
    asked(world, app, StartpointOldest(), 0, 1)
    fan_out(world, app)
    asked(world, app, StartpointOldest(), 2, 3)
    done = back(world, app, 0, 2)
    assert sorted(startpoint.summary() for startpoint in done.startpoints) == [
        "fake.s.0: oldest, handed to Partition 0 (ada: ticket 7)",
        "fake.s.2: oldest, waiting (ada: ticket 7)",
    ]
    assert (done.replays, done.not_removed) == ((), ())
    read = {ssp for batch in world.delivered(app) for ssp in batch.read()}
    assert read == {S[1], S[3]}


def test_everything_is_taken_back_when_nothing_is_named(
    world: OffsetsWorld, app: Application
) -> None:
    world.run(app)
    asked(world, app, StartpointOldest(), 0)
    fan_out(world, app)
    asked(world, app, StartpointOldest(), 3)
    world.fake.make("s", 2)  # partition 3 is gone
    assert len(back(world, app).startpoints) == 2
    assert (waiting(world, app), world.fanned_out(app)) == ({}, {})
    assert back(world, app) == TakenBack((), (), ())


def test_with_a_task_only_its_own_is_taken_back(world: OffsetsWorld, app: Application) -> None:
    asked(world, app, StartpointOldest(), 0, 1)
    fan_out(world, app)
    asked(world, app, StartpointUpcoming(), 1, task="Partition 1")
    asked(world, app, StartpointUpcoming(), 1)
    done = back(world, app, task="Partition 1")
    assert {(startpoint.request.task, startpoint.at) for startpoint in done.startpoints} == {
        ("Partition 1", None),
        (None, "Partition 1"),
    }
    assert waiting(world, app) == {"fake.s.1": "upcoming"}
    assert set(world.fanned_out(app)) == {("Partition 0", S[0])}


def test_one_that_was_resolved_before_a_crash_is_taken_back_with_its_offset(
    world: OffsetsWorld, app: Application
) -> None:
    world.run(app)
    asked(world, app, StartpointSpecific(offset="@4"), 0)

    # the first one, "startpoint", is heard when its offset is stored
    def die(event: StepEvent) -> None:
        raise Crash

    with pytest.raises(Crash):
        world.run(app, on_event=die)
    assert world.state(app).offsets.resolved[S[0]].offset == "@4"
    (held,) = back(world, app, 0).startpoints
    assert (
        held.summary()
        == "fake.s.0: offset @4, handed to Partition 0, found at offset @4 (ada: ticket 7)"
    )
    assert world.delivered(app) == []


def test_what_the_open_batch_begins_with_stays(world: OffsetsWorld, app: Application) -> None:
    world.run(app)
    asked(world, app, StartpointSpecific(offset="@7"), 0)
    crash_in_a_batch(world, app)
    done = back(world, app, 0)
    assert done.startpoints == ()
    assert done.not_removed == (
        (
            "fake.s.0: offset @7, handed to Partition 0, found at offset @7 (ada: ticket 7): a"
            " batch has begun there"
        ),
    )
    assert set(world.fanned_out(app)) == {("Partition 0", S[0])}
    world.run(app)
    assert world.state(app).offsets.applied[S[0]].offset == "@7"
    (text,) = back(world, app, 0).not_removed
    assert "offset @7 (ada: ticket 7) was applied at" in text
    assert back(world, app, 3).not_removed == ("fake.s.3: there is no request",)


def test_replays_stop_where_they_are_but_not_in_the_middle_of_a_batch(
    world: OffsetsWorld, app: Application
) -> None:
    world.run(app)
    asked(world, app, StartpointOldest(), 0, 1, until=StartpointUpcoming())
    world.run(app, max_batches=1)
    assert [replay.next for replay in world.state(app).offsets.replays.values()] == ["@2", "@2"]
    done = back(world, app, 0)
    assert [(replay.ssp, replay.next) for replay in done.replays] == [(S[0], "@2")]
    assert back(world, app, task="Partition 1").replays == ()
    crash_in_a_batch(world, app)
    stays = back(world, app)
    assert stays.replays == ()
    assert (
        "fake.s.1: the replay from oldest (ada: ticket 7): the open batch is reading it"
        in stays.not_removed[0]
    )
    read = [batch.read() for batch in world.delivered(app)]
    assert [span for spans in read for ssp, span in spans.items() if ssp == "fake.s.0"] == []
    assert world.state(app).offsets.replays == {}


def test_what_a_fan_out_hands_out_meanwhile_is_taken_back_too(
    world: OffsetsWorld, app: Application
) -> None:
    asked(world, app, StartpointOldest(), 0)
    first = Fault("put_if_absent", 1, "meanwhile", lambda: fan_out(world, app))
    done = take_back_startpoints(world.faulty([first]), app, at(0), **WHO)
    assert "handed to Partition 0" in done.startpoints[-1].summary()
    assert (waiting(world, app), world.fanned_out(app)) == ({}, {})


def test_what_a_run_applies_meanwhile_is_not_called_taken_back(
    world: OffsetsWorld, app: Application
) -> None:
    world.run(app)
    asked(world, app, StartpointSpecific(offset="@7"), 0)
    fan_out(world, app)
    done = take_back_startpoints(
        world.faulty([Fault("put_if_match", 1, "meanwhile", lambda: world.run(app))]),
        app,
        at(0),
        **WHO,
    )
    assert done.startpoints == ()
    assert done.not_removed == (
        "fake.s.0: offset @7, handed to Partition 0 (ada: ticket 7): a batch has begun there",
    )
    assert world.state(app).offsets.applied[S[0]].offset == "@7"


@pytest.mark.lengthy
@pytest.mark.parametrize("until", [None, StartpointSpecific(offset="@8")], ids=["start", "replay"])
def test_no_run_begins_at_what_was_taken_back_at_any_of_its_requests(
    app: Application, until: Startpoint | None
) -> None:
    outcomes = set()
    for step in range(1, 60):
        world = OffsetsWorld()
        world.fake.make("s", 1)
        world.fake.write("s", 0, *range(1000, 10_000, 1000))
        world.run(app)
        asked(world, app, StartpointSpecific(offset="@7"), 0, until=until)
        fan_out(world, app)
        done: list[TakenBack] = []

        def clear(world: OffsetsWorld = world, done: list[TakenBack] = done) -> None:
            done.append(back(world, app, 0))

        read = world.reads(app, faults=[Fault("*", step, "meanwhile", clear)], leased=True)
        if not done:
            break
        taken = bool(done[0].startpoints or done[0].replays)
        outcomes.add(taken)
        if taken:
            assert read == [], step
            assert world.state(app).offsets.applied == {}, step
        else:
            assert read, step
            assert done[0].not_removed, step
        assert world.reads(app, leased=True) == []
    assert outcomes == {True, False}


def test_an_applied_request_left_by_a_crash_does_not_count_as_replaced(
    world: OffsetsWorld, app: Application
) -> None:
    asked(world, app, StartpointSpecific(offset="@8"), 1)
    world.die_before_the_removal(app)
    assert set(world.fanned_out(app)) == {("Partition 1", S[1])}
    assert asked(world, app, StartpointOldest(), 1, dry_run=True).replaced == ()
    assert collect_startpoints(world.lake, world.systems(), app, world.now)["handed"] == []
    (text,) = back(world, app, 1).not_removed
    assert "offset @8 (ada: ticket 7) was applied at" in text


def test_what_is_taken_back_while_a_coordinator_decides_is_not_handed_out(
    world: OffsetsWorld, app: Application
) -> None:
    for step in range(1, 12):  # whichever request of the fan-out the clearing falls into
        asked(world, app, StartpointOldest(), 0)
        done: list[TakenBack] = []
        clear = Fault(
            "*",
            step,
            "meanwhile",
            lambda done=done: done.append(take_back_startpoints(world.lake, app, at(0), **WHO)),
        )
        lake = world.faulty([clear])
        handed = open_startpoints(lake, app).fan_out({"Partition 0": at(0)}).tasks
        if done:
            assert len(done[0].startpoints) == 1
            later = open_startpoints(world.lake, app).fan_out({"Partition 0": at(0)}).tasks
            assert later == {}, (step, handed)
        take_back_startpoints(world.lake, app, **WHO)


def test_a_replay_of_nothing_is_refused(world: OffsetsWorld, app: Application) -> None:
    with pytest.raises(ConfigurationError) as failure:
        asked(
            world, app, StartpointSpecific(offset="@3"), 0, 1, until=StartpointSpecific(offset="@3")
        )
    assert failure.value.facts["stream"] == "fake.s"
    assert waiting(world, app) == {}

"""Runs that die at any request, two runs at once, and batches that are given up: every
startpoint counts once.
"""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.resources.errors import CommitConflictError, ConfigurationError
from dagster_adjunct.resources.streams.startpoint import (
    StartpointOldest,
    StartpointSpecific,
    StartpointUpcoming,
)
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.faulty_store import Crash, Fault
from tests.orchestration.offsets.offsets_world import OffsetsWorld, reader, two_partitions

S0, S1 = (SystemStreamPartition.parse(text) for text in ("fake.s.0", "fake.s.1"))
T0, T1 = "Partition 0", "Partition 1"


@pytest.fixture
def world() -> OffsetsWorld:
    return two_partitions()


@pytest.mark.parametrize("requests", range(8))
def test_a_crash_around_the_commit_applies_a_startpoint_exactly_once(
    world: OffsetsWorld, requests: int
) -> None:
    """It dies so many requests after the output was written: before the commit, after it, or
    after the removal.
    """
    app = reader()
    world.run(app)
    startpoint = world.ask(app, S0, StartpointSpecific, offset="@1")
    world.output.before = lambda batch: world.die_after(requests)
    died = crashes(world, app)
    world.output.before = lambda batch: None
    committed = world.state(app).open is None
    waits = world.fanned_out(app) == {(T0, S0): startpoint}
    assert waits or committed, "removed before it was committed"
    assert died or (committed and not waits)
    world.fake.write("s", 0, 4)
    after = world.reads(app)
    assert after == [{S0: ("@3", "@4")}]
    assert world.output.batches[2].read() == {S0: ("@1", "@3")}
    assert world.state(app).offsets.epochs.main == {S0: 1}
    assert world.fanned_out(app) == {}


def test_some_crash_comes_between_the_commit_and_the_removal(world: OffsetsWorld) -> None:
    """The one above would prove little if none did."""
    app = reader()
    world.run(app)
    world.ask(app, S0, StartpointOldest)
    world.output.before = lambda batch: world.die_after(2)
    assert crashes(world, app)
    assert world.state(app).open is None
    assert world.fanned_out(app)


@pytest.mark.lengthy
def test_after_a_crash_every_record_is_read_once_from_the_startpoint() -> None:
    for nth in range(1, 200):
        world = OffsetsWorld()
        world.fake.make("s", 2)
        world.fake.write("s", 0, 1, 2, 3)
        world.fake.write("s", 1, 1, 2, 3)
        app = reader(max_batch_records=4)
        world.run(app)
        world.ask(app, S0, StartpointSpecific, offset="@1")
        world.ask(app, S1, StartpointUpcoming)
        died = crashes(world, app, faults=[Fault("*", nth, "crash-before")])
        world.fake.write("s", 1, 4, 5)
        world.run(app)
        records = [
            (ssp, batch.epochs.get(ssp, 0), number)
            for batch in world.output.batches.values()
            for ssp, (start, end) in batch.ranges.items()
            for number in range(int(start[1:]), int(end[1:]))
        ]
        assert len(set(records)) == len(records)
        assert {record for record in records if record[0] == S0 and record[1]} == {
            (S0, 1, 1),
            (S0, 1, 2),
        }
        # Upcoming was resolved before the crash, or is so after it.
        moved = world.state(app).offsets.applied[S1].offset
        assert moved in ("@3", "@5")
        assert {record for record in records if record[0] == S1 and record[1]} == {
            (S1, 1, n) for n in range(int(moved[1:]), 5)
        }
        assert world.state(app).checkpoint == {S0: "@3", S1: "@5"}
        assert world.fanned_out(app) == {}
        assert world.startpoints(app).read().waiting == []
        if not died:
            assert nth > 20
            return
    pytest.fail("the run never ended")


def test_a_restart_with_some_tasks_removed_and_others_not_applies_the_rest_once(
    world: OffsetsWorld,
) -> None:
    app = reader()
    world.run(app)
    ids = {
        S0: world.ask(app, S0, StartpointOldest),
        S1: world.ask(app, S1, StartpointSpecific, offset="@2"),
    }
    world.output.before = lambda batch: world.die_after(2)
    assert crashes(world, app)
    world.output.before = lambda batch: None
    # Both are committed. One task's fan-out is removed, the other's is not, and a third startpoint
    # comes.
    world.startpoints(app).remove_fan_out_for_task(T0)
    assert world.fanned_out(app) == {(T1, S1): ids[S1]}
    world.ask(app, S0, StartpointSpecific, offset="@1")
    (batch,) = world.delivered(app)
    assert (batch.read(), batch.epochs) == ({S0: ("@1", "@3")}, {S0: 2, S1: 1})
    assert world.fanned_out(app) == {}


def test_one_applied_and_not_removed_does_not_hide_a_newer_one(world: OffsetsWorld) -> None:
    app = reader()
    world.run(app)
    world.ask(app, S0, StartpointOldest)
    world.output.before = lambda batch: world.die_after(2)
    assert crashes(world, app)
    world.output.before = lambda batch: None
    world.wait(seconds=1)
    world.ask(app, S0, StartpointSpecific, offset="@2")
    (batch,) = world.delivered(app)
    assert (batch.read(), batch.epochs) == ({S0: ("@2", "@3")}, {S0: 2})


@pytest.mark.lengthy
def test_two_runs_at_once_apply_a_startpoint_once_and_one_of_them_gives_up(
    world: OffsetsWorld,
) -> None:
    """The second run comes between any two requests of the first."""
    app = reader()
    world.run(app)
    for nth in range(1, 200):
        world.ask(app, S0, StartpointSpecific, offset="@1")
        before = set(world.output.batches)
        others: list[object] = []

        def meanwhile(others: list[object] = others) -> None:
            others.append(outcome(world, app))

        first = outcome(world, app, faults=[Fault("*", nth, "meanwhile", meanwhile)])
        read = [
            batch.read() for number, batch in world.output.batches.items() if number not in before
        ]
        assert read == [{S0: ("@1", "@3")}]
        assert None in [first, *others]
        assert world.fanned_out(app) == {}
        if not others:
            assert nth > 15
            return
    pytest.fail("the run never ended")


# -- a batch that is given up


@pytest.mark.parametrize("skip", [False, True])
def test_an_abandoned_batch_is_read_under_another_number_or_skipped(
    world: OffsetsWorld, skip: bool
) -> None:
    app = reader()
    world.run(app)
    world.ask(app, S0, StartpointSpecific, offset="@1")
    world.output.before = lambda batch: world.die_after(0)
    assert crashes(world, app)
    world.output.before = lambda batch: None
    world.output.batches.pop(2, None)
    given_up = BatchLog(world.lake, "app").abandon(reason="ticket 8", by="ada", skip=skip)
    assert given_up.batch == 2
    assert world.state(app).open is None
    world.fake.write("s", 1, 4)
    (batch,) = world.delivered(app)
    assert batch.number == 3
    # outputs may have what the abandoned batch read, in epoch 1
    assert batch.epochs == {S0: 1 if skip else 2}
    assert batch.read() == {S1: ("@3", "@4")} | ({} if skip else {S0: ("@1", "@3")})
    assert world.fanned_out(app) == {}
    notes = [state.note for _, state in BatchLog(world.lake, "app").history(None) if state.note]
    assert any(
        "ticket 8" in note and ("skipped" if skip else "abandoned") in note for note in notes
    )


def test_nothing_is_abandoned_without_a_reason_or_an_open_batch(world: OffsetsWorld) -> None:
    app = reader()
    world.run(app)
    with pytest.raises(ConfigurationError, match="no open batch"):
        BatchLog(world.lake, "app").abandon(reason="ticket 8", by="ada", skip=False)
    with pytest.raises(ConfigurationError) as caught:
        BatchLog(world.lake, "app").abandon(reason=" ", by="ada", skip=False)
    assert (caught.value.application, caught.value.argument) == ("app", "reason")


def test_a_run_whose_batch_was_given_up_writes_nothing_more(world: OffsetsWorld) -> None:
    app = reader()

    def give_up(event: StepEvent) -> None:
        if event.what == "intent":
            BatchLog(world.lake, "app").abandon(reason="ticket 8", by="ada", skip=False)

    with pytest.raises(CommitConflictError, match="taken over") as caught:
        world.run(app, on_event=give_up)
    assert caught.value.application == "app"
    assert world.output.batches == {}
    assert world.reads(app) == [{S0: ("@0", "@3"), S1: ("@0", "@3")}]


# -- how


def crashes(world: OffsetsWorld, app: Application, **options: Any) -> bool:
    try:
        world.run(app, **options)
    except Crash:
        return True
    return False


def outcome(world: OffsetsWorld, app: Application, **options: Any) -> CommitConflictError | None:
    try:
        world.run(app, **options)
    except CommitConflictError as conflict:
        return conflict
    return None

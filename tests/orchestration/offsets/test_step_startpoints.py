"""From a request to its commit: resolved once, stored before reading, applied once, removed
after; whatever dies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.startpoints.request import StartpointRequest
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import ConfigurationError, OffsetOutOfRangeError
from dagster_adjunct.resources.streams.startpoint import (
    Startpoint,
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
)
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.faulty_store import Crash
from tests.orchestration.offsets.fake_streams import FakeStreams, TimelessStreams
from tests.orchestration.offsets.offsets_world import OffsetsWorld, reader, two_partitions
from tests.orchestration.offsets.stored_startpoints import write_startpoint

S0, S1 = (SystemStreamPartition.parse(text) for text in ("fake.s.0", "fake.s.1"))
A0, A1 = (SystemStreamPartition.parse(text) for text in ("lake.a.0", "lake.a.1"))
T0, T1 = "Partition 0", "Partition 1"


@pytest.fixture
def world() -> OffsetsWorld:
    return two_partitions()


def resolved(world: OffsetsWorld, app: Application) -> dict[str, str]:
    return {ssp: resolution.offset for ssp, resolution in world.state(app).offsets.resolved.items()}


def test_upcoming_stays_where_it_was_resolved_even_without_records(world: OffsetsWorld) -> None:
    app = reader()
    world.run(app)
    startpoint = world.ask(app, S0, StartpointUpcoming)
    assert world.reads(app) == []
    applied = world.state(app).offsets.applied[S0]
    assert (applied.id, applied.offset, applied.epoch, applied.batch) == (startpoint, "@3", 1, None)
    world.fake.write("s", 0, 4, 5)
    (batch,) = world.delivered(app)
    assert (batch.read(), batch.epochs) == ({S0: ("@3", "@5")}, {S0: 1})


def test_records_that_arrive_after_a_run_died_that_resolved_upcoming_are_read(
    world: OffsetsWorld,
) -> None:
    app = reader()
    world.run(app)
    world.ask(app, S0, StartpointUpcoming)
    world.begin(app)
    world.fake.write("s", 0, 4, 5)
    assert world.reads(app) == [{S0: ("@3", "@5")}]


@pytest.mark.parametrize("filled", [True, False])
def test_a_timestamp_past_the_end_or_in_an_empty_partition_resolves_to_upcoming(
    world: OffsetsWorld, filled: bool
) -> None:
    if not filled:
        world.fake.make("s", 2)
    app = reader()
    world.run(app)
    world.ask(app, S0, StartpointTimestamp, timestamp_ms=100)
    assert world.reads(app) == []
    world.fake.write("s", 0, 7, 200)
    assert world.reads(app) == [{S0: ("@3", "@5") if filled else ("@0", "@2")}]


def test_a_timestamp_starts_at_the_first_record_at_or_after_it(world: OffsetsWorld) -> None:
    app = reader()
    world.run(app)
    world.ask(app, [S0, S1], StartpointTimestamp, timestamp_ms=2)
    (batch,) = world.delivered(app)
    assert (batch.read(), batch.epochs) == ({S0: ("@1", "@3"), S1: ("@1", "@3")}, {S0: 1, S1: 1})


def test_streams_of_the_lake_start_where_startpoints_say(world: OffsetsWorld) -> None:
    world.stream("a", 2)
    app = reader()
    app.input_stream("lake.a")
    world.send("a", *range(20))
    first = world.reads(app)[0]
    world.wait(hours=1)
    world.send("a", *range(20))
    later = world.now_ms
    second = world.reads(app)[0]
    world.ask(app, A0, StartpointTimestamp, timestamp_ms=later)
    world.ask(app, A1, StartpointSpecific, offset="3")
    (batch,) = world.delivered(app)
    assert batch.read() == {A0: second[A0], A1: ("3", second[A1][1])}
    assert first[A0][1] == second[A0][0]
    assert batch.epochs == {A0: 1, A1: 1}


@pytest.mark.parametrize("offset", ["@4", "@0", "7"])
def test_an_offset_that_is_not_there_fails_the_start_and_is_not_consumed(
    world: OffsetsWorld, offset: str
) -> None:
    app = reader()
    world.run(app)
    world.fake.retain_from("s", 0, 1)
    world.fake.write("s", 1, 4)
    startpoint = world.ask(app, S0, StartpointSpecific, offset=offset)
    for _ in range(2):
        with pytest.raises(
            OffsetOutOfRangeError, match=f"startpoint of ada .ticket 7. at {S0}.*{offset}"
        ) as refused:
            world.run(app)
        assert "adjunct startpoint clear" in refused.value.next_step
        assert world.fanned_out(app) == {(T0, S0): startpoint}
    assert world.state(app).checkpoint == {S0: "@3", S1: "@3"}
    world.ask(app, S0, StartpointSpecific, offset="@2")
    assert world.reads(app) == [{S0: ("@2", "@3"), S1: ("@3", "@4")}]


def test_one_that_may_fall_back_goes_on_from_the_checkpoint_and_counts_once_it_can(
    world: OffsetsWorld,
) -> None:
    app = reader()
    world.run(app)
    startpoint = world.ask(app, S0, StartpointSpecific, offset="@4", on_unresolved="checkpoint")
    world.fake.write("s", 1, 4)
    report = world.run(app)
    assert world.output.batches[2].read() == {S1: ("@3", "@4")}
    assert [
        text
        for text in report.startpoints
        if "continues from its checkpoint" in text and str(S0) in text
    ]
    assert world.fanned_out(app) == {(T0, S0): startpoint}
    world.fake.write("s", 0, 4, 5)
    (batch,) = world.delivered(app)
    assert (batch.read(), batch.epochs) == ({S0: ("@4", "@5")}, {S0: 1})
    assert world.fanned_out(app) == {}


def test_a_kind_that_the_system_lacks_fails_the_start_and_names_what_it_has(
    world: OffsetsWorld,
) -> None:
    world.fake.__class__ = TimelessStreams
    app = reader()
    world.ask(app, S0, StartpointTimestamp, timestamp_ms=2)
    with pytest.raises(
        ConfigurationError, match=r"'fake' can't start at .*'timestamp'.*oldest, upcoming, specific"
    ):
        world.run(app)


def test_one_that_is_written_while_a_run_is_in_progress_waits_for_the_next(
    world: OffsetsWorld,
) -> None:
    app = Application("app", max_batch_records=2)
    app.input_stream("fake.s")

    def ask(_: object) -> None:
        world.output.before = lambda batch: None
        world.ask(app, S0, StartpointOldest)

    world.output.before = ask
    assert all(not batch.epochs for batch in world.delivered(app))
    assert world.state(app).checkpoint == {S0: "@3", S1: "@3"}
    assert {batch.epochs.get(S0) for batch in world.delivered(app)} == {1}


def test_a_request_handed_out_during_a_run_survives_the_removal_of_an_older_one(
    world: OffsetsWorld,
) -> None:
    app = reader()
    world.run(app)
    world.ask(app, S0, StartpointOldest)

    def coordinate(_: object) -> None:
        world.ask(app, S0, StartpointSpecific, offset="@2")
        world.startpoints(app).fan_out(app_tasks(world, app))

    world.output.before = coordinate
    assert world.reads(app) == [{S0: ("@0", "@3")}]
    world.output.before = lambda batch: None
    (batch,) = world.delivered(app)
    assert (batch.read(), batch.epochs) == ({S0: ("@2", "@3")}, {S0: 2})


def test_a_newer_one_replaces_what_is_pending_and_what_is_resolved(world: OffsetsWorld) -> None:
    app = reader()
    world.run(app)
    world.ask(app, S0, StartpointOldest)
    world.startpoints(app).fan_out(app_tasks(world, app))
    world.ask(app, S0, StartpointSpecific, offset="@1")
    world.begin(app)
    assert resolved(world, app) == {S0: "@1"}
    third = world.ask(app, S0, StartpointSpecific, offset="@2")
    assert world.reads(app) == [{S0: ("@2", "@3")}]
    applied = world.state(app).offsets.applied[S0]
    assert (applied.id, applied.epoch) == (third, 1)


def test_of_a_broadcast_and_one_for_the_task_the_later_made_counts(world: OffsetsWorld) -> None:
    app = reader()
    world.run(app)
    specific = world.ask(app, S0, StartpointSpecific, task=T0, offset="@2")
    world.wait(seconds=-1)
    world.ask(app, S0, StartpointOldest)
    assert world.reads(app) == [{S0: ("@2", "@3")}]
    assert world.state(app).offsets.applied[S0].id == specific
    world.wait(seconds=5)
    world.ask(app, S0, StartpointSpecific, task=T0, offset="@2")
    world.wait(seconds=1)
    world.ask(app, S0, StartpointSpecific, offset="@1")
    assert world.reads(app) == [{S0: ("@1", "@3")}]
    assert world.fanned_out(app) == {}


def test_an_expired_request_is_not_applied_and_a_handed_out_one_does_not_expire(
    world: OffsetsWorld,
) -> None:
    app = reader(startpoints_expire_after=timedelta(hours=1))
    world.run(app)
    world.ask(app, S0, StartpointOldest)
    world.startpoints(app).fan_out(app_tasks(world, app))
    world.ask(app, S1, StartpointOldest)
    world.wait(hours=1)
    report = world.run(app)
    assert world.output.batches[2].read() == {S0: ("@0", "@3")}
    assert [text for text in report.startpoints if str(S1) in text and "expired" in text]


def test_a_request_for_what_nobody_reads_waits_and_is_reported(world: OffsetsWorld) -> None:
    app = reader()
    world.ask(app, ["fake.s.7", "fake.other.0"], StartpointOldest)
    world.ask(app, S0, StartpointOldest, task="Partition 9")
    report = world.run(app)
    for name in ("fake.s.7", "fake.other.0", str(S0)):
        assert [text for text in report.startpoints if text.startswith(name) and "waits" in text]
    assert len(world.startpoints(app).read().waiting) == 3
    assert not world.output.batches[1].epochs
    world.fake.add_partitions("s", 6)
    assert world.delivered(app) == []
    assert set(map(str, world.state(app).offsets.applied)) == {"fake.s.7"}


def test_a_new_plan_gives_a_pending_startpoint_to_the_task_that_reads_it_now(
    world: OffsetsWorld,
) -> None:
    app = reader()
    world.run(app)
    world.ask(app, S0, StartpointOldest)
    world.ask(app, S1, StartpointOldest, task=T1)
    world.begin(app)
    world.fake.write("s", 0, 4)
    # Resolved as it was, by whichever task; the one for a task that does not read the partition any
    # more waits for it.
    assert world.reads(app, tasks={"All": [S0, S1]}) == [{S0: ("@0", "@4")}]
    assert set(world.fanned_out(app)) == {(T1, S1)}
    assert world.reads(app) == [{S1: ("@0", "@3")}]
    assert world.fanned_out(app) == {}


def test_a_startpoint_that_is_written_again_after_it_was_applied_is_applied_again(
    world: OffsetsWorld,
) -> None:
    app, ssp = reader(), S0
    startpoint = StartpointSpecific(offset="@1", creation_timestamp_ms=world.now_ms)
    world.run(app)
    for epoch in (1, 2):
        write_startpoint(world.startpoints(app), ssp, startpoint, by="ada", reason="ticket 7")
        (batch,) = world.delivered(app)
        assert (batch.read(), batch.epochs) == ({S0: ("@1", "@3")}, {S0: epoch})


@pytest.mark.parametrize("until", [None, StartpointSpecific(offset="@3")])
@pytest.mark.parametrize("between", [False, True])
def test_an_applied_request_that_is_written_again_is_reported_and_not_applied(
    world: OffsetsWorld, between: bool, until: Startpoint | None
) -> None:
    app = reader()
    world.run(app)
    startpoint = StartpointSpecific(offset="@1", creation_timestamp_ms=world.now_ms)
    request = StartpointRequest(
        ssp=S0, startpoint=startpoint, until=until, by="ada", reason="ticket 7"
    )
    world.startpoints(app).write_startpoints([request])
    assert world.reads(app) == [{S0: ("@1", "@3")}]
    if between:
        world.ask(app, S0, StartpointOldest)
        assert world.reads(app) == [{S0: ("@0", "@3")}]
    world.startpoints(app).write_startpoints([request])
    report = world.run(app)
    assert report.batches == 0
    assert report.startpoints == (
        (
            "fake.s.0: a startpoint (ada: ticket 7) had been applied already, and each request is"
            " applied once: write a new one"
        ),
    )


def test_a_tasks_request_with_a_slow_clock_survives_a_crash_before_a_removal(
    world: OffsetsWorld,
) -> None:
    app = reader()
    world.run(app)
    world.ask(app, S0, StartpointOldest)
    world.die_before_the_removal(app)
    assert set(world.fanned_out(app)) == {(T0, S0)}, "applied, and not removed"
    world.wait(hours=-1)
    world.ask(app, S0, StartpointSpecific, task=T0, offset="@2")
    assert world.reads(app) == [{S0: ("@2", "@3")}]


def test_what_was_handed_out_waits_for_the_input_when_it_is_deployed_without_it(
    world: OffsetsWorld,
) -> None:
    app, without = reader(), Application("app")
    world.stream("a", 2)
    without.input_stream("lake.a")
    world.run(app)
    asked = [world.ask(app, S0, StartpointOldest), world.ask(app, S1, StartpointOldest, task=T1)]
    world.startpoints(app).fan_out(app_tasks(world, app))
    for _ in range(2):
        texts = world.run(without).startpoints
        assert len([text for text in texts if "no task reads the partition any more" in text]) == 2
        world.wait(days=1)
    assert world.reads(app) == [{S0: ("@0", "@3"), S1: ("@0", "@3")}]
    assert [world.state(app).offsets.applied[ssp].id for ssp in (S0, S1)] == asked


def test_what_retention_takes_of_a_startpoint_is_declared_to_be_of_it_and_whose_it_is(
    world: OffsetsWorld,
) -> None:
    app = reader()
    world.run(app)
    world.ask(app, S0, StartpointSpecific, offset="@1")
    world.begin(app)
    world.fake.retain_from("s", 0, 2)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        world.run(app)
    assert "retention has passed the startpoint offset @1 of ada (ticket 7) in fake.s.0" in str(
        caught.value
    )
    assert "checkpoint of" not in str(caught.value)
    assert "adjunct startpoint clear MODULE:APP fake.s.0" in str(caught.value)
    world.fake.retain_from("s", 1, 3)
    world.fake.write("s", 1, 4)
    world.fake.retain_from("s", 1, 4)
    with pytest.raises(
        OffsetOutOfRangeError, match=r"the checkpoint of application 'app' in fake\.s\.1"
    ):
        world.run(app)


class Broken(FakeStreams):
    """The same streams, of which the system has one answer to whatever it is asked for an
    offset.
    """

    def __init__(self, streams: FakeStreams, answer: Any) -> None:
        super().__init__()
        self.streams, self.answer = streams.streams, answer

    def oldest(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, Any]:
        return dict.fromkeys(ssps, self.answer)

    upcoming = oldest

    def offset_for_timestamp(self, ssp: SystemStreamPartition, timestamp_ms: int) -> Any:
        return self.answer


@pytest.mark.parametrize("answer", [None, "", 7])
@pytest.mark.parametrize("asked", [StartpointOldest, StartpointUpcoming, StartpointTimestamp])
def test_a_system_that_answers_no_offset_is_named_and_nothing_is_stored(
    world: OffsetsWorld, asked: Any, answer: Any
) -> None:
    app = reader()
    world.run(app)
    before = world.state(app)
    world.ask(app, S0, asked, **({"timestamp_ms": 1} if asked is StartpointTimestamp else {}))
    world.fake = Broken(world.fake, answer)
    with pytest.raises(ConfigurationError, match=rf"fake\.s\.0.*{answer!r}") as caught:
        world.run(app)
    assert (caught.value.stream, caught.value.system) == ("fake.s", "fake")
    assert world.state(app) == before


@pytest.mark.parametrize("until", [None, "@03", "@003"])
@pytest.mark.parametrize("offset", ["@3", "@03"])
def test_two_ways_of_writing_one_offset_are_one_offset(
    world: OffsetsWorld, offset: str, until: str | None
) -> None:
    app = reader()
    world.run(app)
    end = None if until is None else StartpointSpecific(offset=until)
    world.ask(app, S0, StartpointSpecific, offset=offset, until=end)
    assert world.delivered(app) == [], "there is nothing at the end of the stream"
    assert world.state(app).checkpoint[S0] == "@3"


def test_a_position_that_is_written_in_another_way_is_read_to_its_end_once(
    world: OffsetsWorld,
) -> None:
    app = reader(max_batch_records=1)
    world.run(app)
    world.ask(app, S0, StartpointSpecific, offset="@01", until=StartpointSpecific(offset="@0002"))
    assert world.reads(app) == [{S0: ("@01", "@0002")}]
    assert world.delivered(app) == []
    assert not world.state(app).offsets.replays


def die() -> None:
    raise Crash


# -- how


def app_tasks(world: OffsetsWorld, app: Application) -> dict[str, Sequence[Any]]:
    return {
        task: sorted(ssps) for task, ssps in world.context(app).plan.partitions_by_task().items()
    }


def test_the_reported_state_is_the_stored_one_with_its_note(world: OffsetsWorld) -> None:
    app = reader()
    world.run(app)
    world.ask(app, S0, StartpointUpcoming)
    report = world.run(app)
    assert report.state.note == "positions moved, nothing to read there yet"
    assert report.state == world.state(app)


def test_what_a_run_has_fanned_out_for_its_datasets_is_not_fanned_out_again(
    world: OffsetsWorld,
) -> None:
    app = reader()
    world.run(app)
    world.ask(app, [S0, S1], StartpointOldest)
    context = world.context(app)
    fan_out = world.startpoints(app).fan_out(context.plan.partitions_by_task(), complete=True)
    # While the datasets advance, one is taken back, and one is asked for anew: that waits for the
    # next run.
    world.startpoints(app).remove_fan_outs({T0: {S0: fan_out.tasks[T0][S0].id}})
    world.ask(app, S0, StartpointSpecific, offset="@2")
    run_step(replace(context, fan_out=fan_out), world.output)
    assert world.output.batches[2].read() == {S1: ("@0", "@3")}
    assert world.reads(app) == [{S0: ("@2", "@3")}]

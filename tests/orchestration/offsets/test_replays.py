"""Bounded replays: cursors beside the main position, with epochs of their own, that take turns
with the main input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog, OpenedEpochs
from dagster_adjunct.orchestration.startpoints.startpoints import take_back_startpoints
from dagster_adjunct.resources.errors import ConfigurationError, OffsetOutOfRangeError
from dagster_adjunct.resources.streams.startpoint import (
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
)
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.faulty_store import Crash, Fault
from tests.orchestration.offsets.offsets_world import Batch, OffsetsWorld

S0, S1 = (SystemStreamPartition.parse(text) for text in ("fake.s.0", "fake.s.1"))
UNTIL_UPCOMING = StartpointUpcoming()


@pytest.fixture
def world() -> OffsetsWorld:
    """fake.s with two partitions, records 0 to 5 in each, at ms 1 to 6."""
    world = OffsetsWorld()
    fill(world)
    return world


def fill(world: OffsetsWorld) -> None:
    world.fake.make("s", 2)
    for partition in (0, 1):
        world.fake.write("s", partition, 1, 2, 3, 4, 5, 6)


def reader(limit: int = 1000, **options: Any) -> Application:
    app = Application("app", max_batch_records=limit)
    app.input_stream("fake.s", **options)
    return app


def kinds(batches: list[Batch]) -> str:
    """Return which batches are of the main input (m) and which of replays (r)."""
    return "".join("m" if batch.main else "r" for batch in batches)


def numbers(batches: list[Batch], ssp: str, *, main: bool) -> list[int]:
    """Return the records in the order in which they were read."""
    spans = [batch.ranges[ssp] for batch in batches if batch.main == main and ssp in batch.ranges]
    return [number for start, end in spans for number in range(int(start[1:]), int(end[1:]))]


def test_a_replay_reads_exactly_its_range_and_the_main_position_does_not_move(
    world: OffsetsWorld,
) -> None:
    app = reader()
    world.run(app)
    world.ask(
        app, S0, StartpointTimestamp, timestamp_ms=3, until=StartpointTimestamp(timestamp_ms=5)
    )
    report = world.run(app)
    assert world.output.batches[2] == Batch(2, {S0: ("@2", "@4")}, {S0: 1}, main=False)
    state = world.state(app)
    assert (state.checkpoint, dict(state.offsets.replays)) == ({S0: "@6", S1: "@6"}, {})
    assert state.offsets.epochs == OpenedEpochs(highest={S0: 1})
    assert world.fanned_out(app) == {}
    assert [text for text in report.startpoints if str(S0) in text and "ticket 7" in text]
    world.fake.write("s", 0, 7)
    assert world.delivered(app) == [Batch(3, {S0: ("@6", "@7"), S1: ("@6", "@6")}, {}, main=True)]


def test_a_replay_does_not_reach_what_the_main_input_has_not_read(world: OffsetsWorld) -> None:
    app = reader(default_offset="upcoming")
    world.ask(app, S0, StartpointOldest, until=StartpointSpecific(offset="@2"))
    assert world.reads(app) == [{S0: ("@0", "@2")}]
    assert world.state(app).checkpoint == {S0: "@6", S1: "@6"}


def test_until_upcoming_is_what_was_upcoming_when_it_began(world: OffsetsWorld) -> None:
    app = reader(limit=4)
    world.run(app)
    world.ask(app, S0, StartpointOldest, until=UNTIL_UPCOMING)

    def arrive(_: Batch) -> None:
        world.output.before = lambda batch: None
        world.fake.write("s", 0, 7, 8, 9)

    world.output.before = arrive
    batches = world.delivered(app)
    assert numbers(batches, S0, main=False) == [0, 1, 2, 3, 4, 5]
    assert numbers(batches, S0, main=True) == [6, 7, 8]


def test_replays_take_turns_with_the_main_input_and_keep_within_the_limit_of_a_batch(
    world: OffsetsWorld,
) -> None:
    app = reader(limit=2)
    world.run(app)
    world.ask(app, S0, StartpointOldest, until=UNTIL_UPCOMING)
    world.fake.write("s", 1, 7, 8, 9, 10)
    batches = world.delivered(app)
    assert kinds(batches) == "rmrmr"
    assert numbers(batches, S0, main=False) == [0, 1, 2, 3, 4, 5]
    assert numbers(batches, S1, main=True) == [6, 7, 8, 9]
    assert {batch.epochs.get(S0) for batch in batches if not batch.main} == {1}


def test_replays_of_several_partitions_are_read_together(world: OffsetsWorld) -> None:
    app = reader()
    world.run(app)
    world.ask(app, [S0, S1], StartpointSpecific, offset="@4", until=UNTIL_UPCOMING)
    assert world.delivered(app) == [
        Batch(2, {S0: ("@4", "@6"), S1: ("@4", "@6")}, {S0: 1, S1: 1}, main=False)
    ]


def test_two_replays_of_a_partition_follow_each_other_with_an_epoch_each(
    world: OffsetsWorld,
) -> None:
    app = reader(limit=4)
    world.run(app)
    world.ask(app, S0, StartpointOldest, until=StartpointSpecific(offset="@6"))
    world.run(app, max_batches=1)
    world.ask(app, S0, StartpointSpecific, offset="@1", until=StartpointSpecific(offset="@2"))
    batches = world.delivered(app)
    assert [(batch.read(), batch.epochs) for batch in batches] == [
        ({S0: ("@4", "@6")}, {S0: 1}),
        ({S0: ("@1", "@2")}, {S0: 2}),
    ]


def test_a_startpoint_after_a_replay_opens_the_next_epoch_even_during_the_replay(
    world: OffsetsWorld,
) -> None:
    app = reader(limit=2)
    world.run(app)
    world.ask(app, S0, StartpointOldest, until=StartpointSpecific(offset="@4"))
    world.run(app, max_batches=1)
    world.ask(app, S0, StartpointSpecific, offset="@5")
    batches = world.delivered(app)
    assert kinds(batches) == "mr"
    assert [(batch.read(), batch.epochs[S0]) for batch in batches] == [
        ({S0: ("@5", "@6")}, 2),
        ({S0: ("@2", "@4")}, 1),
    ]
    assert world.state(app).offsets.epochs.main == {S0: 2}


@pytest.mark.parametrize(
    ("start", "until", "facts"),
    [
        ("@4", "@2", {"offset": "@4"}),
        ("@7", "@6", {"offset": "@7", "oldest": "@0", "upcoming": "@6"}),
        ("@1", "@9", {"offset": "@9", "oldest": "@0", "upcoming": "@6"}),
    ],
)
def test_a_replay_without_a_range_fails_the_start_and_is_not_consumed(
    world: OffsetsWorld, start: str, until: str, facts: dict[str, str]
) -> None:
    app = reader()
    world.run(app)
    world.ask(app, S0, StartpointSpecific, offset=start, until=StartpointSpecific(offset=until))
    with pytest.raises(OffsetOutOfRangeError) as caught:
        world.run(app)
    assert caught.value.facts == {"stream": "fake.s", "partition": 0, **facts}
    assert list(world.fanned_out(app)) == [("Partition 0", S0)]
    assert dict(world.state(app).offsets.replays) == {}


def test_a_replay_of_an_empty_range_ends_at_once(world: OffsetsWorld) -> None:
    app = reader()
    world.run(app)
    world.ask(app, [S0, S1], StartpointTimestamp, timestamp_ms=100, until=UNTIL_UPCOMING)
    assert world.delivered(app) == []
    assert world.fanned_out(app) == {}
    assert dict(world.state(app).offsets.replays) == {}


def begun_in(limit: int, *dies_at: int) -> tuple[OffsetsWorld, Application, bool]:
    """Let an application that has a replay of records 1 to 5 to begin die at these requests; say
    whether it did.
    """
    world = OffsetsWorld()
    fill(world)
    app = reader(limit=limit)
    world.run(app)
    world.output.batches.clear()
    world.ask(app, S0, StartpointSpecific, offset="@1", until=UNTIL_UPCOMING)
    died = []
    for nth in dies_at:
        try:
            world.run(app, faults=[Fault("*", nth, "crash-before")])
            died.append(False)
        except Crash:
            died.append(True)
    return world, app, all(died)


def check_that_it_was_read_once(world: OffsetsWorld, app: Application) -> None:
    world.fake.write("s", 1, 7)
    world.run(app)
    batches = [batch for _, batch in sorted(world.output.batches.items())]
    assert numbers(batches, S0, main=False) == [1, 2, 3, 4, 5]
    assert numbers(batches, S1, main=True) == [6]
    assert {batch.epochs.get(S0) for batch in batches if not batch.main} == {1}
    assert world.state(app).offsets.epochs.highest == {S0: 1}
    assert world.fanned_out(app) == {}
    assert world.startpoints(app).read().waiting == []


@pytest.mark.lengthy
def test_a_crash_at_any_request_neither_repeats_nor_forgets_a_replay() -> None:
    nth, died = 0, True
    while died:
        nth += 1
        world, app, died = begun_in(4, nth)
        check_that_it_was_read_once(world, app)
    assert nth > 20


@pytest.mark.lengthy
def test_another_crash_after_one_that_left_it_fanned_out_does_not_begin_it_again() -> None:
    left = [nth for nth in range(1, 25) if is_left(*begun_in(4, nth)[:2])]
    assert left
    nth, died = 0, True
    while died:
        nth += 1
        world, app, died = begun_in(4, left[0], nth)
        check_that_it_was_read_once(world, app)


def is_left(world: OffsetsWorld, app: Application) -> bool:
    return bool(world.state(app).offsets.replays and world.fanned_out(app))


# -- replays that can't go on


@pytest.fixture
def replaying(world: OffsetsWorld) -> Application:
    """An application whose replay of S0 has read record 0 of 0 to 3."""
    app = reader(limit=1)
    world.run(app)
    world.ask(app, S0, StartpointOldest, until=StartpointSpecific(offset="@4"))
    world.run(app, max_batches=1)
    (replay,) = world.state(app).offsets.replays.values()
    assert (replay.next, replay.until) == ("@1", "@4")
    return app


def cut_off(world: OffsetsWorld) -> None:
    for partition in world.fake.streams["s"].partitions:
        del partition.times[3:]


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (
            lambda world: world.fake.retain_from("s", 0, 2),
            "deleted its records: the oldest offset left is @2",
        ),
        (cut_off, r"ends before @3"),
        (fill, "deleted and recreated"),
    ],
    ids=["retention", "records lost", "recreated"],
)
def test_a_replay_that_the_stream_does_not_hold_is_an_error_that_says_how_to_cancel(
    world: OffsetsWorld, replaying: Application, happens: Callable[[OffsetsWorld], None], why: str
) -> None:
    happens(world)
    world.ask(replaying, [S0, S1], StartpointOldest)
    with pytest.raises(
        OffsetOutOfRangeError, match=rf"fake\.s\.0: the replay of ada .*@1 of @4.*{why}"
    ) as refused:
        world.run(replaying)
    assert f"startpoint clear MODULE:APP {S0}" in refused.value.next_step
    ids = list(world.state(replaying).offsets.replays)
    assert [
        replay.id
        for replay in BatchLog(world.lake, "app").cancel_replays(ids, reason="ticket 9", by="ada")
    ] == ids
    assert all(batch.main for batch in world.delivered(replaying))


@pytest.mark.parametrize(
    "stream", ["other", "s"], ids=["not read any more", "recreated with fewer partitions"]
)
def test_a_replay_of_what_can_not_be_named_any_more_is_cancelled_with_all(
    world: OffsetsWorld, stream: str
) -> None:
    app = reader(limit=1)
    world.ask(app, S1, StartpointOldest, until=StartpointSpecific(offset="@4"))
    world.run(app, max_batches=1)
    world.fake.make(stream, 1)
    later = Application("app")
    later.input_stream(f"fake.{stream}")
    world.ask(later, f"fake.{stream}.0", StartpointOldest)
    with pytest.raises(OffsetOutOfRangeError, match=r"fake\.s\.1: the replay of ada") as refused:
        world.run(later)
    assert "startpoint clear MODULE:APP --all" in refused.value.next_step
    assert take_back_startpoints(world.lake, later, by="ada", reason="ticket 9").replays
    world.run(later)


def test_a_cancelled_replay_stops_where_it_is_and_does_not_begin_again(
    world: OffsetsWorld, replaying: Application
) -> None:
    log = BatchLog(world.lake, "app")
    (stopped,) = log.cancel_replays(
        list(world.state(replaying).offsets.replays), reason="ticket 9", by="ada"
    )
    assert (stopped.ssp, stopped.next) == (S0, "@1")
    assert world.delivered(replaying) == []
    assert log.cancel_replays([stopped.id], reason="again", by="ada") == []
    assert any("ticket 9" in (state.note or "") for _, state in log.history(None))


@pytest.mark.lengthy
def test_one_that_was_cancelled_while_it_is_still_fanned_out_does_not_begin_again() -> None:
    tried = [begun_in(4, nth) for nth in range(1, 25)]
    left = [(world, app) for world, app, _ in tried if is_left(world, app)]
    assert left
    for world, app in left:
        BatchLog(world.lake, "app").cancel_replays(
            list(world.state(app).offsets.replays), reason="x", by="ada"
        )
        world.run(app)
        assert all(batch.main for batch in world.output.batches.values())
        assert world.fanned_out(app) == {}


def test_a_replay_of_an_open_batch_is_not_cancelled(
    world: OffsetsWorld, replaying: Application
) -> None:
    world.output.before = lambda batch: world.die_after(0)
    with pytest.raises(Crash):
        world.run(replaying)
    with pytest.raises(
        ConfigurationError,
        match=r"batch \d+ of application 'app' is reading a replay on fake\.s\.0",
    ):
        BatchLog(world.lake, "app").cancel_replays(
            list(world.state(replaying).offsets.replays), reason="x", by="ada"
        )


@pytest.mark.parametrize("skip", [False, True])
def test_an_abandoned_batch_of_a_replay_is_read_again_or_skipped(
    world: OffsetsWorld, replaying: Application, skip: bool
) -> None:
    world.output.before = lambda batch: world.die_after(0)
    with pytest.raises(Crash):
        world.run(replaying)
    world.output.before = lambda batch: None
    BatchLog(world.lake, "app").abandon(reason="ticket 8", by="ada", skip=skip)
    assert numbers(world.delivered(replaying), S0, main=False) == ([2, 3] if skip else [1, 2, 3])
    assert world.state(replaying).checkpoint == {S0: "@6", S1: "@6"}

"""Which batch read each record first: at random, against a dictionary that is filled in the
order of batches.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    AppliedStartpoint,
    ClosedBatch,
    OffsetState,
    OpenedEpochs,
)
from dagster_adjunct.orchestration.batch_log.intent import Intent, JoinedVersions
from dagster_adjunct.orchestration.startpoints.recorded_replay import (
    AskedOffsets,
    FirstReads,
    Span,
    collect_main_batches,
    explain_unread,
    find_first_reads,
)
from dagster_adjunct.resources.objects.commit_log import Commit
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
PARTITIONS = [SystemStreamPartition("fake", "s", number) for number in range(3)]
Reads = dict[tuple[SystemStreamPartition, int], int]


def compare(_: SystemStreamPartition, left: str, right: str) -> int:
    return (int(left) > int(right)) - (int(left) < int(right))


def distance(_: SystemStreamPartition, start: str, end: str) -> int:
    return int(end) - int(start)


def history(chance: random.Random) -> tuple[list[ApplicationState], Reads]:
    """Return a log, newest first, of batches that go on, go back, skip and replay; and who read
    each offset first.
    """
    at = dict.fromkeys(PARTITIONS, 0)
    opened = dict.fromkeys(PARTITIONS, 0)
    furthest: dict[SystemStreamPartition, int] = {}
    applied: dict[SystemStreamPartition, AppliedStartpoint] = {}
    first: Reads = {}
    states = [ApplicationState(offsets=OffsetState(streams={"fake.s": "one"}))]
    for number in range(1, chance.randint(4, 12)):
        replays: dict[SystemStreamPartition, str] = {}
        ranges = {}
        for ssp in chance.sample(PARTITIONS, chance.randint(1, 3)):
            kind = chance.choice("mmmmgr")
            start = at[ssp] if kind == "m" else chance.randint(0, at[ssp] + 2)
            end = start + chance.randint(0, 4)
            if kind == "r" or replays:
                replays[ssp] = "a replay"
                opened[ssp] += 1
            elif kind == "g" and start != at[ssp]:
                opened[ssp] += 1
                furthest[ssp] = max(furthest.get(ssp, 0), at[ssp])
                applied[ssp] = AppliedStartpoint(
                    id="a",
                    position="",
                    by="me",
                    reason="",
                    offset=str(start),
                    epoch=opened[ssp],
                    batch=number,
                    applied_at=BEGIN,
                )
            ranges[ssp] = (start, end)
        if replays:
            ranges = {ssp: ranges[ssp] for ssp in replays}
        else:
            at |= {ssp: end for ssp, (_, end) in ranges.items()}
            for ssp, (start, end) in ranges.items():
                for offset in range(start, end):
                    first.setdefault((ssp, offset), number)
        intent = Intent(
            batch=number,
            run="me",
            clock=BEGIN,
            ranges={
                ssp: OffsetRange(start=str(start), end=str(end))
                for ssp, (start, end) in ranges.items()
            },
            joined=JoinedVersions(versions={"d": f"v{number}"}),
            replays=replays,
        )
        states.append(
            ApplicationState(
                batch=number,
                checkpoint={ssp: str(offset) for ssp, offset in at.items()},
                last=ClosedBatch(
                    intent=intent, closed_at=BEGIN, records=0, counters={}, seconds={}
                ),
                offsets=OffsetState(
                    streams={"fake.s": "one"},
                    epochs=OpenedEpochs(
                        highest={ssp: epoch for ssp, epoch in opened.items() if epoch}
                    ),
                    applied=dict(applied),
                    furthest={ssp: str(end) for ssp, end in furthest.items()},
                ),
            )
        )
    return states[::-1], first


def commits(states: Iterable[ApplicationState]) -> Iterator[tuple[Commit, ApplicationState]]:
    return (
        (Commit(state.batch + 1, "commit", None, "", BEGIN, "me", {}), state) for state in states
    )


def reads_of(states: Iterable[ApplicationState], asked: AskedOffsets) -> FirstReads:
    return find_first_reads(collect_main_batches(commits(states), asked), asked)


def asked_by(chance: random.Random) -> AskedOffsets:
    spans = {}
    for ssp in chance.sample(PARTITIONS, chance.randint(1, 3)):
        begin = chance.randint(0, 12)
        spans[ssp] = Span(str(begin), str(begin + chance.randint(0, 12)))
    return AskedOffsets(spans, {"fake.s": "one"}, compare, distance)


def places_in(
    reads: FirstReads, asked: AskedOffsets
) -> tuple[Reads, set[tuple[SystemStreamPartition, int]]]:
    """Return the batch of each offset that was read, and the offsets of which none is known."""
    read: Reads = {}
    unread = set()
    for ssp, (start, _) in asked.spans.items():
        holes = {offset for a, b in reads.unread.get(ssp, ()) for offset in range(int(a), int(b))}
        unread |= {(ssp, offset) for offset in holes}
        offset = int(start)
        for upto, batch in reads.pieces[ssp]:
            read |= {
                (ssp, place): batch for place in range(offset, int(upto)) if place not in holes
            }
            offset = max(offset, int(upto))
    return read, unread


def reached_by(state: ApplicationState) -> dict[SystemStreamPartition, int]:
    """Return the end of all offsets that batches up to this state may have read."""
    ends = (state.checkpoint, state.offsets.furthest)
    return {ssp: max(int(end.get(ssp, 0)) for end in ends) for ssp in PARTITIONS}


def test_every_record_is_of_the_batch_of_the_main_position_that_read_it_first() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        states, expected = history(chance)
        asked = asked_by(chance)
        reads = reads_of(states, asked)
        read, unread = places_in(reads, asked)
        wanted = {
            (ssp, at)
            for ssp, (start, end) in asked.spans.items()
            for at in range(int(start), int(end))
        }
        assert read == {place: batch for place, batch in expected.items() if place in wanted}, seed
        assert unread == wanted - read.keys(), seed
        assert reads.versions.keys() == set(read.values())


def test_no_later_batch_is_taken_for_the_first_where_the_log_has_forgotten_that_one() -> None:
    known = 0
    for seed in range(300):
        chance = random.Random(seed)
        states, expected = history(chance)
        asked = asked_by(chance)
        kept = states[: chance.randint(1, len(states))]
        read, _ = places_in(reads_of(kept, asked), asked)
        assert read.items() <= expected.items(), seed
        known += len(read)
        # Whether or not a position was moved, all is known that was first read by a batch in the
        # log.
        numbers = {state.batch for state in kept[:-1]}
        left = {place for place, batch in expected.items() if batch in numbers}
        wanted = {(ssp, at) for ssp, (a, b) in asked.spans.items() for at in range(int(a), int(b))}
        reached = reached_by(kept[-1])
        assert {(ssp, at) for ssp, at in left & wanted if at >= reached[ssp]} <= read.keys(), seed
    assert known > 300, "what the log still has is known"


def test_the_reason_is_that_the_log_has_forgotten_who_read_an_offset_first() -> None:
    """The position has gone back, so that no batch of the remaining log but the open one reads
    it.
    """
    startpoint = AppliedStartpoint(
        id="a", position="", by="me", reason="", offset="0", epoch=1, batch=7, applied_at=BEGIN
    )
    state = ApplicationState(
        batch=8,
        checkpoint={PARTITIONS[0]: "0"},
        offsets=OffsetState(
            streams={"fake.s": "one"},
            epochs=OpenedEpochs(highest={PARTITIONS[0]: 1}),
            applied={PARTITIONS[0]: startpoint},
            furthest={PARTITIONS[0]: "9"},
        ),
    )
    asked = AskedOffsets({PARTITIONS[0]: Span("2", "5")}, {"fake.s": "one"}, compare, distance)
    batches = collect_main_batches(commits([state]), asked)
    problems = explain_unread(asked, find_first_reads(batches, asked), batches)
    assert "the batch log's history from before its commit 9 is gone" in problems[PARTITIONS[0]]


def test_the_log_is_read_no_further_back_than_what_is_asked_for_reaches() -> None:
    """Two commits before the batches that matter are enough, however many there are."""
    states, looked = [], []
    for number in range(1, 50):
        span = OffsetRange(start=str(number - 1), end=str(number))
        intent = Intent(batch=number, run="me", clock=BEGIN, ranges={PARTITIONS[0]: span})
        closed = ClosedBatch(intent=intent, closed_at=BEGIN, records=1, counters={}, seconds={})
        states.append(
            ApplicationState(batch=number, checkpoint={PARTITIONS[0]: str(number)}, last=closed)
        )

    def newest_first() -> Iterator[ApplicationState]:
        for state in reversed(states):
            looked.append(state.batch)
            yield state

    asked = AskedOffsets({PARTITIONS[0]: Span("45", "47")}, {"fake.s": None}, compare, distance)
    reads = reads_of(newest_first(), asked)
    assert reads.pieces == {PARTITIONS[0]: (("46", 46), ("47", 47))}
    assert looked == [49, 48, 47, 46, 45]


def test_offsets_of_the_stream_before_are_not_those_of_the_one_that_was_recreated() -> None:
    span = OffsetRange(start="0", end="5")
    intent = Intent(batch=1, run="me", clock=BEGIN, ranges={PARTITIONS[0]: span})
    closed = ClosedBatch(intent=intent, closed_at=BEGIN, records=1, counters={}, seconds={})
    state = ApplicationState(
        batch=1,
        checkpoint={PARTITIONS[0]: "5"},
        last=closed,
        offsets=OffsetState(streams={"fake.s": "before"}),
    )
    asked = AskedOffsets({PARTITIONS[0]: Span("0", "5")}, {"fake.s": "now"}, compare, distance)
    assert reads_of([state], asked).unread == {PARTITIONS[0]: (("0", "5"),)}

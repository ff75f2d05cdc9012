"""Which batch read each record first: at random, against a dictionary that is filled in the order of batches."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, ClosedBatch, Intent, OffsetState
from dagster_adjunct.orchestration.startpoints.recorded_replay import (
    AskedOffsets,
    collect_main_batches,
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
    """Return a log, newest first, of batches that go on, go back, skip and replay; and who read each offset first."""
    at = dict.fromkeys(PARTITIONS, 0)
    opened = dict.fromkeys(PARTITIONS, 0)
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
            ranges={ssp: OffsetRange(start=str(start), end=str(end)) for ssp, (start, end) in ranges.items()},
            versions={"d": f"v{number}"},
            replays=replays,
        )
        states.append(
            ApplicationState(
                batch=number,
                checkpoint={ssp: str(offset) for ssp, offset in at.items()},
                last=ClosedBatch(intent=intent, closed_at=BEGIN, records=0, counters={}, seconds={}),
                offsets=OffsetState(
                    streams={"fake.s": "one"}, opened={ssp: epoch for ssp, epoch in opened.items() if epoch}
                ),
            )
        )
    return states[::-1], first


def commits(states: Iterable[ApplicationState]) -> Iterator[tuple[Commit, ApplicationState]]:
    return ((Commit(1, "commit", None, "", BEGIN, "me", {}), state) for state in states)


def test_every_record_is_of_the_batch_of_the_main_position_that_read_it_first() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        states, expected = history(chance)
        spans = {}
        for ssp in chance.sample(PARTITIONS, chance.randint(1, 3)):
            begin = chance.randint(0, 12)
            spans[ssp] = (str(begin), str(begin + chance.randint(0, 12)))
        asked = AskedOffsets(spans, {"fake.s": "one"}, compare, distance)
        reads = find_first_reads(collect_main_batches(commits(states), asked)[0], asked)
        read: Reads = {}
        for ssp, (start, end) in spans.items():
            holes = {offset for a, b in reads.unread.get(ssp, ()) for offset in range(int(a), int(b))}
            offset = int(start)
            for upto, batch in reads.pieces[ssp]:
                while offset < int(upto):
                    if offset not in holes:
                        read[ssp, offset] = batch
                    offset += 1
            wanted = {place for place in expected if place[0] == ssp and int(start) <= place[1] < int(end)}
            assert holes == {number for number in range(int(start), int(end)) if (ssp, number) not in wanted}, seed
        assert read == {place: batch for place, batch in expected.items() if place in read}, seed
        assert reads.versions.keys() == set(read.values())


def test_the_log_is_read_no_further_back_than_what_is_asked_for_reaches() -> None:
    """Two commits before the batches that matter are enough, however many there are."""
    states, looked = [], []
    for number in range(1, 50):
        span = OffsetRange(start=str(number - 1), end=str(number))
        intent = Intent(batch=number, run="me", clock=BEGIN, ranges={PARTITIONS[0]: span}, versions={})
        closed = ClosedBatch(intent=intent, closed_at=BEGIN, records=1, counters={}, seconds={})
        states.append(ApplicationState(batch=number, checkpoint={PARTITIONS[0]: str(number)}, last=closed))

    def newest_first() -> Iterator[ApplicationState]:
        for state in reversed(states):
            looked.append(state.batch)
            yield state

    asked = AskedOffsets({PARTITIONS[0]: ("45", "47")}, {"fake.s": None}, compare, distance)
    reads = find_first_reads(collect_main_batches(commits(newest_first()), asked)[0], asked)
    assert reads.pieces == {PARTITIONS[0]: (("46", 46), ("47", 47))}
    assert looked == [49, 48, 47, 46, 45]


def test_offsets_of_the_stream_before_are_not_those_of_the_one_that_was_made_anew() -> None:
    span = OffsetRange(start="0", end="5")
    intent = Intent(batch=1, run="me", clock=BEGIN, ranges={PARTITIONS[0]: span}, versions={})
    closed = ClosedBatch(intent=intent, closed_at=BEGIN, records=1, counters={}, seconds={})
    state = ApplicationState(
        batch=1, checkpoint={PARTITIONS[0]: "5"}, last=closed, offsets=OffsetState(streams={"fake.s": "before"})
    )
    asked = AskedOffsets({PARTITIONS[0]: ("0", "5")}, {"fake.s": "now"}, compare, distance)
    assert find_first_reads(collect_main_batches(commits([state]), asked)[0], asked).unread == {
        PARTITIONS[0]: (("0", "5"),)
    }

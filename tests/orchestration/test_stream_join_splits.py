"""Streams that meet, cut into batches anyhow: partitions that fall idle and wake, late records,
deletions, restarts.

The results are those of plain Python over the whole input, which knows no batches.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest

from dagster_adjunct.resources.bucketing.hashing import bucket_of_key
from tests.clocks import Clock, on_clock
from tests.faulty_store import Crash
from tests.orchestration.meeting_streams import KINDS, create, drawn, expected, joined_rows, meeting
from tests.orchestration.seen_times import at
from tests.orchestration.step_world import Row, StepWorld, crash_at

pytestmark = pytest.mark.spark

PARTITIONS = 3
SILENT = 2
"""The partition of the payments that has no record until it wakes."""
KEYS = {
    partition: [
        key
        for key in map("k{}".format, range(30))
        if bucket_of_key((key,), ("string",), PARTITIONS) == partition
    ]
    for partition in range(PARTITIONS)
}
PAUSE, IDLE_AFTER = timedelta(minutes=70), timedelta(hours=1)
"""Between two rounds, and after how long a partition is not waited for: so whoever has no record
in a round.
"""


def send(world: StepWorld, chance: random.Random, now: int, count: int, *, awake: bool) -> None:
    """Send so many records to each partition of both streams, one a second from now on, and some
    deletions.

    A partition that wakes has records that are newer than all others, so that nobody has closed
    anything of them.
    """
    for stream in ("orders", "payments"):
        for part in range(2):  # deletions stand between records, as each append ends with them
            rows: list[Row] = []
            for index in range(count // 2):
                for partition in range(PARTITIONS):
                    number = world.sequences["numbers"] = world.sequences.get("numbers", 0) + 1
                    if stream == "payments" and partition == SILENT:
                        if awake:
                            rows.append((KEYS[SILENT][0], number, at(now + 100 + index)))
                        continue
                    _, _, time = drawn(chance, number, now + part * count // 2 + index, 1)
                    # no key lies where 42, the hash's seed, does
                    nobody = partition == 0 and chance.random() < 0.1
                    rows.append(
                        (None if nobody else chance.choice(KEYS[partition][:2]), number, time)
                    )
            world.send(
                stream,
                *rows,
                deleted=[row for row in rows if row[0] is not None and chance.random() < 0.05],
            )


def rounds(
    world: StepWorld, seed: int, *, count: int, sizes: list[int], how: str, crashes: bool
) -> StepWorld:
    """Run a round for each of these sizes of batches, each by a run of its own; return the world
    as it is then.
    """
    clock, chance = Clock(), random.Random(seed)
    world = replace(world, lake=on_clock(world.lake, clock))
    create(world, PARTITIONS)
    for number, size in enumerate(sizes):
        clock.forward(seconds=PAUSE.total_seconds())
        send(world, chance, number * count, count, awake=number == len(sizes) - 1)
        app = meeting(size, how, partitions=PARTITIONS, idle_after=IDLE_AFTER)
        if crashes and chance.random() < 0.5:
            with suppress(Crash):
                world.run(
                    app,
                    run=f"dies-{number}",
                    on_event=crash_at(chance.choice(["intent", "outputs"])),
                )
        world.run(app, run=f"round-{number}")
        if number in (1, len(sizes) - 2):
            wanted = expected(world, how, idle=True)[0]
            assert joined_rows(world, how) == wanted
    return world


def check(world: StepWorld, how: str, least: int) -> None:
    wanted, counts = expected(world, how, idle=True)
    assert joined_rows(world, how) == wanted
    (totals,) = (
        of
        for name, of in world.state(meeting(1, how)).totals.items()
        if name.startswith("stream-join")
    )
    assert {name: totals[name] for name in counts} == counts
    assert len(wanted) >= least
    assert all(counts[why] for why in ("late", "null_times", "null_keys", "tombstones")), counts


@pytest.mark.rounds
@pytest.mark.long  # batches that die: test_stream_join.py; idle partitions: test_watermarks.py
def test_batches_of_any_size_with_an_idle_partition_make_what_plain_python_does(
    step_world: StepWorld,
) -> None:
    world = rounds(step_world, 8, count=16, sizes=[70, 1000], how="full", crashes=False)
    check(world, "full", 100)


@pytest.mark.rounds
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_any_split_with_restarts_makes_what_one_batch_over_everything_makes(
    step_world: StepWorld, seed: int
) -> None:
    chance, how = random.Random(seed), KINDS[seed % len(KINDS)]
    sizes = [chance.choice([25, 60, 110, 1000]) for _ in range(5)]
    world = rounds(step_world, seed, count=20, sizes=sizes, how=how, crashes=True)
    check(world, how, 100)
    cut = joined_rows(world, how)
    whole = meeting(10_000, how, name="whole", partitions=PARTITIONS, idle_after=IDLE_AFTER)
    world.run(whole)
    assert joined_rows(world, how) == cut + cut, "one batch has made what all of them have"

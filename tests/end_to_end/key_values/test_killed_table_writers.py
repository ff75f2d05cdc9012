"""Writers that are killed (SIGKILL) in the midst of batches: no half batch, and everything that
was acknowledged.
"""

from __future__ import annotations

import random
import time

import pytest

from dagster_adjunct.key_value import BlockingKeyValueTable
from tests.end_to_end.key_values.killed_writers import KEYS, batches, held_after
from tests.end_to_end.key_values.worlds import BACKENDS, QUICK, Table, World, notes

FAMILIES = ("first", "second", "third")


def held_in(table: Table, family: str) -> dict[str, str]:
    """Return what the family holds, as a reader of it all at once finds it."""
    with BlockingKeyValueTable(table) as blocking:
        return {
            entry.key.key: entry.value
            for entry in blocking.get_all(KEYS, family=family)
            if entry is not None
        }


def number_of(held: dict[str, str]) -> int:
    """Return after which batch the family holds this. Fails where that is after none, or half of
    one.
    """
    number = max((int(value.rstrip(".")) for value in held.values()), default=0)
    assert held == held_after(number), (
        f"half of batch {number}: {[(key, value[:9]) for key, value in held.items()]}"
    )
    return number


def check_kills(world: World, rounds: int) -> None:
    """Have writers killed at random, others go on where they were, and look at what they leave."""
    chance, last = random.Random(5), dict.fromkeys(FAMILIES, 0)
    table, batches_acknowledged = world.table(partitions=2), 0
    for turn in range(rounds):
        paths = {family: world.folder / f"{family}-{turn}" for family in FAMILIES}
        writers = [
            world.process(batches, path, table, family, last[family])
            for family, path in paths.items()
        ]
        try:
            wait_for_acknowledged(paths.values())
            ends = time.monotonic() + chance.uniform(0, 0.3)
            while world.at_one_moment and time.monotonic() < ends:
                for family in FAMILIES:
                    assert number_of(held_in(table, family)) >= last[family]
            time.sleep(max(0.0, ends - time.monotonic()))
        finally:
            for writer in writers:
                writer.kill()
            for writer in writers:
                writer.join()
        for family, path in paths.items():
            noted = notes(path)
            begun = max(note["begun"] for note in noted if "begun" in note)
            acknowledged = max(note["acknowledged"] for note in noted if "acknowledged" in note)
            last[family] = number_of(settled(table, family))
            assert acknowledged <= last[family] <= begun
            batches_acknowledged += acknowledged
    assert batches_acknowledged > rounds * len(FAMILIES)


def settled(table: Table, family: str) -> dict[str, str]:
    """Return what the family holds once the last request of a killed writer has come to its end."""
    before, held = None, held_in(table, family)
    while held != before:
        time.sleep(0.1)
        before, held = held, held_in(table, family)
    return held


def wait_for_acknowledged(paths) -> None:
    """Return once every writer has an answer, so that it is killed at work and not while it
    starts.
    """
    deadline = time.monotonic() + 240
    while not all(any("acknowledged" in note for note in notes(path)) for path in paths):
        assert time.monotonic() < deadline, "a writer has no answer"
        time.sleep(0.01)


@pytest.mark.lengthy
@pytest.mark.parametrize("world", QUICK, indirect=True)
def test_no_half_batch_of_a_killed_writer_is_seen_and_nothing_acknowledged_is_lost(world):
    check_kills(world, 2)


@pytest.mark.long
@pytest.mark.parametrize("world", BACKENDS, indirect=True)
def test_no_half_batch_is_seen_however_often_writers_are_killed(world):
    check_kills(world, 25)

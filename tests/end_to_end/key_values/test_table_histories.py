"""Eight processes at a few keys of one table: what they saw can have happened one operation at a
time.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.end_to_end.key_values.family_history import Operation, check_linearisable
from tests.end_to_end.key_values.workers import anything
from tests.end_to_end.key_values.worlds import BACKENDS, QUICK, QUICK_SERVERS, SERVERS, World, notes
from tests.servers.tcp_proxy import Chooser, Trouble

PROCESSES = 8


def history(world: World, operations: int, trouble: Chooser | None = None) -> list[Operation]:
    """Return what the processes did to one family of a new table, over a network that has this
    trouble.
    """
    table = world.table()
    paths = [world.folder / f"{table.id.name}-{number}" for number in range(PROCESSES)]
    started = [
        world.process(anything, path, table, path.name, operations, world.at_one_moment)
        for path in paths
    ]
    with world.processes(*started), world.troubled(trouble):
        for process in started:
            process.join()
    return [Operation(**note) for path in paths for note in notes(path)]


def check(operations: list[Operation]) -> None:
    """Check a history, and that it is one: all kinds of answers, at the same time."""
    check_linearisable(operations)
    writes = [operation for operation in operations if operation.wrote]
    assert {len(operation.wrote) > 1 for operation in writes if operation.refused is None} == {
        False,
        True,
    }
    assert {len(operation.wrote) > 1 for operation in writes if operation.refused} == {False, True}
    ordered = sorted(operations, key=lambda operation: operation.began)
    assert sum(after.began < before.ended for before, after in pairwise(ordered)) > 20


@pytest.mark.lengthy
@pytest.mark.parametrize("world", QUICK, indirect=True)
def test_what_eight_processes_saw_can_have_happened_one_at_a_time(world):
    check(history(world, 40))


@pytest.mark.parametrize("world", QUICK_SERVERS, indirect=True)
def test_what_they_saw_can_have_happened_though_requests_and_replies_are_lost(world):
    chance, troubles = random.Random(7), ("lost-before", "lost-after")

    def trouble(_: bytes) -> Trouble | None:
        return chance.choice(troubles) if chance.random() < 0.04 else None

    operations = history(world, 60, trouble)
    check(operations)
    assert world.network.befallen.count("lost-after") > 5


@pytest.mark.long
@pytest.mark.parametrize("world", BACKENDS, indirect=True)
def test_what_they_saw_can_have_happened_one_at_a_time_at_length(world):
    for _ in range(3):
        check(history(world, 250))


@pytest.mark.long
@pytest.mark.parametrize("world", SERVERS, indirect=True)
@pytest.mark.parametrize("rate", [0.01, 0.2])
def test_what_they_saw_can_have_happened_though_much_is_lost(world, rate):
    chance, troubles = random.Random(8), ("lost-before", "lost-after")
    check(
        history(world, 100, lambda _: chance.choice(troubles) if chance.random() < rate else None)
    )

"""Tables that are sealed, deleted and made again while processes write to them, by two managers
at once.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from dagster_adjunct.errors import KeyValueTableNotFoundError, KeyValueTableSealedError
from dagster_adjunct.key_value import BlockingKeyValueTable, KeyValueTableManager, TableEntry
from tests.end_to_end.key_values.workers import counting
from tests.end_to_end.key_values.worlds import BACKENDS, QUICK, SCOPE, Table, World, notes

FAMILIES = ("first", "second", "third")


def ended_at(
    world: World, table: Table, end
) -> tuple[list[bool], int, dict[str, list[dict[str, Any]]]]:
    """Let processes write, and two managers end the table at once; return what these said, when,
    and what was noted.
    """
    paths = {family: world.folder / f"{table.id.name}-{family}" for family in FAMILIES}
    started = [world.process(counting, path, table, family) for family, path in paths.items()]
    with world.processes(*started):
        deadline = time.monotonic() + 240
        while any(len(notes(path)) < 3 for path in paths.values()):
            assert time.monotonic() < deadline, "a writer has no answer"
            time.sleep(0.01)
        managers, together = [world.manager(), world.manager()], Barrier(2)

        def one(manager: KeyValueTableManager) -> bool:
            together.wait()
            return end(manager)

        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(one, managers))
        ended = time.monotonic_ns()
    return answers, ended, {family: notes(path) for family, path in paths.items()}


def everything(blocking: BlockingKeyValueTable[str, str]) -> list[TableEntry[str, str]]:
    return [entry for page in blocking.all_entries(page_size=4) for entry in page.items]


@pytest.mark.lengthy
@pytest.mark.parametrize("world", QUICK, indirect=True)
def test_a_seal_refuses_all_later_writes_and_keeps_exactly_what_was_acknowledged(world):
    table, seen = world.table(), {}

    def seal(manager: KeyValueTableManager) -> bool:
        answer = manager.seal(SCOPE, table.id.name)
        with BlockingKeyValueTable(world.over(world.backend(), table)) as blocking:
            seen[manager] = everything(blocking)
        return answer

    answers, sealed, noted = ended_at(world, table, seal)
    assert sorted(answers) == [False, True]
    expected = {}
    for family, (*counts, last) in noted.items():
        assert last == {"ended": "KeyValueTableSealedError", "count": len(counts)}
        assert all(count["began"] < sealed for count in counts)
        expected |= {(family, side): str(len(counts)) for side in ("left", "right")}
    with BlockingKeyValueTable(table) as blocking:
        held = everything(blocking)
        assert {(entry.key.family, entry.key.key): entry.value for entry in held} == expected
        # Whichever manager's call returned first, nothing was written after it.
        assert all(then == held for then in seen.values())
        with pytest.raises(KeyValueTableSealedError):
            blocking.remove("left", family="first")
        assert everything(blocking) == held


@pytest.mark.lengthy
@pytest.mark.parametrize("world", BACKENDS, indirect=True)
def test_a_table_that_is_made_again_never_takes_what_handles_of_the_old_one_write(world):
    table = world.table()
    answers, deleted, noted = ended_at(
        world, table, lambda manager: manager.delete(SCOPE, table.id.name)
    )
    assert sorted(answers) == [False, True]
    for *counts, last in noted.values():
        assert last["ended"] == "KeyValueTableNotFoundError"
        assert all(count["began"] < deleted for count in counts)

    again = world.table(table.id.name)
    with BlockingKeyValueTable(again) as new, BlockingKeyValueTable(table) as old:
        assert everything(new) == []
        version = new.put("left", "new", family="first")
        with pytest.raises(KeyValueTableNotFoundError):
            old.put("left", "old", family="first")
        with pytest.raises(KeyValueTableNotFoundError):
            old.remove("left", version=version, family="first")
        with pytest.raises(KeyValueTableNotFoundError):
            old.get("left", family="first")
        assert [(entry.value, entry.version) for entry in everything(new)] == [("new", version)]


@pytest.mark.lengthy
@pytest.mark.parametrize("world", QUICK, indirect=True)
def test_a_table_that_is_made_again_at_once_stays_empty_though_writers_go_on(world):
    """They are in the middle of their writes when one call deletes the table and the next one
    makes it.
    """
    table = world.table()

    def replaced(manager: KeyValueTableManager) -> bool:
        return manager.delete(SCOPE, table.id.name) and manager.create(
            SCOPE, table.id.name, table.configuration
        )

    answers, _, noted = ended_at(world, table, replaced)
    assert True in answers
    assert {last["ended"] for *_, last in noted.values()} == {"KeyValueTableNotFoundError"}
    with BlockingKeyValueTable(world.table(table.id.name)) as new:
        assert everything(new) == []

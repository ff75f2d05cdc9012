"""A run that was paused, taken for dead, and wakes changes nothing that its successors have written since.

It is paused before each of its requests in turn (`paused_runs.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.backends.memory import MemoryTable
from dagster_adjunct.resources.backends.sqlite import SqliteTable
from dagster_adjunct.resources.errors import AdjunctError, CommitConflictError, RunLeaseLostError
from dagster_adjunct.resources.key_value_backends.sqlite import SqliteSegments
from dagster_adjunct.resources.key_value_rows import KeyValueRows
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.faulty_store import Fault, FaultyStore
from tests.orchestration.paused_runs import KEYS, PausedFunction, PausedWorld, at_call
from tests.rounds import rounds

_numbers = count()
Function = Callable[[PausedWorld, Path], Any]


def memory(world: PausedWorld, folder: Path) -> Any:
    return MemoryTable(f"paused-{id(world)}")


def sqlite(world: PausedWorld, folder: Path) -> Any:
    types = {"k": "string", "n": "bigint"}
    return SqliteTable(folder / f"{id(world)}.sqlite", "t", "k", columns=types, create=True)


def rows_in_the_lake(world: PausedWorld, folder: Path) -> Any:
    types = {"k": "string", "n": "bigint"}
    return KeyValueRows(world.lake, "app", "t", "k", columns=types, create=True, partitions=2)


def rows_in_sqlite(world: PausedWorld, folder: Path) -> Any:
    types, stored_in = {"k": "string", "n": "bigint"}, SqliteSegments(folder / f"rows-{id(world)}.sqlite")
    return KeyValueRows(world.lake, "app", "t", "k", columns=types, create=True, partitions=2, stored_in=stored_in)


TABLES: list[Function] = [memory, sqlite, rows_in_the_lake, rows_in_sqlite]
FENCED: list[Function] = [rows_in_the_lake, rows_in_sqlite]


def puts_and_deletes(app: Application, table: RemoteTable[Any, Any, Any]) -> None:
    kept = app.input_stream("lake.changes", default_offset="oldest")
    handle = app.table(table)
    kept.filter("not gone").select("k", "n").send_to(handle)


def sets(app: Application, table: RemoteTable[Any, Any, Any]) -> None:
    kept = app.input_stream("lake.changes", default_offset="oldest")
    kept.update(app.table(table), set={"n": "n"}, if_missing={"n": "n"})


def world_with(
    of: Function,
    folder: Path,
    write: Callable[[Application, RemoteTable[Any, Any, Any]], None],
    pauses: Callable[[PausedWorld], dict[str, Callable[[], object]]],
) -> tuple[PausedWorld, BlockingTable[Any, Any, Any]]:
    """Return a world whose application writes to a new table, whose function pauses the first run."""

    def make(world: PausedWorld, first: bool) -> Application:
        function = of(world, folder)
        if first:
            function = PausedFunction(function, **pauses(world))
        app = Application("sets", engine="auto")
        write(app, RemoteTable("t", key="k", write_function=function, batch_size=5, in_flight=1))
        return app

    world = PausedWorld(make)
    reads = of(world, folder)
    return world, BlockingTable(RemoteTable("t", key="k", read_function=reads))


def content(table: BlockingTable[Any, Any, Any]) -> dict[str, Any]:
    with table:
        return table.get_all([f"k{n}" for n in range(KEYS)])


@pytest.mark.parametrize("write", [puts_and_deletes, sets])
@pytest.mark.parametrize("of", TABLES)
def test_nothing_is_sent_by_a_run_that_was_paused_before_any_request(
    of: Function, write: Any, tmp_path: Path
) -> None:
    whole, expected = world_with(of, tmp_path, write, lambda world: {})
    whole.run_alone()
    for nth in rounds([1, 3], [1, 2, 3, 4, 5]):
        world, table = world_with(of, tmp_path, write, lambda world, nth=nth: {"before": at_call(nth, world.pause)})
        error = world.run_paused()
        assert world.paused, nth
        assert isinstance(error, RunLeaseLostError), (nth, error)
        assert error.run == "first"
        assert content(table) == content(expected), nth


@pytest.mark.parametrize("of", FENCED)
def test_a_table_with_fences_refuses_even_the_request_that_was_under_way(of: Function, tmp_path: Path) -> None:
    whole, expected = world_with(of, tmp_path, sets, lambda world: {})
    whole.run_alone()
    for nth in rounds([2], [1, 2, 3, 4, 5]):
        world, table = world_with(of, tmp_path, sets, lambda world, nth=nth: {"within": at_call(nth, world.pause)})
        error = world.run_paused()
        assert world.paused, nth
        assert isinstance(error, RunLeaseLostError), (nth, error)
        assert content(table) == content(expected), nth

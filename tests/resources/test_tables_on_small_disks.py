"""Tables in files on a disk that is full or may not be written, and with too many open files: an
error at once, with the cause; the same write works once there is room.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct import open_lake
from dagster_adjunct.errors import AdjunctError, TransientError
from dagster_adjunct.key_value import (
    BlockingKeyValueTable,
    KeyValueTableConfiguration,
    KeyValueTableManager,
    ObjectSegments,
    TextSerializer,
)
from dagster_adjunct.key_value_rows import KeyValueRows
from dagster_adjunct.resources.errors import describe_file_error, find_file_error
from dagster_adjunct.tables import BlockingTable, RemoteTable, SqliteTable
from tests.resources.small_disks import (
    largest_file,
    more_open_files,
    mounted,
    no_inodes,
    no_room,
    read_only,
)

pytestmark = [pytest.mark.lengthy, pytest.mark.timeout(60)]
LONG = "x" * 50_000


class Sqlite:
    """A remote table in an SQLite file."""

    def __init__(self, disk: Path) -> None:
        columns = {"k": "string", "text": "string"}
        store = SqliteTable(str(disk / "t.sqlite"), "t", "k", columns=columns, create=True)
        self._table = RemoteTable("t", key="k", read_function=store, write_function=store)

    def put(self, text: str) -> None:
        with BlockingTable(self._table) as table:
            table.put("k", {"k": "k", "text": text})

    def get(self) -> Any:
        with BlockingTable(self._table) as table:
            return table.get("k")["text"]


class Rows(Sqlite):
    """A remote table in a key-value table of the lake."""

    def __init__(self, disk: Path) -> None:
        store = KeyValueRows(
            str(disk / "lake"),
            "s",
            "t",
            "k",
            columns={"k": "string", "text": "string"},
            create=True,
        )
        self._table = RemoteTable("t", key="k", read_function=store, write_function=store)


class Entries:
    """A key-value table, in an SQLite file beside the lake or in the lake's objects."""

    def __init__(self, disk: Path, *, objects: bool = False) -> None:
        lake = open_lake(str(disk / "lake"))
        manager = (
            KeyValueTableManager(lake, ObjectSegments(lake))
            if objects
            else KeyValueTableManager(lake)
        )
        manager.create_scope("s")
        manager.create("s", "t", KeyValueTableConfiguration(partitions=1))
        self._open = lambda: manager.open("s", "t", key=TextSerializer(), value=TextSerializer())

    def put(self, text: str) -> None:
        with BlockingKeyValueTable(self._open()) as table:
            table.put("k", text)

    def get(self) -> Any:
        with BlockingKeyValueTable(self._open()) as table:
            return table.get("k").value


STORES: dict[str, Callable[[Path], Any]] = {
    "sqlite table": Sqlite,
    "rows": Rows,
    "key-values": Entries,
    "objects": lambda disk: Entries(disk, objects=True),
}
Limit = Callable[[Path], AbstractContextManager[None]]
LIMITS: dict[str, tuple[Limit, str, bool]] = {
    "full": (no_room, "No space left on device", True),
    "no inodes": (no_inodes, "no inode is free", True),
    "read-only": (read_only, "Read-only file system", False),
    "open files": (lambda disk: more_open_files(1), "Too many open files", False),
    "size of files": (lambda disk: largest_file(20_000), "File too large", True),
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("store", STORES)
def test_a_write_without_room_ends_at_once_with_its_cause_and_works_later(
    store: str, limit: str, tmp_path: Path
) -> None:
    restrict, reason, passes = LIMITS[limit]
    with mounted(tmp_path / "disk", "size=8m,nr_inodes=2000") as disk:
        table = STORES[store](disk)
        table.put("before")
        began = time.monotonic()
        with restrict(disk), pytest.raises(AdjunctError) as reported:
            table.put(LONG)
        assert time.monotonic() - began < 5
        assert reason in reported.value.problem
        assert isinstance(reported.value, TransientError) == passes
        assert reported.value.next_step
        assert table.get() == "before"
        table.put(LONG)
        assert table.get() == LONG


def test_what_keeps_a_library_from_writing_a_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    assert find_file_error(tmp_path / "there") is None
    assert find_file_error(tmp_path / "new") is None
    missing = find_file_error(tmp_path / "nowhere" / "new")
    assert missing is not None
    assert describe_file_error(missing, tmp_path)[0] == "No such file or directory"

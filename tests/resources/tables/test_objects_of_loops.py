"""What a table holds for an event loop goes with the loop, closed or not."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.resources.threads import PerLoop


def test_an_object_is_dropped_when_its_loop_ends() -> None:
    dropped: list[list[int]] = []
    per_loop = PerLoop(lambda: [1], dropped.append)

    async def use() -> list[int]:
        assert per_loop.here() is per_loop.here()
        return per_loop.here()

    used = asyncio.run(use())
    assert dropped == [used]


def test_an_object_that_was_taken_is_not_dropped() -> None:
    dropped: list[list[int]] = []
    per_loop = PerLoop(lambda: [1], dropped.append)

    async def use() -> None:
        first = per_loop.here()
        assert per_loop.take() is first
        assert per_loop.take() is None
        assert per_loop.here() is not first
        assert per_loop.take() is not None

    asyncio.run(use())
    assert dropped == []


def test_an_object_of_a_loop_that_only_was_closed_is_dropped_at_the_next_use() -> None:
    dropped: list[list[int]] = []
    per_loop = PerLoop(lambda: [1], dropped.append)

    async def use() -> list[int]:
        return per_loop.here()

    loop = asyncio.new_event_loop()
    used = loop.run_until_complete(use())
    loop.close()
    asyncio.run(use())
    assert dropped[0] is used
    assert len(dropped) == 2


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed in /proc")
def test_a_sqlite_table_that_nobody_closed_leaves_neither_files_nor_threads(tmp_path: Path) -> None:
    store = SqliteTable(
        str(tmp_path / "a.db"), "t", key="k", columns={"k": "TEXT", "n": "INTEGER"}, create=True
    )
    table = RemoteTable("t", key="k", read_function=store, write_function=store)

    async def use() -> None:
        await table.put("a", {"k": "a", "n": 1})

    asyncio.run(use())
    for thread in threading.enumerate():
        if thread.name.startswith("sqlite-"):
            thread.join(10)
    names = [thread.name for thread in threading.enumerate()]
    files = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    assert [name for name in names if name.startswith("sqlite-t")] == []
    assert [file for file in files if file.startswith(str(tmp_path))] == []

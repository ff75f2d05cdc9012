"""Compact batches of deletes, puts and updates that wait together: the same outcomes as without
merging.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.errors import AdjunctError
from dagster_adjunct.tables import BatchProvider, Changes, RemoteTable, SqliteTable

COLUMNS = {"k": "string", "a": "bigint", "s": "string", "l": "array<bigint>"}
Write = tuple[str, str, Any]


def open_table(path: Path, *, compact: bool) -> RemoteTable:
    store = SqliteTable(path=str(path), table="t", key="k", columns=COLUMNS, create=True)
    batches = BatchProvider(compact=compact, delay=0.01)
    return RemoteTable("t", key="k", read_function=store, write_function=store, batches=batches)


async def apply(table: RemoteTable, writes: list[Write]) -> tuple[list[str], dict[Any, Any]]:
    """Send all writes at once; return the outcome of each, and the records that are there
    afterwards.
    """

    async def outcome(key: str, kind: str, value: Any) -> str:
        try:
            if kind == "delete":
                await table.delete(key)
            else:
                await (table.put(key, value) if kind == "put" else table.update(key, value))
        except AdjunctError as error:
            return type(error).__name__
        return "done"

    async with table:
        outcomes = await asyncio.gather(*(outcome(*write) for write in writes))
        return outcomes, dict(await table.get_all(["x", "y", "z"]))


def test_a_delete_that_waits_with_an_update_of_another_key_is_sent(tmp_path: Path) -> None:
    async def run() -> tuple[list[str], dict[Any, Any]]:
        table = open_table(tmp_path / "t.sqlite", compact=True)
        both = [("x", "put", {"k": "x", "a": 1}), ("y", "put", {"k": "y", "a": 1})]
        await apply(table, both)
        return await apply(table, [("y", "delete", None), ("x", "update", {"a": 5})])

    outcomes, rows = asyncio.run(run())
    assert outcomes == ["done", "done"]
    assert {key: row["a"] for key, row in rows.items()} == {"x": 5}


def draw_write(drawn: random.Random) -> Write:
    key = drawn.choice("xyz")
    kind = drawn.choice(["put", "delete", "set", "add", "append", "both"])
    if kind == "put":
        return (
            key,
            kind,
            {"k": key, "a": drawn.choice([None, 1]), "l": drawn.choice([None, [], [1]])},
        )
    if kind == "delete":
        return key, kind, None
    if kind == "set":
        return (
            key,
            "update",
            Changes(set={"a": drawn.choice([None, 5]), "s": drawn.choice([None, "q"])}),
        )
    if kind == "add":
        return key, "update", Changes(add={"a": drawn.randint(-3, 3)})
    if kind == "append":
        return key, "update", Changes(append={"l": drawn.choice([[1, 2], [3], []])})
    return key, "update", Changes(set={"s": "w"}, add={"a": 1}, append={"l": [7]})


@pytest.mark.parametrize("seed", range(6))
def test_drawn_writes_have_the_outcomes_that_they_have_one_by_one(
    seed: int, tmp_path: Path
) -> None:
    drawn = random.Random(seed)
    writes = [draw_write(drawn) for _ in range(12)]
    done = [
        asyncio.run(apply(open_table(tmp_path / f"{compact}.sqlite", compact=compact), writes))
        for compact in (False, True)
    ]
    assert done[0] == done[1]

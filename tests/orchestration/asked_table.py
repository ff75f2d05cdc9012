"""Tables that remember what they were asked, and what they were given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dagster_adjunct.resources.tables.functions import TableReadFunction, TableWriteFunction

Record = dict[str, Any]


class AskedTable(TableReadFunction[Any, Record]):
    """`records` by key, of these columns; `asked` are the requests, each with its keys;
    `problems` are raised first.
    """

    def __init__(self, records: dict[Any, Record], columns: dict[str, str] | None = None) -> None:
        self.records, self.columns = records, columns
        self.asked: list[list[Any]] = []
        self.problems: list[Exception] = []

    def column_types(self) -> dict[str, str] | None:
        return self.columns

    async def get(self, key: Any, *args: object) -> Record | None:
        return (await self.get_all([key])).get(key)

    async def get_all(self, keys: Sequence[Any], *args: object) -> dict[Any, Record]:
        self.asked.append(list(keys))
        if self.problems:
            raise self.problems.pop(0)
        return {key: dict(self.records[key]) for key in keys if key in self.records}

    @property
    def keys_asked(self) -> list[Any]:
        return [key for request in self.asked for key in request]


class NotedTable(TableWriteFunction[Any, Any, Any]):
    """A store that keeps only which keys were written: a line of the file for each."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def put(self, key: Any, value: Any, *args: object) -> None:
        with Path(self.path).open("a") as file:
            file.write(f"{key}\n")

    async def update(self, key: Any, update: Any, *args: object) -> None:
        await self.put(key, update)

    async def delete(self, key: Any, *args: object) -> None:
        await self.put(f"-{key}", None)

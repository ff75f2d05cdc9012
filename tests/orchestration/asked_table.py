"""A table in this process that remembers what it was asked, and in which requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dagster_adjunct.resources.tables.table_functions import TableReadFunction

Record = dict[str, Any]


class AskedTable(TableReadFunction[Any, Record]):
    """`records` by key, of these columns; `asked` are the requests, each with its keys; `problems` are raised first."""

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

"""A table in this process's memory, for tests and for trying things out."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from dagster_adjunct.resources.tables.table_functions import (
    TableReadFunction,
    TableWriteFunction,
    record_not_found,
)

Record = Mapping[str, Any]

_STORES: dict[str, dict[Hashable, dict[str, Any]]] = {}


class MemoryTable(TableReadFunction[Hashable, Record], TableWriteFunction[Hashable, Record, Record]):
    """Records as mappings, kept by `name` for as long as the process lives; updates set fields.

    Two of the same name share their records. It knows single requests and put-if-absent only, so a
    table over it goes the generic way that a simple store's function goes.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._records = _STORES.setdefault(name, {})

    def __repr__(self) -> str:
        return f"MemoryTable({self.name!r})"

    def __reduce__(self) -> tuple[type[MemoryTable], tuple[str]]:
        return (MemoryTable, (self.name,))

    def to_dict(self) -> dict[str, Any]:
        """The declaration as plain values."""
        return {"name": self.name}

    def clear(self) -> None:
        """Forget all records of this name."""
        self._records.clear()

    async def get(self, key: Hashable, *args: object) -> Record | None:
        record = self._records.get(key)
        return None if record is None else dict(record)

    async def put(self, key: Hashable, value: Record, *args: object) -> None:
        self._records[key] = dict(value)

    async def put_if_absent_all(self, entries: Sequence[tuple[Hashable, Record]], *args: object) -> int:
        before = len(self._records)
        for key, value in entries:
            self._records.setdefault(key, dict(value))
        return len(self._records) - before

    async def delete(self, key: Hashable, *args: object) -> None:
        self._records.pop(key, None)

    async def update(self, key: Hashable, update: Record, *args: object) -> None:
        if key not in self._records:
            raise record_not_found([key], f"memory table {self.name}")
        self._records[key].update(update)

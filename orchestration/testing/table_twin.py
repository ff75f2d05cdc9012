"""A twin of a remote table: the same contract over records in one file, which Spark's workers see, too."""

from __future__ import annotations

import fcntl
import pickle
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dagster_adjunct.resources.tables.layer import Capabilities
from dagster_adjunct.resources.tables.memory_table import MemoryTable
from dagster_adjunct.resources.tables.operation import Operation
from dagster_adjunct.resources.tables.outcomes import Outcomes
from dagster_adjunct.resources.tables.remote_table import RemoteTable
from dagster_adjunct.resources.tables.table_functions import StoreFunction

Record = dict[str, Any]


class TableTwin(StoreFunction[Hashable, Record, Any]):
    """Records in a file, for as long as a test lives. It can do what the function says that it stands for."""

    def __init__(
        self,
        path: str,
        capabilities: Capabilities,
        columns: Mapping[str, str] | None,
        key: str | tuple[str, ...] | None,
    ) -> None:
        self.path = path
        self.key = key
        self._capabilities = capabilities
        self._columns = None if columns is None else dict(columns)

    def __reduce__(self) -> tuple[Any, ...]:
        return TableTwin, (self.path, self._capabilities, self._columns, self.key)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def column_types(self) -> dict[str, str] | None:
        return self._columns

    async def send(self, operation: Operation[Any]) -> Outcomes:
        with _held(self.path) as table:
            return await table.send(operation)

    def records(self) -> dict[Hashable, Record]:
        """Return all records by their keys."""
        with _held(self.path) as table:
            return table.records()

    def fill(self, records: Mapping[Hashable, Record]) -> None:
        """Put these records, in place of those of the same keys."""
        with _held(self.path) as table:
            table.fill(records)


def twin_of(table: RemoteTable[Any, Any, Any], path: Path) -> RemoteTable[Any, Any, Any]:
    """Return a table with the contract of another one, and its records in a file."""
    return RemoteTable(
        table.name,
        key=table.key,
        read_function=None if table.read_function is None else _function(table.read_function, path),
        write_function=None if table.write_function is None else _function(table.write_function, path),
        retry=table.retry,
        rate_limit=table.rate_limit,
        batches=table.batches,
        in_flight=table.in_flight,
        newest_by=table.conditions.newest_by,
        idempotent=table.conditions.idempotent,
        on_replay=table.conditions.on_replay,
        defaults_may_overwrite=table.defaults_may_overwrite,
        cache=table.cache,
    )


def _function(function: Any, path: Path) -> TableTwin:
    key = getattr(function, "key", None)
    named = key if key is None or isinstance(key, str) else tuple(key)
    return TableTwin(str(path), function.capabilities, function.column_types(), named)


@contextmanager
def _held(path: str) -> Iterator[MemoryTable]:
    """The table of a file, which nobody else sees until it is written again."""
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        table = MemoryTable(path)
        table.clear()
        file = Path(path)
        if file.exists():
            table.restore(pickle.loads(file.read_bytes()))
        yield table
        written = file.with_suffix(".new")
        written.write_bytes(pickle.dumps(table.content()))
        written.replace(file)

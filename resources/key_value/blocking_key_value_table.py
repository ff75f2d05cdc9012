"""`BlockingKeyValueTable`: a key-value table for code that isn't async."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from dagster_adjunct.resources.key_value.changes_of_keys import TableChange
from dagster_adjunct.resources.key_value.iterator_state import IteratorState
from dagster_adjunct.resources.key_value.key_value_table import PAGE_SIZE, KeyValueTable
from dagster_adjunct.resources.key_value.key_version import KeyVersion
from dagster_adjunct.resources.key_value.repeating import drive
from dagster_adjunct.resources.key_value.table_entries import TableEntry, TableKey
from dagster_adjunct.resources.key_value.table_pages import IteratorPage, TablePages
from dagster_adjunct.resources.loop_thread import LoopThread

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class BlockingKeyValueTable(Generic[K, V]):
    """The operations of a `KeyValueTable`, each returning when it is done; arguments, results and errors are its own.

    They may be called from any thread, and run there where the backend needs no event loop (SQLite, PostgreSQL,
    DynamoDB); else, and where several partitions are read at once, on a loop in a thread of its own. Use it in a `with`
    block, or `close()` it.
    """

    def __init__(self, table: KeyValueTable[K, V]) -> None:
        self.table = table
        by_hand = table._by_hand()
        self._thread = LoopThread(f"key-value-table-{table.id}") if table.backend.waits else None
        self._driven = by_hand or table
        self._run = drive if by_hand is not None or self._thread is None else self._thread.run

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockingKeyValueTable, (self.table,)

    def __repr__(self) -> str:
        return f"BlockingKeyValueTable({str(self.table.id)!r})"

    def __enter__(self) -> BlockingKeyValueTable[K, V]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def put(self, key: K, value: V, *, family: str | None = None) -> KeyVersion:
        return self._run(self._driven.put(key, value, family=family))

    def put_if_absent(self, key: K, value: V, *, family: str | None = None) -> KeyVersion:
        return self._run(self._driven.put_if_absent(key, value, family=family))

    def replace(self, key: K, value: V, version: KeyVersion, *, family: str | None = None) -> KeyVersion:
        return self._run(self._driven.replace(key, value, version, family=family))

    def remove(self, key: K, *, version: KeyVersion | None = None, family: str | None = None) -> None:
        self._run(self._driven.remove(key, version=version, family=family))

    def put_all(self, entries: Iterable[tuple[K, V]], *, family: str) -> list[KeyVersion]:
        return self._run(self._driven.put_all(entries, family=family))

    def replace_all(
        self, entries: Iterable[TableEntry[K, V] | tuple[K, V, KeyVersion]], *, family: str
    ) -> list[KeyVersion]:
        return self._run(self._driven.replace_all(entries, family=family))

    def remove_all(self, keys: Iterable[K | TableKey[K]], *, family: str) -> None:
        self._run(self._driven.remove_all(keys, family=family))

    def apply(
        self,
        changes: Iterable[TableChange[K, V]],
        *,
        family: str,
    ) -> list[KeyVersion | None]:
        return self._run(self._driven.apply(changes, family=family))

    def get(self, key: K, *, family: str | None = None) -> TableEntry[K, V] | None:
        return self._run(self._driven.get(key, family=family))

    def exists(self, key: K, *, family: str | None = None) -> bool:
        return self._run(self._driven.exists(key, family=family))

    def get_all(self, keys: Iterable[K | TableKey[K]], *, family: str | None = None) -> list[TableEntry[K, V] | None]:
        if self._thread is not None and self.table.configuration.partitions > 1:
            return self._thread.run(self.table.get_all(keys, family=family))
        return self._run(self._driven.get_all(keys, family=family))

    def keys(
        self,
        family: str,
        *,
        prefix: str | bytes | None = None,
        start: K | None = None,
        end: K | None = None,
        page_size: int = PAGE_SIZE,
        state: IteratorState | None = None,
    ) -> Iterator[IteratorPage[TableKey[K]]]:
        return self._each(
            self._driven.keys(family, prefix=prefix, start=start, end=end, page_size=page_size, state=state)
        )

    def entries(
        self,
        family: str,
        *,
        prefix: str | bytes | None = None,
        start: K | None = None,
        end: K | None = None,
        page_size: int = PAGE_SIZE,
        state: IteratorState | None = None,
    ) -> Iterator[IteratorPage[TableEntry[K, V]]]:
        return self._each(
            self._driven.entries(family, prefix=prefix, start=start, end=end, page_size=page_size, state=state)
        )

    def all_keys(
        self, *, partitions: Sequence[int] | None = None, page_size: int = PAGE_SIZE, state: IteratorState | None = None
    ) -> Iterator[IteratorPage[TableKey[K]]]:
        return self._each(self._driven.all_keys(partitions=partitions, page_size=page_size, state=state))

    def all_entries(
        self, *, partitions: Sequence[int] | None = None, page_size: int = PAGE_SIZE, state: IteratorState | None = None
    ) -> Iterator[IteratorPage[TableEntry[K, V]]]:
        return self._each(self._driven.all_entries(partitions=partitions, page_size=page_size, state=state))

    def close(self) -> None:
        """Close the table and end the thread, where there is one. The next operation starts them again."""
        if self._driven is not self.table:
            drive(self._driven.close())
        if self._thread is not None:
            self._thread.close(self.table.close)

    def _each(self, pages: TablePages[T]) -> Iterator[IteratorPage[T]]:
        while (page := self._run(pages.next_page())) is not None:
            yield page

"""What is measured of key-value tables: the same work by hand with a bare client, and by a
table.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from dagster_adjunct.key_value import (
    BlockingKeyValueTable,
    BytesSerializer,
    Insert,
    KeyValueTable,
    KeyValueTableConfiguration,
    KeyVersion,
)
from dagster_adjunct.resources.key_value.segment import SegmentBackend, TableId

FAMILY = "benchmark"
IN_A_LOOP = "in a loop"
"""What the name of a side ends with that waits in an event loop."""
Entries = Sequence[tuple[bytes, bytes]]


class Side(Protocol):
    """One way to do it. Each method does all that it is given, one request after the other, and
    returns then. All keys are of one family, which is a column, or a part of the key, also by hand.

    Every write has its condition: a key must be absent, or have the version that this side wrote
    last.
    """

    def inserts(self, entries: Entries) -> None: ...

    def replaces(self, entries: Entries) -> None: ...

    def gets(self, keys: Sequence[bytes]) -> None: ...

    def get_all(self, keys: Sequence[bytes]) -> None:
        """In one request, as far as there is one."""
        ...

    def insert_batches(self, batches: Sequence[Entries]) -> None:
        """Each batch is atomic."""
        ...

    def fill(self, entries: Entries) -> None:
        """Write a lot, without any condition."""
        ...

    def scan(self) -> int:
        """Read the family in the order of its keys, look at each entry; return their number."""
        ...


@dataclass(frozen=True)
class Compared:
    """A backend and the bare clients that it is compared with; the best of them counts."""

    backend: SegmentBackend
    hands: dict[str, Side]


@dataclass(frozen=True)
class Store:
    """What is compared over one kind of store, and how much of it."""

    name: str
    opened: Callable[[], AbstractContextManager[Compared]]
    singles: int = 2_000  # single requests
    scanned: int = 1_000_000
    goals: dict[str, str] = field(default_factory=dict)  # by what is measured


@contextmanager
def our_sides(backend: SegmentBackend) -> Iterator[dict[str, Side]]:
    """Tables of one partition in a backend: a blocking one and, where the backend waits, one in
    an event loop.
    """
    with _table_in(backend) as table, BlockingKeyValueTable(table) as blocking:
        sides: dict[str, Side] = {"ours": _Blocking(blocking)}
        if not backend.waits:
            yield sides
            return
        with _table_in(backend) as other, asyncio.Runner() as runner:
            yield {**sides, f"ours {IN_A_LOOP}": _Waiting(other, runner)}
            runner.run(other.close())


@contextmanager
def _table_in(backend: SegmentBackend) -> Iterator[KeyValueTable[bytes, bytes]]:
    identity = TableId("benchmarks", "ours", secrets.token_hex(8))
    backend.create(identity, 1)
    bytes_ = BytesSerializer()
    try:
        yield KeyValueTable(
            identity, KeyValueTableConfiguration(partitions=1), backend, bytes_, bytes_
        )
    finally:
        backend.delete(identity, 1)


class _Blocking:
    def __init__(self, table: BlockingKeyValueTable[bytes, bytes]) -> None:
        self._table = table
        self._versions: dict[bytes, KeyVersion] = {}

    def inserts(self, entries: Entries) -> None:
        for key, value in entries:
            self._versions[key] = self._table.put_if_absent(key, value, family=FAMILY)

    def replaces(self, entries: Entries) -> None:
        for key, value in entries:
            self._versions[key] = self._table.replace(
                key, value, self._versions[key], family=FAMILY
            )

    def gets(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            assert self._table.get(key, family=FAMILY) is not None

    def get_all(self, keys: Sequence[bytes]) -> None:
        assert None not in self._table.get_all(keys, family=FAMILY)

    def insert_batches(self, batches: Sequence[Entries]) -> None:
        for batch in batches:
            self._table.apply([Insert(key, value) for key, value in batch], family=FAMILY)

    def fill(self, entries: Entries) -> None:
        for part in _parts(entries, self._table.table.backend):
            self._table.put_all(part, family=FAMILY)

    def scan(self) -> int:
        return sum(1 for page in self._table.entries(FAMILY) for _ in page.items)


class _Waiting:
    def __init__(self, table: KeyValueTable[bytes, bytes], runner: asyncio.Runner) -> None:
        self._table, self._runner = table, runner
        self._versions: dict[bytes, KeyVersion] = {}

    def inserts(self, entries: Entries) -> None:
        async def run() -> None:
            for key, value in entries:
                self._versions[key] = await self._table.put_if_absent(key, value, family=FAMILY)

        self._runner.run(run())

    def replaces(self, entries: Entries) -> None:
        async def run() -> None:
            for key, value in entries:
                self._versions[key] = await self._table.replace(
                    key, value, self._versions[key], family=FAMILY
                )

        self._runner.run(run())

    def gets(self, keys: Sequence[bytes]) -> None:
        async def run() -> None:
            for key in keys:
                assert await self._table.get(key, family=FAMILY) is not None

        self._runner.run(run())

    def get_all(self, keys: Sequence[bytes]) -> None:
        assert None not in self._runner.run(self._table.get_all(keys, family=FAMILY))

    def insert_batches(self, batches: Sequence[Entries]) -> None:
        async def run() -> None:
            for batch in batches:
                await self._table.apply([Insert(key, value) for key, value in batch], family=FAMILY)

        self._runner.run(run())

    def fill(self, entries: Entries) -> None:
        async def run() -> None:
            for part in _parts(entries, self._table.backend):
                await self._table.put_all(part, family=FAMILY)

        self._runner.run(run())

    def scan(self) -> int:
        async def run() -> int:
            return sum([1 async for page in self._table.entries(FAMILY) for _ in page.items])

        return self._runner.run(run())


def _parts(entries: Entries, backend: SegmentBackend) -> Iterator[Entries]:
    size = min(backend.limits.changes or 10_000, 10_000)
    return (entries[start : start + size] for start in range(0, len(entries), size))


def entries_from(first: int, count: int) -> list[tuple[bytes, Any]]:
    """Return entries of 16 and 100 bytes whose keys nobody else has."""
    return [(b"key %012d" % number, b"%099d\n" % number) for number in range(first, first + count)]

"""`KeyValueTable`: the entries of one table (PDP-39, "Data plane")."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import chain, compress, repeat
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

from dagster_adjunct.resources.common import LoopThread
from dagster_adjunct.resources.errors import KeyValueTableError, TransientError
from dagster_adjunct.resources.key_value.entries import (
    EntryCoder,
    Put,
    TableChange,
    TableEntry,
    TableKey,
    WriteRequest,
    build_batch,
    check_family,
    check_limits,
    conditions_error,
    encode_key_prefix,
    require_list,
    require_pairs,
    resolve_partitions,
    to_remove,
    to_replace,
    validate_page_size,
    version_bytes,
)
from dagster_adjunct.resources.key_value.iterators import Iteration, IteratorPage, IteratorState, ReadPage, TablePages
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    ANYTHING,
    BlockingBackend,
    ConditionsFailed,
    Expected,
    KeyRange,
    KeyValueTableConfiguration,
    KeyVersion,
    PageReader,
    Pause,
    PrefetchingSegment,
    SegmentBackend,
    SegmentChange,
    StoredEntry,
    StoredPage,
    TableId,
    TableSegment,
    family_subrange,
    make_version,
    new_token,
    pause_blocking,
    retry_apply,
    retry_read,
    run_without_loop,
)
from dagster_adjunct.resources.key_value.serializers import Serializer

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class BulkRead(Generic[K]):
    """The keys that were asked for with their families; `stored` has the table keys by partition, and `places`, which
    of the keys these are."""

    families: Iterable[str | None]
    keys: Sequence[K]
    stored: dict[int, list[bytes]]
    places: dict[int, Sequence[int]]

    def entries(
        self, coder: EntryCoder[K, V], answers: Sequence[list[StoredEntry | None]]
    ) -> list[TableEntry[K, V] | None]:
        """Return the entries by the keys' order; `answers` are the partitions' in the order of `stored`."""
        if len(answers) == 1:
            (stored_entries,) = answers
        else:
            stored_entries = [None] * len(self.keys)
            pairs = zip(chain(*self.places.values()), chain(*answers), strict=True)
            for place, answer in pairs:
                stored_entries[place] = answer
        there = [answer for answer in stored_entries if answer is not None]
        if not there:
            return [None] * len(self.keys)
        if len(there) == len(stored_entries):
            return [*coder.entries(self.families, self.keys, there)]
        is_there = [answer is not None for answer in stored_entries]
        entries = iter(coder.entries(compress(self.families, is_there), compress(self.keys, is_there), there))
        return [next(entries) if present else None for present in is_there]


def bulk_read(coder: EntryCoder[K, Any], keys: Sequence[Any], family: str | None) -> BulkRead[K]:
    """Return what to ask for; a `TableKey` among the keys has its own family, the others have `family`."""
    if TableKey in set(map(type, keys)):
        families = [key.family if isinstance(key, TableKey) else family for key in keys]
        plain = [key.key if isinstance(key, TableKey) else key for key in keys]
        prefixes = list(map(coder.prefix, families))
        return _divided(coder, families, plain, prefixes, list(map(coder.table_key, prefixes, plain)))
    prefix = coder.prefix(family)
    stored = coder.table_keys(prefix, keys)
    if prefix and stored:
        partition = coder.partition(prefix, b"")
        return BulkRead(repeat(family), keys, {partition: stored}, {partition: range(len(keys))})
    return _divided(coder, repeat(family), keys, repeat(prefix), stored)


def _divided(
    coder: EntryCoder[K, Any],
    families: Iterable[str | None],
    keys: Sequence[K],
    prefixes: Iterable[bytes],
    stored: Sequence[bytes],
) -> BulkRead[K]:
    by_partition: dict[int, list[bytes]] = {}
    places: dict[int, list[int]] = {}
    for place, (prefix, table_key) in enumerate(zip(prefixes, stored, strict=False)):
        partition = coder.partition(prefix, table_key)
        if partition not in places:
            by_partition[partition], places[partition] = [], []
        by_partition[partition].append(table_key)
        places[partition].append(place)
    return BulkRead(families, keys, by_partition, {**places})


T = TypeVar("T")
P = ParamSpec("P")
PAGE_SIZE = 1000


def _names_family(operation: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Have what an operation raises name the family that it was called with."""

    @wraps(operation)
    async def named(*args: P.args, **given: P.kwargs) -> T:
        try:
            return await operation(*args, **given)
        except KeyValueTableError as error:
            error.of_family(given.get("family"))
            raise

    return named


class KeyValueTable(Generic[K, V]):
    """Reads and writes entries, each with a version; linearisable over all processes.

    A key belongs to a family, or to none (None). Writes return the new `KeyVersion`; where a condition does not hold
    they raise `ConditionsNotMetError`, whose `failures` tell each key with the version found, and nothing was written.
    Batches are within one family, atomic, and may hold each key once.

    What certainly did nothing is tried again for a minute, then `TableUnavailableError` is raised. A write whose reply
    was lost is looked for as long as the backend knows; after that it is `OutcomeUnknownError`.

    Usable from any event loop and thread. Pickles without connections; `close()` gives back those of the running loop.
    """

    def __init__(
        self,
        id: TableId,
        configuration: KeyValueTableConfiguration,
        backend: SegmentBackend,
        key: Serializer[K],
        value: Serializer[V],
    ) -> None:
        self.id = id
        self.configuration = configuration
        self.backend = backend
        self.key_serializer = key
        self.value_serializer = value
        self._limits = backend.limits
        self._coder = EntryCoder(id, configuration, backend.limits, key, value)
        self._segments: dict[int, TableSegment] = {}
        self._pause: Pause = asyncio.sleep
        self._open, self._waits = backend.open, backend.waits

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyValueTable, (
            self.id, self.configuration, self.backend, self.key_serializer, self.value_serializer,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"KeyValueTable({str(self.id)!r})"

    async def __aenter__(self) -> KeyValueTable[K, V]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @_names_family
    async def put(self, key: K, value: V, *, family: str | None = None) -> KeyVersion:
        """Write a key, whether it is there or not."""
        return await self._write(family, key, self._coder.value(value), ANYTHING)

    @_names_family
    async def put_if_absent(self, key: K, value: V, *, family: str | None = None) -> KeyVersion:
        """Write a key that must not be there."""
        return await self._write(family, key, self._coder.value(value), ABSENT)

    @_names_family
    async def replace(self, key: K, value: V, version: KeyVersion, *, family: str | None = None) -> KeyVersion:
        """Write a key that must have this version."""
        expected = version_bytes(self.id, version)
        return await self._write(family, key, self._coder.value(value), expected)

    @_names_family
    async def remove(self, key: K, *, version: KeyVersion | None = None, family: str | None = None) -> None:
        """Remove a key: one that must have this version or, without one, whatever is there."""
        await self._write(family, key, None, ANYTHING if version is None else version_bytes(self.id, version))

    @_names_family
    async def put_all(self, entries: Iterable[tuple[K, V]], *, family: str) -> list[KeyVersion]:
        """Write keys of a family, all or none; return their versions in this order."""
        return await self.apply([Put(*entry) for entry in require_pairs(self.id, "entries", entries)], family=family)  # type: ignore[return-value]

    @_names_family
    async def replace_all(
        self, entries: Iterable[TableEntry[K, V] | tuple[K, V, KeyVersion]], *, family: str
    ) -> list[KeyVersion]:
        """Write keys of a family that must all have the versions given; return their new ones in this order."""
        changes = [to_replace(self.id, family, entry) for entry in require_list(self.id, "entries", entries)]
        return await self.apply(changes, family=family)  # type: ignore[return-value]

    @_names_family
    async def remove_all(self, keys: Iterable[K | TableKey[K]], *, family: str) -> None:
        """Remove keys of a family, all or none; a `TableKey` with a version must have this version."""
        await self.apply(
            [to_remove(self.id, family, key) for key in require_list(self.id, "keys", keys)], family=family
        )

    @_names_family
    async def apply(
        self,
        changes: Iterable[TableChange[K, V]],
        *,
        family: str,
    ) -> list[KeyVersion | None]:
        """Apply changes of a family, all or none; return the new versions in this order, None for what is not written.

        `MustBeAbsent` and `MustHaveVersion` guard keys that are not written: the batch is applied only where they hold.
        """
        request = build_batch(self._coder, family, changes, new_token())
        if request.changes:
            check_limits(self.id, request.changes, self._limits)
            partition = self._coder.partition(self._coder.prefix(family), b"")
            await self._apply(self._segment(partition), request)
        return request.versions

    @_names_family
    async def get(self, key: K, *, family: str | None = None) -> TableEntry[K, V] | None:
        """Return the entry of a key; None where there is none."""
        stored = await self._find(family, key, values=True)
        return None if stored is None else self._coder.entry(family, key, stored)

    @_names_family
    async def exists(self, key: K, *, family: str | None = None) -> bool:
        """Whether there is such a key."""
        return await self._find(family, key, values=False) is not None

    async def get_all(
        self, keys: Iterable[K | TableKey[K]], *, family: str | None = None
    ) -> list[TableEntry[K, V] | None]:
        """Return the entries of keys, which may repeat, in this order; None for those that are missing.

        A `TableKey` has its own family. There is one request for each partition; the partitions are not read at one
        moment.
        """
        asked = bulk_read(self._coder, require_list(self.id, "keys", keys), family)
        return asked.entries(self._coder, await self._read_each(asked.stored))

    def keys(
        self,
        family: str,
        *,
        prefix: str | bytes | None = None,
        start: K | None = None,
        end: K | None = None,
        page_size: int = PAGE_SIZE,
        state: IteratorState | None = None,
    ) -> TablePages[TableKey[K]]:
        """Iterate over the keys of a family in the order of their bytes, by pages of at most `page_size`.

        Only those whose bytes begin with `prefix` (a text stands for its UTF-8), from `start` up to `end`, which is not
        among them any more. `state` of a page, from any process, goes on behind it.
        """
        iteration = self._of_family(family, prefix, start, end, values=False)
        return TablePages(
            iteration, self._reader(), self._coder.found_keys, validate_page_size(page_size), state, family
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
    ) -> TablePages[TableEntry[K, V]]:
        """Iterate over the entries of a family, as `keys` does."""
        iteration = self._of_family(family, prefix, start, end, values=True)
        return TablePages(
            iteration, self._reader(), self._coder.found_entries, validate_page_size(page_size), state, family
        )

    def all_keys(
        self,
        *,
        partitions: Sequence[int] | None = None,
        page_size: int = PAGE_SIZE,
        state: IteratorState | None = None,
    ) -> TablePages[TableKey[K]]:
        """Iterate over the keys of the whole table, or of some partitions: partition by partition, in key order."""
        iteration = self._of_table(partitions, values=False)
        return TablePages(iteration, self._reader(), self._coder.found_keys, validate_page_size(page_size), state)

    def all_entries(
        self,
        *,
        partitions: Sequence[int] | None = None,
        page_size: int = PAGE_SIZE,
        state: IteratorState | None = None,
    ) -> TablePages[TableEntry[K, V]]:
        """Iterate over the entries of the whole table, as `all_keys` does."""
        iteration = self._of_table(partitions, values=True)
        return TablePages(iteration, self._reader(), self._coder.found_entries, validate_page_size(page_size), state)

    async def close(self) -> None:
        """Give back what the running event loop holds; a later operation opens it again."""
        for segment in list(self._segments.values()):
            await segment.close()

    def _by_hand(self) -> KeyValueTable[K, V] | None:
        """Return this table for callers without an event loop; None where its backend needs one."""
        twin = KeyValueTable(self.id, self.configuration, self.backend, self.key_serializer, self.value_serializer)
        twin._pause, twin._waits = pause_blocking, False
        if isinstance(self.backend, BlockingBackend):
            twin._open = self.backend.open_blocking
        elif self.backend.waits:
            return None
        return twin

    def _segment(self, partition: int) -> TableSegment:
        segment = self._segments.get(partition)
        if segment is None:  # of two threads that open it at once, one gets the other's
            segment = self._segments.setdefault(partition, self._open(self.id, partition))
        return segment

    async def _write(self, family: str | None, key: K, value: bytes | None, expected: Expected | bytes) -> KeyVersion:
        coder = self._coder
        prefix = coder.prefix(family)
        stored = coder.table_key(prefix, key)
        token = new_token()
        version = make_version(token, 0)
        changes = (SegmentChange(stored, value, version, expected),)
        if self._limits.request is not None:
            check_limits(self.id, changes, self._limits)
        await self._apply(self._segment(coder.partition(prefix, stored)), WriteRequest(family, (key,), changes, token))
        return KeyVersion(version)

    async def _apply(self, segment: TableSegment, request: WriteRequest[K]) -> None:
        began = time.monotonic()
        try:
            try:
                await segment.apply(request.changes, request.token)
            except TransientError as error:
                await retry_apply(
                    self.id,
                    segment,
                    request.changes,
                    request.token,
                    first=error,
                    began=began,
                    horizon=self.backend.horizon,
                    pause=self._pause,
                )
        except ConditionsFailed as failed:
            raise conditions_error(self.id, request, failed) from None

    async def _find(self, family: str | None, key: K, *, values: bool) -> StoredEntry | None:
        coder = self._coder
        prefix = coder.prefix(family)
        stored = coder.table_key(prefix, key)
        (entry,) = await self._get(coder.partition(prefix, stored), (stored,), values)
        return entry

    async def _read_each(self, stored: dict[int, list[bytes]]) -> list[list[StoredEntry | None]]:
        if len(stored) < 2 or not self._waits:
            return [await self._get(partition, keys, True) for partition, keys in stored.items()]
        tasks = [asyncio.ensure_future(self._get(partition, keys, True)) for partition, keys in stored.items()]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)  # so that none still uses a connection when this returns
            raise

    async def _get(self, partition: int, keys: Sequence[bytes], values: bool) -> list[StoredEntry | None]:
        segment = self._segment(partition)
        began = time.monotonic()
        try:
            return await segment.get(keys, values=values)
        except TransientError as error:
            return await retry_read(
                lambda: segment.get(keys, values=values), first=error, began=began, pause=self._pause
            )

    def _reader(self) -> ReadPage:
        """Return what reads the pages of one iteration, a page ahead where the store can."""
        readers: dict[int, PageReader] = {}

        async def read(partition: int, within: KeyRange, limit: int, values: bool) -> StoredPage:
            reader = readers.get(partition)
            if reader is None:
                segment = self._segment(partition)
                reader = segment.prefetching_reader() if isinstance(segment, PrefetchingSegment) else segment
                readers.clear()
                readers[partition] = reader
            began = time.monotonic()
            try:
                return await reader.page(within, limit, values=values)
            except TransientError as error:
                return await retry_read(
                    lambda: reader.page(within, limit, values=values), first=error, began=began, pause=self._pause
                )

        return read

    def _of_family(
        self, family: str, prefix: str | bytes | None, start: K | None, end: K | None, *, values: bool
    ) -> Iteration:
        check_family(self.id, family)
        coder = self._coder
        of_family = coder.prefix(family)
        beginning = encode_key_prefix(self.id, prefix, coder.key_serializer)
        try:
            ends = [None if key is None else coder.serialised(key) for key in (start, end)]
        except KeyValueTableError as error:
            error.of_family(family)
            raise
        within = family_subrange(of_family, beginning, *ends)
        return Iteration(self.id, values, (coder.partition(of_family, b""),), within)

    def _of_table(self, partitions: Sequence[int] | None, *, values: bool) -> Iteration:
        chosen = resolve_partitions(self.id, self.configuration.partitions, partitions)
        return Iteration(self.id, values, chosen, KeyRange())


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
        self._run = run_without_loop if by_hand is not None or self._thread is None else self._thread.run

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
            run_without_loop(self._driven.close())
        if self._thread is not None:
            self._thread.close(self.table.close)

    def _each(self, pages: TablePages[T]) -> Iterator[IteratorPage[T]]:
        while (page := self._run(pages.next_page())) is not None:
            yield page

"""`KeyValueTable` and `BlockingKeyValueTable`: the entries of one table (Pravega's PDP-39, "Data
plane").
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps
from itertools import compress, repeat
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import KeyValueTableError, TransientError
from dagster_adjunct.resources.key_value import segment
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
    version_bytes,
)
from dagster_adjunct.resources.key_value.iterators import (
    Iteration,
    IteratorPage,
    IteratorState,
    PageItems,
    TablePages,
)
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    ANYTHING,
    ConditionsFailed,
    Expected,
    KeyValueTableConfiguration,
    KeyVersion,
    SegmentBackend,
    SegmentChange,
    StoredEntry,
    StoredPage,
    TableId,
    TableSegment,
)
from dagster_adjunct.resources.key_value.serializers import Serializer
from dagster_adjunct.resources.validation import validated

K = TypeVar("K")
V = TypeVar("V")


T = TypeVar("T")
P = ParamSpec("P")
PAGE_SIZE = 1000
_READERS = partial(segment.threads, "key-value-partitions", 16)


class OpenTable(Generic[K, V]):
    """The segments of a table, each opened on first use, and the `coder` for its keys and
    values.
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
        self.partitions = configuration.partitions
        self.backend = backend
        self.coder = EntryCoder(id, configuration, backend.limits, key, value)
        self._segments: dict[int, TableSegment] = {}

    def segment(self, partition: int) -> TableSegment:
        """Return the segment of a partition."""
        opened = self._segments.get(partition)
        if opened is None:  # two threads that open it at once both get the one stored first
            opened = self._segments.setdefault(partition, self.backend.open(self.id, partition))
        return opened

    async def apply(
        self,
        partition: int,
        changes: Sequence[SegmentChange],
        token: bytes,
        *,
        retried: type[TransientError] = TransientError,
    ) -> None:
        """Apply all changes of a request with this token, or none.

        `retried` and errors are those of `apply_until_settled`. Also raises BatchTooLargeError.
        """
        check_limits(self.id, changes, self.backend.limits)
        opened = self.segment(partition)
        horizon = self.backend.horizon
        await segment.apply_until_settled(
            self.id, opened, changes, token, horizon=horizon, retried=retried
        )

    async def close(self) -> None:
        """Release what the running event loop uses; without one, what all such threads of the
        process share.
        """
        for opened in list(self._segments.values()):
            await opened.close()


def _names_family(operation: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Set the `family` field of errors that an operation raises to the family that it was called
    with.
    """

    @wraps(operation)
    async def named(*args: P.args, **given: P.kwargs) -> T:
        try:
            return await operation(*args, **given)
        except KeyValueTableError as error:
            error.of_family(given.get("family"))
            raise

    return named


@validated
class KeyValueTable(Generic[K, V]):
    """Reads and writes entries, each with a version; linearizable over all processes.

    A key belongs to a family, or to none (None). Writes return the new `KeyVersion`. If a condition
    does not hold they raise `ConditionsNotMetError`, whose `failures` have each such key with its
    current version, and write nothing. Batches are atomic, within one family, and have each key
    once.

    Requests that had no effect are retried for a minute, then `TableUnavailableError` is raised. A
    write whose reply was lost is looked for as long as the backend remembers it; after that
    `OutcomeUnknownError` is raised.

    Usable from any event loop and thread. Pickled without connections; `close()` releases those of
    the running loop.
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
        self._open = OpenTable(id, configuration, backend, key, value)
        self._coder = self._open.coder

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyValueTable, (
            self.id,
            self.configuration,
            self.backend,
            self.key_serializer,
            self.value_serializer,
        )

    def __repr__(self) -> str:
        return f"KeyValueTable({str(self.id)!r})"

    async def __aenter__(self) -> KeyValueTable[K, V]:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @_names_family
    async def put(self, key: K, value: V, *, family: str | None = None) -> KeyVersion:
        """Write a key, whether it exists or not."""
        return await self._write(family, key, self._coder.value(value), ANYTHING)

    @_names_family
    async def put_if_absent(self, key: K, value: V, *, family: str | None = None) -> KeyVersion:
        """Write a key that must not exist."""
        return await self._write(family, key, self._coder.value(value), ABSENT)

    @_names_family
    async def replace(
        self, key: K, value: V, version: KeyVersion, *, family: str | None = None
    ) -> KeyVersion:
        """Write a key that must have this version."""
        expected = version_bytes(self.id, version)
        return await self._write(family, key, self._coder.value(value), expected)

    @_names_family
    async def remove(
        self, key: K, *, version: KeyVersion | None = None, family: str | None = None
    ) -> None:
        """Remove a key, which must have this version; without one, any version, and a missing
        key is no error.
        """
        await self._write(
            family, key, None, ANYTHING if version is None else version_bytes(self.id, version)
        )

    @_names_family
    async def put_all(self, entries: Iterable[tuple[K, V]], *, family: str) -> list[KeyVersion]:
        """Write keys of a family, all or none; return their versions in this order."""
        return await self.apply(
            [Put(*entry) for entry in require_pairs(self.id, entries)], family=family
        )  # type: ignore[return-value]

    @_names_family
    async def replace_all(
        self, entries: Iterable[TableEntry[K, V] | tuple[K, V, KeyVersion]], *, family: str
    ) -> list[KeyVersion]:
        """Write keys of a family that must all have the given versions; return their new ones in
        this order.
        """
        changes = [
            to_replace(self.id, family, entry)
            for entry in require_list(self.id, "entries", entries)
        ]
        return await self.apply(changes, family=family)  # type: ignore[return-value]

    @_names_family
    async def remove_all(self, keys: Iterable[K | TableKey[K]], *, family: str) -> None:
        """Remove keys of a family, all or none; a `TableKey` with a version must have this
        version.
        """
        await self.apply(
            [to_remove(self.id, family, key) for key in require_list(self.id, "keys", keys)],
            family=family,
        )

    @_names_family
    async def apply(
        self, changes: Iterable[TableChange[K, V]], *, family: str
    ) -> list[KeyVersion | None]:
        """Apply changes of a family, all or none; return the new versions in this order, None for
        what is not written.

        `MustBeAbsent` and `MustHaveVersion` guard keys that are not written: the batch is only
        applied if they hold.
        """
        request = build_batch(self._coder, family, changes, segment.new_token())
        if request.changes:
            await self._apply(self._coder.partition(self._coder.prefix(family), b""), request)
        return request.versions

    @_names_family
    async def get(self, key: K, *, family: str | None = None) -> TableEntry[K, V] | None:
        """Return the entry of a key, None if there is none."""
        stored = await self._find(family, key, values=True)
        if stored is None:
            return None
        return self._coder.entry(family, key, stored)

    @_names_family
    async def exists(self, key: K, *, family: str | None = None) -> bool:
        """Whether a key exists."""
        return await self._find(family, key, values=False) is not None

    async def get_all(
        self, keys: Iterable[K | TableKey[K]], *, family: str | None = None
    ) -> list[TableEntry[K, V] | None]:
        """Return the entries of keys, which may repeat, in this order; None for missing ones.

        A `TableKey` has its own family. Each partition is read by one request, at a moment of its
        own.
        """
        requested: list[Any] = require_list(self.id, "keys", keys)
        if not requested:
            return []
        if TableKey not in set(map(type, requested)):
            return await self._get_family(family, requested)
        families = [key.family if isinstance(key, TableKey) else family for key in requested]
        plain = [key.key if isinstance(key, TableKey) else key for key in requested]
        prefixes = list(map(self._coder.prefix, families))
        stored_keys = list(map(self._coder.table_key, prefixes, plain))
        stored = await self._get_from_partitions(prefixes, stored_keys)
        return self._entries_of(families, plain, stored)

    async def _get_family(self, family: str | None, keys: list[K]) -> list[TableEntry[K, V] | None]:
        """Return the entries of keys of one family, or of none."""
        prefix = self._coder.prefix(family)
        stored_keys = self._coder.table_keys(prefix, keys)
        if prefix:  # a family is in one partition
            stored = await self._get(self._coder.partition(prefix, b""), stored_keys, True)
        else:
            stored = await self._get_from_partitions(repeat(prefix), stored_keys)
        return self._entries_of(repeat(family), keys, stored)

    def _entries_of(
        self, families: Iterable[str | None], keys: list[K], stored: list[StoredEntry | None]
    ) -> list[TableEntry[K, V] | None]:
        """Return the entries of these keys, in their order; None for missing ones."""
        coder = self._coder
        found = [entry for entry in stored if entry is not None]
        if len(found) == len(stored):
            return [*coder.entries(families, keys, found)]
        exists = [entry is not None for entry in stored]
        entries = iter(coder.entries(compress(families, exists), compress(keys, exists), found))
        return [next(entries) if present else None for present in exists]

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
        """Iterate over the keys of a family in the order of their bytes, in pages of at most
        `page_size`.

        Only keys whose bytes start with `prefix` (text stands for its UTF-8), from `start` up to
        but not including `end`. To continue after a page, in any process, pass its `state`.
        """
        iteration = self._iteration_of(family, prefix, start, end, page_size)
        return self._pages(self._coder.page_keys, iteration, state)

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
        """Iterate over the entries of a family, in the order of their keys' bytes, in pages.

        The arguments are those of `keys`.
        """
        iteration = self._iteration_of(family, prefix, start, end, page_size)
        return self._pages(self._coder.page_entries, replace(iteration, values=True), state)

    def all_keys(
        self,
        *,
        partitions: Sequence[int] | None = None,
        page_size: int = PAGE_SIZE,
        state: IteratorState | None = None,
    ) -> TablePages[TableKey[K]]:
        """Iterate over the keys of the whole table, or of some partitions: partition by
        partition, in key order.
        """
        chosen = resolve_partitions(self.id, self.configuration.partitions, partitions)
        iteration = Iteration(chosen, segment.ALL_ENTRIES, page_size)
        return self._pages(self._coder.page_keys, iteration, state)

    def all_entries(
        self,
        *,
        partitions: Sequence[int] | None = None,
        page_size: int = PAGE_SIZE,
        state: IteratorState | None = None,
    ) -> TablePages[TableEntry[K, V]]:
        """Iterate over the entries of the whole table, partition by partition, in the order of
        their keys in each.
        """
        chosen = resolve_partitions(self.id, self.configuration.partitions, partitions)
        iteration = Iteration(chosen, segment.ALL_ENTRIES, page_size, values=True)
        return self._pages(self._coder.page_entries, iteration, state)

    async def close(self) -> None:
        """Release what the running event loop uses; a later operation opens it again."""
        await self._open.close()

    async def _write(
        self, family: str | None, key: K, value: bytes | None, expected: Expected | bytes
    ) -> KeyVersion:
        """Change one key, to `value` or, if that is None, by removing it; return its new
        version.
        """
        partition, stored = self._coder.locate(family, key)
        token = segment.new_token()
        version = segment.make_version(token, 0)
        changes = (SegmentChange(stored, value, version, expected),)
        await self._apply(partition, WriteRequest(family, (key,), changes, token))
        return KeyVersion(version)

    async def _apply(self, partition: int, request: WriteRequest[K]) -> None:
        """Send a request to a partition's segment; failed conditions become
        ConditionsNotMetError.
        """
        try:
            await self._open.apply(partition, request.changes, request.token)
        except ConditionsFailed as failed:
            raise conditions_error(self.id, request, failed) from None

    async def _find(self, family: str | None, key: K, *, values: bool) -> StoredEntry | None:
        """Return the stored entry of a key, None if there is none; without `values`, its value is
        None.
        """
        partition, stored = self._coder.locate(family, key)
        (entry,) = await self._get(partition, (stored,), values)
        return entry

    async def _get_from_partitions(
        self, prefixes: Iterable[bytes], keys: Sequence[bytes]
    ) -> list[StoredEntry | None]:
        """Return the entries of table keys, in their order; `prefixes` are those of their
        families, b"" without one.
        """
        places: dict[int, list[int]] = {}  # by partition, the indices of its keys
        # `prefixes` may be endless.
        for place, (prefix, key) in enumerate(zip(prefixes, keys, strict=False)):
            places.setdefault(self._coder.partition(prefix, key), []).append(place)
        reads = (
            self._get(partition, [keys[place] for place in chosen], True)
            for partition, chosen in places.items()
        )
        if self.backend.waits:
            parts = await segment.at_once(_READERS, reads)
        else:  # each read runs to its end in this thread
            parts = [await read for read in reads]
        entries: list[StoredEntry | None] = [None] * len(keys)
        for chosen, found in zip(places.values(), parts, strict=True):
            for place, entry in zip(chosen, found, strict=True):
                entries[place] = entry
        return entries

    async def _get(
        self, partition: int, keys: Sequence[bytes], values: bool
    ) -> list[StoredEntry | None]:
        """Return the entries of table keys of one partition, in their order; None for missing
        ones.
        """
        return await segment.read_with_retries(
            partial(self._open.segment(partition).get, keys, values=values)
        )

    def _iteration_of(
        self,
        family: str,
        prefix: str | bytes | None,
        start: K | None,
        end: K | None,
        page_size: int,
    ) -> Iteration:
        """Return an iteration over a family's keys that start with `prefix`, from `start` up to but
        not including `end`.
        """
        check_family(self.id, family)
        coder = self._coder
        family_prefix = coder.prefix(family)
        key_prefix = encode_key_prefix(self.id, prefix, coder.key_serializer)
        try:
            first = None if start is None else coder.serialize_key(start)
            last = None if end is None else coder.serialize_key(end)
        except KeyValueTableError as error:
            error.of_family(family)
            raise
        within = segment.family_subrange(family_prefix, key_prefix, first, last)
        partition = coder.partition(family_prefix, b"")
        return Iteration((partition,), within, page_size, family)

    def _pages(
        self,
        make: Callable[[StoredPage], PageItems[T]],
        iteration: Iteration,
        state: IteratorState | None,
    ) -> TablePages[T]:
        """Return the pages of an iteration, whose items `make` makes of the stored ones; after
        `state`, if that is given. Raises ConfigurationError for an invalid page size.
        """
        size = iteration.page_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise argument_error(
                f"page_size={size!r}", "a whole number from 1 on", argument="page_size"
            )
        return TablePages(self.id, self._open.segment, make, iteration, state)


def _blocking(
    operation: Callable[Concatenate[KeyValueTable[K, V], P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingKeyValueTable[K, V], P], T]:
    """Return the method of `BlockingKeyValueTable` that runs this operation and returns its
    result.
    """

    @wraps(operation)
    def run(self: BlockingKeyValueTable[K, V], /, *args: P.args, **given: P.kwargs) -> T:
        return segment.run_without_loop(operation(self.table, *args, **given))

    return run


def _blocking_pages(
    pages: Callable[Concatenate[KeyValueTable[K, V], P], TablePages[T]],
) -> Callable[Concatenate[BlockingKeyValueTable[K, V], P], Iterator[IteratorPage[T]]]:
    """Return the method of `BlockingKeyValueTable` that iterates over these pages."""

    @wraps(pages)
    def iterate(
        self: BlockingKeyValueTable[K, V], /, *args: P.args, **given: P.kwargs
    ) -> Iterator[IteratorPage[T]]:
        iterator = pages(self.table, *args, **given)
        return iter(lambda: segment.run_without_loop(iterator.next_page()), None)

    return iterate


@validated
class BlockingKeyValueTable(Generic[K, V]):
    """The operations of a `KeyValueTable` as methods that block, with the same arguments and
    errors.

    Callable from any thread, in which operations run; several partitions are read in threads of
    this process. Use it in a `with` block, or `close()` it.
    """

    def __init__(self, table: KeyValueTable[K, V]) -> None:
        self.table = table

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockingKeyValueTable, (self.table,)

    def __repr__(self) -> str:
        return f"BlockingKeyValueTable({str(self.table.id)!r})"

    def __enter__(self) -> BlockingKeyValueTable[K, V]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    put = _blocking(KeyValueTable.put)
    put_if_absent = _blocking(KeyValueTable.put_if_absent)
    replace = _blocking(KeyValueTable.replace)
    remove = _blocking(KeyValueTable.remove)
    put_all = _blocking(KeyValueTable.put_all)
    replace_all = _blocking(KeyValueTable.replace_all)
    remove_all = _blocking(KeyValueTable.remove_all)
    apply = _blocking(KeyValueTable.apply)
    get = _blocking(KeyValueTable.get)
    get_all = _blocking(KeyValueTable.get_all)
    exists = _blocking(KeyValueTable.exists)
    keys = _blocking_pages(KeyValueTable.keys)
    entries = _blocking_pages(KeyValueTable.entries)
    all_keys = _blocking_pages(KeyValueTable.all_keys)
    all_entries = _blocking_pages(KeyValueTable.all_entries)

    def close(self) -> None:
        """Release what all threads of this process without an event loop share; a later
        operation opens it again.
        """
        segment.run_without_loop(self.table.close())

"""`TableSegment`, one partition of a key-value table in some store, and `SegmentBackend`, which
opens them.

Their docstrings are the specification that every backend is tested against.
"""

from __future__ import annotations

import asyncio
import os
import random
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import repeat
from operator import itemgetter
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import mmh3
from pydantic import NonNegativeInt, PositiveInt

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.class_registry import ClassRegistry
from dagster_adjunct.resources.validation import validated

# The table key of an entry, and its partition (Pravega's PDP-39, "Mapping KVPs").
#
#     with a family      | length of the family | family, UTF-8 | key, serialized |
#                        |<------ prefix, which is hashed ----->|
#     without            | - length of the key  | key, serialized |
#                        |<------ prefix, which is hashed ------>|
#
# A length is two bytes, big-endian, in two's complement: no family starts like a key without one.
# The empty family is rejected, because its bytes would be those of the empty key without a family.
# Entries are ordered by table key, which within a family is the order of the keys.


FENCES = b"\xff\xff\xff\xff"
"""What the keys of fence entries (`fencing.py`) begin with. They follow all table keys, and are no
valid ones: a length of -1 is followed by one byte."""
MAX_KEY_BYTES = 8190
"""The most bytes of family and key together: a table key has up to 8,192, two of them for the
length.
"""
_LENGTH = struct.Struct(">h")
HASH_BITS = 52  # of a hash, that select the partition


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Table keys from `start` up to but not including `end`; None means no end."""

    start: bytes = b""
    end: bytes | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no key can be in the range."""
        return self.end is not None and self.start >= self.end

    def after(self, table_key: bytes) -> KeyRange:
        """Return the part of this range that follows a key."""
        return KeyRange(table_key + b"\0", self.end)


ALL_ENTRIES = KeyRange(end=FENCES)
"""The range of all entries of a segment."""


@lru_cache(maxsize=1024)
def family_prefix(family: str) -> bytes:
    """Return the bytes with which the table keys of a family start.

    For a family with more than MAX_KEY_BYTES, whose length does not fit, they are no valid prefix:
    check their number.
    """
    encoded = family.encode()
    return _LENGTH.pack(min(len(encoded), MAX_KEY_BYTES)) + encoded


def table_key(prefix: bytes, key: bytes) -> bytes:
    """Return the table key of a serialized key; `prefix` is that of its family, or empty if it
    has none.
    """
    if prefix:
        return prefix + key
    return _LENGTH.pack(-len(key)) + key


def split_table_key(stored: bytes) -> tuple[str | None, bytes]:
    """Return the family (None if there is none) and the serialized key of a table key."""
    (length,) = _LENGTH.unpack_from(stored)
    if length <= 0:
        return None, stored[2:]
    return stored[2 : 2 + length].decode(), stored[2 + length :]


def split_table_keys(stored: Sequence[bytes]) -> tuple[Iterable[str | None], Sequence[bytes]]:
    """Return the families and the serialized keys of one or more ascending table keys.

    If all have the same family, which is split faster, the families are an endless iterator: zip
    them with the keys.
    """
    (length,) = _LENGTH.unpack_from(stored[0])
    if length < 0:  # no family follows
        return repeat(None), list(map(itemgetter(slice(2, None)), stored))
    start = 2 + length
    if length > 0 and stored[-1].startswith(stored[0][:start]):
        return repeat(stored[0][2:start].decode()), list(
            map(itemgetter(slice(start, None)), stored)
        )
    families, keys = zip(*map(split_table_key, stored), strict=True)
    return families, keys


def partition_of(prefix: bytes, partitions: int) -> int:
    """Return the partition, from 0, of a family's prefix, or of a table key without a family.

    Partitions are equal ranges of the high 52 bits of Murmur3 (x64, 128 bits, seed 0, first word).
    """
    # By name: mmh3 (5.3.1) ignores a fourth positional argument, and the hash would be signed.
    first_word, _ = mmh3.hash64(prefix, 0, True, signed=False)
    high = first_word >> (64 - HASH_BITS)
    return (high * partitions) >> HASH_BITS


def family_range(prefix: bytes) -> KeyRange:
    """Return the range of all table keys that start with `prefix`, which has at least one byte."""
    start_of_end = prefix.rstrip(b"\xff")  # a last byte that can't be raised is dropped
    if not start_of_end:
        return KeyRange(prefix, None)
    return KeyRange(prefix, start_of_end[:-1] + bytes([start_of_end[-1] + 1]))


def family_subrange(
    prefix: bytes, key_prefix: bytes, start: bytes | None, end: bytes | None
) -> KeyRange:
    """Return the range of a family's keys that start with `key_prefix`, from `start` up to but
    not including `end`.
    """
    whole = family_range(prefix + key_prefix)
    if start is not None:
        first = max(whole.start, prefix + start)
    else:
        first = whole.start
    if end is None:
        last = whole.end
    elif whole.end is None:
        last = prefix + end
    else:
        last = min(whole.end, prefix + end)
    return KeyRange(first, last)


class Expected(Enum):
    """What a change may require of its key, other than a version."""

    ANYTHING = "anything"
    ABSENT = "absent"


ANYTHING: Final = Expected.ANYTHING
ABSENT: Final = Expected.ABSENT


class SegmentChange(NamedTuple):
    """A change of one key to `value` and the new `version`; a value of None removes the key.

    `expected` is ANYTHING, ABSENT, or the bytes of the version that the key must have. Removing a
    missing key succeeds if ANYTHING is expected. `is_guard` only checks the key, at the moment when
    the other changes are applied; its `expected` is not ANYTHING.
    """

    key: bytes
    value: bytes | None
    version: bytes
    expected: Expected | bytes = ANYTHING
    is_guard: bool = False


class StoredEntry(NamedTuple):
    """An entry as stored; `value` is None if only keys were requested."""

    key: bytes
    version: bytes
    value: bytes | None


@dataclass(frozen=True, slots=True)
class StoredPage:
    """Entries as columns of equal length; `values` are None if only keys were requested.

    `is_last` means that the range had no further entries at the time of the read; False means
    unknown. Scans read millions of entries, and an object for each would keep Python's garbage
    collector busy.
    """

    keys: Sequence[bytes] = ()
    versions: Sequence[bytes] = ()
    values: Sequence[bytes | None] = ()
    is_last: bool = False

    @staticmethod
    def of(rows: Iterable[Sequence[Any]], *, is_last: bool = False) -> StoredPage:
        """Return the page of entries or of a driver's rows: key, version, value. An empty page has
        columns of no entries.
        """
        columns = list(zip(*rows, strict=True)) or [(), (), ()]
        return StoredPage(columns[0], columns[1], columns[2], is_last)

    def __len__(self) -> int:
        return len(self.keys)

    def entries(self) -> list[StoredEntry]:
        """Return the entries as objects."""
        return list(map(StoredEntry, self.keys, self.versions, self.values))


@dataclass(frozen=True, slots=True)
class SegmentLimits:
    """What a backend accepts; None means no limit of its own.

    In bytes: a table key and a family's prefix (each with the two bytes of its length), a
    serialized key, a value, and all keys and values of one request. `changes` is the number of
    changes in one request. `fences` is over how many entries the checks of one application's runs
    are spread, if requests that check the same one wait for each other.
    """

    table_key: int = MAX_KEY_BYTES + 2
    family_prefix: int | None = None
    key: int | None = None
    value: int | None = None
    changes: int | None = None
    request: int | None = None
    fences: int = 1


E = TypeVar("E", bound=errors.KeyValueTableError)


@dataclass(frozen=True, slots=True)
class TableId:
    """A table as backends know it. `incarnation` (16 hexadecimal digits) is unique to each
    created table.
    """

    scope: str
    name: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.scope}/{self.name}"

    def error(self, kind: type[E], problem: str, next_step: str = "", **about: Any) -> E:
        """Return an error about this table, which its message and its fields name."""
        return kind(
            f"key-value table {self}: {problem}",
            next_step,
            scope=self.scope,
            table=self.name,
            **about,
        )


class ConditionsFailed(Exception):
    """Conditions of a request do not hold, so nothing was applied.

    `found` has the current version (None for a missing key) of each change whose own condition
    fails, by its index.
    """

    def __init__(self, found: Mapping[int, bytes | None]) -> None:
        super().__init__(dict(found))
        self.found = dict(found)


Failing: TypeAlias = dict[int, bytes | None]
"""The indexes of changes whose conditions do not hold, with the versions found."""


def failed_conditions(
    changes: Sequence[SegmentChange], current: Mapping[bytes, bytes | None], start: int = 0
) -> Failing:
    """Return the indexes, from `start` on, of changes whose conditions do not hold, with the
    versions found.

    `current` has the version of each key; those of missing keys are None or absent.
    """
    failing: Failing = {}
    for place, change in enumerate(changes[start:], start):
        if change.expected is ANYTHING:
            continue
        expected = None if change.expected is ABSENT else change.expected
        found = current.get(change.key)
        if found != expected:
            failing[place] = found
    return failing


class ReplyLostError(errors.TransientError):
    """A request was sent, and whether it was applied is unknown. It is sent again with
    `repeated=True`.
    """


class TableSegment(Protocol):
    """One partition of a key-value table: an ordered map from table keys (bytes) to values with
    versions.

    Every method is linearizable: what has returned is visible to everything that starts later, in
    any process. Methods raise `TableUnavailableError` if nothing happened and the same call may
    succeed later, `KeyValueTableNotFoundError` if the table was deleted, and `TableError` or
    `TableAccessError` if a retry does not help. They may be awaited from any event loop, and by
    `run_without_loop`, in which they never suspend: where they wait, they block the thread.
    """

    async def apply(
        self, changes: Sequence[SegmentChange], token: bytes, *, repeated: bool = False
    ) -> None:
        """Apply all changes or none. There is at least one, their keys differ, and together they
        are within the limits of the backend.

        Raises `ConditionsFailed` with every change whose condition does not hold,
        `KeyValueTableSealedError`, and `ReplyLostError` if the request may have been applied, or
        still may be.

        `token` (12 bytes) identifies the request. `repeated` means that an earlier call with the
        same arguments raised `ReplyLostError`. If that call was applied, or is applied while this
        one checks, this one returns without changing anything, whatever others have written since.
        Otherwise the earlier call can't be applied any more, and this one does its work. The
        backend remembers tokens for at least `SegmentBackend.horizon` seconds.
        """
        ...

    async def get(self, keys: Sequence[bytes], *, values: bool = True) -> list[StoredEntry | None]:
        """Return the entries of any number of keys, which may repeat, in their order; None for
        missing ones.

        Each entry is current at some moment during the call; all are of the same moment if the
        store supports that.
        """
        ...

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage:
        """Return the first entries of a range that is not empty, by table key: at most `limit`,
        which is 1 or more.

        A page may be shorter because the range ends, or because the backend limits its size. An
        empty page means that nothing is left, and `is_last` that nothing followed. Each entry
        exists at some moment during the call; an entry that exists throughout is not skipped.
        """
        ...

    async def close(self) -> None:
        """Release what the running event loop uses, such as connections and files. A later call
        opens it again.

        Without an event loop, release what all such threads of the process share.
        """
        ...


@runtime_checkable
class SegmentBackend(Protocol):
    """A store of key-value tables. Picklable, without secrets, and described by plain values.

    `create`, `seal` and `delete` block. They may run concurrently and repeatedly, also after a
    crash of an earlier call, and lead to the same state. If `waits` is False, the coroutines of its
    segments never suspend, so they run without an event loop, too.
    """

    limits: SegmentLimits
    waits: bool
    horizon: float  # seconds after its first attempt for which a request may be repeated

    def to_dict(self) -> dict[str, Any]:
        """Return the keyword arguments that make the same backend in another process: no secrets,
        only the names of environment variables that hold them."""
        ...

    def create(self, table: TableId, partitions: int) -> None:
        """Create the empty segments of a table. Existing ones keep their entries."""
        ...

    def seal(self, table: TableId, partitions: int) -> None:
        """Reject all writes to the table from now on: none is applied after this has returned."""
        ...

    def delete(self, table: TableId, partitions: int) -> None:
        """Delete the table and its entries. Open handles get `KeyValueTableNotFoundError`, and
        nothing that they sent is applied after this has returned."""
        ...

    def open(self, table: TableId, partition: int) -> TableSegment:
        """Return a segment, which connects on first use."""
        ...

    def location(self, table: TableId, partition: int) -> str:
        """Return where a segment is stored, for people: no user, no password."""
        ...


@runtime_checkable
class PreflightChecks(Protocol):
    """A backend that can check whether its store would allow its user to seal or delete a table.

    Both methods block and change nothing. They raise what `seal` or `delete` would raise if the
    store rejects it, for example for missing rights, or is unreachable. They need not check whether
    the table exists.
    """

    def check_may_seal(self, table: TableId, partitions: int) -> None:
        """Raise what `seal` would raise."""

    def check_may_delete(self, table: TableId, partitions: int) -> None:
        """Raise what `delete` would raise."""


class PageReader(Protocol):
    """Reads pages of a segment. Its `page` is that of `TableSegment`, except for what
    `prefetching_reader` says.
    """

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage: ...


@runtime_checkable
class PrefetchingSegment(Protocol):
    """A segment whose store can prepare a page while the previous one is used."""

    def prefetching_reader(self) -> PageReader:
        """Return a reader for the consecutive pages of one iteration. The iteration may stop at any
        page: nothing has to be closed.

        The first two calls read when they are called, because most iterations end there. A later
        page may have been read right after the previous call, and then does not contain what was
        written since.
        """
        ...


_BACKENDS: ClassRegistry[SegmentBackend] = ClassRegistry(
    "backend of key-value tables",
    "register_segment_backend",
    dynamodb="resources.key_value_backends.dynamodb.DynamoDbSegments",
    objects="resources.key_value_backends.objects.segment.ObjectSegments",
    postgres="resources.key_value_backends.postgres.PostgresSegments",
    sqlite="resources.key_value_backends.sqlite.SqliteSegments",
)


def register_segment_backend(name: str, backend: Callable[..., SegmentBackend]) -> None:
    """Register a class under `name`. It accepts the items of its objects' `to_dict()` as
    keywords.
    """
    _BACKENDS.register(name, backend)


describe_backend = _BACKENDS.describe
backend_from = _BACKENDS.from_description
"""`describe_backend` returns a registered backend as plain values: {"backend": "sqlite", …};
`backend_from` is its inverse.
"""


def deleted_table_error(table: TableId, label: str) -> errors.KeyValueTableNotFoundError:
    """Return the error for a table that no longer exists; `label` says which it is, and where it
    was.
    """
    problem = f"{label} was deleted since it was opened."
    step = (
        "Open it again by name. If the name is found but the table is still missing, restore its"
        " store from a backup."
    )
    return errors.KeyValueTableNotFoundError(problem, step, scope=table.scope, table=table.name)


def missing_table_error(table: TableId, label: str) -> errors.TableNotFoundError:
    """Return the error for a table that the lake knows and whose store is missing."""
    problem = f"{label} is missing: the lake lists the table, but its store does not exist."
    step = (
        "Restore it from a backup, or give it up and create it again: adjunct kv delete"
        f" {table} --unregister."
    )
    return errors.TableNotFoundError(problem, step, table=label)


def sealed_table_error(table: TableId, label: str) -> errors.KeyValueTableSealedError:
    """Return the error for a write to a sealed table."""
    problem = f"{label} is sealed: it can be read but not written."
    return errors.KeyValueTableSealedError(
        problem, "Write to another table.", scope=table.scope, table=table.name
    )


TOKEN_BYTES = 12
VERSION_BYTES = 16


def new_token() -> bytes:
    """Return a unique token, which identifies a request and starts the versions that it writes."""
    return os.urandom(TOKEN_BYTES)


def make_version(token: bytes, index: int) -> bytes:
    """Return the version that the change at this index of a request gives its key. It is never
    used again.
    """
    return token + index.to_bytes(VERSION_BYTES - TOKEN_BYTES, "big")


def with_versions(changes: Iterable[SegmentChange]) -> tuple[list[SegmentChange], bytes]:
    """Return the changes of a request, each with its version, and the request's token."""
    token = new_token()
    return [
        change._replace(version=make_version(token, place)) for place, change in enumerate(changes)
    ], token


# Not frozen: one is made for each entry that is read, and a frozen one takes twice as long to make.
@dataclass(slots=True, unsafe_hash=True)
class KeyVersion:
    """The version of a key: it changes with every write, also of an equal value, and is never used
    again.

    Versions can be compared for equality only. A version from before a deletion is never valid
    again.
    """

    _bytes: bytes

    def to_bytes(self) -> bytes:
        """Return the version for storing elsewhere: 16 bytes."""
        return self._bytes

    @staticmethod
    def from_bytes(stored: bytes) -> KeyVersion:
        """Return the version that `to_bytes` returned. Raises KeyValueTableError for anything
        else.
        """
        if not isinstance(stored, bytes) or len(stored) != VERSION_BYTES:
            problem = f"{stored!r:.60} is not a version of a key: expected {VERSION_BYTES} bytes."
            raise errors.KeyValueTableError(problem, "Pass what KeyVersion.to_bytes() returned.")
        return KeyVersion(stored)

    def __repr__(self) -> str:
        return f"KeyVersion({self._bytes.hex()})"

    def __str__(self) -> str:
        return self._bytes.hex()


# Waiting: in an event loop or, for callers without one, in the calling thread. Segments and tables
# wait only by these functions.

S = TypeVar("S")
T = TypeVar("T")
_blocking: ContextVar[bool] = ContextVar("adjunct_key_value_blocking", default=False)


def is_blocking() -> bool:
    """Whether the running coroutine was started by `run_without_loop`, so that it blocks its
    thread where it waits.
    """
    return _blocking.get()


def run_without_loop(operation: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of a table or segment in this thread, which it blocks where it waits;
    return its result.
    """
    token = _blocking.set(True)
    try:
        operation.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        _blocking.reset(token)
    operation.close()
    raise AssertionError("an operation without an event loop has suspended")


async def pause(seconds: float) -> None:
    """Wait this many seconds."""
    if _blocking.get():
        time.sleep(seconds)
    else:
        await asyncio.sleep(seconds)


async def in_thread(executor: Callable[[], Executor], work: Callable[[], T]) -> T:
    """Return the result of `work`, which blocks: it is called in a thread of `executor`, or, where
    no event loop waits for it, in this thread.
    """
    if _blocking.get():
        return work()
    return await asyncio.get_running_loop().run_in_executor(executor(), work)


async def result_of(pending: Future[T]) -> T:
    """Wait for a future of another thread; return its result, or raise its error."""
    if not _blocking.get():
        return await asyncio.wrap_future(pending)
    try:
        return pending.result()
    except BaseException:
        pending.cancel()  # Ctrl-C must not leave the request running behind the caller's back
        raise


async def at_once(
    executor: Callable[[], Executor], operations: Iterable[Coroutine[Any, Any, T]]
) -> list[T]:
    """Return the results of operations that run concurrently, in their order.

    Without an event loop they run in threads of `executor`. If one fails, its error is raised once
    no other is running.
    """
    given = list(operations)
    if len(given) == 1:
        return [await given[0]]
    if not _blocking.get():
        tasks = [asyncio.ensure_future(operation) for operation in given]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)  # so that none still uses a connection when this returns
            raise
    return _in_threads(executor(), given)


def _in_threads(threads: Executor, operations: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of operations, each run in a thread; if one fails, raise its error once no
    other is running.
    """
    pending = [threads.submit(run_without_loop, operation) for operation in operations]
    try:
        return [future.result() for future in pending]
    except BaseException as error:
        for future, operation in zip(pending, operations, strict=True):
            if future.cancel():
                operation.close()
        if isinstance(error, Exception):  # Ctrl-C waits for nobody
            wait(pending)
        raise


def threads(purpose: str, count: int) -> ThreadPoolExecutor:
    """Return the pool of up to `count` threads that this process has for `purpose`, created on
    first use.
    """
    return _threads(purpose, count, os.getpid())


@lru_cache(maxsize=16)
def _threads(purpose: str, count: int, _process: int) -> ThreadPoolExecutor:
    """Return the pool of a process: a fork gets one of its own."""
    return ThreadPoolExecutor(count, f"adjunct-{purpose}")


RETRY_SECONDS = 60.0
"""How long requests to an unreachable table are retried. A lost reply is looked for until the
horizon.
"""
# seconds between two attempts, at most
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0


async def apply_until_settled(
    table: TableId,
    segment: TableSegment,
    changes: Sequence[SegmentChange],
    token: bytes,
    *,
    horizon: float,
    retried: type[errors.TransientError] = errors.TransientError,
) -> None:
    """Apply changes; repeat the request until it is known whether they were applied.

    The first attempt is repeated after a lost reply, and after errors of the type `retried`; later
    ones after any TransientError. Raises OutcomeUnknownError if a reply was lost and `horizon`
    seconds are over, or the table can't be asked any more. Otherwise raises what the last attempt
    raised, for example that the table is sealed.
    """
    attempts = _Attempts(horizon)
    try:
        while True:
            try:
                return await segment.apply(changes, token, repeated=attempts.lost is not None)
            except retried as error:
                await attempts.wait_after(error)
                retried = errors.TransientError
    except errors.AdjunctError as failed:
        # "Sealed" and "deleted" are only reported for writes that were not applied.
        if attempts.lost is None or isinstance(failed, errors.KeyValueTableError):
            raise
        raise table.error(
            errors.OutcomeUnknownError,
            f"a write of {len(changes):,} keys was sent, and whether it was applied could not be"
            f" determined in {time.monotonic() - attempts.began:.1f} s (limit: {horizon:g} s):"
            f" {failed}",
            "Read the keys before writing them again.",
        ) from failed


async def read_with_retries(request: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a read, which is repeated while the table is unreachable."""
    attempts = _Attempts(RETRY_SECONDS)
    while True:
        try:
            return await request()
        except errors.TransientError as error:
            await attempts.wait_after(error)


class _Attempts:
    """The attempts of one request: when the first `began`, and the last error about a `lost`
    reply.
    """

    __slots__ = ("_bound", "_horizon", "began", "lost")

    def __init__(self, horizon: float) -> None:
        self.began = time.monotonic()
        self.lost: ReplyLostError | None = None
        self._horizon = horizon
        self._bound = _FIRST_PAUSE  # of the next pause, in seconds

    async def wait_after(self, error: errors.TransientError) -> None:
        """Pause before the next attempt, longer each time; raise the error if the time for that
        is up or, unless the reply was lost, if somebody has to act first.
        """
        if isinstance(error, ReplyLostError):
            self.lost = error
        elif errors.needs_action(error):
            raise error
        seconds = random.uniform(0, self._bound)
        self._bound = min(2 * self._bound, _LONGEST_PAUSE)
        if self.lost is None:
            limit = min(self._horizon, RETRY_SECONDS)
        else:
            limit = self._horizon
        if time.monotonic() + seconds - self.began > limit:
            raise error
        await pause(seconds)
        if self.lost is not None and time.monotonic() - self.began > self._horizon:
            # the pause took longer than requested, because the machine was suspended or busy
            raise self.lost


_MOST_CHANGES = 1000  # also if the backend accepts more, because a request delays others
_MOST_BYTES = 4 * 1024 * 1024


def split_into_requests(
    changes: Iterable[SegmentChange], limits: SegmentLimits
) -> Iterator[list[SegmentChange]]:
    """Yield the changes of one segment, in their order, as requests within its limits.

    A change that is too large by itself is a request of its own, which `check_limits` rejects.
    """
    if limits.changes is not None:
        most = min(_MOST_CHANGES, limits.changes)
    else:
        most = _MOST_CHANGES
    if limits.request is not None:
        largest = min(_MOST_BYTES, limits.request)
    else:
        largest = _MOST_BYTES
    part: list[SegmentChange] = []
    size = 0
    for change in changes:
        change_size = len(change.key) + len(change.value or b"")
        if part and (len(part) == most or size + change_size > largest):
            yield part
            part = []
            size = 0
        part.append(change)
        size += change_size
    if part:
        yield part


MOST_PARTITIONS = 2**16
"""The most partitions of a table, in every backend."""


def check_partitions(partitions: int) -> None:
    """Raise ConfigurationError for more partitions than a table may have."""
    if partitions > MOST_PARTITIONS:
        problem = (
            f"partitions={partitions:,} of a key-value table: expected at most {MOST_PARTITIONS:,}."
        )
        step = "Use fewer: any number of families can share a partition."
        raise errors.ConfigurationError(problem, step, argument="partitions")


@validated
@dataclass(frozen=True, slots=True)
class KeyValueTableConfiguration:
    """The number of partitions, which never changes, and limits of entries, in addition to those of
    the backend.

    `longest_key` limits the bytes of a serialized key without its family, `longest_value` those of
    a serialized value.
    """

    partitions: PositiveInt
    longest_key: NonNegativeInt | None = None
    longest_value: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        check_partitions(self.partitions)

"""`TableSegment`: one partition of a key-value table in some store, and `SegmentBackend`, which makes them.

These comments are the specification that every backend is tested against.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import repeat
from operator import itemgetter
from typing import Any, Final, NamedTuple, Protocol, TypeVar, runtime_checkable

import mmh3
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from dagster_adjunct.resources.common import ClassRegistry, check_whole_number
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    KeyTooLongError,
    KeyValueTableError,
    KeyValueTableNotFoundError,
    KeyValueTableSealedError,
    OutcomeUnknownError,
    SerializationError,
    TableNotFoundError,
    TransientError,
)

# Where an entry lies: the bytes of its table key, and the partition that these are in (PDP-39, "Mapping KVPs").
#
#     with a family      | length of the family | family, UTF-8 | key, serialised |
#                        |<------ prefix, which is hashed ----->|
#     without            | - length of the key  | key, serialised |
#                        |<------ prefix, which is hashed ------>|
#
# A length is two bytes, big-endian; a negative one is its two's complement, so that no family begins like a key without
# one. The empty family has the bytes of the empty key without a family, and is refused.
#
# Entries of one table key order are in the order of these bytes: within a family in that of the keys.


MAX_KEY_BYTES = 8190
"""Bytes that a family and a key may have together: 8,192 without the two of the length."""
_LENGTH = struct.Struct(">h")
HASH_BITS = 52


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Table keys from `start` up to `end`, which is not in it any more; None is the end of all."""

    start: bytes = b""
    end: bytes | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no key can be in it."""
        return self.end is not None and self.start >= self.end

    def after(self, table_key: bytes) -> KeyRange:
        """Return what of this range lies behind a key."""
        return KeyRange(table_key + b"\0", self.end)


@lru_cache(maxsize=1024)
def family_prefix(family: str) -> bytes:
    """Return what the table keys of a family begin with. Raises SerializationError and KeyTooLongError."""
    if not isinstance(family, str):
        raise SerializationError(
            f"a key family is {family!r}: expected text, or None.", "Give a string.", family=f"{family!r:.80}"
        )
    if not family:
        raise SerializationError(
            "a key family is empty.",
            "Give it at least one character, or None for keys that have no family.",
            family=family,
        )
    try:
        encoded = family.encode()
    except UnicodeEncodeError as error:
        raise SerializationError(
            f"the key family {family!r} is no text: it has half of a surrogate pair at {error.start}.",
            "Give what UTF-8 can hold.",
            family=f"{family!r:.80}",
        ) from None
    if len(encoded) > MAX_KEY_BYTES:
        raise KeyTooLongError(
            f"a key family has {len(encoded):,} bytes of UTF-8; at most {MAX_KEY_BYTES:,} are allowed with the key.",
            "Use a shorter one, such as a hash of it.",
            family=family[:80],
            size=len(encoded),
        )
    return _LENGTH.pack(len(encoded)) + encoded


def table_key(prefix: bytes, key: bytes) -> bytes:
    """Return the table key of a serialised key; `prefix` is that of its family, or empty where it has none."""
    if len(key) + len(prefix) > (MAX_KEY_BYTES + 2 if prefix else MAX_KEY_BYTES):
        raise KeyTooLongError(
            f"a key of {len(key):,} bytes" + (f" in a family of {len(prefix) - 2:,}" if prefix else "") + " is too "
            f"long: expected at most {MAX_KEY_BYTES:,} together.",
            "Use a shorter one, such as a hash of it.",
            size=len(key) + max(len(prefix) - 2, 0),
        )
    return prefix + key if prefix else _LENGTH.pack(-len(key)) + key


def split_table_key(stored: bytes) -> tuple[str | None, bytes]:
    """Return the family, None where there is none, and the serialised key of a table key."""
    (length,) = _LENGTH.unpack_from(stored)
    if length <= 0:
        return None, stored[2:]
    return stored[2 : 2 + length].decode(), stored[2 + length :]


def split_table_keys(stored: Sequence[bytes]) -> tuple[Iterable[str | None], Sequence[bytes]]:
    """Return the families and the serialised keys of table keys, one or more, in their order.

    Fast where all are of one family, which is then repeated without end.
    """
    (length,) = _LENGTH.unpack_from(stored[0])
    if length < 0:  # nothing with a family lies behind
        return repeat(None), list(map(itemgetter(slice(2, None)), stored))
    behind = 2 + length
    if length > 0 and stored[-1].startswith(stored[0][:behind]):
        return repeat(stored[0][2:behind].decode()), list(map(itemgetter(slice(behind, None)), stored))
    families, keys = zip(*map(split_table_key, stored), strict=True)
    return families, keys


def partition_of(prefix: bytes, partitions: int) -> int:
    """Return the partition, from 0, of a family's prefix, or of a table key without a family.

    They are n equal ranges of the high 52 bits of Murmur3: of the first word of its x64 variant of 128 bits, seed 0.
    """
    # By name: mmh3 (5.3.1) passes over a fourth argument that is given by its place, and the hash would be signed.
    high = mmh3.hash64(prefix, 0, True, signed=False)[0] >> (64 - HASH_BITS)
    return high * partitions >> HASH_BITS


def family_range(prefix: bytes) -> KeyRange:
    """Return the range of all table keys that begin with `prefix`, which is not empty."""
    end = bytearray(prefix)
    while end and end[-1] == 0xFF:
        end.pop()
    if not end:
        return KeyRange(prefix)
    end[-1] += 1
    return KeyRange(prefix, bytes(end))


def family_subrange(prefix: bytes, beginning: bytes, start: bytes | None, end: bytes | None) -> KeyRange:
    """Return the range of a family's serialised keys that begin with `beginning` and lie from `start` up to `end`."""
    whole = family_range(prefix + beginning)
    first = whole.start if start is None else max(whole.start, prefix + start)
    if end is None:
        return KeyRange(first, whole.end)
    return KeyRange(first, prefix + end if whole.end is None else min(whole.end, prefix + end))


class Expected(Enum):
    """What a change may demand of its key besides a version."""

    ANYTHING = "anything"
    ABSENT = "absent"


ANYTHING: Final = Expected.ANYTHING
ABSENT: Final = Expected.ABSENT


class SegmentChange(NamedTuple):
    """What a request does to one key: `value` is None where it removes it, and `version` is the new one.

    `expected` is ANYTHING, ABSENT or the bytes of the version that the key must have. Removing a key that is not there
    is done when it is expected to be ANYTHING. `is_guard`: the key is only looked at, and neither ANYTHING nor changed;
    what is expected of it holds at the moment at which the other changes are applied.
    """

    key: bytes
    value: bytes | None
    version: bytes
    expected: Expected | bytes = ANYTHING
    is_guard: bool = False


class StoredEntry(NamedTuple):
    """A key as it is stored; `value` is None where only keys were asked for."""

    key: bytes
    version: bytes
    value: bytes | None


@dataclass(frozen=True, slots=True)
class StoredPage:
    """Entries in columns, which are as long as each other; `values` are None where only keys were asked for. `is_last`:
    nothing of the range was behind them at the moment at which they were read; where it is False nobody knows.

    A scan reads millions: whoever holds an object for each keeps Python's collector busy.
    """

    keys: Sequence[bytes] = ()
    versions: Sequence[bytes] = ()
    values: Sequence[bytes | None] = ()
    is_last: bool = False

    @staticmethod
    def of(rows: Iterable[Sequence[Any]], *, is_last: bool = False) -> StoredPage:
        """Return the page of entries, or of a driver's rows: key, version and value."""
        columns = list(zip(*rows, strict=True)) or [(), (), ()]
        return StoredPage(columns[0], columns[1], columns[2], is_last)

    def __len__(self) -> int:
        return len(self.keys)

    def entries(self) -> list[StoredEntry]:
        """Return the entries in their order."""
        return list(map(StoredEntry, self.keys, self.versions, self.values))


@dataclass(frozen=True, slots=True)
class SegmentLimits:
    """What a backend holds: bytes of a table key (with its two bytes of length), of its family's prefix (with them), of
    a value; changes and bytes of one request. None is no limit of its own."""

    table_key: int = MAX_KEY_BYTES + 2
    family_prefix: int | None = None
    key: int | None = None  # the serialised key alone
    value: int | None = None
    changes: int | None = None
    request: int | None = None  # keys and values of one `apply`


@dataclass(frozen=True, slots=True)
class TableId:
    """A table as backends know it. `incarnation` (16 hexadecimal digits) is new for each table that is ever made."""

    scope: str
    name: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.scope}/{self.name}"


class ConditionsFailed(Exception):
    """Conditions of a request do not hold: nothing was applied. `found` tells, for the place of each change whose own
    condition fails, the version that its key has, or None where there is no such key."""

    def __init__(self, versions: Mapping[int, bytes | None]) -> None:
        super().__init__(dict(versions))
        self.found = dict(versions)


class ReplyLostError(TransientError):
    """A request was sent and nobody knows whether it was applied: it is repeated with `repeated=True`."""


class TableSegment(Protocol):
    """One partition of a key-value table: an ordered map from table keys (bytes) to values with versions.

    Every method is linearisable: what returned is seen by everything that begins later, in any process. They raise
    `TableUnavailableError` where certainly nothing happened and the same call may succeed later,
    `KeyValueTableNotFoundError` where the table was deleted, and `TableError` or `TableAccessError` where asking again
    does not help. They may be awaited from any event loop; where `waits` is False they never suspend, and need none.
    """

    limits: SegmentLimits
    waits: bool

    async def apply(self, changes: Sequence[SegmentChange], token: bytes, *, repeated: bool = False) -> None:
        """Apply all changes, or nothing. Their keys differ; together they are within `limits`; there is at least one.

        Raises `ConditionsFailed`, which names every change whose condition does not hold, `KeyValueTableSealedError`,
        `ReplyLostError` where it may have happened, or still may.

        `token` (12 bytes) names the request. `repeated` says that an earlier call with the same arguments raised
        `ReplyLostError`. If that one was applied, or is applied while we look, this returns and changes nothing,
        whatever others wrote since; else it can't be applied any more, and this call does what it should have done.
        The backend remembers tokens for `SegmentBackend.horizon` seconds at least; it is not asked later.
        """
        ...

    async def get(self, keys: Sequence[bytes], *, values: bool = True) -> list[StoredEntry | None]:
        """Return the entries of these keys (which may repeat) in their order, None for what is missing.

        Any number of keys is taken; the backend splits them into pages where it must. Each is read as it stands at one
        moment of the call; all of them at one where the store can.
        """
        ...

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage:
        """Return the first entries of a range, which is not empty, in the order of their table keys: at most `limit` (1
        or more).

        There are fewer only where the range ends, or where the backend ends a page early for its size: an empty page
        says that nothing is left, and one that `is_last` that nothing was behind it. Each entry is there at some moment
        of the call; one that is there all through the call is not passed over.
        """
        ...

    async def close(self) -> None:
        """Give back what the running event loop holds (connections, files); a later call opens it again."""
        ...


class SegmentBackend(Protocol):
    """A store that holds key-value tables. Picklable, without secrets, and described by plain values.

    `create`, `seal` and `delete` may be called by several at once, again, and after a crash of the one before: they end
    in the same state. They block.
    """

    limits: SegmentLimits
    waits: bool
    horizon: float  # seconds after its first attempt for which a request may be repeated

    def to_dict(self) -> dict[str, Any]:
        """Return what, as keywords, makes the same backend in another process. No secrets, names of variables only."""
        ...

    def create(self, table: TableId, partitions: int) -> None:
        """Make the segments of a table, empty. What is there already, with its entries, stays."""
        ...

    def seal(self, table: TableId, partitions: int) -> None:
        """Refuse all writes to the table from now on: none is applied after this has returned."""
        ...

    def delete(self, table: TableId, partitions: int) -> None:
        """Remove the table with all that it holds. Handles that are open meet `KeyValueTableNotFoundError`; whatever
        they sent is not applied after this has returned."""
        ...

    def open(self, table: TableId, partition: int) -> TableSegment:
        """Return a segment, which is reached when it is first used."""
        ...

    def location(self, table: TableId, partition: int) -> str:
        """Return where a segment lives, for people: no user, no password."""
        ...


@runtime_checkable
class PreflightChecks(Protocol):
    """A backend whose store can be asked beforehand whether it would let its user seal or delete a table.

    Both change nothing, and raise what `seal` or `delete` would where the store refuses it (to a user without the
    right, say) or is out of reach. They need not find out whether the table is there. They block.
    """

    def check_may_seal(self, table: TableId, partitions: int) -> None:
        """Return where the table could be sealed now."""
        ...

    def check_may_delete(self, table: TableId, partitions: int) -> None:
        """Return where the table could be deleted now."""
        ...


class PageReader(Protocol):
    """What reads the pages of a segment, as `TableSegment.page` does."""

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage: ...


@runtime_checkable
class PrefetchingSegment(Protocol):
    """A segment whose store can prepare a page while the one before is used."""

    def prefetching_reader(self) -> PageReader:
        """Return what reads pages that follow each other, for one iteration. It may be left at any time.

        From the third call on, a page may have been read since the call before: it then shows nothing of what was
        written meanwhile.
        """
        ...


@runtime_checkable
class BlockingBackend(Protocol):
    """A backend that waits, and whose segments can also be had without an event loop."""

    def open_blocking(self, table: TableId, partition: int) -> TableSegment:
        """Return a segment that is as from `open`, but never suspends: it waits in the thread of whoever asks."""
        ...


_BACKENDS: ClassRegistry[SegmentBackend] = ClassRegistry("backend of key-value tables", "register_segment_backend")


def register_segment_backend(name: str, backend: Callable[..., SegmentBackend]) -> None:
    """Make a class known as `name`. It takes, as keywords, what `to_dict()` of its objects gives."""
    _BACKENDS.register(name, backend)


def describe_backend(backend: SegmentBackend) -> dict[str, Any]:
    """Return a registered backend as plain values: {"backend": "sqlite", …}."""
    return _BACKENDS.describe(backend)


def backend_from(description: Mapping[str, Any]) -> SegmentBackend:
    """Return the backend that `describe_backend` described."""
    return _BACKENDS.from_description(description)


def deleted_table_error(table: TableId, label: str) -> KeyValueTableNotFoundError:
    """Return the error of a table that is not there any more; `label` says which it is, and where it was."""
    return KeyValueTableNotFoundError(
        f"{label} was deleted since it was opened.",
        "Open it again by its name. If that finds it, and it is still not there, bring its store back from a copy.",
        scope=table.scope,
        table=table.name,
    )


def missing_table_error(table: TableId, label: str) -> TableNotFoundError:
    """Return the error of a table that the lake knows, and whose store is not there."""
    return TableNotFoundError(
        f"{label} is gone: the lake knows the table, and there is none.",
        "Bring it back from a copy; or give it up and create it anew: "
        f"adjunct kv delete {table.scope}/{table.name} --unregister.",
        table=label,
    )


def sealed_table_error(table: TableId, label: str) -> KeyValueTableSealedError:
    """Return the error of a write to a table that is sealed."""
    return KeyValueTableSealedError(
        f"{label} is sealed: it is read, and not written any more.",
        "Write to another table.",
        scope=table.scope,
        table=table.name,
    )


TOKEN_BYTES = 12
VERSION_BYTES = 16


def new_token() -> bytes:
    """Return what no other request has: the name of a request, and the beginning of the versions that it writes."""
    return os.urandom(TOKEN_BYTES)


def make_version(token: bytes, place: int) -> bytes:
    """Return the version that the change at this place of a request gives its key. It never comes again."""
    return token + place.to_bytes(VERSION_BYTES - TOKEN_BYTES, "big")


# Not frozen: one is made for each entry that is read, and a frozen one takes twice as long to make.
@dataclass(slots=True, unsafe_hash=True)
class KeyVersion:
    """The version of a key: it changes with every write, also of an equal value, and never comes back.

    Versions are equal or they are not; neither is older. A version from before a delete is never valid again.
    """

    _bytes: bytes

    def to_bytes(self) -> bytes:
        """Return the version for storing elsewhere: 16 bytes."""
        return self._bytes

    @staticmethod
    def from_bytes(stored: bytes) -> KeyVersion:
        """Return what `to_bytes` gave. Raises KeyValueTableError for anything else."""
        if not isinstance(stored, bytes) or len(stored) != VERSION_BYTES:
            raise KeyValueTableError(
                f"{stored!r:.60} is no version of a key: expected {VERSION_BYTES} bytes.",
                "Give what KeyVersion.to_bytes() returned.",
            )
        return KeyVersion(stored)

    def __repr__(self) -> str:
        return f"KeyVersion({self._bytes.hex()})"

    def __str__(self) -> str:
        return self._bytes.hex()


# Requests to a segment that are sent again: what certainly did nothing, and what nobody knows of.
#
# The first attempt is made by the caller; only what failed comes here.


T = TypeVar("T")
Pause = Callable[[float], Awaitable[None]]

RETRY_SECONDS = 60.0
"""Seconds for which a table that is out of reach is asked again; a lost reply is looked for until the horizon."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0


async def pause_async(seconds: float) -> None:
    """Let others run meanwhile."""
    await asyncio.sleep(seconds)


async def pause_blocking(seconds: float) -> None:
    """Wait where no event loop runs this coroutine."""
    time.sleep(seconds)


def run_without_loop(operation: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that never suspends."""
    try:
        operation.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    operation.close()
    raise AssertionError("a backend that says that it does not wait has waited")


async def retry_apply(
    table: TableId,
    segment: TableSegment,
    changes: Sequence[SegmentChange],
    token: bytes,
    *,
    first: TransientError,
    began: float,
    horizon: float,
    pause: Pause,
) -> None:
    """Repeat a write whose first attempt, `began` at that `time.monotonic()`, raised `first`, until it is settled.

    Raises OutcomeUnknownError where an attempt's reply was lost and time is out, or the table can't be asked any more;
    else what the last attempt raised, such as that the table is sealed.
    """
    errors: list[TransientError] = [first]
    lost: ReplyLostError | None = None

    async def attempt() -> None:
        nonlocal lost
        if lost is not None and time.monotonic() - began > horizon:
            raise lost  # the pause was longer than it should have been: the machine had stopped, or much to do
        try:
            if errors:
                raise errors.pop()
            await segment.apply(changes, token, repeated=lost is not None)
        except ReplyLostError as error:
            lost = error
            raise

    def is_over(state: RetryCallState) -> bool:
        return time.monotonic() + state.upcoming_sleep - began > (
            min(horizon, RETRY_SECONDS) if lost is None else horizon
        )

    try:
        await _retrying(is_over, pause)(attempt)
    except AdjunctError as error:
        # That the table is sealed, or not there any more, is said only of a write that was not applied.
        if lost is None or isinstance(error, KeyValueTableError):
            raise
        raise OutcomeUnknownError(
            f"key-value table {table}: a write of {len(changes):,} keys was sent, and whether it was applied could not "
            f"be found out in {time.monotonic() - began:.1f} s (asked for at most {horizon:g} s): {error}",
            "Read the keys before you write them again.",
            scope=table.scope,
            table=table.name,
        ) from error


async def retry_read(request: Callable[[], Awaitable[T]], *, first: TransientError, began: float, pause: Pause) -> T:
    """Repeat a read whose first attempt raised `first`."""
    errors: list[TransientError] = [first]

    async def attempt() -> T:
        if errors:
            raise errors.pop()
        return await request()

    return await _retrying(lambda state: time.monotonic() + state.upcoming_sleep - began > RETRY_SECONDS, pause)(
        attempt
    )


def _retrying(is_over: Callable[[RetryCallState], bool], pause: Pause) -> AsyncRetrying:
    return AsyncRetrying(
        retry=retry_if_exception_type(TransientError),
        wait=wait_random_exponential(multiplier=_FIRST_PAUSE, max=_LONGEST_PAUSE),
        stop=is_over,
        sleep=pause,
        reraise=True,
    )


_MOST_CHANGES = 1000  # where the backend would take more: a request holds up others that long
_MOST_BYTES = 4 * 1024 * 1024


def split_into_requests(changes: Iterable[SegmentChange], limits: SegmentLimits) -> Iterator[list[SegmentChange]]:
    """Yield changes of one segment in their order, in parts that are within its limits: each part is one request.

    A change that is too large by itself is a part of its own, which `check_limits` refuses.
    """
    most = _MOST_CHANGES if limits.changes is None else min(_MOST_CHANGES, limits.changes)
    largest = _MOST_BYTES if limits.request is None else min(_MOST_BYTES, limits.request)
    part: list[SegmentChange] = []
    size = 0
    for change in changes:
        own = len(change.key) + len(change.value or b"")
        if part and (len(part) == most or size + own > largest):
            yield part
            part, size = [], 0
        part.append(change)
        size += own
    if part:
        yield part


MOST_PARTITIONS = 2**16
"""On every backend: more would not fit the two bytes that some of them have for its number."""


@dataclass(frozen=True, slots=True)
class KeyValueTableConfiguration:
    """How many partitions a table has, for ever, and what its entries may have at most, besides the backend's limits.

    `longest_key` counts the bytes of a serialised key without its family, `longest_value` those of a serialised value.
    """

    partitions: int
    longest_key: int | None = None
    longest_value: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("partitions", 1), ("longest_key", 0), ("longest_value", 0)):
            value = getattr(self, name)
            if value is not None or name == "partitions":
                check_whole_number(
                    value,
                    f"{name}={value!r} of a key-value table",
                    f"a whole number from {least} on",
                    argument=name,
                    least=least,
                )
        if self.partitions > MOST_PARTITIONS:
            raise ConfigurationError(
                f"partitions={self.partitions:,} of a key-value table: expected at most {MOST_PARTITIONS:,}.",
                "Choose fewer: any number of families share a partition.",
                argument="partitions",
            )

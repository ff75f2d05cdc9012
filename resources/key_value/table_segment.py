"""`TableSegment`: one partition of a key-value table in some store, and `SegmentBackend`, which makes them.

These comments are the specification that every backend is tested against.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from dagster_adjunct.resources.errors import TransientError
from dagster_adjunct.resources.key_value.addressing import LONGEST, KeyRange


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

    table_key: int = LONGEST + 2
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
class ChecksEndings(Protocol):
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


class ReadsPages(Protocol):
    """What reads the pages of a segment, as `TableSegment.page` does."""

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage: ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A segment whose store can prepare a page while the one before is used."""

    def reading_ahead(self) -> ReadsPages:
        """Return what reads pages that follow each other, for one iteration. It may be left at any time.

        From the third call on, a page may have been read since the call before: it then shows nothing of what was
        written meanwhile.
        """
        ...


@runtime_checkable
class OpensWithoutLoop(Protocol):
    """A backend that waits, and whose segments can also be had without an event loop."""

    def open_without_loop(self, table: TableId, partition: int) -> TableSegment:
        """Return a segment that is as from `open`, but never suspends: it waits in the thread of whoever asks."""
        ...

"""`Operation`: one request to a table, as every layer takes and hands on.

    RemoteTable -> cache -> update contract -> batch and order -> retry -> rate -> function
    Operation(kind, entries, args)  --send-->  Outcomes, one for each entry

Entries lie in columns, one sequence for keys, one for records and so on, so that a layer that has nothing to say about
them costs the same for one entry as for a thousand. `RowEntries` holds Python values; `ArrowEntries` (arrow_entries.py)
holds an Arrow batch, and makes Python values of a column when a layer or a function first asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from types import NoneType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from dagster_adjunct.resources.tables.partial_update import UpdateContract

K_co = TypeVar("K_co", bound=Hashable, covariant=True)


class OperationKind(Enum):
    """What a request asks of a table, for each of its entries."""

    GET = "get"
    PUT = "put"  # make `value` the record, whatever was there; None deletes (functions get deletes for it)
    PUT_IF_ABSENT = "put-if-absent"  # make `value` the record where there is none
    DELETE = "delete"
    UPDATE = "update"  # apply `value` to the record; without one: begin it with `default`, or it is missing

    __hash__ = object.__hash__  # by identity; the one of Enum is a call of Python's at each look into a dictionary

    @property
    def writes(self) -> bool:
        return self is not OperationKind.GET


_REPLAY = re.compile(r"~\d+$")


class Mark(NamedTuple):
    """Where the message of an entry stands in what it was read from: what replays and late records are told by.

    `source` is a stream's partition ("lake.flights.3"), with "~5" behind it for what the bounded replay of epoch 5
    reads beside the main position. Of one source, a later message has a greater `position` (`position_of`), which
    stores compare as text.
    """

    source: str
    position: str

    @property
    def tie(self) -> str:
        """What orders messages of equal time: by source, offset and ordinal; an epoch and a replay have no say."""
        return f"{_REPLAY.sub('', self.source)} {self.position.partition(':')[2]}"


# Of a call that is no message: of what has equal times, it comes after all messages.
DIRECT = Mark("~", "")


def position_of(epoch: int, offset: int, ordinal: int = 0) -> str:
    """The text of a position, which sorts as the three numbers do. `ordinal` counts the updates of one message."""
    return f"{epoch:010d}:{offset:020d}:{ordinal:06d}"


class Entries(Protocol[K_co]):
    """The entries of an operation, in order. All sequences have their length; one that is None says nothing of any."""

    @property
    def keys(self) -> Sequence[K_co]: ...

    @property
    def values(self) -> Sequence[Any] | None:
        """Records of puts and updates of updates; None for gets and deletes."""
        ...

    @property
    def defaults(self) -> Sequence[Any] | None:
        """Records to begin with, for updates; None in it where a message has no default."""
        ...

    @property
    def marks(self) -> Sequence[Mark] | None:
        """Where each message stands; needed by conditions (`Conditions`)."""
        ...

    @property
    def newest(self) -> Sequence[Any] | None:
        """The time of each message, for `Conditions.newest_by`; a delete has no record that it could be read from."""
        ...

    def __len__(self) -> int: ...

    def take(self, indices: Sequence[int]) -> Entries[K_co]:
        """The entries at `indices`, in that order."""
        ...

    def part(self, start: int, end: int) -> Entries[K_co]:
        """The entries from `start` to before `end`."""
        ...

    def without_defaults(self) -> Entries[K_co]:
        """The same entries, none of which has a default."""
        ...

    def null_key(self) -> int | None:
        """The place of the first key that is null, or null in a part; None where all are whole."""
        ...

    def null_value(self) -> int | None:
        """The place of the first value that is None; None where no value is, or there are none."""
        ...

    @property
    def nbytes(self) -> int:
        """About how many bytes the entries are when they are sent."""
        ...


@dataclass(frozen=True, slots=True)
class RowEntries(Generic[K_co]):
    """Entries as Python values."""

    keys: Sequence[K_co]
    values: Sequence[Any] | None = None
    defaults: Sequence[Any] | None = None
    marks: Sequence[Mark] | None = None
    newest: Sequence[Any] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, indices: Sequence[int]) -> RowEntries[K_co]:
        def picked(column: Sequence[Any] | None) -> list[Any] | None:
            return None if column is None else [column[index] for index in indices]

        keys = [self.keys[index] for index in indices]
        return RowEntries(keys, *map(picked, (self.values, self.defaults, self.marks, self.newest)))

    def part(self, start: int, end: int) -> RowEntries[K_co]:
        if start == 0 and end >= len(self.keys):
            return self

        def cut(column: Sequence[Any] | None) -> Sequence[Any] | None:
            return None if column is None else column[start:end]

        return RowEntries(self.keys[start:end], *map(cut, (self.values, self.defaults, self.marks, self.newest)))

    def without_defaults(self) -> RowEntries[K_co]:
        return self if self.defaults is None else replace(self, defaults=None)

    def null_key(self) -> int | None:
        kinds = set(map(type, self.keys))
        if not any(kind is NoneType or issubclass(kind, tuple) for kind in kinds):
            return None
        for place, key in enumerate(self.keys):
            if key is None or (isinstance(key, tuple) and None in key):
                return place
        return None

    def null_value(self) -> int | None:
        if NoneType not in set(map(type, self.values or ())):
            return None
        for place, value in enumerate(self.values or ()):
            if value is None:
                return place
        return None

    @property
    def nbytes(self) -> int:
        columns = (self.keys, self.values or (), self.defaults or ())
        return sum(size_of(value) for column in columns for value in column)


def size_of(value: object) -> int:
    """About how many bytes a value is when it is sent: as text its characters, as a number 8, and what is in it."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, Mapping):
        return sum(size_of(name) + size_of(item) for name, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return sum(map(size_of, value))
    if is_dataclass(value):
        return sum(size_of(getattr(value, part.name)) for part in fields(value))
    return 1 if value is None else 8


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the store itself has to check, in the same request as the write; an entry that fails it is skipped.

    `newest_by` names the column whose greatest value stays: an entry is applied where the store has no newer one; equal
    times are told apart by `Mark.tie`, and an entry that is equal in both is applied again. `idempotent` keeps, beside
    the record, the greatest position applied from each source, and skips entries at or below it. With either a delete
    leaves the mark behind (a tombstone), so that what is older and comes later does not bring the record back.

    With both, a late update is not lost: numbers that it adds and values that it appends are applied, once, to a record
    that is there (`Operation.adds_late`). What it sets, removes, or adds to JSON is skipped, since a newer one stays.

    `keeps_marks` is no condition: the table is idempotent and these entries have no marks, as those of a direct call.
    Stores that keep marks in the record itself have to leave them there.
    """

    newest_by: str | None = None
    idempotent: bool = False
    keeps_marks: bool = False

    def __bool__(self) -> bool:
        return self.idempotent or self.newest_by is not None


@dataclass(frozen=True, slots=True)
class Operation(Generic[K_co]):
    """One request: a kind, the entries, and what the caller hands through to the function.

    A key may occur several times; its entries take effect in their order. `key` names the parts of keys that are
    tuples, in their order, so that a store whose own order is another brings them into it; none: the store's order.
    `contract` says whether updates may begin records with their defaults; below the contract layer, entries have no
    others. `rerun`: who sends it sends it again, and all that came after it, if an entry is given up; so nothing of
    that may take effect before.
    """

    kind: OperationKind
    entries: Entries[K_co]
    args: tuple[object, ...] = ()
    conditions: Conditions = field(default=Conditions())
    key: tuple[str, ...] = ()
    contract: UpdateContract = UpdateContract.UPDATE_WITH_DEFAULTS
    rerun: bool = False
    count: int = field(init=False, repr=False, compare=False)  # of the entries; each layer asks for it

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", len(self.entries) if hasattr(self.entries, "__len__") else 0)

    def __len__(self) -> int:
        return self.count

    @property
    def adds_late(self) -> bool:
        """Whether an entry that is late, but was not applied before, still adds numbers and appends to lists.

        Its mark is kept then, and what is newest stays. One that only sets leaves nothing behind.
        """
        return (
            self.kind is OperationKind.UPDATE and self.conditions.idempotent and self.conditions.newest_by is not None
        )

    def with_entries(self, entries: Entries[K_co]) -> Operation[K_co]:
        """The same request for other entries."""
        return replace(self, entries=entries)


def same_args(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether two calls hand on the same; of objects that aren't plain values, only identity is sure to say so."""
    return one is other or (
        len(one) == len(other)
        and all(
            a is b or (type(a) is type(b) and isinstance(a, str | bytes | int | float) and a == b)
            for a, b in zip(one, other, strict=True)
        )
    )

"""`Operation`: one request to a table, as every layer takes and hands on.

    RemoteTable -> cache -> update contract -> batch and order -> retry -> rate -> function
    Operation(kind, entries, args)  --send-->  Outcomes, one for each entry

Entries lie in columns, one sequence for keys, one for records and so on, so that a layer that has nothing to say about
them costs the same for one entry as for a thousand. `RowEntries` holds Python values; `ArrowEntries` (arrow_entries.py)
holds an Arrow batch, and makes Python values of a column when a layer or a function first asks for them.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from types import MappingProxyType, NoneType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError, TableError


class Clock(Protocol):
    """Seconds that only grow, and a way to let them pass."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when `seconds` have passed."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def __repr__(self) -> str:
        return "SystemClock()"


_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Changes:
    """What an update does to columns; a plain mapping as an update is the same as `Changes(set=mapping)`.

    - `set`: gives columns their values; None sets null.
    - `add`: adds numbers to columns; a column that is null or not there counts as 0. None adds nothing. What is added
      to a column of JSON is a mapping, whose members replace those of the same names and leave the others alone.
    - `append`: puts values at the end of list columns; one that is null or not there counts as empty. Each value is a
      list of what is appended; None or an empty list appends nothing.
    - `remove`: makes columns null, or takes them out of records whose store has no fixed columns.

    A column is named in one of the four only.
    """

    set: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    add: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    append: Mapping[str, Sequence[Any]] = field(default_factory=lambda: _NOTHING)
    remove: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.remove, str):
            raise ConfigurationError(
                f"Changes have remove={self.remove!r}, which is one text; expected the names of columns.",
                f"Write remove=[{self.remove!r}].",
                argument="remove",
            )

    @property
    def repeatable(self) -> bool:
        """Whether applying it twice in a row comes to the same as once."""
        return not self.add and not self.append


def to_changes(update: Mapping[str, Any] | Changes) -> Changes:
    """The update as `Changes`."""
    return update if isinstance(update, Changes) else Changes(set=update)


E = TypeVar("E", bound=BaseException)


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from or while handling, and the members of groups; the outermost first."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        here = waiting.pop(0)
        if id(here) in seen:
            continue
        seen.add(id(here))
        yield here
        if isinstance(here, BaseExceptionGroup):
            waiting.extend(here.exceptions)
        if here.__cause__ is not None:
            waiting.append(here.__cause__)
        elif here.__context__ is not None and not here.__suppress_context__:
            waiting.append(here.__context__)


def first_cause(error: BaseException, kind: type[E]) -> E | None:
    """The outermost error of this kind among the causes, or None."""
    return next((cause for cause in causes(error) if isinstance(cause, kind)), None)


def key_columns(table: str, key: str | Sequence[str]) -> tuple[str, ...]:
    """The names of a table's key columns, in order."""
    names: tuple[Any, ...] = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, list | tuple) else ()
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise ConfigurationError(
            f"table {table}: key={key!r}; expected at least one key column, by name and in order, each once.",
            "Give a name, or a list of names.",
            argument="key",
            table=table,
        )
    return names


def key_reorderer(store: str, own: Sequence[str], given: Sequence[str]) -> Callable[[Any], Any] | None:
    """The function that brings a key whose parts are named `given` into the order `own`; None where it is in that.

    No names are the store's own order. ConfigurationError where they are others, SchemaMismatchError for a key that is
    no tuple of so many parts.
    """
    if not given or list(given) == list(own):
        return None
    if sorted(given) != sorted(own):
        raise ConfigurationError(
            f"{store} has the key {', '.join(own)}, and the request's key is {', '.join(given)}.",
            "Declare the same key columns for the table and for its function.",
            argument="key",
        )
    places = [list(given).index(name) for name in own]

    def ordered(key: Any) -> tuple[Any, ...]:
        if not isinstance(key, tuple) or len(key) != len(places):
            raise key_length_error(store, key, given)
        return tuple([key[place] for place in places])

    return ordered


def key_length_error(store: str, key: Any, names: Sequence[str]) -> SchemaMismatchError:
    """The error for a key that is not as long as it has columns."""
    return SchemaMismatchError(
        f"{store} got {key!r} as a key; expected a tuple of {', '.join(names)}.",
        "Give the key's values in that order.",
        table=store,
    )


# Partial updates with a default for the first one (SAMZA-2709): what a caller says.
#
# What is done about it is in update_contract_layer.py.


V = TypeVar("V")
U = TypeVar("U")


class UpdateContract(Enum):
    """What may be done when an update meets no record."""

    UPDATE_ONLY = "update-only"
    UPDATE_WITH_DEFAULTS = "update-with-defaults"


@dataclass(frozen=True, slots=True)
class UpdateMessage(Generic[U, V]):
    """A part of a record to set (`update`), and the whole record to begin with where there is none."""

    update: U
    default: V | None = None

    def __post_init__(self) -> None:
        if self.update is None:
            raise TableError(
                "an UpdateMessage has None as its update; it must say what to change.",
                "Drop the message, or use delete() to remove a record.",
            )


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
        return sum(estimate_bytes(value) for column in columns for value in column)


def estimate_bytes(value: object) -> int:
    """About how many bytes a value is when it is sent: as text its characters, as a number 8, and what is in it."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, Mapping):
        return sum(estimate_bytes(name) + estimate_bytes(item) for name, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return sum(map(estimate_bytes, value))
    if is_dataclass(value):
        return sum(estimate_bytes(getattr(value, part.name)) for part in fields(value))
    return 1 if value is None else 8


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the store itself has to check, in the same request as the write; an entry that fails it is skipped.

    `newest_by` names the column whose greatest value stays: an entry is applied where the store has no newer one; equal
    times are told apart by `Mark.tie`, and an entry that is equal in both is applied again. `idempotent` keeps, beside
    the record, the greatest position applied from each source, and skips entries at or below it. With either a delete
    leaves the mark behind (a tombstone), so that what is older and comes later does not bring the record back.

    With both, a late update is not lost: numbers that it adds and values that it appends are applied, once, to a record
    that is there (`Operation.applies_late_changes`). What it sets, removes, or adds to JSON is skipped, since a newer
    one stays.

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
    def applies_late_changes(self) -> bool:
        """Whether an entry that is late, but was not applied before, still adds numbers and appends to lists.

        Its mark is kept then, and what is newest stays. One that only sets leaves nothing behind.
        """
        return (
            self.kind is OperationKind.UPDATE and self.conditions.idempotent and self.conditions.newest_by is not None
        )

    def with_entries(self, entries: Entries[K_co]) -> Operation[K_co]:
        """The same request for other entries."""
        return replace(self, entries=entries)


def are_same_args(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether two calls hand on the same; of objects that aren't plain values, only identity is sure to say so."""
    return one is other or (
        len(one) == len(other)
        and all(
            a is b or (type(a) is type(b) and isinstance(a, str | bytes | int | float) and a == b)
            for a, b in zip(one, other, strict=True)
        )
    )


# `Outcomes`: what became of each entry of an operation.
#
# An entry without a problem is done, and done entries cost nothing here: what is kept is the records that a get found,
# and the problems by the entry's place.


_NONE: Mapping[int, Problem] = MappingProxyType({})


class State(Enum):
    """What became of an entry that is not simply done."""

    SKIPPED = "skipped"  # its condition did not hold: the store has something newer, or has it already. No error
    MISSING = "missing"  # an update met no record, and had no default
    REFUSED = "refused"  # it fails again until something is changed
    FAILED = "failed"  # it had no effect, and may be sent again
    UNKNOWN = "unknown"  # sent, and no answer came: it may have had its effect


@dataclass(frozen=True, slots=True)
class Problem:
    """Why one entry is not done. `retry_after`: seconds that the store asked to wait before it is sent again.

    `of_request`: the request failed as a whole, whatever was in it, so that nothing is said of this one record.
    """

    state: State
    error: BaseException | None = None
    retry_after: float | None = None
    of_request: bool = False

    @property
    def may_pass(self) -> bool:
        """Whether the entry may succeed when it is sent again as it was."""
        return self.state in (State.FAILED, State.UNKNOWN)

    @property
    def is_answer(self) -> bool:
        """Whether the store did as it was asked, and this is what it had to say: no failure, and nothing to repeat."""
        return self.state in (State.SKIPPED, State.MISSING)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """One outcome for each of `count` entries.

    `records` are a get's, None where there is no record. `defaults_put` counts the records that updates began.
    `waited`: seconds before requests were sent, for the table's rate; no retry policy's time is used up by them.
    """

    count: int
    records: Sequence[Any] | None = None
    problems: Mapping[int, Problem] = field(default_factory=lambda: _NONE)
    defaults_put: int = 0
    waited: float = 0.0

    @staticmethod
    def all(count: int, problem: Problem) -> Outcomes:
        """The same problem for every entry."""
        return Outcomes(count, problems=dict.fromkeys(range(count), problem))

    def places(self, *states: State) -> list[int]:
        """The places of the entries in one of these states, in order."""
        return sorted(place for place, problem in self.problems.items() if problem.state in states)

    @property
    def done(self) -> int:
        """How many entries have taken effect, or were read."""
        return self.count - len(self.problems)

    def with_retried(self, places: Sequence[int], later: Outcomes) -> Outcomes:
        """These outcomes where the entries at `places` were sent again, with `later` as their outcomes."""
        again = set(places)
        problems = {place: problem for place, problem in self.problems.items() if place not in again}
        problems |= {places[place]: problem for place, problem in later.problems.items()}
        records = self.records
        if later.records is not None:
            records = [None] * self.count if records is None else list(records)
            for place, record in zip(places, later.records, strict=True):
                records[place] = record
        return Outcomes(
            self.count, records, problems, self.defaults_put + later.defaults_put, self.waited + later.waited
        )


def concatenate_outcomes(parts: Iterable[Outcomes]) -> Outcomes:
    """The outcomes of an operation that was sent in parts, one after the other."""
    kept = list(parts)
    if len(kept) == 1:
        return kept[0]
    problems: dict[int, Problem] = {}
    records: list[Any] | None = [] if any(part.records is not None for part in kept) else None
    count = 0
    for part in kept:
        problems |= {count + place: problem for place, problem in part.problems.items()}
        if records is not None:
            records.extend(part.records if part.records is not None else [None] * part.count)
        count += part.count
    defaults_put, waited = sum(part.defaults_put for part in kept), sum(part.waited for part in kept)
    return Outcomes(count, records, problems, defaults_put, waited)


T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what the coroutine returns; a loop that is running in this thread waits meanwhile."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, thread_name_prefix="adjunct-loop") as aside:
        return aside.submit(asyncio.run, coroutine).result()


# `PerLoop`: something of which each event loop has its own: what waits in it, connections, locks, workers.
#
# A table or function that threads share, each with a loop of its own (as every `BlockingTable` has), keeps one of them
# for each.


class PerLoop(Generic[T]):
    """Makes one for each event loop when it first asks; `drop` gives back what that of a loop holds that is closed."""

    def __init__(self, make: Callable[[], T], drop: Callable[[T], object] = lambda _: None) -> None:
        self._make, self._drop = make, drop
        self._of: dict[asyncio.AbstractEventLoop, T] = {}
        self._last: tuple[asyncio.AbstractEventLoop, T] | None = None
        self._lock = threading.Lock()

    def here(self) -> T:
        """That of the running event loop."""
        loop = asyncio.get_running_loop()
        last = self._last  # read once: another thread may change it
        if last is not None and last[0] is loop:
            return last[1]
        with self._lock:
            gone = [self._of.pop(other) for other in list(self._of) if other.is_closed()]
            mine = self._of.get(loop)
            if mine is None:
                mine = self._of[loop] = self._make()
            self._last = (loop, mine)
        for unused in gone:
            self._drop(unused)
        return mine

    def take(self) -> T | None:
        """That of the running event loop, which is the caller's from now on; None where there is none."""
        with self._lock:
            self._last = None
            return self._of.pop(asyncio.get_running_loop(), None)

"""`Operation`: one request to a table, which every layer receives and passes on, and its
`Outcomes`.

    RemoteTable -> cache -> batch and order -> update contract -> retry -> rate -> function
    Operation(kind, entries, args)  --send-->  Outcomes, one for each entry

Entries are columns (one sequence of keys, one of records and so on), so a layer that does not touch
them costs the same for one entry as for a thousand. `RowEntries` holds Python values;
`ArrowEntries` (`arrow.py`) holds an Arrow batch, and makes Python values of a column on first use.
An entry without a problem is done and takes no space in the outcomes.
"""

from __future__ import annotations

import asyncio
import re
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from itertools import chain
from types import MappingProxyType, NoneType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    SchemaMismatchError,
    TableAccessError,
    TableError,
)
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.validation import validated


class Clock(Protocol):
    """A monotonic clock, in seconds."""

    def now(self) -> float:
        """Seconds since some fixed moment; never decreases."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
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
    """What an update does to columns; a plain mapping is the same as `Changes(set=mapping)`.

    - `set`: sets columns to values; None sets null.
    - `add`: adds numbers to columns; a null or missing column counts as 0. None adds nothing. For a
      JSON column it is a mapping, whose members replace those of the same names and leave the
      others.
    - `append`: appends values to list columns; a null or missing column counts as empty. Each value
      is a list; None or an empty list appends nothing.
    - `remove`: sets columns to null, or removes them from records whose store has no fixed columns.

    Each column is named in only one of the four. `set`, `add` and `remove` can also name a value
    inside a column of structs, as in `address.city`; structs on the way that are null are created.
    """

    set: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    add: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    append: Mapping[str, Sequence[Any]] = field(default_factory=lambda: _NOTHING)
    remove: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.remove, str):
            problem = (
                f"Changes(remove={self.remove!r}): expected a sequence of column names, not one"
                " string."
            )
            raise ConfigurationError(problem, f"Write remove=[{self.remove!r}].", argument="remove")

    @property
    def repeatable(self) -> bool:
        """Whether applying it twice in a row has the same effect as once."""
        return not self.add and not self.append


def to_changes(update: Mapping[str, Any] | Changes) -> Changes:
    """The update as `Changes`."""
    if isinstance(update, Changes):
        return update
    return Changes(set=update)


E = TypeVar("E", bound=BaseException)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then what it was raised from or during, and the members of groups,
    outermost first.
    """
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        cause = waiting.pop(0)
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        if isinstance(cause, BaseExceptionGroup):
            waiting.extend(cause.exceptions)
        if cause.__cause__ is not None:
            waiting.append(cause.__cause__)
        elif cause.__context__ is not None and not cause.__suppress_context__:
            waiting.append(cause.__context__)


def first_cause(error: BaseException, kind: type[E]) -> E | None:
    """The first error of this kind that `causes` yields: the error itself or its outermost
    cause; or None.
    """
    return next((cause for cause in causes(error) if isinstance(cause, kind)), None)


def key_columns(table: str, key: str | Sequence[str]) -> tuple[str, ...]:
    """The names of a table's key columns, in order. Raises ConfigurationError if they are no names,
    or not distinct.
    """
    names: tuple[Any, ...]
    if isinstance(key, str):
        names = (key,)
    elif isinstance(key, list | tuple):
        names = tuple(key)
    else:
        names = ()  # rejected below
    are_text = all(isinstance(name, str) for name in names)
    if not names or not are_text or "" in names or len(set(names)) < len(names):
        problem = (
            f"table {table}: key={key!r} is not a column name, or a list of one or more different"
            " column names."
        )
        raise ConfigurationError(
            problem,
            "Pass the name of the key column, or a list of the names in order.",
            argument="key",
            table=table,
        )
    return names


def key_reorderer(
    store: str, own: Sequence[str], given: Sequence[str]
) -> Callable[[Any], Any] | None:
    """Return the function that reorders keys from `given` column order to `own`; None if the orders
    are equal.

    An empty `given` means the store's own order. ConfigurationError if the columns differ,
    SchemaMismatchError for a key that is not a tuple of the right length.
    """
    if not given or list(given) == list(own):
        return None
    if sorted(given) != sorted(own):
        problem = (
            f"{store} has the key {', '.join(own)}, but the request's key is {', '.join(given)}."
        )
        step = "Declare the same key columns for the table and for its function."
        raise ConfigurationError(problem, step, argument="key")
    places = [list(given).index(name) for name in own]

    def ordered(key: Any) -> tuple[Any, ...]:
        if not isinstance(key, tuple) or len(key) != len(places):
            raise key_length_error(store, key, given)
        return tuple([key[place] for place in places])

    return ordered


def key_length_error(store: str, key: Any, names: Sequence[str]) -> SchemaMismatchError:
    """The error for a key that is not a tuple with one value per key column."""
    problem = f"{store} got {key!r} as a key; expected a tuple of {', '.join(names)}."
    return SchemaMismatchError(problem, "Pass the key's values in that order.", table=store)


V = TypeVar("V")
U = TypeVar("U")


@validated
class UpdateContract(Enum):
    """What to do when an update's record is missing (SAMZA-2709); see `update_contract.py`."""

    UPDATE_ONLY = "update-only"
    UPDATE_WITH_DEFAULTS = "update-with-defaults"


@dataclass(frozen=True, slots=True)
class UpdateMessage(Generic[U, V]):
    """An update (`update`), and the whole record to apply it to (`default`) if the table has no
    record of the key.
    """

    update: U
    default: V | None = None

    def __post_init__(self) -> None:
        if self.update is None:
            problem = "UpdateMessage(update=None): expected what to change."
            raise TableError(problem, "Drop the message, or use delete() to remove a record.")


K_co = TypeVar("K_co", bound=Hashable, covariant=True)


@validated
class OperationKind(Enum):
    """What an operation does with each of its entries."""

    GET = "get"
    PUT = "put"  # make `value` the record; None deletes (functions receive a delete)
    PUT_IF_ABSENT = "put-if-absent"  # make `value` the record if there is none
    DELETE = "delete"
    # apply `value` to the record; if there is none, to its `default`; without one, it is MISSING
    UPDATE = "update"

    # By identity; Enum's own is a Python call for each dictionary lookup.
    __hash__ = object.__hash__

    @property
    def writes(self) -> bool:
        """Whether it changes records."""
        return self is not OperationKind.GET


_REPLAY = re.compile(r"~\d+$")


class Mark(NamedTuple):
    """The position of an entry's message in its source, which identifies replays and late records.

    `source` is a stream's partition ("lake.flights.3"), with "~5" appended for what the bounded
    replay of epoch 5 reads in addition. Later messages of a source have a greater `position`
    (`position_of`), which stores compare as text.
    """

    source: str
    position: str

    @property
    def tie(self) -> str:
        """The text that orders messages with equal times: source, offset and ordinal, but not
        epoch or replay.
        """
        return f"{_REPLAY.sub('', self.source)} {self.position.partition(':')[2]}"


# The mark of a direct call, which sorts after all messages of the same time.
DIRECT = Mark("~", "")


@validated
def position_of(epoch: int, offset: int, ordinal: int = 0) -> str:
    """Return the text of a position; such texts sort like (epoch, offset, ordinal).

    `ordinal` numbers the updates that one message makes to one key, from 0.
    """
    return f"{epoch:010d}:{offset:020d}:{ordinal:06d}"


class Entries(Protocol[K_co]):
    """The entries of an operation, in order. All sequences have the same length or are None."""

    @property
    def keys(self) -> Sequence[K_co]: ...

    @property
    def values(self) -> Sequence[Any] | None:
        """For puts the records, for updates what they change; None for gets and deletes."""
        ...

    @property
    def defaults(self) -> Sequence[Any] | None:
        """For updates, each message's default, or None if it has none; None if no message has
        one.
        """
        ...

    @property
    def marks(self) -> Sequence[Mark] | None:
        """The mark of each message, which conditions (`Conditions`) require; None for a direct
        call.
        """
        ...

    @property
    def newest(self) -> Sequence[Any] | None:
        """The time of each message, which `Conditions.newest_by` compares: a delete has no record
        that contains it. None if nothing was passed.
        """
        ...

    def __len__(self) -> int: ...

    def take(self, indices: Sequence[int]) -> Entries[K_co]:
        """The entries at `indices`, in that order."""
        ...

    def part(self, start: int, end: int) -> Entries[K_co]:
        """The entries from `start` to before `end`."""
        ...

    def without_defaults(self) -> Entries[K_co]:
        """The same entries without defaults."""
        ...

    def null_key(self) -> int | None:
        """The index of the first key that is or contains null; None if there is none."""
        ...

    def null_value(self) -> int | None:
        """The index of the first value that is None; None if there is none."""
        ...

    @property
    def nbytes(self) -> int:
        """The approximate size of the entries when sent, in bytes."""
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
        return self._map_columns(lambda column: [column[index] for index in indices])

    def part(self, start: int, end: int) -> RowEntries[K_co]:
        if start == 0 and end >= len(self.keys):
            return self
        return self._map_columns(lambda column: column[start:end])

    def _map_columns(self, pick: Callable[[Sequence[Any]], Sequence[Any]]) -> RowEntries[K_co]:
        """Return the entries with `pick` applied to each of their columns."""
        others = (self.values, self.defaults, self.marks, self.newest)
        return RowEntries(
            pick(self.keys), *(None if column is None else pick(column) for column in others)
        )

    def without_defaults(self) -> RowEntries[K_co]:
        if self.defaults is None:
            return self
        return replace(self, defaults=None)

    def null_key(self) -> int | None:
        # Few types are checked instead of all keys: only None and tuples can be or have a null.
        kinds = set(map(type, self.keys))
        if not any(issubclass(kind, tuple | NoneType) for kind in kinds):
            return None
        for place, key in enumerate(self.keys):
            if key is None or (isinstance(key, tuple) and None in key):
                return place
        return None

    def null_value(self) -> int | None:
        values = self.values or ()
        if NoneType not in set(map(type, values)):
            return None
        return list(map(type, values)).index(NoneType)

    @property
    def nbytes(self) -> int:
        columns = (self.keys, self.values or (), self.defaults or ())
        return sum(map(estimate_bytes, chain(*columns)))


def estimate_bytes(value: object) -> int:
    """Estimate the bytes of a value when sent: one per character of text, 8 for a number,
    containers by content.
    """
    if isinstance(value, str | bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, Mapping):
        return sum(estimate_bytes(name) + estimate_bytes(item) for name, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return sum(map(estimate_bytes, value))
    if is_dataclass(value):
        return sum(estimate_bytes(getattr(value, part.name)) for part in fields(value))
    if value is None:
        return 1
    return 8


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the store checks in the same request as the write; an entry that fails the check is
    skipped.

    `newest_by` names the column whose greatest value wins: an entry is applied if the store has no
    newer one. Equal times are ordered by `Mark.tie`, and an entry equal in both is applied again.
    `idempotent` stores, next to the record, the greatest position applied from each source, and
    skips entries up to it. With either, a delete leaves its mark behind (a tombstone), so that an
    older entry that arrives later does not restore the record.

    With both, a late update is not lost: what it adds or appends is applied, once, to an existing
    record (`Operation.applies_late_changes`). What it sets, removes, or adds to JSON is skipped,
    since a newer value is there.

    `keeps_marks` is no condition: it says that the table is idempotent, but that these entries have
    no marks, as in a direct call. A store that keeps marks in the record itself must leave those of
    earlier messages there.
    """

    newest_by: str | None = None
    idempotent: bool = False
    keeps_marks: bool = False

    def __bool__(self) -> bool:
        return self.idempotent or self.newest_by is not None


@dataclass(frozen=True, slots=True)
class Operation(Generic[K_co]):
    """One request: a kind, its entries, and the caller's arguments for the function.

    A key may occur several times; its entries take effect in order. `key` names the columns of
    tuple keys in their order, so that a store with another order can rearrange them; if empty, it
    is the store's order. `contract` says whether updates may create records from their defaults;
    below the contract layer, entries have only defaults that may be used. `rerun` says that the
    sender repeats its whole batch if an entry is given up. Until then, later entries of that key
    and source must not be applied (see `send_unblocked`): the store would take the repeated entry
    for an old one and skip it. `fence` is that of the run that writes, None for a plain call: a
    function that sends several requests calls `check_fence` before each. `fenced` says that the
    store refuses the write, in its own request, if it knows a later epoch of the application.
    `may_create` is false if the run has found the store's table or created it before
    (`TableFunction.begin_run`): one that is missing now was dropped, so reads fail as writes do.
    """

    kind: OperationKind
    entries: Entries[K_co]
    args: tuple[object, ...] = ()
    conditions: Conditions = field(default=Conditions())
    key: tuple[str, ...] = ()
    contract: UpdateContract = UpdateContract.UPDATE_WITH_DEFAULTS
    rerun: bool = False
    fence: Fence | None = field(default=None, compare=False, repr=False)
    fenced: bool = field(default=False, compare=False, repr=False)
    may_create: bool = field(default=True, compare=False, repr=False)
    # The number of entries, which every layer needs.
    count: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        count = len(self.entries) if hasattr(self.entries, "__len__") else 0
        object.__setattr__(self, "count", count)

    def __len__(self) -> int:
        return self.count

    @property
    def applies_late_changes(self) -> bool:
        """Whether an update that is late, and was not applied before, still adds numbers and
        appends to lists.

        If it does, its mark is stored; what it sets is skipped. A late update that only sets
        changes nothing, and no mark is stored.
        """
        return (
            self.kind is OperationKind.UPDATE
            and self.conditions.idempotent
            and self.conditions.newest_by is not None
        )

    async def check_fence(self) -> None:
        """Raise RunLeaseLostError if the run that writes may have lost its lease; do nothing for
        a plain call.
        """
        if self.fence is not None:
            await self.fence.check_in_thread()

    def with_entries(self, entries: Entries[K_co]) -> Operation[K_co]:
        """The same operation with other entries."""
        return replace(self, entries=entries)


def are_same_args(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether two calls have the same arguments; objects other than plain values are compared by
    identity.
    """
    if one is other:
        return True
    return len(one) == len(other) and all(map(_is_same_arg, one, other))


def _is_same_arg(one: object, other: object) -> bool:
    """Whether two arguments are the same object, or equal plain values of one type."""
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, str | bytes | int | float):
        return False
    return one == other


_NONE: Mapping[int, Problem] = MappingProxyType({})


@validated
class State(Enum):
    """Why an entry has a `Problem`: an entry that was applied or read has none."""

    # its condition failed: the store has a newer record, or has applied it already. No error
    SKIPPED = "skipped"
    MISSING = (  # an update whose key has no record, and which has no default that may be used
        "missing"
    )
    # rejected: it would fail again until somebody changes the entry, the table or its declaration
    REFUSED = "refused"
    FAILED = "failed"  # it certainly had no effect, and can be sent again
    UNKNOWN = "unknown"  # it was sent, but not answered: it may have had its effect


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an entry is not done. `retry_after`: seconds that the store asked to wait before a retry.

    `of_request`: the request failed as a whole, so the problem says nothing about this record.
    """

    state: State
    error: BaseException | None = None
    retry_after: float | None = None
    of_request: bool = False

    @property
    def may_pass(self) -> bool:
        """Whether the entry may succeed if it is sent again unchanged: it is FAILED or UNKNOWN."""
        return self.state in (State.FAILED, State.UNKNOWN)

    @property
    def refuses_request(self) -> bool:
        """Whether the request was rejected as a whole."""
        return self.of_request and self.state is State.REFUSED

    @property
    def unsent(self) -> Problem:
        """The problem of later entries of the key, which are not sent because this entry was
        given up: FAILED if this entry may be sent again, else REFUSED.
        """
        return replace(self, state=State.FAILED if self.may_pass else State.REFUSED)

    @property
    def is_answer(self) -> bool:
        """Whether this is a valid answer of the store (SKIPPED or MISSING), not a failure."""
        return self.state in (State.SKIPPED, State.MISSING)

    def describe(self) -> str:
        """The reason, for messages."""
        if isinstance(self.error, AdjunctError):
            return self.error.problem
        if self.error is None:
            return f"the outcome is {self.state.value}"
        return f"{type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, slots=True)
class Outcomes:
    """One outcome for each of `count` entries.

    `records` are those that a get found, None where there is none. `problems` maps the index of
    each entry that is not done to its problem. `defaults_put` counts the records that updates
    created from defaults. `waited` is the time in seconds spent waiting for the table's rate, which
    the retry policy does not count.
    """

    count: int
    records: Sequence[Any] | None = None
    problems: Mapping[int, Problem] = field(default_factory=lambda: _NONE)
    defaults_put: int = 0
    waited: float = 0.0

    @staticmethod
    @validated
    def all(count: int, problem: Problem) -> Outcomes:
        """Return outcomes with the same problem for every entry."""
        return Outcomes(count, problems=dict.fromkeys(range(count), problem))

    def places(self, *states: State) -> list[int]:
        """The indices of the entries whose problems have one of these states, in order."""
        return sorted(place for place, problem in self.problems.items() if problem.state in states)

    @property
    def done(self) -> int:
        """How many entries were applied or read."""
        return self.count - len(self.problems)

    def with_retried(self, places: Sequence[int], later: Outcomes) -> Outcomes:
        """Return these outcomes, with those of the entries at the indices `places` replaced by
        `later`.
        """
        problems = dict(self.problems)
        for place in places:
            problems.pop(place, None)
        problems |= {places[place]: problem for place, problem in later.problems.items()}
        records = self.records
        if later.records is not None:
            records = [None] * self.count if records is None else list(records)
            for place, record in zip(places, later.records, strict=True):
                records[place] = record
        return Outcomes(
            self.count,
            records,
            problems,
            self.defaults_put + later.defaults_put,
            self.waited + later.waited,
        )


def concatenate_outcomes(parts: Iterable[Outcomes]) -> Outcomes:
    """Return the outcomes of an operation that was sent in consecutive parts."""
    in_order = list(parts)
    whole = Outcomes(sum(part.count for part in in_order))
    start = 0
    for part in in_order:
        whole = whole.with_retried(range(start, start + part.count), part)
        start += part.count
    return whole


L = TypeVar("L", bound=Hashable)


class Wave(NamedTuple, Generic[L]):
    """Entries that can be sent together: the lane that all of them have, and their indices."""

    lane: L
    places: Sequence[int]


def group_preserving_key_order(lanes: Sequence[L], keys: Sequence[Hashable]) -> list[Wave[L]]:
    """Return the entries in waves, which are to be sent one after the other.

    `lanes` has a value for each entry: only entries with equal ones can be sent together. An entry
    is in the wave of its key's previous entry, after it, or in a later wave, so each key keeps its
    order. Puts and deletes of different keys make two waves, however they alternate; one key's put,
    delete and put make three.
    """
    if not lanes:
        return []
    first = lanes[0]
    if all(lane == first for lane in lanes):
        return [Wave(first, range(len(keys)))]
    lane_of_wave: list[L] = []
    places_of_wave: list[list[int]] = []
    waves_of_lane: dict[L, list[int]] = {}  # their numbers, in ascending order
    last_wave: dict[Hashable, int] = {}  # by key
    for place, (lane, key) in enumerate(zip(lanes, keys, strict=True)):
        before = last_wave.get(key, -1)
        if before >= 0 and lane_of_wave[before] == lane:
            places_of_wave[before].append(place)
            continue
        waves = waves_of_lane.setdefault(lane, [])
        next_wave = bisect_right(waves, before)  # the lane's first wave after that of the key
        if next_wave == len(waves):
            waves.append(len(lane_of_wave))
            lane_of_wave.append(lane)
            places_of_wave.append([])
        wave = waves[next_wave]
        places_of_wave[wave].append(place)
        last_wave[key] = wave
    return list(map(Wave, lane_of_wave, places_of_wave))


@validated
class Layer(Protocol):
    """Sends operations to the layer below, and returns each entry's outcome.

    Problems of single entries are in the outcomes. A raised error means that no entry was sent (an
    invalid declaration, a null key), or is the caller's cancellation.
    """

    async def send(self, operation: Operation[Any]) -> Outcomes: ...

    async def close(self) -> None:
        """Release connections after the requests under way; the next operation opens them again."""
        ...


async def send_without_problems(
    operation: Operation[Any],
    problems: Mapping[int, Problem],
    send: Callable[[Operation[Any]], Awaitable[Outcomes]],
) -> Outcomes:
    """Send only the entries whose index is not in `problems`; return the outcomes of all, with
    those problems.
    """
    if not problems:
        return await send(operation)
    places = []
    for place in range(len(operation)):
        if place not in problems:
            places.append(place)
    outcomes = Outcomes(len(operation), problems=problems)
    if not places:
        return outcomes
    return outcomes.with_retried(
        places, await send(operation.with_entries(operation.entries.take(places)))
    )


def may_have_effect(operation: Operation[Any], error: BaseException) -> bool:
    """Whether an operation that raised `error` may have had an effect that must not be repeated.

    Only updates have: puts and deletes can be repeated. An error that says that the declaration or
    the values are invalid was raised before any effect.
    """
    return operation.kind is OperationKind.UPDATE and not isinstance(
        error, ConfigurationError | SchemaMismatchError
    )


def may_send_separately(operation: Operation[Any], outcomes: Outcomes) -> bool:
    """Whether the request was rejected as a whole, so that each caller's entries can be sent in a
    request of their own.

    False for an error about the table itself, which each of them would get, and for updates, if
    some may have had an effect.
    """
    problem = outcomes.problems.get(0)  # a rejected request has the same for all entries
    if problem is None or problem.error is None or not problem.refuses_request:
        return False
    if operation.kind is OperationKind.UPDATE:
        if outcomes.done:
            return False
        if not all(each.refuses_request for each in outcomes.problems.values()):
            return False
    of_table = isinstance(problem.error, ConfigurationError | TableAccessError)
    return not of_table and not may_have_effect(operation, problem.error)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a function can do beyond single puts, deletes and gets; planning rejects anything else.

    `changes` are the parts of `Changes` that its updates take; `inside`: they also name values
    inside columns of structs (`address.city`). `largest` is the greatest number of
    entries in a request.
    """

    updates: bool = False
    changes: frozenset[str] = frozenset()
    inside: bool = False
    puts_if_absent: bool = False
    updates_with_defaults: bool = (
        False  # one request updates the record, or creates it from the default
    )
    newest_by: bool = False
    idempotent: bool = False
    fenced: bool = False  # refuses writes of a run after a later one has begun: `Operation.fenced`
    takes_args: bool = False
    largest: int | None = None


STORE_CAPABILITIES = Capabilities(
    updates=True,
    changes=frozenset({"set", "add", "append", "remove"}),
    inside=True,
    puts_if_absent=True,
    updates_with_defaults=True,
    newest_by=True,
    idempotent=True,
    fenced=True,
)

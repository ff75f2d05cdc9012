"""Read and write functions: how a `RemoteTable` reaches one kind of store.

A function is small and picklable while closed, and holds its connection between `open` and `close`.
Pickling never includes the connection, so a function can be declared on a driver and opened by each
executor. Updates behave as in SAMZA-2709 (partial updates in the Table API).

There are two ways to write one. For a service with one request per key, override `get`, or `put`,
`delete` and `update`, of `TableReadFunction` and `TableWriteFunction`; each `_all` form sends
several of them at a time. For a store that takes many entries at once and reports each one's
outcome, override `send` of `StoreFunction`, and declare in `capabilities` what it can do.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.tables.operation import (
    Capabilities,
    Conditions,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    RowEntries,
    State,
    causes,
    first_cause,
)
from dagster_adjunct.resources.tables.presence import Presence
from dagster_adjunct.resources.validation import validated


def outcomes_from_missing(
    operation: Operation[Any], error: BaseException, problem_of: Callable[[BaseException], Problem]
) -> Outcomes | None:
    """Return the outcomes of updates that raised `error`; None if it neither is nor contains a
    RecordNotFoundError, and for other operations than updates.

    Entries whose keys a RecordNotFoundError names are MISSING. The others are done; but if the
    error is a group with errors of other kinds, `problem_of` the first of those is their problem.
    If the named keys are invalid (none, not requested, not hashable), all entries are REFUSED. The
    keys of a single entry's error are not looked at.
    """
    not_found = []
    for cause in causes(error):
        if isinstance(cause, errors.RecordNotFoundError):
            not_found.append(cause)
    if operation.kind is not OperationKind.UPDATE or not not_found:
        return None
    count = len(operation)
    missing = Problem(State.MISSING, error)
    if count == 1:
        return Outcomes.all(1, missing)
    keys = operation.entries.keys
    wrong = _find_wrong_keys(not_found, keys)
    if wrong:
        invalid = errors.TableError(
            f"RecordNotFoundError was raised for {count} entries {wrong}.",
            "Pass the requested keys that have no record: RecordNotFoundError(…, keys=[…]).",
        )
        invalid.__cause__ = error
        return Outcomes.all(count, Problem(State.REFUSED, invalid, of_request=True))
    problems: dict[int, Problem] = {}
    other = _find_other_error(error)
    if other is not None:
        problems = dict.fromkeys(range(count), problem_of(other))
    lacking = set(chain.from_iterable(cause.keys for cause in not_found))
    problems |= {place: missing for place, key in enumerate(keys) if key in lacking}
    return Outcomes(count, problems=problems)


def _find_wrong_keys(
    not_found: Sequence[errors.RecordNotFoundError], requested: Collection[Any]
) -> str:
    """Return what is wrong with the keys that these errors name; "" if nothing is."""
    if any(isinstance(cause.keys, str | bytes) for cause in not_found):
        return f"with keys={not_found[0].keys!r:.60}, which is one string"
    try:
        lacking = set(chain.from_iterable(cause.keys for cause in not_found))
    except TypeError as unhashable:
        return f"with unhashable keys: {unhashable}"
    if not lacking:
        return "without the keys that have no record"
    unrequested = sorted(map(repr, lacking.difference(requested)))
    if not unrequested:
        return ""
    more = ""
    if len(unrequested) > 3:
        more = ", …"
    return f"with keys that were not requested: {', '.join(unrequested[:3])}{more}"


def _find_other_error(error: BaseException) -> BaseException | None:
    """Return the first member of a group that is about something else than missing records; None if
    there is none, or no group.
    """
    for cause in causes(error):
        if isinstance(cause, BaseExceptionGroup):
            for member in cause.exceptions:
                if first_cause(member, errors.RecordNotFoundError) is None:
                    return member
    return None


def record_not_found_error(
    keys: Sequence[object], table: str = "the table"
) -> errors.RecordNotFoundError:
    """The error for updates of missing records, naming the first few of `keys`."""
    shown = ", ".join(repr(key) for key in keys[:3]) + (", …" if len(keys) > 3 else "")
    many = len(keys) > 1
    problem = f"{table} has no record to update for {len(keys)} key{'s' if many else ''}: {shown}."
    step = (
        "Put the record first, or send an UpdateMessage with a default under UPDATE_WITH_DEFAULTS."
    )
    return errors.RecordNotFoundError(problem, step, keys=tuple(keys))


class _Methods(NamedTuple):
    """The methods of a function that execute an operation: for one entry, and for several, if
    there is one.
    """

    of_one: str
    of_all: str | None


_METHODS = {
    OperationKind.GET: _Methods("get", "get_all"),
    OperationKind.PUT: _Methods("put", "put_all"),
    OperationKind.PUT_IF_ABSENT: _Methods("put_if_absent", None),
    OperationKind.DELETE: _Methods("delete", "delete_all"),
    OperationKind.UPDATE: _Methods("update", "update_all"),
}

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
U = TypeVar("U")

_MAX_IN_FLIGHT = 32  # requests at a time, if entries are sent one by one


@dataclass(frozen=True, slots=True)
class TableUse:
    """What is going to be asked of a table: kinds of operations, under conditions.

    `columns` are those that updates name; empty if they are not known. `key` has the key columns
    that the table declares.
    """

    kinds: frozenset[OperationKind]
    conditions: Conditions = field(default=Conditions())
    columns: frozenset[str] = frozenset()
    key: tuple[str, ...] = ()

    @property
    def reads(self) -> bool:
        """Whether records are read."""
        return OperationKind.GET in self.kinds

    @property
    def writes(self) -> bool:
        """Whether records are written."""
        return any(kind.writes for kind in self.kinds)

    def __or__(self, other: TableUse) -> TableUse:
        conditions = self.conditions or other.conditions
        columns = self.columns | other.columns
        return TableUse(self.kinds | other.kinds, conditions, columns, self.key or other.key)


class TableFunction:
    """The base of read and write functions: it connects, sends operations, and says which errors
    can be retried.
    """

    compares_keys: ClassVar[bool] = False
    """Whether each request names the table's key columns, though it has only one: the function has
    none of its own to compare them with when the table is declared.
    """
    inspected_every: ClassVar[float] = 0.0
    """How many seconds a run lets pass at least between two calls of `inspect`; 0 asks before
    each batch.
    """
    counted_every: ClassVar[float] = 0.0
    """How many seconds a run lets pass at least between two counts (`begin_run`), at most one for
    each `inspect`.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What the function can do; known without a connection."""
        return Capabilities(takes_args=True)

    def column_types(self) -> dict[str, str] | None:
        """The declared columns and their types; None if only the store knows them."""
        return None

    def storage_notes(self) -> list[str]:
        """What readers of the store itself should know about how values are stored, one sentence
        each; for plans.
        """
        return []

    async def stored_types(self) -> dict[str, str] | None:
        """The columns and their types as the store has them, for which this may connect.

        None if the store does not define columns, so that each record may have others.
        """
        return self.column_types()

    async def check_settings(self, conditions: Conditions, *, fenced: bool = False) -> list[str]:
        """Return a sentence about each setting of the store that may lose records, such as an
        eviction policy.

        Raises ConfigurationError if a setting may lose what writes with these conditions, or fenced
        ones, rely on: they could be applied twice, out of order, or by a run that has lost its
        lease. Plans and `adjunct doctor` call it. By default nothing is asked.
        """
        return []

    async def inspect(self) -> Presence | None:
        """Return what the store says about the table, which it never creates; None if it keeps
        nothing of it.
        """
        return None

    async def begin_run(
        self, *, create: bool, marks: bool, fence: Fence | None = None
    ) -> Presence | None:
        """Count a run of an application, or another batch of it, in the table's book-keeping;
        return what the store says then.

        A missing table is created if `create` allows it and the function is declared so. `marks`
        says that the run writes with conditions. `fence` is that of a run whose writes are fenced:
        from now on, those of earlier runs are refused. Raises TableNotFoundError if the table is
        missing, and RunLeaseLostError if a later run has begun.
        """
        return None

    async def open(self) -> None:
        """Connect, or do nothing if connected.

        Called before every request, so that a function reconnects after losing its connection.
        """

    async def check(self, use: TableUse) -> None:
        """Raise if requests for this use would fail whatever is in them, as without a right or with
        a missing column.

        A run calls it once, before its first batch, and `close` after it. It may send one or two
        requests to the store, and must write and create nothing. By default nothing is asked.
        """

    async def find_misfits(self, operation: Operation[Any]) -> Mapping[int, Problem]:
        """Return the problems of entries that are certain to be rejected, by index, as far as they
        are known without a request.

        Compact batches send only the others. By default there are none.
        """
        return {}

    async def close(self) -> None:
        """Release what `open` acquired. A closed function can be opened again."""

    async def announce(self, fence: Fence) -> None:
        """Let the store refuse writes of earlier runs of `fence.application` from now on, where it
        can: those with a smaller epoch.

        A run that follows one that may not have ended calls it for each table that it writes,
        before its first output. By default does nothing. A table that does not exist is not
        created.
        """

    def is_retriable(self, error: BaseException) -> bool:
        """Whether the request that raised `error` may succeed if sent again unchanged.

        By default true for TransientError, and for OSError, which includes connection errors and
        timeouts, but not what is refused until somebody changes rights, paths or limits (EACCES,
        EROFS, EMFILE, …).
        """
        if isinstance(error, OSError):
            return error.errno not in errors.REFUSED_ERRNOS
        return isinstance(error, errors.TransientError)

    def problem_of(self, error: BaseException, *, sent: bool = True) -> Problem:
        """Return the problem of the entries whose request raised `error`.

        Its state is MISSING if a RecordNotFoundError is anywhere among the causes. For a retriable
        error it is UNKNOWN if the store may have received the request (`sent`), else FAILED. For
        any other error it is REFUSED; so it is for an OSError that caused a PermanentError.
        """
        if first_cause(error, errors.RecordNotFoundError) is not None:
            return Problem(State.MISSING, error)
        is_permanent = False
        for cause in causes(error):
            is_permanent = is_permanent or isinstance(cause, errors.PermanentError)
            may_pass = isinstance(cause, errors.TransientError) or self.is_retriable(cause)
            if may_pass and not (is_permanent and isinstance(cause, OSError)):
                state = State.UNKNOWN if sent else State.FAILED
                return Problem(state, error, _retry_after(error, cause))
        return Problem(State.REFUSED, error)

    async def send(self, operation: Operation[Any]) -> Outcomes:
        """Execute the operation in the order of each key's entries, and return each entry's
        outcome.

        By default it calls the operation's `_all` method (such as `put_all`) once, if a subclass
        overrides it, else the method for one entry (`put`) for each entry.
        """
        entries = operation.entries
        args = operation.args
        kind = operation.kind
        name = _METHODS[kind].of_all
        base: type = TableWriteFunction if kind.writes else TableReadFunction
        is_overridden = name is not None and getattr(type(self), name) is not getattr(base, name)
        if name is None or not is_overridden:
            return await self._send_entries(operation)
        method = getattr(self, name)
        try:
            if kind is OperationKind.GET:
                records = await method(list(dict.fromkeys(entries.keys)), *args)
                return Outcomes(len(operation), [records.get(key) for key in entries.keys])
            sent: Iterable[Any]
            if kind is OperationKind.DELETE:
                sent = entries.keys
            else:
                sent = zip(entries.keys, entries.values or (), strict=True)
            await method(list(sent), *args)
            return Outcomes(len(operation))
        except Exception as error:  # noqa: BLE001 - it becomes the outcome
            return outcomes_from_error(self, operation, error)

    async def _send_entries(self, operation: Operation[Any]) -> Outcomes:
        """Send the operation with one request per entry, even if its `_all` form is overridden.

        The default `_all` forms end here, and an overriding one may call its default with
        `super()`.
        """
        if operation.fence is None:  # a method such as `put_all` has made the operation
            operation = replace(operation, fence=RUN_FENCE.get())
        method = getattr(self, _METHODS[operation.kind].of_one)
        args = operation.args
        if operation.kind in (OperationKind.GET, OperationKind.DELETE):
            return await _send_one_by_one(self, operation, lambda key, _: method(key, *args))
        return await _send_one_by_one(self, operation, lambda key, value: method(key, value, *args))

    async def _request(self, operation: Operation[Any]) -> Outcomes:
        """Send an operation for a method of this function, such as `put_all`; return the outcomes,
        or raise.

        Raises the error of the first entry that failed; if records are only missing, one
        RecordNotFoundError for all.
        """
        outcomes = await self._send_entries(operation)
        for problem in outcomes.problems.values():
            if problem.error is not None and not problem.is_answer:
                raise problem.error
        missing = [operation.entries.keys[place] for place in outcomes.places(State.MISSING)]
        if missing:
            raise record_not_found_error(list(dict.fromkeys(missing)))
        return outcomes


@validated
class TableReadFunction(TableFunction, ABC, Generic[K, V]):
    """Reads records by key. `args` are passed through from the table's caller."""

    @abstractmethod
    async def get(self, key: K, *args: object) -> V | None:
        """The record of `key`, or None if there is none."""

    async def get_all(self, keys: Sequence[K], *args: object) -> dict[K, V]:
        """The records by key, for those `keys` that have one. Uses `get` unless overridden."""
        asked = list(keys)
        outcomes = await self._request(Operation(OperationKind.GET, RowEntries(asked), args))
        found = zip(asked, outcomes.records or (), strict=True)
        return {key: record for key, record in found if record is not None}


@validated
class TableWriteFunction(TableFunction, ABC, Generic[K, V, U]):
    """Writes records by key: whole ones (V) with put, parts of them (U) with update.

    The `_all` forms keep the order of each key's entries and promise nothing about the order
    between keys. By default they send single requests, and a failed one does not stop the others.

    An overridden `_all` form has one outcome for all its entries: an error that it raises is that
    of each entry. The exception is a RecordNotFoundError of `update_all`, which names the keys
    without a record: it says that all other entries were applied.
    """

    @property
    def capabilities(self) -> Capabilities:
        own = type(self)
        base = TableWriteFunction
        updates = (own.update, own.update_all) != (base.update, base.update_all)
        return Capabilities(
            takes_args=True,
            updates=updates,
            changes=frozenset({"set"}),
            puts_if_absent=own.put_if_absent is not base.put_if_absent,
        )

    @abstractmethod
    async def put(self, key: K, value: V, *args: object) -> None:
        """Make `value` the record of `key`, replacing any other."""

    @abstractmethod
    async def delete(self, key: K, *args: object) -> None:
        """Remove the record of `key`; no error if there is none."""

    async def update(self, key: K, update: U, *args: object) -> None:
        """Apply `update` to the record of `key`. RecordNotFoundError(keys=(key,)) if there is
        none.
        """
        problem = f"{type(self).__name__} does not support partial updates."
        step = "Put whole records, or override update() in the function."
        raise errors.TableError(problem, step, function=type(self).__name__)

    async def put_if_absent(self, key: K, value: V, *args: object) -> bool:
        """Make `value` the record of `key` if there is none, in one request; return whether it
        did.
        """
        problem = f"{type(self).__name__} does not support put_if_absent."
        raise errors.TableError(
            problem, "Override put_if_absent() in the function.", function=type(self).__name__
        )

    async def put_all(self, entries: Sequence[tuple[K, V]], *args: object) -> None:
        """`put` for each entry, in order for each key."""
        await self._request(Operation(OperationKind.PUT, _rows(entries), args))

    async def delete_all(self, keys: Sequence[K], *args: object) -> None:
        """`delete` for each key."""
        await self._request(Operation(OperationKind.DELETE, RowEntries(list(keys)), args))

    async def update_all(self, entries: Sequence[tuple[K, U]], *args: object) -> None:
        """`update` for each entry, in order for each key.

        Entries whose key has a record are applied. Then, if there are others, RecordNotFoundError
        names all their keys; the entries of those keys had no effect.
        """
        await self._request(Operation(OperationKind.UPDATE, _rows(entries), args))


def check_args(
    function: TableFunction, operation: Operation[Any], table: str | None = None
) -> None:
    """Raise ConfigurationError for extra arguments that the function would ignore."""
    if operation.args and not function.capabilities.takes_args:
        where = ""
        if table is not None:
            where = f"table {table}: "
        problem = (
            f"{where}{type(function).__name__} does not accept the extra arguments of a"
            f" {operation.kind.value}."
        )
        raise errors.ConfigurationError(
            problem, "Omit them, or use a function of your own that accepts them.", table=table
        )


def problem_from_error(
    function: TableFunction, error: BaseException, *, sent: bool = True
) -> Problem:
    """Return `function.problem_of(error)`; if that raises, a problem that rejects the entries.

    A layer must not raise after a request, because a raised error means that nothing was sent.
    """
    try:
        return function.problem_of(error, sent=sent)
    except Exception as wrong:  # noqa: BLE001 - it becomes the outcome
        table_error = errors.TableError(
            f"{type(function).__name__} raised {type(wrong).__name__} ({wrong}) when asked whether "
            f"{type(error).__name__} ({error}) can be retried.",
            "Fix its is_retriable(): it is called for every error and for its causes.",
            function=type(function).__name__,
        )
        table_error.__cause__ = error
        return Problem(State.REFUSED, table_error, of_request=True)


def _retry_after(error: BaseException, cause: BaseException) -> float | None:
    """The seconds to wait that the store asks for in `cause.retry_after`; None if it asks for none.

    If they are not a valid number of seconds, a note on `error` says so.
    """
    asked = getattr(cause, "retry_after", None)
    if asked is None:
        return None
    with suppress(TypeError, ValueError, OverflowError):
        pause = float(asked)
        if 0 <= pause < math.inf and not isinstance(asked, bool):
            return pause
    error.add_note(
        f"Its retry_after is {asked!r:.60}, which is not a number of seconds, so the retry policy"
        " decides the wait."
    )
    return None


@validated
class StoreFunction(TableReadFunction[K, V], TableWriteFunction[K, V, U]):
    """A read and write function whose `send` executes whole operations; `get`, `put` and the
    other methods use it.
    """

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @abstractmethod
    async def send(self, operation: Operation[Any]) -> Outcomes: ...

    async def get(self, key: K, *args: object) -> V | None:
        return (await self.get_all([key], *args)).get(key)

    async def put(self, key: K, value: V, *args: object) -> None:
        await self.put_all([(key, value)], *args)

    async def put_if_absent(self, key: K, value: V, *args: object) -> bool:
        put = Operation(OperationKind.PUT_IF_ABSENT, RowEntries([key], [value]), args)
        outcomes = await self._request(put)
        was_there = bool(outcomes.problems)  # SKIPPED; other problems are raised
        return not was_there

    async def delete(self, key: K, *args: object) -> None:
        await self.delete_all([key], *args)

    async def update(self, key: K, update: U, *args: object) -> None:
        await self.update_all([(key, update)], *args)

    async def _send_entries(self, operation: Operation[Any]) -> Outcomes:
        check_args(self, operation)
        await self.open()
        return await self.send(operation)


def outcomes_from_error(
    function: TableFunction,
    operation: Operation[Any],
    error: BaseException,
    *,
    of_request: bool = False,
) -> Outcomes:
    """Return the outcomes of an operation that raised `error`.

    If the error names missing records, other entries may have been applied
    (`outcomes_from_missing`). If not, all have the same problem, with `of_request` as given.
    """
    to_problem = partial(problem_from_error, function)
    missing = outcomes_from_missing(operation, error, to_problem)
    if missing is not None:
        return missing
    problem = replace(to_problem(error), of_request=of_request)
    return Outcomes.all(len(operation), problem)


def _rows(entries: Sequence[tuple[Any, Any]]) -> RowEntries[Any]:
    """Return pairs of key and value as entries."""
    return RowEntries([key for key, _ in entries], [value for _, value in entries])


def self_cancelled_error(error: asyncio.CancelledError) -> errors.TableUnavailableError:
    """Return an error for a function that raised CancelledError although nobody cancelled its task.

    Raises `error` itself if the task is being cancelled. If any other CancelledError left the
    function, the caller's task would end as if cancelled, which a task group does not report as an
    error: the lost request would go unnoticed.
    """
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise error
    failure = errors.TableUnavailableError(
        "the function raised CancelledError although nobody had cancelled the request.",
        "Find out what cancels its tasks or closes its client during requests.",
    )
    failure.__cause__ = error
    return failure


class TimedAttempt(NamedTuple):
    """The attempt that runs in the current task: its time limit, and the seconds that it allows.

    `timeout_problem` returns the problem of an entry, given its key, whose own request timed out.
    """

    limit: asyncio.Timeout
    seconds: float
    timeout_problem: Callable[[Any], Problem]


ATTEMPT: ContextVar[TimedAttempt | None] = ContextVar("ATTEMPT", default=None)


def limit_each_request() -> TimedAttempt | None:
    """Remove the time limit of the current attempt and return the attempt, so that each request
    gets the limit instead.

    None if attempts are not limited. Under one limit for all, many requests that are each fast
    enough could time out together, or all because one hangs.
    """
    attempt = ATTEMPT.get()
    if attempt is not None:
        with suppress(RuntimeError):  # the limit has ended: this task has outlived the attempt
            attempt.limit.reschedule(None)
    return attempt


RUN_FENCE: ContextVar[Fence | None] = ContextVar("RUN_FENCE", default=None)
"""The fence of the operation that a function executes, for requests that it makes by its own
methods.
"""


async def check_run_fence() -> None:
    """Raise RunLeaseLostError if a run writes here that may have lost its lease (`RUN_FENCE`)."""
    fence = RUN_FENCE.get()
    if fence is not None:
        await fence.check_in_thread()


async def _send_one_by_one(
    function: TableFunction,
    operation: Operation[Any],
    request: Callable[[Any, Any], Awaitable[Any]],
) -> Outcomes:
    """Send one request per entry: one after the other for each key, several keys at a time.

    Later entries of a key are not sent after one that failed. They get `Problem.unsent`, or are
    MISSING too if the first was. Raises RunLeaseLostError if a request found that the run has lost
    its lease.
    """
    keys = operation.entries.keys
    by_key: dict[Any, list[int]] = {}  # the indices of its entries
    for place, key in enumerate(keys):
        by_key.setdefault(key, []).append(place)
    sending = _SingleRequests(function, operation, request)
    await asyncio.gather(*map(sending.send_in_order, by_key.values()))
    problems = sending.problems
    if sending.lost is not None:
        raise sending.lost
    if operation.kind is OperationKind.GET:
        return Outcomes(len(keys), sending.answers, problems)
    if operation.kind is OperationKind.PUT_IF_ABSENT:
        for place, made in enumerate(sending.answers):
            if not made:
                problems.setdefault(place, Problem(State.SKIPPED))
    return Outcomes(len(keys), problems=problems)


class _SingleRequests:
    """The requests of an operation whose entries are sent one by one, and what came of them."""

    def __init__(
        self,
        function: TableFunction,
        operation: Operation[Any],
        request: Callable[[Any, Any], Awaitable[Any]],
    ) -> None:
        keys = operation.entries.keys
        self._function = function
        self._operation = operation
        self._request = request
        self._keys = keys
        self._values: Sequence[Any] = operation.entries.values or [None] * len(keys)
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)
        # A single request stays under the limit of its attempt.
        self._attempt = limit_each_request() if len(keys) > 1 else None
        self.answers: list[Any] = [None] * len(keys)
        self.problems: dict[int, Problem] = {}
        self.lost: errors.RunLeaseLostError | None = None

    async def send_in_order(self, places: Sequence[int]) -> None:
        """Send the entries at these places, all of one key, until one fails."""
        async with self._slots:
            for done, place in enumerate(places):
                problem = await self._send(place)
                if self.lost is not None:
                    return
                if problem is not None:
                    self.problems[place] = problem
                    # Not even after a missing record: if another writer creates it meanwhile, the
                    # later entries would be applied without this one.
                    if problem.state is State.MISSING:
                        later_problem = problem
                    else:
                        later_problem = problem.unsent
                    self.problems.update(dict.fromkeys(places[done + 1 :], later_problem))
                    return

    async def _send(self, place: int) -> Problem | None:
        """Send the entry at an index, and keep its answer; return its problem, None if it succeeded
        or the run's lease is `lost`.
        """
        key = self._keys[place]
        limit = asyncio.timeout(None if self._attempt is None else self._attempt.seconds)
        try:
            await self._operation.check_fence()
            async with limit:
                self.answers[place] = await self._request(key, self._values[place])
        except errors.RunLeaseLostError as error:
            self.lost = error
        except asyncio.CancelledError as error:
            return problem_from_error(self._function, self_cancelled_error(error))
        except Exception as error:  # noqa: BLE001 - it becomes the outcome
            if self._attempt is not None and limit.expired() and isinstance(error, TimeoutError):
                return self._attempt.timeout_problem(key)
            return problem_from_error(self._function, error)
        return None


class DeclaredFunction:
    """A function that is declared by the arguments of its `__init__`, which are attributes of the
    same names.

    It is pickled and described by them, without its connections. A subclass may take other
    arguments.
    """

    @classmethod
    def _declaring_class(cls) -> type[DeclaredFunction]:
        """The class whose `__init__` defines the declaration: the backend's, also for a user's
        subclass of it.
        """
        classes = (base for base in reversed(cls.__mro__) if issubclass(base, DeclaredFunction))
        return next(base for base in classes if "__init__" in vars(base))

    def to_dict(self) -> dict[str, Any]:
        """The declaration as plain values, without secrets."""
        values = {
            name: getattr(self, name) for name in signature(self._declaring_class()).parameters
        }
        for name, value in values.items():
            if isinstance(value, tuple):
                values[name] = list(value)
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        base = self._declaring_class()
        return reduce_function(self, base, base.to_dict(self))


F = TypeVar("F")


def reduce_function(function: F, base: type[F], settings: dict[str, Any]) -> tuple[Any, ...]:
    """Return what `__reduce__` must return for a function declared by `settings`, the arguments of
    `base.__init__`.

    Unpickling keeps its class, which may be a subclass of `base`, and the attributes that the
    subclass adds. It does not call the subclass's `__init__`, which may take other arguments.
    """
    declared = vars(rebuild_function(base, base, settings))
    added = {}
    for name, value in vars(function).items():
        if name not in declared:
            added[name] = value
    return rebuild_function, (type(function), base, settings), added or None


def rebuild_function(kind: type[F], base: type[F], settings: dict[str, Any]) -> F:
    """Return a function of the class `kind` as pickled by `reduce_function`, before its other
    attributes are set.
    """
    function = kind.__new__(kind)
    base.__init__(function, **settings)
    return function


def is_record_rejected(problem: Problem) -> bool:
    """Whether an entry was rejected for its content, as far as the error tells: then it can become
    a dead letter.

    Other errors may affect the next record too: an unreachable store, a rejected login, a bug in a
    function. They fail the batch, which can be run again once the cause is fixed.
    """
    if problem.state is State.MISSING:
        return True
    if problem.state is not State.REFUSED or problem.of_request:
        return False
    return _is_data_error(problem.error)


def is_retryable(problem: Problem) -> bool:
    """Whether the entry can be sent again, now or with its batch: it was not skipped or rejected
    for its content.
    """
    return problem.state is not State.SKIPPED and not is_record_rejected(problem)


def _is_data_error(error: BaseException | None) -> bool:
    """Whether an error, or each member of a group, may be about the content of a record."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_data_error, error.exceptions))
    if isinstance(error, errors.ConfigurationError | errors.TableAccessError):
        return False
    return isinstance(error, errors.PermanentError | ValueError | TypeError | ArithmeticError)

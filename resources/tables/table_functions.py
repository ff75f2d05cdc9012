"""Read and write functions: how a `RemoteTable` reaches one kind of store.

A function is small and picklable while it is closed, and holds its connection between `open` and `close`. Pickling
never carries the connection, so a function can be declared on a driver and opened by each executor. Behaviour of
updates: SAMZA-2709 (partial updates in the Table API).

There are two ways to write one. A service that takes one request a key: override `get`, or `put`, `delete` and
`update`, of `TableReadFunction` and `TableWriteFunction`; each `_all` form sends several of them at a time. A store
that takes many entries at once and tells what became of each: override `send` of `StoreFunction`, and say in
`capabilities` what it can do.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    PermanentError,
    RecordNotFoundError,
    TableError,
    TransientError,
)
from dagster_adjunct.resources.tables.error_chain import causes, first_cause
from dagster_adjunct.resources.tables.layer import Capabilities
from dagster_adjunct.resources.tables.operation import Operation, OperationKind, RowEntries
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem, State
from dagster_adjunct.resources.tables.own_cancellation import ended_itself
from dagster_adjunct.resources.tables.record_not_found import outcomes_of_missing, record_not_found
from dagster_adjunct.resources.tables.time_limits import limit_each_request

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
U = TypeVar("U")

_AT_ONCE = 32  # requests in flight at a time when a *_all form is built on the single form


class TableFunction(ABC):
    """What read and write functions share: a life-cycle, operations, and a word on which errors pass."""

    @property
    def capabilities(self) -> Capabilities:
        """What the function can do; known without a connection."""
        return Capabilities(takes_args=True)

    def column_types(self) -> dict[str, str] | None:
        """The table's columns and their types, where they are declared; None where only the store knows them."""
        return None

    async def stored_types(self) -> dict[str, str] | None:
        """The same as the store has them, which may take a connection; None where it has none that all records have."""
        return self.column_types()

    def exists(self) -> bool | None:
        """Whether the table is there, where that can be told without a server; looking makes nothing."""
        return None

    async def open(self) -> None:  # noqa: B027 - nothing to do is the rule
        """Connect, or do nothing when connected.

        It is called before every request, so a function that lost its connection gets it back here.
        """

    async def close(self) -> None:  # noqa: B027
        """Give back what `open` took. A closed function may be opened again."""

    def is_retriable(self, error: BaseException) -> bool:
        """Whether the request that raised `error` may succeed when it is sent again as it was.

        By default what says so (TransientError), and what says that nobody answers: OSError, which errors of
        connections and time-outs are.
        """
        return isinstance(error, (TransientError, OSError))

    def problem_of(self, error: BaseException, *, sent: bool = True) -> Problem:
        """What an error of a request says of its entries. `sent`: the store may have got it, and have acted on it.

        A missing record is told by RecordNotFoundError anywhere among the error's causes. An error that passes is known
        to have had no effect only where nothing was sent. Who makes a PermanentError of an OSError has decided that it
        does not pass.
        """
        if first_cause(error, RecordNotFoundError) is not None:
            return Problem(State.MISSING, error)
        decided = False
        for cause in causes(error):
            decided = decided or isinstance(cause, PermanentError)
            passes = isinstance(cause, TransientError) or self.is_retriable(cause)
            if passes and not (decided and isinstance(cause, OSError)):
                return Problem(State.UNKNOWN if sent else State.FAILED, error, _pause(error, cause))
        return Problem(State.REFUSED, error)

    @abstractmethod
    async def send(self, operation: Operation[Any]) -> Outcomes:
        """Do what the operation asks, in the order of each key's entries, and tell what became of each entry."""


class TableReadFunction(TableFunction, Generic[K, V]):
    """Reads records by key. `args` are handed through from the caller of the table."""

    @abstractmethod
    async def get(self, key: K, *args: object) -> V | None:
        """The record of `key`, or None where there is none."""

    async def get_all(self, keys: Sequence[K], *args: object) -> dict[K, V]:
        """The records of those `keys` that have one. Built on `get` unless the store can do better."""
        gets = Operation(OperationKind.GET, RowEntries(list(keys)), args)
        return _found(gets, await _one_by_one(self, gets, lambda key, _: self.get(key, *args)))

    async def send(self, operation: Operation[Any]) -> Outcomes:
        if operation.kind.writes:  # of a function of both kinds
            return await super().send(operation)  # type: ignore[safe-super]
        keys = operation.entries.keys
        if type(self).get_all is TableReadFunction.get_all:
            return await _one_by_one(self, operation, lambda key, _: self.get(key, *operation.args))
        try:
            records = await self.get_all(list(dict.fromkeys(keys)), *operation.args)
            return Outcomes(len(keys), [records.get(key) for key in keys])
        except Exception as error:  # noqa: BLE001 - it becomes the outcome
            return Outcomes.all(len(keys), problem_told(self, error))


class TableWriteFunction(TableFunction, Generic[K, V, U]):
    """Writes records by key: whole ones (V) with put, parts of them (U) with update.

    The `_all` forms keep the order of the entries of one key and promise nothing about the order between keys. As they
    stand here they send single requests, and one that fails does not keep the others from being sent.

    A function that overrides an `_all` form answers for all of its entries at once: it raises what holds for all, but
    RecordNotFoundError of `update_all` names the keys without a record, and all other entries are applied then.
    """

    @property
    def capabilities(self) -> Capabilities:
        own = type(self)
        return Capabilities(
            takes_args=True,
            updates=own.update is not TableWriteFunction.update or own.update_all is not TableWriteFunction.update_all,
            changes=frozenset({"set"}),
            puts_if_absent=own.put_if_absent is not TableWriteFunction.put_if_absent,
        )

    @abstractmethod
    async def put(self, key: K, value: V, *args: object) -> None:
        """Make `value` the record of `key`, whatever was there."""

    @abstractmethod
    async def delete(self, key: K, *args: object) -> None:
        """Remove the record of `key`; no error where there is none."""

    async def update(self, key: K, update: U, *args: object) -> None:
        """Apply `update` to the record of `key`. RecordNotFoundError(keys=(key,)) where there is none."""
        raise TableError(
            f"{type(self).__name__} has no partial updates, and one was asked for.",
            "Put whole records, or override update() in the function.",
            function=type(self).__name__,
        )

    async def put_if_absent(self, key: K, value: V, *args: object) -> bool:
        """Make `value` the record of `key` where there is none, in one request; return whether it was made."""
        raise TableError(
            f"{type(self).__name__} can't put a record only where there is none, and was asked to.",
            "Override put_if_absent() in the function.",
            function=type(self).__name__,
        )

    async def put_all(self, entries: Sequence[tuple[K, V]], *args: object) -> None:
        """`put` for each entry, in order for each key."""
        puts = Operation(OperationKind.PUT, _rows(entries), args)
        _well(puts, await _one_by_one(self, puts, lambda key, value: self.put(key, value, *args)))

    async def delete_all(self, keys: Sequence[K], *args: object) -> None:
        """`delete` for each key."""
        deletes = Operation(OperationKind.DELETE, RowEntries(list(keys)), args)
        _well(deletes, await _one_by_one(self, deletes, lambda key, _: self.delete(key, *args)))

    async def update_all(self, entries: Sequence[tuple[K, U]], *args: object) -> None:
        """`update` for each entry, in order for each key.

        Entries whose key has a record are applied. Then, if there are others, RecordNotFoundError
        names all their keys; the entries of those keys had no effect.
        """
        updates = Operation(OperationKind.UPDATE, _rows(entries), args)
        _well(updates, await _one_by_one(self, updates, lambda key, update: self.update(key, update, *args)))

    async def send(self, operation: Operation[Any]) -> Outcomes:
        if not operation.kind.writes:
            return await super().send(operation)  # type: ignore[safe-super]
        own, args, entries = type(self), operation.args, operation.entries
        kind, values = operation.kind, entries.values or ()
        if kind is OperationKind.PUT_IF_ABSENT:
            return await _one_by_one(self, operation, lambda key, value: self.put_if_absent(key, value, *args))
        if kind is OperationKind.PUT:
            if own.put_all is TableWriteFunction.put_all:
                return await _one_by_one(self, operation, lambda key, value: self.put(key, value, *args))
            return await self._at_once(
                operation, lambda: self.put_all(list(zip(entries.keys, values, strict=True)), *args)
            )
        if kind is OperationKind.DELETE:
            if own.delete_all is TableWriteFunction.delete_all:
                return await _one_by_one(self, operation, lambda key, _: self.delete(key, *args))
            return await self._at_once(operation, lambda: self.delete_all(list(entries.keys), *args))
        if own.update_all is TableWriteFunction.update_all:
            return await _one_by_one(self, operation, lambda key, update: self.update(key, update, *args))
        return await self._at_once(
            operation, lambda: self.update_all(list(zip(entries.keys, values, strict=True)), *args)
        )

    async def _at_once(self, operation: Operation[Any], request: Callable[[], Awaitable[None]]) -> Outcomes:
        try:
            await request()
        except Exception as error:  # noqa: BLE001 - it becomes the outcome
            told = partial(problem_told, self)
            return outcomes_of_missing(operation, error, told) or Outcomes.all(len(operation), told(error))
        return Outcomes(len(operation))


def check_args(function: TableFunction, operation: Operation[Any], table: str | None = None) -> None:
    """Raise ConfigurationError where an operation has extra arguments that the function would drop."""
    if operation.args and not function.capabilities.takes_args:
        where = "" if table is None else f"table {table}: "
        raise ConfigurationError(
            f"{where}a {operation.kind.value} came with {len(operation.args)} extra argument(s), and "
            f"{type(function).__name__} has no use for any.",
            "Leave them out, or give the table a function of your own that takes them.",
            table=table,
        )


def problem_told(function: TableFunction, error: BaseException, *, sent: bool = True) -> Problem:
    """What a function says of an error. Where it fails to say, after a request, the entries are refused: nobody who
    sees another error than the request's is to take it for "nothing was sent"."""
    try:
        return function.problem_of(error, sent=sent)
    except Exception as wrong:  # noqa: BLE001 - it becomes the outcome
        table_error = TableError(
            f"{type(function).__name__} raised {type(wrong).__name__} ({wrong}) when it was asked whether "
            f"{type(error).__name__} ({error}) may pass.",
            "Correct its is_retriable(): it is asked about every error, and about what caused it.",
            function=type(function).__name__,
        )
        table_error.__cause__ = error
        return Problem(State.REFUSED, table_error, of_request=True)


def _pause(error: BaseException, cause: BaseException) -> float | None:
    """The seconds that a store has asked to wait; a note where `retry_after` is none."""
    asked = getattr(cause, "retry_after", None)
    try:
        pause = None if asked is None or isinstance(asked, bool) else float(asked)
    except (TypeError, ValueError, OverflowError):
        pause = math.inf
    if asked is None or (pause is not None and 0 <= pause < math.inf):
        return pause
    error.add_note(f"Its retry_after is {asked!r:.60}, which is no number of seconds: the policy's own waits are kept.")
    return None


class StoreFunction(TableReadFunction[K, V], TableWriteFunction[K, V, U]):
    """A function of both kinds whose store takes operations as they are; the single requests go through `send`."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @abstractmethod
    async def send(self, operation: Operation[Any]) -> Outcomes: ...

    async def get(self, key: K, *args: object) -> V | None:
        return (await self.get_all([key], *args)).get(key)

    async def get_all(self, keys: Sequence[K], *args: object) -> dict[K, V]:
        gets = Operation(OperationKind.GET, RowEntries(list(keys)), args)
        return _found(gets, await self._sent(gets))

    async def put(self, key: K, value: V, *args: object) -> None:
        await self.put_all([(key, value)], *args)

    async def put_all(self, entries: Sequence[tuple[K, V]], *args: object) -> None:
        await self._sent(Operation(OperationKind.PUT, _rows(entries), args))

    async def put_if_absent(self, key: K, value: V, *args: object) -> bool:
        return not (await self._sent(Operation(OperationKind.PUT_IF_ABSENT, RowEntries([key], [value]), args))).problems

    async def delete(self, key: K, *args: object) -> None:
        await self.delete_all([key], *args)

    async def delete_all(self, keys: Sequence[K], *args: object) -> None:
        await self._sent(Operation(OperationKind.DELETE, RowEntries(list(keys)), args))

    async def update(self, key: K, update: U, *args: object) -> None:
        await self.update_all([(key, update)], *args)

    async def update_all(self, entries: Sequence[tuple[K, U]], *args: object) -> None:
        await self._sent(Operation(OperationKind.UPDATE, _rows(entries), args))

    async def _sent(self, operation: Operation[Any]) -> Outcomes:
        check_args(self, operation)
        await self.open()
        return _well(operation, await self.send(operation))


def _well(operation: Operation[Any], outcomes: Outcomes) -> Outcomes:
    """The outcomes; what was wrong is raised: missing records as one error, any other first, as it says more."""
    for problem in outcomes.problems.values():
        if problem.error is not None and not problem.is_answer:
            raise problem.error
    missing = outcomes.places(State.MISSING)
    if missing:
        raise record_not_found(list(dict.fromkeys(operation.entries.keys[place] for place in missing)))
    return outcomes


def _found(gets: Operation[Any], outcomes: Outcomes) -> dict[Any, Any]:
    records = _well(gets, outcomes).records or ()
    return {key: record for key, record in zip(gets.entries.keys, records, strict=True) if record is not None}


def _rows(entries: Sequence[tuple[Any, Any]]) -> RowEntries[Any]:
    return RowEntries([key for key, _ in entries], [value for _, value in entries])


async def _one_by_one(
    function: TableFunction, operation: Operation[Any], request: Callable[[Any, Any], Awaitable[Any]]
) -> Outcomes:
    """One request per entry: in sequence for one key, several keys at a time; after a problem, no more of its key.

    What follows a failed entry of its key is FAILED, nothing of it was sent; what follows a missing one is missing.
    """
    keys = operation.entries.keys
    values: Sequence[Any] = operation.entries.values or [None] * len(keys)
    by_key: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        by_key.setdefault(key, []).append(place)
    slots = asyncio.Semaphore(_AT_ONCE)
    answers: list[Any] = [None] * len(keys)
    problems: dict[int, Problem] = {}
    attempt = limit_each_request() if len(keys) > 1 else None

    async def in_sequence(places: list[int]) -> None:
        async with slots:
            for done, place in enumerate(places):
                limit = asyncio.timeout(None if attempt is None else attempt.seconds)
                try:
                    async with limit:
                        answers[place] = await request(keys[place], values[place])
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it becomes the outcome
                    if isinstance(error, asyncio.CancelledError):
                        error = ended_itself(error)
                    late = attempt is not None and limit.expired() and isinstance(error, TimeoutError)
                    problem = attempt.late(keys[place]) if late and attempt else problem_told(function, error)
                    problems[place] = problem
                    # Nothing more of the key is sent: what another writer begins now would get it without this entry.
                    left = problem
                    if problem.state is not State.MISSING:
                        left = replace(problem, state=State.FAILED if problem.may_pass else State.REFUSED)
                    problems.update(dict.fromkeys(places[done + 1 :], left))
                    return

    await asyncio.gather(*(in_sequence(places) for places in by_key.values()))
    if operation.kind is OperationKind.GET:
        return Outcomes(len(keys), answers, problems)
    if operation.kind is OperationKind.PUT_IF_ABSENT:
        problems |= {p: Problem(State.SKIPPED) for p, made in enumerate(answers) if not made and p not in problems}
    return Outcomes(len(keys), problems=problems)

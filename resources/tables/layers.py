"""What the layers of a `RemoteTable` share: their protocol, the capabilities of functions, the conditions that a table
has its store check with each write (`newest_by` and `idempotent`, see `Conditions`), and time limits for requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.common import argument_error
from dagster_adjunct.resources.tables.operation import (
    DIRECT,
    Changes,
    Conditions,
    Entries,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    RowEntries,
    State,
)
from dagster_adjunct.resources.validation import validated


@validated
class Layer(Protocol):
    """Takes operations and returns each entry's outcome.

    Problems of single entries are in the outcomes. A raised error concerns all of them, and nothing was sent (an
    invalid declaration, a null key), or it is the caller's cancellation.
    """

    async def send(self, operation: Operation[Any]) -> Outcomes: ...

    async def close(self) -> None:
        """Release connections after the requests under way; the next operation opens them again."""
        ...


async def send_without_problems(
    operation: Operation[Any], problems: Mapping[int, Problem], send: Callable[[Operation[Any]], Awaitable[Outcomes]]
) -> Outcomes:
    """Send the entries of an operation that have no problem in `problems`; return the outcomes of all."""
    if not problems:
        return await send(operation)
    places = [place for place in range(len(operation)) if place not in problems]
    outcomes = Outcomes(len(operation), problems=problems)
    if not places:
        return outcomes
    return outcomes.with_retried(places, await send(operation.with_entries(operation.entries.take(places))))


def may_have_effect(operation: Operation[Any], error: BaseException) -> bool:
    """Whether sending again may repeat an effect: for updates, unless their declaration was rejected."""
    return operation.kind is OperationKind.UPDATE and not isinstance(
        error, errors.ConfigurationError | errors.SchemaMismatchError
    )


def may_send_separately(operation: Operation[Any], outcomes: Outcomes) -> bool:
    """Whether the request was rejected as a whole, so that its parts can be sent alone.

    False for an error about the table itself, which every part would get, and for an update that was partly sent,
    because that part may have had its effect.
    """
    problem = outcomes.problems.get(0)
    if problem is None or problem.state is not State.REFUSED or not problem.of_request or problem.error is None:
        return False
    if operation.kind is OperationKind.UPDATE and (
        outcomes.done or not all(p.of_request and p.state is State.REFUSED for p in outcomes.problems.values())
    ):
        return False
    of_table = isinstance(problem.error, errors.ConfigurationError | errors.TableAccessError)
    return not of_table and not may_have_effect(operation, problem.error)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a function can do beyond single puts, deletes and gets; planning rejects anything else.

    `changes` are the parts of `Changes` that its updates take. `largest` is the greatest number of entries in a
    request.
    """

    updates: bool = False
    changes: frozenset[str] = frozenset()
    puts_if_absent: bool = False
    updates_with_defaults: bool = False  # update, or begin with the default, in one request
    newest_by: bool = False
    idempotent: bool = False
    takes_args: bool = False
    largest: int | None = None


STORE_CAPABILITIES = Capabilities(
    updates=True,
    changes=frozenset({"set", "add", "append", "remove"}),
    puts_if_absent=True,
    updates_with_defaults=True,
    newest_by=True,
    idempotent=True,
)


@dataclass(frozen=True, slots=True)
class DeclaredConditions:
    """The conditions that a table's store checks with every write (`Conditions`).

    `newest_by` applies to every write; the time comes with the entries or is read from records and updates.
    `idempotent` applies to messages, which carry marks; a direct call has none, and is applied each time. `on_replay`
    says whether records that a startpoint reads again are applied: "apply" or "skip".
    """

    table: str
    newest_by: str | None = None
    idempotent: bool = False
    on_replay: Literal["apply", "skip"] = "apply"

    def check(self, capabilities: Capabilities | None) -> None:
        """Raise ConfigurationError if the declaration is invalid or the write function can't check it."""
        for name, wanted in (("newest_by", self.newest_by is not None), ("idempotent", self.idempotent)):
            if wanted and (capabilities is None or not getattr(capabilities, name)):
                raise errors.ConfigurationError(
                    f"table {self.table} declares {name}, but "
                    + ("it has no write function." if capabilities is None else "its write function can't check it."),
                    f"Use a write function whose store supports it, or remove {name}.",
                    argument=name,
                    table=self.table,
                )
        what, table = f"table {self.table}", self.table
        if self.newest_by == "":
            found = f"{what}: newest_by={self.newest_by!r}"
            raise argument_error(
                found, "the name of the column with each record's time", argument="newest_by", table=table
            )
        if self.on_replay == "skip" and not self.idempotent:
            found = f"{what}: on_replay={self.on_replay!r} with idempotent={self.idempotent}"
            expected = '"apply", or "skip" together with idempotent=True'
            raise argument_error(found, expected, argument="on_replay", table=table)

    def on(self, operation: Operation[Any]) -> Operation[Any]:
        """Return the operation with these conditions and each entry's time and mark; raise before anything is sent."""
        if (self.newest_by is None and not self.idempotent) or not operation.kind.writes or operation.conditions:
            return operation
        entries = operation.entries
        idempotent = self.idempotent and entries.marks is not None
        if self.newest_by is None:
            return replace(operation, conditions=_ONCE if idempotent else _MARKED)
        if not idempotent and operation.kind is OperationKind.UPDATE:
            self._check_repeatable(entries)
        if entries.newest is None or entries.marks is None:
            times = entries.newest if entries.newest is not None else self._read_times(operation)
            marks = entries.marks if entries.marks is not None else [DIRECT] * len(entries)
            entries = RowEntries(entries.keys, entries.values, entries.defaults, marks, times)
        return replace(operation, entries=entries, conditions=Conditions(self.newest_by, idempotent, self.idempotent))

    def deleted(self, keys: Sequence[Any], newest: Any) -> RowEntries[Any]:
        """The entries of a delete, with the time `newest` if it is given."""
        if newest is None:
            return RowEntries(keys)
        if self.newest_by is None:
            problem = f"table {self.table} got a delete with newest={newest!r}, but is declared without newest_by."
            step = "Omit newest, or declare the table with newest_by."
            raise errors.ConfigurationError(problem, step, argument="newest", table=self.table)
        return RowEntries(keys, newest=[newest] * len(keys))

    def _read_times(self, operation: Operation[Any]) -> list[Any]:
        assert self.newest_by is not None
        values: Sequence[Any] = operation.entries.values or [None] * len(operation)
        times = [_read_time(value, self.newest_by) for value in values]
        for place, time in enumerate(times):
            if time is None:
                key, column = operation.entries.keys[place], self.newest_by
                gone = operation.kind is OperationKind.DELETE or values[place] is None
                thing = "update" if operation.kind is OperationKind.UPDATE else "record"
                raise errors.TableError(
                    f"table {self.table}: {operation.kind.value} of key {key!r} has no {column}, which newest_by "
                    "needs.",
                    f"Pass the {column} of the delete: delete({key!r}, newest=…)."
                    if gone
                    else f"Set {column} in the {thing}.",
                    table=self.table,
                )
        return times

    def _check_repeatable(self, entries: Entries[Any]) -> None:
        if not isinstance(entries, RowEntries):
            return  # from a stream: its expressions are checked when the application is planned
        for place, value in enumerate(entries.values or ()):
            if isinstance(value, Changes) and not value.repeatable:
                raise errors.TableError(
                    f"table {self.table}: the update of {entries.keys[place]!r} adds or appends: with "
                    "newest_by alone, a repeated update would do so twice.",
                    "Only set values; or declare the table with idempotent=True, and send entries with marks.",
                    table=self.table,
                )


_ONCE, _MARKED = Conditions(None, True), Conditions(keeps_marks=True)


def check_conditions(table: str, function: str, capabilities: Capabilities, operation: Operation[Any]) -> None:
    """Raise for conditions that the function can't check, or whose marks or times are missing."""
    conditions, entries = operation.conditions, operation.entries
    what = f"table {table}: a {operation.kind.value}"
    for name, wanted in (("newest_by", conditions.newest_by is not None), ("idempotent", conditions.idempotent)):
        if wanted and not getattr(capabilities, name):
            problem = f"{what} has the condition {name}, which {function} can't check."
            step = f"Remove the condition, or use a table whose store supports {name}."
            raise errors.ConfigurationError(problem, step, argument=name, table=table)
    if isinstance(entries, RowEntries):  # a stream's entries always have both
        needed = ["marks"] if conditions.newest_by is None else ["marks", "newest"]
        for name in needed:
            if getattr(entries, name) is None:
                problem = f"{what} has conditions, but its entries have no {name}."
                step = f"Pass RowEntries(…, {name}=…), or declare the conditions on the table."
                raise errors.TableError(problem, step, table=table)


def _read_time(value: Any, column: str) -> Any:
    if isinstance(value, Changes):
        return value.set.get(column)
    return value.get(column) if isinstance(value, Mapping) else getattr(value, column, None)


def self_cancelled_error(error: asyncio.CancelledError) -> errors.TableUnavailableError:
    """Return the error of a request that cancelled itself; raise `error` if its task is being cancelled.

    Passing the cancellation on would end the caller's task as if it had been cancelled. A task group takes that for an
    end without an error, so the missing answer would go unnoticed.
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
    """The attempt under way in a task. `late`: returns the problem of a key whose request timed out."""

    limit: asyncio.Timeout
    seconds: float
    late: Callable[[Any], Problem]


ATTEMPT: ContextVar[TimedAttempt | None] = ContextVar("ATTEMPT", default=None)


def limit_each_request() -> TimedAttempt | None:
    """Lift the attempt's time limit and return the attempt, to limit each of its requests instead; None if unlimited.

    Under one limit for all, many healthy requests could time out together, or because one of them hangs.
    """
    attempt = ATTEMPT.get()
    if attempt is not None:
        with suppress(RuntimeError):  # it is over, in a task that outlives the attempt
            attempt.limit.reschedule(None)
    return attempt

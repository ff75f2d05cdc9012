"""What the layers of a `RemoteTable` share: their protocol, the capabilities of functions, and time limits for
requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.tables.operation import Operation, OperationKind, Outcomes, Problem, State
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

    Errors about the table itself concern every part. An update of which a part was sent may have had that effect.
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
    """Lift the attempt's time limit and return the attempt, so that each of several requests can be limited; None if
    unlimited.

    One limit for all would end an attempt of many healthy requests, and a hanging one would spoil the others.
    """
    attempt = ATTEMPT.get()
    if attempt is not None:
        with suppress(RuntimeError):  # it is over, in a task that outlives the attempt
            attempt.limit.reschedule(None)
    return attempt

"""`TimeLimits`: cancels what takes longer than a time that all have, for a third of what `asyncio.timeout` costs.

What was entered first is due first, so one timer, for the first, is enough, however much is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dagster_adjunct.resources.errors import TableUnavailableError
from dagster_adjunct.resources.tables.operation import Operation, Outcomes, Problem


class Layer(Protocol):
    """Takes operations and tells what became of each entry.

    What goes wrong with single entries is in the outcomes. What is raised is about all of them and no request was sent
    (a wrong declaration, a null key), or is the caller's cancellation.
    """

    async def send(self, operation: Operation[Any]) -> Outcomes: ...

    async def close(self) -> None:
        """Give back what is open, after what is under way; the next operation opens it again."""
        ...


async def send_without_problems(
    operation: Operation[Any], problems: Mapping[int, Problem], send: Callable[[Operation[Any]], Awaitable[Outcomes]]
) -> Outcomes:
    """The outcomes of an operation of which the entries with `problems` are not sent."""
    if not problems:
        return await send(operation)
    places = [place for place in range(len(operation)) if place not in problems]
    outcomes = Outcomes(len(operation), problems=problems)
    if not places:
        return outcomes
    return outcomes.with_retried(places, await send(operation.with_entries(operation.entries.take(places))))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a function can do beyond puts, deletes and gets one by one; planning refuses what is not here.

    `changes` are the parts of `Changes` that its updates take. `largest` is how many entries a request may have.
    """

    updates: bool = False
    changes: frozenset[str] = frozenset()
    puts_if_absent: bool = False
    updates_with_defaults: bool = False  # update, or begin with the default, in one request
    newest_by: bool = False
    idempotent: bool = False
    takes_args: bool = False
    largest: int | None = None


# What a store can do that checks conditions itself and takes all changes.
STORE_CAPABILITIES = Capabilities(
    updates=True,
    changes=frozenset({"set", "add", "append", "remove"}),
    puts_if_absent=True,
    updates_with_defaults=True,
    newest_by=True,
    idempotent=True,
)


def self_cancelled_error(error: asyncio.CancelledError) -> TableUnavailableError:
    """The error of a request that was cancelled from within; raises `error` where its task is being cancelled.

    To hand it on as a cancellation would end the caller's task as if somebody had cancelled it, and a task group takes
    that for an end without an error: nobody would hear that the request was not answered.
    """
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise error
    told = TableUnavailableError(
        "the function ended its request with a CancelledError, and nobody had cancelled it.",
        "See what cancels its tasks, or closes its client, while requests are under way.",
    )
    told.__cause__ = error
    return told


class _Deadline:
    __slots__ = ("cancelled", "cancelling", "due", "task")

    def __init__(self, task: asyncio.Task[Any], due: float) -> None:
        self.task, self.due, self.cancelling, self.cancelled = task, due, task.cancelling(), False


class TimeLimits:
    """The requests of one event loop that are under way, each with `seconds` from when it was entered."""

    __slots__ = ("_looking", "_places", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._places: dict[_Deadline, None] = {}
        self._looking = False

    def enter(self) -> _Deadline:
        """Begin the time of what the current task does until it leaves."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        place = _Deadline(task, loop.time() + self._seconds)
        self._places[place] = None
        if not self._looking:
            self._looking = True
            loop.call_at(place.due, self._look)
        return place

    def lift(self, place: _Deadline) -> None:
        """Let it take its time."""
        self._places.pop(place, None)

    def leave(self, place: _Deadline) -> bool:
        """End it; return whether it was cancelled for its time, and for nothing else."""
        self._places.pop(place, None)
        # As asyncio.timeout does: a task that somebody else cancels, too, is to stay cancelled.
        return place.cancelled and place.task.uncancel() <= place.cancelling

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._places:
            place = next(iter(self._places))
            if place.due > now:
                loop.call_at(place.due, self._look)
                return
            del self._places[place]
            place.cancelled = True
            place.task.cancel()
        self._looking = False


class TimedAttempt(NamedTuple):
    """The attempt that is under way in a task. `late`: the problem of a key whose request had no answer in time."""

    limits: TimeLimits
    place: _Deadline
    seconds: float
    late: Callable[[Any], Problem]


ATTEMPT: ContextVar[TimedAttempt | None] = ContextVar("ATTEMPT", default=None)


def limit_each_request() -> TimedAttempt | None:
    """Lift the attempt's time limit, for who sends several requests for one operation and will limit each; or None.

    A limit for all of them would end an attempt of many requests that are well, and one that hangs would spoil them.
    """
    attempt = ATTEMPT.get()
    if attempt is not None:
        attempt.limits.lift(attempt.place)
    return attempt

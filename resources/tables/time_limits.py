"""`TimeLimits`: cancels what takes longer than a time that all have, for a third of what `asyncio.timeout` costs.

What was entered first is due first, so one timer, for the first, is enough, however much is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from dagster_adjunct.resources.tables.outcomes import Problem


class _Place:
    __slots__ = ("cancelled", "cancelling", "due", "task")

    def __init__(self, task: asyncio.Task[Any], due: float) -> None:
        self.task, self.due, self.cancelling, self.cancelled = task, due, task.cancelling(), False


class TimeLimits:
    """The requests of one event loop that are under way, each with `seconds` from when it was entered."""

    __slots__ = ("_looking", "_places", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._places: dict[_Place, None] = {}
        self._looking = False

    def enter(self) -> _Place:
        """Begin the time of what the current task does until it leaves."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        place = _Place(task, loop.time() + self._seconds)
        self._places[place] = None
        if not self._looking:
            self._looking = True
            loop.call_at(place.due, self._look)
        return place

    def lift(self, place: _Place) -> None:
        """Let it take its time."""
        self._places.pop(place, None)

    def leave(self, place: _Place) -> bool:
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
    place: _Place
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

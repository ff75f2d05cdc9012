"""When a request to a table is sent again, and after how long: decisions, which `RetryLayer` carries out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from time import perf_counter
from typing import Any, Literal

from dagster_adjunct.resources.common import check_seconds
from dagster_adjunct.resources.errors import ConfigurationError, TableError, TableUnavailableError
from dagster_adjunct.resources.tables.layers import ATTEMPT, Layer, TimedAttempt, TimeLimits
from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Clock,
    Operation,
    OperationKind,
    Outcomes,
    PerLoop,
    Problem,
    State,
    SystemClock,
)


@dataclass(frozen=True, slots=True)
class AttemptLayer:
    """Stands below the rate, so that waiting for credits is no part of an attempt, and above the function.

    After `timeout` seconds (None: never) the request is cancelled and the outcome of its entries is UNKNOWN: the store
    may have got it, and may even act on it later. Where a function sends a request for each entry, each has that time.
    """

    table: str
    inner: Layer
    timeout: float | None = None
    meter: Meter = field(default_factory=Meter)
    _limits: PerLoop[TimeLimits] = field(init=False)

    def __post_init__(self) -> None:
        timeout = self.timeout or 0.0
        object.__setattr__(self, "_limits", PerLoop(lambda: TimeLimits(timeout)))

    async def send(self, operation: Operation[Any]) -> Outcomes:
        began = perf_counter()
        if self.timeout is None:
            outcomes = await self.inner.send(operation)
        else:
            limits = self._limits.here()
            place = limits.enter()
            within = ATTEMPT.set(TimedAttempt(limits, place, self.timeout, partial(self._late, operation, 1)))
            try:
                outcomes = await self.inner.send(operation)
            except asyncio.CancelledError:
                if not limits.leave(place):
                    raise
                late = self._late(operation, len(operation), operation.entries.keys[0])
                outcomes = Outcomes.all(len(operation), late)
            except BaseException:
                limits.leave(place)
                raise
            else:
                limits.leave(place)
            finally:
                ATTEMPT.reset(within)
        self.meter.attempt(operation.kind is not OperationKind.GET, operation.count, perf_counter() - began)
        return outcomes

    async def close(self) -> None:
        await self.inner.close()

    def _late(self, operation: Operation[Any], count: int, key: Any) -> Problem:
        self.meter.add("timeouts")
        entries = "of key" if count == 1 else f"of {count} entries, the first with key"
        late = TableUnavailableError(
            f"table {self.table}: a {operation.kind.value} {entries} {key!r} had no answer after {self.timeout:g} s "
            "and was given up.",
            "See what the store is busy with, or allow more: RetryPolicy(timeout=…).",
            table=self.table,
        )
        late.__cause__ = TimeoutError()
        return Problem(State.UNKNOWN, late)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds to wait before a request is sent again; made by `none`, `fixed`, `random` and `exponential`.

    The wait after the n-th failure is `first * growth ** (n - 1)` and up to `jitter` more at random, at most `most`.
    """

    first: float
    growth: float = 1.0
    most: float = float("inf")
    jitter: float = 0.0

    def __post_init__(self) -> None:
        times = _is_duration(self.first) and _is_duration(self.jitter) and self.most >= self.first
        if not (times and 1 <= self.growth <= 1000):
            raise ConfigurationError(
                f"{self} can't work: expected times of 0 s or more, the first at most as long as the longest, and a "
                "growth from 1 to 1000.",
                "Correct the backoff.",
                argument="backoff",
            )

    @staticmethod
    def none() -> Backoff:
        """Send again at once."""
        return Backoff(0.0)

    @staticmethod
    def fixed(seconds: float) -> Backoff:
        """Wait the same time before each."""
        return Backoff(seconds)

    @staticmethod
    def random(least: float, most: float) -> Backoff:
        """Wait between `least` and `most` seconds, at random."""
        return Backoff(least, most=most, jitter=most - least)

    @staticmethod
    def exponential(first: float, most: float) -> Backoff:
        """Wait `first` seconds, then twice as long each time, and up to `first` more at random; at most `most`."""
        return Backoff(first, 2.0, most, first)

    def seconds(self, failures: int) -> float:
        """How long to wait after so many failures in a row, 1 or more."""
        wait = min(self.most, self.first * self.growth ** min(failures - 1, 60))
        if not self.jitter:
            return wait
        least = min(wait, max(self.first, self.most - self.jitter))  # so that the longest waits differ, too
        return least + random.random() * min(self.jitter, self.most - least)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Waits that double from `first_wait` to `max_wait`, with up to `first_wait` more at random, or `backoff`.

    Gives up after `attempts` requests, or before a wait that would end later than `max_total` after the first request;
    waiting for the table's rate does not count. All times in seconds. `RetryPolicy(attempts=1)` never sends again.

    - `timeout`: a request without an answer after so long is given up, and its entries' outcome is unknown.
    - `retry_if`: decides alone which problems may pass; by default those that the function says pass. It is not asked
      about missing records and unfulfilled conditions, which are answers. A picklable function.
    - `unknown="fail"`: an update that is lost on its way and would act twice if it were sent twice (it adds or appends,
      and the table is not `idempotent`) is given up; by default it is sent again: at least once.
    - A pause that the store asks for (Retry-After, throttling) is kept, where it is longer than the wait, and than
      `max_wait`.
    """

    attempts: int = 8
    first_wait: float = 0.1
    max_wait: float = 5.0
    max_total: float = 60.0
    backoff: Backoff | None = field(default=None, kw_only=True)
    timeout: float | None = field(default=20.0, kw_only=True)
    retry_if: Callable[[Problem], bool] | None = field(default=None, kw_only=True)
    unknown: Literal["retry", "fail"] = field(default="retry", kw_only=True)

    def __post_init__(self) -> None:
        whole = isinstance(self.attempts, int) and not isinstance(self.attempts, bool)
        wrong = [] if whole and self.attempts >= 1 else ["attempts"]
        wrong += [name for name in ("first_wait", "max_wait", "max_total") if not getattr(self, name) >= 0]
        wrong += [] if isfinite(self.first_wait) else ["first_wait"]
        if wrong:
            raise ConfigurationError(
                f"{self} can't work: expected at least one attempt, a whole number, and no negative or endless wait.",
                "Correct the policy.",
                argument=wrong[0],
            )
        if self.backoff is None and self.first_wait > self.max_wait:
            raise ConfigurationError(
                f"first_wait={self.first_wait:g} of a retry policy is above max_wait={self.max_wait:g}.",
                "Give it a max_wait that is at least as long, or a shorter first_wait.",
                argument="first_wait",
            )
        least = self.first_wait if self.backoff is None else self.backoff.first
        if self.attempts > 1 and (self.max_total < least or self.max_total == 0):
            raise ConfigurationError(
                f"max_total={self.max_total:g} of a retry policy leaves no time for a second attempt, which comes "
                f"{least:g} s after the first at the earliest.",
                "Allow more, wait less, or say that there is none: attempts=1.",
                argument="max_total",
            )
        what = f"timeout={self.timeout!r} of a retry policy"
        check_seconds(self.timeout, what, argument="timeout", none=True, next_step="Correct the policy.")
        if self.unknown not in ("retry", "fail"):
            raise ConfigurationError(
                f'unknown={self.unknown!r} of a retry policy: expected "retry" or "fail".',
                "Correct the policy.",
                argument="unknown",
            )

    def passes(self, problem: Problem) -> bool:
        """Whether an entry with this problem may be sent again. TableError where `retry_if` raises."""
        if problem.is_answer:
            return False
        if self.retry_if is None:
            return problem.may_pass
        try:
            return bool(self.retry_if(problem))
        except Exception as wrong:
            raise TableError(
                f"retry_if of a retry policy raised {type(wrong).__name__} ({wrong}) about {problem.error!r:.160}.",
                "Correct it: it gets a problem, and returns whether its entry may be sent again.",
                function="retry_if",
            ) from wrong

    def wait(self, attempts: int, spent: float, asked: float = 0.0) -> float | None:
        """Seconds to the next attempt after so many in `spent` seconds, the store having asked for a pause; or None."""
        if attempts >= self.attempts:
            return None
        backoff = self.backoff or Backoff.exponential(self.first_wait, self.max_wait)
        seconds = max(backoff.seconds(attempts), asked)
        return None if spent + seconds > self.max_total else seconds


def _is_duration(seconds: float) -> bool:
    return isfinite(seconds) and seconds >= 0


@dataclass(frozen=True, slots=True)
class RetryLayer:
    """Sends the entries that failed, or of which nothing is known, again as the policy says.

    An operation is over when each of its entries has an outcome that stays; whoever keeps the order of a key waits for
    that. Inside an operation it is the function that sends nothing of a key after an entry that failed.
    """

    inner: Layer
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    meter: Meter = field(default_factory=Meter)
    clock: Clock = field(default_factory=SystemClock)

    async def send(self, operation: Operation[Any]) -> Outcomes:
        began = self.clock.now()
        try:
            outcomes = await self.inner.send(operation)
        except BaseException:
            self.meter.request(ended=False)
            raise
        if outcomes.problems:
            self.meter.request(ended=False)
            return await self._until_over(operation, outcomes, began)
        self.meter.request(ended=True)
        return outcomes

    async def close(self) -> None:
        await self.inner.close()

    async def _until_over(self, operation: Operation[Any], outcomes: Outcomes, began: float) -> Outcomes:
        attempts = 1
        while True:
            # Entries may be done by now: what is raised is told of the others, so that nobody sends all of them again.
            left = [place for place, problem in outcomes.problems.items() if not problem.is_answer]
            try:
                left = self._left(operation, outcomes)
                again = await self._waited(operation, outcomes, left, attempts, began) if left else None
                if again is None:
                    break
                attempts += 1
                later = await self.inner.send(operation.with_entries(operation.entries.take(again)))
            except Exception as error:  # noqa: BLE001 - it becomes the outcome
                states = {place: outcomes.problems[place].state for place in left}
                problems = {place: Problem(state, error, of_request=True) for place, state in states.items()}
                outcomes = replace(outcomes, problems={**outcomes.problems, **problems})
                break
            outcomes = outcomes.with_retried(again, later)
        given_up = sum(not problem.is_answer for problem in outcomes.problems.values())
        self.meter.add("failures" if given_up else "successes")
        if given_up:
            self.meter.add("given_up", given_up)
        return outcomes

    async def _waited(
        self, operation: Operation[Any], outcomes: Outcomes, left: list[int], attempts: int, began: float
    ) -> list[int] | None:
        """Wait for the next attempt; return the entries to send again, None where the policy gives up."""
        problems = [outcomes.problems[place] for place in left]
        asked = max((problem.retry_after or 0.0 for problem in problems), default=0.0)
        if asked:
            self.meter.add("throttled")
        spent = self.clock.now() - began - outcomes.waited
        wait = self.policy.wait(attempts, spent, asked)
        if wait is None:
            _note_given_up(problems, attempts, spent, asked)
            return None
        if wait:
            self.meter.add("retry_waits", wait)
            await self.clock.sleep(wait)
        self.meter.add("retries")
        return _add_overtakers(operation, outcomes, left)

    def _left(self, operation: Operation[Any], outcomes: Outcomes) -> list[int]:
        left = sorted(place for place, problem in outcomes.problems.items() if self.policy.passes(problem))
        if self.policy.unknown == "fail" and operation.kind is OperationKind.UPDATE:
            return [place for place in left if not _may_act_twice(operation, place, outcomes.problems[place])]
        return left


def _may_act_twice(operation: Operation[Any], place: int, problem: Problem) -> bool:
    """Whether the update may have had its effect, and would have it again."""
    return problem.state is not State.FAILED and not _is_repeatable(operation, place)


def _is_repeatable(operation: Operation[Any], place: int) -> bool:
    if operation.kind is not OperationKind.UPDATE or operation.conditions.idempotent:
        return True
    update = (operation.entries.values or ())[place]
    return update.repeatable if isinstance(update, Changes) else isinstance(update, Mapping)


def _add_overtakers(operation: Operation[Any], outcomes: Outcomes, left: list[int]) -> list[int]:
    """`left`, and the entries that were done though an earlier one of their key was not, where they may be repeated.

    A function that keeps the order of a key leaves none. One that does not would have the key's earlier value win when
    only that is sent again.
    """
    if operation.conditions or not operation.kind.writes or operation.kind is OperationKind.PUT_IF_ABSENT:
        return left
    keys = operation.entries.keys
    first: dict[Any, int] = {}
    for place in left:
        first.setdefault(keys[place], place)
    if len(outcomes.problems) == outcomes.count or left[0] == outcomes.count - 1:
        return left
    overtakers = [
        place
        for place in range(left[0] + 1, outcomes.count)
        if place not in outcomes.problems and first.get(keys[place], place) < place and _is_repeatable(operation, place)
    ]
    return sorted([*left, *overtakers]) if overtakers else left


def _note_given_up(problems: list[Problem], attempts: int, spent: float, asked: float) -> None:
    """Add to each of the errors why it was not tried again."""
    asking = f"; the store asked for a pause of {asked:g} s" if asked else ""
    note = f"Gave up after {attempts} attempts in {spent:.1f} s{asking}."
    for error in {id(problem.error): problem.error for problem in problems}.values():
        if error is not None and note not in getattr(error, "__notes__", ()):
            error.add_note(note)

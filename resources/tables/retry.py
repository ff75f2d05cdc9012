"""When requests to a table are retried, and after how long: `RetryPolicy` decides, `RetryLayer`
retries, and `AttemptLayer` limits the time of each attempt.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import isfinite
from time import perf_counter
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveInt

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    RunLeaseLostError,
    TableError,
    TableUnavailableError,
    needs_action,
)
from dagster_adjunct.resources.tables.functions import ATTEMPT, TimedAttempt
from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Clock,
    Layer,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    State,
    SystemClock,
)
from dagster_adjunct.resources.validation import (
    Seconds,
    SecondsOrZero,
    validated,
    validated_methods,
)


@validated
@dataclass(frozen=True, slots=True)
class AttemptLayer:
    """Limits the time of each attempt. It is below the rate layer, so waiting for credits does not
    count.

    After `timeout` seconds (None: never) the request is cancelled and its entries are UNKNOWN: the
    store may have received it, and may even apply it later. If a function sends one request per
    entry, each request has this time.
    """

    table: str
    below: Layer
    timeout: float | None = None
    meter: Meter = field(default_factory=Meter)

    async def send(self, operation: Operation[Any]) -> Outcomes:
        """Send once, within the time limit; when that is over, each entry has a problem that says
        so.
        """
        began = perf_counter()
        if self.timeout is None:
            outcomes = await self.below.send(operation)
        else:
            limit = asyncio.timeout(self.timeout)
            timeout_problem = partial(self._timeout_problem, operation, 1)
            token = ATTEMPT.set(TimedAttempt(limit, self.timeout, timeout_problem))
            try:
                async with limit:
                    outcomes = await self.below.send(operation)
            except TimeoutError:
                if not limit.expired():
                    raise  # an error of the layer below, which came in time
                problem = self._timeout_problem(
                    operation, len(operation), operation.entries.keys[0]
                )
                outcomes = Outcomes.all(len(operation), problem)
            finally:
                ATTEMPT.reset(token)
        self.meter.attempt(
            operation.kind is not OperationKind.GET, operation.count, perf_counter() - began
        )
        return outcomes

    async def close(self) -> None:
        await self.below.close()

    def _timeout_problem(self, operation: Operation[Any], count: int, key: Any) -> Problem:
        """Return the problem of entries, the first with this key, that had no answer in time; count
        it.
        """
        self.meter.add("timeouts")
        entries = "of key"
        if count != 1:
            entries = f"of {count} entries, the first with key"
        error = TableUnavailableError(
            f"table {self.table}: a {operation.kind.value} {entries} {key!r} had no answer after"
            f" {self.timeout:g} s and was given up.",
            "Check the store's load, or raise RetryPolicy(timeout=…).",
            table=self.table,
        )
        error.__cause__ = TimeoutError()
        return Problem(State.UNKNOWN, error)


_MAX_GROWTH = 1000.0
_LAST_GROWTH = 60  # waits grow this often; _MAX_GROWTH to its power is still a finite float


@validated_methods
@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before each retry, in seconds; made by `none`, `fixed`, `random` and
    `exponential`.

    The wait after the n-th failure is `first * growth ** (n - 1)` plus up to `jitter` at random, at
    most `most`, which may be infinite: no limit.
    """

    first: float
    growth: float = 1.0
    most: float = float("inf")
    jitter: float = 0.0

    def __post_init__(self) -> None:
        has_waits = isfinite(self.first) and 0 <= self.first <= self.most
        has_jitter = isfinite(self.jitter) and self.jitter >= 0
        has_growth = 1 <= self.growth <= _MAX_GROWTH
        if not (has_waits and has_jitter and has_growth):
            raise ConfigurationError(
                f"{self} can't work: expected 0 <= first <= most, jitter of 0 or more, both finite,"
                " and a growth from 1 to 1000.",
                argument="backoff",
            )

    @staticmethod
    def none() -> Backoff:
        """Retry immediately."""
        return Backoff(0.0)

    @staticmethod
    def fixed(seconds: float) -> Backoff:
        """Wait this many seconds before each retry."""
        return Backoff(seconds)

    @staticmethod
    def random(least: float, most: float) -> Backoff:
        """Wait between `least` and `most` seconds, at random."""
        return Backoff(least, most=most, jitter=most - least)

    @staticmethod
    def exponential(first: float, most: float) -> Backoff:
        """Wait `first` seconds, doubled each time, plus up to `first` at random; at most `most`."""
        return Backoff(first, 2.0, most, first)

    def seconds(self, failures: int) -> float:
        """How many seconds to wait after this many consecutive failures (at least 1)."""
        wait = min(self.most, self.first * self.growth ** min(failures - 1, _LAST_GROWTH))
        if not self.jitter:
            return wait
        # Lowered near `most`, so that waits which have grown to it are random too.
        least = min(wait, max(self.first, self.most - self.jitter))
        return least + random.random() * min(self.jitter, self.most - least)


@validated
@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retries with waits that double from `first_wait` to `max_wait`, plus up to `first_wait` at
    random, or with `backoff`.

    Gives up after `attempts` requests, or before a wait that would end later than `max_total` after
    the first request; waiting for the table's rate does not count. All times are in seconds.
    `RetryPolicy(attempts=1)` never retries.

    - `timeout`: a request without an answer after this long is given up, and its entries' outcome
      is unknown.
    - `retry_if`: a picklable function that decides for each `Problem` whether its entry is retried,
      instead of the table's function (`is_retriable`). It is not called for missing records and
      failed conditions, which are answers.
    - `unknown="fail"`: gives up an update without an answer that would act twice if sent twice (it
      adds or appends, and the table is not `idempotent`). By default it is sent again, so it is
      applied at least once.
    - If the store asks for a pause (Retry-After, throttling), a retry waits at least so long, even
      beyond `max_wait`.
    """

    attempts: PositiveInt = 8
    first_wait: SecondsOrZero = 0.1
    max_wait: NonNegativeFloat = 5.0
    max_total: NonNegativeFloat = 60.0
    backoff: Backoff | None = field(default=None, kw_only=True)
    timeout: Seconds | None = field(default=20.0, kw_only=True)
    retry_if: Callable[[Problem], bool] | None = field(default=None, kw_only=True)
    unknown: Literal["retry", "fail"] = field(default="retry", kw_only=True)

    def __post_init__(self) -> None:
        if self.backoff is None and self.first_wait > self.max_wait:
            problem = (
                f"first_wait={self.first_wait:g} of a retry policy is above"
                f" max_wait={self.max_wait:g}."
            )
            raise ConfigurationError(
                problem, "Raise max_wait, or shorten first_wait.", argument="first_wait"
            )
        least = self.first_wait if self.backoff is None else self.backoff.first
        has_no_time = self.max_total < least or self.max_total == 0
        if self.attempts > 1 and has_no_time:
            found = (
                f"max_total={self.max_total:g} is too short for a second attempt, which comes after"
                f" {least:g} s."
            )
            step = "Raise max_total, shorten the wait, or disable retries with attempts=1."
            raise ConfigurationError(found, step, argument="max_total")

    def passes(self, problem: Problem) -> bool:
        """Whether an entry with this problem may be retried. Raises TableError if `retry_if`
        raises.

        Without `retry_if`, it may if it may succeed unchanged, and nobody has to act first.
        """
        if problem.is_answer:
            return False
        if self.retry_if is None:
            return problem.may_pass and not needs_action(problem.error)
        try:
            return bool(self.retry_if(problem))
        except Exception as wrong:
            what = (
                f"retry_if of a retry policy raised {type(wrong).__name__} ({wrong}) about"
                f" {problem.error!r:.160}."
            )
            step = (
                "Fix the function: it gets a Problem and returns whether its entry may be retried."
            )
            raise TableError(what, step, function="retry_if") from wrong

    def wait(self, attempts: int, spent: float, asked: float = 0.0) -> float | None:
        """Return the seconds to wait before the next attempt, None to give up.

        So far there were this many `attempts`, in `spent` seconds; the store `asked` for a pause of
        so many seconds.
        """
        if attempts >= self.attempts:
            return None
        backoff = self.backoff or Backoff.exponential(self.first_wait, self.max_wait)
        seconds = max(backoff.seconds(attempts), asked)
        if spent + seconds > self.max_total:
            return None
        return seconds


@dataclass(frozen=True, slots=True)
class RetryLayer:
    """Retries failed and unknown entries as the policy says.

    `send` returns when each entry has its final outcome; until then the layer above holds back
    later operations on the same keys. Within an operation, the layers below send no later entry of
    a key after a failed one.
    """

    below: Layer
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    meter: Meter = field(default_factory=Meter)
    clock: Clock = field(default_factory=SystemClock)

    async def send(self, operation: Operation[Any]) -> Outcomes:
        """Send the operation, then again the entries that were not done, as long as the policy
        retries them.
        """
        began = self.clock.now()
        try:
            outcomes = await self.below.send(operation)
        except BaseException:
            self.meter.request(succeeded=False)
            raise
        if outcomes.problems:
            self.meter.request(succeeded=False)
            _raise_lost_lease(outcomes)
            return await self._retry_until_done(operation, outcomes, began)
        self.meter.request(succeeded=True)
        return outcomes

    async def close(self) -> None:
        await self.below.close()

    async def _retry_until_done(
        self, operation: Operation[Any], outcomes: Outcomes, began: float
    ) -> Outcomes:
        """Return the outcomes after all retries; `outcomes` are those of the first attempt, which
        began at `began`.
        """
        for attempts in count(1):
            # The entries that get the problem of an error here: not those that are done, which
            # must not be sent again.
            left = [place for place, problem in outcomes.problems.items() if not problem.is_answer]
            try:
                left = self._entries_to_retry(operation, outcomes)
                if not await self._wait(outcomes, left, attempts, began):
                    break
                again = _add_overtakers(operation, outcomes, left)
                later = await self.below.send(operation.with_entries(operation.entries.take(again)))
            except RunLeaseLostError:
                raise
            except Exception as error:  # noqa: BLE001 - it becomes the outcome
                problems = outcomes.problems
                failed = {at: Problem(problems[at].state, error, of_request=True) for at in left}
                outcomes = replace(outcomes, problems={**problems, **failed})
                break
            _raise_lost_lease(later)
            outcomes = outcomes.with_retried(again, later)
        given_up = sum(not problem.is_answer for problem in outcomes.problems.values())
        self.meter.add("given_up", given_up)
        self.meter.add("failures" if given_up else "successes")
        return outcomes

    async def _wait(self, outcomes: Outcomes, left: list[int], attempts: int, began: float) -> bool:
        """Wait before the next attempt; if there is none, because no entry is `left` or the policy
        gives up, return False. Each error gets a note that the policy gave up.
        """
        if not left:
            return False
        problems = [outcomes.problems[place] for place in left]
        asked = max(problem.retry_after or 0.0 for problem in problems)
        if asked:
            self.meter.add("throttled")
        spent = self.clock.now() - began - outcomes.waited
        wait = self.policy.wait(attempts, spent, asked)
        if wait is None:
            asking = ""
            if asked:
                asking = f"; the store asked for a pause of {asked:g} s"
            note = f"Gave up after {attempts} attempts in {spent:.1f} s{asking}."
            for error in {id(problem.error): problem.error for problem in problems}.values():
                if error is not None and note not in getattr(error, "__notes__", ()):
                    error.add_note(note)
            return False
        if wait:
            self.meter.add("retry_waits", wait)
            await self.clock.sleep(wait)
        self.meter.add("retries")
        return True

    def _entries_to_retry(self, operation: Operation[Any], outcomes: Outcomes) -> list[int]:
        """Return the indices of the entries that the policy retries."""
        left = sorted(
            place for place, problem in outcomes.problems.items() if self.policy.passes(problem)
        )
        if self.policy.unknown == "retry":
            return left
        # Give up an update that may have had an effect, and would have it twice if sent again.
        had_none = set()
        for place in left:
            if outcomes.problems[place].state is State.FAILED:
                had_none.add(place)
        return [place for place in left if place in had_none or _is_repeatable(operation, place)]


def _raise_lost_lease(outcomes: Outcomes) -> None:
    """Raise the RunLeaseLostError that an entry failed with: neither it nor others may be sent
    again by this run.
    """
    for problem in outcomes.problems.values():
        if isinstance(problem.error, RunLeaseLostError):
            raise problem.error


def _is_repeatable(operation: Operation[Any], place: int) -> bool:
    """Whether a write that was applied can be sent again without another effect."""
    if operation.kind is not OperationKind.UPDATE or operation.conditions.idempotent:
        return True
    updates = operation.entries.values
    assert updates is not None
    update = updates[place]
    if isinstance(update, Changes):
        return update.repeatable
    # A mapping sets values. What only the user's function understands may add to them.
    return isinstance(update, Mapping)


def _add_overtakers(operation: Operation[Any], outcomes: Outcomes, left: list[int]) -> list[int]:
    """Return the entries to retry (`left`) and the overtakers: entries that were done although an
    earlier one of their key was not.

    With a function that keeps each key's order there are no overtakers. With any other, retrying
    only the earlier entry would let its value replace the later one's. Overtakers that would act
    twice are not added. None are added if the operation replaces no values, or has conditions:
    under these, the store itself skips an entry that is older than what it has.
    """
    kind = operation.kind
    replaces = kind.writes and kind is not OperationKind.PUT_IF_ABSENT
    if operation.conditions or not replaces:
        return left
    none_was_done = len(outcomes.problems) == outcomes.count
    none_is_later = left[0] == outcomes.count - 1
    if none_was_done or none_is_later:
        return left
    keys = operation.entries.keys
    first_left: dict[Any, int] = {}  # by key
    for place in left:
        first_left.setdefault(keys[place], place)
    overtakers = []
    for place in range(left[0] + 1, outcomes.count):
        is_done = place not in outcomes.problems
        has_overtaken = first_left.get(keys[place], place) < place
        if is_done and has_overtaken and _is_repeatable(operation, place):
            overtakers.append(place)
    if overtakers:
        return sorted([*left, *overtakers])
    return left

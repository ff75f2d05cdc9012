"""When a request to a table is sent again, and after how long: decisions, which `RetryLayer` carries out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from dagster_adjunct.resources.checked_numbers import check_seconds
from dagster_adjunct.resources.errors import ConfigurationError, TableError
from dagster_adjunct.resources.tables.outcomes import Problem


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
        times = _is_time(self.first) and _is_time(self.jitter) and self.most >= self.first
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


def _is_time(seconds: float) -> bool:
    return isfinite(seconds) and seconds >= 0

"""How many records per second a table may be asked to read and write."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.tables.credit_source import READ, WRITE, Budget, CreditSource

if TYPE_CHECKING:
    from dagster_adjunct.resources.tables.clock import Clock

BURST_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Records per second, reads and writes apart; None is no limit. Updates and deletes are writes.

    In an application the numbers hold over all tasks of all runs; in plain Python for one open table. Tables that name
    the same `budget` share it; without one it is the table's own.
    """

    reads_per_second: float | None = None
    writes_per_second: float | None = None
    budget: str | None = None

    def __post_init__(self) -> None:
        for what, rate in (("reads", self.reads_per_second), ("writes", self.writes_per_second)):
            if rate is not None and not rate > 0:
                raise ConfigurationError(
                    f"{what}_per_second is {rate!r}: expected a number above 0, or None for no limit.",
                    "Correct the rate limit.",
                    argument=f"{what}_per_second",
                )

        if self.budget is not None:
            check_name("budget", self.budget)

    def budgets(self, table: str) -> tuple[Budget, ...]:
        """Return the budgets that the requests of this table spend."""
        rates = ((READ, self.reads_per_second), (WRITE, self.writes_per_second))
        return tuple(Budget(self.budget or table, tag, rate) for tag, rate in rates if rate is not None)


class SharedBucket:
    """A table's credits of one tag, as `source` hands them out; of what has no budget there are any number."""

    def __init__(self, source: CreditSource, budgets: Iterable[Budget], tag: str) -> None:
        self._source = source
        self._budget = next((budget for budget in budgets if budget.tag == tag), None)

    def largest(self, wanted: int) -> int:
        """How many of `wanted` records to send at once; at least 1."""
        return wanted if self._budget is None else min(wanted, self._budget.largest)

    async def acquire(self, credits: int) -> None:
        """Return when `credits` records may be sent. Callers are served in the order they came."""
        if self._budget is not None:
            await self._source.acquire(self._budget, credits)


class TokenBucket:
    """Credits that come in at `rate` per second and expire unused after 2 s.

    It starts empty: tasks that live for less than a second would otherwise spend a whole burst each,
    and so pass the rate that they share.
    """

    def __init__(self, rate: float | None, clock: Clock) -> None:
        self._rate = rate
        self._clock = clock
        self._credits = 0.0
        self._taking = threading.Lock()
        self._filled_at = clock.now()

    def largest(self, wanted: int) -> int:
        """How many of `wanted` records to send at once without exceeding a burst; at least 1."""
        if self._rate is None:
            return wanted
        return max(1, min(wanted, int(self._rate * BURST_SECONDS)))

    async def acquire(self, credits: int) -> None:
        """Return when `credits` records may be sent. Callers are served in the order they came."""
        if self._rate is None or credits <= 0:
            return
        with self._taking:
            now = self._clock.now()
            earned = (now - self._filled_at) * self._rate
            self._credits = min(self._rate * BURST_SECONDS, self._credits + earned) - credits
            self._filled_at = now
            wait = -self._credits / self._rate
        if wait > 0:
            await self._clock.sleep(wait)

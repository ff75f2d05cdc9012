"""How many records per second a table may be asked to read and write."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.resources.tables.clock import Clock

BURST_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Records per second, reads and writes apart; None is no limit. Updates and deletes are writes.

    The numbers hold for one open table. Where several tasks share a budget, each gets `share(n)`.
    """

    reads_per_second: float | None = None
    writes_per_second: float | None = None

    def __post_init__(self) -> None:
        for what, rate in (("reads", self.reads_per_second), ("writes", self.writes_per_second)):
            if rate is not None and not rate > 0:
                raise ConfigurationError(
                    f"{what}_per_second is {rate!r}: expected a number above 0, or None for no limit.",
                    "Correct the rate limit.",
                    argument=f"{what}_per_second",
                )

    def share(self, tasks: int) -> RateLimit:
        """The part of this budget that is one task's, of `tasks` running at once."""
        if tasks < 1:
            raise ConfigurationError(f"a rate can't be shared by {tasks} tasks.", "Give at least 1.", argument="tasks")
        reads, writes = self.reads_per_second, self.writes_per_second
        return RateLimit(None if reads is None else reads / tasks, None if writes is None else writes / tasks)


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

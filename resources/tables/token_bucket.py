"""`TokenBucket`: credits that come in by and by, for callers in the order in which they came."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.resources.tables.credit_source import KEPT_SECONDS

if TYPE_CHECKING:
    from dagster_adjunct.resources.tables.clock import Clock

_LOOK = 0.25  # seconds after which a wait behind others looks whether it has moved up


class TokenBucket:
    """Credits that come in at `rate` per second and expire unused after half a second (`KEPT_SECONDS`).

    It starts empty: tasks that live for less than a second would otherwise spend a whole burst each,
    and so pass the rate that they share.

    Whoever waits has spent what is still to come in. Where a wait is cancelled, those behind it move up, and what
    nobody waits for is there for the next. Event loops of several threads may share a bucket.
    """

    def __init__(self, rate: float, clock: Clock) -> None:
        self._rate = rate
        self._clock = clock
        self._credits = 0.0
        self._taking = threading.Lock()
        self._filled_at = clock.now()
        self._waits: list[_Wait] = []

    @property
    def rate(self) -> float:
        return self._rate

    async def acquire(self, credits: float) -> None:
        """Return when `credits` may be spent. Callers are served in the order they came, but that of two which move up
        together, a quarter of a second apart at most, may be the other."""
        wait = self._take(credits)
        if wait is None:
            return
        try:
            left = wait.due - self._clock.now()
            while left > 0:
                behind = self._waits[0] is not wait
                await self._clock.sleep(min(left, _LOOK) if behind else left)
                left = wait.due - self._clock.now() if behind and left > _LOOK else 0.0
        except BaseException:
            self._give_back(wait)
            raise
        with self._taking:
            self._waits.remove(wait)

    def _take(self, credits: float) -> _Wait | None:
        """Spend `credits` that are there or come in later; return the wait until then, None where they are there."""
        if credits <= 0:
            return None
        with self._taking:
            now = self._clock.now()
            self._fill(now)
            self._credits -= credits
            if self._credits >= 0:
                return None
            wait = _Wait(credits, now - self._credits / self._rate)
            self._waits.append(wait)
            return wait

    def _fill(self, now: float) -> None:
        earned = (now - self._filled_at) * self._rate
        self._credits = min(self._rate * KEPT_SECONDS, self._credits + earned)
        self._filled_at = now

    def _give_back(self, wait: _Wait) -> None:
        with self._taking:
            now = self._clock.now()
            self._fill(now)
            to_come = min(wait.credits, max(0.0, (wait.due - now) * self._rate))
            came_in = min(wait.credits - to_come, self._rate * KEPT_SECONDS)
            self._credits += to_come + came_in
            place = self._waits.index(wait)
            del self._waits[place]
            for other in self._waits[place:]:
                other.due -= (to_come + came_in) / self._rate


@dataclass(eq=False, slots=True)
class _Wait:
    """Somebody who has spent what comes in until `due`."""

    credits: float
    due: float

"""The credits of one budget that a run holds, which come in with time and expire, and the demands that wait for them.

Times are the driver's own, in seconds, and given: nothing here waits or looks at a clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dagster_adjunct.resources.tables.credit_source import KEPT_SECONDS
from dagster_adjunct.resources.tables.credits.shared_timeline import AHEAD_SECONDS, Wish

# Between two leases there is so much time, and a use is not taken for more than it was in that.
PAUSE_SECONDS = 0.2
# More than it used is wanted, or a demand that grows would never get ahead.
_HEADROOM = 1.25
_LITTLE = 1e-9


@dataclass(slots=True)
class _Stretch:
    start: float
    end: float
    credits: float

    def until(self, time: float) -> float:
        """How many of its credits have come in by then."""
        if time >= self.end:
            return self.credits
        if time <= self.start:
            return 0.0
        return self.credits * (time - self.start) / (self.end - self.start)

    def drop(self, credits: float) -> None:
        """Take away its first credits."""
        if self.credits - credits <= _LITTLE:
            self.start, self.credits = self.end, 0.0
        else:
            self.start += (self.end - self.start) * credits / self.credits
            self.credits -= credits


class LeasedCredits:
    """Leased credits in the order in which they come in."""

    def __init__(self) -> None:
        self._stretches: deque[_Stretch] = deque()

    def add(self, start: float, end: float, credits: float) -> None:
        self._stretches.append(_Stretch(start, end, credits))

    def give_back(self, now: float, credits: float) -> None:
        """Add what was taken and not used, as if it came in now."""
        self._stretches.appendleft(_Stretch(now, now, credits))

    def take(self, now: float, at_most: float) -> float:
        """Take what has come in and not expired, but no more than that; return how much it was."""
        taken = 0.0
        for stretch in self._stretches:
            stretch.drop(stretch.until(now - KEPT_SECONDS))
            part = min(at_most - taken, stretch.until(now))
            if part > 0:
                stretch.drop(part)
                taken += part
        while self._stretches and self._stretches[0].credits <= _LITTLE:
            self._stretches.popleft()
        return taken

    def held(self, now: float) -> float:
        """How many credits have not expired, those that have yet to come in included."""
        return sum(stretch.credits - stretch.until(now - KEPT_SECONDS) for stretch in self._stretches)

    def ready_at(self, now: float, credits: float) -> float | None:
        """When so many will have come in; None where all that are leased are not enough."""
        for stretch in self._stretches:
            if stretch.credits >= credits:
                length = stretch.end - stretch.start
                return max(now, stretch.start + length * credits / stretch.credits)
            credits -= stretch.credits
        return None


@dataclass(slots=True, eq=False)
class Demand:
    """Credits that somebody waits for; `missing` are those that are not paid in yet."""

    credits: float
    missing: float = field(init=False)

    def __post_init__(self) -> None:
        self.missing = self.credits


class Demands:
    """Who waits for the credits of one budget, in order, and how many credits to lease for them.

    Credits are paid in for the first demand until it has all: several that fill at once would be spent in one burst.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.leased = LeasedCredits()
        self.lease_takes = 0.0  # seconds, as the last one did
        self._waiting: deque[Demand] = deque()
        self._spent = 0.0
        self._wished_at = float("-inf")
        self._used_before = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, credits: float) -> Demand:
        demand = Demand(credits)
        self._waiting.append(demand)
        return demand

    def withdraw(self, demand: Demand, now: float) -> None:
        """Forget a demand; what was paid in for it is for those that still wait."""
        if demand in self._waiting:
            self._waiting.remove(demand)
            if (paid := demand.credits - demand.missing) > 0:
                self._spent -= paid
                self.leased.give_back(now, paid)

    def pay(self, now: float) -> list[Demand]:
        """Pay in what has come in; return the demands that have all by now, which wait no longer."""
        paid: list[Demand] = []
        while self._waiting:
            first = self._waiting[0]
            part = self.leased.take(now, first.missing)
            self._spent += part
            first.missing -= part
            if first.missing > _LITTLE * max(1.0, first.credits):
                break
            paid.append(self._waiting.popleft())
        return paid

    def next_at(self, now: float) -> float | None:
        """When the first demand will have all its credits; None where nobody waits, or a lease is needed first."""
        return self.leased.ready_at(now, self._waiting[0].missing) if self._waiting else None

    def wish(self, now: float) -> Wish | None:
        """Return what to lease now, None where nothing is wanted or the last lease was just before."""
        since = now - self._wished_at
        waiting = sum(demand.missing for demand in self._waiting)
        if since < PAUSE_SECONDS or (waiting <= 0 and self._spent <= _LITTLE):
            return None
        used = (self._spent + waiting) / (max(PAUSE_SECONDS, min(since, 1.0)) * self.rate)
        share = min(1.0, _HEADROOM * max(used, self._used_before))
        target = max(waiting, share * AHEAD_SECONDS * self.rate)
        held = self.leased.held(now + self.lease_takes)  # when the lease is there
        if held >= max(waiting, target * 2 / 3):
            return None
        self._wished_at, self._spent, self._used_before = now, 0.0, used
        return Wish(min(AHEAD_SECONDS + KEPT_SECONDS, (target - held) / self.rate), share)

    def look_at(self, now: float) -> float | None:
        """When there will be something to do; None until somebody demands."""
        if not self._waiting and self._spent <= _LITTLE:
            return None
        next_wish = max(now, self._wished_at + PAUSE_SECONDS)
        ready = self.next_at(now)
        if next_wish <= now:  # nothing was wished for just now: the leases suffice for a while
            next_wish = now + PAUSE_SECONDS
        return next_wish if ready is None else min(ready, next_wish)

"""Who gets a run's credits next, and how many to lease: decisions of the driver, without I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dagster_adjunct.resources.tables.rate import KEPT_SECONDS, MAX_AHEAD_SECONDS, LeaseRequest

# The least time between two requests for leases, and so the shortest over which use is measured.
PAUSE_SECONDS = 0.2
# The longest time over which use is measured: over a long pause, a burst after it would look like
# little, and other runs would get more of the rate.
_MEASURED_SECONDS = 1.0
# Ask for more than was used, or leases would never catch up with a growing demand.
_HEADROOM = 1.25
# Ask again once less than this share of the wanted credits is left: before they are used up, so
# that nobody waits for a lease, but not for a few at each pause.
_ENOUGH = 2 / 3
_EPSILON = 1e-9  # credits; sums of fractions may be wrong by so many


@dataclass(slots=True)
class _CreditInterval:
    """Credits that arrive evenly from `start` to `end`, in seconds."""

    start: float
    end: float
    credits: float

    def until(self, time: float) -> float:
        """How many of the credits have arrived by `time`."""
        if time >= self.end:
            return self.credits
        if time <= self.start:
            return 0.0
        return self.credits * (time - self.start) / (self.end - self.start)

    def drop(self, credits: float) -> None:
        """Remove the first credits, and the time in which they arrive."""
        if self.credits - credits <= _EPSILON:
            self.start = self.end
            self.credits = 0.0
        else:
            self.start += (self.end - self.start) * credits / self.credits
            self.credits -= credits


class LeasedCredits:
    """A run's leased credits of one budget, in the order in which they arrive."""

    def __init__(self) -> None:
        self._intervals: deque[_CreditInterval] = deque()

    def add(self, start: float, end: float, credits: float) -> None:
        """Add leased credits that arrive evenly from `start` to `end`."""
        self._intervals.append(_CreditInterval(start, end, credits))

    def give_back(self, now: float, credits: float) -> None:
        """Put unused credits back, as if they arrived now."""
        self._intervals.appendleft(_CreditInterval(now, now, credits))

    def take(self, now: float, at_most: float) -> float:
        """Take up to `at_most` credits that have arrived and have not expired; return how many.
        Drops expired ones.
        """
        taken = 0.0
        for interval in self._intervals:
            interval.drop(interval.until(now - KEPT_SECONDS))  # expired
            part = min(at_most - taken, interval.until(now))
            if part > 0:
                interval.drop(part)
                taken += part
        while self._intervals and self._intervals[0].credits <= _EPSILON:
            self._intervals.popleft()
        return taken

    def unexpired(self, now: float) -> float:
        """How many leased credits have not expired.

        They are available now, or become available later in their lease.
        """
        return sum(
            interval.credits - interval.until(now - KEPT_SECONDS) for interval in self._intervals
        )

    def ready_at(self, now: float, credits: float) -> float | None:
        """When this many credits will have arrived; None if fewer are leased."""
        for interval in self._intervals:
            if interval.credits >= credits:
                length = interval.end - interval.start
                return max(now, interval.start + length * credits / interval.credits)
            credits -= interval.credits
        return None


@dataclass(slots=True, eq=False)
class Demand:
    """The credits that a caller needs, and how many of them are `missing`: it waits until these
    are paid.
    """

    credits: float
    missing: float


class Demands:
    """The waiting demands for one budget's credits, in order; decides how many credits to lease for
    them.

    The first demand is paid in full before the next gets any: otherwise several would be complete,
    and spent, at once. Callers pass the driver's time, in seconds: nothing here waits or reads a
    clock.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.leased = LeasedCredits()
        self.lease_takes = 0.0  # seconds that the last request for a lease took
        self._waiting: deque[Demand] = deque()
        self._spent = 0.0
        self._requested_at = float("-inf")
        self._used_before = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, credits: float) -> Demand:
        """Add a demand at the end, for which nothing is paid yet."""
        demand = Demand(credits, credits)
        self._waiting.append(demand)
        return demand

    def withdraw(self, demand: Demand, now: float) -> None:
        """Remove a demand; credits that were paid for it are available to others again."""
        if demand in self._waiting:
            self._waiting.remove(demand)
            if (paid := demand.credits - demand.missing) > 0:
                self._spent -= paid
                self.leased.give_back(now, paid)

    def pay(self, now: float) -> list[Demand]:
        """Pay demands with the credits that have arrived; remove and return those that are paid
        in full.
        """
        paid: list[Demand] = []
        while self._waiting:
            first = self._waiting[0]
            part = self.leased.take(now, first.missing)
            self._spent += part
            first.missing -= part
            if first.missing > _EPSILON * max(1.0, first.credits):
                break
            paid.append(self._waiting.popleft())
        return paid

    def next_lease(self, now: float) -> LeaseRequest | None:
        """Return the lease to ask for now, and note that it is requested; None if none is needed,
        or within `PAUSE_SECONDS` of the last request.
        """
        since = now - self._requested_at
        waiting = sum(demand.missing for demand in self._waiting)
        is_idle = waiting <= 0 and self._spent <= _EPSILON
        if is_idle or since < PAUSE_SECONDS:
            return None
        used = (self._spent + waiting) / (min(since, _MEASURED_SECONDS) * self.rate)
        share = min(1.0, _HEADROOM * max(used, self._used_before))
        target = max(waiting, share * MAX_AHEAD_SECONDS * self.rate)
        # Those that are left when the lease arrives.
        held = self.leased.unexpired(now + self.lease_takes)
        is_enough = held >= max(waiting, target * _ENOUGH)
        if is_enough:
            return None
        self._requested_at = now
        self._spent = 0.0
        self._used_before = used
        return LeaseRequest(
            min(MAX_AHEAD_SECONDS + KEPT_SECONDS, (target - held) / self.rate), share
        )

    def next_event_at(self, now: float) -> float | None:
        """The next time to call `pay` or `next_lease`; None if there is nothing to do until the
        next demand.
        """
        if not self._waiting and self._spent <= _EPSILON:
            return None
        next_request = self._requested_at + PAUSE_SECONDS
        if next_request <= now:  # no lease was needed, although one could be requested
            next_request = now + PAUSE_SECONDS
        # When the first demand will be paid in full; None if a lease is needed first.
        ready = None
        if self._waiting:
            ready = self.leased.ready_at(now, self._waiting[0].missing)
        if ready is None:
            return next_request
        return min(ready, next_request)

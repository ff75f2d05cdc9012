"""`CreditSource`: where the requests of a table get the credits that they cost.

A rate is a budget of credits that come in so many per second, by tag: reads and writes have one each. In plain Python a
budget is this process's own; in a run of an application the run's driver hands credits out to its tasks, and leases
them from the lake, where all runs share them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

# Credits that nobody used expire after so long, and a request that costs more than come in within the other is split
# where it can be: so in any 10 s no more than the rate and a tenth of it go out.
KEPT_SECONDS = 0.5
LARGEST_SECONDS = 0.25

READ, WRITE = "read", "write"


class Budget(NamedTuple):
    """Credits per second for what has one tag. Tables that state one name share the budget of each tag."""

    name: str
    tag: str
    rate: float

    @property
    def largest(self) -> int:
        """How many credits one request should cost at most, where it can be split; at least 1."""
        return max(1, int(self.rate * LARGEST_SECONDS))


class CreditSource(Protocol):
    """Hands out credits. Safe to use from any number of coroutines of any event loop."""

    async def acquire(self, budget: Budget, credits: float) -> None:
        """Return when so many credits may be spent, which are spent then; callers are served in the order they came."""
        ...

    async def close(self) -> None:
        """Give back what is open in this event loop; the next call opens it again."""
        ...

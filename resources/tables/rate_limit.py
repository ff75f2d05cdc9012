"""How much a table may be asked to read and write per second, and the credits of a process by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.tables.clock import SystemClock
from dagster_adjunct.resources.tables.credit_source import READ, WRITE, Budget
from dagster_adjunct.resources.tables.operation import size_of
from dagster_adjunct.resources.tables.token_bucket import TokenBucket

if TYPE_CHECKING:
    from dagster_adjunct.resources.tables.clock import Clock
    from dagster_adjunct.resources.tables.operation import Operation
    from dagster_adjunct.resources.tables.outcomes import Outcomes

_MOST = 1e15
Credits = Callable[["Operation[Any]", "Outcomes | None"], float]


def per_record(operation: Operation[Any], answer: Outcomes | None) -> float:
    """One credit for each entry."""
    return len(operation) if answer is None else 0


def per_byte(operation: Operation[Any], answer: Outcomes | None) -> float:
    """One credit for each byte that a write sends, about, and for each that a get brings, which it pays afterwards."""
    if answer is not None:
        return sum(map(size_of, _found(answer)))
    return operation.entries.nbytes if operation.kind.writes else 0


def per_capacity_unit(operation: Operation[Any], answer: Outcomes | None) -> float:
    """DynamoDB's units: one for each 1 KiB of a written entry, and for each 4 KiB of a record that a get brings.

    Of an update only its own size is known here, so that it may use more where records are larger than that.
    """
    if answer is not None:
        missing = answer.count - len(_found(answer))
        return missing + sum(max(1, ceil(size_of(record) / 4096)) for record in _found(answer))
    if not operation.kind.writes:
        return 0
    entries = operation.entries
    values = entries.values or [None] * len(entries)
    return sum(max(1, ceil((size_of(k) + size_of(v)) / 1024)) for k, v in zip(entries.keys, values, strict=True))


def _found(answer: Outcomes) -> list[Any]:
    return [record for record in answer.records or () if record is not None]


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Credits per second, reads and writes apart; None is no limit. Updates and deletes are writes.

    In an application the numbers hold over all tasks of all runs; in plain Python for one open table. Tables that name
    the same `budget` share it; without one it is the table's own.

    `credits` says what a request costs: `per_record`, unless told; `per_byte`, `per_capacity_unit`, or a function of
    your own. It is called before each attempt with no answer, and after each of a get with the answer, for what only
    that tells.
    """

    reads_per_second: float | None = None
    writes_per_second: float | None = None
    budget: str | None = None
    credits: Credits = field(default=per_record, kw_only=True)

    def __post_init__(self) -> None:
        for what, rate in (("reads", self.reads_per_second), ("writes", self.writes_per_second)):
            number = isinstance(rate, int | float) and not isinstance(rate, bool)
            if rate is not None and not (number and 0 < rate <= _MOST):
                raise ConfigurationError(
                    f"{what}_per_second is {rate!r:.60}: expected a number above 0, or None for no limit.",
                    "Correct the rate limit.",
                    argument=f"{what}_per_second",
                )

        if self.budget is not None:
            check_name("budget", self.budget)

    def budgets(self, table: str) -> tuple[Budget, ...]:
        """Return the budgets that the requests of this table spend."""
        rates = ((READ, self.reads_per_second), (WRITE, self.writes_per_second))
        return tuple(Budget(self.budget or table, tag, rate) for tag, rate in rates if rate is not None)


# What tables of this process share by a budget's name.
_SHARED: WeakValueDictionary[tuple[str, str], TokenBucket] = WeakValueDictionary()


class LocalCredits:
    """A `CreditSource` of this process: nobody else spends from its budgets, unless they are `shared` by name."""

    def __init__(self, clock: Clock | None = None, *, shared: bool = False) -> None:
        self._clock = clock or SystemClock()
        self._shared = shared
        self._buckets: dict[Budget, TokenBucket] = {}
        self._making = threading.Lock()

    async def acquire(self, budget: Budget, credits: float) -> None:
        bucket = self._buckets.get(budget)
        if bucket is None:
            bucket = self._bucket(budget)
        await bucket.acquire(credits)

    async def close(self) -> None:
        pass

    def _bucket(self, budget: Budget) -> TokenBucket:
        with self._making:
            if budget in self._buckets:
                return self._buckets[budget]
            bucket = _SHARED.get((budget.name, budget.tag)) if self._shared else None
            if bucket is not None and bucket.rate != budget.rate:
                raise ConfigurationError(
                    f"budget {budget.name!r} ({budget.tag}): one table states {bucket.rate:g} credits per second, "
                    f"another {budget.rate:g}; they share the budget, so the rates must be equal.",
                    "Give both the same rate, or budgets of their own.",
                    argument="budget",
                )
            if bucket is None:
                bucket = TokenBucket(budget.rate, self._clock)
                if self._shared:
                    _SHARED[budget.name, budget.tag] = bucket
            self._buckets[budget] = bucket
            return bucket

"""`RateLayer`: lets each attempt wait until the credits that it costs are there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError, TransientError
from dagster_adjunct.resources.tables.clock import Clock, SystemClock
from dagster_adjunct.resources.tables.credit_source import READ, WRITE, Budget, CreditSource
from dagster_adjunct.resources.tables.layer import Layer, send_others
from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.resources.tables.operation import Operation, OperationKind
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem, State, joined
from dagster_adjunct.resources.tables.rate_limit import LocalCredits, RateLimit, per_record
from dagster_adjunct.resources.tables.record_problems import comes_again

_MOST = 1e15  # credits of one request
_NO_WAIT = 0.0001  # seconds that asking takes where nobody has to wait


@dataclass(slots=True)
class RateLayer:
    """Pays for every attempt from the budget of its kind; reads and writes have one each.

    A request that costs more than should go out at once is sent in parts, one after the other. What follows a failed
    entry of its key in a later part is not sent: FAILED. `source` is where credits come from: by default this process.
    """

    table: str
    inner: Layer
    limit: RateLimit = field(default_factory=RateLimit)
    source: CreditSource | None = None
    meter: Meter = field(default_factory=Meter)
    clock: Clock = field(default_factory=SystemClock)
    _read: Budget | None = field(init=False)
    _write: Budget | None = field(init=False)
    _credits: CreditSource = field(init=False)

    def __post_init__(self) -> None:
        budgets = {budget.tag: budget for budget in self.limit.budgets(self.table)}
        self._read, self._write = budgets.get(READ), budgets.get(WRITE)
        self._credits = self.source or LocalCredits(self.clock, shared=self.limit.budget is not None)

    async def send(self, operation: Operation[Any]) -> Outcomes:
        budget = self._read if operation.kind is OperationKind.GET else self._write
        if budget is None:
            return await self.inner.send(operation)
        cost = self._cost(operation)
        if cost <= budget.largest or operation.count <= 1:
            return await self._attempt(operation, budget, cost)
        return await self._in_parts(operation, budget, cost)

    def largest(self, wanted: int) -> int:
        """How many entries a request should have at most, so that it need not be sent in parts."""
        if self.limit.credits is not per_record:
            return wanted
        return min([wanted, *(budget.largest for budget in (self._read, self._write) if budget is not None)])

    async def close(self) -> None:
        await self._credits.close()
        await self.inner.close()

    async def _attempt(self, operation: Operation[Any], budget: Budget, cost: float) -> Outcomes:
        try:
            waited = await self._acquire(budget, cost)
        except AdjunctError as error:  # nothing was sent, but earlier parts of the operation may have been
            # Records that wait for a store to answer are not refused: dead letters must not have them.
            state = State.FAILED if isinstance(error, TransientError) else State.REFUSED
            return Outcomes.all(len(operation), Problem(state, error))
        outcomes = await self.inner.send(operation)
        if operation.kind is OperationKind.GET and (rest := self._cost(operation, outcomes)) > 0:
            waited += await self._acquire(budget, rest)
        return replace(outcomes, waited=outcomes.waited + waited) if waited else outcomes

    def _cost(self, operation: Operation[Any], answer: Outcomes | None = None) -> float:
        credits = self.limit.credits
        if credits is per_record:
            return operation.count if answer is None else 0
        try:
            cost = credits(operation, answer)
        except Exception as wrong:
            raise self._no_cost(f"raised {type(wrong).__name__}: {wrong}") from wrong
        if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost <= _MOST:
            raise self._no_cost(f"gave {cost!r:.60}")
        return cost

    def _no_cost(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"table {self.table}: credits of the rate limit {what}: expected a number of credits, 0 or more.",
            "Correct the function: it gets an operation, and its outcomes behind a get.",
            argument="credits",
            table=self.table,
        )

    async def _acquire(self, budget: Budget, credits: float) -> float:
        began = self.clock.now()
        await self._credits.acquire(budget, credits)
        waited = self.clock.now() - began
        if waited < _NO_WAIT:
            return 0.0
        self.meter.add("rate_waits", waited)
        return waited

    async def _in_parts(self, operation: Operation[Any], budget: Budget, cost: float) -> Outcomes:
        sent: list[Outcomes] = []
        held: dict[Any, Problem] = {}  # by key, why no more of it may be sent
        for part, its_cost in list(self._parts(operation, budget, cost)):  # what they cost is known before any is sent
            outcomes = await (self._free_of(part, budget, held) if held else self._attempt(part, budget, its_cost))
            sent.append(outcomes)
            if outcomes.problems and operation.kind.writes:
                keys = part.entries.keys
                for place, problem in outcomes.problems.items():
                    if comes_again(problem):
                        unsent = replace(problem, state=State.FAILED if problem.may_pass else State.REFUSED)
                        held.setdefault(keys[place], unsent)
        return joined(sent)

    def _parts(self, operation: Operation[Any], budget: Budget, cost: float) -> Iterator[tuple[Operation[Any], float]]:
        """Parts that cost no more than should go out at once, or are a single entry."""
        count = len(operation)
        size = ceil(count / ceil(cost / budget.largest))
        for start in range(0, count, size):
            part = operation.with_entries(operation.entries.part(start, min(count, start + size)))
            its_cost = self._cost(part)
            if its_cost > budget.largest and 1 < len(part) < count:
                yield from self._parts(part, budget, its_cost)
            else:
                yield part, its_cost

    async def _free_of(self, part: Operation[Any], budget: Budget, held: dict[Any, Problem]) -> Outcomes:
        """Send what has no key in `held`."""
        keys = part.entries.keys
        problems = {place: held[key] for place, key in enumerate(keys) if key in held}

        async def attempt(allowed: Operation[Any]) -> Outcomes:
            try:
                its_cost = self._cost(allowed)
            except ConfigurationError as error:  # earlier parts are sent
                return Outcomes.all(len(allowed), Problem(State.REFUSED, error))
            return await self._attempt(allowed, budget, its_cost)

        return await send_others(part, problems, attempt)

"""`AttemptLayer`: one attempt at the store, measured, and given up when no answer comes in time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from dagster_adjunct.resources.errors import TableUnavailableError
from dagster_adjunct.resources.tables.layer import Layer
from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.resources.tables.operation import Operation, OperationKind
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem, State
from dagster_adjunct.resources.tables.per_loop import PerLoop
from dagster_adjunct.resources.tables.time_limits import ATTEMPT, TimedAttempt, TimeLimits


@dataclass(frozen=True, slots=True)
class AttemptLayer:
    """Stands below the rate, so that waiting for credits is no part of an attempt, and above the function.

    After `timeout` seconds (None: never) the request is cancelled and the outcome of its entries is UNKNOWN: the store
    may have got it, and may even act on it later. Where a function sends a request for each entry, each has that time.
    """

    table: str
    inner: Layer
    timeout: float | None = None
    meter: Meter = field(default_factory=Meter)
    _limits: PerLoop[TimeLimits] = field(init=False)

    def __post_init__(self) -> None:
        timeout = self.timeout or 0.0
        object.__setattr__(self, "_limits", PerLoop(lambda: TimeLimits(timeout)))

    async def send(self, operation: Operation[Any]) -> Outcomes:
        began = perf_counter()
        if self.timeout is None:
            outcomes = await self.inner.send(operation)
        else:
            limits = self._limits.here()
            place = limits.enter()
            within = ATTEMPT.set(TimedAttempt(limits, place, self.timeout, partial(self._late, operation, 1)))
            try:
                outcomes = await self.inner.send(operation)
            except asyncio.CancelledError:
                if not limits.leave(place):
                    raise
                late = self._late(operation, len(operation), operation.entries.keys[0])
                outcomes = Outcomes.all(len(operation), late)
            except BaseException:
                limits.leave(place)
                raise
            else:
                limits.leave(place)
            finally:
                ATTEMPT.reset(within)
        self.meter.attempt(operation.kind is not OperationKind.GET, operation.count, perf_counter() - began)
        return outcomes

    async def close(self) -> None:
        await self.inner.close()

    def _late(self, operation: Operation[Any], count: int, key: Any) -> Problem:
        self.meter.add("timeouts")
        entries = "of key" if count == 1 else f"of {count} entries, the first with key"
        late = TableUnavailableError(
            f"table {self.table}: a {operation.kind.value} {entries} {key!r} had no answer after {self.timeout:g} s "
            "and was given up.",
            "See what the store is busy with, or allow more: RetryPolicy(timeout=…).",
            table=self.table,
        )
        late.__cause__ = TimeoutError()
        return Problem(State.UNKNOWN, late)

"""`AttemptLayer`: one attempt at the store, measured, and given up when no answer comes in time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from dagster_adjunct.resources.errors import TableUnavailableError
from dagster_adjunct.resources.tables.layer import Layer
from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.resources.tables.operation import Operation, OperationKind
from dagster_adjunct.resources.tables.outcomes import Outcomes, Problem, State


@dataclass(frozen=True, slots=True)
class AttemptLayer:
    """Stands below the rate, so that waiting for credits is no part of an attempt, and above the function.

    After `timeout` seconds (None: never) the request is cancelled and the outcome of its entries is UNKNOWN: the store
    may have got it, and may even act on it later.
    """

    table: str
    inner: Layer
    timeout: float | None = None
    meter: Meter = field(default_factory=Meter)

    async def send(self, operation: Operation[Any]) -> Outcomes:
        began = perf_counter()
        if self.timeout is None:
            outcomes = await self.inner.send(operation)
        else:
            outcomes = await self._in_time(operation, self.timeout)
        self.meter.attempt(operation.kind is not OperationKind.GET, len(operation), perf_counter() - began)
        return outcomes

    async def close(self) -> None:
        await self.inner.close()

    async def _in_time(self, operation: Operation[Any], timeout: float) -> Outcomes:
        try:
            async with asyncio.timeout(timeout) as limit:
                return await self.inner.send(operation)
        except TimeoutError as error:
            if not limit.expired():
                raise
            self.meter.add("timeouts")
            late = TableUnavailableError(
                f"table {self.table}: a {operation.kind.value} of {len(operation)} entries, the first with key "
                f"{operation.entries.keys[0]!r}, had no answer after {timeout:g} s and was given up.",
                "See what the store is busy with, or allow more: RetryPolicy(timeout=…).",
            )
            late.__cause__ = error
            return Outcomes.all(len(operation), Problem(State.UNKNOWN, late))

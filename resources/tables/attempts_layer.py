"""`AttemptsLayer`: sends again what may pass, each attempt at the table's rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dagster_adjunct.resources.tables.clock import Clock
from dagster_adjunct.resources.tables.credit_source import READ, CreditSource
from dagster_adjunct.resources.tables.layer import Layer
from dagster_adjunct.resources.tables.operation import Operation
from dagster_adjunct.resources.tables.outcomes import Outcomes, State
from dagster_adjunct.resources.tables.rate_limit import RateLimit, SharedBucket, TokenBucket
from dagster_adjunct.resources.tables.retry import RetryPolicy


def bucket_of(
    table: str, limit: RateLimit, tag: str, source: CreditSource | None, clock: Clock
) -> TokenBucket | SharedBucket:
    """What the requests of one tag pay from."""
    if source is not None:
        return SharedBucket(source, limit.budgets(table), tag)
    return TokenBucket(limit.reads_per_second if tag == READ else limit.writes_per_second, clock)


class _AgainError(Exception):
    """Some entries may pass when they are sent again."""


class AttemptsLayer:
    """Retry and rate in one, on `RetryPolicy` and `RateLimit`."""

    def __init__(
        self,
        below: Layer,
        *,
        retry: RetryPolicy,
        reading: TokenBucket | SharedBucket,
        writing: TokenBucket | SharedBucket,
        clock: Clock,
        count: Callable[..., None],
    ) -> None:
        self._below = below
        self._retry = retry
        self._clock = clock
        self._count = count
        self._reading = reading
        self._writing = writing

    def largest(self, wanted: int) -> int:
        """How many entries a request should have at most."""
        return min(self._reading.largest(wanted), self._writing.largest(wanted))

    async def send(self, operation: Operation[Any]) -> Outcomes:
        self._count(requests=1)
        bucket = self._writing if operation.kind.writes else self._reading
        await bucket.acquire(len(operation))
        outcomes = await self._below.send(operation)
        if not outcomes.problems:
            return outcomes
        left = outcomes.places(State.FAILED, State.UNKNOWN)
        if left and self._retry.attempts > 1:
            outcomes = await self._again(operation, outcomes, bucket)
        if any(problem.state is not State.MISSING and problem.error for problem in outcomes.problems.values()):
            self._count(failures=1)
        return outcomes

    async def close(self) -> None:
        await self._below.close()

    async def _again(
        self, operation: Operation[Any], outcomes: Outcomes, bucket: TokenBucket | SharedBucket
    ) -> Outcomes:
        first = True

        async def attempt() -> None:
            nonlocal outcomes, first
            left = outcomes.places(State.FAILED, State.UNKNOWN)
            if not first:
                await bucket.acquire(len(left))
                later = await self._below.send(operation.with_entries(operation.entries.take(left)))
                outcomes = outcomes.amended(left, later)
                left = outcomes.places(State.FAILED, State.UNKNOWN)
            first = False
            if left:
                raise _AgainError from outcomes.problems[left[0]].error

        try:
            await self._retry.run(
                attempt,
                is_retriable=lambda error: isinstance(error, _AgainError),
                clock=self._clock,
                on_retry=lambda: self._count(retries=1),
            )
        except _AgainError as given_up:
            for note in getattr(given_up, "__notes__", ()):
                if given_up.__cause__ is not None:
                    given_up.__cause__.add_note(note)
        return outcomes

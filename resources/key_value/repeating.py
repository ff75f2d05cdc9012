"""Requests to a segment that are sent again: what certainly did nothing, and what nobody knows of.

The first attempt is made by the caller; only what failed comes here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from dagster_adjunct.resources.errors import AdjunctError, TransientError
from dagster_adjunct.resources.key_value.table_segment import ReplyLostError, SegmentChange, TableId, TableSegment
from dagster_adjunct.resources.key_value_errors import KeyValueTableError, OutcomeUnknownError

T = TypeVar("T")
Pause = Callable[[float], Awaitable[None]]

PATIENCE = 60.0
"""Seconds for which a table that is out of reach is asked again; a lost reply is looked for until the horizon."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0


async def pause_in_loop(seconds: float) -> None:
    """Let others run meanwhile."""
    await asyncio.sleep(seconds)


async def pause_by_hand(seconds: float) -> None:
    """Wait where no event loop runs this coroutine."""
    time.sleep(seconds)


def drive(operation: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that never suspends."""
    try:
        operation.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    operation.close()
    raise AssertionError("a backend that says that it does not wait has waited")


async def apply_again(
    table: TableId,
    segment: TableSegment,
    changes: Sequence[SegmentChange],
    token: bytes,
    *,
    first: TransientError,
    began: float,
    horizon: float,
    pause: Pause,
) -> None:
    """Repeat a write whose first attempt, `began` at that `time.monotonic()`, raised `first`, until it is settled.

    Raises OutcomeUnknownError where an attempt's reply was lost and time is out, or the table can't be asked any more;
    else what the last attempt raised, such as that the table is sealed.
    """
    errors: list[TransientError] = [first]
    lost: ReplyLostError | None = None

    async def attempt() -> None:
        nonlocal lost
        if lost is not None and time.monotonic() - began > horizon:
            raise lost  # the pause was longer than it should have been: the machine had stopped, or much to do
        try:
            if errors:
                raise errors.pop()
            await segment.apply(changes, token, repeated=lost is not None)
        except ReplyLostError as error:
            lost = error
            raise

    def is_over(state: RetryCallState) -> bool:
        return time.monotonic() + state.upcoming_sleep - began > (min(horizon, PATIENCE) if lost is None else horizon)

    try:
        await _retrying(is_over, pause)(attempt)
    except AdjunctError as error:
        # That the table is sealed, or not there any more, is said only of a write that was not applied.
        if lost is None or isinstance(error, KeyValueTableError):
            raise
        raise OutcomeUnknownError(
            f"key-value table {table}: a write of {len(changes):,} keys was sent, and whether it was applied could not "
            f"be found out in {time.monotonic() - began:.1f} s (asked for at most {horizon:g} s): {error}",
            "Read the keys before you write them again.",
            scope=table.scope,
            table=table.name,
        ) from error


async def read_again(request: Callable[[], Awaitable[T]], *, first: TransientError, began: float, pause: Pause) -> T:
    """Repeat a read whose first attempt raised `first`."""
    errors: list[TransientError] = [first]

    async def attempt() -> T:
        if errors:
            raise errors.pop()
        return await request()

    return await _retrying(lambda state: time.monotonic() + state.upcoming_sleep - began > PATIENCE, pause)(attempt)


def _retrying(is_over: Callable[[RetryCallState], bool], pause: Pause) -> AsyncRetrying:
    return AsyncRetrying(
        retry=retry_if_exception_type(TransientError),
        wait=wait_random_exponential(multiplier=_FIRST_PAUSE, max=_LONGEST_PAUSE),
        stop=is_over,
        sleep=pause,
        reraise=True,
    )

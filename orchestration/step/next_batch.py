"""What the next batch reads: of the bounded replays, or of the main input; at most so many records, shared by lag."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_adjunct.orchestration.batchlog.batch_log import Intent, Range
from dagster_adjunct.orchestration.operators.planning_values import BROADCAST
from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.startpoints.input_positions import InputPositions
    from dagster_adjunct.orchestration.step.step_context import StepContext
    from dagster_adjunct.resources.schemas.schema import Schema
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem

K = TypeVar("K", bound=Hashable)
Spans = Mapping[SystemStreamPartition, OffsetRange]


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A batch that is not begun: what it is to do, and when planning it began, by the monotonic clock.

    `records` are the columns of its input streams; None where they are not known.
    """

    intent: Intent
    began: float
    records: Mapping[str, Schema | None]


@dataclass(frozen=True, slots=True)
class NothingToRead:
    """The inputs are read up to these positions; `losses` are what retention took on the way there, in words."""

    positions: InputPositions
    losses: Sequence[str]


def replay_batch(
    context: StepContext,
    state: ApplicationState,
    positions: InputPositions,
) -> Intent | None:
    """Return a batch of the bounded replays; not two in a row while the main input has records."""
    replays = positions.replays
    if not replays:
        return None
    systems = context.systems
    just = state.last is not None and state.last.intent.replays and state.last.intent.batch == state.batch
    if just and not _all_empty(systems, positions.unread):
        return None
    shared = _shared(context, {ssp: OffsetRange(replay.next, replay.until) for ssp, replay in replays.items()})
    read = {ssp: replay for ssp, replay in replays.items() if not _all_empty(systems, {ssp: shared[ssp]})}
    return _intent(
        context,
        state,
        {ssp: shared[ssp] for ssp in read},
        replays={ssp: replay.id for ssp, replay in read.items()},
        epochs={ssp: replay.epoch for ssp, replay in read.items()},
    )


def main_batch(context: StepContext, state: ApplicationState, positions: InputPositions) -> Intent | None:
    """Return a batch of the main input, which applies the startpoints there; None where there is nothing to read."""
    shared = _shared(context, {ssp: positions.unread[ssp] for ssp in sorted(positions.unread)})
    if _all_empty(context.systems, shared):
        return None
    offsets, startpoints = state.offsets, positions.startpoints
    epochs = {ssp: offsets.next_epoch(ssp) if ssp in startpoints else offsets.epochs.get(ssp, 0) for ssp in shared}
    return _intent(
        context,
        state,
        shared,
        startpoints={ssp: start.id for ssp, start in startpoints.items()},
        epochs={ssp: epoch for ssp, epoch in epochs.items() if epoch},
        lost={ssp: Range(start=span.start, end=span.end) for ssp, span in positions.lost.items()},
    )


def spread(lags: Mapping[K, int], limit: int) -> dict[K, int]:
    """Share `limit` records among partitions in proportion to their lags; exact, never above a lag.

    Largest remainders get what rounding leaves, so that the sum is min(limit, all lags).
    """
    total = sum(lags.values())
    if total <= limit:
        return dict(lags)
    shares = {ssp: lag * limit // total for ssp, lag in lags.items()}
    left = limit - sum(shares.values())
    by_remainder = sorted(lags, key=lambda ssp: (-(lags[ssp] * limit % total), str(ssp)))
    for ssp in by_remainder[:left]:
        shares[ssp] += 1
    return shares


def _intent(context: StepContext, state: ApplicationState, ranges: Spans, **more: Any) -> Intent:
    broadcast = any(operator.spec.role in BROADCAST for operator in context.app.operators)
    return Intent(
        batch=state.batch + 1,
        run=context.run,
        clock=context.lake.now(),
        ranges={ssp: Range(start=span.start, end=span.end) for ssp, span in ranges.items()},
        versions={},
        tasks=len(context.plan.tasks) if broadcast else None,
        **more,
    )


def _shared(context: StepContext, spans: Spans) -> dict[SystemStreamPartition, OffsetRange]:
    """Return this batch's part of these offsets: at most the application's records a batch, shared by lag."""
    systems = context.systems
    lags = {ssp: systems[ssp.system].distance(ssp, span.start, span.end) for ssp, span in spans.items()}
    shares = spread(lags, context.app.max_batch_records)
    return {
        # The end itself, not its own way of writing it: a replay has ended when it is there.
        ssp: span
        if shares[ssp] == lags[ssp]
        else OffsetRange(span.start, systems[ssp.system].advance(ssp, span.start, shares[ssp]))
        for ssp, span in spans.items()
    }


def _all_empty(systems: Mapping[str, StreamSystem], spans: Spans) -> bool:
    """Whether nothing lies in any of them: only its system can tell whether two offsets are one."""
    return all(systems[ssp.system].compare(span.start, span.end) == 0 for ssp, span in spans.items())

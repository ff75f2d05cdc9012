"""What the next batch reads: of the bounded replays, or of the main input; at most so many records, shared by lag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.batchlog.batch_log import Intent, Range, add_counters, spread
from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.batchlog.stored_positions import Replay
    from dagster_adjunct.orchestration.startpoints.input_positions import InputPositions
    from dagster_adjunct.orchestration.step.step_context import StepContext
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem

Spans = Mapping[SystemStreamPartition, OffsetRange]


def replay_batch(
    context: StepContext,
    state: ApplicationState,
    positions: InputPositions,
    replays: Mapping[SystemStreamPartition, Replay],
) -> Intent | None:
    """Return a batch of these bounded replays; not two in a row while the main input has records."""
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


def records_in(systems: Mapping[str, StreamSystem], ranges: Mapping[SystemStreamPartition, OffsetRange | Range]) -> int:
    """Return how many records (or offsets, where their system counts these) lie in the ranges."""
    return sum(systems[ssp.system].distance(ssp, span.start, span.end) for ssp, span in ranges.items())


def lost_counters(
    systems: Mapping[str, StreamSystem], lost: Mapping[SystemStreamPartition, OffsetRange | Range]
) -> dict[str, dict[str, int]]:
    """Return the counters of what retention took, by stream."""
    counters: dict[str, dict[str, int]] = {}
    for ssp, span in lost.items():
        count = records_in(systems, {ssp: span})
        counters = add_counters(counters, {ssp.qualified_stream: {"lost_offsets": count}})
    return counters


def _intent(context: StepContext, state: ApplicationState, ranges: Spans, **more: Any) -> Intent:
    broadcast = any(source.broadcast for source in context.app.inputs.values())
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
    lags = {ssp: records_in(systems, {ssp: span}) for ssp, span in spans.items()}
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

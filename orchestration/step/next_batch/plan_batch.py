"""Plans the next batch: what it reads, of the bounded replays or of the main input.

It reads at most so many records, shared by lag. Nothing is committed, or held (`hold_versions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_adjunct.orchestration.batchlog.batch_log import Intent, Range
from dagster_adjunct.orchestration.operators.spec.planning_values import BROADCAST
from dagster_adjunct.orchestration.operators.spec.versions_met import RECORDED
from dagster_adjunct.orchestration.startpoints.positions.input_positions import input_positions, order_of_replay
from dagster_adjunct.orchestration.startpoints.positions.refused_positions import check_positions
from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.batchlog.stored_positions import Replay
    from dagster_adjunct.orchestration.startpoints.positions.input_positions import InputPositions
    from dagster_adjunct.orchestration.startpoints.resolving.recorded_plan import RecordedPiece, RecordedPlan
    from dagster_adjunct.orchestration.step.context.step_context import StepContext
    from dagster_adjunct.orchestration.step.next_batch.look_before_batch import Seen
    from dagster_adjunct.orchestration.step.opened_step.step_run import OpenedStep, StepRun
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem

K = TypeVar("K", bound=Hashable)
Spans = Mapping[SystemStreamPartition, OffsetRange]


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """What a batch is to do; only of recorded replays the versions that are met stand there already.

    `losses` are what retention took of its inputs, in words.
    """

    intent: Intent
    losses: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class NothingToRead:
    """The inputs are read up to these positions; `losses` are what retention took on the way there, in words."""

    positions: InputPositions
    losses: Sequence[str]


def plan_batch(step: OpenedStep, run: StepRun, seen: Seen) -> PlannedBatch | NothingToRead:
    """Return what the next batch is to do, over what was seen; commit nothing."""
    context, state = step.context, run.logged.state
    positions = input_positions(context.app, seen.streams, state, run.held or ())
    losses = check_positions(context.app, seen.streams, state.offsets, positions)
    intent = _replay_batch(context, state, positions, step.versions.plan_of)
    if intent is not None:
        return PlannedBatch(intent)
    intent = _main_batch(context, state, positions)
    return NothingToRead(positions, losses) if intent is None else PlannedBatch(intent, losses)


def _replay_batch(
    context: StepContext,
    state: ApplicationState,
    positions: InputPositions,
    plan_of: Callable[[Replay], RecordedPlan],
) -> Intent | None:
    """Return a batch of the bounded replays; not two in a row while the main input has records.

    Those that meet the same versions go together with the one that began first. Of recorded ones that is what one batch
    has read: it has the versions of that batch, and all others have none yet.
    """
    replays = positions.replays
    if not replays:
        return None
    systems = context.systems
    just = state.last is not None and state.last.intent.replays and state.last.intent.batch == state.batch
    if just and not _all_empty(systems, positions.unread):
        return None
    first = min(replays.values(), key=order_of_replay)
    if first.recorded is not None:
        return _recorded_batch(context, state, replays, plan_of(first))
    reading = first.versions
    replays = {ssp: replay for ssp, replay in replays.items() if replay.recorded is None and replay.versions == reading}
    shared = _shared(context, {ssp: OffsetRange(replay.next, replay.until) for ssp, replay in replays.items()})
    read = {ssp: replay for ssp, replay in replays.items() if not _all_empty(systems, {ssp: shared[ssp]})}
    return _intent(
        context,
        state,
        {ssp: shared[ssp] for ssp in read},
        replays={ssp: replay.id for ssp, replay in read.items()},
        epochs={ssp: replay.epoch for ssp, replay in read.items()},
        reading=reading,
    )


def _recorded_batch(
    context: StepContext,
    state: ApplicationState,
    replays: Mapping[SystemStreamPartition, Replay],
    plan: RecordedPlan,
) -> Intent:
    """Return the batch that reads what the earliest batch of this plan has read that is not read again yet."""

    def piece_of(replay: Replay) -> RecordedPiece | None:
        """Return the piece that a replay is in: the first whose end lies behind where it has come to."""
        compare = context.systems[replay.ssp.system].compare
        pieces = plan.pieces.get(replay.ssp, ())
        return next((piece for piece in pieces if compare(piece.end, replay.next) > 0), None)

    ours = {ssp: replay for ssp, replay in replays.items() if replay.recorded == plan.id}
    pieces = {ssp: piece for ssp, replay in ours.items() if (piece := piece_of(replay)) is not None}
    number = min(piece.batch for piece in pieces.values())
    read = {ssp: piece for ssp, piece in pieces.items() if piece.batch == number}
    return _intent(
        context,
        state,
        {ssp: OffsetRange(ours[ssp].next, piece.end) for ssp, piece in read.items()},
        replays={ssp: ours[ssp].id for ssp in read},
        epochs={ssp: ours[ssp].epoch for ssp in read},
        versions=plan.versions[number],
        over_time=plan.over_time.get(number, {}),
        reading=RECORDED,
    )


def _main_batch(context: StepContext, state: ApplicationState, positions: InputPositions) -> Intent | None:
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
        waiting=_waiting(context, positions.unread, shared),
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
        tasks=len(context.plan.tasks) if broadcast else None,
        **{"versions": {}, **more},
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


def _waiting(context: StepContext, unread: Spans, shared: Spans) -> tuple[SystemStreamPartition, ...]:
    """Return the partitions that could become idle, and have records that are not in this batch's part."""
    sources = context.app.inputs.values()
    timed = {
        source.stream
        for source in sources
        if source.event_time is not None and source.event_time.idle_after is not None
    }
    return tuple(
        ssp
        for ssp, span in sorted(unread.items())
        if ssp.qualified_stream in timed and context.systems[ssp.system].compare(shared[ssp].end, span.end) < 0
    )


def _all_empty(systems: Mapping[str, StreamSystem], spans: Spans) -> bool:
    """Whether nothing lies in any of them: only its system can tell whether two offsets are one."""
    return all(systems[ssp.system].compare(span.start, span.end) == 0 for ssp, span in spans.items())

"""Plans the next batch: the offsets that it reads, of bounded replays or of the main input, or of a batch left open.

A batch reads at most `max_batch_records` records, shared among partitions by lag. Nothing is committed or leased here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dagster_adjunct.assets.unbounded.local_table import undo_batch
from dagster_adjunct.assets.unbounded.state_table import maintain_state
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, Intent, Range, Replay
from dagster_adjunct.orchestration.maintenance.discard import discard
from dagster_adjunct.orchestration.operators.operator import BROADCAST
from dagster_adjunct.orchestration.operators.stream_facts import RECORDED
from dagster_adjunct.orchestration.startpoints.coordinator import start_run
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.startpoints.positions import (
    InputPositions,
    StreamSnapshot,
    check_open_batch,
    check_positions,
    describe_loss,
    input_positions,
    past_end_of_batch_error,
    replay_order,
    snapshot_streams,
)
from dagster_adjunct.orchestration.startpoints.recorded_replay import RecordedPiece, RecordedPlan, load_plans
from dagster_adjunct.orchestration.step.context import StepContext, StepResources, StepState
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.orchestration.step.versions import LeasedBatch, ServedVersions, read_served_versions
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import OffsetOutOfRangeError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import OffsetRange, StreamSystem, SystemStreamPartition


def store_first_positions(step: StepResources, run: StepState, seen: BatchSnapshot) -> StepState:
    """Return the state with a stored position for each partition, before anything is read; unchanged after the run's
    start.
    """
    if seen.handed is None:
        return run
    context = step.context
    logged = run.logged
    plans = load_plans(context.lake, context.app.name, seen.handed)
    start = start_run(context.app, seen.streams, step.tasks, seen.handed, logged.state, context.lake.now(), plans)
    if start.state != logged.state:
        logged = step.log.store_positions(logged, start.state, by=context.run, note="; ".join(start.carried) or None)
    if start.done:
        step.startpoints.remove_fan_outs(start.done)
    return replace(run, logged=logged, held=start.held).with_messages(context, start.messages)


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """The served dataset versions and a snapshot of each input stream, by name.

    `handed` is the part of this run's fan-out that is still there at its start; None after the start.
    """

    served: ServedVersions
    handed: FanOut | None
    streams: Mapping[str, StreamSnapshot]

    @property
    def schemas(self) -> dict[str, Schema | None]:
        """The columns of the input streams; None where they are not known."""
        return {name: snapshot.info.schema for name, snapshot in self.streams.items()}


def snapshot_inputs(step: StepResources, run: StepState) -> BatchSnapshot:
    """Return the snapshot over which the next batch is planned.

    Raises NoSealedVersionError for a dataset with `bootstrap` that has no version.
    """
    context = step.context
    served = read_served_versions(step)  # first: without a version, no position is stored either
    handed = context.fan_out.without_taken_back(step.startpoints.get_fan_outs()) if run.held is None else None
    return BatchSnapshot(served, handed, snapshot_streams(context.systems, context.app.inputs))


def maintain_local_tables(step: StepResources, run: StepState) -> None:
    """Undo what an abandoned batch wrote, and keep the state tables small."""
    if run.logged.state.given_up is not None:
        undo_abandoned_batch(step, run.logged.state.given_up)
    maintain_state_tables(step)


def undo_abandoned_batch(step: StepResources, batch: int) -> None:
    """Remove what an abandoned batch wrote from the application's local tables; safe to repeat.

    A state table is created before the first batch that writes it: where there is none, no batch has written.
    """
    app, runtime = step.context.app, step.context.runtime
    for dataset in app.datasets:
        if dataset.is_owned_by(app.name):
            undo_batch(runtime, dataset.name, app.name, batch, declared=dataset)
    for name in step.states:
        undo_batch(runtime, name, step.context.writer, batch)


def maintain_state_tables(step: StepResources) -> None:
    """Merge small generations of state tables where there are many, and delete unused files."""
    for name in step.states:
        if maintain_state(step.context.runtime, name):
            discard(step.context.lake, name, by=step.context.run)


K = TypeVar("K", bound=Hashable)
Spans = Mapping[SystemStreamPartition, OffsetRange]


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The planned intent of a batch; only recorded replays have their dataset versions already.

    `losses` describes what retention deleted of its inputs.
    """

    intent: Intent
    losses: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class NothingToRead:
    """The inputs have been read up to these positions; `losses` describes what retention deleted before them."""

    positions: InputPositions
    losses: Sequence[str]


def plan_batch(step: StepResources, run: StepState, seen: BatchSnapshot) -> PlannedBatch | NothingToRead:
    """Return the plan of the next batch over a snapshot; nothing is committed."""
    context, state = step.context, run.logged.state
    positions = input_positions(context.app, seen.streams, state, run.held or ())
    losses = check_positions(context.app, seen.streams, state.offsets, positions)
    intent = _plan_replay_batch(context, state, positions, step.versions.plan_of)
    if intent is not None:
        return PlannedBatch(intent)
    intent = _plan_main_batch(context, state, positions)
    return NothingToRead(positions, losses) if intent is None else PlannedBatch(intent, losses)


def _plan_replay_batch(
    context: StepContext,
    state: ApplicationState,
    positions: InputPositions,
    plan_of: Callable[[Replay], RecordedPlan],
) -> Intent | None:
    """Return a batch of bounded replays, or None; never two in a row while the main input has records.

    Replays with the same `versions` setting are read together with the one that began first. A batch of recorded
    replays reads what one earlier batch read, with the versions of that batch.
    """
    replays = positions.replays
    if not replays:
        return None
    systems = context.systems
    just = state.last is not None and state.last.intent.replays and state.last.intent.batch == state.batch
    if just and not _are_all_empty(systems, positions.unread):
        return None
    first = min(replays.values(), key=replay_order)
    if first.recorded is not None:
        return _plan_recorded_batch(context, state, replays, plan_of(first))
    reading = first.versions
    replays = {ssp: replay for ssp, replay in replays.items() if replay.recorded is None and replay.versions == reading}
    shared = _limit_ranges(context, {ssp: OffsetRange(replay.next, replay.until) for ssp, replay in replays.items()})
    read = {ssp: replay for ssp, replay in replays.items() if not _are_all_empty(systems, {ssp: shared[ssp]})}
    return _new_intent(
        context,
        state,
        {ssp: shared[ssp] for ssp in read},
        replays={ssp: replay.id for ssp, replay in read.items()},
        epochs={ssp: replay.epoch for ssp, replay in read.items()},
        reading=reading,
    )


def _plan_recorded_batch(
    context: StepContext,
    state: ApplicationState,
    replays: Mapping[SystemStreamPartition, Replay],
    plan: RecordedPlan,
) -> Intent:
    """Return a batch that reads what the earliest batch of this plan read and that is not replayed yet."""

    def piece_of(replay: Replay) -> RecordedPiece | None:
        """Return the current piece of a replay: the first that ends after its next offset."""
        compare = context.systems[replay.ssp.system].compare
        pieces = plan.pieces.get(replay.ssp, ())
        return next((piece for piece in pieces if compare(piece.end, replay.next) > 0), None)

    ours = {ssp: replay for ssp, replay in replays.items() if replay.recorded == plan.id}
    pieces = {ssp: piece for ssp, replay in ours.items() if (piece := piece_of(replay)) is not None}
    number = min(piece.batch for piece in pieces.values())
    read = {ssp: piece for ssp, piece in pieces.items() if piece.batch == number}
    return _new_intent(
        context,
        state,
        {ssp: OffsetRange(ours[ssp].next, piece.end) for ssp, piece in read.items()},
        replays={ssp: ours[ssp].id for ssp in read},
        epochs={ssp: ours[ssp].epoch for ssp in read},
        versions=plan.versions[number],
        over_time=plan.over_time.get(number, {}),
        reading=RECORDED,
    )


def _plan_main_batch(context: StepContext, state: ApplicationState, positions: InputPositions) -> Intent | None:
    """Return a batch of the main input, which applies the startpoints there; None if there is nothing to read."""
    shared = _limit_ranges(context, {ssp: positions.unread[ssp] for ssp in sorted(positions.unread)})
    if _are_all_empty(context.systems, shared):
        return None
    offsets, startpoints = state.offsets, positions.startpoints
    epochs = {ssp: offsets.next_epoch(ssp) if ssp in startpoints else offsets.epochs.get(ssp, 0) for ssp in shared}
    return _new_intent(
        context,
        state,
        shared,
        startpoints={ssp: start.id for ssp, start in startpoints.items()},
        epochs={ssp: epoch for ssp, epoch in epochs.items() if epoch},
        lost={ssp: Range(start=span.start, end=span.end) for ssp, span in positions.lost.items()},
        waiting=_find_waiting_partitions(context, positions.unread, shared),
    )


def share_by_lag(lags: Mapping[K, int], limit: int) -> dict[K, int]:
    """Share `limit` records among partitions in proportion to their lags; the sum is exactly min(limit, all lags).

    The largest remainders get what rounding leaves. No share exceeds its lag.
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


def _new_intent(context: StepContext, state: ApplicationState, ranges: Spans, **more: Any) -> Intent:
    broadcast = any(operator.spec.role in BROADCAST for operator in context.app.operators)
    return Intent(
        batch=state.batch + 1,
        run=context.run,
        clock=context.lake.now(),
        ranges={ssp: Range(start=span.start, end=span.end) for ssp, span in ranges.items()},
        tasks=len(context.plan.tasks) if broadcast else None,
        **{"versions": {}, **more},
    )


def _limit_ranges(context: StepContext, spans: Spans) -> dict[SystemStreamPartition, OffsetRange]:
    """Return this batch's part of these ranges: at most `max_batch_records` records, shared by lag."""
    systems = context.systems
    lags = {ssp: systems[ssp.system].distance(ssp, span.start, span.end) for ssp, span in spans.items()}
    shares = share_by_lag(lags, context.app.max_batch_records)
    return {
        # The end itself, not another notation of it: a replay ends at exactly this text.
        ssp: span
        if shares[ssp] == lags[ssp]
        else OffsetRange(span.start, systems[ssp.system].advance(ssp, span.start, shares[ssp]))
        for ssp, span in spans.items()
    }


def _find_waiting_partitions(context: StepContext, unread: Spans, shared: Spans) -> tuple[SystemStreamPartition, ...]:
    """Return the partitions that could become idle and have records after this batch's part."""
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


def _are_all_empty(systems: Mapping[str, StreamSystem], spans: Spans) -> bool:
    """Return whether all ranges are empty; only the system can compare two offsets."""
    return all(systems[ssp.system].compare(span.start, span.end) == 0 for ssp, span in spans.items())


def resume_open_batch(step: StepResources, run: StepState, left_open: Intent) -> LeasedBatch:
    """Return the batch that a crash left open, to be repeated by this run.

    Streams that the application no longer reads keep their positions. If retention has deleted records of the batch, it
    reads the rest, provided its inputs declare on_lost="oldest". Raises OffsetOutOfRangeError otherwise, or if a stream
    was recreated.
    """
    context = step.context
    ranges = {ssp: span for ssp, span in left_open.ranges.items() if ssp.qualified_stream in context.app.inputs}
    left_open = left_open.model_copy(update={"ranges": ranges, "run": context.run})
    _check_same_streams(context, run, left_open)
    gone = find_lost_ranges(context, left_open)
    if gone:
        resolved = run.logged.state.offsets.resolved
        oldest = {ssp for ssp in left_open.startpoints if ssp in resolved and resolved[ssp].position == "oldest"}
        lost = {ssp: span for ssp, span in gone.items() if ssp not in oldest}  # "oldest" loses nothing
        check_open_batch(context.app, left_open, lost)
        left_open = _truncate_batch(context, left_open, gone, lost)
    step.leases.take(left_open.versions, left_open.over_time, reopened=True)
    records = {
        name: context.systems[split_stream_name(name)[0]].info(split_stream_name(name)[1]).schema
        for name in context.app.inputs
    }
    return LeasedBatch(left_open, records)


def find_lost_ranges(context: StepContext, intent: Intent) -> dict[SystemStreamPartition, OffsetRange]:
    """Return the offsets of the batch that its streams no longer have: [its start, the oldest left).

    Raises OffsetOutOfRangeError if a stream ends before the batch does.
    """
    lost: dict[SystemStreamPartition, OffsetRange] = {}
    for name in sorted({ssp.qualified_stream for ssp in intent.ranges}):
        spans = {ssp: span for ssp, span in intent.ranges.items() if ssp.qualified_stream == name}
        system = context.systems[split_stream_name(name)[0]]
        oldest, upcoming = system.oldest(spans), system.upcoming(spans)
        for ssp, span in spans.items():
            if system.compare(span.end, upcoming[ssp]) > 0:
                raise past_end_of_batch_error(context.app, intent.batch, ssp, span.end, upcoming[ssp])
            if system.compare(span.start, oldest[ssp]) < 0:
                lost[ssp] = OffsetRange(span.start, oldest[ssp])
    return lost


def _truncate_batch(
    context: StepContext,
    intent: Intent,
    gone: dict[SystemStreamPartition, OffsetRange],
    lost: dict[SystemStreamPartition, OffsetRange],
) -> Intent:
    """Return the batch with the ranges that are left, and what is lost counted."""
    ranges, counted = dict(intent.ranges), dict(intent.lost)
    for ssp, span in gone.items():
        end = ranges[ssp].end
        whole = context.systems[ssp.system].compare(end, span.end) < 0
        ranges[ssp] = Range(start=span.end, end=span.end if whole else end)
    for ssp, span in lost.items():
        counted[ssp] = Range(start=counted[ssp].start if ssp in counted else span.start, end=span.end)
        text = describe_loss(ssp, span, f"batch {intent.batch}, which was open, at ")
        context.on_event(StepEvent("lost", intent.batch, {"text": text}))
    return intent.model_copy(update={"ranges": ranges, "lost": counted, "cut": True})


def _check_same_streams(context: StepContext, run: StepState, left_open: Intent) -> None:
    before, app = run.logged.state.offsets.streams, context.app.name
    for name, ssp in sorted({ssp.qualified_stream: ssp for ssp in left_open.ranges}.items()):
        identity, info = before.get(name), context.systems[ssp.system].info(ssp.stream)
        if info.was_recreated(identity):
            raise OffsetOutOfRangeError(
                f"{name} was {info.change_since(identity)} (its identity is {info.identity}, and was {identity}), and "
                f"batch {left_open.batch} of application {app!r}, which is open, reads the former stream.",
                f"Abandon the batch (adjunct checkpoint abandon {app} --reason …), then set a startpoint in the new "
                f"stream: adjunct startpoint set MODULE:APP {name} --oldest --reason ….",
                application=app,
                stream=name,
            )

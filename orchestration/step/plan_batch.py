"""Plans the next batch and leases the dataset versions that it reads; nothing is committed here but
first positions.

If a crash has left a batch open, that is the next one. Otherwise the batch reads bounded replays or
the main input, at most `max_batch_records` records, shared among partitions in proportion to their
lag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

from dagster_adjunct.assets.reading.changed_keys import VersionIds
from dagster_adjunct.assets.reading.served_over_time import ServedOverTime
from dagster_adjunct.assets.reading.stored_versions import current_manifests
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.local_table import (
    maintain_state,
    require_local_manifest,
    undo_batch,
)
from dagster_adjunct.assets.unbounded.progress import StreamPosition
from dagster_adjunct.assets.versions.manifest import (
    DatasetManifest,
    UnboundedManifest,
    as_unbounded,
)
from dagster_adjunct.assets.versions.watermark import known_until
from dagster_adjunct.orchestration.application.application import Application, list_own_tables
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, Replay
from dagster_adjunct.orchestration.batch_log.intent import (
    HeldTime,
    Intent,
    JoinedVersions,
    LeftRecords,
    LostRecords,
    Ranges,
    ReadVersions,
    Restating,
    ServedCommits,
)
from dagster_adjunct.orchestration.maintenance.expire import expire_versions
from dagster_adjunct.orchestration.operators.operator import BROADCAST
from dagster_adjunct.orchestration.operators.stream_facts import RECORDED
from dagster_adjunct.orchestration.operators.waiting import HeldRecord, list_waits
from dagster_adjunct.orchestration.startpoints.coordinator import start_run
from dagster_adjunct.orchestration.startpoints.due_restatements import (
    find_changes,
    find_due,
    list_versions_over_time,
)
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.startpoints.positions import (
    AskedApplication,
    InputPositions,
    StreamSnapshot,
    check_open_batch,
    check_positions,
    check_same_stream,
    describe_loss,
    input_positions,
    past_end_of_batch_error,
    replay_order,
    snapshot_streams,
)
from dagster_adjunct.orchestration.startpoints.recorded_plan import RecordedPiece, RecordedPlan
from dagster_adjunct.orchestration.startpoints.recorded_replay import load_plans, may_be_readable
from dagster_adjunct.orchestration.startpoints.replaced_rows import check_rows_replaceable
from dagster_adjunct.orchestration.startpoints.restatement import find_restatement
from dagster_adjunct.orchestration.step.context import BatchVersions, StepContext, StepState, View
from dagster_adjunct.orchestration.step.late_changes import pass_watermarks
from dagster_adjunct.orchestration.step.restated_places import ranges_of_places, store_places
from dagster_adjunct.orchestration.step.waiting import HeldRanges, Waiting, to_stored
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition
from dagster_adjunct.resources.threads import call_in_threads


@dataclass(frozen=True, slots=True)
class ServedVersions:
    """The served versions of stored datasets and state tables, when the next batch is planned.

    - `versions`: the id of each version; None where there is none.
    - `limited`: the manifests of datasets with a maximum staleness: version and offsets of one
      commit, so that the batch reads exactly what was found fresh.
    - `known`: the watermarks of datasets that records wait for, by join.
    - `waited`: the manifests of the datasets that records wait for and that follow changes.
    - `over_time`: all versions of the bounded datasets that are joined by time.
    """

    versions: dict[str, str | None]
    limited: Mapping[str, DatasetManifest | None]
    known: Mapping[str, datetime | None]
    waited: Mapping[str, UnboundedManifest]
    over_time: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """What the next batch is planned over.

    - `served`: the served versions of datasets and state tables.
    - `handed`: the part of this run's fan-out that is still stored at its start; None after the
      start.
    - `streams`: a snapshot of each input stream.
    - `changes`: the streams of changes of datasets by which results are restated; every change in
      them is in a version that is served, or has been.
    """

    served: ServedVersions
    handed: FanOut | None
    streams: Mapping[str, StreamSnapshot]
    changes: Mapping[str, StreamSnapshot]


@dataclass(frozen=True, slots=True)
class NextBatch:
    """The intent of a batch, and the snapshots of the input streams that it was planned over.

    The intent names dataset versions only once these are leased, except in a recorded replay, which
    has them from its plan. `losses` describes what retention deleted of the inputs.
    """

    intent: Intent
    streams: Mapping[str, StreamSnapshot]
    losses: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class NothingToRead:
    """The inputs have been read up to these positions; `losses` describes what retention deleted
    before them, and `held` has the records that wait for a dataset. `restates_later` is whether
    datasets have changed, and their joins let results follow only later.
    """

    positions: InputPositions
    losses: Sequence[str]
    held: tuple[HeldRecord, ...] = ()
    restates_later: bool = False


def maintain_local_tables(context: StepContext, state: ApplicationState) -> None:
    """Remove what an abandoned batch wrote to local tables, and keep the state tables small; safe
    to repeat.

    A state table is created before the first batch that writes it: if it does not exist, no batch
    has written to it.
    """
    app = context.app
    runtime = context.runtime
    if state.given_up is not None:
        for table in list_own_tables(app):
            undo_batch(runtime, table.name, app.name, state.given_up, declared=table)
        for name in context.states:
            undo_batch(runtime, name, context.writer, state.given_up)
    maintain_state_tables(context)


def maintain_state_tables(context: StepContext) -> None:
    """Merge small generations of state tables where there are many, and delete unused files."""
    for name in context.states:
        if maintain_state(context.runtime, name):
            expire_versions(context.lake, name, by=context.run)


def snapshot_inputs(context: StepContext, run: StepState) -> BatchSnapshot:
    """Return the snapshot over which the next batch is planned, and check that the run may
    continue.

    Raises NoSealedVersionError for a dataset with `bootstrap` that has no version, and an error for
    a local table whose declaration does not match what is stored.
    """

    # Changes are read before versions, so that the versions of a batch include its changes.
    changes = snapshot_changes(context)
    _, served, handed, streams = call_in_threads(
        context.check,
        partial(_open_served_versions, context),
        partial(_read_handed, context, run),
        partial(snapshot_streams, context.systems, context.app.inputs, context.at_once),
        at_once=context.at_once,
    )
    return BatchSnapshot(served, handed, streams, changes)


def _read_handed(context: StepContext, run: StepState) -> FanOut | None:
    """Return the part of this run's fan-out that is still stored; None after the run's start."""
    if run.unreadable is not None:
        return None
    return context.fan_out.without_taken_back(context.startpoints.get_fan_outs())


def snapshot_changes(context: StepContext) -> dict[str, StreamSnapshot]:
    """Return the streams of changes by which results are restated, of datasets with a version."""
    found: dict[str, StreamSnapshot] = {}
    for name in context.app.restated:
        with suppress(errors.StreamNotFoundError):
            found |= snapshot_streams(context.systems, [name], context.at_once)
    return found


def _open_served_versions(context: StepContext) -> ServedVersions:
    """Return the served versions, for which the run keeps open readers.

    Members of a version set are read in one snapshot. Raises NoSealedVersionError for a dataset
    with `bootstrap` that has no version, and an error for a local table whose declaration does not
    match what is stored.
    """
    app = context.app
    stored = context.versions.stored
    readers: dict[str, VersionReader | None] = {}
    limited: dict[str, DatasetManifest | None] = {}
    unlimited = {}
    own = list_own_tables(app)
    for dataset in app.datasets:
        name = dataset.name
        if not dataset.persistent or dataset in own:
            continue
        if name in app.max_staleness:  # the manifest is kept, to check how stale it is
            limited[name] = stored(name).manifest()
            readers[name] = stored(name).reader_of(limited[name])
        else:
            unlimited[name] = stored(name)
    for table in own:
        manifest = stored(table.name).manifest()
        if manifest is not None:
            manifest = require_local_manifest(manifest, table)
        readers[table.name] = stored(table.name).reader_of(manifest)
    manifests = current_manifests(unlimited)  # in one snapshot
    for name, manifest in manifests.items():
        readers[name] = unlimited[name].reader_of(manifest)
    _require_bootstrapped(context, readers)
    for name in context.states:
        readers[name] = stored(name).current()
    context.versions.keep(readers)
    versions: dict[str, str | None] = {}
    for name, reader in readers.items():
        versions[name] = None if reader is None else reader.version
    manifests |= limited
    return ServedVersions(
        versions=versions,
        limited=limited,
        known=_find_watermarks(app, manifests),
        waited=_list_waited(app, manifests),
        over_time=list_versions_over_time(app, manifests),
    )


def _require_bootstrapped(
    context: StepContext, readers: Mapping[str, VersionReader | None]
) -> None:
    """Raise NoSealedVersionError, which says what it waits for, for a dataset with `bootstrap` that
    has no version.
    """
    for name, reader in readers.items():
        if reader is None and context.app.dataset(name).bootstrap:
            context.versions.stored(name).require_current(context.systems)


def _find_watermarks(
    app: Application, manifests: Mapping[str, DatasetManifest | None]
) -> dict[str, datetime | None]:
    """Return, by join, the watermarks of the datasets that records wait for."""
    known = {}
    for wait in list_waits(app.operators):
        dataset = app.dataset(wait.dataset)
        known[wait.join] = known_until(dataset, manifests[wait.dataset], over_time=wait.over_time)
    return known


def _list_waited(
    app: Application, manifests: Mapping[str, DatasetManifest | None]
) -> dict[str, UnboundedManifest]:
    """Return the manifests of the datasets with changes that records wait for."""
    waited = {}
    for wait in list_waits(app.operators):
        manifest = manifests[wait.dataset]
        if isinstance(manifest, UnboundedManifest):
            waited[wait.dataset] = manifest
    return waited


def store_first_positions(context: StepContext, run: StepState, seen: BatchSnapshot) -> StepState:
    """At the start of a run, store a position for each input partition, before anything is read;
    later do nothing.

    Requests that this applies are removed from the fan-outs and reported. Returns the state after
    that.
    """
    if seen.handed is None:
        return run
    logged = run.logged
    plans = load_plans(context.lake, context.app.name, seen.handed)
    start = start_run(
        context.app,
        streams={**seen.streams, **seen.changes},
        tasks=context.tasks,
        fan_out=seen.handed,
        state=logged.state,
        now=context.lake.now(),
        plans=plans,
        is_first=context.earlier is None,
    )
    if start.state != logged.state:
        note = "; ".join(start.carried) if start.carried else None
        logged = context.log.commit(logged, start.state, by=context.run, note=note)
    if start.done:
        context.startpoints.remove_fan_outs(start.done)
    run = replace(run, logged=logged, unreadable=start.held)
    return run.with_messages(context, start.messages)


def plan_batch(
    context: StepContext, run: StepState, seen: BatchSnapshot
) -> NextBatch | NothingToRead:
    """Return the plan of the next batch over a snapshot; nothing is stored but the places of
    records to restate.

    Raises ConfigurationError if it would read records again whose rows in an output table could not
    be replaced, and the errors of `check_positions`, `_plan_restatement` and startpoints.
    """
    planned = _choose_batch(context, run, seen)
    if isinstance(planned, NextBatch):
        intent = planned.intent
        again = {ssp: span for ssp, span in intent.ranges.items() if intent.epochs.get(ssp)}
        check_rows_replaceable(
            context.app, context.plan, seen.streams, again, writer=context.writer
        )
    return planned


def _choose_batch(
    context: StepContext, run: StepState, seen: BatchSnapshot
) -> NextBatch | NothingToRead:
    """Return the plan of the next batch over a snapshot.

    Batches that read records again take turns with batches of the main input. When it is their
    turn, a restatement comes before a replay; when it is the turn of the main input and that has
    nothing to read, a replay comes before a restatement. Too much to restate is an error once
    nothing else is left to read.
    """
    state = run.logged.state
    streams = {**seen.streams, **seen.changes}
    unreadable = run.unreadable or frozenset()
    positions = input_positions(context.app, streams, state, unreadable)
    losses = check_positions(context.app, streams, state.offsets, positions)
    is_turn_of_main = state.has_just_read_again
    too_much = None
    if not is_turn_of_main:
        try:
            restatement = _plan_restatement(context, state, seen, positions)
        except errors.RestatementError as error:
            restatement = None
            too_much = error
        if restatement is not None:
            return NextBatch(restatement, seen.streams)
        if positions.replays:
            return NextBatch(_plan_replay_batch(context, state, positions), seen.streams)
    readable = _find_readable(context, seen, positions, state.waits.held)
    intent = _plan_main_batch(context, state, positions, readable)
    if intent is not None:
        return NextBatch(intent, seen.streams, losses)
    # The main input has nothing to read.
    if too_much is not None:
        raise too_much
    if is_turn_of_main:
        if positions.replays:
            return NextBatch(_plan_replay_batch(context, state, positions), seen.streams)
        restatement = _plan_restatement(context, state, seen, positions)
        if restatement is not None:
            return NextBatch(restatement, seen.streams)
    later = find_changes(context.app, state, positions, _list_served(context.app, seen.served))
    return NothingToRead(positions, losses, readable.held, restates_later=bool(later))


def _find_readable(
    context: StepContext,
    seen: BatchSnapshot,
    positions: InputPositions,
    stored: Mapping[SystemStreamPartition, HeldTime],
) -> HeldRanges:
    """Return what a batch of the main input may read, and what waits. `stored` has what the last
    batch found waiting.

    Where records of a partition wait, its share of the batch goes to the other partitions, so that
    the batch is no smaller.
    """
    unread = dict(sorted(positions.unread.items()))
    now = context.lake.now()
    waiting = Waiting(
        context.app,
        seen.streams,
        known=seen.served.known,
        now=now,
        spark=context.spark,
        stored=stored,
    )
    available = dict(unread)
    held: dict[SystemStreamPartition, HeldRecord] = {}
    limited = _limit_ranges(context, available)
    while True:  # until no further record waits in what the others may read instead
        held_back = waiting.hold_back(limited, unread)
        for record in held_back.held:
            held[record.ssp] = record
            available[record.ssp] = held_back.ranges[record.ssp]
        limited = _limit_ranges(context, available)
        if limited == held_back.ranges:
            return HeldRanges(limited, tuple(held.values()), held_back.early)


def _plan_restatement(
    context: StepContext, state: ApplicationState, seen: BatchSnapshot, positions: InputPositions
) -> Intent | None:
    """Return the intent of a batch that restates results; None if no changes of datasets are due.

    Without records to read again it has no ranges, and only moves the positions in the changes.
    Raises RestatementError if there is too much to restate.
    """
    served = _list_served(context.app, seen.served)
    changes = find_due(context.app, state, positions, served, context.lake.now())
    if not changes:
        return None
    refused = context.versions.refused
    due_changes = tuple(sorted(changes.items()))
    if due_changes in refused:  # this run has tried before to restate by the same changes
        raise refused[due_changes]
    now = context.lake.now()
    asked = AskedApplication(context.lake, context.systems, context.app, context.plan, state, now)
    try:
        due = find_restatement(asked, seen.streams, positions, changes, served)
    except errors.RestatementError as error:
        refused[due_changes] = error
        raise
    places = ""  # no object is stored if no record has a changed key
    if due.records:
        places = store_places(context, state.batch + 1, due.places)
    ranges = ranges_of_places(due.places)
    startpoints = {}
    for ssp, start in positions.startpoints.items():
        if ssp in changes:
            startpoints[ssp] = start.id
    return _new_intent(
        context,
        state,
        ranges,
        startpoints=startpoints,
        epochs={ssp: state.offsets.epochs.next_of(ssp) for ssp in ranges},
        restating=Restating(places=places, changes=changes, keys=due.keys, records=due.records),
    )


def _list_served(app: Application, served: ServedVersions) -> dict[str, VersionIds]:
    """Return the served versions of the datasets by whose later changes results are restated."""
    ids: dict[str, VersionIds] = {}
    for dataset in app.restated.values():
        name = dataset.name
        ids[name] = VersionIds(served.versions[name], served.over_time.get(name, ()))
    return ids


def _plan_replay_batch(
    context: StepContext, state: ApplicationState, positions: InputPositions
) -> Intent:
    """Return the intent of a batch of bounded replays, of which there are some.

    Replays with the same `versions` setting are read together with the one that began first. A
    batch of recorded replays reads what one earlier batch read, with the versions of that batch.
    """
    replays = positions.replays
    first = min(replays.values(), key=replay_order)
    if first.recorded is not None:
        return _plan_recorded_batch(context, state, replays, context.versions.plan_of(first))
    spans = {}
    for ssp, replay in replays.items():
        if replay.recorded is None and replay.versions == first.versions:
            spans[ssp] = OffsetRange(replay.next, replay.until)
    read = {}
    for ssp, span in _limit_ranges(context, spans).items():
        has_share = not _are_all_empty(context, {ssp: span})
        if has_share:
            read[ssp] = span
    joined = JoinedVersions(reading=first.versions)
    return _new_replay_intent(context, state, read, replays, joined)


def _plan_recorded_batch(
    context: StepContext,
    state: ApplicationState,
    replays: Mapping[SystemStreamPartition, Replay],
    plan: RecordedPlan,
) -> Intent:
    """Return the intent that repeats the earliest batch of this plan which is not replayed
    completely yet.
    """
    pieces: dict[SystemStreamPartition, RecordedPiece] = {}
    for ssp, replay in replays.items():
        if replay.recorded == plan.id:
            pieces[ssp] = _find_next_piece(context, plan, replay)
    number = min(piece.batch for piece in pieces.values())
    ranges = {}
    for ssp, piece in pieces.items():
        if piece.batch == number:
            ranges[ssp] = OffsetRange(replays[ssp].next, piece.end)
    return _new_replay_intent(context, state, ranges, replays, plan.versions[number])


def _find_next_piece(context: StepContext, plan: RecordedPlan, replay: Replay) -> RecordedPiece:
    """Return the first piece of the plan that the replay has not read to its end. A replay that has
    read all of its plan is not stored any more.
    """
    for piece in plan.pieces[replay.ssp]:
        if context.compare(replay.ssp, piece.end, replay.next) > 0:
            return piece
    raise AssertionError(f"{replay.describe()} has read all of its plan")


def _plan_main_batch(
    context: StepContext, state: ApplicationState, positions: InputPositions, readable: HeldRanges
) -> Intent | None:
    """Return the intent of a batch of what is readable of the main input, with its startpoints;
    None if that is empty.
    """
    unread = positions.unread
    ranges = readable.ranges
    if _are_all_empty(context, ranges):
        return None
    startpoints = {}
    for ssp, start in positions.startpoints.items():
        if ssp in unread:
            startpoints[ssp] = start.id
    epochs = {}
    not_idle = []  # although the batch may have no record of these partitions
    for ssp, span in ranges.items():
        if ssp in startpoints:
            epoch = state.offsets.epochs.next_of(ssp)
        else:
            epoch = state.offsets.epochs.main.get(ssp, 0)
        if epoch:
            epochs[ssp] = epoch
        time = context.app.inputs[ssp.qualified_stream].event_time
        may_be_idle = time is not None and time.idle_after is not None
        leaves_records = context.compare(ssp, span.end, unread[ssp].end) < 0
        if may_be_idle and leaves_records:
            not_idle.append(ssp)
    return _new_intent(
        context,
        state,
        ranges,
        startpoints=startpoints,
        epochs=epochs,
        lost=LostRecords(offsets=positions.lost),
        left=LeftRecords(waiting=tuple(not_idle), held=to_stored(context.app, readable.held)),
        joined=JoinedVersions(in_time=_list_in_time(context.app, readable)),
    )


def _list_in_time(app: Application, readable: HeldRanges) -> tuple[str, ...]:
    """Return the waiting joins none of whose records are read before their dataset is complete."""
    joins = [wait.join for wait in list_waits(app.operators)]
    return tuple(join for join in joins if join not in readable.early)


def share_by_lag(
    lags: Mapping[SystemStreamPartition, int], limit: int
) -> dict[SystemStreamPartition, int]:
    """Share `limit` records among partitions in proportion to their lags; the sum is exactly
    min(limit, all lags).

    The largest remainders get what rounding leaves. No share exceeds its lag; a share may be 0.
    """
    total = sum(lags.values())
    if total <= limit:
        return dict(lags)
    shares = {}
    remainders = []
    for ssp, lag in lags.items():
        shares[ssp], remainder = divmod(lag * limit, total)
        remainders.append((-remainder, str(ssp), ssp))
    left = limit - sum(shares.values())
    for _, _, ssp in sorted(remainders)[:left]:
        shares[ssp] += 1
    return shares


def _new_intent(
    context: StepContext, state: ApplicationState, ranges: Ranges, **more: Any
) -> Intent:
    """Return the intent of the next batch, which reads these ranges, with `more` of its fields."""
    broadcast = any(operator.spec.role in BROADCAST for operator in context.app.operators)
    return Intent(
        batch=state.batch + 1,
        run=context.run,
        clock=context.lake.now(),
        ranges=ranges,
        tasks=len(context.plan.tasks) if broadcast else None,
        **more,
    )


def _new_replay_intent(
    context: StepContext,
    state: ApplicationState,
    ranges: Ranges,
    replays: Mapping[SystemStreamPartition, Replay],
    joined: JoinedVersions,
) -> Intent:
    """Return the intent to read these ranges of the replays, with the dataset versions `joined`."""
    ids = {ssp: replays[ssp].id for ssp in ranges}
    epochs = {ssp: replays[ssp].epoch for ssp in ranges}
    return _new_intent(context, state, ranges, replays=ids, epochs=epochs, joined=joined)


def _limit_ranges(context: StepContext, spans: Ranges) -> Ranges:
    """Return this batch's part of these ranges: at most `max_batch_records` records, shared by
    lag.
    """
    limited = dict(spans)
    lags = context.count_offsets(spans)
    for ssp, share in share_by_lag(lags, context.app.max_batch_records).items():
        # A whole range keeps the text of its end: `advance` might write the same offset in another
        # way, but a replay ends only at exactly this text.
        is_whole = share == lags[ssp]
        if is_whole:
            continue
        start = spans[ssp].start
        end = context.systems[ssp.system].advance(ssp, start, share)
        if context.compare(ssp, end, spans[ssp].end) < 0:
            limited[ssp] = OffsetRange(start, end)
    return limited


def _are_all_empty(context: StepContext, spans: Ranges) -> bool:
    """Return whether all ranges are empty."""
    return all(context.compare(ssp, span.start, span.end) == 0 for ssp, span in spans.items())


def resume_open_batch(
    context: StepContext, state: ApplicationState, left_open: Intent
) -> NextBatch:
    """Return the batch that a crash left open, to be repeated by this run, with its versions
    leased.

    Streams that the application no longer reads keep their positions. If retention has deleted
    records of the batch, which is reported, it reads the rest, provided its inputs declare
    on_lost="oldest". Raises OffsetOutOfRangeError otherwise, or if a stream was recreated.
    """
    streams = snapshot_open_inputs(context, left_open, state.offsets.streams)
    ranges = {}
    for ssp, span in left_open.ranges.items():
        if ssp.qualified_stream in streams:
            ranges[ssp] = span
    left_open = left_open.model_copy(update={"ranges": ranges, "run": context.run})
    deleted = find_lost_ranges(context, left_open)
    if deleted:
        lost = dict(deleted)
        for ssp in left_open.startpoints:
            start = state.offsets.resolved.get(ssp)
            starts_at_oldest = start is not None and start.position == "oldest"
            if starts_at_oldest:
                lost.pop(ssp, None)  # nothing is lost: it was to read what is left
        check_open_batch(context.app, left_open, lost)
        left_open = _truncate_batch(context, left_open, deleted, lost)
    context.versions.lease(left_open.joined, reopened=True)
    return NextBatch(left_open, streams)


def snapshot_open_inputs(
    context: StepContext, intent: Intent, identities: Mapping[str, str]
) -> dict[str, StreamSnapshot]:
    """Return the inputs as they are now. Raises OffsetOutOfRangeError if one that the batch
    reads was recreated.
    """
    streams = snapshot_streams(context.systems, context.app.inputs, context.at_once)
    for name, stream in sorted(streams.items()):
        check_same_stream(context.app, intent, name, stream.info, identities.get(name))
    return streams


def find_lost_ranges(context: StepContext, intent: Intent) -> Ranges:
    """Return the offsets of the batch that its streams no longer have: [its start, the oldest
    left).

    Raises OffsetOutOfRangeError if a stream ends before the batch does.
    """
    lost: Ranges = {}
    for name in sorted(intent.streams):
        spans = intent.ranges_of(name)
        system = context.system_of(name)
        oldest = system.oldest(spans)
        upcoming = system.upcoming(spans)
        for ssp, span in spans.items():
            if system.compare(span.end, upcoming[ssp]) > 0:
                raise past_end_of_batch_error(
                    context.app, intent.batch, ssp, span.end, upcoming[ssp]
                )
            if system.compare(span.start, oldest[ssp]) < 0:
                lost[ssp] = OffsetRange(span.start, oldest[ssp])
    return lost


def _truncate_batch(context: StepContext, intent: Intent, deleted: Ranges, lost: Ranges) -> Intent:
    """Return the intent without the offsets that retention has `deleted`: a range that is deleted
    as a whole becomes empty, at the oldest offset that is left.

    Reports those of the deleted offsets that are `lost`, and counts them in the intent.
    """
    ranges = dict(intent.ranges)
    counted = dict(intent.lost.offsets)
    for ssp, span in deleted.items():
        end = ranges[ssp].end
        is_all_deleted = context.compare(ssp, end, span.end) < 0
        if is_all_deleted:
            end = span.end
        ranges[ssp] = OffsetRange(span.end, end)
    for ssp, span in lost.items():
        counted[ssp] = OffsetRange(counted.get(ssp, span).start, span.end)
        text = describe_loss(ssp, span, f"batch {intent.batch}, which was open, at ")
        context.report("lost", intent.batch, text=text)
    all_lost = LostRecords(offsets=counted, cut=True)
    return intent.model_copy(update={"ranges": ranges, "lost": all_lost})


def lease_versions(
    context: StepContext, state: ApplicationState, planned: NextBatch, seen: BatchSnapshot
) -> NextBatch:
    """Lease the versions that the planned batch reads, served or recorded; return the batch whose
    intent names them.

    Raises VersionDiscardedError if one was discarded since the snapshot or the recording,
    StaleDatasetError for a table behind its allowed staleness, and ConfigurationError for a dataset
    that a recorded batch did not read.
    """
    intent = planned.intent
    followed = _list_followed_versions(planned)
    joined = intent.joined.model_copy(update={"followed": followed})
    intent = intent.model_copy(update={"joined": joined})
    if joined.reading == RECORDED:
        joined = _lease_recorded(context, intent, seen.served)
    else:
        joined = _lease_served(context, state, joined, seen.served)
    for text in planned.losses:
        context.report("lost", intent.batch, text=text)
    return replace(planned, intent=intent.model_copy(update={"joined": joined}))


def _list_followed_versions(planned: NextBatch) -> dict[str, tuple[str, ...]]:
    """Return, by dataset, the versions between which the batch reads its changes."""
    followed: dict[str, tuple[str, ...]] = {}
    for name, stream in planned.streams.items():
        needed = stream.system.needed_versions(planned.intent.ranges_of(name))
        for dataset, versions in needed.items():
            earlier = followed.get(dataset, ())
            new = [version for version in versions if version not in earlier]
            followed[dataset] = (*earlier, *new)
    return followed


def _lease_served(
    context: StepContext, state: ApplicationState, joined: JoinedVersions, served: ServedVersions
) -> JoinedVersions:
    """Lease the served versions, and all other versions of bounded datasets that are joined by
    time.

    Tables that live for one run are brought up to date here, before the intent: a change that can't
    be applied would keep an open batch from ever finishing.
    """
    for name, manifest in served.limited.items():
        _check_fresh(context, name, manifest)
    commits = _find_served_commits(context, served)
    leased = joined.model_copy(
        update={"versions": served.versions, "over_time": dict(served.over_time), "served": commits}
    )
    context.versions.lease(leased)
    # Opened once they are leased. Of several versions with the same time only the one sealed last
    # is read.
    over_time = {}
    for name, ids in served.over_time.items():
        over_time[name] = context.versions.over_time(name, ids).versions
    versions: dict[str, str | None] = {}
    for dataset in context.app.datasets:
        if dataset.persistent:
            versions[dataset.name] = served.versions[dataset.name]
        else:
            versions[dataset.name] = _advance_transient(context, state, dataset.name)
    for name in context.states:
        versions[name] = served.versions[name]
    joined = joined.model_copy(
        update={
            "versions": versions,
            "over_time": over_time,
            "served": commits,
            "known": dict(served.known),
            "restated": _list_read_versions(context, state, versions, served.over_time),
        }
    )
    return pass_watermarks(context.app, joined, served.waited, state.waits.passed)


def _list_read_versions(
    context: StepContext,
    state: ApplicationState,
    versions: Mapping[str, str | None],
    over_time: Mapping[str, tuple[str, ...]],
) -> dict[str, ReadVersions]:
    """Return what the batch reads of each dataset whose later changes results follow.

    `versions` are the served ones by dataset, `over_time` those that are joined by time.
    """
    read = {}
    for dataset in context.app.restated.values():
        name = dataset.name
        view = context.versions.view(name, versions[name], state)
        if not isinstance(view, VersionReader):  # the dataset has no version yet
            read[name] = ReadVersions(version=None)
            continue
        base = None
        follows_changes = view.sealed.positioned
        if follows_changes:  # its first generation is the base, the others are deltas
            base = view.sealed.generations[0].folder
        read[name] = ReadVersions(
            version=view.sealed.id, over_time=over_time.get(name, ()), base=base
        )
    return read


def _find_served_commits(context: StepContext, served: ServedVersions) -> dict[str, ServedCommits]:
    """Return the commits that joins with what was known then look back to, by dataset; a dataset
    that serves nothing yet is left out.
    """
    found: dict[str, ServedCommits] = {}
    for name in list_known_then_datasets(context.app):
        version = served.versions.get(name)
        if version is None:
            continue
        columns = context.versions.columns_of(name, version)
        reader = context.versions.served_until_now(name, columns)
        if reader is not None:
            first, last = reader.commits
            found[name] = ServedCommits(first=first, last=last, versions=reader.leased)
    return found


def list_known_then_datasets(app: Application) -> list[str]:
    """Return the datasets of joins with versions="known-then", which get the entries that were
    served at the time of a record.
    """
    names = set()
    for operator in app.operators:
        match = operator.spec.match
        if match is not None and match.as_of is not None and match.as_of.known_then:
            names.add(str(match.dataset))
    return sorted(names)


def open_served(
    versions: BatchVersions, intent: Intent, views: Mapping[str, View]
) -> dict[str, ServedOverTime]:
    """Return readers of what datasets have served, as the intent names it, with the columns of the
    versions that the batch reads.
    """
    served = {}
    for name, commits in intent.joined.served.items():
        view = views.get(name)
        if isinstance(view, VersionReader):
            served[name] = versions.served(name, commits, view.sealed.named_columns)
    return served


def _check_fresh(context: StepContext, name: str, manifest: DatasetManifest | None) -> None:
    """Raise StaleDatasetError if a stored dataset is staler than the application allows."""
    limit = context.app.max_staleness[name]
    if manifest is None or manifest.version is None:
        raise errors.StaleDatasetError(
            f"dataset {name!r} has no entries yet, and its allowed staleness is {limit}.",
            f"Advance it (materialise its asset, or adjunct dataset advance {name} MODULE:APP).",
            dataset=name,
        )
    position = StreamPosition.of(context.systems, as_unbounded(manifest))
    position.raise_if_stale(name, limit, context.lake.now())


def _advance_transient(context: StepContext, state: ApplicationState, name: str) -> str | None:
    """Bring a table that lives for one run up to date, and report what has changed; return its
    version. Raises StaleDatasetError if it is then staler than the application allows.
    """
    table = context.versions.table(name, state)
    report = table.advance(context.spark)
    if report.action != "up-to-date":
        context.report("table", state.batch + 1, report=report)
    if name in context.app.max_staleness:
        table.raise_if_stale(context.app.max_staleness[name])
    return report.version


def _lease_recorded(context: StepContext, intent: Intent, served: ServedVersions) -> JoinedVersions:
    """Lease the versions of recorded replays, which the intent names already.

    State tables are read as they are served: they leave out records that were read before.
    """
    joined = intent.joined
    cancel = (
        f"Cancel it (adjunct startpoint clear MODULE:APP {min(intent.ranges)} --reason …) and ask"
        " again with "
    )
    joined = joined.model_copy(update={"versions": _list_recorded(context, joined, cancel)})
    # Versions that a discard spared for the plan may be read, although they can't be leased.
    for name in context.versions.lease(joined, reopened=True):
        manifest = context.versions.stored(name).require_manifest()
        for version in joined.list_all()[name]:
            if not may_be_readable(context.lake, manifest, version):
                raise errors.VersionDiscardedError(
                    f"a recorded replay can't continue: dataset {name!r}: version {version} is"
                    " gone, maybe erased.",
                    f"{cancel}versions=as-of, or current.",
                    dataset=name,
                    version=version,
                )
    states = {name: served.versions[name] for name in context.states}
    context.versions.lease(JoinedVersions(versions=states))
    return joined.model_copy(update={"versions": joined.versions | states})


def _list_recorded(
    context: StepContext, joined: JoinedVersions, cancel: str
) -> dict[str, str | None]:
    """Return the recorded version of each dataset of the application.

    Raises ConfigurationError for a dataset that the recorded batch did not read, or not as it was
    known then; its next step begins with `cancel`.
    """
    versions: dict[str, str | None] = {}
    for dataset in context.app.datasets:
        if dataset.name not in joined.versions:
            raise errors.ConfigurationError(
                "a recorded replay can't continue: the application now has dataset"
                f" {dataset.name!r}, which the recorded batch did not read.",
                f"{cancel}versions=current.",
                application=context.app.name,
                dataset=dataset.name,
            )
        versions[dataset.name] = joined.versions[dataset.name]
    for name in list_known_then_datasets(context.app):
        if versions[name] is not None and name not in joined.served:
            raise errors.ConfigurationError(
                f"a recorded replay can't continue: the application now joins dataset {name!r} as"
                " it was known then, which the recorded batch did not.",
                f"{cancel}versions=as-of.",
                application=context.app.name,
                dataset=name,
            )
    return versions

"""Plans the next batch and leases the dataset versions that it reads; nothing is committed here but
first positions.

If a crash has left a batch open, that is the next one. Otherwise the batch reads bounded replays or
the main input, at most `max_batch_records` records, shared among partitions in proportion to their
lag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dagster_adjunct.assets.reading.stored_versions import current_readers
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.local_table import (
    maintain_state,
    require_local_manifest,
    undo_batch,
)
from dagster_adjunct.assets.unbounded.progress import StreamPosition
from dagster_adjunct.assets.versions.manifest import DatasetManifest, as_bounded, as_unbounded
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, Intent, Replay
from dagster_adjunct.orchestration.maintenance.expire import expire_versions
from dagster_adjunct.orchestration.operators.operator import BROADCAST
from dagster_adjunct.orchestration.operators.stream_facts import RECORDED
from dagster_adjunct.orchestration.startpoints.coordinator import start_run
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.startpoints.positions import (
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
from dagster_adjunct.orchestration.startpoints.recorded_replay import (
    RecordedPiece,
    RecordedPlan,
    is_readable,
    load_plans,
)
from dagster_adjunct.orchestration.step.context import StepContext, StepState
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.store import requests_at_once
from dagster_adjunct.resources.streams.system import (
    OffsetRange,
    StreamSystem,
    SystemStreamPartition,
)
from dagster_adjunct.resources.threads import call_in_threads

Spans = Mapping[SystemStreamPartition, OffsetRange]


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """A snapshot of each input stream, and the ids of the served versions of stored datasets and
    state tables.

    The id is None where there is no version. `limited` has the manifests of datasets with a maximum
    staleness: version and offsets of one commit, so that the batch reads exactly what was found
    fresh. `handed` is the part of this run's fan-out that is still stored at its start; None after
    the start.
    """

    versions: Mapping[str, str | None]
    limited: Mapping[str, DatasetManifest | None]
    handed: FanOut | None
    streams: Mapping[str, StreamSnapshot]


@dataclass(frozen=True, slots=True)
class PlannedBatch:
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
    before them.
    """

    positions: InputPositions
    losses: Sequence[str]


def maintain_local_tables(context: StepContext, run: StepState) -> None:
    """Remove what an abandoned batch wrote to local tables, and keep the state tables small; safe
    to repeat.

    A state table is created before the first batch that writes it: where there is none, no batch
    has written.
    """
    app, runtime, abandoned = context.app, context.runtime, run.logged.state.given_up
    if abandoned is not None:
        for dataset in app.datasets:
            if dataset.is_owned_by(app.name):
                undo_batch(runtime, dataset.name, app.name, abandoned, declared=dataset)
        for name in context.states:
            undo_batch(runtime, name, context.writer, abandoned)
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

    def read_handed() -> FanOut | None:
        return (
            context.fan_out.without_taken_back(context.startpoints.get_fan_outs())
            if run.held is None
            else None
        )

    at_once = requests_at_once(context.lake.store)
    streams = partial(snapshot_streams, context.systems, context.app.inputs, at_once)
    _, (readers, limited), *rest = call_in_threads(
        context.check, partial(_open_versions, context), read_handed, streams, at_once=at_once
    )
    context.versions.keep(readers)
    versions = {
        name: None if reader is None else reader.version for name, reader in readers.items()
    }
    return BatchSnapshot(versions, limited, *rest)


def _open_versions(
    context: StepContext,
) -> tuple[dict[str, VersionReader | None], dict[str, DatasetManifest | None]]:
    """Return readers of the served versions, by dataset and state table, and the manifests of
    datasets with a maximum staleness. Members of a version set are read in one snapshot.
    """
    app, stored = context.app, context.versions.stored
    own = [dataset for dataset in app.datasets if dataset.is_owned_by(app.name)]
    others = [
        dataset.name
        for dataset in app.datasets
        if dataset.following.persistent and dataset not in own
    ]
    readers = current_readers(
        {name: stored(name) for name in others if name not in app.max_staleness}
    )
    limited = {name: stored(name).manifest() for name in others if name in app.max_staleness}
    readers |= {name: stored(name).reader_of(manifest) for name, manifest in limited.items()}
    for dataset in own:
        manifest = stored(dataset.name).manifest()
        local = None if manifest is None else require_local_manifest(manifest, dataset)
        readers[dataset.name] = stored(dataset.name).reader_of(local)
    for name, reader in readers.items():
        if reader is None and app.dataset(name).bootstrap:
            stored(name).require_current(
                context.systems
            )  # raises, saying what the dataset waits for
    return readers | {name: stored(name).current() for name in context.states}, limited


def store_first_positions(context: StepContext, run: StepState, seen: BatchSnapshot) -> StepState:
    """At the start of a run, store a position for each input partition, before anything is read;
    later do nothing.

    Returns the state after that.
    """
    if seen.handed is None:
        return run
    logged = run.logged
    plans = load_plans(context.lake, context.app.name, seen.handed)
    start = start_run(
        context.app,
        seen.streams,
        context.tasks,
        seen.handed,
        logged.state,
        context.lake.now(),
        plans,
        is_first=context.earlier is None,
    )
    if start.state != logged.state:
        logged = context.log.commit(
            logged, start.state, by=context.run, note="; ".join(start.carried) or None
        )
    if start.done:
        context.startpoints.remove_fan_outs(start.done)
    return replace(run, logged=logged, held=start.held).with_messages(context, start.messages)


def plan_batch(
    context: StepContext, run: StepState, seen: BatchSnapshot
) -> PlannedBatch | NothingToRead:
    """Return the plan of the next batch over a snapshot; nothing is committed."""
    state = run.logged.state
    positions = input_positions(context.app, seen.streams, state, run.held or ())
    losses = check_positions(context.app, seen.streams, state.offsets, positions)
    intent = _plan_replay_batch(context, state, positions)
    if intent is not None:
        return PlannedBatch(intent, seen.streams)
    intent = _plan_main_batch(context, state, positions)
    return (
        NothingToRead(positions, losses)
        if intent is None
        else PlannedBatch(intent, seen.streams, losses)
    )


def _plan_replay_batch(
    context: StepContext, state: ApplicationState, positions: InputPositions
) -> Intent | None:
    """Return the intent of a batch of bounded replays, or None; never two in a row while the main
    input has records.

    Replays with the same `versions` setting are read together with the one that began first. A
    batch of recorded replays reads what one earlier batch read, with the versions of that batch.
    """
    replays = positions.replays
    has_just_replayed = (
        state.last is not None
        and state.last.intent.replays
        and state.last.intent.batch == state.batch
    )
    if not replays or (has_just_replayed and not _are_all_empty(context.systems, positions.unread)):
        return None
    first = min(replays.values(), key=replay_order)
    if first.recorded is not None:
        return _plan_recorded_batch(context, state, replays, context.versions.plan_of(first))
    replays = {
        ssp: replay
        for ssp, replay in replays.items()
        if replay.recorded is None and replay.versions == first.versions
    }
    shared = _limit_ranges(
        context, {ssp: OffsetRange(replay.next, replay.until) for ssp, replay in replays.items()}
    )
    read = {
        ssp: replays[ssp]
        for ssp, span in shared.items()
        if not _are_all_empty(context.systems, {ssp: span})
    }
    return _new_intent(
        context,
        state,
        {ssp: shared[ssp] for ssp in read},
        replays={ssp: replay.id for ssp, replay in read.items()},
        epochs={ssp: replay.epoch for ssp, replay in read.items()},
        reading=first.versions,
    )


def _plan_recorded_batch(
    context: StepContext,
    state: ApplicationState,
    replays: Mapping[SystemStreamPartition, Replay],
    plan: RecordedPlan,
) -> Intent:
    """Return the intent that repeats the earliest batch of this plan which is not replayed
    completely yet.
    """

    def piece_of(replay: Replay) -> RecordedPiece | None:
        """Return the current piece of a replay: the first that ends after its next offset."""
        compare = context.systems[replay.ssp.system].compare
        pieces = plan.pieces.get(replay.ssp, ())
        return next((piece for piece in pieces if compare(piece.end, replay.next) > 0), None)

    of_plan = {ssp: replay for ssp, replay in replays.items() if replay.recorded == plan.id}
    pieces = {
        ssp: piece for ssp, replay in of_plan.items() if (piece := piece_of(replay)) is not None
    }
    number = min(piece.batch for piece in pieces.values())
    read = {ssp: piece for ssp, piece in pieces.items() if piece.batch == number}
    return _new_intent(
        context,
        state,
        {ssp: OffsetRange(of_plan[ssp].next, piece.end) for ssp, piece in read.items()},
        replays={ssp: of_plan[ssp].id for ssp in read},
        epochs={ssp: of_plan[ssp].epoch for ssp in read},
        versions=plan.versions[number],
        over_time=plan.over_time.get(number, {}),
        reading=RECORDED,
    )


def _plan_main_batch(
    context: StepContext, state: ApplicationState, positions: InputPositions
) -> Intent | None:
    """Return the intent of a batch of the main input, with its startpoints; None if there is
    nothing to read.
    """
    unread = dict(sorted(positions.unread.items()))
    shared = _limit_ranges(context, unread)
    if _are_all_empty(context.systems, shared):
        return None
    offsets, startpoints = state.offsets, positions.startpoints
    epochs = {
        ssp: offsets.next_epoch(ssp) if ssp in startpoints else offsets.epochs.get(ssp, 0)
        for ssp in shared
    }
    times = {name: source.event_time for name, source in context.app.inputs.items()}
    may_be_idle = {
        name for name, time in times.items() if time is not None and time.idle_after is not None
    }
    return _new_intent(
        context,
        state,
        shared,
        startpoints={ssp: start.id for ssp, start in startpoints.items()},
        epochs={ssp: epoch for ssp, epoch in epochs.items() if epoch},
        lost=dict(positions.lost),
        waiting=tuple(
            ssp
            for ssp, span in unread.items()
            if ssp.qualified_stream in may_be_idle
            and context.systems[ssp.system].compare(shared[ssp].end, span.end) < 0
        ),
    )


def share_by_lag(
    lags: Mapping[SystemStreamPartition, int], limit: int
) -> dict[SystemStreamPartition, int]:
    """Share `limit` records among partitions in proportion to their lags; the sum is exactly
    min(limit, all lags).

    The largest remainders get what rounding leaves. No share exceeds its lag.
    """
    total = sum(lags.values())
    if total <= limit:
        return dict(lags)
    shares = {ssp: lag * limit // total for ssp, lag in lags.items()}
    by_remainder = sorted(lags, key=lambda ssp: (-(lags[ssp] * limit % total), str(ssp)))
    for ssp in by_remainder[: limit - sum(shares.values())]:
        shares[ssp] += 1
    return shares


def _new_intent(
    context: StepContext,
    state: ApplicationState,
    ranges: dict[SystemStreamPartition, OffsetRange],
    **more: Any,
) -> Intent:
    broadcast = any(operator.spec.role in BROADCAST for operator in context.app.operators)
    return Intent(
        batch=state.batch + 1,
        run=context.run,
        clock=context.lake.now(),
        ranges=ranges,
        tasks=len(context.plan.tasks) if broadcast else None,
        **{"versions": {}, **more},
    )


def _limit_ranges(context: StepContext, spans: Spans) -> dict[SystemStreamPartition, OffsetRange]:
    """Return this batch's part of these ranges: at most `max_batch_records` records, shared by
    lag.
    """
    systems = context.systems
    lags = {
        ssp: systems[ssp.system].distance(ssp, span.start, span.end) for ssp, span in spans.items()
    }
    shares = share_by_lag(lags, context.app.max_batch_records)
    return {
        # `advance` might give another notation of the end, but a replay ends only at exactly this
        # text.
        ssp: (
            span
            if shares[ssp] == lags[ssp]
            else OffsetRange(span.start, systems[ssp.system].advance(ssp, span.start, shares[ssp]))
        )
        for ssp, span in spans.items()
    }


def _are_all_empty(systems: Mapping[str, StreamSystem], spans: Spans) -> bool:
    """Return whether all ranges are empty; only the system can compare two offsets."""
    return all(
        systems[ssp.system].compare(span.start, span.end) == 0 for ssp, span in spans.items()
    )


def resume_open_batch(context: StepContext, run: StepState, left_open: Intent) -> PlannedBatch:
    """Return the batch that a crash left open, to be repeated by this run, with its versions
    leased.

    Streams that the application no longer reads keep their positions. If retention has deleted
    records of the batch, it reads the rest, provided its inputs declare on_lost="oldest". Raises
    OffsetOutOfRangeError otherwise, or if a stream was recreated.
    """
    streams = snapshot_open_inputs(context, left_open, run.logged.state.offsets.streams)
    ranges = {
        ssp: span for ssp, span in left_open.ranges.items() if ssp.qualified_stream in streams
    }
    left_open = left_open.model_copy(update={"ranges": ranges, "run": context.run})
    deleted = find_lost_ranges(context, left_open)
    if deleted:
        resolved = run.logged.state.offsets.resolved
        oldest = {
            ssp
            for ssp in left_open.startpoints
            if ssp in resolved and resolved[ssp].position == "oldest"
        }
        lost = {
            ssp: span for ssp, span in deleted.items() if ssp not in oldest
        }  # "oldest" is what is left
        check_open_batch(context.app, left_open, lost)
        left_open = _truncate_batch(context, left_open, deleted, lost)
    context.versions.lease(left_open.versions, left_open.over_time, reopened=True)
    return PlannedBatch(left_open, streams)


def snapshot_open_inputs(
    context: StepContext, intent: Intent, identities: Mapping[str, str]
) -> dict[str, StreamSnapshot]:
    """Return the inputs as they are now. Raises OffsetOutOfRangeError if one that the batch
    reads was recreated.
    """
    streams = snapshot_streams(
        context.systems, context.app.inputs, requests_at_once(context.lake.store)
    )
    for name, stream in sorted(streams.items()):
        check_same_stream(context.app, intent, name, stream.info, identities.get(name))
    return streams


def find_lost_ranges(
    context: StepContext, intent: Intent
) -> dict[SystemStreamPartition, OffsetRange]:
    """Return the offsets of the batch that its streams no longer have: [its start, the oldest
    left).

    Raises OffsetOutOfRangeError if a stream ends before the batch does.
    """
    lost: dict[SystemStreamPartition, OffsetRange] = {}
    for name in sorted({ssp.qualified_stream for ssp in intent.ranges}):
        spans = {ssp: span for ssp, span in intent.ranges.items() if ssp.qualified_stream == name}
        system = context.systems[split_stream_name(name)[0]]
        oldest, upcoming = system.oldest(spans), system.upcoming(spans)
        for ssp, span in spans.items():
            if system.compare(span.end, upcoming[ssp]) > 0:
                raise past_end_of_batch_error(
                    context.app, intent.batch, ssp, span.end, upcoming[ssp]
                )
            if system.compare(span.start, oldest[ssp]) < 0:
                lost[ssp] = OffsetRange(span.start, oldest[ssp])
    return lost


def _truncate_batch(context: StepContext, intent: Intent, deleted: Spans, lost: Spans) -> Intent:
    """Return the intent without the offsets that retention has `deleted`; `lost` are those to
    report.
    """
    ranges, counted = dict(intent.ranges), dict(intent.lost)
    for ssp, span in deleted.items():
        end = ranges[ssp].end
        whole = context.systems[ssp.system].compare(end, span.end) < 0
        ranges[ssp] = OffsetRange(span.end, span.end if whole else end)
    for ssp, span in lost.items():
        counted[ssp] = OffsetRange(counted[ssp].start if ssp in counted else span.start, span.end)
        text = describe_loss(ssp, span, f"batch {intent.batch}, which was open, at ")
        context.on_event(StepEvent("lost", intent.batch, {"text": text}))
    return intent.model_copy(update={"ranges": ranges, "lost": counted, "cut": True})


def lease_versions(
    context: StepContext, run: StepState, planned: PlannedBatch, seen: BatchSnapshot
) -> PlannedBatch:
    """Lease the versions that the planned batch reads, served or recorded; return the batch whose
    intent names them.

    Raises VersionDiscardedError if one was discarded since the snapshot or the recording,
    StaleDatasetError for a table behind its allowed staleness, and ConfigurationError for a dataset
    that a recorded batch did not read.
    """
    if planned.intent.reading == RECORDED:
        intent = _lease_recorded(context, planned.intent, seen)
    else:
        intent = _lease_served(context, run.logged.state, planned.intent, seen)
    for text in planned.losses:
        context.on_event(StepEvent("lost", intent.batch, {"text": text}))
    return replace(planned, intent=intent)


def _lease_served(
    context: StepContext, state: ApplicationState, intent: Intent, seen: BatchSnapshot
) -> Intent:
    """Lease the served versions, and all other versions of bounded datasets that are joined by
    time.

    Tables that live for one run are brought up to date here, before the intent: a change that can't
    be applied would keep an open batch from ever finishing.
    """
    app, ids = context.app, dict(seen.versions)
    for name, manifest in seen.limited.items():
        limit = app.max_staleness[name]
        if manifest is None or manifest.version is None:
            raise errors.StaleDatasetError(
                f"dataset {name!r} has no entries yet, and its allowed staleness is {limit}.",
                "Advance it (materialise its asset, or adjunct dataset advance"
                f" {name} MODULE:APP).",
                dataset=name,
            )
        StreamPosition.of(context.systems, as_unbounded(manifest)).raise_if_stale(
            name, limit, context.lake.now()
        )
    matches = (operator.spec.match for operator in app.operators)
    joined = {match.dataset for match in matches if match and match.dataset and match.as_of}
    bounded = [
        name
        for name in sorted(joined)
        if not app.dataset(name).follows_changes and ids[name] is not None
    ]
    manifests = {
        name: as_bounded(context.versions.stored(name).require_manifest()) for name in bounded
    }
    retained = {name: manifest.versions_over_time for name, manifest in manifests.items()}
    context.versions.lease(ids, retained)
    # Opened once they are leased. Of several versions with the same time only the one sealed last
    # is read.
    over_time = {
        name: context.versions.over_time(name, versions).versions
        for name, versions in retained.items()
    }
    for dataset in app.datasets:
        if not dataset.following.persistent:
            table = context.versions.table(dataset.name, state)
            report = table.advance(context.spark)
            if report.action != "up-to-date":
                context.on_event(StepEvent("table", state.batch + 1, {"report": report}))
            if dataset.name in app.max_staleness:
                table.raise_if_stale(app.max_staleness[dataset.name])
            ids[dataset.name] = report.version
    names = (*(dataset.name for dataset in app.datasets), *context.states)
    return intent.model_copy(
        update={"versions": {name: ids[name] for name in names}, "over_time": over_time}
    )


def _lease_recorded(context: StepContext, intent: Intent, seen: BatchSnapshot) -> Intent:
    """Lease the versions of recorded replays, which the intent names already.

    State tables are read as they are served: they leave out records that were read before.
    """
    names = [dataset.name for dataset in context.app.datasets]
    cancel = (
        f"Cancel it (adjunct startpoint clear MODULE:APP {min(intent.ranges)} --reason …) and ask"
        " again with "
    )
    lacking = [name for name in names if name not in intent.versions]
    if lacking:
        raise errors.ConfigurationError(
            f"a recorded replay can't continue: the application now has dataset {lacking[0]!r},"
            " which the recorded batch did not read.",
            f"{cancel}versions=current.",
            application=context.app.name,
            dataset=lacking[0],
        )
    versions = {name: intent.versions[name] for name in names}
    # Versions that a discard spared for the plan may be read, although they can't be leased.
    for name in context.versions.lease(versions, intent.over_time, reopened=True):
        manifest = context.versions.stored(name).require_manifest()
        for version in intent.all_versions[name]:
            if not is_readable(context.lake, manifest, version):
                raise errors.VersionDiscardedError(
                    f"a recorded replay can't continue: dataset {name!r}: version {version} is"
                    " gone, maybe erased.",
                    f"{cancel}versions=as-of, or current.",
                    dataset=name,
                    version=version,
                )
    states = {name: seen.versions[name] for name in context.states}
    context.versions.lease(states, {})
    return intent.model_copy(update={"versions": versions | states})

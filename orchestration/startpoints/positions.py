"""Positions of input partitions: first positions, offsets of startpoints, and checks that
records there still exist.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, cached_property, cmp_to_key, partial
from typing import Any, Literal, NamedTuple, TypeAlias

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.reading.change_streams import commit_offset, followed_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    OffsetState,
    Replay,
    ResolvedStartpoint,
    replay_id,
)
from dagster_adjunct.orchestration.batch_log.intent import (
    Intent,
    Offsets,
    Ranges,
    of_stream,
    without_stream,
)
from dagster_adjunct.orchestration.operators.records import InputSpec
from dagster_adjunct.orchestration.operators.stream_facts import RECORDED, JoinVersions
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.startpoints.recorded_plan import RecordedPlan
from dagster_adjunct.orchestration.startpoints.request import (
    ReadingTasks,
    StartpointRequest,
    find_reading_tasks,
)
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    OffsetOutOfRangeError,
    PermanentError,
)
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.startpoint import (
    check_offset,
    describe_startpoint,
    resolve_startpoint_to_offset,
)
from dagster_adjunct.resources.streams.system import (
    OffsetRange,
    StreamInfo,
    StreamSystem,
    SystemStreamPartition,
)
from dagster_adjunct.resources.threads import map_in_threads

Plans: TypeAlias = Mapping[str, RecordedPlan | PermanentError]
"""The plans of recorded replays, by id. The error says why a plan can't be used any more."""


def choose_first_positions(
    app: Application,
    streams: Mapping[str, StreamSnapshot],
    state: ApplicationState,
    resolved: Mapping[SystemStreamPartition, ResolvedStartpoint],
    *,
    is_first: bool,
) -> Offsets:
    """Return the checkpoint to begin with for every input partition, also for those that have a
    startpoint.

    `resolved` are the startpoints; a recreated stream must have one at each partition, or be reset.
    Inputs to reset are reset by the first step of a run (`is_first`); later steps only reset
    recreated ones, or those with new partitions. Raises ConfigurationError for partitions that were
    added to a keyed stream, unless they have a startpoint.
    """
    positions: Offsets = {}
    for source in app.inputs.values():
        stream = streams[source.stream]
        kept = _keep_positions(source, stream, state, resolved, is_first=is_first)
        positions |= kept
        fresh = [ssp for ssp in stream.partitions if ssp not in kept]
        if kept and fresh:
            # All records of a partition that was added later are new, so it begins at the oldest,
            # whatever the default.
            _check_added(app, source, stream.info, set(fresh).difference(resolved))
            begins_at_oldest = True
        else:
            default = choose_default_offset(source, stream.info, stream.system)
            begins_at_oldest = default == "oldest"
        edges = stream.oldest if begins_at_oldest else stream.upcoming
        for ssp in fresh:
            positions[ssp] = edges[ssp]
    for name, dataset in app.restated.items():
        positions |= _choose_restated(name, dataset, streams.get(name), state, resolved)
    return positions


def _choose_restated(
    name: str,
    dataset: AdjunctDataset,
    stream: StreamSnapshot | None,
    state: ApplicationState,
    resolved: Mapping[SystemStreamPartition, ResolvedStartpoint],
) -> Offsets:
    """Return the positions in the changes of a dataset from which on results are restated.

    Positions that are stored stay, except in a recreated stream, which begins at its startpoints.
    The first position is the end of the changes; for a dataset without a version, whose stream is
    None, it is that nothing was served.
    """
    if stream is None:
        system, short = split_stream_name(name)
        ssps = [
            SystemStreamPartition(system, short, number)
            for number in range(dataset.partitions or 1)
        ]
        first = dict.fromkeys(ssps, commit_offset(0))
    elif stream.was_recreated(state.offsets):
        return {ssp: resolved[ssp].offset for ssp in stream.partitions}
    else:
        first = stream.upcoming
    return {ssp: state.checkpoint.get(ssp, offset) for ssp, offset in first.items()}


def find_furthest(
    state: ApplicationState,
    streams: Mapping[str, StreamSnapshot],
    moved: Collection[SystemStreamPartition],
) -> Offsets:
    """Return the end of all that the main position has read, by partition; only for partitions in
    which it is `moved` now, or was before.

    In other partitions this is the checkpoint. Nothing was read yet of a recreated stream.
    """
    furthest = dict(state.offsets.furthest)
    for ssp in (*state.offsets.furthest, *moved):
        stream = streams.get(ssp.qualified_stream)
        if stream is None:
            continue  # the application does not read it any more
        ends = [furthest.pop(ssp, None), state.checkpoint.get(ssp)]
        reached = [end for end in ends if end is not None]
        if reached and not stream.was_recreated(state.offsets):
            furthest[ssp] = max(reached, key=cmp_to_key(stream.system.compare))
    return furthest


def choose_default_offset(
    source: InputSpec, info: StreamInfo, system: StreamSystem
) -> Literal["oldest", "upcoming"]:
    """Return where a partition without checkpoint and startpoint begins: the first default that
    is set.
    """
    for default in (source.default_offset, info.default_offset, system.default_offset):
        if default:
            return default
    return "upcoming"


def _check_added(
    app: Application, source: InputSpec, info: StreamInfo, added: Collection[SystemStreamPartition]
) -> None:
    """Raise ConfigurationError if partitions were added to a keyed stream without startpoints."""
    if info.key and added:
        names = " ".join(map(str, sorted(added)))
        raise ConfigurationError(
            f"{names}: added to {source.stream}, which is partitioned by key"
            f" ({', '.join(info.key)}), after application {app.name!r} began to read it: records of"
            " one key are in two partitions now.",
            "Set a startpoint for each to accept that older records of such a key may be applied"
            f" after newer ones (adjunct startpoint set MODULE:APP {names} --oldest --reason …)."
            " Where that does harm, declare tables with newest_by, or let the records be sent into"
            " a new stream that has its partitions from the start.",
            application=app.name,
        )


class PastEnd(NamedTuple):
    """The position in a partition that ends before it, at `end`."""

    position: str
    end: str


class StuckReplay(NamedTuple):
    """A replay that can't continue, and why, as the end of a sentence."""

    replay: Replay
    why: str


@dataclass(frozen=True, slots=True)
class InputPositions:
    """Where reading continues, by partition of the input streams.

    `unread` are the offsets to read (an empty range if there are none), `changed` those in the
    changes of datasets by which results are restated, and `lost` the unread ones that retention has
    deleted. `startpoints` are those that the next batch applies, `replays` the bounded replays to
    continue. No batch can read `past_end` or `stuck_replays`, for which `check_positions` raises an
    error.
    """

    unread: Ranges = field(default_factory=dict)
    changed: Ranges = field(default_factory=dict)
    lost: Ranges = field(default_factory=dict)
    startpoints: dict[SystemStreamPartition, ResolvedStartpoint] = field(default_factory=dict)
    replays: dict[SystemStreamPartition, Replay] = field(default_factory=dict)
    past_end: dict[SystemStreamPartition, PastEnd] = field(default_factory=dict)
    stuck_replays: list[StuckReplay] = field(default_factory=list)


def _keep_positions(
    source: InputSpec,
    stream: StreamSnapshot,
    state: ApplicationState,
    resolved: Mapping[SystemStreamPartition, ResolvedStartpoint],
    *,
    is_first: bool,
) -> Offsets:
    """Return the positions that a stream keeps, by partition: its checkpoint, or the startpoints if
    it was recreated. Partitions without a checkpoint are left out.

    Nothing is kept if the input is to be reset: by the first step of a run, or because the stream
    was recreated or has new partitions.
    """
    was_recreated = stream.was_recreated(state.offsets)
    if was_recreated and not source.reset_offset:
        return {ssp: resolved[ssp].offset for ssp in stream.partitions}
    kept = {ssp: state.checkpoint[ssp] for ssp in stream.partitions if ssp in state.checkpoint}
    has_new_partitions = len(kept) < len(stream.partitions)
    is_reset = is_first or was_recreated or has_new_partitions
    if source.reset_offset and is_reset:
        return {}
    return kept


def input_positions(
    app: Application,
    streams: Mapping[str, StreamSnapshot],
    state: ApplicationState,
    held: Container[SystemStreamPartition] = (),
) -> InputPositions:
    """Return where reading continues in these streams, up to their current ends; partitions in
    `held` are not read.

    Partitions that were added since the start of the run wait for the next run.
    """
    positions = InputPositions()
    if app.startpoints:
        _add_replays(positions, streams, state)
    for stream in streams.values():
        if stream.was_recreated(state.offsets):
            continue  # the checkpoint has offsets of the former stream
        for ssp in stream.partitions:
            if ssp in state.checkpoint and ssp not in held:
                _add_position(positions, stream, ssp, state)
    for ssp in list(positions.unread):
        if ssp.qualified_stream in app.restated:
            positions.changed[ssp] = positions.unread.pop(ssp)
    return positions


def _add_replays(
    positions: InputPositions, streams: Mapping[str, StreamSnapshot], state: ApplicationState
) -> None:
    """Add the next replay of each partition, and if it can't continue, add it to the stuck ones."""
    for replay in sorted(state.offsets.replays.values(), key=replay_order):
        positions.replays.setdefault(replay.ssp, replay)
    for _, replay in sorted(positions.replays.items()):
        why = _describe_stuck(replay, streams)
        if why:
            positions.stuck_replays.append(StuckReplay(replay, why))


def _add_position(
    positions: InputPositions,
    stream: StreamSnapshot,
    ssp: SystemStreamPartition,
    state: ApplicationState,
) -> None:
    """Add the unread offsets of one partition: from its startpoint or checkpoint up to the end of
    the stream, or to where an abandoned batch ended. A position past the end is added as that.
    """
    startpoint = state.offsets.resolved.get(ssp)
    if startpoint is None:
        start = state.checkpoint[ssp]
    else:
        positions.startpoints[ssp] = startpoint
        start = startpoint.offset
    oldest = stream.oldest[ssp]
    upcoming = stream.upcoming[ssp]
    if stream.system.compare(start, upcoming) > 0:
        positions.past_end[ssp] = PastEnd(start, upcoming)
        return
    if stream.system.compare(start, oldest) < 0:
        wants_what_is_left = startpoint is not None and startpoint.position == "oldest"
        if not wants_what_is_left:
            positions.lost[ssp] = OffsetRange(start, oldest)
        start = oldest
    end = upcoming
    startpoint_id = None if startpoint is None else startpoint.id
    abandoned_ends = state.offsets.abandoned_ends(ssp, startpoint_id)
    if abandoned_ends and stream.system.compare(start, abandoned_ends[0]) < 0:
        end = abandoned_ends[0]
    positions.unread[ssp] = OffsetRange(start, end)


class ReplayOrder(NamedTuple):
    """The sort key of replays; the epoch comes late, as it increases when a batch is abandoned."""

    began_at: datetime
    plan: str
    epoch: int
    id: str


def replay_order(replay: Replay) -> ReplayOrder:
    """Return the sort key of a replay: those that began first come first, and replays of one plan
    are together.
    """
    return ReplayOrder(replay.began_at, replay.recorded or "", replay.epoch, replay.id)


def _describe_stuck(replay: Replay, streams: Mapping[str, StreamSnapshot]) -> str:
    """Return why a replay can't continue, as the end of a sentence; "" if it can."""
    ssp = replay.ssp
    stream = streams.get(ssp.qualified_stream)
    if stream is None:
        return f"the application does not read {ssp.qualified_stream} any more"
    if stream.info.was_recreated(replay.stream) or ssp not in stream.oldest:
        return "the stream was deleted and recreated"
    if stream.system.compare(replay.next, stream.oldest[ssp]) < 0:
        return f"retention has deleted its records: the oldest offset left is {stream.oldest[ssp]}"
    if stream.system.compare(replay.until, stream.upcoming[ssp]) > 0:
        return f"the stream ends before {stream.upcoming[ssp]}: it has lost records"
    return ""


_SHOWN = 5


def check_same_streams(
    app: Application,
    streams: Mapping[str, StreamSnapshot],
    known: OffsetState,
    resolved: Container[SystemStreamPartition] = (),
    reset: Container[str] = (),
) -> None:
    """Raise OffsetOutOfRangeError for an input stream that was recreated since the checkpoint
    (`known`) was made.

    Recreated streams are allowed if each partition has a startpoint in `resolved`, or if the stream
    is in `reset`.
    """
    for name, stream in streams.items():
        if name in reset or not stream.was_recreated(known):
            continue
        info = stream.info
        before = known.streams[name]
        without_startpoint = [str(ssp) for ssp in stream.partitions if ssp not in resolved]
        if without_startpoint:
            shown = ", ".join(without_startpoint[:3])
            more = ", …" if len(without_startpoint) > 3 else ""
            raise OffsetOutOfRangeError(
                f"{name} was {info.change_since(before)} (its identity is {info.identity}, and was"
                f" {before}): the checkpoint of application {app.name!r} is of the former stream,"
                f" in {shown}{more}.",
                _describe_new_start(app, name, info, before),
                application=app.name,
                stream=name,
            )


def check_positions(
    app: Application,
    streams: Mapping[str, StreamSnapshot],
    known: OffsetState,
    positions: InputPositions,
) -> list[str]:
    """Raise OffsetOutOfRangeError if an input or a bounded replay can't continue at its position.

    If retention has deleted unread records of an input that declares on_lost="oldest", there is no
    error: the result has a line for each such partition.
    """
    check_same_streams(app, streams, known)
    for ssp, past_end in positions.past_end.items():
        if ssp in positions.startpoints:
            reader = f"{_describe_owner(positions.startpoints[ssp])} at "
        else:
            reader = f"application {app.name!r} continues at "
        raise _past_end_error(app, ssp, past_end, reader, "Restore the stream, or")
    for source in app.inputs.values():
        lost = of_stream(positions.lost, source.stream)
        if lost and source.on_lost != "oldest":
            raise _retention_error(app, source.stream, lost, positions.startpoints)
    for replay, why in positions.stuck_replays:
        stream = streams.get(replay.ssp.qualified_stream)
        is_there = stream is not None and replay.ssp in stream.partitions
        which = str(replay.ssp) if is_there else "--all"
        raise offset_error(
            replay.ssp,
            f"{replay.ssp}: the replay of {replay.by} ({replay.reason}) is at offset"
            f" {replay.next} of {replay.until} and can't continue: {why}.",
            f"Cancel it (adjunct startpoint clear MODULE:APP {which} --reason …), then request it"
            " again from an existing offset.",
            offset=replay.next,
            application=app.name,
        )
    losses = []
    for ssp, span in sorted(positions.lost.items()):
        whose = ""
        if ssp in positions.startpoints:
            whose = f"{_describe_owner(positions.startpoints[ssp])} at "
        losses.append(describe_loss(ssp, span, whose))
    return losses


def describe_loss(ssp: SystemStreamPartition, span: OffsetRange, whose: str = "") -> str:
    """Return a line on the unread offsets (`span`) that retention has deleted. `whose` says who
    begins there, and ends with "at "; "" for the checkpoint.
    """
    return (
        f"{ssp}: retention has deleted {whose}offset {span.start}; the input continues from"
        f" {span.end}, the oldest left"
    )


def check_same_stream(
    app: Application, intent: Intent, stream: str, info: StreamInfo, identity: str | None
) -> None:
    """Raise OffsetOutOfRangeError if an open batch reads this stream, and its identity is no
    longer this one.
    """
    if info.was_recreated(identity) and stream in intent.streams:
        raise OffsetOutOfRangeError(
            f"{stream} was {info.change_since(identity)} (its identity is {info.identity}, and was"
            f" {identity}), and the open batch {intent.batch} of application {app.name!r} reads the"
            " former stream.",
            f"Abandon the batch (adjunct checkpoint abandon {app.name} --reason …), then set a"
            f" startpoint in the new stream: adjunct startpoint set MODULE:APP {stream} --oldest"
            " --reason ….",
            application=app.name,
            stream=stream,
        )


def check_open_batch(app: Application, intent: Intent, lost: Ranges) -> None:
    """Raise OffsetOutOfRangeError if an open batch can't finish without records that retention has
    deleted (`lost`).

    A batch can finish without them if the inputs declare on_lost="oldest", but not if it reads
    records again.
    """
    refused = {}
    for ssp, span in sorted(lost.items()):
        if intent.reads_again or app.inputs[ssp.qualified_stream].on_lost != "oldest":
            refused[ssp] = span
    if not refused:
        return
    first = min(refused)
    of_first_stream = of_stream(refused, first.qualified_stream)
    which = _name_partitions(of_first_stream)
    give_up = f"adjunct checkpoint abandon {app.name} --reason …"
    if intent.restating is not None:
        step = (
            f"Abandon the batch: {give_up}. The next run restates the results of the records that"
            " are left."
        )
    elif intent.replays:
        step = (
            f"Abandon the batch ({give_up}), then cancel the replay (adjunct startpoint clear"
            f" MODULE:APP {which} --reason …) and request it again from an existing offset."
        )
    else:
        step = (
            'Declare on_lost="oldest" at the input stream: the next run then ends the batch with'
            f" what is left, and counts what is lost. Or give the batch up ({give_up}) and accept"
            f" the loss once: adjunct startpoint set MODULE:APP {which} --oldest --reason …. A"
            " startpoint alone changes nothing while the batch is open."
        )
    raise offset_error(
        first,
        f"retention has deleted records of the open batch {intent.batch} of application"
        f" {app.name!r}: {_describe_spans(of_first_stream)}.",
        step,
        application=app.name,
        offset=lost[first].start,
        oldest=lost[first].end,
    )


def _name_partitions(ssps: Collection[SystemStreamPartition]) -> str:
    """Return partitions of one stream as users name them: "lake.flights.0,3"."""
    numbers = ",".join(str(ssp.partition) for ssp in ssps)
    return f"{min(ssps).qualified_stream}.{numbers}"


def past_end_of_batch_error(
    app: Application, batch: int, ssp: SystemStreamPartition, end: str, upcoming: str
) -> OffsetOutOfRangeError:
    """Return the error for an open batch that reads up to `end` in a stream that ends before
    (`upcoming`).
    """
    reader = f"the open batch {batch} of application {app.name!r} reads up to "
    restore = (
        f"Restore the stream; or abandon the batch (adjunct checkpoint abandon {app.name} --reason"
        " …), then"
    )
    return _past_end_error(app, ssp, PastEnd(end, upcoming), reader, restore)


def _past_end_error(
    app: Application, ssp: SystemStreamPartition, past_end: PastEnd, reader: str, restore: str
) -> OffsetOutOfRangeError:
    """Return the error for a position after the end of its partition; `reader` ends before the
    offset, `restore` begins the next step.
    """
    return offset_error(
        ssp,
        f"{ssp}: {reader}offset {past_end.position}, and the stream ends before {past_end.end}: it"
        " has lost records, or is a different stream.",
        f"{restore} set a startpoint: adjunct startpoint set MODULE:APP {ssp} --oldest --reason ….",
        offset=past_end.position,
        application=app.name,
        upcoming=past_end.end,
    )


def _retention_error(
    app: Application,
    stream: str,
    lost: Ranges,
    startpoints: Mapping[SystemStreamPartition, ResolvedStartpoint],
) -> OffsetOutOfRangeError:
    """Return the error for unread records of one stream that retention has deleted (`lost`).

    It is about those after the checkpoint, or about those after startpoints if there are no others.
    """
    owners = []
    after_checkpoint = {}
    after_startpoint = {}
    for ssp, span in sorted(lost.items()):
        if ssp in startpoints:
            owners.append(_describe_owner(startpoints[ssp]))
            after_startpoint[ssp] = span
        else:
            after_checkpoint[ssp] = span
    described = after_checkpoint or after_startpoint
    shown = _describe_spans(described)
    which = _name_partitions(described)
    oldest = f"adjunct startpoint set MODULE:APP {which} --oldest --reason …"
    if after_checkpoint:
        return OffsetOutOfRangeError(
            f"retention has passed the checkpoint of application {app.name!r} in {shown}: the"
            " records in between are lost.",
            f'Accept the loss once ({oldest}), or for good: declare on_lost="oldest" at the input'
            " stream, which counts what is lost. To lose nothing, deliver the records again; then"
            " give the stream a longer retention.",
            application=app.name,
            stream=stream,
        )
    shown_owners = "; ".join(dict.fromkeys(owners[:_SHOWN]))
    return OffsetOutOfRangeError(
        f"retention has passed {shown_owners} in {shown}, since its"
        " offset was found: the records in between are lost.",
        f"Begin at the oldest record left ({oldest}), or cancel the startpoint: adjunct"
        f" startpoint clear MODULE:APP {which} --reason ….",
        application=app.name,
        stream=stream,
    )


def _describe_spans(lost: Ranges) -> str:
    """Return the offsets that retention has deleted, of the first partitions, as text."""
    spans = [
        f"{ssp} (at offset {span.start}, the oldest left is {span.end})"
        for ssp, span in lost.items()
    ]
    text = ", ".join(spans[:_SHOWN])
    if len(spans) > _SHOWN:
        text += f" and {len(spans) - _SHOWN} more partitions"
    return text


def _describe_owner(startpoint: ResolvedStartpoint) -> str:
    """Return whose startpoint it is, and why."""
    return f"the startpoint {startpoint.position} of {startpoint.by} ({startpoint.reason})"


def _describe_new_start(app: Application, stream: str, info: StreamInfo, before: str) -> str:
    """Return the next step for a recreated stream, whose identity was `before`: how to say where to
    begin, or to run again if it was only repartitioned.
    """
    if stream in app.restated:
        return (
            "Say from when on results are to follow its changes: adjunct startpoint set MODULE:APP"
            f" {stream} --timestamp TIME --reason …, or --upcoming for later changes only."
        )
    begin = (
        f"Set a startpoint in the new stream: adjunct startpoint set MODULE:APP {stream} --oldest"
        " --reason …."
    )
    if followed_dataset(stream) is not None:
        begin = (
            "Empty what follows it, or send to new tables and streams, because rows that were"
            f" deleted since would stay. {begin}"
        )
    if not info.was_repartitioned(before):
        return begin
    return (
        f"Run again: a reader that had read all of the former stream continues. Otherwise: {begin}"
    )


class CarriedOver(NamedTuple):
    """A state whose positions were carried over to repartitioned streams, and a note for each of
    these.
    """

    state: ApplicationState
    notes: tuple[str, ...]


def carry_over_positions(
    state: ApplicationState, streams: Mapping[str, StreamSnapshot]
) -> CarriedOver:
    """Return the state with its positions carried over to streams that were repartitioned."""
    notes: list[str] = []
    for name, stream in streams.items():
        carried = carry_over_stream(state, name, stream.info)
        if carried is not None:
            state = carried
            notes.append(describe_carry_over(name, stream.info))
    return CarriedOver(state, tuple(notes))


def carry_over_stream(
    state: ApplicationState, stream: str, info: StreamInfo
) -> ApplicationState | None:
    """Return the state with its positions in the repartitioned stream ("lake.orders"): at the first
    later records.

    None if the stream was not repartitioned, if the application had not read exactly all of it
    before, or has pending startpoints or replays there. All partitions continue with the highest
    epoch that any of them had.
    """
    rewritten = info.repartitioned
    offsets = state.offsets
    if rewritten is None or info.identity is None:
        return None
    if offsets.streams.get(stream) != rewritten.identity:
        return None
    if of_stream(state.checkpoint, stream) != _by_partition(stream, rewritten.ended):
        return None
    if has_pending_startpoints(state, stream):
        return None
    continued = _by_partition(stream, rewritten.continued_at)
    update = {
        "skipped": without_stream(offsets.skipped, stream) | _skip_rewritten(stream, continued),
        "streams": {**offsets.streams, stream: info.identity},
        "applied": without_stream(offsets.applied, stream),
        "furthest": without_stream(offsets.furthest, stream),
        "epochs": offsets.epochs.carry_over(stream, continued),
    }
    return state.model_copy(
        update={
            "checkpoint": without_stream(state.checkpoint, stream) | continued,
            "offsets": offsets.model_copy(update=update),
            "times": state.times.carry_over(stream, continued),
        }
    )


def _skip_rewritten(
    stream: str, continued: Offsets
) -> dict[SystemStreamPartition, tuple[tuple[int, int], ...]]:
    """Return the offsets whose results can't be restated in a repartitioned stream: all before
    those at which reading is `continued`, because results were made of records at other offsets. {}
    for changes of datasets, of whose records no results are restated.
    """
    if followed_dataset(stream) is not None:
        return {}
    skipped: dict[SystemStreamPartition, tuple[tuple[int, int], ...]] = {}
    for ssp, offset in continued.items():
        if offset.isdecimal() and int(offset):
            skipped[ssp] = ((0, int(offset)),)
    return skipped


def describe_carry_over(stream: str, info: StreamInfo) -> str:
    """Return the note on a stream whose positions were carried over, for the checkpoint history."""
    return f"{stream} was repartitioned into {info.partitions}: continues where it had read to"


def has_pending_startpoints(state: ApplicationState, stream: str) -> bool:
    """Return whether a resolved startpoint or a replay is on the partitions of the stream."""
    pending = {ssp.qualified_stream for ssp in state.offsets.resolved}
    pending |= {replay.ssp.qualified_stream for replay in state.offsets.replays.values()}
    return stream in pending


def _by_partition(stream: str, offsets: Iterable[str]) -> Offsets:
    """Return offsets, given in the order of the stream's partitions, by partition."""
    system, name = split_stream_name(stream)
    return {
        SystemStreamPartition(system, name, number): offset for number, offset in enumerate(offsets)
    }


def offset_error(
    ssp: SystemStreamPartition, problem: str, next_step: str, **facts: Any
) -> OffsetOutOfRangeError:
    """Return the error for a partition's offset, with the stream and partition as facts."""
    return OffsetOutOfRangeError(
        problem, next_step, stream=ssp.qualified_stream, partition=ssp.partition, **facts
    )


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """A snapshot of one stream ("lake.flights"): its info, and the oldest and the upcoming offset
    of each partition.

    `system` is the stream system as of the snapshot, which compares offsets and finds offsets of
    times.
    """

    name: str
    system: StreamSystem
    info: StreamInfo
    partitions: tuple[SystemStreamPartition, ...]
    oldest: Offsets
    upcoming: Offsets

    def was_recreated(self, known: OffsetState) -> bool:
        """Return whether these positions are of a former stream of the name."""
        return self.info.was_recreated(known.streams.get(self.name))


def snapshot_stream(systems: Mapping[str, StreamSystem], stream: str) -> StreamSnapshot:
    """Return a stream as it is now. Raises StreamNotFoundError, and ConfigurationError for an
    invalid offset.
    """
    system_name, name = split_stream_name(stream)
    system = systems[system_name].snapshot(name)
    info = system.info(name)
    ssps = tuple(
        SystemStreamPartition(system_name, name, number) for number in range(info.partitions)
    )

    def checked(which: str, answers: Offsets) -> Offsets:
        """Return the `which` offset of each partition from the answers of the stream system. Raises
        ConfigurationError for an invalid or missing one.
        """
        what = f"asked for its {which} offset"
        return {ssp: check_offset(system, ssp, answers.get(ssp), what) for ssp in ssps}

    oldest = checked("oldest", system.oldest(ssps))
    upcoming = checked("upcoming", system.upcoming(ssps))
    return StreamSnapshot(stream, system, info, ssps, oldest, upcoming)


def snapshot_streams(
    systems: Mapping[str, StreamSystem], streams: Iterable[str], at_once: int
) -> dict[str, StreamSnapshot]:
    """Return these streams as they are now, by name, from up to `at_once` concurrent requests."""
    snapshots = map_in_threads(partial(snapshot_stream, systems), streams, at_once)
    return {stream.name: stream for stream in snapshots}


@dataclass(frozen=True)
class AskedApplication:
    """The application that startpoints are requested of: its plan (None without inputs), its state,
    and its streams as they are now, each looked at once.
    """

    lake: Lake
    systems: Mapping[str, StreamSystem]
    app: Application
    plan: ExecutionPlan | None
    state: ApplicationState
    at: datetime

    @cached_property
    def readers(self) -> ReadingTasks:
        """The partitions that each task reads."""
        return find_reading_tasks(self.app, self.plan, self.systems)

    @cached_property
    def snapshot(self) -> Callable[[str], StreamSnapshot]:
        """Returns the snapshot of a stream."""
        return cache(partial(snapshot_stream, self.systems))


def resolve_request(
    stream: StreamSnapshot,
    request: StartpointRequest,
    *,
    versions: JoinVersions,
    now: datetime,
    epoch: int = 0,
    plans: Plans | None = None,
) -> ResolvedStartpoint | Replay:
    """Return the request with its start offset; a bounded request as a Replay, which begins `now`
    with this epoch.

    A replay is joined with these `versions`. If they are the recorded ones, its offsets come from
    the plan in `plans` that the request names (in a preview, without `plans`, from the stream). If
    there are no records between its start and end, both are the same text. Raises the errors of
    `resolve_startpoint_to_offset`, OffsetOutOfRangeError for an end before the start, and the error
    that `plans` has for the plan.
    """
    ssp = request.ssp
    position = describe_startpoint(request.startpoint)
    shared: dict[str, Any] = {"ssp": ssp, "stream": stream.info.identity, "position": position}
    shared |= {"by": request.by, "reason": request.reason}
    resolve = partial(resolve_startpoint_to_offset, stream.system, ssp)
    plan = None
    if plans is not None and versions == RECORDED:
        plan = _find_plan(stream, request, plans)
    if request.until is None:
        offset = resolve(request.startpoint)
        return ResolvedStartpoint(
            id=request.id, offset=offset, resolved_at=now, force=request.force, **shared
        )
    if plan is None:
        start = resolve(request.startpoint)
        end = resolve(request.until)
    else:
        start = plan.spans[ssp].start
        end = plan.spans[ssp].end
    order = stream.system.compare(start, end)
    if order > 0:
        raise offset_error(
            ssp,
            f"{ssp}: a replay from {position} (offset {start}) until "
            f"{describe_startpoint(request.until)} (offset {end}) would end before it begins.",
            "Choose an end after the start.",
            offset=start,
        )
    return Replay(
        id=replay_id(ssp, request.id),
        epoch=epoch,
        start=start,
        next=start,
        # Two texts can be the same offset. An empty replay is recognized by equal texts.
        until=start if order == 0 else end,
        began_at=now,
        versions=versions,
        recorded=plan.id if plan is not None else None,
        **shared,
    )


def _find_plan(stream: StreamSnapshot, request: StartpointRequest, plans: Plans) -> RecordedPlan:
    """Return the plan that a request for recorded versions names; it has the offsets to read in
    the request's partition.

    Raises ConfigurationError for a request without one, OffsetOutOfRangeError if the stream was
    recreated since, and the error that `plans` has instead of a plan.
    """
    ssp = request.ssp
    plan = plans.get(request.recorded or "")
    if isinstance(plan, PermanentError):
        raise plan
    if plan is None or ssp not in plan.spans or request.until is None:
        raise ConfigurationError(
            f"the request for {ssp} has no plan of recorded versions: it was written without one.",
            "Request it with Startpoints(…).request(…), the command or the job, which write the"
            " plan.",
            argument="versions",
        )
    if stream.info.was_recreated(plan.streams.get(stream.name)):
        raise offset_error(
            ssp,
            f"{ssp}: the stream was deleted and created again after a replay with recorded versions"
            " was requested, so the recorded offsets no longer apply.",
            "Request a replay with versions=as-of or current.",
        )
    return plan

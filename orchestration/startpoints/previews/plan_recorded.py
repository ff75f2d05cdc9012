"""Plans a recorded replay: which batch read each record first, which versions it met, or why none can be met again.

history      batch 7: p0 [10, 20) p1 [4, 9)    batch 8: p0 [20, 25)    batch 9: a replay, counts for nothing
asked for    p0 [15, 25) p1 [4, 6)
pieces       p0: up to 20 as batch 7, up to 25 as batch 8; p1: up to 6 as batch 7
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.batch_log import BatchLog, Range
from dagster_adjunct.orchestration.operators.spec.versions_met import RECORDED
from dagster_adjunct.orchestration.startpoints.resolving.recorded_plan import (
    RecordedPiece,
    RecordedPlan,
    check_all_retained,
)
from dagster_adjunct.resources.errors import DatasetError, OffsetOutOfRangeError

if TYPE_CHECKING:
    from datetime import datetime

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState, Intent
    from dagster_adjunct.orchestration.planner import ExecutionPlan
    from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import StreamSnapshot
    from dagster_adjunct.orchestration.startpoints.previews.preview_requests import Preview
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest
    from dagster_adjunct.resources.objects.commit_log import Commit
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

Span = tuple[str, str]
# Below 0, 0 or above 0, as the first of two offsets of one partition lies before, at or after the second.
Compare = Callable[["SystemStreamPartition", str, str], int]
# How many offsets lie between two of one partition.
Distance = Callable[["SystemStreamPartition", str, str], int]

_NEXT = (
    "Ask for offsets that batches have read, or leave versions=recorded out: as-of, where joins are as-of, or current "
    "(--versions)."
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What requests for recorded versions come to: their previews, and the plan that they share.

    `plan` is None where none of them can be followed. `told` says in words what the plan meets.
    """

    previews: list[Preview]
    plan: RecordedPlan | None
    told: tuple[str, ...] = ()

    def named_in(self, requests: Sequence[StartpointRequest]) -> list[StartpointRequest]:
        """Return the requests; those for recorded versions name the plan."""
        if self.plan is None:
            return [*requests]
        plan = self.plan.id
        return [replace(asked, recorded=plan) if asked.versions == RECORDED else asked for asked in requests]


def plan_recorded(
    lake: Lake,
    app: Application,
    plan: ExecutionPlan | None,
    look: Callable[[str], StreamSnapshot],
    previews: Sequence[Preview],
    now: datetime,
) -> Recorded:
    """Return what those of these requests come to that ask for recorded versions; nothing is written or held.

    `plan` is the application's, and `look` has the streams as the previews saw them. A request whose records no batch
    has read, or whose versions are gone, has an `error` in its preview. All that is asked for at once goes together:
    what was in one batch is in one again. So nothing is looked for where one of them can't be followed.
    """
    wanted = {
        shown.request.ssp: shown
        for shown in previews
        if shown.request.versions == RECORDED and shown.error is None and shown.request.until is not None
    }
    if not wanted or any(shown.error and not shown.falls_back for shown in previews):
        return Recorded([*previews], None)
    asked = _asked(app, look, wanted)
    history = ReadHistory(BatchLog(lake, app.name).history(None))
    reads = first_reads(main_batches(history, asked), asked)
    met_after_sends = frozenset[str]() if plan is None else plan.tables_met_after_sends()
    errors = why_unread(asked, reads, history) | why_cut(asked, reads, met_after_sends)
    recorded = _plan(app, asked, reads, now)
    if not errors:
        try:
            check_all_retained(lake, recorded)
        except DatasetError as error:
            errors = dict.fromkeys(wanted, str(error))
    failed = {id(wanted[ssp]): error for ssp, error in errors.items()}
    shown = [replace(preview, error=failed[id(preview)]) if id(preview) in failed else preview for preview in previews]
    return Recorded(shown, recorded if not errors else None, () if errors else recorded.words())


def _asked(
    app: Application, look: Callable[[str], StreamSnapshot], wanted: Mapping[SystemStreamPartition, Preview]
) -> AskedOffsets:
    streams = {ssp.qualified_stream: look(ssp.qualified_stream) for ssp in wanted}
    return AskedOffsets(
        {ssp: (str(shown.start), str(shown.end)) for ssp, shown in wanted.items()},
        {name: stream.info.identity for name, stream in streams.items()},
        lambda at, left, right: streams[at.qualified_stream].system.compare(left, right),
        lambda at, left, right: streams[at.qualified_stream].system.distance(at, left, right),
        frozenset(source.stream for source in app.inputs.values() if source.reset_offset),
    )


def _plan(app: Application, asked: AskedOffsets, reads: FirstReads, now: datetime) -> RecordedPlan:
    """Return the plan of what is asked for, as batches have read it first; it holds nothing until it is written."""
    pieces: dict[SystemStreamPartition, tuple[RecordedPiece, ...]] = {}
    spans: dict[SystemStreamPartition, Range] = {}
    for ssp, (start, end) in asked.spans.items():
        read_pieces = [RecordedPiece(end=upto, batch=batch) for upto, batch in reads.pieces[ssp]]
        if read_pieces:  # offsets without records behind them may follow: the last piece ends where the replay does
            read_pieces[-1] = read_pieces[-1].model_copy(update={"end": end})
        pieces[ssp] = tuple(read_pieces)
        spans[ssp] = Range(start=start, end=end if read_pieces else start)
    joined = {dataset.name for dataset in app.datasets}
    return RecordedPlan(
        id=uuid.uuid4().hex,
        application=app.name,
        expires_at=now + app.startpoints_expire_after,
        streams={name: identity for name, identity in asked.identities.items() if identity is not None},
        spans=spans,
        pieces=pieces,
        versions={
            batch: {name: version for name, version in met.items() if name in joined}
            for batch, met in reads.versions.items()
        },
        over_time={batch: dict(met) for batch, met in reads.over_time.items()},
    )


@dataclass(frozen=True, slots=True)
class AskedOffsets:
    """Offsets [start, end) of each partition that are to be read as they were, in streams of these identities.

    `compare` orders the offsets of a partition, and `distance` counts them. Streams in `reset` may have gone back
    without a new epoch.
    """

    spans: Mapping[SystemStreamPartition, Span]
    identities: Mapping[str, str | None]
    compare: Compare
    distance: Distance
    reset: AbstractSet[str] = frozenset()


@dataclass(frozen=True, slots=True)
class FirstReads:
    """Who read what is asked for first.

    `pieces` has, by partition and in the order of offsets, the end of each piece and the batch that read it first;
    pieces follow each other without a hole but those in `unread`, which no batch has read. `versions` are by batch
    what it met, with `over_time` of those that joined by time, and `cut` are the batches of which only a part is asked
    for.
    """

    pieces: Mapping[SystemStreamPartition, tuple[tuple[str, int], ...]]
    versions: Mapping[int, Mapping[str, str | None]]
    over_time: Mapping[int, Mapping[str, tuple[str, ...]]]
    unread: Mapping[SystemStreamPartition, tuple[Span, ...]]
    cut: tuple[int, ...]


class ReadHistory:
    """The states of a batch log, newest first, as far as somebody reads; knows the newest and the oldest one read."""

    def __init__(self, commits: Iterable[tuple[Commit, ApplicationState]]) -> None:
        self._commits = iter(commits)
        self.newest: ApplicationState | None = None
        self.oldest = 0

    def __iter__(self) -> ReadHistory:
        return self

    def __next__(self) -> ApplicationState:
        commit, state = next(self._commits)
        self.oldest, self.newest = commit.number, self.newest or state
        return state


def main_batches(history: Iterable[ApplicationState], asked: AskedOffsets) -> dict[int, Intent]:
    """Return the intents of the closed batches of the main position that may have read it, by their numbers.

    `history` is given newest first, and is read no further back than anything that is asked for can have been read.
    """
    intents: dict[int, Intent] = {}
    for state in history:
        done = state.last.intent if state.last is not None else None
        if done is not None and done.batch not in intents and not done.replays:
            ranges = {ssp: span for ssp, span in done.ranges.items() if _is_of(state, asked, ssp.qualified_stream)}
            intents[done.batch] = done.model_copy(update={"ranges": ranges})
        if all(_is_before(state, asked, ssp) for ssp in asked.spans):
            break
    return intents


def first_reads(batches: Mapping[int, Intent], asked: AskedOffsets) -> FirstReads:
    """Return which of these batches read each offset first."""
    open_spans = {ssp: [span] for ssp, span in asked.spans.items()}
    read: dict[SystemStreamPartition, list[tuple[Span, int]]] = {ssp: [] for ssp in asked.spans}
    versions: dict[int, Mapping[str, str | None]] = {}
    cut = []
    for number, intent in sorted(batches.items()):
        taken = 0
        for ssp, span in intent.ranges.items():
            if ssp not in open_spans or asked.compare(ssp, span.start, span.end) == 0:
                continue
            pieces, open_spans[ssp] = _split(asked.compare, ssp, open_spans[ssp], (span.start, span.end))
            read[ssp] += [(piece, number) for piece in pieces]
            taken += bool(pieces)
            if pieces:
                versions[number] = intent.versions
        if taken and _is_cut(intent, read, number, asked):
            cut.append(number)
    return FirstReads(
        {ssp: _in_order(asked.compare, ssp, pieces) for ssp, pieces in read.items()},
        versions,
        {number: batches[number].over_time for number in versions if batches[number].over_time},
        {ssp: tuple(spans) for ssp, spans in open_spans.items() if spans},
        tuple(cut),
    )


def why_unread(asked: AskedOffsets, reads: FirstReads, history: ReadHistory) -> dict[SystemStreamPartition, str]:
    """Return, by partition, why what no batch has read can't be read as it was."""
    errors = {}
    for ssp, spans in reads.unread.items():
        holes = [span for span in spans if asked.distance(ssp, *span)]
        if not holes:
            continue
        start, end = holes[0]
        why, state = "no batch of the main position has read them", history.newest
        opened = state.open if state is not None else None
        if opened is not None and ssp in opened.ranges and not opened.replays:
            why = f"batch {opened.batch}, which is open, or one after it reads them first"
        elif state is None or asked.compare(ssp, state.checkpoint.get(ssp, start), start) <= 0:
            why = "no batch has read them yet"
        elif history.oldest > 1:
            why = f"the batch log's history from before its commit {history.oldest} is gone"
        errors[ssp] = str(
            OffsetOutOfRangeError(
                f"{ssp}: nothing says which versions offsets {start} up to {end} met: {why}.",
                _NEXT,
                stream=ssp.qualified_stream,
                partition=ssp.partition,
                offset=start,
            )
        )
    return errors


def why_cut(
    asked: AskedOffsets, reads: FirstReads, met_after_sends: AbstractSet[str]
) -> dict[SystemStreamPartition, str]:
    """Return, by partition, why a batch can't be cut: a join of it met what the whole batch had sent before it.

    `met_after_sends` are the tables in which joins meet that.
    """
    if not met_after_sends or not reads.cut:
        return {}
    return {
        ssp: str(
            OffsetOutOfRangeError(
                f"{ssp}: only a part of batch {reads.cut[0]} is asked for, and its joins met in "
                f"{min(met_after_sends)!r} what the whole batch had sent there before.",
                "Ask for whole batches, of all their partitions at once: adjunct checkpoint history has their offsets.",
                stream=ssp.qualified_stream,
                partition=ssp.partition,
            )
        )
        for ssp in asked.spans
    }


def _is_of(state: ApplicationState, asked: AskedOffsets, stream: str) -> bool:
    """Whether offsets of this state are of the stream as it is asked for, where it is."""
    return stream not in asked.identities or state.offsets.streams.get(stream) == asked.identities[stream]


def _is_before(state: ApplicationState, asked: AskedOffsets, ssp: SystemStreamPartition) -> bool:
    """Whether no batch up to this state has read any of what is asked for: it had not come so far, nor gone back."""
    if ssp not in state.checkpoint:
        return True
    if ssp.qualified_stream in asked.reset or state.offsets.opened.get(ssp, 0):
        return False
    start, end = asked.spans[ssp]
    empty = asked.compare(ssp, start, end) == 0
    return empty or asked.compare(ssp, state.checkpoint[ssp], start) <= 0


def _split(
    compare: Compare, ssp: SystemStreamPartition, spans: Iterable[Span], read: Span
) -> tuple[list[Span], list[Span]]:
    """Return what of these spans lies within another one, and what is left of them; none of it empty."""
    within, left = [], []
    for start, end in spans:
        first = start if compare(ssp, start, read[0]) >= 0 else read[0]
        last = end if compare(ssp, end, read[1]) <= 0 else read[1]
        if compare(ssp, first, last) >= 0:
            if compare(ssp, start, end) < 0:
                left.append((start, end))
            continue
        within.append((first, last))
        left += [(a, b) for a, b in ((start, first), (last, end)) if compare(ssp, a, b) < 0]
    return within, left


def _in_order(
    compare: Compare, ssp: SystemStreamPartition, pieces: list[tuple[Span, int]]
) -> tuple[tuple[str, int], ...]:
    ordered: list[tuple[Span, int]] = []
    for piece in pieces:
        place = len(ordered)
        while place and compare(ssp, piece[0][0], ordered[place - 1][0][0]) < 0:
            place -= 1
        ordered.insert(place, piece)
    return tuple((span[1], number) for span, number in ordered)


def _is_cut(
    intent: Intent,
    read: Mapping[SystemStreamPartition, list[tuple[Span, int]]],
    number: int,
    asked: AskedOffsets,
) -> bool:
    """Whether the batch read more than what is asked for of it, or read it not for the first time."""
    for ssp, whole in intent.ranges.items():
        if asked.compare(ssp, whole.start, whole.end) == 0:
            continue
        mine = [span for span, batch in read.get(ssp, ()) if batch == number]
        if len(mine) != 1:
            return True
        (start, end) = mine[0]
        if asked.compare(ssp, start, whole.start) or asked.compare(ssp, end, whole.end):
            return True
    return False

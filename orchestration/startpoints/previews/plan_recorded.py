"""Plans a recorded replay: finds the batches that read its records first, and whether what they met is still there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.batch_log import BatchLog, Range
from dagster_adjunct.orchestration.operators.spec.versions_met import RECORDED
from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import look_at_stream
from dagster_adjunct.orchestration.startpoints.resolving.recorded_batches import (
    AskedOffsets,
    FirstReads,
    first_reads,
    main_batches,
)
from dagster_adjunct.orchestration.startpoints.resolving.recorded_plan import (
    RecordedPiece,
    RecordedPlan,
    check_all_retained,
    new_plan_id,
)
from dagster_adjunct.orchestration.startpoints.resolving.versions_of_replays import tables_met_after_sends
from dagster_adjunct.resources.errors import DatasetError, OffsetOutOfRangeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState, Intent
    from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import StreamSnapshot
    from dagster_adjunct.orchestration.startpoints.previews.request_preview import Preview
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

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


def plan_recorded(
    lake: Lake, systems: Mapping[str, StreamSystem], app: Application, previews: Sequence[Preview]
) -> Recorded:
    """Return what those of these requests come to that ask for recorded versions; nothing is written or held.

    A request whose records no batch has read, or whose versions are gone, has an `error` in its preview. All that is
    asked for at once goes together: what was in one batch is in one again. So nothing is looked for where one of them
    can't be followed.
    """
    wanted = {
        shown.request.ssp: shown
        for shown in previews
        if shown.request.versions == RECORDED and shown.error is None and shown.request.until is not None
    }
    if not wanted or any(shown.error and not shown.falls_back for shown in previews):
        return Recorded([*previews], None)
    look: Callable[[str], StreamSnapshot] = cache(partial(look_at_stream, systems))
    asked = _asked(app, look, wanted)
    log = _Log(_commits(lake, app))
    batches = main_batches(log, asked)
    reads = first_reads(batches, asked)
    plan = _plan(lake, app, asked, reads, batches)
    errors = _unread(look, reads, log) | _cut(app, reads, wanted)
    if not errors:
        try:
            check_all_retained(lake, plan)
        except DatasetError as error:
            errors = dict.fromkeys(wanted, str(error))
    failed = {id(wanted[ssp]): error for ssp, error in errors.items()}
    shown = [replace(preview, error=failed[id(preview)]) if id(preview) in failed else preview for preview in previews]
    return Recorded(shown, plan if not errors else None, () if errors else plan.words())


class _Log:
    """The states of a batch log, newest first, as far as somebody reads; knows the newest and the oldest one read."""

    def __init__(self, states: Iterable[tuple[int, ApplicationState]]) -> None:
        self._states = iter(states)
        self.newest: ApplicationState | None = None
        self.oldest = 0

    def __iter__(self) -> _Log:
        return self

    def __next__(self) -> ApplicationState:
        self.oldest, state = next(self._states)
        self.newest = self.newest or state
        return state


def _commits(lake: Lake, app: Application) -> Iterable[tuple[int, ApplicationState]]:
    return ((commit.number, state) for commit, state in BatchLog(lake, app.name).history(None))


def _asked(
    app: Application, look: Callable[[str], StreamSnapshot], wanted: Mapping[SystemStreamPartition, Preview]
) -> AskedOffsets:
    streams = {ssp.qualified_stream: look(ssp.qualified_stream) for ssp in wanted}
    return AskedOffsets(
        {ssp: (str(shown.start), str(shown.end)) for ssp, shown in wanted.items()},
        {name: stream.info.identity for name, stream in streams.items()},
        lambda ssp, left, right: streams[ssp.qualified_stream].system.compare(left, right),
        frozenset(source.stream for source in app.inputs.values() if source.reset_offset),
    )


def _unread(look: Callable[[str], StreamSnapshot], reads: FirstReads, log: _Log) -> dict[SystemStreamPartition, str]:
    """Return, by partition, why what no batch has read can't be read as it was."""
    errors = {}
    for ssp, spans in reads.unread.items():
        stream = look(ssp.qualified_stream)
        holes = [span for span in spans if stream.system.distance(ssp, *span)]
        if not holes:
            continue
        start, end = holes[0]
        why, state = "no batch of the main position has read them", log.newest
        opened = state.open if state is not None else None
        if opened is not None and ssp in opened.ranges and not opened.replays:
            why = f"batch {opened.batch}, which is open, or one after it reads them first"
        elif state is None or stream.system.compare(state.checkpoint.get(ssp, start), start) <= 0:
            why = "no batch has read them yet"
        elif log.oldest > 1:
            why = f"the batch log's history from before its commit {log.oldest} is gone"
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


def _cut(
    app: Application, reads: FirstReads, wanted: Mapping[SystemStreamPartition, Preview]
) -> dict[SystemStreamPartition, str]:
    """Return, by partition, why a batch can't be cut: a join of it met what the whole batch had sent before it."""
    tables = sorted(tables_met_after_sends(app))
    if not tables or not reads.cut:
        return {}
    number = reads.cut[0]
    return {
        ssp: str(
            OffsetOutOfRangeError(
                f"{ssp}: only a part of batch {number} is asked for, and its joins met in {tables[0]!r} what the whole "
                "batch had sent there before.",
                "Ask for whole batches, of all their partitions at once: adjunct checkpoint history has their offsets.",
                stream=ssp.qualified_stream,
                partition=ssp.partition,
            )
        )
        for ssp in wanted
    }


def _plan(
    lake: Lake, app: Application, asked: AskedOffsets, reads: FirstReads, batches: Mapping[int, Intent]
) -> RecordedPlan:
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
        id=new_plan_id(),
        application=app.name,
        expires_at=lake.now() + app.startpoints_expire_after,
        streams={name: identity for name, identity in asked.identities.items() if identity is not None},
        spans=spans,
        pieces=pieces,
        versions={
            batch: {name: version for name, version in met.items() if name in joined}
            for batch, met in reads.versions.items()
        },
        over_time={batch: batches[batch].over_time for batch in reads.versions if batches[batch].over_time},
    )

"""Plans a recorded replay: finds the batches that read its records first, and whether what they met is still there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.batch_log import BatchLog
from dagster_adjunct.orchestration.operators.spec.versions_met import RECORDED
from dagster_adjunct.orchestration.startpoints.resolving.recorded_batches import (
    AskedOffsets,
    ReadHistory,
    first_reads,
    main_batches,
    why_cut,
    why_unread,
)
from dagster_adjunct.orchestration.startpoints.resolving.recorded_plan import (
    RecordedPlan,
    check_all_retained,
    new_plan,
)
from dagster_adjunct.resources.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.planner import ExecutionPlan
    from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import StreamSnapshot
    from dagster_adjunct.orchestration.startpoints.previews.request_preview import Preview
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class Recorded:
    """What requests for recorded versions come to: their previews, and the plan that they share.

    `plan` is None where none of them can be followed. `told` says in words what the plan meets.
    """

    previews: list[Preview]
    plan: RecordedPlan | None
    told: tuple[str, ...] = ()


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
    recorded = new_plan(app, asked, reads, now)
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
        lambda ssp, left, right: streams[ssp.qualified_stream].system.compare(left, right),
        lambda ssp, left, right: streams[ssp.qualified_stream].system.distance(ssp, left, right),
        frozenset(source.stream for source in app.inputs.values() if source.reset_offset),
    )

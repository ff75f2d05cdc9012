"""The position of every partition of an input at the start of a run: its checkpoint, else its default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.startpoints.input_made_anew import check_all_resolved
from dagster_adjunct.orchestration.startpoints.stream_snapshots import (
    StreamSnapshot,
    default_offset,
    edge_offsets,
)
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.batchlog.stored_positions import OffsetState
    from dagster_adjunct.orchestration.operators.input import Input
    from dagster_adjunct.resources.streams.interface.stream_system import StreamInfo
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


def first_positions(
    app: Application, source: Input, stream: StreamSnapshot, state: ApplicationState, offsets: OffsetState
) -> dict[SystemStreamPartition, str]:
    """Return a position for every partition of an input, also for those that have a startpoint to begin at."""
    system, info, ssps = stream.system, stream.info, stream.partitions
    kept = {ssp: state.checkpoint[ssp] for ssp in ssps if ssp in state.checkpoint}
    if source.reset_offset:
        kept = {}
    elif stream.info.is_another(state.offsets.streams.get(stream.name)):
        check_all_resolved(app, stream, state.offsets.streams[stream.name], offsets.resolved)
        kept = {ssp: offsets.resolved[ssp].offset for ssp in ssps}
    fresh = [ssp for ssp in ssps if ssp not in kept]
    choice = default_offset(source, info, system)
    if kept and fresh:
        # These came after the others: what they held before anybody looked is new, whatever the default.
        _check_added(app, source, info, [ssp for ssp in fresh if ssp not in offsets.resolved])
        choice = "oldest"
    return {**kept, **edge_offsets(system, choice, fresh)} if fresh else kept


def _check_added(app: Application, source: Input, info: StreamInfo, added: Sequence[SystemStreamPartition]) -> None:
    if info.key and added:
        names = " ".join(map(str, sorted(added)))
        raise ConfigurationError(
            f"{names}: added to {source.stream}, whose key ({', '.join(info.key)}) chooses the partition, since "
            f"application {app.name!r} began to read it: records of one key lie in two partitions now.",
            "Write a startpoint for each to accept that (adjunct startpoint set MODULE:APP "
            f"{names} --oldest --reason …), or read the stream anew from its oldest offset.",
            application=app.name,
        )

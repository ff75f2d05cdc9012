"""The position of every partition of an input at the start of a run: its checkpoint, else its default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.batchlog.stored_positions import ResolvedStartpoint
    from dagster_adjunct.orchestration.operators.inputs.input import Input
    from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import StreamSnapshot
    from dagster_adjunct.resources.streams.interface.stream_system import StreamInfo, StreamSystem
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


def first_positions(
    app: Application,
    streams: Mapping[str, StreamSnapshot],
    state: ApplicationState,
    resolved: Mapping[SystemStreamPartition, ResolvedStartpoint],
) -> dict[SystemStreamPartition, str]:
    """Return a position for every input partition, also for those that have a startpoint to begin at.

    A stream that was made anew has a startpoint at each partition. Raises ConfigurationError for partitions that were
    added to one whose key chooses the partition.
    """
    positions: dict[SystemStreamPartition, str] = {}
    for source in app.inputs.values():
        stream = streams[source.stream]
        kept = {ssp: state.checkpoint[ssp] for ssp in stream.partitions if ssp in state.checkpoint}
        if source.reset_offset:
            kept = {}
        elif stream.info.is_another(state.offsets.streams.get(stream.name)):
            kept = {ssp: resolved[ssp].offset for ssp in stream.partitions}
        fresh = [ssp for ssp in stream.partitions if ssp not in kept]
        choice = default_offset(source, stream.info, stream.system)
        if kept and fresh:
            # These came after the others: what they held before anybody looked is new, whatever the default.
            _check_added(app, source, stream.info, [ssp for ssp in fresh if ssp not in resolved])
            choice = "oldest"
        edges = stream.oldest if choice == "oldest" else stream.upcoming
        positions |= kept | {ssp: edges[ssp] for ssp in fresh}
    return positions


def default_offset(source: Input, info: StreamInfo, system: StreamSystem) -> Literal["oldest", "upcoming"]:
    """Return where a partition without checkpoint and startpoint begins."""
    return source.default_offset or info.default_offset or system.default_offset or "upcoming"


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

"""Refusals to go on with a checkpoint, or an open batch, of a stream that was deleted or repartitioned since."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.startpoints.stream_snapshots import snapshot_of
from dagster_adjunct.resources.errors import OffsetOutOfRangeError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState, Intent
    from dagster_adjunct.orchestration.startpoints.stream_snapshots import StreamSnapshot
    from dagster_adjunct.resources.streams.interface.stream_system import StreamInfo, StreamSystem
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


def check_all_resolved(
    app: Application, stream: StreamSnapshot, before: str, resolved: Container[SystemStreamPartition] = ()
) -> None:
    """Raise OffsetOutOfRangeError for a stream that was `before` another, unless all its partitions have startpoints.

    `resolved` are the partitions that have one with an offset.
    """
    info, without = stream.info, [str(ssp) for ssp in stream.partitions if ssp not in resolved]
    if without:
        raise OffsetOutOfRangeError(
            f"{stream.name} was {_made_anew(info, before)} (it is {info.identity}, and was {before}): the "
            f"checkpoint of application {app.name!r} is of the stream before, in {', '.join(without[:3])}"
            f"{', …' if len(without) > 3 else ''}.",
            _where_to_begin(stream.name, info, before),
            application=app.name,
            stream=stream.name,
        )


def check_open_batch(
    systems: Mapping[str, StreamSystem], app: Application, state: ApplicationState, intent: Intent
) -> None:
    """Raise OffsetOutOfRangeError for a batch that is to be run again over a stream that was made anew meanwhile."""
    for name in sorted({ssp.qualified_stream for ssp in intent.ranges}):
        before, stream = state.offsets.streams.get(name), snapshot_of(systems, name)
        if stream.info.is_another(before):
            info = stream.info
            raise OffsetOutOfRangeError(
                f"{name} was {_made_anew(info, before)} (it is {info.identity}, and was {before}), and batch "
                f"{intent.batch} of application {app.name!r} is open over the stream before.",
                f"Give the batch up (adjunct checkpoint abandon {app.name} --reason …), then say where to "
                f"begin in the new stream: adjunct startpoint set MODULE:APP {name} --oldest --reason ….",
                application=app.name,
                stream=name,
            )


def _made_anew(info: StreamInfo, before: str | None) -> str:
    return f"repartitioned into {info.partitions}" if info.is_rewritten(before) else "deleted and made anew"


def _where_to_begin(stream: str, info: StreamInfo, before: str | None) -> str:
    begin = f"Say where to begin in the new one: adjunct startpoint set MODULE:APP {stream} --oldest --reason …."
    if info.is_rewritten(before):
        return f"Run again: who had read all of it before goes on at what came since. Otherwise: {begin}"
    return begin

"""Where the main input goes on in a batch, and how far it can be read: what it was, within what the streams hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.startpoints.input_made_anew import check_all_resolved
from dagster_adjunct.orchestration.startpoints.stream_snapshots import edge_offsets, snapshot_of
from dagster_adjunct.resources.errors import OffsetOutOfRangeError
from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange

if TYPE_CHECKING:
    from collections.abc import Container

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.batchlog.stored_positions import ResolvedStartpoint
    from dagster_adjunct.orchestration.operators.input import Input
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class InputPositions:
    """Where the main input goes on, by partition: what there is to read, and what retention took before that.

    `unread` is empty where the next offset is the end. `startpoints` are those that the next batch applies.
    """

    unread: Mapping[SystemStreamPartition, OffsetRange]
    lost: Mapping[SystemStreamPartition, OffsetRange] = field(default_factory=dict)
    startpoints: Mapping[SystemStreamPartition, ResolvedStartpoint] = field(default_factory=dict)

    def texts(self) -> list[str]:
        """Return in words what retention took, a line each."""
        return [
            f"{ssp}: retention has passed {_whose(self.startpoints.get(ssp))}offset {span.start}; the input goes on "
            f"from {span.end}, the oldest left"
            for ssp, span in sorted(self.lost.items())
        ]


def input_positions(
    systems: Mapping[str, StreamSystem],
    app: Application,
    state: ApplicationState,
    held: Container[SystemStreamPartition] = (),
) -> InputPositions:
    """Return where the main input goes on, and how far it can be read now; partitions that are `held` are not read.

    Partitions that were added since the start of the run wait for the next one. Raises OffsetOutOfRangeError for a
    position that the stream does not hold (any more), and for a stream that was made anew since the start.
    """
    unread: dict[SystemStreamPartition, OffsetRange] = {}
    lost: dict[SystemStreamPartition, OffsetRange] = {}
    startpoints: dict[SystemStreamPartition, ResolvedStartpoint] = {}
    for source in app.inputs.values():
        stream = snapshot_of(systems, source.stream)
        system = stream.system
        before = state.offsets.streams.get(source.stream)
        if before is not None and stream.info.is_another(before):
            check_all_resolved(app, stream, before)
        ssps = [ssp for ssp in stream.partitions if ssp in state.checkpoint and ssp not in held]
        oldest, upcoming = edge_offsets(system, "oldest", ssps), edge_offsets(system, "upcoming", ssps)
        passed: dict[SystemStreamPartition, OffsetRange] = {}
        for ssp in ssps:
            startpoint = state.offsets.resolved.get(ssp)
            start = startpoint.offset if startpoint else state.checkpoint[ssp]
            if system.compare(start, upcoming[ssp]) > 0:
                raise _past_the_end(app, ssp, start, upcoming[ssp], startpoint)
            if system.compare(start, oldest[ssp]) < 0:
                if startpoint is None or startpoint.position != "oldest":
                    passed[ssp] = OffsetRange(start, oldest[ssp])
                start = oldest[ssp]
            unread[ssp] = OffsetRange(start, upcoming[ssp])
            if startpoint is not None:
                startpoints[ssp] = startpoint
        if passed and source.on_lost != "oldest":
            raise _lost_to_retention(app, source, passed, startpoints)
        lost |= passed
    return InputPositions(unread, lost, startpoints)


def _past_the_end(
    app: Application, ssp: SystemStreamPartition, start: str, upcoming: str, startpoint: ResolvedStartpoint | None
) -> OffsetOutOfRangeError:
    who = _whose(startpoint) or f"application {app.name!r} goes on at "
    return OffsetOutOfRangeError(
        f"{ssp}: {who}offset {start}, and the stream ends before {upcoming}: it has lost records, or is "
        "another stream than it was.",
        f"Restore the stream, or say where to begin: adjunct startpoint set MODULE:APP {ssp} --oldest --reason ….",
        stream=ssp.qualified_stream,
        partition=ssp.partition,
        offset=start,
        application=app.name,
        upcoming=upcoming,
    )


def _lost_to_retention(
    app: Application,
    source: Input,
    lost: Mapping[SystemStreamPartition, OffsetRange],
    startpoints: Mapping[SystemStreamPartition, ResolvedStartpoint],
) -> OffsetOutOfRangeError:
    """Return the refusal of what retention took, be it of the checkpoint or of somebody's startpoint."""
    of_startpoints = sorted(ssp for ssp in lost if ssp in startpoints)
    where = [ssp for ssp in sorted(lost) if ssp not in startpoints] or of_startpoints
    spans = [f"{ssp} (at offset {lost[ssp].start}, the oldest left is {lost[ssp].end})" for ssp in where]
    more = f" and {len(spans) - _SHOWN} more partitions" if len(spans) > _SHOWN else ""
    shown, numbers = ", ".join(spans[:_SHOWN]) + more, ",".join(str(ssp.partition) for ssp in where)
    oldest = f"adjunct startpoint set MODULE:APP {source.stream}.{numbers} --oldest --reason …"
    if where == of_startpoints:
        whose = dict.fromkeys(_whose(startpoints[ssp]) for ssp in where[:_SHOWN])
        return OffsetOutOfRangeError(
            f"retention has passed {'; '.join(whose).removesuffix(' at ')} in {shown}, since its offset was found: "
            "what lies between is lost.",
            f"Begin at what is left ({oldest}), or take it back: adjunct startpoint clear MODULE:APP "
            f"{source.stream}.{numbers} --reason ….",
            application=app.name,
            stream=source.stream,
        )
    return OffsetOutOfRangeError(
        f"retention has passed the checkpoint of application {app.name!r} in {shown}: the records in between are lost.",
        f'Accept the loss once ({oldest}), or for good: declare on_lost="oldest" at the input stream, which counts '
        "what is lost. To lose nothing, deliver the records again; then give the stream a longer retention.",
        application=app.name,
        stream=source.stream,
    )


def _whose(startpoint: ResolvedStartpoint | None) -> str:
    """Return whose startpoint it is, as words that a position may follow; "" for none."""
    if startpoint is None:
        return ""
    return f"the startpoint {startpoint.position} of {startpoint.by} ({startpoint.reason}) at "

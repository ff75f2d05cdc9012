"""Refusals to go on at a position that its stream does not hold: it was made anew, has lost records, or ends before."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import OffsetOutOfRangeError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import Intent
    from dagster_adjunct.orchestration.batchlog.stored_positions import OffsetState, Replay, ResolvedStartpoint
    from dagster_adjunct.orchestration.operators.inputs.input import Input
    from dagster_adjunct.orchestration.startpoints.positions.input_positions import InputPositions
    from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import StreamSnapshot
    from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange, StreamInfo
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

_SHOWN = 5


def check_same_streams(
    app: Application,
    streams: Mapping[str, StreamSnapshot],
    known: OffsetState,
    resolved: Container[SystemStreamPartition] = (),
    reset: Container[str] = (),
) -> None:
    """Raise OffsetOutOfRangeError for an input that is not the stream that the checkpoint is of.

    One that has a startpoint with an offset (`resolved`) at each partition may be, and one whose checkpoint is `reset`.
    """
    for name, stream in streams.items():
        info, before = stream.info, known.streams.get(name)
        if before is None or name in reset or not info.is_another(before):
            continue
        without = [str(ssp) for ssp in stream.partitions if ssp not in resolved]
        if without:
            raise OffsetOutOfRangeError(
                f"{name} was {info.how_it_came(before)} (it is {info.identity}, and was {before}): the checkpoint of "
                f"application {app.name!r} is of the stream before, in {', '.join(without[:3])}"
                f"{', …' if len(without) > 3 else ''}.",
                _where_to_begin(name, info, before),
                application=app.name,
                stream=name,
            )


def check_positions(
    app: Application, streams: Mapping[str, StreamSnapshot], known: OffsetState, positions: InputPositions
) -> list[str]:
    """Raise OffsetOutOfRangeError where a batch can't go on: the main input, or a bounded replay.

    What retention took before it was read is refused, unless the input says to go on from the oldest offset left: then
    it is returned in words, a line each.
    """
    check_same_streams(app, streams, known)
    for ssp, (start, upcoming) in positions.past_end.items():
        raise _past_the_end(app, ssp, start, upcoming, positions.startpoints.get(ssp))
    for source in app.inputs.values():
        lost = {ssp: span for ssp, span in positions.lost.items() if ssp.qualified_stream == source.stream}
        if lost and source.on_lost != "oldest":
            raise _lost_to_retention(app, source, lost, positions.startpoints)
    for replay, why in positions.stuck_replays:
        raise _no_replay(app, replay, why)
    return [
        loss_in_words(ssp, span, _whose(positions.startpoints.get(ssp))) for ssp, span in sorted(positions.lost.items())
    ]


def loss_in_words(ssp: SystemStreamPartition, span: OffsetRange, whose: str = "") -> str:
    """Return what retention took of an input that goes on from the oldest offset left; `whose` precedes the offset."""
    return f"{ssp}: retention has passed {whose}offset {span.start}; the input goes on from {span.end}, the oldest left"


def check_open_batch(app: Application, intent: Intent, lost: Mapping[SystemStreamPartition, OffsetRange]) -> None:
    """Raise OffsetOutOfRangeError where an open batch can't be ended with the records that are left.

    Its inputs have to say so of what is `lost`; a bounded replay promises all of its records.
    """
    lost = {
        ssp: span
        for ssp, span in sorted(lost.items())
        if intent.replays or app.inputs[ssp.qualified_stream].on_lost != "oldest"
    }
    if not lost:
        return
    first = next(iter(lost))
    stream, give_up = first.qualified_stream, f"adjunct checkpoint abandon {app.name} --reason …"
    there = {ssp: span for ssp, span in lost.items() if ssp.qualified_stream == stream}
    which = f"{stream}.{','.join(str(ssp.partition) for ssp in there)}"
    if intent.replays:
        step = (
            f"Give the batch up ({give_up}), then cancel the replay (adjunct startpoint clear MODULE:APP {which} "
            "--reason …) and ask again from what is there."
        )
    else:
        step = (
            f'Declare on_lost="oldest" at the input stream: the next run then ends the batch with what is left, and '
            f"counts what is lost. Or give the batch up ({give_up}) and accept the loss once: adjunct startpoint set "
            f"MODULE:APP {which} --oldest --reason …. A startpoint alone changes nothing while the batch is open."
        )
    raise OffsetOutOfRangeError(
        f"retention has passed batch {intent.batch} of application {app.name!r}, which is open, in {_spans(there)}: "
        "the records in between are lost.",
        step,
        application=app.name,
        stream=stream,
        partition=first.partition,
        offset=lost[first].start,
        oldest=lost[first].end,
    )


def open_batch_past_the_end(
    app: Application, batch: int, ssp: SystemStreamPartition, end: str, upcoming: str
) -> OffsetOutOfRangeError:
    """Return the refusal of an open batch that is to read offsets which its stream does not have yet, or any more."""
    return OffsetOutOfRangeError(
        f"{ssp}: batch {batch} of application {app.name!r}, which is open, reads up to offset {end}, and the stream "
        f"ends before {upcoming}: it has lost records, or is another stream than it was.",
        f"Restore the stream; or give the batch up (adjunct checkpoint abandon {app.name} --reason …), then say where "
        f"to begin: adjunct startpoint set MODULE:APP {ssp} --oldest --reason ….",
        stream=ssp.qualified_stream,
        partition=ssp.partition,
        offset=end,
        application=app.name,
        upcoming=upcoming,
    )


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
    shown, numbers = _spans({ssp: lost[ssp] for ssp in where}), ",".join(str(ssp.partition) for ssp in where)
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


def _spans(lost: Mapping[SystemStreamPartition, OffsetRange]) -> str:
    spans = [f"{ssp} (at offset {span.start}, the oldest left is {span.end})" for ssp, span in lost.items()]
    return ", ".join(spans[:_SHOWN]) + (f" and {len(spans) - _SHOWN} more partitions" if len(spans) > _SHOWN else "")


def _no_replay(app: Application, replay: Replay, why: str) -> OffsetOutOfRangeError:
    return OffsetOutOfRangeError(
        f"{replay.ssp}: the replay of {replay.by} ({replay.reason}) has come to offset {replay.next} of "
        f"{replay.until} and can't go on: {why}.",
        f"Cancel it (adjunct startpoint clear MODULE:APP {replay.ssp} --reason …), then ask again from what is there.",
        stream=replay.ssp.qualified_stream,
        partition=replay.ssp.partition,
        offset=replay.next,
        application=app.name,
    )


def _whose(startpoint: ResolvedStartpoint | None) -> str:
    """Return whose startpoint it is, as words that a position may follow; "" for none."""
    if startpoint is None:
        return ""
    return f"the startpoint {startpoint.position} of {startpoint.by} ({startpoint.reason}) at "


def _where_to_begin(stream: str, info: StreamInfo, before: str | None) -> str:
    begin = f"Say where to begin in the new one: adjunct startpoint set MODULE:APP {stream} --oldest --reason …."
    if info.is_rewritten(before):
        return f"Run again: who had read all of it before goes on at what came since. Otherwise: {begin}"
    return begin

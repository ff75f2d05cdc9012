"""OffsetManager: where each input partition of an application is read from, at the start of a run and in each batch.

At a start, in this order:

    checkpoint       the next offset to read, as the last commit of offsets left it
    reset streams    forget theirs
    startpoints      what was asked for and fanned out: resolved once, stored before anything is read
    defaults         the input's own setting, the stream's, the system's, else upcoming

A checkpoint counts only for the stream that it was made of, and only within what that still holds.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.positions import (
    OffsetState,
    Replay,
    ResolvedStartpoint,
    replay_id,
)
from dagster_adjunct.orchestration.startpoints.coordinator import fan_out_requests
from dagster_adjunct.orchestration.startpoints.found_positions import Positions, Start, whose
from dagster_adjunct.orchestration.startpoints.repartitioned import carried_note, carried_over
from dagster_adjunct.orchestration.startpoints.resolving import (
    Streams,
    Unresolved,
    default_offset,
    edge_offsets,
    is_another,
    is_broadcast,
    one_task_of_all,
    resolve_request,
    task_partitions,
)
from dagster_adjunct.resources.errors import ConfigurationError, OffsetOutOfRangeError, PermanentError
from dagster_adjunct.resources.streams.interface.ssp import SystemStreamPartition
from dagster_adjunct.resources.streams.interface.startpoint import describe_startpoint
from dagster_adjunct.resources.streams.interface.system import OffsetRange

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.log import ApplicationState, Intent
    from dagster_adjunct.orchestration.operators.input import Input
    from dagster_adjunct.orchestration.planner import ExecutionPlan
    from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
    from dagster_adjunct.orchestration.startpoints.request import StartpointRequest
    from dagster_adjunct.orchestration.startpoints.startpoint_manager import StartpointManager
    from dagster_adjunct.resources.streams.interface.system import StreamInfo, StreamSystem

_SHOWN = 5


class OffsetManager:
    """The positions of one application: composes its checkpoint with its startpoints."""

    def __init__(
        self,
        systems: Mapping[str, StreamSystem],
        app: Application,
        plan: ExecutionPlan,
        startpoints: StartpointManager,
    ) -> None:
        self._systems, self._app, self._plan, self._startpoints = systems, app, plan, startpoints
        self._readers = task_partitions(plan)
        self._held: frozenset[SystemStreamPartition] = frozenset()

    # -- the start of a run

    def start(self, state: ApplicationState) -> Start:
        """Fan out, resolve what has no offset yet, and give every partition a position.

        Raises OffsetOutOfRangeError and ConfigurationError for a startpoint that can't be resolved (it is not
        consumed), for a stream that was made anew, and for new partitions of one whose key chooses the partition.
        Partitions for which something was handed out that can't be read are not read at all in this run.
        """
        streams = Streams(self._systems)
        carried: list[str] = []
        for name in self._app.inputs:
            moved = carried_over(state, name, streams.info(name))
            if moved is not None:
                state = moved
                carried.append(carried_note(name, streams.info(name)))
        fan_out = fan_out_requests(self._startpoints, self._systems, self._app, self._plan, state.offsets)
        self._held = frozenset(ssp for task in self._readers for ssp in fan_out.held.get(task, ()))
        known = state.offsets
        pending, done, alone = self._pending(fan_out, state)
        resolved = {
            ssp: start
            for ssp, start in known.resolved.items()
            if ssp in pending and pending[ssp][1].id == start.id and streams.identity(ssp) == start.stream
        }
        found: list[ResolvedStartpoint] = []
        replays: list[Replay] = []
        unresolved: list[Unresolved] = []
        for request in alone:
            refusal = one_task_of_all(request)
            if request.on_unresolved == "fail":
                raise refusal
            unresolved.append(Unresolved(request, str(refusal)))
        for ssp, (tasks, request) in sorted(pending.items()):
            if ssp in resolved:
                continue
            try:
                offset, until = resolve_request(streams.system(request.ssp.qualified_stream), request)
            except PermanentError as error:
                if request.on_unresolved == "fail":
                    raise _explained(error, request) from error
                unresolved.append(Unresolved(request, str(error)))
                continue
            start = _resolved(request, offset, streams.identity(ssp), self._startpoints.lake.now())
            found.append(start)
            if until is None:
                resolved[ssp] = start
            else:
                replays.append(_replay(known.next_epoch(ssp), start, until))
                for task in tasks:
                    done.setdefault(task, {})[request.ssp] = start.id
        waiting = {replay_id(str(ssp), each) for ids in done.values() for ssp, each in ids.items()}
        offsets = known.model_copy(
            update={
                "resolved": resolved,
                "begun": known.begun & waiting if self._app.startpoints else known.begun,
                "streams": {name: each for name in self._app.inputs if (each := streams.info(name).identity)},
            }
        ).with_replays(replays)
        checkpoint = dict(state.checkpoint)
        for source in self._app.inputs.values():
            checkpoint |= self._checkpoint(source, streams, state, offsets)
        paused = () if self._app.startpoints else tuple(offsets.replays.values())
        return Start(checkpoint, offsets, fan_out, tuple(found), tuple(unresolved), done, paused, tuple(carried))

    def _pending(
        self, fan_out: FanOut, state: ApplicationState
    ) -> tuple[
        dict[str, tuple[list[str], StartpointRequest]],
        dict[str, dict[SystemStreamPartition, str]],
        list[StartpointRequest],
    ]:
        """Return what is to be applied, with its tasks, by partition; and what was already: a crash kept it there.

        Of a broadcast input all tasks hold the same; where a task has an older one, that is done with. Last come those
        for one task alone where all read the partition, which can't be followed.
        """
        alone: list[StartpointRequest] = []
        pending: dict[str, tuple[list[str], StartpointRequest]] = {}
        done: dict[str, dict[SystemStreamPartition, str]] = {}
        for task in self._readers:
            for ssp, request in fan_out.tasks.get(task, {}).items():
                name, startpoint_id = str(ssp), request.id
                if state.offsets.has_taken(name, startpoint_id):
                    done.setdefault(task, {})[ssp] = startpoint_id
                elif request.task is not None and is_broadcast(self._app, ssp):
                    alone.append(request)
                else:
                    tasks, newest = pending.get(name, ([], request))
                    if request.sequence > newest.sequence:
                        for other in tasks:
                            done.setdefault(other, {})[ssp] = newest.id
                        tasks, newest = [], request
                    if request.sequence < newest.sequence:
                        done.setdefault(task, {})[ssp] = request.id
                    else:
                        pending[name] = [*tasks, task], newest
        return pending, done, alone

    def _checkpoint(
        self, source: Input, streams: Streams, state: ApplicationState, offsets: OffsetState
    ) -> dict[str, str]:
        """Return a position for every partition of an input, also for those that have a startpoint to begin at."""
        system, info, ssps = (
            streams.system(source.stream),
            streams.info(source.stream),
            streams.partitions(source.stream),
        )
        kept = {str(ssp): state.checkpoint[str(ssp)] for ssp in ssps if str(ssp) in state.checkpoint}
        if source.reset_offset:
            kept = {}
        elif is_another(info, state.offsets.streams.get(source.stream)):
            self._check_startpoints(source, info, state.offsets.streams[source.stream], offsets.resolved)
            kept = {str(ssp): offsets.resolved[str(ssp)].offset for ssp in ssps}
        fresh = [ssp for ssp in ssps if str(ssp) not in kept]
        choice = default_offset(source, info, system)
        if kept and fresh:
            # These came after the others: what they held before anybody looked is new, whatever the default.
            self._check_added(source, info, [ssp for ssp in fresh if str(ssp) not in offsets.resolved])
            choice = "oldest"
        if fresh:
            kept |= {str(ssp): offset for ssp, offset in edge_offsets(system, choice, fresh).items()}
        return kept

    def _check_added(self, source: Input, info: StreamInfo, added: Sequence[SystemStreamPartition]) -> None:
        if info.key and added:
            names = " ".join(map(str, sorted(added)))
            raise ConfigurationError(
                f"{names}: added to {source.stream}, whose key ({', '.join(info.key)}) chooses the partition, since "
                f"application {self._app.name!r} began to read it: records of one key lie in two partitions now.",
                "Write a startpoint for each to accept that (adjunct startpoint set MODULE:APP "
                f"{names} --oldest --reason …), or read the stream anew from its oldest offset.",
            )

    def _check_startpoints(self, source: Input, info: StreamInfo, before: str, resolved: Container[str]) -> None:
        """Raise OffsetOutOfRangeError for a stream that was made anew, unless all its partitions have startpoints."""
        ssps = [f"{source.stream}.{number}" for number in range(info.partitions)]
        without = [ssp for ssp in ssps if ssp not in resolved]
        if without:
            raise OffsetOutOfRangeError(
                f"{source.stream} was {_made_anew(info, before)} (it is {info.identity}, and was {before}): the "
                f"checkpoint of application {self._app.name!r} is of the stream before, in {', '.join(without[:3])}"
                f"{', …' if len(without) > 3 else ''}.",
                _where_to_begin(source.stream, info, before),
                application=self._app.name,
                stream=source.stream,
            )

    # -- each batch

    def check_open(self, state: ApplicationState, intent: Intent) -> None:
        """Refuse to run a batch again over a stream that was deleted and made anew since it was begun."""
        streams = Streams(self._systems)
        for name in sorted({SystemStreamPartition.parse(ssp).qualified_stream for ssp in intent.ranges}):
            before, info = state.offsets.streams.get(name), streams.info(name)
            if is_another(info, before):
                raise OffsetOutOfRangeError(
                    f"{name} was {_made_anew(info, before)} (it is {info.identity}, and was {before}), and batch "
                    f"{intent.batch} of application {self._app.name!r} is open over the stream before.",
                    f"Give the batch up (adjunct checkpoint abandon {self._app.name} --reason …), then say where to "
                    f"begin in the new stream: adjunct startpoint set MODULE:APP {name} --oldest --reason ….",
                    application=self._app.name,
                    stream=name,
                )

    def positions(self, state: ApplicationState) -> Positions:
        """Return where the main input goes on, and how far it can be read now.

        Partitions that were added since the start of the run wait for the next one, as do those that are held. Raises
        OffsetOutOfRangeError for a position that the stream does not hold (any more), and for a stream that was made
        anew since the start.
        """
        starts: dict[SystemStreamPartition, str] = {}
        ends: dict[SystemStreamPartition, str] = {}
        lost: dict[SystemStreamPartition, OffsetRange] = {}
        startpoints: dict[SystemStreamPartition, ResolvedStartpoint] = {}
        streams = Streams(self._systems)
        for source in self._app.inputs.values():
            system, info = streams.system(source.stream), streams.info(source.stream)
            before = state.offsets.streams.get(source.stream)
            if before is not None and is_another(info, before):
                self._check_startpoints(source, info, before, ())
            ssps = [
                ssp
                for ssp in streams.partitions(source.stream)
                if str(ssp) in state.checkpoint and ssp not in self._held
            ]
            oldest, upcoming = edge_offsets(system, "oldest", ssps), edge_offsets(system, "upcoming", ssps)
            for ssp in ssps:
                startpoint = state.offsets.resolved.get(str(ssp))
                start = startpoint.offset if startpoint else state.checkpoint[str(ssp)]
                self._check_end(system, ssp, start, upcoming[ssp], startpoint)
                if system.compare(start, oldest[ssp]) < 0:
                    if startpoint is None or startpoint.position != "oldest":
                        lost[ssp] = OffsetRange(start, oldest[ssp])
                    start = oldest[ssp]
                starts[ssp] = start
                if startpoint is not None:
                    startpoints[ssp] = startpoint
            ends |= upcoming
            self._check_lost(source, {ssp: span for ssp, span in lost.items() if ssp in upcoming}, startpoints)
        return Positions(starts, ends, lost, startpoints)

    def replays(self, state: ApplicationState) -> dict[SystemStreamPartition, Replay]:
        """Return the bounded replays to go on with: of each partition the one that began first; none if switched off.

        Raises OffsetOutOfRangeError for one that the stream does not hold (any more).
        """
        chosen: dict[SystemStreamPartition, Replay] = {}
        if not self._app.startpoints:
            return chosen
        for replay in sorted(state.offsets.replays.values(), key=lambda each: (each.epoch, each.id)):
            chosen.setdefault(SystemStreamPartition.parse(replay.ssp), replay)
        streams = Streams(self._systems)
        for stream in sorted({ssp.qualified_stream for ssp in chosen}):
            system, ssps = streams.system(stream), [ssp for ssp in chosen if ssp.qualified_stream == stream]
            if stream not in self._app.inputs:
                raise self._no_replay(chosen[ssps[0]], f"the application does not read {stream} any more")
            oldest, upcoming = edge_offsets(system, "oldest", ssps), edge_offsets(system, "upcoming", ssps)
            for ssp in ssps:
                replay = chosen[ssp]
                if is_another(streams.info(stream), replay.stream):
                    raise self._no_replay(replay, "the stream was deleted and made anew")
                if system.compare(replay.next, oldest[ssp]) < 0:
                    raise self._no_replay(replay, f"retention has passed it: the oldest offset left is {oldest[ssp]}")
                if system.compare(replay.until, upcoming[ssp]) > 0:
                    raise self._no_replay(replay, f"the stream ends before {upcoming[ssp]}: it has lost records")
        return chosen

    def _no_replay(self, replay: Replay, why: str) -> OffsetOutOfRangeError:
        ssp = SystemStreamPartition.parse(replay.ssp)
        return OffsetOutOfRangeError(
            f"{replay.ssp}: the replay of {replay.by} ({replay.reason}) has come to offset {replay.next} of "
            f"{replay.until} and can't go on: {why}.",
            f"Cancel it (adjunct startpoint clear MODULE:APP {replay.ssp} --reason …), then ask again from what is "
            "there.",
            stream=ssp.qualified_stream,
            partition=ssp.partition,
            offset=replay.next,
            application=self._app.name,
        )

    def remove_done(self, start: Start) -> None:
        """Remove from the fan-outs what earlier commits have taken in, and the replays that begin with this one."""
        if start.done:
            self._startpoints.remove_fan_outs(start.done)

    def remove_applied(self, startpoints: Mapping[str, str]) -> None:
        """Remove from the fan-outs what a commit of offsets has applied (id by partition): after it, never before."""
        ids = {SystemStreamPartition.parse(ssp): each for ssp, each in startpoints.items()}
        applied = {task: {ssp: ids[ssp] for ssp in ssps if ssp in ids} for task, ssps in self._readers.items()}
        if ids:
            self._startpoints.remove_fan_outs({task: mine for task, mine in applied.items() if mine})

    # -- inside

    def _check_end(
        self,
        system: StreamSystem,
        ssp: SystemStreamPartition,
        start: str,
        upcoming: str,
        startpoint: ResolvedStartpoint | None,
    ) -> None:
        if system.compare(start, upcoming) > 0:
            who = whose(startpoint) or f"application {self._app.name!r} goes on at "
            raise OffsetOutOfRangeError(
                f"{ssp}: {who}offset {start}, and the stream ends before {upcoming}: it has lost records, or is "
                "another stream than it was.",
                "Restore the stream, or say where to begin: adjunct startpoint set MODULE:APP "
                f"{ssp} --oldest --reason ….",
                stream=ssp.qualified_stream,
                partition=ssp.partition,
                offset=start,
                application=self._app.name,
                upcoming=upcoming,
            )

    def _check_lost(
        self,
        source: Input,
        lost: Mapping[SystemStreamPartition, OffsetRange],
        startpoints: Mapping[SystemStreamPartition, ResolvedStartpoint],
    ) -> None:
        """Raise OffsetOutOfRangeError for what retention took, be it of the checkpoint or of somebody's startpoint."""
        if source.on_lost == "oldest" or not lost:
            return
        asked = sorted(ssp for ssp in lost if ssp in startpoints)
        where = [ssp for ssp in sorted(lost) if ssp not in startpoints] or asked
        said = [f"{ssp} (at offset {lost[ssp].start}, the oldest left is {lost[ssp].end})" for ssp in where]
        more = f" and {len(said) - _SHOWN} more partitions" if len(said) > _SHOWN else ""
        shown, numbers = ", ".join(said[:_SHOWN]) + more, ",".join(str(ssp.partition) for ssp in where)
        oldest = f"adjunct startpoint set MODULE:APP {source.stream}.{numbers} --oldest --reason …"
        if where == asked:
            passed = "; ".join(dict.fromkeys(whose(startpoints[ssp]) for ssp in asked[:_SHOWN])).removesuffix(" at ")
            raise OffsetOutOfRangeError(
                f"retention has passed {passed} in {shown}, since its offset was found: what lies between is lost.",
                f"Begin at what is left ({oldest}), or take it back: adjunct startpoint clear MODULE:APP "
                f"{source.stream}.{numbers} --reason ….",
                application=self._app.name,
                stream=source.stream,
            )
        raise OffsetOutOfRangeError(
            f"retention has passed the checkpoint of application {self._app.name!r} in {shown}: the records in between "
            "are lost.",
            f'Accept the loss once ({oldest}), or for good: declare on_lost="oldest" at the input stream, which counts '
            "what is lost. To lose nothing, deliver the records again; then give the stream a longer retention.",
            application=self._app.name,
            stream=source.stream,
        )


def _made_anew(info: StreamInfo, before: str | None) -> str:
    rewritten = info.repartitioned is not None and info.repartitioned.identity == before
    return f"repartitioned into {info.partitions}" if rewritten else "deleted and made anew"


def _where_to_begin(stream: str, info: StreamInfo, before: str | None) -> str:
    begin = f"Say where to begin in the new one: adjunct startpoint set MODULE:APP {stream} --oldest --reason …."
    if info.repartitioned is not None and info.repartitioned.identity == before:
        return f"Run again: who had read all of it before goes on at what came since. Otherwise: {begin}"
    return begin


def _resolved(request: StartpointRequest, offset: str, stream: str | None, at: datetime) -> ResolvedStartpoint:
    return ResolvedStartpoint(
        id=request.id,
        ssp=str(request.ssp),
        stream=stream,
        position=describe_startpoint(request.startpoint),
        offset=offset,
        by=request.by,
        reason=request.reason,
        resolved_at=at,
    )


def _replay(epoch: int, start: ResolvedStartpoint, until: str) -> Replay:
    return Replay(
        id=replay_id(start.ssp, start.id),
        ssp=start.ssp,
        stream=start.stream,
        epoch=epoch,
        position=start.position,
        start=start.offset,
        next=start.offset,
        until=until,
        by=start.by,
        reason=start.reason,
        began_at=start.resolved_at,
    )


def _explained(error: PermanentError, request: StartpointRequest) -> PermanentError:
    what = f"the startpoint of {request.by} ({request.reason}) at {request.ssp} has no offset"
    next_step = (
        f"{error.next_step} Or take it back: adjunct startpoint clear MODULE:APP {request.ssp} --reason …. With "
        "--on-unresolved checkpoint it would have gone on from the checkpoint."
    )
    return error.reworded(f"{what}: {error.problem}", next_step)

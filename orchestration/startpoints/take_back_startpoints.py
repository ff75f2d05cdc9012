"""Takes back what was asked for and not applied, and stops bounded replays where they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.batchlog.batch_log import BatchLog
from dagster_adjunct.orchestration.startpoints.requests.allowed_requests import is_broadcast
from dagster_adjunct.orchestration.startpoints.requests.startpoint_manager import startpoints_of
from dagster_adjunct.orchestration.startpoints.requests.startpoints_not_applied import Held, has_begun, not_applied

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.batchlog.stored_positions import Replay
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_manager import StartpointManager
    from dagster_adjunct.orchestration.startpoints.requests.unreadable_requests import Unreadable
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

_LOOKS = 5


@dataclass(frozen=True, slots=True)
class TakenBack:
    """What was taken back, and the `replays` that were stopped where they were; `left` says what was not, and why.

    `unreadable` is what this release of Adjunct can't read, taken back as it is.
    """

    startpoints: tuple[Held, ...]
    replays: tuple[Replay, ...]
    left: tuple[str, ...]
    unreadable: tuple[Unreadable, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-able values."""
        return {
            "taken_back": [held.summary() for held in self.startpoints],
            "replays": [replay.model_dump(mode="json") for replay in self.replays],
            "left": list(self.left),
            "unreadable": [entry.summary() for entry in self.unreadable],
        }


def take_back(
    lake: Lake,
    app: Application,
    ssps: Collection[SystemStreamPartition] | None = None,
    *,
    task: str | None = None,
    by: str,
    reason: str,
) -> TakenBack:
    """Take back what is asked for at these partitions (None: at all) and not applied, and stop bounded replays there.

    With `task`, only what is for this task alone or was handed to it; replays are of all, and go on. What a batch has
    begun with stays. Raises CommitConflictError where a run commits at the same moment; what was taken back stays so.
    """
    startpoints, log = startpoints_of(lake, app), BatchLog(lake, app.name)
    state, stored = log.read().state, startpoints.read()
    wanted = None if ssps is None else dict.fromkeys(ssps)

    def chosen(held: Held) -> bool:
        # Of a broadcast input, all tasks hold what is for all of them: one does not give it back alone.
        one = held.request.task if held.at is None or is_broadcast(app, held.request.ssp) else held.at
        return (wanted is None or held.request.ssp in wanted) and (task is None or task == one)

    waiting = [request for request in stored.waiting if chosen(Held(request))]
    taken = [Held(request) for request in startpoints.take_back(waiting, by=by)]
    unread = startpoints.delete_unreadable(
        (
            entry
            for entry in stored.unreadable
            if (wanted is None or entry.ssp in wanted or (entry.ssp is None and entry.at and entry.at == task))
            and (task is None or task in (entry.task, entry.at))
        ),
        by=by,
    )
    # More than once: a fan-out that has read a request before it was deleted may still hand it out.
    for _ in range(_LOOKS):
        handed = [held for held in not_applied(startpoints.get_fan_outs(), state) if chosen(held)]
        idle = [held for held in handed if not has_begun(held, state)]
        if not idle:
            break
        _remove(startpoints, idle)
        taken += idle
    # Again: a run may have begun there before it was removed.
    state = log.read().state
    used = [held for held in dict.fromkeys([*taken, *handed]) if has_begun(held, state)]
    taken = [held for held in taken if held not in used]
    left = [f"{held.summary()}: a batch has begun there" for held in used]
    stopped, going = _stop_replays(log, state, wanted, by, reason) if task is None else ([], [])
    known = (
        {entry.ssp for entry in unread}
        | {held.request.ssp for held in (*taken, *used)}
        | {replay.ssp for replay in (*stopped, *going)}
    )
    left += [
        f"{replay.ssp}: the replay from {replay.position} ({replay.by}: {replay.reason}): the open batch is reading "
        "it; repeat this after its end, or abandon the batch (adjunct checkpoint abandon)"
        for replay in going
    ]
    if task is not None:
        still = not_applied(startpoints.get_fan_outs(), state)
        for ssp, held in {held.request.ssp: held for held in still}.items():
            if ssp not in known and is_broadcast(app, ssp) and (wanted is None or ssp in wanted):
                left.append(f"{held.summary()}: it is for all tasks, and taken back from all of them or none")
                known.add(ssp)
        for held in map(Held, stored.waiting):
            ssp = held.request.ssp
            if ssp not in known and held.request.task is None and (wanted is None or ssp in wanted):
                left.append(f"{held.summary()}: it is for every task that reads the partition; name no task")
                known.add(ssp)
    left += [_nothing(ssp, state) for ssp in wanted or () if ssp not in known]
    return TakenBack(tuple(taken), tuple(stopped), tuple(left), tuple(unread))


def _remove(startpoints: StartpointManager, handed: Sequence[Held]) -> None:
    ids: dict[str, dict[SystemStreamPartition, str]] = {}
    for held in handed:
        ids.setdefault(str(held.at), {})[held.request.ssp] = held.request.id
    startpoints.remove_fan_outs(ids)


def _stop_replays(
    log: BatchLog, state: ApplicationState, ssps: Collection[SystemStreamPartition] | None, by: str, reason: str
) -> tuple[list[Replay], list[Replay]]:
    """Stop the replays at these partitions; return them, and those that the open batch reads, which go on."""
    ours = [replay for replay in state.offsets.replays.values() if ssps is None or replay.ssp in ssps]
    reading = set(state.open.replays.values()) if state.open else set()
    idle = [replay.id for replay in ours if replay.id not in reading]
    return log.cancel_replays(idle, by=by, reason=reason), [replay for replay in ours if replay.id in reading]


def _nothing(ssp: SystemStreamPartition, state: ApplicationState) -> str:
    last = state.offsets.applied.get(ssp)
    if last is None:
        return f"{ssp}: nothing is asked for"
    return (
        f"{ssp}: nothing is asked for; {last.position} ({last.by}: {last.reason}) was applied at "
        f"{last.applied_at:%Y-%m-%d %H:%M} UTC, and is moved from by another startpoint only"
    )

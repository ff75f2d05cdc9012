"""What a fan-out decides: which task starts where, from the requests and from what tasks have not committed yet.

Plain values in, plain values out; `startpoints.py` reads and writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from orchestration.offsets.request import StartpointRequest, Target, UnreadableRequest, newer
from resources.streams.ssp import SystemStreamPartition

Requests = Mapping[SystemStreamPartition, StartpointRequest]


@dataclass(frozen=True, slots=True)
class TaskFanOut:
    """What one task has been handed: `pending` is what it still has to apply.

    `handed` holds the sequences of requests for all tasks that it was handed, applied or not, while another task
    has not applied them. Should that one vanish, its startpoint goes to those who read the partition then, but never
    twice to the same task.
    """

    pending: Requests = field(default_factory=dict)
    handed: Mapping[SystemStreamPartition, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FanOutState:
    """All that is fanned out in an application.

    `settled` holds the sequences of requests that were fanned out and may not have been deleted yet, by target: a
    fan-out that died between the two steps is repeated without handing anything out twice.
    """

    tasks: Mapping[str, TaskFanOut] = field(default_factory=dict)
    settled: Mapping[Target, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FanOut:
    """What a fan-out left.

    `tasks` holds all that each task has to apply, also from earlier fan-outs that it has not committed. `unknown`
    are requests for a partition that no task reads, or not the task that they name: they stay until they expire.
    `expired` were too old and are gone. `dropped` had been handed to a task that is gone, with nobody to inherit
    them. `unreadable` are requests of another version of Adjunct: they stay until they are taken back. `left_alone` are
    those that wait or were handed out where the application has startpoints switched off: nothing is done with them.
    """

    tasks: Mapping[str, Requests] = field(default_factory=dict)
    unknown: tuple[StartpointRequest, ...] = ()
    expired: tuple[StartpointRequest, ...] = ()
    dropped: tuple[StartpointRequest, ...] = ()
    unreadable: tuple[UnreadableRequest, ...] = ()
    left_alone: tuple[StartpointRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The state after a fan-out, its report, and the requests that are done with and can be deleted."""

    state: FanOutState
    report: FanOut
    finished: tuple[StartpointRequest, ...]


def decide_fan_out(
    state: FanOutState,
    requests: Iterable[StartpointRequest],
    tasks: Mapping[str, frozenset[SystemStreamPartition]],
    now_ms: int,
    expiry_ms: int,
    named_only: frozenset[str] = frozenset(),
) -> Decision:
    """Hand the requests to the tasks that they are for; `tasks` says which partitions each task reads.

    Requests for all tasks are not for those of `named_only`.
    """
    owners: dict[SystemStreamPartition, list[str]] = {}
    for task, ssps in tasks.items():
        for ssp in ssps if task not in named_only else ():
            owners.setdefault(ssp, []).append(task)
    hands = _Hands(state, tasks)
    dropped = hands.pass_on(owners)

    settled: dict[Target, int] = {}
    unknown, expired, finished = [], [], []
    # In the store's order, so that the outcome does not depend on how they are kept.
    for request in sorted(requests, key=lambda each: each.sequence):
        if state.settled.get(request.target) == request.sequence:
            settled[request.target] = request.sequence
            finished.append(request)
        elif request.expired(now_ms, expiry_ms):
            expired.append(request)
            finished.append(request)
        elif takers := _takers(request, tasks, owners):
            for task in takers:
                hands.give(task, request)
            settled[request.target] = request.sequence
            finished.append(request)
        else:
            unknown.append(request)

    pending = {task: held for task, held in hands.pending.items() if held}
    after = FanOutState(hands.after(), settled)
    report = FanOut(pending, tuple(unknown), tuple(expired), tuple(dropped))
    return Decision(after, report, tuple(finished))


def without(
    held: TaskFanOut, ssps: Iterable[SystemStreamPartition] | None, ids: Mapping[SystemStreamPartition, str] | None
) -> TaskFanOut:
    """Return a task's fan-out without these partitions (None: all); with `ids`, only where the startpoint has it."""
    chosen = set(held.pending) if ssps is None else set(ssps)
    pending = {
        ssp: request
        for ssp, request in held.pending.items()
        if ssp not in chosen or (ids is not None and ids.get(ssp) != request.startpoint.id)
    }
    return TaskFanOut(pending, held.handed)


def _takers(
    request: StartpointRequest,
    tasks: Mapping[str, frozenset[SystemStreamPartition]],
    owners: Mapping[SystemStreamPartition, Sequence[str]],
) -> Sequence[str]:
    if request.task is None:
        return owners.get(request.ssp, ())
    return [request.task] if request.ssp in tasks.get(request.task, ()) else []


class _Hands:
    """The tasks' fan-outs while they are decided: begins with what tasks hold of the partitions that they read."""

    def __init__(self, state: FanOutState, tasks: Mapping[str, frozenset[SystemStreamPartition]]) -> None:
        self.pending: dict[str, dict[SystemStreamPartition, StartpointRequest]] = {task: {} for task in tasks}
        self._handed = {task: dict(held.handed) for task, held in state.tasks.items()}
        self._orphans: list[StartpointRequest] = []
        for task, held in state.tasks.items():
            for ssp, request in held.pending.items():
                if ssp in tasks.get(task, ()):
                    self.pending[task][ssp] = request
                else:
                    self._orphans.append(request)
                    if request.task is None:
                        self._handed[task].pop(ssp, None)

    def give(self, task: str, request: StartpointRequest) -> None:
        ssp, held = request.ssp, self.pending[task]
        held[ssp] = newer(held[ssp], request) if ssp in held else request
        if request.task is None:
            self._handed.setdefault(task, {})[ssp] = request.sequence

    def pass_on(self, owners: Mapping[SystemStreamPartition, Sequence[str]]) -> list[StartpointRequest]:
        """Give what its task does not read any more to those who do; return what has no heir."""
        dropped: dict[tuple[Target, int], StartpointRequest] = {}
        for orphan in self._orphans:
            heirs = owners.get(orphan.ssp, ()) if orphan.task is None else ()
            if not heirs:
                dropped[orphan.target, orphan.sequence] = orphan
            for task in heirs:
                if self._handed.get(task, {}).get(orphan.ssp) != orphan.sequence:
                    self.give(task, orphan)
        return list(dropped.values())

    def after(self) -> dict[str, TaskFanOut]:
        """Return the fan-outs of all tasks, with what was handed to them as far as another task still holds it."""
        shared = {
            (ssp, request.sequence)
            for held in self.pending.values()
            for ssp, request in held.items()
            if request.task is None
        }
        after: dict[str, TaskFanOut] = {}
        for task in {**self.pending, **self._handed}:
            pending = self.pending.get(task, {})
            handed = {ssp: number for ssp, number in self._handed.get(task, {}).items() if (ssp, number) in shared}
            if pending or handed:
                after[task] = TaskFanOut(pending, handed)
        return after

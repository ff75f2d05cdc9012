"""What a fan-out decides: which task starts where, from the requests and from what tasks have not committed yet.

Plain values in, plain values out; `startpoint_manager.py` reads and writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dagster_adjunct.orchestration.startpoints.request import (
    StartpointRequest,
    Target,
    Unreadable,
    find_target_tasks,
    owners_by_partition,
    pick_newer,
)
from dagster_adjunct.resources.streams.startpoint import describe_startpoint
from dagster_adjunct.resources.streams.system import SystemStreamPartition

Requests = Mapping[SystemStreamPartition, StartpointRequest]
# Whether a commit has taken in this request, which is still there, for this task.
Taken = Callable[[str, StartpointRequest], bool]


@dataclass(frozen=True, slots=True)
class TaskFanOut:
    """What one task has been handed: `pending` is what it still has to apply.

    `handed` holds the sequences of requests for all tasks that it was handed, applied or not, while another task
    has not applied them. Should that one vanish, its startpoint goes to those who read the partition then, but never
    twice to the same task. `unread` is what it was handed and this version can't read: it stays as it is.
    """

    pending: Requests = field(default_factory=dict)
    handed: Mapping[SystemStreamPartition, int] = field(default_factory=dict)
    unread: tuple[Unreadable, ...] = ()


@dataclass(frozen=True, slots=True)
class FanOutState:
    """All that is fanned out in an application.

    `settled` holds the sequences of requests that were fanned out and may not have been deleted yet, by target: a
    fan-out that died between the two steps is repeated without handing anything out twice. `unreadable` are entries
    that can't be read at all.
    """

    tasks: Mapping[str, TaskFanOut] = field(default_factory=dict)
    settled: Mapping[Target, int] = field(default_factory=dict)
    unreadable: tuple[Unreadable, ...] = ()

    def all_unreadable(self) -> tuple[Unreadable, ...]:
        """Return all that can't be read, entries and parts of them."""
        return (*self.unreadable, *(part for held in self.tasks.values() for part in held.unread))


@dataclass(frozen=True, slots=True)
class FanOut:
    """What a fan-out left.

    `tasks` holds all that each task has to apply, also from earlier fan-outs that it has not committed. `unknown`
    are requests for a partition that no task reads, or not the task that they name: they stay until they expire.
    `stranded` had been handed to a task (their names are the keys) that does not read the partition any more, and
    nobody else does: they stay there, for whoever reads it again. `expired` were too old and are gone. `passed_over`
    lost to one that was asked for later and waited at the same task, and are gone. `again` had been applied before
    they were written once more, and are gone: a request is applied once.

    `unreadable` is what this release of Adjunct can't read: it stays until it is taken back. At the partitions in
    `held`, by task, it was handed out already: the task must not read them, for nobody knows from where, and `behind`
    are the requests that wait for that. `left_alone` are those that wait or were handed out where the application has
    startpoints switched off: nothing is done with them.
    """

    tasks: Mapping[str, Requests] = field(default_factory=dict)
    unknown: tuple[StartpointRequest, ...] = ()
    expired: tuple[StartpointRequest, ...] = ()
    stranded: Mapping[str, Requests] = field(default_factory=dict)
    passed_over: tuple[StartpointRequest, ...] = ()
    again: tuple[StartpointRequest, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    held: Mapping[str, frozenset[SystemStreamPartition]] = field(default_factory=dict)
    behind: tuple[StartpointRequest, ...] = ()
    left_alone: tuple[StartpointRequest, ...] = ()

    def without_taken_back(self, handed: Mapping[str, Requests]) -> FanOut:
        """Return it with what is still `handed` to the tasks, a while later: the rest was taken back or replaced."""
        ids = {(task, ssp): request.id for task, held in handed.items() for ssp, request in held.items()}
        tasks = {
            task: {ssp: request for ssp, request in requests.items() if ids.get((task, ssp)) == request.id}
            for task, requests in self.tasks.items()
        }
        return replace(self, tasks=tasks)


@dataclass(frozen=True, slots=True)
class FanOutDecision:
    """The state after a fan-out, its report, and the requests that are done with and can be deleted."""

    state: FanOutState
    report: FanOut
    finished: tuple[StartpointRequest, ...]


def _nothing_taken(task: str, request: StartpointRequest) -> bool:
    return False


def decide_fan_out(
    state: FanOutState,
    requests: Iterable[StartpointRequest],
    tasks: Mapping[str, frozenset[SystemStreamPartition]],
    now_ms: int,
    expiry_ms: int,
    named_only: frozenset[str] = frozenset(),
    taken: Taken = _nothing_taken,
    complete: bool = False,
) -> FanOutDecision:
    """Hand the requests to the tasks that they are for; `tasks` says which partitions each task reads.

    Requests for all tasks are not for those of `named_only`. What is `taken` counts no more: a run that died between
    its commit and the removal leaves it there, and nothing that comes later has to be newer than that. Where the tasks
    are not `complete`, those that are not among them keep what nobody takes over.
    """
    owners = owners_by_partition(tasks, named_only)
    held = _find_held(state, tasks, owners)
    hands = _Distribution(state, tasks, held, taken)
    hands.pass_on(owners, keep=frozenset() if complete else state.tasks.keys() - tasks.keys())

    settled: dict[Target, int] = {}
    unknown, expired, again, behind, finished = [], [], [], [], []
    stuck = {(entry.ssp, entry.task) for entry in state.unreadable if entry.at is None}
    # In the store's order, so that the outcome does not depend on how they are kept.
    for request in sorted(requests, key=lambda request: request.sequence):
        takers = find_target_tasks(request, tasks, owners)
        if state.settled.get(request.target) == request.sequence:
            settled[request.target] = request.sequence
            finished.append(request)
        elif request.is_expired(now_ms, expiry_ms):
            expired.append(request)
            finished.append(request)
        elif request.target in stuck or any(request.ssp in held.get(task, ()) for task in takers):
            behind.append(request)
        elif takers:
            open_to = [task for task in takers if not taken(task, request)]
            for task in open_to:
                hands.give(task, request)
            again += [] if open_to else [request]
            settled[request.target] = request.sequence
            finished.append(request)
        else:
            unknown.append(request)

    report = FanOut(
        {task: pending for task, pending in hands.pending.items() if pending},
        tuple(unknown),
        tuple(expired),
        hands.stranded,
        tuple(hands.passed_over),
        tuple(again),
        held=held,
        behind=tuple(behind),
    )
    return FanOutDecision(FanOutState(hands.after(), settled, state.unreadable), report, tuple(finished))


def remove_pending(
    held: TaskFanOut, ssps: Iterable[SystemStreamPartition] | None, ids: Mapping[SystemStreamPartition, str] | None
) -> TaskFanOut:
    """Return a task's fan-out without these partitions (None: all); with `ids`, only where it is still that one.

    An id is that of a request, or of its startpoint.
    """
    chosen = set(held.pending) if ssps is None else set(ssps)
    pending = {
        ssp: request
        for ssp, request in held.pending.items()
        if ssp not in chosen or (ids is not None and ids.get(ssp) not in (request.id, request.startpoint.id))
    }
    return TaskFanOut(pending, held.handed, held.unread)


def _find_held(
    state: FanOutState,
    tasks: Mapping[str, frozenset[SystemStreamPartition]],
    owners: Mapping[SystemStreamPartition, Sequence[str]],
) -> dict[str, frozenset[SystemStreamPartition]]:
    """Return, by task, the partitions for which something was handed out that can't be read.

    Where it does not say for which partition, it may be for any that its task reads.
    """
    held: dict[str, set[SystemStreamPartition]] = {}
    for entry in state.all_unreadable():
        if entry.at is None:
            continue
        mine, ssp = tasks.get(entry.at, frozenset()), entry.ssp
        if ssp is None or ssp in mine:
            held.setdefault(entry.at, set()).update(mine if ssp is None else [ssp])
        else:  # another task reads the partition now
            for task in owners.get(ssp, ()):
                held.setdefault(task, set()).add(ssp)
    return {task: frozenset(ssps) for task, ssps in held.items() if ssps}


class _Distribution:
    """The tasks' fan-outs while they are decided: begins with what tasks hold of the partitions that they read."""

    def __init__(
        self,
        state: FanOutState,
        tasks: Mapping[str, frozenset[SystemStreamPartition]],
        held: Mapping[str, frozenset[SystemStreamPartition]],
        taken: Taken,
    ) -> None:
        self.pending: dict[str, dict[SystemStreamPartition, StartpointRequest]] = {task: {} for task in tasks}
        self.stranded: dict[str, dict[SystemStreamPartition, StartpointRequest]] = {}
        self.passed_over: list[StartpointRequest] = []
        self._before, self._held = state, held
        self._handed = {task: dict(mine.handed) for task, mine in state.tasks.items()}
        self._orphans: list[tuple[str, StartpointRequest]] = []
        for task, mine in state.tasks.items():
            for ssp, request in mine.pending.items():
                if taken(task, request):
                    continue
                if ssp in tasks.get(task, ()):
                    self.pending[task][ssp] = request
                else:
                    self._orphans.append((task, request))

    def give(self, task: str, request: StartpointRequest) -> None:
        ssp, held = request.ssp, self.pending[task]
        held[ssp] = pick_newer(held[ssp], request) if ssp in held else request
        if held[ssp] is not request:
            self.passed_over.append(request)
        if request.task is None:
            self._handed.setdefault(task, {})[ssp] = request.sequence

    def pass_on(self, owners: Mapping[SystemStreamPartition, Sequence[str]], keep: Collection[str]) -> None:
        """Give what its task does not read any more to those who do; what has no heir stays where it is.

        Heirs that were handed the same before get nothing; what would be gone so stays at the tasks to `keep`.
        """
        orphans = []
        for task, orphan in self._orphans:
            heirs = owners.get(orphan.ssp, ()) if orphan.task is None else ()
            if task in keep and all(self._handed.get(heir, {}).get(orphan.ssp) == orphan.sequence for heir in heirs):
                heirs = ()
            if heirs and not any(orphan.ssp in self._held.get(heir, ()) for heir in heirs):
                orphans.append((orphan, heirs))
                self._handed[task].pop(orphan.ssp, None)
            else:
                self.stranded.setdefault(task, {})[orphan.ssp] = orphan
        for orphan, heirs in orphans:
            for heir in heirs:
                if self._handed.get(heir, {}).get(orphan.ssp) != orphan.sequence:
                    self.give(heir, orphan)

    def after(self) -> dict[str, TaskFanOut]:
        """Return the fan-outs of all tasks, with what was handed to them as far as another task still holds it."""
        whole = {
            task: {**self.stranded.get(task, {}), **self.pending.get(task, {})}
            for task in {**self.pending, **self.stranded, **self._handed}
        }
        shared = {
            (ssp, request.sequence) for held in whole.values() for ssp, request in held.items() if request.task is None
        }
        after: dict[str, TaskFanOut] = {}
        for task, pending in whole.items():
            handed = {ssp: number for ssp, number in self._handed.get(task, {}).items() if (ssp, number) in shared}
            unread = self._before.tasks.get(task, TaskFanOut()).unread
            if pending or handed or unread:
                after[task] = TaskFanOut(pending, handed, unread)
        return after


def describe_dropped(fan_out: FanOut) -> list[str]:
    """Return in words what was deleted and will not be applied, a line each."""
    lines = [f"{_describe(request)} has expired: no run has taken it up in time" for request in fan_out.expired]
    lines += [
        f"{_describe(request)} is passed over: one that was asked for later waits there"
        for request in fan_out.passed_over
    ]
    return lines + [
        f"{_describe(request)} had been applied already, and each request is applied once: ask with a new one"
        for request in fan_out.again
    ]


def describe_unapplied(fan_out: FanOut) -> list[str]:
    """Return in words what is there and not applied by any task, a line each."""
    lines = [
        f"{_describe(request)} waits, and no task "
        f"{'' if request.task is None else repr(request.task) + ' '}reads the partition"
        for request in fan_out.unknown
    ]
    lines += [
        f"{_describe(request)}, handed to {task!r}, waits, and no task reads the partition any more"
        for task, requests in fan_out.stranded.items()
        for request in requests.values()
    ]
    lines += [f"{_describe(request)} waits behind one that can't be read" for request in fan_out.behind]
    held = {ssp for ssps in fan_out.held.values() for ssp in ssps}
    for entry in fan_out.unreadable:
        waits = "a startpoint was handed out" if entry.kind == "fan-out" else "a startpoint waits"
        more = "; nothing is read there until it is taken back" if entry.at and entry.ssp in held else ""
        lines.append(f"{entry.partition or entry.key}: {waits} that is left alone{more}: {entry.error}")
    named = {entry.ssp for entry in fan_out.unreadable}
    lines += [f"{ssp}: nothing is read there: what its task was handed can't be read" for ssp in sorted(held - named)]
    return lines


def describe_left_alone(fan_out: FanOut) -> list[str]:
    """Return in words what is left alone where startpoints are switched off, a line each."""
    return [
        f"{request.ssp}: startpoints are switched off: {describe_startpoint(request.startpoint)} is left alone "
        f"({request.by}: {request.reason})"
        for request in fan_out.left_alone
    ]


def _describe(request: StartpointRequest) -> str:
    return f"{request.ssp}: a startpoint ({request.by}: {request.reason})"

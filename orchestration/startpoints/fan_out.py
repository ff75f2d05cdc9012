"""Decides which task is handed which startpoint requests, given what tasks were handed before;
pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dagster_adjunct.orchestration.startpoints.request import (
    ReadingTasks,
    StartpointRequest,
    Target,
    Unreadable,
    pick_newer,
)
from dagster_adjunct.resources.streams.startpoint import describe_startpoint
from dagster_adjunct.resources.streams.system import SystemStreamPartition

Requests = Mapping[SystemStreamPartition, StartpointRequest]
# Returns whether a commit has applied ("taken") this request for this task.
Taken = Callable[[str, StartpointRequest], bool]


@dataclass(frozen=True, slots=True)
class TaskFanOut:
    """What one task was handed: `pending` are the requests that it still has to apply.

    `handed` has the sequence numbers of requests for all tasks that it was handed, applied or not,
    as long as another task has not applied them. If that task vanishes, its request goes to the
    tasks that read the partition then, but never twice to one task. `unread` are requests that this
    release can't read; they stay as they are.
    """

    pending: Requests = field(default_factory=dict)
    handed: Mapping[SystemStreamPartition, int] = field(default_factory=dict)
    unread: tuple[Unreadable, ...] = ()


@dataclass(frozen=True, slots=True)
class FanOutState:
    """What all tasks of an application were handed.

    `settled` has, by target, the sequence number of a request that was fanned out but is perhaps
    not deleted yet: if the fan-out died before that, the next one only deletes the request.
    `unreadable` are entries that this release can't read.
    """

    tasks: Mapping[str, TaskFanOut] = field(default_factory=dict)
    settled: Mapping[Target, int] = field(default_factory=dict)
    unreadable: tuple[Unreadable, ...] = ()

    def all_unreadable(self) -> tuple[Unreadable, ...]:
        """Return the unreadable entries, and the unreadable requests of readable entries."""
        unreadable = list(self.unreadable)
        for held in self.tasks.values():
            unreadable += held.unread
        return tuple(unreadable)

    def list_pending(self) -> dict[str, Requests]:
        """Return the requests that tasks still have to apply, by task."""
        return {task: held.pending for task, held in self.tasks.items() if held.pending}


@dataclass(frozen=True, slots=True)
class FanOut:
    """The result of a fan-out.

    `tasks` has the requests that each task has to apply, including those of earlier fan-outs.
    `unknown` requests are for a partition that no task reads, or that the named task does not read;
    they stay until they expire. `stranded` requests, by task, were handed to a task that no longer
    reads the partition, and no other task can get them; they stay with it. Three kinds are deleted:
    `expired` requests, those `superseded` by a later one at the same task, and `already_applied`
    ones, which were written again after they were applied.

    `unreadable` entries stay until they are taken back. `held` has, by task, the partitions with
    such an entry: their position is unknown, so the task must not read them, and the `blocked`
    requests wait. `disabled` are requests of an application that disables startpoints.
    """

    tasks: Mapping[str, Requests] = field(default_factory=dict)
    unknown: tuple[StartpointRequest, ...] = ()
    expired: tuple[StartpointRequest, ...] = ()
    stranded: Mapping[str, Requests] = field(default_factory=dict)
    superseded: tuple[StartpointRequest, ...] = ()
    already_applied: tuple[StartpointRequest, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    held: Mapping[str, frozenset[SystemStreamPartition]] = field(default_factory=dict)
    blocked: tuple[StartpointRequest, ...] = ()
    disabled: tuple[StartpointRequest, ...] = ()

    def without_taken_back(self, handed: Mapping[str, Requests]) -> FanOut:
        """Return the fan-out with only what is still `handed` to the tasks; the rest was taken
        back or replaced.
        """
        tasks = {}
        for task, requests in self.tasks.items():
            left = {}
            for ssp, request in requests.items():
                still_handed = handed.get(task, {}).get(ssp)
                if still_handed is not None and still_handed.id == request.id:
                    left[ssp] = request
            tasks[task] = left
        return replace(self, tasks=tasks)


class FanOutDecision(NamedTuple):
    """The state after a fan-out, its report, and the requests that are `done` and can be
    deleted.
    """

    after: FanOutState
    report: FanOut
    done: list[StartpointRequest]


def decide_fan_out(
    state: FanOutState,
    requests: Iterable[StartpointRequest],
    readers: ReadingTasks,
    now_ms: int,
    expiry_ms: int,
    taken: Taken,
    complete: bool,
) -> FanOutDecision:
    """Return the fan-out that hands the requests to the tasks that they are for.

    Pending requests that a commit has `taken` are dropped first, so that they replace no newer one:
    a run that died after its commit has left them. Unless `readers` has all tasks of the
    application (`complete`), tasks that it does not have keep their requests if no other task takes
    them over.
    """
    held = _find_held(state, readers)
    distribution = _Distribution(state, readers.tasks, held, taken)
    keep: Collection[str] = ()
    if not complete:
        keep = state.tasks.keys() - readers.tasks.keys()
    distribution.reassign_orphans(readers.owners, keep)

    settled = []
    unknown = []
    expired = []
    blocked = []
    # For these targets it is not known which request was settled.
    unreadable_targets = {(entry.ssp, entry.task) for entry in state.unreadable if entry.at is None}
    # In the order of their sequences, so that the result does not depend on the storage.
    for request in sorted(requests, key=lambda request: request.sequence):
        tasks = readers.targets_of(request)
        is_held = any(request.ssp in held.get(task, ()) for task in tasks)
        was_handed_out = state.settled.get(request.target) == request.sequence
        if was_handed_out:  # by a fan-out that died before it deleted the request
            settled.append(request)
        elif request.is_expired(now_ms, expiry_ms):
            expired.append(request)
        elif request.target in unreadable_targets or is_held:
            blocked.append(request)
        elif tasks:
            settled.append(request)
            distribution.give_all(tasks, request)
        else:
            unknown.append(request)

    report = FanOut(
        tasks=distribution.list_pending(),
        unknown=tuple(unknown),
        expired=tuple(expired),
        stranded=distribution.stranded,
        superseded=tuple(distribution.superseded),
        already_applied=tuple(distribution.repeated),
        held=held,
        blocked=tuple(blocked),
    )
    sequences = {request.target: request.sequence for request in settled}
    after = FanOutState(distribution.after(), sequences, state.unreadable)
    return FanOutDecision(after, report, done=[*settled, *expired])


def _find_held(
    state: FanOutState, readers: ReadingTasks
) -> dict[str, frozenset[SystemStreamPartition]]:
    """Return, by task, the partitions that it must not read, because an unreadable entry was handed
    out for them.

    If the entry does not say for which partition it is, these are all partitions of its task.
    """
    held: dict[str, frozenset[SystemStreamPartition]] = {}
    for entry in state.all_unreadable():
        if entry.at is None:  # it waits
            continue
        read_there = readers.tasks.get(entry.at, frozenset())
        tasks: Sequence[str] = [entry.at]
        if entry.ssp is None:
            ssps = read_there
        else:
            ssps = frozenset([entry.ssp])
            if entry.ssp not in read_there:  # another task reads the partition now
                tasks = readers.owners.get(entry.ssp, ())
        if not ssps:
            continue
        for task in tasks:
            held[task] = held.get(task, frozenset()) | ssps
    return held


class _Orphan(NamedTuple):
    """A pending request at a task that no longer reads its partition."""

    task: str
    request: StartpointRequest


class _Distribution:
    """What each task has to apply (`pending`) and was handed, while a fan-out is decided.

    It begins with the pending requests of the state, without those that were `taken`. Requests at
    tasks that no longer read the partition are orphans, until `reassign_orphans`.
    """

    def __init__(
        self,
        state: FanOutState,
        tasks: Mapping[str, frozenset[SystemStreamPartition]],
        held: Mapping[str, frozenset[SystemStreamPartition]],
        taken: Taken,
    ) -> None:
        self.pending: dict[str, dict[SystemStreamPartition, StartpointRequest]] = {
            task: {} for task in tasks
        }
        self.stranded: dict[str, dict[SystemStreamPartition, StartpointRequest]] = {}
        self.superseded: list[StartpointRequest] = []
        self.repeated: list[StartpointRequest] = []
        self._before = state
        self._held = held
        self._taken = taken
        self._handed = {task: dict(before.handed) for task, before in state.tasks.items()}
        self._orphans: list[_Orphan] = []
        for task, before in state.tasks.items():
            for ssp, request in before.pending.items():
                if taken(task, request):
                    continue
                if ssp in tasks.get(task, ()):
                    self.pending[task][ssp] = request
                else:
                    self._orphans.append(_Orphan(task, request))

    def give_all(self, tasks: Iterable[str], request: StartpointRequest) -> None:
        """Give a request to the tasks that have not taken it; without any, it is `repeated`."""
        left = [task for task in tasks if not self._taken(task, request)]
        for task in left:
            self.give(task, request)
        if not left:
            self.repeated.append(request)

    def give(self, task: str, request: StartpointRequest) -> None:
        """Give a request to a task; of two for one partition the newer one stays."""
        ssp = request.ssp
        pending = self.pending[task]
        if ssp in pending:
            newest = pick_newer(pending[ssp], request)
        else:
            newest = request
        pending[ssp] = newest
        if newest is not request:
            self.superseded.append(request)
        if request.task is None:
            self._handed.setdefault(task, {})[ssp] = request.sequence

    def was_handed(self, task: str, request: StartpointRequest) -> bool:
        """Whether a task was handed this request, which is for all tasks."""
        return self._handed.get(task, {}).get(request.ssp) == request.sequence

    def list_pending(self) -> dict[str, Requests]:
        """Return what each task has to apply, without tasks that have nothing."""
        return {task: requests for task, requests in self.pending.items() if requests}

    def reassign_orphans(
        self, owners: Mapping[SystemStreamPartition, Sequence[str]], keep: Collection[str]
    ) -> None:
        """Give each orphan that was for all tasks to the tasks that read its partition now
        (`owners`).

        A task that was handed the same request before does not get it again. Orphans for one task,
        and those that no other task may get, stay where they are, as stranded. An orphan that every
        owner was handed before stays at a task in `keep`, and is dropped at other tasks.
        """
        reassigned = []
        for task, request in self._orphans:
            successors = self._find_successors(request, owners)
            is_new = any(not self.was_handed(successor, request) for successor in successors)
            may_leave = is_new or task not in keep
            if successors and may_leave:
                reassigned.append((request, successors))
                self._handed[task].pop(request.ssp, None)
            else:
                self.stranded.setdefault(task, {})[request.ssp] = request
        for request, successors in reassigned:
            for successor in successors:
                if not self.was_handed(successor, request):
                    self.give(successor, request)

    def _find_successors(
        self, orphan: StartpointRequest, owners: Mapping[SystemStreamPartition, Sequence[str]]
    ) -> Sequence[str]:
        """Return the tasks that may get an orphan; none if one holds the partition."""
        if orphan.task is not None:
            return ()
        successors = owners.get(orphan.ssp, ())
        for successor in successors:
            if orphan.ssp in self._held.get(successor, ()):
                return ()
        return successors

    def after(self) -> dict[str, TaskFanOut]:
        """Return what all tasks were handed; a sequence number is kept while the request is
        pending at any task.
        """
        pending_at: dict[str, dict[SystemStreamPartition, StartpointRequest]] = {}
        # The partitions and sequences of requests for all tasks that any task has to apply.
        pending_for_all: set[tuple[SystemStreamPartition, int]] = set()
        for task in {**self.pending, **self.stranded, **self._handed}:
            pending_at[task] = {**self.stranded.get(task, {}), **self.pending.get(task, {})}
            for ssp, request in pending_at[task].items():
                if request.task is None:
                    pending_for_all.add((ssp, request.sequence))
        after: dict[str, TaskFanOut] = {}
        for task, pending in pending_at.items():
            handed = dict(self._handed.get(task, {}).items() & pending_for_all)
            unread = self._before.tasks.get(task, TaskFanOut()).unread
            if pending or handed or unread:
                after[task] = TaskFanOut(pending, handed, unread)
        return after


def describe_dropped(fan_out: FanOut) -> list[str]:
    """Return a line for each request that the fan-out has deleted and that will not be applied."""
    lines = []
    for request in fan_out.expired:
        lines.append(f"{_describe(request)} has expired: no run has taken it up in time")
    for request in fan_out.superseded:
        lines.append(f"{_describe(request)} is skipped: a later request waits there")
    for request in fan_out.already_applied:
        lines.append(
            f"{_describe(request)} had been applied already, and each request is applied once:"
            " write a new one"
        )
    return lines


_WAITS = {"request": "a startpoint waits", "fan-out": "a startpoint was handed out"}


def describe_unapplied(fan_out: FanOut) -> list[str]:
    """Return a line for each request that stays stored, because no task can apply it now."""
    lines = []
    for request in fan_out.unknown:
        task = "" if request.task is None else f"{request.task!r} "
        lines.append(f"{_describe(request)} waits, and no task {task}reads the partition")
    for task, requests in fan_out.stranded.items():
        for request in requests.values():
            lines.append(
                f"{_describe(request)}, handed to {task!r}, waits, and no task reads the partition"
                " any more"
            )
    for request in fan_out.blocked:
        lines.append(f"{_describe(request)} waits behind one that can't be read")
    held = frozenset[SystemStreamPartition]().union(*fan_out.held.values())
    for entry in fan_out.unreadable:
        effect = ""
        if entry.at and entry.ssp in held:
            effect = "; nothing is read there until it is taken back"
        where = entry.partition or entry.key
        lines.append(f"{where}: {_WAITS[entry.kind]} that is left alone{effect}: {entry.error}")
    for ssp in sorted(held.difference(entry.ssp for entry in fan_out.unreadable)):
        lines.append(f"{ssp}: nothing is read there: what its task was handed can't be read")
    return lines


def describe_disabled(fan_out: FanOut) -> list[str]:
    """Return a line for each request that is left alone because the application disables
    startpoints.
    """
    lines = []
    for request in fan_out.disabled:
        position = describe_startpoint(request.startpoint)
        lines.append(
            f"{request.ssp}: startpoints are disabled: {position} is left alone ({request.by}:"
            f" {request.reason})"
        )
    return lines


def _describe(request: StartpointRequest) -> str:
    """Return a description of a request, to be followed by a verb."""
    return f"{request.ssp}: a startpoint ({request.by}: {request.reason})"

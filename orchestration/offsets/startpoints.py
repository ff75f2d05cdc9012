"""StartpointManager: writes requests for startpoints, and hands them to the tasks that are to start there.

    metadata/startpoints/APPLICATION            requests, by partition, or by partition and task
    metadata/startpoints-fan-out/APPLICATION    what each task has to apply, and which requests that came from

A fan-out reads what is fanned out first and the requests after it, commits the new fan-outs at once, and then
deletes the requests, each by its sequence. If another coordinator commits in between, it begins again from what is
there then. If it dies in between, the next one finds the requests settled and only deletes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from orchestration.offsets.fan_out import Decision, FanOut, FanOutState, Requests, TaskFanOut, decide_fan_out, without
from orchestration.offsets.request import (
    OnUnresolved,
    StartpointRequest,
    Target,
    UnreadableRequest,
    check_task,
    request_from_json,
)
from resources.errors import ConfigurationError, MalformedDocumentError
from resources.streams.ssp import SystemStreamPartition

if TYPE_CHECKING:
    from orchestration.application import Application
    from resources.metadata import MetadataStore, Snapshot
    from resources.streams.startpoint import Startpoint

REQUESTS = "startpoints"
FAN_OUTS = "startpoints-fan-out"
EXPIRES_AFTER = timedelta(hours=12)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)


class StartpointManager:
    """The startpoints of one application, as they are stored: nothing here looks whether they can be followed.

    Whoever asks for startpoints uses `Startpoints`, which does. Safe to use from threads and from many processes.
    A request expires `expires_after` its startpoint was created, by `clock`; what was fanned out does not expire. With
    the Application, that is as it says (12 hours for a name). A name that the lake does not know, where it knows
    others, raises ConfigurationError when it is first used.
    """

    def __init__(
        self,
        store: MetadataStore,
        application: Application | str,
        *,
        clock: Callable[[], datetime] | None = None,
        expires_after: timedelta | None = None,
    ) -> None:
        name = application if isinstance(application, str) else application.name
        if expires_after is None:
            expires_after = EXPIRES_AFTER if isinstance(application, str) else application.startpoints_expire_after
        if expires_after < _MS:
            raise ConfigurationError(
                f"startpoints of {name!r} expire after {expires_after}: expected at least a millisecond.",
                f"Leave it out for {EXPIRES_AFTER}.",
            )
        self.application = name
        self._lake, self._is_known = store.lake, not isinstance(application, str)
        self._is_on = isinstance(application, str) or application.startpoints
        self._requests = store.namespace(REQUESTS, name)
        self._fan_outs = store.namespace(FAN_OUTS, name)
        self._clock = clock or _now
        self._expiry_ms = expires_after // _MS

    # -- requests

    def write_startpoint(
        self,
        ssp: SystemStreamPartition,
        startpoint: Startpoint,
        *,
        task: str | None = None,
        by: str,
        reason: str,
        on_unresolved: OnUnresolved = "fail",
    ) -> None:
        """Ask that reading of `ssp` starts at `startpoint`, at every task that reads it or at one.

        Replaces an earlier request for the same partition and task, whatever the clocks said. The same request
        again changes nothing while it is there.
        """
        self.write_startpoints(
            [
                StartpointRequest(
                    ssp=ssp, startpoint=startpoint, task=task, by=by, reason=reason, on_unresolved=on_unresolved
                )
            ]
        )

    def write_startpoints(self, requests: Iterable[StartpointRequest]) -> None:
        """Write many requests in one commit: all of them or none. Of two for one target, the last counts."""
        self.check_on()
        wanted = {_request_key(request.target): request for request in requests}
        if not wanted:
            return
        writers = sorted({request.by for request in wanted.values()})

        def decide(snapshot: Snapshot) -> tuple[dict[str, Any], None]:
            changes = {}
            self._checked(snapshot)
            for key, request in wanted.items():
                before = snapshot.get(key)
                stored = replace(request, sequence=snapshot.version + 1).to_json()
                if before is None or not _equal_but_sequence(before, stored):
                    changes[key] = stored
            return changes, None

        self._requests.transact(decide, by=", ".join(writers[:3]))

    def check_on(self) -> None:
        """Raise ConfigurationError where the application says that there are no startpoints."""
        if not self._is_on:
            raise ConfigurationError(
                f"application {self.application!r} has startpoints switched off (startpoints=False): nothing is "
                "written, and no run would follow it.",
                "Switch them on in the Application; what is stored can be listed and taken back.",
            )

    def read_startpoint(self, ssp: SystemStreamPartition, task: str | None = None) -> Startpoint | None:
        """Return the startpoint asked for at exactly this target; None if there is none, or it has expired."""
        key = _request_key((ssp, task))
        found = self._checked(self._requests.read()).get(key)
        if found is None:
            return None
        request = self._request(key, found)
        return None if request.expired(self._now_ms(), self._expiry_ms) else request.startpoint

    def requests(self) -> list[StartpointRequest]:
        """Return the requests that have not expired, in the order in which the store took them.

        Those that this version can't read are left out: see `unreadable`.
        """
        now = self._now_ms()
        found = self._requests_in(self._checked(self._requests.read()))[0]
        live = [each for each in found if not each.expired(now, self._expiry_ms)]
        return sorted(live, key=lambda each: (each.sequence, each.ssp, each.task or ""))

    def unreadable(self) -> list[UnreadableRequest]:
        """Return the requests that this version of Adjunct can't read; `delete_startpoint` takes them back, too."""
        return self._requests_in(self._checked(self._requests.read()))[1]

    def delete_startpoint(self, ssp: SystemStreamPartition, task: str | None = None) -> bool:
        """Take back the request for exactly this target, also one that can't be read; return whether there was one.

        What is fanned out already stays so: see `remove_fan_out_for_task`.
        """
        found = self._checked(self._requests.read()).get(_request_key((ssp, task)))
        return found is not None and bool(self._take_back({(ssp, task): _sequence(found)}, by="delete"))

    def take_back(self, requests: Iterable[StartpointRequest], *, by: str) -> list[StartpointRequest]:
        """Take these requests back, each only where it is still the one there; return those that nobody was handed.

        They count as fanned out first: a coordinator that has read one, and has not committed yet, decides again.
        """
        wanted = {request.target: request for request in requests}
        taken = self._take_back({target: request.sequence for target, request in wanted.items()}, by=by)
        return [request for target, request in wanted.items() if target in taken]

    # -- fan-outs

    def fan_out(
        self, tasks: Mapping[str, Iterable[SystemStreamPartition]], *, named_only: Iterable[str] = ()
    ) -> FanOut:
        """Hand all requests to the tasks that read their partitions; return what each task has to apply now.

        `tasks` holds all tasks of the application, with all partitions that each reads. A startpoint joins what its
        task has not committed yet and replaces that of the same partition if it is newer. What was pending at a
        task that is gone, or reads the partition no more, goes to those who read it now, if it was for all tasks.
        Tasks of `named_only` get the requests that name them, and none that are for all tasks.
        May be repeated, and run by several coordinators at once.
        """
        if not tasks:
            raise ConfigurationError(
                f"a fan-out for application {self.application!r} names no tasks, and would drop all that is pending.",
                "Pass every task of the plan with the partitions it reads.",
            )
        reading = {check_task(task): frozenset(ssps) for task, ssps in tasks.items()}
        reserved = frozenset(named_only)

        def decide(snapshot: Snapshot) -> tuple[dict[str, Any], Decision]:
            before = self._state_in(snapshot)
            # After the fan-outs, never before: a request that is still there now was not handed out and forgotten
            # before they were read. The swap then makes sure that they have not changed since.
            requests, unreadable = self._requests_in(self._checked(self._requests.read()))
            decision = decide_fan_out(before, requests, reading, self._now_ms(), self._expiry_ms, reserved)
            report = replace(decision.report, unreadable=tuple(unreadable))
            return _difference(before, decision.state), replace(decision, report=report)

        decision = self._fan_outs.transact(decide, by="fan-out")
        self._delete({request.target: request.sequence for request in decision.finished}, by="fan-out")
        return decision.report

    def get_fan_out_for_task(self, task: str) -> Requests:
        """Return what the task has to apply, by partition."""
        key = _task_key(task)
        return self._task_in(key, self._checked(self._fan_outs.read()).get(key)).pending

    def get_fan_outs(self) -> dict[str, Requests]:
        """Return what every task has to apply, by task and partition: all of it in one look."""
        tasks = self._state_in(self._checked(self._fan_outs.read())).tasks
        return {task: held.pending for task, held in tasks.items() if held.pending}

    def remove_fan_out_for_task(
        self,
        task: str,
        ssps: Iterable[SystemStreamPartition] | Literal["all"] = "all",
        *,
        ids: Mapping[SystemStreamPartition, str] | None = None,
    ) -> None:
        """Remove what the task has to apply: all of it when given the task alone, else that of these partitions.

        With `ids`, only where the startpoint is still the one with this id. Whoever has applied startpoints names
        them so: one that joined meanwhile stays.
        """
        if ssps is None or (isinstance(ssps, str) and ssps != "all"):
            raise ConfigurationError(
                f"the partitions to remove from task {task!r} of application {self.application!r} are {ssps!r}: "
                "expected SystemStreamPartitions.",
                'Name them; or leave them out (or write "all") to remove all that the task has to apply.',
            )
        self._remove({task: (None if ssps == "all" else frozenset(ssps), ids)})

    def remove_fan_outs(self, applied: Mapping[str, Mapping[SystemStreamPartition, str]]) -> None:
        """Remove the startpoints that were applied, given by task and partition with their ids, in one commit."""
        self._remove({task: (frozenset(ids), ids) for task, ids in applied.items()})

    # -- inside

    def _checked(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot; an empty one may be that of a mistyped name."""
        if not self._is_known and snapshot.version == 0:
            from orchestration.known_applications import check_known  # by way of the batch log it needs this package

            if self._requests.read().version == 0:
                check_known(self._lake, self.application)
            self._is_known = True
        return snapshot

    def _remove(
        self,
        chosen: Mapping[
            str, tuple[frozenset[SystemStreamPartition] | None, Mapping[SystemStreamPartition, str] | None]
        ],
    ) -> None:
        if not chosen:
            return

        def decide(snapshot: Snapshot) -> tuple[dict[str, Any], None]:
            changes: dict[str, Any] = {}
            for task, (ssps, ids) in chosen.items():
                key = _task_key(task)
                held = self._task_in(key, snapshot.get(key))
                changes[key] = _task_json(without(held, ssps, ids))
            return changes, None

        self._fan_outs.transact(decide, by="applied")

    def _take_back(self, wanted: Mapping[Target, Any], *, by: str) -> set[Target]:
        def decide(snapshot: Snapshot) -> tuple[dict[str, Any], set[Target]]:
            state = self._state_in(snapshot)
            handed = {(each.target, each.sequence) for held in state.tasks.values() for each in held.pending.values()}
            handed |= set(state.settled.items())
            ours = {target for target, sequence in wanted.items() if (target, sequence) not in handed}
            return {_settled_key(target): wanted[target] for target in ours}, ours

        if not wanted:
            return set()
        taken = self._fan_outs.transact(decide, by=by)
        self._delete(wanted, by=by)
        return taken

    def _delete(self, wanted: Mapping[Target, Any], *, by: str) -> None:
        """Delete requests, each only where it still is the one of this sequence."""
        sequences = {_request_key(target): sequence for target, sequence in wanted.items()}
        if not sequences:
            return

        def decide(snapshot: Snapshot) -> tuple[dict[str, Any], None]:
            there = {key: snapshot.get(key) for key in sequences}
            return {key: None for key, found in there.items() if found and _sequence(found) == sequences[key]}, None

        self._requests.transact(decide, by=by)

    def _requests_in(self, snapshot: Snapshot) -> tuple[list[StartpointRequest], list[UnreadableRequest]]:
        found: list[StartpointRequest] = []
        unreadable: list[UnreadableRequest] = []
        for key, value in snapshot.items():
            try:
                found.append(self._request(key, value))
            except MalformedDocumentError as error:
                ssp, task = json.loads(key)
                unreadable.append(UnreadableRequest(SystemStreamPartition.parse(ssp), task, str(error)))
        return found, unreadable

    def _request(self, key: str, value: object) -> StartpointRequest:
        where = f"startpoint request {key} of application {self.application!r}"
        request = request_from_json(value, where)
        if _request_key(request.target) != key:
            raise self._malformed(where, f"it is for {_request_key(request.target)}")
        return request

    def _state_in(self, snapshot: Snapshot) -> FanOutState:
        tasks: dict[str, TaskFanOut] = {}
        settled: dict[Target, int] = {}
        for key, value in snapshot.items():
            match json.loads(key):
                case ["task", str(task)]:
                    tasks[task] = self._task_in(key, value)
                case ["settled", str(ssp), str() | None as target_task]:
                    settled[SystemStreamPartition.parse(ssp), target_task] = int(value)
                case _:
                    raise self._malformed(f"fan-out {key} of application {self.application!r}", "its key is unknown")
        return FanOutState(tasks, settled)

    def _task_in(self, key: str, value: object) -> TaskFanOut:
        if value is None:
            return TaskFanOut()
        where = f"fan-out {key} of application {self.application!r}"
        if not isinstance(value, dict) or set(value) != {"pending", "handed"}:
            raise self._malformed(where, f"it is {type(value).__name__} {value!r:.80}, expected pending and handed")
        pending = {each.ssp: each for each in (request_from_json(item, where) for item in value["pending"])}
        handed = {SystemStreamPartition.parse(ssp): int(number) for ssp, number in value["handed"].items()}
        return TaskFanOut(pending, handed)

    def _malformed(self, where: str, problem: str) -> MalformedDocumentError:
        return MalformedDocumentError(
            f"{where} can't be read: {problem}.",
            "Restore the namespace from a backup or an older object version, or upgrade if a newer version wrote it.",
        )

    def _now_ms(self) -> int:
        return (self._clock() - _EPOCH) // _MS


def _difference(before: FanOutState, after: FanOutState) -> dict[str, Any]:
    """Return the entries that differ, as they are stored; None for what is gone."""
    changes: dict[str, Any] = {}
    for task in {*before.tasks, *after.tasks}:
        held = after.tasks.get(task, TaskFanOut())
        if before.tasks.get(task) != held:
            changes[_task_key(task)] = _task_json(held)
    for target in {*before.settled, *after.settled}:
        sequence = after.settled.get(target)
        if before.settled.get(target) != sequence:
            changes[_settled_key(target)] = sequence
    return changes


def _task_json(held: TaskFanOut) -> dict[str, Any] | None:
    if not held.pending and not held.handed:
        return None
    return {
        "pending": [request.to_json() for _, request in sorted(held.pending.items())],
        "handed": {str(ssp): number for ssp, number in sorted(held.handed.items())},
    }


def _request_key(target: Target) -> str:
    ssp, task = target
    return _key(str(ssp), None if task is None else check_task(task))


def _sequence(stored: object) -> Any:
    """Return the sequence of a stored request, also of one that can't be read."""
    return stored.get("sequence") if isinstance(stored, Mapping) else None


def _settled_key(target: Target) -> str:
    return _key("settled", str(target[0]), target[1])


def _task_key(task: str) -> str:
    return _key("task", check_task(task))


def _key(*parts: str | None) -> str:
    """Return the parts as one key: JSON, so that no name can pass for two parts or for another kind of key."""
    return json.dumps(parts, ensure_ascii=False, separators=(",", ":"))


def _equal_but_sequence(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return {**left, "sequence": 0} == {**right, "sequence": 0}


def _now() -> datetime:
    return datetime.now(UTC)

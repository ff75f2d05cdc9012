"""How requests and fan-outs are stored: as entries of two namespaces, by key. What can't be read is set apart.

requests    [SSP, TASK or null]                 a request
fan-outs    ["task", TASK]                      pending: requests; handed: sequences by partition
            ["settled", SSP, TASK or null]      a sequence
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dagster_adjunct.orchestration.startpoints.requests.fan_out import FanOutState, TaskFanOut
from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import (
    StartpointRequest,
    Target,
    check_task,
    request_from_json,
)
from dagster_adjunct.orchestration.startpoints.requests.unreadable_requests import Unreadable, partition_of
from dagster_adjunct.resources.errors import ConfigurationError, MalformedDocumentError
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

_NEXT = "Take it back (adjunct startpoint clear MODULE:APP --all …), or upgrade if a newer release of Adjunct wrote it."


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads the entries of one application's namespaces."""

    application: str

    def requests(self, entries: Iterable[tuple[str, Any]]) -> tuple[list[StartpointRequest], list[Unreadable]]:
        """Return the requests, and what is among them and can't be read."""
        requests: list[StartpointRequest] = []
        unreadable: list[Unreadable] = []
        for key, value in entries:
            try:
                requests.append(self.request(key, value))
            except MalformedDocumentError as error:
                ssp, task = [*_parts(key), None, None][:2]
                unreadable.append(Unreadable("request", key, value, str(error), _text(ssp), _text(task)))
        return requests, unreadable

    def request(self, key: str, value: object) -> StartpointRequest:
        """Return the request under this key. Raises MalformedDocumentError."""
        where = f"startpoint request {key} of application {self.application!r}"
        request = request_from_json(value, where)
        if request_key(request.target) != key:
            raise self._malformed(where, f"it is for {request_key(request.target)}")
        return request

    def state(self, entries: Iterable[tuple[str, Any]]) -> FanOutState:
        """Return all that is fanned out, with what is among it and can't be read."""
        tasks: dict[str, TaskFanOut] = {}
        settled: dict[Target, int] = {}
        unreadable: list[Unreadable] = []
        for key, value in entries:
            try:
                match _parts(key):
                    case ["task", str(at)]:
                        tasks[at] = self.task(key, value)
                    case ["settled", str(ssp), str() | None as task]:
                        settled[self._settled(key, ssp, task)] = self._number(key, value)
                    case _:
                        raise self._malformed(self._where(key), "its key is unknown")
            except MalformedDocumentError as error:
                unreadable.append(Unreadable("fan-out", key, value, str(error), *_about(key)))
        return FanOutState(tasks, settled, tuple(unreadable))

    def task(self, key: str, value: object) -> TaskFanOut:
        """Return what a task was handed, of that what can't be read apart. Raises MalformedDocumentError."""
        if value is None:
            return TaskFanOut()
        where = self._where(key)
        if not isinstance(value, Mapping) or set(value) != {"pending", "handed"}:
            raise self._malformed(where, f"it is {type(value).__name__} {value!r:.80}, expected pending and handed")
        if not isinstance(value["pending"], list) or not isinstance(value["handed"], Mapping):
            raise self._malformed(where, "pending is no list, or handed no object")
        pending: dict[SystemStreamPartition, StartpointRequest] = {}
        unread: list[Unreadable] = []
        for item in value["pending"]:
            try:
                request = request_from_json(item, where)
            except MalformedDocumentError as error:
                named = item if isinstance(item, Mapping) else {}
                ssp, at = _text(named.get("ssp")), _parts(key)[1]
                unread.append(Unreadable("fan-out", key, item, str(error), ssp, _text(named.get("task")), at))
            else:
                pending[request.ssp] = request
        handed = {self._ssp(where, ssp): self._number(key, number) for ssp, number in value["handed"].items()}
        return TaskFanOut(pending, handed, tuple(unread))

    def _settled(self, key: str, ssp: str, task: str | None) -> Target:
        try:
            return self._ssp(self._where(key), ssp), None if task is None else check_task(task)
        except ConfigurationError as error:
            raise self._malformed(self._where(key), error.problem.rstrip(".")) from error

    def _ssp(self, where: str, text: str) -> SystemStreamPartition:
        ssp = partition_of(text)
        if ssp is None:
            raise self._malformed(where, f"{text!r:.80} is no stream partition")
        return ssp

    def _number(self, key: str, value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self._malformed(self._where(key), f"{value!r:.80} is no sequence, expected an integer")

    def _where(self, key: str) -> str:
        return f"fan-out {key} of application {self.application!r}"

    def _malformed(self, where: str, problem: str) -> MalformedDocumentError:
        return MalformedDocumentError(f"{where} can't be read: {problem}.", _NEXT, document=where)


def difference(before: FanOutState, after: FanOutState) -> dict[str, Any]:
    """Return the entries that differ, as they are stored; None for what is gone."""
    changes: dict[str, Any] = {}
    for task in {*before.tasks, *after.tasks}:
        held = after.tasks.get(task, TaskFanOut())
        if before.tasks.get(task) != held:
            changes[task_key(task)] = task_json(held)
    for target in {*before.settled, *after.settled}:
        sequence = after.settled.get(target)
        if before.settled.get(target) != sequence:
            changes[settled_key(target)] = sequence
    return changes


def task_json(held: TaskFanOut) -> dict[str, Any] | None:
    """Return what a task was handed as it is stored, with what can't be read as it was; None for nothing."""
    if not held.pending and not held.handed and not held.unread:
        return None
    return {
        "pending": [
            *(request.to_json() for _, request in sorted(held.pending.items())),
            *(part.value for part in held.unread),
        ],
        "handed": {str(ssp): number for ssp, number in sorted(held.handed.items())},
    }


def request_key(target: tuple[SystemStreamPartition | str, str | None]) -> str:
    ssp, task = target
    return _key(str(ssp), None if task is None else check_task(task))


def settled_key(target: Target) -> str:
    return _key("settled", str(target[0]), target[1])


def task_key(task: str) -> str:
    return _key("task", check_task(task))


def waits_on(stream: str, key: str, value: object) -> bool:
    """Whether an entry of either namespace is about partitions of a stream, and not only of what was settled there."""
    return _parts(key)[:1] != ["settled"] and f"{stream}." in f"{key} {value}"


def sequence_of(stored: object) -> int | None:
    """Return the sequence of a stored request, also of one that can't be read; None where it has none."""
    sequence = stored.get("sequence") if isinstance(stored, Mapping) else None
    return sequence if isinstance(sequence, int) and not isinstance(sequence, bool) else None


def equal_requests(left: object, right: Mapping[str, Any]) -> bool:
    """Whether two stored requests ask for the same, whatever their ids and when they came."""
    given = {"sequence": 0, "id": ""}
    return isinstance(left, Mapping) and {**left, **given} == {**right, **given}


def _key(*parts: str | None) -> str:
    """Return the parts as one key: JSON, so that no name can pass for two parts or for another kind of key."""
    return json.dumps(parts, ensure_ascii=False, separators=(",", ":"))


def _parts(key: str) -> list[Any]:
    """Return the parts of a key; none of one that this version would not have written."""
    try:
        parts = json.loads(key)
    except ValueError:
        return []
    return parts if isinstance(parts, list) else []


def _about(key: str) -> tuple[str | None, str | None, str | None]:
    """Return the partition and the task that a fan-out's key says a request is for, and to which it was handed."""
    kind, first, second = [*map(_text, _parts(key)), None, None, None][:3]
    return (None, None, first) if kind == "task" else (first, second, None)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None

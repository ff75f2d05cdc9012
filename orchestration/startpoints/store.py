"""Stores startpoint requests, and which of them tasks were handed, in the lake's metadata.

    metadata/startpoints/APPLICATION            by [SSP, TASK or null]:               a request
    metadata/startpoints-fan-out/APPLICATION    by ["task", TASK]:                    pending
                                                requests; handed sequences
                                                by ["settled", SSP, TASK or null]:    a sequence

The sequence of a request is the number of the commit that wrote it. A fan-out reads what tasks were
handed, then the requests; it commits what they are handed now at once, and then deletes the
requests that still have the same sequence. If another process commits in between, it starts over.
If it dies after the commit, the next fan-out finds the sequences settled, and only deletes the
requests. Entries that can't be read are kept, and reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeGuard

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    application_state,
    check_application_known,
)
from dagster_adjunct.orchestration.batch_log.intent import Offsets
from dagster_adjunct.orchestration.startpoints.fan_out import (
    FanOut,
    FanOutState,
    Requests,
    Taken,
    TaskFanOut,
    decide_fan_out,
)
from dagster_adjunct.orchestration.startpoints.request import (
    MS,
    ReadingTasks,
    StartpointRequest,
    Target,
    Unreadable,
    check_task,
    is_dataset_task,
    malformed_error,
    parse_partition,
    to_epoch_ms,
)
from dagster_adjunct.resources.errors import ConfigurationError, MalformedDocumentError
from dagster_adjunct.resources.metadata import MetadataStore, NamespaceSnapshot
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.startpoint import describe_startpoint
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.resources.times import describe_span
from dagster_adjunct.resources.validation import validated_methods

# The new values of entries by their key, None for an entry to remove.
Changes = dict[str, Any]


class ReadRequests(NamedTuple):
    """Stored requests, and the entries that can't be read."""

    requests: list[StartpointRequest]
    unreadable: list[Unreadable]


def read_requests(application: str, entries: Iterable[tuple[str, Any]]) -> ReadRequests:
    """Return the requests in these stored entries (key, value), and which entries can't be read."""
    requests: list[StartpointRequest] = []
    unreadable: list[Unreadable] = []
    for key, value in entries:
        try:
            requests.append(read_request(application, key, value))
        except MalformedDocumentError as error:
            ssp, task = _first_texts(key, 2)
            unreadable.append(Unreadable("request", key, value, str(error), ssp, task))
    return ReadRequests(requests, unreadable)


def read_request(application: str, key: str, value: object) -> StartpointRequest:
    """Return the request stored under this key. Raises MalformedDocumentError, also if it is for
    another target.
    """
    where = f"startpoint request {key} of application {application!r}"
    request = StartpointRequest.from_json(value, where)
    own_key = request_key(request.ssp, request.task)
    if own_key != key:
        raise malformed_error(where, f"it is for {own_key}")
    return request


def read_fan_outs(application: str, entries: Iterable[tuple[str, Any]]) -> FanOutState:
    """Return what tasks were handed, from these stored entries (key, value), including
    unreadable entries.
    """
    tasks: dict[str, TaskFanOut] = {}
    settled: dict[Target, int] = {}
    unreadable: list[Unreadable] = []
    for key, value in entries:
        where = _where(application, key)
        try:
            match _parts(key):
                case ["task", str(at)]:
                    tasks[at] = read_task(application, key, value)
                case ["settled", str(ssp), str() | None as task]:
                    settled[_read_target(where, ssp, task)] = _read_sequence(where, value)
                case _:
                    raise malformed_error(where, "its key is unknown")
        except MalformedDocumentError as error:
            unreadable.append(_unreadable_fan_out(key, value, str(error)))
    return FanOutState(tasks, settled, tuple(unreadable))


def read_task(application: str, key: str, value: object) -> TaskFanOut:
    """Return what a task was handed; requests that can't be read are in `unread`.

    Raises MalformedDocumentError if the whole entry can't be read.
    """
    if value is None:
        return TaskFanOut()
    where = _where(application, key)
    if not isinstance(value, Mapping) or set(value) != {"pending", "handed"}:
        raise malformed_error(
            where, f"it is {type(value).__name__} {value!r:.80}, expected pending and handed"
        )
    if not isinstance(value["pending"], list) or not isinstance(value["handed"], Mapping):
        raise malformed_error(where, "pending is not a list, or handed is not an object")
    pending: dict[SystemStreamPartition, StartpointRequest] = {}
    unread: list[Unreadable] = []
    for item in value["pending"]:
        try:
            request = StartpointRequest.from_json(item, where)
        except MalformedDocumentError as error:
            fields = item if isinstance(item, Mapping) else {}
            ssp = _text_or_none(fields.get("ssp"))
            task = _text_or_none(fields.get("task"))
            at = _parts(key)[1]
            unread.append(Unreadable("fan-out", key, item, str(error), ssp, task, at))
        else:
            pending[request.ssp] = request
    handed = {}
    for ssp, number in value["handed"].items():
        target = _read_target(where, ssp, None)
        handed[target.ssp] = _read_sequence(where, number)
    return TaskFanOut(pending, handed, tuple(unread))


def _where(application: str, key: str) -> str:
    """Return how errors name a fan-out entry."""
    return f"fan-out {key} of application {application!r}"


def _read_target(where: str, ssp: str, task: str | None) -> Target:
    """Return a target from its stored form; raises MalformedDocumentError."""
    try:
        partition = SystemStreamPartition.parse(ssp)
        if task is not None:
            check_task(task)
    except ConfigurationError as error:
        raise malformed_error(where, error.problem) from error
    return Target(partition, task)


def _read_sequence(where: str, value: object) -> int:
    """Return the sequence of a request from its stored form; raises MalformedDocumentError."""
    if _is_sequence(value):
        return value
    raise malformed_error(where, f"{value!r:.80} is not a sequence: expected an integer")


def _is_sequence(value: object) -> TypeGuard[int]:
    """Whether a stored value is the sequence of a request."""
    return isinstance(value, int) and not isinstance(value, bool)


def diff_states(before: FanOutState, after: FanOutState) -> Changes:
    """Return, by key, the stored form of each entry that has changed; None for an entry to
    remove.
    """
    changes: Changes = {}
    for task in {*before.tasks, *after.tasks}:
        held = after.tasks.get(task, TaskFanOut())
        if before.tasks.get(task) != held:
            changes[task_key(task)] = task_to_json(held)
    for target in {*before.settled, *after.settled}:
        sequence = after.settled.get(target)
        if before.settled.get(target) != sequence:
            changes[settled_key(target)] = sequence
    return changes


def task_to_json(held: TaskFanOut) -> dict[str, Any] | None:
    """Return the stored form of what a task was handed, with unreadable requests as they were;
    None for nothing.
    """
    if held == TaskFanOut():
        return None
    pending: list[Any] = [request.to_json() for _, request in sorted(held.pending.items())]
    pending += [entry.value for entry in held.unread]
    handed = {str(ssp): number for ssp, number in sorted(held.handed.items())}
    return {"pending": pending, "handed": handed}


def request_key(ssp: SystemStreamPartition | str, task: str | None) -> str:
    """Return the key of the request for a partition, or a text that names none, and a task."""
    if task is not None:
        check_task(task)
    return _key(str(ssp), task)


def settled_key(target: Target) -> str:
    """Return the key of the settled sequence of a target."""
    return _key("settled", str(target.ssp), target.task)


def task_key(task: str) -> str:
    """Return the key of what a task was handed."""
    return _key("task", check_task(task))


def concerns_stream(stream: str, key: str, value: object) -> bool:
    """Return whether an entry has a request for the stream that is not applied: a waiting one, or
    one at a task.

    Sequences of requests that were handed out or settled do not count. An entry that can't be read
    counts if it has the name of a partition of the stream anywhere.
    """
    if _parts(key)[:1] == ["settled"]:
        return False
    if isinstance(value, Mapping):
        unapplied = value.get("pending", value)
    else:
        unapplied = value
    return f"{stream}." in f"{key} {unapplied}"  # before the number of a partition


def parse_sequence(stored: object) -> int | None:
    """Return the sequence of a request in stored form, which may be unreadable otherwise; None
    if it has none.
    """
    if not isinstance(stored, Mapping):
        return None
    sequence = stored.get("sequence")
    if not _is_sequence(sequence):
        return None
    return sequence


def is_same_request(left: object, right: Mapping[str, Any]) -> bool:
    """Return whether two requests in stored form differ at most in their ids and sequences; False
    if `left` is none, or None.
    """
    if not isinstance(left, Mapping):
        return False
    ignored = {"sequence": 0, "id": ""}
    return {**left, **ignored} == {**right, **ignored}


def _key(*parts: str | None) -> str:
    """Return the parts as a key, a JSON array: a name with any characters stays one part."""
    return json.dumps(parts, ensure_ascii=False, separators=(",", ":"))


def _parts(key: str) -> list[Any]:
    """Return the parts of a key; [] for a key that is not a JSON array, which this release would
    not have written.
    """
    try:
        parts = json.loads(key)
    except ValueError:
        return []
    if not isinstance(parts, list):
        return []
    return parts


def _unreadable_fan_out(key: str, value: object, error: str) -> Unreadable:
    """Return an entry of the fan-outs that can't be read, with what its key says: the task that was
    handed something, or the partition and task of a settled sequence.
    """
    kind, first, second = _first_texts(key, 3)
    if kind == "task":
        return Unreadable("fan-out", key, value, error, at=first)
    return Unreadable("fan-out", key, value, error, partition=first, task=second)


def _first_texts(key: str, number: int) -> list[str | None]:
    """Return the first parts of a key, None for those that are missing or no texts."""
    texts: list[str | None] = [None] * number
    for place, part in enumerate(_parts(key)[:number]):
        texts[place] = _text_or_none(part)
    return texts


def _text_or_none(value: object) -> str | None:
    """Return a stored value that is a text; None for any other."""
    if isinstance(value, str):
        return value
    return None


@dataclass(frozen=True, slots=True)
class StoredStartpoints:
    """An application's stored startpoints, read `at` this time by the lake's clock.

    `waiting` are requests that no fan-out has handed out, in the order in which they were written;
    `expired` ones are deleted by the next fan-out. `handed` has, by task, the requests that it
    still has to apply. `unreadable` are entries that this release of Adjunct can't read; they stay
    until they are taken back.
    """

    waiting: Sequence[StartpointRequest]
    expired: Sequence[StartpointRequest]
    handed: Mapping[str, Requests]
    unreadable: Sequence[Unreadable]
    at: datetime


@dataclass(frozen=True, slots=True)
class PendingStartpoint:
    """A startpoint that is not applied yet: it waits (`at` is None), or was handed to the task
    `at`.

    `offset` is its start offset, if a run has found and stored it.
    """

    request: StartpointRequest
    at: str | None = None
    offset: str | None = None

    @property
    def is_of_dataset(self) -> bool:
        """Whether it rewinds a dataset; batches apply all others."""
        return is_dataset_task(self.at or self.request.task or "")

    def summary(self) -> str:
        """Return the startpoint as one line."""
        request = self.request
        asked = f"{request.ssp}: {describe_startpoint(request.startpoint)}"
        if request.until is not None:
            asked += f" until {describe_startpoint(request.until)}"
        if request.task is not None:
            asked += f" for {request.task}"
        where = "waiting" if self.at is None else f"handed to {self.at}"
        if self.offset is not None:
            where += f", found at offset {self.offset}"
        return f"{asked}, {where} ({request.by}: {request.reason})"


def iter_unapplied(
    handed: Mapping[str, Requests], state: ApplicationState
) -> Iterator[PendingStartpoint]:
    """Yield the startpoints in `handed` that no batch has applied; a crash may have left applied
    ones there.
    """
    for task, requests in handed.items():
        for ssp, request in requests.items():
            if state.offsets.has_taken(ssp, request.id):
                continue
            resolved = state.offsets.resolved.get(ssp)
            offset = None
            if resolved is not None and resolved.id == request.id:
                offset = resolved.offset
            yield PendingStartpoint(request, task, offset)


REQUESTS = "startpoints"
FAN_OUTS = "startpoints-fan-out"
EXPIRES_AFTER = timedelta(hours=12)


@validated_methods
class StartpointManager:
    """The stored startpoints of one application. It does not check whether they can be applied, as
    `Startpoints` does.

    Safe to use from threads and processes. A waiting request expires `expires_after` the creation
    of its startpoint, by the lake's clock; one that was handed to a task does not. The default is
    the Application's setting, or 12 hours if `application` is a name. The first use raises
    ConfigurationError for a name that the lake does not know, if it knows other applications.
    """

    def __init__(
        self,
        store: MetadataStore,
        application: Application | str,
        *,
        expires_after: timedelta | None = None,
    ) -> None:
        if isinstance(application, str):
            name = application
            self._is_known = False
            self._is_enabled = True
            default = EXPIRES_AFTER
        else:
            name = application.name
            self._is_known = True
            self._is_enabled = application.startpoints
            default = application.startpoints_expire_after
        if expires_after is None:
            expires_after = default
        if expires_after < MS:
            raise ConfigurationError(
                f"startpoints of {name!r} expire after {describe_span(expires_after)}: expected a "
                "timedelta of at least a millisecond.",
                f"Leave expires_after out for the default, {EXPIRES_AFTER}.",
                argument="expires_after",
            )
        self.application = name
        self.lake = store.lake
        self._requests = store.namespace(REQUESTS, name)
        self._fan_outs = store.namespace(FAN_OUTS, name)
        self._expiry_ms = expires_after // MS

    def continue_from(self, old: str, *, by: str) -> None:
        """Take over the requests and fan-outs of the application's former name `old`; called by
        a rename.
        """
        store = MetadataStore(self.lake)
        self._requests.continue_from(store.namespace(REQUESTS, old), by=by)
        self._fan_outs.continue_from(store.namespace(FAN_OUTS, old), by=by)

    # -- requests

    def write_startpoints(self, requests: Iterable[StartpointRequest]) -> None:
        """Write many requests in one commit, all or none. Of two for the same target, only the last
        is written.

        Each is applied once, by its id, however often it is written. Raises ConfigurationError,
        also if it would replace a request that can't be read.
        """
        self.check_on()
        wanted = {}
        for request in map(_require_request, requests):
            wanted[request_key(request.ssp, request.task)] = request
        if not wanted:
            return

        def decide(snapshot: NamespaceSnapshot) -> tuple[Changes, None]:
            """Write what differs from what is stored."""
            changes = {}
            self._checked(snapshot)  # called for its error
            for key, request in wanted.items():
                before = snapshot.get(key)
                self._check_readable(key, before)
                stored = replace(request, sequence=snapshot.version + 1).to_json()
                if not is_same_request(before, stored):
                    changes[key] = stored
            return changes, None

        writers = sorted({request.by for request in wanted.values()})
        self._requests.transact(decide, by=", ".join(writers[:3]))

    def _check_readable(self, key: str, stored: object) -> None:
        """Raise ConfigurationError if the request that is `stored` under a key can't be read; None
        is no request.
        """
        if stored is None:
            return
        try:
            read_request(self.application, key, stored)
        except MalformedDocumentError as error:
            raise ConfigurationError(
                "nothing is written: it would replace a request that can't be read."
                f" {error.problem}",
                "Take that back first (adjunct startpoint clear MODULE:APP PARTITION --reason …, or"
                " delete_startpoint in Python), or upgrade if a newer version wrote it.",
                application=self.application,
            ) from error

    def check_on(self) -> None:
        """Raise ConfigurationError if the application disables startpoints."""
        if not self._is_enabled:
            raise ConfigurationError(
                f"application {self.application!r} has startpoints disabled (startpoints=False):"
                " nothing is written, and no run would apply it.",
                "Enable them in the Application; stored requests can be listed and taken back.",
                argument="startpoints",
                application=self.application,
            )

    def read(self) -> StoredStartpoints:
        """Return all requests and fan-outs."""
        at = self.lake.now()
        now = to_epoch_ms(at)
        # Requests first: a fan-out in between moves requests to tasks, so each is read in at least
        # one of the two.
        stored = self._checked(self._requests.read())
        handed = self._fan_outs.read()
        read = read_requests(self.application, stored.items())
        state = read_fan_outs(self.application, handed.items())
        waiting = []
        expired = []
        for request in sorted(read.requests, key=_written_order):
            if request.is_expired(now, self._expiry_ms):
                expired.append(request)
            else:
                waiting.append(request)
        unreadable = [*read.unreadable, *state.all_unreadable()]
        return StoredStartpoints(waiting, expired, state.list_pending(), unreadable, at)

    def fingerprint(self) -> str | None:
        """Return a text that changes with every change to the stored requests; None if there never
        were any.

        Costs one read of the store.
        """
        return self._requests.etag()

    def has_any(self) -> bool:
        """Return whether anything is stored that a fan-out would have to read."""
        return len(self._requests.read()) > 0 or len(self._fan_outs.read()) > 0

    def delete_startpoint(self, ssp: SystemStreamPartition | str, task: str | None = None) -> bool:
        """Take back the waiting request for exactly this target, even an unreadable one; return
        whether there was one.

        If an unreadable request names no valid partition, pass the text that it has there, as
        returned by `read`. Requests that were handed to tasks stay: see `remove_fan_out_for_task`.
        """
        partition = parse_partition(str(ssp))
        key = request_key(ssp, task)
        stored = self._checked(self._requests.read()).get(key)
        if stored is None:
            return False
        return self._delete_request(key, stored, partition, task, by="delete")

    def delete_unreadable(self, unreadable: Iterable[Unreadable], *, by: str) -> list[Unreadable]:
        """Take back unreadable entries that have not changed since they were read; return those
        taken back.
        """
        gone: list[Unreadable] = []
        for entry in unreadable:
            if entry.kind == "fan-out":
                is_gone = self._remove_unreadable(entry, by)
            else:
                is_gone = self._delete_request(entry.key, entry.value, entry.ssp, entry.task, by=by)
            if is_gone:
                gone.append(entry)
        return gone

    def take_back(
        self, requests: Iterable[StartpointRequest], *, by: str
    ) -> list[StartpointRequest]:
        """Take back these requests, if they are still stored; return those that no task has been
        handed.
        """
        wanted = {request.target: request for request in requests}
        sequences = {target: request.sequence for target, request in wanted.items()}
        taken = self._take_back(sequences, by=by)
        return [wanted[target] for target in wanted if target in taken]

    def _take_back(self, wanted: Mapping[Target, int], *, by: str) -> set[Target]:
        """Delete the requests with these targets and sequences; return the targets of those that no
        task was handed.

        Before that, their sequences are stored as settled: a fan-out that has read a request and
        not committed yet then has a conflict, starts over, and does not hand it out.
        """

        def decide(snapshot: NamespaceSnapshot) -> tuple[Changes, set[Target]]:
            """Settle the sequences that no task was handed; return their targets."""
            state = read_fan_outs(self.application, snapshot.items())
            handed = set(state.settled.items())
            for held in state.tasks.values():
                for request in held.pending.values():
                    handed.add((request.target, request.sequence))
            not_handed = dict(wanted.items() - handed)
            changes = {settled_key(target): sequence for target, sequence in not_handed.items()}
            return changes, set(not_handed)

        if not wanted:
            return set()
        taken = self._fan_outs.transact(decide, by=by)
        self._delete(wanted, by=by)
        return taken

    def _delete(self, wanted: Mapping[Target, int], *, by: str) -> None:
        """Delete the request of each target if it still has this sequence, so that a newer one
        stays.
        """

        def decide(snapshot: NamespaceSnapshot) -> tuple[Changes, None]:
            """Delete the requests that still have their sequences."""
            changes: Changes = {}
            for target, sequence in wanted.items():
                key = request_key(target.ssp, target.task)
                if parse_sequence(snapshot.get(key)) == sequence:
                    changes[key] = None
            return changes, None

        if wanted:
            self._requests.transact(decide, by=by)

    def _delete_request(
        self,
        key: str,
        value: object,
        ssp: SystemStreamPartition | None,
        task: str | None,
        *,
        by: str,
    ) -> bool:
        """Take back a request, which may be unreadable, if it has not changed since it was read;
        return whether it was.

        Without a valid target or sequence it can't have been handed out: then its entry is only
        deleted.
        """
        sequence = parse_sequence(value)
        if ssp is not None and sequence is not None and request_key(ssp, task) == key:
            return bool(self._take_back({Target(ssp, task): sequence}, by=by))

        def decide(snapshot: NamespaceSnapshot) -> tuple[Changes, bool]:
            """Delete the entry if it has not changed; return whether it has not."""
            if snapshot.get(key) == value:
                return {key: None}, True
            return {}, False

        return self._requests.transact(decide, by=by)

    def _remove_unreadable(self, unread: Unreadable, by: str) -> bool:
        """Remove an unreadable entry, or unreadable request of an entry, of the fan-outs if it has
        not changed.

        Returns whether it was removed.
        """

        def decide(snapshot: NamespaceSnapshot) -> tuple[Changes, bool]:
            """Remove the entry, or the request from its entry; return whether it was there."""
            entry = snapshot.get(unread.key)
            is_whole_entry = entry is not None and entry == unread.value
            if is_whole_entry:
                return {unread.key: None}, True
            try:
                held = read_task(self.application, unread.key, entry)
            except MalformedDocumentError:  # another unreadable entry was written since
                return {}, False
            # Else the value is one request: the task keeps the others, readable or not.
            kept = tuple(other for other in held.unread if other.value != unread.value)
            was_there = kept != held.unread
            return {unread.key: task_to_json(replace(held, unread=kept))}, was_there

        return self._fan_outs.transact(decide, by=by)

    # -- fan-outs

    def fan_out(
        self,
        tasks: Mapping[str, Iterable[SystemStreamPartition]],
        *,
        named_only: Iterable[str] = (),
        taken: Taken | None = None,
        complete: bool = False,
    ) -> FanOut:
        """Hand all requests to the tasks that read their partitions; return what each task has to
        apply now.

        `tasks` has, by task, all partitions that it reads; if it has one task that reads a
        partition, it must have all that do. Tasks in `named_only` get only requests that name them.
        A request is added to those that the task has not applied yet; of two for one partition the
        newer one stays.

        A pending request at a task that is gone, or no longer reads the partition, goes to the
        tasks that read it now if it was for all tasks; else it stays there. With `complete`,
        `tasks` has all tasks of the application: then a request at any other task is dropped if all
        readers of the partition were handed it.

        Requests that are applied are removed first: `taken` returns whether a commit has applied a
        request for a task (default: looks in the application's own commits). Safe to repeat, and to
        call in several processes at once.
        """
        if not tasks:
            problem = (
                f"a fan-out for application {self.application!r} names no tasks, and would drop all"
                " pending requests."
            )
            step = "Pass every task of the plan with the partitions it reads."
            raise ConfigurationError(problem, step, argument="tasks", application=self.application)
        reading = {check_task(task): frozenset(ssps) for task, ssps in tasks.items()}
        readers = ReadingTasks(reading, {}, frozenset(named_only))

        def decide(snapshot: NamespaceSnapshot) -> tuple[Changes, _FanOutOutcome]:
            """Decide by what is stored now; return the outcome."""
            # Its own commits are read when first needed, and again if the transaction is repeated
            # after a conflict.
            has_taken = taken or self._taken_by_batches()
            before = read_fan_outs(self.application, snapshot.items())
            # Requests are read after the fan-outs: one that is still stored had not been handed out
            # and deleted before the fan-outs were read, and the commit fails if these have changed
            # since.
            stored = self._checked(self._requests.read())
            now = to_epoch_ms(self.lake.now())
            read = read_requests(self.application, stored.items())
            decision = decide_fan_out(
                before, read.requests, readers, now, self._expiry_ms, has_taken, complete
            )
            unreadable = (*read.unreadable, *before.all_unreadable())
            report = replace(decision.report, unreadable=unreadable)
            changes = diff_states(before, decision.after)
            return changes, _FanOutOutcome(snapshot.version, bool(changes), report, decision.done)

        outcome = self._fan_outs.transact(decide, by="fan-out")
        # Without changes there is no commit, which would have detected another fan-out between the
        # two reads.
        while not outcome.commits and self._fan_outs.read().version != outcome.version:
            outcome = self._fan_outs.transact(decide, by="fan-out")
        self._delete({request.target: request.sequence for request in outcome.done}, by="fan-out")
        return outcome.report

    def _taken_by_batches(self) -> Taken:
        """Return a function that looks in the application's commits, which it reads once."""
        offsets = cache(lambda: application_state(self.lake, self.application).offsets)
        return lambda task, request: offsets().has_taken(request.ssp, request.id)

    def get_fan_outs(self) -> dict[str, Requests]:
        """Return, by task and partition, the requests that are still to be applied, from one read
        of the store.

        Unreadable entries are left out.
        """
        snapshot = self._checked(self._fan_outs.read())
        return read_fan_outs(self.application, snapshot.items()).list_pending()

    def remove_fan_out_for_task(
        self,
        task: str,
        ssps: Iterable[SystemStreamPartition] | Literal["all"] = "all",
        *,
        ids: Offsets | None = None,
    ) -> None:
        """Remove the requests that the task has to apply, all or those for these partitions.

        With `ids`, only the request with this id, or whose startpoint has it, is removed at each
        partition, so that a newer one stays. Unreadable entries stay too; `delete_unreadable`
        removes them.
        """
        chosen = None if ssps == "all" else frozenset(ssps)

        def is_removed(request: StartpointRequest) -> bool:
            """Whether the request is one of those to remove."""
            if chosen is not None and request.ssp not in chosen:
                return False
            return ids is None or _has_id(ids, request)

        self._remove({task: is_removed})

    def remove_fan_outs(self, applied: Mapping[str, Offsets]) -> None:
        """Remove the requests with these ids, given by task and partition, from what the tasks
        have to apply.
        """
        chosen: dict[str, Callable[[StartpointRequest], bool]] = {}
        for task, ids in applied.items():
            if ids:
                chosen[task] = partial(_has_id, ids)
        self._remove(chosen)

    def remove_applied(
        self, tasks: Mapping[str, Iterable[SystemStreamPartition]], applied: Offsets
    ) -> None:
        """Remove the startpoints that a commit of offsets has applied from all tasks that read
        their partitions.

        `tasks` has the partitions that each of the plan's tasks reads, `applied` the id of the
        request by partition.
        """
        by_task: dict[str, Offsets] = {}
        for task, ssps in tasks.items():
            for ssp in ssps:
                if ssp in applied:
                    by_task.setdefault(task, {})[ssp] = applied[ssp]
        self.remove_fan_outs(by_task)

    def _remove(self, chosen: Mapping[str, Callable[[StartpointRequest], bool]]) -> None:
        """Remove some of the requests that tasks still have to apply: those for which the task's
        function returns True.
        """
        if not chosen:
            return

        def decide(snapshot: NamespaceSnapshot) -> tuple[Changes, None]:
            """Write what each task still has to apply."""
            changes: Changes = {}
            for task, is_removed in chosen.items():
                key = task_key(task)
                with suppress(MalformedDocumentError):  # unreadable entries stay
                    held = read_task(self.application, key, snapshot.get(key))
                    left = {}
                    for ssp, request in held.pending.items():
                        if not is_removed(request):
                            left[ssp] = request
                    changes[key] = task_to_json(replace(held, pending=left))
            return changes, None

        self._fan_outs.transact(decide, by="applied")

    # -- inside

    def _checked(self, snapshot: NamespaceSnapshot) -> NamespaceSnapshot:
        """Return the snapshot. If nothing was ever stored, raises ConfigurationError for a name
        that the lake does not know, which is probably mistyped."""
        if not self._is_known and snapshot.version == 0:
            if self._requests.read().version == 0:
                check_application_known(self.lake, self.application)
            self._is_known = True
        return snapshot


class _FanOutOutcome(NamedTuple):
    """What a fan-out has decided by this `version` of the fan-outs: whether it `commits` a change,
    its report, and the requests that are `done` and can be deleted.
    """

    version: int
    commits: bool
    report: FanOut
    done: list[StartpointRequest]


def _written_order(request: StartpointRequest) -> tuple[int, SystemStreamPartition, str]:
    """Return the sort key by which requests are in the order in which they were written."""
    return (request.sequence, request.ssp, request.task or "")


def _has_id(ids: Offsets, request: StartpointRequest) -> bool:
    """Return whether the id at the request's partition is that of the request or of its
    startpoint.
    """
    return ids.get(request.ssp) in (request.id, request.startpoint.id)


def _require_request(request: object) -> StartpointRequest:
    """Return a request to write; raises ConfigurationError for any other object."""
    if type(request) is StartpointRequest:  # a subclass can't be read back
        return request
    raise ConfigurationError(
        f"{request!r:.200} is not a StartpointRequest, so it can't be written.",
        "Write StartpointRequest(ssp=…, startpoint=…, by=…, reason=…).",
        argument="request",
    )


def open_startpoints(lake: Lake, app: Application) -> StartpointManager:
    """Return the stored startpoints of an application, with its expiry."""
    return StartpointManager(MetadataStore(lake), app)

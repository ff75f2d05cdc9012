"""StartpointManager: writes requests for startpoints, and hands them to the tasks that are to start there.

    metadata/startpoints/APPLICATION            requests, by partition, or by partition and task
    metadata/startpoints-fan-out/APPLICATION    what each task has to apply, and which requests that came from

A fan-out reads what is fanned out first and the requests after it, commits the new fan-outs at once, and then
deletes the requests, each by its sequence. If another coordinator commits in between, it begins again from what is
there then. If it dies in between, the next one finds the requests settled and only deletes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.orchestration.startpoints.requests.fan_out import (
    FanOut,
    FanOutDecision,
    Requests,
    Taken,
    decide_fan_out,
)
from dagster_adjunct.orchestration.startpoints.requests.startpoint_documents import (
    RequestReader,
    difference,
    equal_requests,
    request_key,
    sequence_of,
)
from dagster_adjunct.orchestration.startpoints.requests.startpoint_entries import StartpointEntries
from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import (
    StartpointRequest,
    check_partition,
    check_task,
)
from dagster_adjunct.orchestration.startpoints.requests.startpoints_not_applied import StoredStartpoints
from dagster_adjunct.orchestration.startpoints.requests.unreadable_requests import Unreadable, partition_of
from dagster_adjunct.resources.errors import ConfigurationError, MalformedDocumentError
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.resources.metadata import NamespaceSnapshot
    from dagster_adjunct.resources.objects.lake import Lake

REQUESTS = "startpoints"
FAN_OUTS = "startpoints-fan-out"
EXPIRES_AFTER = timedelta(hours=12)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)


class StartpointManager:
    """The startpoints of one application, as they are stored: nothing here looks whether they can be followed.

    Whoever asks for startpoints uses `Startpoints`, which does. Safe to use from threads and from many processes.
    A request expires `expires_after` its startpoint was created, by the lake's clock; what was fanned out does not
    expire. With the Application, that is as it says (12 hours for a name). A name that the lake does not know, where it
    knows others, raises ConfigurationError when it is first used.
    """

    def __init__(
        self,
        store: MetadataStore,
        application: Application | str,
        *,
        expires_after: timedelta | None = None,
    ) -> None:
        name = application if isinstance(application, str) else application.name
        if expires_after is None:
            expires_after = EXPIRES_AFTER if isinstance(application, str) else application.startpoints_expire_after
        if not isinstance(expires_after, timedelta) or expires_after < _MS:
            raise ConfigurationError(
                f"startpoints of {name!r} expire after {expires_after!s}: expected a timedelta of at least a "
                "millisecond.",
                f"Leave it out for {EXPIRES_AFTER}.",
                argument="expires_after",
            )
        self.application, self.lake = name, store.lake
        self._is_known = not isinstance(application, str)
        self._stored = RequestReader(name)
        self._is_on = isinstance(application, str) or application.startpoints
        self._requests = store.namespace(REQUESTS, name)
        self._fan_outs = store.namespace(FAN_OUTS, name)
        self._entries = StartpointEntries(self._requests, self._fan_outs, self._stored)
        self._expiry_ms = expires_after // _MS

    def continue_from(self, old: str, *, by: str) -> None:
        """Begin with what is asked for, and handed to tasks, of the application that was called `old`."""
        store = MetadataStore(self.lake)
        self._requests.continue_from(store.namespace(REQUESTS, old), by=by)
        self._fan_outs.continue_from(store.namespace(FAN_OUTS, old), by=by)

    # -- requests

    def write_startpoints(self, requests: Iterable[StartpointRequest]) -> None:
        """Write many requests in one commit: all of them or none. Of two for one target, the last counts.

        Each is applied once, by its id, however often it is written. Raises ConfigurationError, also where one waits at
        a target that this version can't read: it would be lost.
        """
        self.check_on()
        wanted = {request_key(request.target): request for request in map(_request, requests)}
        if not wanted:
            return
        writers = sorted({request.by for request in wanted.values()})

        def decide(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], None]:
            changes = {}
            self._checked(snapshot)
            for key, request in wanted.items():
                before = snapshot.get(key)
                self._check_readable(key, before)
                stored = replace(request, sequence=snapshot.version + 1).to_json()
                if not equal_requests(before, stored):
                    changes[key] = stored
            return changes, None

        self._requests.transact(decide, by=", ".join(writers[:3]))

    def _check_readable(self, key: str, there: object) -> None:
        try:
            if there is not None:
                self._stored.request(key, there)
        except MalformedDocumentError as error:
            raise ConfigurationError(
                f"nothing is written: what waits there can't be read, and would be lost. {error.problem}",
                "Take it back first (adjunct startpoint clear MODULE:APP PARTITION --reason …; in Python "
                "delete_startpoint), or upgrade where a newer version wrote it.",
                application=self.application,
            ) from error

    def check_on(self) -> None:
        """Raise ConfigurationError where the application says that there are no startpoints."""
        if not self._is_on:
            raise ConfigurationError(
                f"application {self.application!r} has startpoints switched off (startpoints=False): nothing is "
                "written, and no run would follow it.",
                "Switch them on in the Application; what is stored can be listed and taken back.",
                argument="startpoints",
                application=self.application,
            )

    def read(self) -> StoredStartpoints:
        """Return all that is asked for and handed to tasks, in one look."""
        at = self.lake.now()
        now = (at - _EPOCH) // _MS
        # Requests first: what a fan-out moves meanwhile is then in one of both, or in both.
        asked, handed = self._checked(self._requests.read()), self._fan_outs.read()
        requests, unread = self._stored.requests(asked.items())
        state = self._stored.state(handed.items())
        requests.sort(key=lambda request: (request.sequence, request.ssp, request.task or ""))
        return StoredStartpoints(
            waiting=[request for request in requests if not request.expired(now, self._expiry_ms)],
            expired=[request for request in requests if request.expired(now, self._expiry_ms)],
            handed={task: held.pending for task, held in state.tasks.items() if held.pending},
            unreadable=[*unread, *state.all_unreadable()],
            at=at,
        )

    def left_alone(self) -> FanOut:
        """Return a fan-out that has handed nothing out: all that is stored is left alone, as it is."""
        stored = self.read()
        handed = (request for held in stored.handed.values() for request in held.values())
        return FanOut(left_alone=(*stored.waiting, *handed))

    def has_any(self) -> bool:
        """Return whether anything is stored that a fan-out would have to look at."""
        return bool(len(self._requests.read()) or len(self._fan_outs.read()))

    def delete_startpoint(self, ssp: SystemStreamPartition | str, task: str | None = None) -> bool:
        """Take back the request for exactly this target, also one that can't be read; return whether there was one.

        The target of one that can't be read may be no partition: it is given as the text that `read` shows.
        What is fanned out already stays so: see `remove_fan_out_for_task`.
        """
        known = partition_of(ssp) if isinstance(ssp, str) else check_partition(ssp, "the startpoint to be deleted")
        key = request_key((known or ssp, task))
        there = self._checked(self._requests.read()).get(key)
        if there is None:
            return False
        sequence = sequence_of(there)
        if known is None or sequence is None:
            return self._entries.delete_as_it_is(key, there, by="delete")
        return bool(self._entries.take_back({(known, task): sequence}, by="delete"))

    def delete_unreadable(self, unreadable: Iterable[Unreadable], *, by: str) -> list[Unreadable]:
        """Take back what can't be read, each only where it is still as it was found; return what was taken back."""
        gone: list[Unreadable] = []
        for entry in unreadable:
            ssp, sequence = entry.ssp, sequence_of(entry.value)
            if entry.kind == "fan-out":
                taken = self._entries.remove_unreadable(entry, by)
            elif ssp is not None and sequence is not None and request_key((ssp, entry.task)) == entry.key:
                taken = bool(self._entries.take_back({(ssp, entry.task): sequence}, by=by))
            else:
                taken = self._entries.delete_as_it_is(entry.key, entry.value, by=by)
            gone += [entry] if taken else []
        return gone

    def take_back(self, requests: Iterable[StartpointRequest], *, by: str) -> list[StartpointRequest]:
        """Take these requests back, each only where it is still the one there; return those that nobody was handed.

        They count as fanned out first: a coordinator that has read one, and has not committed yet, decides again.
        """
        wanted = {request.target: request for request in requests}
        taken = self._entries.take_back({target: request.sequence for target, request in wanted.items()}, by=by)
        return [request for target, request in wanted.items() if target in taken]

    # -- fan-outs

    def fan_out(
        self,
        tasks: Mapping[str, Iterable[SystemStreamPartition]],
        *,
        named_only: Iterable[str] = (),
        taken: Taken | None = None,
        complete: bool = False,
    ) -> FanOut:
        """Hand all requests to the tasks that read their partitions; return what each task has to apply now.

        `tasks` holds tasks of the application, with all partitions that each reads; whoever names one that reads a
        partition names all that do. A task that is not named keeps what it was handed, unless others read that now and
        take it over. With `complete`, these are all tasks, and what the others held and all readers got is gone. A
        startpoint joins what its
        task has not committed yet and replaces that of the same partition if it is newer. What was pending at a
        task that is gone, or reads the partition no more, goes to those who read it now, if it was for all tasks; else
        it stays there. Tasks of `named_only` get the requests that name them, and none that are for all tasks. What is
        `taken` in by a commit, and still there, is removed first: the application's own commits, unless told.
        May be repeated, and run by several coordinators at once.
        """
        if not tasks:
            raise ConfigurationError(
                f"a fan-out for application {self.application!r} names no tasks, and would drop all that is pending.",
                "Pass every task of the plan with the partitions it reads.",
                argument="tasks",
                application=self.application,
            )
        reading = {
            check_task(task): frozenset(check_partition(ssp, f"what {task!r} reads") for ssp in ssps)
            for task, ssps in tasks.items()
        }
        reserved = frozenset(named_only)

        def decide(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], tuple[int | None, FanOutDecision]]:
            has_taken = taken or self._applied()  # anew where another coordinator came between
            before = self._stored.state(snapshot.items())
            # After the fan-outs, never before: a request that is still there now was not handed out and forgotten
            # before they were read. The swap then makes sure that they have not changed since.
            asked, now = self._checked(self._requests.read()), self._now_ms()
            requests, unreadable = self._stored.requests(asked.items())
            decision = decide_fan_out(before, requests, reading, now, self._expiry_ms, reserved, has_taken, complete)
            report = replace(decision.report, unreadable=(*unreadable, *before.all_unreadable()))
            changes = difference(before, decision.state)
            return changes, (None if changes else snapshot.version, replace(decision, report=report))

        unchanged, decision = self._fan_outs.transact(decide, by="fan-out")
        # Nothing to change is no swap, which would have met a fan-out that came between the two looks.
        while unchanged is not None and self._fan_outs.read().version != unchanged:
            unchanged, decision = self._fan_outs.transact(decide, by="fan-out")
        self._entries.delete({request.target: request.sequence for request in decision.finished}, by="fan-out")
        return decision.report

    def get_fan_outs(self) -> dict[str, Requests]:
        """Return what every task has to apply, by task and partition: all of it in one look.

        Without what can't be read: see `read`.
        """
        tasks = self._stored.state(self._checked(self._fan_outs.read()).items()).tasks
        return {task: held.pending for task, held in tasks.items() if held.pending}

    def remove_fan_out_for_task(
        self,
        task: str,
        ssps: Iterable[SystemStreamPartition] | Literal["all"] = "all",
        *,
        ids: Mapping[SystemStreamPartition, str] | None = None,
    ) -> None:
        """Remove what the task has to apply: all of it when given the task alone, else that of these partitions.

        With `ids`, only where the request, or its startpoint, is still the one with this id. Whoever has applied
        startpoints names them so: one that joined meanwhile stays. What can't be read stays, too: `delete_unreadable`
        takes that back.
        """
        if ssps is None or (isinstance(ssps, str) and ssps != "all"):
            raise ConfigurationError(
                f"the partitions to remove from task {task!r} of application {self.application!r} are {ssps!r}: "
                "expected SystemStreamPartitions.",
                'Name them; or leave them out (or write "all") to remove all that the task has to apply.',
                argument="ssps",
                application=self.application,
            )
        self._entries.remove({task: (None if ssps == "all" else frozenset(ssps), ids)})

    def remove_fan_outs(self, applied: Mapping[str, Mapping[SystemStreamPartition, str]]) -> None:
        """Remove the startpoints that were applied, given by task and partition with the ids of the requests."""
        self._entries.remove({task: (frozenset(ids), ids) for task, ids in applied.items()})

    def remove_applied(
        self, tasks: Mapping[str, Iterable[SystemStreamPartition]], applied: Mapping[SystemStreamPartition, str]
    ) -> None:
        """Remove what a commit of offsets has applied, by partition, from all the tasks that read it: after the commit.

        `tasks` holds those of the plan, with the partitions that each reads.
        """
        if applied:
            ids = {task: {ssp: applied[ssp] for ssp in ssps if ssp in applied} for task, ssps in tasks.items()}
            self.remove_fan_outs({task: mine for task, mine in ids.items() if mine})

    # -- inside

    def _checked(self, snapshot: NamespaceSnapshot) -> NamespaceSnapshot:
        """Return the snapshot; an empty one may be that of a mistyped name."""
        if not self._is_known and snapshot.version == 0:
            from dagster_adjunct.orchestration.batchlog.known_applications import check_known

            if self._requests.read().version == 0:
                check_known(self.lake, self.application)
            self._is_known = True
        return snapshot

    def _applied(self) -> Taken:
        """Return whether a commit of the application's has taken in a request; looks when first asked."""
        from dagster_adjunct.orchestration.batchlog.batch_log import application_state

        look = cache(lambda: application_state(self.lake, self.application).offsets)
        return lambda task, request: look().has_taken(request.ssp, request.id)

    def _now_ms(self) -> int:
        return (self.lake.now() - _EPOCH) // _MS


def _request(request: object) -> StartpointRequest:
    if isinstance(request, StartpointRequest) and type(request) is StartpointRequest:  # nobody reads a subclass again
        return request
    raise ConfigurationError(
        f"{request!r:.200} is no StartpointRequest, and can't be written as one.",
        "Write StartpointRequest(ssp=…, startpoint=…, by=…, reason=…).",
        argument="request",
    )


def startpoints_of(lake: Lake, app: Application) -> StartpointManager:
    """Return the startpoints of an application, which expire as it says."""
    return StartpointManager(MetadataStore(lake), app)

"""Startpoints: what people and scripts do with the startpoints of an application; the commands and the job do it so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batchlog.batch_log import application_state
from dagster_adjunct.orchestration.batchlog.known_applications import check_not_renamed, list_applications, nearest
from dagster_adjunct.orchestration.planner.lake_catalog import plan_application, systems_for
from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import look_at_stream
from dagster_adjunct.orchestration.startpoints.previews.plan_recorded import plan_recorded
from dagster_adjunct.orchestration.startpoints.previews.preview_requests import (
    preview_requests,
    remote_tables,
    what_keeps_state,
)
from dagster_adjunct.orchestration.startpoints.previews.refused_requests import (
    behind_unreadable,
    check_followed,
    check_kinds,
    replaced_by,
)
from dagster_adjunct.orchestration.startpoints.previews.table_preview import preview_tables
from dagster_adjunct.orchestration.startpoints.requests.allowed_requests import (
    allow_requests,
    readers_of,
    versions_in_words,
)
from dagster_adjunct.orchestration.startpoints.requests.request_parsing import expand_partitions
from dagster_adjunct.orchestration.startpoints.requests.startpoint_listing import list_startpoints
from dagster_adjunct.orchestration.startpoints.requests.startpoint_manager import startpoints_of
from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import OnUnresolved, StartpointRequest
from dagster_adjunct.orchestration.startpoints.requests.startpoints_not_applied import Held, not_applied
from dagster_adjunct.orchestration.startpoints.resolving.recorded_plan import write_plan
from dagster_adjunct.orchestration.startpoints.take_back_startpoints import TakenBack, take_back
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.interface.startpoint import Startpoint, check_startpoint
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.spec.versions_met import VersionsMet
    from dagster_adjunct.orchestration.startpoints.previews.preview_requests import Preview
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem

# "lake.flights.3", "lake.flights.0-3,7", "lake.flights" for all, a partition, or several of these.
Partitions: TypeAlias = str | SystemStreamPartition | Iterable[str | SystemStreamPartition]
Rows: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class AskedStartpoints:
    """What was asked for: what each request would do now, what it takes the place of, and whether it is written.

    `tables` says of each remote table that is made of what is read again what becomes of it, by the table's name.
    `notes` say which versions replays meet, and what keeps state and leaves records out that are read again.
    """

    previews: tuple[Preview, ...]
    replaced: tuple[Held, ...]
    written: bool
    tables: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-able values."""
        return {
            "written": self.written,
            "partitions": [preview.to_json() for preview in self.previews],
            "replaced": [held.summary() for held in self.replaced],
            "tables": dict(self.tables),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Startpoints:
    """The startpoints of one application in one lake: look what they would do, ask, list, and take back.

        startpoints = Startpoints(lake, app)
        startpoints.preview("lake.orders.1,3", StartpointOldest())
        startpoints.request("lake.orders.1,3", StartpointOldest(), by="ada", reason="discounts were wrong")

    Requests go to the tasks of the application's plan, and expire as it says. Nothing is read by any of this: the next
    run of the application applies what is asked for.
    """

    lake: Lake
    app: Application

    def __post_init__(self) -> None:
        if not isinstance(self.lake, Lake):
            raise ConfigurationError(
                f"Startpoints got the lake {self.lake!r}.", "Pass what open_lake(…) returned.", argument="lake"
            )
        if not isinstance(self.app, Application):
            known = f": {nearest(self.app, list_applications(self.lake))}" if isinstance(self.app, str) else ""
            raise ConfigurationError(
                f"Startpoints got {self.app!r} for an application{known}.",
                "Pass the Application itself: its plan says which task reads what.",
                argument="app",
            )

    def preview(
        self,
        partitions: Partitions,
        position: Startpoint,
        *,
        until: Startpoint | None = None,
        task: str | None = None,
        on_unresolved: OnUnresolved = "fail",
        force: bool = False,
        versions: VersionsMet | None = None,
    ) -> AskedStartpoints:
        """Return what `request` would do with this, and what it would take the place of; write nothing.

        What can't be followed has an `error` in its preview.
        """
        requests = startpoint_requests(
            self._expanded(partitions),
            position,
            until,
            task=task,
            by="preview",
            reason="-",
            on_unresolved=on_unresolved,
            force=force,
            versions=versions,
        )
        return ask(self.lake, self._systems, self.app, requests, dry_run=True)

    def request(
        self,
        partitions: Partitions,
        position: Startpoint,
        *,
        until: Startpoint | None = None,
        task: str | None = None,
        on_unresolved: OnUnresolved = "fail",
        force: bool = False,
        replace: bool = False,
        versions: VersionsMet | None = None,
        by: str,
        reason: str,
    ) -> AskedStartpoints:
        """Ask that these partitions are read from `position` on, all of them or none; return what a run would do now.

        Each request is a wish of its own and applied once, also where the same `position` was asked for before. With
        `until` it is a bounded replay: that part is read again, and the main position stays. `task` is one of the
        plan, or "dataset NAME"; every task that reads the partition unless given. `on_unresolved` says what a run does
        where there is no offset: "fail", or go on from the "checkpoint". `force` lets the table of a dataset get older.
        `versions` says what a replay's records meet in datasets: what was valid at their time ("as-of"; unless given,
        where the application joins so), what is served then ("current"; unless given, elsewhere), or what they met when
        they were read first ("recorded"), which is held from now on until the replay has ended.

        Takes the place of what is asked for there and not applied. Raises ConfigurationError, and writes nothing, where
        no task reads a partition, where the position has no offset now, where startpoints are switched off, and,
        without `replace`, where a bounded replay would take the place of a startpoint, or the other way round; also
        where versions were recorded that are gone.
        """
        requests = startpoint_requests(
            self._expanded(partitions),
            position,
            until,
            task=task,
            by=by,
            reason=reason,
            on_unresolved=on_unresolved,
            force=force,
            versions=versions,
        )
        return ask(self.lake, self._systems, self.app, requests, replace=replace)

    def list(self) -> dict[str, Rows]:
        """Return what is `waiting`, `handed` to tasks, `replays` under way, `applied` last, and what is `unreadable`.

        A row each, of JSON-able values.
        """
        return list_startpoints(self.lake, self._systems, self.app, self.lake.now())

    def take_back(self, partitions: Partitions, *, task: str | None = None, by: str, reason: str) -> TakenBack:
        """Take back what is asked for at these partitions and not applied, and cancel bounded replays there.

        With `task`, only what is for this task, or was handed to it; replays go on then. What a batch has begun with
        stays, and is said to. Raises CommitConflictError where a run commits at the same moment: repeat it then.
        """
        return take_back(self.lake, self.app, self._expanded(partitions), task=task, by=by, reason=reason)

    def clear(self, *, task: str | None = None, by: str, reason: str) -> TakenBack:
        """Take back everything that is asked for and not applied, also at streams that the application reads no more.

        All bounded replays are cancelled, unless a `task` is given. Raises as `take_back` does.
        """
        return take_back(self.lake, self.app, None, task=task, by=by, reason=reason)

    @cached_property
    def _systems(self) -> Mapping[str, StreamSystem]:
        return systems_for(self.app, self.lake)

    def _expanded(self, partitions: Partitions) -> tuple[SystemStreamPartition, ...]:
        several = (partitions,) if isinstance(partitions, str | SystemStreamPartition) else partitions
        named = tuple(several) if isinstance(several, Iterable) else (several,)
        if not all(isinstance(partition, str | SystemStreamPartition) for partition in named):
            raise ConfigurationError(
                f"partitions are {partitions!r}: expected texts or SystemStreamPartitions.",
                'Write them as in "lake.flights.3", "lake.flights.0-3,7", or "lake.flights" for all.',
                argument="partitions",
            )
        if not named:
            raise ConfigurationError(
                "no partition is named.",
                "Name one, as in lake.flights.3, or a stream: lake.flights.",
                argument="partitions",
            )
        return tuple(expand_partitions(self.app, self._systems, map(str, named)))


def startpoint_requests(
    ssps: Iterable[SystemStreamPartition],
    position: Startpoint,
    until: Startpoint | None = None,
    *,
    task: str | None = None,
    by: str,
    reason: str,
    on_unresolved: OnUnresolved = "fail",
    force: bool = False,
    versions: VersionsMet | None = None,
) -> list[StartpointRequest]:
    """Return a request for each partition, each a wish of its own that is made now. Raises ConfigurationError."""
    check_startpoint(position, "position", "position")
    if until is not None:
        check_startpoint(until, "until", "until")
    return [
        StartpointRequest(
            ssp=ssp,
            startpoint=position.again(),
            until=until,
            task=task,
            by=by,
            reason=reason,
            on_unresolved=on_unresolved,
            force=force,
            versions=versions,
        )
        for ssp in ssps
    ]


def ask(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    app: Application,
    requests: Sequence[StartpointRequest],
    *,
    replace: bool = False,
    dry_run: bool = False,
) -> AskedStartpoints:
    """Write these requests, all or none; return what they would do if a run started now.

    Each takes the place of what is not applied yet at the same partition and task. Raises ConfigurationError where no
    task reads a partition; where what waits or was handed out there can't be read; where a startpoint has no offset
    now, and the request does not go on from the checkpoint then; and, without `replace`, where a bounded replay would
    take the place of a startpoint, or the other way round. With `dry_run` nothing is written, and nothing is refused:
    the previews say what is wrong. Where the application has startpoints switched off, both are refused.
    """
    if not requests:
        raise ConfigurationError(
            "a startpoint is asked for at no partition.",
            "Name one, as in lake.flights.3, or a stream: lake.flights.",
            argument="partitions",
        )
    startpoints = startpoints_of(lake, app)
    startpoints.check_on()
    stored, state = startpoints.read(), application_state(lake, app.name)
    check_not_renamed(app.name, state)
    plan = plan_application(app, systems) if app.inputs else None
    readers = readers_of(app, plan, systems)
    allowed = allow_requests(app, readers, requests)
    versions = versions_in_words(app, requests)

    look = cache(partial(look_at_stream, systems))  # each stream is looked at once
    tables, keeping_state = remote_tables(plan, requests), what_keeps_state(app)
    previews = preview_requests(look, state, allowed, stored.at)
    previews = preview_tables(lake, systems, app, previews)
    recorded = plan_recorded(lake, app, plan, look, behind_unreadable(stored.unreadable, previews), stored.at)
    there = [*map(Held, stored.waiting), *not_applied(stored.handed, state)]
    replaced = replaced_by(requests, there, readers.by_name)
    if not dry_run:
        check_followed(recorded.previews)
        if not replace:
            check_kinds(replaced)
        if recorded.plan is not None:
            write_plan(lake, recorded.plan)  # from here on its versions are held
            requests = recorded.named_in(requests)
        startpoints.write_startpoints(requests)
    taken_over = tuple(dict.fromkeys(old for old, _ in replaced))
    notes = (*versions, *recorded.told, *keeping_state)
    return AskedStartpoints(tuple(recorded.previews), taken_over, not dry_run, tables, notes)

"""Startpoints: what people and scripts do with the startpoints of an application; the commands and the job do it so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batchlog.known_applications import list_applications, nearest
from dagster_adjunct.orchestration.planner.lake_catalog import systems_for
from dagster_adjunct.orchestration.startpoints.ask_startpoints import AskedStartpoints, ask
from dagster_adjunct.orchestration.startpoints.requests.request_parsing import expand_partitions, startpoint_requests
from dagster_adjunct.orchestration.startpoints.requests.startpoint_listing import list_startpoints
from dagster_adjunct.orchestration.startpoints.take_back_startpoints import TakenBack, take_back
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.interface.startpoint import Startpoint
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dagster_adjunct.orchestration.operators.spec.versions_met import VersionsMet
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import OnUnresolved
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem

# "lake.flights.3", "lake.flights.0-3,7", "lake.flights" for all, a partition, or several of these.
Partitions: TypeAlias = str | SystemStreamPartition | Iterable[str | SystemStreamPartition]
Rows: TypeAlias = list[dict[str, Any]]


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
        ssps = self._expanded(partitions)
        requests = startpoint_requests(
            ssps,
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
        ssps = self._expanded(partitions)
        requests = startpoint_requests(
            ssps,
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

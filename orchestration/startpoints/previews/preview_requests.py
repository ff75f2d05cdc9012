"""What requests for startpoints would do, before they are written: who reads each partition, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.startpoints.dataset_requests import dataset_tasks, named_only
from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import look_at_stream
from dagster_adjunct.orchestration.startpoints.previews.plan_recorded import plan_recorded
from dagster_adjunct.orchestration.startpoints.previews.refused_requests import behind_unreadable
from dagster_adjunct.orchestration.startpoints.previews.request_preview import Preview, preview_request
from dagster_adjunct.orchestration.startpoints.previews.table_preview import preview_tables
from dagster_adjunct.orchestration.startpoints.requests.allowed_requests import (
    is_broadcast,
    not_read,
    one_task_of_all,
    owners_of,
    takers_of,
    versions_in_words,
    versions_met,
)
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.planner import ExecutionPlan
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest
    from dagster_adjunct.orchestration.startpoints.requests.unreadable_requests import Unreadable
    from dagster_adjunct.orchestration.startpoints.resolving.recorded_plan import RecordedPlan
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem


@dataclass(frozen=True, slots=True)
class PreviewedRequests:
    """What requests would do if a run started now: each by itself, and all of them together.

    `recorded` is the plan that those for recorded versions share, not written yet; None where there are none, or they
    can't be followed. `tables` says of each remote table that is made of what is read again what becomes of it.
    `notes` say which versions replays meet, and what keeps state and leaves records out that are read again.
    """

    previews: tuple[Preview, ...]
    recorded: RecordedPlan | None
    tables: Mapping[str, str]
    notes: tuple[str, ...]


def preview_requests(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    app: Application,
    plan: ExecutionPlan | None,
    requests: Sequence[StartpointRequest],
    state: ApplicationState,
    unreadable: Sequence[Unreadable] = (),
) -> PreviewedRequests:
    """Return what these requests would do from this state; what can't be followed has an `error` in its preview.

    `plan` is the application's; None where it has no inputs. What is `unreadable` of what is stored may be in the way.
    Looks once at each stream.
    """
    remote_tables, keeping_state = _remote_tables(plan, requests), _what_keeps_state(app)
    now, look = lake.now(), cache(partial(look_at_stream, systems))
    reading = {} if plan is None else plan.partitions_by_task()
    by_name, rewindable = named_only(app), dataset_tasks(app, systems)
    tasks = {**reading, **rewindable}
    owners = owners_of(tasks, by_name)
    versions = versions_in_words(app, requests)
    previews: list[Preview] = []
    for request in requests:
        takers = takers_of(request, tasks, owners)
        try:
            met = versions_met(app, request)
        except ConfigurationError as error:
            shown = Preview(request, (), error=str(error))
            previews.append(shown if request.until is None else replace(shown, versions=request.versions))
            continue
        if request.task in reading and is_broadcast(app, request.ssp):
            shown = Preview(request, (str(request.task),), error=str(one_task_of_all(request)))
        elif not takers:
            shown = Preview(request, (), error=not_read(request, tasks))
        else:
            of_table = any(task in rewindable for task in takers)
            shown = preview_request(look, None if of_table else state, request, takers, met, now)
        previews.append(shown if request.until is None else replace(shown, versions=met))
    previews = preview_tables(lake, systems, app, previews)
    recorded = plan_recorded(lake, app, plan, look, behind_unreadable(unreadable, previews), now)
    notes = (*versions, *recorded.told, *keeping_state)
    return PreviewedRequests(tuple(recorded.previews), recorded.plan, remote_tables, notes)


def _remote_tables(plan: ExecutionPlan | None, requests: Sequence[StartpointRequest]) -> dict[str, str]:
    """Return what becomes of the remote tables that are made of what is read again."""
    streams = {request.ssp.qualified_stream for request in requests}
    told: dict[str, str] = {}
    for table in () if plan is None else plan.tables:
        if streams & set(table.streams):
            before = told.get(table.table)
            told[table.table] = table.replay if before in (None, table.replay) else f"{before}; and {table.replay}"
    return told


def _what_keeps_state(app: Application) -> tuple[str, ...]:
    """Return in words what the application's stateful operators do with records that are read again, a line each."""
    return tuple(
        f"{operator.id} keeps state: records that the application has read before are left out there, and counted "
        "(again)"
        for operator in app.operators
        if operator.spec.states
    )

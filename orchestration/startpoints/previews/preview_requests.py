"""What requests for startpoints would do, before they are written: who reads each partition, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.startpoints.dataset_requests import dataset_task, dataset_tasks, named_only
from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import look_at_stream
from dagster_adjunct.orchestration.startpoints.previews.request_preview import Preview, preview_request
from dagster_adjunct.orchestration.startpoints.previews.table_preview import preview_table
from dagster_adjunct.orchestration.startpoints.requests.handed_requests import is_broadcast, one_task_of_all
from dagster_adjunct.orchestration.startpoints.resolving.versions_of_replays import check_versions, default_versions
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.planner import ExecutionPlan
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


def preview_requests(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    app: Application,
    plan: ExecutionPlan | None,
    requests: Sequence[StartpointRequest],
    state: ApplicationState,
) -> list[Preview]:
    """Return what each request would do if a run started now from this state; what can't be followed has an `error`.

    `plan` is the application's; None where it has no inputs. Looks once at each stream.
    """
    now = lake.now()
    look = cache(partial(look_at_stream, systems))
    reading = {} if plan is None else plan.partitions_by_task()
    named, tables = named_only(app), dataset_tasks(app, systems)
    owners: dict[SystemStreamPartition, list[str]] = {}
    for task, ssps in {**reading, **tables}.items():
        for ssp in ssps if task not in named else ():
            owners.setdefault(ssp, []).append(task)

    default = default_versions(app)
    previews: dict[int, Preview] = {}
    rewinds: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        try:
            check_versions(app, request)
        except ConfigurationError as error:
            previews[number] = Preview(request, (), error=str(error))
            continue
        ssp, tasks = request.ssp, tuple(owners.get(request.ssp, ()))
        if request.task is not None:
            tasks = (request.task,) if ssp in {**reading, **tables}.get(request.task, ()) else ()
        if request.task in reading and is_broadcast(app, ssp):
            previews[number] = Preview(request, (str(request.task),), error=str(one_task_of_all(request)))
        elif tasks:
            of_tables = [task for task in tasks if task in tables]
            for task in of_tables:
                rewinds.setdefault(task, []).append(number)
            previews[number] = preview_request(look, None if of_tables else state, request, tasks, now)
        else:
            who = "no task reads" if request.task is None else f"{request.task!r} is no task that reads"
            readers = [task for task, ssps in {**reading, **tables}.items() if ssp in ssps]
            instead = f"; {', '.join(map(repr, readers[:3]))} does" if request.task is not None and readers else ""
            previews[number] = Preview(request, (), error=f"{who} {ssp}{instead}.")
    for dataset in app.datasets:
        asked = {n: previews[n] for n in rewinds.get(dataset_task(dataset.name), {}) if previews[n].error is None}
        previews |= preview_table(lake, systems, dataset, asked)
    return [
        shown if request.until is None else replace(shown, versions=request.versions or default)
        for request, shown in ((request, previews[number]) for number, request in enumerate(requests))
    ]

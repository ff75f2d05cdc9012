"""The coordinator: hands requests for startpoints to all that an application's plan has to give them to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from orchestration.offsets.dataset_requests import dataset_tasks, named_only
from orchestration.offsets.fan_out import FanOut
from orchestration.offsets.resolving import task_partitions
from orchestration.offsets.startpoints import StartpointManager
from resources.metadata import MetadataStore

if TYPE_CHECKING:
    from orchestration.application import Application
    from orchestration.planner import ExecutionPlan
    from resources.objects import Lake
    from resources.streams.system import StreamSystem


def startpoints_of(lake: Lake, app: Application) -> StartpointManager:
    """Return the startpoints of an application, which expire as it says."""
    return StartpointManager(MetadataStore(lake), app)


def fan_out_requests(
    startpoints: StartpointManager, systems: Mapping[str, StreamSystem], app: Application, plan: ExecutionPlan | None
) -> FanOut:
    """Fan out to the plan's tasks and to the datasets whose streams can be rewound; return what each has to apply.

    Any number of coordinators may do so: sensors, and every run at its start. An application of datasets only has no
    plan, and one without anything that could start elsewhere has no tasks: nothing is fanned out then. Nor is it where
    the application has startpoints switched off: what is stored stays as it is.
    """
    if not app.startpoints:
        handed = (request for held in startpoints.get_fan_outs().values() for request in held.values())
        return FanOut(left_alone=(*startpoints.requests(), *handed))
    tasks = {**(task_partitions(plan) if plan else {}), **dataset_tasks(app, systems)}
    return startpoints.fan_out(tasks, named_only=named_only(app)) if tasks else FanOut({})

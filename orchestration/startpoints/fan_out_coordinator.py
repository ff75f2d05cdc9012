"""The coordinator: hands requests for startpoints to all that an application's plan has to give them to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.batch_log import application_state
from dagster_adjunct.orchestration.startpoints.dataset_requests import taken_in
from dagster_adjunct.orchestration.startpoints.requests.allowed_requests import readers_of
from dagster_adjunct.orchestration.startpoints.requests.fan_out import FanOut
from dagster_adjunct.orchestration.startpoints.requests.startpoint_manager import startpoints_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dagster_adjunct.assets.writing.runtime import Runtime
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.stored_positions import OffsetState
    from dagster_adjunct.orchestration.planner import ExecutionPlan
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_manager import StartpointManager
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem


def fan_out_requests(
    startpoints: StartpointManager,
    systems: Mapping[str, StreamSystem],
    app: Application,
    plan: ExecutionPlan | None,
    offsets: OffsetState,
) -> FanOut:
    """Fan out to the plan's tasks and to the datasets whose streams can be rewound; return what each has to apply.

    `offsets` is what the batch log knows to be applied. Any number of coordinators may do so: sensors, and every run at
    its start. An application of datasets only has no plan, and one without anything that could start elsewhere has no
    tasks: nothing is fanned out then. Nor is it where the application has startpoints switched off: what is stored
    stays as it is.
    """
    if not app.startpoints:
        return startpoints.left_alone()
    taken = taken_in(startpoints.lake, app, offsets)
    readers = readers_of(app, plan, systems)
    if not readers.tasks:
        return FanOut({})
    return startpoints.fan_out(readers.tasks, named_only=readers.by_name, taken=taken, complete=True)


def hand_out(runtime: Runtime, app: Application, plan: ExecutionPlan | None) -> FanOut:
    """Fan out for a run of the application, once: its datasets and its tasks start at what they are handed here."""
    startpoints = startpoints_of(runtime.lake, app)
    offsets = application_state(runtime.lake, app.name).offsets
    return fan_out_requests(startpoints, runtime.systems, app, plan, offsets)

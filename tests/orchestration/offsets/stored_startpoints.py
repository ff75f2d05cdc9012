"""What tests ask of stored startpoints in one line: a request written, the one that waits, what
a task was handed.
"""

from __future__ import annotations

import uuid

from dagster_adjunct.orchestration.startpoints.fan_out import Requests
from dagster_adjunct.orchestration.startpoints.request import OnUnresolved, StartpointRequest
from dagster_adjunct.orchestration.startpoints.store import StartpointManager
from dagster_adjunct.resources.streams.startpoint import Startpoint
from dagster_adjunct.resources.streams.system import SystemStreamPartition


def write_startpoint(
    manager: StartpointManager,
    ssp: SystemStreamPartition,
    startpoint: Startpoint,
    *,
    task: str | None = None,
    by: str,
    reason: str,
    on_unresolved: OnUnresolved = "fail",
) -> None:
    """Write one request, a wish of its own."""
    request = StartpointRequest(
        ssp=ssp,
        startpoint=startpoint,
        task=task,
        by=by,
        reason=reason,
        on_unresolved=on_unresolved,
        id=uuid.uuid4().hex,
    )
    manager.write_startpoints([request])


def waiting_at(
    manager: StartpointManager, ssp: SystemStreamPartition, task: str | None = None
) -> Startpoint | None:
    """Return the startpoint that waits at exactly this target; None for none, and for one that
    has expired.
    """
    waiting = {request.target: request.startpoint for request in manager.read().waiting}
    return waiting.get((ssp, task))


def handed_to(manager: StartpointManager, task: str) -> Requests:
    """Return what a task has to apply, by partition."""
    return manager.get_fan_outs().get(task, {})

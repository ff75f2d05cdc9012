"""What a run's tasks were handed, and which of it counts at each partition. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.stored_positions import OffsetState
    from dagster_adjunct.orchestration.startpoints.requests.fan_out import FanOut
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class HandedRequests:
    """Requests as they were handed to the tasks of a run, sorted out.

    `newest` has, by partition, the one that counts: of a broadcast input, all tasks are handed the same. `alone` are
    those for one task where all tasks read the partition, each with why it can't be followed. `waiting` are all that
    can be, and `passed` those that a commit has taken in or that a newer one takes the place of, each with its task.
    """

    newest: Mapping[SystemStreamPartition, StartpointRequest]
    alone: tuple[tuple[StartpointRequest, ConfigurationError], ...]
    waiting: tuple[tuple[str, StartpointRequest], ...]
    passed: tuple[tuple[str, StartpointRequest], ...]


def sort_handed_requests(app: Application, tasks: Iterable[str], fan_out: FanOut, known: OffsetState) -> HandedRequests:
    """Return what these tasks were handed, sorted out by what the batch log knows to be taken in."""
    newest: dict[SystemStreamPartition, StartpointRequest] = {}
    alone: list[tuple[StartpointRequest, ConfigurationError]] = []
    waiting: list[tuple[str, StartpointRequest]] = []
    passed: list[tuple[str, StartpointRequest]] = []
    for task in tasks:
        for ssp, request in fan_out.tasks.get(task, {}).items():
            refusal = one_task_of_all(request) if request.task is not None and is_broadcast(app, ssp) else None
            if known.has_taken(ssp, request.id):
                passed.append((task, request))
            elif refusal is not None:
                alone.append((request, refusal))
            else:
                waiting.append((task, request))
                if request.sequence > newest.setdefault(ssp, request).sequence:
                    newest[ssp] = request
    passed += [(task, request) for task, request in waiting if request.sequence < newest[request.ssp].sequence]
    return HandedRequests(newest, tuple(alone), tuple(waiting), tuple(passed))


def is_broadcast(app: Application, ssp: SystemStreamPartition) -> bool:
    """Whether all tasks of the application read this partition, with one position."""
    source = app.inputs.get(ssp.qualified_stream)
    return source is not None and source.broadcast is not None


def one_task_of_all(request: StartpointRequest) -> ConfigurationError:
    """Return the refusal of a request for one task where all tasks read the partition."""
    return ConfigurationError(
        f"{request.ssp} is of a broadcast input, which all tasks read with one position: {request.task!r} alone can't "
        "start elsewhere.",
        "Ask for it without a task, and all of them start there; what waits is taken back with "
        f"adjunct startpoint clear MODULE:APP {request.ssp} --reason ….",
        stream=request.ssp.qualified_stream,
    )

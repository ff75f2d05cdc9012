"""What an application allows a request to ask for: the tasks that it is for, and the versions that its replay meets.

Looked at twice: when somebody asks, and when a run has been handed what was asked for. Pure functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.spec.versions_met import AS_OF, CURRENT, VersionsMet
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


def owners_of(
    tasks: Mapping[str, frozenset[SystemStreamPartition]], named_only: Collection[str]
) -> dict[SystemStreamPartition, list[str]]:
    """Return, by partition, the tasks that get its requests for all tasks: those of `named_only` do not.

    `tasks` says which partitions each task reads.
    """
    owners: dict[SystemStreamPartition, list[str]] = {}
    for task, ssps in tasks.items():
        for ssp in ssps if task not in named_only else ():
            owners.setdefault(ssp, []).append(task)
    return owners


def takers_of(
    request: StartpointRequest,
    tasks: Mapping[str, frozenset[SystemStreamPartition]],
    owners: Mapping[SystemStreamPartition, Sequence[str]],
) -> tuple[str, ...]:
    """Return the tasks that a request is for: the one that it names, if that reads the partition, or all its owners."""
    if request.task is None:
        return tuple(owners.get(request.ssp, ()))
    return (request.task,) if request.ssp in tasks.get(request.task, ()) else ()


def not_read(request: StartpointRequest, tasks: Mapping[str, frozenset[SystemStreamPartition]]) -> str:
    """Return in words that a request is for no task, and who reads its partition."""
    if request.task is None:
        return f"no task reads {request.ssp}."
    readers = [task for task, ssps in tasks.items() if request.ssp in ssps]
    instead = f"; {', '.join(map(repr, readers[:3]))} does" if readers else ""
    return f"{request.task!r} is no task that reads {request.ssp}{instead}."


def joins_as_of(app: Application) -> tuple[str, ...]:
    """Return the joins in which each record meets the entry that was valid at its own time."""
    looked_up = [(operator.id, operator.spec.match) for operator in app.operators]
    return tuple(operator for operator, match in looked_up if match is not None and match.as_of is not None)


def versions_met(app: Application, request: StartpointRequest) -> VersionsMet:
    """Return which versions of its datasets the request's replay meets: what it says, else what is the application's.

    Raises ConfigurationError where what it says can't be.
    """
    asked, default = request.versions, AS_OF if joins_as_of(app) else CURRENT
    if asked is None:
        return default
    if request.until is None and asked != default:
        raise ConfigurationError(
            f"{request.ssp}: versions={asked} is for a bounded replay, and this request has no end: it moves the main "
            "position, whose batches meet "
            + ("the entries that were valid at each record's time." if default == AS_OF else "what is served then."),
            "Give it an end (--until-timestamp, --until-offset, --until-upcoming; in Python until=…), or leave it out.",
            argument="versions",
            application=app.name,
        )
    if asked == AS_OF and default != AS_OF:
        raise ConfigurationError(
            f"{request.ssp}: versions=as-of, and no join of application {app.name!r} is as-of: none of them asks for "
            "the time of a record.",
            "Declare one (join(…, as_of=…)), or say versions=current, or recorded.",
            argument="versions",
            application=app.name,
        )
    return asked


def versions_in_words(app: Application, requests: Sequence[StartpointRequest]) -> tuple[str, ...]:
    """Return in words what bounded replays meet in datasets, where joins are as-of or a request says it, a line each.

    What was recorded is told by its plan.
    """
    bounded = [request for request in requests if request.until is not None]
    by_time = joins_as_of(app)
    default = AS_OF if by_time else CURRENT
    asked = {request.versions or default for request in bounded if by_time or request.versions}
    return tuple(
        line
        for versions, line in (
            (AS_OF, f"versions as-of: {', '.join(by_time)}: what was valid at each record's time; else what is served"),
            (CURRENT, "versions current: every join meets what is served when the replay runs"),
        )
        if versions in asked
    )


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

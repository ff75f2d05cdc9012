"""What an application allows a request to ask for: the tasks that it is for, and the versions that its replay meets.

Looked at twice: when somebody asks, and when a run has been handed what was asked for.

A dataset whose table can be rewound is a task, too: "dataset NAME", which reads the partitions of its stream. A request
for all tasks that read a partition is for the dataset where the application does not read the stream itself; where it
does, only requests that name the dataset's task are.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.spec.versions_met import AS_OF, CURRENT, VersionsMet
from dagster_adjunct.resources.errors import ConfigurationError, StreamNotFoundError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.planner import ExecutionPlan
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


@dataclass(frozen=True)
class TasksThatRead:
    """Who reads what: the tasks of an application's plan, and the tasks of its datasets that can be rewound.

    Both by their names, with all partitions that each reads. Those of `by_name` get only requests that name them.
    """

    of_plan: Mapping[str, frozenset[SystemStreamPartition]]
    of_datasets: Mapping[str, frozenset[SystemStreamPartition]]
    by_name: frozenset[str] = frozenset()

    @cached_property
    def tasks(self) -> dict[str, frozenset[SystemStreamPartition]]:
        """All of them."""
        return {**self.of_plan, **self.of_datasets}

    @cached_property
    def owners(self) -> dict[SystemStreamPartition, list[str]]:
        """By partition, those that get its requests for all tasks."""
        return owners_of(self.tasks, self.by_name)


def readers_of(app: Application, plan: ExecutionPlan | None, systems: Mapping[str, StreamSystem]) -> TasksThatRead:
    """Return who reads what; `plan` is the application's, None where it has datasets only."""
    by_name, tasks = named_only(app), {} if plan is None else plan.partitions_by_task()
    return TasksThatRead(tasks, dataset_tasks(app, systems), by_name)


def dataset_task(name: str) -> str:
    """Return the name of a dataset's task, for requests that name it."""
    return f"dataset {name}"


def dataset_tasks(app: Application, systems: Mapping[str, StreamSystem]) -> dict[str, frozenset[SystemStreamPartition]]:
    """Return the partitions of the stream of each unbounded dataset, by the dataset's task, as a fan-out wants them.

    Bounded datasets go back by versions, and tables of one run have nothing to go back in: they have no task, so that
    requests for their streams alone are unknown to the fan-out.
    """
    tasks = {}
    for dataset in rewindable(app):
        system, stream = dataset.system_stream
        with suppress(StreamNotFoundError):  # the application itself may write it, from its first batch on
            tasks[dataset_task(dataset.name)] = frozenset(systems[system].partitions(stream))
    return tasks


def named_only(app: Application) -> frozenset[str]:
    """Return the tasks of datasets whose stream the application reads too: they get requests only by their name."""
    return frozenset(dataset_task(dataset.name) for dataset in rewindable(app) if dataset.stream in app.inputs)


def rewindable(app: Application, only: Collection[str] | None = None) -> list[AdjunctDataset]:
    """Return the datasets that startpoints can rewind: stored tables of change streams, of these names if any."""
    followed = [dataset for dataset in app.datasets if dataset.follows_changes and dataset.stream is not None]
    tables = [dataset for dataset in followed if dataset.following.persistent]
    return [dataset for dataset in tables if only is None or dataset.name in only]


@dataclass(frozen=True, slots=True)
class AllowedRequest:
    """A request, the tasks that it is for, and the versions that what it reads meets.

    `refusal` says why the application does not allow it; "" where it does. `rewinds` says that it is for datasets.
    """

    request: StartpointRequest
    tasks: tuple[str, ...]
    versions: VersionsMet
    refusal: str = ""
    rewinds: bool = False


def allow_requests(
    app: Application, readers: TasksThatRead, requests: Sequence[StartpointRequest]
) -> tuple[AllowedRequest, ...]:
    """Return what the application allows of these requests, in their order."""
    return tuple(_allow(app, readers, request) for request in requests)


def _allow(app: Application, readers: TasksThatRead, request: StartpointRequest) -> AllowedRequest:
    try:
        versions = versions_met(app, request)
    except ConfigurationError as error:
        return AllowedRequest(request, (), request.versions or CURRENT, str(error))
    tasks = takers_of(request, readers.tasks, readers.owners)
    if request.task in readers.of_plan and is_broadcast(app, request.ssp):
        return AllowedRequest(request, (str(request.task),), versions, str(one_task_of_all(request)))
    if not tasks:
        return AllowedRequest(request, (), versions, not_read(request, readers.tasks))
    rewinds = any(task in readers.of_datasets for task in tasks)
    refusal = _no_replay(request, tasks) if rewinds and request.until is not None else ""
    return AllowedRequest(request, tasks, versions, refusal, rewinds)


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


def _no_replay(request: StartpointRequest, tasks: Sequence[str]) -> str:
    """Return in words that a request with an end is for datasets."""
    return (
        f"{request.ssp} is read by {', '.join(tasks)}, and a table has no replay beside it: it is what its stream says "
        "up to where it has read. Leave the end (until) out."
    )


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

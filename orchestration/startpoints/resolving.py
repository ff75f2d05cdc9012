"""How positions are found: streams as they answer in one look, and offsets for what people ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.resources.errors import ConfigurationError, OffsetOutOfRangeError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.interface.ssp import SystemStreamPartition
from dagster_adjunct.resources.streams.interface.startpoint import (
    check_offset,
    describe_startpoint,
    resolve_startpoint_to_offset,
)

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.input import Input
    from dagster_adjunct.orchestration.planner import ExecutionPlan
    from dagster_adjunct.orchestration.startpoints.request import StartpointRequest
    from dagster_adjunct.resources.streams.interface.system import StreamInfo, StreamSystem


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A startpoint that has no offset, whose partition goes on from its checkpoint, as its request says."""

    request: StartpointRequest
    error: str


class Streams:
    """Streams as they answer in one look, each opened once."""

    def __init__(self, systems: Mapping[str, StreamSystem]) -> None:
        self._systems = systems
        self._opened: dict[str, StreamSystem] = {}
        self._infos: dict[str, StreamInfo] = {}

    def system(self, qualified: str) -> StreamSystem:
        if qualified not in self._opened:
            name, stream = split_stream_name(qualified)
            self._opened[qualified] = self._systems[name].snapshot(stream)
        return self._opened[qualified]

    def info(self, qualified: str) -> StreamInfo:
        if qualified not in self._infos:
            self._infos[qualified] = self.system(qualified).info(split_stream_name(qualified)[1])
        return self._infos[qualified]

    def identity(self, ssp: str) -> str | None:
        return self.info(SystemStreamPartition.parse(ssp).qualified_stream).identity

    def partitions(self, qualified: str) -> list[SystemStreamPartition]:
        name, stream = split_stream_name(qualified)
        return [SystemStreamPartition(name, stream, number) for number in range(self.info(qualified).partitions)]


def is_another(info: StreamInfo, before: str | None) -> bool:
    """Whether a stream was deleted and made anew, as far as its system tells."""
    return before is not None and info.identity is not None and before != info.identity


def task_partitions(plan: ExecutionPlan) -> dict[str, frozenset[SystemStreamPartition]]:
    """Return the input partitions of each task of a plan, as a fan-out wants them."""
    return {task.name: frozenset(map(SystemStreamPartition.parse, task.ssps)) for task in plan.tasks}


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
    )


def default_offset(source: Input, info: StreamInfo, system: StreamSystem) -> Literal["oldest", "upcoming"]:
    """Return where a partition without checkpoint and startpoint begins: "oldest" or "upcoming"."""
    return source.default_offset or info.default_offset or system.default_offset or "upcoming"


def edge_offsets(
    system: StreamSystem, which: Literal["oldest", "upcoming"], ssps: Sequence[SystemStreamPartition]
) -> dict[SystemStreamPartition, str]:
    """Return the oldest or the upcoming offset of these partitions. Raises ConfigurationError for an answer of none."""
    found = system.oldest(ssps) if which == "oldest" else system.upcoming(ssps)
    return {ssp: check_offset(system, ssp, found.get(ssp), f"asked for its {which} offset") for ssp in ssps}


def resolve_request(system: StreamSystem, request: StartpointRequest) -> tuple[str, str | None]:
    """Return the offset at which a request starts, and that before which it ends, if it is bounded.

    Both are one offset where a partition has no records in between. Raises what `resolve_startpoint_to_offset` does,
    and OffsetOutOfRangeError for an end that lies before the start.
    """
    start = resolve_startpoint_to_offset(system, request.ssp, request.startpoint)
    if request.until is None:
        return start, None
    end = resolve_startpoint_to_offset(system, request.ssp, request.until)
    if system.compare(start, end) > 0:
        raise OffsetOutOfRangeError(
            f"{request.ssp}: a replay from {describe_startpoint(request.startpoint)} (offset {start}) until "
            f"{describe_startpoint(request.until)} (offset {end}) would end before it begins.",
            "Choose an end that lies after the start.",
            stream=request.ssp.qualified_stream,
            partition=request.ssp.partition,
            offset=start,
        )
    # In one way of writing: whether there is anything in between is told by comparing them.
    return start, start if system.compare(start, end) == 0 else end

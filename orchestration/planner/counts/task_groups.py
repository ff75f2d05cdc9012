"""Which task owns which partitions: the unit that requests for startpoints and broadcast inputs are for.

By default there is a task for each partition number. An application with `tasks=n` has at most n: partition i is of
task i modulo n, and bucket i of every dataset with it, so that what is joined is of one task in either case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.spec.planning_values import BROADCAST
from dagster_adjunct.orchestration.planner.plans.plan_parts import Task
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.spec.planning_values import StreamEdge


def task_count(partitions: int, limit: int | None) -> int:
    """Return how many tasks own so many partitions; `limit` None gives each its own."""
    return partitions if limit is None else min(partitions, limit)


def tasks_of(streams: tuple[StreamEdge, ...], limit: int | None) -> tuple[Task, ...]:
    """Return the tasks, at most `limit` of them; each owns its partitions of all inputs and partitioned datasets.

    Partitions are numbered up to the largest count of those and of the intermediate streams. All tasks read all
    partitions of broadcast inputs.
    """
    inputs = [edge for edge in streams if edge.role == "input"]
    shared = [edge for edge in streams if edge.role == "broadcast-input"]
    everywhere = tuple(_partition(edge, number) for edge in shared for number in range(edge.partitions or 0))
    datasets = [edge for edge in streams if edge.dataset is not None and edge.partitions is not None]
    whole = [edge for edge in streams if edge.dataset is not None and edge.partitions is None]
    broadcast = (*(edge.name for edge in shared), *(str(edge.dataset) for edge in whole))
    total = max((edge.partitions or 0 for edge in streams if edge.role not in ("output", *BROADCAST)), default=0)
    count = task_count(total, limit)
    called = "Partition" if count == total else "Task"
    return tuple(
        Task(
            f"{called} {task}",
            (
                *(_partition(edge, at) for edge in inputs for at in range(task, edge.partitions or 0, count)),
                *everywhere,
            ),
            tuple(f"{edge.dataset}.{at}" for edge in datasets for at in range(task, edge.partitions or 0, count)),
            broadcast,
        )
        for task in range(count)
    )


def _partition(edge: StreamEdge, number: int) -> SystemStreamPartition:
    return SystemStreamPartition(*split_stream_name(edge.name), number)

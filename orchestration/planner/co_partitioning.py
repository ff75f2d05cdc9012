"""Refuses what can't be proven, naming every stream of the conflict and the next step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.stream_facts import SPARK
from dagster_adjunct.orchestration.planner.auto_repartition import mismatch
from dagster_adjunct.orchestration.planner.join_groups import Groups, Needs, dataset_node
from dagster_adjunct.resources.errors import PartitionCountMismatchError, PlanningError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.planning_values import StreamEdge
    from dagster_adjunct.orchestration.planner.partition_counts import Counts
    from dagster_adjunct.orchestration.planner.record_flows import Flows

_AUTO = "or set auto_repartition=True on the application"


def check_counts(
    app: Application,
    needs: Needs,
    groups: Groups,
    counts: Counts,
    edges: Mapping[str, StreamEdge],
    flows: Flows,
) -> None:
    """Raise PartitionCountMismatchError for the first join whose streams have different counts."""
    if not counts.conflicts:
        return
    join = counts.conflicts[0]
    sides = [edges[member] for member in _involved(join, groups, counts) if member in edges]
    counted = ", ".join(map(_counted, sides))
    needed = next((needed for needed in needs.get(join, ()) if needed is not None), None)
    where, other = "before this join", ""
    columns: tuple[str, ...] = ()
    if needed is not None and needed.dataset is not None and needed.feeds:
        where, columns = f"before send_to({needed.dataset})", app.dataset(needed.dataset).partition_by
    elif needed is not None:
        columns = needed.columns or ()
        if needed.dataset is not None:
            partitions = counts.partitions[flows.before(join).stream]
            other = f", declare dataset {needed.dataset!r} with partitions={partitions}"
    raise PartitionCountMismatchError(
        f"{join} needs equal partition counts: {counted}.",
        f"Repartition the stream {where} with {_partition_by(columns)}{other}, {_AUTO}.",
        application=app.name,
        operator=join,
        counts=tuple((side.name, side.partitions) for side in sides),
    )


def check_co_partitioned(app: Application, needs: Needs, flows: Flows, edges: Mapping[str, StreamEdge]) -> None:
    """Raise PlanningError for the first join whose stream does not lie in the buckets of its dataset.

    Equal counts are not enough: the same columns have to choose the partition, by the same hash.
    """
    for operator, asked in needs.items():
        for number, (needed, flow) in enumerate(zip(asked, flows.arriving[operator], strict=True)):
            why = "" if needed is None else mismatch(needed, flow)
            if needed is None or needed.feeds or not why:
                continue
            columns = needed.columns or ()
            name = edges[flow.stream].name if flow.stream in edges else flow.stream
            step = f"Write {_partition_by(columns)} before this join, {_AUTO}."
            if needed.dataset is None:
                raise PlanningError(
                    f"{operator}: input {number + 1} ({name}) does not lie as the operator needs it: {why}; needed is "
                    f"({', '.join(columns)}) with {SPARK}.",
                    step,
                    operator=operator,
                )
            dataset = app.dataset(needed.dataset)
            raise PlanningError(
                f"{operator}: stream {name} does not lie as dataset {dataset.name} does, "
                f"which is partitioned by ({', '.join(dataset.partition_by)}) with {SPARK}: {why}; needed is "
                f"({', '.join(columns)}) with {SPARK}.",
                step,
                dataset=dataset.name,
                operator=operator,
            )


def _involved(join: str, groups: Groups, counts: Counts) -> list[str]:
    """The members of a group, and whatever the inferred ones got their counts from."""
    involved: list[str] = []
    waiting = list(groups[join])
    while waiting:
        member = waiting.pop(0)
        if member in involved:
            continue
        involved.append(member)
        if member in counts.inferred:
            waiting.append(counts.inferred[member].source)
    return sorted(involved, key=lambda member: member.startswith(dataset_node("")))


def _counted(edge: StreamEdge) -> str:
    return f"{edge.name} has {edge.partitions} ({edge.count_from})"


def _partition_by(columns: tuple[str, ...]) -> str:
    quoted = ", ".join(f'"{name}"' for name in columns)
    return f".partition_by({quoted})"

"""Decides whether records have to move before they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.application.graph import SendToStream, SendToTable
from dagster_adjunct.orchestration.planner.catalog import SPARK, Catalog, Partitioner, facts_of
from dagster_adjunct.orchestration.planner.execution_plan import Exchange, Reason
from dagster_adjunct.orchestration.planner.flow import Flow, output_partitioner

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.application.graph import Operator


def exchange_before_sink(
    app: Application, catalog: Catalog, operator: Operator, flow: Flow, counts: Mapping[str, int]
) -> Exchange | None:
    """Return the exchange that a sink needs, None when the records already lie right for it."""
    spec, found = operator.spec, counts[flow.stream]
    if isinstance(spec, SendToStream):
        output = app.outputs[spec.stream]
        partitioner = output_partitioner(catalog, output.name)
        return _to_stream(operator.id, "output", output.name, output.key, output.partitions, partitioner, flow, found)
    if not isinstance(spec, SendToTable):
        return None
    if spec.dataset:
        dataset = app.dataset(spec.table)
        assert dataset.stream is not None  # send_to refuses others
        facts = facts_of(catalog, dataset.stream, operator.id)
        key = facts.key or dataset.key
        return _to_stream(operator.id, "dataset", facts.name, key, facts.partitions, facts.partitioner, flow, found)
    key = app.table_key(spec.table)
    if _one_task_per_key(flow, key):
        return None
    why = f"records of one {', '.join(key)} have to meet in one task for table {spec.table}; {_found(flow, found)}"
    return Exchange(operator.id, "remote table", key, found, why)


def _to_stream(
    operator: str,
    reason: Reason,
    stream: str,
    key: tuple[str, ...],
    partitions: int,
    partitioner: Partitioner,
    flow: Flow,
    found: int,
) -> Exchange | None:
    if not key:
        if flow.partitioned_by and found == partitions:
            return None
        return Exchange(operator, reason, (), partitions, f"{stream} has {partitions} partitions and no key")
    if partitioner == SPARK:
        right = flow.partitioned_by == key and flow.partitioner == SPARK and found == partitions
    else:
        # The system's own client chooses the partition; only the order of one key's records is ours to keep.
        right = _one_task_per_key(flow, key)
    if right:
        return None
    why = f"{stream} has {partitions} partitions by ({', '.join(key)}); {_found(flow, found)}"
    return Exchange(operator, reason, key, partitions, why)


def _one_task_per_key(flow: Flow, key: tuple[str, ...]) -> bool:
    # A partition of another system's stream may be read by several tasks.
    return bool(flow.partitioned_by) and flow.partitioner == SPARK and set(flow.partitioned_by) <= set(key)


def _found(flow: Flow, partitions: int) -> str:
    if not flow.partitioned_by:
        since = f" since {flow.lost_at}" if flow.lost_at else ""
        return f"the records are in {partitions} partitions by nothing that is known{since}"
    return f"the records are in {partitions} by ({', '.join(flow.partitioned_by)}) with {flow.partitioner}"

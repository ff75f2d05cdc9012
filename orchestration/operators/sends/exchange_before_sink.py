"""Decides whether records have to move before they are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.spec.planning_values import Exchange
from dagster_adjunct.orchestration.operators.spec.stream_facts import SPARK

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, Reason
    from dagster_adjunct.orchestration.operators.spec.stream_facts import StreamFacts


def before_stream(operator: str, reason: Reason, stream: StreamFacts, flow: Flow, lying: int) -> Exchange | None:
    """Return the exchange that writing to a stream needs, for records that lie in `lying` partitions."""
    key, partitions = stream.key, stream.partitions
    if not key:
        if flow.partitioned_by and lying == partitions:
            return None
        return Exchange(operator, reason, (), partitions, f"{stream.name} has {partitions} partitions and no key")
    if stream.partitioner == SPARK:
        right = flow.partitioned_by == key and flow.partitioner == SPARK and lying == partitions
    else:
        # The system's own client chooses the partition; only the order of one key's records is ours to keep.
        right = _one_task_per_key(flow, key)
    if right:
        return None
    why = f"{stream.name} has {partitions} partitions by ({', '.join(key)}); {_where(flow, lying)}"
    return Exchange(operator, reason, key, partitions, why)


def before_table(operator: str, table: str, key: tuple[str, ...], flow: Flow, lying: int) -> Exchange | None:
    """Return the exchange that writing to a remote table needs, for records that lie in `lying` partitions."""
    if _one_task_per_key(flow, key):
        return None
    why = f"records of one {', '.join(key)} have to meet in one task for table {table}; {_where(flow, lying)}"
    return Exchange(operator, "remote table", key, lying, why)


def before_local(
    operator: str, table: str, by: tuple[str, ...], partitions: int, flow: Flow, lying: int
) -> Exchange | None:
    """Return the exchange that brings records, which lie in `lying` partitions, to the buckets of a local table."""
    if flow.partitioned_by == by and flow.partitioner == SPARK and lying == partitions:
        return None
    why = f"local table {table} has {partitions} buckets by ({', '.join(by)}); {_where(flow, lying)}"
    return Exchange(operator, "local table", by, partitions, why)


def _one_task_per_key(flow: Flow, key: tuple[str, ...]) -> bool:
    # A partition of another system's stream may be read by several tasks.
    return bool(flow.partitioned_by) and flow.partitioner == SPARK and set(flow.partitioned_by) <= set(key)


def _where(flow: Flow, partitions: int) -> str:
    if not flow.partitioned_by:
        since = f" since {flow.lost_at}" if flow.lost_at else ""
        return f"the records are in {partitions} partitions by nothing that is known{since}"
    return f"the records are in {partitions} by ({', '.join(flow.partitioned_by)}) with {flow.partitioner}"

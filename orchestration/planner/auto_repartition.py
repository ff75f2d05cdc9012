"""With `auto_repartition=True`: puts the cheapest exchanges where a join could not be proven without.

A dataset lies in its buckets already, so it is always the stream that moves. One exchange serves all
later joins that need the same. An intermediate stream whose count is open gets the count that most
of the branches behind it ask for first, so that the fewest of them need another exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.stream_facts import SPARK, TASK_NUMBER, Catalog
from dagster_adjunct.orchestration.planner.join_groups import exchange_node
from dagster_adjunct.orchestration.planner.partition_counts import declared_counts
from dagster_adjunct.orchestration.planner.record_flows import Flows, follow

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.operator_spec import Operator
    from dagster_adjunct.orchestration.operators.planning_values import Flow, Requirement


@dataclass(frozen=True, slots=True)
class Inserted:
    """An exchange before `operator` by `columns` into `partitions`, and why it is needed.

    `stream` is the id that the flow of the records had before.
    """

    operator: str
    stream: str
    columns: tuple[str, ...]
    partitions: int
    why: str


def repartitioned(app: Application, catalog: Catalog) -> tuple[Flows, dict[str, Inserted]]:
    """Return the flows with exchanges in place, and the exchanges by the operator that they stand before."""
    counts = declared_counts(app, catalog)
    joined = {operator.spec.match.dataset for operator in app.operators if operator.spec.match}
    for stream, partitions in _preferred(app, follow(app, catalog), joined).items():
        if counts[stream] is None:
            counts[stream] = partitions
    inserted: dict[str, Inserted] = {}

    def decide(operator: Operator, needed: Requirement, flow: Flow) -> Flow:
        if _asks_nothing(needed, joined):
            return flow
        why = mismatch(needed, flow)
        if not why and counts[flow.stream] != needed.partitions:
            why = f"it has {counts[flow.stream]} partitions"
        if not why:
            return flow
        dataset = app.dataset(needed.dataset)
        columns = needed.columns or dataset.partition_by
        node = exchange_node(operator.id)
        counts[node] = needed.partitions
        inserted[operator.id] = Inserted(operator.id, flow.stream, columns, needed.partitions, why)
        return replace(flow, stream=node, partitioned_by=columns, partitioner=SPARK)

    return follow(app, catalog, decide), inserted


def mismatch(needed: Requirement, flow: Flow) -> str:
    """Return in words why the stream does not lie as the dataset does, "" when it does (counts aside)."""
    if flow.partitioner == TASK_NUMBER:
        return "it is a broadcast input, which every task reads whole"
    if needed.columns is None or (flow.partitioned_by == needed.columns and flow.partitioner == SPARK):
        return ""
    if flow.lost_at:
        return f"{flow.lost_at} leaves open how it is partitioned"
    if not flow.partitioned_by:
        return "it is partitioned by no key"
    return f"it is partitioned by ({', '.join(flow.partitioned_by)}) with {flow.partitioner}"


def _asks_nothing(needed: Requirement, joined: Collection[str]) -> bool:
    """Whether this is a sink to a dataset that nothing joins: its own exchange brings the records there."""
    return not needed.joins and needed.dataset not in joined


def _preferred(app: Application, flows: Flows, joined: Collection[str]) -> dict[str, int]:
    """Return the count that most first joins behind each intermediate stream need; the earliest on a tie."""
    votes: dict[str, Counter[int]] = {}
    met: set[str] = set()  # operators whose records have met a partitioned dataset since their stream began
    for operator in app.operators:
        if operator.begins_stream:
            if operator.spec.role == "intermediate":
                votes[operator.id] = Counter()
            continue
        if not met.isdisjoint(operator.inputs):
            met.add(operator.id)
            continue
        needed = operator.spec.requirement(app)
        if needed is None or _asks_nothing(needed, joined):
            continue
        flow = flows.before(operator.id)
        if flow.stream in votes and not mismatch(needed, flow):
            votes[flow.stream][needed.partitions] += 1
        if needed.joins:
            met.add(operator.id)
    return {stream: count.most_common(1)[0][0] for stream, count in votes.items() if count}

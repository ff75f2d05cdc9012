"""Names the streams of a plan, and says of each where its partition count comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.application.graph import Input, PartitionBy, SendToStream
from dagster_adjunct.orchestration.planner.analysis import dataset_node, exchange_node
from dagster_adjunct.orchestration.planner.catalog import SPARK, Catalog, facts_of
from dagster_adjunct.orchestration.planner.execution_plan import StreamEdge

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.application.graph import Operator
    from dagster_adjunct.orchestration.planner.auto import Inserted
    from dagster_adjunct.orchestration.planner.counts import Counts
    from dagster_adjunct.orchestration.planner.flow import Flows


def stream_edges(
    app: Application,
    catalog: Catalog,
    flows: Flows,
    counts: Counts,
    inserted: Mapping[str, Inserted],
    default_from: str,
) -> dict[str, StreamEdge]:
    """Return the edges by the ids that counts and groups use: streams as defined, then side inputs."""
    edges: dict[str, StreamEdge] = {}
    for operator in app.operators:
        exchange = inserted.get(operator.id)
        if exchange is not None:
            edges[exchange_node(operator.id)] = StreamEdge(
                f"{app.name}-before-{operator.id}", "intermediate", exchange.partitions, exchange.columns, SPARK,
                "auto_repartition", operator.id,
            )  # fmt: skip
        edge = _edge(operator, catalog, flows, counts)
        if edge is not None:
            edges[operator.id] = edge
    for dataset in app.datasets:
        if dataset.stream is not None:
            facts_of(catalog, dataset.stream, f"dataset {dataset.name!r}")
        edges[dataset_node(dataset.name)] = StreamEdge(
            str(dataset.input), "side-input", dataset.partitions, dataset.partition_by, SPARK,
            f"dataset {dataset.name}", None, dataset.name,
        )  # fmt: skip
    return {node: _with_origin(node, edge, edges, counts, default_from) for node, edge in edges.items()}


def _edge(operator: Operator, catalog: Catalog, flows: Flows, counts: Counts) -> StreamEdge | None:
    spec, flow = operator.spec, flows.after[operator.id]
    partitions = counts.partitions.get(operator.id)
    if isinstance(spec, Input) and spec.broadcast is not None:
        facts = facts_of(catalog, spec.stream, operator.id)
        return StreamEdge(
            spec.stream, "broadcast-input", facts.partitions, facts.key, facts.partitioner, "input", operator.id
        )
    if isinstance(spec, Input):
        return StreamEdge(spec.stream, "input", partitions, flow.partitioned_by, flow.partitioner, "input", operator.id)
    if isinstance(spec, SendToStream):
        return StreamEdge(
            spec.stream, "output", partitions, flow.partitioned_by, flow.partitioner, "output", operator.id
        )
    if isinstance(spec, PartitionBy):
        said = f"partition_by(partitions={spec.partitions})" if spec.partitions is not None else ""
        return StreamEdge(spec.stream, "intermediate", partitions, spec.columns, SPARK, said, operator.id)
    return None


def _with_origin(
    node: str, edge: StreamEdge, edges: Mapping[str, StreamEdge], counts: Counts, default_from: str
) -> StreamEdge:
    if edge.count_from:
        return edge
    reason = default_from
    inference = counts.inferred.get(node)
    if inference is not None:
        source = edges[inference.source]
        named = f"dataset {source.dataset}" if source.dataset else source.name
        reason = f"inferred from {named} in {inference.join}"
    return StreamEdge(
        edge.name, edge.role, edge.partitions, edge.partitioned_by, edge.partitioner, reason, edge.operator
    )

"""Names the streams of a plan, and says of each where its partition count comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.spec.planning_values import PlanContext, StreamEdge
from dagster_adjunct.orchestration.operators.spec.stream_facts import SPARK, Catalog, facts_of
from dagster_adjunct.orchestration.planner.counts.join_groups import dataset_node

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.planner.counts.auto_repartition import Insertions
    from dagster_adjunct.orchestration.planner.counts.partition_counts import Counts
    from dagster_adjunct.orchestration.planner.known_records.record_flows import Flows


def stream_edges(
    app: Application,
    catalog: Catalog,
    flows: Flows,
    counts: Counts,
    inserted: Insertions,
    default_from: str,
) -> dict[str, StreamEdge]:
    """Return the edges by the ids that counts and groups use: streams as defined, then side inputs."""
    edges: dict[str, StreamEdge] = {}
    for operator in app.operators:
        for number in range(len(operator.inputs)):
            item = inserted.get((operator.id, number))
            if item is not None:
                name = f"{app.name}-before-{operator.id}" + (f"-{number + 1}" if len(operator.inputs) > 1 else "")
                edges[item.node] = StreamEdge(
                    name, "intermediate", counts.partitions[item.node], item.columns, SPARK, "auto_repartition",
                    operator.id,
                )  # fmt: skip
        flow = flows.after[operator.id]
        context = PlanContext(operator.id, app, catalog)
        edge = operator.spec.edge(context, flow, counts.partitions[flow.stream])
        if edge is not None:
            edges[operator.id] = edge
    for dataset in app.datasets:
        if dataset.stream is not None:
            facts_of(catalog, dataset.stream, f"dataset {dataset.name!r}")
        edges[dataset_node(dataset.name)] = StreamEdge(
            dataset.name if dataset.is_local else str(dataset.input),
            "local-table" if dataset.is_local else "side-input", dataset.partitions, dataset.partition_by, SPARK,
            f"dataset {dataset.name}", None, dataset.name,
        )  # fmt: skip
    return {node: _with_origin(node, edge, edges, counts, default_from) for node, edge in edges.items()}


def _with_origin(
    node: str, edge: StreamEdge, edges: Mapping[str, StreamEdge], counts: Counts, default_from: str
) -> StreamEdge:
    if edge.count_from:
        return edge
    reason = default_from
    inference = counts.inferred.get(node)
    if inference is not None:
        at = inference.source
        while at not in edges:  # where streams are brought together, the count comes from one of them
            at = counts.inferred[at].source
        source = edges[at]
        named = f"dataset {source.dataset}" if source.dataset else source.name
        reason = f"inferred from {named} in {inference.join}"
    return replace(edge, count_from=reason)

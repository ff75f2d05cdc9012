"""A plan as a graph to draw: operators as boxes, and around them the streams, datasets and tables that they touch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.drawing.graph import Colour, Graph, Link, Node, Shape
from dagster_adjunct.orchestration.operators.spec.planning_values import BROADCAST

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.spec.planning_values import Exchange, StreamEdge
    from dagster_adjunct.orchestration.planner.plans.plan_parts import PlannedCall, PlannedOperator, PlannedTable

LEGEND: dict[Colour, str] = {
    "input": "reads",
    "transform": "changes records",
    "join": "looks up",
    "several": "brings streams together",
    "exchange": "moves records (exchange)",
    "write": "writes",
    "outside": "stream, dataset, table",
}
_AT_THE_TARGET = ("output", "remote table", "dataset", "local table")


def plan_graph(
    application: str,
    operators: Sequence[PlannedOperator],
    streams: Sequence[StreamEdge],
    exchanges: Sequence[Exchange],
    tables: Sequence[PlannedTable],
    calls: Sequence[PlannedCall],
) -> Graph:
    """Return what is drawn of a plan; links on which records are exchanged are marked."""
    counts = {edge.name: edge for edge in streams if edge.dataset is None}
    datasets = {edge.dataset: edge for edge in streams if edge.dataset is not None}
    remote = {table.table for table in tables}
    before = {(item.operator, item.input): item for item in exchanges if item.reason not in _AT_THE_TARGET}
    written = {item.operator: item for item in exchanges if item.reason in _AT_THE_TARGET}
    moves = {item.operator for item in exchanges if item.reason in ("partition_by", "broadcast")}
    calling = {call.operator for call in calls if call.kind == "sink"}
    nodes: dict[str, Node] = {}
    links: list[Link] = []

    def touched(name: str) -> str:
        key = f"outside {name}"
        if key not in nodes:
            edge = datasets.get(name) or counts.get(name)
            is_stream = name in counts or (name not in datasets and name not in remote and "." in name)
            shape: Shape = "dataset" if name in datasets else "stream" if is_stream else "table"
            lines = (name, _count(edge)) if edge else (name,)
            nodes[key] = Node(key, shape, "outside", lines, f"{shape} {' '.join(lines)}")
        return key

    for item in operators:
        if item.reads is not None:
            links.append(Link(touched(item.reads), item.id))
        nodes[item.id] = _box(item, moves, calling)
        for number, source in enumerate(item.inputs):
            links.append(_link(source, item.id, before.get((item.id, number))))
        if item.looks_up is not None:
            links.append(Link(touched(item.looks_up), item.id))
        if item.writes is not None:
            links.append(_link(item.id, touched(item.writes), written.get(item.id)))
    used = {node.colour for node in nodes.values()}
    legend = tuple((colour, name) for colour, name in LEGEND.items() if colour in used)
    return Graph(f"Application {application}", tuple(nodes.values()), tuple(links), legend)


def _box(item: PlannedOperator, moves: set[str], calling: set[str]) -> Node:
    colour: Colour = "transform"
    for applies, name in (
        (item.reads is not None, "input"),
        (item.writes is not None or item.id in calling, "write"),
        (item.looks_up is not None, "join"),
        (item.id in moves, "exchange"),
        (len(item.inputs) > 1, "several"),
    ):
        if applies:
            colour = name  # type: ignore[assignment]
            break
    summary = " ".join(item.summary.split())
    by = f" by {', '.join(item.partitioned_by)}" if item.partitioned_by else ""
    columns = "columns not known before it runs" if item.columns is None else f"columns {', '.join(item.columns)}"
    tooltip = f"{item.id}: {summary}; {columns}"
    return Node(item.id, "box", colour, (item.id, summary, _partitions(item.partitions) + by), tooltip)


def _link(source: str, target: str, moved: Exchange | None) -> Link:
    if moved is None:
        return Link(source, target)
    by = f" by {', '.join(moved.partitioned_by)}" if moved.partitioned_by else ""
    return Link(source, target, f"exchange: {moved.partitions}{by}", marked=True)


def _count(edge: StreamEdge) -> str:
    if edge.partitions is None:
        return "broadcast"
    if edge.role in BROADCAST:
        return f"{_partitions(edge.partitions)}, read whole by every task"
    by = f" by {', '.join(edge.partitioned_by)}" if edge.partitioned_by else ""
    return _partitions(edge.partitions) + by


def _partitions(number: int) -> str:
    return f"{number} partition{'' if number == 1 else 's'}"

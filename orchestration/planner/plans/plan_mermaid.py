"""A plan as Mermaid text: operators as boxes, and around them the streams, datasets and tables that they touch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from dagster_adjunct.orchestration.operators.spec.planning_values import BROADCAST

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.spec.planning_values import Exchange, StreamEdge
    from dagster_adjunct.orchestration.planner.plans.plan_parts import PlannedCall, PlannedOperator, PlannedTable

Shape = Literal["box", "stream", "dataset", "table"]
Colour = Literal["input", "transform", "join", "exchange", "several", "write", "outside"]

LONGEST_LINE = 48
_SHAPES: dict[Shape, tuple[str, str]] = {
    "box": ("[", "]"),
    "stream": ("([", "])"),
    "dataset": ("[(", ")]"),
    "table": ("[[", "]]"),
}
_FILL_AND_STROKE: dict[Colour, tuple[str, str]] = {
    "input": ("#dbeafe", "#2563eb"),
    "transform": ("#f3f4f6", "#6b7280"),
    "join": ("#dcfce7", "#16a34a"),
    "exchange": ("#ffedd5", "#ea580c"),
    "several": ("#e0e7ff", "#4f46e5"),
    "write": ("#fae8ff", "#a21caf"),
    "outside": ("#ffffff", "#57606a"),
}
_PLAIN = frozenset(" .,:()+-=_/")
_AT_THE_TARGET = ("output", "remote table", "dataset", "local table")


class _Node(NamedTuple):
    shape: Shape
    colour: Colour
    lines: tuple[str, ...]


class _Link(NamedTuple):
    source: str
    target: str
    exchange: Exchange | None = None


def mermaid(
    operators: Sequence[PlannedOperator],
    streams: Sequence[StreamEdge],
    exchanges: Sequence[Exchange],
    tables: Sequence[PlannedTable],
    calls: Sequence[PlannedCall],
) -> str:
    """Return a flowchart from top to bottom; all texts are escaped, and links on which records move are marked."""
    counts = {edge.name: edge for edge in streams if edge.dataset is None}
    datasets = {edge.dataset: edge for edge in streams if edge.dataset is not None}
    remote = {table.table for table in tables}
    before = {(item.operator, item.input): item for item in exchanges if item.reason not in _AT_THE_TARGET}
    written = {item.operator: item for item in exchanges if item.reason in _AT_THE_TARGET}
    moves = {item.operator for item in exchanges if item.reason in ("partition_by", "broadcast")}
    calling = {call.operator for call in calls if call.kind == "sink"}
    nodes: dict[str, _Node] = {}
    links: list[_Link] = []

    def touched(name: str) -> str:
        key = f"outside {name}"
        if key not in nodes:
            edge = datasets.get(name) or counts.get(name)
            is_stream = name in counts or (name not in datasets and name not in remote and "." in name)
            shape: Shape = "dataset" if name in datasets else "stream" if is_stream else "table"
            nodes[key] = _Node(shape, "outside", (name, _count(edge)) if edge else (name,))
        return key

    for item in operators:
        if item.reads is not None:
            links.append(_Link(touched(item.reads), item.id))
        nodes[item.id] = _box(item, moves, calling)
        for number, source in enumerate(item.inputs):
            links.append(_Link(source, item.id, before.get((item.id, number))))
        if item.looks_up is not None:
            links.append(_Link(touched(item.looks_up), item.id))
        if item.writes is not None:
            links.append(_Link(item.id, touched(item.writes), written.get(item.id)))
    return _flowchart(nodes, links)


def _box(item: PlannedOperator, moves: set[str], calling: set[str]) -> _Node:
    colours: list[tuple[bool, Colour]] = [
        (item.reads is not None, "input"),
        (item.writes is not None or item.id in calling, "write"),
        (item.looks_up is not None, "join"),
        (item.id in moves, "exchange"),
        (len(item.inputs) > 1, "several"),
        (True, "transform"),
    ]
    colour = next(colour for applies, colour in colours if applies)
    summary = " ".join(item.summary.split())
    return _Node("box", colour, (item.id, summary, _partitions(item.partitions) + _by(item.partitioned_by)))


def _count(edge: StreamEdge) -> str:
    if edge.partitions is None:
        return "broadcast"
    if edge.role in BROADCAST:
        return f"{_partitions(edge.partitions)}, read whole by every task"
    return _partitions(edge.partitions) + _by(edge.partitioned_by)


def _partitions(number: int) -> str:
    return f"{number} partition{'' if number == 1 else 's'}"


def _by(columns: Sequence[str] | None) -> str:
    return f" by {', '.join(columns)}" if columns else ""


def _flowchart(nodes: dict[str, _Node], links: Sequence[_Link]) -> str:
    ids = {key: f"n{number}" for number, key in enumerate(nodes)}
    lines = ["flowchart TD"]
    for key, node in nodes.items():
        before, after = _SHAPES[node.shape]
        text = "<br/>".join(_escaped(_shortened(line)) for line in node.lines)
        lines.append(f'  {ids[key]}{before}"{text}"{after}:::{node.colour}')
    for source, target, moved in links:
        arrow = "-->"
        if moved is not None:
            arrow = f'==>|"{_escaped(f"exchange: {moved.partitions}{_by(moved.partitioned_by)}")}"|'
        lines.append(f"  {ids[source]} {arrow} {ids[target]}")
    used = {node.colour for node in nodes.values()}
    for colour, (fill, stroke) in _FILL_AND_STROKE.items():
        if colour in used:
            lines.append(f"  classDef {colour} fill:{fill},stroke:{stroke},color:#1f2328")
    marked = [str(number) for number, link in enumerate(links) if link.exchange is not None]
    if marked:
        lines.append(f"  linkStyle {','.join(marked)} stroke:#ea580c")
    return "\n".join(lines) + "\n"


def _shortened(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"


def _escaped(text: str) -> str:
    """Anything that could mean something to Mermaid, Markdown or HTML becomes a numbered entity."""
    return "".join(c if (c.isalnum() or c in _PLAIN) else f"#{ord(c)};" for c in text)

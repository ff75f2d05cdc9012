"""A graph as Mermaid text, which GitHub, GitLab and many documentation tools draw."""

from __future__ import annotations

from dagster_adjunct.orchestration.drawing.colours import FILLS, MARK
from dagster_adjunct.orchestration.drawing.graph import Graph, Node, shortened

_SHAPES = {"box": ("[", "]"), "stream": ("([", "])"), "dataset": ("[(", ")]"), "table": ("[[", "]]")}
_PLAIN = frozenset(" .,:()+-=_/")


def mermaid(graph: Graph) -> str:
    """Return a flowchart from top to bottom; all texts are escaped."""
    ids = {node.id: f"n{number}" for number, node in enumerate(graph.nodes)}
    lines = ["flowchart TD"]
    for node in graph.nodes:
        before, after = _SHAPES[node.shape]
        lines.append(f'  {ids[node.id]}{before}"{_text(node)}"{after}:::{node.colour}')
    marked = []
    for number, link in enumerate(graph.links):
        label = f'|"{_escaped(link.label)}"|' if link.label else ""
        lines.append(f"  {ids[link.source]} {'==>' if link.marked else '-->'}{label} {ids[link.target]}")
        if link.marked:
            marked.append(str(number))
    used = {node.colour for node in graph.nodes}
    for colour, (fill, stroke) in FILLS.items():
        if colour in used:
            lines.append(f"  classDef {colour} fill:{fill},stroke:{stroke},color:#1f2328")
    if marked:
        lines.append(f"  linkStyle {','.join(marked)} stroke:{MARK}")
    return "\n".join(lines) + "\n"


def _text(node: Node) -> str:
    return "<br/>".join(_escaped(shortened(line)) for line in node.lines)


def _escaped(text: str) -> str:
    """Anything that could mean something to Mermaid, Markdown or HTML becomes a numbered entity."""
    return "".join(c if (c.isalnum() or c in _PLAIN) else f"#{ord(c)};" for c in text)

"""A graph as an SVG that stands alone: no script, no font and no address to fetch."""

from __future__ import annotations

from itertools import pairwise
from xml.sax.saxutils import escape

from dagster_adjunct.orchestration.drawing.colours import FILLS, LINE, MARK, TEXT
from dagster_adjunct.orchestration.drawing.graph import Graph, Link, Node, shortened
from dagster_adjunct.orchestration.drawing.layers import Layered, layered
from dagster_adjunct.orchestration.drawing.placing import placed

LINE_HEIGHT, CHARACTER, PADDING = 16, 6.7, 12
GAP, BETWEEN, MARGIN = 28, 44, 20
Place = tuple[float, float]


def svg(graph: Graph) -> str:
    """Return the drawing, links pointing down; all texts are escaped."""
    layout = layered(graph)
    nodes = {node.id: node for node in graph.nodes}
    widths = {node.id: _width(node) for node in graph.nodes}
    outside = {node.id for node in graph.nodes if node.shape != "box"}
    weights = {vertex: 1.0 if vertex in outside else 50.0 for layer in layout.layers for vertex in layer}
    centre = placed(layout, widths, weights, GAP)
    left = min((centre[vertex] - widths.get(vertex, 0) / 2 for vertex in centre), default=0) - MARGIN
    tops, heights, below = _rows(layout, nodes)
    middles = {
        vertex: (centre[vertex] - left, tops[number] + heights[number] / 2)
        for number, layer in enumerate(layout.layers)
        for vertex in layer
    }
    sizes = {node.id: (widths[node.id], float(_height(node))) for node in graph.nodes}
    body = [
        line
        for number, link in enumerate(graph.links)
        for line in _link(link, layout.paths[number], number in layout.upward, middles, sizes)
    ]
    for node in graph.nodes:
        body += _node(node, middles[node.id], sizes[node.id])
    body += _legend(graph, below)
    labels = [middles[link.target][0] + len(link.label) * CHARACTER for link in graph.links if link.label]
    shapes = [middles[node.id][0] + widths[node.id] / 2 for node in graph.nodes]
    legend = sum(_entry(name) for _, name in graph.legend)
    width = round(max([*labels, *shapes, legend, 200]) + MARGIN)
    height = below + (2 * LINE_HEIGHT if graph.legend else 0) + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{TEXT}">',
            f"<title>{_escaped(graph.title)}</title>",
            "<defs>",
            *(
                f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
                'markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
                f'<path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
                for name, colour in (("line", LINE), ("mark", MARK))
            ),
            "</defs>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            f'<text x="{MARGIN}" y="{MARGIN + 8}" font-size="15" font-weight="bold">{_escaped(graph.title)}</text>',
            *body,
            "</svg>",
            "",
        ]
    )


def _rows(layout: Layered, nodes: dict[str, Node]) -> tuple[list[int], list[int], int]:
    """The top and the height of each layer, and where the lowest ends."""
    top = MARGIN + 2 * LINE_HEIGHT
    tops, heights = [], []
    for layer in layout.layers:
        tops.append(top)
        heights.append(max((_height(nodes[vertex]) for vertex in layer if vertex in nodes), default=0))
        top += heights[-1] + BETWEEN
    return tops, heights, top - BETWEEN + MARGIN


def _width(node: Node) -> float:
    longest = max(_letters(shortened(line)) * (1.07 if number == 0 else 1) for number, line in enumerate(node.lines))
    return round(longest * CHARACTER + 2 * PADDING + (0 if node.shape == "box" else 16), 1)


def _height(node: Node) -> int:
    return len(node.lines) * LINE_HEIGHT + PADDING + (10 if node.shape == "dataset" else 0)


def _letters(text: str) -> int:
    """How many letters wide a text is; those of East Asia take two."""
    return sum(2 if ord(c) >= 0x1100 else 1 for c in text)


def _node(node: Node, middle: Place, size: Place) -> list[str]:
    (x, y), (width, height) = middle, size
    fill, stroke = FILLS[node.colour]
    lines = ["<g>", f"<title>{_escaped(node.tooltip or ' '.join(node.lines))}</title>"]
    lines += [f'<{shape} fill="{fill}" stroke="{stroke}"/>' for shape in _outline(node, x, y, width, height)]
    first = y - (len(node.lines) - 1) * LINE_HEIGHT / 2 + 4 + (5 if node.shape == "dataset" else 0)
    for number, line in enumerate(node.lines):
        weight = ' font-weight="bold"' if number == 0 else ""
        at = f'x="{_n(x)}" y="{_n(first + number * LINE_HEIGHT)}"'
        lines.append(f'<text {at} text-anchor="middle"{weight}>{_escaped(shortened(line))}</text>')
    return [*lines, "</g>"]


def _outline(node: Node, x: float, y: float, width: float, height: float) -> list[str]:
    left, top, right, bottom = x - width / 2, y - height / 2, x + width / 2, y + height / 2
    box = f'rect x="{_n(left)}" y="{_n(top)}" width="{_n(width)}" height="{_n(height)}"'
    if node.shape == "stream":
        return [f'{box} rx="{_n(height / 2)}"']
    if node.shape == "dataset":
        high = 7
        over = f"A{_n(width / 2)} {high} 0 0 1 {_n(right)} {_n(top + high)}"
        under = f"A{_n(width / 2)} {high} 0 0 1 {_n(left)} {_n(bottom - high)}"
        body = f"M{_n(left)} {_n(top + high)} {over} V{_n(bottom - high)} {under} z"
        return [f'path d="{body}"', f'ellipse cx="{_n(x)}" cy="{_n(top + high)}" rx="{_n(width / 2)}" ry="{high}"']
    if node.shape == "table":
        inner = f'rect x="{_n(left + 5)}" y="{_n(top)}" width="{_n(width - 10)}" height="{_n(height)}"'
        return [box, inner]
    return [f'{box} rx="4"']


def _link(
    link: Link, path: tuple[str, ...], upward: bool, middles: dict[str, Place], sizes: dict[str, Place]
) -> list[str]:
    """A curve that leaves each vertex downwards and enters the next from above."""
    points: list[Place] = []
    for number, vertex in enumerate(path):
        x, y = middles[vertex]
        half = sizes.get(vertex, (0.0, 0.0))[1] / 2
        points += [(x, y - half)] if number else []
        points += [(x, y + half)] if number < len(path) - 1 else []
    d = f"M{_n(points[0][0])} {_n(points[0][1])}"
    for (ax, ay), (bx, by) in pairwise(points):
        bend = (ay + by) / 2
        d += f" L{_n(bx)} {_n(by)}" if ax == bx else f" C{_n(ax)} {_n(bend)} {_n(bx)} {_n(bend)} {_n(bx)} {_n(by)}"
    name, colour, more = ("mark", MARK, ' stroke-width="2.5"') if link.marked else ("line", LINE, "")
    end = "marker-start" if upward else "marker-end"
    dashed = ' stroke-dasharray="5 3"' if upward else ""
    lines = [f'<path d="{d}" fill="none" stroke="{colour}"{more}{dashed} {end}="url(#{name})"/>']
    if link.label:
        (ax, ay), (bx, by) = points[-2:]
        at = f'x="{_n((ax + bx) / 2 + 8)}" y="{_n((ay + by) / 2 + 4)}"'
        halo = 'stroke="#ffffff" stroke-width="4" paint-order="stroke"'
        lines.append(f'<text {at} fill="{MARK}" {halo} font-size="11">{_escaped(shortened(link.label))}</text>')
    return lines


def _entry(name: str) -> float:
    return 26 + len(name) * CHARACTER


def _legend(graph: Graph, top: int) -> list[str]:
    lines: list[str] = []
    x: float = MARGIN
    for colour, name in graph.legend:
        fill, stroke = FILLS[colour]
        lines.append(f'<rect x="{_n(x)}" y="{top}" width="12" height="12" rx="2" fill="{fill}" stroke="{stroke}"/>')
        lines.append(f'<text x="{_n(x + 17)}" y="{top + 10}" font-size="11">{_escaped(name)}</text>')
        x += _entry(name)
    return lines


def _escaped(text: str) -> str:
    """Text for XML, in which control characters must not stand at all."""
    allowed = "".join(c if c.isprintable() else " " for c in text)
    return escape(allowed, {'"': "&quot;"})


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")

"""Puts the nodes of a graph on layers, links pointing down, and orders each layer so that few links cross.

It is the method of Sugiyama, Tagawa and Toda: layers by longest paths, a waypoint wherever a link crosses a layer, and
orders by the mean place of the neighbours, down and up again. All of it takes time in proportion to nodes and links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dagster_adjunct.orchestration.drawing.graph import Graph

SWEEPS = 6
MOST_WAYPOINTS = 4  # for each node and link; where there would be more, long links are drawn straight


@dataclass(frozen=True, slots=True)
class Layered:
    """`layers` hold the ids of nodes and waypoints from left to right, top layer first.

    `paths` are the vertices of each link from its upper to its lower end, in the order of the links; `upward` are the
    links that point against them.
    """

    layers: tuple[tuple[str, ...], ...]
    paths: tuple[tuple[str, ...], ...]
    upward: frozenset[int]


def layered(graph: Graph) -> Layered:
    """Return the layers of a graph; links that close a cycle point up."""
    ends = [(link.source, link.target) for link in graph.links]
    upward = _closing(graph, ends)
    down = [(b, a) if at in upward else (a, b) for at, (a, b) in enumerate(ends)]
    level = _levels([node.id for node in graph.nodes], down)
    layers: list[list[str]] = [[] for _ in range(max(level.values(), default=-1) + 1)]
    for node in graph.nodes:
        layers[level[node.id]].append(node.id)
    crossings = sum(max(level[b] - level[a] - 1, 0) for a, b in down)
    waypoints = crossings <= MOST_WAYPOINTS * (len(graph.nodes) + len(down))
    paths = []
    for at, (a, b) in enumerate(down):
        between = [f"{at}@{layer}" for layer in range(level[a] + 1, level[b])] if waypoints else []
        for layer, waypoint in enumerate(between, level[a] + 1):
            layers[layer].append(waypoint)
        paths.append((a, *between, b))
    return Layered(_ordered(layers, paths), tuple(paths), frozenset(upward))


def neighbours(paths: Sequence[Sequence[str]]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return what stands above and what stands below each vertex of the paths."""
    above: dict[str, list[str]] = {}
    below: dict[str, list[str]] = {}
    for path in paths:
        for a, b in pairwise(path):
            below.setdefault(a, []).append(b)
            above.setdefault(b, []).append(a)
    return above, below


def _closing(graph: Graph, ends: Sequence[tuple[str, str]]) -> set[int]:
    """The links that close a cycle, found by walking depth first in the order of the nodes."""
    onward: dict[str, list[int]] = {}
    for at, (source, _) in enumerate(ends):
        onward.setdefault(source, []).append(at)
    closing: set[int] = set()
    state: dict[str, bool] = {}  # True while a node is on the way, False once it is done
    for root in graph.nodes:
        if root.id in state:
            continue
        state[root.id] = True
        stack = [(root.id, iter(onward.get(root.id, ())))]
        while stack:
            vertex, links = stack[-1]
            for at in links:
                target = ends[at][1]
                if state.get(target):
                    closing.add(at)
                elif target not in state:
                    state[target] = True
                    stack.append((target, iter(onward.get(target, ()))))
                    break
            else:
                state[vertex] = False
                stack.pop()
    return closing


def _levels(nodes: Sequence[str], down: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The layer of each node: below all that points to it; what nothing points to stands right above what it feeds."""
    below: dict[str, list[str]] = {}
    missing = dict.fromkeys(nodes, 0)
    for a, b in down:
        below.setdefault(a, []).append(b)
        missing[b] += 1
    roots = [node for node in nodes if not missing[node]]
    level = dict.fromkeys(roots, 0)
    waiting = list(roots)
    for vertex in waiting:  # grows while it is walked
        for target in below.get(vertex, ()):
            level[target] = max(level.get(target, 0), level[vertex] + 1)
            missing[target] -= 1
            if not missing[target]:
                waiting.append(target)
    for root in roots:
        level[root] = min((level[target] for target in below.get(root, ())), default=1) - 1
    return level


def _ordered(layers: Sequence[Sequence[str]], paths: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    above, below = neighbours(paths)
    orders = [list(layer) for layer in layers]
    best, fewest = [list(layer) for layer in orders], _crossing(orders, below)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        beside = above if down else below
        for at in range(len(orders)) if down else reversed(range(len(orders))):
            other = at - 1 if down else at + 1
            if 0 <= other < len(orders):
                place = {vertex: number for number, vertex in enumerate(orders[other])}
                orders[at] = _by_mean(orders[at], beside, place)
        crossings = _crossing(orders, below)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in orders], crossings
    return tuple(tuple(layer) for layer in best)


def _by_mean(layer: Sequence[str], beside: Mapping[str, Sequence[str]], place: Mapping[str, int]) -> list[str]:
    """A layer ordered by the mean place of its neighbours; what has none stays where it is."""

    def wanted(number: int) -> float:
        places = [place[vertex] for vertex in beside.get(layer[number], ()) if vertex in place]
        return sum(places) / len(places) if places else float(number)

    return [layer[number] for number in sorted(range(len(layer)), key=wanted)]


def _crossing(layers: Sequence[Sequence[str]], below: Mapping[str, Sequence[str]]) -> int:
    """How many pairs of links between neighbouring layers cross (counted with a Fenwick tree)."""
    crossing = 0
    for upper, lower in pairwise(layers):
        place = {vertex: number for number, vertex in enumerate(lower)}
        tree = [0] * (len(lower) + 1)
        seen = 0
        for vertex in upper:
            ends = sorted(place[target] for target in below.get(vertex, ()) if target in place)
            for end in ends:
                at, before = end + 1, 0
                while at:
                    before += tree[at]
                    at -= at & -at
                crossing += seen - before
            for end in ends:
                at = end + 1
                while at <= len(lower):
                    tree[at] += 1
                    at += at & -at
            seen += len(ends)
    return crossing

"""Where the vertices of a layered graph stand from left to right: as straight below each other as may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagster_adjunct.orchestration.drawing.layers import Layered, neighbours

SWEEPS = 8


def placed(graph: Layered, widths: Mapping[str, float], weights: Mapping[str, float], gap: float) -> dict[str, float]:
    """Return the middle of each vertex. `widths` are those of the nodes (a waypoint has none); a vertex that weighs
    more draws its neighbours to it, and is drawn less."""
    above, below = neighbours(graph.paths)
    centre: dict[str, float] = {}
    for layer in graph.layers:
        centre |= _apart(layer, dict.fromkeys(layer, 0.0), widths, weights, gap)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for layer in graph.layers if down else reversed(graph.layers):
            wanted = {}
            for vertex in layer:
                beside = (above if down else below).get(vertex) or (below if down else above).get(vertex) or [vertex]
                total = sum(weights.get(other, 1.0) for other in beside)
                wanted[vertex] = sum(centre[other] * weights.get(other, 1.0) for other in beside) / total
            centre |= _apart(layer, wanted, widths, weights, gap)
    return centre


def _apart(
    layer: Sequence[str],
    wanted: Mapping[str, float],
    widths: Mapping[str, float],
    weights: Mapping[str, float],
    gap: float,
) -> dict[str, float]:
    """The places nearest to those wanted (by weighted squares) that keep the order and the gaps: neighbours that would
    overlap are pooled, as in isotonic regression."""
    shifts: list[float] = []
    for number, vertex in enumerate(layer):
        before = layer[number - 1] if number else vertex
        step = (widths.get(before, 0.0) + widths.get(vertex, 0.0)) / 2 + gap if number else 0.0
        shifts.append((shifts[-1] if shifts else 0.0) + step)
    pools: list[tuple[float, float, int]] = []  # the sum of weighted places, of weights, and how many vertices
    for vertex, shift in zip(layer, shifts, strict=True):
        weight = weights.get(vertex, 1.0)
        pool = ((wanted[vertex] - shift) * weight, weight, 1)
        while pools and pools[-1][0] / pools[-1][1] > pool[0] / pool[1]:
            last = pools.pop()
            pool = (last[0] + pool[0], last[1] + pool[1], last[2] + pool[2])
        pools.append(pool)
    places = [total / weight for total, weight, count in pools for _ in range(count)]
    return {vertex: place + shift for vertex, place, shift in zip(layer, places, shifts, strict=True)}

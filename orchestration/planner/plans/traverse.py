"""Graph traversal: every vertex once, depth first, without recursion."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

V = TypeVar("V", bound=Hashable)


def traverse(roots: Iterable[V], next_vertices: Callable[[V], Iterable[V]], visit: Callable[[V], object]) -> None:
    """Visit every vertex that can be reached from `roots`, once each, parents first.

    It is depth first and in the order given by `next_vertices`, which may add connections that the
    graph itself lacks. Cycles end where they meet themselves; depth is not limited by Python's stack.
    """
    seen: set[V] = set()
    for root in roots:
        stack = [root]
        while stack:
            vertex = stack.pop()
            if vertex in seen:
                continue
            seen.add(vertex)
            visit(vertex)
            stack.extend(reversed(list(next_vertices(vertex))))

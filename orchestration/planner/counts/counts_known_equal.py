"""Streams that are known to have equally many partitions, while it is decided what has to move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


class EqualCounts:
    """Sets of streams with one count each, which may be open still (None)."""

    def __init__(self, counts: Mapping[str, int | None]) -> None:
        self._parent = {node: node for node in counts}
        self._count = dict(counts)
        self._inputs: dict[str, Sequence[str]] = {}

    def add(self, node: str, count: int | None) -> None:
        """Take in another stream."""
        self._parent[node], self._count[node] = node, count

    def note(self, operator: str, streams: Sequence[str]) -> None:
        """Take in that an operator has these streams at its inputs, for one that brings them together."""
        self._inputs[operator] = streams

    def most(self, nodes: Iterable[str]) -> int | None:
        """Return the count that most of these have, the earliest on a tie; None where all are open."""
        known = Counter(count for node in nodes for count in self._counts(node))
        return known.most_common(1)[0][0] if known else None

    def differs(self, node: str, target: int | None) -> str:
        """Return in words what other count a stream has, "" where it has or can get this one."""
        other = sorted(self._counts(node) - {target})
        if target is None or not other:
            return ""
        return f"it has {' and '.join(map(str, other))} partitions"

    def join(self, nodes: Sequence[str], count: int | None) -> None:
        """Hold streams together: whatever one of them gets, the others have."""
        roots = list(dict.fromkeys(self._root(leaf) for node in nodes for leaf in self._leaves(node)))
        for root in roots:
            self._parent[root] = roots[0]
        if roots and count is not None:
            self._count[roots[0]] = count
        for node in nodes:
            if node not in self._parent:  # what brings streams together has their count from here on
                self._parent[node] = roots[0]

    def _counts(self, node: str) -> set[int]:
        known = {self._count[self._root(leaf)] for leaf in self._leaves(node)}
        return {count for count in known if count is not None}

    def _leaves(self, node: str) -> list[str]:
        """Return the streams that are together in `node`, itself where that is one."""
        leaves: dict[str, None] = {}
        waiting, seen = [node], set()
        while waiting:
            node = waiting.pop()
            if node in self._parent:
                leaves[node] = None
            elif node not in seen:
                seen.add(node)
                waiting.extend(self._inputs[node])
        return list(leaves)

    def _root(self, node: str) -> str:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

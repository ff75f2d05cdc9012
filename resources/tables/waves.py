"""Waves: few requests, each of one kind, of many entries of several kinds, keeping each key's order. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import TypeVar

L = TypeVar("L", bound=Hashable)


def in_waves(lanes: Sequence[L], keys: Sequence[Hashable]) -> list[tuple[L, Sequence[int]]]:
    """The places of the entries by wave, in the order in which waves take effect; a wave has one lane.

    An entry is in a later wave than its key's entries before it, or in the same one behind them. So puts and deletes
    that alternate between keys make two waves, and one key's put, delete and put make three.
    """
    if not lanes:
        return []
    first = lanes[0]
    if all(lane == first for lane in lanes):
        return [(first, range(len(keys)))]
    waves: list[tuple[L, list[int]]] = []
    of_lane: dict[L, list[int]] = {}
    last: dict[Hashable, int] = {}
    for place, (lane, key) in enumerate(zip(lanes, keys, strict=True)):
        before = last.get(key, -1)
        if before >= 0 and waves[before][0] == lane:
            waves[before][1].append(place)
            continue
        mine = of_lane.setdefault(lane, [])
        later = bisect_right(mine, before)
        if later == len(mine):
            mine.append(len(waves))
            waves.append((lane, []))
        wave = mine[later]
        waves[wave][1].append(place)
        last[key] = wave
    return list(waves)

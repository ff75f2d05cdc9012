"""Which runs of a segment are merged next. Pure.

Runs of about one size, which lie beside each other, become one when there are eight: an entry is written anew once for
each power of eight that the segment has grown by, and a segment has few runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from dagster_adjunct.resources.key_value_backends.object_runs.segment_pointer import Levels, RunRef

_FAN = 8
_SMALLEST = 128 * 1024  # bytes: all runs below are of one class


def size_class(run: RunRef) -> int:
    """Return 0 for runs as they are flushed, 1 for those about eight times as large, …"""
    found, bound = 0, _SMALLEST
    while run.size > bound:
        found, bound = found + 1, bound * _FAN
    return found


def plan_merge(levels: Levels, now: int) -> tuple[RunRef, ...]:
    """Return the runs to merge into one, oldest first, or none. `now` in milliseconds.

    What another process has claimed is left alone, and so is what is older than that.
    """
    claimed = {run for claim in levels.claims if claim.until > now for run in claim.of}
    free = [*takewhile(lambda run: run.id not in claimed, reversed(levels.runs))]
    for largest in range(max(map(size_class, free), default=-1) + 1):
        newest = _up_to(largest, free)
        if sum(size_class(run) == largest for run in newest) >= _FAN:
            return tuple(reversed(newest))
    return ()


def _up_to(largest: int, newest: Sequence[RunRef]) -> list[RunRef]:
    """Return those before the first one of a higher class."""
    return [*takewhile(lambda run: size_class(run) <= largest, newest)]

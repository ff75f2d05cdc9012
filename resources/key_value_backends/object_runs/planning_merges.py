"""Which runs of a segment are merged next. Pure.

Runs of about one size, which lie beside each other, become one when there are eight: an entry is written anew once for
each power of eight that the segment has grown by, and a segment has few runs.
"""

from __future__ import annotations

from itertools import groupby

from dagster_adjunct.resources.key_value_backends.object_runs.segment_pointer import Levels, RunRef

_FAN = 8
_SMALLEST = 128 * 1024  # bytes: all runs below are of one class
_MOST = 1000  # the class of what is claimed


def size_class(run: RunRef) -> int:
    """Return 0 for runs as they are flushed, 1 for those about eight times as large, …"""
    number, bound = 0, _SMALLEST
    while run.size > bound:
        number, bound = number + 1, bound * _FAN
    return number


def plan_merge(levels: Levels, now: int) -> tuple[RunRef, ...]:
    """Return the runs to merge into one, oldest first, or none: the smallest first. `now` in milliseconds.

    What another process has claimed is left alone.
    """
    claimed = {run for claim in levels.claims if claim.until > now for run in claim.of}
    classes = {run.id: size_class(run) for run in levels.runs if run.id not in claimed}
    for largest in sorted({*classes.values()}):
        for is_small, neighbours in groupby(levels.runs, lambda run: classes.get(run.id, _MOST) <= largest):  # noqa: B023
            group = tuple(neighbours)
            if is_small and sum(classes[run.id] == largest for run in group) >= _FAN:
                return group
    return ()

"""Decides which rows of the segments' files lie in the wanted spans, with as few conditions as that takes. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dagster_adjunct.resources.streams.lake.segment_index import Span
from dagster_adjunct.resources.streams.lake.stream_manifest import Segment

_INTERVALS = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """Conditions on `__row`, which counts from a segment's base in each of its files.

    `partitions` are those whose files are wanted, None where all are. `rows` are intervals [low, high) that hold every
    wanted row, for row groups to be skipped by; empty where they would skip none. `begun` are the segments, by place,
    in which a wanted file begins before its span, and `ended` those in which one ends after it: only there need rows be
    compared with `lows` and `highs`, which stand at segment * partitions + partition.
    """

    partitions: tuple[int, ...] | None
    rows: tuple[Span, ...]
    begun: tuple[int, ...]
    ended: tuple[int, ...]
    lows: tuple[int, ...]
    highs: tuple[int, ...]


def cut_of(segments: Sequence[Segment], spans: Mapping[int, Span], partitions: int) -> Cut:
    """Return what cuts the segments' rows down to those of the spans, given as [start, end) by partition."""
    wanted = tuple(sorted(p for p, (start, end) in spans.items() if start < end))
    files = [(i, segment, file.partition) for i, segment in enumerate(segments) for file in segment.files]
    lows, highs = [0] * len(segments) * partitions, [0] * len(segments) * partitions
    begun, ended, rows, longest = set(), set(), [], 0
    for i, segment, p in files:
        if p not in wanted:
            continue
        start, end = spans[p]
        width = segment.next[p] - segment.base[p]
        low, high = max(start - segment.base[p], 0), min(end - segment.base[p], width)
        lows[i * partitions + p], highs[i * partitions + p] = low, high
        longest = max(longest, width)
        if low > 0:
            begun.add(i)
        if high < width:
            ended.add(i)
        if low < high:
            rows.append((low, high))
    intervals = _merged(rows)
    return Cut(
        None if {p for _, _, p in files} <= set(wanted) else wanted,
        () if intervals == ((0, longest),) else intervals,
        tuple(sorted(begun)),
        tuple(sorted(ended)),
        tuple(lows),
        tuple(highs),
    )


def _merged(rows: Iterable[Span]) -> tuple[Span, ...]:
    """Return what the intervals cover, as a few; as one where more would be needed."""
    merged: list[Span] = []
    for low, high in sorted(rows):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged) if len(merged) <= _INTERVALS else ((merged[0][0], merged[-1][1]),)

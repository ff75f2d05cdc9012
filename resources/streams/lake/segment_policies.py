"""Decides what retention drops and compaction merges. Pure functions over the list of segments."""

from __future__ import annotations

from collections.abc import Sequence

from dagster_adjunct.resources.streams.lake.stream_manifest import (
    CompactionPolicy,
    FileEntry,
    Retention,
    Segment,
)


def expired(segments: Sequence[Segment], retention: Retention | None, now_ms: int) -> int:
    """Return how many of the oldest segments retention drops.

    A segment's age counts from its append's commit, so that old records loaded today stay as long as new ones.
    """
    if retention is None:
        return 0
    drop = 0
    if retention.max_age is not None:
        limit = now_ms - int(retention.max_age.total_seconds() * 1000)
        while drop < len(segments) and segments[drop].appended <= limit:
            drop += 1
    if retention.max_bytes is not None:
        size = sum(segment.size for segment in segments[drop:])
        while size > retention.max_bytes:
            size -= segments[drop].size
            drop += 1
    return drop


def runs_to_merge(segments: Sequence[Segment], policy: CompactionPolicy | None) -> list[tuple[Segment, ...]]:
    """Return runs of neighbours that are worth merging into one segment each.

    A run does not begin with a segment that outweighs all others of it: otherwise the product of the last
    merge would be written again with each few appends, instead of once whenever its size has doubled.
    """
    if policy is None:
        return []
    groups: list[list[Segment]] = [[]]
    size = 0
    for segment in segments:
        small = 2 * segment.size < policy.target_bytes
        if not small or size + segment.size > policy.target_bytes:
            groups.append([])
            size = 0
        if small:
            groups[-1].append(segment)
            size += segment.size
    runs = []
    for group in groups:
        rest = sum(segment.size for segment in group)
        begin = 0
        while begin < len(group) and 2 * group[begin].size > rest:
            rest -= group[begin].size
            begin += 1
        if len(group) - begin >= policy.min_segments:
            runs.append(tuple(group[begin:]))
    return runs


def merged(run: Sequence[Segment], attempt: str, files: tuple[FileEntry, ...], number: int) -> Segment:
    """Return the segment that stands for a run: the same offsets and markers, one file a partition."""
    return Segment(
        id=number,
        attempt=attempt,
        base=run[0].base,
        next=run[-1].next,
        appended=run[-1].appended,
        files=files,
        markers=tuple(marker for segment in run for marker in segment.markers),
        positioned=all(segment.positioned for segment in run if segment.files),
        chained=any(segment.chained for segment in run),
    )

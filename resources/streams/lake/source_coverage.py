"""What a stream knows of the ranges that its records were made of, and which results a later reading replaced. No I/O.

An application's batch reads ranges of its input, each in an epoch, and appends what it makes of them. A range that was
read in a higher epoch replaces all results of lower ones at its offsets, also where it has none itself: so ranges are
kept, not only the positions of records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from dagster_adjunct.resources.stored_documents import StoredDocument
from dagster_adjunct.resources.streams.interface.source_ranges import SourceRange, Sources

Count = Annotated[int, Field(ge=0)]


class Replayed(NamedTuple):
    """Offsets [start, end) of a source partition that were read in `epoch`, the highest so far, above 0."""

    start: Count
    end: Count
    epoch: Count


class Coverage(StoredDocument):
    """What one reader has read of one source partition: up to `until` at most, and `replayed` in order of offsets."""

    until: Count = 0
    replayed: tuple[Replayed, ...] = ()


Read = Mapping[str, Mapping[str, Coverage]]
"""By reader and source partition."""


class Superseded(NamedTuple):
    """Results of a reader, made of offsets [start, end) of a source partition in epochs below `epoch`."""

    reader: str
    source: str
    start: int
    end: int
    epoch: int


def with_sources(read: Read, sources: Sources | None) -> dict[str, dict[str, Coverage]]:
    """Return what was read after one more append."""
    after = {reader: dict(partitions) for reader, partitions in read.items()}
    if sources is None:
        return after
    mine = after.setdefault(sources.reader, {})
    for span in sources.ranges:
        if span.start >= span.end:
            continue
        before = mine.get(span.source, Coverage())
        replayed = _with_range(before.replayed, span) if span.epoch else before.replayed
        mine[span.source] = Coverage(until=max(before.until, span.end), replayed=replayed)
    return after


def superseded(read: Read) -> list[Superseded]:
    """Return whose results of which ranges are replaced, in order."""
    return [
        Superseded(reader, source, *span)
        for reader, partitions in sorted(read.items())
        for source, coverage in sorted(partitions.items())
        for span in coverage.replayed
    ]


def replaced_since(before: Read, now: Read) -> list[Superseded]:
    """Return the ranges that had been read already when `before` was known and that were read again since."""
    ranges = []
    for span in superseded(now):
        known = before.get(span.reader, {}).get(span.source, Coverage())
        for start, end, epoch in pieces(known.replayed, span.start, min(span.end, known.until)):
            if span.epoch > epoch:
                ranges.append(span._replace(start=start, end=end))
    return ranges


def _with_range(replayed: Sequence[Replayed], span: SourceRange) -> tuple[Replayed, ...]:
    outside = [
        piece
        for known in replayed
        for piece in (known._replace(end=min(known.end, span.start)), known._replace(start=max(known.start, span.end)))
        if piece.start < piece.end
    ]
    inside = [
        Replayed(start, end, max(epoch, span.epoch)) for start, end, epoch in pieces(replayed, span.start, span.end)
    ]
    return _joined(sorted({*outside, *inside}))


def pieces(replayed: Sequence[Replayed], start: int, end: int) -> Iterator[Replayed]:
    """Yield [start, end) in pieces of one epoch each; 0 where none is known."""
    at = start
    for known in replayed:
        if known.end <= at or known.start >= end:
            continue
        if at < known.start:
            yield Replayed(at, known.start, 0)
        yield Replayed(max(at, known.start), min(known.end, end), known.epoch)
        at = min(known.end, end)
    if at < end:
        yield Replayed(at, end, 0)


def _joined(spans: Iterable[Replayed]) -> tuple[Replayed, ...]:
    joined: list[Replayed] = []
    for span in spans:
        if joined and joined[-1].end == span.start and joined[-1].epoch == span.epoch:
            joined[-1] = joined[-1]._replace(end=span.end)
        else:
            joined.append(span)
    return tuple(joined)

"""Decides what an append does to a stream's manifest: offsets, markers, producers. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dagster_adjunct.resources.errors import CommitConflictError, ConfigurationError
from dagster_adjunct.resources.streams.interface.source_ranges import Sources
from dagster_adjunct.resources.streams.interface.stream_system import AppendResult
from dagster_adjunct.resources.streams.lake.producers import check_same, known, remembered, result_of
from dagster_adjunct.resources.streams.lake.segment_index import Fold, folded
from dagster_adjunct.resources.streams.lake.source_coverage import with_sources
from dagster_adjunct.resources.streams.lake.stream_manifest import (
    FileEntry,
    MarkerEntry,
    Segment,
    Sent,
    StreamState,
)


@dataclass(frozen=True, slots=True)
class NewMarker:
    """A marker to put after an append's records, into these partitions.

    `rows` is by partition; "delivered" is how many records stand between the partition's marker before (or its first
    offset) and this one. None is the same, of a producer that says nothing: such a marker may come again alone.
    `valid_from` is in microseconds.
    """

    version: str
    partitions: tuple[int, ...]
    rows: Mapping[int, int] | str | None = None
    checksum: str | None = None
    valid_from: int | None = None

    def content(self) -> list[object]:
        rows = sorted(self.rows.items()) if isinstance(self.rows, Mapping) else self.rows
        validity = [] if self.valid_from is None else [self.valid_from]
        return [self.version, list(self.partitions), rows, self.checksum, *validity]


@dataclass(frozen=True, slots=True)
class Append:
    """One append whose files are written: `attempt` is their folder, begun at `started` (ms).

    `seen` is the identity of the stream that they were written for, `columns` the place of the columns in them.
    `sources` is what its records were made of, None where the producer does not say; `chained` as in `Segment`.
    """

    stream: str
    producer: str
    sequence: int
    digest: str
    attempt: str
    started: int
    files: tuple[FileEntry, ...] = ()
    marker: NewMarker | None = None
    seen: str = ""
    columns: int = 0
    sources: Sources | None = None
    chained: bool = False
    fold: Fold | None = field(default=None, compare=False)


def decide_append(state: StreamState, append: Append, now_ms: int) -> tuple[StreamState | None, AppendResult]:
    """Return the state after the append, or None for one that is in already, and its result.

    Raises ProducerConflictError, and CommitConflictError when the files were collected meanwhile.
    """
    what = f"sequence {append.sequence} of producer {append.producer!r} in stream {append.stream!r}"
    if state.id != append.seen:
        raise CommitConflictError(
            f"{what}: the stream was made anew while its records were written.",
            "Nothing was added. Append again, if the records belong into the new one.",
            stream=f"lake.{append.stream}",
        )
    before = known(state.producers, append.producer, append.sequence, append.stream)
    if before is not None:
        check_same(before, append.digest, state.producers, stream=append.stream, producer=append.producer)
        return None, result_of(before, duplicate=True)
    if append.files and append.started < state.horizon:
        raise CommitConflictError(
            f"{what}: its files were written by an attempt begun {(state.horizon - append.started) / 1000:.0f} s "
            "before the stream's horizon, so they may be collected already.",
            "Nothing was added. Append again; if it happens at once again, set this machine's clock.",
            stream=f"lake.{append.stream}",
        )
    state = folded(state, append.fold)
    appended = max(now_ms, state.appended)  # a clock that lags must not put segments out of order
    segment = _segment(state, append, appended)
    sent = Sent(append.sequence, append.digest, segment.base, segment.next, segment.rows, append.columns)
    marked = list(state.marked_until)
    for marker in segment.markers:
        marked[marker.partition] = marker.offset + 1
    update: dict[str, object] = {
        "next": segment.next,
        "marked_until": tuple(marked),
        "producers": remembered(state.producers, append.producer, sent),
        "appended": appended,
        "read": with_sources(state.read, append.sources),
    }
    if segment.next != segment.base:  # an append of nothing leaves only its sequence behind
        update |= {"tail": (*state.tail, segment), "next_segment": state.next_segment + 1}
    return state.model_copy(update=update), result_of(sent, duplicate=False)


def _segment(state: StreamState, append: Append, appended: int) -> Segment:
    offsets = list(state.next)
    for file in append.files:
        offsets[file.partition] += file.rows
    markers = []
    if append.marker:
        for partition in append.marker.partitions:
            offset = offsets[partition]
            marker = append.marker
            rows = _marker_rows(marker, partition, offset - state.marked_until[partition])
            facts = (marker.checksum, marker.rows is None, marker.valid_from)
            markers.append(MarkerEntry(partition, offset, marker.version, rows, *facts))
            offsets[partition] += 1
    return Segment(
        id=state.next_segment,
        attempt=append.attempt,
        base=state.next,
        next=tuple(offsets),
        appended=appended,
        files=append.files,
        markers=tuple(markers),
        positioned=append.sources is not None,
        chained=append.chained,
    )


def _marker_rows(marker: NewMarker, partition: int, delivered: int) -> int:
    if marker.rows is None or marker.rows == "delivered":
        return delivered
    if isinstance(marker.rows, str) or partition not in marker.rows:
        raise ConfigurationError(
            f"marker {marker.version!r} has no row count for partition {partition}.",
            "Give a count for every partition that gets the marker, or none at all.",
            argument="rows",
        )
    return marker.rows[partition]

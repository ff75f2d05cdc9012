"""Repartitions a stream in one commit: every record once, each key's records in their order.

Records stay between the same two end-of-dataset markers, so that versions stay complete. Offsets
start again, and the stream gets a new identity. Its manifest stores where the old partitions ended
and where the new ones continue, so that a reader that was at the end can continue.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from dagster_adjunct.resources.bucketing.files import BucketLayout, conform_to_layout
from dagster_adjunct.resources.bucketing.hashing import assign_buckets, parse_records_checksum
from dagster_adjunct.resources.bucketing.writer import ROW, BucketFileWriter, WriteOptions
from dagster_adjunct.resources.common import argument_error
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.lazy_modules import np, pa
from dagster_adjunct.resources.objects.commit_log import retry_conflicts
from dagster_adjunct.resources.streams.lake import manifest
from dagster_adjunct.resources.streams.lake.maintenance import (
    check_row_count,
    find_position_columns,
    iter_file_rows,
)
from dagster_adjunct.resources.streams.lake.manifest import (
    DroppedKey,
    FileEntry,
    LakeStreamDeclaration,
    MarkerEntry,
    RepartitionRecord,
    Segment,
    StreamFiles,
    StreamState,
)
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import EPOCH, TIMESTAMP, time_from_micros

_MAX_ATTEMPTS = 10
Ranges = tuple[tuple[int, int], ...]
WrittenFiles = tuple[str, tuple[FileEntry, ...]]
"""The name of the folder with the files of one step (`Segment.attempt`), and the files."""


@dataclass(frozen=True, slots=True)
class RewriteStep:
    """The rows of a segment that lie between two versions' markers: [low, high) by old
    partition, from its base.
    """

    segment: Segment
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class MarkerBarrier:
    """A version's markers, one in each old partition, as one entry of the plan.

    `miscounted` is how many records the markers' counts differ by from those in the partitions,
    summed up; None if a marker has no count. `appended` (ms since the epoch) and `valid_from` (us)
    are times.
    """

    version: str
    checksum: str | None
    miscounted: int | None
    appended: int
    valid_from: int | None = None


def plan_rewrite(
    stream: str, segments: Sequence[Segment], partitions: int
) -> list[RewriteStep | MarkerBarrier]:
    """Return the segments' rows and markers in the order in which to rewrite them. No I/O.

    `partitions` is the old number of partitions. Raises ConfigurationError for markers that differ
    between partitions, or contain checksums of records.
    """
    marked: list[list[tuple[MarkerEntry, int]]] = [[] for _ in range(partitions)]
    for segment in segments:
        for marker in segment.markers:
            marked[marker.partition].append((marker, segment.appended))
    _check_markers(stream, [[marker for marker, _ in in_partition] for in_partition in marked])
    result: list[RewriteStep | MarkerBarrier] = []
    starts = [0] * partitions
    for index in range(len(marked[0]) + 1):
        last = index == len(marked[0])
        ends = [segments[-1].next[p] if last and segments else 0 for p in range(partitions)]
        if not last:
            ends = [marked[p][index][0].offset for p in range(partitions)]
        counts = [0] * partitions
        for segment in segments:
            ranges = tuple(
                (
                    max(starts[p] - segment.base[p], 0),
                    min(ends[p], segment.next[p]) - segment.base[p],
                )
                for p in range(partitions)
            )
            filled = {file.partition for file in segment.files}
            for p, (low, high) in enumerate(ranges):
                counts[p] += max(high - low, 0)
            if any(low < high for p, (low, high) in enumerate(ranges) if p in filled):
                result.append(RewriteStep(segment, ranges))
        if not last:
            markers = [in_partition[index][0] for in_partition in marked]
            given = [marker.rows for marker in markers]
            miscounted = sum(
                abs(rows - count)
                for rows, count in zip(given, counts, strict=True)
                if rows is not None
            )
            appended = max(in_partition[index][1] for in_partition in marked)
            first = markers[0]
            wrong = None if None in given else miscounted
            valid_from = next(
                (marker.valid_from for marker in markers if marker.valid_from is not None), None
            )
            result.append(MarkerBarrier(first.version, first.checksum, wrong, appended, valid_from))
            starts = [end + 1 for end in ends]
    return result


def _check_markers(stream: str, marked: Sequence[Sequence[MarkerEntry]]) -> None:
    def error(reason: str, next_step: str) -> ConfigurationError:
        problem = f"stream {stream!r} can't be repartitioned now: {reason}."
        return ConfigurationError(problem, next_step, stream=f"lake.{stream}")

    sequences = [[marker.version for marker in in_partition] for in_partition in marked]
    for p, versions in enumerate(sequences):
        if versions != sequences[0]:
            raise error(
                f"partition 0 has the markers of {', '.join(sequences[0]) or 'no version'}, but"
                f" partition {p} those of {', '.join(versions) or 'no version'}. Expected the same"
                " markers in all partitions",
                "Append the missing markers (append_markers), or let retention drop these records.",
            )
    for markers in zip(*marked, strict=True):
        of_version = f"the markers of version {markers[0].version!r} have"
        checksums = [parse_records_checksum(marker.checksum) for marker in markers]
        if any(checksums) or len({marker.checksum for marker in markers}) > 1:
            problem = (
                f"{of_version} checksums of the records in each partition, which would not match"
                " other partitions"
            )
            raise error(
                problem,
                "Let retention drop the version first, or deliver it into a stream of another"
                " name.",
            )
        times = {
            marker.valid_from: marker.partition
            for marker in markers
            if marker.valid_from is not None
        }
        if len(times) > 1:
            listed = ", ".join(
                f"{time_from_micros(time)} in partition {p}" for time, p in sorted(times.items())
            )
            step = (
                "Let retention drop the version first, or deliver it with one time into a stream of"
                " another name."
            )
            raise error(
                f"{of_version} different valid_from times ({listed}). Expected one time", step
            )


def repartition(
    streams: LakeStreams,
    stream: str,
    partitions: int,
    *,
    reason: str,
    by: str,
    check: Callable[[StreamState], None],
) -> StreamState:
    """Repartition the stream and return its new state. Concurrent appends are rewritten too.

    `check` is called twice in each attempt, before the rewriting and before the commit, and may
    raise to prevent it. A crash leaves the stream unchanged, and files that `maintain` deletes.
    Raises ConfigurationError for what can't be repartitioned, such as a stream without key, and
    CommitConflictError if appends do not stop.
    """
    written: dict[tuple[int, Ranges], WrittenFiles] = {}

    def rewrite_and_commit() -> StreamState:
        commit, state = streams.state(stream)
        old, steps = plan_repartitioning(streams, stream, state, partitions)
        declaration = state.declaration.model_copy(update={"partitions": partitions})
        pages = streams.files_of(stream)
        check(state)
        # Write files from before the horizon again: maintenance may have deleted them, as no index
        # lists them yet.
        for collected in [
            key for key, (attempt, _) in written.items() if int(attempt[:13]) < state.horizon
        ]:
            del written[collected]
        for step in steps:
            if isinstance(step, RewriteStep) and (step.segment.id, step.ranges) not in written:
                piece = _write_step(streams, stream, state.declaration, declaration, step)
                written[step.segment.id, step.ranges] = piece
        after = _build_state(streams, state, declaration, steps, written, reason)
        replaced = [segment.folder(pages.prefix) for segment in old if segment.files]
        replaced += sorted(manifest.list_page_keys(state, pages))
        at = streams.now_ms()
        after = manifest.rebuild_index(after, after.tail, pages)
        after = after.model_copy(
            update={"dropped": (*state.dropped, *(DroppedKey(key, at) for key in replaced))}
        )
        check(state)  # again, since writing takes a while
        streams.log(stream).commit(commit, after.body(), by=by)
        return after

    return retry_conflicts(lambda: rewrite_and_commit, attempts=_MAX_ATTEMPTS)


def plan_repartitioning(
    streams: LakeStreams, stream: str, state: StreamState, partitions: int
) -> tuple[list[Segment], list[RewriteStep | MarkerBarrier]]:
    """Return the stream's segments and the plan for rewriting them.

    Raises ConfigurationError for what can't be repartitioned.
    """
    stored = state.declaration
    what = f"stream {stream!r}"
    about = {"stream": f"lake.{stream}"}
    if not stored.key:
        step = "Declare a stream with a key under another name, and append its records there."
        raise ConfigurationError(
            f"{what} has no key, so it can only have one partition.", step, **about
        )
    if partitions == stored.partitions or not 1 <= partitions <= 100_000:
        found = f"{what} has {stored.partitions} partitions, and can't have {partitions}"
        raise argument_error(
            found, "another number from 1 to 100,000", argument="partitions", **about
        )
    segments = manifest.list_segments(state, streams.files_of(stream))
    return segments, plan_rewrite(stream, segments, stored.partitions)


def _write_step(
    streams: LakeStreams,
    stream: str,
    old: LakeStreamDeclaration,
    new: LakeStreamDeclaration,
    cut: RewriteStep,
) -> WrittenFiles:
    """Write the rows of a step to the new partitions, ordered by old partition and row."""
    stored = streams.files_of(stream)
    prefix = stored.prefix
    attempt = f"{streams.now_ms():013d}-{uuid.uuid4().hex[:12]}"
    folder = manifest.data_folder(prefix, attempt)
    options = WriteOptions(prefix, number_rows=True, range_of=TIMESTAMP)
    hidden = (EPOCH, *find_position_columns(stored, [cut.segment]))
    before = old.layout_of(hidden)
    layout = new.layout_of(hidden)
    writers: dict[int, BucketFileWriter] = {}
    expected = 0
    try:
        for file in cut.segment.files:
            low, high = cut.ranges[file.partition]
            expected += max(high - low, 0)
            for rows in (
                _read_rows(stored, before, cut.segment, file, low, high) if low < high else ()
            ):
                numbers = assign_buckets([rows.column(name) for name in new.key], new.partitions)
                for bucket in np.unique(numbers).tolist():
                    if bucket not in writers:
                        writers[bucket] = BucketFileWriter(
                            stored.store, folder, bucket, layout, options
                        )
                    writers[bucket].write(rows.take(np.nonzero(numbers == bucket)[0]))
        done = [
            made for _, writer in sorted(writers.items()) if (made := writer.finish()) is not None
        ]
    finally:
        for writer in writers.values():
            writer.discard()
    what = f"repartitioning of segment {cut.segment.id}"
    check_row_count(prefix, what, sum(file.rows for file in done), expected)
    return attempt, tuple(FileEntry.of(file) for file in done)


def _read_rows(
    stored: StreamFiles,
    layout: BucketLayout,
    segment: Segment,
    file: FileEntry,
    low: int,
    high: int,
) -> Iterator[pa.Table]:
    """Yield the file's rows [low, high) with the stream's current columns and hidden ones, but
    without `__row`.
    """
    for table in iter_file_rows(stored, segment, file, layout):
        first, last = np.searchsorted(table.column(ROW).to_numpy(), [low, high])
        yield conform_to_layout(table.slice(first, last - first), layout).drop_columns([ROW])


def _build_state(
    streams: LakeStreams,
    state: StreamState,
    declaration: LakeStreamDeclaration,
    steps: Iterable[RewriteStep | MarkerBarrier],
    written: dict[tuple[int, Ranges], WrittenFiles],
    reason: str,
) -> StreamState:
    """Return the state after the repartitioning, with all segments in `tail`."""
    n = declaration.partitions
    # Offsets from 0 would mean that no record was ever dropped (`StreamInfo.has_all_keys`).
    first = 1 if any(state.oldest) else 0
    at = (first,) * n
    whole = all(old <= marked for old, marked in zip(state.oldest, state.marked_until, strict=True))
    marked = at if whole else (0,) * n
    segments: list[Segment] = []
    counted = [0] * n
    for step in steps:
        base = at
        number = len(segments)
        if isinstance(step, RewriteStep):
            attempt, files = written[step.segment.id, step.ranges]
            rows = {file.partition: file.rows for file in files}
            at = tuple(offset + rows.get(p, 0) for p, offset in enumerate(base))
            counted = [count + rows.get(p, 0) for p, count in enumerate(counted)]
            update = {
                "id": number,
                "attempt": attempt,
                "base": base,
                "next": at,
                "files": files,
                "markers": (),
            }
            segment = step.segment.model_copy(update=update)
        else:
            if step.miscounted is not None:
                counted[0] += step.miscounted  # an incomplete version stays incomplete
            row_counts = counted if step.miscounted is not None else [None] * n
            facts = (step.checksum, False, step.valid_from)
            markers = tuple(
                MarkerEntry(p, base[p], step.version, row_counts[p], *facts) for p in range(n)
            )
            at = marked = tuple(offset + 1 for offset in base)
            counted = [0] * n
            times = {"attempt": f"{streams.now_ms():013d}", "appended": step.appended}
            segment = Segment(
                id=number, base=base, next=at, markers=markers, positioned=True, **times
            )
        segments.append(segment)
    producers = {
        # A retried append is still found, but without offsets: those in the new partitions are not
        # known.
        name: tuple(
            sent._replace(
                first=(), next=(), partitions=sent.partitions or state.declaration.partitions
            )
            for sent in window
        )
        for name, window in state.producers.items()
    }
    rewritten = RepartitionRecord(
        id=state.id,
        ended=state.next,
        next=at,
        at=streams.now_ms(),
        reason=reason,
        oldest=state.oldest,
    )
    before = (*state.rewritten_before, *((state.rewritten,) if state.rewritten else ()))
    after = {
        "declaration": declaration,
        "id": uuid.uuid4().hex,
        "oldest": (first,) * n,
        "next": at,
        "marked_until": marked,
        "tail": tuple(segments),
        "levels": (),
        "producers": producers,
        "next_segment": len(segments),
        "rewritten": rewritten,
        "rewritten_before": before,
    }
    return state.model_copy(update=after)

"""Repartitions a stream in one commit: every record once, each key's records in their order.

Records stay between the same two end-of-dataset markers, so that versions stay complete. Offsets
start again, and the stream gets a new identity. Its manifest stores where the old partitions ended
and where the new ones continue, so that a reader that was at the end can continue.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import le, sub
from typing import NamedTuple

from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.bucketing.files import BucketLayout, conform_to_layout
from dagster_adjunct.resources.bucketing.hashing import assign_buckets, parse_records_checksum
from dagster_adjunct.resources.bucketing.writer import ROW, BucketFileWriter, WriteOptions
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
    SegmentIndex,
    SentSequence,
    Span,
    StreamFiles,
    StreamState,
)
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import EPOCH, TIMESTAMP, time_from_micros

_MAX_ATTEMPTS = 10


class WrittenFiles(NamedTuple):
    """The files of one step, and the name of their folder (`Segment.attempt`)."""

    attempt: str
    files: tuple[FileEntry, ...]


class StepKey(NamedTuple):
    """What identifies a step in another attempt."""

    segment_id: int
    ranges: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class RewriteStep:
    """The rows of a segment that are between two versions' markers: [low, high) by old
    partition, from its base; without rows in a partition, high is at most low.
    """

    segment: Segment
    ranges: tuple[Span, ...]

    @property
    def key(self) -> StepKey:
        """What identifies the step in another attempt."""
        return StepKey(self.segment.id, self.ranges)


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
    marked: list[list[MarkerEntry]] = [[] for _ in range(partitions)]  # by partition, in order
    # By place of a version's markers in their partitions, when the last of them was appended.
    appended: dict[int, int] = {}
    for segment in segments:
        for marker in segment.markers:
            in_partition = marked[marker.partition]
            appended[len(in_partition)] = segment.appended
            in_partition.append(marker)
    _check_same_versions(stream, marked)
    result: list[RewriteStep | MarkerBarrier] = []
    starts = [0] * partitions
    for index, markers in enumerate(zip(*marked, strict=True)):
        _check_checksums(stream, markers)
        valid_from = _find_valid_from(stream, markers)
        ends = [marker.offset for marker in markers]
        planned = _plan_steps(segments, starts, ends)
        result += planned.steps
        barrier = MarkerBarrier(
            version=markers[0].version,
            checksum=markers[0].checksum,
            miscounted=_count_differences(markers, planned.counts),
            appended=appended[index],
            valid_from=valid_from,
        )
        result.append(barrier)
        starts = [end + 1 for end in ends]
    if segments:
        result += _plan_steps(segments, starts, segments[-1].next).steps
    return result


class _PlannedSteps(NamedTuple):
    """Steps, and how many offsets they rewrite, by old partition."""

    steps: list[RewriteStep]
    counts: list[int]


def _plan_steps(
    segments: Sequence[Segment], starts: Sequence[int], ends: Sequence[int]
) -> _PlannedSteps:
    """Return the steps for the rows at [start, end) of each old partition."""
    steps = []
    counts = [0] * len(starts)
    for segment in segments:
        ranges = []
        has_rows = False
        for p, start in enumerate(starts):
            low = max(start - segment.base[p], 0)
            high = min(ends[p], segment.next[p]) - segment.base[p]
            ranges.append(Span(low, high))
            if low < high:  # between the markers of two versions, each offset is a record
                counts[p] += high - low
                has_rows = True
        if has_rows:
            steps.append(RewriteStep(segment, tuple(ranges)))
    return _PlannedSteps(steps, counts)


def _count_differences(markers: Iterable[MarkerEntry], counts: Iterable[int]) -> int | None:
    """Return how many records the markers' counts differ by from these, summed up; None if a marker
    has no count.
    """
    difference = 0
    for marker, count in zip(markers, counts, strict=True):
        if marker.rows is None:
            return None
        difference += abs(marker.rows - count)
    return difference


def _check_same_versions(stream: str, marked: Sequence[Sequence[MarkerEntry]]) -> None:
    """Raise ConfigurationError unless all partitions have markers of the same versions, in the same
    order.
    """
    expected = [marker.version for marker in marked[0]]
    for p, markers in enumerate(marked):
        versions = [marker.version for marker in markers]
        if versions != expected:
            raise _not_repartitionable_error(
                stream,
                f"partition 0 has the markers of {', '.join(expected) or 'no version'}, but"
                f" partition {p} those of {', '.join(versions) or 'no version'}. Expected the same"
                " markers in all partitions",
                "Append the missing markers (append_markers), or let retention drop these records.",
            )


def _check_checksums(stream: str, markers: Sequence[MarkerEntry]) -> None:
    """Raise ConfigurationError for a version whose markers have checksums of the records in each
    partition.
    """
    checksums = {marker.checksum for marker in markers}
    if len(checksums) > 1 or any(map(parse_records_checksum, checksums)):
        raise _not_repartitionable_error(
            stream,
            f"the markers of version {markers[0].version!r} have checksums of the records in each"
            " partition, which would not match other partitions",
            "Let retention drop the version first, or deliver it into a stream of another name.",
        )


def _find_valid_from(stream: str, markers: Sequence[MarkerEntry]) -> int | None:
    """Return the time from which the version of these markers is valid, None without one. Raises
    ConfigurationError if the markers differ in it.
    """
    partition_of: dict[int, int] = {}  # by time
    for marker in markers:
        if marker.valid_from is not None:
            partition_of[marker.valid_from] = marker.partition
    if len(partition_of) > 1:
        listed = ", ".join(
            f"{time_from_micros(time)} in partition {partition}"
            for time, partition in sorted(partition_of.items())
        )
        raise _not_repartitionable_error(
            stream,
            f"the markers of version {markers[0].version!r} have different valid_from times"
            f" ({listed}). Expected one time",
            "Let retention drop the version first, or deliver it with one time into a stream of"
            " another name.",
        )
    return next(iter(partition_of), None)


def _not_repartitionable_error(stream: str, reason: str, next_step: str) -> ConfigurationError:
    problem = f"stream {stream!r} can't be repartitioned now: {reason}."
    return ConfigurationError(problem, next_step, stream=f"lake.{stream}")


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
    written: dict[StepKey, WrittenFiles] = {}

    def is_written(step: RewriteStep, horizon: int) -> bool:
        """Return whether an earlier attempt has written a step, whose files still exist."""
        files = written.get(step.key)
        if files is None:
            return False
        # Maintenance may have deleted files from before the horizon, as no index lists them yet.
        return (manifest.find_attempt_start(files.attempt) or 0) >= horizon

    def rewrite_and_commit() -> StreamState:
        """Rewrite what no earlier attempt has, and commit. Raises CommitConflictError."""
        commit, state = streams.state(stream)
        plan = plan_repartitioning(streams, stream, state, partitions)
        declaration = state.declaration.model_copy(update={"partitions": partitions})
        stored = streams.files_of(stream)
        check(state)
        for step in plan.steps:
            if isinstance(step, RewriteStep) and not is_written(step, state.horizon):
                written[step.key] = _write_step(streams, stream, state, declaration, step)
        after = _build_state(streams, state, declaration, plan.steps, written, reason)
        replaced = [segment.folder(stored.prefix) for segment in plan.segments if segment.files]
        replaced += sorted(manifest.list_page_keys(state, stored))
        now = streams.now_ms()
        after = manifest.rebuild_index(after, after.index.tail, stored)
        dropped = [DroppedKey(key, now) for key in replaced]
        after = after.with_index(dropped=(*state.index.dropped, *dropped))
        check(state)  # again, since writing takes a while
        streams.log(stream).commit(commit, after.body(), by=by)
        return after

    return retry_conflicts(lambda: rewrite_and_commit, attempts=_MAX_ATTEMPTS)


class RepartitionPlan(NamedTuple):
    """The segments of a stream, and the steps that rewrite them, in order."""

    segments: list[Segment]
    steps: list[RewriteStep | MarkerBarrier]


def plan_repartitioning(
    streams: LakeStreams, stream: str, state: StreamState, partitions: int
) -> RepartitionPlan:
    """Return the plan for rewriting the stream. Raises ConfigurationError for what can't be
    repartitioned.
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
    return RepartitionPlan(segments, plan_rewrite(stream, segments, stored.partitions))


def _write_step(
    streams: LakeStreams,
    stream: str,
    state: StreamState,
    new: LakeStreamDeclaration,
    step: RewriteStep,
) -> WrittenFiles:
    """Write the rows of a step to the new partitions, ordered by old partition and row. Raises
    ManifestMismatchError if they are not as many as the manifest lists.
    """
    stored = streams.files_of(stream)
    prefix = stored.prefix
    attempt = manifest.new_attempt(streams.now_ms())
    folder = manifest.data_folder(prefix, attempt)
    options = WriteOptions(prefix, number_rows=True, range_of=TIMESTAMP)
    hidden = (EPOCH, *find_position_columns(stored, [step.segment]))
    before = state.declaration.layout_of(hidden)
    layout = new.layout_of(hidden)
    writers: dict[int, BucketFileWriter] = {}
    written: list[FileEntry] = []
    try:
        for rows in _read_rows(stored, before, step):
            key_values = [rows.column(name) for name in layout.bucket_by]
            buckets = assign_buckets(key_values, new.partitions)
            for bucket in np.unique(buckets).tolist():
                if bucket not in writers:
                    writers[bucket] = BucketFileWriter(
                        stored.store, folder, bucket, layout, options
                    )
                writers[bucket].write(rows.take(np.nonzero(buckets == bucket)[0]))
        for _, writer in sorted(writers.items()):
            finished = writer.finish()
            if finished is not None:  # else its partition got no row
                written.append(FileEntry.of(finished))
    finally:
        for writer in writers.values():
            writer.discard()
    expected = 0
    for file in step.segment.files:
        low, high = step.ranges[file.partition]
        expected += max(high - low, 0)
    what = f"repartitioning of segment {step.segment.id}"
    check_row_count(prefix, what, sum(file.rows for file in written), expected)
    return WrittenFiles(attempt, tuple(written))


def _read_rows(stored: StreamFiles, layout: BucketLayout, step: RewriteStep) -> Iterator[pa.Table]:
    """Yield the step's rows with the stream's current columns and hidden ones, but without
    `__row`.
    """
    for file in step.segment.files:
        low, high = step.ranges[file.partition]
        if low >= high:
            continue
        for table in iter_file_rows(stored, step.segment, file, layout):
            first, last = np.searchsorted(table.column(ROW).to_numpy(), [low, high])
            yield conform_to_layout(table.slice(first, last - first), layout).drop_columns([ROW])


def _build_state(
    streams: LakeStreams,
    state: StreamState,
    declaration: LakeStreamDeclaration,
    steps: Iterable[RewriteStep | MarkerBarrier],
    written: Mapping[StepKey, WrittenFiles],
    reason: str,
) -> StreamState:
    """Return the state after the repartitioning, with all segments in `tail`."""
    partitions = declaration.partitions
    now = streams.now_ms()
    # Offsets from 0 would mean that no record was ever dropped (`StreamInfo.has_all_keys`).
    oldest = (int(any(state.oldest)),) * partitions
    # Retention may have dropped records of the version that has no marker yet. Its marker then
    # counts from 0, one more than there are, so that the version stays incomplete. It is whole if
    # no partition begins after its last marker.
    is_whole = all(map(le, state.oldest, state.marked_until))
    if is_whole:
        marked = oldest
    else:
        marked = (0,) * partitions
    upcoming = oldest
    version_begins = oldest
    segments: list[Segment] = []
    for step in steps:
        number = len(segments)
        if isinstance(step, RewriteStep):
            segment = _rewritten_segment(step, number, upcoming, written[step.key])
        else:
            counted = list(map(sub, upcoming, version_begins))
            segment = _marker_segment(step, number, upcoming, counted, now)
            marked = segment.next
            version_begins = segment.next
        upcoming = segment.next
        segments.append(segment)
    rewritten = RepartitionRecord(
        id=state.id, ended=state.next, next=upcoming, at=now, reason=reason, oldest=state.oldest
    )
    after = {
        "declaration": declaration,
        "id": uuid.uuid4().hex,
        "oldest": oldest,
        "next": upcoming,
        "marked_until": marked,
        "index": SegmentIndex(tail=tuple(segments), next_segment=len(segments)),
        "producers": _forget_offsets(state),
        "rewritings": (*state.rewritings, rewritten),
    }
    return state.model_copy(update=after)


def _rewritten_segment(
    step: RewriteStep, number: int, base: tuple[int, ...], written: WrittenFiles
) -> Segment:
    """Return the segment of the new partitions, from the offsets `base`, with the files of a
    step.
    """
    after = list(base)
    for file in written.files:
        after[file.partition] += file.rows
    update = {
        "id": number,
        "attempt": written.attempt,
        "base": base,
        "next": tuple(after),
        "files": written.files,
        "markers": (),
    }
    return step.segment.model_copy(update=update)


def _marker_segment(
    barrier: MarkerBarrier, number: int, base: tuple[int, ...], counted: Sequence[int], now_ms: int
) -> Segment:
    """Return the segment with a version's markers, one at the offset `base` of each new partition.

    `counted` are the version's records by partition. If the old markers counted others, so does the
    one of partition 0: a version that was incomplete stays incomplete.
    """
    markers = []
    for partition, offset in enumerate(base):
        rows: int | None = None
        if barrier.miscounted is not None:
            rows = counted[partition]
            if partition == 0:
                rows += barrier.miscounted
        marker = MarkerEntry(
            partition,
            offset,
            barrier.version,
            rows,
            barrier.checksum,
            counted=False,
            valid_from=barrier.valid_from,
        )
        markers.append(marker)
    return Segment(
        id=number,
        attempt=f"{now_ms:013d}",
        base=base,
        next=tuple(offset + 1 for offset in base),
        appended=barrier.appended,
        markers=tuple(markers),
        positioned=True,
    )


def _forget_offsets(state: StreamState) -> dict[str, tuple[SentSequence, ...]]:
    """Return the stream's producers without the offsets of their appends.

    A retried append is still found, but where its records are in the new partitions is not known.
    """
    producers = {}
    for name, window in state.producers.items():
        sent = []
        for each in window:
            partitions = each.partitions or state.declaration.partitions
            sent.append(each._replace(first=(), next=(), partitions=partitions))
        producers[name] = tuple(sent)
    return producers

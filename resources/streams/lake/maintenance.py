"""Maintenance of a stream: retention, compaction, deletion of unreachable objects, and holds that
prevent it.

One commit drops and merges segments. It also sets the horizon: attempts begun before it can no
longer commit, so their files may be deleted. Files that leave the index are kept for the grace
period, for their readers.

A hold keeps the data files of one commit for a user outside the lake, its holder, such as a table
in another catalogue:

    streams/NAME/holds/{hash of the holder}-{number}.json
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import accumulate, chain
from operator import attrgetter
from typing import NamedTuple

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.bucketing.files import BucketLayout, conform_to_layout
from dagster_adjunct.resources.bucketing.writer import (
    ROW,
    BucketFileWriter,
    WriteOptions,
    write_bucket_file,
)
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.objects.commit_log import retry_conflicts
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import ObjectInfo, delete_holds, holder_prefix
from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.streams.lake import key_index, manifest
from dagster_adjunct.resources.streams.lake.key_index import StoredKey
from dagster_adjunct.resources.streams.lake.manifest import (
    CompactionPolicy,
    DroppedKey,
    FileEntry,
    IndexEntry,
    LakeStreamDeclaration,
    Leaf,
    MarkerEntry,
    Retention,
    Segment,
    StreamFiles,
    StreamState,
    StreamStates,
)
from dagster_adjunct.resources.streams.lake.read import open_segment_file
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    POSITION,
    SOURCE,
    TIMESTAMP,
    time_from_micros,
)


def retain_files(
    lake: Lake, stream: str, identity: str, number: str, attempts: Iterable[str], *, holder: str
) -> None:
    """Prevent the deletion of a commit's data files (the folders `attempts`), until
    `release_files`.

    `identity` is the stream's, `number` the commit's number, as text. Idempotent. Raises
    OffsetOutOfRangeError if the folders are no longer in the stream's index, and so may be deleted
    soon.
    """
    wanted = sorted(set(attempts))
    body = json.dumps({"holder": holder, "attempts": wanted}).encode()
    key = f"{_holder_prefix(lake, stream, holder)}{number}.json"
    if _renew_hold(lake, key, body):
        return  # an earlier call has already retained them
    lake.store.put(key, body)
    # From now on, maintenance finds the hold before it deletes files that it has dropped from the
    # index. So check the index only now.
    streams = StreamStates(lake)
    _, state = streams.state(stream)
    listed = {
        segment.attempt for segment in manifest.list_segments(state, streams.files_of(stream))
    }
    missing = [attempt for attempt in wanted if attempt not in listed]
    if missing or state.id != identity:
        lake.store.delete(key)
        problem = (
            f"stream {stream!r} has changed since its commit {number}: {len(missing)} of"
            f" {len(wanted)} folders of files are no longer in its index."
        )
        step = "Take a new view of the stream (stream_view), and retry."
        raise errors.OffsetOutOfRangeError(problem, step, stream=f"lake.{stream}")


def _renew_hold(lake: Lake, key: str, body: bytes) -> bool:
    """Write a hold again, so that it is not released as an old one; return False if there is no
    such hold.
    """
    with suppress(errors.ObjectNotFoundError, errors.PreconditionFailedError):
        held = lake.store.get(key)
        if held.data == body:
            lake.store.put_if_match(key, body, held.etag)
            return True
    return False


def release_files(
    lake: Lake, stream: str, *, holder: str, keep: Callable[[], Collection[str]] | None = None
) -> tuple[str, ...]:
    """Delete this holder's holds, except those of the commits that `keep` returns; return the
    commit numbers of the deleted ones.

    With `keep`, the newest holds stay too (see `delete_holds`).
    """
    return delete_holds(lake.store, _holder_prefix(lake, stream, holder), keep=keep)


def list_retained_attempts(lake: Lake, stream: str) -> dict[str, list[str]]:
    """Return the folders of data files that are on hold, by holder. Raises
    MalformedDocumentError.
    """
    attempts_of: dict[str, set[str]] = defaultdict(set)
    for item in lake.store.list(f"{lake.stream_prefix(stream)}/holds/"):
        try:
            body = json.loads(lake.store.get(item.key).data)
            attempts_of[body["holder"]].update(body["attempts"])
        except (ValueError, KeyError, TypeError) as error:
            problem = (
                f"the hold {item.key!r} in {lake.url} can't be read ({error!r}), so its files are"
                " not known."
            )
            step = "Restore it, or delete it and register the stream again with its holder."
            raise errors.MalformedDocumentError(problem, step, document=item.key) from error
    return {holder: sorted(attempts) for holder, attempts in attempts_of.items()}


def _holder_prefix(lake: Lake, stream: str, holder: str) -> str:
    return holder_prefix(f"{lake.stream_prefix(stream)}/holds/", holder)


def merge_files(
    stored: StreamFiles, declaration: LakeStreamDeclaration, run: Sequence[Segment], attempt: str
) -> Segment:
    """Write the records of consecutive segments into one file per partition; return the segment
    that replaces them.

    Rows are read by row group, so memory does not grow with the size of the `run`. Records without
    a timestamp get the time of their append, which the merged segment no longer knows. All files
    get the stream's current columns.
    """
    prefix = stored.prefix
    options = WriteOptions(prefix, range_of=TIMESTAMP)
    layout = declaration.layout_of((EPOCH, *find_position_columns(stored, run)))
    folder = manifest.data_folder(prefix, attempt)
    parts: dict[int, list[_StoredFile]] = defaultdict(list)  # by partition
    markers: list[MarkerEntry] = []
    positioned = True
    for segment in run:
        markers += segment.markers
        if segment.files:  # markers alone need no positions
            positioned &= segment.positioned
        for file in segment.files:
            parts[file.partition].append(_StoredFile(segment, file))
    files: list[FileEntry] = []
    for partition, merged in sorted(parts.items()):
        writer = BucketFileWriter(stored.store, folder, partition, layout, options)
        merged_file = write_bucket_file(writer, _iter_merged_rows(stored, layout, merged, run[0]))
        if merged_file is None:  # there was no row
            written = 0
        else:
            written = merged_file.rows
            files.append(FileEntry.of(merged_file))
        expected = sum(each.file.rows for each in merged)
        check_row_count(prefix, f"compaction of partition {partition}", written, expected)
    return Segment(
        id=0,  # assigned by the commit
        attempt=attempt,
        base=run[0].base,
        next=run[-1].next,
        appended=run[-1].appended,
        files=tuple(files),
        markers=tuple(markers),
        positioned=positioned,
        chained=any(segment.chained for segment in run),
    )


class _StoredFile(NamedTuple):
    """A file, and the segment that it belongs to."""

    segment: Segment
    file: FileEntry


def _iter_merged_rows(
    stored: StreamFiles, layout: BucketLayout, merged: Iterable[_StoredFile], first: Segment
) -> Iterator[pa.Table]:
    """Yield the rows of files of one partition as rows of a segment that begins at the base of the
    `first` one.
    """
    for segment, file in merged:
        for rows in iter_file_rows(stored, segment, file, layout):
            yield conform_to_layout(_rebase_rows(rows, segment, file.partition, first), layout)


def find_position_columns(stored: StreamFiles, run: Sequence[Segment]) -> tuple[str, ...]:
    """Return the columns of POSITION if a file of these segments has them, else (). May open the
    files.

    A segment that was merged from some with positions and some without has the columns, but is not
    `positioned`.
    """
    with_files = [segment for segment in run if segment.files]
    if any(segment.positioned for segment in with_files):
        return tuple(POSITION)
    for segment in with_files:
        for file in segment.files:
            if SOURCE in open_segment_file(stored, segment, file).column_names:
                return tuple(POSITION)
    return ()


def iter_file_rows(
    stored: StreamFiles, segment: Segment, file: FileEntry, layout: BucketLayout
) -> Iterator[pa.Table]:
    """Yield a file's rows by row group, under stored names; hidden columns of the layout that the
    file lacks are null.
    """
    parquet = open_segment_file(stored, segment, file)
    for group in range(parquet.metadata.num_row_groups):
        table = parquet.read_row_group(group)
        for name, kind in layout.hidden:
            if name not in table.column_names:
                table = table.append_column(name, pa.nulls(table.num_rows, arrow_type(kind)))
        yield table


def _rebase_rows(table: pa.Table, segment: Segment, partition: int, first: Segment) -> pa.Table:
    """Return rows of a segment as rows of one that begins at the base of the `first` segment.

    Their `__row` counts from there, and records without a timestamp get the time of their append.
    """
    shift = segment.base[partition] - first.base[partition]
    when = pa.scalar(segment.appended * 1000, pa.timestamp("us", tz="UTC"))
    table = table.set_column(table.column_names.index(ROW), ROW, pc.add(table.column(ROW), shift))
    times = pc.fill_null(table.column(TIMESTAMP), when)
    return table.set_column(table.column_names.index(TIMESTAMP), TIMESTAMP, times)


def check_row_count(prefix: str, what: str, written: int, expected: int) -> None:
    """Raise ManifestMismatchError if `what` ("compaction of …") did not write as many records as
    the manifest lists.
    """
    if written != expected:
        problem = f"{prefix}: {what} wrote {written} records, the manifest lists {expected}."
        step = (
            "Nothing was committed, and the stream is unchanged. Report this with the stream's"
            " manifest."
        )
        raise errors.ManifestMismatchError(problem, step, key=prefix)


def count_expired(
    segments: Sequence[Segment],
    retention: Retention | None,
    now_ms: int,
    stored_ms: Callable[[Segment], int | None],
) -> int:
    """Return how many of the oldest segments retention drops.

    A segment's age begins with the commit of its append, so that old records loaded today stay as
    long as new ones. If the clock of a writer was ahead, its commit and those after it may have
    times in the future: the age of such a segment is that of its files, by the store's clock.
    `stored_ms` returns when a segment's files were stored (ms since the epoch), None for a segment
    without files, which is dropped together with the next one.
    """
    if retention is None:
        return 0
    drop = 0
    if retention.max_age is not None:
        limit = now_ms - int(retention.max_age.total_seconds() * 1000)
        for count, segment in enumerate(segments, start=1):
            begin: int | None
            if segment.appended > now_ms:
                begin = stored_ms(segment)
            else:
                begin = segment.appended
            if begin is None:
                continue
            if begin > limit:
                break
            drop = count
    if retention.max_bytes is not None:
        # The sizes of the newest segment, of the two newest, and so on.
        sizes = [*accumulate(segment.size for segment in reversed(segments))]
        drop = max(drop, len(segments) - bisect_right(sizes, retention.max_bytes))
    return drop


def _stored_ms(stored: StreamFiles, segment: Segment) -> int | None:
    """Return when a segment's files were stored, in ms since the epoch by the store's clock; None
    if it has none, or they are missing.
    """
    if not segment.files:
        return None
    info = stored.store.head(segment.key_of(stored.prefix, segment.files[0]))
    if info is None:
        return None
    return int(info.modified.timestamp() * 1000)


def plan_merges(
    segments: Sequence[Segment], policy: CompactionPolicy | None
) -> list[tuple[Segment, ...]]:
    """Return the runs of consecutive segments that the policy merges, each into one segment.

    A run does not begin with a segment that is larger than the rest of the run. Otherwise the
    result of the last merge would be rewritten after every few appends, instead of once the new
    segments are as large.
    """
    if policy is None:
        return []
    groups: list[list[Segment]] = [[]]
    size = 0
    for segment in segments:
        is_small = 2 * segment.size < policy.target_bytes
        has_room = size + segment.size <= policy.target_bytes
        if not is_small or not has_room:
            groups.append([])
            size = 0
        if is_small:
            groups[-1].append(segment)
            size += segment.size
    runs = []
    for group in groups:
        run = _without_large_beginning(group)
        if len(run) >= policy.min_segments:
            runs.append(run)
    return runs


def _without_large_beginning(group: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return the segments from the first one on that is not larger than all after it together."""
    size = sum(segment.size for segment in group)
    for begin, segment in enumerate(group):
        if 2 * segment.size <= size:
            return tuple(group[begin:])
        size -= segment.size
    return ()


_GRACE = timedelta(hours=1)
_ATTEMPTS = 20
_MANIFESTS_KEPT = 100


@dataclass(frozen=True, slots=True)
class MaintenanceResult:
    """The result of a maintenance.

    Retention dropped `dropped_…`, compaction merged `merged_segments` segments into `merged_into`;
    `deleted_…` are the unreachable objects that were deleted. `indexes` were written, one for each
    segment and key of `find_by` without one.
    """

    dropped_segments: int = 0
    dropped_rows: int = 0
    dropped_bytes: int = 0
    merged_segments: int = 0
    merged_into: int = 0
    deleted_objects: int = 0
    deleted_bytes: int = 0
    indexes: int = 0


class _Merge(NamedTuple):
    """Segments, and the one into which they were merged."""

    run: tuple[Segment, ...]
    into: Segment


class _Plan(NamedTuple):
    """The stream's next state (None: unchanged), the segments that retention drops, and the
    merges that were used.
    """

    state: StreamState | None
    dropped: tuple[Segment, ...] = ()
    merges: tuple[_Merge, ...] = ()


class _Committed(NamedTuple):
    """A plan that was committed, and the stream's state since then."""

    plan: _Plan
    after: StreamState


def maintain(streams: StreamStates, stream: str, now: datetime) -> MaintenanceResult:
    """Apply the stream's policies, delete objects that have been unreachable for the grace period,
    and write the indexes that are missing.
    """
    result = _apply_policies(streams, stream, now)
    return replace(result, indexes=_write_indexes(streams, stream))


def _write_indexes(streams: StreamStates, stream: str) -> int:
    """Write an index for each segment of many records, and key of `find_by`, that has none; return
    how many.
    """
    _, state = streams.state(stream)
    files = streams.files_of(stream)
    keys = _keys_to_find(state.declaration)
    if not keys:
        return 0
    there = {item.key for item in streams.lake.store.list(f"{files.prefix}/data/")}
    written = 0
    for segment in manifest.list_segments(state, files):
        if segment.rows < key_index.FEWEST_RECORDS:
            continue
        for key in keys:
            if key_index.index_key(files, segment, key) not in there:
                key_index.write_index(files, segment, key)
                written += 1
    return written


def _keys_to_find(declaration: LakeStreamDeclaration) -> list[StoredKey]:
    """Return the keys by which records are indexed."""
    return [StoredKey.of(names, declaration, "the stream") for names in declaration.find_by or ()]


def _apply_policies(streams: StreamStates, stream: str, now: datetime) -> MaintenanceResult:
    """Apply retention and compaction in one commit, then delete what nothing refers to."""
    now_ms = int(now.timestamp() * 1000)
    horizon = now_ms - int(_GRACE.total_seconds() * 1000)
    files = streams.files_of(stream)
    _, state = streams.state(stream)
    merges = _write_merges(streams, stream, state, files, now_ms)

    def commit_plan() -> _Committed | None:
        """Plan and commit; return None if there is nothing to do, not even to delete."""
        commit, state = streams.state(stream)
        plan = _plan_maintenance(state, files, merges, now_ms, horizon)
        plan = _drop_indexes(plan, state, files, now_ms)
        after = plan.state or state
        # The horizon is committed before anything is deleted, so that no attempt from before it
        # commits files that were deleted.
        if plan.state is None and not _find_unreachable(streams, stream, after, files, horizon):
            return None
        after = after.model_copy(update={"horizon": max(state.horizon, horizon)})
        streams.log(stream).commit(commit, after.body(), by="maintain")
        return _Committed(plan, after)

    committed = retry_conflicts(lambda: commit_plan, attempts=_ATTEMPTS)
    if committed is None:
        return MaintenanceResult()
    plan, after = committed
    objects = _find_unreachable(streams, stream, after, files, after.horizon)
    streams.lake.store.delete_many([item.key for item in objects])
    return MaintenanceResult(
        dropped_segments=len(plan.dropped),
        dropped_rows=sum(segment.rows for segment in plan.dropped),
        dropped_bytes=sum(segment.size for segment in plan.dropped),
        merged_segments=sum(len(merge.run) for merge in plan.merges),
        merged_into=len(plan.merges),
        deleted_objects=len(objects),
        deleted_bytes=sum(item.size for item in objects),
    )


def _write_merges(
    streams: StreamStates, stream: str, state: StreamState, files: StreamFiles, now_ms: int
) -> tuple[_Merge, ...]:
    """Merge the files of the segments that compaction chooses; nothing refers to the merged files
    before they are committed.
    """
    declaration = state.declaration
    segments = manifest.list_segments(state, files)
    stored_ms = partial(_stored_ms, files)
    expired = count_expired(segments, declaration.retention, now_ms, stored_ms)
    merges = []
    for run in plan_merges(segments[expired:], declaration.compaction):
        attempt = manifest.new_attempt(now_ms)
        merges.append(_Merge(run, merge_files(files, declaration, run, attempt)))
    return tuple(merges)


def _plan_maintenance(
    state: StreamState, files: StreamFiles, merges: Sequence[_Merge], now_ms: int, horizon: int
) -> _Plan:
    """Plan retention and the given merges, leaving out a merge whose inputs are no longer all in
    the index.

    Writes index pages, deletes nothing.
    """
    leaves = manifest.list_leaves(state, files)
    segments = list(chain.from_iterable(leaf.segments for leaf in leaves))
    retention = state.declaration.retention
    expired = count_expired(segments, retention, now_ms, partial(_stored_ms, files))
    used = _find_usable_merges(merges, segments[expired:], state.horizon)
    # What was dropped less than the grace period ago, and waits for its deletion.
    waiting = tuple(entry for entry in state.index.dropped if entry.at >= horizon)
    if not expired and not used:
        if waiting == state.index.dropped:
            return _Plan(None)
        return _Plan(state.with_index(dropped=waiting))
    replaced_by = _list_replacements(segments[:expired], used, state.index.next_segment)
    after = manifest.rebuild_index(state, _replace_segments(leaves, replaced_by), files)
    gone = [segment for segment in segments if segment.id in replaced_by and segment.files]
    removed = [segment.folder(files.prefix) for segment in gone]
    pages_before = manifest.list_page_keys(state, files)
    removed += sorted(pages_before - manifest.list_page_keys(after, files))
    dropped = [DroppedKey(key, now_ms) for key in removed]
    after = after.with_index(
        next_segment=state.index.next_segment + len(used), dropped=(*waiting, *dropped)
    )
    return _Plan(after, tuple(segments[:expired]), tuple(used))


def _list_replacements(
    expired: Iterable[Segment], merges: Iterable[_Merge], next_segment: int
) -> dict[int, Segment | None]:
    """Return what takes the place of each segment that leaves the index, by its id; None for
    nothing.
    """
    replaced_by: dict[int, Segment | None] = {segment.id: None for segment in expired}
    for number, merge in enumerate(merges, next_segment):
        replaced_by |= {segment.id: None for segment in merge.run}
        replaced_by[merge.run[0].id] = merge.into.model_copy(update={"id": number})
    return replaced_by


def _drop_indexes(plan: _Plan, state: StreamState, files: StreamFiles, now_ms: int) -> _Plan:
    """Return the plan with the key indexes that `find_by` no longer needs among the dropped
    objects, so that they stay for their readers as long as those.
    """
    after = plan.state or state
    known = {entry.key for entry in (*state.index.dropped, *after.index.dropped)}
    unneeded = []
    for item in files.store.list(f"{files.prefix}/data/"):
        if _is_unneeded_index(item.key, state.declaration) and item.key not in known:
            unneeded.append(DroppedKey(item.key, now_ms))
    if not unneeded:
        return plan
    return plan._replace(state=after.with_index(dropped=(*after.index.dropped, *unneeded)))


def _is_unneeded_index(key: str, declaration: LakeStreamDeclaration) -> bool:
    """Return whether an object is an index by a key that `find_by` does not have."""
    name = key.rpartition("/")[2]
    if not name.startswith(key_index.INDEX_NAME):
        return False
    return all(name != each.file_name for each in _keys_to_find(declaration))


def _find_usable_merges(
    merges: Iterable[_Merge], segments: Sequence[Segment], horizon: int
) -> list[_Merge]:
    """Return the merges whose inputs are all among the segments, and whose files still exist."""
    places = {segment.id: place for place, segment in enumerate(segments)}
    usable = []
    for merge in merges:
        started = manifest.find_attempt_start(merge.into.attempt) or 0
        if started < horizon:
            continue  # so slow that other maintenance may have deleted its files
        first = places.get(merge.run[0].id)
        if first is None:
            continue
        if tuple(segments[first : first + len(merge.run)]) == merge.run:
            usable.append(merge)
    return usable


def _replace_segments(
    leaves: Iterable[Leaf], replaced_by: Mapping[int, Segment | None]
) -> list[IndexEntry]:
    """Return the entries of the index after some segments, given by id, are replaced by others;
    None removes a segment.
    """
    kept: list[IndexEntry] = []
    for leaf in leaves:
        if replaced_by.keys().isdisjoint(segment.id for segment in leaf.segments):
            kept.append(leaf.entry)
            continue
        for segment in leaf.segments:
            instead = replaced_by.get(segment.id, segment)
            if instead is not None:
                kept.append(instead)
    return kept


def _find_unreachable(
    streams: StreamStates, stream: str, state: StreamState, files: StreamFiles, horizon: int
) -> list[ObjectInfo]:
    """Return the stream's objects that nothing refers to and that are older than the horizon.

    `horizon` is in ms since the epoch. Objects that left the index less than the grace period ago,
    and those on hold, are still in use. Includes old manifests.
    """
    store = streams.lake.store
    prefix = streams.lake.stream_prefix(stream)
    # Keys of objects, and folders of data files.
    reached = {entry.key for entry in state.index.dropped}
    reached |= manifest.list_page_keys(state, files)
    reached |= {segment.folder(prefix) for segment in manifest.list_segments(state, files)}
    for attempts in list_retained_attempts(streams.lake, stream).values():
        reached |= {manifest.data_folder(prefix, attempt) for attempt in attempts}

    unreached = _find_unreached_data(files, state.declaration, reached, horizon)
    for item in store.list(f"{prefix}/pages/"):
        is_old = item.modified.timestamp() * 1000 < horizon
        if is_old and item.key not in reached:
            unreached.append(item)
    horizon_time = time_from_micros(horizon * 1000)
    unreached += streams.log(stream).list_old_manifests(horizon_time)
    return unreached + _find_old_reader_manifests(streams.lake, stream)


def _find_unreached_data(
    files: StreamFiles, declaration: LakeStreamDeclaration, reached: Collection[str], horizon: int
) -> list[ObjectInfo]:
    """Return the files of old folders that are not reached, and the key indexes that are neither
    needed nor reached themselves.
    """
    unreached = []
    for item in files.store.list(f"{files.prefix}/data/"):
        attempt = item.key.removeprefix(f"{files.prefix}/data/").split("/")[0]
        started = manifest.find_attempt_start(attempt)
        is_old = started is not None and started < horizon
        is_left = is_old and manifest.data_folder(files.prefix, attempt) not in reached
        is_unneeded = _is_unneeded_index(item.key, declaration) and item.key not in reached
        if is_left or is_unneeded:
            unreached.append(item)
    return unreached


def _find_old_reader_manifests(lake: Lake, stream: str) -> list[ObjectInfo]:
    """Return all manifests of named readers except each reader's newest 100 (_MANIFESTS_KEPT)."""
    by_reader: dict[str, list[ObjectInfo]] = {}
    for item in lake.store.list(f"{lake.stream_prefix(stream)}/readers/"):
        folder, _, name = item.key.rpartition("/manifests/")
        if folder and name:
            by_reader.setdefault(folder, []).append(item)
    old = []
    for manifests in by_reader.values():
        manifests.sort(key=attrgetter("key"))
        old += manifests[:-_MANIFESTS_KEPT]
    return old

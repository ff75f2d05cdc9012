"""Keeps a stream in shape: retention, compaction, and collection of what nothing reaches any more.

One commit drops and merges. It also sets the horizon: attempts begun before it can't commit any more, so what
they left behind may be deleted. What the index dropped stays for the grace period, for those who still read it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.resources.objects.commit_log import retry_conflicts
from dagster_adjunct.resources.streams.lake.file_holds import held_attempts
from dagster_adjunct.resources.streams.lake.merge_segments import merge_files
from dagster_adjunct.resources.streams.lake.segment_index import (
    Pages,
    all_segments,
    leaves,
    page_keys,
    rebuilt,
)
from dagster_adjunct.resources.streams.lake.segment_policies import expired, merged, runs_to_merge
from dagster_adjunct.resources.streams.lake.stream_manifest import (
    Dropped,
    Entry,
    FileEntry,
    Segment,
    StreamState,
    data_folder,
)

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.commit_log import Commit
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.lake.stream_states import StreamStates

_GRACE = timedelta(hours=1)
_ATTEMPTS = 20
_MANIFESTS_KEPT = 100


@dataclass(frozen=True, slots=True)
class Maintained:
    """What one maintenance did. `dropped` counts segments, records and bytes that retention took."""

    dropped_segments: int = 0
    dropped_rows: int = 0
    dropped_bytes: int = 0
    merged_segments: int = 0
    merged_into: int = 0
    deleted_objects: int = 0
    deleted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Merge:
    run: tuple[Segment, ...]
    attempt: str
    files: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The next state (None: as it is), and what it means."""

    state: StreamState | None
    dropped: tuple[Segment, ...]
    merges: tuple[_Merge, ...]


def maintain(streams: StreamStates, stream: str, now: datetime) -> Maintained:
    """Apply the stream's policies and delete what is out of reach for longer than an append may take."""
    now_ms = int(now.timestamp() * 1000)
    horizon = now_ms - int(_GRACE.total_seconds() * 1000)
    pages = streams.pages_of(stream)
    _, state = streams.state(stream)
    merges = _write_merges(streams, stream, state, pages, now_ms)

    def commit_plan() -> tuple[_Plan, Commit, StreamState] | None:
        commit, state = streams.state(stream)
        plan = _plan(state, pages, merges, now_ms, horizon)
        garbage = bool(_out_of_reach(streams, stream, commit, plan.state or state, pages, horizon))
        if plan.state is None and not garbage:
            return None
        after = (plan.state or state).model_copy(update={"horizon": max(state.horizon, horizon)})
        return plan, streams.log(stream).commit(commit, after.body(), by="maintain"), after

    committed = retry_conflicts(lambda: commit_plan, attempts=_ATTEMPTS)
    if committed is None:
        return Maintained()
    plan, commit, after = committed
    objects = _out_of_reach(streams, stream, commit, after, pages, after.horizon)
    streams.lake.store.delete_many([key for key, _ in objects])
    return Maintained(
        dropped_segments=len(plan.dropped),
        dropped_rows=sum(segment.rows for segment in plan.dropped),
        dropped_bytes=sum(segment.size for segment in plan.dropped),
        merged_segments=sum(len(merge.run) for merge in plan.merges),
        merged_into=len(plan.merges),
        deleted_objects=len(objects),
        deleted_bytes=sum(size for _, size in objects),
    )


def _write_merges(
    streams: StreamStates, stream: str, state: StreamState, pages: Pages, now_ms: int
) -> tuple[_Merge, ...]:
    declaration = state.declaration
    segments = all_segments(state, pages)
    alive = segments[expired(segments, declaration.retention, now_ms) :]
    prefix, store = streams.lake.stream_prefix(stream), streams.lake.store
    merges = []
    for run in runs_to_merge(alive, declaration.compaction):
        attempt = f"{now_ms:013d}-{uuid.uuid4().hex[:12]}"
        merges.append(_Merge(run, attempt, merge_files(store, prefix, declaration, run, attempt)))
    return tuple(merges)


def _plan(state: StreamState, pages: Pages, merges: Sequence[_Merge], now_ms: int, horizon: int) -> _Plan:
    """Decide the next state from the current one; a merge whose inputs are not all there any more is left out."""
    held = leaves(state, pages)
    segments = [segment for _, inside in held for segment in inside]
    position = {segment.id: at for at, segment in enumerate(segments)}
    drop = expired(segments, state.declaration.retention, now_ms)
    number = state.next_segment
    replaced: dict[int, Segment | None] = {segment.id: None for segment in segments[:drop]}
    used = []
    for merge in merges:
        at = position.get(merge.run[0].id)
        lost = int(merge.attempt[:13]) < state.horizon  # a slow merge, whose files may be collected already
        if lost or at is None or at < drop or tuple(segments[at : at + len(merge.run)]) != merge.run:
            continue
        replaced |= dict.fromkeys((segment.id for segment in merge.run), None)
        replaced[merge.run[0].id] = merged(merge.run, merge.attempt, merge.files, number)
        number += 1
        used.append(merge)
    forgotten = tuple(entry for entry in state.dropped if entry.at >= horizon)
    if not replaced:
        if forgotten == state.dropped:
            return _Plan(None, (), ())
        return _Plan(state.model_copy(update={"dropped": forgotten}), (), ())
    kept: list[Entry] = []
    for entry, inside in held:
        if not any(segment.id in replaced for segment in inside):
            kept.append(entry)
            continue
        new = [replaced.get(segment.id, segment) for segment in inside]
        kept += [segment for segment in new if segment is not None]
    before = page_keys(state, pages)
    after = rebuilt(state, kept, pages)
    gone = [segment.folder(pages.prefix) for segment in segments if segment.id in replaced and segment.files]
    gone += sorted(before - page_keys(after, pages))
    after = after.model_copy(
        update={
            "next_segment": number,
            "dropped": (*forgotten, *(Dropped(key, now_ms) for key in gone)),
        }
    )
    return _Plan(after, tuple(segments[:drop]), tuple(used))


def _out_of_reach(
    streams: StreamStates, stream: str, commit: Commit, state: StreamState, pages: Pages, horizon: int
) -> list[tuple[str, int]]:
    """Return (key, size) of the objects that the state does not reach and that are older than the horizon."""
    store, prefix = streams.lake.store, streams.lake.stream_prefix(stream)
    waiting = {entry.key for entry in state.dropped}
    reached = {segment.folder(prefix) for segment in all_segments(state, pages)} | waiting
    for attempts in held_attempts(streams.lake, stream).values():
        reached |= {data_folder(prefix, attempt) for attempt in attempts}
    unreached = []
    for item in store.list(f"{prefix}/data/"):
        attempt = item.key.removeprefix(f"{prefix}/data/").split("/")[0]
        started = attempt[:13]
        if started.isdecimal() and int(started) < horizon and data_folder(prefix, attempt) not in reached:
            unreached.append((item.key, item.size))
    listed = page_keys(state, pages) | waiting
    for item in store.list(f"{prefix}/pages/"):
        if item.key not in listed and item.modified.timestamp() * 1000 < horizon:
            unreached.append((item.key, item.size))
    for item in store.list(f"{prefix}/manifests/"):
        number = item.key.rsplit("/", 1)[-1][:12]
        old = number.isdecimal() and int(number) <= commit.number - _MANIFESTS_KEPT
        if old and item.modified.timestamp() * 1000 < horizon:
            unreached.append((item.key, item.size))
    return unreached + _old_positions(streams.lake, stream, _MANIFESTS_KEPT)


def _old_positions(lake: Lake, stream: str, kept: int) -> list[tuple[str, int]]:
    """Return (key, size) of the manifests of readers before the newest `kept` of each."""
    by_reader: dict[str, list[tuple[str, int]]] = {}
    for item in lake.store.list(f"{lake.stream_prefix(stream)}/readers/"):
        folder, _, name = item.key.rpartition("/manifests/")
        if folder and name:
            by_reader.setdefault(folder, []).append((item.key, item.size))
    return [manifest for manifests in by_reader.values() for manifest in sorted(manifests)[:-kept]]

"""A segment in objects: reading its pointer and runs, and its upkeep, which writes the log as a
run and merges runs.
"""

from __future__ import annotations

import io
import logging
import threading
import time
import uuid
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.key_value import segment
from dagster_adjunct.resources.key_value.segment import KeyRange, StoredEntry, StoredPage, TableId
from dagster_adjunct.resources.key_value_backends.objects.pointer import (
    DroppedRun,
    Levels,
    MergeClaim,
    PointerObject,
    SegmentState,
    Status,
    columns_from_log,
    find_tokens,
    log_tokens,
    tokens_since,
)
from dagster_adjunct.resources.key_value_backends.objects.runs import (
    BlockCache,
    Columns,
    Hashed,
    RunIndex,
    RunObjects,
    RunRef,
    RunWriter,
    Versioned,
    WantedBlock,
    concat_columns,
    drop_removed,
    hash_key,
    may_hold,
)
from dagster_adjunct.resources.objects.store import staged_file_errors
from dagster_adjunct.resources.threads import requested_once

# Eight adjacent runs of about one size are merged into one. So an entry is rewritten once whenever
# the segment has grown eightfold, and a segment has few runs.


_FAN = 8
_SMALLEST = 128 * 1024  # bytes; all runs up to this size are of class 0


def size_class(run: RunRef) -> int:
    """Return the class of a run by its size: 0 if it is newly flushed, 1 if it is about eight
    times as large, …
    """
    number = 0
    bound = _SMALLEST
    while run.size > bound:
        number += 1
        bound *= _FAN
    return number


def plan_merge(levels: Levels, now: int) -> tuple[RunRef, ...]:
    """Return adjacent runs to merge into one, oldest first, or (); small ones are merged first.

    Runs that another process has claimed are ignored. `now` is in milliseconds since 1970.
    """
    claimed = {run for claim in levels.claims if claim.until > now for run in claim.of}
    classes = {run.id: size_class(run) for run in levels.runs if run.id not in claimed}
    for largest_class in sorted({*classes.values()}):
        for group in _adjacent_runs(levels.runs, classes, largest_class):
            if sum(classes[run.id] == largest_class for run in group) >= _FAN:
                return tuple(group)
    return ()


def _adjacent_runs(
    runs: Sequence[RunRef], classes: Mapping[str, int], largest_class: int
) -> Iterator[list[RunRef]]:
    """Yield the groups of adjacent runs whose class in `classes` is at most `largest_class`.

    Other runs, and those without a class, end a group. Some groups are empty.
    """
    group: list[RunRef] = []
    for run in runs:
        if run.id in classes and classes[run.id] <= largest_class:
            group.append(run)
        else:
            yield group
            group = []
    yield group


_WINDOW = 2_000  # entries of one run that are merged with those of other runs at a time
_PART = 4 * 1024 * 1024  # the most bytes of a run that are in a window, or fetched ahead


class SegmentView:
    """Reads one state of a segment. Raises the errors of `RunObjects`."""

    def __init__(self, state: SegmentState, objects: RunObjects) -> None:
        self.state = state
        self._objects = objects

    def find(self, keys: Iterable[bytes]) -> dict[bytes, Versioned | None]:
        """Return the version and value of each key, None for a missing one."""
        entries = {key: self.state.recent.get(key) for key in keys}
        runs = self.state.levels.runs
        sought = [
            _Search(key, hash_key(key), len(runs)) for key, entry in entries.items() if not entry
        ]
        while sought := [search for search in sought if self._next_run(search)]:
            # Fetch for each key the block in the newest run that may have it, all of them
            # concurrently.
            wanted = {}
            for search in sought:
                index = self._indexes[search.run]
                block = WantedBlock(runs[search.run], index, search.block)
                wanted[search.run, search.block] = block
            fetched = self._objects.fetch_at_once(list(wanted.values()))
            blocks = dict(zip(wanted, fetched, strict=True))
            for search in sought:
                entries[search.key] = blocks[search.run, search.block].get(search.key)
            sought = [search for search in sought if not entries[search.key]]
        return {key: None if _is_removed(entry) else entry for key, entry in entries.items()}

    def windows(self, within: KeyRange, wanted: int) -> Iterator[Columns]:
        """Yield the entries of a range, including those of removed keys, in consecutive parts
        (windows).

        `wanted` says about how many entries the caller will use: so many are fetched at a time.
        """
        runs = zip(self.state.levels.runs, self._indexes, strict=True)
        recent = columns_from_log(self.state.recent).between(within.start, within.end)
        parts = [
            RunPart(self._objects, run, index, wanted=wanted, end=within.end) for run, index in runs
        ]
        return merge_parts([*parts, recent], within)

    @requested_once
    def _indexes(self) -> list[RunIndex]:
        """The indexes of all runs, fetched on first use."""
        return self._objects.indexes(self.state.levels.runs)

    def _next_run(self, search: _Search) -> bool:
        """Move to the next older run that may have the key; return False if there is none."""
        for run in range(search.run - 1, -1, -1):
            index = self._indexes[run]
            if not may_hold(index.filter, search.hashed):
                continue
            block = index.block_of(search.key)
            if block >= 0:
                search.run = run
                search.block = block
                return True
        return False


def _is_removed(entry: Versioned | None) -> bool:
    """Whether an entry says that its key was removed."""
    if entry is None:
        return False
    _, value = entry
    return value is None


@dataclass(slots=True)
class _Search:
    """The search for a key: by their numbers, the run that was searched last, at first one after
    the newest, and the block in it that may have the key (-1: none yet).
    """

    key: bytes
    hashed: Hashed
    run: int
    block: int = -1


class RunPart:
    """Reads consecutive entries of a run; about `wanted` entries before the key `end` are
    fetched at a time.
    """

    def __init__(
        self, objects: RunObjects, run: RunRef, index: RunIndex, wanted: int, end: bytes | None
    ) -> None:
        self._objects = objects
        self._run = run
        self._index = index
        self._wanted = wanted
        self._end = end
        self._held: dict[int, Columns] = {}  # blocks by their numbers

    def reach(self, within: KeyRange) -> bytes | None:
        """Return a key up to which this run has about _WINDOW entries of a range; None means the
        end of the range.
        """
        index = self._index
        first = max(0, index.block_of(within.start))
        # Entries of the first block, which may precede the range.
        unknown = sum(index.counts[first : first + 1])
        last = self._block_after(first, unknown + _WINDOW, within.end)
        if last == len(index.firsts):
            return None
        reached = index.firsts[last]
        if within.end is not None and reached >= within.end:
            return None
        return reached

    def between(self, start: bytes, end: bytes | None) -> Columns:
        """Return the entries from `start` up to but not including `end`.

        Reads the blocks that may have some of them, and fetches blocks that follow.
        """
        firsts = self._index.firsts
        first = max(0, self._index.block_of(start))
        last = len(firsts) if end is None else bisect_left(firsts, end)
        if first >= last:
            return Columns([], [], [])
        numbers = range(first, last)
        if not self._held.keys() >= set(numbers):
            ahead = max(last, self._block_after(first, self._wanted, self._end))
            blocks = self._objects.blocks(self._run, self._index, first, ahead - 1)
            self._held = dict(enumerate(blocks, first))
        return concat_columns([self._held[number] for number in numbers]).between(start, end)

    def _block_after(self, first: int, wanted: int, end: bytes | None) -> int:
        """Return the number of the block before which there are about `wanted` entries, counted
        from block `first`.

        Stops at the key `end`, and once the blocks have _PART bytes.
        """
        index = self._index
        last = first
        counted = 0
        stop = len(index.firsts) if end is None else bisect_left(index.firsts, end, first)
        while last < stop and counted < wanted:
            if index.offsets[last] - index.offsets[first] >= _PART:
                break
            counted += index.counts[last]
            last += 1
        return last


def merge_parts(parts: Sequence[RunPart | Columns], within: KeyRange) -> Iterator[Columns]:
    """Yield the entries of all parts in key order, in windows; of entries with the same key, that
    of the last part.

    The runs are read up to the same key in each window: where the run with the most entries there
    has about _WINDOW.
    """
    start: bytes | None = within.start
    while start is not None:
        left = KeyRange(start, within.end)
        reaches = [part.reach(left) for part in parts if isinstance(part, RunPart)]
        reached = min((reach for reach in reaches if reach is not None), default=None)
        end = within.end if reached is None else reached
        sources = [part.between(start, end) for part in parts]
        yield merge_newest([source for source in sources if len(source)])
        start = reached


def merge_newest(sources: Sequence[Columns]) -> Columns:
    """Return the entries of several sources in key order; if several have a key, the entry of
    the last of them.
    """
    if not sources:
        return Columns([], [], [])
    if len(sources) == 1:
        return sources[0]
    newest: dict[bytes, Versioned] = {}
    for source in sources:
        newest.update(
            zip(source.keys, zip(source.versions, source.values, strict=True), strict=True)
        )
    return columns_from_log(newest)


T = TypeVar("T")

TOKENS_KEPT = 30 * 60 * 1000
"""Milliseconds for which tokens are kept: the horizon, and the allowed difference of two
writers' clocks.
"""
_READS = 5  # of the pointer, while a run that it names is missing
_PAGE_BYTES = 8 * 1024 * 1024  # after which a page ends early
_AHEAD = 8192  # entries to fetch at a time, at least, if a page continues the previous one
_REMEMBERED_ENDS = 16  # of pages


@dataclass(frozen=True, slots=True)
class SegmentCore:
    """Reads a segment in this process, for any thread. Methods block."""

    table: TableId
    pointer: PointerObject
    objects: RunObjects
    # Where recent pages have ended, so where the next page of their readers begins.
    _ends: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def get(self, keys: Collection[bytes], *, values: bool) -> list[StoredEntry | None]:
        """Return the entries of keys, all of one moment; None for missing keys."""
        by_key = self.read_consistently(
            lambda state: SegmentView(self.require_existing(state), self.objects).find(keys)
        )
        entries: list[StoredEntry | None] = []
        for key in keys:
            entry = by_key[key]
            if entry is None:
                entries.append(None)
            else:
                version, value = entry
                entries.append(StoredEntry(key, version, value if values else None))
        return entries

    def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage:
        """Return the first entries of a range, all of one moment; fewer than `limit` if they are
        large.
        """
        continues_page = within.start in self._ends
        self._ends.pop(within.start, None)
        wanted = max(limit, _AHEAD) if continues_page else limit
        page = self.read_consistently(
            lambda state: self._page(self.require_existing(state), within, limit, wanted, values)
        )
        if len(page.keys) == limit:
            self._ends[within.after(page.keys[-1]).start] = None
            while len(self._ends) > _REMEMBERED_ENDS:
                self._ends.popitem(last=False)
        return page

    def read_consistently(self, read: Callable[[SegmentState], T]) -> T:
        """Return what `read` returns for the current state; repeat it if a run was merged and
        deleted meanwhile. Raises MalformedDocumentError if a run is missing again and again.
        """
        with self.translate_errors():
            missing: errors.ObjectNotFoundError | None = None
            for _ in range(_READS):
                state = self.pointer.read_fresh()
                try:
                    return read(state)
                except errors.ObjectNotFoundError as error:
                    missing = error
            raise self.missing_run_error(missing)

    def require_existing(self, state: SegmentState) -> SegmentState:
        """Return this state, or raise KeyValueTableNotFoundError if the segment is deleted."""
        if state.status is Status.DELETED:
            raise self.deleted_error()
        return state

    def find_applied(
        self, state: SegmentState, tokens: Collection[bytes], oldest: int | None = None
    ) -> set[bytes]:
        """Return which of these tokens belong to requests that were applied, as far as the state
        knows.

        The log is searched, and the runs that may have the tokens: without `oldest` those with
        recent commits (TOKENS_KEPT), else those with commits from the number `oldest` on.
        """
        applied = {token for token in tokens if token in state.tokens}
        kept_since = now_in_ms() - TOKENS_KEPT
        for run in state.levels.runs:
            recent = run.newest >= kept_since if oldest is None else run.last >= oldest
            if recent and len(applied) < len(tokens):
                applied |= find_tokens(self.objects.index(run).tokens, tokens)
        return applied

    def deleted_error(self) -> errors.KeyValueTableNotFoundError:
        """Return the error for a segment that was deleted."""
        where = f"{self.pointer.key!r} in {self.pointer.store.url}"
        return segment.deleted_table_error(self.table, f"key-value table {self.table} at {where}")

    def missing_run_error(
        self, error: errors.ObjectNotFoundError | None
    ) -> errors.MalformedDocumentError:
        """Return the error for a run that is missing although the pointer names it."""
        key = self.pointer.key
        if error is not None:
            key = error.key or key
        problem = (
            f"a run that the pointer {self.pointer.key!r} in {self.pointer.store.url} names is"
            f" missing: {error}"
        )
        step = "Restore this object from a backup or an older object version."
        return errors.MalformedDocumentError(problem, step, document=key)

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Raise errors of the store in this context as those of a table."""
        try:
            yield
        except errors.ObjectNotFoundError as error:
            raise self.deleted_error() from error
        except errors.StoreUnavailableError as error:
            raise errors.TableUnavailableError(
                error.problem, error.next_step, table=str(self.table)
            ) from error
        except errors.ConfigurationError as error:
            raise errors.TableAccessError(
                error.problem, error.next_step, table=str(self.table)
            ) from error

    def _page(
        self, state: SegmentState, within: KeyRange, limit: int, wanted: int, values: bool
    ) -> StoredPage:
        """Return the first entries of a range in one state of the segment. About `wanted` entries
        are fetched at a time.

        The page ends early once its keys and values have _PAGE_BYTES.
        """
        keys: list[bytes] = []
        versions: list[bytes] = []
        stored: list[bytes | None] = []
        size = 0
        for window in SegmentView(state, self.objects).windows(within, wanted):
            entries = drop_removed(window)
            left = limit - len(keys)
            page_values = entries.values[:left] if values else [None] * min(left, len(entries))
            keys += entries.keys[:left]
            versions += entries.versions[:left]
            stored += page_values
            size += sum(map(len, entries.keys[:left])) + sum(map(len, filter(None, page_values)))
            if len(keys) >= limit or size >= _PAGE_BYTES:
                return StoredPage(keys, versions, stored)
        return StoredPage(keys, versions, stored, is_last=True)


def now_in_ms() -> int:
    """Return the time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


# Upkeep of a segment, apart from its writes: the log is flushed to a run, runs are merged, unused
# objects are deleted.
#
# The log is flushed by the process whose commit lets it grow beyond a multiple of FLUSHED_BYTES.
# This process may also claim a merge. If it dies, others take over: the flush at the next multiple,
# the merge when the claim ends. Objects that were written, but never became part of the segment,
# are found by listing all. Then a swap sets `collected`: after it, no object that was listed can
# still become part of the segment, except for claimed ones, so the unused ones are deleted.


FLUSHED_BYTES = 64 * 1024  # size of the log at which it is flushed to a run
_LONGEST_LOG = 4 * FLUSHED_BYTES  # a commit that makes the log longer writes it as a run at once
_MANY_RUNS = 64  # from which on writers merge runs themselves, and so wait
_GRACE = 60_000  # milliseconds for which merged runs are kept, because readers may still need them
_CLAIMED = 60_000  # milliseconds for which a merge is claimed, and one more for each kilobyte
_IN_MEMORY = 8 * 1024 * 1024  # bytes of a run that is written without a file
_MERGED_AT_ONCE = 20_000  # entries of each run that a merge fetches at a time
_MERGE_CACHE = 64 * 1024 * 1024  # bytes
_NO_RUN = "none"  # the id where a swap adds no run
_log = logging.getLogger("adjunct.key_value")

Change = Callable[[SegmentState], SegmentState | None]


class SegmentUpkeep:
    """Does the upkeep of a segment for this process, in a thread that ends when there is nothing
    to do.
    """

    def __init__(self, core: SegmentCore) -> None:
        self._core = core
        self._lock = threading.Condition()
        self._work = threading.Lock()  # locked by the thread that is doing upkeep
        self._asked = False
        self._alive = False

    def after_commit(self, before: SegmentState, after: SegmentState) -> None:
        """Start the upkeep that a commit of this process has made due.

        Never fails, because the commit is done.
        """
        grown = len(after.log) // FLUSHED_BYTES > len(before.log) // FLUSHED_BYTES
        spilled = after.levels.flushed == after.number
        if len(after.levels.runs) >= _MANY_RUNS:
            # In this thread, to slow down writers that add runs faster than they are merged.
            self._do(self._merge_all)
        elif grown or spilled:
            self._start()

    def spill_log(self, state: SegmentState) -> SegmentState:
        """Return this state; if its log is too long, write that as a run, and return a state
        with the run instead.
        """
        if len(state.log) <= _LONGEST_LOG:
            return state
        run = self._write_log(state)
        return state.with_levels(b"", runs=(*state.levels.runs, run), flushed=state.number)

    def finish(self) -> None:
        """Wait until the thread has ended: if the process ended before, its claim would block
        others for a while.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._alive)

    def _start(self) -> None:
        """Start the thread, or let it go on if it is running."""
        with self._lock:
            self._asked = True
            if self._alive:
                return
            self._alive = True
        try:
            threading.Thread(target=self._run, name="adjunct-key-values", daemon=True).start()
        except RuntimeError as error:  # no thread can be started
            with self._lock:
                self._mark_stopped()
            self._warn(error)

    def _run(self) -> None:
        """Do what is due until nothing more was requested; this is the thread."""
        try:
            while self._take_request():
                self._do(self._flush_and_merge)
        except BaseException:  # else `finish` would wait for ever
            with self._lock:
                self._mark_stopped()
            raise

    def _take_request(self) -> bool:
        """Return whether upkeep was requested again; if not, mark the thread as stopped."""
        with self._lock:
            asked = self._asked
            self._asked = False
            if not asked:
                self._mark_stopped()
            return asked

    def _mark_stopped(self) -> None:
        """Note that the thread ends, while `_lock` is held."""
        self._alive = False
        self._lock.notify_all()

    def _do(self, work: Callable[[], None]) -> None:
        """Call `work` alone in this process; its error is only logged."""
        with self._work:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - a full disk, no memory, a damaged run
                self._warn(error)

    def _warn(self, error: Exception) -> None:
        """Log an error of the upkeep."""
        # Other processes or later commits will do it; nothing refers to the unfinished work.
        _log.warning(
            "upkeep of %s failed: %s: %s", self._core.pointer.key, type(error).__name__, error
        )

    def _flush_and_merge(self) -> None:
        """Flush the log if it is long enough, then merge runs while there are enough."""
        self._flush()
        self._merge_all()

    def _flush(self) -> None:
        """Write the log as a run if it is long enough."""
        state = self._core.pointer.read()
        if len(state.log) < FLUSHED_BYTES or state.status is Status.DELETED:
            return
        run = self._write_log(state)

        def flushed(now: SegmentState) -> SegmentState | None:
            """Return the state with the run; None if others have flushed the log meanwhile, or have
            collected unused runs, perhaps this one.
            """
            levels = now.levels
            if (levels.flushed, levels.collected) != (state.levels.flushed, state.levels.collected):
                return None
            after = now.following(now_in_ms())
            newer = now.log[len(state.log) :]
            return after.with_levels(newer, runs=(*now.levels.runs, run), flushed=state.number)

        self._swap(flushed, run.id, lambda levels: run in levels.runs)

    def _write_log(self, state: SegmentState) -> RunRef:
        """Write the log of a state as a run, and return that."""
        facts = {"first": state.levels.flushed + 1, "last": state.number, "newest": state.time}
        return self._write_run(
            uuid.uuid4().hex, [columns_from_log(state.recent)], log_tokens(state.log), 0, facts
        )

    def _merge_all(self) -> None:
        """Merge runs while there are enough."""
        while self._merge():
            pass

    def _merge(self) -> bool:
        """Merge the runs that `plan_merge` chooses, if any; return whether it was done. Deletes
        runs that were merged some time ago and, if the merged run is large, all unused ones.
        """
        claim = MergeClaim(into=uuid.uuid4().hex, of=(), until=0)
        runs: tuple[RunRef, ...] = ()

        def claimed(state: SegmentState) -> SegmentState | None:
            """Return the state with a claim on the runs to merge; None if there are none."""
            nonlocal claim, runs
            now = now_in_ms()
            runs = plan_merge(state.levels, now)
            if not runs:
                return None
            until = now + _CLAIMED + sum(run.size for run in runs) // 1000
            claim = claim.model_copy(update={"of": tuple(run.id for run in runs), "until": until})
            others = tuple(other for other in state.levels.claims if other.until > now)
            return state.following(now).with_levels(claims=(*others, claim))

        if not self._swap(claimed, _NO_RUN, lambda levels: claim in levels.claims):
            return False
        try:
            run = self._write_merged(claim.into, runs)
        except errors.ObjectNotFoundError:
            # Merged or deleted by others while this process was suspended.
            return False
        doomed: list[str] = []

        def replaced(state: SegmentState) -> SegmentState | None:
            """Return the state with the merged run; None if the claimed runs are gone."""
            doomed.clear()
            changes = _replace_merged(state.levels, claim, run, now_in_ms())
            if changes is None:
                return None
            doomed.extend(
                gone.id for gone in state.levels.dropped if gone not in changes["dropped"]
            )
            return state.following(now_in_ms()).with_levels(**changes)

        if not self._swap(replaced, run.id, lambda levels: run in levels.runs):
            return False
        self._core.pointer.store.delete_many(self._core.objects.key(gone) for gone in doomed)
        if size_class(run) > 0:
            self._collect()
        return True

    def _write_merged(self, into: str, runs: Sequence[RunRef]) -> RunRef:
        """Write the entries of several runs, the oldest first, as one run with the id `into`, and
        return that.

        If the oldest run of the segment is among them, removed keys are omitted, because there is
        nothing left to hide. Tokens of requests are kept for TOKENS_KEPT.
        """
        objects = RunObjects(
            self._core.pointer.store, self._core.objects.prefix, BlockCache(_MERGE_CACHE)
        )
        indexes = objects.indexes(runs)
        parts = []
        for run, index in zip(runs, indexes, strict=True):
            parts.append(RunPart(objects, run, index, wanted=_MERGED_AT_ONCE, end=None))
        entries = merge_parts(parts, KeyRange())
        has_oldest = self._core.pointer.read().levels.runs[:1] == runs[:1]
        if has_oldest:
            entries = map(drop_removed, entries)
        kept_since = now_in_ms() - TOKENS_KEPT
        tokens = b""
        for run, index in zip(runs, indexes, strict=True):
            if run.newest >= kept_since:
                tokens += tokens_since(index.tokens, kept_since)
        facts = {
            "first": runs[0].first,
            "last": runs[-1].last,
            "newest": max(run.newest for run in runs),
        }
        return self._write_run(into, entries, tokens, sum(run.size for run in runs), facts)

    def _write_run(
        self,
        run: str,
        entries: Iterator[Columns] | list[Columns],
        tokens: bytes,
        size: int,
        facts: dict[str, int],
    ) -> RunRef:
        """Write a run with the id `run`, with these stored `tokens`, and return it.

        If it is estimated to have more than _IN_MEMORY bytes (`size`), it is written to a file
        first. `facts` are the fields of its `RunRef` that its content does not give.
        """
        store = self._core.pointer.store
        key = self._core.objects.key(run)

        def write(file: BinaryIO) -> RunRef:
            writer = RunWriter(file.write)
            for part in entries:
                writer.add(part)
            return RunRef(id=run, **writer.finish(tokens), **facts)

        if size <= _IN_MEMORY:
            buffer = io.BytesIO()
            ref = write(buffer)
            store.put_if_absent(key, buffer.getvalue())
            return ref
        path = Path(store.staging_dir()) / f"{run}.run"
        try:
            with staged_file_errors(store, path, f"run {run}"), path.open("wb") as file:
                ref = write(file)
            store.upload(path, key)
        finally:
            path.unlink(missing_ok=True)
        return ref

    def _collect(self) -> None:
        """Delete unused runs.

        They are listed before a swap, after which none of them can still become part of the
        segment.
        """
        pointer = self._core.pointer
        prefix = self._core.objects.key("")
        listed = {item.key.removeprefix(prefix) for item in pointer.store.list(prefix)}
        if not listed - _referenced_runs(pointer.read().levels):
            return

        def with_collected(state: SegmentState) -> SegmentState | None:
            after = state.following(now_in_ms())
            return after.with_levels(collected=after.number)

        after = self._swap(with_collected, _NO_RUN, lambda levels: False)
        if after is not None:
            spared = _referenced_runs(after.levels)
            pointer.store.delete_many(
                self._core.objects.key(run) for run in sorted(listed - spared)
            )

    def _swap(
        self, change: Change, written: str, is_in: Callable[[Levels], bool]
    ) -> SegmentState | None:
        """Swap in what `change` returns for the current state; return the state after it, None if
        nothing was changed.

        `is_in` says whether later levels contain our change; `written` is the id of the new run, if
        any. If that does not become part of the segment, it is left to `_collect`: a reply of the
        store may have been lost, and only a listing before another swap finds out for certain what
        is unused.
        """
        pointer = self._core.pointer

        def changed(state: SegmentState) -> SegmentState | None:
            """Return what `change` does; of a deleted segment, delete the new run."""
            if state.status is Status.DELETED:
                pointer.store.delete(self._core.objects.key(written))
                return None
            return change(state)

        swapped = pointer.change(changed, is_in=lambda state: is_in(state.levels))
        if swapped is None or not swapped.is_done:
            return None
        return swapped.state


def _referenced_runs(levels: Levels) -> set[str]:
    """Return the ids of all runs that are used, may still be read, or are being written under a
    claim.
    """
    runs = {run.id for run in levels.runs} | {gone.id for gone in levels.dropped}
    return runs | {claim.into for claim in levels.claims}


def _replace_merged(
    levels: Levels, claim: MergeClaim, run: RunRef, now: int
) -> dict[str, Any] | None:
    """Return the fields of levels with `run` in place of the runs of its claim; None if these
    are no longer there.
    """
    ids = tuple(other.id for other in levels.runs)
    if claim not in levels.claims or claim.of[0] not in ids:
        return None
    start = ids.index(claim.of[0])
    end = start + len(claim.of)
    if ids[start:end] != claim.of:
        return None
    return {
        "runs": (*levels.runs[:start], run, *levels.runs[end:]),
        "claims": tuple(other for other in levels.claims if other != claim),
        "dropped": (
            *(gone for gone in levels.dropped if gone.at > now - _GRACE),
            *(DroppedRun(id=gone, at=now) for gone in claim.of),
        ),
    }

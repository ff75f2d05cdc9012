"""What is done beside the writes of a segment: the log becomes a run, runs are merged, what is over is deleted.

Who crosses a boundary of the log's size with a commit flushes it; who flushes may claim a merge. If that process dies,
the next boundary and the end of the claim give the work to others. An object that was written, and that no swap made
part of the segment, is found by a listing: a swap says that one is under way, and forbids all that wrote objects
before, but for claimed ones, to make them part of the segment afterwards.
"""

from __future__ import annotations

import io
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from dagster_adjunct.resources.errors import AdjunctError, ObjectNotFoundError
from dagster_adjunct.resources.key_value.addressing import KeyRange
from dagster_adjunct.resources.key_value_backends.object_runs.commit_tokens import tokens_since
from dagster_adjunct.resources.key_value_backends.object_runs.planning_merges import plan_merge, size_class
from dagster_adjunct.resources.key_value_backends.object_runs.pointer_object import Standing
from dagster_adjunct.resources.key_value_backends.object_runs.run_blocks import Columns, without_removed
from dagster_adjunct.resources.key_value_backends.object_runs.run_format import RunWriter
from dagster_adjunct.resources.key_value_backends.object_runs.run_objects import BlockCache, RunObjects
from dagster_adjunct.resources.key_value_backends.object_runs.segment_core import TOKENS_KEPT, SegmentCore, now_in_ms
from dagster_adjunct.resources.key_value_backends.object_runs.segment_pointer import (
    DroppedRun,
    Levels,
    MergeClaim,
    RunRef,
    SegmentState,
    Status,
    columns_of,
    log_tokens,
    relogged,
)
from dagster_adjunct.resources.key_value_backends.object_runs.segment_view import StoredPart, merged
from dagster_adjunct.resources.objects.object_store import telling_of_staged

FLUSHED_BYTES = 64 * 1024  # of the log: what makes it a run
_LONGEST_LOG = 4 * FLUSHED_BYTES  # a commit beyond it flushes by itself
_MANY_RUNS = 64
_GRACE = 60_000  # milliseconds for which readers may still read what was merged away
_CLAIMED = 60_000  # milliseconds, and one more for each kilobyte
_IN_MEMORY = 8 * 1024 * 1024
_MERGED_AT_ONCE = 20_000
_MERGE_CACHE = 64 * 1024 * 1024
_NO_RUN = "none"
_log = logging.getLogger("adjunct.key_value")

Change = Callable[[SegmentState], SegmentState | None]


class SegmentUpkeep:
    """Upkeep of a segment by this process, in a thread that lives while there is something to do."""

    def __init__(self, core: SegmentCore) -> None:
        self._core = core
        self._lock = threading.Condition()
        self._work = threading.Lock()  # held by who does it
        self._asked = False
        self._alive = False

    def after_commit(self, before: Standing, after: Standing) -> None:
        """Begin what a commit of ours made due."""
        grown = len(after.state.log) // FLUSHED_BYTES > len(before.state.log) // FLUSHED_BYTES
        spilled = after.state.levels.flushed == after.state.number
        if len(after.state.levels.runs) >= _MANY_RUNS:
            self._do(self._merge_all)  # writers wait when they make runs faster than these are merged
        elif grown or spilled:
            self._begin()

    def spilled(self, state: SegmentState) -> SegmentState:
        """Return a state, which is to be swapped in, with its log as a run if it is too long."""
        if len(state.log) <= _LONGEST_LOG:
            return state
        run = self._flushed(state)
        levels = state.levels.model_copy(update={"runs": (*state.levels.runs, run), "flushed": state.number})
        return relogged(state, levels, b"")

    def finish(self) -> None:
        """Return when what was begun is done: the thread would end with the process, and leave a claim behind."""
        with self._lock:
            self._lock.wait_for(lambda: not self._alive)

    # -- the thread

    def _begin(self) -> None:
        with self._lock:
            self._asked = True
            if self._alive:
                return
            self._alive = True
        threading.Thread(target=self._live, name="adjunct-key-values", daemon=True).start()

    def _live(self) -> None:
        try:
            while self._is_asked():
                self._do(self._flush_and_merge)
        except BaseException:
            with self._lock:
                self._ended()
            raise

    def _is_asked(self) -> bool:
        """Whether there is something to do; where there is not, the thread counts as ended."""
        with self._lock:
            asked, self._asked = self._asked, False
            if not asked:
                self._ended()
            return asked

    def _ended(self) -> None:
        self._alive = False
        self._lock.notify_all()

    def _do(self, work: Callable[[], None]) -> None:
        with self._work:
            try:
                work()
            except (AdjunctError, OSError) as error:  # also where this machine has no room for what is merged
                # Others, or the next commits, do it; nothing stands on what was begun.
                _log.warning("upkeep of %s was given up: %s", self._core.pointer.key, error)

    def _flush_and_merge(self) -> None:
        self._flush()
        self._merge_all()

    # -- flushing

    def _flush(self) -> None:
        state = self._core.pointer.read().state
        if len(state.log) < FLUSHED_BYTES or state.status is Status.DELETED:
            return
        run = self._flushed(state)

        def flushed(now: SegmentState) -> SegmentState | None:
            if now.levels.flushed != state.levels.flushed or now.levels.collected != state.levels.collected:
                return None
            changed = {"runs": (*now.levels.runs, run), "flushed": state.number}
            return relogged(now.then(now_in_ms()), now.levels.model_copy(update=changed), now.log[len(state.log) :])

        self._swap(flushed, run.id, lambda levels: run in levels.runs)

    def _flushed(self, state: SegmentState) -> RunRef:
        """Write the log of a state as a run, and return it."""
        facts = {"first": state.levels.flushed + 1, "last": state.number, "newest": state.time}
        return self._written(uuid.uuid4().hex, [columns_of(state.recent)], log_tokens(state.log), 0, facts)

    # -- merging

    def _merge_all(self) -> None:
        while self._merge():
            pass

    def _merge(self) -> bool:
        """Merge what is due, if anything is."""
        claim = MergeClaim(into=uuid.uuid4().hex, of=(), until=0)
        runs: tuple[RunRef, ...] = ()

        def claimed(state: SegmentState) -> SegmentState | None:
            nonlocal claim, runs
            now = now_in_ms()
            runs = plan_merge(state.levels, now)
            if not runs:
                return None
            until = now + _CLAIMED + sum(run.size for run in runs) // 1000
            claim = claim.model_copy(update={"of": tuple(run.id for run in runs), "until": until})
            others = tuple(other for other in state.levels.claims if other.until > now)
            return relogged(state.then(now), state.levels.model_copy(update={"claims": (*others, claim)}), state.log)

        if not plan_merge(self._core.pointer.read().state.levels, now_in_ms()) or not self._swap(
            claimed, _NO_RUN, lambda levels: claim in levels.claims
        ):
            return False
        try:
            run = self._merged(claim.into, runs)
        except ObjectNotFoundError:  # merged, or deleted, by others while this process slept
            return False
        doomed: list[str] = []

        def replaced(state: SegmentState) -> SegmentState | None:
            doomed.clear()
            levels = _replaced(state.levels, claim, run, now_in_ms())
            if levels is None:
                return None
            doomed.extend(gone.id for gone in state.levels.dropped if gone not in levels.dropped)
            return relogged(state.then(now_in_ms()), levels, state.log)

        if not self._swap(replaced, run.id, lambda levels: run in levels.runs):
            return False
        self._core.pointer.store.delete_many(self._core.objects.key(gone) for gone in doomed)
        if size_class(run) > 0:
            self._collect()
        return True

    def _merged(self, into: str, runs: Sequence[RunRef]) -> RunRef:
        """Write runs as one, and return it. Where the oldest one is among them, removed keys are left out."""
        objects = RunObjects(self._core.pointer.store, self._core.objects.prefix, BlockCache(_MERGE_CACHE))
        indexes = objects.indexes(runs)
        parts = [
            StoredPart(objects, run, index, _MERGED_AT_ONCE, None) for run, index in zip(runs, indexes, strict=True)
        ]
        everything = merged(parts, KeyRange())
        if self._core.pointer.read().state.levels.runs[:1] == runs[:1]:
            everything = map(without_removed, everything)
        kept_since = now_in_ms() - TOKENS_KEPT
        tokens = b"".join(
            tokens_since(index.tokens, kept_since)
            for run, index in zip(runs, indexes, strict=True)
            if run.newest >= kept_since
        )
        facts = {"first": runs[0].first, "last": runs[-1].last, "newest": max(run.newest for run in runs)}
        return self._written(into, everything, tokens, sum(run.size for run in runs), facts)

    def _written(
        self, run: str, entries: Iterator[Columns] | list[Columns], tokens: bytes, size: int, facts: dict[str, int]
    ) -> RunRef:
        store, key = self._core.pointer.store, self._core.objects.key(run)

        def write(file: BinaryIO) -> RunRef:
            writer = RunWriter(file.write)
            for part in entries:
                writer.add(part)
            written = writer.finish(tokens)
            return RunRef(id=run, size=written.size, footer=written.footer, count=written.count, **facts)

        if size <= _IN_MEMORY:
            buffer = io.BytesIO()
            ref = write(buffer)
            store.put_if_absent(key, buffer.getvalue())
            return ref
        path = Path(store.staging_dir()) / f"{run}.run"
        try:
            with telling_of_staged(store, path, f"run {run}"), path.open("wb") as file:
                ref = write(file)
            store.upload(path, key)
        finally:
            path.unlink(missing_ok=True)
        return ref

    # -- collecting

    def _collect(self) -> None:
        """Delete runs that nothing stands on, which were written before a swap of ours and can't come in after it."""
        pointer, prefix = self._core.pointer, self._core.objects.key("")
        listed = {item.key.removeprefix(prefix) for item in pointer.store.list(prefix)}
        standing = pointer.read().state
        if not listed - _named(standing.levels):
            return

        def with_collected(state: SegmentState) -> SegmentState | None:
            after = state.then(now_in_ms())
            return relogged(after, state.levels.model_copy(update={"collected": after.number}), state.log)

        after = self._swap(with_collected, _NO_RUN, lambda levels: False)
        if after is not None:
            spared = _named(after.levels)
            pointer.store.delete_many(self._core.objects.key(run) for run in sorted(listed - spared))

    # -- swapping

    def _swap(self, change: Change, written: str, is_in: Callable[[Levels], bool]) -> SegmentState | None:
        """Swap in what `change` makes of what stands, and return what stands then; None where that makes nothing.

        `is_in` says of later levels whether ours came in; `written` is the run that it names. Where it does not come in
        it is left for a collection: the first answer of the store may have been lost, and only a listing after another
        swap is certain of what nothing stands on.
        """
        pointer = self._core.pointer

        def changed(state: SegmentState) -> SegmentState | None:
            if state.status is Status.DELETED:
                pointer.store.delete(self._core.objects.key(written))
                return None
            return change(state)

        swapped = pointer.change(changed, is_in=lambda state: is_in(state.levels))
        return swapped.standing.state if swapped is not None and swapped.won else None


def _named(levels: Levels) -> set[str]:
    """Return the ids of all runs that something stands on, or may."""
    runs = {run.id for run in levels.runs} | {gone.id for gone in levels.dropped}
    return runs | {claim.into for claim in levels.claims}


def _replaced(levels: Levels, claim: MergeClaim, run: RunRef, now: int) -> Levels | None:
    """Return the levels with a merged run in the place of what it was made of; None where that is not possible."""
    ids = tuple(other.id for other in levels.runs)
    if claim not in levels.claims or claim.of[0] not in ids:
        return None
    start = ids.index(claim.of[0])
    end = start + len(claim.of)
    if ids[start:end] != claim.of:
        return None
    return levels.model_copy(
        update={
            "runs": (*levels.runs[:start], run, *levels.runs[end:]),
            "claims": tuple(other for other in levels.claims if other != claim),
            "dropped": (
                *(gone for gone in levels.dropped if gone.at > now - _GRACE),
                *(DroppedRun(id=gone, at=now) for gone in claim.of),
            ),
        }
    )

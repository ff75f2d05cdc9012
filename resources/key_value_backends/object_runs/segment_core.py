"""The parts of a segment that all work upon: its table, its pointer and its runs; and reading from them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeVar

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    MalformedDocumentError,
    ObjectNotFoundError,
    StoreUnavailableError,
    TableAccessError,
    TableUnavailableError,
)
from dagster_adjunct.resources.key_value.addressing import KeyRange
from dagster_adjunct.resources.key_value.ended_tables import deleted_table, sealed_table
from dagster_adjunct.resources.key_value.table_segment import StoredEntry, StoredPage, TableId
from dagster_adjunct.resources.key_value_backends.object_runs.commit_tokens import holds_any
from dagster_adjunct.resources.key_value_backends.object_runs.pointer_object import PointerObject, Standing
from dagster_adjunct.resources.key_value_backends.object_runs.run_blocks import without_removed
from dagster_adjunct.resources.key_value_backends.object_runs.run_objects import RunObjects
from dagster_adjunct.resources.key_value_backends.object_runs.segment_pointer import SegmentState, Status
from dagster_adjunct.resources.key_value_backends.object_runs.segment_view import SegmentView
from dagster_adjunct.resources.key_value_errors import KeyValueTableNotFoundError, KeyValueTableSealedError

T = TypeVar("T")

TOKENS_KEPT = 30 * 60 * 1000
"""Milliseconds for which tokens are kept: the horizon, and what the clocks of two writers may differ by."""
_LOOKS = 5
_PAGE_BYTES = 8 * 1024 * 1024
_AHEAD = 8192  # entries that are read at once where pages follow each other
_REMEMBERED_ENDS = 16


@dataclass(frozen=True, slots=True)
class SegmentCore:
    """A segment in this process. Any thread may read it; everything blocks."""

    table: TableId
    pointer: PointerObject
    objects: RunObjects
    _ends: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def get(self, keys: Collection[bytes], *, values: bool) -> list[StoredEntry | None]:
        """Return the entries of these keys, all as they stand at one moment."""
        by_key = self.reading(lambda standing: SegmentView(self.readable(standing), self.objects).find(keys))
        entries: list[StoredEntry | None] = []
        for key in keys:
            entry = by_key[key]
            entries.append(None if entry is None else StoredEntry(key, entry[0], entry[1] if values else None))
        return entries

    def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage:
        """Return the first entries of a range, as they stood at one moment; fewer than `limit` where they are large."""
        follows = self._ends.pop(within.start, _NEW) is None
        wanted = max(limit, _AHEAD) if follows else limit
        page = self.reading(lambda standing: self._page(self.readable(standing), within, limit, wanted, values))
        if len(page.keys) == limit:
            self._ends[within.after(page.keys[-1]).start] = None
            while len(self._ends) > _REMEMBERED_ENDS:
                self._ends.popitem(last=False)
        return page

    def reading(self, read: Callable[[Standing], T]) -> T:
        """Return what `read` gives for what stands now; again where a run that it needs was merged away meanwhile."""
        with self.told():
            missing: ObjectNotFoundError | None = None
            for _ in range(_LOOKS):
                standing = self.pointer.fresh()
                try:
                    return read(standing)
                except ObjectNotFoundError as error:
                    missing = error
            raise self.lost_run(missing)

    def readable(self, standing: Standing) -> SegmentState:
        """Return the state of a segment that was not deleted."""
        if standing.state.status is Status.DELETED:
            raise self.gone()
        return standing.state

    def applied_before(self, state: SegmentState, tokens: Collection[bytes], oldest: int | None = None) -> set[bytes]:
        """Return which of these tokens a commit holds: any recent one, or one from number `oldest` on."""
        applied = {token for token in tokens if token in state.tokens}
        kept_since = now_in_ms() - TOKENS_KEPT
        for run in state.levels.runs:
            recent = run.newest >= kept_since if oldest is None else run.last >= oldest
            if recent and len(applied) < len(tokens):
                applied |= holds_any(self.objects.index(run).tokens, tokens)
        return applied

    def gone(self) -> KeyValueTableNotFoundError:
        return deleted_table(self.table, f"{self._label()} at {self.pointer.key!r} in {self.pointer.store.url}")

    def sealed(self) -> KeyValueTableSealedError:
        return sealed_table(self.table, self._label())

    def _label(self) -> str:
        return f"key-value table {self.table}"

    def lost_run(self, error: ObjectNotFoundError | None) -> MalformedDocumentError:
        key = None if error is None else error.key
        return MalformedDocumentError(
            f"a run that the pointer {self.pointer.key!r} in {self.pointer.store.url} names is missing: {error}",
            "Restore this object from a backup or an older object version.",
            document=key or self.pointer.key,
        )

    def told(self) -> _Told:
        """Return a context in which the store's errors become those of a table."""
        return _Told(self)

    def _page(self, state: SegmentState, within: KeyRange, limit: int, wanted: int, values: bool) -> StoredPage:
        keys: list[bytes] = []
        versions: list[bytes] = []
        stored: list[bytes | None] = []
        size = 0
        for window in SegmentView(state, self.objects).windows(within, wanted):
            there = without_removed(window)
            left = limit - len(keys)
            page_values = there.values[:left] if values else [None] * min(left, len(there))
            keys += there.keys[:left]
            versions += there.versions[:left]
            stored += page_values
            size += sum(map(len, there.keys[:left])) + sum(map(len, filter(None, page_values)))
            if len(keys) >= limit or size >= _PAGE_BYTES:
                return StoredPage(keys, versions, stored)
        return StoredPage(keys, versions, stored, is_last=True)


class _Told:
    def __init__(self, core: SegmentCore) -> None:
        self._core = core

    def __enter__(self) -> None: ...

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        core, name = self._core, f"{self._core.table.scope}/{self._core.table.name}"
        if isinstance(error, ObjectNotFoundError):
            raise core.gone() from error
        if isinstance(error, StoreUnavailableError):
            raise TableUnavailableError(error.problem, error.next_step, table=name) from error
        if isinstance(error, ConfigurationError):
            raise TableAccessError(error.problem, error.next_step, table=name) from error


_NEW = object()


def now_in_ms() -> int:
    """Return the time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000

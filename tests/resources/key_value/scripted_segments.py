"""A backend in memory that keeps the promises of `segment.py` and fails when a test says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from dagster_adjunct.key_value import KeyValueTable, KeyValueTableConfiguration, TextSerializer
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    ANYTHING,
    ConditionsFailed,
    KeyRange,
    SegmentChange,
    SegmentLimits,
    StoredEntry,
    StoredPage,
    TableId,
)

ID = TableId("scope", "table", "00000000000000a1")


class Lose:
    """Raise `error` for a request, `after` or before it was applied; then let others do
    something.
    """

    def __init__(
        self, error: Exception, *, after: bool = True, then: Callable[[], object] = lambda: None
    ) -> None:
        self.error, self.after, self.then = error, after, then


class ScriptedSegments:
    """`script` holds what the next requests meet: an error (nothing happens), a `Lose`, or None for
    nothing.

    `repeat` is what all requests meet behind the script's end. `asked` notes each request: its
    kind, its partition, the number of keys, and when.
    """

    def __init__(
        self, *, waits: bool = False, horizon: float = 60.0, limits: SegmentLimits | None = None
    ) -> None:
        self.waits, self.horizon = waits, horizon
        self.limits = limits or SegmentLimits()
        self.stored: dict[int, dict[bytes, StoredEntry]] = {}
        self.tokens: set[bytes] = set()
        self.script: list[Exception | Lose | None] = []
        self.repeat: Exception | Lose | None = None
        self.longest_page = 10**9
        self.asked: list[tuple[str, int, int, float]] = []

    def open(self, table: TableId, partition: int) -> ScriptedSegment:
        return ScriptedSegment(self, partition)

    def to_dict(self) -> dict[str, Any]:
        return {}

    def create(self, table: TableId, partitions: int) -> None: ...

    def seal(self, table: TableId, partitions: int) -> None: ...

    def delete(self, table: TableId, partitions: int) -> None: ...

    def location(self, table: TableId, partition: int) -> str:
        return "memory"

    def table(self, partitions: int = 4, id: TableId = ID, **more: Any) -> KeyValueTable[str, str]:
        """Return a table of texts over this backend."""
        text = TextSerializer()
        return KeyValueTable(id, KeyValueTableConfiguration(partitions, **more), self, text, text)

    def matched(self, kind: str, partition: int, keys: int) -> Lose | None:
        """Note a request; raise what the script says of it."""
        self.asked.append((kind, partition, keys, time.monotonic()))
        fault = self.script.pop(0) if self.script else self.repeat
        if isinstance(fault, Exception):
            raise fault
        if fault is not None and not fault.after:
            fault.then()
            raise fault.error
        return fault


class ScriptedSegment:
    def __init__(self, backend: ScriptedSegments, partition: int) -> None:
        self._backend, self._partition = backend, partition
        self._entries = backend.stored.setdefault(partition, {})

    async def apply(
        self, changes: Sequence[SegmentChange], token: bytes, *, repeated: bool = False
    ) -> None:
        fault = self._backend.matched("apply", self._partition, len(changes))
        if not (repeated and token in self._backend.tokens):
            self._apply(changes, token)
        if fault is not None:
            fault.then()
            raise fault.error

    async def get(self, keys: Sequence[bytes], *, values: bool = True) -> list[StoredEntry | None]:
        self._backend.matched("get", self._partition, len(keys))
        return [self._entries.get(key) for key in keys]

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage:
        assert not within.is_empty
        self._backend.matched("page", self._partition, limit)
        inside = sorted(
            k for k in self._entries if within.start <= k and (within.end is None or k < within.end)
        )
        most = min(limit, self._backend.longest_page)
        return StoredPage.of(
            [self._entries[key] for key in inside[:most]], is_last=len(inside) <= most
        )

    async def close(self) -> None: ...

    def _apply(self, changes: Sequence[SegmentChange], token: bytes) -> None:
        assert len({change.key for change in changes}) == len(changes) > 0
        failing = {}
        for place, change in enumerate(changes):
            entry = self._entries.get(change.key)
            version = None if entry is None else entry.version
            if change.expected is not ANYTHING and version != (
                None if change.expected is ABSENT else change.expected
            ):
                failing[place] = version
        if failing:
            raise ConditionsFailed(failing)
        self._backend.tokens.add(token)
        for change in changes:
            if change.is_guard:
                continue
            if change.value is None:
                self._entries.pop(change.key, None)
            else:
                self._entries[change.key] = StoredEntry(change.key, change.version, change.value)

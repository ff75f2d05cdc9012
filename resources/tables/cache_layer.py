"""`CacheLayer`: answers gets from what this process read or wrote before."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from dagster_adjunct.resources.tables.cache import Cache, KeptRecords
from dagster_adjunct.resources.tables.clock import Clock, SystemClock
from dagster_adjunct.resources.tables.layer import Layer
from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.resources.tables.operation import Operation, OperationKind
from dagster_adjunct.resources.tables.outcomes import Outcomes


class CacheLayer:
    """Reads through; writes through or around. Threads may share it.

    A record is forgotten when a write of its key begins, so a get that comes after asks below, where it waits for the
    write. What a get found is kept only if no write of its key began or ended since the get began: a slow read never
    covers a newer write. Of several writes of a key at once the one that was called last is kept.
    """

    def __init__(
        self, inner: Layer, cache: Cache | None = None, meter: Meter | None = None, clock: Clock | None = None
    ) -> None:
        self._inner = inner
        self._cache = cache or Cache()
        self._meter = meter or Meter()
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._kept = KeptRecords(self._cache)
        # Writes count up as they begin and end. Which number the last of a key had matters to gets under way only.
        self._number = 0
        self._numbers: dict[Hashable, int] = {}
        self._reads = 0
        self._writes = 0  # under way
        self._writing: dict[Hashable, object] = {}  # by key, the write that was called last

    def __len__(self) -> int:
        return len(self._kept)

    async def send(self, operation: Operation[Any]) -> Outcomes:
        if operation.kind is not OperationKind.GET:
            return await self._write(operation)
        if operation.args and not _hashable(operation.args):
            return await self._inner.send(operation)
        return await self._read(operation)

    async def close(self) -> None:
        with self._lock:
            self._kept.clear()
        await self._inner.close()

    async def _read(self, operation: Operation[Any]) -> Outcomes:
        keys, args, now = operation.entries.keys, operation.args, self._clock.now()
        with self._lock:
            records, unknown = self._kept.find(keys, args, now)
            began = self._number
            if unknown:
                self._reads += 1
        if len(unknown) < len(keys):
            self._meter.add("cache_hits", len(keys) - len(unknown))
            answer = Outcomes(len(keys), records)
            if not unknown:
                return answer
        self._meter.add("cache_misses", len(unknown))
        outcomes: Outcomes | None = None
        try:
            if len(unknown) == len(keys):
                return (outcomes := await self._inner.send(operation))
            outcomes = await self._inner.send(operation.with_entries(operation.entries.take(unknown)))
            return answer.amended(unknown, outcomes)
        finally:
            asked = keys if len(unknown) == len(keys) else [keys[place] for place in unknown]
            self._end_read(asked, args, outcomes, began)

    def _end_read(self, keys: Sequence[Any], args: tuple[object, ...], outcomes: Outcomes | None, began: int) -> None:
        with self._lock:
            if outcomes is not None and outcomes.records is not None:
                evicted = self._kept.evicted
                records, problems, numbers = outcomes.records, outcomes.problems, self._numbers
                if problems or numbers:
                    kept = [
                        place
                        for place, key in enumerate(keys)
                        if place not in problems and numbers.get(key, -1) <= began
                    ]
                    keys, records = [keys[place] for place in kept], [records[place] for place in kept]
                self._kept.keep(keys, records, args, self._clock.now())
                evicted = self._kept.evicted - evicted
            else:
                evicted = 0
            self._reads -= 1
            if not self._reads:
                self._numbers.clear()
        if evicted:
            self._meter.add("cache_evictions", evicted)

    async def _write(self, operation: Operation[Any]) -> Outcomes:
        keys, token = operation.entries.keys, object()
        with self._lock:
            self._forget(keys)
            self._writing.update(dict.fromkeys(keys, token))
            self._writes += 1
            before = self._kept.kept_so_far
        outcomes: Outcomes | None = None
        try:
            outcomes = await self._inner.send(operation)
            return outcomes
        finally:
            self._end_write(operation, outcomes, token, before)

    def _end_write(self, operation: Operation[Any], outcomes: Outcomes | None, token: object, before: int) -> None:
        keys, evicted = operation.entries.keys, 0
        last: set[Hashable] | None = None  # of these keys no later write is under way; None: of all
        with self._lock:
            if self._reads or before != self._kept.kept_so_far:
                self._forget(keys)
            self._writes -= 1
            if self._writes:
                last = {key for key in keys if self._writing.get(key) is token}
                for key in last:
                    del self._writing[key]
            elif len(self._writing) < len(keys):  # a later write has ended, or a key stands there twice
                last = {key for key in keys if self._writing.get(key) is token}
                self._writing.clear()
            else:
                self._writing.clear()
            if outcomes is not None and self._may_keep(operation):
                evicted = self._keep_written(operation, outcomes, last)
        if evicted:
            self._meter.add("cache_evictions", evicted)

    def _may_keep(self, operation: Operation[Any]) -> bool:
        return (
            self._cache.on_write == "through"
            and operation.kind in (OperationKind.PUT, OperationKind.DELETE)
            and not operation.conditions
            and (not operation.args or _hashable(operation.args))
        )

    def _keep_written(self, operation: Operation[Any], outcomes: Outcomes, last: set[Hashable] | None) -> int:
        keys = operation.entries.keys
        values: Sequence[Any] = operation.entries.values or [None] * len(keys)
        if outcomes.problems:
            last = (set(keys) if last is None else last) - {keys[place] for place in outcomes.problems}
        # The last of a key's entries counts.
        written = dict(zip(keys, values, strict=True))
        if last is not None:
            written = {key: value for key, value in written.items() if key in last}
        before = self._kept.evicted
        self._kept.keep(list(written), list(written.values()), operation.args, self._clock.now())
        return self._kept.evicted - before

    def _forget(self, keys: Iterable[Hashable]) -> None:
        self._number += 1
        if self._reads:
            self._numbers.update(dict.fromkeys(keys, self._number))
        self._kept.forget(keys)


def _hashable(args: tuple[object, ...]) -> bool:
    try:
        hash(args)
    except TypeError:
        return False
    return True

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
            find = self._kept.find
            found = [find(key, args, now) for key in keys]
            unknown = [place for place, (known, _) in enumerate(found) if not known]
            began = self._number
            if unknown:
                self._reads += 1
        if len(unknown) < len(keys):
            self._meter.add("cache_hits", len(keys) - len(unknown))
            answer = Outcomes(len(keys), [record for _, record in found])
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
            self._end_read([keys[place] for place in unknown], args, outcomes, began)

    def _end_read(self, keys: Sequence[Any], args: tuple[object, ...], outcomes: Outcomes | None, began: int) -> None:
        with self._lock:
            if outcomes is not None and outcomes.records is not None:
                now, evicted = self._clock.now(), self._kept.evicted
                for place, (key, record) in enumerate(zip(keys, outcomes.records, strict=True)):
                    if place in outcomes.problems or self._numbers.get(key, -1) > began:
                        continue
                    if record is not None or self._cache.absent:
                        self._kept.keep(key, args, record, now)
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
        outcomes: Outcomes | None = None
        try:
            outcomes = await self._inner.send(operation)
            return outcomes
        finally:
            self._end_write(operation, outcomes, token)

    def _end_write(self, operation: Operation[Any], outcomes: Outcomes | None, token: object) -> None:
        keys, evicted = operation.entries.keys, 0
        with self._lock:
            self._forget(keys)
            last = {key for key in keys if self._writing.get(key) is token}
            for key in last:
                del self._writing[key]
            if outcomes is not None and last and self._may_keep(operation):
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

    def _keep_written(self, operation: Operation[Any], outcomes: Outcomes, last: set[Hashable]) -> int:
        keys, args, now = operation.entries.keys, operation.args, self._clock.now()
        values: Sequence[Any] = operation.entries.values or [None] * len(keys)
        if outcomes.problems:
            last = last - {keys[place] for place in outcomes.problems}
        before = self._kept.evicted
        for key, value in zip(keys, values, strict=True):
            if key in last:
                if value is not None or self._cache.absent:
                    self._kept.keep(key, args, value, now)
                else:
                    self._kept.forget(key)
        return self._kept.evicted - before

    def _forget(self, keys: Iterable[Hashable]) -> None:
        self._number += 1
        if self._reads:
            self._numbers.update(dict.fromkeys(keys, self._number))
        for key in keys:
            self._kept.forget(key)


def _hashable(args: tuple[object, ...]) -> bool:
    try:
        hash(args)
    except TypeError:
        return False
    return True

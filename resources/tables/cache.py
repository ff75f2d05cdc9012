"""`Cache` declares which records of a table a process keeps, and for how long; `CacheLayer` keeps them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from math import inf
from typing import Any, Literal
from uuid import UUID

from dagster_adjunct.resources.common import check_seconds, check_whole_number
from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.resources.tables.operation import Clock, Layer, Operation, OperationKind, Outcomes, SystemClock
from dagster_adjunct.resources.validation import validated


@validated
@dataclass(frozen=True, slots=True)
class Cache:
    """Keeps up to `size` records that were read; evicts the least recently used one.

    Writes of other processes become visible once a record expires: `seconds_after_write` after it was read from or
    written to the store, or `seconds_after_read` after its last use, whichever is first. None never expires.

    `on_write="through"` keeps what is put, `"around"` evicts it, so that the next get reads it. Updates, failed writes
    and unanswered ones always evict. `absent=True` also keeps that a key has no record.
    """

    size: int = 10_000
    seconds_after_write: float | None = 60.0
    seconds_after_read: float | None = None
    on_write: Literal["through", "around"] = "through"
    absent: bool = False

    def __post_init__(self) -> None:
        check_whole_number(self.size, f"a cache of {self.size!r} records", "at least 1", argument="size")
        for name in ("seconds_after_write", "seconds_after_read"):
            seconds = getattr(self, name)
            check_seconds(seconds, f"{name}={seconds!r} of a cache", argument=name, none=True)


# Immutable types; a record of only these needs no deep copy.
_FIXED = frozenset({type(None), bool, int, float, str, bytes, Decimal, datetime, date, time, timedelta, UUID})


_is_fixed = _FIXED.issuperset
_copy_of_dict = dict.copy


@dataclass(frozen=True, slots=True)
class _Variant:
    """A key read with arguments; arguments of different types differ, as 1, True and 1.0 would be equal."""

    key: Hashable
    args: tuple[object, ...]


def _places(keys: Sequence[Hashable], args: tuple[object, ...]) -> Sequence[Hashable]:
    """The cache keys of these records: the key itself for requests without arguments, which most are."""
    if not args:
        return keys
    typed = (*args, *map(type, args))
    return [_Variant(key, typed) for key in keys]


class CachedRecords:
    """The kept records by key and arguments of the request. Not thread-safe.

    An ordered dict rather than a cachetools container, whose single accesses take ten times as long: 1 us each, and 5
    us with expiry.
    """

    def __init__(self, cache: Cache) -> None:
        self._size = cache.size
        self._after_write = inf if cache.seconds_after_write is None else cache.seconds_after_write
        self._after_read = inf if cache.seconds_after_read is None else cache.seconds_after_read
        self._absent = cache.absent
        self._kept: OrderedDict[Hashable, tuple[Any, float, float, Callable[[Any], Any] | None]] = OrderedDict()
        self._variants: dict[Hashable, set[_Variant]] = {}  # for keys that were read with arguments

        self.kept_so_far = 0  # grows with every kept record

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, keys: Sequence[Hashable], args: tuple[object, ...], now: float) -> tuple[list[Any], list[int]]:
        """Return the records of these keys, None for unknown ones, and the places of the unknown ones."""
        kept, idle = self._kept, self._after_read
        records: list[Any] = []
        unknown: list[int] = []
        if not kept:
            return [None] * len(keys), list(range(len(keys)))
        for place, at in enumerate(_places(keys, args)):
            known = kept.get(at)
            if known is not None:
                record, written_until, read_until, copy = known
                if now < written_until and now < read_until:
                    if idle is not inf:
                        kept[at] = (record, written_until, now + idle, copy)
                    kept.move_to_end(at)
                    records.append(record if copy is None else copy(record))
                    continue
                self._drop(at)
            unknown.append(place)
            records.append(None)
        return records, unknown

    def keep(self, keys: Sequence[Hashable], records: Sequence[Any], args: tuple[object, ...], now: float) -> int:
        """Keep these keys' records; None means that there is none, if the cache keeps that. Return how many others
        were evicted for lack of space.
        """
        kept, written_until, read_until = self._kept, now + self._after_write, now + self._after_read
        places, absent = _places(keys, args), self._absent
        if not kept.keys().isdisjoint(places):
            for at in places:
                if at in kept:
                    kept.move_to_end(at)
        for at, record in zip(places, records, strict=True):
            if record is None and not absent:
                continue
            if type(record) is dict and _is_fixed(map(type, record.values())):  # the usual case, without a call
                kept[at] = (record.copy(), written_until, read_until, _copy_of_dict)
                continue
            copy = None if type(record) in _FIXED else deepcopy  # callers may change their own
            try:
                kept[at] = (record if copy is None else copy(record), written_until, read_until, copy)
            except Exception:  # noqa: BLE001 - what can't be copied is not kept: its owner may change it
                kept.pop(at, None)
        for at in places if args else ():
            if type(at) is _Variant and at in kept:
                self._variants.setdefault(at.key, set()).add(at)
        self.kept_so_far += 1
        evicted = max(0, len(kept) - self._size)
        for _ in range(evicted):
            self._drop(next(iter(kept)))
        return evicted

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Evict the records of these keys, for all arguments."""
        if not self._kept:
            return
        for key in keys:
            self._kept.pop(key, None)
            if self._variants:
                for at in self._variants.pop(key, ()):
                    self._kept.pop(at, None)

    def clear(self) -> None:
        self._kept.clear()
        self._variants.clear()

    def _drop(self, at: Hashable) -> None:
        del self._kept[at]
        if type(at) is _Variant and (variants := self._variants.get(at.key)) is not None:
            variants.discard(at)
            if not variants:
                del self._variants[at.key]


@validated
class CacheLayer:
    """Reads through the cache; writes through or around it. Thread-safe.

    A record is evicted when a write of its key begins, so a later get asks the layer below, where it waits for the
    write. A get's result is kept only if no write of its key began or ended since the get began: a slow read never
    replaces a newer write. Of several concurrent writes of a key, the one called last is kept.
    """

    def __init__(
        self, inner: Layer, cache: Cache | None = None, meter: Meter | None = None, clock: Clock | None = None
    ) -> None:
        self._inner = inner
        self._cache = cache or Cache()
        self._meter = meter or Meter()
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._kept = CachedRecords(self._cache)
        # Counts the begins and ends of writes. A key's last number matters only to gets under way.
        self._number = 0
        self._numbers: dict[Hashable, int] = {}
        self._reads = 0
        self._writes = 0  # under way
        self._writing: dict[Hashable, object] = {}  # by key, the write called last

    def __len__(self) -> int:
        return len(self._kept)

    async def send(self, operation: Operation[Any]) -> Outcomes:
        if operation.kind is not OperationKind.GET:
            return await self._write(operation)
        if not _hashable(operation.args):
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
            self._reads += bool(unknown)
        answer: Outcomes | None = None
        if len(unknown) < len(keys):
            self._meter.add("cache_hits", len(keys) - len(unknown))
            answer = Outcomes(len(keys), records)
            if not unknown:
                return answer
            operation = operation.with_entries(operation.entries.take(unknown))
        self._meter.add("cache_misses", len(unknown))
        outcomes: Outcomes | None = None
        try:
            outcomes = await self._inner.send(operation)
            return outcomes if answer is None else answer.with_retried(unknown, outcomes)
        finally:
            self._end_read(operation.entries.keys, args, outcomes, began)

    def _end_read(self, keys: Sequence[Any], args: tuple[object, ...], outcomes: Outcomes | None, began: int) -> None:
        with self._lock:
            if outcomes is not None and outcomes.records is not None:
                records, problems, numbers = outcomes.records, outcomes.problems, self._numbers
                if problems or numbers:
                    kept = [
                        place
                        for place, key in enumerate(keys)
                        if place not in problems and numbers.get(key, -1) <= began
                    ]
                    keys, records = [keys[place] for place in kept], [records[place] for place in kept]
                self._keep(keys, records, args)
            self._reads -= 1
            if not self._reads:
                self._numbers.clear()

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
        keys, args, values = operation.entries.keys, operation.args, operation.entries.values
        puts = operation.kind in (OperationKind.PUT, OperationKind.DELETE) and not operation.conditions
        with self._lock:
            if self._reads or before != self._kept.kept_so_far:
                self._forget(keys)
            self._writes -= 1
            keeps = outcomes is not None and puts and self._cache.on_write == "through" and _hashable(args)
            last: set[Hashable] = set()
            if self._writes or keeps:  # those of the keys without a later write
                last = {key for key in keys if self._writing.get(key) is token}
            if self._writes:
                for key in last:
                    del self._writing[key]
            else:
                self._writing.clear()
            if outcomes is not None and keeps:
                last -= {keys[place] for place in outcomes.problems}
                # A key's last entry counts.
                written = {
                    key: value for key, value in zip(keys, values or [None] * len(keys), strict=True) if key in last
                }
                self._keep(list(written), list(written.values()), args)

    def _keep(self, keys: Sequence[Hashable], records: Sequence[Any], args: tuple[object, ...]) -> None:
        if evicted := self._kept.keep(keys, records, args, self._clock.now()):
            self._meter.add("cache_evictions", evicted)

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

"""The cache of a table in one process: `Cache` declares what to keep and for how long,
`CacheLayer` keeps it.
"""

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

from pydantic import PositiveInt

from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.resources.tables.operation import (
    Clock,
    Layer,
    Operation,
    OperationKind,
    Outcomes,
    SystemClock,
)
from dagster_adjunct.resources.validation import Seconds, validated


@validated
@dataclass(frozen=True, slots=True)
class Cache:
    """Keeps up to `size` records in the process; if there are more, evicts the least recently used
    one.

    Writes of other processes become visible once a record expires: `seconds_after_write` after it
    was read from or written to the store, or `seconds_after_read` after its last use, whichever is
    first. With None it never expires.

    With `on_write="through"` a put or delete also changes the cache. With `"around"` it evicts the
    record, so that the next get reads the store. Updates, failed writes and unanswered ones always
    evict. `absent=True` also keeps the fact that a key has no record.
    """

    size: PositiveInt = 10_000
    seconds_after_write: Seconds | None = 60.0
    seconds_after_read: Seconds | None = None
    on_write: Literal["through", "around"] = "through"
    absent: bool = False


# Immutable types; a dictionary of only these is copied without a deep copy.
_FIXED = frozenset(
    {type(None), bool, int, float, str, bytes, Decimal, datetime, date, time, timedelta, UUID}
)


_Kept = tuple[Any, float, float, Callable[[Any], Any] | None]
"""A record, until when it is kept after its write and after its last use, and what copies it."""
_EXPIRED: _Kept = (None, -inf, -inf, None)
_is_fixed = _FIXED.issuperset
_copy_of_dict = dict.copy


@dataclass(frozen=True, slots=True)
class _Variant:
    """The cache key of a record that was read with arguments: `args` are the arguments and their
    types.

    Without the types, 1, True and 1.0 would be equal.
    """

    key: Hashable
    args: tuple[object, ...]


def _cache_keys(keys: Sequence[Hashable], args: tuple[object, ...]) -> Sequence[Hashable]:
    """The keys by which the cache keeps these records: the records' own if a request, as most,
    has no arguments.
    """
    if not args:
        return keys
    typed = (*args, *map(type, args))
    return [_Variant(key, typed) for key in keys]


class CachedRecords:
    """The records that a cache keeps, by key and arguments of the request. Not thread-safe.

    It uses an ordered dict because single accesses to a cachetools container take ten times as
    long: 1 us, or 5 us with expiry.
    """

    def __init__(self, cache: Cache) -> None:
        self._size = cache.size
        self._after_write = inf if cache.seconds_after_write is None else cache.seconds_after_write
        self._after_read = inf if cache.seconds_after_read is None else cache.seconds_after_read
        self._absent = cache.absent
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._variants: dict[Hashable, set[_Variant]] = {}  # by key; of those read with arguments

        # The number of calls of `keep`, by which a write sees whether others have kept records
        # while it was under way (`CacheLayer._end_write`).
        self.keep_calls = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(
        self, keys: Sequence[Hashable], args: tuple[object, ...], now: float
    ) -> tuple[list[Any], list[int]]:
        """Return the kept records of these keys, and the indices of the keys of which nothing is
        kept.

        A record is None if nothing is kept, or if it is known that the key has no record.
        """
        kept = self._kept
        idle = self._after_read
        records: list[Any] = []
        unknown: list[int] = []
        if not kept:
            return [None] * len(keys), list(range(len(keys)))
        for place, at in enumerate(_cache_keys(keys, args)):
            record, written_until, read_until, copy = kept.get(at, _EXPIRED)
            if now >= written_until or now >= read_until:
                self._drop(at)
                unknown.append(place)
                records.append(None)
                continue
            if idle is not inf:
                kept[at] = (record, written_until, now + idle, copy)
            kept.move_to_end(at)
            records.append(record if copy is None else copy(record))
        return records, unknown

    def keep(
        self, keys: Sequence[Hashable], records: Sequence[Any], args: tuple[object, ...], now: float
    ) -> int:
        """Keep these keys' records; return how many were evicted for lack of space.

        A record of None says that the key has none, which is kept only with `Cache.absent`.
        """
        kept = self._kept
        until = (now + self._after_write, now + self._after_read)
        places = _cache_keys(keys, args)
        for at, record in zip(places, records, strict=True):
            # An entry that is replaced would keep its place in the order of use, and one whose key
            # has no record any more would stay.
            if at in kept:
                self._drop(at)
            if record is None and not self._absent:
                continue
            # The usual case, without a call.
            if type(record) is dict and _is_fixed(map(type, record.values())):
                kept[at] = (record.copy(), *until, _copy_of_dict)
            else:
                self._keep_copy(at, record, until)
        if args:
            self._remember_variants(places)
        self.keep_calls += 1
        evicted = max(0, len(kept) - self._size)
        for _ in range(evicted):
            self._drop(next(iter(kept)))
        return evicted

    def _keep_copy(self, at: Hashable, record: Any, until: tuple[float, float]) -> None:
        """Keep a copy of a record, because callers may change what they passed or got.

        `at` is its cache key, `until` until when it is kept after its write and after its last use
        (`_Kept`). What can't be copied is not kept.
        """
        written_until, read_until = until
        is_immutable = type(record) in _FIXED
        if is_immutable:
            self._kept[at] = (record, written_until, read_until, None)
            return
        try:
            copy = deepcopy(record)
        except Exception:  # noqa: BLE001 - of the user's class
            return
        self._kept[at] = (copy, written_until, read_until, deepcopy)

    def _remember_variants(self, places: Iterable[Hashable]) -> None:
        """Note which variants of a key are kept, so that `forget` finds them."""
        for at in places:
            if type(at) is _Variant and at in self._kept:
                self._variants.setdefault(at.key, set()).add(at)

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
        """Evict all records."""
        self._kept.clear()
        self._variants.clear()

    def _drop(self, at: Hashable) -> None:
        """Evict the record with this cache key."""
        self._kept.pop(at, None)
        if type(at) is _Variant and (variants := self._variants.get(at.key)) is not None:
            variants.discard(at)
            if not variants:
                del self._variants[at.key]


@validated
class CacheLayer:
    """Answers gets from the cache where it can, and keeps it up to date with writes. Thread-safe.

    A record is evicted when a write of its key begins, so a later get asks the layer below, where
    it waits for the write. What a get finds is kept only if no write of its key began or ended
    meanwhile: a slow read never replaces a newer write. Of several concurrent writes of a key, the
    one called last is kept.
    """

    def __init__(
        self,
        below: Layer,
        cache: Cache | None = None,
        meter: Meter | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._below = below
        self._cache = cache or Cache()
        self._meter = meter or Meter()
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._kept = CachedRecords(self._cache)
        # The number of begins and ends of writes so far; and for each key the number at its last
        # one, which is recorded only while gets are under way.
        self._write_events = 0
        self._last_events: dict[Hashable, int] = {}
        self._reads_under_way = 0
        # By key: the write under way that was called last.
        self._writing: dict[Hashable, object] = {}

    def __len__(self) -> int:
        return len(self._kept)

    async def send(self, operation: Operation[Any]) -> Outcomes:
        """Read what is not kept, or write and adjust what is kept; reads with `args` that can't be
        hashed pass by the cache.
        """
        if operation.kind is not OperationKind.GET:
            return await self._write(operation)
        if not _are_hashable(operation.args):
            return await self._below.send(operation)
        return await self._read(operation)

    async def close(self) -> None:
        with self._lock:
            self._kept.clear()
        await self._below.close()

    async def _read(self, operation: Operation[Any]) -> Outcomes:
        """Answer a get from the cache, and ask the layer below for the other keys."""
        keys = operation.entries.keys
        args = operation.args
        now = self._clock.now()
        with self._lock:
            records, unknown = self._kept.find(keys, args, now)
            began = self._write_events
            self._reads_under_way += bool(unknown)
        hits = len(keys) - len(unknown)
        answer = Outcomes(len(keys), records)
        if not unknown:
            if hits:
                self._meter.add("cache_hits", hits)
            return answer
        if hits:
            self._meter.add("cache_hits", hits)
            operation = operation.with_entries(operation.entries.take(unknown))
        self._meter.add("cache_misses", len(unknown))
        try:
            outcomes = await self._below.send(operation)
            self._keep_read(operation.entries.keys, args, outcomes, began)
        finally:
            with self._lock:
                self._reads_under_way -= 1
                if not self._reads_under_way:
                    self._last_events.clear()
        if hits:
            return answer.with_retried(unknown, outcomes)
        return outcomes

    def _keep_read(
        self, keys: Sequence[Any], args: tuple[object, ...], outcomes: Outcomes, began: int
    ) -> None:
        """Keep what a get has found, except for keys of which a write has begun or ended since.

        `began` is the number of such events when the get began.
        """
        records = outcomes.records
        if records is None:
            return
        with self._lock:
            if outcomes.problems or self._last_events:
                valid = []
                for place, key in enumerate(keys):
                    is_unchanged = self._last_events.get(key, began) <= began
                    if place not in outcomes.problems and is_unchanged:
                        valid.append(place)
                keys = [keys[place] for place in valid]
                records = [records[place] for place in valid]
            self._keep(keys, records, args)

    async def _write(self, operation: Operation[Any]) -> Outcomes:
        """Send a write. What is kept of its keys is forgotten at its begin and at its end, because
        a get in between may have read the record before or after it.
        """
        keys = operation.entries.keys
        token = object()
        with self._lock:
            self._forget(keys)
            self._writing.update(dict.fromkeys(keys, token))
            keep_calls = self._kept.keep_calls
        outcomes: Outcomes | None = None
        try:
            outcomes = await self._below.send(operation)
            return outcomes
        finally:
            self._end_write(operation, outcomes, token, keep_calls)

    def _end_write(
        self, operation: Operation[Any], outcomes: Outcomes | None, token: object, keep_calls: int
    ) -> None:
        """Keep the written records of keys that no later write has begun to change, if the cache
        keeps what is written. What gets may have kept of its keys meanwhile is forgotten.

        `keep_calls` is the number of calls of `keep` when the write began.
        """
        keys = operation.entries.keys
        with self._lock:
            others_kept = keep_calls != self._kept.keep_calls
            # A get under way may keep what it has read before.
            if others_kept or self._reads_under_way:
                self._forget(keys)
            written_last = {key for key in keys if self._writing.get(key) is token}
            for key in written_last:
                del self._writing[key]
            if outcomes is None or not self._keeps_what_is_written(operation):
                return
            written_last.difference_update(keys[place] for place in outcomes.problems)
            values = operation.entries.values or [None] * len(keys)
            # The last entry of a key is its record.
            written = {
                key: value for key, value in zip(keys, values, strict=True) if key in written_last
            }
            self._keep(list(written), list(written.values()), operation.args)

    def _keeps_what_is_written(self, operation: Operation[Any]) -> bool:
        """Whether the records of a write are kept: a put or delete is what is stored afterwards."""
        if self._cache.on_write != "through" or operation.conditions:
            return False
        is_whole = operation.kind in (OperationKind.PUT, OperationKind.DELETE)
        return is_whole and _are_hashable(operation.args)

    def _keep(
        self, keys: Sequence[Hashable], records: Sequence[Any], args: tuple[object, ...]
    ) -> None:
        """Keep these records, and count those that are evicted for them."""
        if evicted := self._kept.keep(keys, records, args, self._clock.now()):
            self._meter.add("cache_evictions", evicted)

    def _forget(self, keys: Iterable[Hashable]) -> None:
        """Evict the records of keys that a write begins or ends to change, and number this
        event.
        """
        self._write_events += 1
        if self._reads_under_way:
            self._last_events.update(dict.fromkeys(keys, self._write_events))
        self._kept.forget(keys)


def _are_hashable(args: tuple[object, ...]) -> bool:
    """Whether these arguments can be part of a cache key."""
    try:
        hash(args)
    except TypeError:
        return False
    return True

"""`Cache`: which records of a table one process keeps, and for how long; `CacheLayer` does as it says."""

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
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.tables.layers import Layer
from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.resources.tables.operation import Clock, Operation, OperationKind, Outcomes, SystemClock


@dataclass(frozen=True, slots=True)
class Cache:
    """Records that were read are kept, up to `size`; beyond that the one that was not asked for the longest goes.

    What other processes write is seen when a record has expired: `seconds_after_write` after it was read from the store
    or written to it, or `seconds_after_read` after it was last asked for, whichever is first; None: never of itself.

    `on_write="through"` keeps what is put, `"around"` forgets it, so that the next get reads it. Updates always forget
    what they change, and so does a write that fails or has no answer. `absent=True` keeps also that there is no record.
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
            check_seconds(
                seconds, f"{name}={seconds!r} of a cache", argument=name, none=True, next_step="Correct the cache."
            )
        if self.on_write not in ("through", "around"):
            raise ConfigurationError(
                f'on_write={self.on_write!r} of a cache: expected "through" or "around".',
                "Correct the cache.",
                argument="on_write",
            )


# Values that nobody can change; a record of such needs no deep copy.
_FIXED = frozenset({type(None), bool, int, float, str, bytes, Decimal, datetime, date, time, timedelta, UUID})


_is_fixed = _FIXED.issuperset
_copy_of_dict = dict.copy


def _copier(record: Any) -> Callable[[Any], Any] | None:
    """What makes a copy of the record that its owner may change; None where the record itself will do."""
    kind = type(record)
    if kind is dict:
        return _copy_of_dict if _is_fixed(map(type, record.values())) else deepcopy
    return None if kind in _FIXED else deepcopy


@dataclass(frozen=True, slots=True)
class _Variant:
    """A key that was read with arguments, which differ where their types do: 1, True and 1.0 are equal."""

    key: Hashable
    args: tuple[object, ...]


def _places(keys: Sequence[Hashable], args: tuple[object, ...]) -> Sequence[Hashable]:
    """Where the records of these keys lie: by the key itself, as most requests have no arguments."""
    if not args:
        return keys
    typed = (*args, *map(type, args))
    return [_Variant(key, typed) for key in keys]


class CachedRecords:
    """The records that are kept, each by its key and the arguments of its request. Not safe for several threads.

    An ordered dict, and not a cachetools container, whose single accesses take ten times as long: 1 us each, and 5 us
    where records expire.
    """

    def __init__(self, cache: Cache) -> None:
        self._size = cache.size
        self._after_write = inf if cache.seconds_after_write is None else cache.seconds_after_write
        self._after_read = inf if cache.seconds_after_read is None else cache.seconds_after_read
        self._absent = cache.absent
        self._kept: OrderedDict[Hashable, tuple[Any, float, float, Callable[[Any], Any] | None]] = OrderedDict()
        self._variants: dict[Hashable, set[_Variant]] = {}  # of keys that were read with arguments
        self.evicted = 0
        self.kept_so_far = 0  # grows whenever something is kept

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, keys: Sequence[Hashable], args: tuple[object, ...], now: float) -> tuple[list[Any], list[int]]:
        """The records of these keys, and the places of those of which nothing is known; None stands there."""
        kept, idle, records, unknown = self._kept, self._after_read, list[Any](), list[int]()
        if not kept:
            return [None] * len(keys), list(range(len(keys)))
        for place, at in enumerate(_places(keys, args)):
            known = kept.get(at)
            if known is None:
                unknown.append(place)
                records.append(None)
                continue
            record, written_until, read_until, copy = known
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

    def keep(self, keys: Sequence[Hashable], records: Sequence[Any], args: tuple[object, ...], now: float) -> None:
        """Keep these keys' records; None: that there is none, where the cache keeps that."""
        kept, written_until, read_until = self._kept, now + self._after_write, now + self._after_read
        places, absent = _places(keys, args), self._absent
        if not kept.keys().isdisjoint(places):
            for at in places:
                if at in kept:
                    kept.move_to_end(at)
        for at, record in zip(places, records, strict=True):
            if record is None and not absent:
                continue
            if type(record) is dict and _is_fixed(map(type, record.values())):  # as most are, and without a call
                kept[at] = (record.copy(), written_until, read_until, _copy_of_dict)
                continue
            copy = _copier(record)  # callers may change theirs
            try:
                kept[at] = (record if copy is None else copy(record), written_until, read_until, copy)
            except Exception:  # noqa: BLE001 - what can't be copied is not kept: its owner may change it
                kept.pop(at, None)
        for at in places if args else ():
            if type(at) is _Variant and at in kept:
                self._variants.setdefault(at.key, set()).add(at)
        self.kept_so_far += 1
        while len(kept) > self._size:
            self._drop(next(iter(kept)))
            self.evicted += 1

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Forget the records of these keys, whatever arguments they were read with."""
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
        self._kept = CachedRecords(self._cache)
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
            return answer.with_retried(unknown, outcomes)
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

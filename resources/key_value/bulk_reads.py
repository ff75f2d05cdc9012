"""What `get_all` asks the segments for, and the entries that it makes of their answers, in the order of the keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from typing import Any, Generic, TypeVar

from dagster_adjunct.resources.key_value.entry_coder import EntryCoder
from dagster_adjunct.resources.key_value.table_entries import TableEntry, TableKey
from dagster_adjunct.resources.key_value.table_segment import StoredEntry

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class BulkRead(Generic[K]):
    """The keys that were asked for with their families; `stored` has the table keys by partition, and `places`, which
    of the keys these are."""

    families: Iterable[str | None]
    keys: Sequence[K]
    stored: dict[int, list[bytes]]
    places: dict[int, Sequence[int]]

    def entries(
        self, coder: EntryCoder[K, V], answers: Sequence[list[StoredEntry | None]]
    ) -> list[TableEntry[K, V] | None]:
        """Return the entries by the keys' order; `answers` are the partitions' in the order of `stored`."""
        if len(answers) == 1:
            (stored_entries,) = answers
        else:
            stored_entries = [None] * len(self.keys)
            pairs = zip(chain(*self.places.values()), chain(*answers), strict=True)
            for place, answer in pairs:
                stored_entries[place] = answer
        there = [answer for answer in stored_entries if answer is not None]
        if not there:
            return [None] * len(self.keys)
        if len(there) == len(stored_entries):
            return [*coder.entries(self.families, self.keys, there)]
        is_there = [answer is not None for answer in stored_entries]
        entries = iter(coder.entries(compress(self.families, is_there), compress(self.keys, is_there), there))
        return [next(entries) if present else None for present in is_there]


def bulk_read(coder: EntryCoder[K, Any], keys: Sequence[Any], family: str | None) -> BulkRead[K]:
    """Return what to ask for; a `TableKey` among the keys has its own family, the others have `family`."""
    if TableKey in set(map(type, keys)):
        families = [key.family if isinstance(key, TableKey) else family for key in keys]
        plain = [key.key if isinstance(key, TableKey) else key for key in keys]
        prefixes = list(map(coder.prefix, families))
        return _divided(coder, families, plain, prefixes, list(map(coder.table_key, prefixes, plain)))
    prefix = coder.prefix(family)
    stored = coder.table_keys(prefix, keys)
    if prefix and stored:
        partition = coder.partition(prefix, b"")
        return BulkRead(repeat(family), keys, {partition: stored}, {partition: range(len(keys))})
    return _divided(coder, repeat(family), keys, repeat(prefix), stored)


def _divided(
    coder: EntryCoder[K, Any],
    families: Iterable[str | None],
    keys: Sequence[K],
    prefixes: Iterable[bytes],
    stored: Sequence[bytes],
) -> BulkRead[K]:
    by_partition: dict[int, list[bytes]] = {}
    places: dict[int, list[int]] = {}
    for place, (prefix, table_key) in enumerate(zip(prefixes, stored, strict=False)):
        partition = coder.partition(prefix, table_key)
        if partition not in places:
            by_partition[partition], places[partition] = [], []
        by_partition[partition].append(table_key)
        places[partition].append(place)
    return BulkRead(families, keys, by_partition, {**places})

"""Finds single entries in sealed Parquet files without Spark, reading only the row groups that may hold them.

Files are sorted by key. The manifest's key range says whether a file can hold a key, the footer in which row
group, and a binary search finds the row. Files never change, so footers and decoded row groups are kept in a
bounded cache that all views of a process may share. A row group is one ranged request; a footer is none where the
manifest has it, else one.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.entry_keys import plain_key
from dagster_adjunct.assets.reading.file_cache import FileCache
from dagster_adjunct.assets.reading.row_group import RowGroup, decode_group, range_of_group
from dagster_adjunct.assets.reading.stored_files import StoredFile
from dagster_adjunct.resources.bucketing.bucket_files import unpack_footer
from dagster_adjunct.resources.bucketing.writer import GROUP_KEYS
from dagster_adjunct.resources.schemas.plain_values import Plain, to_plain

if TYPE_CHECKING:
    import pyarrow.parquet as pq

    from dagster_adjunct.resources.bucketing.bucket_files import BucketLayout, Generation
    from dagster_adjunct.resources.objects.object_store import ObjectStore

Key = tuple[Plain, ...]
_TAIL = 64 * 1024


@dataclass(frozen=True, slots=True)
class Footer:
    """A file's metadata, and of each row group a key that none of its keys is less than.

    That is the group's first key where `exact`. Files written before these were kept tell by their statistics,
    and only of the first key column.
    """

    metadata: pq.FileMetaData
    starts: tuple[Key, ...]
    exact: bool

    def group_of(self, key: Key) -> int:
        """Return the last row group that may hold this key, or what follows it; earlier ones only if not `exact`."""
        return max(0, bisect_right(self.starts, key) - 1)


class KeyFiles:
    """The files of one generation, for lookups by key. `what` names the dataset and version in errors."""

    def __init__(
        self, store: ObjectStore, what: str, layout: BucketLayout, generation: Generation, cache: FileCache
    ) -> None:
        self.id = generation.id
        self._layout, self._cache = layout, cache
        self._place = f"{store.url}/{generation.folder}"
        self._as = layout.ddl  # a version whose columns have changed since reads the same files as others do, otherwise
        self._key, self._types = layout.key, layout.key_types
        self._plain = tuple(to_plain(kind) for kind in self._types)
        self._files = {
            file.bucket: (
                StoredFile(store, what, generation.folder, file),
                plain_key(self._types, self._plain, file.min_key),
                plain_key(self._types, self._plain, file.max_key),
            )
            for file in generation.files
        }

    def find(self, bucket: int, key: Key) -> tuple[RowGroup, int] | None:
        """Return the row group and row of this key, given in stored form, or None.

        Raises ManifestMismatchError when the file is missing or damaged.
        """
        stored = self._files.get(bucket)
        if stored is None:
            return None
        file, least, greatest = stored
        if key < least or (greatest and key > greatest):
            return None
        footer = self._footer(file)
        rows = self._group_at(file, footer, key)[1]
        row = rows.find(key)
        return None if row is None else (rows, row)

    def find_all(self, bucket: int, prefix: Key) -> Iterator[tuple[RowGroup, int, int]]:
        """Yield (row group, first row, row after the last) of the keys that begin so, in their order."""
        stored = self._files.get(bucket)
        if stored is None:
            return
        file, least, greatest = stored
        width = len(prefix)
        if prefix < least[:width] or (greatest and prefix > greatest[:width]):
            return
        footer = self._footer(file)
        group = footer.group_of(prefix)
        while group < len(footer.starts) and footer.starts[group][:width] <= prefix:
            rows = self._group(file, footer, group)
            first, after = rows.range_of(prefix)
            if after > first:
                yield rows, first, after
            group += 1

    def scan(self, bucket: int, start: Key, end: Key | None) -> Iterator[tuple[RowGroup, int, int]]:
        """Yield (row group, first row, row after the last) of the keys from `start` on and less than `end`.

        Both may be leading parts of keys; () is before all keys, None after all. A row group is read when it is
        asked for.
        """
        stored = self._files.get(bucket)
        if stored is None:
            return
        file, least, greatest = stored
        if (end is not None and least >= end) or (greatest and greatest[: len(start)] < start):
            return
        footer = self._footer(file)
        group, rows = self._group_at(file, footer, start)
        first = rows.first_from(start)
        while True:
            after = rows.rows if end is None else rows.first_from(end)
            if after > first:
                yield rows, first, after
            group, first = group + 1, 0
            if after < rows.rows or group == len(footer.starts) or (end is not None and footer.starts[group] >= end):
                return
            rows = self._group(file, footer, group)

    def _group_at(self, file: StoredFile, footer: Footer, key: Key) -> tuple[int, RowGroup]:
        """Return the row group in which this key is, if it is in the file, or where it would be."""
        group = footer.group_of(key)
        rows = self._group(file, footer, group)
        while not footer.exact and group and key < rows.key(0):
            group -= 1
            rows = self._group(file, footer, group)
        return group, rows

    # -- reading

    def _group(self, file: StoredFile, footer: Footer, group: int) -> RowGroup:
        def load() -> tuple[RowGroup, int]:
            start, length = range_of_group(footer.metadata, group)
            data = file.reading(lambda: file.store.get_range(file.key, start, length))
            if len(data) < length:
                raise file.damaged(f"it ends before its row group {group}")
            rows = file.reading(lambda: decode_group(footer.metadata, group, data, self._layout))
            return rows, rows.size

        return self._cache.get((self._place, self._as, file.file.bucket, group), load)

    def _footer(self, file: StoredFile) -> Footer:
        def load() -> tuple[Footer, int]:
            stored = file.file.footer
            tail = unpack_footer(stored) if stored is not None else file.reading(lambda: _tail(file))
            metadata = file.reading(lambda: _parse(tail))
            if metadata.num_rows != file.file.rows:
                raise file.damaged(f"it has {metadata.num_rows} rows")
            return self._described(metadata), 4 * len(tail)  # parsed, it takes a few times its stored size

        return self._cache.get((self._place, file.file.bucket), load)

    def _described(self, metadata: pq.FileMetaData) -> Footer:
        stored = (metadata.metadata or {}).get(GROUP_KEYS)
        if stored is not None:
            starts_of_groups = (plain_key(self._types, self._plain, key) for key in json.loads(stored))
            return Footer(metadata, tuple(starts_of_groups), True)
        columns = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        first = columns.index(self._key[0])
        starts: list[Key] = []
        for group in range(metadata.num_row_groups):
            stats = metadata.row_group(group).column(first).statistics
            # Without statistics: no less than the group before, since rows are sorted.
            known = (self._plain[0](stats.min),) if stats is not None and stats.has_min_max else ()
            starts.append(max(known, starts[-1] if starts else ()))
        return Footer(metadata, tuple(starts), False)


def _tail(file: StoredFile) -> bytes:
    """Return the file from its footer on, in one request unless the footer is very long."""
    size = file.file.size
    tail = file.store.get_range(file.key, max(0, size - _TAIL), min(size, _TAIL))
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if len(tail) < length <= size:
        tail = file.store.get_range(file.key, size - length, length)
    return tail[-length:]


def _parse(tail: bytes) -> pq.FileMetaData:
    import pyarrow as pa
    import pyarrow.parquet as pq

    return pq.read_metadata(pa.BufferReader(tail))

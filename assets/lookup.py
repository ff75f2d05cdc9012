"""Finds single entries in sealed Parquet files without Spark, reading only the row groups that may hold them.

Files are sorted by key. The manifest's key range says whether a file can hold a key, the footer's statistics
which row groups can, and a binary search finds the row. Files never change, so footers and row groups are kept
in a bounded cache that all views of a process may share.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from assets.keys import decode_key
from resources.errors import ManifestMismatchError, ObjectNotFoundError
from resources.streams.objectfile import open_object

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from resources.bucketing.files import BucketFile, BucketLayout, Generation
    from resources.objects.store import ObjectStore
    from resources.schema import Field

T = TypeVar("T")
_FOOTERS_KEPT = 256
_GROUP_BYTES_KEPT = 128 * 1024 * 1024


class _Lru(Generic[T]):
    """The most recently used values whose sizes add up to at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._values: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, load: Callable[[], tuple[T, int]]) -> T:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value, size = load()  # unlocked: two threads may load the same, which is only wasted work
        with self._lock:
            if key not in self._values:
                self._values[key] = (value, size)
                self._size += size
            while self._size > self._limit and len(self._values) > 1:
                _, (_, dropped) = self._values.popitem(last=False)
                self._size -= dropped
        return value


class FileCache:
    """Opened footers and decoded row groups, bounded; safe to share between views and threads."""

    def __init__(self, footers: int = _FOOTERS_KEPT, group_bytes: int = _GROUP_BYTES_KEPT) -> None:
        self.footers: _Lru[Footer] = _Lru(footers)
        self.groups: _Lru[pa.Table] = _Lru(group_bytes)


@dataclass(frozen=True, slots=True)
class Footer:
    """A file's metadata, and each row group's range of the first key column (None where it is unknown)."""

    metadata: pq.FileMetaData
    ranges: tuple[tuple[Any, Any] | None, ...]


class KeyFiles:
    """The files of one generation, for lookups by key. `what` names the dataset and version in errors."""

    def __init__(
        self, store: ObjectStore, what: str, layout: BucketLayout, generation: Generation, cache: FileCache
    ) -> None:
        self._store, self._what, self._layout = store, what, layout
        self._generation, self._cache = generation, cache
        self._key = tuple(layout.schema.field(name) for name in layout.key)
        self._files = {file.bucket: (file, _key_range(self._key, file)) for file in generation.files}

    @property
    def id(self) -> int:
        return self._generation.id

    def find(self, bucket: int, key: tuple[Any, ...]) -> dict[str, Any] | None:
        """Return the stored row of this key, hidden columns included, or None.

        Raises ManifestMismatchError when the file is missing or damaged.
        """
        if bucket not in self._files:
            return None
        file, span = self._files[bucket]
        if span is not None and not span[0] <= key <= span[1]:
            return None
        name = f"{self._generation.folder}/{file.name}"
        footer = self._cache.footers.get((self._store.url, name), lambda: (self._footer(name, file), 1))
        for group, bounds in enumerate(footer.ranges):
            if bounds is not None and not bounds[0] <= key[0] <= bounds[1]:
                continue
            place = (self._store.url, name, group)
            rows = self._cache.groups.get(place, partial(self._rows, name, file, footer, group))
            row = _search(rows, [field.name for field in self._key], key)
            if row is not None:
                return {column: rows.column(column)[row].as_py() for column in self._layout.columns}
        return None

    def _footer(self, name: str, file: BucketFile) -> Footer:
        metadata = self._reading(name, file, lambda: self._open(name, file, None).metadata)
        if metadata.num_rows != file.rows:
            raise self._damaged(name, file, f"it has {metadata.num_rows} rows")
        columns = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        first = columns.index(self._key[0].name)
        ranges: list[tuple[Any, Any] | None] = []
        for group in range(metadata.num_row_groups):
            stats = metadata.row_group(group).column(first).statistics
            ranges.append((stats.min, stats.max) if stats is not None and stats.has_min_max else None)
        return Footer(metadata, tuple(ranges))

    def _rows(self, name: str, file: BucketFile, footer: Footer, group: int) -> tuple[pa.Table, int]:
        columns = list(self._layout.columns)
        table = self._reading(
            name, file, lambda: self._open(name, file, footer.metadata).read_row_group(group, columns=columns)
        )
        return table.combine_chunks(), table.nbytes

    def _open(self, name: str, file: BucketFile, metadata: pq.FileMetaData | None) -> pq.ParquetFile:
        import pyarrow.parquet as pq

        return pq.ParquetFile(open_object(self._store, name, file.size), metadata=metadata, pre_buffer=True)

    def _reading(self, name: str, file: BucketFile, read: Callable[[], Any]) -> Any:
        import pyarrow as pa

        try:
            return read()
        except ObjectNotFoundError as error:
            raise self._damaged(name, file, "it is missing") from error
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(name, file, f"it can't be read: {str(error).splitlines()[0]}") from error

    def _damaged(self, name: str, file: BucketFile, found: str) -> ManifestMismatchError:
        return ManifestMismatchError(
            f"{self._what}: the manifest lists {name} with {file.rows} rows in {file.size} bytes, and {found}.",
            "Restore that object from a backup (its SHA-256 is in the manifest), or open an earlier version; other "
            "versions are untouched.",
        )


def _key_range(fields: Sequence[Field], file: BucketFile) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    if file.min_key is None or file.max_key is None:
        return None
    return decode_key(fields, file.min_key), decode_key(fields, file.max_key)


def _search(rows: pa.Table, names: Sequence[str], key: tuple[Any, ...]) -> int | None:
    """Return the row of this key in rows sorted by it, by halving."""
    columns = [rows.column(name) for name in names]
    low, high = 0, rows.num_rows
    while low < high:
        middle = (low + high) // 2
        if tuple(column[middle].as_py() for column in columns) < key:
            low = middle + 1
        else:
            high = middle
    if low < rows.num_rows and tuple(column[low].as_py() for column in columns) == key:
        return low
    return None

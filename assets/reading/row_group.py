"""One row group of a sealed file, decoded and searchable by key.

Rows are sorted by key. Key columns are searched in their stored form (schemas/plain_values.py) straight in Arrow's
buffers, so nothing is converted that is not asked for.
"""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from dagster_adjunct.resources.bucketing.files_before_evolution import as_laid_out
from dagster_adjunct.resources.objects.object_file import RangedFile
from dagster_adjunct.resources.schemas.plain_values import Plain, to_plain

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from dagster_adjunct.resources.bucketing.bucket_files import BucketLayout

# The codes of memoryview.cast, by Arrow type.
_CODES = {
    "int8": "b", "int16": "h", "int32": "i", "int64": "q", "date32": "i", "timestamp": "q", "float": "f", "double": "d",
}  # fmt: skip


class RowGroup:
    """The rows of one row group. Keys, and leading parts of keys, are tuples in stored form."""

    __slots__ = ("_keys", "_values", "rows", "size", "table")

    def __init__(self, table: pa.Table, layout: BucketLayout) -> None:
        self.table = table
        self.rows: int = table.num_rows
        self.size: int = table.nbytes
        columns = {name: _one_array(table.column(name)) for name in layout.columns}
        self._values = {name: _reader(column) for name, column in columns.items()}
        self._keys = [_searchable(columns[name], kind) for name, kind in zip(layout.key, layout.key_types, strict=True)]

    def key(self, row: int) -> tuple[Plain, ...]:
        """Return the key of this row."""
        return tuple(column[row] for column in self._keys)

    def find(self, key: tuple[Plain, ...]) -> int | None:
        """Return the row of this key."""
        row = self.first_from(key)
        if row < self.rows and self.key(row) == key:
            return row
        return None

    def first_from(self, key: tuple[Plain, ...]) -> int:
        """Return the first row whose key, as far as `key` goes, is not less; the number of rows if all are less."""
        low, high = 0, self.rows
        last = len(key) - 1
        for index, value in enumerate(key):
            column = self._keys[index]
            low = bisect_left(column, value, low, high)
            if index < last:
                high = bisect_right(column, value, low, high)
        return low

    def range_of(self, prefix: tuple[Plain, ...]) -> tuple[int, int]:
        """Return the first row whose key begins so, and the row after the last; the same number where none does."""
        low, high = 0, self.rows
        for column, value in zip(self._keys, prefix, strict=False):
            low, high = bisect_left(column, value, low, high), bisect_right(column, value, low, high)
        return low, high

    def value(self, name: str, row: int) -> Any:
        return self._values[name](row)

    def entry(self, names: Sequence[str], row: int) -> dict[str, Any]:
        """Return these columns of one row."""
        values = self._values
        return {name: values[name](row) for name in names}


def range_of_group(metadata: pq.FileMetaData, group: int) -> tuple[int, int]:
    """Return where a row group begins in its file, and its length, in bytes."""
    row_group = metadata.row_group(group)
    begins, ends = [], []
    for index in range(metadata.num_columns):
        column = row_group.column(index)
        at = column.data_page_offset
        if column.has_dictionary_page and column.dictionary_page_offset:
            at = min(at, column.dictionary_page_offset)
        begins.append(at)
        ends.append(at + column.total_compressed_size)
    return min(begins), max(ends) - min(begins)


def decode_group(metadata: pq.FileMetaData, group: int, data: bytes, layout: BucketLayout) -> RowGroup:
    """Return a row group from its bytes. Raises pyarrow's errors, or OSError, where they are damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    start, _ = range_of_group(metadata, group)
    # Only the group's own range is read through the window, whose end is where pyarrow expects the file's.
    source = pa.PythonFile(RangedFile(start + len(data), partial(_within, memoryview(data), start)), mode="r")
    file = pq.ParquetFile(source, metadata=metadata, pre_buffer=False, page_checksum_verification=True)
    table = file.read_row_group(group, columns=list(layout.columns), use_threads=False)
    return RowGroup(as_laid_out(table, layout).combine_chunks(), layout)


def _within(data: memoryview, start: int, at: int, count: int) -> memoryview:
    """Return bytes of a file of which only `data` is there, from `start` on."""
    if at < start:
        raise OSError(f"bytes at {at} are asked for, before the row group at {start}")
    return data[at - start : at - start + count]


class _Bytes(Sequence[bytes]):
    """Texts or binaries of one Arrow array as bytes."""

    __slots__ = ("_data", "_offsets")

    def __init__(self, array: pa.Array) -> None:
        self._offsets, self._data = _pieces(array)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: Any) -> Any:
        offsets = self._offsets
        return bytes(self._data[offsets[row] : offsets[row + 1]])


class _Unscaled(Sequence[int]):
    """The unscaled numbers of an Arrow array of decimals, 16 bytes each."""

    __slots__ = ("_data",)

    def __init__(self, array: pa.Array) -> None:
        self._data = memoryview(array.buffers()[1])[16 * array.offset : 16 * (array.offset + len(array))]

    def __len__(self) -> int:
        return len(self._data) // 16

    def __getitem__(self, row: Any) -> Any:
        return int.from_bytes(self._data[16 * row : 16 * row + 16], "little", signed=True)


class _Converted(Sequence[Plain]):
    """Any column as stored forms, each made when it is asked for."""

    __slots__ = ("_column", "_plain")

    def __init__(self, column: Any, plain: Callable[[Any], Plain]) -> None:
        self._column, self._plain = column, plain

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, row: Any) -> Any:
        return self._plain(self._column[row].as_py())


def _one_array(column: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return the only chunk: reading a value of it is faster. More than 2 GiB of text stay in chunks."""
    return column.chunk(0) if column.num_chunks == 1 else column


def _searchable(column: pa.Array | pa.ChunkedArray, kind: str) -> Sequence[Any]:
    """Return a key column, which has no nulls, as stored forms."""
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray) or not len(column):
        return _Converted(column, to_plain(kind))
    if kind in ("string", "binary"):
        return _Bytes(column)
    return _Unscaled(column) if kind.startswith("decimal") else cast(Sequence[int], _numbers(column))


def _reader(column: pa.Array | pa.ChunkedArray) -> Callable[[int], Any]:
    """Return what gives the value of a row as `as_py` does, which takes up to ten times as long.

    The usual types are read from Arrow's buffers, others as pyarrow reads them.
    """
    import pyarrow as pa
    import pyarrow.types as t

    read: Callable[[int], Any] | None = None
    if isinstance(column, pa.Array) and len(column):
        if t.is_string(column.type):
            read = _texts(column)
        elif t.is_timestamp(column.type):
            read = _instants(column)
        elif t.is_integer(column.type) or t.is_floating(column.type):
            read = _numbers(column).__getitem__
    if read is None:
        return lambda row: column[row].as_py()
    return _with_nulls(column, read) if column.null_count else read


def _with_nulls(column: pa.Array, read: Callable[[int], Any]) -> Callable[[int], Any]:
    bits, offset = memoryview(column.buffers()[0]), column.offset

    def value(row: int) -> Any:
        at = row + offset
        return read(row) if bits[at >> 3] >> (at & 7) & 1 else None

    return value


def _texts(column: pa.Array) -> Callable[[int], str]:
    offsets, data = _pieces(column)
    return lambda row: str(data[offsets[row] : offsets[row + 1]], "utf-8")


def _instants(column: pa.Array) -> Callable[[int], dt.datetime]:
    import pyarrow as pa

    micros = _numbers(column)
    epoch = pa.scalar(0, column.type).as_py()  # of the time zone class that pyarrow uses
    return lambda row: epoch + dt.timedelta(microseconds=micros[row])


def _pieces(array: pa.Array) -> tuple[memoryview, memoryview]:
    """Return the offsets of an array of texts or binaries, and what they point into."""
    _, offsets, data = array.buffers()
    ends = memoryview(offsets).cast("i")[array.offset : array.offset + len(array) + 1]
    return ends, memoryview(data) if data is not None else memoryview(b"")


def _numbers(array: pa.Array) -> Any:
    """Return an array of fixed width as a memoryview of the numbers in it."""
    code: Any = _CODES[str(array.type).partition("[")[0]]
    return memoryview(array.buffers()[1]).cast(code)[array.offset : array.offset + len(array)]

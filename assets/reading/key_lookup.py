"""Finds entries by key in sealed Parquet files without Spark, reading only the row groups that may
have them.

Files are sorted by key. The manifest's key range says whether a file may have a key, the footer
which row group, and a binary search finds the row. Keys are compared in *plain form* (see
`plain_converter`), as Arrow stores them, so that a key column is searched directly in Arrow's
buffers, and only the returned values are converted. A row group is one ranged request, and so is a
footer that the manifest lacks. Files never change, so footers and decoded row groups are kept in a
bounded cache, which readers may share.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import operator
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, InvalidOperation
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from dagster_adjunct.assets.reading.stored_file import StoredFile, list_generation_files
from dagster_adjunct.resources.bucketing.files import (
    BucketLayout,
    Generation,
    conform_to_layout,
    unpack_footer,
)
from dagster_adjunct.resources.bucketing.hashing import Plain, plain_converter
from dagster_adjunct.resources.bucketing.writer import GROUP_KEYS
from dagster_adjunct.resources.errors import NullKeyError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import np, pa, pc, pq, pt
from dagster_adjunct.resources.objects.arrow_files import RangedFile
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.schema import Field
from dagster_adjunct.resources.schemas.texts import parse_moment, text_form
from dagster_adjunct.resources.schemas.types import has_maps
from dagster_adjunct.resources.validation import validated

T = TypeVar("T")
_ROWS_READ_PER_KEY = 20
"""Up to how many rows a row group may have for each key that is looked for by its bytes, so that
reading them all costs less than searching for each key.
"""
_BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


def coerce_key(what: str, fields: Sequence[Field], key: object) -> tuple[Any, ...]:
    """Return `key` as one value for each key column, in the declared types.

    A key of one column may be a bare value; other keys are tuples in the order of the key, or
    mappings by column name. Values hash differently by type (1 as int and as bigint), so a value of
    the wrong type is an error, not a miss. `what` names the dataset in errors. Raises
    SchemaMismatchError and NullKeyError.
    """
    names = [field.name for field in fields]
    if isinstance(key, Mapping):
        if set(key) != set(names):
            raise SchemaMismatchError(
                f"{what}: the key has the columns {', '.join(map(str, key))}, expected"
                f" {', '.join(names)}.",
                "Give exactly the key columns.",
                argument="key",
            )
        values: tuple[Any, ...] = tuple(key[name] for name in names)
    elif isinstance(key, tuple | list):
        values = tuple(key)
    else:
        values = (key,)
    if len(values) != len(fields):
        raise SchemaMismatchError(
            f"{what}: the key has {len(values)} value(s), expected {len(names)}:"
            f" ({', '.join(names)}).",
            "Give one value for each key column, as a tuple in this order or as a dict.",
            argument="key",
        )
    return tuple(_coerce(what, field, value) for field, value in zip(fields, values, strict=True))


def key_from_text(what: str, fields: Sequence[Field], texts: Sequence[str]) -> tuple[Any, ...]:
    """Return the key that a command line gives as texts, one for each key column.

    Times are in ISO 8601, binary values in base64. Raises what `coerce_key` raises.
    """
    if len(texts) != len(fields):
        raise SchemaMismatchError(
            f"{what}: {len(texts)} key value(s) are given, expected {len(fields)}: "
            f"({', '.join(f.name for f in fields)}).",
            "Give one value for each key column, in this order.",
            argument="key",
        )
    values = []
    for field, text in zip(fields, texts, strict=True):
        try:
            _check_form(field.type, text)
            values.append(_text_parser(field.type)(text))
        except (ValueError, InvalidOperation) as error:
            raise _wrong_type_error(what, field, text) from error
    return coerce_key(what, fields, tuple(values))


def _check_form(kind: str, text: str) -> None:
    """Raise ValueError unless a text is written as in a file (docs/sources.md). Times are only
    checked when they are parsed.

    Python's own converters would take the digits of any script, and underscores between them.
    """
    if kind == "timestamp":
        return
    form = text_form(kind)
    if form is not None and not form.matches(text):
        raise ValueError


def decode_key(types: Sequence[str], encoded: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key that a manifest lists, in the encoding of `to_json_value`, as values of these
    types.
    """
    values = []
    for kind, value in zip(types, encoded, strict=True):
        if isinstance(value, str):
            values.append(_text_parser(kind)(value))
        else:
            values.append(value)
    return tuple(values)


_PARSERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(_BITS, int),
    "date": dt.date.fromisoformat,
    "timestamp": parse_moment,
    "decimal": Decimal,
    "binary": partial(base64.b64decode, validate=True),
}


def _text_parser(kind: str) -> Callable[[str], Any]:
    """Return the function that reads values of this type from texts."""
    return _PARSERS.get(kind.partition("(")[0], str)


def _coerce(what: str, field: Field, value: object) -> Any:
    """Return the value of a key column in its type. Raises NullKeyError or SchemaMismatchError."""
    if value is None:
        raise NullKeyError(
            f"{what}: key column {field.name!r} is null.",
            "Give a value: keys have no nulls.",
            column=field.name,
        )
    try:
        return _convert(field.type, value)
    except (TypeError, ValueError, OverflowError, InvalidOperation) as error:
        raise _wrong_type_error(what, field, value) from error


def is_out_of_range(error: BaseException) -> bool:
    """Whether `coerce_key` raised this error for a value that is out of its type's range, which
    no row can have.
    """
    return isinstance(error.__cause__, OverflowError | InvalidOperation)


_EXACT = Context(prec=76)  # twice the digits that a column may have


def _convert(kind: str, value: object) -> Any:
    """Return the value in this type.

    Raises TypeError or ValueError for a value of another type; OverflowError or InvalidOperation
    for one of this type that is too large or has too many digits.
    """
    if kind.startswith("decimal"):
        return _convert_decimal(kind, value)
    if kind in _BITS and not isinstance(value, bool):
        return _convert_integer(_BITS[kind], value)
    match kind, value:
        case "string", str():
            value.encode()  # raises for half of a surrogate pair, which can't be stored
            return str(value)
        case "timestamp", dt.datetime() if value.tzinfo is not None:
            return value.astimezone(dt.UTC)
        case "date", dt.date() if not isinstance(value, dt.datetime):
            return value
        case "binary", bytes() | bytearray():
            return bytes(value)
    raise TypeError


def _convert_integer(bits: int, value: object) -> int:
    """Return a whole number that fits this many bits; raises what `_convert` raises."""
    number = operator.index(value)  # type: ignore[arg-type]
    limit = 2 ** (bits - 1)
    if not -limit <= number < limit:
        raise OverflowError
    return number


def _convert_decimal(kind: str, value: object) -> Decimal:
    """Return an exact value of this decimal type; raises what `_convert` raises."""
    if isinstance(value, bool) or not isinstance(value, Decimal | int):
        raise TypeError
    precision, scale = map(int, kind.removeprefix("decimal(").removesuffix(")").split(","))
    exact = Decimal(value).quantize(Decimal(1).scaleb(-scale), context=_EXACT)
    is_unchanged = exact == Decimal(value)
    if is_unchanged and len(exact.as_tuple().digits) <= precision:
        return exact
    if exact.is_finite():  # too many digits
        raise OverflowError
    raise TypeError  # NaN


_EXPECTED = {
    **{kind: f"a whole number of {bits} bits" for kind, bits in _BITS.items()},
    "string": "a string",
    "date": "a date (not a date with a time)",
    "timestamp": "a datetime with a time zone",
    "decimal": "a Decimal or whole number that fits",
    "binary": "bytes",
}


def _wrong_type_error(what: str, field: Field, value: object) -> SchemaMismatchError:
    """Return the error for a key with a value of another type than its column."""
    expected = _EXPECTED.get(field.type.partition("(")[0], field.type)
    return SchemaMismatchError(
        f"{what}: key column {field.name!r} is {field.type}, and {value!r} ({type(value).__name__})"
        f" is given, expected {expected}.",
        "Convert the value first.",
        column=field.name,
    )


# The codes of memoryview.cast, by Arrow type.
_CODES = {
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "date32": "i",
    "timestamp": "q",
    "float": "f",
    "double": "d",
}


class RowGroup:
    """A decoded row group, searchable by key.

    Keys, and leading parts of keys, are tuples of values in plain form. Rows are numbered from 0.
    """

    __slots__ = ("_first_name", "_keys", "_values", "rows", "size", "table")

    def __init__(self, table: pa.Table, layout: BucketLayout) -> None:
        self.table = table
        self.rows: int = table.num_rows
        self.size: int = table.nbytes
        columns = {name: _single_chunk(table.column(name)) for name in layout.columns}
        self._values = {name: _reader(column) for name, column in columns.items()}
        self._first_name = layout.key[0]
        self._keys = [
            _searchable(columns[name], kind)
            for name, kind in zip(layout.key, layout.key_types, strict=True)
        ]

    def key(self, row: int) -> tuple[Plain, ...]:
        """Return the key of this row, in plain form."""
        return tuple(column[row] for column in self._keys)

    def keys(self, begin: int, end: int, parts: int) -> Iterable[tuple[Plain, ...]]:
        """Return the first `parts` values of the keys of the rows from `begin` up to `end`, in
        plain form.
        """
        columns = []
        for column in self._keys[:parts]:
            if isinstance(column, memoryview):
                columns.append(column[begin:end].tolist())
            else:
                columns.append([column[row] for row in range(begin, end)])
        return zip(*columns, strict=True)

    def find(self, key: tuple[Plain, ...]) -> int | None:
        """Return the number of the row with this key, or None."""
        row = self.first_at_or_after(key)
        if row < self.rows and self.key(row) == key:
            return row
        return None

    def first_at_or_after(self, key: tuple[Plain, ...]) -> int:
        """Return the first row whose key is not less than `key` (a key or leading part); if
        there is none, `rows`.
        """
        if not key:
            return 0
        *leading, last = key
        # Rows from `low` up to `high` have the leading values that were compared so far.
        low = 0
        high = self.rows
        for column, value in zip(self._keys, leading, strict=False):
            begin = bisect_left(column, value, low, high)
            high = bisect_right(column, value, begin, high)
            low = begin
        return bisect_left(self._keys[len(leading)], last, low, high)

    def rows_of(self, keys: Sequence[tuple[Plain, ...]]) -> Any:
        """Return the numbers (numpy) of the rows of these keys, or leading parts of keys (sorted).

        Keys of one column are looked for all at once, in numbers always and in bytes if they are
        many. Any others are looked for one by one.
        """
        first = self._keys[0]
        are_one_column = len(keys[0]) == 1
        if are_one_column and isinstance(first, memoryview):
            wanted = np.array([value for (value,) in keys], np.int64)
            values = np.asarray(first)
            begins = np.searchsorted(values, wanted, "left")
            ends = np.searchsorted(values, wanted, "right")
            return _count_from(begins, ends - begins)
        are_many = len(keys) * _ROWS_READ_PER_KEY > self.rows
        if are_one_column and are_many and isinstance(first, _Bytes):
            values = self.table.column(self._first_name).cast(pa.binary())
            wanted = pa.array([value for (value,) in keys], pa.binary())
            return pc.indices_nonzero(pc.is_in(values, value_set=wanted)).to_numpy()
        begins = np.array([self.first_at_or_after(key) for key in keys])
        ends = np.array([self.first_at_or_after(end_of_prefix(key)) for key in keys])
        return _count_from(begins, ends - begins)

    def value(self, name: str, row: int) -> Any:
        """Return the value of a column in one row."""
        return self._values[name](row)

    def entry(self, names: Sequence[str], row: int) -> dict[str, Any]:
        """Return the values of these columns in one row."""
        return {name: self._values[name](row) for name in names}


def _count_from(begins: Any, counts: Any) -> Any:
    """Return runs of numbers, one after the other: from each of `begins` on, as many as `counts`
    says (numpy). [3, 9] and [2, 1] give [3, 4, 9].
    """
    before = np.cumsum(counts) - counts
    return np.repeat(begins - before, counts) + np.arange(counts.sum())


class ByteRange(NamedTuple):
    """A part of a file: where it starts, and its length."""

    start: int
    length: int


def row_group_range(metadata: pq.FileMetaData, group: int) -> ByteRange:
    """Return where a row group is in its file."""
    starts = []
    ends = []
    for index in range(metadata.num_columns):
        column = metadata.row_group(group).column(index)
        start = column.data_page_offset
        if column.dictionary_page_offset:  # its dictionary comes before its data
            start = min(start, column.dictionary_page_offset)
        starts.append(start)
        ends.append(start + column.total_compressed_size)
    return ByteRange(min(starts), max(ends) - min(starts))


def decode_group(
    metadata: pq.FileMetaData, group: int, data: bytes, layout: BucketLayout
) -> RowGroup:
    """Decode a row group from its bytes. Raises pyarrow's errors or OSError for damaged bytes."""
    start = row_group_range(metadata, group).start
    # pyarrow reads only the group's range through the window, which ends where it expects the end
    # of the file.
    source = pa.PythonFile(
        RangedFile(start + len(data), partial(_read_window, memoryview(data), start)), mode="r"
    )
    file = pq.ParquetFile(
        source, metadata=metadata, pre_buffer=False, page_checksum_verification=True
    )
    table = file.read_row_group(group, columns=list(layout.stored.columns), use_threads=False)
    return RowGroup(conform_to_layout(table, layout).combine_chunks(), layout)


def _read_window(data: memoryview, start: int, at: int, count: int) -> memoryview:
    """Return `count` bytes from offset `at` of a file of which only `data`, from offset `start`
    on, was read.
    """
    if at < start:
        raise OSError(f"bytes at {at} are asked for, before the row group at {start}")
    return data[at - start : at - start + count]


class _Bytes:
    """The values of an Arrow array of strings or binaries, as bytes, by row."""

    __slots__ = ("_data", "_offsets")

    def __init__(self, array: pa.Array) -> None:
        self._offsets, self._data = _offsets_and_data(array)

    def __getitem__(self, row: Any) -> Any:
        offsets = self._offsets
        return bytes(self._data[offsets[row] : offsets[row + 1]])


class _Unscaled:
    """The unscaled numbers of an Arrow array of decimals (16 bytes each), by row."""

    __slots__ = ("_data",)

    def __init__(self, array: pa.Array) -> None:
        _, data = array.buffers()
        end = array.offset + len(array)
        self._data = memoryview(data)[16 * array.offset : 16 * end]

    def __getitem__(self, row: Any) -> Any:
        return int.from_bytes(self._data[16 * row : 16 * row + 16], "little", signed=True)


class _Converted:
    """The values of a column of any type in plain form, by row; converted on access."""

    __slots__ = ("_column", "_plain")

    def __init__(self, column: Any, plain: Callable[[Any], Plain]) -> None:
        self._column = column
        self._plain = plain

    def __getitem__(self, row: Any) -> Any:
        return self._plain(self._column[row].as_py())


def _single_chunk(column: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return the only chunk, which reads faster; columns of more than 2 GiB of text stay
    chunked.
    """
    if column.num_chunks == 1:
        return column.chunk(0)
    return column


def _searchable(column: pa.Array | pa.ChunkedArray, kind: str) -> Any:
    """Return the values of a key column in plain form as a sequence that `bisect` can search; it
    has no nulls.
    """
    has_one_buffer = not isinstance(column, pa.ChunkedArray) and len(column) > 0
    if not has_one_buffer:
        return _Converted(column, plain_converter(kind))
    if kind in ("string", "binary"):
        return _Bytes(column)
    if kind.startswith("decimal"):
        return _Unscaled(column)
    return _numbers(column)


def _reader(column: pa.Array | pa.ChunkedArray) -> Callable[[int], Any]:
    """Return a function that returns the value in a row as `as_py` does, up to ten times as fast.

    The common types are read from Arrow's buffers, others through pyarrow.
    """
    read: Callable[[int], Any] | None = None
    if isinstance(column, pa.Array) and len(column):
        if pt.is_string(column.type):
            read = _texts(column)
        elif pt.is_timestamp(column.type):
            read = _instants(column)
        elif pt.is_integer(column.type) or pt.is_floating(column.type):
            read = _numbers(column).__getitem__
    if read is None:
        return _through_pyarrow(column)
    if column.null_count:
        return _with_nulls(column, read)
    return read


def _through_pyarrow(column: pa.Array | pa.ChunkedArray) -> Callable[[int], Any]:
    """Return a function that returns the value in a row, of any type."""
    options = {}
    if has_maps(column.type):
        options["maps_as_pydicts"] = "strict"

    def value(row: int) -> Any:
        return column[row].as_py(**options)

    return value


def _with_nulls(column: pa.Array, read: Callable[[int], Any]) -> Callable[[int], Any]:
    """Return a function that returns what `read` does, and None where the column is null."""
    validity = memoryview(column.buffers()[0])  # a bit for each row, set if it has a value
    offset = column.offset

    def value(row: int) -> Any:
        bit = row + offset
        is_valid = validity[bit >> 3] >> (bit & 7) & 1
        if is_valid:
            return read(row)
        return None

    return value


def _texts(column: pa.Array) -> Callable[[int], str]:
    """Return a function that returns the string in a row."""
    offsets, data = _offsets_and_data(column)

    def value(row: int) -> str:
        return str(data[offsets[row] : offsets[row + 1]], "utf-8")

    return value


def _instants(column: pa.Array) -> Callable[[int], dt.datetime]:
    """Return a function that returns the timestamp in a row."""
    micros = _numbers(column)
    epoch = pa.scalar(0, column.type).as_py()  # with the tzinfo that pyarrow uses

    def value(row: int) -> dt.datetime:
        moment: dt.datetime = epoch + dt.timedelta(microseconds=micros[row])
        return moment

    return value


class _TextBuffers(NamedTuple):
    """The buffers of an array of strings or binaries: the value of row n is in `data` from
    `offsets[n]` to `offsets[n + 1]`.
    """

    offsets: memoryview
    data: memoryview


def _offsets_and_data(array: pa.Array) -> _TextBuffers:
    """Return the buffers of an array of strings or binaries."""
    _, offsets, data = array.buffers()
    # A slice shares its buffers with the whole array; these are the offsets of its own values.
    own_offsets = memoryview(offsets).cast("i")[array.offset : array.offset + len(array) + 1]
    if data is None:
        return _TextBuffers(own_offsets, memoryview(b""))
    return _TextBuffers(own_offsets, memoryview(data))


def _numbers(array: pa.Array) -> Any:
    """Return the numbers in an array of a type of fixed width, as a memoryview."""
    name, _, _ = str(array.type).partition("[")
    code: Any = _CODES[name]
    _, data = array.buffers()
    return memoryview(data).cast(code)[array.offset : array.offset + len(array)]


class Sized(NamedTuple, Generic[T]):
    """A value, and its size in bytes."""

    value: T
    size: int


@validated
class FileCache:
    """An LRU cache of footers and decoded row groups, which never change, with at most `max_bytes`
    in memory.

    Safe to share between readers, datasets and threads. Random lookups are fast while the decoded
    version fits: a row of eight short columns takes about 100 bytes, so the default of 512 MiB
    holds some 5M such rows. The newest value is kept even if it alone is larger. (A lookup takes
    13% longer with the LRUCache of cachetools.)
    """

    def __init__(self, max_bytes: int = 512 * 1024 * 1024) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._values: OrderedDict[Hashable, Sized[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, load: Callable[[], tuple[T, int]]) -> T:
        """Return the cached value of this key. If there is none, load it: `load` returns the value
        and its size in bytes.
        """
        with self._lock:
            known: Sized[T] | None = self._values.get(key)
            if known is not None:
                self._values.move_to_end(key)
                return known.value
        # without the lock: two threads may load the same value, which only wastes work
        loaded = Sized(*load())
        with self._lock:
            if key not in self._values:
                self._values[key] = loaded
                self.bytes += loaded.size
            while self.bytes > self.max_bytes and len(self._values) > 1:
                _, oldest = self._values.popitem(last=False)
                self.bytes -= oldest.size
        return loaded.value


Key = tuple[Plain, ...]
_TAIL_BYTES = 64 * 1024


def end_of_prefix(prefix: Key) -> Key:
    """Return the least tuple, in plain form, that is greater than all keys that begin with the
    values of `prefix`, of which there is at least one.
    """
    *before, last = prefix
    if isinstance(last, bytes):
        return (*before, last + b"\0")  # the least bytes after `last`
    return (*before, last + 1)


@dataclass(frozen=True, slots=True)
class Footer:
    """A file's metadata, and the first key of each row group."""

    metadata: pq.FileMetaData
    starts: tuple[Key, ...]

    def find_group(self, key: Key) -> int:
        """Return the number of the row group where this key, or the first that begins with it,
        is or would be.
        """
        return max(0, bisect_right(self.starts, key) - 1)


class RowPlace(NamedTuple):
    """A row: its number in its row group."""

    rows: RowGroup
    row: int


class RowSpan(NamedTuple):
    """Rows of a row group, from `first` (included) to `after` (excluded)."""

    rows: RowGroup
    first: int
    after: int


class _KeyFile(NamedTuple):
    """A file of a generation, with its first and last key in plain form; `last` is () if it is not
    known.
    """

    stored: StoredFile
    first: Key
    last: Key

    def may_have(self, start: Key, end: Key | None) -> bool:
        """Whether it may have keys from `start` (included) to `end` (excluded, None: no limit).
        Both may be leading parts of keys.
        """
        if end is not None and self.first >= end:
            return False
        is_last_known = bool(self.last)
        return not is_last_known or self.last[: len(start)] >= start


class KeyFiles:
    """The files of one generation, for lookups by key. `what` names the dataset and version in
    errors.
    """

    def __init__(
        self,
        store: ObjectStore,
        what: str,
        layout: BucketLayout,
        generation: Generation,
        cache: FileCache,
    ) -> None:
        self.id = generation.id
        self._layout = layout
        self._cache = cache
        self._place = f"{store.url}/{generation.folder}"
        # Part of cache keys: versions with different columns read the same files differently.
        self._read_as = layout.ddl
        self._types = layout.key_types
        self._plain = tuple(map(plain_converter, layout.key_types))
        self._files: dict[int, _KeyFile] = {}  # by bucket
        for stored in list_generation_files(store, what, generation):
            first = self._plain_key(stored.file.min_key)
            last = self._plain_key(stored.file.max_key)
            self._files[stored.file.bucket] = _KeyFile(stored, first, last)

    def find(self, bucket: int, key: Key) -> RowPlace | None:
        """Return the row with this key, given in plain form; None without one.

        Raises ManifestMismatchError when the file is missing or damaged.
        """
        file = self._files.get(bucket)
        if file is None or key < file.first:
            return None
        if file.last and key > file.last:
            return None
        footer = self._footer(file.stored)
        rows = self._group(file.stored, footer, footer.find_group(key))
        row = rows.find(key)
        if row is None:
            return None
        return RowPlace(rows, row)

    def rows_of(self, bucket: int, keys: Sequence[Key]) -> Iterator[tuple[RowGroup, Any]]:
        """Yield the row groups that may have rows of these keys, or leading parts of keys (in plain
        form, sorted, of equal length), and the numbers of these rows there (numpy).
        """
        file = self._files.get(bucket)
        if file is None or not keys:
            return
        # Only keys[low:high] may be in the file.
        parts = len(keys[0])
        low = bisect_left(keys, file.first[:parts])
        if file.last:
            high = bisect_right(keys, file.last[:parts])
        else:
            high = len(keys)
        if low >= high:
            return
        footer = self._footer(file.stored)
        for group in range(len(footer.starts)):
            if group > 0:  # a key that begins before a row group may go on there
                begin = bisect_left(keys, footer.starts[group][:parts], low, high)
            else:
                begin = low
            if group + 1 < len(footer.starts):
                end = bisect_left(keys, footer.starts[group + 1], low, high)
            else:
                end = high
            if begin < end:
                rows = self._group(file.stored, footer, group)
                yield rows, rows.rows_of(keys[begin:end])

    def scan(self, bucket: int, start: Key, end: Key | None) -> Iterator[RowSpan]:
        """Yield the rows of the keys from `start` (included) to `end` (excluded).

        Both are keys in plain form, or leading parts of them. () is before all keys, None after
        all. Row groups are read on demand.
        """
        file = self._files.get(bucket)
        if file is None or not file.may_have(start, end):
            return
        footer = self._footer(file.stored)
        first_group = footer.find_group(start)
        for group in range(first_group, len(footer.starts)):
            if end is not None and group > first_group and footer.starts[group] >= end:
                return
            rows = self._group(file.stored, footer, group)
            first = 0
            if group == first_group:
                first = rows.first_at_or_after(start)
            if end is not None:
                after = rows.first_at_or_after(end)
            else:
                after = rows.rows
            if after > first:
                yield RowSpan(rows, first, after)
            if after < rows.rows:  # the end is in this row group
                return

    # -- reading

    def _plain_key(self, encoded: Sequence[Any] | None) -> Key:
        """Return a key that a manifest lists, in plain form; () for None."""
        if encoded is None:
            return ()
        values = decode_key(self._types, encoded)
        return tuple(plain(value) for plain, value in zip(self._plain, values, strict=True))

    def _group(self, file: StoredFile, footer: Footer, group: int) -> RowGroup:
        """Return a row group of a file, from the cache or the store."""

        def load() -> Sized[RowGroup]:
            start, length = row_group_range(footer.metadata, group)
            data = file.reading(lambda: file.store.get_range(file.key, start, length))
            if len(data) < length:
                raise file.damaged(f"it ends before its row group {group}")
            rows = file.reading(lambda: decode_group(footer.metadata, group, data, self._layout))
            return Sized(rows, rows.size)

        return self._cache.get((self._place, self._read_as, file.file.bucket, group), load)

    def _footer(self, file: StoredFile) -> Footer:
        """Return the footer of a file, from the cache, the manifest or the store."""

        def load() -> Sized[Footer]:
            stored = file.file.footer
            if stored is not None:
                tail = unpack_footer(stored)
            else:
                tail = file.reading(lambda: _read_tail(file))
            metadata = file.reading(lambda: pq.read_metadata(pa.BufferReader(tail)))
            if metadata.num_rows != file.file.rows:
                raise file.damaged(f"it has {metadata.num_rows} rows")
            starts = (metadata.metadata or {}).get(GROUP_KEYS)
            if starts is None:
                raise file.damaged("it does not list the first keys of its row groups")
            keys = tuple(map(self._plain_key, json.loads(starts)))
            # parsed, it takes about four times its stored size
            return Sized(Footer(metadata, keys), 4 * len(tail))

        return self._cache.get((self._place, file.file.bucket), load)


def _read_tail(file: StoredFile) -> bytes:
    """Return the end of the file, from the start of its footer on.

    One request, two if the footer is longer than `_TAIL_BYTES`.
    """
    size = file.file.size
    tail = file.store.get_range(file.key, max(0, size - _TAIL_BYTES), min(size, _TAIL_BYTES))
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if len(tail) < length <= size:
        tail = file.store.get_range(file.key, size - length, length)
    return tail[-length:]

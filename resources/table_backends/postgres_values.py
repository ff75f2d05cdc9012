"""How values are sent to PostgreSQL and read back: unchanged, except JSON, nested values and lists,
which are sent as text.

A statement gets one array per column. In it a list would be taken for a second dimension, so lists
are written as text, in the way the server prints arrays. An Arrow batch is copied as CSV into a
staging table, from which one statement writes all rows, without Python values (`stage_batch`). If
single values must be inspected, because of other types than the columns', lists, JSON, or defaults
of only some messages, it is written row by row (`write_plan.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.table_backends.columns import (
    Column,
    Kind,
    OutOfRangeError,
    declared_digits,
    list_checker,
    make_checker,
)
from dagster_adjunct.resources.table_backends.nested_values import (
    json_reader,
    json_writer,
    write_json,
)
from dagster_adjunct.resources.table_backends.write_plan import RowCodec
from dagster_adjunct.resources.tables.arrow import ArrowEntries
from dagster_adjunct.resources.tables.operation import Conditions, Operation, OperationKind

if TYPE_CHECKING:
    from psycopg import AsyncConnection, AsyncCursor
    from psycopg.abc import Loader

LEAST = 200  # the fewest entries that are worth a staging table; below, arrays are as fast
_PLACE = "__place"
SOURCE = "__source"
POSITION = "__position"
TIE = "__tie"
TIME = "__time"


@dataclass(frozen=True, slots=True)
class StagingShape:
    """What the SQL of a staged batch depends on: batches of the same shape use the same table and
    statements.

    - `columns`: those of the staging table; `constants`: those with one value for all rows, which
      is not staged.
    - `puts`: rows are put as whole records. Columns of the table that are not in the shape become
      null.
    - `sets`, `adds`: the columns that updates set, and those to which they add.
    - `begins`: updates have defaults, so a row is the whole record to create if there is none.

    `TIME` is among the columns if the time for `newest_by` is not that in the record.
    """

    columns: tuple[str, ...]
    constants: tuple[str, ...]
    puts: bool
    sets: tuple[str, ...]
    adds: tuple[str, ...]
    begins: bool
    conditions: Conditions

    @property
    def inserts(self) -> bool:
        """Whether the batch creates missing records."""
        return self.puts or self.begins


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """An operation with `count` entries as CSV with one row per key, whose columns are those of the
    shape.

    The first column is the index of the key's last entry. `constants` are the values of the shape's
    constants. `same_key` maps that index to the indices of all entries of the key; None if no key
    has several.
    """

    shape: StagingShape
    constants: tuple[Any, ...]
    csv: memoryview
    rows: int
    count: int
    same_key: Mapping[int, Sequence[int]] | None

    def missing(self, present: set[int]) -> list[int]:
        """The indices of all entries whose row is not in `present`, which has the first column
        of rows.
        """
        if self.same_key is None:
            return [place for place in range(self.count) if place not in present]
        return [
            place
            for last, places in self.same_key.items()
            if last not in present
            for place in places
        ]


class _NotStaged(Exception):
    """The batch has to be written row by row."""


def stage_batch(codec: RowCodec, operation: Operation[Any]) -> StagedBatch | None:
    """Return the operation as a batch to copy into a staging table; None if it must be written
    row by row.
    """
    entries = operation.entries
    if operation.kind not in (OperationKind.PUT, OperationKind.UPDATE):
        return None
    if not isinstance(entries, ArrowEntries) or len(entries) < LEAST:
        return None
    try:
        return _stage(codec, operation, entries)
    except _NotStaged:
        return None


def _stage(codec: RowCodec, operation: Operation[Any], entries: ArrowEntries) -> StagedBatch:
    """Return the operation as a staged batch; raises _NotStaged if it must be written row by
    row.
    """
    keys = _keys(codec, entries)
    sets, adds = _parts(entries)
    _drop_key_columns(sets, keys)
    defaults = _defaults(entries, keys, sets, adds)
    if not set(codec.key).isdisjoint(adds):
        raise _NotStaged
    written = {**keys, **defaults, **sets, **adds}
    cast = {
        name: _cast_exactly(codec.columns.get(name), column, adding=name in adds)
        for name, column in written.items()
    }
    cast |= _marks(codec, entries, operation.conditions, cast)
    constants = {}
    for name in defaults:
        if _is_constant(cast[name]):
            constants[name] = cast.pop(name)[0].as_py()
    varying = [name for name in defaults if name not in constants]
    merged = _merge_by_key(cast, codec.key, adds, varying)
    if merged.same_key is not None and operation.conditions:
        raise _NotStaged  # which of a key's entries are applied depends on the earlier ones
    puts = operation.kind is OperationKind.PUT
    shape = StagingShape(
        columns=tuple(merged.rows.column_names),
        constants=tuple(constants),
        puts=puts,
        sets=tuple(sets),
        adds=tuple(adds),
        begins=not puts and entries.default_records is not None,
        conditions=operation.conditions,
    )
    return StagedBatch(
        shape,
        tuple(constants.values()),
        _csv(merged.rows),
        rows=merged.rows.num_rows,
        count=len(entries),
        same_key=merged.same_key,
    )


def _keys(codec: RowCodec, entries: ArrowEntries) -> dict[str, Any]:
    """The key columns by name; raises _NotStaged if they have nulls, or other names than the
    table's.
    """
    if sorted(entries.key_names) != sorted(codec.key):
        raise _NotStaged
    keys = dict(zip(entries.key_names, entries.key.flatten(), strict=True))
    if any(column.null_count for column in keys.values()):
        raise _NotStaged
    return keys


def _drop_key_columns(records: dict[str, Any], keys: Mapping[str, Any]) -> None:
    """Drop the key's columns from what records set. Raises _NotStaged if one differs from the
    key.
    """
    for name, column in keys.items():
        if name in records and not records.pop(name).equals(column):
            raise _NotStaged


def _is_constant(column: Any) -> bool:
    """Whether all values are equal, or all are null."""
    if column.null_count:
        return bool(column.null_count == len(column))
    return pc.all(pc.equal(column, column[0])).as_py() is True


def _marks(
    codec: RowCodec, entries: ArrowEntries, conditions: Conditions, written: Mapping[str, Any]
) -> dict[str, Any]:
    """The columns that conditions need, by name.

    `written` are the columns of the batch, of which one may be the time.
    """
    if not conditions:
        return {}
    sources = _without_nulls(entries.sources)
    positions = _without_nulls(entries.positions)
    marks: dict[str, Any] = {}
    if conditions.idempotent:
        marks = {SOURCE: sources, POSITION: positions}
    if conditions.newest_by is not None:
        column = _without_nulls(entries.times)
        time = _cast_exactly(codec.columns.get(conditions.newest_by), column, adding=False)
        marks[TIE] = _ties(sources, positions)
        record_times = written.get(conditions.newest_by)
        if record_times is None or not time.equals(record_times):
            marks[TIME] = time
    return marks


def _without_nulls(column: Any) -> Any:
    """The column; raises _NotStaged if it is missing or has nulls."""
    if column is None or column.null_count:
        raise _NotStaged
    return column


def _ties(sources: Any, positions: Any) -> Any:
    """`Mark.tie` of the mark with each source and position."""
    encoded = sources.dictionary_encode()  # few sources are distinct
    partitions = pc.replace_substring_regex(encoded.dictionary.cast(pa.string()), r"~\d+$", "")
    offsets = pc.replace_substring_regex(
        positions.cast(pa.string()), "^[^:]*(:|$)", "", max_replacements=1
    )
    return pc.binary_join_element_wise(partitions.take(encoded.indices), offsets, " ")


def _parts(entries: ArrowEntries) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns that records set and those to which they add, by name.

    Raises _NotStaged if a column is in both, if there is none, or if records change columns in
    another way.
    """
    records = _without_nulls(entries.records)
    if not entries.typed:
        return _columns(records), {}
    parts = {name: _without_nulls(part) for name, part in _columns(records).items()}
    if not parts.keys() <= {"set", "add"}:
        raise _NotStaged
    sets = _columns(parts["set"]) if "set" in parts else {}
    adds = _columns(parts["add"]) if "add" in parts else {}
    sets.update({name: pa.nulls(len(entries)) for name in entries.remove})
    if not sets.keys().isdisjoint(adds) or not sets | adds:
        raise _NotStaged
    return sets, adds


def _defaults(
    entries: ArrowEntries, keys: dict[str, Any], sets: dict[str, Any], adds: dict[str, Any]
) -> dict[str, Any]:
    """The columns of a new record that come from defaults only, by name.

    Left out are columns that the updates set, and columns to which they add. Raises _NotStaged if
    the default of such a sum is neither 0 nor null, or if it is 0 and an added number is null.
    """
    if entries.default_records is None:
        return {}
    defaults = _columns(_without_nulls(entries.default_records))
    _drop_key_columns(defaults, keys)
    for name, added in adds.items():
        # With a default of 0 or null, a new record has the number that is added: the column is the
        # same for both.
        default = defaults.pop(name, None)
        is_null = default is None or default.null_count == len(default)
        if is_null:
            continue
        if added.null_count or pc.all(pc.equal(_without_nulls(default), 0)).as_py() is not True:
            raise _NotStaged
    return {name: column for name, column in defaults.items() if name not in sets}


def _columns(records: Any) -> dict[str, Any]:
    """The columns of an array of structs, by name."""
    names = [field.name for field in records.type]
    return dict(zip(names, records.flatten(), strict=True))


def _cast_exactly(column: Column | None, array: Any, *, adding: bool) -> Any:
    """The array in a form that CSV gives the column exactly; raises _NotStaged if single values
    must be inspected.

    `adding`: its values are added to the column.
    """
    if column is None:
        raise _NotStaged
    type_ = array.type
    if pa.types.is_floating(type_):
        return _cast_floats(column, array)
    if pa.types.is_null(type_) and not adding:
        return array.cast(pa.string())
    if not _fits_exactly(column, type_, adding=adding):
        raise _NotStaged
    if column.kind is Kind.STRING:
        _check_texts(column, array)
    if column.kind is Kind.TIMESTAMP:
        # The connection's time zone is UTC, and Arrow takes 20 times as long to write zones.
        return array.cast(pa.timestamp("us", type_.tz), safe=False).cast(pa.timestamp("us"))
    return array


def _fits_exactly(column: Column, type_: Any, *, adding: bool) -> bool:
    """Whether a column takes all values of an Arrow type, which has no floats, as they are.

    `adding`: they are added to the column, which must have numbers.
    """
    kind = column.kind
    if pa.types.is_integer(type_):
        is_unlimited = kind is Kind.DECIMAL and declared_digits(column) is None
        return is_unlimited or kind in (Kind.INTEGER, Kind.FLOAT)
    if kind is Kind.DECIMAL:
        return _holds_decimals(column, type_)
    if adding:
        return False
    if kind is Kind.STRING:
        is_text = pa.types.is_string(type_) or pa.types.is_large_string(type_)
        pads_or_cuts = column.type in ("character", "char", "bpchar", "name")
        return bool(is_text and not pads_or_cuts)
    if kind is Kind.TIMESTAMP and _second_digits(column) is None:
        return bool(pa.types.is_timestamp(type_) and type_.tz is not None)
    if kind is Kind.BOOLEAN:
        return bool(pa.types.is_boolean(type_))
    return kind is Kind.DATE and bool(pa.types.is_date32(type_))


def _cast_floats(column: Column, array: Any) -> Any:
    """The floats as CSV gives them to the column exactly; raises _NotStaged for other columns, NaN
    and infinity.
    """
    if column.kind is not Kind.FLOAT or pc.all(pc.is_finite(array)).as_py() is False:
        raise _NotStaged
    if pa.types.is_float64(array.type) or column.type in ("real", "float4", "float"):
        return array
    return array.cast("double")


def _check_texts(column: Column, array: Any) -> None:
    """Raise _NotStaged for texts that are too long, or that would end the CSV data: a line with
    only \\. does.
    """
    most = _text_limit(column)
    if most is not None and pc.any(pc.greater(pc.utf8_length(array), most)).as_py():
        raise _NotStaged
    if pc.any(pc.match_substring(array, "\\.")).as_py():
        raise _NotStaged


def _holds_decimals(column: Column, type_: Any) -> bool:
    """Whether the column can hold all decimals of an Arrow type exactly."""
    if not pa.types.is_decimal(type_):
        return False
    digits = declared_digits(column)
    return digits is None or (
        type_.scale <= digits.scale
        and type_.precision - type_.scale <= digits.precision - digits.scale
    )


class _MergedEntries(NamedTuple):
    """A batch with one row per key, and `StagedBatch.same_key`."""

    rows: pa.Table
    same_key: Mapping[int, Sequence[int]] | None


def _merge_by_key(
    columns: dict[str, Any], key: Sequence[str], adds: dict[str, Any], defaults: Sequence[str]
) -> _MergedEntries:
    """Merge the entries of each key into one row, whose first column is `_PLACE`.

    The row has the sum of the numbers to add, the first entry's value in the columns `defaults`,
    and the last entry's in all others. Raises _NotStaged for keys with floats, and for sums that
    may not be exact.
    """
    count = len(next(iter(columns.values())))
    table = pa.table({_PLACE: pa.array(np.arange(count, dtype=np.int32)), **columns})
    keyed = table.select([_PLACE, *key, *adds])
    wanted: list[Any] = [(_PLACE, "min"), (_PLACE, "max"), *((name, "sum") for name in adds)]
    if any(pa.types.is_floating(columns[name].type) for name in key):
        raise _NotStaged  # Arrow would tell -0.0 from 0.0, which are one key
    groups = keyed.group_by(list(key), use_threads=False).aggregate(wanted)
    if groups.num_rows == count:
        return _MergedEntries(table, None)
    for name in adds:
        _check_sums(columns[name], count)
    last = groups.column(f"{_PLACE}_max").combine_chunks()
    first = groups.column(f"{_PLACE}_min").combine_chunks()
    merged = {_PLACE: last}
    for name in key:
        merged[name] = groups.column(name)
    for name in columns:
        if name not in adds and name not in key:
            chosen = first if name in defaults else last
            merged[name] = table.column(name).take(chosen)
    for name in adds:
        merged[name] = groups.column(f"{name}_sum")
    listed = keyed.group_by(list(key), use_threads=False).aggregate([(_PLACE, "list")])
    places = listed.column(f"{_PLACE}_list").to_pylist()
    return _MergedEntries(pa.table(merged), {max(same): same for same in places})


def _check_sums(column: Any, count: int) -> None:
    """Raise _NotStaged unless sums are exact, in whatever order they are computed."""
    if not pa.types.is_integer(column.type):
        raise _NotStaged
    extremes = pc.min_max(column).as_py()
    greatest = max(abs(extremes["min"] or 0), abs(extremes["max"] or 0))
    if greatest * count >= 2**63:
        raise _NotStaged


def _csv(table: pa.Table) -> memoryview:
    """The rows as CSV without a header, every value in quotes, nulls empty."""
    from pyarrow import csv

    sink = pa.BufferOutputStream()
    csv.write_csv(table, sink, csv.WriteOptions(include_header=False, quoting_style="all_valid"))
    return memoryview(sink.getvalue())


AS_TEXT = (Kind.JSON, Kind.LIST, Kind.NESTED)


def postgres_checker(column: Column) -> Callable[[Any], Any]:
    """Return the checker of `make_checker`, which also rejects values that the server would change
    without an error: it cuts texts off or adds blanks, and rounds times.
    """
    if column.element is not None:
        return list_checker(postgres_checker(column.element))
    check = make_checker(column)
    find_change = _change_finder(column)
    if find_change is None:
        return check

    def checked(value: Any) -> Any:
        normalized = check(value)
        change = find_change(normalized)
        if change is not None:
            raise OutOfRangeError(change)
        return normalized

    return checked


_LONGEST_NAME = 63  # bytes


def _change_finder(column: Column) -> Callable[[Any], str | None] | None:
    """Return the function that says how the server would change a value; None if it changes
    none.
    """
    most = _text_limit(column)
    if column.type == "name":
        return _cut_name
    if most is not None and column.type in ("character", "char", "bpchar"):
        return partial(_padded_text, most)
    if most is not None:
        return partial(_cut_text, most)
    if (digits := _second_digits(column)) is not None:
        return partial(_rounded_time, digits)
    return None


def _cut_name(text: str) -> str | None:
    """Return that a text is too long for PostgreSQL's type name; None if it is not."""
    is_cut = len(text.encode()) > _LONGEST_NAME
    return f"too long, expected at most {_LONGEST_NAME} bytes" if is_cut else None


def _cut_text(most: int, text: str) -> str | None:
    """Return that a text has more than `most` characters, the column's limit; None if not."""
    return f"too long, expected at most {most} characters" if len(text) > most else None


def _padded_text(size: int, text: str) -> str | None:
    """Return that a text has not exactly `size` characters, the column's size; None if it has."""
    if len(text) >= size:
        return _cut_text(size, text)
    return f"expected exactly {size} characters: the column adds blanks to shorter texts"


def _rounded_time(digits: int, moment: datetime) -> str | None:
    """Return that a time has more `digits` of a second than the column; None if it has not."""
    if moment.microsecond % 10 ** (6 - digits) == 0:
        return None
    return f"the column would round it, expected at most {digits} digits of a second's fraction"


def _second_digits(column: Column) -> int | None:
    """How many digits of a second a column of times keeps; None for microseconds, and for other
    columns.
    """
    declared = declared_digits(column)  # timestamp(3) keeps 3
    if column.kind is not Kind.TIMESTAMP or declared is None:
        return None
    keeps_microseconds = declared.precision >= 6
    return None if keeps_microseconds else declared.precision


def _text_limit(column: Column) -> int | None:
    """The greatest number of characters in a column, as in varchar(10); None if it has no limit
    or other values.
    """
    digits = None
    if column.kind is Kind.STRING:
        digits = declared_digits(column)
    if digits is None:
        return None
    return digits.precision


def postgres_encoder(column: Column) -> Callable[[Any], Any] | None:
    """Return the function that turns a checked value into the form that is sent; None if it is
    sent unchanged.
    """
    if column.kind is Kind.LIST:
        return format_array
    if column.nested is not None:
        to_json = json_writer(column.nested)
        return lambda value: write_json(to_json(value))
    if column.kind is Kind.JSON:
        return json.dumps
    return None


def postgres_decoder(column: Column) -> Callable[[Any], Any] | None:
    """Return the function that normalizes a value as the driver returns it; None if it needs no
    change.
    """
    if column.kind is Kind.LIST:
        assert column.element is not None
        item = postgres_decoder(column.element)
        return item and (lambda values: [v if v is None else item(v) for v in values])
    if column.nested is not None:
        return json_reader(column.nested)
    return {Kind.TIMESTAMP: _utc, Kind.DECIMAL: _finite}.get(column.kind)


def format_array(values: Iterable[Any]) -> str:
    """Format a list as the server prints arrays: {1,NULL,"a"}; several times faster than the
    driver does.
    """
    return (
        "{"
        + ",".join(["NULL" if value is None else _TEXTS[type(value)](value) for value in values])
        + "}"
    )


def _quoted(text: str) -> str:
    """Return a text in double quotes, as in a printed array."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


class _Texts(dict[type, Callable[[Any], str]]):
    """How to write values of each type in an array; a subclass, such as of str or datetime, is
    written as its base.
    """

    def __missing__(self, kind: type) -> Callable[[Any], str]:
        writer = next((self[known] for known in kind.__mro__ if known in self), str)
        self[kind] = writer
        return writer


_TEXTS = _Texts(
    {
        str: _quoted,
        bool: lambda value: "t" if value else "f",
        int: int.__repr__,
        float: float.__repr__,
        Decimal: str,
        datetime: lambda moment: f'"{moment.isoformat()}"',
        date: date.isoformat,
        bytes: lambda value: f'"\\\\x{value.hex()}"',
    }
)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a value that no Python value can hold: its text, as the server prints it, and
    why not.
    """

    text: str
    why: str


# Types of which the server can store values that Python does not have, such as infinity or years
# before Christ.
_WIDER_TYPES = (
    "date",
    "timestamp",
    "timestamptz",
    "time",
    "timetz",
    "interval",
    "numeric",
    "text",
    "varchar",
    "bpchar",
)


def tolerant_cursor(connection: AsyncConnection[Any]) -> AsyncCursor[Any]:
    """Return a cursor whose results in text format have an `Unreadable` in place of a value that
    Python can't hold.
    """
    from psycopg.pq import Format

    cursor = connection.cursor()
    for name in _WIDER_TYPES:
        type_info = cursor.adapters.types[name]
        plain = cursor.adapters.get_loader(type_info.oid, Format.TEXT)
        assert plain is not None
        cursor.adapters.register_loader(type_info.oid, _tolerant_loader(plain))
    return cursor


def _tolerant_loader(plain: type[Loader]) -> type[Loader]:
    """Return a loader that returns an `Unreadable` where `plain` raises."""
    from psycopg import Error
    from psycopg.adapt import Loader

    class Tolerant(Loader):
        def __init__(self, oid: int, context: Any = None) -> None:
            super().__init__(oid, context)
            self._plain = plain(oid, context)

        def load(self, data: Any) -> Any:
            try:
                return self._plain.load(data)
            except (Error, ValueError, ArithmeticError) as error:
                return Unreadable(bytes(data).decode(errors="replace"), str(error))

    return Tolerant


class FoundUnreadable(NamedTuple):
    """An unreadable value, and the place in its row at which it was found."""

    place: int
    value: Unreadable


def find_unreadable(values: Iterable[Any]) -> FoundUnreadable | None:
    """The first of the values that is, or contains, an `Unreadable`; None if there is none."""
    for place, value in enumerate(values):
        items = value if isinstance(value, list) else [value]
        found = next((item for item in items if isinstance(item, Unreadable)), None)
        if found is not None:
            return FoundUnreadable(place, found)
    return None


def _finite(number: Any) -> Any:
    """Return the number; ValueError for NaN and infinity."""
    if not number.is_finite():
        raise ValueError("it is no finite number")
    return number


def _utc(moment: Any) -> Any:
    """Return the time in UTC; without a time zone it is one in UTC."""
    if moment.tzinfo is None:
        return moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC)


def split_repeated_keys(
    operation: Operation[Any],
) -> Iterator[tuple[list[int] | None, Operation[Any]]]:
    """Split an operation with conditions, so that a part has one entry per key and can be staged.

    Yields the parts in the order in which to send them, each with the indices of its entries (None:
    all). The first part has the first entry of every key, the second part the second entry of each
    key that has one, and so on: a staged statement can't decide whether an entry is applied after
    an earlier one of its key. Once fewer than `LEAST` keys have entries left, the last part has all
    of these entries, and is written row by row. An operation without conditions, or too small to be
    staged, is one part.
    """
    entries = operation.entries
    if not operation.conditions or not isinstance(entries, ArrowEntries) or len(entries) < LEAST:
        yield None, operation
        return

    earlier = _count_earlier(entries)
    turn = 0  # how many earlier entries of their keys the entries of the part have
    last = int(earlier.max())
    while turn <= last:
        chosen = np.flatnonzero(earlier == turn)
        if len(chosen) < LEAST:
            chosen = np.flatnonzero(earlier >= turn)
            turn = last  # this part is the last
        if len(chosen) == len(entries):
            yield None, operation
        else:
            places = chosen.tolist()
            yield places, operation.with_entries(entries.take(places))
        turn += 1


def _count_earlier(entries: ArrowEntries) -> np.ndarray[Any, Any]:
    """For each entry, the number of earlier entries of its key."""
    # A number for each distinct key, from 0.
    keys = np.zeros(len(entries), dtype=np.int64)
    for column in entries.key.flatten():
        encoded = column.dictionary_encode()
        distinct = len(encoded.dictionary)  # also the number of null
        numbers = encoded.indices.fill_null(distinct).to_numpy()
        _, keys = np.unique(keys * (distinct + 1) + numbers, return_inverse=True)
    # Sorted by key, and in their order within it, entries have the distance to their key's first.
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    firsts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    counts = np.diff(np.r_[firsts, len(entries)])
    earlier = np.empty(len(entries), dtype=np.int64)
    earlier[order] = np.arange(len(entries)) - np.repeat(firsts, counts)
    return earlier

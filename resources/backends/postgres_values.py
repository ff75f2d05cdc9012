"""How values are sent to PostgreSQL and read back: unchanged, except JSON and lists, which are sent
as text.

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
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.backends.columns import (
    Column,
    Kind,
    OutOfRangeError,
    declared_digits,
    make_checker,
)
from dagster_adjunct.resources.backends.write_plan import RowCodec
from dagster_adjunct.resources.lazy_modules import np, pa, pc
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


def stage_batch(codec: RowCodec, operation: Operation[Any]) -> StagedBatch | None:
    """Return the operation as a batch to copy into a staging table; None if it must be written
    row by row.
    """
    entries = operation.entries
    puts = operation.kind is OperationKind.PUT
    if (
        not isinstance(entries, ArrowEntries)
        or len(entries) < LEAST
        or not (puts or operation.kind is OperationKind.UPDATE)
        or set(entries.key_names) != set(codec.key)
        or len(entries.key_names) != len(codec.key)
    ):
        return None
    keys = dict(zip(entries.key_names, entries.key.flatten(), strict=True))
    if (
        any(column.null_count for column in keys.values())
        or entries.records is None
        or entries.records.null_count
    ):
        return None
    sets, adds = _parts(entries)
    if sets is None or adds is None:
        return None
    for name in codec.key:
        if name in sets and not sets.pop(name).equals(keys[name]):
            return None
    defaults = _defaults(codec, entries, keys, sets, adds)
    if defaults is None or any(name in codec.key for name in adds):
        return None
    written = {**keys, **defaults, **sets, **adds}
    cast = {
        name: _cast_exactly(codec.columns.get(name), column, adding=name in adds)
        for name, column in written.items()
    }
    cast |= _marks(codec, entries, operation.conditions, cast)
    if any(column is None for column in cast.values()):
        return None
    constants = {}
    for name in defaults:
        column = cast[name]
        same = pc.all(pc.equal(column, column[0])).as_py() is True and not column.null_count
        if same or column.null_count == len(column):
            constants[name] = cast.pop(name)[0].as_py()
    rows = _merge_by_key(
        cast, codec.key, sets, adds, [name for name in defaults if name not in constants]
    )
    if rows is None:
        return None
    table, same_key = rows
    if same_key is not None and operation.conditions:
        return None  # which of a key's entries are applied depends on the earlier ones
    begins = not puts and entries.default_records is not None
    names = (*table.column_names,)
    shape = StagingShape(
        names, (*constants,), puts, tuple(sets), tuple(adds), begins, operation.conditions
    )
    return StagedBatch(
        shape, (*constants.values(),), _csv(table), table.num_rows, len(entries), same_key
    )


def _marks(
    codec: RowCodec, entries: ArrowEntries, conditions: Conditions, written: Mapping[str, Any]
) -> dict[str, Any]:
    """The columns that conditions need, by name; a value of None means that the batch can't be
    staged.

    `written` are the columns of the batch, of which one may be the time.
    """
    marks: dict[str, Any] = {}
    sources = entries.sources
    positions = entries.positions
    if not conditions:
        return marks
    if sources is None or positions is None or sources.null_count or positions.null_count:
        return {SOURCE: None}
    if conditions.idempotent:
        marks = {SOURCE: sources, POSITION: positions}
    if conditions.newest_by is not None:
        column = None if entries.times is None or entries.times.null_count else entries.times
        kind = codec.columns.get(conditions.newest_by)
        marks[TIE] = _ties(sources, positions)
        time = column if column is None else _cast_exactly(kind, column, adding=False)
        own = written.get(conditions.newest_by)
        if own is None or time is None or not time.equals(own):
            marks[TIME] = time
    return marks


def _ties(sources: Any, positions: Any) -> Any:
    """`Mark.tie` of the mark with each source and position."""
    known = sources.dictionary_encode()  # few sources are distinct
    plain = pc.replace_substring_regex(known.dictionary.cast(pa.string()), r"~\d+$", "")
    places = pc.replace_substring_regex(
        positions.cast(pa.string()), "^[^:]*(:|$)", "", max_replacements=1
    )
    return pc.binary_join_element_wise(plain.take(known.indices), places, " ")


def _parts(entries: ArrowEntries) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The columns that records set and those to which they add, by name; (None, None) if they
    change anything else.
    """
    records = entries.records
    assert records is not None
    if not entries.typed:
        return _columns(records), {}
    parts = _columns(records)
    if set(parts) - {"set", "add"} or any(part.null_count for part in parts.values()):
        return None, None
    sets = _columns(parts["set"]) if "set" in parts else {}
    adds = _columns(parts["add"]) if "add" in parts else {}

    sets.update({name: pa.nulls(len(entries)) for name in entries.remove})
    return (sets, adds) if not set(sets) & set(adds) and sets | adds else (None, None)


def _defaults(
    codec: RowCodec,
    entries: ArrowEntries,
    keys: dict[str, Any],
    sets: dict[str, Any],
    adds: dict[str, Any],
) -> dict[str, Any] | None:
    """The columns of a new record that come from defaults only, by name; None if the batch can't be
    staged.

    Left out are columns that the updates set, and columns to which they add, in which a default
    must be 0 or null.
    """
    if entries.default_records is None:
        return {}
    if entries.default_records.null_count:
        return None
    defaults = _columns(entries.default_records)
    for name in codec.key:
        if name in defaults and not defaults.pop(name).equals(keys[name]):
            return None
    for name, added in adds.items():
        # With a default of 0 or null, a new record has the number that is added: the column is the
        # same for both.
        default = defaults.pop(name, None)
        if default is None or default.null_count == len(default):
            continue
        if (
            added.null_count
            or default.null_count
            or pc.all(pc.equal(default, 0)).as_py() is not True
        ):
            return None
    return {name: column for name, column in defaults.items() if name not in sets}


def _columns(records: Any) -> dict[str, Any]:
    names = [records.type.field(place).name for place in range(records.type.num_fields)]
    return dict(zip(names, records.flatten(), strict=True))


def _cast_exactly(column: Column | None, array: Any, *, adding: bool) -> Any:
    """The array in a form that CSV gives the column exactly; None if single values must be
    inspected.

    `adding`: its values are added to the column.
    """
    if column is None:
        return None
    kind = column.kind
    type_ = array.type
    if pa.types.is_null(type_):
        return None if adding else array.cast(pa.string())
    if pa.types.is_integer(type_):
        whole = kind is Kind.DECIMAL and declared_digits(column) is None
        return array if whole or kind in (Kind.INTEGER, Kind.FLOAT) else None
    if pa.types.is_floating(type_):
        if kind is not Kind.FLOAT or pc.all(pc.is_finite(array)).as_py() is False:
            return None
        if pa.types.is_float64(type_) or column.type in ("real", "float4", "float"):
            return array
        return array.cast("double")
    if adding:
        return array if kind is Kind.DECIMAL and _holds_decimals(column, type_) else None
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        # In CSV a line with only \. would end the data.
        fine = kind is Kind.STRING and not pc.any(pc.match_substring(array, "\\.")).as_py()
        most = _text_limit(column)
        if most is not None and pc.any(pc.greater(pc.utf8_length(array), most)).as_py():
            return None
        return array if fine else None
    if pa.types.is_timestamp(type_) and type_.tz is not None and kind is Kind.TIMESTAMP:
        # The connection's time zone is UTC, and Arrow takes 20 times as long to write zones.
        return array.cast(pa.timestamp("us", type_.tz), safe=False).cast(pa.timestamp("us"))
    fits = (
        (kind is Kind.BOOLEAN and pa.types.is_boolean(type_))
        or (kind is Kind.DATE and pa.types.is_date32(type_))
        or (kind is Kind.DECIMAL and _holds_decimals(column, type_))
    )
    return array if fits else None


def _holds_decimals(column: Column, type_: Any) -> bool:
    """Whether the column can hold all decimals of an Arrow type exactly."""
    if not pa.types.is_decimal(type_):
        return False
    digits = declared_digits(column)
    return digits is None or (
        type_.scale <= digits[1] and type_.precision - type_.scale <= digits[0] - digits[1]
    )


def _merge_by_key(
    columns: dict[str, Any],
    key: Sequence[str],
    sets: dict[str, Any],
    adds: dict[str, Any],
    defaults: Sequence[str],
) -> tuple[pa.Table, Mapping[int, Sequence[int]] | None] | None:
    """Merge the entries of each key into one row: the last value set, the sum added, the first
    default.

    Return the rows, with `_PLACE` as first column, and `StagedBatch.same_key`; or None if the batch
    can't be staged.
    """
    count = len(next(iter(columns.values())))
    table = pa.table({_PLACE: pa.array(np.arange(count, dtype=np.int32)), **columns})
    keyed = table.select([_PLACE, *key, *adds])
    wanted: list[Any] = [(_PLACE, "min"), (_PLACE, "max"), *((name, "sum") for name in adds)]
    if any(pa.types.is_floating(columns[name].type) for name in key):
        return None  # Arrow would tell -0.0 from 0.0, which are one key
    groups = keyed.group_by(list(key), use_threads=False).aggregate(wanted)
    if groups.num_rows == count:
        return table, None
    for name in adds:  # sums must be exact, in whatever order they are computed
        if not pa.types.is_integer(columns[name].type):
            return None
        extremes = pc.min_max(columns[name]).as_py()
        if max(abs(extremes["min"] or 0), abs(extremes["max"] or 0)) * count >= 2**63:
            return None
    last = groups.column(f"{_PLACE}_max").combine_chunks()
    first = groups.column(f"{_PLACE}_min").combine_chunks()
    merged = {_PLACE: last, **{name: groups.column(name) for name in key}}
    merged |= {name: table.column(name).take(first) for name in defaults}
    merged |= {
        name: table.column(name).take(last)
        for name in columns
        if name in sets or name not in {*merged, *adds}
    }
    merged |= {name: groups.column(f"{name}_sum") for name in adds}
    listed = keyed.group_by(list(key), use_threads=False).aggregate([(_PLACE, "list")])
    places = dict(enumerate(listed.column(f"{_PLACE}_list").to_pylist()))
    return pa.table(merged), {max(same): same for same in places.values()}


def _csv(table: pa.Table) -> memoryview:
    from pyarrow import csv

    sink = pa.BufferOutputStream()
    csv.write_csv(table, sink, csv.WriteOptions(include_header=False, quoting_style="all_valid"))
    return memoryview(sink.getvalue())


AS_TEXT = (Kind.JSON, Kind.LIST)


def postgres_checker(column: Column) -> Callable[[Any], Any]:
    """Return the checker of `make_checker`, which also rejects texts longer than the column.

    The server would reject most of them, but cut off blanks at the end.
    """
    check = make_checker(column)
    most = _text_limit(column)
    if most is None:
        return check

    def checked(value: Any) -> Any:
        text = check(value)
        if len(text) > most:
            raise OutOfRangeError(f"too long, expected at most {most} characters")
        return text

    return checked


def _text_limit(column: Column) -> int | None:
    """The greatest number of characters in a column, as in varchar(10); None if it has no limit
    or other values.
    """
    digits = declared_digits(column) if column.kind is Kind.STRING else None
    return None if digits is None else digits[0]


def postgres_encoder(column: Column) -> Callable[[Any], Any] | None:
    """Return the function that turns a checked value into the form that is sent; None if it is
    sent unchanged.
    """
    if column.kind is Kind.LIST:
        return format_array
    return json.dumps if column.kind is Kind.JSON else None


def postgres_decoder(column: Column) -> Callable[[Any], Any] | None:
    """Return the function that normalizes a value as the driver returns it; None if it needs no
    change.
    """
    if column.kind is Kind.LIST:
        assert column.element is not None
        item = postgres_decoder(column.element)
        return item and (lambda values: [v if v is None else item(v) for v in values])
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
        known = cursor.adapters.types[name]
        plain = cursor.adapters.get_loader(known.oid, Format.TEXT)
        assert plain is not None
        cursor.adapters.register_loader(known.oid, _tolerant_loader(plain))
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


def find_unreadable(values: Iterable[Any]) -> tuple[int, Unreadable] | None:
    """The place of the first value that is, or contains, an `Unreadable`, and that; None if
    there is none.
    """
    for place, value in enumerate(values):
        items = value if isinstance(value, list) else [value]
        found = next((item for item in items if isinstance(item, Unreadable)), None)
        if found is not None:
            return place, found
    return None


def _finite(number: Any) -> Any:
    if not number.is_finite():
        raise ValueError("it is no finite number")
    return number


def _utc(moment: Any) -> Any:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def split_repeated_keys(
    operation: Operation[Any],
) -> Iterator[tuple[list[int] | None, Operation[Any]]]:
    """Split an operation with conditions, so that a part has one entry per key and can be staged.

    Yield the parts in the order in which to send them, each with the indices of its entries (None:
    all). The first has the first entry of every key, the next one the second, and so on: a staged
    statement can't decide whether an entry is applied after an earlier one of its key. If fewer
    than `LEAST` keys have a further entry, the last part has all that are left, and is written row
    by row. Other operations are one part.
    """
    entries = operation.entries
    if not operation.conditions or not isinstance(entries, ArrowEntries) or len(entries) < LEAST:
        yield None, operation
        return

    times = _count_earlier(entries)
    turn = 0
    most = int(times.max())
    while turn <= most:
        chosen = np.flatnonzero(times == turn)
        if len(chosen) < LEAST:
            chosen = np.flatnonzero(times >= turn)
            turn = most
        if len(chosen) == len(entries):
            yield None, operation
        else:
            places = chosen.tolist()
            yield places, operation.with_entries(entries.take(places))
        turn += 1


def _count_earlier(entries: ArrowEntries) -> np.ndarray[Any, Any]:
    """For each entry, the number of earlier entries of its key."""
    keys = np.zeros(len(entries), dtype=np.int64)
    for column in entries.key.flatten():
        known = column.dictionary_encode()
        keys = (
            keys * (len(known.dictionary) + 1)
            + known.indices.fill_null(len(known.dictionary)).to_numpy()
        )
        keys = np.unique(keys, return_inverse=True)[1]
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    times = np.empty(len(entries), dtype=np.int64)
    times[order] = np.arange(len(entries)) - np.repeat(first, np.diff(np.r_[first, len(entries)]))
    return times

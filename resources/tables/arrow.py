"""Entries and marks as Arrow columns.

`ArrowEntries` holds the columns of an Arrow batch, and converts one to Python values only when it
is asked for. `Marks` computes the marks of a stream's records, and `split_batch` turns a batch of
them into operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.schemas.records import ArrowFrame, cast_column, to_arrow_table
from dagster_adjunct.resources.schemas.schema import repeated_names
from dagster_adjunct.resources.schemas.values import first_unreadable, python_values
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Conditions,
    Mark,
    Operation,
    OperationKind,
    RowEntries,
    UpdateContract,
    group_preserving_key_order,
    key_columns,
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_struct_array(columns: dict[str, Any], rows: int) -> Any:
    """Return the columns as one struct array; `rows` is its length if there are no columns."""
    if not columns:
        return pa.StructArray.from_buffers(pa.struct([]), rows, [None])
    return pa.StructArray.from_arrays(list(columns.values()), list(columns))


def to_python(column: Any) -> list[Any]:
    """Return an array's values as a list of Python values, with dictionaries for structs and maps.

    Faster than `to_pylist`: structs are converted field by field, and timestamps with a time zone
    are computed here.
    """
    zone = getattr(column.type, "tz", None)
    if zone is not None:
        micros = column.cast(pa.timestamp("us", zone)).cast(pa.int64()).to_pylist()
        return [
            None if value is None else _EPOCH + timedelta(microseconds=value) for value in micros
        ]
    if not pa.types.is_struct(column.type):
        return python_values(column)
    names = [field.name for field in column.type]
    if not names:
        return [{} for _ in range(len(column))]
    rows = zip(*map(to_python, column.flatten()), strict=True)
    records: list[Any] = [dict(zip(names, row, strict=True)) for row in rows]
    if column.null_count:
        for place in np.flatnonzero(column.is_null()).tolist():
            records[place] = None
    return records


@dataclass(frozen=True)
class ArrowEntries:
    """Entries whose columns are Arrow arrays of equal length.

    `key` is a struct array of the key's columns. `records` is a struct array: the records of puts,
    or what updates set. If `typed`, its fields are `set`, `add` and `append` of `Changes`, each a
    struct; `remove` is the same for all entries. `sources` and `positions` are the parts of the
    marks, `times` what `newest_by` compares. `to_python` turns an array into a list of Python
    values.
    """

    key: pa.StructArray
    records: pa.StructArray | None
    to_python: Callable[[Any], list[Any]] = to_python
    default_records: pa.StructArray | None = None
    sources: pa.Array | None = None
    positions: pa.Array | None = None
    times: pa.Array | None = None
    typed: bool = False
    remove: Sequence[str] = ()

    @staticmethod
    def of(batch: ArrowFrame, key: str | Sequence[str], *, updates: bool = False) -> ArrowEntries:
        """Return the rows of an Arrow batch or table, or of a data frame, as entries.

        The columns `key` make the keys. A record has all columns, an update (`updates`) all but the
        key's. Raises SchemaMismatchError for a key column that is missing or nested, a name that
        occurs twice, and a value that Python can't represent.
        """
        if not isinstance(batch, ArrowFrame):
            problem = (
                f"ArrowEntries.of() got {batch!r:.60}; expected an Arrow table or batch, or a data"
                " frame."
            )
            raise ConfigurationError(
                problem, "Pass Python values as RowEntries(keys, values).", argument="batch"
            )
        rows = batch if isinstance(batch, pa.RecordBatch) else to_arrow_table(batch, "entries")
        key = key_columns("entries", key)
        _check_names(rows.schema.names, key)
        columns = {name: _plain_column(rows, place) for place, name in enumerate(rows.schema.names)}
        _check_keys_are_plain(columns, key)
        found = first_unreadable(pa.table(columns))
        if found is not None:
            raise found.error("an Arrow batch", f"row {found.row}", row=found.row)
        for name, column in columns.items():
            if _has_nanoseconds(column.type):  # stores take microseconds
                columns[name] = cast_column(column, name, "timestamp", "an Arrow batch")
        if updates:
            record_columns = {name: column for name, column in columns.items() if name not in key}
        else:
            record_columns = columns
        return ArrowEntries(
            to_struct_array({name: columns[name] for name in key}, rows.num_rows),
            to_struct_array(record_columns, rows.num_rows),
        )

    @property
    def key_names(self) -> tuple[str, ...]:
        """The names of the key's columns, in the order of tuple keys."""
        return tuple(field.name for field in self.key.type)

    @cached_property
    def keys(self) -> Sequence[Any]:
        columns = [self.to_python(column) for column in self.key.flatten()]
        if len(columns) == 1:
            return columns[0]
        return list(zip(*columns, strict=True))

    @cached_property
    def values(self) -> Sequence[Any] | None:
        values = None
        if self.records is not None:
            values = self.to_python(self.records)
        if self.typed and values is not None:
            return [Changes(**row, remove=self.remove) for row in values]
        return values

    @cached_property
    def defaults(self) -> Sequence[Any] | None:
        if self.default_records is None:
            return None
        return self.to_python(self.default_records)

    @cached_property
    def newest(self) -> Sequence[Any] | None:
        if self.times is None:
            return None
        return self.to_python(self.times)

    @cached_property
    def marks(self) -> Sequence[Mark] | None:
        if self.sources is None or self.positions is None:
            return None
        return list(map(Mark, self.sources.to_pylist(), self.positions.to_pylist()))

    def __len__(self) -> int:
        return len(self.key)

    def take(self, indices: Sequence[int]) -> ArrowEntries:
        return self._map_columns(lambda array: array.take(indices))

    def part(self, start: int, end: int) -> ArrowEntries:
        if start == 0 and end >= len(self):
            return self
        return self._map_columns(lambda array: array.slice(start, end - start))

    def without_defaults(self) -> ArrowEntries:
        if self.default_records is None:
            return self
        return replace(self, default_records=None)

    def null_key(self) -> int | None:
        return _first_null(self.key, *self.key.flatten())

    def null_value(self) -> int | None:
        if self.records is None:
            return None
        return _first_null(self.records)

    @property
    def nbytes(self) -> int:
        columns = (self.key, self.records, self.default_records)
        return sum(int(column.nbytes) for column in columns if column is not None)

    def _map_columns(self, pick: Callable[[Any], Any]) -> ArrowEntries:
        """Return the entries with `pick` applied to each of their columns."""
        columns = ("key", "records", "default_records", "sources", "positions", "times")
        picked: dict[str, Any] = {}
        for name in columns:
            array = getattr(self, name)
            if array is not None:
                picked[name] = pick(array)
        return replace(self, **picked)


def _plain_column(batch: Any, place: int) -> Any:
    """Return a column as one array without dictionary encoding. Raises SchemaMismatchError if it is
    too large for one.
    """
    column = batch.column(place)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        is_too_large = isinstance(column, pa.ChunkedArray) and column.num_chunks != 1
        if is_too_large:  # an array has at most 2 GB
            problem = (
                f"the column {batch.schema.names[place]!r} of an Arrow table is too large for one"
                " request."
            )
            step = "Send the table's batches one at a time: table.to_batches()."
            raise SchemaMismatchError(problem, step, column=batch.schema.names[place])
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0)
    if pa.types.is_dictionary(column.type):
        return column.dictionary_decode()
    return column


def _first_null(*columns: pa.Array) -> int | None:
    """The first index at which one of the columns is null; None if none is."""
    places = []
    for column in columns:
        if column.null_count:
            places.append(pc.index(pc.is_null(column), True).as_py())
    return min(places, default=None)


@dataclass(frozen=True, slots=True)
class MarkedSource:
    """The name in marks of one source partition (`Mark.source`), and the epoch in which it is
    read.
    """

    name: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Marking:
    """How to compute the marks of records.

    Several records of one message and key are numbered from 0, in the order of arrival (the
    ordinal). They must arrive sorted by source and offset, then by key, then by all other columns,
    so that a repeated batch gives the same ordinals.

    - `columns`: their values, joined with dots, name the record's source partition
      ("lake.flights.3"), or its end ("3") if `stream` is the rest.
    - `offset`: the column with the record's offset.
    - `sources`: for names of partitions, what marks contain instead; for any other they contain
      `prefix` and the name.
    - `exact`: a repeated batch yields the same records. If not, because an expression is not
      deterministic (`rand()`), several records of one message and key are an error.
    """

    columns: tuple[str, ...]
    offset: str
    sources: Mapping[str, MarkedSource]
    stream: str = ""
    prefix: str = ""
    exact: bool = True

    @property
    def order(self) -> tuple[str, ...]:
        """The columns to sort records by, before those of the key."""
        return (*reversed(self.columns), self.offset)


class MarkColumns(NamedTuple):
    """The marks of a batch's records, as two Arrow arrays of text."""

    sources: Any
    positions: Any


class _Message(NamedTuple):
    """What identifies the message and the key that a record comes from."""

    partition: Any
    offset: int
    key: tuple[Any, ...]


class Marks:
    """Computes the marks of a task's batches, which must be passed in order: a message may
    continue in the next one.
    """

    def __init__(self, marking: Marking, key: Sequence[str], what: str) -> None:
        self._marking = marking
        self._key = tuple(key)
        self._what = what
        self._last: _Message | None = None  # that of the last record of the batches so far
        self._ordinal = 0  # of that record

    def of(self, batch: Any) -> MarkColumns:
        """Return the marks of a batch's records."""
        encoded = self._partition_names(batch).dictionary_encode()
        sources = [self._source(text) for text in encoded.dictionary.to_pylist()]
        names = pa.array([source.name for source in sources], pa.string())
        epochs = pa.array([f"{source.epoch:010d}" for source in sources], pa.string())
        ordinals = self._number_rows(batch, encoded.indices)
        positions = pc.binary_join_element_wise(
            epochs.take(encoded.indices),
            _pad_digits(batch.column(self._marking.offset), 20),
            _pad_digits(ordinals, 6),
            ":",
        )
        return MarkColumns(names.take(encoded.indices), positions)

    def _partition_names(self, batch: Any) -> Any:
        """Return the name of each record's source partition, or its end (`Marking.columns`)."""
        columns = [batch.column(name) for name in self._marking.columns]
        if len(columns) == 1:
            return columns[0]
        return pc.binary_join_element_wise(*[column.cast(pa.string()) for column in columns], ".")

    def _source(self, place: Any) -> MarkedSource:
        """Return what marks contain for the partition that `_partition_names` calls `place`."""
        text = str(place)
        if self._marking.stream:
            text = f"{self._marking.stream}.{text}"
        return self._marking.sources.get(text) or MarkedSource(self._marking.prefix + text)

    def _number_rows(self, batch: Any, partitions: Any) -> Any:
        """Return each row's ordinal (see `Marking`), which is nearly always 0. `partitions` are
        numbers of the rows' partitions.
        """
        count = batch.num_rows
        offsets = batch.column(self._marking.offset).to_numpy(zero_copy_only=False)
        partitions = partitions.to_numpy(zero_copy_only=False)
        ordinals = np.zeros(count, dtype=np.int64)
        if not count:
            return pa.array(ordinals)
        has_same_offset = offsets[1:] == offsets[:-1]
        has_same_partition = partitions[1:] == partitions[:-1]
        repeated_rows = np.flatnonzero(has_same_offset & has_same_partition) + 1
        keys = [batch.column(name) for name in self._key]

        def message(row: int) -> _Message:
            partition = self._partition_names(batch.slice(row, 1))[0].as_py()
            key = tuple(column[row].as_py() for column in keys)
            return _Message(partition, int(offsets[row]), key)

        # The last message of the previous batch may continue in this one.
        if self._last is not None and message(0) == self._last:
            ordinals[0] = self._next_ordinal(self._ordinal, self._last)
        for row in repeated_rows.tolist():
            current = message(row)
            if current == message(row - 1):
                ordinals[row] = self._next_ordinal(int(ordinals[row - 1]), current)
        self._last = message(count - 1)
        self._ordinal = int(ordinals[-1])
        return pa.array(ordinals)

    def _next_ordinal(self, ordinal: int, message: _Message) -> int:
        """Return the ordinal after this one; ConfigurationError if a repeated batch could give the
        message's records others.
        """
        if not self._marking.exact:
            shown = message.key[0] if len(message.key) == 1 else message.key
            raise ConfigurationError(
                f"{self._what}: the message at offset {message.offset} of {message.partition}"
                f" yields several records for the key {shown!r}, computed by expressions"
                " that are not deterministic: if the batch is retried, the table can't tell which"
                " of them it has already applied.",
                "Remove rand(), uuid() and the like before this table, or emit one record per key"
                " and message.",
                operator=self._what,
            )
        return ordinal + 1


def _pad_digits(column: Any, width: int) -> Any:
    """Return whole numbers as texts of this width, with zeros in front."""
    return pc.utf8_lpad(column.cast(pa.int64()).cast(pa.string()), width=width, padding="0")


UPDATE = "update"
DEFAULT = "default"
PARTS = frozenset({"set", "add", "append"})
"""The fields of UPDATE if it is typed (`ArrowEntries.typed`)."""
TOMBSTONE = "__tombstone"
TIMESTAMP = "__timestamp"


@dataclass(frozen=True, slots=True)
class Shape:
    """How a batch of records becomes operations: puts of whole records without a contract, updates
    with one.

    For updates the batch has the key's columns, the struct `update` and optionally the struct
    `default`; a boolean column stands for a struct without fields. If `typed`, `update` has the
    structs `set`, `add` and `append`, and `remove` names the columns that all updates remove. If
    `compact`, puts and deletes of a batch are one operation, in which a deleted record is None.
    """

    key: tuple[str, ...]
    contract: UpdateContract | None = None
    conditions: Conditions = field(default=Conditions())
    typed: bool = False
    remove: tuple[str, ...] = ()
    args: tuple[object, ...] = ()
    compact: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One operation, the batch that its entries come from, and the index of each entry's row in
    it.
    """

    operation: Operation[Any]
    batch: Any
    rows: Sequence[int]


def split_batch(batch: Any, shape: Shape, marks: Marks | None, what: str) -> list[Part]:
    """Return the operations to send for a batch, in order; `what` names the operator in errors.

    Records of different keys share operations, so puts and deletes make few operations however
    often they alternate: a further one only where one key changes between them
    (`group_preserving_key_order`).
    """
    whole = _entries_from_batch(batch, shape, marks, what)
    if shape.contract is None:
        kind = OperationKind.PUT
    else:
        kind = OperationKind.UPDATE
    contract = shape.contract or UpdateContract.UPDATE_WITH_DEFAULTS  # of puts it has no meaning
    write = Operation(
        kind, whole, shape.args, shape.conditions, contract=contract, key=shape.key, rerun=True
    )
    everything = range(batch.num_rows)
    deleted = []
    if TOMBSTONE in batch.schema.names:
        deleted = list(map(bool, batch.column(TOMBSTONE).to_pylist()))
    if not any(deleted):
        return [Part(write, batch, everything)]
    may_mix_deletes = shape.compact and shape.contract is None and not shape.conditions
    if may_mix_deletes:
        values = list(whole.values or ())
        for place in np.flatnonzero(deleted).tolist():
            values[place] = None
        return [Part(write.with_entries(RowEntries(whole.keys, values)), batch, everything)]
    keys_only = replace(whole, records=None, default_records=None, typed=False, remove=())
    delete = Operation(
        OperationKind.DELETE, keys_only, shape.args, shape.conditions, key=shape.key, rerun=True
    )
    parts = []
    for is_deleted, rows in group_preserving_key_order(deleted, whole.keys):
        operation = delete if is_deleted else write
        parts.append(Part(operation.with_entries(operation.entries.take(list(rows))), batch, rows))
    return parts


def _entries_from_batch(batch: Any, shape: Shape, marks: Marks | None, what: str) -> ArrowEntries:
    """Return all rows of a batch as entries, with the marks and times that its conditions need."""
    if marks is not None:
        marked = marks.of(batch)
    else:
        marked = MarkColumns(None, None)
    columns = {}
    for name in batch.schema.names:
        if not name.startswith("__"):
            columns[name] = batch.column(name)
    key = to_struct_array({name: columns[name] for name in shape.key}, batch.num_rows)
    defaults = None
    if shape.contract is None:
        records = to_struct_array(columns, batch.num_rows)
    else:
        records = _column_as_struct(columns[UPDATE])
        if DEFAULT in columns:
            defaults = _column_as_struct(columns[DEFAULT])
    times = None
    if shape.conditions.newest_by is not None:
        times = _read_times(batch, records, shape, what)
    return ArrowEntries(
        key, records, to_python, defaults, *marked, times, shape.typed, shape.remove
    )


def _column_as_struct(column: Any) -> Any:
    """Return a column of structs; a boolean column stands for a struct without fields."""
    if pa.types.is_boolean(column.type):
        return to_struct_array({}, len(column))
    return column


def _read_times(batch: Any, records: Any, shape: Shape, what: str) -> Any:
    """Return each record's time, which is in the column `newest_by`.

    For a tombstone with null there, it is the time at which the tombstone was sent. Raises
    SchemaMismatchError if the column is missing, or a time is null.
    """
    name = shape.conditions.newest_by
    if shape.typed:
        values = records.field("set")
    else:
        values = records
    if values.type.get_field_index(name) < 0:
        problem = f"{what}: records have no column {name!r}, which the table's newest_by needs."
        step = (
            "Keep the column, set it in each update, or declare the table with another newest_by."
        )
        raise SchemaMismatchError(problem, step, column=name)
    times = pc.struct_field(values, [values.type.get_field_index(name)])
    has_both = {TOMBSTONE, TIMESTAMP} <= set(batch.schema.names)
    if has_both and times.null_count and pa.types.is_timestamp(times.type):
        sent = batch.column(TIMESTAMP).cast(times.type)
        times = pc.if_else(pc.and_(batch.column(TOMBSTONE), pc.is_null(times)), sent, times)
    if times.null_count:
        keys = to_struct_array({name: batch.column(name) for name in shape.key}, batch.num_rows)
        first = to_python(keys.filter(pc.is_null(times)).slice(0, 1))[0]
        text = (
            f"{what}: {times.null_count} record(s) have null in {name!r}, as the one of key"
            f" {first}."
        )
        raise SchemaMismatchError(
            text, "Filter them out, or fill in a time with coalesce(…).", column=name
        )
    return times


def _check_names(names: Sequence[str], key: Sequence[str]) -> None:
    """Raise SchemaMismatchError if a key column is missing, or a column is named twice."""
    missing = [name for name in key if name not in names]
    twice = repeated_names(names)
    if not missing and not twice:
        return
    if missing:
        column = missing[0]
        wrong = f"no column {column!r}, which is part of the key"
    else:
        column = twice[0]
        wrong = f"two columns {column!r}"
    problem = f"an Arrow batch has {wrong}; it has {', '.join(names)}."
    step = f"Include the key columns ({', '.join(key)}), and name each column once."
    raise SchemaMismatchError(problem, step, column=column)


def _check_keys_are_plain(columns: Mapping[str, Any], key: Sequence[str]) -> None:
    """Raise SchemaMismatchError for a key column of nested values."""
    for name in key:
        if pa.types.is_nested(columns[name].type):
            raise SchemaMismatchError(
                f"the key column {name!r} of an Arrow batch is {columns[name].type}, which"
                " can't be a key.",
                "Use a column of single values as the key.",
                column=name,
            )


def _has_nanoseconds(type_: Any) -> bool:
    """Whether values are times with a zone, in nanoseconds."""
    return pa.types.is_timestamp(type_) and type_.tz is not None and type_.unit == "ns"

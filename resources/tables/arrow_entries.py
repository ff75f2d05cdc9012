"""`ArrowEntries`: entries as an Arrow batch, of which Python values are made when somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.readable_values import first_unreadable
from dagster_adjunct.resources.schemas.records import ArrowFrame, table_of
from dagster_adjunct.resources.schemas.schema import fitted, repeated
from dagster_adjunct.resources.tables.arrow_values import struct_of, to_python
from dagster_adjunct.resources.tables.column_changes import Changes
from dagster_adjunct.resources.tables.key_columns import key_columns
from dagster_adjunct.resources.tables.operation import Mark

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class ArrowEntries:
    """Entries whose columns are Arrow arrays of one length.

    `key` are the key's columns, by name. `records` is a struct array: the records of puts, or what updates set; where
    `typed`, its fields are those of `Changes`, each a struct (but `remove`, which updates of a batch have in common).
    `to_python` makes a list of Python values of an array, of a struct dictionaries.
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
    _made: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(batch: ArrowFrame, key: str | Sequence[str], *, updates: bool = False) -> ArrowEntries:
        """Return the rows of a batch, a table or a frame as entries: their key in the columns `key`; the records are
        all columns, and what `updates` set all others."""
        import pyarrow as pa

        if not isinstance(batch, ArrowFrame):
            raise ConfigurationError(
                f"entries of Arrow were to be made of {batch!r:.60}; expected an Arrow table or batch, or a frame.",
                "Give one, or make RowEntries(keys, values).",
                argument="batch",
            )
        rows = batch if isinstance(batch, pa.RecordBatch) else table_of(batch, "entries")
        key = key_columns("entries", key)
        columns = {name: _whole(rows, place) for place, name in enumerate(rows.schema.names)}
        missing = [name for name in key if name not in columns]
        twice = repeated(rows.schema.names)
        if missing or twice:
            wrong = f"no column {missing[0]!r}, which is of the key" if missing else f"two columns {twice[0]!r}"
            raise SchemaMismatchError(
                f"an Arrow batch has {wrong}; it has {', '.join(rows.schema.names)}.",
                f"Give it the key's columns ({', '.join(key)}), and each column once.",
                column=(missing or twice)[0],
            )
        nested = next((name for name in key if pa.types.is_nested(columns[name].type)), None)
        if nested is not None:
            raise SchemaMismatchError(
                f"the key column {nested!r} of an Arrow batch is {columns[nested].type}, which can't be a key.",
                "Give a column of plain values.",
                column=nested,
            )
        if (found := first_unreadable(pa.table(columns))) is not None:
            raise found.error("an Arrow batch", f"row {found.row}", row=found.row)
        for name, column in columns.items():  # stores keep microseconds
            if pa.types.is_timestamp(column.type) and column.type.tz is not None and column.type.unit == "ns":
                columns[name] = fitted(column, name, "timestamp", "an Arrow batch")
        held = {name: column for name, column in columns.items() if not (updates and name in key)}
        return ArrowEntries(
            struct_of({name: columns[name] for name in key}, rows.num_rows), struct_of(held, rows.num_rows)
        )

    @property
    def key_names(self) -> tuple[str, ...]:
        """The names of the key's columns, in the order of keys that are tuples."""
        return tuple(self.key.type.field(place).name for place in range(self.key.type.num_fields))

    @property
    def keys(self) -> Sequence[Any]:
        keys: list[Any] = self._once("keys", self._keys)
        return keys

    def _keys(self) -> list[Any]:
        columns = [self.to_python(column) for column in self.key.flatten()]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    @property
    def values(self) -> Sequence[Any] | None:
        values = self._python("values", self.records)
        if values is None or not self.typed:
            return values
        changes: list[Changes] = self._once("changes", lambda: [Changes(**row, remove=self.remove) for row in values])
        return changes

    @property
    def defaults(self) -> Sequence[Any] | None:
        return self._python("defaults", self.default_records)

    @property
    def newest(self) -> Sequence[Any] | None:
        return self._python("newest", self.times)

    @property
    def marks(self) -> Sequence[Mark] | None:
        if self.sources is None or self.positions is None:
            return None
        marks: list[Mark] = self._once("marks", self._marks)
        return marks

    def _marks(self) -> list[Mark]:
        assert self.sources is not None
        assert self.positions is not None
        return list(map(Mark, self.sources.to_pylist(), self.positions.to_pylist()))

    def __len__(self) -> int:
        return len(self.key)

    def take(self, indices: Sequence[int]) -> ArrowEntries:
        return self._with(lambda array: array.take(indices))

    def part(self, start: int, end: int) -> ArrowEntries:
        return self if start == 0 and end >= len(self) else self._with(lambda array: array.slice(start, end - start))

    def without_defaults(self) -> ArrowEntries:
        return self if self.default_records is None else replace(self, default_records=None, _made={})

    def null_key(self) -> int | None:
        return _first_null(self.key, *self.key.flatten())

    def null_value(self) -> int | None:
        return None if self.records is None else _first_null(self.records)

    @property
    def nbytes(self) -> int:
        return sum(
            int(column.nbytes) for column in (self.key, self.records, self.default_records) if column is not None
        )

    def _with(self, pick: Callable[[Any], Any]) -> ArrowEntries:
        columns = ("key", "records", "default_records", "sources", "positions", "times")
        arrays: dict[str, Any] = {name: getattr(self, name) for name in columns}
        picked: dict[str, Any] = {name: None if array is None else pick(array) for name, array in arrays.items()}
        return replace(self, **picked, _made={})

    def _python(self, name: str, array: Any) -> list[Any] | None:
        return None if array is None else self._once(name, lambda: self.to_python(array))

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def is_arrow(value: object) -> bool:
    """Whether a value is a RecordBatch or a Table of Arrow's, which is not loaded to say so."""
    return type(value).__module__.startswith("pyarrow.") and hasattr(value, "num_rows")


def _whole(batch: Any, place: int) -> Any:
    """Return a column as one array of plain values."""
    import pyarrow as pa

    column = batch.column(place)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray) and column.num_chunks != 1:  # an array has at most 2 GB
            raise SchemaMismatchError(
                f"the column {batch.schema.names[place]!r} of an Arrow table is too large for one request.",
                "Give the batches of the table one by one: table.to_batches().",
                column=batch.schema.names[place],
            )
        column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _first_null(*columns: pa.Array) -> int | None:
    import pyarrow.compute as pc

    places = [pc.index(pc.is_null(column), True).as_py() for column in columns if column.null_count]
    return min(places, default=None)

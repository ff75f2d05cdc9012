"""Schemas with Spark's simple type names, quoting of names for Spark SQL, and conversion to Arrow
without loss: of Arrow data, and of records in the forms that users have (pandas and Polars frames,
rows as dictionaries).

A schema is stored as a list of {"name", "type"}; reading one imports neither Spark nor Arrow.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as declared
from datetime import UTC, date, datetime, time
from decimal import Context, Decimal
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    MalformedDocumentError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.lazy_modules import F, pa, pc, pt
from dagster_adjunct.resources.schemas.values import (
    YEARS,
    first_unreadable,
    readable_value,
    unreadable_values,
)
from dagster_adjunct.resources.validation import validated, validated_methods

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

_DECIMAL = re.compile(r"decimal\((\d{1,2}),\s*(\d{1,2})\)")
_COLUMN = re.compile(
    r"\s*(?:`((?:[^`]|``)+)`|([^\s`,]+))\s+([A-Za-z]+(?:\s*\(\s*\d+\s*,\s*\d+\s*\))?)"
    r"\s*(?:,(?=\s*\S)|$)"
)
_ALIASES = {
    "long": "bigint",
    "integer": "int",
    "short": "smallint",
    "byte": "tinyint",
    "bool": "boolean",
}
TYPES = (
    "string",
    "boolean",
    "tinyint",
    "smallint",
    "int",
    "bigint",
    "float",
    "double",
    "date",
    "timestamp",
    "binary",
)
_KEY_TYPES = frozenset(
    {"string", "tinyint", "smallint", "int", "bigint", "date", "timestamp", "binary"}
)


@validated
@dataclass(frozen=True, slots=True)
class Field:
    """A column: its name and its Spark simple type name (`bigint`, `decimal(10,2)`, …).

    Errors do not show values of a `sensitive` column. Fields that differ only in `sensitive` are
    equal.
    """

    name: str
    type: str
    sensitive: bool = declared(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or self.name.startswith("__"):
            problem = (
                f"column name {self.name!r} can't be used: names that begin with '__' are reserved."
            )
            raise SchemaMismatchError(problem, "Rename the column.", column=self.name)
        normal = _ALIASES.get(self.type.strip().lower(), self.type.strip().lower()).replace(" ", "")
        if not is_storable(normal):
            expected = (
                f"{', '.join(TYPES)}, or decimal(p,s) of at most 38 digits, s of them after the"
                " point"
            )
            problem = f"column {self.name!r} has type {self.type!r}: expected {expected}."
            step = (
                "Cast the column to one of them; flatten nested values, or store them as a JSON"
                " string."
            )
            raise SchemaMismatchError(problem, step, column=self.name)
        object.__setattr__(self, "type", normal)


@validated_methods
@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of records or entries, in order."""

    fields: tuple[Field, ...]
    _by_name: dict[str, Field] = declared(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {field.name: field for field in self.fields})
        # Spark ignores the case of names.
        twice = repeated_names(field.name.lower() for field in self.fields)
        if twice:
            problem = f"columns {twice} occur twice in a schema."
            raise SchemaMismatchError(problem, "Rename one of each.", column=twice[0])

    @classmethod
    def of(cls, columns: Mapping[str, str] | None = None, /, **more: str) -> Schema:
        """Return a schema from names and types: `Schema.of(tailnum="string", seats="int")`."""
        return cls(tuple(Field(name, kind) for name, kind in {**(columns or {}), **more}.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    @property
    def types(self) -> dict[str, str]:
        """Spark's name of the type of each column."""
        return {field.name: field.type for field in self.fields}

    def __contains__(self, name: object) -> bool:
        """Whether there is a column of this name."""
        return name in self._by_name

    def field(self, name: str, what: str = "schema") -> Field:
        """Return the field of this name; `what` names the schema in the error."""
        if name in self._by_name:
            return self._by_name[name]
        problem = f"{what} has no column {name!r}: it has {', '.join(self.names) or 'none'}."
        raise SchemaMismatchError(problem, "Check the name.", column=name)

    def select(self, names: Iterable[str], what: str = "schema") -> Schema:
        """Return the schema with only these columns, in this order."""
        return Schema(tuple(self.field(name, what) for name in names))

    def with_sensitive(self, *names: str) -> Schema:
        """Return the same columns with these marked as sensitive, whose values errors show as
        `***`.
        """
        fields = dict(self._by_name)
        for name in names:
            fields[name] = replace(self.field(name), sensitive=True)
        return Schema(tuple(fields.values()))

    @property
    def sensitive(self) -> tuple[str, ...]:
        """The names of the sensitive columns."""
        return tuple(field.name for field in self.fields if field.sensitive)

    @classmethod
    def from_ddl(cls, text: str, what: str = "schema") -> Schema:
        """Return the columns in DDL like Spark's, "tailnum STRING, `seats` INT"; `what` names
        the schema in errors.
        """
        fields = []
        at = 0
        end = len(text.rstrip())
        while at < end:
            match = _COLUMN.match(text, at)
            if match is None:
                raise SchemaMismatchError(
                    f"{what}: the columns {text!r} can't be parsed at"
                    f" {text[at : at + 30].strip()!r}: expected name and type, separated by"
                    " commas.",
                    'Write them like "tailnum STRING, seats INT, price DECIMAL(10,2)".',
                )
            fields.append(Field((match[1] or "").replace("``", "`") or match[2], match[3]))
            at = match.end()
        if not fields:
            raise SchemaMismatchError(
                f"{what} names no columns.", 'Write them like "tailnum STRING, seats INT".'
            )
        return cls(tuple(fields))

    def to_json(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for field in self.fields:
            item: dict[str, Any] = {"name": field.name, "type": field.type}
            if field.sensitive:
                item["sensitive"] = True
            items.append(item)
        return items

    @classmethod
    def from_json(cls, items: Any) -> Schema:
        try:
            return cls(
                tuple(
                    Field(item["name"], item["type"], item.get("sensitive") is True)
                    for item in items
                )
            )
        except (KeyError, TypeError, AttributeError) as error:
            problem = (
                f"a stored schema reads {str(items)[:200]!r}: expected a list of name and type"
                f" ({error})."
            )
            step = "Restore the document from a backup, or roll back to the commit before."
            raise MalformedDocumentError(problem, step, document="a schema") from error

    def ddl(self) -> str:
        """Return the columns as Spark DDL with quoted names."""
        return ", ".join(f"{quote_name(field.name)} {field.type.upper()}" for field in self.fields)

    def difference(self, other: Schema) -> str:
        """Return a description of how the columns of `other` differ from these, "" if they are
        equal.
        """
        parts = []
        for name in self.names:
            if name not in other:
                parts.append(f"{name} is missing")
        for field in other.fields:
            if field.name not in self:
                parts.append(f"{field.name} ({field.type}) is not expected")
        for field in self.fields:
            if field.name in other and other.field(field.name).type != field.type:
                found = other.field(field.name).type
                parts.append(f"{field.name} is {found}, expected {field.type}")
        if not parts and self.names != other.names:
            parts.append(f"the order is {', '.join(other.names)}, expected {', '.join(self.names)}")
        return "; ".join(parts)

    def to_arrow(self) -> pa.Schema:
        """Return the Arrow schema; timestamps are in microseconds, UTC."""
        return pa.schema([pa.field(field.name, arrow_type(field.type)) for field in self.fields])

    @classmethod
    def from_arrow(cls, schema: pa.Schema) -> Schema:
        return cls(tuple(Field(field.name, type_from_arrow(field)) for field in schema))

    @classmethod
    def from_spark(cls, schema: StructType) -> Schema:
        return cls(
            tuple(Field(field.name, field.dataType.simpleString()) for field in schema.fields)
        )


def quote_name(name: str) -> str:
    """Return a column's name in backticks for Spark SQL."""
    return f"`{name.replace('`', '``')}`"


def quote_text(text: str) -> str:
    """Return a text as a string literal of Spark SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def named_column(name: str) -> Column:
    """Return Spark's column of exactly this name; a dot in it does not mean a field of a struct."""
    return F.col(quote_name(name))


def named_columns(names: Iterable[str]) -> list[Column]:
    """Return Spark's columns of exactly these names."""
    return [named_column(name) for name in names]


def is_storable(kind: str) -> bool:
    """Whether a column of a schema may have this Spark type."""
    precision, scale = decimal_digits(kind) or (0, 0)
    return kind in TYPES or max(1, scale) <= precision <= 38


def decimal_digits(kind: str) -> tuple[int, int] | None:
    """Return the precision and scale of a decimal type, None for other types."""
    decimal = _DECIMAL.fullmatch(kind)
    if decimal is None:
        return None
    return (int(decimal[1]), int(decimal[2]))


def repeated_names(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once, sorted."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def check_key_types(schema: Schema, columns: Sequence[str], what: str) -> None:
    """Raise SchemaMismatchError for key columns whose type can't be compared exactly."""
    for name in columns:
        kind = schema.field(name, what).type
        if kind not in _KEY_TYPES and not _DECIMAL.fullmatch(kind):
            expected = "a string, integer, date, timestamp, decimal or binary column"
            problem = f"{what}: key column {name!r} is {kind}: expected {expected}."
            raise SchemaMismatchError(
                problem, f"Cast {name!r} before it becomes a key.", column=name
            )


# The functions of pyarrow that return the Arrow types.
_ARROW_TYPES = {
    "string": "string",
    "boolean": "bool_",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "date": "date32",
    "binary": "binary",
}


@lru_cache(maxsize=256)
def arrow_type(kind: str) -> Any:
    """Return the Arrow type of a Spark simple type name."""
    digits = decimal_digits(kind)
    if digits is not None:
        return pa.decimal128(*digits)
    if kind == "timestamp":
        return pa.timestamp("us", tz="UTC")
    return getattr(pa, _ARROW_TYPES[kind])()


def type_from_arrow(field: pa.Field) -> str:
    """Return the Spark type of an Arrow column, or Arrow's own name for a type that no schema
    may have.
    """
    kind = field.type
    if pt.is_dictionary(field.type):
        kind = field.type.value_type
    if pt.is_large_string(kind) or pt.is_string_view(kind):
        return "string"
    if pt.is_large_binary(kind) or pt.is_binary_view(kind):
        return "binary"
    if pt.is_timestamp(kind):
        if kind.tz is None:
            problem = f"column {field.name!r} is a timestamp without a time zone."
            raise SchemaMismatchError(problem, _time_zone_advice(field.name), column=field.name)
        return "timestamp"
    if pt.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return next((name for name in TYPES if arrow_type(name).equals(kind)), str(kind))


RowLabel: TypeAlias = Callable[[int], tuple[str, dict[str, Any]]]
"""Returns how errors name the row of this number: in their text, and as their fields."""


def _row_label(row: int) -> tuple[str, dict[str, Any]]:
    return f"row {row}", {"row": row}


def check_column_names(
    given: Sequence[str],
    schema: Schema,
    what: str,
    also: Collection[str] = (),
    next_step: str = "Send records with exactly these columns, each once.",
) -> None:
    """Raise SchemaMismatchError unless `given` has each of the schema's columns once, and others
    only from `also`.
    """
    there = dict.fromkeys(given)
    wrong = {name: "is missing" for name in schema.names if name not in there}
    for name in there:
        if name not in schema and name not in also:
            wrong[name] = "is not declared"
    wrong |= dict.fromkeys(repeated_names(given), "occurs twice")
    if wrong:
        listed = "; ".join(f"column {name!r} {problem}" for name, problem in wrong.items())
        declared_columns = ", ".join(f"{field.name} {field.type}" for field in schema.fields)
        problem = f"{what}: {listed}. Declared are {declared_columns}."
        raise SchemaMismatchError(problem, next_step, column=next(iter(wrong)))


def fit_to_schema(
    table: pa.Table, schema: Schema, what: str, place: RowLabel = _row_label
) -> pa.Table:
    """Return `table` with exactly the schema's columns and Arrow types.

    Types are widened and dictionaries decoded. Raises SchemaMismatchError, with the row, for a
    value that would be changed, and for columns of another kind: strings for numbers (which Arrow
    would parse), timestamps without a zone (which Arrow would take as UTC).
    """
    check_column_names(table.schema.names, schema, what)
    columns = []
    for field in schema.fields:
        column = table.column(field.name)
        kind = arrow_type(field.type)
        if not is_same_family(column.type, kind):
            step = "Cast the column before you send it."
            if pt.is_timestamp(column.type) and field.type == "timestamp":
                step = _time_zone_advice(field.name)
            elif pt.is_floating(column.type) and pt.is_integer(kind):
                step = (
                    f"Cast it, as in pandas df[{field.name!r}].astype('Int64'), which keeps missing"
                    " values."
                )
            problem = (
                f"{what}: column {field.name!r} is {column.type}, but the schema declares"
                f" {field.type}."
            )
            raise SchemaMismatchError(problem, step, column=field.name)
        columns.append(
            cast_column(column, field.name, field.type, what, place, sensitive=field.sensitive)
        )
    return pa.table(columns, schema=schema.to_arrow())


def cast_column(
    column: pa.ChunkedArray,
    name: str,
    kind: str,
    what: str,
    place: RowLabel = _row_label,
    *,
    sensitive: bool = False,
) -> pa.ChunkedArray:
    """Return a column cast to the declared type. Raises SchemaMismatchError for the first value
    that would change.
    """
    try:
        return _cast_safely(column, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise _misfit_error(column, name, kind, what, place, sensitive=sensitive) from (
            None if sensitive else error
        )


def _cast_safely(column: pa.ChunkedArray, kind: str) -> pa.ChunkedArray:
    """Return a column cast to a type. Raises ArrowInvalid for a value that would change, except
    in rounding.
    """
    fitted = column.cast(arrow_type(kind), safe=True)
    if kind == "float" and pt.is_float64(column.type):
        beyond = pc.and_(pc.is_inf(fitted), pc.is_finite(column))
        if pc.any(beyond).as_py():
            raise pa.ArrowInvalid(f"{column.filter(beyond)[0]} is too large for 32 bits")
    return fitted


def _misfit_error(
    column: pa.ChunkedArray, name: str, kind: str, what: str, place: RowLabel, *, sensitive: bool
) -> SchemaMismatchError:
    """Return the error for a column with a value that does not fit its declared type."""
    if pt.is_timestamp(column.type):
        found = first_unreadable(pa.table([column], [name]))
        if found is not None:
            words, about = place(found.row)
            return found.error(what, words, hidden=sensitive, **about)
    start = 0
    count = len(column)
    while count > 1:  # find the first row by bisection
        half = count // 2
        try:
            _cast_safely(column.slice(start, half), kind)
            start = start + half
            count = count - half
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            count = half
    words, about = place(start)
    expected = expected_range(kind)
    reason = expected
    if not sensitive:
        reason = f"{str(readable_value(column[start]))[:100]}, {expected}"
    step = "Cast the column, or correct the record."
    if pt.is_timestamp(column.type) and column.type.unit == "ns":
        step = (
            "Timestamps are stored in microseconds: round first, as in pandas"
            f" df[{name!r}].dt.floor('us'), or in Arrow"
            f" pyarrow.compute.floor_temporal(table[{name!r}], unit='microsecond'); or keep"
            " nanoseconds in a "
        )
        step += "bigint column."
    problem = (
        f"{what}: column {name!r} is {column.type}, but the schema declares {kind}, and its value"
        f" in {words}"
    )
    return SchemaMismatchError(f"{problem} does not fit: {reason}.", step, column=name, **about)


INTEGER_BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


def expected_range(kind: str) -> str:
    """Return in words which values of its family a type holds."""
    if kind in INTEGER_BITS:
        bound = 2 ** (INTEGER_BITS[kind] - 1)
        return f"expected {-bound} to {bound - 1}"
    if (digits := decimal_digits(kind)) is not None:
        return (
            f"expected at most {digits[0] - digits[1]} digits before and {digits[1]} after the"
            " point"
        )
    wanted = {
        "timestamp": "whole microseconds",
        "float": "a number that 32 bits can hold",
        "double": "a number that a double holds exactly",
    }
    return f"expected {wanted.get(kind, kind)}"


def is_same_family(given: pa.DataType, expected: pa.DataType) -> bool:
    """Whether values of the first Arrow type may be cast to the second, if each value fits."""
    if pt.is_dictionary(given):
        given = given.value_type
    if pt.is_null(given):
        return True
    families = {
        pt.is_timestamp: (lambda kind: pt.is_timestamp(kind) and kind.tz is not None,),
        pt.is_floating: (pt.is_floating, pt.is_integer),
        pt.is_string: (pt.is_string, pt.is_large_string, pt.is_string_view),
        pt.is_binary: (
            pt.is_binary,
            pt.is_large_binary,
            pt.is_binary_view,
            pt.is_fixed_size_binary,
        ),
    }
    for family in (pt.is_integer, pt.is_decimal, pt.is_date, pt.is_boolean):
        families[family] = (family,)
    for family, fitting in families.items():
        if family(expected):
            return any(fits(given) for fits in fitting)
    return False


def _time_zone_advice(name: str) -> str:
    return (
        f"Set its time zone, as in pandas df[{name!r}].dt.tz_localize('UTC'), or in Arrow "
        f"pyarrow.compute.assume_timezone(table[{name!r}], 'UTC')."
    )


def to_exact_array(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    """Return the values as an Arrow array of this type, without loss.

    Raises what Arrow raises, and ValueError for values that Arrow would convert with loss:
    fractions to integers, times to dates, times without a zone or with nanoseconds to timestamps in
    UTC, numbers to dates and times, and numbers beyond 32 bits to an infinite float. Rounding a
    double to a float is no loss. The missing values of pandas and NumPy (NaT, NA) become null.
    """
    return build_without_missing(lambda present: _exact(present, kind), values)


def build_without_missing(
    make: Callable[[Sequence[Any]], pa.Array], values: Sequence[Any]
) -> pa.Array:
    """Return `make(values)`. If that raises, replace NaT and NA by None, also within lists, and
    call it again.
    """
    try:
        return make(values)
    except (pa.ArrowException, TypeError, ValueError):
        present = _without_missing(values)
        if present is None:
            raise
    return make(present)


def _without_missing(values: Sequence[object]) -> list[object] | None:
    """Return the values with None in the place of NaT and NA, also within lists; None if there
    is no NaT or NA.
    """
    missing = []

    def present(value: object) -> object:
        if isinstance(value, list | tuple):
            return [present(item) for item in value]
        if not is_missing(value):
            return value
        missing.append(value)
        return None

    made = [present(value) for value in values]
    if missing:
        return made
    return None


def is_missing(value: object) -> bool:
    """Whether a value is NaT or NA of pandas or NumPy; imports neither of them."""
    name = type(value).__name__
    if name == "datetime64":
        return bool(value != value)  # noqa: PLR0124
    return name in ("NaTType", "NAType")


def _exact(values: Sequence[object], kind: pa.DataType) -> pa.Array:
    array = pa.array(values, kind)
    checks = {
        pt.is_integer: _check_whole,
        pt.is_date: _check_days,
        pt.is_timestamp: _check_times,
        pt.is_float32: _check_float32,
        pt.is_list: _check_items,
    }
    for is_kind, check in checks.items():
        if is_kind(kind):
            check(values, array)
    # Such as 9999-12-31 23:00 in a time zone, if that is the next day in UTC.
    for value in unreadable_values(array).values():
        raise ValueError(f"{value} is not a date that Python can hold: {YEARS}")
    return array


def _check_whole(values: Sequence[object], array: pa.Array) -> None:
    if any(value is not None and type(value) is not int for value in values):
        for value, kept in zip(values, array.to_pylist(), strict=True):
            if value is not None and value != kept:
                raise ValueError(f"{value} is not a whole number")


def _check_days(values: Sequence[object], array: pa.Array) -> None:
    for value in map(_as_python, values):
        if isinstance(value, datetime) and value.time() != time():
            raise ValueError(f"{value} is a time, not a date")
        if value is not None and not isinstance(value, date):
            raise ValueError(f"{value} is not a date")


def _check_times(values: Sequence[object], array: pa.Array) -> None:
    for value in map(_as_python, values):
        if value is not None and (not isinstance(value, datetime) or value.utcoffset() is None):
            raise ValueError(f"{value} is not a time with a time zone")
        if getattr(value, "nanosecond", 0):  # a pandas Timestamp
            raise ValueError(f"{value} is finer than microseconds")


def _check_float32(values: Sequence[object], array: pa.Array) -> None:
    for value, kept in zip(values, array.to_pylist(), strict=True):
        if kept is not None and math.isinf(kept) and value != kept:
            raise ValueError(f"{value} is too large for 32 bits")


def _check_items(values: Sequence[object], array: pa.Array) -> None:
    lists: Any = [value for value in values if value is not None]
    _exact([item for items in lists for item in items], array.type.value_type)


def _as_python(value: object) -> object:
    if isinstance(value, pa.Scalar):
        return value.as_py()
    return value


@runtime_checkable
class ArrowFrame(Protocol):
    """Columns that Arrow can import: an Arrow table or batch, a pandas or Polars frame, a DuckDB
    relation.
    """

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


def to_arrow_table(
    records: Any, what: str, schema: Schema | None = None, required: Collection[str] = ()
) -> pa.Table:
    """Return an ArrowFrame, or rows as dictionaries, as an Arrow table. Column types are those of
    the data.

    To rows, columns of `schema` that none of them has are added as nulls, except the `required`
    ones, such as the key: where a row lacks it, its name is a mistake. A pandas index with a name
    becomes a column; one without is left out. Raises SchemaMismatchError for columns that Arrow
    can't hold, and ConfigurationError for a RecordBatchReader, which can't be read twice.
    """
    if isinstance(records, pa.Table):
        return _require_unique_names(records, what)
    if isinstance(records, pa.RecordBatchReader):
        problem = (
            f"{what}: a RecordBatchReader can be read only once, but a retry has to send the same"
            " records."
        )
        raise ConfigurationError(
            problem, "Read it first, and pass the table: reader.read_all().", argument="data"
        )
    if not isinstance(records, ArrowFrame):
        return _table_from_rows(records, what, schema, required)
    try:
        if _is_pandas(records):
            table = pa.Table.from_pandas(records)
        else:
            table = _without_views(pa.table(records))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        if _is_one_column(records):
            problem = (
                f"{what}: a {type(records).__name__} is a single column: expected columns with"
                " names."
            )
            step = (
                "Convert it to a frame or table first, as in series.to_frame() or"
                " pyarrow.table({'name': column})."
            )
            raise SchemaMismatchError(problem, step, argument="data") from error
        problem = (
            f"{what}: the {type(records).__name__} can't be converted to an Arrow table:"
            f" {_error_text(error)}."
        )
        step = "Give each column values of one type, and a unique name."
        raise SchemaMismatchError(problem, step, argument="data") from error
    unnamed = []
    for name in table.column_names:
        if name.startswith("__index_level_"):
            unnamed.append(name)
    return _require_unique_names(table.drop_columns(unnamed).replace_schema_metadata(None), what)


def _is_one_column(frame: ArrowFrame) -> bool:
    """Whether the data is a single column, such as a Polars Series or an Arrow array."""
    try:
        return not pa.types.is_struct(pa.chunked_array(frame).type)
    except (pa.ArrowException, TypeError, ValueError):
        return False


def to_spark_frame(answer: Any, spark: SparkSession, what: str) -> DataFrame | None:
    """Return the result of a user's function as a Spark frame, None if it is not a frame of any
    kind.
    """
    if isinstance(answer, ArrowFrame) and not hasattr(answer, "mapInArrow"):
        return spark.createDataFrame(to_arrow_table(answer, what))
    return answer if hasattr(answer, "mapInArrow") else None


def _table_from_rows(
    rows: Sequence[Mapping[str, Any]], what: str, schema: Schema | None, required: Collection[str]
) -> pa.Table:
    """Return rows as a table with all columns that a row or the schema has; null where a row
    lacks one.
    """
    for name in required:
        _check_present(rows, name, what)
    columns: dict[str, Any] = {}
    if schema is not None:
        columns = {field.name: pa.nulls(len(rows), field.type) for field in schema.to_arrow()}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        columns[name] = _column_from_values([row.get(name) for row in rows], name, what)
    return pa.table(columns)


def _check_present(rows: Sequence[Mapping[str, Any]], name: str, what: str) -> None:
    for number, row in enumerate(rows):
        if name not in row:
            found = ", ".join(map(str, row)) or "no columns"
            problem = (
                f"{what}: row {number} lacks the column {name!r}, which is part of the key; it has"
                f" {found}."
            )
            step = f"Correct the names, or add {name!r}: None for records without a key."
            raise SchemaMismatchError(problem, step, column=name, row=number)


def _column_from_values(values: Sequence[Any], name: str, what: str) -> pa.Array:
    try:
        return build_without_missing(_array, values)  # df.to_dict("records") has NaT and NA
    except UnicodeEncodeError as error:  # a lone surrogate, as json.loads returns for "\\ud83d"
        row = next(row for row, value in enumerate(values) if _is_lone_surrogate(value))
        problem = (
            f"{what}: column {name!r} of row {row} is {ascii(values[row])[:100]}, which has a"
            " lone surrogate."
        )
        step = "Write the whole character, or replace it: text.encode('utf-8', 'replace').decode()."
        raise SchemaMismatchError(problem, step, column=name, row=row) from error
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        problem = (
            f"{what}: column {name!r} can't be converted to an Arrow column: {_error_text(error)}."
        )
        raise SchemaMismatchError(
            problem, "Give the column values of one type.", column=name
        ) from error


def _array(values: Sequence[Any]) -> pa.Array:
    moments = set()
    for value in values:
        if isinstance(value, date):
            moments.add((type(value), getattr(value, "tzinfo", None) is None))
    if len(moments) > 1:
        raise TypeError("dates, and times with and without a time zone, are mixed")
    return pa.array(values)


def _is_lone_surrogate(value: Any) -> bool:
    try:
        pa.array([value])
    except UnicodeEncodeError:
        return True
    return False


def _without_views(table: pa.Table) -> pa.Table:
    """Return a table with plain strings and binary instead of views, which Polars exports and few
    kernels support.

    Dictionaries of views are decoded.
    """
    plain = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    columns = []
    for column in table.columns:
        if pa.types.is_dictionary(column.type) and column.type.value_type in plain:
            kind = plain[column.type.value_type]
            taken = [chunk.dictionary.cast(kind).take(chunk.indices) for chunk in column.chunks]
            columns.append(pa.chunked_array(taken, kind))
        else:
            columns.append(column.cast(plain.get(column.type, column.type)))
    return pa.table(columns, names=table.column_names)


def _require_unique_names(table: pa.Table, what: str) -> pa.Table:
    twice = repeated_names(table.schema.names)
    if twice:
        raise SchemaMismatchError(
            f"{what}: column {twice[0]!r} occurs twice.", "Rename one.", column=twice[0]
        )
    return table


def _is_pandas(value: object) -> bool:
    return any(kind.__module__.startswith("pandas.") for kind in type(value).__mro__)


def _error_text(error: Exception) -> str:
    """Return the message of an error of Arrow in one line; for pandas, its second argument names
    the column.
    """
    words = []
    for argument in error.args:
        text = str(argument).strip()
        if text:
            words.append(text.splitlines()[0].rstrip("."))
    # A lone surrogate can't be encoded.
    return "; ".join(words).encode(errors="backslashreplace").decode()


Plain = int | bytes
"""A value as Parquet stores it, which compares and hashes without Arrow. Plain values are ordered
as in Spark: strings by their UTF-8 bytes, decimals of one type by their unscaled number."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_DAY = _EPOCH.date().toordinal()
_EXACT = Context(prec=76)


def plain_converter(kind: str) -> Callable[[Any], Plain]:
    """Return a function that converts a value of this Spark type to its plain form.

    string: UTF-8 bytes; binary: itself; integers and booleans: themselves; date: days, timestamp:
    microseconds, both since 1970 in UTC; decimal: the unscaled number.
    """
    digits = decimal_digits(kind)
    if digits is not None:
        return lambda value: int(Decimal(value).scaleb(digits[1], _EXACT))
    return _CONVERTERS.get(kind, int)


def _micros(value: datetime) -> int:
    passed = value - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds


def _days(value: date) -> int:
    return value.toordinal() - _FIRST_DAY


_CONVERTERS: dict[str, Callable[[Any], Plain]] = {
    "string": str.encode,
    "binary": bytes,
    "date": _days,
    "timestamp": _micros,
}

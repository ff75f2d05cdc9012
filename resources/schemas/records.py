"""Converts records to Arrow without loss, in the forms that users have: Arrow data, pandas and
Polars frames, rows as dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import pa, pt
from dagster_adjunct.resources.schemas.arrow_values import cast_values, find_misfit
from dagster_adjunct.resources.schemas.exact_values import build_without_missing, to_exact_array
from dagster_adjunct.resources.schemas.paths import missing_part, nest_value
from dagster_adjunct.resources.schemas.schema import (
    Field,
    Schema,
    check_column_names,
    repeated_names,
)
from dagster_adjunct.resources.schemas.types import (
    arrow_type,
    find_type_mismatch,
    is_nested,
    time_zone_advice,
)
from dagster_adjunct.resources.schemas.values import first_unreadable, readable_value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_TEXTS_IN_JSON = {
    "timestamp": "a datetime with a time zone",
    "date": "a date of datetime",
    "binary": "bytes",
    "decimal": "a Decimal",
}
"""What to send in Python for a type whose values are texts in JSON."""
_IN_PYTHON = {
    **_TEXTS_IN_JSON,
    "string": "a str",
    "boolean": "a bool",
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), "an int"),
    **dict.fromkeys(("float", "double"), "a float"),
}
"""What to send in Python for a simple type, without its digits."""
_ABOUT_JSON = "texts in lines of JSON are read by `adjunct stream append NAME FILE`"
_ADD_ZONE = (
    "Give it the zone whose clock it shows, as in time.replace(tzinfo=datetime.timezone.utc)."
)


class RowPlace(NamedTuple):
    """How errors name a row: in their text ("line 7"), and as their fields ({"line": 7})."""

    text: str
    fields: Mapping[str, Any]


FindRow: TypeAlias = Callable[[int], RowPlace]
"""Returns how errors name the row of this number, from 0, in a table."""


def _place_in_table(row: int) -> RowPlace:
    """Return how errors name a row of a table that the user passed."""
    return RowPlace(f"row {row}", {"row": row})


def fit_to_schema(
    table: pa.Table, schema: Schema, what: str, place: FindRow = _place_in_table
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
        mismatch = find_type_mismatch(column.type, kind, field.name)
        if mismatch is not None:
            if pt.is_timestamp(column.type) and field.type == "timestamp":
                step = time_zone_advice(field.name)
            elif pt.is_floating(column.type) and pt.is_integer(kind):
                step = (
                    f"Cast it, as in pandas df[{field.name!r}].astype('Int64'), which keeps missing"
                    " values."
                )
            else:
                step = "Cast the column before you send it."
            raise SchemaMismatchError(f"{what}: {mismatch}.", step, column=field.name)
        columns.append(
            cast_column(column, field.name, field.type, what, place, sensitive=field.sensitive)
        )
    return pa.table(columns, schema=schema.to_arrow())


def cast_column(
    column: pa.ChunkedArray,
    name: str,
    kind: str,
    what: str,
    place: FindRow = _place_in_table,
    *,
    sensitive: bool = False,
) -> pa.ChunkedArray:
    """Return a column cast to the declared type. Raises SchemaMismatchError for the first value
    that would change.
    """
    try:
        return cast_values(column, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise _misfit_error(column, name, kind, what, place, sensitive=sensitive) from (
            None if sensitive else error
        )


def _misfit_error(
    column: pa.ChunkedArray, name: str, kind: str, what: str, place: FindRow, *, sensitive: bool
) -> SchemaMismatchError:
    """Return the error for a column with a value that does not fit its declared type: about the
    first such value, or about a time that Python can't hold, if there is one.
    """
    if pt.is_timestamp(column.type):
        found = first_unreadable(pa.table([column], [name]))
        if found is not None:
            at = place(found.row)
            return found.error(what, at.text, hidden=sensitive, **at.fields)
    start = 0
    count = len(column)
    while count > 1:  # find the first row by bisection
        half = count // 2
        try:
            cast_values(column.slice(start, half), kind)
            start = start + half
            count = count - half
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            count = half
    at = place(start)
    # pyarrow can't make an array of the scalar of a map with a null within.
    value = column.slice(start, 1)
    if isinstance(value, pa.ChunkedArray):
        value = pa.concat_arrays(value.chunks)
    misfit = find_misfit(value, kind, name)
    if sensitive:
        reason = misfit.expected
    else:
        reason = f"{str(readable_value(misfit.value))[:100]}, {misfit.expected}"
    if pt.is_timestamp(misfit.value.type) and misfit.value.type.unit == "ns":
        step = (
            "Timestamps are stored in microseconds: round first, as in pandas"
            f" df[{name!r}].dt.floor('us'), or in Arrow"
            f" pyarrow.compute.floor_temporal(table[{name!r}], unit='microsecond'); or keep"
            " nanoseconds in a bigint column."
        )
    else:
        step = "Cast the column, or correct the record."
    problem = (
        f"{what}: column {misfit.path!r} is {misfit.value.type}, but the schema declares"
        f" {misfit.kind}, and its value in {at.text}"
    )
    return SchemaMismatchError(f"{problem} does not fit: {reason}.", step, column=name, **at.fields)


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
    ones, such as the key, which may be paths. A pandas index with a name becomes a column; one
    without is left out. Raises SchemaMismatchError for columns that Arrow can't hold, and for a row
    without a required column, whose name is probably misspelt; and ConfigurationError for a
    RecordBatchReader, which can't be read twice.
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
            table = _table_from_pandas(records, what, schema)
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


def _table_from_pandas(frame: Any, what: str, schema: Schema | None) -> pa.Table:
    """Return a pandas frame as a table; its columns with nested values get their declared types, as
    pandas knows only objects.
    """
    nested = []
    for field in schema.fields if schema is not None else ():
        if is_nested(field.type) and field.name in frame.columns:
            nested.append(field)
    table = pa.Table.from_pandas(frame.drop(columns=[field.name for field in nested]))
    for field in nested:
        values = frame[field.name].tolist()
        table = table.append_column(field.name, _nested_column(values, field, what))
    return table


def _is_one_column(frame: ArrowFrame) -> bool:
    """Whether the data is a single column, such as a Polars Series or an Arrow array."""
    try:
        return not pa.types.is_struct(pa.chunked_array(frame).type)
    except (pa.ArrowException, TypeError, ValueError):
        return False


def frame_from_arrow(spark: SparkSession, table: pa.Table) -> DataFrame:
    """Return an Arrow table as a Spark frame, with all its rows.

    `createDataFrame` alone loses rows: within a partition, Spark stops at a record batch without
    rows, unless it is the first one. Tables that were concatenated or filtered have such batches.
    Slices of lists with nulls fail in it, so that lists are copied.
    """
    if any(pt.is_nested(kind) for kind in table.schema.types):
        table = table.take(pa.array(range(table.num_rows), pa.int64()))
    filled = [batch for batch in table.to_batches() if batch.num_rows]
    return spark.createDataFrame(pa.Table.from_batches(filled, table.schema))


def to_spark_frame(answer: Any, spark: SparkSession, what: str) -> DataFrame | None:
    """Return the result of a user's function as a Spark frame, None if it is not a frame of any
    kind.
    """
    if hasattr(answer, "mapInArrow"):  # a frame of Spark, or of Spark Connect
        return answer  # type: ignore[no-any-return]
    if isinstance(answer, ArrowFrame):
        return frame_from_arrow(spark, to_arrow_table(answer, what))
    return None


def _table_from_rows(
    rows: Sequence[Mapping[str, Any]], what: str, schema: Schema | None, required: Collection[str]
) -> pa.Table:
    """Return rows as a table with all columns that a row or the schema has; null where a row
    lacks one. Raises as `to_arrow_table`.
    """
    are_rows = isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows)
    if not are_rows or isinstance(rows, str | bytes):
        raise ConfigurationError(
            f"{what}: a {type(rows).__name__} is no Arrow table, frame, or list of rows as"
            " dictionaries.",
            "Read them first, for example with pandas.read_parquet(PATH).",
            argument="data",
        )
    for name in required:
        _check_present(rows, name, what, schema)
    columns: dict[str, Any] = {}
    if schema is not None:
        columns = {field.name: pa.nulls(len(rows), field.type) for field in schema.to_arrow()}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        values = [row.get(name) for row in rows]
        if schema is not None and name in schema:
            columns[name] = _declared_column(values, schema.field(name), what)
        else:
            columns[name] = _column_from_values(values, name, what)
    return pa.table(columns)


def _declared_column(values: Sequence[Any], field: Field, what: str) -> pa.Array:
    """Return Python values as a column of the declared type or, if that is simple, of the type that
    Arrow infers. Raises SchemaMismatchError for a type whose values do not fit the declared one,
    and for times without a zone.
    """
    if is_nested(field.type):
        return _nested_column(values, field, what)
    kind = arrow_type(field.type)
    if pt.is_timestamp(kind):
        require_zones(values, field.name, what, sensitive=field.sensitive)
    column = _column_from_values(values, field.name, what)
    mismatch = find_type_mismatch(column.type, kind, field.name)
    if mismatch is not None:
        name = field.type.partition("(")[0]
        step = f"Send {_IN_PYTHON[name]}"
        if pt.is_string(column.type) and name in _TEXTS_IN_JSON:
            step += f"; {_ABOUT_JSON}"
        raise SchemaMismatchError(f"{what}: {mismatch}.", f"{step}.", column=field.name)
    return column


def require_zones(values: Sequence[Any], name: str, what: str, *, sensitive: bool = False) -> None:
    """Raise SchemaMismatchError for the first datetime among the values of a column, one for each
    row, that has no time zone.
    """
    for row, value in enumerate(values):
        # NaT is a datetime whose year is a float, and whose method utcoffset() fails.
        is_time = isinstance(value, datetime) and isinstance(value.year, int)
        if is_time and value.utcoffset() is None:
            found = "a time" if sensitive else f"the time {value}"
            problem = f"{what}: column {name!r} of row {row} is {found} without a time zone."
            raise SchemaMismatchError(problem, _ADD_ZONE, column=name, row=row)


def _nested_column(values: Sequence[Any], field: Field, what: str) -> pa.Array:
    """Return Python values as a column of the declared nested type. Raises SchemaMismatchError for
    the first one that does not fit.
    """
    kind = arrow_type(field.type)
    try:
        return to_exact_array(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        row, cause = _first_misfit(values, kind, error)
        # A NestedValueError has a path, a reason, and perhaps what was expected there.
        path = f"{field.name}{getattr(cause, 'path', '')}"
        if field.sensitive:
            reason = "a value does not fit the declared type"
        else:
            reason = getattr(cause, "reason", None) or _error_text(cause)
        problem = f"{what}: column {path!r} of row {row}: {reason}."
        expected = getattr(cause, "expected", "") or field.type
        step = f"Send values of the declared type {expected}, or correct the schema."
        in_python = _TEXTS_IN_JSON.get(expected.partition("(")[0])
        if getattr(cause, "is_naive_time", False):
            step = _ADD_ZONE
        elif in_python is not None:
            step = f"Send {in_python}; {_ABOUT_JSON}. Or correct the schema."
        raise SchemaMismatchError(problem, step, column=field.name, row=row) from (
            None if field.sensitive else error
        )


def _first_misfit(
    values: Sequence[Any], kind: pa.DataType, error: Exception
) -> tuple[int, Exception]:
    """Return the row of the first value that does not fit the type, with the error for it; the
    first row and the given error if each value alone fits.
    """
    for row, value in enumerate(values):
        try:
            to_exact_array([value], kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as cause:
            return row, cause
    return 0, error


def _check_present(
    rows: Sequence[Mapping[str, Any]], name: str, what: str, schema: Schema | None
) -> None:
    """Raise SchemaMismatchError for a row that lacks this column, or a part of this path, of the
    key.
    """
    names = () if schema is None else schema.names
    for number, row in enumerate(rows):
        missing = missing_part(row, name, names)
        if missing is not None:
            found = ", ".join(map(str, row)) or "no columns"
            problem = (
                f"{what}: row {number} lacks the column {missing!r}, which is part of the key; it"
                f" has {found}."
            )
            null = nest_value(name, names, None)
            step = f"Correct the names, or give records without a key {null!r}."
            raise SchemaMismatchError(problem, step, column=missing, row=number)


def _column_from_values(values: Sequence[Any], name: str, what: str) -> pa.Array:
    """Return Python values as a column of the type that Arrow infers. Raises
    SchemaMismatchError.
    """
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
    """Return the values as an array of the type that Arrow infers. Raises TypeError for mixed dates
    and times, of which Arrow would change some.
    """
    kinds = set()
    for value in values:
        if isinstance(value, date):
            has_zone = getattr(value, "tzinfo", None) is not None
            kinds.add((type(value), has_zone))
    if len(kinds) > 1:
        raise TypeError("dates, and times with and without a time zone, are mixed")
    return pa.array(values)


def _is_lone_surrogate(value: Any) -> bool:
    """Whether a text has half of a surrogate pair, so that it can't be encoded."""
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
    """Return the table. Raises SchemaMismatchError if two columns have one name."""
    twice = repeated_names(table.schema.names)
    if twice:
        raise SchemaMismatchError(
            f"{what}: column {twice[0]!r} occurs twice.", "Rename one.", column=twice[0]
        )
    return table


def _is_pandas(value: object) -> bool:
    """Whether a value is a pandas object; does not import pandas."""
    return any(kind.__module__.startswith("pandas.") for kind in type(value).__mro__)


def _error_text(error: Exception) -> str:
    """Return the message of an error of Arrow in one line, with the column's name if pandas raised
    it.
    """
    words = []
    for argument in error.args:
        text = str(argument).strip()
        if text:
            words.append(text.splitlines()[0].rstrip("."))
    # A lone surrogate can't be encoded.
    return "; ".join(words).encode(errors="backslashreplace").decode()

"""Converts records as users have them to Arrow and Spark: pandas and Polars frames, rows as dictionaries, …"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.schema import Schema, build_without_missing, repeated_names

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@runtime_checkable
class ArrowFrame(Protocol):
    """Columns that Arrow can import: an Arrow table or batch, a pandas or Polars frame, a DuckDB relation."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


def to_arrow_table(records: Any, what: str, schema: Schema | None = None) -> pa.Table:
    """Return an ArrowFrame, or rows as dictionaries, as an Arrow table with their own types.

    `schema` gives the columns that no row has. A pandas index with a name becomes a column; one without is left out.
    Raises SchemaMismatchError for columns that Arrow can't hold, and ConfigurationError for a RecordBatchReader, which
    can't be read twice.
    """
    if isinstance(records, pa.Table):
        return _require_unique_names(records, what)
    if isinstance(records, pa.RecordBatchReader):
        problem = f"{what}: a RecordBatchReader can be read only once, but a retry has to send the same records."
        raise ConfigurationError(problem, "Read it first, and pass the table: reader.read_all().", argument="data")
    if not isinstance(records, ArrowFrame):
        return _table_from_rows(records, what, schema)
    try:
        table = pa.Table.from_pandas(records) if _is_pandas(records) else _without_views(pa.table(records))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        if _is_one_column(records):
            problem = f"{what}: a {type(records).__name__} is a single column: expected columns with names."
            step = "Convert it to a frame or table first, as in series.to_frame() or pyarrow.table({'name': column})."
            raise SchemaMismatchError(problem, step, argument="data") from error
        problem = f"{what}: the {type(records).__name__} can't be converted to an Arrow table: {_error_text(error)}."
        step = "Give each column values of one type, and a unique name."
        raise SchemaMismatchError(problem, step, argument="data") from error
    unnamed = [name for name in table.column_names if name.startswith("__index_level_")]
    return _require_unique_names(table.drop_columns(unnamed).replace_schema_metadata(None), what)


def _is_one_column(frame: ArrowFrame) -> bool:
    """Whether it is a single column, such as a Polars Series or an Arrow array."""
    try:
        return not pa.types.is_struct(pa.chunked_array(frame).type)
    except (pa.ArrowException, TypeError, ValueError):
        return False


def to_spark_frame(answer: Any, spark: SparkSession, what: str) -> DataFrame | None:
    """Return the result of a user's function as a Spark frame, None where it is not a frame."""
    if isinstance(answer, ArrowFrame) and not hasattr(answer, "mapInArrow"):
        answer = spark.createDataFrame(to_arrow_table(answer, what))
    return answer if hasattr(answer, "mapInArrow") else None


def _table_from_rows(rows: Sequence[Mapping[str, Any]], what: str, schema: Schema | None) -> pa.Table:
    """Return rows as a table; columns of the schema or of other rows that a row does not have are null."""
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = build_without_missing(_array, values)  # df.to_dict("records") has NaT and NA
        except UnicodeEncodeError as error:  # json.loads returns it for "\\ud83d" alone
            row = next(row for row, value in enumerate(values) if _is_lone_surrogate(value))
            problem = f"{what}: column {name!r} of row {row} is {ascii(values[row])[:100]}, which has a lone surrogate."
            step = "Write the whole character, or replace it: text.encode('utf-8', 'replace').decode()."
            raise SchemaMismatchError(problem, step, column=name, row=row) from error
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            problem = f"{what}: column {name!r} can't be converted to an Arrow column: {_error_text(error)}."
            raise SchemaMismatchError(problem, "Give the column values of one type.", column=name) from error
    absent = {} if schema is None else {field.name: field.type for field in schema.to_arrow()}
    return pa.table({name: pa.nulls(len(rows), kind) for name, kind in absent.items()} | columns)


def _array(values: Sequence[Any]) -> pa.Array:
    moments = {(type(value), getattr(value, "tzinfo", None) is None) for value in values if isinstance(value, date)}
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
    """Return a table with plain strings and binary instead of views, which Polars exports and few kernels support.

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
        raise SchemaMismatchError(f"{what}: column {twice[0]!r} occurs twice.", "Rename one.", column=twice[0])
    return table


def _is_pandas(value: object) -> bool:
    return any(kind.__module__.startswith("pandas.") for kind in type(value).__mro__)


def _error_text(error: Exception) -> str:
    """Return Arrow's message in one line, with the pandas column that it names in the second argument."""
    words = "; ".join(
        str(argument).strip().splitlines()[0].rstrip(".") for argument in error.args if str(argument).strip()
    )
    return words.encode(errors="backslashreplace").decode()  # a lone surrogate can't be encoded

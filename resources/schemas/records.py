"""Records as users have them: Arrow tables, pandas and Polars frames, rows as dictionaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import Schema, build_without_missing, repeated_names

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


@runtime_checkable
class ArrowFrame(Protocol):
    """Columns that Arrow can take: an Arrow table or batch, a pandas or Polars frame, a DuckDB relation."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


def to_arrow_table(records: Any, what: str, schema: Schema | None = None) -> pa.Table:
    """Return an ArrowFrame, or rows as dictionaries, as an Arrow table with the types that they have.

    `schema` gives the columns that no row names. A pandas index that has a name becomes a column; one without is
    left out. Raises SchemaMismatchError for columns that Arrow can't hold, and ConfigurationError for a reader of
    batches, whose second reading would find nothing.
    """
    import pyarrow as pa

    if isinstance(records, pa.Table):
        return _require_unique_names(records, what)
    if isinstance(records, pa.RecordBatchReader):
        raise ConfigurationError(
            f"{what}: a RecordBatchReader can be read only once, and a repeated call has to give the same records.",
            "Read it first: reader.read_all().",
            argument="data",
        )
    if not isinstance(records, ArrowFrame):
        return _table_from_rows(records, what, schema)
    try:
        table = pa.Table.from_pandas(records) if _is_pandas(records) else _without_views(pa.table(records))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:  # pandas' columns are named in it
        if _is_one_column(records):
            raise SchemaMismatchError(
                f"{what}: a {type(records).__name__} is one column without its records: expected columns with names.",
                "Make it a frame or a table first, such as series.to_frame() or pyarrow.table({'name': column}).",
                argument="data",
            ) from error
        raise SchemaMismatchError(
            f"{what}: the {type(records).__name__} can't be made an Arrow table: {_error_text(error)}.",
            "Give each column values of one type, and a name of its own.",
            argument="data",
        ) from error
    unnamed = [name for name in table.column_names if name.startswith("__index_level_")]
    return _require_unique_names(table.drop_columns(unnamed).replace_schema_metadata(None), what)


def _is_one_column(frame: ArrowFrame) -> bool:
    """Whether it is a Polars Series or an Arrow array, which Arrow takes as well."""
    import pyarrow as pa

    try:
        return not pa.types.is_struct(pa.chunked_array(frame).type)
    except (pa.ArrowException, TypeError, ValueError):
        return False


def to_spark_frame(answer: Any, spark: SparkSession, what: str) -> DataFrame | None:
    """Return what a user's function has returned as a Spark frame; None where it is no frame at all."""
    if isinstance(answer, ArrowFrame) and not hasattr(answer, "mapInArrow"):
        answer = spark.createDataFrame(to_arrow_table(answer, what))
    return answer if hasattr(answer, "mapInArrow") else None


def _table_from_rows(rows: Sequence[Mapping[str, Any]], what: str, schema: Schema | None) -> pa.Table:
    """Return rows as a table: a column of the schema or of another row that a row does not name is null there."""
    import pyarrow as pa

    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = build_without_missing(_array, values)  # df.to_dict("records") has NaT and NA
        except UnicodeEncodeError as error:  # json.loads makes it of "\\ud83d" alone
            row = next(row for row, value in enumerate(values) if _is_lone_surrogate(value))
            raise SchemaMismatchError(
                f"{what}: column {name!r} of row {row} is {ascii(values[row])[:100]}, which has half of a character.",
                "Write the whole character, or replace the half: text.encode('utf-8', 'replace').decode().",
                column=name,
                row=row,
            ) from error
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise SchemaMismatchError(
                f"{what}: column {name!r} of the rows can't be made an Arrow column: {_error_text(error)}.",
                "Give the column values of one type.",
                column=name,
            ) from error
    absent = {} if schema is None else {field.name: field.type for field in schema.to_arrow()}
    return pa.table({name: pa.nulls(len(rows), kind) for name, kind in absent.items()} | columns)


def _array(values: Sequence[Any]) -> pa.Array:
    import pyarrow as pa

    moments = {(type(value), getattr(value, "tzinfo", None) is None) for value in values if isinstance(value, date)}
    if len(moments) > 1:
        raise TypeError("dates, times with a zone and times without one are mixed")
    return pa.array(values)


def _is_lone_surrogate(value: Any) -> bool:
    import pyarrow as pa

    try:
        pa.array([value])
    except UnicodeEncodeError:
        return True
    return False


def _without_views(table: pa.Table) -> pa.Table:
    """Return a table with plain texts and bytes in place of views, which Polars gives and few kernels take.

    Of categories, too: they come as their values.
    """
    import pyarrow as pa

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
        raise SchemaMismatchError(f"{what}: there are two columns {twice[0]!r}.", "Rename one.", column=twice[0])
    return table


def _is_pandas(value: object) -> bool:
    return any(kind.__module__.startswith("pandas.") for kind in type(value).__mro__)


def _error_text(error: Exception) -> str:
    """Return what Arrow says in one line; it names a column of pandas in the second argument."""
    words = "; ".join(
        str(argument).strip().splitlines()[0].rstrip(".") for argument in error.args if str(argument).strip()
    )
    return words.encode(errors="backslashreplace").decode()  # half a character can't be written down

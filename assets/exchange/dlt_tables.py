"""Tables of a dlt load as Arrow tables with the columns of a lake stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, time
from functools import partial
from typing import Any

from dagster_adjunct.assets.exchange.dlt_nested import infer_type, settle_type, without_unknown
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import pa, pc, pt
from dagster_adjunct.resources.schemas.evolution import is_widening
from dagster_adjunct.resources.schemas.exact_values import to_exact_array
from dagster_adjunct.resources.schemas.records import cast_column
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.schemas.types import (
    Type,
    arrow_type,
    is_nested,
    parse_type,
    tree_from_arrow,
)
from dagster_adjunct.resources.streams.system import TOMBSTONE

Column = Mapping[str, Any]
"""A column as dlt describes it: `name`, `data_type`, `precision`, `scale` and hints."""
Rows = list[dict[str, Any]]

_TYPES = {
    "text": "string",
    "double": "double",
    "bool": "boolean",
    "timestamp": "timestamp",
    "bigint": "bigint",
    "binary": "binary",
    "date": "date",
    "time": "string",
    "wei": "decimal(38,0)",
}
_DECIMAL = (38, 9)  # the most digits, and those after the point of a type without a precision


@dataclass(frozen=True, slots=True)
class LoadedTable:
    """A table of a load: what dlt knows of its columns, and its files, as rows of JSON or as Arrow
    tables.
    """

    name: str
    columns: Mapping[str, Column]
    files: Sequence[Rows | pa.Table]

    @property
    def what(self) -> str:
        """How errors name the table."""
        return f"dlt table {self.name!r}"

    def values(self, name: str) -> Iterable[Any]:
        """Yield the values of a column; those of JSON that Arrow has as texts are read."""
        for file in self.files:
            if not isinstance(file, pa.Table):
                yield from (row.get(name) for row in file)
            elif name in file.column_names:
                is_json = _is_text(file.column(name).type)
                for value in file.column(name).to_pylist():
                    yield json.loads(value) if is_json and value is not None else value


def choose_columns(
    table: LoadedTable, stored: Schema | None, declared: Schema | None, former: Mapping[str, str]
) -> Schema:
    """Return the columns of a table's stream after the load: the stored ones, widened if need be,
    then new ones.

    Columns in `declared` have the types that they have there. Columns of which no value is known
    are left out. Raises SchemaMismatchError for types that no stream has, and for names that the
    stream had before.
    """
    fields = {}
    if stored is not None:
        fields = {field.name: field for field in stored.fields}
    for name, column in table.columns.items():
        before = fields.get(name)
        type_ = _choose_type(table, column, before, declared)
        if type_ is None:
            continue
        if before is None and name in former:
            problem = f"{table.what}: its stream had a column {name!r}, which was {former[name]}."
            step = "Leave the column out of the source, or give it another name there."
            raise SchemaMismatchError(problem, step, column=name)
        with _naming(table):
            fields[name] = Field(name, type_, before is not None and before.sensitive)
    if not fields:
        problem = f"{table.what} has no column with a value yet, so that nothing can be stored."
        step = "Give the resource the types of its columns (columns=), or leave such rows out."
        raise SchemaMismatchError(problem, step, argument="columns")
    with _naming(table):
        return Schema(tuple(fields.values()))


@contextmanager
def _naming(table: LoadedTable) -> Iterator[None]:
    """Have errors name the table."""
    try:
        yield
    except SchemaMismatchError as error:
        step = (
            "Convert the column in the source, or declare its type in schemas= of lake_destination:"
            " for objects a map, or string for the text of their JSON."
        )
        raise error.reworded(f"{table.what}: {error.problem}", step) from error


def _choose_type(
    table: LoadedTable, column: Column, stored: Field | None, declared: Schema | None
) -> str | None:
    """Return the type of a column of the stream after the load, None if no value says it: the
    declared one, else the stored one, widened if that holds what dlt found.

    Raises SchemaMismatchError for a declared type that the stored one can't become.
    """
    name = column["name"]
    if declared is not None and name in declared:
        wanted = declared.field(name).type
        if stored is not None and not is_widening(stored.type, wanted):
            problem = (
                f"{table.what}: schemas= declares column {name!r} as {wanted}, but its stream has"
                f" {stored.type}."
            )
            step = "Declare the type of the stream, or load into streams of another prefix."
            raise SchemaMismatchError(problem, step, column=name)
        return wanted
    if column["data_type"] == "json":
        return _choose_nested_type(table, name, stored)
    found = _simple_type(table, column)
    if stored is None or is_widening(stored.type, found):
        return found
    return stored.type


def _choose_nested_type(table: LoadedTable, name: str, stored: Field | None) -> str | None:
    """Return the type of a column of JSON after the load: that of its Arrow column, else that of
    its values; None if neither says one.
    """
    known = None
    if stored is not None:
        known = parse_type(stored.type)
    found = _arrow_type_of(table, name)
    if found is None:
        found = infer_type(table.values(name), known)
    if found is None:
        return None
    if known is not None:
        found = settle_type(known, found)
    return str(found)


def _arrow_type_of(table: LoadedTable, name: str) -> Type | None:
    """Return the type of a nested Arrow column, None if its values are texts or Python's."""
    for file in table.files:
        if isinstance(file, pa.Table) and name in file.column_names:
            kind = file.column(name).type
            if not _is_text(kind) and not pt.is_null(kind):
                return tree_from_arrow(_stored_kind(kind), name)
    return None


def _stored_kind(kind: pa.DataType) -> pa.DataType:
    """Return a nested Arrow type with types that streams have: for times, and for integers without
    a sign.
    """
    if pt.is_timestamp(kind):
        return pa.timestamp("us", tz="UTC")
    if pt.is_unsigned_integer(kind):
        return {8: pa.int16(), 16: pa.int32()}.get(kind.bit_width, pa.int64())
    if pt.is_struct(kind):
        return pa.struct([(field.name, _stored_kind(field.type)) for field in kind])
    if pt.is_list(kind) or pt.is_large_list(kind):
        return pa.list_(_stored_kind(kind.value_type))
    if pt.is_map(kind):
        return pa.map_(kind.key_type, _stored_kind(kind.item_type))
    return kind


def _simple_type(table: LoadedTable, column: Column) -> str:
    """Return the type of a column that dlt says is simple. Raises SchemaMismatchError for one that
    no stream has.
    """
    kind = column["data_type"]
    if kind == "decimal":
        precision = column.get("precision") or _DECIMAL[0]
        scale = column.get("scale")
        if scale is None:
            scale = _DECIMAL[1] if column.get("precision") is None else 0
        if precision <= _DECIMAL[0]:
            return f"decimal({precision},{scale})"
        # A wider declaration does not say that the values need it.
        return f"decimal({_DECIMAL[0]},{min(scale, _DECIMAL[0])})"
    if kind not in _TYPES:
        problem = f"{table.what}: column {column['name']!r} has dlt's type {kind!r}."
        step = f"Convert it in the source to one of {', '.join(sorted({*_TYPES, 'decimal'}))}."
        raise SchemaMismatchError(problem, step, column=column["name"])
    return _TYPES[kind]


def build_table(table: LoadedTable, schema: Schema) -> pa.Table:
    """Return the rows of a table, in the order of its files, with the columns of the schema. Raises
    SchemaMismatchError for the first value that does not fit, with its column and row.
    """
    parts = [schema.to_arrow().empty_table()]
    first_row = 0  # the number of the file's first row in the table
    for file in table.files:
        if isinstance(file, pa.Table):
            columns = [_column_of_table(table, file, field) for field in schema.fields]
        else:
            columns = [_column_of_rows(table, file, field, first_row) for field in schema.fields]
        part = pa.table(columns, schema=schema.to_arrow())
        first_row += part.num_rows
        parts.append(part)
    return pa.concat_tables(parts)


def _column_of_table(table: LoadedTable, file: pa.Table, field: Field) -> Any:
    """Return a column of a file that is an Arrow table, in its type; nulls if the file lacks it."""
    if field.name not in file.column_names:
        return pa.nulls(file.num_rows, arrow_type(field.type))
    column = file.column(field.name)
    data_type = table.columns[field.name]["data_type"]
    if pt.is_null(column.type):
        return pa.nulls(file.num_rows, arrow_type(field.type))
    if pt.is_time(column.type):
        return _time_texts(column)
    if data_type == "json" and field.type != "string":
        return _column_of_json(table, column, field)
    if pt.is_timestamp(column.type) and column.type.tz is None:
        column = pc.assume_timezone(column, "UTC")  # as dlt reads times without a zone
    return cast_column(column, field.name, field.type, table.what)


def _time_texts(column: pa.ChunkedArray) -> Any:
    """Return times of day as `isoformat` writes them, so that they are stored as those of rows."""
    if column.type != pa.time64("ns"):
        column = pc.cast(column, pa.time64("us"))
    return pc.replace_substring_regex(pc.cast(column, pa.string()), r"\.0+$", "")


def _column_of_json(table: LoadedTable, column: pa.ChunkedArray, field: Field) -> Any:
    """Return an Arrow column of JSON in its type: parsed if it has texts, else converted. Errors
    about a parsed value count rows from the file's first one.
    """
    if not _is_text(column.type):
        return cast_column(column, field.name, field.type, table.what)
    values = [None if text is None else json.loads(text) for text in column.to_pylist()]
    return _exact_column(table, values, field, _nested_converter(field.type), 0)


def _column_of_rows(table: LoadedTable, rows: Rows, field: Field, first_row: int) -> Any:
    """Return a column of a file of rows, in its type; a row that lacks it has null."""
    values = [row.get(field.name) for row in rows]
    data_type = table.columns.get(field.name, {}).get("data_type")
    return _exact_column(table, values, field, _converter(field.type, data_type), first_row)


Convert = Callable[[Any], Any]


def _converter(kind: str, data_type: str | None) -> Convert:
    """Return the function that makes of a value of dlt, which is not None, one of the column's
    type.
    """
    if data_type == "json" and kind == "string":
        return _json_text
    if is_nested(kind) or data_type == "json":
        return _nested_converter(kind)
    if kind == "timestamp":
        return _with_zone
    if kind == "string":
        return _text
    return lambda value: value


def _nested_converter(kind: str) -> Convert:
    """Return the function that leaves out of a value of JSON what its type knows nothing of."""
    return partial(without_unknown, type_=parse_type(kind))


def _json_text(value: Any) -> str:
    """Return a value of JSON as JSON text; a str stays as it is."""
    if isinstance(value, str):
        return value
    from dlt.common.json import json as dlt_json

    return str(dlt_json.dumps(value))


def _with_zone(value: Any) -> Any:
    """Return a time in UTC if it has no zone; other values unchanged."""
    if isinstance(value, datetime) and value.tzinfo is None:
        return value.replace(tzinfo=UTC)
    return value


def _text(value: Any) -> Any:
    """Return a time of day as a text; other values unchanged."""
    if isinstance(value, time):
        return value.isoformat()
    return value


def _exact_column(
    table: LoadedTable, values: Sequence[Any], field: Field, convert: Convert, first_row: int
) -> Any:
    """Return values as a column without loss. Raises SchemaMismatchError for the first one that
    does not fit, with its row, where the first of these values is in row `first_row`.
    """
    made = [None if value is None else convert(value) for value in values]
    kind = arrow_type(field.type)
    try:
        return to_exact_array(made, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        row = _first_misfit(made, kind)
        path = field.name
        reason = str(error)
        shown = ""
        if row is not None:
            path, reason = _describe_misfit(made[row], kind, field)
            shown = f" {str(made[row])[:100]!r}"
        if field.sensitive:
            shown = ""
            reason = "it is another kind of value"
        at = "" if row is None else f", row {first_row + row}"
        problem = (
            f"{table.what}, column {path!r}{at}: the value{shown} does not fit the type"
            f" {field.type} of the stream: {reason}."
        )
        raise SchemaMismatchError(problem, _MISFIT, column=field.name) from (
            None if field.sensitive else error
        )


_MISFIT = (
    "Nothing of the load was added. Declare the column's type in schemas= of lake_destination"
    " before the stream is created, or convert the value in the source; then drop the load"
    " (pipeline.abort_packages()) and run the pipeline again."
)


def _first_misfit(values: Sequence[Any], kind: pa.DataType) -> int | None:
    """Return the index of the first value that does not fit the type, None if each fits alone."""
    for row, value in enumerate(values):
        try:
            to_exact_array([value], kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return row
    return None


def _describe_misfit(value: Any, kind: pa.DataType, field: Field) -> tuple[str, str]:
    """Return the path of the part of a value that does not fit the type, and why it does not."""
    try:
        to_exact_array([value], kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        path = f"{field.name}{getattr(error, 'path', '')}"
        return path, (getattr(error, "reason", None) or str(error)).rstrip(".")
    return field.name, ""


def _is_text(kind: pa.DataType) -> bool:
    """Whether this is one of Arrow's types of texts."""
    return any(check(kind) for check in (pt.is_string, pt.is_large_string, pt.is_string_view))


def mark_deletions(rows: pa.Table, column: str) -> pa.Table:
    """Return rows with `__tombstone`, which is true where the column is: not null, and not false.

    This is what dlt's hint `hard_delete` means.
    """
    given = rows.column(column)
    if pt.is_boolean(given.type):
        deleted = pc.fill_null(given, False)
    else:
        deleted = pc.is_valid(given)
    return rows.append_column(TOMBSTONE, deleted)


def keep_last(rows: pa.Table, column: str, order: str) -> pa.Table:
    """Return rows in the order in which the one that dlt's hint `dedup_sort` keeps is the last of
    its key: the smallest value for "asc", the largest for "desc".
    """
    direction = "descending" if order == "asc" else "ascending"
    if not rows.num_rows:
        return rows
    number = "__number"  # rows with equal values stay in their order
    numbered = rows.append_column(number, pa.array(range(rows.num_rows), pa.int64()))
    keys = [(column, direction), (number, "ascending")]
    sorted_rows = pc.sort_indices(numbered, sort_keys=keys, null_placement="at_start")
    return rows.take(sorted_rows)

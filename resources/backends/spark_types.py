"""The Spark types of a table's declared columns, and their records as Arrow columns of these types."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.backends.column_values import Column, Kind, column_of
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.exact_array import exact_array
from dagster_adjunct.resources.schemas.schema import arrow_type

if TYPE_CHECKING:
    import pyarrow as pa

_SIMPLE = {
    Kind.STRING: "string",
    Kind.BOOLEAN: "boolean",
    Kind.TIMESTAMP: "timestamp",
    Kind.DATE: "date",
    Kind.BINARY: "binary",
    Kind.JSON: "string",
}
_INTEGERS = {
    **dict.fromkeys(("tinyint", "byte"), "tinyint"),
    **dict.fromkeys(("smallint", "short", "int2"), "smallint"),
    **dict.fromkeys(("int", "integer", "int4"), "int"),
    **dict.fromkeys(("bigint", "long", "int8"), "bigint"),
}
_FLOATS = {"float": "float", "real": "float", "float4": "float"}


def spark_type(declared: str) -> str | None:
    """Return Spark's type for a column that is declared like this; None where there is none that is certain.

    JSON becomes its text. A decimal needs its digits: "decimal(10,2)".
    """
    return _of(column_of("column", declared))


def _of(column: Column) -> str | None:
    if column.kind is Kind.INTEGER:
        return _INTEGERS.get(column.type)
    if column.kind is Kind.FLOAT:
        return _FLOATS.get(column.type, "double")
    if column.kind is Kind.DECIMAL:
        return f"decimal{column.size}" if "," in column.size else None
    if column.kind is Kind.LIST and column.element is not None:
        element = _of(column.element)
        return None if element is None else f"array<{element}>"
    return _SIMPLE.get(column.kind)


def arrow_type_of(kind: str) -> pa.DataType:
    """Return the Arrow type of what `spark_type` returns."""
    import pyarrow as pa

    if kind.startswith("array<"):
        return pa.list_(arrow_type_of(kind[len("array<") : -1]))
    return arrow_type(kind)


def column_of_records(
    what: str, keys: Sequence[Any], records: Sequence[Mapping[str, Any] | None], name: str, kind: str
) -> pa.Array:
    """Return one column of records as an Arrow array; null where there is no record, or no such value in it.

    Raises SchemaMismatchError for the first value that is not of the type; `what` says whose records they are.
    """
    import pyarrow as pa

    values = [None if record is None else record.get(name) for record in records]
    if kind == "string" and any(isinstance(value, dict | list) for value in values):
        values = [json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value for value in values]
    try:
        return _array(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        for key, value in zip(keys, values, strict=True):
            try:
                _array([value], kind)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise SchemaMismatchError(
                    f"{what}: the record of key {key!r} has {value!r} ({type(value).__name__}) in {name!r}, which is "
                    f"{kind}: {str(error).splitlines()[0]}.",
                    "Correct the table's declared columns, or the type that select= gives.",
                    column=name,
                ) from error
        raise


def _array(values: list[Any], kind: str) -> pa.Array:
    if kind != "boolean" and any(value.__class__ is bool for value in values):
        raise TypeError("a boolean is no value of another type")
    return exact_array(values, arrow_type_of(kind))

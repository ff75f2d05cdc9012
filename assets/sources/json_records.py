"""Records as JSON, in the bytes that Spark's `to_json` writes with nulls."""

from __future__ import annotations

import base64
import datetime as dt
from itertools import accumulate, pairwise
from operator import add
from typing import Any

from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Simple,
    Struct,
    Type,
    nested_types,
    parse_type,
)
from dagster_adjunct.resources.schemas.values import format_spark_date, readable_values

_FRACTIONS = (Simple("float"), Simple("double"))
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
_ESCAPED = str.maketrans({**{chr(code): f"\\u{code:04X}" for code in range(32)}, **_SHORT})


def find_fractions(schema: Schema) -> str | None:
    """Return the path of the first float or double, which only Spark itself can write, as the text
    depends on the release of Java; None if there is none.
    """
    for field in schema.fields:
        for path, type_ in nested_types(parse_type(field.type)):
            if type_ in _FRACTIONS:
                return field.name + path
    return None


def records_to_json(records: pa.Table, schema: Schema) -> pa.Array:
    """Return the columns of each record as a JSON object, as Spark writes it; none has fractions
    (`find_fractions`).
    """
    columns = []
    for field in schema.fields:
        column = records.column(field.name).combine_chunks()
        columns.append(_texts(column, parse_type(field.type)))
    return pa.array(_objects(schema.names, columns), pa.string())


def _objects(names: list[str] | tuple[str, ...], columns: list[list[str]]) -> list[str]:
    """Return, for each row, the JSON object of its values. `columns` has the values of each name,
    as JSON.
    """
    members = [f"{_quote(name)}:" for name in names]
    texts = []
    for row in zip(*columns, strict=True):
        texts.append(f"{{{','.join(map(add, members, row))}}}")
    return texts


def _texts(values: pa.Array, type_: Type) -> list[str]:
    """Return each value of this type as JSON; text with invalid bytes has replacement characters,
    as with Spark.
    """
    if isinstance(type_, Struct):
        names = [member.name for member in type_.members]
        parts = []
        for part, member in zip(values.flatten(), type_.members, strict=True):
            parts.append(_texts(part, member.type))
        return _with_nulls(values, _objects(names, parts))
    if isinstance(type_, Array):
        return _joined(values, _texts(values.flatten(), type_.element), "[{}]")
    if isinstance(type_, Map):
        kind = values.type
        entries = values.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
        keys, items = entries.flatten().flatten()
        names = [f"{key}:" for key in _texts(keys, Simple("string"))]
        return _joined(entries, list(map(add, names, _texts(items, type_.value))), "{{{}}}")
    # Times are written from numbers: Python's own end with the year 9999.
    if type_.name == "date":
        values = values.cast("int32")  # days since 1970
    elif type_.name == "timestamp":
        values = values.cast("int64")  # microseconds since 1970
    return [_text(value, type_.name) for value in readable_values(values, "replace")]


def _joined(lists: pa.Array, parts: list[str], brackets: str) -> list[str]:
    """Return each list (or map) as JSON: its `parts` between these brackets, a format string.
    `parts` are the elements of all lists, one after the other.
    """
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_pylist()
    texts = []
    for start, end in pairwise(accumulate(lengths, initial=0)):
        texts.append(brackets.format(",".join(parts[start:end])))
    return _with_nulls(lists, texts)


def _with_nulls(values: pa.Array, texts: list[str]) -> list[str]:
    """Return the texts with "null" for the values that are null; the list is changed in place."""
    for row in pc.indices_nonzero(values.is_null()).to_pylist():
        texts[row] = "null"
    return texts


def _text(value: Any, kind: str) -> str:
    """Return a value of this simple type as JSON; a date or timestamp is given as a number."""
    if value is None:
        return "null"
    if kind == "boolean":
        return "true" if value else "false"
    if kind == "string":
        return _quote(value)
    if kind == "binary":
        return f'"{base64.b64encode(value).decode()}"'
    if kind == "date":
        return f'"{_day(value)}"'
    if kind == "timestamp":
        days, micros = divmod(value, 86_400_000_000)
        seconds, rest = divmod(micros, 1_000_000)
        time = (dt.datetime.min + dt.timedelta(seconds=seconds)).time()
        return f'"{_day(days)}T{time:%H:%M:%S}.{rest // 1000:03d}Z"'
    return str(value)


def _quote(text: str) -> str:
    """Return a text as a JSON string."""
    return f'"{text.translate(_ESCAPED)}"'


def _day(days: int) -> str:
    """Return a date, given in days since 1970, as Spark writes it."""
    return format_spark_date(str(np.datetime64(days, "D")))

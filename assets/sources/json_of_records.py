"""Records as JSON texts without Spark, byte for byte as Spark's to_json writes them, for the types that it can."""

from __future__ import annotations

import base64
import datetime as dt
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.schemas.readable_values import readable_values, spark_date

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.resources.schemas.schema import Schema

_TYPES = ("string", "boolean", "tinyint", "smallint", "int", "bigint", "date", "timestamp", "binary")
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
_ESCAPED = str.maketrans({**{chr(code): f"\\u{code:04X}" for code in range(32)}, **_SHORT})


def has_json(kind: str) -> bool:
    """Whether values of this type are written here; how Java writes fractions and decimals, only Java says."""
    return kind in _TYPES


def json_of_records(records: pa.Table, schema: Schema) -> pa.Array:
    """Return each record's columns as a JSON object; null columns stand in it as null."""
    import pyarrow as pa

    names = [f'"{name.translate(_ESCAPED)}":' for name in schema.names]
    columns = [_texts(records.column(field.name), field.type) for field in schema.fields]
    rows = zip(*columns, strict=True)
    texts = [",".join(name + text for name, text in zip(names, row, strict=True)) for row in rows]
    return pa.array([f"{{{text}}}" for text in texts], pa.string())


def _texts(column: pa.ChunkedArray, kind: str) -> list[str]:
    if kind in ("date", "timestamp"):
        column = column.cast("int32" if kind == "date" else "int64")
    return ["null" if value is None else _text(value, kind) for value in readable_values(column, "replace")]


def _text(value: Any, kind: str) -> str:
    if kind == "boolean":
        return "true" if value else "false"
    if kind == "string":
        return f'"{value.translate(_ESCAPED)}"'
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


def _day(days: int) -> str:
    import numpy as np

    return spark_date(str(np.datetime64(days, "D")))

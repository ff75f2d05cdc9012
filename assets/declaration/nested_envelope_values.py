"""The nested columns of rows in envelopes: from the JSON of the envelope to their declared types.

Tasks parse the JSON in Python, so that numbers are exact, and build the columns as Kafka's formats
do. The simple values within have the encodings of simple columns. JSON in a text, as Debezium sends
`jsonb` and `hstore`, is parsed where an array, a map or a struct is declared.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dagster_adjunct.assets.declaration.change_values import quote_value
from dagster_adjunct.assets.declaration.envelope_values import (
    Envelope,
    decimal_from_unscaled,
    decimal_from_variable_scale,
)
from dagster_adjunct.resources.lazy_modules import np, pa
from dagster_adjunct.resources.schemas.parsed_columns import (
    Converter,
    Reading,
    Unfit,
    build_column,
    has_decimals,
    simple_types,
)
from dagster_adjunct.resources.schemas.schema import Schema, quote_name
from dagster_adjunct.resources.schemas.types import decimal_digits, is_nested, types_from_spark
from dagster_adjunct.resources.spark.tasks import convert_in_tasks, names_by_position

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NESTED = "__nested"
"""The nested columns of the row after a change, as a struct."""
NESTED_PROBLEMS = "__nested_problems"
"""Why a nested column does not fit its type, by column, as a struct of texts."""
NESTED_BEFORE = "__nested_before"
NESTED_BEFORE_PROBLEMS = "__nested_before_problems"
"""The same of the row before a change, of which only the columns with the key are read."""
NESTED_COLUMNS = (NESTED, NESTED_PROBLEMS, NESTED_BEFORE, NESTED_BEFORE_PROBLEMS)

Side = Literal["after", "before"]

_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_ISO = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,6}0*)?)?(Z|[+-]\d\d(:?\d\d)?)", re.ASCII
)
_PLAIN_DECIMAL = re.compile(r"[+-]?\d{1,80}(\.\d{0,80})?", re.ASCII)
_FIRST_DAY = dt.date(1970, 1, 1)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_DOUBLE_DIGITS = 15


def nested_schema(schema: Schema) -> Schema:
    """Return the nested ones of these columns."""
    return Schema(tuple(field for field in schema.fields if is_nested(field.type)))


def with_nested_values(
    records: DataFrame, declared: Envelope, schema: Schema, text: str, side: Side = "after"
) -> DataFrame:
    """Return the records with the columns NESTED and NESTED_PROBLEMS added, from the envelopes in
    the column `text`, if the rows have nested columns; for the row before, NESTED_BEFORE and
    NESTED_BEFORE_PROBLEMS.
    """
    nested = nested_schema(schema)
    if not nested.fields:
        return records
    if side == "before":
        values_name = NESTED_BEFORE
        problems_name = NESTED_BEFORE_PROBLEMS
    else:
        values_name = NESTED
        problems_name = NESTED_PROBLEMS
    read = partial(
        _add_nested_values,
        index=records.columns.index(text),
        declared=declared,
        nested=nested,
        side=side,
    )
    columns = list(types_from_spark(records.schema).items())
    columns.append((values_name, _struct_type(nested)))
    problems = Schema.of(dict.fromkeys(nested.names, "string"))
    columns.append((problems_name, _struct_type(problems)))
    return convert_in_tasks(records, read, columns)


def _struct_type(schema: Schema) -> str:
    """Return the type, in Spark's SQL, of a struct of these columns."""
    members = [f"{quote_name(field.name)}:{field.type}" for field in schema.fields]
    return f"struct<{','.join(members)}>"


def _add_nested_values(
    batches: Iterator[pa.RecordBatch], index: int, declared: Envelope, nested: Schema, side: Side
) -> Iterator[pa.RecordBatch]:
    """Yield the batches with two more columns: the nested values of the envelopes at `index`, and
    why they don't fit.
    """
    decoder = json_decoder(nested)
    for batch in batches:
        texts = batch.column(index).to_pylist()
        read = read_nested_columns(texts, declared, nested, decoder, side)
        columns = [*batch.columns, read.values, read.problems]
        yield pa.RecordBatch.from_arrays(columns, names_by_position(columns))


def json_decoder(nested: Schema) -> json.JSONDecoder:
    """Return a decoder of JSON whose fractions are exact if a column has decimals."""
    if any(map(has_decimals, nested.fields)):
        return json.JSONDecoder(parse_float=Decimal)
    return json.JSONDecoder()


class NestedColumns(NamedTuple):
    """The nested columns of rows as an array of structs, and why their values don't fit, by
    column.
    """

    values: pa.Array
    problems: pa.Array


def read_nested_columns(
    texts: list[str | None],
    declared: Envelope,
    nested: Schema,
    decoder: json.JSONDecoder,
    side: Side = "after",
) -> NestedColumns:
    """Return the nested columns of the rows on this side of these envelopes, null for rows that
    don't fit. An envelope that is null has no row.
    """
    rows = []
    unread: dict[int, str] = {}  # the problem of all columns, by row
    for row, text in enumerate(texts):
        try:
            rows.append(_row_of(side, decoder.decode(text or "{}")))
        except (ValueError, RecursionError) as error:
            unread[row] = f"the envelope can't be read as JSON: {type(error).__name__}"
            rows.append({})
    reading = Reading(describe=_quote, parse_text=decoder.decode)
    columns = []
    reasons = []
    for field in nested.fields:
        problems = dict(unread)
        values = [row.get(field.name) for row in rows]
        converters = {
            path: _converter(declared, kind) for path, kind in simple_types(field).items()
        }
        column = build_column(values, field, converters, problems, reading)  # adds to `problems`
        fits = np.ones(len(rows), bool)
        fits[[*problems]] = False
        columns.append(column.take(_fitting_rows(fits)))
        reasons.append(pa.array([problems.get(row) for row in range(len(rows))], pa.string()))
    return NestedColumns(
        pa.StructArray.from_arrays(columns, fields=list(nested.to_arrow())),
        pa.StructArray.from_arrays(reasons, nested.names),
    )


def _fitting_rows(fits: Any) -> pa.Array:
    """Return the number of each row, or null if it does not fit: taking these makes such a row
    null.
    """
    return pa.array(np.arange(len(fits)), pa.int64(), mask=~fits)


def _row_of(side: Side, envelope: Any) -> dict[str, Any]:
    """Return the row on this side of a parsed envelope, or of its payload; {} if there is none."""
    found = envelope
    if isinstance(found, dict) and isinstance(found.get("payload"), dict):
        found = found["payload"]
    if isinstance(found, dict):
        found = found.get(side)
    if isinstance(found, dict):
        return found
    return {}


def _quote(value: object) -> str:
    """Return a value as a reason quotes it, marked as the record's."""
    if isinstance(value, str):
        return quote_value(value.encode("utf-8", "backslashreplace").decode())
    return quote_value(_json_text(value))


def _json_text(value: object) -> str:
    """Return a value as JSON, fractions as doubles."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=float)


def _converter(declared: Envelope, kind: str) -> Converter:
    """Return the converter from parsed JSON to a simple type; see `envelope_values.convert_value`,
    which it agrees with.
    """
    if decimal_digits(kind) is not None:
        return partial(_to_decimal, declared, kind)
    if kind == "timestamp":
        return partial(_to_timestamp, declared.timestamps)
    if kind in ("float", "double"):
        return partial(_to_float, kind, declared.format == "avro")
    converters: dict[str, Converter] = {
        "string": _to_string,
        "boolean": _to_boolean,
        "date": _to_date,
        "binary": _to_bytes,
    }
    return converters.get(kind, _to_integer)


def _to_integer(value: Any) -> int:
    """Return a whole number. Raises Unfit for anything else, also for a boolean."""
    if type(value) is not int:
        raise Unfit("")
    return value


def _to_float(kind: str, infinite: bool, value: Any) -> float:
    """Return the nearest number of this type, "float" or "double"; with `infinite`, what was sent
    may be infinite. Raises Unfit for one that is too large, and for anything else.
    """
    if type(value) not in (int, float, Decimal):
        raise Unfit("")
    nearest = float(value)
    with np.errstate(over="ignore"):
        if kind == "float":
            nearest = float(np.float32(nearest))
    is_sent_infinite = infinite and math.isinf(value)
    if math.isinf(nearest) and not is_sent_infinite:
        raise Unfit(": too large")
    return nearest


def _to_string(value: Any) -> str:
    """Return a text; of any other value its JSON."""
    if isinstance(value, str):
        return value
    return _json_text(value)


def _to_boolean(value: Any) -> bool:
    """Return a boolean; MySQL stores it as 0 or 1. Raises Unfit."""
    if isinstance(value, bool):
        return value
    if type(value) is int and value in (0, 1):
        return bool(value)
    raise Unfit("")


def _to_date(value: Any) -> dt.date:
    """Return a date from its text or its number of days. Raises Unfit."""
    if type(value) is int:
        return _FIRST_DAY + dt.timedelta(days=value)
    if isinstance(value, str) and _DATE.fullmatch(value):
        return dt.date.fromisoformat(value)
    raise Unfit("")


def _to_timestamp(unit: str | None, value: Any) -> dt.datetime:
    """Return a time from its text or its number of these units. Raises Unfit."""
    if isinstance(value, str) and _ISO.fullmatch(value):
        return dt.datetime.fromisoformat(value).astimezone(dt.UTC)
    if type(value) is not int:
        raise Unfit("")
    if unit is None:
        raise Unfit("; timestamps= says what it counts")
    factor = {"millis": 1000, "micros": 1}[unit]
    return _EPOCH + dt.timedelta(microseconds=value * factor)


def _to_bytes(value: Any) -> bytes:
    """Return the bytes of a text in base64. Raises Unfit, or ValueError for another text."""
    if not isinstance(value, str):
        raise Unfit("")
    return base64.b64decode(value, validate=True)


def _to_decimal(declared: Envelope, kind: str, value: Any) -> Decimal:
    """Return a decimal exactly as it was sent: in Debezium's "precise" encoding, as a number or as
    a text with one. Raises Unfit.
    """
    if declared.format == "json" and declared.decimals == "precise":
        return _to_precise_decimal(kind, value)
    # The numbers of other layouts have been doubles before.
    rounded = declared.layout != "rows" and isinstance(value, Decimal)
    if rounded and len(value.as_tuple().digits) > _DOUBLE_DIGITS:
        raise Unfit(f": a number of more than {_DOUBLE_DIGITS} digits has to be a text")
    if type(value) is int or isinstance(value, Decimal):
        return Decimal(value)
    if isinstance(value, str) and _PLAIN_DECIMAL.fullmatch(value):
        return Decimal(value)
    raise Unfit("")


def _to_precise_decimal(kind: str, value: Any) -> Decimal:
    """Return a decimal from Debezium's "precise" encoding. Raises Unfit."""
    _, scale = decimal_digits(kind) or (0, 0)
    text = None
    if isinstance(value, dict):
        text = decimal_from_variable_scale(json.dumps(value))
    elif isinstance(value, str):
        text = decimal_from_unscaled(value, scale)
    if text is None:
        raise Unfit("")
    return Decimal(text)

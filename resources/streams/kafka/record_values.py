"""Python values as Arrow columns of declared types: exactly, or with the reason why not."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.schemas.schema import Field, Schema, arrow_type

if TYPE_CHECKING:
    import pyarrow as pa

Convert = Callable[[Any], Any]
"""Takes a value that is not None; returns what Arrow takes for the column, or raises one of UNFIT."""

Problems = dict[int, str]
"""Why a row can't be read, by its number in the batch."""

SHOWN = 60
UNFIT = (ValueError, TypeError, ArithmeticError, LookupError, InvalidOperation)  # Arrow's own are ValueErrors
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,6}0*)?)?(Z|[+-]\d\d:?\d\d)")
_WHOLE = re.compile(r"[+-]?\d{1,40}")
_DECIMAL = re.compile(r"[+-]?\d{1,80}(\.\d{1,80})?")
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
# What Arrow itself turns into the column, checking the range.
_READY: Mapping[str, frozenset[type]] = {
    **dict.fromkeys(_INTEGERS, frozenset({int})),
    "double": frozenset({float}),
    "string": frozenset({str}),
    "boolean": frozenset({bool}),
    "binary": frozenset({bytes}),
}


def rows_of(
    data: Sequence[bytes | None], problems: Problems, parse: Callable[[bytes], dict[str, Any]]
) -> list[dict[str, Any] | None]:
    """Return what `parse` makes of each message, None where there are no bytes.

    Where it raises Unfit the row is None, and `problems` gets the error's text.
    """
    rows: list[dict[str, Any] | None] = []
    for row, datum in enumerate(data):
        record = None
        if datum is not None:
            try:
                record = parse(datum)
            except Unfit as error:
                problems[row] = str(error)
        rows.append(record)
    return rows


def columns_of(
    rows: Sequence[Mapping[str, Any] | None], schema: Schema, converts: Mapping[str, Convert], problems: Problems
) -> list[pa.Array]:
    """Return one array a column. What does not fit is null, and `problems` gets the reason.

    A row that is None is null throughout. `converts` has a function for every column that is to take more than Arrow's
    own: whole numbers, floating ones, texts, booleans and bytes as they are.
    """
    given: list[Mapping[str, Any]] = [row or {} for row in rows]
    return [
        column_of([row.get(field.name) for row in given], field, converts.get(field.name), problems)
        for field in schema.fields
    ]


def column_of(values: list[Any], field: Field, convert: Convert | None, problems: Problems) -> pa.Array:
    """Return one column; see `columns_of`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = arrow_type(field.type)
    ready = _READY.get(field.type)
    types = set(map(type, values)) - {type(None)}
    if (ready is not None and types <= ready) or convert is None:
        try:
            made = pa.array(values, kind)
            if convert is None or field.type != "double" or not pc.any(pc.is_inf(made)).as_py():
                return made
        except UNFIT:
            pass
    try:
        if convert is not None:
            return pa.array([None if value is None else convert(value) for value in values], kind)
    except UNFIT:
        pass
    kept: list[Any] = []
    for row, value in enumerate(values):
        try:
            converted = value if value is None or convert is None else convert(value)
            pa.array([converted], kind)
        except UNFIT as error:
            reason = str(error) if isinstance(error, Unfit) else ""
            problems.setdefault(row, f"column {field.name!r} is {brief(value)}, declared {field.type}{reason}")
            converted = None
        kept.append(converted)
    return pa.array(kept, kind)


class Unfit(ValueError):
    """A value that is none of the declared type; its text goes behind the reason."""


def brief(value: object) -> str:
    """Return what kind of value this is, and at most SHOWN characters of it, never all of a longer text."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float | Decimal):
        text = str(value)
        return text if len(text) <= SHOWN else f"a number of {len(text)} digits"
    if isinstance(value, str):
        return f"the text {json.dumps(part(value), ensure_ascii=False)}"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return f"a {type(value).__name__}"


def part(text: str) -> str:
    """Return the beginning of a text: half of it, at most SHOWN characters."""
    if not text:
        return text
    shown = text[: min(SHOWN - 1, (len(text) + 1) // 2)]
    return shown.encode("utf-8", "backslashreplace").decode() + "…"  # a lone surrogate can't be printed


# -- from JSON and from texts


def from_json(field: Field, timestamps: str | None) -> Convert:
    """Return how a JSON value becomes one of the column."""
    kind = field.type
    if kind in ("float", "double"):
        return _number(kind)
    if kind == "string":
        return _nested
    if kind == "timestamp" and timestamps is not None:
        return _counted(1000 if timestamps == "millis" else 1)
    if kind.startswith("decimal"):
        return _decimal
    made: dict[str, Convert] = {"date": _date, "timestamp": _timestamp, "binary": _base64, "boolean": _boolean}
    return made.get(kind, _integer)


def from_text(field: Field) -> Convert:
    """Return how a text, such as a message's key, becomes a value of the column."""
    kind = field.type
    if kind in _INTEGERS:
        return _whole
    if kind.startswith("decimal"):
        return _decimal
    made: dict[str, Convert] = {"date": _date, "timestamp": _timestamp, "binary": _base64, "boolean": _truth}
    return made.get(kind, _text)


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise Unfit("")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise Unfit("")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Unfit("")
    return value


def _nested(value: Any) -> str:
    """A text as it is; objects and lists as JSON text."""
    if isinstance(value, str):
        value.encode()  # a lone surrogate is no text
        return value
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=float)
    raise Unfit("")


def _number(kind: str) -> Convert:
    import numpy as np

    def convert(value: Any) -> float:
        if type(value) not in (int, float, Decimal):
            raise Unfit("")
        with np.errstate(over="ignore"):
            near = float(np.float32(value)) if kind == "float" else float(value)
        if math.isinf(near):  # JSON has no infinity: a number that is too large
            raise Unfit(": too large")
        return near

    return convert


def _decimal(value: Any) -> Decimal:
    if type(value) is int or isinstance(value, Decimal):
        return Decimal(value)
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        return Decimal(value)
    raise Unfit("")


def _date(value: Any) -> dt.date:
    if isinstance(value, str) and _DATE.fullmatch(value):
        return dt.date.fromisoformat(value)
    raise Unfit(": expected a text like 2024-01-31")


def _timestamp(value: Any) -> dt.datetime:
    if isinstance(value, str) and _TIME.fullmatch(value):
        return dt.datetime.fromisoformat(value).astimezone(dt.UTC)
    raise Unfit(": expected a text like 2024-01-31T09:30:00Z, with a zone and at most six decimals")


def _counted(factor: int) -> Convert:
    def convert(value: Any) -> dt.datetime:
        if type(value) is not int:
            raise Unfit(f": expected a whole number of {'milli' if factor == 1000 else 'micro'}seconds")
        return _EPOCH + dt.timedelta(microseconds=value * factor)

    return convert


def _base64(value: Any) -> bytes:
    if not isinstance(value, str):
        raise Unfit("")
    return base64.b64decode(value, validate=True)


def _whole(value: str) -> int:
    if not _WHOLE.fullmatch(value):
        raise Unfit("")
    return int(value)


def _truth(value: str) -> bool:
    if value not in ("true", "false"):
        raise Unfit("")
    return value == "true"


# -- to texts


def to_texts(column: pa.Array, kind: str) -> list[str | None]:
    """Return the values of a column as texts, each of which `from_text` reads as the same value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if kind == "string":
        return list(column.to_pylist())
    if kind == "boolean":
        return [None if value is None else str(value).lower() for value in column.to_pylist()]
    if kind == "timestamp":
        naive = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.timestamp("us"))
        return list(pc.strftime(naive, "%Y-%m-%dT%H:%M:%SZ").to_pylist())
    if kind == "binary":
        return [None if value is None else base64.b64encode(value).decode() for value in column.to_pylist()]
    if kind.startswith("decimal"):
        return [None if value is None else format(value, "f") for value in column.to_pylist()]
    return [None if value is None else str(value) for value in column.to_pylist()]

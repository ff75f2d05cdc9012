"""Avro schemas: which columns their types become, and the conversion of values that fastavro has
read.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
from collections.abc import Mapping, Sequence
from decimal import Context, Decimal
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from dagster_adjunct.resources.schemas.parsed_columns import Converter, Converters, Rewrite, Unfit
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Member,
    Simple,
    Struct,
    Type,
    decimal_digits,
    write_name,
)

_EXACT = Context(prec=38)  # as many digits as a column has; the default rounds to 28
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
TIMES = tuple(
    f"{kind}-{unit}"
    for kind in ("time", "timestamp", "local-timestamp")
    for unit in ("millis", "micros")
)
_LOGICAL_TYPES: Mapping[str | None, str] = {
    **dict.fromkeys(("uuid", *TIMES), "string"),
    **dict.fromkeys(("timestamp-millis", "timestamp-micros"), "timestamp"),
    "date": "date",
}
COLUMN_TYPES = {
    "int": "int",
    "long": "bigint",
    "float": "float",
    "double": "double",
    "boolean": "boolean",
    "string": "string",
    "bytes": "binary",
    "fixed": "binary",
    "enum": "string",
}


def without_null(declared: Any) -> Any:
    """Return the type without null: for a union of null and one other type that other type, else
    the type itself.
    """
    if isinstance(declared, list):
        others = [branch for branch in declared if branch != "null"]
        if len(others) == 1:
            return others[0]
    return declared


class TypeName(NamedTuple):
    """The name of an Avro type, "union" for several types, and its logical type."""

    name: str
    logical: str | None = None


def type_name(declared: Any) -> TypeName:
    """Return the name of a type, ignoring null."""
    kind = without_null(declared)
    if isinstance(kind, dict):
        return TypeName(str(kind["type"]), kind.get("logicalType"))
    if isinstance(kind, list):
        return TypeName("union")
    return TypeName(str(kind))


def avro_type(declared: Any) -> Type:
    """Return the type of the values of this Avro type in a column.

    JSON text stands for what no column can hold: unions of several types, records without fields or
    with names that differ only in case, and a record within itself.
    """
    name, logical = type_name(declared)
    kind = without_null(declared)
    if logical == "decimal":
        return Simple(f"decimal({kind['precision']},{kind.get('scale', 0)})")
    if name == "array":
        return Array(avro_type(kind["items"]))
    if name == "map":
        return Map(avro_type(kind["values"]))
    if name == "record" and _is_struct([each["name"] for each in kind["fields"]]):
        members = [Member(each["name"], avro_type(each["type"])) for each in kind["fields"]]
        return Struct(tuple(members))
    return Simple(_LOGICAL_TYPES.get(logical) or COLUMN_TYPES.get(name, "string"))


def _is_struct(names: Sequence[str]) -> bool:
    """Whether a struct can have these fields."""
    return bool(names) and len({name.lower() for name in names}) == len(names)


def is_json_text(declared: Any) -> bool:
    """Return whether values of an Avro type become JSON text."""
    name = type_name(declared).name
    return name not in COLUMN_TYPES and isinstance(avro_type(declared), Simple)


def avro_converters(declared: Any, path: str = "") -> Converters:
    """Return the converters of a field's values from fastavro, by their paths in its column."""
    type_ = avro_type(declared)
    kind = without_null(declared)
    if isinstance(type_, Array):
        return avro_converters(kind["items"], f"{path}[]")
    if isinstance(type_, Map):
        return avro_converters(kind["values"], f"{path}[*]")
    if isinstance(type_, Struct):
        found: dict[str, Converter | None] = {}
        for each in kind["fields"]:
            found |= avro_converters(each["type"], f"{path}.{write_name(each['name'])}")
        return found
    return {path: avro_converter(declared)}


def avro_converter(declared: Any) -> Converter | None:
    """Return the function that converts simple values from fastavro, None if they need none.

    The values have the logical type of the writer's schema. An older schema may have none, so that
    a timestamp is an integer, for example.
    """
    if is_json_text(declared):
        return Rewrite(to_json_text)
    kind = str(avro_type(declared))
    if kind == "timestamp":
        in_millis = type_name(declared).logical == "timestamp-millis"
        return partial(_to_timestamp, 1000 if in_millis else 1)
    if kind == "date":
        return _to_date
    digits = decimal_digits(kind)
    if digits is not None:
        return partial(_to_decimal, digits.scale)
    if kind == "string":
        return _to_text
    return None


def _to_timestamp(factor: int, value: Any) -> dt.datetime:
    """Return a time; an integer is one in units of `factor` microseconds since 1970."""
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value
    if type(value) is not int:
        raise Unfit(": a time without a zone" if isinstance(value, dt.datetime) else "")
    return _EPOCH + dt.timedelta(microseconds=value * factor)


def _to_date(value: Any) -> dt.date:
    """Return a date; an integer is one in days since 1970."""
    if type(value) is int:
        return dt.date(1970, 1, 1) + dt.timedelta(days=value)
    if not isinstance(value, dt.date) or isinstance(value, dt.datetime):
        raise Unfit("")
    return value


def _to_decimal(scale: int, value: Any) -> Decimal:
    """Return a decimal; bytes are its unscaled number. Raises Unfit for other values, and for more
    digits than a column has.
    """
    if isinstance(value, bytes):
        unscaled = int.from_bytes(value, "big", signed=True)
        if abs(unscaled) >= 10**_EXACT.prec:
            raise Unfit(f": a number of more than {_EXACT.prec} digits")
        return Decimal(unscaled).scaleb(-scale, _EXACT)
    if not isinstance(value, Decimal):
        raise Unfit("")
    return value


def _to_text(value: Any) -> str:
    """Return a text, a time or a UUID as text."""
    if isinstance(value, dt.time | dt.datetime):
        return value.isoformat()
    if isinstance(value, str | UUID):
        return str(value)
    raise Unfit("")


def to_json_text(value: Any) -> str:
    """Return a value of fastavro as JSON text."""
    try:
        return json.dumps(value, default=_json_default, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise Unfit(": too many levels") from error


def _json_default(value: Any) -> Any:
    """Return what JSON has in place of a value that it does not know."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    return str(value)


def is_nullable(declared: Any) -> bool:
    """Whether an Avro type is null, or a union with it."""
    return declared == "null" or (isinstance(declared, list) and "null" in declared)

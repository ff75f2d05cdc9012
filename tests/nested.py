"""Drawn types of nested columns with drawn values, and comparisons of such values in plain
Python.
"""

from __future__ import annotations

import datetime as dt
import math
import random
from decimal import Decimal
from typing import Any

from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import Array, Map, Member, Simple, Struct, Type

SIMPLE = (
    "string",
    "boolean",
    "tinyint",
    "int",
    "bigint",
    "float",
    "double",
    "date",
    "timestamp",
    "binary",
    "decimal(10,2)",
    "decimal(30,3)",
)
NAMES = ("a", "B", "c d", "e.f", "g`h", "äü")
TEXTS = ("", "x", "y", "äö", "longer than eight bytes")


def draw_type(random_: random.Random, depth: int) -> Type:
    """Return a nested type of at most this depth."""
    kind = random_.choice(["array", "map", "struct", "struct"])
    if kind == "array":
        return Array(_draw_part(random_, depth))
    if kind == "map":
        return Map(_draw_part(random_, depth))
    names = random_.sample(NAMES, random_.randint(1, 3))
    return Struct(tuple(Member(name, _draw_part(random_, depth)) for name in names))


def _draw_part(random_: random.Random, depth: int) -> Type:
    if depth > 1 and random_.random() < 0.6:
        return draw_type(random_, depth - 1)
    return Simple(random_.choice(SIMPLE))


def draw_value(random_: random.Random, type_: Type) -> Any:
    """Return a value of the type; one of six is null, also inside."""
    if random_.random() < 1 / 6:
        return None
    if isinstance(type_, Array):
        return [draw_value(random_, type_.element) for _ in range(random_.randint(0, 3))]
    if isinstance(type_, Map):
        keys = random_.sample(TEXTS, random_.randint(0, 3))
        return {key: draw_value(random_, type_.value) for key in keys}
    if isinstance(type_, Struct):
        return {member.name: draw_value(random_, member.type) for member in type_.members}
    return _draw_simple(random_, type_.name)


def _draw_simple(random_: random.Random, kind: str) -> Any:
    number = random_.randint(-3, 3)
    if kind in ("float", "double"):
        return random_.choice([0.0, -0.0, 1.5, math.nan, math.inf])
    if kind.startswith("decimal"):
        return Decimal(number).scaleb(-2)
    return {
        "string": random_.choice(TEXTS),
        "boolean": number > 0,
        "date": dt.date(2026, 1, 4 + number),
        "timestamp": dt.datetime(2026, 1, 4 + number, 12, 0, 0, 123456, tzinfo=dt.UTC),
        "binary": bytes([0, 4 + number]),
    }.get(kind, number)


def comparable(value: Any) -> Any:
    """Return a nested value so that equal ones, as columns have it, are equal in Python: NaN
    equals NaN, and -0.0 equals 0.0.
    """
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value
    if isinstance(value, list):
        return [comparable(item) for item in value]
    if isinstance(value, dict):
        return {name: comparable(item) for name, item in value.items()}
    return value


def draw_schema(random_: random.Random, columns: int = 3, depth: int = 3) -> Schema:
    """Return a key `k` and drawn nested columns v0, v1, …"""
    types = {f"v{place}": str(draw_type(random_, depth)) for place in range(columns)}
    return Schema.of({"k": "bigint", **types})


def draw_rows(random_: random.Random, schema: Schema, keys: Any) -> list[dict[str, Any]]:
    """Return a row for each key."""
    from dagster_adjunct.resources.schemas.types import parse_type

    rows = []
    for key in keys:
        values = {
            field.name: draw_value(random_, parse_type(field.type)) for field in schema.fields[1:]
        }
        rows.append({"k": key, **values})
    return rows

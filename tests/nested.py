"""Drawn schemas of nested columns with drawn values, and the comparison of such values in plain
Python.

What is drawn depends on the `Random` alone: one with a seed, or Hypothesis's, which shrinks what it
finds (`st.randoms(use_true_random=False)`).
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from random import Random
from typing import Any

from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Member,
    Simple,
    Struct,
    Type,
    decimal_digits,
    parse_type,
    write_name,
)

BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
SIMPLE = (
    *BITS,
    *("string", "boolean", "float", "double", "date", "timestamp", "binary"),
    *("decimal(10,2)", "decimal(30,4)"),
)
NAMES = ("a", "B", "City", "c d", "e.f", "g`h", "`q`", "äü", "key", "value", "list")
PLAIN_NAMES = ("a", "B", "city", "key", "value", "list", "x_1")
_CHARACTERS = "ab'\"\\ .`%é\n\u2028\U0001f600"
_TEXTS = ("", "x", "y", "äö", "longer than eight bytes", "null", "1", "a.b")
_EXACT = Context(prec=60)


@dataclass(frozen=True)
class Limits:
    """What a path can hold: names of fields, simple types, numbers that are finite, maps with an
    empty key, and, of arrays and maps, those that Protobuf has, which are never null, nor within
    each other, nor have nulls.
    """

    names: Sequence[str] = NAMES
    simple: Sequence[str] = SIMPLE
    finite: bool = False
    empty_keys: bool = True
    like_protobuf: bool = False


ANYTHING = Limits()


def draw_type(random_: Random, depth: int, limits: Limits = ANYTHING) -> Type:
    """Return a nested type of at most this depth."""
    kind = random_.choice(["array", "map", "struct", "struct"])
    if kind == "struct":
        names = random_.sample(limits.names, random_.randint(1, 3))
        members = [Member(name, _draw_part(random_, depth, limits)) for name in names]
        return Struct(tuple(members))
    part = _draw_part(random_, depth, limits)
    while limits.like_protobuf and isinstance(part, Array | Map):
        part = _draw_part(random_, depth, limits)
    if kind == "array":
        return Array(part)
    return Map(part)


def _draw_part(random_: Random, depth: int, limits: Limits) -> Type:
    if depth > 1 and random_.random() < 0.6:
        return draw_type(random_, depth - 1, limits)
    return Simple(random_.choice(limits.simple))


def draw_value(random_: Random, type_: Type, limits: Limits = ANYTHING) -> Any:
    """Return a value of the type; one of six is null, also inside."""
    has_null = not (limits.like_protobuf and isinstance(type_, Array | Map))
    if has_null and random_.random() < 1 / 6:
        return None
    if isinstance(type_, Struct):
        members = {}
        for member in type_.members:
            members[member.name] = draw_value(random_, member.type, limits)
        return members
    if isinstance(type_, Simple):
        return _draw_simple(random_, type_.name, limits)
    count = random_.randint(0, 3)
    if isinstance(type_, Array):
        return [_draw_element(random_, type_.element, limits) for _ in range(count)]
    names = dict.fromkeys(_draw_text(random_) for _ in range(count))
    if not limits.empty_keys:
        names.pop("", None)
    return {name: _draw_element(random_, type_.value, limits) for name in names}


def _draw_element(random_: Random, type_: Type, limits: Limits) -> Any:
    value = draw_value(random_, type_, limits)
    while limits.like_protobuf and value is None:
        value = draw_value(random_, type_, limits)
    return value


def _draw_simple(random_: Random, kind: str, limits: Limits) -> Any:
    if kind in BITS:
        return _draw_integer(random_, 2 ** (BITS[kind] - 1) - 1)
    digits = decimal_digits(kind)
    if digits is not None:
        number = _draw_integer(random_, 10 ** digits[0] - 1)
        return Decimal(number).scaleb(-digits[1], _EXACT)
    if kind in ("float", "double"):
        return _draw_float(random_, kind, limits)
    if kind == "string":
        return _draw_text(random_)
    if kind == "binary":
        return bytes(random_.randrange(256) for _ in range(random_.randint(0, 3)))
    if kind == "boolean":
        return random_.random() < 0.5
    day = dt.date.fromordinal(740_000 + _draw_integer(random_, 730_000))
    if kind == "date":
        return day
    micros = random_.choice([0, 1_000, 43_200_123_456])
    return dt.datetime(day.year, day.month, day.day, tzinfo=dt.UTC) + dt.timedelta(
        microseconds=micros
    )


def _draw_integer(random_: Random, most: int) -> int:
    """Return a small number, which others are equal to, or one of all."""
    if random_.random() < 0.6:
        return random_.randint(-3, 3)
    return random_.choice([most, -most, random_.randint(-most, most)])


def _draw_text(random_: Random) -> str:
    if random_.random() < 0.6:
        return random_.choice(_TEXTS)
    return "".join(random_.choice(_CHARACTERS) for _ in range(random_.randint(1, 4)))


def _draw_float(random_: Random, kind: str, limits: Limits) -> float:
    number = random_.choice([0.0, -0.0, 1.5, 0.1, -1e30, random_.uniform(-1, 1)])
    if not limits.finite and random_.random() < 0.3:
        number = random_.choice([math.nan, math.inf, -math.inf])
    if kind == "float":
        return float(struct.unpack("f", struct.pack("f", number))[0])
    return number


def draw_schema(
    random_: Random, columns: int = 3, depth: int = 3, limits: Limits = ANYTHING
) -> Schema:
    """Return a key `k` and drawn nested columns v0, v1, …"""
    types = {f"v{place}": str(draw_type(random_, depth, limits)) for place in range(columns)}
    return Schema.of({"k": "bigint", **types})


def draw_rows(
    random_: Random, schema: Schema, keys: Iterable[Any], limits: Limits = ANYTHING
) -> list[dict[str, Any]]:
    """Return a row for each key."""
    types = {field.name: parse_type(field.type) for field in schema.fields[1:]}
    rows = []
    for key in keys:
        values = {name: draw_value(random_, type_, limits) for name, type_ in types.items()}
        rows.append({"k": key, **values})
    return rows


def comparable(value: Any) -> Any:
    """Return a value so that equal ones, as columns have it, are equal in Python, and others are
    not: NaN equals NaN and -0.0 equals 0.0, but a number has one type. The order of the entries of
    a map, and of the members of a struct, has no meaning in a dictionary.
    """
    if isinstance(value, dict):
        return {name: comparable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    if isinstance(value, float):
        return f"float {value + 0.0}"
    if isinstance(value, Decimal):
        return f"decimal {value.normalize(_EXACT)}"
    if isinstance(value, bool):
        return f"boolean {value}"
    return value


def comparable_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows for a comparison, sorted by k, without the columns that streams add."""
    own = []
    for row in sorted(rows, key=lambda row: repr(row["k"])):
        own.append({name: comparable(row[name]) for name in row if not name.startswith("__")})
    return own


def write_json(value: Any, omit: bool = False) -> str:
    """Return a value as JSON in Adjunct's forms; with `omit`, objects lack the members that are null."""
    if isinstance(value, dict):
        members = []
        for name, member in value.items():
            if not (omit and member is None):
                members.append(f"{json.dumps(name)}: {write_json(member, omit)}")
        return f"{{{', '.join(members)}}}"
    if isinstance(value, list):
        return f"[{','.join(write_json(item, omit) for item in value)}]"
    if isinstance(value, dt.date):
        return f'"{value.isoformat()}"'
    if isinstance(value, bytes):
        return f'"{base64.b64encode(value).decode()}"'
    if isinstance(value, Decimal):
        return f"{value:f}"
    return json.dumps(value, ensure_ascii=False)


Steps = tuple[tuple[str, Any], ...]
"""The way to a part of a nested value: the text that each step adds to the path, and what finds it
in Python: a name, a place or a key.
"""


def parts_of(type_: Type, value: Any, steps: Steps = ()) -> Iterator[tuple[Steps, Type]]:
    """Yield the way to each part of a value, and its type."""
    yield steps, type_
    if value is None or isinstance(type_, Simple):
        return
    if isinstance(type_, Struct):
        for member in type_.members:
            step = (f".{write_name(member.name)}", member.name)
            yield from parts_of(member.type, value[member.name], (*steps, step))
        return
    if isinstance(type_, Array):
        inner = [(("[]", place), type_.element, item) for place, item in enumerate(value)]
    else:
        inner = [(("[*]", key), type_.value, item) for key, item in value.items()]
    for step, part, item in inner:
        yield from parts_of(part, item, (*steps, step))


def spoil(random_: Random, row: dict[str, Any], column: str, type_: Type) -> tuple[Any, str]:
    """Return a row whose column has a part of another kind, and the path of the part."""
    ways = [*parts_of(type_, row[column])]
    steps, part = random_.choice(ways)
    wrong: Any = "no"
    if not isinstance(part, Simple) or part.name in ("string", "binary"):
        wrong = 5
    path = column + "".join(text for text, _ in steps)
    return {**row, column: _with_part(row[column], [place for _, place in steps], wrong)}, path


def _with_part(value: Any, places: Sequence[Any], part: Any) -> Any:
    if not places:
        return part
    first, *rest = places
    if isinstance(value, list):
        return [*value[:first], _with_part(value[first], rest, part), *value[first + 1 :]]
    return {**value, first: _with_part(value[first], rest, part)}


def spoil_type(random_: Random, type_: Type, path: str) -> tuple[Type, str]:
    """Return a type that has another one at a drawn place, and the path of that place."""
    if isinstance(type_, Simple) or random_.random() < 0.2:
        return Simple("date" if str(type_) == "boolean" else "boolean"), path
    if isinstance(type_, Array):
        element, path = spoil_type(random_, type_.element, f"{path}[]")
        return Array(element), path
    if isinstance(type_, Map):
        value, path = spoil_type(random_, type_.value, f"{path}[*]")
        return Map(value), path
    members = [*type_.members]
    place = random_.randrange(len(members))
    name = members[place].name
    changed, path = spoil_type(random_, members[place].type, f"{path}.{write_name(name)}")
    members[place] = Member(name, changed)
    return Struct(tuple(members)), path

"""Draws schemas with nested columns, and rows for them as plain Python values."""

from __future__ import annotations

import datetime as dt
from decimal import Context, Decimal
from typing import Any

from hypothesis import strategies as st

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
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=4)
_EXACT = Context(prec=60)
_BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_TIMES = st.datetimes(
    dt.datetime(1, 1, 2), dt.datetime(9999, 12, 30), timezones=st.just(dt.UTC)
) | st.just(dt.datetime(2026, 1, 31, 9, 30, tzinfo=dt.UTC))
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string": TEXTS,
    "boolean": st.booleans(),
    "float": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "double": st.floats(allow_nan=False, allow_infinity=False),
    "date": st.dates(),
    "timestamp": _TIMES,
    "binary": st.binary(max_size=5),
}
SIMPLE = [*_BITS, *_VALUES, "decimal(9,2)", "decimal(30,4)"]
_NAMES = st.sampled_from(["a", "b", "City", "zip code", "x.y", "é", "`q`", "key", "value", "list"])


def types(depth: int) -> st.SearchStrategy[Type]:
    """Return a strategy for types with at most this number of levels below them."""
    simple = st.sampled_from(SIMPLE).map(Simple)
    if depth == 0:
        return simple
    inner = types(depth - 1)
    return simple | inner.map(Array) | inner.map(Map) | structs(inner)


def structs(inner: st.SearchStrategy[Type]) -> st.SearchStrategy[Type]:
    """Return a strategy for structs of one to three members."""
    members = st.builds(Member, _NAMES, inner)
    many = st.lists(members, min_size=1, max_size=3, unique_by=lambda member: member.name.lower())
    return many.map(lambda found: Struct(tuple(found)))


def values(type_: Type) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a type, or None."""
    if isinstance(type_, Array):
        return st.none() | st.lists(values(type_.element), max_size=3)
    if isinstance(type_, Map):
        return st.none() | st.dictionaries(TEXTS, values(type_.value), max_size=3)
    if isinstance(type_, Struct):
        members = {member.name: values(member.type) for member in type_.members}
        return st.none() | st.fixed_dictionaries(members)
    return st.none() | _simple_values(type_.name)


def _simple_values(kind: str) -> st.SearchStrategy[Any]:
    if kind in _BITS:
        bound = 2 ** (_BITS[kind] - 1)
        return st.integers(-bound, bound - 1)
    digits = decimal_digits(kind)
    if digits is not None:
        bound = 10 ** digits[0] - 1
        return st.integers(-bound, bound).map(
            lambda number: Decimal(number).scaleb(-digits[1], _EXACT)
        )
    return _VALUES[kind]


def stored(value: Any) -> Any:
    """Return a value as it is stored: entries of maps sorted by the UTF-8 of their keys.

    Members of structs are a dictionary too, so that these are sorted in both of two values that
    are compared.
    """
    if isinstance(value, list):
        return [stored(item) for item in value]
    if isinstance(value, dict):
        return {key: stored(value[key]) for key in sorted(value, key=str.encode)}
    return value


@st.composite
def schemas(draw: st.DrawFn, depth: int = 3) -> Schema:
    """Draw a schema of a key `k`, a bigint, and one to three columns of any type."""
    columns = draw(st.lists(types(depth), min_size=1, max_size=3))
    return Schema.of({"k": "bigint"} | {f"c{i}": str(kind) for i, kind in enumerate(columns)})


@st.composite
def schemas_with_rows(draw: st.DrawFn, depth: int = 3) -> tuple[Schema, list[dict[str, Any]]]:
    """Draw a schema, and rows whose `k` is their number."""
    schema = draw(schemas(depth))
    others = {
        field.name: values(parse_type(field.type)) for field in schema.fields if field.name != "k"
    }
    rows = draw(st.lists(st.fixed_dictionaries(others), min_size=1, max_size=4))
    return schema, [{"k": number, **row} for number, row in enumerate(rows)]

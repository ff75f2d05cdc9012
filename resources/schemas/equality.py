"""Compares nested values where Arrow, Spark and Python can't.

All engines compare nested values by their digests or with these functions. Both follow the rules of
columns of floats: NaN equals NaN, and -0.0 equals 0.0. The entries of stored maps are sorted, so
that equal maps are stored alike.
"""

from __future__ import annotations

from math import isnan
from typing import Any

from dagster_adjunct.resources.lazy_modules import np, pa, pc, pt
from dagster_adjunct.resources.schemas.arrow_values import as_lists
from dagster_adjunct.resources.schemas.schema import quote_name, quote_text
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Struct,
    arrow_type,
    has_maps,
    parse_type,
)


def differing_values(old: pa.Array, new: pa.Array) -> Any:
    """Return a numpy mask of the places in which two arrays of one type differ; null equals
    null.
    """
    differs = np.asarray(pc.xor(old.is_null(), new.is_null()))
    both = pc.and_(old.is_valid(), new.is_valid())
    if not pc.all(both).as_py():
        old = old.filter(both)
        new = new.filter(both)
    differs[np.asarray(both)] = _differing_present(old, new)
    return differs


def _differing_present(old: pa.Array, new: pa.Array) -> Any:
    """Return what `differing_values` returns, for arrays without nulls."""
    kind = old.type
    if not pt.is_nested(kind):
        return _differing_simple(old, new)
    if pt.is_struct(kind):
        differs = np.zeros(len(old), np.bool_)
        for before, after in zip(old.flatten(), new.flatten(), strict=True):
            differs |= differing_values(before, after)
        return differs
    old = as_lists(old)
    new = as_lists(new)
    sizes = pc.list_value_length(old)
    same_size = pc.equal(sizes, pc.list_value_length(new))
    differs = ~np.asarray(same_size)
    before = pc.list_flatten(old.filter(same_size))
    after = pc.list_flatten(new.filter(same_size))
    rows = np.repeat(np.nonzero(~differs)[0], np.asarray(sizes)[~differs])  # of each element
    differs[rows[differing_values(before, after)]] = True
    return differs


def _differing_simple(old: pa.Array, new: pa.Array) -> Any:
    """Return what `differing_values` returns, for simple values without nulls."""
    differs = pc.not_equal(old, new)
    if pt.is_floating(old.type):
        differs = pc.and_not(differs, pc.and_(pc.is_nan(old), pc.is_nan(new)))
    return np.asarray(differs)


_NAN = object()


def comparable_value(value: Any) -> Any:
    """Return a Python value, as Arrow or Spark returns it, so that `==` compares it by these rules:
    NaN becomes an object that equals itself, at every depth.
    """
    if isinstance(value, float) and isnan(value):
        return _NAN
    if isinstance(value, dict):
        return {name: comparable_value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [comparable_value(item) for item in value]
    return value


def comparable_sql(value: str, kind: str) -> str:
    """Return Spark SQL of a value that Spark can compare: maps, which it can't, become arrays of
    their entries, at every depth. `value` is the SQL of a stored value of the type `kind`.
    """
    if not has_maps(arrow_type(kind)):
        return value
    type_ = parse_type(kind)
    if isinstance(type_, Struct):
        members = []
        for member in type_.members:
            part = comparable_sql(f"{value}.{quote_name(member.name)}", str(member.type))
            members.append(f"{quote_text(member.name)}, {part}")
        # A null struct differs from a struct of nulls.
        return f"if({value} IS NULL, NULL, named_struct({', '.join(members)}))"
    if isinstance(type_, Array):
        return f"transform({value}, x -> {comparable_sql('x', str(type_.element))})"
    assert isinstance(type_, Map), "it has maps"
    entry = f"named_struct('key', x.key, 'value', {comparable_sql('x.value', str(type_.value))})"
    return f"transform(map_entries({value}), x -> {entry})"

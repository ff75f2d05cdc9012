"""Converts Spark's values to the types of columns, in the form that is stored, at every depth."""

from __future__ import annotations

from dagster_adjunct.resources.schemas.schema import quote_name, quote_text
from dagster_adjunct.resources.schemas.types import Array, Map, Struct, Type, nested_types


def stored_value_sql(value: str, given: Type, wanted: Type, cast: str = "CAST") -> str:
    """Return the SQL of a value of type `given`, whose SQL is `value`, as one of type `wanted` in
    the form that is stored: members of structs by name, null where missing, and entries of maps
    sorted by key. Simple values are converted by `cast`.
    """
    return _stored_sql(value, given, wanted, cast, 0)


def _stored_sql(value: str, given: Type, wanted: Type, cast: str, depth: int) -> str:
    if given == wanted and not _has_map(wanted):
        return value
    if isinstance(wanted, Struct) and isinstance(given, Struct):
        members = []
        for member in wanted.members:
            found = given.member(member.name)
            part = f"CAST(NULL AS {member.type})"
            if found is not None:
                name = f"{value}.{quote_name(member.name)}"
                part = _stored_sql(name, found.type, member.type, cast, depth)
            members.append(f"{quote_text(member.name)}, {part}")
        return f"CASE WHEN {value} IS NOT NULL THEN named_struct({', '.join(members)}) END"
    one = f"__v{depth}"
    if isinstance(wanted, Array) and isinstance(given, Array):
        part = _stored_sql(one, given.element, wanted.element, cast, depth + 1)
        return f"transform({value}, {one} -> {part})"
    if isinstance(wanted, Map) and isinstance(given, Map):
        part = _stored_sql(f"{one}.value", given.value, wanted.value, cast, depth + 1)
        entry = f"named_struct('key', {one}.key, 'value', {part})"
        entries = f"transform(map_entries({value}), {one} -> {entry})"
        return f"map_from_entries(array_sort({entries}, {_BY_KEY}))"
    return f"{cast}({value} AS {wanted})"


# Without it, Spark compares values too, which it can't if these have maps.
_BY_KEY = (
    "(__l, __r) -> CASE WHEN __l.key < __r.key THEN -1 WHEN __l.key > __r.key THEN 1 ELSE 0 END"
)


def _has_map(type_: Type) -> bool:
    return any(isinstance(part, Map) for _, part in nested_types(type_))

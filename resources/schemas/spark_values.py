"""Converts Spark's values to the types of columns, at every depth."""

from __future__ import annotations

from dagster_adjunct.resources.schemas.schema import quote_name, quote_text
from dagster_adjunct.resources.schemas.types import Array, Map, Struct, Type


def fitted_value_sql(
    value: str, given: Type, wanted: Type, cast: str = "CAST", depth: int = 0
) -> str:
    """Return the SQL of a value of type `given`, whose SQL is `value`, as one of type `wanted`.

    Members of structs are found by their names, and null where missing, unlike in Spark's casts of
    structs. Simple values are converted by `cast`. `depth` is the number of functions around it.
    """
    if given == wanted:
        return value
    if isinstance(wanted, Struct) and isinstance(given, Struct):
        members = []
        for member in wanted.members:
            found = given.member(member.name)
            part = f"CAST(NULL AS {member.type})"
            if found is not None:
                name = f"{value}.{quote_name(member.name)}"
                part = fitted_value_sql(name, found.type, member.type, cast, depth)
            members.append(f"{quote_text(member.name)}, {part}")
        return f"CASE WHEN {value} IS NOT NULL THEN named_struct({', '.join(members)}) END"
    one = f"__v{depth}"
    if isinstance(wanted, Array) and isinstance(given, Array):
        part = fitted_value_sql(one, given.element, wanted.element, cast, depth + 1)
        return f"transform({value}, {one} -> {part})"
    if isinstance(wanted, Map) and isinstance(given, Map):
        part = fitted_value_sql(one, given.value, wanted.value, cast, depth + 1)
        return f"transform_values({value}, (__k, {one}) -> {part})"
    return f"{cast}({value} AS {wanted})"

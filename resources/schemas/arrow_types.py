"""Converts types of columns to Arrow's types, and back."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import pa, pt
from dagster_adjunct.resources.schemas.types import (
    SIMPLE_TYPES,
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

# The functions of pyarrow that return the Arrow types.
_ARROW_TYPES = {
    "string": "string",
    "boolean": "bool_",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "date": "date32",
    "binary": "binary",
}


@lru_cache(maxsize=1024)
def arrow_type(kind: str) -> Any:
    """Return the Arrow type of a type's text; timestamps are in microseconds, UTC."""
    return _to_arrow(parse_type(kind))


def _to_arrow(type_: Type) -> pa.DataType:
    if isinstance(type_, Array):
        return pa.list_(pa.field("element", _to_arrow(type_.element)))
    if isinstance(type_, Map):
        return pa.map_(pa.string(), _to_arrow(type_.value))
    if isinstance(type_, Struct):
        return pa.struct([(member.name, _to_arrow(member.type)) for member in type_.members])
    digits = decimal_digits(type_.name)
    if digits is not None:
        return pa.decimal128(*digits)
    if type_.name == "timestamp":
        return pa.timestamp("us", tz="UTC")
    return getattr(pa, _ARROW_TYPES[type_.name])()


def type_from_arrow(field: pa.Field) -> str:
    """Return the text of the type of an Arrow column, or Arrow's own name for a type that no
    schema may have.
    """
    return str(tree_from_arrow(field.type, field.name))


def tree_from_arrow(kind: pa.DataType, path: str) -> Type:
    """Return an Arrow type as a tree; `path` names its place in errors. A type that no schema may
    have is a simple one with Arrow's own name.
    """
    if pt.is_dictionary(kind):
        kind = kind.value_type
    if is_list(kind):
        return Array(tree_from_arrow(kind.value_type, f"{path}[]"))
    if pt.is_struct(kind):
        members = []
        for field in kind:
            inner = f"{path}.{write_name(field.name)}"
            members.append(Member(field.name, tree_from_arrow(field.type, inner)))
        return Struct(tuple(members))
    if not pt.is_map(kind):
        return Simple(_simple_from_arrow(kind, path))
    value = tree_from_arrow(kind.item_type, f"{path}[*]")
    key = tree_from_arrow(kind.key_type, path)
    if key == Simple("string"):
        return Map(value)
    return Simple(f"map<{key},{value}>")


def _simple_from_arrow(kind: pa.DataType, path: str) -> str:
    if pt.is_large_string(kind) or pt.is_string_view(kind):
        return "string"
    if pt.is_large_binary(kind) or pt.is_binary_view(kind):
        return "binary"
    if pt.is_timestamp(kind):
        if kind.tz is None:
            problem = f"column {path!r} is a timestamp without a time zone."
            raise SchemaMismatchError(problem, time_zone_advice(path), column=path)
        return "timestamp"
    if pt.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return next((name for name in SIMPLE_TYPES if arrow_type(name).equals(kind)), str(kind))


def time_zone_advice(name: str) -> str:
    """Return how to give the times of a column a time zone."""
    return (
        f"Set its time zone, as in pandas df[{name!r}].dt.tz_localize('UTC'), or in Arrow "
        f"pyarrow.compute.assume_timezone(table[{name!r}], 'UTC')."
    )


def is_list(kind: pa.DataType) -> bool:
    """Whether an Arrow type is one of its types of lists."""
    return bool(
        pt.is_list(kind)
        or pt.is_large_list(kind)
        or pt.is_fixed_size_list(kind)
        or pt.is_list_view(kind)
        or pt.is_large_list_view(kind)
    )


def is_same_family(given: pa.DataType, expected: pa.DataType) -> bool:
    """Whether values of the first Arrow type may be cast to the second, if each value fits."""
    return find_type_mismatch(given, expected, "") is None


def find_type_mismatch(given: pa.DataType, expected: pa.DataType, path: str) -> str | None:
    """Return why values of the first Arrow type can't be cast to the second one, None if they
    can. `path` names the place of the value.
    """
    if pt.is_dictionary(given):
        given = given.value_type
    if pt.is_null(given):
        return None
    if pt.is_struct(expected) and pt.is_struct(given):
        return _find_member_mismatch(given, expected, path)
    if pt.is_map(expected) and pt.is_map(given):
        return find_type_mismatch(given.key_type, pa.string(), f"{path}, the keys,") or (
            find_type_mismatch(given.item_type, expected.item_type, f"{path}[*]")
        )
    if pt.is_map(expected) and is_list(given) and is_entry(given.value_type):
        return find_type_mismatch(given.value_type[1].type, expected.item_type, f"{path}[*]")
    if pt.is_list(expected) and is_list(given):
        return find_type_mismatch(given.value_type, expected.value_type, f"{path}[]")
    if _is_same_simple_family(given, expected):
        return None
    declared = tree_from_arrow(expected, path)
    return f"column {path!r} is {given}, but the schema declares {declared}"


def is_entry(kind: pa.DataType) -> bool:
    """Whether an Arrow type is that of an entry of a map, as data frames without maps have it:
    a struct of a key, which is a string, and a value.
    """
    if not pt.is_struct(kind) or kind.num_fields != 2:
        return False
    return kind[0].name == "key" and kind[1].name == "value" and _is_text(kind[0].type)


def _find_member_mismatch(given: pa.DataType, expected: pa.DataType, path: str) -> str | None:
    declared = {field.name: field.type for field in expected}
    seen = set()
    for field in given:
        inner = f"{path}.{write_name(field.name)}"
        if field.name not in declared:
            names = ", ".join(declared)
            return f"column {path!r} has a field {field.name!r}, but the schema declares {names}"
        if field.name in seen:
            return f"column {path!r} has the field {field.name!r} twice"
        seen.add(field.name)
        mismatch = find_type_mismatch(field.type, declared[field.name], inner)
        if mismatch is not None:
            return mismatch
    return None


def _is_text(kind: pa.DataType) -> bool:
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def _is_same_simple_family(given: pa.DataType, expected: pa.DataType) -> bool:
    families = {
        pt.is_timestamp: (lambda kind: pt.is_timestamp(kind) and kind.tz is not None,),
        pt.is_floating: (pt.is_floating, pt.is_integer),
        pt.is_string: (_is_text,),
        pt.is_binary: (
            pt.is_binary,
            pt.is_large_binary,
            pt.is_binary_view,
            pt.is_fixed_size_binary,
        ),
    }
    for family in (pt.is_integer, pt.is_decimal, pt.is_date, pt.is_boolean):
        families[family] = (family,)
    for family, fitting in families.items():
        if family(expected):
            return any(fits(given) for fits in fitting)
    return False


def has_maps(kind: pa.DataType) -> bool:
    """Whether an Arrow type is a map, or has one at any depth."""
    if pt.is_dictionary(kind):
        return has_maps(kind.value_type)
    if not pt.is_nested(kind):
        return False
    return bool(pt.is_map(kind)) or any(
        has_maps(kind.field(place).type) for place in range(kind.num_fields)
    )

"""The types of results: of arithmetic with decimals, of parts of nested values, and of nested
values made of parts.

A type may be unknown (None), or known in part only ("array<…>"); so are the types made of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from dagster_adjunct.resources.schemas.types import (
    Array,
    Digits,
    Map,
    Struct,
    Type,
    decimal_digits,
    known_type,
    write_name,
)

INTEGERS = ("tinyint", "smallint", "int", "bigint")
NUMBERS = (*INTEGERS, "float", "double")
_INTEGER_DIGITS = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 20}
_MAX_PRECISION = 38


def digits_as_decimal(type_: str | None) -> Digits | None:
    """Return the digits of a decimal type, or of the decimal to which Spark casts an integer type;
    None for other types.
    """
    if type_ in _INTEGER_DIGITS:
        return Digits(_INTEGER_DIGITS[type_], 0)
    if type_ is None:
        return None
    return decimal_digits(type_)


def arithmetic_type(operator: str, one: Digits, other: Digits) -> str | None:
    """Return the type of "Add", "Sub", "Mul", "Div" or "Mod" of two decimals; None if it needs
    more than 38 digits.
    """
    scale = max(one.scale, other.scale)
    if operator in ("Add", "Sub"):
        return _decimal(max(one.before_point, other.before_point) + scale + 1, scale)
    if operator == "Mul":
        return _decimal(one.precision + other.precision + 1, one.scale + other.scale)
    if operator == "Div":
        divided_scale = max(6, one.scale + other.precision + 1)
        return _decimal(one.before_point + other.scale + divided_scale, divided_scale)
    # Of "Mod".
    return _decimal(min(one.before_point, other.before_point) + scale, scale)


def widest_decimal(types: Iterable[str | None]) -> str | None:
    """Return the decimal type to which Spark casts decimals and integers of these types; None if
    one of them is another type, if there are none, or if it needs more than 38 digits.
    """
    digits = []
    for type_ in types:
        of_type = digits_as_decimal(type_)
        if of_type is None:
            return None
        digits.append(of_type)
    if not digits:
        return None
    scale = max(item.scale for item in digits)
    return _decimal(max(item.before_point for item in digits) + scale, scale)


def sum_type(kind: str) -> str:
    """Return the type that Spark gives a sum of numbers of this type."""
    digits = decimal_digits(kind)
    if digits is not None:
        return f"decimal({min(digits.precision + 10, _MAX_PRECISION)},{digits.scale})"
    if kind in INTEGERS:
        return "bigint"
    return "double"


def rounded_type(digits: Digits, places: int) -> str | None:
    """Return the type of a decimal that is rounded to `places` digits after the point; None for
    negative `places`, and if it needs more than 38 digits.
    """
    if places < 0:
        return None
    scale = min(digits.scale, places)
    return _decimal(digits.before_point + 1 + scale, scale)


def _decimal(precision: int, scale: int) -> str | None:
    """Return the decimal type with these digits, None if they are too many."""
    if precision <= _MAX_PRECISION:
        return f"decimal({precision},{scale})"
    return None


def element_type(text: str | None) -> str | None:
    """Return the type of an array's elements, or of a map's values; None for other types."""
    type_ = known_type(text)
    if isinstance(type_, Array):
        return str(type_.element)
    if isinstance(type_, Map):
        return str(type_.value)
    return None


def type_of_elements(text: str | None) -> str | None:
    """Return the type of the elements of an array, or of the entries of a map, which are structs;
    None for other types.
    """
    if key_type(text) is not None:
        return struct_type([("key", key_type(text)), ("value", element_type(text))])
    return element_type(text)


def key_type(text: str | None) -> str | None:
    """Return the type of a map's keys, which are always strings; None for other types."""
    if isinstance(known_type(text), Map):
        return "string"
    return None


def field_type(text: str | None, field: str) -> str | None:
    """Return the type of a struct's field, whatever its case, or of a map's value; None if there is
    none.

    For an array of structs, return the type of the array of these fields.
    """
    type_ = known_type(text)
    if type_ is None:
        return None
    found = type_of_field(type_, field)
    if found is None:
        return None
    return str(found)


def type_of_field(type_: Type, field: str) -> Type | None:
    """Return what Spark reads as `value.field` has for a type; None if it rejects that."""
    if isinstance(type_, Map):
        return type_.value
    if isinstance(type_, Array) and isinstance(type_.element, Struct):
        in_element = type_of_field(type_.element, field)
        if in_element is None:
            return None
        return Array(in_element)
    if not isinstance(type_, Struct):
        return None
    for member in type_.members:
        if member.name.lower() == field.lower():
            return member.type
    return None


def describe_missing_field(type_: Type, field: str) -> str:
    """Return why `value.field` is not possible for a type for which `type_of_field` is None:
    "struct has no field 'adress', it has address, id".
    """
    if isinstance(type_, Struct):
        return f"struct has no field {field!r}, it has {', '.join(field_names(type_))}"
    if isinstance(type_, Array) and isinstance(type_.element, Struct):
        names = ", ".join(field_names(type_.element))
        return f"the structs of the array have no field {field!r}, they have {names}"
    return f"{type_} has no fields, so no {field!r}"


def field_names(type_: Type) -> list[str]:
    """Return the names of the fields of a struct, or of the structs of an array; [] for others."""
    if isinstance(type_, Array):
        type_ = type_.element
    if isinstance(type_, Struct):
        return [member.name for member in type_.members]
    return []


def array_type(element: str | None) -> str:
    """Return the type of an array of these elements."""
    if element is None or "…" in element:
        return "array<…>"
    return f"array<{element}>"


def map_type(key: str | None, value: str | None) -> str:
    """Return the type of a map with these keys and values."""
    if key is None or value is None or "…" in key or "…" in value:
        return "map<…>"
    return f"map<{key},{value}>"


def struct_type(fields: Iterable[tuple[str, str | None]]) -> str:
    """Return the type of a struct with these fields; "struct<…>" if one is not known completely."""
    known = []
    for name, kind in fields:
        if kind is None or "…" in kind:
            return "struct<…>"
        known.append(f"{write_name(name)}:{kind}")
    if not known:
        return "struct<…>"
    return f"struct<{','.join(known)}>"

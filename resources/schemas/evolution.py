"""How columns may change: added ones, and types that hold all values of the type before, also
within nested types.
"""

from __future__ import annotations

from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Simple,
    Struct,
    Type,
    decimal_digits,
    is_nested,
    parse_type,
)

_INTEGER_DIGITS = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 19}


def is_widening(narrow: str, wide: str) -> bool:
    """Whether files with the first type can be read with the second one without changing a value,
    also by Spark.

    That is so for: equal types; integers to longer ones, float to double, decimals to decimals with
    at least as many digits on both sides of the point; integers up to int also to double; and
    integers to decimals with 10 digits before the point, or 20 for bigint, as Spark demands. In
    nested types, the simple types may be widened so at every depth, and structs may have more
    members after those that they had.
    """
    if narrow == wide:
        return True
    if is_nested(narrow) and is_nested(wide):
        return holds_values_of(parse_type(wide), parse_type(narrow), in_order=True)
    from_decimal = decimal_digits(narrow)
    to_decimal = decimal_digits(wide)
    if from_decimal is not None:
        if to_decimal is None or to_decimal.before_point < from_decimal.before_point:
            return False
        return to_decimal.scale >= from_decimal.scale
    if narrow in _INTEGER_DIGITS:
        if to_decimal is not None:
            return to_decimal.before_point >= (20 if narrow == "bigint" else 10)
        if wide == "double":
            return narrow != "bigint"
        return _INTEGER_DIGITS.get(wide, 0) > _INTEGER_DIGITS[narrow]
    return (narrow, wide) == ("float", "double")


def holds_values_of(wide: Type, narrow: Type, *, in_order: bool = False) -> bool:
    """Whether files with the type `narrow` can be read with the type `wide`, if members of structs
    are matched by name: `wide` may have more of them, in any order; with `in_order`, after those of
    `narrow`.
    """
    if isinstance(narrow, Simple) and isinstance(wide, Simple):
        return is_widening(narrow.name, wide.name)
    if isinstance(narrow, Array) and isinstance(wide, Array):
        return holds_values_of(wide.element, narrow.element, in_order=in_order)
    if isinstance(narrow, Map) and isinstance(wide, Map):
        return holds_values_of(wide.value, narrow.value, in_order=in_order)
    if isinstance(narrow, Struct) and isinstance(wide, Struct):
        return _holds_members(wide, narrow, in_order)
    return False


def _holds_members(wide: Struct, narrow: Struct, in_order: bool) -> bool:
    """Whether a struct has all members of another, whose types hold their values."""
    names = [member.name for member in narrow.members]
    if in_order and names != [member.name for member in wide.members[: len(names)]]:
        return False
    for member in narrow.members:
        now = wide.member(member.name)
        if now is None or not holds_values_of(now.type, member.type, in_order=in_order):
            return False
    return True

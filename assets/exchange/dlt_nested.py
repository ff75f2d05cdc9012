"""Types of nested values that dlt hands over without a type: those of JSON.

What a load leaves unknown has no type (None): where there are only nulls, empty lists and empty
objects. Such values are stored as nulls until a load has others there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from dagster_adjunct.resources.schemas.evolution import is_widening
from dagster_adjunct.resources.schemas.inference import MANY_NAMES
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Member,
    Simple,
    Struct,
    Type,
    decimal_digits,
)

_SIMPLE: dict[type, str] = {
    bool: "boolean",
    int: "bigint",
    float: "double",
    bytes: "binary",
    datetime: "timestamp",
    date: "date",
}
_MOST_DIGITS = 38
_DIGITS_OF_BIGINT = 19


def infer_type(values: Iterable[Any], known: Type | None) -> Type | None:
    """Return the type of these values of JSON, with the `known` type of earlier ones, None if
    nothing is known.

    Of types that don't go together, the first one stays: values of the others do not fit it.
    """
    found = known
    for value in values:
        found = merge_types(found, _type_of(value, found))
    if known is None and found is not None:
        found = _with_maps(found)
    return found


def _type_of(value: Any, known: Type | None) -> Type | None:
    """Return the type of a value; objects are maps where a map is `known`."""
    if isinstance(value, Mapping):
        return _type_of_object(value, known)
    if isinstance(value, list | tuple):
        inner = known.element if isinstance(known, Array) else None
        for item in value:
            inner = merge_types(inner, _type_of(item, inner))
        return None if inner is None else Array(inner)
    if value is None:
        return None
    if isinstance(value, Decimal):
        return _decimal_type(value)
    for kind, name in _SIMPLE.items():
        if isinstance(value, kind):
            return Simple(name)
    return Simple("string")


def _type_of_object(value: Mapping[str, Any], known: Type | None) -> Type | None:
    """Return the type of an object: a map if one is `known`, else a struct of the members that have
    a type; None if no member has one.
    """
    if isinstance(known, Map):
        inner: Type | None = known.value
        for item in value.values():
            inner = merge_types(inner, _type_of(item, inner))
        return None if inner is None else Map(inner)
    members = []
    for name, item in value.items():
        before = known.member(name) if isinstance(known, Struct) else None
        type_ = _type_of(item, None if before is None else before.type)
        if type_ is not None:
            members.append(Member(name, type_))
    return Struct(tuple(members)) if members else None


def _decimal_type(value: Decimal) -> Simple:
    """Return the type of a decimal, with room for other values: for as many digits before the point
    as a bigint has, if 38 digits are enough for that.
    """
    _, digits, exponent = value.as_tuple()
    scale = max(0, -exponent) if isinstance(exponent, int) else 0  # a text for NaN and infinity
    before_point = max(0, len(digits) + exponent) if isinstance(exponent, int) else 0
    # Room before the point: a later value with more digits could not widen the type.
    whole = max(before_point, min(_DIGITS_OF_BIGINT, _MOST_DIGITS - scale))
    return Simple(f"decimal({min(whole + scale, _MOST_DIGITS)},{min(scale, _MOST_DIGITS)})")


def merge_types(known: Type | None, new: Type | None) -> Type | None:
    """Return the type that holds values of both, or the known one if there is none; None only if
    both are.
    """
    if known is None or new is None:
        return new if known is None else known
    return _combine(known, new, _merge_simple)


def settle_type(known: Type, found: Type) -> Type:
    """Return the type that a stream with the `known` type can get, so that it has what was `found`:
    more members of structs, and wider simple types. Other values do not fit it.
    """
    return _combine(known, found, _widen)


def _combine(known: Type, new: Type, choose: Callable[[Simple, Simple], Simple]) -> Type:
    """Return the known type with the new one's members of structs, and what `choose` returns for
    simple types. Of types of different kinds, the known one stays.
    """
    if known == new:
        return known
    if isinstance(known, Struct) and isinstance(new, Struct):
        return _combine_structs(known, new, choose)
    if isinstance(known, Array) and isinstance(new, Array):
        return Array(_combine(known.element, new.element, choose))
    if isinstance(known, Map) and isinstance(new, Map):
        return Map(_combine(known.value, new.value, choose))
    if isinstance(known, Simple) and isinstance(new, Simple):
        return choose(known, new)
    return known


def _combine_structs(
    known: Struct, new: Struct, choose: Callable[[Simple, Simple], Simple]
) -> Struct:
    """Return the members of a known struct, combined with those of the new one, then the new
    one's others.
    """
    members = []
    for member in known.members:
        other = new.member(member.name)
        if other is not None:
            type_ = _combine(member.type, other.type, choose)
        else:
            type_ = member.type
        members.append(Member(member.name, type_))
    members += [member for member in new.members if known.member(member.name) is None]
    return Struct(tuple(members))


def _widen(known: Simple, found: Simple) -> Simple:
    """Return the found type if the known one can be widened to it, else the known one."""
    return found if is_widening(known.name, found.name) else known


def _merge_simple(known: Simple, new: Simple) -> Simple:
    """Return the type for values of two different ones: double for double and bigint, a decimal for
    two decimals that one of 38 digits can hold, and the decimal for one and bigint. Otherwise the
    known one stays.
    """
    names = {known.name, new.name}
    if names == {"bigint", "double"}:
        return Simple("double")
    digits = [decimal_digits(name) for name in (known.name, new.name)]
    if digits[0] is not None and digits[1] is not None:
        scale = max(digits[0].scale, digits[1].scale)
        before_point = max(digits[0].before_point, digits[1].before_point)
        if scale + before_point <= _MOST_DIGITS:
            return Simple(f"decimal({scale + before_point},{scale})")
    if known.name == "bigint" and digits[1] is not None:
        return new
    return known


def _with_maps(type_: Type) -> Type:
    """Return the type with maps for objects of more than MANY_NAMES members of one type, whose
    names are therefore keys.
    """
    if isinstance(type_, Array):
        return Array(_with_maps(type_.element))
    if isinstance(type_, Map):
        return Map(_with_maps(type_.value))
    if not isinstance(type_, Struct):
        return type_
    members = tuple(Member(each.name, _with_maps(each.type)) for each in type_.members)
    if len(members) > MANY_NAMES and _have_one_kind(members):
        value: Type | None = None
        for member in members:
            value = merge_types(value, member.type)
        if value is not None:
            return Map(value)
    return Struct(members)


def _have_one_kind(members: tuple[Member, ...]) -> bool:
    """Whether all members are of one simple type, or all structs, arrays or maps."""
    kinds = {type(member.type) for member in members}
    if kinds == {Simple}:
        return len({str(member.type) for member in members}) == 1
    return len(kinds) == 1


def without_unknown(value: Any, type_: Type) -> Any:
    """Return a value without the nulls and empty values of which its type knows nothing, and with
    decimals for whole numbers where the type has decimals.
    """
    if isinstance(value, Mapping):
        if isinstance(type_, Struct):
            return _without_unknown_members(value, type_)
        if isinstance(type_, Map):
            return {name: without_unknown(item, type_.value) for name, item in value.items()}
    if isinstance(type_, Array) and isinstance(value, list | tuple):
        return [without_unknown(item, type_.element) for item in value]
    if isinstance(type_, Simple) and decimal_digits(type_.name) and type(value) is int:
        return Decimal(value)
    return value


def _without_unknown_members(value: Mapping[str, Any], type_: Struct) -> dict[str, Any]:
    """Return an object without the members that the type lacks, if they tell no type. Others that
    it lacks stay, and are rejected when the object is converted.
    """
    members = {}
    for name, item in value.items():
        member = type_.member(name)
        if member is not None:
            members[name] = without_unknown(item, member.type)
        elif not is_unknown(item):
            members[name] = item
    return members


def is_unknown(value: Any) -> bool:
    """Whether a value tells no type: it is null, or has nothing but nulls and empty values."""
    if isinstance(value, Mapping):
        return all(map(is_unknown, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_unknown, value))
    return value is None

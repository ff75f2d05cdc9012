"""Builds columns from the values of parsed messages, exactly, at every depth."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import chain
from typing import Any

from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.schemas.arrow_values import build_lists, build_maps, length_array
from dagster_adjunct.resources.schemas.schema import Field
from dagster_adjunct.resources.schemas.types import (
    Array,
    Simple,
    Struct,
    Type,
    arrow_type,
    decimal_digits,
    nested_types,
    parse_type,
    write_name,
)

Converter = Callable[[Any], Any]
"""Converts a value other than None to one that Arrow accepts, or raises one of
CONVERSION_ERRORS.
"""

Converters = Mapping[str, Converter | None]
"""The converters of the simple values of a column, by their paths in it (see `nested_types`); ""
is the path of a simple column itself."""

RowProblems = dict[int, str]
"""Why rows can't be read: the reason, by the row's number (from 0) in its batch."""

MAX_SHOWN = 60
# Arrow's own are ValueErrors.
CONVERSION_ERRORS = (ValueError, TypeError, ArithmeticError, LookupError)
# By column type, the Python types whose values Arrow converts exactly, or rejects.
_ARROW_TYPES: Mapping[str, frozenset[type]] = {
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), frozenset({int})),
    "double": frozenset({float}),
    "string": frozenset({str}),
    "boolean": frozenset({bool}),
    "binary": frozenset({bytes}),
}


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A converter that also changes values of the type that Arrow takes as they are."""

    convert: Converter

    def __call__(self, value: Any) -> Any:
        return self.convert(value)


def simple_types(field: Field) -> dict[str, str]:
    """Return the types of the simple values of a column, by their paths in it."""
    parts = nested_types(parse_type(field.type))
    return {path: type_.name for path, type_ in parts if isinstance(type_, Simple)}


@dataclass(frozen=True, slots=True)
class Reading:
    """How values are read: how reasons describe them, and what parses a text in the place of an
    array, a map or a struct (None: it does not fit).
    """

    describe: Callable[[object], str]
    parse_text: Converter | None = None


def has_decimals(field: Field) -> bool:
    """Whether a column has decimals, at any depth."""
    return any(decimal_digits(kind) for kind in simple_types(field).values())


def build_column(
    values: list[Any],
    field: Field,
    converters: Converters,
    problems: RowProblems,
    reading: Reading | None = None,
) -> pa.Array:
    """Return a column of these values: of dictionaries for structs and maps, lists for arrays. A
    value that does not fit becomes null, and `problems` gets the reason.

    A converter is applied to each simple value other than None, unless Arrow converts them all
    exactly (_ARROW_TYPES); without it, only Arrow converts.
    """
    reading = reading or Reading(describe_value)
    place = _Place(field.name, "", converters, reading)
    return _build(values, parse_type(field.type), place, problems)


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of values: their column, and their path in it."""

    column: str
    path: str
    converters: Converters
    reading: Reading

    def within(self, step: str) -> _Place:
        """Return the place of parts of these values; `step` is what their path adds."""
        return replace(self, path=self.path + step)

    def __str__(self) -> str:
        return f"column {self.column + self.path!r}"

    def reason(self, value: object, type_: Type, detail: str = "") -> str:
        """Return why a value is not one of this type."""
        return f"{self} is {self.reading.describe(value)}, declared {type_}{detail}"


def _build(values: list[Any], type_: Type, place: _Place, problems: RowProblems) -> pa.Array:
    """Return values as an array of a type, at every depth. A value that does not fit becomes null,
    and `problems` gets the reason.
    """
    if isinstance(type_, Simple):
        return _build_simple(values, type_, place, problems)
    if isinstance(type_, Struct):
        return _build_structs(values, type_, place, problems)
    kind = arrow_type(str(type_))
    if isinstance(type_, Array):
        lists = _only(list, values, type_, place, problems)
        items = list(chain.from_iterable(filter(None, lists)))
        elements = _build_parts(items, lists, type_.element, place.within("[]"), problems)
        return build_lists(length_array(lists), elements, kind)
    maps = _only(dict, values, type_, place, problems)
    keys = _map_keys(maps, place, problems)
    items = list(chain.from_iterable(map(dict.values, filter(None, maps))))
    parts = _build_parts(items, maps, type_.value, place.within("[*]"), problems)
    return build_maps(length_array(maps), keys, parts)


def _only(
    kind: type, values: list[Any], type_: Type, place: _Place, problems: RowProblems
) -> list[Any]:
    """Return the values, with None and a problem for each that is not of this Python type. A text
    is first parsed by the reading's `parse_text`, if it has one.
    """
    fitting = []
    parse_text = place.reading.parse_text
    for row, value in enumerate(values):
        parsed = value
        if parse_text is not None and isinstance(value, str):
            with suppress(*CONVERSION_ERRORS, RecursionError):
                parsed = parse_text(value)
        if parsed is not None and not isinstance(parsed, kind):
            problems.setdefault(row, place.reason(value, type_))
            parsed = None
        fitting.append(parsed)
    return fitting


def _build_parts(
    items: list[Any],
    wholes: Sequence[Collection[Any] | None],
    type_: Type,
    place: _Place,
    problems: RowProblems,
) -> pa.Array:
    """Return the parts of arrays or maps (`wholes`), one after the other, as an array. Problems of
    parts become those of the rows that they belong to.
    """
    found: RowProblems = {}
    parts = _build(items, type_, place, found)
    if found:
        rows = np.repeat(np.arange(len(wholes)), [len(whole or ()) for whole in wholes])
        for item, reason in found.items():
            problems.setdefault(int(rows[item]), reason)
    return parts


def _map_keys(maps: list[dict[str, Any] | None], place: _Place, problems: RowProblems) -> pa.Array:
    """Return the keys of maps, one after the other. A map with a key that is no text becomes None
    in the list `maps`, and `problems` gets the reason.
    """
    with suppress(*CONVERSION_ERRORS):
        return pa.array(list(chain.from_iterable(filter(None, maps))), pa.string())
    for row, value in enumerate(maps):
        try:
            pa.array(list(value or ()), pa.string())
        except CONVERSION_ERRORS:
            problems.setdefault(row, f"{place} has a key that is not text")
            maps[row] = None
    return pa.array(list(chain.from_iterable(filter(None, maps))), pa.string())


def _build_structs(
    values: list[Any], type_: Struct, place: _Place, problems: RowProblems
) -> pa.Array:
    """Return dictionaries as an array of structs; None, and a problem, for each that
    does not fit.
    """
    structs = _only(dict, values, type_, place, problems)
    names = [member.name for member in type_.members]
    for row, struct in enumerate(structs):
        if struct is not None:
            try:
                check_cases(struct, names)
            except Unfit as error:
                problems.setdefault(row, f"in {place}, {error}")
    parts = []
    for member in type_.members:
        members = [None if struct is None else struct.get(member.name) for struct in structs]
        inner = place.within(f".{write_name(member.name)}")
        parts.append(_build(members, member.type, inner, problems))
    missing = pa.array([struct is None for struct in structs], pa.bool_())
    return pa.StructArray.from_arrays(parts, fields=list(arrow_type(str(type_))), mask=missing)


def _build_simple(
    values: list[Any], type_: Simple, place: _Place, problems: RowProblems
) -> pa.Array:
    """Return simple values as an array; null, and a problem, for each that does not fit."""
    kind = arrow_type(type_.name)
    convert = place.converters.get(place.path)
    with suppress(*CONVERSION_ERRORS):
        return _build_at_once(values, type_.name, convert)
    fitting: list[Any] = []
    for row, value in enumerate(values):
        try:
            if value is None or convert is None:
                converted = value
            else:
                converted = convert(value)
            pa.array([converted], kind)
        except CONVERSION_ERRORS as error:
            detail = ""
            if isinstance(error, Unfit):
                detail = str(error)
            problems.setdefault(row, place.reason(value, type_, detail))
            converted = None
        fitting.append(converted)
    return pa.array(fitting, kind)


def _build_at_once(values: list[Any], type_name: str, convert: Converter | None) -> pa.Array:
    """Return simple values as an array. Raises one of CONVERSION_ERRORS if one does not fit."""
    kind = arrow_type(type_name)
    if convert is None:
        return pa.array(values, kind)
    types = set(map(type, values)) - {type(None)}
    are_exact = types <= _ARROW_TYPES.get(type_name, frozenset())
    if are_exact and not isinstance(convert, Rewrite):
        with suppress(*CONVERSION_ERRORS):
            array = pa.array(values, kind)
            # Whether an infinity fits is left to the converter.
            if type_name != "double" or not pc.any(pc.is_inf(array)).as_py():
                return array
    return pa.array([None if value is None else convert(value) for value in values], kind)


def check_cases(sent: Collection[str], declared: Sequence[str]) -> None:
    """Raise Unfit for a declared field that is missing in a message while another one differs
    from it by case only.
    """
    missing = [name for name in declared if name not in sent]
    if not missing:
        return
    others = {name.lower(): name for name in sent if name not in declared}
    for name in missing:
        if name.lower() in others:
            raise Unfit(f"it has no field {name!r}, but {others[name.lower()]!r} in another case")


class Unfit(ValueError):
    """A value does not fit its declared type, or a message can't be parsed.

    For a value, the text is appended to the reason in `RowProblems`, and may be empty; for a
    message, it is the reason.
    """


def describe_value(value: object) -> str:
    """Return a description of a value, with at most MAX_SHOWN characters of it, never all of a
    longer text.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | Decimal):
        text = str(value)
        if len(text) <= MAX_SHOWN:
            return text
        return f"a number of {len(text)} digits"
    if isinstance(value, str):
        return f"the text {json.dumps(shorten_text(value), ensure_ascii=False)}"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return f"a {type(value).__name__}"


def shorten_text(text: str) -> str:
    """Return the beginning of a text and "…": half of the text, with less than MAX_SHOWN
    characters.
    """
    if not text:
        return text
    shown = text[: min(MAX_SHOWN - 1, (len(text) + 1) // 2)]
    # A lone surrogate can't be printed.
    return shown.encode("utf-8", "backslashreplace").decode() + "…"

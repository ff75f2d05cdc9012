"""Nested values of remote tables: their checks, their JSON, and the names of values inside them.

A struct is a dict with a value for each field, a map a dict with sorted str keys, an array a list.
Stores that have no types of their own for the parts hold a nested value as JSON. Its parts have the
same forms as everywhere in JSON of this project:

    string      text                        timestamp   "2013-07-01T00:00:00.250000Z", with a
                                                        fraction only where there is one
    integers    number                      date        "2013-07-01"
    floats      number                      decimal     text with all digits, "12.50" for
                                                        decimal(10,2)
    boolean     true, false                 binary      text, base64
    array       array                       null        null
    map         object, sorted by key       struct      object

A field of a struct that is missing is null; one that is not declared is ignored. A null struct, a
struct of nulls, an empty array and a null element are different. As in all columns, numbers are
finite. Texts and keys have no character NUL, because PostgreSQL's jsonb can't hold it.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from typing import Any

from dagster_adjunct.resources.schemas.paths import split_path
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Struct,
    Type,
    decimal_digits,
    write_name,
)

Convert = Callable[[Any], Any]
_EXACT = Context(prec=76)


class PartError(TypeError):
    """A part of a nested value does not fit: its path within the value, and the reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path.removeprefix('.')}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


def _converted(step: str, convert: Convert, value: Any) -> Any:
    """Return a converted part of a value, None for None. A PartError says at which path it is,
    which begins with `step`.
    """
    if value is None:
        return None
    try:
        return convert(value)
    except PartError as error:
        raise PartError(step + error.path, error.reason) from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise PartError(step, str(error)) from None


def _array_converter(convert: Convert) -> Convert:
    """Return the function that converts each item of a list or tuple, other than None."""

    def convert_all(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise TypeError("expected a list")
        return [_converted(f"[{place}]", convert, item) for place, item in enumerate(value)]

    return convert_all


def _map_converter(convert: Convert) -> Convert:
    """Return the function that converts each value of a dict, other than None, and sorts it by its
    keys.
    """

    def convert_all(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise TypeError("expected a dict")
        for name in value:
            check_json_text(name)
        # The order of code points is that of UTF-8.
        return {name: _converted(f"[{name!r}]", convert, value[name]) for name in sorted(value)}

    return convert_all


def check_json_text(text: Any) -> str:
    """Return the text if JSON can hold it in every store; else raise TypeError."""
    if not isinstance(text, str):
        raise TypeError(f"expected a str, found {text!r:.100}")
    if "\0" in text:
        raise TypeError("text contains the character NUL")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TypeError("expected text without lone surrogates") from None
    return text


def check_json(value: Any, path: str = "") -> None:
    """Raise PartError for the first part of a value that JSON does not hold as it is: dicts with
    str keys, lists, texts, booleans and finite numbers. `path` is that of the value.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            _converted(path, check_json_text, name)
            check_json(item, f"{path}.{write_name(name)}")
    elif isinstance(value, list):
        for place, item in enumerate(value):
            check_json(item, f"{path}[{place}]")
    elif isinstance(value, str):
        _converted(path, check_json_text, value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise PartError(path, f"{value} is no finite number")
    elif not isinstance(value, int | float | None):
        raise PartError(path, f"it is a {type(value).__name__}")


def make_nested_checker(type_: Type, make_checker: Callable[[str], Convert]) -> Convert:
    """Return the function that checks a value of a type, other than None, at every depth.

    It returns dicts and lists, with all fields of structs. `make_checker` returns the check of a
    simple type. Raises `PartError`, or TypeError for the value itself.
    """
    if isinstance(type_, Array):
        return _array_converter(make_nested_checker(type_.element, make_checker))
    if isinstance(type_, Map):
        return _map_converter(make_nested_checker(type_.value, make_checker))
    if isinstance(type_, Struct):
        return _struct_checker(type_, make_checker)
    if type_.name == "string":
        return check_json_text
    return make_checker(type_.name)


def _struct_checker(type_: Struct, make_checker: Callable[[str], Convert]) -> Convert:
    """Return the function that checks the fields of a dict, and adds those that are missing as
    None.
    """
    # By the field's name, its step in a path and its check.
    checks = {
        member.name: (f".{write_name(member.name)}", make_nested_checker(member.type, make_checker))
        for member in type_.members
    }

    def check(value: Any) -> dict[str, Any]:
        """Return the struct with all of its fields checked."""
        if not isinstance(value, Mapping):
            raise TypeError("expected a dict")
        for name in value:
            if name not in checks:
                expected = ", ".join(checks)
                raise PartError(
                    f".{write_name(str(name))}", f"this field is not declared: expected {expected}"
                )
        return {
            name: _converted(step, convert, value.get(name))
            for name, (step, convert) in checks.items()
        }

    return check


def json_writer(type_: Type) -> Convert:
    """Return the function from a checked value, other than None, to its JSON form."""
    if isinstance(type_, Array):
        return _array_converter(json_writer(type_.element))
    if isinstance(type_, Map):
        return _map_converter(json_writer(type_.value))
    if isinstance(type_, Struct):
        writers = {member.name: json_writer(member.type) for member in type_.members}
        return lambda value: {
            name: None if part is None else writers[name](part) for name, part in value.items()
        }
    digits = decimal_digits(type_.name)
    if digits is not None:
        unit = Decimal((0, (1,), -digits[1]))
        return lambda number: format(abs_of_zero(number).quantize(unit, context=_EXACT), "f")
    return _WRITE.get(type_.name, _unchanged)


def abs_of_zero(number: Decimal) -> Decimal:
    """Return the number, and 0 for -0, so that equal numbers have equal texts."""
    return number if number else number.copy_abs()


def json_reader(type_: Type) -> Convert:
    """Return the function from the JSON form, other than null, to the value.

    It raises TypeError, ValueError or ArithmeticError for what is not of the type, because other
    programs may write to the table.
    """
    if isinstance(type_, Array):
        return _array_converter(json_reader(type_.element))
    if isinstance(type_, Map):
        return _map_converter(json_reader(type_.value))
    if isinstance(type_, Struct):
        readers = {
            member.name: (f".{write_name(member.name)}", json_reader(member.type))
            for member in type_.members
        }
        return lambda value: {
            name: _converted(step, read, _require(dict, value).get(name))
            for name, (step, read) in readers.items()
        }
    if decimal_digits(type_.name) is not None:
        return _read_decimal
    return _READ[type_.name]


def _unchanged(value: Any) -> Any:
    """Return the value, which JSON holds unchanged."""
    return value


def _require(kind: type, value: Any) -> Any:
    """Return the value if it is of exactly this type; else raise TypeError."""
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {value!r:.100}")
    return value


def _read_decimal(text: Any) -> Decimal:
    """Return the finite number in a text. Raises ValueError for NaN and infinity."""
    number = Decimal(_require(str, text))
    if not number.is_finite():
        raise ValueError("it is no finite number")
    return number


def _read_float(number: Any) -> float:
    """Return a JSON number as a float; a whole one may be an int."""
    if type(number) not in (float, int):
        raise TypeError(f"expected a number, found {number!r:.100}")
    return float(number)


def _read_time(text: Any) -> datetime:
    """Return the instant in a text, in UTC. Raises ValueError for a time without a zone."""
    moment = datetime.fromisoformat(_require(str, text))
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return moment.astimezone(UTC)


_WRITE: dict[str, Convert] = {
    "timestamp": lambda moment: moment.isoformat().replace("+00:00", "Z"),
    "date": date.isoformat,
    "binary": lambda value: base64.b64encode(value).decode(),
}
_READ: dict[str, Convert] = {
    "string": lambda text: _require(str, text),
    "boolean": lambda value: _require(bool, value),
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), lambda number: _require(int, number)),
    **dict.fromkeys(("float", "double"), _read_float),
    "timestamp": _read_time,
    "date": lambda text: date.fromisoformat(_require(str, text)),
    "binary": lambda text: base64.b64decode(_require(str, text), validate=True),
}


def conform(type_: Type, value: Any) -> Any:
    """Return a value with only those fields of structs that the type declares: records of functions
    may have more. Raises TypeError for a boolean in the place of a number.
    """
    if isinstance(type_, Array) and isinstance(value, list | tuple):
        return [conform(type_.element, item) for item in value]
    if isinstance(type_, Map) and isinstance(value, Mapping):
        return {name: conform(type_.value, item) for name, item in value.items()}
    if isinstance(type_, Struct) and isinstance(value, Mapping):
        return {
            member.name: conform(member.type, value.get(member.name)) for member in type_.members
        }
    if isinstance(value, bool) and str(type_) != "boolean":
        raise TypeError(f"found {value} for {type_}: a boolean fits only a boolean field")
    return value


write_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""Returns a value's JSON, without spaces."""


def _reject_constant(name: str) -> Any:
    """Raise ValueError for NaN or Infinity, which Python would accept in JSON."""
    raise ValueError(f"{name} is no JSON")


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for other texts, NaN and Infinity too."""
    return json.loads(text, parse_constant=_reject_constant)


class InnerName(str):
    """The path of a value inside a column of structs, in the user's words: the column's name
    (`root`), and the names of the fields from there (`names`).
    """

    root: str
    names: tuple[str, ...]


def parse_inner_name(text: str) -> InnerName | None:
    """Return the path that a text names; None if it has one step only or is no path."""
    steps = split_path(text)
    if len(steps) < 2:
        return None
    name = InnerName(text)
    name.root = steps[0]
    name.names = steps[1:]
    return name


def root_name(name: str, columns: Collection[str]) -> str:
    """Return the column that a name in an update changes: for a path the column in which it begins,
    unless the path itself is one of `columns`.
    """
    if name in columns:
        return name
    path = parse_inner_name(name)
    return name if path is None else path.root


def value_inside(value: Any, names: Sequence[str]) -> Any:
    """Return the value at a path inside a nested one; None if a struct on the way is null."""
    for name in names:
        if value is None:
            return None
        value = value.get(name)
    return value


def with_inside(value: Any, names: Sequence[str], part: Any) -> dict[str, Any]:
    """Return a copy of a struct with another value, `part`, at a path; structs on the way that are
    null are created. Without `names`, the value is all of it.
    """
    if not names:
        return part  # type: ignore[no-any-return]
    first, *rest = names
    inner = (value or {}).get(first) if rest else None
    return {**(value or {}), first: with_inside(inner, rest, part)}


def set_inside_json(old: str | None, changes: str) -> str:
    """Return the JSON text of an object with other values at paths; `changes` is a JSON list of
    pairs of a path and a value.

    Fields that are not declared are kept.
    """
    value = None if old is None else read_json(old)
    for names, part in read_json(changes):
        value = with_inside(value, names, part)
    return write_json(value)

"""SQL expressions over the records of drawn applications, each with what it is in Python; None
is null.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from dagster_adjunct.resources.sql.arrow_expressions import compile_expression

Row = dict[str, Any]
COLUMNS = {"k": "string", "g": "string", "n": "int", "v": "bigint", "t": "boolean"}
TEXTS = [
    "",
    "a",
    "ab",
    " a ",
    "ß",
    "é",
    "日本",
    "😀",
    "Köln",
    "a\u0301",
    "%",
    "a\nb",
    "\uffff",
    "-",
]
_BITS = {"int": 31, "bigint": 63}
_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Expression:
    """The SQL text, and its value for a record."""

    text: str
    value: Callable[[Row], Any]


def value_of(kind: str, chosen: Random) -> Any:
    """Return a value of a type, null or extreme now and then."""
    if chosen.random() < 0.15:
        return None
    if kind == "string":
        return chosen.choice(TEXTS)
    if kind == "boolean":
        return chosen.random() < 0.5
    most = 2 ** _BITS[kind] - 1
    return chosen.choice([most, -most - 1, -most, 0, *[chosen.randint(-4, 9)] * 6])


def expression(kind: str, chosen: Random) -> Expression:
    """Return an expression of this type that needs no Spark; none overflows, whatever the
    records are.
    """
    while isinstance(compile_expression((made := _of(kind, chosen, 2)).text, COLUMNS), str):
        pass
    return made


def _of(kind: str, chosen: Random, depth: int) -> Expression:
    if depth == 0 or chosen.random() < 0.1:
        return _column(
            chosen.choice([name for name, its in COLUMNS.items() if its == kind]), chosen
        )
    text, function = chosen.choice(_SHAPES[kind])
    parts = [_of(place, chosen, chosen.randrange(depth)) for place in _PLACE.findall(text)]
    texts = iter([part.text if part.text.isidentifier() else f"({part.text})" for part in parts])
    values = [part.value for part in parts]
    return Expression(
        _PLACE.sub(lambda _: next(texts), text),
        lambda row: function(*[value(row) for value in values]),
    )


def _column(name: str, chosen: Random) -> Expression:
    return Expression(name.upper() if chosen.random() < 0.1 else name, lambda row: row[name])


def _known(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, null where one of its arguments is."""
    return lambda *values: None if None in values else function(*values)


def _and(one: bool | None, other: bool | None) -> bool | None:
    return False if one is False or other is False else None if None in (one, other) else True


def _or(one: bool | None, other: bool | None) -> bool | None:
    return True if one is True or other is True else None if None in (one, other) else False


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _quotient(one: int, other: int) -> int:
    """Return the quotient, rounded toward 0."""
    size = abs(one) // abs(other)
    return size if (one < 0) == (other < 0) else -size


def _remainder(one: int, other: int) -> int:
    return one - other * _quotient(one, other)


def _among(*choices: Any, or_null: bool = False) -> Callable[[Any], bool | None]:
    return lambda x: None if x is None or (or_null and x not in choices) else x in choices


Shape = tuple[str, Callable[..., Any]]
_SHAPES: dict[str, list[Shape]] = {
    "bigint": [
        ("{bigint} % 7L", _known(lambda x: _remainder(x, 7))),
        ("{bigint} % -1000L", _known(lambda x: _remainder(x, -1000))),
        ("{bigint} div 3", _known(lambda x: _quotient(x, 3))),
        ("{bigint} div -2", _known(lambda x: _quotient(x, -2))),
        ("cast({int} as bigint) * 3", _known(lambda x: x * 3)),
        ("cast({int} as bigint) - 2147483647", _known(lambda x: x - 2147483647)),
        ("cast({int} as bigint) * {int}", _known(lambda x, y: x * y)),
        ("cast({int} as bigint) + {int}", _known(lambda x, y: x + y)),
        (
            "({bigint} % 100L) + ({bigint} % 9L)",
            _known(lambda x, y: _remainder(x, 100) + _remainder(y, 9)),
        ),
        ("coalesce({bigint}, {bigint}, 5L)", lambda x, y: _first(x, y, 5)),
        ("coalesce({bigint}, {int})", _first),
        ("if({boolean}, {bigint}, {bigint})", lambda matched, x, y: x if matched else y),
        (
            "case when {boolean} then {bigint} when {boolean} then 9223372036854775807 else {int} end",
            lambda one, x, other, y: x if one else 2**63 - 1 if other else y,
        ),
        ("nullif({bigint}, 0L)", lambda x: x or None),
        ("cast(length({string}) as bigint)", _known(len)),
    ],
    "int": [
        ("{int} % 5", _known(lambda x: _remainder(x, 5))),
        ("({int} % 100) * ({int} % 9)", _known(lambda x, y: _remainder(x, 100) * _remainder(y, 9))),
        ("cast({bigint} % 1000L as int)", _known(lambda x: _remainder(x, 1000))),
        ("length({string})", _known(len)),
        ("coalesce({int}, {int}, -2147483648)", lambda x, y: _first(x, y, -(2**31))),
        ("if({boolean}, {int}, null)", lambda matched, x: x if matched else None),
        (
            "case {string} when 'a' then 1 when 'ß' then {int} else {int} end",
            lambda s, x, y: 1 if s == "a" else x if s == "ß" else y,
        ),
        ("nvl2({string}, {int}, 3)", lambda s, x: 3 if s is None else x),
        ("cast({boolean} as int)", _known(int)),
    ],
    "string": [
        ("concat({string}, '-', {string})", _known(lambda s, u: f"{s}-{u}")),
        ("{string} || 'ß'", _known(lambda s: s + "ß")),
        ("concat({string}, cast({bigint} as string))", _known(lambda s, x: f"{s}{x}")),
        ("substring({string}, 2, 3)", _known(lambda s: s[1:4])),
        ("left({string}, 2)", _known(lambda s: s[:2])),
        ("trim({string})", _known(lambda s: s.strip(" "))),
        ("coalesce({string}, '日本')", lambda s: _first(s, "日本")),
        ("nullif({string}, {string})", lambda s, u: None if s == u else s),
        ("if({boolean}, {string}, {string})", lambda matched, s, u: s if matched else u),
        (
            "case when {boolean} then 'é' else {string} end",
            lambda matched, s: "é" if matched else s,
        ),
        ("cast({boolean} as string)", _known(lambda matched: str(matched).lower())),
    ],
    "boolean": [
        ("{int} > 2", _known(lambda x: x > 2)),
        ("{bigint} >= {int}", _known(lambda x, y: x >= y)),
        ("{bigint} <> 9223372036854775807", _known(lambda x: x != 2**63 - 1)),
        (
            "{bigint} between -5 and {bigint}",
            lambda x, y: _and(_known(lambda x: x >= -5)(x), _known(int.__le__)(x, y)),
        ),
        ("{int} in (1, 2, -2147483648, null)", _among(1, 2, -(2**31), or_null=True)),
        ("{int} not in (0, 3)", _known(lambda x: x not in (0, 3))),
        ("{string} in ('a', 'ß', '日本')", _among("a", "ß", "日本")),
        ("{string} = {string}", _known(lambda s, u: s == u)),
        ("{string} <=> {string}", lambda s, u: s == u),
        ("{string} < 'b'", _known(lambda s: s < "b")),
        ("{string} >= {string}", _known(lambda s, u: s >= u)),
        ("{string} is null", lambda s: s is None),
        ("{bigint} is not null", lambda x: x is not None),
        ("{string} like 'a%'", _known(lambda s: s.startswith("a"))),
        ("{string} not like '%é%'", _known(lambda s: "é" not in s)),
        ("endswith({string}, 'b')", _known(lambda s: s.endswith("b"))),
        ("contains({string}, '本')", _known(lambda s: "本" in s)),
        ("not {boolean}", _known(lambda matched: not matched)),
        ("{boolean} is not false", lambda matched: matched is not False),
        ("{boolean} is true", lambda matched: matched is True),
        ("{boolean} and {boolean}", _and),
        ("{boolean} or {boolean}", _or),
        ("coalesce({boolean}, true)", lambda matched: _first(matched, True)),
    ],
}

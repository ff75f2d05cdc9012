"""Typed expressions and tables drawn at random, to compare what Arrow and Spark compute."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from random import Random
from typing import Any

import pyarrow as pa

from dagster_adjunct.resources.schemas.types import arrow_type, decimal_digits

TYPES = {
    "a": "tinyint",
    "b": "smallint",
    "c": "int",
    "c2": "int",
    "d": "bigint",
    "d2": "bigint",
    "f": "float",
    "g": "double",
    "g2": "double",
    "h": "decimal(10,2)",
    "h2": "decimal(10,2)",
    "k": "decimal(5,0)",
    "m": "decimal(38,10)",
    "s": "string",
    "s2": "string",
    "x y": "string",
    "t": "boolean",
    "t2": "boolean",
    "u": "date",
    "u2": "date",
    "v": "timestamp",
    "v2": "timestamp",
    "w": "binary",
    "Value": "int",
    "end": "int",
    "date": "date",
    "n_c": "int",
    "n_s": "string",
    "n_t": "boolean",
}
INTEGERS = ("tinyint", "smallint", "int", "bigint")
_BITS = {"tinyint": 7, "smallint": 15, "int": 31, "bigint": 63}
_LITERALS = {
    "tinyint": ["cast(1 as tinyint)"],
    "smallint": ["cast(-7 as smallint)"],
    "int": ["0", "1", "-1", "2", "10", "-2147483648", "2147483647", "00012"],
    "bigint": [
        "0L",
        "1L",
        "3000000000",
        "-9223372036854775808",
        "9223372036854775807",
        "-5L",
        "cast(1 as bigint)",
    ],
    "float": ["cast(1 as float)"],
    "double": ["cast(2 as double)"],
    "decimal(10,2)": [
        "1.5",
        "0.05",
        "0.00",
        "-2.50",
        "99999999.99",
        "10.0",
        "cast(3 as decimal(10,2))",
    ],
    "decimal(5,0)": ["cast(7 as decimal(5,0))"],
    "decimal(38,10)": ["1.0000000001"],
    "string": ["''", "'a'", "' b '", "'é'", "'%'", "'ab'", '"q"', "'-12'", "'2020-01-01'", "'😀'"],
    "boolean": ["true", "false"],
    "date": [
        "date '2020-01-01'",
        "DATE '1582-10-10'",
        "date'0001-01-01'",
        "cast('1999-12-31' as date)",
    ],
    "timestamp": ["timestamp '2020-01-01 00:00:00'", "TIMESTAMP '1900-01-01 12:00:00.123456'"],
    "binary": [],
}
_EXACT = Context(prec=60)
_PLACE = re.compile(r"\{([^}]+)\}")
_ANY = [
    "tinyint",
    "smallint",
    "int",
    "bigint",
    "double",
    "decimal(10,2)",
    "string",
    "boolean",
    "date",
    "timestamp",
]
_NUMBERS = [
    "tinyint",
    "smallint",
    "int",
    "int",
    "bigint",
    "bigint",
    "float",
    "double",
    "decimal(10,2)",
    "decimal(5,0)",
]
# Shapes of expressions by result type. {A}: any type, the same in all places; {B}: any type; {R}:
# the result's; {L}: a literal of A; {N}: a number; {I}: an integer; {W}: one that is no bigint.
_SHAPES: dict[str, str] = {
    "boolean": """{A} = {A} | {A} == {A} | {A} <> {A} | {A} != {A} | {A} < {A} | {A} <= {A} | {A} > {A} | {A} >= {A}
        {A} <=> {A} | {N} = {N} | {N} < {N} | {N} <=> {N} | {N} >= {N} | {N} != {N} | {boolean} and {boolean}
        {boolean} or {boolean} | not {boolean} | {B} is null | {B} is not null | {A} in ({L}, {L}) | {A} in ({L}, null)
        {A} not in ({L}, {L}, {L}) | {A} between {A} and {A} | {A} not between {L} and {L} | isnull({B})
        isnotnull({B}) | {boolean} and {I} * 2 < 5
        {boolean} is true | {boolean} is not false | {boolean} is unknown | {string} like 'a%' | {string} like '%a%'
        {string} not like '%b' | {string} like '%' | startswith({string}, 'a') | endswith({string}, 'b')
        contains({string}, 'é') | equal_null({A}, {A}) | {string} like '' | {boolean} = {boolean} is null | ! {boolean}
        {date} >= '2020-01-01' | {timestamp} < '2020-01-01 00:00:00' | {N} between {N} and {N}
        {date} in ('2020-01-01', '1999-12-31') | {I} in (1, 2, 3000000000)
        {I} in (1, 2, 3, 4, 5, 6, 7, -1, -2, -3, 2147483647, null) | {I} not in (1, 2, 3, 4, 5, 6, 7, -1, -2, -3L, 0)
        {string} in ('a', 'b', '', 'ab', 'c', 'd', 'e', 'f', 'g', 'é', 'h', '7')
        {date} in ('2020-01-01', null) | {decimal(10,2)} in (1, 1.5)""",
    "same": """coalesce({R}, {R}) | ifnull({R}, {R}) | nvl({R}, {R}) | nullif({R}, {R}) | if({boolean}, {R}, {R})
        case when {boolean} then {R} end | case when {boolean} then {R} when {boolean} then {R} else {R} end
        case {A} when {A} then {R} else {R} end | ({R}) | coalesce(null, {R}) | if({boolean}, {R}, null)
        case {boolean} when true then {R} end | nvl2({B}, {R}, {R})""",
    "string": """{string} || {string} | concat({string}, {string}, {string}) | concat({string}) | upper({string})
        lower({string}) | trim({string}) | ltrim({string}) | rtrim({string}) | substring({string}, 1, 2)
        substr({string}, 2) | left({string}, 2) | substring({string} from 2 for 3) | cast({I} as string)
        cast({boolean} as string) | cast({date} as string) | cast({string} as string) | substring({string}, 0, 1)
        left({string}, 0) | string({I}) | ucase({string})""",
    "int": """length({string}) | char_length({string}) | cast({string} as int) | cast({I} as int)
        cast({boolean} as int) | {W} + {W} | {W} - {W} | {W} * {W} | -{W} | {W} % {W} | cast(null as int)""",
    "bigint": """{I} + {bigint} | {bigint} - {I} | {bigint} * {I} | -{bigint} | {I} div {I} | {bigint} % {I}
        cast({I} as bigint) | {I} + 1 - 2147483647 | {I} - 9223372036854775807 + 2 | cast({string} as bigint)
        2 * {I} * 3L | {I} + 9223372036854775807 + 1 | -1 - {I} - 9223372036854775807""",
    "smallint": """{smallint} + {tinyint} | {smallint} - {smallint} | cast({I} as smallint) | -{smallint}
        {smallint} % {tinyint}""",
    "tinyint": "{tinyint} + {tinyint} | {tinyint} * {tinyint} | cast({I} as tinyint) | -{tinyint}",
    "double": """{double} + {N} | {double} - {double} | {N} * {double} | {double} / {N} | {I} / {I} | -{double}
        cast({I} as double) | cast({float} as double) | {double} * 1.5 | {double} + 0.1""",
    "float": "{float} + {float} | {float} * {float} | -{float} | cast({I} as float)",
    "decimal(10,2)": "cast({I} as decimal(10,2)) | cast({decimal(5,0)} as decimal(10,2)) | -{decimal(10,2)}",
    "date": "cast({string} as date) | cast({timestamp} as date)",
    "timestamp": "cast({date} as timestamp)",
    "other": """{decimal(10,2)} + {I} | {decimal(10,2)} * {I} | {decimal(10,2)} - 1 | 2 * h | h * h2 | h + h2 | h - k
        m + h | m * k | coalesce(h, 0) | coalesce(k, h) | if({boolean}, {I}, {I}) | coalesce({I}, {I}) | h * 1L
        if({boolean}, h, 1.5) | c + 1.5 | case when {boolean} then {double} else {I} end | coalesce({double}, 1.5)
        {I} % 2 | h / 2 | case when t then 1 else {N} end | nullif({I}, {I}) | coalesce({I}, null, {I}) | h + 0.05
        10 - h | h * -2 | coalesce(u, '2020-01-01') | if(t, '2020-01-01', u) | case u when '2020-01-01' then 1 end
        (2L) * h | nullif(u, '2020-01-01') | u <=> '2019-12-31' | u between '2019-12-31' and u2
        case when t then v else '2020-01-01' end | v > timestamp '2020-01-01'
        {I} * 1.5 | k - cast(1 as bigint)""",
}


@dataclass
class DrawnEvaluation:
    """Draws expressions and tables, the same ones for a seed."""

    seed: int
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

    def expression(self) -> str:
        """Return an expression; a few mix types or lack the parentheses that they need."""
        kind = self.random.choice(
            [*_ANY, "boolean", "boolean", "string", "int", "bigint", "other", "other"]
        )
        text = self._of(kind, self.random.choice((1, 1, 2, 2, 3)))
        return text + (" as z" if self.random.random() < 0.1 else "")

    def _of(self, kind: str, depth: int) -> str:
        if depth == 0 or (self.random.random() < 0.1 and kind != "other"):
            return self._leaf(kind)
        shapes = _SHAPES.get(kind, "") + ("" if kind == "other" else " | " + _SHAPES["same"])
        if kind == "boolean":  # comparisons more often
            shapes += "\n" + _SHAPES[kind]
        shape = self.random.choice(
            [one.strip() for one in shapes.replace("\n", " | ").split(" | ") if one.strip()]
        )
        any_kind = self.random.choice(_ANY)
        return _PLACE.sub(lambda place: self._operand(place[1], kind, any_kind, depth), shape)

    def _operand(self, place: str, kind: str, any_kind: str, depth: int) -> str:
        if place == "L":
            return self._leaf(any_kind, literal=True)
        choices = {
            "R": [kind],
            "A": [any_kind],
            "B": _ANY,
            "N": _NUMBERS,
            "I": INTEGERS,
            "W": INTEGERS[:3],
        }
        operand = self.random.choice(choices.get(place, [place]))
        if self.random.random() < 0.02:
            operand = self.random.choice(_ANY)
        if self.random.random() < 0.02:
            return "null"
        part = self._of(operand, self.random.randrange(depth))
        is_plain = part.isidentifier() or self.random.random() < 0.15
        return part if is_plain else f"({part})"

    def _leaf(self, kind: str, *, literal: bool = False) -> str:
        columns = [
            f"`{name}`" if " " in name else name for name, one in TYPES.items() if one == kind
        ]
        columns = [name.upper() if self.random.random() < 0.1 else name for name in columns]
        literals = _LITERALS.get(kind, [])
        if literals and (literal or self.random.random() < 0.25):
            return self.random.choice(literals)
        return self.random.choice(columns or ["c"])

    def table(self, rows: int, *, extreme: bool, ascii_only: bool) -> pa.Table:
        """Return records with nulls; columns named n_… hold nothing else."""
        columns = []
        for name, kind in TYPES.items():
            share = 1.0 if name.startswith("n_") else self.random.choice((0.0, 0.2, 0.5))
            values = [
                None if self.random.random() < share else self._value(kind, extreme, ascii_only)
                for _ in range(rows)
            ]
            columns.append(pa.array(values, arrow_type(kind)))
        return pa.table(columns, names=list(TYPES))

    def _value(self, kind: str, extreme: bool, ascii_only: bool) -> Any:
        draw = self.random
        digits = decimal_digits(kind)
        if kind in _BITS:
            most = 2 ** _BITS[kind] - 1
            choices = (
                [most, -most - 1, most - 1, -most, 0, -1, draw.randint(-most, most)]
                if extreme
                else []
            )
            return draw.choice([*choices, draw.randint(-4, 4)])
        if digits is not None:
            most = 10 ** digits[0] - 1
            choices = (
                [most, -most, 0, draw.randint(-most, most)]
                if extreme
                else [draw.randint(-300, 300)]
            )
            unscaled = draw.choice(choices)
            return Decimal(unscaled).scaleb(-digits[1], context=_EXACT)
        if kind in ("float", "double"):
            usual = [draw.randint(-3, 3) * 0.5, float(draw.randint(-4, 4))]
            odd = [
                math.nan,
                -0.0,
                math.inf,
                -math.inf,
                1e300 if kind == "double" else 1e38,
                0.1,
                5e-324,
                2.0**53,
            ]
            return draw.choice([*odd, *usual] if extreme else [*usual, 0.25, -0.0, 0.1])
        if kind == "string":
            odd = [
                "É",
                "ß",
                "é",
                "😀",
                "日本",
                "\u00a0a",
                "ı",
                "a\u0301",
                "\uffff",
                "a\x00b",
                "\t a",
            ]
            usual = [
                "",
                "a",
                "ab",
                " a ",
                "Ab ",
                "b",
                "B",
                "-12",
                "7",
                "007",
                "2020-01-01",
                "2021-02-29",
                "%",
                "a\nb",
            ]
            return draw.choice(usual if ascii_only else [*usual, *odd]) + draw.choice(
                ["", "", "", "b"]
            )
        if kind == "boolean":
            return draw.random() < 0.5
        if kind == "date":
            odd = [date.min, date.max, date(1582, 10, 10), date(1900, 2, 28)]
            return draw.choice(
                [*(odd if extreme else []), date(2020, 1, 1), date(2019, 12, draw.randint(1, 31))]
            )
        if kind == "timestamp":
            usual = datetime(2020, 1, 1, tzinfo=UTC) + timedelta(hours=draw.randint(-3, 3))
            odd = [datetime(1, 1, 1, tzinfo=UTC), datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC)]
            return draw.choice([*(odd if extreme else []), usual])
        return draw.choice([b"", b"\x00", b"\xff", b"ab"])

"""Expressions evaluated by Arrow: values that Spark's rules give, and reasons why others are
left to Spark.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.sql.arrow_expressions import ArrowExpression, compile_expression
from dagster_adjunct.resources.sql.arrow_kernels import NeedsSpark

TYPES = {
    "a": "int",
    "b": "int",
    "n": "bigint",
    "w": "tinyint",
    "s": "string",
    "t": "boolean",
    "d": "date",
    "v": "timestamp",
    "p": "decimal(10,2)",
    "x": "double",
    "xs": "array<int>",
    "Twice": "int",
    "twice": "int",
    "two words": "int",
}
RECORDS: dict[str, list[Any]] = {
    "a": [1, None, -7],
    "b": [2, 3, None],
    "n": [10, None, 2**40],
    "w": [127, 1, None],
    "s": ["Ab ", None, "naïve"],
    "t": [True, None, False],
    "d": [date(2020, 1, 1), None, date(1582, 10, 10)],
    "v": [
        datetime(2020, 1, 1, 12, tzinfo=UTC),
        None,
        datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC),
    ],
    "p": [Decimal("1.50"), None, Decimal("-0.05")],
    "x": [1.5, None, -0.0],
    "two words": [5, 6, 7],
}


def table(**columns: list[Any]) -> pa.Table:
    given = columns or RECORDS
    return pa.table(
        {name: pa.array(values, arrow_type(TYPES[name])) for name, values in given.items()}
    )


def compiled(text: str) -> ArrowExpression:
    expression = compile_expression(text, TYPES)
    assert isinstance(expression, ArrowExpression), expression
    return expression


@pytest.mark.parametrize(
    ("text", "kind", "values"),
    [
        ("a", "int", [1, None, -7]),
        ("`two words` as z", "int", [5, 6, 7]),
        ("A + 1L", "bigint", [2, None, -6]),
        ("-2147483648", "int", [-(2**31)] * 3),
        ("2147483648", "bigint", [2**31] * 3),
        ("-a * b", "int", [-2, None, None]),
        ("-cast(a as decimal(34,0))", "decimal(34,0)", [Decimal(-1), None, Decimal(7)]),
        ("a % b", "int", [1, None, None]),
        ("a / b", "double", [0.5, None, None]),
        ("p * 2", "decimal(12,2)", [Decimal("3.00"), None, Decimal("-0.10")]),
        ("p * a", "decimal(21,2)", [Decimal("1.50"), None, Decimal("0.35")]),
        ("a = b", "boolean", [False, None, None]),
        ("a <=> null", "boolean", [False, True, False]),
        ("p > 1", "boolean", [True, None, False]),
        ("a % 2 = 1", "boolean", [True, None, False]),
        ("x + 1 = 1.0", "boolean", [False, None, True]),
        ("d >= '2020-01-01'", "boolean", [True, None, False]),
        ("v < timestamp '2020-01-01 12:00:00.000001'", "boolean", [True, None, True]),
        ("t and null", "boolean", [None, None, False]),
        ("t or a = 1", "boolean", [True, None, False]),
        ("not t", "boolean", [False, None, True]),
        ("t is not true", "boolean", [False, True, True]),
        ("a in (1, null)", "boolean", [True, None, None]),
        ("n in (1, 10)", "boolean", [True, None, False]),
        ("a not between -7 and b", "boolean", [False, None, None]),
        ("coalesce(a, n, 0)", "bigint", [1, 0, -7]),
        ("nullif(a, 1)", "int", [None, None, -7]),
        ("if(t, a, n)", "bigint", [1, None, 2**40]),
        ("case when t then 'yes' end", "string", ["yes", None, None]),
        ("case a when 1 then d else null end", "date", [date(2020, 1, 1), None, None]),
        ("nvl2(a, 'x', s)", "string", ["x", None, "x"]),
        ("cast(a as string) || '!'", "string", ["1!", None, "-7!"]),
        ("cast(v as date)", "date", [date(2020, 1, 1), None, date(1969, 12, 31)]),
        ("cast(null as decimal(5,1))", "decimal(5,1)", [None] * 3),
        ("length(trim(s))", "int", [2, None, 5]),
        ("substring(s, 2, 3)", "string", ["b ", None, "aïv"]),
        ("s like 'na%'", "boolean", [False, None, True]),
    ],
)
def test_an_expression_has_the_type_and_values_of_spark(
    text: str, kind: str, values: list[Any]
) -> None:
    expression = compiled(text)
    result = expression.evaluate(table())
    assert (expression.type, result.type) == (kind, arrow_type(kind))
    assert result.to_pylist() == values


def test_the_columns_are_those_that_are_read() -> None:
    assert compiled("A + `two words` * a as z").columns == ("a", "two words")
    assert compiled("1").columns == ()


def test_no_records_and_several_chunks_are_evaluated() -> None:
    assert compiled("if(t, a + 1, 0)").evaluate(table().slice(0, 0)).to_pylist() == []
    assert compiled("1").evaluate(table().slice(0, 0)).type == pa.int32()
    assert (
        compiled("a + 1").evaluate(pa.concat_tables([table(), table()])).to_pylist()
        == [2, None, -6] * 2
    )


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("a + 1", {"a": [0, 2**31 - 1]}),
        ("w * w", {"w": [12]}),
        ("-w", {"w": [-128]}),
        ("if(t, -w, 0)", {"t": [True], "w": [-128]}),
        ("case when a <> 0 then 1 else 6 / a end", {"a": [1, 0]}),
        ("cast(a as tinyint)", {"a": [128]}),
        ("cast(n as decimal(3,2))", {"n": [10]}),
        ("a / b", {"a": [1], "b": [0]}),
        ("a % b", {"a": [1], "b": [0]}),
        ("cast(s as int)", {"s": [" 1"]}),
        ("cast(s as date)", {"s": ["2021-02-29"]}),
        ("upper(s)", {"s": ["a", "ß"]}),
        ("x = x", {"x": [float("nan")]}),
        ("x = 0", {"x": [-0.0]}),
    ],
)
def test_values_that_only_spark_can_compute_raise(text: str, columns: dict[str, list[Any]]) -> None:
    with pytest.raises(NeedsSpark):
        compiled(text).evaluate(table(**columns))


@pytest.mark.parametrize(
    ("text", "columns", "values"),
    [
        (
            "case when b <> 0 then a / b end",
            {"a": [6, 1, 4, None], "b": [3, 0, 1, None]},
            [2.0, None, 4.0, None],
        ),
        (
            "if(b = 0, 'none', cast(a div b as string))",
            {"a": [6, 1, 4], "b": [3, 0, 1]},
            ["2", "none", "4"],
        ),
        (
            "case when b = 0 then -1 when a > 2147483646 then a else a + 1 + (a % b) end",
            {"a": [7, 9, 2**31 - 1, 5], "b": [2, 0, 1, 3]},
            [9, -1, 2**31 - 1, 8],
        ),
        ("nvl2(b, 1, cast(s as int))", {"b": [1, None], "s": ["x", "3"]}, [1, 3]),
        ("if(t, -w, 0)", {"t": [False], "w": [-128]}, [0]),
        ("if(true, 1, 1 div 0)", {"a": [1, 2]}, [1, 1]),
    ],
)
def test_a_result_that_is_not_chosen_does_not_fail(
    text: str, columns: dict[str, list[Any]], values: list[Any]
) -> None:
    assert compiled(text).evaluate(table(**columns)).to_pylist() == values


def test_a_column_of_another_type_raises() -> None:
    with pytest.raises(NeedsSpark):
        compiled("a").evaluate(pa.table({"a": pa.array([1], pa.int64())}))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("regexp_replace(s, 'a', 'b')", "function regexp_replace"),
        ("my_function(a)", "function my_function"),
        ("sum(a)", "function sum"),
        ("rand()", "function rand"),
        ("row_number() over (order by a)", "a window function"),
        ("a = s", "a comparison of int and string"),
        ("a + s", "arithmetic of int and string"),
        ("TWICE", "the ambiguous column TWICE"),
        ("zz", "the unknown column zz"),
        ("null", "an untyped null"),
        ("*", "all columns (*)"),
        ("a = (select 1)", "a subquery"),
    ],
)
def test_a_reason_is_a_noun_phrase(text: str, reason: str) -> None:
    assert compile_expression(text, TYPES) == reason


@pytest.mark.parametrize(
    "text",
    [
        "t = a < b", "a = b is null", "t is null = t", "+s", "a + +b", "a b", "a as 1", "a between 1 2", "a -- b",
        "'a' 'b' = s", "'it''s'", "s = 'a\\n'", "s = '${x}'", "int '5'", "1e3", "1.5D", ". 5", "2.", "! t",
        "cast(a as varchar(3))", "try_cast(s as int)", "coalesce(a, )", "substring(s)", "p * 1L", "p * (-1L)", "a.b",
        "9223372036854775808", "s like 'a_'", "s in (s)", "x in (1, 2)", "if(null, 1, 2)", "a\u00a0+ 1", "trim('x', s)",
        "a = s", "d = s", "d > v", "p / 2", "d + 1", "-null", "xs[-1]", "transform(xs, y -> y)", "a is distinct from b",
        "a is unknown", "n + 9223372036854775807 + 1", "n + (cast('9223372036854775807' as bigint) + n) + 1L",
        "a = 5 and a + 2147483647 > 0", "s = 'x' and (t or cast(s as int) > 1)",
        # functions of other engines
        "starts_with(s, 'x')", "iif(t, a, b)", "ts_or_ds_to_date_str()",
        "-cast(a as decimal(35,0))",  # Spark rounds it
        # no syntax of Spark
        "trim(both s)", "(t b)", "coalesce(a as b, 1)", "string 00", "double 1L",
        "s in ('x') and cast(s as date) is null", "if(a = 0, b % a = 1, false)", "not (a <> 5 or a + 2147483647 > 0)",
    ],
)  # fmt: skip
def test_what_is_uncertain_is_left_to_spark(text: str) -> None:
    assert isinstance(compile_expression(text, TYPES), str)


def test_a_part_that_is_used_twice_is_computed_once() -> None:
    text = "s"
    for _ in range(40):  # each level compares and returns the one below
        text = f"nullif({text}, 'x')"
    assert compiled(text).evaluate(table()).to_pylist() == RECORDS["s"]


@pytest.mark.lengthy
def test_deep_expressions_are_left_to_spark_or_evaluated() -> None:
    expression = compile_expression(" + ".join(["a"] * 3_000), TYPES)
    if isinstance(expression, ArrowExpression):
        with pytest.raises(NeedsSpark):
            expression.evaluate(table())

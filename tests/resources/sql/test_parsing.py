"""What is read off a Spark SQL expression without Spark."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dagster_adjunct.resources.sql.expression import (
    parse_expression,
    struct_fields,
    unknown_functions,
)


def named(text: str) -> list[str]:
    return [str(name) for name in parse_expression(text).columns]


@pytest.mark.parametrize(
    ("text", "column", "name"),
    [
        ("spent", "spent", "spent"),
        ("`a b`", "a b", "a b"),
        ("`a``b` as c", "a`b", "c"),
        ("dest AS faa", "dest", "faa"),
        ("spent s", "spent", "s"),
        ("order", "order", "order"),
        ("address.city", None, "city"),
        ("upper(model) as model", None, "model"),
        ("spent + 1", None, None),
        ("null", None, None),
        ("true as seen", None, "seen"),
        ("explode(xs) as (a, b)", None, None),
    ],
)
def test_the_column_that_an_expression_is_and_the_name_that_it_gives(
    text: str, column: str | None, name: str | None
) -> None:
    expression = parse_expression(text)
    assert (expression.column, expression.name) == (column, name)


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("upper(`mo.del`) || s.b", ["mo.del", "s.b"]),
        ("transform(xs, x -> x + y)", ["xs", "y"]),
        ("transform(xs, X -> x.a + y)", ["xs", "y"]),
        ("aggregate(xs, 0, (acc, x) -> acc + x.n, acc -> acc)", ["xs"]),
        ("transform(xs, x -> transform(x, y -> y + x + z))", ["xs", "z"]),
        ("timestampadd(DAY, 1, at)", ["at"]),
        ("extract(year from at)", ["at"]),
        ("struct(a as b, c)", ["a", "c"]),
        ("'a' like `b` and c in (1, d)", ["b", "c", "d"]),
        ("cast(a as struct<x: int>)", ["a"]),
        ("at + interval 1 day", ["at"]),
        ("mask(a, lowerChar => 'q')", ["a"]),
        ("a collate utf8_lcase", ["a"]),
        ("trim(both 'x' from a)", ["a"]),
        ("sum(a) over (partition by b order by c)", ["a", "b", "c"]),
        ("date '2020-01-01'", []),
    ],
)
def test_the_columns_that_an_expression_names(text: str, columns: list[str]) -> None:
    assert sorted(named(text)) == columns


def test_all_columns_less_some() -> None:
    assert parse_expression(" * ").star
    assert parse_expression("* except (a, `b c`)").excepted == ("a", "b c")


def test_the_fields_of_a_struct_that_is_made() -> None:
    fields = struct_fields(parse_expression("named_struct('a', x, 'b', upper(y)) as update"))
    assert [(name, [str(column) for column in value.columns]) for name, value in fields] == [
        ("a", ["x"]),
        ("b", ["y"]),
    ]
    assert struct_fields(parse_expression("upper(y)")) == ()


@pytest.mark.parametrize(
    "text",
    ["a in (select b from c)", "exists (select 1)", "a between 1", "x:y.z", "a b c", "select a"],
)
def test_of_what_is_not_understood_nothing_is_known(text: str) -> None:
    assert parse_expression(text).unread
    assert not parse_expression(text).mistake
    assert parse_expression(text).columns == ()


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("upper(model", "'(' is not closed"),
        ("upper(model))", "')' has no opening bracket"),
        ("xs[1)", "')' has no opening bracket"),
        ("model = 'a", "' is not closed"),
        ("`model", "` is not closed"),
        ("  ", "it is empty"),
        ("n >", "an operand is missing next to '>'"),
        ("k = 'a' ||", "an operand is missing next to '||'"),
        ("n + +", "an operand is missing next to '+'"),
        ("= 1", "an operand is missing next to '='"),
        ("n = = 1", "an operand is missing next to '='"),
        ("coalesce(n,)", "an operand is missing next to ','"),
        ("coalesce(, n)", "an operand is missing next to ','"),
        ("concat(k,, n)", "an operand is missing next to ','"),
        ("n,", "an operand is missing next to ','"),
    ],
)
def test_what_is_not_closed_or_has_no_operand_is_a_mistake(text: str, mistake: str) -> None:
    assert parse_expression(text).mistake == mistake


@pytest.mark.parametrize(
    "text",
    [
        "*",
        "*, n",
        "n.*",
        "count(*)",
        "-n",
        "n = -1",
        "n >> 1",
        "concat(k, ',)', ', ')",
        "k || '='",
        "`a,`",
        "n -- ,",
        "n::array<int>",
        "n::map<int,array<int> >",
    ],
)
def test_what_has_its_operands_is_no_mistake(text: str) -> None:
    assert parse_expression(text).mistake == ""


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("upper(a, b)", "upper() takes 1 argument, and gets 2"),
        ("1 + NVL(a)", "nvl() takes 2 arguments, and gets 1"),
        ("regexp_replace(a, ',')", "regexp_replace() takes 3 to 4 arguments, and gets 2"),
        ("make_timestamp_ntz(a, b, c)", "make_timestamp_ntz() takes 2 or 6 arguments, and gets 3"),
        ("nullif(concat(a, b))", "nullif() takes 2 arguments, and gets 1"),
        ("upper()", "upper() takes 1 argument, and gets 0"),
    ],
)
def test_a_function_of_sparks_takes_so_many_arguments(text: str, mistake: str) -> None:
    assert parse_expression(text).mistake == mistake


@pytest.mark.parametrize(
    "text",
    [
        "concat(a, b, c, d)", "ours(a)", "db.upper(a, b)", "struct(*)", "coalesce(*)", "a in (1, 2, 3)",
        "a rlike ('x')", "cast(a as decimal(10, 2))", "trim(both 'x' from a)", "substring(a from 1 for 2)",
        "transform(xs, (x, i) -> x + i)", "date_add(DAY, 1, a)", "split(a, '(,')", "upper(concat(a, b))",
        "nvl(xs[0], (1, 2))",
    ],
)  # fmt: skip
def test_arguments_of_other_forms_are_not_counted(text: str) -> None:
    assert not parse_expression(text).mistake


@pytest.mark.parametrize(
    "text", ["a = ')'", r"a = 'it\'s ('", 'a = "\'("', "`a)` + 1", "a -- (", "r'\\' || a"]
)
def test_brackets_within_texts_names_and_comments_are_none(text: str) -> None:
    assert not parse_expression(text).mistake


def test_the_parser_is_loaded_for_the_first_expression_that_is_more_than_a_name() -> None:
    code = (
        "import sys, dagster_adjunct\n"
        "from dagster_adjunct.resources.sql.checking import check_expression\n"
        "check_expression('map-1', 'a as b', ('a',), {'a': 'int'})\n"
        "print('sqlglot' in sys.modules, 'pyspark' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("text", "functions"),
    [
        ("uper(a) || ours(b) || UPER(c)", ("uper", "ours")),
        ("case when (a) then (b) else (c) end + sum(a) over (partition by (b))", ()),
        (
            (
                "a in (1) and not (b) and exists (select 1) and cast(a as decimal(1,0)) between (1)"
                " and (2)"
            ),
            (),
        ),
        ("count(*) filter (where (a > 1)) + listagg(a) within group (order by b)", ()),
        ("db.ours(a) || `ours`(b) || 'ours(a)'", ()),
        ("a is distinct from (b) or a like any ('x') or a div (2) > 1", ()),
    ],
)
def test_functions_that_are_none_of_sparks(text: str, functions: tuple[str, ...]) -> None:
    assert unknown_functions(text) == functions

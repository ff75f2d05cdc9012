"""Operands that Spark certainly refuses are refused, and nothing else is: over pairs of types,
by its own analyser.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.sql.checking import check_condition, check_expression
from tests.resources.sql.test_spark_agrees import analysed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TYPES: dict[str, str | None] = {
    "c": "int",
    "d": "bigint",
    "g": "double",
    "h": "decimal(10,2)",
    "s": "string",
    "t": "boolean",
    "u": "date",
    "v": "timestamp",
    "w": "binary",
    "xs": "array<int>",
    "m": "map<string,int>",
    "st": "struct<p:int>",
    "i": "interval day to second",
    "b": "timestamp_ntz",
    "ss": "array<string>",
}
OF_TWO = """{} = {} | {} < {} | {} <=> {} | {} in ({}) | {} between {} and null | {} + {} | {} - {} | {} * {} | {} / {}
| {} % {} | {} is distinct from {} | concat({}, {}) | {} div {} | {} << {} | {} >> {} | {} & {} | {} ^ {}
| {} like {} | {} ilike {} | {} rlike {} | trim(both {} from {}) | overlay({} placing {} from 1)
| position({} in {}) | {}[{}] | if(t, {}, {}) | case when t then {} else {} end | case {} when {} then 1 end
| coalesce({}, {}) | nullif({}, {}) | array({}, {}) | greatest({}, {}) | nvl2(c, {}, {}) | {} and {} | {} or {}
| array({}) = array({}) | array({}) < array({})"""
OF_ONE = """upper({}) | trim({}) | length({}) | substring({}, 1, 2) | repeat({}, 2) | unhex({}) | {} like 'a'
| {} rlike 'a' | regexp_replace({}, 'a', 'b') | split({}, ',') | levenshtein({}, 'a') | instr({}, 'a')
| contains({}, 'a') | sqrt({}) | round({}) | floor({}) | pow({}, 2) | isnan({}) | abs({}) | -{}
| year({}) | day({}) | hour({}) | weekofyear({}) | last_day({}) | add_months({}, 1) | next_day({}, 'MO')
| md5({}) | sha2({}, 256) | array_distinct({}) | sort_array({}) | array_contains({}, 1)
| exists({}, x -> true) | transform({}, x -> x) | slice({}, 1, 1) | size({}) | {}[0] | explode({})
| map_keys({}) | array_join({}, ',') | array_max({}) | translate({}, 'a', 'b') | left({}, 2)
| lpad({}, 3, 'x') | ~{} | +{} | not {} | {} is true | case when {} then 1 end | if({}, 1, 2)
| cast({} as int) | cast({} as bigint) | cast({} as double) | cast({} as decimal(10,2)) | cast({} as string)
| cast({} as boolean) | cast({} as date) | cast({} as timestamp) | cast({} as binary)
| cast({} as timestamp_ntz) | cast({} as array<int>) | cast({} as map<string,int>)
| cast({} as struct<p:int>) | extract(year from {}) | extract(hour from {}) | {} + interval 1 day
| timestampadd(DAY, {}, v) | dateadd(DAY, 1, {}) | timestampdiff(DAY, v, {}) | datediff(DAY, {}, v)
| {} - interval 1 day | interval 1 day * {} | interval 1 day / {} | filter(xs, x -> {})"""


def shapes(text: str) -> list[str]:
    return [shape.strip() for shape in text.replace("\n", " ").split(" | ")]


def refused(text: str, types: dict[str, str | None] | None = None) -> str | None:
    try:
        check_expression("map-1", text, tuple(TYPES), TYPES if types is None else types)
    except PlanningError as error:
        return error.problem
    return None


@pytest.mark.spark
@pytest.mark.parametrize("step", [120, pytest.param(1, marks=pytest.mark.long)])
def test_spark_refuses_every_pair_of_types_that_is_refused(spark: SparkSession, step: int) -> None:
    pairs = [shape.format(*names) for shape in shapes(OF_TWO) for names in product(TYPES, TYPES)]
    texts = [*pairs, *(shape.format(name) for shape in shapes(OF_ONE) for name in TYPES)]
    reported = [text for text in texts if refused(text)]
    assert len(reported) > len(texts) / 2
    frame = spark.createDataFrame([], ", ".join(f"{name} {kind}" for name, kind in TYPES.items()))
    before = spark.conf.get("spark.sql.ansi.enabled")
    try:
        for ansi in ("true", "false"):
            spark.conf.set("spark.sql.ansi.enabled", ansi)
            assert [text for text in reported[::step] if analysed(frame, text) is not None] == []
    finally:
        spark.conf.set("spark.sql.ansi.enabled", str(before))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("c > u", "compares 'c', which is int, with 'u', which is date"),
        ("u = 1", "compares 'u', which is date, with '1', which is int"),
        ("c in (1, u)", "compares 'c', which is int, with 'u', which is date"),
        ("array_contains(s, 'a')", "takes 's', which is string: expected an array"),
        ("upper(array(c))", "which is array<int>: expected a single value"),
        ("year(c)", "takes 'c', which is int: expected a date or timestamp or a text"),
        ("extract(foo from v)", "extracts 'foo': expected a part of a time"),
        ("from_json(s, 'nonsense !!').b", "reads JSON by 'nonsense !!', which is not a schema"),
        ("t + 1", "calculates with 't', which is boolean"),
        ("timestamp_millis(g)", "takes 'g', which is double: expected a whole number"),
        ("round(g, c)", "takes 'c' as an argument of round(): expected a constant"),
        ("transform(xs, x -> timestamp_millis(x / 2))", "which is double: expected a whole number"),
        ("timestampadd(DAY, 1, c)", "takes 'c', which is int: expected a date or timestamp"),
        ("dateadd(HOUR, u, v)", "takes 'u', which is date: expected a number"),
        ("datediff(year, u, t)", "takes 't', which is boolean: expected a date or timestamp"),
        ("v >> 1", "calculates with 'v', which is timestamp"),
        ("c & g", "calculates with 'g', which is double"),
        ("u + d", "calculates with 'u', which is date, and 'd', which is bigint"),
        ("v + 1", "adds to a timestamp: 'v', which is timestamp, and '1', which is int"),
        ("coalesce(c, u)", "mixes results without a common type: 'c', which is int, and 'u'"),
        ("case when s then 1 end", "takes 's', which is string: expected a boolean"),
        ("case c when u then 1 end", "compares 'c', which is int, with 'u', which is date"),
        ("xs[g]", "takes 'g', which is double, as an index: expected a whole number"),
        ("cast(g as date)", "casts 'g', which is double, to date"),
        ("xs = ss", "which is array<int>, with 'ss', which is array<string>"),
        ("s and s", "uses 's' as a boolean, but it is string"),
        ("m or t", "uses 'm' as a boolean, but it is map<string,int>"),
        ("split(s, ',') = 1", "which is array<string>, with '1', which is int"),
    ],
)
def test_what_is_wrong_with_an_operand_is_reported(text: str, message: str) -> None:
    assert message in str(refused(text))


@pytest.mark.parametrize(
    "text",
    ["s > 1", "v > '2020-01-01'", "t = 1", "c > null", "exists(xs, u -> u > 1)", "transform(xs, s -> s + c)",
     "from_json(s, 'a INT, `b!` STRING').a", "from_json(s, '{\"type\":\"struct\",\"fields\":[]}')", "c > nope(u)",
     "extract(dow_iso from v)", "i * 2", "v - i", "abs(i)", "reverse(xs)", "coalesce(null, c) > 1",
     "st['p'] > 1", "timestamp_millis(d)", "round(g, 1 + 1)", "c >> 1", "u + c", "s and t", "date_add(DAY, 1, u)",
     "mask(s, lowerChar => 'q')", "xs in (ss)", "cast(u as int)", "elt(c, s, u)", "timestamp_millis(nope(g))"],
)  # fmt: skip
def test_what_spark_takes_is_not_refused(text: str) -> None:
    assert refused(text) is None


def test_what_is_not_known_is_not_judged() -> None:
    assert refused("c > u", {}) is None


def test_all_columns_are_no_condition() -> None:
    with pytest.raises(PlanningError, match=r"the condition '\*' is all columns: expected boolean"):
        check_condition("filter-2", "*", tuple(TYPES), TYPES)

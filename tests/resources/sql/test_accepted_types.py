"""Spark takes, in all of its modes, whatever is certainly right: over all functions, and over pairs of types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.sql.accepted_types import SIGNATURES, Taken, accepted
from dagster_adjunct.resources.sql.checking import checked_expression
from dagster_adjunct.resources.sql.operator_kinds import TOGETHER
from dagster_adjunct.resources.sql.parsing import parsed
from dagster_adjunct.resources.sql.spark_functions import KNOWN, OVER_RECORDS, wrong_count
from dagster_adjunct.resources.sql.unproven_types import unproven_types
from tests.resources.sql.test_operands import OF_ONE, OF_TWO, shapes
from tests.resources.sql.test_spark_agrees import analysed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OF_KIND = {
    "int": {"a": "tinyint", "b": "smallint", "c": "int"},
    "bigint": {"d": "bigint"},
    "float": {"f": "float", "g": "double"},
    "decimal": {"h": "decimal(10,2)", "h2": "decimal(38,18)"},
    "string": {"s": "string"},
    "boolean": {"t": "boolean"},
    "date": {"u": "date"},
    "timestamp": {"v": "timestamp", "n": "timestamp_ntz"},
    "binary": {"w": "binary"},
    "interval": {"i": "interval day to second", "j": "interval year to month"},
    "array": {"xs": "array<int>", "ss": "array<string>"},
    "map": {"m": "map<string,int>"},
    "struct": {"st": "struct<p:int>"},
    "null": {"null": "void"},
}
"""Columns of each kind; null is no column."""
COLUMNS: dict[str, str | None] = {
    name: kind for columns in OF_KIND.values() for name, kind in columns.items() if name != "null"
}
WRITTEN = {"int": "1", "string": "'a INT'", "boolean": "true", "null": "null"}


MORE_OF_TWO = """ | {} >= {} | {} <> {} | {} div {} | {} & {} | {} || {} | coalesce({}, {}) | nvl({}, {})
| nullif({}, {}) | greatest({}, {}) | if(t, {}, {}) | if({}, {}, 1) | case when t then {} else {} end
| case {} when {} then 1 end
| array({}, {}) | {} like {} | {} and {} | {} is not distinct from {} | nvl2(s, {}, {}) | map({}, {}) | xs[{}] = {}
| m[{}] = {} | equal_null({}, {}) | concat_ws({}, {}) | element_at({}, {}) | array_contains({}, {})"""
MORE_OF_ONE = """ | cast({} as string) | cast({} as int) | cast({} as tinyint) | cast({} as bigint) | cast({} as double)
| cast({} as float) | cast({} as boolean) | cast({} as date) | cast({} as timestamp) | cast({} as timestamp_ntz)
| cast({} as binary) | cast({} as decimal(10,2)) | cast({} as decimal(38,18)) | try_cast({} as string)
| try_cast({} as int) | try_cast({} as double) | try_cast({} as boolean) | try_cast({} as date)
| try_cast({} as timestamp) | try_cast({} as binary) | try_cast({} as decimal(10,2)) | {} is true | {} is null
| not {} | ~{} | extract(year from {}) | extract(hour from {}) | {} + interval 1 day | {} - interval 1 hour
| {} + interval 1 month | {} - 1 | 1 + {} | 1 - {} | {} * 2 | 1 / {} | {} % 2 | {} > 1 | {} = 'a' | {} in (1, 2)
| {} between 'a' and 'b' | {}[0] | {}['a'] | named_struct('a', {}).a | to_json(struct({})) | from_json({}, 'a INT')
| filter(xs, x -> {}) | filter(xs, x -> x > {}) | transform(array({}), x -> x)
| transform(array({}), x -> upper(x)) | date_trunc('day', {}) | timestampadd(DAY, 1, {}) | timestampadd(DAY, {}, v)
| timestampdiff(DAY, {}, v) | datediff(DAY, {}, v) | dateadd(DAY, {}, v) | sum({}) over () | max({}) over ()"""


def taken_by(item: Taken) -> list[str]:
    """Return arguments of all types that one place takes."""
    if item.unit:
        return ["DAY", "hour"]
    of_kinds = sorted(OF_KIND if item.kinds is None else item.kinds)
    if item.value:
        return [WRITTEN[kind] for kind in of_kinds if kind in WRITTEN]
    return [name for kind in of_kinds for name in OF_KIND[kind]]


def calls() -> Iterator[str]:
    """Yield calls of all functions: each argument of all types that it takes, the others of one of theirs, or all that
    can be of one type. Not those that the parser can't read."""
    yield from (call for call in _calls() if not parsed(call).unread and not call.endswith("json(s, null)"))


def _calls() -> Iterator[str]:
    for signature in SIGNATURES:
        function, _, only = signature.partition("/")
        for given in [int(only)] if only else counts(function):
            places = [taken_by(item) for item in accepted(function, given) or ()]
            usual = [next((name for name in names if name != "null"), "null") for names in places]
            if not places:
                yield written(function, ())
            for name in dict.fromkeys(name for names in places for name in names):
                together = [name if name in names else usual[at] for at, names in enumerate(places)]
                yield written(function, together)
            for at, names in enumerate(places):
                yield from (written(function, [*usual[:at], name, *usual[at + 1 :]]) for name in names)


def counts(function: str) -> list[int]:
    """Return how many arguments a function may get; of one that is not counted (`spark_functions.py`) as many as it
    may get at most."""
    possible = [given for given in range(5) if accepted(function, given) is not None]
    right = [given for given in possible if not wrong_count(function, given)]
    return right if wrong_count(function, 99) else right[-1:]


def written(function: str, arguments: Sequence[str]) -> str:
    call = f"{function}({', '.join(arguments)})"
    return f"{call} over (order by c)" if function in OVER_RECORDS else call


def is_refused(text: str) -> bool:
    try:
        checked_expression("map-1", text, tuple(COLUMNS), COLUMNS)
    except PlanningError:
        return True
    return False


def not_taken(spark: SparkSession, texts: list[str]) -> list[str]:
    """Return those of many expressions that Spark refuses, asking for all at once and for fewer where it refuses."""
    frame = spark.createDataFrame([], ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items()))
    refused_texts: list[str] = []
    left = [texts[at : at + 100] for at in range(0, len(texts), 100)]
    while left:
        some = left.pop()
        if analysed(frame, *some) is not None:
            continue
        if len(some) == 1:
            refused_texts += some
        else:
            left += [some[: len(some) // 2], some[len(some) // 2 :]]
    return sorted(refused_texts)


@pytest.mark.spark
@pytest.mark.parametrize("ansi", ["true", "false"])
def test_spark_takes_whatever_is_certainly_right(spark: SparkSession, ansi: str) -> None:
    texts = list(dict.fromkeys(calls()))
    assert [text for text in texts if is_refused(text)] == []
    assert [text for text in texts if unproven_types(text, COLUMNS).words] == []
    names = list(COLUMNS)
    pairs = [shape.format(*both) for shape in shapes(OF_TWO + MORE_OF_TWO) for both in product(names, names)]
    pairs += [shape.format(name) for shape in shapes(OF_ONE + MORE_OF_ONE) for name in names]
    right = [text for text in pairs if not is_refused(text) and not unproven_types(text, COLUMNS).words]
    assert len(texts) > 1_000
    assert len(right) > len(pairs) / 8
    before = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", ansi)
    try:
        assert not_taken(spark, [*texts, *right]) == []
    finally:
        spark.conf.set("spark.sql.ansi.enabled", str(before))


def test_all_functions_are_spark_s() -> None:
    assert {name.partition("/")[0] for name in SIGNATURES} - KNOWN == set()
    assert set(TOGETHER) - KNOWN == set()


TYPES = {
    "n": "int", "price": "decimal(10,2)", "s": "string", "at": "timestamp", "x": None, "y": None, "xs": "array<int>",
    "st": "struct<p:int>",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "unproven"),
    [
        ("upper(x)", ["argument 1 of upper() ('x')"]),
        ("upper(x) || lower(X)", ["argument 1 of upper() ('x')"]),  # it is known by then that nobody knows
        ("substring(s, x, y)", ["argument 2 of substring() ('x')"]),
        ("upper(mask(s))", ["what mask() takes"]),
        ("upper(nope(x))", []),  # which another note tells
        ("n + x > y", ["an operand of + ('x')", "an operand of > ('y')"]),
        ("case when x then n end", ["an operand of case ('x')"]),
        ("coalesce(s, st)", ["the arguments of coalesce()"]),
        ("round(n, n)", ["argument 2 of round()"]),
        ("st.q", ["the field 'q' of 'st'"]),
        ("x.p", ["the field 'p' of 'x'"]),
        ("transform(xs, x -> upper(y))", ["argument 1 of upper() ('y')"]),
        ("filter(xs, x -> x)", ["argument 2 of filter()"]),
        ("aggregate(xs, 0, (a, e) -> a + e)", ["what aggregate() takes"]),
        ("db.upper(s)", ["what db.upper() takes"]),
        ("n = price in (true)", ["an operand of ="]),  # (n = price) in (true)
        ("price * n - 1.5 > 0 and round(price, 1) < n / 3", []),
        ("transform(xs, (e, i) -> e + i + n)[0] + st.p", []),
        ("named_struct('a', n).a + from_json(s, 'a INT').a", []),
        ("sum(price) over (partition by s order by at) > 1.5", []),
        ("x is null or y is not null", []),
        ("x", []),
    ],
)
def test_what_is_unproven_of_types_is_told_once(text: str, unproven: list[str]) -> None:
    assert list(unproven_types(text, TYPES).words) == unproven


@pytest.mark.parametrize(
    ("text", "unproven"),
    [
        ("x", ["whether it is true or false ('x')"]),
        ("coalesce(n, s)", ["whether it is true or false"]),
        ("upper(x)", ["argument 1 of upper() ('x')"]),
        ("n > 1", []),
        ("x > 1", ["an operand of > ('x')"]),
    ],
)
def test_what_is_unproven_of_a_condition_is_told(text: str, unproven: list[str]) -> None:
    assert list(unproven_types(text, TYPES, condition=True).words) == unproven
    assert list(unproven_types(text, TYPES, frozenset("x"), condition=True).words) == [
        words for words in unproven if "'x'" not in words
    ]

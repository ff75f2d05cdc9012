"""Expressions are of one record: what makes several of one, or one value of several, is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.sql.checking import (
    check_condition,
    check_expression,
    check_single_record,
)
from dagster_adjunct.resources.sql.parsed import AGGREGATE_FUNCTIONS, GENERATOR_FUNCTIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TYPES = {"n": "int", "s": "string", "b": "boolean", "d": "date", "xs": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("explode(split(s, ',')) as item", "several records for one with explode()"),
        ("upper(s) || POSEXPLODE_OUTER(xs)", "several records for one with posexplode_outer()"),
        ("json_tuple(s, 'a', 'b')", "several records for one with json_tuple()"),
        ("sum(n) as total", "aggregates several records with sum()"),
        ("n - count(*)", "aggregates several records with count()"),
        ("max(n) filter (where n > 1) + 1", "aggregates several records with max()"),
        ("listagg(s) within group (order by n)", "aggregates several records with listagg()"),
        ("sum(max(n)) over (order by s)", "aggregates several records with max()"),
        ("row_number()", "aggregates several records with row_number()"),
    ],
)
def test_what_is_not_of_one_record_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanningError) as raised:
        check_single_record("map-2", text)
    assert raised.value.operator == "map-2"
    assert message in raised.value.problem
    with pytest.raises(PlanningError):
        check_condition(
            "filter-2",
            f"({text.removesuffix(' as item').removesuffix(' as total')}) is null",
            tuple(TYPES),
        )


@pytest.mark.parametrize(
    "text",
    [
        "sum(n) over (partition by s order by d rows between 1 preceding and current row)",
        "first_value(n) ignore nulls over (order by d)",
        "count(*) filter (where n > 1) over (partition by s)",
        "aggregate(xs, 0, (a, x) -> a + x) + reduce(xs, 0, (a, x) -> a + x)",
        "exists(xs, x -> x > n) and s like any ('a', 'b') and not s like some ('c')",
        "(select max(m) from elsewhere) > n",
        "x.sum(n)", "'sum(n)'", "`sum(n)`", "array_max(xs) + greatest(n, 1)", "n > 1",
    ],
)  # fmt: skip
def test_what_is_of_one_record_is_not(text: str) -> None:
    check_single_record("map-2", text)


def test_a_condition_has_no_window() -> None:
    with pytest.raises(PlanningError) as failure:
        check_condition(
            "filter-2", "row_number() over (partition by s order by d) = 1", tuple(TYPES)
        )
    assert failure.value.operator == "filter-2"
    assert "row_number()" in failure.value.problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b and n", "uses 'n' as a boolean, but it is int"),
        ("n > 1 or length(s)", "uses 'LENGTH(s)' as a boolean, but it is int"),
        ("case when not d then 1 end", "uses 'd' as a boolean, but it is date"),
    ],
)
def test_what_is_no_truth_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanningError) as raised:
        check_expression("map-2", text, tuple(TYPES), TYPES)
    assert message in raised.value.problem


@pytest.mark.parametrize(
    "text", ["b and s", "b and xs", "exists(xs, n -> n or b)", "not (n in (1)) and n is not null"]
)
def test_what_may_be_a_truth_is_not(text: str) -> None:
    check_expression("map-2", text, tuple(TYPES), TYPES)


@pytest.mark.parametrize("text", ["n > 1;", "n; n"])
def test_a_statement_is_no_expression(text: str) -> None:
    with pytest.raises(PlanningError, match="';' ends a statement"):
        check_condition("filter-2", text, tuple(TYPES), TYPES)
    check_condition("filter-2", "s = 'a;b'", tuple(TYPES), TYPES)


@pytest.mark.spark
def test_these_are_sparks_own_groups(spark: SparkSession) -> None:
    utilities = spark._jvm.org.apache.spark.sql.api.python.PythonSQLUtils  # type: ignore[union-attr]
    groups: dict[str, set[str]] = {}
    for info in utilities.listBuiltinFunctionInfos():
        groups.setdefault(info.getGroup(), set()).add(info.getName())
    aggregates = groups["agg_funcs"] | groups["window_funcs"] | {"schema_of_variant_agg"}
    assert aggregates <= AGGREGATE_FUNCTIONS
    assert aggregates == AGGREGATE_FUNCTIONS or spark.version < "4.3", (
        "those of the newest release, and no others"
    )
    tables = {"collations", "sql_keywords"}  # stand in FROM only
    assert groups["generator_funcs"] - tables <= GENERATOR_FUNCTIONS

"""Expressions against the columns that there are: certain mistakes are refused, nothing else is."""

from __future__ import annotations

import pytest

from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.sql.checking import check_expression

COLUMNS = ("visitor", "shop", "spent", "address", "a b", "user")
TYPES = {
    "visitor": "string",
    "shop": "string",
    "spent": "double",
    "address": None,
    "a b": "int",
    "user": "string",
}


def check(text: str, **more: object) -> str | None:
    return check_expression("map-2", text, COLUMNS, TYPES, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "spent", "SPENT", "Upper(Visitor) as v", "address.city", "`a b` + 1", "current_date", "current_user || visitor",
        "*", "* except (shop, `a b`)", "transform(xs.ys, v -> v)".replace("xs", "address"), "_metadata.file_path",
        "timestampdiff(DAY, address.at, current_timestamp)", "spent in (select 1)", "user", "session.x + 1",
        "filter(address.xs, (x, i) -> x > i)", "a between 1", "case when spent > 1 then 'a' end",
    ],
)  # fmt: skip
def test_what_spark_may_accept_is_not_refused(text: str) -> None:
    check(text)


@pytest.mark.parametrize(
    ("text", "column", "problem", "step"),
    [
        ("spnt", "spnt", "map-2: the stream has no column 'spnt'; its columns there are visitor, shop", "'spent'"),
        ("upper(Vistor) as v", "Vistor", "no column 'Vistor' ('upper(Vistor) as v')", "Did you mean 'visitor'?"),
        ("spent +\n tax", "tax", "in line 2", "Correct the expression."),
        ("* except (sp)", "sp", "no column 'sp'", ""),
        ("transform(address.xs, x -> x + y)", "y", "no column 'y'", ""),
        ("x.y", "x", "no column 'x'", ""),
        ("__offset > 1", "__offset", "are reserved", "the record's own columns"),
        ("visitor.name", "visitor", "'visitor' is string and has no fields", "`visitor.name`"),
        ("`a.b`", "a.b", "no column 'a.b'", ""),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused(text: str, column: str, problem: str, step: str) -> None:
    with pytest.raises(PlanningError) as raised:
        check(text)
    assert problem in raised.value.problem
    assert step in raised.value.next_step
    assert (raised.value.operator, raised.value.column) == ("map-2", column)


def test_a_name_given_before_may_be_used_behind_it() -> None:
    check("half + 1 as more", aliases={"half": "int"})
    with pytest.raises(PlanningError) as caught:
        check("half + 1 as more")
    assert (caught.value.operator, caught.value.column) == ("map-2", "half")


def test_a_column_stands_before_a_name_that_was_given_before_whatever_its_case() -> None:
    assert check("Visitor", aliases={"Visitor": "int"}) == "string"
    assert check("SPENT + 1", aliases={"Spent": "string", "half": "int"}) == "double"


def test_without_columns_only_what_is_certain_is_refused() -> None:
    assert check_expression("map-2", "anything + 1", None) is None
    with pytest.raises(PlanningError, match="not a Spark SQL expression: '\\(' is not closed"):
        check_expression("map-2", "upper(anything", None)

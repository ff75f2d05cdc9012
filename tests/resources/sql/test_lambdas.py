"""Mistakes in lambdas are found by the planner, with the path of the part that they are about.

That no expression which Spark accepts is rejected is checked in test_nested_spark_agrees.py.
"""

from __future__ import annotations

import pytest

from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.sql.checking import check_expression

TYPES: dict[str, str | None] = {
    "n": "int",
    "x": "struct<prize:int>",
    "xs": "array<int>",
    "m": "map<string,struct<v:int,w:array<struct<sku:string>>>>",
    "orders": "struct<lines:array<struct<sku:string,price:decimal(10,2),tags:array<string>>>>",
    "items": "array<struct<sku:string,price:decimal(10,2),tags:array<string>>>",
    "unknown": None,
}


def check(text: str) -> str | None:
    return check_expression("map-1", text, tuple(TYPES), TYPES)


MISSING = "struct has no field 'prize', it has sku, price, tags"


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("transform(items, x -> x.prize * 2)", f"x.prize (items[].prize): {MISSING}"),
        ("transform(items, X -> x.prize)", f"x.prize (items[].prize): {MISSING}"),
        ("filter(orders.lines, x -> x['prize'] > 1)", f"x['prize'] (orders.lines[].prize): {MISSING}"),
        ("exists(items, x -> forall(x.tags, t -> t.a = ''))", "t.a (items[].tags[].a): string has no"),
        ("aggregate(items, 0D, (a, x) -> a + x.prize)", f"x.prize (items[].prize): {MISSING}"),
        ("aggregate(xs, 0, (a, x) -> a + x, a -> a.b)", "a.b: int has no fields, so no 'b'"),
        ("zip_with(xs, items, (x, y) -> y.prize)", f"y.prize (items[].prize): {MISSING}"),
        ("map_filter(m, (k, v) -> v.b > 1)", "v.b (m[*].b): struct has no field 'b', it has v, w"),
        ("transform_values(m, (k, v) -> v.w.sk)", "v.w.sk (m[*].w.sk): the structs of the array have no"),
        ("transform_keys(m, (k, v) -> k.a)", "k.a: string has no fields, so no 'a'"),
        ("map_zip_with(m, m, (k, a, b) -> b.c)", "b.c (m[*].c): struct has no field 'c', it has v, w"),
        ("array_sort(items, (l, r) -> l.prize - 1)", f"l.prize (items[].prize): {MISSING}"),
        ("transform(items, x -> transform(xs, x -> x.price))", "x.price (xs[].price): int has no fields"),
        ("transform(filter(items, x -> true), y -> y.prize)", f"y.prize: {MISSING}"),
    ],
)  # fmt: skip
def test_a_missing_field_is_named_by_its_path(text: str, mistake: str) -> None:
    with pytest.raises(PlanningError) as failure:
        check(text)
    assert f"has a mistake in {mistake}" in failure.value.problem


def test_similar_names_are_suggested() -> None:
    with pytest.raises(PlanningError) as failure:
        check("transform(items, x -> x.prize * 2)")
    assert failure.value.next_step == "Did you mean 'price'? Correct the expression."


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("filter(items, x -> x.sku)", "'x -> x.sku', which is string: expected boolean"),
        ("exists(xs, x -> x + 1)", "'x -> x + 1', which is int: expected boolean"),
        ("map_filter(m, (k, v) -> v.v)", "which is int: expected boolean"),
        ("filter(items, x -> x.price and true)", "uses 'x.price' as a boolean"),
        ("transform(items, x -> upper(x.tags))", "takes 'x.tags', which is array<string>"),
        (
            "transform(items, x -> x.tags = n)",
            "compares 'x.tags', which is array<string>, with 'n'",
        ),
        ("aggregate(items, 0, (a, x) -> a + x.price)", "begins with int and merges by"),
        ("array_sort(items, (l, r) -> l.price)", "which is decimal(10,2): expected int"),
        ("exists(xs, (a, b) -> true)", "has 2 variables in '(a, b) -> TRUE': expected 1"),
        ("map_filter(m, v -> true)", "expected 2"),
        ("transform(xs, (a, b, c) -> a)", "expected 1 or 2, the second is the index"),
        ("forall(m, x -> true)", "takes 'm', which is map<"),
        ("zip_with(xs, n, (a, b) -> a)", "takes 'n', which is int: expected an array"),
        ("transform_values(items, (k, v) -> v)", "expected a map"),
    ],
)
def test_what_a_lambda_gets_and_returns_is_checked(text: str, problem: str) -> None:
    with pytest.raises(PlanningError) as failure:
        check(text)
    assert problem in failure.value.problem


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("transform(items, X -> x.price)", "array<decimal(10,2)>"),
        ("transform(xs, (x, i) -> x + i)", "array<int>"),
        ("aggregate(xs, named_struct('a', 0), (a, x) -> named_struct('b', a.a))", "struct<a:int>"),
        ("aggregate(xs, 0, (a, x) -> null)", "int"),
        ("map_zip_with(m, m, (k, a, b) -> a.v + b.v)", "map<string,int>"),
        ("transform(unknown, x -> x.y)", "array<…>"),
        ("aggregate(items, unknown, (a, x) -> a.b)", None),
        ("array_sort(items, (l, r) -> size(l.tags) - size(r.tags))", TYPES["items"]),
        ("transform_values(m, (k, v) -> transform(v.w, w -> w.sku))", "map<string,array<string>>"),
    ],
)
def test_what_spark_takes_has_its_type(text: str, kind: str | None) -> None:
    assert check(text) == kind

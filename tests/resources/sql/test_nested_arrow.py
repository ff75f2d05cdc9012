"""Expressions over nested columns that Arrow computes, compared with what Spark documents."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.sql.arrow_expressions import ArrowExpression, compile_expression
from dagster_adjunct.resources.sql.arrow_kernels import NeedsSpark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = Schema.of(
    n="int",
    s="string",
    customer={"id": "bigint", "address": {"city": "string", "post code": "string"}},
    items=[{"sku": "string", "price": "decimal(10,2)"}],
    xs="array<int>",
    m="map<string,int>",
)
TYPES = {field.name: field.type for field in SCHEMA.fields}
ROWS: list[dict[str, Any]] = [
    {
        "n": 1,
        "s": "a",
        "customer": {"id": 1, "address": {"city": "Bonn", "post code": "1"}},
        "items": [{"sku": "a", "price": Decimal("1.50")}, None, {"sku": None, "price": None}],
        "xs": [1, None, 3],
        "m": {"x": 1, "y": None},
    },
    {"n": 3, "s": "x", "customer": {"id": None, "address": None}, "items": [], "xs": [], "m": {}},
    {"n": None, "s": None, "customer": None, "items": None, "xs": None, "m": None},
    {"n": 3, "s": "b", "customer": {"id": 2}, "items": [{"sku": "b"}], "xs": [3, 3], "m": {"z": 2}},
]


def evaluate(text: str, start: int = 0) -> tuple[str, list[Any]]:
    compiled = compile_expression(text, TYPES)
    assert isinstance(compiled, ArrowExpression), compiled
    table = fit_to_schema(to_arrow_table(ROWS, "rows", SCHEMA), SCHEMA, "rows").slice(start)
    return compiled.type, compiled.evaluate(table).to_pylist(maps_as_pydicts="strict")


CASES: list[tuple[str, str, list[Any]]] = [
    ("customer.id", "bigint", [1, None, None, 2]),
    ("customer.ADDRESS.city", "string", ["Bonn", None, None, None]),
    ("customer.address.`post code`", "string", ["1", None, None, None]),
    ("customer['id'] + 1", "bigint", [2, None, None, 3]),
    ("items.sku", "array<string>", [["a", None, None], [], None, ["b"]]),
    ("size(items)", "int", [3, 0, None, 1]),
    ("cardinality(m)", "int", [2, 0, None, 1]),
    ("get(xs, 2)", "int", [3, None, None, None]),
    ("try_element_at(xs, 1)", "int", [1, None, None, 3]),
    ("try_element_at(xs, -1)", "int", [3, None, None, 3]),
    ("m['x']", "int", [1, None, None, None]),
    ("m.z", "int", [None, None, None, 2]),
    ("element_at(m, 'z')", "int", [None, None, None, 2]),
    ("array_contains(xs, 3)", "boolean", [True, False, None, True]),
    ("array_contains(xs, 2)", "boolean", [None, False, None, False]),
    ("array_contains(xs, n)", "boolean", [True, False, None, True]),
    (
        "named_struct('a', n, 'b', 'x')",
        "struct<a:int,b:string>",
        [{"a": n, "b": "x"} for n in (1, 3, None, 3)],
    ),
    ("coalesce(xs, xs)", "array<int>", [[1, None, 3], [], None, [3, 3]]),
    ("case when n = 1 then m end", "map<string,int>", [{"x": 1, "y": None}, None, None, None]),
    ("customer is null", "boolean", [False, False, True, False]),
]


@pytest.mark.parametrize(("text", "kind", "values"), CASES)
def test_values_of_nested_columns(text: str, kind: str, values: list[Any]) -> None:
    assert evaluate(text) == (kind, values)
    assert evaluate(text, start=1) == (kind, values[1:])


@pytest.mark.parametrize("text", ["xs[0]", "items[0].price", "element_at(xs, 1)", "xs[5]"])
def test_an_index_out_of_bounds_is_left_to_spark(text: str) -> None:
    with pytest.raises(NeedsSpark):
        evaluate(text)


def test_an_index_within_bounds() -> None:
    compiled = compile_expression("items[0].price", TYPES)
    assert isinstance(compiled, ArrowExpression)
    table = to_arrow_table([ROWS[0], ROWS[2]], "rows", SCHEMA)
    assert list(map(str, compiled.evaluate(table).to_pylist())) == ["1.50", "None"]


@pytest.mark.parametrize(
    "text",
    ["xs = xs", "xs[n]", "xs[-1]", "element_at(xs, 0)", "array_contains(xs, 1.5)", "transform(xs, x -> x)",
     "struct(n)[0]", "customer.nope", "m[0]", "array_contains(xs, null)", "size(n)", "get(items, 0).sku", "xs in (xs)", "named_struct('col1', n)"],
)  # fmt: skip
def test_what_is_left_to_spark(text: str) -> None:
    assert isinstance(compile_expression(text, TYPES), str)


def test_spark_has_the_same_values(spark: SparkSession, tmp_path: Path) -> None:
    from dagster_adjunct.resources.schemas.types import type_from_spark

    table = fit_to_schema(to_arrow_table(ROWS, "rows", SCHEMA), SCHEMA, "rows")
    pq.write_table(table, tmp_path / "rows.parquet")
    frame = spark.read.parquet(str(tmp_path / "rows.parquet"))
    texts = [f"{text} as c{number}" for number, (text, _, _) in enumerate(CASES)]
    selected = frame.selectExpr(*texts)
    result = selected.toArrow()
    for number, (text, kind, values) in enumerate(CASES):
        found = result.column(number).to_pylist(maps_as_pydicts="strict")
        assert (text, type_from_spark(selected.schema[number].dataType), found) == (
            text,
            kind,
            values,
        )

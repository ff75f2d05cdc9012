"""Digests of rows with nested values: equal for equal values only, and the same by Spark."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.resources.bucketing.hashing import row_digests, row_hash
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema
from tests.nested import comparable, draw_rows, draw_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def digests_of(values: list[Any], kind: str) -> list[int]:
    schema = Schema.of(v=kind)
    rows = [{"v": value} for value in values]
    table = fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows")
    digests: list[int] = row_digests(table, ["v"]).to_pylist()
    return digests


def test_equal_values_have_equal_digests_and_different_ones_differ() -> None:
    for seed in range(25):
        drawn = random.Random(seed)
        schema = draw_schema(drawn, columns=1)
        values = [row["v0"] for row in draw_rows(drawn, schema, range(40))]
        digests = digests_of(values, schema.fields[1].type)
        by_value = {repr(_sorted(comparable(v))): d for v, d in zip(values, digests, strict=True)}
        assert len(set(by_value.values())) == len(by_value)
        for value, digest in zip(values, digests, strict=True):
            assert by_value[repr(_sorted(comparable(value)))] == digest


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return value


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("array<int>", [None, [], [None], [None, None], [1], [1, None], [None, 1], [0], [0, 1]]),
        ("struct<a:int,b:int>", [None, {}, {"a": 1}, {"b": 1}, {"a": 0}, {"a": 1, "b": 0}]),
        ("struct<a:struct<b:int>>", [None, {"a": None}, {"a": {}}, {"a": {"b": 42}}]),
        ("array<array<int>>", [[], [[]], [[], []], [[1], [2]], [[1, 2]], [[], [1, 2]], [None]]),
        ("map<string,int>", [{}, {"a": None}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"a": 2}]),
    ],
)
def test_nulls_and_empty_values_at_any_depth_differ(kind: str, values: list[Any]) -> None:
    assert len(set(digests_of(values, kind))) == len(values)


def test_the_order_of_a_maps_entries_does_not_count() -> None:
    one, other = digests_of([{"a": 1, "b": 2}, {"b": 2, "a": 1}], "map<string,int>")
    assert one == other


@pytest.mark.spark
def test_digests_are_sparks(spark: SparkSession) -> None:
    for seed in range(4):
        drawn = random.Random(seed)
        schema = draw_schema(drawn, columns=6)
        rows = draw_rows(drawn, schema, range(30))
        table = fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows")
        frame = spark.createDataFrame(table).coalesce(1)
        hashed = frame.select(row_hash(schema.types).alias("h")).toArrow().column("h")
        assert row_digests(table, schema.names).to_pylist() == hashed.to_pylist()

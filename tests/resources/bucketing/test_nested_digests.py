"""Digests of rows with nested columns: Spark's and ours, and what they tell apart."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.bucketing.hashing import row_digests, row_hash
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema
from tests.resources.drawn_nested import schemas_with_rows, stored

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ALIKE = [
    None,
    [],
    [None],
    [None, None],
    [{"x": None, "y": None}],
    [{"x": [], "y": None}],
    [{"x": [None], "y": None}],
    [{"x": [1], "y": None}],
    [{"x": [1, None], "y": None}],
    [{"x": [None, 1], "y": None}],
    [{"x": None, "y": {}}],
    [{"x": None, "y": {"": None}}],
    [{"x": None, "y": {"a": 1}}],
    [{"x": [1], "y": None}, {"x": [2], "y": None}],
    [{"x": [1, 2], "y": None}],
    [{"x": [2], "y": None}, {"x": [1], "y": None}],
    [{"x": None, "y": {"a": 1, "b": 2}}],
    [{"x": None, "y": {"a": 2, "b": 1}}],
    [{"x": None, "y": {"a": 1}}, {"x": None, "y": {"b": 2}}],
]
_SCHEMA = Schema.of(v="array<struct<x:array<int>,y:map<string,int>>>")


def digests_of(schema: Schema, rows: list[dict[str, Any]]) -> list[int]:
    table = fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows")
    digests: list[int] = row_digests(table, schema.names).to_pylist()
    return digests


def test_nested_values_that_differ_have_different_digests() -> None:
    digests = digests_of(_SCHEMA, [{"v": value} for value in _ALIKE])
    for (one, digest), (other, second) in combinations(zip(_ALIKE, digests, strict=True), 2):
        assert digest != second, (one, other)


def test_the_order_of_a_maps_entries_does_not_change_its_digest() -> None:
    one, other = digests_of(
        Schema.of(m="map<string,int>"), [{"m": {"a": 1, "b": 2}}, {"m": {"b": 2, "a": 1}}]
    )
    assert one == other


@pytest.mark.lengthy
@settings(max_examples=40)
@given(schemas_with_rows(), st.data())
def test_digests_do_not_depend_on_chunks_and_slices(
    drawn: tuple[Schema, list[dict[str, Any]]], data: st.DataObject
) -> None:
    schema, rows = drawn
    table = fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows")
    at = data.draw(st.integers(0, len(rows)))
    parts = pa.concat_tables([table.slice(0, at), table.slice(at)])
    expected = row_digests(table, schema.names).to_pylist()
    assert row_digests(parts, schema.names).to_pylist() == expected
    alone = [row_digests(table.slice(n, 1), schema.names)[0].as_py() for n in range(len(rows))]
    assert alone == expected
    assert stored(rows) == stored(table.to_pylist(maps_as_pydicts="strict"))


@pytest.mark.spark
@pytest.mark.lengthy
def test_digests_of_nested_columns_are_sparks(spark: SparkSession) -> None:
    frames = [(_SCHEMA, [{"v": value} for value in _ALIKE])]
    for names in ("array<", "map<", "struct<"):
        found = find(
            schemas_with_rows(),
            lambda drawn, names=names: names in drawn[0].field("c0").type and len(drawn[1]) > 1,
            settings=settings(database=None, derandomize=True, max_examples=200),
        )
        frames.append(found)

    @settings(max_examples=6, database=None, derandomize=True, deadline=None)
    @given(schemas_with_rows())
    def collect(drawn: tuple[Schema, list[dict[str, Any]]]) -> None:
        frames.append(drawn)

    collect()
    for schema, rows in frames:
        table = fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows")
        frame = spark.createDataFrame(table).coalesce(1)
        hashed = frame.select(row_hash(schema.names, schema.types).alias("h")).toArrow()
        digests = row_digests(table, schema.names).to_pylist()
        assert hashed.column("h").to_pylist() == digests, schema

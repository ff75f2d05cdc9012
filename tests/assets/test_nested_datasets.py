"""Datasets with nested value columns, against plain Python: versions, tables that follow changes,
and what reads them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    QuerySource,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.policies import DeltaCompaction
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.validation.validators import (
    custom,
    min_rows,
    no_nulls,
    row_count_within,
    unique_keys,
)
from dagster_adjunct.resources.bucketing.hashing import arrow_checksum
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.nested import comparable, draw_rows, draw_schema

Rows = list[dict[str, Any]]
SEEDS = [1, 2, 3, 4]


def append(world: World, rows: Rows, deleted: Sequence[int] = (), **options: Any) -> None:
    """Append records with these values, and tombstones of the deleted keys, to the stream s."""
    schema = world.streams.info("s").schema
    table = fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows")
    sent = [{**row, "__tombstone": False} for row in rows]
    sent += [{"k": key, "__tombstone": True} for key in deleted]
    assert table.num_rows == len(rows)
    world.streams.append("s", sent, producer="test", sequence=world._next("s"), **options)


def check(world: World, spec: AdjunctDataset, expected: Rows) -> None:
    """Compare what lookups, scans and frames return with these entries."""
    by_key = {row["k"]: comparable(row) for row in expected}
    with open_dataset(world.lake, spec.name) as served:
        found = served.get_all(range(40))
        assert {key: comparable(entry) for key, entry in found.items()} == by_key
        assert [comparable(entry) for _, entry in served.items()] == [
            by_key[key] for key in sorted(by_key)
        ]
        assert served.verify(deep=True).damaged == ()
        if world.spark is not IN_PROCESS:
            rows = [row.asDict(recursive=True) for row in served.frame(world.spark()).collect()]
            assert {row["k"]: _as_python(comparable(row)) for row in rows} == _as_python(by_key)


def _as_python(value: Any) -> Any:
    """Return a value of Spark as Arrow returns it: bytes, and times in UTC."""
    if isinstance(value, dict):
        return {name: _as_python(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_python(item) for item in value]
    if isinstance(value, bytearray):
        return bytes(value)
    if hasattr(value, "tzinfo"):
        return value.replace(tzinfo=None)
    return value


@pytest.mark.parametrize("seed", SEEDS)
def test_versions_hold_what_was_sent(either: World, seed: int) -> None:
    drawn = random.Random(seed)
    schema = draw_schema(drawn)
    either.stream("s", schema, ["k"], 2)
    spec = bounded_dataset(
        "d",
        input="lake.s",
        key="k",
        partitions=2,
        validators=[unique_keys(), min_rows(1), row_count_within(0.9)],
    )
    old = draw_rows(drawn, schema, range(20))
    new = draw_rows(drawn, schema, range(10, 30))
    new[:4] = old[10:14]
    for version, rows in (("v1", old), ("v2", new)):
        append(either, rows, end_of_dataset=version)
        assert either.advance(spec).action == "sealed"
        check(either, spec, rows)
    changed = []
    for before, after in zip(old[10:], new, strict=False):
        if comparable(before) != comparable(after):
            changed.append(before["k"])
    with open_dataset(either.lake, "d") as served:
        found = served.diff("v1", "v2", sample=50)
    assert (found.added, found.removed, found.changed) == (10, 10, len(changed))
    assert [change.key["k"] for change in found.changed_sample] == changed
    assert [comparable(change.new) for change in found.changed_sample] == [
        comparable(new[key - 10]) for key in changed
    ]


def test_a_markers_checksum_of_nested_records_is_validated(either: World) -> None:
    schema = Schema.of(k="bigint", v="map<string,array<struct<a:double>>>")
    either.stream("s", schema, ["k"], 1)
    spec = bounded_dataset("d", input="lake.s", key="k", partitions=2)
    rows = [{"k": 1, "v": {"b": [{"a": -0.0}], "a": [None]}}, {"k": 2, "v": None}]
    table = fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows")
    append(either, rows)
    for version, checksum, action in (
        ("v1", arrow_checksum(table, schema), "sealed"),
        ("v2", arrow_checksum(table.slice(1), schema), "rejected"),
    ):
        either.streams.append_markers(
            "s",
            version,
            producer="test",
            sequence=either._next("s"),
            partitions=[0],
            checksum=checksum,
        )
        assert either.advance(spec).action == action
        append(either, rows)


@pytest.mark.parametrize("seed", SEEDS)
def test_tables_follow_changes(either: World, seed: int) -> None:
    drawn = random.Random(seed)
    schema = draw_schema(drawn)
    either.stream("s", schema, ["k"], 2)
    spec = unbounded_dataset(
        "d", input="lake.s", key="k", partitions=2, compaction=DeltaCompaction(inside_commit=False)
    )
    held: dict[int, dict[str, Any]] = {}
    for _ in range(3):
        keys = sorted(drawn.sample(range(30), 12))
        rows = draw_rows(drawn, schema, keys[:9])
        append(either, rows, keys[9:])
        either.advance(spec)
        held |= {row["k"]: row for row in rows}
        held = {key: row for key, row in held.items() if key not in keys[9:]}
        check(either, spec, list(held.values()))
    compact_dataset(either.lake, "d", spark=either.spark, by="test", level="major")
    check(either, spec, list(held.values()))


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_functions_compute_versions(either: World, seed: int) -> None:
    drawn = random.Random(seed)
    schema = draw_schema(drawn)
    rows = draw_rows(drawn, schema, range(12))
    query = QuerySource(lambda spark, computation: rows_of(rows, schema), schema=schema)
    spec = bounded_dataset(
        "d", input=query, key="k", partitions=2, validators=[no_nulls("k"), custom("own", seen)]
    )
    assert either.advance(spec).action == "sealed"
    check(either, spec, rows)
    assert either.advance(spec).action == "unchanged"


def rows_of(rows: Rows, schema: Schema) -> Any:
    return to_arrow_table(rows, "rows", schema)


def seen(candidate: Any) -> bool:
    return sum(1 for _ in candidate.view.items()) == 12


@pytest.mark.spark
def test_maps_that_spark_computes_are_stored_in_the_order_of_their_keys(sparkling: World) -> None:
    schema = Schema.of(k="bigint", v="array<map<string,int>>")
    stored = []
    for place, entries in enumerate(["'b', 1, 'ä', 2, 'a', 3", "'a', 3, 'b', 1, 'ä', 2"]):
        query = QuerySource(f"SELECT 1L AS k, array(map({entries})) AS v", schema=schema)
        spec = bounded_dataset(f"d{place}", input=query, key="k", partitions=1)
        assert sparkling.advance(spec).action == "sealed"
        with open_dataset(sparkling.lake, spec.name) as served:
            stored.append((repr(served.get(1)), served.sealed.digest))
    assert stored[0] == stored[1]
    assert stored[0][0] == "{'k': 1, 'v': [{'a': 3, 'b': 1, 'ä': 2}]}"


@pytest.mark.parametrize("kind", ["array<int>", "map<string,int>", "struct<a:int>"])
@pytest.mark.parametrize("argument", ["key", "order_by"])
def test_keys_and_orders_are_simple(either: World, kind: str, argument: str) -> None:
    either.stream("s", Schema.of(k="bigint", v=kind), ["k"], 1)
    either.streams.append(
        "s", [{"k": 1, "v": None, "__tombstone": False}], producer="p", sequence=1
    )
    options = {"key": "k", argument: "v"}
    spec = unbounded_dataset("d", input="lake.s", partitions=1, **options)
    with pytest.raises(AdjunctError) as failure:
        either.advance(spec)
    assert "'v'" in failure.value.problem
    assert kind in failure.value.problem

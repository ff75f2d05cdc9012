"""Null, a null element, an empty array and a missing field, at any depth: what arrives in JSON
or rows is told apart in versions, deltas, differences and other engines.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.declaration.policies import DeltaCompaction
from dagster_adjunct.assets.exchange.handover import duckdb_view, polars_frame, pyarrow_dataset
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.values import python_rows
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.kafka.formats import Json
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic, create_decoder
from tests.assets.conftest import World
from tests.resources.streams.kafka.messages import STREAM, batch_of

pytestmark = pytest.mark.lengthy
Rows = list[dict[str, Any]]
SCHEMA = Schema.of(
    k="bigint", v="struct<a:array<struct<b:array<int>,m:map<string,array<int>>>>,n:struct<b:int>>"
)
MISSING = object()


def draw(chosen: random.Random) -> Any:
    """Return a value of `v`, whose parts are often absent in one of the ways."""
    if chosen.random() < 0.15:
        return None
    lists = [None, [], [None], [1], [1, None], MISSING]
    items = [None, [], [None], MISSING]
    for _ in range(4):
        inner = {"b": chosen.choice(lists), "m": chosen.choice([None, {}, {"x": None}, MISSING])}
        inner["m"] = {"x": [None], "y": []} if chosen.random() < 0.2 else inner["m"]
        items.append([without(inner), *chosen.choice([[], [None], [{}]])])
    return without({"a": chosen.choice(items), "n": chosen.choice([None, {}, {"b": 1}, MISSING])})


def without(struct: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in struct.items() if value is not MISSING}


def stored(value: Any) -> Any:
    """Return a value as it is stored: with null for missing fields."""
    if value is None:
        return None
    items = value.get("a")
    if items is not None:
        items = [None if item is None else {"b": None, "m": None, **item} for item in items]
    inner = value.get("n")
    return {"a": items, "n": None if inner is None else {"b": inner.get("b")}}


def values(seed: int, count: int = 12) -> list[Any]:
    chosen = random.Random(seed)
    return [draw(chosen) for _ in range(count)]


def rows_of(drawn: list[Any]) -> Rows:
    return [{"k": number, "v": value} for number, value in enumerate(drawn)]


def expected(drawn: list[Any]) -> Rows:
    return [{"k": number, "v": stored(value)} for number, value in enumerate(drawn)]


def by_key(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: row["k"])


@pytest.mark.parametrize("seed", range(3))
def test_deltas_tell_them_apart(world: World, seed: int) -> None:
    world.spark = IN_PROCESS
    world.stream("s", SCHEMA, ["k"], 2)
    by_hand = DeltaCompaction(inside_commit=False)
    spec = unbounded_dataset("d", input="lake.s", key="k", partitions=2, compaction=by_hand)
    for round_ in range(3):
        drawn = values(seed * 10 + round_)
        world.streams.append("s", rows_of(drawn), producer="test", sequence=world._next("s"))
        world.advance(spec)
        with open_dataset(world.lake, "d") as served:
            assert by_key([entry for _, entry in served.items()]) == expected(drawn)
    compact_dataset(world.lake, "d", spark=IN_PROCESS, by="test", level="major")
    with open_dataset(world.lake, "d") as served:
        assert by_key([entry for _, entry in served.items()]) == expected(drawn)


@pytest.mark.parametrize("seed", range(3))
def test_versions_differ_where_values_do_and_other_engines_read_them(
    world: World, seed: int
) -> None:
    duckdb = pytest.importorskip("duckdb")
    pytest.importorskip("polars")
    world.spark = IN_PROCESS
    world.stream("s", SCHEMA, ["k"], 1)
    spec = bounded_dataset("d", input="lake.s", key="k", partitions=1)
    drawn = [values(seed * 10 + number) for number in range(3)]
    for number, each in enumerate(drawn):
        options = {"end_of_dataset": f"v{number}"}
        world.streams.append(
            "s", rows_of(each), producer="test", sequence=world._next("s"), **options
        )
        world.advance(spec)
    with open_dataset(world.lake, "d") as served:
        for number, (old, new) in enumerate(pairwise(drawn)):
            pairs = zip(expected(old), expected(new), strict=True)
            changed = sum(before != after for before, after in pairs)
            assert served.diff(f"v{number}", f"v{number + 1}").changed == changed
    view = world.view(spec)
    rows = expected(drawn[-1])
    connection = duckdb.connect()
    duckdb_view(connection, view, "d")
    found = [dict(zip("kv", row, strict=True)) for row in connection.sql("FROM d").fetchall()]
    assert by_key(found) == rows
    assert by_key(python_rows(pyarrow_dataset(view).to_table())) == rows
    assert by_key(polars_frame(view).collect().to_dicts()) == rows


@pytest.mark.parametrize("seed", range(3))
def test_messages_of_json_have_them(seed: int) -> None:
    drawn = values(seed, 40)
    messages = [json.dumps(row).encode() for row in rows_of(drawn)]
    records = create_decoder(KafkaTopic(value=Json(SCHEMA)), STREAM)(batch_of(messages))
    assert python_rows(records.select(SCHEMA.names)) == expected(drawn)

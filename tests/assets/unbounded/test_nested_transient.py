"""Tables of one run with nested columns."""

from __future__ import annotations

import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.assets.unbounded.transient_table import TransientTable
from dagster_adjunct.resources.schemas.schema import Schema
from tests.assets.conftest import World

pytestmark = pytest.mark.spark


def test_tables_of_one_run_hold_nested_values(sparkling: World) -> None:
    schema = Schema.of(k="bigint", v="map<string,array<struct<a:int,`b c`:double>>>")
    sparkling.stream("s", schema, ["k"], 2)
    spec = unbounded_dataset("d", input="lake.s", key="k", partitions=2, persistent=False)
    table = TransientTable({"lake": sparkling.streams}, spec)
    held = {}
    try:
        for value in ({"b": [{"a": 1, "b c": 0.5}, None], "a": []}, {}, {"x": None}):
            for key in (len(held), len(held) + 1):
                held[key] = value
                sparkling.streams.append(
                    "s",
                    [{"k": key, "v": value, "__tombstone": False}],
                    producer="test",
                    sequence=sparkling._next("s"),
                )
            table.advance(sparkling.spark)
            assert table.view is not None
            rows = table.view.frame(sparkling.spark()).collect()
            assert {row["k"]: row.asDict(recursive=True)["v"] for row in rows} == held
    finally:
        table.release()


def test_tables_of_one_run_are_keyed_by_paths(sparkling: World) -> None:
    schema = Schema.of(n="int", who={"id": "bigint", "name": "string"})
    sparkling.stream("s", schema, [], 1)
    spec = unbounded_dataset("d", input="lake.s", key="who.id", partitions=2, persistent=False)
    table = TransientTable({"lake": sparkling.streams}, spec)
    held = {}
    try:
        for number, key in enumerate([1, 2, 1, 3]):
            deleted = number == 2
            row = {"n": number, "who": {"id": key, "name": "x"}}
            held[key] = {"id": key, **row}
            if deleted:
                row = {"n": None, "who": {"id": key, "name": None}}
                del held[key]
            sparkling.streams.append(
                "s",
                [row | {"__tombstone": deleted}],
                producer="test",
                sequence=sparkling._next("s"),
            )
            table.advance(sparkling.spark)
        assert table.view is not None
        rows = table.view.frame(sparkling.spark()).collect()
        assert {row["id"]: row.asDict(recursive=True) for row in rows} == held
    finally:
        table.release()

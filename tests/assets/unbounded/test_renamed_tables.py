"""What tables do besides reading when their columns are renamed and dropped: history by a renamed
time, changes that name only some columns, compaction, rewinding.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.declaration.change_formats import OperationColumn
from dagster_adjunct.assets.declaration.dataset import (
    BoundedDataset,
    UnboundedDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.policies import DeltaCompaction
from dagster_adjunct.assets.exchange.handover import parquet_files, pyarrow_dataset
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.unbounded.rewind import rewind_dataset
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.schemas.column_changes import ColumnChanges
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.startpoint import StartpointOldest
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.assets.conftest import World


@pytest.fixture
def steps(either: World) -> World:
    return either


def hour(number: int) -> datetime:
    return datetime(2026, 1, 1, number, tzinfo=UTC)


def evolve_stream(world: World, schema: Schema, **changes: Any) -> None:
    world.streams.create(
        "prices", schema=schema, key=["k"], partitions=2, changes=ColumnChanges(**changes)
    )


def table(key: str = "k", **options: Any) -> UnboundedDataset:
    by_hand = DeltaCompaction(inside_commit=False)
    return unbounded_dataset(
        "prices", input="lake.prices", key=key, partitions=2, compaction=by_hand, **options
    )


def bounded(key: str = "k", **options: Any) -> BoundedDataset:
    return bounded_dataset("prices", input="lake.prices", key=key, partitions=2, **options)


def test_a_history_goes_on_when_the_column_of_its_times_is_renamed(steps: World) -> None:
    evolve_stream(steps, Schema.of(k="bigint", price="int", since="timestamp"))
    steps.send("prices", [(1, 10, hour(1)), (1, 12, hour(5))])
    steps.advance(table(history="all", valid_from="since"))
    renamed = {"since": "start", "price": "amount"}
    evolve_stream(steps, Schema.of(k="bigint", amount="int", start="timestamp"), renamed=renamed)
    with pytest.raises(DatasetError) as caught:
        steps.advance(table(history="all", valid_from="start"))
    assert 'renamed={"since": "start"}' in caught.value.next_step
    now = table(history="all", valid_from="start", renamed=renamed)
    steps.send("prices", [(1, 11, hour(3))])
    steps.advance(now)
    expected = [(10, hour(1)), (11, hour(3)), (12, hour(5))]
    assert history(steps) == expected
    compact_dataset(steps.lake, "prices", spark=steps.spark, level="major", by="me")
    assert history(steps) == expected
    rows = pyarrow_dataset(open_dataset(steps.lake, "prices").over_time()).to_table()
    assert sorted((row["amount"], row["start"]) for row in rows.to_pylist()) == expected
    steps.send("prices", [(1, 13, hour(7))])
    steps.advance(now)
    assert history(steps) == [*expected, (13, hour(7))]


def history(world: World) -> list[tuple[int, datetime]]:
    entries = open_dataset(world.lake, "prices").history_of(1)
    assert [each.valid_from for each in entries] == [each.entry["start"] for each in entries]
    return [(each.entry["amount"], each.entry["start"]) for each in entries]


MARKED = {"k": "bigint", "op": "string"}
BEFORE = Schema.of(**MARKED, a="string", b="int", a_isMissing="boolean", b_isMissing="boolean")
AFTER = Schema.of(**MARKED, x="string", b="int", x_isMissing="boolean", b_isMissing="boolean")
PARTIAL = OperationColumn("op", missing="_isMissing")


@pytest.mark.parametrize("compacted", [False, True])
def test_changes_that_name_some_columns_keep_the_values_of_renamed_ones(
    steps: World, compacted: bool
) -> None:
    evolve_stream(steps, BEFORE)
    steps.send("prices", [(1, "i", "one", 1, False, False), (2, "i", "two", 2, False, False)])
    steps.advance(table(changes=PARTIAL))
    steps.send("prices", [(1, "u", None, 5, True, False)])  # is read after the rename
    evolve_stream(steps, AFTER, renamed={"a": "x", "a_isMissing": "x_isMissing"})
    steps.send("prices", [(2, "u", "zwei", None, False, True)])
    now = table(changes=PARTIAL, renamed={"a": "x"})
    steps.advance(now)
    if compacted:
        compact_dataset(steps.lake, "prices", spark=steps.spark, level="major", by="me")
    steps.send("prices", [(2, "u", None, 7, True, False)])
    steps.advance(now)
    assert dict(open_dataset(steps.lake, "prices").items()) == {
        1: {"k": 1, "x": "one", "b": 5},
        2: {"k": 2, "x": "zwei", "b": 7},
    }


def test_a_change_that_keeps_a_dropped_column_keeps_the_others(steps: World) -> None:
    evolve_stream(steps, BEFORE)
    steps.send("prices", [(1, "i", "one", 1, False, False)])
    steps.advance(table(changes=PARTIAL))
    steps.send("prices", [(1, "u", None, 5, True, False)])
    bare = Schema.of(**MARKED, b="int", b_isMissing="boolean")
    evolve_stream(steps, bare, drop=("a", "a_isMissing"))
    steps.send("prices", [(1, "u", None, True)])
    steps.advance(table(changes=PARTIAL, drop="a"))
    assert dict(open_dataset(steps.lake, "prices").items()) == {1: {"k": 1, "b": 5}}
    evolve_stream(steps, BEFORE)
    steps.send("prices", [(1, "u", 9, False, None, True)])
    steps.advance(table(changes=PARTIAL))
    assert dict(open_dataset(steps.lake, "prices").items()) == {1: {"k": 1, "b": 9, "a": None}}


def test_a_rewind_across_a_rename_applies_changes_under_the_names_of_now(steps: World) -> None:
    """The order is by a member of a struct, which is renamed, too."""
    evolve_stream(steps, Schema.of(k="bigint", a="string", at={"n": "int"}))
    steps.send("prices", [(1, "one", {"n": 1}), (2, "two", {"n": 2})])
    steps.advance(table(order_by="at.n"))
    renamed = {"a": "x", "at.n": "number"}
    evolve_stream(steps, Schema.of(k="bigint", x="string", at={"number": "int"}), renamed=renamed)
    now = table(order_by="at.number", renamed=renamed)
    steps.send("prices", [(1, "uno", {"number": 5}), (1, "late", {"number": 4})])
    oldest = {SystemStreamPartition("lake", "prices", 0): StartpointOldest()}
    run: dict[str, Any] = {"lake": steps.lake, "systems": steps.systems, "spark": steps.spark}
    rewind_dataset(now, positions=oldest, reason="test", by="me", **run)
    steps.advance(now)
    assert dict(open_dataset(steps.lake, "prices").items()) == {
        1: {"k": 1, "x": "uno", "at": {"number": 5}},
        2: {"k": 2, "x": "two", "at": {"number": 2}},
    }


@pytest.mark.parametrize("dropped", ["b", "c.y"])
def test_files_with_dropped_columns_are_not_handed_over_as_they_are(
    steps: World, dropped: str
) -> None:
    evolve_stream(steps, Schema.of(k="bigint", b="int", c={"x": "int", "y": "int"}))
    steps.send("prices", [(1, 5, {"x": 1, "y": 2})])
    steps.advance(table())
    assert len(parquet_files(open_dataset(steps.lake, "prices"))) == 1
    steps.streams.change_columns("prices", drop=[dropped])
    steps.advance(table(drop=dropped))
    with pytest.raises(DatasetError, match="dropped"):
        parquet_files(open_dataset(steps.lake, "prices"))
    row = (1, {"x": 1, "y": 2}) if dropped == "b" else (1, 5, {"x": 1})
    steps.send("prices", [row])
    steps.advance(table(drop=dropped))
    compact_dataset(steps.lake, "prices", spark=steps.spark, level="major", by="me")
    (path,) = parquet_files(open_dataset(steps.lake, "prices"))
    rows = pq.read_table(path).drop_columns(["__position", "__tombstone"]).to_pylist()
    assert [tuple(each.values()) for each in rows] == [row]


def test_the_error_for_a_key_member_that_was_renamed_says_what_to_declare(steps: World) -> None:
    evolve_stream(steps, Schema.of(k="bigint", asset={"id": "bigint", "v": "string"}))
    steps.send("prices", [(1, {"id": 7, "v": "seven"})])
    steps.advance(table("asset.id", order_by="k"))
    tagged = Schema.of(k="bigint", asset={"tag": "bigint", "v": "string"})
    evolve_stream(steps, tagged, renamed={"asset.id": "tag"})
    with pytest.raises(DatasetError) as caught:
        steps.advance(table("asset.tag", order_by="k"))
    advice = re.search(r"declare key=(\[.*?\]), renamed=({.*?})\.", caught.value.next_step)
    assert advice is not None
    (key,) = json.loads(advice[1])
    steps.advance(table(key, order_by="k", renamed=json.loads(advice[2])))
    entries = dict(open_dataset(steps.lake, "prices").items())
    assert entries == {7: {"id": 7, "k": 1, "asset": {"tag": 7, "v": "seven"}}}


@pytest.mark.parametrize(
    ("declare", "key", "key_now"),
    [(table, "k", "k"), (bounded, "home.id as k", "house.number as k")],
)
def test_columns_that_are_made_of_renamed_paths_stay(
    steps: World, declare: Any, key: str, key_now: str
) -> None:
    home = Schema.of(k="bigint", home={"id": "bigint", "city": "string"})
    evolve_stream(steps, home)
    steps.send("prices", [(7, {"id": 7, "city": "Oslo"})], version="v1")
    steps.advance(declare(key, columns=[key, "home.city as town"]))
    renamed = {"home": "house", "home.id": "number", "home.city": "place"}
    house = Schema.of(k="bigint", house={"number": "bigint", "place": "string"})
    evolve_stream(steps, house, renamed=renamed)
    steps.send("prices", [(8, {"number": 8, "place": "Rome"})], version="v2")
    columns = [key_now, "house.place as town"]
    with pytest.raises(DatasetError) as caught:
        steps.advance(declare(key_now, columns=columns))
    advice = re.search(r"declare renamed=({.*?})", caught.value.next_step)
    assert advice is not None
    assert json.loads(advice[1]).items() <= renamed.items()
    for _ in range(2):
        steps.advance(declare(key_now, columns=columns, renamed=renamed))
    entries = dict(open_dataset(steps.lake, "prices").items())
    assert entries[8] == {"k": 8, "town": "Rome"}
    if declare is table:
        assert entries[7] == {"k": 7, "town": "Oslo"}

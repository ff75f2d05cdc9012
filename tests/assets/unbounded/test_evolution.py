"""Columns that are added or widened while a table lives: what is stored stays as it is, and
reads as it is declared.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.declaration.policies import DeltaCompaction
from dagster_adjunct.assets.exchange.handover import pyarrow_dataset
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.verification import verify_version
from dagster_adjunct.assets.unbounded.advance import advance_unbounded
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.unbounded.recovery import evolve_columns
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.schemas.evolution import holds_values_of, is_widening
from dagster_adjunct.resources.schemas.schema import AS_NAMED, Schema
from dagster_adjunct.resources.schemas.types import parse_type
from dagster_adjunct.resources.schemas.version_columns import NamedColumns
from tests.assets.conftest import World

NARROW = (
    "k STRING, t TINYINT, s SMALLINT, i INT, f FLOAT, d DECIMAL(5,2), e DECIMAL(12,2), g"
    " DECIMAL(20,2), p INT, b BIGINT, r SMALLINT, n STRING"
)
WIDE = (
    "k STRING, n STRING, t INT, s BIGINT, i DOUBLE, f DOUBLE, d DECIMAL(22,4), e DECIMAL(38,2), g"
    " DECIMAL(30,6), p DECIMAL(12,2), b DECIMAL(20,0), r DECIMAL(10,0), added STRING, more BIGINT"
)
LOW = {
    "t": -128, "s": -32768, "i": -(2**31), "f": 0.1, "d": "-999.99", "e": "-9999999999.99",
    "g": "-999999999999999999.99", "p": -(2**31), "b": -(2**63), "r": -32768, "n": "x",
}  # fmt: skip
READ = {
    "t": -128,
    "s": -32768,
    "i": -2147483648.0,
    "f": float(np.float32(0.1)),
    "d": Decimal("-999.9900"),
    "e": Decimal("-9999999999.99"),
    "g": Decimal("-999999999999999999.990000"),
    "p": Decimal("-2147483648.00"),
    "b": Decimal(-(2**63)),
    "r": Decimal(-32768),
    "n": "x",
    "added": None,
    "more": None,
}
NOTHING = dict.fromkeys(READ)


def wide_world(world: World) -> World:
    world.stream("wide", Schema.of(k="string", value="string"), ["k"], 2)
    return world


def spec(columns: str, **options: Any) -> AdjunctDataset:
    changes = DebeziumEnvelope(columns, decimals="string", on_missing="null")
    manual = DeltaCompaction(inside_commit=False)
    return unbounded_dataset(
        "wide",
        input="lake.wide",
        key="k",
        partitions=2,
        changes=changes,
        compaction=manual,
        **options,
    )


def send(world: World, **entries: dict[str, Any] | None) -> None:
    rows = []
    for key, entry in entries.items():
        row = None if entry is None else {"k": key, **entry}
        rows.append(
            (
                key,
                json.dumps({"op": "d" if row is None else "c", "before": {"k": key}, "after": row}),
            )
        )
    world.send("wide", rows)


def read(world: World, version: str | None = None) -> dict[str, dict[str, Any]]:
    """Return the entries by key, read by Spark, by key and in order, which must agree."""
    store = StoredVersions(world.lake, "wide")
    view = store.require_current() if version is None else store.version(version)
    frame = {row.k: row.asDict() for row in view.frame(world.spark()).collect()}
    assert {key: view.get(key) for key in frame} == frame
    assert dict(view.items()) == frame
    return {
        key: {name: value for name, value in row.items() if name != "k"}
        for key, row in frame.items()
    }


def check_deeply(world: World) -> None:
    assert (
        verify_version(StoredVersions(world.lake, "wide").require_current(), deep=True).damaged
        == ()
    )


@pytest.mark.spark
def test_added_and_widened_columns_are_read_of_old_and_new_rows(sparkling: World) -> None:
    world = wide_world(sparkling)
    send(world, low=LOW, null={}, gone=LOW)
    world.advance(spec(NARROW))
    send(world, delta=LOW, gone=None)
    old = world.advance(spec(NARROW)).version
    assert old is not None
    before = read(world, old)

    report = world.advance(spec(WIDE))
    assert (report.action, len(report.sealed)) == ("up-to-date", 1), (
        "the new columns are there without a change"
    )
    assert world.advance(spec(WIDE)).sealed == (), "once"
    assert read(world) == {"low": READ, "null": NOTHING, "delta": READ}
    entry = StoredVersions(world.lake, "wide").history(1)[0]
    assert (entry.action, "added (string) is added" in entry.reason) == ("evolve", True)

    big = {
        "t": 2**31 - 1,
        "s": 2**40,
        "i": 0.5,
        "b": str(10**19),
        "added": "new",
        "more": 2**50,
        "d": "1.2345",
    }
    send(world, big=big, null={"added": "now"})
    world.advance(spec(WIDE))
    wanted = {
        "low": READ,
        "null": NOTHING | {"added": "now"},
        "delta": READ,
        "big": NOTHING | big | {"b": Decimal(10**19), "d": Decimal("1.2345")},
    }
    assert read(world) == wanted
    frame = world.view(spec(WIDE)).frame(world.spark())
    for condition, keys in (
        ("t < 0", {"low", "delta"}),
        ("s > 1000000", {"big"}),
        ("b > 0", {"big"}),
        ("added is null", {"low", "delta"}),
        ("d = 1.2345", {"big"}),
        ("p = -2147483648", {"low", "delta"}),
        ("more > 1", {"big"}),
    ):
        assert {row.k for row in frame.where(condition).collect()} == keys, condition
    assert read(world, old) == before, "an earlier version has the columns that it had"
    store = StoredVersions(world.lake, "wide")
    check_deeply(world)
    diff = store.diff(old, world.view(spec(WIDE)).version)
    assert (diff.added, diff.removed, diff.changed, diff.unchanged) == (1, 0, 0, 3)
    assert diff.columns.added == ("added", "more")
    assert ("t", "tinyint", "int") in diff.columns.retyped

    for level in ("minor", "major"):
        compact_dataset(world.lake, "wide", spark=world.spark, by="test", level=level)
        assert read(world) == wanted
    sealed = world.view(spec(WIDE)).sealed
    assert (sealed.rows, [generation.rows for generation in sealed.generations]) == (4, [5]), (
        "a deletion is remembered"
    )
    check_deeply(world)


@pytest.mark.spark
def test_a_cache_shared_by_versions_gives_each_its_own_columns(sparkling: World) -> None:
    world = wide_world(sparkling)
    send(world, low=LOW)
    world.advance(spec(NARROW))
    store = StoredVersions(world.lake, "wide")
    held = store.require_current()
    assert held.get("low")["t"] == -128
    world.advance(spec(WIDE))
    assert pyarrow_dataset(store.require_current()).to_table().to_pylist() == [
        {"k": "low"} | READ
    ], "other engines too"
    assert store.require_current().get("low") == {"k": "low"} | {name: READ[name] for name in READ}
    assert "added" not in held.get("low")


@pytest.mark.spark
def test_a_projection_may_widen_and_add_what_the_stream_has(sparkling: World) -> None:
    world = sparkling
    world.stream("plain", Schema.of(k="string", n="int", m="int"), ["k"], 2)
    world.send("plain", [("a", 1, 2)])

    def declared(columns: str) -> AdjunctDataset:
        return unbounded_dataset(
            "plain",
            input="lake.plain",
            key="k",
            partitions=2,
            extractor=Projection(columns, {"n": "n"}),
        )

    world.advance(declared("k STRING, n INT"))
    world.send("plain", [("b", 3, 4)])
    world.advance(declared("k STRING, n BIGINT, m INT"))
    view = world.view(declared("k STRING, n BIGINT, m INT"))
    wanted = {"a": {"k": "a", "n": 1, "m": None}, "b": {"k": "b", "n": 3, "m": 4}}
    assert (
        dict(view.items())
        == {row.k: row.asDict() for row in view.frame(world.spark()).collect()}
        == wanted
    )


def test_removed_narrowed_and_retyped_columns_are_refused_with_the_difference() -> None:
    stored = NamedColumns(Schema.of(k="int", a="bigint", b="string", c="double"), AS_NAMED)
    table = unbounded_dataset("d", input="lake.d", key="k", partitions=1)
    for declared, difference in (
        (Schema.of(k="int", a="bigint", c="double"), "b (string) is removed"),
        (
            Schema.of(k="int", a="int", b="string", c="double"),
            "a is int, was bigint, whose values do not all fit",
        ),
        (Schema.of(k="int", a="double", b="string", c="double"), "a is double, was bigint"),
        (Schema.of(k="int", a="bigint", b="binary", c="double"), "b is binary, was string"),
        (
            Schema.of(k="bigint", a="bigint", b="string", c="double"),
            "k is bigint, was int, and is a part of the key",
        ),
    ):
        with pytest.raises(DatasetError) as caught:
            evolve_columns(table, stored, declared)
        assert difference in caught.value.problem
        assert "adjunct dataset rebuild d" in caught.value.next_step
        assert "renamed" not in caught.value.next_step
    more = Schema.of(z="date", c="double", k="int", b="string", a="decimal(20,0)")
    assert evolve_columns(table, stored, more).schema == more


def test_what_widens_is_what_fits_exactly() -> None:
    kinds = ("tinyint", "smallint", "int", "bigint")
    for at, narrow in enumerate(kinds):
        assert [wide for wide in kinds if is_widening(narrow, wide)] == list(kinds[at:])
    assert [kind for kind in (*kinds, "float") if is_widening(kind, "double")] == [
        "tinyint",
        "smallint",
        "int",
        "float",
    ]
    assert is_widening("decimal(5,2)", "decimal(6,2)")
    assert is_widening("decimal(5,2)", "decimal(7,4)")
    assert not is_widening("decimal(5,2)", "decimal(6,4)")
    assert not is_widening("decimal(5,2)", "decimal(6,1)")
    assert is_widening("int", "decimal(12,2)")
    assert not is_widening("int", "decimal(11,2)")
    assert is_widening("bigint", "decimal(20,0)")
    assert not is_widening("bigint", "decimal(19,0)")
    for narrow, wide in (
        ("int", "float"),
        ("date", "timestamp"),
        ("int", "string"),
        ("double", "float"),
    ):
        assert not is_widening(narrow, wide)


@pytest.mark.parametrize(
    ("narrow", "wide", "holds", "widens"),
    [
        ("struct<a:int,b:int>", "struct<a:bigint,b:int,c:date>", True, True),
        ("struct<a:int,b:int>", "struct<b:int,a:int>", True, False),
        ("struct<a:int>", "struct<c:date,a:int>", True, False),
        ("struct<a:int,b:int>", "struct<a:int>", False, False),
        ("array<map<string,struct<a:int>>>", "array<map<string,struct<a:double>>>", True, True),
        ("array<struct<a:bigint>>", "array<struct<a:int>>", False, False),
        ("array<int>", "map<string,int>", False, False),
    ],
)
def test_nested_types_hold_members_by_name_and_widen_in_order(
    narrow: str, wide: str, holds: bool, widens: bool
) -> None:
    assert holds_values_of(parse_type(wide), parse_type(narrow)) is holds
    assert is_widening(narrow, wide) is widens


@pytest.mark.spark
def test_refused_columns_change_nothing_and_a_rebuild_may_have_any(sparkling: World) -> None:
    world = wide_world(sparkling)
    send(world, a={"t": 1, "n": "x"})
    world.advance(spec(NARROW))
    other = spec("k STRING, t STRING")
    with pytest.raises(DatasetError, match="t is string, was tinyint"):
        world.advance(other)
    assert read(world)["a"]["t"] == 1
    report = advance_unbounded(
        Runtime(world.lake, world.systems, world.spark, "test"),
        other,
        rebuild="t was never a number",
    )
    assert (report.action, read(world)) == ("bootstrapped", {"a": {"t": "1"}})
    assert world.advance(other).action == "up-to-date"


@pytest.mark.spark
def test_a_bootstrap_begins_again_when_other_columns_are_declared_before_it_ends(
    sparkling: World,
) -> None:
    world = wide_world(sparkling)
    send(world, **{f"key{number}": {"t": number} for number in range(3)})
    spark, asked = world.spark, 0

    def dies_at_the_second_chunk() -> Any:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise KeyboardInterrupt
        return spark()

    world.spark = dies_at_the_second_chunk
    with pytest.raises(KeyboardInterrupt):
        world.advance(spec(NARROW, chunk=1))
    world.spark = spark
    report = world.advance(spec("k STRING, t STRING", chunk=1))
    assert report.decision is not None
    assert "the declared columns have changed since it began" in report.decision.reason
    assert read(world) == {f"key{number}": {"t": str(number)} for number in range(3)}

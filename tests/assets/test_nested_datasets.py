"""Datasets with nested value columns, against plain Python: versions, tables that follow changes,
and what reads them.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import random
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest
from click.testing import CliRunner

from dagster_adjunct.assets.declaration.change_formats import OperationColumn
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    QuerySource,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.extractors import Projection, PythonExtractor
from dagster_adjunct.assets.declaration.policies import DeadLetters, DeltaCompaction
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.retention.erasure import erase_keys
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.unbounded.rewind import rewind_dataset
from dagster_adjunct.assets.validation.validators import (
    custom,
    min_rows,
    no_nulls,
    row_count_within,
    unique_keys,
)
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.orchestration.maintenance.repartition import repartition_dataset
from dagster_adjunct.resources.bucketing.hashing import arrow_checksum
from dagster_adjunct.resources.errors import AdjunctError, DatasetError, SchemaMismatchError
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.startpoint import StartpointSpecific
from dagster_adjunct.resources.streams.system import SystemStreamPartition
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
    assert [change.key["k"] for change in found.sample.changed] == changed
    assert [comparable(change.new) for change in found.sample.changed] == [
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


@pytest.mark.lengthy
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


HISTORY = Schema.of(
    k="bigint", since="timestamp", v="map<string,array<struct<a:double>>>", w="struct<a:int>"
)


def day(number: int) -> dt.datetime:
    return dt.datetime(2026, 1, number, tzinfo=dt.UTC)


def test_equal_neighbours_of_a_history_are_one_interval(either: World) -> None:
    either.stream("s", HISTORY, ["k"], 1)
    spec = unbounded_dataset(
        "d", input="lake.s", key="k", partitions=2, history="all", valid_from="since"
    )
    one = {"b": [{"a": math.nan}, None], "a": []}
    same = {"a": [], "b": [{"a": -math.nan}, None]}
    other = {"b": [{"a": 0.0}, None], "a": []}
    values = [(one, {"a": 1}), (same, {"a": 1}), (other, {"a": 1}), (other, None), (other, {})]
    for number, (v, w) in enumerate(values):
        append(either, [{"k": 1, "since": day(1 + number), "v": v, "w": w}])
        either.advance(spec)
    begins = [day(1), day(3), day(4), day(5)]
    with open_dataset(either.lake, "d") as served:
        parts = served.history_of(1)
        assert [part.valid_from for part in parts] == begins
        contents = [(part.entry["v"], part.entry["w"]) for part in parts if part.entry]
        assert comparable(contents[0][0]) == comparable(one)
        assert contents[1:] == [(other, {"a": 1}), (other, None), (other, {"a": None})]
        if either.spark is not IN_PROCESS:
            rows = served.over_time().frame(either.spark()).orderBy("since").collect()
            assert [row["since"].day for row in rows] == [moment.day for moment in begins]


def test_validators_read_nested_columns(either: World) -> None:
    schema = Schema.of({"k": "bigint", "v": "struct<a:int>", "v.a": "int"})
    either.stream("s", schema, ["k"], 1)
    spec = bounded_dataset(
        "d", input="lake.s", key="k", partitions=1, validators=[no_nulls("v"), no_nulls("v.a")]
    )
    good = {"k": 1, "v": {"a": None}, "v.a": 1}
    for version, change, action in (
        ("v1", {}, "sealed"),
        ("v2", {"v": None}, "rejected"),
        ("v3", {"v": {"a": 1}, "v.a": None}, "rejected"),
    ):
        append(either, [{**good, **change}, {**good, "k": 2}], end_of_dataset=version)
        assert either.advance(spec).action == action


LINES = (
    "k BIGINT, line struct<sku:string,price:decimal(10,2)>, by struct<key:map<string,int>,n:int>"
)


def test_functions_extract_nested_entries(either: World) -> None:
    schema = Schema.of(
        k="bigint", lines="array<struct<sku:string,price:decimal(10,2)>>", by="map<string,int>"
    )
    either.stream("s", schema, ["k"], 1)
    lines = [{"sku": "a", "price": Decimal("1.50")}, None, {"sku": None, "price": None}]
    append(either, [{"k": 1, "lines": lines, "by": {"y": 1, "x": 2}}], end_of_dataset="v1")
    extract = PythonExtractor("tests.assets.extractors:entries_of_lines", LINES)
    spec = bounded_dataset("d", input="lake.s", key="k", partitions=1, extractor=extract)
    either.advance(spec)
    with open_dataset(either.lake, "d") as served:
        assert [entry["line"] for _, entry in served.items()] == lines
        assert served.get(10)["by"] == {"key": {"x": 2, "y": 1}, "n": None}
    extract = PythonExtractor("tests.assets.extractors:wrong_line", LINES)
    spec = bounded_dataset("e", input="lake.s", key="k", partitions=1, extractor=extract)
    with pytest.raises(DatasetError) as failure:
        either.advance(spec)
    assert "'line.price'" in failure.value.problem
    spec = bounded_dataset(
        "e", input="lake.s", key="k", partitions=1, extractor=extract, sensitive="line.price"
    )
    with pytest.raises(DatasetError) as failure:
        either.advance(spec)
    assert "'x'" not in str(failure.value)


@pytest.mark.spark
def test_projections_compute_nested_entries(sparkling: World) -> None:
    schema = Schema.of(k="bigint", a="array<int>", b="struct<c:string>")
    sparkling.stream("s", schema, ["k"], 1)
    append(sparkling, [{"k": 1, "a": [1, None], "b": {"c": "x"}}], end_of_dataset="v1")
    extract = Projection(
        "k BIGINT, a ARRAY<INT>, m MAP<STRING, STRUCT<c: STRING>>",
        {"m": "map('z', b, 'y', named_struct('c', 'w'))"},
    )
    spec = bounded_dataset("d", input="lake.s", key="k", partitions=1, extractor=extract)
    sparkling.advance(spec)
    with open_dataset(sparkling.lake, "d") as served:
        expected = {"k": 1, "a": [1, None], "m": {"y": {"c": "w"}, "z": {"c": "x"}}}
        assert served.get(1) == expected


@pytest.mark.parametrize("bounded", [True, False])
def test_erased_keys_are_gone_and_others_stay(either: World, bounded: bool) -> None:
    drawn = random.Random(5)
    schema = draw_schema(drawn)
    either.stream("s", schema, ["k"], 2)
    rows = draw_rows(drawn, schema, range(20))
    declare = bounded_dataset if bounded else unbounded_dataset
    spec = declare("d", input="lake.s", key="k", partitions=2)
    append(either, rows[:10])
    if not bounded:
        either.advance(spec)
    append(either, rows[10:], **({"end_of_dataset": "v1"} if bounded else {}))
    either.advance(spec)
    erase_keys(either.lake, "d", [3, 14], reason="asked", by="me")
    check(either, spec, [row for row in rows if row["k"] not in (3, 14)])


def test_changes_that_leave_out_nested_columns_keep_them(either: World) -> None:
    drawn = random.Random(6)
    schema = draw_schema(drawn)
    names = schema.names[1:]
    stored = {**schema.types, "op": "string", **{f"{name}_isMissing": "boolean" for name in names}}
    either.stream("s", Schema.of(stored), ["k"], 2)
    spec = unbounded_dataset(
        "d",
        input="lake.s",
        key="k",
        partitions=2,
        changes=OperationColumn("op", missing="_isMissing"),
        columns=schema.names,
    )
    held: dict[int, dict[str, Any]] = {}
    for batch in range(3):
        rows = draw_rows(drawn, schema, range(10))
        for row in rows:
            left_out = [] if batch == 0 else drawn.sample(names, 2)
            held[row["k"]] = {**row, **{name: held[row["k"]][name] for name in left_out}}
            for name in names:
                row[f"{name}_isMissing"] = name in left_out
                if name in left_out:
                    row[name] = None
            row["op"] = "u" if batch else "c"
        append(either, rows)
        either.advance(spec)
        check(either, spec, list(held.values()))


@pytest.mark.spark
def test_bad_changes_with_nested_columns_are_dead_letters(sparkling: World) -> None:
    either = sparkling
    schema = Schema.of(k="bigint", at="bigint", v="map<string,array<int>>")
    either.stream("s", schema, ["k"], 1)
    spec = unbounded_dataset(
        "d",
        input="lake.s",
        key="k",
        partitions=1,
        order_by="at",
        on_bad_change=DeadLetters("lake.dead"),
    )
    value = {"b": [1], "a": [None]}
    append(either, [{"k": 1, "at": 1, "v": value}, {"k": 2, "at": None, "v": value}])
    either.advance(spec)
    with open_dataset(either.lake, "d") as served:
        assert dict(served.items()) == {1: {"k": 1, "at": 1, "v": {"a": [None], "b": [1]}}}
    letters = either.streams.read_arrow(either.streams.all_ranges("dead")).to_pylist()
    assert [letter["offset"] for letter in letters] == [1]
    assert json.loads(letters[0]["value"])["v"] == {"a": [None], "b": [1]}


def test_versions_over_time_are_read_with_nested_columns(either: World) -> None:
    either.stream("s", Schema.of(k="bigint", v="map<string,array<int>>"), ["k"], 1)
    spec = bounded_dataset("d", input="lake.s", key="k", partitions=1, valid_from="name")
    values = [{"b": [1], "a": []}, {"a": [], "b": [1]}, None]
    for number, value in enumerate(values):
        append(either, [{"k": 1, "v": value}], end_of_dataset=f"2026-01-0{number + 1}")
        either.advance(spec)
    with open_dataset(either.lake, "d") as served:
        assert [(part.valid_from.day, part.entry["v"]) for part in served.history_of(1)] == [
            (1, {"a": [], "b": [1]}),
            (3, None),
        ]
        if either.spark is not IN_PROCESS:
            rows = served.over_time().frame(either.spark()).orderBy("valid_from").collect()
            assert [row["v"] for row in rows] == [{"a": [], "b": [1]}, None]


def test_a_path_of_a_sensitive_part_masks_its_column() -> None:
    schema = Schema.of(
        k="bigint", customer="struct<email:string>", lines="array<struct<`a b`:int>>"
    )
    assert schema.with_sensitive("customer.email").sensitive == ("customer",)
    assert schema.with_sensitive("lines[].`a b`").sensitive == ("lines",)
    for unknown in ("customer.mail", "customer.email.x", "lines[].b", "nothing.email"):
        with pytest.raises(SchemaMismatchError):
            schema.with_sensitive(unknown)
    exact = Schema.of({"a": "struct<b:int>", "a.b": "int"})
    assert exact.with_sensitive("a.b").sensitive == ("a.b",)


def test_an_unknown_path_of_a_sensitive_part_is_refused(either: World) -> None:
    either.stream("s", Schema.of(k="bigint", v="struct<email:string>"), ["k"], 1)
    append(either, [{"k": 1, "v": {"email": "x"}}], end_of_dataset="v1")
    for sensitive, fits in (("v.mail", False), ("v.email", True)):
        spec = bounded_dataset("d", input="lake.s", key="k", partitions=1, sensitive=sensitive)
        if fits:
            either.advance(spec)
            assert either.view(spec).sealed.columns.sensitive == ("v",)
            continue
        with pytest.raises(AdjunctError) as failure:
            either.advance(spec)
        assert "'v.mail'" in failure.value.problem


@pytest.mark.lengthy
def test_tables_are_repartitioned_rewound_and_rebuilt(either: World) -> None:
    drawn = random.Random(8)
    schema = draw_schema(drawn)
    either.stream("s", schema, ["k"], 2)
    old = draw_rows(drawn, schema, range(20))
    new = draw_rows(drawn, schema, range(10, 30))
    for rows in (old, new):
        append(either, rows)
        either.advance(unbounded_dataset("d", input="lake.s", key="k", partitions=2))
    repartition_dataset(either.lake, "d", 3, reason="more", by="test")
    spec = unbounded_dataset("d", input="lake.s", key="k", partitions=3)
    check(either, spec, [*old[:10], *new])
    context: dict[str, Any] = {
        "lake": either.lake,
        "systems": either.systems,
        "spark": either.spark,
        "reason": "again",
        "by": "test",
    }
    positions = {
        SystemStreamPartition("lake", "s", number): StartpointSpecific(offset="0", id=f"s{number}")
        for number in range(2)
    }
    rewind_dataset(spec, positions=positions, **context)
    check(either, spec, [*old[:10], *new])
    rebuild_dataset(spec, **context)
    either.advance(spec)
    check(either, spec, [*old[:10], *new])


def test_a_diff_masks_columns_with_a_sensitive_part(world: World) -> None:
    world.spark = IN_PROCESS
    world.stream("s", Schema.of(k="bigint", v="struct<email:string,n:int>", w="int"), ["k"], 1)
    spec = bounded_dataset("d", input="lake.s", key="k", partitions=1, sensitive="v.email")
    for number in (1, 2):
        row = {"k": 1, "v": {"email": f"hopper-{number}", "n": 1}, "w": number}
        append(world, [row], end_of_dataset=f"v{number}")
        world.advance(spec)
    with open_dataset(world.lake, "d") as served:
        found = served.diff("v1", "v2")
    assert found.sample.changed[0].new["v"] == {"email": "hopper-2", "n": 1}
    shown = found.to_json()["sample"]["changed"][0]
    assert (shown["key"], shown["new"]) == ({"k": 1}, {"k": 1, "v": "***", "w": 2})
    printed = CliRunner().invoke(root, ["dataset", "diff", "d", "v1", "v2", *lake_of(world)])
    assert "*** -> ***" in printed.output
    assert "hopper" not in printed.output


def lake_of(world: World) -> list[str]:
    return ["--lake", world.lake.url]

"""Datasets whose keys, columns and orders are paths into structs, against plain Python."""

from __future__ import annotations

import datetime as dt
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.declaration.change_formats import DebeziumUnwrapped, OperationColumn
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    FileSource,
    QuerySource,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.extractors import Projection, PythonExtractor
from dagster_adjunct.assets.declaration.policies import DeadLetters, DeltaCompaction
from dagster_adjunct.assets.declaration.snapshots import ParquetSnapshot
from dagster_adjunct.assets.exchange.handover import duckdb_view, polars_frame
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.retention.erasure import erase_keys
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.validation.validators import no_null_keys, no_nulls, unique_keys
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import (
    AdjunctError,
    BadChangeError,
    ConfigurationError,
    DatasetError,
    NullKeyError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import Member, Simple, Struct, Type, write_name
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.nested import NAMES, comparable, draw_type, draw_value
from tests.orchestration.cli.commands import document

Rows = list[dict[str, Any]]
ORDERS = Schema.of(
    no="int",
    customer={"id": "bigint", "name": "string", "address": {"city": "string"}},
    meta={"at": "timestamp", "seq": "bigint", "op": "string"},
    lines=[{"sku": "string"}],
    prices="map<string,int>",
)
_AT = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def order(no: int, customer: int | None, *, seq: int = 0, city: str = "Ulm") -> dict[str, Any]:
    return {
        "no": no,
        "customer": {"id": customer, "name": f"c{customer}", "address": {"city": city}},
        "meta": {"at": _AT + dt.timedelta(days=seq), "seq": seq, "op": "u"},
        "lines": [{"sku": "a"}],
        "prices": {"a": 1},
    }


def tombstone(customer: int | None, *, seq: int = 0) -> dict[str, Any]:
    """Return a tombstone that has only the key, and what orders it."""
    row = dict.fromkeys(ORDERS.names)
    row["customer"] = {"id": customer, "name": None, "address": None}
    row["meta"] = {"at": _AT + dt.timedelta(days=seq), "seq": seq, "op": None}
    return row | {"__tombstone": True}


def append(world: World, rows: Rows, stream: str = "s", **options: Any) -> None:
    sent = [{"__tombstone": False, **row} for row in rows]
    world.streams.append(stream, sent, producer="test", sequence=world._next(stream), **options)


def arrow_rows(rows: Rows, schema: Schema) -> Any:
    return fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows")


def entries(world: World, name: str = "d") -> dict[Any, dict[str, Any]]:
    """Return the served entries by key, as scans, lookups and Spark return them alike."""
    with open_dataset(world.lake, name) as served:
        found = {key: comparable(entry) for key, entry in served.items()}
        assert {key: comparable(served.get(key)) for key in found} == found
        assert served.verify(deep=True).damaged == ()
        if world.spark is not IN_PROCESS:
            rows = [row.asDict(recursive=True) for row in served.frame(world.spark()).collect()]
            key = served.sealed.key
            assert sorted(tuple(row[name] for name in key) for row in rows) == sorted(
                tuple(entry[name] for name in key) for entry in found.values()
            )
            named = [name for name in served.schema.names if name in ("id", "name", "city", "no")]
            assert sorted(repr([row[name] for name in named]) for row in rows) == sorted(
                repr([entry[name] for name in named]) for entry in found.values()
            )
        return found


# Drawn declarations, compared with dictionaries.


@dataclass(frozen=True)
class Drawn:
    """A drawn schema of records with a key at a path, and how a dataset names it."""

    schema: Schema
    types: dict[str, Type]
    steps: tuple[str, ...]
    alias: str | None

    @property
    def key(self) -> str:
        path = ".".join(map(write_name, self.steps))
        return path if self.alias is None else f"{path} as {self.alias}"

    @property
    def name(self) -> str:
        return self.alias or self.steps[-1]

    def record(self, drawn: random.Random, key: Any, *, deleted: bool = False) -> dict[str, Any]:
        """Return a record with this key; of a deleted one, only the key has a value."""
        row: dict[str, Any] = {}
        for name, type_ in self.types.items():
            row[name] = None if deleted else draw_value(drawn, type_)
        value: Any = row
        type_: Type = Struct(tuple(Member(name, each) for name, each in self.types.items()))
        for step in self.steps[:-1]:
            assert isinstance(type_, Struct)
            member = type_.member(step)
            assert member is not None
            assert isinstance(member.type, Struct)
            type_ = member.type
            if value[step] is None:
                value[step] = {each.name: None for each in type_.members}
            value = value[step]
        value[self.steps[-1]] = key
        return row

    def entry(self, record: dict[str, Any]) -> dict[str, Any]:
        value: Any = record
        for step in self.steps:
            value = value[step]
        return comparable({self.name: value, **record})


def draw(drawn: random.Random) -> Drawn:
    names = drawn.sample(NAMES, drawn.randint(2, 4))
    type_: Type = Simple("bigint")
    for depth, name in enumerate(reversed(names[1:])):
        members = [Member(name, type_)]
        for other in drawn.sample(NAMES, 2):
            if other.lower() != name.lower():
                members.append(Member(other, draw_type(drawn, 2)))
        drawn.shuffle(members)
        type_ = Struct(tuple(members))
        assert depth < 3
    types = {"n": Simple("int"), names[0]: type_, "v": draw_type(drawn, 2)}
    schema = Schema.of({name: str(each) for name, each in types.items()})
    return Drawn(schema, types, tuple(names), drawn.choice([None, "made"]))


@pytest.mark.lengthy
@pytest.mark.parametrize("seed", range(6))
def test_versions_are_keyed_by_drawn_paths(either: World, seed: int) -> None:
    drawn = random.Random(seed)
    made = draw(drawn)
    either.stream("s", made.schema, [], 1)
    spec = bounded_dataset(
        "d",
        input="lake.s",
        key=made.key,
        partitions=3,
        validators=[unique_keys(severity="warn"), no_null_keys()],
    )
    assert spec.key == (made.name,)
    for version in ("v1", "v2"):
        expected = {}
        rows = [made.record(drawn, drawn.randint(0, 9)) for _ in range(12)]
        for row in rows:
            entry = made.entry(row)
            expected[entry[made.name]] = entry
        append(either, rows, end_of_dataset=version)
        assert either.advance(spec).action == "sealed"
        assert entries(either) == expected


@pytest.mark.lengthy
@pytest.mark.parametrize("seed", range(6))
def test_tables_are_keyed_by_drawn_paths(either: World, seed: int) -> None:
    drawn = random.Random(seed)
    made = draw(drawn)
    either.stream("s", made.schema, [], 1)
    spec = unbounded_dataset(
        "d",
        input="lake.s",
        key=made.key,
        partitions=3,
        compaction=DeltaCompaction(inside_commit=False),
    )
    held: dict[Any, Any] = {}
    for _ in range(3):
        rows = []
        for _ in range(12):
            key = drawn.randint(0, 9)
            deleted = drawn.random() < 0.3
            row = made.record(drawn, key, deleted=deleted)
            rows.append(row | {"__tombstone": deleted})
            held.pop(key, None)
            if not deleted:
                held[key] = made.entry(row)
        append(either, rows)
        either.advance(spec)
        assert entries(either) == held
    compact_dataset(either.lake, "d", spark=either.spark, by="test", level="major")
    assert entries(either) == held
    key = min(held)
    erase_keys(either.lake, "d", [key], reason="asked", by="test")
    del held[key]
    assert entries(either) == held
    context: dict[str, Any] = {"lake": either.lake, "systems": either.systems}
    rebuild_dataset(spec, **context, spark=either.spark, reason="again", by="test")
    either.advance(spec)
    assert set(entries(either)) == {*held, key}


@pytest.mark.parametrize("seed", range(3))
def test_queries_are_keyed_by_drawn_paths(either: World, seed: int) -> None:
    drawn = random.Random(seed)
    made = draw(drawn)
    rows = [made.record(drawn, key) for key in range(8)]
    query = QuerySource(
        lambda spark, computation: arrow_rows(rows, made.schema), schema=made.schema
    )
    spec = bounded_dataset("d", input=query, key=made.key, broadcast=True)
    either.advance(spec)
    assert entries(either) == {entry[made.name]: entry for entry in map(made.entry, rows)}


def test_files_are_keyed_by_paths(world: World, tmp_path: Path) -> None:
    world.spark = IN_PROCESS
    folder = tmp_path / "incoming" / "v1"
    folder.mkdir(parents=True)
    lines = [json.dumps({"no": no, "customer": {"id": no % 3}}) for no in range(6)]
    (folder / "orders.jsonl").write_text("\n".join(lines))
    (folder / "_SUCCESS").touch()
    schema = Schema.of(no="int", customer={"id": "int"})
    source = FileSource(str(tmp_path / "incoming"), "jsonl", schema)
    spec = bounded_dataset("d", input=source, key="customer.id", columns=["no"], broadcast=True)
    world.advance(spec)
    assert entries(world) == {key: {"id": key, "no": key + 3} for key in range(3)}


# What is declared.


def test_stored_columns_have_the_names_of_last_steps_or_aliases() -> None:
    spec = bounded_dataset(
        "d",
        input="lake.s",
        key=["customer.id", "meta.`at` as since", "no"],
        partition_by="customer.id",
        columns=["no", "customer.address.city as home", "customer.name", "customer.id"],
        partitions=2,
    )
    assert spec.key == ("id", "since", "no")
    assert spec.partition_by == ("id",)
    assert spec.columns.names == ("id", "since", "no", "home", "name")
    assert spec.key_sources == ("customer.id", "meta.at", "no")
    assert spec.steps_to("home") == ("customer", "address", "city")


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"key": ["customer.id", "buyer.id"]}, "key"),
        ({"key": "customer.id", "columns": ["id", "no"]}, "columns"),
        ({"key": "no", "columns": ["no", "buyer.id", "customer.id"]}, "columns"),
        ({"key": "customer.id", "partition_by": "customer.name"}, "partition_by"),
    ],
)
def test_columns_of_one_name_and_other_partitions_are_refused(
    options: dict[str, Any], argument: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        bounded_dataset("d", input="lake.s", partitions=2, **options)
    assert caught.value.argument == argument
    if argument != "partition_by":
        assert " as " in str(caught.value.next_step)


def declare(kind: str, key: str) -> AdjunctDataset:
    if kind == "changes":
        return unbounded_dataset("d", input="lake.s", key=key, partitions=1)
    if kind == "stream":
        return bounded_dataset("d", input="lake.s", key=key, partitions=1)
    query = QuerySource(lambda spark, computation: None, schema=ORDERS)
    return bounded_dataset("d", input=query, key=key, partitions=1)


@pytest.mark.parametrize(
    ("key", "found", "advice"),
    [
        ("customer", "customer", "customer.id"),
        ("customer.address", "customer.address", "customer.address.city"),
        ("customer.mail", "customer.mail", "address"),
        ("lines.sku", "lines.sku", "column of its own"),
        ("prices.a", "prices.a", "column of its own"),
        ("no.x", "no.x", "'no'"),
        ("buyer.id", "buyer.id", "name"),
        ("lines", "lines", "column of its own"),
    ],
)
@pytest.mark.parametrize("kind", ["stream", "changes", "query"])
def test_paths_to_no_simple_value_are_refused(
    world: World, kind: str, key: str, found: str, advice: str
) -> None:
    world.spark = IN_PROCESS
    world.stream("s", ORDERS, [], 1)
    append(world, [order(1, 1)], end_of_dataset="v1")
    with pytest.raises(AdjunctError) as caught:
        world.advance(declare(kind, key))
    assert isinstance(caught.value, SchemaMismatchError | ConfigurationError)
    assert caught.value.column == found
    assert advice in str(caught.value.next_step)


def test_the_advice_for_a_nested_key_works(world: World) -> None:
    world.spark = IN_PROCESS
    world.stream("s", ORDERS, [], 1)
    append(world, [order(1, 7)], end_of_dataset="v1")
    with pytest.raises(SchemaMismatchError) as caught:
        world.advance(bounded_dataset("d", input="lake.s", key="customer", partitions=1))
    advised = str(caught.value.next_step).split("'")[1]
    world.advance(bounded_dataset("d", input="lake.s", key=advised, partitions=1))
    assert set(entries(world)) == {7}


def test_a_name_that_a_column_has_needs_another_one(world: World) -> None:
    world.spark = IN_PROCESS
    schema = Schema.of({"id": "int", "customer": "struct<id:int>", "customer.id": "int"})
    world.stream("s", schema, [], 1)
    row = {"id": 1, "customer": {"id": 2}, "customer.id": 3}
    append(world, [row], end_of_dataset="v1")
    other = Schema.of({"id": "int", "customer": "struct<id:int>"})
    world.stream("t", other, [], 1)
    append(world, [{"id": 1, "customer": {"id": 2}}], "t", end_of_dataset="v1")
    with pytest.raises(SchemaMismatchError) as caught:
        world.advance(bounded_dataset("d", input="lake.t", key="customer.id", partitions=1))
    assert caught.value.column == "id"
    advised = str(caught.value.next_step).split('"')[1]
    for name, options in {
        "alias": {"key": advised},
        "columns": {"key": "customer.id", "columns": ["customer"]},
    }.items():
        spec = bounded_dataset(name, input="lake.t", partitions=1, **options)
        world.advance(spec)
        assert set(entries(world, name)) == {2}
    with pytest.raises(SchemaMismatchError) as caught:
        world.advance(bounded_dataset("d", input="lake.s", key="customer.id", partitions=1))
    assert caught.value.column == "customer.id"
    advised = str(caught.value.next_step).split("'")[1]
    spec = bounded_dataset("d", input="lake.s", key=advised, partitions=1)
    assert spec.key == ("customer.id",)
    world.advance(spec)
    assert set(entries(world)) == {3}


def test_the_columns_of_a_query_win_over_paths(world: World) -> None:
    world.spark = IN_PROCESS
    schema = Schema.of({"the.key": "int", "a.b": "int"})
    rows = [{"the.key": 1, "a.b": 2}]
    query = QuerySource(lambda spark, computation: arrow_rows(rows, schema), schema=schema)
    spec = bounded_dataset(
        "d", input=query, key="the.key", columns=["a.b", "the.key"], partitions=1
    )
    world.advance(spec)
    assert entries(world) == {1: {"a.b": 2, "the.key": 1}}


@pytest.mark.parametrize(
    "options",
    [
        {"key": "buyer.id"},
        {"key": "id"},
        {"key": "customer.id as customer_id"},
        {"columns": ["buyer.name"]},
    ],
)
def test_other_paths_of_a_table_need_a_rebuild(world: World, options: dict[str, Any]) -> None:
    world.spark = IN_PROCESS
    kind = "struct<id:int,name:string>"
    world.stream("s", Schema.of(buyer=kind, customer=kind, other="int"), [], 1)
    who = {"id": 2, "name": "x"}
    append(world, [{"buyer": who, "customer": who, "other": 1}])
    declared: dict[str, Any] = {"input": "lake.s", "partitions": 1, "columns": ["customer.name"]}
    world.advance(unbounded_dataset("d", key="customer.id", **declared))
    changed = {"key": "customer.id", **declared, **options}
    if options == {"key": "id"}:
        changed["columns"] = ["other as id", "customer.name"]
        changed["key"] = "other as id"
    spec = unbounded_dataset("d", **changed)
    for use in (world.advance, world.view):
        with pytest.raises(DatasetError) as caught:
            use(spec)
        assert "customer." in str(caught.value)


def test_versions_may_be_built_with_other_paths(world: World) -> None:
    world.spark = IN_PROCESS
    world.stream("s", ORDERS, [], 1)
    for value, path in (("c1", "customer.name"), ("Ulm", "customer.address.city")):
        append(world, [order(1, 1)], end_of_dataset=value)
        spec = bounded_dataset(
            "d", input="lake.s", key="customer.id", columns=[f"{path} as value"], partitions=1
        )
        world.advance(spec)
        assert entries(world) == {1: {"id": 1, "value": value}}


@pytest.mark.lengthy
def test_commands_take_the_values_at_the_path(world: World) -> None:
    world.spark = IN_PROCESS
    world.stream("s", ORDERS, [], 1)
    for number in (1, 2):
        append(world, [order(number, 7), order(3, 8)], end_of_dataset=f"v{number}")
        world.advance(bounded_dataset("d", input="lake.s", key="customer.id", partitions=2))
    got = document(world, "dataset", "get", "d", "7")
    assert [entry["entry"]["no"] for entry in got] == [2]
    diff = document(world, "dataset", "diff", "d", "v1", "v2")
    assert [change["key"] for change in diff["sample"]["changed"]] == [{"id": 7}]
    document(world, "dataset", "erase", "d", "7", "--reason", "asked", "--by", "ada", "--yes")
    assert set(entries(world)) == {8}


def test_the_sensitive_columns_of_a_stream_stay_so_in_columns_made_of_them(world: World) -> None:
    world.spark = IN_PROCESS
    query = QuerySource(
        lambda spark, computation: arrow_rows([order(1, 1)], ORDERS),
        schema=ORDERS.with_sensitive("customer"),
    )
    spec = bounded_dataset(
        "d", input=query, key="no", columns=["no", "customer.name"], partitions=1
    )
    world.advance(spec)
    assert world.view(spec).sealed.columns.sensitive == ("name",)


# Null keys, deletions, orders and times.


@pytest.mark.parametrize("customer", [None, {"id": None, "name": "x", "address": None}])
def test_a_null_at_the_path_of_a_key_is_a_null_key(either: World, customer: Any) -> None:
    either.stream("s", ORDERS, [], 1)
    append(either, [order(1, 1), order(2, 2) | {"customer": customer}], end_of_dataset="v1")
    spec = bounded_dataset("v", input="lake.s", key="customer.id", partitions=2)
    report = either.advance(spec)
    assert report.action == "rejected"
    declared: dict[str, Any] = {"input": "lake.s", "key": "customer.id", "partitions": 2}
    with pytest.raises((BadChangeError, NullKeyError)):
        either.advance(unbounded_dataset("d", **declared))
    dead = DeadLetters("lake.dead")
    either.advance(unbounded_dataset("d", on_bad_change=dead, columns=["no"], **declared))
    assert entries(either) == {1: {"id": 1, "no": 1}}
    letters = either.streams.read_arrow(either.streams.all_ranges("dead")).to_pylist()
    assert [json.loads(letter["value"])["no"] for letter in letters] == [2]


def test_deletions_by_a_column_delete_at_the_path(either: World) -> None:
    either.stream("s", Schema.of({**ORDERS.types, "deleted": "boolean"}), [], 1)
    spec = unbounded_dataset(
        "d",
        input="lake.s",
        key="customer.id",
        partitions=2,
        changes=DebeziumUnwrapped(),
        columns=["no", "customer.address.city"],
    )
    live = {"deleted": False}
    append(either, [order(1, 1) | live, order(2, 2) | live, order(3, 2, city="Bonn") | live])
    either.advance(spec)
    assert entries(either) == {
        1: {"id": 1, "no": 1, "city": "Ulm"},
        2: {"id": 2, "no": 3, "city": "Bonn"},
    }
    append(either, [order(4, 2) | {"deleted": True}, tombstone(1) | {"deleted": None}])
    either.advance(spec)
    assert entries(either) == {}


def test_what_a_change_leaves_out_keeps_its_path(either: World) -> None:
    schema = Schema.of(
        op="string",
        key="struct<id:int>",
        home="struct<city:string,zip:int>",
        home_missing="boolean",
        n="int",
    )
    either.stream("s", schema, [], 1)
    spec = unbounded_dataset(
        "d",
        input="lake.s",
        key="key.id",
        partitions=2,
        changes=OperationColumn(missing="_missing"),
        columns=["home.city", "home.zip as n", "home"],
    )
    full = {"op": "i", "key": {"id": 1}, "home": {"city": "Ulm", "zip": 5}, "home_missing": False}
    append(either, [full | {"n": 1}])
    append(either, [full | {"op": "u", "home": None, "home_missing": True, "n": 2}])
    either.advance(spec)
    kept = {"id": 1, "city": "Ulm", "n": 5, "home": {"city": "Ulm", "zip": 5}}
    assert entries(either) == {1: kept}
    append(either, [full | {"op": "u", "home": None, "n": 3}])
    either.advance(spec)
    assert entries(either) == {1: {"id": 1, "city": None, "n": None, "home": None}}


@pytest.mark.parametrize("order_by", ["meta.seq", "meta.at", ["meta.seq", "no"]])
def test_paths_order_changes(either: World, order_by: Any) -> None:
    either.stream("s", ORDERS, [], 1)
    spec = unbounded_dataset(
        "d", input="lake.s", key="customer.id", partitions=2, order_by=order_by
    )
    drawn = random.Random(5)
    newest: dict[int, tuple[int, int, bool]] = {}
    rows = []
    for number in range(40):
        seq = drawn.randint(0, 10**6)
        customer = drawn.randint(0, 6)
        deleted = drawn.random() < 0.2
        row = order(number, customer, seq=seq)
        if deleted:
            row = tombstone(customer, seq=seq) | {"no": number}
        rows.append(row)
        newest[customer] = max(newest.get(customer, (-1, 0, True)), (seq, number, deleted))
    for start in range(0, 40, 10):
        append(either, rows[start : start + 10])
        either.advance(spec)
    assert {key: entry["no"] for key, entry in entries(either).items()} == {
        key: number for key, (_, number, deleted) in newest.items() if not deleted
    }


def test_a_text_at_a_path_orders_changes_by_its_format(either: World) -> None:
    schema = Schema.of(k="int", source="struct<lsn:string>")
    either.stream("s", schema, [], 1)
    spec = unbounded_dataset("d", input="lake.s", key="k", partitions=1, order_by="source.lsn")
    texts = ["16/B374D848", "16/FF", "9/B374D848"]
    append(either, [{"k": 1, "source": {"lsn": text}} for text in texts])
    either.advance(spec)
    assert entries(either)[1]["source"] == {"lsn": texts[0]}
    append(either, [{"k": 1, "source": None}])
    with pytest.raises(BadChangeError) as caught:
        either.advance(spec)
    assert "'source.lsn' is null" in str(caught.value)


def test_paths_say_since_when_entries_are_valid(either: World) -> None:
    either.stream("s", ORDERS, [], 1)
    spec = unbounded_dataset(
        "d",
        input="lake.s",
        key="customer.id",
        partitions=2,
        history="all",
        valid_from="meta.at",
        columns=["no", "meta"],
    )
    numbers = [1, 1, 2]
    rows = []
    for seq, no in enumerate(numbers):
        row = order(no, 1, seq=seq)
        row["meta"] = {**row["meta"], "seq": 0}
        rows.append(row)
    append(either, [rows[2], rows[0], rows[1]])
    either.advance(spec)
    expected = [(_AT, 1), (_AT + dt.timedelta(days=2), 2)]
    with open_dataset(either.lake, "d") as served:
        parts = served.history_of(1)
        found = [(part.valid_from, part.entry and part.entry["no"]) for part in parts]
        assert found == expected
        # Entries that differ in nothing but this time are one interval in other engines, too.
        intervals = polars_frame(served.over_time()).sort("valid_from").collect()
        assert intervals.select("valid_from", "no").rows() == expected
        connection = duckdb.connect()
        duckdb_view(connection, served.over_time(), "intervals")
        query = "SELECT valid_from, no FROM intervals ORDER BY valid_from"
        assert connection.execute(query).fetchall() == expected


@pytest.mark.parametrize(
    ("argument", "path"),
    [("order_by", "meta"), ("order_by", "meta.no"), ("order_by", "lines.sku"),
     ("order_by", "prices.a"), ("valid_from", "meta.seq"), ("valid_from", "meta"),
     ("valid_from", "meta.no")],
)  # fmt: skip
def test_orders_and_times_are_simple_values(world: World, argument: str, path: str) -> None:
    world.spark = IN_PROCESS
    world.stream("s", ORDERS, [], 1)
    append(world, [order(1, 1)])
    options: dict[str, Any] = {argument: path}
    if argument == "valid_from":
        options["history"] = "all"
    spec = unbounded_dataset("d", input="lake.s", key="no", partitions=1, **options)
    with pytest.raises(SchemaMismatchError) as caught:
        world.advance(spec)
    assert caught.value.column == path


@pytest.mark.spark
@pytest.mark.parametrize("over_time", [False, True])
def test_rows_of_a_snapshot_are_placed_by_paths(
    sparkling: World, tmp_path: Path, over_time: bool
) -> None:
    sparkling.stream("s", ORDERS, [], 1)
    rows = []
    for customer in (1, 2, 3):
        meta = order(0, customer, seq=5)["meta"]
        rows.append({"id": customer, "no": 100 + customer, "meta": meta})
    schema = Schema.of(id="bigint", no="int", meta=ORDERS.field("meta").type)
    pq.write_table(arrow_rows(rows, schema), tmp_path / "rows.parquet")
    options: dict[str, Any] = {"order_by": "meta.seq"}
    if over_time:
        options = {"history": "all", "valid_from": "meta.at"}
    spec = unbounded_dataset(
        "d",
        input="lake.s",
        key="customer.id",
        columns=["no", "meta"],
        partitions=2,
        initial=ParquetSnapshot(str(tmp_path), position={"lake.s.0": "0"}),
        **options,
    )
    append(sparkling, [order(1, 1, seq=3), order(2, 2, seq=9)])
    sparkling.advance(spec)
    assert {key: entry["no"] for key, entry in entries(sparkling).items()} == {1: 101, 2: 2, 3: 103}


# Extractors, and values that are hidden.


def test_entries_of_functions_are_keyed_by_paths(either: World) -> None:
    either.stream("s", ORDERS, [], 1)
    extract = PythonExtractor(
        "tests.assets.extractors:open_orders",
        "no INT, customer STRUCT<id: BIGINT, name: STRING, address: STRUCT<city: STRING>>",
        unchanged=("customer",),
    )
    spec = unbounded_dataset(
        "d",
        input="lake.s",
        key="customer.id",
        partitions=2,
        extractor=extract,
        columns=["no", "customer.name"],
    )
    append(either, [order(1, 1), order(2, 2), order(3, 3)])
    either.advance(spec)
    assert entries(either)[2] == {"id": 2, "no": 2, "name": "c2"}
    nobody = order(-1, None)
    append(either, [tombstone(1), order(-1, 2), nobody, nobody | {"customer": None}])
    either.advance(spec)
    assert set(entries(either)) == {3}
    bounded = bounded_dataset(
        "b", input="lake.s", key="customer.id", partitions=2, extractor=extract
    )
    append(either, [], end_of_dataset="v1")
    either.advance(bounded)
    assert set(entries(either, "b")) == {2, 3}


@pytest.mark.spark
def test_projections_are_keyed_by_paths(sparkling: World) -> None:
    sparkling.stream("s", ORDERS, [], 1)
    extract = Projection("no INT, customer STRUCT<id: BIGINT, name: STRING, address: STRUCT<city:"
                         " STRING>>, twice INT", select={"twice": "no * 2"}, where="no > 0")  # fmt: skip
    spec = unbounded_dataset(
        "d", input="lake.s", key="customer.id", partitions=2, extractor=extract, columns=["twice"]
    )
    append(sparkling, [order(1, 1), order(2, 2), order(3, 3)])
    append(sparkling, [tombstone(1), order(-1, 2), order(-1, None)])
    sparkling.advance(spec)
    assert entries(sparkling) == {3: {"id": 3, "twice": 6}}


@pytest.mark.parametrize(
    ("sensitive", "hidden"),
    [
        ("customer.name", {"name"}),
        ("customer", {"name", "id", "city"}),
        ("customer.address", {"city"}),
        ("customer.address.city", {"city"}),
        ("id", {"id"}),
    ],
)
def test_columns_made_of_sensitive_values_are_sensitive(
    world: World, sensitive: str, hidden: set[str]
) -> None:
    world.spark = IN_PROCESS
    world.stream("s", ORDERS, [], 1)
    append(world, [order(1, 1)], end_of_dataset="v1")
    spec = bounded_dataset(
        "d",
        input="lake.s",
        key="customer.id",
        columns=["no", "customer.name", "customer.address.city"],
        partitions=1,
        sensitive=sensitive,
        validators=[no_nulls("name")],
    )
    world.advance(spec)
    assert set(world.view(spec).sealed.columns.sensitive) == hidden


TOTALS = Schema.of(customer={"name": "string", "id": "bigint"}, id="int", total="double")


def test_a_local_table_has_a_column_for_its_key() -> None:
    app = Application("totals")
    table = app.local_table(
        "t", key=["customer.name", "id"], schema=TOTALS, partitions=2, partition_by="customer.name"
    ).dataset
    assert (table.key, table.partition_by) == (("name", "id"), ("name",))
    assert table.key_sources == ("customer.name", "id")
    other = app.local_table("u", key="customer.id as no", schema=TOTALS, partitions=2).dataset
    assert other.key == ("no",)


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("customer", "for example 'customer.name'"),
        ("customer.id", 'Give one of them another name: "customer.id as customer_id"'),
        ("customer.no", "Name one of its fields: name, id"),
        ("total", "Convert it: in an application by .with_columns(…)"),
    ],
)
def test_a_local_table_refuses_keys_that_are_no_simple_values(key: str, advice: str) -> None:
    app = Application("totals")
    with pytest.raises(ConfigurationError) as caught:
        app.local_table("t", key=key, schema=TOTALS, partitions=2)
    assert caught.value.argument == "key"
    assert advice in str(caught.value.next_step)

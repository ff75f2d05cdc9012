"""Batches whose records and entries have nested columns, by every engine, against plain Python."""

from __future__ import annotations

import datetime as dt
import random
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import AdjunctError, PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.windows import Aggregate, Count, Distinct, Max, Min, Sum, Tumbling
from tests.nested import comparable, comparable_rows, draw_rows, draw_schema
from tests.orchestration.seen_times import at

if TYPE_CHECKING:
    from tests.orchestration.step_world import StepWorld

Rows = list[dict[str, Any]]


@pytest.fixture
def world(step_world: StepWorld, either_engine: str) -> StepWorld:
    return step_world


def create(world: StepWorld, name: str, schema: Schema, partitions: int = 2) -> None:
    world.streams.create(name, schema=schema, key=["k"], partitions=partitions)


def append(world: StepWorld, name: str, rows: Rows, deleted: Rows = (), **options: Any) -> None:  # type: ignore[assignment]
    number = world.sequences[name] = world.sequences.get(name, 0) + 1
    sent = [{**row, "__tombstone": False} for row in rows]
    sent += [{**row, "__tombstone": True} for row in deleted]
    world.streams.append(name, sent, producer="test", sequence=number, **options)


def received(world: StepWorld, name: str) -> Rows:
    table = world.streams.read_arrow(world.streams.all_ranges(name))
    names = [column for column in table.column_names if not column.startswith("__")]
    rows = table.select(names).to_pylist(maps_as_pydicts="strict")
    return sorted(rows, key=lambda row: int(row["k"]))


def renamed(rows: Rows, prefix: str) -> Rows:
    return [
        {name if name == "k" else prefix + name: value for name, value in row.items()}
        for row in rows
    ]


def prefixed(schema: Schema, prefix: str) -> Schema:
    types = {name if name == "k" else prefix + name: kind for name, kind in schema.types.items()}
    return Schema.of(types)


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
def test_records_are_joined_with_nested_entries(
    world: StepWorld, bounded: bool, broadcast: bool
) -> None:
    drawn = random.Random(7)
    left = prefixed(draw_schema(drawn, columns=2), "l")
    right = prefixed(draw_schema(drawn, columns=2), "r")
    create(world, "records", left)
    create(world, "entries", right)
    records = draw_rows(drawn, left, range(20))
    entries = draw_rows(drawn, right, range(5, 15))
    append(world, "records", records)
    append(world, "entries", entries, **({"end_of_dataset": "v1"} if bounded else {}))
    spread = {"broadcast": True} if broadcast else {"partitions": 2}
    declare = bounded_dataset if bounded else unbounded_dataset
    dataset = declare("entries", input="lake.entries", key="k", **spread)
    app = Application("app")
    joined = app.input_stream("lake.records").join(app.table(dataset), on="k", how="left")
    joined.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    world.run(app)
    by_key = {row["k"]: row for row in entries}
    nothing = dict.fromkeys(right.names[1:])
    expected = [{**row, **nothing, **by_key.get(row["k"], {})} for row in records]
    assert comparable_rows(received(world, "out")) == comparable_rows(expected)


def test_records_are_joined_as_of_their_times(world: StepWorld) -> None:
    create(world, "records", Schema.of(k="bigint", at="timestamp"))
    create(
        world,
        "entries",
        Schema.of(k="bigint", since="timestamp", v="array<struct<a:map<string,int>>>"),
    )
    dataset = unbounded_dataset(
        "entries", input="lake.entries", key="k", partitions=2, history="all", valid_from="since"
    )
    values = {1: [{"a": {"y": 1, "x": 2}}], 4: [None, {"a": None}], 9: []}
    for second, value in values.items():
        append(world, "entries", [{"k": 1, "since": at(second), "v": value}])
        world.advance(dataset)
    append(world, "records", [{"k": 1, "at": at(second)} for second in range(12)])
    app = Application("app")
    joined = app.input_stream("lake.records").join(
        app.table(dataset), on="k", how="left", as_of="at", select=["v"]
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    world.run(app)
    for row in received(world, "out"):
        begun = [second for second in values if at(second) <= row["at"]]
        assert row["v"] == (values[max(begun)] if begun else None)
    with open_dataset(world.lake, "entries") as served:
        assert [part.entry["v"] for part in served.history_of(1) if part.entry] == [
            *values.values()
        ]


def test_local_tables_keep_nested_values(world: StepWorld) -> None:
    drawn = random.Random(9)
    schema = draw_schema(drawn, columns=2)
    create(world, "records", schema)
    app = Application("app")
    table = app.local_table("newest", key="k", schema=schema, partitions=2)
    app.input_stream("lake.records").send_to(table)
    held: dict[int, Any] = {}
    for _ in range(2):
        rows = draw_rows(drawn, schema, sorted(drawn.sample(range(12), 8)))
        append(world, "records", rows)
        held |= {row["k"]: comparable(row) for row in rows}
        world.run(app)
        with open_dataset(world.lake, "newest") as served:
            assert {key: comparable(row) for key, row in served.items()} == held


@pytest.mark.parametrize("how", [pytest.param("inner", marks=pytest.mark.long), "full"])
def test_state_of_stream_joins_keeps_nested_values(world: StepWorld, how: Any) -> None:
    kind = "struct<a:array<double>,b:map<string,struct<c:date>>>"
    for name, column in (("left", "v"), ("right", "w")):
        create(world, name, Schema.of({"k": "bigint", "ts": "timestamp", column: kind}), 1)
    app = Application("app")
    times: dict[str, Any] = {"event_time": "ts", "delay": dt.timedelta(seconds=1)}
    left = app.input_stream("lake.left", **times)
    right = app.input_stream("lake.right", **times)
    left.join_stream(
        right, on="k", within=dt.timedelta(seconds=5), how=how, name="meet", select=["w"]
    ).send_to(app.output_stream("lake.out", partitions=1, key="k"))
    values = [
        {"a": [1.5, None], "b": {"y": {"c": dt.date(2026, 1, 2)}, "x": None}},
        {"a": None, "b": {}},
        None,
    ]
    append(world, "left", [{"k": k, "ts": at(k), "v": values[k]} for k in range(3)])
    world.run(app)
    append(world, "right", [{"k": k, "ts": at(k + 1), "w": values[2 - k]} for k in range(2)])
    world.run(app)
    for name, column in (("left", "v"), ("right", "w")):
        append(world, name, [{"k": 99, "ts": at(100), column: None}])
    world.run(app)
    rows = [row for row in received(world, "out") if row["k"] != 99]
    met = [(k, values[k], values[2 - k]) for k in range(2)]
    alone = [] if how == "inner" else [(2, None, None)]
    assert [(row["k"], row["v"], row["w"]) for row in rows] == met + alone


def last(records: Any) -> Any:
    return records.to_pylist(maps_as_pydicts="strict")[-1]["v"]


def test_windows_count_nested_values_and_give_them_to_functions(world: StepWorld) -> None:
    kind = "struct<a:array<int>,b:map<string,int>>"
    create(world, "records", Schema.of(k="bigint", ts="timestamp", v=kind))
    app = Application("app")
    records = app.input_stream("lake.records", event_time="ts", delay=dt.timedelta(seconds=1))
    records.window(
        Tumbling(dt.timedelta(seconds=10)),
        by="k",
        name="w",
        aggregates={"n": Count("v"), "newest": Aggregate(last, kind, of="v")},
    ).send_to(app.output_stream("lake.out", partitions=2, key="k"))
    value = {"a": [1, None], "b": {"y": 2, "x": None}}
    append(world, "records", [{"k": 1, "ts": at(1), "v": None}])
    world.run(app)
    append(world, "records", [{"k": 1, "ts": at(2), "v": value}])
    append(world, "records", [{"k": k, "ts": at(50), "v": None} for k in range(20)])
    world.run(app)
    (row,) = [row for row in received(world, "out") if row["k"] == 1 and row["n"]]
    assert (row["n"], row["newest"]) == (1, value)


@pytest.mark.parametrize("aggregate", [Min, Max, Sum, Distinct])
def test_windows_reject_aggregates_of_nested_columns(world: StepWorld, aggregate: Any) -> None:
    create(world, "records", Schema.of(k="bigint", ts="timestamp", v="struct<a:int>"))
    app = Application("app")
    records = app.input_stream("lake.records", event_time="ts", delay=dt.timedelta(seconds=1))
    records.window(
        Tumbling(dt.timedelta(seconds=10)), by="k", name="w", aggregates={"made": aggregate("v")}
    ).send_to(app.output_stream("lake.out", partitions=2, key="k"))
    append(world, "records", [{"k": 1, "ts": at(1), "v": {"a": 1}}])
    with pytest.raises(AdjunctError) as failure:
        world.run(app)
    assert "'v'" in failure.value.problem
    assert "struct<a:int>" in failure.value.problem


@pytest.mark.parametrize("kind", ["struct<a:int>", "array<int>", "map<string,int>"])
def test_records_are_not_partitioned_by_nested_columns(world: StepWorld, kind: str) -> None:
    create(world, "records", Schema.of(k="bigint", v=kind))
    app = Application("app")
    parted = app.input_stream("lake.records").partition_by("v")
    parted.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    with pytest.raises(PlanningError) as failure:
        world.run(app)
    assert failure.value.column == "v"
    assert kind in failure.value.problem


def price_of(record: Any, entry: Any) -> Any:
    if entry is None:
        return None
    name = record["order"]["sku"]
    made = {"price": entry["prices"].get(name), "tags": sorted(entry["prices"])}
    return {"found": made, "by": {**entry["prices"], "zz": None, "a": 1.0}}


def test_functions_of_joins_get_and_return_nested_values(world: StepWorld) -> None:
    create(world, "records", Schema.of(k="bigint", order="struct<sku:string>"))
    create(world, "entries", Schema.of(k="bigint", prices="map<string,double>"))
    append(world, "records", [{"k": k, "order": {"sku": "x"}} for k in range(3)])
    append(world, "entries", [{"k": 1, "prices": {"y": 2.5, "x": 1.5}}, {"k": 2, "prices": {}}])
    dataset = unbounded_dataset("entries", input="lake.entries", key="k", partitions=2)
    app = Application("app")
    made = Schema.of(found="struct<price:double,tags:array<string>>", by="map<string,double>")
    joined = app.input_stream("lake.records").join(
        app.table(dataset), on="k", function=price_of, schema=made
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    world.run(app)
    assert [(row["k"], row["found"], row["by"]) for row in received(world, "out")] == [
        (1, {"price": 1.5, "tags": ["x", "y"]}, {"a": 1.0, "x": 1.5, "y": 2.5, "zz": None}),
        (2, {"price": None, "tags": []}, {"a": 1.0, "zz": None}),
    ]


def test_the_record_of_a_failure_shows_parts_by_their_names(world: StepWorld) -> None:
    schema = Schema.of(k="string", who={"home": {"city": "string"}}, n="string")
    create(world, "people", schema)
    append(world, "people", [{"k": "a", "who": {"home": {"city": "Ulm"}}, "n": "many"}])
    app = Application("app")
    people = app.input_stream("lake.people", default_offset="oldest")
    people.with_columns(number="cast(n as int)").send_to(
        app.output_stream("lake.out", partitions=2, key="k")
    )
    with pytest.raises(AdjunctError) as failure:
        world.run(app)
    assert "'city': 'Ulm'" in str(failure.value)

"""Operators name values inside nested columns by paths, by every engine, against plain Python."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.windows import Aggregate, Count, Sum, Tumbling
from tests.orchestration.all_engines import ENGINES, WithoutSpark
from tests.orchestration.seen_times import at

if TYPE_CHECKING:
    from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark
Rows = list[dict[str, Any]]

ORDERS = Schema.of(
    id="bigint", customer={"id": "bigint", "home": {"city": "string"}}, total="double"
)
CUSTOMERS = Schema.of(id="bigint", name="string", address={"city": "string", "geo": {"lat": "int"}})
ORDER_ROWS: Rows = [
    {"id": 1, "customer": {"id": 7, "home": {"city": "Oslo"}}, "total": 1.5},
    {"id": 2, "customer": {"id": 8, "home": None}, "total": 2.5},
    {"id": 3, "customer": None, "total": 3.5},
    {"id": 4, "customer": {"id": None, "home": {"city": "Bern"}}, "total": None},
    {"id": 5, "customer": {"id": 7, "home": {"city": "Oslo"}}, "total": 5.5},
    {"id": 6, "customer": {"id": 99, "home": {"city": "Rome"}}, "total": 6.5},
]
CUSTOMER_ROWS: Rows = [
    {"id": 7, "name": "Ann", "address": {"city": "Oslo", "geo": {"lat": 60}}},
    {"id": 8, "name": "Bob", "address": None},
    {"id": 9, "name": "Cid", "address": {"city": "Rome", "geo": None}},
]


@pytest.fixture
def world(step_world: StepWorld) -> StepWorld:
    return step_world


def fill(
    world: StepWorld, name: str, schema: Schema, rows: Rows, partitions: int = 2, **options: Any
) -> None:
    world.streams.create(name, schema=schema, key=["id"], partitions=partitions)
    world.streams.append(name, rows, producer="test", sequence=1, **options)


def received(world: StepWorld, name: str) -> Rows:
    table = world.streams.read_arrow(world.streams.all_ranges(name))
    names = [column for column in table.column_names if not column.startswith("__")]
    return sorted(table.select(names).to_pylist(), key=repr)


def run(world: StepWorld, app: Application, engine: str) -> None:
    world.advance(*app.datasets)
    app.engine = "auto" if ENGINES[engine] is WithoutSpark else "spark"
    report = run_step(world.context(app), ENGINES[engine]())
    if ENGINES[engine] is WithoutSpark:
        assert report.in_process_batches == report.batches == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("repartitioned", [False, True])
def test_a_join_names_its_key_and_parts_of_entries_by_paths(
    world: StepWorld, engine: str, repartitioned: bool
) -> None:
    fill(world, "orders", ORDERS, ORDER_ROWS)
    fill(world, "customers", CUSTOMERS, CUSTOMER_ROWS, end_of_dataset="v1")
    app = Application("app", auto_repartition=not repartitioned)
    customers = bounded_dataset("customers", input="lake.customers", key="id", partitions=2)
    orders = app.input_stream("lake.orders")
    if repartitioned:
        orders = orders.partition_by("customer.id")
    joined = orders.join(
        app.table(customers),
        on={"customer.id": "id"},
        how="left",
        select=["name", "address.city", "address.geo.lat as latitude"],
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="id"))
    run(world, app, engine)
    entries = {row["id"]: row for row in CUSTOMER_ROWS}
    expected = []
    for order in ORDER_ROWS:
        key = order["customer"] and order["customer"]["id"]
        entry = entries.get(key, {"name": None, "address": None})
        address = entry["address"] or {"city": None, "geo": None}
        latitude = address["geo"] and address["geo"]["lat"]
        expected.append(
            order | {"name": entry["name"], "city": address["city"], "latitude": latitude}
        )
    assert received(world, "out") == sorted(expected, key=repr)


EVENTS = Schema.of(
    id="bigint", who={"id": "bigint"}, meta={"at": "timestamp", "size": {"bytes": "int"}}
)
SECONDS = [(1, 7, 1), (2, 8, 2), (3, 7, 4), (4, None, 5), (5, 8, 12), (6, 7, 13), (7, 1, 40)]


def event_rows(offset: int = 0) -> Rows:
    rows: Rows = []
    for number, who, second in SECONDS:
        size = {"bytes": number * 10} if number != 3 else None
        meta = {"at": at(second + offset), "size": size}
        rows.append({"id": number, "who": None if who is None else {"id": who}, "meta": meta})
    return rows


@pytest.mark.parametrize("engine", ["tasks", "small"])
def test_a_window_names_its_key_times_and_values_by_paths(world: StepWorld, engine: str) -> None:
    fill(world, "events", EVENTS, event_rows(), partitions=1)
    app = Application("app", auto_repartition=True)
    events = app.input_stream("lake.events", event_time="meta.at", delay=dt.timedelta(seconds=5))
    made = {
        "number": Count(),
        "sum": Sum("meta.size.bytes"),
        "listed": Aggregate(
            lambda records: str(records.to_pydict()), "string", ["id", "meta.size.bytes"]
        ),
        "names": Aggregate(lambda records: ",".join(records.column_names), "string"),
    }
    windows = events.window(
        Tumbling(dt.timedelta(seconds=10)), by="who.id", name="ten", aggregates=made
    )
    windows.send_to(app.output_stream("lake.out", partitions=2, key="id"))
    windows.late_records().send_to(app.output_stream("lake.late", partitions=1))
    run(world, app, engine)
    expected: Rows = []
    for who in (7, 8):
        for begin in (0, 10):
            taken = [
                row
                for row in event_rows()
                if row["who"]
                and row["who"]["id"] == who
                and at(begin) <= row["meta"]["at"] < at(begin + 10)
            ]
            sizes = [row["meta"]["size"] and row["meta"]["size"]["bytes"] for row in taken]
            listed = {"id": [row["id"] for row in taken], "bytes": sizes}
            expected.append(
                {
                    "id": who,
                    "window_start": at(begin),
                    "window_end": at(begin + 10),
                    "number": len(taken),
                    "sum": sum(filter(None, sizes)) if any(sizes) else None,
                    "listed": str(listed),
                    "names": "id,who,meta",
                }
            )
    assert received(world, "out") == sorted(expected, key=repr)
    (late,) = received(world, "late")
    assert json.loads(late["record"]).keys() == {"id", "who", "meta"}


@pytest.mark.parametrize("engine", ["tasks", "small"])
@pytest.mark.parametrize("how", ["inner", "left"])
def test_a_join_of_streams_names_keys_and_values_by_paths(
    world: StepWorld, engine: str, how: Any
) -> None:
    fill(world, "left", EVENTS, event_rows())
    fill(world, "right", EVENTS, event_rows(2))
    app = Application("app", auto_repartition=True)
    times: dict[str, Any] = {"event_time": "meta.at", "delay": dt.timedelta(seconds=5)}
    left = app.input_stream("lake.left", **times)
    joined = left.join_stream(
        app.input_stream("lake.right", **times),
        on={"who.id": "who.id"},
        within=dt.timedelta(seconds=3),
        how=how,
        name="meet",
        select=["id as other", "meta.size.bytes", "meta.at as met_at"],
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="id"))
    run(world, app, engine)
    expected: Rows = []
    for row in event_rows():
        met = []
        for other in event_rows(2):
            distance = abs(row["meta"]["at"] - other["meta"]["at"])
            if row["who"] and row["who"] == other["who"] and distance <= dt.timedelta(seconds=3):
                size = other["meta"]["size"] and other["meta"]["size"]["bytes"]
                met.append({"other": other["id"], "bytes": size, "met_at": other["meta"]["at"]})
        if not met and how == "left" and row["meta"]["at"] < at(30):
            met.append({"other": None, "bytes": None, "met_at": None})
        expected += [row | each for each in met]
    assert received(world, "out") == sorted(expected, key=repr)

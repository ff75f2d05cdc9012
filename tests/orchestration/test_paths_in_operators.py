"""Operators name values inside nested columns by paths, by every engine, against plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.schemas.schema import Schema
from tests.orchestration.all_engines import ENGINES, WithoutSpark
from dagster_adjunct.orchestration.step.step import run_step

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


def fill(world: StepWorld, name: str, schema: Schema, rows: Rows, **options: Any) -> None:
    world.streams.create(name, schema=schema, key=["id"], partitions=2)
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

"""A small application of the tests' own: orders with items (sealed) and rates (a change stream),
and a table.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_adjunct import (
    Application,
    LakeStreams,
    Schema,
    UpdateContract,
    VersionPartitions,
    bounded_dataset,
    unbounded_dataset,
    update_message,
)
from dagster_adjunct.automation import new_records, new_version
from dagster_adjunct.sources import QuerySource
from dagster_adjunct.tables import RemoteTable, SqliteTable

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct import Lake
    from dagster_adjunct.sources import Computation

SCHEMAS = {
    "orders": Schema.of(id="bigint", item="string", currency="string", quantity="int"),
    "items": Schema.of(item="string", label="string"),
    "rates": Schema.of(currency="string", rate="double"),
    "prices": Schema.of(item="string", price="double"),
    "calls": Schema.of(id="bigint", item="string"),
}
KEYS = {
    "orders": ("item",),
    "items": ("item",),
    "rates": ("currency",),
    "prices": ("item",),
    "calls": ("id",),
}

items = bounded_dataset(
    "items", input="lake.items", key="item", partitions=2, owners="team:catalog", group="shop"
)
rates = unbounded_dataset("rates", input="lake.rates", key="currency", broadcast=True)


def order_totals(
    sqlite: str | Path, *, on_null_key: str = "skip", name: str = "order-totals"
) -> Application:
    """Return the application, with its table in an SQLite file."""
    store = SqliteTable(
        path=sqlite,
        table="item_state",
        key="item",
        columns={"item": "string", "label": "string", "last_order": "bigint"},
        create=True,
    )
    table = RemoteTable("item-state", key="item", read_function=store, write_function=store)
    app = Application(name, description="Orders with labels and rates", owners="team:sales")
    orders = app.input_stream("lake.orders")
    priced = app.output_stream("lake.priced", partitions=2, key="item")
    (
        orders.join(app.table(items), on="item", how="left", select=["label"])
        .join(app.table(rates), on="currency", how="left", select=["rate"])
        .send_to(priced)
        .map(*update_message(key="item", update={"last_order": "id"}, default=["label"]))
        .send_to(app.table(table), UpdateContract.UPDATE_WITH_DEFAULTS, on_null_key=on_null_key)
    )
    return app


def create_streams(lake: Lake) -> LakeStreams:
    streams = LakeStreams(lake)
    for name, schema in SCHEMAS.items():
        streams.create(name, schema=schema, key=KEYS[name], partitions=2)
    return streams


def append(
    lake: Lake,
    stream: str,
    sequence: int,
    rows: Sequence[tuple[object, ...]],
    *,
    marker: str | None = None,
) -> None:
    """Append rows to a stream as producer "test"."""
    create_streams(lake).append(
        stream, records(stream, rows), producer="test", sequence=sequence, end_of_dataset=marker
    )


def records(stream: str, rows: Sequence[tuple[object, ...]]) -> pa.Table:
    import pyarrow as pa

    schema = SCHEMAS[stream].to_arrow()
    columns = list(zip(*rows, strict=True)) if rows else [[] for _ in schema.names]
    return pa.table(
        [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)],
        schema=schema,
    )


ITEMS = [("a", "Apple"), ("b", "Bread"), ("c", "Cheese")]
RATES = [("EUR", 1.0), ("USD", 0.9)]


def orders(first: int, count: int) -> list[tuple[object, ...]]:
    """Return `count` orders from id `first` on; every fifth is for an item that nobody knows."""
    currencies = ("EUR", "USD", "XXX")
    return [
        (number, "abc"[number % 3] if number % 5 else "z", currencies[number % 3], number % 7)
        for number in range(first, first + count)
    ]


def expected(rows: Sequence[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Return the enriched rows that the application should write, in order of id, in plain
    Python.
    """
    labels, factors = dict(ITEMS), dict(RATES)
    return sorted((*row, labels.get(str(row[1])), factors.get(str(row[2]))) for row in rows)  # type: ignore[type-var]


def priced(lake: Lake) -> list[tuple[object, ...]]:
    """Return what the application has written to its output stream, in order of id."""
    streams = LakeStreams(lake)
    columns = [*SCHEMAS["orders"].names, "label", "rate"]
    table = streams.read_arrow(streams.all_ranges("priced"), columns=columns)
    return sorted(zip(*[table.column(name).to_pylist() for name in columns], strict=True))


def rates_of_a_day(spark: SparkSession, asked: Computation) -> DataFrame:
    """Compute the rates of one day; those of 3 January can't be had."""
    if asked.partition == "2026-01-03":
        raise RuntimeError("nobody knows the rates of 3 January")
    return spark.createDataFrame(
        [("EUR", 1.0), (str(asked.partition), 0.9)], SCHEMAS["rates"].ddl()
    )


rates_by_day = bounded_dataset(
    "rates-by-day",
    input=QuerySource(rates_of_a_day, SCHEMAS["rates"], name="rates-of-a-day"),
    key="currency",
    broadcast=True,
    versions=VersionPartitions("day", start="2026-01-01"),
)

# What ADJUNCT_APP=tests.orchestration.dagster.small:app,… loads.
app = order_totals(os.environ.get("ADJUNCT_TEST_SQLITE", "item-state.sqlite"))
daily = Application("daily-rates")
daily.table(rates_by_day)

# Days of it that are not delivered are missing.
prices_by_day = bounded_dataset(
    "prices-by-day",
    input="lake.prices",
    key="item",
    broadcast=True,
    versions=VersionPartitions("day", start="2026-01-01"),
)
priced_daily = Application("daily-prices")
priced_daily.table(prices_by_day)

# Launched by conditions.
labels = bounded_dataset(
    "labels", input="lake.items", key="item", broadcast=True, automation_condition=new_version()
)
answered = Application("answered", engine="auto", automation_condition=new_records())
(
    answered.input_stream("lake.calls", default_offset="oldest")
    .join(answered.table(labels), on="item", how="left", select=["label"])
    .send_to(answered.output_stream("lake.answers", partitions=1))
)

"""What was sold, and where does each customer live?

Orders are nested: a customer with an address, lines in an array, a map of attributes. Each line
gets the name and the category of its product from a catalogue that is delivered in versions. The
stream `lake.sold` has the lines; the table `customers` has each customer's address as JSON.

Later the catalogue calls the names of products titles, and nobody wants the channel of an order any
more: `renamed.py` is the application from then on.

ORDERS_CATALOGUE says where the catalogue's files are delivered. With ORDERS_POSTGRES, the
connection string of a database, the customers are in PostgreSQL, otherwise in the SQLite file
ORDERS_SQLITE.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from dagster_adjunct import Application, BoundedDataset, Schema, bounded_dataset
from dagster_adjunct.sources import FileSource
from dagster_adjunct.tables import PostgresTable, RemoteTable, SqliteTable

ORDERS = Schema.of(
    order="bigint",
    at="timestamp",
    customer={"id": "string", "address": {"street": "string", "city": "string"}},
    lines=[{"sku": "string", "quantity": "int", "price": "decimal(10,2)"}],
    attributes="map<string, string>",
)
CUSTOMERS = {
    "id": "string",
    "address": "struct<street: string, city: string>",
    "orders": "bigint",
    "last": "timestamp",
}


def open_customers() -> PostgresTable | SqliteTable:
    """Return the table of customers, in PostgreSQL if ORDERS_POSTGRES names a database."""
    if "ORDERS_POSTGRES" in os.environ:
        return PostgresTable(
            "customers", "id", dsn_env="ORDERS_POSTGRES", columns=CUSTOMERS, create=True
        )
    file = os.environ.get("ORDERS_SQLITE", ".adjunct/orders/customers.sqlite")
    return SqliteTable(file, "customers", "id", columns=CUSTOMERS, create=True)


def declare_catalogue(title: str, **changes: Any) -> BoundedDataset:
    """Declare the catalogue, in which the column `title` has the names of products."""
    columns = {
        "sku": "string",
        title: "string",
        "category": {"code": "string", "name": "string"},
        "tags": ["string"],
    }
    folder = os.environ.get("ORDERS_CATALOGUE", ".adjunct/orders/catalogue")
    return bounded_dataset(
        "catalogue",
        input=FileSource(folder, "jsonl", Schema.of(columns)),
        key="sku",
        broadcast=True,
        **changes,
    )


def declare_application(
    catalogue: BoundedDataset, columns: Sequence[str], **changes: Any
) -> Application:
    """Declare the application, whose stream of sold products has these columns."""
    app = Application("orders", description="Sold products, and the addresses of customers")
    orders = app.input_stream("lake.orders", default_offset="oldest", event_time="at")
    store = open_customers()
    customers = app.table(
        RemoteTable(
            "customers",
            key="id",
            read_function=store,
            write_function=store,
            newest_by="last",
            idempotent=True,
            on_replay="skip",
        )
    )
    orders.filter("customer.id is not null").map(
        "customer.id as id", "customer.address as address", "at"
    ).update(
        customers, set={"address": "address", "last": "at"}, add={"orders": "1"}, if_missing=[]
    )
    (
        orders.flat_map("lines as line")
        .join(app.table(catalogue), on={"line.sku": "sku"}, how="left")
        .with_columns(
            sku="line.sku",
            amount="line.price * line.quantity",
            city="customer.address.city",
            channel="attributes['channel']",
            is_new="array_contains(tags, 'new')",
        )
        .select(*columns)
        .send_to(app.output_stream("lake.sold", partitions=2, key="sku", **changes))
    )
    return app


catalogue = declare_catalogue("name")
app = declare_application(
    catalogue, ["order", "at", "sku", "name", "category", "amount", "city", "channel", "is_new"]
)

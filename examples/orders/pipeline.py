"""What was sold, and where does each customer live?

Orders are nested: a customer with an address, lines in an array, a map of attributes. Each line
gets the name and the category of its product from a catalogue that is delivered in versions. The
stream `lake.sold` has the lines; the table `customers` has each customer's address as JSON.

ORDERS_CATALOGUE says where the catalogue's files are delivered. With ORDERS_POSTGRES, the
connection string of a database, the customers are in PostgreSQL, otherwise in the SQLite file
ORDERS_SQLITE.
"""

from __future__ import annotations

import os

from dagster_adjunct import Application, Schema, bounded_dataset
from dagster_adjunct.sources import FileSource
from dagster_adjunct.tables import PostgresTable, RemoteTable, SqliteTable

ORDERS = Schema.of(
    order="bigint",
    at="timestamp",
    customer={"id": "string", "address": {"street": "string", "city": "string"}},
    lines=[{"sku": "string", "quantity": "int", "price": "decimal(10,2)"}],
    attributes="map<string, string>",
)
CATALOGUE = Schema.of(
    sku="string", name="string", category={"code": "string", "name": "string"}, tags=["string"]
)
CUSTOMERS = {
    "id": "string",
    "address": "struct<street: string, city: string>",
    "orders": "bigint",
    "last": "timestamp",
}

catalogue = bounded_dataset(
    "catalogue",
    input=FileSource(
        os.environ.get("ORDERS_CATALOGUE", ".adjunct/orders/catalogue"), "jsonl", CATALOGUE
    ),
    key="sku",
    broadcast=True,
)


def open_customers() -> PostgresTable | SqliteTable:
    """Return the table of customers, in PostgreSQL if ORDERS_POSTGRES names a database."""
    if "ORDERS_POSTGRES" in os.environ:
        return PostgresTable(
            "customers", "id", dsn_env="ORDERS_POSTGRES", columns=CUSTOMERS, create=True
        )
    file = os.environ.get("ORDERS_SQLITE", ".adjunct/orders/customers.sqlite")
    return SqliteTable(file, "customers", "id", columns=CUSTOMERS, create=True)


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
).update(customers, set={"address": "address", "last": "at"}, add={"orders": "1"}, if_missing=[])
(
    orders.flat_map("lines as line")
    .with_columns(
        sku="line.sku",
        amount="line.price * line.quantity",
        city="customer.address.city",
        channel="attributes['channel']",
    )
    .join(app.table(catalogue), on="sku", how="left", select=["name", "category", "tags"])
    .with_columns(is_new="array_contains(tags, 'new')")
    .select("order", "at", "sku", "name", "category", "amount", "city", "channel", "is_new")
    .send_to(app.output_stream("lake.sold", partitions=2, key="sku"))
)

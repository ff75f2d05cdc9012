"""The datasets and the application: each order gets its product's price and its customer's town.

Priced orders go to a stream, and what each customer has spent is added up in a table, which is in
the lake, too.
"""

import os

from dagster_adjunct import Application, bounded_dataset, unbounded_dataset
from dagster_adjunct.key_value_rows import KeyValueRows
from dagster_adjunct.tables import RemoteTable

products = bounded_dataset("products", input="lake.products", key="product", broadcast=True)
customers = unbounded_dataset("customers", input="lake.customers", key="customer", partitions=2)

store = KeyValueRows(
    os.environ.get("ADJUNCT_LAKE", ".adjunct/lake"),
    "orders",
    "spending",
    "customer",
    columns={"customer": "string", "town": "string", "spent": "double"},
    create=True,
)
spending = RemoteTable(
    "spending", key="customer", read_function=store, write_function=store, idempotent=True
)

# "auto" computes small batches in the run's process, and others by Spark.
app = Application(
    "orders",
    description="Orders with prices and towns, and what each customer spends",
    engine="auto",
)
(
    app.input_stream("lake.orders")
    .join(app.table(products), on="product", how="left", select=["price"])
    .map("*", "quantity * price as amount")
    .join(app.table(customers), on="customer", how="left", select=["town"])
    .send_to(app.output_stream("lake.priced-orders", partitions=2, key="customer"))
    .filter("amount is not null")
    .update(app.table(spending), add={"spent": "amount"}, set={"town": "town"}, if_missing=[])
)

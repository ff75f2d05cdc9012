"""The datasets and the application: each order gets its product's price and its customer's town.

Priced orders go to a stream, and what each customer has spent is added up in a table.
"""

from dagster_adjunct import Application, bounded_dataset, unbounded_dataset
from dagster_adjunct.tables import RemoteTable, SqliteTable

# Delivered as a whole, in editions: each is used once its end-of-dataset marker has arrived. Every
# task has all of it.
products = bounded_dataset(
    "products",
    input="lake.products",
    key="product",
    broadcast=True,
    description="Prices of products by edition",
)
# Delivered as changes, of one customer at a time. A task has the customers of the orders that it
# has.
customers = unbounded_dataset(
    "customers",
    input="lake.customers",
    key="customer",
    partitions=2,
    description="Towns of customers",
)

# For production: PostgresTable, DynamoDbTable, RedisTable and others take the place of this one.
store = SqliteTable(
    ".adjunct/spending.sqlite",
    "spending",
    "customer",
    columns={"customer": "string", "town": "string", "spent": "double"},
    create=True,
)
spending = RemoteTable(
    "spending", key="customer", read_function=store, write_function=store, idempotent=True
)

# "auto" computes small batches in this process, and others by Spark, which needs Java.
app = Application(
    "new-project",
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

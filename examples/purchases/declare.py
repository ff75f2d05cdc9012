"""What was bought, by whom, at which price? Events land as files, prices are in a Delta table,
accounts in an Iceberg table, and the answers go into another Iceberg table, by day.

    files    events/day=…/       nested JSON lines              an input stream
    Delta    products            each version of the table      a bounded dataset
    Iceberg  shop.accounts       the changes of its snapshots   an unbounded dataset
    Iceberg  shop.purchases      partitioned by day             the output

PURCHASES is the folder, or `s3://BUCKET/PREFIX`, of the events and the products, by default
`.adjunct/purchases`. The catalogue `shop` is configured for PyIceberg (see the README).
"""

from __future__ import annotations

import os
from typing import Any

from dagster_adjunct import (
    Application,
    ColumnRules,
    Schema,
    bounded_dataset,
    file_stream,
    unbounded_dataset,
)
from dagster_adjunct.changes import OperationColumn
from dagster_adjunct.exchange import IcebergTable
from dagster_adjunct.sources import DeltaVersions, iceberg_changes

ROOT = os.environ.get("PURCHASES", ".adjunct/purchases")
ACCOUNTS = IcebergTable("shop.accounts", catalog="shop")
PURCHASES = IcebergTable("shop.purchases", catalog="shop", partition_by=("days(at)",))


def declare_application(*, dropped: tuple[str, ...] = ()) -> Application:
    """Declare the application, without the columns `dropped` of events and purchases."""
    columns: dict[str, Any] = {
        "id": "string",
        "at": "timestamp",
        "account": {"id": "string", "device": "string"},
        "items": [{"sku": "string", "quantity": "int"}],
        "channel": "string",
        "day": "date",
    }
    events = file_stream(
        "events",
        f"{ROOT}/events",
        format="jsonl",
        schema=Schema.of({name: kind for name, kind in columns.items() if name not in dropped}),
        path_columns=["day"],
        column_rules=ColumnRules(drop=dropped),
    )
    products = bounded_dataset(
        "products",
        input=DeltaVersions(
            f"{ROOT}/products", Schema.of(sku="string", name="string", price="decimal(10,2)")
        ),
        key="sku",
        broadcast=True,
    )
    accounts = unbounded_dataset(
        "accounts",
        input=iceberg_changes("accounts", ACCOUNTS, schema="id string, country string", key="id"),
        key="id",
        broadcast=True,
        changes=OperationColumn(),
    )
    app = Application(
        "purchases", engine="auto", description="Purchases with prices and countries, by day"
    )
    answers = ["id", "at", "day", "account.id as account", "country", "item.sku as sku", "name"]
    answers += [name for name in ("channel",) if name not in dropped]
    (
        app.input_stream(events)
        .flat_map("items as item")
        .join(app.table(products), on={"item.sku": "sku"}, how="left")
        .join(app.table(accounts), on={"account.id": "id"}, how="left")
        .map(*answers, "price * item.quantity as amount")
        .send_to(app.output_table(PURCHASES, drop=dropped))
    )
    return app

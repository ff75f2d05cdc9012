"""An application for runs that are stopped: 200 records are set in a table, 5 at a time.

`TABLE` of the environment is what the table is, `ENGINE` who computes.
"""

from __future__ import annotations

import os
from typing import Any

from dagster_adjunct import Application
from dagster_adjunct.key_value_rows import KeyValueRows
from dagster_adjunct.tables import RateLimit, RemoteTable, RetryPolicy, SqliteTable

COLUMNS = {"id": "bigint", "n": "bigint"}
RECORDS = 200


def store(kind: str, lake: str) -> Any:
    if kind == "sqlite":
        return SqliteTable(f"{lake}.sqlite", "records", "id", columns=COLUMNS, create=True)
    return KeyValueRows(lake, "app", "records", "id", columns=COLUMNS, create=True, partitions=2)


app = Application("setting", engine=os.environ.get("ENGINE", "auto"))
records = RemoteTable(
    "records",
    key="id",
    write_function=store(os.environ.get("TABLE", "sqlite"), os.environ.get("ADJUNCT_LAKE", "lake")),
    batch_size=5,
    rate_limit=RateLimit(writes_per_second=50),
    retry=RetryPolicy(timeout=1.0),
)
app.input_stream("lake.numbers", default_offset="oldest").update(
    app.table(records), set={"n": "n"}, if_missing={"n": "n"}
)

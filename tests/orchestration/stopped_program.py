"""An application for runs that are stopped: 200 records are set in a table, 5 at a time.

`TABLE` of the environment is what the table is, `ENGINE` who computes, `SERVER` the arguments of a
table on a server, as JSON. The table "sent" is a file, to which a sink appends one record after the
other. In the table "restated", records have the newest mark of their id, which a dataset follows.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from dagster_adjunct import Application, unbounded_dataset
from dagster_adjunct.key_value_rows import KeyValueRows
from dagster_adjunct.tables import (
    DynamoDbTable,
    PostgresTable,
    RateLimit,
    RedisTable,
    RemoteTable,
    RetryPolicy,
    SqliteTable,
)

COLUMNS = {"id": "bigint", "n": "bigint"}
MARKED = COLUMNS | {"mark": "bigint"}
RECORDS = 200
MARKS = unbounded_dataset("marks", input="lake.marks", key="id", partitions=2)


def store(kind: str, lake: str) -> Any:
    server = json.loads(os.environ.get("SERVER", "{}"))
    if kind == "postgres":
        return PostgresTable("stopped_records", "id", columns=COLUMNS, create=True, **server)
    if kind == "redis":
        return RedisTable("stopped-records", "id", columns=COLUMNS, **server)
    if kind == "dynamodb":
        return DynamoDbTable("stopped-records", "id", columns=COLUMNS, create=True, **server)
    if kind == "restated":
        return SqliteTable(f"{lake}.sqlite", "records", "id", columns=MARKED, create=True)
    if kind == "sqlite":
        return SqliteTable(f"{lake}.sqlite", "records", "id", columns=COLUMNS, create=True)
    return KeyValueRows(lake, "app", "records", "id", columns=COLUMNS, create=True, partitions=2)


def append_each(records: Any, context: Any) -> None:
    """Append the records to the file; most of the time it sends nothing."""
    with Path(f"{os.environ['ADJUNCT_LAKE']}.sent").open("ab", buffering=0) as sent:
        for record in records.to_pylist():
            time.sleep(0.02)
            context.check_lease()
            sent.write(f"{record['id']} {record['n']}\n".encode())


def build() -> Application:
    app = Application("setting", engine=os.environ.get("ENGINE", "auto"))
    numbers = app.input_stream("lake.numbers", default_offset="oldest")
    kind = os.environ.get("TABLE", "sqlite")
    if kind == "sent":
        numbers.sink(append_each)
        return app
    records = RemoteTable(
        "records",
        key="id",
        write_function=store(kind, os.environ.get("ADJUNCT_LAKE", "lake")),
        batch_size=5,
        rate_limit=RateLimit(writes_per_second=50),
        retry=RetryPolicy(timeout=1.0),
        newest_by="n" if kind == "restated" else None,
    )
    if kind == "restated":
        marked = numbers.join(
            app.table(MARKS), on="id", how="left", select=["n as mark"], restate=timedelta(days=1)
        )
        both = {"n": "n", "mark": "mark"}
        marked.update(app.table(records), set=both, if_missing=both)
        return app
    numbers.update(app.table(records), set={"n": "n"}, if_missing={"n": "n"})
    return app


app = build()

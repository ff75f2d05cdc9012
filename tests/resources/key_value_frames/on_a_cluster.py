"""A program of a user's own that writes a frame into a key-value table, and reads it, on a Spark
cluster.

Run with the cluster's URL and the port of a PostgreSQL server; it prints what it found as JSON.
"""

from __future__ import annotations

import json
import secrets
import sys
from typing import Any

from dagster_adjunct.key_value import (
    FunctionSerializer,
    KeyValueTable,
    KeyValueTableConfiguration,
    TextSerializer,
    read_key_value_table,
    write_key_value_table,
)
from dagster_adjunct.resources.key_value.segment import TableId
from dagster_adjunct.resources.key_value_backends.postgres import PostgresSegments
from dagster_adjunct.resources.spark.session import new_session

PARTITIONS, ROWS = 4, 20_000


def main(master: str, port: str) -> None:
    backend = PostgresSegments(
        connect={"host": "127.0.0.1", "port": port, "user": "adjunct", "dbname": "adjunct"}
    )
    id = TableId("app", "words", secrets.token_hex(8))
    backend.create(id, PARTITIONS)
    # Functions of this program, which no worker could import.
    own = FunctionSerializer(lambda text: text[::-1].encode(), lambda stored: stored.decode()[::-1])
    table: KeyValueTable[str, Any] = KeyValueTable(
        id, KeyValueTableConfiguration(PARTITIONS), backend, TextSerializer(), own
    )
    spark = new_session({}, master=master)
    frame = spark.range(ROWS).selectExpr(
        "CAST(id AS STRING) AS key",
        "CAST(CONCAT('v', id) AS BINARY) AS value",
        "CONCAT('f', id % 50) AS family",
    )
    done = write_key_value_table(frame, table, family="family")
    back = read_key_value_table(table, spark=spark)
    same = back.join(frame, ["family", "key", "value"]).count()
    print(json.dumps([done.entries, back.rdd.getNumPartitions(), back.count(), same]))
    spark.stop()
    backend.delete(id, PARTITIONS)


if __name__ == "__main__":
    main(*sys.argv[1:])

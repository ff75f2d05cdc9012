"""The peer's side of `benchmarks/kafka.py`: Spark's own Kafka connector, on the Spark that it is
made for.

    <peers' python> kafka_peer.py FOLDER IVY

Runs in an environment without this project. Commands come as lines of stdin, and one line of JSON
answers each:

    raw BOOTSTRAP TOPIC TARGET     writes the messages as Parquet; answers with the seconds that it
                                   took
    json BOOTSTRAP TOPIC TARGET COLUMNS   the same with the values' columns (DDL), by from_json
    sum TARGET                     answers with the number of rows and a checksum of all columns
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0"
META = ("CAST(partition AS INT) AS p", "offset AS o", "timestamp AS t")


def session(ivy: str) -> Any:
    """Start the session; the jars come from Spark's own Ivy, into a folder of their own."""
    from pyspark.sql import SparkSession

    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "2g")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.jars.ivy", ivy)
        .config("spark.jars.packages", CONNECTOR)
        .getOrCreate()
    )


def messages(spark: Any, bootstrap: str, topic: str) -> Any:
    """Return all that the topic holds, committed records only, as one batch."""
    return (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("kafka.isolation.level", "read_committed")
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("endingOffsets", "latest")
        .load()
    )


def answer(spark: Any, command: str, *words: str) -> Any:
    if command == "sum":
        row = (
            spark.read.parquet(words[0])
            .selectExpr("count(*) n", "bit_xor(xxhash64(*)) x")
            .collect()[0]
        )
        return [row.n, row.x]
    bootstrap, topic, target, *columns = words
    began = time.perf_counter()
    frame = messages(spark, bootstrap, topic)
    if command == "json":
        frame = frame.selectExpr(
            f"from_json(CAST(value AS STRING), '{' '.join(columns)}') AS r", "*"
        )
    wanted = ["r.*"] if command == "json" else ["key", "value"]
    frame.selectExpr(*wanted, *META).write.parquet(target)
    return time.perf_counter() - began


def main() -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = session(sys.argv[2])
    print(json.dumps(spark.version), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(spark, *line.split())), flush=True)


if __name__ == "__main__":
    main()

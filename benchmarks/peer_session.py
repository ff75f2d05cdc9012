"""The peers' side of `benchmarks/peers.py`: Iceberg and Delta tables in a Spark session of their
own.

    <peers' python> peer_session.py FOLDER IVY

Runs in an environment without this project, on the Spark that both peers are made for. Commands
come as lines of stdin, and one line of JSON answers each, as the last of its output:

    fill ROWS.parquet            makes both tables of these rows
    merge PEER CHANGES.parquet   applies changes; answers with the seconds that it took
    fill-history ROWS.parquet    makes an Iceberg table of type 2 of these rows, each valid from its
                                 column `since`
    merge-history CHANGES.parquet   ends and inserts rows of it; answers with the seconds that it
                                    took
    sum PEER                     answers with the number of rows, and the sum of the column c
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ICEBERG = "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.11.0"
DELTA = "io.delta:delta-spark_4.1_2.13:4.3.1"
TABLES = {"iceberg": "ice.db.target", "delta": "target", "history": "ice.db.history"}
# How each peer's own documentation says that small merges are made cheap.
_MAKE = {
    "iceberg": (
        "CREATE TABLE ice.db.target USING iceberg TBLPROPERTIES ('format-version' = '3', "
        "'write.merge.mode' = 'merge-on-read', 'write.delete.mode' = 'merge-on-read', "
        "'write.update.mode' = 'merge-on-read') AS SELECT * FROM base"
    ),
    "delta": (
        "CREATE TABLE target USING delta LOCATION '{folder}/delta/target' "
        "TBLPROPERTIES ('delta.enableDeletionVectors' = 'true') AS SELECT * FROM base"
    ),
}
_MERGE = """
MERGE INTO {table} t USING changes s ON t.k = s.k
WHEN MATCHED AND s.gone THEN DELETE
WHEN MATCHED THEN UPDATE SET {update}
WHEN NOT MATCHED AND NOT s.gone THEN INSERT ({columns}) VALUES ({values})
"""
_MAKE_HISTORY = (
    "CREATE TABLE ice.db.history USING iceberg TBLPROPERTIES ('format-version' = '3', "
    "'write.merge.mode' = 'merge-on-read', 'write.delete.mode' = 'merge-on-read', "
    "'write.update.mode' = 'merge-on-read') AS SELECT *, CAST(NULL AS TIMESTAMP) AS until FROM base"
)
_MERGE_HISTORY = (
    """
MERGE INTO ice.db.history t USING changes s ON t.k = s.k AND t.until IS NULL AND t.since < s.since
WHEN MATCHED THEN UPDATE SET t.until = s.since
""",
    """
MERGE INTO ice.db.history t USING (SELECT * FROM changes WHERE NOT gone) s
ON t.k = s.k AND t.since = s.since
WHEN NOT MATCHED THEN INSERT ({columns}, until) VALUES ({values}, NULL)
""",
)


def session(folder: Path, ivy: str) -> Any:
    """Start the session; the jars come from Spark's own Ivy, into a folder of their own."""
    from pyspark.sql import SparkSession

    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "4g")
        .config("spark.sql.shuffle.partitions", "8")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.jars.ivy", ivy)
        .config("spark.jars.packages", f"{ICEBERG},{DELTA}")
        .config(
            "spark.sql.extensions",
            "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions,io.delta.sql.DeltaSparkSessionExtension",
        )
        .config(
            "spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        )
        .config("spark.sql.catalog.ice", "org.apache.iceberg.spark.SparkCatalog")
        .config("spark.sql.catalog.ice.type", "hadoop")
        .config("spark.sql.catalog.ice.warehouse", str(folder / "iceberg"))
        .getOrCreate()
    )


def answer(spark: Any, folder: Path, command: str, *words: str) -> Any:
    if command == "fill":
        base = spark.read.parquet(words[0])
        base.createOrReplaceTempView("base")
        for statement in _MAKE.values():
            spark.sql(statement.format(folder=folder))
        return base.columns
    if command == "merge":
        peer, path = words
        changes = spark.read.parquet(path)
        columns = [name for name in changes.columns if name != "gone"]
        statement = _MERGE.format(
            table=TABLES[peer],
            update=", ".join(f"t.{name} = s.{name}" for name in columns if name != "k"),
            columns=", ".join(columns),
            values=", ".join(f"s.{name}" for name in columns),
        )
        began = time.perf_counter()
        spark.read.parquet(path).createOrReplaceTempView("changes")
        spark.sql(statement)
        return time.perf_counter() - began
    if command == "fill-history":
        spark.read.parquet(words[0]).createOrReplaceTempView("base")
        spark.sql(_MAKE_HISTORY)
        return spark.table("base").columns
    if command == "merge-history":
        columns = [name for name in spark.read.parquet(words[0]).columns if name != "gone"]
        values = ", ".join(f"s.{name}" for name in columns)
        began = time.perf_counter()
        spark.read.parquet(words[0]).createOrReplaceTempView("changes")
        for statement in _MERGE_HISTORY:
            spark.sql(statement.format(columns=", ".join(columns), values=values))
        return time.perf_counter() - began
    if command == "sum":
        row = spark.sql(f"SELECT count(*) n, sum(c) c FROM {TABLES[words[0]]}").collect()[0]
        return [row.n, row.c]
    raise SystemExit(f"unknown command {command!r}")


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = session(folder, sys.argv[2])
    print(json.dumps(spark.version), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(spark, folder, *line.split())), flush=True)


if __name__ == "__main__":
    main()

"""The same over time by Structured Streaming: the peer of `adjunct_over_time.py`.

    python -m benchmarks.structured_over_time join|window FOLDER

With the RocksDB state store and its changelog, and what there is at the start taken in, a file of
each side a batch. ADJUNCT_SPARK_QUICK gives it the options of a JVM for short runs, as it does for
its peer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
STORE = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def main(what: str, folder: Path) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import functions as F

    from dagster_adjunct.resources.spark.tuning import is_quick

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "4g")
        .config("spark.driver.extraJavaOptions", QUICK if is_quick() else "")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.streaming.stateStore.providerClass", STORE)
        .config("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
        .getOrCreate()
    )

    def side(name: str, number: str) -> DataFrame:
        read = spark.readStream.schema(f"k bigint, ts timestamp, {number} bigint").option(
            "maxFilesPerTrigger", 1
        )
        return read.parquet(str(folder / name)).withWatermark("ts", "1 minute")

    clicks = side("clicks", "click")
    if what == "join":
        buys = side("buys", "buy").withColumnsRenamed({"k": "buyer", "ts": "bought_at"})
        near = (
            "k = buyer AND bought_at BETWEEN ts - INTERVAL 10 MINUTES AND ts + INTERVAL 10 MINUTES"
        )
        made = clicks.join(buys, F.expr(near)).select("k", "ts", "click", "buy")
    else:
        counted = clicks.groupBy(F.window("ts", "5 minutes").alias("w"), "k").agg(
            F.count("*").alias("clicks")
        )
        made = counted.selectExpr("k", "w.start AS window_start", "w.end AS window_end", "clicks")
    query = (
        made.writeStream.format("parquet")
        .outputMode("append")
        .option("path", str(folder / "structured"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

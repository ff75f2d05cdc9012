"""The main job as one bare PySpark script: the baseline. No versions, no checkpoints, no recovery.

    python -m benchmarks.bare_flights FOLDER

The same joins over the same rows in the same 8 batches, plain Parquet and SQLite's executemany,
with the settings that a careful engineer would choose by hand (broadcast joins, as many shuffle
partitions as needed).
"""

from __future__ import annotations

import os
import sqlite3
import sys
from pathlib import Path

BATCHES = (45_000, 45_000, 45_000, 31_054, 45_000, 45_000, 45_000, 35_722)
FIRST_HALF = 4
UPSERT = """
INSERT INTO aircraft_state VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (tailnum) DO UPDATE SET
  last_flight = excluded.last_flight, last_origin = excluded.last_origin,
  last_dest = excluded.last_dest, last_time_hour = excluded.last_time_hour,
  last_dep_delay = excluded.last_dep_delay
"""


def main(folder: Path) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    from dagster_adjunct.examples.flights.data import load

    spark = (
        SparkSession.builder.master("local[*]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "8")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")
        .getOrCreate()
    )
    flights = load("flights")
    flights = flights.append_column("seq", pa.array(range(flights.num_rows)))
    all_planes = load("planes")
    all_planes = all_planes.rename_columns({"year": "plane_year"})
    old_planes = all_planes.filter(pc.less_equal(all_planes["plane_year"], 2005))
    weather = spark.createDataFrame(load("weather")).select(
        "origin", "time_hour", "temp", "wind_speed", "precip", "visib"
    )
    weather = weather.cache()
    airlines = spark.createDataFrame(load("airlines")).withColumnRenamed("name", "airline").cache()
    airports = (
        spark.createDataFrame(load("airports"))
        .selectExpr("faa as dest", "name as dest_name")
        .cache()
    )
    planes = {
        version: (
            spark.createDataFrame(table)
            .select("tailnum", "manufacturer", "model", "plane_year", "seats")
            .cache()
        )
        for version, table in ((1, old_planes), (2, all_planes))
    }
    database = sqlite3.connect(folder / "bare.sqlite")
    database.execute(
        "CREATE TABLE aircraft_state (tailnum TEXT PRIMARY KEY, manufacturer TEXT, model TEXT,"
        " plane_year INTEGER, seats INTEGER, last_flight INTEGER, last_origin TEXT, last_dest TEXT,"
        " last_time_hour TEXT, last_dep_delay INTEGER)"
    )
    start = 0
    for number, size in enumerate(BATCHES):
        batch = spark.createDataFrame(flights.slice(start, size))
        start += size
        enriched = (
            batch.join(planes[1 if number < FIRST_HALF else 2], "tailnum", "left")
            .join(weather, ["origin", "time_hour"], "left")
            .join(airlines, "carrier", "left")
            .join(airports, "dest", "left")
        ).persist()
        enriched.drop("seq").write.mode("append").parquet(str(folder / "enriched"))
        updates = (
            enriched.where("tailnum is not null")
            .orderBy("seq")
            .select(
                "tailnum",
                "manufacturer",
                "model",
                "plane_year",
                "seats",
                "flight",
                "origin",
                "dest",
                F.date_format("time_hour", "yyyy-MM-dd'T'HH:mm:ss'Z'"),
                "dep_delay",
            )
            .collect()
        )
        with database:
            database.executemany(UPSERT, updates)
        enriched.unpersist()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

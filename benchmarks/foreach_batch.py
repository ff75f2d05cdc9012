"""What small batches are measured against: foreachBatch of Structured Streaming, with the same
joins and writes.

No versions, no proof, no order of a key over tasks. Tables that a careful engineer would keep are
kept: each is cached, and broadcast in each batch, so that nothing is shuffled and a batch of one
file is one task.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bare_flights import UPSERT

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

CREATE = (
    "CREATE TABLE IF NOT EXISTS aircraft_state (tailnum TEXT PRIMARY KEY, manufacturer TEXT, model"
    " TEXT, plane_year INTEGER, seats INTEGER, last_flight INTEGER, last_origin TEXT, last_dest"
    " TEXT, last_time_hour TEXT, last_dep_delay INTEGER)"
)


@dataclass
class ForeachBatch:
    """A query over a folder of flights, a file each batch."""

    spark: SparkSession
    folder: Path
    tables: dict[str, DataFrame] = field(default_factory=dict)
    schema: Any = None
    files: int = 0

    def load(self, flights: pa.Table, **tables: pa.Table) -> None:
        """Keep the tables; `flights` has the columns of what will come."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.database = sqlite3.connect(self.folder / "peer.sqlite", check_same_thread=False)
        self.database.execute(CREATE)
        (self.folder / "incoming").mkdir()
        for name, table in tables.items():
            pq.write_table(table, self.folder / f"{name}.parquet")
            kept = self.spark.read.parquet(str(self.folder / f"{name}.parquet")).cache()
            kept.count()
            self.tables[name] = kept
        numbered = flights.slice(0, 0).append_column("seq", pa.array([], pa.int64()))
        pq.write_table(numbered, self.folder / "schema.parquet")
        self.schema = self.spark.read.parquet(str(self.folder / "schema.parquet")).schema

    def deliver(self, flights: pa.Table) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = flights.append_column("seq", pa.array(range(flights.num_rows), pa.int64()))
        pq.write_table(table, self.folder / "incoming" / f"{self.files:05d}.parquet")
        self.files += 1

    def run(self) -> list[float]:
        """Take in what was delivered; return the seconds of each batch, from finding its file to
        its commit.
        """
        query = (
            self.spark.readStream.schema(self.schema)
            .option("maxFilesPerTrigger", 1)
            .parquet(str(self.folder / "incoming"))
            .writeStream.foreachBatch(self._batch)
            .option("checkpointLocation", str(self.folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return [
            progress["durationMs"]["triggerExecution"] / 1000
            for progress in query.recentProgress
            if progress["numInputRows"]
        ]

    def _batch(self, batch: DataFrame, number: int) -> None:
        from pyspark.sql import functions as F

        table = {name: F.broadcast(kept) for name, kept in self.tables.items()}
        enriched = (
            batch.join(table["planes"], "tailnum", "left")
            .join(table["weather"], ["origin", "time_hour"], "left")
            .join(table["airlines"], "carrier", "left")
            .join(table["airports"], "dest", "left")
        ).persist()
        enriched.drop("seq").write.mode("append").parquet(str(self.folder / "enriched"))
        updates = (
            enriched.where("tailnum is not null")
            .coalesce(1)
            .sortWithinPartitions("seq")
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
        with self.database:
            self.database.executemany(UPSERT, updates)
        enriched.unpersist()

"""Records of three levels, appended by Spark and by this process, and joined by an application with
a dataset of such entries, against the same values in flat columns: in structs alone, and with
arrays and maps too.

The same by Arrow and by Spark alone shows which part of the ratios is theirs: Arrow writes the
records to one file, Spark writes them to a file for each partition, or joins and writes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.process_time import tree_seconds
from benchmarks.timing import alternate, show
from dagster_adjunct import (
    Application,
    LakeStreams,
    Schema,
    advance_dataset,
    open_lake,
    run_application,
    session_scope,
    unbounded_dataset,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

GOAL = "at most 1.2"
ENTRIES = 200_000
FLAT = {
    "customer_id": "id * 7919 % 1000003",
    "city": "concat('city ', id % 997)",
    "lat": "id % 180 - 90.5",
    "lon": "id % 360 - 180.5",
    "sku_0": "concat('s', id % 5003)",
    "price_0": "CAST(id % 10000 / 100 AS DECIMAL(10,2))",
    "sku_1": "concat('s', id % 4001)",
    "price_1": "CAST(id % 7919 / 100 AS DECIMAL(10,2))",
    "colour": "concat('c', id % 17)",
    "size": "concat('size ', id % 11)",
}
_CUSTOMER = (
    "named_struct('id', customer_id, 'address', named_struct('city', city, 'geo',"
    " named_struct('lat', lat, 'lon', lon)))"
)
STRUCTS = {
    "customer": _CUSTOMER,
    "lines": "named_struct('first', named_struct('sku', sku_0, 'price', price_0),"
    " 'second', named_struct('sku', sku_1, 'price', price_1))",
    "attributes": "named_struct('colour', colour, 'size', size)",
}
NESTED = {
    "customer": _CUSTOMER,
    "lines": "array(named_struct('sku', sku_0, 'price', price_0),"
    " named_struct('sku', sku_1, 'price', price_1))",
    "attributes": "map('colour', colour, 'size', size)",
}
PARTITIONS = 4
SHUFFLED = "spark.sql.shuffle.partitions"
WHAT = (
    "written_by_arrow",
    "appended_in_process",
    "read",
    "written_by_spark",
    "appended",
    "joined_by_spark",
    "joined",
)


def run(rounds: int, count: int = 1_000_000) -> None:
    with TemporaryDirectory() as folder, session_scope(master="local[2]") as session:
        spark = session()
        print(f"nested: {count:,} records of three levels, {ENTRIES:,} entries, local[2]")
        columns = {"flat": {name: name for name in FLAT}, "structs": STRUCTS, "nested": NESTED}
        sides = {
            name: Side(spark, Path(folder) / name, expressions, count)
            for name, expressions in columns.items()
        }
        for what in WHAT:
            _compare(what, rounds, {name: getattr(side, what) for name, side in sides.items()})


def _compare(what: str, rounds: int, runs: dict[str, Callable[[int], object]]) -> None:
    spent: defaultdict[str, float] = defaultdict(float)

    def timed(name: str, number: int) -> None:
        before = tree_seconds()
        runs[name](number)
        spent[name] += tree_seconds() - before

    for warm_up in runs.values():
        warm_up(-1)
    print(f"nested: {what}")
    measured = alternate(rounds, **{name: partial(timed, name) for name in runs})
    for name in ("structs", "nested"):
        show({each: measured[each] for each in ("flat", name)}, name, "flat", GOAL)
        print(f"  the same in CPU s: {spent[name] / spent['flat']:.2f}")


class Side:
    """The records in columns of these expressions over the flat ones, in a lake of their own."""

    def __init__(
        self, spark: SparkSession, folder: Path, columns: dict[str, str], count: int
    ) -> None:
        self.spark = spark
        self.lake = open_lake(folder)
        self.streams = LakeStreams(self.lake)
        flat = spark.range(count).selectExpr(
            "id AS k", *[f"{value} AS {name}" for name, value in FLAT.items()]
        )
        made = flat.selectExpr("k", *[f"{value} AS {name}" for name, value in columns.items()])
        made.write.parquet(f"{folder}-source")
        self.frame = spark.read.parquet(f"{folder}-source")
        self.table: pa.Table = self.frame.toArrow()
        self.columns = [*columns]
        self.schema = Schema.from_spark(made.schema)
        self._append("records", self.frame)
        self._append("entries", self._entries())
        self.dataset = unbounded_dataset(
            "entries", input="lake.entries", key="k", partitions=PARTITIONS
        )
        advance_dataset(
            self.dataset,
            lake=self.lake,
            systems={"lake": self.streams},
            spark=lambda: spark,
            by="benchmark",
        )

    def _entries(self) -> DataFrame:
        named = [f"{name} AS of_{name}" for name in self.columns]
        return self.frame.where(f"k < {ENTRIES}").selectExpr("k", *named)

    def _append(self, name: str, data: DataFrame | pa.Table) -> None:
        schema = self.schema
        if name == "entries":
            schema = Schema.from_spark(data.schema)  # type: ignore[arg-type]
        self.streams.create(name, schema=schema, key=["k"], partitions=PARTITIONS)
        self.streams.append(name, data, producer="fill", sequence=1)

    def appended(self, number: int) -> None:
        self._append(f"by-spark-{number + 1}", self.frame)

    def written_by_arrow(self, number: int) -> None:
        pq.write_table(self.table, Path(self.lake.url) / "written.parquet", compression="zstd")

    def written_by_spark(self, number: int) -> None:
        self._write(self.frame.repartition(PARTITIONS, "k"), f"written-{number + 1}")

    def joined_by_spark(self, number: int) -> None:
        entries = self._entries().withColumnRenamed("k", "entry")
        is_same = self.frame["k"] == entries["entry"]
        joined = self.frame.join(entries.hint("merge"), is_same, "left").drop("entry")
        before = self.spark.conf.get(SHUFFLED) or ""
        self.spark.conf.set(SHUFFLED, PARTITIONS)
        self._write(joined, f"spark-joined-{number + 1}")
        self.spark.conf.set(SHUFFLED, before)

    def _write(self, frame: DataFrame, name: str) -> None:
        frame.write.option("compression", "zstd").parquet(f"{self.lake.url}/{name}")

    def appended_in_process(self, number: int) -> None:
        self._append(f"in-process-{number + 1}", self.table)

    def read(self, number: int) -> None:
        self.streams.read_arrow(self.streams.all_ranges("records"))

    def joined(self, number: int) -> None:
        app = Application(f"joined-{number + 1}", engine="spark", max_batch_records=10_000_000)
        entries = app.table(self.dataset)
        joined = app.input_stream("lake.records", default_offset="oldest").join(
            entries, on="k", how="left", select=[f"of_{name}" for name in self.columns]
        )
        joined.send_to(
            app.output_stream(f"lake.joined-{number + 1}", partitions=PARTITIONS, key="k")
        )
        run_application(app, lake=self.lake, spark=lambda: self.spark, adopt=True)

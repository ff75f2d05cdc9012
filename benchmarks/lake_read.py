"""Reading a lake stream, whole and cut, against Spark reading the same Parquet files by their
paths.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.timing import alternate
from dagster_adjunct import LakeStreams, Schema, open_lake, session_scope
from dagster_adjunct.streams import OffsetRange

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

PARTITIONS = 8
RECORDS = Schema.of(
    k="string", carrier="string", note="string", n="bigint", share="double", at="timestamp"
)
GOAL = 0.9


def run(rounds: int, count: int = 4_000_000, appends: int = 4) -> None:
    with TemporaryDirectory() as folder, session_scope(master="local[2]") as session:
        spark = session()
        lake = open_lake(Path(folder) / "lake")
        streams = LakeStreams(lake)
        streams.create("facts", schema=RECORDS, key=["k"], partitions=PARTITIONS)
        for number in range(appends):
            streams.append(
                "facts", records(number, count // appends), producer="fill", sequence=number
            )
        paths = [str(path) for path in sorted(Path(folder).rglob("*.parquet"))]
        whole = streams.all_ranges("facts")
        # An eighth off at both ends: the first and the last append are cut in the middle.
        cut = {
            ssp: OffsetRange(str(int(span.end) // 8), str(int(span.end) * 7 // 8))
            for ssp, span in whole.items()
        }
        between = f"n >= {count // 8} AND n < {count * 7 // 8}"
        names = list(RECORDS.names)
        print(
            f"lake stream: {count:,} records of {len(names)} columns, {PARTITIONS} partitions,"
            f" {appends} appends"
        )
        reads = {
            "path": lambda: spark.read.parquet(*paths).select(names),
            "stream": lambda: streams.read(spark, whole).select(names),
            "path_with_meta": lambda: spark.read.parquet(*paths),
            "stream_with_meta": lambda: streams.read(spark, whole),
            "path_cut": lambda: spark.read.parquet(*paths).where(between).select(names),
            "stream_cut": lambda: streams.read(spark, cut).select(names),
            "path_cut_with_meta": lambda: spark.read.parquet(*paths).where(between),
            "stream_cut_with_meta": lambda: streams.read(spark, cut),
        }
        rows = {name: read().count() for name, read in reads.items()}
        assert (rows["stream"], rows["stream_cut"]) == (count, streams.records_between(cut)), rows
        for read in reads.values():  # all warm
            consume(read())
        measured = alternate(
            rounds, **{name: lambda _, read=read: consume(read()) for name, read in reads.items()}
        )
        rates = {name: rows[name] / item.median for name, item in measured.items()}
        for name, item in measured.items():
            print(f"  {item}; {rates[name]:,.0f} records/s")
        for name in ("stream", "stream_with_meta", "stream_cut", "stream_cut_with_meta"):
            other = name.replace("stream", "path")
            print(
                f"  rate of {name} / {other} = {rates[name] / rates[other]:.2f} (goal: at least"
                f" {GOAL})"
            )
        print()


def consume(frame: DataFrame) -> None:
    """Compute every column of every row, and keep nothing."""
    frame.write.format("noop").mode("overwrite").save()


def records(number: int, count: int) -> pa.Table:
    """Return one append's records: text of high and low cardinality, numbers, of which `n`
    counts on, and times.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    chance = np.random.default_rng(number)
    keys = pa.array(chance.integers(0, 500_000, count)).cast(pa.string())
    carriers = pa.array([f"C{number}" for number in range(16)]).take(
        pa.array(chance.integers(0, 16, count))
    )
    notes = pc.binary_join_element_wise(
        "note ", pa.array(chance.integers(0, 10**9, count)).cast(pa.string()), ""
    )
    times = pa.array(1_700_000_000_000_000 + np.arange(count) * 1000, pa.timestamp("us", tz="UTC"))
    return pa.table(
        {
            "k": pc.binary_join_element_wise("key-", keys, ""),
            "carrier": carriers,
            "note": notes,
            "n": pa.array(np.arange(number * count, (number + 1) * count)),
            "share": pa.array(chance.random(count)),
            "at": times,
        }
    )

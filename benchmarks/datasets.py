"""Committing changes to an unbounded dataset, against Spark's plain writes."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.timing import Measured, alternate, show
from dagster_adjunct import (
    LakeStreams,
    Schema,
    advance_dataset,
    open_lake,
    session_scope,
    unbounded_dataset,
)

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from pyspark.sql import SparkSession

BUCKETS = 8
CHANGES = 30_000
CHUNK = 1_000_000
SCHEMA = Schema.of(k="string", a="string", b="string", c="bigint", d="double", e="timestamp")


def rows(start: int, count: int, version: int, *, keys: np.ndarray | None = None) -> pa.Table:
    """Return rows with keys from `start` on, or with these; `version` makes their values differ."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = np.arange(start, start + count, dtype=np.int64) if keys is None else keys
    text = pc.cast(pa.array(numbers), pa.string())
    scattered = pa.array((numbers * 2_654_435_761 + version) % 1_000_003)
    return pa.table(
        {
            "k": pc.binary_join_element_wise("key-", text, ""),
            "a": pc.binary_join_element_wise("value ", pc.cast(scattered, pa.string()), ""),
            "b": pc.binary_join_element_wise(
                "group ", pc.cast(pa.array(np.asarray(scattered) % 1000), pa.string()), ""
            ),
            "c": scattered,
            "d": pc.cast(scattered, pa.float64()),
            "e": (
                pc.cast(scattered, pa.int64())
                .cast(pa.timestamp("us"))
                .cast(pa.timestamp("us", tz="UTC"))
            ),
        }
    )


def fill(streams: LakeStreams, name: str, count: int) -> None:
    """Create a stream of `count` rows, appended a million at a time."""
    streams.create(name, schema=SCHEMA, key=["k"], partitions=BUCKETS)
    for start in range(0, count, CHUNK):
        streams.append(
            name, rows(start, min(CHUNK, count - start), 0), producer="fill", sequence=start + 1
        )


def run(rounds: int, large: int) -> None:
    with TemporaryDirectory() as folder, session_scope(master="local[2]") as session:
        root, spark = Path(folder), session()
        lake = open_lake(root / "lake")
        streams = LakeStreams(lake)
        systems = {"lake": streams}
        fill(streams, "rows", 3_000_000)

        print(f"commit: {CHANGES:,} changes into 3M rows")
        small = commits(spark, root, streams, systems, "rows", 3_000_000, rounds)
        show(small, "commit", "parquet", "at most 3")
        if large:
            print(f"commit: {CHANGES:,} changes into {large:,} rows")
            fill(streams, "more-rows", large)
            big = commits(spark, root, streams, systems, "more-rows", large, rounds)
            ratio = big["commit"].median / small["commit"].median
            print(
                f"  {big['commit']}\n  that is {ratio:.2f} of the commit into 3M rows (goal: at"
                " most 1.2)\n"
            )


def commits(
    spark: SparkSession,
    root: Path,
    streams: LakeStreams,
    systems: dict[str, LakeStreams],
    name: str,
    count: int,
    rounds: int,
) -> dict[str, Measured]:
    """Bootstrap a dataset from the stream, then time commits of changes and plain writes of the
    same rows.
    """
    dataset = unbounded_dataset(f"table-{name}", input=f"lake.{name}", key="k", partitions=BUCKETS)
    advance_dataset(
        dataset, lake=streams.lake, systems=systems, spark=lambda: spark, by="benchmark"
    )
    delivered: list[pa.Table] = []

    def deliver(number: int) -> None:
        delivered.append(rows(number * 1000, CHANGES, number + 1))
        streams.append(name, delivered[-1], producer="changes", sequence=number + 1)

    def commit(_: int) -> None:
        report = advance_dataset(
            dataset, lake=streams.lake, systems=systems, spark=lambda: spark, by="benchmark"
        )
        assert report.action == "applied", report

    def parquet(number: int) -> None:
        newest = max(
            (root / "lake" / "streams" / name / "data").iterdir(), key=lambda path: path.name
        )
        spark.read.parquet(str(newest)).select(*SCHEMA.names).write.parquet(
            str(root / f"{name}-plain-{number}")
        )

    deliver(0)
    parquet(1000)  # both warm
    commit(0)
    times: dict[str, list[float]] = {"commit": [], "parquet": []}
    for number in range(1, rounds + 1):
        deliver(number)
        for what, measured in alternate(
            1, parquet=lambda _, n=number: parquet(n), commit=commit
        ).items():
            times[what] += measured.seconds
    return {what: Measured(what, tuple(seconds)) for what, seconds in times.items()}

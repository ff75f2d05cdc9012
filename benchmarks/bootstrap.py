"""Bootstrap of an unbounded dataset from a stream of changes, against Spark reading and writing
them as Parquet.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.datasets import BUCKETS, SCHEMA, fill
from benchmarks.timing import alternate, show
from dagster_adjunct import (
    LakeStreams,
    advance_dataset,
    open_lake,
    session_scope,
    unbounded_dataset,
)

CHANGES = 10_000_000


def run(rounds: int, count: int = CHANGES) -> None:
    print(
        f"bootstrap: {count:,} changes x {len(SCHEMA.names)} columns into {BUCKETS} buckets, sorted"
        " by key"
    )
    with TemporaryDirectory() as folder, session_scope(master="local[2]") as session:
        root, spark = Path(folder), session()
        lake = open_lake(root / "lake")
        streams = LakeStreams(lake)
        fill(streams, "changes", count)
        # Something small first, so that neither is measured while its Python workers or its code
        # start.
        fill(streams, "warm", min(count, 10_000))

        def bootstrap(name: str, stream: str) -> None:
            dataset = unbounded_dataset(name, input=f"lake.{stream}", key="k", partitions=BUCKETS)
            report = advance_dataset(
                dataset, lake=lake, systems={"lake": streams}, spark=lambda: spark, by="benchmark"
            )
            assert report.action == "bootstrapped", report
            shutil.rmtree(root / "lake" / "datasets" / name)

        def parquet(name: str, stream: str) -> None:
            files = sorted(
                map(str, (root / "lake" / "streams" / stream / "data").glob("*/*.parquet"))
            )
            spark.read.parquet(*files).select(*SCHEMA.names).write.parquet(str(root / name))
            shutil.rmtree(root / name)

        bootstrap("warm", "warm")
        parquet("warm", "warm")
        measured = alternate(
            rounds,
            parquet=lambda number: parquet(f"plain-{number}", "changes"),
            bootstrap=lambda number: bootstrap(f"table-{number}", "changes"),
        )
        ratio = show(measured, "bootstrap", "parquet", "at most 2.5")
        print(f"  that is {1 / ratio:.0%} of the rate of plain Parquet (goal: at least 40%)\n")

"""Sealing a version of 10M rows against Spark's own bucketed write, and how soon readers see a
built version.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.timing import alternate, show
from dagster_adjunct import (
    LakeStreams,
    Schema,
    StageEvent,
    advance_dataset,
    bounded_dataset,
    open_dataset,
    open_lake,
    session_scope,
)
from dagster_adjunct.resources.objects.lake import lake_in
from tests.faulty_store import FaultyStore
from tests.servers.s3 import serve_versitygw, versitygw_binary

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

BUCKETS = 8
ROWS = 10_000_000
CHUNK = 1_000_000
SCHEMA = Schema.of(
    k="string", a="string", b="string", c="bigint", d="double", e="timestamp", f="int", g="date"
)  # fmt: skip


def rows(start: int, count: int, version: int = 0) -> pa.Table:
    """Return rows of eight columns with keys from `start` on; `version` makes their values
    differ.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = np.arange(start, start + count, dtype=np.int64)
    scattered = (numbers * 2_654_435_761 + version) % 1_000_003
    values = pa.array(scattered)
    return pa.table(
        {
            "k": pc.binary_join_element_wise("key-", pc.cast(pa.array(numbers), pa.string()), ""),
            "a": pc.binary_join_element_wise("value ", pc.cast(values, pa.string()), ""),
            "b": pc.binary_join_element_wise(
                "group ", pc.cast(pa.array(scattered % 1000), pa.string()), ""
            ),
            "c": values,
            "d": pc.cast(values, pa.float64()),
            "e": values.cast(pa.timestamp("us")).cast(pa.timestamp("us", tz="UTC")),
            "f": pa.array((scattered % 100_000).astype(np.int32)),
            "g": pa.array((scattered % 20_000).astype(np.int32)).cast(pa.date32()),
        }
    )


def run(rounds: int) -> None:
    binary = versitygw_binary()
    with ExitStack() as stack:
        lakes = [
            ("a local lake", FaultyStore(open_lake(stack.enter_context(_folder()) / "lake").store))
        ]
        if binary is None:
            print("switch on S3: left out, versitygw is not installed here (make servers)")
        else:
            server = stack.enter_context(serve_versitygw(binary, stack.enter_context(_folder())))
            os.environ.update(server.env)
            lakes.append(("a real S3 server", FaultyStore(open_lake(server.url()).store)))
        # One session for all: the JVM has S3's packages from its start, or never.
        session = stack.enter_context(session_scope(master="local[2]", lake_url=lakes[-1][1].url))
        _seal(stack.enter_context(_folder()), session, rounds)
        for what, store in lakes:
            _switch(what, store, session, rounds)


def _seal(root: Path, session: Callable[[], SparkSession], rounds: int) -> None:
    spark = session()
    lake = open_lake(root / "lake")
    streams = LakeStreams(lake)
    systems = {"lake": streams}
    streams.create("rows", schema=SCHEMA, key=["k"], partitions=BUCKETS)
    for start in range(0, ROWS, CHUNK):
        streams.append("rows", rows(start, CHUNK), producer="fill", sequence=start + 1)
    streams.append_markers("rows", "one", producer="end", sequence=1)

    print(
        f"seal: {ROWS:,} rows x {len(SCHEMA.names)} columns into {BUCKETS} buckets, sorted by key"
    )

    def seal(number: int) -> None:
        dataset = bounded_dataset(
            f"sealed-{number}", input="lake.rows", key="k", partitions=BUCKETS
        )
        report = advance_dataset(
            dataset, lake=lake, systems=systems, spark=lambda: spark, by="benchmark"
        )
        assert report.rows == ROWS, report
        shutil.rmtree(root / "lake" / "datasets" / f"sealed-{number}" / "data")

    def plain(number: int) -> None:
        files = sorted(map(str, (root / "lake" / "streams" / "rows" / "data").glob("*/*.parquet")))
        (
            spark.read.parquet(*files)
            .select(*SCHEMA.names)
            .repartition(BUCKETS, "k")
            .write.bucketBy(BUCKETS, "k")
            .sortBy("k")
            .option("path", str(root / f"plain-{number}"))
            .saveAsTable(f"plain_{number}")
        )
        shutil.rmtree(root / f"plain-{number}")

    seal(1000)  # both warm
    plain(1000)
    measured = alternate(rounds, spark_bucketed_write=plain, seal=seal)
    show(measured, "seal", "spark_bucketed_write", "at most 1.2")


def _switch(
    what: str, store: FaultyStore, session: Callable[[], SparkSession], rounds: int
) -> None:
    """Time from the end of the build to a reader that has switched, and count the requests of
    both.
    """
    lake = lake_in(store)
    streams = LakeStreams(lake)
    streams.create("rows", schema=SCHEMA, key=["k"], partitions=BUCKETS)
    dataset = bounded_dataset("switched", input="lake.rows", key="k", partitions=BUCKETS)
    reader = None
    seconds, requests = [], []
    for number in range(rounds + 1):
        streams.append(
            "rows",
            rows(0, 100_000, number),
            producer="fill",
            sequence=number + 1,
            end_of_dataset=f"v{number}",
        )
        began, before = 0.0, 0

        def built(event: StageEvent) -> None:
            nonlocal began, before
            if event.stage == "validate":
                began, before = time.perf_counter(), len(store.requests)

        report = advance_dataset(
            dataset,
            lake=lake,
            systems={"lake": streams},
            spark=session,
            by="benchmark",
            on_stage=built,
        )
        # What the advance does after the switch (looking for a next version) is not on the readers'
        # way.
        switched = next(
            i
            for i, (_, key) in enumerate(store.requests)
            if i >= before and key.endswith("/CURRENT")
        )
        after = time.perf_counter()
        reader = reader or open_dataset(lake, "switched")
        asked = len(store.requests)
        reader.refresh()
        assert reader.version == report.version, (reader.version, report.version)
        if number:
            seconds.append(
                report.seconds["seal"] + report.seconds["switch"] + time.perf_counter() - after
            )
            requests.append(switched + 1 - before + len(store.requests) - asked)
    print(
        f"switch on {what}: a built version is read after {statistics.median(seconds):.3f} s (goal:"
        " under 1)"
    )
    print(f"  with {max(requests)} requests (goal: at most 8)\n")


@contextmanager
def _folder() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        yield Path(folder)

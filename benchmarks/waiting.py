"""Joins that wait for their dataset, against the same joins that don't: one batch of records that
all may be read, in processor time.

The difference is what it takes to find out where the batch ends.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.process_time import tree_seconds
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
from dagster_adjunct.changes import Watermark

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from dagster_adjunct import Lake

RECORDS, KEYS, BUCKETS = 1_000_000, 20_000, 4
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
GOAL = "at most 1.02"


def run(rounds: int, count: int = RECORDS) -> None:
    """Print the processor seconds of both, in turns, and their ratio."""
    print(f"waiting: an as-of join of {count:,} records in one batch, {KEYS:,} keys")
    with TemporaryDirectory() as folder, session_scope(master="local[2]") as session:
        lake = open_lake(Path(folder) / "lake")
        streams = LakeStreams(lake)
        _send(streams, count)
        spark = session()
        seconds: dict[str, list[float]] = {"waits": [], "plain": []}
        _seconds(lake, streams, spark, "warm-up", waits=True, count=count)
        for number in range(rounds):
            turns = [*seconds.items()]
            for name, taken in turns if number % 2 else reversed(turns):
                waits = name == "waits"
                taken.append(
                    _seconds(lake, streams, spark, f"{name}-{number}", waits=waits, count=count)
                )
    for name, taken in seconds.items():
        print(f"  {name}: {median(taken):.2f} s ({min(taken):.2f}-{max(taken):.2f})")
    print(f"  ratio {median(seconds['waits']) / median(seconds['plain']):.3f} (goal: {GOAL})")


def _send(streams: LakeStreams, count: int) -> None:
    import pyarrow as pa

    streams.create(
        "prices",
        schema=Schema.of(k="bigint", at="timestamp", price="bigint"),
        key=["k"],
        partitions=BUCKETS,
    )
    streams.create(
        "sales",
        schema=Schema.of(k="bigint", at="timestamp", n="bigint", note="string"),
        key=["k"],
        partitions=BUCKETS,
    )
    streams.append("prices", _times(KEYS * 2, "price", 3600), producer="benchmark", sequence=1)
    sales = _times(count, "n", 3500)
    notes = pa.array([f"note {number}" for number in range(count)])
    streams.append("sales", sales.append_column("note", notes), producer="benchmark", sequence=1)


def _times(count: int, number: str, seconds: int) -> pa.Table:
    """Return records of all keys at times within these seconds."""
    import numpy as np
    import pyarrow as pa

    numbers = np.arange(count, dtype=np.int64)
    micros = int(BEGAN.timestamp() * 1_000_000) + numbers * (seconds * 1_000_000 // count)
    return pa.table(
        {
            "k": pa.array(numbers * 7_919 % KEYS),
            "at": pa.array(micros, pa.timestamp("us")).cast(pa.timestamp("us", tz="UTC")),
            number: pa.array(numbers),
        }
    )


def _seconds(
    lake: Lake, streams: LakeStreams, spark: SparkSession, name: str, *, waits: bool, count: int
) -> float:
    """Return the processor seconds of a run of a new application."""
    prices = unbounded_dataset(
        "prices",
        input="lake.prices",
        key="k",
        partitions=BUCKETS,
        history="all",
        valid_from="at",
        watermark=Watermark(),
    )
    app = Application(name, max_batch_records=count)
    sales = app.input_stream("lake.sales", default_offset="oldest", event_time="at")
    wait = timedelta(minutes=10) if waits else None
    joined = sales.join(app.table(prices), on="k", select=["price"], as_of="at", wait=wait)
    joined.send_to(app.output_stream(f"lake.{name}", key="k", partitions=BUCKETS))
    systems = {"lake": streams}
    advance_dataset(prices, lake=lake, systems=systems, spark=spark, by="benchmark")
    before = tree_seconds()
    report = run_application(app, lake=lake, systems=systems, spark=spark, run="benchmark")
    taken = tree_seconds() - before
    state = report.step.state
    found = (report.step.batches, state.records, report.step.event_time.held)
    assert found == (1, count, ()), found
    return taken

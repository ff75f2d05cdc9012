"""A commit to a dataset with history, against one without, and against two MERGEs into an Iceberg
table of type 2.

The peer keeps one row for each entry and the time that it was valid: a first MERGE ends the rows
that are replaced, a second one inserts the new ones. It runs where the other peers do (peers.py).
Each round changes the same rows of all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.datasets import BUCKETS, CHANGES, CHUNK, rows
from benchmarks.environments import Ask
from benchmarks.peers import ENVIRONMENT, changes
from benchmarks.timing import Measured, show
from dagster_adjunct import (
    LakeStreams,
    Schema,
    advance_dataset,
    open_lake,
    session_scope,
    unbounded_dataset,
)
from dagster_adjunct.assets.reading.stored_versions import StoredVersions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from dagster_adjunct import AdjunctDataset

COUNT = 3_000_000
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = Schema.of(
    k="string", a="string", b="string", c="bigint", d="double", e="timestamp", since="timestamp"
)


@dataclass(frozen=True, slots=True)
class Sides:
    """One stream, and the datasets that follow it with history and without."""

    streams: LakeStreams
    spark: SparkSession

    @property
    def datasets(self) -> dict[str, AdjunctDataset]:
        shared: dict[str, Any] = {"input": "lake.rows", "key": "k", "partitions": BUCKETS}
        return {
            "history": unbounded_dataset("over-time", history="all", valid_from="since", **shared),
            "plain": unbounded_dataset("plain", **shared),
        }

    def commit(self, name: str) -> float:
        """Bring one dataset up to date; return the seconds."""
        began = time.perf_counter()
        dataset = self.datasets[name]
        report = advance_dataset(
            dataset,
            lake=self.streams.lake,
            systems={"lake": self.streams},
            spark=lambda: self.spark,
            by="benchmark",
        )
        assert report.action in ("applied", "bootstrapped"), report
        return time.perf_counter() - began

    def held(self) -> list[int]:
        """Return how many entries there are over all times, and the sum of their column c."""
        view = StoredVersions(self.streams.lake, "over-time").require_current()
        entries = view.history_frame(self.spark).where("not __tombstone")
        totals = entries.selectExpr("count(*) n", "sum(c) c").collect()[0]
        return [totals.n, totals.c]


def run(rounds: int, large: int) -> None:
    print(
        f"history: {CHANGES:,} changes into {COUNT:,} rows, with history and without; two MERGEs in"
        " Iceberg 1.11.0"
    )
    with session_scope(master="local[2]") as session:
        python = ENVIRONMENT.python()
        with TemporaryDirectory() as folder:
            peer = ENVIRONMENT.session(python, folder) if python else nullcontext(None)
            with peer as ask:
                seconds = _commits(Path(folder), session(), COUNT, rounds, ask)
        show(
            {name: seconds[name] for name in ("history", "plain")},
            "history",
            "plain",
            "at most 1.2",
        )
        if "iceberg" in seconds:
            show(
                {name: seconds[name] for name in ("iceberg", "history")},
                "iceberg",
                "history",
                "at least 4",
            )
        if large:
            print(f"history: {CHANGES:,} changes into {large:,} rows")
            with TemporaryDirectory() as folder:
                big = _commits(Path(folder), session(), large, rounds, None)
            ratio = big["history"].median / seconds["history"].median
            print(f"  {big['history']}\n  {big['plain']}")
            print(
                f"  with history that is {ratio:.2f} of the commit into {COUNT:,} rows (goal:"
                " flat)\n"
            )


def _commits(
    root: Path, spark: SparkSession, count: int, rounds: int, ask: Ask | None
) -> Mapping[str, Measured]:
    streams = LakeStreams(open_lake(root / "lake"))
    sides = Sides(streams, spark)
    streams.create("rows", schema=SCHEMA, key=["k"], partitions=BUCKETS)
    (root / "base").mkdir()
    for start in range(0, count, CHUNK):
        part = valid_from(rows(start, min(CHUNK, count - start), 0), 0)
        streams.append("rows", part, producer="fill", sequence=start + 1)
        if ask is not None:
            _write(part, root / "base" / f"{start}.parquet")
    for name in sides.datasets:
        sides.commit(name)
    if ask is not None:
        ask(f"fill-history {root / 'base'}")
    names = ("history", "plain", "iceberg") if ask else ("history", "plain")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):  # the first is for warming up
        made = changes(number, count)
        since = valid_from(made.drop_columns("__tombstone"), number + 1)
        made = since.append_column("__tombstone", made["__tombstone"])
        streams.append("rows", made, producer="changes", sequence=number + 1)
        order = ("history", "plain") if number % 2 else ("plain", "history")
        took = {name: sides.commit(name) for name in order}
        if ask is not None:
            path = root / f"changes-{number}.parquet"
            _write(made.rename_columns([*SCHEMA.names, "gone"]), path)
            took["iceberg"] = ask(f"merge-history {path}")
        if number:
            for name, duration in took.items():
                seconds[name].append(duration)
    if ask is not None and (theirs := ask("sum history")) != (ours := sides.held()):
        raise SystemExit(f"the tables differ at the end: Iceberg's holds {theirs}, ours {ours}")
    return {name: Measured(name, tuple(durations)) for name, durations in seconds.items()}


def valid_from(table: pa.Table, number: int) -> pa.Table:
    """Return the rows with when they are valid from: the changes of a later number from a later
    time.
    """
    import pyarrow as pa

    when = pa.scalar(BEGAN + timedelta(hours=number), pa.timestamp("us", tz="UTC"))
    return table.append_column("since", pa.repeat(when, table.num_rows))


def _write(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, path)

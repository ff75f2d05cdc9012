"""A commit of changes to an unbounded dataset against MERGE of the same changes into Iceberg and
Delta tables.

The peers run on another Spark than this project, so they get an environment and a process of their
own: in `.cache/peers`, made at the first run from the configured package registry.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.datasets import BUCKETS, CHANGES, CHUNK, SCHEMA, rows
from benchmarks.environments import Environment
from benchmarks.timing import Measured, show
from dagster_adjunct import (
    LakeStreams,
    advance_dataset,
    open_dataset,
    open_lake,
    session_scope,
    unbounded_dataset,
)

if TYPE_CHECKING:
    import pyarrow as pa

ENVIRONMENT = Environment(
    "peers", ("pyspark[sql]==4.1.2", "pyarrow", "pandas<3"), "peer_session.py"
)
GOALS = {"iceberg": "at most 0.33", "delta": "at most 0.125"}


def run(rounds: int, count: int = 3_000_000) -> None:
    print(
        f"peers: {CHANGES:,} changes into {count:,} rows; MERGE, merge-on-read, in Iceberg 1.11.0"
        " and Delta 4.3.1"
    )
    python = ENVIRONMENT.python()
    if python is None:
        return
    with (
        TemporaryDirectory() as folder,
        session_scope(master="local[2]") as session,
        ENVIRONMENT.session(python, folder) as ask,
    ):
        root, spark = Path(folder), session()
        lake = open_lake(root / "lake")
        streams = LakeStreams(lake)
        streams.create("rows", schema=SCHEMA, key=["k"], partitions=BUCKETS)
        base = root / "base"
        base.mkdir()
        for start in range(0, count, CHUNK):
            part = rows(start, min(CHUNK, count - start), 0)
            streams.append("rows", part, producer="fill", sequence=start + 1)
            _write(part, base / f"{start}.parquet")
        ask(f"fill {base}")
        dataset = unbounded_dataset("target", input="lake.rows", key="k", partitions=BUCKETS)
        advance_dataset(
            dataset, lake=lake, systems={"lake": streams}, spark=lambda: spark, by="benchmark"
        )

        def commit() -> float:
            began = time.perf_counter()
            report = advance_dataset(
                dataset, lake=lake, systems={"lake": streams}, spark=lambda: spark, by="benchmark"
            )
            assert report.action == "applied", report
            return time.perf_counter() - began

        seconds: dict[str, list[float]] = {"commit": [], "iceberg": [], "delta": []}
        for number in range(rounds + 1):  # the first is for warming up
            made = changes(number, count)
            _write(made.rename_columns([*SCHEMA.names, "gone"]), root / f"changes-{number}.parquet")
            streams.append("rows", made, producer="changes", sequence=number + 1)
            took = {"commit": commit()}
            took |= {
                peer: ask(f"merge {peer} {root}/changes-{number}.parquet")
                for peer in ("iceberg", "delta")
            }
            if number:
                for name, duration in took.items():
                    seconds[name].append(duration)
        frame = open_dataset(lake, "target").frame(spark)
        ours = frame.selectExpr("count(*) n", "sum(c) c").collect()[0]
        for peer in ("iceberg", "delta"):
            held = ask(f"sum {peer}")
            if held != [ours.n, ours.c]:
                raise SystemExit(
                    f"the tables differ at the end: {peer} holds {held}, ours {[ours.n, ours.c]}"
                )
        for peer, goal in GOALS.items():
            measured = {name: Measured(name, tuple(seconds[name])) for name in (peer, "commit")}
            show(measured, "commit", peer, goal)


def changes(number: int, count: int) -> pa.Table:
    """Return changes with keys all over the table: 90% of them are updates, 5% inserts, 5%
    deletes.
    """
    import numpy as np
    import pyarrow as pa

    share = CHANGES // 20
    step = count // (CHANGES - share)
    keys = np.arange(CHANGES - share, dtype=np.int64) * step + number % step
    new = np.arange(share, dtype=np.int64) + count + number * share
    made = rows(0, CHANGES, number + 1, keys=np.concatenate([keys, new]))
    gone = np.arange(CHANGES) % 20 == 7
    gone[len(keys) :] = False
    return made.append_column("__tombstone", pa.array(gone))


def _write(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, path)

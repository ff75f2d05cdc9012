"""As-of joins: records with the entry of 12 a key that was valid at their time, against the plain
join of as many rows.

Both read the same records in one session, in turns, and keep nothing; then again with three deltas
on both tables.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.joins import compiled
from benchmarks.lake_read import consume
from benchmarks.timing import alternate, show
from dagster_adjunct import (
    Application,
    Lake,
    LakeStreams,
    Schema,
    advance_dataset,
    open_lake,
    session_scope,
    unbounded_dataset,
)
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.changes import DeltaCompaction
from dagster_adjunct.orchestration.batch_log.intent import Intent
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.step.context import BatchInputs, StepContext
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset

BUCKETS, EACH = 8, 12
TABLE = Schema.of(k="string", a="string", n="bigint", since="timestamp")
STREAM = Schema.of(k="string", v="bigint", at="timestamp")
KEPT = DeltaCompaction(deltas=100, inside_commit=False)


def run(rounds: int, count: int = 3_000_000, sizes: tuple[int, ...] = (500_000, 2_000_000)) -> None:
    with TemporaryDirectory() as folder, session_scope(master="local[2]") as session:
        world = World(session(), open_lake(Path(folder) / "lake"), count)
        for deltas in (0, 3):
            for number in range(1, deltas + 1):
                world.change(number)
            for records in sizes:
                print(
                    f"time-joins: {records:,} records, {count:,} rows, {deltas} deltas of"
                    f" {count // 100:,} rows"
                )
                world.fill(records)
                for name in ("plain", "as_of"):
                    world.read(name, records)  # warm
                measured = alternate(
                    rounds,
                    plain=partial(world.read, "plain", records),
                    as_of=partial(world.read, "as_of", records),
                )
                show(measured, "as_of", "plain", "at most 2")


class World:
    """A table with an entry a key, one of as many rows with 12 a key, and streams of records
    that meet them.
    """

    def __init__(self, spark: SparkSession, lake: Lake, count: int) -> None:
        self._spark, self._lake, self._count = spark, lake, count
        self._streams = LakeStreams(lake)
        self._filled: set[int] = set()
        for name in ("plain", "as_of"):
            self._streams.create(name, schema=TABLE, key=["k"], partitions=BUCKETS)
            self._append(name, 1, 0, count)

    def change(self, number: int) -> None:
        """Change one row in a hundred of both tables."""
        for name in ("plain", "as_of"):
            self._append(name, number + 1, number * 7, self._count // 100)

    def fill(self, records: int) -> None:
        """Make streams of so many records for both tables."""
        if records in self._filled:
            return
        self._filled.add(records)
        for name, keys in (("plain", self._count), ("as_of", self._count // EACH)):
            stream = f"{name}-{records}"
            self._streams.create(stream, schema=STREAM, key=["k"], partitions=BUCKETS)
            rows = self._spark.range(records).selectExpr(
                f"concat('key-', pmod(hash(id), {keys})) AS k", "id AS v",
                f"timestamp_seconds(1700000000 + pmod(hash(id, 7), {(EACH + 1) * 86_400})) AS at",
            )  # fmt: skip
            self._streams.append(stream, rows, producer="fill", sequence=1)

    def read(self, name: str, records: int, round_: int = 0) -> None:
        """Join the records, and throw away what comes out."""
        consume(self.frame(name, records))

    def frame(self, name: str, records: int) -> DataFrame:
        """Return the joined records, as the step compiles a batch of all of them."""
        dataset, app = self._dataset(name), Application("joins")
        more: dict[str, Any] = {"as_of": "at"} if name == "as_of" else {}
        stream = app.input_stream(f"lake.{name}-{records}")
        stream = stream.join(app.table(dataset), on="k", how="left", select=["a", "n"], **more)
        stream.send_to(app.output_stream("lake.out", key="k", partitions=BUCKETS))
        runtime = Runtime(self._lake, {"lake": self._streams}, lambda: self._spark, by="benchmark")
        context = StepContext(
            runtime, app, plan_application(app, systems=runtime.systems), FanOut()
        )
        views = {name: StoredVersions(self._lake, dataset).current()}
        intent = Intent(
            batch=1,
            run="benchmark",
            clock=datetime.now(UTC),
            ranges=self._streams.all_ranges(f"{name}-{records}"),
        )
        frame = compiled(PlannedBatch.of(context, BatchInputs(intent, views)))
        assert (
            "Exchange hashpartitioning" not in frame._jdf.queryExecution().executedPlan().toString()
        )
        return frame

    def _dataset(self, name: str) -> AdjunctDataset:
        history: dict[str, Any] = (
            {"history": "all", "valid_from": "since"} if name == "as_of" else {}
        )
        return unbounded_dataset(
            name, input=f"lake.{name}", key="k", partitions=BUCKETS, compaction=KEPT, **history
        )

    def _append(self, name: str, sequence: int, first: int, rows: int) -> None:
        keys = self._count // EACH if name == "as_of" else self._count
        changed = self._spark.range(first, first + rows).selectExpr(
            f"concat('key-', id % {keys}) AS k", "concat('value ', id % 1000003) AS a", "id AS n",
            f"timestamp_seconds(1700000000 + div(id, {keys}) * 86400 + {sequence - 1}) AS since",
        )  # fmt: skip
        self._streams.append(name, changed, producer="fill", sequence=sequence)
        advance_dataset(
            self._dataset(name),
            lake=self._lake,
            systems={"lake": self._streams},
            spark=lambda: self._spark,
            by="benchmark",
        )

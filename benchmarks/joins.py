"""Records of a stream joined with a partitioned dataset by what the step compiles, against the same
join shuffled.

Both read the same files in one session, in turns, and keep nothing. A chain of three such joins,
against each alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.lake_read import consume
from benchmarks.process_time import tree_seconds
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
from dagster_adjunct.orchestration.batch_log.intent import Intent
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.step.batch import (
    SparkCompiler,
    SparkOpened,
    SparkParts,
    run_operators,
)
from dagster_adjunct.orchestration.step.context import BatchInputs, StepContext
from dagster_adjunct.orchestration.step.dry_run import analyze_batch
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch
from dagster_adjunct.orchestration.step.spark_datasets import SparkDatasets
from dagster_adjunct.orchestration.step.spark_frames import SparkFrames
from dagster_adjunct.orchestration.step.spark_state import SparkState, WrittenLocalTables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.assets.reading.version_reader import VersionReader


BUCKETS = 8
NAMES = ("first", "second", "third")
TABLE = Schema.of(k="string", a="string", n="bigint")
STREAM = Schema.of(k="string", v="bigint")


def run(rounds: int, count: int = 10_000_000, records: int = 500_000) -> None:
    with TemporaryDirectory() as folder, session_scope(master="local[2]") as session:
        spark, lake = session(), open_lake(Path(folder) / "lake")
        view = stored(spark, lake, count, records)
        joins = Joins(spark, lake, view)
        print(
            f"joins: {records:,} records of a stream with {count:,} rows in {BUCKETS} buckets,"
            " nothing is kept"
        )
        shuffled = Shuffled(spark, Path(folder) / "lake")
        for name, frame in (("joined", joins.frame(NAMES[:1])), ("shuffled", shuffled.frame())):
            counts = counted(frame)
            assert counts == (records, records), (name, counts)
        for frame in (joins.frame(NAMES), shuffled.frame()):
            consume(frame)  # all warm
        spent: defaultdict[str, float] = defaultdict(float)

        def timed(name: str, frame: Callable[[], DataFrame]) -> None:
            before = tree_seconds()
            consume(frame())
            spent[name] += tree_seconds() - before

        measured = alternate(
            rounds,
            joined=lambda _: timed("joined", lambda: joins.frame(NAMES[:1])),
            shuffled=lambda _: timed("shuffled", shuffled.frame),
        )
        show(measured, "shuffled", "joined", "at least 2")
        print(f"  the same in CPU s: {spent['shuffled'] / spent['joined']:.2f}")
        joins.prove(NAMES[:1])

        print("joins: three in a chain, against each alone")
        chain = alternate(
            rounds,
            chain=lambda _: timed("chain", lambda: joins.frame(NAMES)),
            **{
                name: lambda _, name=name: timed(name, lambda: joins.frame([name]))
                for name in NAMES
            },
        )
        for item in chain.values():
            print(f"  {item}")
        alone = sum(chain[name].median for name in NAMES)
        print(
            f"  chain / sum of each alone = {chain['chain'].median / alone:.2f} (goal: at most 1.2)"
        )
        print(f"  the same in CPU s: {spent['chain'] / sum(spent[name] for name in NAMES):.2f}")
        joins.prove(NAMES)


def stored(spark: SparkSession, lake: Lake, count: int, records: int) -> VersionReader:
    """Fill a stream and a dataset that lie alike, with as little work as that takes; return the
    dataset's version.
    """
    streams = LakeStreams(lake)
    key = "concat('key-', {}) AS k"
    for name, schema in (("table", TABLE), ("facts", STREAM)):
        streams.create(name, schema=schema, key=["k"], partitions=BUCKETS)
    rows = spark.range(count).selectExpr(
        key.format("id"), "concat('value ', id % 1000003) AS a", "id AS n"
    )
    streams.append("table", rows, producer="fill", sequence=1)
    facts = spark.range(records).selectExpr(key.format(f"pmod(hash(id), {count})"), "id AS v")
    streams.append("facts", facts, producer="fill", sequence=1)
    dataset = unbounded_dataset("table", input="lake.table", key="k", partitions=BUCKETS)
    advance_dataset(
        dataset, lake=lake, systems={"lake": streams}, spark=lambda: spark, by="benchmark"
    )
    view = StoredVersions(lake, dataset).current()
    assert view is not None
    return view


class Joins:
    """The records of applications that join the stream, as the step compiles a batch of all of
    them.

    Each application's datasets are one version by several names: a chain joins as many versions of
    that size.
    """

    def __init__(self, spark: SparkSession, lake: Lake, view: VersionReader) -> None:
        self._streams, self._view = LakeStreams(lake), view
        self._runtime = Runtime(lake, {"lake": self._streams}, lambda: spark, by="benchmark")

    def frame(self, names: Sequence[str]) -> DataFrame:
        context, views = self._context(names)
        inputs = BatchInputs(
            Intent(
                batch=1,
                run="benchmark",
                clock=datetime.now(UTC),
                ranges=self._streams.all_ranges("facts"),
            ),
            views,
        )
        return compiled(PlannedBatch.of(context, inputs))

    def prove(self, names: Sequence[str]) -> None:
        """Print what Spark does; no exchange may be in it, of the dataset or of the records."""
        context, views = self._context(names)
        proof = analyze_batch(context, views)
        assert not [
            join for join in proof.joins if join.dataset_exchanges or join.stream_exchanges
        ], proof.render()
        assert "Exchange" not in self.frame(names)._jdf.queryExecution().executedPlan().toString()
        print(f"{proof.render()}\n")

    def _context(self, names: Sequence[str]) -> tuple[StepContext, Mapping[str, VersionReader]]:
        app = Application("joins")
        records = app.input_stream("lake.facts")
        for name in names:
            dataset = unbounded_dataset(name, input="lake.table", key="k", partitions=BUCKETS)
            records = records.join(app.table(dataset), on="k", how="left", prefix=f"{name}_")
        records.send_to(app.output_stream("lake.out", key="k", partitions=BUCKETS))
        plan = plan_application(app, systems=self._runtime.systems)
        return StepContext(self._runtime, app, plan, FanOut()), dict.fromkeys(names, self._view)


class Sent:
    """Outputs that keep the records that they are sent, and write none."""

    def __init__(self) -> None:
        self.frames: list[DataFrame] = []

    def send(self, operator: str, frame: DataFrame, stream: str, **_: Any) -> None:
        self.frames.append(frame)


def compiled(planned: PlannedBatch) -> DataFrame:
    """Return the records that a batch sends to its output."""
    outputs: Any = Sent()
    unused: Any = None
    with ExitStack() as opened:
        spark = SparkOpened.of(planned, opened)
        frames = SparkFrames(planned, spark.times, spark.kept)
        local_tables = WrittenLocalTables(planned, spark.writers)
        datasets = SparkDatasets(planned, local_tables)
        state = SparkState(planned, spark.times, spark.writers)
        parts = SparkParts(planned, frames, datasets, unused, outputs, local_tables, unused, state)
        run_operators(planned, SparkCompiler(parts, spark.times).hand_on)
    (frame,) = outputs.frames
    return frame


class Shuffled:
    """The same join of the same files by their paths, as Spark does it that knows nothing of
    their buckets.
    """

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self._spark = spark
        self._facts = [
            str(path) for path in sorted((root / "streams" / "facts").rglob("*.parquet"))
        ]
        self._table = [str(path) for path in sorted((root / "datasets").rglob("*.parquet"))]

    def frame(self) -> DataFrame:
        table = self._spark.read.parquet(*self._table).selectExpr(
            "k", "a AS first_a", "n AS first_n"
        )
        return self._spark.read.parquet(*self._facts).join(table, "k", "left")


def counted(frame: DataFrame) -> tuple[int, int]:
    from pyspark.sql import functions as F

    rows, matches = frame.agg(F.count(F.lit(1)), F.count("first_n")).collect()[0]
    return rows, matches

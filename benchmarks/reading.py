"""Reading an unbounded dataset with deltas that are not compacted: whole, and joined with a
stream.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.timing import alternate, show
from dagster_adjunct import (
    LakeStreams,
    Schema,
    advance_dataset,
    open_dataset,
    open_lake,
    session_scope,
    unbounded_dataset,
)
from dagster_adjunct.changes import DeltaCompaction

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from pyspark.sql import DataFrame

BUCKETS = 8
CHANGES = 30_000
DELTAS, MANY = 3, 20
CHUNK = 1_000_000
TABLE = Schema.of(k="string", a="string", b="string", c="string", d="string", e="string")
STREAM = Schema.of(k="string", n="bigint")


def run(rounds: int, count: int = 3_000_000, records: int = 500_000) -> None:
    import numpy as np

    with TemporaryDirectory() as folder, session_scope(master="local[2]") as session:
        spark = session()
        lake = open_lake(Path(folder) / "lake")
        streams = LakeStreams(lake)
        systems = {"lake": streams}
        streams.create("table", schema=TABLE, key=["k"], partitions=BUCKETS)
        for start in range(0, count, CHUNK):
            keys = np.arange(start, min(start + CHUNK, count), dtype=np.int64)
            streams.append("table", table(keys, 0), producer="fill", sequence=start + 1)
        by_hand = DeltaCompaction(inside_commit=False)
        dataset = unbounded_dataset(
            "table", input="lake.table", key="k", partitions=BUCKETS, compaction=by_hand
        )
        first = advance_dataset(
            dataset, lake=lake, systems=systems, spark=lambda: spark, by="benchmark"
        ).version
        assert first is not None
        chance = np.random.default_rng(7)
        versions, masks = dict[int, str](), list[float]()
        for number in range(1, MANY + 1):
            keys = chance.choice(count, min(CHANGES, count), replace=False)
            streams.append("table", table(keys, number), producer="changes", sequence=number)
            report = advance_dataset(
                dataset, lake=lake, systems=systems, spark=lambda: spark, by="benchmark"
            )
            versions[number] = str(report.version)
            masks.append(
                report.seconds["mask"] / (sum(report.seconds.values()) - report.seconds["mask"])
            )
        streams.create("facts", schema=STREAM, key=["k"], partitions=BUCKETS)
        streams.append(
            "facts", facts(chance.integers(0, count, records)), producer="facts", sequence=1
        )

        base, merged, many = (
            open_dataset(lake, "table", version=v)
            for v in (first, versions[DELTAS], versions[MANY])
        )
        print(
            f"read: {count:,} rows x {len(TABLE.names)} text columns, {DELTAS} and {MANY} deltas of"
            f" {CHANGES:,}"
        )
        print(
            f"  a mask took {median(masks):.2f} of its commit's time, at most"
            f" {max(masks):.2f} (goal: at most 1)"
        )
        for _ in range(2):  # all warm
            rows = {whole(view.frame(spark)) for view in (base, merged, many)}
        assert rows == {count}, rows
        measured = alternate(
            rounds,
            base=lambda _: whole(base.frame(spark)),
            with_deltas=lambda _: whole(merged.frame(spark)),
            with_many=lambda _: whole(many.frame(spark)),
        )
        show(measured, "with_deltas", "base", "at most 1.3")
        print(
            "  with_many / base ="
            f" {measured['with_many'].median / measured['base'].median:.2f} (goal: at most 1.6)\n"
        )

        def joined(_: int) -> int:
            side = merged.frame(spark)
            return whole(
                streams.read(spark, streams.all_ranges("facts")).join(
                    side.hint("merge"), "k", "left"
                )
            )

        def shuffled(number: int) -> int:
            """The same entries joined as if they lay in plain files."""
            spark.conf.set("spark.sql.sources.bucketing.enabled", "false")
            spark.conf.set("spark.sql.shuffle.partitions", str(BUCKETS))
            try:
                return joined(number)
            finally:
                spark.conf.unset("spark.sql.sources.bucketing.enabled")
                spark.conf.unset("spark.sql.shuffle.partitions")

        print(f"join: {records:,} records of a stream with the same table")
        assert {joined(0), shuffled(0)} == {records}
        show(
            alternate(rounds, joined=joined, shuffled=shuffled),
            "shuffled",
            "joined",
            "at least 1.5",
        )


def whole(frame: DataFrame) -> int:
    """Read every column of every row; return the number of rows."""
    from pyspark.sql import functions as F

    counts = frame.agg(F.count(F.lit(1)), *[F.count(name) for name in frame.columns]).collect()[0]
    return int(counts[0])


def table(keys: np.ndarray, version: int) -> pa.Table:
    """Return rows of six text columns; `version` makes their values differ."""
    scattered = (keys * 2_654_435_761 + version) % 1_000_003
    return _columns(
        k=("key-", keys),
        a=("value ", scattered),
        b=("group ", scattered % 1000),
        c=("text ", scattered * 7919),
        d=("kind ", scattered % 17),
        e=("more of it ", scattered % 100_000),
    )


def facts(keys: np.ndarray) -> pa.Table:
    """Return records of a stream that is keyed as the table is."""
    import pyarrow as pa

    return _columns(k=("key-", keys)).append_column("n", pa.array(keys))


def _columns(**columns: tuple[str, np.ndarray]) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pa.table(
        {
            name: pc.binary_join_element_wise(prefix, pc.cast(pa.array(numbers), pa.string()), "")
            for name, (prefix, numbers) in columns.items()
        }
    )

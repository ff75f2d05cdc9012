"""Lake streams through Spark: the same records as without it, in plans without an exchange."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import (
    ManifestMismatchError,
    ProducerConflictError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import AppendOptions, OffsetRange
from tests.resources.streams.stream_helpers import SCHEMA
from tests.rounds import rounds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
Records = Callable[..., pa.Table]
ORDER = [("__partition", "ascending"), ("__offset", "ascending")]


@pytest.fixture
def streams(local_lake: Lake) -> LakeStreams:
    return LakeStreams(local_lake)


def collected(df: DataFrame) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = df.toArrow().sort_by(ORDER).to_pylist()
    return rows


def plan_of(df: DataFrame) -> str:
    plan: str = df._jdf.queryExecution().executedPlan().toString()
    return plan


@pytest.mark.rounds
def test_spark_reads_what_arrow_reads_over_any_range(
    spark: SparkSession, streams: LakeStreams, records: Records
) -> None:
    streams.create(
        "s", schema=SCHEMA, key=["k"], partitions=4, compaction=CompactionPolicy(min_segments=3)
    )
    chance = random.Random(5)
    keys = [None, "", "a", "bc", "déjà", "x" * 40]
    for sequence in range(8):
        rows = [
            (chance.choice(keys) or (chance.choice(keys)), chance.randrange(99)) for _ in range(30)
        ]
        marks = [chance.random() < 0.2 for _ in rows]
        end = f"v{sequence}" if sequence % 3 == 2 else None
        streams.append(
            "s",
            records(*rows, __tombstone=marks),
            producer="p",
            sequence=sequence,
            end_of_dataset=end,
        )
        if sequence == 4:
            assert streams.maintain("s").merged_segments == 5
    upcoming = {
        ssp: int(offset) for ssp, offset in streams.upcoming(streams.partitions("s")).items()
    }
    ranges = [streams.all_ranges("s")]
    for _ in range(rounds(2, 5)):
        chosen = {}
        for ssp, end in upcoming.items():
            if chance.random() < 0.7:
                start = chance.randint(0, end)
                chosen[ssp] = OffsetRange(str(start), str(chance.randint(start, end)))
        ranges.append(chosen or streams.all_ranges("s"))
    for chosen in ranges:
        frame = streams.read(spark, chosen)
        assert collected(frame) == streams.read_arrow(chosen).to_pylist()
        assert frame.count() == streams.records_between(chosen)
        assert "Exchange" not in plan_of(frame)
    empty = streams.read(spark, {ssp: OffsetRange("1", "1") for ssp in upcoming})
    assert empty.count() == 0
    assert empty.schema == streams.read(spark, streams.all_ranges("s")).schema


def test_a_join_on_the_key_moves_only_the_other_side(
    spark: SparkSession, streams: LakeStreams, records: Records
) -> None:
    streams.create("s", schema=SCHEMA, key=["k"], partitions=4)
    streams.create("t", schema=SCHEMA, key=["k"], partitions=4)
    table = records(*[(f"k{i % 20}", i) for i in range(100)])
    for sequence in range(3):
        streams.append("s", table, producer="p", sequence=sequence)
    streams.append("t", table.slice(0, 20), producer="p", sequence=0)
    cut = {ssp: OffsetRange("1", str(int(r.end) - 1)) for ssp, r in streams.all_ranges("s").items()}
    left = streams.read(spark, cut)
    right = (
        streams.read(spark, streams.all_ranges("t")).select("k", "v").withColumnRenamed("v", "w")
    )
    joined = left.join(right, "k")
    assert "Exchange" not in plan_of(joined)
    assert joined.count() == 300 - 2 * 4
    moved = left.join(
        spark.createDataFrame([(f"k{i}", i) for i in range(20)], "k string, w int"), "k"
    )
    assert plan_of(moved).count("Exchange hashpartitioning") == 1


def test_a_partition_is_sparks_own_hash_of_the_key(
    spark: SparkSession, streams: LakeStreams
) -> None:
    from pyspark.sql import functions as F

    schema = Schema.of(a="string", b="bigint", c="date", v="int")
    streams.create("s", schema=schema, key=["a", "b", "c"], partitions=7)
    made = spark.range(200).select(
        F.when(F.col("id") % 5 != 0, F.concat(F.lit("ké"), F.col("id"))).alias("a"),
        F.when(F.col("id") % 7 != 0, F.col("id") * 1_000_003).alias("b"),
        F.date_add(F.lit("2020-01-01"), F.col("id").cast("int")).alias("c"),
        F.col("id").cast("smallint").alias("v"),
    )
    streams.append("s", made.toArrow(), producer="arrow", sequence=0)
    streams.append("s", made, producer="spark", sequence=0, options=AppendOptions(order_by=("v",)))
    table = streams.read_arrow(streams.all_ranges("s"))
    frame = spark.createDataFrame(
        table.select(["a", "b", "c", "__partition"]).rename_columns(["a", "b", "c", "p"])
    )
    assert frame.where("p != pmod(hash(a, b, c), 7)").count() == 0
    assert frame.count() == 400


def test_a_frame_is_appended_once_and_in_the_order_asked_for(
    spark: SparkSession, streams: LakeStreams, records: Records
) -> None:
    from pyspark.sql import functions as F

    streams.create("s", schema=SCHEMA, key=["k"], partitions=4)
    streams.create("copy", schema=SCHEMA, key=["k"], partitions=4)
    rows = [(f"k{i % 9}", i) for i in range(200)]
    streams.append("s", records(*rows), producer="p", sequence=0)
    source = streams.read(spark, streams.all_ranges("s"))

    def copy(df: DataFrame, sequence: int, partitioned: bool = False) -> bool:
        order = ["__partition", "__offset"]
        frame = df.drop("__timestamp", "__tombstone")
        return streams.append(
            "copy",
            frame,
            producer="app",
            sequence=sequence,
            options=AppendOptions(order_by=order, partitioned=partitioned),
        ).duplicate

    assert not copy(source, 0)
    assert copy(source.repartition(3), 0)
    assert not copy(source, 1, partitioned=True)
    with pytest.raises(ProducerConflictError):
        copy(source.withColumn("v", F.col("v") + 1), 0)
    table = streams.read_arrow(streams.all_ranges("copy"), columns=["v"])
    for partition in range(4):
        values = [row["v"] for row in table.to_pylist() if row["__partition"] == partition]
        assert values == sorted(values[: len(values) // 2]) * 2
    assert table.num_rows == 400
    with pytest.raises(ManifestMismatchError) as caught:
        copy(source.repartition(4, "v"), 2, partitioned=True)
    assert caught.value.partition_by == "k"
    assert streams.describe("copy")["records"] == 400


@pytest.mark.parametrize("name", ["*", "a.b", "e`f"])
def test_a_column_may_have_any_name(spark: SparkSession, streams: LakeStreams, name: str) -> None:
    streams.create("named", schema=Schema.of({"k": "string", name: "int"}), key=["k"], partitions=2)
    frame = (
        spark.createDataFrame([("a", 1), ("b", 2), ("c", 3)], ["k", "v"])
        .selectExpr("k", "int(v)")
        .toDF("k", name)
    )
    assert streams.append("named", frame, producer="p", sequence=0).rows == 3
    assert (
        streams.append(
            "named", frame, producer="p", sequence=1, options=AppendOptions(one_task=True)
        ).rows
        == 3
    )
    assert sorted(streams.read_arrow(streams.all_ranges("named")).column(name).to_pylist()) == [
        1,
        1,
        2,
        2,
        3,
        3,
    ]


def test_a_tombstone_makes_another_content(
    spark: SparkSession, streams: LakeStreams, records: Records
) -> None:
    from pyspark.sql import functions as F

    streams.create("s", schema=SCHEMA, partitions=1)
    frame = spark.createDataFrame([("a", 1)], "k string, v bigint")
    streams.append("s", frame, producer="p", sequence=0)
    with pytest.raises(ProducerConflictError):
        streams.append("s", frame.withColumn("__tombstone", F.lit(True)), producer="p", sequence=0)


def test_a_frame_that_does_not_fit_names_the_column(
    spark: SparkSession, streams: LakeStreams
) -> None:
    streams.create("s", schema=SCHEMA, partitions=1)
    with pytest.raises(SchemaMismatchError) as caught:
        streams.append(
            "s", spark.createDataFrame([("a", "1")], "k string, v string"), producer="p", sequence=0
        )
    assert (caught.value.stream, caught.value.column) == ("lake.s", "v")
    with pytest.raises(SchemaMismatchError) as caught:
        streams.append(
            "s",
            spark.createDataFrame([("a", 1, 2)], "k string, v int, w int"),
            producer="p",
            sequence=0,
        )
    assert (caught.value.stream, caught.value.column) == ("lake.s", "w")
    streams.append(
        "s", spark.createDataFrame([("a", 1)], "k string, v int"), producer="p", sequence=0
    )
    assert streams.read_arrow(streams.all_ranges("s")).column("v").to_pylist() == [1]


def test_a_stray_or_missing_file_is_found_before_anything_is_read(
    spark: SparkSession, streams: LakeStreams, records: Records
) -> None:
    streams.create("s", schema=SCHEMA, partitions=1)
    streams.append("s", records(("a", 1)), producer="p", sequence=0)
    (file,) = streams.lake.store.list("streams/s/data/")
    stray = file.key.replace("part-00000", "part-00007")
    streams.lake.store.put(stray, streams.lake.store.get(file.key).data)
    with pytest.raises(ManifestMismatchError) as caught:
        streams.read(spark, streams.all_ranges("s"))
    assert str(caught.value.key).endswith(stray.rsplit("/", 1)[-1])
    streams.lake.store.delete(stray)
    assert streams.read(spark, streams.all_ranges("s")).count() == 1


def test_hundreds_of_small_segments_are_one_scan(
    spark: SparkSession, streams: LakeStreams, records: Records
) -> None:
    streams.create("s", schema=SCHEMA, key=["k"], partitions=2)
    for sequence in range(150):
        streams.append("s", records((f"k{sequence}", sequence)), producer="p", sequence=sequence)
    whole = streams.all_ranges("s")
    frame = streams.read(spark, whole)
    assert collected(frame) == streams.read_arrow(whole).to_pylist()
    assert plan_of(frame).count("FileScan") == 1


@pytest.mark.parametrize(
    ("column", "made"),
    [
        ("day", "date_from_unix_date(2932897)"),
        ("at", "timestamp_micros(253402300800000000)"),
        ("at", "timestamp_micros(-62135596800000001)"),
        ("name", "cast(x'636166e9' as string)"),
        ("k", "cast(x'ff' as string)"),
        ("__timestamp", "timestamp_micros(253402300800000000)"),
    ],
)
@pytest.mark.parametrize("key", [["k"], pytest.param([], marks=pytest.mark.long)])
def test_values_that_python_does_not_have_are_refused_from_spark(
    spark: SparkSession, streams: LakeStreams, column: str, made: str, key: list[str]
) -> None:
    kinds = Schema.of(k="string", day="date", at="timestamp", name="string")
    streams.create("s", schema=kinds, key=key, partitions=2 if key else 1)
    good = spark.sql(
        "SELECT * FROM VALUES ('a', date'0001-01-01', timestamp'0001-01-01 00:00:00', 'é',"
        " timestamp'2026-01-01'), ('b', date'9999-12-31', timestamp'9999-12-31 23:59:59.999999',"
        " NULL, NULL) AS t(k, day, at, name, __timestamp)"
    )
    frame = good.selectExpr(
        *[name for name in good.columns if name != column],
        f"if(k = 'b', {made}, `{column}`) as `{column}`",
    )
    with pytest.raises(SchemaMismatchError) as caught:
        streams.append("s", frame, producer="p", sequence=0)
    assert (caught.value.stream, caught.value.column) == ("lake.s", column)
    assert streams.append("s", good, producer="p", sequence=0).rows == 2
    rows = {
        row["k"]: row["day"].year for row in streams.read_arrow(streams.all_ranges("s")).to_pylist()
    }
    assert rows == {"a": 1, "b": 9999}

"""Bucket files through Spark: written by its tasks, read as one bucketed table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.resources.bucketing.files import BucketLayout, Generation, bucketed_frame
from dagster_adjunct.resources.bucketing.writer import (
    WriteOptions,
    write_arrow_buckets,
    write_buckets,
)
from dagster_adjunct.resources.errors import ManifestMismatchError
from dagster_adjunct.resources.objects.local_store import LocalStore
from dagster_adjunct.resources.schemas.schema import Schema, StoredNames

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
SCHEMA = Schema.of(k="string", v="bigint")
LAYOUT = BucketLayout(SCHEMA, ("k",), 3, key=("k",))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "a läke, with 100% 'odd' names")


def test_spark_and_plain_python_write_the_same_buckets(
    spark: SparkSession, store: LocalStore
) -> None:
    from pyspark.sql import functions as F

    frame = spark.range(300).select(
        F.concat(F.lit("clé "), F.col("id") % 50).alias("k"), F.col("id").alias("v")
    )
    options = WriteOptions("d", last_per_key=True)
    by_spark = write_buckets(frame, store, "d/data/one", LAYOUT, options, order_by=["k", "v"])
    in_order = frame.toArrow().sort_by([("k", "ascending"), ("v", "ascending")])
    by_arrow = write_arrow_buckets(in_order, store, "d/data/two", LAYOUT, options)
    assert [(f.bucket, f.rows, f.min_key, f.max_key) for f in by_spark] == [
        (f.bucket, f.rows, f.min_key, f.max_key) for f in by_arrow
    ]
    assert sum(f.rows for f in by_spark) == 50

    generations = [
        Generation(0, "d/data/one", tuple(by_spark)),
        Generation(5, "d/data/two", tuple(by_arrow)),
    ]
    both = bucketed_frame(spark, store, "dataset 'd'", LAYOUT, generations)
    counted = both.groupBy("k").agg(F.count("*").alias("n"), F.min("v"), F.max("v"))
    assert "Exchange" not in counted._jdf.queryExecution().executedPlan().toString()
    assert sorted(tuple(row) for row in counted.collect()) == sorted(
        (f"clé {i}", 2, 250 + i, 250 + i) for i in range(50)
    )
    assert {row[0] for row in both.select("__gen").distinct().collect()} == {0, 5}


def test_a_digest_does_not_depend_on_the_order_of_rows(
    spark: SparkSession, store: LocalStore
) -> None:
    from pyspark.sql import functions as F

    frame = spark.range(100).select(F.col("id").cast("string").alias("k"), F.col("id").alias("v"))
    layout = BucketLayout(SCHEMA, ("k",), 3)  # without a key: with one, the writer wants its order
    facts = []
    for attempt, column in (("up", F.col("v")), ("down", -F.col("v"))):
        ordered = frame.withColumn("position", column)
        files = write_buckets(
            ordered, store, f"d/data/{attempt}", layout, WriteOptions("d"), order_by=["position"]
        )
        facts.append([(f.bucket, f.rows, f.digest) for f in files])
    assert facts[0] == facts[1]
    other = write_buckets(
        frame.withColumn("v", F.col("v") + 1),
        store,
        "d/data/x",
        layout,
        WriteOptions("d"),
        order_by=[],
    )
    assert [f.digest for f in other] != [digest for _, _, digest in facts[0]]


def test_a_join_sorts_only_what_has_several_files_in_a_bucket(
    spark: SparkSession, store: LocalStore
) -> None:
    rows = {f"k{number * 7919 % 1000:04d}": number for number in range(0, 1000, 3)}
    frame = spark.createDataFrame(list(rows.items()), "k string, v bigint")
    files = write_buckets(frame, store, "d/data/one", LAYOUT, WriteOptions("d"), order_by=["k"])
    newer = spark.createDataFrame([("k0000", -1), ("z", -2)], "k string, v bigint")
    more = write_buckets(newer, store, "d/data/two", LAYOUT, WriteOptions("d"), order_by=["k"])
    one, two = Generation(0, "d/data/one", tuple(files)), Generation(1, "d/data/two", tuple(more))
    asked = [f"k{number:04d}" for number in range(1000)] + ["z"]
    keys = spark.createDataFrame([(key,) for key in asked], "k string").repartition(3, "k")
    sorts = []
    for generations in ([one], [one, two]):
        joined = keys.join(
            bucketed_frame(spark, store, "d", LAYOUT, generations), "k", "inner"
        ).select("k", "v")
        plan = joined._jdf.queryExecution().executedPlan().toString()
        assert "SortMergeJoin" in plan
        sorts.append(plan.count(" Sort ["))
        stored = [*rows.items(), *([("k0000", -1), ("z", -2)] if two in generations else [])]
        assert sorted(map(tuple, joined.collect())) == sorted(
            pair for pair in stored if pair[0] in asked
        )
    assert sorts == [1, 2]


@pytest.mark.parametrize(
    ("kind", "value"),
    [("string", "555"), ("int", 2)],
    ids=["a text", "the number of the column it moves to"],
)
def test_a_value_that_moves_from_one_column_to_another_changes_the_digest(
    spark: SparkSession, store: LocalStore, kind: str, value: Any
) -> None:
    layout = BucketLayout(Schema.of(k="string", home=kind, work=kind), (), 1, key=("k",))
    digests = []
    for attempt, row in enumerate([("Ada", value, None), ("Ada", None, value)]):
        frame = spark.createDataFrame([row], layout.ddl)
        digests.append(
            write_buckets(
                frame, store, f"d/data/{attempt}", layout, WriteOptions("d"), order_by=[]
            )[0].digest
        )
    assert digests[0] != digests[1]


def test_a_stray_and_a_missing_file_are_named(spark: SparkSession, store: LocalStore) -> None:
    frame = spark.createDataFrame([("a", 1), ("b", 2), ("c", 3)], "k string, v bigint")
    files = write_buckets(frame, store, "d/data/one", LAYOUT, WriteOptions("d"), order_by=["k"])
    generation = Generation(0, "d/data/one", tuple(files))
    stray = f"d/data/one/{files[0].name.replace('one', 'two')}"
    store.put(stray, store.get(f"d/data/one/{files[0].name}").data)
    with pytest.raises(ManifestMismatchError) as caught:
        bucketed_frame(spark, store, "dataset 'd'", LAYOUT, [generation])
    assert str(caught.value.key).startswith("d/data/one/part-")
    store.delete(stray)
    assert bucketed_frame(spark, store, "dataset 'd'", LAYOUT, [generation]).count() == 3
    gone = Generation(1, "d/data/one", (*files, files[0].__class__(9, "part-gone", 1, 1, "")))
    with pytest.raises(ManifestMismatchError) as caught:
        bucketed_frame(spark, store, "dataset 'd'", LAYOUT, [gone])
    assert caught.value.key == "d/data/one/part-gone"


def test_no_generation_is_an_empty_frame_with_the_columns(
    spark: SparkSession, store: LocalStore
) -> None:
    frame = bucketed_frame(spark, store, "dataset 'd'", LAYOUT, [Generation(0, "d/data/none", ())])
    assert frame.columns == ["k", "v", "__gen"]
    assert frame.count() == 0


def test_renamed_columns_keep_the_buckets_and_the_order_of_files(
    spark: SparkSession, store: LocalStore
) -> None:
    schema = Schema.of(k="string", n="bigint", s="struct<b:int,a:string>")
    names = StoredNames((((("k",)), "key"), (("n",), "v"), (("s", "b"), "b#2")))
    layout = BucketLayout(schema, ("k",), 3, key=("k",), names=names)
    rows = [(f"k{number:03d}", number, (number, str(number))) for number in range(100)]
    frame = spark.createDataFrame(rows, schema.ddl())
    options = WriteOptions("d")
    files = write_buckets(frame, store, "d/data/one", layout, options, order_by=["k"])
    read = bucketed_frame(
        spark, store, "d", layout, [Generation(0, "d/data/one", tuple(files))]
    ).drop("__gen")
    assert read.schema.names == ["k", "n", "s"]
    assert sorted((k, n, tuple(s)) for k, n, s in read.collect()) == rows
    keys = spark.createDataFrame([(row[0],) for row in rows], "k string").repartition(3, "k")
    joined = keys.join(read, "k").where("n < 5 and s.b > 2")
    plan = joined._jdf.queryExecution().executedPlan().toString()
    assert plan.count("Exchange hashpartitioning") == 1  # that of the keys
    assert plan.count(" Sort [") == 1
    assert "LessThan(v,5)" in plan  # row groups are skipped
    assert sorted(row.n for row in joined.collect()) == [3, 4]
    raw = pq.read_table(pa.BufferReader(store.get(f"d/data/one/{files[0].name}").data))
    assert raw.schema.names == ["key", "v", "s"]
    assert [field.name for field in raw.schema.field("s").type] == ["b#2", "a"]

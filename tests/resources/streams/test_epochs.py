"""Epochs of records: kept with a stream's records, 0 where none was given, and free where there
are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.resources.errors import ProducerConflictError, SchemaMismatchError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import AppendOptions
from tests.resources.streams.stream_helpers import SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Records = Callable[..., pa.Table]


def ints(*values: int | None) -> pa.Array:
    return pa.array(values, pa.int32())


def epochs(streams: LakeStreams, stream: str = "s") -> dict[int, int]:
    """Return the epoch of each record by its value."""
    table = streams.read_arrow(streams.all_ranges(stream))
    assert table.column("__epoch").null_count == 0
    return dict(
        zip(table.column("v").to_pylist(), table.column("__epoch").to_pylist(), strict=True)
    )


def files(streams: LakeStreams, stream: str = "s") -> list[tuple[str, list[str]]]:
    """Return the checksum and the columns of each data file, in order of appends and partitions."""
    prefix, file_facts = streams.lake.stream_prefix(stream), []
    for segment in streams.state(stream).state.index.tail:
        for file in segment.files:
            data = streams.lake.store.get(segment.key_of(prefix, file)).data
            file_facts.append((file.sha256, pq.read_schema(pa.BufferReader(data)).names))
    return file_facts


@pytest.fixture
def s(streams: LakeStreams) -> LakeStreams:
    streams.create(
        "s", schema=SCHEMA, key=["k"], partitions=2, compaction=CompactionPolicy(min_segments=2)
    )
    return streams


def test_a_table_s_epochs_are_kept_and_where_there_is_none_it_is_0(
    s: LakeStreams, records: Records
) -> None:
    s.append("s", records(("a", 1), ("b", 2)), producer="p", sequence=0)
    given = records(("a", 3), ("b", 4), ("c", 5), ("a", 6)).append_column(
        "__epoch", ints(7, None, 0, 2)
    )
    s.append("s", given, producer="p", sequence=1)
    assert epochs(s) == {1: 0, 2: 0, 3: 7, 4: 0, 5: 0, 6: 2}


def test_records_without_epochs_have_no_column_for_them_and_zeros_are_none(
    s: LakeStreams, records: Records
) -> None:
    rows = [(f"k{i}", i) for i in range(20)]
    s.append("s", records(*rows), producer="p", sequence=0)
    assert s.append(
        "s", records(*rows, __epoch=ints(*[0] * 20)), producer="p", sequence=0
    ).duplicate
    s.append("s", records(*rows, __epoch=ints(*[0] * 20)), producer="p", sequence=1)
    s.append("s", records(*rows, __epoch=ints(*[1] * 20)), producer="p", sequence=2)
    plain, zeros, ones = (files(s)[at : at + 2] for at in (0, 2, 4))
    assert plain == zeros
    assert [("__epoch" in names) for _, names in plain + ones] == [False, False, True, True]


def test_the_same_records_of_another_epoch_are_other_records(
    s: LakeStreams, records: Records
) -> None:
    s.append("s", records(("a", 1), __epoch=ints(1)), producer="p", sequence=0)
    assert s.append("s", records(("a", 1), __epoch=ints(1)), producer="p", sequence=0).duplicate
    with pytest.raises(ProducerConflictError):
        s.append("s", records(("a", 1), __epoch=ints(2)), producer="p", sequence=0)


@pytest.mark.parametrize("values", [pa.array([1], pa.int64()), pa.array(["1"])])
def test_an_epoch_is_an_int(s: LakeStreams, records: Records, values: pa.Array) -> None:
    with pytest.raises(SchemaMismatchError) as failure:
        s.append("s", records(("a", 1)).append_column("__epoch", values), producer="p", sequence=0)
    assert failure.value.facts == {"stream": "lake.s", "column": "__epoch"}


def test_compaction_keeps_epochs_also_next_to_files_without_them(
    s: LakeStreams, records: Records
) -> None:
    expected: dict[int, int] = {}
    for sequence in range(6):
        rows = [(f"k{i}", 10 * sequence + i) for i in range(10)]
        marks = {} if sequence % 2 else {"__epoch": ints(*[sequence] * 10)}
        s.append("s", records(*rows, **marks), producer="p", sequence=sequence)
        expected |= {value: 0 if sequence % 2 else sequence for _, value in rows}
    before = s.read_arrow(s.all_ranges("s"))
    assert s.maintain("s").merged_segments == 6
    assert epochs(s) == expected
    assert s.read_arrow(s.all_ranges("s")).equals(before)


@pytest.mark.spark
def test_spark_reads_and_writes_epochs_also_next_to_files_without_them(
    spark: SparkSession, local_lake: Lake, records: Records
) -> None:
    from pyspark.sql import functions as F

    streams = LakeStreams(local_lake)
    for name in ("s", "copy"):
        streams.create(name, schema=SCHEMA, key=["k"], partitions=2)
    streams.append("s", records(*[(f"k{i}", i) for i in range(8)]), producer="p", sequence=0)
    given = records(*[(f"k{i}", i) for i in range(8, 16)], __epoch=ints(*[i % 3 for i in range(8)]))
    streams.append("s", given, producer="p", sequence=1)
    expected = {i: 0 if i < 8 else (i - 8) % 3 for i in range(16)}
    frame = streams.read(spark, streams.all_ranges("s"))
    assert {row.v: row["__epoch"] for row in frame.collect()} == expected == epochs(streams)

    def copied(df: DataFrame, sequence: int) -> bool:
        return streams.append(
            "copy",
            df,
            producer="app",
            sequence=sequence,
            options=AppendOptions(order_by=("__partition", "__offset")),
        ).duplicate

    assert not copied(frame, 0)
    assert epochs(streams, "copy") == expected
    assert copied(frame, 0)
    with pytest.raises(ProducerConflictError):
        copied(frame.withColumn("__epoch", F.col("__epoch") + 1), 0)
    # No column says the same as zeros: a batch that was begun before streams had epochs ends as it
    # began.
    assert not copied(frame.where("v < 8").drop("__epoch"), 1)
    assert copied(frame.where("v < 8"), 1)
    with pytest.raises(SchemaMismatchError) as caught:
        copied(frame.withColumn("__epoch", F.lit(1).cast("bigint")), 2)
    assert (caught.value.stream, caught.value.column) == ("lake.copy", "__epoch")

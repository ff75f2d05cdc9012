"""Kafka as a data source of Spark: ranges of topics as DataFrames."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from dagster_adjunct.resources.lazy_modules import np, pa
from dagster_adjunct.resources.schemas.values import MICROS
from dagster_adjunct.resources.spark.tasks import encode_task_errors
from dagster_adjunct.resources.streams.kafka import record_formats
from dagster_adjunct.resources.streams.kafka.client import TopicFacts
from dagster_adjunct.resources.streams.kafka.consume import TopicRange, is_marker, read_ranges
from dagster_adjunct.resources.streams.kafka.formats import Raw
from dagster_adjunct.resources.streams.kafka.partitioner import check_key_partitions
from dagster_adjunct.resources.streams.kafka.produce import RESERVED
from dagster_adjunct.resources.streams.kafka.record_formats import HEADERS, KEY, VALUE, KafkaTopic
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    OFFSET,
    PARTITION,
    RECORD_META_DDL,
    TIMESTAMP,
    TOMBSTONE,
)

if TYPE_CHECKING:
    from confluent_kafka import Message
    from pyspark.sql import DataFrame, SparkSession

DATA_SOURCE_NAME = "adjunct-kafka"
MAX_TASK_OFFSETS = 250_000
MIN_TASK_OFFSETS = 10_000
EPOCH_HEADER = f"{RESERVED}epoch"
_registered: WeakSet[SparkSession] = WeakSet()
_GREATEST_MS = MICROS.last // 1000  # of the year 9999


@dataclass
class _TaskRanges(InputPartition):
    """The ranges that one task reads: part of a long range, or several short ones."""

    ranges: tuple[TopicRange, ...]


def records_frame(
    spark: SparkSession, topic: TopicFacts, ranges: Sequence[TopicRange]
) -> DataFrame:
    """Return the records of these ranges, without markers, with the topic's columns and those of
    RECORD_META.

    A long range is read by several tasks, several short ones by one. The ranges are fixed, so
    reading the frame again returns the same records.
    """
    if spark not in _registered:
        spark.dataSource.register(KafkaSource)
        _registered.add(spark)
    plan = base64.b64encode(pickle.dumps((topic, ranges))).decode()
    return spark.read.format(DATA_SOURCE_NAME).option("plan", plan).load()


class KafkaSource(DataSource):
    """The Spark data source behind `records_frame`.

    Spark does not know its size, so a session that broadcasts small tables does not broadcast it.
    """

    @classmethod
    def name(cls) -> str:
        return DATA_SOURCE_NAME

    def schema(self) -> str:
        topic, _ = self._plan()
        return f"{topic.declared.schema().ddl()}, {RECORD_META_DDL}"

    def reader(self, schema: Any) -> DataSourceReader:
        return _TopicReader(*self._plan())

    def _plan(self) -> tuple[TopicFacts, Sequence[TopicRange]]:
        """Return the topic and the ranges to read."""
        plan: tuple[TopicFacts, Sequence[TopicRange]] = pickle.loads(
            base64.b64decode(self.options["plan"])
        )
        return plan


class _TopicReader(DataSourceReader):
    """Spark's reader of these ranges of a topic."""

    def __init__(self, topic: TopicFacts, ranges: Sequence[TopicRange]) -> None:
        self.topic = topic
        self.ranges = ranges

    def partitions(self) -> Sequence[InputPartition]:
        # If there were none, Spark would add a partition of another class.
        return list(map(_TaskRanges, split_into_tasks(self.ranges) or [()]))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, _TaskRanges)
        return encode_task_errors(read_record_batches(self.topic, partition.ranges))


def split_into_tasks(ranges: Sequence[TopicRange]) -> list[tuple[TopicRange, ...]]:
    """Return the ranges of each task. A long range is split into parts of up to `MAX_TASK_OFFSETS`
    offsets.

    Short ranges share a task as long as they have at most `MIN_TASK_OFFSETS` offsets in total,
    since starting a consumer takes longer than reading so few. Empty ranges are left out.
    """
    shares: list[tuple[TopicRange, ...]] = []
    few: list[TopicRange] = []
    for wanted in ranges:
        width = wanted.end - wanted.start
        count = -(-width // MAX_TASK_OFFSETS)
        if 0 < width <= MIN_TASK_OFFSETS:
            if sum(earlier.end - earlier.start for earlier in few) + width > MIN_TASK_OFFSETS:
                shares.append(tuple(few))
                few = []
            few.append(wanted)
        else:
            edges = [wanted.start + width * i // count for i in range(count)] + [wanted.end]
            for start, end in pairwise(edges):
                shares.append((replace(wanted, start=start, end=end),))
    if few:
        shares.append(tuple(few))
    return shares


def read_record_batches(
    topic: TopicFacts, ranges: Sequence[TopicRange]
) -> Iterator[pa.RecordBatch]:
    """Yield the records of these ranges (at most one of each partition), in order in each range,
    without markers.
    """
    declared = topic.declared
    raw = declared.key is None and declared.headers is None and isinstance(declared.value, Raw)
    decode: record_formats.BatchFunction
    if raw:
        decode = partial(_raw_records, declared)
    else:
        decode = record_formats.create_decoder(declared, str(topic))
    for wanted, got in read_ranges(topic, ranges):
        headers = [message.headers() for message in got]
        is_record = [not is_marker(of_message) for of_message in headers]
        records = list(compress(got, is_record))
        headers = list(compress(headers, is_record))
        if records:
            check_key_partitions(topic, wanted.partition, records)
            with_headers = declared.headers is not None
            yield decode(_batch_from_messages(records, headers, wanted.partition, with_headers))


def _raw_records(topic: KafkaTopic, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the records of a batch of messages of a topic with raw keys and values, which need
    no decoding.
    """
    columns = {
        "key": batch.column(KEY),
        "value": batch.column(VALUE),
        TOMBSTONE: batch.column(VALUE).is_null(),
    }
    columns |= {name: batch.column(name) for name in (PARTITION, OFFSET, TIMESTAMP, EPOCH)}
    schema = record_formats.records_schema(topic.schema())
    return pa.RecordBatch.from_pydict(columns, schema=schema)


def _batch_from_messages(
    got: list[Message], headers: list[Any], partition: int, with_headers: bool
) -> pa.RecordBatch:
    """Return messages as a batch for the decoder (see `create_decoder`); `headers` are those of
    each message.

    `__headers` is null unless `with_headers`.
    """
    count = len(got)
    header = pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.binary())]))
    if with_headers:
        header_values = pa.array(list(map(_name_parts, headers)), header)
    else:
        header_values = pa.nulls(count, header)
    if any(headers):
        epochs = np.array(list(map(_epoch_of, headers)), np.int32)
    else:
        epochs = np.zeros(count, np.int32)
    columns = {
        PARTITION: pa.array(np.full(count, partition, np.int32)),
        OFFSET: pa.array([message.offset() for message in got], pa.int64()),
        TIMESTAMP: _timestamps([message.timestamp()[1] for message in got]),
        KEY: pa.array([message.key() for message in got], pa.binary()),
        VALUE: pa.array([message.value() for message in got], pa.binary()),
        HEADERS: header_values,
        EPOCH: pa.array(epochs),
    }
    return pa.RecordBatch.from_pydict(columns)


def _name_parts(headers: list[tuple[str, bytes | None]] | None) -> list[dict[str, Any]]:
    """Return a message's headers as Arrow takes them."""
    return [{"name": name, "value": value} for name, value in headers or ()]


def _timestamps(ms: list[int]) -> pa.Array:
    """Return times in ms since the epoch as timestamps; null for a missing one (-1) or one after
    the year 9999.
    """
    given = np.array(ms, np.int64)
    is_missing = (given < 0) | (given > _GREATEST_MS)
    return pa.array(
        np.where(is_missing, 0, given) * 1000,
        pa.timestamp("us", tz="UTC"),
        mask=is_missing if is_missing.any() else None,
    )


def _epoch_of(headers: list[tuple[str, bytes | None]] | None) -> int:
    """Return the epoch in a message's headers, 0 without one or for another value."""
    value = next((value for name, value in headers or () if name == EPOCH_HEADER), None)
    # Adjunct writes no other values; nine digits fit into the column's int.
    if value is not None and value.isdigit() and len(value) < 10:
        return int(value)
    return 0

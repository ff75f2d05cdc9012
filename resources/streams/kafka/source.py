"""The Spark data source for Kafka: each task reads an offset range with a consumer of its own, and decodes it."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from dagster_adjunct.resources.schemas.readable_values import MICROS
from dagster_adjunct.resources.spark.spark_errors import wrapped
from dagster_adjunct.resources.streams.interface.stream_system import (
    EPOCH,
    OFFSET,
    PARTITION,
    RECORD_META,
    RECORD_META_DDL,
    TIMESTAMP,
    TOMBSTONE,
)
from dagster_adjunct.resources.streams.kafka.consume import TopicRange, is_marker, read_ranges
from dagster_adjunct.resources.streams.kafka.record_formats import (
    HEADERS,
    KEY,
    VALUE,
    Raw,
    decoder,
    schema_of,
)
from dagster_adjunct.resources.streams.kafka.task_producer import RESERVED

if TYPE_CHECKING:
    import pyarrow as pa
    from confluent_kafka import Message
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.resources.streams.kafka.kafka_settings import KafkaSettings, KafkaTopic

NAME = "adjunct-kafka"
SPLIT = 250_000
LEAST = 10_000
EPOCH_HEADER = f"{RESERVED}epoch"
_registered: WeakSet[SparkSession] = WeakSet()
_GREATEST_MS = MICROS[1] // 1000  # of the year 9999


@dataclass(frozen=True, slots=True)
class KafkaRead:
    """What is to be read of the stream `stream` ("kafka.flights"), and how its messages are understood."""

    settings: KafkaSettings
    topic: KafkaTopic
    stream: str
    ranges: tuple[TopicRange, ...]

    def ddl(self) -> str:
        return f"{schema_of(self.topic).ddl()}, {RECORD_META_DDL}"


@dataclass
class _TaskRanges(InputPartition):
    """What one task reads: part of a long range, or several short ones."""

    ranges: tuple[TopicRange, ...]


def records_frame(spark: SparkSession, plan: KafkaRead) -> DataFrame:
    """Return the records of these ranges, without markers, with the topic's columns and those of RECORD_META.

    A long range is read by several tasks, short ones together by one. What is read is decided here: reading the frame
    again gives the same.
    """
    if spark not in _registered:
        spark.dataSource.register(KafkaSource)
        _registered.add(spark)
    slim = replace(plan, settings=replace(plan.settings, topics={}))
    return spark.read.format(NAME).option("plan", base64.b64encode(pickle.dumps(slim)).decode()).load()


class KafkaSource(DataSource):
    """What Spark asks; see `records_frame`, which is how it is used."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return _plan(self).ddl()

    def reader(self, schema: Any) -> DataSourceReader:
        return _TopicReader(_plan(self))


class _TopicReader(DataSourceReader):
    def __init__(self, plan: KafkaRead) -> None:
        self.plan = plan

    def partitions(self) -> Sequence[InputPartition]:
        # Spark would give a plan without partitions one of its own.
        return [_TaskRanges(ranges) for ranges in shares(self.plan.ranges)] or [_TaskRanges(())]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, _TaskRanges)
        return wrapped(record_batches(self.plan, partition.ranges))


def shares(ranges: Sequence[TopicRange]) -> list[tuple[TopicRange, ...]]:
    """Return what each task is to read: a range, in several parts of up to `SPLIT` offsets where it is longer.

    Ranges that follow each other go together as long as they have no more than `LEAST` offsets in all: a consumer
    takes longer to start than to read so few. Empty ranges are left out.
    """
    shares: list[tuple[TopicRange, ...]] = []
    few: list[TopicRange] = []
    for wanted in ranges:
        width = wanted.end - wanted.start
        count = -(-width // SPLIT)
        if 0 < width <= LEAST:
            if sum(earlier.end - earlier.start for earlier in few) + width > LEAST:
                shares.append(tuple(few))
                few = []
            few.append(wanted)
        else:
            edges = [wanted.start + width * i // count for i in range(count)] + [wanted.end]
            shares += [(replace(wanted, start=start, end=end),) for start, end in pairwise(edges)]
    return [*shares, tuple(few)] if few else shares


def record_batches(plan: KafkaRead, ranges: Sequence[TopicRange]) -> Iterator[pa.RecordBatch]:
    """Yield the records of ranges of different partitions, those of each in order."""
    decoded = _decoder(plan)
    for wanted, got in read_ranges(plan.settings, ranges):
        kept, headers = got, [message.headers() for message in got]
        if any(headers) and any(map(is_marker, headers)):
            kept = [message for message in got if not is_marker(message.headers())]
            headers = [message.headers() for message in kept]
        if kept:
            yield decoded(_batch(kept, headers, wanted.partition, plan.topic.headers is not None))


def _decoder(plan: KafkaRead) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Return what makes records of messages, with the very schema that Spark was told, down to what may be null."""
    import pyarrow as pa

    raw = plan.topic.key is None and plan.topic.headers is None and isinstance(plan.topic.value, Raw)
    decode = _as_they_are if raw else decoder(plan.topic, plan.stream)
    columns = schema_of(plan.topic).to_arrow()
    meta = (pa.int32(), pa.int64(), pa.timestamp("us", tz="UTC"), pa.bool_(), pa.int32())
    fields = [pa.field(name, kind, name != EPOCH) for name, kind in zip(RECORD_META, meta, strict=True)]
    schema = pa.schema([*columns, *fields])

    def decoded(batch: pa.RecordBatch) -> pa.RecordBatch:
        records = decode(batch)
        return pa.RecordBatch.from_arrays([records.column(name) for name in schema.names], schema=schema)

    return decoded


def _as_they_are(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return raw records without a look at their bytes."""
    columns = {"key": batch.column(KEY), "value": batch.column(VALUE), TOMBSTONE: batch.column(VALUE).is_null()}
    columns |= {name: batch.column(name) for name in (PARTITION, OFFSET, TIMESTAMP, EPOCH)}
    return batch.from_arrays(list(columns.values()), names=list(columns))


def _batch(got: list[Message], headers: list[Any], partition: int, with_headers: bool) -> pa.RecordBatch:
    """Return messages as `decoder` takes them; their headers only where somebody wants them."""
    import numpy as np
    import pyarrow as pa

    count = len(got)
    header = pa.struct([pa.field("name", pa.string()), pa.field("value", pa.binary())])
    shown = ([{"name": name, "value": value} for name, value in of_message or ()] for of_message in headers)
    columns = {
        PARTITION: pa.array(np.full(count, partition, np.int32)),
        OFFSET: pa.array([message.offset() for message in got], pa.int64()),
        TIMESTAMP: _times([message.timestamp()[1] for message in got]),
        KEY: pa.array([message.key() for message in got], pa.binary()),
        VALUE: pa.array([message.value() for message in got], pa.binary()),
        HEADERS: pa.array(list(shown), pa.list_(header)) if with_headers else pa.nulls(count, pa.list_(header)),
        EPOCH: pa.array(
            [_epoch(of_message) for of_message in headers] if any(headers) else np.zeros(count, np.int32), pa.int32()
        ),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _times(ms: list[int]) -> pa.Array:
    """Return times in microseconds; null where the producer gave none, or one after the year 9999."""
    import numpy as np
    import pyarrow as pa

    given = np.array(ms, np.int64)
    none = (given < 0) | (given > _GREATEST_MS)
    return pa.array(np.where(none, 0, given) * 1000, pa.timestamp("us", tz="UTC"), mask=none if none.any() else None)


def _epoch(headers: list[tuple[str, bytes | None]] | None) -> int:
    epoch = next((value for name, value in headers or () if name == EPOCH_HEADER), None)
    return int(epoch) if epoch and epoch.isdigit() and len(epoch) < 10 else 0


def _plan(source: DataSource) -> KafkaRead:
    plan: KafkaRead = pickle.loads(base64.b64decode(source.options["plan"]))
    return plan

"""Appends to Kafka: records are encoded and grouped by key in Spark, and each task hands its share to the broker.

Without transactions an append is at least once: what is repeated, a batch or a failed task, is written again, and
consumers can tell it by the headers `adjunct-producer` and `adjunct-sequence`. With `transactional=True` on the topic
the whole append goes through one task, in one transaction, and is exactly once; see kafka_transactions.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.schemas.quoted_columns import quoted
from dagster_adjunct.resources.schemas.records import ArrowFrame, table_of
from dagster_adjunct.resources.spark.map_arrow import map_in_arrow
from dagster_adjunct.resources.spark.spark_errors import unwrapped, wrapped
from dagster_adjunct.resources.streams.interface.checked_arguments import check_producer, counted_anew
from dagster_adjunct.resources.streams.interface.marker_times import micros_of_marker
from dagster_adjunct.resources.streams.interface.stream_system import (
    EPOCH,
    RECORD_META,
    TIMESTAMP,
    TOMBSTONE,
    AppendResult,
)
from dagster_adjunct.resources.streams.kafka.kafka_transactions import read_marks, spans_of, transact
from dagster_adjunct.resources.streams.kafka.marker_records import marker_text
from dagster_adjunct.resources.streams.kafka.raw_format import Raw
from dagster_adjunct.resources.streams.kafka.record_formats import schema_of
from dagster_adjunct.resources.streams.kafka.records import encode, encode_table
from dagster_adjunct.resources.streams.kafka.task_producer import (
    KEY,
    Sender,
    SentSpan,
    Target,
    TaskAppend,
    records_of,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition
    from dagster_adjunct.resources.streams.kafka.kafka_streams import KafkaStreams, TopicFacts

_TASKS = 32
_DEFAULT_LIMIT = 1_000_000  # where the cluster does not tell the topic's settings
_VISIBLE_SECONDS = 10.0
_LOOK_SECONDS = 0.02
_SPANS = "`partition` INT, `first` BIGINT, `next` BIGINT, `rows` BIGINT, `duplicate` BOOLEAN"
_ORDER = "__order_"

Sent = tuple[list[SentSpan], bool]


def append(
    system: KafkaStreams,
    stream: str,
    data: DataFrame | ArrowFrame | Sequence[Mapping[str, Any]],
    *,
    producer: str,
    sequence: int,
    end_of_dataset: str | None = None,
    order_by: Sequence[str] = (),
    partitioned: bool = False,
    consumed: Mapping[SystemStreamPartition, str] | None = None,
    valid_from: datetime | None = None,
) -> AppendResult:
    """Add records to a topic, from a Spark frame by its tasks, from anything else by this process and in its order.

    `data` has the stream's columns and may have `__tombstone`, `__timestamp` (kept in ms; null is now) and `__epoch`.
    Records of one key go out by one task, in the order of `order_by` (columns that only serve the order are left
    out), to the partition that Kafka's Java client gives the key; records without key go to any. `partitioned` spares
    nothing here: several tasks may have read what comes from one partition of Kafka's. `end_of_dataset` ends a version:
    a marker follows in every partition; `valid_from` (with its zone) is since when that version is valid.

    Without transactions this is at least once. With them it is exactly once per producer and sequence, and `consumed`,
    the next offsets of input from the same cluster, is committed with the records, for the consumer group
    `producer`. The sequences of a producer rise: one below its last is refused.

    Where the result's offsets begin and end, records of other producers may lie in between. Raises
    SchemaMismatchError, PermanentError for a record that Kafka refuses, ProducerConflictError, CommitConflictError, and
    StreamUnavailableError, after which the same call may be repeated.
    """
    check_producer(producer, sequence)
    micros_of_marker(end_of_dataset, valid_from)
    facts = system.topic(stream)
    markers: dict[int, bytes] = {}
    if end_of_dataset is not None:
        check_name("version", end_of_dataset)
        text = marker_text(end_of_dataset, facts.partitions, valid_from=valid_from)
        markers = dict.fromkeys(range(facts.partitions), text)
    what = _append(system, facts, producer, sequence, markers, consumed or {})
    before = system.admin.upcoming(facts.topic, range(facts.partitions))
    if not hasattr(data, "mapInArrow"):
        if order_by or partitioned:
            raise ConfigurationError(
                f"{what.target}: order_by and partitioned are for Spark frames; a table keeps its own order.",
                "Sort the table before, and leave both out.",
                argument="order_by",
            )
        table = table_of(data, str(what.target), schema_of(facts.declared))
        sent = _send(facts)(what, encode_table(table, facts.declared, str(what.target)).to_batches())
    else:
        frame = encode(_prepared(cast("DataFrame", data), facts, order_by), facts.declared, str(what.target))
        sent = _in_tasks(frame, facts, what, len(order_by))
    return _result(system, what, sent, before)


def append_markers(
    system: KafkaStreams,
    stream: str,
    version: str,
    *,
    producer: str,
    sequence: int,
    partitions: Sequence[int] | None = None,
    rows: Mapping[int, int] | None = None,
    checksum: str | None = None,
    valid_from: datetime | None = None,
) -> AppendResult:
    """Add an end-of-dataset marker to these partitions (default: all) and nothing else.

    `rows` tells the records of the version by partition, for the reader to check; `valid_from` (with its zone) is
    since when it is valid.
    """
    check_producer(producer, sequence)
    check_name("version", version)
    micros_of_marker(version, valid_from)
    facts = system.topic(stream)
    chosen = range(facts.partitions) if partitions is None else sorted(set(partitions))
    unfit = [p for p in chosen if not 0 <= p < facts.partitions or (rows is not None and p not in rows)]
    if unfit or not chosen:
        raise ConfigurationError(
            f"marker {version!r}: partitions {unfit} are none of {stream!r}, which has {facts.partitions}, or have no "
            "row count.",
            "Name partitions that the stream has, with a count for each of them or none at all.",
            argument="partitions",
            stream=f"{system.name}.{stream}",
        )
    counts: Mapping[int, int] = rows or {}
    markers = {p: marker_text(version, facts.partitions, counts.get(p), checksum, valid_from) for p in chosen}
    what = _append(system, facts, producer, sequence, markers, {})
    before = system.admin.upcoming(facts.topic, range(facts.partitions))
    return _result(system, what, _send(facts)(what, []), before)


def appended(system: KafkaStreams, stream: str, producer: str, sequence: int) -> AppendResult | None:
    """Return the result of an append that is in already; always None for a topic without transactions.

    Of a transaction that a crash left open nothing is in yet; the next append of the producer settles it. Raises
    ProducerConflictError for a sequence below the last.
    """
    check_producer(producer, sequence)
    facts = system.topic(stream)
    if not facts.declared.transactional:
        return None
    marks = read_marks(_target(system, facts), producer)
    if 0 not in marks or marks[0][0].sequence < sequence:
        return None
    if marks[0][0].sequence > sequence:
        raise counted_anew(f"{system.name}.{stream}", producer, sequence, marks[0][0].sequence)
    return _told(spans_of(marks, sequence), duplicate=True)


def deliver(append: TaskAppend, batches: Iterable[pa.RecordBatch]) -> Sent:
    """Send the batches, then the markers, without a transaction; return where they lie, and False."""
    sender = Sender(append.target)
    try:
        for batch in batches:
            sender.send(records_of(batch, append))
        sender.mark(append)
        return sender.finish(), False
    except BaseException:
        sender.drop()
        raise


def _send(facts: TopicFacts) -> Callable[[TaskAppend, Iterable[pa.RecordBatch]], Sent]:
    return transact if facts.declared.transactional else deliver


def _in_tasks(frame: DataFrame, facts: TopicFacts, append: TaskAppend, ordered_by: int) -> Sent:
    """Send an encoded frame from Spark's tasks: from one in a transaction, else with each key in one task."""
    keyed = facts.declared.key is not None or isinstance(facts.declared.value, Raw)
    if facts.declared.transactional:
        frame = frame.repartition(1)
    elif keyed:
        frame = frame.repartition(min(facts.partitions, _TASKS), KEY)
    if ordered_by:
        frame = frame.sortWithinPartitions(*[f"{_ORDER}{i}" for i in range(ordered_by)])
    frame = frame.select(*[name for name in frame.columns if not name.startswith(_ORDER)])
    if facts.declared.transactional:
        # Spark runs no task at all for a frame that it knows to be empty: the transaction is made here then.
        return _collected(frame, append, transact) or transact(append, [])
    spans, _ = _collected(frame, replace(append, markers=()), deliver) or ([], False)
    return ([*spans, *deliver(append, [])[0]] if append.markers else spans), False


def _collected(
    frame: DataFrame, append: TaskAppend, send: Callable[[TaskAppend, Iterable[pa.RecordBatch]], Sent]
) -> Sent | None:
    """Send a frame from its tasks; return what they tell, None where there was no task."""

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        def told() -> Iterator[pa.RecordBatch]:
            spans, duplicate = send(append, batches)
            rows: list[tuple[Any, ...]] = [(s.partition, s.first, s.next, s.rows, duplicate) for s in spans]
            columns = zip(*(rows or [(None, None, None, 0, duplicate)]), strict=True)
            kinds = (pa.int32(), pa.int64(), pa.int64(), pa.int64(), pa.bool_())
            names = ["partition", "first", "next", "rows", "duplicate"]
            arrays = [pa.array(list(values), kind) for values, kind in zip(columns, kinds, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, names)

        yield from wrapped(told())

    with unwrapped():
        rows = map_in_arrow(frame, task, _SPANS).collect()
    if not rows:
        return None
    spans = [SentSpan(row[0], row[1], row[2], row[3]) for row in rows if row[0] is not None]
    return spans, any(row[4] for row in rows)


def _prepared(frame: DataFrame, facts: TopicFacts, order_by: Sequence[str]) -> DataFrame:
    """Return the frame with the stream's columns, the marks that it has, and the columns of its order by number."""
    from pyspark.sql import functions as F

    schema = schema_of(facts.declared)
    gone = {
        name for name in (*RECORD_META, *order_by) if name not in (TIMESTAMP, TOMBSTONE, EPOCH) and name not in schema
    }
    kept = [F.col(quoted(name)) for name in frame.columns if name not in gone]
    order = [F.col(quoted(name)).alias(f"{_ORDER}{i}") for i, name in enumerate(order_by)]
    return frame.select(*kept, *order)


def _append(
    system: KafkaStreams,
    facts: TopicFacts,
    producer: str,
    sequence: int,
    markers: Mapping[int, bytes],
    consumed: Mapping[SystemStreamPartition, str],
) -> TaskAppend:
    if markers and "compact" in facts.config.get("cleanup.policy", ""):
        raise ConfigurationError(
            f"{system.name}.{facts.stream} can't have end-of-dataset markers: topic {facts.topic!r} is compacted "
            "(cleanup.policy), which takes no record without a key and would drop them.",
            "Deliver versions through a topic that is not compacted.",
            stream=f"{system.name}.{facts.stream}",
            topic=facts.topic,
        )
    offsets: dict[str, dict[int, int]] = {}
    if facts.declared.transactional:
        ours = [(ssp, int(offset)) for ssp, offset in consumed.items() if ssp.system == system.name]
        topics = {stream: system.topic(stream).topic for stream in {ssp.stream for ssp, _ in ours}}
        for ssp, offset in ours:
            offsets.setdefault(topics[ssp.stream], {})[ssp.partition] = offset
    return TaskAppend(_target(system, facts), producer, sequence, tuple(sorted(markers.items())), offsets)


def _target(system: KafkaStreams, facts: TopicFacts) -> Target:
    limit = int(facts.config.get("max.message.bytes", _DEFAULT_LIMIT))
    settings = replace(system.settings, topics={})  # formats are for who encodes, and may be long
    return Target(settings, facts.stream, facts.topic, facts.identity, facts.partitions, limit)


def _result(system: KafkaStreams, append: TaskAppend, sent: Sent, before: Mapping[int, int]) -> AppendResult:
    """Return what an append did, once readers see it; a partition without records is told as empty there.

    `before` is where the partitions ended before, for what a broker did not tell.
    """
    spans, duplicate = sent
    if duplicate:
        return _told(spans, duplicate=True)
    target, deadline = append.target, time.monotonic() + _VISIBLE_SECONDS
    ends = {p: max((s.next or 0 for s in spans if s.partition == p), default=0) for p in range(target.partitions)}
    after = system.admin.upcoming(target.topic, range(target.partitions))
    # Another producer's open transaction may hide our records for longer: they are in all the same.
    while any(after[p] < end for p, end in ends.items()) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        after = system.admin.upcoming(target.topic, range(target.partitions))
    untold = {span.partition for span in spans if span.first is None or span.next is None}
    known = [
        SentSpan(s.partition, before[s.partition], after[s.partition], s.rows) if s.partition in untold else s
        for s in spans
    ]
    told = _told(known, duplicate=False)
    empty = {p: str(offset) for p, offset in after.items() if p not in told.first}
    return replace(told, first={**told.first, **empty}, next={**told.next, **empty})


def _told(spans: Sequence[SentSpan], *, duplicate: bool) -> AppendResult:
    first: dict[int, int] = {}
    after: dict[int, int] = {}
    for span in spans:
        assert span.first is not None
        assert span.next is not None
        first[span.partition] = min(span.first, first.get(span.partition, span.first))
        after[span.partition] = max(span.next, after.get(span.partition, span.next))
    return AppendResult(
        {p: str(offset) for p, offset in sorted(first.items())},
        {p: str(offset) for p, offset in sorted(after.items())},
        sum(span.rows for span in spans),
        duplicate,
    )

"""Appends to Kafka: Spark encodes records and groups them by key, and each task sends its share to the broker.

Without transactions an append is at least once: a repeated batch or task is written again, and consumers can detect
that by the headers `adjunct-producer` and `adjunct-sequence`. With `transactional=True` on the topic the whole append
is sent by one task in one transaction, and is exactly once.

The transaction contains records, markers, consumed offsets, and a mark by which a repeated append adds nothing. Kafka
stores the mark as committed offsets of the group `adjunct:PRODUCER` on the output topic: partition 0 has the last
sequence, and each partition with records has their offsets. The broker deletes it `offsets.retention.minutes` (7 days)
after the producer's last append; a batch that is repeated later is written again.

A crash leaves an open transaction, which readers do not see. The producer's next append ends it before it reads the
mark; a process that still writes under the producer's name then fails with CommitConflictError.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from dagster_adjunct.resources.common import StoredDocument
from dagster_adjunct.resources.errors import StreamUnavailableError
from dagster_adjunct.resources.objects.commit_log import decode_document
from dagster_adjunct.resources.schemas.column_sql import F, quote_name
from dagster_adjunct.resources.spark.errors import encode_task_errors, translate_spark_errors
from dagster_adjunct.resources.spark.map_arrow import map_in_arrow
from dagster_adjunct.resources.streams.kafka.client import BrokerRefusals, new_client
from dagster_adjunct.resources.streams.kafka.formats import Raw
from dagster_adjunct.resources.streams.kafka.record_formats import KEY, KafkaTopic, encode_frame
from dagster_adjunct.resources.streams.kafka.task_producer import (
    OutgoingRecord,
    Sender,
    SentSpan,
    Target,
    TaskAppend,
    records_from_batch,
    translate_produce_error,
)
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    RECORD_META,
    TIMESTAMP,
    TOMBSTONE,
    AppendResult,
    check_same_contents,
    stale_sequence_error,
)

if TYPE_CHECKING:
    from confluent_kafka import Consumer
    from pyspark.sql import DataFrame

_MARKS = "adjunct:"  # application names have no colon, so their groups differ
_SECONDS = 60.0
_OPEN_SECONDS = 2.0
_ABORT_SECONDS = 10.0
_PAUSE_SECONDS = 0.1
_BITS = 128


class TransactionMark(StoredDocument):
    """The mark of one partition: `rows` records of the append `sequence` begin at `first`."""

    format: Literal[1] = 1
    topic: str
    sequence: int
    digest: str
    first: int | None = None
    rows: int = 0


# By partition, with the offset after the producer's records.
ProducerMarks = Mapping[int, tuple[TransactionMark, int]]


def send_in_transaction(append: TaskAppend, batches: Iterable[pa.RecordBatch]) -> tuple[list[SentSpan], bool]:
    """Append the batches in one transaction; return their offsets, and whether they were appended before.

    Raises ProducerConflictError for other records under the last sequence and for an earlier sequence,
    CommitConflictError if another process took over the producer's name, and StreamUnavailableError, after which the
    same call may be repeated.
    """
    sender = Sender(append.target, f"{append.producer}/{append.target.topic}")
    _retry_step(sender, sender.producer.init_transactions)
    marks = _read_marks(append.target, append.producer)
    last = marks[0][0] if 0 in marks else None
    digest = _Digest()
    if last is not None and append.sequence < last.sequence:
        raise stale_sequence_error(str(append.target), append.producer, append.sequence, last.sequence)
    if last is not None and append.sequence == last.sequence:
        for batch in batches:
            deque(digest.count_through(records_from_batch(batch, append)), maxlen=0)
        sequence, name = append.sequence, str(append.target)
        check_same_contents(name, append.producer, sequence, sequence, last.digest, digest.of(append))
        return spans_from_marks(marks, append.sequence), True
    sender.producer.begin_transaction()
    try:
        for batch in batches:
            sender.send(digest.count_through(records_from_batch(batch, append)))
        sender.send_markers(append)
        spans = sender.finish()
        mark = TransactionMark(topic=append.target.identity, sequence=append.sequence, digest=digest.of(append))
        _commit_offsets(sender, append, spans, mark, marks[0][1] if 0 in marks else 0)
        _retry_step(sender, sender.producer.commit_transaction)
    except BaseException:
        # If this fails too, the broker ends the transaction after its time-out.
        with suppress(Exception):
            sender.producer.abort_transaction(_ABORT_SECONDS)
        raise
    return spans, False


def read_marks(target: Target, producer: str) -> ProducerMarks:
    """Return this producer's marks on the topic.

    If a transaction of the producer is open, as after a crash, returns the marks from before it. Ignores marks of a
    deleted topic of this name. Raises MalformedDocumentError for a mark that can't be read.
    """

    try:
        return _read_marks(target, producer, "read_committed", _OPEN_SECONDS)
    except StreamUnavailableError as error:
        cause: Any = error.__cause__
        if cause is None or cause.args[0].name() != "_TIMED_OUT":
            raise
    return _read_marks(target, producer, "read_uncommitted")


def _read_marks(
    target: Target, producer: str, isolation: str = "read_committed", seconds: float = _SECONDS
) -> ProducerMarks:
    """Return the marks; with `read_committed` this waits until no transaction of the producer is open."""
    from confluent_kafka import KafkaException, TopicPartition

    refusals = BrokerRefusals(target.settings)
    wanted = [TopicPartition(target.topic, partition) for partition in range(target.partitions)]
    with closing(_group_consumer(target, _MARKS + producer, refusals, isolation)) as consumer:
        deadline = time.monotonic() + seconds
        while True:
            try:
                committed = consumer.committed(wanted, max(deadline - time.monotonic(), _PAUSE_SECONDS))
                break
            except KafkaException as error:
                refusals.check()
                cause = error.args[0]
                moving = (cause.NOT_COORDINATOR, cause.COORDINATOR_NOT_AVAILABLE, cause.COORDINATOR_LOAD_IN_PROGRESS)
                if cause.code() not in moving or time.monotonic() > deadline:
                    raise translate_produce_error(cause, target) from error
                time.sleep(_PAUSE_SECONDS)  # the group's coordinator is starting or moving
    where = f"the mark of its producer in {target}"
    step = "Append with the version that wrote it, or a newer one; or reset the offsets of the producer's group."
    marks = {
        position.partition: (decode_document(TransactionMark, position.metadata.encode(), where, step), position.offset)
        for position in committed
        if position.metadata
    }
    return {partition: mark for partition, mark in marks.items() if mark[0].topic == target.identity}


def spans_from_marks(marks: ProducerMarks, sequence: int) -> list[SentSpan]:
    """Return the offsets of this sequence's records; none in partitions where a later one replaced its mark."""
    return [
        SentSpan(partition, mark.first, after, mark.rows)
        for partition, (mark, after) in sorted(marks.items())
        if mark.sequence == sequence and mark.first is not None
    ]


def _commit_offsets(
    sender: Sender, append: TaskAppend, spans: list[SentSpan], mark: TransactionMark, before: int
) -> None:
    """Add the marks and the consumed offsets to the transaction; `before` is the offset of partition 0's mark."""
    from confluent_kafka import TopicPartition

    target = append.target
    marks = {0: TopicPartition(target.topic, 0, before, mark.model_dump_json(exclude_none=True))}
    for span in spans:
        known = span.first is not None and span.next is not None
        own = mark.model_copy(update={"first": span.first if known else None, "rows": span.rows})
        text = own.model_dump_json(exclude_none=True)
        marks[span.partition] = TopicPartition(target.topic, span.partition, span.next or before, text)
    consumed = [
        TopicPartition(topic, partition, offset)
        for topic, offsets in append.consumed.items()
        for partition, offset in offsets.items()
    ]
    for group, offsets in ((_MARKS + append.producer, list(marks.values())), (append.producer, consumed)):
        if offsets:
            # These groups have no members: committing in a transaction only needs their names.
            with closing(_group_consumer(target, group, BrokerRefusals(target.settings), "read_committed")) as member:
                send = partial(sender.producer.send_offsets_to_transaction, offsets, member.consumer_group_metadata())
                _retry_step(sender, send)


def _retry_step(sender: Sender, step: Callable[[float], object]) -> None:
    """Run one step of a transaction, retrying retriable errors; translate others."""
    from confluent_kafka import KafkaException

    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            step(max(deadline - time.monotonic(), 1.0))
            return
        except KafkaException as error:
            if not error.args[0].retriable() or time.monotonic() > deadline:
                raise sender.translate_error(error.args[0]) from error
            time.sleep(_PAUSE_SECONDS)


class _Digest:
    """A digest of records that does not depend on their order."""

    def __init__(self) -> None:
        self._sum = 0
        self._count = 0

    def count_through(self, records: Iterable[OutgoingRecord]) -> Iterator[OutgoingRecord]:
        """Yield the records, adding each to the digest."""
        for record in records:
            digest = hashlib.blake2b(repr(record).encode(), digest_size=_BITS // 8).digest()
            self._sum += int.from_bytes(digest, "big")
            self._count += 1
            yield record

    def of(self, append: TaskAppend) -> str:
        """Return the digest of the added records and of the append's markers."""
        whole = [self._count, self._sum % 2**_BITS, append.markers]
        return hashlib.blake2b(repr(whole).encode(), digest_size=_BITS // 8).hexdigest()


def _group_consumer(target: Target, group: str, refusals: BrokerRefusals, isolation: str) -> Consumer:
    own = {"group.id": group, "enable.auto.commit": False, "isolation.level": isolation}
    consumer: Consumer = new_client("consumer", target.settings, own, refusals)
    return consumer


_TASKS = 32
_SPANS = "`partition` INT, `first` BIGINT, `next` BIGINT, `rows` BIGINT, `duplicate` BOOLEAN"
_ORDER = "__order_"

SendResult = tuple[list[SentSpan], bool]


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """A stream's topic in the cluster (`identity` is the topic's id), and its declaration.

    `config` are the topic's settings by Kafka's names; it is empty if we are not authorized to read them.
    """

    stream: str
    topic: str
    identity: str
    partitions: int
    declared: KafkaTopic
    config: Mapping[str, str]


def send_without_transaction(append: TaskAppend, batches: Iterable[pa.RecordBatch]) -> SendResult:
    """Send the batches, then the markers, without a transaction; return their offsets, and False."""
    sender = Sender(append.target)
    try:
        for batch in batches:
            sender.send(records_from_batch(batch, append))
        sender.send_markers(append)
        return sender.finish(), False
    except BaseException:
        sender.producer.purge()
        sender.producer.flush(1)
        raise


def send_batches(facts: TopicFacts, append: TaskAppend, batches: Iterable[pa.RecordBatch]) -> SendResult:
    """Send encoded records and the append's markers from this process."""
    send = send_in_transaction if facts.declared.transactional else send_without_transaction
    return send(append, batches)


def send_frame(frame: DataFrame, facts: TopicFacts, append: TaskAppend, order_by: Sequence[str]) -> SendResult:
    """Send a frame's records by Spark's tasks: by one in a transaction, else by one for each key."""
    frame = encode_frame(_select_columns(frame, facts, order_by), facts.declared, str(append.target))
    keyed = facts.declared.key is not None or isinstance(facts.declared.value, Raw)
    if facts.declared.transactional:
        frame = frame.repartition(1)
    elif keyed:
        frame = frame.repartition(min(facts.partitions, _TASKS), KEY)
    if order_by:
        frame = frame.sortWithinPartitions(*[f"{_ORDER}{i}" for i in range(len(order_by))])
    frame = frame.select(*[name for name in frame.columns if not name.startswith(_ORDER)])
    if facts.declared.transactional:
        # Spark runs no task for a frame that it knows to be empty: then this process runs the transaction.
        return _run_tasks(frame, append, send_in_transaction) or send_in_transaction(append, [])
    spans, _ = _run_tasks(frame, replace(append, markers=()), send_without_transaction) or ([], False)
    return ([*spans, *send_without_transaction(append, [])[0]] if append.markers else spans), False


def _run_tasks(
    frame: DataFrame, append: TaskAppend, send: Callable[[TaskAppend, Iterable[pa.RecordBatch]], SendResult]
) -> SendResult | None:
    """Send a frame by its tasks; return their results, None without tasks."""

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        def results() -> Iterator[pa.RecordBatch]:
            spans, duplicate = send(append, batches)
            rows: list[tuple[Any, ...]] = [(s.partition, s.first, s.next, s.rows, duplicate) for s in spans]
            columns = zip(*(rows or [(None, None, None, 0, duplicate)]), strict=True)
            kinds = (pa.int32(), pa.int64(), pa.int64(), pa.int64(), pa.bool_())
            names = ["partition", "first", "next", "rows", "duplicate"]
            arrays = [pa.array(list(values), kind) for values, kind in zip(columns, kinds, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, names)

        yield from encode_task_errors(results())

    with translate_spark_errors():
        rows = map_in_arrow(frame, task, _SPANS).collect()
    if not rows:
        return None
    spans = [SentSpan(row[0], row[1], row[2], row[3]) for row in rows if row[0] is not None]
    return spans, any(row[4] for row in rows)


def _select_columns(frame: DataFrame, facts: TopicFacts, order_by: Sequence[str]) -> DataFrame:
    """Return the frame with the stream's columns, its mark columns, and numbered columns of its order."""
    schema = facts.declared.schema()
    dropped = {
        name for name in (*RECORD_META, *order_by) if name not in (TIMESTAMP, TOMBSTONE, EPOCH) and name not in schema
    }
    kept = [F.col(quote_name(name)) for name in frame.columns if name not in dropped]
    order = [F.col(quote_name(name)).alias(f"{_ORDER}{i}") for i, name in enumerate(order_by)]
    return frame.select(*kept, *order)


def result_from_spans(spans: Sequence[SentSpan], *, duplicate: bool) -> AppendResult:
    first: dict[int, int] = {}
    after: dict[int, int] = {}
    for span in spans:
        assert span.first is not None
        assert span.next is not None
        first[span.partition] = min(span.first, first.get(span.partition, span.first))
        after[span.partition] = max(span.next, after.get(span.partition, span.next))
    starts, ends = ({p: str(offset) for p, offset in sorted(offsets.items())} for offsets in (first, after))
    return AppendResult(starts, ends, sum(span.rows for span in spans), duplicate)

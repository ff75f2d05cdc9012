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
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import pyarrow as pa

from dagster_adjunct.resources.common import StoredDocument, check_name
from dagster_adjunct.resources.errors import ConfigurationError, StreamUnavailableError
from dagster_adjunct.resources.objects.commit_log import decode_document
from dagster_adjunct.resources.schemas.column_sql import F, quote_name
from dagster_adjunct.resources.schemas.records import ArrowFrame, to_arrow_table
from dagster_adjunct.resources.spark.errors import encode_task_errors, translate_spark_errors
from dagster_adjunct.resources.spark.map_arrow import map_in_arrow
from dagster_adjunct.resources.streams.kafka.client import BrokerRefusals, new_client
from dagster_adjunct.resources.streams.kafka.consume import (
    MarkerHeader,
    TopicRange,
    is_marker,
    marker_from_message,
    read_ranges,
)
from dagster_adjunct.resources.streams.kafka.formats import Raw
from dagster_adjunct.resources.streams.kafka.record_formats import KEY, encode_frame, encode_table, topic_schema
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
    Marker,
    Sources,
    StreamSystem,
    SystemStreamPartition,
    check_marker_partitions,
    check_producer,
    check_same_contents,
    check_table_options,
    micros_from_valid_from,
    parse_offset,
    stale_sequence_error,
)

if TYPE_CHECKING:
    from confluent_kafka import Consumer
    from pyspark.sql import DataFrame

    from dagster_adjunct.resources.streams.kafka.client import KafkaAdmin
    from dagster_adjunct.resources.streams.kafka.streams import KafkaSettings, KafkaTopic

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
_DEFAULT_LIMIT = 1_000_000  # if the topic's settings can't be read
_VISIBLE_SECONDS = 10.0
_LOOK_SECONDS = 0.02
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
    key: tuple[str, ...]
    config: Mapping[str, str]


class KafkaAppends(StreamSystem):
    """The streams of a cluster: appending, and end-of-dataset markers."""

    settings: KafkaSettings
    admin: KafkaAdmin

    @abstractmethod
    def topic(self, stream: str) -> TopicFacts:
        """Return the stream's topic, with its settings. Raises StreamNotFoundError."""

    def append(
        self,
        stream: str,
        data: DataFrame | ArrowFrame | Sequence[Mapping[str, Any]],
        *,
        producer: str,
        sequence: int,
        end_of_dataset: str | None = None,
        order_by: Sequence[str] = (),
        partitioned: bool = False,
        consumed: Mapping[SystemStreamPartition, str] | None = None,
        sources: Sources | None = None,
        valid_from: datetime | None = None,
    ) -> AppendResult:
        """Append records to a topic: a Spark frame by its tasks, anything else by this process, in its order.

        `data` has the stream's columns and may have `__tombstone`, `__timestamp` (stored in ms; null is now) and
        `__epoch`. One task sends the records of a key, ordered by `order_by` (columns that only serve the order are
        dropped), to the partition that Kafka's Java client chooses for the key; records without key go to any.
        `partitioned` has no effect, since several tasks may have read one partition. `end_of_dataset` ends a version:
        every partition gets a marker; `valid_from` (with its zone) is when the version becomes valid. Source positions
        of records become headers. `sources` are not stored.

        Without transactions this is at least once. With transactions it is exactly once per producer and sequence, and
        `consumed`, the next offsets of input from the same cluster, is committed with the records for the consumer
        group `producer`. Sequences of a producer must increase.

        The result's ranges of offsets may include records of other producers. Raises SchemaMismatchError,
        PermanentError for a record that Kafka rejects, ProducerConflictError, CommitConflictError, and
        StreamUnavailableError, after which the same call may be repeated.
        """
        check_producer(producer, sequence)
        micros_from_valid_from(end_of_dataset, valid_from)
        facts = self.topic(stream)
        markers: dict[int, bytes] = {}
        if end_of_dataset is not None:
            check_name("version", end_of_dataset)
            header = MarkerHeader(version=end_of_dataset, partitions=facts.partitions, valid_from=valid_from)
            markers = dict.fromkeys(range(facts.partitions), header.encode())
        what = self._task_append(facts, producer, sequence, markers, consumed or {})
        before = self.admin.upcoming(facts.topic, range(facts.partitions))
        name = str(what.target)
        if hasattr(data, "mapInArrow"):
            frame = _select_columns(cast("DataFrame", data), facts, order_by)
            sent = _send_frame(encode_frame(frame, facts.declared, name), facts, what, len(order_by))
            return self._await_result(what, sent, before)
        check_table_options(name, order_by, partitioned)
        table = encode_table(to_arrow_table(data, name, topic_schema(facts.declared)), facts.declared, name)
        return self._await_result(what, _send_function(facts)(what, table.to_batches()), before)

    def append_markers(
        self,
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
        """Append only an end-of-dataset marker to these partitions (default: all).

        `rows` are the version's numbers of records by partition, for validation; `valid_from` (with its zone) is when
        it becomes valid.
        """
        check_producer(producer, sequence)
        check_name("version", version)
        micros_from_valid_from(version, valid_from)
        facts = self.topic(stream)
        chosen = range(facts.partitions) if partitions is None else sorted(set(partitions))
        check_marker_partitions(f"{self.name}.{stream}", version, chosen, facts.partitions, rows)
        same: Any = {"version": version, "checksum": checksum, "valid_from": valid_from, "partitions": facts.partitions}
        counts: Mapping[int, int] = rows or {}
        markers = {p: MarkerHeader(**same, rows=counts.get(p)).encode() for p in chosen}
        what = self._task_append(facts, producer, sequence, markers, {})
        before = self.admin.upcoming(facts.topic, range(facts.partitions))
        return self._await_result(what, _send_function(facts)(what, []), before)

    def appended(self, stream: str, producer: str, sequence: int) -> AppendResult | None:
        """Return the result of an earlier append, or None; always None for a topic without transactions.

        A transaction that a crash left open does not count; the producer's next append aborts it. Raises
        ProducerConflictError for a sequence before the last.
        """
        check_producer(producer, sequence)
        facts = self.topic(stream)
        if not facts.declared.transactional:
            return None
        marks = read_marks(self._target(facts), producer)
        if 0 not in marks or marks[0][0].sequence < sequence:
            return None
        if marks[0][0].sequence > sequence:
            raise stale_sequence_error(f"{self.name}.{stream}", producer, sequence, marks[0][0].sequence)
        return _result_from_spans(spans_from_marks(marks, sequence), duplicate=True)

    def markers(self, stream: str, since: Mapping[SystemStreamPartition, str] | None = None) -> list[Marker]:
        """Return the markers at or after these offsets (of all partitions when None), in order.

        Reads all records from there on. An offset that retention has passed counts as the oldest.
        """
        facts = self.topic(stream)
        name = f"{self.name}.{stream}"
        starts = dict.fromkeys(range(facts.partitions), 0)
        if since is not None:
            starts = {s.partition: parse_offset(o, str(s)) for s, o in since.items() if s.qualified_stream == name}
        oldest, upcoming = self.admin.oldest(facts.topic, starts), self.admin.upcoming(facts.topic, starts)
        ranges = [
            TopicRange(facts.topic, facts.identity, p, max(start, oldest[p]), upcoming[p], name)
            for p, start in sorted(starts.items())
        ]
        found = [
            marker_from_message(message, SystemStreamPartition(self.name, stream, wanted.partition))
            for wanted, got in read_ranges(self.settings, ranges)
            for message in got
            if is_marker(message.headers())
        ]
        return sorted(found, key=lambda marker: (marker.ssp.partition, int(marker.offset)))

    def _task_append(
        self,
        facts: TopicFacts,
        producer: str,
        sequence: int,
        markers: Mapping[int, bytes],
        consumed: Mapping[SystemStreamPartition, str],
    ) -> TaskAppend:
        if markers and "compact" in facts.config.get("cleanup.policy", ""):
            problem = (
                f"{self.name}.{facts.stream} can't have end-of-dataset markers: topic {facts.topic!r} is compacted "
                "(cleanup.policy), which only accepts records with a key."
            )
            step = "Deliver versions through a topic that is not compacted."
            raise ConfigurationError(problem, step, stream=f"{self.name}.{facts.stream}", topic=facts.topic)
        offsets: dict[str, dict[int, int]] = {}
        if facts.declared.transactional:
            ours = [(ssp, int(offset)) for ssp, offset in consumed.items() if ssp.system == self.name]
            topics = {name: self.topic(name).topic for name in {ssp.stream for ssp, _ in ours}}
            for ssp, offset in ours:
                offsets.setdefault(topics[ssp.stream], {})[ssp.partition] = offset
        return TaskAppend(self._target(facts), producer, sequence, tuple(sorted(markers.items())), offsets)

    def _target(self, facts: TopicFacts) -> Target:
        limit = int(facts.config.get("max.message.bytes", _DEFAULT_LIMIT))
        settings = replace(self.settings, topics={})  # the producer needs no formats, which may be large
        return Target(settings, facts.stream, facts.topic, facts.identity, facts.partitions, limit)

    def _await_result(self, append: TaskAppend, sent: SendResult, before: Mapping[int, int]) -> AppendResult:
        """Return the result of an append, once readers see it; partitions without records have empty ranges.

        `before` are the partitions' previous ends, for offsets that a broker did not return.
        """
        spans, duplicate = sent
        if duplicate:
            return _result_from_spans(spans, duplicate=True)
        target, deadline = append.target, time.monotonic() + _VISIBLE_SECONDS
        ends = {p: max((s.next or 0 for s in spans if s.partition == p), default=0) for p in range(target.partitions)}
        after = self.admin.upcoming(target.topic, range(target.partitions))
        # Another producer's open transaction may hide our records for longer.
        while any(after[p] < end for p, end in ends.items()) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            after = self.admin.upcoming(target.topic, range(target.partitions))
        unknown = {span.partition for span in spans if span.first is None or span.next is None}
        known = [
            SentSpan(s.partition, before[s.partition], after[s.partition], s.rows) if s.partition in unknown else s
            for s in spans
        ]
        result = _result_from_spans(known, duplicate=False)
        empty = {p: str(offset) for p, offset in after.items() if p not in result.first}
        return replace(result, first={**result.first, **empty}, next={**result.next, **empty})


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


def _send_function(facts: TopicFacts) -> Callable[[TaskAppend, Iterable[pa.RecordBatch]], SendResult]:
    return send_in_transaction if facts.declared.transactional else send_without_transaction


def _send_frame(frame: DataFrame, facts: TopicFacts, append: TaskAppend, ordered_by: int) -> SendResult:
    """Send an encoded frame by Spark's tasks: by one in a transaction, else by one for each key."""
    keyed = facts.declared.key is not None or isinstance(facts.declared.value, Raw)
    if facts.declared.transactional:
        frame = frame.repartition(1)
    elif keyed:
        frame = frame.repartition(min(facts.partitions, _TASKS), KEY)
    if ordered_by:
        frame = frame.sortWithinPartitions(*[f"{_ORDER}{i}" for i in range(ordered_by)])
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
    schema = topic_schema(facts.declared)
    dropped = {
        name for name in (*RECORD_META, *order_by) if name not in (TIMESTAMP, TOMBSTONE, EPOCH) and name not in schema
    }
    kept = [F.col(quote_name(name)) for name in frame.columns if name not in dropped]
    order = [F.col(quote_name(name)).alias(f"{_ORDER}{i}") for i, name in enumerate(order_by)]
    return frame.select(*kept, *order)


def _result_from_spans(spans: Sequence[SentSpan], *, duplicate: bool) -> AppendResult:
    first: dict[int, int] = {}
    after: dict[int, int] = {}
    for span in spans:
        assert span.first is not None
        assert span.next is not None
        first[span.partition] = min(span.first, first.get(span.partition, span.first))
        after[span.partition] = max(span.next, after.get(span.partition, span.next))
    starts, ends = ({p: str(offset) for p, offset in sorted(offsets.items())} for offsets in (first, after))
    return AppendResult(starts, ends, sum(span.rows for span in spans), duplicate)

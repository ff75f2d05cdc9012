"""Appends to Kafka: Spark encodes records and groups them by key, and each task sends its share to
the broker.

Without transactions an append is at least once: a repeated batch or task is written again, and
consumers can detect that by the headers `adjunct-producer` and `adjunct-sequence`. With
`transactional=True` on the topic the whole append is sent by one task in one transaction, and is
exactly once.

The transaction contains records, markers, consumed offsets, and a mark, by which a repeated append
is recognized and adds nothing. Kafka stores the mark as committed offsets of the group
`adjunct:PRODUCER` on the output topic: partition 0 has the last sequence, and each partition with
records has their offsets. The broker deletes the mark `offsets.retention.minutes` (7 days) after
the producer's last append; a batch that is repeated later is written again.

A crash leaves an open transaction, which readers do not see. The producer's next append ends it
before it reads the mark; a process that still writes under the producer's name then fails with
CommitConflictError.
"""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.lazy_modules import pa, pc
from dagster_adjunct.resources.objects.commit_log import decode_document
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.schemas.schema import Schema, named_column
from dagster_adjunct.resources.schemas.values import first_unreadable, readable_value
from dagster_adjunct.resources.spark.tasks import (
    encode_task_errors,
    map_in_arrow,
    translate_spark_errors,
)
from dagster_adjunct.resources.streams.append_checks import (
    check_same_contents,
    stale_sequence_error,
)
from dagster_adjunct.resources.streams.kafka.client import (
    TRANSIENT_CODES,
    BrokerRefusals,
    KafkaSettings,
    TopicFacts,
    new_client,
    resolve_client_settings,
)
from dagster_adjunct.resources.streams.kafka.record_formats import (
    HEADERS,
    KEY,
    VALUE,
    KafkaTopic,
    encode_frame,
)
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    READER,
    RECORD_META,
    SOURCE,
    SOURCE_OFFSET,
    TIMESTAMP,
    TOMBSTONE,
    AppendResult,
)

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, Producer
    from pyspark.sql import DataFrame

_MAX_KEY_SHOWN = 60


def translate_produce_error(
    error: KafkaError, target: TopicFacts, key: bytes | None = None, size: int | None = None
) -> errors.AdjunctError:
    """Return the Adjunct error for a Kafka error of an append."""
    reason = error.str()
    if error.name() in ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH"):
        problem = (
            f"{target}: another producer of the same name took over during the append, or the"
            f" append took longer than transaction.timeout.ms ({reason})."
        )
        step = (
            "Nothing of this append is visible. Run one application of a name at a time, then"
            " append again."
        )
        return errors.CommitConflictError(problem, step, stream=str(target))
    if error.name() == "MSG_SIZE_TOO_LARGE":
        its_size = ""
        if size is not None:
            its_size = f" has {size:,} bytes and"
        problem = (
            f"{target}: the record with the key {_describe_key(key)}{its_size} is larger than the"
            f" topic allows ({target.max_bytes:,} bytes)."
        )
        step = (
            f"Make it smaller, or raise max.message.bytes of {target.topic!r}, and"
            " message.max.bytes in client=."
        )
        return errors.PermanentError(problem, step, stream=str(target))
    if error.name() in TRANSIENT_CODES:
        return _unavailable_error(
            target, f"Kafka did not accept the records ({error.name()}: {reason})"
        )
    if key is None:
        record = "the records"
    else:
        record = f"the record with the key {_describe_key(key)}"
    step = f"Check the settings and the access rules of topic {target.topic!r}, then append again."
    problem = f"{target}: Kafka rejected {record} ({error.name()}: {reason})."
    return errors.PermanentError(problem, step)


def _unavailable_error(
    target: TopicFacts,
    problem: str,
    next_step: str = "Check whether the brokers are up, then append again.",
) -> errors.StreamUnavailableError:
    """Return the error for an append that may succeed later."""
    return errors.StreamUnavailableError(
        f"{target}: {problem}.", next_step, system=target.settings.name, stream=str(target)
    )


def _describe_key(key: bytes | None) -> str:
    """Return a key for an error: its text, or its bytes in hex; at most 60 characters."""
    if key is None:
        return "null"
    text = key.decode("utf-8", "replace")
    if not text.isprintable() or "\ufffd" in text:
        text = key.hex()
    if len(text) > _MAX_KEY_SHOWN:
        text = text[: _MAX_KEY_SHOWN - 1] + "…"
    return repr(text)


# The prefix of Adjunct's own headers, which a record that is sent on to another topic does not
# keep.
RESERVED = "adjunct-"
END_OF_DATASET = f"{RESERVED}end-of-dataset"
_GRACE = 10.0
# How long the client may go on sending before the fence is checked again.
_CHECK_SECONDS = 0.1
_LEAST_LIMIT = 1000  # librdkafka's minimum

Header = tuple[str, str | bytes | None]
# Key, value (None: a tombstone), ms since the epoch (0: now), headers.
OutgoingRecord = tuple[bytes | None, bytes | None, int, list[Header]]

# Defaults that the user's client settings may override. Queues are small, as several tasks share a
# machine.
_DEFAULTS = {
    "linger.ms": 20,
    "message.timeout.ms": 60_000,
    "queue.buffering.max.kbytes": 131_072,
    "transaction.timeout.ms": 300_000,
}
# Settings that Adjunct's guarantees depend on.
_FIXED = {"enable.idempotence": True, "acks": "all", "partitioner": "murmur2_random"}


@dataclass(frozen=True, slots=True)
class TaskAppend:
    """What a Spark task needs to know of an append, except its records; picklable.

    `markers` are (partition, value of the marker's header). `consumed` are the next offsets of the
    input: (topic, partition, offset). The `fence` of the run is checked for every record.
    """

    target: TopicFacts
    producer: str
    sequence: int
    markers: tuple[tuple[int, bytes], ...] = ()
    consumed: tuple[tuple[str, int, int], ...] = ()
    fence: Fence | None = None

    def headers(self) -> list[Header]:
        """Return the headers of every record, by which consumers can detect duplicates."""
        return [
            (f"{RESERVED}producer", self.producer.encode()),
            (f"{RESERVED}sequence", str(self.sequence).encode()),
        ]


@dataclass(frozen=True, slots=True)
class SentSpan:
    """The offsets [first, next) of an append's records (and markers) in a partition, and the number
    of records.

    Offsets are None if the broker did not return them.
    """

    partition: int
    first: int | None
    next: int | None
    rows: int


class SendResult(NamedTuple):
    """Where an append's records are, and whether they were appended before under the same sequence,
    so that this time nothing was added.
    """

    spans: list[SentSpan]
    duplicate: bool = False


# librdkafka's two names for how long a record may be under way.
_DELIVERY_LIMITS = ("message.timeout.ms", "delivery.timeout.ms")


def delivery_seconds(settings: KafkaSettings) -> float:
    """Return for how many seconds a record may be under way to the brokers, at least 0.001.

    Raises ConfigurationError for a client that would try for ever, and for a limit that is no
    number: nobody could say when a run that was paused can't write any more.
    """
    client = resolve_client_settings(settings)
    given = {name: client[name] for name in _DELIVERY_LIMITS if name in client}
    for name, value in given.items():
        if not re.fullmatch(r"0*[1-9][0-9]*", str(value)):
            raise errors.ConfigurationError(
                f"Kafka system {settings.name!r}: the client setting {name!r} is {value!r}: "
                "expected a number of milliseconds above 0. Without a limit, records of a run that "
                "was taken for dead could arrive at any time.",
                f"Correct it in client= or client_factory=, or leave it out: the limit then is"
                f" {_DEFAULTS['message.timeout.ms']}.",
                system=settings.name,
                argument="client",
                setting=name,
            )
    limits = [int(value) for value in given.values()] or [_DEFAULTS["message.timeout.ms"]]
    return min(limits) / 1000


def _producer_settings(
    target: TopicFacts, delivery_ms: int, transactional_id: str | None
) -> dict[str, Any]:
    """Return the settings of a producer that override the user's: defaults for those that the user
    does not give, and what appends without duplicates need.
    """
    given = resolve_client_settings(target.settings)
    defaults = {"message.max.bytes": max(target.max_bytes, _LEAST_LIMIT), **_DEFAULTS}
    own: dict[str, Any] = {name: value for name, value in defaults.items() if name not in given}
    own |= _FIXED
    # Of two names of a setting, the client takes the one that it sees last.
    own |= dict.fromkeys(_DELIVERY_LIMITS, delivery_ms)
    if transactional_id is not None:
        own["transactional.id"] = transactional_id
    return own


class Sender:
    """An idempotent Kafka producer, which keeps the order of the records in each partition."""

    def __init__(
        self, target: TopicFacts, transactional_id: str | None = None, fence: Fence | None = None
    ) -> None:
        self._seconds = delivery_seconds(target.settings)
        self._target = target
        self._fence = fence
        # By partition: the first and the last offset of what was delivered (None if the broker
        # returned none), and the number of its records without markers.
        self._first: dict[int, int | None] = {}
        self._last: dict[int, int | None] = {}
        self._rows: dict[int, int] = {}
        self._failure: errors.AdjunctError | None = None
        self._refusals = BrokerRefusals(target.settings)
        own = _producer_settings(target, round(self._seconds * 1000), transactional_id)
        own["on_delivery"] = self._delivered
        self.producer: Producer = new_client("producer", target.settings, own, self._refusals)

    def send(self, records: Iterable[OutgoingRecord], partition: int = -1) -> None:
        """Queue records for the partitions of their keys (or for this one), waiting while the queue
        is full.

        Checks the run's fence before each record. Raises the error of a record that was not
        delivered, which may be one of an earlier call.
        """
        from confluent_kafka import KafkaException

        produce = self.producer.produce
        topic = self._target.topic
        for key, value, timestamp, headers in records:
            if self._fence is not None:
                self._fence.check()
            while True:
                try:
                    produce(
                        topic, value, key, partition=partition, timestamp=timestamp, headers=headers
                    )
                    break
                except BufferError:
                    self._poll(lambda: self.producer.poll(0.05))
                except KafkaException as error:
                    size = len(key or b"") + len(value or b"")
                    raise self.translate_error(error.args[0], key, size) from error
        self._poll(lambda: self.producer.poll(0))

    def send_markers(self, append: TaskAppend) -> None:
        """Queue the append's markers, which do not count as records."""
        for partition, marker in append.markers:
            self._rows[partition] = self._rows.get(partition, 0) - 1
            self.send([(None, None, 0, [*append.headers(), (END_OF_DATASET, marker)])], partition)

    def finish(self) -> list[SentSpan]:
        """Wait until every record is delivered; return their offsets by partition. Raises the
        first delivery error.
        """
        deadline = time.monotonic() + self._seconds + _GRACE
        while True:
            left = self._poll(lambda: self.producer.flush(_CHECK_SECONDS))
            if not left or time.monotonic() >= deadline:
                break
            if self._fence is not None:
                self._fence.check()
        if left:
            problem = f"{left} records were not delivered within {self._seconds + _GRACE:.0f} s"
            raise _unavailable_error(self._target, problem)
        spans = []
        for partition, last in sorted(self._last.items()):
            after = None if last is None else last + 1
            spans.append(SentSpan(partition, self._first[partition], after, self._rows[partition]))
        return spans

    def translate_error(
        self, error: KafkaError, key: bytes | None = None, size: int | None = None
    ) -> errors.AdjunctError:
        """Return the Adjunct error for this error of the client, or for the rejection by brokers
        that caused it.
        """
        try:
            self._refusals.check()
        except errors.AdjunctError as login:
            return login
        if error.code() == error._FATAL:
            return self._fatal_error()
        return translate_produce_error(error, self._target, key, size)

    def _poll(self, wait: Callable[[], int]) -> int:
        """Call `wait`, in which the client runs its callbacks, and return its result; raise the
        first error.
        """
        from confluent_kafka import KafkaException

        try:
            left = wait()
        except KafkaException as error:
            raise self.translate_error(error.args[0]) from error
        except SystemError as error:
            # The client failed fatally while it called `_delivered`, which loses the reason.
            raise self._fatal_error() from error
        except:  # noqa: E722
            # After a fatal error, a client with a logger raises its bare KafkaError, which is not a
            # BaseException.
            if isinstance(sys.exc_info()[1], BaseException):
                raise
            raise self._fatal_error() from None
        self._refusals.check()
        if self._failure is not None:
            raise self._failure
        return left

    def _fatal_error(self) -> errors.AdjunctError:
        """Return the fatal error after which the client can't be used."""
        from confluent_kafka import KafkaException

        try:
            # can't succeed here; its error contains the fatal one
            self.producer.begin_transaction()
        except KafkaException as error:
            if error.args[0].fatal():
                return translate_produce_error(error.args[0], self._target)
        return _unavailable_error(self._target, "the producer failed fatally", "Append again.")

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        """Note where a record was stored, or the first error; the client calls it for
        each record.
        """
        if error is not None:
            if self._failure is None:
                self._failure = self.translate_error(error, message.key())
            return
        partition = message.partition()
        offset = message.offset()
        # If the reply to an earlier try was lost, the broker already has the records and returns no
        # offsets.
        known = None
        if offset is not None and offset >= 0:
            known = offset
        self._first.setdefault(partition, known)  # type: ignore[arg-type]
        self._last[partition] = known  # type: ignore[index]
        self._rows[partition] = self._rows.get(partition, 0) + 1  # type: ignore[index,arg-type]


def records_from_batch(batch: pa.RecordBatch, append: TaskAppend) -> Iterator[OutgoingRecord]:
    """Return the records of a batch with `__key`, `__value` and, optionally, `__timestamp`,
    `__epoch`, `__headers` and the columns of POSITION.

    Kafka stores times in ms. Raises SchemaMismatchError for a time that it can't store.
    """
    return zip(
        batch.column(KEY).to_pylist(),
        batch.column(VALUE).to_pylist(),
        _record_times(batch, append.target),
        _record_headers(batch, append.headers()),
        strict=True,
    )


def _record_times(batch: pa.RecordBatch, topic: TopicFacts) -> Iterable[int]:
    """Return the times of the records in ms since the epoch, 0 for the time of the append. Raises
    SchemaMismatchError.
    """
    if TIMESTAMP not in batch.schema.names:
        return repeat(0, batch.num_rows)
    stated = batch.column(TIMESTAMP)
    found = first_unreadable(batch, [TIMESTAMP])
    rejected: object = None
    if found is not None:
        rejected = found.text
    else:
        # Truncating to microseconds loses nothing: Kafka stores milliseconds.
        given = stated.cast(pa.timestamp("us", tz="UTC"), safe=False).cast(pa.int64())
        least = pc.min(given).as_py()
        if least is not None and least < 1000:  # 0 ms would mean the time of the append
            rejected = readable_value(pc.min(stated))
    if rejected is not None:
        problem = (
            f"{topic}: a record has the time {rejected}, but Kafka only stores times from"
            " 1970-01-01 to 9999-12-31."
        )
        step = "Leave its __timestamp null: the record then has the time of the append."
        raise errors.SchemaMismatchError(problem, step, stream=str(topic))
    times: list[int] = pc.fill_null(pc.divide(given, 1000), 0).to_pylist()
    return times


def _record_headers(batch: pa.RecordBatch, own: list[Header]) -> Iterable[list[Header]]:
    """Return the headers of each record: its own, then `own` with the epoch and the source."""
    names = batch.schema.names
    ours: Iterable[list[Header]] = repeat(own, batch.num_rows)
    if EPOCH in names:
        epochs = pc.fill_null(batch.column(EPOCH), 0).to_pylist()
        by_epoch = {0: own}
        for epoch in set(epochs) - {0}:
            by_epoch[epoch] = [*own, (f"{RESERVED}epoch", str(epoch).encode())]
        ours = map(by_epoch.__getitem__, epochs)
    if SOURCE in names and SOURCE_OFFSET in names:
        sources = batch.column(SOURCE).to_pylist()
        readers = repeat(None, batch.num_rows)
        if READER in names:
            readers = batch.column(READER).to_pylist()
        ours = map(_add_source, ours, sources, batch.column(SOURCE_OFFSET).to_pylist(), readers)
    if HEADERS in names:
        ours = map(_merge_headers, batch.column(HEADERS).to_pylist(), ours)
    return ours


def _add_source(
    headers: list[Header], source: str | None, offset: int, reader: str | None
) -> list[Header]:
    """Return the headers with the record's position in its input, if it is known, and the identity
    of the input, if it has one: a recreated input has another record at that position.
    """
    if source is None:
        return headers
    more = [(f"{RESERVED}source", f"{source}@{offset}".encode())]
    _, _, identity = (reader or "").partition("@")
    if identity:
        more.append((f"{RESERVED}source-id", identity.encode()))
    return [*headers, *more]


def _merge_headers(theirs: Sequence[Mapping[str, Any]] | None, ours: list[Header]) -> list[Header]:
    """Return a record's own headers, without those reserved for Adjunct, then ours."""
    merged: list[Header] = []
    for header in theirs or ():
        if not header["name"].startswith(RESERVED):
            merged.append((header["name"], header["value"]))
    return merged + ours


_MARKS = "adjunct:"  # application names have no colon, so their groups differ
_SECONDS = 60.0
_OPEN_SECONDS = 2.0
_ABORT_SECONDS = 10.0
_PAUSE_SECONDS = 0.1
_BITS = 128


class TransactionMark(StoredDocument):
    """What an append leaves in a partition: its sequence and digest, and that `rows` records of it
    begin at the offset `first`.

    `topic` is the topic's id, so that the marks of a deleted topic of the same name are recognized.
    """

    format: Literal[1] = 1
    topic: str
    sequence: int
    digest: str
    first: int | None = None
    rows: int = 0


class StoredMark(NamedTuple):
    """The mark of a partition, and the offset after the records of its append."""

    mark: TransactionMark
    next: int


# By partition; every append leaves a mark in partition 0.
ProducerMarks = Mapping[int, StoredMark]


def send_in_transaction(append: TaskAppend, batches: Iterable[pa.RecordBatch]) -> SendResult:
    """Append the batches in one transaction, unless the sequence was appended before.

    Raises ProducerConflictError for other records under the last sequence and for an earlier
    sequence, CommitConflictError if another process took over the producer's name, and
    StreamUnavailableError, after which the same call may be repeated.
    """
    if append.fence is not None:  # beginning would fence the run that has taken over
        append.fence.check()
    sender = Sender(append.target, f"{append.producer}/{append.target.topic}", append.fence)
    _retry_step(sender, sender.producer.init_transactions)
    marks = _read_marks(append.target, append.producer)
    last = None
    after_last = 0
    if 0 in marks:  # where each append of the producer leaves its mark
        last, after_last = marks[0]
    digest = _Digest()
    if last is not None and append.sequence < last.sequence:
        raise stale_sequence_error(
            str(append.target), append.producer, append.sequence, last.sequence
        )
    if last is not None and append.sequence == last.sequence:
        for batch in batches:
            # A deque of no length only runs through the records, so that each is counted.
            deque(digest.count_through(records_from_batch(batch, append)), maxlen=0)
        sequence = append.sequence
        name = str(append.target)
        now = digest.of(append)
        check_same_contents(name, append.producer, sequence, sequence, last.digest, now)
        return SendResult(spans_from_marks(marks, sequence), duplicate=True)
    sender.producer.begin_transaction()
    try:
        for batch in batches:
            sender.send(digest.count_through(records_from_batch(batch, append)))
        sender.send_markers(append)
        spans = sender.finish()
        mark = TransactionMark(
            topic=append.target.identity, sequence=append.sequence, digest=digest.of(append)
        )
        _commit_offsets(sender, append, spans, mark, before=after_last)
        _retry_step(sender, sender.producer.commit_transaction)
    except BaseException:
        # If this fails too, the broker ends the transaction after its time-out.
        with suppress(Exception):
            sender.producer.abort_transaction(_ABORT_SECONDS)
        raise
    return SendResult(spans)


def read_marks(target: TopicFacts, producer: str) -> ProducerMarks:
    """Return this producer's marks on the topic.

    If a transaction of the producer is open, as after a crash, returns the marks from before it.
    Ignores marks of a deleted topic of this name. Raises MalformedDocumentError for a mark that
    can't be read.
    """

    try:
        return _read_marks(target, producer, "read_committed", _OPEN_SECONDS)
    except errors.StreamUnavailableError as error:
        cause: Any = error.__cause__
        is_open = cause is not None and cause.args[0].name() == "_TIMED_OUT"
        if not is_open:
            raise
    # These have no offsets of the open transaction.
    return _read_marks(target, producer, "read_uncommitted")


def _read_marks(
    target: TopicFacts, producer: str, isolation: str = "read_committed", seconds: float = _SECONDS
) -> ProducerMarks:
    """Return the producer's marks on the topic; with `read_committed`, wait up to `seconds` until
    no transaction of it is open.
    """
    from confluent_kafka import KafkaException, TopicPartition

    refusals = BrokerRefusals(target.settings)
    wanted = [TopicPartition(target.topic, partition) for partition in range(target.partitions)]
    with closing(_group_consumer(target, _MARKS + producer, refusals, isolation)) as consumer:
        deadline = time.monotonic() + seconds
        while True:
            try:
                committed = consumer.committed(
                    wanted, max(deadline - time.monotonic(), _PAUSE_SECONDS)
                )
                break
            except KafkaException as error:
                refusals.check()
                cause = error.args[0]
                moving = (
                    cause.NOT_COORDINATOR,
                    cause.COORDINATOR_NOT_AVAILABLE,
                    cause.COORDINATOR_LOAD_IN_PROGRESS,
                )
                if cause.code() not in moving or time.monotonic() > deadline:
                    raise translate_produce_error(cause, target) from error
                time.sleep(_PAUSE_SECONDS)  # the group's coordinator is starting or moving
    where = f"the mark of its producer in {target}"
    step = (
        "Append with the version that wrote it, or a newer one; or reset the offsets of the"
        " producer's group."
    )
    marks = {}
    for position in committed:
        if not position.metadata:
            continue
        mark = decode_document(TransactionMark, position.metadata.encode(), where, step)
        if mark.topic == target.identity:
            marks[position.partition] = StoredMark(mark, position.offset)
    return marks


def spans_from_marks(marks: ProducerMarks, sequence: int) -> list[SentSpan]:
    """Return the offsets of this sequence's records, without partitions where a later append
    replaced the mark.
    """
    spans = []
    for partition, stored in sorted(marks.items()):
        mark = stored.mark
        if mark.sequence == sequence and mark.first is not None:
            spans.append(SentSpan(partition, mark.first, stored.next, mark.rows))
    return spans


def _commit_offsets(
    sender: Sender, append: TaskAppend, spans: list[SentSpan], mark: TransactionMark, before: int
) -> None:
    """Add the marks and the consumed offsets to the transaction.

    `before` is the offset in partition 0's earlier mark, which stays if the append has no records
    there.
    """
    from confluent_kafka import TopicPartition

    target = append.target
    marks = {0: TopicPartition(target.topic, 0, before, mark.model_dump_json(exclude_none=True))}
    for span in spans:
        first = span.first
        after = span.next
        if after is None:  # unknown: a mark needs some offset, and without `first` it is not used
            first = None
            after = before
        own = mark.model_copy(update={"first": first, "rows": span.rows})
        text = own.model_dump_json(exclude_none=True)
        marks[span.partition] = TopicPartition(target.topic, span.partition, after, text)
    consumed = [TopicPartition(*position) for position in append.consumed]
    by_group = {_MARKS + append.producer: list(marks.values()), append.producer: consumed}
    for group, offsets in by_group.items():
        if offsets:
            # These groups have no members: committing in a transaction only needs their names.
            with closing(
                _group_consumer(target, group, BrokerRefusals(target.settings), "read_committed")
            ) as member:
                send = partial(
                    sender.producer.send_offsets_to_transaction,
                    offsets,
                    member.consumer_group_metadata(),
                )
                _retry_step(sender, send)


def _retry_step(sender: Sender, step: Callable[[float], object]) -> None:
    """Run one step of a transaction (a function of its time-out in seconds); retry after retriable
    errors.

    Raises other errors as Adjunct's.
    """
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
        """Yield the records unchanged, adding each to the digest."""
        for record in records:
            digest = hashlib.blake2b(repr(record).encode(), digest_size=_BITS // 8).digest()
            self._sum += int.from_bytes(digest, "big")
            self._count += 1
            yield record

    def of(self, append: TaskAppend) -> str:
        """Return the digest of the added records and of the append's markers."""
        whole = [self._count, self._sum % 2**_BITS, append.markers]
        return hashlib.blake2b(repr(whole).encode(), digest_size=_BITS // 8).hexdigest()


def _group_consumer(
    target: TopicFacts, group: str, refusals: BrokerRefusals, isolation: str
) -> Consumer:
    """Return a consumer with which a group's committed offsets are read or written."""
    own = {"group.id": group, "enable.auto.commit": False, "isolation.level": isolation}
    consumer: Consumer = new_client("consumer", target.settings, own, refusals)
    return consumer


_TASKS = 32
_SPANS = Schema.of(
    partition="int", first="bigint", next="bigint", rows="bigint", duplicate="boolean"
)
_ORDER = "__order_"


def send_without_transaction(append: TaskAppend, batches: Iterable[pa.RecordBatch]) -> SendResult:
    """Send the batches, then the markers, without a transaction, so that no duplicate is found."""
    sender = Sender(append.target, fence=append.fence)
    try:
        for batch in batches:
            sender.send(records_from_batch(batch, append))
        sender.send_markers(append)
        return SendResult(sender.finish())
    except BaseException:
        sender.producer.purge()
        sender.producer.flush(1)
        raise


def produce_batches(append: TaskAppend, batches: Iterable[pa.RecordBatch]) -> SendResult:
    """Send encoded records and the append's markers from this process, in a transaction if the
    topic is so declared.
    """
    if append.target.declared.transactional:
        send = send_in_transaction
    else:
        send = send_without_transaction
    return send(append, batches)


def send_frame(frame: DataFrame, append: TaskAppend, order_by: Sequence[str]) -> SendResult:
    """Send a frame's records by Spark's tasks.

    For a transactional topic one task sends all. Otherwise several do, and the records of a key are
    sent by the same one.
    """
    declared = append.target.declared
    frame = encode_frame(_select_columns(frame, declared, order_by), declared, str(append.target))
    if declared.transactional:
        frame = frame.repartition(1)
    elif declared.key_format() is not None:
        frame = frame.repartition(min(append.target.partitions, _TASKS), KEY)
    if order_by:
        frame = frame.sortWithinPartitions(*[f"{_ORDER}{i}" for i in range(len(order_by))])
    frame = frame.select(*[name for name in frame.columns if not name.startswith(_ORDER)])
    if declared.transactional:
        # For a frame that it knows to be empty, Spark runs no task: then this process runs the
        # transaction.
        return _run_tasks(frame, append, send_in_transaction) or send_in_transaction(append, [])
    sent = _run_tasks(frame, replace(append, markers=()), send_without_transaction)
    spans = [] if sent is None else sent.spans
    if append.markers:
        spans += send_without_transaction(append, []).spans
    return SendResult(spans)


def _run_tasks(
    frame: DataFrame,
    append: TaskAppend,
    send: Callable[[TaskAppend, Iterable[pa.RecordBatch]], SendResult],
) -> SendResult | None:
    """Call `send` in each task of the frame; return all spans, and whether one of the tasks found a
    duplicate. None without tasks.
    """

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Send a task's records; yield where they are, in the columns of _SPANS."""

        def results() -> Iterator[pa.RecordBatch]:
            sent = send(append, batches)
            rows: list[dict[str, Any]] = []
            for span in sent.spans:
                rows.append({**asdict(span), "duplicate": sent.duplicate})
            if not rows:  # a row without a partition says that the task ran
                rows.append({"rows": 0, "duplicate": sent.duplicate})
            yield pa.RecordBatch.from_pylist(rows, schema=_SPANS.to_arrow())

        yield from encode_task_errors(results())

    with translate_spark_errors():
        rows = map_in_arrow(frame, task, _SPANS.ddl()).collect()
    if not rows:
        return None
    spans = []
    for row in rows:
        if row["partition"] is not None:
            spans.append(SentSpan(row["partition"], row["first"], row["next"], row["rows"]))
    return SendResult(spans, any(row["duplicate"] for row in rows))


def _select_columns(frame: DataFrame, declared: KafkaTopic, order_by: Sequence[str]) -> DataFrame:
    """Return the frame with the stream's columns and those that become headers, then copies of
    `order_by`.

    The copies are named by their position in the order (_ORDER), so that the frame can be sorted
    after it is encoded.
    """
    schema = declared.schema()
    dropped = {*RECORD_META, *order_by} - {TIMESTAMP, TOMBSTONE, EPOCH, *schema.names}
    columns = []
    for name in frame.columns:
        if name not in dropped:
            columns.append(named_column(name))
    order = [named_column(name).alias(f"{_ORDER}{i}") for i, name in enumerate(order_by)]
    return frame.select(*columns, *order)


def result_from_spans(spans: Sequence[SentSpan], *, duplicate: bool) -> AppendResult:
    """Return the result of an append to these offsets, which are all known."""
    first: dict[int, int] = {}
    after: dict[int, int] = {}
    for span in spans:
        assert span.first is not None
        assert span.next is not None
        first[span.partition] = min(span.first, first.get(span.partition, span.first))
        after[span.partition] = max(span.next, after.get(span.partition, span.next))
    starts = {partition: str(offset) for partition, offset in sorted(first.items())}
    ends = {partition: str(offset) for partition, offset in sorted(after.items())}
    return AppendResult(starts, ends, sum(span.rows for span in spans), duplicate)

"""Appends as one Kafka transaction: records, markers, consumed offsets and the mark that all are in; or nothing.

The mark is what makes a repeated append add nothing. Kafka keeps it as committed offsets of the group
`adjunct:PRODUCER` on the output topic: partition 0 always says which sequence was the last, and each partition that
got records where they lie. The broker forgets it `offsets.retention.minutes` (7 days) after the producer's last
append; a batch that is repeated later than that is written again.

A crash leaves an open transaction, of which readers see nothing. The next append of the same producer ends it before
it looks at the mark, and whoever still writes under the name then fails with CommitConflictError.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from dagster_adjunct.resources.errors import MalformedDocumentError, ProducerConflictError
from dagster_adjunct.resources.stored_documents import StoredDocument, first_problem
from dagster_adjunct.resources.streams.interface.checked_arguments import counted_anew
from dagster_adjunct.resources.streams.kafka.security import BrokerRefusals, new_client
from dagster_adjunct.resources.streams.kafka.send_errors import refused
from dagster_adjunct.resources.streams.kafka.task_producer import (
    Record,
    Sender,
    SentSpan,
    Target,
    TaskAppend,
    records_of,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from confluent_kafka import Consumer

_MARKS = "adjunct:"  # names of applications have no colon, so no group of theirs is this
_SECONDS = 60.0
_OPEN_SECONDS = 2.0
_ABORT_SECONDS = 10.0
_PAUSE_SECONDS = 0.1
_BITS = 128


class TransactionMark(StoredDocument):
    """What the mark of one partition says: of the append `sequence`, `rows` records begin at `first`."""

    format: Literal[1] = 1
    topic: str
    sequence: int
    digest: str
    first: int | None = None
    rows: int = 0


# By partition, and with the offset after the producer's records.
Marks = Mapping[int, tuple[TransactionMark, int]]


def transact(append: TaskAppend, batches: Iterable[pa.RecordBatch]) -> tuple[list[SentSpan], bool]:
    """Append the batches in one transaction; return where they lie, and whether they were in already.

    Raises ProducerConflictError for other records under a sequence that is in and for one below the last,
    CommitConflictError where another producer took the name over, and StreamUnavailableError, after which the same call
    may be repeated.
    """
    sender = Sender(append.target, f"{append.producer}/{append.target.topic}")
    _settle(sender, sender.producer.init_transactions)
    marks = _settled_marks(append.target, append.producer)
    last = marks[0][0] if 0 in marks else None
    digest = _Digest()
    if last is not None and append.sequence < last.sequence:
        raise counted_anew(str(append.target), append.producer, append.sequence, last.sequence)
    if last is not None and append.sequence == last.sequence:
        for batch in batches:
            digest.add_all(records_of(batch, append))
        _check_same(append, last, digest.of(append))
        return spans_of(marks, append.sequence), True
    sender.producer.begin_transaction()
    try:
        for batch in batches:
            sender.send(digest.passed(records_of(batch, append)))
        sender.mark(append)
        spans = sender.finish()
        mark = TransactionMark(topic=append.target.identity, sequence=append.sequence, digest=digest.of(append))
        _commit_offsets(sender, append, spans, mark, marks[0][1] if 0 in marks else 0)
        _settle(sender, sender.producer.commit_transaction)
    except BaseException:
        # Where this fails, too, the broker ends the transaction, at the latest after its time-out.
        with suppress(Exception):
            sender.producer.abort_transaction(_ABORT_SECONDS)
        raise
    return spans, False


def read_marks(target: Target, producer: str) -> Marks:
    """Return the marks that this producer left on the topic.

    Where a transaction of the producer is open, as after a crash, those from before it. Marks on a topic of the same
    name that was deleted do not count. Raises MalformedDocumentError for a mark that can't be read.
    """
    from confluent_kafka import KafkaException

    try:
        return _read_marks(target, producer, "read_committed", _OPEN_SECONDS)
    except KafkaException as error:
        if error.args[0].code() != error.args[0]._TIMED_OUT:
            raise refused(error.args[0], target) from error
    return _settled_marks(target, producer, "read_uncommitted")


def _settled_marks(target: Target, producer: str, isolation: str = "read_committed") -> Marks:
    from confluent_kafka import KafkaException

    try:
        return _read_marks(target, producer, isolation, _SECONDS)
    except KafkaException as error:
        raise refused(error.args[0], target) from error


def _read_marks(target: Target, producer: str, isolation: str, seconds: float) -> Marks:
    """Return the marks; as `read_committed` this waits until no transaction of the producer is open."""
    from confluent_kafka import KafkaException, TopicPartition

    refusals = BrokerRefusals(target.settings)
    wanted = [TopicPartition(target.topic, partition) for partition in range(target.partitions)]
    with closing(_member(target, _MARKS + producer, refusals, isolation)) as consumer:
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
                    raise
                time.sleep(_PAUSE_SECONDS)  # the group's coordinator starts, or moves to another broker
    marks = {
        position.partition: (_parsed(position.metadata, target), position.offset)
        for position in committed
        if position.metadata
    }
    return {partition: mark for partition, mark in marks.items() if mark[0].topic == target.identity}


def spans_of(marks: Marks, sequence: int) -> list[SentSpan]:
    """Return where the records of this sequence lie; nothing where a later one has been written over it."""
    return [
        SentSpan(partition, mark.first, after, mark.rows)
        for partition, (mark, after) in sorted(marks.items())
        if mark.sequence == sequence and mark.first is not None
    ]


def _commit_offsets(
    sender: Sender, append: TaskAppend, spans: list[SentSpan], mark: TransactionMark, before: int
) -> None:
    """Put the marks and the consumed offsets into the transaction; `before` is where partition 0 stood."""
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
            # Nobody joins these groups: committing in a transaction needs no more than their names.
            with closing(_member(target, group, BrokerRefusals(target.settings), "read_committed")) as member:
                send = partial(sender.producer.send_offsets_to_transaction, offsets, member.consumer_group_metadata())
                _settle(sender, send)


def _settle(sender: Sender, step: Callable[[float], object]) -> None:
    """Call one step of a transaction, again where Kafka says that this may help; raise what it means otherwise."""
    from confluent_kafka import KafkaException

    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            step(max(deadline - time.monotonic(), 1.0))
            return
        except KafkaException as error:
            if not error.args[0].retriable() or time.monotonic() > deadline:
                raise sender.explained(error.args[0]) from error
            time.sleep(_PAUSE_SECONDS)


class _Digest:
    """A digest of records that does not depend on their order."""

    def __init__(self) -> None:
        self._sum = 0
        self._count = 0

    def passed(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the records, counted in."""
        for record in records:
            digest = hashlib.blake2b(repr(record).encode(), digest_size=_BITS // 8).digest()
            self._sum += int.from_bytes(digest, "big")
            self._count += 1
            yield record

    def add_all(self, records: Iterable[Record]) -> None:
        for _ in self.passed(records):
            pass

    def of(self, append: TaskAppend) -> str:
        """Return the digest of what was counted in and of the append's markers."""
        whole = [self._count, self._sum % 2**_BITS, append.markers]
        return hashlib.blake2b(repr(whole).encode(), digest_size=_BITS // 8).hexdigest()


def _check_same(append: TaskAppend, last: TransactionMark, digest: str) -> None:
    if last.digest != digest:
        raise ProducerConflictError(
            f"sequence {append.sequence} of producer {append.producer!r} in {append.target} is in already with other "
            f"contents (digest {last.digest[:12]}, now {digest[:12]}).",
            "Nothing was added. Retry with the same records, or give new records the next sequence.",
            sequence=append.sequence,
            newest=last.sequence,
            producer=append.producer,
            stream=str(append.target),
        )


def _parsed(text: str, target: Target) -> TransactionMark:
    try:
        return TransactionMark.model_validate_json(text)
    except ValidationError as error:
        raise MalformedDocumentError(
            f"{target}: the mark of its producer reads {text[:200]!r}, which is none of this release of Adjunct "
            f"({first_problem(error)}).",
            "Append with the version that wrote it, or a newer one; or reset the offsets of that group.",
            stream=str(target),
        ) from error


def _member(target: Target, group: str, refusals: BrokerRefusals, isolation: str) -> Consumer:
    own = {"group.id": group, "enable.auto.commit": False, "isolation.level": isolation}
    consumer: Consumer = new_client("consumer", target.settings, own, refusals)
    return consumer

"""The Kafka producer of a task: sends records, and tracks the delivery of each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from dagster_adjunct.resources.errors import (
    AdjunctError,
    CommitConflictError,
    PermanentError,
    SchemaMismatchError,
    StreamUnavailableError,
)
from dagster_adjunct.resources.schemas.values import first_unreadable, readable_value
from dagster_adjunct.resources.streams.kafka.client import TRANSIENT_CODES, BrokerRefusals, KafkaSettings, new_client
from dagster_adjunct.resources.streams.kafka.record_formats import HEADERS, KEY, VALUE
from dagster_adjunct.resources.streams.system import EPOCH, SOURCE, SOURCE_OFFSET, TIMESTAMP

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

_MAX_KEY_SHOWN = 60


def translate_produce_error(
    error: KafkaError, target: Target, key: bytes | None = None, size: int | None = None
) -> AdjunctError:
    """Return the Adjunct error for a Kafka error of an append."""
    reason = error.str()
    if error.name() in ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH"):
        problem = f"{target}: another producer of the same name took over during the append, or the append took longer "
        problem += f"than transaction.timeout.ms ({reason})."
        step = "Nothing of this append is visible. Run one application of a name at a time, then append again."
        return CommitConflictError(problem, step, stream=str(target))
    if error.name() == "MSG_SIZE_TOO_LARGE":
        its_size = "" if size is None else f" has {size:,} bytes and"
        problem = f"{target}: the record with the key {_describe_key(key)}{its_size} is larger than the topic allows "
        problem += f"({target.max_bytes:,} bytes)."
        step = f"Make it smaller, or raise max.message.bytes of {target.topic!r}, and message.max.bytes in client=."
        return PermanentError(problem, step, stream=str(target))
    if error.name() in TRANSIENT_CODES:
        problem = f"{target}: Kafka did not accept the records ({error.name()}: {reason})."
        step = "Check whether the brokers are up, then append again."
        return StreamUnavailableError(problem, step, system=target.settings.name, stream=str(target))
    record = "" if key is None else f" the record with the key {_describe_key(key)}"
    step = f"Check the settings and the access rules of topic {target.topic!r}, then append again."
    return PermanentError(f"{target}: Kafka rejected{record or ' the records'} ({error.name()}: {reason}).", step)


def _describe_key(key: bytes | None) -> str:
    """Return a key for an error: its text, or its bytes in hex; at most 60 characters."""
    if key is None:
        return "null"
    text = key.decode("utf-8", "replace")
    text = text if text.isprintable() and "\ufffd" not in text else key.hex()
    return repr(text if len(text) <= _MAX_KEY_SHOWN else text[: _MAX_KEY_SHOWN - 1] + "…")


# The prefix of Adjunct's own headers, which are not copied to other topics.
RESERVED = "adjunct-"
END_OF_DATASET = f"{RESERVED}end-of-dataset"
_GRACE = 10.0
_LEAST_LIMIT = 1000  # librdkafka's minimum

Header = tuple[str, str | bytes | None]
# Key, value (None: a tombstone), ms since the epoch (0: now), headers.
OutgoingRecord = tuple[bytes | None, bytes | None, int, list[Header]]

# Defaults that the user's client settings may override. Queues are small, as several tasks share a machine.
_DEFAULTS = {
    "linger.ms": 20,
    "message.timeout.ms": 60_000,
    "queue.buffering.max.kbytes": 131_072,
    "transaction.timeout.ms": 300_000,
}
# Settings that Adjunct's guarantees depend on.
_FIXED = {"enable.idempotence": True, "acks": "all", "partitioner": "murmur2_random"}


@dataclass(frozen=True, slots=True)
class Target:
    """The topic to append to; picklable. `max_bytes` is the size of the largest record that it accepts."""

    settings: KafkaSettings
    stream: str
    topic: str
    identity: str
    partitions: int
    max_bytes: int

    def __str__(self) -> str:
        return f"{self.settings.name}.{self.stream}"


@dataclass(frozen=True, slots=True)
class TaskAppend:
    """An append without its records; picklable.

    `markers` are (partition, header). `consumed` are the next offsets of the input, by topic and partition.
    """

    target: Target
    producer: str
    sequence: int
    markers: tuple[tuple[int, bytes], ...] = ()
    consumed: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    def headers(self) -> list[Header]:
        """Return the headers of every record, by which consumers can detect duplicates."""
        return [(f"{RESERVED}producer", self.producer.encode()), (f"{RESERVED}sequence", str(self.sequence).encode())]


@dataclass(frozen=True, slots=True)
class SentSpan:
    """The offsets [first, next) of a producer's records in a partition, None if the broker did not return them."""

    partition: int
    first: int | None
    next: int | None
    rows: int


class Sender:
    """An idempotent producer, which keeps the order of records in each partition."""

    def __init__(self, target: Target, transactional_id: str | None = None) -> None:
        given = target.settings.client
        own: dict[str, Any] = {"message.max.bytes": max(target.max_bytes, _LEAST_LIMIT), **_DEFAULTS}
        own = {key: value for key, value in own.items() if key not in given} | _FIXED
        if transactional_id is not None:
            own["transactional.id"] = transactional_id
        waits = given.get("delivery.timeout.ms", given.get("message.timeout.ms", _DEFAULTS["message.timeout.ms"]))
        self._seconds = int(waits) / 1000
        self._target = target
        self._first: dict[int, int | None] = {}
        self._last: dict[int, int | None] = {}
        self._rows: dict[int, int] = {}
        self._failure: AdjunctError | None = None
        self._refusals = BrokerRefusals(target.settings)
        self.producer: Producer = new_client(
            "producer", target.settings, {**own, "on_delivery": self._delivered}, self._refusals
        )

    def send(self, records: Iterable[OutgoingRecord], partition: int = -1) -> None:
        """Queue records for the partitions of their keys (or for this one), waiting while the queue is full.

        Raises the error of a record that was not delivered, of this call or an earlier one.
        """
        from confluent_kafka import KafkaException

        produce, topic = self.producer.produce, self._target.topic
        for key, value, timestamp, headers in records:
            while True:
                try:
                    produce(topic, value, key, partition=partition, timestamp=timestamp, headers=headers)
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
        """Wait until every record is delivered; return their offsets. Raises the first error of a delivery."""
        deadline = time.monotonic() + self._seconds + _GRACE
        while (left := self._poll(lambda: self.producer.flush(1.0))) and time.monotonic() < deadline:
            pass
        if left:
            problem = f"{self._target}: {left} records were not delivered within {self._seconds + _GRACE:.0f} s."
            step = "Check whether the brokers are up, then append again."
            raise StreamUnavailableError(problem, step, system=self._target.settings.name, stream=str(self._target))
        return [
            SentSpan(partition, self._first[partition], None if last is None else last + 1, self._rows[partition])
            for partition, last in sorted(self._last.items())
        ]

    def translate_error(self, error: KafkaError, key: bytes | None = None, size: int | None = None) -> AdjunctError:
        """Return the Adjunct error for this error of the client."""
        try:
            self._refusals.check()
        except AdjunctError as login:
            return login
        if error.code() == error._FATAL:
            return self._fatal_error()
        return translate_produce_error(error, self._target, key, size)

    def _poll(self, wait: Callable[[], int]) -> int:
        """Let the client run its callbacks, by `wait`; raise the first error."""
        from confluent_kafka import KafkaException

        try:
            left = wait()
        except KafkaException as error:
            raise self.translate_error(error.args[0]) from error
        except SystemError as error:
            # The client failed fatally while it called `_delivered`, which loses the reason.
            raise self._fatal_error() from error
        except:  # noqa: E722
            # After a fatal error, a client with a logger raises its bare KafkaError, which is not a BaseException.
            if isinstance(sys.exc_info()[1], BaseException):
                raise
            raise self._fatal_error() from None
        self._refusals.check()
        if self._failure is not None:
            raise self._failure
        return left

    def _fatal_error(self) -> AdjunctError:
        """Return the error that ended the client."""
        from confluent_kafka import KafkaException

        try:
            self.producer.begin_transaction()  # invalid here, so it only fails
        except KafkaException as error:
            if error.args[0].fatal():
                return translate_produce_error(error.args[0], self._target)
        problem = f"{self._target}: the producer failed fatally."
        step = "Append again."
        return StreamUnavailableError(problem, step, system=self._target.settings.name, stream=str(self._target))

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            if self._failure is None:
                self._failure = self.translate_error(error, message.key())
            return
        partition, offset = message.partition(), message.offset()
        # The broker does not return offsets of a batch that it already had, from a try whose answer was lost.
        known = offset if offset is not None and offset >= 0 else None
        self._first.setdefault(partition, known)  # type: ignore[arg-type]
        self._last[partition] = known  # type: ignore[index]
        self._rows[partition] = self._rows.get(partition, 0) + 1  # type: ignore[index,arg-type]


def records_from_batch(batch: pa.RecordBatch, append: TaskAppend) -> Iterator[OutgoingRecord]:
    """Return the records of a batch with `__key`, `__value` and, optionally, `__timestamp`, `__epoch`, `__headers` and
    the columns of POSITION.

    Kafka stores times in ms. Raises SchemaMismatchError for a time that it can't store.
    """
    return zip(
        batch.column(KEY).to_pylist(),
        batch.column(VALUE).to_pylist(),
        _record_times(batch, append.target),
        _record_headers(batch, append.headers()),
        strict=False,
    )


def _record_times(batch: pa.RecordBatch, what: Target) -> Iterable[int]:
    if TIMESTAMP not in batch.schema.names:
        return repeat(0, batch.num_rows)
    stated = batch.column(TIMESTAMP)
    found = first_unreadable(batch, [TIMESTAMP])
    # Truncating to microseconds loses nothing: Kafka stores milliseconds.
    given = pa.nulls(0, pa.int64()) if found else stated.cast(pa.timestamp("us", tz="UTC"), safe=False).cast(pa.int64())
    least = pc.min(given).as_py()
    if found is not None or (least is not None and least < 1000):
        which = found.text if found is not None else readable_value(pc.min(stated))
        problem = f"{what}: a record has the time {which}, but Kafka only stores times from 1970-01-01 to 9999-12-31."
        step = "Leave its __timestamp null: the record then has the time of the append."
        raise SchemaMismatchError(problem, step, stream=str(what))
    times: list[int] = pc.fill_null(pc.divide(given, 1000), 0).to_pylist()
    return times


def _record_headers(batch: pa.RecordBatch, own: list[Header]) -> Iterable[list[Header]]:
    names = batch.schema.names
    rows = batch.num_rows
    epochs: Sequence[int] = pc.fill_null(batch.column(EPOCH), 0).to_pylist() if EPOCH in names else [0] * rows
    if any(epochs):
        by_epoch = {epoch: [*own, (f"{RESERVED}epoch", str(epoch).encode())] for epoch in set(epochs) if epoch}
        ours: Iterable[list[Header]] = (by_epoch.get(epoch, own) for epoch in epochs)
    else:
        ours = repeat(own, rows)
    if SOURCE in names and SOURCE_OFFSET in names:
        made = zip(ours, batch.column(SOURCE).to_pylist(), batch.column(SOURCE_OFFSET).to_pylist(), strict=False)
        ours = (
            mine if source is None else [*mine, (f"{RESERVED}source", f"{source}@{offset}".encode())]
            for mine, source, offset in made
        )
    if HEADERS not in names:
        return ours
    return (_merge_headers(theirs, mine) for theirs, mine in zip(batch.column(HEADERS).to_pylist(), ours, strict=False))


def _merge_headers(theirs: Sequence[Mapping[str, Any]] | None, ours: list[Header]) -> list[Header]:
    return [
        (header["name"], header["value"]) for header in theirs or () if not header["name"].startswith(RESERVED)
    ] + ours

"""Reads exact ranges of a topic's partitions, by position, and the end-of-dataset markers in them.

Offsets have gaps, from control records, aborted transactions and compaction. So a range has been
read when the consumer's position is at or past its end, however few the records. No offsets are
committed and no consumer group rebalances: the consumer's partitions and offsets are assigned.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from dagster_adjunct.resources.documents import (
    RepeatedMemberError,
    first_validation_problem,
    unique_members,
)
from dagster_adjunct.resources.errors import (
    AdjunctError,
    MalformedDocumentError,
    OffsetOutOfRangeError,
)
from dagster_adjunct.resources.sql.expression import nearest_names
from dagster_adjunct.resources.streams.kafka import client
from dagster_adjunct.resources.streams.kafka.client import BrokerRefusals, KafkaAdmin, TopicFacts
from dagster_adjunct.resources.streams.kafka.produce import END_OF_DATASET
from dagster_adjunct.resources.streams.system import (
    Marker,
    SystemStreamPartition,
    dropped_offset_error,
)

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message

MAX_MESSAGES = 10_000
_POLL_SECONDS = 0.1
# Defaults that the user's client settings may override.
_DEFAULTS: Mapping[str, Any] = {
    "queued.min.messages": 500_000,
    "queued.max.messages.kbytes": 32_768,
    "log_level": 4,  # warnings; errors are raised
    # How long a broker waits before it reports a partition's end; reading a range that ends in a
    # gap takes as long.
    "fetch.wait.max.ms": 50,
    # How long the client stops fetching when its queue is full: less than it takes to empty the
    # queue.
    "fetch.queue.backoff.ms": 20,
}
# For reading the first messages only.
_SMALL_FETCH: Mapping[str, Any] = {"queued.min.messages": 1, "fetch.message.max.bytes": 262_144}
# Settings that Adjunct's guarantees depend on.
_FIXED: Mapping[str, Any] = {
    "group.id": "adjunct-reads",  # required by the client; no such group ever forms
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    "enable.partition.eof": True,
    "check.crcs": True,
}


@dataclass(frozen=True, slots=True)
class TopicRange:
    """The offsets [start, end) of one partition of a topic."""

    partition: int
    start: int
    end: int


PartitionMessages = tuple[TopicRange, list["Message"]]
"""A range, and some of its messages."""


def read_ranges(topic: TopicFacts, ranges: Sequence[TopicRange]) -> Iterator[PartitionMessages]:
    """Yield exactly the messages of these ranges: (range, up to MAX_MESSAGES of its messages), in
    order in each range.

    No two ranges may be of the same partition. At the end, checks that the topic was not recreated
    meanwhile. Raises OffsetOutOfRangeError for a range that the topic does not contain entirely
    (any more), and StreamUnavailableError if no messages arrive within `response_timeout`.
    """
    if any(wanted.start < wanted.end for wanted in ranges):
        yield from _RangeConsumer(topic, ranges).messages()
        check_topic_identity(topic, ranges[0].partition)


class MarkerHeader(BaseModel):
    """The header `adjunct-end-of-dataset` of an end-of-dataset marker, a record without key and
    value.

    Any producer may write one, as JSON: {"version": "v7", "rows": 1200}. `rows` are those of the
    partition. Members of their own are ignored, unless their name is close to one of these. Kafka
    has no index of headers, so finding markers reads all records, about 100,000 a second.
    """

    model_config = ConfigDict(frozen=True)

    version: str = Field(min_length=1)
    rows: int | None = Field(default=None, ge=0)
    checksum: str | None = None
    valid_from: AwareDatetime | None = None
    partitions: int | None = Field(default=None, ge=1)  # of the topic

    def encode(self) -> bytes:
        """Return the value of the header."""
        return self.model_dump_json(exclude_none=True).encode()


def marker_from_message(message: Message, ssp: SystemStreamPartition) -> Marker:
    """Return the marker in a message. Raises MalformedDocumentError if it can't be read."""
    headers: list[tuple[str, bytes | None]] = message.headers() or []  # type: ignore[assignment]
    header = next((value for name, value in headers if name == END_OF_DATASET), None)
    try:
        body = MarkerHeader.model_validate_json(header or b"", strict=True)
        _check_members(header or b"")
    except (ValidationError, _WrongMember) as error:
        if isinstance(error, ValidationError):
            reason = first_validation_problem(error)
        else:
            reason = str(error)
        problem = (
            f"{ssp}: the end-of-dataset marker at offset {message.offset()} is"
            f" {(header or b'')[:200]!r}: {reason}."
        )
        step = (
            'Write markers as {"version": "v7"}, optionally with "rows", "checksum", "valid_from"'
            ' and "partitions". If no records follow this one, the right marker replaces it:'
            f" append_markers({ssp.stream!r}, VERSION,"
            f" partitions=[{ssp.partition}], …). Otherwise remove the records up to and including"
            " this one with kafka-delete-records, and deliver the version again."
        )
        raise MalformedDocumentError(problem, step, stream=ssp.qualified_stream) from error
    return Marker(ssp, str(message.offset()), **dict(body))


class _WrongMember(ValueError):
    """The reason why a marker's members are not what its producer can have meant."""


def _check_members(header: bytes) -> None:
    """Raise _WrongMember for a member that is stated twice, or probably misspelt: what it states
    would not be checked. Other unknown members are passed over.
    """
    known = list(MarkerHeader.model_fields)
    try:
        members = json.loads(header, object_pairs_hook=unique_members)
    except RepeatedMemberError as error:
        raise _WrongMember(f"{error} is stated twice") from error
    for name in members:
        if name not in known and (near := nearest_names(name, known, 1)):
            raise _WrongMember(f"{name!r} is no member of a marker, but close to {near[0]!r}")


def is_marker(headers: Any) -> bool:
    """Return whether a message with these headers is an end-of-dataset marker."""
    return headers is not None and any(name == END_OF_DATASET for name, _ in headers)


def find_offsets_at_time(
    topic: TopicFacts, ranges: Sequence[TopicRange], timestamp_ms: int
) -> dict[int, int]:
    """Return the offset of the first message at or after a time in each range, by partition; else
    the range's end.

    `timestamp_ms` is in ms since the epoch. Reads a few messages from the start of each range,
    which is where a broker found an entry by time: readers may not see that entry.
    """
    offsets = {wanted.partition: wanted.end for wanted in ranges}
    if not ranges:  # no consumer is needed
        return offsets
    reader = _RangeConsumer(topic, ranges, _SMALL_FETCH)
    for wanted, got in reader.messages():
        for message in got:
            at = message.offset()
            if at is not None and message.timestamp()[1] >= timestamp_ms:
                offsets[wanted.partition] = at
                reader.stop_partition(wanted.partition)
                break
    return offsets


def check_topic_identity(topic: TopicFacts, partition: int) -> None:
    """Raise OffsetOutOfRangeError if the topic was deleted or recreated; `partition` is the one
    that was read.
    """
    described = KafkaAdmin(topic.settings).describe(topic.topic)
    if described is None or described.id != topic.identity:
        if described is None:
            now = "missing"
        else:
            now = described.id
        problem = (
            f"{topic.ssp(partition)}: topic {topic.topic!r} was deleted or recreated while it was"
            f" read: its id was {topic.identity}, now it is {now}."
        )
        step = (
            "Offsets of the old topic are invalid in a new one: set a startpoint (oldest) for its"
            " partitions."
        )
        raise OffsetOutOfRangeError(problem, step, stream=str(topic), partition=partition)


class _RangeConsumer:
    """A consumer that reads ranges of one topic, at most one of each partition."""

    def __init__(
        self, topic: TopicFacts, ranges: Sequence[TopicRange], own: Mapping[str, Any] | None = None
    ) -> None:
        self._topic = topic
        settings = topic.settings
        self._refusals = BrokerRefusals(settings)
        given = {**_DEFAULTS, **(own or {})}
        for key in given.keys() & settings.client.keys():  # the user's override them
            del given[key]
        self._consumer: Consumer = client.new_client(
            "consumer", settings, {**given, **_FIXED}, self._refusals
        )
        self._left: dict[int, TopicRange] = {}
        self._positions: dict[int, int] = {}
        for wanted in ranges:
            if wanted.start < wanted.end:
                self._left[wanted.partition] = wanted
                self._positions[wanted.partition] = wanted.start

    def messages(self) -> Iterator[PartitionMessages]:
        """Yield exactly the messages of the ranges as (range, some of its messages), in order in
        each range.
        """
        from confluent_kafka import TopicPartition

        with closing(self._consumer):
            name = self._topic.topic
            ranges = self._left.values()
            self._consumer.assign(
                [TopicPartition(name, wanted.partition, wanted.start) for wanted in ranges]
            )
            received_at = time.monotonic()
            while self._left:
                # No more than can be left, since the call returns as soon as it has as many.
                offsets_left = sum(
                    wanted.end - self._positions[wanted.partition] for wanted in ranges
                )
                got = self._consumer.consume(min(MAX_MESSAGES, offsets_left), _POLL_SECONDS)
                ended = list[int]()
                if any(message.error() for message in got):
                    got, ended = self._handle_errors(got)
                for share in self._group_by_partition(got):
                    yield share
                    received_at = time.monotonic()
                for partition in ended:
                    self.stop_partition(partition)
                if not got:
                    self._check_answers(received_at)

    def _check_answers(self, received_at: float) -> None:
        """Raise an error if brokers refuse to answer, or sent nothing within the timeout."""
        self._refusals.check()
        settings = self._topic.settings
        limit = client.response_timeout(settings)
        if time.monotonic() - received_at > limit and self._left:
            partition = next(iter(self._left))
            what = (
                f"the records of {self._topic.ssp(partition)} from offset"
                f" {self._positions[partition]}"
            )
            raise client.no_answer_error(settings, what, f"none in {limit:.0f} s")

    def stop_partition(self, partition: int) -> None:
        """Stop reading a partition, even before the end of its range."""
        from confluent_kafka import TopicPartition

        was_read = self._left.pop(partition, None) is not None
        if was_read and self._left:  # else the consumer is closed
            self._consumer.pause([TopicPartition(self._topic.topic, partition)])

    def _group_by_partition(self, got: list[Message]) -> Iterator[PartitionMessages]:
        """Yield the messages that are in the ranges, for each partition, and advance the
        positions past `got`.
        """
        by_partition: dict[Any, list[Message]] = {}
        if len(self._positions) == 1:  # all are of the only partition
            by_partition = dict.fromkeys(self._left, got)
        else:
            for message in got:
                by_partition.setdefault(message.partition(), []).append(message)
        for partition, given in by_partition.items():
            wanted = self._left.get(partition)
            if wanted is None or not given:
                continue
            position: Any = given[-1].offset()
            self._positions[partition] = position + 1
            if position + 1 >= wanted.end:
                self.stop_partition(partition)
            inside = given[: bisect_left(given, wanted.end, key=methodcaller("offset"))]
            if inside:
                yield wanted, inside

    def _handle_errors(self, got: list[Message]) -> tuple[list[Message], list[int]]:
        """Return the messages without the errors in `got`, and the partitions that were read to the
        end of their range.

        Raises errors other than that of a partition's end.
        """
        ended = []
        for message in got:
            error = message.error()
            if error is None or error.code() == error.GROUP_AUTHORIZATION_FAILED:  # we use no group
                continue
            wanted = self._left.get(message.partition())  # type: ignore[arg-type]
            if wanted is None and message.partition() in self._positions:
                continue  # its range has been read already
            if wanted is None or error.code() != error._PARTITION_EOF:
                raise self._read_error(error, wanted)
            if message.offset() >= wanted.end:  # type: ignore[operator]
                ended.append(wanted.partition)
            else:
                # A replica lags, or the topic was recreated and is shorter.
                check_topic_identity(self._topic, wanted.partition)
        return [message for message in got if message.error() is None], ended

    def _read_error(self, error: KafkaError, wanted: TopicRange | None) -> AdjunctError:
        """Return the Adjunct error for an error of Kafka in the range `wanted`, or, if that is
        None, for one of the topic.
        """
        from confluent_kafka import TopicPartition

        topic = self._topic
        settings = self._topic.settings
        if wanted is None:
            return client.translate_kafka_error(error, settings, f"topic {topic.topic!r}")
        ssp = topic.ssp(wanted.partition)
        if error.code() not in (error._AUTO_OFFSET_RESET, error.OFFSET_OUT_OF_RANGE):
            return client.translate_kafka_error(error, settings, str(ssp))
        check_topic_identity(topic, wanted.partition)  # else retention has dropped the offset
        at = TopicPartition(topic.topic, wanted.partition)
        oldest, _ = self._consumer.get_watermark_offsets(
            at, client.response_timeout(self._topic.settings)
        )
        return dropped_offset_error(ssp, self._positions[wanted.partition], oldest)

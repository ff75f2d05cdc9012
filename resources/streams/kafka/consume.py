"""Reads exact ranges of a topic's partitions, by position.

Offsets have holes: control records, aborted transactions and compaction leave them. So a range has been read when the
position is at its end, or past it, whatever the number of records was. Nothing is ever committed or rebalanced: the
consumer is told its partitions and offsets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import AdjunctError, OffsetOutOfRangeError
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition
from dagster_adjunct.resources.streams.kafka.admin import KafkaAdmin, failure, no_answer, patience
from dagster_adjunct.resources.streams.kafka.offset_texts import TOPIC
from dagster_adjunct.resources.streams.kafka.security import BrokerRefusals, new_client
from dagster_adjunct.resources.streams.kafka.task_producer import END_OF_DATASET

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message

    from dagster_adjunct.resources.streams.kafka.kafka_settings import KafkaSettings

BATCH = 10_000
_WAIT = 0.1
# What the user's own client settings may change.
_DEFAULTS: Mapping[str, Any] = {
    "queued.min.messages": 500_000,
    "queued.max.messages.kbytes": 32_768,
    "log_level": 4,  # warnings; what matters is raised
    # How long a broker thinks before it says that a partition ends here, which a range that ends in a hole waits for.
    "fetch.wait.max.ms": 50,
    # How long the client rests when its queue is full: shorter than it takes to empty it.
    "fetch.queue.backoff.ms": 20,
}
# For a look at the first messages only.
_A_LITTLE: Mapping[str, Any] = {"queued.min.messages": 1, "fetch.message.max.bytes": 262_144}
# What Adjunct's promises rest on.
_FIXED: Mapping[str, Any] = {
    "group.id": "adjunct-reads",  # the client asks for one; no group of this name ever forms
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    "enable.partition.eof": True,
    "check.crcs": True,
}


@dataclass(frozen=True, slots=True)
class TopicRange:
    """The offsets from `start` up to, but without, `end` of one partition of a topic, as it was when it had this id."""

    topic: str
    identity: str
    partition: int
    start: int
    end: int
    stream: str

    @property
    def ssp(self) -> str:
        return f"{self.stream}.{self.partition}"


Share = tuple[TopicRange, list["Message"]]


def read_ranges(settings: KafkaSettings, ranges: Sequence[TopicRange]) -> Iterator[Share]:
    """Yield exactly the messages of ranges of one topic, in lists of up to BATCH, those of each partition in order.

    Each range is of another partition. After the last message, makes sure that the topic still is the one that the
    ranges are of. Raises OffsetOutOfRangeError for a range that the topic does not hold whole (any more), and
    StreamUnavailableError where nothing comes for so long that the brokers must be in trouble.
    """
    if any(wanted.start < wanted.end for wanted in ranges):
        yield from _RangeConsumer(settings, ranges).shares()
        check_identity(settings, ranges[0])


def count_records(settings: KafkaSettings, ranges: Sequence[TopicRange]) -> int:
    """Return how many records ranges of one topic hold; markers are none. Reads all of them."""
    return sum(not is_marker(message.headers()) for _, got in read_ranges(settings, ranges) for message in got)


def is_marker(headers: Any) -> bool:
    """Whether a message with these headers ends a version of a dataset, and so is no record."""
    return headers is not None and any(name == END_OF_DATASET for name, _ in headers)


def first_at(settings: KafkaSettings, ranges: Sequence[TopicRange], timestamp_ms: int) -> dict[int, int]:
    """Return by partition where in its range the first message at or after a time (ms) is; its end where none is.

    A broker's own answer may be an entry that no reader sees, so this looks at the next that one does see. It reads a
    little of all partitions at once.
    """
    offsets = {wanted.partition: wanted.end for wanted in ranges}
    if not ranges:
        return offsets
    reader = _RangeConsumer(settings, ranges, _A_LITTLE)
    for wanted, got in reader.shares():
        at = next((message.offset() for message in got if message.timestamp()[1] >= timestamp_ms), None)
        if at is not None:
            offsets[wanted.partition] = at
            reader.leave(wanted.partition)
    return offsets


def check_identity(settings: KafkaSettings, wanted: TopicRange) -> None:
    """Raise OffsetOutOfRangeError if the topic is another one by now."""
    topic = KafkaAdmin(settings).describe(wanted.topic)
    if topic is None or topic.identity != wanted.identity:
        now = "gone" if topic is None else f"another one, {topic.identity}"
        raise OffsetOutOfRangeError(
            f"{wanted.ssp}: topic {wanted.topic!r} was deleted and created again while it was read: its id was "
            f"{wanted.identity}, now it is {now}.",
            "Offsets of the old topic mean nothing in the new one: set a startpoint (oldest) for its partitions.",
            partition=wanted.partition,
        )


class _RangeConsumer:
    """One consumer on ranges of different partitions."""

    def __init__(
        self, settings: KafkaSettings, ranges: Sequence[TopicRange], own: Mapping[str, Any] | None = None
    ) -> None:
        self._settings = settings
        self._refusals = BrokerRefusals(settings)
        given = {key: value for key, value in {**_DEFAULTS, **(own or {})}.items() if key not in settings.client}
        self._consumer: Consumer = new_client("consumer", settings, {**given, **_FIXED}, self._refusals)
        self._left = {wanted.partition: wanted for wanted in ranges if wanted.start < wanted.end}
        self._positions = {partition: wanted.start for partition, wanted in self._left.items()}

    def shares(self) -> Iterator[Share]:
        from confluent_kafka import TopicPartition

        limit = patience(self._settings)
        with closing(self._consumer):
            self._consumer.assign([TopicPartition(w.topic, w.partition, w.start) for w in self._left.values()])
            heard = time.monotonic()
            while self._left:
                # No more than can be left: the call comes back as soon as it has so many.
                width = sum(wanted.end - self._positions[partition] for partition, wanted in self._left.items())
                got, ended = self._consumer.consume(min(BATCH, width), _WAIT), list[int]()
                if any(message.error() for message in got):
                    got, ended = self._sorted_out(got)
                for share in self._shared(got):
                    yield share
                    heard = time.monotonic()
                for partition in ended:
                    self.leave(partition)
                if not got:
                    self._refusals.check()
                    if time.monotonic() - heard > limit:
                        raise self._silence(limit)

    def leave(self, partition: int) -> None:
        """Read no more of a partition."""
        from confluent_kafka import TopicPartition

        left = self._left.pop(partition, None)
        if left is not None and self._left:
            self._consumer.pause([TopicPartition(left.topic, partition)])

    def _shared(self, got: list[Message]) -> Iterator[Share]:
        """Yield what came by partition, within the ranges, and move the positions."""
        by_partition: dict[Any, list[Message]] = {}
        if len(self._positions) == 1:
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
            inside = given if position < wanted.end else [m for m in given if m.offset() < wanted.end]  # type: ignore[operator]
            if position + 1 >= wanted.end:
                self.leave(partition)
            if inside:
                yield wanted, inside

    def _sorted_out(self, got: list[Message]) -> tuple[list[Message], list[int]]:
        """Return the messages among what came, and the partitions that have ended; raise what else it means."""
        ended = []
        for message in got:
            error, wanted = message.error(), self._left.get(message.partition())  # type: ignore[arg-type]
            if error is None or error.code() == error.GROUP_AUTHORIZATION_FAILED:  # there is no group
                continue
            if wanted is None and message.partition() in self._positions:  # read already
                continue
            if error.code() != error._PARTITION_EOF:
                raise self._refused(error, wanted)
            if wanted is not None and message.offset() >= wanted.end:  # type: ignore[operator]
                ended.append(wanted.partition)
            elif wanted is not None:
                # A replica lags, or the topic was created again and has less.
                check_identity(self._settings, wanted)
        return [message for message in got if message.error() is None], ended

    def _refused(self, error: KafkaError, wanted: TopicRange | None) -> AdjunctError:
        from confluent_kafka import TopicPartition

        if wanted is None or error.code() not in (error._AUTO_OFFSET_RESET, error.OFFSET_OUT_OF_RANGE):
            topic = next(iter(self._left.values())).topic
            return failure(error, self._settings, f"topic {topic!r}" if wanted is None else wanted.ssp)
        check_identity(self._settings, wanted)
        at = TopicPartition(wanted.topic, wanted.partition)
        oldest, _ = self._consumer.get_watermark_offsets(at, patience(self._settings))
        return TOPIC.too_old(SystemStreamPartition.parse(wanted.ssp), self._positions[wanted.partition], oldest)

    def _silence(self, seconds: float) -> AdjunctError:
        partition, wanted = next(iter(self._left.items()))
        what = f"the records of {wanted.ssp} from offset {self._positions[partition]}"
        return no_answer(self._settings, what, f"none in {seconds:.0f} s")

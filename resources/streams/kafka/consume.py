"""Reads one exact range of a topic's partition, by position.

Offsets have holes: control records, aborted transactions and compaction leave them. So a range has been read when the
position is at its end, or past it, whatever the number of records was. Nothing is ever committed or rebalanced: the
consumer is told its partition and offset.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resources.errors import AdjunctError, OffsetOutOfRangeError
from resources.streams.kafka.admin import KafkaAdmin, failure, no_answer, patience
from resources.streams.kafka.delivery import END_OF_DATASET
from resources.streams.kafka.security import Refusals, new_client

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message

    from resources.streams.kafka.settings import KafkaSettings

BATCH = 10_000
_WAIT = 0.1
# What the user's own client settings may change.
_DEFAULTS: Mapping[str, Any] = {
    "queued.min.messages": 500_000,
    "queued.max.messages.kbytes": 32_768,
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


def new_consumer(settings: KafkaSettings, refusals: Refusals, own: Mapping[str, Any] | None = None) -> Consumer:
    """Return a consumer that reads what is committed, and never resets a position."""
    given = {key: value for key, value in {**_DEFAULTS, **(own or {})}.items() if key not in settings.client}
    consumer: Consumer = new_client("consumer", settings, {**given, **_FIXED}, refusals)
    return consumer


def messages(settings: KafkaSettings, wanted: TopicRange) -> Iterator[list[Message]]:
    """Yield exactly the messages of a range, in order, in lists of up to BATCH; none for an empty one.

    After the last, makes sure that the topic still is the one that the range is of. Raises OffsetOutOfRangeError for a
    range that the topic does not hold whole (any more), and StreamUnavailableError where nothing comes for so long
    that the brokers must be in trouble.
    """
    if wanted.start >= wanted.end:
        return
    from confluent_kafka import TopicPartition

    refusals = Refusals(settings)
    with closing(new_consumer(settings, refusals)) as consumer:
        consumer.assign([TopicPartition(wanted.topic, wanted.partition, wanted.start)])
        yield from _until_end(consumer, settings, wanted, refusals)
    check_identity(settings, wanted)


def count_records(settings: KafkaSettings, wanted: TopicRange) -> int:
    """Return how many records a range holds; markers are none. Reads all of them."""
    return sum(not is_marker(message.headers()) for got in messages(settings, wanted) for message in got)


def is_marker(headers: Any) -> bool:
    """Whether a message with these headers ends a version of a dataset, and so is no record."""
    return headers is not None and any(name == END_OF_DATASET for name, _ in headers)


def first_at(
    settings: KafkaSettings, topic: str, starts: Mapping[int, int], ends: Mapping[int, int], timestamp_ms: int
) -> dict[int, int]:
    """Return where each partition has its first message at or after a time (ms), from `starts` on; else its end.

    A broker's own answer may be an entry that no reader sees, so the next that one does see is looked at. One
    consumer reads all partitions, a little of each.
    """
    from confluent_kafka import TopicPartition

    found: dict[int, int] = {}
    if not starts:
        return found
    refusals, limit = Refusals(settings), patience(settings)
    with closing(new_consumer(settings, refusals, _A_LITTLE)) as consumer:
        consumer.assign([TopicPartition(topic, partition, start) for partition, start in starts.items()])
        heard = time.monotonic()
        while len(found) < len(starts):
            got = consumer.consume(BATCH if len(starts) > 1 else 1, _WAIT)
            before = len(found)
            for message in got:
                _look(message, found, ends, timestamp_ms, settings, topic)
            done = [TopicPartition(topic, partition) for partition in list(found)[before:]]
            if done:
                consumer.pause(done)
            if got:
                heard = time.monotonic()
            refusals.check()
            if time.monotonic() - heard > limit:
                left = sorted(starts.keys() - found)
                raise no_answer(settings, f"the records of topic {topic!r}, partitions {left[:10]}", "no answer")
    return found


def _look(
    message: Message, found: dict[int, int], ends: Mapping[int, int], time_ms: int, settings: KafkaSettings, topic: str
) -> None:
    """Note where a partition's first message at or after the time is, if this message tells."""
    error, partition, offset = message.error(), message.partition(), message.offset()
    if error is not None and error.code() == error.GROUP_AUTHORIZATION_FAILED:
        return
    if error is not None and error.code() != error._PARTITION_EOF:
        raise failure(error, settings, f"topic {topic!r}, partition {partition}")
    assert partition is not None
    assert offset is not None
    if partition in found:
        return
    if offset >= ends[partition]:
        found[partition] = ends[partition]
    elif error is None and message.timestamp()[1] >= time_ms:
        found[partition] = offset


def check_identity(settings: KafkaSettings, wanted: TopicRange) -> None:
    """Raise OffsetOutOfRangeError if the topic is another one by now."""
    found = KafkaAdmin(settings).describe(wanted.topic)
    if found is None or found.identity != wanted.identity:
        now = "gone" if found is None else f"another one, {found.identity}"
        raise OffsetOutOfRangeError(
            f"{wanted.ssp}: topic {wanted.topic!r} was deleted and created again while it was read: its id was "
            f"{wanted.identity}, now it is {now}.",
            "Offsets of the old topic mean nothing in the new one: set a startpoint (oldest) for its partitions.",
        )


def _until_end(
    consumer: Consumer, settings: KafkaSettings, wanted: TopicRange, refusals: Refusals
) -> Iterator[list[Message]]:
    position, limit = wanted.start, patience(settings)
    heard = time.monotonic()
    while position < wanted.end:
        # No more than can be left: the call comes back as soon as it has so many.
        got = consumer.consume(min(BATCH, wanted.end - position), _WAIT)
        ended = False
        if any(message.error() for message in got):
            got, ended = _sorted_out(got, consumer, settings, wanted)
        if got:
            heard = time.monotonic()
            position = got[-1].offset() + 1  # type: ignore[operator]
            if position > wanted.end:
                got = [message for message in got if message.offset() < wanted.end]  # type: ignore[operator]
            if got:
                yield got
                heard = time.monotonic()
        if ended:
            return
        if time.monotonic() - heard > limit:
            refusals.check()
            raise no_answer(settings, f"the records of {wanted.ssp} from offset {position}", f"none in {limit:.0f} s")
        if not got:
            refusals.check()


def _sorted_out(
    got: list[Message], consumer: Consumer, settings: KafkaSettings, wanted: TopicRange
) -> tuple[list[Message], bool]:
    """Return the messages among what came, and whether the range's end was seen; raise what the other events mean."""
    ended = False
    for message in got:
        error = message.error()
        if error is None:
            continue
        if error.code() == error._PARTITION_EOF:
            # Before the range's end, it is the end of a replica that lags, or of a topic that was created again.
            if message.offset() < wanted.end:  # type: ignore[operator]
                check_identity(settings, wanted)
            else:
                ended = True
        elif error.code() != error.GROUP_AUTHORIZATION_FAILED:  # there is no group
            raise _refused(error, consumer, settings, wanted)
    return [message for message in got if message.error() is None], ended


def _refused(error: KafkaError, consumer: Consumer, settings: KafkaSettings, wanted: TopicRange) -> AdjunctError:
    from confluent_kafka import TopicPartition

    if error.code() not in (error._AUTO_OFFSET_RESET, error.OFFSET_OUT_OF_RANGE):
        return failure(error, settings, wanted.ssp)
    check_identity(settings, wanted)
    at = TopicPartition(wanted.topic, wanted.partition)
    oldest, _ = consumer.get_watermark_offsets(at, patience(settings))
    return too_old(wanted.ssp, wanted.start, oldest)


def too_old(ssp: object, start: int, oldest: int) -> OffsetOutOfRangeError:
    """Return the error for a range that begins before what the topic still holds."""
    return OffsetOutOfRangeError(
        f"{ssp}: the range begins at offset {start}, the oldest that the topic still holds is {oldest}.",
        "Records before it were deleted by retention. Go on without them by a startpoint (oldest) for this partition, "
        "or keep the topic longer (retention.ms, retention.bytes) than its reader may fall behind.",
    )

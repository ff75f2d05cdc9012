"""Offsets of Kafka streams: edges, times and startpoints by the producers' own account; and what
looking costs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    OffsetOutOfRangeError,
    StreamExistsError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.kafka.client import KafkaAdmin, KafkaSettings
from dagster_adjunct.resources.streams.kafka.formats import Json, KeyText
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic
from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams, kafka_system
from dagster_adjunct.resources.streams.lake.streams import open_system
from dagster_adjunct.resources.streams.startpoint import (
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
    resolve_startpoint_to_offset,
)
from dagster_adjunct.resources.streams.system import (
    LogCompaction,
    StreamSystem,
    SystemStreamPartition,
)
from tests.resources.streams.kafka.conftest import NewLog, SystemOf
from tests.resources.streams.kafka.topic_log import TopicLog
from tests.servers.kafka import KafkaServer

pytestmark = pytest.mark.server

SCHEMA = Schema.of(tailnum="string", seats="int")
BEGIN_MS = 1_700_000_000_000


def edges(system: StreamSystem, stream: str) -> list[tuple[int, int]]:
    ssps = system.partitions(stream)
    oldest, upcoming = system.oldest(ssps), system.upcoming(ssps)
    return [(int(oldest[ssp]), int(upcoming[ssp])) for ssp in ssps]


def first_at(log: TopicLog, time_ms: int, upcoming: int, partition: int = 0) -> int:
    """Return by the producers' account where the first record at or after a time is, in offset
    order.
    """
    offsets = [
        e.offset
        for e in log.seen
        if e.partition == partition and e.time_ms >= time_ms and e.offset < upcoming
    ]
    return min(offsets, default=upcoming)


# -- edges


def test_the_edges_are_the_oldest_offset_that_is_held_and_the_last_stable_one(
    system: KafkaStreams, new_log: NewLog
) -> None:
    log = new_log(4)
    log.write(*[b"x"] * 5, partition=1)
    log.write(*[b"x"] * 5, partition=2)
    log.delete_before(5, partition=2)
    log.transaction(b"kept", partition=3)
    undecided = log.transactional()
    undecided.begin_transaction()
    log.write_in(undecided, b"a", b"b", partition=3)
    assert edges(system, log.name) == [(0, 0), (0, 5), (5, 5), (0, 2)]
    undecided.commit_transaction(30)
    log.wait_until_stable(3, partition=3)
    assert edges(system, log.name)[3] == (0, 5)
    assert not system.has_all_keys(log.name)


def test_offsets_are_ordered_and_counted_as_numbers(system: KafkaStreams) -> None:
    ssp = SystemStreamPartition("kafka", "s", 0)
    assert [system.compare(*pair) for pair in (("9", "10"), ("10", "10"), ("11", "9"))] == [
        -1,
        0,
        1,
    ]
    assert (system.distance(ssp, "9", "12"), system.distance(ssp, "12", "9")) == (3, 0)
    assert system.advance(ssp, "9", 3) == "12"
    for bad in ("-1", "", "1.5", "٣", "latest"):
        with pytest.raises(OffsetOutOfRangeError) as caught:
            system.compare(bad, "1")
        assert caught.value.offset == bad


def test_partitions_that_do_not_exist_are_named(system: KafkaStreams, new_log: NewLog) -> None:
    log = new_log(2)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        system.oldest([SystemStreamPartition("kafka", log.name, 2)])
    assert (caught.value.stream, caught.value.partition) == (f"kafka.{log.name}", 2)
    with pytest.raises(StreamNotFoundError) as caught:
        system.upcoming([SystemStreamPartition("kafka", "nowhere", 0)])
    assert caught.value.stream == "kafka.nowhere"


# -- times


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_time_gives_the_first_visible_record_at_or_after_it_in_offset_order(
    seed: int, system: KafkaStreams, new_log: NewLog
) -> None:
    dice = random.Random(seed)
    log = new_log(segment_bytes=1_048_576)
    for _ in range(8):
        times = [BEGIN_MS + dice.randrange(60) for _ in range(dice.randrange(1, 12))]
        values = [bytes(dice.randrange(4000)) for _ in times]
        kind = dice.choice(["plain", "commit", "abort"])
        if kind == "plain":
            log.write(*values, times=times)
        else:
            log.transaction(*values, times=times, commit=kind == "commit")
    ssp = SystemStreamPartition("kafka", log.name, 0)
    snapshot = system.snapshot(log.name)
    upcoming = int(system.upcoming([ssp])[ssp])
    # What ends a transaction is of the time when it ended: later than all of these.
    for time_ms in [
        -62_135_596_800_000,
        0,
        BEGIN_MS - 1,
        *range(BEGIN_MS, BEGIN_MS + 61, 4),
        int(time.time() * 1000) + 10**6,
        253_402_300_799_999,
    ]:
        offset = system.offset_for_timestamp(ssp, time_ms)
        assert offset == snapshot.offset_for_timestamp(ssp, time_ms)
        assert int(offset) == first_at(log, time_ms, upcoming), time_ms


def test_past_the_end_and_on_an_empty_partition_a_time_is_upcoming(
    system: KafkaStreams, new_log: NewLog
) -> None:
    log = new_log(3)
    log.write(b"a", b"b", partition=1, times=[BEGIN_MS, BEGIN_MS])
    log.write(b"a", b"b", partition=2)
    log.delete_before(2, partition=2)
    ssps = system.partitions(log.name)
    assert [system.offset_for_timestamp(ssp, BEGIN_MS + 1) for ssp in ssps] == ["0", "2", "2"]


def test_a_record_that_arrives_while_a_time_is_looked_up_is_not_skipped(
    system: KafkaStreams, new_log: NewLog
) -> None:
    log = new_log()
    log.write(b"early", times=[BEGIN_MS])

    class SlowAnswers(KafkaAdmin):
        """The cluster's answer to where a time is takes so long that another record arrives."""

        def since(self, topic: str, partitions: Iterable[int], timestamp_ms: int) -> dict[int, int]:
            offsets = super().since(topic, partitions, timestamp_ms)
            log.write(b"late", times=[BEGIN_MS + 10])
            return offsets

    system.admin = SlowAnswers(system.settings)
    assert (
        system.offset_for_timestamp(SystemStreamPartition("kafka", log.name, 0), BEGIN_MS + 5)
        == "1"
    )


# -- startpoints


def test_startpoints_of_all_kinds_resolve(system: KafkaStreams, new_log: NewLog) -> None:
    log = new_log()
    log.write(*[b"x"] * 6, times=[BEGIN_MS + i for i in range(6)])
    log.delete_before(2)
    ssp = SystemStreamPartition("kafka", log.name, 0)
    for asked in (system, system.snapshot(log.name)):
        resolved = {
            kind: resolve_startpoint_to_offset(asked, ssp, startpoint)
            for kind, startpoint in {
                "oldest": StartpointOldest(),
                "upcoming": StartpointUpcoming(),
                "in": StartpointTimestamp(BEGIN_MS + 4),
                "before": StartpointTimestamp(0),
                "after": StartpointTimestamp(BEGIN_MS + 99),
                "specific": StartpointSpecific("3"),
                "end": StartpointSpecific("6"),
            }.items()
        }
        assert resolved == {
            "oldest": "2",
            "upcoming": "6",
            "in": "4",
            "before": "2",
            "after": "6",
            "specific": "3",
            "end": "6",
        }
        for offset in ("1", "7", "x"):
            with pytest.raises(OffsetOutOfRangeError) as caught:
                resolve_startpoint_to_offset(asked, ssp, StartpointSpecific(offset))
            assert caught.value.offset == offset


# -- what it costs


@pytest.fixture
def requests(system: KafkaStreams) -> list[str]:
    """What the system's admin client asks of the broker."""
    made: list[str] = []

    class Counted(KafkaAdmin):
        def _answers(self, asked: Any, what: str) -> dict[Any, Any]:
            made.append(what)
            return super()._answers(asked, what)

    system.admin = Counted(system.settings)
    return made


def test_a_snapshot_answers_for_hundreds_of_partitions_in_a_few_requests(
    system: KafkaStreams, new_log: NewLog, requests: list[str]
) -> None:
    count = 200
    log = new_log(count)
    log.write(*[b"x"] * 3, partition=7, times=[BEGIN_MS, BEGIN_MS + 5, BEGIN_MS + 9])
    log.write(b"y", partition=199, times=[BEGIN_MS + 5])
    snapshot = system.snapshot(log.name)
    ssps = snapshot.partitions(log.name)
    requests.clear()
    kinds = [
        StartpointOldest(),
        StartpointUpcoming(),
        StartpointTimestamp(BEGIN_MS + 1),
        StartpointSpecific("0"),
    ]
    offsets = [
        [resolve_startpoint_to_offset(snapshot, ssp, kind) for ssp in ssps] for kind in kinds
    ]
    assert len(requests) <= 4
    assert offsets[0] == ["0"] * count
    assert {p: offset for p, offset in enumerate(offsets[1]) if offset != "0"} == {7: "3", 199: "1"}
    assert {p: offset for p, offset in enumerate(offsets[2]) if offset != "0"} == {7: "1"}
    requests.clear()
    log.write(b"later", partition=0)
    assert edges(snapshot, log.name)[0] == (0, 0)
    assert not requests
    assert edges(system, log.name)[0] == (0, 1)


# -- creating and listing


def test_a_created_stream_is_known_to_another_process(
    system: KafkaStreams, system_of: SystemOf, kafka: KafkaServer
) -> None:
    made = system.create("made", schema=SCHEMA, key=["tailnum"], partitions=3)
    assert (made.partitions, made.key, made.schema, made.partitioner) == (
        3,
        ("tailnum",),
        SCHEMA,
        "kafka-murmur2",
    )
    other = system_of()
    assert other.info("made") == made
    assert other.create("made", schema=SCHEMA, key=["tailnum"], partitions=3) == made
    topic = other.topic("made")
    assert (topic.topic, topic.declared.value, topic.declared.key_names) == (
        "made",
        Json(SCHEMA),
        ("tailnum",),
    )
    for schema, key, partitions, what in (
        (Schema.of(tailnum="string"), ["tailnum"], 3, "seats"),
        (SCHEMA, ["seats"], 3, "key"),
        (SCHEMA, ["tailnum"], 4, "partitions is 4, expected 3"),
    ):
        with pytest.raises(StreamExistsError, match=what):
            other.create("made", schema=schema, key=key, partitions=partitions)


def test_created_topics_have_the_prefix_and_streams_do_not(
    system_of: SystemOf, kafka: KafkaServer
) -> None:
    system = system_of(prefix="team.")
    info = system.create("prefixed", schema=SCHEMA, key=["tailnum"], partitions=2)
    assert info.name == "prefixed"
    assert system.topic("prefixed").topic == "team.prefixed"
    assert "team.prefixed" in kafka.admin().list_topics(timeout=10).topics
    assert "prefixed" in system.list_streams()


def test_a_topic_that_is_there_is_taken_if_it_has_the_partitions(
    system: KafkaStreams, kafka: KafkaServer, new_log: NewLog
) -> None:
    log = new_log(2)
    with pytest.raises(StreamExistsError, match="has 2 partitions, expected 3") as caught:
        system.create(log.name, schema=SCHEMA, key=["tailnum"], partitions=3)
    assert caught.value.stream == f"kafka.{log.name}"
    assert system.info(log.name).schema == Schema.of(key="binary", value="binary")
    assert system.create(log.name, schema=SCHEMA, key=["tailnum"], partitions=2).schema == SCHEMA


def test_a_declared_stream_is_created_as_it_is_declared(system_of: SystemOf) -> None:
    topic = KafkaTopic(
        "declared.topic", value=Json(SCHEMA), key=KeyText("tailnum"), default_offset="upcoming"
    )
    system = system_of({"declared": topic})
    with pytest.raises(StreamNotFoundError) as caught:
        system.info("declared")
    assert caught.value.stream == "kafka.declared"
    with pytest.raises(StreamExistsError, match="seats") as caught:
        system.create("declared", schema=Schema.of(tailnum="string"), key=["tailnum"], partitions=2)
    assert caught.value.stream == "kafka.declared"
    info = system.create("declared", schema=SCHEMA, key=["tailnum"], partitions=2)
    assert (info.partitions, info.schema, info.default_offset, info.partitioner) == (
        2,
        SCHEMA,
        "upcoming",
        "unknown",
    )
    assert "declared" in system.list_streams()
    assert not {"declared.topic", "declared-topic"} & set(system.list_streams())


def test_a_topic_that_is_compacted_and_cut_off_does_not_tell_all(
    system: KafkaStreams, new_log: NewLog
) -> None:
    kept = system.info(new_log(cleanup_policy="compact", delete_retention_ms=5000).name)
    cut = system.info(new_log(cleanup_policy="compact,delete").name)
    assert kept.compaction == LogCompaction(tombstones_kept=timedelta(seconds=5))
    assert cut.compaction is None


# -- the system


def test_a_registered_system_opens_by_name_and_the_same_call_may_come_again(
    lake: Lake, kafka: KafkaServer
) -> None:
    given: dict[str, Any] = {"bootstrap_servers": kafka.bootstrap, "topics": {"s": KafkaTopic("t")}}
    assert kafka_system("kafka-again", **given) == kafka_system("kafka-again", **given)
    opened = open_system(lake, "kafka-again")
    assert isinstance(opened, KafkaStreams)
    assert opened.settings.topics["s"].topic == "t"
    with pytest.raises(ConfigurationError) as caught:
        kafka_system("kafka-again", bootstrap_servers="elsewhere:9092")
    assert caught.value.system == "kafka-again"


def test_settings_that_contradict_themselves_are_refused() -> None:
    for topics, what in (
        ({"a": KafkaTopic("t"), "t": KafkaTopic()}, "both topic 't'"),
        ({"a.b": KafkaTopic()}, "expected the name alone"),
    ):
        with pytest.raises(ConfigurationError, match=what):
            KafkaSettings("kafka", "127.0.0.1:1", topics=topics)
    for make, what in (
        (lambda: KafkaTopic("a b"), "can't be a Kafka topic"),
        (lambda: KafkaTopic(partitioner="crc32"), "partitioner is 'crc32'"),  # type: ignore[arg-type]
        (lambda: KafkaTopic(default_offset="latest"), "default_offset is 'latest'"),  # type: ignore[arg-type]
        (lambda: KafkaSettings("kafka", ""), "no bootstrap servers"),
        (lambda: KafkaSettings("kafka", "a:1", prefix="a/b"), "can't be a Kafka topic"),
    ):
        with pytest.raises(ConfigurationError, match=what):
            make()

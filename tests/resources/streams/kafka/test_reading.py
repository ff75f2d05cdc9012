"""Reading Kafka: exactly what the producers' own account says is there, in any range, or an
error.
"""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from dagster_adjunct.resources.errors import (
    OffsetOutOfRangeError,
    StreamNotFoundError,
    StreamUnavailableError,
    TransientError,
)
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from dagster_adjunct.resources.streams.kafka.client import KafkaSettings, TopicFacts
from dagster_adjunct.resources.streams.kafka.consume import TopicRange, read_ranges
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic
from dagster_adjunct.resources.streams.kafka.source import (
    MAX_TASK_OFFSETS,
    MIN_TASK_OFFSETS,
    split_into_tasks,
)
from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams
from dagster_adjunct.resources.streams.system import (
    RECORD_META,
    LogCompaction,
    OffsetRange,
    SystemStreamPartition,
)
from tests.resources.streams.kafka.conftest import NewLog, SystemOf
from tests.resources.streams.kafka.topic_log import Entry, TopicLog, entries_of, ranges_of
from tests.servers.kafka import KafkaServer
from tests.servers.ports import free_port

pytestmark = [pytest.mark.server, pytest.mark.spark]


def whole(system: KafkaStreams, stream: str) -> dict[SystemStreamPartition, OffsetRange]:
    ssps = system.partitions(stream)
    oldest, upcoming = system.oldest(ssps), system.upcoming(ssps)
    return {ssp: OffsetRange(oldest[ssp], upcoming[ssp]) for ssp in ssps}


def offsets_in(
    system: KafkaStreams, stream: str, start: int, end: int, partition: int = 0
) -> list[int | None]:
    wanted = TopicRange(partition, start, end)
    return [
        message.offset()
        for _, got in read_ranges(system.topic(stream), [wanted])
        for message in got
    ]


# -- exact ranges


def test_ranges_of_several_partitions_give_exactly_their_records_in_order(
    spark: SparkSession, system: KafkaStreams, new_log: NewLog
) -> None:
    log = new_log(3)
    for partition in range(3):
        log.write(*(b"%d" % i for i in range(20)), partition=partition, key=b"k%d" % partition)
    spans = {0: (0, 20), 1: (5, 6), 2: (7, 13)}
    entries = entries_of(system.read(spark, ranges_of(system, log.name, spans)))
    assert set(entries) == log.between(spans)
    assert len(entries) == 27
    for partition in spans:
        offsets = [entry.offset for entry in entries if entry.partition == partition]
        assert offsets == sorted(offsets)


def test_many_short_ranges_are_read_together_and_ranges_of_one_batch_apart(
    spark: SparkSession, system: KafkaStreams, new_log: NewLog
) -> None:
    log = new_log(40)
    for partition in range(0, 40, 3):
        log.write(*[b"a", b"b", b"c", b"d"] * 2, partition=partition)
        log.transaction(b"hole", partition=partition, commit=partition % 2 == 0)
    spans = {p: (p % 3 and 0, 10 - p % 5 if p % 3 == 0 else 0) for p in range(40)}
    frame = system.read(spark, ranges_of(system, log.name, spans))
    entries = entries_of(frame)
    assert frame.rdd.getNumPartitions() == 1
    assert (set(entries), len(entries)) == (log.between(spans), len(log.between(spans)))
    for partition in spans:
        offsets = [entry.offset for entry in entries if entry.partition == partition]
        assert offsets == sorted(offsets)


def test_an_empty_range_has_no_records_and_all_columns(
    spark: SparkSession, system: KafkaStreams, new_log: NewLog
) -> None:
    log = new_log(2)
    log.write(b"a")
    frame = system.read(spark, ranges_of(system, log.name, {0: (1, 1), 1: (0, 0)}))
    assert (frame.columns, frame.count()) == (["key", "value", *RECORD_META], 0)


def test_null_and_empty_are_different_and_a_null_value_is_a_tombstone(
    spark: SparkSession, system: KafkaStreams, new_log: NewLog
) -> None:
    log = new_log()
    log.write(None, key=b"gone")
    log.write(b"", key=b"")
    log.write(b"v", key=None)
    rows = system.read(spark, whole(system, log.name)).orderBy("__offset").collect()
    assert [(row["key"], row["value"], row["__tombstone"]) for row in rows] == [
        (b"gone", None, True),
        (b"", b"", False),
        (None, b"v", False),
    ]


def test_headers_are_read_where_declared_and_say_the_epoch(
    spark: SparkSession, system_of: SystemOf, new_log: NewLog
) -> None:
    log = new_log()
    log.write(b"a", headers=[("trace", b"\x00\xff"), ("none", None), ("trace", b"2")])
    log.write(b"b", headers=[("adjunct-epoch", b"3")])
    log.write(b"c")
    log.write(b"d", headers=[("adjunct-epoch", b"not a number")])
    system = system_of({"s": KafkaTopic(log.name, headers="heads")})
    rows = system.read(spark, whole(system, "s")).orderBy("__offset").collect()
    assert rows[0]["heads"] == '[["trace","AP8="],["none",null],["trace","Mg=="]]'
    assert [row["heads"] for row in rows[2:3]] == ["[]"]
    assert [row["__epoch"] for row in rows] == [0, 3, 0, 0]


def test_end_of_dataset_markers_are_no_records(
    spark: SparkSession, system: KafkaStreams, new_log: NewLog
) -> None:
    log = new_log()
    marker = [("adjunct-end-of-dataset", b'{"version": "v1"}')]
    log.write(b"a")
    log.write(None, headers=marker)
    log.write(b"b", headers=[("other", b"1")])
    log.write(None, headers=marker)
    ranges = whole(system, log.name)
    assert [entry.offset for entry in entries_of(system.read(spark, ranges))] == [0, 2]
    assert system.records_between(ranges) == 2


# -- holes


def test_aborted_and_undecided_transactions_never_appear_in_any_range(
    spark: SparkSession, system: KafkaStreams, new_log: NewLog
) -> None:
    log = new_log()
    log.write(b"plain")
    log.transaction(*(b"kept %d" % i for i in range(3)))
    log.transaction(*(b"aborted %d" % i for i in range(3)), commit=False)
    log.transaction(commit=False)
    log.write(b"plain again")
    log.transaction(b"aborted too", commit=False)
    log.transaction(b"kept at last")
    undecided = log.transactional()
    undecided.begin_transaction()
    first = log.write_in(undecided, b"undecided")[0]
    ssp = SystemStreamPartition("kafka", log.name, 0)
    end = int(system.upcoming([ssp])[ssp])
    assert end == first.offset
    assert set(entries_of(system.read(spark, whole(system, log.name)))) == set(log.seen)
    visible = sorted(entry.offset for entry in log.seen)
    assert len(visible) < end
    for start in range(end):
        stop = min(start + 1 + start % 4, end)
        assert offsets_in(system, log.name, start, stop) == [
            o for o in visible if start <= o < stop
        ]
    undecided.abort_transaction(30)


def test_a_range_that_ends_in_a_hole_is_read_without_waiting_for_more(
    system: KafkaStreams, new_log: NewLog
) -> None:
    log = new_log()
    log.transaction(b"a")
    log.transaction(b"b", commit=False)
    assert offsets_in(system, log.name, 0, 4) == [0]


def test_what_compaction_has_left_is_read_whole(
    spark: SparkSession, system: KafkaStreams, kafka: KafkaServer, new_log: NewLog
) -> None:
    log = new_log(
        cleanup_policy="compact",
        segment_ms=100,
        min_cleanable_dirty_ratio=0.001,
        max_compaction_lag_ms=100,
        delete_retention_ms=600_000,
    )
    for _ in range(3):
        for key in range(5):
            log.write(*(b"%d" % i for i in range(4)), key=b"k%d" % key)
    log.write(None, key=b"k0")
    newest = {entry.key: entry for entry in sorted(log.seen, key=lambda entry: entry.offset)}
    deadline = time.monotonic() + 240
    left = set(log.seen)
    while left != set(newest.values()):
        assert time.monotonic() < deadline, (
            f"the broker did not compact: {len(left)} of {len(log.seen)} records left"
        )
        time.sleep(0.2)
        log.write(b"roll", key=b"other")  # a segment is closed when the next record comes
        left = {entry for entry in _plainly_read(kafka, log.name) if entry.key != b"other"}
    spans = whole(system, log.name)
    entries = entries_of(system.read(spark, spans))
    assert {entry for entry in entries if entry.key != b"other"} == left
    assert len(entries) < int(next(iter(spans.values())).end)
    info = system.info(log.name)
    assert info.compaction == LogCompaction(tombstones_kept=timedelta(minutes=10))
    assert system.has_all_keys(log.name)


def _plainly_read(kafka: KafkaServer, topic: str) -> list[Entry]:
    """Read all of partition 0 as any consumer would, without a line of the system under test."""
    consumer = Consumer(
        {"bootstrap.servers": kafka.bootstrap, "group.id": "oracle", "enable.partition.eof": True}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    entries: list[Entry] = []
    while True:
        message = consumer.poll(10)
        assert message is not None
        if message.error():
            consumer.close()
            return entries
        offset = message.offset()
        assert offset is not None
        entries.append(Entry(0, offset, message.key(), message.value(), message.timestamp()[1]))


# -- what is gone


def test_a_range_that_retention_has_cut_names_partition_and_both_offsets(
    spark: SparkSession, system: KafkaStreams, new_log: NewLog
) -> None:
    log = new_log(2)
    log.write(*(b"%d" % i for i in range(10)), partition=1)
    log.delete_before(4, partition=1)
    with pytest.raises(OffsetOutOfRangeError) as error:
        system.read(spark, ranges_of(system, log.name, {1: (3, 10)}))
    assert (error.value.stream, error.value.partition, error.value.offset, error.value.oldest) == (
        f"kafka.{log.name}",
        1,
        "3",
        "4",
    )
    assert "startpoint" in error.value.next_step
    assert "Keep the stream longer" in error.value.next_step
    entries = entries_of(system.read(spark, ranges_of(system, log.name, {1: (4, 10)})))
    assert set(entries) == set(log.seen)


def test_retention_that_passes_a_range_after_it_was_planned_fails_the_task(
    spark: SparkSession, system: KafkaStreams, new_log: NewLog
) -> None:
    log = new_log()
    log.write(*(b"%d" % i for i in range(10)))
    frame = system.read(spark, whole(system, log.name))
    log.delete_before(4)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        _collect(frame)
    assert (
        caught.value.stream,
        caught.value.partition,
        caught.value.offset,
        caught.value.oldest,
    ) == (f"kafka.{log.name}", 0, "0", "4")


def test_a_topic_that_was_created_again_fails_the_task_though_it_has_the_offsets(
    spark: SparkSession, system: KafkaStreams, kafka: KafkaServer, new_log: NewLog
) -> None:
    log = new_log()
    log.write(*(b"%d" % i for i in range(5)))
    before = system.info(log.name)
    frame = system.read(spark, whole(system, log.name))
    kafka.delete_topic(log.name)
    _create_again(kafka, log)
    TopicLog(kafka, log.name).write(*(b"new %d" % i for i in range(9)))
    with pytest.raises(OffsetOutOfRangeError, match="recreated"):
        _collect(frame)
    after = system.info(log.name)
    assert after.identity != before.identity
    assert after.partitions == before.partitions


def test_a_topic_that_is_shorter_since_it_was_created_again_fails_at_once(
    system: KafkaStreams, kafka: KafkaServer, new_log: NewLog
) -> None:
    log = new_log()
    log.write(*(b"%d" % i for i in range(5)))
    facts = system.topic(log.name)
    kafka.delete_topic(log.name)
    _create_again(kafka, log)
    TopicLog(kafka, log.name).write(b"new")
    with pytest.raises(OffsetOutOfRangeError, match="recreated"):
        list(read_ranges(facts, [TopicRange(0, 0, 5)]))


def _create_again(kafka: KafkaServer, log: TopicLog) -> None:
    for _ in range(100):
        try:
            kafka.create_topic(log.name)
            return
        except KafkaException:  # the broker still deletes the old one
            time.sleep(0.1)
    raise AssertionError("the topic could not be created again")


def test_a_range_that_is_not_on_the_stream_is_refused(
    spark: SparkSession, system: KafkaStreams, new_log: NewLog
) -> None:
    log = new_log()
    log.write(b"a")
    for spans, what in (
        ({0: (0, 2)}, r"ends at offset 2, .* is 1"),
        ({0: (1, 0)}, "begins at 1, after its end 0"),
        ({1: (0, 0)}, "has 1 partitions"),
    ):
        with pytest.raises(OffsetOutOfRangeError, match=what):
            system.read(spark, ranges_of(system, log.name, spans))
    with pytest.raises(StreamNotFoundError) as caught:
        system.read(spark, ranges_of(system, "nowhere", {0: (0, 0)}))
    assert caught.value.stream == "kafka.nowhere"


# -- large, and out of reach


def test_a_long_range_is_read_by_several_tasks_and_every_record_once(
    spark: SparkSession, system: KafkaStreams, kafka: KafkaServer, new_log: NewLog
) -> None:
    log, count = new_log(2), 300_000
    producer = kafka.producer(queue_buffering_max_messages=count + 1)
    for i in range(count):
        producer.produce(log.name, b"%d" % i, partition=0)
    assert producer.flush(60) == 0
    frame = system.read(spark, ranges_of(system, log.name, {0: (10, count), 1: (0, 0)}))
    assert frame.rdd.getNumPartitions() == 2
    value = "cast(cast(value AS STRING) AS BIGINT)"
    totals = frame.selectExpr(
        "count(*)", "count(DISTINCT __offset)", "min(__offset)", f"sum(__offset - {value})"
    )
    assert tuple(totals.collect()[0]) == (count - 10, count - 10, 10, 0)


WIDTH = (
    st.integers(0, 2 * MIN_TASK_OFFSETS)
    | st.integers(0, 6 * MAX_TASK_OFFSETS)
    | st.sampled_from(
        [MIN_TASK_OFFSETS, MIN_TASK_OFFSETS + 1, MAX_TASK_OFFSETS, MAX_TASK_OFFSETS + 1]
    )
)
WIDTHS = st.lists(st.tuples(st.integers(0, 10**6), WIDTH), max_size=30)


@given(WIDTHS)
def test_tasks_share_the_ranges_without_gap_or_overlap(widths: list[tuple[int, int]]) -> None:
    ranges = [TopicRange(p, start, start + width) for p, (start, width) in enumerate(widths)]
    positions = {wanted.partition: wanted.start for wanted in ranges}
    for share in split_into_tasks(ranges):
        assert sum(part.end - part.start for part in share) <= (
            MIN_TASK_OFFSETS if len(share) > 1 else max(MAX_TASK_OFFSETS, MIN_TASK_OFFSETS)
        )
        for part in share:
            assert positions[part.partition] == part.start < part.end
            positions[part.partition] = part.end
    assert positions == {wanted.partition: wanted.end for wanted in ranges}


def test_brokers_that_do_not_answer_are_a_transient_error_for_driver_and_tasks(lake: Lake) -> None:
    nobody = KafkaSettings(
        "kafka", f"127.0.0.1:{free_port()}", client={"socket.timeout.ms": 1000, "log_level": 0}
    )
    with pytest.raises(StreamUnavailableError) as error:
        KafkaStreams(lake, nobody).info("s")
    assert error.value.system == "kafka"
    assert isinstance(error.value, TransientError)
    with pytest.raises(StreamUnavailableError, match=r"kafka\.s\.0 from offset 5"):
        list(read_ranges(TopicFacts(nobody, "s", "s", "id", 1), [TopicRange(0, 5, 9)]))


def _collect(frame: object) -> None:
    """Run the frame, with the error of ours that made its job fail, as Adjunct's own functions
    do.
    """
    with translate_spark_errors():
        frame.collect()  # type: ignore[attr-defined]

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import (
    CommitConflictError,
    PermanentError,
    ProducerConflictError,
)
from dagster_adjunct.resources.streams.kafka.client import KafkaSettings, TopicFacts
from dagster_adjunct.resources.streams.kafka.produce import (
    TaskAppend,
    read_marks,
    send_in_transaction,
)
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic
from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams
from dagster_adjunct.resources.streams.system import AppendOptions, SystemStreamPartition
from tests.resources.streams.kafka.producing import committed, raw, seen, system_with
from tests.servers.kafka import KafkaServer
from tests.servers.s3 import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.server
RECORDS = raw(*[(f"key {i}", f"value {i}") for i in range(20)])


@pytest.fixture
def topic(kafka: KafkaServer) -> str:
    return kafka.new_topic(4)


@pytest.fixture
def system(kafka: KafkaServer, tmp_path: Path, topic: str) -> KafkaStreams:
    return system_with(kafka, tmp_path, s=KafkaTopic(topic, transactional=True))


def keys(kafka: KafkaServer, topic: str) -> list[str]:
    return sorted((record.key or b"").decode() for record in seen(kafka, topic))


ALL = sorted(f"key {i}" for i in range(20))


def test_a_repeated_append_adds_nothing_and_reports_the_first_result(
    kafka: KafkaServer, system: KafkaStreams, topic: str
) -> None:
    first = system.append("s", RECORDS, producer="p", sequence=3)
    assert (first.rows, first.duplicate) == (20, False)
    assert system.appended("s", "p", 3) == system.append("s", RECORDS, producer="p", sequence=3)
    again = system.append("s", RECORDS, producer="p", sequence=3)
    touched = {p for p in first.first if first.first[p] != first.next[p]}
    assert again.duplicate
    assert again.rows == 20
    assert again.first == {p: first.first[p] for p in touched}
    assert again.next == {p: first.next[p] for p in touched}
    assert keys(kafka, topic) == ALL
    assert system.appended("s", "p", 4) is None
    assert system.appended("s", "q", 3) is None


def test_a_frame_goes_in_whole_and_in_order_by_one_task(
    kafka: KafkaServer, system: KafkaStreams, topic: str, spark: SparkSession
) -> None:
    rows = [(f"k{i % 3}".encode(), str(i).encode(), i) for i in range(300)]
    frame = spark.createDataFrame(rows, "key binary, value binary, i int").repartition(4)
    for _ in range(2):
        result = system.append(
            "s", frame, producer="p", sequence=1, options=AppendOptions(order_by=("i",))
        )
    assert result.duplicate
    records = seen(kafka, topic)
    assert len(records) == 300
    for key in (b"k0", b"k1", b"k2"):
        numbers = [int(record.value or b"") for record in records if record.key == key]
        assert numbers == sorted(numbers)
    # The same records as a table are the same append.
    assert system.append("s", frame.drop("i").toArrow(), producer="p", sequence=1).duplicate
    with pytest.raises(ProducerConflictError) as caught:
        system.append(
            "s",
            frame.where("i > 0"),
            producer="p",
            sequence=1,
            options=AppendOptions(order_by=("i",)),
        )
    assert (caught.value.stream, caught.value.producer, caught.value.sequence) == (
        "kafka.s",
        "p",
        1,
    )
    # What Spark knows to be empty has no task, but is a batch all the same.
    assert (
        system.append(
            "s",
            frame.where("false"),
            producer="p",
            sequence=2,
            options=AppendOptions(order_by=("i",)),
        ).rows
        == 0
    )
    assert system.appended("s", "p", 2) is not None
    assert len(seen(kafka, topic)) == 300


def test_an_append_that_fails_leaves_nothing_and_may_be_repeated(
    kafka: KafkaServer, system: KafkaStreams, topic: str
) -> None:
    with pytest.raises(PermanentError, match="larger than the topic allows"):
        system.append(
            "s",
            pa.concat_tables([RECORDS, raw(("big", "x" * 2_000_000))]),
            producer="p",
            sequence=0,
        )
    assert seen(kafka, topic) == []
    # It is ended, not left open: what others write behind it is seen at once.
    system.append("s", RECORDS.slice(0, 1), producer="other", sequence=0)
    assert keys(kafka, topic) == ["key 0"]
    assert system.append("s", RECORDS, producer="p", sequence=0).rows == 20
    assert keys(kafka, topic) == sorted([*ALL, "key 0"])


def test_other_contents_under_a_sequence_that_is_in_are_refused(
    kafka: KafkaServer, system: KafkaStreams, topic: str
) -> None:
    system.append("s", RECORDS, producer="p", sequence=0)
    for other in (RECORDS.slice(1), pa.concat_tables([RECORDS, RECORDS.slice(0, 1)])):
        with pytest.raises(ProducerConflictError) as caught:
            system.append("s", other, producer="p", sequence=0)
        assert (caught.value.stream, caught.value.producer, caught.value.sequence) == (
            "kafka.s",
            "p",
            0,
        )
    with pytest.raises(ProducerConflictError):
        system.append("s", RECORDS, producer="p", sequence=0, end_of_dataset="v1")
    # The order does not matter: another run of the same plan may give another.
    assert system.append(
        "s", RECORDS.take(list(range(19, -1, -1))), producer="p", sequence=0
    ).duplicate
    assert keys(kafka, topic) == ALL


def test_a_sequence_before_the_last_is_refused_with_the_last(
    kafka: KafkaServer, system: KafkaStreams, topic: str, spark: SparkSession
) -> None:
    for sequence in (1, 2):
        system.append("s", RECORDS.slice(sequence, 1), producer="p", sequence=sequence)
    frame = spark.createDataFrame(RECORDS.slice(3, 1))
    for append in (
        lambda: system.append("s", RECORDS.slice(3, 1), producer="p", sequence=1),
        lambda: system.append("s", frame, producer="p", sequence=1),
        lambda: system.append_markers("s", "v1", producer="p", sequence=1),
        lambda: system.appended("s", "p", 1),
    ):
        with pytest.raises(ProducerConflictError) as refused:
            append()
        assert (refused.value.producer, refused.value.sequence, refused.value.newest) == ("p", 1, 2)
    assert keys(kafka, topic) == ["key 1", "key 2"]


def test_consumed_offsets_are_committed_with_the_records_for_kafkas_own_tools(
    kafka: KafkaServer, system: KafkaStreams, topic: str
) -> None:
    flights = kafka.new_topic(2)
    consumed = {
        SystemStreamPartition("kafka", flights, 1): "42",
        SystemStreamPartition("lake", "weather", 0): "7",
    }
    system.append(
        "s", RECORDS, producer="delays", sequence=0, options=AppendOptions(consumed=consumed)
    )
    assert committed(kafka, "delays", flights, 1) == 42
    too_large = raw(("big", "x" * 2_000_000))
    later = {SystemStreamPartition("kafka", flights, 1): "50"}
    with pytest.raises(PermanentError):
        system.append(
            "s", too_large, producer="delays", sequence=1, options=AppendOptions(consumed=later)
        )
    assert committed(kafka, "delays", flights, 1) == 42


def test_a_second_producer_of_the_name_fences_the_first(kafka: KafkaServer, topic: str) -> None:
    target = TopicFacts(KafkaSettings("kafka", kafka.bootstrap), "s", topic, "id", 4)
    append = TaskAppend(target, "p", 5)

    def zombie() -> Iterator[pa.RecordBatch]:
        yield _encoded(0, 10)
        spans, duplicate = send_in_transaction(append, [_encoded(0, 20)])
        assert (sum(span.rows for span in spans), duplicate) == (20, False)
        yield _encoded(10, 10)

    with pytest.raises(CommitConflictError) as caught:
        send_in_transaction(append, zombie())
    assert caught.value.stream == "kafka.s"
    assert keys(kafka, topic) == ALL
    assert send_in_transaction(append, [_encoded(0, 20)])[1]


def test_marks_on_a_topic_that_was_created_again_do_not_count(
    kafka: KafkaServer, system: KafkaStreams, topic: str
) -> None:
    system.append("s", RECORDS, producer="p", sequence=0)
    # Kafka forgets them with the topic, in its own time.
    target = TopicFacts(system.settings, "s", topic, "the id before", 4)
    assert read_marks(target, "p") == {}
    assert 0 in read_marks(replace(target, identity=system.topic("s").identity), "p")
    kafka.delete_topic(topic)
    kafka.create_topic(topic, 4)
    while system.admin.describe(topic) is None:
        time.sleep(0.05)
    assert not system.append("s", RECORDS, producer="p", sequence=0).duplicate
    assert keys(kafka, topic) == ALL


def test_a_process_killed_in_a_transaction_leaves_nothing_in_the_way_of_the_next(
    kafka: KafkaServer, system: KafkaStreams, topic: str
) -> None:
    script = f"""
        import sys, time
        from tests.resources.streams.kafka.test_transactions import _encoded
        from dagster_adjunct.resources.streams.kafka.client import KafkaSettings, TopicFacts
        from dagster_adjunct.resources.streams.kafka.produce import TaskAppend, send_in_transaction

        settings = KafkaSettings("kafka", "{kafka.bootstrap}")
        target = TopicFacts(settings, "s", "{topic}", "{system.topic("s").identity}", 4)

        def batches():
            yield _encoded(0, 10)
            time.sleep(0.5)  # longer than the producer lingers
            print("half", flush=True)
            time.sleep(60)

        send_in_transaction(TaskAppend(target, "p", 1), batches())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert len(seen(kafka, topic, isolation="read_uncommitted")) == 10
    assert seen(kafka, topic) == []
    result = system.append("s", RECORDS, producer="p", sequence=1)
    assert not result.duplicate
    assert keys(kafka, topic) == ALL
    assert system.append("s", RECORDS, producer="p", sequence=1).duplicate


def test_what_an_open_transaction_will_be_is_not_reported_before_it_is_settled(
    kafka: KafkaServer, system: KafkaStreams, topic: str
) -> None:
    system.append("s", RECORDS.slice(0, 5), producer="p", sequence=1)
    identity = system.topic("s").identity
    target = TopicFacts(KafkaSettings("kafka", kafka.bootstrap), "s", topic, identity, 4)
    inside: list[object] = []

    def batches() -> Iterator[pa.RecordBatch]:
        yield _encoded(5, 15)
        inside.append((system.appended("s", "p", 1), system.appended("s", "p", 2)))

    send_in_transaction(TaskAppend(target, "p", 2), batches())
    ((before, now),) = inside
    assert before is not None
    assert now is None
    after = system.appended("s", "p", 2)
    assert after is not None
    assert after.rows == 15


def _encoded(start: int, count: int) -> pa.RecordBatch:
    some = RECORDS.slice(start, count).rename_columns(["__key", "__value"])
    return some.combine_chunks().to_batches()[0]

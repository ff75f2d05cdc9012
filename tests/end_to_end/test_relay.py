"""From a real topic to the lake and to another topic: transactions, retention, and kills,
against what was produced.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.errors import OffsetOutOfRangeError
from tests.end_to_end.world import APP, MIDNIGHT, Event, World
from tests.servers.kafka import KafkaServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.server, pytest.mark.spark]
MIRROR = "tests.end_to_end.relay:mirror"


def new_world(
    kafka: KafkaServer, folder: Path, name: str, max_batch_records: int = 100_000
) -> World:
    world = World(kafka, folder, name, max_batch_records)
    world.create_topic()
    return world


def test_records_of_aborted_and_open_transactions_never_appear_also_when_read_again(
    kafka: KafkaServer, spark: SparkSession, tmp_path: Path
) -> None:
    world = new_world(kafka, tmp_path, "aborted")
    producer = kafka.producer(transactional_id="shop", transaction_timeout_ms=600_000)
    producer.init_transactions(60)
    world.deliver(40, MIDNIGHT)
    producer.begin_transaction()
    world.produce(40, MIDNIGHT, producer=producer)
    producer.abort_transaction(60)
    producer.begin_transaction()
    world.events += world.produce(24, MIDNIGHT, producer=producer)
    producer.commit_transaction(60)
    producer.begin_transaction()
    world.produce(16, MIDNIGHT, producer=producer)
    world.run(spark)
    assert world.in_lake() == world.in_topic() == world.expected()

    producer.abort_transaction(60)
    world.command("startpoint", "set", APP, "aborted.events.1,6", "--oldest", "--reason", "again")
    world.run(spark)
    again = [event for event in world.events if event.partition in (1, 6)]
    expected = sorted(world.expected() + world.expected(events=again, epochs={1: 1, 6: 1}))
    assert world.in_lake() == world.in_topic() == expected


@pytest.mark.long  # of open batches: test_cut_batches.py; without Kafka: test_lost_open_batches.py
def test_retention_that_passes_the_checkpoint_is_an_error_and_either_remedy_goes_on(
    kafka: KafkaServer, spark: SparkSession, tmp_path: Path
) -> None:
    world = new_world(kafka, tmp_path, "retention")
    world.deliver(80, MIDNIGHT)
    world.run(spark)

    lost = _lose(world, partition=3)
    with pytest.raises(OffsetOutOfRangeError) as refused:
        world.run(spark)
    for what in ("retention.events.3", " 10", " 14", "startpoint set", 'on_lost="oldest"'):
        assert what in str(refused.value)
    assert world.in_lake() == world.expected(events=world.events[:80])
    world.command(
        "startpoint", "set", APP, "retention.events.3", "--oldest", "--reason", "four are lost"
    )
    world.run(spark)
    first = world.expected(events=world.events[:80])
    expected = sorted(first + world.expected(events=set(world.events[80:]) - lost, epochs={3: 1}))
    assert world.in_lake() == world.in_topic() == expected

    before = len(world.events)
    lost = _lose(world, partition=3)
    with pytest.raises(OffsetOutOfRangeError):
        world.run(spark)
    report = world.run(spark, "careless")
    assert report.step.counters["retention.events"]["lost_offsets"] == len(lost) == 4
    expected = sorted(
        expected + world.expected(events=set(world.events[before:]) - lost, epochs={3: 1})
    )
    assert world.in_lake() == world.in_topic() == expected


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_transactions_from_topic_to_topic_arrive_once_though_the_run_is_killed(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    world = new_world(kafka, tmp_path, "mirror", max_batch_records=100)
    chosen = random.Random(5)
    world.deliver(400, MIDNIGHT)
    for _ in range(5):
        _kill_at_work(world, chosen.uniform(0, 5))
        world.deliver(80, MIDNIGHT)
    world.command("run", MIRROR)
    assert world.in_topic("mirrored") == world.expected()


def _lose(world: World, partition: int) -> set[Event]:
    """Deliver 80 records, and take the first four of them that are in a partition away, as
    retention does.
    """
    from confluent_kafka import TopicPartition

    mine = [event for event in world.deliver(80, MIDNIGHT) if event.partition == partition]
    mine.sort(key=lambda event: event.offset)
    admin = world.kafka.admin()
    for done in admin.delete_records(
        [TopicPartition(world.topic, partition, mine[4].offset)]
    ).values():
        done.result(60)
    return set(mine[:4])


def _kill_at_work(world: World, seconds: float) -> None:
    """Run the mirror in a process of its own, and kill that so long after it has begun a batch."""
    world.gate.close()
    process = world.start_command("run", MIRROR)
    try:
        deadline = time.monotonic() + 300
        while world.gate.held() is None:
            assert process.poll() is None, (world.folder / "command.log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        world.gate.open()
        time.sleep(seconds)
    finally:
        process.kill()
        process.wait(60)

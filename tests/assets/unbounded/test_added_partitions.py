"""Tables that follow a topic of a real broker to which partitions were added: what orders the
changes of a key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.assets.unbounded.rewind import plan_rewind
from dagster_adjunct.resources.errors import BadChangeError, KeyOrderError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.kafka.client import KafkaSettings
from dagster_adjunct.resources.streams.kafka.formats import Json, KeyText
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic
from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.startpoint import StartpointOldest
from dagster_adjunct.resources.streams.system import StreamSystem, SystemStreamPartition
from tests.assets.conftest import World
from tests.servers.kafka import KafkaServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.server]
KEYS = [f"key-{number}" for number in range(40)]


@dataclass
class Topic:
    """A topic, written as Kafka's Java client partitions, and the tables that follow it."""

    server: KafkaServer
    lake: Lake
    spark: Callable[[], SparkSession]
    name: str

    @property
    def systems(self) -> dict[str, StreamSystem]:
        topic = KafkaTopic(self.name, Json("n INT, version INT"), KeyText("k"), "kafka-murmur2")
        return {
            "kafka": KafkaStreams(
                self.lake, KafkaSettings("kafka", self.server.bootstrap, topics={"t": topic})
            ),
            "lake": LakeStreams(self.lake),
        }

    def send(
        self,
        rows: Mapping[str, Mapping[str, int] | None],
        partition: int | None = None,
        **more: Any,
    ) -> None:
        producer = self.server.producer(
            partitioner="murmur2_random", topic_metadata_refresh_interval_ms=100
        )
        place = {} if partition is None else {"partition": partition}
        for key, row in rows.items():
            producer.produce(
                self.name, None if row is None else json.dumps(row), key, **place, **more
            )
        assert producer.flush(30) == 0

    def add_partitions(self, count: int) -> None:
        from confluent_kafka.admin import NewPartitions

        admin = self.server.admin()
        admin.create_partitions([NewPartitions(self.name, count)])[self.name].result(30)
        while self.systems["kafka"].info("t").partitions != count:
            pass

    def advance(self, spec: AdjunctDataset) -> Any:
        return advance_dataset(
            spec, lake=self.lake, systems=self.systems, spark=self.spark, by="test"
        )

    def rebuild(self, spec: AdjunctDataset) -> Any:
        return rebuild_dataset(
            spec, lake=self.lake, systems=self.systems, spark=self.spark, reason="test", by="test"
        )

    def content(self, spec: AdjunctDataset) -> dict[str, int] | None:
        view = StoredVersions(self.lake, spec).current()
        return None if view is None else {key: entry["n"] for key, entry in view.items()}


@pytest.fixture
def topic(kafka: KafkaServer, sparkling: World) -> Topic:
    return Topic(kafka, sparkling.lake, sparkling.spark, kafka.new_topic(2))


def table(name: str = "table", **declared: Any) -> AdjunctDataset:
    return unbounded_dataset(name, input="kafka.t", key="k", partitions=2, **declared)


def rows(n: int, version: int, keys: list[str] = KEYS) -> dict[str, dict[str, int]]:
    return {key: {"n": n, "version": version} for key in keys}


def test_a_table_refuses_added_partitions_until_an_order_says_what_is_newer(topic: Topic) -> None:
    topic.send(rows(0, 1))
    topic.send(rows(1, 2))
    topic.advance(table())
    topic.add_partitions(4)
    topic.send({**rows(2, 3, KEYS[1:])})
    topic.send({KEYS[0]: {"n": 3, "version": 4}})
    for attempt in (topic.advance, topic.rebuild, topic.advance):
        with pytest.raises(KeyOrderError) as refused:
            attempt(table())
        assert (refused.value.dataset, refused.value.stream) == ("table", "kafka.t")
        assert "order_by" in refused.value.next_step
        assert topic.content(table()) == dict.fromkeys(KEYS, 1), "what is served stays"
    oldest = {
        SystemStreamPartition("kafka", "t", number): StartpointOldest() for number in range(4)
    }
    plan = plan_rewind(
        table(), lake=topic.lake, systems=topic.systems, positions=oldest, force=True
    )
    assert isinstance(plan.refusal, KeyOrderError)
    ordered = table(order_by="version")
    assert topic.rebuild(ordered).action == "bootstrapped"
    assert topic.content(ordered) == {**dict.fromkeys(KEYS, 2), KEYS[0]: 3}
    topic.send({KEYS[0]: {"n": 5, "version": 1}})
    topic.advance(ordered)
    assert topic.content(ordered) == {**dict.fromkeys(KEYS, 2), KEYS[0]: 3}


def test_a_bootstrap_sees_that_keys_are_in_other_partitions_than_their_own(topic: Topic) -> None:
    topic.send(rows(1, 1))
    topic.add_partitions(3)
    topic.send(rows(2, 2))
    with pytest.raises(KeyOrderError) as refused:
        topic.advance(table())
    assert (refused.value.stream, refused.value.dataset) == ("kafka.t", "table")
    assert refused.value.partition in (0, 1)
    assert refused.value.offset is not None
    assert topic.content(table()) is None
    over_time = table("over-time", history=timedelta(days=1))
    topic.advance(over_time)
    assert topic.content(over_time) == dict.fromkeys(KEYS, 2), "the times say which change is newer"


def test_a_producer_that_chooses_partitions_in_another_way_is_found_while_following(
    topic: Topic,
) -> None:
    topic.send(rows(1, 1))
    topic.advance(table())
    misplaced = KEYS[0]
    for partition in (0, 1):
        topic.send({misplaced: None}, partition)
    with pytest.raises(KeyOrderError):
        topic.advance(table())
    assert topic.content(table()) == dict.fromkeys(KEYS, 1)


def test_a_topic_that_was_recreated_with_more_partitions_is_read_again(topic: Topic) -> None:
    topic.send(rows(1, 1))
    topic.advance(table())
    topic.server.delete_topic(topic.name)
    topic.server.create_topic(topic.name, 4)
    topic.send(rows(2, 1))
    assert topic.rebuild(table()).action == "bootstrapped"
    assert topic.content(table()) == dict.fromkeys(KEYS, 2)


def test_a_version_with_a_key_in_two_partitions_is_rejected_and_the_next_served(
    topic: Topic,
) -> None:
    versions = bounded_dataset("versions", input="kafka.t", key="k", partitions=2)

    def mark(version: str, partitions: int) -> None:
        producer = topic.server.producer()
        for partition in range(partitions):
            marker = {"version": version, "partitions": partitions}
            header = {"adjunct-end-of-dataset": json.dumps(marker)}
            producer.produce(topic.name, partition=partition, headers=header)
        assert producer.flush(30) == 0

    topic.send(rows(1, 1))
    mark("first", 2)
    topic.send(rows(2, 1, KEYS[:20]))
    topic.add_partitions(4)
    topic.send(rows(3, 1, KEYS[:30]))
    mark("torn", 4)
    topic.send(rows(4, 1))
    mark("last", 4)
    report = topic.advance(versions)
    assert topic.content(versions) == dict.fromkeys(KEYS, 4)
    assert (len(report.sealed), len(report.rejected)) == (2, 1)


def test_a_record_without_a_key_of_its_own_is_a_bad_change_and_no_matter_of_order(
    topic: Topic,
) -> None:
    topic.send(rows(1, 1))
    producer = topic.server.producer()
    producer.produce(topic.name, b'{"n": 1, "version": 1}')
    assert producer.flush(30) == 0
    with pytest.raises(BadChangeError):
        topic.advance(table())


ORDERED: dict[str, Any] = {"order_by": "version"}
OVER_TIME: dict[str, Any] = {"history": "all"}


@pytest.mark.parametrize(
    ("advanced", "declared"),
    [
        pytest.param(True, ORDERED, id="advanced-ordered"),
        pytest.param(False, OVER_TIME, id="bootstrapped-over time"),
        pytest.param(True, OVER_TIME, id="advanced-over time", marks=pytest.mark.long),
        pytest.param(False, ORDERED, id="bootstrapped-ordered", marks=pytest.mark.long),
    ],
)
def test_offsets_do_not_decide_between_equal_values_of_a_key_that_moved(
    topic: Topic, declared: dict[str, Any], advanced: bool
) -> None:
    moment = 1_790_000_000_000
    topic.send(rows(0, 1), timestamp=moment - 1)
    topic.send(rows(1, 2), timestamp=moment)
    spec = table(**declared)
    if advanced:
        topic.advance(spec)
    topic.add_partitions(4)
    topic.send(rows(2, 2), timestamp=moment)
    with pytest.raises(KeyOrderError) as refused:
        topic.advance(spec)
    assert refused.value.dataset == "table"
    assert refused.value.partition in range(4)
    assert topic.content(spec) == (dict.fromkeys(KEYS, 1) if advanced else None)
    letters = table("other", on_bad_change=DeadLetters("lake.dead"), **declared)
    report = topic.advance(letters)
    served = topic.content(letters)
    assert served is not None
    older = sum(value == 1 for value in served.values())
    assert 0 < older == report.counters["quarantined"] < len(KEYS), "of keys that moved, each"
    topic.send(rows(3, 3), timestamp=moment + 1)
    topic.advance(letters)
    assert topic.content(letters) == dict.fromkeys(KEYS, 3)

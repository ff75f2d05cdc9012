"""What the tests of producing share: an append without a system around it, and a plain consumer
as the oracle.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.streams.kafka.client import KafkaSettings
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic
from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams

if TYPE_CHECKING:
    from tests.servers.kafka import KafkaServer


@dataclass(frozen=True)
class Seen:
    """A message as a plain consumer got it."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: int
    headers: dict[str, bytes | None]


def system_with(kafka: KafkaServer, folder: Path, **topics: KafkaTopic) -> KafkaStreams:
    """Return a system of these streams, over a lake in the folder."""
    return KafkaStreams(
        open_lake(folder / "lake"), KafkaSettings("kafka", kafka.bootstrap, topics=topics)
    )


def raw(*rows: tuple[str | bytes | None, str | bytes | None], **more: list[Any]) -> pa.Table:
    """Return a table for a raw stream, from pairs of key and value."""
    encoded = [
        tuple(cell.encode() if isinstance(cell, str) else cell for cell in row) for row in rows
    ]
    table = pa.table(
        {
            "key": pa.array([key for key, _ in encoded], pa.binary()),
            "value": pa.array([value for _, value in encoded], pa.binary()),
        }
    )
    for name, values in more.items():
        table = table.append_column(name, pa.array(values))
    return table


def seen(kafka: KafkaServer, topic: str, *, isolation: str = "read_committed") -> list[Seen]:
    """Return all messages of a topic by partition and offset, read without anything of
    Adjunct's.
    """
    from confluent_kafka import TopicPartition

    records: list[Seen] = []
    with _consumer(kafka, isolation) as consumer:
        count = len(consumer.list_topics(topic).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(count)])
        ended = 0
        while ended < count:
            for message in consumer.consume(1000, 0.05):  # it waits as long for as many
                if message.error():
                    ended += 1
                    continue
                headers = dict(message.headers() or ())
                place = (message.partition(), message.offset(), message.key(), message.value())
                records.append(Seen(*place, message.timestamp()[1], headers))
    return sorted(records, key=lambda record: (record.partition, record.offset))


def committed(kafka: KafkaServer, group: str, topic: str, partition: int) -> int:
    """Return the offset that a consumer group has committed, as Kafka's own tools see it."""
    from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

    asked = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, partition)])
    admin = kafka.admin()
    (answer,) = admin.list_consumer_group_offsets([asked], require_stable=True).values()
    return int(answer.result(120).topic_partitions[0].offset)


@contextmanager
def _consumer(kafka: KafkaServer, isolation: str) -> Iterator[Any]:
    from confluent_kafka import Consumer

    settings = {
        "bootstrap.servers": kafka.bootstrap,
        "group.id": "oracle",
        "enable.partition.eof": True,
    }
    consumer = Consumer({**settings, "isolation.level": isolation, "fetch.wait.max.ms": 20})
    try:
        yield consumer
    finally:
        consumer.close()

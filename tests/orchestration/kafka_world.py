"""Topics of a real broker beside a test's lake, written by a plain producer that says partition
and time of each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from dagster_adjunct.resources.streams.kafka.client import KafkaSettings
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic
from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams
from dagster_adjunct.resources.streams.system import StreamSystem
from tests.orchestration.step_world import StepWorld
from tests.servers.kafka import KafkaServer

Produced = tuple[datetime | None, str, dict[str, Any]]
"""A record's time (None: the clock's), its key and its value."""


@dataclass
class KafkaWorld(StepWorld):
    """A world whose applications read Kafka, each run by a client of its own, as after a
    restart.
    """

    server: KafkaServer = field(kw_only=True)
    topics: dict[str, KafkaTopic] = field(kw_only=True)

    @property
    def kafka(self) -> KafkaStreams:
        return KafkaStreams(
            self.lake, KafkaSettings("kafka", self.server.bootstrap, topics=self.topics)
        )

    @property
    def systems(self) -> dict[str, StreamSystem]:
        return {"lake": self.streams, "kafka": self.kafka}

    def produce(
        self,
        stream: str,
        partition: int,
        records: Sequence[tuple[datetime | None, str, dict[str, Any]]],
    ) -> None:
        """Write records to one partition: the time of each (None: the clock's), key and value."""
        producer = self.server.producer()
        for time, key, value in records:
            stamp = {} if time is None else {"timestamp": round(time.timestamp() * 1000)}
            document = json.dumps(value, default=datetime.isoformat)
            producer.produce(self.topics[stream].topic, document, key, partition, **stamp)
        assert producer.flush(30) == 0

    def mark(self, stream: str, partition: int, **marker: Any) -> None:
        """End a version as any producer may: a record without key and value, whose header says
        it.
        """
        producer = self.server.producer()
        header = {"adjunct-end-of-dataset": json.dumps(marker)}
        producer.produce(self.topics[stream].topic, partition=partition, headers=header)
        assert producer.flush(30) == 0

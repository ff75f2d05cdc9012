"""A topic whose every record the test knows, a lake, and the oracle: what was produced, by
partition and offset.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dagster_adjunct import (
    Application,
    Lake,
    LakeStreams,
    RunReport,
    open_lake,
    run_application,
    systems_for,
)
from tests.end_to_end.relay import PARTITIONS, Gate, declare
from tests.kept_processes import program
from tests.servers.kafka import KafkaServer
from tests.servers.s3 import ROOT

if TYPE_CHECKING:
    from confluent_kafka import Producer
    from pyspark.sql import SparkSession

APP = "tests.end_to_end.relay:app"
MIDNIGHT = 1_767_225_600_000  # 2026-01-01, in ms
Output = list[tuple[int, int]]


@dataclass(frozen=True)
class Event:
    """A record that is in the topic: its partition, its offset there, what it is, and its time
    in ms.
    """

    partition: int
    offset: int
    id: int
    timestamp: int


@dataclass
class World:
    """One lake, and a stream system of its own on a broker, whose topics all begin with the
    system's name.
    """

    kafka: KafkaServer
    folder: Path
    system: str
    max_batch_records: int = 100_000
    events: list[Event] = field(default_factory=list)
    made: int = 0

    @property
    def topic(self) -> str:
        return f"{self.system}-shop.events"

    @property
    def gate(self) -> Gate:
        return Gate(self.folder)

    @property
    def lake(self) -> Lake:
        return open_lake(self.folder / "lake")

    @property
    def environment(self) -> dict[str, str]:
        return {
            "ADJUNCT_LAKE": str(self.folder / "lake"),
            "ADJUNCT_TEST_KAFKA": self.kafka.bootstrap,
            "ADJUNCT_TEST_SYSTEM": self.system,
            "ADJUNCT_TEST_GATE": str(self.folder),
            "ADJUNCT_TEST_BATCH": str(self.max_batch_records),
            "ADJUNCT_SPARK_MASTER": "local[2]",
        }

    def create_topic(self) -> None:
        self.kafka.create_topic(self.topic, PARTITIONS)

    def produce(self, count: int, at: int, *, producer: Producer | None = None) -> list[Event]:
        """Append records to the partitions in turn, a millisecond after another from `at`;
        return where they are.
        """
        mine = producer or self.kafka.producer()
        produced: list[Event] = []
        for number in range(self.made, self.made + count):
            value = {"id": number, "customer": f"c{number % 11}", "amount": number % 100}

            def delivered(error: object, message: object, number: int = number) -> None:
                assert not error, error
                produced.append(_event(message, number))

            mine.produce(
                self.topic,
                key=value["customer"],
                value=json.dumps(value),
                partition=number % PARTITIONS,
                timestamp=at + number - self.made,
                on_delivery=delivered,
            )
        assert mine.flush(60) == 0
        self.made += count
        assert len(produced) == count
        return produced

    def deliver(self, count: int, at: int) -> list[Event]:
        """Produce records that count as the topic's."""
        events = self.produce(count, at)
        self.events += events
        return events

    def expected(
        self, *, epochs: Mapping[int, int] | None = None, events: Iterable[Event] | None = None
    ) -> Output:
        """Return (epoch, id) of the events, in order; `epochs` by partition, 0 where it does not
        say.
        """
        known = epochs or {}
        return sorted(
            (known.get(event.partition, 0), event.id)
            for event in (self.events if events is None else events)
        )

    def in_lake(self) -> Output:
        """Return (epoch, id) of what the application has written to its stream in the lake, in
        order.
        """
        streams = LakeStreams(self.lake)
        if "relayed" not in streams.list_streams():
            return []
        table = streams.read_arrow(streams.all_ranges("relayed"), columns=["id"])
        return sorted(zip(table["__epoch"].to_pylist(), table["id"].to_pylist(), strict=True))

    def in_topic(self, stream: str = "relayed") -> Output:
        """Return (epoch, id) of what readers of committed records find in an output topic, in
        order.
        """
        return sorted(self._records(f"{self.system}-{stream}"))

    def command(self, *arguments: str, fails: bool = False) -> str:
        """Run `adjunct` and return what it prints."""
        done = subprocess.run(
            [program("adjunct"), *arguments],
            cwd=ROOT,
            env={**os.environ, **self.environment, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == int(fails), done.stdout + done.stderr
        return done.stdout + done.stderr

    def run(self, spark: SparkSession, name: Literal["relay", "careless"] = "relay") -> RunReport:
        """Run an application in this process."""
        app: Application = getattr(declare(self.environment), name)
        return run_application(
            app,
            lake=self.lake,
            systems=systems_for(app, lake=self.lake),
            spark=lambda: spark,
            run="test",
        )

    def start_command(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `adjunct` with a log in the folder, and return its process."""
        with (self.folder / "command.log").open("ab") as log:
            return subprocess.Popen(
                [str(Path(sys.executable).parent / "adjunct"), *arguments],
                cwd=ROOT,
                env={**os.environ, **self.environment},
                stdout=log,
                stderr=log,
            )

    def _records(self, topic: str) -> Iterator[tuple[int, int]]:
        from confluent_kafka import Consumer, TopicPartition

        settings = {
            "group.id": "oracle",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
        consumer = Consumer(
            {"bootstrap.servers": self.kafka.bootstrap, "enable.auto.commit": False, **settings}
        )
        try:
            metadata = consumer.list_topics(topic, timeout=30).topics[topic]
            left = set(metadata.partitions)
            consumer.assign([TopicPartition(topic, partition, 0) for partition in left])
            while left:
                message = consumer.poll(60)
                assert message is not None, f"{topic} does not answer"
                if message.error() is not None:
                    assert message.error().name() == "_PARTITION_EOF", message.error()
                    left.discard(message.partition())
                    continue
                headers = dict(message.headers() or [])
                yield int(headers.get("adjunct-epoch", b"0")), json.loads(message.value())["id"]
        finally:
            consumer.close()


def _event(message: object, number: int) -> Event:
    partition, offset, (_, at) = message.partition(), message.offset(), message.timestamp()  # type: ignore[attr-defined]
    return Event(partition, offset, number, at)

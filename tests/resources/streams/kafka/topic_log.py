"""A topic, and what readers must see in it by the producers' own account."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import IsolationLevel, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import OffsetSpec
from pyspark.sql import DataFrame

from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition
from tests.servers.kafka import KafkaServer

Headers = list[tuple[str, bytes | None]]


@dataclass(frozen=True)
class Entry:
    """A record that was delivered, as its producer knows it."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    time_ms: int
    headers: Headers = field(default_factory=list, compare=False)


class TopicLog:
    """Writes records to a topic and remembers those that are to be seen."""

    def __init__(self, server: KafkaServer, name: str) -> None:
        self.server, self.name = server, name
        self.seen: list[Entry] = []

    def write(
        self, *values: bytes | None, partition: int = 0, key: bytes | None = None, **more: Any
    ) -> list[Entry]:
        """Write values (None: a tombstone) outside of any transaction."""
        with self._delivered(self.server.producer()) as (producer, entries):
            self._produce(producer, entries, values, partition, key, **more)
        self.seen += entries
        return entries

    def write_in(
        self, producer: Producer, *values: bytes | None, partition: int = 0, **more: Any
    ) -> list[Entry]:
        """Write with somebody else's producer, whose transaction is not ended yet: nothing is to
        be seen so far.
        """
        entries: list[Entry] = []
        self._produce(producer, entries, values, partition, **more)
        assert producer.flush(30) == 0
        return entries

    def transaction(
        self, *values: bytes | None, partition: int = 0, commit: bool = True, **more: Any
    ) -> list[Entry]:
        """Write values in a transaction of their own, which is committed or aborted."""
        producer = self.transactional()
        producer.begin_transaction()
        entries = self.write_in(producer, *values, partition=partition, **more)
        if commit:
            producer.commit_transaction(30)
            self.seen += entries
        else:
            producer.abort_transaction(30)
        if entries:
            self.wait_until_stable(entries[-1].offset, partition, seconds=1)
        return entries

    def wait_until_stable(self, offset: int, partition: int = 0, *, seconds: float = 30) -> None:
        """Wait until readers get past this offset: brokers end a transaction a moment after they
        have said so.

        After these seconds at the most, since another transaction before it may be open.
        """
        admin, at = self.server.admin(), TopicPartition(self.name, partition)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            asked = admin.list_offsets(
                {at: OffsetSpec.latest()}, isolation_level=IsolationLevel.READ_COMMITTED
            )
            if asked[at].result(30).offset > offset:
                return
            time.sleep(0.01)

    def transactional(self) -> Producer:
        producer = self.server.producer(transactional_id=uuid.uuid4().hex)
        producer.init_transactions(30)
        return producer

    def delete_before(self, offset: int, partition: int = 0) -> None:
        """Move the oldest offset, as retention does."""
        admin = self.server.admin()
        at = TopicPartition(self.name, partition, offset)
        next(iter(admin.delete_records([at]).values())).result(30)
        self.seen = [
            entry for entry in self.seen if entry.partition != partition or entry.offset >= offset
        ]

    def between(self, ranges: Mapping[int, tuple[int, int]]) -> set[Entry]:
        """Return what a reader of these ranges must see."""
        return {
            e
            for e in self.seen
            if e.partition in ranges and ranges[e.partition][0] <= e.offset < ranges[e.partition][1]
        }

    @contextmanager
    def _delivered(self, producer: Producer) -> Iterator[tuple[Producer, list[Entry]]]:
        entries: list[Entry] = []
        yield producer, entries
        assert producer.flush(30) == 0

    def _produce(
        self,
        producer: Producer,
        entries: list[Entry],
        values: Iterable[bytes | None],
        partition: int,
        key: bytes | None = None,
        times: Iterable[int] = (),
        headers: Headers | None = None,
    ) -> None:
        def delivered(error: KafkaError | None, message: Message) -> None:
            assert error is None, error
            offset, where = message.offset(), message.partition()
            assert offset is not None
            assert where is not None
            entries.append(
                Entry(
                    where,
                    offset,
                    message.key(),
                    message.value(),
                    message.timestamp()[1],
                    headers or [],
                )
            )

        at = list(times)
        for i, value in enumerate(values):
            own = {"timestamp": at[i]} if at else {}
            producer.produce(
                self.name, value, key, partition, on_delivery=delivered, headers=headers, **own
            )
            producer.poll(0)
        assert producer.flush(30) == 0


def ranges_of(
    system: KafkaStreams, stream: str, ranges: Mapping[int, tuple[int, int]]
) -> dict[SystemStreamPartition, OffsetRange]:
    return {
        SystemStreamPartition(system.name, stream, p): OffsetRange(str(a), str(b))
        for p, (a, b) in ranges.items()
    }


def entries_of(frame: DataFrame) -> list[Entry]:
    """Return the rows of a raw stream, in the order in which they came."""
    return [
        Entry(
            row["__partition"],
            row["__offset"],
            None if row["key"] is None else bytes(row["key"]),
            None if row["value"] is None else bytes(row["value"]),
            round(row["__timestamp"].timestamp() * 1000),
        )
        for row in frame.collect()
    ]

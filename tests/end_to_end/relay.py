"""What the tests run: events of a topic go to a stream of the lake and to a second topic. `Gate`
holds it in a batch.

The environment says which broker, and how; see `World.environment`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from dagster_adjunct import Application
from dagster_adjunct.kafka import Json, KafkaTopic, KeyText, kafka_system

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PARTITIONS = 8


@dataclass
class Gate:
    """A folder by which a test holds the run's process where a batch is begun and nothing of it is
    written.

    `passed` counts from -1: before its first batch a run calls functions once over no records.
    """

    folder: Path
    passed: int = -1

    def close(self, after: int = 0) -> None:
        """Hold the next process that comes, once it has let so many batches through."""
        self.open()
        (self.folder / "closed").write_text(str(after))

    def open(self) -> None:
        for name in ("closed", "held"):
            (self.folder / name).unlink(missing_ok=True)

    def held(self) -> int | None:
        """Return the id of the process that waits, if one does."""
        held = self.folder / "held"
        return int(held.read_text() or 0) or None if held.exists() else None

    def __call__(self, frame: DataFrame) -> DataFrame:
        closed = self.folder / "closed"
        while closed.exists() and self.passed >= int(closed.read_text() or 0):
            (self.folder / "held").write_text(str(os.getpid()))
            time.sleep(0.1)
        self.passed += 1
        return frame


class Applications(NamedTuple):
    """`relay` writes to the lake and to a topic; `careless` is the same, and accepts losses;
    `mirror` is exact.
    """

    relay: Application
    careless: Application
    mirror: Application


def declare(environment: Mapping[str, str]) -> Applications:
    """Register the broker that the environment names, and return the applications on it."""
    value, key = Json("id BIGINT, customer STRING, amount INT"), KeyText("customer")
    system = environment.get("ADJUNCT_TEST_SYSTEM", "nowhere")
    kafka_system(
        system,
        bootstrap_servers=environment.get("ADJUNCT_TEST_KAFKA", "127.0.0.1:9092"),
        topics={
            "events": KafkaTopic(topic=f"{system}-shop.events", value=value, key=key),
            "mirrored": KafkaTopic(
                topic=f"{system}-mirrored",
                value=value,
                key=key,
                partitioner="kafka-murmur2",
                transactional=True,
            ),
        },
        prefix=f"{system}-",
        client={"socket.timeout.ms": 10_000},
    )
    gate = Gate(Path(environment.get("ADJUNCT_TEST_GATE", ".")))
    batch = int(environment.get("ADJUNCT_TEST_BATCH", "100000"))
    return Applications(
        _to_lake_and_topic(system, gate, batch, "fail"),
        _to_lake_and_topic(system, gate, batch, "oldest"),
        _to_topic(system, gate, batch),
    )


def _to_lake_and_topic(
    system: str, gate: Gate, batch: int, on_lost: Literal["fail", "oldest"]
) -> Application:
    relay = Application("relay", max_batch_records=batch, owners="team:shop")
    events = relay.input_stream(f"{system}.events", default_offset="oldest", on_lost=on_lost)
    held = events.map(gate, keeps_partitioning=True)
    held.send_to(relay.output_stream("lake.relayed", partitions=2, key="customer"))
    held.send_to(relay.output_stream(f"{system}.relayed", partitions=4, key="customer"))
    return relay


def _to_topic(system: str, gate: Gate, batch: int) -> Application:
    mirror = Application("mirror", max_batch_records=batch)
    events = mirror.input_stream(f"{system}.events", default_offset="oldest").map(
        gate, keeps_partitioning=True
    )
    events.send_to(mirror.output_stream(f"{system}.mirrored", partitions=4, key="customer"))
    return mirror


app, careless, mirror = declare(os.environ)

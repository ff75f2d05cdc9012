"""What the tests run: events of a topic go to a stream of the lake and to a second topic. `Gate` holds it in a batch."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_adjunct import Application, Json, KafkaTopic, KeyText, kafka_system

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PARTITIONS = 8
VALUE = "id BIGINT, customer STRING, amount INT"


@dataclass(frozen=True)
class Gate:
    """A folder by which a test holds the run's process where a batch is begun and nothing of it is written."""

    folder: Path

    def close(self, after: int = 0) -> None:
        """Hold the next process that comes, once it has let so many batches through."""
        (self.folder / "held").unlink(missing_ok=True)
        (self.folder / "closed").write_text(str(after))

    def open(self) -> None:
        (self.folder / "closed").unlink(missing_ok=True)
        (self.folder / "held").unlink(missing_ok=True)

    def held(self) -> int | None:
        """Return the id of the process that waits."""
        held = self.folder / "held"
        return int(held.read_text()) if held.exists() and held.read_text() else None

    def __call__(self, frame: DataFrame) -> DataFrame:
        global _passed
        closed = self.folder / "closed"
        if closed.exists() and _passed >= int(closed.read_text()):
            (self.folder / "held").write_text(str(os.getpid()))
            while closed.exists():
                time.sleep(0.1)
        _passed += 1
        return frame


_passed = 0

bootstrap = os.environ.get("ADJUNCT_TEST_KAFKA", "127.0.0.1:9")
value, key = Json(VALUE), KeyText("customer")
kafka_system(
    "kafka",
    bootstrap_servers=bootstrap,
    topics={
        "events": KafkaTopic(topic="shop.events", value=value, key=key),
        "mirrored": KafkaTopic(value=value, key=key, partitioner="kafka-murmur2", transactional=True),
    },
    client={"socket.timeout.ms": 10000},
)

gate = Gate(Path(os.environ.get("ADJUNCT_TEST_GATE", ".")))

app = Application("relay", max_batch_records=int(os.environ.get("ADJUNCT_TEST_BATCH", "100000")), owners="team:shop")
events = app.input_stream("kafka.events", default_offset="oldest").map(gate, keeps_partitioning=True)
events.send_to(app.output_stream("lake.relayed", partitions=2, key="customer"))
events.send_to(app.output_stream("kafka.relayed", partitions=4, key="customer"))

mirror = Application("mirror", max_batch_records=int(os.environ.get("ADJUNCT_TEST_BATCH", "100000")))
(
    mirror.input_stream("kafka.events", default_offset="oldest")
    .map(gate, keeps_partitioning=True)
    .send_to(mirror.output_stream("kafka.mirrored", partitions=4, key="customer"))
)

"""A message of a Kafka topic that can't be read costs only itself, if one does what its error and
docs/startpoints.md say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct import Application
from dagster_adjunct.kafka import Json, KafkaTopic, KeyText
from dagster_adjunct.orchestration.batch_log.checkpoints import CheckpointManager
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.objects.lake import open_lake
from tests.orchestration.kafka_world import KafkaWorld
from tests.servers.kafka import KafkaServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.server]
COLUMNS = "visit STRING, n INT"
SIZE = 8
BAD = 3  # the place of the message that can't be read, in partition 0
GOOD = [n for n in range(2 * SIZE) if n != BAD]


@pytest.fixture
def world(kafka: KafkaServer, tmp_path: Path, spark: SparkSession) -> KafkaWorld:
    """Two partitions with 8 messages each, of which one can't be read: the batch is open."""
    topic = KafkaTopic(kafka.new_topic(2), Json(COLUMNS), KeyText("visit"))
    world = KafkaWorld(
        open_lake(tmp_path / "lake"), tmp_path, lambda: spark, server=kafka, topics={"in": topic}
    )
    producer = kafka.producer()
    for n in range(2 * SIZE):
        value = json.dumps({"visit": f"v{n}", "n": "none" if n == BAD else n})
        producer.produce(topic.topic, value, f"v{n}", n // SIZE)
    assert producer.flush(30) == 0
    with pytest.raises(SchemaMismatchError) as caught:
        world.run(application())
    for way_out in ("malformed=COLUMN", "max_batch_records=1"):  # which the tests follow
        assert way_out in str(caught.value.next_step)
    assert checkpoints(world).read_last_checkpoint().open is not None
    return world


def application(limit: int = 1000) -> Application:
    app = Application("visits", max_batch_records=limit)
    visits = app.input_stream("kafka.in", default_offset="oldest")
    visits.send_to(app.output_stream("lake.out", partitions=2, key="visit"))
    return app


def checkpoints(world: KafkaWorld) -> CheckpointManager:
    return CheckpointManager(world.lake, "visits")


def sent(world: KafkaWorld) -> list[int]:
    return sorted(row["n"] for row in world.rows("out"))


def test_declared_malformed_the_next_run_ends_the_batch_without_the_message(
    world: KafkaWorld,
) -> None:
    keeps = Json(COLUMNS, malformed="unreadable")
    world.topics["in"] = KafkaTopic(world.topics["in"].topic, keeps, KeyText("visit"))
    app = Application("visits", max_batch_records=1000)
    visits = app.input_stream("kafka.in", default_offset="oldest")
    readable = visits.filter("unreadable is null").select("visit", "n")
    readable.send_to(app.output_stream("lake.out", partitions=2, key="visit"))
    world.run(app)
    assert sent(world) == GOOD


def test_read_one_by_one_only_the_message_is_skipped(world: KafkaWorld) -> None:
    assert checkpoints(world).abandon(reason="one by one", by="ada").batch == 1
    with pytest.raises(SchemaMismatchError):
        world.run(application(limit=1))
    skipped = checkpoints(world).abandon(reason="it can't be read", by="ada", skip=True)
    read = {str(ssp): (span.start, span.end) for ssp, span in skipped.ranges.items()}
    assert {name: span for name, span in read.items() if span[0] != span[1]} == {
        "kafka.in.0": (str(BAD), str(BAD + 1))
    }
    world.run(application())
    assert sent(world) == GOOD

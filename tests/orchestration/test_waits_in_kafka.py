"""Records of a topic that wait for a dataset of another topic, from a real broker."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct import Application, unbounded_dataset
from dagster_adjunct.changes import Watermark
from dagster_adjunct.kafka import Json, KafkaTopic, KeyText
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.step.waiting import find_held
from dagster_adjunct.resources.objects.lake import open_lake
from tests.clocks import Clock, on_clock
from tests.orchestration.kafka_world import KafkaWorld
from tests.servers.kafka import KafkaServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.server]
MINUTE = timedelta(minutes=1)


def test_records_wait_between_the_gaps_of_transactions(
    kafka: KafkaServer, tmp_path: Path, spark: SparkSession
) -> None:
    topics = {
        "facts": KafkaTopic(kafka.new_topic(1), Json("n INT, at TIMESTAMP"), KeyText("k")),
        "prices": KafkaTopic(kafka.new_topic(1), Json("v INT"), KeyText("k")),
    }
    clock = Clock()
    lake = on_clock(open_lake(tmp_path / "lake"), clock)
    world = KafkaWorld(lake, tmp_path, lambda: spark, server=kafka, topics=topics)
    begin = clock()
    producer = kafka.producer(**{"transactional.id": topics["facts"].topic})
    producer.init_transactions(30)

    def send_fact(minute: int, number: int, *, commits: bool = True) -> None:
        """Write a record in a transaction of its own, whose end takes an offset, too."""
        at = begin + minute * MINUTE
        record = json.dumps({"n": number, "at": at.isoformat()})
        written = round(clock().timestamp() * 1000)
        producer.begin_transaction()
        producer.produce(topics["facts"].topic, record, "a", 0, timestamp=written)
        if commits:
            producer.commit_transaction(30)
        else:
            producer.flush(30)
            producer.abort_transaction(30)

    prices = unbounded_dataset(
        "prices", input="kafka.prices", key="k", partitions=1, history="all", watermark=Watermark()
    )
    app = Application("app")
    facts = app.input_stream("kafka.facts", default_offset="oldest", event_time="at")
    timed = facts.partition_by("k", partitions=1)
    joined = timed.join(
        app.table(prices), on="k", how="left", select=["v"], as_of="at", wait=20 * MINUTE
    )
    joined.send_to(app.output_stream("lake.out", partitions=1, key="k"))

    def found() -> dict[int, int | None]:
        return {row["n"]: row["v"] for row in world.rows("out")}

    clock.forward(minutes=5)
    world.produce("prices", 0, [(begin, "a", {"v": 10}), (begin + 2 * MINUTE, "a", {"v": 11})])
    send_fact(1, 1)
    send_fact(4, 2, commits=False)
    send_fact(3, 3)
    send_fact(1, 4)
    world.advance(prices)
    (held,) = world.run(app).event_time.held
    assert (held.offset, found()) == (4, {1: 10})
    logged = BatchLog(lake, "app").read().state
    (known,) = find_held(world.systems, lake, app, logged.checkpoint, logged.waits.held)
    assert known.describe() == held.describe(), "without Spark"
    world.produce("prices", 0, [(begin + 4 * MINUTE, "a", {"v": 12})])
    world.advance(prices)
    assert world.run(app).event_time.held == ()
    assert found() == {1: 10, 3: 11, 4: 10}
    send_fact(5, 5)
    (held,) = world.run(app).event_time.held
    clock.forward(minutes=20)
    assert world.run(app).event_time.held == ()
    assert found()[5] == 12

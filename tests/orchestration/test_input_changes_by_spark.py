"""The changes of datasets, read and sent on by Spark, and kept in a topic of a real broker."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.reading import change_streams
from dagster_adjunct.assets.reading.change_streams import ChangeImageStreams, ChangeStreams
from dagster_adjunct.kafka import Json, KafkaTopic, KeyText
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.streams.system import OffsetRange, StreamSystem
from tests.orchestration.changing_datasets import (
    ChangingWorld,
    Content,
    Following,
    follow,
    follow_and_die,
)
from tests.orchestration.kafka_world import KafkaWorld
from tests.servers.kafka import KafkaServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def dataset(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Following:
    monkeypatch.setenv("ADJUNCT_STRICT_PLANS", "1")
    world = ChangingWorld(open_lake(tmp_path / "lake"), tmp_path, lambda: spark)
    dataset = Following(world, random.Random(2))
    dataset.begin()
    for _ in range(3):
        dataset.change()
    return dataset


def test_spark_reads_the_records_that_this_process_reads(
    dataset: Following, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, few in ((ChangeStreams, 100), (ChangeStreams, 0), (ChangeImageStreams, 0)):
        monkeypatch.setattr(change_streams, "_FEW_RECORDS", few)
        system = kind(dataset.world.lake)
        ends = system.upcoming(system.partitions("planes"))
        start = change_streams.commit_offset(2)
        ranges = {ssp: OffsetRange(start, end) for ssp, end in ends.items()}
        expected = system.read_arrow(ranges)
        assert expected.num_rows > 1
        rows = system.read(spark, ranges).orderBy("__partition", "__offset").toArrow()
        assert rows.cast(expected.schema) == expected


def test_changes_are_joined_in_their_partitions(dataset: Following) -> None:
    world = dataset.world
    world.stream("names", "k", 1, k="string", name="string")
    world.send("names", *[(key, key.upper()) for key in "abcdefghijkl"], version="1")
    names = bounded_dataset("names", input="lake.names", key="k", partitions=2)
    world.advance(names)
    app = Application("named", engine="spark", few_records=0)
    changes = app.input_changes(dataset.declare()).join(app.table(names), on="k", how="left")
    changes.send_to(app.output_stream("lake.named", partitions=2, key="k"))
    context = world.context(app)
    assert not context.plan.exchanges
    follow(world, app)
    found = {row["k"]: (row["v"], row["w"], row["name"]) for row in world.rows("named")}
    assert found == {key: (*row, key.upper()) for key, row in dataset.served.items()}


class TopicWorld(KafkaWorld, ChangingWorld):
    """A lake whose changes of datasets can be read, and topics."""

    @property
    def systems(self) -> dict[str, StreamSystem]:
        return {**ChangingWorld.systems.fget(self), "kafka": self.kafka}  # type: ignore[attr-defined]


@pytest.mark.server
def test_a_topic_is_kept_equal_to_a_dataset(
    dataset: Following, kafka: KafkaServer, spark: SparkSession
) -> None:
    topic = KafkaTopic(kafka.new_topic(2), Json("v INT, w INT"), KeyText("k"))
    world = TopicWorld(
        dataset.world.lake,
        dataset.world.folder,
        lambda: spark,
        dataset.world.sequences,
        server=kafka,
        topics={"planes": topic},
    )
    dataset.world = world
    app = Application("to-kafka")
    app.input_changes(dataset.declare()).send_to(
        app.output_stream("kafka.planes", partitions=2, key="k")
    )
    follow(world, app)
    dataset.change()
    follow_and_die(world, app, "outputs")
    dataset.change()
    follow(world, app)

    kept: Content = {}
    system = world.kafka
    ssps = system.partitions("planes")
    ends = system.upcoming(ssps)
    ranges = {ssp: OffsetRange("0", ends[ssp]) for ssp in ssps}
    for row in system.read(spark, ranges).orderBy("__partition", "__offset").collect():
        if row["__tombstone"]:
            kept.pop(row.k, None)
        else:
            kept[row.k] = (row.v, row.w)
    assert kept == dataset.served

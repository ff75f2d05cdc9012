"""Kafka to Parquet: this project's data source against Spark's own connector on the Spark that it
is made for.

One broker, one topic, both in local[2]; the connector in an environment and a process of its own,
in `.cache/peers-kafka`, made at the first run from the configured package registry.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.environments import HERE, Ask, Environment
from benchmarks.timing import Measured, show
from dagster_adjunct import open_lake, session_scope
from dagster_adjunct.kafka import Json, KafkaTopic, kafka_system
from dagster_adjunct.resources.streams.lake.streams import open_system
from dagster_adjunct.streams import OffsetRange

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.streams import StreamSystem
    from tests.servers.kafka import KafkaServer

PARTITIONS = 8
PEER = Environment("peers-kafka", ("pyspark[sql]==4.0.0", "pyarrow", "pandas<3"), "kafka_peer.py")
COLUMNS = (
    "flight STRING, origin STRING, dest STRING, tailnum STRING, distance INT, delay DOUBLE, hour"
    " BIGINT"
)
FORMS = {"raw": KafkaTopic(), "json": KafkaTopic(value=Json(COLUMNS))}
META = ("__partition AS p", "__offset AS o", "__timestamp AS t")
GOAL = "at least 1"


def run(rounds: int, count: int = 1_000_000) -> None:
    from tests.servers.kafka import start_kafka

    print(f"kafka: {count:,} JSON messages in {PARTITIONS} partitions to Parquet, local[2]")
    subprocess.run(["sh", str(HERE.parent / ".ci" / "install-kafka.sh")], check=True)
    python = PEER.python()
    if python is None:
        return
    with (
        TemporaryDirectory() as folder,
        start_kafka(Path(folder)) as broker,
        session_scope(master="local[2]") as session,
        PEER.session(python, folder) as ask,
    ):
        topic = broker.create_topic("flights", PARTITIONS)
        fill(broker, topic, count)
        lake = open_lake(Path(folder) / "lake")
        for form, declared in FORMS.items():
            kafka_system(form, bootstrap_servers=broker.bootstrap, topics={topic: declared})
            measured = _compare(
                session(), open_system(lake, form), broker, ask, form, rounds, Path(folder)
            )
            for timing in measured.values():
                print(f"  {timing.name}: {count / timing.median:,.0f} rows/s")
            show(measured, f"connector_{form}", f"ours_{form}", GOAL)


def _compare(
    spark: SparkSession,
    system: StreamSystem,
    broker: KafkaServer,
    ask: Ask,
    form: str,
    rounds: int,
    folder: Path,
) -> dict[str, Measured]:
    command = f"{form} {broker.bootstrap} flights"
    seconds: dict[str, list[float]] = {f"ours_{form}": [], f"connector_{form}": []}
    for number in range(rounds + 1):  # the first is for warming up
        ours, theirs = folder / f"ours-{form}-{number}", folder / f"theirs-{form}-{number}"
        began = time.perf_counter()
        whole(spark, system, "flights").write.parquet(str(ours))
        took = {
            f"ours_{form}": time.perf_counter() - began,
            f"connector_{form}": ask(f"{command} {theirs} {COLUMNS if form == 'json' else ''}"),
        }
        written, expected = ask(f"sum {ours}"), ask(f"sum {theirs}")
        if written != expected:
            raise SystemExit(f"the files differ: the connector wrote {expected}, ours {written}")
        if number:
            for name, duration in took.items():
                seconds[name].append(duration)
    return {name: Measured(name, tuple(durations)) for name, durations in seconds.items()}


def whole(spark: SparkSession, system: StreamSystem, stream: str) -> DataFrame:
    """Return all records of the stream with the same columns as the connector's."""
    ssps = system.partitions(stream)
    oldest, upcoming = system.oldest(ssps), system.upcoming(ssps)
    frame = system.read(spark, {ssp: OffsetRange(oldest[ssp], upcoming[ssp]) for ssp in ssps})
    return frame.selectExpr(
        *[f"`{name}`" for name in frame.columns if not name.startswith("__")], *META
    )


def fill(broker: KafkaServer, topic: str, count: int) -> None:
    """Put as many flights into the topic, keyed by aircraft."""
    producer = broker.producer(partitioner="murmur2_random", linger_ms=50)
    places = ("EWR", "JFK", "LGA", "ORD", "ATL", "LAX")
    for start in range(0, count, 10_000):
        batch = []
        for n in range(start, min(start + 10_000, count)):
            tail = f"N{n * 7919 % 4000:05d}"
            value = (
                f'{{"flight":"UA{n % 2000}","origin":"{places[n % 3]}","dest":"{places[n % 6]}",'
                f'"tailnum":"{tail}","distance":{200 + n % 2500},"delay":{n % 90 - 12}.5,'
                f'"hour":{1_357_020_000 + n // 50 * 3600}}}'
            )
            batch.append({"key": tail, "value": value})
        producer.produce_batch(topic, batch)
        producer.flush(60)

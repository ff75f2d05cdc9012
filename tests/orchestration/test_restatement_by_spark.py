"""Restatements that Spark computes, against plain Python."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.declaration.policies import Watermark
from dagster_adjunct.assets.reading.change_streams import ChangeStreams
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.lookups import Wait
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.changing_datasets import ChangingWorld, Following
from tests.orchestration.step_world import ByTasks
from tests.orchestration.test_joins_that_wait import MINUTE, World

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


WEEK = timedelta(days=7)


def newest_of(world: ChangingWorld) -> RemoteTable[Any, Any, Any]:
    store = world.table("newest").write_function
    return RemoteTable("newest", key="k", write_function=store, newest_by="w")


def halves(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"k": record["k"], "n": record["n"], "part": part, "v": record["v"]} for part in (1, 2)]


def test_spark_restates_what_was_joined_by_changed_keys(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADJUNCT_STRICT_PLANS", "1")
    world = ChangingWorld(open_lake(tmp_path / "lake"), tmp_path, lambda: spark)
    dataset = Following(world, random.Random(2))
    dataset.begin()
    dataset.send({"a": (1, 1), "b": (2, 2), "c": (3, 3)})
    world.stream("facts", "n", 3, n="int", key="string")
    facts = {n: "abcd"[n % 4] for n in range(40)}
    world.send("facts", *facts.items())

    def make() -> Application:
        app = Application("app", engine="spark", few_records=1)
        records = app.input_stream("lake.facts", default_offset="oldest")
        joined = (
            records.select("key as k", "n")
            .partition_by("k")
            .join(app.table(dataset.declare()), on="k", how="left", select=["v"], restate=WEEK)
        )
        parts = Schema.of(k="string", n="int", part="int", v="int")
        joined.flat_map(halves, schema=parts).filter("v is not null").send_to(
            app.output_stream("lake.out", partitions=2, key="n")
        )
        newest = app.table(newest_of(world))
        joined.update(newest, set={"v": "v", "w": "n"}, if_missing=[])
        return app

    def latest() -> set[tuple[int, int, int]]:
        ranges = world.streams.all_ranges("out")
        rows = world.streams.read_arrow(ranges, epochs="latest").to_pylist()
        found = {(row["n"], row["part"], row["v"]) for row in rows}
        assert len(found) == len(rows)
        return found

    def check() -> None:
        expected = set()
        for n, key in facts.items():
            value = dataset.served.get(key, (None, None))[0]
            if value is not None:
                expected |= {(n, 1, value), (n, 2, value)}
        assert latest() == expected
        newest = {key: n for n, key in facts.items()}
        for key, (value, n) in world.records("newest").items():
            assert (value, n) == (dataset.served.get(key, (None, None))[0], newest[key])

    run_step(world.context(make()), ByTasks())
    check()
    dataset.send({"a": (7, 1), "d": (4, 4)}, gone=["b"])
    report = run_step(world.context(make()))
    assert report.counters["restated"] == {"changed_keys": 3, "records": 30}
    check()


def test_what_was_early_is_restated_once_the_dataset_knows(
    tmp_path: Path, spark: SparkSession
) -> None:
    world = World(tmp_path, spark, partitions=1, watermark=Watermark())

    def run() -> StepReport:
        app = Application("app")
        facts = app.input_stream("lake.facts", default_offset="oldest", event_time="at")
        facts.join(
            app.table(world.prices),
            on="k",
            how="left",
            select=["v"],
            as_of="at",
            wait=Wait(10 * MINUTE, mark="is_early"),
            restate=WEEK,
        ).send_to(app.output_stream("lake.out", partitions=1, key="k"))
        return run_application(
            app,
            lake=world.lake,
            systems={"lake": world.streams, "changes": ChangeStreams(world.lake)},
            spark=spark,
            run="test",
        ).step

    def latest() -> dict[int, tuple[int | None, bool]]:
        ranges = world.streams.all_ranges("out")
        rows = world.streams.read_arrow(ranges, epochs="latest").to_pylist()
        return {row["n"]: (row["v"], row["is_early"]) for row in rows}

    world.send("prices", ("a", 0, 10))
    world.send("facts", ("a", 3, 1), ("a", 1, 2), ("b", 3, 3))
    world.clock.forward(minutes=10)
    run()
    assert latest() == {1: (10, True), 2: (10, True), 3: (None, True)}
    world.send("prices", ("a", 2, 11), ("c", 9, 1))
    report = run()
    assert report.counters["restated"] == {"changed_keys": 2, "records": 1}
    assert latest() == {1: (11, False), 2: (10, True), 3: (None, True)}

"""Few records are worked on by one task a stage: the same records, bytes that count and checks,
by fewer tasks.
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.intent import Intent
from dagster_adjunct.orchestration.step.batch import classify_batch
from dagster_adjunct.orchestration.step.context import BatchInputs
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    ManifestMismatchError,
    OperatorFailedError,
)
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.small_work import SMALL_DATASETS, SMALL_ROWS
from tests.orchestration.step_world import StepWorld

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PLANES = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=4)
TRIPS = [(f"N{number % 7}", f"to-{number % 3}", number) for number in range(40)]


class View:
    """A version of which only its size is known."""

    def __init__(self, rows: int) -> None:
        self.rows = rows


@pytest.fixture
def world(step_world: StepWorld) -> StepWorld:
    step_world.stream("trips", "tailnum", 4, tailnum="string", dest="string", v="int")
    step_world.stream("planes", "tailnum", 4, tailnum="string", seats="int")
    step_world.send("planes", *[(f"N{number}", 100 + number) for number in range(5)], version="v1")
    step_world.send("trips", *TRIPS)
    return step_world


def application(world: StepWorld, **options: Any) -> Application:
    app = Application("app", **options)
    joined = app.input_stream("lake.trips").join(app.table(PLANES), on="tailnum", how="left")
    moved = joined.partition_by("dest", partitions=4)
    sent = moved.send_to(app.output_stream("lake.out", partitions=4, key="dest"))
    sent.map("dest as k", "v", "seats as w").send_to(app.table(world.table()))
    return app


def tasks_of(world: StepWorld, app: Application, *, few: int) -> int:
    """Run the application; return how many tasks Spark has run for it, the dataset's left out.

    So many batches say that they took one task a stage: in their events and in the run's report.
    """
    summaries: list[str] = []
    tracker = world.spark().sparkContext.statusTracker()
    world.advance(*app.datasets)
    before = set(tracker.getJobIdsForGroup(None))
    report = world.run(app, on_event=lambda event: summaries.append(event.summary()))
    assert (
        report.few_batches
        == few
        == sum(text.endswith("; one task a stage, as they are few") for text in summaries)
    )
    stages = {
        stage
        for job in set(tracker.getJobIdsForGroup(None)) - before
        if (info := tracker.getJobInfo(job)) is not None
        for stage in info.stageIds
    }
    return sum(
        stage_info.numTasks
        for stage in stages
        if (stage_info := tracker.getStageInfo(stage)) is not None
    )


@pytest.mark.spark
def test_few_records_take_a_task_a_stage_and_leave_what_many_tasks_would(world: StepWorld) -> None:
    app = application(world)
    assert tasks_of(world, app, few=1) == 3  # joined, moved and written, then the table
    seats = {f"N{number}": 100 + number for number in range(5)}
    expected = sorted((tailnum, dest, v, seats.get(tailnum)) for tailnum, dest, v in TRIPS)
    assert sorted(tuple(row.values()) for row in world.rows("out")) == expected
    # In the order of the input's partitions, the last of each destination.
    last = {row["dest"]: (row["v"], seats.get(row["tailnum"])) for row in world.rows("trips")}
    assert world.records() == last
    many = application(world, few_records=0)
    world.again(many)  # a task a partition: the records of then, or their stream would refuse them
    assert len(world.rows("out")) == len(TRIPS)


@pytest.mark.spark
def test_as_many_tasks_as_partitions_where_that_is_asked_for(world: StepWorld) -> None:
    assert tasks_of(world, application(world, few_records=len(TRIPS) - 1), few=0) == 12


@pytest.mark.spark
def test_a_local_table_is_written_by_one_task_and_holds_what_many_would_write(
    world: StepWorld,
) -> None:
    kept = []
    for name, options, tasks in (("few", {}, 1), ("many", {"few_records": 0}, 4)):
        app = Application(name, **options)
        last = app.local_table(
            f"last-{name}",
            key="tailnum",
            schema=Schema.of(tailnum="string", dest="string", v="int"),
            partitions=4,
        )
        app.input_stream("lake.trips").send_to(last)
        assert tasks_of(world, app, few=int(name == "few")) == tasks
        kept.append(dict(open_dataset(world.lake, f"last-{name}").items()))
    assert kept[0] == kept[1]
    assert len(kept[0]) == 7


@pytest.mark.spark
def test_a_row_that_lies_elsewhere_than_promised_is_found_by_one_task_as_well(
    world: StepWorld,
) -> None:
    def renamed(frame: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        return frame.withColumn("tailnum", F.concat("tailnum", F.lit("-x")))

    app = Application("app")
    moved = app.input_stream("lake.trips").map(renamed, keeps_partitioning=True)
    moved.send_to(app.output_stream("lake.out", partitions=4, key="tailnum"))
    with pytest.raises(
        OperatorFailedError, match="a row of another bucket reached the task of bucket"
    ) as failed:
        world.run(app)
    assert failed.value.operator == "map-2"
    assert "Remove keeps_partitioning=True" in failed.value.next_step
    assert isinstance(failed.value.__cause__, ManifestMismatchError)
    assert world.streams.upcoming(world.streams.partitions("out")) == dict.fromkeys(
        world.streams.partitions("out"), "0"
    )


def small(records: int, tasks: int | None, limit: int, **views: object) -> tuple[bool, bool]:
    broadcast = SimpleNamespace(name="broadcast", broadcast=True)
    app: Any = SimpleNamespace(few_records=limit, datasets=[broadcast])
    intent = Intent(batch=1, run="run", clock=datetime.now(UTC), ranges={}, tasks=tasks)
    matched: Any = views
    made = classify_batch(app, BatchInputs(intent, matched, records=records))
    return made.few, made.interpreted


def test_few_are_bounded_by_records_and_by_the_rows_that_one_task_would_read() -> None:
    matched = {"planes": View(SMALL_DATASETS), "broadcast": View(10 * SMALL_DATASETS)}
    assert small(10, None, 10, **matched)[0]
    assert not small(11, None, 10, **matched)[0]
    assert not small(4, 3, 10, **matched)[0]  # each of three tasks reads all of them
    assert not small(10, None, 10, planes=View(SMALL_DATASETS + 1))[0]
    large = Mock(spec=VersionReader)
    large.sealed = SimpleNamespace(generations=[SimpleNamespace(rows=1, size=2**30)])
    assert not small(10, None, 10, planes=large)[0]
    assert small(10, None, 10, planes=None)[0]
    assert not small(1, None, 0)[0]
    with pytest.raises(ConfigurationError) as failure:
        Application("app", few_records=-1)
    assert failure.value.argument == "few_records"


def test_few_rows_of_all_datasets_and_states_are_for_interpreted_plans() -> None:
    half = View(SMALL_ROWS // 2)
    assert small(1, None, 1, planes=half, state=half, broadcast=View(0)) == (True, True)
    assert small(1, None, 1, planes=half, state=half, broadcast=View(1)) == (True, False)


@pytest.mark.spark
@pytest.mark.one_engine
@pytest.mark.parametrize("dies", [False, True])
def test_the_plans_of_few_records_are_interpreted_and_the_session_is_as_before(
    world: StepWorld, *, dies: bool
) -> None:
    conf, seen = world.spark().conf, list[tuple[str | None, ...]]()

    def settings() -> tuple[str | None, ...]:
        return tuple(
            conf.get(f"spark.sql.codegen.{name}") for name in ("wholeStage", "factoryMode")
        )

    def noted(frame: DataFrame) -> DataFrame:
        seen.append(settings())
        if dies and len(seen) == 2:  # after the rehearsal
            raise ValueError("it dies")
        return frame

    def applied(name: str, few: int) -> None:
        app = Application(name, few_records=few)
        app.input_stream("lake.trips").map(noted, keeps_partitioning=True).send_to(
            app.output_stream(f"lake.{name}", partitions=4, key="tailnum")
        )
        seen.clear()
        with pytest.raises(OperatorFailedError, match="it dies") if dies else nullcontext():
            world.run(app)

    compiled, interpreted = ("true", "FALLBACK"), ("false", "NO_CODEGEN")
    theirs = settings()
    try:
        for setting, value in zip(("wholeStage", "factoryMode"), compiled, strict=True):
            conf.set(f"spark.sql.codegen.{setting}", value)
        for name, few, expected in (("few", 100, interpreted), ("many", 0, compiled)):
            applied(name, few)
            assert seen[1:2] == [expected]
            assert settings() == compiled
        conf.set("spark.sql.codegen.wholeStage", "false")
        applied("chosen", 100)
        assert seen[1:2] == [("false", "FALLBACK")], "of a session that was given other settings"
        assert settings() == ("false", "FALLBACK")
    finally:
        for name, value in zip(("wholeStage", "factoryMode"), theirs, strict=True):
            conf.set(f"spark.sql.codegen.{name}", str(value))

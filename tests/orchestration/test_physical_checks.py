"""What Spark is going to do is compared with the plan before a batch is begun: once a run, each
operator once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step import physical_plan as rehearsal
from dagster_adjunct.orchestration.step.physical_plan import SparkPlan, inspect_spark_plan
from dagster_adjunct.resources.errors import PlanningError
from tests.orchestration.step_world import StepWorld

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.application.graph import DatasetHandle
    from dagster_adjunct.orchestration.application.message_stream import MessageStream

pytestmark = [pytest.mark.spark, pytest.mark.one_engine]

PLANES = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=2)
CREWS = bounded_dataset("crews", input="lake.crews", key="tailnum", partitions=2)


@pytest.fixture
def world(step_world: StepWorld) -> StepWorld:
    step_world.stream("trips", "tailnum", 2, tailnum="string", v="int")
    step_world.stream("planes", "tailnum", 2, tailnum="string", seats="int")
    step_world.send("planes", ("N1", 100), ("N2", 200), version="v1")
    step_world.send("trips", ("N1", 1), ("N2", 2), ("N3", 3))
    return step_world


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The joins of each physical plan that was looked at."""
    seen: list[set[str]] = []

    def counted(*arguments: Any, **options: Any) -> SparkPlan:
        physical_plan = inspect_spark_plan(*arguments, **options)
        seen.append(set(physical_plan.joins))
        return physical_plan

    monkeypatch.setattr(rehearsal, "inspect_spark_plan", counted)
    return seen


def joined(stream: MessageStream, planes: DatasetHandle, first: int, count: int) -> MessageStream:
    for number in range(first, first + count):
        stream = stream.join(
            planes, on="tailnum", how="left", prefix=f"p{number}_", name=f"j{number}"
        )
    return stream


@pytest.mark.parametrize(
    "joins", [pytest.param(1, marks=pytest.mark.long), 3, pytest.param(8, marks=pytest.mark.long)]
)
def test_one_plan_is_looked_at_for_all_joins_of_a_run(
    world: StepWorld, looks: list[set[str]], joins: int
) -> None:
    app = Application("app", max_batch_records=1, few_records=0)
    enriched = joined(app.input_stream("lake.trips"), app.table(PLANES), 0, joins)
    enriched.send_to(app.output_stream("lake.out", partitions=2, key="tailnum"))
    report = world.run(app)
    assert report.batches == 3
    assert looks == [{f"join-{number + 2}-j{number}" for number in range(joins)}]
    assert report.counters[f"join-{joins + 1}-j{joins - 1}"] == {"rows": 3, "unmatched": 1}


def test_records_that_several_read_are_looked_at_where_they_are_kept(
    world: StepWorld, looks: list[set[str]]
) -> None:
    app = Application("app", few_records=0)
    planes = app.table(PLANES)
    trunk = joined(app.input_stream("lake.trips"), planes, 0, 2)
    joined(trunk, planes, 2, 2).send_to(app.output_stream("lake.left", partitions=2, key="tailnum"))
    trunk.filter("v > 1").send_to(app.output_stream("lake.right", partitions=2, key="tailnum"))
    world.run(app)
    assert looks == [{"join-2-j0", "join-3-j1"}, {"join-4-j2", "join-5-j3"}, set()]
    assert len(world.rows("left")) == 3
    assert len(world.rows("right")) == 2


def test_records_are_looked_up_after_they_were_inspected_at_an_output(world: StepWorld) -> None:
    app = Application("app")
    trips, table = app.input_stream("lake.trips"), app.table(world.table())
    trips.send_to(app.output_stream("lake.left", partitions=2, key="tailnum"))
    found = trips.join(table, on={"tailnum": "k"}, select={"v": "int"}, how="left", prefix="of_")
    found.send_to(app.output_stream("lake.right", partitions=2, key="tailnum"))
    world.run(app)
    assert len(world.rows("left")) == len(world.rows("right")) == 3


def test_records_that_a_merge_takes_twice_are_computed_once(world: StepWorld) -> None:
    app = Application("app")
    moved = app.input_stream("lake.trips").partition_by("v", partitions=1)
    moved.merge(moved).send_to(app.output_stream("lake.out", partitions=1, key="v"))
    world.run(app)
    assert len(world.rows("out")) == 6


def moved(frame: DataFrame) -> DataFrame:
    return frame.repartition(3)


def with_its_own_exchange(frame: DataFrame) -> DataFrame:
    return frame.dropDuplicates(["v"]).repartition(2, "tailnum")


@pytest.fixture
def without_buckets(world: StepWorld) -> Iterator[None]:
    """A session of which somebody has switched off that Spark sees buckets."""
    conf, setting = world.spark().conf, "spark.sql.sources.bucketing.enabled"
    conf.set(setting, "false")
    yield
    conf.unset(setting)


@pytest.mark.usefixtures("without_buckets")
@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        pytest.param(
            "planes", "join-2-planes: Spark shuffles dataset planes", marks=pytest.mark.long
        ),
        (
            "crews",
            (
                "join-3-crews: Spark shuffles dataset crews, which the plan proved to be"
                " co-partitioned"
            ),
        ),
    ],
)
def test_a_shuffled_dataset_is_reported_with_the_join_that_it_is_of(
    world: StepWorld, monkeypatch: pytest.MonkeyPatch, dataset: str, message: str
) -> None:
    """The other one has no buckets: it is broadcast."""
    planes, crews = (
        (
            one
            if one.name == dataset
            else bounded_dataset(one.name, input=one.input, key="tailnum", broadcast=True)
        )
        for one in (PLANES, CREWS)
    )
    world.stream("crews", "tailnum", 2, tailnum="string", pilot="string")
    world.send("crews", ("N1", "Ada"), version="v1")
    app = Application("app", few_records=0)
    enriched = (
        app.input_stream("lake.trips")
        .join(app.table(planes), on="tailnum")
        .join(app.table(crews), on="tailnum")
    )
    enriched.send_to(app.output_stream("lake.out", partitions=1))
    with pytest.raises(PlanningError, match=message):
        world.run(app)
    assert "out" not in world.streams.list_streams()
    assert world.state(app).open is None
    monkeypatch.delenv("ADJUNCT_STRICT_PLANS")
    world.run(app)
    assert len(world.rows("out")) == 1


@pytest.mark.parametrize(
    ("describe", "message"),
    [
        (
            lambda stream: stream.filter(moved, keeps_partitioning=True),
            (
                r"send-to-3: .* hashpartitioning\(tailnum, 2\), but after filter-2 their"
                r" partitioning is Round"
            ),
        ),
        (
            lambda stream: stream.map(moved, keeps_partitioning=True),
            "send-to-3: .* after map-2 their partitioning is RoundRobin",
        ),
        (
            lambda stream: stream.map(
                lambda frame: frame.repartition(2, "v"), keeps_partitioning=True
            ),
            r"after map-2 their partitioning is hashpartitioning\(v, 2\)",
        ),
        (
            lambda stream: stream.filter(lambda frame: frame.coalesce(1), keeps_partitioning=True),
            "after filter-2 their partitioning is SinglePartition",
        ),
    ],
)
def test_records_for_other_partitions_are_refused_before_a_batch(
    world: StepWorld, describe: Callable[[Any], Any], message: str
) -> None:
    app = Application("app", few_records=0)
    describe(app.input_stream("lake.trips")).send_to(
        app.output_stream("lake.out", partitions=2, key="tailnum")
    )
    with pytest.raises(PlanningError, match=message):
        world.run(app)
    assert world.state(app).open is None
    assert "out" not in world.streams.list_streams()


def test_a_window_over_records_that_lie_together_moves_none(world: StepWorld) -> None:
    """ADJUNCT_STRICT_PLANS is set here: an exchange that the plan does not list would fail the
    run.
    """
    app = Application("app", few_records=0)
    trips = app.input_stream("lake.trips").map(
        "*", "row_number() over (partition by tailnum, v order by v) as n"
    )
    trips.send_to(app.output_stream("lake.out", partitions=2, key="tailnum"))
    moved = trips.partition_by("v").with_columns(total="sum(n) over (partition by v)")
    moved.send_to(app.output_stream("lake.by-v", partitions=2, key="v"))
    world.run(app)
    assert [row["n"] for row in world.rows("out")] == [1, 1, 1]
    assert [row["total"] for row in world.rows("by-v")] == [1, 1, 1]


def test_a_function_that_moves_records_and_brings_them_back_is_reported_and_right(
    world: StepWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = Application("app", few_records=0)
    kept = app.input_stream("lake.trips").map(with_its_own_exchange, keeps_partitioning=True)
    kept.send_to(app.output_stream("lake.out", partitions=2, key="tailnum"))
    with pytest.raises(
        PlanningError, match="map-2: Spark shuffles the records 2 times more than the plan lists"
    ):
        world.run(app)
    monkeypatch.delenv("ADJUNCT_STRICT_PLANS")
    world.run(app)
    assert "map-2: Spark shuffles the records 2 times" in caplog.text
    assert sorted(row["v"] for row in world.rows("out")) == [1, 2, 3]


def test_a_function_of_which_nothing_is_claimed_may_move_records(world: StepWorld) -> None:
    app = Application("app", few_records=0)
    trips = app.input_stream("lake.trips")
    trips.map(lambda frame: frame.dropDuplicates(["v"])).send_to(
        app.output_stream("lake.out", partitions=2, key="tailnum")
    )
    world.run(app)
    assert len(world.rows("out")) == 3

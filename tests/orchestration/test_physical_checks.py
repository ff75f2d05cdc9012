"""Compiling a batch is linear in its operators: Spark plans a chain of joins once, however many they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step import compile_batch as compiling
from dagster_adjunct.orchestration.step.exchange_check import ProvenJoin, check_joins
from dagster_adjunct.resources.errors import PlanningError
from tests.orchestration.step_world import StepWorld

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.application.declared_handles import DatasetTable
    from dagster_adjunct.orchestration.application.message_stream import MessageStream

pytestmark = pytest.mark.spark

PLANES = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=2)


@pytest.fixture
def world(step_world: StepWorld) -> StepWorld:
    step_world.stream("trips", "tailnum", 2, tailnum="string", v="int")
    step_world.stream("planes", "tailnum", 2, tailnum="string", seats="int")
    step_world.send("planes", ("N1", 100), ("N2", 200), version="v1")
    step_world.send("trips", ("N1", 1), ("N2", 2), ("N3", 3))
    return step_world


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The operators of the joins that each physical plan was looked at for, a plan each."""
    seen: list[set[str]] = []

    def counted(frame: DataFrame, joins: Mapping[str, ProvenJoin]) -> set[str]:
        metrics = check_joins(frame, joins)
        seen.append({joins[metric].operator for metric in metrics})
        return metrics

    monkeypatch.setattr(compiling, "check_joins", counted)
    return seen


def joined(stream: MessageStream, planes: DatasetTable, first: int, count: int) -> MessageStream:
    for number in range(first, first + count):
        stream = stream.join(planes, on="tailnum", how="left", prefix=f"p{number}_", name=f"j{number}")
    return stream


@pytest.mark.parametrize("joins", [1, 4, 8])
def test_one_plan_is_looked_at_for_all_joins_of_a_batch(world: StepWorld, checks: list[set[str]], joins: int) -> None:
    app = Application("app")
    enriched = joined(app.input_stream("lake.trips"), app.table(PLANES), 0, joins)
    enriched.send_to(app.output_stream("lake.out", partitions=2, key="tailnum"))
    report = world.run(app)
    assert checks == [{f"join-{number + 2}-j{number}" for number in range(joins)}]
    assert report.counters[f"join-{joins + 1}-j{joins - 1}"] == {"rows": 3, "unmatched": 1}


def test_records_that_several_read_are_looked_at_where_they_are_kept(world: StepWorld, checks: list[set[str]]) -> None:
    app = Application("app")
    planes = app.table(PLANES)
    trunk = joined(app.input_stream("lake.trips"), planes, 0, 2)
    joined(trunk, planes, 2, 2).send_to(app.output_stream("lake.left", partitions=2, key="tailnum"))
    trunk.filter("v > 1").send_to(app.output_stream("lake.right", partitions=2, key="tailnum"))
    world.run(app)
    assert checks == [{"join-2-j0", "join-3-j1"}, {"join-4-j2", "join-5-j3"}]
    assert len(world.rows("left")) == 3
    assert len(world.rows("right")) == 2


def test_a_shuffled_dataset_is_told_with_the_join_that_it_is_of(
    world: StepWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second join's dataset is moved, as it would be if Spark saw no buckets."""

    def moved(batch: compiling.Batch, dataset: str) -> tuple[DataFrame, object]:
        frame, schema = entries(batch, dataset)
        return frame.repartition(3) if dataset == "crews" else frame, schema

    entries = compiling.Batch.entries
    crews = bounded_dataset("crews", input="lake.crews", key="tailnum", partitions=2)
    world.stream("crews", "tailnum", 2, tailnum="string", pilot="string")
    world.send("crews", ("N1", "Ada"), version="v1")
    app = Application("app")
    enriched = app.input_stream("lake.trips").join(app.table(PLANES), on="tailnum").join(app.table(crews), on="tailnum")
    enriched.send_to(app.output_stream("lake.out", partitions=2, key="tailnum"))
    monkeypatch.setattr(compiling.Batch, "entries", moved)
    with pytest.raises(PlanningError, match="join-3-crews: Spark shuffles dataset crews, which the plan proved"):
        world.run(app)
    assert "out" not in world.streams.list_streams()

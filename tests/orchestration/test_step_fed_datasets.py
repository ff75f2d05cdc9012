"""Datasets that an application feeds: their stream stays as it is, however the dataset's buckets
are spread.
"""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import PlanningError
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark

SPREADS: dict[str, dict[str, Any]] = {
    "other-buckets": {"key": "k", "partitions": 8},
    "another-key": {"key": "v", "partitions": 4, "order_by": "v"},
    "by-a-part": {"key": ["k", "v"], "partition_by": "v", "partitions": 3},
    "broadcast": {"key": "k", "broadcast": True},
    "keyless": {"key": "k", "partitions": 2},
}


def entries(world: StepWorld, dataset: AdjunctDataset) -> list[tuple[Any, ...]]:
    frame = StoredVersions(world.lake, dataset).require_current().frame(world.spark())
    return sorted((row["k"], row["v"]) for row in frame.collect())


def test_a_fed_dataset_is_spread_as_it_is_declared_and_its_stream_as_it_was_made(
    step_world: StepWorld,
) -> None:
    """A stream without a key has one partition, and holds the order in which the records of one
    key were sent.
    """
    step_world.stream("numbers", "k", 4, k="string", v="int")
    app = Application("app")
    numbers = app.input_stream("lake.numbers")
    fed = []
    for name, spread in SPREADS.items():
        step_world.stream(name, *((), 1) if name == "keyless" else ("k", 4), k="string", v="int")
        fed.append(unbounded_dataset(name, input=f"lake.{name}", **spread))
        numbers.send_to(app.table(fed[-1]))
    before = [step_world.streams.info(name) for name in SPREADS]
    sent = [(f"k{number % 20}", number) for number in range(40)]
    step_world.send("numbers", *sent)
    step_world.run(app)
    step_world.advance(*fed)
    for dataset in fed:
        assert entries(step_world, dataset) == sorted(sent if "v" in dataset.key else sent[20:]), (
            dataset.name
        )
    assert [step_world.streams.info(name) for name in SPREADS] == before


def test_the_mend_of_a_conflict_in_place_runs(step_world: StepWorld) -> None:
    """A join needs the dataset in 8 buckets, as planning says; the stream that feeds it keeps
    its 4 partitions.
    """
    step_world.stream("ref", "k", 4, k="string", v="int")
    for name in ("left", "right"):
        step_world.stream(name, "k", 8, k="string", v="int")
    ref = unbounded_dataset("ref", input="lake.ref", key="k", partitions=8)
    app = Application("app")
    table = app.table(ref)
    app.input_stream("lake.left").send_to(table)
    joined = app.input_stream("lake.right").join(table, on="k", select=["v as w"])
    joined.send_to(app.output_stream("lake.out", partitions=8, key="k"))
    step_world.send("left", ("a", 1), ("b", 2))
    step_world.run(app)
    step_world.send("right", ("a", 10), ("b", 20))
    step_world.run(app)
    assert sorted((row["k"], row["v"], row["w"]) for row in step_world.rows("out")) == [
        ("a", 10, 1),
        ("b", 20, 2),
    ]
    assert step_world.streams.info("ref").partitions == 4


def test_a_key_widened_by_a_function_is_rejected_before_a_batch(step_world: StepWorld) -> None:
    step_world.stream("numbers", "k", 2, k="string", v="int")
    step_world.stream("ref", "k", 2, k="string", v="int")
    ref = unbounded_dataset("ref", input="lake.ref", key=["k", "v"], partition_by="k", partitions=2)
    step_world.send("ref", ("a", 1))
    step_world.advance(ref)
    step_world.send("numbers", ("b", 2))

    def feeding(function: Any) -> Application:
        app = Application("app")
        app.input_stream("lake.numbers").map(function).send_to(app.table(ref))
        return app

    wider = feeding(lambda frame: frame.withColumn("v", frame["v"].cast("bigint")))
    with pytest.raises(
        PlanningError,
        match=r"dataset 'ref' would not accept .*: v is bigint, was int, .* of the key",
    ):
        step_world.run(wider)
    assert step_world.state(wider).open is None
    step_world.run(feeding(lambda frame: frame))
    step_world.advance(ref)
    assert entries(step_world, ref) == [("a", 1), ("b", 2)]

"""Datasets that an application feeds: their stream stays as it is, however the dataset's buckets are spread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import PlanningError
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark

SPREADS: dict[str, dict[str, Any]] = {
    "as the stream": {"key": "k", "partitions": 4},
    "other buckets": {"key": "k", "partitions": 8},
    "another key": {"key": "v", "partitions": 4},
    "a longer key": {"key": ["k", "v"], "partitions": 4},
    "a part of the key": {"key": ["k", "v"], "partition_by": "v", "partitions": 3},
    "broadcast": {"key": "k", "broadcast": True},
}


def entries(world: StepWorld, dataset: AdjunctDataset) -> list[tuple[Any, ...]]:
    frame = StoredVersions(world.lake, dataset).require_current().frame(world.spark())
    return sorted((row["k"], row["v"]) for row in frame.collect())


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
@pytest.mark.parametrize("stream_key", ["k", ()], ids=["keyed", "keyless"])
def test_a_fed_dataset_is_spread_as_it_is_declared_and_its_stream_as_it_was_made(
    step_world: StepWorld, spread: Mapping[str, Any], stream_key: Any
) -> None:
    step_world.stream("numbers", "k", 4, k="string", v="int")
    step_world.stream("ref", stream_key, 4 if stream_key else 1, k="string", v="int")
    before = step_world.streams.info("ref")
    ref = unbounded_dataset("ref", input="lake.ref", **spread)
    app = Application("app")
    app.input_stream("lake.numbers").send_to(app.table(ref))
    sent = [(f"k{number}", number) for number in range(20)]
    step_world.send("numbers", *sent)
    step_world.run(app)
    step_world.advance(ref)
    assert entries(step_world, ref) == sorted(sent)
    step_world.send("numbers", ("more", 20))
    step_world.run(app)
    step_world.advance(ref)
    assert entries(step_world, ref) == sorted([*sent, ("more", 20)])
    assert step_world.streams.info("ref") == before


def test_a_stream_without_a_key_holds_the_order_of_a_fed_dataset_s_records(step_world: StepWorld) -> None:
    step_world.stream("numbers", "k", 4, k="string", v="int")
    step_world.stream("ref", (), 1, k="string", v="int")
    ref = unbounded_dataset("ref", input="lake.ref", key="k", partitions=2)
    app = Application("app")
    app.input_stream("lake.numbers").send_to(app.table(ref))
    step_world.send("numbers", *[(f"k{number % 5}", number) for number in range(50)])
    step_world.run(app)
    step_world.advance(ref)
    assert entries(step_world, ref) == [(f"k{number}", 45 + number) for number in range(5)]


def test_the_mend_of_a_conflict_in_place_runs(step_world: StepWorld) -> None:
    """A join needs the dataset in 8 buckets, as planning says; the stream that feeds it keeps its 4 partitions."""
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
    assert sorted((row["k"], row["v"], row["w"]) for row in step_world.rows("out")) == [("a", 10, 1), ("b", 20, 2)]
    assert step_world.streams.info("ref").partitions == 4


def test_a_key_that_a_function_widens_is_refused_before_a_batch_and_the_dataset_goes_on(step_world: StepWorld) -> None:
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
    with pytest.raises(PlanningError, match="dataset 'ref' can't take .*: v is bigint, was int, .* of the key"):
        step_world.run(wider)
    assert step_world.state(wider).open is None
    step_world.run(feeding(lambda frame: frame))
    step_world.advance(ref)
    assert entries(step_world, ref) == [("a", 1), ("b", 2)]

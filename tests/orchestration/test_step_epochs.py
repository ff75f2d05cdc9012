"""Epochs through an application: what a replay writes carries its epoch, and so does what is
made of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.batch import run_batch
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.streams.system import META, SystemStreamPartition
from tests.orchestration.step_world import StepWorld, batch_inputs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark


def replay(world: StepWorld, app: Application, batch: int, epochs: dict[int, int]) -> None:
    """Run one batch over all of the application's one input, its partitions at these epochs."""
    (stream,) = app.inputs
    ssps = world.streams.partitions(stream.partition(".")[2])
    given = {ssp: epochs[ssp.partition] for ssp in ssps if ssp.partition in epochs}
    views = {
        dataset.name: StoredVersions(world.lake, dataset).require_current()
        for dataset in app.datasets
    }
    ranges = world.streams.all_ranges(stream.partition(".")[2])
    run_batch(
        world.context(app),
        batch_inputs(batch, ranges, views, given),
        lambda output, look=lambda: None: look(),
    )


def values_and_epochs(world: StepWorld, stream: str) -> list[tuple[int, int]]:
    """Return (value, epoch) of a stream's records, by partition and offset."""
    table = world.streams.read_arrow(world.streams.all_ranges(stream))
    return list(
        zip(table.column("v").to_pylist(), table.column("__epoch").to_pylist(), strict=True)
    )


def partition_of(world: StepWorld, stream: str) -> dict[int, int]:
    table = world.streams.read_arrow(world.streams.all_ranges(stream))
    return dict(
        zip(table.column("v").to_pylist(), table.column("__partition").to_pylist(), strict=True)
    )


def test_outputs_carry_the_sum_of_epochs_along_a_chain_of_applications(
    step_world: StepWorld,
) -> None:
    step_world.stream("numbers", "k", 4, k="string", v="int")
    step_world.send("numbers", *[(f"k{i}", i) for i in range(12)])
    at = partition_of(step_world, "numbers")
    first, second = Application("first", few_records=0), Application("second", few_records=0)
    doubled = first.output_stream("lake.doubled", partitions=2, key="k")
    first.input_stream("lake.numbers").map("k", "v + 100 as v").partition_by("k").send_to(doubled)
    second.input_stream("lake.doubled").filter("v >= 0").send_to(
        second.output_stream("lake.end", partitions=2, key="k")
    )

    replay(step_world, first, 1, {})
    replay(step_world, first, 2, {1: 3, 3: 1})
    epochs = {v: {1: 3, 3: 1}.get(p, 0) for v, p in at.items()}
    assert sorted(values_and_epochs(step_world, "doubled")) == sorted(
        [(v + 100, 0) for v in at] + [(v + 100, epoch) for v, epoch in epochs.items()]
    )
    replay(step_world, second, 1, {})
    assert values_and_epochs(step_world, "end") == values_and_epochs(step_world, "doubled")
    replay(step_world, second, 2, {0: 5, 1: 5})
    assert sorted(values_and_epochs(step_world, "end")) == sorted(
        values_and_epochs(step_world, "doubled")
        + [(v, epoch + 5) for v, epoch in values_and_epochs(step_world, "doubled")]
    )


def test_joins_keep_the_record_s_epoch_and_entries_have_none(step_world: StepWorld) -> None:
    planes = bounded_dataset("planes", input="lake.planes", key="k", partitions=2)
    weather = unbounded_dataset("weather", input="lake.weather", key="k", partitions=2)
    for stream, columns in (
        ("planes", {"seats": "int"}),
        ("weather", {"temp": "int"}),
        ("trips", {"v": "int"}),
    ):
        step_world.stream(stream, "k", 2, k="string", **columns)
    for sequence, (stream, column) in enumerate(
        (("planes", "seats"), ("weather", "temp")), start=1
    ):
        table = pa.table(
            {
                "k": ["a", "b"],
                column: pa.array([1, 2], pa.int32()),
                "__epoch": pa.array([8, 9], pa.int32()),
            }
        )
        ended = "v1" if stream == "planes" else None
        step_world.streams.append(
            stream, table, producer="test", sequence=sequence, end_of_dataset=ended
        )
    step_world.send("trips", ("a", 1), ("b", 2))
    step_world.advance(planes, weather)
    app = Application("app", few_records=0)
    out = app.output_stream("lake.out", partitions=2, key="k")
    trips = app.input_stream("lake.trips").join(app.table(planes), on="k", select=["seats"])
    trips.join(app.table(weather), on="k", select=["temp"]).send_to(out)
    replay(step_world, app, 1, {0: 2, 1: 2})
    assert sorted(values_and_epochs(step_world, "out")) == [(1, 2), (2, 2)]
    for dataset in (planes, weather):
        view = StoredVersions(step_world.lake, dataset).require_current()
        assert "__epoch" not in view.frame(step_world.spark()).columns
        assert all("__epoch" not in file for file in view.sealed.layout.columns)


def test_a_function_that_loses_the_epoch_is_refused(step_world: StepWorld) -> None:
    def without(frame: DataFrame) -> DataFrame:
        return frame.select("k", "v", *META)

    step_world.stream("numbers", "k", 2, k="string", v="int")
    step_world.send("numbers", ("a", 1))
    app = Application("app", few_records=0)
    app.input_stream("lake.numbers").map(without).send_to(
        app.output_stream("lake.out", partitions=2, key="k")
    )
    with pytest.raises(
        PlanningError, match="without __epoch, which hold each record's position and epoch"
    ):
        step_world.run(app)


def test_an_epoch_of_a_partition_that_the_batch_does_not_read_adds_nothing(
    step_world: StepWorld,
) -> None:
    step_world.stream("numbers", "k", 2, k="string", v="int")
    step_world.send("numbers", ("a", 1), ("b", 2), ("c", 3))
    app = Application("app", few_records=0)
    app.input_stream("lake.numbers").send_to(app.output_stream("lake.out", partitions=2, key="k"))
    other = {SystemStreamPartition("lake", "other", 0): 4}
    ranges = step_world.streams.all_ranges("numbers")
    run_batch(
        step_world.context(app),
        batch_inputs(1, ranges, {}, other),
        lambda output, look=lambda: None: look(),
    )
    assert {epoch for _, epoch in values_and_epochs(step_world, "out")} == {0}

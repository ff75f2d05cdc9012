"""The step decides and commits; what a batch does is the engine's that is handed in, and Spark's
unless one is.
"""

from __future__ import annotations

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.step import run_step
from tests.orchestration.offsets.offsets_world import OffsetsWorld, two_partitions


@pytest.fixture
def app() -> Application:
    app = Application("app", max_batch_records=2)
    app.input_stream("fake.s", default_offset="oldest")
    return app


def test_an_engine_is_asked_once_a_run_what_batches_will_do_and_runs_each(app: Application) -> None:
    world, asked = two_partitions(), list[object]()
    world.output.rehearsed = lambda: asked.append("rehearsed")
    world.output.before = lambda batch: asked.append(batch.number)
    assert world.run(app).batches == 3
    assert asked == ["rehearsed", 1, 2, 3]


def test_a_batch_that_its_engine_refuses_is_not_begun(app: Application) -> None:
    def refuses() -> None:
        raise ValueError("no such column")

    world = two_partitions()
    world.output.rehearsed = refuses
    with pytest.raises(ValueError, match="no such column"):
        world.run(app)
    assert (world.state(app).open, world.state(app).batch) == (None, 0)


def test_batches_are_computed_by_spark_unless_an_engine_is_handed_in(app: Application) -> None:
    world: OffsetsWorld = two_partitions()
    with pytest.raises(AssertionError, match="nothing here starts Spark"):
        run_step(world.context(app))
    assert (world.state(app).open, world.output.batches) == (None, {})

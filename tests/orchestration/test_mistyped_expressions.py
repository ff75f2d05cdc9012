"""A mistake in an expression or a function is told with its operator, before a batch is begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct import Application, application_state
from dagster_adjunct.errors import PlanningError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tests.orchestration.step_world import StepWorld


def nowhere(frame: DataFrame) -> DataFrame:
    return frame.withColumn("more", frame["nowhere"])


@pytest.mark.spark
@pytest.mark.parametrize(
    ("describe", "said"),
    [
        (lambda stream: stream.filter("vv > 1"), "filter-2: .*`vv`"),
        (lambda stream: stream.filter("v >"), "filter-2: .*end of input"),
        (lambda stream: stream.map("k", "v * nowhere as w"), "map-2: .*`nowhere`"),
        (lambda stream: stream.map(nowhere), "map-2: .*`?nowhere`?"),
    ],
)
def test_a_mistyped_column_is_told_with_its_operator_and_leaves_no_batch(
    step_world: StepWorld, describe: Callable[[Any], Any], said: str
) -> None:
    step_world.stream("numbers", "k", 2, k="string", v="int")
    step_world.send("numbers", ("a", 1))
    app = Application("app")
    describe(app.input_stream("lake.numbers")).send_to(app.output_stream("lake.out", partitions=2, key="k"))
    with pytest.raises(PlanningError, match=said) as caught:
        step_world.run(app)
    assert "Relation" not in str(caught.value)
    assert "\n" not in caught.value.problem
    assert application_state(step_world.lake, "app").open is None

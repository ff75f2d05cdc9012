"""A user's function is called once for each record, whatever reads its results behind a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct.orchestration.application.application import Application
from tests.orchestration.step_world import StepWorld

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.application.message_stream import MessageStream

pytestmark = [pytest.mark.spark, pytest.mark.one_engine]


def counting(calls: Path) -> Callable[[DataFrame], DataFrame]:
    """Return a function that adds a line for each record that it is called with."""

    def function(frame: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        def noted(value: int) -> int:
            with calls.open("a", encoding="utf-8") as lines:
                lines.write(f"{value}\n")
            return value

        return frame.withColumn("v", F.udf(noted, "int")("v"))

    return function


@pytest.mark.parametrize("behind", ["a filter", "an output and a table"])
def test_a_function_behind_a_table_is_called_once_for_each_record(
    step_world: StepWorld, tmp_path: Path, behind: str
) -> None:
    step_world.stream("s", "k", 2, k="string", v="int")
    step_world.send("s", *[(f"k{number}", number) for number in range(10)])
    app = Application("app")
    sent = (
        app.input_stream("lake.s").map("*", "v as w").send_to(app.table(step_world.table("before")))
    )
    mapped: MessageStream = sent.map(counting(tmp_path / "calls"), keeps_partitioning=True)
    out = app.output_stream("lake.out", partitions=2, key="k")
    if behind == "a filter":
        mapped.filter("v > 2").send_to(out)
    else:
        mapped.send_to(out)
        mapped.filter("v > 2").send_to(app.table(step_world.table("after")))
    step_world.run(app)
    assert sorted(map(int, (tmp_path / "calls").read_text().split())) == list(range(10))
    assert len(step_world.rows("out")) == (7 if behind == "a filter" else 10)

"""Records that something makes of one, without an order among them, are refused where each has to be kept."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame, functions

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import SchemaMismatchError
from tests.orchestration.meeting_streams import create, seconds
from tests.orchestration.seen_times import at
from tests.orchestration.step_world import StepWorld


def exploded(frame: DataFrame) -> DataFrame:
    return frame.withColumn("n", functions.explode(functions.array("n", functions.expr("n + 1"))))


@pytest.mark.spark
def test_exploded_records_of_one_position_are_not_kept_as_one(step_world: StepWorld) -> None:
    create(step_world)
    app = Application("app")
    orders, payments = (
        app.input_stream(f"lake.{name}", default_offset="oldest", event_time="ts", delay=seconds(1))
        for name in ("orders", "payments")
    )
    doubled = orders.map(exploded, keeps_partitioning=True)
    doubled.join_stream(payments, on={"k": "order_key"}, within=seconds(5), name="met", select=["ts as paid"]).send_to(
        app.output_stream("lake.met", partitions=2, key="k")
    )
    step_world.send("orders", ("a", 1, at(1)))
    step_world.send("payments", ("a", 1, at(2)))
    with pytest.raises(SchemaMismatchError, match=r"state 'app-met-left': 1 record\(s\) of the batch .* another one"):
        step_world.run(app)

"""Records at one position: several that something makes of one are refused, those of a stream
made anew are others.
"""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, functions

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.maintenance.delete import delete_stream
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.streams.startpoint import StartpointOldest
from dagster_adjunct.windows import Aggregate, Count, Session
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
    doubled.join_stream(
        payments, on={"k": "order_key"}, within=seconds(5), name="met", select=["ts as paid"]
    ).send_to(app.output_stream("lake.met", partitions=2, key="k"))
    step_world.send("orders", ("a", 1, at(1)))
    step_world.send("payments", ("a", 1, at(2)))
    with pytest.raises(SchemaMismatchError, match=r"1 record\(s\) of the batch") as caught:
        step_world.run(app)
    assert caught.value.dataset == "app-met-left"


def joined(records: pa.Table) -> str:
    return "".join(sorted(records.column("letter").to_pylist()))


@pytest.mark.spark
def test_records_of_a_stream_that_was_recreated_are_others_at_the_same_positions(
    step_world: StepWorld,
) -> None:
    def made(*letters: tuple[str, int]) -> None:
        step_world.stream("letters", "k", 1, k="string", letter="string", ts="timestamp")
        step_world.send("letters", *[("a", letter, at(second)) for letter, second in letters])

    app = Application("app")
    letters = app.input_stream(
        "lake.letters", default_offset="oldest", event_time="ts", delay=seconds(0)
    )
    read = {"all": Aggregate(joined, "string", "letter"), "n": Count()}
    letters.window(Session(seconds(60)), by="k", name="w", aggregates=read).send_to(
        app.output_stream("lake.words", partitions=1, key="k")
    )
    made(("x", 1), ("y", 2))
    step_world.run(app)
    delete_stream(step_world.lake, "letters", reason="it begins anew", by="test", force=True)
    step_world.sequences.pop("letters")
    made(("p", 3), ("q", 4), ("z", 100))
    Startpoints(app, lake=step_world.lake).request(
        "lake.letters", StartpointOldest(), by="test", reason="it began anew"
    )
    step_world.run(app)
    assert [(row["all"], row["n"]) for row in step_world.rows("words")] == [("pqxy", 4)]

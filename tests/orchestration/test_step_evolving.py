"""An application whose outputs get other columns from one deployment to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import PlanningError, ProducerConflictError, StreamExistsError
from dagster_adjunct.resources.schemas.schema import Schema
from tests.faulty_store import Crash
from tests.orchestration.step_world import StepWorld, crash_at

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("either_engine")]


def sending(*expressions: str, hidden: Callable[[Any], Any] | None = None) -> Application:
    app = Application("app")
    stream = app.input_stream("lake.s")
    stream = stream.map(hidden) if hidden else stream
    out = stream.map(*expressions).send_to(app.output_stream("lake.out", partitions=2, key="k"))
    out.map("k", "v").send_to(app.output_stream("lake.on", partitions=2, key="k"))
    return app


def numbers(world: StepWorld) -> None:
    world.stream("s", "k", 2, k="string", v="int")
    world.send("s", ("a", 1), ("b", 2))


def out(world: StepWorld) -> list[tuple[Any, ...]]:
    """The output by Spark, which must be what Arrow reads."""
    streams = world.streams
    rows = sorted((row["k"], row["v"], row.get("w")) for row in world.rows("out"))
    frame = streams.read(world.spark(), streams.all_ranges("out"))
    assert rows == sorted(
        (r["k"], r["v"], r["w"] if "w" in frame.columns else None) for r in frame.collect()
    )
    return rows


def test_an_added_and_a_widened_column_are_taken_and_a_batch_of_before_is_ended(
    step_world: StepWorld,
) -> None:
    numbers(step_world)
    step_world.run(sending("k", "v"))
    step_world.send("s", ("c", 3))
    with pytest.raises(Crash):  # everything is written, nothing committed
        step_world.run(sending("k", "v"), on_event=crash_at("outputs"))
    now = sending("k", "v * 2L div 2L as v", "upper(k) as w")
    report = step_world.run(now)
    assert report.counters["lake.out"] == {"rows": 1, "duplicate_batches": 1}
    assert out(step_world) == [("a", 1, None), ("b", 2, None), ("c", 3, None)]
    step_world.send("s", ("d", 4))
    step_world.run(now)
    assert out(step_world)[3:] == [("d", 4, "D")]
    assert [row["v"] for row in sorted(step_world.rows("on"), key=lambda row: row["k"])] == [
        1,
        2,
        3,
        4,
    ]
    schema = step_world.streams.info("out").schema
    assert schema is not None
    assert [(f.name, f.type) for f in schema.fields] == [
        ("k", "string"),
        ("v", "bigint"),
        ("w", "string"),
    ]
    with pytest.raises(PlanningError, match=r"w \(string\) is removed"):
        step_world.run(sending("k", "cast(v as bigint) as v"))


def test_a_batch_of_before_whose_records_would_change_is_a_conflict(step_world: StepWorld) -> None:
    numbers(step_world)
    with pytest.raises(Crash):
        step_world.run(sending("k", "v"), on_event=crash_at("outputs"))
    with pytest.raises(ProducerConflictError):
        step_world.run(sending("k", "v + 1L as v", "1 as w"))
    step_world.run(sending("k", "v", "1 as w"))
    assert out(step_world) == [("a", 1, None), ("b", 2, None)]


def changing(*expressions: str, **changes: Any) -> Application:
    app = Application("app")
    stream = app.input_stream("lake.s")
    out = app.output_stream("lake.out", partitions=2, key="k", **changes)
    stream.map(*expressions).send_to(out)
    return app


def named(world: StepWorld, *names: str) -> list[tuple[Any, ...]]:
    """The output by both readers, with exactly these columns."""
    streams = world.streams
    assert streams.info("out").schema.names == names
    rows = sorted(tuple(row[name] for name in names) for row in world.rows("out"))
    frame = streams.read(world.spark(), streams.all_ranges("out"))
    assert rows == sorted(tuple(row[name] for name in names) for row in frame.collect())
    return rows


def test_declared_renames_and_removals_change_the_stream_once(step_world: StepWorld) -> None:
    numbers(step_world)
    step_world.run(changing("k", "v", "upper(k) as w"))
    step_world.send("s", ("c", 3))
    now = changing("k", "v as n", renamed={"v": "n"}, drop=["w"])
    step_world.run(now)
    assert named(step_world, "k", "n") == [("a", 1), ("b", 2), ("c", 3)]
    commit = step_world.streams.log("out").current().number
    step_world.send("s", ("d", 4))
    step_world.run(now)
    assert named(step_world, "k", "n")[3:] == [("d", 4)]
    assert step_world.streams.log("out").current().number == commit + 1
    step_world.send("s", ("e", 5))
    step_world.run(changing("k", "v as n", "v > 4 as w", renamed={"v": "n"}))
    nulls = [("a", 1, None), ("b", 2, None), ("c", 3, None), ("d", 4, None)]
    assert named(step_world, "k", "n", "w") == [*nulls, ("e", 5, True)]


def test_a_batch_of_before_a_rename_and_a_removal_is_ended(step_world: StepWorld) -> None:
    numbers(step_world)
    step_world.run(changing("k", "v", "upper(k) as w"))
    step_world.send("s", ("c", 3))
    with pytest.raises(Crash):  # everything is written, nothing committed
        step_world.run(changing("k", "v", "upper(k) as w"), on_event=crash_at("outputs"))
    report = step_world.run(changing("k", "v as n", renamed={"v": "n"}, drop="w"))
    assert report.counters["lake.out"] == {"rows": 1, "duplicate_batches": 1}
    assert named(step_world, "k", "n") == [("a", 1), ("b", 2), ("c", 3)]


def test_a_rename_does_not_hide_that_a_repeated_batch_has_other_values(
    step_world: StepWorld,
) -> None:
    numbers(step_world)
    with pytest.raises(Crash):
        step_world.run(changing("k", "v"), on_event=crash_at("outputs"))
    with pytest.raises(ProducerConflictError):
        step_world.run(changing("k", "v + 1 as n", renamed={"v": "n"}))
    step_world.run(changing("k", "v as n", renamed={"v": "n"}))
    assert named(step_world, "k", "n") == [("a", 1), ("b", 2)]


def test_who_reads_a_renamed_or_dropped_column_is_told_what_became_of_it(
    step_world: StepWorld,
) -> None:
    numbers(step_world)
    step_world.run(changing("k", "v", "upper(k) as w"))
    step_world.streams.change_columns("out", renamed={"v": "n"}, drop=["w"])
    for column, became in (("v", "renamed to n"), ("w", "dropped")):
        reader = Application("reader")
        read = reader.input_stream("lake.out").map("k", f"{column} as x")
        read.send_to(reader.output_stream("lake.read", partitions=2, key="k"))
        with pytest.raises(PlanningError) as caught:
            step_world.run(reader)
        assert caught.value.column == column
        assert f"{column} was {became}" in caught.value.problem


def test_what_only_spark_knows_is_refused_before_a_batch_is_begun(step_world: StepWorld) -> None:
    numbers(step_world)
    step_world.run(sending("k", "v"))
    step_world.send("s", ("c", 3))
    received: list[str] = []
    with pytest.raises(StreamExistsError, match="v is string, was int") as caught:
        step_world.run(
            sending("k", "concat(v, 'x') as v"), on_event=lambda event: received.append(event.what)
        )
    assert (caught.value.operator, caught.value.stream) == ("send-to-3", "lake.out")
    with pytest.raises(StreamExistsError, match=r"v \(int\) is renamed to V") as caught:
        step_world.run(sending("*", hidden=lambda frame: frame.withColumnRenamed("v", "V")))
    assert (caught.value.operator, caught.value.stream) == ("send-to-4", "lake.out")
    assert "intent" not in received
    state = step_world.state(sending("k", "v"))
    assert (state.open, state.batch) == (None, 1)
    assert "c" not in [row[0] for row in out(step_world)]


def test_columns_that_an_input_gets_between_batches_are_looked_at_before_the_next(
    step_world: StepWorld,
) -> None:
    """The second batch reads a column that the join's dataset brings, too."""
    step_world.stream("planes", "k", 2, k="string", w="int")
    step_world.send("planes", ("a", 1), version="v1")
    planes = bounded_dataset("planes", input="lake.planes", key="k", partitions=2)
    numbers(step_world)
    app = Application("app", max_batch_records=2)
    joined = (
        app.input_stream("lake.s")
        .map(lambda frame: frame, keeps_partitioning=True)
        .join(app.table(planes), on="k")
    )
    joined.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    step_world.advance(planes)
    context = step_world.context(app)

    def widened(event: StepEvent) -> None:
        if event.what == "batch":
            step_world.streams.create(
                "s", schema=Schema.of(k="string", v="int", w="int"), key=["k"], partitions=2
            )
            step_world.send("s", ("c", 3, 4))

    with pytest.raises(PlanningError) as caught:
        run_step(replace(context, hooks=replace(context.hooks, on_event=widened)))
    assert (caught.value.operator, caught.value.dataset, caught.value.column) == (
        "join-3-planes",
        "planes",
        "w",
    )
    state = step_world.state(app)
    assert (state.open, state.batch) == (None, 1)

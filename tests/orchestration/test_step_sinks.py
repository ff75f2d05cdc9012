"""Records handed to functions of the user's: what they are called with, what flows on, and what
a repeat calls.
"""

from __future__ import annotations

import json
import re
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dagster_adjunct import SinkContext
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.calls import SinkFunction
from dagster_adjunct.orchestration.step.recorded_answers import cast_result
from dagster_adjunct.resources.errors import ConfigurationError, OperatorFailedError
from dagster_adjunct.resources.schemas.schema import Schema
from tests.faulty_store import Fault
from tests.orchestration.step_world import StepWorld

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("either_engine")]

SCORES = Schema.of(k="string", score="bigint")
ROWS = [(f"k{i}", i) for i in range(12)]


def noting(folder: Path, factor: int = 0) -> SinkFunction:
    """Return a function that notes each call in a file of its own, and gives `factor` times v as
    the score, if any.
    """

    def note(records: pa.RecordBatch, context: SinkContext) -> pa.Table | None:
        call = {
            "context": [context.application, context.batch, context.partition, context.call],
            "rows": records.select(["k", "v"]).to_pylist(),
            "offsets": records["__offset"].to_pylist(),
        }
        number = len(list(folder.iterdir()))
        (folder / f"{context.partition}-{context.call}-{number}.json").write_text(json.dumps(call))
        if not factor:
            return None
        return pa.table({"score": pc.multiply(records["v"], factor), "k": records["k"]})

    return note


def calls(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


def numbers(world: StepWorld) -> Path:
    world.stream("numbers", "k", 2, k="string", v="int")
    world.send("numbers", *ROWS)
    folder = world.folder / "calls"
    folder.mkdir()
    return folder


def scored(function: SinkFunction, *, keeps: bool = False, returns: Schema = SCORES) -> Application:
    app = Application("app")
    scores = app.input_stream("lake.numbers").sink(
        function, returns=returns, keeps_partitioning=keeps
    )
    scores.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    return app


def test_a_function_gets_each_partitions_records_in_order_computed_once(
    step_world: StepWorld,
) -> None:
    folder = numbers(step_world)
    app = Application("app")
    app.input_stream("lake.numbers").sink(noting(folder)).send_to(
        app.output_stream("lake.out", partitions=2, key="k")
    )
    report = step_world.run(app)
    noted = calls(folder)
    assert sorted((row["k"], row["v"]) for call in noted for row in call["rows"]) == sorted(ROWS)
    assert [call["context"] for call in noted] == [["app", 1, 0, 0], ["app", 1, 1, 0]]
    assert all(call["offsets"] == sorted(call["offsets"]) for call in noted)
    assert report.counters["sink-2"] == {"rows": 12, "calls": 2}
    assert sorted(row["k"] for row in step_world.rows("out")) == sorted(k for k, _ in ROWS)


@pytest.mark.parametrize("keeps", [True, False])
def test_results_that_are_declared_flow_on_in_place_of_the_records(
    step_world: StepWorld, keeps: bool
) -> None:
    folder = numbers(step_world)
    app = scored(noting(folder, 10), keeps=keeps)
    context = step_world.context(app)
    assert bool(context.plan.exchanges) is not keeps
    step_world.run(app)
    assert sorted((row["k"], row["score"]) for row in step_world.rows("out")) == sorted(
        (k, v * 10) for k, v in ROWS
    )
    by_partition = [
        {row["k"] for row in step_world.streams.read_arrow({ssp: span}).to_pylist()}
        for stream in ("numbers", "out")
        for ssp, span in sorted(step_world.streams.all_ranges(stream).items())
    ]
    assert by_partition[:2] == by_partition[2:]


def test_a_repeated_batch_reuses_the_recorded_results_without_calls(step_world: StepWorld) -> None:
    folder = numbers(step_world)
    at_its_output = Fault("put_if_absent", 1, "crash-before", below="streams/out/")
    step_world.killed_at(scored(noting(folder, 10)), at_its_output)
    assert len(calls(folder)) == 2
    report = step_world.run(scored(noting(folder, 99)))
    assert len(calls(folder)) == 2
    assert report.counters["sink-2"] == {"rows": 12, "calls": 0}
    assert sorted((row["k"], row["score"]) for row in step_world.rows("out")) == sorted(
        (k, v * 10) for k, v in ROWS
    )
    assert list(step_world.lake.store.list("applications/app/answers/")) == []


def test_what_was_not_recorded_is_called_again(step_world: StepWorld) -> None:
    folder = numbers(step_world)
    unrecorded = Fault("put_if_absent", 1, "crash-before", below="applications/app/answers/")
    step_world.killed_at(scored(noting(folder, 10)), unrecorded)
    step_world.run(scored(noting(folder, 20)))
    assert sorted(str(call["context"]) for call in calls(folder)) == [
        str(["app", 1, partition, 0]) for partition in (0, 0, 1, 1)
    ]
    assert {row["score"] for row in step_world.rows("out")} == {v * 20 for _, v in ROWS}


def other_columns(records: Any, context: SinkContext) -> Any:
    return records.select(["k", "v"])


def fails(records: Any, context: SinkContext) -> Any:
    raise ZeroDivisionError("over nothing")


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (None, "returned NoneType: expected a pyarrow Table"),
        (pa.table({"k": ["a"], "score": [1]}), "returned 1 rows for 2 records"),
        (pa.table({"k": ["a", "b"], "v": [1, 2]}), "returned the columns k, v: expected k, score"),
        (
            pa.table({"k": ["a", "b"], "score": ["x", "y"]}),
            "returned 'score' as string, which is no bigint",
        ),
    ],
)
def test_results_that_are_not_as_declared_are_reported_with_the_functions_name(
    result: Any, problem: str
) -> None:
    with pytest.raises(OperatorFailedError) as caught:
        cast_result("sink-2", "score()", result, 2, SCORES)
    assert caught.value.problem.startswith(f"sink-2: score() {problem}")


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (pa.array([datetime(2026, 1, 1)]), "expected a timestamp with a time zone"),
        (pa.array([1_767_225_600]), "expected a timestamp with a time zone"),
        (pa.array(["2026-01-01T00:00:00Z"]), "expected a timestamp with a time zone"),
        (
            pa.array([253_402_300_800], pa.int64()).cast(pa.timestamp("s", tz="UTC")),
            "years are 1 to 9999",
        ),
    ],
)
def test_results_that_name_no_moment_are_refused(returned: pa.Array, problem: str) -> None:
    seen = Schema.of(k="string", at="timestamp")
    with pytest.raises(OperatorFailedError) as caught:
        cast_result("sink-2", "seen()", pa.table({"k": ["a"], "at": returned}), 1, seen)
    assert caught.value.operator == "sink-2"
    assert problem in caught.value.problem
    good = pa.table({"k": ["a"], "at": pa.array([datetime(2026, 1, 1, tzinfo=UTC)])})
    assert cast_result("sink-2", "seen()", good, 1, seen)[1].to_pylist() == [
        datetime(2026, 1, 1, tzinfo=UTC)
    ]


def test_values_that_are_not_as_declared_are_not_reported_where_columns_are_sensitive() -> None:
    value = "x" * 9
    with pytest.raises(OperatorFailedError) as caught:
        cast_result(
            "sink-2",
            "score()",
            pa.table({"k": ["a"], "score": [value]}),
            1,
            SCORES,
            show_values=False,
        )
    assert value not in "".join(traceback.format_exception(caught.value))
    assert caught.value.problem == "sink-2: score() returned 'score' as string, which is no bigint."


def test_a_function_that_raises_fails_the_batch_and_is_reported_with_its_line(
    step_world: StepWorld,
) -> None:
    numbers(step_world)
    with pytest.raises(OperatorFailedError) as caught:
        step_world.run(scored(fails))
    error = caught.value
    assert (error.operator, error.file) == ("sink-2", __file__)
    assert "Batch 1" in error.next_step
    held = step_world.streams.read_arrow(step_world.streams.all_ranges("numbers")).to_pylist()
    (first,) = [
        row
        for row in held
        if (row["__partition"], str(row["__offset"])) == (error.partition, error.offset)
    ]
    assert error.record == f"{{k: {first['k']!r}, v: {first['v']}}}"
    assert re.search(
        rf"at lake\.numbers\.{error.partition} offset {error.offset}, for \d+ records from ",
        error.problem,
    )


def test_results_that_nobody_declared_are_refused(step_world: StepWorld) -> None:
    numbers(step_world)
    app = Application("app")
    app.input_stream("lake.numbers").sink(other_columns)
    with pytest.raises(OperatorFailedError, match="the sink declares no returns="):
        step_world.run(app)


def test_arguments_are_checked_where_they_are_given() -> None:
    stream = Application("app").input_stream("lake.numbers")
    for given, argument in (
        ({"function": "notify"}, "function"),
        ({"function": fails, "returns": {"k": "string"}}, "returns"),
        ({"function": fails, "keeps_partitioning": True}, "keeps_partitioning"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            stream.sink(**given)  # type: ignore[arg-type]
        assert refused.value.argument == argument

"""What a user can get wrong is told with its operator before a batch is begun: no mistake leaves
one open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct import Application, application_state, plan_application
from dagster_adjunct.errors import (
    ConfigurationError,
    OperatorFailedError,
    PlanningError,
    SchemaMismatchError,
    TableAccessError,
)
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.operation import UpdateContract
from dagster_adjunct.resources.tables.table import RemoteTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark


def nowhere(frame: DataFrame) -> DataFrame:
    return frame.withColumn("more", frame["nowhere"])


def needs_records(frame: DataFrame) -> DataFrame:
    return frame.filter(frame["v"] <= frame.agg({"v": "max"}).first()[0] + 0)  # type: ignore[index]


def unpicklable(frame: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    lock = threading.Lock()
    return frame.withColumn("free", F.udf(lambda v: not lock.locked(), "boolean")("v"))


def twice(frame: DataFrame) -> DataFrame:
    return frame.select("*", frame["v"].alias("V"))


def line_with(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


STREAMS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda stream: stream.filter("vv > 1"), "filter-2: .*vv"),
    (lambda stream: stream.filter("v >"), "filter-2: .*an operand is missing"),
    (lambda stream: stream.map("k", "v * nowhere as w"), "map-2: .*nowhere"),
    (lambda stream: stream.map(nowhere), "map-2: .*`?nowhere`?"),
    (
        lambda stream: stream.map(lambda frame: None),
        r"map-2: <lambda>\(\) returned None: expected a DataFrame",
    ),
    (
        lambda stream: stream.filter(lambda frame: frame["v"] > 1),
        "filter-2: .* returned Column: expected a DataFrame",
    ),
    (lambda stream: stream.map(twice), r"map-2: twice\(\) returned two columns called 'V'"),
    (
        lambda stream: stream.map(lambda frame: frame.select("k", "v")),
        "map-2: .* records without __partition",
    ),
    (lambda stream: stream.map(lambda frame: frame.drop("k")), "send-to-3: .*no column 'k'"),
    (
        lambda stream: stream.map("k", "timestamp_ntz'2026-01-31' as v"),
        "send-to-3: stream lake.out can't store .* column 'v' has type 'timestamp_ntz'",
    ),
]


@pytest.mark.parametrize(("describe", "message"), STREAMS)
def test_a_mistake_is_reported_with_its_operator_and_leaves_no_batch(
    step_world: StepWorld, describe: Callable[[Any], Any], message: str
) -> None:
    app = world_of(step_world)
    describe(app.input_stream("lake.numbers")).send_to(
        app.output_stream("lake.out", partitions=2, key="k")
    )
    with pytest.raises((PlanningError, SchemaMismatchError), match=message) as caught:
        step_world.run(app)
    assert "Relation" not in str(caught.value)
    assert "\n" not in caught.value.problem
    assert application_state(step_world.lake, "app").open is None


@pytest.mark.parametrize(
    "describe",
    [
        lambda stream: stream.filter("coalesce(v, k) > array(v)"),
        lambda stream: stream.map(lambda frame: frame).filter("v > array(v)"),
    ],
)
def test_types_that_planning_does_not_judge_are_refused_before_a_batch(
    step_world: StepWorld, describe: Callable[[Any], Any]
) -> None:
    app = world_of(step_world)
    describe(app.input_stream("lake.numbers")).send_to(
        app.output_stream("lake.out", partitions=2, key="k")
    )
    assert not any(
        "types" in note for note in plan_application(app, systems=step_world.systems).notes
    )
    with pytest.raises(PlanningError) as caught:
        step_world.run(app)
    assert caught.value.operator == app.operators[-2].id
    assert application_state(step_world.lake, "app").open is None


@pytest.mark.parametrize(
    ("function", "raised", "line"),
    [
        (needs_records, "TypeError", line_with('frame.agg({"v": "max"})')),
        (unpicklable, "PicklingError", line_with("lock.locked()")),
    ],
)
def test_a_function_that_fails_over_no_records_is_reported_with_its_line(
    step_world: StepWorld, function: Callable[[Any], Any], raised: str, line: int
) -> None:
    """The second output is looked at, too, before the first gets anything."""
    app = world_of(step_world)
    stream = app.input_stream("lake.numbers")
    stream.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    stream.map(function).send_to(app.output_stream("lake.more", partitions=2, key="k"))
    with pytest.raises(
        OperatorFailedError, match=rf"map-3: {function.__name__}\(\) raised {raised}: .*no records"
    ) as caught:
        step_world.run(app)
    assert (caught.value.operator, caught.value.file, caught.value.line) == (
        "map-3",
        __file__,
        line,
    )
    assert application_state(step_world.lake, "app").open is None
    assert "out" not in step_world.streams.list_streams()


def test_records_that_a_table_can_not_take_are_reported_before_a_batch(
    step_world: StepWorld, tmp_path: Path
) -> None:
    things = step_world.table()
    # which the error tells, too
    nowhere = SqliteTable(tmp_path / "send-to-table-2-absent.sqlite", "nothing", "k")
    absent = RemoteTable("absent", key="k", read_function=nowhere, write_function=nowhere)
    cases: list[tuple[Callable[[Any, Any], Any], type[Exception], str]] = [
        (
            lambda s, app: s.map(lambda f: f.drop("k")).send_to(app.table(things)),
            SchemaMismatchError,
            "^send-to-table-3-things: records for table things have no 'k'",
        ),
        (
            lambda s, app: s.map(lambda f: f).send_to(
                app.table(things), UpdateContract.UPDATE_ONLY
            ),
            SchemaMismatchError,
            "table things have no 'update'",
        ),
        (
            lambda s, app: s.send_to(app.table(absent)),
            TableAccessError,
            "^send-to-table-2-absent: ",
        ),
    ]
    world_of(step_world)
    for describe, kind, message in cases:
        app = Application("app")
        describe(app.input_stream("lake.numbers"), app)
        with pytest.raises(kind, match=message):
            step_world.run(app)
        assert application_state(step_world.lake, "app").open is None


UNFIT: list[tuple[str, str, str]] = [
    ("s", "named_struct('a', 1)", "'s' as string, and struct<a:int> is sent"),
    ("s", "map('a', 1)", "'s' as string, and map<string,int> is sent"),
    ("s", "split(k, ',')", "'s' as string, and array<string> is sent"),
    ("s", "interval 1 day", "'s' as string, and interval day is sent"),
    ("s", "to_timestamp_ntz(k)", "'s' as string, and timestamp_ntz is sent"),
    ("at", "to_timestamp_ntz(k)", "'at' as timestamp, and timestamp_ntz is sent"),
    ("tags", "map('a', 1)", "'tags' as array<string>, and .*map<string,int>.* is appended"),
    (
        "tags",
        "array(split(k, ','))",
        "'tags' as array<string>, and .*array<array<string>> is appended",
    ),
]


def test_types_that_no_column_takes_are_reported_before_a_batch(
    step_world: StepWorld, tmp_path: Path
) -> None:
    """Of what a function gives, Spark alone knows the types."""
    columns = {
        "k": "string",
        "s": "string",
        "at": "timestamp",
        "j": "json",
        "tags": "array<string>",
    }
    store = SqliteTable(tmp_path / "typed.sqlite", "typed", "k", columns=columns, create=True)
    typed = RemoteTable("typed", key="k", write_function=store)
    world_of(step_world)
    for column, expression, problem in UNFIT:
        app = Application("app")
        part = "append" if column == "tags" else "set"
        stream = app.input_stream("lake.numbers").map(partial(with_made, expression=expression))
        stream.update(app.table(typed), if_missing=[], **{part: {column: "made"}})  # type: ignore[arg-type]
        with pytest.raises(
            PlanningError, match=f"send-to-table-3-typed: table typed has the column {problem}"
        ):
            step_world.run(app)
        assert application_state(step_world.lake, "app").open is None
    app = Application("app")
    made = {"s": "null", "j": "named_struct('a', array(v))"}
    app.input_stream("lake.numbers").update(
        app.table(typed), set=made, append={"tags": "split(k, ',')"}, if_missing=[]
    )
    step_world.run(app)


def with_made(frame: DataFrame, expression: str) -> DataFrame:
    return frame.selectExpr("*", f"{expression} as made")


def world_of(world: StepWorld) -> Application:
    world.stream("numbers", "k", 2, k="string", v="int")
    world.send("numbers", ("a", 1))
    return Application("app")


def test_an_error_that_names_its_operator_is_reported_with_it_once(step_world: StepWorld) -> None:
    lock = threading.Lock()
    app = world_of(step_world)
    app.input_stream("lake.numbers").sink(lambda batch, context: lock.acquire()).send_to(
        app.output_stream("lake.out", partitions=2, key="k")
    )
    with pytest.raises(ConfigurationError) as reported:
        step_world.run(app)
    assert reported.value.argument == "function"
    assert reported.value.operator == "sink-2"

"""Adding an operator takes one file: those of these tests stand here alone, and are planned,
drawn, traced and run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.lineage import find_outputs
from dagster_adjunct.orchestration.code_location.metadata import output_columns
from dagster_adjunct.orchestration.operators.event_times import ARRIVAL
from dagster_adjunct.orchestration.operators.lookups import AsOf
from dagster_adjunct.orchestration.operators.operator import (
    Flow,
    Match,
    PassThroughSpec,
    PlanContext,
    Requirement,
    Spec,
)
from dagster_adjunct.orchestration.operators.sends import SendToStream
from dagster_adjunct.orchestration.operators.stream_facts import (
    AS_OF,
    CURRENT,
    SPARK,
    ColumnFacts,
    Columns,
    LineageNode,
    StreamFacts,
)
from dagster_adjunct.orchestration.operators.windows.aggregates import Aggregate, Count
from dagster_adjunct.orchestration.operators.windows.kinds import Tumbling
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.orchestration.startpoints.request import (
    StartpointRequest,
    choose_versions,
    find_as_of_joins,
)
from dagster_adjunct.orchestration.step.context import list_sensitive_columns
from dagster_adjunct.orchestration.step.planned_batch import sensitive_columns
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointUpcoming
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.orchestration.planner.planning import catalog
from tests.orchestration.step_world import StepWorld

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.batch import Batch, Frame, SparkBatch

PLANES = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=2)
TRIPS = Schema.of(tailnum="string", miles="int")
FACTS = [
    StreamFacts(f"lake.{name}", count, ("tailnum",), SPARK, TRIPS)
    for name, count in (("old", 2), ("new", 3))
]


@dataclass(frozen=True, slots=True)
class Sample(PassThroughSpec):
    """Every record whose `column` is a multiple of `n`."""

    kind: ClassVar[str] = "sample"
    column: str
    n: int

    def summary(self) -> str:
        return f"each {self.n}th {self.column}"

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        (frame,) = frames
        return frame.where(frame[self.column] % self.n == 0)


@dataclass(frozen=True, slots=True)
class Union(Spec):
    """The records of several inputs, which have the same columns."""

    kind: ClassVar[str] = "union"

    def summary(self) -> str:
        return "all records"

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        if len({columns.names for columns in arriving}) > 1:
            raise PlanningError(
                f"{context.operator}: its inputs have different columns.", "Map them to the same."
            )
        result = {
            name: ColumnFacts(
                column.type,
                tuple(source for made in arriving for source in made.known[name].sources),
            )
            for name, column in arriving[0].known.items()
        }
        return Columns(
            result, typed=all(columns.types == arriving[0].types for columns in arriving)
        )

    def flow(self, context: PlanContext, arriving: Sequence[Flow]) -> Flow:
        return arriving[0].lose_partitioning(context.operator)

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        return reduce(lambda left, right: left.unionByName(right), frames)


def united(**options: bool) -> Application:
    """Two streams, one of them sampled, together enriched and written."""
    app = Application("app", **options)
    old, new = app.input_stream("lake.old"), app.input_stream("lake.new")
    both = old.apply(Sample("miles", 2)).apply(Union(), new, name="trips")
    enriched = both.join(app.table(PLANES), on="tailnum", how="left", select=["seats"])
    enriched.map("tailnum", "miles * seats as seat_miles").send_to(
        app.output_stream("lake.out", partitions=2, key="tailnum")
    )
    return app


def test_it_is_planned_and_drawn_with_several_inputs() -> None:
    app = united(auto_repartition=True)
    planned = build_plan(
        app,
        catalog(
            *FACTS, StreamFacts("lake.planes", 1, schema=Schema.of(tailnum="string", seats="int"))
        ),
    )
    assert [operator.inputs for operator in planned.operators][2:4] == [
        ("input-1",),
        ("sample-3", "input-2"),
    ]
    assert planned.operator("union-4-trips").columns == ("tailnum", "miles")
    drawn = planned.render()
    assert "sample-3  [2 by tailnum]  each 2th miles" in drawn
    assert "union-4-trips  [2]  all records" in drawn
    assert "because its partitioning is unknown after union-4-trips" in drawn


def test_what_it_leaves_open_is_proven_by_nobody() -> None:
    with pytest.raises(PlanningError) as failure:
        build_plan(
            united(),
            catalog(replace(FACTS[0], partitions=2), replace(FACTS[1], partitions=2), planes=1),
        )
    assert failure.value.operator == "join-5-planes"
    assert failure.value.dataset == "planes"


def test_what_it_refuses_is_reported_with_its_id() -> None:
    other = replace(FACTS[1], schema=Schema.of(tailnum="string", km="int"))
    with pytest.raises(PlanningError) as failure:
        build_plan(united(), catalog(FACTS[0], other, planes=1))
    assert failure.value.operator == "union-4-trips"


def test_lineage_goes_through_all_its_inputs() -> None:
    app = Application("app")
    old, new = app.input_stream("lake.old"), app.input_stream("lake.new")
    old.apply(Union(), new).send_to(app.output_stream("lake.out", partitions=2, key="tailnum"))
    (output,) = find_outputs(app)
    assert output.upstream == (LineageNode("stream", "lake.old"), LineageNode("stream", "lake.new"))
    made = output_columns(app, build_plan(app, catalog(*FACTS)))[output.node]
    assert made["miles"] == (
        (LineageNode("stream", "lake.old"), "miles"),
        (LineageNode("stream", "lake.new"), "miles"),
    )


@dataclass(frozen=True, slots=True)
class Opaque(Sample):
    """Records with columns that nobody knows."""

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        return Columns(complete=False)


def test_an_operator_that_says_nothing_of_columns_leaves_their_lineage_open() -> None:
    app = Application("app")
    sampled = app.input_stream("lake.old").apply(Opaque("miles", 2))
    sampled.send_to(app.output_stream("lake.out", partitions=2, key="tailnum"))
    assert (
        output_columns(app, build_plan(app, catalog(FACTS[0]))).get(
            LineageNode("stream", "lake.out"), {}
        )
        == {}
    )


def test_records_are_written_and_looked_up_behind_one_input_only() -> None:
    app = Application("app")
    old, new = app.input_stream("lake.old"), app.input_stream("lake.new")
    app.output_stream("lake.out", partitions=2)
    with pytest.raises(PlanningError) as failure:
        old.apply(SendToStream("lake.out"), new)
    assert failure.value.operator == "send-to-3"


def test_inputs_are_of_one_application() -> None:
    with pytest.raises(PlanningError, match="was declared by application 'other'"):
        Application("app").input_stream("lake.old").apply(
            Union(), Application("other").input_stream("lake.new")
        )


@dataclass(frozen=True, slots=True)
class Asked(Sample):
    """Records with what somebody answers for them, in columns that a field of this operator's
    own tells.
    """

    answers: tuple[Schema, ...] = ()

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (columns,) = arriving
        for schema in self.answers:
            columns = columns.add(Columns.of_schema(schema, LineageNode("sink", "somebody")).known)
        return columns


def test_no_failure_quotes_what_an_operators_own_schema_marks_as_sensitive() -> None:
    app = Application("app")
    answers = Schema.of(ssn="string", rank="int").with_sensitive("ssn")
    app.input_stream("lake.old").apply(Asked("miles", 2, (answers,)), name="who").filter("rank > 1")
    context: Any = SimpleNamespace(
        app=app,
        plan=build_plan(app, catalog(FACTS[0])),
        sensitive=list_sensitive_columns(
            app, {"lake": SimpleNamespace(info=lambda stream: FACTS[0])}
        ),
    )
    columns = ["tailnum", "miles", "ssn", "rank"]
    for operator in ("sample-2-who", "filter-3"):
        assert sensitive_columns(context, operator, columns) == {"ssn"}
    assert sensitive_columns(context, "input-1", ["tailnum", "miles"]) == frozenset()


def test_no_failure_quotes_a_sensitive_column_that_was_renamed_and_sent_to_an_output() -> None:
    app = Application("app")
    answers = Schema.of(ssn="string", rank="int").with_sensitive("ssn")
    asked = app.input_stream("lake.old").apply(Asked("miles", 2, (answers,)))
    renamed = asked.map("tailnum", "ssn as id", "rank", "upper(id) as shout")
    renamed.send_to(app.output_stream("lake.out", partitions=2, key="tailnum")).filter("rank > 1")
    context: Any = SimpleNamespace(
        app=app,
        plan=build_plan(app, catalog(FACTS[0])),
        sensitive={(LineageNode("sink", "somebody"), "ssn")},
    )
    columns = ["tailnum", "id", "rank", "shout"]
    for operator in ("map-3", "send-to-4", "filter-5"):
        assert sensitive_columns(context, operator, columns) == {"id", "shout"}


def test_no_failure_quotes_a_merged_column_that_may_stem_from_a_sensitive_one() -> None:
    app = Application("app")
    trips = app.input_stream("lake.old")
    noted = trips.flat_map(
        lambda record: [record], schema=Schema.of(tailnum="string", note="string")
    )
    merged = noted.merge(trips.map("tailnum", "cast(miles as string) as note"))
    merged.map("tailnum", "upper(note) as shout")
    context: Any = SimpleNamespace(
        app=app,
        plan=build_plan(app, catalog(FACTS[0])),
        sensitive={(LineageNode("stream", "lake.old"), "ssn")},
    )
    assert sensitive_columns(context, "map-3", ["tailnum", "note"]) == frozenset()
    assert sensitive_columns(context, "merge-4", ["tailnum", "note"]) == {"tailnum", "note"}
    assert sensitive_columns(context, "map-5", ["tailnum", "shout"]) == {"tailnum", "shout"}


def test_no_failure_quotes_what_a_window_makes_of_a_column_that_may_be_sensitive() -> None:
    app = Application("app")
    noted = app.input_stream("lake.old", event_time="__timestamp").join(
        app.table(PLANES),
        on="tailnum",
        function=lambda record, entry: None,
        schema=Schema.of(note="string"),
    )
    made = {
        name: Aggregate(lambda records: None, returns="string", of=of)
        for name, of in {"one": ["miles"], "both": ["miles", "note"]}.items()
    }
    noted.window(Tumbling(timedelta(hours=1)), by="tailnum", name="trips", aggregates=made)
    planes = StreamFacts("lake.planes", 2, ("tailnum",), SPARK, TRIPS)
    context: Any = SimpleNamespace(
        app=app,
        plan=build_plan(app, catalog(FACTS[0], planes)),
        sensitive={(LineageNode("stream", "lake.old"), "ssn")},
    )
    assert sensitive_columns(context, "window-3-trips", ["tailnum", "one", "both"]) == {"both"}


@dataclass(frozen=True, slots=True)
class Timed(Sample):
    """Records that are looked up in a dataset as it was at the time in their `column`."""

    @property
    def match(self) -> Match:
        return Match("planes", as_of=AsOf(self.column, "null", "null"))


def test_a_replay_of_one_that_looks_up_by_time_meets_what_was_valid_then() -> None:
    timed, current = Application("app"), Application("app")
    timed.input_stream("lake.old").apply(Timed("miles", 2))
    current.input_stream("lake.old").apply(Sample("miles", 2))
    ssp = SystemStreamPartition("lake", "old", 0)
    request = StartpointRequest(
        ssp=ssp, startpoint=StartpointOldest(), by="ann", reason="again", until=StartpointUpcoming()
    )
    assert (choose_versions(timed, request), find_as_of_joins(timed)) == (AS_OF, ("sample-2",))
    assert (choose_versions(current, request), find_as_of_joins(current)) == (CURRENT, ())


@dataclass(frozen=True, slots=True)
class Latest(Sample):
    """What is known so far, again with each change."""

    @property
    def over_time(self) -> str:
        return "latest"

    @property
    def emits_updates(self) -> bool:
        return True


def test_who_gets_results_again_with_each_update_is_reported_so() -> None:
    app = Application("app")
    latest = app.input_stream("lake.old", event_time=ARRIVAL).apply(Latest("miles", 2))
    latest.window(
        Tumbling(timedelta(hours=1)), by="tailnum", name="trips", aggregates={"trips": Count()}
    )
    notes = "\n".join(build_plan(app, catalog(FACTS[0])).notes)
    assert "window-3-trips gets each update of a window of sample-2" in notes


class Loose(Spec):
    """An operator that is no dataclass, so that nobody sees what it holds."""

    kind: ClassVar[str] = "loose"

    def __init__(self, answers: Schema) -> None:
        self.answers = answers

    summary = Union.summary
    derive_columns = Sample.derive_columns
    flow = Sample.flow
    compile = Union.compile


class Told(Loose):
    """One that says itself which schemas it was given."""

    @property
    def declared_schemas(self) -> Sequence[Schema]:
        return (self.answers,)


@dataclass(frozen=True)
class Called(Sample):
    """One that can be called, as a function can, and holds a schema all the same."""

    answers: Schema

    def __call__(self) -> None:
        return None


def test_an_operator_whose_schemas_nobody_can_see_is_refused_unless_it_says_them() -> None:
    answers = Schema.of(tailnum="string")
    stream = Application("app").input_stream("lake.old")
    with pytest.raises(ConfigurationError) as failure:
        stream.apply(Loose(answers))
    assert failure.value.operator == "loose-2"
    assert failure.value.argument == "spec"
    reported = Told(answers)
    stream.apply(reported)
    assert reported.declared_schemas == (answers,)
    assert Called("miles", 2, answers).declared_schemas == (answers,)


def miles(first: int, count: int) -> list[tuple[str, int]]:
    return [(f"N{number % 5}", number) for number in range(first, first + count)]


@pytest.mark.spark
def test_it_runs_and_leaves_what_python_makes_of_the_same_records(step_world: StepWorld) -> None:
    step_world.stream("old", "tailnum", 2, tailnum="string", miles="int")
    step_world.stream("new", "tailnum", 3, tailnum="string", miles="int")
    step_world.stream("planes", "tailnum", 1, tailnum="string", seats="int")
    seats = {f"N{number}": 100 + number for number in range(4)}
    step_world.send("planes", *seats.items(), version="v1")
    app = united(auto_repartition=True)
    expected: list[tuple[str, int | None]] = []
    for first in (0, 100):
        old, new = miles(first, 20), miles(first + 50, 15)
        step_world.send("old", *old)
        step_world.send("new", *new)
        for tailnum, value in [*((t, v) for t, v in old if v % 2 == 0), *new]:
            expected.append((tailnum, value * seats[tailnum] if tailnum in seats else None))
        report = step_world.run(app)
        assert report.counters["join-5-planes"]["rows"] == 25
    rows = step_world.rows("out")
    assert set(rows[0]) == {"tailnum", "seat_miles"}  # what orders the inputs is not stored
    assert sorted((row["tailnum"], row["seat_miles"] or 0) for row in rows) == sorted(
        (t, v or 0) for t, v in expected
    )


@dataclass(frozen=True, slots=True)
class Alike(Union):
    """A union whose inputs have to lie alike; it notes which of them have been moved."""

    moved: list[list[bool]] = field(default_factory=list, compare=False)

    def requirements(self, app: Application) -> Sequence[Requirement | None]:
        return [Requirement(None, None, ("tailnum",))] * 2

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        plans = [frame._jdf.queryExecution().analyzed().toString() for frame in frames]
        self.moved.append(["RepartitionByExpression" in plan for plan in plans])
        return Union.compile(self, operator, frames, batch)


@pytest.mark.spark
def test_only_the_input_that_has_to_is_moved(step_world: StepWorld) -> None:
    step_world.stream("old", "tailnum", 2, tailnum="string", miles="int")
    step_world.stream("new", "tailnum", 3, tailnum="string", miles="int")
    step_world.send("old", *miles(0, 20))
    step_world.send("new", *miles(50, 15))
    app = Application("app", auto_repartition=True, few_records=0)
    alike = Alike()
    both = app.input_stream("lake.old").apply(alike, app.input_stream("lake.new"))
    both.send_to(app.output_stream("lake.out", partitions=2, key="tailnum"))
    step_world.run(app)
    assert {tuple(moved) for moved in alike.moved} == {(False, True)}
    rows = sorted((row["tailnum"], row["miles"]) for row in step_world.rows("out"))
    assert rows == sorted([*miles(0, 20), *miles(50, 15)])


@pytest.mark.spark
def test_branches_of_one_stream_come_together_again_behind_an_output(step_world: StepWorld) -> None:
    """Each record comes twice, by way of a stream and beside it, with positions in two streams."""
    step_world.stream("old", "tailnum", 2, tailnum="string", miles="int")
    step_world.send("old", *miles(0, 10))
    app = Application("app")
    old = app.input_stream("lake.old")
    kept = old.filter("miles >= 4").send_to(
        app.output_stream("lake.kept", partitions=2, key="tailnum")
    )
    kept.apply(Union(), old).send_to(app.output_stream("lake.out", partitions=3, key="tailnum"))
    step_world.run(app)
    assert sorted((row["tailnum"], row["miles"]) for row in step_world.rows("out")) == sorted(
        [*miles(0, 10), *(trip for trip in miles(0, 10) if trip[1] >= 4)]
    )


@dataclass(frozen=True, slots=True)
class AtLeast(PassThroughSpec):
    """Every record whose `column` is at least `n`; it only asks the batch, so any engine will
    do.
    """

    kind: ClassVar[str] = "at-least"
    column: str
    n: int

    def summary(self) -> str:
        return f"{self.column} from {self.n} on"

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        return ""

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        return batch.records.filter(frames[0], f"{self.column} >= {self.n}")


@pytest.mark.lengthy
def test_an_operator_that_only_asks_the_batch_is_computed_without_spark(tmp_path: Path) -> None:
    world = StepWorld(open_lake(tmp_path / "lake"), tmp_path, IN_PROCESS)
    world.stream("old", "tailnum", 2, tailnum="string", miles="int")
    world.send("old", *miles(0, 10))
    app = Application("app", engine="auto")
    kept = app.input_stream("lake.old").apply(AtLeast("miles", 4))
    kept.send_to(app.output_stream("lake.out", partitions=2, key="tailnum"))
    assert world.run(app).in_process_batches == 1
    rows = sorted((row["tailnum"], row["miles"]) for row in world.rows("out"))
    assert rows == sorted(trip for trip in miles(0, 10) if trip[1] >= 4)

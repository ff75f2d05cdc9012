"""What arrives at an operator is computed once, and only what is used is kept; without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest

from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.operator import PassThroughSpec, Requirement, Spec
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.step import spark_frames
from dagster_adjunct.orchestration.step.batch import SparkCompiler, SparkOpened
from dagster_adjunct.orchestration.step.context import StepContext
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch
from dagster_adjunct.orchestration.step.spark_frames import SparkFrames
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.orchestration.step_world import batch_inputs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.batch import SparkBatch


@pytest.fixture(autouse=True)
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_frames, "value_column", lambda names, name: name)


class Records:
    """Records that nobody computes, which note that they were kept, and what they were moved
    from.
    """

    columns = ("k", "n", "__partition", "__offset")

    def __init__(self, moved_from: Records | None = None) -> None:
        self.moved_from, self.kept = moved_from, 0

    def persist(self) -> Records:
        self.kept += 1
        return self

    def drop(self, *names: str) -> Records:
        assert not names
        return self

    def repartition(self, *to: object) -> Records:
        return Records(self)


@dataclass(frozen=True, slots=True)
class Written(PassThroughSpec):
    """Records written where `k` says, and going on from where they lay; notes what it is given
    to write.
    """

    kind: ClassVar[str] = "written"
    given: list[object] = field(default_factory=list, compare=False)

    def summary(self) -> str:
        return "somewhere"

    @property
    def writes(self) -> str:
        return "somewhere"

    def requirements(self, app: Application) -> Sequence[Requirement | None]:
        return [Requirement(None, 4, ("k",))]

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: SparkBatch) -> DataFrame:
        self.given.extend(frames)
        return frames[0]


@dataclass(frozen=True, slots=True)
class LeftOver(Written):
    """What the operator before has left out."""

    @property
    def reads_diverted(self) -> bool:
        return True

    def requirements(self, app: Application) -> Sequence[Requirement | None]:
        return ()


def compiler_of(folder: Path, first: Spec, *others: Spec) -> SparkCompiler:
    """Return what compiles a batch of an application of these operators, one after the other."""
    lake = open_lake(folder / "lake")
    streams = LakeStreams(lake)
    streams.create("records", schema=Schema.of(k="string", n="bigint"), key=["n"], partitions=2)
    app = Application("app", auto_repartition=True)
    stream = app.input_stream("lake.records").apply(first)
    for spec in others:
        stream = stream.apply(spec)
    plan = plan_application(app, systems={"lake": streams})
    runtime = Runtime(lake, {"lake": streams}, lambda: None, by="test")  # type: ignore[arg-type, return-value]
    context = StepContext(runtime, app, plan, FanOut())
    planned = PlannedBatch.of(context, batch_inputs(1, {}, {}))
    opened = SparkOpened.of(planned, ExitStack())
    frames = SparkFrames(planned, opened.times, opened.kept)
    parts: Any = SimpleNamespace(planned=planned, records=frames)
    return SparkCompiler(parts, opened.times)


def test_records_that_arrive_at_an_operator_are_computed_once(tmp_path: Path) -> None:
    written, entered = Written(), Records()
    compiler = compiler_of(tmp_path, written, LeftOver())
    planned = compiler.batch.planned
    assert [move.operator for move in planned.moves("written-2")] == ["written-2"]
    operator = planned.app.operator("written-2")
    leaving = cast("Any", compiler.compile(operator, [cast("Any", entered)]))
    (given,) = written.given
    assert isinstance(given, Records)
    assert given.moved_from is entered, "what is written has moved"
    assert leaving is entered, "what continues is where it was"
    assert compiler.arrived[operator.id] == [given]
    assert entered.kept == 1, "two read it: what is written, and what continues"


def test_records_that_do_not_continue_are_not_cached(tmp_path: Path) -> None:
    written, entered = Written(), Records()
    compiler = compiler_of(tmp_path, written)
    operator = compiler.batch.planned.app.operator("written-2")
    compiler.compile(operator, [cast("Any", entered)])
    assert entered.kept == 0


def test_an_operator_has_a_diverted_consumer_if_one_of_any_kind_reads_diverted(
    tmp_path: Path,
) -> None:
    taken = compiler_of(tmp_path / "taken", Written(), LeftOver()).batch.planned
    late = [taken.has_diverted_consumer(operator.id) for operator in taken.app.operators]
    assert late == [False, True, False]
    passed = compiler_of(tmp_path / "passed", Written(), Written()).batch.planned
    assert not any(passed.has_diverted_consumer(operator.id) for operator in passed.app.operators)

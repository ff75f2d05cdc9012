"""What arrives at an operator is computed once, and only what is used is kept; without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest

from dagster_adjunct.assets.writing.generation import Runtime
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.operator import PassThroughSpec, Requirement, Spec
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.step import batch as arriving_records
from dagster_adjunct.orchestration.step.batch import BatchContext
from dagster_adjunct.orchestration.step.context import StepContext
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.orchestration.step_world import batch_inputs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.step.batch import BatchContext


@pytest.fixture(autouse=True)
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving_records, "named_column", lambda name: name)


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

    def compile(self, operator: str, frames: Sequence[DataFrame], batch: BatchContext) -> DataFrame:
        self.given.extend(frames)
        return frames[0]


@dataclass(frozen=True, slots=True)
class LeftOver(Written):
    """What the operator before has left out."""

    @property
    def reads_late_records(self) -> bool:
        return True

    def requirements(self, app: Application) -> Sequence[Requirement | None]:
        return ()


def known_of(folder: Path, first: Spec, *others: Spec) -> BatchContext:
    """Return what is known of a batch of an application of these operators, one behind the
    other.
    """
    lake = open_lake(folder / "lake")
    streams = LakeStreams(lake)
    streams.create("records", schema=Schema.of(k="string", n="bigint"), key=["n"], partitions=2)
    app = Application("app", auto_repartition=True)
    stream = app.input_stream("lake.records").apply(first)
    for spec in others:
        stream = stream.apply(spec)
    plan = plan_application(app, systems={"lake": streams})
    runtime = Runtime(lake, {"lake": streams}, lambda: None, by="test")  # type: ignore[arg-type, return-value]
    return BatchContext(
        StepContext(runtime, app, plan, FanOut()),
        batch_inputs(1, {}, {}),
        lambda name, look=lambda: None: look(),
    )


def test_what_arrives_at_an_operator_is_computed_once(tmp_path: Path) -> None:
    written, entered = Written(), Records()
    known = known_of(tmp_path, written, LeftOver())
    assert [move.operator for move in known.moves("written-2")] == ["written-2"]
    operator = known.app.operator("written-2")
    leaving = cast("Any", known.compile_operator(operator, [cast("Any", entered)]))
    (given,) = written.given
    assert isinstance(given, Records)
    assert given.moved_from is entered, "what is written has moved"
    assert leaving is entered, "what goes on lies where it lay"
    assert known.arrived[operator.id] == [given]
    assert entered.kept == 1, "two read it: what is written, and what goes on"


def test_nothing_is_kept_of_records_that_do_not_go_on(tmp_path: Path) -> None:
    written, entered = Written(), Records()
    known = known_of(tmp_path, written)
    known.compile_operator(known.app.operator("written-2"), [cast("Any", entered)])
    assert entered.kept == 0


def test_what_an_operator_leaves_out_is_wanted_where_one_of_any_kind_takes_it(
    tmp_path: Path,
) -> None:
    taken = known_of(tmp_path / "taken", Written(), LeftOver())
    assert [taken.has_late_consumer(operator.id) for operator in taken.app.operators] == [
        False,
        True,
        False,
    ]
    passed = known_of(tmp_path / "passed", Written(), Written())
    assert not any(passed.has_late_consumer(operator.id) for operator in passed.app.operators)

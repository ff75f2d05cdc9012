"""Compiling a batch takes steps in proportion to its operators; Spark is not asked here, so that
only ours count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.step import dry_run as rehearsing
from dagster_adjunct.orchestration.step.batch import run_batch
from dagster_adjunct.orchestration.step.context import BatchInputs, StepContext
from dagster_adjunct.orchestration.step.dry_run import compare_plans
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.step_world import batch_inputs

Compiled = Callable[[StepContext, BatchInputs], None]


class Frame:
    """Records that nobody computes, and what Spark says of them: whatever is done to them, they
    stay as they are.
    """

    columns = ("k", "v", "__partition", "__offset", "__timestamp", "__tombstone", "__epoch")
    schema = StructType([StructField("k", StringType()), StructField("v", LongType())])

    def nodeName(self) -> str:
        return "Scan"

    def toString(self) -> str:
        return "UnknownPartitioning(0)"

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __index__(self) -> int:
        return 0


class UnreadStreams(LakeStreams):
    """Streams whose records nobody reads."""

    def read(self, *args: Any, **options: Any) -> Any:
        return Frame()


@pytest.fixture(autouse=True)
def without_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks are expressions of Spark's, which can't be made without a session."""
    monkeypatch.setattr(rehearsing, "mark_operator", lambda operator, frame: frame)


def run(context: StepContext, inputs: BatchInputs) -> None:
    run_batch(context, inputs, lambda name, look=lambda: None: look())


def rehearsed(context: StepContext, inputs: BatchInputs) -> None:
    compare_plans(context, inputs)


@pytest.mark.lengthy
@pytest.mark.parametrize("compiled", [run, rehearsed])
def test_twice_the_operators_take_twice_the_steps(tmp_path: Path, compiled: Compiled) -> None:
    few, many = (steps(tmp_path / str(count), compiled, count) for count in (40, 160))
    # 16 times as many, if each operator looked at all the others
    assert many / few < 5, (few, many)


def steps(folder: Path, compiled: Compiled, count: int) -> int:
    """Compile an application; return how many bytecodes Python has worked on for that."""
    context, inputs = described(folder, count)
    seen = 0

    def count_opcodes(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal seen
        frame.f_trace_opcodes = True
        seen += event == "opcode"
        return count_opcodes

    before = sys.gettrace()
    sys.settrace(count_opcodes)
    try:
        compiled(context, inputs)
    finally:
        sys.settrace(before)
    return seen


def described(folder: Path, count: int) -> tuple[StepContext, BatchInputs]:
    """Return an application of so many filters, each of which sends to one table."""
    lake = open_lake(folder / "lake")
    streams = UnreadStreams(lake)
    store = SqliteTable(
        folder / "t.sqlite", "t", "k", columns={"k": "string", "v": "bigint"}, create=True
    )
    app = Application("app")
    table = app.table(RemoteTable("t", key="k", read_function=store, write_function=store))
    streams.create("records", schema=Schema.of(k="string", v="bigint"), key=["k"], partitions=2)
    records = app.input_stream("lake.records")
    for number in range(count):
        records.filter(f"v > {number}").send_to(table)
    plan = plan_application(app, systems={"lake": streams})
    runtime = Runtime(lake, {"lake": streams}, lambda: None, by="test")  # type: ignore[arg-type, return-value]
    return StepContext(runtime, app, plan, FanOut()), batch_inputs(
        1, streams.all_ranges("records"), {}
    )

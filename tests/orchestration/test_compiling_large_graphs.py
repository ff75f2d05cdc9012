"""Compiling a batch takes steps in proportion to its operators; Spark is not asked here, so that only ours count."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dagster_adjunct.assets.writing.runtime import Runtime
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.planner.lake_catalog import plan_application
from dagster_adjunct.orchestration.startpoints.requests.fan_out import FanOut
from dagster_adjunct.orchestration.step.batch_compiler import table_outputs
from dagster_adjunct.orchestration.step.batch_compiler.compile_batch import run_batch
from dagster_adjunct.orchestration.step.batch_compiler.known_batch import known_batch
from dagster_adjunct.orchestration.step.batch_inputs import BatchInputs
from dagster_adjunct.orchestration.step.record_times import batch_times
from dagster_adjunct.orchestration.step.spark_proof import rehearsal as rehearsing
from dagster_adjunct.orchestration.step.spark_proof.rehearsal import Rehearsal
from dagster_adjunct.orchestration.step.spark_proof.spark_plan import SparkPlan
from dagster_adjunct.orchestration.step.step_context import StepContext
from dagster_adjunct.resources.backends import SqliteTable
from dagster_adjunct.resources.lakes import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.lake_streams import LakeStreams
from dagster_adjunct.resources.tables import RemoteTable
from dagster_adjunct.resources.tables.spark_write import WriteResult

Compiled = Callable[[StepContext, BatchInputs], None]


class Frame:
    """Records that nobody computes: whatever is done to them, they stay as they are."""

    columns = ("k", "v", "__partition", "__offset", "__tombstone", "__epoch")
    dtypes = (("k", "string"), ("v", "bigint"))

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self


@pytest.fixture(autouse=True)
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(operator: str, frame: Any, joins: Any) -> SparkPlan:
        return SparkPlan(frozenset({operator}), {}, (), "UnknownPartitioning(0)")

    monkeypatch.setattr(table_outputs, "write_table", lambda *args, **options: WriteResult({}))
    monkeypatch.setattr(batch_times, "with_epochs", lambda records, epochs: records)
    monkeypatch.setattr(rehearsing, "marked", lambda operator, frame: frame)
    monkeypatch.setattr(rehearsing, "plan_of", asked)
    monkeypatch.setattr(rehearsing, "_types", lambda frame: dict(frame.dtypes))
    monkeypatch.setattr(LakeStreams, "read", lambda self, spark, ranges: Frame())


def run(context: StepContext, inputs: BatchInputs) -> None:
    run_batch(context, inputs, lambda name: None)


def rehearsed(context: StepContext, inputs: BatchInputs) -> None:
    Rehearsal(known_batch(context, inputs)).run()


@pytest.mark.parametrize("compiled", [run, rehearsed])
def test_twice_the_operators_take_twice_the_steps(tmp_path: Path, compiled: Compiled) -> None:
    few, many = (steps(tmp_path / str(count), compiled, count) for count in (40, 160))
    assert many / few < 5, (few, many)  # 16 times as many, if each operator looked at all the others


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
    streams = LakeStreams(lake)
    store = SqliteTable(folder / "t.sqlite", "t", "k", columns={"k": "string", "v": "bigint"}, create=True)
    app = Application("app")
    table = app.table(RemoteTable("t", key="k", read_function=store, write_function=store))
    streams.create("records", schema=Schema.of(k="string", v="bigint"), key=["k"], partitions=2)
    records = app.input_stream("lake.records")
    for number in range(count):
        records.filter(f"v > {number}").send_to(table)
    plan = plan_application(app, {"lake": streams})
    runtime = Runtime(lake, {"lake": streams}, lambda: None, by="test")  # type: ignore[arg-type, return-value]
    return StepContext(runtime, app, plan, FanOut()), BatchInputs(1, streams.whole("records"), {})

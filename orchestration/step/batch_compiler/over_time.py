"""What a batch holds ready for operators that keep state: their tables, watermarks, and what they leave out."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.step.batch_compiler.state_tables import StateTables
from dagster_adjunct.orchestration.step.batch_records.left_out_records import LeftOut
from dagster_adjunct.orchestration.step.record_times.batch_times import BatchTimes

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.assets.unbounded.state_spec import StateSpec
    from dagster_adjunct.orchestration.operators.spec.compiling import StateHandle, Watermarks
    from dagster_adjunct.orchestration.step.batch_inputs import BatchInputs
    from dagster_adjunct.orchestration.step.step_context import StepContext


class OverTime:
    """The part of a batch that operators over time ask for (operators/spec/compiling.py)."""

    def __init__(self, context: StepContext, inputs: BatchInputs) -> None:
        self._context, self._inputs = context, inputs
        self._states = StateTables(context, inputs)
        self._left_out = LeftOut()
        self._times = BatchTimes(context, inputs)

    @property
    def number(self) -> int:
        return self._inputs.batch

    def counted(self, operator: str, frame: DataFrame, conditions: Mapping[str, Column]) -> DataFrame:
        return self._left_out.counted(operator, frame, conditions)

    def leave_out(self, operator: str, records: DataFrame) -> None:
        self._left_out.leave(operator, records)

    def left_out(self, operator: str) -> DataFrame:
        (before,) = self._context.app.operator(operator).inputs
        return self._left_out.of(before)

    def late_wanted(self, operator: str) -> bool:
        return any(other.spec.takes_left_out and operator in other.inputs for other in self._context.app.operators)

    @property
    def clock(self) -> datetime:
        return self._inputs.clock

    def watermarks(self, name: str) -> Watermarks:
        return self._times.watermarks(name)

    def state(self, name: str, spec: StateSpec, *, of: str | None = None) -> StateHandle:
        return self._states.table(name, spec, self.watermarks(of or name))

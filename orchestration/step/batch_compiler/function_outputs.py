"""Hands a batch's records to functions of the application, and records what they return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.arguments import called
from dagster_adjunct.orchestration.step.answers import function_sinks
from dagster_adjunct.orchestration.step.answers.function_sinks import SinkCall
from dagster_adjunct.orchestration.step.answers.recorded_answers import RecordedAnswers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.spec.sink_context import SinkFunction
    from dagster_adjunct.orchestration.step.batch_compiler.batch_counts import BatchCounts
    from dagster_adjunct.orchestration.step.batch_compiler.known_batch import KnownBatch
    from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class FunctionOutputs:
    """The functions that a batch hands records to; `before_output` is called with the name before one is called."""

    known: KnownBatch
    counts: BatchCounts
    before_output: Callable[[str], None]

    def hand_to(self, operator: str, frame: DataFrame, function: SinkFunction, sensitive: frozenset[str]) -> None:
        """Hand over all records, in tasks; errors tell no values of `sensitive` columns."""
        self.before_output(called(function))
        self.counts.add(operator, function_sinks.handed(frame, self._call(operator, function, None, sensitive)))

    def results_of(
        self, operator: str, frame: DataFrame, function: SinkFunction, returns: Schema, sensitive: frozenset[str]
    ) -> DataFrame:
        """Return the results, as they were recorded when the batch was run first, where the records lie."""
        known = self.known
        asked = {"function": called(function), "returns": {field.name: field.type for field in returns.fields}}
        record = RecordedAnswers(known.context.lake, known.app.name, known.inputs.batch, operator, asked)
        before = partial(self.before_output, called(function))
        call = self._call(operator, function, returns, sensitive)
        results, counted = function_sinks.results(frame, call, record, before)
        self.counts.add(operator, counted)
        kept = known.lying_by(operator)
        return function_sinks.as_frame(known.spark, results, known.partitions_at(operator) if kept else None)

    def _call(
        self, operator: str, function: SinkFunction, returns: Schema | None, sensitive: frozenset[str]
    ) -> SinkCall:
        known = self.known
        return SinkCall(
            operator,
            function,
            known.app.name,
            known.inputs.batch,
            returns,
            known.stream_of(operator),
            sensitive,
            known.inputs.cut,
        )

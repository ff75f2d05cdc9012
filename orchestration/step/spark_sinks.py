"""Calls users' functions with the records of a batch, in Spark tasks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.operators.calls import SinkFunction
from dagster_adjunct.orchestration.operators.columns import function_label, list_copies
from dagster_adjunct.orchestration.operators.functions import pickle_function
from dagster_adjunct.orchestration.step import recorded_answers
from dagster_adjunct.orchestration.step.batch_outputs import BatchCounts
from dagster_adjunct.orchestration.step.planned_batch import PlannedBatch
from dagster_adjunct.resources.schemas.schema import Schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class CalledSinks:
    """Calls the functions of a batch's sinks: `Sinks` of operators."""

    planned: PlannedBatch
    counts: BatchCounts
    before_output: Callable[[str], Any]

    def call(self, operator: str, frame: DataFrame, function: SinkFunction) -> None:
        """Call a function with the records, and count records and calls."""
        self.before_output(function_label(function))
        call = sink_call(self.planned, operator, function, None, frame.columns)
        given = frame.drop(*list_copies(frame.columns))
        self.counts.count(operator, recorded_answers.call_function(given, call))

    def call_for_results(
        self, operator: str, frame: DataFrame, function: SinkFunction, returns: Schema
    ) -> DataFrame:
        """Return the results of a function for the records, partitioned like these; a repeated
        batch reuses the recorded results.
        """
        planned = self.planned
        label = function_label(function)
        types = {field.name: field.type for field in returns.fields}
        asked = {"function": label, "returns": types}
        call = sink_call(planned, operator, function, returns, frame.columns)
        results, counted = recorded_answers.call_unless_recorded(
            frame.drop(*list_copies(frame.columns)),
            call,
            planned.recorded_answers(operator, asked),
            partial(self.before_output, label),
        )
        self.counts.count(operator, counted)
        partitions = None
        if planned.required_partitioning(operator):
            partitions = planned.partitions_at(operator)
        return recorded_answers.frame_from_results(planned.context.spark(), results, partitions)


def sink_call(
    planned: PlannedBatch,
    operator: str,
    function: SinkFunction,
    returns: Schema | None,
    columns: Collection[str],
) -> recorded_answers.SinkCall:
    """Return how tasks call a function with records that have these columns; pickles it."""
    return recorded_answers.SinkCall(
        operator,
        name=function_label(function),
        shipped=pickle_function(operator, function),
        application=planned.app.name,
        batch=planned.number,
        returns=returns,
        stream=planned.stream_of(operator),
        sensitive=planned.sensitive(operator, columns),
        cut=planned.inputs.intent.lost.cut,
        fence=planned.context.fence,
    )

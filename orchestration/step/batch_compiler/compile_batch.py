"""Compiles a planned application to DataFrames for one batch, and runs its outputs in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.step.batch_compiler.arriving_records import arriving_records, only_written_move
from dagster_adjunct.orchestration.step.batch_compiler.compiling_batch import CompilingBatch
from dagster_adjunct.orchestration.step.batch_compiler.known_batch import known_batch
from dagster_adjunct.orchestration.step.failures.told_failure import told_failure
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.spark.interpreted_plans import interpreted_plans
from dagster_adjunct.resources.user_code import line_of

if TYPE_CHECKING:
    from pyspark.errors import AnalysisException
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator
    from dagster_adjunct.orchestration.step.batch_compiler.batch_counts import Counted
    from dagster_adjunct.orchestration.step.context.batch_inputs import BatchInputs
    from dagster_adjunct.orchestration.step.context.step_context import StepContext


def run_batch(context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]) -> Counted:
    """Run every output of the application once, in the order of their definition; return what was counted.

    Outputs take (application, batch) as producer and sequence, so running a batch again adds nothing to
    streams. `before_output` is called with the output's name before anything is written to it.
    """
    with interpreted_plans(context.spark()) if inputs.interpreted else nullcontext():
        batch = CompilingBatch(known_batch(context, inputs), before_output)
        try:
            compiled_operators(batch)
            return batch.commit()
        finally:
            batch.close()


def compiled_operators(batch: CompilingBatch) -> dict[str, DataFrame]:
    """Compile the operators whose records are written, which writes them; return the records that leave each."""
    frames: dict[str, DataFrame] = {}
    for operator in batch.known.operators:
        leaving = compiled(batch, operator, [frames[source] for source in operator.inputs])
        # Records that several operators take are computed once.
        several = batch.known.several_take(operator)
        frames[operator.id] = batch.computed_once(operator.id, leaving) if several else leaving
    return frames


def compiled(batch: CompilingBatch, operator: Operator, sources: Sequence[DataFrame]) -> DataFrame:
    """Return the records that leave an operator; `sources` are those that leave the operators before it.

    What Spark says of its expressions, and what fails in its code, is told with its name, not with a plan.
    """
    from pyspark.errors import AnalysisException

    aside = only_written_move(batch.known, operator)
    try:
        if aside and batch.known.goes_on(operator.id):  # two read them: what is written, and what goes on
            sources = [batch.computed_once(operator.id, frame) for frame in sources]
        arriving = arriving_records(batch.known, operator, sources, batch.with_watermark)
        batch.note_arriving(operator.id, arriving)
        leaving = _leaving(batch, operator, arriving)
    except AnalysisException as error:
        raise _refused(operator, error) from error
    return sources[0] if aside else leaving


def _leaving(batch: CompilingBatch, operator: Operator, arriving: Sequence[DataFrame]) -> DataFrame:
    from pyspark.errors import AnalysisException

    try:
        return operator.spec.compile(operator.id, arriving, batch)
    except AnalysisException:
        raise
    except Exception as error:
        told = told_failure(batch, operator.id, error)
        if told is None:
            raise
        raise told  # noqa: B904 - it says itself what may be told of its cause


def _refused(operator: Operator, error: AnalysisException) -> PlanningError:
    problem = str(error).strip().partition("SQLSTATE")[0].strip().splitlines()[0].rstrip(" .")
    place = line_of(error) or operator.declared_at
    return PlanningError(
        f"{operator.id}: {problem}{f' ({place.words()})' if place else ''}.",
        "Correct the expression, or the function; adjunct plan shows the operators by these names.",
        operator=operator.id,
    )

"""Runs a batch that is begun: every output is written; where the store broke off, from the beginning."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.step.progress.step_report import StepEvent
from dagster_adjunct.resources.errors import (
    AdjunctError,
    NullKeyError,
    OffsetOutOfRangeError,
    OperatorFailedError,
    PlanningError,
    ProducerConflictError,
    SchemaMismatchError,
    StoreUnavailableError,
    TableError,
)
from dagster_adjunct.resources.spark.spark_errors import adjunct_error

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.stored_times import TimeState
    from dagster_adjunct.orchestration.step.commit.commit_intent import OpenBatch
    from dagster_adjunct.orchestration.step.opened_step.step_run import Counters, OpenedStep
    from dagster_adjunct.resources.tables.metrics import TableMetrics

# What mending the application, its records or its tables ends; the batch is open until then.
_OF_THE_APPLICATION = (
    NullKeyError,
    OperatorFailedError,
    PlanningError,
    ProducerConflictError,
    SchemaMismatchError,
    TableError,
)
# Seconds before a batch's work is begun again where the store broke off in the middle of it.
_PAUSES = (1.0, 5.0)


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """A batch whose outputs are all written, with what they and the joins have counted, and tables have measured.

    `times` are how far the inputs have come with it; None where it moves none.
    """

    opened: OpenBatch
    counters: Counters
    measured: Mapping[str, TableMetrics]
    seconds: dict[str, float]
    times: TimeState | None = None


def with_way_out(error: AdjunctError, app: str, batch: int) -> AdjunctError:
    """Return the error, with how the batch that it leaves open comes to its end: as a note, or as the next step."""
    give_up = f"adjunct checkpoint abandon {app} --reason …"
    if isinstance(error, ProducerConflictError) and error.newest is not None and error.newest > batch:
        return error.reworded(
            error.problem,
            f"Nothing was added. Batch {batch} is open, and the output has those of {app!r} up to {error.newest}: its "
            "batch log was begun anew, or another application has its name. Restore the log, or choose another name.",
        )
    if isinstance(error, ProducerConflictError):
        return error.reworded(
            error.problem,
            f"Batch {batch} is open, and this output has it already, as other code has made it: end it with that code "
            f"and deploy again; or give it up, and its records are sent again in another batch: {give_up}.",
        )
    way_out = (
        f"Batch {batch} stays open: the next run repeats it with the code of then, and adds nothing to an output that "
        f"has it. Or give it up: {give_up} (with --skip its records are passed over)."
    )
    if isinstance(error, OperatorFailedError):
        return error.reworded(error.problem, f"{error.next_step} {way_out}")
    if way_out not in getattr(error, "__notes__", ()):
        error.add_note(way_out)
    return error


def run_outputs(step: OpenedStep, opened: OpenBatch) -> WrittenBatch:
    """Write every output; where the store broke off, again from the beginning: what is written already stays."""
    began, context, intent = time.monotonic(), step.context, opened.intent

    def before_output(name: str) -> None:
        context.check()
        step.log.hold(opened.run.logged)
        step.leases.check_held()
        context.on_event(StepEvent("output", intent.batch, {"output": name}))

    for pause in (*_PAUSES, None):
        try:
            done = step.engine.run(context, opened.inputs, before_output)
            return WrittenBatch(
                opened, done.counters, done.measured, opened.seconds | {"work": time.monotonic() - began}, done.times
            )
        except Exception as error:
            ours = adjunct_error(error)
            if isinstance(ours, _OF_THE_APPLICATION):
                told = with_way_out(ours, context.app.name, intent.batch)
                if told is error:
                    raise
                raise told from (error.__cause__ if ours is error else error)
            if isinstance(ours, OffsetOutOfRangeError) and ours is not error:
                raise ours from error  # a task has met it
            if pause is None or not isinstance(ours, StoreUnavailableError):
                raise
            text = f"{ours.problem} The batch is begun again in {pause:g} s"
            context.on_event(StepEvent("again", intent.batch, {"text": text}))
        time.sleep(pause)
    raise AssertionError("unreachable")

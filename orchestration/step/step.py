"""The Spark step: one planned application, batch after batch, until it has caught up or met its limits.

    plan      what the next batch reads and which dataset versions it meets
    intent    the same, committed before anything is read
    run       ranges and versions -> operators -> outputs; each output is idempotent by (application, batch)
    close     the intent is closed, which is the checkpoint

A crash anywhere leaves either a closed batch or an open intent; the next run runs that intent again as written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.step.plan_batch import plan_batch, settle
from dagster_adjunct.orchestration.step.run_batch import close_batch, commit_intent, run_outputs
from dagster_adjunct.orchestration.step.step_report import StepEvent
from dagster_adjunct.orchestration.step.step_run import open_step
from dagster_adjunct.resources.errors import CommitConflictError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.step.step_context import StepContext
    from dagster_adjunct.orchestration.step.step_report import StepReport

# How often a run begins: another one that was taken over from may come in between, once.
_BEGINNINGS = 3


def run_step(context: StepContext) -> StepReport:
    """Run batches until the inputs are read to the offsets that were upcoming, or the limit is met.

    A batch that a crash left open comes first. Then startpoints are fanned out and resolved, once a run: what is
    requested later waits for the next one. Bounded replays take turns with the main input.

    Raises NoSealedVersionError before reading any input when a dataset marked for bootstrap has no version,
    StaleDatasetError when one is staler than its table allows, and CommitConflictError when another run takes the
    application over. Who was taken over from may commit once more before it notices: who holds the lease then begins
    from that commit.
    """
    for attempt in range(1, _BEGINNINGS + 1):
        step, begun = open_step(context)
        run = begun
        try:
            while context.max_batches is None or run.batches < context.max_batches:
                planned = plan_batch(step, run)
                run = planned.run
                if planned.intent is None:
                    return settle(step, planned).report(context, caught_up=True)
                opened = commit_intent(step, planned, planned.intent)
                run = opened.run
                run = close_batch(step, run_outputs(step, opened))
            return run.report(context, caught_up=False)
        except CommitConflictError as conflict:
            if run.logged.commit is not begun.logged.commit or context.still_ours is None or attempt == _BEGINNINGS:
                raise
            context.check()
            text = f"{conflict.problem} This run holds the lease, and begins again from that commit."
            context.on_event(StepEvent("lease", 0, {"text": text}))
        finally:
            step.versions.release()
    raise AssertionError("unreachable")

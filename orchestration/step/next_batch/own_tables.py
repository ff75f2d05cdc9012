"""What is done between batches in the tables that an application writes itself, its tables of state among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.unbounded.local_table import undo_batch
from dagster_adjunct.assets.unbounded.state_table import tend_state, undo_state
from dagster_adjunct.assets.writing.write_context import WriteContext
from dagster_adjunct.orchestration.upkeep.discard_with_roots import discard_all

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.step.step_context import StepContext
    from dagster_adjunct.orchestration.step.step_run import OpenedStep


def writing(context: StepContext) -> WriteContext:
    """Return what writes to a dataset in the name of this run."""
    return WriteContext(context.lake, context.systems, context.spark, context.run)


def undo_given_up(step: OpenedStep, batch: int) -> None:
    """Take what a batch that was given up has written out of the application's local tables, once."""
    app, write = step.context.app, writing(step.context)
    for dataset in app.datasets:
        if dataset.is_owned_by(app.name):
            undo_batch(write, dataset, app.name, batch)
    for name in step.states:
        undo_state(write, name, app.name, batch)


def tend_states(step: OpenedStep) -> None:
    """Merge small generations of the tables of state where there are many, and delete what nobody reads."""
    write = writing(step.context)
    waiting = [name for name in step.states if tend_state(write, name)]
    if waiting:
        discard_all(step.context.lake, datasets=waiting, by=step.context.run)

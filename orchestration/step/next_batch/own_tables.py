"""What is done before each batch in the tables that an application writes itself, its tables of state among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.unbounded.local_table_upkeep import undo_batch
from dagster_adjunct.assets.unbounded.state_table import tend_state
from dagster_adjunct.orchestration.upkeep.discard_with_roots import discard

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.step.opened_step.step_run import OpenedStep, StepRun


def tend_own_tables(step: OpenedStep, run: StepRun) -> None:
    """Take out what a batch that was given up has written, and keep the tables of state small."""
    if run.logged.state.given_up is not None:
        undo_given_up(step, run.logged.state.given_up)
    tend_states(step)


def undo_given_up(step: OpenedStep, batch: int) -> None:
    """Take what a batch that was given up has written out of the application's tables, once.

    A table of state is begun before the first batch that writes it: where there is none, no batch has.
    """
    app, runtime = step.context.app, step.context.runtime
    for dataset in app.datasets:
        if dataset.is_owned_by(app.name):
            undo_batch(runtime, dataset.name, app.name, batch, declared=dataset)
    for name in step.states:
        undo_batch(runtime, name, step.context.writer, batch)


def tend_states(step: OpenedStep) -> None:
    """Merge small generations of the tables of state where there are many, and delete what nobody reads."""
    for name in step.states:
        if tend_state(step.context.runtime, name):
            discard(step.context.lake, name, by=step.context.run)

"""The datasets that an application's inputs wait for: those with `bootstrap` need a version before anything is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.step.opened_step.step_run import OpenedStep


def check_bootstrapped(step: OpenedStep, unserved: Iterable[str]) -> None:
    """Raise NoSealedVersionError for a dataset with `bootstrap` that serves nothing yet, saying what it lacks."""
    for name in unserved:
        if step.context.app.dataset(name).bootstrap:
            step.versions.stored(name).require_current(step.context.systems)

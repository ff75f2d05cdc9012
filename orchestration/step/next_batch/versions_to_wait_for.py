"""The datasets that an application's inputs wait for: those with `bootstrap` need a version before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.orchestration.step.step_run import OpenedStep


def check_bootstrapped(step: OpenedStep, readers: Mapping[str, VersionReader | None]) -> None:
    """Raise NoSealedVersionError for a dataset with `bootstrap` that serves nothing yet, saying what it lacks."""
    for name, reader in readers.items():
        if reader is None and step.context.app.dataset(name).bootstrap:
            step.versions.stored(name).require_current(step.context.systems)

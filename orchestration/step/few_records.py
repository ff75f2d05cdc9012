"""Whether a batch has so few records, and meets so few rows, that one task does a stage sooner than many would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.assets.unbounded.transient_version import TransientVersion
    from dagster_adjunct.orchestration.application.application import Application

ROWS = 300_000
"""The rows of all partitioned datasets that one task reads, at most: some tenths of a second."""
_BYTES = 64 * 1024 * 1024


def are_few(
    app: Application,
    records: int,
    views: Mapping[str, VersionReader | TransientVersion | None],
    tasks: int | None,
    states: Mapping[str, VersionReader],
) -> bool:
    """Whether a batch of so many records, joined with these versions, is for one task a stage.

    A broadcast dataset is whole in every task, however many there are. `tasks` get each record of a broadcast input.
    `states` are the tables of state, by dataset.
    """
    if records * (tasks or 1) > app.few_records:
        return False
    rows, size = 0, 0
    read = [view for name, view in views.items() if view is not None and not app.dataset(name).broadcast]
    for view in (*read, *states.values()):
        sealed = getattr(view, "sealed", None)
        if sealed is None:
            rows += view.rows or 0
        else:
            rows += sum(generation.rows for generation in sealed.generations)
            size += sum(generation.size for generation in sealed.generations)
    return rows <= ROWS and size <= _BYTES

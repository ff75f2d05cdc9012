"""Whether a batch has so few records, and meets so few rows, that one task does a stage sooner than many would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.resources.spark.interpreted_plans import FEW_ROWS

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
    read = [view for name, view in views.items() if not app.dataset(name).broadcast]
    sizes = [_size(view) for view in (*read, *states.values())]
    return sum(rows for rows, _ in sizes) <= ROWS and sum(size for _, size in sizes) <= _BYTES


def are_interpreted(
    views: Mapping[str, VersionReader | TransientVersion | None], states: Mapping[str, VersionReader]
) -> bool:
    """Whether Spark had better interpret than compile what few records do with these versions, broadcast or not."""
    return sum(_size(view)[0] for view in (*views.values(), *states.values())) <= FEW_ROWS


def _size(view: VersionReader | TransientVersion | None) -> tuple[int, int]:
    """Return how many rows a version has, and how many bytes are read for them: none of a table in memory."""
    sealed = getattr(view, "sealed", None)
    if sealed is None:
        return (0 if view is None else view.rows or 0), 0
    generations = sealed.generations
    return sum(generation.rows for generation in generations), sum(generation.size for generation in generations)

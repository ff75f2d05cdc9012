"""Decides whether a batch is so small that one task per stage is faster than many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.transient import TransientVersion
from dagster_adjunct.resources.spark.tuning import FEW_ROWS

MAX_ROWS = 300_000
"""The rows of all partitioned datasets that one task reads, at most: some tenths of a second."""
_MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class VersionSize:
    """The number of rows in a dataset's version, and of bytes read for them (0 for a table in memory).

    `broadcast`: every task reads all of it, however many there are.
    """

    rows: int
    bytes: int = 0
    broadcast: bool = False


def measure_version(view: VersionReader | TransientVersion | None, *, broadcast: bool = False) -> VersionSize:
    """Return the size of a version, from its manifest."""
    sealed = getattr(view, "sealed", None)
    if sealed is None:
        return VersionSize(0 if view is None else view.rows or 0, 0, broadcast)
    generations = sealed.generations
    return VersionSize(sum(part.rows for part in generations), sum(part.size for part in generations), broadcast)


def is_small_batch(records: int, tasks: int | None, limit: int, met: Iterable[VersionSize]) -> bool:
    """Return whether a batch of so many records, joined with versions of these sizes, runs best in one task per stage.

    `limit` is the largest number of records of a small batch. `tasks` is how many tasks read each record of a broadcast
    input; None if there is none.
    """
    if records * (tasks or 1) > limit:
        return False
    read = [size for size in met if not size.broadcast]
    return sum(size.rows for size in read) <= MAX_ROWS and sum(size.bytes for size in read) <= _MAX_BYTES


def should_interpret(met: Iterable[VersionSize]) -> bool:
    """Return whether Spark should interpret the plans over these versions instead of compiling them."""
    return sum(size.rows for size in met) <= FEW_ROWS

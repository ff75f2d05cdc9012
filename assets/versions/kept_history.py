"""What a version says of the history that it keeps: whose times its rows are valid from, and how far back it goes."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from pydantic import Field

from dagster_adjunct.assets.versions.document_base import ManifestPart
from dagster_adjunct.resources.bucketing.bucket_files import Generation
from dagster_adjunct.resources.bucketing.write_over_time import FIRST, TOLD, VALID_FROM, VALID_TO

__all__ = [
    "FIRST",
    "HISTORY",
    "TOLD",
    "VALID_FROM",
    "VALID_TO",
    "KeptHistory",
    "current_rows",
    "moment_of",
    "newest_valid_from",
    "told",
]

HISTORY = ((VALID_FROM, "timestamp"), (VALID_TO, "timestamp"), (FIRST, "boolean"))
"""The columns that rows with history have in files beside `__position` and `__tombstone`.

A row is valid from `__valid_from` (included) to `__valid_to` (excluded). A base says where each row ends, with null for
what is open, and in `__first` whether no row of its key comes before. Rows of deltas have null in both: they are told
when base and deltas are read together.
"""


_EPOCH = datetime.fromtimestamp(0, UTC)


def moment_of(micros: int) -> datetime:
    """Return the moment that so many microseconds since the epoch stand for."""
    return _EPOCH + timedelta(microseconds=micros)


class KeptHistory(ManifestPart):
    """The history of a version: whose times it goes by, and how far back.

    `valid_from` is the column that says since when an entry is valid, None the record's time. `kept` is how far
    below the newest `__valid_from` answers are exact, in microseconds; None: as far as there are rows. `pruned` is up
    to where a major compaction has dropped rows, in microseconds since the epoch; None: it dropped none.
    """

    valid_from: str | None = None
    kept: int | None = Field(default=None, ge=0)
    pruned: int | None = None

    def edge(self, newest: int | None) -> int | None:
        """Return the earliest moment that answers are exact for, in microseconds; None: there is none.

        `newest` is the highest `__valid_from` of the version.
        """
        moving = None if self.kept is None or newest is None else newest - self.kept
        return max((at for at in (moving, self.pruned) if at is not None), default=None)


def length_of(history: KeptHistory | None) -> str:
    """Return how far back a history is kept, in words; "none" where there is none."""
    if history is None:
        return "none"
    return "all" if history.kept is None else str(timedelta(microseconds=history.kept))


def told(generation: Generation) -> bool:
    """Whether a generation's rows over time say where they end: those of a base do, those of deltas don't."""
    return bool(generation.files) and all(file.stats.get(TOLD) for file in generation.files)


def current_rows(generation: Generation) -> int | None:
    """Return how many rows of a generation alone are entries now; None where its rows do not say."""
    if generation.files and not told(generation):
        return None
    return sum(int(file.stats["current"]) for file in generation.files)


def newest_valid_from(generations: Iterable[Generation]) -> int | None:
    """Return the highest `__valid_from` of these generations, as their files say, in microseconds; None: no rows."""
    ranges = (file.stats.get("range") for generation in generations for file in generation.files)
    return max((int(span[1]) for span in ranges if span), default=None)

"""Whether a table is still the one that was written before: what its store says now, compared with
what it said last.

A store that creates a table gives it an id, and counts the runs of applications that write it and
their batches, in a row or key of its own next to the table (its book-keeping). The lake remembers
both. A table that is gone, created again, truncated or restored from an older backup differs from
that.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Literal

from dagster_adjunct.resources.validation import validated

BOOKKEEPING_SUFFIX = "__adjunct_runs"
"""The suffix with which a table's name becomes the name of its book-keeping."""
ID = "id"
RUNS = "runs"
"""The names of the book-keeping's numbers."""

Loss = Literal["gone", "replaced", "truncated", "marks", "older"]
"""What happened to a table: it is missing; it is another one; its rows or its marks were removed;
its rows are older than what was written."""


@validated
@dataclass(frozen=True, slots=True)
class Presence:
    """What a store says about a table. None means that the store can't tell.

    - `id`: a new one each time that the table is created.
    - `runs`: how often runs of applications have begun to write it, or to write another batch.
    - `rows`: whether it has any. `file`: where they are stored, which changes when they are all
      removed at once.
    - `marks`: whether the table with the marks of conditions exists.
    """

    exists: bool
    id: str | None = None
    runs: int | None = None
    rows: bool | None = None
    file: str | None = None
    marks: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what the lake remembers."""
        return {name: getattr(self, name) for name in ("id", "runs", "rows", "file", "marks")}


NO_TABLE = Presence(exists=False)


def find_loss(before: Presence, now: Presence) -> Loss | None:
    """Return what happened to a table between two looks at it; None if it is the same one, with
    at least its rows.
    """
    if not before.exists:
        return None
    if not now.exists:
        return "gone"
    if before.id is not None and now.id != before.id:
        return "replaced"
    if before.runs is not None and now.runs is not None and now.runs < before.runs:
        return "older"
    if is_emptied(before, now) and before.file is not None and before.file != now.file:
        return "truncated"
    if before.marks and now.marks is False:
        return "marks"
    return None


def is_emptied(before: Presence, now: Presence) -> bool:
    """Whether a table had rows and has none. Somebody may have deleted them on purpose."""
    return before.exists and bool(before.rows) and now.rows is False


def is_same_table(before: Presence, now: Presence | None) -> bool:
    """Whether a table is known to be the one of before, wherever it is stored: it has its id."""
    if now is None or not now.exists:
        return False
    return now.id is not None and now.id == before.id


def merge_presence(before: Presence, now: Presence) -> Presence:
    """Return what the lake remembers after a run has reported `now`, while it remembers `before`.

    That is the later look at the table, by their counts of runs: two runs may report in another
    order than they looked. It is `now` if the table is another one, or one of them has no count.
    """
    if before.id != now.id or before.runs is None or now.runs is None:
        return now
    if now.runs < before.runs:
        return before
    return now


def new_table_id() -> int:
    """Return a random number that identifies a table."""
    return secrets.randbits(62)

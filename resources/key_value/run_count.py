"""The count of the runs that write the rows of a key-value table, and of their batches: an entry of
its first segment.

    key      0xff ff ff ff ff | "runs"       which no entry of a user can have, and no fence
    value    the count, as text

It is stored with the entries, so a copy of them that is restored has an earlier count
(`presence.py`).
"""

from __future__ import annotations

from dagster_adjunct.resources.errors import TableUnavailableError
from dagster_adjunct.resources.key_value import segment
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    FENCES,
    ConditionsFailed,
    SegmentChange,
)
from dagster_adjunct.resources.key_value.table import OpenTable

_KEY = FENCES + b"\xffruns"
_SEGMENT = 0
_ROUNDS = 20  # of counting a run while others are counted


async def read_runs(table: OpenTable[str, bytes]) -> int:
    """Return the count; 0 before the first run."""
    (stored,) = await table.segment(_SEGMENT).get([_KEY])
    return 0 if stored is None else int(stored.value or b"0")


async def count_run(table: OpenTable[str, bytes]) -> int:
    """Raise the count, and return it. Raises TableUnavailableError if other runs always come
    first.
    """
    for _ in range(_ROUNDS):
        (stored,) = await table.segment(_SEGMENT).get([_KEY])
        runs = 1 if stored is None else int(stored.value or b"0") + 1
        expected = ABSENT if stored is None else stored.version
        change = SegmentChange(_KEY, str(runs).encode(), b"", expected)
        try:
            await table.apply(_SEGMENT, *segment.with_versions([change]))
        except ConditionsFailed:
            continue  # another run was counted meanwhile
        return runs
    label = f"key-value table {table.id}"
    problem = f"{label}: other runs were counted first {_ROUNDS} times."
    raise TableUnavailableError(problem, "It is retried.", table=label)

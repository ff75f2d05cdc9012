"""A request with conditions whose keys come again, cut into requests of which most have each key once.

Which of a key's entries pass depends on each other, so a statement for many rows can take one of each key: first the
first of every key, then the second, and so on. What is left of keys that come very often goes row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.backends.postgres_batches import LEAST
from dagster_adjunct.resources.tables.arrow_entries import ArrowEntries
from dagster_adjunct.resources.tables.operation import Operation

if TYPE_CHECKING:
    import numpy as np


def in_waves(operation: Operation[Any]) -> Iterator[tuple[list[int] | None, Operation[Any]]]:
    """The parts of an operation in the order in which they have to be sent, each with its places; None: all of them."""
    entries = operation.entries
    if not operation.conditions or not isinstance(entries, ArrowEntries) or len(entries) < LEAST:
        yield None, operation
        return
    import numpy as np

    times = _times_before(entries)
    turn, most = 0, int(times.max())
    while turn <= most:
        chosen = np.flatnonzero(times == turn)
        if len(chosen) < LEAST:
            chosen, turn = np.flatnonzero(times >= turn), most
        if len(chosen) == len(entries):
            yield None, operation
        else:
            places = chosen.tolist()
            yield places, operation.with_entries(entries.take(places))
        turn += 1


def _times_before(entries: ArrowEntries) -> np.ndarray[Any, Any]:
    """For each entry, how many before it have its key."""
    import numpy as np

    keys = np.zeros(len(entries), dtype=np.int64)
    for column in entries.key.flatten():
        known = column.dictionary_encode()
        keys = keys * (len(known.dictionary) + 1) + known.indices.fill_null(len(known.dictionary)).to_numpy()
        keys = np.unique(keys, return_inverse=True)[1]
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    times = np.empty(len(entries), dtype=np.int64)
    times[order] = np.arange(len(entries)) - np.repeat(first, np.diff(np.r_[first, len(entries)]))
    return times

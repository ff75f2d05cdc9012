"""A process that writes numbered batches until it is killed, and what the keys hold after each
batch.
"""

from __future__ import annotations

from pathlib import Path

from dagster_adjunct.key_value import BlockingKeyValueTable, Insert, Put, Remove
from tests.end_to_end.key_values.worlds import Notes, Table

KEYS = tuple(f"key-{number:02}" for number in range(24))
_PADDING = "." * 3000  # so that a batch takes its time


def held_after(batch: int) -> dict[str, str]:
    """Return what the family holds after so many batches: in turn, other thirds of its keys are
    missing.
    """
    return (
        {} if batch == 0 else {key: f"{batch}{_PADDING}" for key in KEYS if _is_there(key, batch)}
    )


def batches(path: Path, table: Table, family: str, begun: int) -> None:
    """Write one batch after the other, for ever, noting when one begins and when it is
    acknowledged.
    """
    notes = Notes(path)
    with BlockingKeyValueTable(table) as blocking:
        while True:
            begun += 1
            notes.add({"begun": begun})
            blocking.apply([_change(key, begun) for key in KEYS], family=family)
            notes.add({"acknowledged": begun})


def _is_there(key: str, batch: int) -> bool:
    return (KEYS.index(key) + batch) % 3 != 0


def _change(key: str, batch: int) -> Insert[str, str] | Put[str, str] | Remove[str]:
    if not _is_there(key, batch):
        return Remove(key)
    value = held_after(batch)[key]
    # The one that was missing is inserted: this batch is refused unless it follows the one before.
    return Put(key, value) if batch == 1 or _is_there(key, batch - 1) else Insert(key, value)

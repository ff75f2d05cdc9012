"""A backend that only remembers which tables it holds, and can die, or let others run, at each
of its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dagster_adjunct.resources.errors import KeyValueTableNotFoundError
from dagster_adjunct.resources.key_value.segment import (
    SegmentLimits,
    TableId,
    TableSegment,
    register_segment_backend,
)

_SPACES: dict[str, dict[str, str]] = {}


class Died(Exception):
    """The process of a manager ended here."""


class RememberedTables:
    """Tables by incarnation, each "open" or "sealed", in a space that lives as long as the process.

    `before` and `after` are called with the name of a step, and end or delay it as a test likes.
    """

    limits = SegmentLimits()
    waits = False
    horizon = 60.0

    def __init__(self, space: str) -> None:
        self.space = space
        self.tables = _SPACES.setdefault(space, {})
        self.before: Callable[[str], None] = lambda step: None
        self.after: Callable[[str], None] = lambda step: None

    def die_at(self, when: str, step: str) -> None:
        """End the manager "before" or "after" this step, once."""
        if when == "before":
            self.before = dying(step)
        else:
            self.after = dying(step)

    def to_dict(self) -> dict[str, Any]:
        return {"space": self.space}

    def create(self, table: TableId, partitions: int) -> None:
        self.before("create")
        self.tables.setdefault(table.incarnation, "open")
        self.after("create")

    def seal(self, table: TableId, partitions: int) -> None:
        self.before("seal")
        if table.incarnation not in self.tables:
            raise KeyValueTableNotFoundError("gone.", "")
        self.tables[table.incarnation] = "sealed"
        self.after("seal")

    def delete(self, table: TableId, partitions: int) -> None:
        self.before("delete")
        self.tables.pop(table.incarnation, None)
        self.after("delete")

    def check_may_seal(self, table: TableId, partitions: int) -> None:
        self.before("ask")
        self.after("ask")

    check_may_delete = check_may_seal

    def open(self, table: TableId, partition: int) -> TableSegment:
        raise NotImplementedError

    def location(self, table: TableId, partition: int) -> str:
        return f"{self.space}/{table.incarnation}/{partition}"


register_segment_backend("remembered", RememberedTables)


def dying(step: str) -> Callable[[str], None]:
    """Return what ends a manager at this step, once."""
    left = [step]

    def die(reached: str) -> None:
        if left and reached == step:
            left.clear()
            raise Died(step)

    return die

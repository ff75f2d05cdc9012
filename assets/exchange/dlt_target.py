"""Where the tables of dlt loads go."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema

_UNSAFE = re.compile(r"[^A-Za-z0-9_]")
LONGEST_NAME = 100


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where loads go: streams `prefix-TABLE` of a lake, and what is declared of them by table."""

    lake: Lake
    prefix: str
    partitions: int | Mapping[str, int] = 1
    schemas: Mapping[str, Schema] = field(default_factory=dict)

    def stream(self, table: str) -> str:
        """Return the name of a table's stream."""
        return f"{self.prefix}-{_UNSAFE.sub('_', table)}"

    def partitions_of(self, table: str) -> int:
        """Return the number of partitions of a table's stream, if the table has a key."""
        if isinstance(self.partitions, int):
            return self.partitions
        return self.partitions.get(table, 1)

    @property
    def longest_table(self) -> int:
        """The number of characters that a table's name may have."""
        return LONGEST_NAME - len(self.prefix) - 1

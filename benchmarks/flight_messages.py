"""What the benchmarks of single stores write: messages of flights, and our side of writing them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from dagster_adjunct.resources.tables.operation import (
    Changes,
    Conditions,
    Mark,
    Operation,
    OperationKind,
    RowEntries,
    position_of,
)

COLUMNS = {
    "tail": "string",
    "seen": "timestamp",
    "origin": "string",
    "flights": "bigint",
    "delay": "double",
}
Row = tuple[str, dict[str, Any], str]  # key, record, position


def rows(turn: int, number: int) -> list[Row]:
    """The same keys each turn, in messages that are newer than those of the turn before."""
    start = datetime(2013, 1, 1, tzinfo=UTC) + timedelta(days=turn)
    return [
        (
            f"N{n:06d}",
            {
                "seen": start + timedelta(seconds=n, milliseconds=n % 1000),
                "origin": ("EWR", "JFK", "LGA")[n % 3],
                "flights": n,
                "delay": n / 7,
            },
            position_of(turn, n),
        )
        for n in range(number)
    ]


class Ours:
    """A store's function, which gets whole records, reads, and updates under both conditions."""

    def __init__(self, table: Any) -> None:
        self.table = table

    async def put(self, given: Sequence[Row]) -> None:
        entries = RowEntries([key for key, _, _ in given], [record for _, record, _ in given])
        await self._send(OperationKind.PUT, entries, Conditions())

    async def get(self, given: Sequence[Row]) -> None:
        await self._send(OperationKind.GET, RowEntries([key for key, _, _ in given]), Conditions())

    async def update(self, given: Sequence[Row]) -> None:
        entries = RowEntries(
            [key for key, _, _ in given],
            [
                Changes(
                    set={name: record[name] for name in ("seen", "origin", "delay")},
                    add={"flights": 1},
                )
                for _, record, _ in given
            ],
            None,
            [Mark("flights.3", position) for _, _, position in given],
            [record["seen"] for _, record, _ in given],
        )
        await self._send(OperationKind.UPDATE, entries, Conditions("seen", True))

    async def _send(
        self, kind: OperationKind, entries: RowEntries[str], conditions: Conditions
    ) -> None:
        await self.table.open()
        outcomes = await self.table.send(Operation(kind, entries, conditions=conditions))
        assert not outcomes.problems, outcomes.problems

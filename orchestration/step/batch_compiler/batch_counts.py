"""What a batch counts while it runs, by output or operator, and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.step.batch_compiler.join_counts import JoinCounts
from dagster_adjunct.resources.tables.metrics import TableMetrics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.batchlog.stored_times import TimeState

Counters = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Counted:
    """What a batch has counted, by output or join, what its tables have measured, and how far its inputs have come."""

    counters: Counters
    measured: Mapping[str, TableMetrics]
    times: TimeState | None = None


class BatchCounts:
    """What outputs add to as they are written, what tables measure, and joins that Spark counts as records pass."""

    def __init__(self) -> None:
        self.counters: Counters = {}
        self.measured: dict[str, TableMetrics] = {}
        self._joins: list[JoinCounts] = []

    def add(self, name: str, counters: Mapping[str, int]) -> None:
        """Add to what was counted of an output, or an operator, of this name."""
        self.counters[name] = summed(self.counters.get(name, {}), counters)

    def measure(self, table: str, metrics: TableMetrics, counters: Mapping[str, int]) -> None:
        """Add what a table has measured of its requests, and what was counted of them."""
        self.measured[table] = self.measured.get(table, TableMetrics()) + metrics
        self.add(table, counters)

    def of_join(self, operator: str, joined: DataFrame) -> DataFrame:
        """Return joined records, counted as they pass."""
        counts = JoinCounts(operator)
        self._joins.append(counts)
        return counts.observe(joined)

    def of_joins(self) -> Counters:
        """Return what was counted at each join; waits for outputs that have not run yet."""
        return {join.name: join.result() for join in self._joins}


def summed(before: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """Return the counters of two sends to one table in one."""
    return {name: before.get(name, 0) + more.get(name, 0) for name in {**before, **more}}

"""Reads many records of a table by key: in this process, or, where there are many, in Spark tasks."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.spark.spark_errors import from_document, to_document
from dagster_adjunct.resources.tables import metrics_hooks
from dagster_adjunct.resources.tables.blocking_table import BlockingTable
from dagster_adjunct.resources.tables.cache_layer import CacheLayer
from dagster_adjunct.resources.tables.metrics import Meter, TableMetrics
from dagster_adjunct.resources.tables.operation import Operation, OperationKind, RowEntries
from dagster_adjunct.resources.tables.outcomes import Outcomes
from dagster_adjunct.resources.tables.own_loop import run_to_end
from dagster_adjunct.resources.tables.raised_outcomes import error_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.resources.tables.remote_table import RemoteTable

KEYS_A_TASK = 5_000
"""How many keys a task asks for at least; so many are asked for in this process."""


@dataclass(frozen=True, slots=True)
class Read:
    """The records of the keys that were asked for, None where there is none, and what that took."""

    records: Sequence[Any]
    metrics: TableMetrics


class BulkReader:
    """Reads a table, keeps its connection, and what it read as long as the table's cache says; `close` it.

    All requests are under the table's batches, retries and rate, in tasks too.
    """

    def __init__(self, table: RemoteTable[Any, Any, Any], spark: SparkSession) -> None:
        bare = copy.copy(table)
        bare.__setstate__(bare.__getstate__() | {"cache": None})  # the cache stands here, over this process and tasks
        self._table, self._spark, self._here = bare, spark, BlockingTable(bare)
        self._meter = Meter()
        self._cache = None if table.cache is None else CacheLayer(_Below(self), table.cache, self._meter, table.clock)
        self._in_tasks = TableMetrics()
        self._tasks = 1

    def read(self, keys: Sequence[Hashable], args: tuple[object, ...], tasks: int) -> Read:
        """Return the records of these keys, each of which stands there once; at most `tasks` Spark tasks ask for them.

        Raises the first error of an entry that the table has given up.
        """
        before, self._tasks = self._metrics(), tasks
        gets = Operation(OperationKind.GET, RowEntries(keys), args, key=self._key)
        outcomes = self.ask(gets) if self._cache is None else run_to_end(self._cache.send(gets))
        if outcomes.problems and (error := error_of(self._table.name, gets, outcomes)) is not None:
            raise error
        records = outcomes.records or [None] * len(keys)
        present = len(records) - list(records).count(None)
        return Read(records, replace(self._metrics() - before, reads=len(keys), found=present))

    def ask(self, gets: Operation[Any]) -> Outcomes:
        """Ask the table itself."""
        tasks = min(self._tasks, len(gets) // KEYS_A_TASK)
        if tasks < 2:
            outcomes = self._here.send(gets)
            self._here.flush()
            return outcomes
        return self._ask_in_tasks(gets, tasks)

    def close(self) -> None:
        self._here.close()

    @property
    def _key(self) -> tuple[str, ...]:
        return self._table.key if len(self._table.key) > 1 else ()

    def _metrics(self) -> TableMetrics:
        return self._table.metrics + self._meter.metrics() + self._in_tasks

    def _ask_in_tasks(self, gets: Operation[Any], tasks: int) -> Outcomes:
        keys = gets.entries.keys
        size = -(-len(keys) // tasks)
        parts = [pickle.dumps(keys[at : at + size]) for at in range(0, len(keys), size)]
        numbered = list(enumerate(parts))
        frame = self._spark.createDataFrame(numbered, "part int, keys binary").repartitionById(len(parts), "part")
        ask = _task(self._table, gets.args, self._key)
        reports = frame.mapInArrow(ask, "keys binary, records binary, report string").collect()
        answered: dict[Any, Any] = {}
        metrics, failed = TableMetrics(), None
        for row in reports:
            report = json.loads(row.report)
            metrics += TableMetrics.from_document(report["metrics"]) if "metrics" in report else TableMetrics()
            failed = failed or report["error"]
            if row.records is not None:
                answered.update(zip(pickle.loads(row.keys), pickle.loads(row.records), strict=True))
        self._in_tasks += metrics
        metrics_hooks.report(self._table.name, metrics)
        if failed is not None:
            raise from_document(failed)
        return Outcomes(len(keys), [answered[key] for key in keys])


@dataclass(frozen=True, slots=True)
class _Below:
    """What the cache asks where it knows nothing."""

    reader: BulkReader

    async def send(self, operation: Operation[Any]) -> Outcomes:
        return self.reader.ask(operation)

    async def close(self) -> None:
        pass


def _task(
    table: RemoteTable[Any, Any, Any], args: tuple[object, ...], key: tuple[str, ...]
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def read(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            for part in batch.column("keys").to_pylist():
                keys = pickle.loads(part)
                records, report = asyncio.run(
                    _asked(table, Operation(OperationKind.GET, RowEntries(keys), args, key=key))
                )
                yield pa.RecordBatch.from_pydict(
                    {
                        "keys": pa.array([part], pa.binary()),
                        "records": pa.array([None if records is None else pickle.dumps(records)], pa.binary()),
                        "report": pa.array([json.dumps(report)], pa.string()),
                    }
                )

    return read


async def _asked(
    table: RemoteTable[Any, Any, Any], gets: Operation[Any]
) -> tuple[Sequence[Any] | None, dict[str, Any]]:
    """Return the records, and what a task reports; an error as a part of it, since the table's own retries are over."""
    before = table.metrics
    try:
        async with table:
            outcomes = await table.send(gets)
        error: AdjunctError | None = error_of(table.name, gets, outcomes) if outcomes.problems else None
        records = list(outcomes.records or ()) if error is None else None
    except AdjunctError as raised:
        records, error = None, raised
    metrics = (table.metrics - before).to_document()
    return records, {"metrics": metrics, "error": None if error is None else to_document(error)}

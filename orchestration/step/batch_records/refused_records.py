"""The dead letters of a batch: what tables have refused of its records, on the way to a stream."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.operators.sends.send_dead_letters import LETTER
from dagster_adjunct.resources.errors import TableError
from dagster_adjunct.resources.streams.interface.stream_system import RECORD_META_DDL, AppendResult, OffsetRange
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem

Letters = Sequence[dict[str, Any]]
_SAME = ("table", "kind", "key", "record")


def as_records(spark: SparkSession, table: str, letters: Letters) -> DataFrame:
    """Return refused records as records of a stream, at the positions of those that they were."""
    ddl = ", ".join((RECORD_META_DDL, *(f"`{name}` {kind}" for name, kind in LETTER.items())))
    rows = [
        (
            letter.get("partition", 0),
            letter.get("offset", 0),
            datetime.fromisoformat(letter["timestamp"]) if letter.get("timestamp") else None,
            False,
            letter.get("epoch") or 0,
            *({**letter, "table": table}[name] for name in LETTER),
        )
        for letter in letters
    ]
    return spark.createDataFrame(rows, ddl)


def check_all_there(system: StreamSystem, stream: str, sent: AppendResult, letters: DataFrame, what: str) -> None:
    """Raise TableError where a batch that is run again finds others refused than its first run has sent already.

    A batch appends to a stream once, so that the others would be lost.
    """
    ranges = {
        SystemStreamPartition(system.name, stream, partition): OffsetRange(start, sent.next[partition])
        for partition, start in sent.first.items()
    }
    there = system.read_arrow(ranges) if ranges else None
    known = set() if there is None else {tuple(row[name] for name in _SAME) for row in there.to_pylist()}
    lost = [row for row in letters.select(*_SAME).collect() if tuple(row) not in known]
    if lost:
        raise TableError(
            f"{what}: this batch is run again, and table {lost[0]['table']} refuses {len(lost)} record(s) that are not "
            f"among the dead letters of its first run; the first is of key {lost[0]['key']}.",
            "Correct the records or the table, then run the batch again.",
            table=lost[0]["table"],
        )

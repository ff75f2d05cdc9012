"""Writes a DataFrame into a remote table from Spark tasks, each key's records in source order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.resources.errors import AdjunctError, NullKeyError, SchemaMismatchError
from dagster_adjunct.resources.spark.spark_errors import from_document, to_document
from dagster_adjunct.resources.tables import TableMetrics, UpdateContract, UpdateMessage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.resources.tables import RemoteTable

UPDATE, DEFAULT = "update", "default"
_PLACE = ("__partition", "__offset")
_POSITION = (*_PLACE, "__task", "__branch")
_TOMBSTONE = "__tombstone"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class TableWrite:
    """How records become requests: with a contract as updates, without one as whole records."""

    table: RemoteTable[Any, Any, Any]
    contract: UpdateContract | None
    on_null_key: Literal["fail", "skip"]
    tasks: int
    source: str = ""
    """The stream whose positions the records carry, for errors."""


def write_table(df: DataFrame, write: TableWrite, *, exchange: bool, what: str) -> dict[str, int]:
    """Send every record of `df` to the table in one Spark job; return the counters of all tasks, summed.

    With a contract `df` has the key's columns and the structs `update` and (optional) `default`; without one
    its columns are the record, and a tombstone deletes. `exchange` brings the records of one key into one
    task; they are sent there in source order.
    """
    from pyspark.sql import functions as F

    _check_columns(df.columns, write, what)
    keys = [F.col(f"`{name}`") for name in write.table.key]
    if exchange:
        df = df.repartition(write.tasks, *keys)
    df = df.sortWithinPartitions(*[name for name in _POSITION if name in df.columns])
    kept = (_TOMBSTONE, *_PLACE)
    hidden = [name for name in df.columns if name.startswith("__") and name not in kept]
    rows = df.drop(*hidden).mapInArrow(_task(write, what), "counters string").collect()
    total = TableMetrics()
    skipped = 0
    reports = [json.loads(row.counters) for row in rows]
    for counters in reports:
        if "error" in counters:
            raise from_document(counters)
    for counters in reports:
        skipped += counters.pop("null_keys")
        total += TableMetrics(**counters)
    return {**total.to_dict(), "null_keys": skipped}


def _check_columns(columns: Sequence[str], write: TableWrite, what: str) -> None:
    needed = [*write.table.key, *([UPDATE] if write.contract else [])]
    missing = [name for name in needed if name not in columns]
    if missing:
        shown = ", ".join(name for name in columns if not name.startswith("__"))
        raise SchemaMismatchError(
            f"{what}: records have no {', '.join(map(repr, missing))}; they have {shown}.",
            "Give updates their form first: .map(*update_message(key=…, update=…, default=…))."
            if write.contract
            else f"The table's key is {', '.join(write.table.key)}: keep it, or rename a column to it.",
        )


def _task(write: TableWrite, what: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def send(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        try:
            metrics, skipped = asyncio.run(_send_all(batches, write, what))
            counters = json.dumps({**metrics.to_dict(), "null_keys": skipped})
        except AdjunctError as error:
            # As a result and not as an exception: the table's own retries are over, and Spark would try the task
            # again and wrap the error in its own.
            counters = json.dumps(to_document(error))
            for _ in batches:  # a worker whose input is not drained is not used again
                pass
        yield pa.RecordBatch.from_pydict({"counters": pa.array([counters], pa.string())})

    return send


async def _send_all(batches: Iterator[Any], write: TableWrite, what: str) -> tuple[TableMetrics, int]:
    skipped = 0
    async with write.table as table:
        for batch in batches:
            keyed, nulls = _with_keys(batch, write, what)
            skipped += nulls
            if write.contract is not None:
                await table.update_messages(_messages(keyed, table.key), write.contract)
            else:
                await _put(keyed, table)
        return table.metrics, skipped


def _with_keys(batch: Any, write: TableWrite, what: str) -> tuple[Any, int]:
    """Return the rows that have a whole key, and how many have not."""
    import pyarrow.compute as pc

    valid = None
    for name in write.table.key:
        present = pc.is_valid(batch.column(name))
        valid = present if valid is None else pc.and_(valid, present)
    kept = batch.filter(valid)
    nulls = batch.num_rows - kept.num_rows
    if nulls and write.on_null_key == "fail":
        raise NullKeyError(
            f"{what}: {nulls} record(s) have no {' or no '.join(write.table.key)}, the key of table "
            f"{write.table.name}{_place(batch.filter(pc.invert(valid)), write.source)}.",
            'Filter them out, or let them be counted and skipped: send_to(…, on_null_key="skip").',
            table=write.table.name,
        )
    return kept, nulls


def _place(lacking: Any, source: str) -> str:
    """Return where the first of these records stands, as far as it is known."""
    if not set(_PLACE) <= set(lacking.schema.names):
        return ""
    partition, offset = (lacking.column(name)[0].as_py() for name in _PLACE)
    return f"; the first is {source or 'partition '}{'.' if source else ''}{partition} at offset {offset}"


def _messages(batch: Any, key: Sequence[str]) -> list[tuple[Any, UpdateMessage[Any, Any]]]:
    updates = _structs(batch.column(UPDATE))
    has_default = DEFAULT in batch.schema.names
    defaults = _structs(batch.column(DEFAULT)) if has_default else [None] * batch.num_rows
    return [
        (k, UpdateMessage(update, default))
        for k, update, default in zip(_keys(batch, key), updates, defaults, strict=True)
    ]


async def _put(batch: Any, table: RemoteTable[Any, Any, Any]) -> None:
    """Put or delete, run by run, so that a key's records keep their order."""
    names = [name for name in batch.schema.names if name not in (_TOMBSTONE, *_PLACE)]
    records = _rows(names, [batch.column(name) for name in names])
    keys = _keys(batch, table.key)
    deleted = batch.column(_TOMBSTONE).to_pylist() if _TOMBSTONE in batch.schema.names else [False] * batch.num_rows
    start = 0
    for end in range(1, len(keys) + 1):
        if end == len(keys) or deleted[end] != deleted[start]:
            if deleted[start]:
                await table.delete_all(keys[start:end])
            else:
                await table.put_all(list(zip(keys[start:end], records[start:end], strict=True)))
            start = end


def _keys(batch: Any, key: Sequence[str]) -> list[Any]:
    columns = [_values(batch.column(name)) for name in key]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def _structs(column: Any) -> list[Any]:
    """Return dictionaries, None where the struct is null; column by column, several times faster than row by row."""
    names = [column.type.field(index).name for index in range(column.type.num_fields)]
    records = _rows(names, column.flatten())
    if column.null_count:
        return [record if valid else None for record, valid in zip(records, column.is_valid(), strict=True)]
    return records


def _rows(names: Sequence[str], columns: Sequence[Any]) -> list[dict[str, Any]]:
    return [dict(zip(names, row, strict=True)) for row in zip(*map(_values, columns), strict=True)]


def _values(column: Any) -> list[Any]:
    """Return Python values; instants by plain arithmetic, which Arrow's own way takes longer for."""
    import pyarrow as pa

    if not pa.types.is_timestamp(column.type) or column.type.tz is None:
        values: list[Any] = column.to_pylist()
        return values
    micros = column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64()).to_pylist()
    return [None if value is None else _EPOCH + timedelta(microseconds=value) for value in micros]

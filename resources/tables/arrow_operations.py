"""Makes operations of an Arrow batch: puts or updates, and deletes for its tombstones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.tables.arrow_entries import ArrowEntries
from dagster_adjunct.resources.tables.arrow_values import struct_of, to_python
from dagster_adjunct.resources.tables.operation import Conditions, Operation, OperationKind
from dagster_adjunct.resources.tables.partial_update import UpdateContract
from dagster_adjunct.resources.tables.record_marks import Marks

UPDATE, DEFAULT = "update", "default"
TOMBSTONE, TIMESTAMP = "__tombstone", "__timestamp"


@dataclass(frozen=True, slots=True)
class Shape:
    """How records become requests: without a contract as whole records, with one as updates.

    Updates lie in the struct `update`, defaults in `default`; a boolean stands for a struct without fields.
    Where `typed`, an update has structs for what is set, added and appended, and `remove` is what all updates remove.
    """

    key: tuple[str, ...]
    contract: UpdateContract | None = None
    conditions: Conditions = field(default=Conditions())
    typed: bool = False
    remove: tuple[str, ...] = ()
    args: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """One operation, and the rows of the batch that its entries are."""

    operation: Operation[Any]
    batch: Any
    rows: Sequence[int]


def parts_of(batch: Any, shape: Shape, marks: Marks | None, what: str) -> list[Part]:
    """Return what is to be sent for a batch, in order: few operations, however often puts and deletes alternate.

    All records of a kind go into one operation, up to where a key's own kind changes; what follows of the key, and of
    others whose kind changes as often, is in the next two.
    """
    whole = _entries(batch, shape, marks, what)
    deleted = batch.column(TOMBSTONE).to_pylist() if TOMBSTONE in batch.schema.names else []
    if not any(deleted):
        return [Part(_writing(whole, shape), batch, range(batch.num_rows))]
    parts = []
    for writes, deletes in _waves(whole.keys, deleted):
        if writes:
            parts.append(Part(_writing(whole.take(writes), shape), batch, writes))
        if deletes:
            parts.append(Part(_deleting(whole.take(deletes), shape), batch, deletes))
    return parts


def _waves(keys: Sequence[Any], deleted: Sequence[bool]) -> list[tuple[list[int], list[int]]]:
    """Return the rows that are written and those that are deleted, by wave: of a wave, a key is in one of the two."""
    waves: list[tuple[list[int], list[int]]] = []
    last: dict[Any, tuple[int, bool]] = {}
    for row, (key, kind) in enumerate(zip(keys, map(bool, deleted), strict=True)):
        wave, before = last.get(key, (0, kind))
        wave += before is not kind
        last[key] = (wave, kind)
        if wave == len(waves):
            waves.append(([], []))
        waves[wave][kind].append(row)
    return waves


def _writing(entries: ArrowEntries, shape: Shape) -> Operation[Any]:
    kind = OperationKind.PUT if shape.contract is None else OperationKind.UPDATE
    contract = shape.contract or UpdateContract.UPDATE_WITH_DEFAULTS
    return Operation(kind, entries, shape.args, shape.conditions, contract=contract, key=shape.key, rerun=True)


def _deleting(entries: ArrowEntries, shape: Shape) -> Operation[Any]:
    bare = ArrowEntries(entries.key, None, entries.to_python, None, entries.sources, entries.positions, entries.times)
    return Operation(OperationKind.DELETE, bare, shape.args, shape.conditions, key=shape.key, rerun=True)


def _entries(batch: Any, shape: Shape, marks: Marks | None, what: str) -> ArrowEntries:
    sources, positions = (None, None) if marks is None else marks.of(batch)
    columns = {name: batch.column(name) for name in batch.schema.names if not name.startswith("__")}
    key = struct_of({name: columns[name] for name in shape.key}, batch.num_rows)
    defaults = None
    if shape.contract is None:
        records = struct_of(columns, batch.num_rows)
    else:
        records = _struct_of(columns[UPDATE])
        if DEFAULT in columns:
            defaults = _struct_of(columns[DEFAULT])
    times = None if shape.conditions.newest_by is None else _times(batch, records, shape, what)
    return ArrowEntries(key, records, to_python, defaults, sources, positions, times, shape.typed, shape.remove)


def _struct_of(column: Any) -> Any:
    import pyarrow as pa

    return struct_of({}, len(column)) if pa.types.is_boolean(column.type) else column


def _times(batch: Any, records: Any, shape: Shape, what: str) -> Any:
    """Return the time of each record: its column, or where a tombstone has none, when it was sent."""
    import pyarrow as pa
    import pyarrow.compute as pc

    name = shape.conditions.newest_by
    values = records.field("set") if shape.typed else records
    if values.type.get_field_index(name) < 0:
        raise SchemaMismatchError(
            f"{what}: records have no {name!r}, by which the table keeps what is newest.",
            "Keep the column, or set it with each update; or declare the table with another newest_by.",
            column=name,
        )
    times = pc.struct_field(values, [values.type.get_field_index(name)])
    if times.null_count and TOMBSTONE in batch.schema.names and pa.types.is_timestamp(times.type):
        sent = batch.column(TIMESTAMP).cast(times.type) if TIMESTAMP in batch.schema.names else None
        if sent is not None:
            times = pc.if_else(pc.and_(batch.column(TOMBSTONE), pc.is_null(times)), sent, times)
    if times.null_count:
        keys = struct_of({name: batch.column(name) for name in shape.key}, batch.num_rows)
        first = to_python(keys.filter(pc.is_null(times)).slice(0, 1))[0]
        raise SchemaMismatchError(
            f"{what}: {times.null_count} record(s) have null in {name!r}, by which the table keeps what is newest; the "
            f"first is of {first}.",
            "Filter them out, or give them a time: coalesce(…).",
            column=name,
        )
    return times

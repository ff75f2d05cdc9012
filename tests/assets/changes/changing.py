"""Real change streams in a lake, and the changes that are decoded of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.sources.entries import open_changes
from dagster_adjunct.assets.sources.order_samples import find_order_samples
from dagster_adjunct.assets.unbounded.changes import check_spark_needs, read_changes
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.foreign_streams import stored, stored_table

VALUES = Schema.of(value="string")


class Change(NamedTuple):
    """One decoded change; `deleted` rows show what they have of their columns."""

    offset: int
    row: tuple[Any, ...]
    deleted: bool
    position: int | None
    problem: str | None


def dataset(**more: Any) -> AdjunctDataset:
    """Return a dataset on the stream `changes`, keyed by id unless said otherwise."""
    return unbounded_dataset(
        "table", input="lake.changes", **{"key": "id", "broadcast": True, **more}
    )


def stream(world: World, schema: Schema, rows: Sequence[tuple[Any, ...]], **more: Any) -> None:
    """Make the stream `changes` with these records; a row that is one longer ends with whether
    it is a tombstone.
    """
    world.streams.create("changes", schema=schema, **{"partitions": 1, **more})
    send(world, rows)


def foreign_stream(world: World, schema: Schema, rows: Sequence[tuple[Any, ...]]) -> None:
    """Make the stream `changes` of a system that checks nothing; bytes stand for texts that are
    not UTF-8.
    """
    world.streams.create("changes", schema=stored(schema), partitions=1)
    world.foreign["changes"] = schema
    columns: dict[str, Any] = {}
    for index, field in enumerate(schema.to_arrow()):
        values = [row[index] for row in rows]
        if field.type == pa.string():
            columns[field.name] = pa.array(
                [v.encode() if isinstance(v, str) else v for v in values], pa.binary()
            )
        else:
            columns[field.name] = pa.array(values, field.type)
    columns["__tombstone"] = pa.array(
        [len(row) > len(schema.names) and row[-1] for row in rows], pa.bool_()
    )
    world.streams.append("changes", stored_table(pa.table(columns)), producer="test", sequence=1)


def send(world: World, rows: Sequence[tuple[Any, ...]], name: str = "changes") -> None:
    schema = world.streams.info(name).schema
    assert schema is not None
    columns: dict[str, Any] = {
        field.name: pa.array([row[index] for row in rows], field.type)
        for index, field in enumerate(schema.to_arrow())
    }
    marks = [len(row) > len(schema.names) and row[-1] for row in rows]
    columns["__tombstone"] = pa.array(marks, pa.bool_())
    world.streams.append(name, pa.table(columns), producer="test", sequence=world._next(name))


def envelopes(world: World, *values: Any) -> None:
    """Make the stream `changes` of envelopes: dicts as JSON, texts as they are, None as a
    tombstone.
    """
    stream(world, VALUES, [as_record(value) for value in values])


def as_record(value: Any) -> tuple[Any, ...]:
    if value is None:
        return (None, True)
    return (value if isinstance(value, str) else json.dumps(value), False)


def changes_of(world: World, spec: AdjunctDataset) -> Any:
    """Return the changes that the whole stream holds, as the world's engine has them."""
    source = open_changes(world.systems, spec)
    if world.spark is IN_PROCESS:
        check_spark_needs(source)
    ranges = {
        ssp: (span.start, span.end) for ssp, span in world.streams.all_ranges("changes").items()
    }
    samples = find_order_samples(source, ranges, world.spark)
    return read_changes(source, ranges, world.spark, samples)


def rows_of(rows: Any) -> list[dict[str, Any]]:
    """Return rows of either engine as dicts."""
    return (
        rows.to_pylist() if isinstance(rows, pa.Table) else [row.asDict() for row in rows.collect()]
    )


def decoded(world: World, spec: AdjunctDataset) -> list[Change]:
    """Return the changes that the whole stream holds, by offset."""
    columns = len(open_changes(world.systems, spec).schema.names)
    changes = [
        Change(
            row["__offset"],
            tuple(row.values())[:columns],
            row["__tombstone"],
            row["__position"],
            row["__problem"],
        )
        for row in rows_of(changes_of(world, spec))
    ]
    return sorted(changes, key=lambda change: (change.offset, not change.deleted, repr(change.row)))


def problems(world: World, spec: AdjunctDataset) -> dict[int, str]:
    """Return what is wrong with changes, by offset."""
    return {
        change.offset: change.problem
        for change in decoded(world, spec)
        if change.problem is not None
    }


def applied(changes: Sequence[Change], key: int = 0) -> dict[Any, tuple[Any, ...]]:
    """Return the table that changes make, in order of position; the key is the first column
    unless said otherwise.
    """
    table: dict[Any, tuple[Any, ...]] = {}
    for change in sorted(changes, key=lambda event: (event.position or 0, event.offset)):
        assert change.problem is None, change.problem
        table.pop(change.row[key], None)
        if not change.deleted:
            table[change.row[key]] = change.row
    return table

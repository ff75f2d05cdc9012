"""Arrow batches in calls of a table: the same as their rows, and told where they can't be."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.errors import (
    ConfigurationError,
    NullKeyError,
    RecordNotFoundError,
    SchemaMismatchError,
    TableError,
)
from dagster_adjunct.tables import (
    ArrowEntries,
    BatchProvider,
    BlockingTable,
    MemoryTable,
    Operation,
    OperationKind,
    PostgresTable,
    RemoteTable,
    RowEntries,
    SqliteTable,
)

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
COLUMNS = {"id": "string", "n": "bigint", "at": "timestamp", "tags": "array<string>"}
ROWS = [
    {"id": f"k{number}", "n": number, "at": AT, "tags": ["a", None][: number % 3]}
    for number in range(25)
]
SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "n": pa.int64(),
        "at": pa.timestamp("us", "UTC"),
        "tags": pa.list_(pa.string()),
    }
)


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.server)])
def store(request: Any, tmp_path: Path) -> Any:
    if request.param == "memory":
        memory = MemoryTable(tmp_path.name)
        memory.clear()
        return memory
    if request.param == "sqlite":
        return SqliteTable(tmp_path / "t.sqlite", "t", "id", columns=COLUMNS, create=True)
    server = request.getfixturevalue("postgres_server")
    connect = {
        "host": "127.0.0.1",
        "port": str(server.port),
        "user": "adjunct",
        "dbname": "adjunct",
    }
    return PostgresTable(
        f"arrow_{tmp_path.name}"[-50:], "id", connect=connect, columns=COLUMNS, create=True
    )


def table_over(store: Any, **more: Any) -> BlockingTable[Any, Any, Any]:
    return BlockingTable(
        RemoteTable("t", key="id", read_function=store, write_function=store, **more)
    )


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


@pytest.mark.parametrize("size", [1000, 7])
def test_rows_of_arrow_are_put_and_set_as_records_are(store: Any, size: int) -> None:
    batch = batch_of(ROWS)
    with table_over(store, batches=BatchProvider(size=size)) as table:
        table.put_all(batch)
        assert table.get_all([row["id"] for row in ROWS]) == {row["id"]: row for row in ROWS}
        later = pa.Table.from_batches([batch.slice(0, 3), batch.slice(3, 2)]).select(["id", "n"])
        table.update_all(later.set_column(1, "n", pa.array([10 * n for n in range(5)])))
        records = table.get_all(["k2", "k7"])
        assert (records["k2"]["n"], records["k2"]["at"], records["k7"]["n"]) == (20, AT, 7)
        assert (table.metrics.records.writes, table.metrics.records.updates) == (25, 5)


def test_rows_of_one_key_take_effect_in_their_order_and_missing_ones_are_named(store: Any) -> None:
    with table_over(store) as table:
        table.put_all(batch_of([{"id": "a", "n": 1}, {"id": "b", "n": 2}, {"id": "a", "n": 3}]))
        assert table.get("a")["n"] == 3
        with pytest.raises(RecordNotFoundError) as caught:
            table.update_all(pa.table({"id": ["c", "b"], "n": [7, 8]}))
        assert (caught.value.table, caught.value.keys) == ("t", ("c",))
        assert table.get("b")["n"] == 8


def test_a_table_with_newest_by_goes_by_the_column_of_the_rows() -> None:
    memory = MemoryTable("arrow by time")
    memory.clear()
    with table_over(memory, newest_by="n") as table:
        table.put_all(batch_of([{"id": "a", "n": 5}, {"id": "a", "n": 3}]))
        assert (table.get("a")["n"], table.metrics.records.skipped) == (5, 1)


def test_keys_of_several_columns_are_in_the_order_of_the_table() -> None:
    memory = MemoryTable("arrow of two")
    memory.clear()
    table: Any = RemoteTable(
        "t", key=["site", "machine"], read_function=memory, write_function=memory
    )
    rows = {"n": [1], "machine": pa.array(["m1"]).dictionary_encode(), "site": ["north"]}
    asyncio.run(table.put_all(pa.table(rows)))
    assert memory.records() == {("north", "m1"): {"n": 1, "machine": "m1", "site": "north"}}


@pytest.mark.parametrize(
    ("rows", "kind", "says"),
    [
        (
            pa.table({"n": [1]}),
            SchemaMismatchError,
            "no column 'id', which is part of the key; it has n",
        ),
        (
            pa.table([[1], [2], [3]], names=["id", "n", "n"]),
            SchemaMismatchError,
            "column 'n' occurs twice",
        ),
        (
            pa.table({"id": [[1]], "n": [1]}),
            SchemaMismatchError,
            "key column 'id' .* is list<.*can't be a key",
        ),
        (pa.table({"id": ["a", None], "n": [1, 2]}), NullKeyError, "got None as a key to put"),
    ],
)
def test_batches_that_can_not_be_entries_are_refused_before_anything_is_sent(
    rows: Any, kind: Any, says: str
) -> None:
    memory = MemoryTable("arrow refused")
    memory.clear()
    with table_over(memory) as table:
        with pytest.raises(kind, match=says):
            table.put_all(rows)
        table.put_all(pa.table({"id": pa.array([], pa.string())}))
    assert memory.records() == {}


def test_an_operation_takes_entries_and_says_how_a_batch_becomes_some() -> None:
    memory = MemoryTable("arrow operations")
    memory.clear()
    batch = batch_of(ROWS[:2])
    with table_over(memory) as table:
        for wrong in (batch, pa.Table.from_batches([batch]), [("a", {})], 5, None):
            with pytest.raises(
                TableError, match=r"table t got an Operation whose entries are a \w+"
            ):
                table.send(Operation(OperationKind.PUT, wrong))  # type: ignore[arg-type]
        with pytest.raises(TableError, match=r"ArrowEntries.of\(batch, key\)"):
            table.send(Operation(OperationKind.PUT, batch))  # type: ignore[arg-type]
        assert table.send(Operation(OperationKind.PUT, ArrowEntries.of(batch, "id"))).done == 2
        assert table.send(Operation(OperationKind.GET, RowEntries(["k1"]))).records == [ROWS[1]]
    with pytest.raises(ConfigurationError) as caught:
        ArrowEntries.of([{"id": "a"}], "id")  # type: ignore[arg-type]
    assert caught.value.argument == "batch"

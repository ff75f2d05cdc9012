"""Arrow batches go through all layers, and are taken apart only where there is a reason."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import NullKeyError, SchemaMismatchError
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.arrow import ArrowEntries
from dagster_adjunct.resources.tables.operation import (
    Operation,
    OperationKind,
    State,
    UpdateContract,
)
from dagster_adjunct.resources.tables.table import RemoteTable


def entries_of(keys, records, defaults=None) -> ArrowEntries:
    key = pa.StructArray.from_arrays([pa.array(keys, pa.int64())], ["id"])
    kind = pa.struct({"n": pa.int64()})
    begin = None if defaults is None else pa.array(defaults, kind)
    return ArrowEntries(key, pa.array(records, kind), lambda array: array.to_pylist(), begin)


class Noting(MemoryTable):
    seen: list[tuple[str, type, int]]

    async def send(self, operation):
        self.seen.append((operation.kind.value, type(operation.entries), len(operation)))
        return await super().send(operation)


@pytest.fixture
def store(request) -> Noting:
    store = Noting(request.node.name)
    store.clear()
    store.seen = []
    return store


def table_over(store, **settings) -> RemoteTable:
    return RemoteTable("t", key="id", read_function=store, write_function=store, **settings)


def test_a_batch_is_cut_by_slices(store):
    entries = entries_of(range(10), [{"n": n} for n in range(10)])
    table = table_over(store, batch_size=4)
    assert asyncio.run(table.send(Operation(OperationKind.PUT, entries))).done == 10
    assert store.seen == [
        ("put", ArrowEntries, 4),
        ("put", ArrowEntries, 4),
        ("put", ArrowEntries, 2),
    ]
    assert asyncio.run(table.get(9)) == {"n": 9}


def test_a_null_record_deletes_in_the_order_of_its_key(store):
    table = table_over(store)
    asyncio.run(table.put(2, {"n": 0}))
    entries = entries_of([1, 2, 1, 3, 3], [{"n": 1}, None, {"n": 2}, {"n": 3}, None])
    asyncio.run(table.send(Operation(OperationKind.PUT, entries)))
    assert asyncio.run(table.get_all([1, 2, 3])) == {1: {"n": 2}}
    assert store.seen[1:3] == [("put", ArrowEntries, 3), ("delete", store.seen[2][1], 2)]


def test_a_null_key_is_refused_before_anything_is_sent(store):
    with pytest.raises(NullKeyError) as caught:
        asyncio.run(
            table_over(store).send(
                Operation(OperationKind.PUT, entries_of([1, None], [{"n": 1}, {"n": 2}]))
            )
        )
    assert caught.value.table == "t"
    assert store.seen == []


def test_a_value_that_python_does_not_have_is_refused_before_anything_is_sent(store):
    times = pa.array([0, 253_402_300_800_000_000], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    for bad in (
        times,
        pa.ListArray.from_arrays([0, 1, 2], times),
        pa.array([b"a", b"\xff"]).view(pa.string()),
    ):
        with pytest.raises(SchemaMismatchError) as caught:
            asyncio.run(table_over(store).put_all(pa.table({"id": [1, 2], "n": bad})))
        assert (caught.value.column, caught.value.row) == ("n", 1)
    assert store.seen == []


def test_defaults_of_a_batch_are_held_to_its_contract(store):
    table = table_over(store)
    entries = entries_of([1, 2], [{"n": 1}, {"n": 2}], [{"n": 0}, None])
    only = Operation(OperationKind.UPDATE, entries, contract=UpdateContract.UPDATE_ONLY)
    assert asyncio.run(table.send(only)).places(State.MISSING) == [0, 1]
    outcomes = asyncio.run(table.send(Operation(OperationKind.UPDATE, entries)))
    assert (outcomes.defaults_put, outcomes.places(State.MISSING)) == (1, [1])
    assert asyncio.run(table.get_all([1, 2])) == {1: {"n": 1}}

"""What a lookup brings from every backend: each column as its Spark type, None for keys without
a record.
"""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.table_backends.columns import (
    arrow_column_from_records,
    to_spark_type,
)
from dagster_adjunct.resources.tables.cache import Cache
from dagster_adjunct.resources.tables.spark import BulkReader
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.resources.table_backends.fresh_functions import COLUMNS
from tests.resources.table_backends.test_every_backend import new_store  # noqa: F401 - a fixture

RECORD = {
    "a": 7,
    "b": "ключ",
    "c": 0.5,
    "n": 2**40,
    "at": datetime(2013, 7, 1, tzinfo=UTC),
    "tags": ["x", "y"],
    "doc": {"x": 1},
}


@pytest.mark.parametrize("cache", [None, Cache(absent=True)])
def test_records_come_as_their_declared_types_and_no_key_is_asked_twice(new_store, cache) -> None:  # noqa: F811
    store = new_store()
    with BlockingTable(
        RemoteTable("t", key="id", read_function=store, write_function=store)
    ) as writer:
        writer.put_all([(f"k{i}", {"id": f"k{i}", **RECORD}) for i in range(150)])
        kept = writer.get_all([f"k{i}" for i in range(150)])
    reader = BulkReader(
        RemoteTable("t", key="id", read_function=store, batch_size=60, cache=cache), None
    )
    keys = [f"k{i}" for i in range(0, 300, 2)]
    try:
        first = reader.read(keys, (), 1)
        again = reader.read(keys, (), 1)
    finally:
        reader.close()
    assert first.records == again.records == [kept.get(key) for key in keys]
    assert (first.metrics.records.reads, first.metrics.records.found) == (150, 75)
    assert again.metrics.cache.hits == (0 if cache is None else 150)
    assert (again.metrics.store.requests == 0) is (cache is not None)
    for name, declared in COLUMNS.items():
        kind = to_spark_type(declared)
        assert kind is not None
        column = arrow_column_from_records("t", keys, first.records, name, kind, list(COLUMNS))
        assert column.type == arrow_type(kind)
        if name != "id":
            expected = {**RECORD, "doc": '{"x": 1}'}[name]
            assert column.to_pylist() == [expected if record else None for record in first.records]


def test_a_key_that_no_record_can_have_is_looked_up_without_an_error(new_store) -> None:  # noqa: F811
    store = new_store()
    with BlockingTable(
        RemoteTable("t", key="id", read_function=store, write_function=store)
    ) as table:
        table.put("a", {"id": "a", **RECORD})
        assert list(table.get_all(["k" * 3000, "a"])) == ["a"]

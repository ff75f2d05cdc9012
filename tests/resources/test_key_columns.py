"""A key that names a column which is not there is refused where it is declared, or where the
first record comes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.key_value_rows import KeyValueRows
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.redis import RedisTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable

COLUMNS = {"customer": "string", "at": "timestamp", "n": "bigint"}
Declared = Callable[..., Any]
BACKENDS: dict[str, Declared] = {
    "sqlite": lambda key, columns: SqliteTable("t.sqlite", "t", key, columns=columns),
    "postgres": lambda key, columns: PostgresTable("t", key, dsn_env="DSN", columns=columns),
    "redis": lambda key, columns: RedisTable(prefix="t", key=key, columns=columns, url_env="URL"),
    "dynamodb": lambda key, columns: DynamoDbTable("t", key, columns=columns),
    "key-value rows": lambda key, columns: KeyValueRows("/lake", "s", "t", key, columns=columns),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("key", ["custommer", "Customer", ("customer", "town")])
def test_a_key_that_the_declared_columns_lack_is_refused_when_declared(
    backend: str, key: Any
) -> None:
    assert BACKENDS[backend]("customer", COLUMNS).key == ("customer",)
    with pytest.raises(ConfigurationError) as caught:
        BACKENDS[backend](key, COLUMNS)
    assert caught.value.argument == "key"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_with_another_key_than_its_function_is_refused_when_declared(backend: str) -> None:
    function = BACKENDS[backend]("customer", COLUMNS)
    assert RemoteTable("sums", key="customer", write_function=function, newest_by="at").key == (
        "customer",
    )
    for functions in ({"read_function": function}, {"write_function": function}):
        for key in ("town", ("customer", "town")):
            with pytest.raises(ConfigurationError) as caught:
                RemoteTable("sums", key=key, **functions)
            assert (caught.value.argument, caught.value.table) == ("key", "sums")
    with pytest.raises(ConfigurationError) as caught:
        RemoteTable("sums", key="customer", write_function=function, newest_by="seen_at")
    assert (caught.value.argument, caught.value.table) == ("newest_by", "sums")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("key", ["at", ("customer", "at")])
def test_records_are_not_ordered_by_a_part_of_their_key(backend: str, key: Any) -> None:
    function = BACKENDS[backend](key, COLUMNS)
    with pytest.raises(ConfigurationError) as caught:
        RemoteTable("sums", key=key, write_function=function, newest_by="at")
    assert (caught.value.argument, caught.value.table) == ("newest_by", "sums")


def test_a_key_of_another_type_than_its_column_is_refused_when_declared() -> None:
    assert DynamoDbTable("t", {"n": "int"}, columns=COLUMNS).key == ("n",)
    with pytest.raises(ConfigurationError) as caught:
        DynamoDbTable("t", {"customer": "bigint"}, columns=COLUMNS)
    assert (caught.value.argument, caught.value.table) == ("key", "t")


def test_the_columns_of_a_key_may_be_in_another_order_than_the_stores() -> None:
    function = BACKENDS["sqlite"](("customer", "at"), COLUMNS)
    assert RemoteTable("sums", key=("at", "customer"), write_function=function).key == (
        "at",
        "customer",
    )


def test_a_key_that_the_stored_table_lacks_is_named(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "t.sqlite") as connection:
        connection.execute("CREATE TABLE t (customer TEXT PRIMARY KEY, n INTEGER)")
    function = SqliteTable(tmp_path / "t.sqlite", "t", "custommer")
    table = BlockingTable(RemoteTable("t", key="custommer", read_function=function))
    with table, pytest.raises(SchemaMismatchError) as caught:
        table.get("a")
    assert caught.value.column == "custommer"


@pytest.fixture
def streams() -> LakeStreams:
    streams = LakeStreams(Lake(InMemoryStore(), "memory"))
    streams.create(
        "s",
        schema=Schema.of(town="string", id="bigint", value="double"),
        key=["town", "id"],
        partitions=2,
    )
    return streams


def test_rows_without_a_column_of_the_key_are_refused_and_a_null_is_a_value(
    streams: LakeStreams,
) -> None:
    good = {"town": "a", "id": 1, "value": 1.0}
    for rows, column in (
        ([{"value": 1.0}], "town"),
        ([{"town": "a", "value": 1.0}, {"town": "a", "id": 2}], "id"),
        ([{"id": 1, "__tombstone": True}], "town"),
        ([{}], "town"),
    ):
        with pytest.raises(SchemaMismatchError) as caught:
            streams.append("s", rows, producer="p", sequence=0)
        assert caught.value.column == column
    assert streams.append("s", [], producer="p", sequence=1).rows == 0
    appended = streams.append("s", [good, {"town": None, "id": None}], producer="p", sequence=2)
    assert appended.rows == 2


def test_tables_and_frames_without_a_column_of_the_key_are_refused(streams: LakeStreams) -> None:
    table = pa.table({"town": ["a"], "value": [1.0]})
    for data in (table, table.to_batches()[0], table.to_pandas(), pd.DataFrame({"value": [1.0]})):
        with pytest.raises(SchemaMismatchError) as caught:
            streams.append("s", data, producer="p", sequence=0)
        assert caught.value.stream == "lake.s"


@pytest.mark.parametrize(
    ("argument", "options"),
    [("key", {"key": ["twon"]}), ("timestamp", {"key": ["town"], "timestamp": "att"})],
)
def test_a_stream_names_only_columns_that_it_has(
    streams: LakeStreams, argument: str, options: Any
) -> None:
    with pytest.raises(SchemaMismatchError) as caught:
        streams.create(
            "t", schema=Schema.of(town="string", at="timestamp"), partitions=1, **options
        )
    assert caught.value.column in ("twon", "att")

"""Key-value tables as DataFrames, against what plain dictionaries and the table itself say."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.key_value import (
    AvroSerializer,
    BytesSerializer,
    FunctionSerializer,
    IntegerSerializer,
    JsonSerializer,
    KeyValueTable,
    KeyValueTableConfiguration,
    ModelSerializer,
    TextSerializer,
)
from dagster_adjunct.resources.errors import (
    KeyValueTableNotFoundError,
    KeyValueTableSealedError,
    NullKeyError,
    SchemaMismatchError,
    SerializationError,
    ValueTooLongError,
)
from dagster_adjunct.resources.key_value.frames import read_key_value_table, write_key_value_table
from dagster_adjunct.resources.key_value.segment import TableId
from dagster_adjunct.resources.key_value_backends.sqlite import SqliteSegments
from tests.resources.key_value_frames import on_a_cluster
from tests.resources.key_value_frames.plane import Plane
from tests.servers.postgres import PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
_numbers = count(1)
SEATS = (
    '{"type": "record", "name": "Seats", "fields": [{"name": "seats", "type": ["null", "int"]}]}'
)


def new_table(
    folder: Path, key: Any = None, value: Any = None, partitions: int = 4, **limits: int
) -> KeyValueTable[Any, Any]:
    """Return a new, empty table."""
    table = TableId("suite", f"t{next(_numbers)}", f"{next(_numbers):016x}")
    backend = SqliteSegments(folder / "suite.key-values")
    backend.create(table, partitions)
    configuration = KeyValueTableConfiguration(partitions, **limits)
    return KeyValueTable(
        table, configuration, backend, key or TextSerializer(), value or TextSerializer()
    )


async def contents(
    table: KeyValueTable[Any, Any],
) -> dict[tuple[str | None, Any], tuple[Any, bytes]]:
    """Return what the table says that it holds."""
    entries = {}
    async for page in table.all_entries():
        for entry in page.items:
            entries[(entry.key.family, entry.key.key)] = (entry.value, entry.version.to_bytes())
    return entries


def stored(table: KeyValueTable[Any, Any]) -> dict[tuple[str | None, Any], Any]:
    return {key: value for key, (value, _) in asyncio.run(contents(table)).items()}


def fill(table: KeyValueTable[Any, Any], entries: Iterable[tuple[str | None, Any, Any]]) -> None:
    async def put_each() -> None:
        for family, key, value in entries:
            await table.put(key, value, family=family)

    asyncio.run(put_each())


def test_a_frame_has_each_entry_once_in_the_partitions_of_the_table(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = new_table(tmp_path)
    fill(table, [(None if n % 3 else f"family {n % 5}", f"k{n}", f"v{n}") for n in range(60)])
    frame = read_key_value_table(table, spark=spark, page_size=7)
    assert frame.rdd.getNumPartitions() == 4
    rows = frame.collect()
    by_key = {(row.family, row.key): (row.value, bytes(row.version)) for row in rows}
    assert len(rows) == len(by_key) == 60
    assert by_key == asyncio.run(contents(table))
    in_partitions = (
        frame.selectExpr("spark_partition_id() AS p", "family")
        .where("family IS NOT NULL")
        .distinct()
    )
    assert in_partitions.count() == 5  # one for each family


@pytest.mark.parametrize(
    ("key", "value", "entry", "kinds", "row"),
    [
        (
            IntegerSerializer(),
            BytesSerializer(),
            (-(2**63), b"\0\xff"),
            ("bigint", "binary"),
            (-(2**63), b"\0\xff"),
        ),
        (
            TextSerializer(),
            JsonSerializer(),
            ("ключ", {"b": [1, None]}),
            ("string", "string"),
            ("ключ", '{"b":[1,null]}'),
        ),
        (
            TextSerializer(),
            ModelSerializer(Plane),
            ("N1", Plane(tail="N1", seats=9)),
            ("string", "string"),
            ("N1", '{"tail":"N1","seats":9}'),
        ),
        (
            BytesSerializer(),
            AvroSerializer(SEATS),
            (b"N1", {"seats": 9}),
            ("binary", "string"),
            (b"N1", '{"seats": {"int": 9}}'),
        ),
        (
            FunctionSerializer(
                lambda text: text[::-1].encode(), lambda stored: stored.decode()[::-1]
            ),
            TextSerializer(),
            ("abc", ""),
            ("binary", "string"),
            (b"cba", ""),
        ),
    ],
    ids=["integers and bytes", "JSON", "models", "Avro", "own"],
)
def test_what_each_serializer_writes_is_a_column_that_can_be_written_again(
    spark: SparkSession, tmp_path: Path, key: Any, value: Any, entry: Any, kinds: Any, row: Any
) -> None:
    table, copy = new_table(tmp_path, key, value), new_table(tmp_path, key, value)
    fill(table, [(None, *entry), ("f", *entry)])
    frame = read_key_value_table(table, spark=spark)
    types = dict(frame.dtypes)
    assert (types["key"], types["value"]) == kinds
    assert [
        tuple(read_row) for read_row in frame.where("family = 'f'").select("key", "value").collect()
    ] == [row]
    assert write_key_value_table(frame, copy, family="family").entries == 2
    assert stored(copy) == stored(table) == {(None, entry[0]): entry[1], ("f", entry[0]): entry[1]}


def test_a_frame_is_written_over_what_is_there_and_again_without_a_difference(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = new_table(tmp_path, IntegerSerializer(), partitions=3)
    fill(table, [(None, 0, "old"), (None, -1, "stays")])
    frame = spark.range(2500).selectExpr(
        "CAST(id AS INT) AS number", "CONCAT('v', id) AS text", "id % 2 = 0 AS other"
    )
    expected = {(None, n): f"v{n}" for n in range(2500)} | {(None, -1): "stays"}
    for _ in range(2):
        done = write_key_value_table(frame, table, key="number", value="text")
        assert (done.rows, done.entries) == (2500, 2500)
        assert stored(table) == expected


def test_of_several_rows_of_a_key_the_last_is_written_or_they_are_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = new_table(tmp_path)
    rows = [("f", f"k{n % 10}", f"v{n}", n) for n in range(100)]
    frame = spark.createDataFrame(
        rows, "family string, key string, value string, at int"
    ).repartition(5, "value")
    done = write_key_value_table(frame, table, family="family", order_by="at")
    assert (done.rows, done.entries) == (100, 10)
    assert stored(table) == {("f", f"k{n}"): f"v{90 + n}" for n in range(10)}
    with pytest.raises(SchemaMismatchError, match=r"two rows of the key b'k\d' of family 'f',"):
        write_key_value_table(frame, table, family="family")
    with pytest.raises(SchemaMismatchError, match="with the same order, 0"):
        write_key_value_table(
            frame.withColumn("at", frame["at"] * 0), table, family="family", order_by="at"
        )
    # The same key with and without a family, or in another one, is another key.
    apart = spark.createDataFrame(
        [(None, "k", "1"), ("f", "k", "2"), ("g", "k", "3")],
        "family string, key string, value string",
    )
    assert write_key_value_table(apart, table, family="family").entries == 3


@pytest.mark.parametrize(
    ("rows", "kinds", "named", "error"),
    [
        ([("k", None)], "key string, value string", {}, SchemaMismatchError),
        ([(None, "v")], "key string, value string", {}, NullKeyError),
        ([("k", "")], "key string, value string", {"family": "value"}, SerializationError),
        ([("k", "v" * 21)], "key string, value string", {}, ValueTooLongError),
        ([(1, "v")], "key int, value string", {}, SchemaMismatchError),
        ([("k", "v")], "key string, other string", {}, SchemaMismatchError),
        ([("k", "v")], "key string, value string", {"order_by": "at"}, SchemaMismatchError),
    ],
    ids=["no value", "no key", "empty family", "long value", "other type", "no column", "no order"],
)
def test_rows_that_the_table_does_not_take_are_refused_as_what_they_are(
    spark: SparkSession,
    tmp_path: Path,
    rows: Any,
    kinds: str,
    named: dict[str, str],
    error: type[Exception],
) -> None:
    table = new_table(tmp_path, longest_value=20)
    with pytest.raises(error) as raised:
        write_key_value_table(spark.createDataFrame(rows, kinds), table, **named)
    assert str(table.id) in str(raised.value)
    assert stored(table) == {}


@pytest.mark.parametrize("column", ["key", "value", "family"])
def test_text_of_a_frame_that_is_not_utf_8_is_refused_by_its_column(
    spark: SparkSession, tmp_path: Path, column: str
) -> None:
    table = new_table(tmp_path)
    columns = {"family": "'f'", "key": "'k'", "value": "'v'"} | {column: "cast(x'ff' as string)"}
    frame = spark.sql(f"SELECT {', '.join(f'{text} AS {name}' for name, text in columns.items())}")
    with pytest.raises(SchemaMismatchError) as caught:
        write_key_value_table(frame, table, family="family")
    assert caught.value.column == column
    assert stored(table) == {}


def test_a_sealed_table_is_read_and_not_written_and_a_deleted_one_neither(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = new_table(tmp_path)
    fill(table, [(None, "k", "v")])
    table.backend.seal(table.id, 4)
    frame = read_key_value_table(table, spark=spark)
    with pytest.raises(KeyValueTableSealedError):
        write_key_value_table(frame, table)
    assert frame.count() == 1
    table.backend.delete(table.id, 4)
    with pytest.raises(KeyValueTableNotFoundError):
        write_key_value_table(
            spark.createDataFrame([("k", "v")], "key string, value string"), table
        )
    with pytest.raises(Exception, match="KeyValueTableNotFoundError"):
        frame.count()


def test_json_is_checked_and_written_in_its_one_form(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path, value=JsonSerializer())
    frame = spark.createDataFrame([("k", '{ "b": 1, "a": [ ] }')], "key string, value string")
    write_key_value_table(frame, table)
    assert stored(table) == {(None, "k"): json.loads('{"a": [], "b": 1}')}
    with pytest.raises(SerializationError):
        write_key_value_table(
            spark.createDataFrame([("k", "{")], "key string, value string"), table
        )


@pytest.mark.long
@pytest.mark.server
def test_a_program_of_a_users_own_writes_and_reads_them_on_a_cluster(
    spark_cluster: str, postgres_server: PostgresServer
) -> None:
    command = [sys.executable, on_a_cluster.__file__, spark_cluster, str(postgres_server.port)]
    environment = {**os.environ, "ADJUNCT_LAKE_SHARED": "true"}  # it uses no lake
    reported = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert reported.returncode == 0, reported.stderr[-3000:]
    assert json.loads(reported.stdout.splitlines()[-1]) == [20_000, 4, 20_000, 20_000]

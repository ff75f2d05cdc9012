"""`read_key_value_table`: the entries of a key-value table as a DataFrame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.key_value.key_value_table import KeyValueTable
from dagster_adjunct.resources.key_value.serializers import BytesSerializer
from dagster_adjunct.resources.key_value.table_entries import TableEntry
from dagster_adjunct.resources.key_value_frames.column_forms import form_of
from dagster_adjunct.resources.schemas.schema import arrow_type
from dagster_adjunct.resources.spark.given_session import session_of
from dagster_adjunct.resources.spark.spark_errors import wrapped

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Reader = tuple[str, Callable[[bytes], Any]]
"""A column's Spark type, and what makes its values of stored bytes."""


def read_key_value_table(
    spark: SparkSession | Callable[[], SparkSession], table: KeyValueTable[Any, Any], *, page_size: int = 1000
) -> DataFrame:
    """Return the entries as `family` (string, null where there is none), `key`, `value` and `version` (binary).

    Keys and values have the types that the table's serializers stand for: text is a string, whole numbers are bigint,
    JSON, models and Avro their JSON as a string, all else is binary. There is one Spark partition for each of the
    table's, its rows in the order of their keys' bytes, at most `page_size` of them in memory at a time. The table is
    read when the frame is, and again each time that it is: cache it to go on from one reading.

    While others write, each key is met at most once, and one that is there from beginning to end is met; rows of
    different pages are of different moments. Seal the table for a frame of one moment.
    """
    key, value = form_of(table.key_serializer), form_of(table.value_serializer)
    readers = ((key.type, key.from_bytes), (value.type, value.from_bytes))  # workers need nothing else of them
    stored = KeyValueTable(table.id, table.configuration, table.backend, BytesSerializer(), BytesSerializer())

    def read(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from wrapped(_pages(stored, number, page_size, readers))

    partitions = table.configuration.partitions
    numbers = session_of(spark).range(0, partitions, 1, partitions)  # each number in a partition of its own
    return numbers.mapInArrow(read, f"family string, key {key.type}, value {value.type}, version binary")


def _pages(
    stored: KeyValueTable[bytes, bytes], number: int, page_size: int, readers: tuple[Reader, Reader]
) -> Iterator[Any]:
    """Yield the entries of a partition as Arrow batches, one a page."""
    with asyncio.Runner() as loop:
        try:
            pages = stored.all_entries(partitions=[number], page_size=page_size)
            while (page := loop.run(pages.next_page())) is not None:
                yield _batch(page.items, *readers)
        finally:
            loop.run(stored.close())


def _batch(entries: Sequence[TableEntry[bytes, bytes]], key: Reader, value: Reader) -> Any:
    import pyarrow as pa

    columns = {
        "family": pa.array([entry.key.family for entry in entries], pa.string()),
        "key": pa.array([key[1](entry.key.key) for entry in entries], arrow_type(key[0])),
        "value": pa.array([value[1](entry.value) for entry in entries], arrow_type(value[0])),
        "version": pa.array([entry.version.to_bytes() for entry in entries], pa.binary()),
    }
    return pa.RecordBatch.from_pydict(columns)

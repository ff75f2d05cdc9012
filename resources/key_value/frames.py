"""Reading a key-value table as a DataFrame, and writing the rows of a DataFrame to one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import AdjunctError, NullKeyError, SchemaMismatchError
from dagster_adjunct.resources.key_value import segment
from dagster_adjunct.resources.key_value.segment import SegmentChange
from dagster_adjunct.resources.key_value.serializers import (
    AvroSerializer,
    BytesSerializer,
    IntegerSerializer,
    JsonSerializer,
    ModelSerializer,
    Serializer,
    TextSerializer,
)
from dagster_adjunct.resources.key_value.table import (
    BlockingKeyValueTable,
    KeyValueTable,
    OpenTable,
)
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.schema import named_column as sql_column
from dagster_adjunct.resources.schemas.types import arrow_type, type_from_spark
from dagster_adjunct.resources.schemas.values import first_unreadable
from dagster_adjunct.resources.spark import tasks
from dagster_adjunct.resources.spark.in_process import resolve_session
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The Spark type of keys and values, by their serializer:
#
# TextSerializer       string
# IntegerSerializer    bigint
# BytesSerializer      binary
# JsonSerializer       string: the JSON
# ModelSerializer      string: the model's JSON
# AvroSerializer       string: JSON as Avro writes it (of a union, {"type": value})
# any other            binary: the stored bytes


@dataclass(frozen=True, slots=True)
class ColumnForm:
    """A column's Spark type, and the conversions between values and stored bytes, which raise
    SerializationError.
    """

    type: str
    from_bytes: Callable[[bytes], Any]
    to_bytes: Callable[[Any], bytes]


def column_form(serializer: Serializer[Any]) -> ColumnForm:
    """Return the form of a serializer's column."""
    if isinstance(serializer, TextSerializer):
        return ColumnForm("string", serializer.from_bytes, serializer.to_bytes)
    if isinstance(serializer, IntegerSerializer):
        return ColumnForm("bigint", serializer.from_bytes, serializer.to_bytes)
    if isinstance(serializer, JsonSerializer | ModelSerializer):
        text = TextSerializer()
        return ColumnForm(
            "string",
            text.from_bytes,
            lambda json: serializer.to_bytes(serializer.from_bytes(text.to_bytes(json))),
        )
    if isinstance(serializer, AvroSerializer):
        return ColumnForm(
            "string",
            lambda stored: serializer.to_json(serializer.from_bytes(stored)),
            lambda json: serializer.to_bytes(serializer.from_json(json)),
        )
    return ColumnForm("binary", bytes, bytes)


_AT_ONCE = 8  # concurrent requests
_WRITERS = partial(segment.threads, "key-value-frames", _AT_ONCE)

Stored = OpenTable[bytes, bytes]
"""A table whose keys and values are the stored bytes."""


def _table_opener(table: KeyValueTable[Any, Any]) -> Callable[[], Stored]:
    """Return a picklable function that opens the table in a Spark worker, with keys and values
    as stored bytes.
    """
    return partial(
        OpenTable,
        table.id,
        table.configuration,
        table.backend,
        BytesSerializer(),
        BytesSerializer(),
    )


class PartitionLoad:
    """Writes the rows of one partition, and counts the `rows` read and the `entries` written.

    Holds one Arrow batch and the changes of eight requests in memory.
    """

    def __init__(self, table: Stored) -> None:
        self._table = table
        self._partition: int | None = None
        self.rows = self.entries = 0

    def run(self, batches: Iterator[Any]) -> None:
        """Write all rows, which have the columns `partition`, `table_key`, `value` and, optionally,
        `order`.

        They are sorted by `table_key` and then `order`; of each key the last one is written. Raises
        SchemaMismatchError if two rows of a key have the same order.
        """
        changes = self._changes(batches)
        first = next(changes, None)
        if first is None or self._partition is None:
            return
        requests = segment.split_into_requests(chain([first], changes), self._table.backend.limits)
        requests_at_once = 1
        if self._table.backend.waits:
            requests_at_once = _AT_ONCE
        try:
            while parts := list(islice(requests, requests_at_once)):
                writes = (
                    self._table.apply(self._partition, *segment.with_versions(part))
                    for part in parts
                )
                segment.run_without_loop(segment.at_once(_WRITERS, writes))
                self.entries += sum(map(len, parts))
        finally:
            segment.run_without_loop(self._table.close())

    def _changes(self, batches: Iterator[Any]) -> Iterator[SegmentChange]:
        """Yield, for each key, the change that puts its last row. Raises SchemaMismatchError if
        two rows of a key have the same order.
        """
        last_key: bytes | None = None
        last_value = b""
        last_order: Any = None
        for key, value, order in self._rows(batches):
            if key == last_key:
                # NaN equals itself only by its text, and in Spark.
                if order == last_order or repr(order) == repr(last_order):
                    raise self._ambiguous_rows_error(key, order)
            elif last_key is not None:
                yield SegmentChange(last_key, last_value, b"")
            last_key = key
            last_value = value
            last_order = order
        if last_key is not None:
            yield SegmentChange(last_key, last_value, b"")

    def _rows(self, batches: Iterator[Any]) -> Iterator[tuple[bytes, bytes, Any]]:
        """Yield table key, value and order (None without that column) of each row; count them."""
        for batch in batches:
            if not batch.num_rows:
                continue
            (number,) = batch.column("partition").unique().to_pylist()
            # Spark has partitioned the rows by this column.
            assert self._partition in (None, number)
            self._partition = number
            self.rows += batch.num_rows
            if "order" in batch.schema.names:
                orders = batch.column("order").to_pylist()
            else:
                orders = [None] * batch.num_rows
            yield from zip(
                batch.column("table_key").to_pylist(),
                batch.column("value").to_pylist(),
                orders,
                strict=True,
            )

    def _ambiguous_rows_error(self, table_key: bytes, order: Any) -> SchemaMismatchError:
        """Return the error for two rows of one key, neither of which is the last."""
        family, key = segment.split_table_key(table_key)
        of_family = ""
        if family is not None:
            of_family = f" of family {family!r:.60}"
        same = ""
        if order is not None:
            same = f" with the same order, {order!r:.60}"
        return SchemaMismatchError(
            f"key-value table {self._table.id}: the frame has two rows of the key"
            f" {key!r:.60}{of_family}{same}, and the last one is undefined.",
            "Name a column that orders them with order_by=, or keep one row of each key.",
            table=str(self._table.id),
        )


@validated
def read_key_value_table(
    table: KeyValueTable[Any, Any],
    *,
    spark: SparkSession | Callable[[], SparkSession],
    page_size: int = 1000,
) -> DataFrame:
    """Return the entries as `family` (string, null if there is none), `key`, `value` and `version`
    (binary).

    The types of keys and values follow from the table's serializers: text is a string, integers are
    bigint, JSON, models and Avro are their JSON as a string, everything else is binary. There is
    one Spark partition for each of the table's, with rows in the order of their keys' bytes, at
    most `page_size` of them in memory at a time. The table is read each time that the frame is
    evaluated: cache it to use one reading.

    While others write, each key appears at most once, and a key that exists throughout appears;
    rows of different pages are of different moments. Seal the table for a frame of one moment.
    """
    key = column_form(table.key_serializer)
    value = column_form(table.value_serializer)
    bytes_ = BytesSerializer()
    stored = BlockingKeyValueTable(
        KeyValueTable(table.id, table.configuration, table.backend, bytes_, bytes_)
    )

    def read(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from tasks.encode_task_errors(_pages(stored, number, page_size, key, value))

    partitions = table.configuration.partitions
    # One number per Spark partition.
    numbers = resolve_session(spark).range(0, partitions, 1, partitions)
    return numbers.mapInArrow(
        read, f"family string, key {key.type}, value {value.type}, version binary"
    )


def _pages(
    stored: BlockingKeyValueTable[bytes, bytes],
    number: int,
    page_size: int,
    key: ColumnForm,
    value: ColumnForm,
) -> Iterator[Any]:
    """Yield the entries of a partition (`number`) as Arrow batches, one per page."""
    with stored:
        for page in stored.all_entries(partitions=[number], page_size=page_size):
            columns = {
                "family": pa.array([entry.key.family for entry in page.items], pa.string()),
                "key": pa.array(
                    [key.from_bytes(entry.key.key) for entry in page.items], arrow_type(key.type)
                ),
                "value": pa.array(
                    [value.from_bytes(entry.value) for entry in page.items], arrow_type(value.type)
                ),
                "version": pa.array(
                    [entry.version.to_bytes() for entry in page.items], pa.binary()
                ),
            }
            yield pa.RecordBatch.from_pydict(columns)


_INTEGERS = ("tinyint", "smallint", "int", "bigint")


@dataclass(frozen=True, slots=True)
class FrameWritten:
    """The result of a write: how many `rows` were read and `entries` put."""

    rows: int
    entries: int


@validated
@tasks.translate_spark_errors()
def write_key_value_table(
    frame: DataFrame,
    table: KeyValueTable[Any, Any],
    *,
    key: str = "key",
    value: str = "value",
    family: str | None = None,
    order_by: str | None = None,
) -> FrameWritten:
    """Put the rows of a frame into a table, unconditionally, in one Spark job; return their number.

    `key`, `value` and `family` name its columns, which have the types of `read_key_value_table`.
    Without `family`, and where it is null, keys have none. Other columns are ignored. Of several
    rows of one key, that with the greatest `order_by` is written; without that column, and for
    equal values in it, they are rejected.

    Rows are repartitioned to one Spark partition for each of the table's, and written in requests
    as large as the backend accepts. Each request is atomic, the frame is not: while the job runs,
    and after an error, some rows are written and others are not. It may be repeated, as Spark
    repeats tasks: the same rows give the same entries, with new versions. Of concurrent writes to
    the same keys the later ones stay.

    Raises SchemaMismatchError for columns of other types, rows without a value and repeated keys,
    NullKeyError, and the errors of a table's writes. Some rows may be written by then.
    """
    keys = column_form(table.key_serializer)
    values = column_form(table.value_serializer)
    # By the name in batches, the column of the frame and its Spark type.
    named = {"key": (key, keys.type), "value": (value, values.type)}
    if family is not None:
        named["family"] = (family, "string")
    columns = [
        _column(frame, table, column, kind).alias(name) for name, (column, kind) in named.items()
    ]
    order = ""
    if order_by is not None:
        order = f", order {_type(frame, table, order_by)}"
        columns.append(sql_column(order_by).alias("order"))
    addressed = frame.select(*columns).mapInArrow(
        _addressing(table, keys, values), f"partition int, table_key binary, value binary{order}"
    )
    rows = (
        addressed.repartitionById(table.configuration.partitions, "partition")
        .sortWithinPartitions("table_key", *(["order"] if order_by is not None else []))
        .mapInArrow(_writing(table), "report string")
        .collect()
    )
    reports = [json.loads(row.report) for row in rows]
    for report in reports:
        if "error" in report:
            raise tasks.error_from_json(report["error"])
    return FrameWritten(
        sum(report["rows"] for report in reports), sum(report["entries"] for report in reports)
    )


def _column(frame: DataFrame, table: KeyValueTable[Any, Any], name: str, kind: str) -> Any:
    """Return a column of the frame as this Spark type; SchemaMismatchError if it has another, but
    for integers.
    """
    type_ = _type(frame, table, name)
    if kind == "bigint" and type_ in _INTEGERS:
        return sql_column(name).cast("bigint")
    if type_ != kind:
        problem = (
            f"key-value table {table.id}: column {name!r} of the frame is {type_}; expected {kind}."
        )
        step = "Cast it, convert it with to_json(…), or open the table with another serializer."
        raise SchemaMismatchError(problem, step, column=name)
    return sql_column(name)


def _type(frame: DataFrame, table: KeyValueTable[Any, Any], name: str) -> str:
    """Return the Spark type of a column of the frame; SchemaMismatchError if it is missing."""
    if name not in frame.columns:
        problem = (
            f"key-value table {table.id}: the frame has no column {name!r}; it has"
            f" {', '.join(frame.columns)}."
        )
        raise SchemaMismatchError(
            problem, "Name the columns with key=, value= and family=.", column=name
        )
    return type_from_spark(frame.schema[name].dataType)


def _addressing(
    table: KeyValueTable[Any, Any], key: ColumnForm, value: ColumnForm
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the function that serializes the rows of a Spark task and adds the partition of
    each.
    """
    open_table = _table_opener(table)

    def address(batches: Iterator[Any]) -> Iterator[Any]:
        opened = open_table()
        yield from tasks.encode_task_errors(
            _addressed(batch, opened, key, value) for batch in batches
        )

    return address


def _addressed(batch: Any, table: Stored, key: ColumnForm, value: ColumnForm) -> Any:
    """Return the rows of a batch serialized, as `PartitionLoad.run` takes them, with the partition
    of each. Raises NullKeyError for a row without a key, SchemaMismatchError for one without a
    value.
    """
    names = batch.schema.names
    for name in ("key", "value"):
        if batch.column(name).null_count:
            problem = f"key-value table {table.id}: a row of the frame has no {name}."
            step = "Filter out such rows."
            if name == "key":
                raise NullKeyError(problem, step, table=table.id.name)
            raise SchemaMismatchError(problem, step, column=name)
    if (found := first_unreadable(batch)) is not None:
        raise found.error(f"key-value table {table.id}", "a row of the frame", table=table.id.name)
    families = batch.column("family").to_pylist() if "family" in names else [None] * batch.num_rows
    partitions = []
    table_keys = []
    for family, given in zip(families, batch.column("key").to_pylist(), strict=True):
        partition, stored = table.coder.locate(family, key.to_bytes(given))
        table_keys.append(stored)
        partitions.append(partition)
    columns = {
        "partition": pa.array(partitions, pa.int32()),
        "table_key": pa.array(table_keys, pa.binary()),
        "value": pa.array(
            [table.coder.value(value.to_bytes(cell)) for cell in batch.column("value").to_pylist()],
            pa.binary(),
        ),
    }
    if "order" in names:
        columns["order"] = batch.column("order")
    return pa.RecordBatch.from_pydict(columns)


def _writing(table: KeyValueTable[Any, Any]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the function with which a Spark task writes the rows of one partition; it yields
    one row, its report.
    """
    open_table = _table_opener(table)

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        """Write the rows; yield the report, with counts or the error."""
        load = PartitionLoad(open_table())
        try:
            load.run(batches)
            report: dict[str, Any] = {"rows": load.rows, "entries": load.entries}
        except AdjunctError as error:
            # Returned instead of raised: Spark would repeat the task, and the request has been
            # retried already.
            report = {"error": tasks.error_to_json(error)}
            for _ in batches:  # Spark reuses a worker only if its input is drained
                pass
        yield pa.RecordBatch.from_pydict({"report": pa.array([json.dumps(report)], pa.string())})

    return write

"""`write_key_value_table`: the rows of a DataFrame as entries of a key-value table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import AdjunctError, NullKeyError, SchemaMismatchError
from dagster_adjunct.resources.key_value.entry_coder import EntryCoder
from dagster_adjunct.resources.key_value.key_value_table import KeyValueTable
from dagster_adjunct.resources.key_value.serializers import BytesSerializer
from dagster_adjunct.resources.key_value_frames.column_forms import ColumnForm, form_of
from dagster_adjunct.resources.key_value_frames.partition_load import PartitionLoad
from dagster_adjunct.resources.schemas.quoted_columns import column as sql_column
from dagster_adjunct.resources.schemas.readable_values import first_unreadable
from dagster_adjunct.resources.spark.spark_errors import from_document, to_document, unwrapped, wrapped

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_INTEGERS = ("tinyint", "smallint", "int", "bigint")


@dataclass(frozen=True, slots=True)
class FrameWritten:
    """What a write has come to: `entries` that were put, of so many `rows`."""

    rows: int
    entries: int


@unwrapped()
def write_key_value_table(
    frame: DataFrame,
    table: KeyValueTable[Any, Any],
    *,
    key: str = "key",
    value: str = "value",
    family: str | None = None,
    order_by: str | None = None,
) -> FrameWritten:
    """Put the rows of a frame into a table, whatever is there, in one Spark job; return how many.

    `key`, `value` and `family` name its columns, which have the types that `read_key_value_table` gives; without
    `family`, and where that is null, keys have none. Other columns are left out. Of several rows of one key that with
    the greatest `order_by` is written; without that column, and where two have the same, they are refused.

    The rows are brought to one Spark partition for each of the table's, and written in requests as large as the backend
    takes. Each request is atomic, the frame is not: after an error, and while the job runs, some rows are there and
    others are not. It may be repeated, as Spark does with a task: the same rows come to the same entries, with new
    versions. What others write to the same keys meanwhile stays or not as it comes before or after.

    Raises SchemaMismatchError for columns of other types, rows without a value and keys that come twice; NullKeyError;
    and what a table raises of a write. Rows may have been written by then.
    """
    keys, values = form_of(table.key_serializer), form_of(table.value_serializer)
    named = {"key": (key, keys.type), "value": (value, values.type)}
    if family is not None:
        named["family"] = (family, "string")
    columns = [_column(frame, table, of, kind).alias(name) for name, (of, kind) in named.items()]
    order = "" if order_by is None else f", order {_type(frame, table, order_by)}"
    if order_by is not None:
        columns.append(sql_column(order_by).alias("order"))
    addressed = frame.select(*columns).mapInArrow(
        _addressing(table, keys, values), f"partition int, table_key binary, value binary{order}"
    )
    reports = (
        addressed.repartitionById(table.configuration.partitions, "partition")
        .sortWithinPartitions("table_key", *(["order"] if order_by is not None else []))
        .mapInArrow(_writing(table), "report string")
        .collect()
    )
    return _summed([json.loads(row.report) for row in reports])


def _column(frame: DataFrame, table: KeyValueTable[Any, Any], name: str, kind: str) -> Any:
    type_ = _type(frame, table, name)
    if kind == "bigint" and type_ in _INTEGERS:
        return sql_column(name).cast("bigint")
    if type_ != kind:
        raise SchemaMismatchError(
            f"key-value table {table.id}: column {name!r} of the frame is {type_}; expected {kind}.",
            "Cast it, or make JSON of it with to_json(…), or open the table with another serializer.",
            column=name,
        )
    return sql_column(name)


def _type(frame: DataFrame, table: KeyValueTable[Any, Any], name: str) -> str:
    if name not in frame.columns:
        raise SchemaMismatchError(
            f"key-value table {table.id}: the frame has no column {name!r}; it has {', '.join(frame.columns)}.",
            "Name the columns with key=, value= and family=.",
            column=name,
        )
    return str(frame.schema[name].dataType.simpleString())


def _addressing(
    table: KeyValueTable[Any, Any], key: ColumnForm, value: ColumnForm
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the task that serialises rows and finds their partitions."""
    stored = (table.id, table.configuration, table.backend)

    def address(batches: Iterator[Any]) -> Iterator[Any]:
        id, configuration, backend = stored
        coder = EntryCoder(id, configuration, backend.limits, BytesSerializer(), BytesSerializer())
        yield from wrapped(_addressed(batch, coder, key, value) for batch in batches)

    return address


def _addressed(batch: Any, coder: EntryCoder[bytes, bytes], key: ColumnForm, value: ColumnForm) -> Any:
    import pyarrow as pa

    names = batch.schema.names
    for name in ("key", "value"):
        if batch.column(name).null_count:
            raise _null(coder, name)
    if (found := first_unreadable(batch)) is not None:
        raise found.error(f"key-value table {coder.table}", "a row of the frame", table=coder.table.name)
    families = batch.column("family").to_pylist() if "family" in names else [None] * batch.num_rows
    partitions, table_keys = [], []
    for family, given in zip(families, batch.column("key").to_pylist(), strict=True):
        prefix = coder.prefix(family)
        stored = coder.table_key(prefix, key.to_bytes(given))
        table_keys.append(stored)
        partitions.append(coder.partition(prefix, stored))
    columns = {
        "partition": pa.array(partitions, pa.int32()),
        "table_key": pa.array(table_keys, pa.binary()),
        "value": pa.array(
            [coder.value(value.to_bytes(cell)) for cell in batch.column("value").to_pylist()], pa.binary()
        ),
    }
    if "order" in names:
        columns["order"] = batch.column("order")
    return pa.RecordBatch.from_pydict(columns)


def _null(coder: EntryCoder[bytes, bytes], name: str) -> AdjunctError:
    problem, next_step = f"key-value table {coder.table}: a row of the frame has no {name}.", "Filter such rows out."
    if name == "key":
        return NullKeyError(problem, next_step, table=coder.table.name)
    return SchemaMismatchError(problem, next_step, column=name)


def _writing(table: KeyValueTable[Any, Any]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the task that writes the rows of one partition."""
    stored = (table.id, table.backend)

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        load = PartitionLoad(*stored)
        try:
            load.run(batches)
            report: dict[str, Any] = {"rows": load.rows, "entries": load.entries}
        except AdjunctError as error:
            # As a result and not as an exception: its own attempts are over, and Spark would try the task again.
            report = {"error": to_document(error)}
            for _ in batches:  # a worker whose input is not drained is not used again
                pass
        yield pa.RecordBatch.from_pydict({"report": pa.array([json.dumps(report)], pa.string())})

    return write


def _summed(reports: list[dict[str, Any]]) -> FrameWritten:
    for report in reports:
        if "error" in report:
            raise from_document(report["error"])
    return FrameWritten(sum(report["rows"] for report in reports), sum(report["entries"] for report in reports))

"""Runs functions over Arrow data in Spark tasks, for frames whose columns may have any name.

Spark's own `mapInArrow` and `applyInArrow` look up columns by name, and read a dot in a name as a path into a struct,
and the name `*` as all columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.spark.errors import encode_task_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

T = TypeVar("T")
_MARKS = (".", "`")


def map_in_arrow(
    frame: DataFrame, task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: StructType | str
) -> DataFrame:
    """Return the result of `task` on the batches of each partition."""
    names = frame.columns
    if not _needs_other_names(names):
        return frame.mapInArrow(task, schema)

    def named(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from task(batch.rename_columns(names) for batch in batches)

    return frame.toDF(*_by_position(names)).mapInArrow(named, schema)


def apply_in_arrow(
    frame: DataFrame, key: Sequence[str], task: Callable[[Any], Any], schema: StructType | str
) -> DataFrame:
    """Return the result of `task` on the table of all rows of each key."""
    names = frame.columns
    if not _needs_other_names(names):
        return frame.groupBy(*[F.col(name) for name in key]).applyInArrow(task, schema)

    def named(rows: pa.Table) -> pa.Table:
        return task(rows.rename_columns(names))

    plain = frame.toDF(*_by_position(names))
    return plain.groupBy(*[F.col(f"c{names.index(name)}") for name in key]).applyInArrow(named, schema)


def read_in_tasks(
    spark: SparkSession,
    tasks: Sequence[T],
    read: Callable[[T], Iterator[pa.RecordBatch]],
    columns: Sequence[tuple[str, str]],
) -> DataFrame:
    """Return the batches that `read` yields for each of `tasks`, by a Spark task each; `columns` are (name, type)."""
    names = _by_position(columns)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in [number for batch in batches for number in batch.column(0).to_pylist()]:
            for batch in read(tasks[number]):
                yield batch.rename_columns(names)

    return convert_in_tasks(spark.range(0, len(tasks), 1, max(1, len(tasks))), run, columns)


def convert_in_tasks(
    frame: DataFrame,
    convert: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    columns: Sequence[tuple[str, str]],
) -> DataFrame:
    """Return what `convert` makes of the batches of each partition; `columns` are the (name, type) of its results.

    In these batches, columns are known by their positions: their names are c0, c1, ….
    """
    ddl = ", ".join(f"c{index} {kind}" for index, (_, kind) in enumerate(columns))
    plain = frame.toDF(*_by_position(frame.columns))
    made = plain.mapInArrow(lambda batches: encode_task_errors(convert(batches)), ddl)
    return made.toDF(*[name for name, _ in columns])


def _needs_other_names(names: Sequence[str]) -> bool:
    return any(name == "*" or mark in name for name in names for mark in _MARKS)


def _by_position(names: Sequence[object]) -> list[str]:
    return [f"c{index}" for index in range(len(names))]

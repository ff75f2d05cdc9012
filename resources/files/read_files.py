"""Files of others as one Spark frame: read by Python tasks, each from the very objects that were listed.

Spark's own readers would open whatever lies under a path by then, take patterns for names, and turn a value that
does not parse into null. Here each task reads listed files with the reader that also checks them, and fails with an
error that names file and column. Large Parquet files are shared out by their row groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.files.file_formats import DeclaredFiles, FileFormat
from dagster_adjunct.resources.spark.spark_errors import wrapped
from dagster_adjunct.resources.streams.interface.stream_system import OFFSET, PARTITION, TIMESTAMP, TOMBSTONE

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.resources.files.tree import FoundFile

_PIECE = 64 * 1024 * 1024
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """A file, or the part of a large Parquet file whose row groups begin in [start, end).

    `number` is the file's place in the list, which stands in `__partition` of its records.
    """

    number: int
    file: FoundFile
    start: int
    end: int


def files_frame(spark: SparkSession, declared: DeclaredFiles, files: Sequence[FoundFile]) -> DataFrame:
    """Return the records of these files: the columns that are declared, then those of META.

    `__partition` is the file's place in `files`, `__offset` the record's in its file, both counted from 0.
    """
    from pyspark.sql import functions as F

    tasks, schema = shared_out(files, declared.format), declared.schema
    read = _reader(declared, tasks)
    # By position: mapInArrow looks columns up by name, and stumbles over dots and backticks in them.
    kinds = [*(field.type for field in schema.fields), "int", "bigint"]
    ddl = ", ".join(f"c{index} {kind}" for index, kind in enumerate(kinds))
    frame = spark.range(0, len(tasks), 1, max(1, len(tasks))).mapInArrow(read, ddl)
    return frame.select(
        *[F.col(f"c{index}").alias(name) for index, name in enumerate((*schema.names, PARTITION, OFFSET))],
        F.lit(None).cast("timestamp").alias(TIMESTAMP),
        F.lit(False).alias(TOMBSTONE),
    )


def files_table(declared: DeclaredFiles, files: Sequence[FoundFile]) -> pa.Table:
    """Return what `files_frame` does without Spark; all of it is held in memory."""
    import pyarrow as pa

    columns = [*declared.schema.to_arrow(), pa.field(PARTITION, pa.int32()), pa.field(OFFSET, pa.int64())]
    parts = [
        batch.rename_columns([column.name for column in columns])
        for task in shared_out(files, declared.format)
        for piece in task
        for batch in _batches(declared, piece)
    ]
    rows = pa.Table.from_batches(parts).cast(pa.schema(columns)) if parts else pa.schema(columns).empty_table()
    rows = rows.append_column(TIMESTAMP, pa.nulls(rows.num_rows, pa.timestamp("us", "UTC")))
    return rows.append_column(TOMBSTONE, pa.array([False] * rows.num_rows, pa.bool_()))


def count_records(declared: DeclaredFiles, files: Sequence[FoundFile]) -> int:
    """Return how many records these files hold, without Spark: Parquet by footers, texts by reading them."""

    def count(file: FoundFile) -> int:
        if declared.format == "parquet":
            from dagster_adjunct.resources.files.parquet import count_parquet

            with declared.telling(file):
                return count_parquet(declared.tree, file, declared.schema, declared.place(file))
        return sum(table.num_rows for _, table in declared.tables(file))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return sum(pool.map(count, files))


def shared_out(files: Sequence[FoundFile], format: FileFormat) -> list[list[Piece]]:
    """Return what each task reads: about 64 MiB, of one large Parquet file or of several small files."""
    pieces = []
    for number, file in enumerate(files):
        parts = max(1, round(file.size / _PIECE)) if format == "parquet" else 1
        edges = [file.size * part // parts for part in range(parts + 1)]
        pieces += [Piece(number, file, start, end) for start, end in pairwise(edges)]
    tasks: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        size = piece.end - piece.start
        if not tasks or size > room:
            tasks.append([])
            room = _PIECE
        tasks[-1].append(piece)
        room -= size
    return tasks


def _reader(
    declared: DeclaredFiles, tasks: list[list[Piece]]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def read(batches: Iterator[Any]) -> Iterator[Any]:
        wanted = [number for batch in batches for number in batch.column(0).to_pylist()]
        for number in wanted:
            for piece in tasks[number]:
                yield from wrapped(_batches(declared, piece))

    return read


def _batches(declared: DeclaredFiles, piece: Piece) -> Iterator[pa.RecordBatch]:
    import numpy as np
    import pyarrow as pa

    for first, table in declared.tables(piece.file, (piece.start, piece.end)):
        rows = table.num_rows
        marks = [
            pa.array(np.full(rows, piece.number, np.int32)),
            pa.array(np.arange(first, first + rows, dtype=np.int64)),
        ]
        columns = [*table.columns, *marks]
        numbered = pa.table(columns, names=[f"c{index}" for index in range(len(columns))])
        yield from numbered.combine_chunks().to_batches()

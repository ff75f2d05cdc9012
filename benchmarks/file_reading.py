"""Streams of files: reading Parquet files, against Spark reading the same ones by their paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq

from benchmarks.lake_read import RECORDS, consume, records
from benchmarks.timing import alternate
from dagster_adjunct import open_lake, session_scope
from dagster_adjunct.resources.file_streams.folder import FolderStreams, file_stream
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition

GOAL = 1.1


def run_reading(rounds: int, count: int = 4_000_000) -> None:
    """Read large files, some files, and many small ones."""
    with TemporaryDirectory() as folder, session_scope(master="local[2]") as session:
        for files in (8, 100, 1_000):
            _run_files(session(), Path(folder) / f"{files}", files, count, rounds)


def _run_files(spark: Any, folder: Path, files: int, count: int, rounds: int) -> None:
    (folder / "landing").mkdir(parents=True)
    for number in range(files):
        table = records(number, count // files)
        pq.write_table(table, folder / "landing" / f"{number:05}.parquet")
    name = f"facts{files}"
    file_stream(name, str(folder / "landing"), format="parquet", schema=RECORDS)
    streams = FolderStreams(open_lake(folder / "lake"))
    ssp = SystemStreamPartition("files", name, 0)
    state = streams.admit(name)
    whole = {ssp: OffsetRange("0", str(state.next))}
    paths = [str(path) for path in sorted((folder / "landing").iterdir())]
    names = list(RECORDS.names)
    reads: dict[str, Callable[[], Any]] = {
        "path": lambda: spark.read.schema(RECORDS.ddl()).parquet(*paths),
        "stream": lambda: streams.read(spark, whole).select(names),
        "stream_with_meta": lambda: streams.read(spark, whole),
    }
    for read in reads.values():
        assert read().count() == count
        consume(read())
    measured = alternate(
        rounds, **{name: lambda _, read=read: consume(read()) for name, read in reads.items()}
    )
    print(f"stream of {files} Parquet files: {count:,} records of {len(names)} columns")
    for item in measured.values():
        print(f"  {item}, least {min(item.seconds):.2f}")
    for each in ("stream", "stream_with_meta"):
        ratio = measured[each].median / measured["path"].median
        least = min(measured[each].seconds) / min(measured["path"].seconds)
        print(f"  {each} / path = {ratio:.2f}, of the least {least:.2f} (goal: at most {GOAL})")
    print()

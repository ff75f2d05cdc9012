"""Four processes that append to one stream at once."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pyarrow as pa
import pytest

from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams

APPENDS = 8


def _appender(url: str, number: int) -> None:
    streams = LakeStreams(open_lake(url))
    for sequence in range(APPENDS):
        rows = [f"{number}-{sequence}-{i}" for i in range(5)]
        for _ in range(2):  # each append is retried, too
            streams.append("s", pa.table({"k": rows}), producer=f"p{number}", sequence=sequence)


@pytest.mark.long  # threads that race: test_streams_on_s3.py
@pytest.mark.lengthy
@pytest.mark.timeout(120)
def test_racing_appenders_lose_and_double_nothing(tmp_path: Path) -> None:
    url = str(tmp_path / "lake")
    streams = LakeStreams(open_lake(url))
    streams.create("s", schema=Schema.of(k="string"), key=["k"], partitions=3)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_appender, args=(url, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4

    table = streams.read_arrow(streams.all_ranges("s"))
    expected = {f"{n}-{s}-{i}" for n in range(4) for s in range(APPENDS) for i in range(5)}
    assert sorted(table.column("k").to_pylist()) == sorted(expected)
    for partition in range(3):
        rows = [row for row in table.to_pylist() if row["__partition"] == partition]
        assert [row["__offset"] for row in rows] == list(range(len(rows)))
    for number in range(4):
        for partition in range(3):
            own = [
                tuple(map(int, row["k"].split("-")[1:]))
                for row in table.to_pylist()
                if row["__partition"] == partition and row["k"].startswith(f"{number}-")
            ]
            assert own == sorted(own)  # a producer's records keep their order

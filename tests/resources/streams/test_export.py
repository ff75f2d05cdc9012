"""Streams written into files of the machine's own: all records, whole or not at all, a part in
memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.orchestration.cli.streams import export_records
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.resources.streams.stream_helpers import SCHEMA

Records = Callable[..., pa.Table]


@pytest.fixture
def s(streams: LakeStreams, records: Records) -> LakeStreams:
    streams.create("s", schema=SCHEMA, key=["k"], partitions=3)
    for sequence in range(4):
        rows = [(f"k{i}", 10 * sequence + i) for i in range(10)]
        streams.append(
            "s", records(*rows), producer="p", sequence=sequence, end_of_dataset=f"v{sequence}"
        )
    return streams


def test_one_file_holds_what_a_read_gives(s: LakeStreams, tmp_path: Path) -> None:
    assert export_records(s.read_parts(s.all_ranges("s")), tmp_path / "s.parquet") == (40, 1)
    assert pq.read_table(tmp_path / "s.parquet").equals(s.read_arrow(s.all_ranges("s")))
    assert [path.name for path in tmp_path.iterdir()] == ["s.parquet"]


@pytest.mark.parametrize("limit", [1, 7, 40, 41])
def test_a_folder_holds_the_same_in_files_of_at_most_that_many_records(
    s: LakeStreams, tmp_path: Path, limit: int
) -> None:
    records, files = export_records(
        s.read_parts(s.all_ranges("s")), tmp_path / "s", records_per_file=limit
    )
    paths = sorted((tmp_path / "s").iterdir())
    assert (records, files) == (40, len(paths)) == (40, -(-40 // limit))
    tables = [pq.read_table(path) for path in paths]
    assert [len(table) for table in tables] == [
        *[limit] * (40 // limit),
        *([40 % limit] if 40 % limit else []),
    ]
    assert pa.concat_tables(tables).equals(s.read_arrow(s.all_ranges("s")))


def test_a_stream_without_records_gives_its_columns(streams: LakeStreams, tmp_path: Path) -> None:
    streams.create("s", schema=SCHEMA, key=["k"], partitions=2)
    assert export_records(streams.read_parts(streams.all_ranges("s")), tmp_path / "s.parquet") == (
        0,
        1,
    )
    assert pq.read_schema(tmp_path / "s.parquet").names[:2] == ["k", "v"]


@pytest.mark.parametrize("limit", [None, 5])
def test_a_failure_in_the_middle_leaves_nothing(
    s: LakeStreams, tmp_path: Path, limit: int | None
) -> None:
    def failing() -> Iterator[pa.Table]:
        for number, part in enumerate(s.read_parts(s.all_ranges("s"))):
            if number == 3:
                raise ConnectionError("the store is gone")
            yield part

    target = tmp_path / ("s.parquet" if limit is None else "s")
    with pytest.raises(ConnectionError):
        export_records(failing(), target, records_per_file=limit)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [None, 5])
def test_what_came_to_be_there_meanwhile_is_not_replaced(
    s: LakeStreams, tmp_path: Path, limit: int | None
) -> None:
    target = tmp_path / ("s.parquet" if limit is None else "s")

    def meanwhile() -> Iterator[pa.Table]:
        yield from s.read_parts(s.all_ranges("s"))
        if limit is None:
            target.write_text("somebody's")
        else:
            target.mkdir()
            (target / "somebody's").touch()

    with pytest.raises(ConfigurationError) as failure:
        export_records(meanwhile(), target, records_per_file=limit)
    assert failure.value.facts == {"setting": "--to"}
    assert list(tmp_path.iterdir()) == [target]
    assert (
        target.read_text() == "somebody's"
        if limit is None
        else [p.name for p in target.iterdir()] == ["somebody's"]
    )


@pytest.mark.lengthy
def test_a_stream_much_larger_than_a_part_takes_the_memory_of_a_few_parts(
    local_lake: Lake, tmp_path: Path
) -> None:
    streams = LakeStreams(local_lake)
    streams.create("s", schema=Schema.of(k="string", text="string"), key=[], partitions=1)
    rows = 2 * 65_536
    for sequence in range(6):
        table = pa.table(
            {
                "k": [str(i) for i in range(rows)],
                "text": [f"{sequence}-{i:x}" * 8 for i in range(rows)],
            }
        )
        streams.append("s", table, producer="p", sequence=sequence)
        del table
    whole = streams.all_ranges("s")
    size = streams.read_arrow(whole).nbytes
    pool, before = pa.default_memory_pool(), pa.default_memory_pool()
    try:
        measured = pa.proxy_memory_pool(pool)
        pa.set_memory_pool(measured)
        assert export_records(streams.read_parts(whole), tmp_path / "s.parquet") == (6 * rows, 1)
        assert measured.max_memory() < size / 2
    finally:
        pa.set_memory_pool(before)
    assert pq.read_metadata(tmp_path / "s.parquet").num_rows == 6 * rows

"""`adjunct stream …`: exporting the latest results, and named readers."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.manifest import Retention
from dagster_adjunct.resources.streams.lake.readers import read_new
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import AppendOptions, SourceRange, Sources


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A stream `s` of which two of four records were made again."""
    lake = open_lake(tmp_path / "lake")
    streams = LakeStreams(lake)
    streams.create("s", schema=Schema.of(v="bigint"), partitions=1)
    for epoch, offsets in enumerate([range(4), range(1, 3)]):
        rows = [(10 * epoch + o, "lake.in.0", o, epoch, "app", epoch) for o in offsets]
        names = ("v", "__source", "__source_offset", "__source_epoch", "__source_reader", "__epoch")
        kinds = (pa.int64(), pa.string(), pa.int64(), pa.int32(), pa.string(), pa.int32())
        table = pa.table({n: pa.array([r[i] for r in rows], kinds[i]) for i, n in enumerate(names)})
        read = Sources(
            "lake.in", "app", (SourceRange("lake.in.0", offsets.start, offsets.stop, epoch),)
        )
        streams.append(
            "s", table, producer="app", sequence=epoch, options=AppendOptions(sources=read)
        )
    return lake


def run(lake: Lake, *arguments: str) -> str:
    result = CliRunner().invoke(
        root, ["stream", *arguments, "--lake", lake.url], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.output


def test_the_latest_results_are_exported_in_files(lake: Lake, tmp_path: Path) -> None:
    output = run(
        lake,
        "export",
        "s",
        "--to",
        str(tmp_path / "s"),
        "--records-per-file",
        "3",
        "--epochs",
        "latest",
    )
    assert "4 records of s written to" in output
    assert "in 2 files" in output
    paths = sorted((tmp_path / "s").iterdir())
    assert [pq.read_table(path)["v"].to_pylist() for path in paths] == [[0, 3, 11], [12]]
    run(lake, "export", "lake.s", "--to", str(tmp_path / "all.parquet"), "--positions")
    assert pq.read_table(tmp_path / "all.parquet")["__source_offset"].to_pylist() == [
        0,
        1,
        2,
        3,
        1,
        2,
    ]


def test_readers_are_described_reported_of_by_maintain_and_forgotten(lake: Lake) -> None:
    read_new(lake, "s", reader="report", max_records=2).commit()
    (reader,) = json.loads(run(lake, "show", "s", "--json"))["readers"]
    assert (reader["name"], reader["behind"], reader["lost"]) == ("report", 4, 0)
    LakeStreams(lake).configure(
        "s", retention=Retention(max_age=timedelta(microseconds=1)), compaction=None
    )
    assert "s: reader report missed 4 offsets that retention has dropped" in run(
        lake, "maintain", "s"
    )
    with pytest.raises(ConfigurationError, match="no reader 'reports'; its readers: report"):
        run(lake, "remove-reader", "s", "reports")
    run(lake, "remove-reader", "s", "report")
    assert json.loads(run(lake, "show", "lake.s", "--json"))["readers"] == []


def test_a_stream_is_created_without_python(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake")
    create = ("create", "clicks", "--schema", "user string, at timestamp", "--key", "user")
    options = ("--partitions", "3", "--timestamp", "at")
    for _ in range(2):
        assert "lake.clicks is there, with 3 partitions" in run(lake, *create, *options)
    info = LakeStreams(lake).info("clicks")
    assert (info.schema, info.key) == (Schema.of(user="string", at="timestamp"), ("user",))
    with pytest.raises(ConfigurationError, match="no columns"):
        run(lake, "create", "events")

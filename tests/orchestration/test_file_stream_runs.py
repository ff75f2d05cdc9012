"""Runs that stay, and both engines, over a stream of files."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from dagster_adjunct import (
    Application,
    Lake,
    LakeStreams,
    Schema,
    bounded_dataset,
    file_stream,
    open_lake,
    plan_application,
    run_application,
)
from dagster_adjunct.errors import AdmittedFileError
from dagster_adjunct.resources.file_streams import streams as declared
from dagster_adjunct.sources import FileSource


@pytest.fixture(autouse=True)
def _nothing_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_declared", {})


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "landing").mkdir()
    return tmp_path / "landing"


def copying(folder: Path) -> Application:
    clicks = file_stream("clicks", str(folder), format="jsonl", schema="n int", key=["n"])
    app = Application("copy", engine="auto")
    app.input_stream(clicks).send_to(app.output_stream("lake.copy", partitions=1, key="n"))
    return app


def write(folder: Path, number: int) -> None:
    (folder / f"{number}.json").write_text(f'{{"n": {number}}}\n')
    os.utime(folder / f"{number}.json", (number, number))


def copied(lake: Lake) -> list[int]:
    streams = LakeStreams(lake)
    return streams.read_arrow(streams.all_ranges("copy"))["n"].to_pylist()


def test_a_run_that_stays_reads_files_that_land(lake: Lake, folder: Path) -> None:
    write(folder, 1)
    run_application(
        copying(folder),
        lake=lake,
        follow=timedelta(minutes=1),
        max_batches=3,
        on_report=lambda report: write(folder, report.batches + 1),
    )
    assert copied(lake) == [1, 2, 3]


def test_a_run_that_stays_fails_with_the_error_of_a_rule(lake: Lake, folder: Path) -> None:
    write(folder, 1)

    def overwrite(report: object) -> None:
        (folder / "1.json").write_text('{"n": 1}\n{"n": 11}\n')

    with pytest.raises(AdmittedFileError) as caught:
        run_application(
            copying(folder), lake=lake, follow=timedelta(minutes=1), on_report=overwrite
        )
    assert caught.value.rule == "changed"
    assert copied(lake) == [1]


def test_a_join_needs_no_exchange_where_the_dataset_has_one_partition(
    lake: Lake, folder: Path, tmp_path: Path
) -> None:
    write(folder, 1)
    write(folder, 2)
    (tmp_path / "names").mkdir()
    (tmp_path / "names/all.csv").write_text("n,name\n1,one\n")
    (tmp_path / "names/_SUCCESS").touch()
    clicks = file_stream("clicks", str(folder), format="jsonl", schema="n int", key=["n"])
    source = FileSource(str(tmp_path / "names"), "csv", Schema.of(n="int", name="string"))
    app = Application("named", engine="auto")
    names = app.table(bounded_dataset("names", input=source, key="n", partitions=1))
    app.input_stream(clicks).join(names, on="n", how="left", select=["name"]).send_to(
        app.output_stream("lake.copy", partitions=1, key="n")
    )
    assert not plan_application(app, lake=lake).exchanges
    run_application(app, lake=lake)
    streams = LakeStreams(lake)
    read = streams.read_arrow(streams.all_ranges("copy"), columns=["n", "name"])
    assert read.select(["n", "name"]).to_pylist() == [
        {"n": 1, "name": "one"},
        {"n": 2, "name": None},
    ]

"""Paths that can't be and numbers that no counter holds are refused, not met with a bare error
of Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dagster_adjunct import IN_PROCESS, advance_dataset, bounded_dataset
from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.orchestration.cli.options import read_keys
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams

LONG = "x" * 300
HUGE = str(10**20)


@pytest.mark.parametrize(
    "command",
    [
        ["dataset", "list", "--lake", LONG],
        ["run", "odd_arguments:app", "--lake", LONG],
        ["new", LONG],
        ["stream", "export", "in", "--lake", "lake", "--to", f"{LONG}.parquet"],
    ],
)
def test_a_path_that_is_too_long_is_refused(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd_arguments.py").write_text(
        "from dagster_adjunct import Application\n\napp = Application('one')\n"
    )
    LakeStreams(open_lake("lake")).create("in", schema=Schema.of(k="string"), partitions=1)
    error = CliRunner().invoke(root, command).exception
    assert isinstance(error, ConfigurationError), error
    assert "too long" in str(error)


@pytest.mark.parametrize(
    "command",
    [
        ["dataset", "items", "planes", "--limit", HUGE],
        ["dataset", "history", "planes", "--limit", HUGE],
        ["checkpoint", "history", "shop", "--limit", HUGE],
        ["kv", "scope", "list", "--limit", HUGE],
        ["stream", "export", "in", "--to", "out", "--records-per-file", HUGE],
        ["stream", "export", "in", "--to", "out", "--records-per-file", "0"],
    ],
)
def test_a_number_that_is_too_large_is_a_wrong_argument(command: list[str]) -> None:
    result = CliRunner().invoke(root, command)
    assert (result.exit_code, "is not in the range" in result.output) == (2, True), result.output


@pytest.mark.parametrize("content", [b"J\xf6rg\n", b'"ann\nbob\n', b'"a"b\n', b"x" * 200_000])
def test_a_file_of_keys_that_is_no_csv_in_utf8_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "keys.csv"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError) as refused:
        read_keys("planes", ["tailnum"], file)
    assert refused.value.setting == "--keys-from"


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.csv"
    file.write_bytes(b'\xef\xbb\xbf"N,1",a\r\nN2,b\r\n')
    assert read_keys("planes", ["tailnum", "part"], file) == [["N,1", "a"], ["N2", "b"]]


def run_adjunct(
    folder: Path, *arguments: str | bytes, **how: Any
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "dagster_adjunct.orchestration.cli.main", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=300, **how)


def test_an_argument_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    done = run_adjunct(
        tmp_path, "dataset", "pin", "planes", "v1", "--reason", b"f\xfcr", stdin=subprocess.DEVNULL
    )
    assert (done.returncode, b"is not UTF-8" in done.stderr) == (2, True), done.stderr


@pytest.mark.lengthy
def test_what_an_output_can_not_show_is_escaped_and_json_is_utf8(tmp_path: Path) -> None:
    streams = LakeStreams(open_lake(tmp_path / "lake"))
    streams.create("in", schema=Schema.of(k="string"), key=["k"], partitions=1)
    streams.append("in", [{"k": "\u00e9"}], producer="test", sequence=1, end_of_dataset="v1")
    planes = bounded_dataset("planes", input="lake.in", key="k", partitions=1)
    advance_dataset(
        planes, lake=streams.lake, systems={"lake": streams}, spark=IN_PROCESS, by="test"
    )
    command = ("dataset", "get", "planes", "\u00e9", "--lake", "lake")
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = run_adjunct(tmp_path, *command, env=ascii_only)
    assert (done.returncode, b"\\xe9" in done.stdout) == (0, True), done.stderr
    done = run_adjunct(tmp_path, *command, "--json", env=ascii_only)
    assert json.loads(done.stdout)
    assert "\u00e9" in done.stdout.decode()


@pytest.mark.lengthy
def test_without_an_input_nothing_is_confirmed(tmp_path: Path) -> None:
    LakeStreams(open_lake(tmp_path / "lake")).create(
        "in", schema=Schema.of(k="string"), partitions=1
    )
    command = ("stream", "delete", "in", "--reason", "r", "--lake", "lake")
    done = run_adjunct(tmp_path, *command, preexec_fn=lambda: os.close(0))
    assert (done.returncode, b"Stopped" in done.stderr) == (130, True), done.stderr
    assert LakeStreams(open_lake(tmp_path / "lake")).list_streams() == ["in"]

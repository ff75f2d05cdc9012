"""Paths that can't be and numbers that no counter holds are refused, not met with a bare error of Python."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.orchestration.cli.main import root
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
    (tmp_path / "odd_arguments.py").write_text("from dagster_adjunct import Application\n\napp = Application('one')\n")
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

"""A table in a local file that was there, and is not where the application runs now, is not
begun again in silence.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.table_registry import register_tables, reset_table
from dagster_adjunct.resources.errors import ConfigurationError, TableNotFoundError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.orchestration.cli.commands import document


@dataclass
class World:
    lake: Lake


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake")


def table() -> RemoteTable[Any, Any, Any]:
    store = SqliteTable(
        "state.sqlite", "counts", "id", columns={"id": "string", "n": "bigint"}, create=True
    )
    return RemoteTable("counts", key="id", read_function=store, write_function=store)


def counting(table: RemoteTable[Any, Any, Any]) -> Application:
    app = Application("counting")
    app.table(table)
    return app


def run(lake: Lake, *, writes: int = 1) -> None:
    """Do what a run does with a table: remember it, count, and remember it once more."""
    counts = table()
    with register_tables(lake, counting(counts), by="test"), BlockingTable(counts) as blocking:
        for _ in range(writes):
            blocking.put("a", {"n": (blocking.get("a") or {"n": 0})["n"] + 1})


def count(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT n FROM counts").fetchone()[0])


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two working directories, of which the first is the current one."""
    both = [tmp_path / "one", tmp_path / "two"]
    for folder in both:
        folder.mkdir()
    monkeypatch.chdir(both[0])
    return both


def test_a_run_in_another_directory_makes_no_second_table(
    lake: Lake, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(lake)
    monkeypatch.chdir(folders[1])
    with pytest.raises(TableNotFoundError) as refused:
        run(lake)
    assert refused.value.table == "counts"
    assert all(str(folder / "state.sqlite") in str(refused.value) for folder in folders)
    assert list(folders[1].iterdir()) == []
    monkeypatch.chdir(folders[0])
    run(lake)
    assert count(folders[0] / "state.sqlite") == 2


@pytest.mark.parametrize("gone", ["file", "table"])
def test_a_table_that_is_gone_between_runs_is_an_error_until_it_is_back_or_forgotten(
    lake: Lake, folders: list[Path], gone: str
) -> None:
    file, copy = folders[0] / "state.sqlite", folders[0] / "copy.sqlite"
    run(lake, writes=3)
    copy.write_bytes(file.read_bytes())
    if gone == "file":
        file.unlink()
    else:
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("DROP TABLE counts")
    for _ in range(2):
        with pytest.raises(TableNotFoundError) as failure:
            run(lake)
        assert failure.value.table == "counts"
    copy.replace(file)
    run(lake)
    assert count(file) == 4
    file.unlink()
    document(World(lake), "table", "allow-recreate", "counts", "--by", "test", "--reason", "lost")
    run(lake)
    assert count(file) == 1


def test_a_table_that_moved_along_is_taken_and_one_that_nobody_wrote_may_be_anywhere(
    lake: Lake, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(lake, writes=0)
    assert list(folders[0].iterdir()) == []
    monkeypatch.chdir(folders[1])
    run(lake, writes=2)
    (folders[1] / "state.sqlite").rename(folders[0] / "state.sqlite")
    monkeypatch.chdir(folders[0])
    run(lake)
    assert count(folders[0] / "state.sqlite") == 3


def test_a_table_that_goes_while_a_run_is_at_work_is_missed_by_the_next(
    lake: Lake, folders: list[Path]
) -> None:
    run(lake)
    with suppress(ZeroDivisionError), register_tables(lake, counting(table()), by="test"):
        (folders[0] / "state.sqlite").unlink()
        raise ZeroDivisionError
    with pytest.raises(TableNotFoundError) as failure:
        run(lake)
    assert failure.value.table == "counts"


def test_forgetting_a_table_that_no_run_has_written_names_those_that_are_known(
    lake: Lake, folders: list[Path]
) -> None:
    run(lake)
    with pytest.raises(ConfigurationError, match="known are counts") as unknown:
        reset_table(lake, "cuonts", by="test", reason="test")
    assert unknown.value.table == "cuonts"

"""Disks that are full, have no inodes or may not be written, and too many open files: each
command says so.
"""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dagster import DagsterInstance, RunRequest

from dagster_adjunct import (
    IN_PROCESS,
    Lake,
    LakeStreams,
    Schema,
    advance_dataset,
    open_dataset,
    open_lake,
    unbounded_dataset,
)
from dagster_adjunct.errors import ConfigurationError, StoreUnavailableError
from dagster_adjunct.orchestration.cli.main import root
from tests.orchestration.dagster.ticking import Ticker
from tests.resources.small_disks import more_open_files, mounted

pytestmark = [pytest.mark.lengthy, pytest.mark.timeout(120)]
SCHEMA = Schema.of(k="string", n="bigint")
FLEET = unbounded_dataset("fleet", input="lake.changes", key="k", partitions=1)
APP = """
from dagster_adjunct import Application, unbounded_dataset

app = Application("shop", engine="auto")
fleet = unbounded_dataset("fleet", input="lake.changes", key="k", partitions=1)
app.input_stream("lake.orders").join(app.table(fleet), on="k", how="left", select=["n as m"]).send_to(
    app.output_stream("lake.out", partitions=1, key="k")
)
"""
COMMANDS = {
    "run": ("run", "shop_disk:app", "--master", "none", "--wait", "5s"),
    "advance": ("dataset", "advance", "fleet", "shop_disk:app", "--master", "none"),
    "append": ("stream", "append", "orders", "more.csv"),
    "compact": ("dataset", "compact", "fleet", "--level", "major"),
    "startpoint": (
        "startpoint",
        "set",
        "shop_disk:app",
        "lake.orders.0",
        "--oldest",
        "--reason",
        "a test",
    ),
}


def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """Make a lake in which each command has something to do."""
    work = folder.parent
    (work / "shop_disk.py").write_text(APP)
    (work / "more.csv").write_text("k,n\nz,1\n")
    monkeypatch.chdir(work)
    monkeypatch.setenv("LOGNAME", "me")  # else the system's file of users is read
    monkeypatch.syspath_prepend(str(work))
    sys.modules.pop("shop_disk", None)
    lake = open_lake(folder / "lake")
    streams = LakeStreams(lake)
    for name in ("orders", "changes"):
        streams.create(name, schema=SCHEMA, key=["k"], partitions=1)
        for number in (1, 2):
            streams.append(name, [{"k": f"{number}", "n": number}], producer="p", sequence=number)
            if name == "changes" and number == 1:
                advance_dataset(
                    FLEET, lake=lake, systems={"lake": streams}, spark=IN_PROCESS, by="me"
                )
    advance_dataset(FLEET, lake=lake, systems={"lake": streams}, spark=IN_PROCESS, by="me")
    streams.append("changes", [{"k": "3", "n": 3}], producer="p", sequence=3)
    return lake


def result(lake: Lake, command: str) -> Any:
    return CliRunner().invoke(root, [*COMMANDS[command], "--lake", lake.url])


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (65_536, 4_096, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


def use_all_inodes(folder: Path) -> None:
    (folder / "many").mkdir()
    with suppress(OSError):
        for number in range(100_000):
            (folder / "many" / str(number)).touch()


FULL: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no room": ("size=4m", fill, "No space left on device"),
    "no inodes": ("size=16m,nr_inodes=600", use_all_inodes, "no inode is free"),
}


@pytest.mark.parametrize("kind", FULL)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_a_full_disk_ends_with_its_name_and_works_later(
    command: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, use, reason = FULL[kind]
    with mounted(tmp_path / "disk", options) as disk:
        lake = prepared(disk, monkeypatch)
        use(disk)
        error = result(lake, command).exception
        assert isinstance(error, StoreUnavailableError), repr(error)
        assert reason in error.problem
        assert (error.url, "Make room" in error.next_step) == (lake.url, True)
        for used in ("filler", "many"):
            subprocess.run(["rm", "-rf", str(disk / used)], check=True)
        done = result(lake, command)
        assert done.exit_code == 0, done.exception
        if command == "run":
            streams = LakeStreams(lake)
            assert streams.read_arrow(streams.all_ranges("out")).num_rows == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_a_disk_that_may_not_be_written_ends(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(tmp_path / "disk", "size=8m") as disk:
        lake = prepared(disk, monkeypatch)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        error = result(lake, command).exception
        assert isinstance(error, ConfigurationError), repr(error)
        assert "Read-only file system" in error.problem
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert result(lake, command).exit_code == 0
        with open_dataset(lake, "fleet") as fleet:
            assert fleet.get("1") is not None


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_may_open_no_more_files_ends(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    lake = prepared(tmp_path / "disk", monkeypatch)
    assert result(lake, command).exit_code == 0, "everything is imported"
    streams = LakeStreams(lake)
    streams.append("changes", [{"k": "4", "n": 4}], producer="p", sequence=4)
    (tmp_path / "more.csv").write_text("k,n\ny,1\n")
    with more_open_files(0):
        error = result(lake, command).exception
    assert isinstance(error, ConfigurationError), repr(error)
    assert "Too many open files" in error.problem
    assert "ulimit -n" in error.next_step
    assert result(lake, command).exit_code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_over_its_quota_ends(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    lake = prepared(tmp_path / "disk", monkeypatch)

    def refused(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refused)
        error = result(lake, command).exception
    assert isinstance(error, StoreUnavailableError), repr(error)
    assert "quota" in error.next_step


SENSORS = ("shop_new_records", "shop_startpoints", "shop_restart")


@pytest.mark.parametrize("kind", FULL)
def test_ticks_on_a_full_disk_say_its_name_or_need_no_room_and_go_on_later(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sensors that only read ask for their runs; one that has to write ends its tick with the
    disk's error.
    """
    options, use, reason = FULL[kind]
    with mounted(tmp_path / "disk", options) as disk, DagsterInstance.ephemeral() as instance:
        lake = prepared(disk, monkeypatch)
        app = importlib.import_module("shop_disk").app
        assert result(lake, "startpoint").exit_code == 0
        tickers = {name: Ticker(lake, app, instance, name) for name in SENSORS}
        use(disk)
        assert isinstance(tickers["shop_new_records"].tick(), RunRequest)
        assert isinstance(tickers["shop_restart"].tick(), str)
        before = tickers["shop_startpoints"].cursor
        for _ in range(2):
            with pytest.raises(StoreUnavailableError) as reported:
                tickers["shop_startpoints"].tick()
            assert (reported.value.url, reason in reported.value.problem) == (lake.url, True)
            assert "Make room" in reported.value.next_step
        assert tickers["shop_startpoints"].cursor == before
        for used in ("filler", "many"):
            subprocess.run(["rm", "-rf", str(disk / used)], check=True)
        assert isinstance(tickers["shop_startpoints"].tick(), RunRequest)

"""Excel files loaded by dlt: written, read, and loaded by a process that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import openpyxl

from dagster_adjunct.resources.objects.lake import Lake, open_lake
from tests.assets.loads import Machine, resource
from tests.faulty_store import Fault, FaultyStore

HEADER = ("Station ID", "Name", "Height", "Opened", "Active")
COLUMNS: dict[str, Any] = {
    "height": {"data_type": "decimal", "precision": 10, "scale": 2},
    "opened": {"data_type": "date"},
}


def write_sheet(path: Path, rows: Sequence[Sequence[Any]]) -> Path:
    """Write an Excel file with these rows below the header."""
    book = openpyxl.Workbook()
    sheet = book.active
    for row in (HEADER, *rows):
        sheet.append(row)
    book.save(path)
    return path


def read_sheet(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an Excel file, as the page reads them."""
    rows = openpyxl.load_workbook(path, read_only=True, data_only=True).active.values
    names = next(rows)
    return [dict(zip(names, row, strict=True)) for row in rows]


def tables(path: Path) -> list[Any]:
    """Return a file's rows as a resource of each write disposition."""
    rows = read_sheet(path)
    hints: dict[str, Any] = {"columns": COLUMNS, "primary_key": "Station ID"}
    return [
        resource(rows, "readings", columns=COLUMNS, write_disposition="append"),
        resource(rows, "changes", write_disposition="merge", **hints),
        resource(rows, "stations", write_disposition="replace", **hints),
    ]


def load_until_killed(url: str, env: Mapping[str, str], folder: Path, path: Path, nth: int) -> None:
    """Load a file into a lake; the process is killed at its `nth` request to the lake."""
    os.environ.update(env)
    lake = open_lake(url)
    store = FaultyStore(lake.store, [Fault("*", nth, "meanwhile", _kill_this_process)])
    Machine(Lake(store, lake.id), folder).run(tables(path))


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

"""Excel files loaded by dlt into a lake on an S3 server: each write disposition, with loads that
are repeated, lose replies, or are killed.
"""

from __future__ import annotations

import datetime as dt
import multiprocessing
import shutil
import signal
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from dlt.pipeline.exceptions import PipelineStepFailed

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.exchange.handover import pyarrow_dataset
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.loads import Machine
from tests.assets.sheets import load_until_killed, tables, write_sheet
from tests.faulty_store import Fault, FaultyStore, deaths
from tests.rounds import rounds
from tests.servers.s3 import S3Server

pytestmark = [pytest.mark.server, pytest.mark.rounds]

FIRST = [
    (1, "007", 478.5, dt.date(2001, 2, 3), True),
    (2, "n/a", 12, None, False),
    (3, "Bonn", None, dt.date(2020, 2, 29), None),
]
SECOND = [(2, "Köln", 12.25, None, True), (4, None, -3, dt.date(1999, 12, 31), None)]
Row = dict[str, Any]


@pytest.fixture
def machine(s3_server: S3Server, tmp_path: Path) -> Machine:
    return Machine(open_lake(s3_server.url()), tmp_path / "pipelines")


def stored(rows: list[tuple[Any, ...]]) -> list[Row]:
    """Return the rows of a sheet as a stream has them."""
    names = ("station_id", "name", "height", "opened", "active")
    found = []
    for row in rows:
        height = None if row[2] is None else Decimal(str(row[2])).quantize(Decimal("0.01"))
        found.append(dict(zip(names, (*row[:2], height, *row[3:]), strict=True)))
    return found


def by_id(rows: list[Row]) -> dict[int, Row]:
    return {row["station_id"]: row for row in rows}


def check_all(machine: Machine, loads: list[list[tuple[Any, ...]]]) -> None:
    """Assert that a lake has what these loads in this order come to."""
    rows = [row for load in loads for row in stored(load)]
    assert machine.records("readings") == rows
    assert machine.streams.describe("raw-stations")["markers"] == len(loads)
    assert len(machine.records("_dlt_loads")) == len(loads)
    world = World(machine.lake, IN_PROCESS)
    changes = unbounded_dataset("changes", input="lake.raw-changes", key="station_id", partitions=1)
    stations = bounded_dataset(
        "stations", input="lake.raw-stations", key="station_id", partitions=1
    )
    for dataset, expected in ((changes, by_id(rows)), (stations, by_id(stored(loads[-1])))):
        world.advance(dataset)
        assert dict(world.view(dataset).items()) == expected
    table = pyarrow_dataset(open_dataset(machine.lake, stations)).to_table()
    assert by_id(table.to_pylist()) == by_id(stored(loads[-1]))


def test_sheets_are_appended_merged_and_replaced_on_s3(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "stations.xlsx"
    for loads in ([FIRST], [FIRST, SECOND]):
        machine.run(tables(write_sheet(path, loads[-1])))
        check_all(machine, loads)
    assert machine.types("stations") == {
        "station_id": "bigint",
        "name": "string",
        "height": "decimal(10,2)",
        "opened": "date",
        "active": "boolean",
    }


def test_a_load_that_is_repeated_from_a_backup_adds_nothing(
    machine: Machine, tmp_path: Path
) -> None:
    machine.run(tables(write_sheet(tmp_path / "first.xlsx", FIRST)))
    pipeline = machine.pipeline()
    pipeline.extract(tables(write_sheet(tmp_path / "second.xlsx", SECOND)))
    pipeline.normalize()
    backup = machine.copy(tmp_path / "backup")
    pipeline.load()
    backup.pipeline().load()
    check_all(machine, [FIRST, SECOND])


def test_a_load_whose_replies_are_lost_is_repeated_and_adds_each_row_once(
    machine: Machine, s3_server: S3Server, tmp_path: Path
) -> None:
    first = write_sheet(tmp_path / "first.xlsx", FIRST)
    second = write_sheet(tmp_path / "second.xlsx", SECOND)
    for nth in chosen_requests(machine, tmp_path, first, second, rounds(4, 1)):
        begun = Machine(open_lake(s3_server.url()), tmp_path / f"lost {nth}")
        begun.run(tables(first))
        store = FaultyStore(begun.lake.store, [Fault("*", nth, "lost-after")])
        try:
            begun.run(tables(second), lake=Lake(store, begun.lake.id))
        except PipelineStepFailed:
            pending = begun.pipeline().has_pending_data
            begun.run(None if pending else tables(second))
        check_all(begun, [FIRST, SECOND])


def test_a_load_whose_process_is_killed_is_taken_up_by_the_next_run(
    machine: Machine, s3_server: S3Server, tmp_path: Path
) -> None:
    first = write_sheet(tmp_path / "first.xlsx", FIRST)
    second = write_sheet(tmp_path / "second.xlsx", SECOND)
    spawning = multiprocessing.get_context("spawn")
    for nth in chosen_requests(machine, tmp_path, first, second, rounds(8, 2)):
        url = s3_server.url()
        begun = Machine(open_lake(url), tmp_path / f"killed {nth}")
        begun.run(tables(first))
        loading = spawning.Process(
            target=load_until_killed, args=(url, s3_server.env, begun.folder, second, nth)
        )
        loading.start()
        loading.join()
        assert loading.exitcode == -signal.SIGKILL
        pending = begun.pipeline().has_pending_data
        begun.run(None if pending else tables(second))
        check_all(begun, [FIRST, SECOND])


def chosen_requests(
    machine: Machine, tmp_path: Path, first: Path, second: Path, step: int
) -> list[int]:
    """Return every nth request of a second load at which a death or a lost reply would matter."""
    whole = replace(machine, folder=tmp_path / "whole")
    whole.run(tables(first))
    counting = FaultyStore(whole.lake.store)
    whole.run(tables(second), lake=Lake(counting, whole.lake.id))
    check_all(whole, [FIRST, SECOND])
    shutil.rmtree(whole.folder)
    found = deaths(counting.requests)
    return found[::step]

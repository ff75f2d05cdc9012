"""A load that dies anywhere, and is run again, adds each record once."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from tests.assets import loads
from tests.assets.loads import Machine, resource
from tests.faulty_store import Crash, Fault, FaultyStore, deaths
from tests.rounds import rounds

pytestmark = [pytest.mark.lengthy, pytest.mark.rounds]

FIRST = [{"id": 1, "v": {"a": 1}}, {"id": 2, "v": {"a": 2}}]
SECOND = [{"id": 2, "v": {"a": 3, "b": "new"}, "more": 1}, {"id": 3, "v": None}]


def tables(rows: list[dict[str, Any]]) -> list[Any]:
    return [
        resource(rows, "events"),
        resource(rows, "orders", write_disposition="merge", primary_key="id"),
        resource(rows, "plans", write_disposition="replace", primary_key="id"),
    ]


def everything(machine: Machine) -> dict[str, Any]:
    """Return all records and markers, and how many loads were recorded."""
    found: dict[str, Any] = {}
    for table in ("events", "orders", "plans"):
        shown = machine.streams.describe(f"raw-{table}")
        found[table] = machine.records(table), shown["markers"]
    found["loads"] = len(machine.records("_dlt_loads"))
    return found


def prepared(tmp_path: Path) -> Machine:
    machine = Machine(open_lake(tmp_path / "lake"), tmp_path / "pipelines")
    machine.run(tables(FIRST))
    return machine


def copied(machine: Machine, folder: Path) -> Machine:
    """Return a copy of the machine and of its lake."""
    shutil.copytree(machine.folder.parent / "lake", folder / "lake")
    copy = machine.copy(folder / "pipelines")
    return replace(copy, lake=open_lake(folder / "lake"))


def test_a_load_that_dies_at_any_request_is_taken_up_and_adds_each_record_once(
    tmp_path: Path,
) -> None:
    begun = prepared(tmp_path / "begun")
    whole = copied(begun, tmp_path / "whole")
    counting = FaultyStore(whole.lake.store)
    whole.run(tables(SECOND), lake=Lake(counting, whole.lake.id))
    expected = everything(whole)
    assert expected["plans"][1] == 2
    chosen = deaths(counting.requests)
    for nth in chosen[:: rounds(2, 1)]:
        machine = copied(begun, tmp_path / f"death {nth}")
        faulty = FaultyStore(machine.lake.store, [Fault("*", nth, "crash-before")])
        with pytest.raises(BaseException) as died:
            machine.run(tables(SECOND), lake=Lake(faulty, machine.lake.id))
        assert isinstance(died.value, Crash) or isinstance(died.value.__cause__, Crash)
        again = machine.pipeline()
        if again.has_pending_data:
            again.run()
        else:  # it died before dlt had extracted anything
            again.run(tables(SECOND))
        assert everything(machine) == expected, nth


def test_a_reply_that_is_lost_changes_nothing(tmp_path: Path) -> None:
    begun = prepared(tmp_path / "begun")
    whole = copied(begun, tmp_path / "whole")
    counting = FaultyStore(whole.lake.store)
    whole.run(tables(SECOND), lake=Lake(counting, whole.lake.id))
    expected = everything(whole)
    for nth in deaths(counting.requests)[:: rounds(4, 1)]:
        machine = copied(begun, tmp_path / f"lost {nth}")
        faulty = FaultyStore(machine.lake.store, [Fault("*", nth, "lost-after")])
        try:
            machine.run(tables(SECOND), lake=Lake(faulty, machine.lake.id))
        except Exception:  # noqa: BLE001
            machine.run(None if machine.pipeline().has_pending_data else tables(SECOND))
        assert everything(machine) == expected, nth


def test_a_load_that_was_finished_but_not_noted_by_dlt_adds_nothing(tmp_path: Path) -> None:
    """As where the working folder is a backup's, or the machine died after the last commit."""
    machine = prepared(tmp_path)
    pipeline = machine.pipeline()
    pipeline.extract(tables(SECOND))
    pipeline.normalize()
    backup = machine.copy(tmp_path / "backup")
    pipeline.load()
    expected = everything(machine)
    for turn in range(2):
        backup.copy(tmp_path / f"copy {turn}").pipeline().load()
        assert everything(machine) == expected


def test_other_loads_in_between_change_nothing_of_a_repeated_one(tmp_path: Path) -> None:
    machine = prepared(tmp_path)
    pipeline = machine.pipeline()
    pipeline.extract(tables(SECOND))
    pipeline.normalize()
    backup = machine.copy(tmp_path / "backup")
    pipeline.load()
    other = Machine(machine.lake, tmp_path / "other")
    other.run(resource([{"id": 9, "another": 1.5, "v": {"c": True}}], "events"), "another")
    expected = everything(machine)
    backup.pipeline().load()
    assert everything(machine) == expected


def test_a_damaged_file_of_a_load_is_named_and_nothing_is_added(tmp_path: Path) -> None:
    machine = prepared(tmp_path)
    expected = everything(machine)
    pipeline = machine.pipeline()
    pipeline.extract(tables(SECOND))
    pipeline.normalize()
    (file,) = (machine.folder / "shop/load/normalized").rglob("plans.*.gz")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(loads.dlt_errors.PipelineStepFailed) as failed:
        pipeline.load()
    assert isinstance(failed.value.__cause__, SchemaMismatchError)
    assert "plans." in failed.value.__cause__.problem
    assert everything(machine) == expected
    machine.pipeline().abort_packages()
    machine.run(tables(SECOND))
    assert len(machine.records("events")) == 4

"""Results of records that came in files, which follow later changes after files are gone."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.errors import AdmittedFileError, RestatementError
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.resources.file_streams import streams
from dagster_adjunct.resources.file_streams.folder import FileRules, FolderStreams
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.startpoint import StartpointUpcoming
from dagster_adjunct.resources.streams.system import OFFSET, OffsetRange
from tests.resources.file_streams.landing import CLICKS, LocalLanding, clicks, lines, problems

WEEK = timedelta(days=7)


@pytest.fixture(autouse=True)
def nothing_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_declared", {})


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake")


@pytest.fixture
def landing(tmp_path: Path) -> LocalLanding:
    return LocalLanding(tmp_path / "landing")


def pricing(landing: LocalLanding, lake: Lake, rules: FileRules) -> Application:
    """Return an application that joins the numbers in files with fees, which are delivered as
    versions.
    """
    clicks(landing, lake, rules=rules)
    fees = bounded_dataset("fees", input="lake.fees", key="n", broadcast=True)
    app = Application("pricing", engine="auto")
    clicked = app.input_stream("files.clicks", default_offset="oldest")
    priced = clicked.join(app.table(fees), on="n", how="left", select=["fee"], restate=WEEK)
    priced.send_to(app.output_stream("lake.out", partitions=1, key="n"))
    return app


def set_fee(lake: Lake, fee: int) -> None:
    """Deliver a version of the fees: this one, for all numbers."""
    written = LakeStreams(lake)
    if "fees" not in written.list_streams():
        written.create("fees", schema=Schema.of(n="bigint", fee="int"), key=["n"], partitions=1)
    rows = [{"n": n, "fee": fee} for n in range(10)]
    written.append("fees", rows, producer="test", sequence=fee, end_of_dataset=f"v{fee}")


def run(app: Application, lake: Lake) -> None:
    run_application(app, lake=lake, spark=IN_PROCESS, wait=0)


def latest(lake: Lake) -> dict[int, int]:
    """Return the fee of each number, by the latest results."""
    read = LakeStreams(lake)
    rows = read.read_arrow(read.all_ranges("out"), epochs="latest").to_pylist()
    return {row["n"]: row["fee"] for row in rows}


@pytest.mark.lengthy
@pytest.mark.parametrize("way_out", ["rule", "command", "startpoint"])
def test_files_that_are_gone_hold_no_new_records_back(
    landing: LocalLanding, lake: Lake, monkeypatch: pytest.MonkeyPatch, way_out: str
) -> None:
    app = pricing(landing, lake, FileRules())
    set_fee(lake, 1)
    for n in range(4):
        landing.put(str(n), lines(n))
    run(app, lake)
    landing.delete("0")
    landing.delete("2")
    set_fee(lake, 2)
    for new in (4, 5):
        landing.put(str(new), lines(new))
        with pytest.raises(RestatementError) as caught:
            run(app, lake)
        assert isinstance(caught.value.__cause__, AdmittedFileError)
        assert "2 files of files.clicks with 2 records" in caught.value.problem
        assert caught.value.dataset == "fees"
    assert latest(lake) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2}
    restated = {0: 1, 1: 2, 2: 1, 3: 2, 4: 2, 5: 2}
    if way_out == "rule":
        monkeypatch.setattr(streams, "_declared", {})
        app = pricing(landing, lake, FileRules(lost="set-aside"))
    elif way_out == "command":
        for name in ("0", "2"):
            FolderStreams(lake).set_aside("clicks", name, reason="cleaned")
    else:
        restated = latest(lake)
        Startpoints(app, lake=lake).request(
            "changes.fees", StartpointUpcoming(), reason="test", by="test"
        )
    run(app, lake)
    assert latest(lake) == restated


@pytest.mark.parametrize("rule", ["fail", "set-aside"])
def test_records_at_places_in_files_that_are_gone_since_are_left_out(
    landing: LocalLanding, lake: Lake, rule: str
) -> None:
    system = clicks(landing, lake, rules=FileRules(lost=rule))  # type: ignore[arg-type]
    for name, n in (("a", 1), ("b", 2), ("c", 1), ("d", 1)):
        landing.put(name, lines(n, n))
    system.admit("clicks")
    keys = pa.table({"n": pa.array([1], pa.int64())})
    places = system.find_records({CLICKS: OffsetRange("0", "8")}, keys)
    assert places.column(OFFSET).to_pylist() == [0, 1, 4, 5, 6, 7]
    landing.delete("c")
    if rule == "fail":
        with pytest.raises(AdmittedFileError):
            system.read_records("clicks", places)
        system.set_aside("clicks", "c", reason="cleaned")
    found = system.read_records("clicks", places)
    assert found.column(OFFSET).to_pylist() == [0, 1, 6, 7]
    assert problems(system) == {"c": "lost" if rule == "set-aside" else "set aside"}

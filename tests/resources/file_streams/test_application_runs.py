"""Applications that read files: every record once, startpoints of all kinds, runs that die."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.file_streams.folder import FileRules, FolderStreams
from dagster_adjunct.resources.file_streams.log import FileRetention
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.startpoints import (
    Startpoint,
    StartpointOldest,
    Startpoints,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
)
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.resources.file_streams.landing import LocalLanding, clicks, lines
from tests.rounds import rounds

BEGAN = 1_700_000_000


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake")


def application(**options: Any) -> Application:
    app = Application("counting", engine="auto", max_batch_records=3, **options)
    clicked = app.input_stream("files.clicks", default_offset="oldest")
    clicked.with_columns(double="n * 2").send_to(app.output_stream("lake.doubled", partitions=1))
    return app


def run(lake: Lake) -> None:
    run_application(application(), lake=lake, spark=IN_PROCESS, wait=0)


def sent(lake: Lake) -> list[tuple[int, int]]:
    """Return what the application has sent: the number, and the offset it was read at."""
    streams = LakeStreams(lake)
    rows = streams.read_arrow(streams.all_ranges("doubled"), positions=True).to_pylist()
    assert all(row["double"] == 2 * row["n"] for row in rows)
    return [(row["n"], row["__source_offset"]) for row in rows]


def put(landing: LocalLanding, *names: int) -> None:
    for number in names:
        landing.put(f"{number}", lines(number, number + 100), modified=BEGAN + number)


def records(*names: int) -> list[tuple[int, int]]:
    """Return what is sent of these files, which were the only ones."""
    return [
        (one, 2 * at + row) for at, n in enumerate(names) for row, one in enumerate((n, n + 100))
    ]


@pytest.mark.lengthy
def test_runs_send_what_arrived_since_the_last_one(landing: LocalLanding, lake: Lake) -> None:
    clicks(landing, lake)
    put(landing, 1, 2)
    run(lake)
    assert sent(lake) == records(1, 2)
    run(lake)
    put(landing, 3, 0)
    run(lake)
    assert sent(lake) == records(1, 2, 0, 3)


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("position", "first"),
    [
        (StartpointOldest(), 0),
        (StartpointSpecific("3"), 3),
        (StartpointTimestamp((BEGAN + 3) * 1000), 4),
        (StartpointTimestamp((BEGAN + 9) * 1000), 6),
        (StartpointUpcoming(), 6),
    ],
)
def test_startpoints_of_all_kinds_begin_where_they_say(
    landing: LocalLanding, lake: Lake, position: Startpoint, first: int
) -> None:
    clicks(landing, lake)
    put(landing, 1, 2, 3)
    run(lake)
    before = sent(lake)
    Startpoints(application(), lake=lake).request(
        "files.clicks", position, reason="again", by="test"
    )
    run(lake)
    assert sent(lake) == before + records(1, 2, 3)[first:]
    put(landing, 4)
    run(lake)
    assert sent(lake) == before + records(1, 2, 3)[first:] + records(1, 2, 3, 4)[6:]


@pytest.mark.lengthy
def test_a_bounded_replay_reads_the_same_records_at_the_same_offsets(
    landing: LocalLanding, lake: Lake
) -> None:
    clicks(landing, lake)
    put(landing, 1, 2)
    run(lake)
    before = sent(lake)
    Startpoints(application(), lake=lake).request(
        "files.clicks", StartpointOldest(), until=StartpointSpecific("4"), reason="again", by="test"
    )
    put(landing, 0)
    run(lake)
    assert sorted(sent(lake)) == sorted([*before, *before, *records(1, 2, 0)[4:]])


@pytest.mark.lengthy
def test_a_position_that_retention_has_dropped_is_the_usual_error(
    landing: LocalLanding, lake: Lake
) -> None:
    system = clicks(landing, lake, retention=FileRetention(max_files=1))
    put(landing, 1)
    run(lake)
    put(landing, 2, 3, 4)
    system.admit("clicks")
    system.maintain("clicks")
    with pytest.raises(errors.OffsetOutOfRangeError) as caught:
        run(lake)
    assert caught.value.stream == "files.clicks"


@pytest.mark.lengthy
def test_a_run_goes_on_without_a_file_that_was_set_aside(landing: LocalLanding, lake: Lake) -> None:
    system = clicks(landing, lake)
    put(landing, 1, 2)
    system.admit("clicks")
    landing.delete("1")
    with pytest.raises(errors.AdmittedFileError):
        run(lake)
    system.set_aside("clicks", "1", reason="gone")
    run(lake)
    assert sent(lake) == records(1, 2)[2:]


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(2, 20)))
def test_runs_that_die_send_each_record_once(
    landing: LocalLanding, tmp_path: Path, lake: Lake, seed: int
) -> None:
    draw = random.Random(seed)
    options = draw.choice([{}, {"listing": "after-last"}])
    clicks(landing, lake, rules=FileRules(late="append"), **options)
    for number in range(8):
        put(landing, *(10 * number + one for one in range(draw.randint(0, 2))))
        kind = draw.choice(["crash-before", "crash-after"])
        fault = Fault("*", draw.randint(1, 60), kind)  # type: ignore[arg-type]
        with contextlib.suppress(Crash, errors.AdjunctError):
            run(Lake(FaultyStore(lake.store, [fault]), lake.id, shared=lake.shared))
        FolderStreams(lake).admit("clicks", all_files=draw.random() < 0.3)
    _run_to_the_end(lake)
    found = sent(lake)
    names = [int(path.name) for path in landing.root.iterdir()]
    assert sorted(n for n, _ in found) == sorted([*names, *(name + 100 for name in names)])
    assert [at for _, at in found] == [*range(2 * len(names))]


def _run_to_the_end(lake: Lake) -> None:
    """Run once those that died are no longer taken to be running."""
    for _ in range(60):
        try:
            run(lake)
            return
        except errors.ApplicationBusyError:
            import time

            time.sleep(0.5)
    raise AssertionError("the application stays busy")

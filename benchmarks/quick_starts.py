"""Quick starts: a code location, `--help`, a run and a tick with nothing to do, and the daemon's
run of 300 records.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.process_time import timed_process

if TYPE_CHECKING:
    from dagster_adjunct import Application, Lake

RECORDS, KEYS, TICKS = 300, 1_000, 50
_PYPROJECT = '[tool.dagster]\nmodule_name = "place"\n'
_PLACE = """import os
from datetime import timedelta

from benchmarks.quick_starts import application
from dagster_adjunct import build_definitions

defs = build_definitions(
    application(os.environ["ADJUNCT_ENGINE"]),
    lake=os.environ["ADJUNCT_LAKE"],
    look_every=timedelta(seconds=5),
)
"""


def application(engine: str) -> Application:
    """Return the application: records joined with a dataset, into a stream."""
    from dagster_adjunct import Application, bounded_dataset

    app = Application("quick", engine=engine)  # type: ignore[arg-type]
    rates = app.table(bounded_dataset("rates", input="lake.rates", key="k", partitions=2))
    orders = app.input_stream("lake.orders", default_offset="oldest")
    orders.join(rates, on="k", select=["n as rate"]).send_to(
        app.output_stream("lake.priced", partitions=2, key="k")
    )
    return app


def run(rounds: int) -> None:
    """Print the seconds of each."""
    _code_location(rounds)
    with TemporaryDirectory() as folder:
        lake = _filled(Path(folder))
        _commands(lake, rounds)
        _ticks(lake)
    for engine, goal in (("auto", 8), ("spark", 20)):
        with TemporaryDirectory() as folder:
            _daemon(Path(folder), rounds, engine, goal)


def _code_location(rounds: int) -> None:
    """Compare loading the flights' code location with importing Dagster, in processor time."""
    used: dict[str, list[float]] = {"dagster": [], "dagster_adjunct.orchestration.definitions": []}
    for _ in range(rounds + 1):
        for module, seconds in used.items():
            seconds.append(timed_process([sys.executable, "-c", f"import {module}"], os.environ)[1])
    dagster, whole = (min(seconds) for seconds in used.values())
    ratio = (whole - dagster) / dagster
    print(
        f"code location: import dagster {dagster:.2f} CPU s, a code location"
        f" {whole - dagster:.2f} more"
    )
    print(f"  code location / dagster = {ratio:.2f} (goal: at most 0.5)\n")


def _filled(folder: Path) -> Lake:
    import pyarrow as pa

    from dagster_adjunct import IN_PROCESS, LakeStreams, Schema, open_lake, run_application

    streams = LakeStreams(open_lake(folder / "lake"))
    for name in ("rates", "orders"):
        streams.create(name, schema=Schema.of(k="string", n="int"), key=["k"], partitions=2)
    keys = pa.table(
        {"k": [f"k{number}" for number in range(KEYS)], "n": pa.array(range(KEYS), pa.int32())}
    )
    streams.append("rates", keys, producer="bench", sequence=1, end_of_dataset="v1")
    streams.append("orders", keys, producer="bench", sequence=1)
    run_application(application("auto"), lake=streams.lake, spark=IN_PROCESS)
    return streams.lake


def _commands(lake: Lake, rounds: int) -> None:
    command = [sys.executable, "-m", "dagster_adjunct.orchestration.cli.main"]
    environment = {**os.environ, "ADJUNCT_LAKE": lake.url, "ADJUNCT_ENGINE": "spark"}
    environment["ADJUNCT_SPARK_MASTER"] = "local[2]"
    with (Path(lake.url).parent / "quick.py").open("w") as file:
        file.write(
            'from benchmarks.quick_starts import application\n\napp = application("spark")\n'
        )
    environment["PYTHONPATH"] = f"{Path(lake.url).parent}:{environment.get('PYTHONPATH', '')}"
    for arguments, goal in ((["--help"], 0.3), (["run", "quick:app"], 2.0)):
        took = [timed_process([*command, *arguments], environment) for _ in range(rounds + 1)]
        wall, used = (min(times) for times in zip(*took, strict=True))
        print(
            f"adjunct {' '.join(arguments)}: {wall:.2f} s, {used:.2f} CPU s (goal: at most {goal})"
        )


def _ticks(lake: Lake) -> None:
    from dagster import DagsterInstance

    from tests.orchestration.dagster.ticking import Ticker

    with DagsterInstance.ephemeral() as instance:
        for name in ("new_records", "startpoints", "restart"):
            ticker = Ticker(lake, application("spark"), instance, f"quick_{name}")
            ticker.skipped()
            began, wall = time.process_time(), time.monotonic()
            for _ in range(TICKS):
                ticker.skipped()
            used, took = (time.process_time() - began) / TICKS, (time.monotonic() - wall) / TICKS
            print(
                f"a tick of {name}: {used * 1000:.1f} CPU ms, {took * 1000:.1f} ms (goal: at most"
                " 100)"
            )
    print()


def _daemon(folder: Path, rounds: int, engine: str, goal: int) -> None:
    import pyarrow as pa

    from dagster_adjunct import LakeStreams, application_state
    from tests.servers.dagster import DONE, dagster_servers

    lake = _filled(folder)
    project = folder / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(_PYPROJECT)
    (project / "place.py").write_text(_PLACE)
    root = Path(__file__).resolve().parent.parent
    environment = {
        "ADJUNCT_LAKE": lake.url,
        "ADJUNCT_ENGINE": engine,
        "ADJUNCT_SPARK_MASTER": "local[2]",
    }
    environment |= {"PYTHONPATH": str(root), "ADJUNCT_SPARK_QUICK": "true"}
    sent, launched = list[float](), list[float]()
    with dagster_servers(
        folder / "home", environment, project=project, location="place"
    ) as servers:
        servers.start_sensor("quick_new_records")
        for number in range(rounds + 1):
            part = {
                "k": [f"k{place}" for place in range(RECORDS)],
                "n": pa.array(range(RECORDS), pa.int32()),
            }
            batch, began = (
                application_state(lake, "quick").batch,
                datetime.now().astimezone().timestamp(),
            )
            LakeStreams(lake).append(
                "orders", pa.table(part), producer="bench", sequence=number + 2
            )
            servers.until(
                "a batch", 120, lambda batch=batch: application_state(lake, "quick").batch > batch
            )
            last = application_state(lake, "quick").last
            assert last is not None
            assert last.records == RECORDS
            servers.until(
                "the end", 60, lambda: all(one["status"] in DONE for one in servers.runs().values())
            )
            if number:
                at = last.closed_at.timestamp()
                sent.append(at - began)
                launched.append(at - max(one["creationTime"] for one in servers.runs().values()))
    shown = f"{statistics.median(sent):.1f} s ({min(sent):.1f}-{max(sent):.1f})"
    print(f"daemon, engine {engine}: append to commit {shown}, sensors look every 5 s")
    print(f"  launch to commit: {statistics.median(launched):.1f} s (goal: at most {goal})\n")

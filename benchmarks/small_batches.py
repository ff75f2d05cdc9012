"""Batches of 2,000 flights in a warm session against foreachBatch of Structured Streaming; a cold
run of 300.

Adjunct with Spark, Adjunct in process and foreachBatch do the same four joins, the same output and
the same table, in turns in one session, and must leave the same.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.foreach_batch import ForeachBatch
from benchmarks.process_time import timed_process, tree_seconds

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct import Lake

BATCH = 2_000
TURN = 4
COLD = 300
_APPLICATION = "dagster_adjunct.examples.flights.pipeline:app"


def run(rounds: int) -> None:
    warm(rounds)
    cold(rounds)


def warm(rounds: int) -> None:
    from dagster_adjunct import run_application, session_scope, systems_for

    print(
        f"small batches: {BATCH:,} records, four joins, an output stream and a table;"
        f" {TURN} batches a turn"
    )
    with TemporaryDirectory() as folder, session_scope(master="local[2]") as session:
        root, spark, tables = Path(folder), session(), _tables()
        peer = ForeachBatch(spark, root)
        peer.load(tables["flights"], **_for_peer(tables))
        sides = {engine: _application(root, engine) for engine in ("spark", "auto")}
        for _, lake in sides.values():
            _deliver_tables(lake, tables)
        took: dict[str, list[float]] = {name: [] for name in (*sides, "foreachBatch")}
        busy = dict.fromkeys(took, 0.0)
        outside: list[float] = []
        for turn in range(rounds + 1):  # the first one warms up
            for number in range(TURN):
                part = _flights(tables, (turn * TURN + number) * BATCH, BATCH)
                peer.deliver(part)
                for _, lake in sides.values():
                    _send(lake, part, turn * TURN + number + 1)
            for name in took:
                before, seen = tree_seconds(), _Times()
                if name in sides:
                    app, lake = sides[name]
                    systems = systems_for(app, lake=lake)
                    report = run_application(
                        app, lake=lake, systems=systems, spark=spark, run=f"t-{turn}", on_event=seen
                    )
                    assert report.step.in_process_batches == (TURN if name == "auto" else 0)
                    batches = seen.batches
                else:
                    batches = peer.run()
                assert len(batches) == TURN
                if turn:
                    busy[name] += tree_seconds() - before
                    took[name] += batches
                    if name == "spark":
                        outside.append(
                            (report.step.seconds["intent"] + report.step.seconds["commit"]) / TURN
                        )
        for engine, (_, lake) in sides.items():
            _compare(root, lake, engine)
    for name, seconds in took.items():
        spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
        cpu = busy[name] / len(seconds)
        print(f"  {name}: {statistics.median(seconds):.2f} s a batch ({spread}), {cpu:.2f} CPU s")
    for name, goal in (("spark", "1.0"), ("auto", "0.5")):
        ratio = statistics.median(took[name]) / statistics.median(took["foreachBatch"])
        cpu = busy[name] / busy["foreachBatch"]
        print(
            f"  {name} / foreachBatch = {ratio:.2f} in time, {cpu:.2f} in CPU s (goal: at most"
            f" {goal})"
        )
    print(
        f"  planning, intent and commit: {statistics.median(outside):.3f} s a batch (goal: under"
        " 0.2)\n"
    )


def cold(rounds: int) -> None:
    """From the start of a process, `adjunct run`, to the commit of a batch of 300 records."""
    for engine, goal in (("spark", 15), ("auto", 8)):
        _cold(rounds, engine, goal)


def _cold(rounds: int, engine: str, goal: int) -> None:
    from dagster_adjunct import application_state

    print(f"cold: adjunct run over {COLD} records, datasets as they are, engine {engine}")
    walls, commits, busy = [], [], []
    with TemporaryDirectory() as folder:
        root = Path(folder)
        app, lake = _application(root, engine)
        tables = _tables()
        _deliver_tables(lake, tables)
        command = [
            sys.executable,
            "-m",
            "dagster_adjunct.orchestration.cli.main",
            "run",
            _APPLICATION,
        ]
        environment = {**os.environ, "ADJUNCT_LAKE": lake.url, "ADJUNCT_SPARK_MASTER": "local[2]"}
        environment["ADJUNCT_ENGINE"] = engine
        for number in range(rounds + 1):  # the first one builds the datasets
            _send(lake, _flights(tables, number * COLD, COLD), number + 1)
            began = datetime.now().astimezone()
            wall, used = timed_process(command, environment)
            last = application_state(lake, app.name).last
            assert last is not None
            assert last.records == COLD
            if number:
                walls.append(wall)
                busy.append(used)
                commits.append((last.closed_at - began).total_seconds())
    spread = f"{min(commits):.1f}-{max(commits):.1f}"
    print(f"  start to commit: {statistics.median(commits):.1f} s ({spread}; goal: at most {goal})")
    print(
        f"  start to end: {statistics.median(walls):.1f} s, {statistics.median(busy):.1f} CPU s\n"
    )


class _Times:
    """Seconds of each batch, from the end of what was before it to its own."""

    def __init__(self) -> None:
        self.batches: list[float] = []
        self._began = time.perf_counter()

    def __call__(self, event: Any) -> None:
        what = getattr(event, "what", None)
        now = time.perf_counter()
        if what == "batch":
            self.batches.append(now - self._began)
        if what not in ("intent", "output", "outputs"):
            self._began = now


def _application(root: Path, engine: str) -> tuple[Any, Lake]:
    os.environ["ADJUNCT_DEMO_SQLITE"] = str(root / f"{engine}.sqlite")
    from dagster_adjunct import open_lake
    from dagster_adjunct.examples.flights.pipeline import flight_delays

    app = flight_delays()
    app.max_batch_records, app.engine = BATCH, engine
    return app, open_lake(root / engine)


def _tables() -> dict[str, pa.Table]:
    from dagster_adjunct.examples.flights.data import SCHEMAS, load

    return {name: load(name) for name in SCHEMAS}


def _for_peer(tables: dict[str, pa.Table]) -> dict[str, pa.Table]:
    planes = tables["planes"].rename_columns({"year": "plane_year"})
    airports = tables["airports"].select(["faa", "name"]).rename_columns(["dest", "dest_name"])
    return {
        "planes": planes.select(["tailnum", "manufacturer", "model", "plane_year", "seats"]),
        "weather": (
            tables["weather"].select(
                ["origin", "time_hour", "temp", "wind_speed", "precip", "visib"]
            )
        ),
        "airlines": tables["airlines"].rename_columns({"name": "airline"}),
        "airports": airports,
    }


def _deliver_tables(lake: Lake, tables: dict[str, pa.Table]) -> None:
    from dagster_adjunct.examples.flights.deliver import create_streams

    streams = create_streams(lake)
    for name in ("planes", "airlines", "airports", "weather"):
        marker = None if name == "weather" else "all"
        streams.append(name, tables[name], producer="benchmark", sequence=1, end_of_dataset=marker)


def _flights(tables: dict[str, pa.Table], start: int, count: int) -> pa.Table:
    return tables["flights"].slice(start, count)


def _send(lake: Lake, flights: pa.Table, sequence: int) -> None:
    from dagster_adjunct import LakeStreams

    LakeStreams(lake).append("flights", flights, producer="benchmark", sequence=sequence)


def _compare(root: Path, lake: Lake, engine: str) -> None:
    """Both have written the same records and the same table."""
    import sqlite3

    import duckdb

    from dagster_adjunct import LakeStreams

    streams = LakeStreams(lake)
    ours = streams.read_arrow(streams.all_ranges("enriched-flights"))
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    connection.register("ours", ours)
    theirs = f"read_parquet('{root}/enriched/*.parquet')"
    columns = ", ".join(name for name in ours.column_names if not name.startswith("__"))
    for one, other in (("ours", theirs), (theirs, "ours")):
        differing = connection.execute(
            f"SELECT count(*) FROM (SELECT {columns} FROM {one} EXCEPT ALL SELECT {columns} FROM"
            f" {other})"
        ).fetchone()
        assert differing == (0,), f"{differing} records differ"
    rows = []
    for name in (engine, "peer"):
        with sqlite3.connect(root / f"{name}.sqlite") as database:
            rows.append(database.execute(_STATE).fetchall())
    assert rows[0] == rows[1], f"{len(rows[0])} and {len(rows[1])} aircraft, or others"


_STATE = (
    "SELECT tailnum, manufacturer, model, plane_year, seats, last_flight, last_origin, last_dest,"
    " last_dep_delay FROM aircraft_state ORDER BY tailnum"
)

"""With ADJUNCT_TEST_ENGINES=all, other engines do each run of a `StepWorld` first, and have to
leave what it leaves.

`make test-engines` sets it. Each engine finds the world's folder as it was before the run. A run is
left out if what it does can't be taken back: with an `on_event`, which may do anything; with
streams or a lake outside of the folder; with tables that are written and not in an SQLite file of
the folder; and in tests marked `one_engine`, whose functions have effects, whose Adjunct is
patched, or which depend on the clock.
"""

from __future__ import annotations

import pickle
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.reading.stored_versions import list_datasets, open_stored_versions
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.step.context import BatchInputs, BatchMetrics, StepContext
from dagster_adjunct.orchestration.step.engines import BatchEngine, SmallBatchesInProcess
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.objects.store import GuardedStore
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.spark.tasks import find_adjunct_error
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.clocks import on_clock
from tests.orchestration.step_world import ByTasks, StepWorld, ignore

Left = dict[str, Any]
_BY_REQUESTS = {"requests", "successes", "failures", "retries", "retry_waits"}
"""Counters of requests, which depend on how many tasks write, and on how long they wait for each
other.
"""
_BY_RUN = {"seconds", "versions"}
"""The fields of an application's state that differ between runs; versions of local tables are
named by chance.
"""
_BY_RECORD = {"partition", "offset", "record", "key"}
"""The fields of an error that say which record it is about: if several fail in tasks, any may be
the first.
"""


class SmallBatches(BatchEngine):
    """Spark, with batches that the driver reads and writes where it can, however many records
    they have.
    """

    def run(
        self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]
    ) -> BatchMetrics:
        return super().run(context, replace(inputs, few=True), before_output)


class WithoutSpark(SmallBatchesInProcess):
    """No Spark, however many records a batch has, except for what only Spark can compute."""

    def run(
        self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]
    ) -> BatchMetrics:
        return super().run(context, replace(inputs, few=True), before_output)


ENGINES = {"tasks": ByTasks, "small": SmallBatches, "in process": WithoutSpark}
# Small batches differ from tasks in who reads and writes, which test_small_batches.py shows. What
# operators compute is the same plan.
SMALL = pytest.param("small", marks=pytest.mark.long)
BY_SPARK = ("tasks", SMALL)
BY_EACH = (*BY_SPARK, "in process")


def run_by_all(
    world: StepWorld, app: Application, options: dict[str, Any], counted: Counter[str]
) -> StepReport:
    """Run the application by the other engines, each from the same state, then as the test asks;
    compare all.
    """
    why = find_obstacle(world, app, options)
    if why:
        counted[f"runs left out: {why}"] += 1
        return run_step(world.context(app, **options))
    # The results of windows have the clock of their batch as timestamp.
    began = world.lake.now()
    world = replace(world, lake=on_clock(world.lake, lambda: began))
    before = world.folder.with_name(f"{world.folder.name}-before")
    shutil.copytree(world.folder, before)
    left = dict[str, Left]()
    for name, engine in ENGINES.items():
        outputs = {name: output.table for name, output in app.output_tables.items()}
        datasets = {each.name: each for each in app.datasets}
        twin = app._with_tables(datasets, _copy_tables(app), outputs)
        twin.engine = "auto" if engine is WithoutSpark else "spark"
        if engine is WithoutSpark and not _needs_no_spark(world, twin):
            continue
        try:
            report = run_step(world.context(twin, **options), engine())
        except Exception as error:  # noqa: BLE001 - it is compared with that of the last run, which is raised
            left[name] = _describe_error(error)
        else:
            left[name] = _left_by(world, report, twin)
            counted[f"batches by {name}"] += (
                report.in_process_batches if engine is WithoutSpark else report.batches
            )
        counted[f"runs by {name}"] += 1
        _empty(world.folder)
        shutil.copytree(before, world.folder, dirs_exist_ok=True)
    shutil.rmtree(before)
    counted["runs compared"] += 1
    try:
        report = run_step(world.context(app, **options))
    except Exception as error:
        _compare(_describe_error(error), left)
        raise
    _compare(_left_by(world, report, app), left)
    return report


def find_obstacle(world: StepWorld, app: Application, options: dict[str, Any]) -> str:
    """Return why a run can't be taken back; "" if it can."""
    if options.get("on_event", ignore) is not ignore:
        return "on_event"
    if world.spark is IN_PROCESS:
        return "no session"
    store = world.lake.store
    here = isinstance(store, GuardedStore) and world.folder in Path(store.url).parents
    if not here or set(world.systems) != {"lake"}:
        return "streams or a lake elsewhere"
    for table in app.tables.values():
        write = table.write_function
        if write is not None and not (
            isinstance(write, SqliteTable) and world.folder in Path(write.path).parents
        ):
            return "tables elsewhere"
    try:
        _copy_tables(app)
    except (pickle.PicklingError, AttributeError, TypeError):
        return "tables that can't be copied"
    return ""


def _copy_tables(app: Application) -> dict[str, RemoteTable[Any, Any, Any]]:
    """Return the tables as another process gets them: with nothing open, cached or counted."""
    return {name: pickle.loads(pickle.dumps(table)) for name, table in app.tables.items()}


def _needs_no_spark(world: StepWorld, app: Application) -> bool:
    try:
        return not plan_application(app, systems=world.systems).engine.needs_spark
    except AdjunctError:
        return False


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _describe_error(error: Exception) -> Left:
    ours = find_adjunct_error(error)
    if ours is None:
        return {"error": type(error).__name__}
    record = {name: value for name, value in ours.facts.items() if name in _BY_RECORD}
    facts = {name: value for name, value in ours.facts.items() if name not in _BY_RECORD}
    return {"error": type(ours).__name__, "facts": facts, f"problem with {record}": ours.problem}


def _left_by(world: StepWorld, report: StepReport, app: Application) -> Left:
    """Return all that a run leaves, but for what differs between any two: seconds, and names
    made by chance.
    """
    left: Left = {
        "report": (report.batches, report.caught_up, report.startpoints),
        "counters": _without(report.counters, _BY_REQUESTS),
        "watermarks": [
            (it.stream, it.watermark, it.newest, it.held_by, it.idle)
            for it in report.event_time.watermarks
        ],
        "states": {name: size.rows for name, size in report.event_time.state_sizes.items()},
        "state": _without(world.state(app).model_dump(mode="json"), _BY_RUN | _BY_REQUESTS),
    }
    streams = world.streams
    for stream in streams.list_streams():
        rows = streams.read_arrow(streams.all_ranges(stream), positions=True)
        left[f"stream {stream}"] = [repr(row) for row in rows.to_pylist()]
        for producer, sent in streams.state(stream).state.producers.items():
            left[f"digests of {stream} by {producer}"] = [
                (each.sequence, each.digest) for each in sent
            ]
    for dataset in list_datasets(world.lake):
        reader = open_stored_versions(world.lake, dataset).current()
        if reader is not None:
            entries = dict(reader.items())
            timed = reader.sealed.history is not None
            left[f"dataset {dataset}"] = [repr(entry) for entry in entries.items()]
            left[f"history of {dataset}"] = [
                repr(reader.history_of(key)) for key in entries if timed
            ]
    for path in sorted(world.folder.rglob("*.sqlite")):
        left |= {f"table {name} in {path.name}": rows for name, rows in _read_sqlite(path)}
    return left


def _read_sqlite(path: Path) -> Iterator[tuple[str, list[str]]]:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        for (name,) in connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table'"
        ).fetchall():
            if name.endswith("__adjunct_runs"):  # an id of its own for each store
                continue
            times = {"at"} if name.endswith("__adjunct") else set()
            rows = connection.execute(f'SELECT * FROM "{name}"').fetchall()
            yield name, sorted(repr(_without(dict(row), times)) for row in rows)


def _without(value: Any, names: set[str]) -> Any:
    """Return a JSON value without these fields, at any depth."""
    if isinstance(value, dict):
        return {name: _without(each, names) for name, each in value.items() if name not in names}
    return [_without(each, names) for each in value] if isinstance(value, list | tuple) else value


def _compare(asked: Left, left: dict[str, Left]) -> None:
    """Fail with what differs between what the engines left and what the one that the test asks
    for left.
    """
    reported = []
    for name, theirs in left.items():
        named = theirs.keys() | asked.keys()
        if "error" in named:
            named = {"error", "facts"} | (theirs.keys() & asked.keys())
        for what in sorted(what for what in named if theirs.get(what) != asked.get(what)):
            reported.append(f"{what}\n  {name}: {theirs.get(what)}\n  as asked: {asked.get(what)}")
    if reported:
        pytest.fail("engines differ in:\n" + "\n".join(reported))

"""The main job as one command: deliver, run, deliver, run, through Dagster and Spark, then show
the results.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dagster_adjunct import open_lake
from dagster_adjunct.code_location import prepare_dagster_home
from dagster_adjunct.errors import AdjunctError
from dagster_adjunct.examples.flights.deliver import deliver

FOLDER = Path(".adjunct")
FLIGHTS = 336_776
# The progress bar tells what happens; Dagster keeps the whole log for the UI.
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


@dataclass(slots=True)
class Stages:
    """Wall time of each stage, in seconds, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began


class _Follower(logging.Handler):
    """Moves the progress bar as batches close, from what runs log; in a file or a pipe, a line
    for each event.
    """

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.INFO)
        self._progress, self._task = progress, progress.add_task("starting", total=FLIGHTS)
        self._began = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "adjunct_event", None)
        if getattr(event, "is_notable", True):
            completed = event.detail["records"] if getattr(event, "what", "") == "batch" else None
            self.show(record.getMessage(), completed)

    def show(self, text: str, completed: int | None = None) -> None:
        self._progress.update(self._task, description=text, completed=completed)
        console = self._progress.console
        if not console.is_terminal:
            line = f"{time.monotonic() - self._began:6.1f} s  {text}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def run_demo(*, lake_url: str | None, postgres: str | None, master: str | None) -> None:
    """Run the demo into `.adjunct/` (or another lake, another table) and print what came out.

    A second run finds everything done, changes nothing and says so.
    """
    console = Console()
    began = time.monotonic()
    _set_environment(lake_url, postgres, master)
    lake = open_lake(lake_url)
    stages = Stages()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        follower = _Follower(progress)
        log = logging.getLogger("adjunct")
        log.addHandler(follower)
        log.setLevel(logging.INFO)
        log.propagate = False
        added = 0
        with stages.stage("load Dagster"):
            job, *others, instance = _jobs()
        for part in (1, 2):
            follower.show(f"delivering part {part}")
            with stages.stage(f"deliver part {part}"):
                added += deliver(lake, part)
            follower.show(f"run {part}")
            with stages.stage(f"run {part}"):
                result = job.execute_in_process(
                    instance=instance, raise_on_error=False, run_config=_QUIET
                )
            if not result.success:
                raise _failure(result)
        for other in others:
            name = other.name.replace("_", " ")
            follower.show(name, completed=0)
            with stages.stage(name):
                behind = other.execute_in_process(
                    instance=instance, raise_on_error=False, run_config=_QUIET
                )
            if not behind.success:
                raise _failure(behind)
        log.removeHandler(follower)
    if not added and not _batches(result):
        seconds = time.monotonic() - began
        console.print(
            f"Nothing to do: everything was delivered and processed before ({seconds:.1f} s)."
        )
    from dagster_adjunct.examples.flights.report import show_report

    with stages.stage("report"):
        show_report(console, lake, FOLDER / "demo.png")
    if added:
        for name, seconds in stages.seconds.items():
            console.print(f"  {name:<17} {seconds:6.1f} s")
    console.print(
        "The same runs in the Dagster UI: [bold]make ui[/], then open http://127.0.0.1:3000"
    )


def _set_environment(lake_url: str | None, postgres: str | None, master: str | None) -> None:
    if lake_url:
        os.environ["ADJUNCT_LAKE"] = lake_url
    if postgres:
        os.environ["ADJUNCT_DEMO_POSTGRES"] = postgres
    if master:
        os.environ["ADJUNCT_SPARK_MASTER"] = master
    os.environ["DAGSTER_HOME"] = str(prepare_dagster_home(FOLDER / "dagster"))


def _jobs() -> tuple[Any, ...]:
    """Import the pipeline now that its environment is set: return its jobs, and Dagster's
    instance.
    """
    from dagster import DagsterInstance

    from dagster_adjunct.examples.flights.pipeline import defs

    jobs = (
        defs.resolve_job_def(name) for name in ("flight_delays", "disruptions", "flights_over_time")
    )
    return *jobs, DagsterInstance.get()


def _batches(result: Any) -> int:
    materialisations = [
        event.materialization for event in result.all_events if event.is_step_materialization
    ]
    return sum(
        m.metadata["adjunct/batches"].value
        for m in materialisations
        if "adjunct/batches" in m.metadata
    )


def _failure(result: Any) -> AdjunctError:
    failed = result.get_step_failure_events()[0]
    error = failed.step_failure_data.user_failure_data
    message = error.description if error else failed.step_failure_data.error.to_string()
    return AdjunctError(
        f"the run {result.run_id} failed in {failed.step_key}: {message}", "See it with: make ui"
    )

"""The root command `adjunct`, and its subcommands run, demo and ui."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.orchestration.application.application import Application, load_application
from dagster_adjunct.orchestration.cli import applications, datasets, streams, tables
from dagster_adjunct.orchestration.cli import key_value as key_values
from dagster_adjunct.orchestration.cli import startpoints as checkpoints
from dagster_adjunct.orchestration.cli.maintenance import advance_all, has_datasets_only, line_printer, stage_printer
from dagster_adjunct.orchestration.cli.options import parse_duration
from dagster_adjunct.orchestration.cli.output import (
    Commands,
    console,
    fail_if_rejected,
    lake_url,
    output_options,
    run_command,
    show_json,
    show_line,
    show_table,
)
from dagster_adjunct.orchestration.cli.plan import show_plan
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dagster-adjunct", prog_name="adjunct")
def root() -> None:
    """Streams joined with versioned reference data and written as partial updates, on Dagster and Spark."""


root.add_command(show_plan)
root.add_command(streams.stream)
root.add_command(datasets.dataset)
root.add_command(tables.table)
root.add_command(key_values.kv)
root.add_command(checkpoints.startpoint)
root.add_command(checkpoints.checkpoint)
root.add_command(applications.app)


@root.command()
@click.argument("reference", metavar="MODULE:APP")
@lake_url
@click.option(
    "--master", help="Spark master, such as local[4] or spark://host:7077. Default: all cores of this machine."
)
@click.option("--max-batches", type=click.IntRange(1), help="Stop after this many batches.")
@click.option(
    "--wait",
    metavar="TIME",
    default="5m",
    show_default=True,
    help="How long to wait for another run to end; 0m does not wait.",
)
@click.option("--take-over", is_flag=True, help="Take over from another run at once, even if it is alive.")
@click.option("--adopt", is_flag=True, help="Let a first run write to outputs that another application has written.")
@output_options
def run(
    reference: str,
    lake_url: str | None,
    master: str | None,
    max_batches: int | None,
    wait: str,
    take_over: bool,
    adopt: bool,
    json_output: bool,
) -> None:
    """Bring the datasets of an application up to date and run its step until it has caught up.

    Exits with 3 if a dataset rejected a version; batches then use the version served before.
    """
    from dagster_adjunct.orchestration.application.graph import describe_partitions, is_advanced_by_partition
    from dagster_adjunct.orchestration.planner.catalog import systems_for
    from dagster_adjunct.orchestration.step.run import run_application
    from dagster_adjunct.resources.objects.lake import open_lake
    from dagster_adjunct.resources.spark.scope import session_scope

    def print_event(event: StepEvent | AdvanceReport) -> None:
        # Waiting for a lease is logged as a warning on stderr, with --json too.
        if not json_output and getattr(event, "what", "") != "lease":
            show_line(event.summary())

    max_wait = parse_duration(wait)
    if max_wait is None:
        raise ConfigurationError(
            f"--wait {wait!r} is not a duration.", "Give for example 5m or 1h; 0m does not wait.", setting="--wait"
        )
    app = load_application(reference)
    lake = open_lake(lake_url)
    run_id = f"cli-{uuid.uuid4().hex[:12]}"
    with session_scope(master=master, lake_url=lake.url, on_start=line_printer(json_output)) as spark:
        if has_datasets_only(app):
            _advance_only(lake, reference, app, spark, run_id, json_output=json_output)
            return
        report = run_application(
            app,
            lake=lake,
            systems=systems_for(app, lake=lake),
            spark=spark,
            run=run_id,
            on_event=print_event,
            on_stage=stage_printer(json_output),
            max_batches=max_batches,
            wait=max_wait,
            take_over=take_over,
            adopt=adopt,
        )
    if json_output:
        show_json(report.to_json())
    else:
        for name, counters in report.step.counters.items():
            show_table(name, ["counter", "value"], list(counters.items()))
        end = "caught up" if report.step.caught_up else "stopped at the limit"
        console.print(f"{report.step.batches} batches, {end}.")
        for note in (describe_partitions(dataset) for dataset in app.datasets if is_advanced_by_partition(dataset)):
            show_line(note)
    fail_if_rejected(report.datasets)


def _advance_only(
    lake: Lake, reference: str, app: Application, spark: Callable[[], SparkSession], run: str, *, json_output: bool
) -> None:
    """Advance the datasets of an application that declares nothing else, so it has no batches."""

    def print_report(report: AdvanceReport) -> None:
        if not json_output:
            show_line(report.summary())

    on_stage = stage_printer(json_output)
    reports, partitioned = advance_all(lake, app, spark, by=run, on_report=print_report, on_stage=on_stage)
    if json_output:
        show_json({"datasets": [report.to_json() for report in reports], "step": None})
    else:
        for name in partitioned:
            command = f"adjunct dataset advance {name} {reference} --partition VERSION"
            show_line(f"dataset {name}: its versions are partitions, built by: {command}")
        show_line(f"Application {app.name} declares only datasets: there are no batches to run.")
    fail_if_rejected(reports)


@root.command()
@lake_url
@click.option("--postgres", metavar="DSN", help="Keep the aircraft in this PostgreSQL instead of SQLite.")
@click.option("--master", help="Spark master. Default: all cores of this machine.")
def demo(lake_url: str | None, postgres: str | None, master: str | None) -> None:
    """Run the main job on real data: 336,776 flights joined with planes, weather, airlines and airports."""
    try:
        module: Any = importlib.import_module("dagster_adjunct.examples.flights.demo")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the demo can't be loaded: {error}.",
            'Install it: pip install "dagster-adjunct[demo]".',
            package=error.name,
        ) from error
    module.run_demo(lake_url=lake_url, postgres=postgres, master=master)


@root.command()
@click.option("--port", type=click.IntRange(1, 65535), default=3000, show_default=True, help="Port on 127.0.0.1.")
@lake_url
def ui(port: int, lake_url: str | None) -> None:
    """Serve the Dagster UI, with its daemon, over the lake and the runs of the demo."""
    from dagster_adjunct.orchestration.code_location.definitions import prepare_dagster_home

    require_free_port(port)
    home = prepare_dagster_home(Path(".adjunct/dagster"))
    environment = {**os.environ, "DAGSTER_HOME": str(home)}
    if lake_url:
        environment["ADJUNCT_LAKE"] = lake_url
    arguments = [sys.executable, "-m", "dagster", "dev", "-h", "127.0.0.1", "-p", str(port)]
    arguments += (
        ["-w", "workspace.yaml"]
        if Path("workspace.yaml").exists()
        else ["-m", "dagster_adjunct.orchestration.definitions"]
    )
    console.print(f"Dagster UI: http://127.0.0.1:{port}")
    os.execve(sys.executable, arguments, environment)


def require_free_port(port: int) -> None:
    """Raise ConfigurationError if the port is in use, since the daemon would run on without a webserver."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigurationError(
                f"port {port} of 127.0.0.1 can't be used: {error.strerror}.",
                f"Stop what uses it (another adjunct ui?), or use another port: adjunct ui --port {port + 1}.",
                setting="--port",
            ) from error


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run_command(lambda: root(standalone_mode=False)))


if __name__ == "__main__":
    main()

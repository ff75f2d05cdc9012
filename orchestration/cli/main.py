"""The root command `adjunct`, and its subcommands run, app, demo and ui."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

import click

from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.assets.writing.generation import Runtime
from dagster_adjunct.orchestration.application.application import load_application
from dagster_adjunct.orchestration.application.graph import describe_partitions, is_advanced_by_partition
from dagster_adjunct.orchestration.cli import datasets, options, output, startpoints, streams, tables
from dagster_adjunct.orchestration.cli.maintenance import show_stage
from dagster_adjunct.orchestration.cli.plan import show_plan
from dagster_adjunct.orchestration.maintenance.rename import rename_application
from dagster_adjunct.orchestration.planner.planner import systems_for
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.orchestration.step.run import advance_datasets, run_application
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.in_process import session_factory
from dagster_adjunct.resources.spark.scope import session_scope


@click.group(cls=output.Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dagster-adjunct", prog_name="adjunct")
def root() -> None:
    """Streams joined with versioned reference data and written as partial updates, on Dagster and Spark."""


@click.group()
def app() -> None:
    """Manage applications."""


for command in (show_plan, streams.stream, datasets.dataset, tables.table, tables.kv, app):
    root.add_command(command)
for command in (startpoints.startpoint, startpoints.checkpoint):
    root.add_command(command)


@app.command()
@click.argument("old")
@click.argument("new")
@options.audit_options
@options.lake_options()
def rename(lake: Lake, old: str, new: str, reason: str, by: str) -> None:
    """Rename application OLD to NEW, with its checkpoint, history, startpoints and local tables.

    Its outputs still know it by the old name. Deploy the code that calls it NEW afterwards.
    """
    output.show_report(rename_application(lake, old, new, reason=reason, by=by))


@root.command()
@options.app_reference
@options.master_option
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
@options.lake_options(create=True)
def run(
    lake: Lake,
    reference: str,
    master: str | None,
    max_batches: int | None,
    wait: str,
    take_over: bool,
    adopt: bool,
) -> None:
    """Bring the datasets of an application up to date and run its step until it has caught up.

    Exits with 3 if a dataset rejected a version; batches then use the version served before.
    """

    def show_event(event: StepEvent | AdvanceReport) -> None:
        if getattr(event, "what", "") != "lease":  # waiting for a lease is logged as a warning on stderr
            output.show_line(event.summary())

    max_wait = options.parse_duration("--wait", wait, "for example 5m or 1h; 0m does not wait")
    app = load_application(reference)
    systems, run = systems_for(app, lake=lake), f"cli-{uuid.uuid4().hex[:12]}"
    partitioned = [dataset for dataset in app.datasets if is_advanced_by_partition(dataset)]
    with session_scope(master=master, lake_url=lake.url, on_start=output.show_line) as spark:
        if app.datasets and not (app.inputs or app.outputs or app.tables):
            runtime = Runtime(lake, systems, session_factory(spark), run)
            reports = advance_datasets(runtime, app, on_report=show_event, on_stage=show_stage).reports
            output.show_json({"datasets": [report.to_json() for report in reports], "step": None})
            for dataset in partitioned:
                command = f"adjunct dataset advance {dataset.name} {reference} --partition VERSION"
                output.show_line(f"dataset {dataset.name}: its versions are partitions, built by: {command}")
            output.show_line(f"Application {app.name} declares only datasets: there are no batches to run.")
            output.fail_if_rejected(reports)
            return
        report = run_application(
            app,
            lake=lake,
            systems=systems,
            spark=spark,
            run=run,
            on_event=show_event,
            on_stage=show_stage,
            max_batches=max_batches,
            wait=max_wait,
            take_over=take_over,
            adopt=adopt,
        )
    output.show_json(report.to_json())
    for name, counters in report.step.counters.items():
        output.show_table(name, ["counter", "value"], list(counters.items()))
    end = "caught up" if report.step.caught_up else "stopped at the limit"
    output.console.print(f"{report.step.batches} batches, {end}.")
    for dataset in partitioned:
        output.show_line(describe_partitions(dataset))
    output.fail_if_rejected(report.datasets)


@root.command()
@options.lake_url_option
@click.option("--postgres", metavar="DSN", help="Keep the aircraft in this PostgreSQL instead of SQLite.")
@options.master_option
def demo(lake_url: str | None, postgres: str | None, master: str | None) -> None:
    """Run the main job on real data: 336,776 flights joined with planes, weather, airlines and airports."""
    try:
        module: Any = importlib.import_module("dagster_adjunct.examples.flights.demo")
    except ModuleNotFoundError as error:
        step = 'Install it: pip install "dagster-adjunct[demo]".'
        raise ConfigurationError(f"the demo can't be loaded: {error}.", step, package=error.name) from error
    module.run_demo(lake_url=lake_url, postgres=postgres, master=master)


@root.command()
@click.option("--port", type=click.IntRange(1, 65535), default=3000, show_default=True, help="Port on 127.0.0.1.")
@options.lake_url_option
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
    output.console.print(f"Dagster UI: http://127.0.0.1:{port}")
    os.execve(sys.executable, arguments, environment)


def require_free_port(port: int) -> None:
    """Raise ConfigurationError if the port is in use, since the daemon would run on without a webserver."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            problem = f"port {port} of 127.0.0.1 can't be used: {error.strerror}."
            step = f"Stop what uses it (another adjunct ui?), or use another port: adjunct ui --port {port + 1}."
            raise ConfigurationError(problem, step, setting="--port") from error


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(output.run_command(lambda: root(standalone_mode=False)))


if __name__ == "__main__":
    main()

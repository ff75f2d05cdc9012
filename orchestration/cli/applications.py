"""`adjunct plan, run, app, demo, ui`: show the plan of an application, run it, rename it, and
serve its pages.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.orchestration.application.application import Application, load_application
from dagster_adjunct.orchestration.application.graph import (
    describe_partitions,
    is_advanced_by_partition,
)
from dagster_adjunct.orchestration.application.table_registry import read_table_notes
from dagster_adjunct.orchestration.batch_log.batch_log import application_state
from dagster_adjunct.orchestration.cli import options, output
from dagster_adjunct.orchestration.cli.dagster_events import reporting
from dagster_adjunct.orchestration.cli.maintenance import show_stage
from dagster_adjunct.orchestration.maintenance.rename import rename_application
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import (
    check_syntax,
    check_zones,
    compare_output_tables,
    plan_application,
    systems_for,
)
from dagster_adjunct.orchestration.planner.render import describe_differences
from dagster_adjunct.orchestration.startpoints.coordinator import describe_other_writers
from dagster_adjunct.orchestration.step.dry_run import verify_plan
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.orchestration.step.run import RunReport, advance_datasets, run_application
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.in_process import session_factory
from dagster_adjunct.resources.spark.session import session_scope

FORMATS = ("text", "json", "mermaid")
DIFFERS = 4
"""Exit code of a comparison that found differences, distinct from a failure."""


@click.command()
@options.app_reference
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="Output format.",
)
@click.option(
    "--output",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the plan to this file, replacing it.",
)
@click.option(
    "--against",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Show the differences from a plan that --format json wrote to this file.",
)
@options.flag("--verify", "Ask Spark for its physical plan, over no records, and compare.")
@options.master_option
@options.lake_options(create=True)
def plan(
    lake: Lake,
    reference: str,
    form: str,
    file: Path | None,
    against: Path | None,
    verify: bool,
    master: str | None,
) -> None:
    """Validate an application's partition counts and show its plan, without reading data or
    starting Spark.

    Output tables are compared with the records that they would get. If a catalogue or store does
    not answer, the plan says what was not compared.

    Spark's own parser checks the SQL, and the rules of time zones are compared, in a JVM that takes
    a second or two, if Java is installed.

    Exits with 4 if the plan differs (--against) or Spark would do something else (--verify, which
    starts Spark but reads no data).
    """
    form = "json" if output.console.quiet else form
    _check_plan_options(form, against, verify=verify)
    app = load_application(reference)
    systems = systems_for(app, lake=lake)
    writes_as = None
    if lake.exists():
        writes_as = application_state(lake, app.name).names.writes_as
    planned = plan_application(app, systems=systems, writes_as=writes_as)
    planned = compare_output_tables(app, planned, lake, writes_as=writes_as)
    lake_notes = [*describe_other_writers(lake, app), *read_table_notes(lake, app)]
    if not verify:  # with --verify Spark parses all SQL itself
        check_syntax(app)
        check_zones(app)
    if against is not None:
        shown = _compare_plan(planned, against, lake_notes)
    else:
        planned = replace(planned, notes=(*planned.notes, *lake_notes))
        what = f"The plan of {planned.application}"
        shown = _ShownPlan(what, planned.to_json(), planned.render())
        if form == "mermaid":
            shown = replace(shown, text=planned.to_mermaid())
        if verify:
            with session_scope(master=master, lake_url=lake.url) as spark:
                runtime = Runtime(lake, systems, session_factory(spark), by="verify")
                proof = verify_plan(runtime, app, planned)
            document = {"plan": shown.document, "spark": proof.to_json()}
            text = f"{shown.text}\n{proof.render()}\n"
            shown = _ShownPlan(what, document, text, differs=bool(proof.differences))
    if form == "json":
        text = f"{output.format_json(shown.document)}\n"
    else:
        text = shown.text
    _emit(text, file, shown.what)
    if shown.differs:
        raise click.exceptions.Exit(DIFFERS)


def _check_plan_options(form: str, against: Path | None, *, verify: bool) -> None:
    """Raise ConfigurationError for options of `adjunct plan` that can't be combined."""
    if form == "mermaid" and (verify or against is not None):
        option = "--verify" if verify else "--against"
        problem = f"{option} can't be combined with --format mermaid."
        raise ConfigurationError(problem, "Choose --format text or json.", setting="--format")
    if verify and against is not None:
        problem = "--verify can't be combined with --against."
        raise ConfigurationError(problem, "Give only one of them.", setting="--verify")


@dataclass(frozen=True, slots=True)
class _ShownPlan:
    """A plan, its proof, or a comparison with another plan, as JSON and as text; `what` names it.

    `differs` says that the other plan, or Spark's, is not the same.
    """

    what: str
    document: dict[str, Any]
    text: str
    differs: bool = False


def _compare_plan(planned: ExecutionPlan, against: Path, lake_notes: list[str]) -> _ShownPlan:
    """Return the differences of a plan from the one in the file `against`; notes of the lake are
    none.
    """
    older = _read_plan(against)
    # A stored plan contains the notes of its lake too; these are no difference between plans.
    older["notes"] = [note for note in older.get("notes", ()) if note not in lake_notes]
    lines = describe_differences(older, planned.to_json())
    text = "".join(f"{line}\n" for line in lines) or f"The plan equals the one in {against}.\n"
    text += "".join(f"Note: {note}\n" for note in lake_notes)
    document = {"against": str(against), "differences": lines, "notes": lake_notes}
    return _ShownPlan(f"The comparison with {against}", document, text, differs=bool(lines))


def _read_plan(path: Path) -> dict[str, Any]:
    """Return the plan document stored in a file.

    Raises ConfigurationError if the file can't be read as JSON, MalformedDocumentError if it is not
    a plan.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError):
            problem = f"--against {path} can't be read: {error.strerror}."
        else:
            problem = f"--against {path} is not a JSON document: {error}."
        step = (
            "Write the plan to compare with: adjunct plan MODULE:APP --format json --output FILE."
        )
        raise ConfigurationError(problem, step, setting="--against") from error
    ExecutionPlan.from_json(document)
    return document


def _emit(text: str, file: Path | None, what: str) -> None:
    """Print a text, or write it to a file and print where."""
    if file is None:
        click.echo(text, nl=False)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"--output {file} can't be written: {error.strerror}."
        step = "Name a writable file in an existing folder."
        raise ConfigurationError(problem, step, setting="--output") from error
    output.show_json({"output": str(file)})
    output.show_line(f"{what} is in {file}.")


app = click.Group("app")


@app.command()
@click.argument("old")
@click.argument("new")
@options.flag("--dry-run", "Only show what would be renamed, and what prevents it.")
@options.yes_option
@options.audit_options
@options.lake_options()
def rename(lake: Lake, old: str, new: str, dry_run: bool, yes: bool, reason: str, by: str) -> None:
    """Rename application OLD to NEW, with its checkpoint, history, startpoints and local tables.

    It can't be undone: OLD can't be used again. Its outputs still know it by the old name. Rejected
    while OLD runs or has an open batch, and if NEW has run. Repeat it if it was interrupted. Deploy
    the code that calls it NEW afterwards.
    """
    if not dry_run and not yes:
        planned = rename_application(lake, old, new, reason=reason, by=by, dry_run=True)
        question = f"{planned.summary()}. Its old name can't be used again. Rename it?"
        options.confirm(question, yes=yes)
    output.show_report(rename_application(lake, old, new, reason=reason, by=by, dry_run=dry_run))


@click.command()
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
@options.option(
    "--follow", "TIME", "Stay for this long: go on when there is something new, e.g. 30m."
)
@options.flag(
    "--take-over",
    "Take the lease of another run, even if it is alive, and begin when that one can't write"
    " any more: after its lease's two minutes and the longest time limit of a request, at once"
    " if its process has ended.",
)
@options.flag(
    "--adopt",
    "Let a first run write to outputs that another application has written from the same inputs.",
)
@options.lake_options(create=True)
def run(
    lake: Lake, reference: str, master: str | None, wait: str, follow: str | None, **more: Any
) -> None:
    """Bring the datasets of an application up to date and run its batches until it has caught up.

    If a dataset fails, the others are brought up to date, but no batch is run. Exits with 3 if a
    dataset rejected a version; batches then use the version served before.
    """
    max_wait = options.parse_duration("--wait", wait, "for example 5m or 1h; 0m does not wait")
    stay = _parse_stay(follow)
    app = load_application(reference)
    has_only_datasets = bool(app.datasets) and not (app.inputs or app.outputs or app.tables)
    if stay is not None and has_only_datasets:
        raise _no_batches_error(app)
    systems = systems_for(app, lake=lake)
    run = f"cli-{uuid.uuid4().hex[:12]}"
    with (
        reporting(app, lake, systems, run) as reporter,
        session_scope(master=master, lake_url=lake.url, on_start=output.show_line) as spark,
    ):

        def report_event(event: StepEvent | AdvanceReport) -> None:
            _show_event(event)
            if reporter is not None and isinstance(event, AdvanceReport):
                reporter.add_advance(event)

        if has_only_datasets:
            in_process = app.engine == "auto"
            runtime = Runtime(lake, systems, session_factory(spark), run, few_in_process=in_process)
            advanced = advance_datasets(runtime, app, on_report=report_event, on_stage=show_stage)
            _show_advanced(app, reference, advanced.reports)
            return
        if reporter is not None and stay is not None:
            more["on_report"] = reporter.add_batch
        report = run_application(
            app,
            lake=lake,
            systems=systems,
            spark=spark,
            run=run,
            on_event=report_event,
            on_stage=show_stage,
            wait=max_wait,
            follow=stay,
            **more,
        )
        if reporter is not None:
            reporter.set_step(report.step)
    _show_run(app, report, stay)


def _parse_stay(follow: str | None) -> timedelta | None:
    """Return for how long a run stays, None if it does not."""
    if follow is None:
        return None
    stay = options.parse_duration("--follow", follow, "for example 30m or 8h")
    if not stay:
        problem = "--follow is 0: expected a time."
        raise ConfigurationError(problem, "Give for example 30m.", setting="--follow")
    return stay


def _no_batches_error(app: Application) -> ConfigurationError:
    """Return the error for --follow with an application that has no batches."""
    problem = f"application {app.name!r} declares only datasets: there are no batches to stay for."
    step = (
        "Leave out --follow, and repeat the command, or let the datasets' sensors in Dagster do so."
    )
    return ConfigurationError(problem, step, setting="--follow")


def _show_run(app: Application, report: RunReport, stay: timedelta | None) -> None:
    """Print what a run has done, and end with an error code if a dataset rejected a version."""
    output.show_json(report.to_json())
    for name, counters in report.step.counters.items():
        output.show_table(name, ["counter", "value"], list(counters.items()))
        for failed in report.step.samples.get(name, ()):
            output.show_line(f"{name} failed for {failed}")
    if report.step.caught_up:
        end = "caught up"
    elif stay is None:
        end = "stopped at the limit"
    else:
        end = "stopped before the end of its inputs"
    output.console.print(f"{report.step.batches} batches, {end}.")
    for record in report.step.event_time.held:
        output.show_line(record.describe())
    for dataset in app.datasets:
        if is_advanced_by_partition(dataset):
            output.show_line(describe_partitions(dataset))
    output.fail_if_rejected(report.datasets)


def _show_event(event: StepEvent | AdvanceReport) -> None:
    """Print a line for an event of a run."""
    # Waiting for a lease is logged as a warning on stderr.
    if getattr(event, "what", "") != "lease":
        output.show_line(event.summary())


def _show_advanced(app: Application, reference: str, reports: Sequence[AdvanceReport]) -> None:
    """Show what became of an application that declares only datasets."""
    output.show_json({"datasets": [report.to_json() for report in reports], "step": None})
    for dataset in app.datasets:
        if is_advanced_by_partition(dataset):
            command = f"adjunct dataset advance {dataset.name} {reference} --partition VERSION"
            output.show_line(
                f"dataset {dataset.name}: its versions are partitions, built by: {command}"
            )
    output.show_line(f"Application {app.name} declares only datasets: there are no batches to run.")
    output.fail_if_rejected(reports)


@click.command()
@options.lake_url_option
@options.option("--postgres", "DSN", "Keep the aircraft in this PostgreSQL instead of SQLite.")
@options.master_option
def demo(lake_url: str | None, postgres: str | None, master: str | None) -> None:
    """Run the main job on real data: 336,776 flights joined with planes, weather, airlines and
    airports.
    """
    try:
        module: Any = importlib.import_module("dagster_adjunct.examples.flights.demo")
    except ModuleNotFoundError as error:
        problem = f"the demo can't be loaded: {error}."
        step = 'Install it: pip install "dagster-adjunct[demo]".'
        raise ConfigurationError(problem, step, package=error.name) from error
    module.run_demo(lake_url=lake_url, postgres=postgres, master=master)


@click.command()
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=3000,
    show_default=True,
    help="Port on 127.0.0.1.",
)
@options.lake_url_option
def ui(port: int, lake_url: str | None) -> None:
    """Serve the Dagster UI and its daemon.

    It loads workspace.yaml of the working directory if there is one, else the applications in
    ADJUNCT_APP, by default those of the demo. Dagster's runs and settings are kept in
    .adjunct/dagster.
    """
    from dagster_adjunct.orchestration.code_location.definitions import prepare_dagster_home

    require_free_port(port)
    home = prepare_dagster_home(Path(".adjunct/dagster"))
    environment = {**os.environ, "DAGSTER_HOME": str(home)}
    if lake_url:
        environment["ADJUNCT_LAKE"] = lake_url
    arguments = [sys.executable, "-m", "dagster", "dev", "-h", "127.0.0.1", "-p", str(port)]
    if Path("workspace.yaml").exists():
        arguments += ["-w", "workspace.yaml"]
    else:
        arguments += ["-m", "dagster_adjunct.orchestration.definitions"]
    output.console.print(f"Dagster UI: http://127.0.0.1:{port}")
    # A script's background process inherits an ignored SIGINT, for which Dagster would ignore
    # SIGTERM, too.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execve(sys.executable, arguments, environment)


def require_free_port(port: int) -> None:
    """Raise ConfigurationError if the port is in use, since the daemon would run on without a
    webserver.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            problem = f"port {port} of 127.0.0.1 can't be used: {error.strerror}."
            step = (
                "Stop what uses it (another adjunct ui?), or use another port: adjunct ui --port"
                f" {port + 1}."
            )
            raise ConfigurationError(problem, step, setting="--port") from error

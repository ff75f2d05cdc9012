"""`adjunct plan`: validate an application and show its plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dagster_adjunct.assets.writing.generation import Runtime
from dagster_adjunct.orchestration.application.application import load_application
from dagster_adjunct.orchestration.cli.options import app_reference, lake_options, master_option
from dagster_adjunct.orchestration.cli.output import console, format_json, show_line
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import check_syntax, plan_application, systems_for
from dagster_adjunct.orchestration.planner.render import describe_differences
from dagster_adjunct.orchestration.startpoints.coordinator import describe_other_writers
from dagster_adjunct.orchestration.step.verify_plan import verify_plan
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.in_process import session_factory
from dagster_adjunct.resources.spark.scope import session_scope

FORMATS = ("text", "json", "mermaid")
DIFFERS = 4
"""Exit code of a comparison that found differences, distinct from a failure."""


@click.command("plan")
@app_reference
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True, help="Output format.")
@click.option("--output", metavar="FILE", type=click.Path(path_type=Path), help="Write the plan to this file.")
@click.option(
    "--against",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Show the differences from a plan that --format json wrote to this file.",
)
@click.option("--verify", is_flag=True, help="Ask Spark for its physical plan, over no records, and compare.")
@master_option
@lake_options(create=True)
def show_plan(
    lake: Lake,
    reference: str,
    form: str,
    output: Path | None,
    against: Path | None,
    verify: bool,
    master: str | None,
) -> None:
    """Validate an application's partition counts and show its plan, without reading data or starting Spark.

    Spark's own parser checks the SQL, in a JVM that takes a second or two, if Java is installed.

    Exits with 4 if the plan differs (--against) or Spark would do something else (--verify, which starts Spark but
    reads no data).
    """
    form = "json" if console.quiet else form
    if (verify or against is not None) and form == "mermaid":
        problem = f"{'--verify' if verify else '--against'} can't be combined with --format mermaid."
        raise ConfigurationError(problem, "Choose --format text or json.", setting="--format")
    if verify and against is not None:
        raise ConfigurationError(
            "--verify can't be combined with --against.", "Give only one of them.", setting="--verify"
        )
    app = load_application(reference)
    systems = systems_for(app, lake=lake)
    planned = plan_application(app, systems=systems)
    lake_notes = describe_other_writers(lake, app)
    what = f"The plan of {planned.application}"
    if against is None:
        planned = replace(planned, notes=(*planned.notes, *lake_notes))
    if not verify:  # with --verify Spark parses all SQL itself
        check_syntax(app)
    differs = False
    document: dict[str, Any] = planned.to_json()
    if verify:
        with session_scope(master=master, lake_url=lake.url) as spark:
            proof = verify_plan(Runtime(lake, systems, session_factory(spark), by="verify"), app, planned)
        document, differs = {"plan": document, "spark": proof.to_json()}, bool(proof.differences)
        text = f"{planned.render()}\n{proof.render()}\n"
    elif against is not None:
        older = _read_plan(against)
        # A stored plan contains the notes of its lake too; these are no difference between plans.
        older["notes"] = [note for note in older.get("notes", ()) if note not in lake_notes]
        lines = describe_differences(older, document)
        document, differs = {"against": str(against), "differences": lines, "notes": lake_notes}, bool(lines)
        text = "".join(f"{line}\n" for line in lines) or f"The plan equals the one in {against}.\n"
        text += "".join(f"Note: {note}\n" for note in lake_notes)
        what = f"The comparison with {against}"
    else:
        text = planned.to_mermaid() if form == "mermaid" else planned.render()
    _emit(f"{format_json(document)}\n" if form == "json" else text, output, what)
    if differs:
        raise click.exceptions.Exit(DIFFERS)


def _read_plan(path: Path) -> dict[str, Any]:
    """Return the plan document stored in a file.

    Raises ConfigurationError if the file can't be read as JSON, MalformedDocumentError if it is not a plan.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = (
            f"can't be read: {error.strerror}" if isinstance(error, OSError) else f"is not a JSON document: {error}"
        )
        step = "Write the plan to compare with: adjunct plan MODULE:APP --format json --output FILE."
        raise ConfigurationError(f"--against {path} {problem}.", step, setting="--against") from error
    ExecutionPlan.from_json(document)
    return document


def _emit(text: str, output: Path | None, what: str) -> None:
    """Print a text, or write it to a file and print where."""
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"--output {output} can't be written: {error.strerror}."
        raise ConfigurationError(problem, "Name a writable file in an existing folder.", setting="--output") from error
    show_line(f"{what} is in {output}.")

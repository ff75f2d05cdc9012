"""`adjunct plan`: validate an application and show its plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dagster_adjunct.orchestration.application.application import Application, load_application
from dagster_adjunct.orchestration.cli.output import lake_url, output_options, show_line
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.render import describe_differences
from dagster_adjunct.orchestration.step.verify_plan import PhysicalProof
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake

FORMATS = ("text", "json", "mermaid")
DIFFERS = 4
"""Exit code of a comparison that found differences, distinct from a failure."""


@click.command("plan")
@click.argument("reference", metavar="MODULE:APP")
@lake_url
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True, help="Output format.")
@click.option("--output", metavar="FILE", type=click.Path(path_type=Path), help="Write the plan to this file.")
@click.option(
    "--against",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Show the differences from a plan that --format json wrote to this file.",
)
@click.option("--verify", is_flag=True, help="Ask Spark for its physical plan, over no records, and compare.")
@click.option("--master", help="Spark master for --verify. Default: all cores of this machine.")
@output_options
def show_plan(
    reference: str,
    lake_url: str | None,
    form: str,
    output: Path | None,
    against: Path | None,
    verify: bool,
    master: str | None,
    json_output: bool,
) -> None:
    """Validate an application's partition counts and show its plan, without reading data or starting Spark.

    Spark's own parser checks the SQL, in a JVM that takes a second or two, if Java is installed.

    Exits with 4 if the plan differs (--against) or Spark would do something else (--verify, which starts Spark but
    reads no data).
    """
    from dagster_adjunct.orchestration.planner.catalog import plan_application, systems_for
    from dagster_adjunct.orchestration.planner.sql_syntax import check_syntax
    from dagster_adjunct.orchestration.startpoints.other_writers import describe_other_writers
    from dagster_adjunct.resources.objects.lake import open_lake

    form = "json" if json_output else form
    if against is not None and form not in ("text", "json"):
        raise ConfigurationError(
            f"--against can't be combined with --format {form}.",
            "Choose --format text or json.",
            setting="--format",
        )
    if verify and (against is not None or form not in ("text", "json")):
        raise ConfigurationError(
            "--verify can't be combined with --against or --format mermaid.",
            "Omit --against, and choose --format text or json.",
            setting="--verify",
        )
    app = load_application(reference)
    lake = open_lake(lake_url)
    planned = plan_application(app, systems=systems_for(app, lake=lake))
    lake_notes = describe_other_writers(lake, app)
    if against is None:
        planned = replace(planned, notes=(*planned.notes, *lake_notes))
    if not verify:  # with --verify Spark parses all SQL itself
        check_syntax(app)
    if verify:
        proof = verify_with_spark(app, lake, planned, master)
        if form == "json":
            both = {"plan": planned.to_json(), "spark": proof.to_json()}
            text = json.dumps(both, indent=2, ensure_ascii=False) + "\n"
        else:
            text = f"{planned.render()}\n{proof.render()}\n"
        emit_text(text, output, f"The plan of {planned.application}")
        if proof.differences:
            raise click.exceptions.Exit(DIFFERS)
        return
    if against is None:
        emit_text(render_plan(planned, form), output, f"The plan of {planned.application}")
        return
    older = read_plan_document(against)
    # A stored plan contains the notes of its lake too; these are no difference between plans.
    older["notes"] = [note for note in older.get("notes", ()) if note not in lake_notes]
    lines = describe_differences(older, planned.to_json())
    if form == "json":
        found = {"against": str(against), "differences": lines, "notes": lake_notes}
        text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    else:
        text = "".join(f"{line}\n" for line in lines) or f"The plan equals the one in {against}.\n"
        text += "".join(f"Note: {note}\n" for note in lake_notes)
    emit_text(text, output, f"The comparison with {against}")
    if lines:
        raise click.exceptions.Exit(DIFFERS)


def verify_with_spark(app: Application, lake: Lake, planned: ExecutionPlan, master: str | None) -> PhysicalProof:
    """Return what Spark would do with the application, in a session started for that."""
    from dagster_adjunct.assets.writing.generation import Runtime
    from dagster_adjunct.orchestration.planner.catalog import systems_for
    from dagster_adjunct.orchestration.step.verify_plan import verify_plan
    from dagster_adjunct.resources.spark.in_process import session_factory
    from dagster_adjunct.resources.spark.scope import session_scope

    with session_scope(master=master, lake_url=lake.url) as spark:
        return verify_plan(
            Runtime(lake, systems_for(app, lake=lake), session_factory(spark), by="verify"), app, planned
        )


def read_plan_document(path: Path) -> dict[str, Any]:
    """Return the plan document stored in a file.

    Raises ConfigurationError if the file can't be read as JSON, MalformedDocumentError if it is not a plan.
    """
    from dagster_adjunct.orchestration.planner.plan import ExecutionPlan

    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = (
            f"can't be read: {error.strerror}" if isinstance(error, OSError) else f"is not a JSON document: {error}"
        )
        raise ConfigurationError(
            f"--against {path} {problem}.",
            "Write the plan to compare with: adjunct plan MODULE:APP --format json --output FILE.",
            setting="--against",
        ) from error
    ExecutionPlan.from_json(document)
    return document


def emit_text(text: str, output: Path | None, what: str) -> None:
    """Print a text, or write it to a file and print where."""
    if output is None:
        click.echo(text, nl=False)
        return
    write_file(output, text)
    show_line(f"{what} is in {output}.")


def render_plan(planned: ExecutionPlan, form: str) -> str:
    """Return a plan in one of the formats, as text that ends with a newline."""
    if form == "json":
        return json.dumps(planned.to_json(), indent=2, ensure_ascii=False) + "\n"
    return planned.to_mermaid() if form == "mermaid" else planned.render()


def write_file(path: Path, text: str) -> None:
    """Write or overwrite a file. Raises ConfigurationError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"--output {path} can't be written: {error.strerror}.",
            "Name a writable file in an existing folder.",
            setting="--output",
        ) from error

"""The command that proves an application and shows its plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dagster_adjunct.orchestration.application.load_application import load_application
from dagster_adjunct.orchestration.cli.output import as_json, lake_url, show_line
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.planner.execution_plan import ExecutionPlan

FORMATS = ("text", "json", "mermaid", "svg")


@click.command()
@click.argument("reference", metavar="MODULE:APP")
@lake_url
@click.option(
    "--format", "form", type=click.Choice(FORMATS), default="text", show_default=True, help="How it is shown."
)
@click.option("--output", metavar="FILE", type=click.Path(path_type=Path), help="Write it to this file.")
@as_json
def plan(reference: str, lake_url: str | None, form: str, output: Path | None, json_output: bool) -> None:
    """Prove an application's partition counts and show its plan; reads no data and starts no Spark."""
    from dagster_adjunct.orchestration.planner.lake_catalog import plan_application, systems_for
    from dagster_adjunct.resources.objects import open_lake

    app = load_application(reference)
    planned = plan_application(app, systems_for(app, open_lake(lake_url)))
    text = shown(planned, "json" if json_output else form)
    if output is None:
        click.echo(text, nl=False)
        return
    write(output, text)
    show_line(f"The plan of {planned.application} is in {output}.")


def shown(planned: ExecutionPlan, form: str) -> str:
    """Return a plan in one of the formats, as text that ends with a line's end."""
    if form == "json":
        return json.dumps(planned.to_json(), indent=2, ensure_ascii=False) + "\n"
    if form == "mermaid":
        return planned.to_mermaid()
    return planned.to_svg() if form == "svg" else planned.render()


def write(path: Path, text: str) -> None:
    """Write a file, in place of one that is there. Raises ConfigurationError where that can't be done."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"--output {path} can't be written: {error.strerror}.",
            "Name a file in a folder that is there.",
            setting="--output",
        ) from error

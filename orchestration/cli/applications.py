"""`adjunct app …`: commands that change a whole application."""

from __future__ import annotations

import click

from dagster_adjunct.orchestration.cli.options import audit_options
from dagster_adjunct.orchestration.cli.output import lake_url, output_options, show_report
from dagster_adjunct.resources.common import resolve_user


@click.group()
def app() -> None:
    """Manage applications."""


@app.command()
@click.argument("old")
@click.argument("new")
@audit_options
@lake_url
@output_options
def rename(old: str, new: str, reason: str, by: str | None, lake_url: str | None, json_output: bool) -> None:
    """Rename application OLD to NEW, with its checkpoint, history, startpoints and local tables.

    Its outputs still know it by the old name. Deploy the code that calls it NEW afterwards.
    """
    from dagster_adjunct.orchestration.maintenance.rename import rename_application
    from dagster_adjunct.resources.objects.lake import open_lake

    report = rename_application(open_lake(lake_url, create=False), old, new, reason=reason, by=resolve_user(by))
    show_report(report, [], json_output=json_output)

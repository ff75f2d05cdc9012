"""`adjunct metadata move, show, collect`: where a lake keeps what is small and contended."""

from __future__ import annotations

from typing import Any

import click

from dagster_adjunct.orchestration.cli.kvt_options import backend_options, chosen_backend, names_in
from dagster_adjunct.orchestration.cli.output import as_json, lake_url, show_facts, show_json, show_line, show_report
from dagster_adjunct.resources.errors import ConfigurationError


@click.group()
def metadata() -> None:
    """Where the lake keeps batch logs, run leases, startpoints and budgets: its objects, or a key-value table."""


@metadata.command()
@click.option("--to-key-value-table", "table", metavar="SCOPE/NAME", help="Move them there; it is made where needed.")
@click.option("--back", is_flag=True, help="Move them back among the lake's objects, or give up an interrupted move.")
@click.option("--partitions", type=click.IntRange(1), default=4, show_default=True, help="Of a table that is made.")
@backend_options
@lake_url
@as_json
def move(
    table: str | None,
    back: bool,
    partitions: int,
    lake_url: str | None,
    json_output: bool,
    **backend: Any,
) -> None:
    """Move them, while nobody runs an application. Start every process again that has the lake open.

    Without an option that says where the table lies, one that is made is in SQLite beside a local lake, and among the
    objects of any other lake, where it is of no use for this.
    """
    from dagster_adjunct.orchestration.upkeep.metadata_moving import move_metadata, move_metadata_back
    from dagster_adjunct.resources.lakes import open_lake

    if back == (table is not None):
        raise ConfigurationError(
            "metadata are moved one way at a time.",
            "Give either --to-key-value-table SCOPE/NAME or --back.",
            setting="--back",
        )
    lake = open_lake(lake_url, create=not back)
    if table is None:
        report = move_metadata_back(lake)
    else:
        chosen = chosen_backend(lake, **backend)
        report = move_metadata(lake, *names_in(table), backend=chosen, partitions=partitions)
    show_report(report, [_stray(key) for key in report.strays], json_output=json_output)


@metadata.command()
@lake_url
@as_json
def show(lake_url: str | None, json_output: bool) -> None:
    """Show where they are."""
    from dagster_adjunct.resources.lakes import open_lake

    lake = open_lake(lake_url, create=False)
    place = lake.metadata_place
    if json_output:
        show_json(None if place is None else place.model_dump(mode="json"))
    elif place is None:
        show_line("metadata are among the lake's objects.")
    else:
        facts = {"table": f"{place.scope}/{place.table}", "incarnation": place.incarnation, **place.backend}
        show_facts("metadata are in a key-value table", facts)


@metadata.command()
@click.option("--dry-run", is_flag=True, help="Only say how much would go.")
@lake_url
@as_json
def collect(dry_run: bool, lake_url: str | None, json_output: bool) -> None:
    """Delete what is left of them in the object store after they were moved to a key-value table."""
    from dagster_adjunct.orchestration.upkeep.metadata_moving import collect_metadata
    from dagster_adjunct.resources.lakes import open_lake

    objects = collect_metadata(open_lake(lake_url, create=False), dry_run=dry_run)
    if json_output:
        show_json({"objects": objects, "dry_run": dry_run})
    else:
        show_line(f"{objects:,} objects {'would be deleted' if dry_run else 'deleted'}.")


def _stray(key: str) -> str:
    return f"{key}: somebody who had the lake open before has committed there, where nobody looks any more"

"""`adjunct metadata move, show, collect`: where a lake keeps what is small and contended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dagster_adjunct.orchestration.cli.output import as_json, lake_url, show_facts, show_json, show_line, show_report
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.resources.key_value.table_segment import SegmentBackend


@click.group()
def metadata() -> None:
    """Where the lake keeps batch logs, run leases, startpoints and budgets: its objects, or a key-value table."""


@metadata.command()
@click.option("--to-key-value-table", "table", metavar="SCOPE/NAME", help="Move them there; it is made where needed.")
@click.option("--back", is_flag=True, help="Move them back among the lake's objects, or give up an interrupted move.")
@click.option("--sqlite", type=click.Path(path_type=Path), help="Make the table in this SQLite file.")
@click.option("--postgres", metavar="VARIABLE", help="Make it in the PostgreSQL whose DSN this variable has.")
@click.option("--partitions", type=click.IntRange(1), default=4, show_default=True, help="Of a table that is made.")
@lake_url
@as_json
def move(
    table: str | None,
    back: bool,
    sqlite: Path | None,
    postgres: str | None,
    partitions: int,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Move them, while nobody runs an application. Start every process again that has the lake open.

    Without --sqlite or --postgres a table is made where the lake's tables are by default: in SQLite beside a local
    lake, else among its objects, where it is of no use for this.
    """
    from dagster_adjunct.orchestration.upkeep.metadata_moving import move_metadata, move_metadata_back
    from dagster_adjunct.resources.objects import open_lake

    if back == (table is not None):
        raise ConfigurationError(
            "metadata are moved one way at a time.", "Give either --to-key-value-table SCOPE/NAME or --back."
        )
    lake = open_lake(lake_url, create=not back)
    if table is None:
        report = move_metadata_back(lake)
    else:
        scope, slash, name = table.partition("/")
        if not slash:
            raise ConfigurationError(
                f"{table!r} names no table: expected SCOPE/NAME.", "Write for example --to-key-value-table lake/meta."
            )
        report = move_metadata(lake, scope, name, backend=_backend(sqlite, postgres), partitions=partitions)
    show_report(report, [_stray(key) for key in report.strays], json_output=json_output)


@metadata.command()
@lake_url
@as_json
def show(lake_url: str | None, json_output: bool) -> None:
    """Show where they are."""
    from dagster_adjunct.resources.objects import open_lake

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
    from dagster_adjunct.resources.objects import open_lake

    objects = collect_metadata(open_lake(lake_url, create=False), dry_run=dry_run)
    if json_output:
        show_json({"objects": objects, "dry_run": dry_run})
    else:
        show_line(f"{objects:,} objects {'would be deleted' if dry_run else 'deleted'}.")


def _backend(sqlite: Path | None, postgres: str | None) -> SegmentBackend | None:
    from dagster_adjunct.resources import key_value_backends

    if sqlite is not None and postgres is not None:
        raise ConfigurationError("a table lies in one place.", "Give --sqlite or --postgres, not both.")
    if sqlite is not None:
        return key_value_backends.SqliteSegments(sqlite.absolute())
    if postgres is not None:
        return key_value_backends.PostgresSegments(dsn_env=postgres)
    return None


def _stray(key: str) -> str:
    return f"{key}: somebody who had the lake open before has committed there, where nobody looks any more"

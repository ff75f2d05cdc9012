"""`adjunct table …`: look up records of remote tables that applications of this lake have written."""

from __future__ import annotations

from typing import Any

import click

from dagster_adjunct.orchestration.cli.output import (
    fail_if_missing,
    lake_url,
    output_options,
    show_json,
    show_line,
    show_record,
)
from dagster_adjunct.resources.common import resolve_user
from dagster_adjunct.resources.tables.table import RemoteTable


@click.group()
def table() -> None:
    """Inspect remote tables that this lake's applications write."""


@table.command("get")
@click.argument("name")
@click.argument("key", nargs=-1, required=True)
@lake_url
@output_options
def get_record(name: str, key: tuple[str, ...], lake_url: str | None, json_output: bool) -> None:
    """Look up one record by its key, one KEY for each key column. Exits with 6 if there is none."""
    from dagster_adjunct.orchestration.application.table_registry import open_registered_table
    from dagster_adjunct.resources.objects.lake import open_lake
    from dagster_adjunct.resources.tables.table import BlockingTable

    remote = open_registered_table(open_lake(lake_url, create=False), name)
    values = _parse_key(key, remote)
    with BlockingTable(remote) as blocking:
        record = blocking.get(values[0] if len(values) == 1 else values)
    if json_output:
        show_json({"table": name, "key": list(key), "record": record})
    else:
        show_record(f"{name} {' '.join(key)}", record, "no record")
    fail_if_missing([record])


@table.command("allow-recreate")
@click.argument("name")
@click.option("--by", help="Who does it. Default: the user of this machine.")
@lake_url
@output_options
def allow_recreate(name: str, by: str | None, lake_url: str | None, json_output: bool) -> None:
    """Let the next run create a table again whose file is gone. Deletes nothing."""
    from dagster_adjunct.orchestration.application.table_registry import reset_table
    from dagster_adjunct.resources.objects.lake import open_lake

    reset_table(open_lake(lake_url, create=False), name, by=resolve_user(by))
    if json_output:
        show_json({"table": name, "forgotten": True})
    else:
        show_line(f"Table {name} may be created again: the next run that writes it creates it where it is declared.")


def _parse_key(key: tuple[str, ...], remote: RemoteTable[Any, Any, Any]) -> tuple[Any, ...]:
    """Convert the texts of a key to the types that the table's declaration gives its key columns."""
    from dagster_adjunct.assets.reading.key_lookup import key_from_text
    from dagster_adjunct.resources.backends.columns import Kind, parse_known_column
    from dagster_adjunct.resources.schemas.schema import Field

    types = {Kind.INTEGER: "bigint", Kind.DATE: "date", Kind.TIMESTAMP: "timestamp", Kind.BINARY: "binary"}
    columns = getattr(remote.read_function, "columns", None) or {}
    kinds = {name: parse_known_column(name, kind).kind for name, kind in columns.items()}
    fields = tuple(Field(name, types.get(kinds.get(name, Kind.STRING), "string")) for name in remote.key)
    return key_from_text(f"table {remote.name!r}", fields, list(key))

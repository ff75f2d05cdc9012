"""`adjunct table …`: records of the remote tables that applications of this lake have written."""

from __future__ import annotations

import click

from orchestration.cli.output import as_json, lake_url, show_facts, show_json


@click.group()
def table() -> None:
    """Remote tables that this lake's applications write."""


@table.command()
@click.argument("name")
@click.argument("key", nargs=-1, required=True)
@lake_url
@as_json
def get(name: str, key: tuple[str, ...], lake_url: str | None, json_output: bool) -> None:
    """Look one record up by its key, one KEY for each key column."""
    from orchestration.tables import open_table
    from resources.objects import open_lake
    from resources.tables import BlockingTable

    remote = open_table(open_lake(lake_url), name)
    with BlockingTable(remote) as blocking:
        record = blocking.get(key[0] if len(key) == 1 else key)
    if json_output:
        show_json({"table": name, "key": list(key), "record": record})
    elif record is None:
        show_facts(f"{name} {' '.join(key)}", {"": "no record"})
    else:
        show_facts(f"{name} {' '.join(key)}", record)

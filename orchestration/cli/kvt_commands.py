"""`adjunct kvt …`: key-value tables and their scopes: created, listed, shown, updated, sealed, deleted."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dagster_adjunct.orchestration.cli import kvt_entry_commands as entries
from dagster_adjunct.orchestration.cli.kvt_options import (
    backend_options,
    chosen_backend,
    manager_in,
    names_in,
    table_name,
)
from dagster_adjunct.orchestration.cli.output import (
    as_json,
    lake_url,
    show_facts,
    show_items,
    show_json,
    show_line,
    show_table,
)

if TYPE_CHECKING:
    from dagster_adjunct.resources.key_value.listed_tables import TableInfo

_LIMITED = [
    click.option("--longest-key", type=int, metavar="BYTES", help="What a serialised key may have at most."),
    click.option("--longest-value", type=int, metavar="BYTES", help="What a serialised value may have at most."),
]


@click.group()
def kvt() -> None:
    """Key-value tables: entries with versions, conditional and atomic writes."""


@kvt.group()
def scope() -> None:
    """Scopes, which hold key-value tables."""


@scope.command("create")
@click.argument("scope", metavar="SCOPE")
@lake_url
@as_json
def create_scope(scope: str, lake_url: str | None, json_output: bool) -> None:
    """Make a scope."""
    made = manager_in(lake_url, create=True).create_scope(scope)
    _told({"scope": scope, "created": made}, f"scope {scope} {'created' if made else 'is there already'}.", json_output)


@scope.command("list")
@click.option("--after", metavar="SCOPE", help="Go on behind this one.")
@click.option("--limit", type=click.IntRange(1), help="How many at most.")
@lake_url
@as_json
def list_scopes(after: str | None, limit: int | None, lake_url: str | None, json_output: bool) -> None:
    """List the scopes in the order of their names."""
    scopes = manager_in(lake_url).list_scopes(after=after, limit=limit)
    if json_output:
        show_json(list(scopes))
    else:
        show_table("scopes", ["scope"], [[name] for name in scopes], own=True)


@scope.command("delete")
@click.argument("scope", metavar="SCOPE")
@lake_url
@as_json
def delete_scope(scope: str, lake_url: str | None, json_output: bool) -> None:
    """Delete a scope that holds no tables any more."""
    gone = manager_in(lake_url).delete_scope(scope)
    _told({"scope": scope, "deleted": gone}, f"scope {scope} {'deleted' if gone else 'is not there'}.", json_output)


@kvt.command()
@table_name
@click.option("--partitions", type=click.IntRange(1), required=True, help="How many, for ever.")
@_LIMITED[0]
@_LIMITED[1]
@click.option("--create-scope", is_flag=True, help="Make the scope where it is not there.")
@backend_options
@lake_url
@as_json
def create(
    table: str,
    partitions: int,
    longest_key: int | None,
    longest_value: int | None,
    create_scope: bool,
    lake_url: str | None,
    json_output: bool,
    **backend: Any,
) -> None:
    """Make a table; one that is there already must be configured alike.

    Without an option that says where it lies, that is SQLite beside a local lake, and objects of any other lake.
    """
    from dagster_adjunct.resources.key_value.table_configuration import KeyValueTableConfiguration
    from dagster_adjunct.resources.key_value.table_manager import KeyValueTableManager

    names = names_in(table)
    configuration = KeyValueTableConfiguration(partitions, longest_key, longest_value)
    lake = manager_in(lake_url, create=True).lake
    manager = KeyValueTableManager(lake, chosen_backend(lake, **backend))
    if create_scope:
        manager.create_scope(names[0])
    made = manager.create(*names, configuration)
    facts = {"table": table, "created": made, **_facts(manager.describe(*names))}
    _told(facts, f"key-value table {table} {'created' if made else 'is there already'}.", json_output)


@kvt.command("list")
@click.argument("scope", metavar="SCOPE")
@click.option("--after", metavar="TABLE", help="Go on behind this one.")
@click.option("--limit", type=click.IntRange(1), help="How many at most.")
@lake_url
@as_json
def list_tables(scope: str, after: str | None, limit: int | None, lake_url: str | None, json_output: bool) -> None:
    """List the tables of a scope in the order of their names."""
    tables = [_facts(table) for table in manager_in(lake_url).list(scope, after=after, limit=limit)]
    if json_output:
        show_json(tables)
        return
    columns = ["name", "state", "partitions", "backend", "created_at"]
    show_items(f"key-value tables of {scope}", columns + ["problem"] * any(one["problem"] for one in tables), tables)


@kvt.command()
@table_name
@lake_url
@as_json
def show(table: str, lake_url: str | None, json_output: bool) -> None:
    """Show how a table is configured, how far it is, and where its partitions live."""
    manager, names = manager_in(lake_url), names_in(table)
    facts = _facts(manager.describe(*names))
    segments = [asdict(segment) for segment in manager.segments(*names)]
    if json_output:
        show_json({**facts, "segments": segments})
        return
    show_facts(f"key-value table {table}", {name: value for name, value in facts.items() if name != "problem"})
    show_table("segments", ["partition", "location"], [[one["partition"], one["location"]] for one in segments])


@kvt.command()
@table_name
@_LIMITED[0]
@_LIMITED[1]
@lake_url
@as_json
def update(
    table: str, longest_key: int | None, longest_value: int | None, lake_url: str | None, json_output: bool
) -> None:
    """Give a table these limits, and none where an option is left out. Its partitions never change."""
    from dagster_adjunct.resources.key_value.table_configuration import KeyValueTableConfiguration

    manager, names = manager_in(lake_url), names_in(table)
    partitions = manager.get_configuration(*names).partitions
    changed = manager.update(*names, KeyValueTableConfiguration(partitions, longest_key, longest_value))
    facts = {"table": table, "updated": changed, **_facts(manager.describe(*names))}
    _told(facts, f"key-value table {table} {'updated' if changed else 'is so already'}.", json_output)


@kvt.command()
@table_name
@lake_url
@as_json
def seal(table: str, lake_url: str | None, json_output: bool) -> None:
    """Refuse all writes to a table from now on, for ever; reads go on."""
    sealed = manager_in(lake_url).seal(*names_in(table))
    sentence = f"key-value table {table} {'sealed' if sealed else 'is sealed already'}."
    _told({"table": table, "sealed": sealed}, sentence, json_output)


@kvt.command()
@table_name
@click.option("--forget", is_flag=True, help="Only the lake's entry: the backend is not asked, and keeps the table.")
@click.option("--yes", is_flag=True, help="Do not ask before.")
@lake_url
@as_json
def delete(table: str, forget: bool, yes: bool, lake_url: str | None, json_output: bool) -> None:
    """Delete a table with all that it holds, for good."""
    manager, names = manager_in(lake_url), names_in(table)
    if not yes:
        what = "what the lake knows of it" if forget else "all that it holds"
        click.confirm(f"Delete key-value table {table} and {what} for good?", abort=True, err=True)
    gone = manager.forget(*names) if forget else manager.delete(*names)
    done = "forgotten" if forget else "deleted"
    sentence = f"key-value table {table} {done if gone else 'is not there'}."
    _told({"table": table, done: gone}, sentence, json_output)


for command in (entries.get, entries.put, entries.remove, entries.iterate):
    kvt.add_command(command)


def _told(facts: dict[str, Any], line: str, json_output: bool) -> None:
    if json_output:
        show_json(facts)
    else:
        show_line(line[0].upper() + line[1:])


def _facts(table: TableInfo) -> dict[str, Any]:
    """Return what is known of a table, its configuration beside everything else."""
    facts = asdict(table)
    configuration = facts.pop("configuration") or {"partitions": None, "longest_key": None, "longest_value": None}
    return {**facts, **configuration}

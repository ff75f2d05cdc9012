"""`adjunct kv …`: key-value tables, their scopes and their entries."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import click

from dagster_adjunct.orchestration.cli.output import (
    fail_if_missing,
    lake_url,
    output_options,
    show_facts,
    show_items,
    show_json,
    show_line,
    show_table,
    show_with_error,
)
from dagster_adjunct.resources.errors import ConditionsNotMetError, ConfigurationError
from dagster_adjunct.resources.key_value.entries import TableEntry, TableKey
from dagster_adjunct.resources.key_value.iterators import IteratorPage, IteratorState
from dagster_adjunct.resources.key_value.manager import KeyValueTableManager, TableInfo
from dagster_adjunct.resources.key_value.segment import KeyVersion, SegmentBackend
from dagster_adjunct.resources.key_value.table import BlockingKeyValueTable
from dagster_adjunct.resources.objects.lake import Lake

C = TypeVar("C", bound=Callable[..., Any])
TYPES = ("text", "json", "int", "bytes")

table_name = click.argument("table", metavar="SCOPE/TABLE")
family_option = click.option("--family", metavar="FAMILY", help="The family of the keys. Default: keys without one.")


def type_options(command: C) -> C:
    """Add --key-type and --value-type, which must be those that the entries were written with."""
    key = click.option(
        "--key-type", type=click.Choice(TYPES), default="text", show_default=True, help="Type of the keys."
    )
    value = click.option(
        "--value-type", type=click.Choice(TYPES), default="text", show_default=True, help="Type of the values."
    )
    return key(value(command))


def backend_options(command: C) -> C:
    """Add the options that choose a table's backend instead of the lake's default."""
    options = [
        click.option("--sqlite", metavar="FILE", help="Store it in this SQLite file."),
        click.option(
            "--postgres",
            metavar="VARIABLE",
            help="Store it in PostgreSQL; names the environment variable with its DSN.",
        ),
        click.option("--schema", metavar="NAME", help="With --postgres: the schema."),
        click.option("--dynamodb", is_flag=True, help="Store it in DynamoDB; credentials come from boto3."),
        click.option("--region", metavar="NAME", help="With --dynamodb: the region."),
        click.option("--endpoint-url", metavar="URL", help="With --dynamodb: the endpoint URL."),
        click.option("--prefix", metavar="TEXT", help="With --dynamodb: prefix of its table names."),
        click.option("--objects", is_flag=True, help="Store it in objects of the lake."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def backend_from_options(
    lake: Lake,
    *,
    sqlite: str | None,
    postgres: str | None,
    schema: str | None,
    dynamodb: bool,
    region: str | None,
    endpoint_url: str | None,
    prefix: str | None,
    objects: bool,
) -> SegmentBackend | None:
    """Return the chosen backend, None for the lake's default. Raises ConfigurationError if two are chosen."""
    from dagster_adjunct.resources import key_value_backends as _registered  # noqa: F401
    from dagster_adjunct.resources.key_value.segment import backend_from
    from dagster_adjunct.resources.key_value.table_backends import IN_OBJECTS, resolve_lake_backend

    detail = {"--schema": schema, "--region": region, "--endpoint-url": endpoint_url, "--prefix": prefix}
    given = {"--sqlite": sqlite, "--postgres": postgres, "--dynamodb": dynamodb, "--objects": objects}
    chosen = [name for name, value in given.items() if value]
    if len(chosen) > 1:
        raise ConfigurationError(
            f"{' and '.join(chosen)} name more than one backend.", "Give only one of them.", setting=chosen[1]
        )
    belongs = {"--postgres": {"--schema"}, "--dynamodb": {"--region", "--endpoint-url", "--prefix"}}
    taken = belongs.get(chosen[0], set()) if chosen else set()
    for name, value in detail.items():
        if value is not None and name not in taken:
            owner = next(owner for owner, names in belongs.items() if name in names)
            raise ConfigurationError(f"{name} needs {owner}.", f"Add {owner}.", setting=name)
    if not chosen:
        return None
    if objects:
        return backend_from(resolve_lake_backend(lake, IN_OBJECTS))
    settings: dict[str, Any] = {
        "--sqlite": {"backend": "sqlite", "path": sqlite},
        "--postgres": {"backend": "postgres", "dsn_env": postgres, "schema": schema},
        "--dynamodb": {"backend": "dynamodb", "region": region, "endpoint_url": endpoint_url, "prefix": prefix},
    }[chosen[0]]
    return backend_from({name: value for name, value in settings.items() if value is not None})


def split_table_name(table: str) -> tuple[str, str]:
    """Split SCOPE/TABLE into the scope and the table name."""
    scope, slash, name = table.partition("/")
    if not slash:
        raise ConfigurationError(
            f"{table!r} has no scope: expected SCOPE/TABLE.",
            "List scopes with adjunct kv scope list, and their tables with adjunct kv list SCOPE.",
            argument="table",
        )
    return scope, name


def open_manager(lake_url: str | None, *, create: bool = False) -> KeyValueTableManager:
    """Return the manager of a lake's tables; `create` creates a lake that does not exist."""
    from dagster_adjunct.resources import key_value_backends as _registered  # noqa: F401
    from dagster_adjunct.resources.key_value.manager import KeyValueTableManager
    from dagster_adjunct.resources.objects.lake import open_lake

    return KeyValueTableManager(open_lake(lake_url, create=create))


def open_key_value_table(
    lake_url: str | None, table: str, key_type: str, value_type: str
) -> BlockingKeyValueTable[Any, Any]:
    """Open a table with the serializers of these types."""
    from dagster_adjunct.resources.key_value.serializers import serializer_named
    from dagster_adjunct.resources.key_value.table import BlockingKeyValueTable

    scope, name = split_table_name(table)
    manager = open_manager(lake_url)
    return BlockingKeyValueTable(
        manager.open(scope, name, key=serializer_named(key_type), value=serializer_named(value_type))
    )


def parse_value(kind: str, text: str, what: str) -> Any:
    """Parse a command-line value of this type; bytes are given in base64."""
    try:
        if kind == "int":
            return int(text)
        if kind == "json":
            return json.loads(text)
        return base64.b64decode(text, validate=True) if kind == "bytes" else text
    except (ValueError, binascii.Error, RecursionError) as error:
        expected = {"int": "a whole number", "json": "JSON", "bytes": "base64"}[kind]
        raise ConfigurationError(
            f"{what} {text!r:.80} is not {expected}: {error}.",
            f"Give {expected}, or choose another type (--key-type, --value-type).",
            setting=what,
        ) from error


def to_json_value(kind: str, value: Any) -> Any:
    """Convert a key or a value to JSON, with bytes as base64."""
    return base64.b64encode(value).decode() if kind == "bytes" else value


def entry_to_json(
    key: TableKey[Any], entry: TableEntry[Any, Any] | None, key_type: str, value_type: str
) -> dict[str, Any]:
    """Convert an entry, or a key alone, to JSON."""
    facts: dict[str, Any] = {"family": key.family, "key": to_json_value(key_type, key.key)}
    if entry is not None:
        facts["value"] = to_json_value(value_type, entry.value)
    return {**facts, "version": None if key.version is None else str(key.version)}


@contextmanager
def report_failed_keys(key_type: str) -> Iterator[None]:
    """With --json, report which keys failed if a conditional write fails."""
    try:
        yield
    except ConditionsNotMetError as error:
        show_with_error(
            failures=[
                {
                    "family": failure.family,
                    "key": to_json_value(key_type, failure.key),
                    "expected": None if failure.expected is None else str(failure.expected),
                    "found": None if failure.found is None else str(failure.found),
                }
                for failure in error.failures
            ]
        )
        raise


def format_cell(kind: str, value: Any) -> str:
    """Format a key or value for a table cell."""
    return json.dumps(value, ensure_ascii=False) if kind == "json" else str(value)


def parse_version(text: str) -> KeyVersion:
    """Parse a version in the format that commands print."""
    from dagster_adjunct.resources.key_value.segment import KeyVersion

    try:
        stored = bytes.fromhex(text)
    except ValueError as error:
        raise ConfigurationError(
            f"--version {text!r:.80} is not a version: expected 32 hexadecimal digits.",
            "Give a version that get, put or iterate printed.",
            setting="--version",
        ) from error
    return KeyVersion.from_bytes(stored)


_PAGE = 100


@click.command("get")
@table_name
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@family_option
@type_options
@lake_url
@output_options
def get_entries(
    table: str,
    keys: tuple[str, ...],
    family: str | None,
    key_type: str,
    value_type: str,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Look up entries by key, with their versions. Exits with 6 if a key does not exist."""
    wanted = [parse_value(key_type, key, "key") for key in keys]
    with open_key_value_table(lake_url, table, key_type, value_type) as reading:
        read = reading.get_all(wanted, family=family)
    entries = [None if one is None else entry_to_json(one.key, one, key_type, value_type) for one in read]
    if json_output:
        show_json({"table": table, "family": family, "entries": entries})
    else:
        rows = [
            [key, "", "no entry"] if one is None else [key, format_cell(value_type, one["value"]), one["version"]]
            for key, one in zip(keys, entries, strict=True)
        ]
        show_table(_title(table, family), ["key", "value", "version"], rows, own=True)
    fail_if_missing(entries)


@click.command("put")
@table_name
@click.argument("key", metavar="KEY")
@click.argument("value", metavar="VALUE")
@family_option
@click.option("--if-absent", is_flag=True, help="Only if the key does not exist.")
@click.option("--version", metavar="VERSION", help="Only if the key has this version.")
@type_options
@lake_url
@output_options
def put_entry(
    table: str,
    key: str,
    value: str,
    family: str | None,
    if_absent: bool,
    version: str | None,
    key_type: str,
    value_type: str,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Write an entry, and print its new version."""
    if if_absent and version is not None:
        raise ConfigurationError(
            "--if-absent and --version can't both hold.", "Give only one of them.", setting="--if-absent"
        )
    name, content = parse_value(key_type, key, "key"), parse_value(value_type, value, "value")
    with open_key_value_table(lake_url, table, key_type, value_type) as writing, report_failed_keys(key_type):
        if version is not None:
            written = writing.replace(name, content, parse_version(version), family=family)
        elif if_absent:
            written = writing.put_if_absent(name, content, family=family)
        else:
            written = writing.put(name, content, family=family)
    if json_output:
        show_json({"table": table, "family": family, "key": to_json_value(key_type, name), "version": str(written)})
    else:
        show_line(f"{key} has version {written}.")


@click.command("remove")
@table_name
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@family_option
@click.option("--version", metavar="VERSION", help="Only if the key has this version.")
@type_options
@lake_url
@output_options
def remove_entries(
    table: str,
    keys: tuple[str, ...],
    family: str | None,
    version: str | None,
    key_type: str,
    value_type: str,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Remove entries, or one entry of a given version. Several keys of one family are removed atomically."""
    if len(keys) > 1 and (version is not None or family is None):
        raise ConfigurationError(
            f"{len(keys)} keys with {'--version' if version is not None else 'no --family'}: expected one key.",
            "Give one key, or several keys of one --family without --version.",
            setting="--family" if version is None else "--version",
        )
    wanted = [parse_value(key_type, key, "key") for key in keys]
    with open_key_value_table(lake_url, table, key_type, value_type) as writing, report_failed_keys(key_type):
        if len(wanted) > 1 and family is not None:
            writing.remove_all(wanted, family=family)
        else:
            writing.remove(wanted[0], version=None if version is None else parse_version(version), family=family)
    if json_output:
        show_json({"table": table, "family": family, "removed": [to_json_value(key_type, key) for key in wanted]})
    else:
        show_line(f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} removed.")


@click.command("iterate")
@table_name
@click.option("--family", metavar="FAMILY", help="Only entries of this family, in key order. Default: the whole table.")
@click.option(
    "--prefix",
    metavar="TEXT",
    help="With --family: keys with this prefix (JSON as stored; bytes in base64).",
)
@click.option("--start", metavar="KEY", help="With --family: the first key (inclusive).")
@click.option("--end", metavar="KEY", help="With --family: the end key (exclusive).")
@click.option("--keys-only", is_flag=True, help="Omit values.")
@click.option(
    "--page-size", type=click.IntRange(1), default=_PAGE, show_default=True, help="Maximum number of entries."
)
@click.option("--state", metavar="STATE", help="Continue after the page that printed this state.")
@click.option("--all", "whole", is_flag=True, help="Print all remaining pages.")
@type_options
@lake_url
@output_options
def iterate_entries(
    table: str,
    family: str | None,
    prefix: str | None,
    start: str | None,
    end: str | None,
    keys_only: bool,
    page_size: int,
    state: str | None,
    whole: bool,
    key_type: str,
    value_type: str,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Print a page of entries, and the state from which the same command continues."""
    within: dict[str, Any] = {
        "prefix": prefix.encode()
        if prefix and key_type == "json"
        else prefix and parse_value(key_type, prefix, "--prefix"),
        "start": None if start is None else parse_value(key_type, start, "--start"),
        "end": None if end is None else parse_value(key_type, end, "--end"),
    }
    bounds = [f"--{name}" for name, bound in within.items() if bound is not None]
    if family is None and bounds:
        raise ConfigurationError(
            f"{bounds[0]} needs --family: only the keys within a family are ordered.",
            "Add --family.",
            setting=bounds[0],
        )
    behind = None if state is None else _parse_state(state)
    entries: list[dict[str, Any]] = []
    at, ended = None, False
    with open_key_value_table(lake_url, table, key_type, value_type) as reading:

        def pages(most: int) -> Iterator[IteratorPage[Any]]:
            if family is None:
                return (reading.all_keys if keys_only else reading.all_entries)(page_size=most, state=behind)
            return (reading.keys if keys_only else reading.entries)(family, **within, page_size=most, state=behind)

        # A table's page ends with its partition; a printed page spans partitions, which may be nearly empty.
        while not ended and (whole or len(entries) < page_size):
            page = next(pages(page_size if whole else page_size - len(entries)), None)
            ended = page is None
            if page is not None:
                behind = page.state
                at = base64.urlsafe_b64encode(behind.to_bytes()).decode()
                entries += [
                    entry_to_json(item, None, key_type, value_type)
                    if keys_only
                    else entry_to_json(item.key, item, key_type, value_type)
                    for item in page.items
                ]
    if json_output:
        show_json({"table": table, "entries": entries, "state": at})
        return
    if entries:
        _show_entries(_title(table, family), entries, keys_only, key_type, value_type)
    if not entries:
        show_line("No entries." if state is None else "No more entries.")
    elif ended:
        show_line("End of entries.")
    else:
        show_line(f"Continue with --state {at}")


def _show_entries(
    title: str, entries: Sequence[dict[str, Any]], keys_only: bool, key_type: str, value_type: str
) -> None:
    columns = ["family", "key", *(() if keys_only else ("value",)), "version"]
    rows = [
        [
            "" if one["family"] is None else one["family"],
            format_cell(key_type, one["key"]),
            *(() if keys_only else (format_cell(value_type, one["value"]),)),
            one["version"],
        ]
        for one in entries
    ]
    show_table(title, columns, rows, own=True)


def _title(table: str, family: str | None) -> str:
    return f"key-value table {table}" + ("" if family is None else f", family {family}")


def _parse_state(text: str) -> IteratorState:
    from dagster_adjunct.resources.key_value.iterators import IteratorState

    try:
        return IteratorState.from_bytes(base64.b64decode(text, altchars=b"-_", validate=True))
    except (ValueError, binascii.Error) as error:
        raise ConfigurationError(
            f"--state {text!r:.80} is not a state: {error}.", "Give a state that iterate printed.", setting="--state"
        ) from error


_LIMIT_OPTIONS = [
    click.option("--longest-key", type=int, metavar="BYTES", help="Maximum size of a serialized key."),
    click.option("--longest-value", type=int, metavar="BYTES", help="Maximum size of a serialized value."),
]


@click.group()
def kv() -> None:
    """Manage key-value tables: entries with versions, conditional and atomic writes."""


@kv.group()
def scope() -> None:
    """Manage scopes, which hold key-value tables."""


@scope.command("create")
@click.argument("scope", metavar="SCOPE")
@lake_url
@output_options
def create_scope(scope: str, lake_url: str | None, json_output: bool) -> None:
    """Create a scope."""
    made = open_manager(lake_url, create=True).create_scope(scope)
    _report({"scope": scope, "created": made}, f"scope {scope} {'created' if made else 'exists already'}.", json_output)


@scope.command("list")
@click.option("--after", metavar="SCOPE", help="Start after this name.")
@click.option("--limit", type=click.IntRange(1), help="Maximum number.")
@lake_url
@output_options
def list_scopes(after: str | None, limit: int | None, lake_url: str | None, json_output: bool) -> None:
    """List the scopes, ordered by name."""
    scopes = open_manager(lake_url).list_scopes(after=after, limit=limit)
    if json_output:
        show_json(list(scopes))
    else:
        show_table("scopes", ["scope"], [[name] for name in scopes], own=True)


@scope.command("delete")
@click.argument("scope", metavar="SCOPE")
@lake_url
@output_options
def delete_scope(scope: str, lake_url: str | None, json_output: bool) -> None:
    """Delete an empty scope."""
    gone = open_manager(lake_url).delete_scope(scope)
    _report({"scope": scope, "deleted": gone}, f"scope {scope} {'deleted' if gone else 'does not exist'}.", json_output)


@kv.command()
@table_name
@click.option(
    "--partitions", type=click.IntRange(1), required=True, help="Number of partitions; it can't be changed later."
)
@_LIMIT_OPTIONS[0]
@_LIMIT_OPTIONS[1]
@click.option("--create-scope", is_flag=True, help="Create the scope if it does not exist.")
@backend_options
@lake_url
@output_options
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
    """Create a table; an existing one must have the same configuration.

    By default it is stored in SQLite next to a local lake, and in objects of any other lake.
    """
    from dagster_adjunct.resources.key_value.manager import KeyValueTableManager
    from dagster_adjunct.resources.key_value.segment import KeyValueTableConfiguration

    names = split_table_name(table)
    configuration = KeyValueTableConfiguration(partitions, longest_key, longest_value)
    lake = open_manager(lake_url, create=True).lake
    manager = KeyValueTableManager(lake, backend_from_options(lake, **backend))
    if create_scope:
        manager.create_scope(names[0])
    made = manager.create(*names, configuration)
    facts = {"table": table, "created": made, **_facts(manager.describe(*names))}
    _report(facts, f"key-value table {table} {'created' if made else 'exists already'}.", json_output)


@kv.command("list")
@click.argument("scope", metavar="SCOPE")
@click.option("--after", metavar="TABLE", help="Start after this name.")
@click.option("--limit", type=click.IntRange(1), help="Maximum number.")
@lake_url
@output_options
def list_tables(scope: str, after: str | None, limit: int | None, lake_url: str | None, json_output: bool) -> None:
    """List the tables of a scope, ordered by name."""
    tables = [_facts(table) for table in open_manager(lake_url).list(scope, after=after, limit=limit)]
    if json_output:
        show_json(tables)
        return
    columns = ["name", "state", "partitions", "backend", "created_at"]
    show_items(f"key-value tables of {scope}", columns + ["problem"] * any(one["problem"] for one in tables), tables)


@kv.command("show")
@table_name
@lake_url
@output_options
def show_key_value_table(table: str, lake_url: str | None, json_output: bool) -> None:
    """Show a table's configuration and state, and where its partitions are stored."""
    manager, names = open_manager(lake_url), split_table_name(table)
    facts = _facts(manager.describe(*names))
    segments = [asdict(segment) for segment in manager.segments(*names)]
    if json_output:
        show_json({**facts, "segments": segments})
        return
    show_facts(f"key-value table {table}", {name: value for name, value in facts.items() if name != "problem"})
    show_table("segments", ["partition", "location"], [[one["partition"], one["location"]] for one in segments])


@kv.command()
@table_name
@_LIMIT_OPTIONS[0]
@_LIMIT_OPTIONS[1]
@lake_url
@output_options
def update(
    table: str, longest_key: int | None, longest_value: int | None, lake_url: str | None, json_output: bool
) -> None:
    """Set a table's limits; an omitted option removes its limit. Partitions can't be changed."""
    from dagster_adjunct.resources.key_value.segment import KeyValueTableConfiguration

    manager, names = open_manager(lake_url), split_table_name(table)
    partitions = manager.get_configuration(*names).partitions
    changed = manager.update(*names, KeyValueTableConfiguration(partitions, longest_key, longest_value))
    facts = {"table": table, "updated": changed, **_facts(manager.describe(*names))}
    _report(facts, f"key-value table {table} {'updated' if changed else 'has these limits already'}.", json_output)


@kv.command()
@table_name
@lake_url
@output_options
def seal(table: str, lake_url: str | None, json_output: bool) -> None:
    """Make a table read-only, permanently."""
    sealed = open_manager(lake_url).seal(*split_table_name(table))
    sentence = f"key-value table {table} {'sealed' if sealed else 'is sealed already'}."
    _report({"table": table, "sealed": sealed}, sentence, json_output)


@kv.command()
@table_name
@click.option("--unregister", is_flag=True, help="Only remove the lake's entry; the backend keeps the table's data.")
@click.option("--yes", is_flag=True, help="Do not ask before.")
@lake_url
@output_options
def delete(table: str, unregister: bool, yes: bool, lake_url: str | None, json_output: bool) -> None:
    """Delete a table and all its entries permanently."""
    manager, names = open_manager(lake_url), split_table_name(table)
    if not yes:
        what = "the lake's entry for key-value table" if unregister else "key-value table"
        click.confirm(f"Delete {what} {table} permanently?", abort=True, err=True)
    gone = manager.forget(*names) if unregister else manager.delete(*names)
    done = "forgotten" if unregister else "deleted"
    sentence = f"key-value table {table} {done if gone else 'does not exist'}."
    _report({"table": table, done: gone}, sentence, json_output)


for command in (get_entries, put_entry, remove_entries, iterate_entries):
    kv.add_command(command)


def _report(facts: dict[str, Any], line: str, json_output: bool) -> None:
    if json_output:
        show_json(facts)
    else:
        show_line(line[0].upper() + line[1:])


def _facts(table: TableInfo) -> dict[str, Any]:
    """Return a table's description with its configuration merged in."""
    facts = asdict(table)
    configuration = facts.pop("configuration") or {"partitions": None, "longest_key": None, "longest_value": None}
    return {**facts, **configuration}

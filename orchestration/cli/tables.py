"""`adjunct table …` looks up records of remote tables; `adjunct kv …` manages key-value tables
and their entries.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from decimal import Decimal
from functools import wraps
from typing import Any

import click

from dagster_adjunct.assets.reading.key_lookup import key_from_text
from dagster_adjunct.orchestration.application.table_registry import (
    open_registered_table,
    reset_table,
)
from dagster_adjunct.orchestration.cli import output
from dagster_adjunct.orchestration.cli.options import (
    audit_options,
    confirm,
    confirm_at_terminal,
    flag,
    lake_options,
    limit_option,
    name_argument,
    option,
    yes_option,
)
from dagster_adjunct.resources.errors import (
    ConditionsNotMetError,
    ConfigurationError,
    IteratorStateError,
    KeyValueTableError,
)
from dagster_adjunct.resources.key_value.entries import TableEntry, TableKey
from dagster_adjunct.resources.key_value.iterators import IteratorPage, IteratorState
from dagster_adjunct.resources.key_value.manager import (
    IN_OBJECTS,
    KeyValueTableManager,
    TableInfo,
    resolve_lake_backend,
)
from dagster_adjunct.resources.key_value.segment import (
    KeyValueTableConfiguration,
    KeyVersion,
    SegmentBackend,
    backend_from,
)
from dagster_adjunct.resources.key_value.serializers import serializer_named
from dagster_adjunct.resources.key_value.table import BlockingKeyValueTable
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Field
from dagster_adjunct.resources.schemas.texts import WHOLE_NUMBER
from dagster_adjunct.resources.table_backends.columns import Kind, parse_known_column
from dagster_adjunct.resources.tables.table import BlockingTable

_TYPES = ("text", "json", "int", "bytes")
_KEY_TYPES = {
    Kind.INTEGER: "bigint",
    Kind.DATE: "date",
    Kind.TIMESTAMP: "timestamp",
    Kind.BINARY: "binary",
}
# For types of key columns that `key_from_text` does not convert, since a dataset's key can't have
# them.
_PARSERS: dict[Kind, Callable[[str], Any]] = {
    Kind.BOOLEAN: {"true": True, "false": False}.__getitem__,
    Kind.DECIMAL: Decimal,
    Kind.FLOAT: float,
}


def _unchanged(value: Any) -> Any:
    """Return a value that needs no conversion."""
    return value


table = click.Group("table")


@table.command("get")
@name_argument
@click.argument("key", nargs=-1, required=True)
@lake_options()
def get_record(lake: Lake, name: str, key: tuple[str, ...]) -> None:
    """Look up one record by its key, one KEY for each key column. Exits with 6 if there is none."""
    remote = open_registered_table(lake, name)
    columns = getattr(remote.read_function, "columns", None) or {}
    kinds = {column: parse_known_column(column, kind).kind for column, kind in columns.items()}
    fields = [
        Field(column, _KEY_TYPES.get(kinds.get(column, Kind.STRING), "string"))
        for column in remote.key
    ]
    values = list(key_from_text(f"table {remote.name!r}", fields, list(key)))
    for place, column in enumerate(remote.key):
        parse: Callable[[Any], Any] = _PARSERS.get(kinds.get(column, Kind.STRING), _unchanged)
        try:
            values[place] = parse(values[place])
        except (ArithmeticError, LookupError, ValueError) as error:
            problem = (
                f"table {remote.name!r}: key column {column!r} is {columns[column]}, not"
                f" {key[place]!r:.80}."
            )
            step = "Give a number, or true or false for a boolean."
            raise ConfigurationError(problem, step, table=remote.name) from error
    with BlockingTable(remote) as blocking:
        record = blocking.get(values[0] if len(values) == 1 else tuple(values))
    output.show_json({"table": name, "key": list(key), "record": record})
    output.show_record(f"{name} {' '.join(key)}", record, "no record")
    output.fail_if_missing([record])


@table.command("allow-recreate")
@name_argument
@audit_options
@lake_options()
def allow_recreate(lake: Lake, name: str, reason: str, by: str) -> None:
    """Let the next run create a remote or output table that is gone, or accept one that was
    replaced or restored. Deletes nothing.
    """
    reset_table(lake, name, by=by, reason=reason)
    output.show_json({"table": name, "forgotten": True, "by": by, "reason": reason})
    output.show_line(
        f"Table {name} may be created again: the next run that writes it creates it, or takes it"
        " as is."
    )


kv = click.Group("kv")


scope = click.Group("scope", help="Manage scopes, which hold key-value tables.")
kv.add_command(scope)


@dataclass(frozen=True, slots=True)
class _Entries:
    """The table that a command works on, or one family of its keys, with the types of keys and
    values.
    """

    lake: Lake
    table: str
    family: str | None
    key_type: str
    value_type: str

    @property
    def title(self) -> str:
        """What the output calls the table, or the family."""
        if self.family is None:
            return f"key-value table {self.table}"
        return f"key-value table {self.table}, family {self.family}"

    def parse_key(self, text: str, what: str = "key") -> Any:
        """Return the key in a text of the command line; errors call it `what`."""
        return _parse_value(self.key_type, text, what)

    @contextmanager
    def open(self) -> Iterator[BlockingKeyValueTable[Any, Any]]:
        """Open the table. With --json, the error of a failed conditional write lists the keys
        that failed.
        """
        key = serializer_named(self.key_type)
        value = serializer_named(self.value_type)
        table = KeyValueTableManager(self.lake).open(
            *_split_table_name(self.table), key=key, value=value
        )
        with BlockingKeyValueTable(table) as opened:
            try:
                yield opened
            except ConditionsNotMetError as error:
                output.show_with_error(failures=error.failures)
                raise

    def read_page(
        self,
        reading: BlockingKeyValueTable[Any, Any],
        within: dict[str, Any],
        *,
        keys_only: bool,
        **place: Any,
    ) -> IteratorPage[Any] | None:
        """Return the page of entries or keys that comes next; None after the last one.

        `within` are bounds of keys in a family, and ignored without one. `place` has `page_size`,
        and the `state` after the page before.
        """
        if self.family is not None:
            read = reading.keys if keys_only else reading.entries
            return next(read(self.family, **within, **place), None)
        read_all = reading.all_keys if keys_only else reading.all_entries
        return next(read_all(**place), None)

    def parse_bounds(
        self, prefix: str | None, start: str | None, end: str | None
    ) -> dict[str, Any]:
        """Return the bounds of keys. Raises ConfigurationError for bounds without a family."""
        within: dict[str, Any] = {}
        if start is not None:
            within["start"] = self.parse_key(start, "--start")
        if end is not None:
            within["end"] = self.parse_key(end, "--end")
        if prefix == "":  # all keys begin with it
            within["prefix"] = ""
        elif prefix is not None and self.key_type == "json":
            within["prefix"] = prefix.encode()  # part of a stored document, which is none itself
        elif prefix is not None:
            within["prefix"] = self.parse_key(prefix, "--prefix")
        for name in ("prefix", "start", "end"):
            if self.family is None and name in within:
                option = f"--{name}"
                problem = f"{option} needs --family: only the keys within a family are ordered."
                raise ConfigurationError(problem, "Add --family.", setting=option)
        return within

    def to_json(
        self, key: TableKey[Any], entry: TableEntry[Any, Any] | None = None
    ) -> dict[str, Any]:
        """Convert an entry, or a key alone, to JSON."""
        document = {"family": key.family, "key": key.key}
        if entry is not None:
            document["value"] = entry.value
        return {**document, "version": key.version and str(key.version)}

    def list_as_json(self, page: IteratorPage[Any]) -> list[dict[str, Any]]:
        """Convert a page of entries, or of keys, to JSON."""
        listed = []
        for item in page.items:
            if isinstance(item, TableEntry):
                listed.append(self.to_json(item.key, item))
            else:
                listed.append(self.to_json(item))
        return listed

    def show_json(self, **facts: Any) -> None:
        """Print these facts about the table as JSON, if --json is given."""
        output.show_json({"table": self.table, "family": self.family, **facts})


_table_name = click.argument("table", metavar="SCOPE/TABLE")


def _entry_command(
    name: str, family: str = "The family of the keys. Default: keys without one."
) -> Callable[[Callable[..., None]], click.Command]:
    """Return a decorator that makes a function of `_Entries` the command `name`, with the options
    for `_Entries`.

    --key-type and --value-type must be those with which the entries were written.
    """
    choice: dict[str, Any] = {"type": click.Choice(_TYPES), "default": "text", "show_default": True}

    def command_of(act: Callable[..., None]) -> click.Command:
        @kv.command(name)
        @_table_name
        @option("--family", "FAMILY", family)
        @lake_options()
        @click.option("--key-type", **choice, help="Type of the keys; bytes are written in base64.")
        @click.option(
            "--value-type", **choice, help="Type of the values; bytes are written in base64."
        )
        @wraps(act)
        def run(
            lake: Lake, table: str, family: str | None, key_type: str, value_type: str, **given: Any
        ) -> None:
            act(_Entries(lake, table, family, key_type, value_type), **given)

        return run

    return command_of


# By option that chooses a backend: the setting that its value is for, if it has one.
_BACKENDS = {"sqlite": "path", "postgres": "dsn_env", "dynamodb": None, "objects": None}
# By option that only one backend has: that backend.
_DETAILS = {
    "schema": "postgres",
    "region": "dynamodb",
    "endpoint_url": "dynamodb",
    "prefix": "dynamodb",
}


def _backend_from_options(lake: Lake, given: dict[str, Any]) -> SegmentBackend | None:
    """Return the chosen backend, None for the lake's default. Raises ConfigurationError if two are
    chosen, and for an option of a backend that is not.
    """
    # An empty text counts as given, and the backend rejects it: its shell variable is probably not
    # set.
    chosen = [name for name in _BACKENDS if given[name] not in (None, False)]
    if len(chosen) > 1:
        problem = f"{' and '.join(f'--{name}' for name in chosen)} name more than one backend."
        raise ConfigurationError(problem, "Give only one of them.", setting=f"--{chosen[1]}")
    settings = {}
    for name, backend in _DETAILS.items():
        if given[name] is None:
            continue
        settings[name] = given[name]
        if backend not in chosen:
            option = f"--{name.replace('_', '-')}"
            needed = f"--{backend}"
            raise ConfigurationError(f"{option} needs {needed}.", f"Add {needed}.", setting=option)
    if not chosen:
        return None
    (backend,) = chosen
    if backend == "objects":
        return backend_from(resolve_lake_backend(lake, IN_OBJECTS))
    setting = _BACKENDS[backend]
    if setting is not None:
        settings[setting] = given[backend]
    return backend_from({"backend": backend, **settings})


def _split_table_name(table: str) -> tuple[str, str]:
    """Split SCOPE/TABLE into the scope and the table name."""
    scope, slash, name = table.partition("/")
    if not slash:
        problem = f"{table!r} has no scope: expected SCOPE/TABLE."
        step = (
            "List scopes with adjunct kv scope list, and their tables with adjunct kv list SCOPE."
        )
        raise ConfigurationError(problem, step, argument="table")
    return scope, name


def _parse_value(kind: str, text: str, what: str) -> Any:
    """Parse a command-line value of this type; bytes are given in base64."""
    try:
        if kind == "int":
            if not WHOLE_NUMBER.matches(text):
                raise ValueError("only digits after an optional sign count")
            return int(text)
        if kind == "json":
            return json.loads(text)
        if kind == "bytes":
            return base64.b64decode(text, validate=True)
        return text
    except (ValueError, binascii.Error, RecursionError) as error:
        expected = {"int": "a whole number", "json": "JSON", "bytes": "base64"}[kind]
        problem = f"{what} {text!r:.80} is not {expected}: {error}."
        step = f"Give {expected}, or choose another type (--key-type, --value-type)."
        raise ConfigurationError(problem, step, setting=what) from error


def _format_cell(kind: str, value: Any) -> str:
    """Format a key or value for a table cell."""
    if kind == "json":
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _parse_version(text: str) -> KeyVersion:
    """Parse a version in the format that commands print."""
    try:
        return KeyVersion.from_bytes(bytes.fromhex(text))
    except (ValueError, KeyValueTableError) as error:
        problem = f"--version {text!r:.80} is not a version: expected 32 hexadecimal digits."
        step = "Give a version that get, put or iterate printed."
        raise ConfigurationError(problem, step, setting="--version") from error


def _parse_state(text: str) -> IteratorState:
    """Return the iterator state in a text that `iterate` has printed."""
    try:
        stored = base64.b64decode(text, altchars=b"-_", validate=True)
        return IteratorState.from_bytes(stored)
    except (ValueError, IteratorStateError) as error:
        if isinstance(error, IteratorStateError):
            why = error.problem.rstrip(".")  # its next step is for users of Python
        else:
            why = str(error).rstrip(".")
        problem = f"--state {text!r:.80} is not a state: {why}."
        step = "Give the whole state that iterate printed, or start again without --state."
        raise ConfigurationError(problem, step, setting="--state") from error


@_entry_command("get")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
def get_entries(entries: _Entries, keys: tuple[str, ...]) -> None:
    """Look up entries by key, with their versions. Exits with 6 if a key does not exist."""
    wanted = list(map(entries.parse_key, keys))
    with entries.open() as reading:
        found = reading.get_all(wanted, family=entries.family)
    entries.show_json(entries=[entry and entries.to_json(entry.key, entry) for entry in found])
    rows = []
    for key, entry in zip(keys, found, strict=True):
        if entry is None:
            rows.append([key, "", "no entry"])
        else:
            value = _format_cell(entries.value_type, entry.value)
            rows.append([key, value, str(entry.key.version)])
    output.show_table(entries.title, ["key", "value", "version"], rows, own=True)
    output.fail_if_missing(found)


@_entry_command("put")
@click.argument("key", metavar="KEY")
@click.argument("value", metavar="VALUE")
@flag("--if-absent", "Only if the key does not exist.")
@option("--version", "VERSION", "Only if the key has this version.")
def put_entry(
    entries: _Entries, key: str, value: str, if_absent: bool, version: str | None
) -> None:
    """Write an entry, and print its new version."""
    if if_absent and version is not None:
        problem = "--if-absent and --version can't both hold."
        raise ConfigurationError(problem, "Give only one of them.", setting="--if-absent")
    name = entries.parse_key(key)
    content = _parse_value(entries.value_type, value, "value")
    with entries.open() as writing:
        if version is not None:
            written = writing.replace(name, content, _parse_version(version), family=entries.family)
        elif if_absent:
            written = writing.put_if_absent(name, content, family=entries.family)
        else:
            written = writing.put(name, content, family=entries.family)
    entries.show_json(key=name, version=str(written))
    output.show_line(f"{key} has version {written}.")


@_entry_command("remove")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@option("--version", "VERSION", "Only if the key has this version.")
def remove_entries(entries: _Entries, keys: tuple[str, ...], version: str | None) -> None:
    """Remove entries, or one entry of a given version. Several keys of one family are removed
    atomically.
    """
    family = entries.family
    if len(keys) > 1:
        _check_several(len(keys), family, version)
    wanted = list(map(entries.parse_key, keys))
    with entries.open() as writing:
        if len(wanted) > 1 and family is not None:
            writing.remove_all(wanted, family=family)
        else:
            expected = None if version is None else _parse_version(version)
            writing.remove(wanted[0], version=expected, family=family)
    entries.show_json(removed=wanted)
    verb = "is" if len(keys) == 1 else "are"
    output.show_line(f"{', '.join(keys)} {verb} removed.")


def _check_several(number: int, family: str | None, version: str | None) -> None:
    """Raise ConfigurationError unless several keys can be removed together: all of one family, and
    without a version.
    """
    step = "Give one key, or several keys of one --family without --version."
    if version is not None:
        problem = f"{number} keys with --version: expected one key."
        raise ConfigurationError(problem, step, setting="--version")
    if family is None:
        problem = f"{number} keys with no --family: expected one key."
        raise ConfigurationError(problem, step, setting="--family")


@_entry_command("iterate", "Only entries of this family, in key order. Default: the whole table.")
@option(
    "--prefix", "TEXT", "With --family: keys with this prefix (JSON as stored; bytes in base64)."
)
@option("--start", "KEY", "With --family: the first key (inclusive).")
@option("--end", "KEY", "With --family: the end key (exclusive).")
@flag("--keys-only", "Omit values.")
@click.option(
    "--page-size",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Maximum number of entries.",
)
@option("--state", "STATE", "Continue after the page that printed this state.")
@click.option("--all", "whole", is_flag=True, help="Print all remaining pages.")
def iterate_entries(
    entries: _Entries,
    keys_only: bool,
    page_size: int,
    state: str | None,
    whole: bool,
    **bounds: str | None,
) -> None:
    """Print a page of entries, and the state from which the same command continues.

    Only the last page is shorter than --page-size. Continued after it, the command prints no
    entries, and with --json the state null.
    """
    within = entries.parse_bounds(**bounds)
    last_state = None if state is None else _parse_state(state)
    found: list[dict[str, Any]] = []
    next_state = None  # as text; None if nothing is found
    ended = False
    with entries.open() as reading:
        # The table's pages end with each partition, which may have few entries; the printed page
        # goes on.
        while whole or len(found) < page_size:
            most = page_size if whole else page_size - len(found)
            page = entries.read_page(
                reading, within, keys_only=keys_only, page_size=most, state=last_state
            )
            if page is None:
                ended = True
                break
            last_state = page.state
            next_state = base64.urlsafe_b64encode(last_state.to_bytes()).decode()
            found += entries.list_as_json(page)
    output.show_json({"table": entries.table, "entries": found, "state": next_state})
    if not found:
        output.show_line("No entries." if state is None else "No more entries.")
        return
    rows = []
    for entry in found:
        entry["family"] = entry["family"] or ""
        entry["key"] = _format_cell(entries.key_type, entry["key"])
        if not keys_only:
            entry["value"] = _format_cell(entries.value_type, entry["value"])
        rows.append(list(entry.values()))
    output.show_table(entries.title, list(found[0]), rows, own=True)
    output.show_line("End of entries." if ended else f"Continue with --state {next_state}")


_after = option("--after", "NAME", "Start after this name.")
_limit = limit_option(None, "Maximum number.")
_longest_key = click.option(
    "--longest-key",
    type=int,
    metavar="BYTES",
    help="Maximum size of a serialized key, without its family.",
)
_longest_value = click.option(
    "--longest-value", type=int, metavar="BYTES", help="Maximum size of a serialized value."
)


@scope.command("create")
@click.argument("scope", metavar="SCOPE")
@lake_options(create=True)
def create_scope(lake: Lake, scope: str) -> None:
    """Create a scope; an existing one is kept."""
    created = KeyValueTableManager(lake).create_scope(scope)
    facts = {"scope": scope, "created": created}
    _show_change(f"Scope {scope}", facts, "created", "exists already")


@scope.command("list")
@_after
@_limit
@lake_options()
def list_scopes(lake: Lake, after: str | None, limit: int | None) -> None:
    """List the scopes, ordered by name."""
    scopes = KeyValueTableManager(lake).list_scopes(after=after, limit=limit)
    output.show_json(list(scopes))
    output.show_table("scopes", ["scope"], [[name] for name in scopes], own=True)


@scope.command("delete")
@click.argument("scope", metavar="SCOPE")
@lake_options()
def delete_scope(lake: Lake, scope: str) -> None:
    """Delete an empty scope."""
    deleted = KeyValueTableManager(lake).delete_scope(scope)
    facts = {"scope": scope, "deleted": deleted}
    _show_change(f"Scope {scope}", facts, "deleted", "does not exist")


@kv.command()
@_table_name
@click.option(
    "--partitions",
    type=click.IntRange(1),
    required=True,
    help="Number of partitions; it can't be changed later.",
)
@_longest_key
@_longest_value
@flag("--create-scope", "Create the scope if it does not exist.")
@option("--sqlite", "FILE", "Store it in this SQLite file.")
@option(
    "--postgres", "VARIABLE", "Store it in PostgreSQL; names the environment variable with its DSN."
)
@option("--schema", "NAME", "With --postgres: the schema.")
@flag("--dynamodb", "Store it in DynamoDB; credentials come from boto3.")
@option("--region", "NAME", "With --dynamodb: the region.")
@option("--endpoint-url", "URL", "With --dynamodb: the endpoint URL.")
@option("--prefix", "TEXT", "With --dynamodb: prefix of its table names.")
@flag("--objects", "Store it in objects of the lake.")
@lake_options(create=True)
def create(lake: Lake, table: str, create_scope: bool, **given: Any) -> None:
    """Create a table; an existing one must have the same configuration.

    By default it is stored in SQLite next to a local lake (FOLDER.key-values.sqlite), else in
    objects of the lake.
    """
    scope, name = _split_table_name(table)
    limits = {limit: given.pop(limit) for limit in ("partitions", "longest_key", "longest_value")}
    manager = KeyValueTableManager(lake, _backend_from_options(lake, given))
    if create_scope:
        manager.create_scope(scope)
    created = manager.create(scope, name, KeyValueTableConfiguration(**limits))
    facts = {"table": table, "created": created, **_facts(manager.describe(scope, name))}
    _show_change(f"Key-value table {table}", facts, "created", "exists already")


@kv.command("list")
@click.argument("scope", metavar="SCOPE")
@_after
@_limit
@lake_options()
def list_tables(lake: Lake, scope: str, after: str | None, limit: int | None) -> None:
    """List the tables of a scope, ordered by name."""
    tables = list(map(_facts, KeyValueTableManager(lake).list(scope, after=after, limit=limit)))
    output.show_json(tables)
    columns = ["name", "state", "partitions", "backend", "created_at"]
    if any(facts["problem"] for facts in tables):
        columns.append("problem")
    output.show_items(f"key-value tables of {scope}", columns, tables)


@kv.command("show")
@_table_name
@lake_options()
def show_key_value_table(lake: Lake, table: str) -> None:
    """Show a table's configuration and state, and where its partitions are stored."""
    manager = KeyValueTableManager(lake)
    names = _split_table_name(table)
    facts = _facts(manager.describe(*names))
    segments = list(map(asdict, manager.segments(*names)))
    output.show_json({**facts, "segments": segments})
    facts.pop("problem")
    output.show_facts(f"key-value table {table}", facts)
    output.show_items("segments", ["partition", "location"], segments)


@kv.command()
@_table_name
@_longest_key
@_longest_value
@lake_options()
def update(lake: Lake, table: str, longest_key: int | None, longest_value: int | None) -> None:
    """Set a table's limits; an omitted option removes its limit. Partitions can't be changed.

    Tables that are open keep the limits that they were opened with.
    """
    manager = KeyValueTableManager(lake)
    names = _split_table_name(table)
    partitions = manager.get_configuration(*names).partitions
    updated = manager.update(
        *names, KeyValueTableConfiguration(partitions, longest_key, longest_value)
    )
    facts = {"table": table, "updated": updated, **_facts(manager.describe(*names))}
    _show_change(f"Key-value table {table}", facts, "updated", "has these limits already")


@kv.command()
@_table_name
@yes_option
@lake_options()
def seal(lake: Lake, table: str, yes: bool) -> None:
    """Make a table read-only, permanently."""
    confirm_at_terminal(f"Make {table} read-only for good?", yes=yes)
    sealed = KeyValueTableManager(lake).seal(*_split_table_name(table))
    facts = {"table": table, "sealed": sealed}
    _show_change(f"Key-value table {table}", facts, "sealed", "is sealed already")


@kv.command()
@_table_name
@flag("--unregister", "Only remove the lake's entry; the backend keeps the table's data.")
@yes_option
@lake_options()
def delete(lake: Lake, table: str, unregister: bool, yes: bool) -> None:
    """Delete a table and all its entries permanently."""
    manager = KeyValueTableManager(lake)
    names = _split_table_name(table)
    if unregister:
        what = f"the lake's entry for key-value table {table}"
        act = manager.unregister
        done = "forgotten"
    else:
        what = f"key-value table {table}"
        act = manager.delete
        done = "deleted"
    confirm(f"Delete {what} permanently?", yes=yes)
    deleted = act(*names)
    facts = {"table": table, done: deleted}
    _show_change(f"Key-value table {table}", facts, done, "does not exist")


def _show_change(what: str, facts: dict[str, Any], done: str, otherwise: str) -> None:
    """Print what was done, if the fact of that name says so, or why nothing was done."""
    output.show_json(facts)
    outcome = done if facts[done] else otherwise
    output.show_line(f"{what} {outcome}.")


def _facts(table: TableInfo) -> dict[str, Any]:
    """Return a table's description with its configuration merged in; null for what is unknown."""
    facts = asdict(table)
    configuration = facts.pop("configuration") or {
        "partitions": None,
        "longest_key": None,
        "longest_value": None,
    }
    return {**facts, **configuration}

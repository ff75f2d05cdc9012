"""What the commands about key-value tables share: tables and their types as they are typed, and backends by option."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dagster_adjunct.orchestration.cli.output import show_with_error
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.resources.key_value.blocking_key_value_table import BlockingKeyValueTable
    from dagster_adjunct.resources.key_value.key_version import KeyVersion
    from dagster_adjunct.resources.key_value.table_entries import TableEntry, TableKey
    from dagster_adjunct.resources.key_value.table_manager import KeyValueTableManager
    from dagster_adjunct.resources.key_value.table_segment import SegmentBackend
    from dagster_adjunct.resources.objects import Lake

C = TypeVar("C", bound=Callable[..., Any])
TYPES = ("text", "json", "int", "bytes")

table_name = click.argument("table", metavar="SCOPE/TABLE")
family_option = click.option("--family", metavar="FAMILY", help="The family of the keys. Default: keys without one.")


def typed_entries(command: C) -> C:
    """Add how keys and values are read, which is how they were written."""
    key = click.option("--key-type", type=click.Choice(TYPES), default="text", show_default=True, help="What keys are.")
    value = click.option(
        "--value-type", type=click.Choice(TYPES), default="text", show_default=True, help="What values are."
    )
    return key(value(command))


def backend_options(command: C) -> C:
    """Add where a table is to lie, where that is not the lake's default."""
    options = [
        click.option("--sqlite", metavar="FILE", help="In this SQLite file."),
        click.option("--postgres", metavar="VARIABLE", help="In PostgreSQL: the environment variable with its DSN."),
        click.option("--schema", metavar="NAME", help="With --postgres: the schema."),
        click.option("--dynamodb", is_flag=True, help="In DynamoDB; credentials come from boto3's own chain."),
        click.option("--region", metavar="NAME", help="With --dynamodb: the region."),
        click.option("--endpoint-url", metavar="URL", help="With --dynamodb: another server."),
        click.option("--prefix", metavar="TEXT", help="With --dynamodb: what its tables' names begin with."),
        click.option("--objects", is_flag=True, help="In objects of the lake."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def chosen_backend(
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
    """Return the backend that options name, None for the lake's default. Raises ConfigurationError for two of them."""
    from dagster_adjunct.resources import key_value_backends as _registered  # noqa: F401
    from dagster_adjunct.resources.key_value.backend_names import backend_from
    from dagster_adjunct.resources.key_value.default_backend import IN_OBJECTS, backend_in

    detail = {"--schema": schema, "--region": region, "--endpoint-url": endpoint_url, "--prefix": prefix}
    given = {"--sqlite": sqlite, "--postgres": postgres, "--dynamodb": dynamodb, "--objects": objects}
    chosen = [name for name, value in given.items() if value]
    if len(chosen) > 1:
        raise ConfigurationError(
            f"{' and '.join(chosen)} name more than one backend.", "Give one of them.", setting=chosen[1]
        )
    belongs = {"--postgres": {"--schema"}, "--dynamodb": {"--region", "--endpoint-url", "--prefix"}}
    taken = belongs.get(chosen[0], set()) if chosen else set()
    for name, value in detail.items():
        if value is not None and name not in taken:
            owner = next(owner for owner, names in belongs.items() if name in names)
            raise ConfigurationError(f"{name} belongs to {owner}, which is not given.", f"Add {owner}.", setting=name)
    if not chosen:
        return None
    if objects:
        return backend_from(backend_in(lake, IN_OBJECTS))
    settings: dict[str, Any] = {
        "--sqlite": {"backend": "sqlite", "path": sqlite},
        "--postgres": {"backend": "postgres", "dsn_env": postgres, "schema": schema},
        "--dynamodb": {"backend": "dynamodb", "region": region, "endpoint_url": endpoint_url, "prefix": prefix},
    }[chosen[0]]
    return backend_from({name: value for name, value in settings.items() if value is not None})


def names_in(table: str) -> tuple[str, str]:
    """Return the scope and the name of a table that was typed as SCOPE/TABLE."""
    scope, slash, name = table.partition("/")
    if not slash:
        raise ConfigurationError(
            f"{table!r} names no scope: expected SCOPE/TABLE.",
            "adjunct kvt scope list shows scopes, and adjunct kvt list SCOPE their tables.",
            argument="table",
        )
    return scope, name


def manager_in(lake_url: str | None, *, create: bool = False) -> KeyValueTableManager:
    """Return the manager of a lake's tables; one that is not there is made where `create` says so."""
    from dagster_adjunct.resources import key_value_backends as _registered  # noqa: F401
    from dagster_adjunct.resources.key_value.table_manager import KeyValueTableManager
    from dagster_adjunct.resources.objects.lake import open_lake

    return KeyValueTableManager(open_lake(lake_url, create=create))


def opened(lake_url: str | None, table: str, key_type: str, value_type: str) -> BlockingKeyValueTable[Any, Any]:
    """Return a table with the serializers of these types."""
    from dagster_adjunct.resources.key_value.blocking_key_value_table import BlockingKeyValueTable
    from dagster_adjunct.resources.key_value.serializer_names import serializer_named

    scope, name = names_in(table)
    manager = manager_in(lake_url)
    return BlockingKeyValueTable(
        manager.open(scope, name, key=serializer_named(key_type), value=serializer_named(value_type))
    )


def typed(kind: str, text: str, what: str) -> Any:
    """Return what was typed as a value of this type; bytes are typed in base64."""
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
            f"Write {expected}, or choose another type.",
            setting=what,
        ) from error


def shown(kind: str, value: Any) -> Any:
    """Return a key or a value as JSON has it; bytes as base64."""
    return base64.b64encode(value).decode() if kind == "bytes" else value


def shown_entry(
    key: TableKey[Any], entry: TableEntry[Any, Any] | None, key_type: str, value_type: str
) -> dict[str, Any]:
    """Return an entry, or a key alone, as it is printed."""
    facts: dict[str, Any] = {"family": key.family, "key": shown(key_type, key.key)}
    if entry is not None:
        facts["value"] = shown(value_type, entry.value)
    return {**facts, "version": None if key.version is None else str(key.version)}


@contextmanager
def failures_shown(key_type: str) -> Iterator[None]:
    """Leave for --json which keys of a write have failed, should its conditions not hold."""
    from dagster_adjunct.resources.key_value_errors import ConditionsNotMetError

    try:
        yield
    except ConditionsNotMetError as error:
        show_with_error(
            failures=[
                {
                    "family": failure.family,
                    "key": shown(key_type, failure.key),
                    "expected": None if failure.expected is None else str(failure.expected),
                    "found": None if failure.found is None else str(failure.found),
                }
                for failure in error.failures
            ]
        )
        raise


def cell(kind: str, value: Any) -> str:
    """Return a shown key or value as a cell of a table: JSON as JSON, everything else as it is."""
    return json.dumps(value, ensure_ascii=False) if kind == "json" else str(value)


def version_from(text: str) -> KeyVersion:
    """Return the version that was typed as commands print them."""
    from dagster_adjunct.resources.key_value.key_version import KeyVersion

    try:
        stored = bytes.fromhex(text)
    except ValueError as error:
        raise ConfigurationError(
            f"--version {text!r:.80} is no version: expected 32 hexadecimal digits.",
            "Give what get, put or iterate have printed.",
            setting="--version",
        ) from error
    return KeyVersion.from_bytes(stored)

"""Dagster resources for key-value tables, and for the tables of each backend.

A resource takes `EnvVar("NAME")` and keeps the name. The variable is read when a connection is
opened: in the process of a Dagster run or in a Spark task, never while a code location is loaded.
So no secret can appear in a run's configuration, in its logs, or in pickles for tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import dagster as dg
from pydantic import Field

from dagster_adjunct.resources.key_value.manager import KeyValueTableManager, ensure_table
from dagster_adjunct.resources.key_value.segment import backend_from
from dagster_adjunct.resources.key_value.serializers import Serializer, serializer_named
from dagster_adjunct.resources.key_value.table import BlockingKeyValueTable, KeyValueTable
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.http import HttpTable
from dagster_adjunct.resources.table_backends.key_value_rows import KeyValueRows
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.redis import RedisTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.table_backends.store import check_variable_name
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from dagster_adjunct.resources.validation import validated


@validated
class KeyValueTableResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A key-value table of a lake, for the bodies of assets and ops: `with states.blocking() as
    table: …`.

    With `partitions` the table and its scope are created if they do not exist; without it, the
    table must exist. `backend` chooses where it is created, for example {"backend": "postgres",
    "dsn_env": EnvVar("PLANT_DSN")}. Only the variable's name is stored. Nothing is opened while a
    code location is loaded.
    """

    scope: str
    table: str
    lake: str | None = Field(
        default=None, description="The lake's URL. Default: ADJUNCT_LAKE, else .adjunct/lake."
    )
    partitions: int | None = Field(
        default=None, description="Create the table with this many partitions if it does not exist."
    )
    backend: dict[str, Any] | None = Field(
        default=None, description="Backend where it is created, without secrets."
    )
    key: str = Field(default="text", description="Type of the keys: text, json, int or bytes.")
    value: str = Field(default="json", description="Type of the values: text, json, int or bytes.")

    def __init__(self, **settings: Any) -> None:
        # Not in a validator, because Dagster sets the fields again to the original values.
        if isinstance(settings.get("backend"), Mapping):
            settings["backend"] = backend_without_secrets(settings["backend"])
        for name in ("key", "value"):
            if isinstance(settings.get(name), str):
                serializer_named(settings[name])
        super().__init__(**settings)

    def manager(self) -> KeyValueTableManager:
        """Return the manager of the lake's key-value tables."""
        lake = open_lake(self.lake, create=self.partitions is not None)
        backend = None if self.backend is None else backend_from(self.backend)
        return KeyValueTableManager(lake, backend)

    def open(
        self, *, key: Serializer[Any] | None = None, value: Serializer[Any] | None = None
    ) -> KeyValueTable[Any, Any]:
        """Return the table for async code; `key` and `value` override the declared serializers."""
        manager = self.manager()
        if self.partitions is not None:
            ensure_table(manager, self.scope, self.table, self.partitions)
        return manager.open(
            self.scope,
            self.table,
            key=key or serializer_named(self.key),
            value=value or serializer_named(self.value),
        )

    def blocking(
        self, *, key: Serializer[Any] | None = None, value: Serializer[Any] | None = None
    ) -> BlockingKeyValueTable[Any, Any]:
        """Return the table for use in a `with` block of an asset or op."""
        return BlockingKeyValueTable(self.open(key=key, value=value))


def backend_without_secrets(backend: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the `EnvVar`s in a backend's description with the names of their variables.

    Raises ConfigurationError for other values of `*_env` settings.
    """
    shown = dict(backend)
    for name, value in backend.items():
        if not name.endswith("_env") or value is None:
            continue
        what = f"backend[{name!r}]"
        if isinstance(value, list | tuple):
            shown[name] = [resolve_variable(what, variable) for variable in value]
        else:
            shown[name] = resolve_variable(what, value)
    return shown


def resolve_variable(field: str, value: object) -> object:
    """Return the name of an environment variable, given as EnvVar or as its name; None for None.

    Raises ConfigurationError for anything else, without showing it, because it may be the secret
    itself.
    """
    if isinstance(value, dg.EnvVar):
        return "".join(value)  # as plain text, or Dagster would replace it by the variable's value
    if value is None:
        return None
    return check_variable_name(field, value, 'EnvVar("NAME")')


_COLUMNS = "Types of the columns by name."


class TableResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A Dagster resource that configures one table of a store.

    `function` returns the object that reads and writes the table, not connected yet.
    """

    key: list[str] = Field(description="The key's columns.")

    store: ClassVar[Callable[..., Any]]
    """The store's function, which takes the fields as its arguments."""
    variables: ClassVar[Mapping[str, str]] = {}
    """The fields that hold the name of an environment variable, or several of them, and the
    argument of each.
    """
    arguments: ClassVar[Mapping[str, str]] = {}
    """The arguments of other fields that are named otherwise."""

    def __init__(self, **settings: Any) -> None:
        # Not in validators, because Dagster sets the fields again to the original values.
        for field in self.variables:
            given = settings.get(field)
            if isinstance(given, Mapping):
                settings[field] = {
                    name: resolve_variable(f"{field}[{name!r}]", value)
                    for name, value in given.items()
                }
            elif isinstance(given, Sequence) and not isinstance(given, str):
                settings[field] = [resolve_variable(field, value) for value in given]
            elif given is not None:
                settings[field] = resolve_variable(field, given)
        if isinstance(settings.get("key"), str):
            settings["key"] = [settings["key"]]
        super().__init__(**settings)

    def function(self) -> Any:
        """Return the table function of the store for this table, not connected yet."""
        names = {**self.arguments, **self.variables}
        # A class that users derive may have other fields too.
        declaring: Any = next(cls for cls in type(self).__mro__ if "store" in vars(cls))
        settings = {
            names.get(field, field): getattr(self, field) for field in declaring.model_fields
        }
        return declaring.store(**settings)

    def remote_table(self, name: str, **options: Any) -> RemoteTable[Any, Any, Any]:
        """Return the table for an application's `app.table(…)`, with the options of
        `RemoteTable`.
        """
        function = self.function()
        return RemoteTable(
            name, key=self.key, read_function=function, write_function=function, **options
        )

    def blocking(self, name: str, **options: Any) -> BlockingTable[Any, Any, Any]:
        """Return the table for the body of an asset or op: `with machines.blocking("machines")
        as table: …`.
        """
        return BlockingTable(self.remote_table(name, **options))


@validated
class SqliteTableResource(TableResource):
    """A table of an SQLite file, as in `SqliteTable`."""

    path: str = Field(description="The file, on a local disk.")
    table: str
    columns: dict[str, str] | None = Field(default=None, description=_COLUMNS)
    create: bool = False

    store = SqliteTable


@validated
class PostgresTableResource(TableResource):
    """A table of a PostgreSQL server, as in `PostgresTable`: `dsn=EnvVar("MACHINES_DSN")`.

    Without it, `connect` and libpq's own environment and files determine the server.
    """

    table: str
    columns: dict[str, str] | None = Field(default=None, description=_COLUMNS)
    dsn: str | None = Field(
        default=None, description="The environment variable that holds the DSN."
    )
    connect: dict[str, str] = Field(
        default_factory=dict, description="libpq's keywords, without secrets."
    )
    schema_name: str = "public"
    create: bool = False
    connections: int = Field(default=4, description="How many connections an event loop may have.")

    store = PostgresTable
    variables: ClassVar[Mapping[str, str]] = {"dsn": "dsn_env"}
    arguments: ClassVar[Mapping[str, str]] = {"schema_name": "schema"}


@validated
class RedisTableResource(TableResource):
    """A table in a Redis server, as in `RedisTable`: `url=EnvVar("MACHINES_REDIS")`.

    Or `server`, a URL without a password, and `password=EnvVar("REDIS_PASSWORD")` if there is one.
    """

    prefix: str = Field(description="What the keys of the records begin with.")
    columns: dict[str, str] = Field(description=_COLUMNS)
    url: str | None = Field(
        default=None, description="The environment variable that holds the URL."
    )
    server: str | None = Field(default=None, description="The URL, without a password.")
    password: str | None = Field(
        default=None, description="The environment variable that holds the password."
    )
    connections: int = Field(
        default=8, description="How many requests an event loop may have under way."
    )
    forget_deleted_after: int | None = Field(
        default=None, description="Seconds for which deletes are remembered."
    )

    store = RedisTable
    variables: ClassVar[Mapping[str, str]] = {"url": "url_env", "password": "password_env"}
    arguments: ClassVar[Mapping[str, str]] = {"server": "url"}


@validated
class DynamoDbTableResource(TableResource):
    """A table of DynamoDB, as in `DynamoDbTable`; boto3 finds credentials itself unless they are
    given.
    """

    table: str
    columns: dict[str, str] | None = Field(default=None, description=_COLUMNS)
    create: bool = False
    region: str | None = None
    endpoint_url: str | None = None
    profile: str | None = None
    credentials: list[str] | None = Field(
        default=None,
        description=(
            "Environment variables: the access key's id, the secret, a session's token if any."
        ),
    )
    consistent_reads: bool = True
    forget_deleted_after: float | None = Field(
        default=None, description="Seconds for which deletes are remembered."
    )

    store = DynamoDbTable
    variables: ClassVar[Mapping[str, str]] = {"credentials": "credentials_env"}


@validated
class HttpTableResource(TableResource):
    """An HTTP service as a table, as in `HttpTable`: `secret_headers={"Authorization":
    EnvVar("PLANES_TOKEN")}`.
    """

    base_url: str
    path: str = Field(description='With the key\'s columns in braces, such as "/planes/{tail}".')
    headers: dict[str, str] = Field(
        default_factory=dict, description="Sent with each request; no secrets."
    )
    secret_headers: dict[str, str] = Field(
        default_factory=dict, description="Environment variables, by header."
    )
    puts_if_absent: bool = False
    connections: int = Field(
        default=10, description="How many requests an event loop may have under way."
    )
    timeout: float = Field(default=10.0, description="Seconds that one request may take.")

    store = HttpTable
    variables: ClassVar[Mapping[str, str]] = {"secret_headers": "secret_headers"}


@validated
class KeyValueRowsResource(TableResource):
    """A remote table whose records are stored in a key-value table (`KeyValueRows`).

    `stored_in` describes the backend where it is created, for example
    {"backend": "postgres", "dsn_env": EnvVar("PLANT_DSN")}. Only the variable's name is stored.
    """

    lake: str = Field(description="The lake's URL, or its folder.")
    scope: str
    table: str
    columns: dict[str, str] = Field(description="Types of the columns by name.")
    family: list[str] = Field(
        default_factory=list, description="The leading key columns that form the family."
    )
    create: bool = False
    partitions: int = Field(
        default=4, description="Number of partitions that the table is created with."
    )
    stored_in: dict[str, Any] | None = Field(
        default=None, description="Backend where it is created, without secrets."
    )

    store = KeyValueRows

    def __init__(self, **settings: Any) -> None:
        if isinstance(settings.get("family"), str):
            settings["family"] = [settings["family"]]
        if isinstance(settings.get("stored_in"), Mapping):
            settings["stored_in"] = backend_without_secrets(settings["stored_in"])
        super().__init__(**settings)

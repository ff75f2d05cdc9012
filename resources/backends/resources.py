"""Tables of each backend as Dagster resources, whose secrets stay in the environment.

A resource takes `EnvVar("NAME")` and keeps the name. The variable is read when a connection is opened: in the process
of a Dagster run or in a Spark task, never while a code location is loaded. So no secret can appear in a run's
configuration, in its logs, or in pickles for tasks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dagster import ConfigurableResource, EnvVar
from pydantic import Field

from dagster_adjunct.resources.backends.columns import check_variable_name
from dagster_adjunct.resources.backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.backends.http import HttpTable
from dagster_adjunct.resources.backends.postgres import PostgresTable
from dagster_adjunct.resources.backends.redis import RedisTable
from dagster_adjunct.resources.backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable

_COLUMNS = "Types of the columns by name."


class TableResource(ConfigurableResource):  # type: ignore[type-arg]
    """A store's table as configuration; `function` creates the function that reads and writes it."""

    key: list[str] = Field(description="The key's columns.")

    variables: ClassVar[tuple[str, ...]] = ()
    """The fields that hold the name of an environment variable, or several of them."""

    def __init__(self, **settings: Any) -> None:
        # Not in validators, since Dagster sets the fields again afterwards.
        for field in self.variables:
            given = settings.get(field)
            if isinstance(given, Mapping):
                settings[field] = {name: resolve_variable(f"{field}[{name!r}]", value) for name, value in given.items()}
            elif isinstance(given, Sequence) and not isinstance(given, str):
                settings[field] = [resolve_variable(field, value) for value in given]
            elif given is not None:
                settings[field] = resolve_variable(field, given)
        if isinstance(settings.get("key"), str):
            settings["key"] = [settings["key"]]
        super().__init__(**settings)

    @abstractmethod
    def function(self) -> Any:
        """Return the store's function, closed."""

    def remote_table(self, name: str, **options: Any) -> RemoteTable[Any, Any, Any]:
        """Return the table for an application's `app.table(…)`, with the options of `RemoteTable`."""
        function = self.function()
        return RemoteTable(name, key=self.key, read_function=function, write_function=function, **options)

    def blocking(self, name: str, **options: Any) -> BlockingTable[Any, Any, Any]:
        """Return the table for the body of an asset or op: `with machines.blocking("machines") as table: …`."""
        return BlockingTable(self.remote_table(name, **options))


class SqliteTableResource(TableResource):
    """A table of an SQLite file, as in `SqliteTable`."""

    path: str = Field(description="The file, on a local disk.")
    table: str
    columns: dict[str, str] | None = Field(default=None, description=_COLUMNS)
    create: bool = False

    def function(self) -> SqliteTable:
        return SqliteTable(self.path, self.table, self.key, columns=self.columns, create=self.create)


class PostgresTableResource(TableResource):
    """A table of a PostgreSQL server, as in `PostgresTable`: `dsn=EnvVar("MACHINES_DSN")`.

    Without it, `connect` and libpq's own environment and files determine the server.
    """

    table: str
    columns: dict[str, str] | None = Field(default=None, description=_COLUMNS)
    dsn: str | None = Field(default=None, description="The environment variable that holds the DSN.")
    connect: dict[str, str] = Field(default_factory=dict, description="libpq's keywords, without secrets.")
    schema_name: str = "public"
    create: bool = False
    connections: int = Field(default=4, description="How many connections an event loop may have.")

    variables: ClassVar[tuple[str, ...]] = ("dsn",)

    def function(self) -> PostgresTable:
        return PostgresTable(
            self.table,
            self.key,
            dsn_env=self.dsn,
            connect=self.connect,
            schema=self.schema_name,
            columns=self.columns,
            create=self.create,
            connections=self.connections,
        )


class RedisTableResource(TableResource):
    """A table in a Redis server, as in `RedisTable`: `url=EnvVar("MACHINES_REDIS")`.

    Or `server`, a URL without a password, and `password=EnvVar("REDIS_PASSWORD")` if there is one.
    """

    prefix: str = Field(description="What the keys of the records begin with.")
    columns: dict[str, str] = Field(description=_COLUMNS)
    url: str | None = Field(default=None, description="The environment variable that holds the URL.")
    server: str | None = Field(default=None, description="The URL, without a password.")
    password: str | None = Field(default=None, description="The environment variable that holds the password.")
    connections: int = Field(default=8, description="How many requests an event loop may have under way.")
    forget_deleted_after: int | None = Field(default=None, description="Seconds for which deletes are remembered.")

    variables: ClassVar[tuple[str, ...]] = ("url", "password")

    def function(self) -> RedisTable:
        return RedisTable(
            self.prefix,
            self.key,
            columns=self.columns,
            url=self.server,
            url_env=self.url,
            password_env=self.password,
            connections=self.connections,
            forget_deleted_after=self.forget_deleted_after,
        )


class DynamoDbTableResource(TableResource):
    """A table of DynamoDB, as in `DynamoDbTable`; boto3 finds credentials itself unless they are given."""

    table: str
    columns: dict[str, str] | None = Field(default=None, description=_COLUMNS)
    create: bool = False
    region: str | None = None
    endpoint_url: str | None = None
    profile: str | None = None
    credentials: list[str] | None = Field(
        default=None, description="Environment variables: the access key's id, the secret, a session's token if any."
    )
    consistent_reads: bool = True
    forget_deleted_after: float | None = Field(default=None, description="Seconds for which deletes are remembered.")

    variables: ClassVar[tuple[str, ...]] = ("credentials",)

    def function(self) -> DynamoDbTable:
        return DynamoDbTable(
            self.table,
            self.key,
            columns=self.columns,
            create=self.create,
            region=self.region,
            endpoint_url=self.endpoint_url,
            profile=self.profile,
            credentials_env=self.credentials,
            consistent_reads=self.consistent_reads,
            forget_deleted_after=self.forget_deleted_after,
        )


class HttpTableResource(TableResource):
    """A service as a table, as in `HttpTable`: `secret_headers={"Authorization": EnvVar("PLANES_TOKEN")}`."""

    base_url: str
    path: str = Field(description='With the key\'s columns in braces, such as "/planes/{tail}".')
    headers: dict[str, str] = Field(default_factory=dict, description="Sent with each request; no secrets.")
    secret_headers: dict[str, str] = Field(default_factory=dict, description="Environment variables, by header.")
    puts_if_absent: bool = False
    connections: int = Field(default=10, description="How many requests an event loop may have under way.")
    timeout: float = Field(default=10.0, description="Seconds that one request may take.")

    variables: ClassVar[tuple[str, ...]] = ("secret_headers",)

    def function(self) -> HttpTable:
        return HttpTable(
            self.base_url,
            self.path,
            self.key,
            headers=self.headers,
            secret_headers=self.secret_headers,
            puts_if_absent=self.puts_if_absent,
            connections=self.connections,
            timeout=self.timeout,
        )


def resolve_variable(field: str, value: object) -> object:
    """Return the name of an environment variable, given as EnvVar or as its name. Never shows another value."""
    if isinstance(value, EnvVar):
        return "".join(value)  # as plain text, or Dagster would replace it by the variable's value
    return None if value is None else check_variable_name(field, value, 'EnvVar("NAME")')

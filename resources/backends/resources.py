"""Tables of each backend as Dagster resources, whose secrets stay in the environment.

A resource takes `EnvVar("NAME")` and keeps the name. The variable is read when a connection is opened: in the process
of a Dagster run or in a Spark task, never while a code location is loaded. So no secret can appear in a run's
configuration, in its logs, or in pickles for tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from dagster import ConfigurableResource, EnvVar
from pydantic import Field

from dagster_adjunct.resources.backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.backends.http import HttpTable
from dagster_adjunct.resources.backends.postgres import PostgresTable
from dagster_adjunct.resources.backends.redis import RedisTable
from dagster_adjunct.resources.backends.sqlite import SqliteTable
from dagster_adjunct.resources.backends.store import check_variable_name
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from dagster_adjunct.resources.validation import validated

_COLUMNS = "Types of the columns by name."


class TableResource(ConfigurableResource):  # type: ignore[type-arg]
    """A store's table as configuration; `function` creates the function that reads and writes it."""

    key: list[str] = Field(description="The key's columns.")

    store: ClassVar[Callable[..., Any]]
    """The store's function, which takes the fields as its arguments."""
    variables: ClassVar[Mapping[str, str]] = {}
    """The fields that hold the name of an environment variable, or several of them, and the argument of each."""
    arguments: ClassVar[Mapping[str, str]] = {}
    """The arguments of other fields that are named otherwise."""

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

    def function(self) -> Any:
        """Return the store's function, closed."""
        names = {**self.arguments, **self.variables}
        # A class that users derive may have other fields too.
        declaring: Any = next(cls for cls in type(self).__mro__ if "store" in vars(cls))
        settings = {names.get(field, field): getattr(self, field) for field in declaring.model_fields}
        return declaring.store(**settings)

    def remote_table(self, name: str, **options: Any) -> RemoteTable[Any, Any, Any]:
        """Return the table for an application's `app.table(…)`, with the options of `RemoteTable`."""
        function = self.function()
        return RemoteTable(name, key=self.key, read_function=function, write_function=function, **options)

    def blocking(self, name: str, **options: Any) -> BlockingTable[Any, Any, Any]:
        """Return the table for the body of an asset or op: `with machines.blocking("machines") as table: …`."""
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
    dsn: str | None = Field(default=None, description="The environment variable that holds the DSN.")
    connect: dict[str, str] = Field(default_factory=dict, description="libpq's keywords, without secrets.")
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
    url: str | None = Field(default=None, description="The environment variable that holds the URL.")
    server: str | None = Field(default=None, description="The URL, without a password.")
    password: str | None = Field(default=None, description="The environment variable that holds the password.")
    connections: int = Field(default=8, description="How many requests an event loop may have under way.")
    forget_deleted_after: int | None = Field(default=None, description="Seconds for which deletes are remembered.")

    store = RedisTable
    variables: ClassVar[Mapping[str, str]] = {"url": "url_env", "password": "password_env"}
    arguments: ClassVar[Mapping[str, str]] = {"server": "url"}


@validated
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

    store = DynamoDbTable
    variables: ClassVar[Mapping[str, str]] = {"credentials": "credentials_env"}


@validated
class HttpTableResource(TableResource):
    """A service as a table, as in `HttpTable`: `secret_headers={"Authorization": EnvVar("PLANES_TOKEN")}`."""

    base_url: str
    path: str = Field(description='With the key\'s columns in braces, such as "/planes/{tail}".')
    headers: dict[str, str] = Field(default_factory=dict, description="Sent with each request; no secrets.")
    secret_headers: dict[str, str] = Field(default_factory=dict, description="Environment variables, by header.")
    puts_if_absent: bool = False
    connections: int = Field(default=10, description="How many requests an event loop may have under way.")
    timeout: float = Field(default=10.0, description="Seconds that one request may take.")

    store = HttpTable
    variables: ClassVar[Mapping[str, str]] = {"secret_headers": "secret_headers"}


def resolve_variable(field: str, value: object) -> object:
    """Return the name of an environment variable, given as EnvVar or as its name. Never shows another value."""
    if isinstance(value, EnvVar):
        return "".join(value)  # as plain text, or Dagster would replace it by the variable's value
    return None if value is None else check_variable_name(field, value, 'EnvVar("NAME")')

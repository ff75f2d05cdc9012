"""A bulk snapshot from PostgreSQL: a query and the position of its change stream, in one transaction."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.initial_load import (
    OR_FUNCTION,
    Position,
    Snapshot,
    calling,
    freeze_position,
    positions,
)
from dagster_adjunct.resources.backends.postgres_connection import (
    connect_blocking,
    connection_settings,
    require_driver,
    translated,
    where,
)
from dagster_adjunct.resources.checked_numbers import check_whole_number
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError, SchemaMismatchError
from dagster_adjunct.resources.schemas.schema import arrow_type

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.resources.schemas.schema import Field, Schema
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

# What psycopg gives for a column of these types, and nothing else: other values would be changed without a word.
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "tinyint": (int,),
    "smallint": (int,),
    "int": (int,),
    "bigint": (int,),
    "float": (float, int),
    "double": (float, int),
    "date": (dt.date,),
    "timestamp": (dt.datetime,),
    "binary": (bytes,),
}


@dataclass(frozen=True, slots=True)
class PostgresSnapshot:
    """The answer to `query`, read in one repeatable-read transaction of the server that `dsn_env` names.

    `dsn_env` is the environment variable with the DSN; only the process that advances the dataset needs it. The
    position comes from `position_query`, whose rows are (partition, offset), in the same transaction and before the
    rows; or it is a mapping or function, called before the transaction begins. `batch` rows are in memory at a time.
    """

    dsn_env: str
    query: str
    position_query: str | None = None
    position: Position | Callable[[], Position] | None = None
    batch: int = 10_000

    def __post_init__(self) -> None:
        for name in ("dsn_env", "query", "position_query"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, str):
                raise ConfigurationError(
                    f"a PostgreSQL snapshot has {name}={given!r}: expected text.", "Correct it.", argument=name
                )
        if not self.dsn_env or not self.query or (self.position_query is None) == (self.position is None):
            raise ConfigurationError(
                "a PostgreSQL snapshot needs dsn_env, query, and exactly one of position_query and position.",
                'Write PostgresSnapshot(dsn_env="ACCOUNTS_DSN", query="SELECT …", position_query="SELECT …").',
                argument="position_query",
            )
        if "://" in self.dsn_env or "=" in self.dsn_env:
            raise ConfigurationError(
                "a PostgreSQL snapshot was declared with a DSN as dsn_env, which would show its password in logs.",
                "Put the DSN into an environment variable, and give the variable's name.",
                argument="dsn_env",
            )
        check_whole_number(self.batch, f"batch is {self.batch!r}", "1 or more rows", argument="batch")
        if self.position is not None and not callable(self.position):
            freeze_position(self, "a PostgreSQL snapshot", self.position, OR_FUNCTION)

    def load(
        self, spec: AdjunctDataset, schema: Schema, ssps: tuple[SystemStreamPartition, ...], spark: SparkSession
    ) -> Snapshot:
        what = f"dataset {spec.name!r}: {self.describe()}"
        require_driver(what)
        settings = connection_settings(what, self.dsn_env, {})
        given: Any = self.position
        if callable(self.position):
            given = calling(spec, what, "position function", self.position)
        connection = connect_blocking(what, settings)
        tables = self._read(connection, spec, schema, what, where(settings))
        try:
            if self.position_query is not None:
                given = self._recorded(connection, spec, what, where(settings))
            return Snapshot(tables, positions(spec, what, given, ssps), connection.close)
        except BaseException:
            connection.close()
            raise

    def describe(self) -> str:
        return f"PostgreSQL query ({self.query})"

    def _recorded(
        self, connection: psycopg.Connection[Any], spec: AdjunctDataset, what: str, place: str
    ) -> list[tuple[Any, Any]]:
        import psycopg

        assert self.position_query is not None
        try:
            rows = connection.execute(self.position_query.encode()).fetchall()
        except psycopg.Error as error:
            raise translated(error, what, place) from error
        if any(len(row) != 2 or None in row for row in rows):
            raise DatasetError(
                f"{what}: its position_query answers {rows[0]!r}: expected rows of (partition, offset).",
                "Select the number of each partition, and the offset at which the stream goes on.",
                dataset=spec.name,
            )
        return [(row[0], row[1]) for row in rows]

    def _read(
        self, connection: psycopg.Connection[Any], spec: AdjunctDataset, schema: Schema, what: str, place: str
    ) -> Iterator[pa.Table]:
        import psycopg

        try:
            with connection.cursor(name="adjunct_snapshot") as cursor:
                cursor.execute(self.query.encode())
                names = [column.name for column in cursor.description or ()]
                missing = [name for name in schema.names if name not in names]
                if missing:
                    raise DatasetError(
                        f"{what} answers the columns {', '.join(names)}: {', '.join(missing)} missing.",
                        "Select the columns of the dataset, under their names.",
                        dataset=spec.name,
                        column=missing[0],
                    )
                at = [names.index(name) for name in schema.names]
                while rows := cursor.fetchmany(self.batch):
                    yield _table(rows, at, schema, what)
        except psycopg.Error as error:
            raise translated(error, what, place) from error


def _table(rows: list[tuple[Any, ...]], at: list[int], schema: Schema, what: str) -> pa.Table:
    import pyarrow as pa

    columns = [
        _array([row[index] for row in rows], field, what) for index, field in zip(at, schema.fields, strict=True)
    ]
    return pa.table(columns, schema=schema.to_arrow())


def _array(values: list[Any], field: Field, what: str) -> pa.Array:
    import pyarrow as pa

    kinds = _KINDS.get(field.type, (Decimal, int))
    other = {type(value) for value in values} - {*kinds, type(None)}
    if other:
        names = ", ".join(sorted(kind.__name__ for kind in other))
        raise _misfit(what, field, f"holds values of {names}")
    if field.type == "timestamp" and any(value is not None and value.tzinfo is None for value in values):
        raise _misfit(what, field, "holds timestamps without a time zone")
    try:
        return pa.array(values, arrow_type(field.type))
    except (pa.ArrowException, OverflowError) as error:
        raise _misfit(what, field, f"holds a value that does not fit ({str(error).splitlines()[0]})") from error


def _misfit(what: str, field: Field, what_it_holds: str) -> SchemaMismatchError:
    return SchemaMismatchError(
        f"{what}: column {field.name!r} {what_it_holds}, expected {field.type}.",
        "Cast the column in the query.",
        column=field.name,
    )

"""`PostgresTable`: records in a table of a PostgreSQL server.

Values are PostgreSQL's own: text, numbers, boolean, timestamp with time zone (read back in UTC), date,
numeric, bytea. Every request is one transaction that first locks the rows it will change, in order of
the key, so that writers of the same keys wait for each other rather than deadlock; where that is not
enough (a record begun by two at once), the server breaks the deadlock and the transaction is run again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.backends.column_values import Kind, check_identifier, declared_column
from dagster_adjunct.resources.backends.per_loop import PerLoop
from dagster_adjunct.resources.backends.postgres_connection import (
    check_keywords,
    connect,
    connection_settings,
    require_driver,
    translated,
    where,
)
from dagster_adjunct.resources.backends.postgres_schema import create_table, read_shape
from dagster_adjunct.resources.backends.rows import (
    Key,
    Record,
    Row,
    RowCodec,
    encode_puts,
    encode_updates,
    key_columns,
    plan_updates,
)
from dagster_adjunct.resources.errors import ConfigurationError, TableUnavailableError, TransientError
from dagster_adjunct.resources.tables.partial_update import UpdateMessage
from dagster_adjunct.resources.tables.table_functions import TableReadFunction, TableWriteFunction

if TYPE_CHECKING:
    from psycopg import AsyncConnection

    from dagster_adjunct.resources.backends.postgres_statements import Statements


@dataclass(slots=True)
class _Open:
    """What one event loop has open; requests use it one after the other."""

    live: tuple[AsyncConnection[Any], RowCodec, Statements] | None = None
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def close(self) -> None:
        live, self.live = self.live, None
        if live is not None:
            await live[0].close()


def _finish(left: _Open) -> None:
    """Close the connection of an event loop that is gone, and can't be waited for."""
    if left.live is not None:
        left.live[0].pgconn.finish()


class PostgresTable(TableReadFunction[Key, Record], TableWriteFunction[Key, Record, Record]):
    """Read and write function over one table, with one connection for each event loop that uses it.

    So threads may share it, each through a `BlockingTable` of its own.

    Where to connect: `dsn_env` names an environment variable that holds the DSN (read when connecting,
    never stored), `connect` gives libpq's keywords without secrets (`service`, `host`, …), and what
    neither says comes from libpq's own environment, service and password files. `key`, `columns` and
    `create` are as with `SqliteTable`; extra arguments of requests have no meaning here.
    """

    def __init__(
        self,
        table: str,
        key: str | Sequence[str],
        *,
        dsn_env: str | None = None,
        connect: Mapping[str, str] | None = None,
        schema: str = "public",
        columns: Mapping[str, str] | None = None,
        create: bool = False,
    ) -> None:
        self.table = check_identifier("table", table)
        self.schema = check_identifier("schema", schema)
        self.key = key_columns(key)
        self.dsn_env = dsn_env
        self.connect = check_keywords(connect or {})
        self.columns = None if columns is None else dict(columns)
        self.create = create
        if create and columns is None:
            raise ConfigurationError(
                f"PostgreSQL table {table!r} can't be created without its columns.",
                'Give columns={"name": "type", …}.',
                argument="columns",
                table=table,
            )
        self._declared = tuple(declared_column(*pair) for pair in (self.columns or {}).items())
        self._label = f"PostgreSQL table {schema}.{table}"
        self._place = ""
        self._open: PerLoop[_Open] = PerLoop(_Open, _finish)

    def __repr__(self) -> str:
        source = f"dsn_env={self.dsn_env!r}" if self.dsn_env else f"connect={self.connect}"
        return f"PostgresTable({self.table!r}, key={self.key}, schema={self.schema!r}, {source})"

    def to_dict(self) -> dict[str, Any]:
        """The declaration as plain values; it holds no secret."""
        return {
            "table": self.table,
            "key": list(self.key),
            "dsn_env": self.dsn_env,
            "connect": self.connect,
            "schema": self.schema,
            "columns": self.columns,
            "create": self.create,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.to_dict(),))

    def is_retriable(self, error: BaseException) -> bool:
        return isinstance(error, TransientError)

    async def open(self) -> None:
        require_driver(self._label)
        mine = self._open.here()
        async with mine.busy:
            await self._connected(mine)

    async def close(self) -> None:
        """Close the running event loop's connection, once the requests that use it have ended."""
        mine = self._open.here()
        async with mine.busy:
            await mine.close()

    async def get(self, key: Key, *args: object) -> Record | None:
        return (await self.get_all([key], *args)).get(key)

    async def get_all(self, keys: Sequence[Key], *args: object) -> dict[Key, Record]:
        async with self._session(transaction=False) as (connection, codec, statements):
            rows = [codec.key_row(key) for key in keys]
            cursor = await connection.execute(statements.select, statements.key_arrays(rows), binary=True)
            return {keys[row[0] - 1]: codec.record(row[1:]) for row in await cursor.fetchall()}

    async def put(self, key: Key, value: Record, *args: object) -> None:
        await self.put_all([(key, value)], *args)

    async def put_all(self, entries: Sequence[tuple[Key, Record]], *args: object) -> None:
        async with self._session() as (connection, codec, statements):
            rows = encode_puts(codec, entries)
            await connection.execute(statements.upsert, statements.row_arrays(list(rows.values())))

    async def put_if_absent_all(self, entries: Sequence[tuple[Key, Record]], *args: object) -> int:
        async with self._session() as (connection, codec, statements):
            rows = encode_puts(codec, entries, first=True)
            cursor = await connection.execute(statements.insert, statements.row_arrays(list(rows.values())))
            return cursor.rowcount

    async def delete(self, key: Key, *args: object) -> None:
        await self.delete_all([key], *args)

    async def delete_all(self, keys: Sequence[Key], *args: object) -> None:
        async with self._session() as (connection, codec, statements):
            rows = sorted({codec.key_row(key) for key in keys})
            await self._locked(connection, statements, rows)
            await connection.execute(statements.delete, statements.key_arrays(rows))

    async def update(self, key: Key, update: Record, *args: object) -> None:
        await self.update_all([(key, update)], *args)

    async def update_all(self, entries: Sequence[tuple[Key, Record]], *args: object) -> None:
        await self.update_with_defaults_all([(key, UpdateMessage(update)) for key, update in entries], *args)

    async def update_with_defaults_all(
        self, entries: Sequence[tuple[Key, UpdateMessage[Record, Record]]], *args: object
    ) -> int:
        async with self._session() as (connection, codec, statements):
            updates = encode_updates(codec, entries)
            keys = sorted({update.row_key for update in updates})
            plan = plan_updates(codec, updates, await self._locked(connection, statements, keys))
            inserted = 0
            if plan.inserts:
                begun = sorted(plan.inserts)
                rows = [plan.inserts[key] for key in begun]
                inserted = (await connection.execute(statements.insert, statements.row_arrays(rows))).rowcount
                if inserted < len(rows) and len(await self._locked(connection, statements, begun)) < len(rows):
                    raise TableUnavailableError(
                        f"{self._label}: a record came and went while its default was put.",
                        "The whole transaction is tried again.",
                        table=self._label,
                    )
            for group in plan.groups():
                statement, arrays = statements.update(group)
                await connection.execute(statement, arrays)
        plan.raise_missing(self._label)
        return inserted

    async def _locked(
        self, connection: AsyncConnection[Any], statements: Statements, keys: Sequence[Row]
    ) -> Collection[Row]:
        """Those of the sorted `keys` that have a record, which is ours until the transaction ends."""
        cursor = await connection.execute(statements.lock, statements.key_arrays(keys))
        return {keys[place - 1] for (place,) in await cursor.fetchall()}

    @asynccontextmanager
    async def _session(
        self, *, transaction: bool = True
    ) -> AsyncIterator[tuple[AsyncConnection[Any], RowCodec, Statements]]:
        """The open connection, alone, in a transaction; errors leave as Adjunct's."""
        import psycopg

        mine = self._open.here()
        async with mine.busy:
            connection, codec, statements = await self._connected(mine)
            try:
                if transaction:
                    async with connection.transaction():
                        yield connection, codec, statements
                else:
                    yield connection, codec, statements
            except psycopg.Error as error:
                if connection.closed or connection.broken:
                    await mine.close()
                raise translated(error, self._label, self._place) from error

    async def _connected(self, mine: _Open) -> tuple[AsyncConnection[Any], RowCodec, Statements]:
        import psycopg

        from dagster_adjunct.resources.backends.postgres_statements import Statements

        if mine.live is not None and not mine.live[0].closed:
            return mine.live
        settings = connection_settings(self._label, self.dsn_env, self.connect)
        self._place = where(settings)
        connection = await connect(self._label, settings)
        try:
            if self.create:
                await create_table(connection, self.schema, self.table, self.key, self._declared)
            shape = await read_shape(
                connection, self._label, self._place, self.schema, self.table, self.key, self._declared
            )
            codec = RowCodec(self._label, self.key, shape.columns, decoders=_DECODERS)
            statements = Statements(self.schema, self.table, self.key, shape)
        except BaseException as error:
            await connection.close()
            if isinstance(error, psycopg.Error):
                raise translated(error, self._label, self._place) from error
            raise
        mine.live = connection, codec, statements
        return mine.live


def _rebuild(settings: dict[str, Any]) -> PostgresTable:
    return PostgresTable(**settings)


_DECODERS: dict[Kind, Callable[[Any], Any]] = {
    Kind.TIMESTAMP: lambda moment: moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC),
}

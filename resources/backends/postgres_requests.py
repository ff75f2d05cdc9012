"""The requests of a `PostgresTable` over one connection: one transaction per request.

A transaction locks the keys that it changes in key order, so that writers of the same keys wait instead of deadlocking:
first their rows in the idempotency table, if there are conditions, then their records. If that is not enough (two
create the same record), the server resolves the deadlock and the request can be retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.backends.columns import (
    Column,
    Kind,
    check_declared_columns,
    loose_key_error,
    not_unique_error,
    parse_column,
)
from dagster_adjunct.resources.backends.postgres_values import StagedBatch, format_array
from dagster_adjunct.resources.backends.write_plan import (
    COLUMNS,
    Applied,
    Row,
    StoredState,
    ValidEntries,
    WritePlan,
    applied_from_texts,
    applied_to_texts,
    check_idempotency_columns,
    columns_to_read,
    idempotency_table_name,
    needs_read,
    plan_writes,
)
from dagster_adjunct.resources.errors import TableNotFoundError, TableUnavailableError
from dagster_adjunct.resources.tables.functions import record_not_found_error
from dagster_adjunct.resources.tables.operation import Operation, Outcomes, Problem, State

if TYPE_CHECKING:
    from psycopg import AsyncConnection

    from dagster_adjunct.resources.backends.postgres_statements import Statements

_NOTHING: tuple[int, int, list[int]] = (0, 0, [])
_ROUNDS = 20  # of concurrent changes before the request fails


class ConcurrentChangeError(Exception):
    """Another transaction created a record that this one was creating, or purged a mark it was updating; start over."""


class _MissingRecordsError(Exception):
    """Updates of a batch with conditions have no record; their marks must not be stored."""


class PostgresRequests:
    """Requests over one connection, exclusively held meanwhile."""

    def __init__(self, connection: AsyncConnection[Any], statements: Statements, *, create: bool) -> None:
        self.connection, self.codec, self._statements = connection, statements.codec, statements
        self._create, self._has_idempotency_table = create, False
        self._staging: set[str] = set()
        self.committing = False

    async def get(self, keys: Sequence[Row]) -> list[dict[str, Any] | None]:
        """The record of each key."""
        statements, names = self._statements, self.codec.names
        arrays = statements.arrays(self.codec.key, keys)
        cursor = await self.connection.execute(statements.select, arrays, binary=True)
        records: list[dict[str, Any] | None] = [None] * len(keys)
        for place, *row in await cursor.fetchall():
            records[place - 1] = self.codec.read(names, row)
        return records

    async def write(self, operation: Operation[Any], valid: ValidEntries) -> WritePlan:
        """Apply everything or, on an error, nothing; while `committing` that is unknown."""
        self.committing = False
        if operation.conditions:
            await self._open_idempotency_table()
        for _ in range(_ROUNDS):
            try:
                async with self.connection.transaction():
                    stored = await self._stored(operation, valid) if needs_read(operation) else StoredState()
                    plan = plan_writes(self.codec, operation, valid, stored)
                    await self._write(operation, plan)
                    self.committing = True
            except ConcurrentChangeError:
                continue
            self.committing = False
            return plan
        problem = f"{self.codec.table}: other writers created or deleted the records {_ROUNDS} times during the write."
        step = "The request is retried; if it keeps failing, find out which other writers delete the records."
        raise TableUnavailableError(problem, step, table=self.codec.table)

    async def write_batch(self, operation: Operation[Any], batch: StagedBatch) -> Outcomes | None:
        """Apply everything or, on an error, nothing; None, without effect, if missing records need rows."""
        shape, self.committing = batch.shape, False
        if shape.conditions.newest_by is not None:
            self.codec.check_order(shape.conditions.newest_by)
        statements = self._statements.staging(shape)
        if shape.conditions:
            await self._open_idempotency_table()
        if statements.name not in self._staging:
            await self.connection.execute(statements.settings)
            await self.connection.execute(statements.create, ())
            self._staging.add(statements.name)
        missing: list[int] = []
        try:
            async with self.connection.transaction():
                cursor = self.connection.cursor()
                async with cursor.copy(statements.copy, ()) as copy:
                    await copy.write(batch.csv)
                if not (shape.inserts or shape.conditions):
                    # In key order, as every request locks, and to find missing ones.
                    await cursor.execute(statements.lock, (), binary=True)
                    present = {place for (place,) in await cursor.fetchall()}
                    missing = batch.missing(present) if len(present) < batch.rows else []
                await cursor.execute(statements.write, batch.constants, binary=True)
                written, begun, skipped = (await cursor.fetchone() or _NOTHING) if cursor.description else _NOTHING
                if shape.conditions and not shape.inserts and written + len(skipped) < batch.rows:
                    raise _MissingRecordsError
                self.committing = True
        except _MissingRecordsError:
            return None
        self.committing = False
        keys = operation.entries.keys if missing else []
        problems = {p: Problem(State.MISSING, record_not_found_error([keys[p]], self.codec.table)) for p in missing}
        problems |= dict.fromkeys(skipped, Problem(State.SKIPPED))
        return Outcomes(len(operation), problems=problems, defaults_put=begun)

    async def forget(self, older_than: float) -> int:
        """Purge what was applied to keys more than `older_than` seconds ago; return the number of keys."""
        await self._open_idempotency_table()
        return (await self.connection.execute(self._statements.forget, (older_than,))).rowcount

    async def _open_idempotency_table(self) -> None:
        """Check the idempotency table once, after creating it if the table is declared with `create`.

        TableAccessError if it is missing or has other columns.
        """
        from psycopg import sql

        if self._has_idempotency_table:
            return
        schema, casts, key = self._statements.schema, self._statements.casts, self.codec.key
        name = idempotency_table_name(self._statements.table, key)
        if self._create:
            types = {part: casts[part] for part in key} | dict.fromkeys(COLUMNS, "text") | {"applied": "jsonb"}
            await _create(self.connection, schema, name, {**types, "at": "timestamp with time zone NOT NULL"}, key)
        cursor = await self.connection.execute(
            """SELECT a.attname FROM pg_attribute a WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0
               AND NOT a.attisdropped""",
            (sql.Identifier(schema, name).as_string(self.connection),),
        )
        columns = [column for (column,) in await cursor.fetchall()]
        check_idempotency_columns(self.codec.table, name, list(key), columns)
        self._has_idempotency_table = True

    async def _stored(self, operation: Operation[Any], valid: ValidEntries) -> StoredState:
        statements, codec, keys = self._statements, self.codec, valid.keys
        arrays = statements.arrays(codec.key, keys)
        applied: dict[Row, Applied] = {}
        if operation.conditions:
            await self.connection.execute(statements.claim, arrays)
            cursor = await self.connection.execute(statements.applied, arrays)
            newest_by = operation.conditions.newest_by
            for place, *texts in await cursor.fetchall():
                applied[keys[place - 1]] = applied_from_texts(codec, newest_by, tuple(texts))
            if len(applied) < len(keys):  # purged after it was claimed: storing the mark now would lose it
                raise ConcurrentChangeError
        names = columns_to_read(operation, valid.entries)
        cursor = await self.connection.execute(statements.lock(names), arrays, binary=True)
        records = {keys[row[0] - 1]: codec.read(names, row[1:]) for row in await cursor.fetchall()}
        return StoredState(records, applied)

    async def _write(self, operation: Operation[Any], plan: WritePlan) -> None:
        statements, codec, execute = self._statements, self.codec, self.connection.execute
        if plan.puts:
            await execute(statements.upsert, self._whole(plan.puts))
        if plan.begins:
            begun = await execute(statements.insert, self._whole(plan.begins))
            if begun.rowcount < len(plan.begins):
                raise ConcurrentChangeError
        if plan.deletes:
            arrays = statements.arrays(codec.key, list(plan.deletes))
            if not needs_read(operation):
                await execute(statements.lock(()), arrays)
            await execute(statements.delete, arrays)
        for sets, append, rows in plan.groups():
            names = (*sets, *append, *codec.key)
            await execute(statements.update(sets, append), statements.arrays(names, rows))
        if plan.applied:
            newest_by = operation.conditions.newest_by
            texts = [(*key, *applied_to_texts(codec, newest_by, applied)) for key, applied in plan.applied.items()]
            width = len(codec.key)
            arrays = statements.arrays(codec.key, texts)
            arrays += [format_array(row[place] for row in texts) for place in range(width, width + 4)]
            await execute(statements.remember, arrays)

    def _whole(self, records: dict[Row, dict[str, Any]]) -> list[Any]:
        names = self.codec.names
        return self._statements.arrays(names, [tuple(map(record.get, names)) for record in records.values()])


class Pool:
    """At most `size` connections, created by `connect` when none is idle.

    Unlike a library's pool, which only reports a timeout to waiting callers, it passes the error of a login, a missing
    table or a server that is down to the request that met it, at once.
    """

    def __init__(self, size: int, connect: Callable[[], Awaitable[PostgresRequests]]) -> None:
        self._size, self._connect = size, connect
        self._places = asyncio.Semaphore(size)
        self._closing = asyncio.Lock()
        self._idle: list[PostgresRequests] = []
        self.is_connected = False  # whether a connection was made since the last one was lost

    @asynccontextmanager
    async def one(self) -> AsyncIterator[PostgresRequests]:
        """A context manager for a connection of the caller's own, left outside of any transaction, or closed."""
        async with self._places:
            requests = self._idle.pop() if self._idle else await self._connect()
            self.is_connected = True
            try:
                yield requests
            except asyncio.CancelledError:  # its state is unknown
                await requests.connection.close()
                raise
            finally:
                if requests.connection.closed or requests.connection.broken:
                    await self._drop()
                    self.is_connected = False
                else:
                    self._idle.append(requests)

    async def close(self) -> None:
        """Close all connections after their requests."""
        async with self._closing:  # two concurrent calls would each hold places that the other waits for
            for _ in range(self._size):
                await self._places.acquire()
            try:
                await self._drop()
            finally:
                for _ in range(self._size):
                    self._places.release()

    def finish(self) -> None:
        """Close the connections of an event loop that has ended, without waiting."""
        while self._idle:
            self._idle.pop().connection.pgconn.finish()

    async def _drop(self) -> None:
        while self._idle:
            await self._idle.pop().connection.close()


_TYPES = {
    Kind.STRING: "text",
    Kind.BOOLEAN: "boolean",
    Kind.TIMESTAMP: "timestamp with time zone",
    Kind.DATE: "date",
    Kind.DECIMAL: "numeric",
    Kind.BINARY: "bytea",
    Kind.JSON: "jsonb",
}
_WIDTHS = {
    **dict.fromkeys(("tinyint", "byte", "smallint", "short", "int2"), "smallint"),
    **dict.fromkeys(("int", "integer", "int4"), "integer"),
    **dict.fromkeys(("bigint", "long", "int8"), "bigint"),
    **dict.fromkeys(("float", "real", "float4"), "real"),
    **dict.fromkeys(("double", "double precision", "float8"), "double precision"),
}


async def create_postgres_table(
    connection: AsyncConnection[Any], schema: str, table: str, key: Sequence[str], columns: Sequence[Column]
) -> None:
    """Create schema and table with `key` as its primary key, unless they exist."""
    await _create(connection, schema, table, {column.name: _type_of(column) for column in columns}, key)


async def _create(
    connection: AsyncConnection[Any], schema: str, table: str, types: Mapping[str, Any], key: Sequence[str]
) -> None:
    from psycopg import sql

    name = sql.Identifier(schema, table)
    parts = [sql.SQL("{} {}").format(sql.Identifier(column), sql.SQL(type_)) for column, type_ in types.items()]
    parts.append(sql.SQL("PRIMARY KEY ({})").format(sql.SQL(", ").join(map(sql.Identifier, key))))
    async with connection.transaction():
        # IF NOT EXISTS alone fails when two sessions create the same table at once.
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"adjunct:{schema}.{table}",))
        exists = await connection.execute("SELECT to_regclass(%s)", (name.as_string(connection),))
        if (await exists.fetchone() or (None,))[0] is not None:
            return
        await connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
        # Rows that are updated often stay in their page if it has space.
        made = sql.SQL("CREATE TABLE {} ({}) WITH (fillfactor = 80)").format(name, sql.SQL(", ").join(parts))
        await connection.execute(made)


_UNEQUAL = {"citext": "which ignores case", "bpchar": "which ignores blanks at the end"}


async def read_columns(
    connection: AsyncConnection[Any],
    label: str,
    place: str,
    schema: str,
    table: str,
    key: Sequence[str],
    declared: Sequence[Column],
) -> tuple[list[Column], dict[str, str]]:
    """Return the columns, and each one's type for casts, after checking that declared ones exist and `key` is unique.

    TableNotFoundError if the table does not exist; SchemaMismatchError if it does not fit.
    """
    cursor = await connection.execute(
        """SELECT a.attname, format_type(a.atttypid, a.atttypmod), format_type(a.atttypid, -1),
             coalesce(o.collisdeterministic, true), o.collname
           FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
           LEFT JOIN pg_collation o ON o.oid = a.attcollation
           WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
           ORDER BY a.attnum""",
        (schema, table),
    )
    rows, where = await cursor.fetchall(), f"{label} at {place}"
    if not rows:
        step = "Correct schema and name, or declare the table with create=True."
        raise TableNotFoundError(f"{where}: the table does not exist.", step, table=label)
    names = [name for name, *_ in rows]
    check_declared_columns(where, names, declared)
    cursor = await connection.execute(
        """SELECT array_agg(a.attname::text)
           FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid JOIN pg_namespace n ON n.oid = c.relnamespace
           JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])
           WHERE n.nspname = %s AND c.relname = %s AND i.indisunique AND i.indpred IS NULL
           GROUP BY i.indexrelid""",
        (schema, table),
    )
    if set(key) not in [set(columns) for (columns,) in await cursor.fetchall()]:
        raise not_unique_error(where, key)
    for name, _, type_, exact, collation in rows:
        if name in key and type_ in _UNEQUAL:
            raise loose_key_error(where, name, f"{type_}, {_UNEQUAL[type_]}", "text")
        if name in key and not exact:
            kind = f"{type_} with the collation {collation}, which is not deterministic"
            raise loose_key_error(where, name, kind, "text")
    wanted = {column.name for column in declared} or set(names)
    columns = [parse_column(name, type_) for name, type_, *_ in rows if name in wanted]
    return columns, {name: cast for name, _, cast, *_ in rows}


def _type_of(column: Column) -> Any:
    if column.kind is Kind.LIST:
        assert column.element is not None
        return _type_of(column.element) + "[]"
    base = _WIDTHS.get(column.type) or _TYPES[column.kind]
    sized = column.kind is Kind.DECIMAL or column.type in ("varchar", "character varying")
    if column.size and sized:
        return ("varchar" if column.kind is Kind.STRING else base) + column.size
    return base

"""`PostgresSegments`: key-value tables in a schema of a PostgreSQL server."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import tenacity
from pydantic import PositiveInt

from dagster_adjunct.resources.key_value import segment
from dagster_adjunct.resources.key_value.segment import SegmentLimits, TableId, TableSegment
from dagster_adjunct.resources.key_value_backends.per_caller import PerCaller
from dagster_adjunct.resources.key_value_backends.sqlite import sql_table_name
from dagster_adjunct.resources.table_backends.columns import check_identifier
from dagster_adjunct.resources.table_backends.postgres_connection import (
    check_keywords,
    connect_async,
    connect_sync,
    connection_settings,
    format_address,
    require_driver,
    translate_error,
)
from dagster_adjunct.resources.table_backends.store import check_variable_name
from dagster_adjunct.resources.validation import Seconds, validated

if TYPE_CHECKING:
    import psycopg

    from dagster_adjunct.resources.key_value_backends.postgres_segment import PostgresSegmentErrors
    from dagster_adjunct.resources.key_value_backends.postgres_wire import PostgresWire, WirePool

T = TypeVar("T")
# An index entry has 2,704 bytes: its own 8, 4 for a length, 4 for the partition, and the key, in
# steps of 8.
_LIMITS = SegmentLimits(table_key=2688, value=2**26, request=2**26 + 2**12, fences=4)
SESSION = (
    # A plan is made once, when a table may still be empty. It uses the index, whatever the table
    # holds later, and joins in a time that is proportional to the number of requested keys.
    b"SET plan_cache_mode = force_generic_plan; SET jit = off; SET enable_seqscan = off; SET"
    b" enable_bitmapscan = off; SET enable_nestloop = off; SET enable_mergejoin = off"
)
# A standby may lag behind. `primary` rather than `read-write`, because a role that only reads may
# have default_transaction_read_only set. Keepalives detect a lost server.
_SERVER = {
    "target_session_attrs": "primary",
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 4,
}


class _SqlNames(NamedTuple):
    """Quoted names: of the table with a table's entries, of that with its tokens, and of the
    function that rejects writes.
    """

    entries: str
    tokens: str
    reject: str


@validated
class PostgresSegments:
    """Key-value tables in the existing schema `schema`, each in two tables that all its partitions
    share.

    Where to connect: `dsn_env` names an environment variable with the DSN (read when connecting,
    never stored), `connect` has libpq keywords without secrets (`service`, `host`, …), and libpq's
    own environment, service and password files provide the rest. The server must be a primary. A
    role that only reads may have `default_transaction_read_only` set.

    All tables opened through one object share up to `connections` for each event loop, and as many
    for the threads without one (`BlockingKeyValueTable`), where a thread waits for its turn. A
    request without an answer after `request_timeout` seconds, or half of `horizon`, is given up. A
    write may be repeated for `horizon` seconds, so recent requests are remembered for twice as
    long, in about 100 bytes each. Values and batches are limited to 64 MiB, table keys to 2,688
    bytes, which is what an index of PostgreSQL accepts.
    """

    limits = _LIMITS
    waits = True

    def __init__(
        self,
        *,
        dsn_env: str | None = None,
        connect: Mapping[str, str | float | os.PathLike[str]] | None = None,
        schema: str = "public",
        connections: PositiveInt = 4,
        request_timeout: Seconds = 60.0,
        horizon: Seconds = 600.0,
    ) -> None:
        self.schema = check_identifier("schema", schema)
        self.dsn_env = None if dsn_env is None else check_variable_name("dsn_env", dsn_env)
        self.connect = check_keywords(connect or {})
        self.connections = connections
        self.request_timeout = request_timeout
        self.horizon = horizon
        self._pools: PerCaller[WirePool] = PerCaller(self._new_pool, lambda pool: pool.drop())

    def __repr__(self) -> str:
        source = f"dsn_env={self.dsn_env!r}" if self.dsn_env else f"connect={self.connect}"
        return f"PostgresSegments({source}, schema={self.schema!r})"

    def to_dict(self) -> dict[str, Any]:
        names = ("dsn_env", "connect", "schema", "connections", "request_timeout", "horizon")
        return {name: getattr(self, name) for name in names}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(PostgresSegments, **self.to_dict()), ()

    def create(self, table: TableId, partitions: int) -> None:
        """Create the tables of entries and of recent requests, unless they exist."""
        names = self._names(table)
        entries = names.entries
        tokens = names.tokens

        def create(connection: psycopg.Connection[Any]) -> None:
            """Create both tables, with comments that name the key-value table."""
            from psycopg import sql

            if self._exists(connection, entries):
                return
            # A plain address is not compressed, so that its length alone decides whether the index
            # accepts it. A page with some free space keeps the new version of a row next to the old
            # one, without changing the index.
            connection.execute(
                f"CREATE TABLE {entries} (address bytea PRIMARY KEY, version bytea NOT NULL, value"
                " bytea NOT NULL) WITH (fillfactor = 90)"
            )
            connection.execute(f"ALTER TABLE {entries} ALTER address SET STORAGE PLAIN")
            connection.execute(
                f"CREATE TABLE {tokens} (token bytea PRIMARY KEY, applied boolean NOT NULL DEFAULT"
                " true, at timestamptz NOT NULL DEFAULT now())"
            )
            for name, what in ((entries, "entries"), (tokens, "recent requests")):
                comment = sql.Literal(f"{what} of key-value table {table}").as_string(connection)
                connection.execute(f"COMMENT ON TABLE {name} IS {comment}")

        self._change(table, create)

    def seal(self, table: TableId, partitions: int) -> None:
        if not self._change(table, partial(self._seal, table)):
            raise self._errors(table).not_found()

    def _seal(self, table: TableId, connection: psycopg.Connection[Any]) -> bool:
        """Create the trigger that rejects all writes from now on; return whether the table exists.

        The lock that this takes allows reads, and waits for writes that began before.
        """
        from dagster_adjunct.resources.key_value_backends.postgres_segment import SEALED

        names = self._names(table)
        if not self._exists(connection, names.entries):
            return False
        query = "SELECT FROM pg_trigger WHERE tgrelid = to_regclass(%s) AND tgname = 'sealed'"
        if connection.execute(query, (names.entries,)).fetchone() is None:
            connection.execute(
                f"CREATE OR REPLACE FUNCTION {names.reject}() RETURNS trigger LANGUAGE plpgsql AS"
                " $$ BEGIN RAISE EXCEPTION 'the key-value table is sealed' USING ERRCODE ="
                f" '{SEALED}'; END $$"
            )
            connection.execute(
                "CREATE TRIGGER sealed BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON"
                f" {names.entries} FOR EACH STATEMENT EXECUTE FUNCTION {names.reject}()"
            )
        return True

    def delete(self, table: TableId, partitions: int) -> None:
        self._change(table, partial(self._drop, table))

    def _drop(self, table: TableId, connection: psycopg.Connection[Any]) -> None:
        """Drop the table, once the requests that are using it have ended."""
        names = self._names(table)
        connection.execute(f"DROP TABLE IF EXISTS {names.entries}, {names.tokens}")
        connection.execute(f"DROP FUNCTION IF EXISTS {names.reject}()")

    def check_may_seal(self, table: TableId, partitions: int) -> None:
        self._change(table, partial(self._seal, table), dry_run=True)

    def check_may_delete(self, table: TableId, partitions: int) -> None:
        self._change(table, partial(self._drop, table), dry_run=True)

    def open(self, table: TableId, partition: int) -> TableSegment:
        require_driver(_label(table))
        from dagster_adjunct.resources.key_value_backends.postgres_segment import (
            PostgresSegment,
            PostgresStatements,
        )

        statements = PostgresStatements(self.schema, table)
        # The last attempt may begin at the horizon, and earlier ones may arrive late.
        tokens_kept = 2 * self.horizon
        return PostgresSegment(
            self._pools.here, statements, partition, self._errors(table), tokens_kept
        )

    def location(self, table: TableId, partition: int) -> str:
        place = format_address(self._settings(_label(table)))
        return (
            f"postgresql://{place}, table {self.schema}.{sql_table_name(table)}, partition"
            f" {partition}"
        )

    def _names(self, table: TableId) -> _SqlNames:
        """Return the names of what a table has in the schema."""
        schema = self.schema.replace('"', '""')
        name = sql_table_name(table)
        return _SqlNames(
            f'"{schema}"."{name}"', f'"{schema}"."{name}_tokens"', f'"{schema}"."{name}_sealed"'
        )

    def _exists(self, connection: psycopg.Connection[Any], name: str) -> bool:
        """Whether the table with this quoted name exists."""
        (exists,) = connection.execute(
            "SELECT to_regclass(%s) IS NOT NULL", (name,)
        ).fetchone() or (False,)
        return bool(exists)

    def _change(
        self,
        table: TableId,
        change: Callable[[psycopg.Connection[Any]], T],
        *,
        dry_run: bool = False,
    ) -> T:
        """Run `change` in a transaction, over a connection of its own; return its result.

        A lock keeps out other changes of this table's schema. A `dry_run` is rolled back: it
        changes nothing, but the server raises all its objections (a missing right, a read-only
        session, a dependent view).
        """
        label = _label(table)
        require_driver(label)
        import psycopg

        def attempt() -> T:
            """Return the result of `change`, run under the lock in a transaction."""
            with connection.transaction(force_rollback=dry_run):
                connection.execute("SET LOCAL lock_timeout = '30s'")
                name = f"{self.schema}.{sql_table_name(table)}"
                connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (name,))
                return change(connection)

        # Writers lock the two tables in another order. The server resolves a deadlock by an error
        # for one side: repeat it.
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(psycopg.errors.DeadlockDetected),
            stop=tenacity.stop_after_attempt(10),
            wait=tenacity.wait_random(0, 0.05),
            reraise=True,
        )
        connection = connect_sync(label, self._settings(label))
        try:
            return attempts(attempt)
        except psycopg.Error as error:
            raise self._errors(table).of_schema(error) from error
        finally:
            connection.close()

    def _new_pool(self) -> WirePool:
        """Return the connections of an event loop, or of the threads without one."""
        from dagster_adjunct.resources.key_value_backends.postgres_wire import WirePool

        return WirePool(self.connections, self._connect)

    async def _connect(self) -> PostgresWire:
        """Return a new connection for requests, asynchronous in an event loop."""
        import psycopg

        from dagster_adjunct.resources.key_value_backends.postgres_wire import PostgresWire

        label = f"key-value tables of schema {self.schema}"
        settings = self._settings(label)
        connection: Any
        if segment.is_blocking():
            connection = connect_sync(label, settings)
        else:
            connection = await connect_async(label, settings)
        # Wait at most half of the horizon, so that there is time to find out whether the write was
        # applied.
        wire = PostgresWire(connection, min(self.request_timeout, self.horizon / 2))
        try:
            await wire.tell(SESSION)
        except BaseException as error:
            wire.close()
            if isinstance(error, psycopg.Error):
                raise translate_error(error, label, format_address(settings)) from error
            raise
        return wire

    def _errors(self, table: TableId) -> PostgresSegmentErrors:
        """Return what converts errors of psycopg to those of this table."""
        from dagster_adjunct.resources.key_value_backends.postgres_segment import (
            PostgresSegmentErrors,
        )

        label = _label(table)
        return PostgresSegmentErrors(table, label, lambda: format_address(self._settings(label)))

    def _settings(self, label: str) -> dict[str, Any]:
        """Return the connection settings, which may include a password."""
        return _SERVER | connection_settings(label, self.dsn_env, self.connect)


def _label(table: TableId) -> str:
    """Return what errors call the table."""
    return f"key-value table {table}"

"""`PostgresSegments`: key-value tables in a schema of a PostgreSQL server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

import tenacity

from dagster_adjunct.resources.backends.columns import check_identifier
from dagster_adjunct.resources.backends.postgres_connection import (
    Pool,
    check_keywords,
    connect_async,
    connect_sync,
    connection_settings,
    format_address,
    require_driver,
    translate_error,
)
from dagster_adjunct.resources.backends.store import check_variable_name
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.key_value.segment import SegmentLimits, TableId, TableSegment
from dagster_adjunct.resources.tables.operation import PerLoop

if TYPE_CHECKING:
    import psycopg

    from dagster_adjunct.resources.key_value_backends.postgres_segment import PostgresSegmentErrors
    from dagster_adjunct.resources.key_value_backends.postgres_wire import LoopWire, ThreadWire, ThreadWires, WirePool

T = TypeVar("T")
# An index entry has 2,704 bytes: its own 8, 4 of a length, 4 of the partition, and the key, in steps of 8.
_LIMITS = SegmentLimits(table_key=2688, value=2**26, request=2**26 + 2**12)
SESSION = (
    # A plan is made once, when a table may still be empty: it goes by the index, whatever the table holds later, and
    # joins in a time that is proportional to what was asked for.
    "SET plan_cache_mode = force_generic_plan; SET jit = off; SET enable_seqscan = off; SET enable_bitmapscan = off; "
    "SET enable_nestloop = off; SET enable_mergejoin = off"
)
# A standby may not have the newest yet. What a role may do there is another matter: whoever only reads may have
# default_transaction_read_only set. Where the server is gone that is noticed.
_SERVER = {"target_session_attrs": "primary", "keepalives_idle": 20, "keepalives_interval": 5, "keepalives_count": 4}


class PostgresSegments:
    """Tables of the schema `schema`, which is there, each in two of its own; all partitions of one lie together.

    Where to connect: `dsn_env` names an environment variable that holds the DSN (read when connecting, never stored),
    `connect` gives libpq's keywords without secrets (`service`, `host`, …), and what neither says comes from libpq's
    own environment, service and password files. It must be a primary, not a standby. A role that only reads may have
    `default_transaction_read_only` set.

    All tables opened through one of these share up to `connections` for each event loop that uses them, and as many for
    the threads that do without one (`BlockingKeyValueTable`), where a thread waits for its turn. A request that has no
    answer after `request_timeout` seconds, or half of `horizon`, is given up. A write may be repeated for
    `horizon` seconds, so recent requests are remembered for twice as long, in about 100 bytes each. Values and batches
    have 64 MiB at most, table keys 2,688 bytes (what an index of PostgreSQL takes).
    """

    limits = _LIMITS
    waits = True

    def __init__(
        self,
        *,
        dsn_env: str | None = None,
        connect: Mapping[str, str] | None = None,
        schema: str = "public",
        connections: int = 4,
        request_timeout: float = 60.0,
        horizon: float = 600.0,
    ) -> None:
        self.schema = check_identifier("schema", schema)
        self.dsn_env = None if dsn_env is None else check_variable_name("dsn_env", dsn_env)
        self.connect = check_keywords(connect or {})
        if not isinstance(connections, int) or connections is True or connections < 1:
            raise ConfigurationError(
                f"key-value tables in PostgreSQL have connections={connections!r}; expected a whole number above 0.",
                "Say how many requests may run at a time.",
                argument="connections",
            )
        for name, seconds in (("request_timeout", request_timeout), ("horizon", horizon)):
            if not (isfinite(seconds) and seconds > 0):
                raise ConfigurationError(
                    f"key-value tables in PostgreSQL have {name}={seconds!r}; expected seconds, above 0.",
                    "Correct it, or leave it out.",
                    argument=name,
                )
        self.connections, self.request_timeout, self.horizon = connections, request_timeout, horizon
        self._open: PerLoop[Pool[LoopWire]] = PerLoop(lambda: Pool(self.connections, self._connected), Pool.finish)
        self._of_threads: ThreadWires | None = None
        self._opening = threading.Lock()

    def __repr__(self) -> str:
        source = f"dsn_env={self.dsn_env!r}" if self.dsn_env else f"connect={self.connect}"
        return f"PostgresSegments({source}, schema={self.schema!r})"

    def to_dict(self) -> dict[str, Any]:
        return {
            "dsn_env": self.dsn_env,
            "connect": self.connect,
            "schema": self.schema,
            "connections": self.connections,
            "request_timeout": self.request_timeout,
            "horizon": self.horizon,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.to_dict(),)

    def create(self, table: TableId, partitions: int) -> None:
        from dagster_adjunct.resources.key_value_backends.postgres_schema import create

        self._change(table, lambda connection: create(connection, self.schema, table))

    def seal(self, table: TableId, partitions: int) -> None:
        from dagster_adjunct.resources.key_value_backends.postgres_schema import seal

        if not self._change(table, lambda connection: seal(connection, self.schema, table)):
            raise self._errors(table).not_found()

    def delete(self, table: TableId, partitions: int) -> None:
        from dagster_adjunct.resources.key_value_backends.postgres_schema import drop

        self._change(table, lambda connection: drop(connection, self.schema, table))

    def check_may_seal(self, table: TableId, partitions: int) -> None:
        from dagster_adjunct.resources.key_value_backends.postgres_schema import seal

        self._change(table, lambda connection: seal(connection, self.schema, table, rehearsed=True))

    def check_may_delete(self, table: TableId, partitions: int) -> None:
        from dagster_adjunct.resources.key_value_backends.postgres_schema import drop

        self._change(table, lambda connection: drop(connection, self.schema, table, rehearsed=True))

    def open(self, table: TableId, partition: int) -> TableSegment:
        return self._segment(table, partition, self._open.here, waits=True)

    def open_blocking(self, table: TableId, partition: int) -> TableSegment:
        return self._segment(table, partition, self._thread_wires, waits=False)

    def _segment(self, table: TableId, partition: int, pool: Callable[[], WirePool], *, waits: bool) -> TableSegment:
        require_driver(_label(table))
        from dagster_adjunct.resources.key_value_backends.postgres_segment import PostgresSegment, PostgresStatements

        statements = PostgresStatements.of(self.schema, table)
        kept = 2 * self.horizon  # the last attempt may begin at the horizon, and an attempt before it come late
        return PostgresSegment(pool, statements, partition, self.limits, self._errors(table), kept, waits=waits)

    def _thread_wires(self) -> ThreadWires:
        if self._of_threads is None:
            from dagster_adjunct.resources.key_value_backends.postgres_wire import ThreadWires

            with self._opening:
                self._of_threads = self._of_threads or ThreadWires(self.connections, self._connected_in_thread)
        return self._of_threads

    def location(self, table: TableId, partition: int) -> str:
        from dagster_adjunct.resources.key_value_backends.sqlite import sql_table_name

        place = format_address(self._settings(_label(table)))
        return f"postgresql://{place}, table {self.schema}.{sql_table_name(table)}, partition {partition}"

    def _change(self, table: TableId, change: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Do something to the schema over a connection of its own."""
        label = _label(table)
        require_driver(label)
        import psycopg

        # Writers take the two tables in another order; whom the server ends is up to it.
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(psycopg.errors.DeadlockDetected),
            stop=tenacity.stop_after_attempt(10),
            wait=tenacity.wait_random(0, 0.05),
            reraise=True,
        )
        connection = connect_sync(label, self._settings(label))
        try:
            return attempts(change, connection)
        except psycopg.Error as error:
            raise self._errors(table).of_schema(error) from error
        finally:
            connection.close()

    async def _connected(self) -> LoopWire:
        import psycopg

        from dagster_adjunct.resources.key_value_backends.postgres_wire import LoopWire

        label = f"key-value tables of schema {self.schema}"
        settings = self._settings(label)
        connection = await connect_async(label, settings)
        try:
            await connection.execute(SESSION)
        except BaseException as error:
            await connection.close()
            if isinstance(error, psycopg.Error):
                raise translate_error(error, label, format_address(settings)) from error
            raise
        return LoopWire(connection, self._patience)

    def _connected_in_thread(self) -> ThreadWire:
        import psycopg

        from dagster_adjunct.resources.key_value_backends.postgres_wire import ThreadWire

        label = f"key-value tables of schema {self.schema}"
        settings = self._settings(label)
        connection = connect_sync(label, settings)
        try:
            connection.execute(SESSION)
        except BaseException as error:
            connection.close()
            if isinstance(error, psycopg.Error):
                raise translate_error(error, label, format_address(settings)) from error
            raise
        return ThreadWire(connection, self._patience)

    @property
    def _patience(self) -> float:
        """A write without an answer is given up while there is time to look for it."""
        return min(self.request_timeout, self.horizon / 2)

    def _errors(self, table: TableId) -> PostgresSegmentErrors:
        from dagster_adjunct.resources.key_value_backends.postgres_segment import PostgresSegmentErrors

        label = _label(table)
        return PostgresSegmentErrors(table, label, lambda: format_address(self._settings(label)))

    def _settings(self, label: str) -> dict[str, Any]:
        """Return what to connect with; it may hold a password."""
        return _SERVER | connection_settings(label, self.dsn_env, self.connect)


def _label(table: TableId) -> str:
    return f"key-value table {table.scope}/{table.name}"


def _made(settings: dict[str, Any]) -> PostgresSegments:
    return PostgresSegments(**settings)

"""A logical replication slot of a PostgreSQL server, and the table that it tells of.

Positions in the server's log are plain integers here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import pq, sql
from psycopg.conninfo import make_conninfo
from psycopg.pq.abc import PGconn

from dagster_adjunct.errors import ConfigurationError

Rows = Iterable[list[tuple[Any, ...]]]
# How values look as text, in changes as in snapshots.
_SETTINGS = {"TimeZone": "UTC", "DateStyle": "ISO", "bytea_output": "hex", "extra_float_digits": "1"}
_FETCH = 10_000


@dataclass(frozen=True, slots=True)
class Slot:
    """The slot `name` and the publication `name` of one table ("public.accounts")."""

    dsn: str
    table: str
    name: str

    def exists(self) -> bool:
        with self.connected() as connection:
            return _found(connection, "pg_replication_slots", "slot_name", self.name)

    def create(self) -> None:
        """Make publication and slot where they are missing. From here on no change is lost."""
        with self.connected() as connection:
            if not _found(connection, "pg_publication", "pubname", self.name):
                make = "CREATE PUBLICATION {} FOR TABLE {}"
                connection.execute(sql.SQL(make).format(sql.Identifier(self.name), self._table))
            if not _found(connection, "pg_replication_slots", "slot_name", self.name):
                connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [self.name])

    def drop(self) -> None:
        """Remove both. A slot that nobody reads keeps PostgreSQL from deleting its log, so remove it in time."""
        with self.connected() as connection:
            if _found(connection, "pg_replication_slots", "slot_name", self.name):
                connection.execute("SELECT pg_drop_replication_slot(%s)", [self.name])
            connection.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(self.name)))

    @contextmanager
    def reading(self) -> Iterator[psycopg.Connection[Any]]:
        """Give a connection that reads the slot alone. Raises ConfigurationError while another one does."""
        with self.connected() as connection:
            (alone,) = _one(connection, "SELECT pg_try_advisory_lock(hashtext('adjunct'), hashtext(%s))", self.name)
            if not alone:
                raise ConfigurationError(
                    f"the slot {self.name!r} of table {self.table} is being read by another process.",
                    "Wait until it has ended, or stop it: one process at a time may read a slot.",
                )
            try:
                yield connection
            finally:
                # The server notices only later that a connection was closed, and the next one may come at once.
                with suppress(psycopg.Error):
                    connection.execute("SELECT pg_advisory_unlock_all()")

    def end(self, connection: psycopg.Connection[Any]) -> int:
        """Return how far the log is on disk: what is committed now is below it."""
        (position,) = _one(connection, "SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn")
        return int(position)

    def peek(self, connection: psycopg.Connection[Any], end: int, most: int) -> list[tuple[int, bytes]]:
        """Return messages (position, pgoutput) of whole transactions up to about `end`; none is taken off the slot.

        Fewer than `most` messages are all that there are.
        """
        query = (
            "SELECT lsn - '0/0'::pg_lsn, data FROM pg_logical_slot_peek_binary_changes(%s, '0/0'::pg_lsn + %s::bigint, "
            "%s::int, 'proto_version', '1', 'publication_names', %s)"
        )
        with connection.cursor(binary=True) as cursor:
            cursor.execute(query, [self.name, end, most, self.name])
            return [(int(position), bytes(data)) for position, data in cursor]

    def advance(self, connection: psycopg.Connection[Any], position: int) -> None:
        """Take off the slot what was committed below this position."""
        connection.execute("SELECT pg_replication_slot_advance(%s, '0/0'::pg_lsn + %s::bigint)", [self.name, position])

    @contextmanager
    def moment(self, columns: Sequence[str]) -> Iterator[tuple[int, Rows]]:
        """Give a position in the log and the table's rows as they were there, in batches, while the block lasts.

        Transactions that committed below the position are in the rows, the others are not. Only the replication
        protocol exports such a snapshot: a second slot, which lives as long as its connection, stands for the moment.
        """
        server = pq.PGconn.connect(make_conninfo(self.dsn, replication="database").encode())
        try:
            _expect(server, server.status == pq.ConnStatus.OK)
            name = f'"{self.name}_moment"'
            made = server.exec_(f"CREATE_REPLICATION_SLOT {name} TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT".encode())
            _expect(server, made.status == pq.ExecStatus.TUPLES_OK)
            position, exported = ((made.get_value(0, column) or b"").decode() for column in (1, 2))
            high, low = position.split("/")
            with self.connected() as connection, connection.transaction():
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(exported)))
                yield (int(high, 16) << 32) + int(low, 16), self._rows(connection, columns)
        finally:
            server.finish()

    @contextmanager
    def connected(self) -> Iterator[psycopg.Connection[Any]]:
        options = " ".join(f"-c {name}={value}" for name, value in _SETTINGS.items())
        with psycopg.connect(self.dsn, autocommit=True, options=options) as connection:
            yield connection

    @property
    def _table(self) -> sql.Identifier:
        return sql.Identifier(*self.table.split("."))

    def _rows(self, connection: psycopg.Connection[Any], columns: Sequence[str]) -> Iterator[list[tuple[Any, ...]]]:
        names = sql.SQL(", ").join(map(sql.Identifier, columns))
        with connection.cursor(name="snapshot") as cursor:
            cursor.execute(sql.SQL("SELECT {} FROM {}").format(names, self._table))
            while batch := cursor.fetchmany(_FETCH):
                yield batch


def _one(connection: psycopg.Connection[Any], query: str, *values: object) -> tuple[Any, ...]:
    row = connection.execute(query, values).fetchone()
    assert row is not None
    return tuple(row)


def _found(connection: psycopg.Connection[Any], catalogue: str, column: str, name: str) -> bool:
    query = sql.SQL("SELECT 1 FROM {} WHERE {} = %s").format(sql.Identifier(catalogue), sql.Identifier(column))
    return connection.execute(query, [name]).fetchone() is not None


def _expect(server: PGconn, fine: bool) -> None:
    if not fine:
        raise psycopg.OperationalError(server.error_message.decode())

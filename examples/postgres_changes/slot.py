"""A logical replication slot of a PostgreSQL server, and the table that it tells of.

Positions in the server's log are plain integers here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import pq, sql
from psycopg.conninfo import make_conninfo
from psycopg.pq.abc import PGconn

from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.examples.postgres_changes.catalogue import (
    GENERATED_SINCE,
    Column,
    Facts,
    Partitions,
    check_partitions,
    check_publication,
    read_facts,
    require_capturable,
)
from dagster_adjunct.examples.postgres_changes.values import (
    is_selected_as_text,
    readers,
    selected,
    unreadable_error,
)

Rows = Iterable[list[tuple[Any, ...]]]
# How values look as text, in changes as in snapshots.
_SETTINGS = {
    "TimeZone": "UTC",
    "DateStyle": "ISO",
    "bytea_output": "hex",
    "extra_float_digits": "1",
}
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

    def require_capturable(self, columns: Sequence[str], key: Sequence[str]) -> None:
        """Raise ConfigurationError for a table whose changes would not have all these columns;
        nothing is made.
        """
        with self.connected() as connection:
            facts = read_facts(connection, self.table)
            require_capturable(facts, columns, key)
            if _found(connection, "pg_publication", "pubname", self.name):
                check_publication(connection, self.name, facts, columns)

    def create(self) -> None:
        """Make publication and slot where they are missing. From here on no change is lost."""
        with self.connected() as connection:
            facts = read_facts(connection, self.table)
            if not _found(connection, "pg_publication", "pubname", self.name):
                self._publish(connection, facts)
            if not _found(connection, "pg_replication_slots", "slot_name", self.name):
                connection.execute(
                    "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [self.name]
                )

    def _publish(self, connection: psycopg.Connection[Any], facts: Facts) -> None:
        options = ["publish_via_partition_root = true"] if facts.is_partitioned else []
        if facts.server >= GENERATED_SINCE:  # also those that are added later
            options.append("publish_generated_columns = stored")
        make = "CREATE PUBLICATION {} FOR TABLE {}" + (
            f" WITH ({', '.join(options)})" if options else ""
        )
        with connection.transaction():
            connection.execute(sql.SQL(make).format(sql.Identifier(self.name), self._table))
            if facts.is_partitioned:
                self.remember_partitions(connection, Partitions.of(facts))

    def check(
        self, connection: psycopg.Connection[Any], columns: Sequence[str], key: Sequence[str]
    ) -> Facts:
        """Return what the catalogue says of the table now.

        Raises ConfigurationError if its changes don't have all these columns, or rows came or went
        without changes.
        """
        facts = read_facts(connection, self.table)
        require_capturable(facts, columns, key)
        check_publication(connection, self.name, facts, columns)
        query = (
            "SELECT obj_description(oid, 'pg_publication') FROM pg_publication WHERE pubname = %s"
        )
        seen = Partitions.from_json(_one(connection, query, self.name)[0])
        if seen is not None:
            check_partitions(connection, facts, seen)
        return facts

    def accept_partitions(self) -> None:
        """Go on with the table's present partitions, though no change says which rows came or
        went with others.
        """
        with self.connected() as connection:
            self.remember_partitions(connection, Partitions.of(read_facts(connection, self.table)))

    def remember_partitions(self, connection: psycopg.Connection[Any], seen: Partitions) -> None:
        """Keep the partitions that were seen, as the publication's comment."""
        comment = sql.SQL("COMMENT ON PUBLICATION {} IS {}")
        connection.execute(comment.format(sql.Identifier(self.name), sql.Literal(seen.to_json())))

    def drop(self) -> None:
        """Remove both. A slot that nobody reads keeps PostgreSQL from deleting its log, so
        remove it in time.
        """
        with self.connected() as connection:
            if _found(connection, "pg_replication_slots", "slot_name", self.name):
                connection.execute("SELECT pg_drop_replication_slot(%s)", [self.name])
            connection.execute(
                sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(self.name))
            )

    @contextmanager
    def reading(self) -> Iterator[psycopg.Connection[Any]]:
        """Give a connection that reads the slot alone. Raises ConfigurationError while another
        one does.
        """
        with self.connected() as connection:
            (alone,) = _one(
                connection,
                "SELECT pg_try_advisory_lock(hashtext('adjunct'), hashtext(%s))",
                self.name,
            )
            if not alone:
                raise ConfigurationError(
                    f"the slot {self.name!r} of table {self.table} is being read by another"
                    " process.",
                    "Wait until it has ended, or stop it: one process at a time may read a slot.",
                )
            try:
                yield connection
            finally:
                # The server notices only later that a connection was closed, and the next one may
                # come at once.
                with suppress(psycopg.Error):
                    connection.execute("SELECT pg_advisory_unlock_all()")

    def end(self, connection: psycopg.Connection[Any]) -> int:
        """Return how far the log is on disk: what is committed now is below it."""
        (position,) = _one(connection, "SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn")
        return int(position)

    def peek(
        self, connection: psycopg.Connection[Any], end: int, most: int
    ) -> list[tuple[int, bytes]]:
        """Return messages (position, pgoutput) of whole transactions up to about `end`; none is
        taken off the slot.

        Fewer than `most` messages are all that there are.
        """
        query = (
            "SELECT lsn - '0/0'::pg_lsn, data FROM pg_logical_slot_peek_binary_changes(%s,"
            " '0/0'::pg_lsn + %s::bigint, %s::int, 'proto_version', '1', 'publication_names', %s)"
        )
        with connection.cursor(binary=True) as cursor:
            cursor.execute(query, [self.name, end, most, self.name])
            return [(int(position), bytes(data)) for position, data in cursor]

    def advance(self, connection: psycopg.Connection[Any], position: int) -> None:
        """Take off the slot what was committed below this position."""
        connection.execute(
            "SELECT pg_replication_slot_advance(%s, '0/0'::pg_lsn + %s::bigint)",
            [self.name, position],
        )

    @contextmanager
    def moment(self, columns: Sequence[str]) -> Iterator[tuple[int, Rows]]:
        """Give a position in the log and the table's rows as they were there, in batches, while the
        block lasts.

        The table's partitions of the moment are those that are seen from then on.

        Transactions that committed below the position are in the rows, the others are not. Only the
        replication protocol exports such a snapshot: a second slot, which lives as long as its
        connection, stands for the moment.
        """
        server = pq.PGconn.connect(make_conninfo(self.dsn, replication="database").encode())
        try:
            _expect(server, server.status == pq.ConnStatus.OK)
            name = f'"{self.name}_moment"'
            command = f"CREATE_REPLICATION_SLOT {name} TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT"
            made = server.exec_(command.encode())
            _expect(server, made.status == pq.ExecStatus.TUPLES_OK)
            position, exported = ((made.get_value(0, column) or b"").decode() for column in (1, 2))
            high, low = position.split("/")
            with self.connected() as connection, connection.transaction():
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                connection.execute(
                    sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(exported))
                )
                facts = read_facts(connection, self.table)
                if facts.is_partitioned:
                    with self.connected() as writing:
                        self.remember_partitions(writing, Partitions.of(facts))
                yield (
                    (int(high, 16) << 32) + int(low, 16),
                    self._rows(connection, [*map(facts.column, columns)]),
                )
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

    def _rows(
        self, connection: psycopg.Connection[Any], columns: Sequence[Column]
    ) -> Iterator[list[tuple[Any, ...]]]:
        names = sql.SQL(", ").join(map(selected, columns))
        read = [_reader_of_snapshot(column) for column in columns]
        with connection.cursor(name="snapshot") as cursor:
            cursor.execute(sql.SQL("SELECT {} FROM {}").format(names, self._table))
            try:
                while batch := cursor.fetchmany(_FETCH):
                    yield [tuple(map(_call, read, row)) for row in batch]
            except psycopg.DataError as error:
                raise unreadable_error(None, self.table, error) from error


def _reader_of_snapshot(column: Column) -> Callable[[str], Any] | None:
    return readers([column])[column.name] if is_selected_as_text(column) else None


def _call(read: Callable[[str], Any] | None, value: Any) -> Any:
    return value if read is None or value is None else read(value)


def _one(connection: psycopg.Connection[Any], query: str, *values: object) -> tuple[Any, ...]:
    row = connection.execute(query, values).fetchone()
    assert row is not None
    return tuple(row)


def _found(connection: psycopg.Connection[Any], catalogue: str, column: str, name: str) -> bool:
    query = sql.SQL("SELECT 1 FROM {} WHERE {} = %s").format(
        sql.Identifier(catalogue), sql.Identifier(column)
    )
    return connection.execute(query, [name]).fetchone() is not None


def _expect(server: PGconn, fine: bool) -> None:
    if not fine:
        raise psycopg.OperationalError(server.error_message.decode())

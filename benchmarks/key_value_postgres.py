"""PostgreSQL by hand: psycopg's prepared statements in autocommit, binary; versions counted up,
conditions in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.key_value_sides import Compared, Entries, Store
from dagster_adjunct.resources.key_value_backends.postgres import PostgresSegments

if TYPE_CHECKING:
    import psycopg

_INSERT = "INSERT INTO {} VALUES (%b, 1, %b) ON CONFLICT DO NOTHING"
_REPLACE = "UPDATE {} SET version = version + 1, value = %b WHERE key = %b AND version = %s"
_GET = "SELECT version, value FROM {} WHERE key = %b"
_GET_ALL = "SELECT key, version, value FROM {} WHERE key = ANY (%b)"
_INSERT_BATCH = (
    "INSERT INTO {} SELECT key, 1, value FROM unnest(%b::bytea[], %b::bytea[]) AS e (key, value)"
)
_SCAN = "SELECT key, version, value FROM {} ORDER BY key"


class PostgresByHand:
    """One connection of the driver: in an event loop, as a table's are, or blocking (`runner` is
    None).
    """

    def __init__(self, connection: Any, table: str, runner: asyncio.Runner | None) -> None:
        self._connection, self._table, self._runner = connection, table, runner
        self._versions: dict[bytes, int] = {}

    def inserts(self, entries: Entries) -> None:
        self._each(_INSERT, entries)
        self._versions.update((key, 1) for key, _ in entries)

    def replaces(self, entries: Entries) -> None:
        self._each(_REPLACE, [(value, key, self._versions[key]) for key, value in entries])
        for key, _ in entries:
            self._versions[key] += 1

    def gets(self, keys: Sequence[bytes]) -> None:
        self._each(_GET, [(key,) for key in keys])

    def get_all(self, keys: Sequence[bytes]) -> None:
        by_key = {row[0]: row for row in self._rows(_GET_ALL.format(self._table), (list(keys),))}
        assert None not in [by_key.get(key) for key in keys]

    def insert_batches(self, batches: Sequence[Entries]) -> None:
        """A key that is there fails the whole statement."""
        columns = [([key for key, _ in batch], [value for _, value in batch]) for batch in batches]
        self._each(_INSERT_BATCH, columns, rows=None)

    def fill(self, entries: Entries) -> None:
        self.insert_batches(
            [entries[start : start + 10_000] for start in range(0, len(entries), 10_000)]
        )

    def scan(self) -> int:
        return len(self._rows(_SCAN.format(self._table), None))

    def _each(
        self, statement: str, parameters: Sequence[tuple[Any, ...]], rows: int | None = 1
    ) -> None:
        """Run a prepared statement with each of these, one after the other; each must be of so
        many rows.
        """
        query = statement.format(self._table)
        if self._runner is not None:
            self._runner.run(self._each_waiting(query, parameters, rows))
            return
        with self._connection.cursor(binary=True) as cursor:
            for arguments in parameters:
                cursor.execute(query, arguments, prepare=True)
                _check(cursor, rows)

    async def _each_waiting(
        self, query: str, parameters: Sequence[tuple[Any, ...]], rows: int | None
    ) -> None:
        async with self._connection.cursor(binary=True) as cursor:
            for arguments in parameters:
                await cursor.execute(query, arguments, prepare=True)
                _check(cursor, rows)

    def _rows(self, query: str, parameters: tuple[Any, ...] | None) -> list[tuple[Any, ...]]:
        if self._runner is None:
            return self._connection.execute(query, parameters, binary=True).fetchall()  # type: ignore[no-any-return]

        async def run() -> list[tuple[Any, ...]]:
            return await (await self._connection.execute(query, parameters, binary=True)).fetchall()  # type: ignore[no-any-return]

        return self._runner.run(run())


def _check(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any], rows: int | None) -> None:
    assert rows is None or cursor.rowcount == rows


@contextmanager
def _opened() -> Iterator[Compared]:
    import psycopg

    from tests.servers.postgres import running_server

    with (
        running_server() as server,
        asyncio.Runner() as runner,
        psycopg.connect(server.dsn(), autocommit=True) as own,
    ):
        in_loop = runner.run(psycopg.AsyncConnection.connect(server.dsn(), autocommit=True))
        for table in ("in_loop", "blocking"):
            own.execute(
                f"CREATE TABLE {table} (key bytea PRIMARY KEY, version bigint NOT NULL, value bytea"
                " NOT NULL)"
            )
        connect = {
            "host": "127.0.0.1",
            "port": str(server.port),
            "user": "adjunct",
            "dbname": "adjunct",
        }
        hands = {
            "psycopg in a loop": PostgresByHand(in_loop, "in_loop", runner),
            "psycopg, blocking": PostgresByHand(own, "blocking", None),
        }
        yield Compared(PostgresSegments(connect=connect), hands)
        runner.run(in_loop.close())


POSTGRES = Store(
    "PostgreSQL",
    _opened,
    goals={
        "single conditional inserts": "at least 0.8",
        "single conditional replaces": "at least 0.8",
        "single gets": "at least 0.8",
        "gets of 1,000 keys at once": "at least 0.9",
        "entries in order": "at least 0.7",
    },
)

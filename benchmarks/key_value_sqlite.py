"""SQLite by hand: one table, versions counted up, conditions in the statements."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.key_value_sides import FAMILY, Compared, Entries, Store
from dagster_adjunct.key_value import SqliteSegments

_IN_MEMORY = Path("/dev/shm")
_KEY = f"family = '{FAMILY}' AND key"
_OVERHEAD = "at most 30 us more"


class SqliteByHand:
    """`in_one`: many keys are read by one statement, else by one each."""

    def __init__(self, connection: sqlite3.Connection, in_one: bool) -> None:
        self._connection, self._execute, self._in_one = connection, connection.execute, in_one
        self._table = "in_one" if in_one else "one_each"
        self._execute(
            f"CREATE TABLE {self._table} (family TEXT, key BLOB, version INTEGER, value BLOB, "
            "PRIMARY KEY (family, key)) WITHOUT ROWID"
        )
        self._insert = (
            f"INSERT INTO {self._table} VALUES ('{FAMILY}', ?, 1, ?) ON CONFLICT DO NOTHING"
        )
        self._versions: dict[bytes, int] = {}

    def inserts(self, entries: Entries) -> None:
        for entry in entries:
            assert self._execute(self._insert, entry).rowcount == 1
            self._versions[entry[0]] = 1

    def replaces(self, entries: Entries) -> None:
        statement = (
            f"UPDATE {self._table} SET version = version + 1, value = ? WHERE {_KEY} = ? AND"
            " version = ?"
        )
        for key, value in entries:
            version = self._versions[key]
            assert self._execute(statement, (value, key, version)).rowcount == 1
            self._versions[key] = version + 1

    def gets(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            query = f"SELECT version, value FROM {self._table} WHERE {_KEY} = ?"
            assert self._execute(query, (key,)).fetchone() is not None

    def get_all(self, keys: Sequence[bytes]) -> None:
        if self._in_one:
            places = ", ".join("?" * len(keys))
            query = f"SELECT key, version, value FROM {self._table} WHERE {_KEY} IN ({places})"
            by_key = {row[0]: row for row in self._execute(query, keys)}
            assert None not in [by_key.get(key) for key in keys]
        else:
            query = f"SELECT version, value FROM {self._table} WHERE {_KEY} = ?"
            self._execute("BEGIN")
            assert None not in [self._execute(query, (key,)).fetchone() for key in keys]
            self._execute("COMMIT")

    def insert_batches(self, batches: Sequence[Entries]) -> None:
        for batch in batches:
            self._execute("BEGIN IMMEDIATE")
            assert self._connection.executemany(self._insert, batch).rowcount == len(batch)
            self._execute("COMMIT")

    def fill(self, entries: Entries) -> None:
        self.insert_batches([entries])

    def scan(self) -> int:
        query = (
            f"SELECT key, version, value FROM {self._table} WHERE family = '{FAMILY}' ORDER BY key"
        )
        return sum(1 for _ in self._execute(query))


@contextmanager
def _opened(folder: Path | None) -> Iterator[Compared]:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        connection = sqlite3.connect(Path(name) / "hand.sqlite", isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        hands = {
            "in_one": SqliteByHand(connection, True),
            "one_each": SqliteByHand(connection, False),
        }
        yield Compared(SqliteSegments(Path(name) / "ours.sqlite"), hands)
        connection.close()


# What a request costs besides the disk, whose times differ by more than that.
SQLITE_WITHOUT_DISK = Store(
    "SQLite, in memory where there is such a folder",
    partial(_opened, _IN_MEMORY if _IN_MEMORY.is_dir() else None),
    singles=20_000,
    goals={
        "single conditional inserts": _OVERHEAD,
        "single conditional replaces": _OVERHEAD,
        "single gets": _OVERHEAD,
        "gets of 1,000 keys at once": "at least 0.9",
        "entries in order": "at least 0.7",
    },
)
SQLITE = Store(
    "SQLite, on disk",
    partial(_opened, None),
    goals={
        "conditional inserts in batches of 50": "at least 5,000/s",
        "gets of 50 keys at once": "at least 20,000/s",
        "gets of 1,000 keys at once": "at least 0.9",
        "entries in order": "at least 0.7",
    },
)

"""A table of accounts in a real PostgreSQL, clerks who change it all the time, and what it holds by
its own account.

Each transaction leaves the sum of all balances as it was, so a reader that sees half of one sees
another sum.
"""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import psycopg

from dagster_adjunct.examples.postgres_changes.slot import Slot
from tests.servers.postgres import PostgresServer

COLUMNS = (
    "id BIGINT, owner STRING, balance BIGINT, rate DECIMAL(12,4), weight DOUBLE, active BOOLEAN,"
    " opened TIMESTAMP, note STRING"
)
_TABLE = """
    id bigint PRIMARY KEY, owner text NOT NULL, balance bigint NOT NULL, rate numeric(12,4), weight double precision,
    active boolean, opened timestamptz, note text
"""
ACCOUNTS = 200
SUM = ACCOUNTS * 1000
_PAUSE = 0.01
_OWNERS = [
    "Ærø",
    'quoted "text"',
    "back\\slash",
    "line\nbreak",
    "✈",
    "",
    "O'Hare",
    "{json}",
    "tab\t",
]


@dataclass
class Bank:
    """One table, of its own name, with a capture's slot name beside it."""

    server: PostgresServer
    name: str = field(default_factory=lambda: f"accounts_{uuid.uuid4().hex[:8]}")
    committed: int = 0
    refused: int = 0

    @property
    def table(self) -> str:
        return f"public.{self.name}"

    @property
    def slot(self) -> Slot:
        return Slot(self.server.dsn(), self.table, f"slot_{self.name}")

    def open(self) -> None:
        """Make the table, with replica identity FULL and its first accounts."""
        self.server.execute(f"CREATE TABLE {self.table} ({_TABLE})")
        self.server.execute(f"ALTER TABLE {self.table} REPLICA IDENTITY FULL")

    def fill(self) -> None:
        self.server.execute(
            f"INSERT INTO {self.table} SELECT n, 'first ' || n, 1000, n / 7.0, n / 3.0, n % 2 = 0, "
            "timestamptz '2013-01-01 00:00:00.123456Z' + n * interval '1 hour', NULL "
            f"FROM generate_series(1, {ACCOUNTS}) n"
        )

    def close(self) -> None:
        self.slot.drop()
        self.server.execute(f"DROP TABLE {self.table}")

    def rows(self, columns: str = "*") -> list[tuple[Any, ...]]:
        """What the table holds, by key."""
        return self.server.execute(f"SELECT {columns} FROM {self.table} ORDER BY id")

    @contextmanager
    def clerks(self, count: int = 2, *, seed: int = 1) -> Iterator[Callable[[int], None]]:
        """Let clerks work side by side while the block lasts; call what it gives to wait for N
        transactions.
        """
        stop, failures = threading.Event(), []

        def work(clerk: int) -> None:
            try:
                with psycopg.connect(self.server.dsn()) as connection:
                    dice = random.Random(seed * 100 + clerk)
                    while not stop.is_set():
                        self._transaction(
                            connection, dice, new=clerk * 1_000_000 + dice.randrange(1000, 999_999)
                        )
                        stop.wait(_PAUSE)
            except BaseException as error:  # noqa: BLE001 - shown by the block
                failures.append(error)

        threads = [
            threading.Thread(target=work, args=[clerk], daemon=True)
            for clerk in range(1, count + 1)
        ]

        def wait(transactions: int) -> None:
            until = self.committed + transactions
            while self.committed < until and not failures:
                stop.wait(0.005)

        with ExitStack() as stack:
            for thread in threads:
                thread.start()
                stack.callback(thread.join, 60)
            stack.callback(stop.set)
            yield wait
        assert not failures, failures

    def _transaction(
        self, connection: psycopg.Connection[Any], dice: random.Random, new: int
    ) -> None:
        """Do one piece of work, in one transaction; another clerk's deadlock or new key makes it
        nothing.
        """
        work = dice.choices(
            [
                self._transfer,
                self._open_account,
                self._close_account,
                self._renumber,
                self._describe,
                self._undo,
            ],
            [5, 3, 2, 2, 2, 1],
        )[0]
        try:
            with connection.transaction():
                work(connection, dice, new)
            self.committed += 1
        except (psycopg.errors.DeadlockDetected, psycopg.errors.UniqueViolation):
            self.refused += 1

    def _some(
        self, connection: psycopg.Connection[Any], dice: random.Random, count: int
    ) -> list[int]:
        ids = [row[0] for row in connection.execute(f"SELECT id FROM {self.table} ORDER BY id")]
        wanted = sorted(dice.sample(ids, count))
        locked = f"SELECT id FROM {self.table} WHERE id = ANY(%s) ORDER BY id FOR UPDATE"
        return [row[0] for row in connection.execute(locked, [wanted])]

    def _transfer(self, connection: psycopg.Connection[Any], dice: random.Random, new: int) -> None:
        ids = self._some(connection, dice, dice.randrange(2, 9))
        amounts = [dice.randrange(-50, 50) for _ in ids[1:]]
        for account, amount in zip(ids, [*amounts, -sum(amounts)], strict=False):
            connection.execute(
                f"UPDATE {self.table} SET balance = balance + %s, weight = %s WHERE id = %s",
                [amount, dice.random(), account],
            )

    def _open_account(
        self, connection: psycopg.Connection[Any], dice: random.Random, new: int
    ) -> None:
        owner = dice.choice(_OWNERS)
        connection.execute(
            f"INSERT INTO {self.table} VALUES (%s, %s, 0, %s, NULL, %s, now(), %s)",
            [
                new,
                owner,
                dice.randrange(10**8) / 10**4,
                dice.choice([True, False, None]),
                dice.choice([None, "n" * 9]),
            ],
        )
        for giver in self._some(connection, dice, 1):
            connection.execute(
                f"UPDATE {self.table} SET balance = balance - 7 WHERE id = %s", [giver]
            )
            connection.execute(
                f"UPDATE {self.table} SET balance = balance + 7 WHERE id = %s", [new]
            )

    def _close_account(
        self, connection: psycopg.Connection[Any], dice: random.Random, new: int
    ) -> None:
        ids = self._some(connection, dice, 2)
        if len(ids) == 2:
            closed = f"DELETE FROM {self.table} WHERE id = %s RETURNING balance"
            ((left,),) = connection.execute(closed, [ids[0]]).fetchall()
            connection.execute(
                f"UPDATE {self.table} SET balance = balance + %s WHERE id = %s", [left, ids[1]]
            )

    def _renumber(self, connection: psycopg.Connection[Any], dice: random.Random, new: int) -> None:
        """Give accounts other numbers: a new one, and in a ring, each that of the next."""
        ids = self._some(connection, dice, 3)
        steps = list(pairwise(ids))
        for old, after in [(ids[-1], new), *reversed(steps)] if ids else []:
            connection.execute(f"UPDATE {self.table} SET id = %s WHERE id = %s", [after, old])
        if ids and dice.random() < 0.5:
            connection.execute(f"UPDATE {self.table} SET id = %s WHERE id = %s", [ids[0], new])

    def _describe(self, connection: psycopg.Connection[Any], dice: random.Random, new: int) -> None:
        """Give an account a text so long that later changes of the account do not repeat it."""
        for account in self._some(connection, dice, 1):
            text = "".join(dice.choices("abcdefghijklmnop", k=6000))
            connection.execute(f"UPDATE {self.table} SET note = %s WHERE id = %s", [text, account])

    def _undo(self, connection: psycopg.Connection[Any], dice: random.Random, new: int) -> None:
        """Take back a part, keep another; then take back all."""
        for account in self._some(connection, dice, 1):
            with connection.transaction():
                connection.execute(f"DELETE FROM {self.table} WHERE id = %s", [account])
                raise psycopg.Rollback
            connection.execute(
                f"UPDATE {self.table} SET active = NOT active WHERE id = %s", [account]
            )
        if dice.random() < 0.5:
            connection.execute(f"UPDATE {self.table} SET balance = balance + 1")
            raise psycopg.Rollback

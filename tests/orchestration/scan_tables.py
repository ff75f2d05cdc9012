"""Scans of tags at gates, tables of tags in real stores, and a process of its own that counts
the scans.
"""

from __future__ import annotations

import random
import sqlite3
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.rate import RateLimit
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.step_world import StepWorld

FIRST = datetime(2026, 3, 1, tzinfo=UTC)
GATES, TAGS = 64, 60
COLUMNS = {"tag": "string", "gate": "string", "at": "timestamp", "scans": "bigint"}
Scan = tuple[str, str, datetime]
Look = Callable[[str], Sequence[tuple[Any, ...]]]


def scanned(seed: int, count: int) -> list[Scan]:
    """Scans of several days in the order in which they were sent: hours late, some of equal
    times.
    """
    chosen = random.Random(seed)
    scans = []
    for number in range(count):
        late = timedelta(minutes=chosen.choice([0, 0, 0, 5, 240, 1500]))
        at = FIRST + timedelta(minutes=10 * number) - late
        scans.append((f"gate-{chosen.randrange(GATES)}", f"tag-{chosen.randrange(TAGS)}", at))
    return scans


def newest(scans: Sequence[Scan]) -> dict[str, datetime]:
    """Return when each tag was scanned last."""
    times: dict[str, datetime] = {}
    for _, tag, at in scans:
        times[tag] = max(times.get(tag, at), at)
    return times


def send(world: StepWorld, scans: Sequence[Scan]) -> None:
    """Append scans to a stream that is partitioned by gate."""
    if "scans" not in world.streams.list_streams():
        world.stream("scans", "gate", 8, gate="string", tag="string", at="timestamp")
    for start in range(0, len(scans), 300):
        world.send("scans", *scans[start : start + 300])


class Store:
    """The table of tags in one store, and how to look at it without Adjunct."""

    def __init__(self, function: Any, look: Look) -> None:
        self.function, self.look = function, look

    def table(self, **declared: Any) -> RemoteTable[Any, Any, Any]:
        return RemoteTable(
            "tags", key="tag", read_function=self.function, write_function=self.function, **declared
        )

    def times(self) -> dict[str, datetime]:
        return {tag: _instant(at) for tag, at in self.look("SELECT tag, at FROM tags")}

    def counts(self) -> dict[str, int]:
        return dict(self.look("SELECT tag, scans FROM tags"))  # type: ignore[arg-type]


def _instant(value: Any) -> datetime:
    return value if isinstance(value, datetime) else datetime.fromisoformat(value).astimezone(UTC)


def sqlite_store(folder: Path) -> Store:
    path = folder / "tags.sqlite"

    def look(statement: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(path, timeout=30) as connection:
            return connection.execute(statement).fetchall()

    return Store(SqliteTable(path, "tags", "tag", columns=COLUMNS, create=True), look)


def postgres_store(port: int) -> Store:
    import psycopg

    connect = {"host": "127.0.0.1", "port": port, "user": "adjunct", "dbname": "adjunct"}

    def look(statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(**connect, autocommit=True) as connection:  # type: ignore[arg-type]
            cursor = connection.execute(statement)  # type: ignore[call-overload]
            return list(cursor.fetchall()) if cursor.description else []

    return Store(
        PostgresTable(connect=connect, table="tags", key="tag", columns=COLUMNS, create=True), look
    )


def counting(store: Store, name: str = "counting", **declared: Any) -> Application:
    """An application that counts each scan twice, by two rows of one message."""
    app = Application(name, max_batch_records=100_000)
    table = app.table(store.table(idempotent=True, **declared))
    stream = app.input_stream("lake.scans").map("tag", "gate").flat_map("array(1, 2) as part")
    stream.update(table, set=["gate"], add={"scans": "1"}, if_missing=[])
    return app


def main(folder: str, port: str) -> None:
    """Count the scans in the folder's lake in PostgreSQL, slowly, in a session of this process's
    own.
    """
    from dagster_adjunct.resources.spark.session import new_session

    store = postgres_store(int(port))
    world = StepWorld(
        open_lake(Path(folder) / "lake"), Path(folder), lambda: new_session({}, master="local[2]")
    )
    world.run(
        counting(store, batch_size=10, rate_limit=RateLimit(writes_per_second=200)), run="killed"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Backends of counters and last messages, each reached directly or through a proxy, and stopped
and started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.key_value_rows import KeyValueRows
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.redis import RedisTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from tests.servers.dynamodb import REGION

COLUMNS = {
    "id": "string",
    "total": "bigint",
    "seen": "bigint",
    "origin": "string",
    "number": "bigint",
}
HANGS = 60.0
"""Seconds that only a request that hangs takes, on a busy machine too: those that are lost end
their connection.
"""
_numbers = count()


@dataclass(frozen=True)
class Reached:
    """`store(name, port)` is the function over the table of that name; another port is a
    proxy's.
    """

    store: Callable[..., Any]
    port: int | None = None  # of the server, where there is one
    commits: tuple[bytes, ...] = ()  # what a request holds one of, where it makes a write stand
    stop: Callable[[], None] = lambda: None
    start: Callable[[], None] = lambda: None

    # what another process needs to reach it
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Callable[[str], dict[str, Any]] | None = (
        None  # of a function that can't be described as it is here
    )

    def declared(self, name: str) -> dict[str, Any]:
        """The function as another process can make it."""
        function = self.store(name)
        arguments = function.to_dict() if self.arguments is None else self.arguments(name)
        return {
            "function": f"{type(function).__module__}.{type(function).__name__}",
            "arguments": arguments,
        }

    def new_name(self) -> str:
        return f"exact_{next(_numbers)}"


def memory(request: pytest.FixtureRequest, folder: Path) -> Reached:
    return Reached(MemoryTable)


def sqlite(request: pytest.FixtureRequest, folder: Path) -> Reached:
    return Reached(
        lambda name: SqliteTable(folder / "exact.sqlite", name, "id", columns=COLUMNS, create=True)
    )


def key_value(request: pytest.FixtureRequest, folder: Path) -> Reached:
    """In the SQLite file beside the lake, which is where a local lake keeps key-value tables."""
    return Reached(
        lambda name: KeyValueRows(
            str(folder / "lake"), "exact", name, "id", columns=COLUMNS, create=True
        )
    )


def postgres(request: pytest.FixtureRequest, folder: Path) -> Reached:
    server = request.getfixturevalue("postgres_server")

    def store(name: str, port: int = server.port) -> PostgresTable:
        connect = {"host": "127.0.0.1", "port": str(port), "user": "adjunct", "dbname": "adjunct"}
        return PostgresTable(name, "id", columns=COLUMNS, create=True, connect=connect)

    return Reached(store, server.port, (b"COMMIT",), server.stop, server.start)


def redis(request: pytest.FixtureRequest, folder: Path) -> Reached:
    server = request.getfixturevalue("redis_server")

    def store(name: str, port: int = server.port) -> RedisTable:
        return RedisTable(
            name, "id", columns=COLUMNS, url=f"redis://127.0.0.1:{port}/0", timeout=HANGS
        )

    return Reached(store, server.port, (b"EVALSHA",), lambda: server.stop(kill=True), server.start)


def dynamodb(request: pytest.FixtureRequest, folder: Path) -> Reached:
    server = request.getfixturevalue("dynamodb_on_disk")

    def store(name: str, port: int = server.port) -> DynamoDbTable:
        where = {**server.session(), "endpoint_url": f"http://127.0.0.1:{port}"}
        times = {"connect_timeout": HANGS, "read_timeout": HANGS}
        return DynamoDbTable(name, "id", columns=COLUMNS, create=True, **times, **where)

    def declared(name: str) -> dict[str, Any]:
        where = {"region": REGION, "endpoint_url": server.endpoint}
        return {"table": name, "key": "id", "columns": COLUMNS, "create": True, **where}

    # The end of UpdateItem and of BatchWriteItem, and of no request that reads.
    return Reached(
        store, server.port, (b"teItem",), server.stop, server.start, server.env, declared
    )


SERVERS = [
    pytest.param(postgres, id="postgres", marks=pytest.mark.server),
    pytest.param(redis, id="redis", marks=pytest.mark.server),
    pytest.param(dynamodb, id="dynamodb", marks=pytest.mark.server),
]
# DynamoDB Local takes its time, above all to start.
QUICK = [
    *SERVERS[:2],
    pytest.param(dynamodb, id="dynamodb", marks=[pytest.mark.server, pytest.mark.long]),
]
STORES = [
    pytest.param(memory, id="memory"),
    pytest.param(sqlite, id="sqlite"),
    pytest.param(key_value, id="key-value"),
    *SERVERS,
]
PROCESSES = [pytest.param(sqlite, id="sqlite"), pytest.param(key_value, id="key-value"), *QUICK]

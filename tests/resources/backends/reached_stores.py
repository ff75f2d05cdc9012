"""Backends of counters and last messages, each reached directly or through a proxy, and stopped and started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.resources.backends import DynamoDbTable, PostgresTable, RedisTable, SqliteTable
from dagster_adjunct.resources.tables import MemoryTable
from tests.servers.dynamodb import DynamoDbServer, start_dynamodb

COLUMNS = {"id": "string", "total": "bigint", "seen": "bigint", "origin": "string", "number": "bigint"}
_numbers = count()


@dataclass(frozen=True)
class Reached:
    """`store(name, port)` is the function over the table of that name; another port is a proxy's."""

    store: Callable[..., Any]
    port: int | None = None  # of the server, where there is one
    commits: tuple[bytes, ...] = ()  # what a request holds one of, where it makes a write stand
    stop: Callable[[], None] = lambda: None
    start: Callable[[], None] = lambda: None

    def new_name(self) -> str:
        return f"exact_{next(_numbers)}"


def memory(request: pytest.FixtureRequest, folder: Path) -> Reached:
    return Reached(MemoryTable)


def sqlite(request: pytest.FixtureRequest, folder: Path) -> Reached:
    return Reached(lambda name: SqliteTable(folder / "exact.sqlite", name, "id", columns=COLUMNS, create=True))


def postgres(request: pytest.FixtureRequest, folder: Path) -> Reached:
    server = request.getfixturevalue("postgres_server")

    def store(name: str, port: int = server.port) -> PostgresTable:
        connect = {"host": "127.0.0.1", "port": str(port), "user": "adjunct", "dbname": "adjunct"}
        return PostgresTable(name, "id", columns=COLUMNS, create=True, connect=connect)

    return Reached(store, server.port, (b"COMMIT",), server.stop, server.start)


def redis(request: pytest.FixtureRequest, folder: Path) -> Reached:
    server = request.getfixturevalue("redis_server")

    def store(name: str, port: int = server.port) -> RedisTable:
        return RedisTable(name, "id", columns=COLUMNS, url=f"redis://127.0.0.1:{port}/0", timeout=1.0)

    return Reached(store, server.port, (b"EVALSHA",), lambda: server.stop(kill=True), server.start)


def dynamodb(request: pytest.FixtureRequest, folder: Path) -> Reached:
    return _dynamodb(request.getfixturevalue("dynamodb_server"))


def lasting_dynamodb(request: pytest.FixtureRequest, folder: Path) -> Reached:
    """One that keeps what it has while it is stopped."""
    lasting = start_dynamodb(on_disk=True)
    server = lasting.__enter__()
    request.addfinalizer(lambda: lasting.__exit__(None, None, None))
    return _dynamodb(server)


def _dynamodb(server: DynamoDbServer) -> Reached:
    def store(name: str, port: int = server.port) -> DynamoDbTable:
        session = server.session() | {"endpoint_url": f"http://127.0.0.1:{port}"}
        return DynamoDbTable(name, "id", columns=COLUMNS, create=True, read_timeout=2.0, **session)

    return Reached(store, server.port, (b"UpdateItem", b"PutItem", b"BatchWriteItem"), server.stop, server.start)


def dynamodb(request: pytest.FixtureRequest, folder: Path) -> Reached:
    server = request.getfixturevalue("dynamodb_on_disk")

    def store(name: str, port: int = server.port) -> DynamoDbTable:
        where = {**server.session(), "endpoint_url": f"http://127.0.0.1:{port}"}
        return DynamoDbTable(name, "id", columns=COLUMNS, create=True, connect_timeout=1.0, read_timeout=3.0, **where)

    # The end of UpdateItem and of BatchWriteItem, and of no request that reads.
    return Reached(store, server.port, b"teItem", server.stop, server.start)


SERVERS = [
    pytest.param(dynamodb, id="dynamodb", marks=pytest.mark.server),
    pytest.param(postgres, id="postgres", marks=pytest.mark.server),
    pytest.param(redis, id="redis", marks=pytest.mark.server),
    pytest.param(dynamodb, id="dynamodb", marks=pytest.mark.server),
]
# Those that are still what they were when they are started again; DynamoDB Local takes its time.
LASTING = [*SERVERS[:2], pytest.param(lasting_dynamodb, id="dynamodb", marks=[pytest.mark.server, pytest.mark.long])]
STORES = [pytest.param(memory, id="memory"), pytest.param(sqlite, id="sqlite"), *SERVERS]

"""The backends that `test_every_backend.py` runs on: each makes functions of empty tables with the
same columns.

A backend is a function that gets pytest's `request` and a scratch folder, and returns what makes a
new, empty store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.key_value_rows import KeyValueRows
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.redis import RedisTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.functions import (
    TableReadFunction,
    TableWriteFunction,
    record_not_found_error,
)
from tests.resources.key_value_backends import segment_stores
from tests.resources.key_value_backends.segment_stores import SegmentStore

COLUMNS = {
    "id": "string",
    "a": "int",
    "b": "string",
    "c": "double",
    "n": "bigint",
    "at": "timestamp",
    "tags": "array<string>",
    "doc": "json",
}
NewStore = Callable[[], Any]
Columns = Mapping[str, str]
_numbers = count()


class SingleRequests(TableReadFunction, TableWriteFunction):
    """The least that a store can offer: no batches, no insert-if-absent, no transactions."""

    def __init__(self):
        self.records = {}

    async def get(self, key, *args):
        record = self.records.get(key)
        return None if record is None else dict(record)  # later updates change the stored one

    async def put(self, key, value, *args):
        self.records[key] = dict(value)

    async def delete(self, key, *args):
        self.records.pop(key, None)

    async def update(self, key, update, *args):
        if key not in self.records:
            raise record_not_found_error([key])
        self.records[key] |= update


def single_requests(
    request: pytest.FixtureRequest, folder: Path, columns: Columns = COLUMNS
) -> NewStore:
    return SingleRequests


def memory(request: pytest.FixtureRequest, folder: Path, columns: Columns = COLUMNS) -> NewStore:
    return lambda: MemoryTable(f"suite_{next(_numbers)}")


def sqlite(request: pytest.FixtureRequest, folder: Path, columns: Columns = COLUMNS) -> NewStore:
    path = folder / "suite.sqlite"
    return lambda: SqliteTable(path, f"suite_{next(_numbers)}", "id", columns=columns, create=True)


def key_value_in(store: Callable[..., SegmentStore]) -> Callable[..., NewStore]:
    """Make functions over key-value tables in a backend of these."""

    def key_value(
        request: pytest.FixtureRequest, folder: Path, columns: Columns = COLUMNS
    ) -> NewStore:
        lake, backend = open_lake(f"memory://{folder.name}"), store(request, folder).backend()
        return lambda: KeyValueRows(
            lake,
            "suite",
            f"t{next(_numbers)}",
            "id",
            columns=columns,
            create=True,
            partitions=2,
            stored_in=backend,
        )

    return key_value


def postgres(request: pytest.FixtureRequest, folder: Path, columns: Columns = COLUMNS) -> NewStore:
    server = request.getfixturevalue("postgres_server")
    connect = {
        "host": "127.0.0.1",
        "port": str(server.port),
        "user": "adjunct",
        "dbname": "adjunct",
    }
    return lambda: PostgresTable(
        f"suite_{next(_numbers)}", "id", columns=columns, create=True, connect=connect
    )


def redis(request: pytest.FixtureRequest, folder: Path, columns: Columns = COLUMNS) -> NewStore:
    server = request.getfixturevalue("redis_server")
    return lambda: RedisTable(f"suite_{next(_numbers)}", "id", columns=columns, url=server.url())


def dynamodb(request: pytest.FixtureRequest, folder: Path, columns: Columns = COLUMNS) -> NewStore:
    session = request.getfixturevalue("dynamodb_server").session()
    return lambda: DynamoDbTable(
        f"suite_{next(_numbers)}", "id", columns=columns, create=True, **session
    )


# They leave marks alone where they are told that there are some.
MARKS_IN_THE_RECORD = {DynamoDbTable, KeyValueRows}
SMALLER_FLOATS = {DynamoDbTable}  # of 1E-130 to 9.9E+125
_SERVERS: Sequence[Any] = [
    pytest.param(make, marks=pytest.mark.server) for make in (postgres, redis, dynamodb)
]
_KEY_VALUE: Sequence[Any] = [
    pytest.param(key_value_in(segment_stores.sqlite), id="key-value"),
    pytest.param(
        key_value_in(segment_stores.objects_in_memory),
        id="key-value-objects",
        marks=pytest.mark.long,
    ),
    *[
        pytest.param(
            key_value_in(store),
            id=f"key-value-{store.__name__}",
            marks=[pytest.mark.server, pytest.mark.long],
        )
        for store in (segment_stores.postgres, segment_stores.dynamodb)
    ],
]
TYPED_STORES: Sequence[Any] = [sqlite, *_KEY_VALUE, *_SERVERS]
"""Those whose columns have types."""
WHOLE_STORES: Sequence[Any] = [memory, *TYPED_STORES]
"""Those that do all that a store may do."""
ARROW_STORES: Sequence[Any] = _SERVERS[:1]
"""Those that take Arrow batches as they are."""
BACKENDS: Sequence[Any] = [single_requests, *WHOLE_STORES]

"""Backends of key-value tables under test, one function a kind: each gives a way to reach a store.

Those that need a server get it by `request.getfixturevalue`, and say so:
`marks=pytest.mark.server`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest

from dagster_adjunct.resources.key_value.segment import SegmentBackend, TableId, run_without_loop
from dagster_adjunct.resources.key_value_backends.dynamodb import DynamoDbSegments
from dagster_adjunct.resources.key_value_backends.objects.segment import ObjectSegments
from dagster_adjunct.resources.key_value_backends.postgres import PostgresSegments
from dagster_adjunct.resources.key_value_backends.sqlite import SqliteSegments
from dagster_adjunct.resources.objects.lake import open_lake
from tests.resources.key_value_backends.segment_handle import Run
from tests.servers.dynamodb import REGION, DynamoDbServer

_numbers = count()


@dataclass(frozen=True)
class SegmentStore:
    """`backend()` is a new object each time, as another process would make it."""

    backend: Callable[[], SegmentBackend]
    # what another process needs to reach it
    environment: Mapping[str, str] = field(default_factory=dict)
    in_loop: bool = True  # whether its segments are awaited in an event loop

    @contextmanager
    def running(self) -> Iterator[Run]:
        """A context with what runs the coroutines of segments."""
        if not self.in_loop:
            yield run_without_loop
            return
        with asyncio.Runner() as runner:
            yield runner.run


def new_table_id() -> TableId:
    """Return what no table has been made as."""
    return TableId("suite", f"table-{next(_numbers)}", secrets.token_hex(8))


def sqlite(request: pytest.FixtureRequest, folder: Path) -> SegmentStore:
    return SegmentStore(lambda: SqliteSegments(folder / "key values?.sqlite"))


def dynamodb(request: pytest.FixtureRequest, folder: Path) -> SegmentStore:
    server: DynamoDbServer = request.getfixturevalue("dynamodb_server")
    environment = {"KEY_VALUES_ID": "adjuncttest", "KEY_VALUES_SECRET": "adjunct-test-secret-key"}
    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    for name, value in environment.items():
        patch.setenv(name, value)
    return SegmentStore(
        lambda: DynamoDbSegments(
            region=REGION,
            endpoint_url=server.endpoint,
            credentials_env=tuple(environment),
            prefix="suite-",
        ),
        environment,
    )


def objects_in_a_folder(request: pytest.FixtureRequest, folder: Path) -> SegmentStore:
    return SegmentStore(lambda: ObjectSegments(str(folder / "lake")))


def objects_in_memory(request: pytest.FixtureRequest, folder: Path) -> SegmentStore:
    kept = open_lake(f"memory://{folder.name}")  # a store lives as long as somebody refers to it
    return SegmentStore(lambda: ObjectSegments(kept))


def objects_in_s3(request: pytest.FixtureRequest, folder: Path) -> SegmentStore:
    server = request.getfixturevalue("versitygw")
    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    server.set_in(patch)
    url = server.url()
    return SegmentStore(lambda: ObjectSegments(url), server.env)


def postgres(request: pytest.FixtureRequest, folder: Path) -> SegmentStore:
    server = request.getfixturevalue("postgres_server")
    connect = {
        "host": "127.0.0.1",
        "port": str(server.port),
        "user": "adjunct",
        "dbname": "adjunct",
    }
    return SegmentStore(lambda: PostgresSegments(connect=connect))


def postgres_without_loop(request: pytest.FixtureRequest, folder: Path) -> SegmentStore:
    return replace(postgres(request, folder), in_loop=False)


def dynamodb_without_loop(request: pytest.FixtureRequest, folder: Path) -> SegmentStore:
    return replace(dynamodb(request, folder), in_loop=False)


def objects_without_loop(request: pytest.FixtureRequest, folder: Path) -> SegmentStore:
    return replace(objects_in_memory(request, folder), in_loop=False)


SEGMENT_STORES = [
    pytest.param(dynamodb, id="dynamodb", marks=pytest.mark.server),
    pytest.param(sqlite, id="sqlite"),
    pytest.param(objects_in_a_folder, id="objects-in-a-folder"),
    pytest.param(objects_in_memory, id="objects-in-memory"),
    pytest.param(objects_in_s3, id="objects-in-s3", marks=pytest.mark.server),
    pytest.param(postgres, id="postgres", marks=pytest.mark.server),
]
WITHOUT_LOOP = [
    pytest.param(objects_without_loop, id="objects-without-loop"),
    pytest.param(
        postgres_without_loop,
        id="postgres-without-loop",
        marks=[pytest.mark.server, pytest.mark.long],
    ),
    pytest.param(
        dynamodb_without_loop,
        id="dynamodb-without-loop",
        marks=[pytest.mark.server, pytest.mark.long],
    ),
]
# Asked so often that slow servers take long: those at length only.
QUICK_STORES = [
    pytest.param(objects_in_memory, id="objects-in-memory"),
    pytest.param(sqlite, id="sqlite"),
    pytest.param(postgres, id="postgres", marks=pytest.mark.server),
    pytest.param(dynamodb, id="dynamodb", marks=[pytest.mark.server, pytest.mark.long]),
    *WITHOUT_LOOP,
    pytest.param(objects_in_a_folder, id="objects-in-a-folder", marks=pytest.mark.long),
    pytest.param(objects_in_s3, id="objects-in-s3", marks=[pytest.mark.server, pytest.mark.long]),
]

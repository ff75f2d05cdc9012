"""A lake with a manager of key-value tables over one backend, and processes that work at its
tables.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.key_value import (
    DynamoDbSegments,
    KeyValueTable,
    KeyValueTableConfiguration,
    KeyValueTableManager,
    TextSerializer,
)
from dagster_adjunct.resources.key_value.segment import SegmentBackend
from dagster_adjunct.resources.key_value_backends.postgres import PostgresSegments
from dagster_adjunct.resources.objects.lake import open_lake
from tests.resources.key_value_backends.segment_stores import (
    SegmentStore,
    objects_in_a_folder,
    objects_in_s3,
    sqlite,
)
from tests.servers.dynamodb import REGION, DynamoDbServer
from tests.servers.postgres import PostgresServer
from tests.servers.tcp_proxy import Chooser, TcpProxy

SCOPE = "histories"
TEXT = TextSerializer()
_numbers = count()
# Its children have what it has imported, and none of this process's threads and connections.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.end_to_end.key_values.workers"])

Table = KeyValueTable[str, str]
Work = Callable[..., None]
WorldMaker = Callable[[pytest.FixtureRequest, Path], AbstractContextManager["World"]]


@dataclass(frozen=True)
class World:
    """`environment` is what another process needs to reach the backend.

    `at_one_moment`: a `get_all` reads all keys of a family as they stand at one.
    `proxy` lies before the server that `backend` reaches; `direct` reaches the same one without it.
    """

    folder: Path
    backend: Callable[[], SegmentBackend]
    environment: Mapping[str, str] = field(default_factory=dict)
    at_one_moment: bool = True
    proxy: TcpProxy | None = None
    direct: Callable[[], SegmentBackend] | None = None

    def manager(self) -> KeyValueTableManager:
        """Return a manager such as another process would have."""
        return KeyValueTableManager(open_lake(str(self.folder / "metadata")), self.backend())

    def table(self, name: str | None = None, *, partitions: int = 3) -> Table:
        """Return a new table, or the one of this name."""
        manager, name = self.manager(), name or f"table-{next(_numbers)}"
        manager.create_scope(SCOPE)
        manager.create(SCOPE, name, KeyValueTableConfiguration(partitions=partitions))
        return manager.open(SCOPE, name, key=TEXT, value=TEXT)

    def over(self, backend: SegmentBackend, table: Table) -> Table:
        """Return another handle of a table, over this backend."""
        return KeyValueTable(table.id, table.configuration, backend, TEXT, TEXT)

    def process(self, work: Work, *arguments: Any) -> BaseProcess:
        """Start a process that does this work, and write its output to the file that is the
        work's first argument.
        """
        process = _processes.Process(
            target=_in_environment, args=(dict(self.environment), work, *arguments)
        )
        process.start()
        return process

    @contextmanager
    def troubled(self, trouble: Chooser | None) -> Iterator[None]:
        """Let this befall requests and answers meanwhile."""
        if trouble is not None:
            self.network.choose = trouble
        try:
            yield
        finally:
            if trouble is not None:
                self.network.calm()

    @property
    def network(self) -> TcpProxy:
        """What lies before the server."""
        assert self.proxy is not None
        return self.proxy

    @contextmanager
    def processes(self, *started: BaseProcess) -> Iterator[None]:
        """Wait for these processes to end by themselves, and see that none has failed; none
        outlives this.
        """
        try:
            yield
            for process in started:
                process.join(60)
            assert [process.exitcode for process in started] == [0] * len(started)
        finally:
            for process in started:
                process.kill()
                process.join()


def _in_environment(environment: dict[str, str], work: Work, *arguments: Any) -> None:
    os.environ.update(environment)
    work(*arguments)


class Notes:
    """Lines of JSON that outlive whoever writes them: each is with the system once `add`
    returns.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, note: Any) -> None:
        os.write(self._file, json.dumps(note).encode() + b"\n")


def notes(path: Path) -> list[Any]:
    """Return what was noted so far."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A world of the backend that the test is parametrised with."""
    with request.param(request, tmp_path) as made:
        yield made


def _local(store: Callable[[pytest.FixtureRequest, Path], SegmentStore]) -> WorldMaker:
    @contextmanager
    def made(request: pytest.FixtureRequest, folder: Path) -> Iterator[World]:
        there = store(request, folder)
        yield World(folder, there.backend, there.environment)

    return made


@contextmanager
def _postgres(request: pytest.FixtureRequest, folder: Path) -> Iterator[World]:
    server: PostgresServer = request.getfixturevalue("postgres_server")
    with TcpProxy(server.port).running() as proxy:

        def backend(port: int) -> SegmentBackend:
            connect = {
                "host": "127.0.0.1",
                "port": str(port),
                "user": "adjunct",
                "dbname": "adjunct",
            }
            return PostgresSegments(connect=connect, request_timeout=5)

        yield World(
            folder, lambda: backend(proxy.port), proxy=proxy, direct=lambda: backend(server.port)
        )


@contextmanager
def _dynamodb(request: pytest.FixtureRequest, folder: Path) -> Iterator[World]:
    server: DynamoDbServer = request.getfixturevalue("dynamodb_server")
    environment = {"KEY_VALUES_ID": "adjuncttest", "KEY_VALUES_SECRET": "adjunct-test-secret-key"}
    with TcpProxy(server.port).running() as proxy, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)

        def backend(port: int) -> SegmentBackend:
            endpoint = f"http://127.0.0.1:{port}"
            return DynamoDbSegments(
                region=REGION,
                endpoint_url=endpoint,
                credentials_env=tuple(environment),
                read_timeout=5,
            )

        yield World(
            folder,
            lambda: backend(proxy.port),
            environment,
            at_one_moment=False,
            proxy=proxy,
            direct=lambda: backend(server.port),
        )


SERVERS = [
    pytest.param(_postgres, id="postgres", marks=pytest.mark.server),
    pytest.param(_dynamodb, id="dynamodb", marks=pytest.mark.server),
]
BACKENDS = [
    pytest.param(_local(sqlite), id="sqlite"),
    *SERVERS,
    pytest.param(_local(objects_in_a_folder), id="objects"),
    pytest.param(
        _local(objects_in_s3), id="objects-in-s3", marks=[pytest.mark.server, pytest.mark.long]
    ),
]
_AT_LENGTH = pytest.param(_dynamodb, id="dynamodb", marks=[pytest.mark.server, pytest.mark.long])
QUICK = [_AT_LENGTH if backend.id == "dynamodb" else backend for backend in BACKENDS]
"""For what takes DynamoDB Local many seconds."""
QUICK_SERVERS = [SERVERS[0], _AT_LENGTH]

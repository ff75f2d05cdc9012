"""Requests and answers are lost on the way to PostgreSQL: increments count once, though nothing
marks them.
"""

from __future__ import annotations

import asyncio
import secrets
from random import Random

import pytest

from dagster_adjunct.resources.key_value.segment import KeyValueTableConfiguration, TableId
from dagster_adjunct.resources.key_value.serializers import BytesSerializer, TextSerializer
from dagster_adjunct.resources.key_value.table import OpenTable
from dagster_adjunct.resources.key_value_backends.postgres import PostgresSegments
from dagster_adjunct.resources.table_backends.key_value_rows import KeyValueRows
from dagster_adjunct.resources.tables.operation import Changes, Operation, OperationKind, RowEntries
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.servers.postgres import PostgresServer
from tests.servers.tcp_proxy import TcpProxy

pytestmark = pytest.mark.server
PARTITIONS = 2


class ReachedRows(KeyValueRows):
    """Rows of a table that is known by its id, so that it can be reached by more ways than the
    lake says.
    """

    def __init__(self, id: TableId, port: int) -> None:
        super().__init__(
            "memory://none", "app", "rows", "id", columns={"id": "string", "n": "bigint"}
        )
        self._backend = PostgresSegments(
            connect={"host": "127.0.0.1", "port": str(port), "user": "adjunct", "dbname": "adjunct"}
        )
        self._id = id

    def make(self) -> None:
        self._backend.create(self._id, PARTITIONS)

    def _open_now(self, *, make: bool) -> OpenTable[str, bytes]:
        declared = KeyValueTableConfiguration(PARTITIONS)
        self._open = OpenTable(
            self._id, declared, self._backend, TextSerializer(), BytesSerializer()
        )
        return self._open


def table_over(function: KeyValueRows) -> RemoteTable[str, object, object]:
    patient = RetryPolicy(attempts=4000, first_wait=0.002, max_wait=0.05, max_total=90)
    return RemoteTable(
        "rows", key="id", read_function=function, write_function=function, retry=patient
    )


def adding(keys: list[str]) -> Operation[str]:
    return Operation(
        OperationKind.UPDATE,
        RowEntries(keys, [Changes(add={"n": 1})] * len(keys), [{"n": 0}] * len(keys)),
    )


@pytest.mark.parametrize("turns", [6, pytest.param(60, marks=pytest.mark.long)])
def test_increments_of_two_writers_count_once_though_messages_are_lost(
    postgres_server: PostgresServer, turns: int
) -> None:
    id, random = TableId("app", "rows", secrets.token_hex(8)), Random(7)
    direct = ReachedRows(id, postgres_server.port)
    direct.make()
    keys = [f"k{n}" for n in range(6)]

    def choose(request: bytes) -> str | None:
        return random.choice(["lost-before", "lost-after"]) if random.random() < 0.1 else None

    async def writer(port: int) -> None:
        async with table_over(ReachedRows(id, port)) as table:
            for turn in range(turns):
                outcomes = await table.send(adding(keys[turn % 3 :]))
                assert not outcomes.problems

    async def all_of() -> list[int]:
        with TcpProxy(postgres_server.port).running() as proxy:
            proxy.choose = choose  # type: ignore[assignment]
            await asyncio.gather(writer(proxy.port), writer(proxy.port))
            proxy.calm()
            assert proxy.befallen
        async with table_over(direct) as table:
            records = await table.get_all(keys)
        return [records[key]["n"] for key in keys]  # type: ignore[index]

    assert asyncio.run(all_of()) == [2 * turns // 3, 4 * turns // 3, *[2 * turns] * 4]

"""A run that is paused while it waits for a connection, or opens one, and wakes: it sends
nothing over it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from botocore.awsrequest import AWSHTTPConnection, AWSHTTPConnectionPool
from redis.asyncio import BlockingConnectionPool

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import RunLeaseLostError
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.sql_table import Pool
from dagster_adjunct.resources.tables.functions import RUN_FENCE
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from dagster_adjunct.resources.times import Deadline, read_clocks
from tests.orchestration.paused_runs import PausedWorld, at_call
from tests.orchestration.test_paused_runs import (
    Function,
    content,
    dynamodb,
    postgres,
    puts_and_deletes,
    redis,
    sets,
    sqlite,
)
from tests.rounds import rounds

Patch = pytest.MonkeyPatch
Hook = Callable[[], object]


def wait_for_pool(patch: Patch, connected: Hook) -> None:
    lend = Pool.connection

    @asynccontextmanager
    async def connection(pool: Pool[Any], **more: Any) -> AsyncIterator[Any]:
        async with lend(pool, **more) as requests:
            connected()
            yield requests

    patch.setattr(Pool, "connection", connection)


def connect_to_redis(patch: Patch, connected: Hook) -> None:
    lend = BlockingConnectionPool.get_connection

    async def get_connection(pool: Any, *given: Any) -> Any:
        connection = await lend(pool, *given)
        await connection.disconnect()
        await connection.connect()
        connected()
        return connection

    patch.setattr(BlockingConnectionPool, "get_connection", get_connection)


def connect_to_dynamodb(patch: Patch, connected: Hook) -> None:
    lend, connect = AWSHTTPConnectionPool._get_conn, AWSHTTPConnection.connect

    def closed(pool: Any, timeout: float | None = None) -> Any:
        connection = lend(pool, timeout)
        connection.close()
        return connection

    def paused(connection: Any) -> None:
        connect(connection)
        connected()

    patch.setattr(AWSHTTPConnectionPool, "_get_conn", closed)
    patch.setattr(AWSHTTPConnection, "connect", paused)


# Each with where it is stored, and what pauses its connections.
CONNECTED = [
    pytest.param(sqlite, "tmp_path", wait_for_pool, id="sqlite"),
    pytest.param(
        postgres, "postgres_server", wait_for_pool, id="postgres", marks=pytest.mark.server
    ),
    pytest.param(redis, "redis_server", connect_to_redis, id="redis", marks=pytest.mark.server),
    pytest.param(
        dynamodb, "dynamodb", connect_to_dynamodb, id="dynamodb", marks=pytest.mark.server
    ),
]


def world_of(
    of: Function, place: Any, write: Any
) -> tuple[PausedWorld, BlockingTable[Any, Any, Any]]:
    def make(world: PausedWorld, first: bool) -> Application:
        app = Application("sets", engine="auto")
        function = of(world, place)
        write(app, RemoteTable("t", key="k", write_function=function, batch_size=5, in_flight=1))
        return app

    world = PausedWorld(make)
    return world, BlockingTable(RemoteTable("t", key="k", read_function=of(world, place)))


@pytest.mark.rounds
@pytest.mark.lengthy
@pytest.mark.parametrize("write", [puts_and_deletes, sets])
@pytest.mark.parametrize(("of", "where", "pause_at"), CONNECTED)
def test_nothing_is_sent_over_a_connection_for_which_a_run_was_paused(
    of: Function,
    where: str,
    pause_at: Callable[[Patch, Hook], None],
    write: Any,
    request: pytest.FixtureRequest,
) -> None:
    place = request.getfixturevalue(where)
    whole, expected = world_of(of, place, write)
    whole.run_alone()
    for nth in rounds([2], [1, 2, 3, 4]):
        world, table = world_of(of, place, write)
        pause = at_call(nth, world.pause)

        def connected(pause: Hook = pause) -> None:
            fence = RUN_FENCE.get()
            if fence is not None and fence.run == "first":
                pause()

        with Patch.context() as patch:
            pause_at(patch, connected)
            error = world.run_paused()
        assert world.paused, nth
        assert isinstance(error, RunLeaseLostError), (nth, error)
        assert content(table) == content(expected), nth


@pytest.mark.server
@pytest.mark.lengthy
def test_a_body_that_is_checked_arrives_whole(dynamodb: Any) -> None:
    columns = {"k": "string", "text": "string"}
    where = {"region": "us-east-1", "endpoint_url": dynamodb.endpoint}
    function = DynamoDbTable("checked-bodies", "k", columns=columns, create=True, **where)
    declared = RemoteTable("t", key="k", read_function=function, write_function=function)
    held = Deadline(read_clocks(), 600)
    store = InMemoryStore()
    fence = Fence(
        store, "run.json", holder="h", application="sets", run="first", epoch=1, deadline=held
    )
    records = {f"k{n}": {"k": f"k{n}", "text": "é" * 20_000 * n} for n in range(8)}
    with BlockingTable(declared.with_fence(fence)) as table:
        table.put_all(records.items())
        assert table.get_all(list(records)) == records
    assert store._objects == {}

"""Key-value tables in PostgreSQL against the bare driver over a table of its own: rates, of the same in the same run.

By hand: prepared statements in autocommit over one connection, binary, with no tokens and no seal; a version is 16
random bytes. A write by hand knows whether its condition held, and nothing of a lost reply.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from benchmarks.timing import alternate
from dagster_adjunct.resources.key_value.key_value_table import KeyValueTable
from dagster_adjunct.resources.key_value.serializers import BytesSerializer
from dagster_adjunct.resources.key_value.table_configuration import KeyValueTableConfiguration
from dagster_adjunct.resources.key_value.table_segment import TableId
from dagster_adjunct.resources.key_value_backends import PostgresSegments

if TYPE_CHECKING:
    import psycopg

OPERATIONS, TURN, AT_ONCE, MANY, LARGE = 2_000, 200, 8, 1_000, 1_000_000
FAMILY = "flights"
VALUE = os.urandom(100)
_BY_HAND = "CREATE TABLE {} (key bytea PRIMARY KEY, version bytea NOT NULL, value bytea NOT NULL)"


def run(rounds: int, large: int = LARGE) -> None:
    """Print how the rate of each operation compares with the best by hand."""
    from tests.servers.postgres import running_server

    print(f"key-value tables in PostgreSQL on this machine: values of {len(VALUE)} bytes, one partition")
    with running_server() as server, asyncio.Runner() as runner:
        connect = {"host": "127.0.0.1", "port": str(server.port), "user": "adjunct", "dbname": "adjunct"}
        sides = runner.run(_prepared(server.dsn(), connect, large))
        _singles(runner, sides, rounds)
        runner.run(_timed(sides.bare, sides.keys, sides.hand_put, 1))
        runner.run(_timed(sides.bare, sides.keys, sides.put, 1))
        _show("get_all of 1,000", rounds, 0.9, runner, hand=sides.hand_get_all, ours=sides.get_all)
        _show(
            f"iterating {large:,}",
            rounds,
            0.7,
            runner,
            hand_at_once=sides.hand_scan,
            hand_by_cursor=sides.hand_cursor,
            ours=sides.scan,
        )
        runner.run(sides.table.close())


class _Sides:
    """The same operations on both sides; each remembers the versions that it has seen."""

    def __init__(
        self, bare: list[psycopg.AsyncConnection[Any]], table: KeyValueTable[bytes, bytes], large: Any
    ) -> None:
        self.bare, self.table, self.large = bare, table, large
        self.keys = [b"%08d" % number for number in range(OPERATIONS)]
        self.hand_versions: dict[bytes, bytes] = {}
        self.versions: dict[bytes, Any] = {}

    async def hand_insert(self, key: bytes, cursor: Any) -> None:
        self.hand_versions[key] = version = os.urandom(16)
        insert = "INSERT INTO hand VALUES (%b, %b, %b) ON CONFLICT DO NOTHING"
        await cursor.execute(insert, (key, version, VALUE), prepare=True)
        assert cursor.rowcount == 1

    async def insert(self, key: bytes, cursor: Any) -> None:
        self.versions[key] = await self.table.put_if_absent(key, VALUE, family=FAMILY)

    async def hand_replace(self, key: bytes, cursor: Any) -> None:
        version, known = os.urandom(16), self.hand_versions[key]
        update = "UPDATE hand SET version = %b, value = %b WHERE key = %b AND version = %b"
        await cursor.execute(update, (version, VALUE, key, known), prepare=True)
        assert cursor.rowcount == 1
        self.hand_versions[key] = version

    async def replace(self, key: bytes, cursor: Any) -> None:
        self.versions[key] = await self.table.replace(key, VALUE, self.versions[key], family=FAMILY)

    async def hand_put(self, key: bytes, cursor: Any) -> None:
        self.hand_versions[key] = version = os.urandom(16)
        upsert = "INSERT INTO hand VALUES (%b, %b, %b) ON CONFLICT (key) DO UPDATE SET version = excluded.version, "
        await cursor.execute(upsert + "value = excluded.value", (key, version, VALUE), prepare=True)

    async def put(self, key: bytes, cursor: Any) -> None:
        self.versions[key] = await self.table.put(key, VALUE, family=FAMILY)

    async def hand_get(self, key: bytes, cursor: Any) -> None:
        await cursor.execute("SELECT version, value FROM hand WHERE key = %b", (key,), prepare=True)
        assert (await cursor.fetchone())[1] == VALUE

    async def get(self, key: bytes, cursor: Any) -> None:
        entry = await self.table.get(key, family=FAMILY)
        assert entry is not None
        assert entry.value == VALUE

    async def hand_remove(self, key: bytes, cursor: Any) -> None:
        remove = "DELETE FROM hand WHERE key = %b AND version = %b"
        await cursor.execute(remove, (key, self.hand_versions[key]), prepare=True)
        assert cursor.rowcount == 1

    async def remove(self, key: bytes, cursor: Any) -> None:
        await self.table.remove(key, version=self.versions[key], family=FAMILY)

    async def hand_get_all(self) -> None:
        """The fastest of the ways that were tried: one array, in a binary cursor."""
        async with self.bare[0].cursor(binary=True) as cursor:
            for _ in range(20):
                query = "SELECT key, version, value FROM hand WHERE key = ANY (%b)"
                await cursor.execute(query, (self.keys[:MANY],), prepare=True)
                found = {key: (version, value) for key, version, value in await cursor.fetchall()}
                assert len([found[key] for key in self.keys[:MANY]]) == MANY

    async def get_all(self) -> None:
        for _ in range(20):
            assert None not in await self.table.get_all(self.keys[:MANY], family=FAMILY)

    async def hand_scan(self) -> None:
        async with self.bare[0].cursor(binary=True) as cursor:
            await cursor.execute("SELECT key, version, value FROM hand_large")
            assert len(await cursor.fetchall()) == self.large.count

    async def hand_cursor(self) -> None:
        seen = 0
        async with self.bare[0].transaction(), self.bare[0].cursor("large", binary=True) as cursor:
            cursor.itersize = 1000
            await cursor.execute("SELECT key, version, value FROM hand_large")
            async for _ in cursor:
                seen += 1
        assert seen == self.large.count

    async def scan(self) -> None:
        seen = 0
        async for page in self.large.table.all_entries():
            seen += len(page.items)
        assert seen == self.large.count


class _Large:
    def __init__(self, table: KeyValueTable[bytes, bytes], count: int) -> None:
        self.table, self.count = table, count


async def _prepared(dsn: str, connect: dict[str, str], large: int) -> _Sides:
    import psycopg

    connections = [await psycopg.AsyncConnection.connect(dsn, autocommit=True) for _ in range(AT_ONCE)]
    for bare in connections:
        await bare.execute("SET plan_cache_mode = force_generic_plan")
    for name in ("hand", "hand_large"):
        await bare.execute(_BY_HAND.format(name))
    backend = PostgresSegments(connect=connect, connections=AT_ONCE)
    tables = []
    for name in ("small", "large"):
        id, configuration = TableId("bench", name, secrets.token_hex(8)), KeyValueTableConfiguration(partitions=1)
        backend.create(id, 1)
        tables.append(KeyValueTable(id, configuration, backend, BytesSerializer(), BytesSerializer()))
    key = "int2send((-9)::int2) || convert_to(lpad(n::text, 9, '0'), 'utf8')"
    rows = f"INSERT INTO hand_large SELECT {key}, decode(md5(n::text), 'hex'), %b FROM generate_series(1, {large}) n"
    await bare.execute(rows, (VALUE,))
    stored = f"kvt_{tables[1].id.incarnation}"
    await bare.execute(f"INSERT INTO {stored} SELECT int4send(0) || key, version, value FROM hand_large")
    await bare.execute("VACUUM ANALYZE hand_large")
    await bare.execute(f"VACUUM ANALYZE {stored}")
    return _Sides(connections, tables[0], _Large(tables[1], large))


def _singles(runner: asyncio.Runner, sides: _Sides, rounds: int) -> None:
    """In turns of some keys, so that a slow moment of the machine hits both sides; the median turn counts."""
    for at_once in (1, AT_ONCE):
        took: dict[str, dict[str, list[float]]] = {}
        for _ in range(rounds):
            for name in ("insert", "replace", "put", "get", "remove"):
                ways = {"hand": getattr(sides, f"hand_{name}"), "ours": getattr(sides, name)}
                for number, start in enumerate(range(0, OPERATIONS, TURN)):
                    for side in ("hand", "ours") if number % 2 else ("ours", "hand"):
                        keys = sides.keys[start : start + TURN]
                        seconds = runner.run(_timed(sides.bare, keys, ways[side], at_once))
                        took.setdefault(name, {"hand": [], "ours": []})[side].append(seconds / TURN)
        print(f"  one key at a time, {at_once} at once (goal: at least 0.8)")
        for name, of_sides in took.items():
            hand, ours = (statistics.median(of_sides[side]) for side in ("hand", "ours"))
            print(f"    {name}: {1 / hand:,.0f} by hand, {1 / ours:,.0f} ours a second: {hand / ours:.2f}x")


async def _timed(
    bare: list[psycopg.AsyncConnection[Any]],
    keys: list[bytes],
    work: Callable[[bytes, Any], Awaitable[None]],
    at_once: int,
) -> float:
    """Return the seconds that these keys take, so many at once; by hand each of these has a connection of its own."""

    async def some(start: int) -> None:
        async with bare[start].cursor(binary=True) as cursor:
            for key in keys[start::at_once]:
                await work(key, cursor)

    began = time.perf_counter()
    await asyncio.gather(*(some(start) for start in range(at_once)))
    return time.perf_counter() - began


def _show(name: str, rounds: int, goal: float, runner: asyncio.Runner, **ways: Callable[[], Awaitable[None]]) -> None:
    runs = {way: lambda _, work=work: runner.run(work()) for way, work in ways.items()}
    measured = alternate(rounds, **runs)
    best = min(item.median for way, item in measured.items() if way != "ours")
    print(f"  {name}: ours {best / measured['ours'].median:.2f}x of the best by hand (goal: at least {goal})")
    for item in measured.values():
        print(f"    {item}")

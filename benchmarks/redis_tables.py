"""Records into Redis and back: `RedisTable` against redis-py's pipelines by hand, at the same
requests in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any

from benchmarks.flight_messages import COLUMNS, Ours, Row, rows
from benchmarks.timing import alternate, show
from dagster_adjunct.resources.table_backends.redis import RedisTable
from tests.servers.redis import running_redis

ROWS = 40_000
BATCH = 1000
IN_FLIGHT = 4
ONE_BY_ONE = 4000  # rows of the slow way
NEWEST = """
local known = redis.call("HMGET", KEYS[1], "at", "mark:" .. ARGV[2])
if known[1] and known[1] > ARGV[1] or known[2] and known[2] >= ARGV[3] then return 0 end
redis.call("HINCRBY", KEYS[1], "flights", ARGV[4])
redis.call("HSET", KEYS[1], "at", ARGV[1], "mark:" .. ARGV[2], ARGV[3], unpack(ARGV, 5))
return 1
"""  # as somebody would write it for these columns: texts that sort, no tombstones, no checks


async def in_batches(
    given: Sequence[Row], request: Callable[[Sequence[Row]], Awaitable[Any]]
) -> None:
    turns = asyncio.Semaphore(IN_FLIGHT)

    async def one(start: int) -> None:
        async with turns:
            await request(given[start : start + BATCH])

    await asyncio.gather(*(one(start) for start in range(0, len(given), BATCH)))


class ByHand:
    """What redis-py's documentation leads to: pipelines without transactions, a script by its
    digest.
    """

    def __init__(self, url: str) -> None:
        from redis.asyncio import Redis

        self.client = Redis.from_url(url, max_connections=IN_FLIGHT)
        self.script = self.client.register_script(NEWEST)
        self.sha = ""

    async def put(self, given: Sequence[Row]) -> None:
        async with self.client.pipeline(transaction=False) as pipe:
            for key, record, _ in given:
                pipe.delete(f"hand:{key}")
                pipe.hset(
                    f"hand:{key}",
                    mapping={**record, "tail": key, "seen": record["seen"].isoformat()},
                )
            await pipe.execute()

    async def update(self, given: Sequence[Row]) -> None:
        self.sha = self.sha or await self.client.script_load(NEWEST)
        async with self.client.pipeline(transaction=False) as pipe:
            for key, record, position in given:
                pipe.evalsha(self.sha, 1, f"hand:{key}", *self._arguments(record, position))
            await pipe.execute()

    async def update_one(self, row: Row) -> None:
        key, record, position = row
        await self.client.evalsha(self.sha, 1, f"one:{key}", *self._arguments(record, position))

    async def get(self, given: Sequence[Row]) -> None:
        async with self.client.pipeline(transaction=False) as pipe:
            for key, _, _ in given:
                pipe.hgetall(f"hand:{key}")
            for fields in await pipe.execute():
                (
                    fields[b"tail"].decode(),
                    datetime.fromisoformat(fields[b"seen"].decode()),
                    fields[b"origin"].decode(),
                    int(fields[b"flights"]),
                    float(fields[b"delay"]),
                )

    def _arguments(self, record: dict[str, Any], position: str) -> tuple[Any, ...]:
        seen = record["seen"].isoformat(timespec="microseconds")
        own = ("seen", seen, "origin", record["origin"], "delay", record["delay"])
        return (seen, "flights.3", position, 1, *own)


def run(rounds: int) -> None:
    given, fresh = rows(0, ROWS), [rows(turn, ROWS) for turn in range(1, rounds + 2)]
    with running_redis("--appendonly", "no") as server:
        url = server.url()
        loop = asyncio.new_event_loop()
        hand, ours = (
            ByHand(url),
            Ours(RedisTable("ours", "tail", columns=COLUMNS, url=url, connections=IN_FLIGHT)),
        )
        print(
            f"redis: {ROWS} records x {len(COLUMNS)} columns, {BATCH} a request, {IN_FLIGHT} in"
            " flight"
        )

        def timed(way: Callable[[Sequence[Row]], Awaitable[None]]) -> Callable[[int], None]:
            return lambda turn: loop.run_until_complete(
                in_batches(fresh[turn] if way.__name__ == "update" else given, way)
            )

        for name, goal in (
            ("put", "at most 1.11"),
            ("update", "at most 1.25"),
            ("get", "at most 1.11"),
        ):
            ways = {
                f"{who}_{name}": timed(getattr(way, name))
                for who, way in (("ours", ours), ("hand", hand))
            }
            show(alternate(rounds, **ways), f"ours_{name}", f"hand_{name}", goal)

        async def one_by_one(in_flight: int) -> None:
            turns = asyncio.Semaphore(in_flight)

            async def one(row: Row) -> None:
                async with turns:
                    await hand.update_one(row)

            await asyncio.gather(*map(one, given[:ONE_BY_ONE]))

        began = time.perf_counter()
        loop.run_until_complete(in_batches(fresh[-1], ours.update))
        bulk = (time.perf_counter() - began) / ROWS
        for in_flight in (1, IN_FLIGHT):
            began = time.perf_counter()
            loop.run_until_complete(one_by_one(in_flight))
            single = (time.perf_counter() - began) / ONE_BY_ONE
            told = (
                f"a call a row, {in_flight} in flight: {single * 1e6:.0f} us, ours"
                f" {bulk * 1e6:.0f} us a row"
            )
            print(f"  {told}: {single / bulk:.1f}x (goal: 5x)")
        loop.run_until_complete(ours.table.close())
        loop.run_until_complete(hand.client.aclose())
        loop.close()

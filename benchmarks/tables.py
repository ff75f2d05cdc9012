"""What the layers of a remote table cost: microseconds a single operation and an entry in bulk,
over a memory table.

Processor time is what counts: nothing here waits, and other work of the machine must not.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable

from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.tables import Backoff, Cache, RateLimit, RemoteTable, RetryPolicy

SINGLE, BULK = 3000, 10_000
SINGLE_GOAL, BULK_GOAL = 30.0, 1.0


def run(rounds: int) -> None:
    """Print the medians for a plain table, one with all layers, one that its cache answers, and
    the store alone.
    """
    print(
        f"tables: microseconds; goals: {SINGLE_GOAL:g} a single operation, {BULK_GOAL:g} an entry"
        f" of {BULK}"
    )
    shapes = ["store", "plain", "all layers", "cached"]
    figures: dict[tuple[str, str], list[float]] = {}
    for _ in range(max(7, rounds)):
        for shape in shapes:
            for what, micros in asyncio.run(_measured(shape)).items():
                figures.setdefault((what, shape), []).append(micros)
    whats = list(dict.fromkeys(what for what, _ in figures))
    print(f"  {'':16}" + "".join(f"{shape:>14}" for shape in shapes))
    for what in whats:
        medians = [
            statistics.median(figures[what, shape]) if (what, shape) in figures else None
            for shape in shapes
        ]
        print(f"  {what:16}" + "".join(f"{'-' if m is None else f'{m:.2f}':>14}" for m in medians))
    print(f"  counting: {_counting() * 1000:.0f} ns a count (goal: under 1000)\n")


def _table(shape: str) -> RemoteTable:
    from dagster_adjunct.resources.table_backends.memory import MemoryTable

    store = MemoryTable(f"benchmark-{shape}")
    if shape == "plain":
        return RemoteTable("t", key="id", read_function=store, write_function=store)
    return RemoteTable(
        "t",
        key="id",
        read_function=store,
        write_function=store,
        batch_size=BULK,
        retry=RetryPolicy(5, backoff=Backoff.exponential(0.1, 1), timeout=10),
        rate_limit=RateLimit(1e9, 1e9),
        # Around and never read twice, all goes through; else the cache answers the gets.
        cache=Cache(2 * BULK, on_write="through" if shape == "cached" else "around"),
    )


async def _measured(shape: str) -> dict[str, float]:
    from dagster_adjunct.resources.table_backends.memory import MemoryTable

    records = [(f"k{n}", {"id": f"k{n}", "n": n}) for n in range(BULK)]
    keys = [key for key, _ in records]
    figures: dict[str, float] = {}
    table = MemoryTable("benchmark-store") if shape == "store" else _table(shape)
    calls: dict[str, Callable[[str, dict], Awaitable[object]]] = {
        "put": table.put,
        "get": lambda key, _: table.get(key),
        "update": lambda key, _: table.update(key, {"n": 1}),
        "delete": lambda key, _: table.delete(key),
    }
    if shape == "cached":
        calls = {"put": table.put, "get": calls["get"]}
    for what, call in calls.items():
        for key, record in records[:100]:
            await call(key, record)
        began = time.thread_time()
        for key, record in records[:SINGLE]:
            await call(key, record)
        figures[what] = (time.thread_time() - began) / SINGLE * 1e6
    bulk: dict[str, Callable[[], Awaitable[object]]] = {
        "put_all": lambda: table.put_all(records),
        "get_all": lambda: table.get_all(keys),
        "update_all": lambda: table.update_all([(key, {"n": 2}) for key in keys]),
        "delete_all": lambda: table.delete_all(keys),
    }
    for what, request in bulk.items():
        if shape == "cached" and what not in ("put_all", "get_all"):
            continue
        gc.collect()
        began = time.thread_time()
        await request()
        figures[what] = (time.thread_time() - began) / BULK * 1e6
    if isinstance(table, RemoteTable):
        await table.close()
    return figures


def _counting() -> float:
    """Microseconds of one count."""
    meter, times = Meter(), 100_000
    began = time.thread_time()
    for _ in range(times):
        meter.attempt(True, 100, 0.003)
    return (time.thread_time() - began) / times * 1e6

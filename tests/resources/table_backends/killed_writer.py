"""A process that writes a source's messages into a table and is killed at any moment; its
checkpoint lags behind.

Run with its settings as JSON: the store's arguments, the seed of the messages, and where the
checkpoint is.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from dagster_adjunct.resources.tables.table import RemoteTable
from tests.resources.tables.plain_oracle import batches, counting, keeping_newest, messages

EVERY = 4  # batches between two checkpoints
SIZE = 5


def sent_by(seed: int, per_source: int) -> dict[str, list[Any]]:
    return messages(seed, sources=2, per_source=per_source)


def table_of(declared: dict[str, Any], **conditions: Any) -> RemoteTable[Any, Any, Any]:
    module, _, kind = declared["function"].rpartition(".")
    store = getattr(importlib.import_module(module), kind)(**declared["arguments"])
    return RemoteTable("exact", key="id", read_function=store, write_function=store, **conditions)


async def write(settings: dict[str, Any]) -> None:
    checkpoint = Path(settings["checkpoint"])
    parts = batches(sent_by(settings["seed"], settings["per_source"])[settings["source"]], SIZE)
    async with (
        table_of(settings["counters"], idempotent=True) as counters,
        table_of(settings["newest"], newest_by="seen") as latest,
    ):
        start = int(checkpoint.read_text()) if checkpoint.exists() else 0
        for number in range(start, len(parts)):
            sys.stdin.readline()  # the test says how far this process may go before it is killed
            for outcomes in await asyncio.gather(
                counters.send(counting(parts[number])), latest.send(keeping_newest(parts[number]))
            ):
                assert all(problem.error is None for problem in outcomes.problems.values()), (
                    outcomes.problems
                )
            print(number, flush=True)
            if number % EVERY == EVERY - 1:
                fresh = checkpoint.with_name(f"{checkpoint.name}.fresh")
                fresh.write_text(str(number + 1))
                fresh.replace(checkpoint)
    print("all", flush=True)


if __name__ == "__main__":
    asyncio.run(write(json.loads(sys.argv[1])))

"""Pauses a run of an application, lets others finish its batch and go on with newer records, and
wakes it.

In the process: whoever pauses calls `pause`, in the middle of the run. The clocks that run on while
a machine sleeps jump by an hour, the lease looks as old, and other runs begin. Then the caller goes
on, as if it had been stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.resources import times
from dagster_adjunct.resources.errors import AdjunctError, ApplicationBusyError
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore, ObjectStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.tables.functions import StoreFunction
from dagster_adjunct.resources.tables.operation import (
    Capabilities,
    Operation,
    OperationKind,
    Outcomes,
)

COLUMNS = {"k": "string", "n": "bigint", "gone": "boolean", "at": "timestamp"}
START = datetime(2026, 1, 1, tzinfo=UTC)
KEYS = 24
_numbers = count()


class Skewed:
    """The module `time` as `times` sees it, whose clocks jump."""

    CLOCK_MONOTONIC = time.CLOCK_MONOTONIC

    def __init__(self) -> None:
        self.by = 0.0

    def clock_gettime(self, clock: int) -> float:
        return time.clock_gettime(clock) + self.by

    def time(self) -> float:
        return time.time() + self.by


@dataclass
class PausedWorld:
    """A lake, in memory by default, with the records of a stream, and the runs of an application
    over it.
    """

    make: Callable[[PausedWorld, bool], Application]  # whether it is of the run that is paused
    store: ObjectStore = field(default_factory=InMemoryStore)
    spark: Any = IN_PROCESS
    clocks: Skewed = field(default_factory=Skewed)
    paused: bool = False
    rounds: int = 0
    # names what it stores outside the lake
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        self.lake = lake_in(self.store)
        self.streams = LakeStreams(self.lake)
        self.streams.create("changes", schema=Schema.of(**COLUMNS), key=["k"], partitions=2)
        self.send()

    def send(self) -> None:
        """Append a newer record for each key; every fourth is a deletion, of other keys each
        time.
        """
        self.rounds += 1
        records = [
            {
                "k": f"k{n}",
                "n": 100 * self.rounds + n,
                "gone": n % 4 == self.rounds % 4 and self.rounds < 3,
                "at": START + timedelta(seconds=60 * self.rounds + n),
            }
            for n in range(KEYS)
        ]
        table = pa.Table.from_pylist(records, Schema.of(**COLUMNS).to_arrow())
        self.streams.append("changes", table, producer="test", sequence=self.rounds)

    def run(self, name: str, lake: Lake | None = None, *, first: bool = False, **more: Any) -> None:
        app = self.make(self, first)
        run_application(app, lake=lake or self.lake, spark=self.spark, wait=0, run=name, **more)

    def pause(self) -> None:
        """Stop here once, while others end the batch and write newer records."""
        if not self.paused:
            self.paused = True
            others = ThreadPoolExecutor(1)
            try:
                others.submit(self.go_on).result(300)  # no lock of the paused run may stop them
            finally:
                others.shutdown(wait=False)

    def go_on(self) -> None:
        """Run the application as others, to the end of newer records."""
        while True:
            self.clocks.by += 3600
            self.expire_lease()
            # another thread of the paused run was not stopped yet, and renewed it
            with suppress(ApplicationBusyError):
                self.run("second")
                break
        self.send()
        self.run("third")
        self.send()
        self.run("fourth")

    def expire_lease(self) -> None:
        key = "applications/sets/run.json"
        if not isinstance(self.store, InMemoryStore):
            path = Path(self.store.url) / key
            if path.exists():
                hour_ago = path.stat().st_mtime - 3600
                os.utime(path, (hour_ago, hour_ago))
            return
        with self.store._lock:
            found = self.store._objects.get(key)
            if found is not None:
                data, info = found
                old = replace(info, modified=info.modified - timedelta(hours=1))
                self.store._objects[key] = data, old

    def run_paused(self, lake: Lake | None = None, **more: Any) -> AdjunctError | None:
        """Run the application, which somewhere calls `pause`; return the error with which it
        ended.
        """
        with patch.object(times, "time", self.clocks):
            try:
                self.run("first", lake, first=True, **more)
            except AdjunctError as error:
                return error
        return None

    def run_alone(self) -> None:
        """Run the application without a pause, over the same records."""
        self.run("first")
        self.send()
        self.run("second")
        self.send()
        self.run("third")


@dataclass
class PausedFunction(StoreFunction[Any, Any, Any]):
    """The function of another table; `before` is called before each write is checked, `within`
    when it is sent.
    """

    inner: Any
    before: Callable[[], object] = lambda: None
    within: Callable[[], object] = lambda: None

    @property
    def capabilities(self) -> Capabilities:
        allowed: Capabilities = self.inner.capabilities
        return allowed

    async def open(self) -> None:
        await self.inner.open()
        self.before()

    async def send(self, operation: Operation[Any]) -> Outcomes:
        if operation.kind is not OperationKind.GET:
            self.within()
        outcomes: Outcomes = await self.inner.send(operation)
        return outcomes

    async def announce(self, fence: Any) -> None:
        await self.inner.announce(fence)

    async def close(self) -> None:
        await self.inner.close()


def at_call(nth: int, act: Callable[[], object]) -> Callable[[], object]:
    """Return a function that acts at its `nth` call, from 1."""
    left = iter(range(1, 100_000))
    return lambda: act() if next(left) == nth else None

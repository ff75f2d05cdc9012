"""Between batches files of tables of state are deleted that nobody reads any more; what an open
batch reads stays.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.generation import ARROW, Runtime
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.local_table import (
    LocalTableWriter,
    StateSpec,
    WritingBatch,
    declare_state_dataset,
)
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.batch_log.intent import Intent, JoinedVersions
from dagster_adjunct.orchestration.step.plan_batch import maintain_state_tables
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.faulty_store import FaultyStore

START = datetime(2026, 3, 1, tzinfo=UTC)
SPEC = StateSpec(Schema.of(k="string", until="timestamp"), ("k",), ("k",), 1, "until")


class World:
    """A lake with one table of state, whose batches each keep a row until the next batch."""

    def __init__(self) -> None:
        self.store = FaultyStore(InMemoryStore())
        self.lake: Lake = lake_in(self.store)

    def batches(self, *numbers: int) -> None:
        for number in numbers:
            now = START + timedelta(minutes=number)
            rows = pa.table(
                {
                    "k": [f"k{number}"],
                    "until": pa.array([now + timedelta(minutes=1)], pa.timestamp("us", "UTC")),
                    "__tombstone": [False],
                }
            )
            begun = StoredVersions(self.lake, "app-seen").current()
            dataset, batch = (
                declare_state_dataset("app", "seen", SPEC),
                WritingBatch("app", number, "run"),
            )
            with LocalTableWriter(
                self.lake, dataset, begun.sealed if begun else None, batch, ARROW
            ) as writes:
                writes.send(rows, order_by=(), partitioned=False)
                writes.commit(now)

    def begin(self, application: str, number: int) -> str:
        """Open a batch over the version that is served now, and return that."""
        log, version = (
            BatchLog(self.lake, application),
            StoredVersions(self.lake, "app-seen").require_current().version,
        )
        intent = Intent(
            batch=number,
            run="run",
            clock=START,
            ranges={},
            joined=JoinedVersions(versions={"app-seen": version}),
        )
        log.open(log.read(), intent)
        return version

    def tend(self) -> None:
        runtime = Runtime(self.lake, {}, IN_PROCESS, "run")
        context: Any = SimpleNamespace(
            lake=self.lake, run="run", runtime=runtime, states=("app-seen",)
        )
        maintain_state_tables(context)

    def held(self, version: str) -> list[Any]:
        return [key for key, _ in StoredVersions(self.lake, "app-seen").version(version).items()]

    def leftover(self) -> set[str]:
        """Return the folders with files that the served version does not read."""
        served = StoredVersions(self.lake, "app-seen").require_current().sealed
        stored = {
            item.key.rsplit("/", 1)[0]
            for item in self.lake.store.list("")
            if item.key.endswith(".parquet")
        }
        return stored - {generation.folder for generation in served.generations}


@pytest.fixture
def world() -> World:
    return World()


def test_what_nobody_reads_any_more_is_deleted_some_at_a_time(world: World) -> None:
    world.batches(*range(1, 9))
    world.tend()
    assert len(world.leftover()) == 7, "that few wait for more"
    world.batches(9)
    world.tend()
    assert world.leftover() == set()


def test_what_an_open_batch_reads_stays_whichever_applications_it_is(world: World) -> None:
    world.batches(1, 2)
    versions = {"app": world.begin("app", 3)}
    world.batches(3)
    versions["other"] = world.begin("other", 1)
    world.batches(*range(4, 13))
    for application in ("app", "other"):
        world.tend()
        assert world.held(versions[application]) != []
        assert len(world.leftover()) >= 9
        BatchLog(world.lake, application).abandon(reason="a test", by="me", skip=True)
    world.tend()
    assert world.leftover() == set()


def test_between_batches_nothing_else_of_the_lake_is_cleared_away(world: World) -> None:
    world.batches(*range(1, 10))
    world.store.requests.clear()
    world.tend()
    assert world.leftover() == set()
    assert not [
        key
        for request, key in world.store.requests
        if request == "list" and key.startswith("metadata/")
    ]

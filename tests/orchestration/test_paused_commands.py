"""Commands that hold no run lease, paused for days at any request to the lake: what others did
meanwhile stays.

Meanwhile others advance the dataset to newer records, merge its generations, delete what nobody
holds, without a grace period, and see every lease and build as two days old.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.orchestration.maintenance.expire import erase_keys, expire_versions
from dagster_adjunct.orchestration.maintenance.repartition import repartition_dataset
from dagster_adjunct.resources import times
from dagster_adjunct.resources.errors import AdjunctError, DatasetError
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.faulty_store import Fault, FaultyStore
from tests.orchestration.paused_runs import Skewed
from tests.rounds import rounds

KEYS = [f"k{n}" for n in range(12)]
NOTHING_KEPT = DiscardPolicy(keep=1, grace=timedelta(0))


class Days:
    """A lake in memory with a dataset of either kind, in which days pass at once."""

    def __init__(self, kind: str) -> None:
        self.store, self.clocks = InMemoryStore(), Skewed()
        self.lake = lake_in(self.store)
        self.streams = LakeStreams(self.lake)
        self.streams.create(
            "changes", schema=Schema.of(k="string", n="int"), key=["k"], partitions=2
        )
        self.rounds, self.is_paused = 0, False
        self.kind, self.partitions = kind, 2
        for _ in range(3):
            self.send()
            self.advance(self.lake)
        self.send()

    def send(self) -> None:
        self.rounds += 1
        rows = [{"k": key, "n": 100 * self.rounds + number} for number, key in enumerate(KEYS)]
        table = pa.Table.from_pylist(rows, Schema.of(k="string", n="int").to_arrow())
        name = f"v{self.rounds}" if self.kind == "bounded" else None
        self.streams.append(
            "changes", table, producer="t", sequence=self.rounds, end_of_dataset=name
        )

    @property
    def dataset(self) -> AdjunctDataset:
        make = bounded_dataset if self.kind == "bounded" else unbounded_dataset
        return make(
            "facts", input="lake.changes", key="k", partitions=self.partitions, discard=NOTHING_KEPT
        )

    def advance(self, lake: Lake) -> None:
        systems = {"lake": LakeStreams(lake)}
        try:
            advance_dataset(self.dataset, lake=lake, systems=systems, spark=IN_PROCESS, by="test")
        except DatasetError:
            if self.partitions == 3:
                raise
            self.partitions = 3  # it was repartitioned
            self.advance(lake)

    def compact(self, lake: Lake) -> None:
        compact_dataset(lake, "facts", spark=IN_PROCESS, by="test", level="major")

    def expire(self, lake: Lake) -> None:
        expire_versions(lake, "facts", NOTHING_KEPT, by="test")

    def erase(self, lake: Lake) -> None:
        erase_keys(lake, "facts", ["k1"], reason="asked", by="test")

    def repartition(self, lake: Lake) -> None:
        repartition_dataset(lake, "facts", 3, reason="more", by="test")

    def pass_days(self) -> None:
        self.clocks.by += 2 * 86_400
        with self.store._lock:
            for key, (data, info) in self.store._objects.items():
                self.store._objects[key] = (
                    data,
                    replace(info, modified=info.modified - timedelta(days=2)),
                )

    def pause(self) -> None:
        if self.is_paused:
            return
        self.is_paused = True
        self.pass_days()
        self.advance(self.lake)
        self.send()
        self.advance(self.lake)
        if self.kind == "unbounded":
            self.compact(self.lake)
        self.expire(self.lake)
        self.pass_days()
        self.expire(self.lake)

    def content(self) -> dict[str, int]:
        current = StoredVersions(self.lake, "facts").require_current()
        return {key: entry["n"] for key, entry in current.items()}

    def newest(self) -> dict[str, int]:
        return {key: 100 * self.rounds + number for number, key in enumerate(KEYS)}


COMMANDS: list[tuple[str, Callable[[Days, Lake], None]]] = [
    ("bounded", Days.advance),
    ("unbounded", Days.advance),
    ("unbounded", Days.compact),
    ("bounded", Days.expire),
    ("unbounded", Days.expire),
    ("bounded", Days.erase),
    ("unbounded", Days.erase),
    ("bounded", Days.repartition),
    ("unbounded", Days.repartition),
]


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize(("kind", "command"), COMMANDS)
def test_a_command_that_was_paused_for_days_takes_nothing_back(kind: str, command: Any) -> None:
    counting = Days(kind)
    counted = FaultyStore(counting.store)
    command(counting, Lake(counted, counting.lake.id))
    requests = counted.requests
    for nth in rounds(
        [*range(2, len(requests), 1 + len(requests) // 6)], [*range(1, len(requests) + 1)]
    ):
        days = Days(kind)
        paused = Lake(
            FaultyStore(days.store, [Fault("*", nth, "meanwhile", action=days.pause)]), days.lake.id
        )
        ended = "done"
        with patch.object(times, "time", days.clocks):
            try:
                command(days, paused)
            except AdjunctError as error:
                ended = repr(error)
        made = (nth, requests[nth - 1], ended)
        expected = days.newest()
        if command is Days.erase and ended == "done":
            expected.pop("k1")
        found = days.content()
        assert {key: found.get(key) for key in expected if key != "k1"} == {
            key: value for key, value in expected.items() if key != "k1"
        }, made
        assert days.is_paused, made
        days.send()
        days.advance(days.lake)
        assert days.content() == days.newest(), made

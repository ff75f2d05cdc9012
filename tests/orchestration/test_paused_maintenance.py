"""Commands about streams and applications, paused for hours at any request to the lake: others end
them and go on, and no record is lost, read twice, or brought back when they wake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest

from dagster_adjunct import Application
from dagster_adjunct.orchestration.maintenance.expire import collect_metadata
from dagster_adjunct.orchestration.maintenance.rename import rename_application
from dagster_adjunct.orchestration.maintenance.repartition import repartition_stream
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.resources import times
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.startpoints import StartpointOldest, Startpoints
from dagster_adjunct.streams import CompactionPolicy
from tests.clocks import on_clock
from tests.faulty_store import Fault, FaultyStore
from tests.orchestration.paused_runs import Skewed
from tests.rounds import rounds

pytestmark = [pytest.mark.lengthy, pytest.mark.rounds]
WHO: dict[str, Any] = {"by": "test", "reason": "to see"}
BATCH = 6


@dataclass
class Hours:
    """A lake in memory with a stream that an application copies, in which hours pass at once."""

    meanwhile: Callable[[Hours], object]
    is_asked: bool
    store: InMemoryStore = field(default_factory=InMemoryStore)
    clocks: Skewed = field(default_factory=Skewed)
    name: str = "old"
    sent: int = 0
    is_paused: bool = False

    def __post_init__(self) -> None:
        self.lake = self.over(self.store)
        compaction = CompactionPolicy(min_segments=2)
        LakeStreams(self.lake).create(
            "r",
            schema=Schema.of(k="string", n="bigint"),
            key=["k"],
            partitions=2,
            compaction=compaction,
        )
        for _ in range(3):
            self.send()
            self.run()
        if self.is_asked:
            Startpoints(self.app, lake=self.lake).request("lake.r", StartpointOldest(), **WHO)

    def over(self, store: Any) -> Lake:
        lake = lake_in(self.store)
        found = Lake(store, lake.id)
        return on_clock(found, lambda: lake.now() + timedelta(seconds=self.clocks.by))

    def records(self) -> list[dict[str, Any]]:
        rows = range(BATCH * self.sent, BATCH * (self.sent + 1))
        return [{"k": f"k{number % BATCH}", "n": number} for number in rows]

    def send(self, lake: Lake | None = None) -> None:
        records = self.records()
        self.sent += 1
        LakeStreams(lake or self.lake).append("r", records, producer="p", sequence=self.sent)

    @property
    def app(self) -> Application:
        app = Application(self.name, engine="auto", max_batch_records=4)
        records = app.input_stream("lake.r", default_offset="oldest")
        records.select("k", "n").send_to(app.output_stream("lake.copy", partitions=1))
        return app

    def run(self) -> None:
        run_application(self.app, lake=self.lake, spark=IN_PROCESS, wait=30)

    def pass_hours(self) -> None:
        self.clocks.by += 7200
        with self.store._lock:
            for key, (data, info) in self.store._objects.items():
                self.store._objects[key] = (
                    data,
                    replace(info, modified=info.modified - timedelta(hours=2)),
                )

    def pause(self) -> None:
        if not self.is_paused:
            self.is_paused = True
            with ThreadPoolExecutor(1) as others:
                others.submit(self.go_on).result(300)

    def go_on(self) -> None:
        self.pass_hours()
        self.meanwhile(self)

    def read(self, stream: str) -> Counter[int]:
        streams = LakeStreams(self.lake)
        rows = streams.read_arrow(streams.all_ranges(stream)).to_pylist()
        return Counter(row["n"] for row in rows)


def send_and_run(hours: Hours) -> None:
    """Let others go on, as often as hours pass."""
    for _ in range(2):
        hours.send()
        hours.run()
        LakeStreams(hours.lake).maintain("r")
        collect_metadata(hours.lake)
        hours.pass_hours()
    hours.send()
    hours.run()


def rename(hours: Hours, lake: Lake) -> None:
    rename_application(lake, "old", "new", **WHO)


def rename_and_go_on(hours: Hours) -> None:
    rename(hours, hours.lake)
    hours.name = "new"
    send_and_run(hours)


def repartition(hours: Hours, lake: Lake) -> None:
    repartition_stream(lake, "r", 3, **WHO)


def repartition_and_go_on(hours: Hours) -> None:
    repartition(hours, hours.lake)
    send_and_run(hours)


def maintain(hours: Hours, lake: Lake) -> None:
    LakeStreams(lake).maintain("r")
    collect_metadata(lake)


# Each with what others do meanwhile, and whether a startpoint waits: all records are read again.
CASES = [
    (rename, rename_and_go_on, True),
    (rename, send_and_run, True),
    (repartition, repartition_and_go_on, False),
    (repartition, send_and_run, False),
    (maintain, send_and_run, True),
]


@pytest.mark.parametrize(("command", "meanwhile", "asked"), CASES)
def test_a_command_that_was_paused_for_hours_neither_loses_nor_repeats_records(
    command: Callable[[Hours, Lake], None], meanwhile: Callable[[Hours], None], asked: bool
) -> None:
    counting = Hours(meanwhile, asked)
    counted = FaultyStore(counting.store)
    command(counting, counting.over(counted))
    requests = counted.requests
    few = range(2, len(requests), 1 + len(requests) // 2)
    for nth in rounds([*few], [*range(1, len(requests) + 1)]):
        hours = Hours(meanwhile, asked)
        before = hours.sent * BATCH
        fault = Fault("*", nth, "meanwhile", action=hours.pause)
        ended = "done"
        with patch.object(times, "time", hours.clocks):
            try:
                command(hours, hours.over(FaultyStore(hours.store, [fault])))
            except AdjunctError as error:
                ended = repr(error)
            made = (nth, requests[nth - 1], ended)
            assert hours.is_paused, made
            with suppress(AdjunctError):
                command(hours, hours.lake)
            if command is rename:
                hours.name = "new"
            hours.send()
            hours.run()
        assert hours.read("r") == Counter(range(hours.sent * BATCH)), made
        copied = hours.read("copy")
        assert [*sorted(copied)] == [*range(hours.sent * BATCH)], made
        assert {copied[number] for number in range(before)} == {1 + asked}, made
        assert max(copied.values()) == 1 + asked, made

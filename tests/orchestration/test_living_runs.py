"""A run that lives and loses its lease, by a take-over or because somebody deleted it, sends
nothing once another run has begun.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from unittest.mock import patch

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.resources.errors import ApplicationBusyError, RunLeaseLostError
from dagster_adjunct.resources.objects.fence import Heartbeat
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.orchestration.paused_runs import KEYS, PausedFunction, PausedWorld

KEY = "applications/sets/run.json"
TTL = 2.0
pytestmark = pytest.mark.lengthy


@dataclass
class LivingRuns:
    """Runs of an application in threads; its first one writes slowly, and calls `meanwhile`
    with its third write. `sent` lists which run has sent each write.
    """

    meanwhile: Callable[[LivingRuns], object]
    sent: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world = PausedWorld(self.make)
        self.lake = Lake(self.world.store, self.world.lake.id, run_ttl=timedelta(seconds=TTL))
        self.threads = ThreadPoolExecutor(2)

    def make(self, world: PausedWorld, first: bool) -> Application:
        def within() -> None:
            self.sent.append("first" if first else "second")
            if first and len(self.sent) == 3:
                self.meanwhile(self)
            time.sleep(0.15 if first else 0)

        function = PausedFunction(MemoryTable(f"living-{world.number}"), within=within)
        app = Application("sets", engine="auto")
        records = app.input_stream("lake.changes", default_offset="oldest")
        table = RemoteTable(
            "t",
            key="k",
            write_function=function,
            retry=RetryPolicy(timeout=1),
            batch_size=1,
            in_flight=1,
        )
        records.select("k", "n").send_to(app.table(table))
        return app

    def start(self, run: str, *, take_over: bool = False, wait: float = 30) -> Future[object]:
        app = self.make(self.world, run == "first")
        return self.threads.submit(
            run_application,
            app,
            lake=self.lake,
            spark=IN_PROCESS,
            run=run,
            wait=wait,
            take_over=take_over,
        )

    def values(self) -> set[int]:
        read = MemoryTable(f"living-{self.world.number}")
        with BlockingTable(RemoteTable("t", key="k", read_function=read)) as table:
            found = table.get_all([f"k{n}" for n in range(KEYS)])
        return {found[f"k{n}"]["n"] - n for n in range(KEYS)}


@pytest.mark.parametrize("starved", [False, True])
@pytest.mark.parametrize("how", ["take over", "delete"])
def test_a_living_run_that_loses_its_lease_stops_before_the_next_one_sends(
    how: str, starved: bool
) -> None:
    others: list[Future[object]] = []

    def lose(runs: LivingRuns) -> None:
        if how == "delete":
            runs.lake.store.delete(KEY)
        runs.world.send()
        others.append(runs.start("second", take_over=how == "take over"))

    runs, start = LivingRuns(lose), Heartbeat.start

    def start_heartbeat(heartbeat: Heartbeat) -> None:
        if not starved or others:  # of the first run, whose thread never gets a turn
            start(heartbeat)

    with patch.object(Heartbeat, "start", start_heartbeat):
        first = runs.start("first")
        with pytest.raises(RunLeaseLostError) as lost:
            first.result(60)
        others[0].result(60)
    assert lost.value.run == "first"
    begun = runs.sent.index("second")
    assert 3 <= begun < KEYS
    assert "first" not in runs.sent[begun:]
    assert runs.values() == {200}


def test_a_run_whose_heartbeat_gets_no_turn_renews_its_lease_with_its_writes() -> None:
    seen: list[Exception | None] = []
    done = threading.Event()

    def ask(runs: LivingRuns) -> None:
        def others() -> None:
            while not done.wait(0.2):
                seen.append(runs.start("second", wait=0).exception(60))  # type: ignore[arg-type]

        threading.Thread(target=others).start()

    runs = LivingRuns(ask)
    with patch.object(Heartbeat, "start", lambda heartbeat: None):
        runs.start("first").result(60)
        done.set()
    assert runs.sent == ["first"] * KEYS
    assert seen
    assert all(isinstance(error, ApplicationBusyError) for error in seen[:-1])

"""Writers in processes of their own, for tests of races and of sudden ends. The real cycle,
without Spark.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError
from typing import Any

# What writers import is imported here, once, for all that are forked from a process that has read
# this module.
import pyarrow.parquet  # noqa: F401

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.versions.reports import StageEvent
from dagster_adjunct.resources.errors import CommitConflictError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.cycle import AT_ONCE, NAME, PLANES
from tests.faulty_store import Fault, FaultyStore

PATIENCE = 60


@dataclass(frozen=True)
class Outcome:
    """How one race ended for one writer."""

    action: str
    sealed: tuple[str, ...] = ()
    problem: str = ""


def race(
    url: str,
    env: Mapping[str, str],
    rounds: int,
    start: Barrier,
    built: Barrier,
    reported: Queue[Outcome],
) -> None:
    """Advance once a round, and meet the other writer when the version is built and nobody has
    sealed it.
    """
    world = _world(url, env)

    def meet(event: StageEvent) -> None:
        if event.stage == "validate":
            # the other one came too late, and found nothing left to do
            with suppress(BrokenBarrierError):
                built.wait(5)

    for _ in range(rounds):
        start.wait(PATIENCE)
        try:
            report = _advance(world, meet)
            reported.put(Outcome(report.action, report.sealed))
        except CommitConflictError as conflict:
            reported.put(Outcome("conflict", problem=str(conflict)))
        except Exception as error:  # told by the test
            reported.put(Outcome("error", problem=f"{type(error).__name__}: {error}"))
            raise
        start.wait(PATIENCE)


def advance_until_killed(url: str, stage: str) -> None:
    """Advance, and be killed at the end of a stage."""

    def die(event: StageEvent) -> None:
        if event.stage == stage:
            _die()

    _advance(_world(url, {}), die)


def advance_until_request(url: str, nth: int) -> None:
    """Advance, and be killed before the nth request."""
    _advance(_world(url, {}), lambda event: None, lake=_deadly(url, nth))


def discard_until_request(url: str, nth: int) -> None:
    """Discard, and be killed before the nth request."""
    discard(_deadly(url, nth), NAME, AT_ONCE, by="killed")


def _world(url: str, env: Mapping[str, str]) -> World:
    os.environ.update(env)
    return World(open_lake(url), IN_PROCESS)


def _advance(world: World, on_stage: Any, lake: Lake | None = None) -> Any:
    lake = lake or world.lake
    return advance_dataset(
        PLANES,
        lake=lake,
        systems=world.systems,
        spark=IN_PROCESS,
        by=str(os.getpid()),
        on_stage=on_stage,
    )


def _deadly(url: str, nth: int) -> Lake:
    lake = open_lake(url)
    return Lake(FaultyStore(lake.store, [Fault("*", nth, "meanwhile", _die)]), lake.id)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

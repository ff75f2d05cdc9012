"""Writers and compactions of a table of facts in processes of their own: killed, or racing."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any

# What these import is imported here, once, for all that are forked from a process that has read
# this module.
import pyarrow.parquet  # noqa: F401

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.resources.errors import CommitConflictError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.unbounded.facts import NAME, table_of
from tests.faulty_store import Fault, FaultyStore

PATIENCE = 60


def act_until_request(url: str, options: Mapping[str, Any], what: str, nth: int) -> None:
    """Advance or compact, and be killed before the nth request."""
    lake = open_lake(url)
    deadly = Lake(FaultyStore(lake.store, [Fault("*", nth, "meanwhile", _die)]), lake.id)
    if what == "advance":
        World(lake, IN_PROCESS).advance(table_of(**options), lake=deadly)
    else:
        compact_dataset(deadly, NAME, spark=IN_PROCESS, by="killed", level=what)  # type: ignore[arg-type]


def advance_meanwhile(
    url: str,
    env: Mapping[str, str],
    rounds: int,
    start: Barrier,
    reported: Queue[tuple[str, int, str]],
) -> None:
    """Advance once a round, at the same time as others; tell how it ended, and how many records
    were read.
    """
    os.environ.update(env)
    world = World(open_lake(url), IN_PROCESS)
    for _ in range(rounds):
        start.wait(PATIENCE)
        try:
            report = advance_dataset(
                table_of(),
                lake=world.lake,
                systems=world.systems,
                spark=IN_PROCESS,
                by=str(os.getpid()),
            )
            reported.put((report.action, report.counters.get("read", 0), ""))
        except CommitConflictError as conflict:
            reported.put(("conflict", 0, str(conflict)))
        except Exception as error:  # told by the test
            reported.put(("error", 0, f"{type(error).__name__}: {error}"))
            raise
        start.wait(PATIENCE)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

"""Thousands of batches in one process leave no more behind in it than some tens.

Samples are taken after the garbage was collected; once lists of the last so many have filled, those
of two windows of batches are compared. What grows with each batch by design is left out: records,
and commits of logs until they are old enough to be deleted.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from dagster_adjunct import Application, bounded_dataset, run_application, unbounded_dataset
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.manifest import FAN_OUT
from dagster_adjunct.startpoints import Startpoints, StartpointSpecific
from tests.orchestration.step_world import ByTasks, StepWorld
from tests.rounds import rounds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# In batches: how often they come. Each window has some of each.
VERSION, CHANGES, STARTPOINT = rounds((10, 5, 10), (20, 5, 15))
# the most that a stream's manifest has, which a batch holds; others are in pages
SEGMENTS = 2 * FAN_OUT


def declare(world: StepWorld, engine: Any) -> Application:
    """Return joins with entries of both kinds, a lookup and updates of a table, and two outputs."""
    app = Application("shopping", engine=engine)
    shops = app.table(bounded_dataset("shops", input="lake.shops", key="shop", partitions=2))
    prices = app.table(unbounded_dataset("prices", input="lake.prices", key="shop", partitions=2))
    orders = app.input_stream("lake.orders", default_offset="oldest")
    joined = orders.join(shops, on="shop", how="left", select=["city"]).join(
        prices, on="shop", how="left"
    )
    joined.send_to(app.output_stream("lake.enriched", partitions=2, key="shop"))
    things = app.table(world.table())
    looked_up = joined.map("*", "shop as k").join(things, on="k", how="left", select={"v": "int"})
    looked_up.filter("size > 1").select("shop", "size", "v").send_to(
        app.output_stream("lake.large", partitions=1)
    )
    joined.map("shop as k", "size as v").update(
        things, set={"v": "v"}, if_missing={"v": "v", "w": "0"}, on_null_key="skip"
    )
    return app


@pytest.fixture
def world(step_world: StepWorld) -> StepWorld:
    step_world.stream("orders", "shop", 2, shop="string", size="int")
    step_world.stream("shops", "shop", 2, shop="string", city="string")
    step_world.stream("prices", "shop", 2, shop="string", price="int")
    step_world.send("shops", ("a", "Ulm"), version="0")
    step_world.send("prices", ("a", 1))
    for _ in range(SEGMENTS):
        step_world.send("orders", ("a", 1), ("b", 2), (None, 3))
    return step_world


def deliver(world: StepWorld, app: Application, number: int) -> None:
    """Send what comes after this batch."""
    if number % VERSION == 0:
        world.send("shops", ("a", f"Ulm {number}"), ("b", "Köln"), version=str(number))
    if number % CHANGES == 0:
        world.send("prices", ("a", number), ("b", number))
    if number % STARTPOINT == 0:
        offset = world.state(app).checkpoint
        ssp = min(ssp for ssp in offset if ssp.stream == "orders")
        request = StartpointSpecific(str(max(int(offset[ssp]) - 1, 0)))
        Startpoints(app, lake=world.lake).request(str(ssp), request, reason="again", by="test")
    world.send("orders", ("a", number), ("b", 2), (None, 3))


def count_held(world: StepWorld, spark: SparkSession | None) -> dict[str, int]:
    """Return how much of each kind this process, its session and the lake hold now."""
    # Frames that Python forgets are forgotten by the JVM, too, and what their finalizers let go is
    # collected only by the next collection.
    while gc.collect():
        pass
    with suppress(AttributeError):  # of the GNU library: what it keeps for later is not in use
        ctypes.CDLL(None).malloc_trim(0)
    found = {
        # Which tuples the collector follows differs by hundreds between equal moments.
        "objects": sum(1 for held in gc.get_objects() if type(held) is not tuple),
        "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": threading.active_count(),
        "KiB": (
            int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024
        ),
        # Listing the whole lake here would take memory that grows with its objects, and leave holes
        # in what Python has.
        "leases": sum(1 for _ in (world.folder / "lake").glob("datasets/*/leases/*")),
    }
    if spark is not None:
        jvm = spark._jvm
        assert jvm is not None
        for _ in range(2):  # between them Spark's cleaner forgets what the first has found
            jvm.java.lang.System.gc()
            time.sleep(0.2)
        runtime = jvm.java.lang.Runtime.getRuntime()
        found |= {
            "views": spark.sql("SHOW VIEWS").count(),
            "cached": len(spark.sparkContext._jsc.getPersistentRDDs()),
            "JVM KiB": (runtime.totalMemory() - runtime.freeMemory()) // 1024,
        }
    return found


@dataclass(frozen=True)
class Length:
    """How many batches go before samples are taken, and then are in each of two windows with so
    many samples.
    """

    before: int
    window: int
    samples: int


def growth(world: StepWorld, engine: str, length: Length) -> dict[str, float]:
    """Run batches in one process; return what each of them left behind, by kind: the medians of
    both windows are compared.
    """
    batches = length.before + 2 * length.window
    every = length.window // length.samples
    app = declare(world, "auto" if engine == "auto" else "spark")
    spark = None if engine == "auto" else world.spark()
    samples: list[dict[str, int]] = []

    def hear(event: StepEvent | AdvanceReport) -> None:
        if isinstance(event, StepEvent) and event.what == "batch":
            if event.batch > length.before and event.batch % every == 0:
                samples.append(count_held(world, spark))
            deliver(world, app, event.batch)

    step = partial(run_step, engine=ByTasks()) if engine == "tasks" else run_step
    with patch("dagster_adjunct.orchestration.step.run.run_step", step):
        report = run_application(
            app,
            lake=world.lake,
            spark=spark or IN_PROCESS,
            on_event=hear,
            max_batches=batches,
            follow=36_000,
        )
    assert report.step.batches == batches
    assert report.step.in_process_batches == (batches if engine == "auto" else 0)
    assert len(world.records()) == 2
    # Each window has a version of the bounded dataset: what is held rises and falls with these.
    first, last = samples[: length.samples], samples[length.samples :]
    return {
        kind: (
            (
                statistics.median(one[kind] for one in last)
                - statistics.median(one[kind] for one in first)
            )
            / length.window
        )
        for kind in first[0]
    }


# What each batch may leave behind: some objects until lists of the last so many are full, such as
# the 64 segments of the streams that a batch was planned over. Memory is looked at over 3,000
# batches only, since allocators and caches take a while: 8 KiB a batch would be 1 GiB in three days
# of batches every two seconds. Spark keeps its last 1,000 queries for its pages.
FEW = {"objects": 8, "files": 0.05, "threads": 0.05, "leases": 0.05, "views": 0.05, "cached": 0.05}
ALL = {**FEW, "objects": 1, "KiB": 8, "JVM KiB": 8}


@pytest.mark.parametrize(
    "engine",
    [
        "auto",
        pytest.param("spark", marks=pytest.mark.spark),
        pytest.param("tasks", marks=pytest.mark.long),
    ],
)
@pytest.mark.rounds
@pytest.mark.timeout(3 * 3600)
def test_batches_leave_nothing_behind_in_their_process(world: StepWorld, engine: str) -> None:
    left = growth(world, engine, rounds(Length(10, 20, 5), Length(1_000, 1_000, 10)))
    most = rounds(FEW, ALL)
    assert {kind: each for kind, each in left.items() if each > most.get(kind, each)} == {}, left

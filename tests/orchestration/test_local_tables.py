"""State of an application: local tables, in the lake like any dataset, written once for each batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.reading.open_dataset import open_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.objects import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark

COUNTS = Schema.of(shop="string", visits="bigint")


def counting(**options: Any) -> Application:
    """Count the visits of each shop: what was counted before, and one more."""
    app = Application("counting", max_batch_records=4)
    counts = app.local_table("visits_by_shop", key="shop", schema=COUNTS, partitions=2, **options)
    counted = app.output_stream("lake.counted", partitions=2, key="shop")
    (
        app.input_stream("lake.visits")
        .join(counts, on="shop", how="left")
        .map(one_more, keeps_partitioning=True)
        .send_to(counts)
        .send_to(counted)
    )
    return app


def one_more(frame: Any) -> Any:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    here = Window.partitionBy("shop").orderBy("__partition", "__offset")
    return frame.withColumn("visits", F.coalesce("visits", F.lit(0)) + F.row_number().over(here))


def held(world: StepWorld, table: str) -> dict[Any, dict[str, Any]]:
    return dict(open_dataset(world.lake, table).items())


def test_a_batch_counts_on_from_what_the_batches_before_have_counted(step_world: StepWorld) -> None:
    step_world.stream("visits", "shop", 2, visitor="string", shop="string")
    step_world.send("visits", *[(str(n), "ab"[n % 2]) for n in range(10)])
    app = counting()
    report = step_world.run(app)
    assert report.batches == 3
    assert held(step_world, "visits_by_shop") == {"a": {"shop": "a", "visits": 5}, "b": {"shop": "b", "visits": 5}}
    assert sorted(row["visits"] for row in step_world.rows("counted")) == sorted([*range(1, 6)] * 2)


@pytest.mark.long  # the commit alone, at every request: tests/assets/test_local_table_commits.py
@pytest.mark.timeout(3600)
def test_a_crash_at_any_request_of_a_batch_counts_every_visit_once(tmp_path: Path, spark: Any) -> None:
    for nth in range(1, 400):
        world = StepWorld(open_lake(tmp_path / str(nth)), tmp_path, lambda: spark)
        world.stream("visits", "shop", 2, visitor="string", shop="string")
        world.send("visits", *[(str(n), "aab"[n % 3]) for n in range(6)])
        app = counting()
        faulty = FaultyStore(world.lake.store, [Fault("*", nth, "crash-before")])
        died = False
        try:
            replace(world, lake=Lake(faulty, world.lake.id)).run(app)
        except Crash:
            died = True
        world.run(app)
        assert held(world, "visits_by_shop") == {"a": {"shop": "a", "visits": 4}, "b": {"shop": "b", "visits": 2}}, nth
        assert sorted(row["visits"] for row in world.rows("counted")) == [1, 1, 2, 2, 3, 4], nth
        if not died:
            assert nth > 30
            return
    pytest.fail("the run never ended")

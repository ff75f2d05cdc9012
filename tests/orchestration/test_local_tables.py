"""State of an application: local tables, in the lake like any dataset, written once for each
batch.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.startpoints.request import StartpointRequest
from dagster_adjunct.orchestration.startpoints.store import open_startpoints
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.resources.errors import NullKeyError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.startpoint import StartpointSpecific
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark

COUNTS = Schema.of(shop="string", visits="bigint")


def counting(partitions: int = 2) -> Application:
    """Count the visits of each shop: what was counted before, and one more."""
    app = Application("counting", max_batch_records=4)
    counts = app.local_table("visits_by_shop", key="shop", schema=COUNTS, partitions=partitions)
    counted = app.output_stream("lake.counted", partitions=partitions, key="shop")
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
    step_world.send("visits", *[(str(n), "ab"[n % 2]) for n in range(8)])
    app = counting()
    report = step_world.run(app)
    assert report.batches == 2
    assert held(step_world, "visits_by_shop") == {
        "a": {"shop": "a", "visits": 4},
        "b": {"shop": "b", "visits": 4},
    }
    assert sorted(row["visits"] for row in step_world.rows("counted")) == sorted([*range(1, 5)] * 2)


@pytest.mark.long  # the commit alone, at every request: tests/assets/test_local_table_commits.py
@pytest.mark.timeout(3600)
def test_a_crash_at_any_request_of_a_batch_counts_every_visit_once(
    tmp_path: Path, spark: Any
) -> None:
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
        assert held(world, "visits_by_shop") == {
            "a": {"shop": "a", "visits": 4},
            "b": {"shop": "b", "visits": 2},
        }, nth
        assert sorted(row["visits"] for row in world.rows("counted")) == [1, 1, 2, 2, 3, 4], nth
        if not died:
            assert nth > 30
            return
    pytest.fail("the run never ended")


def last_seen(world: StepWorld, table: str = "seen") -> dict[Any, Any]:
    return {key: entry["place"] for key, entry in held(world, table).items()}


def test_sent_records_are_joined_in_the_same_batch_and_two_streams_feed_one_table(
    step_world: StepWorld,
) -> None:
    step_world.stream("scans", "item", 2, item="string", place="string")
    step_world.stream("moves", "item", 3, item="string", place="string")
    step_world.stream("asked", "item", 2, item="string")
    step_world.send("scans", ("a", "dock"), ("a", "shelf"), ("b", "dock"), ("c", "dock"))
    step_world.send("moves", ("b", "truck"), deleted=[("c", None)])
    step_world.send("asked", ("a",), ("b",), ("c",))
    app = Application("seeing")
    seen = app.local_table(
        "seen", key="item", schema=Schema.of(item="string", place="string"), partitions=2
    )
    asked = app.input_stream("lake.asked")
    app.input_stream("lake.scans").send_to(seen)
    asked.join(seen, on="item", how="left", name="one").send_to(
        app.output_stream("lake.one", partitions=2, key="item")
    )
    app.input_stream("lake.moves").partition_by("item").send_to(seen)
    asked.join(seen, on="item", how="left", name="two").send_to(
        app.output_stream("lake.two", partitions=2, key="item")
    )
    report = step_world.run(app)
    answers = [
        {row["item"]: row["place"] for row in step_world.rows(name)} for name in ("one", "two")
    ]
    assert answers == [
        {"a": "shelf", "b": "dock", "c": "dock"},
        {"a": "shelf", "b": "truck", "c": None},
    ]
    assert last_seen(step_world) == {"a": "shelf", "b": "truck"}
    assert report.counters["seen"] == {
        "rows": 4,
        "deleted": 1,
        "superseded": 1,
        "duplicate_batches": 0,
    }
    before = open_dataset(step_world.lake, "seen").version
    step_world.send("moves", ("b", "hall"))
    assert step_world.run(app, run="run-2").versions["seen"] == [before]


def test_a_condition_deletes_rows_and_null_keys_are_skipped_on_request(
    step_world: StepWorld,
) -> None:
    step_world.stream("visits", "shop", 2, visitor="string", shop="string")
    step_world.send("visits", ("in", "a"), ("in", "b"), ("out", "a"), ("in", None))
    app = Application("open")
    opened = app.local_table(
        "opened", key="shop", schema=Schema.of(shop="string", visitor="string"), partitions=3
    )
    app.input_stream("lake.visits").send_to(opened, deleted="visitor = 'out'", on_null_key="skip")
    report = step_world.run(app)
    assert held(step_world, "opened") == {"b": {"shop": "b", "visitor": "in"}}
    assert report.counters["opened"]["null_keys"] == 1


def test_the_error_for_a_null_key_names_operator_position_and_next_step(
    step_world: StepWorld,
) -> None:
    step_world.stream("visits", "shop", 1, visitor="string", shop="string")
    step_world.send("visits", ("in", "a"), ("in", None), ("in", "b"), ("in", None))
    app = Application("open")
    opened = app.local_table(
        "opened", key="shop", schema=Schema.of(shop="string", visitor="string"), partitions=3
    )
    app.input_stream("lake.visits").send_to(opened)
    reported = (
        r"^send-to-table-2-opened: local table 'opened': .* null in 'shop'.*; the first is"
        r" lake.visits.0 at offset 1"
    )
    with pytest.raises(NullKeyError, match=rf"{reported}.*on_null_key"):
        step_world.run(app)


@pytest.mark.one_engine
def test_records_that_go_on_are_computed_once(step_world: StepWorld) -> None:
    step_world.stream("visits", "shop", 2, visitor="string", shop="string")
    step_world.send("visits", *[(str(n), "ab"[n % 2]) for n in range(10)])
    calls = step_world.spark().sparkContext.accumulator(0)

    def counted(frame: Any) -> Any:
        from pyspark.sql import functions as F

        @F.udf("bigint")
        def one(shop):  # type: ignore[no-untyped-def]
            calls.add(1)
            return 1

        return frame.withColumn("visits", one.asNondeterministic()("shop"))

    app = Application("once")
    table = app.local_table("once", key="shop", schema=COUNTS, partitions=2)
    stream = app.input_stream("lake.visits").map(counted, keeps_partitioning=True).send_to(table)
    stream.send_to(app.output_stream("lake.out", partitions=2, key="shop"))
    step_world.run(app)
    assert calls.value == 10


def test_a_bounded_replay_leaves_state_alone_and_a_startpoint_adds_to_it(
    step_world: StepWorld,
) -> None:
    step_world.stream("visits", "shop", 1, visitor="string", shop="string")
    step_world.send("visits", ("1", "a"), ("2", "a"))
    app = counting(partitions=1)
    step_world.run(app)
    ssp = SystemStreamPartition("lake", "visits", 0)

    def ask(offset: str, until: str | None = None) -> None:
        now = round(time.time() * 1000)
        made = [
            StartpointSpecific(creation_timestamp_ms=now, offset=at)
            for at in (offset, until)
            if at is not None
        ]
        request = StartpointRequest(
            ssp=ssp, startpoint=made[0], until=made[1] if until else None, by="me", reason="why"
        )
        open_startpoints(step_world.lake, app).write_startpoints([request])

    ask("0", until="2")
    step_world.run(app)
    assert held(step_world, "visits_by_shop")["a"]["visits"] == 2
    assert sorted(row["visits"] for row in step_world.rows("counted")) == [1, 2, 3, 4]
    ask("1")
    step_world.run(app)
    assert held(step_world, "visits_by_shop")["a"]["visits"] == 3


def test_an_abandoned_batch_is_removed_from_state_before_its_records_are_reread(
    step_world: StepWorld,
) -> None:
    step_world.stream("visits", "shop", 2, visitor="string", shop="string")
    step_world.send("visits", ("1", "a"), ("2", "b"), ("3", "a"))
    app = counting()

    def die(event: StepEvent) -> None:
        if event.what == "outputs":
            raise Crash

    with pytest.raises(Crash):
        step_world.run(app, on_event=die)
    assert held(step_world, "visits_by_shop")["a"]["visits"] == 2
    BatchLog(step_world.lake, app.name).abandon(reason="a mistake", by="me", skip=False)
    step_world.run(app)
    assert held(step_world, "visits_by_shop") == {
        "a": {"shop": "a", "visits": 2},
        "b": {"shop": "b", "visits": 1},
    }


def test_two_streams_may_be_sent_to_one_dataset_and_the_next_batch_meets_both(
    step_world: StepWorld,
) -> None:
    step_world.stream("one", "shop", 2, shop="string", city="string")
    step_world.stream("two", "shop", 2, shop="string", city="string")
    step_world.stream("cities", "shop", 2, shop="string", city="string")
    step_world.send("one", ("a", "Aa"), ("b", "Bb"), ("c", "Cc"))
    step_world.send("two", ("a", "Ab"), ("d", "Dd"), ("e", "Ee"))
    app = Application("feeding", max_batch_records=3)
    cities = app.table(unbounded_dataset("cities", input="lake.cities", key="shop", partitions=2))
    one = app.input_stream("lake.one")
    one.join(cities, on="shop", how="left", select=["city as known"]).send_to(
        app.output_stream("lake.met", partitions=2, key="shop")
    )
    one.send_to(cities)
    app.input_stream("lake.two").send_to(cities)
    report = run_application(
        app, lake=step_world.lake, systems=step_world.systems, spark=step_world.spark, run="one"
    )
    assert report.step.batches > 1
    assert report.step.counters["lake.cities"] == {"rows": 6, "duplicate_batches": 0}
    assert len(report.step.versions["cities"]) > 1, "batches after the first meet what was fed"
    step_world.advance(cities.dataset)
    assert set(held(step_world, "cities")) == {*"abcde"}


def test_only_records_written_to_a_table_move_and_the_others_stay_in_place(
    step_world: StepWorld,
) -> None:
    for name, key, partitions in (("r", "n", 3), ("s", "k", 4)):
        step_world.stream(name, key, partitions, k="string", n="bigint")
        step_world.send(name, *((f"k{number}", number) for number in range(30)))
    app = Application("app", auto_repartition=True)
    kept = app.local_table("kept", key="k", schema=Schema.of(k="string", n="bigint"), partitions=4)
    sent = app.input_stream("lake.r").send_to(kept)
    sent.send_to(app.output_stream("lake.out", partitions=3, key="n"))
    matched = app.input_stream("lake.s").join(kept, on="k", select=["n as m"])
    matched.send_to(app.output_stream("lake.met", partitions=4, key="k"))
    step_world.run(app)
    moved = [
        (exchange.operator, exchange.reason) for exchange in step_world.context(app).plan.exchanges
    ]
    assert ("send-to-table-2-kept", "auto_repartition") in moved
    assert sorted(row["n"] for row in step_world.rows("out")) == list(range(30))
    assert [row["m"] for row in step_world.rows("met")] == [
        row["n"] for row in step_world.rows("met")
    ]
    assert len(step_world.rows("met")) == 30

"""Records that do not meet an expectation are kept, dropped, diverted, or fail the batch, as plain
Python decides; and are counted once per batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.operator import OnFail
from dagster_adjunct.orchestration.step.engines import BatchEngine, SmallBatchesInProcess
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import ExpectationError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.startpoints import StartpointOldest, Startpoints
from tests.faulty_store import Crash
from tests.orchestration.step_world import ByTasks, StepWorld, crash_at, twin_of

Row = tuple[str, int | None, int | None]
KEEPING: tuple[OnFail, ...] = ("warn", "drop", "letter")


@pytest.fixture
def world(tmp_path: Path) -> StepWorld:
    return new_world(StepWorld(open_lake(tmp_path / "lake"), tmp_path, IN_PROCESS))


def new_world(world: StepWorld) -> StepWorld:
    world.stream("orders", "k", 3, k="string", amount="int", size="int")
    return world


def draw_rows(seed: int, count: int = 60) -> list[Row]:
    drawn = random.Random(seed)
    values = [None, -2, -1, 0, 1, 2]
    return [
        (f"k{drawn.randrange(9)}", drawn.choice(values), drawn.choice(values)) for _ in range(count)
    ]


def declare(on_fail: OnFail) -> Application:
    """Return an application that checks each order's amount, as told, and then its size."""
    app = Application("shop", engine="auto")
    orders = app.input_stream("lake.orders", default_offset="oldest")
    checked = orders.expect("amount > 0", name="positive", on_fail=on_fail)
    sized = checked.expect("size >= 0 or size is null", name="sized")
    sized.send_to(app.output_stream("lake.checked", partitions=3, key="k"))
    if on_fail == "letter":
        checked.failed_records().send_to(app.output_stream("lake.failed", partitions=2, key="k"))
    return app


def expected_of(rows: list[Row], on_fail: OnFail) -> dict[str, Any]:
    """Return what plain Python leaves: the records that are sent, those that are diverted, and
    the counts.
    """
    kept = []
    failed = []
    for key, amount, size in rows:
        is_met = amount is not None and amount > 0
        if not is_met:
            failed.append({"k": key, "amount": amount, "size": size, "failed_rule": "positive"})
        if is_met or on_fail == "warn":
            kept.append({"k": key, "amount": amount, "size": size})
    too_small = [row for row in kept if row["size"] is not None and row["size"] < 0]
    return {
        "kept": sorted(kept, key=repr),
        "failed": sorted(failed, key=repr) if on_fail == "letter" else [],
        "positive": {"rows": len(rows), "failed": len(failed)},
        "sized": {"rows": len(kept), "failed": len(too_small)},
    }


def run(
    world: StepWorld,
    app: Application,
    engine: Callable[[], BatchEngine] = SmallBatchesInProcess,
    **options: Any,
) -> StepReport:
    return run_step(world.context(app, **options), engine())


def left_by(world: StepWorld, on_fail: OnFail, counters: dict[str, Any]) -> dict[str, Any]:
    failed = world.rows("failed") if on_fail == "letter" else []
    return {
        "kept": sorted(world.rows("checked"), key=repr),
        "failed": sorted(failed, key=repr),
        "positive": counters["expect-2-positive"],
        "sized": counters["expect-3-sized"],
    }


@pytest.mark.parametrize("on_fail", KEEPING)
def test_failed_records_go_where_plain_python_puts_them(world: StepWorld, on_fail: OnFail) -> None:
    rows = draw_rows(1)
    world.send("orders", *rows)
    report = run(world, declare(on_fail))
    assert report.in_process_batches == report.batches == 1
    assert left_by(world, on_fail, report.counters) == expected_of(rows, on_fail)


def test_a_sample_names_failed_records_by_key_and_position(world: StepWorld) -> None:
    world.send("orders", *draw_rows(2))
    report = run(world, declare("warn"))
    sample = report.samples["expect-2-positive"]
    assert 1 < len(sample) <= 5
    at_place = {}
    table = world.streams.read_arrow(world.streams.all_ranges("orders"))
    for row in table.to_pylist():
        place = f"lake.orders.{row['__partition']} offset {row['__offset']}"
        at_place[f"k = {row['k']} at {place}"] = row["amount"]
    for text in sample:
        amount = at_place[text]
        assert amount is None or amount <= 0


@pytest.mark.parametrize("event", ["output", "outputs"])
def test_a_killed_batch_is_counted_and_written_once(world: StepWorld, event: str) -> None:
    rows = draw_rows(3)
    world.send("orders", *rows)
    app = declare("letter")
    with pytest.raises(Crash):
        run(world, app, on_event=crash_at(event))
    report = run(world, app)
    totals = world.state(app).totals
    assert left_by(world, "letter", report.counters) == expected_of(rows, "letter")
    assert left_by(world, "letter", totals) == expected_of(rows, "letter")


def test_a_batch_fails_before_anything_is_written(world: StepWorld) -> None:
    rows = draw_rows(4)
    world.send("orders", *[row for row in rows if row[1] == 1])
    app = declare("fail")
    report = run(world, app)
    assert report.counters["expect-2-positive"]["failed"] == 0
    before = world.rows("checked")
    world.send("orders", ("a", 1, 1), ("b", 0, 1), ("c", None, 1))
    failed = []
    table = world.streams.read_arrow(world.streams.all_ranges("orders"))
    for row in table.to_pylist():
        if row["amount"] != 1:
            failed.append((row["__partition"], row["__offset"], row["k"]))
    first = min(failed)
    with pytest.raises(ExpectationError) as failure:
        run(world, app)
    error = failure.value
    assert (error.operator, error.expectation) == ("expect-2-positive", "positive")
    assert (error.stream, error.partition, error.offset) == ("lake.orders", first[0], str(first[1]))
    assert f"k = {first[2]} at lake.orders.{first[0]} offset {first[1]}" in error.problem
    assert world.rows("checked") == before
    # The advice of the error.
    report = run(world, declare("warn"))
    assert report.counters["expect-2-positive"] == {"rows": 3, "failed": 2}
    assert len(world.rows("checked")) == len(before) + 3


def test_sensitive_values_are_not_shown(world: StepWorld) -> None:
    schema = Schema.of(email="string", amount="int").with_sensitive("email")
    world.streams.create("people", schema=schema, key=["email"], partitions=1)
    world.send("people", ("me@example.org", 0))

    def app_of(on_fail: OnFail) -> Application:
        app = Application("people")
        people = app.input_stream("lake.people", default_offset="oldest")
        checked = people.expect("amount > 0", name="positive", on_fail=on_fail)
        checked.send_to(app.output_stream("lake.checked", partitions=1))
        return app

    with pytest.raises(ExpectationError) as failure:
        run(world, app_of("fail"))
    error = failure.value
    assert "email = *** at lake.people.0 offset 0" in error.problem
    assert error.record == "{email: ***, amount: 0}"
    assert "example" not in str(error)
    report = run(world, app_of("warn"))
    assert report.samples["expect-2-positive"] == ("email = *** at lake.people.0 offset 0",)


def test_a_replay_is_counted_again_as_by_other_operators(world: StepWorld) -> None:
    rows = draw_rows(5)
    world.send("orders", *rows)
    app = declare("drop")
    run(world, app)
    startpoints = Startpoints(app, lake=world.lake)
    startpoints.request("lake.orders", StartpointOldest(), reason="again", by="test")
    report = run(world, app)
    assert report.counters["expect-2-positive"] == expected_of(rows, "drop")["positive"]
    totals = world.state(app).totals["expect-2-positive"]
    assert totals["rows"] == 2 * len(rows)


@pytest.mark.spark
@pytest.mark.parametrize("on_fail", ["warn", "letter"])
def test_all_engines_leave_the_same(step_world: StepWorld, on_fail: OnFail) -> None:
    world = new_world(step_world)
    rows = draw_rows(6)
    world.send("orders", *rows)
    engines = {"tasks": ByTasks, "small": BatchEngine, "auto": SmallBatchesInProcess}
    samples = set()
    for name, engine in engines.items():
        twin = twin_of(world, name)
        report = run(twin, declare(on_fail), engine)
        assert report.in_process_batches == (name == "auto")
        assert left_by(twin, on_fail, report.counters) == expected_of(rows, on_fail)
        samples.add((report.samples["expect-2-positive"], report.samples["expect-3-sized"]))
    assert len(samples) == 1


@pytest.mark.spark
def test_spark_fails_a_batch_with_the_same_record(step_world: StepWorld) -> None:
    world = new_world(step_world)
    world.send("orders", *draw_rows(7))
    errors = set()
    for name, engine in {"tasks": ByTasks, "auto": SmallBatchesInProcess}.items():
        twin = twin_of(world, name)
        with pytest.raises(ExpectationError) as failure:
            run(twin, declare("fail"), engine)
        errors.add((failure.value.problem, failure.value.record, failure.value.offset))
        assert twin.streams.list_streams() == ["orders"]
    assert len(errors) == 1

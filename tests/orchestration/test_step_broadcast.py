"""Broadcast inputs on Spark: each record reaches each task once, in streams and tables, also
after a crash.
"""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointSpecific
from tests.faulty_store import Crash
from tests.orchestration.step_world import StepWorld

TASKS = 3
RULES = [("a", 1), ("b", 2), ("c", 3), ("d", 4)]
NAMES = {"a": "first", "c": "third"}


@pytest.fixture
def world(step_world: StepWorld) -> StepWorld:
    step_world.stream("events", "k", TASKS, k="string", v="int")
    step_world.stream("rules", "rule", 2, rule="string", limit="int")
    step_world.stream("names", "rule", 1, rule="string", name="string")
    step_world.send("events", *((f"k{number}", number) for number in range(6)))
    step_world.send("rules", *RULES)
    step_world.send("names", *NAMES.items())
    return step_world


def application(
    world: StepWorld, *, more_tasks: int | None = None, tasks: int | None = None
) -> Application:
    """Rules go to all tasks, and what each makes of them to a stream by task, a stream by rule,
    and a table.
    """
    app = Application("app", max_batch_records=100, tasks=tasks)
    events = app.input_stream("lake.events").send_to(
        app.output_stream("lake.seen", partitions=TASKS, key="k")
    )
    if more_tasks:
        events.partition_by("v", partitions=more_tasks).send_to(
            app.output_stream("lake.more", partitions=1)
        )
    names = unbounded_dataset("names", input="lake.names", key="rule", broadcast=True)
    rules = (
        app.input_stream("lake.rules", broadcast=True)
        .filter("limit < 4 or task = 1")
        .join(app.table(names), on="rule", how="left")
        .map("rule", "name", "limit * 10 + task as made", "task")
    )
    rules.send_to(app.output_stream("lake.alike", partitions=TASKS, key="task"))
    rules.map("rule", "made").send_to(app.output_stream("lake.keyed", partitions=2, key="rule"))
    rules.map("rule as k", "made as v", "task as w").send_to(app.table(world.table()))
    return app


def expected(rules: list[tuple[str, int]] = RULES, tasks: int = TASKS) -> list[dict[str, Any]]:
    """Return what the tasks make of these rules: computed one by one."""
    return [
        {"rule": rule, "name": NAMES.get(rule), "made": limit * 10 + task, "task": task}
        for task in range(tasks)
        for rule, limit in rules
        if limit < 4 or task == 1
    ]


def order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["task"], row["rule"]))


def test_every_task_gets_every_record_once(world: StepWorld) -> None:
    report = world.run(application(world))
    assert order(world.rows("alike")) == order(expected())
    pairs = sorted((row["rule"], row["made"]) for row in world.rows("keyed"))
    assert pairs == sorted((row["rule"], row["made"]) for row in expected())
    # Of the copies of one record, the last task's is written last.
    last = {row["rule"]: (row["made"], row["task"]) for row in order(expected())}
    assert world.records() == last
    assert report.counters["lake.alike"]["rows"] == len(expected())
    # the input is counted once, however many tasks read it
    assert report.state.records == len(RULES) + 6
    world.send("rules", ("e", 3))
    world.run(application(world))
    assert order(world.rows("alike")) == order([*expected(), *expected([("e", 3)])])


def test_tasks_that_own_several_partitions_get_every_record_once(world: StepWorld) -> None:
    world.run(application(world, tasks=2))
    assert order(world.rows("alike")) == order(expected(tasks=2))
    assert sorted(row["k"] for row in world.rows("seen")) == [f"k{number}" for number in range(6)]


def test_startpoints_and_replays_go_to_all_tasks_in_an_epoch_of_their_own(world: StepWorld) -> None:
    app = application(world)
    world.run(app)
    startpoints = Startpoints(app, lake=world.lake)
    startpoints.request("lake.rules.0", StartpointOldest(), by="ada", reason="r")
    startpoints.request(
        "lake.rules.1",
        StartpointOldest(),
        until=StartpointSpecific(offset="1"),
        by="ada",
        reason="r",
    )
    read = world.streams.read_arrow(world.streams.all_ranges("rules")).to_pylist()
    again = [
        (row["rule"], row["limit"])
        for row in read
        if row["__partition"] == 0 or row["__offset"] == 0
    ]
    world.run(app)
    records = world.streams.read_arrow(world.streams.all_ranges("alike")).to_pylist()
    replayed = [
        {name: row[name] for name in ("rule", "name", "made", "task")}
        for row in records
        if row["__epoch"] == 1
    ]
    assert order(replayed) == order(expected(again))


def test_a_batch_that_died_between_outputs_is_repeated_for_its_original_tasks(
    world: StepWorld,
) -> None:
    def die(event: StepEvent) -> None:
        if event.what == "output" and event.detail["output"] == "lake.keyed":
            raise Crash

    with pytest.raises(Crash):
        world.run(application(world), on_event=die)
    assert order(world.rows("alike")) == order(expected())
    grown = application(world, more_tasks=5)
    report = world.run(grown)
    assert report.counters["lake.alike"]["duplicate_batches"] == 1
    assert len(world.rows("keyed")) == len(expected())
    world.send("rules", ("e", 3))
    world.run(grown)
    assert order(world.rows("alike")) == order([*expected(), *expected([("e", 3)], tasks=5)])


def test_a_stream_is_broadcast_in_the_middle_of_a_graph(world: StepWorld) -> None:
    """Also what is broadcast already, and together with what is not; a repeated batch sends the
    same bytes.
    """

    def died(event: StepEvent) -> None:
        if event.what == "output" and event.detail["output"] == "lake.last":
            raise Crash

    app = Application("app")
    events = app.input_stream("lake.events")
    reported = app.input_stream("lake.rules").filter("limit > 1").broadcast()
    reported.send_to(app.output_stream("lake.told", partitions=TASKS, key="task"))
    twice = reported.broadcast(task="again").select("rule as k", "again * 10 + task as v")
    events.merge(twice).send_to(app.output_stream("lake.both", partitions=1))
    events.send_to(app.output_stream("lake.last", partitions=TASKS, key="k"))
    with pytest.raises(Crash):
        world.run(app, on_event=died)
    report = world.run(app)
    assert report.counters["lake.both"]["duplicate_batches"] == 1
    rows = sorted((row["rule"], row["limit"], row["task"]) for row in world.rows("told"))
    assert rows == sorted(
        (rule, limit, task) for rule, limit in RULES if limit > 1 for task in range(TASKS)
    )
    copies = [
        (rule, a * 10 + b)
        for rule, limit in RULES
        if limit > 1
        for a in range(TASKS)
        for b in range(TASKS)
    ]
    both = [(row["k"], row["v"]) for row in world.rows("both")]
    assert sorted(both) == sorted([*copies, *((f"k{number}", number) for number in range(6))])
    world.again(app)

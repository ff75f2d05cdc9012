"""Results that follow later changes of datasets, against plain Python."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.batch_log.checkpoints import CheckpointManager
from dagster_adjunct.orchestration.maintenance.followers import list_lagging_followers
from dagster_adjunct.orchestration.maintenance.repartition import repartition_stream
from dagster_adjunct.orchestration.operators.lookups import Restate
from dagster_adjunct.orchestration.planner.co_partitioning import format_bytes
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.step import arrow_frames, following
from dagster_adjunct.orchestration.step.run import run_application
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.errors import PlanningError, RestatementError, StillReadError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake import key_index
from dagster_adjunct.resources.streams.startpoint import (
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
)
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.faulty_store import Crash, Fault, FaultyStore, deaths
from tests.orchestration.changing_datasets import (
    KEYS,
    WHY,
    Changing,
    Delivered,
    Following,
    follow,
    follow_and_die,
    new_world,
)
from tests.orchestration.step_world import StepWorld
from tests.rounds import rounds

WEEK = timedelta(days=7)
EVENTS = ("intent", "output", "outputs", "batch")
Results = dict[int, tuple[str, int | None]]


def enriching(
    dataset: Changing, how: str = "left", restate: Any = WEEK, **options: Any
) -> Application:
    app = Application("app", engine="auto", **options)
    facts = app.input_stream("lake.facts", default_offset="oldest")
    planes = app.table(replace(dataset.declare(), bootstrap=False))
    moved = facts.partition_by("k")
    joined = moved.join(planes, on="k", how=how, select=["v"], restate=restate)
    joined.send_to(app.output_stream("lake.out", partitions=2, key="k"))
    return app


def latest(world: StepWorld) -> Results:
    ranges = world.streams.all_ranges("out")
    rows = world.streams.read_arrow(ranges, epochs="latest").to_pylist()
    found = {row["n"]: (row["k"], row["v"]) for row in rows}
    assert len(found) == len(rows)
    return found


def expected(dataset: Changing, facts: dict[int, str], how: str = "left") -> Results:
    """Return what a run that knew everything from the start would have sent."""
    results = {}
    for n, k in facts.items():
        entry = dataset.served.get(k)
        if entry is not None or how == "left":
            results[n] = (k, None if entry is None else entry[0])
    return results


def begun(kind: type[Changing], folder: Path, how: str = "left") -> tuple[Changing, dict[int, str]]:
    """Return a dataset with some entries, and the facts that were joined with them."""
    dataset = kind(new_world(folder), random.Random(1))
    world = dataset.world
    dataset.begin()
    world.stream("facts", "k", 2, n="int", k="string")
    dataset.send({"a": (1, 1), "b": (2, 2), "c": (3, 3)})
    facts = {n: "abcd"[n % 4] for n in range(8)}
    world.send("facts", *facts.items())
    run_step(world.context(enriching(dataset, how)))
    return dataset, facts


@pytest.mark.parametrize("kind", [Following, Delivered])
@pytest.mark.parametrize("how", ["left", "inner"])
def test_results_are_those_of_a_run_that_knew_everything(
    tmp_path: Path, kind: type[Changing], how: str
) -> None:
    dataset, facts = begun(kind, tmp_path, how)
    world = dataset.world
    assert latest(world) == expected(dataset, facts, how)
    dataset.send({"a": (7, 1), "d": (4, 4)}, gone=["b"])
    report = run_step(world.context(enriching(dataset, how)))
    assert report.counters["restated"] == {"changed_keys": 3, "records": 6}
    assert latest(world) == expected(dataset, facts, how)
    everything = world.streams.read_arrow(world.streams.all_ranges("out")).to_pylist()
    assert {row["k"] for row in everything if row["__epoch"]} <= {"a", "b", "d"}
    assert run_step(world.context(enriching(dataset, how))).batches == 0


def abandon(world: StepWorld) -> None:
    log = BatchLog(world.lake, "app")
    if log.read().state.open is not None:
        log.abandon(skip=False, by="test", reason="test")


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("kind", [Following, Delivered])
@pytest.mark.parametrize("seed", range(rounds(1, 40)))
def test_whatever_happens_results_become_those_of_a_run_that_knew_everything(
    tmp_path: Path, kind: type[Changing], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(f"{kind.__name__} {seed}")
    monkeypatch.setattr(arrow_frames, "_LOOKUP_COST", seed % 2)
    dataset = kind(new_world(tmp_path), draw, draw.choice([2, None]))
    world = dataset.world
    how = draw.choice(["left", "inner"])
    dataset.begin()
    world.stream("facts", "k", 2, n="int", k="string")
    dataset.change()
    facts: dict[int, str] = {}

    def make() -> Application:
        return enriching(dataset, how, max_batch_records=draw.choice([1, 4, 1000]))

    for _ in range(rounds(25, 40)):
        draw.choice(dataset.actions)()
        fresh = {len(facts) + n: draw.choice(KEYS) for n in range(draw.randrange(3))}
        if fresh:
            world.send("facts", *fresh.items())
            facts |= fresh
        match draw.randrange(6):
            case 0:
                follow_and_die(world, make(), draw.choice(EVENTS))
                if draw.randrange(3) == 0:
                    abandon(world)
            case 1 | 2:
                follow(world, make(), max_batches=1)
            case 3 if facts:
                Startpoints(make(), lake=world.lake).request(
                    "lake.facts",
                    StartpointOldest(),
                    until=StartpointUpcoming(),
                    reason="test",
                    by="test",
                )
            case 4:
                follow(world, make())
                if draw.randrange(4) == 0:
                    dataset.repartition()
    follow(world, make())
    assert latest(world) == expected(dataset, facts, how)
    assert world.state(make()).open is None


def restated_with(plan: Sequence[Fault], kind: type[Changing], folder: Path) -> list[Any]:
    """Run once with these faults, and once without, when entries have changed; return the requests."""
    dataset, facts = begun(kind, folder)
    world = dataset.world
    dataset.send({"a": (7, 1), "d": (4, 4)}, gone=["b"])
    lake = world.lake
    store = FaultyStore(lake.store, plan)
    world.lake = Lake(store, lake.id)
    with suppress(Crash):
        run_step(world.context(enriching(dataset)))
    world.lake = lake
    run_step(world.context(enriching(dataset)))
    assert latest(world) == expected(dataset, facts)
    assert len(world.rows("out")) == 14, "each record once in each epoch"
    assert not list(lake.store.list("applications/app/answers/"))
    return store.requests


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("kind", [Following, Delivered])
def test_a_restatement_that_is_killed_at_any_request_is_repeated_as_it_was(
    tmp_path: Path, kind: type[Changing]
) -> None:
    requests = restated_with((), kind, tmp_path)
    for nth in deaths(requests)[:: rounds(5, 1)]:
        restated_with([Fault("*", nth, "crash-before")], kind, tmp_path)


def test_an_application_that_began_later_restates_only_what_it_has_read(tmp_path: Path) -> None:
    dataset, _ = begun(Following, tmp_path)
    world = dataset.world
    late = Application("late", engine="auto")
    joined = late.input_stream("lake.facts", default_offset="upcoming").join(
        late.table(dataset.declare()), on="k", how="left", select=["v"], restate=WEEK
    )
    joined.send_to(late.output_stream("lake.later", partitions=2, key="k"))
    run_step(world.context(late))
    world.send("facts", (100, "a"))
    run_step(world.context(late))
    dataset.send({"a": (7, 1)})
    report = run_step(world.context(late))
    assert report.counters["restated"] == {"changed_keys": 1, "records": 1}
    assert [(row["n"], row["v"]) for row in world.rows("later")] == [(100, 1), (100, 7)]


def test_records_of_changed_keys_are_found_by_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_index, "FEWEST_RECORDS", 1)
    dataset, facts = begun(Following, tmp_path)
    world = dataset.world

    def has_index() -> list[bool]:
        plan = plan_application(enriching(dataset), lake=world.lake)
        return [one.indexed for restated in plan.late_data.restatements for one in restated.inputs]

    assert has_index() == [False]
    world.streams.configure("facts", retention=None, compaction=None, find_by=["k"])
    assert world.streams.maintain("facts").indexes == 1
    assert has_index() == [True]
    dataset.send({"a": (7, 1)})
    report = run_step(world.context(enriching(dataset)))
    assert report.counters["restated"] == {"changed_keys": 1, "records": 2}
    assert latest(world) == expected(dataset, facts)


def test_records_that_are_too_old_keep_their_results(tmp_path: Path) -> None:
    dataset = Following(new_world(tmp_path), random.Random(1))
    world = dataset.world
    dataset.begin()
    world.stream("facts", "k", 2, n="int", k="string")
    dataset.send({"a": (1, 1)})
    world.send("facts", (0, "a"), sent_at=datetime.now(UTC) - 2 * WEEK)
    world.send("facts", (1, "a"))
    run_step(world.context(enriching(dataset)))
    dataset.send({"a": (7, 1)})
    run_step(world.context(enriching(dataset)))
    assert latest(world) == {0: ("a", 1), 1: ("a", 7)}


@pytest.mark.parametrize(
    "limits", [{"most_keys": 2}, {"most_records": 5}, {"most_share": 0.5}], ids=str
)
@pytest.mark.parametrize("advised", ["force", "upcoming"])
def test_too_much_is_an_error_once_the_input_has_been_read(
    tmp_path: Path, limits: dict[str, Any], advised: str
) -> None:
    dataset, facts = begun(Following, tmp_path)
    world = dataset.world
    before = latest(world)
    dataset.send({"a": (7, 1), "d": (4, 4)}, gone=["b"])
    facts[8] = "a"
    world.send("facts", (8, "a"))
    app = enriching(dataset, restate=Restate(WEEK, **limits))
    with pytest.raises(RestatementError) as caught:
        run_step(world.context(app))
    left = {**before, 8: ("a", 7)}
    assert latest(world) == left
    follow_advice(world, app, str(caught.value), advised)
    run_step(world.context(app))
    assert latest(world) == (expected(dataset, facts) if advised == "force" else left)
    # Later changes are followed, within the limits.
    known = latest(world)
    dataset.send({"c": (9, 9)})
    run_step(world.context(app))
    assert latest(world) == {**known, 2: ("c", 9), 6: ("c", 9)}
    dataset.send({"a": (8, 1), "b": (8, 4), "d": (5, 5)})
    with pytest.raises(RestatementError):
        run_step(world.context(app))


def follow_advice(world: StepWorld, app: Application, message: str, advised: str) -> None:
    """Request what one of the commands in a message requests."""
    position: Any = StartpointUpcoming()
    if advised == "force":
        found = re.search(r"changes\.planes --offset (\d+) --force", message)
        assert found is not None
        position = StartpointSpecific(found[1])
    Startpoints(app, lake=world.lake).request(
        "changes.planes", position, force=advised == "force", reason="test", by="test"
    )


def test_restating_on_purpose_includes_versions_that_were_served_in_between(tmp_path: Path) -> None:
    dataset, facts = begun(Delivered, tmp_path)
    assert isinstance(dataset, Delivered)
    world = dataset.world
    app = enriching(dataset, restate=Restate(WEEK, every=timedelta(days=1), most_keys=1))
    dataset.send({"a": (7, 1), "b": (7, 2)})
    facts |= {8: "a", 9: "b"}
    world.send("facts", (8, "a"), (9, "b"))
    with pytest.raises(RestatementError) as caught:
        run_step(world.context(app))
    dataset.rollback()
    follow_advice(world, app, str(caught.value), "force")
    run_step(world.context(app))
    assert latest(world) == expected(dataset, facts)


@pytest.mark.parametrize("kind", [Following, Delivered])
def test_a_startpoint_says_since_when_changes_count(tmp_path: Path, kind: type[Changing]) -> None:
    dataset = kind(new_world(tmp_path), random.Random(1))
    world = dataset.world
    dataset.begin()
    world.stream("facts", "k", 2, n="int", k="string")
    dataset.send({"a": (1, 1), "b": (2, 2)})
    facts = dict(enumerate("ab"))
    world.send("facts", *facts.items())
    run_step(world.context(enriching(dataset, restate=None)))
    moment = datetime.now(UTC)
    dataset.send({"a": (7, 1)})
    app = enriching(dataset)
    run_step(world.context(app))
    assert latest(world) == {0: ("a", 1), 1: ("b", 2)}, "it follows only what changes from now on"
    since = StartpointTimestamp(int(moment.timestamp() * 1000))
    Startpoints(app, lake=world.lake).request("changes.planes", since, reason="test", by="test")
    report = run_step(world.context(app))
    assert report.counters["restated"] == {"changed_keys": 1, "records": 1}
    assert latest(world) == expected(dataset, facts)


def test_results_are_restated_at_most_as_often_as_declared(tmp_path: Path) -> None:
    dataset, facts = begun(Following, tmp_path)
    world = dataset.world
    often = enriching(dataset, restate=Restate(WEEK, every=timedelta(hours=1)))
    dataset.send({"a": (7, 1)})
    run_step(world.context(often))
    assert latest(world) == expected(dataset, facts)
    before = latest(world)
    dataset.send({"a": (8, 1)})
    assert run_step(world.context(often)).batches == 0
    assert latest(world) == before
    run_step(world.context(enriching(dataset)))
    assert latest(world) == expected(dataset, facts)


def test_tables_keep_the_newest_record_of_a_key_and_get_its_correction(tmp_path: Path) -> None:
    dataset, _ = begun(Following, tmp_path)
    world = dataset.world

    def make() -> Application:
        app = Application("tables", engine="auto")
        records = app.input_stream("lake.facts", default_offset="oldest")
        before = app.table(world.table("before"))
        sent = records.update(before, set={"w": "n"}, if_missing=[])
        joined = sent.join(
            app.table(dataset.declare()), on="k", how="left", select=["v"], restate=WEEK
        )
        newest = RemoteTable(
            "newest", key="k", write_function=world.table("newest").write_function, newest_by="w"
        )
        joined.update(app.table(newest), set={"v": "v", "w": "n"}, if_missing=[])
        return app

    run_step(world.context(make()))
    dataset.send({"a": (7, 1), "d": (4, 4)}, gone=["b"])
    world.send("facts", (8, "a"))
    run_step(world.context(make()))
    assert world.records("newest") == {"a": (7, 8), "b": (None, 5), "c": (3, 6), "d": (4, 7)}
    assert world.records("before")["a"] == (None, 8), (
        "it is before the join, and gets nothing again"
    )


@pytest.mark.parametrize("every", [None, timedelta(seconds=1)], ids=str)
def test_a_run_that_stays_follows_a_dataset_that_somebody_switches(
    tmp_path: Path, every: timedelta | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_HELD_EVERY", 0.5)
    dataset = Delivered(new_world(tmp_path), random.Random(1))
    world = dataset.world
    dataset.begin()
    world.stream("facts", "k", 2, n="int", k="string")
    dataset.send({"a": (1, 1)})
    dataset.send({"a": (2, 1), "b": (2, 2)})
    facts = {0: "a", 1: "b"}
    world.send("facts", *facts.items())
    newest = str(dataset.versions.require_manifest().served_id)

    def pin() -> None:
        dataset.versions.pin(newest, **WHY)
        dataset.look()

    switches = iter([dataset.rollback, pin])

    def hear(event: Any) -> None:
        if getattr(event, "what", "") in ("follow", "batch"):
            next(switches, lambda: None)()

    report = run_application(
        enriching(dataset, restate=Restate(WEEK, every)),
        lake=world.lake,
        systems=world.systems,
        spark=IN_PROCESS,
        on_event=hear,
        max_batches=3,
        follow=timedelta(minutes=1),
    )
    assert report.step.batches == 3, "it was restated after each change"
    assert latest(world) == expected(dataset, facts)


@pytest.mark.parametrize("kind", [Following, Delivered])
def test_a_preview_says_how_many_results_would_be_restated(
    tmp_path: Path, kind: type[Changing]
) -> None:
    dataset, _ = begun(kind, tmp_path)
    world = dataset.world
    moment = datetime.now(UTC)
    dataset.send({"a": (7, 1), "d": (4, 4)}, gone=["b"])
    since = StartpointTimestamp(int(moment.timestamp() * 1000))

    def preview(**options: Any) -> str:
        app = enriching(dataset, restate=Restate(WEEK, most_records=5))
        startpoints = Startpoints(app, lake=world.lake)
        return "\n".join(startpoints.preview("changes.planes", since, **options).notes)

    assert "at most 5 are allowed" in preview()
    forced = preview(force=True)
    assert "3 keys have changed; 6 records of lake.facts in 2 files would be read again" in forced
    assert "lake.out: their results come again in a higher epoch" in forced
    assert world.state(enriching(dataset)).batch == 1, "nothing was restated"


def test_the_plan_says_what_is_restated_and_how_it_is_found(tmp_path: Path) -> None:
    dataset, _ = begun(Following, tmp_path)
    plan = plan_application(enriching(dataset), systems=dataset.world.systems).render()
    assert (
        "records of the last 7 days in lake.facts, found by reading k, when planes changes" in plan
    )
    assert "lake.out: their results come again in a higher epoch" in plan


def test_differences_of_plans_name_the_restatement(tmp_path: Path) -> None:
    dataset, _ = begun(Following, tmp_path)

    def plan(age: Any) -> ExecutionPlan:
        return plan_application(enriching(dataset, restate=age), systems=dataset.world.systems)

    assert "restatement of join-3-planes is new: 2 partitions" in plan(WEEK).differences_from(
        plan(None)
    )
    assert "restatement of join-3-planes is gone" in plan(None).differences_from(plan(WEEK))
    assert plan(2 * WEEK).differences_from(plan(WEEK)) == (
        "restatement of join-3-planes reads records of the last 14 days again, read records of the"
        " last 7 days",
    )


def test_the_plan_says_what_a_restatement_costs(tmp_path: Path) -> None:
    dataset, _ = begun(Following, tmp_path)
    world = dataset.world
    app = enriching(dataset, restate=Restate(WEEK, most_keys=7, most_records=9))
    plan = plan_application(app, systems=world.systems)
    objects = world.lake.store.list("streams/facts/")
    files = [found for found in objects if found.key.endswith(".parquet")]
    records = world.streams.read_arrow(world.streams.all_ranges("facts")).num_rows
    size = format_bytes(sum(file.size for file in files))
    searched = f"searches {records} records of lake.facts in {len(files)} files of {size}: reads k"
    assert searched in plan.render()
    assert "at most 7 keys, and 9 records of them are read again" in plan.render()
    (restated,) = plan.to_json()["late_data"]["restatements"]
    assert "costs" not in restated
    world.streams.configure("facts", retention=None, compaction=None, find_by=["k"])
    assert "looks them up in an index" in plan_application(app, systems=world.systems).render()


def test_the_checkpoint_shows_what_is_restated_and_what_is_not_yet(tmp_path: Path) -> None:
    dataset, _ = begun(Following, tmp_path)
    world = dataset.world
    app = enriching(dataset, restate=Restate(WEEK, timedelta(hours=1)))
    dataset.send({"a": (7, 1)})
    run_step(world.context(app))
    restated = CheckpointManager(world.lake, app).read_last_checkpoint()
    assert restated is not None
    assert restated.restated.keys() == {"planes"}
    assert not list_lagging_followers(world.lake, "app")
    dataset.send({"a": (8, 1)})
    run_step(world.context(app))
    (lagging,) = list_lagging_followers(world.lake, "app")
    assert (lagging.dataset, lagging.replaced_at > restated.restated["planes"]) == ("planes", True)


@pytest.mark.lengthy
def test_an_application_after_it_follows_the_new_epoch(tmp_path: Path) -> None:
    dataset, facts = begun(Following, tmp_path)
    world = dataset.world
    world.stream("names", "k", 1, k="string", name="string")
    names = {"a": "Ann", "b": "Bob"}

    def name(**changed: str) -> None:
        names.update(changed)
        world.send("names", *names.items(), version=f"v{len(world.rows('names'))}")
        world.advance(known)

    known = bounded_dataset("names", input="lake.names", key="k", partitions=2)

    def make() -> Application:
        app = Application("second", engine="auto")
        records = app.input_stream("lake.out", default_offset="oldest")
        joined = records.join(app.table(known), on="k", how="left", select=["name"], restate=WEEK)
        joined.send_to(app.output_stream("lake.named", partitions=2, key="k"))
        return app

    def check() -> None:
        ranges = world.streams.all_ranges("named")
        rows = world.streams.read_arrow(ranges, epochs="latest").to_pylist()
        found = {row["n"]: (row["k"], row["v"], row["name"]) for row in rows}
        first = expected(dataset, facts)
        assert found == {n: (k, v, names.get(k)) for n, (k, v) in first.items()}
        assert len(rows) == len(found)

    name()
    run_step(world.context(make()))
    check()
    dataset.send({"a": (7, 1)})
    name(a="Anna")
    run_step(world.context(enriching(dataset)))
    run_step(world.context(make()))
    check()
    name(a="Annie", d="Dan")
    run_step(world.context(make()))
    check()


def test_what_a_restatement_would_do_to_windows_is_done_over_the_latest_results(
    tmp_path: Path,
) -> None:
    dataset, facts = begun(Following, tmp_path)
    world = dataset.world
    dataset.send({"a": (7, 1)}, gone=["b"])
    run_step(world.context(enriching(dataset)))
    rows = world.streams.read_arrow(world.streams.all_ranges("out"), epochs="latest")
    sums = rows.group_by("k").aggregate([("v", "sum")])
    wanted: dict[str, int | None] = {}
    for key, value in expected(dataset, facts).values():
        if value is not None:
            wanted[key] = (wanted.get(key) or 0) + value
    assert {row["k"]: row["v_sum"] for row in sums.to_pylist() if row["v_sum"]} == wanted


def test_joins_by_paths_and_of_several_datasets_are_restated_together(tmp_path: Path) -> None:
    world = new_world(tmp_path)
    planes = Delivered(world, random.Random(1))
    planes.begin()
    planes.send({"a": (1, 1), "b": (2, 2)})
    world.stream("fares", "k", 1, k="string", fare="int")
    fares = unbounded_dataset("fares", input="lake.fares", key="k", partitions=2)
    world.send("fares", ("x", 5), ("y", 6))
    world.advance(fares)
    world.stream("facts", "n", 2, n="int", trip="struct<plane string, class string>")
    trips = {n: ("abc"[n % 3], "xyz"[n // 3]) for n in range(9)}
    world.send("facts", *[(n, {"plane": a, "class": b}) for n, (a, b) in trips.items()])

    def make() -> Application:
        app = Application("app", engine="auto")
        records = app.input_stream("lake.facts", default_offset="oldest")
        by_plane = records.select("trip.plane as p", "trip", "n").partition_by("p")
        joined = by_plane.join(
            app.table(planes.declare()), on={"p": "k"}, how="left", select=["v"], restate=WEEK
        ).partition_by("trip.class")
        priced = joined.join(
            app.table(fares), on={"trip.class": "k"}, how="left", select=["fare"], restate=WEEK
        )
        priced.send_to(app.output_stream("lake.out", partitions=2, key="n"))
        return app

    plan = plan_application(make(), systems=world.systems)
    assert [one.inputs[0].keys for one in plan.late_data.restatements] == [
        ("trip.plane",),
        ("trip.class",),
    ]
    assert ExecutionPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    run_step(world.context(make()))
    planes.send({"a": (7, 1)}, gone=["b"])
    world.send("fares", ("z", 9), deleted=[("x", None)])
    world.advance(fares)
    report = run_step(world.context(make()))
    assert report.counters["restated"] == {"changed_keys": 4, "records": 8}
    rows = world.streams.read_arrow(world.streams.all_ranges("out"), epochs="latest").to_pylist()
    values = {"a": 7}
    prices = {"y": 6, "z": 9}
    wanted = {n: (values.get(plane), prices.get(kind)) for n, (plane, kind) in trips.items()}
    assert {row["n"]: (row["v"], row["fare"]) for row in rows} == wanted
    assert len(rows) == 9


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", [Following, Delivered])
def test_an_entry_that_changed_and_changed_back_is_restated_for_who_read_it(
    tmp_path: Path, kind: type[Changing]
) -> None:
    dataset, facts = begun(kind, tmp_path)
    world = dataset.world
    seldom = Restate(WEEK, every=timedelta(hours=1))
    dataset.send({"c": (5, 5)})
    run_step(world.context(enriching(dataset, restate=seldom)))
    for value in (7, 1):
        dataset.send({"a": (value, 1)})
        n = len(facts)
        facts[n] = "a"
        world.send("facts", (n, "a"))
        run_step(world.context(enriching(dataset, restate=seldom)))
    assert latest(world)[8] == ("a", 7)
    run_step(world.context(enriching(dataset)))
    assert latest(world) == expected(dataset, facts)


def test_what_was_read_before_the_input_was_repartitioned_keeps_its_results(tmp_path: Path) -> None:
    dataset, facts = begun(Following, tmp_path)
    world = dataset.world
    before = latest(world)
    why = {"reason": "more", "by": "test"}
    report = repartition_stream(world.lake, "facts", 3, dry_run=True, **why)
    assert report.affected == (
        "application app restates results when datasets change (restate=), which it can't for"
        " records of this stream that it has read before",
    )
    with pytest.raises(StillReadError):
        repartition_stream(world.lake, "facts", 3, **why)
    assert repartition_stream(world.lake, "facts", 3, force=True, **why).affected
    facts[8] = "a"
    world.send("facts", (8, "a"))
    run_step(world.context(enriching(dataset)))
    dataset.send({"a": (7, 1)})
    report = run_step(world.context(enriching(dataset)))
    assert report.counters["restated"] == {"changed_keys": 1, "records": 1}
    assert latest(world) == {**before, 8: ("a", 7)}
    # As the error says: a replay of all makes all results again, and later ones are restated.
    app = enriching(dataset)
    Startpoints(app, lake=world.lake).request("lake.facts", StartpointOldest(), **why)
    run_step(world.context(app))
    assert latest(world) == expected(dataset, facts)
    dataset.send({"a": (8, 1), "b": (9, 1)})
    run_step(world.context(enriching(dataset)))
    assert latest(world) == expected(dataset, facts)


@pytest.mark.parametrize("declared", [{}, {"idempotent": True}])
def test_a_sum_of_results_is_refused_whatever_its_table_declares(
    tmp_path: Path, declared: dict[str, Any]
) -> None:
    app = Application("app")
    columns = {"k": "string", "at": "bigint", "total": "bigint"}
    store = SqliteTable(str(tmp_path / "t.sqlite"), "t", ["k"], columns=columns, create=True)
    table = RemoteTable("t", key="k", write_function=store, newest_by="at", **declared)
    dataset, _ = begun(Following, tmp_path)
    facts = app.input_stream("lake.facts").partition_by("k")
    joined = facts.join(app.table(dataset.declare()), on="k", select=["v"], restate=WEEK)
    joined.update(app.table(table), add={"total": "v"}, set={"at": "n"}, if_missing={"total": "v"})
    with pytest.raises(PlanningError, match="adds or appends to table t") as caught:
        plan_application(app, systems=dataset.world.systems)
    assert "idempotent" not in caught.value.next_step

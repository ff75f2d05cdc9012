"""CheckpointManager: where an application goes on, and the readable history of how it came
there.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.batch_log.checkpoints import CheckpointManager
from dagster_adjunct.resources.streams.startpoint import (
    StartpointOldest,
    StartpointSpecific,
    StartpointUpcoming,
)
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.faulty_store import Crash
from tests.orchestration.offsets.offsets_world import Batch, OffsetsWorld

S0, S1, S2 = (SystemStreamPartition("fake", "s", number) for number in range(3))


@pytest.fixture
def world() -> OffsetsWorld:
    """Stream fake.s: 4, 2 and 0 records in its partitions."""
    world = OffsetsWorld()
    world.fake.make("s", 3)
    world.fake.write("s", 0, 1000, 2000, 3000, 4000)
    world.fake.write("s", 1, 1000, 2000)
    return world


@pytest.fixture
def app() -> Application:
    app = Application("orders", max_batch_records=100)
    app.input_stream("fake.s")
    return app


def changes(world: OffsetsWorld, app: Application, *about: Any) -> list[Any]:
    return list(CheckpointManager(world.lake, app.name).history(*about))


def die(batch: Batch) -> None:
    raise Crash


def test_before_the_first_run_there_is_none(world: OffsetsWorld, app: Application) -> None:
    manager = CheckpointManager(world.lake, app.name)
    assert manager.read_last_checkpoint() is None
    assert list(manager.history()) == []


def test_it_says_where_to_go_on_and_who_left_it_so(world: OffsetsWorld, app: Application) -> None:
    world.run(app)
    checkpoint = CheckpointManager(world.lake, app.name).read_last_checkpoint()
    assert checkpoint is not None
    assert checkpoint.offsets == {S0: "@4", S1: "@2", S2: "@0"}
    assert (checkpoint.batch, checkpoint.last_change.by, checkpoint.open, checkpoint.epochs) == (
        1,
        "run-1",
        None,
        {},
    )
    assert checkpoint.streams == {"fake.s": "made-1"}
    closed = world.state(app).last
    assert closed is not None
    assert abs(checkpoint.last_change.at - closed.closed_at) < timedelta(seconds=5)


def test_an_open_batch_and_a_stored_startpoint_are_displayed_and_move_nothing(
    world: OffsetsWorld, app: Application
) -> None:
    world.run(app)
    world.ask(app, "fake.s.0", StartpointSpecific, offset="@1")
    world.output.before = die
    with pytest.raises(Crash):
        world.run(app)
    checkpoint = CheckpointManager(world.lake, app.name).read_last_checkpoint()
    assert checkpoint is not None
    assert checkpoint.offsets[S0] == "@4"
    assert checkpoint.resolved[S0].offset == "@1"
    assert checkpoint.open is not None
    assert (checkpoint.open.batch, checkpoint.open.run) == (2, "run-2")
    # run 2 has stored the startpoint's offset
    assert (checkpoint.batch, checkpoint.last_change.by) == (1, "run-2")
    json = checkpoint.to_json()
    assert (json["offsets"]["fake.s.0"], json["open"]["batch"]) == ("@4", 2)


def test_the_history_of_a_life_reads_as_it_was_lived(world: OffsetsWorld, app: Application) -> None:
    world.run(app)
    world.fake.write("s", 0, 5000)
    world.run(app)
    world.ask(app, "fake.s.0", StartpointSpecific, offset="@2")
    world.run(app)
    world.ask(app, "fake.s.2", StartpointUpcoming)
    world.run(app)
    reported = [
        (
            change.by,
            change.batch,
            dict(change.moved),
            {s: a.epoch for s, a in change.applied.items()},
            change.note,
        )
        for change in changes(world, app)
    ]
    assert reported == [
        ("run-4", None, {S2: ("@0", "@0")}, {S2: 1}, "positions moved, nothing to read there yet"),
        ("run-4", None, {}, {}, None),
        ("run-3", 3, {S0: ("@5", "@5")}, {S0: 1}, None),
        ("run-3", None, {}, {}, None),
        ("run-2", 2, {S0: ("@4", "@5")}, {}, None),
        ("run-1", 1, {S0: ("@0", "@4"), S1: ("@0", "@2")}, {}, None),
        ("run-1", None, {S0: (None, "@0"), S1: (None, "@0"), S2: (None, "@0")}, {}, None),
    ]
    resolved = changes(world, app)[3].resolved
    assert {ssp: (start.offset, start.by, start.reason) for ssp, start in resolved.items()} == {
        S0: ("@2", "ada", "ticket 7")
    }


def test_replays_begin_move_end_and_are_cancelled(world: OffsetsWorld, app: Application) -> None:
    app.max_batch_records = 2
    world.run(app)
    world.ask(app, "fake.s.0", StartpointOldest, until=StartpointSpecific(offset="@3"))
    world.run(app)
    world.ask(app, "fake.s.1", StartpointOldest, until=StartpointSpecific(offset="@2"))
    world.output.before = die
    with pytest.raises(Crash):
        world.run(app)
    BatchLog(world.lake, app.name).abandon(reason="it never ends", by="ada", skip=False)
    (replay,) = world.state(app).offsets.replays
    BatchLog(world.lake, app.name).cancel_replays([replay], reason="enough", by="ada")
    reported = [
        (
            change.by,
            change.note,
            [(r.what, str(r.ssp), r.before, r.after, r.epoch) for r in change.replays],
            dict(change.moved),
        )
        for change in changes(world, app, 6)
    ]
    assert reported == [
        ("ada", "replays cancelled: enough", [("cancelled", "fake.s.1", "@0", "@0", 2)], {}),
        ("ada", "batch 6 abandoned: it never ends", [("moved", "fake.s.1", "@0", "@0", 2)], {}),
        ("run-3", None, [("began", "fake.s.1", "@0", "@0", 1)], {}),
        ("run-2", None, [("ended", "fake.s.0", "@2", "@3", 1)], {}),
        ("run-2", None, [("moved", "fake.s.0", "@0", "@2", 1)], {}),
        ("run-2", None, [("began", "fake.s.0", "@0", "@0", 1)], {}),
    ]
    assert [change.note for change in changes(world, app, 1, S1)] == ["replays cancelled: enough"]


def test_a_batch_that_is_skipped_moves_the_checkpoint_over_its_records(
    world: OffsetsWorld, app: Application
) -> None:
    world.output.before = die
    with pytest.raises(Crash):
        world.run(app)
    BatchLog(world.lake, app.name).abandon(reason="poison", by="ada", skip=True)
    newest = changes(world, app)[0]
    assert (newest.by, newest.batch, newest.note) == ("ada", None, "batch 1 skipped: poison")
    assert newest.moved == {S0: ("@0", "@4"), S1: ("@0", "@2")}


def test_a_partition_has_a_history_of_its_own(world: OffsetsWorld, app: Application) -> None:
    world.run(app)
    world.fake.write("s", 0, 5000)
    world.run(app)
    world.fake.write("s", 1, 5000)
    world.run(app)
    assert [change.by for change in changes(world, app, None, S0)] == ["run-2", "run-1", "run-1"]
    assert [change.by for change in changes(world, app, 1, S1)] == ["run-3"]
    assert changes(world, app, 5, SystemStreamPartition("fake", "s", 9)) == []
    (one,) = changes(world, app, 1)
    assert one.to_json()["moved"] == {"fake.s.1": {"from": "@2", "to": "@3"}}


def test_the_newest_changes_are_read_without_the_whole_history(
    world: OffsetsWorld, app: Application
) -> None:
    for time in range(20):
        world.fake.write("s", 0, 5000 + time)
        world.run(app)
    lake = world.faulty([])
    assert len(list(CheckpointManager(lake, app.name).history(2))) == 2
    assert len(lake.store.requests) < 10  # type: ignore[attr-defined]


def test_where_older_commits_are_collected_the_history_begins_with_what_is_left(
    world: OffsetsWorld, app: Application
) -> None:
    for time in range(3):
        world.fake.write("s", 0, 5000 + time)
        world.run(app)
    whole = changes(world, app)
    for item in world.lake.store.list("applications/orders/manifests/000000000003"):
        world.lake.store.delete(item.key)
    assert changes(world, app) == [change for change in whole if change.number > 4]

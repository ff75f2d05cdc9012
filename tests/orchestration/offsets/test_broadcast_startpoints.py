"""Startpoints of a broadcast input: for all tasks at once, applied once, and not for one task
alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.startpoints.store import StartpointManager
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointSpecific
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.orchestration.offsets.offsets_world import OffsetsWorld
from tests.orchestration.offsets.stored_startpoints import write_startpoint

WHO: dict[str, Any] = {"by": "ada", "reason": "ticket 7"}
RULES = SystemStreamPartition("lake", "rules", 0)


@pytest.fixture
def world() -> OffsetsWorld:
    """3 partitions of lake.s, and lake.rules with one, of 4 records; one run has read them."""
    world = OffsetsWorld()
    world.stream("s", 3)
    world.stream("rules", 1)
    world.send("rules", *range(4))
    return world


@pytest.fixture
def app(world: OffsetsWorld) -> Application:
    app = Application("orders", max_batch_records=2)
    app.input_stream("lake.s", default_offset="oldest")
    app.input_stream("lake.rules", default_offset="oldest", broadcast=True)
    world.run(app)
    return app


def test_it_is_handed_to_every_task_applied_once_and_removed_from_all(
    world: OffsetsWorld, app: Application
) -> None:
    asked = Startpoints(app, lake=world.lake).request(
        "lake.rules", StartpointSpecific(offset="1"), **WHO
    )
    assert [
        (displayed.tasks, displayed.offsets, displayed.moved) for displayed in asked.previews
    ] == [(("Partition 0", "Partition 1", "Partition 2"), 3, -3)]
    world.begin(app)
    assert {task for task, _ in world.fanned_out(app)} == {
        "Partition 0",
        "Partition 1",
        "Partition 2",
    }
    assert world.reads(app) == [{RULES: ("1", "3")}, {RULES: ("3", "4")}]
    assert world.fanned_out(app) == {}
    assert world.reads(app) == []
    assert world.state(app).offsets.epochs.main == {RULES: 1}


def test_a_bounded_replay_is_begun_once_for_all_tasks(
    world: OffsetsWorld, app: Application
) -> None:
    startpoints = Startpoints(app, lake=world.lake)
    startpoints.request(
        "lake.rules.0", StartpointOldest(), until=StartpointSpecific(offset="3"), **WHO
    )
    assert world.reads(app) == [{RULES: ("0", "2")}, {RULES: ("2", "3")}]
    assert world.fanned_out(app) == {}
    assert world.reads(app) == []


def test_one_task_alone_can_not_start_elsewhere(world: OffsetsWorld, app: Application) -> None:
    startpoints = Startpoints(app, lake=world.lake)
    with pytest.raises(
        ConfigurationError, match="all tasks read with one position: 'Partition 1' alone"
    ):
        startpoints.request("lake.rules", StartpointOldest(), task="Partition 1", **WHO)
    # Written by whoever does not look: runs refuse it until it is taken back, or say that they go
    # on without it.
    manager = StartpointManager(MetadataStore(world.lake), app)
    write_startpoint(
        manager, RULES, StartpointOldest(), task="Partition 1", on_unresolved="checkpoint", **WHO
    )
    startpoints.request("lake.s.1", StartpointOldest(), **WHO)
    report = world.run(app)
    assert any("lake.rules.0: continues from its checkpoint" in text for text in report.startpoints)
    assert startpoints.take_back("lake.rules", task="Partition 1", **WHO).startpoints
    write_startpoint(manager, RULES, StartpointOldest(), task="Partition 1", **WHO)
    with pytest.raises(ConfigurationError, match="'Partition 1' alone"):
        world.run(app)
    assert startpoints.clear(**WHO).startpoints
    assert world.reads(app) == []


def test_what_is_for_all_is_taken_back_from_all_tasks_or_none(
    world: OffsetsWorld, app: Application
) -> None:
    startpoints = Startpoints(app, lake=world.lake)
    startpoints.request("lake.rules", StartpointOldest(), **WHO)
    world.begin(app)
    kept = startpoints.take_back("lake.rules", task="Partition 1", **WHO)
    assert (kept.startpoints, len(world.fanned_out(app))) == ((), 3)
    assert "it is for all tasks, and can't be taken back from one" in kept.not_removed[0]
    assert len(startpoints.take_back("lake.rules", **WHO).startpoints) == 3
    assert world.reads(app) == []


def test_a_batch_left_open_is_repeated_for_as_many_tasks_as_it_was_begun_for(
    world: OffsetsWorld, app: Application
) -> None:
    world.send("rules", 4)
    world.run(app)
    last = world.state(app).last
    assert last is not None
    assert last.intent.tasks == 3
    assert replace(world.output.batches[last.intent.batch], number=1).read() == {RULES: ("4", "5")}

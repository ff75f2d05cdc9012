"""Startpoints from Python: what the commands do, with the same checks, and who is not what they
seem.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from dagster_adjunct import Application
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.resources.errors import ConfigurationError, MalformedDocumentError
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.startpoint import (
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
)
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.startpoints import (
    CheckpointManager,
    Startpoint,
    StartpointManager,
    StartpointRequest,
    Startpoints,
)
from tests.clocks import on_clock
from tests.orchestration.input_progress import input_progress
from tests.orchestration.offsets.offsets_world import BEGIN, OffsetsWorld, ssp
from tests.orchestration.offsets.stored_startpoints import handed_to, write_startpoint

WHO: dict[str, Any] = {"by": "ada", "reason": "ticket 7"}


@pytest.fixture
def world() -> OffsetsWorld:
    """Stream lake.s with 6 records in 2 partitions."""
    world = OffsetsWorld()
    world.stream("s", 2)
    world.send("s", *range(6))
    return world


@pytest.fixture
def app(world: OffsetsWorld) -> Application:
    app = Application("orders", startpoints_expire_after=timedelta(hours=2))
    app.input_stream("lake.s", default_offset="oldest")
    return app


def ends(world: OffsetsWorld) -> list[int]:
    streams = LakeStreams(world.lake)
    return [int(end) for _, end in sorted(streams.upcoming(streams.partitions("s")).items())]


def test_what_would_happen_is_displayed_and_nothing_is_written(
    world: OffsetsWorld, app: Application
) -> None:
    world.run(app)
    startpoints = Startpoints(app, lake=world.lake)
    asked = startpoints.preview("lake.s", StartpointOldest())
    assert [
        (displayed.start, displayed.offsets, displayed.moved) for displayed in asked.previews
    ] == [("0", end, -end) for end in ends(world)]
    assert not asked.written
    assert startpoints.list()["waiting"] == []
    (wrong,) = startpoints.preview("lake.s.1", StartpointSpecific(offset="99")).previews
    assert "99 is not on the stream" in str(wrong.error)


def test_one_position_is_asked_for_again_and_again_and_followed_each_time(
    world: OffsetsWorld, app: Application
) -> None:
    world.run(app)
    startpoints, oldest = (
        Startpoints(app, lake=world.lake),
        StartpointOldest(creation_timestamp_ms=1),
    )
    for _ in range(2):
        assert startpoints.request(SystemStreamPartition("lake", "s", 1), oldest, **WHO).written
        (batch,) = world.delivered(app)
        assert batch.read() == {ssp("lake.s.1"): ("0", str(ends(world)[1]))}
        assert world.delivered(app) == []
    assert [applied["partition"] for applied in startpoints.list()["applied"]] == ["lake.s.1"]


def test_a_waiting_startpoint_is_replaced_by_a_replay_only_when_that_is_reported(
    world: OffsetsWorld, app: Application
) -> None:
    startpoints = Startpoints(app, lake=world.lake)
    startpoints.request("lake.s.0", StartpointOldest(), **WHO)
    with pytest.raises(ConfigurationError) as failure:
        startpoints.request(
            "lake.s", StartpointOldest(), until=StartpointSpecific(offset="1"), **WHO
        )
    assert failure.value.facts["stream"] == "lake.s"
    assert [waiting["partition"] for waiting in startpoints.list()["waiting"]] == ["lake.s.0"]
    asked = startpoints.request(
        "lake.s", StartpointOldest(), until=StartpointSpecific(offset="1"), replace=True, **WHO
    )
    assert [held.summary() for held in asked.replaced] == [
        "lake.s.0: oldest, waiting (ada: ticket 7)"
    ]


def test_requests_are_taken_back_by_partition_or_all_and_replays_are_cancelled(
    world: OffsetsWorld, app: Application
) -> None:
    world.run(app)
    startpoints = Startpoints(app, lake=world.lake)
    startpoints.request(["lake.s.0", "lake.s.1"], StartpointOldest(), **WHO)
    (left,) = startpoints.take_back(["lake.s.1"], task="Partition 1", **WHO).not_removed
    assert "waiting" in left
    assert "for every task" in left
    assert len(startpoints.take_back(["lake.s.1"], **WHO).startpoints) == 1
    assert [waiting["partition"] for waiting in startpoints.list()["waiting"]] == ["lake.s.0"]
    startpoints.clear(**WHO)
    startpoints.request("lake.s.0", StartpointOldest(), until=StartpointSpecific(offset="2"), **WHO)
    small = Application("orders", max_batch_records=1)
    small.input_stream("lake.s")
    world.run(small, max_batches=1)
    assert [replay["next"] for replay in startpoints.list()["replays"]] == ["1"]
    (cancelled,) = startpoints.clear(**WHO).replays
    assert (str(cancelled.ssp), cancelled.next) == ("lake.s.0", "1")
    assert startpoints.list()["replays"] == []
    assert world.delivered(app) == []


def test_what_can_not_be_followed_is_refused_and_nothing_is_written(
    world: OffsetsWorld, app: Application
) -> None:
    startpoints = Startpoints(app, lake=world.lake)
    wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
        ("lake.other", StartpointOldest(), {}, "does not read lake.other"),
        ("lake.s.7", StartpointOldest(), {}, "names partition 7"),
        ("lake.s", StartpointOldest(), {"task": "Partition 9"}, "task 'Partition 9' does not read"),
        ("lake.s", "oldest", {}, "position is 'oldest'"),
        ("lake.s", StartpointOldest(), {"until": "2"}, "until is '2'"),
        ([], StartpointOldest(), {}, "no partition is named"),
        (3, StartpointOldest(), {}, "partitions (are|is) 3"),
        ([3], StartpointOldest(), {}, "partitions has 3"),
    ]
    for partitions, position, how, message in wrong:
        with pytest.raises(ConfigurationError, match=message):
            startpoints.request(partitions, position, **how, **WHO)
    assert startpoints.list()["waiting"] == []


# -- names and expiry


def test_requests_expire_as_the_application_says(world: OffsetsWorld, app: Application) -> None:
    write_startpoint(
        world.startpoints(app),
        SystemStreamPartition("lake", "s", 0),
        StartpointOldest(creation_timestamp_ms=world.now_ms),
        **WHO,
    )
    manager = StartpointManager(MetadataStore(on_clock(world.lake, lambda: world.now)), app)
    world.now = BEGIN + app.startpoints_expire_after - timedelta(milliseconds=1)
    assert len(manager.read().waiting) == 1
    world.now += timedelta(milliseconds=1)
    assert manager.read().waiting == []


def test_a_mistyped_application_is_refused_with_those_that_are_near(
    world: OffsetsWorld, app: Application
) -> None:
    ssp = SystemStreamPartition("lake", "s", 0)
    StartpointManager(
        MetadataStore(world.lake), "first"
    ).read()  # nothing has run here: no name is wrong
    world.run(app)
    for name, message in (("order", "similar names: orders"), ("xyz", "there are: orders")):
        mistyped: Any = name
        manager = StartpointManager(MetadataStore(world.lake), name)
        for doing in (
            lambda manager=manager: write_startpoint(manager, ssp, StartpointOldest(), **WHO),
            manager.read,
            manager.get_fan_outs,
            lambda manager=manager: manager.delete_startpoint(ssp),
            CheckpointManager(world.lake, name).read_last_checkpoint,
            lambda name=name: list(CheckpointManager(world.lake, name).history()),
            lambda name=name: CheckpointManager(world.lake, name).abandon(**WHO),
            lambda mistyped=mistyped: Startpoints(mistyped, lake=world.lake),
        ):
            with pytest.raises(ConfigurationError, match=message):
                doing()
    write_startpoint(
        StartpointManager(MetadataStore(world.lake), "orders"), ssp, StartpointOldest(), **WHO
    )
    never_ran = Application("order")
    never_ran.input_stream("lake.s")
    assert (
        Startpoints(never_ran, lake=world.lake).request("lake.s", StartpointOldest(), **WHO).written
    )
    assert len(StartpointManager(MetadataStore(world.lake), "order").read().waiting) == 2


def test_none_for_the_partitions_does_not_mean_all_of_them(
    world: OffsetsWorld, app: Application
) -> None:
    manager = world.startpoints(app)
    write_startpoint(manager, SystemStreamPartition("lake", "s", 0), StartpointOldest(), **WHO)
    manager.fan_out(plan_application(app, systems=world.systems()).partitions_by_task())
    nothing: Any = None
    with pytest.raises(ConfigurationError) as failure:
        manager.remove_fan_out_for_task("Partition 0", nothing)
    assert failure.value.facts["argument"] == "ssps"
    assert handed_to(manager, "Partition 0")
    manager.remove_fan_out_for_task("Partition 0", [])
    assert handed_to(manager, "Partition 0")
    manager.remove_fan_out_for_task("Partition 0")
    assert not handed_to(manager, "Partition 0")


# -- stored forms


@pytest.mark.parametrize(
    "startpoint",
    [
        StartpointOldest(),
        StartpointUpcoming(),
        StartpointTimestamp(timestamp_ms=7),
        StartpointSpecific(offset="42"),
    ],
    ids=lambda position: position.kind,
)
def test_what_was_written_as_json_is_read_from_it(startpoint: Startpoint) -> None:
    assert Startpoint.from_json(startpoint.to_json()) == startpoint
    request = StartpointRequest(
        ssp=SystemStreamPartition("lake", "s", 1),
        startpoint=startpoint,
        until=StartpointUpcoming(),
        task="t",
        **WHO,
    )
    assert StartpointRequest.from_json(request.to_json()) == request
    for read in (Startpoint.from_json, StartpointRequest.from_json):
        with pytest.raises(MalformedDocumentError):
            read({"version": 99})


# -- switched off


def switched_off() -> Application:
    app = Application("orders", startpoints=False)
    app.input_stream("lake.s", default_offset="oldest")
    return app


def test_where_startpoints_are_switched_off_none_is_written_by_any_way(world: OffsetsWorld) -> None:
    off = switched_off()
    manager = StartpointManager(MetadataStore(world.lake), off)
    for ask in (
        lambda: Startpoints(off, lake=world.lake).request("lake.s", StartpointOldest(), **WHO),
        lambda: Startpoints(off, lake=world.lake).preview("lake.s", StartpointOldest()),
        lambda: write_startpoint(
            manager, SystemStreamPartition("lake", "s", 0), StartpointOldest(), **WHO
        ),
    ):
        with pytest.raises(ConfigurationError) as failure:
            ask()
        assert failure.value.facts["argument"] == "startpoints"
    assert manager.read().waiting == []


def test_requests_of_disabled_startpoints_are_kept_displayed_and_applied_later(
    world: OffsetsWorld, app: Application
) -> None:
    world.run(app)
    startpoints, off = Startpoints(app, lake=world.lake), switched_off()
    startpoints.request("lake.s.0", StartpointOldest(), **WHO)
    world.begin(app)  # found and stored, nothing read yet
    startpoints.request("lake.s.1", StartpointOldest(), **WHO)
    world.send("s", *range(6, 12))
    before = dict(world.state(app).checkpoint)
    report = world.run(off)
    assert sorted(report.startpoints) == [
        f"lake.s.{number}: startpoints are disabled: oldest is left alone (ada: ticket 7)"
        for number in range(2)
    ]
    last = world.output.batches[max(world.output.batches)]
    assert {ssp: start for ssp, (start, _) in last.read().items()} == before
    listed = Startpoints(off, lake=world.lake).list()
    assert [request["partition"] for request in (*listed["handed"], *listed["waiting"])] == [
        "lake.s.0",
        "lake.s.1",
    ]
    (batch,) = world.delivered(app)
    assert batch.read() == {
        ssp(f"lake.s.{number}"): ("0", str(end)) for number, end in enumerate(ends(world))
    }


def test_a_replay_stays_where_it_is_while_they_are_switched_off_and_wakes_no_sensor(
    world: OffsetsWorld, app: Application
) -> None:
    world.run(app)
    Startpoints(app, lake=world.lake).request(
        "lake.s.0", StartpointOldest(), until=StartpointSpecific(offset="2"), **WHO
    )
    small = Application("orders", max_batch_records=1)
    small.input_stream("lake.s")
    world.run(small, max_batches=1)
    off = switched_off()
    assert input_progress(world.lake, world.systems(), small).lag == 1
    progress = input_progress(world.lake, world.systems(), off)
    assert (progress.lag, progress.due) == (0, ())
    report = world.run(off)
    assert report.startpoints == (
        (
            "lake.s.0: startpoints are disabled: the replay from oldest stays at offset 1 (ada:"
            " ticket 7)"
        ),
    )
    assert report.batches == 0
    assert world.reads(app) == [{ssp("lake.s.0"): ("1", "2")}]


def test_what_was_applied_before_they_were_switched_off_is_not_applied_again_after(
    world: OffsetsWorld, app: Application
) -> None:
    world.run(app)
    Startpoints(app, lake=world.lake).request(
        "lake.s.0", StartpointOldest(), until=StartpointSpecific(offset="2"), **WHO
    )
    world.begin(app)  # the replay has begun, and is still fanned out
    world.run(switched_off())
    assert world.reads(app) == [{ssp("lake.s.0"): ("0", "2")}]
    assert world.reads(app) == []


def test_a_clock_without_a_zone_is_refused(world: OffsetsWorld, app: Application) -> None:
    manager = StartpointManager(
        MetadataStore(on_clock(world.lake, lambda: world.now.replace(tzinfo=None))), app
    )
    with pytest.raises(ConfigurationError) as caught:
        manager.read()
    assert caught.value.argument == "clock"

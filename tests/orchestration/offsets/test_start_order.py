"""Where each partition begins: checkpoint, reset streams, startpoints, defaults; and what is
refused.
"""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.resources.errors import ConfigurationError, OffsetOutOfRangeError
from dagster_adjunct.resources.streams.startpoint import (
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
)
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.faulty_store import Crash
from tests.orchestration.offsets.offsets_world import OffsetsWorld, ssp

S0, S1, S2 = (SystemStreamPartition.parse(text) for text in ("fake.s.0", "fake.s.1", "fake.s.2"))


@pytest.fixture
def world() -> OffsetsWorld:
    return OffsetsWorld()


def reader(**options: Any) -> Application:
    app = Application("app")
    app.input_stream("fake.s", **options)
    return app


def stream_of_two(world: OffsetsWorld, **options: Any) -> None:
    """Make fake.s with records 0 to 2 in both partitions."""
    world.fake.make("s", 2, **options)
    world.fake.write("s", 0, 1, 2, 3)
    world.fake.write("s", 1, 1, 2, 3)


@pytest.mark.parametrize(
    ("of_input", "of_stream", "of_system", "begins"),
    [
        ("upcoming", "oldest", "oldest", "upcoming"),
        (None, "oldest", "upcoming", "oldest"),
        (None, None, "oldest", "oldest"),
        (None, None, None, "upcoming"),
    ],
)
def test_defaults_come_from_the_input_then_the_stream_then_the_system(
    world: OffsetsWorld, of_input: Any, of_stream: Any, of_system: Any, begins: str
) -> None:
    stream_of_two(world, default_offset=of_stream)
    world.fake.default_offset = of_system
    app = reader(default_offset=of_input)
    first = world.reads(app)
    assert first == ([{S0: ("@0", "@3"), S1: ("@0", "@3")}] if begins == "oldest" else [])
    world.fake.write("s", 1, 4)
    assert world.reads(app) == [{S1: ("@3", "@4")}]


def test_a_default_position_is_stored_before_anything_is_read(world: OffsetsWorld) -> None:
    """Or what arrives between two runs that find nothing would never be read."""
    world.fake.make("s", 1, default_offset="upcoming")
    app = reader()
    assert world.reads(app) == []
    world.fake.write("s", 0, 1, 2)
    assert world.reads(app) == [{S0: ("@0", "@2")}]


def test_the_checkpoint_wins_over_defaults_and_the_startpoint_over_the_checkpoint(
    world: OffsetsWorld,
) -> None:
    stream_of_two(world)
    app = reader()
    world.run(app)
    world.fake.write("s", 0, 4)
    world.fake.write("s", 1, 4)
    world.ask(app, S1, StartpointSpecific, offset="@1")
    assert world.reads(app) == [{S0: ("@3", "@4"), S1: ("@1", "@4")}]


def test_a_startpoint_at_one_partition_leaves_the_defaults_of_the_others(
    world: OffsetsWorld,
) -> None:
    stream_of_two(world, key=["k"])
    app = reader(default_offset="upcoming")
    world.ask(app, S0, StartpointOldest)
    assert world.reads(app) == [{S0: ("@0", "@3")}]
    assert world.state(app).checkpoint == {S0: "@3", S1: "@3"}


def test_taking_a_startpoint_back_keeps_the_position_of_the_first_start(
    world: OffsetsWorld,
) -> None:
    stream_of_two(world, key=["k"])
    app = reader(default_offset="upcoming")
    world.ask(app, S0, StartpointSpecific, offset="@1")
    world.begin(app)
    world.startpoints(app).remove_fan_out_for_task("Partition 0")
    world.fake.write("s", 0, 4)
    assert world.reads(app) == [{S0: ("@3", "@4")}]


def test_a_reset_stream_forgets_its_checkpoint_at_every_start(world: OffsetsWorld) -> None:
    stream_of_two(world)
    app = reader(reset_offset=True)
    everything = {S0: ("@0", "@3"), S1: ("@0", "@3")}
    assert world.reads(app) == [everything]
    assert world.reads(app) == [everything]


def test_other_streams_keep_their_checkpoint_when_one_is_reset(world: OffsetsWorld) -> None:
    world.fake.make("s", 1)
    world.fake.make("other", 1)
    app = reader(reset_offset=True)
    app.input_stream("fake.other")
    world.fake.write("s", 0, 1)
    world.fake.write("other", 0, 1)
    assert world.reads(app) == [{S0: ("@0", "@1"), ssp("fake.other.0"): ("@0", "@1")}]
    assert world.reads(app) == [{S0: ("@0", "@1")}]


def test_a_startpoint_wins_over_a_reset_and_other_partitions_use_their_default(
    world: OffsetsWorld,
) -> None:
    stream_of_two(world)
    app = reader(reset_offset=True, default_offset="upcoming")
    assert world.reads(app) == []
    world.ask(app, S0, StartpointSpecific, offset="@1")
    assert world.reads(app) == [{S0: ("@1", "@3")}]
    assert world.reads(app) == []


def test_a_batch_that_a_crash_left_open_comes_before_a_reset(world: OffsetsWorld) -> None:
    world.fake.make("s", 1)
    world.fake.write("s", 0, 1)
    app = reader(reset_offset=True, default_offset="upcoming")
    world.run(app)
    world.ask(app, S0, StartpointOldest)
    world.output.before = lambda batch: world.die_after(0)
    with pytest.raises(Crash):
        world.run(app)
    world.output.before = lambda batch: None
    world.output.batches.clear()
    assert world.reads(app) == [{S0: ("@0", "@1")}]


# -- partitions that are added


def test_partitions_added_to_a_stream_without_key_are_read_from_their_start(
    world: OffsetsWorld,
) -> None:
    stream_of_two(world)
    app = reader(default_offset="upcoming")
    world.run(app)
    world.fake.add_partitions("s", 1)
    world.fake.write("s", 2, 5, 6)
    assert world.reads(app) == [{S2: ("@0", "@2")}]


def test_partitions_added_to_a_keyed_stream_are_refused_by_name(world: OffsetsWorld) -> None:
    stream_of_two(world, key=["k"])
    app = reader()
    world.run(app)
    world.fake.add_partitions("s", 1)
    world.fake.write("s", 2, 5)
    with pytest.raises(
        ConfigurationError, match=r"added to fake\.s, which is partitioned by key \(k\)"
    ) as refused:
        world.run(app)
    assert f"startpoint set MODULE:APP {S2} --oldest" in refused.value.next_step
    world.ask(app, S2, StartpointOldest)
    assert world.reads(app) == [{S2: ("@0", "@1")}]


def test_a_partition_that_is_added_while_a_run_is_in_progress_waits_for_the_next(
    world: OffsetsWorld,
) -> None:
    stream_of_two(world)
    app = reader()

    def add(_: object) -> None:
        world.fake.add_partitions("s", 1)
        world.fake.write("s", 2, 5)
        world.fake.write("s", 0, 5)
        world.output.before = lambda batch: None

    world.output.before = add
    assert world.reads(app) == [{S0: ("@0", "@3"), S1: ("@0", "@3")}, {S0: ("@3", "@4")}]
    assert world.reads(app) == [{S2: ("@0", "@1")}]


# -- streams that are not what they were


def test_a_stream_that_was_recreated_is_an_error_until_somebody_says_where_to_begin(
    world: OffsetsWorld,
) -> None:
    stream_of_two(world, key=["k"])
    app = reader()
    world.run(app)
    stream_of_two(world, key=["k"])
    with pytest.raises(
        OffsetOutOfRangeError, match=r"fake\.s was deleted and recreated .*made-2.*made-1"
    ) as refused:
        world.run(app)
    assert "startpoint set MODULE:APP fake.s --oldest" in refused.value.next_step
    world.ask(app, S0, StartpointSpecific, offset="@1")
    with pytest.raises(OffsetOutOfRangeError, match=r"in fake\.s\.1"):
        world.run(app)
    world.ask(app, S1, StartpointUpcoming)
    assert world.reads(app) == [{S0: ("@1", "@3")}]
    world.fake.write("s", 1, 9)
    assert world.reads(app) == [{S1: ("@3", "@4")}]


def test_a_stream_that_is_recreated_while_a_run_is_in_progress_ends_the_run(
    world: OffsetsWorld,
) -> None:
    stream_of_two(world)
    app = reader()
    world.output.before = lambda batch: stream_of_two(world)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        world.run(app)
    assert (caught.value.application, caught.value.stream) == ("app", "fake.s")
    assert world.state(app).checkpoint == {S0: "@3", S1: "@3"}


def test_a_position_resolved_in_the_stream_before_is_resolved_again_in_the_new_one(
    world: OffsetsWorld,
) -> None:
    stream_of_two(world)
    app = reader()
    world.run(app)
    world.ask(app, [S0, S1], StartpointTimestamp, timestamp_ms=3)
    world.begin(app)
    assert {
        ssp: resolution.offset for ssp, resolution in world.state(app).offsets.resolved.items()
    } == {S0: "@2", S1: "@2"}
    world.fake.make("s", 2)
    world.fake.write("s", 0, 3, 4)
    world.fake.write("s", 1, 1)
    assert world.reads(app) == [{S0: ("@0", "@2")}]
    assert world.state(app).checkpoint == {S0: "@2", S1: "@1"}


def test_an_open_batch_of_a_stream_that_was_recreated_is_not_run_again(world: OffsetsWorld) -> None:
    stream_of_two(world)
    app = reader()
    world.output.before = lambda batch: world.die_after(0)
    with pytest.raises(Crash):
        world.run(app)
    world.output.before = lambda batch: None
    world.output.batches.clear()
    stream_of_two(world)
    with pytest.raises(
        OffsetOutOfRangeError, match=r"fake\.s was deleted and recreated .* the open batch 1 "
    ) as refused:
        world.run(app)
    assert "adjunct checkpoint abandon app --reason" in refused.value.next_step
    assert world.output.batches == {}
    BatchLog(world.lake, "app").abandon(reason="ticket 8", by="ada", skip=False)
    world.ask(app, [S0, S1], StartpointSpecific, offset="@2")
    assert world.reads(app) == [{S0: ("@2", "@3"), S1: ("@2", "@3")}]


def test_a_position_above_upcoming_is_an_error(world: OffsetsWorld) -> None:
    stream_of_two(world)
    app = reader(on_lost="oldest")
    world.run(app)
    del world.fake.streams["s"].partitions[1].times[1:]
    with pytest.raises(OffsetOutOfRangeError) as caught:
        world.run(app)
    assert (
        caught.value.stream,
        caught.value.partition,
        caught.value.offset,
        caught.value.upcoming,
    ) == ("fake.s", 1, "@3", "@1")


# -- retention


def test_retention_past_the_checkpoint_is_an_error_with_both_offsets_and_remedies(
    world: OffsetsWorld,
) -> None:
    stream_of_two(world)
    app = reader()
    world.run(app)
    world.fake.write("s", 1, 4, 5, 6)
    world.fake.retain_from("s", 1, 5)
    with pytest.raises(OffsetOutOfRangeError) as refused:
        world.run(app)
    assert "fake.s.1" in refused.value.problem
    assert "fake.s.0" not in refused.value.problem
    assert "offset @3" in refused.value.problem
    assert "@5" in refused.value.problem
    assert f"startpoint set MODULE:APP {S1} --oldest" in refused.value.next_step
    assert 'on_lost="oldest"' in refused.value.next_step
    assert world.state(app).checkpoint[S1] == "@3"
    world.ask(app, S1, StartpointOldest)
    assert world.reads(app) == [{S1: ("@5", "@6")}]


@pytest.mark.parametrize("left", [True, False])
def test_what_retention_took_is_counted_where_the_input_goes_on_from_the_oldest(
    world: OffsetsWorld, left: bool
) -> None:
    stream_of_two(world)
    app = reader(on_lost="oldest")
    world.run(app)
    world.fake.write("s", 1, 4, 5, 6)
    world.fake.retain_from("s", 1, 5 if left else 6)
    events: list[str] = []
    read = world.reads(app, on_event=lambda event: events.append(event.summary()))
    assert read == ([{S1: ("@5", "@6")}] if left else [])
    assert world.state(app).totals["fake.s"] == {"lost_offsets": 2 if left else 3}
    assert any(
        str(S1) in text and "@3" in text and ("@5" if left else "@6") in text for text in events
    )
    assert world.state(app).checkpoint == {S0: "@3", S1: "@6"}
    assert world.reads(app) == []
    assert world.state(app).totals["fake.s"] == {"lost_offsets": 2 if left else 3}


def test_a_startpoint_at_the_oldest_offset_follows_retention_without_loss(
    world: OffsetsWorld,
) -> None:
    stream_of_two(world)
    app = reader()
    world.run(app)
    world.ask(app, S0, StartpointOldest)
    world.begin(app)
    assert world.state(app).offsets.resolved[S0].offset == "@0"
    world.fake.retain_from("s", 0, 1)
    assert world.reads(app) == [{S0: ("@1", "@3")}]

"""What people ask in words: positions, partitions and requests, and what a preview says that
they would do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import application_state
from dagster_adjunct.orchestration.batch_log.checkpoints import CheckpointManager
from dagster_adjunct.orchestration.startpoints.preview import Preview
from dagster_adjunct.orchestration.startpoints.request import (
    StartpointRequest,
    expand_partitions,
    parse_position,
)
from dagster_adjunct.orchestration.startpoints.startpoints import (
    build_requests,
    request_startpoints,
)
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    InvalidNameError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.startpoint import (
    Startpoint,
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
)
from dagster_adjunct.resources.streams.system import StreamSystem, SystemStreamPartition
from tests.faulty_store import Crash
from tests.orchestration.offsets.fake_streams import TimelessStreams
from tests.orchestration.offsets.offsets_world import Batch, OffsetsWorld

WHO: dict[str, Any] = {"by": "ada", "reason": "ticket 7"}


@pytest.fixture
def world() -> OffsetsWorld:
    """Stream fake.s: partitions 0 and 1 with records at 1,000, 2,000 … 9,000 ms; 2 and 3 without
    any.
    """
    world = OffsetsWorld()
    world.fake.make("s", 4)
    for partition in (0, 1):
        world.fake.write("s", partition, *range(1000, 10_000, 1000))
    return world


@pytest.fixture
def app() -> Application:
    app = Application("orders")
    app.input_stream("fake.s")
    return app


def preview(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    app: Application,
    requests: Sequence[StartpointRequest],
) -> list[Preview]:
    return list(request_startpoints(lake, systems, app, requests, dry_run=True).previews)


def ssps(stream: str, *numbers: int) -> list[SystemStreamPartition]:
    system, name = stream.split(".")
    return [SystemStreamPartition(system, name, number) for number in numbers]


def asked(
    position: Startpoint, *numbers: int, until: Startpoint | None = None, **more: Any
) -> list[Any]:
    return build_requests(ssps("fake.s", *numbers), position, until, **WHO, **more)


def previewed(
    world: OffsetsWorld, app: Application, requests: Sequence[Any]
) -> list[tuple[Any, ...]]:
    previews = preview(world.lake, world.systems(), app, requests)
    return [
        (displayed.checkpoint, displayed.start, displayed.end, displayed.offsets, displayed.moved)
        for displayed in previews
    ]


# -- positions


def test_the_four_positions_are_read() -> None:
    assert isinstance(parse_position("oldest"), StartpointOldest)
    assert isinstance(parse_position("upcoming", None), StartpointUpcoming)
    offset = parse_position("offset", " 42 ")
    assert isinstance(offset, StartpointSpecific)
    assert offset.offset == "42"


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-01-31T18:00Z", datetime(2026, 1, 31, 18, tzinfo=UTC)),
        ("2026-01-31T18:00:00.250+02:00", datetime(2026, 1, 31, 16, 0, 0, 250_000, tzinfo=UTC)),
        ("2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        ("1969-12-31T23:59:59Z", datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)),
        ("1767312000000", datetime(2026, 1, 2, tzinfo=UTC)),
    ],
)
def test_a_time_is_iso_with_its_zone_or_a_date_or_milliseconds(text: str, moment: datetime) -> None:
    startpoint = parse_position("timestamp", text)
    assert isinstance(startpoint, StartpointTimestamp)
    assert startpoint.timestamp_ms == round(moment.timestamp() * 1000)


@given(st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1)), st.integers(-14 * 60, 14 * 60))
def test_a_time_means_the_same_in_every_zone(moment: datetime, minutes: int) -> None:
    moment = moment.replace(microsecond=moment.microsecond // 1000 * 1000, tzinfo=UTC)
    there = moment.astimezone(timezone(timedelta(minutes=minutes)))
    startpoint = parse_position("timestamp", there.isoformat())
    assert isinstance(startpoint, StartpointTimestamp)
    assert startpoint.timestamp_ms == round(moment.timestamp() * 1000)


@pytest.mark.parametrize(
    ("kind", "value", "reported"),
    [
        ("timestamp", "2026-01-31T18:00", "names no zone. Write 2026-01-31T18:00Z"),
        ("timestamp", "2026", "looks like a year"),
        ("timestamp", "1767312000", "or like seconds"),
        ("timestamp", "20260131180000", "can't be read"),
        ("timestamp", "yesterday", "can't be read"),
        ("timestamp", "2026-01-31T18:00:00.000001Z", "finer than a millisecond"),
        ("timestamp", None, "needs a value"),
        ("offset", "  ", "needs a value"),
        ("oldest", "3", "takes no value"),
        ("newest", None, "one of 'oldest', 'upcoming', 'timestamp', 'offset'"),
    ],
)
def test_what_is_not_clear_is_refused_with_what_to_write(
    kind: str, value: str | None, reported: str
) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_position(kind, value)
    assert reported in str(error.value)


# -- partitions


def test_partitions_are_named_one_by_one_as_ranges_and_as_whole_streams(
    world: OffsetsWorld, app: Application
) -> None:
    app.input_stream("fake.t")
    world.fake.make("t", 2)

    def named(*texts: str) -> list[SystemStreamPartition]:
        return expand_partitions(app, world.systems(), texts)

    assert named("fake.s.3") == ssps("fake.s", 3)
    assert named("fake.s.0-1,3") == ssps("fake.s", 0, 1, 3)
    assert named("fake.t", "fake.s.2", "fake.t.1", "fake.s.1-2") == [
        *ssps("fake.t", 0, 1),
        *ssps("fake.s", 2, 1),
    ]
    assert named() == []


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("fake.s.4", "names partition 4, and the stream has 4 partitions, 0 to 3"),
        ("fake.s.2-9", "names partition 9"),
        ("fake.s.3-1", "'3-1' is neither a partition"),
        ("fake.s.", "is neither a partition"),
        ("fake.s.1.2", "is neither a partition"),
        ("fake.s.-1", "is neither a partition"),
        ("fake.s.1,", "is neither a partition"),
        ("fake.z", "does not read fake.z; it reads: fake.changes, fake.s"),
        ("fake.prices.0", "adjunct dataset rollback prices VERSION"),
        ("fake.short.0", "lives for one run"),
    ],
)
def test_what_can_not_be_read_is_refused_by_name(
    world: OffsetsWorld, app: Application, text: str, reported: str
) -> None:
    app.table(bounded_dataset("prices", input="fake.prices", key="k", broadcast=True))
    app.table(unbounded_dataset("rates", input="fake.changes", key="k", partitions=1))
    app.table(
        unbounded_dataset("short", input="fake.short", key="k", partitions=1, persistent=False)
    )
    with pytest.raises(AdjunctError) as error:
        expand_partitions(app, world.systems(), [text])
    assert reported in str(error.value)


def test_names_that_are_none_and_streams_that_are_not_there_are_errors_of_their_own(
    world: OffsetsWorld, app: Application
) -> None:
    app.input_stream("fake.later")
    with pytest.raises(InvalidNameError):
        expand_partitions(app, world.systems(), ["flights"])
    with pytest.raises(StreamNotFoundError):
        expand_partitions(app, world.systems(), ["fake.later"])


def test_every_partition_gets_a_startpoint_of_its_own() -> None:
    made = asked(
        StartpointOldest(),
        0,
        1,
        2,
        until=StartpointUpcoming(),
        on_unresolved="checkpoint",
        force=True,
    )
    assert len({request.startpoint.id for request in made}) == 3
    assert [str(request.ssp) for request in made] == ["fake.s.0", "fake.s.1", "fake.s.2"]
    assert {
        (request.by, request.reason, request.on_unresolved, request.force) for request in made
    } == {("ada", "ticket 7", "checkpoint", True)}
    assert all(isinstance(request.until, StartpointUpcoming) for request in made)


# -- previews


def test_a_preview_says_where_reading_would_begin_and_how_much_there_is(
    world: OffsetsWorld, app: Application
) -> None:
    at_5 = StartpointTimestamp(timestamp_ms=4500)
    assert previewed(world, app, asked(at_5, 0, 2)) == [
        (None, "@4", "@9", 5, None),
        (None, "@0", "@0", 0, None),
    ]
    world.run(app)
    world.fake.write("s", 1, 10_000, 11_000)
    assert previewed(world, app, asked(at_5, 0, 1)) == [
        ("@9", "@4", "@9", 5, -5),
        ("@9", "@4", "@11", 7, -5),
    ]
    assert previewed(world, app, asked(StartpointUpcoming(), 0, 1)) == [
        ("@9", "@9", "@9", 0, 0),
        ("@9", "@11", "@11", 0, 2),
    ]
    assert previewed(world, app, asked(StartpointSpecific(offset="@7"), 1)) == [
        ("@9", "@7", "@11", 4, -2)
    ]


def test_a_batch_that_is_open_is_ended_before_a_request_is_followed(
    world: OffsetsWorld, app: Application
) -> None:
    def die(batch: Batch) -> None:
        raise Crash("in the middle")

    world.output.before = die
    with pytest.raises(Crash):
        world.run(app)
    assert application_state(world.lake, app.name).open is not None
    assert previewed(world, app, asked(StartpointSpecific(offset="@7"), 1)) == [
        ("@9", "@7", "@9", 2, -2)
    ]


def test_a_preview_counts_what_is_passed_over_if_the_open_batch_is_abandoned(
    world: OffsetsWorld, app: Application
) -> None:
    def die(batch: Batch) -> None:
        raise Crash("in the middle")

    world.run(app)
    for partition in (0, 1):
        world.fake.write("s", partition, *range(10_000, 20_000, 1000))
    world.output.before = die
    with pytest.raises(Crash):
        world.run(app)
    world.output.before = lambda batch: None
    requests = [
        *asked(StartpointSpecific(offset="@12"), 0),
        *asked(StartpointSpecific(offset="@9"), 1),
        *asked(StartpointOldest(), 2),
        *asked(StartpointOldest(), 3, until=StartpointUpcoming()),
    ]
    result = request_startpoints(world.lake, world.systems(), app, requests)
    assert [shown.passed_over for shown in result.previews] == [3, 0, 0, 0]
    assert {shown.open_batch for shown in result.previews} == {2} == {result.open_batch}
    manager = CheckpointManager(world.lake, app)
    assert manager.abandon(reason="it never ends", by="ada").batch == 2
    (batch,) = world.delivered(app)
    first, second = ssps("fake.s", 0, 1)
    assert batch.read() == {first: ("@12", "@19"), second: ("@9", "@19")}  # three are lost
    assert request_startpoints(world.lake, world.systems(), app, requests).open_batch is None


def test_a_bounded_replay_counts_its_own_offsets_and_moves_nothing(
    world: OffsetsWorld, app: Application
) -> None:
    world.run(app)
    until = StartpointTimestamp(timestamp_ms=6000)
    (replay,) = preview(
        world.lake, world.systems(), app, asked(StartpointSpecific(offset="@2"), 0, until=until)
    )
    assert (replay.start, replay.end, replay.offsets, replay.moved) == ("@2", "@5", 3, None)
    assert replay.effect == "3 offsets to read again: the position stays"
    (empty,) = preview(world.lake, world.systems(), app, asked(StartpointOldest(), 3, until=until))
    assert empty.effect == "0 offsets to read again: the position stays"


def test_what_a_preview_says_is_what_the_next_run_does(
    world: OffsetsWorld, app: Application
) -> None:
    world.run(app)
    world.fake.write("s", 0, 10_000)
    requests = [
        *asked(StartpointTimestamp(timestamp_ms=2500), 0),
        *asked(StartpointOldest(), 1, until=StartpointSpecific(offset="@4")),
    ]
    first, second = preview(world.lake, world.systems(), app, requests)
    world.startpoints(app).write_startpoints(requests)
    batches = world.delivered(app)
    read = {(batch.main, str(ssp)): span for batch in batches for ssp, span in batch.read().items()}
    assert read == {
        (True, "fake.s.0"): (first.start, first.end),
        (False, "fake.s.1"): (second.start, second.end),
    }
    assert (first.tasks, second.tasks) == (("Partition 0",), ("Partition 1",))


def test_a_preview_writes_nothing_and_looks_once_at_a_stream(
    world: OffsetsWorld, app: Application
) -> None:
    world.stream("many", 300)
    app.input_stream("lake.many")
    world.run(app)
    before = {item.key for item in world.lake.store.list("")}
    lake = world.faulty([])
    requests = build_requests(ssps("lake.many", *range(300)), StartpointOldest(), **WHO)
    assert len(preview(lake, world.systems(lake), app, requests)) == 300
    assert {item.key for item in world.lake.store.list("")} == before
    assert len(lake.store.requests) < 20  # type: ignore[attr-defined]


def test_what_can_not_be_resolved_is_reported_and_not_raised(
    world: OffsetsWorld, app: Application
) -> None:
    world.fake.__class__ = TimelessStreams
    beyond, unable = preview(
        world.lake,
        world.systems(),
        app,
        [
            *asked(StartpointSpecific(offset="@70"), 0),
            *asked(StartpointTimestamp(timestamp_ms=1), 1, on_unresolved="checkpoint"),
        ],
    )
    assert "@70 is not on the stream" in str(beyond.error)
    assert (beyond.start, beyond.falls_back, beyond.effect) == (None, False, beyond.error)
    assert unable.falls_back
    assert unable.effect.startswith(
        "goes on from its checkpoint: fake.s.1: stream system 'fake' can't start at"
    )


def test_a_request_for_a_task_that_does_not_read_the_partition_is_for_nobody(
    world: OffsetsWorld, app: Application
) -> None:
    right, wrong = preview(
        world.lake,
        world.systems(),
        app,
        [
            *asked(StartpointOldest(), 1, task="Partition 1"),
            *asked(StartpointOldest(), 1, task="Partition 0"),
        ],
    )
    assert (right.tasks, right.error) == (("Partition 1",), None)
    assert (wrong.tasks, wrong.error) == (
        (),
        "task 'Partition 0' does not read fake.s.1; 'Partition 1' does.",
    )


def test_offsets_of_a_stream_that_was_recreated_are_not_compared_with_those_before(
    world: OffsetsWorld, app: Application
) -> None:
    world.run(app)
    world.fake.make("s", 4)
    world.fake.write("s", 0, 500)
    assert previewed(world, app, asked(StartpointOldest(), 0)) == [("@9", "@0", "@1", 1, None)]


def test_a_stream_that_is_an_input_and_a_datasets_is_the_datasets_only_by_name(
    world: OffsetsWorld, app: Application
) -> None:
    for name in ("both", "changes"):
        world.stream(name, 2)
    app.input_stream("lake.both")
    app.table(unbounded_dataset("rates", input="lake.both", key="k", partitions=2))
    app.table(unbounded_dataset("prices", input="lake.changes", key="k", partitions=2))
    both, changes = ssps("lake.both", 1), ssps("lake.changes", 1)
    requests = [
        *build_requests(both, StartpointOldest(), **WHO),
        *build_requests(both, StartpointOldest(), task="dataset rates", **WHO),
        *build_requests(changes, StartpointOldest(), **WHO),
        *build_requests(changes, StartpointOldest(), task="Partition 1", **WHO),
    ]
    previews = preview(world.lake, world.systems(), app, requests)
    assert [displayed.tasks for displayed in previews] == [
        ("Partition 1",),
        ("dataset rates",),
        ("dataset prices",),
        (),
    ]
    assert previews[0].error is None
    assert "dataset 'rates' has no table yet" in str(previews[1].error)


def test_an_application_of_datasets_only_has_previews(world: OffsetsWorld) -> None:
    world.stream("changes", 2)
    app = Application("tables")
    app.table(unbounded_dataset("rates", input="lake.changes", key="k", partitions=2))
    whole = build_requests(ssps("lake.changes", 0, 1), StartpointOldest(), **WHO)
    previews = preview(world.lake, world.systems(), app, whole)
    assert {(displayed.tasks, displayed.error) for displayed in previews} == {
        (("dataset rates",), None)
    }
    (part,) = preview(world.lake, world.systems(), app, whole[:1])
    assert "has no table yet" in str(part.error)

"""What is stored of startpoints and can't be read: it stops nothing else, is shown, and can be
taken back.
"""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.startpoints.request import StartpointRequest
from dagster_adjunct.orchestration.startpoints.startpoints import (
    TakenBack,
    build_requests,
    collect_startpoints,
    request_startpoints,
    take_back_startpoints,
)
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointTimestamp
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.orchestration.offsets.offsets_world import OffsetsWorld
from tests.orchestration.offsets.stored_startpoints import handed_to, waiting_at, write_startpoint

S0, S1, S2 = (SystemStreamPartition("fake", "s", number) for number in range(3))
WHO: dict[str, Any] = {"by": "ada", "reason": "ticket 7"}
WHOLE = dict.fromkeys((S0, S1, S2), ("@0", "@3"))


@pytest.fixture
def app() -> Application:
    app = Application("app")
    app.input_stream("fake.s")
    return app


@pytest.fixture
def world(app: Application) -> OffsetsWorld:
    """fake.s with three partitions of three records, all of them read once."""
    world = OffsetsWorld()
    world.fake.make("s", 3)
    for partition in range(3):
        world.fake.write("s", partition, 1, 2, 3)
    assert world.reads(app) == [WHOLE]
    return world


def stored(at: SystemStreamPartition, **fields: Any) -> dict[str, Any]:
    return {**StartpointRequest(ssp=at, startpoint=StartpointOldest(), **WHO).to_json(), **fields}


def put(world: OffsetsWorld, namespace: str, key: str, value: object) -> None:
    MetadataStore(world.lake).namespace(namespace, "app").transact(
        lambda _: ({key: value}, None), by="somebody"
    )


def displayed(world: OffsetsWorld, app: Application) -> list[dict[str, Any]]:
    return collect_startpoints(world.lake, world.systems(), app, world.now)["unreadable"]


def cleared(
    world: OffsetsWorld, app: Application, *ssps: SystemStreamPartition, task: str | None = None
) -> TakenBack:
    return take_back_startpoints(world.lake, app, ssps or None, task=task, **WHO)


NEWER = {"version": 2, "ssp": "fake.s.1", "where": "the middle"}


@pytest.mark.parametrize(
    ("ssp", "startpoint", "reported"),
    [
        ("fake.s", StartpointOldest(), "'fake.s'.*SystemStreamPartition"),
        ("fake.s.0", StartpointOldest(), "'fake.s.0'.*SystemStreamPartition"),
        (None, StartpointOldest(), "None.*SystemStreamPartition"),
        (S0, "oldest", "'oldest'.*expected.*Startpoint"),
        (S0, StartpointOldest, "[Ss]tartpoint"),
        (S0, None, "None.*[Ss]tartpoint"),
    ],
)
def test_types_are_checked_when_a_request_is_written(
    world: OffsetsWorld, app: Application, ssp: Any, startpoint: Any, reported: str
) -> None:
    with pytest.raises(ConfigurationError, match=reported):
        write_startpoint(world.startpoints(app), ssp, startpoint, **WHO)
    assert world.startpoints(app).read().waiting == []


@pytest.mark.parametrize(
    "options", [{"until": "upcoming"}, {"force": "yes"}, {"sequence": "3"}, {"task": 3}, {"id": 3}]
)
def test_so_are_the_other_fields_of_a_request(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as failure:
        StartpointRequest(**{"ssp": S0, "startpoint": StartpointOldest(), **WHO, **options})
    assert failure.value.argument == next(iter(options))


FAR = 10**18  # ms: what nanoseconds come to that are taken for them
OF_S1 = '["fake.s.1",null]'


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ('["fake.s",null]', stored(S1, ssp="fake.s", sequence=1)),
        (OF_S1, stored(S1, version=2)),
        (OF_S1, stored(S1, until={"kind": "oldest"})),
        (
            OF_S1,
            stored(
                S1,
                startpoint={**StartpointTimestamp(timestamp_ms=0).to_json(), "timestamp_ms": FAR},
            ),
        ),
        (
            OF_S1,
            stored(S1, startpoint={**StartpointOldest().to_json(), "creation_timestamp_ms": FAR}),
        ),
        (OF_S1, stored(S1, sequence=["x"])),
        (OF_S1, stored(S1, reason=None)),
        (OF_S1, stored(S0)),
        ('["fake.s.1",7]', stored(S1)),
        ('["fake.s.1"]', stored(S1)),
        ("no key", "no request"),
        ('{"a":1}', 1),
    ],
)
def test_a_request_that_can_not_be_read_stops_nothing_is_displayed_and_is_taken_back(
    world: OffsetsWorld, app: Application, key: str, value: object
) -> None:
    put(world, "startpoints", key, value)
    world.ask(app, str(S0), StartpointOldest)
    report = world.run(app)
    assert world.output.batches[2].read() == {S0: ("@0", "@3")}
    assert any("a startpoint waits that is left alone" in text for text in report.startpoints)
    (row,) = displayed(world, app)
    assert row["partition"] in key
    done = cleared(world, app)
    assert [request.key for request in done.unreadable] == [key]
    assert displayed(world, app) == []
    assert not any("left alone" in text for text in world.run(app).startpoints)


def test_no_request_takes_the_place_of_one_that_can_not_be_read(
    world: OffsetsWorld, app: Application
) -> None:
    put(world, "startpoints", OF_S1, stored(S1, version=2))
    reported = r"(?s)nothing is written.*would replace.*version 2.*clear"
    with pytest.raises(ConfigurationError, match=reported):
        write_startpoint(world.startpoints(app), S1, StartpointOldest(), **WHO)
    (displayed_before,) = request_startpoints(
        world.lake,
        world.systems(),
        app,
        build_requests([S1], StartpointOldest(), **WHO),
        dry_run=True,
    ).previews
    assert f"{S1}: waiting, and can't be read" in str(displayed_before.error)
    reported = (
        r"(?s)nothing is written.*waiting, and can't be read.*version 2.*clear MODULE:APP fake.s.1"
    )
    with pytest.raises(ConfigurationError, match=reported):
        request_startpoints(
            world.lake, world.systems(), app, build_requests([S1], StartpointOldest(), **WHO)
        )
    assert displayed(world, app)[0]["partition"] == str(S1)
    cleared(world, app, S1)
    write_startpoint(world.startpoints(app), S1, StartpointOldest(), **WHO)
    assert waiting_at(world.startpoints(app), S1) is not None


def test_what_was_written_for_a_text_and_deleted_before_stops_no_run(
    world: OffsetsWorld, app: Application
) -> None:
    put(world, "startpoints", '["fake.s",null]', stored(S1, ssp="fake.s", sequence=1))
    put(world, "startpoints-fan-out", '["settled","fake.s",null]', 1)  # what deleting it left once
    world.run(app)
    assert world.startpoints(app).delete_startpoint("fake.s")
    assert not world.startpoints(app).delete_startpoint("fake.s")
    world.run(app)
    (row,) = displayed(world, app)
    assert (row["partition"], row["handed_to"]) == ("fake.s", None)
    assert len(cleared(world, app).unreadable) == 1
    assert displayed(world, app) == []


def hand_out(world: OffsetsWorld, pending: list[Any], task: str = "Partition 1") -> None:
    put(world, "startpoints-fan-out", f'["task","{task}"]', {"pending": pending, "handed": {}})


def test_only_the_partition_with_an_unreadable_startpoint_is_not_read(
    world: OffsetsWorld, app: Application
) -> None:
    hand_out(world, [NEWER])
    world.ask(app, str(S0), StartpointOldest)
    for partition in range(3):
        world.fake.write("s", partition, 4)
    report = world.run(app)
    assert world.output.batches[2].read() == {S0: ("@0", "@4"), S2: ("@3", "@4")}
    assert world.state(app).checkpoint[S1] == "@3"
    (text,) = [text for text in report.startpoints if "left alone" in text]
    assert text.startswith(
        "fake.s.1: a startpoint was handed out that is left alone; nothing is read there until"
    )
    assert "version 2" in text
    (row,) = displayed(world, app)
    assert (row["partition"], row["handed_to"]) == ("fake.s.1", "Partition 1")
    assert handed_to(world.startpoints(app), "Partition 1") == {}
    (unread,) = world.startpoints(app).read().unreadable
    assert (unread.at, "version 2" in unread.error) == ("Partition 1", True)
    with pytest.raises(
        ConfigurationError,
        match=r"(?s)nothing is written.*handed to Partition 1, and.*startpoint clear",
    ):
        request_startpoints(
            world.lake, world.systems(), app, build_requests([S1], StartpointOldest(), **WHO)
        )
    (unread,) = cleared(world, app, S1).unreadable
    assert unread.summary().startswith("fake.s.1: handed to Partition 1, and can't be read")
    assert world.reads(app) == [{S1: ("@3", "@4")}]


def test_what_can_be_read_next_to_it_stays_and_what_comes_later_waits_behind_it(
    world: OffsetsWorld, app: Application
) -> None:
    task = {"Partition 1": [S1, S2]}
    hand_out(world, [stored(S2, sequence=1), NEWER])
    world.ask(app, str(S1), StartpointOldest)
    report = world.startpoints(app).fan_out(task)
    assert (list(report.tasks["Partition 1"]), [request.ssp for request in report.blocked]) == (
        [S2],
        [S1],
    )
    world.startpoints(app).remove_fan_out_for_task("Partition 1")  # that of S2 is applied
    report = world.startpoints(app).fan_out(task)
    assert (report.tasks, report.held) == ({}, {"Partition 1": frozenset([S1])})
    world.startpoints(app).delete_unreadable(report.unreadable, by="ada")
    assert list(world.startpoints(app).fan_out(task).tasks["Partition 1"]) == [S1]


@pytest.mark.parametrize(
    "value",
    [
        {"version": 2},
        "handed",
        {"pending": [], "handed": {"fake.s.1": "x"}},
        {"pending": {}, "handed": {}},
        7,
    ],
)
def test_an_entry_that_can_not_be_read_at_all_holds_what_its_task_reads(
    world: OffsetsWorld, app: Application, value: object
) -> None:
    put(world, "startpoints-fan-out", '["task","Partition 1"]', value)
    world.ask(app, [str(S0), str(S1)], StartpointOldest)
    report = world.run(app)
    assert world.output.batches[2].read() == {S0: ("@0", "@3")}
    assert any(text.startswith("fake.s.1: nothing is read there") for text in report.startpoints)
    assert any(
        "fake.s.1: a startpoint (ada: ticket 7) waits behind" in text for text in report.startpoints
    )
    assert len(cleared(world, app, task="Partition 1").unreadable) == 1
    assert world.reads(app) == [{S1: ("@0", "@3")}]


@pytest.mark.parametrize(
    "key", ['["else","fake.s.1"]', "no key", "[]", '["settled","fake.s.1",null]', '["task"]']
)
def test_other_entries_that_can_not_be_read_are_left_alone(
    world: OffsetsWorld, app: Application, key: str
) -> None:
    put(world, "startpoints-fan-out", key, {"a": 1})
    world.ask(app, str(S0), StartpointOldest)
    assert world.reads(app) == [{S0: ("@0", "@3")}]
    assert len(displayed(world, app)) == 1
    assert len(cleared(world, app).unreadable) == 1
    assert displayed(world, app) == []


def test_texts_in_place_of_partitions_are_refused_everywhere(
    world: OffsetsWorld, app: Application
) -> None:
    manager: Any = world.startpoints(app)
    for act in (
        lambda: manager.fan_out({"Partition 0": ["fake.s.0"]}),
        lambda: manager.delete_startpoint(7),
        lambda: manager.write_startpoints(["fake.s.0"]),
    ):
        with pytest.raises(
            AdjunctError, match=r"is no Startpoint|SystemStreamPartition|StartpointRequest"
        ):
            act()

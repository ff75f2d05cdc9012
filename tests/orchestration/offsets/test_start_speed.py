"""What a start costs in requests: by streams and by pages of startpoints, never by partitions."""

from __future__ import annotations

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.streams.startpoint import (
    Startpoint,
    StartpointOldest,
    StartpointTimestamp,
    StartpointUpcoming,
)
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.orchestration.offsets.offsets_world import OffsetsWorld

UNTIL = StartpointUpcoming()


def requests_of_a_start(
    partitions: int, streams: int, until: Startpoint | None = None
) -> dict[str, int]:
    """Return the requests of a run that begins every partition at a startpoint, by what they
    were made to.
    """
    world = OffsetsWorld()
    app = Application("app", auto_repartition=True)
    for number in range(streams):
        world.stream(f"s{number}", partitions)
        app.input_stream(f"lake.s{number}", default_offset="oldest")
    world.send("s0", *range(10 * partitions))
    world.run(app)
    ssps = [
        str(SystemStreamPartition("lake", f"s{s}", p))
        for s in range(streams)
        for p in range(partitions)
    ]
    third = len(ssps) // 3
    world.ask(app, ssps[:third], StartpointOldest, until=until)
    world.ask(app, ssps[third : 2 * third], StartpointTimestamp, timestamp_ms=world.now_ms + 1)
    world.ask(app, ssps[2 * third :], StartpointUpcoming)
    world.run(app)
    state = world.state(app)
    assert len(state.offsets.epochs.highest) + len(state.offsets.applied) >= len(ssps) - third
    assert world.fanned_out(app) == {}
    made: dict[str, int] = {}
    for _, key in world.store.requests:
        where = key.partition("/")[0]
        made[where] = made.get(where, 0) + 1
    return made


@pytest.mark.lengthy
@pytest.mark.parametrize("until", [None, UNTIL], ids=["", "bounded"])
def test_a_start_makes_no_more_requests_for_more_partitions(until: Startpoint | None) -> None:
    few = requests_of_a_start(6, 1, until)
    many = requests_of_a_start(120, 1, until)
    assert many == few
    assert sum(few.values()) < 80


def test_a_start_asks_each_stream_for_its_state_a_fixed_number_of_times() -> None:
    one, five = requests_of_a_start(6, 1), requests_of_a_start(6, 5)
    assert five["streams"] == 5 * one["streams"]
    assert {**five, "streams": 0} == {**one, "streams": 0}

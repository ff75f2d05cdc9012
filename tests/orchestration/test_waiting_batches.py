"""What batches read while records wait for a dataset, without Spark: only positions count."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.policies import Watermark
from dagster_adjunct.orchestration.operators.lookups import Wait
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointSpecific
from tests.orchestration.quick_waits import MINUTE, QuickWorld

F0, F1 = "lake.facts.0", "lake.facts.1"
WHO: dict[str, Any] = {"by": "ada", "reason": "an audit"}


@pytest.mark.parametrize("limit", [1, 3])
def test_records_that_wait_leave_the_others_no_less_of_a_batch(limit: int) -> None:
    world = QuickWorld(2, options={"max_batch_records": limit})
    waits, goes = world.key(0), world.key(1)
    world.clock.forward(minutes=5)
    world.send("prices", (waits, 3, 1), (goes, 3, 1))
    world.send("facts", *[(waits, 4, n) for n in range(10)], *[(goes, 1, n) for n in range(5)])
    report = world.run()
    assert world.read() == {F1: [0, 1, 2, 3, 4]}
    assert [(str(one.ssp), one.offset) for one in report.held] == [(F0, 0)]
    world.clock.forward(hours=1)
    world.run()
    assert world.read() == {F0: [*range(10)], F1: [0, 1, 2, 3, 4]}


def test_a_replay_goes_on_while_new_records_wait() -> None:
    world = QuickWorld(wait=Wait(10 * MINUTE, mark="early"))
    world.clock.forward(minutes=5)
    world.send("prices", ("a", 3, 1))
    world.send("facts", ("a", 1, 1), ("a", 4, 2), ("a", 2, 3))
    world.run()
    world.clock.forward(minutes=10)
    world.run()  # the second one is early
    world.send("facts", ("a", 14, 4))
    world.run()
    world.send("prices", ("a", 13, 1))
    until = StartpointSpecific(offset="3")
    world.startpoints.request(
        "lake.facts", StartpointOldest(), until=until, versions="recorded", **WHO
    )
    assert [one.offset for one in world.run().held] == [3]
    assert world.read() == {F0: [0, 1, 2, 0, 1, 2]}
    first, second, *again = [one.intent.joined.known for one in world.work.inputs]
    assert again == [first, second]  # so the same records are marked


@pytest.mark.parametrize("ahead", [timedelta(minutes=3), timedelta(days=365_000)])
def test_a_record_written_in_the_future_does_not_wait_until_then(ahead: timedelta) -> None:
    world = QuickWorld(wait=10 * MINUTE, facts_options={"timestamp": "at"})
    world.clock.forward(minutes=5)
    world.send("prices", ("a", 3, 1))
    world.send("facts", ("a", world.clock() + ahead, 1), ("a", 4, 2))
    assert len(world.run().held) == 1
    world.clock.forward(minutes=13)
    assert world.run().held == ()
    assert world.read() == {F0: [0, 1]}


def test_an_event_time_in_the_far_future_ends_nobody_elses_waiting() -> None:
    world = QuickWorld(wait=Wait(10 * MINUTE, by="event time"))
    world.clock.forward(minutes=5)
    world.send("prices", ("a", 3, 1))
    world.send("facts", ("a", 4, 1), ("a", world.clock() + timedelta(days=365_000), 2), ("a", 5, 3))
    assert [one.offset for one in world.run().held] == [0]
    world.clock.forward(minutes=9)
    world.send("facts", ("a", 14, 4))
    assert [one.offset for one in world.run().held] == [2]
    assert world.read() == {F0: [0, 1]}


def test_a_change_after_the_time_of_an_idle_partition_is_late_however_many_came_before() -> None:
    world = QuickWorld(2, watermark=Watermark(idle_after=5 * MINUTE))
    busy, idle = world.key(0), world.key(1)
    world.clock.forward(minutes=60)
    world.send("prices", (busy, 60, 1), (idle, 30, 1))
    world.run()
    world.clock.forward(minutes=6)
    world.send("prices", (busy, 66, 1))
    world.run()  # complete up to 61
    for minute in (31, 32):
        world.send("prices", (idle, minute, 1))
        (report,) = world.advance()
        assert report.counters["late_changes"] == 1

"""A budget is spent by many tasks of several runs, in simulated time: in every 10 s it is the
rate, within a tenth.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.tables.rate import (
    Budget,
    LeaseRequest,
    SharedTimeline,
    divide_fairly,
    lease_credits,
)
from dagster_adjunct.resources.tables.shared_rate import BudgetLeases
from tests.resources.tables.credit_world import World, of_the_rate

SECONDS = 30.0


def within_a_tenth(world: World) -> bool:
    parts = of_the_rate(world.spent, world.rate, 1000.0, world.now)
    assert len(parts) > 100
    return min(parts) >= 0.9 - 1e-9 and max(parts) <= 1.1 + 1e-9


@pytest.mark.parametrize("rate", [1.0, 10.0, 100.0, 20_000.0])
@pytest.mark.parametrize("tasks", [1, 2, 16])
def test_one_run_spends_the_rate_with_any_number_of_tasks(rate: float, tasks: int) -> None:
    world = World(rate)
    world.run("one", tasks)
    world.pass_(SECONDS)
    assert within_a_tenth(world)


@pytest.mark.parametrize("rate", [1.0, 100.0])
def test_two_runs_spend_it_together_also_where_their_clocks_differ(rate: float) -> None:
    world = World(rate)
    world.run("ahead", 2, ahead=3600.0)
    world.run("behind", 16, ahead=-30.0, pause=0.3)
    world.pass_(SECONDS)
    assert within_a_tenth(world)
    assert all(5 < credits / rate < SECONDS - 5 for credits in world.spent_by.values())


def test_a_run_that_wants_little_leaves_the_rest_to_the_other() -> None:
    world = World(100.0)
    world.run("little", 1, request=1, pause=0.1)
    world.run("much", 2)
    world.pass_(SECONDS)
    assert within_a_tenth(world)
    assert world.spent_by["little"] > 0.7 * SECONDS * 10


def test_runs_and_tasks_that_come_go_and_die_change_nothing_of_the_whole() -> None:
    world = World(100.0)
    dying, staying = world.run("dying"), world.run("staying", 4)

    def change(world: World) -> None:
        if world.at(1008):
            dying.alive = False
        if world.at(1012):
            world.leave(staying.tasks[0])
            world.leave(staying.tasks[1])
        if world.at(1016):
            world.run("coming", 16)

    world.pass_(SECONDS, change)
    assert within_a_tenth(world)
    assert set(world.spent_by) == {"dying", "staying", "coming"}


def test_a_store_that_takes_a_second_for_a_lease_changes_nothing() -> None:
    world = World(100.0)
    world.run("far", 2, delay=1.0)
    world.pass_(2.0)  # until the first lease is there
    world.spent.clear()
    world.pass_(SECONDS)
    parts = of_the_rate(world.spent, world.rate, 1003.0, world.now)
    assert min(parts) > 0.9
    assert max(parts) < 1.1


def test_what_nobody_uses_expires() -> None:
    world = World(100.0)
    run = world.run("idle", 1, request=10)
    world.pass_(3)
    run.tasks[0].free_at = world.now + 20  # it does something else
    world.pass_(20)
    woke = world.now
    world.pass_(1)
    # and not 20 s of them
    assert sum(credits for time, credits in world.spent if time > woke) <= 100 + 50 + 10


def test_stretches_of_time_are_never_leased_twice_whatever_clocks_say() -> None:
    seed = random.Random(7)
    for _ in range(50):
        timeline, through = SharedTimeline(), 0.0
        for _ in range(200):
            now = 1000 + seed.random() * 10
            before = timeline
            timeline, got = lease_credits(
                timeline,
                seed.choice("abc"),
                now,
                LeaseRequest(seed.random() * 2, seed.random()),
                100.0,
            )
            assert timeline.now >= before.now
            if got is not None:
                assert got.start + timeline.now >= through - 1e-6
                through = got.end + timeline.now
                assert 0 < got.end - got.start <= 2.0
                assert got.end <= 1.0 + 1e-6


def test_shares_are_what_is_wanted_where_that_fits_and_else_even() -> None:
    assert divide_fairly({"a": 0.2, "b": 0.3}) == {"a": 0.2, "b": 0.3}
    assert divide_fairly({"a": 0.2, "b": 1.0}) == pytest.approx({"a": 0.2, "b": 0.8})
    assert divide_fairly({"a": 1.0, "b": 1.0, "c": 0.1}) == pytest.approx(
        {"a": 0.45, "b": 0.45, "c": 0.1}
    )
    assert divide_fairly({}) == {}


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.3])
def test_a_few_credits_come_at_once_whatever_the_rate_and_however_long_a_lease_takes(
    delay: float,
) -> None:
    for rate in (1.0, 100.0, 5_000.0):
        world = World(rate)
        run = world.run("few", 1, request=min(1.0, rate / 500), delay=delay)
        world.pass_(10)
        run.tasks[0].free_at = world.now + 3  # nothing is asked for, so that nothing is left
        world.pass_(3)
        began, before = world.now, sum(credits for _, credits in world.spent)
        world.pass_(1)
        spent = [time for time, _ in world.spent if time > began]
        assert spent, (rate, before)
        assert spent[0] - began < delay + 0.35


def test_runs_that_state_other_rates_for_one_budget_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lake = open_lake(str(tmp_path), create=True)

    def run(name: str, rate: float) -> BudgetLeases:
        return BudgetLeases(lake, Budget("plant", "write", rate), name)

    before, after = run("before", 100.0), run("after", 1000.0)
    for leases in (before, run("like it", 100.0), before):
        leases.lease(LeaseRequest(0.05, 0.1))
    assert not any("is declared with" in message for message in caplog.messages)
    for _ in range(3):
        after.lease(LeaseRequest(0.05, 0.1))
        before.lease(LeaseRequest(0.05, 0.1))
    reported = [message for message in caplog.messages if "'plant' (write)" in message]
    assert [
        ("with 1000 " in one.split(",")[0], "with 100 " in one.split(",")[0]) for one in reported
    ] == [(True, False), (False, True)]

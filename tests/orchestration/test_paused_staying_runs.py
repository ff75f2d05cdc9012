"""A run that stays, paused in a batch or while it waits for records, and woken: it changes nothing
that its successors have written since, and ends.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.resources.errors import (
    AdjunctError,
    CommitConflictError,
    LeaseLostError,
    RunLeaseLostError,
)
from dagster_adjunct.resources.objects.lake import Lake
from tests.faulty_store import Fault, FaultyStore
from tests.orchestration.paused_runs import PausedWorld
from tests.orchestration.test_paused_runs import everything, left_in
from tests.rounds import rounds

LOST = (RunLeaseLostError, CommitConflictError, LeaseLostError)


def stay(world: PausedWorld, nth: int, *, idle: bool) -> tuple[AdjunctError | None, FaultyStore]:
    """Run the application as one that stays, paused at its `nth` request to the lake, counted from
    the moment when it has caught up if `idle`.
    """
    store = FaultyStore(world.store)

    def pause_at(request: int) -> None:
        store.plan = (Fault("*", request, "meanwhile", action=world.pause),)

    def hear(event: object) -> None:
        if idle and isinstance(event, StepEvent) and event.what == "follow" and not store.plan:
            pause_at(len(store.requests) + nth)

    if not idle:
        pause_at(nth)
    lake = Lake(store, world.lake.id)
    return world.run_paused(lake, follow=timedelta(minutes=5), on_event=hear), store


def check(world: PausedWorld, error: AdjunctError | None, expected: object, made: object) -> None:
    assert world.paused, made
    assert isinstance(error, LOST), (made, error)
    assert {**left_in(world), "answers": []} == expected, (made, error)
    world.run("last")
    assert left_in(world) == expected, (made, error)


def expected_and_requests() -> tuple[object, range]:
    """Return what is left without a pause, and the requests that a run makes under its lease."""
    whole = PausedWorld(everything)
    counted = FaultyStore(whole.store)
    whole.run("first", Lake(counted, whole.lake.id))
    whole.go_on()
    taken = counted.requests.index(("put_if_absent", "applications/sets/run.json")) + 1
    return left_in(whole), range(taken + 1, len(counted.requests) + 1)


@pytest.mark.lengthy
@pytest.mark.rounds
def test_a_staying_run_that_was_paused_in_a_batch_changes_nothing_that_followed() -> None:
    expected, requests = expected_and_requests()
    for nth in rounds([*requests[10::60]], [*requests]):
        world = PausedWorld(everything)
        error, _ = stay(world, nth, idle=False)
        check(world, error, expected, nth)


@pytest.mark.lengthy
@pytest.mark.rounds
def test_a_staying_run_that_was_paused_while_it_waits_changes_nothing_that_followed() -> None:
    expected, _ = expected_and_requests()
    for nth in rounds([1, 2, 4], [*range(1, 13)]):
        world = PausedWorld(everything)
        error, store = stay(world, nth, idle=True)
        check(world, error, expected, (nth, store.requests[-1]))

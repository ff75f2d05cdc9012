"""Runs that are paused while they take, renew or release their lease, several at a time, and
with clocks that are set or a lake that is away when they wake.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log import run_lease
from dagster_adjunct.orchestration.maintenance.rename import rename_application
from dagster_adjunct.resources import times
from dagster_adjunct.resources.errors import (
    ApplicationBusyError,
    CommitConflictError,
    ConfigurationError,
    RunLeaseLostError,
)
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.faulty_store import Fault, FaultKind, FaultyStore
from tests.orchestration.paused_runs import KEYS, PausedFunction, PausedWorld, Skewed, at_call
from tests.rounds import rounds

FOLDER = "applications/sets/"
KEY = f"{FOLDER}run.json"
Act = Callable[[], object]
pytestmark = pytest.mark.lengthy


def world_with(before: Callable[[PausedWorld], Act] = lambda world: lambda: None) -> PausedWorld:
    """Return a world whose application puts records into a table in memory; `before` each request
    of its first run.
    """

    def make(world: PausedWorld, first: bool) -> Application:
        function: Any = MemoryTable(f"lease-{world.number}")
        if first:
            function = PausedFunction(function, before=before(world))
        app = Application("sets", engine="auto")
        records = app.input_stream("lake.changes", default_offset="oldest")
        table = RemoteTable("t", key="k", write_function=function, batch_size=5, in_flight=1)
        records.select("k", "n").send_to(app.table(table))
        return app

    return PausedWorld(make)


def stored(world: PausedWorld) -> dict[str, Any]:
    table = RemoteTable("t", key="k", read_function=MemoryTable(f"lease-{world.number}"))
    with BlockingTable(table) as opened:
        return opened.get_all([f"k{n}" for n in range(KEYS)])


def values(world: PausedWorld) -> set[int]:
    """Return in which rounds the stored values were sent."""
    return {record["n"] // 100 for record in stored(world).values()}


def pause_at(store: FaultyStore, request_: str, act: Act, *, after: bool) -> None:
    """Let the store call `act` before, or after, each such request for the lease."""
    inner = getattr(store, request_)

    def paused(key: str, *more: Any) -> Any:
        if key != KEY:
            return inner(key, *more)
        if not after:
            act()
        try:
            return inner(key, *more)
        finally:
            if after:
                act()

    setattr(store, request_, paused)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("request_", "is_new"),
    [
        ("get", True),
        ("put_if_absent", True),
        ("get", False),
        ("head", False),
        ("put_if_match", False),
    ],
)
def test_a_run_paused_while_it_takes_its_lease_does_not_run_with_others(
    request_: str, is_new: bool, after: bool
) -> None:
    """After its wake it may run, as one that begins then; never with a lease that it has lost."""
    world = world_with()
    if not is_new:
        world.run("earlier")
        world.send()
    store = FaultyStore(world.store)
    pause_at(store, request_, at_call(1, world.pause), after=after)
    error = world.run_paused(Lake(store, world.lake.id))
    assert world.paused
    assert error is None or isinstance(error, RunLeaseLostError | ApplicationBusyError), error
    assert values(world) == {world.rounds}
    world.run("last")
    assert values(world) == {world.rounds}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_run_paused_while_it_renews_or_releases_its_lease_sends_nothing(
    nth: int, after: bool
) -> None:
    """Its first renewal is asked for in the middle of its writes, the last rewrite is its end."""

    def before(world: PausedWorld) -> Act:
        def expire() -> None:  # what a slow renewal leads to
            world.clocks.by += 110

        return at_call(3, expire)

    world = world_with(before)
    store = FaultyStore(world.store)
    pause_at(store, "put_if_match", at_call(nth, world.pause), after=after)
    error = world.run_paused(Lake(store, world.lake.id))
    assert world.paused
    if nth == 1:
        assert isinstance(error, RunLeaseLostError), error
    else:  # it had ended its batches
        assert error is None
    assert values(world) == {3}
    world.run("last")
    assert values(world) == {3}


@pytest.mark.parametrize("order", [["first", "second"], ["second", "first"]])
@pytest.mark.parametrize("nth", [1, 3])
def test_two_paused_runs_that_wake_in_any_order_send_nothing(order: list[str], nth: int) -> None:
    wakes = {run: threading.Event() for run in order}
    is_paused = {run: threading.Event() for run in order}
    sent: list[str] = []

    class Paused(PausedWorld):
        def begin(self, name: str) -> Future[object]:
            def make(world: PausedWorld, first: bool) -> Application:
                def pause() -> None:
                    is_paused[name].set()
                    assert wakes[name].wait(60)

                inner: Any = MemoryTable(f"lease-{world.number}")
                act = at_call(nth, pause) if name in wakes else lambda: None
                function = PausedFunction(inner, before=act, within=lambda: sent.append(name))
                app = Application("sets", engine="auto")
                records = app.input_stream("lake.changes", default_offset="oldest")
                table = RemoteTable(
                    "t", key="k", write_function=function, batch_size=5, in_flight=1
                )
                records.select("k", "n").send_to(app.table(table))
                return app

            self.make = make
            return threads.submit(self.run, name)

        def pass_time(self) -> None:
            self.clocks.by += 3600
            self.expire_lease()

    with ThreadPoolExecutor(3) as threads:
        world = Paused(lambda world, first: Application("sets"))
        with patch.object(times, "time", world.clocks):
            running = {}
            for name in ("first", "second"):
                running[name] = world.begin(name)
                assert is_paused[name].wait(60)
                world.send()
                world.pass_time()
            world.begin("third").result(60)
            world.send()
            world.begin("fourth").result(60)
            assert values(world) == {4}
            done = len(sent)
            for name in order:
                wakes[name].set()
                assert isinstance(running[name].exception(60), RunLeaseLostError)
            assert sent[done:] == []
            assert values(world) == {4}
            world.begin("last").result(60)
    assert values(world) == {4}


@pytest.mark.rounds
def test_an_application_that_is_renamed_while_its_run_is_paused_stops_that_run() -> None:
    """With an open batch no rename begins."""
    renamed: list[object] = []

    def rename(world: PausedWorld) -> None:
        world.clocks.by += 3600
        world.expire_lease()
        renamed.append(rename_application(world.lake, "sets", "puts", reason="r", by="test"))

    def prepare() -> PausedWorld:
        world = world_with()
        world.run("earlier")
        world.send()
        return world

    whole = prepare()
    counted = FaultyStore(whole.store)
    whole.run("first", Lake(counted, whole.lake.id))
    requests = len(counted.requests)
    outcomes = []
    for nth in rounds([*range(4, requests, 4)], [*range(1, requests + 1)]):
        world = prepare()
        renamed.clear()

        def in_thread(world: PausedWorld = world) -> None:
            with ThreadPoolExecutor(1) as threads:
                threads.submit(rename, world).exception(60)

        fault = Fault("*", nth, "meanwhile", action=in_thread)
        error = world.run_paused(Lake(FaultyStore(world.store, [fault]), world.lake.id))
        outcomes.append((bool(renamed), error is None, values(world)))
        if renamed:
            lost = RunLeaseLostError | CommitConflictError | ConfigurationError
            assert error is None or isinstance(error, lost), error
            with pytest.raises(ConfigurationError):
                world.run("again")
    assert (True, False, {1}) in outcomes, "renamed before it had sent anything"
    assert (False, False, {1}) in outcomes, "its batch was open"


def test_a_run_whose_application_was_deleted_while_it_was_paused_sends_nothing() -> None:
    left: list[int] = []

    def before(world: PausedWorld) -> Act:
        def delete() -> None:
            world.clocks.by += 3600
            for item in [*world.store.list(FOLDER)]:
                world.store.delete(item.key)
            left.append(len(stored(world)))

        return at_call(3, delete)

    world = world_with(before)
    error = world.run_paused()
    assert isinstance(error, RunLeaseLostError)
    assert left == [len(stored(world))]
    assert [*world.store.list(KEY)] == []


class SetClocks(Skewed):
    """Clocks of which somebody sets the one on the wall."""

    wall = 0.0

    def time(self) -> float:
        return super().time() + self.wall


def with_set_clock(act: Callable[[PausedWorld, SetClocks], object]) -> PausedWorld:
    """Return a world whose first run calls `act` before its third request."""
    clocks = SetClocks()
    world = world_with(lambda world: at_call(3, lambda: act(world, clocks)))
    world.clocks = clocks
    return world


@pytest.mark.parametrize("jump", [-86_400, -60, 60, 86_400])
def test_a_clock_that_is_set_while_a_run_works_neither_stops_it_nor_ends_its_lease(
    jump: float,
) -> None:
    def set_clock(world: PausedWorld, clocks: SetClocks) -> None:
        clocks.wall = jump

    world = with_set_clock(set_clock)
    assert world.run_paused() is None
    assert values(world) == {1}


@pytest.mark.parametrize("jump", [-86_400, 86_400])
def test_a_clock_that_is_set_while_a_run_is_paused_does_not_let_it_send(jump: float) -> None:
    def set_and_pause(world: PausedWorld, clocks: SetClocks) -> None:
        clocks.wall = jump
        world.pause()

    world = with_set_clock(set_and_pause)
    assert isinstance(world.run_paused(), RunLeaseLostError)
    assert values(world) == {3}


@pytest.mark.parametrize("kind", ["lost-before", "throttle"])
def test_a_run_that_wakes_while_the_lake_is_away_sends_nothing(
    kind: FaultKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lease, "_RENEWING", 0.3)

    def before(world: PausedWorld) -> Act:
        def pause() -> None:
            world.pause()
            store.plan = tuple(Fault("put_if_match", nth, kind) for nth in range(1, 1000))

        return at_call(3, pause)

    world = world_with(before)
    store = FaultyStore(world.store)
    error = world.run_paused(Lake(store, world.lake.id))
    assert isinstance(error, RunLeaseLostError)
    assert values(world) == {3}

"""A fence: until when a run may write, by clocks that run on while a machine sleeps, in the
driver and in tasks.
"""

from __future__ import annotations

import json
import logging
import pickle
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from dagster_adjunct.resources import times
from dagster_adjunct.resources.errors import (
    PermanentError,
    RunLeaseLostError,
    StoreUnavailableError,
)
from dagster_adjunct.resources.objects import fence as module
from dagster_adjunct.resources.objects.fence import Fence, Heartbeat, fenced_store
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.times import Deadline, read_clocks
from tests.faulty_store import Fault, FaultyStore

KEY = "applications/sums/run.json"


class Clocks:
    """Stands in for the module `time` in `times`: a boot clock, and a wall clock that
    somebody may set.
    """

    CLOCK_MONOTONIC = 1

    def __init__(self) -> None:
        self.boot, self.wall = 1000.0, 5000.0

    def clock_gettime(self, clock: int) -> float:
        return self.boot

    def time(self) -> float:
        return self.wall


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(times, "time", clocks)
    monkeypatch.setattr(module, "_KNOWN", {})
    return clocks


@pytest.fixture
def store() -> InMemoryStore:
    return InMemoryStore()


def write_lease(store: InMemoryStore, age: float = 0.0, **more: Any) -> None:
    store.put(
        KEY,
        json.dumps(
            {"id": "mine", "by": {"run": "first"}, "ttl": 120.0, "nonce": str(time.time())} | more
        ).encode(),
    )
    data, info = store._objects[KEY]
    store._objects[KEY] = data, replace(info, modified=info.modified - timedelta(seconds=age))


def fence(store: Any, **more: Any) -> Fence:
    return Fence(store, KEY, holder="mine", application="sums", run="first", epoch=3, **more)


def test_the_clock_runs_on_while_the_machine_sleeps() -> None:
    assert getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC) == times._BOOT_CLOCK


@pytest.mark.parametrize(
    ("boot", "wall", "passed"),
    [
        (107, 107, False),
        (108, 108, True),  # it slept, or was stopped
        (1, 108, True),  # a virtual machine was suspended, and its clock set when it went on
        (108, -9000, True),  # its clock was set back
        (107, -9000, False),
    ],
)
def test_a_deadline_has_passed_when_any_clock_says_so(
    clocks: Clocks, boot: float, wall: float, passed: bool
) -> None:
    deadline = Deadline(read_clocks(), 108)
    clocks.boot += boot
    clocks.wall += wall
    assert deadline.has_passed() is passed


def test_before_its_deadline_a_check_makes_no_request(clocks: Clocks, store: InMemoryStore) -> None:
    counted = FaultyStore(store)
    held = fence(counted, deadline=Deadline(read_clocks(), 100))
    held.check()
    assert not held.is_due
    assert counted.requests == []


def test_the_driver_renews_the_lease_before_it_goes_on(
    clocks: Clocks, store: InMemoryStore
) -> None:
    renewed = []

    def renew() -> Deadline:
        renewed.append(clocks.boot)
        return Deadline(read_clocks(), 100)

    held = fence(store, deadline=Deadline(read_clocks(), 100), renew=renew)
    clocks.boot += 100
    held.check()
    held.check()
    assert renewed == [1100]


def test_names_of_one_application_share_the_deadline_of_its_lease(
    clocks: Clocks, store: InMemoryStore
) -> None:
    renewed: list[Deadline] = []

    def renew() -> Deadline:
        renewed.append(Deadline(read_clocks(), 60))
        return renewed[-1]

    held = fence(store, deadline=Deadline(read_clocks(), 60), renew=renew)
    former = held.of_application("former")
    former.check()
    held.expire()
    assert former.is_due, "a loss that one name has been told of is known by the other"
    former.check()
    assert len(renewed) == 1
    held.check()
    assert len(renewed) == 1


def test_a_heartbeat_that_finds_its_object_taken_expires_the_fence(store: InMemoryStore) -> None:
    heartbeat = Heartbeat(
        store,
        KEY,
        lambda: b"mine",
        timedelta(seconds=0.2),
        describe_loss=lambda data: "another run has it",
        log=logging.getLogger("test"),
        revives=True,
    )
    heartbeat.write(lambda body: store.put(KEY, body))
    lost = threading.Event()
    heartbeat.on_loss = lost.set
    heartbeat.start()
    store.put(KEY, b"theirs")
    assert lost.wait(10)
    assert heartbeat.problem == "another run has it"
    heartbeat.end(lambda etag: None)


def test_a_task_reads_how_long_the_lease_holds_by_the_stores_clock(
    clocks: Clocks, store: InMemoryStore
) -> None:
    write_lease(store, age=100)
    in_task: Fence = pickle.loads(pickle.dumps(fence(store, deadline=Deadline(read_clocks(), 0))))
    assert (in_task.application, in_task.run, in_task.epoch) == ("sums", "first", 3)
    assert in_task.is_due
    in_task.check()  # 8 of the 108 seconds for which a lease of two minutes is trusted are left
    clocks.boot += 7
    assert not in_task.is_due
    clocks.boot += 2
    assert in_task.is_due


def test_a_task_on_another_machine_reads_the_lease_first(
    clocks: Clocks, store: InMemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = pickle.dumps(fence(store, deadline=Deadline(read_clocks(), 10_000)))
    assert not pickle.loads(sent).is_due
    for elsewhere in ("another boot", ""):
        monkeypatch.setattr(module, "machine_id", lambda elsewhere=elsewhere: elsewhere)
        assert pickle.loads(sent).is_due


@pytest.mark.parametrize(
    ("lease", "why"),
    [
        ({"id": "other", "by": {"run": "second"}}, "run second has taken it over"),
        ({"ended": True}, "the run has ended"),
        ({"ttl": None}, "a run whose lease can't be read has taken it over"),
    ],
)
def test_a_task_stops_when_the_lease_is_not_its_runs(
    clocks: Clocks, store: InMemoryStore, lease: dict[str, Any], why: str
) -> None:
    write_lease(store, **lease)
    with pytest.raises(RunLeaseLostError, match=why) as lost:
        fence(store).check()
    assert (lost.value.application, lost.value.run) == ("sums", "first")


def test_a_task_stops_when_the_lease_is_gone(clocks: Clocks, store: InMemoryStore) -> None:
    with pytest.raises(RunLeaseLostError, match="it was removed"):
        fence(store).check()


def test_a_task_waits_for_its_driver_to_renew_the_lease_and_then_stops(
    clocks: Clocks, store: InMemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lease(store, age=500)
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clocks.boot += seconds
        if len(pauses) == 3 and renews:
            write_lease(store)

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
    renews = True
    fence(store).check()
    assert len(pauses) == 3
    renews = False
    write_lease(store, age=500)
    clocks.boot += 1000
    with pytest.raises(RunLeaseLostError, match="it expired 0:06:32 ago and was not renewed"):
        fence(store).check()
    assert sum(pauses[3:]) == pytest.approx(module.PATIENCE)


def test_a_driver_that_is_paused_while_it_renews_the_lease_looks_again(
    clocks: Clocks, store: InMemoryStore
) -> None:
    made = []

    def renew() -> Deadline:
        made.append(read_clocks())
        if len(made) == 1:  # the reply is here, and the run is paused before it reads it
            clocks.boot += 3600
            return Deadline(made[0], 100)
        raise module.lease_lost_error("sums", "first", "run second has taken it over")

    held = fence(store, deadline=Deadline(read_clocks(), 0), renew=renew)
    with pytest.raises(RunLeaseLostError):
        held.check()
    assert len(made) == 2


@pytest.mark.parametrize("request_", ["get", "head", "put"])
def test_a_task_that_is_paused_while_it_reads_the_lease_looks_again(
    clocks: Clocks, store: InMemoryStore, request_: str
) -> None:
    write_lease(store, age=5)

    def pause() -> None:
        clocks.boot += 3600
        write_lease(store, id="other", by={"run": "second"})

    faulty = FaultyStore(store, [Fault(request_, 1, "meanwhile", action=pause)])
    with pytest.raises(RunLeaseLostError, match="run second has taken it over"):
        fence(faulty).check()


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_task_whose_lake_is_away_waits_a_while_and_then_counts_its_lease_as_lost(
    clocks: Clocks, store: InMemoryStore, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    write_lease(store)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clocks.boot += seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
    away = [Fault("get", nth, "lost-before") for nth in range(1, 4 if comes_back else 100)]
    held = fence(FaultyStore(store, away))
    if comes_back:
        held.check()
        assert len(pauses) == 3
        return
    with pytest.raises(RunLeaseLostError, match="it can't be read") as lost:
        held.check()
    assert isinstance(lost.value.__cause__, StoreUnavailableError)
    assert sum(pauses) == pytest.approx(module.PATIENCE)


def test_a_task_that_may_not_read_its_lease_counts_it_as_lost_at_once(
    clocks: Clocks, store: InMemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = PermanentError("the credentials do not allow it.", "Ask for the right.")
    monkeypatch.setattr(store, "get", Mock(side_effect=denied))
    with pytest.raises(RunLeaseLostError) as lost:
        fence(store).check()
    assert lost.value.__cause__ is denied


def test_a_store_of_a_run_takes_no_writes_once_its_lease_is_lost(
    clocks: Clocks, store: InMemoryStore
) -> None:
    write_lease(store)
    held = fence(store)
    fenced = fenced_store(store, held)
    etag = fenced.put("a", b"1")
    assert fenced.get("a").data == b"1"
    write_lease(store, id="other")
    clocks.boot += 1000
    before = {key: data for key, (data, _) in store._objects.items()}
    for write in (
        lambda: fenced.put("a", b"2"),
        lambda: fenced.put_if_absent("b", b"2"),
        lambda: fenced.put_if_match("a", b"2", etag),
        lambda: fenced.delete("a"),
        lambda: fenced.delete_many(["a"]),
        lambda: fenced.upload(store.staging_dir() / "none", "c"),
    ):
        with pytest.raises(RunLeaseLostError):
            write()
    assert {key: data for key, (data, _) in store._objects.items()} == before
    assert fenced.get("a").data == b"1"
    assert pickle.loads(pickle.dumps(fenced)) is store


@pytest.mark.parametrize(
    "page", ["applications", "architecture", "guarantees", "table-guarantees", "troubleshooting"]
)
def test_pages_say_what_the_error_says_of_a_run_that_has_lost_its_lease(page: str) -> None:
    text = (Path(__file__).parents[3] / f"docs/{page}.md").read_text(encoding="utf-8")
    assert module.AFTER_LOSS.removesuffix(".") in " ".join(text.replace("`", "").split())

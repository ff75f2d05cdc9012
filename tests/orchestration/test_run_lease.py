"""One run of an application at a time: who waits, who is refused, and whose lease is over.
Without Spark.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dagster_adjunct.orchestration.batch_log import run_lease as module
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, BatchLog
from dagster_adjunct.orchestration.batch_log.run_lease import (
    Claim,
    Holder,
    Process,
    RunLease,
    StoredLease,
    describe_end,
    describe_runner,
    read_lease,
    this_process,
)
from dagster_adjunct.resources.errors import (
    ApplicationBusyError,
    ConfigurationError,
    RunLeaseLostError,
    StoreUnavailableError,
)
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore, ObjectInfo
from dagster_adjunct.resources.times import Deadline, read_clocks
from tests.faulty_store import Fault, FaultyStore
from tests.resources.small_disks import more_open_files

BEGAN = datetime(2026, 1, 2, tzinfo=UTC)
AT_ONCE = Claim(wait=timedelta(0))
KEY = "applications/delays/run.json"
ELSEWHERE = Process(host="other", pid=7, boot="b", namespace="n", started="1")
HOLD = """
import sys, time
from dagster_adjunct.orchestration.batch_log.run_lease import Claim, RunLease
from dagster_adjunct.resources.objects.lake import open_lake
with RunLease(open_lake(sys.argv[1]), "delays", "killed-run", Claim()):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake")


@pytest.fixture
def other_process(lake: Lake) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lease of the application."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, lake.url], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def lease(lake: Lake, run: str = "mine", claim: Claim = AT_ONCE) -> RunLease:
    return RunLease(lake, "delays", run, claim)


def holder(process: Process, **more: object) -> Holder:
    by = {"run": "r", "process": process, "since": BEGAN, "dagster": more.pop("dagster", "")}
    given = {"id": "x", "by": by, "ttl": 120.0, "epoch": 1}
    return Holder.model_validate({**given, **more})


def why_over(held_by: Holder | None, seconds: float, *ended: str) -> str:
    """Return why a lease is over that was written so many seconds ago, by the store's clock."""
    return describe_end(
        StoredLease(KEY, "e", BEGAN, held_by),
        lambda: BEGAN + timedelta(seconds=seconds),
        lambda run: run in ended,
    )


def test_a_lease_ends_when_not_renewed_for_its_ttl_by_the_stores_clock() -> None:
    assert why_over(holder(ELSEWHERE), 119.9) == ""
    assert why_over(holder(ELSEWHERE), 120) == "it was not renewed for 0:02:00"
    assert why_over(holder(ELSEWHERE, ttl=600), 120) == ""


def test_a_lease_ends_at_once_when_its_holder_or_dagster_says_so() -> None:
    assert why_over(holder(ELSEWHERE, ended=True), 0) == "it has ended"
    assert why_over(holder(ELSEWHERE, dagster="d1"), 0, "d1") == "Dagster has ended the run"
    assert why_over(holder(ELSEWHERE, dagster="d1"), 0, "d2") == ""


def test_a_task_elsewhere_reads_the_lease_that_the_run_has_written(lake: Lake) -> None:
    with lease(lake) as held:
        key = "applications/delays/run.json"
        given = {"application": "delays", "run": "mine", "epoch": 1}
        Fence(lake.store, key, holder=held._holder.id, **given).check()
        stranger = Fence(lake.store, key, holder="another", **given)
        with pytest.raises(RunLeaseLostError, match="run mine has taken it over"):
            stranger.check()


def test_a_process_is_dead_only_where_that_can_be_proven() -> None:
    here = this_process()
    assert not here.is_dead()
    gone = here.model_copy(update={"started": "1"})
    assert gone.is_dead(), "its number was given to another process since"
    for unknown in ({"boot": "another"}, {"namespace": "pid:[1]"}, {"boot": ""}, {"namespace": ""}):
        assert not gone.model_copy(update=unknown).is_dead()
    assert why_over(holder(gone), 0) == "its process has ended"
    assert why_over(holder(here), 0) == "it has ended, which it could not record", (
        "a run of this process that could not say that it ended: the process itself lives"
    )


@pytest.mark.parametrize("exists", [True, False])
def test_a_process_that_proc_hides_from_other_users_is_not_dead(
    exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = this_process()

    def kill(pid: int, signal: int) -> None:
        assert (pid, signal) == (hidden.pid, 0)
        raise PermissionError if exists else ProcessLookupError

    monkeypatch.setattr(module, "_read_start", lambda pid: "")
    monkeypatch.setattr(module.os, "kill", kill)
    assert hidden.is_dead() is not exists


def test_a_process_is_not_dead_because_nothing_can_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = this_process()
    monkeypatch.setattr(module, "this_process", lambda: here)
    with more_open_files(0):
        assert not here.is_dead()


def test_a_process_that_waits_for_its_parent_only_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = module.this_process().model_copy(update={"pid": child.pid})
    known = started.model_copy(
        update={
            "started": Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        }
    )
    assert not known.is_dead()
    child.kill()
    deadline = time.monotonic() + 120
    while not known.is_dead() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert known.is_dead()
    child.wait()


def test_a_lease_that_can_not_be_read_holds_until_it_has_expired() -> None:
    assert why_over(None, 119.9) == ""
    assert why_over(None, 120) == "it was not renewed for 0:02:00"


def test_a_lease_is_given_up_if_its_run_can_not_begin(lake: Lake) -> None:
    store = FaultyStore(lake.store, [Fault("delete", 1, "lost-before")])
    with pytest.raises(StoreUnavailableError):
        lease(
            Lake(store, lake.id), "mine", Claim(wait=timedelta(0), stays=timedelta(hours=1))
        ).__enter__()
    with lease(lake, "next") as free:
        free.check()


def test_a_second_run_is_refused_and_reported_for_whom_since_when_and_where(lake: Lake) -> None:
    with lease(lake, "first"), pytest.raises(ApplicationBusyError) as refused:
        lease(lake, "second").__enter__()
    place = (
        f"run first on host {this_process().host} (pid {os.getpid()}), since"
        f" {datetime.now(UTC):%Y-%m-%d}"
    )
    assert f"application 'delays' is being run by {place}" in str(refused.value)
    assert "--take-over" in refused.value.next_step
    with lease(lake, "third") as free:
        free.check()


@pytest.mark.lengthy
def test_a_second_run_waits_for_the_end_of_the_first_and_says_so_once(lake: Lake) -> None:
    messages: list[str] = []
    first = lease(lake, "first").__enter__()
    ending = threading.Timer(0.3, first.__exit__, (None, None, None))

    def say(text: str) -> None:
        messages.append(text)
        ending.start()

    with lease(lake, "second", Claim(wait=timedelta(seconds=120), say=say)):
        ending.join()
    (text,) = messages
    assert text.startswith("application delays is being run by run first on host ")
    assert text.endswith("waiting up to 0:02:00")


def test_waiting_ends_at_its_limit(lake: Lake) -> None:
    with (
        lease(lake, "first"),
        pytest.raises(ApplicationBusyError, match=r"0:00:00\.30* of waiting") as caught,
    ):
        lease(lake, "second", Claim(wait=timedelta(seconds=0.3))).__enter__()
    assert caught.value.run == "first"


@pytest.mark.lengthy
def test_a_run_that_was_killed_is_taken_over_at_once(
    lake: Lake, other_process: subprocess.Popen[str]
) -> None:
    with pytest.raises(
        ApplicationBusyError, match=rf"run killed-run on host .* \(pid {other_process.pid}\)"
    ):
        lease(lake).__enter__()
    other_process.kill()
    other_process.wait()
    messages: list[str] = []
    with lease(lake, claim=Claim(wait=timedelta(0), say=messages.append)):
        pass
    assert messages[0].startswith("application delays is taken over from run killed-run on host ")
    assert messages[0].endswith(": its process has ended")


@pytest.mark.lengthy
def test_what_is_alive_is_taken_over_only_when_reported_and_stops_at_its_next_check(
    lake: Lake,
) -> None:
    lake.run_ttl = timedelta(seconds=2)
    with lease(lake, "first") as first, lease(lake, "second", Claim(take_over=True)) as second:
        deadline = time.monotonic() + 120
        while not first._heartbeat.problem and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(
            RunLeaseLostError, match=r"run first was lost: run second on host .* has taken it over"
        ):
            first.check()
        second.check()
        first.__exit__(None, None, None)
        assert "run second" in describe_runner(lake, "delays"), (
            "who was taken over from does not end the other's lease"
        )


@pytest.mark.lengthy
def test_who_was_taken_over_from_knows_it_at_its_next_check_not_at_its_next_renewal(
    lake: Lake,
) -> None:
    lake.run_ttl = timedelta(seconds=4)  # it renews every second
    with lease(lake, "first") as first, ThreadPoolExecutor(1) as threads:
        first.check()
        second = lease(lake, "second", Claim(take_over=True))
        begun = threads.submit(second.__enter__)
        while "run second" not in describe_runner(lake, "delays"):
            pass
        with pytest.raises(
            RunLeaseLostError, match=r"run second on host .* has taken it over"
        ) as caught:
            first.check()
        assert caught.value.run == "first"
        begun.result().check()
        second.__exit__()


def test_a_store_that_does_not_answer_is_waited_for_until_the_lease_may_expire(lake: Lake) -> None:
    down = Lake(
        FaultyStore(lake.store, [Fault("get", nth, "lost-before") for nth in range(3, 50)]), lake.id
    )
    with lease(down) as held:
        held.check()


def test_a_lease_of_another_host_is_taken_over_when_it_has_expired(lake: Lake) -> None:
    lake.store.put(KEY, holder(ELSEWHERE).model_dump_json().encode())
    with pytest.raises(ApplicationBusyError) as caught:
        lease(lake).__enter__()
    assert caught.value.run == "r"
    old = time.time() - 121
    os.utime(Path(lake.url) / KEY, (old, old))
    with lease(lake):
        assert "run mine" in describe_runner(lake, "delays")
    assert describe_runner(lake, "delays") == ""


@pytest.mark.lengthy
def test_a_lease_that_was_not_renewed_in_time_is_lost(lake: Lake) -> None:
    faults = [Fault("put_if_match", nth, "lost-before") for nth in range(1, 500)]
    down = Lake(FaultyStore(lake.store, faults), lake.id, run_ttl=timedelta(seconds=1.5))
    with lease(down) as held:
        held.check()
        time.sleep(1.8)
        with pytest.raises(RunLeaseLostError) as caught:
            held.check()
        assert caught.value.run == "mine"
    with lease(lake):  # the end could not be told either, and nothing waits for it
        pass


@pytest.mark.parametrize("fault", ["lost-before", "lost-after"])
def test_lost_replies_neither_lose_nor_share_the_lease(lake: Lake, fault: str) -> None:
    for request in ("put_if_absent", "put_if_match"):
        troubled = Lake(FaultyStore(lake.store, [Fault(request, 1, fault)]), lake.id)
        with lease(troubled) as held:
            held.check()
            with pytest.raises(ApplicationBusyError):
                lease(lake, "other").__enter__()
        with lease(lake) as again:
            again.check()


@pytest.mark.lengthy
def test_of_many_that_want_to_run_one_runs_at_a_time(lake: Lake) -> None:
    running, most = 0, 0
    counting = threading.Lock()

    def work(number: int) -> None:
        nonlocal running, most
        with lease(lake, f"r{number}", Claim(wait=timedelta(seconds=60))):
            with counting:
                running += 1
                most = max(most, running)
            time.sleep(0.02)
            with counting:
                running -= 1

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, number) for number in range(4)]:
            done.result()
    assert most == 1
    stored = read_lease(lake.store, KEY)
    assert stored is not None
    assert stored.holder is not None
    assert stored.holder.ended


@pytest.mark.parametrize("wait", [-1, True, float("nan")])
def test_a_wait_that_is_no_time_is_refused(wait: float) -> None:
    with pytest.raises(ConfigurationError) as failure:
        module.validate_span("wait", wait)
    assert failure.value.argument == "wait"


def test_each_take_of_the_lease_has_a_greater_epoch_also_after_it_was_deleted(lake: Lake) -> None:
    epochs = []
    for _ in range(3):
        with lease(lake) as held:
            epochs.append(held.fence.epoch)
    lake.store.delete(KEY)
    with lease(lake) as held:
        epochs.append(held.fence.epoch)
    lake.store.put(KEY, b"of another release")
    old = time.time() - 121
    os.utime(Path(lake.url) / KEY, (old, old))
    with lease(lake) as held:
        epochs.append(held.fence.epoch)
    assert epochs == sorted(set(epochs))


class _WholeSeconds(InMemoryStore):
    """A store whose clock has whole seconds, as that of S3. It counts what writes its clock."""

    clocks_read = 0

    def put(self, key: str, data: bytes) -> str:
        self.clocks_read += key.endswith("/clock")
        return super().put(key, data)

    def head(self, key: str) -> ObjectInfo | None:
        found = super().head(key)
        if found is None:
            return None
        return replace(found, modified=found.modified.replace(microsecond=0))


@pytest.mark.lengthy
def test_takes_within_one_tick_of_the_clock_of_the_store_have_other_epochs() -> None:
    lake = lake_in(_WholeSeconds())
    epochs = []
    for _ in range(2):
        with lease(lake) as held:
            epochs.append(held.fence.epoch)
        with lease(lake) as held:
            epochs.append(held.fence.epoch)
        lake.store.delete(KEY)
    assert epochs == sorted(set(epochs))


@pytest.mark.lengthy
def test_the_next_tick_of_the_clock_of_the_store_takes_few_requests() -> None:
    store = _WholeSeconds()
    lake = lake_in(store)
    with lease(lake):
        pass
    lake.store.delete(KEY)
    store.clocks_read = 0
    with lease(lake):
        assert store.clocks_read <= 10


def end_the_wait(lake: Lake) -> Callable[[str], None]:
    """Return a function that hears of a wait for another run, and lets the time for it be over."""

    def say(text: str) -> None:
        if "can't write any more" in text:
            raise Waits(text)

    return say


class Waits(Exception):
    """A run waits for one that it took over from."""


def test_who_takes_over_from_a_run_that_may_live_waits_until_that_can_write_no_more(
    lake: Lake,
) -> None:
    lake.store.put(KEY, holder(ELSEWHERE, in_flight=20).model_dump_json().encode())
    with pytest.raises(
        Waits, match=r"run r on host other .* may be alive, only paused\. .* in 0:02:(20|19)"
    ):
        lease(lake, claim=Claim(take_over=True, say=end_the_wait(lake))).__enter__()
    # A third run waits for the first, too, though the second has ended.
    with pytest.raises(Waits, match=r"in 0:02:(20|19)"):
        lease(lake, "third", Claim(wait=timedelta(0), say=end_the_wait(lake))).__enter__()
    stored = read_lease(lake.store, KEY)
    assert stored is not None
    assert stored.holder is not None
    assert (stored.holder.by.run, stored.holder.ended, stored.holder.unfenced) == (
        "third",
        True,
        True,
    )


def test_who_finds_no_lease_of_an_application_that_has_run_waits_as_for_a_lease(lake: Lake) -> None:
    with lease(lake, claim=Claim(in_flight=20, say=end_the_wait(lake))):
        pass  # it has not run yet
    lake.store.delete(KEY)
    log = BatchLog(lake, "delays")
    log.commit(log.read(), ApplicationState(batch=1), by="r")
    for run in ("second", "third"):  # the third waits for the same, though the second has ended
        claim = Claim(in_flight=20, say=end_the_wait(lake))
        with pytest.raises(Waits, match=r"may be alive, only paused\. .* in 0:02:(20|19)"):
            lease(lake, run, claim).__enter__()


def test_a_run_whose_lease_was_deleted_by_hand_does_not_recreate_it(lake: Lake) -> None:
    with lease(lake) as held:
        lake.store.delete(KEY)
        held.fence.expire()
        with pytest.raises(RunLeaseLostError, match="it was removed"):
            held.fence.check()
        with pytest.raises(RunLeaseLostError):
            held.check()
    assert read_lease(lake.store, KEY) is None


def test_what_dagster_has_ended_may_live_and_is_waited_for(lake: Lake) -> None:
    lake.store.put(KEY, holder(ELSEWHERE, dagster="d1").model_dump_json().encode())
    claim = Claim(wait=timedelta(0), finished=lambda run: run == "d1", say=end_the_wait(lake))
    with pytest.raises(Waits, match=r"in 0:0(2:00|1:59)"):
        lease(lake, claim=claim).__enter__()


@pytest.mark.lengthy
def test_the_wait_is_over_when_the_process_is_seen_to_be_dead(
    lake: Lake, other_process: subprocess.Popen[str]
) -> None:
    ended = threading.Timer(0.3, other_process.kill)

    def say(text: str) -> None:
        if "can't write any more" in text:
            ended.start()
            threading.Thread(target=other_process.wait).start()

    began = time.monotonic()
    with lease(lake, claim=Claim(take_over=True, say=say)):
        assert time.monotonic() - began < 60


def test_a_lease_that_has_expired_by_now_needs_no_wait(lake: Lake) -> None:
    lake.store.put(KEY, holder(ELSEWHERE, in_flight=20).model_dump_json().encode())
    old = time.time() - 141
    os.utime(Path(lake.url) / KEY, (old, old))
    with lease(lake, claim=Claim(wait=timedelta(0), say=end_the_wait(lake))) as held:
        assert held.has_unfenced
        held.note_fenced()
    with lease(lake, "next") as after:
        assert not after.has_unfenced


def test_a_run_that_wakes_before_anybody_took_its_lease_goes_on(lake: Lake) -> None:
    with lease(lake) as held:
        old = time.time() - 3600
        os.utime(Path(lake.url) / KEY, (old, old))
        held.fence.extend(Deadline(read_clocks(), 0))
        held.fence.check()
        assert not held.fence.is_due
        stored = read_lease(lake.store, KEY)
        assert stored is not None
        assert stored.written.timestamp() > old + 3000
        fence = held.fence
    with pytest.raises(RunLeaseLostError, match="the run has ended"):
        fence.check()

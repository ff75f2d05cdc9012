from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    MalformedDocumentError,
)
from dagster_adjunct.resources.objects import commit_log
from dagster_adjunct.resources.objects.commit_log import Commit, CommitLog
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.clocks import Clock
from tests.faulty_store import Fault, FaultyStore

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.store import ObjectStore


@pytest.fixture
def log(store: ObjectStore) -> CommitLog:
    return CommitLog(store, "streams/flights", "stream")


def test_nothing_was_committed_at_first(log: CommitLog) -> None:
    assert log.current() is None
    assert list(log.history()) == []


def test_a_commit_is_read_back_as_it_was_made(store: ObjectStore) -> None:
    now = datetime(2013, 7, 1, 12, 0, 0, 5, tzinfo=UTC)
    log = CommitLog(store, "datasets/planes", "dataset", clock=lambda: now)
    body = {"text": "ünïcode", "numbers": [1, 2.5, -(2**60)], "none": None, "deep": {"a": [True]}}
    made = log.commit(None, body, by="tests", commit_id="abc")
    assert made == log.current() == log.read(made.manifest_key)
    assert (made.number, made.id, made.parent, made.by, made.created_at) == (
        1,
        "abc",
        None,
        "tests",
        now,
    )
    assert made.manifest_key == "datasets/planes/manifests/000000000001-abc.json"
    assert made.body == body


def test_a_commit_is_not_dated_before_its_parent_whatever_the_clock_says(
    store: ObjectStore,
) -> None:
    clock = Clock()
    log = CommitLog(store, "datasets/planes", "dataset", clock=clock)
    first = log.commit(None, {"n": 1}, by="me")
    clock.forward(hours=-1)
    second = log.commit(first, {"n": 2}, by="me")
    clock.forward(hours=2)
    third = log.commit(log.head(), {"n": 3}, by="me")
    assert [commit.created_at for commit in log.history()] == [
        clock.now,
        first.created_at,
        first.created_at,
    ]
    assert (second.created_at, third.created_at) == (first.created_at, clock.now)


def manifests_read(store: FaultyStore) -> int:
    return sum(request == "get" and "/manifests/" in key for request, key in store.requests)


def test_a_run_reads_a_manifest_once_and_sees_every_commit_of_others(store: ObjectStore) -> None:
    counted = FaultyStore(store)
    lake = Lake(counted, "tests")
    mine, again = lake.commit_log("streams/a", "stream"), lake.commit_log("streams/a", "stream")
    other = CommitLog(store, "streams/a", "stream")
    first = other.commit(None, {"n": 1}, by="other")
    with lake.manifests.while_kept():
        with lake.manifests.while_kept():
            assert [log.current() for log in (mine, mine, again)] == [first] * 3
        second = other.commit(first, {"n": 2}, by="other")
        assert [log.current() for log in (mine, again)] == [second] * 2
        assert manifests_read(counted) == 2
        third = mine.commit(mine.current(), {"n": 3}, by="me")
        assert again.current() == third
        assert [commit.body["n"] for commit in again.history()] == [3, 2, 1]
        assert manifests_read(counted) == 2
    assert mine.current() == third
    assert manifests_read(counted) == 3


def test_a_damaged_manifest_is_not_kept(store: ObjectStore) -> None:
    lake = Lake(store, "tests")
    log = CommitLog(store, "streams/a", "stream")
    made = log.commit(None, {"n": 1}, by="me")
    good = store.get(made.manifest_key).data
    store.put(made.manifest_key, good[:-2])
    with lake.manifests.while_kept():
        with pytest.raises(MalformedDocumentError):
            lake.commit_log("streams/a", "stream").current()
        store.put(made.manifest_key, good)
        assert lake.commit_log("streams/a", "stream").current() == made


def test_a_manifest_of_which_one_bit_has_flipped_is_damaged(store: ObjectStore) -> None:
    log = CommitLog(store, "streams/a", "stream")
    made = log.commit(None, {"offsets": {"lake.a.0": "17"}, "partitions": 4}, by="me")
    good = store.get(made.manifest_key).data
    for place in range(len(good)):
        store.put(made.manifest_key, good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(MalformedDocumentError) as raised:
            log.current()
        assert made.manifest_key in str(raised.value.document)
    store.put(made.manifest_key, good)
    assert log.current() == made


def test_a_log_is_pickled_without_what_is_kept() -> None:
    lake = Lake(InMemoryStore(), "tests")
    log = lake.commit_log("streams/a", "stream")
    with lake.manifests.while_kept():
        made = log.commit(None, {"n": "a text"}, by="me")
        pickled = pickle.dumps(lake.manifests)
    assert b"a text" not in pickled
    assert pickle.loads(pickled).find(made.manifest_key) is None


def test_what_a_run_keeps_of_manifests_is_bounded(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "_KEPT_BYTES", 2_000)
    lake = Lake(store, "tests")
    log, commits = lake.commit_log("streams/a", "stream"), list[Commit]()
    with lake.manifests.while_kept():
        for number in range(20):
            last = commits[-1] if commits else None
            commits.append(log.commit(last, {"n": number, "text": "x" * 400}, by="me"))
            assert log.current() == commits[-1]
            kept = [
                data for commit in commits if (data := lake.manifests.find(commit.manifest_key))
            ]
            assert 0 < sum(map(len, kept)) <= 2_000


def test_a_commit_that_lost_its_race_is_nowhere_though_its_manifest_is_kept(
    store: ObjectStore,
) -> None:
    lake = Lake(store, "tests")
    mine, other = lake.commit_log("streams/a", "stream"), CommitLog(store, "streams/a", "stream")
    with lake.manifests.while_kept():
        first = mine.commit(None, {"n": 1}, by="me")
        theirs = other.commit(first, {"n": "theirs"}, by="other")
        with pytest.raises(CommitConflictError):
            mine.commit(first, {"n": "mine"}, by="me")
        assert mine.current() == theirs
        assert list(mine.history()) == [theirs, first]


def test_history_walks_from_the_newest_to_the_first(log: CommitLog) -> None:
    last = None
    for n in range(4):
        last = log.commit(last, {"n": n}, by="tests")
    assert [commit.body["n"] for commit in log.history()] == [3, 2, 1, 0]
    assert [commit.number for commit in log.history(2)] == [4, 3]


def test_a_commit_may_follow_one_whose_manifest_is_damaged(
    store: ObjectStore, log: CommitLog
) -> None:
    assert log.head() is None
    first = log.commit(None, {"n": 1}, by="a")
    second = log.commit(first, {"n": 2}, by="a")
    damaged = log.commit(second, {"n": 3}, by="a")
    store.put(log.manifest_key(2, "of-a-race-that-was-lost"), store.get(second.manifest_key).data)
    store.put(damaged.manifest_key, b"{")
    with pytest.raises(MalformedDocumentError):
        log.current()
    head = log.head()
    assert head is not None
    assert (head.number, head.id, head.body) == (3, damaged.id, {})
    assert [commit.body for commit in log.commits_before(3)] == [{"n": 1}], (
        "of two with one number nothing says which won"
    )
    after = log.commit(head, {"n": 4}, by="a")
    assert log.current() == after
    assert (after.number, after.parent) == (4, damaged.id)
    with pytest.raises(CommitConflictError):
        log.commit(head, {"n": 5}, by="b")
    store.put(log.pointer_key, b"{")
    with pytest.raises(MalformedDocumentError):
        log.head()


def test_a_stale_parent_loses_and_leaves_nothing_visible(log: CommitLog) -> None:
    first = log.commit(None, {"n": 1}, by="a")
    second = log.commit(first, {"n": 2}, by="a")
    for stale in (None, first):
        with pytest.raises(CommitConflictError) as caught:
            log.commit(stale, {"n": 99}, by="b")
        assert caught.value.prefix == "streams/flights"
    assert log.current() == second
    assert [commit.id for commit in log.history()] == [second.id, first.id]


def test_a_commit_read_from_history_is_a_parent_only_while_it_is_current(log: CommitLog) -> None:
    first = log.commit(None, {}, by="a")
    second = log.commit(log.read(first.manifest_key), {}, by="a")
    with pytest.raises(CommitConflictError):
        log.commit(log.read(first.manifest_key), {}, by="a")
    assert log.current() == second


def test_a_rollback_to_an_equal_body_has_a_new_etag(log: CommitLog) -> None:
    first = log.commit(None, {"v": 1}, by="a")
    second = log.commit(first, {"v": 2}, by="a")
    third = log.commit(second, {"v": 1}, by="a")
    assert len({first.etag, second.etag, third.etag}) == 3
    with pytest.raises(CommitConflictError):
        log.commit(first, {"v": 3}, by="a")


@pytest.mark.lengthy
def test_two_committers_race_fifty_commits_and_lose_no_update(store: ObjectStore) -> None:
    def count(who: str) -> None:
        log = CommitLog(store, "streams/race", "stream")

        def add(current: Commit | None) -> dict[str, Any]:
            body = {"total": 0, "by": {}} if current is None else current.body
            return {
                "total": body["total"] + 1,
                "by": {**body["by"], who: body["by"].get(who, 0) + 1},
            }

        for _ in range(25):
            log.transact(add, by=who, attempts=200)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(count, ["a", "b"]))
    log = CommitLog(store, "streams/race", "stream")
    current = log.current()
    assert current is not None
    assert current.number == 50
    assert current.body == {"total": 50, "by": {"a": 25, "b": 25}}
    assert [commit.body["total"] for commit in log.history()] == list(range(50, 0, -1))


def test_a_decision_to_do_nothing_commits_nothing(log: CommitLog) -> None:
    assert log.transact(lambda current: None, by="a") is None
    first = log.commit(None, {}, by="a")
    assert log.transact(lambda current: None, by="a") == first


def test_a_transaction_decides_again_after_a_conflict_and_gives_up_in_the_end() -> None:
    store = InMemoryStore()
    log, rival = (CommitLog(store, "x/y", "stream") for _ in range(2))
    seen: list[int] = []

    def decide(current: Commit | None) -> dict[str, Any]:
        number = 0 if current is None else current.number
        seen.append(number)
        if number < 3:
            rival.commit(current, {}, by="rival")
        return {"after": number}

    done = log.transact(decide, by="a")
    assert done is not None
    assert (done.number, done.body, seen) == (4, {"after": 3}, [0, 1, 2, 3])

    def always_late(current: Commit | None) -> dict[str, Any]:
        rival.commit(current, {}, by="rival")
        return {}

    with pytest.raises(CommitConflictError):
        log.transact(always_late, by="a", attempts=3)


def test_a_transaction_over_a_commit_that_was_read_before_reads_nothing_unless_it_loses() -> None:
    store = FaultyStore(InMemoryStore())
    log = CommitLog(store, "x", "stream")
    first = log.commit(None, {"n": 1}, by="a")

    def decide(current: Commit | None) -> dict[str, Any]:
        assert current is not None
        return {"n": current.body["n"] + 1}

    store.requests.clear()
    log.transact(decide, by="a", seen=first)
    assert [request for request, _ in store.requests] == ["put_if_absent", "put_if_match"]
    log.transact(decide, by="a", seen=first)
    assert [commit.body["n"] for commit in log.history()] == [3, 2, 1]


def test_a_check_is_made_while_the_manifest_is_stored_and_prevents_the_commit_by_raising() -> None:
    both = threading.Barrier(2, timeout=300)
    store = FaultyStore(InMemoryStore(), [Fault("put_if_absent", 3, "meanwhile", both.wait)])
    log = CommitLog(store, "x", "stream")
    first = log.commit(None, {}, by="a")

    def check() -> None:
        both.wait()
        raise CommitConflictError("It is no longer ours.", "Stop.")

    with pytest.raises(CommitConflictError):
        log.commit(first, {}, by="a", checks=[check])
    assert log.current() == first


def test_reading_costs_two_gets_and_committing_two_puts_whatever_the_history() -> None:
    store = FaultyStore(InMemoryStore())
    log = CommitLog(store, "x", "stream")
    parent = None
    for _ in range(30):
        parent = log.commit(parent, {}, by="a")
    store.requests.clear()
    parent = log.current()
    assert [request for request, _ in store.requests] == ["get", "get"]
    store.requests.clear()
    log.commit(parent, {}, by="a")
    assert [request for request, _ in store.requests] == ["put_if_absent", "put_if_match"]


def test_one_thing_is_never_read_as_another() -> None:
    store = InMemoryStore()
    CommitLog(store, "x", "stream").commit(None, {}, by="a")
    with pytest.raises(MalformedDocumentError) as caught:
        CommitLog(store, "x", "dataset").current()
    assert "x/CURRENT" in str(caught.value.document)


def test_a_body_that_json_can_not_hold_is_refused_before_anything_is_written() -> None:
    store = InMemoryStore()
    log = CommitLog(store, "x", "stream")
    for body in ({"when": datetime.now(UTC)}, {"bytes": b"x"}, {"nan": float("nan")}, {"set": {1}}):
        with pytest.raises(ConfigurationError) as failure:
            log.commit(None, body, by="a")
        assert failure.value.facts == {"argument": "body"}
    with pytest.raises(ConfigurationError) as failure:
        log.commit(None, {}, by="")
    assert failure.value.facts == {"argument": "by"}
    assert list(store.list("")) == []


def test_a_commit_id_serves_one_attempt_only() -> None:
    log = CommitLog(InMemoryStore(), "x", "stream")
    log.commit(None, {}, by="a", commit_id="one")
    with pytest.raises(ConfigurationError) as failure:
        log.commit(None, {}, by="a", commit_id="one")
    assert failure.value.facts == {"argument": "commit_id"}

"""The swap of the pointer, when the network lies about it."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import (
    CommitConflictError,
    CommitStateUnknownError,
    StoreUnavailableError,
)
from dagster_adjunct.resources.objects.commit_log import Commit, CommitLog
from dagster_adjunct.resources.objects.local_store import LocalStore
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.faulty_store import Crash, Fault, FaultyStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.faulty_store import FaultKind


def _at_second_commit(*plan: Fault) -> tuple[CommitLog, CommitLog, Commit, FaultyStore]:
    """A log whose next commit meets `plan`, a rival without faults, their common parent, the
    store.
    """
    inner = InMemoryStore()
    rival = CommitLog(inner, "x", "stream")
    parent = rival.commit(None, {"n": 1}, by="rival")
    store = FaultyStore(inner, plan)
    return CommitLog(store, "x", "stream"), rival, parent, store


def test_a_lost_reply_after_success_is_success() -> None:
    log, rival, parent, _ = _at_second_commit(Fault("put_if_match", 1, "lost-after"))
    made = log.commit(parent, {"n": 2}, by="me")
    assert rival.current() == made
    log.commit(made, {"n": 3}, by="me")  # and its ETag is known


def test_a_lost_reply_after_success_of_the_first_commit_is_success() -> None:
    inner = InMemoryStore()
    log = CommitLog(FaultyStore(inner, [Fault("put_if_absent", 2, "lost-after")]), "x", "stream")
    made = log.commit(None, {}, by="me")
    assert CommitLog(inner, "x", "stream").current() == made


@pytest.mark.parametrize("kind", ["lost-before", "409", "throttle", "412"])
def test_a_refusal_while_the_pointer_stands_at_our_parent_is_repeated(kind: FaultKind) -> None:
    log, rival, parent, store = _at_second_commit(
        Fault("put_if_match", 1, kind), Fault("put_if_match", 2, kind)
    )
    made = log.commit(parent, {"n": 2}, by="me")
    assert rival.current() == made
    assert [request for request, _ in store.requests].count("put_if_match") == 3


@pytest.mark.parametrize("kind", ["meanwhile", "lost-before", "409"])
def test_a_competitor_between_read_and_swap_makes_a_conflict(kind: FaultKind) -> None:
    log, rival, parent, store = _at_second_commit()
    theirs: list[Commit] = []

    def overtake() -> None:
        theirs.append(rival.commit(parent, {"n": "theirs"}, by="rival"))

    store.plan = (Fault("put_if_match", 1, "meanwhile", overtake), Fault("put_if_match", 1, kind))
    with pytest.raises(CommitConflictError) as caught:
        log.commit(parent, {"n": "mine"}, by="me")
    assert caught.value.prefix == "x"
    assert log.current() == theirs[0]


def test_a_commit_that_won_is_found_below_those_that_came_after_it() -> None:
    log, rival, parent, store = _at_second_commit()

    def go_on() -> None:
        for n in range(3):
            rival.commit(rival.current(), {"later": n}, by="rival")

    store.plan = (Fault("put_if_match", 1, "lost-after"), Fault("get", 1, "meanwhile", go_on))
    made = log.commit(parent, {"n": "mine"}, by="me")
    assert [commit.id for commit in rival.history()][3] == made.id
    assert made.etag is None
    with pytest.raises(CommitConflictError):
        log.commit(made, {}, by="me")


def test_a_lost_race_is_reported_from_a_won_one_below_those_that_came_after() -> None:
    log, rival, parent, store = _at_second_commit()

    def overtake() -> None:
        for n in range(3):
            rival.commit(rival.current(), {"later": n}, by="rival")

    store.plan = (
        Fault("put_if_match", 1, "meanwhile", overtake),
        Fault("put_if_match", 1, "lost-before"),
    )
    with pytest.raises(CommitConflictError):
        log.commit(parent, {"n": "mine"}, by="me")


def test_a_store_that_never_says_leaves_the_state_unknown() -> None:
    log, rival, parent, _ = _at_second_commit(
        Fault("put_if_match", 1, "lost-after"), Fault("get", 1, "lost-before")
    )
    with pytest.raises(CommitStateUnknownError) as caught:
        log.commit(parent, {"n": 2}, by="me", commit_id="mine")
    assert caught.value.prefix == "x"
    assert "'mine'" in str(caught.value)
    current = rival.current()
    assert current is not None
    assert current.id == "mine"


def test_a_swap_that_never_gets_through_leaves_the_state_unknown() -> None:
    log, rival, parent, _ = _at_second_commit(
        *[Fault("put_if_match", n, "lost-before") for n in range(1, 20)]
    )
    with pytest.raises(CommitStateUnknownError):
        log.commit(parent, {"n": 2}, by="me")
    assert rival.current() == parent


def test_a_failure_before_the_swap_is_certainly_no_commit() -> None:
    log, rival, parent, _ = _at_second_commit(Fault("put_if_absent", 1, "lost-after"))
    with pytest.raises(StoreUnavailableError):
        log.commit(parent, {"n": 2}, by="me")
    assert rival.current() == parent


@pytest.mark.parametrize(
    ("request_kind", "kind", "visible"),
    [
        ("put_if_absent", "crash-before", False),
        ("put_if_absent", "crash-after", False),
        ("put_if_match", "crash-before", False),
        ("put_if_match", "crash-after", True),
    ],
)
def test_a_crash_shows_the_whole_commit_or_nothing(
    request_kind: str, kind: FaultKind, visible: bool
) -> None:
    log, rival, parent, _ = _at_second_commit(Fault(request_kind, 1, kind))
    with pytest.raises(Crash):
        log.commit(parent, {"n": 2}, by="me")
    current = rival.current()
    assert current is not None
    assert current.body == {"n": 2 if visible else 1}
    assert rival.commit(current, {"n": 3}, by="rival").number == current.number + 1


_NTH = st.integers(min_value=1, max_value=12)
_LOSSES = st.sampled_from(["lost-after", "lost-before", "409", "throttle"])
_FAULTS = st.lists(
    st.builds(Fault, st.sampled_from(["put_if_match", "put_if_absent", "get"]), _NTH, _LOSSES)
    | st.builds(Fault, st.just("put_if_match"), _NTH, st.just("412")),
    max_size=6,
)


@pytest.mark.lengthy
@settings(max_examples=100)
@given(_FAULTS, _FAULTS)
def test_whatever_is_lost_every_commit_is_in_history_exactly_as_reported(
    mine: Sequence[Fault], theirs: Sequence[Fault]
) -> None:
    """Two writers, two faulty networks: "won" is in history once, "lost" never, "unknown" at
    most once.
    """
    inner = InMemoryStore()
    outcome: dict[str, set[str]] = {"won": set(), "lost": set(), "unknown": set()}
    writers = [CommitLog(FaultyStore(inner, plan), "x", "stream") for plan in (mine, theirs)]
    parents: list[Commit | None] = [None, None]
    ids = (f"c{n}" for n in itertools.count())
    for turn in range(10):
        log, commit_id = writers[turn % 2], next(ids)
        body: dict[str, Any] = {"turn": turn}
        try:
            parents[turn % 2] = log.commit(parents[turn % 2], body, by="me", commit_id=commit_id)
            outcome["won"].add(commit_id)
        except (CommitConflictError, StoreUnavailableError) as error:
            outcome["lost"].add(commit_id)
            if isinstance(error, CommitConflictError):
                parents[turn % 2] = CommitLog(inner, "x", "stream").current()
        except CommitStateUnknownError:
            outcome["unknown"].add(commit_id)
            parents[turn % 2] = CommitLog(inner, "x", "stream").current()
    history = [commit.id for commit in CommitLog(inner, "x", "stream").history()]
    assert len(history) == len(set(history))
    assert outcome["won"] <= set(history) <= outcome["won"] | outcome["unknown"]
    assert not outcome["lost"] & set(history)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_at_the_swap_is_no_unknown_outcome(
    code: int, first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CommitLog(LocalStore(tmp_path), "x", "stream")
    parent = None if first else log.commit(None, {"n": 1}, by="me")
    written = os.fsync
    calls: list[int] = []

    def full(file: int) -> None:  # the manifest is a file and its folder: the third is the pointer
        calls.append(file)
        if len(calls) > 2:
            raise OSError(code, os.strerror(code))
        written(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreUnavailableError) as reported:
        log.commit(parent, {"n": 2}, by="me")
    assert (reported.value.without_effect, reported.value.url, len(calls)) == (
        True,
        str(tmp_path),
        3,
    )
    assert os.strerror(code) in reported.value.problem
    monkeypatch.setattr(os, "fsync", written)
    assert log.current() == parent
    assert log.commit(parent, {"n": 2}, by="me").number == (1 if first else 2)


def test_a_folder_that_can_not_be_synced_after_the_swap_is_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CommitLog(LocalStore(tmp_path), "x", "stream")
    parent = log.commit(None, {"n": 1}, by="me")
    written = os.fsync
    calls: list[int] = []

    # the fourth is the folder of the pointer, which has its name by then
    def failing(file: int) -> None:
        calls.append(file)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(file)

    monkeypatch.setattr(os, "fsync", failing)
    assert log.commit(parent, {"n": 2}, by="me") == log.current()

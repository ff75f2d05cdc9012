"""The batch log on plain values: intents, closes, history, fencing, and how records are shared
out.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    BatchLog,
    ClosedBatch,
    add_counters,
    application_state,
    served_versions,
)
from dagster_adjunct.orchestration.batch_log.intent import Intent, JoinedVersions
from dagster_adjunct.orchestration.step.plan_batch import share_by_lag
from dagster_adjunct.resources.errors import CommitConflictError, MalformedDocumentError
from dagster_adjunct.resources.objects import commit_log
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition
from tests.assets.cycle import make_older

NOW = datetime(2026, 1, 2, tzinfo=UTC)
TRIPS = [SystemStreamPartition("lake", "trips", partition) for partition in (0, 1)]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake")


def intent(batch: int, start: int, end: int, run: str = "one") -> Intent:
    spans = {TRIPS[0]: OffsetRange(start=str(start), end=str(end))}
    return Intent(
        batch=batch,
        run=run,
        clock=NOW,
        ranges=spans,
        joined=JoinedVersions(versions={"planes": "v1", "none-yet": None}),
    )


def closed(what: Intent, rows: int) -> ClosedBatch:
    return ClosedBatch(
        intent=what,
        closed_at=NOW,
        records=rows,
        counters={"out": {"rows": rows}},
        seconds={"work": 1},
    )


def test_an_application_that_never_ran_has_an_empty_state(lake: Lake) -> None:
    assert BatchLog(lake, "app").read() == (None, ApplicationState())
    assert application_state(lake, "app").checkpoint == {}


def test_a_closed_batch_moves_the_checkpoint_and_adds_up_its_counters(lake: Lake) -> None:
    log = BatchLog(lake, "app")
    moved = ApplicationState(checkpoint={TRIPS[0]: "5", TRIPS[1]: "7"})
    logged = log.commit(log.read(), moved, by="one", note="from the start")
    assert logged == log.read()
    assert logged.state.note == "from the start"
    for number, (begin, end) in enumerate([(5, 8), (8, 9)], start=1):
        what = intent(number, begin, end)
        logged = log.open(logged, what)
        assert logged == log.read()
        assert (logged.state.open, logged.state.note) == (what, None)
        assert logged.state.checkpoint[TRIPS[0]] == str(begin)
        logged = log.close(logged, closed(what, end - begin))
        assert logged == log.read()
    state = logged.state
    assert state.checkpoint == {TRIPS[0]: "9", TRIPS[1]: "7"}
    stored = lake.commit_log("applications/app", "application").current()
    assert stored is not None
    assert stored.body["checkpoint"] == {"lake.trips.0": "9", "lake.trips.1": "7"}
    assert (state.batch, state.records, state.open, state.totals) == (
        2,
        4,
        None,
        {"out": {"rows": 4}},
    )
    assert [earlier.batch for _, earlier in log.history(10)] == [2, 1, 1, 0, 0]


def test_what_the_log_no_longer_retains_goes_but_not_its_newest_commits(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "MANIFESTS_KEPT", 3)
    log = BatchLog(lake, "app")
    logged = log.read()
    for number in range(1, 6):
        logged = log.open(logged, intent(number, number, number + 1))
        logged = log.close(logged, closed(intent(number, number, number + 1), 1))
    prefix = lake.application_prefix("app")
    make_older(lake, timedelta(days=30), f"{prefix}/manifests/000000000001")
    make_older(lake, timedelta(days=10), f"{prefix}/manifests/000000000002")
    log.forget(timedelta(days=20))
    assert [commit.number for commit, _ in log.history(None)] == list(range(10, 1, -1))
    make_older(lake, timedelta(days=30), f"{prefix}/manifests/")
    log.forget(timedelta(days=20))
    assert [commit.number for commit, _ in log.history(None)] == [10, 9, 8, 7]
    assert len(list(lake.store.list(f"{prefix}/manifests/"))) == 4
    assert log.read() == logged
    assert served_versions(lake, "app") == {"planes": {"v1": [3, 4, 5]}}
    log.open(logged, intent(6, 6, 7))


def test_a_log_without_commits_has_nothing_to_forget(lake: Lake) -> None:
    BatchLog(lake, "app").forget(timedelta(days=1))
    assert BatchLog(lake, "app").read().commit is None


def test_whoever_commits_second_is_fenced_and_reported_by_whom(lake: Lake) -> None:
    log = BatchLog(lake, "app")
    mine = log.open(log.read(), intent(1, 0, 5, "first"))
    log.check_not_superseded(mine)
    taken = intent(1, 0, 5, "second")
    log.open(mine, taken)
    with pytest.raises(CommitConflictError, match=r"taken over by another run .*by second"):
        log.check_not_superseded(mine)
    with pytest.raises(CommitConflictError) as caught:
        log.close(mine, closed(intent(1, 0, 5, "first"), 5))
    assert caught.value.application == "app"
    assert log.read()[1].open == taken


def test_two_runs_that_begin_together_give_one_batch(lake: Lake) -> None:
    log = BatchLog(lake, "app")
    nothing = log.read()
    log.open(nothing, intent(1, 0, 5, "first"))
    with pytest.raises(CommitConflictError):
        log.open(nothing, intent(1, 0, 5, "second"))


@pytest.mark.parametrize(
    ("body", "field"),
    [({"batch": "many"}, "batch"), ({"checkpoint": {"lake.trips": "5"}}, "checkpoint.lake.trips")],
)
def test_a_malformed_log_names_the_manifest_and_the_field(
    lake: Lake, body: dict[str, object], field: str
) -> None:
    log = lake.commit_log("applications/app", "application")
    broken = log.commit(None, body, by="somebody")
    with pytest.raises(MalformedDocumentError, match=field) as caught:
        BatchLog(lake, "app").read()
    assert broken.manifest_key in str(caught.value)


def test_a_log_of_another_kind_is_not_taken_for_a_batch_log(lake: Lake) -> None:
    lake.commit_log("applications/app", "stream").commit(None, {}, by="somebody")
    with pytest.raises(MalformedDocumentError) as caught:
        BatchLog(lake, "app").read()
    assert "applications/app/CURRENT" in str(caught.value.document)


def test_counters_add_up_and_leave_their_summands_alone() -> None:
    left, right = {"a": {"x": 1}, "b": {"y": 2}}, {"a": {"x": 10, "z": 5}, "c": {"w": 1}}
    assert add_counters(left, right) == {"a": {"x": 11, "z": 5}, "b": {"y": 2}, "c": {"w": 1}}
    assert (left, right) == (
        {"a": {"x": 1}, "b": {"y": 2}},
        {"a": {"x": 10, "z": 5}, "c": {"w": 1}},
    )


lags = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3), st.integers(0, 10**9), max_size=40
)


@given(lags, st.integers(1, 10**9))
def test_shares_add_up_to_the_limit_and_never_exceed_a_lag(
    lags: dict[str, int], limit: int
) -> None:
    shares = share_by_lag(lags, limit)
    assert shares.keys() == lags.keys()
    assert sum(shares.values()) == min(limit, sum(lags.values()))
    assert all(0 <= shares[ssp] <= lag for ssp, lag in lags.items())


@given(lags, st.integers(1, 10**9))
def test_shares_follow_the_lags_to_within_one_record(lags: dict[str, int], limit: int) -> None:
    total = sum(lags.values())
    if total > limit:
        assert all(
            abs(share - lags[ssp] * limit / total) < 1.001
            for ssp, share in share_by_lag(lags, limit).items()
        )


@given(lags, st.integers(1, 10**6))
def test_every_partition_is_read_to_its_end_in_finitely_many_batches(
    lags: dict[str, int], limit: int
) -> None:
    left = {ssp: lag % 50 for ssp, lag in lags.items()}
    for _ in range(sum(left.values()) + 1):
        shares = share_by_lag(left, limit)
        left = {ssp: lag - shares[ssp] for ssp, lag in left.items()}
    assert not any(left.values())

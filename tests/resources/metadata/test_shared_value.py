"""One small value without a history: no change is lost where several make them, whatever the
store does.
"""

from __future__ import annotations

import json
import threading
import uuid
from itertools import pairwise
from pathlib import Path

import pytest

from dagster_adjunct.resources.errors import StoreUnavailableError
from dagster_adjunct.resources.metadata import SharedValue
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.tables import shared_rate as leases_of_budget
from dagster_adjunct.resources.tables.rate import Budget, LeaseInterval, LeaseRequest
from dagster_adjunct.resources.tables.shared_rate import BudgetLeases
from tests.faulty_store import Fault, FaultyStore


def add_one(data: bytes | None) -> tuple[bytes, int]:
    count = 1 + (0 if data is None else json.loads(data)["count"])
    return json.dumps({"count": count, "nonce": uuid.uuid4().hex}).encode(), count


def value(lake: Lake) -> SharedValue:
    return SharedValue(lake, "counts", "all", "one")


def lake_with(*faults: Fault) -> tuple[Lake, FaultyStore]:
    """A lake that is made already, whose store has these faults from now on."""
    inner = InMemoryStore()
    SharedValue(lake_in(inner), "counts", "all", "another").transact(add_one)
    store = FaultyStore(inner, list(faults))
    return lake_in(store), store


def test_a_change_costs_one_request_where_nobody_else_made_one() -> None:
    lake, store = lake_with()
    mine = value(lake)
    assert [mine.transact(add_one) for _ in range(5)] == [1, 2, 3, 4, 5]
    asked = [request for request, key in store.requests if key.startswith("metadata/")]
    assert asked == ["get", "put_if_absent", *["put_if_match"] * 4]
    mine.forget()
    assert mine.transact(add_one) == 6
    # nothing written
    assert mine.transact(lambda data: (None, json.loads(data or b"{}")["count"])) == 6


def test_of_changes_at_once_none_is_lost(tmp_path: Path) -> None:
    open_lake(tmp_path, create=True)
    counted: list[int] = []

    def work() -> None:
        mine = value(open_lake(tmp_path))
        counted.extend(mine.transact(add_one) for _ in range(25))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(counted) == list(range(1, 101))


@pytest.mark.parametrize("kind", ["lost-after", "lost-before"])
def test_after_a_lost_reply_it_looks_before_the_next_change(kind: str) -> None:
    lake, _ = lake_with(Fault("put_if_match", 1, kind))  # type: ignore[arg-type]
    mine = value(lake)
    mine.transact(add_one)
    with pytest.raises(StoreUnavailableError):
        mine.transact(add_one)
    assert mine.transact(add_one) == (3 if kind == "lost-after" else 2)


def test_a_refusal_is_decided_again_from_what_is_there() -> None:
    lake, _ = lake_with()
    mine, other = value(lake), value(lake)
    assert [mine.transact(add_one), other.transact(add_one), mine.transact(add_one)] == [1, 2, 3]


def test_runs_that_lease_at_once_get_stretches_that_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_of_budget.time, "time", lambda: 1_000_000.0)
    lake = open_lake(tmp_path, create=True)
    leased: list[LeaseInterval] = []

    def work(run: str) -> None:
        # A clock that stands still for all: what is leased has one measure.
        leases = BudgetLeases(
            open_lake(tmp_path), Budget("b", "write", 1.0), run, clock=lambda: 5.0
        )
        for _ in range(10):
            if (got := leases.lease(LeaseRequest(0.03, 1.0))) is not None:
                leased.append(got)

    threads = [threading.Thread(target=work, args=(run,)) for run in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ordered = sorted(leased, key=lambda stretch: stretch.start)
    assert len(ordered) > 5
    assert all(one.end <= other.start + 1e-6 for one, other in pairwise(ordered))
    # half a second that came in, and one ahead
    assert sum(one.end - one.start for one in ordered) <= 1.5 + 1e-6
    assert [item.key for item in lake.store.list("metadata/")] == ["metadata/budgets/b/write.json"]

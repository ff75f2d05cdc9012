from __future__ import annotations

import asyncio
from itertools import chain

import pytest

from dagster_adjunct.resources.errors import ConfigurationError, StoreUnavailableError, TableError
from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.resources.tables.operation import (
    Operation,
    OperationKind,
    Outcomes,
    RowEntries,
    State,
)
from dagster_adjunct.resources.tables.rate import (
    Budget,
    RateLayer,
    RateLimit,
    per_byte,
    per_capacity_unit,
)
from dagster_adjunct.resources.tables.retry import Backoff, RetryLayer, RetryPolicy
from tests.resources.tables.manual_clock import ManualClock
from tests.resources.tables.scripted_layer import ScriptedLayer, failing, gets, puts, updates


class Ledger:
    """A source that gives at once and writes down who took what; from the n-th demand on it has
    none.
    """

    def __init__(self, refuses_from: int = 10**9, error: Exception | None = None) -> None:
        self.taken: list[tuple[str, str, float]] = []
        self.refuses_from = refuses_from
        self.error = error or TableError("the run's driver is gone.", "End.")

    async def acquire(self, budget: Budget, credits: float) -> None:
        if len(self.taken) >= self.refuses_from:
            raise self.error
        self.taken.append((budget.name, budget.tag, credits))

    async def close(self) -> None:
        self.taken.append(("closed", "", 0))


def deletes(*keys) -> Operation:
    return Operation(OperationKind.DELETE, RowEntries(list(keys)))


def test_reads_and_writes_pay_apart_and_updates_and_deletes_are_writes():
    ledger = Ledger()
    layer = RateLayer("t", ScriptedLayer(), RateLimit(100, 200), ledger)
    for operation in (gets("a", "b"), puts("a"), updates("a", "b", set={}), deletes("a", "b", "c")):
        asyncio.run(layer.send(operation))
    assert ledger.taken == [
        ("t", "read", 2),
        ("t", "write", 1),
        ("t", "write", 2),
        ("t", "write", 3),
    ]


def test_what_is_not_limited_asks_for_nothing():
    ledger = Ledger()
    layer = RateLayer("t", ScriptedLayer(), RateLimit(None, 5), ledger)
    asyncio.run(layer.send(gets(*range(1000))))
    assert ledger.taken == []


def test_every_attempt_pays():
    ledger = Ledger()
    rate = RateLayer("t", ScriptedLayer(failing(1, 2), failing(0)), RateLimit(None, 100), ledger)
    asyncio.run(
        RetryLayer(rate, RetryPolicy(backoff=Backoff.none()), clock=ManualClock()).send(
            puts("a", "b", "c")
        )
    )
    assert [credits for _, _, credits in ledger.taken] == [3, 2, 1]


def test_a_request_above_the_burst_is_sent_in_parts_at_the_rate():
    clock, inner, meter = ManualClock(), ScriptedLayer(), Meter()
    layer = RateLayer("t", inner, RateLimit(None, 40), meter=meter, clock=clock)
    outcomes = asyncio.run(layer.send(puts(*range(95))))
    assert [*chain(*inner.keys)] == list(range(95))
    assert max(map(len, inner.keys)) <= 10
    assert clock.now() == pytest.approx(95 / 40)
    assert outcomes.count == 95
    assert outcomes.waited == pytest.approx(95 / 40)
    assert meter.metrics().store.rate_waits == pytest.approx(95 / 40)


def test_a_get_in_parts_has_its_records_in_order():
    layer = RateLayer("t", ScriptedLayer(), RateLimit(8, None), clock=ManualClock())
    assert asyncio.run(layer.send(gets(*range(31)))).records == list(range(31))


def test_what_follows_a_failed_entry_of_its_key_in_a_later_part_is_not_sent():
    inner = ScriptedLayer(failing(0))
    layer = RateLayer("t", inner, RateLimit(None, 8), clock=ManualClock())
    outcomes = asyncio.run(layer.send(puts("a", "b", "a", "c", "b")))
    assert inner.keys == [["a", "b"], ["c"], ["b"]]
    assert {place: problem.state for place, problem in outcomes.problems.items()} == {
        0: State.FAILED,
        2: State.FAILED,
    }
    again = ScriptedLayer(failing(0), failing(0))
    rate = RateLayer("t", again, RateLimit(None, 8), clock=ManualClock())
    outcomes = asyncio.run(RetryLayer(rate, clock=ManualClock()).send(puts("a", "b", "a", "a")))
    assert not outcomes.problems
    applied = [value["n"] for operation in again.sent[2:] for value in operation.entries.values]
    assert applied == [0, 2, 3]


def test_a_credit_function_says_what_a_request_costs():
    def by_size(operation, answer):
        if answer is not None:
            return sum(len(str(record)) for record in answer.records)
        return sum(len(str(value)) for value in operation.entries.values or ())

    ledger = Ledger()
    layer = RateLayer("t", ScriptedLayer(), RateLimit(1000, 1000, credits=by_size), ledger)
    asyncio.run(layer.send(puts("a", "b")))
    asyncio.run(layer.send(gets("abc", "de")))
    assert ledger.taken == [("t", "write", 2 * len("{'n': 0}")), ("t", "read", 0), ("t", "read", 5)]


def test_bytes_and_capacity_units_are_paid_for_what_is_sent_and_what_comes():
    def cost(credits, operation, records=None):
        ledger = Ledger()
        inner = ScriptedLayer(
            *([lambda _: Outcomes(len(records), records)] if records is not None else [])
        )
        asyncio.run(
            RateLayer("t", inner, RateLimit(1e9, 1e9, credits=credits), ledger).send(operation)
        )
        return [paid for _, _, paid in ledger.taken if paid]

    large = Operation(OperationKind.PUT, RowEntries(["a", "b"], [{"t": "x" * 5000}, {"t": "y"}]))
    assert cost(per_byte, large) == [1 + 1 + 1 + 5000 + 1 + 1]
    assert cost(per_byte, gets("a", "b"), [{"t": "x" * 5000}, None]) == [5001]
    assert cost(per_capacity_unit, large) == [5 + 1]
    assert cost(per_capacity_unit, gets("a", "b", "c"), [{"t": "x" * 5000}, None, {"t": "z"}]) == [
        2 + 1 + 1
    ]
    assert cost(per_capacity_unit, deletes("a", "b")) == [2]


def test_entries_of_unequal_cost_are_split_until_each_part_may_go_out():
    def cost(operation, answer):
        return 0 if answer else sum(operation.entries.keys)

    ledger, inner = Ledger(), ScriptedLayer()
    layer = RateLayer("t", inner, RateLimit(None, 40, credits=cost), ledger)
    asyncio.run(layer.send(puts(1, 1, 1, 1, 9, 1, 50, 1)))
    assert [*chain(*inner.keys)] == [1, 1, 1, 1, 9, 1, 50, 1]
    assert all(sum(keys) <= 10 or len(keys) == 1 for keys in inner.keys)


def test_tables_of_one_process_share_a_budget_by_its_name():
    clock = ManualClock()
    first, second, own = (
        RateLayer(name, ScriptedLayer(), RateLimit(None, 20, budget=budget), clock=clock)
        for name, budget in (("a", "one"), ("b", "one"), ("c", None))
    )

    async def run() -> None:
        await first.send(puts(*range(40)))
        await second.send(puts(*range(40)))
        assert clock.now() == pytest.approx(4)
        await own.send(puts(*range(10)))

    asyncio.run(run())
    assert clock.now() == pytest.approx(4.5, abs=0.51)
    other = RateLayer("d", ScriptedLayer(), RateLimit(None, 30, budget="one"), clock=clock)
    (problem,) = asyncio.run(other.send(puts("a"))).problems.values()
    assert isinstance(problem.error, ConfigurationError)
    assert problem.error.argument == "budget"


def test_a_source_that_ends_between_parts_leaves_an_outcome_for_each_entry():
    inner = ScriptedLayer()
    layer = RateLayer("t", inner, RateLimit(None, 8), Ledger(refuses_from=2))
    outcomes = asyncio.run(layer.send(puts(*range(6))))
    assert inner.keys == [[0, 1], [2, 3]]
    assert outcomes.places(State.REFUSED) == [4, 5]
    away = Ledger(1, StoreUnavailableError("the lake does not answer.", "Wait."))
    outcomes = asyncio.run(
        RateLayer("t", ScriptedLayer(), RateLimit(None, 8), away).send(puts(*range(4)))
    )
    assert outcomes.places(State.FAILED) == [2, 3]  # nothing is wrong with these records


def test_closing_gives_the_source_back():
    ledger = Ledger()
    asyncio.run(RateLayer("t", ScriptedLayer(), RateLimit(1, 1), ledger).close())
    assert ledger.taken == [("closed", "", 0)]


@pytest.mark.parametrize("rate", [0, -1, True, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ConfigurationError) as failure:
        RateLimit(rate)
    assert failure.value.argument == "reads_per_second"

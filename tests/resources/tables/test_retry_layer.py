from __future__ import annotations

import asyncio
import pickle
import random
from collections import Counter

import pytest

from dagster_adjunct.resources.errors import ConfigurationError, TableError
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.function_layer import FunctionLayer
from dagster_adjunct.resources.tables.functions import TableReadFunction
from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.resources.tables.operation import (
    Conditions,
    Mark,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    RowEntries,
    State,
)
from dagster_adjunct.resources.tables.rate import RateLayer, RateLimit
from dagster_adjunct.resources.tables.retry import AttemptLayer, Backoff, RetryLayer, RetryPolicy
from tests.resources.tables.manual_clock import ManualClock
from tests.resources.tables.scripted_layer import ScriptedLayer, busy, failing, gets, puts, updates
from tests.resources.tables.troubled_function import TroubledFunction


def sent(layer, operation, clock=None, **policy) -> tuple[Outcomes, Meter]:
    meter = Meter()
    retry = RetryLayer(layer, RetryPolicy(**policy), meter, clock or ManualClock())
    return asyncio.run(retry.send(operation)), meter


def test_only_the_entries_that_failed_are_sent_again():
    layer = ScriptedLayer(failing(1, 3), failing(0))
    outcomes, meter = sent(layer, puts("a", "b", "c", "d"))
    assert layer.keys == [["a", "b", "c", "d"], ["b", "d"], ["b"]]
    assert not outcomes.problems
    counts = meter.metrics()
    assert (
        counts.store.requests,
        counts.store.retries,
        counts.store.successes,
        counts.store.failures,
    ) == (1, 2, 1, 0)


def test_increments_that_had_succeeded_are_not_applied_again():
    async def run() -> dict:
        store = MemoryTable("increments-under-trouble")
        store.clear()
        troubled = TroubledFunction(store, seed=7, chance=0.8, forgets=False)
        layer = RetryLayer(
            FunctionLayer("t", troubled, troubled),
            RetryPolicy(99, max_total=1e9),
            clock=ManualClock(),
        )
        await layer.send(puts(*range(20)))
        for _ in range(10):
            assert not (
                await layer.send(updates(*range(20), *range(20), add={"total": 1}))
            ).problems
        assert troubled.spoilt
        return await store.get_all(range(20))

    assert {key: record["total"] for key, record in asyncio.run(run()).items()} == dict.fromkeys(
        range(20), 20
    )


@pytest.mark.parametrize("seed", range(5))
def test_what_a_key_ends_with_is_its_last_value_whatever_failed_on_the_way(seed):
    chance = random.Random(seed)
    keys = [chance.randrange(6) for _ in range(60)]

    async def run() -> dict:
        store = MemoryTable(f"last-value-{seed}")
        store.clear()
        troubled = TroubledFunction(store, seed=seed, chance=0.8)
        layer = RetryLayer(
            FunctionLayer("t", troubled, troubled),
            RetryPolicy(99, max_total=1e9),
            clock=ManualClock(),
        )
        assert not (await layer.send(puts(*keys))).problems
        return await store.get_all(range(6))

    assert {key: record["n"] for key, record in asyncio.run(run()).items()} == {
        k: n for n, k in enumerate(keys)
    }


def test_a_function_that_let_a_later_value_overtake_is_sent_that_again_too():
    layer = ScriptedLayer(failing(0))
    sent(layer, puts("a", "b", "a"))
    assert layer.keys[1] == ["a", "a"]
    assert layer.sent[1].entries.values == [{"n": 0}, {"n": 2}]
    counting = ScriptedLayer(failing(0))
    sent(counting, updates("a", "a", add={"n": 1}))
    assert counting.keys[1] == ["a"]  # what was counted must not be counted again


def test_missing_and_skipped_are_answers_and_refused_is_final():
    layer = ScriptedLayer(
        lambda _: Outcomes(
            3,
            problems={
                0: Problem(State.MISSING, TableError("none", "")),
                1: Problem(State.SKIPPED),
                2: Problem(State.REFUSED, TableError("too long.", "Shorten it.")),
            },
        )
    )
    outcomes, meter = sent(
        layer, updates("a", "b", "c", set={"n": 1}), retry_if=lambda problem: problem.may_pass
    )
    assert len(layer.sent) == 1
    assert sorted(outcomes.problems) == [0, 1, 2]
    assert (meter.metrics().store.failures, meter.metrics().store.given_up) == (1, 1)
    only_answers = ScriptedLayer(failing(0, problem=Problem(State.MISSING)))
    _, meter = sent(only_answers, updates("a", set={"n": 1}), retry_if=lambda _: True)
    assert len(only_answers.sent) == 1
    assert (meter.metrics().store.failures, meter.metrics().store.successes) == (0, 1)


def test_the_predicate_decides_alone():
    refused = Problem(State.REFUSED, TableError("a name that comes later.", "Wait."))
    layer = ScriptedLayer(failing(0, problem=refused))
    outcomes, _ = sent(layer, puts("a"), retry_if=lambda problem: problem.error is refused.error)
    assert not outcomes.problems
    layer = ScriptedLayer(failing(0))
    outcomes, _ = sent(layer, puts("a"), retry_if=lambda _: False)
    assert outcomes.problems[0].state is State.FAILED
    assert len(layer.sent) == 1


def test_a_pause_that_the_store_asks_for_is_kept():
    clock = ManualClock()
    layer = ScriptedLayer(failing(0, 1, problem=busy(retry_after=7.5)))
    _, meter = sent(layer, puts("a", "b"), clock, backoff=Backoff.fixed(1))
    assert clock.slept == [7.5]
    assert (meter.metrics().store.throttled, meter.metrics().store.retry_waits) == (1, 7.5)


def test_a_pause_longer_than_the_total_time_ends_it_and_is_reported():
    layer = ScriptedLayer(failing(0, problem=busy(retry_after=120)))
    outcomes, meter = sent(layer, puts("a"), max_total=60)
    assert len(layer.sent) == 1
    assert "the store asked for a pause of 120 s" in outcomes.problems[0].error.__notes__[0]
    assert meter.metrics().store.given_up == 1


def test_backoffs_wait_as_they_say():
    assert [Backoff.none().seconds(n) for n in (1, 2)] == [0, 0]
    assert [Backoff.fixed(3).seconds(n) for n in (1, 2)] == [3, 3]
    assert all(1 <= Backoff.random(1, 4).seconds(n) <= 4 for n in range(1, 50))
    assert len({Backoff.random(1, 4).seconds(1) for _ in range(20)}) > 1
    assert [Backoff(1, 2.0, 6).seconds(n) for n in (1, 2, 3, 4, 999)] == [1, 2, 4, 6, 6]
    assert all(1 <= Backoff.exponential(1, 6).seconds(1) <= 2 for _ in range(50))


@pytest.mark.parametrize(("first", "most"), [(1, 6), (1, 1.5), (2, 2), (0, 0), (0.1, 5)])
def test_no_wait_is_longer_than_the_longest_or_shorter_than_the_first(first, most):
    policy = RetryPolicy(99, first, most, 1e9)
    for n in range(1, 60):
        waits = [policy.wait(n, 0.0) for _ in range(20)]
        assert first <= min(waits) <= max(waits) <= most
    assert (len(set(waits)) > 1) is (first < most), (
        "the longest waits of many tasks are not all the same"
    )


def test_no_wait_sends_again_without_sleeping():
    clock = ManualClock()
    sent(ScriptedLayer(failing(), failing()), puts("a"), clock, backoff=Backoff.none())
    assert clock.slept == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout": 0},
        {"timeout": float("inf")},
        {"unknown": "maybe"},
        {"attempts": 2.5},
        {"attempts": True},
        {"max_total": float("nan")},
        {"first_wait": 6.0},
        {"max_wait": 0.05, "first_wait": 0.1},
        {"max_total": 0.05},
        {"max_total": 0, "first_wait": 0},
        {"max_total": 2, "backoff": Backoff.fixed(3)},
    ],
)
def test_a_policy_that_cannot_work_is_refused(wrong):
    with pytest.raises(ConfigurationError, check=lambda error: error.argument in wrong):
        RetryPolicy(**wrong)
    for backoff in (
        lambda: Backoff.fixed(-1),
        lambda: Backoff.random(4, 1),
        lambda: Backoff.fixed(float("nan")),
        lambda: Backoff.exponential(10, 5),
    ):
        with pytest.raises(ConfigurationError) as failure:
            backoff()
        assert failure.value.argument == "backoff"


def test_a_policy_whose_waits_fit_is_taken_to_the_limit():
    RetryPolicy(first_wait=5.0, max_wait=5.0, max_total=5.0)
    RetryPolicy(attempts=1, max_total=0)
    RetryPolicy(first_wait=6.0, max_wait=5.0 + 1.0)
    RetryPolicy(backoff=Backoff.fixed(10))


def test_a_lost_increment_is_sent_again_unless_the_policy_forbids_it():
    lost = busy(State.UNKNOWN)
    adding = updates("a", "b", "c", add={"n": 1})

    def layer() -> ScriptedLayer:
        return ScriptedLayer(lambda _: Outcomes(3, problems={0: lost, 1: busy(State.FAILED)}))

    again = layer()
    assert not sent(again, adding)[0].problems
    assert again.keys[1] == ["a", "b"]
    once = layer()
    outcomes, meter = sent(once, adding, unknown="fail")
    assert once.keys[1] == ["b"]  # known to have had no effect
    assert {place: problem.state for place, problem in outcomes.problems.items()} == {
        0: State.UNKNOWN
    }
    assert meter.metrics().store.given_up == 1
    for repeatable in (
        updates("a", "b", "c", set={"n": 1}),
        updates("a", "b", "c", add={"n": 1}, idempotent=True),
        puts("a", "b", "c"),
    ):
        fine = layer()
        assert not sent(fine, repeatable, unknown="fail")[0].problems
        assert fine.keys[1] == ["a", "b"]


def test_records_of_a_get_come_together_from_all_attempts():
    outcomes, _ = sent(ScriptedLayer(failing(1), failing(0)), gets("a", "b", "c"))
    assert outcomes.records == ["a", "b", "c"]


def test_waiting_for_the_rate_uses_up_no_time_of_the_policy():
    clock = ManualClock()
    inner = ScriptedLayer(*[failing()] * 40)
    rate = RateLayer("t", inner, RateLimit(None, 1), clock=clock)
    layer = RetryLayer(rate, RetryPolicy(99, backoff=Backoff.fixed(0.1), max_total=10), clock=clock)
    outcomes = asyncio.run(layer.send(puts(*range(4))))
    assert clock.now() == pytest.approx(44)  # credits come in while it backs off, too
    assert not outcomes.problems


class Hanging(TroubledFunction):
    """Answers the first request late."""

    def __init__(self, inner: MemoryTable, seconds: float) -> None:
        super().__init__(inner)
        self.seconds: list[float] = [seconds]
        self.ended: Counter[str] = Counter()

    async def send(self, operation):
        if self.seconds:
            try:
                await asyncio.sleep(self.seconds.pop())
            except asyncio.CancelledError:
                self.ended["cancelled"] += 1
                raise
        return await self.inner.send(operation)


def test_a_hanging_request_is_given_up_and_sent_again():
    store = MemoryTable("hanging")
    store.clear()
    hanging, meter = Hanging(store, 60), Meter()
    attempt = AttemptLayer("t", FunctionLayer("t", hanging, hanging), 0.05, meter)
    layer = RetryLayer(attempt, RetryPolicy(first_wait=0), meter)
    assert not asyncio.run(layer.send(puts("a"))).problems
    assert hanging.ended == {"cancelled": 1}
    counts = meter.metrics()
    assert (counts.store.timeouts, counts.store.retries, counts.attempts.write_seconds.count) == (
        1,
        1,
        2,
    )
    assert asyncio.run(store.get("a")) == {"n": 0}


@pytest.mark.lengthy
def test_of_many_requests_under_way_only_those_that_take_too_long_are_given_up():
    class Some(TroubledFunction):
        async def send(self, operation):
            await asyncio.sleep(operation.entries.keys[0])
            return await self.inner.send(operation)

    async def run() -> list[set[State]]:
        some = Some(MemoryTable("hanging"))
        layer = AttemptLayer("t", FunctionLayer("t", some, some), 1.0)

        async def after(start: float, lasting: float) -> Outcomes:
            await asyncio.sleep(start)
            return await layer.send(puts(lasting))

        answers = await asyncio.gather(
            after(0, 90), after(0, 0.02), after(0.05, 0.02), after(0.05, 80), after(0.3, 70)
        )
        return [{problem.state for problem in outcomes.problems.values()} for outcomes in answers]

    late = {State.UNKNOWN}
    assert asyncio.run(run()) == [late, set(), set(), late, late]


def test_a_request_without_an_answer_is_of_unknown_outcome_and_named():
    hanging = Hanging(MemoryTable("hanging"), 60)
    layer = AttemptLayer("orders", FunctionLayer("orders", hanging, hanging), 0.02)
    outcomes = asyncio.run(layer.send(puts("a", "b")))
    assert [problem.state for problem in outcomes.problems.values()] == [State.UNKNOWN] * 2
    assert (
        "table orders: a put of 2 entries, the first with key 'a' had no answer after 0.02 s"
        in str(outcomes.problems[0].error)
    )


@pytest.mark.lengthy
def test_a_function_of_single_requests_has_the_time_for_each_of_them():
    class OneHangs(TableReadFunction[int, int]):
        def __init__(self) -> None:
            self.asked: Counter[int] = Counter()

        async def get(self, key, *args):
            self.asked[key] += 1
            await asyncio.sleep(9 if key == 7 and self.asked[key] == 1 else 0.15)
            return key

    function, meter = OneHangs(), Meter()
    attempt = AttemptLayer("t", FunctionLayer("t", function, None), 1.5, meter)
    outcomes = asyncio.run(
        RetryLayer(attempt, RetryPolicy(first_wait=0), meter).send(gets(*range(400)))
    )
    assert outcomes.records == list(range(400))  # 400 / 32 * 0.15 s are more than what one may take
    assert not outcomes.problems
    assert function.asked == Counter(dict.fromkeys(range(400), 1)) + Counter([7])
    assert meter.metrics().store.timeouts == 1


def test_a_caller_who_gives_up_is_no_timeout():
    async def run() -> Meter:
        hanging, meter = Hanging(MemoryTable("hanging"), 60), Meter()
        layer = RetryLayer(
            AttemptLayer("t", FunctionLayer("t", hanging, hanging), 5, meter), meter=meter
        )
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(layer.send(puts("a")), 0.02)
        return meter

    assert asyncio.run(run()).metrics().store.timeouts == 0


def test_a_policy_travels_to_executors():
    policy = RetryPolicy(3, backoff=Backoff.random(1, 2), timeout=None, unknown="fail")
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_conditions_are_sent_again_with_the_entries():
    layer = ScriptedLayer(failing(1, problem=busy(State.UNKNOWN)))
    marks = [Mark("s.0", "1"), Mark("s.0", "2")]
    entries = RowEntries(["a", "a"], [{"n": 1}, {"n": 2}], marks=marks, newest=[1, 2])
    operation = Operation(OperationKind.PUT, entries, ("arg",), Conditions("time"))
    sent(layer, operation)
    again = layer.sent[1]
    assert (again.conditions, again.args, again.entries.marks, again.entries.newest) == (
        Conditions("time"),
        ("arg",),
        [marks[1]],
        [2],
    )

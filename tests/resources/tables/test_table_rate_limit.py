from __future__ import annotations

import asyncio
import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import ConfigurationError, InvalidNameError
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.operation import SystemClock
from dagster_adjunct.resources.tables.rate import Budget, RateLimit, TokenBucket
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.resources.tables.manual_clock import ManualClock


def test_records_go_out_at_the_rate():
    clock = ManualClock()
    bucket = TokenBucket(10, clock)

    async def thirty():
        for _ in range(30):
            await bucket.acquire(1)

    asyncio.run(thirty())
    assert clock.now() == pytest.approx(3.0)


def test_unused_credits_expire_after_half_a_second():
    clock = ManualClock()
    bucket = TokenBucket(10, clock)
    clock.advance(3600)
    asyncio.run(bucket.acquire(5))
    assert clock.slept == []
    asyncio.run(bucket.acquire(10))
    assert clock.slept == [pytest.approx(1.0)]


@pytest.mark.lengthy
@given(
    rate=st.floats(0.5, 1000),
    steps=st.lists(st.tuples(st.floats(0, 10), st.integers(1, 50)), min_size=1, max_size=30),
)
def test_no_window_sees_more_than_the_rate_and_one_burst(rate, steps):
    clock = ManualClock()
    bucket = TokenBucket(rate, clock)
    sent: list[tuple[float, int]] = []

    async def run():
        for idle, wanted in steps:
            clock.advance(idle)
            size = Budget("b", "write", rate).largest if wanted > rate / 4 else wanted
            await bucket.acquire(size)
            sent.append((clock.now(), size))

    asyncio.run(run())
    for first, (start, _) in enumerate(sent):
        for last in range(first, len(sent)):
            allowed = (sent[last][0] - start) * rate + max(rate / 2, 1)
            assert sum(size for _, size in sent[first : last + 1]) <= allowed * (1 + 1e-6) + 1e-6


def test_a_table_reads_and_writes_at_its_own_rates_in_batches_no_larger_than_a_burst():
    clock = ManualClock()
    store = MemoryTable("rated")
    table = RemoteTable(
        "rated",
        key="id",
        read_function=store,
        write_function=store,
        rate_limit=RateLimit(100, 10),
        clock=clock,
    )
    asyncio.run(table.put_all([(n, {"n": n}) for n in range(100)]))
    assert clock.now() == pytest.approx(10.0)
    assert max(clock.slept) <= 0.25 + 1e-9
    asyncio.run(table.get_all(range(100)))
    assert clock.now() == pytest.approx(11.0)  # the first request of a kind finds no credits yet


def test_tables_that_name_one_budget_spend_the_same():
    assert RateLimit(100, 10).budgets("a") == (Budget("a", "read", 100), Budget("a", "write", 10))
    assert RateLimit(None, 10, budget="all").budgets("a") == RateLimit(
        None, 10, budget="all"
    ).budgets("b")
    assert RateLimit().budgets("a") == ()
    with pytest.raises(InvalidNameError) as caught:
        RateLimit(budget="no/name")
    assert caught.value.name == "no/name"


def test_a_table_pays_from_the_source_that_it_is_given_also_where_it_has_travelled():
    table = RemoteTable(
        "paying", key="id", write_function=MemoryTable("paying"), rate_limit=RateLimit(None, 40)
    )
    source = Spent()
    paying = table.with_credit_source(source)
    asyncio.run(paying.put_all([(n, {"n": n}) for n in range(25)]))
    budget = Budget("paying", "write", 40)
    assert source.spent == [(budget, 10), (budget, 10), (budget, 5)]
    assert pickle.loads(pickle.dumps(paying)).credit_source.spent == source.spent
    assert table.credit_source is None


class Spent:
    """A source of all the credits one wants, which remembers what was spent."""

    def __init__(self):
        self.spent = []

    async def acquire(self, budget, credits):
        self.spent.append((budget, credits))

    async def close(self):
        pass


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_that_lets_nothing_through_is_refused(rate):
    with pytest.raises(ConfigurationError) as caught:
        RateLimit(writes_per_second=rate)
    assert caught.value.argument == "writes_per_second"


def acquire_after_cancelled(bucket: TokenBucket, cancelled: list[float], credits: float) -> None:
    """Acquire `credits` where waits for others have been cancelled before; fail where those
    still count.
    """

    async def run() -> None:
        others = [asyncio.create_task(bucket.acquire(wanted)) for wanted in cancelled]
        await asyncio.sleep(0.02)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.wait_for(bucket.acquire(credits), 60)

    asyncio.run(run())


def test_a_cancelled_wait_gives_its_credits_back():
    acquire_after_cancelled(TokenBucket(10, SystemClock()), [1.0] * 500, 1)  # those would take 50 s
    acquire_after_cancelled(TokenBucket(10, SystemClock()), [5000.0], 1)


def test_who_waits_behind_a_cancelled_wait_moves_up_and_keeps_the_order():
    bucket = TokenBucket(100, SystemClock())
    served: list[str] = []

    async def ask(name: str, credits: float) -> None:
        await bucket.acquire(credits)
        served.append(name)

    async def run() -> None:
        gone = asyncio.create_task(ask("gone", 50_000))
        others = [asyncio.create_task(ask(name, 10)) for name in ("first", "second")]
        await asyncio.sleep(0.01)
        gone.cancel()
        others.append(asyncio.create_task(ask("third", 10)))
        await asyncio.wait_for(asyncio.gather(*others), 60)

    asyncio.run(run())
    assert served == ["first", "second", "third"]


def test_who_waits_in_another_event_loop_moves_up_too():
    bucket = TokenBucket(100, SystemClock())
    waits = threading.Event()

    async def leave() -> None:
        gone = asyncio.create_task(bucket.acquire(100_000))
        await asyncio.sleep(0)
        waits.set()
        await asyncio.sleep(0.2)
        gone.cancel()
        await asyncio.wait([gone])

    def wait() -> None:
        waits.wait()
        asyncio.run(bucket.acquire(10))

    thread = threading.Thread(target=wait)
    thread.start()
    asyncio.run(leave())
    thread.join(timeout=300)
    assert not thread.is_alive()


@pytest.mark.lengthy
@given(
    steps=st.lists(
        st.tuples(st.floats(0, 1), st.integers(1, 25), st.booleans()), min_size=1, max_size=20
    )
)
def test_no_window_sees_more_than_the_rate_where_waits_are_cancelled(steps):
    """Each wait begins some time after the one before, and some are cancelled a moment later.

    Who moves up by that may notice it a quarter of a second late, and then comes together with
    those behind.
    """
    rate, look = 100.0, 0.25
    clock = HeldClock()
    bucket = TokenBucket(rate, clock)
    sent: list[tuple[float, int]] = []

    async def ask(credits: int) -> None:
        await bucket.acquire(credits)
        sent.append((clock.now(), credits))

    async def run() -> None:
        asked = []
        for idle, credits, leaves in steps:
            asked.append(asyncio.create_task(ask(credits)))
            await clock.move(0.01)
            if leaves:
                asked[len(asked) // 2].cancel()
            await clock.move(idle / 20)
        await clock.move(10)
        await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(run())
    for first, (start, _) in enumerate(sent):
        for last in range(first, len(sent)):
            allowed = (sent[last][0] - start + look) * rate + max(rate / 2, 1)
            assert sum(credits for _, credits in sent[first : last + 1]) <= allowed * (1 + 1e-6) + 2


class HeldClock:
    """Time that passes where `move` says so, in steps of a hundredth of a second."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sleeping: list[tuple[float, asyncio.Event]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._sleeping.append((self._now + seconds, woken))
        await woken.wait()

    async def move(self, seconds: float) -> None:
        end = self._now + seconds
        while self._now < end:
            self._now = min(end, self._now + 0.05)
            for due, woken in self._sleeping:
                if due <= self._now:
                    woken.set()
            for _ in range(6):
                await asyncio.sleep(0)

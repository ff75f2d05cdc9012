from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.tables import MemoryTable, RateLimit, RemoteTable
from dagster_adjunct.resources.tables.rate_limit import TokenBucket
from tests.resources.tables.manual_clock import ManualClock


def test_without_a_rate_nothing_waits():
    clock = ManualClock()
    asyncio.run(TokenBucket(None, clock).acquire(10**6))
    assert clock.slept == []


def test_records_go_out_at_the_rate():
    clock = ManualClock()
    bucket = TokenBucket(10, clock)

    async def thirty():
        for _ in range(30):
            await bucket.acquire(1)

    asyncio.run(thirty())
    assert clock.now() == pytest.approx(3.0)


def test_unused_credits_expire_after_two_seconds():
    clock = ManualClock()
    bucket = TokenBucket(10, clock)
    clock.advance(3600)
    asyncio.run(bucket.acquire(20))
    assert clock.slept == []
    asyncio.run(bucket.acquire(10))
    assert clock.slept == [pytest.approx(1.0)]


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
            size = bucket.largest(wanted)
            await bucket.acquire(size)
            sent.append((clock.now(), size))

    asyncio.run(run())
    for first, (start, _) in enumerate(sent):
        for last in range(first, len(sent)):
            allowed = (sent[last][0] - start) * rate + max(rate * 2, 1)
            assert sum(size for _, size in sent[first : last + 1]) <= allowed * (1 + 1e-6) + 1e-6


def test_a_table_reads_and_writes_at_its_own_rates_in_batches_no_larger_than_a_burst():
    clock = ManualClock()
    store = MemoryTable("rated")
    table = RemoteTable(
        "rated", key="id", read_function=store, write_function=store, rate_limit=RateLimit(100, 10), clock=clock
    )
    asyncio.run(table.put_all([(n, {"n": n}) for n in range(100)]))
    assert clock.now() == pytest.approx(10.0)
    assert max(clock.slept) <= 2.0 + 1e-9
    asyncio.run(table.get_all(range(100)))
    assert clock.now() == pytest.approx(10.0)  # 10 s without reads earned more than these 100


def test_a_shared_rate_is_split_over_the_tasks():
    assert RateLimit(100, 10).share(4) == RateLimit(25, 2.5)
    assert RateLimit().share(4) == RateLimit()
    store = MemoryTable("rated")
    table = RemoteTable("rated", key="id", write_function=store, rate_limit=RateLimit(None, 8))
    assert table.share(8).rate_limit == RateLimit(None, 1)


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_that_lets_nothing_through_is_refused(rate):
    with pytest.raises(ConfigurationError, match="above 0"):
        RateLimit(writes_per_second=rate)


def test_a_rate_needs_a_task_to_be_shared():
    with pytest.raises(ConfigurationError, match="0 tasks"):
        RateLimit(1, 1).share(0)

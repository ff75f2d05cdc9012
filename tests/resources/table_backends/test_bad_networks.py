"""Requests and answers are lost on the way to real servers, and servers stop and start: tables
equal plain Python.
"""

from __future__ import annotations

import asyncio
import threading
import time
from random import Random

import pytest

from dagster_adjunct.resources.tables.function_layer import FunctionLayer
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Operation,
    OperationKind,
    RowEntries,
    State,
)
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.resources.table_backends.reached_stores import QUICK
from tests.resources.tables.plain_oracle import (
    batches,
    counting,
    delivered_again,
    keeping_newest,
    messages,
    newest,
    record_of,
    totals,
)
from tests.servers.tcp_proxy import TcpProxy

PATIENT = RetryPolicy(attempts=4000, first_wait=0.002, max_wait=0.05, max_total=90)


@pytest.fixture(scope="module", params=QUICK)
def reached(request, tmp_path_factory):
    return request.param(request, tmp_path_factory.mktemp("bad"))


@pytest.fixture
def proxy(reached):
    with TcpProxy(reached.port).running() as proxy:
        yield proxy


def losing(seed: int, reached, chance: float = 0.3):
    """Requests that make a write stand are lost by this chance, before or after; others, as
    logins, rarely.
    """
    random = Random(seed)

    def choose(request: bytes):
        here = chance if any(words in request for words in reached.commits) else chance / 30
        return random.choice(["lost-before", "lost-after"]) if random.random() < here else None

    return choose


def table_over(store, **conditions) -> RemoteTable:
    return RemoteTable(
        "exact",
        key="id",
        read_function=store,
        write_function=store,
        batch_size=9,
        retry=PATIENT,
        **conditions,
    )


def run(work):
    return asyncio.run(asyncio.wait_for(work, 100))


async def done(table, operation) -> None:
    outcomes = await table.send(operation)
    assert all(problem.error is None for problem in outcomes.problems.values()), outcomes.problems


async def count_all(table, sent, seed, size=6, pause=0.0) -> None:
    """Each source in its order, all sources at once, with batches that come again."""

    async def source(number, own):
        for batch in delivered_again(batches(own, size), Random(seed * 10 + number)):
            await done(table, counting(batch))
            await asyncio.sleep(pause)

    await asyncio.gather(*(source(number, own) for number, own in enumerate(sent.values())))


def found(reached, name, keys) -> dict:
    """The records, read past the proxy."""
    store = reached.store(name)

    async def reading():
        async with RemoteTable("exact", key="id", read_function=store) as table:
            return await table.get_all(keys)

    return run(reading())


def totals_in(reached, name, keys) -> dict:
    return {key: record["total"] for key, record in found(reached, name, keys).items()}


def test_counters_are_exact_though_requests_and_answers_are_lost(reached, proxy):
    sent, name = messages(21, per_source=40), reached.new_name()
    expected = totals(message for own in sent.values() for message in own)
    proxy.choose = losing(1, reached)

    async def writing():
        async with table_over(reached.store(name, proxy.port), idempotent=True) as table:
            await count_all(table, sent, 21)
            proxy.calm()

    run(writing())
    assert {"lost-before", "lost-after"} <= set(proxy.befallen)
    assert totals_in(reached, name, expected) == expected


def test_an_increment_whose_answer_was_lost_counts_once(reached, proxy):
    """The one case on plan: the server commits, nobody hears of it, and the same entries are
    sent again.
    """
    batch, name = messages(4)["lake.clicks.0"][:5], reached.new_name()
    expected = totals(batch)

    async def writing():
        async with table_over(reached.store(name, proxy.port), idempotent=True) as table:
            # it is connected, and there
            await done(table, counting(messages(5, keys=1)["lake.clicks.0"][:1]))
            proxy.next("lost-after", holding=reached.commits[0])
            await done(table, counting([message for message in batch if message.key != "k0"]))
            return table.metrics.store.retries

    assert run(writing()) >= 1
    assert proxy.befallen == ["lost-after"]
    del expected["k0"]
    assert totals_in(reached, name, expected) == expected


def test_what_is_reported_of_an_entry_is_true_though_requests_and_answers_are_lost(reached, proxy):
    """DONE has taken effect once, FAILED not at all, and UNKNOWN once or not: nothing is sent
    again here.
    """
    name = reached.new_name()
    proxy.choose = losing(5, reached, 0.5)
    reported: dict[str, State | None] = {}

    async def writing():
        store = reached.store(name, proxy.port)
        layer = FunctionLayer("exact", store, store)
        for number in range(60):
            keys = [f"{number} {place}" for place in range(3)]
            defaults = [{"id": key, "total": 0} for key in keys]
            entries = RowEntries(keys, [Changes(add={"total": 1})] * 3, defaults)
            outcomes = await layer.send(Operation(OperationKind.UPDATE, entries))
            for place, key in enumerate(keys):
                reported[key] = (
                    outcomes.problems[place].state if place in outcomes.problems else None
                )
        proxy.calm()
        await layer.close()

    run(writing())
    kept = totals_in(reached, name, reported)
    allowed = {None: {1}, State.FAILED: {0}, State.UNKNOWN: {0, 1}}
    untrue = {
        key: (state, kept.get(key, 0))
        for key, state in reported.items()
        if kept.get(key, 0) not in allowed[state]
    }
    assert untrue == {}
    assert {None, State.UNKNOWN} <= set(reported.values())


def test_the_last_put_of_each_key_stays_though_requests_and_answers_are_lost(reached, proxy):
    name = reached.new_name()
    proxy.choose = losing(2, reached)

    async def writing():
        async with table_over(reached.store(name, proxy.port)) as table:
            for turn in range(4):
                await asyncio.gather(
                    *(
                        table.put(f"k{n % 5}", {"id": f"k{n % 5}", "total": turn * 100 + n})
                        for n in range(40)
                    )
                )
                await table.put_all(
                    [("k5", {"id": "k5", "total": turn}), ("k6", None), ("k5", None)]
                )
            await table.put("k6", {"id": "k6", "total": 1})
            proxy.calm()

    run(writing())
    assert proxy.befallen
    assert totals_in(reached, name, [f"k{n}" for n in range(8)]) == {
        f"k{n}": 335 + n for n in range(5)
    } | {"k6": 1}


def test_two_writers_and_replays_keep_the_newest_though_messages_are_lost(reached, proxy):
    sent, name = (
        [message for own in messages(22, per_source=40).values() for message in own],
        reached.new_name(),
    )
    expected = {key: record_of(message) for key, message in newest(sent).items()}
    proxy.choose = losing(3, reached, 0.2)

    async def writer(number):
        random = Random(number)
        async with table_over(reached.store(name, proxy.port), newest_by="seen") as table:
            for batch in batches(random.sample(sent, len(sent)), 20) + batches(
                random.sample(sent, 50), 10
            ):
                await done(table, keeping_newest(batch, epoch=number))

    async def two_writers():
        await asyncio.gather(writer(0), writer(1))
        proxy.calm()

    run(two_writers())
    kept = found(reached, name, expected)
    assert {
        key: {column: record[column] for column in expected[key]} for key, record in kept.items()
    } == expected


@pytest.mark.parametrize("times", [2, pytest.param(6, marks=pytest.mark.long)])
def test_counters_are_exact_though_the_server_stops_and_starts_under_load(reached, times):
    sent, name = messages(23, per_source=60 * times), reached.new_name()
    expected = totals(message for own in sent.values() for message in own)
    stopped = []

    def stop_and_start():
        for _ in range(times):
            time.sleep(0.1 if times == 2 else 1)
            reached.stop()
            stopped.append(time.monotonic())
            reached.start()

    async def writing():
        async with table_over(reached.store(name), idempotent=True) as table:
            await done(table, counting(messages(1, keys=1, sources=1)["lake.clicks.0"][:0]))
            stopping = asyncio.create_task(asyncio.to_thread(stop_and_start))
            await count_all(table, sent, 23, size=4, pause=0.01)
            finished = time.monotonic()
            await stopping  # what went wrong there fails the test
            return finished, table.metrics.store.retries

    finished, retries = run(writing())
    assert stopped[0] < finished
    assert retries > 0
    assert totals_in(reached, name, expected) == expected


def test_a_slow_and_thin_line_changes_nothing(reached):
    sent, name = messages(24, per_source=20), reached.new_name()
    expected = totals(message for own in sent.values() for message in own)

    async def writing(port):
        async with table_over(reached.store(name, port), idempotent=True) as table:
            await count_all(table, sent, 24)

    with TcpProxy(reached.port).running() as proxy:
        proxy.delay, proxy.bytes_per_second = 0.003, 200_000
        run(writing(proxy.port))
    assert totals_in(reached, name, expected) == expected


def test_connections_that_are_cut_at_any_moment_lose_and_repeat_nothing(reached):
    sent, name = messages(25, per_source=40), reached.new_name()
    expected = totals(message for own in sent.values() for message in own)
    ended, cuts = threading.Event(), []

    def cut_and_refuse(proxy):
        random = Random(0)
        while not ended.wait(random.uniform(0.04, 0.15)):
            proxy.cut()
            cuts.append(1)
            if random.random() < 0.2:
                proxy.refuse()
                ended.wait(0.03)
                proxy.accept()

    async def writing(proxy):
        async with table_over(reached.store(name, proxy.port), idempotent=True) as table:
            cutting = asyncio.create_task(asyncio.to_thread(cut_and_refuse, proxy))
            try:
                await count_all(table, sent, 25, pause=0.03)
            finally:
                ended.set()
                await cutting  # what went wrong there fails the test

    with TcpProxy(reached.port).running() as proxy:
        run(writing(proxy))
    assert len(cuts) >= 2
    assert totals_in(reached, name, expected) == expected

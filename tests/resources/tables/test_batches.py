"""Batches: what is gathered, when it is sent, and what becomes of callers whose entries were in
one request.
"""

from __future__ import annotations

import asyncio
import pickle

import pytest

from dagster_adjunct.resources.errors import ConfigurationError, TableError
from dagster_adjunct.resources.tables.batching import BatchProvider
from dagster_adjunct.resources.tables.functions import TableWriteFunction
from dagster_adjunct.resources.tables.operation import (
    Operation,
    OperationKind,
    estimate_bytes,
    group_preserving_key_order,
)
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.resources.tables.slow_store import BAD, SlowStore


def table_over(store, **settings) -> RemoteTable:
    return RemoteTable("t", key="id", read_function=store, write_function=store, **settings)


def run(scenario):
    async def within_time():
        return await asyncio.wait_for(scenario(), 120)

    return asyncio.run(within_time())


def test_calls_made_at_the_same_time_are_one_request():
    store = SlowStore()
    table = table_over(store)

    async def scenario():
        await asyncio.gather(*(table.put(n, {"n": n}) for n in range(500)))
        return await asyncio.gather(*(table.get(n) for n in range(500)))

    assert run(scenario) == [{"n": n} for n in range(500)]
    assert [(kind, len(keys)) for kind, keys in store.requests] == [("put", 500), ("get", 500)]


def test_calls_made_one_after_the_other_wait_for_nobody():
    store = SlowStore()
    table = table_over(store)

    async def scenario():
        for n in range(3):
            await table.put(n, {})

    run(scenario)
    assert store.requests == [("put", [0]), ("put", [1]), ("put", [2])]


def test_a_full_batch_goes_out_before_its_delay_is_over():
    store = SlowStore()
    table = table_over(store, batches=BatchProvider(size=3, delay=3600))

    async def scenario():
        tasks = []
        for n in range(3):
            assert store.requests == []
            tasks.append(asyncio.create_task(table.put(n, {})))
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)

    run(scenario)
    assert [keys for _, keys in store.requests] == [[0, 1, 2]]


def test_a_batch_that_is_not_full_goes_out_when_its_delay_is_over():
    store = SlowStore()
    table = table_over(store, batches=BatchProvider(size=3, delay=0.1))
    run(lambda: table.put(3, {}))
    assert [keys for _, keys in store.requests] == [[3]]


def test_bytes_bound_a_request_and_a_larger_entry_goes_alone():
    store = SlowStore()
    table = table_over(store, batches=BatchProvider(bytes=100))
    sizes = [30, 30, 30, 30, 500, 10, 10]
    entries = [(str(n), {"v": "x" * size}) for n, size in enumerate(sizes)]

    async def scenario():
        await table.put_all(entries)
        await asyncio.gather(*(table.put(*entry) for entry in entries))

    run(scenario)
    as_keys = [keys for _, keys in store.requests]
    assert as_keys[:4] == [["0", "1", "2"], ["3"], ["4"], ["5", "6"]]
    assert sorted(map(len, as_keys[4:])) == sorted(map(len, as_keys[:4]))
    assert estimate_bytes({"v": "xyz", "n": 1, "list": [None, b"12"]}) == 4 + 9 + 7


def test_puts_and_deletes_that_alternate_between_keys_are_two_requests():
    store = SlowStore()
    store.records = {n: {"old": True} for n in range(4000)}
    table = table_over(store, batch_size=4000)
    run(lambda: table.put_all([(n, {"n": n} if n % 2 else None) for n in range(4000)]))
    assert [(kind, len(keys)) for kind, keys in store.requests] == [("delete", 2000), ("put", 2000)]
    assert store.records == {n: {"n": n} for n in range(1, 4000, 2)}


def test_a_keys_put_delete_and_put_stay_in_order_and_a_get_sees_them():
    store = SlowStore()
    table = table_over(store)

    async def scenario():
        return await asyncio.gather(
            table.put("a", {"n": 1}),
            table.get("a"),
            table.delete("a"),
            table.get("a"),
            table.put("a", {"n": 2}),
        )

    assert run(scenario) == [None, {"n": 1}, None, None, None]
    assert store.records == {"a": {"n": 2}}
    assert [kind for kind, _ in store.requests] == ["put", "get", "delete", "get", "put"]


def test_entries_have_the_columns_that_their_callers_gave():
    class Seen(SlowStore):
        async def send(self, operation):
            seen.append(operation)
            return await super().send(operation)

    seen: list[Operation] = []
    table = table_over(Seen())

    async def scenario():
        await asyncio.gather(table.delete(1), table.delete(2), table.put(3, {}))
        await asyncio.gather(table.delete(1), table.put_all([(2, None), (3, {})]))

    run(scenario)
    assert [operation.kind.value for operation in seen] == ["delete", "put", "delete", "put"]
    for operation in seen:
        entries = operation.entries
        assert (entries.defaults, entries.marks, entries.newest) == (None, None, None)
        assert (entries.values is None) == (operation.kind is OperationKind.DELETE)


def test_waves_are_few_and_keep_the_order_of_each_key():
    assert group_preserving_key_order([], []) == []
    assert group_preserving_key_order("ppp", "aab") == [("p", range(3))]
    assert group_preserving_key_order("pdpd", "abcd") == [("p", [0, 2]), ("d", [1, 3])]
    assert group_preserving_key_order("pdp", "aaa") == [("p", [0]), ("d", [1]), ("p", [2])]
    # What is asked of b after its delete is in the second wave of puts, and c's put in the first.
    assert group_preserving_key_order("pdpp", "abbc") == [("p", [0, 3]), ("d", [1]), ("p", [2])]


def test_calls_with_other_arguments_are_requests_of_their_own():
    store = SlowStore()
    table = table_over(store)
    thing = object()

    async def scenario():
        await asyncio.gather(
            table.put("a", {}, 1),
            table.put("b", {}, True),
            table.put("c", {}, 1),
            table.put("d", {}, thing),
            table.put("e", {}, thing),
            table.put("f", {}, object()),
        )

    run(scenario)
    assert [keys for _, keys in store.requests] == [["a", "c"], ["b"], ["d", "e"], ["f"]]
    assert store.args[:2] == [(1,), (True,)]
    assert type(store.args[1][0]) is bool


def test_one_entry_that_fails_is_its_callers_problem_only():
    store = SlowStore()
    table = table_over(store)

    async def scenario():
        return await asyncio.gather(
            table.put("a", {"n": 1}),
            table.put("b", BAD),
            table.put("c", {"n": 3}),
            return_exceptions=True,
        )

    first, second, third = run(scenario)
    assert (first, third) == (None, None)
    assert isinstance(second, TableError)
    assert "table t: put of key 'b' failed: b is bad." in str(second)
    assert len(store.requests) == 1
    assert store.records == {"a": {"n": 1}, "c": {"n": 3}}


def test_what_is_wrong_with_one_callers_request_is_not_reported_to_the_others():
    class Strict(SlowStore):
        async def send(self, operation):
            if "bad" in operation.entries.keys:
                raise ValueError("nothing was sent")
            return await super().send(operation)

    store = Strict()
    table = table_over(store)

    async def scenario():
        return await asyncio.gather(
            table.put("a", {}), table.put("bad", {}), table.put("c", {}), return_exceptions=True
        )

    first, second, third = run(scenario)
    assert (first, third) == (None, None)
    assert isinstance(second, TableError)
    assert isinstance(second.__cause__, ValueError)
    assert "table t: put of key 'bad' failed: ValueError: nothing was sent" in str(second)
    assert sorted(store.records) == ["a", "c"]


def test_a_caller_that_is_cancelled_before_its_batch_is_sent_takes_its_entry_back():
    store = SlowStore()
    table = table_over(store, batches=BatchProvider(delay=0.01))

    async def scenario():
        first, second = (asyncio.create_task(table.put(key, {})) for key in "ab")
        await asyncio.sleep(0)
        first.cancel()
        await second

    run(scenario)
    assert store.requests == [("put", ["b"])]


def test_a_caller_that_is_cancelled_first_does_not_leave_the_others_waiting():
    store = SlowStore()
    table = table_over(store)

    async def scenario():
        first, second, third = (asyncio.create_task(table.put(key, {})) for key in "abc")
        asyncio.get_running_loop().call_soon(first.cancel)
        await asyncio.gather(second, third)
        assert first.cancelled()

    run(scenario)
    assert store.requests == [("put", ["b", "c"])]


def test_who_waits_for_a_key_behind_one_that_is_cancelled_still_gets_its_turn():
    store = SlowStore(lambda: 5)
    table = table_over(store, batch_size=1)

    async def scenario():
        first, second, third = (asyncio.create_task(table.put("a", {"n": n})) for n in range(3))
        for _ in range(3):
            await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, third)

    run(scenario)
    assert store.records == {"a": {"n": 2}}
    assert store.overlaps == []
    assert len(store.requests) == 2


def test_a_request_whose_callers_are_all_cancelled_ends():
    store = SlowStore(lambda: 10_000_000)
    table = table_over(store)

    async def scenario():
        tasks = [asyncio.create_task(table.put(key, {})) for key in "ab"]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await table.close()

    run(scenario)
    assert store.records == {}


def test_flush_and_close_lose_nothing():
    store = SlowStore()
    table = table_over(store, batches=BatchProvider(delay=60))

    async def scenario():
        tasks = [asyncio.create_task(table.put(n, {"n": n})) for n in range(10)]
        await table.flush()
        flushed = len(store.records)
        tasks += [asyncio.create_task(table.put(n, {"n": n})) for n in range(10, 20)]
        await table.close()
        await asyncio.gather(*tasks)
        return flushed

    assert run(scenario) == 10
    assert len(store.records) == 20
    assert store.closed == 1


def test_flush_waits_for_defaults_that_take_three_requests():
    from dagster_adjunct.resources.tables.operation import UpdateContract, UpdateMessage

    store = SlowStore(at_once=False)
    table = table_over(store, batches=BatchProvider(delay=60))

    async def scenario():
        message = [("a", UpdateMessage({"n": 1}, {"m": 2}))]
        task = asyncio.create_task(
            table.update_messages(message, UpdateContract.UPDATE_WITH_DEFAULTS)
        )
        await table.flush()
        stored = dict(store.records)
        await task
        return stored

    assert run(scenario) == {"a": {"n": 1, "m": 2}}


def test_requests_under_way_are_bounded_and_other_keys_overtake():
    store = SlowStore()
    table = table_over(store, batch_size=10, in_flight=3)
    run(lambda: table.put_all([(n, {}) for n in range(200)]))
    assert store.most_under_way == 3

    class Slow(TableWriteFunction[str, int, int]):
        done: list[str] = []  # noqa: RUF012

        async def put(self, key, value, *args):
            while value == "after b" and "b" not in self.done:
                await asyncio.sleep(0.001)
            self.done.append(key)

        async def delete(self, key, *args): ...

    slow = RemoteTable("t", key="id", write_function=Slow(), batch_size=1, in_flight=2)

    async def scenario():
        await asyncio.gather(slow.put("a", "after b"), slow.put("a", ""), slow.put("b", ""))

    run(scenario)
    assert Slow.done == ["b", "a", "a"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"size": True},
        {"size": 2.5},
        {"bytes": 0},
        {"delay": -1},
        {"delay": float("nan")},
        {"delay": float("inf")},
        {"delay": True},
    ],
)
def test_batches_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigurationError) as caught:
        BatchProvider(**wrong)
    assert caught.value.argument in wrong


@pytest.mark.parametrize("wrong", [0, True, 2.5, float("inf")])
def test_a_bound_that_is_no_number_of_requests_is_refused(wrong):
    with pytest.raises(ConfigurationError) as caught:
        table_over(SlowStore(), in_flight=wrong)
    assert caught.value.argument == "in_flight"


def test_what_is_reported_of_batches_travels_with_the_table():
    from dagster_adjunct.resources.table_backends.memory import MemoryTable

    batches = BatchProvider(size=7, bytes=10_000, delay=0.5)
    table = table_over(MemoryTable("travels"), batches=batches, in_flight=3)
    copy = pickle.loads(pickle.dumps(table))
    assert (copy.batches, copy.in_flight) == (batches, 3)
    with pytest.raises(ConfigurationError) as caught:
        table_over(SlowStore(), batches=batches, batch_size=3)
    assert caught.value.argument == "batches"

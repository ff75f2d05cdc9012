from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys

import pytest

from dagster_adjunct.resources.errors import ConfigurationError, InvalidNameError, NullKeyError
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.batching import KeyLock
from dagster_adjunct.resources.tables.functions import TableReadFunction, TableWriteFunction
from dagster_adjunct.resources.tables.metrics import RecordCounts, StoreCounts, TableMetrics
from dagster_adjunct.resources.tables.operation import (
    Operation,
    OperationKind,
    RowEntries,
    UpdateContract,
    UpdateMessage,
)
from dagster_adjunct.resources.tables.rate import RateLimit
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable


@pytest.fixture
def store(request) -> MemoryTable:
    store = MemoryTable(request.node.name)
    store.clear()
    return store


def table_over(store, **settings) -> RemoteTable:
    return RemoteTable("state", key="id", read_function=store, write_function=store, **settings)


def test_importing_the_table_api_loads_no_heavy_package():
    code = (
        "import sys, dagster_adjunct.resources.tables, dagster_adjunct.resources.table_backends;"
        "print([m for m in 'pyspark pandas boto3 psycopg'.split() if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_declaration_travels_without_connections_or_counts(store):
    table = table_over(
        store, retry=RetryPolicy(attempts=2), rate_limit=RateLimit(5, 5), batch_size=7
    )
    asyncio.run(table.put("a", {"n": 1}))
    data = pickle.dumps(table)
    assert len(data) < 1000
    copy = pickle.loads(data)
    assert repr(copy) == repr(table)
    assert copy.read_function is copy.write_function
    assert (copy.batch_size, copy.metrics) == (7, TableMetrics())
    assert asyncio.run(copy.get("a")) == {"n": 1}


def test_calls_are_cut_into_batches_and_counted(store):
    table = table_over(store, batch_size=10)
    asyncio.run(table.put_all([(n, {"n": n}) for n in range(25)]))
    records = asyncio.run(table.get_all([*range(20, 30), 20]))
    asyncio.run(table.delete_all([0, 1]))
    assert records == {n: {"n": n} for n in range(20, 25)}
    did = table.metrics
    assert (
        did.records.reads,
        did.records.found,
        did.records.writes,
        did.records.deletes,
        did.store.requests,
        did.store.successes,
    ) == (10, 5, 25, 2, 5, 5)
    assert (
        did.attempts.batch_sizes.count,
        did.attempts.batch_sizes.total,
        did.attempts.batch_sizes.greatest,
    ) == (5, 37, 10)
    assert (did.attempts.read_seconds.count, did.attempts.write_seconds.count) == (1, 4)


def test_metrics_add_up_over_tasks():
    retried = StoreCounts(retries=2)
    tasks = [TableMetrics(RecordCounts(updates=1), store=retried)]
    tasks.append(TableMetrics(RecordCounts(updates=3)))
    total = sum(tasks, TableMetrics())
    assert total == TableMetrics(RecordCounts(updates=4), store=retried)
    assert pickle.loads(pickle.dumps(total)) == total


@pytest.mark.parametrize("key", [None, ("a", None)])
def test_a_null_key_is_refused_before_anything_is_sent(store, key):
    table = table_over(store)
    message = UpdateMessage({"n": 1}, {"n": 0})
    for call in (
        lambda: table.get(key),
        lambda: table.get_all(["a", key]),
        lambda: table.put(key, {}),
        lambda: table.put_all([("a", {}), (key, {})]),
        lambda: table.delete(key),
        lambda: table.delete_all([key]),
        lambda: table.update(key, {}),
        lambda: table.update_all([(key, {})]),
        lambda: table.update_messages(
            [("a", message), (key, message)], UpdateContract.UPDATE_WITH_DEFAULTS
        ),
    ):
        with pytest.raises(NullKeyError) as caught:
            asyncio.run(call())
        assert caught.value.table == "state"
    assert asyncio.run(table.get("a")) is None


def test_none_as_a_value_deletes_also_among_others_and_in_order(store):
    table = table_over(store)

    async def scenario():
        await table.put_all([("a", {"n": 1}), ("b", {"n": 1}), ("c", {"n": 1})])
        await table.put("c", None)
        await table.put_all(
            [("a", None), ("b", {"n": 2}), ("a", {"n": 3}), ("b", None), ("d", None)]
        )
        return await table.get_all(["a", "b", "c", "d"])

    assert asyncio.run(scenario()) == {"a": {"n": 3}}


def test_a_table_without_functions_and_a_bad_name_are_refused(store):
    with pytest.raises(ConfigurationError, match="neither a read nor a write"):
        RemoteTable("state", key="id")
    with pytest.raises(InvalidNameError):
        RemoteTable("a/b", key="id", read_function=store)


def test_a_table_does_only_what_it_has_functions_for(store):
    with pytest.raises(ConfigurationError, match="no write function"):
        asyncio.run(RemoteTable("state", key="id", read_function=store).put("a", {}))
    with pytest.raises(ConfigurationError, match="no read function"):
        asyncio.run(RemoteTable("state", key="id", write_function=store).get("a"))


def test_extra_arguments_reach_the_function():
    class Echo(TableReadFunction[str, tuple], TableWriteFunction[str, tuple, tuple]):
        def __init__(self):
            self.seen = []

        async def get(self, key, *args):
            return args

        async def put(self, key, value, *args):
            self.seen.append(args)

        async def delete(self, key, *args):
            self.seen.append(args)

        async def update(self, key, update, *args):
            self.seen.append(args)

    echo = Echo()
    table = table_over(echo)

    async def all_of_them():
        assert await table.get_all(["a"], 1, "x") == {"a": (1, "x")}
        await table.put_all([("a", ())], 2)
        await table.delete_all(["a"], 3)
        await table.update_messages([("a", UpdateMessage(()))], UpdateContract.UPDATE_ONLY, 4)

    asyncio.run(all_of_them())
    assert echo.seen == [(2,), (3,), (4,)]


def test_operations_on_one_key_keep_their_order_while_others_overtake():
    class Slow(TableWriteFunction[str, int, int]):
        def __init__(self):
            self.done = []

        async def put(self, key, value, *args):
            while value == 1 and not self.done:
                await asyncio.sleep(0.001)
            self.done.append((key, value))

        async def delete(self, key, *args):
            self.done.append((key, None))

    slow = Slow()

    async def at_once():
        table = RemoteTable("state", key="id", write_function=slow)
        await asyncio.gather(
            table.put("a", 1),
            table.put("a", 2),
            table.put("b", 3),
            table.put_all([("a", 4), ("b", 5)]),
            table.delete("a"),
        )

    asyncio.run(at_once())
    assert [value for key, value in slow.done if key == "a"] == [1, 2, 4, None]
    assert [value for key, value in slow.done if key == "b"] == [3, 5]
    assert slow.done[0] == ("b", 3)


def test_who_waits_behind_a_cancelled_operation_still_waits_for_those_before_it():
    async def scenario():
        order, done, released = KeyLock(), [], asyncio.Event()

        async def work(name):
            turn = order.take(RowEntries(["k"]))
            try:
                await turn.acquire()
                if name == "first":
                    await released.wait()
                done.append(name)
            finally:
                turn.release()

        first = asyncio.create_task(work("first"))
        second = asyncio.create_task(work("second"))
        third = asyncio.create_task(work("third"))
        await asyncio.sleep(0.005)
        second.cancel()
        await asyncio.sleep(0.05)
        released.set()
        await asyncio.gather(first, second, third, return_exceptions=True)
        return done

    assert asyncio.run(scenario()) == ["first", "third"]


def test_the_blocking_form_has_the_same_operations(store):
    with BlockingTable(table_over(store)) as table:
        table.put("a", {"n": 1})
        table.put_all([("b", {"n": 2})])
        table.update("a", {"n": 3})
        table.update_all([("b", {"n": 4})])
        table.update_messages(
            [("c", UpdateMessage({"n": 5}, {"m": 6}))], UpdateContract.UPDATE_WITH_DEFAULTS
        )
        table.delete("a")
        table.delete_all(["b"])
        assert table.get("c") == {"n": 5, "m": 6}
        assert table.get_all(["a", "b", "c"]) == {"c": {"n": 5, "m": 6}}
        assert table.metrics.records.updates == 3
        assert table.send(Operation(OperationKind.GET, RowEntries(["c", "x"]))).records == [
            {"n": 5, "m": 6},
            None,
        ]
        table.flush()
        with pytest.raises(NullKeyError):
            table.get(None)
    table.put("d", {})  # a closed table opens again
    table.close()


def test_the_blocking_form_may_be_used_where_an_event_loop_runs(store):
    async def inside():
        with BlockingTable(table_over(store)) as table:
            table.put("a", {"n": 1})
            return table.get("a")

    assert asyncio.run(inside()) == {"n": 1}


def test_all_requests_are_made_of_the_send_of_a_subclass(store):
    asked = []

    class Audited(RemoteTable):
        async def send(self, operation):
            asked.append(operation.kind)
            return await super().send(operation)

    table = Audited("state", key="id", read_function=store, write_function=store)

    async def scenario():
        await table.put("a", {"n": 1})
        await table.update("a", {"n": 2})
        assert await table.get("a") == {"n": 2}
        await table.send(Operation(OperationKind.DELETE, RowEntries(("a",))))

    asyncio.run(scenario())
    kinds = OperationKind
    assert asked == [kinds.PUT, kinds.UPDATE, kinds.GET, kinds.DELETE]


def test_a_clock_that_is_none_is_refused(store):
    for clock in (1, object(), False):
        with pytest.raises(ConfigurationError) as caught:
            table_over(store, clock=clock)
        assert caught.value.argument == "clock"

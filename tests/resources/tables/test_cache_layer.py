from __future__ import annotations

import asyncio
import random
from types import MappingProxyType

import pytest

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.cache import Cache, CachedRecords, CacheLayer
from dagster_adjunct.resources.tables.functions import TableReadFunction, TableWriteFunction
from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.resources.tables.operation import (
    Operation,
    OperationKind,
    Outcomes,
    RowEntries,
    State,
)
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.resources.tables.manual_clock import ManualClock
from tests.resources.tables.scripted_layer import busy, failing, gets, updates

GET, PUT, DELETE = OperationKind.GET, OperationKind.PUT, OperationKind.DELETE


class Store:
    """Records in a dict, requests in a list; a request of a key in `gates` takes effect, and
    answers when told to.
    """

    def __init__(self, **records: object) -> None:
        self.records: dict = dict(records)
        self.sent: list[Operation] = []
        self.gates: list[asyncio.Future[None]] = []
        self.held = False
        self.answer = None

    async def send(self, operation: Operation) -> Outcomes:
        self.sent.append(operation)
        answer, self.answer = self.answer, None
        keys = operation.entries.keys
        records = None
        if operation.kind is GET:
            records = [
                self.records.get((key, str(operation.args)), self.records.get(key)) for key in keys
            ]
        elif operation.kind is PUT:
            self.records.update(zip(keys, operation.entries.values, strict=True))
        elif operation.kind is DELETE:
            for key in keys:
                self.records.pop(key, None)
        if self.held:
            gate = asyncio.get_running_loop().create_future()
            self.gates.append(gate)
            await gate
        return answer(operation) if answer else Outcomes(len(operation), records)

    async def close(self) -> None:
        pass


def cached(store: Store, clock: ManualClock | None = None, **cache) -> tuple[CacheLayer, Meter]:
    meter = Meter()
    return CacheLayer(store, Cache(**cache), meter, clock or ManualClock()), meter


def got(layer: CacheLayer, *keys, args=()) -> list:
    return list(asyncio.run(layer.send(Operation(GET, RowEntries(list(keys)), args))).records)


def put(layer: CacheLayer, **values) -> Outcomes:
    return asyncio.run(layer.send(Operation(PUT, RowEntries(list(values), list(values.values())))))


def delete(layer: CacheLayer, *keys) -> None:
    asyncio.run(layer.send(Operation(DELETE, RowEntries(list(keys)))))


def test_a_record_is_read_once_and_only_what_is_not_known_is_asked_for():
    store = Store(a={"n": 1}, b={"n": 2}, c={"n": 3})
    layer, meter = cached(store)
    assert got(layer, "a", "b") == [{"n": 1}, {"n": 2}]
    assert got(layer, "c", "a", "b", "c") == [{"n": 3}, {"n": 1}, {"n": 2}, {"n": 3}]
    assert got(layer, "a") == [{"n": 1}]
    assert [operation.entries.keys for operation in store.sent] == [["a", "b"], ["c", "c"]]
    counts = meter.metrics()
    assert (counts.cache.hits, counts.cache.misses, counts.cache.evictions) == (3, 4, 0)


def test_a_get_of_no_keys_is_answered_and_later_gets_and_writes_are_kept():
    store = Store(a=1)
    layer, _ = cached(store)
    assert got(layer) == []
    put(layer, b=2)
    assert got(layer, "a", "b") == [1, 2]
    assert [operation.entries.keys for operation in store.sent] == [["b"], ["a"]]


def test_write_through_keeps_a_put_and_write_around_reads_it_again():
    for on_write, reads in (("through", 0), ("around", 1)):
        store = Store(a={"n": 1})
        layer, _ = cached(store, on_write=on_write)
        got(layer, "a")
        put(layer, a={"n": 2})
        assert got(layer, "a") == [{"n": 2}]
        assert sum(operation.kind is GET for operation in store.sent) == 1 + reads


def test_a_deleted_record_is_gone_and_updates_forget():
    store = Store(a={"n": 1}, b={"n": 1})
    layer, _ = cached(store)
    got(layer, "a", "b")
    delete(layer, "a")
    store.records["b"] = {"n": 5}
    asyncio.run(layer.send(updates("b", set={"n": 5})))
    assert got(layer, "a", "b") == [None, {"n": 5}]


def test_that_there_is_no_record_is_known_only_if_declared():
    for absent, reads in ((False, 2), (True, 1)):
        store = Store()
        layer, _ = cached(store, absent=absent)
        assert got(layer, "a") == got(layer, "a") == [None]
        assert len(store.sent) == reads
        put(layer, a={"n": 1})
        assert got(layer, "a") == [{"n": 1}]
        delete(layer, "a")
        assert got(layer, "a") == [None]
        assert len(store.sent) == reads + (2 if absent else 3)


def test_records_expire_after_they_were_written_and_after_they_were_last_read():
    clock, store = ManualClock(), Store(a=1)
    layer, _ = cached(store, clock, seconds_after_write=10)
    got(layer, "a")
    clock.advance(9)
    got(layer, "a")
    assert len(store.sent) == 1
    clock.advance(1)
    got(layer, "a")
    assert len(store.sent) == 2
    clock, store = ManualClock(), Store(a=1)
    layer, _ = cached(store, clock, seconds_after_write=100, seconds_after_read=10)
    for _ in range(10):
        got(layer, "a")
        clock.advance(9)
    assert len(store.sent) == 1
    clock.advance(1)
    got(layer, "a")
    assert len(store.sent) == 2


def test_the_record_that_was_not_asked_for_the_longest_makes_room():
    store = Store(a=1, b=2, c=3)
    layer, meter = cached(store, size=2)
    got(layer, "a")
    got(layer, "b")
    got(layer, "a")
    got(layer, "c")  # b goes
    assert len(layer) == 2
    got(layer, "a", "c")
    assert len(store.sent) == 3
    got(layer, "b")
    assert len(store.sent) == 4
    assert meter.metrics().cache.evictions == 2


def test_arguments_are_part_of_what_is_asked_for_and_a_write_forgets_them_all():
    store = Store(a=0)
    store.records |= {("a", "('eu',)"): 1, ("a", "('us',)"): 2}
    layer, _ = cached(store)
    assert got(layer, "a", args=("eu",)) == [1]
    assert got(layer, "a", args=("us",)) == [2]
    assert got(layer, "a") == [0]
    assert got(layer, "a", args=("us",)) == [2]
    assert len(store.sent) == 3
    put(layer, a=7)
    store.records |= {("a", "('eu',)"): 8}
    assert got(layer, "a", args=("eu",)) == [8]
    assert got(layer, "a", args=([],)) == [7]  # what has no hash is asked for each time
    assert got(layer, "a", args=([],)) == [7]
    assert len(store.sent) == 7


@pytest.mark.parametrize("state", [State.FAILED, State.UNKNOWN, State.REFUSED, State.SKIPPED])
def test_a_write_that_is_not_done_leaves_nothing_known(state):
    store = Store(a={"n": 1}, b={"n": 1})
    layer, _ = cached(store)
    got(layer, "a", "b")
    store.answer = failing(0, problem=busy(state))
    put(layer, a={"n": 2}, b={"n": 2})
    store.records["a"] = {"n": 3}  # whatever it came to
    assert got(layer, "a", "b") == [{"n": 3}, {"n": 2}]


def test_a_get_that_failed_is_not_kept():
    store = Store(a=1, b=2)
    layer, _ = cached(store, absent=True)
    store.answer = lambda op: Outcomes(2, [None, 2], {0: busy()})
    asyncio.run(layer.send(gets("a", "b")))
    assert got(layer, "a", "b") == [1, 2]
    assert [operation.entries.keys for operation in store.sent] == [["a", "b"], ["a"]]


def test_a_slow_read_never_covers_a_newer_write():
    async def race(on_write: str, first: str) -> object:
        """A get has read the store when a put comes; they answer in this order."""
        store = Store(a="old")
        layer, _ = cached(store, on_write=on_write)
        store.held = True
        reading = asyncio.create_task(layer.send(gets("a")))
        await asyncio.sleep(0)
        writing = asyncio.create_task(layer.send(Operation(PUT, RowEntries(["a"], ["new"]))))
        await asyncio.sleep(0)
        read, write = store.gates
        for gate, task in (
            ((read, reading), (write, writing))
            if first == "read"
            else ((write, writing), (read, reading))
        ):
            gate.set_result(None)
            await task
        assert (await reading).records == ["old"]
        store.held = False
        (known,) = (await layer.send(gets("a"))).records
        return known

    for on_write in ("through", "around"):
        for first in ("read", "write"):
            assert asyncio.run(race(on_write, first)) == "new"


def test_a_slow_read_never_covers_a_write_that_came_and_went_meanwhile():
    async def run() -> object:
        store = Store(a="old")
        layer, _ = cached(store)
        store.held = True
        reading = asyncio.create_task(layer.send(gets("a")))
        await asyncio.sleep(0)
        store.held = False
        await layer.send(Operation(PUT, RowEntries(["a"], ["new"])))
        await layer.send(Operation(DELETE, RowEntries(["a"])))
        store.gates[0].set_result(None)
        await reading
        (known,) = (await layer.send(gets("a"))).records
        return known

    assert asyncio.run(run()) is None


def test_of_two_writes_the_one_called_last_is_known_whichever_answers_first():
    async def run(order: list[int]) -> object:
        store = Store()
        layer, _ = cached(store)
        store.held = True
        writes = [
            asyncio.create_task(layer.send(Operation(PUT, RowEntries(["a"], [n]))))
            for n in ("first", "second")
        ]
        await asyncio.sleep(0)
        for place in order:
            store.gates[place].set_result(None)
            await writes[place]
        store.held = False
        (known,) = (await layer.send(gets("a"))).records
        return known

    assert asyncio.run(run([0, 1])) == asyncio.run(run([1, 0])) == "second"


def test_a_cancelled_write_leaves_nothing_known():
    async def run() -> object:
        store = Store(a="old")
        layer, _ = cached(store)
        await layer.send(gets("a"))
        store.held = True
        writing = asyncio.create_task(layer.send(Operation(PUT, RowEntries(["a"], ["new"]))))
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        store.held = False
        return (await layer.send(gets("a"))).records[0]

    assert asyncio.run(run()) == "new"


@pytest.mark.parametrize("seed", range(8))
def test_at_any_interleaving_what_is_read_at_the_end_is_what_the_store_holds(seed):
    chance = random.Random(seed)

    class Slow(Store):
        async def send(self, operation):
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            outcomes = await super().send(operation)
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
            return outcomes

    async def run() -> None:
        store = Slow()
        cache = Cache(
            size=4, on_write=chance.choice(["through", "around"]), absent=chance.random() < 0.5
        )
        table = CacheLayer(store, cache, clock=ManualClock())
        order = {key: asyncio.Lock() for key in "abc"}  # the layers below keep the order of a key

        async def ordered(key, number):
            if chance.random() < 0.5:
                return await table.send(gets(key))
            kind = chance.choice([PUT, DELETE])
            return await table.send(
                Operation(kind, RowEntries([key], [number] if kind is PUT else None))
            )

        class Below:
            async def send(self, operation):
                async with order[operation.entries.keys[0]]:
                    return await store.send(operation)

        table._below = Below()
        await asyncio.gather(*(ordered(chance.choice("abc"), number) for number in range(200)))
        for key in "abc":
            assert (await table.send(gets(key))).records == [store.records.get(key)]

    asyncio.run(run())


def test_records_that_callers_change_stay_as_they_were():
    layer, _ = cached(Store(a={"n": 1}))
    got(layer, "a")[0]["n"] = 9
    got(layer, "a")[0]["n"] = 9
    mine = {"n": 3}
    put(layer, b=mine)
    mine["n"] = 9
    assert got(layer, "a", "b") == [{"n": 1}, {"n": 3}]


def test_a_table_caches_what_it_reads_and_writes_and_reports_how_often():
    async def run() -> None:
        store = MemoryTable("cached")
        store.clear()
        table = RemoteTable("t", key="id", read_function=store, write_function=store, cache=Cache())
        await table.put_all([(n, {"n": n}) for n in range(3)])
        assert await table.get_all([0, 1, 2, 3]) == {n: {"n": n} for n in range(3)}
        await table.update(1, {"n": 7})
        assert await table.get(1) == {"n": 7}
        putting = asyncio.create_task(table.put(2, {"n": 9}))
        await asyncio.sleep(0)
        assert await table.get(2) == {"n": 9}  # called after the put, so it sees it
        await putting
        counts = table.metrics
        assert (counts.cache.hits, counts.cache.misses) == (3, 3)

    asyncio.run(run())


def test_a_cache_and_conditions_are_refused_together():
    store = MemoryTable("cached")
    for conditions in ({"newest_by": "time"}, {"idempotent": True}):
        with pytest.raises(ConfigurationError) as caught:
            RemoteTable("t", key="id", write_function=store, cache=Cache(), **conditions)
        assert caught.value.argument == "cache"


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"size": 2.5},
        {"seconds_after_write": 0},
        {"seconds_after_read": -1},
        {"on_write": "back"},
    ],
)
def test_a_cache_that_cannot_work_is_refused(wrong):
    with pytest.raises(ConfigurationError):
        Cache(**wrong)


def test_arguments_of_different_types_are_different_requests():
    kept = CachedRecords(Cache())
    for number, args in enumerate(((1,), (True,), (1.0,), ())):
        kept.keep(["k"], [{"n": number}], args, 0.0)
    assert [kept.find(["k"], args, 1.0)[0] for args in ((1,), (True,), (1.0,), ())] == [
        [{"n": number}] for number in range(4)
    ]
    assert kept.find([("k", (1, int))], (), 1.0) == ([None], [0]), (
        "a key that looks like one with arguments"
    )
    kept.forget(["k"])
    assert len(kept) == 0
    kept.keep(["k"], [{"n": 1}], (1,), 0.0)
    assert kept.find(["k"], (1,), 100.0) == ([None], [0]), "it has expired"
    assert len(kept) == 0


def test_a_record_that_can_not_be_copied_is_not_kept():
    class Records(TableReadFunction, TableWriteFunction):
        def __init__(self):
            self.stored = {"a": MappingProxyType({"n": 1})}

        async def get(self, key, *args):
            return self.stored.get(key)

        async def put(self, key, value, *args):
            self.stored[key] = value

        async def delete(self, key, *args):
            self.stored.pop(key, None)

    function = Records()
    table = RemoteTable(
        "t", key="id", read_function=function, write_function=function, cache=Cache()
    )

    async def scenario():
        opaque = await table.get("a")
        await table.put_all([("b", {"n": memoryview(b"x")}), ("c", {"n": 3})])
        return opaque, await table.get("b"), await table.get("c")

    opaque, with_view, plain = asyncio.run(scenario())
    assert (opaque["n"], bytes(with_view["n"]), plain) == (1, b"x", {"n": 3})


@pytest.mark.parametrize("args", [(), ("v2",)])
def test_a_record_that_a_later_get_did_not_find_is_not_kept(args):
    kept = CachedRecords(Cache(size=2))
    kept.keep(["a", "b"], [{"n": 1}, {"n": 2}], args, 0.0)
    kept.keep(["a"], [None], args, 1.0)
    assert kept.find(["a", "b"], args, 2.0) == ([None, {"n": 2}], [0])
    kept.keep(["c"], [{"n": 3}], args, 2.0)
    assert kept.find(["b", "c"], args, 3.0) == ([{"n": 2}, {"n": 3}], [])

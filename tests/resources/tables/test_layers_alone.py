"""Each layer by itself, over a function, and as the function of another table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from dagster_adjunct.resources.errors import RecordNotFoundError
from dagster_adjunct.resources.tables.operation import UpdateContract, UpdateMessage
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.tables import (
    AttemptLayer,
    BatchLayer,
    BatchProvider,
    CacheLayer,
    FunctionLayer,
    Layer,
    LayerAsFunction,
    Operation,
    OperationKind,
    RateLayer,
    RateLimit,
    RetryLayer,
    RowEntries,
    State,
    UpdateContractLayer,
)
from tests.resources.tables.slow_store import BAD, SlowStore

GET, PUT, UPDATE = OperationKind.GET, OperationKind.PUT, OperationKind.UPDATE


def function(store: SlowStore) -> Layer:
    return FunctionLayer("t", store, store)


def batch(store: SlowStore) -> Layer:
    return BatchLayer(store, batches=BatchProvider(size=2))


def contract(store: SlowStore) -> Layer:
    return UpdateContractLayer(store, table="t", capabilities=store.capabilities)


def all_of_them(store: SlowStore) -> Layer:
    below = UpdateContractLayer(
        FunctionLayer("t", store, store), table="t", capabilities=store.capabilities
    )
    return BatchLayer(below, batches=BatchProvider(size=2))


def retry(store: SlowStore) -> Layer:
    return RetryLayer(store)


def rate(store: SlowStore) -> Layer:
    return RateLayer("t", store, RateLimit(10_000, 10_000))


def attempt(store: SlowStore) -> Layer:
    return AttemptLayer("t", store, timeout=30.0)


def cache(store: SlowStore) -> Layer:
    return CacheLayer(store)


LAYERS = pytest.mark.parametrize(
    "layer", [function, batch, contract, retry, rate, attempt, cache, all_of_them]
)
ONE_OR_THREE = pytest.mark.parametrize("at_once", [True, False])


@LAYERS
def test_a_layer_alone_reports_an_outcome_for_each_entry(layer: Callable[[SlowStore], Layer]):
    store = SlowStore()

    async def scenario():
        mine = layer(store)
        put = await mine.send(
            Operation(PUT, RowEntries("abcde", [{"n": 1}, BAD, {"n": 3}, BAD, {"n": 5}]))
        )
        got = await mine.send(Operation(GET, RowEntries("abcde")))
        updated = await mine.send(
            Operation(
                UPDATE, RowEntries("ab", [{"m": 1}, {"m": 2}]), contract=UpdateContract.UPDATE_ONLY
            )
        )
        nothing = await mine.send(Operation(PUT, RowEntries([], [])))
        await mine.close()
        return put, got, updated, nothing

    put, got, updated, nothing = asyncio.run(scenario())
    assert (put.count, put.places(State.REFUSED), put.done) == (5, [1, 3], 3)
    assert list(got.records) == [{"n": 1}, None, {"n": 3}, None, {"n": 5}]
    assert updated.places(State.MISSING) == [1]
    assert nothing.count == 0
    assert store.closed == 1


@LAYERS
@ONE_OR_THREE
def test_a_layer_serves_as_the_function_of_a_table(
    layer: Callable[[SlowStore], Layer], at_once: bool
):
    store = SlowStore(at_once=at_once)
    mine = LayerAsFunction(layer(store), store.capabilities)
    table = RemoteTable("over", key="id", read_function=mine, write_function=mine)

    async def scenario():
        async with table:
            await table.put_all([("a", {"n": 1}), ("b", {"n": 2}), ("c", {"n": 3})])
            await table.put_all([("b", None), ("c", {"n": 4})])
            await table.update_messages(
                [("a", UpdateMessage({"m": 1})), ("d", UpdateMessage({"m": 2}, {"n": 0}))],
                UpdateContract.UPDATE_WITH_DEFAULTS,
            )
            with pytest.raises(RecordNotFoundError) as missing:
                await table.update_all([("a", {"m": 7}), ("x", {"m": 8})])
            assert missing.value.keys == ("x",)
            return await table.get_all(list("abcdx"))

    assert asyncio.run(scenario()) == {"a": {"n": 1, "m": 7}, "c": {"n": 4}, "d": {"n": 0, "m": 2}}
    assert store.closed == 1

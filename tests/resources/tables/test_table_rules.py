"""What callers may give a table, and what they are told."""

from __future__ import annotations

import asyncio
import copy
import pickle

import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    NullKeyError,
    RecordNotFoundError,
    TableError,
    TableUnavailableError,
)
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.functions import TableReadFunction, TableWriteFunction
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    RowEntries,
    State,
    UpdateContract,
)
from dagster_adjunct.resources.tables.rate import LocalCredits
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import RemoteTable, error_from_outcomes
from tests.resources.tables.slow_store import BAD, SlowStore


def table_over(store, **settings) -> RemoteTable:
    return RemoteTable("t", key="id", read_function=store, write_function=store, **settings)


def test_empty_calls_make_no_request():
    store = SlowStore()
    table = table_over(store)

    async def scenario():
        assert await table.get_all([]) == {}
        await table.put_all([])
        await table.delete_all([])
        await table.update_all([])
        await table.update_messages([], UpdateContract.UPDATE_WITH_DEFAULTS)
        for kind in OperationKind:
            assert (await table.send(Operation(kind, RowEntries([])))).count == 0
        await table.flush()

    asyncio.run(scenario())
    assert store.requests == []


def test_null_keys_and_updates_are_refused_before_anything_is_sent():
    store = SlowStore()
    table = table_over(store)
    for kind in OperationKind:
        for key in (None, ("a", None)):
            with pytest.raises(NullKeyError) as caught:
                asyncio.run(table.send(Operation(kind, RowEntries(["a", key], [{}, {}]))))
            assert caught.value.table == "t"
    for kind in (OperationKind.UPDATE, OperationKind.PUT_IF_ABSENT):
        with pytest.raises(TableError, match=f"got None to {kind.value} for key 'b'"):
            asyncio.run(table.send(Operation(kind, RowEntries(["a", "b"], [{}, None]))))
    with pytest.raises(TableError, match="expected an UpdateMessage"):
        asyncio.run(RemoteTable.update_messages.__wrapped__(table, [("a", {"n": 1})]))
    assert store.requests == []


def test_a_key_that_cannot_be_one_is_its_callers_error_only():
    store = SlowStore()
    table = table_over(store)

    async def scenario():
        wrong = Operation(OperationKind.PUT, RowEntries([["a"]], [{}]))
        return await asyncio.gather(
            table.put("b", {}), table.send(wrong), table.put("c", {}), return_exceptions=True
        )

    first, second, third = asyncio.run(scenario())
    assert (first, third) == (None, None)
    assert "got a key that is not hashable: unhashable type" in str(second)
    assert sorted(store.records) == ["b", "c"]


def test_views_sets_and_iterators_are_collections_too():
    store = SlowStore()
    table = table_over(store)
    records = {"a": {"n": 1}, "b": {"n": 2}}

    async def scenario():
        await table.put_all(list(records.items()))
        assert await table.get_all(set(records)) == records
        assert await table.get_all(records.keys()) == records
        await table.delete_all({"a"})
        await table.update_all({"b": {"m": 1}}.items())

    asyncio.run(scenario())
    assert store.records == {"b": {"n": 2, "m": 1}}


def test_entries_that_are_not_pairs_are_named():
    table = table_over(SlowStore())
    for wrong in (
        {"a": {"n": 1}},
        {("a", 1)},
        frozenset({("a", 1)}),
        ["ab", "c"],
        ["ab", "cd"],
        [("a", 1, 2)],
        [5],
        5,
    ):
        with pytest.raises((TableError, ConfigurationError), match=r"pairs|expected"):
            asyncio.run(table.put_all(wrong))


@pytest.mark.parametrize("key", [[], "", {"a", "b"}, ["a", "a"], [1], ["a", ""]])
def test_a_key_that_is_no_ordered_list_of_columns_is_refused(key):
    with pytest.raises(ConfigurationError) as caught:
        RemoteTable("t", key=key, read_function=SlowStore())
    assert caught.value.argument == "key"


def test_an_error_names_table_operation_and_key_and_keeps_its_cause():
    class Broken(TableReadFunction, TableWriteFunction):
        async def get(self, key, *args):
            raise KeyError("what")

        async def put(self, key, value, *args):
            raise TableUnavailableError("the store is busy.", "Wait.")

        async def delete(self, key, *args):
            raise TableError("not allowed.", "Ask.", table="theirs")

        def is_retriable(self, error):
            return isinstance(error, OSError)

    table = table_over(Broken(), retry=RetryPolicy(attempts=1))
    with pytest.raises(
        TableError, match="table t: get of key 'a' failed: KeyError: 'what'"
    ) as error:
        asyncio.run(table.get("a"))
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(
        TableUnavailableError,
        match=r"table t: put of key 'a' and 1 more failed: the store is busy. Wait",
    ):
        asyncio.run(table.put_all([("a", {}), ("b", {})]))
    with pytest.raises(TableError, match="table t: delete of key 'a' failed: not allowed") as error:
        asyncio.run(table.delete("a"))
    assert error.value.table == "t"
    assert isinstance(error.value.__cause__, TableError)


def test_the_other_entries_of_a_call_take_effect():
    store = SlowStore()
    with pytest.raises(TableError, match="key 'b' and 1 more"):
        asyncio.run(table_over(store).put_all([("a", {}), ("b", BAD), ("c", {}), ("d", BAD)]))
    assert store.records == {"a": {}, "c": {}}


def test_an_error_reports_also_of_entries_that_failed_in_other_ways():
    problems = {
        1: Problem(State.REFUSED, ValueError("no number")),
        2: Problem(State.FAILED, TableUnavailableError("the store is busy.", "Wait.")),
        3: Problem(State.REFUSED, ValueError("no number, either")),
        4: Problem(State.MISSING, RecordNotFoundError("there is no record.", "Put it.")),
    }
    updates = Operation(OperationKind.UPDATE, RowEntries(list("abcde"), [{"n": 1}] * 5))
    error = error_from_outcomes("t", updates, Outcomes(5, problems=problems))
    assert isinstance(error, TableError)
    assert (
        error.problem
        == "table t: update of key 'b' and 1 more failed: ValueError: no number. Also, update of"
        " key 'c' failed: the store is busy. Also, update of key 'e' failed: there is no record."
    )


def test_arguments_that_a_function_has_no_use_for_are_refused():
    table = table_over(MemoryTable("takes-no-args"))
    for call in (
        lambda: table.get("a", 1),
        lambda: table.put("a", {}, 1),
        lambda: table.update("a", {}, 1),
    ):
        with pytest.raises(ConfigurationError, match="does not accept"):
            asyncio.run(call())


class Special(RemoteTable):
    """A table of a user, with something of its own."""

    greeting = "hello"

    def __init__(self, name, *, tenant="nobody", **settings):
        super().__init__(name, **settings)
        self.tenant, self._prefix = tenant, f"{tenant}/"

    async def send(self, operation):
        entries = operation.entries
        keys = [self._prefix + key for key in entries.keys]
        return await super().send(
            operation.with_entries(RowEntries(keys, entries.values, entries.defaults))
        )


def test_a_subclass_of_a_table_stays_one_when_it_travels():
    table = Special("t", key=["b", "a"], write_function=MemoryTable("special"), in_flight=2)
    arrived = pickle.loads(pickle.dumps(table))
    assert (type(arrived), arrived.key, arrived.in_flight) == (Special, ("b", "a"), 2)


def test_what_a_subclass_keeps_for_itself_goes_with_it():
    store = MemoryTable("kept")
    table = Special("t", key="id", read_function=store, write_function=store, tenant="acme")
    paying = table.with_credit_source(LocalCredits())
    for number, instance in enumerate(
        (pickle.loads(pickle.dumps(table)), paying, copy.copy(table), table)
    ):
        asyncio.run(instance.put(f"k{number}", {"n": number}))
        assert (instance.tenant, instance._prefix) == ("acme", "acme/")
        assert instance.metrics.records.writes == 1, "what it has done is its own"
    assert sorted(store.records()) == [f"acme/k{number}" for number in range(4)]


def test_the_parts_of_a_key_are_named_to_the_function_in_the_tables_order():
    class Names(SlowStore):
        names = ()

        async def send(self, operation):
            self.names = operation.key
            return await super().send(operation)

    store = Names()
    asyncio.run(RemoteTable("t", key=["b", "a"], write_function=store).put((1, 2), {}))
    assert store.names == ("b", "a")


@pytest.mark.parametrize("remove", ["n", "note", ""])
def test_a_text_is_no_list_of_columns_to_remove(remove):
    with pytest.raises(ConfigurationError) as caught:
        Changes(remove=remove)
    assert caught.value.argument == "remove"
    Changes(remove=["n"])

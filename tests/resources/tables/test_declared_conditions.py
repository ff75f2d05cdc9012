"""What a table declares is checked by the store with every write, of direct calls, too."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from dagster_adjunct.resources.errors import ConfigurationError, TableError
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Conditions,
    Mark,
    Operation,
    OperationKind,
    RowEntries,
    State,
    UpdateContract,
    UpdateMessage,
    position_of,
)
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.resources.tables.slow_store import SlowStore


@pytest.fixture
def store(request) -> MemoryTable:
    store = MemoryTable(request.node.name)
    store.clear()
    return store


def table_over(store, **settings) -> RemoteTable:
    return RemoteTable("t", key="id", read_function=store, write_function=store, **settings)


def run(*calls):
    async def one_after_the_other():
        return [await call for call in calls]

    return asyncio.run(one_after_the_other())


def test_a_direct_call_that_is_older_than_the_record_changes_nothing(store):
    table = table_over(store, newest_by="at")
    run(
        table.put("a", {"at": 5, "n": 1}),
        table.put("a", {"at": 4, "n": 2}),
        table.update("a", {"at": 3, "n": 3}),
    )
    assert run(table.get("a")) == [{"at": 5, "n": 1}]
    run(table.put("a", {"at": 5, "n": 4}), table.update("a", Changes(set={"at": 6, "m": 1})))
    assert run(table.get("a")) == [{"at": 6, "n": 4, "m": 1}]


def test_of_equal_times_a_direct_call_comes_after_messages(store):
    table = table_over(store, newest_by="at")
    message = RowEntries(
        ["a"], [{"at": 5, "n": 1}], None, [Mark("lake.flights.9", position_of(3, 99))]
    )
    run(table.put("a", {"at": 5, "n": 2}), table.send(Operation(OperationKind.PUT, message)))
    assert run(table.get("a")) == [{"at": 5, "n": 2}]


@pytest.mark.parametrize("kind", ["put", "update", "delete", "put None"])
def test_without_a_time_nothing_is_sent(store, kind):
    table = table_over(store, newest_by="at")
    run(table.put("a", {"at": 5}))
    call = {
        "put": lambda: table.put("a", {"n": 1}),
        "update": lambda: table.update("a", {"n": 1}),
        "delete": lambda: table.delete("a"),
        "put None": lambda: table.put_all([("b", {"at": 1}), ("a", None)]),
    }[kind]
    with pytest.raises(TableError, match="of key 'a' has no at, which newest_by needs"):
        run(call())
    assert run(table.get_all(["a", "b"])) == [{"a": {"at": 5}}]


def test_a_delete_with_its_time_keeps_what_is_late_away(store):
    table = table_over(store, newest_by="at")
    gone = RowEntries(["a"], newest=[7])
    run(
        table.put("a", {"at": 5}),
        table.send(Operation(OperationKind.DELETE, gone)),
        table.put("a", {"at": 6}),
    )
    assert run(table.get("a")) == [None]
    run(table.put("a", {"at": 8}))
    assert run(table.get("a")) == [{"at": 8}]


def test_a_delete_says_its_time(store):
    table = table_over(store, newest_by="at")
    run(table.put_all([("a", {"at": 5}), ("b", {"at": 5}), ("c", {"at": 8})]))
    run(
        table.delete("a", newest=7),
        table.delete_all(["b", "c"], newest=7),
        table.put("a", {"at": 6}),
    )
    assert run(table.get_all(["a", "b", "c"])) == [{"c": {"at": 8}}]
    with pytest.raises(TableError, match=r"delete\('a', newest=…\)"):
        run(table.put("a", None))
    with pytest.raises(ConfigurationError) as caught:
        run(table_over(store).delete("a", newest=7))
    assert caught.value.argument == "newest"
    with BlockingTable(table) as blocking:
        blocking.put("d", {"at": 1})
        blocking.delete("d", newest=2)
        blocking.delete_all(["c"], newest=9)
        assert blocking.get_all(["c", "d"]) == {}


def test_adding_needs_marks_where_equal_times_are_applied_again(store):
    table = table_over(store, newest_by="at")
    add = Changes(set={"at": 6}, add={"n": 1})
    run(table.put("a", {"at": 5, "n": 1}))
    with pytest.raises(TableError, match=r"adds or appends.*idempotent=True"):
        run(table.update("a", add))
    both = table_over(store, newest_by="at", idempotent=True)
    marked = RowEntries(["a"], [add], None, [Mark("s.0", position_of(0, 1))])
    operation = Operation(OperationKind.UPDATE, marked)
    first, second = run(both.send(operation), both.send(operation))
    assert (first.done, second.places(State.SKIPPED)) == (1, [0])
    assert run(table.get("a")) == [{"at": 6, "n": 2}]


def test_a_message_counts_once_and_a_direct_call_each_time(store):
    table = table_over(store, idempotent=True)
    add = Changes(add={"n": 1})
    marked = RowEntries(["a"], [add], [{"n": 10}], [Mark("s.0", position_of(0, 1))])
    operation = Operation(
        OperationKind.UPDATE, marked, contract=UpdateContract.UPDATE_WITH_DEFAULTS
    )
    run(
        table.send(operation), table.send(operation), table.update("a", add), table.update("a", add)
    )
    assert run(table.get("a")) == [{"n": 13}]
    assert run(table.update_messages([("a", UpdateMessage(add))])) == [None]


def test_skipped_entries_are_no_error(store):
    table = table_over(store, newest_by="at")
    run(table.put("a", {"at": 5}), table.put_all([("a", {"at": 1}), ("b", {"at": 1})]))
    assert run(table.get_all(["a", "b"])) == [{"a": {"at": 5}, "b": {"at": 1}}]


@pytest.mark.parametrize("wanted", [{"newest_by": "at"}, {"idempotent": True}])
def test_a_store_that_cannot_check_it_is_refused_when_the_table_is_declared(wanted, store):
    with pytest.raises(ConfigurationError, match="its write function can't check it") as caught:
        table_over(SlowStore(), **wanted)
    assert caught.value.argument == next(iter(wanted))
    with pytest.raises(ConfigurationError, match="has no write function") as caught:
        RemoteTable("t", key="id", read_function=store, **wanted)
    assert caught.value.argument == next(iter(wanted))


@pytest.mark.parametrize(
    "wrong", [{"on_replay": "skip"}, {"on_replay": "never", "idempotent": True}, {"newest_by": ""}]
)
def test_conditions_that_make_no_sense_are_refused(wrong, store):
    with pytest.raises(ConfigurationError) as caught:
        table_over(store, **wrong)
    assert caught.value.argument in wrong


def test_conditions_travel_with_the_table(store):
    table = table_over(store, newest_by="at", idempotent=True, on_replay="skip")
    copy = pickle.loads(pickle.dumps(table))
    assert (copy.newest_by, copy.idempotent, copy.on_replay) == ("at", True, "skip")
    run(copy.put("a", {"at": 5}), table.put("a", {"at": 4}))
    assert run(table.get("a")) == [{"at": 5}]


@pytest.mark.parametrize("conditions", [Conditions(idempotent=True), Conditions(newest_by="at")])
def test_conditions_that_a_store_can_not_check_are_rejected_and_not_dropped(conditions):
    store = SlowStore()
    entries = RowEntries(["a"], [{"at": 1}], marks=[Mark("s.0", position_of(0, 1))], newest=[1])
    with pytest.raises(ConfigurationError) as caught:
        run(table_over(store).send(Operation(OperationKind.PUT, entries, conditions=conditions)))
    assert caught.value.argument == ("idempotent" if conditions.idempotent else "newest_by")
    assert not store.requests


@pytest.mark.parametrize("conditions", [Conditions(idempotent=True), Conditions(newest_by="at")])
def test_conditions_of_a_request_need_marks_and_times(store, conditions):
    marks = [Mark("s.0", position_of(0, 1))]
    for entries in (
        RowEntries(["a"], [{"at": 1}], newest=[1]),
        RowEntries(["a"], [{"at": 1}], marks=marks),
    ):
        if conditions.idempotent and entries.marks:
            continue
        with pytest.raises(TableError, match=r"have no (marks|newest)"):
            run(
                table_over(store).send(Operation(OperationKind.PUT, entries, conditions=conditions))
            )
    assert run(store.get("a")) == [None]

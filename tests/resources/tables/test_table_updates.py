"""Partial updates on a store that knows single requests only (SAMZA-2709)."""

from __future__ import annotations

import asyncio

import pytest

from dagster_adjunct.resources.errors import RecordNotFoundError, TableError, TableUnavailableError
from dagster_adjunct.resources.tables.functions import TableWriteFunction, record_not_found_error
from dagster_adjunct.resources.tables.operation import UpdateContract, UpdateMessage
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import RemoteTable

ONLY, WITH_DEFAULTS = UpdateContract.UPDATE_ONLY, UpdateContract.UPDATE_WITH_DEFAULTS


class Journal(TableWriteFunction[str, dict, dict]):
    """Single requests on a dict, each written down; `refuse_puts` makes put fail."""

    def __init__(self, refuse_puts: bool = False) -> None:
        self.records: dict[str, dict] = {}
        self.done: list[tuple[str, str, object]] = []
        self.refuse_puts = refuse_puts

    async def put(self, key, value, *args):
        self.done.append(("put", key, value))
        await asyncio.sleep(0)
        if self.refuse_puts:
            raise TableError("the store is read-only.", "Ask for write access.")
        self.records[key] = dict(value)

    async def delete(self, key, *args):
        self.records.pop(key, None)

    async def update(self, key, update, *args):
        self.done.append(("update", key, update))
        await asyncio.sleep(0)
        if key not in self.records:
            raise record_not_found_error([key])
        self.records[key].update(update)


def table_over(function, **settings) -> RemoteTable:
    return RemoteTable(
        "state", key="id", write_function=function, **{"defaults_may_overwrite": True} | settings
    )


def test_an_update_of_a_known_record_puts_no_default():
    store = Journal()
    store.records["a"] = {"n": 1, "kept": True}
    asyncio.run(
        table_over(store).update_messages([("a", UpdateMessage({"n": 2}, {"n": 0}))], WITH_DEFAULTS)
    )
    assert store.records == {"a": {"n": 2, "kept": True}}
    assert [kind for kind, *_ in store.done] == ["update"]


def test_a_first_update_is_applied_on_top_of_its_default():
    store = Journal()
    table = table_over(store)
    asyncio.run(
        table.update_messages(
            [("a", UpdateMessage({"n": 2}, {"n": 0, "born": "x"}))], WITH_DEFAULTS
        )
    )
    assert store.records == {"a": {"n": 2, "born": "x"}}
    assert [kind for kind, *_ in store.done] == ["update", "put", "update"]
    assert (
        table.metrics.records.updates,
        table.metrics.records.defaults_put,
        table.metrics.store.failures,
    ) == (1, 1, 0)


def test_updates_of_one_key_in_one_call_are_applied_in_order():
    store = Journal()
    messages = [("a", UpdateMessage({"n": n, f"seen{n}": n}, {"n": -1})) for n in range(5)]
    asyncio.run(table_over(store).update_messages(messages, WITH_DEFAULTS))
    assert store.records["a"] == {"n": 4, **{f"seen{n}": n for n in range(5)}}
    applied = [update["n"] for kind, _, update in store.done if kind == "update"]
    assert applied[-5:] == [0, 1, 2, 3, 4]


def test_update_only_refuses_a_default_and_names_the_contract_to_use():
    store = Journal()
    store.records["b"] = {}
    messages = [("a", UpdateMessage({"n": 1}, {"n": 0})), ("b", UpdateMessage({"n": 1}))]
    with pytest.raises(
        RecordNotFoundError, match=r"UPDATE_ONLY ignores.*UpdateContract\.UPDATE_WITH_DEFAULTS"
    ) as e:
        asyncio.run(table_over(store).update_messages(messages, ONLY))
    assert e.value.keys == ("a",)
    assert store.records == {"b": {"n": 1}}


@pytest.mark.parametrize(
    ("contract", "help_"),
    [
        (ONLY, "if_missing=… of stream.update"),
        (WITH_DEFAULTS, "give each UpdateMessage a default.$"),
    ],
)
def test_an_update_without_default_of_an_unknown_key_says_what_would_have_helped(contract, help_):
    with pytest.raises(RecordNotFoundError, match=f"no default.*{help_}"):
        asyncio.run(
            table_over(Journal()).update_messages([("a", UpdateMessage({"n": 1}))], contract)
        )


def test_a_message_before_any_default_is_reported_and_the_rest_is_applied():
    store = Journal()
    messages = [("a", UpdateMessage({"n": 1})), ("a", UpdateMessage({"m": 2}, {"n": 0}))]
    with pytest.raises(RecordNotFoundError) as error:
        asyncio.run(table_over(store).update_messages(messages, WITH_DEFAULTS))
    assert error.value.keys == ("a",)
    assert store.records == {"a": {"n": 0, "m": 2}}


def test_a_default_that_is_refused_is_the_error_and_the_update_is_tried_again():
    store = Journal(refuse_puts=True)
    table = table_over(store)
    with pytest.raises(RecordNotFoundError, match=r"default could not be put.*read-only") as e:
        asyncio.run(
            table.update_messages([("a", UpdateMessage({"n": 1}, {"n": 0}))], WITH_DEFAULTS)
        )
    assert e.value.keys == ("a",)
    assert "UPDATE_WITH_DEFAULTS" not in str(e.value)
    assert [kind for kind, *_ in store.done] == ["update", "put", "update"]


def test_a_record_that_somebody_else_begins_meanwhile_gets_the_update():
    class Raced(Journal):
        async def put(self, key, value, *args):
            self.records[key] = {"n": 7, "theirs": True}
            raise TableUnavailableError("lost the race.")

    store = Raced()
    policy = RetryPolicy(attempts=1)
    messages = [("a", UpdateMessage({"n": 1}, {"n": 0}))]
    asyncio.run(table_over(store, retry=policy).update_messages(messages, WITH_DEFAULTS))
    assert store.records == {"a": {"n": 1, "theirs": True}}


def test_a_function_that_hides_which_keys_are_missing_is_reported_to_name_them():
    class Silent(Journal):
        async def update_all(self, entries, *args):
            raise RecordNotFoundError("something is missing.")

    with pytest.raises(TableError, match="Pass the requested keys"):
        asyncio.run(table_over(Silent()).update_all([("a", {}), ("b", {})]))


def test_a_function_without_updates_says_so():
    class PutsOnly(TableWriteFunction[str, dict, dict]):
        async def put(self, key, value, *args): ...

        async def delete(self, key, *args): ...

    with pytest.raises(TableError) as caught:
        asyncio.run(table_over(PutsOnly()).update("a", {"n": 1}))
    assert (caught.value.table, caught.value.function) == ("state", "PutsOnly")


def test_an_update_of_nothing_is_refused():
    with pytest.raises(TableError, match="update=None"):
        UpdateMessage(None)
    with pytest.raises(TableError, match="None to update for key 'a'"):
        asyncio.run(table_over(Journal()).update("a", None))

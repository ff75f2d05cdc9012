"""One suite on every backend: an oracle of plain dicts says what each request must leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.backends import PostgresTable, SqliteTable
from dagster_adjunct.resources.errors import RecordNotFoundError
from dagster_adjunct.resources.tables import (
    BlockingTable,
    MemoryTable,
    RemoteTable,
    TableReadFunction,
    TableWriteFunction,
    UpdateContract,
    UpdateMessage,
)
from dagster_adjunct.resources.tables.table_functions import record_not_found

COLUMNS = {"id": "string", "a": "int", "b": "string", "c": "double"}
_numbers = count()


class SingleRequests(TableReadFunction, TableWriteFunction):
    """The least that a store can offer: no batches, no insert-if-absent, no transactions."""

    def __init__(self):
        self.records = {}

    async def get(self, key, *args):
        return self.records.get(key)

    async def put(self, key, value, *args):
        self.records[key] = dict(value)

    async def delete(self, key, *args):
        self.records.pop(key, None)

    async def update(self, key, update, *args):
        if key not in self.records:
            raise record_not_found([key])
        self.records[key] |= update


@pytest.fixture(
    scope="module",
    params=["single requests", "memory", "sqlite", pytest.param("postgres", marks=pytest.mark.server)],
)
def new_store(request, tmp_path_factory) -> Callable[[], object]:
    """Makes an empty store of one backend."""
    if request.param == "postgres":
        server = request.getfixturevalue("postgres_server")
        connect = {"host": "127.0.0.1", "port": str(server.port), "user": "adjunct", "dbname": "adjunct"}
        return lambda: PostgresTable(f"suite_{next(_numbers)}", "id", columns=COLUMNS, create=True, connect=connect)
    if request.param == "sqlite":
        path = tmp_path_factory.mktemp("suite") / "suite.sqlite"
        return lambda: SqliteTable(path, f"suite_{next(_numbers)}", "id", columns=COLUMNS, create=True)
    if request.param == "memory":
        return lambda: MemoryTable(f"suite_{next(_numbers)}")
    return SingleRequests


def blocking(store, **settings) -> BlockingTable:
    return BlockingTable(RemoteTable("suite", key="id", read_function=store, write_function=store, **settings))


def record(key: str, fields: dict) -> dict:
    """A whole record as every backend reads it back: fields left out are null."""
    return {**dict.fromkeys(COLUMNS), **fields, "id": key}


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "a": st.none() | st.integers(-(2**31), 2**31 - 1),
        "b": st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5),
        "c": st.none() | st.floats(allow_nan=False, width=32),
    },
)
KEYS = st.sampled_from(["k1", "k2", "k3", "ключ"])
OPERATIONS = st.one_of(
    st.tuples(st.just("put"), st.lists(st.tuples(KEYS, FIELDS), max_size=5)),
    st.tuples(st.just("delete"), st.lists(KEYS, max_size=3)),
    st.tuples(st.just("update"), st.lists(st.tuples(KEYS, FIELDS), max_size=6)),
    st.tuples(
        st.sampled_from(list(UpdateContract)),
        st.lists(st.tuples(KEYS, FIELDS, st.none() | FIELDS), max_size=8),
    ),
)


class Oracle:
    """The same requests on a dict, one message after another."""

    def __init__(self) -> None:
        self.records: dict[str, dict] = {}
        self.missing: set[str] = set()

    def apply(self, kind, entries) -> set[str]:
        """Do it; return the keys that an error must name."""
        missing = set()
        if kind == "put":
            self.records |= {key: record(key, fields) for key, fields in entries}
        elif kind == "delete":
            for key in entries:
                self.records.pop(key, None)
        else:
            for key, update, *default in entries:
                may_begin = kind is UpdateContract.UPDATE_WITH_DEFAULTS and default[0] is not None
                if key not in self.records and may_begin:
                    self.records[key] = record(key, default[0])
                if key in self.records:
                    self.records[key] |= update
                else:
                    missing.add(key)
        return missing


def apply(table: BlockingTable, kind, entries) -> set[str]:
    try:
        if kind == "put":
            table.put_all([(key, record(key, fields)) for key, fields in entries])
        elif kind == "delete":
            table.delete_all(entries)
        elif kind == "update":
            table.update_all(entries)
        else:
            messages = [
                (key, UpdateMessage(update, None if default is None else record(key, default)))
                for key, update, default in entries
            ]
            table.update_messages(messages, kind)
    except RecordNotFoundError as error:
        return set(error.keys)
    return set()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(OPERATIONS, max_size=8))
def test_every_sequence_of_requests_leaves_what_a_dict_would(new_store, operations):
    oracle = Oracle()
    with blocking(new_store()) as table:
        for kind, entries in operations:
            assert apply(table, kind, entries) == oracle.apply(kind, entries)
            assert table.get_all(["k1", "k2", "k3", "ключ"]) == oracle.records


def test_the_last_update_of_a_key_wins_within_one_call_and_its_default_is_the_first(new_store):
    messages = [
        ("k", UpdateMessage({"a": n, "b": f"v{n}"} if n % 2 else {"a": n}, record("k", {"c": float(n)})))
        for n in range(2500)
    ]
    with blocking(new_store()) as table:
        table.update_messages(messages, UpdateContract.UPDATE_WITH_DEFAULTS)
        assert table.get("k") == record("k", {"a": 2499, "b": "v2499", "c": 0.0})
        assert table.metrics.updates == 2500
        assert table.metrics.defaults_put == 1


def test_the_same_messages_again_change_nothing_and_put_no_default(new_store):
    messages = [(f"k{n % 7}", UpdateMessage({"a": n}, record(f"k{n % 7}", {"b": "new"}))) for n in range(50)]
    with blocking(new_store()) as table:
        table.update_messages(messages, UpdateContract.UPDATE_WITH_DEFAULTS)
        before = table.get_all([f"k{n}" for n in range(7)])
        table.update_messages(messages, UpdateContract.UPDATE_WITH_DEFAULTS)
        assert table.get_all([f"k{n}" for n in range(7)]) == before
        assert table.metrics.defaults_put == 7


def test_updates_of_unknown_keys_name_them_and_apply_the_others(new_store):
    with blocking(new_store()) as table:
        table.put("known", record("known", {"a": 1}))
        with pytest.raises(RecordNotFoundError) as error:
            table.update_all([("x", {"a": 2}), ("known", {"a": 3}), ("y", {"a": 4})])
        assert set(error.value.keys) == {"x", "y"}
        assert table.get_all(["x", "known", "y"]) == {"known": record("known", {"a": 3})}
        assert table.metrics.failures == table.metrics.retries == 0


def test_single_forms_do_as_the_batches_do(new_store):
    with blocking(new_store()) as table:
        assert table.get("k") is None
        table.put("k", record("k", {"a": 1, "b": "x"}))
        table.update("k", {"b": None})
        assert table.get("k") == record("k", {"a": 1})
        table.put("k", record("k", {"c": 2.5}))
        assert table.get("k") == record("k", {"c": 2.5})
        table.delete("k")
        table.delete("k")
        assert table.get("k") is None
        with pytest.raises(RecordNotFoundError):
            table.update("k", {"a": 1})


def test_nothing_to_do_is_fine(new_store):
    with blocking(new_store()) as table:
        table.put_all([])
        table.update_messages([], UpdateContract.UPDATE_WITH_DEFAULTS)
        table.delete_all([])
        assert table.get_all([]) == {}


def test_concurrent_requests_on_one_table_object_do_not_mix(new_store):
    store = new_store()

    async def at_once():
        async with RemoteTable("suite", key="id", read_function=store, write_function=store) as table:
            await asyncio.gather(
                *(table.put(f"k{n}", record(f"k{n}", {"a": n})) for n in range(20)),
                *(table.update_messages(
                    [(f"m{n}", UpdateMessage({"a": n}, record(f"m{n}", {})))], UpdateContract.UPDATE_WITH_DEFAULTS
                ) for n in range(20)),
            )  # fmt: skip
            return await table.get_all([f"{kind}{n}" for kind in "km" for n in range(20)])

    assert asyncio.run(at_once()) == {f"{k}{n}": record(f"{k}{n}", {"a": n}) for k in "km" for n in range(20)}


@pytest.mark.parametrize("own_table", [True, False])
def test_threads_share_a_store_each_with_a_blocking_table_of_its_own(new_store, own_table):
    store = new_store()
    shared = RemoteTable("suite", key="id", read_function=store, write_function=store)

    def work(thread: int) -> None:
        for turn in range(5):
            with blocking(store) if own_table else BlockingTable(shared) as table:  # each opens and closes it
                message = UpdateMessage({"a": turn}, record("same", {}))
                table.update_messages([("same", message)], UpdateContract.UPDATE_WITH_DEFAULTS)
                table.put(f"k{thread}.{turn}", record(f"k{thread}.{turn}", {"a": turn}))
                assert table.get(f"k{thread}.{turn}")["a"] == turn

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(work, thread) for thread in range(3)]:
            done.result()
    with blocking(store) as table:
        assert table.get("same") == record("same", {"a": 4})
        assert len(table.get_all([f"k{thread}.{turn}" for thread in range(3) for turn in range(5)])) == 15
    if not own_table:
        assert shared.metrics.writes == 15, "no count of a thread's is lost"

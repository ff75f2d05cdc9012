"""What SQLite and PostgreSQL do alike beyond the suite of every backend: keys, refusals, marks,
several writers.
"""

from __future__ import annotations

import asyncio
import pickle
import time
import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    SchemaMismatchError,
    TableAccessError,
)
from dagster_adjunct.resources.table_backends.postgres import PostgresRequests, PostgresTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteRequests, SqliteTable
from dagster_adjunct.resources.table_backends.store import claim_due_purge, continue_purge
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Conditions,
    Mark,
    Operation,
    OperationKind,
    RowEntries,
    State,
    position_of,
)
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.spawned import call_all, spawned

AT = datetime(2013, 7, 1, tzinfo=UTC)
COLUMNS = {
    "id": "string",
    "n": "bigint",
    "at": "timestamp",
    "price": "decimal(38,10)",
    "days": "array<date>",
}


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.server)])
def table_of(request, tmp_path):
    """Makes the function of a table of this name."""

    def make(name: str, key="id", columns=COLUMNS, **more):
        settings = {"columns": columns, "create": True, **more}
        if request.param == "sqlite":
            return SqliteTable(tmp_path / "t.sqlite", name, key, **settings)
        server = request.getfixturevalue("postgres_server")
        connect = {
            "host": "127.0.0.1",
            "port": str(server.port),
            "user": "adjunct",
            "dbname": "adjunct",
        }
        return PostgresTable(f"{name}_{tmp_path.name}"[-50:], key, connect=connect, **settings)

    return make


def used(store, body):
    """What `body` returns of the open store."""

    async def run():
        await store.open()
        try:
            return await body(store)
        finally:
            await store.close()

    return asyncio.run(run())


def update(
    keys,
    changes,
    first=0,
    source="s.0",
    times=None,
    conditions=Conditions(None, True),  # noqa: B008
    default=None,
):
    marks = [Mark(source, position_of(0, first + n)) for n in range(len(keys))]
    defaults = None if default is None else [default] * len(keys)
    entries = RowEntries(keys, changes, defaults, marks, times)
    return Operation(OperationKind.UPDATE, entries, conditions=conditions)


def test_keys_of_several_columns_are_matched_by_name_in_whatever_order(table_of):
    columns = {"origin": "string", "dest": "string", "n": "int"}
    store = table_of("routes", ("origin", "dest"), columns)
    swapped = RemoteTable("t", key=("dest", "origin"), read_function=store, write_function=store)
    with BlockingTable(swapped) as table:
        table.put(("LAX", "JFK"), {"n": 1})
        table.update(("LAX", "JFK"), {"n": 2})
        assert table.get(("LAX", "JFK")) == {"origin": "JFK", "dest": "LAX", "n": 2}
        assert table.get(("JFK", "LAX")) is None
    entries = RowEntries([("LAX", "JFK")])
    for other in (("dest", "carrier"), ("dest",)):
        with pytest.raises(ConfigurationError) as caught:
            used(
                store,
                lambda s, other=other: s.send(Operation(OperationKind.GET, entries, key=other)),
            )
        assert caught.value.argument == "key"


@pytest.mark.parametrize(
    ("kind", "key", "outside", "wrong"),
    [("bigint", 1, 2**63, "1"), ("decimal(5,2)", Decimal(1), Decimal("0.001"), "1")],
)
def test_a_key_that_its_column_can_not_hold_has_no_record(table_of, kind, key, outside, wrong):
    store = table_of("ranges", "id", {"id": kind, "n": "int"})
    with BlockingTable(
        RemoteTable("t", key="id", read_function=store, write_function=store)
    ) as table:
        table.put(key, {"n": 1})
        assert table.get_all([outside, key]) == {key: {"id": key, "n": 1}}
        for refused in (lambda: table.get(wrong), lambda: table.put(outside, {"n": 1})):
            with pytest.raises(SchemaMismatchError) as caught:
                refused()
            assert caught.value.column == "id"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": True}, "expected an int"),
        ({"n": 2.5}, "expected an int"),
        ({"n": float("inf")}, "expected an int"),
        ({"n": 2**63}, "out of range, expected an int of 64 bits"),
        ({"f": float("nan")}, "expected a finite float"),
        ({"f": float("inf")}, "expected a finite float"),
        ({"price": Decimal("NaN")}, "expected a finite Decimal"),
        ({"price": Decimal("Infinity")}, "expected a finite Decimal"),
        ({"s": {}.keys()}, "expected a str"),
        ({"s": "\ud800"}, "without lone surrogates"),
        ({"tags": {"a", "b"}}, "expected a list"),
        ({"tags": {"a": 1}.keys()}, "expected a list"),
        ({"tags": ["a", 1]}, "in the list: expected a str"),
        ({"doc": {"a": {1, 2}}}, "expected what JSON can hold: a: it is a set"),
        ({"doc": {1: "a"}}, "expected a str, found 1"),
        ({"doc": float("nan")}, "expected what JSON can hold"),
        ({"nope": 1}, "no column 'nope'"),
        ({"id": "other"}, "has 'other' as its id"),
        ({"a": 1}.items(), "got a dict_items; expected a mapping"),
        ({"a"}, "got a set; expected a mapping"),
        (Changes(add={"s": 1}), "only numbers, and members of json, can be added"),
        (Changes(add={"n": 1.5}), "expected an int"),
        (Changes(append={"s": ["x"]}), "only a column of lists"),
        (Changes(set={"n": 1}, add={"n": 1}), "in two ways"),
        (Changes(remove=("id",)), "which is part of the key"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused_and_the_others_are_written(
    table_of, fields, message
):
    columns = {
        "id": "string",
        "n": "bigint",
        "f": "double",
        "s": "string",
        "price": "decimal(20,2)",
    }
    columns |= {"tags": "array<string>", "doc": "json"}

    async def body(store):
        keys = ["a", "bad", "b"]
        await store.put_all([(key, {"n": 1}) for key in keys])
        outcomes = await store.send(
            Operation(OperationKind.UPDATE, RowEntries(keys, [{"n": 2}, fields, {"n": 3}]))
        )
        return outcomes, await store.get_all(keys)

    outcomes, records = used(table_of("misfits", columns=columns), body)
    assert list(outcomes.problems) == [1]
    assert outcomes.problems[1].state is State.REFUSED
    assert isinstance(outcomes.problems[1].error, SchemaMismatchError)
    assert message in str(outcomes.problems[1].error)
    assert {key: record["n"] for key, record in records.items()} == {"a": 2, "bad": 1, "b": 3}


def test_a_key_that_does_not_fit_is_refused_by_itself(table_of):
    async def body(store):
        keys = ["a", 5, None, ["x"], {1}]
        put = await store.send(Operation(OperationKind.PUT, RowEntries(keys, [{}] * len(keys))))
        got = await store.send(Operation(OperationKind.GET, RowEntries(keys)))
        return put, got

    for outcomes in used(table_of("odd_keys"), body):
        assert set(outcomes.problems) == {1, 2, 3, 4}
        assert {problem.state for problem in outcomes.problems.values()} == {State.REFUSED}


def test_sums_are_exact_and_one_that_no_longer_fits_is_refused_alone(table_of):
    async def body(store):
        await store.put(
            "k", {"n": 2**63 - 3, "price": Decimal("12345678901234567890123456.0123456789")}
        )
        changes = [
            Changes(add={"n": 1}),
            Changes(add={"n": 5}),
            Changes(add={"n": 1, "price": Decimal("1E-10")}),
        ]
        outcomes = await store.send(Operation(OperationKind.UPDATE, RowEntries(["k"] * 3, changes)))
        return outcomes, await store.get("k")

    outcomes, record = used(table_of("sums"), body)
    assert list(outcomes.problems) == [1]
    assert record["n"] == 2**63 - 1
    assert record["price"] == Decimal("12345678901234567890123456.0123456790")


def test_lists_of_other_values_than_text_are_appended_to(table_of):
    async def body(store):
        await store.put("k", {"days": [AT.date()]})
        await store.update("k", Changes(append={"days": [None, AT.date() + timedelta(days=1)]}))
        return await store.get("k")

    assert used(table_of("lists"), body)["days"] == [AT.date(), None, AT.date() + timedelta(days=1)]


def test_what_was_applied_can_be_forgotten_after_a_horizon(table_of):
    both = Conditions("at", True)

    async def body(store):
        await store.put("k", {"n": 0})
        first = update(["k"], [Changes(add={"n": 1})], times=[AT], conditions=both)
        delete = Operation(
            OperationKind.DELETE,
            RowEntries(["gone"], marks=[Mark("s.0", position_of(0, 5))], newest=[AT]),
            conditions=both,
        )
        late = update(["gone"], [{}], times=[AT - timedelta(1)], conditions=both, default={"n": 7})
        for operation in (first, delete):
            assert not (await store.send(operation)).problems
        assert await store.forget(older_than=3600) == 0
        assert [p.state for p in (await store.send(late)).problems.values()] == [State.SKIPPED]
        assert [p.state for p in (await store.send(first)).problems.values()] == [State.SKIPPED]
        assert await store.forget(older_than=-1) == 2
        assert not (await store.send(late)).problems
        return await store.get_all(["k", "gone"])

    records = used(table_of("forgetful"), body)
    assert (records["k"]["n"], records["gone"]["n"]) == (1, 7)

    time.sleep(0.02)

    async def written(store):
        await store.send(update(["new"], [{}], times=[AT], conditions=both, default={}))
        return await store.forget(older_than=-1)

    assert used(table_of("forgetful", forget_after=0.01), written) == 1, (
        "the older one was forgotten by the write"
    )


def test_tasks_that_write_one_after_another_do_not_all_purge(table_of, monkeypatch):
    forgot = []
    requests = SqliteRequests if isinstance(table_of("counted"), SqliteTable) else PostgresRequests
    forget, message = requests.forget, update(["k"], [{"n": 1}], default={})
    monkeypatch.setattr(
        requests, "forget", lambda self, *given: forgot.append(1) or forget(self, *given)
    )
    for _ in range(3):
        used(table_of("counted", forget_after=7200.0), lambda store: store.send(message))
    assert len(forgot) == 1
    for _ in range(3):
        used(table_of("counted", forget_after=0.001), lambda store: store.send(message))
        time.sleep(0.01)
    assert len(forgot) == 4, "as often as it has to be"


def test_a_write_purges_a_part_and_the_next_write_goes_on(table_of, monkeypatch):
    monkeypatch.setattr("dagster_adjunct.resources.table_backends.store.PURGED_AT_ONCE", 3)
    used(table_of("parts"), lambda store: store.send(update("abcdefg", [{}] * 7, default={})))
    time.sleep(0.02)

    async def written(store):
        await store.send(update(["t"], [{}], default={}))
        return await store.forget(older_than=-1)

    assert used(table_of("parts", forget_after=0.01), written) == 7 - 3 + 1
    place = f"a place of this test alone: {uuid.uuid4()}"
    due = [claim_due_purge(place, 7200.0)]
    for purged in (3, 2):
        continue_purge(place, purged)
        due.append(claim_due_purge(place, 7200.0))
    assert due == [True, True, False]


def test_what_needs_no_conditions_neither_makes_nor_needs_what_they_store(table_of):
    used(table_of("plain"), lambda store: store.put("k", {"n": 1}))
    for create in (True, False):
        store = table_of("plain", create=create, forget_after=0.5 + create)  # each would purge
        assert used(store, lambda store: store.get("k"))["n"] == 1
        used(store, lambda store: store.put("k", {"n": 1}))
    bare = used(
        table_of("plain", create=False), lambda store: store.send(update(["k"], [{"n": 2}]))
    )
    assert isinstance(bare.problems[0].error, TableAccessError), "there is still none"


def test_forget_after_leaves_what_is_younger_so_a_message_counts_once(table_of):
    message = update(["a"], [Changes(add={"n": 1})], default={})

    async def once(store):
        return (await store.send(message)).problems, await store.get("a")

    for _ in range(3):
        _, record = used(table_of("once", forget_after=3600.0), once)
    assert record["n"] == 1


def test_arguments_of_a_call_of_the_function_alone_are_refused(table_of):
    async def calls(store):
        for call in (
            lambda: store.put("k", {"n": 1}, "tenant"),
            lambda: store.get("k", "tenant"),
            lambda: store.delete_all(["k"], "tenant"),
            lambda: store.update("k", {"n": 1}, "tenant"),
            lambda: store.put_if_absent("k", {"n": 1}, "tenant"),
        ):
            with pytest.raises(
                ConfigurationError, match=r"\w+Table does not accept the extra arguments of a"
            ):
                await call()
        return await store.get("k")

    assert used(table_of("alone"), calls) is None


def test_conditions_on_a_table_without_the_one_next_to_it_say_what_is_missing(table_of):
    used(table_of("bare"), lambda store: store.put("k", {"n": 1}))
    outcomes = used(
        table_of("bare", columns=None, create=False), lambda s: s.send(update(["k"], [{"n": 2}]))
    )
    assert isinstance(outcomes.problems[0].error, TableAccessError)
    assert (
        "__adjunct' with the columns id, newest_of, newest, tie, applied, at; there is none"
        in str(outcomes.problems[0].error)
    )
    used(table_of("bare"), lambda s: s.send(update(["k"], [{"n": 3}])))
    outcomes = used(
        table_of("bare", columns=None, create=False), lambda s: s.send(update(["k"], [{"n": 2}]))
    )
    assert outcomes.problems[0].state is State.SKIPPED


def test_newest_by_needs_a_column_that_has_an_order(table_of):
    store = table_of("unordered")
    for column, message in (("days", "needs a column of times"), ("nope", "no column 'nope'")):
        operation = update(["k"], [{}], times=[AT], conditions=Conditions(column))
        with pytest.raises(SchemaMismatchError, match=message):
            used(store, lambda s, operation=operation: s.send(operation))
    timeless = update(["k"], [{}], times=[None], conditions=Conditions("at"))
    outcomes = used(store, lambda s: s.send(timeless))
    assert "has no at, which newest_by needs" in str(outcomes.problems[0].error)


WRITERS, ROUNDS, SHARED = 3, 12, 7


def _count(declaration: bytes, writer: int) -> int:
    """Add 1 to every shared key in each round, in an order of one's own, each request sent
    twice; count defaults.
    """
    store = pickle.loads(declaration)

    async def body(store):
        begun = 0
        for turn in range(ROUNDS):
            keys = [f"k{(n * (writer + 1) + turn) % SHARED}" for n in range(SHARED)] * 3
            operation = update(
                keys,
                [Changes(add={"n": 1})] * len(keys),
                turn * 100,
                f"s.{writer}",
                None,
                default={"n": 100},
            )
            for _ in range(2):
                outcomes = await store.send(operation)
                # as the retry layer does
                while any(problem.may_pass for problem in outcomes.problems.values()):
                    outcomes = await store.send(operation)
                begun += outcomes.defaults_put
        return begun

    return used(store, body)


@pytest.mark.lengthy
def test_processes_that_add_to_the_same_keys_at_once_and_retry_count_exactly(table_of):
    store = table_of("counted")
    used(store, lambda s: s.get("k0"))
    with spawned(WRITERS) as pool:
        begun = call_all(pool, _count, [(pickle.dumps(store), writer) for writer in range(WRITERS)])
    records = used(store, lambda s: s.get_all([f"k{n}" for n in range(SHARED)]))
    assert sum(begun) == SHARED
    assert {key: record["n"] for key, record in records.items()} == {
        f"k{n}": 100 + WRITERS * ROUNDS * 3 for n in range(SHARED)
    }


def test_a_decimal_that_a_column_can_not_hold_as_it_is_is_refused_and_not_rounded(table_of):
    store = table_of("prices", columns={"id": "string", "price": "decimal(6,2)"})
    given = {
        "a": Decimal("1.005"),
        "b": Decimal("12345.67"),
        "c": Decimal("9999.990"),
        "d": 12,
        "e": Decimal("1E+4"),
    }
    outcomes = used(store, lambda s: s.send(Operation(OperationKind.PUT, RowEntries(
        list(given), [{"price": price} for price in given.values()]
    ))))  # fmt: skip
    assert {place: problem.state for place, problem in outcomes.problems.items()} == dict.fromkeys(
        (0, 1, 4), State.REFUSED
    )
    assert "2 behind the point" in str(outcomes.problems[0].error)
    records = used(store, lambda s: s.get_all(list(given)))
    assert {key: record["price"] for key, record in records.items()} == {
        "c": Decimal("9999.99"),
        "d": Decimal(12),
    }


def test_columns_may_have_the_names_of_what_conditions_keep(table_of):
    columns = {
        "id": "string",
        "newest": "bigint",
        "tie": "boolean",
        "applied": "timestamp",
        "newest_of": "double",
    }
    store = table_of("namesakes", columns=columns)
    table = RemoteTable(
        "t",
        key="id",
        read_function=store,
        write_function=store,
        newest_by="newest",
        idempotent=True,
    )
    plain = RemoteTable("t", key="id", read_function=store, write_function=store)
    record = {"id": "k", "newest": 9, "tie": True, "applied": AT, "newest_of": 0.5}
    newer, other = (
        {**record, "newest": 10, "tie": False},
        {**record, "id": "other", "newest_of": None},
    )
    with BlockingTable(plain) as blocking:
        blocking.put_all([("other", record | {"id": "other"}), ("other", other)])
    for offset, value in enumerate((record, newer, record)):  # as texts, 9 is greater than 10
        entries = RowEntries(
            ["k"], [value], None, [Mark("s.0", position_of(0, offset))], [value["newest"]]
        )
        with BlockingTable(table) as blocking:
            blocking.send(Operation(OperationKind.PUT, entries))
            assert blocking.metrics.records.skipped == (offset == 2)
    with BlockingTable(plain) as blocking:
        assert blocking.get_all(["k", "other"]) == {"k": newer, "other": other}


@pytest.mark.parametrize("name", ["at", "applied"])
def test_a_key_column_named_as_in_the_idempotency_table_rejects_conditions(table_of, name):
    store = table_of(
        f"key_{name}", ["id", name], columns={"id": "string", name: "bigint", "n": "bigint"}
    )
    record = {"id": "k", name: 1, "n": 2}
    with BlockingTable(
        RemoteTable("t", key=["id", name], read_function=store, write_function=store)
    ) as table:
        table.put(("k", 1), record)
    guarded = RemoteTable(
        "t", key=["id", name], read_function=store, write_function=store, newest_by="n"
    )
    with BlockingTable(guarded) as table:
        with pytest.raises(
            ConfigurationError, match=f"can't have conditions: .* has a column '{name}'"
        ):
            table.put(("k", 1), {**record, "n": 3})
        assert table.get(("k", 1)) == record


@pytest.mark.server
def test_a_postgres_table_may_be_named_as_the_row_of_a_conflict(postgres_server):
    connect = {
        "host": "127.0.0.1",
        "port": str(postgres_server.port),
        "user": "adjunct",
        "dbname": "adjunct",
    }
    store = PostgresTable("excluded", "id", columns=COLUMNS, create=True, connect=connect)
    with BlockingTable(
        RemoteTable("t", key="id", read_function=store, write_function=store)
    ) as table:
        table.put_all([("k", {"id": "k", "n": 1}), ("k", {"id": "k", "n": 2})])
        table.put("k", {"id": "k", "n": 3})
        record = table.get("k")
    assert record is not None
    assert record["n"] == 3

"""`DynamoDbTable` on DynamoDB Local; what that never does (unprocessed items, throttling) with a
client that does.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, localcontext
from itertools import count
from types import SimpleNamespace

import pytest

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    SchemaMismatchError,
    TableAccessError,
    TableError,
    TableNotFoundError,
    TableUnavailableError,
)
from dagster_adjunct.resources.table_backends.columns import (
    describe_function,
    function_from_description,
    parse_known_column,
)
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.dynamodb_items import ItemCodec
from dagster_adjunct.resources.tables.functions import is_record_rejected
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Conditions,
    Mark,
    Operation,
    OperationKind,
    Outcomes,
    RowEntries,
    State,
    position_of,
)
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.resources.table_backends.every_type import RECORD, TYPES
from tests.servers.dynamodb import DynamoDbServer, new_name
from tests.spawned import call_all, spawned

GET, PUT, DELETE, UPDATE = (
    OperationKind.GET,
    OperationKind.PUT,
    OperationKind.DELETE,
    OperationKind.UPDATE,
)
COUNTED = {
    "id": "string",
    "total": "bigint",
    "seen": "bigint",
    "tags": "array<string>",
    "doc": "json",
}


@pytest.fixture
def new_table(dynamodb_server: DynamoDbServer):
    """Makes a table of its own, on the server."""
    where = dynamodb_server.session()

    def make(key="id", columns=COUNTED, **settings) -> DynamoDbTable:
        return DynamoDbTable(
            new_name(), key, columns=columns, **{"create": True, **where, **settings}
        )

    return make


def do(store: DynamoDbTable, *operations: Operation) -> list[Outcomes]:
    """Send them one after the other."""

    async def all_of_them():
        await store.open()
        try:
            return [await store.send(operation) for operation in operations]
        finally:
            await store.close()

    return asyncio.run(all_of_them())


def put(*entries: tuple) -> Operation:
    return Operation(PUT, RowEntries([key for key, _ in entries], [value for _, value in entries]))


def update(*entries: tuple, default=None, **more) -> Operation:
    keys, values = [key for key, _ in entries], [value for _, value in entries]
    return Operation(
        UPDATE, RowEntries(keys, values, None if default is None else [default] * len(keys)), **more
    )


def get(*keys) -> Operation:
    return Operation(GET, RowEntries(list(keys)))


def errors(outcomes: Outcomes) -> dict:
    return {place: type(problem.error) for place, problem in outcomes.problems.items()}


# --- values


def test_every_type_reads_back_as_it_was_written(new_table):
    columns = {**TYPES, "tags": "array<double>", "doc": "json"}
    record = {
        **RECORD,
        "tags": [0.1, None, 1e-7],
        "doc": {"a": [1, 2.5, None, "x"], "b": {"c": True}},
    }
    empty = {**dict.fromkeys(columns), "id": 7}
    store = new_table(columns=columns)
    _, got = do(store, put((record["id"], record), (7, empty)), get(record["id"], 7, 8))
    assert got.records == [record, empty, None]
    assert all(type(got.records[0][name]) is type(value) for name, value in record.items())


def test_without_columns_each_value_keeps_its_own_type_and_no_digit_is_lost(new_table):
    record = {
        "id": "k",
        "whole": 12345678901234567890123456789012345678,
        "part": Decimal("0.1234567890123456789012345678901234567"),
        "float": 0.1,
        "raw": b"\0\xff",
        "ok": False,
        "none": None,
        "nested": {"list": [1, None, {"deep": Decimal("1.5")}], "text": ""},
    }
    store = new_table({"id": "string"}, None)
    _, got = do(store, put(("k", record)), get("k"))
    expected = {**record, "float": Decimal("0.1")}
    del expected["none"]
    assert got.records == [expected]


@pytest.mark.parametrize(
    "value",
    [
        float("inf"), float("nan"), 1e300, 1e-200, Decimal("NaN"), Decimal("1." + "1" * 40), 10**40 + 1, {1, 2},
        {"a": 1}.keys(), {1: "x"}, datetime(2024, 1, 1), object(), "\ud800",
    ],
)  # fmt: skip
def test_what_dynamodb_would_lose_or_refuse_is_refused_alone(new_table, value):
    store = new_table({"id": "string"}, None)
    outcomes, got = do(store, put(("bad", {"x": value}), ("good", {"x": 1})), get("bad", "good"))
    assert errors(outcomes) == {0: SchemaMismatchError}
    assert "'x'" in str(outcomes.problems[0].error)
    assert got.records == [None, {"id": "good", "x": 1}]


@pytest.mark.parametrize("value", [True, 2.5, "1", 2**63, float("nan")])
def test_a_value_of_another_type_than_its_column_is_refused(new_table, value):
    outcomes, *_ = do(new_table(), update(("k", Changes(add={"total": value})), default={}))
    assert errors(outcomes) == {0: SchemaMismatchError}


def test_times_sort_as_texts_do_and_make_a_sort_key(new_table):
    columns = {"id": "string", "at": "timestamp", "day": "date"}
    store = new_table(("id", "at"), columns)
    start = datetime(2024, 2, 29, 23, 59, 59, 999_999, tzinfo=UTC)
    times = [start + timedelta(microseconds=step) for step in (0, 1, 1_000_000)]
    _, got = do(
        store,
        put(*((("k", at), {"day": date(2024, 1, 1)}) for at in times)),
        get(*(("k", at) for at in times)),
    )
    assert [record["at"] for record in got.records] == times
    with_names = Operation(GET, RowEntries([(times[0], "k")]), key=("at", "id"))
    assert do(store, with_names)[0].records[0]["at"] == times[0]
    with pytest.raises(ConfigurationError) as caught:
        do(store, Operation(GET, RowEntries([("k", "k")]), key=("day", "id")))
    assert caught.value.argument == "key"


# --- keys, sizes and tables


@pytest.mark.parametrize("key", ["", "x" * 2049, None, 7, ("k", "k")])
def test_a_key_that_dynamodb_would_refuse_is_refused_alone(new_table, key):
    store = new_table()
    for operation in (
        put((key, {}), ("k", {})),
        update((key, {}), ("k", {}), default={}),
        get(key, "k"),
    ):
        (outcomes,) = do(store, operation)
        has_no_record = operation.kind is GET and isinstance(key, str)
        assert errors(outcomes) == ({} if has_no_record else {0: SchemaMismatchError})


def test_sort_keys_have_a_limit_of_their_own(new_table):
    store = new_table(("id", "part"), {"id": "string", "part": "binary"})
    (outcomes,) = do(
        store, put((("a", b"x" * 1025), {}), (("a", b"x" * 1024), {}), (("a" * 2048, b"x"), {}))
    )
    assert errors(outcomes) == {0: SchemaMismatchError}


def test_a_record_that_is_too_large_is_refused_alone_with_both_sizes(new_table):
    store = new_table({"id": "string"}, None)
    fits = {"x": "y" * (400 * 1024 - len("id" + "fits" + "x"))}
    outcomes, again, got = do(
        store,
        put(("fits", fits), ("large", {"x": "y" * 400 * 1024}), ("k", {})),
        update(("fits", {"more": "z"}), ("k", {"a": 1})),
        get("k"),
    )
    assert errors(outcomes) == {1: SchemaMismatchError}
    assert "409,600" in str(outcomes.problems[1].error)
    assert errors(again) == {0: TableError}  # only the table knows how much is there
    assert got.records == [{"id": "k", "a": 1}]


def test_the_last_good_record_of_a_key_stays_where_a_later_one_is_refused(new_table):
    store = new_table()
    entries = [
        ("k", {"total": 1}),
        ("k", {"total": 2}),
        ("other", {"total": 3}),
        ("k", {"total": "no number"}),
    ]
    outcomes, got = do(store, put(*entries), get("k", "other"))
    assert errors(outcomes) == {3: SchemaMismatchError}
    assert [record["total"] for record in got.records] == [2, 3]


def test_batches_of_any_size_reach_all_their_keys(new_table):
    store = new_table()
    keys = [f"k{n}" for n in range(731)]
    written, got, deleted, left = do(
        store,
        put(*((key, {"total": n}) for n, key in enumerate(keys))),
        get(*keys, *keys),
        Operation(DELETE, RowEntries(keys[::2] * 2)),
        get(*keys),
    )
    assert not written.problems
    assert not deleted.problems
    assert [record["total"] for record in got.records] == [*range(731)] * 2
    assert [record is None for record in left.records] == [n % 2 == 0 for n in range(731)]


def test_a_table_is_made_once_whoever_comes_first_and_paid_by_request(new_table, dynamodb_server):
    store = new_table(forget_deleted_after=3600)

    async def several():
        others = [function_like(store) for _ in range(4)]
        await asyncio.gather(*(other.put(f"k{number}", {}) for number, other in enumerate(others)))
        for other in others:
            await other.close()

    asyncio.run(several())
    client = dynamodb_server.client()
    table = client.describe_table(TableName=store.table)["Table"]
    assert table["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
    forgets = client.describe_time_to_live(TableName=store.table)["TimeToLiveDescription"]
    assert forgets == {"TimeToLiveStatus": "ENABLED", "AttributeName": "adjunct_expires"}


def function_like(store: DynamoDbTable, **other) -> DynamoDbTable:
    settings = {
        "columns": store.columns,
        "create": store.create,
        "forget_deleted_after": store.forget_deleted_after,
    }
    where = {"session": store.connection.session, "endpoint_url": store.connection.endpoint_url}
    return DynamoDbTable(store.table, other.pop("key", store.key), **settings | where | other)


@pytest.mark.parametrize(
    ("key", "columns"),
    [
        (("at", "id"), {"id": "string", "at": "bigint"}),
        ("id", {"id": "string"}),
        (("id", "at"), {"id": "string", "at": "timestamp"}),
        (("id", "on"), {"id": "string", "on": "bigint"}),
    ],
)
def test_another_key_than_the_tables_is_refused(new_table, key, columns):
    store = new_table(("id", "at"), {"id": "string", "at": "bigint"})
    do(store, put((("k", 1), {})))
    with pytest.raises(SchemaMismatchError, match=r"has the key id \(S\), at \(N\), but"):
        do(function_like(store, key=key, columns=columns), get("k"))


@pytest.mark.parametrize(("name", "tag"), [("id", "N"), ("other", "S")])
def test_a_table_replaced_by_one_with_another_key_refuses_the_request_not_the_record(
    new_table, dynamodb_server, name, tag
):
    store = new_table("id", {"id": "string", "n": "int"})
    one, conditions = {"n": 1}, Conditions(None, True)

    async def replaced():
        await store.open()
        await store.send(put(("k", one)))
        client = dynamodb_server.client()
        client.delete_table(TableName=store.table)
        client.create_table(
            TableName=store.table,
            AttributeDefinitions=[{"AttributeName": name, "AttributeType": tag}],
            KeySchema=[{"AttributeName": name, "KeyType": "HASH"}],
            BillingMode="PAY_PER_REQUEST",
        )
        requests = (
            put(("k", one)),
            get("k"),
            update(("k", one)),
            marked(PUT, (("k", one),), conditions=conditions),
        )
        try:
            return [await store.send(request) for request in requests]
        finally:
            await store.close()

    for outcomes in asyncio.run(replaced()):
        problem = outcomes.problems[0]
        assert type(problem.error) is TableAccessError
        assert "another one than when it was opened" in problem.error.problem
        assert not is_record_rejected(problem)


def test_a_table_that_is_not_there_is_refused_without_create(new_table):
    with pytest.raises(TableNotFoundError):
        do(new_table(create=False), get("k"))


@pytest.mark.parametrize(
    ("key", "settings", "words"),
    [
        (("a", "b", "c"), {}, "declares 3 key columns"),
        ("id", {"columns": {"id": "boolean"}}, "expected text, a number"),
        ("id", {"columns": {"a": "string"}}, "has the key column 'id'"),
        ("id", {"columns": {"id": "string", "adjunct_x": "int"}}, "'adjunct_x'"),
        ("id", {"create": True}, "without the types of its key"),
        ("id", {"endpoint_url": "http://me:hidden@host"}, "may hold credentials"),
        ("id", {"credentials_env": ["ONE"]}, "credentials_env has 1 names"),
        ("id", {"threads": 0}, "threads is 0"),
    ],
)
def test_declarations_that_can_not_work_are_refused(key, settings, words):
    with pytest.raises(AdjunctError, match=words) as refused:
        DynamoDbTable("table", key, **settings)
    assert "hidden" not in str(refused.value)


# --- updates


def test_an_update_changes_what_it_names_and_nothing_else(new_table):
    store = new_table()
    begin = {"total": 5, "tags": ["a"], "doc": {"x": 1, "y": [2]}, "seen": 1}
    change = Changes(
        {"seen": None}, {"total": 2, "doc": {"x": None, "z.1": "new"}}, {"tags": ["b", "c"]}
    )
    _, outcomes, got = do(
        store, put(("k", begin)), update(("k", change), ("no", {"seen": 1})), get("k", "no")
    )
    assert {place: problem.state for place, problem in outcomes.problems.items()} == {
        1: State.MISSING
    }
    expected = {
        "id": "k",
        "total": 7,
        "tags": ["a", "b", "c"],
        "doc": {"x": None, "y": [2], "z.1": "new"},
    }
    assert got.records == [{**expected, "seen": None}, None]


@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize(
    "default",
    [
        {"total": 0},
        {"total": 10, "seen": 3},
        {},
        {"doc": {"a": 1}},
        {"tags": []},
        {"tags": ["old"]},
    ],
)
def test_a_default_comes_in_where_the_record_is_absent_not_where_a_column_is(
    new_table, default, present
):
    """A record that is there but lacks the default's columns gets none of them."""
    store = new_table()
    change = Changes(add={"total": 1, "doc": {"b": 2}}, append={"tags": ["new"]})
    first = [put(("k", {}))] if present else []
    *_, outcomes, got = do(store, *first, update(("k", change), default=default), get("k"))
    begun = {} if present else default
    expected = {
        "id": "k",
        "total": begun.get("total", 0) + 1,
        "seen": begun.get("seen"),
        "tags": [*begun.get("tags", []), "new"],
        "doc": {**begun.get("doc", {}), "b": 2},
    }
    assert got.records == [expected]
    assert outcomes.defaults_put == (not present)


def test_a_counter_that_begins_at_nothing_is_one_request(new_table):
    store = new_table()
    sent = []

    async def counted():
        await store.open()
        live = await store._get_client()
        live.client.meta.events.register(
            "before-call.dynamodb", lambda model, **_: sent.append(model.name)
        )
        outcomes = await store.send(
            update(
                *((f"k{n % 3}", Changes(add={"total": 1})) for n in range(6)),
                default={"total": 0, "seen": None},
            )
        )
        await store.close()
        return outcomes

    assert asyncio.run(counted()).defaults_put == 3
    assert sent == ["UpdateItem"] * 6


SUMMED = {
    "id": "string",
    "small": "smallint",
    "d": "decimal(5,2)",
    "wide": "decimal(38,4)",
    "any": "decimal",
    "f": "double",
}
_WIDEST = Decimal((0, (9,) * 38, -4))


@pytest.mark.parametrize(
    "default",
    [
        None,
        {"small": 0},
        *(pytest.param(other, marks=pytest.mark.long) for other in ({}, {"f": 1.5})),
    ],
)
@pytest.mark.parametrize(
    ("name", "full", "more", "less", "says"),
    [
        (
            "small",
            2**15 - 1,
            1,
            -1,
            r"'small' is smallint, but got 32768 \(int\); out of range, expected an int of 16 bits",
        ),
        (
            "small",
            -(2**15),
            -1,
            1,
            (
                r"'small' is smallint, but got -32769 \(int\); out of range, expected an int of 16"
                r" bits"
            ),
        ),
        (
            "d",
            Decimal("999.50"),
            Decimal("0.5"),
            Decimal("0.49"),
            r"1000\.00?' ?\)? \(Decimal\); out of range, exp.*5 digits",
        ),
        (
            "d",
            Decimal("-999.99"),
            Decimal("-0.01"),
            Decimal("0.01"),
            "out of range, expected a Decimal of 5 digits, 2 b",
        ),
        ("wide", _WIDEST, Decimal("0.0001"), Decimal("-0.0001"), "out of range|at most 38 digits"),
        (
            "wide",
            _WIDEST.copy_negate(),
            _WIDEST.copy_negate(),
            _WIDEST,
            "out of range|at most 38 digits",
        ),
    ],
)
def test_a_sum_beyond_its_columns_digits_is_refused_and_says_what_it_would_be(
    new_table, name, full, more, less, says, default
):
    store = new_table(columns=SUMMED)
    beyond = Changes({"f": 7.5}, {name: more, "any": Decimal(1)})
    begun, refused, done, got = do(
        store,
        put(("k", {name: full})),
        update(("k", beyond), default=default),
        update(("k", Changes(add={name: less, "any": Decimal(3)})), default=default),
        get("k"),
    )
    assert (begun.problems, done.problems, refused.places(State.REFUSED)) == ({}, {}, [0])
    assert errors(refused) == {0: SchemaMismatchError}
    with pytest.raises(SchemaMismatchError, match=says):
        raise refused.problems[0].error
    with localcontext(prec=60):
        assert got.records == [
            {**dict.fromkeys(SUMMED), "id": "k", name: full + less, "any": Decimal(3)}
        ]


def test_what_others_wrote_beyond_a_type_may_only_come_nearer_to_it(new_table, dynamodb_server):
    store = new_table(columns=SUMMED)
    do(store, put(("other", {})))
    item = {"id": {"S": "k"}, "small": {"N": "40000"}, "d": {"S": "many"}}
    dynamodb_server.client().put_item(TableName=store.table, Item=item)
    adds = [{"small": 1}, {"small": -5}, {"d": Decimal(1)}, {"f": 0.25}]
    *outcomes, got = do(
        store, *(update(("k", Changes(add=add)), default={}) for add in adds), get("k")
    )
    assert [outcome.places(State.REFUSED) for outcome in outcomes] == [[0], [], [0], []]
    assert "which holds {'S': 'many'}, not a number" in str(outcomes[2].problems[0].error)
    assert got.records == [
        {**dict.fromkeys(SUMMED), "id": "k", "small": 39995, "d": "many", "f": 0.25}
    ]


@pytest.mark.parametrize(
    "columns", [None, {"id": "string", "n": "bigint"}, {"id": "string", "n": "decimal"}]
)
def test_other_sums_have_as_many_digits_as_dynamodb(new_table, columns):
    store = new_table({"id": "string"}, columns)
    add = Changes(add={"n": 2**62})
    *_, got = do(store, *[update(("k", add), default={})] * 5, get("k"))
    assert got.records == [{"id": "k", "n": 5 * 2**62}]


def test_counters_of_64_bits_and_floats_are_added_to_without_a_condition():
    codec = ItemCodec(
        "t", {"id": "S"}, [parse_known_column(*pair) for pair in {**COUNTED, **SUMMED}.items()]
    )
    free, held = (
        Changes(add={"total": 1, "f": 0.5, "any": 1}),
        Changes(add={"small": 1, "d": Decimal(-1)}),
    )
    assert codec.encode_changes(codec.changes(codec.key_row("k"), free)).limits == {}
    limits = {"small": ("<=", {"N": "32766"}), "d": (">=", {"N": "-998.99"})}
    assert codec.encode_changes(codec.changes(codec.key_row("k"), held)).limits == limits


def test_as_many_sums_as_an_expression_has_operators_for_are_one_update(new_table):
    names = [f"c{place}" for place in range(61)]
    types = {"id": "string", "at": "bigint", "doc": "json", **dict.fromkeys(names, "int")}
    store, more = new_table(columns=types), Conditions("at", True, True)
    add = dict.fromkeys(names[1:], 3)
    some = Changes({"at": 1}, {**add, "doc": {"a": 1}})
    entries = RowEntries(
        ["k"] * 2, [some] * 2, [{}] * 2, [Mark("s.0", position_of(0, n)) for n in (1, 2)], [1, 2]
    )
    done, many, got = do(
        store,
        Operation(UPDATE, entries, conditions=more),
        update(("k", Changes(add=dict.fromkeys(names, 3)))),
        get("k"),
    )
    assert done.problems == {}
    assert "adds to 61 columns" in str(many.problems[0].error)
    assert got.records == [
        {"id": "k", "at": 1, "doc": {"a": 1}, names[0]: None, **dict.fromkeys(names[1:], 6)}
    ]


# --- conditions


def marked(kind, entries, *, conditions, times=None, source="s.0", start=0) -> Operation:
    marks = [Mark(source, position_of(0, start + place)) for place in range(len(entries))]
    keys, values = [key for key, _ in entries], [value for _, value in entries]
    return Operation(
        kind,
        RowEntries(keys, None if kind is DELETE else values, None, marks, times),
        conditions=conditions,
    )


def test_tombstones_are_items_that_no_get_sees_and_expire_after_the_horizon(
    new_table, dynamodb_server
):
    store = new_table(forget_deleted_after=60)
    newest = Conditions("seen")
    outcomes = do(
        store,
        marked(PUT, [("k", {"seen": 5})], conditions=newest, times=[5]),
        marked(DELETE, [("k", None)], conditions=newest, times=[7]),
        marked(PUT, [("k", {"seen": 6})], conditions=newest, times=[6]),
        get("k"),
        update(("k", {"seen": 1})),
    )
    assert outcomes[2].places(State.SKIPPED) == [0]
    assert outcomes[3].records == [None]
    assert outcomes[4].places(State.MISSING) == [0]
    item = dynamodb_server.client().get_item(TableName=store.table, Key={"id": {"S": "k"}})["Item"]
    assert set(item) == {"id", "adjunct_time", "adjunct_tie", "adjunct_deleted", "adjunct_expires"}
    assert 60 <= int(item["adjunct_expires"]["N"]) - int(item["adjunct_deleted"]["N"]) <= 61
    do(store, marked(PUT, [("k", {"seen": 8})], conditions=newest, times=[8]))
    assert do(store, get("k"))[0].records[0]["seen"] == 8


def test_a_later_delete_without_a_horizon_is_remembered_for_ever(new_table, dynamodb_server):
    store, newest = new_table(forget_deleted_after=60), Conditions("seen")
    do(store, marked(DELETE, [("k", None)], conditions=newest, times=[5]))
    do(
        function_like(store, forget_deleted_after=None),
        marked(DELETE, [("k", None)], conditions=newest, times=[7], start=1),
    )
    item = dynamodb_server.client().get_item(TableName=store.table, Key={"id": {"S": "k"}})["Item"]
    assert set(item) == {"id", "adjunct_time", "adjunct_tie", "adjunct_deleted"}


def test_times_that_can_not_be_compared_are_an_error_and_no_skip(new_table):
    store = new_table({"id": "string"}, None)
    newest = Conditions("seen")
    _, outcomes = do(
        store,
        marked(PUT, [("k", {"seen": 5})], conditions=newest, times=[5]),
        marked(PUT, [("k", {"seen": "late"})], conditions=newest, times=["late"]),
    )
    assert errors(outcomes) == {0: SchemaMismatchError}


def test_idempotent_puts_need_the_columns_that_they_would_take_away(new_table):
    store = new_table({"id": "string"}, None)
    assert not store.capabilities.idempotent
    with pytest.raises(ConfigurationError) as caught:
        do(store, marked(PUT, [("k", {})], conditions=Conditions(idempotent=True)))
    assert caught.value.argument == "columns"


def count_up(settings: dict, env: dict, source: str) -> int:
    """Send every message of a source twice, in batches, and return how many were passed over."""
    import os

    os.environ.update(env)
    store = DynamoDbTable(**settings)
    once = Conditions(idempotent=True)
    messages = [
        (f"k{n % 7}", Changes(add={"total": n}, append={"tags": [source]})) for n in range(60)
    ]
    batches = [
        Operation(UPDATE, RowEntries(
            [key for key, _ in messages[start : start + 20]],
            [value for _, value in messages[start : start + 20]],
            [{"total": 0}] * 20,
            [Mark(source, position_of(0, start + place)) for place in range(20)],
        ), conditions=once)
        for start in (0, 20, 0, 40, 20, 40)
    ]  # fmt: skip
    outcomes = do(store, *batches)
    assert not any(
        problem.state is not State.SKIPPED for out in outcomes for problem in out.problems.values()
    )
    return sum(len(out.problems) for out in outcomes)


@pytest.mark.long  # two sources under faults: test_exact_under_faults.py
def test_two_processes_at_once_count_exactly_under_marks(dynamodb, dynamodb_server):
    store = DynamoDbTable(new_name(), "id", columns=COUNTED, create=True)
    settings = pickle.loads(pickle.dumps(store)).to_dict()
    with spawned(2) as pool:
        jobs = [(settings, dynamodb_server.env, source) for source in ("s.0", "s.1")]
        assert call_all(pool, count_up, jobs) == [60, 60]
    (got,) = do(store, get(*(f"k{n}" for n in range(7))))
    for key, record in enumerate(got.records):
        numbers = range(key, 60, 7)
        assert record["total"] == 2 * sum(numbers)
        assert sorted(record["tags"]) == sorted(["s.0", "s.1"] * len(numbers))


# --- what DynamoDB Local never does


class Troubled:
    """A client whose requests go through `answer(name, request, send)`; the rest is the real
    one's.
    """

    def __init__(self, client, answer):
        self._client, self._answer = client, answer

    def __getattr__(self, name):
        real = getattr(self._client, name)
        if name not in ("batch_write_item", "batch_get_item", "put_item", "update_item"):
            return real
        return lambda **request: self._answer(name, request, real)


def troubled(store: DynamoDbTable, answer, *operations: Operation) -> list[Outcomes]:
    """Send operations through a client that does as `answer` says; pauses take no time."""
    from dataclasses import replace

    async def all_of_them():
        live = await store._get_client()
        pauses: list[float] = []
        store._open.here().live = replace(
            live, client=Troubled(live.client, answer), pause=pauses.append
        )
        outcomes = [await store.send(operation) for operation in operations]
        await store.close()
        return outcomes, pauses

    return asyncio.run(all_of_them())


def test_unprocessed_items_fail_with_a_pause_and_are_not_sent_again_at_once(new_table):
    sent = count()

    def every_third_is_left(name, request, send):
        next(sent)
        ((table, requests),) = request["RequestItems"].items()
        answer = send(RequestItems={table: [r for n, r in enumerate(requests) if n % 3]})
        return {**answer, "UnprocessedItems": {table: requests[::3]}}

    store = new_table()
    keys = [f"k{n}" for n in range(25)]
    (outcomes,), _ = troubled(
        store, every_third_is_left, put(*((key, {"total": 1}) for key in keys))
    )
    assert next(sent) == 1
    assert outcomes.places(State.FAILED) == list(range(0, 25, 3))
    for problem in outcomes.problems.values():
        assert isinstance(problem.error, TableUnavailableError)
        assert problem.retry_after
    (got,) = do(store, get(*keys))
    assert [n for n, record in enumerate(got.records) if record is None] == list(range(0, 25, 3))


def test_unprocessed_keys_are_asked_for_again_after_longer_and_longer_pauses(new_table):
    def two_at_a_time(name, request, send):
        ((table, asked),) = request["RequestItems"].items()
        keys, left = asked["Keys"][:2], asked["Keys"][2:]
        answer = send(RequestItems={table: {**asked, "Keys": keys}})
        return {**answer, "UnprocessedKeys": {table: {**asked, "Keys": left}} if left else {}}

    store = new_table()
    keys = [f"k{n}" for n in range(11)]
    do(store, put(*((key, {"total": n}) for n, key in enumerate(keys))))
    (some, all_of_them), pauses = troubled(
        store, two_at_a_time, get(*keys[:13]), get(*keys[:3], *keys[:3])
    )
    assert [record["total"] for record in all_of_them.records] == [0, 1, 2] * 2
    assert some.records.count(None) == 0 or some.places(State.FAILED)
    assert pauses[:5] == sorted(pauses[:5])
    assert 0.02 < pauses[0] < pauses[4] < 0.9


def test_answers_that_name_the_table_otherwise_are_understood(new_table):
    """By its ARN, as a request may name it, too."""

    def by_arn(name, request, send):
        ((table, asked),) = request["RequestItems"].items()
        arn = f"arn:aws:dynamodb:eu-west-1:1:table/{table}"
        if name == "batch_get_item":
            answer = send(RequestItems={table: {**asked, "Keys": asked["Keys"][:2]}})
            left = {**asked, "Keys": asked["Keys"][2:]}
            found = {arn: answer["Responses"][table]}
            return {
                **answer,
                "Responses": found,
                "UnprocessedKeys": {arn: left} if left["Keys"] else {},
            }
        return {**send(RequestItems={table: asked[1:]}), "UnprocessedItems": {arn: asked[:1]}}

    store = new_table()
    keys = ["a", "b", "c"]
    (written, got), _ = troubled(
        store, by_arn, put(*((key, {"total": 1}) for key in keys)), get(*keys)
    )
    assert written.places(State.FAILED) == [0]
    assert not got.problems
    assert [record and record["total"] for record in got.records] == [None, 1, 1]


def test_unprocessed_items_that_were_not_sent_fail_all_that_were(new_table):
    store = new_table()

    def names_another(name, request, send):
        ((table, _),) = request["RequestItems"].items()
        another = {"PutRequest": {"Item": {store.key[0]: {"S": "nobody"}}}}
        return {**send(**request), "UnprocessedItems": {table: [another]}}

    (outcomes,), _ = troubled(store, names_another, put(*((key, {"total": 1}) for key in "abc")))
    assert outcomes.places(State.FAILED) == [0, 1, 2]


def client_error(code: str, status: int = 400, **headers):
    from botocore.exceptions import ClientError

    metadata = {"HTTPStatusCode": status, "HTTPHeaders": headers}
    return ClientError(
        {"Error": {"Code": code, "Message": "why"}, "ResponseMetadata": metadata}, "Any"
    )


def lost():
    from botocore.exceptions import ReadTimeoutError

    return ReadTimeoutError(endpoint_url="http://127.0.0.1")


def not_sent():
    from botocore.exceptions import EndpointConnectionError

    return EndpointConnectionError(endpoint_url="http://127.0.0.1")


@pytest.mark.parametrize(
    ("error", "state", "kind", "pause"),
    [
        (
            lambda: client_error("ProvisionedThroughputExceededException"),
            State.FAILED,
            TableUnavailableError,
            0.1,
        ),
        (
            lambda: client_error("ThrottlingException", **{"retry-after": "3"}),
            State.FAILED,
            TableUnavailableError,
            3,
        ),
        (lambda: client_error("Whatever", 429), State.FAILED, TableUnavailableError, 0.1),
        (
            lambda: client_error("TransactionConflictException"),
            State.FAILED,
            TableUnavailableError,
            None,
        ),
        (
            lambda: client_error("InternalServerError", 500),
            State.UNKNOWN,
            TableUnavailableError,
            None,
        ),
        (lost, State.UNKNOWN, TableUnavailableError, None),
        (not_sent, State.FAILED, TableUnavailableError, None),
        (lambda: client_error("AccessDeniedException"), State.REFUSED, TableAccessError, None),
        (
            lambda: client_error("ItemCollectionSizeLimitExceededException"),
            State.REFUSED,
            TableError,
            None,
        ),
        (lambda: client_error("RequestExpired"), State.FAILED, TableUnavailableError, 1.0),
        (
            lambda: RuntimeError("the refreshed credentials are still expired"),
            State.REFUSED,
            TableError,
            None,
        ),
    ],
)
def test_an_error_says_whether_the_entries_may_be_sent_again(new_table, error, state, kind, pause):
    def fails(name, request, send):
        raise error()

    once = Conditions(idempotent=True)
    single = marked(UPDATE, [("k", {"seen": 1}), ("k", {"seen": 2})], conditions=once)
    (batch, sequence), _ = troubled(new_table(), fails, put(("a", {}), ("b", {})), single)
    for place, problem in batch.problems.items():
        assert (place, problem.state, type(problem.error), problem.retry_after) == (
            place,
            state,
            kind,
            pause,
        )
    assert len(batch.problems) == 2
    assert sequence.problems[0].state is state
    of_entry = "ItemCollection" in str(error())  # only such an entry becomes a letter
    assert (
        is_record_rejected(batch.problems[0])
        == is_record_rejected(sequence.problems[0])
        == of_entry
    )
    # What comes after an entry that is sent again has to wait for it, or it would come first.
    assert sequence.problems[1].state is (State.REFUSED if state is State.REFUSED else State.FAILED)


def test_a_lost_answer_to_an_increment_under_a_mark_counts_once(new_table):
    calls = count()

    def every_answer_is_lost_once(name, request, send):
        answer = send(**request)
        if next(calls) % 2 == 0:
            raise lost()
        return answer

    once = Conditions(idempotent=True)
    first = marked(PUT, [("k", {"total": 0})], conditions=once)
    add = marked(UPDATE, [("k", Changes(add={"total": 1}))], conditions=once, start=5)
    store = new_table()
    (_, unknown, again), _ = troubled(store, every_answer_is_lost_once, first, add, add)
    assert (unknown.problems, again.places(State.SKIPPED)) == ({}, [0])
    assert do(store, get("k"))[0].records[0]["total"] == 1


@pytest.mark.parametrize("of_entry", [False, True])
def test_no_later_increment_overtakes_one_that_the_repeat_will_send(new_table, of_entry):
    calls = count()

    def the_second_fails(name, request, send):
        if next(calls) == 1:
            raise (
                client_error("ValidationException")
                if of_entry
                else RuntimeError("the credentials are expired")
            )
        return send(**request)

    store, once = new_table(), Conditions(idempotent=True)
    first = marked(PUT, [("k", {"total": 0})], conditions=once)
    add = marked(
        UPDATE, [("k", Changes(add={"total": n})) for n in (1, 2)], conditions=once, start=5
    )
    (_, failed, repeated), _ = troubled(store, the_second_fails, first, add, add)
    assert failed.places(State.REFUSED) == ([0] if of_entry else [0, 1])
    assert repeated.places(State.SKIPPED) == ([0, 1] if of_entry else [])
    assert do(store, get("k"))[0].records[0]["total"] == (2 if of_entry else 3)


def test_one_bad_item_of_a_batch_is_found_by_halves(new_table):
    def no_sevens(name, request, send):
        ((_, requests),) = request["RequestItems"].items()
        if any(r["PutRequest"]["Item"]["total"] == {"N": "7"} for r in requests):
            raise client_error("ValidationException")
        return send(**request)

    keys = [f"k{n}" for n in range(20)]
    (outcomes,), _ = troubled(
        new_table(), no_sevens, put(*((key, {"total": n}) for n, key in enumerate(keys)))
    )
    assert errors(outcomes) == {7: TableError}


def test_a_row_created_and_deleted_again_and_again_is_a_retryable_failure(new_table):
    from botocore.exceptions import ClientError

    answers = count()

    def never_as_expected(name, request, send):
        item = {"Item": {"id": {"S": "k"}}} if next(answers) % 2 else {}
        raise ClientError(
            {"Error": {"Code": "ConditionalCheckFailedException", "Message": ""}, **item},
            "UpdateItem",
        )

    (outcomes,), _ = troubled(
        new_table(), never_as_expected, update(("k", {"seen": 1}), default={"total": 1})
    )
    assert outcomes.places(State.FAILED) == [0]


# --- credentials


def test_a_table_travels_without_secrets_and_finds_them_where_it_arrives(
    dynamodb_server, monkeypatch
):
    for name in dynamodb_server.env:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("THE_ID", "adjuncttest")
    monkeypatch.setenv("THE_SECRET", "hidden-secret")
    store = DynamoDbTable(
        new_name(),
        "id",
        columns=COUNTED,
        create=True,
        region="us-east-1",
        endpoint_url=dynamodb_server.endpoint,
        credentials_env=("THE_ID", "THE_SECRET"),
    )
    reported = repr(store) + str(describe_function(store)) + pickle.dumps(store).decode("latin-1")
    assert "hidden-secret" not in reported
    assert "adjuncttest" not in reported
    assert not do(pickle.loads(pickle.dumps(store)), put(("k", {})))[0].problems
    assert not do(function_from_description(describe_function(store)), put(("k", {})))[0].problems
    monkeypatch.delenv("THE_SECRET")
    with pytest.raises(ConfigurationError) as caught:
        do(store, get("k"))
    assert caught.value.setting == "THE_SECRET"


def test_a_subclass_arrives_as_itself(new_table):
    store = Doubling("table", "id")
    assert type(pickle.loads(pickle.dumps(store))) is Doubling


class Doubling(DynamoDbTable):
    """A table of the user's own."""


def test_a_session_stays_in_its_process(new_table):
    with pytest.raises(ConfigurationError) as caught:
        pickle.dumps(new_table())
    assert caught.value.argument == "session"


def test_a_cancelled_request_sends_no_more_of_its_entries(new_table):
    sent, third = count(), threading.Event()

    def slow(name, request, send):
        if next(sent) == 2:
            third.set()
        time.sleep(0.5)
        return send(**request)

    async def given_up():
        live = await store._get_client()
        from dataclasses import replace

        store._open.here().live = replace(live, client=Troubled(live.client, slow))
        sending = asyncio.create_task(
            store.send(update(*((f"k{n}", {}) for n in range(100)), default={}))
        )
        assert await asyncio.to_thread(third.wait, 120)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await store.close()

    store = new_table(threads=2)
    asyncio.run(given_up())
    assert next(sent) <= 8


def test_boto3_does_not_repeat_by_itself(new_table):
    async def settings():
        live = await new_table()._get_client()
        return SimpleNamespace(
            retries=live.client.meta.config.retries,
            pool=live.client.meta.config.max_pool_connections,
        )

    effective = asyncio.run(settings())
    assert effective.retries["total_max_attempts"] == 1
    assert effective.pool == 16


def test_a_direct_call_on_an_idempotent_table_leaves_the_marks_of_messages(new_table):
    store = new_table()
    table = RemoteTable(
        "counted", key="id", read_function=store, write_function=store, idempotent=True
    )
    add = marked(UPDATE, [("k", Changes(add={"total": 1}))], conditions=Conditions(idempotent=True))
    begin = marked(PUT, [("k", {"total": 0})], conditions=Conditions(idempotent=True), source="s.1")

    async def in_turn():
        await table.send(begin)
        await table.send(add)
        seen = [await table.get("k")]
        for direct in (lambda: table.put("k", {"id": "k", "total": 10}), lambda: table.delete("k")):
            await direct()
            outcomes = [await table.send(add), await table.send(begin)]
            assert [out.places(State.SKIPPED) for out in outcomes] == [[0], [0]]
            seen.append(await table.get("k"))
        await table.close()
        return [record and record["total"] for record in seen]

    assert asyncio.run(in_turn()) == [1, 10, None]

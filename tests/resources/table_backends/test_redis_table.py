"""`RedisTable` on a real server, against the in-memory twin and plain Python."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections import Counter
from concurrent import futures
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    SchemaMismatchError,
    TableAccessError,
    TableError,
    TableUnavailableError,
)
from dagster_adjunct.resources.table_backends.columns import (
    describe_function,
    function_from_description,
    parse_known_column,
)
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.table_backends.redis import RedisCodec, RedisTable
from dagster_adjunct.resources.tables.functions import is_record_rejected
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
from tests.resources.table_backends.every_type import RECORD, TYPES
from tests.rounds import rounds
from tests.servers.redis import running_redis
from tests.spawned import call_all, spawned

pytestmark = pytest.mark.server

GET, PUT, ABSENT = OperationKind.GET, OperationKind.PUT, OperationKind.PUT_IF_ABSENT
DELETE, UPDATE = OperationKind.DELETE, OperationKind.UPDATE
COLUMNS = {
    "id": "string",
    "n": "bigint",
    "small": "smallint",
    "d": "decimal(38,4)",
    "f": "double",
    "s": "string",
    "at": "timestamp",
    "l": "array<bigint>",
    "b": "boolean",
    "j": "json",
}
_numbers = count()


@pytest.fixture
def new_table(redis_server):
    """Makes an empty table; settings of the declaration may be given."""

    def make(key="id", columns=COLUMNS, **settings):
        where = {} if {"url", "url_env"} & set(settings) else {"url": redis_server.url()}
        return RedisTable(f"test{next(_numbers)}", key, columns=columns, **where, **settings)

    return make


def send(table, *operations):
    """The outcomes of operations, one after the other."""

    async def all_of_them():
        await table.open()
        outcomes = [await table.send(operation) for operation in operations]
        await table.close()
        return outcomes

    return asyncio.run(all_of_them())


def states(outcomes):
    return {place: problem.state for place, problem in outcomes.problems.items()}


def mark(offset, source="s.t.0", ordinal=0):
    return Mark(source, position_of(0, offset, ordinal))


# -- against the twin

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
_in_json = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4)
_moments = st.datetimes(timezones=st.just(UTC))
_values = {
    "n": st.integers(-(2**61), 2**61),
    "small": st.integers(-99, 99),
    "d": st.decimals(
        allow_nan=False, allow_infinity=False, places=4, min_value=-(10**9), max_value=10**9
    ),
    "f": st.floats(allow_nan=False, allow_infinity=False),
    "s": _texts,
    "at": _moments,
    "b": st.booleans(),
    "l": st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=3),
    "j": (
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | _in_json
            | st.sampled_from(['"', "{", "\\", "]},"]),
            lambda inner: (
                st.lists(inner, max_size=2) | st.dictionaries(_in_json, inner, max_size=3)
            ),
            max_leaves=6,
        ).filter(lambda value: isinstance(value, dict))
    ),
}
_records = st.fixed_dictionaries(
    {}, optional={name: st.none() | values for name, values in _values.items()}
)
_numbers_to_add = {"n": st.integers(-(2**55), 2**55), "d": _values["d"], "f": st.floats(-1e9, 1e9)}
_numbers_to_add["j"] = _values["j"]
_changes = st.builds(
    Changes,
    set=st.fixed_dictionaries(
        {}, optional={"s": st.none() | _texts, "at": _moments, "small": _values["small"]}
    ),
    add=st.fixed_dictionaries(
        {}, optional={name: st.none() | v for name, v in _numbers_to_add.items()}
    ),
    append=st.fixed_dictionaries({}, optional={"l": st.none() | _values["l"]}),
    remove=st.sampled_from([(), ("b",)]),
)
_keys = st.sampled_from(["a", "b", "ключ", ""])


@st.composite
def _operations(draw, conditions):
    kind = draw(st.sampled_from([PUT, ABSENT, DELETE, UPDATE, UPDATE, GET]))
    keys = draw(st.lists(_keys, min_size=1, max_size=6))
    size = len(keys)

    def column(values):
        return draw(st.lists(values, min_size=size, max_size=size))

    entries = RowEntries(keys)
    if kind in (PUT, ABSENT):
        entries = RowEntries(keys, column(_records))
    elif kind is UPDATE:
        entries = RowEntries(keys, column(_changes | _records), column(st.none() | _records))
    if conditions and kind is not GET:
        marks = column(
            st.builds(
                mark, st.integers(0, 12), st.sampled_from(["s.t.0", "s.t.1"]), st.integers(0, 2)
            )
        )
        newest = column(
            _values["n"] if conditions.newest_by == "n" else st.integers(0, 9).map(_late)
        )
        entries = dataclasses.replace(entries, marks=marks, newest=newest)
        # the time stands in the record, as a stream has it
        if conditions.newest_by and kind in (PUT, ABSENT):
            entries = dataclasses.replace(
                entries,
                values=[
                    {**v, conditions.newest_by: t}
                    for v, t in zip(entries.values, newest, strict=True)
                ],
            )
    return Operation(kind, entries, conditions=conditions if kind is not GET else Conditions())


def _late(hour):
    return datetime(2013, 7, 1, tzinfo=UTC) + timedelta(hours=hour)


_CONDITIONS = st.sampled_from(
    [
        Conditions(),
        Conditions(idempotent=True),
        Conditions(newest_by="at"),
        Conditions(newest_by="n", idempotent=True),
    ]
)


@pytest.mark.rounds
@settings(max_examples=rounds(15, 60), suppress_health_check=list(HealthCheck))
@given(data=st.data(), conditions=_CONDITIONS)
def test_every_sequence_of_operations_does_what_the_twin_does(new_table, data, conditions):
    of_either = st.one_of(_operations(conditions), _operations(Conditions()))
    operations = data.draw(st.lists(of_either, min_size=1, max_size=8))
    operations.append(Operation(GET, RowEntries(["a", "b", "ключ", ""])))
    twin = MemoryTable("twin")
    twin.clear()
    for operation, here, there in zip(
        operations, send(new_table(), *operations), send(twin, *operations), strict=True
    ):
        assert states(here) == states(there), operation
        assert here.defaults_put == there.defaults_put
        if operation.kind is GET:
            keyed = zip(operation.entries.keys, there.records, strict=True)
            assert here.records == [
                None if record is None else {**record, "id": key} for key, record in keyed
            ]


# -- values and keys


def test_every_type_reads_back_as_it_was_written(new_table):
    table = new_table(
        columns={
            **TYPES,
            "tags": "array<timestamp>",
            "sums": "decimal(9,2)[]",
            "fs": "array<double>",
        }
    )
    moment = datetime(1, 1, 1, 0, 0, 0, 1, tzinfo=UTC)
    record = RECORD | {"tags": [moment, None], "sums": [Decimal("0.10")], "fs": [0.1, 5e-324, -0.0]}
    got = send(
        table,
        Operation(PUT, RowEntries([RECORD["id"]], [record])),
        Operation(GET, RowEntries([RECORD["id"]])),
    )
    assert got[1].records == [record]
    assert {name: type(value) for name, value in got[1].records[0].items()} == {
        n: type(v) for n, v in record.items()
    }


@pytest.mark.parametrize("text", ["", "\0", "\0\0", "\0a", "null", "None", "  ", "\r\n$3\r\n", "✈"])
def test_null_missing_and_every_text_are_distinguished(new_table, redis_server, text):
    table = new_table(columns={"id": "string", "s": "string", "raw": "binary"})
    puts = Operation(
        PUT,
        RowEntries(
            ["null", "missing", "text"], [{"s": None}, {}, {"s": text, "raw": text.encode()}]
        ),
    )
    records = send(table, puts, Operation(GET, RowEntries(["null", "missing", "text"])))[1].records
    assert records == [
        {"id": "null", "s": None},
        {"id": "missing"},
        {"id": "text", "s": text, "raw": text.encode()},
    ]
    with redis_server.client() as client:
        stored = client.hgetall(f"{table.prefix}:text")
    assert stored[b"s"] == (b"\0" if text.startswith("\0") else b"") + text.encode(), (
        "the text itself is stored"
    )


_parts = st.text(st.sampled_from(":\\a{}\0%é\n"), max_size=4)


@pytest.mark.rounds
@settings(max_examples=rounds(60, 200), suppress_health_check=list(HealthCheck))
@given(
    one=st.tuples(_parts, _parts, st.binary(max_size=3)),
    other=st.tuples(_parts, _parts, st.binary(max_size=3)),
)
def test_two_keys_of_several_columns_never_share_a_name(one, other):
    columns = [
        parse_known_column(*pair) for pair in (("a", "string"), ("b", "string"), ("c", "binary"))
    ]
    codec = RedisCodec("t", "t", ["a", "b", "c"], columns, 1000, 0)
    names = [codec.name(codec.key_row(key)) for key in (one, other)]
    assert (names[0] == names[1]) == (one == other)


def test_keys_of_several_columns_find_their_records(new_table):
    keys = [
        ("a:b", "c"),
        ("a", "b:c"),
        ("a\\", ":c"),
        ("a\\:", "c"),
        ("", ""),
        ("", ":"),
        (":", ""),
        ("ü", "✈"),
    ]
    table = new_table(["x", "y"], {"x": "string", "y": "string", "n": "bigint"})
    puts = Operation(PUT, RowEntries(keys, [{"n": n} for n in range(len(keys))]))
    got = send(table, puts, Operation(GET, RowEntries(keys)))[1].records
    assert got == [{"x": x, "y": y, "n": n} for n, (x, y) in enumerate(keys)]


def test_equal_keys_are_one_record_however_they_are_written(new_table):
    table = new_table(["at", "d"], {"at": "timestamp", "d": "decimal(9,3)", "n": "int"})
    there = datetime(2013, 7, 1, 7, tzinfo=timezone(timedelta(hours=2)))
    here = datetime(2013, 7, 1, 5, tzinfo=UTC)
    put = Operation(
        PUT, RowEntries([(there, Decimal("1.50")), (there, Decimal("-0"))], [{"n": 1}, {"n": 2}])
    )
    got = send(
        table, put, Operation(GET, RowEntries([(here, Decimal("1.5")), (here, Decimal(0))]))
    )[1].records
    assert [record["n"] for record in got] == [1, 2]


@pytest.mark.parametrize(
    ("key", "columns", "words"),
    [
        ("id", {"id": "double"}, "equal values may have several texts"),
        ("id", {"id": "decimal"}, "equal values"),
        ("id", {"id": "json"}, "can't be a key"),
        ("id", {"a": "string"}, "no column 'id'"),
        ("id", {"id": "string", "adjunct_x": "int"}, "names that begin with adjunct_"),
        ("id", {"id": "string", "x": "uuid"}, "expected string"),
    ],
)
def test_columns_that_can_not_work_are_refused_when_declared(key, columns, words):
    with pytest.raises((ConfigurationError, SchemaMismatchError), match=words):
        RedisTable("t", key, columns=columns, url="redis://h")


def test_an_entry_that_does_not_fit_is_refused_alone(new_table):
    table = new_table(largest_value=50)
    bad = [
        {"n": 2**63},
        {"n": True},
        {"n": 2.5},
        {"small": 2**15},
        {"d": Decimal("0.00001")},
        {"d": Decimal(10**34)},
        {"s": "\ud800"},
        {"at": datetime(2013, 7, 1)},
        {"j": {1: 2}},
        {"j": [float("nan")]},
        {"j": (1, 2)},
        {"l": [2.5]},
        {"l": {1, 2}},
        {"nosuch": 1},
        {"id": "other"},
        {"s": "x" * 51},
        ["no", "mapping"],
        Changes(add={"s": 1}),
        Changes(append={"s": "x"}),
        Changes(remove=["id"]),
        Changes(set={"n": 1}, add={"n": 1}),
        Changes(add={"n": 0.5}),
    ]
    keys = ["good", *(f"k{n}" for n in range(len(bad))), "good"]
    update = Operation(UPDATE, RowEntries(keys, [{"n": 1}, *bad, {"s": "ok"}], [{}] * len(keys)))
    outcomes, got = send(table, update, Operation(GET, RowEntries(keys)))
    assert states(outcomes) == dict.fromkeys(range(1, len(bad) + 1), State.REFUSED)
    assert got.records == [
        {"id": "good", "n": 1, "s": "ok"},
        *[None] * len(bad),
        {"id": "good", "n": 1, "s": "ok"},
    ]
    for problem in outcomes.problems.values():
        assert isinstance(problem.error, SchemaMismatchError)
        assert table.prefix in str(problem.error)


# -- numbers and lists


_wide = st.integers(-(10**37), 10**37).map(lambda n: Decimal(n).scaleb(-4))


@pytest.mark.rounds
@settings(max_examples=rounds(15, 60), suppress_health_check=list(HealthCheck))
@given(
    integers=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6),
    decimals=st.lists(_wide, max_size=6),
    floats=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=6),
)
def test_sums_are_exact_and_what_leaves_the_type_changes_nothing(
    new_table, integers, decimals, floats
):
    from decimal import localcontext

    expected = {"n": 0, "d": Decimal(0), "f": 0.0}
    refused = []
    updates = [
        Changes(add={name: v})
        for name, vs in [("n", integers), ("d", decimals), ("f", floats)]
        for v in vs
    ]
    with localcontext(prec=80):
        for place, update in enumerate(updates):
            ((name, value),) = update.add.items()
            total = expected[name] + value
            fits = -(2**63) <= total < 2**63 if name == "n" else abs(total) < 10**34
            if name != "f" and not fits:
                refused.append(place)
            else:
                expected[name] = total
        table = new_table()
        add = Operation(UPDATE, RowEntries(["k"] * len(updates), updates, [{}] * len(updates)))
        outcomes, got = send(table, add, Operation(GET, RowEntries(["k"])))
        assert outcomes.places(State.REFUSED) == refused
        record = got.records[0] or {}
        assert {name: record.get(name, type(zero)()) for name, zero in expected.items()} == expected


def test_a_refused_part_leaves_the_whole_entry_undone_and_others_done(new_table, redis_server):
    table = new_table()
    with redis_server.client() as client:
        client.hset(f"{table.prefix}:foreign", mapping={"n": "many", "l": "{}", "s": "kept"})
    updates = [
        ("k", Changes(set={"s": "a"}, add={"small": 2**15 - 1})),
        ("k", Changes(set={"s": "b"}, add={"n": 1, "small": 1})),  # beyond a smallint
        ("k", Changes(add={"n": 5})),
        ("foreign", Changes(set={"s": "lost"}, add={"n": 1})),
        ("foreign", Changes(set={"s": "lost"}, append={"l": [1]})),
    ]
    keys, values = zip(*updates, strict=True)
    update = Operation(UPDATE, RowEntries(keys, values, [{}] * len(keys)))
    outcomes, got = send(table, update, Operation(GET, RowEntries(["k"])))
    assert outcomes.places(State.REFUSED) == [1, 3, 4]
    assert "column small would become 32768" in str(outcomes.problems[1].error)
    assert got.records == [{"id": "k", "s": "a", "small": 2**15 - 1, "n": 5}]
    with redis_server.client() as client:
        assert client.hgetall(f"{table.prefix}:foreign") == {
            b"n": b"many",
            b"l": b"{}",
            b"s": b"kept",
        }


def test_lists_grow_at_their_end_up_to_the_largest_value(new_table):
    table = new_table(largest_value=28)
    appends = [Changes(append={"l": [n]}, add={"j": {f"é{n}": n}}) for n in range(10)]
    update = Operation(UPDATE, RowEntries(["k"] * 10, appends, [{}] * 10))
    outcomes, got = send(table, update, Operation(GET, RowEntries(["k"])))
    assert outcomes.places(State.REFUSED) == [3, 4, 5, 6, 7, 8, 9]
    assert got.records == [{"id": "k", "l": [0, 1, 2], "j": {"é0": 0, "é1": 1, "é2": 2}}]


# -- conditions


@pytest.mark.parametrize(
    ("column", "ascending"),
    [
        ("n", [-(2**63), -(2**62) - 1, -(2**62), -10, -9, 0, 9, 10, 2**53, 2**53 + 1, 2**63 - 1]),
        ("d", [Decimal(n).scaleb(-1) for n in (-1001, -1000, -1, 0, 1, 90071992547409930, 90071992547409931)]),
        ("f", [-1e300, -0.1, 0.0, 5e-324, 0.1, 1e300]),
        ("at", [datetime(y, 1, 1, microsecond=m, tzinfo=UTC) for y in (1, 999, 2013, 9999) for m in (0, 1)]),
        ("s", ["", "\0", "A", "B", "a", "a ", "ab", "é", "✈"]),
    ],
)  # fmt: skip
def test_the_newest_is_known_exactly_whatever_the_type_of_its_time(new_table, column, ascending):
    table = new_table()
    conditions = Conditions(newest_by=column)
    n = len(ascending)
    pairs = [(a, b) for a in range(n) for b in range(n)]
    names = [f"{a} {b}" for a, b in pairs]

    def puts(places):
        values = [{column: ascending[place]} for place in places]
        marks = [mark(1)] * len(places)
        return Operation(
            PUT,
            RowEntries(names, values, None, marks, [ascending[p] for p in places]),
            (),
            conditions,
        )

    plain = [f"plain {name}" for name in names]
    without = Operation(PUT, RowEntries(plain, [{column: ascending[a]} for a, _ in pairs]))
    over = puts([b for _, b in pairs])
    over = over.with_entries(dataclasses.replace(over.entries, keys=plain))
    _, second, _, late = send(
        table, puts([a for a, _ in pairs]), puts([b for _, b in pairs]), without, over
    )
    older = [place for place, (a, b) in enumerate(pairs) if b < a]
    assert second.places(State.SKIPPED) == older
    assert late.places(State.SKIPPED) == older, (
        "a record put without conditions has the time in its column"
    )


def test_a_tombstone_keeps_what_is_older_out_until_its_horizon(new_table, redis_server):
    table = new_table(forget_deleted_after=100)
    conditions = Conditions(newest_by="n", idempotent=True)

    def one(kind, time, offset, **more):
        entries = RowEntries(["k"], [more] if more else None, None, [mark(offset)], [time])
        return Operation(kind, entries, conditions=conditions)

    put, deleted, late, got = send(
        table,
        one(PUT, 5, 1, s="a"),
        one(DELETE, 7, 2),
        one(PUT, 6, 3, s="late"),
        Operation(GET, RowEntries(["k"])),
    )
    assert (put.problems, deleted.problems, states(late), got.records) == (
        {},
        {},
        {0: State.SKIPPED},
        [None],
    )
    with redis_server.client() as client:
        assert 90 < client.ttl(f"{table.prefix}:k") <= 100
        send(table, one(PUT, 8, 4, s="new"))
        assert client.ttl(f"{table.prefix}:k") == -1, "a record stays"
        assert b"adjunct_deleted" not in client.hgetall(f"{table.prefix}:k")


def test_writes_without_conditions_keep_what_conditions_know(new_table):
    table = new_table()
    counted = Conditions(idempotent=True)
    add = Operation(
        UPDATE, RowEntries(["k"], [Changes(add={"n": 1})], [{}], [mark(7)]), conditions=counted
    )
    put = Operation(PUT, RowEntries(["k"], [{"s": "whole"}]))
    first, _, again, got, _, after, gone = send(
        table,
        add,
        put,
        add,
        Operation(GET, RowEntries(["k"])),
        Operation(DELETE, RowEntries(["k"])),
        add,
        Operation(GET, RowEntries(["k"])),
    )
    assert (states(first), states(again), states(after)) == (
        {},
        {0: State.SKIPPED},
        {0: State.SKIPPED},
    )
    assert got.records == [{"id": "k", "s": "whole"}]
    assert gone.records == [None]


def test_a_put_replaces_what_was_stored_whoever_stored_it(new_table, redis_server):
    table = new_table()
    with redis_server.client() as client:
        client.hset(f"{table.prefix}:k", mapping={"s": "old", "by_others": "x"})
        assert send(table, Operation(GET, RowEntries(["k"])))[0].records == [
            {"id": "k", "s": "old"}
        ]
        send(table, Operation(PUT, RowEntries(["k"], [{"n": 1}])))
        assert client.hgetall(f"{table.prefix}:k") == {b"id": b"k", b"n": b"1"}


# -- several writers, restarts


def _add_ones(declaration, source, keys, offsets, turns):
    table = pickle.loads(declaration)

    async def add():
        skipped = 0
        for _ in range(turns):  # the same messages again, as replays bring them
            for start in range(0, offsets, 50):
                wanted = [(n, k) for n in range(start, start + 50) for k in keys]
                entries = RowEntries(
                    [k for _, k in wanted],
                    [Changes(add={"n": 1, "f": 0.5}, append={"l": [n]}) for n, _ in wanted],
                    [{}] * len(wanted),
                    [mark(n, source) for n, _ in wanted],
                )
                await table.open()
                outcomes = await table.send(
                    Operation(UPDATE, entries, conditions=Conditions(idempotent=True))
                )
                assert set(states(outcomes).values()) <= {State.SKIPPED}, outcomes.problems
                skipped += len(outcomes.problems)
        await table.close()
        return skipped

    return asyncio.run(add())


@pytest.mark.long  # killed writers at once: test_killed_writers.py
def test_processes_at_once_count_exactly_under_marks(new_table, redis_server):
    table, keys = new_table(), [f"k{n}" for n in range(10)]
    given = [(pickle.dumps(table), f"s.t.{p}", keys[p:] + keys[:p], 200, 2) for p in range(2)]
    with spawned(2) as pool:
        assert call_all(pool, _add_ones, given) == [2000, 2000]
    records = send(table, Operation(GET, RowEntries(keys)))[0].records
    for record in records:
        assert (record["n"], record["f"]) == (400, 200.0)
        assert Counter(record["l"]) == dict.fromkeys(range(200), 2)


def _add_through_restarts(declaration, source, keys, offsets):
    """Add one to each key for each offset; what failed or had no answer is sent again until it
    is done.
    """
    table = pickle.loads(declaration)

    async def add():
        sent_again = 0
        for offset in range(offsets):
            changes = [Changes(add={"n": 1}, append={"l": [offset]})] * len(keys)
            entries = RowEntries(
                keys, changes, [{}] * len(keys), [mark(offset, source)] * len(keys)
            )
            operation = Operation(UPDATE, entries, conditions=Conditions(idempotent=True))
            left = list(range(len(keys)))
            while left:
                await table.open()
                outcomes = await table.send(operation.with_entries(entries.take(left)))
                assert not outcomes.places(State.REFUSED, State.MISSING), outcomes.problems
                left = [left[place] for place in outcomes.places(State.FAILED, State.UNKNOWN)]
                sent_again += len(left)
                await asyncio.sleep(0.02 if left else 0)
        await table.close()
        return sent_again

    return asyncio.run(add())


@pytest.mark.long  # one writer: test_bad_networks.py
def test_two_processes_count_exactly_while_the_server_is_killed_and_started(new_table):
    keys = [f"k{n}" for n in range(40)]
    with running_redis() as server, spawned(2) as pool:
        table = new_table(url=server.url())
        given = [(pickle.dumps(table), f"s.t.{p}", keys, 200) for p in range(2)]
        adding = [pool.submit(_add_through_restarts, *each) for each in given]
        kills = 0
        while futures.wait(adding, 0.1).not_done and kills < 4:
            # they have begun
            if send(table, Operation(GET, RowEntries(["k0"])))[0].records != [None]:
                server.restart(kill=True)
                kills += 1
        assert sum(each.result(120) for each in adding) > 0, "a kill has hit requests under way"
        for record in send(table, Operation(GET, RowEntries(keys)))[0].records:
            assert record["n"] == 400
            assert Counter(record["l"]) == dict.fromkeys(range(200), 2)


def test_a_restart_loses_nothing_that_was_answered_and_the_script_is_loaded_again(new_table):
    with running_redis() as server:
        table = new_table(url=server.url())
        add = Changes(add={"n": 1})

        def counted(offset):
            entries = RowEntries(["k"], [add], [{}], [mark(offset)])
            return Operation(UPDATE, entries, conditions=Conditions(idempotent=True))

        async def through_restarts():
            seen = []
            for offset in range(30):
                await table.open()
                seen.append(await table.send(counted(offset)))
                if offset in (10, 20):
                    await asyncio.to_thread(server.restart, kill=offset == 20)
            await asyncio.to_thread(server.stop)
            seen += [await table.send(counted(30)), await table.send(counted(30))]
            await asyncio.to_thread(server.start)
            seen += [
                await table.send(counted(29)),
                await table.send(Operation(GET, RowEntries(["k"]))),
            ]
            await table.close()
            return seen

        *before, cut, down, again, got = asyncio.run(through_restarts())
        assert [states(outcomes) for outcomes in before] == [{}] * 30
        assert states(cut)[0] in (State.UNKNOWN, State.FAILED), (
            "told or not by then that the connection is gone"
        )
        assert states(down) == {0: State.FAILED}, "the connection was refused: nothing was sent"
        assert isinstance(down.problems[0].error, TableUnavailableError)
        assert states(again) == {0: State.SKIPPED}
        assert got.records == [{"id": "k", "n": 30}]


# -- what the server refuses


def test_a_reply_that_does_not_come_leaves_writes_unknown_and_gets_failed(new_table, redis_server):
    """The first request goes to an open connection, the others need new ones, which the server
    accepts unanswered.
    """
    table = new_table(timeout=1.5)
    put = [Operation(PUT, RowEntries(["k"], [{"n": number}])) for number in (1, 2, 3)]
    get = Operation(GET, RowEntries(["k"]))

    async def ask():
        await table.open()
        await table.send(put[0])
        redis_server.pause()
        try:
            answers = [await table.send(operation) for operation in (put[1], put[2], get)]
        finally:
            redis_server.go_on()
        await table.close()
        return answers

    assert [*map(states, asyncio.run(ask()))] == [
        {0: State.UNKNOWN},
        {0: State.FAILED},
        {0: State.FAILED},
    ]
    patient = RedisTable(**{**table.to_dict(), "timeout": 60.0})
    assert send(patient, get)[0].records[0]["n"] in (1, 2), "what could not be sent is not there"


def test_the_connection_of_a_cancelled_request_answers_nobody_else(new_table):
    table = new_table(connections=1)

    async def cancelled():
        await table.open()
        await table.send(
            Operation(
                PUT, RowEntries([f"k{n}" for n in range(500)], [{"n": n} for n in range(500)])
            )
        )
        for wait in (0, 0.0005, 0.001, 0.002, 0.005):
            reading = asyncio.ensure_future(
                table.send(Operation(GET, RowEntries([f"k{n}" for n in range(500)])))
            )
            await asyncio.sleep(wait)
            reading.cancel()
            got = await table.send(Operation(GET, RowEntries(["k7", "k8"])))
            assert [record["n"] for record in got.records] == [7, 8]
        await table.close()

    asyncio.run(cancelled())


def test_another_type_under_the_key_refuses_that_entry_alone(new_table, redis_server):
    table = new_table()
    with redis_server.client() as client:
        client.set(f"{table.prefix}:text", "not a hash")
    keys = ["text", "fine"]
    for operation in (
        Operation(PUT, RowEntries(keys, [{}, {}])),
        Operation(UPDATE, RowEntries(keys, [{"n": 1}] * 2)),
        Operation(DELETE, RowEntries(keys)),
        Operation(GET, RowEntries(keys)),
    ):
        (outcomes,) = send(table, operation)
        assert states(outcomes) == {0: State.REFUSED}
        assert isinstance(outcomes.problems[0].error, TableError)
        assert "Another type is stored under the key" in str(outcomes.problems[0].error)
        assert is_record_rejected(outcomes.problems[0])


def test_an_error_of_the_server_is_no_fault_of_the_records(new_table, redis_server):
    table = new_table()
    with redis_server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-hset")
        try:
            (outcomes,) = send(table, Operation(PUT, RowEntries(["a"], [{}])))
        finally:
            client.execute_command("ACL", "SETUSER", "default", "+hset")
    assert states(outcomes) == {0: State.REFUSED}
    assert not is_record_rejected(outcomes.problems[0])


def test_a_server_without_memory_or_that_is_no_master_fails_writes_for_now(new_table):
    with running_redis() as server:
        table = new_table(url=server.url())
        put = Operation(PUT, RowEntries(["a"], [{"n": 1}]))
        send(table, put, Operation(PUT, RowEntries(["b"], [{"n": 1}])))
        with server.client() as client:
            client.config_set("maxmemory", "1")
            update, delete = (
                Operation(UPDATE, RowEntries(["a"], [{"n": 2}])),
                Operation(DELETE, RowEntries(["b"])),
            )
            full = send(table, put, update, delete)
            client.config_set("maxmemory", "0")
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
            replica = send(table, put)
            client.execute_command("REPLICAOF", "NO", "ONE")
        assert [states(outcomes) for outcomes in (*full, *replica)] == [
            {0: State.FAILED}, {0: State.FAILED}, {}, {0: State.FAILED}
        ]  # fmt: skip
        got = send(table, Operation(GET, RowEntries(["a", "b"])))[0]
        assert got.records == [{"id": "a", "n": 1}, None]


# -- secrets and declarations


def test_passwords_come_from_the_environment_and_show_nowhere(new_table, monkeypatch):
    monkeypatch.setenv("REDIS_PASSWORD", "correct-horse")
    with running_redis("--requirepass", "correct-horse") as server:
        monkeypatch.setenv("REDIS_URL", server.url().replace("//", "//:correct-horse@"))
        tables = [
            new_table(url_env="REDIS_URL"),
            new_table(url=server.url(), password_env="REDIS_PASSWORD"),
        ]
        for table in tables:
            assert send(table, Operation(PUT, RowEntries(["k"], [{"n": 1}])))[0].problems == {}
            for text in (
                repr(table),
                str(describe_function(table)),
                pickle.dumps(table).decode("latin1"),
            ):
                assert "correct-horse" not in text
            assert describe_function(
                function_from_description(describe_function(table))
            ) == describe_function(table)
            server.stop()
            problem = send(table, Operation(PUT, RowEntries(["k"], [{"n": 1}])))[0].problems[0]
            assert problem.state is State.FAILED
            assert "correct-horse" not in repr(problem) + repr(problem.error.__cause__)
            server.start()
        monkeypatch.setenv("REDIS_PASSWORD", "wrong-horse")
        problem = send(tables[1], Operation(PUT, RowEntries(["k"], [{"n": 1}])))[0].problems[0]
        assert problem.state is State.REFUSED
        assert isinstance(problem.error, TableAccessError)
        assert "wrong-horse" not in str(problem.error)
        denied = send(new_table(url=server.url()), Operation(GET, RowEntries(["k"])))[0].problems[0]
        assert (denied.state, type(denied.error)) == (State.REFUSED, TableAccessError)
    monkeypatch.delenv("REDIS_PASSWORD")
    with pytest.raises(ConfigurationError) as caught:
        send(tables[1], Operation(GET, RowEntries(["k"])))
    assert caught.value.setting == "REDIS_PASSWORD"


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({}, "neither url nor url_env"),
        ({"url": "redis://h", "url_env": "X"}, "both url and url_env"),
        ({"url": "redis://u:secret@h"}, "a password in its url"),
        ({"url": "redis://h?password=secret"}, "a password in its url"),
        ({"url": "http://h"}, "is not a valid URL"),
        ({"url": "redis://h:port"}, "is not a valid URL"),
        ({"url": "redis://h", "timeout": 0}, "timeout is 0"),
    ],
)
def test_declarations_that_can_not_work_say_so_without_the_secret(where, words):
    with pytest.raises(ConfigurationError, match=words) as error:
        RedisTable("t", "id", columns=COLUMNS, **where)
    assert "secret" not in str(error.value)


def test_without_the_client_it_says_what_to_install(new_table, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "redis.asyncio", None)
    with pytest.raises(ConfigurationError, match=r"dagster-adjunct\[redis\]"):
        asyncio.run(new_table().open())

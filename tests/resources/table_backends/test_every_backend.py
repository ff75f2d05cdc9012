"""One suite on every backend: what each operation must leave behind and say of each entry, against
plain Python.

What a backend does not declare (`capabilities`) it is not asked for.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import (
    AdjunctError,
    KeyValueTableNotFoundError,
    SchemaMismatchError,
    ScopeNotFoundError,
    TableError,
    TableNotFoundError,
)
from dagster_adjunct.resources.tables.arrow import ArrowEntries
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Conditions,
    Mark,
    Operation,
    OperationKind,
    Outcomes,
    RowEntries,
    position_of,
)
from tests.resources.table_backends.fresh_functions import (
    ARROW_STORES,
    BACKENDS,
    MARKS_IN_THE_RECORD,
    SMALLER_FLOATS,
    TYPED_STORES,
    WHOLE_STORES,
    NewStore,
)
from tests.resources.table_backends.plain_store import Message, PlainStore, without_nulls
from tests.rounds import rounds

NONE = Conditions()
EVERY_KEY = ["k1", "k2", "k3", "ключ"]
START = datetime(2013, 7, 1, tzinfo=UTC)
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]


@pytest.fixture(scope="module", params=BACKENDS)
def new_store(request, tmp_path_factory) -> NewStore:
    """Makes an empty store of one backend."""
    return request.param(request, tmp_path_factory.mktemp("suite"))


def operation(kind: str, messages: list[Message], conditions: Conditions = NONE) -> Operation:
    """The messages as the request that stores get."""
    asked = OperationKind(kind.replace("_", "-"))
    values = {
        "update": [
            Changes(**m.change) if set(m.change) != {"set"} else m.change["set"] for m in messages
        ],
        "put": [m.record for m in messages],
        "put_if_absent": [m.record for m in messages],
    }.get(kind)
    entries = RowEntries(
        [m.key for m in messages],
        values,
        (
            [m.default for m in messages]
            if kind == "update" and any(m.default is not None for m in messages)
            else None
        ),
        [Mark(m.source, position_of(*m.place)) for m in messages] if conditions else None,
        [m.time for m in messages] if conditions.newest_by else None,
    )
    return Operation(asked, entries, conditions=conditions)


def said_messages(outcomes: Outcomes) -> list[str]:
    """What became of each entry, in a word."""
    return [
        outcomes.problems[place].state.value if place in outcomes.problems else "done"
        for place in range(outcomes.count)
    ]


async def records_of(store, keys=EVERY_KEY) -> dict:
    got = await store.send(Operation(OperationKind.GET, RowEntries(list(keys))))
    assert not got.problems
    assert got.records is not None
    records = {
        key: record for key, record in zip(keys, got.records, strict=True) if record is not None
    }
    for key, record in records.items():
        assert record.pop("id", key) == key
    return {key: without_nulls(record) for key, record in records.items()}


def in_a_loop(new_store: NewStore, body) -> None:
    """Run `body` with a new store."""
    store = new_store()

    async def run() -> None:
        await store.open()
        try:
            await body(store)
        finally:
            await store.close()

    asyncio.run(run())


KEYS = st.sampled_from(EVERY_KEY)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5)
TIMES = st.integers(0, 3).map(lambda seconds: START + timedelta(seconds=seconds))
SET = {
    "a": st.none() | st.integers(-(2**31), 2**31 - 1),
    "b": st.none() | TEXTS,
    "c": st.none() | st.floats(allow_nan=False, allow_infinity=False, width=32),
    "at": TIMES,
}
LISTS = st.lists(TEXTS.filter(bool), max_size=3)
MEMBERS = st.dictionaries(
    st.sampled_from("xyz"), st.none() | st.integers(-9, 9) | TEXTS, max_size=2
)


def fields(**more) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries({}, optional={**SET, **more})


def kinds_of_change(changes: frozenset[str]) -> st.SearchStrategy[dict]:
    """What an update may do on a store whose updates take these parts of `Changes`."""
    parts = {
        "set": fields(),
        "add": st.fixed_dictionaries(
            {}, optional={"n": st.none() | st.integers(-9, 9), "doc": MEMBERS}
        ),
        "append": st.fixed_dictionaries({}, optional={"tags": LISTS}),
        "remove": st.sampled_from([(), ("a",), ("b",)]),
    }
    taken = {name: part for name, part in parts.items() if name in changes}
    whole = st.fixed_dictionaries(taken).map(_once_each)
    return whole | st.fixed_dictionaries({"set": fields()})


def _once_each(change: dict) -> dict:
    """A column is named in one part only."""
    removed = change.get("remove", ())
    return {
        **change,
        "set": {name: value for name, value in change["set"].items() if name not in removed},
    }


@st.composite
def operations(draw, store):
    """Some requests that a store takes, each with conditions of its own."""
    capabilities = store.capabilities
    kinds = ["put", "delete"]
    kinds += ["update"] if capabilities.updates else []
    kinds += ["put_if_absent"] if capabilities.puts_if_absent else []
    conditions = [NONE]
    conditions += [Conditions("at")] if capabilities.newest_by else []
    conditions += [Conditions(None, True)] if capabilities.idempotent else []
    conditions += (
        [Conditions("at", True)] if capabilities.newest_by and capabilities.idempotent else []
    )
    whole = fields(n=st.none() | st.integers(-9, 9), tags=LISTS, doc=MEMBERS)
    defaults = st.none() | whole if capabilities.updates_with_defaults else st.none()
    message = st.builds(
        Message,
        KEYS,
        record=whole,
        change=kinds_of_change(capabilities.changes),
        default=defaults,
        source=st.sampled_from(["s.0", "s.1", "s.10", "s.1~2"]),
        place=st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(0, 1)),
        time=TIMES,
    )
    if type(store) in MARKS_IN_THE_RECORD:
        conditions = [replace(condition, keeps_marks=True) for condition in conditions]
    step = st.tuples(
        st.sampled_from(kinds), st.lists(message, max_size=7), st.sampled_from(conditions)
    )
    return draw(st.lists(step, min_size=1, max_size=7))


@pytest.mark.lengthy
@pytest.mark.rounds
@settings(max_examples=rounds(6, 60), suppress_health_check=SLOW)
@given(data=st.data())
def test_every_sequence_of_requests_does_what_plain_python_would(new_store, data):
    store, plain = new_store(), PlainStore()
    steps = data.draw(operations(store))

    async def compare(store) -> None:
        for kind, messages, conditions in steps:
            outcomes = await store.send(operation(kind, messages, conditions))
            assert said_messages(outcomes) == plain.send(
                kind, messages, conditions.newest_by, conditions.idempotent
            )
            assert await records_of(store) == plain.records

    in_a_loop(lambda: store, compare)


FULL = [
    (Message("k1", change={"add": {"a": 2**31 - 1}}, default={}), "done"),
    (Message("k1", change={"set": {"b": "lost"}, "add": {"a": 1, "n": 1}}), "refused"),
    (Message("k1", change={"add": {"a": -7, "n": 5}}), "done"),
    (Message("k1", change={"add": {"a": 8, "n": 1}}, default={}), "refused"),
    (Message("k2", change={"add": {"a": 1}}, default={"a": 2**31 - 1}), "refused"),
    (Message("k2", change={"add": {"a": -(2**31)}}, default={"a": 0}), "done"),
    (Message("k2", change={"add": {"a": -1}, "append": {"tags": ["lost"]}}), "refused"),
    (Message("k2", change={"add": {"a": 2**31 - 1}, "append": {"tags": ["kept"]}}), "done"),
]
FULL_RECORDS = {"k1": {"a": 2**31 - 8, "n": 5}, "k2": {"a": -1, "tags": ["kept"]}}


@pytest.mark.parametrize("new_store", TYPED_STORES, indirect=True)
@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("newest_by", ["at", None])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_sum_beyond_its_columns_type_is_refused_with_all_of_its_update(
    new_store, newest_by, idempotent, at_once
):
    messages = [
        replace(message, place=(0, number, 0), time=START + timedelta(seconds=number))
        for number, (message, _) in enumerate(FULL, 1)
    ]
    conditions, expected = Conditions(newest_by, idempotent), [word for _, word in FULL]

    async def compare(store) -> None:
        parts = [messages] if at_once else [[message] for message in messages]
        outcomes = [await store.send(operation("update", part, conditions)) for part in parts]
        assert [word for part in outcomes for word in said_messages(part)] == expected
        problems = [problem.error for part in outcomes for problem in part.problems.values()]
        assert all(isinstance(error, SchemaMismatchError | TableError) for error in problems)
        assert await records_of(store) == FULL_RECORDS
        if newest_by or idempotent:  # what is late or comes again is skipped, whatever it would add
            late = [replace(messages[number], place=(0, 0, 0), time=START) for number in (1, 6)]
            assert said_messages(await store.send(operation("update", late, conditions))) == [
                "skipped",
                "skipped",
            ]

    in_a_loop(new_store, compare)


@pytest.mark.parametrize("new_store", TYPED_STORES, indirect=True)
def test_what_is_newest_can_not_be_reported_by_a_column_without_an_order(new_store):
    message = Message("k1", record={"tags": ["a"]}, place=(0, 1, 0), time=["a"])

    async def write(store) -> None:
        try:
            outcomes = await store.send(operation("put", [message], Conditions("tags")))
        except SchemaMismatchError as error:
            found = error
        else:
            assert outcomes.problems[0].of_request
            found = outcomes.problems[0].error
        assert (type(found), found.column) == (SchemaMismatchError, "tags")

    in_a_loop(new_store, write)


@pytest.mark.parametrize("new_store", TYPED_STORES, indirect=True)
def test_a_null_column_of_a_whole_record_that_is_not_there_is_left_out(new_store):
    async def write(store) -> None:
        records = [Message("k1", record={"a": 1, "nosuch": None}), Message("k2", record={"a": 2})]
        assert said_messages(await store.send(operation("put", records))) == ["done", "done"]
        assert await records_of(store) == {"k1": {"a": 1}, "k2": {"a": 2}}

    in_a_loop(new_store, write)


@pytest.mark.parametrize("new_store", TYPED_STORES, indirect=True)
def test_an_update_that_nulls_a_column_that_is_not_there_is_refused_alone(new_store):
    changes = [
        {"set": {"nosuch": None}},
        {"set": {"a": 2}},
        {"set": {"nosuch": None}, "add": {"n": 1}},
    ]
    messages = [
        Message(key, change=change) for key, change in zip(("k1", "k2", "k1"), changes, strict=True)
    ]

    async def write(store) -> None:
        await store.send(operation("put", [Message(key, record={"a": 1}) for key in ("k1", "k2")]))
        outcomes = await store.send(operation("update", messages))
        assert said_messages(outcomes) == ["refused", "done", "refused"]
        assert "nosuch" in str(outcomes.problems[0].error)
        assert await records_of(store) == {"k1": {"a": 1}, "k2": {"a": 2}}

    in_a_loop(new_store, write)


@pytest.mark.parametrize("new_store", TYPED_STORES, indirect=True)
@pytest.mark.parametrize("nearby", [{}, {"add": {"n": 1}, "append": {"tags": ["x"]}}])
@pytest.mark.parametrize(
    "late", [{"set": {"b": "late"}}, {"set": {"b": "late"}, "add": {"n": None, "doc": {"x": 1}}}]
)
@pytest.mark.parametrize("deleted", [True, False])
def test_what_is_late_and_only_sets_leaves_no_mark_in_any_store(new_store, nearby, late, deleted):
    """Alone, and in one request with what adds."""
    steps = [
        (
            "update",
            [
                Message(
                    "k1",
                    change={"set": {"b": "new"}},
                    default={},
                    place=(0, 1, 0),
                    time=START + timedelta(seconds=1),
                )
            ],
        ),
        *(
            [("delete", [Message("k1", place=(0, 2, 0), time=START + timedelta(seconds=1))])]
            if deleted
            else []
        ),
        (
            "update",
            [
                Message("k1", change=late, source="s.1", place=(0, 7, 0), time=START),
                Message(
                    "k2",
                    change={"set": {"b": "other"}, **nearby},
                    default={},
                    source="s.1",
                    time=START,
                ),
            ],
        ),
        (
            "update",
            [
                Message(
                    "k1",
                    change={"set": {"b": "x"}},
                    default={},
                    source="s.1",
                    place=(0, 5, 0),
                    time=START + timedelta(seconds=1),
                )
            ],
        ),
    ]
    plain = PlainStore()

    async def compare(store) -> None:
        for kind, messages in steps:
            answers = said_messages(
                await store.send(operation(kind, messages, Conditions("at", True)))
            )
            assert answers == plain.send(kind, messages, "at", True)
            assert await records_of(store) == plain.records
        assert plain.records["k1"]["b"] == "x"

    in_a_loop(new_store, compare)


@st.composite
def batches(draw):
    """Rows of one request as Arrow has them: the same columns in all, keys that come again,
    defaults or none.
    """
    rows = draw(st.integers(1, 12))

    def column(values, type_):
        return pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), type_)

    texts = st.none() | TEXTS | st.sampled_from(['"', "\\.", "\n\\.\n", "NULL", "a,b\r\n", ""])
    available = {
        "a": lambda: column(st.none() | st.integers(-(2**31), 2**31 - 1), pa.int32()),
        "b": lambda: column(texts, pa.string()),
        "c": lambda: column(
            st.none() | st.floats(allow_nan=False, allow_infinity=False), pa.float64()
        ),
        "at": lambda: column(TIMES, pa.timestamp("us", "UTC")),
    }
    chosen = draw(st.lists(st.sampled_from(list(available)), unique=True, min_size=1))
    sets = {name: available[name]() for name in chosen}
    adds = {"n": column(st.none() | st.integers(-9, 9), pa.int64())} if draw(st.booleans()) else {}
    defaults = draw(st.sampled_from([None, ("b",), ("b", "n"), ("n",)]))
    available["n"] = lambda: column(st.sampled_from([0, 0, 3]), pa.int64())
    begun = {name: available[name]() for name in defaults or ()}
    sources = draw(
        st.lists(st.sampled_from(["s.0", "s.1", "s.10", "s.1~2"]), min_size=rows, max_size=rows)
    )
    places = draw(
        st.lists(
            st.tuples(st.just(0), st.integers(0, 12), st.just(0)), min_size=rows, max_size=rows
        )
    )
    marks = list(
        zip(sources, places, column(TIMES, pa.timestamp("us", "UTC")).to_pylist(), strict=True)
    )
    keys = draw(
        st.lists(
            st.sampled_from([f"k{n}" for n in range(40)]), min_size=rows, max_size=rows, unique=True
        )
    )
    keys = draw(st.just(keys) | st.lists(KEYS, min_size=rows, max_size=rows))
    return pa.array(keys), sets, adds, None if defaults is None else begun, marks


EACH = [NONE, Conditions("at"), Conditions(None, True), Conditions("at", True)]


@pytest.mark.lengthy
@pytest.mark.parametrize("new_store", WHOLE_STORES, indirect=True)
@pytest.mark.rounds
@settings(max_examples=rounds(6, 80), suppress_health_check=SLOW)
@given(
    requests=st.lists(
        st.tuples(st.booleans(), batches(), st.sampled_from(EACH)), min_size=1, max_size=5
    )
)
def test_arrow_batches_do_what_plain_python_would(new_store, monkeypatch, requests):
    monkeypatch.setattr("dagster_adjunct.resources.table_backends.postgres_values.LEAST", 2)
    plain = PlainStore()
    every_key = [*EVERY_KEY, *(f"k{n}" for n in range(40))]

    async def compare(store) -> None:
        for puts, (keys, sets, adds, defaults, marks), conditions in requests:
            if type(store) in MARKS_IN_THE_RECORD:
                conditions = replace(conditions, keeps_marks=True)  # noqa: PLW2901
            if type(store) in SMALLER_FLOATS:
                sets, defaults = smaller(sets), defaults and smaller(defaults)  # noqa: PLW2901
            entries, messages = arrow(keys, sets, {} if puts else adds, None if puts else defaults)
            if conditions:
                entries, messages = marked(entries, messages, marks)
            kind = "put" if puts else "update"
            outcomes = await store.send(
                Operation(OperationKind(kind), entries, conditions=conditions)
            )
            assert said_messages(outcomes) == plain.send(
                kind, messages, conditions.newest_by, conditions.idempotent
            )
            assert await records_of(store, every_key) == plain.records

    in_a_loop(new_store, compare)


def smaller(columns: dict) -> dict:
    """The same with 0 for floats that not every store can hold."""
    floats = {
        name: pa.array(
            [v and (v if 1e-130 <= abs(v) < 1e126 else 0.0) for v in column.to_pylist()],
            column.type,
        )
        for name, column in columns.items()
        if name == "c"
    }
    return {**columns, **floats}


def marked(
    entries: ArrowEntries, messages: list[Message], marks: list
) -> tuple[ArrowEntries, list[Message]]:
    """The same with places and times."""
    sources, places, times = zip(*marks, strict=True)
    entries = replace(
        entries,
        sources=pa.array(sources),
        positions=pa.array([position_of(*place) for place in places]),
        times=pa.array(times, pa.timestamp("us", "UTC")),
    )
    return entries, [
        replace(message, source=source, place=place, time=time)
        for message, (source, place, time) in zip(messages, marks, strict=True)
    ]


def arrow(keys, sets, adds, defaults) -> tuple[ArrowEntries, list[Message]]:
    """A request as an Arrow batch, and the same as messages."""

    def struct(columns):
        return pa.StructArray.from_arrays(list(columns.values()), names=list(columns))

    whole = struct(sets)
    records = struct({"set": whole, "add": struct(adds)}) if adds else whole
    key = pa.StructArray.from_arrays([keys], names=["id"])
    begun = None if defaults is None else struct(defaults)
    entries = ArrowEntries(key, records, lambda array: array.to_pylist(), begun, typed=bool(adds))
    set_rows, add_rows = whole.to_pylist(), struct(adds).to_pylist() if adds else [{}] * len(keys)
    default_rows = [None] * len(keys) if begun is None else begun.to_pylist()
    messages = [
        Message(key, record=row, change={"set": row, "add": add}, default=default)
        for key, row, add, default in zip(
            keys.to_pylist(), set_rows, add_rows, default_rows, strict=True
        )
    ]
    return entries, messages


@pytest.mark.parametrize("new_store", ARROW_STORES, indirect=True)
def test_large_arrow_batches_are_written_without_a_python_value_of_a_row(new_store):
    count = 3000
    keys = pa.array([f"k{n}" for n in range(count)])
    sets = {
        "a": pa.array(range(count), pa.int32()),
        "at": pa.array([START] * count, pa.timestamp("us", "UTC")),
    }

    async def write(store) -> None:
        for kind, adds in (("put", {}), ("update", {"n": pa.array([2] * count)})):
            entries, _ = arrow(
                keys, sets, adds, {"b": pa.nulls(count, pa.string())} if adds else None
            )
            outcomes = await store.send(
                Operation(OperationKind(kind), replace(entries, to_python=never))
            )
            assert said_messages(outcomes) == ["done"] * count
        assert await records_of(store, ["k7", "k2999"]) == {
            f"k{n}": {"a": n, "at": START, "n": 2} for n in (7, 2999)
        }

    in_a_loop(new_store, write)


def never(array) -> list:
    raise AssertionError(f"asked for Python values of {array.type}")


@pytest.mark.parametrize("new_store", TYPED_STORES, indirect=True)
def test_reading_finds_no_records_where_there_is_no_table_and_makes_none(new_store):
    async def look(store) -> None:
        assert await records_of(store) == {}
        if getattr(store, "create", False):
            store.create = False
            with pytest.raises(AdjunctError) as missing:
                await records_of_there(store)
            assert isinstance(
                missing.value, TableNotFoundError | ScopeNotFoundError | KeyValueTableNotFoundError
            )
            store.create = True
        assert said_messages(
            await store.send(operation("put", [Message("k1", record={"a": 1})]))
        ) == ["done"]
        assert await records_of(store) == {"k1": {"a": 1}}

    in_a_loop(new_store, look)


async def records_of_there(store) -> None:
    """Read, and raise what is told of the entries."""
    got = await store.send(Operation(OperationKind.GET, RowEntries(["k1"])))
    for problem in got.problems.values():
        assert problem.error is not None
        raise problem.error

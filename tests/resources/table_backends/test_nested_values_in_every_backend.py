"""Nested values in every backend: they come back as they were put, and updates inside them do what
plain Python would.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.types import Array, Map, Struct, Type, arrow_type, parse_type
from dagster_adjunct.resources.table_backends.columns import (
    arrow_column_from_records,
    to_spark_type,
)
from dagster_adjunct.resources.tables.operation import Conditions
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.resources.table_backends.fresh_functions import (
    MARKS_IN_THE_RECORD,
    TYPED_STORES,
    WHOLE_STORES,
    NewStore,
)
from tests.resources.table_backends.plain_store import Message, PlainStore, without_nulls
from tests.resources.table_backends.test_every_backend import (
    in_a_loop,
    operation,
    records_of,
    said_messages,
)
from tests.rounds import rounds

ODD = "odd \"name\" 'of' %s {x} $.a[0] \\ Ж"
COLUMNS = {
    "id": "string",
    "n": "bigint",
    "at": "timestamp",
    "customer": (
        "struct<name:string,address:struct<city:string,`zip.code`:int,"
        "geo:struct<lat:double,lon:decimal(20,10)>>,seen:timestamp>"
    ),
    "lines": "array<struct<sku:string,price:decimal(10,2),days:array<date>>>",
    "attributes": "map<string,map<string,array<bigint>>>",
    "counts": (
        f"struct<views:bigint,small:int,spent:decimal(10,2),inner:struct<n:bigint,`{ODD}`:bigint>>"
    ),
    "blobs": "array<binary>",
    "parts": "array<map<string,struct<raw:binary,ok:boolean,f:float,tiny:tinyint>>>",
}
TYPES = {name: parse_type(kind) for name, kind in COLUMNS.items()}
START = datetime(2013, 7, 1, tzinfo=UTC)
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.fixture(scope="module", params=WHOLE_STORES)
def new_store(request, tmp_path_factory) -> NewStore:
    """Makes an empty store of one backend with nested columns."""
    return request.param(request, tmp_path_factory.mktemp("nested"), COLUMNS)


@pytest.fixture(scope="module", params=TYPED_STORES)
def typed_store(request, tmp_path_factory) -> NewStore:
    """Makes an empty store of one backend whose columns have types."""
    return request.param(request, tmp_path_factory.mktemp("typed"), COLUMNS)


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4)
BIG = st.integers(-(2**63), 2**63 - 1)
SIMPLE = {
    "string": TEXTS,
    "boolean": st.booleans(),
    "tinyint": st.integers(-128, 127),
    "int": st.integers(-(2**31), 2**31 - 1),
    "bigint": BIG,
    "float": st.floats(allow_nan=False, allow_infinity=False, width=16),
    "double": st.floats(-1e100, 1e100).filter(lambda x: x == 0 or abs(x) > 1e-100),
    "date": st.dates(),
    "timestamp": st.datetimes(timezones=st.just(UTC)),
    "binary": st.binary(max_size=4),
    "decimal(10,2)": st.decimals(-99999999, 99999999, places=2),
    "decimal(20,10)": st.decimals(-9999999999, 9999999999, places=10),
}


def values_of(type_: Type) -> st.SearchStrategy:
    """Values of a type, with nulls at every depth, and names with odd characters."""
    if isinstance(type_, Array):
        return st.lists(st.none() | values_of(type_.element), max_size=2)
    if isinstance(type_, Map):
        names = st.sampled_from(["a", "a.b", "`", ODD, "ключ", "z"])
        return st.dictionaries(names, st.none() | values_of(type_.value), max_size=2)
    if isinstance(type_, Struct):
        return st.fixed_dictionaries(
            {member.name: st.none() | values_of(member.type) for member in type_.members}
        )
    return SIMPLE[type_.name]


NESTED = [name for name in COLUMNS if name not in ("id", "n", "at")]
RECORDS = st.fixed_dictionaries({}, optional={name: values_of(TYPES[name]) for name in NESTED})


def complete(type_: Type, value):
    """The value with all fields of its structs, as memory does not know them."""
    if value is None:
        return None
    if isinstance(type_, Array):
        return [complete(type_.element, item) for item in value]
    if isinstance(type_, Map):
        return {name: complete(type_.value, item) for name, item in value.items()}
    if isinstance(type_, Struct):
        return {
            member.name: complete(member.type, value.get(member.name)) for member in type_.members
        }
    return value


def completed(records: dict) -> dict:
    return {
        key: {name: complete(TYPES[name], value) for name, value in record.items()}
        for key, record in records.items()
    }


def shape(value):
    """The value with the types of its parts, which Python's comparison ignores (1, True and 1.0)."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value), value


def open_table(store, **settings) -> BlockingTable:
    return BlockingTable(
        RemoteTable("t", key="id", read_function=store, write_function=store, **settings)
    )


@pytest.mark.rounds
@settings(max_examples=rounds(8, 60), suppress_health_check=SLOW, deadline=None)
@given(records=st.lists(RECORDS, min_size=1, max_size=3))
def test_drawn_records_come_back_equal_also_into_streams(new_store, records):
    given = {f"k{place}": record for place, record in enumerate(records)}
    with open_table(new_store()) as table:
        table.put_all([(key, {"id": key, **record}) for key, record in given.items()])
        got = table.get_all(list(given))
    for name in NESTED:
        values = [record.get(name) for record in got.values()]
        expected = [record.get(name) for record in given.values()]
        assert list(map(shape, values)) == list(map(shape, expected))
        kind = to_spark_type(COLUMNS[name])
        column = arrow_column_from_records("t", list(got), list(got.values()), name, kind, COLUMNS)
        assert column.type == arrow_type(kind)
        assert column.to_pylist(maps_as_pydicts="strict") == expected


def test_null_structs_structs_of_nulls_empty_arrays_and_null_elements_differ(new_store):
    nothing = {"name": None, "address": None, "seen": None}
    records = {
        "null": {"customer": None, "lines": None, "attributes": None},
        "nulls": {"customer": nothing, "lines": [None], "attributes": {"a": None}},
        "empty": {
            "customer": {**nothing, "address": {"city": None, "zip.code": None, "geo": None}},
            "lines": [],
            "attributes": {},
        },
        "deep": {
            "customer": {**nothing, "name": ""},
            "lines": [{"sku": None, "price": None, "days": [None]}],
            "attributes": {"a": {}, "b": {"c": [None]}, "d": {"e": None}},
        },
    }
    with open_table(new_store()) as table:
        table.put_all([(key, {"id": key, **record}) for key, record in records.items()])
        for key, record in table.get_all(list(records)).items():
            kept = {name: record.get(name) for name in ("customer", "lines", "attributes")}
            assert kept == records[key]


@pytest.mark.parametrize(
    ("record", "path"),
    [
        ({"customer": {"address": {"city": 1}}}, "address.city"),
        ({"customer": {"address": {"geo": {"lat": float("nan")}}}}, "address.geo.lat"),
        ({"customer": {"address": {"geo": {"lat": float("-inf")}}}}, "address.geo.lat"),
        ({"customer": {"address": {"geo": {"lon": Decimal("NaN")}}}}, "address.geo.lon"),
        ({"customer": {"address": {"town": "x"}}}, "address.town"),
        ({"customer": {"seen": datetime(2013, 7, 1)}}, "seen"),
        ({"customer": {"name": "a\0"}}, "name"),
        ({"lines": [None, {"price": Decimal("0.001")}]}, "[1].price"),
        ({"lines": [{"days": [date(2013, 7, 1), START]}]}, "[0].days[1]"),
        ({"counts": {"views": 2**63}}, "views"),
        ({"counts": {"views": True}}, "views"),
        ({"counts": {"views": 1.0}}, "views"),
        ({"attributes": {"a": {"b": ["1"]}}}, "['a']['b'][0]"),
        ({"attributes": {"a\ud800": {}}}, ""),
        ({"attributes": {1: {}}}, ""),
        ({"parts": [{"x": {"tiny": 128}}]}, "[0]['x'].tiny"),
        ({"customer": ["Ada"]}, ""),
    ],
)
def test_what_does_not_fit_is_rejected_by_its_path(typed_store, record, path):
    with open_table(typed_store()) as table:
        with pytest.raises(SchemaMismatchError) as caught:
            table.put("k", {"id": "k", **record})
        assert caught.value.column == next(iter(record))
        assert path in caught.value.problem
        assert table.get("k") is None


# Values inside columns of structs, by the names of updates.
SET_INSIDE = {
    "customer.name": TEXTS,
    "customer.seen": SIMPLE["timestamp"],
    "customer.address.city": TEXTS,
    "customer.address.`zip.code`": SIMPLE["int"],
    "customer.address.geo.lon": SIMPLE["decimal(20,10)"],
}
ADDED_INSIDE = {
    "counts.views": st.integers(-9, 9),
    "counts.small": st.integers(-9, 9),
    "counts.spent": st.decimals(-9, 9, places=2),
    "counts.inner.n": st.integers(-9, 9),
    f"counts.inner.`{ODD}`": st.integers(-9, 9),
}
PATHS = {
    **{name: tuple(name.split(".")) for name in (*SET_INSIDE, *ADDED_INSIDE)},
    "customer.address.`zip.code`": ("customer", "address", "zip.code"),
    f"counts.inner.`{ODD}`": ("counts", "inner", ODD),
}
FEW_NUMBERS = {
    **SIMPLE,
    **dict.fromkeys(("int", "bigint"), st.integers(-9, 9)),
    "decimal(10,2)": st.decimals(-9, 9, places=2),
}
COUNTS = st.fixed_dictionaries(
    {
        "views": st.none() | st.integers(-9, 9),
        "small": st.none() | st.integers(-9, 9),
        "spent": st.none() | st.decimals(-9, 9, places=2),
        "inner": st.none()
        | st.fixed_dictionaries(
            {"n": st.none() | st.integers(-9, 9), ODD: st.none() | BIG.map(lambda n: n // 2)}
        ),
    }
)
WHOLE = {"customer": st.none() | values_of(TYPES["customer"]), "counts": st.none() | COUNTS}


class PlainPaths(PlainStore):
    """The oracle, with updates inside columns."""

    def _update(self, message: Message) -> str:
        if message.key not in self.records and message.default is None:
            return "missing"
        if message.key not in self.records:
            self.records[message.key] = without_nulls(message.default)
        record = dict(self.records[message.key])
        change = message.change
        for name, value in change.get("set", {}).items():
            put_at(record, PATHS.get(name, (name,)), lambda _, value=value: value)
        for name in change.get("remove", ()):
            put_at(record, PATHS.get(name, (name,)), lambda _: None)
        for name, number in change.get("add", {}).items():
            if number is not None:
                put_at(record, PATHS.get(name, (name,)), lambda old, n=number: (old or 0) + n)
        self.records[message.key] = without_nulls(record)
        return "done"


def put_at(record: dict, path: tuple[str, ...], change) -> None:
    first, *rest = path
    if rest:
        record[first] = dict(record.get(first) or {})
        put_at(record[first], tuple(rest), change)
    else:
        record[first] = change(record.get(first))


@st.composite
def changes_inside(draw) -> dict:
    """An update of values inside columns, and of columns."""
    sets = draw(
        st.fixed_dictionaries(
            {"at": TIMES}, optional={n: st.none() | v for n, v in SET_INSIDE.items()}
        )
    )
    adds = draw(
        st.fixed_dictionaries(
            {},
            optional={
                n: st.none() | v for n, v in {**ADDED_INSIDE, "n": st.integers(-9, 9)}.items()
            },
        )
    )
    whole = draw(st.fixed_dictionaries({}, optional=WHOLE))
    removed = draw(st.sampled_from([(), ("customer.name",), ("customer.address.city",)]))
    given = [PATHS.get(name, (name,))[0] for name in whole]
    sets = {
        n: v for n, v in sets.items() if PATHS.get(n, (n,))[0] not in given and n not in removed
    }
    adds = {n: v for n, v in adds.items() if PATHS.get(n, (n,))[0] not in given}
    if "customer" in whole:
        removed = ()
    return {"set": {**sets, **whole}, "add": adds, "remove": removed}


TIMES = st.integers(0, 3).map(lambda seconds: START + timedelta(seconds=seconds))


@st.composite
def updates(draw):
    """Requests of updates, and of puts and deletes between them."""
    whole = st.fixed_dictionaries({}, optional={"at": TIMES, "n": st.integers(-9, 9), **WHOLE})
    message = st.builds(
        Message,
        st.sampled_from(["k1", "k2", "k3"]),
        record=whole,
        change=changes_inside(),
        default=st.none() | whole,
        source=st.sampled_from(["s.0", "s.1", "s.1~2"]),
        place=st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(0, 1)),
        time=TIMES,
    )
    conditions = st.sampled_from([(None, False), ("at", False), (None, True), ("at", True)])
    kinds = st.sampled_from(["update", "update", "update", "put", "delete"])
    step = st.tuples(kinds, st.lists(message, max_size=6), conditions)
    return draw(st.lists(step, min_size=1, max_size=6))


@pytest.mark.rounds
@pytest.mark.lengthy
@settings(max_examples=rounds(8, 80), suppress_health_check=SLOW, deadline=None)
@given(steps=updates())
def test_every_sequence_of_updates_inside_does_what_plain_python_would(new_store, steps):
    async def body(store):
        assert store.capabilities.inside
        plain = PlainPaths()
        for kind, messages, (newest_by, idempotent) in steps:
            keeps = type(store) in MARKS_IN_THE_RECORD
            sent = messages
            if newest_by is not None:
                sent = [with_time(message) for message in messages]
            outcomes = await store.send(
                operation(kind, sent, Conditions(newest_by, idempotent, keeps_marks=keeps))
            )
            assert said_messages(outcomes) == plain.send(kind, sent, newest_by, idempotent)
            assert completed(await records_of(store)) == completed(plain.records)

    in_a_loop(new_store, body)


def with_time(message: Message) -> Message:
    """The message with its time in what it puts or sets."""
    change = {**message.change, "set": {**message.change["set"], "at": message.time}}
    return replace(message, change=change, record={**message.record, "at": message.time})

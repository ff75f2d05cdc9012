"""One suite on every backend: what each operation must leave behind and say of each entry, against plain Python.

What a backend does not declare (`capabilities`) it is not asked for.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.tables.changes import Changes
from dagster_adjunct.resources.tables.operation import (
    Conditions,
    Mark,
    Operation,
    OperationKind,
    RowEntries,
    position_of,
)
from dagster_adjunct.resources.tables.outcomes import Outcomes
from tests.resources.backends.fresh_functions import BACKENDS, NewStore
from tests.resources.backends.plain_store import Message, PlainStore, without_nulls

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
        "update": [Changes(**m.change) if set(m.change) != {"set"} else m.change["set"] for m in messages],
        "put": [m.record for m in messages],
        "put_if_absent": [m.record for m in messages],
    }.get(kind)
    entries = RowEntries(
        [m.key for m in messages],
        values,
        [m.default for m in messages] if kind == "update" and any(m.default is not None for m in messages) else None,
        [Mark(m.source, position_of(*m.place)) for m in messages] if conditions else None,
        [m.time for m in messages] if conditions.newest_by else None,
    )
    return Operation(asked, entries, conditions=conditions)


def said(outcomes: Outcomes) -> list[str]:
    """What became of each entry, in a word."""
    return [
        outcomes.problems[place].state.value if place in outcomes.problems else "done"
        for place in range(outcomes.count)
    ]


async def records_of(store, keys=EVERY_KEY) -> dict:
    got = await store.send(Operation(OperationKind.GET, RowEntries(list(keys))))
    assert not got.problems
    assert got.records is not None
    found = {key: record for key, record in zip(keys, got.records, strict=True) if record is not None}
    for key, record in found.items():
        assert record.pop("id", key) == key
    return {key: without_nulls(record) for key, record in found.items()}


def in_a_loop(new_store: NewStore, body, *needed: str) -> None:
    """Run `body` with a new store; skip where the backend does not declare what is needed."""
    store = new_store()
    for capability in needed:
        if not getattr(store.capabilities, capability):
            pytest.skip(f"{type(store).__name__} declares no {capability}")

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
MEMBERS = st.dictionaries(st.sampled_from("xyz"), st.none() | st.integers(-9, 9) | TEXTS, max_size=2)


def fields(**more) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries({}, optional={**SET, **more})


def kinds_of_change(changes: frozenset[str]) -> st.SearchStrategy[dict]:
    """What an update may do on a store whose updates take these parts of `Changes`."""
    parts = {
        "set": fields(),
        "add": st.fixed_dictionaries({}, optional={"n": st.none() | st.integers(-9, 9), "doc": MEMBERS}),
        "append": st.fixed_dictionaries({}, optional={"tags": LISTS}),
        "remove": st.sampled_from([(), ("a",), ("b",)]),
    }
    taken = {name: part for name, part in parts.items() if name in changes}
    whole = st.fixed_dictionaries(taken).map(_once_each)
    return whole | st.fixed_dictionaries({"set": fields()})


def _once_each(change: dict) -> dict:
    """A column is named in one part only."""
    removed = change.get("remove", ())
    return {**change, "set": {name: value for name, value in change["set"].items() if name not in removed}}


@st.composite
def operations(draw, capabilities):
    """Some requests that a store with these capabilities takes, each with conditions of its own."""
    kinds = ["put", "delete"]
    kinds += ["update"] if capabilities.updates else []
    kinds += ["put_if_absent"] if capabilities.puts_if_absent else []
    conditions = [NONE]
    conditions += [Conditions("at")] if capabilities.newest_by else []
    conditions += [Conditions(None, True)] if capabilities.idempotent else []
    conditions += [Conditions("at", True)] if capabilities.newest_by and capabilities.idempotent else []
    whole = fields(n=st.none() | st.integers(-9, 9), tags=LISTS, doc=MEMBERS)
    defaults = st.none() | whole if capabilities.updates_with_defaults else st.none()
    message = st.builds(
        Message,
        KEYS,
        record=whole,
        change=kinds_of_change(capabilities.changes),
        default=defaults,
        source=st.sampled_from(["s.0", "s.1", "s.10"]),
        place=st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(0, 1)),
        time=TIMES,
    )
    step = st.tuples(st.sampled_from(kinds), st.lists(message, max_size=7), st.sampled_from(conditions))
    return draw(st.lists(step, min_size=1, max_size=7))


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_every_sequence_of_requests_does_what_plain_python_would(new_store, data):
    store, plain = new_store(), PlainStore()
    steps = data.draw(operations(store.capabilities))

    async def compare(store) -> None:
        for kind, messages, conditions in steps:
            outcomes = await store.send(operation(kind, messages, conditions))
            assert said(outcomes) == plain.send(kind, messages, conditions.newest_by, conditions.idempotent)
            assert await records_of(store) == plain.records

    in_a_loop(lambda: store, compare)

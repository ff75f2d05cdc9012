"""Any requests, one by one or at once, leave what they leave in a dict: over functions that
fail, and over SQLite.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dagster_adjunct.resources.errors import RecordNotFoundError
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.operation import UpdateContract, UpdateMessage
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.resources.tables.troubled_function import TroubledFunction

KEYS = st.sampled_from(["a", "b", "c", "d", "e"])
FIELDS = st.dictionaries(st.sampled_from(["x", "y"]), st.integers(0, 99), max_size=2)
VALUES = FIELDS | st.none()
DEFAULTS = st.none() | FIELDS
EMPTY = {"x": None, "y": None}
_numbers = count()


def whole(key, fields):
    """A record as every store reads it back."""
    return None if fields is None else {"id": key} | EMPTY | fields


class Oracle:
    """What each request does to a dict, said a second time. A record of the table has all
    columns.
    """

    def __init__(self) -> None:
        self.records: dict[str, dict] = {}

    def put(self, key, value):
        if value is None:
            self.records.pop(key, None)
        else:
            self.records[key] = whole(key, value)

    def put_all(self, entries):
        for key, value in entries:
            self.put(key, value)

    def delete_all(self, keys):
        for key in keys:
            self.records.pop(key, None)

    def update_messages(self, entries, with_defaults):
        """The keys that had no record and got none; once a key is missing, its later messages
        may begin it.
        """
        lacking = []
        for key, update, default in entries:
            if key not in self.records and with_defaults and default is not None:
                self.put(key, default)
            if key in self.records:
                self.records[key] |= update
            else:
                lacking.append(key)
        return set(lacking)

    def get_all(self, keys):
        return {key: self.records[key] for key in keys if key in self.records}


PUTS = st.tuples(st.just("put"), KEYS, VALUES)
PUT_ALLS = st.tuples(st.just("put_all"), st.lists(st.tuples(KEYS, VALUES), max_size=8))
DELETES = st.tuples(st.just("delete_all"), st.lists(KEYS, max_size=4))
GETS = st.tuples(st.just("get_all"), st.lists(KEYS, max_size=4))
CALLS = st.one_of(
    PUTS,
    PUT_ALLS,
    DELETES,
    GETS,
    st.tuples(
        st.just("update_messages"),
        st.lists(st.tuples(KEYS, FIELDS, DEFAULTS), max_size=8),
        st.booleans(),
    ),
)
# An update that met no record and is sent again, its answer being lost, may meet what a later one
# has begun meanwhile.
REPEATABLE = st.one_of(
    PUTS,
    PUT_ALLS,
    DELETES,
    GETS,
    st.tuples(
        st.just("update_messages"),
        st.lists(st.tuples(KEYS, FIELDS, FIELDS), max_size=8),
        st.just(True),
    ),
)


class Requests(RuleBasedStateMachine):
    """Set by the test: `new_store` makes what is below the table, of a seed and a chance to
    fail.
    """

    calls = CALLS

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.oracle = Oracle()
        self.table = None

    @staticmethod
    def new_store(seed, chance):
        raise NotImplementedError

    @initialize(
        seed=st.integers(0, 1000),
        chance=st.sampled_from([0.0, 0.3, 0.7]),
        size=st.sampled_from([1, 3, 100]),
    )
    def declared(self, seed, chance, size):
        store = self.new_store(seed, chance)
        retry = RetryPolicy(attempts=300, first_wait=0, max_wait=0)
        self.table = RemoteTable(
            "any", key="id", read_function=store, write_function=store, batch_size=size, retry=retry
        )

    def teardown(self) -> None:
        if self.table is not None:
            self.runner.run(self.table.close())
        self.runner.close()

    def given(self, call):
        """The coroutine of a call, and what it must answer."""
        verb, *details = call
        if verb == "put":
            key, value = details
            self.oracle.put(key, value)
            return self.table.put(key, whole(key, value)), None
        if verb == "put_all":
            (entries,) = details
            self.oracle.put_all(entries)
            return self.table.put_all([(key, whole(key, value)) for key, value in entries]), None
        if verb == "delete_all":
            self.oracle.delete_all(details[0])
            return self.table.delete_all(details[0]), None
        if verb == "get_all":
            return self.table.get_all(details[0]), {
                k: dict(v) for k, v in self.oracle.get_all(details[0]).items()
            }
        entries, with_defaults = details
        lacking = self.oracle.update_messages(entries, with_defaults)
        contract = (
            UpdateContract.UPDATE_WITH_DEFAULTS if with_defaults else UpdateContract.UPDATE_ONLY
        )
        messages = [
            (key, UpdateMessage(update, whole(key, default))) for key, update, default in entries
        ]
        return self._lacking(self.table.update_messages(messages, contract)), lacking

    async def _lacking(self, updating):
        try:
            await updating
        except RecordNotFoundError as error:
            return set(error.keys)
        return set()

    @rule(data=st.data())
    def one(self, data):
        call = data.draw(self.calls)
        request, expected = self.given(call)
        assert self.runner.run(request) == expected

    @rule(data=st.data())
    def several_at_once(self, data):
        """Called one after the other without waiting: to each key they happen in that order."""
        pairs = [
            self.given(call) for call in data.draw(st.lists(self.calls, min_size=2, max_size=10))
        ]

        async def at_once():
            return await asyncio.gather(*(request for request, _ in pairs))

        assert self.runner.run(at_once()) == [expected for _, expected in pairs]

    @rule()
    @precondition(lambda self: self.oracle.records)
    def reopened(self):
        self.runner.run(self.table.close())

    @invariant()
    @precondition(lambda self: self.table is not None)
    def table_is_the_dict(self):
        assert self.runner.run(self.table.get_all(["a", "b", "c", "d", "e"])) == self.oracle.records


class OneStepEach(TroubledFunction):
    """It can't begin a record and update it in one request."""

    @property
    def capabilities(self):
        return replace(super().capabilities, updates_with_defaults=False)

    async def send(self, operation):
        assert operation.entries.defaults is None or not any(operation.entries.defaults)
        return await super().send(operation)


def run_it(new_store, examples: int, calls=CALLS) -> None:
    machine = type("Requests", (Requests,), {"new_store": staticmethod(new_store), "calls": calls})
    quick = settings(
        max_examples=examples,
        stateful_step_count=12,
        derandomize=examples < 100,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=quick)


def twin() -> MemoryTable:
    return MemoryTable(f"random_{next(_numbers)}")


EXAMPLES = [pytest.param(12, id="some"), pytest.param(300, id="many", marks=pytest.mark.long)]


@pytest.mark.lengthy
@pytest.mark.parametrize("examples", EXAMPLES)
def test_requests_over_a_function_that_fails_by_chance_leave_what_a_dict_holds(examples):
    run_it(lambda seed, chance: TroubledFunction(twin(), seed, chance, forgets=False), examples)


@pytest.mark.lengthy
@pytest.mark.parametrize("examples", EXAMPLES)
def test_retried_requests_with_lost_answers_leave_what_a_dict_holds(examples):
    run_it(lambda seed, chance: TroubledFunction(twin(), seed, chance), examples, REPEATABLE)


@pytest.mark.lengthy
@pytest.mark.parametrize("examples", EXAMPLES)
def test_defaults_put_in_requests_of_their_own_leave_what_a_dict_holds(examples):
    run_it(lambda seed, chance: OneStepEach(twin(), seed, chance, forgets=False), examples)


@pytest.mark.lengthy
@pytest.mark.parametrize("examples", EXAMPLES)
def test_requests_over_sqlite_leave_what_a_dict_holds(tmp_path, examples):
    columns = {"id": "string", "x": "bigint", "y": "bigint"}
    path = tmp_path / "random.sqlite"
    run_it(
        lambda *_: SqliteTable(path, f"t{next(_numbers)}", "id", columns=columns, create=True),
        examples // 2,
    )

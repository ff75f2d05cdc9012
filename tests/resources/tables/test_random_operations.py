"""Any requests, one by one or at once, leave what they leave in a dict: over functions that fail, and over SQLite."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from dagster_adjunct.resources.backends import SqliteTable
from dagster_adjunct.resources.errors import RecordNotFoundError
from dagster_adjunct.resources.tables import MemoryTable, RemoteTable, RetryPolicy, UpdateContract, UpdateMessage
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
    """What each request does to a dict, said a second time. A record of the table has all columns."""

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
        """The keys that had no record and got none; once a key is missing, its later messages may begin it."""
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


CALLS = st.one_of(
    st.tuples(st.just("put"), KEYS, VALUES),
    st.tuples(st.just("put_all"), st.lists(st.tuples(KEYS, VALUES), max_size=8)),
    st.tuples(st.just("delete_all"), st.lists(KEYS, max_size=4)),
    st.tuples(st.just("update_messages"), st.lists(st.tuples(KEYS, FIELDS, DEFAULTS), max_size=8), st.booleans()),
    st.tuples(st.just("get_all"), st.lists(KEYS, max_size=4)),
)


class Requests(RuleBasedStateMachine):
    """`new_store` makes what is below the table; set by the test."""

    new_store = staticmethod(lambda: MemoryTable(f"random_{next(_numbers)}"))

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        store = self.new_store()
        retry = RetryPolicy(attempts=200, first_wait=0, max_wait=0)
        self.table = RemoteTable("any", key="id", read_function=store, write_function=store, batch_size=3, retry=retry)
        self.oracle = Oracle()

    def teardown(self) -> None:
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
            return self.table.get_all(details[0]), {k: dict(v) for k, v in self.oracle.get_all(details[0]).items()}
        entries, with_defaults = details
        lacking = self.oracle.update_messages(entries, with_defaults)
        contract = UpdateContract.UPDATE_WITH_DEFAULTS if with_defaults else UpdateContract.UPDATE_ONLY
        messages = [(key, UpdateMessage(update, whole(key, default))) for key, update, default in entries]
        return self._lacking(self.table.update_messages(messages, contract)), lacking

    async def _lacking(self, updating):
        try:
            await updating
        except RecordNotFoundError as error:
            return set(error.keys)
        return set()

    @rule(call=CALLS)
    def one(self, call):
        request, expected = self.given(call)
        assert self.runner.run(request) == expected

    @rule(calls=st.lists(CALLS, min_size=2, max_size=10))
    def several_at_once(self, calls):
        """Called one after the other without waiting: to each key they happen in that order."""
        pairs = [self.given(call) for call in calls]

        async def at_once():
            return await asyncio.gather(*(request for request, _ in pairs))

        assert self.runner.run(at_once()) == [expected for _, expected in pairs]

    @rule()
    @precondition(lambda self: self.oracle.records)
    def reopened(self):
        self.runner.run(self.table.close())

    @invariant()
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


def run_it(new_store, examples: int, steps: int = 12) -> None:
    machine = type("Requests", (Requests,), {"new_store": staticmethod(new_store)})
    quick = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=examples < 100,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=quick)


def failing(kind):
    numbers = count()
    return lambda: kind(MemoryTable(f"random_{next(_numbers)}"), next(numbers), chance=Random(next(numbers)).random())


EXAMPLES = [pytest.param(14, id="some"), pytest.param(3000, id="many", marks=pytest.mark.long)]


@pytest.mark.parametrize("examples", EXAMPLES)
def test_requests_over_a_function_that_fails_by_chance_leave_what_a_dict_holds(examples):
    run_it(failing(TroubledFunction), examples)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_requests_over_a_function_that_needs_a_step_for_each_default_leave_what_a_dict_holds(examples):
    run_it(failing(OneStepEach), examples)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_requests_over_sqlite_leave_what_a_dict_holds(tmp_path, examples):
    columns = {"id": "string", "x": "bigint", "y": "bigint"}
    path = tmp_path / "random.sqlite"
    run_it(lambda: SqliteTable(path, f"t{next(_numbers)}", "id", columns=columns, create=True), examples)

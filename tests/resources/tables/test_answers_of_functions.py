"""What a function answers is looked at: nothing that it did not speak of passes for done, and
nothing raw comes out.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dagster_adjunct.resources.errors import (
    AdjunctError,
    RecordNotFoundError,
    TableError,
    TableUnavailableError,
)
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.cache import Cache
from dagster_adjunct.resources.tables.functions import TableReadFunction
from dagster_adjunct.resources.tables.operation import Changes, Outcomes, Problem, State
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.resources.tables.user_function import UserFunction

ONCE = RetryPolicy(attempts=1)


class Answering(MemoryTable):
    answer: Any = None

    async def send(self, operation):
        return self.answer


def table_over(function, **settings) -> RemoteTable:
    return RemoteTable("t", key="id", read_function=function, write_function=function, **settings)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        Outcomes(0),
        Outcomes(1),
        Outcomes(3),
        Outcomes(2, problems={2: Problem(State.FAILED)}),
        Outcomes(2, problems={"0": Problem(State.FAILED)}),
        Outcomes(2, problems={0: "x"}),
        Outcomes(2, problems={0: Problem("failed")}),
        Outcomes(2, problems={0: Problem(State.FAILED, "busy")}),
        Outcomes(2, problems={0: Problem(State.FAILED, None, float("nan"))}),
        Outcomes(2, problems={0: Problem(State.FAILED, None, "1")}),
        Outcomes(2, problems="none"),
        Outcomes(2, problems=[]),
    ],
    ids=repr,
)
def test_a_function_answers_for_each_entry(answer):
    function = Answering("answers")
    function.answer = answer
    table = table_over(function, retry=ONCE)
    with pytest.raises(
        TableError, match="put of key 1 and 1 more failed: Answering answered a put of 2 entries"
    ):
        asyncio.run(table.put_all([(1, {}), (2, {})]))
    with pytest.raises(TableError, match="Answering answered a get of 2 entries"):
        asyncio.run(table.get_all([1, 2]))
    assert table.metrics.records.writes == 0


@pytest.mark.parametrize("records", [None, [{}], [{}, {}, {}], 2, iter([{}, {}])])
def test_a_get_has_a_record_or_none_for_each_key(records):
    function = Answering("records")
    function.answer = Outcomes(2, records)
    with pytest.raises(TableError, match="answered a get of 2 entries"):
        asyncio.run(table_over(function, retry=ONCE).get_all([1, 2]))


class Raising(MemoryTable):
    """A store's driver that raises from `send`; what `passes` are may be sent again."""

    passes: tuple[type[Exception], ...] = ()

    def __init__(self, error: Exception) -> None:
        super().__init__("raising")
        self.error = error
        self.attempts = 0

    def is_retriable(self, error):
        return isinstance(error, self.passes) or super().is_retriable(error)

    async def send(self, operation):
        self.attempts += 1
        if operation.kind.writes:
            await super().send(operation)
        raise self.error


RAW = [
    KeyError("a"),
    asyncio.InvalidStateError("no"),
    ExceptionGroup("g", [ValueError("x")]),
    RecursionError("deep"),
]


@pytest.mark.parametrize("error", RAW, ids=repr)
def test_what_a_store_raises_from_its_send_is_reported_with_table_operation_and_key(error):
    for request, named in (
        (lambda table: table.put("k", {}), "put of key 'k'"),
        (lambda table: table.get("k"), "get of key 'k'"),
        (lambda table: table.put_all([("k", {}), ("l", {})]), "put of key 'k' and 1 more"),
        (lambda table: table.update("k", {}), "update of key 'k'"),
    ):
        function = Raising(error)
        with pytest.raises(
            TableError, match=f"table t: {named} failed: {type(error).__name__}"
        ) as reported:
            asyncio.run(request(table_over(function)))
        assert (reported.value.__cause__, function.attempts) == (error, 1)


def test_transient_problems_are_retried_and_increments_as_the_policy_says():
    class Restarting(Raising):
        passes = (RuntimeError,)

    def reported_of(request, **policy):
        function = Restarting(RuntimeError("server restarting"))
        function.fill({"k": {"n": 0}})
        table = table_over(function, retry=RetryPolicy(3, first_wait=0, **policy))
        with pytest.raises(TableUnavailableError) as reported:
            asyncio.run(request(table))
        assert reported.value.table == "t"
        assert isinstance(reported.value.__cause__, RuntimeError)
        return function

    assert reported_of(lambda table: table.put("k", {"n": 1})).attempts == 3
    adds = lambda table: table.update("k", Changes(add={"n": 1}))  # noqa: E731
    assert reported_of(adds).content()[0]["k"] == {"n": 3}, "at least once"
    assert reported_of(adds, unknown="fail").content()[0]["k"] == {"n": 1}


def test_missing_records_reported_by_an_error_of_send_are_missing():
    function = Raising(ExceptionGroup("g", [RecordNotFoundError("no.", "Put it.", keys=("k",))]))
    with pytest.raises(RecordNotFoundError) as caught:
        asyncio.run(table_over(function).update("k", {}))
    assert (caught.value.table, caught.value.keys) == ("t", ("k",))


def test_a_get_all_that_returns_no_dictionary_is_an_error_of_the_table():
    class Lists(TableReadFunction):
        async def get(self, key, *args):
            return None

        async def get_all(self, keys, *args):
            return [{}]

    table = RemoteTable("t", key="id", read_function=Lists(), retry=ONCE)
    with pytest.raises(TableError, match="table t: get of key 1 failed"):
        asyncio.run(table.get(1))


@pytest.mark.parametrize("cache", [None, Cache(size=10)])
@pytest.mark.parametrize("key", [[1], (1, [2]), {"a": 1}])
def test_a_key_that_is_none_is_refused_in_every_request(key, cache):
    table: Any = table_over(MemoryTable("unhashable"), cache=cache)
    for request in (
        table.get(key),
        table.get_all([key]),
        table.put(key, {}),
        table.delete_all([key]),
    ):
        with pytest.raises(TableError, match="got a key that is not hashable"):
            asyncio.run(request)


class CancelsItself(UserFunction):
    """Its first request ends as one does whose client was closed under it."""

    calls = 0

    async def put(self, key, value, *args):
        self.calls += 1
        if self.calls == 1:
            raise asyncio.CancelledError
        await super().put(key, value, *args)


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_a_function_that_cancels_itself_is_asked_again(timeout):
    function = CancelsItself()
    table = table_over(function, retry=RetryPolicy(attempts=2, first_wait=0.0, timeout=timeout))

    async def put() -> Any:
        async with asyncio.TaskGroup() as group:  # takes a cancelled task for one that ended well
            group.create_task(table.put_all([(1, {"n": 1}), (1, {"n": 2}), (2, {"n": 3})]))
        return await table.get_all([1, 2])

    assert asyncio.run(put()) == {1: {"n": 2}, 2: {"n": 3}}


def test_a_function_that_cancels_itself_to_the_end_fails_with_a_typed_error():
    async def put(function) -> AdjunctError:
        with pytest.raises(TableUnavailableError, match="raised CancelledError") as reported:
            await table_over(function, retry=ONCE).put(1, {"n": 1})
        return reported.value

    class Closed(MemoryTable):
        async def send(self, operation):
            raise asyncio.CancelledError

    for function in (CancelsItself(), Closed("closed")):
        assert asyncio.run(put(function)).__cause__ is not None


def test_a_caller_that_is_cancelled_stays_cancelled():
    class Hanging(UserFunction):
        async def put(self, key, value, *args):
            await asyncio.Event().wait()

    async def cancelled(count: int) -> bool:
        call = asyncio.create_task(
            table_over(Hanging()).put_all([(key, {}) for key in range(count)])
        )
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait([call])
        return call.cancelled()

    assert asyncio.run(cancelled(1))
    assert asyncio.run(cancelled(3))


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
def test_what_ends_programs_reaches_the_caller_of_a_blocking_table(raised):
    class Leaving(UserFunction):
        leaving = True

        async def put(self, key, value, *args):
            if self.leaving:
                raise raised
            await super().put(key, value, *args)

    function = Leaving()
    table = BlockingTable(table_over(function))

    def put_twice() -> Any:
        try:
            table.put_all([(1, {"n": 1}), (2, {"n": 1})])
        except raised:
            function.leaving = False
        table.put(1, {"n": 2})
        table.close()
        return function.records

    pool = ThreadPoolExecutor(1)
    try:
        assert pool.submit(put_twice).result(timeout=120) == {1: {"n": 2}}
    finally:
        pool.shutdown(wait=False)


class InParts(UserFunction):
    """Its `_all` forms send fewer entries at a time, by those of the base class."""

    async def get_all(self, keys, *args):
        return await super().get_all(keys[:2], *args) | await super().get_all(keys[2:], *args)

    async def put_all(self, entries, *args):
        for part in (entries[:2], entries[2:]):
            await super().put_all(part, *args)

    async def delete_all(self, keys, *args):
        while keys:
            await super().delete_all([keys.pop()], *args)


def test_an_overridden_form_may_call_that_of_the_base_class():
    with BlockingTable(table_over(InParts(), retry=ONCE)) as table:
        table.put_all([(key, {"n": key}) for key in range(5)])
        assert table.get_all(range(5)) == {key: {"n": key} for key in range(5)}
        table.delete_all([1, 2, 3])
        assert sorted(table.get_all(range(5))) == [0, 4]


def test_a_record_without_fields_belongs_to_its_caller():
    store = MemoryTable("without-fields")
    store.fill({"a": {}})
    asyncio.run(store.get("a"))["n"] = 1
    assert store.records() == {"a": {}}

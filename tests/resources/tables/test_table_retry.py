from __future__ import annotations

import asyncio

import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    RecordNotFoundError,
    TableError,
    TableUnavailableError,
)
from dagster_adjunct.resources.tables.functions import TableWriteFunction, record_not_found_error
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.resources.tables.manual_clock import ManualClock


class Flaky(TableWriteFunction[str, dict, dict]):
    """Raises the given errors, one a request, then works."""

    def __init__(self, *errors: Exception, retriable: type[Exception] | None = None) -> None:
        self.errors = list(errors)
        self.records: dict[str, dict] = {}
        self.retriable = retriable
        self.opened = 0

    async def open(self):
        self.opened += 1

    def is_retriable(self, error):
        return self.retriable is not None and isinstance(error, self.retriable)

    async def put(self, key, value, *args):
        if self.errors:
            raise self.errors.pop(0)
        self.records[key] = value

    async def delete(self, key, *args):
        await self.put(key, None)

    async def update(self, key, update, *args):
        raise record_not_found_error([key])


def busy() -> TableUnavailableError:
    return TableUnavailableError("the table is busy.")


def table_over(function, clock=None, **policy) -> RemoteTable:
    return RemoteTable(
        "state",
        key="id",
        write_function=function,
        retry=RetryPolicy(**policy),
        clock=clock or ManualClock(),
    )


def test_transient_errors_are_retried_with_growing_waits():
    clock, function = ManualClock(), Flaky(busy(), busy(), busy())
    table = table_over(function, clock, first_wait=0.1, max_wait=5)
    asyncio.run(table.put("a", {"n": 1}))
    assert function.records == {"a": {"n": 1}}
    assert len(clock.slept) == 3
    for slept, least in zip(clock.slept, (0.1, 0.2, 0.4), strict=True):
        assert least <= slept <= least + 0.1
    assert (
        table.metrics.store.retries,
        table.metrics.store.failures,
        table.metrics.store.requests,
    ) == (3, 0, 1)


def test_every_attempt_opens_the_function_again():
    function = Flaky(busy())
    asyncio.run(table_over(function).put("a", {}))
    assert function.opened == 2


def test_it_gives_up_after_the_attempts_with_the_last_error_as_it_was():
    table = table_over(Flaky(*(busy() for _ in range(9))), attempts=3)
    with pytest.raises(TableUnavailableError) as error:
        asyncio.run(table.put("a", {}))
    assert error.value.table == "state"
    assert "after 3 attempts" in error.value.__notes__[0]
    assert (table.metrics.store.retries, table.metrics.store.failures) == (2, 1)


def test_it_never_waits_past_the_total_time():
    clock = ManualClock()
    table = table_over(
        Flaky(*(busy() for _ in range(99))),
        clock,
        attempts=99,
        first_wait=1,
        max_wait=4,
        max_total=10,
    )
    with pytest.raises(TableUnavailableError):
        asyncio.run(table.put("a", {}))
    assert 0 < clock.now() <= 10


def test_permanent_errors_are_raised_at_once():
    table = table_over(Flaky(TableError("no such column.")))
    with pytest.raises(TableError):
        asyncio.run(table.put("a", {}))
    assert (table.metrics.store.retries, table.metrics.store.failures) == (0, 1)


def test_the_function_may_call_further_errors_retriable():
    table = table_over(Flaky(OSError("reset"), retriable=OSError))
    asyncio.run(table.put("a", {}))
    assert table.metrics.store.retries == 1


def test_a_missing_record_is_neither_retried_nor_a_failure():
    table = table_over(Flaky(retriable=Exception))
    with pytest.raises(RecordNotFoundError) as error:
        asyncio.run(table.update("a", {"n": 1}))
    assert error.value.keys == ("a",)
    assert (
        table.metrics.store.retries,
        table.metrics.store.failures,
        table.metrics.records.updates,
    ) == (0, 0, 0)


def test_a_later_put_of_the_same_key_waits_for_the_retries_of_the_earlier():
    function = Flaky(busy(), busy())

    async def both():
        table = table_over(function)
        await asyncio.gather(table.put("a", {"n": 1}), table.put("a", {"n": 2}))

    asyncio.run(both())
    assert function.records == {"a": {"n": 2}}


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"first_wait": -1.0}])
def test_a_policy_that_cannot_work_is_refused(wrong):
    with pytest.raises(ConfigurationError) as caught:
        RetryPolicy(**wrong)
    assert caught.value.argument == next(iter(wrong))


class SendsLater(TableWriteFunction[str, dict, dict]):
    """Its deletes are sent by a task that outlives their request."""

    def __init__(self) -> None:
        self.deleted: list[str] = []
        self.task: asyncio.Task[None] | None = None

    async def put(self, key, value, *args):
        raise AssertionError

    async def delete(self, key, *args):
        self.deleted.append(key)

    async def delete_all(self, keys, *args):
        self.task = asyncio.create_task(self.later(keys))

    async def later(self, keys):
        await asyncio.sleep(0.01)
        await super().delete_all(keys)


def test_a_task_that_outlives_its_attempt_still_sends():
    function = SendsLater()
    table = RemoteTable(
        "t", key="id", write_function=function, retry=RetryPolicy(attempts=1, timeout=30.0)
    )

    async def delete():
        await table.delete_all(["a", "b"])
        assert function.task is not None
        await function.task

    asyncio.run(delete())
    assert function.deleted == ["a", "b"]

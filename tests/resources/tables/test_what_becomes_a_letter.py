"""Dead letters have what a table refuses for what is in a record; whatever else goes wrong fails
the batch.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.errors import (
    ConfigurationError,
    RecordNotFoundError,
    SchemaMismatchError,
    TableAccessError,
    TableError,
    TransientError,
)
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.arrow import Shape, split_batch
from dagster_adjunct.resources.tables.functions import TableFunction
from dagster_adjunct.resources.tables.operation import Outcomes, Problem, State
from dagster_adjunct.resources.tables.spark import TaskReport
from dagster_adjunct.tables import RateLimit, RemoteTable, RetryPolicy
from tests.resources.tables.user_function import UserFunction


class Failing(UserFunction):
    """Each put of "b" fails."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    async def put(self, key: Any, value: Any, *args: Any) -> None:
        await super().put(key, value, *args)
        if key == "b":
            raise self.error


def sent(to: TableFunction | RemoteTable[Any, Any, Any]) -> TaskReport:
    """What a task of Spark's says that puts "a" and "b", where ten records may become letters."""
    table: Any = to
    if isinstance(to, TableFunction):
        table = RemoteTable("t", key="id", write_function=to, retry=RetryPolicy(3, first_wait=0))
    batch = pa.RecordBatch.from_pydict({"id": ["a", "b"], "n": [1, 2]})
    report = TaskReport()

    async def send() -> None:
        async with table:
            for part in split_batch(batch, Shape(("id",)), None, "t"):
                outcomes = await table.send(part.operation)
                report.add(part, outcomes, 10)

    asyncio.run(send())
    return report


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class OfADriver(Exception):
    pass


OUT_OF_REACH = [
    ConnectionRefusedError("no server"),
    ConnectionResetError("reset"),
    TimeoutError(),
    OSError("network unreachable"),
    TransientError("busy.", "Wait."),
    caused(OfADriver("no connection"), ConnectionRefusedError("no server")),
    caused(ValueError("can't store it"), ConnectionRefusedError("no server")),
]


@pytest.mark.parametrize("error", OUT_OF_REACH, ids=repr)
def test_a_store_that_is_out_of_reach_is_tried_again_and_fails_the_batch(error: Exception) -> None:
    function = Failing(error)
    report = sent(function)
    assert function.keys_asked("put").count("b") == 3
    assert (report.letters, report.failed) == ([], 1)
    assert isinstance(report.error, TransientError)
    assert not report.unfit


UNKNOWN = [
    OfADriver("server closed the connection"),
    KeyError("STORE_URL"),
    AttributeError("no such method"),
    ConfigurationError("no url.", "Give one."),
    TableAccessError("the login is refused.", "Correct it."),
    ExceptionGroup("two", [ValueError("too long"), OfADriver("closed")]),
]


@pytest.mark.parametrize("error", UNKNOWN, ids=repr)
def test_an_error_that_says_nothing_of_the_record_fails_the_batch(error: Exception) -> None:
    function = Failing(error)
    report = sent(function)
    assert function.keys_asked("put").count("b") == 1
    assert (report.letters, report.failed) == ([], 1)
    assert report.error is not None


OF_THE_RECORD = [
    TableError("it is too long.", "Cut it."),
    SchemaMismatchError("no such column.", "Correct it."),
    RecordNotFoundError("no.", "Put it.", keys=("b",)),
    ValueError("too long"),
    TypeError("no number"),
    OverflowError("too large"),
    caused(TableError("it is refused.", "Correct it."), OSError("400 from the service")),
    ExceptionGroup("two", [ValueError("too long"), TypeError("no number")]),
]


@pytest.mark.parametrize("error", OF_THE_RECORD, ids=repr)
def test_an_error_about_the_record_makes_it_a_letter(error: Exception) -> None:
    function = Failing(error)
    report = sent(function)
    assert function.keys_asked("put").count("b") == 1
    assert ([json.loads(letter["key"]) for letter in report.letters], report.error) == (["b"], None)


class NoCredits:
    async def acquire(self, budget: Any, credits: float) -> None:
        raise TableError(
            "the run's driver, which hands out its credits, is gone.", "Check the network."
        )

    async def close(self) -> None:
        pass


def test_records_for_which_there_are_no_credits_fail_the_batch() -> None:
    table: Any = RemoteTable(
        "t", key="id", write_function=MemoryTable("paid"), rate_limit=RateLimit(None, 10)
    )
    report = sent(table.with_credit_source(NoCredits()))
    assert (report.letters, report.failed) == ([], 2)


class NotOpened(UserFunction):
    async def open(self) -> None:
        raise ValueError("port must be a number")


class OfNone(MemoryTable):
    async def send(self, operation: Any) -> Any:
        return Outcomes(0)


class Raises(MemoryTable):
    async def send(self, operation: Any) -> Any:
        raise ValueError("the answer can't be read")


class Unexplained(MemoryTable):
    async def send(self, operation: Any) -> Any:
        return Outcomes.all(len(operation), Problem(State.REFUSED))


class Unsure(Failing):
    def is_retriable(self, error: BaseException) -> bool:
        raise ValueError("no status")


@pytest.mark.parametrize(
    "function",
    [NotOpened(), OfNone("t"), Raises("t"), Unexplained("t"), Unsure(OSError("reset"))],
    ids=lambda function: type(function).__name__,
)
def test_a_request_that_failed_whatever_was_in_it_fails_the_batch(function: TableFunction) -> None:
    report = sent(function)
    assert report.letters == []
    assert report.error is not None

"""What raises behind a request, in functions of a user's own, repeats nothing that was done, and
is told.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from dagster_adjunct.errors import (
    ConfigurationError,
    RecordNotFoundError,
    TableError,
    TransientError,
)
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.operation import Changes
from dagster_adjunct.tables import (
    RateLimit,
    RemoteTable,
    RetryPolicy,
    TableReadFunction,
    TableWriteFunction,
)


class LosesAReply(MemoryTable):
    """It does the first write, and raises for it."""

    def __init__(self, error: Exception) -> None:
        super().__init__("loses-a-reply")
        self._errors = [error]
        self.requests = 0

    async def send(self, operation: Any) -> Any:
        self.requests += 1
        outcomes = await super().send(operation)
        if operation.kind.writes and self._errors:
            raise self._errors.pop()
        return outcomes


@pytest.mark.parametrize(
    "error", [TransientError("the reply was lost", "Ask again."), ConnectionResetError("reset")]
)
def test_increments_whose_reply_was_lost_are_not_added_twice(error: Exception) -> None:
    function = LosesAReply(error)
    function.fill({"a": {"n": 0}, "b": {"n": 0}})
    table = RemoteTable(
        "t",
        key="id",
        read_function=function,
        write_function=function,
        retry=RetryPolicy(3, first_wait=0.001, unknown="fail"),
    )

    async def adding() -> list[Any]:
        changes = [table.update(key, Changes(add={"n": 1})) for key in "abab"]
        return await asyncio.gather(*changes, return_exceptions=True)

    reported = asyncio.run(adding())
    assert any(isinstance(outcome, Exception) for outcome in reported)
    assert max(record["n"] for record in function.content()[0].values()) <= 2


class Counters(TableReadFunction[str, int], TableWriteFunction[str, int, int]):
    """It adds; the first time that "bad" is asked for, it fails with an error before it does."""

    def __init__(self, error: Exception) -> None:
        self.counts: dict[str, int] = {}
        self._errors = [error]

    async def get(self, key: str, *args: object) -> int | None:
        return self.counts.get(key)

    async def put(self, key: str, value: int, *args: object) -> None:
        self.counts[key] = value

    async def delete(self, key: str, *args: object) -> None:
        self.counts.pop(key, None)

    async def update(self, key: str, update: int, *args: object) -> None:
        if key == "bad" and self._errors:
            raise self._errors.pop()
        self.counts[key] = self.counts.get(key, 0) + update


class Unsure(Counters):
    def is_retriable(self, error: BaseException) -> bool:
        return bool(error.response.status == 503)  # type: ignore[attr-defined]


def busy(pause: object = None) -> Exception:
    error = TransientError("busy.", "Wait.")
    error.retry_after = pause  # type: ignore[attr-defined]
    return error


def gathered(function: Any, **declared: Any) -> list[Any]:
    """Add one to three keys at a time, of three callers; return what each is told."""
    table: Any = RemoteTable(
        "t", key="id", read_function=function, write_function=function, **declared
    )

    async def adding() -> list[Any]:
        changes = [table.update(key, 1) for key in ("good", "bad", "better")]
        return await asyncio.gather(*changes, return_exceptions=True)

    return asyncio.run(adding())


def raising(problem: object) -> bool:
    raise AttributeError("no status_code")


@pytest.mark.parametrize(
    ("function", "declared", "reported"),
    [
        (
            Counters(busy()),
            {"retry": RetryPolicy(retry_if=raising)},
            "retry_if of a retry policy raised",
        ),
        (Unsure(OSError("reset")), {}, "Unsure raised AttributeError .* asked whether OSError"),
    ],
)
def test_who_can_not_say_whether_an_error_passes_repeats_nothing(
    function: Any, declared: Any, reported: str
) -> None:
    good, bad, better = gathered(function, **declared)
    assert (good, better) == (None, None)
    with pytest.raises(TableError, match=reported):
        raise bad
    assert function.counts == {"good": 1, "better": 1}


@pytest.mark.parametrize("pause", ["soon", math.nan, math.inf, -5, True, [1], 10**400])
def test_a_pause_that_is_none_is_left_out(pause: object) -> None:
    function = Counters(busy(pause))
    assert gathered(function, retry=RetryPolicy(first_wait=0.001)) == [None, None, None]
    assert function.counts == {"good": 1, "bad": 1, "better": 1}
    (reported,) = [
        outcome
        for outcome in gathered(Counters(busy(pause)), retry=RetryPolicy(1))
        if outcome is not None
    ]
    notes = [
        note for cause in (reported, reported.__cause__) for note in getattr(cause, "__notes__", ())
    ]
    assert any("retry_after is" in note for note in notes), notes


def test_a_pause_as_text_is_kept() -> None:
    function = Counters(busy("0.001"))
    assert gathered(function, retry=RetryPolicy(first_wait=0.0)) == [None, None, None]
    assert function.counts == {"good": 1, "bad": 1, "better": 1}


def costs_nothing_of_bad(operation: Any, answer: Any) -> Any:
    if "bad" in operation.entries.keys and len(operation) < 3:
        raise KeyError("bad")
    return 100.0 * len(operation)


@pytest.mark.parametrize("cost", [None, math.nan, math.inf, -1, "3", True])
def test_costs_that_are_none_are_refused_before_anything_is_sent(cost: Any) -> None:
    function = Counters(busy())
    limit = RateLimit(writes_per_second=1000, credits=lambda operation, answer: cost)
    for reported in gathered(function, rate_limit=limit):
        with pytest.raises(ConfigurationError) as caught:
            raise reported
        assert caught.value.argument == "credits"
    assert function.counts == {}


@pytest.mark.lengthy
def test_a_cost_that_is_not_known_of_a_later_part_repeats_nothing() -> None:
    function = Counters(busy())
    limit = RateLimit(writes_per_second=200, credits=costs_nothing_of_bad)
    for reported in gathered(function, rate_limit=limit):
        if reported is not None:
            with pytest.raises(ConfigurationError, match="raised KeyError: 'bad'") as caught:
                raise reported
            assert caught.value.argument == "credits"
    assert max(function.counts.values(), default=0) <= 1


def test_an_update_of_many_whose_function_raises_midway_is_not_sent_again() -> None:
    class Midway(MemoryTable):
        async def send(self, operation: Any) -> Any:
            await super().send(operation)
            raise ValueError("the answer can't be read")

    function = Midway("midway")
    function.fill({key: {"n": 0} for key in ("good", "bad", "better")})
    table = RemoteTable("t", key="id", read_function=function, write_function=function)

    async def adding() -> list[Any]:
        changes = [table.update(key, Changes(add={"n": 1})) for key in ("good", "bad", "better")]
        return await asyncio.gather(*changes, return_exceptions=True)

    for key, reported in zip(("good", "bad", "better"), asyncio.run(adding()), strict=True):
        with pytest.raises(
            TableError,
            match=f"table t: update of key '{key}' failed: ValueError: the answer can't be",
        ):
            raise reported
        assert isinstance(reported.__cause__, ValueError)
    assert {record["n"] for record in function.content()[0].values()} == {1}


@pytest.mark.parametrize(
    ("keys", "reported"),
    [
        (("other",), "keys that were not requested: 'other'"),
        ((["a"],), "with unhashable keys"),
        ("ab", "which is one string"),
    ],
)
def test_missing_records_are_those_that_were_asked_for(keys: Any, reported: str) -> None:
    class Names(Counters):
        async def update_all(self, entries: Any, *args: object) -> None:
            raise RecordNotFoundError("no.", "Put it.", keys=keys)

    function = Names(busy())
    table: Any = RemoteTable("t", key="id", read_function=function, write_function=function)
    with pytest.raises(TableError, match=reported):
        asyncio.run(table.update_all([("a", 1), ("b", 1)]))


@pytest.mark.parametrize(
    "wrong", [{"first_wait": math.inf}, {"first_wait": math.nan}, {"max_wait": -1.0}]
)
def test_endless_waits_are_refused_when_they_are_declared(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RetryPolicy(**wrong)  # type: ignore[arg-type]
    assert caught.value.argument in wrong


def test_a_rate_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        RateLimit(writes_per_second=10**400)
    assert caught.value.argument == "writes_per_second"

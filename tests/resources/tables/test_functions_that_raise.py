"""Of a store function that raises from its `send` it is not known what is done: nothing goes again past the policy."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dagster_adjunct.errors import TransientError
from dagster_adjunct.resources.tables.changes import Changes
from dagster_adjunct.resources.tables.memory_table import MemoryTable
from dagster_adjunct.tables import RemoteTable, RetryPolicy


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


@pytest.mark.parametrize("error", [TransientError("the reply was lost", "Ask again."), ConnectionResetError("reset")])
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

    told = asyncio.run(adding())
    assert any(isinstance(each, Exception) for each in told)
    assert max(record["n"] for record in function.content()[0].values()) <= 2

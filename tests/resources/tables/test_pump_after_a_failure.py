"""What a task does with the batches behind one that failed."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import TableUnavailableError
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.arrow import Marking, Marks, Shape, split_batch
from dagster_adjunct.resources.tables.operation import (
    Conditions,
    Outcomes,
    Problem,
    State,
    UpdateContract,
)
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.spark import send_batches
from dagster_adjunct.resources.tables.table import RemoteTable


def test_no_batch_is_begun_once_one_before_it_has_failed():
    """Its messages would make those that failed look old, where marks are kept."""
    begun, failed = [], threading.Event()

    def batches():
        for number in range(6):
            if number > 2:
                assert failed.wait(60)
                time.sleep(
                    0.15
                    # Spark takes its time: meanwhile the pump notices that the batch before it
                    # failed
                )
            yield number

    def done(part, outcome):
        if outcome == 2:
            failed.set()
        return outcome != 2

    async def send(part):
        begun.append(part.number)
        await asyncio.sleep(0.005)
        return part.number

    asyncio.run(
        send_batches(batches(), lambda number: [SimpleNamespace(number=number)], send, done)
    )
    assert begun == [0, 1, 2]


class FirstOfAFails(MemoryTable):
    """A store that fails the first operation on the key "a", and takes long for those on "slow"."""

    failed = False
    error: Exception | None = None

    async def send(self, operation):
        if "slow" in operation.entries.keys:
            await asyncio.sleep(0.1)
        if "a" in operation.entries.keys and not self.failed:
            self.failed = True
            if self.error is not None:
                raise self.error
            return Outcomes.all(
                len(operation), Problem(State.FAILED, TableUnavailableError("down.", "Wait."))
            )
        return await super().send(operation)


@pytest.mark.parametrize("error", [None, RuntimeError("a mistake in the function")])
def test_nothing_after_a_given_up_message_is_applied_while_its_batch_is_under_way(error):
    """Its task knows of the failure only when the whole batch is answered; a message of a later
    one would hide it.
    """
    store = FirstOfAFails("rest under way")
    store.clear()
    store.error = error
    rows = [[("a", 0), ("slow", 1)], [("b", 2)], [("a", 3)]]

    def batches():
        for own in rows:
            time.sleep(0.02)
            offsets = pa.array([offset for _, offset in own])
            update = pa.StructArray.from_arrays([pa.array([{"n": 1}] * len(own))], ["add"])
            default = pa.StructArray.from_arrays([pa.array([0] * len(own))], ["n"])
            columns = [
                pa.array([key for key, _ in own]),
                update,
                default,
                pa.array([0] * len(own)),
                offsets,
            ]
            yield pa.RecordBatch.from_arrays(
                columns, ["id", "update", "default", "__partition", "__offset"]
            )

    shape = Shape(
        ("id",), UpdateContract.UPDATE_WITH_DEFAULTS, Conditions(idempotent=True), typed=True
    )
    marking = Marking(("__partition",), "__offset", {}, "s")

    async def task():
        well = []
        marks = Marks(marking, ("id",), "here")
        async with RemoteTable(
            "t",
            key="id",
            write_function=store,
            batch_size=1,
            idempotent=True,
            retry=RetryPolicy(attempts=1),
        ) as table:
            await send_batches(
                batches(),
                lambda batch: split_batch(batch, shape, marks, "here"),
                lambda part: table.send(part.operation),
                lambda part, outcomes: (
                    well.append(not outcomes.places(State.FAILED, State.REFUSED)) or well[-1]
                ),
            )
        return all(well)

    assert not asyncio.run(task())
    assert asyncio.run(task())
    assert asyncio.run(store.get_all(["a", "b", "slow"])) == {
        "a": {"n": 2},
        "b": {"n": 1},
        "slow": {"n": 1},
    }

"""What a task does with the batches behind one that failed."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

from dagster_adjunct.resources.tables.table_task import pump


def test_no_batch_is_begun_once_one_before_it_has_failed():
    """Its messages would make those that failed look old, where marks are kept."""
    begun = []

    def batches():
        for number in range(6):
            time.sleep(0.02)  # Spark takes its time: meanwhile the batch before it fails
            yield number

    async def send(part):
        begun.append(part.number)
        await asyncio.sleep(0.005)
        return part.number

    asyncio.run(
        pump(batches(), lambda number: [SimpleNamespace(number=number)], send, lambda part, outcome: outcome != 2)
    )
    assert begun == [0, 1, 2]

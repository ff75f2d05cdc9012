"""`BatchLayer`: gathers operations into batches, and sends the requests of a batch in the order of each key."""

from __future__ import annotations

import asyncio
from typing import Any

from dagster_adjunct.resources.checked_numbers import check_whole_number
from dagster_adjunct.resources.tables.batch import BatchProvider
from dagster_adjunct.resources.tables.batch_handler import BatchHandler
from dagster_adjunct.resources.tables.batch_processor import BatchProcessor
from dagster_adjunct.resources.tables.layer import Layer
from dagster_adjunct.resources.tables.operation import Operation
from dagster_adjunct.resources.tables.outcomes import Outcomes
from dagster_adjunct.resources.tables.per_loop import PerLoop


class BatchLayer:
    """Sends few large requests where many small operations are made, and cuts what is too large for one.

    - What is asked of one key takes effect in the order of the calls; requests that share no key overtake each other.
    - At most `in_flight` requests are under way at a time, in each event loop (a Spark task has one).
    - A caller that is cancelled takes back what was not sent yet; what was sent with others goes on for them.
    - An entry's problem is that of its caller only.

    Each event loop has batches of its own: nothing says in what order two threads call.
    """

    def __init__(self, below: Layer, *, table: str, batches: BatchProvider | None = None, in_flight: int = 8) -> None:
        check_whole_number(in_flight, f"table {table}: in_flight={in_flight!r}", "1 or more", argument="in_flight")
        provider = batches or BatchProvider()
        self._below = below
        self._handler = handler = BatchHandler(provider, table=table)
        self._processors = PerLoop(lambda: BatchProcessor(below, provider, handler, in_flight))

    async def send(self, operation: Operation[Any]) -> Outcomes:
        self._handler.check(operation)
        return await self._processors.here().send(operation)

    async def flush(self) -> None:
        """Send what waits for others, and return when all that was asked so far is answered."""
        await asyncio.sleep(0)  # tasks that were made and did not run yet have asked for something, too
        await self._processors.here().flush()

    async def close(self) -> None:
        await self.flush()
        await self._below.close()

"""Order of operations on one key, whatever is in flight for others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Iterable
from contextlib import asynccontextmanager


class KeyOrder:
    """A queue per key. An operation on several keys waits until it is first in all of their queues.

    Places in the queues are taken in one step without awaiting, so two operations can never wait
    for each other. Threads with an event loop of their own have queues of their own: nothing says in what
    order two threads call.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def turn(self, keys: Iterable[Hashable]) -> AsyncIterator[None]:
        """Hold the place of `keys`: what came before is over, what comes later waits."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        held = [(loop, key) for key in dict.fromkeys(keys)]
        before = {self._last[key] for key in held if key in self._last}
        for key in held:
            self._last[key] = mine
        try:
            if before:
                await asyncio.wait(before)
            yield
        finally:
            unfinished = [place for place in before if not place.done()]
            if unfinished:
                # Cancelled while waiting: whoever waits for us must still wait for those before us.
                asyncio.gather(*unfinished).add_done_callback(lambda _: self._leave(held, mine))
            else:
                self._leave(held, mine)

    def _leave(self, keys: Iterable[Hashable], place: asyncio.Future[None]) -> None:
        for key in keys:
            if self._last.get(key) is place:
                del self._last[key]
        if not place.done():
            place.set_result(None)

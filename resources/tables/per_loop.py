"""`PerLoop`: something of which each event loop has its own: what waits in it, connections, locks, workers.

A table or function that threads share, each with a loop of its own (as every `BlockingTable` has), keeps one of them
for each.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """Makes one for each event loop when it first asks; `drop` gives back what that of a loop holds that is closed."""

    def __init__(self, make: Callable[[], T], drop: Callable[[T], object] = lambda _: None) -> None:
        self._make, self._drop = make, drop
        self._of: dict[asyncio.AbstractEventLoop, T] = {}
        self._last: tuple[asyncio.AbstractEventLoop, T] | None = None
        self._lock = threading.Lock()

    def here(self) -> T:
        """That of the running event loop."""
        loop = asyncio.get_running_loop()
        last = self._last  # read once: another thread may change it
        if last is not None and last[0] is loop:
            return last[1]
        with self._lock:
            gone = [self._of.pop(other) for other in list(self._of) if other.is_closed()]
            mine = self._of.get(loop)
            if mine is None:
                mine = self._of[loop] = self._make()
            self._last = (loop, mine)
        for unused in gone:
            self._drop(unused)
        return mine

    def take(self) -> T | None:
        """That of the running event loop, which is the caller's from now on; None where there is none."""
        with self._lock:
            self._last = None
            return self._of.pop(asyncio.get_running_loop(), None)

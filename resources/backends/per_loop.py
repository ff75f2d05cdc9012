"""What a function keeps open, for each event loop that uses it.

Connections, locks and workers belong to one event loop. A function that threads share, each with a loop of its own
(as every `BlockingTable` has), keeps one of them for each.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One value for each event loop; `drop` gives back what the value of a loop holds that is gone."""

    def __init__(self, make: Callable[[], T], drop: Callable[[T], object]) -> None:
        self._make, self._drop = make, drop
        self._values: dict[asyncio.AbstractEventLoop, T] = {}
        self._lock = threading.Lock()

    def here(self) -> T:
        """Return the running loop's value, made when it is first asked for."""
        loop = asyncio.get_running_loop()
        with self._lock:
            gone = [self._values.pop(loop) for loop in list(self._values) if loop.is_closed()]
            value = self._values.get(loop)
            if value is None:
                value = self._values[loop] = self._make()
        for unused in gone:
            self._drop(unused)
        return value

    def take(self) -> T | None:
        """Return the running loop's value, which is the caller's from now on; None where there is none."""
        with self._lock:
            return self._values.pop(asyncio.get_running_loop(), None)

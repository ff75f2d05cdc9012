"""`PerLoop`: something of which each event loop has its own, such as what waits in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class PerLoop(Generic[T]):
    """Makes one for each event loop when it first asks; forgotten with the loop."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._of: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()
        self._last: tuple[asyncio.AbstractEventLoop, T] | None = None

    def here(self) -> T:
        """That of the running event loop."""
        loop = asyncio.get_running_loop()
        last = self._last  # read once: another thread may change it
        if last is not None and last[0] is loop:
            return last[1]
        mine = self._of.get(loop)
        if mine is None:
            mine = self._of[loop] = self._make()
        self._last = (loop, mine)
        return mine

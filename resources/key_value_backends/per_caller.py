"""`PerCaller`: what callers share to reach a store, such as connections.

Callers in one event loop share one object; so do all threads of the process that have no event
loop.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from dagster_adjunct.resources.key_value.segment import is_blocking
from dagster_adjunct.resources.threads import PerLoop

T = TypeVar("T")
_of_parents: list[Any] = []  # after a fork; collecting one would close what the parent process uses


class PerCaller(Generic[T]):
    """Holds one object, which `make` creates on first use, per event loop, and one for all threads
    without a loop.

    `drop` releases the object of a closed loop. A forked child makes its own objects, and leaves
    its parent's open.
    """

    def __init__(self, make: Callable[[], T], drop: Callable[[T], object]) -> None:
        self._make = make
        self._loops: PerLoop[T] = PerLoop(make, drop)
        self._threads: tuple[int, T] | None = None  # with the id of the process that made it
        self._lock = threading.Lock()

    def here(self) -> T:
        """Return the object of the running event loop; without a loop, the one of such threads."""
        if not is_blocking():
            return self._loops.here()
        mine = self._threads
        if mine is None or mine[0] != os.getpid():
            with self._lock:
                if self._threads is None or self._threads[0] != os.getpid():
                    _of_parents.append(self._threads)
                    self._threads = os.getpid(), self._make()
                mine = self._threads
        return mine[1]

    def take(self) -> T | None:
        """Remove and return the object that `here` would return; None if it has not been made."""
        if not is_blocking():
            return self._loops.take()
        with self._lock:
            mine = self._threads
            self._threads = None
        if mine is not None and mine[0] == os.getpid():
            return mine[1]
        return None

"""`PerCaller`: what callers share to reach a store, such as connections.

Callers in one event loop share one object; so do all threads of the process that have no event
loop.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from dagster_adjunct.resources.key_value.segment import is_blocking
from dagster_adjunct.resources.threads import PerLoop

T = TypeVar("T")
_of_parents: list[Any] = []  # after a fork; collecting one would close what the parent process uses


class _Made(NamedTuple, Generic[T]):
    """An object, and the id of the process that made it."""

    process: int
    content: T


class PerCaller(Generic[T]):
    """Holds one object, which `make` creates on first use, per event loop, and one for all threads
    without a loop.

    `drop` releases the object of a closed loop. A forked child makes its own objects, and leaves
    its parent's open.
    """

    def __init__(self, make: Callable[[], T], drop: Callable[[T], object]) -> None:
        self._make = make
        self._loops: PerLoop[T] = PerLoop(make, drop)
        self._of_threads: _Made[T] | None = None
        self._lock = threading.Lock()

    def here(self) -> T:
        """Return the object of the running event loop; without a loop, the one of such threads."""
        if not is_blocking():
            return self._loops.here()
        made = self._of_threads
        if made is None or made.process != os.getpid():
            with self._lock:
                made = self._of_threads  # another thread may have made it meanwhile
                if made is None or made.process != os.getpid():
                    _of_parents.append(made)
                    made = self._of_threads = _Made(os.getpid(), self._make())
        return made.content

    def take(self) -> T | None:
        """Remove and return the object that `here` would return; None if it has not been made."""
        if not is_blocking():
            return self._loops.take()
        with self._lock:
            made = self._of_threads
            self._of_threads = None
        if made is not None and made.process == os.getpid():
            return made.content
        return None

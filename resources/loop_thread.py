"""`LoopThread`: an event loop in a thread of its own, for code that isn't async."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for callers that wait for them, from any thread, also from one whose own event loop is running
    (which they block meanwhile). The thread begins with the first of them, and again after `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def run(self, operation: Coroutine[Any, Any, T]) -> T:
        """Return what the coroutine returns, or raise what it raises."""
        pending = asyncio.run_coroutine_threadsafe(operation, self._started())
        try:
            return pending.result()
        except BaseException:
            pending.cancel()  # Ctrl-C must not leave the request running behind the caller's back
            raise

    def close(self, closing: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run the last coroutine, which gives back what the loop holds, and end the thread, if one began."""
        with self._starting:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        try:
            asyncio.run_coroutine_threadsafe(closing(), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run_until_stopped, args=(self._loop,), name=self._name, daemon=True
                )
                self._thread.start()
            return self._loop


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except (KeyboardInterrupt, SystemExit):
            # A function raised it. That ends the loop's run, and its caller is yet to be told.
            continue
        return

"""`LoopThread`: an event loop in a thread of its own, for code that isn't async."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for callers that wait for them, from any thread, also from one whose own event loop is running
    (which they block meanwhile). The thread begins with the first of them, and again after `close` and after a fork."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: _Running | None = None
        self._change = threading.Condition()
        _all.add(self)

    def run(self, operation: Coroutine[Any, Any, T]) -> T:
        """Return what the coroutine returns, or raise what it raises."""
        mine = self._entered()
        try:
            pending = asyncio.run_coroutine_threadsafe(operation, mine.loop)
            try:
                return pending.result()
            except BaseException:
                pending.cancel()  # Ctrl-C must not leave the request running behind the caller's back
                raise
        finally:
            self._leave(mine)

    def close(self, closing: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run the last coroutine, which gives back what the loop holds, and end the thread, if one began.

        Callers that wait in other threads have their answers before; a new one begins a new thread.
        """
        with self._change:
            running, self._running = self._running, None
            if running is None:
                return
            # In a handler of a signal, whom it interrupted is this thread itself, and would be waited for in vain.
            this = threading.get_ident()
            self._change.wait_for(lambda: all(caller == this for caller in running.callers))
        try:
            asyncio.run_coroutine_threadsafe(closing(), running.loop).result()
        finally:
            running.loop.call_soon_threadsafe(running.loop.stop)
            running.thread.join()
            running.loop.close()

    def _entered(self) -> _Running:
        with self._change:
            if self._running is None:
                self._running = _Running(self._name)
            self._running.callers.append(threading.get_ident())
            return self._running

    def _leave(self, running: _Running) -> None:
        with self._change:
            running.callers.remove(threading.get_ident())
            self._change.notify_all()

    def _forget(self) -> None:
        """Leave what the parent process has alone: its thread is not here, and its loop's selector is shared."""
        _of_parents.append(self._running)
        self._running, self._change = None, threading.Condition()


class _Running:
    """A loop with its thread; `callers` are the threads that wait for it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.callers: list[int] = []
        self.thread = threading.Thread(target=_run_until_stopped, args=(self.loop,), name=name, daemon=True)
        self.thread.start()


_all: WeakSet[LoopThread] = WeakSet()
_of_parents: list[_Running | None] = []  # kept, as a loop that goes closes what it shares with the parent


def _forget_all() -> None:
    for loop_thread in list(_all):
        loop_thread._forget()


os.register_at_fork(after_in_child=_forget_all)


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except (KeyboardInterrupt, SystemExit):
            # A function raised it. That ends the loop's run, and its caller is yet to be told.
            continue
        return

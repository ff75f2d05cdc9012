"""Calls at the same time, in threads; event loops of callers that are not async, in a thread of
their own, and objects that each loop has its own of.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Any, Generic, Self, TypeVar, overload
from weakref import WeakSet

from dagster_adjunct.resources import errors

A = TypeVar("A")

T = TypeVar("T")

REQUESTS_AT_ONCE = 8


class requested_once(cached_property[T]):
    """A `functools.cached_property` for values that take requests.

    In Python 3.11 a cached property computes its value under a lock that all instances of the class
    share: a request of one would stop all others.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...

    def __get__(self, instance: object, owner: type[Any] | None = None) -> Self | T:
        if instance is None:
            return self
        assert self.attrname is not None
        value: T = instance.__dict__.setdefault(self.attrname, self.func(instance))
        return value


def map_in_threads(
    work: Callable[[A], T], items: Iterable[A], at_once: int = REQUESTS_AT_ONCE
) -> list[T]:
    """Return the results of `work` for the items, in their order, from up to `at_once` concurrent
    calls.

    Raises the error of the first item, in this order, that failed. Errors and interrupts are raised
    once no call is running any more; calls that have not begun by then are cancelled.
    """
    listed = list(items)
    if min(len(listed), at_once) < 2:
        return [work(item) for item in listed]
    begun: list[Future[T]] = []
    with ThreadPoolExecutor(min(len(listed), at_once), "adjunct-requests") as threads:
        # Python starts no threads after the main one has ended: then this thread does the rest
        # itself.
        with suppress(RuntimeError):
            begun.extend(threads.submit(work, item) for item in listed)
        try:
            results = [future.result() for future in begun]
            results += map(work, listed[len(begun) :])
            return results
        finally:
            for future in begun:
                future.cancel()


def call_in_threads(*calls: Callable[[], Any], at_once: int = REQUESTS_AT_ONCE) -> list[Any]:
    """Return the results of these calls, made at the same time as by `map_in_threads`."""
    return map_in_threads(lambda call: call(), calls, at_once)


def open_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop. Raises ConfigurationError if this process may open no more files."""
    try:
        return asyncio.new_event_loop()
    except OSError as error:
        reason, step = errors.describe_file_error(error, "/")
        raise errors.ConfigurationError(
            f"No event loop can be opened: {reason}.", step, setting="ulimit -n"
        ) from error


def run_in_new_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine in a loop of its own, as `asyncio.run` does."""
    try:
        with asyncio.Runner(loop_factory=open_loop) as runner:
            return runner.run(coroutine)
    finally:
        # It has not begun if no loop could be opened: Python would warn that nobody awaits it.
        coroutine.close()


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine to its end and return its result.

    If an event loop runs in this thread, it is blocked meanwhile, and the coroutine runs in another
    thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_in_new_loop(coroutine)
    with ThreadPoolExecutor(1, thread_name_prefix="adjunct-loop") as aside:
        return aside.submit(run_in_new_loop, coroutine).result()


class LoopThread:
    """An event loop in a thread of its own, which runs coroutines for callers that block until they
    are done.

    Callers may be in any thread, also in one whose own event loop is running (and blocked
    meanwhile). The thread starts with the first coroutine, and again after `close` and after a
    fork.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: _Running | None = None
        self._change = threading.Condition()
        _loop_threads.add(self)

    def run(self, operation: Coroutine[Any, Any, T]) -> T:
        """Return what the coroutine returns, or raise what it raises."""
        try:
            mine = self._enter()
        except BaseException:
            operation.close()
            raise
        try:
            pending = asyncio.run_coroutine_threadsafe(operation, mine.loop)
            try:
                return pending.result()
            except BaseException:
                # Ctrl-C must not leave the request running behind the caller's back
                pending.cancel()
                raise
        finally:
            self._leave(mine)

    def close(self, closing: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run a last coroutine, which releases the loop's resources, then end the thread; nothing
        without a thread.

        Callers that are waiting in other threads get their results first; later callers start a new
        thread.
        """
        with self._change:
            running = self._running
            self._running = None
            if running is None:
                return
            # A signal handler may call this in a thread that is waiting here, and whose call can't
            # finish first.
            this = threading.get_ident()
            self._change.wait_for(lambda: all(caller == this for caller in running.callers))
        try:
            asyncio.run_coroutine_threadsafe(closing(), running.loop).result()
        finally:
            running.loop.call_soon_threadsafe(running.loop.stop)
            running.thread.join()
            running.loop.close()

    def _enter(self) -> _Running:
        """Return the running loop, started if there is none, with this thread among its callers."""
        with self._change:
            if self._running is None:
                self._running = _Running(self._name)
            self._running.callers.append(threading.get_ident())
            return self._running

    def _leave(self, running: _Running) -> None:
        """Remove this thread from a loop's callers."""
        with self._change:
            running.callers.remove(threading.get_ident())
            self._change.notify_all()

    def _abandon(self) -> None:
        """Drop the parent process's loop after a fork: its thread does not exist here, and its
        selector is shared.
        """
        _parent_loops.append(self._running)
        self._running = None
        self._change = threading.Condition()


class _Running:
    """A loop with its thread; `callers` are the threads that wait for it."""

    def __init__(self, name: str) -> None:
        self.loop = open_loop()
        self.callers: list[int] = []
        self.thread = threading.Thread(
            target=_run_until_stopped, args=(self.loop,), name=name, daemon=True
        )
        self.thread.start()


_loop_threads: WeakSet[LoopThread] = WeakSet()


# Kept: collecting a loop would close the selector that the parent uses.
_parent_loops: list[_Running | None] = []


def _reset_after_fork() -> None:
    """Let all loop threads start anew in a forked process."""
    for loop_thread in list(_loop_threads):
        loop_thread._abandon()


os.register_at_fork(after_in_child=_reset_after_fork)


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped; runs in the loop's thread."""
    while True:
        try:
            loop.run_forever()
        except (KeyboardInterrupt, SystemExit):
            # A coroutine raised it and so stopped the loop. Run it again, so that the caller
            # receives the exception.
            continue
        return


class PerLoop(Generic[T]):
    """Holds one object per event loop, such as connections, locks or workers, and creates it on
    first use.

    For tables and functions that threads share, each with a loop of its own (as every
    `BlockingTable` has). `drop` releases the object of a loop that ends without `take`: when
    `asyncio.run` closes the loop's asynchronous generators, else when another loop asks for its
    object.
    """

    def __init__(self, make: Callable[[], T], drop: Callable[[T], object] = lambda _: None) -> None:
        self._make = make
        self._drop = drop
        # Of each loop: its object, and the generator that drops it when the loop ends.
        self._of: dict[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[None]]] = {}
        # The loop that asked last, and its object.
        self._last: tuple[asyncio.AbstractEventLoop, T] | None = None
        self._lock = threading.Lock()

    def here(self) -> T:
        """The running event loop's object."""
        loop = asyncio.get_running_loop()
        last = self._last  # read once, as another thread may change it
        if last is not None:
            last_loop, found = last
            if last_loop is loop:
                return found
        with self._lock:
            gone = []
            for other in list(self._of):
                if other.is_closed():
                    gone.append(self._of.pop(other))
            if loop not in self._of:
                self._of[loop] = (self._make(), self._start_watch(loop))
            mine, _ = self._of[loop]
            self._last = (loop, mine)
        # Without the lock: they were removed, so nobody else has them, and `drop` may block, or ask
        # for the object of this loop.
        for unused, _ in gone:
            self._drop(unused)
        return mine

    def take(self) -> T | None:
        """Remove and return the running event loop's object; None if there is none."""
        with self._lock:
            self._last = None
            held = self._of.pop(asyncio.get_running_loop(), None)
        if held is None:
            return None
        mine, watch = held
        with suppress(StopIteration):  # it ends at once, and finds no object to drop
            watch.aclose().send(None)
        return mine

    def _start_watch(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None]:
        """Return a generator of the running event loop, which drops the loop's object at its
        end.
        """
        watch = self._drop_at_end(loop)
        with suppress(StopIteration):
            watch.__anext__().send(None)  # up to its yield
        return watch

    async def _drop_at_end(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None]:
        """Wait until the loop ends, then drop its object, unless it has been removed before."""
        try:
            yield
        finally:
            # Without the lock: to pop is atomic, and while this loop is not closed, which follows,
            # no other thread removes its object.
            held = self._of.pop(loop, None)
            if held is not None:
                mine, _ = held
                self._last = None
                self._drop(mine)

"""Calls at the same time, in threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Any, Self, TypeVar, overload

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

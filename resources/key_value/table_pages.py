"""`TablePages`: the pages of an iteration, one request each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from dagster_adjunct.resources.key_value.addressing import KeyRange
from dagster_adjunct.resources.key_value.iterator_state import Iteration, IteratorState, state_behind
from dagster_adjunct.resources.key_value.page_items import PageItems
from dagster_adjunct.resources.key_value.table_segment import StoredPage
from dagster_adjunct.resources.key_value_errors import KeyValueTableError

T = TypeVar("T")
ReadPage = Callable[[int, KeyRange, int, bool], Awaitable[StoredPage]]
"""Reads from a partition the first entries of a range: at most so many, with values or without."""


class IteratorPage(NamedTuple, Generic[T]):
    """Items in order, at least one and at most as many as were asked for; `state` is the place behind the last."""

    items: Sequence[T]
    state: IteratorState


class TablePages(Generic[T]):
    """An asynchronous iterator over `IteratorPage`s.

    While others write, each key is met at most once, in the order of (partition, key); an entry that is there from the
    first page to the last is met, with a version that it had when its page was read: since the page before the last one
    was asked for, where the store reads ahead.
    """

    def __init__(
        self,
        iteration: Iteration,
        read: ReadPage,
        make: Callable[[StoredPage], PageItems[T]],
        page_size: int,
        state: IteratorState | None,
        family: str | None = None,
    ) -> None:
        self._iteration, self._read, self._make, self._page_size = iteration, read, make, page_size
        self._head = iteration.head
        self._family = family
        try:
            self._place, self._within = (0, iteration.within) if state is None else iteration.resumed(state)
        except KeyValueTableError as error:
            error.of_family(family)
            raise

    def __aiter__(self) -> TablePages[T]:
        return self

    async def __anext__(self) -> IteratorPage[T]:
        page = await self.next_page()
        if page is None:
            raise StopAsyncIteration
        return page

    async def next_page(self) -> IteratorPage[T] | None:
        """Return the next page; None behind the last one."""
        try:
            return await self._next()
        except KeyValueTableError as error:
            error.of_family(self._family)
            raise

    async def _next(self) -> IteratorPage[T] | None:
        iteration = self._iteration
        while self._place < len(iteration.partitions):
            partition = iteration.partitions[self._place]
            if not self._within.is_empty:
                page = await self._read(partition, self._within, self._page_size, iteration.values)
                if page:
                    last = page.keys[-1]
                    self._within = iteration.within.after(last)
                    if page.is_last:  # what comes there from now on is not of the moment at which this was read
                        self._place, self._within = self._place + 1, iteration.within
                    return IteratorPage(self._make(page), state_behind(self._head, partition, last))
            self._place += 1
            self._within = iteration.within
        return None

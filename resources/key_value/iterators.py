"""Iterating over a table: `TablePages`, and `IteratorState`, from which another process can
continue.

Its parts, with their sizes in bytes:

| format | kind | incarnation | hash of what is iterated | partition | last key | checksum |
| 1      | 1    | 8           | 16                       | 4         | any      | 8        |
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, overload

from dagster_adjunct.resources.errors import IteratorStateError, KeyValueTableError
from dagster_adjunct.resources.key_value.segment import (
    KeyRange,
    PageReader,
    PrefetchingSegment,
    StoredPage,
    TableId,
    TableSegment,
    read_with_retries,
)

_FORMAT = 1
_HEAD = struct.Struct(">Bc8s16s")
_BEFORE_KEY = _HEAD.size + 4
_CHECK_BYTES = 8


@dataclass(frozen=True, slots=True)
class IteratorState:
    """The position after a page. It is valid for the same table (not one that was created again),
    kind of iteration, family, range and partitions; the page size may differ."""

    _bytes: bytes

    def to_bytes(self) -> bytes:
        """Return the state for storing elsewhere: 38 bytes and those of a key."""
        return self._bytes

    @staticmethod
    def from_bytes(stored: bytes) -> IteratorState:
        """Return the state that `to_bytes` returned. Raises IteratorStateError for anything
        else.
        """
        is_whole = isinstance(stored, bytes) and len(stored) >= _BEFORE_KEY + _CHECK_BYTES
        if not is_whole or _checksum(stored[:-_CHECK_BYTES]) != stored[-_CHECK_BYTES:]:
            problem = f"{stored!r:.60} is not an iterator state, or is damaged."
            raise IteratorStateError(problem, "Pass what to_bytes() returned, or None.")
        if stored[0] != _FORMAT:
            problem = f"an iterator state has format {stored[0]}; this release reads {_FORMAT}."
            raise IteratorStateError(
                problem, "Continue with the release that wrote it, or start again."
            )
        return IteratorState(stored)


def _checksum(stored: bytes) -> bytes:
    """Return the checksum of a state's other parts."""
    return hashlib.blake2b(stored, digest_size=_CHECK_BYTES).digest()


T_co = TypeVar("T_co", covariant=True)


class PageItems(Sequence[T_co]):
    """A sequence that makes its items anew on each iteration; it keeps them only once it has been
    indexed.

    Keeping thousands of new objects, page after page, costs more than making them, because Python's
    garbage collector scans the whole process again and again.
    """

    __slots__ = ("_count", "_items", "_list")

    def __init__(self, count: int, items: Callable[[], Iterable[T_co]]) -> None:
        self._count = count
        self._items = items
        self._list: list[T_co] | None = None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T_co]:
        return iter(self._items() if self._list is None else self._list)

    @overload
    def __getitem__(self, place: int) -> T_co: ...

    @overload
    def __getitem__(self, place: slice) -> list[T_co]: ...

    def __getitem__(self, place: int | slice) -> Any:
        if self._list is None:
            self._list = list(self._items())
        return self._list[place]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PageItems | list):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        items = list(self)
        return PageItems, (len(items), items.__iter__)


T = TypeVar("T")


class IteratorPage(NamedTuple, Generic[T]):
    """At least one item and at most the page size, in order; `state` is the position after the
    last.
    """

    items: Sequence[T]
    state: IteratorState


@dataclass(frozen=True, slots=True)
class Iteration:
    """What is iterated over: a range of keys in some partitions, with values or only keys.

    `family` is that of the keys, for errors; None if they may have any.
    """

    partitions: Sequence[int]
    within: KeyRange
    page_size: int
    family: str | None = None
    values: bool = False


class TablePages(Generic[T]):
    """An asynchronous iterator over `IteratorPage`s.

    While others write, each key is returned at most once, ordered by (partition, key). An entry
    that exists throughout the iteration is returned, with a version that it had when its page was
    read. A store that reads ahead may have read a page right after the previous one was requested.
    """

    def __init__(
        self,
        table: TableId,
        open_segment: Callable[[int], TableSegment],
        make: Callable[[StoredPage], PageItems[T]],
        iteration: Iteration,
        state: IteratorState | None,
    ) -> None:
        self._open = open_segment
        self._make = make
        self._iteration = iteration
        within = iteration.within
        end = b"-"  # without an end
        if within.end is not None:
            end = b"+" + within.end
        parts = (within.start, end, ",".join(map(str, iteration.partitions)).encode())
        content = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        iterated = hashlib.blake2b(content, digest_size=16).digest()
        # Every state of this iteration begins with these bytes.
        self._head = _HEAD.pack(
            _FORMAT, b"e" if iteration.values else b"k", bytes.fromhex(table.incarnation), iterated
        )
        self._place = 0  # the index of the current partition
        self._within = within  # what is left of it
        self._reader: PageReader | None = None  # of the current partition
        try:
            if state is not None:
                self._resume(table, state)
        except KeyValueTableError as error:
            raise error.of_family(iteration.family) from None

    def __aiter__(self) -> TablePages[T]:
        return self

    async def __anext__(self) -> IteratorPage[T]:
        page = await self.next_page()
        if page is None:
            raise StopAsyncIteration
        return page

    async def next_page(self) -> IteratorPage[T] | None:
        """Return the next page, None after the last one."""
        try:
            while self._place < len(self._iteration.partitions):
                partition = self._iteration.partitions[self._place]
                within = self._within
                if not within.is_empty:
                    page = await self._read(partition, within)
                else:
                    page = StoredPage(is_last=True)
                # After a partition's last page comes the next partition, even if entries have been
                # added since.
                if page.is_last or not page:
                    self._place += 1
                    self._within = self._iteration.within
                    self._reader = None
                else:
                    self._within = self._iteration.within.after(page.keys[-1])
                if page:
                    state = self._head + partition.to_bytes(4, "big") + page.keys[-1]
                    return IteratorPage(self._make(page), IteratorState(state + _checksum(state)))
            return None
        except KeyValueTableError as error:
            error.of_family(self._iteration.family)
            raise

    async def _read(self, partition: int, within: KeyRange) -> StoredPage:
        """Return a page of a partition, whose segment is opened for its first page."""
        if self._reader is None:
            segment = self._open(partition)
            if isinstance(segment, PrefetchingSegment):
                self._reader = segment.prefetching_reader()
            else:
                self._reader = segment
        return await read_with_retries(
            partial(
                self._reader.page, within, self._iteration.page_size, values=self._iteration.values
            )
        )

    def _resume(self, table: TableId, state: IteratorState) -> None:
        """Continue after the page that had this state. Raises IteratorStateError for the state
        of another iteration.
        """
        if not isinstance(state, IteratorState):
            raise table.error(
                IteratorStateError,
                f"{state!r:.60} is not an iterator state.",
                "Pass the state of a page, or None; IteratorState.from_bytes reads a stored one.",
            )
        stored = IteratorState.from_bytes(state.to_bytes()).to_bytes()
        _, kind, incarnation, iterated = _HEAD.unpack_from(stored)
        _, expected_kind, expected_incarnation, expected = _HEAD.unpack_from(self._head)
        partition = int.from_bytes(stored[_HEAD.size : _BEFORE_KEY], "big")
        if incarnation != expected_incarnation:
            origin = "another table, or one that was deleted since"
        elif kind != expected_kind:
            origin = f"an iterator over {'keys' if self._iteration.values else 'entries'}"
        elif iterated != expected or partition not in self._iteration.partitions:
            origin = "another family or range, or other partitions"
        else:
            self._place = self._iteration.partitions.index(partition)
            self._within = self._iteration.within.after(stored[_BEFORE_KEY:-_CHECK_BYTES])
            return
        raise table.error(
            IteratorStateError,
            f"the iterator state is of {origin}.",
            "Pass it to the same iterator over the same table, family and range, or start again"
            " with None.",
        )

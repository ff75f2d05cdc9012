"""`IteratorState`: where an iteration stands, for another process to go on from.

| format | kind | incarnation | what is iterated, hashed | partition | key handed out last | checksum |
| 1      | 1    | 8           | 16                       | 4         | any                 | 8        |   bytes
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, overload

from dagster_adjunct.resources.errors import IteratorStateError, KeyValueTableError
from dagster_adjunct.resources.key_value.segment import KeyRange, StoredPage, TableId

_FORMAT = 1
_HEAD = struct.Struct(">Bc8s16s")
_BEFORE_KEY = _HEAD.size + 4
_CHECK_BYTES = 8


@dataclass(frozen=True, slots=True)
class IteratorState:
    """The place behind a page's last item. It is good for the same table (not for one that was created anew), kind,
    family, range and partitions; the page size may be another one."""

    _bytes: bytes

    def to_bytes(self) -> bytes:
        """Return the state for storing elsewhere: 38 bytes and those of a key."""
        return self._bytes

    @staticmethod
    def from_bytes(stored: bytes) -> IteratorState:
        """Return what `to_bytes` gave. Raises IteratorStateError for anything else."""
        if (
            not isinstance(stored, bytes)
            or len(stored) < _BEFORE_KEY + _CHECK_BYTES
            or _checksum(stored[:-_CHECK_BYTES]) != stored[-_CHECK_BYTES:]
        ):
            raise IteratorStateError(
                f"{stored!r:.60} is no state of an iterator, or was damaged.", "Give what to_bytes() returned, or None."
            )
        if stored[0] != _FORMAT:
            raise IteratorStateError(
                f"the state of an iterator has format {stored[0]}; this release reads {_FORMAT}.",
                "Go on with the release that wrote it, or begin anew.",
            )
        return IteratorState(stored)


@dataclass(frozen=True, slots=True)
class Iteration:
    """What is iterated: `values` says entries, else keys; segments in the order of `partitions`, a range of each."""

    table: TableId
    values: bool
    partitions: tuple[int, ...]
    within: KeyRange

    @property
    def head(self) -> bytes:
        """What all states of the iteration begin with; `state_behind` takes it."""
        return _HEAD.pack(_FORMAT, self._kind, bytes.fromhex(self.table.incarnation), self._hash())

    def resumed(self, state: IteratorState) -> tuple[int, KeyRange]:
        """Return the place among `partitions` to go on at, and what is left of its range.

        Raises IteratorStateError for the state of anything else.
        """
        if not isinstance(state, IteratorState):
            raise IteratorStateError(
                f"key-value table {self.table}: {state!r:.60} is no state of an iterator.",
                "Give the state of a page, or None; IteratorState.from_bytes reads a stored one.",
                scope=self.table.scope,
                table=self.table.name,
            )
        stored = IteratorState.from_bytes(state.to_bytes()).to_bytes()
        _, kind, incarnation, iterated = _HEAD.unpack_from(stored)
        partition = int.from_bytes(stored[_HEAD.size : _BEFORE_KEY], "big")
        if incarnation != bytes.fromhex(self.table.incarnation):
            self._refuse("of another table, or of one that was deleted since")
        if kind != self._kind:
            self._refuse(f"of an iterator over {'keys' if self.values else 'entries'}")
        if iterated != self._hash() or partition not in self.partitions:
            self._refuse("of another family or range, or of other partitions")
        return self.partitions.index(partition), self.within.after(stored[_BEFORE_KEY:-_CHECK_BYTES])

    @property
    def _kind(self) -> bytes:
        return b"e" if self.values else b"k"

    def _hash(self) -> bytes:
        end = b"-" if self.within.end is None else b"+" + self.within.end
        partitions = ",".join(map(str, self.partitions)).encode()
        parts = (self.within.start, end, partitions)
        return hashlib.blake2b(b"".join(len(part).to_bytes(4, "big") + part for part in parts), digest_size=16).digest()

    def _refuse(self, why: str) -> None:
        raise IteratorStateError(
            f"key-value table {self.table}: the state is {why}.",
            "Give it to the same iterator over the same table, family and range, or begin anew with None.",
            scope=self.table.scope,
            table=self.table.name,
        )


def make_iterator_state(head: bytes, partition: int, key: bytes) -> IteratorState:
    """Return the state of a page of the iteration with this head; its last item is this table key."""
    stored = head + partition.to_bytes(4, "big") + key
    return IteratorState(stored + _checksum(stored))


def _checksum(stored: bytes) -> bytes:
    return hashlib.blake2b(stored, digest_size=_CHECK_BYTES).digest()


T_co = TypeVar("T_co", covariant=True)


class PageItems(Sequence[T_co]):
    """A list in all but its time: iterating makes the items one by one and keeps none.

    To hold thousands of new objects at once, page after page, costs more than to make them: Python's collector looks at
    the whole process again and again.
    """

    __slots__ = ("_count", "_items", "_made")

    def __init__(self, count: int, items: Callable[[], Iterable[T_co]]) -> None:
        self._count, self._items = count, items
        self._made: list[T_co] | None = None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T_co]:
        return iter(self._items() if self._made is None else self._made)

    @overload
    def __getitem__(self, place: int) -> T_co: ...

    @overload
    def __getitem__(self, place: slice) -> list[T_co]: ...

    def __getitem__(self, place: int | slice) -> Any:
        if self._made is None:
            self._made = list(self._items())
        return self._made[place]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, PageItems | list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _held, (list(self),)


def _held(items: list[Any]) -> PageItems[Any]:
    return PageItems(len(items), items.__iter__)


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
                    return IteratorPage(self._make(page), make_iterator_state(self._head, partition, last))
            self._place += 1
            self._within = iteration.within
        return None

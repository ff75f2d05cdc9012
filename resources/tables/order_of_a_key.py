"""Order of requests on one key, whatever is in flight for others."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from typing import Protocol


class _HasKeys(Protocol):
    @property
    def keys(self) -> Sequence[Hashable]: ...


class KeyOrder:
    """Gives turns: whose keys others have before it waits for all of them, and holds up whoever comes later.

    Turns are given without awaiting, so two can never wait for each other. Of one event loop; no two threads.

    A turn that is alone is asked for its keys only when the next one comes, so that requests made one after the other
    pay nothing for their order.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, Turn] = {}  # who was last to ask for a key, until it is over
        self._alone: Turn | None = None  # the only one that is not over, where its keys are not in `_last`
        self._open: set[Turn] = set()
        self._flushes: list[tuple[set[Turn], asyncio.Future[None]]] = []

    def take(self, entries: _HasKeys) -> Turn:
        """The turn of a request for these keys."""
        turn = Turn(self, entries)
        self._open.add(turn)
        if len(self._open) == 1:
            self._alone = turn
            return turn
        last = self._last
        if self._alone is not None:
            last.update(dict.fromkeys(self._alone.keys, self._alone))
            self._alone = None
        keys = turn.keys
        if not last.keys().isdisjoint(keys):
            ahead = {last[key] for key in keys if key in last}
            turn.ahead = len(ahead)
            for other in ahead:
                other.behind.append(turn)
        last.update(dict.fromkeys(keys, turn))
        return turn

    def holds(self, entries: _HasKeys) -> bool:
        """Whether a turn for these keys would have to wait."""
        if not self._open:
            return False
        held = self._last.keys() if self._alone is None else set(self._alone.keys)
        return not held.isdisjoint(entries.keys)

    @property
    def open(self) -> frozenset[Turn]:
        """The turns that are not over."""
        return frozenset(self._open)

    async def over(self) -> None:
        """Return when all turns that were taken before are over."""
        if self._open:
            over = asyncio.get_running_loop().create_future()
            self._flushes.append((set(self._open), over))
            await over

    def _over(self, turn: Turn) -> None:
        over = [turn]
        while over:
            turn = over.pop()
            self._open.discard(turn)
            if self._flushes:
                self._flushed(turn)
            if not self._open:
                self._last.clear()
                self._alone = None
            elif turn is not self._alone:
                for key in turn.keys:
                    if self._last.get(key) is turn:
                        del self._last[key]
            for other in turn.behind:
                other.ahead -= 1
                if not other.ahead:
                    if other.left:
                        over.append(other)
                    elif other.waiting is not None and not other.waiting.done():
                        other.waiting.set_result(None)

    def _flushed(self, turn: Turn) -> None:
        for before, over in self._flushes:
            before.discard(turn)
            if not before and not over.done():
                over.set_result(None)
        self._flushes = [flush for flush in self._flushes if flush[0]]


class Turn:
    """The place of one request; `leave` it in any case, once or more often."""

    __slots__ = ("__weakref__", "_entries", "_order", "ahead", "behind", "left", "waiting")

    def __init__(self, order: KeyOrder, entries: _HasKeys) -> None:
        self._order = order
        self._entries = entries
        self.ahead = 0  # how many turns come before it
        self.behind: list[Turn] = []
        self.left = False
        self.waiting: asyncio.Future[None] | None = None

    @property
    def keys(self) -> Sequence[Hashable]:
        return self._entries.keys

    async def come(self) -> None:
        """Return when whatever came before on these keys is over."""
        if self.ahead:
            self.waiting = asyncio.get_running_loop().create_future()
            await self.waiting

    def leave(self) -> None:
        """Let those behind come; if it was cancelled while waiting, they wait for those before it still."""
        if not self.left:
            self.left = True
            if not self.ahead:
                self._order._over(self)

"""Keeps requests on one key in order, whatever is in flight for other keys."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

from dagster_adjunct.resources.tables.functions import is_retryable
from dagster_adjunct.resources.tables.layers import Layer, send_without_problems
from dagster_adjunct.resources.tables.operation import Entries, Operation, Outcomes, Problem, RowEntries

_Line = tuple[Hashable, str]  # a key and the source of its messages


class KeyLock:
    """Issues tickets: a request waits for all earlier requests that share one of its keys.

    Tickets are issued without awaiting, so two can never wait for each other. For one event loop; not thread-safe.

    A single open ticket is asked for its keys only when the next one is taken, so that sequential requests pay nothing
    for their order.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, Ticket] = {}  # the last open ticket of each key
        self._alone: Ticket | None = None  # the only open ticket, if its keys are not in `_last`
        self._open: set[Ticket] = set()
        self.blocked: dict[_Line, Problem] = {}  # until their batch is sent again; see `send_unblocked`

    def take(self, entries: Entries[Any]) -> Ticket:
        """Return a ticket for a request on these keys."""
        ticket = Ticket(self, entries)
        self._open.add(ticket)
        if len(self._open) == 1:
            self._alone = ticket
            return ticket
        last = self._last
        if self._alone is not None:
            last.update(dict.fromkeys(self._alone.keys, self._alone))
            self._alone = None
        keys = ticket.keys
        if not last.keys().isdisjoint(keys):
            ticket.wait_for({last[key] for key in keys if key in last})
        last.update(dict.fromkeys(keys, ticket))
        return ticket

    async def wait_for_open(self) -> None:
        """Return when all tickets taken before are released."""
        last = Ticket(self, RowEntries(()))
        last.wait_for(self._open)
        await last.acquire()

    def _finish(self, ticket: Ticket) -> None:
        over = [ticket]
        while over:
            ticket = over.pop()
            self._open.discard(ticket)
            if not self._open:
                self._last.clear()
                self._alone = None
            elif ticket is not self._alone:
                for key in ticket.keys:
                    if self._last.get(key) is ticket:
                        del self._last[key]
            for other in ticket.behind:
                other.ahead -= 1
                if not other.ahead:
                    if other.released:
                        over.append(other)
                    elif other.waiting is not None and not other.waiting.done():
                        other.waiting.set_result(None)


class Ticket:
    """A request's place in the order of its keys; always `release` it, repeatedly if need be."""

    __slots__ = ("_entries", "ahead", "behind", "blocked", "order", "released", "waiting")

    def __init__(self, order: KeyLock, entries: Entries[Any]) -> None:
        self.order = order
        self._entries = entries
        self.ahead = 0  # how many tickets it waits for
        self.behind: list[Ticket] = []
        self.released = False
        self.waiting: asyncio.Future[None] | None = None
        self.blocked: dict[_Line, Problem] = {}

    @property
    def keys(self) -> Sequence[Hashable]:
        return self._entries.keys

    def wait_for(self, others: set[Ticket]) -> None:
        """Place it behind these tickets."""
        self.ahead = len(others)
        for other in others:
            other.behind.append(self)

    async def acquire(self) -> None:
        """Return when all earlier requests on these keys are over."""
        if self.ahead:
            self.waiting = asyncio.get_running_loop().create_future()
            await self.waiting

    def release(self) -> None:
        """Let later requests proceed; if this one was cancelled while waiting, they still wait for earlier ones."""
        if not self.released:
            self.released = True
            if not self.ahead:
                self.order._finish(self)


async def send_unblocked(ticket: Ticket, operation: Operation[Any], below: Layer) -> Outcomes:
    """Send the entries of an operation that are not blocked; the others are FAILED without being sent.

    After a marked entry is given up, later entries of its key that already wait are blocked. The store skips messages
    older than the last applied one: if a later message of the key were applied, the one given up would be skipped when
    the batch is retried, and lost. Requests made after the caller got the error are sent, except those of a batch that
    is retried as a whole (`Operation.rerun`), whose sender makes more requests before all are answered. Entries
    rejected for their content block nothing.

    The ticket must have been acquired.
    """
    if not operation.conditions.idempotent:
        return await below.send(operation)
    blocked = {**ticket.order.blocked, **ticket.blocked} if operation.rerun else ticket.blocked
    held: dict[int, Problem] = {}
    if blocked:
        held = {place: blocked[line].unsent for place, line in enumerate(_lines(operation)) if line in blocked}
    outcomes = await send_without_problems(operation, held, below.send)
    if outcomes.problems and (ticket.behind or operation.rerun):
        _block_followers(ticket, operation, outcomes)
    return outcomes


def _block_followers(ticket: Ticket, operation: Operation[Any], outcomes: Outcomes) -> None:
    lines = _lines(operation)
    given_up = {lines[place]: problem for place, problem in outcomes.problems.items() if is_retryable(problem)}
    if operation.rerun:
        ticket.order.blocked.update(given_up)
    waiting, seen = list(ticket.behind) if given_up else [], set[Ticket]()
    while waiting:
        behind = waiting.pop()
        if behind not in seen:
            seen.add(behind)
            waiting.extend(behind.behind)
            behind.blocked.update(given_up)


def _lines(operation: Operation[Any]) -> Sequence[_Line]:
    """Each entry's line: its key and source."""
    entries = operation.entries
    return [(key, mark.source) for key, mark in zip(entries.keys, entries.marks or (), strict=True)]


L = TypeVar("L", bound=Hashable)


def group_preserving_key_order(lanes: Sequence[L], keys: Sequence[Hashable]) -> list[tuple[L, Sequence[int]]]:
    """Return the places of the entries by wave, in the order in which waves take effect; a wave has one lane.

    An entry is in the wave of its key's previous entry, behind it, or in a later wave. So puts and deletes that
    alternate between keys make two waves; one key's put, delete and put make three.
    """
    if not lanes:
        return []
    first = lanes[0]
    if all(lane == first for lane in lanes):
        return [(first, range(len(keys)))]
    waves: list[tuple[L, list[int]]] = []
    of_lane: dict[L, list[int]] = {}
    last: dict[Hashable, int] = {}
    for place, (lane, key) in enumerate(zip(lanes, keys, strict=True)):
        before = last.get(key, -1)
        if before >= 0 and waves[before][0] == lane:
            waves[before][1].append(place)
            continue
        mine = of_lane.setdefault(lane, [])
        later = bisect_right(mine, before)
        if later == len(mine):
            mine.append(len(waves))
            waves.append((lane, []))
        wave = mine[later]
        waves[wave][1].append(place)
        last[key] = wave
    return list(waves)

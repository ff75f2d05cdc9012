"""Batches operations into requests.

`BatchProvider` sets the limits. `BatchLayer` gathers operations, splits them into requests that
keep each key's order, and answers each operation once its requests are answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple

from pydantic import PositiveInt

from dagster_adjunct.resources.tables.compact import CompactLayer, as_put
from dagster_adjunct.resources.tables.functions import TableFunction, is_retryable
from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.resources.tables.operation import (
    Entries,
    Layer,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    RowEntries,
    are_same_args,
    estimate_bytes,
    group_preserving_key_order,
    may_have_effect,
    may_send_separately,
    send_without_problems,
)
from dagster_adjunct.resources.threads import PerLoop
from dagster_adjunct.resources.validation import SecondsOrZero, validated


@validated
@dataclass(frozen=True, slots=True)
class BatchProvider:
    """How large a table's requests may be, and how long an operation waits for others to share its
    request.

    - `size`: the greatest number of entries in a request.
    - `bytes`: roughly the greatest number of bytes in a request (`estimate_bytes`); a larger entry
      is sent alone.
    - `delay`: how many seconds operations wait for others, unless the request is full earlier. With
      0, only operations made in the same turn of the event loop share a request.
    - `compact`: of the writes of a key in a request, only the last put or delete is sent, and
      updates are merged into one (`compact.py`). A table with `newest_by` or `idempotent` can't
      have it.
    """

    size: PositiveInt = 1000
    bytes: PositiveInt | None = None
    delay: SecondsOrZero = 0.0
    compact: bool = False

    def can_gather(self, operation: Operation[Any], size: int) -> bool:
        """Whether the operation, of `size` bytes, can share a request: it has Python values and
        leaves room.
        """
        if type(operation.entries) is not RowEntries or operation.count >= self.size:
            return False
        return self.bytes is None or size < self.bytes

    def is_one_request(self, operation: Operation[Any]) -> bool:
        """Whether the operation can be sent as one request: within the limits, and no put that
        deletes (None).
        """
        count = operation.count
        if count > self.size:
            return False
        if self.bytes is not None and count > 1 and operation.entries.nbytes > self.bytes:
            return False
        return not self.splits_deletes(operation)

    def splits_deletes(self, operation: Operation[Any]) -> bool:
        """Whether the operation has puts that delete (None), which must be in other requests than
        its other puts. Compact batches take both in one request, without conditions.
        """
        return _has_deletes(operation) and (not self.compact or bool(operation.conditions))

    def bounds(self, entries: Entries[Any]) -> Iterator[tuple[int, int]]:
        """Split entries into requests; yield each one's first index, and the index after its
        last.
        """
        count = len(entries)
        size = self.size
        most = self.bytes
        if most is not None and entries.nbytes > most:
            if isinstance(entries, RowEntries):
                yield from _bounds_by_bytes(entries, size, most)
                return
            # Arrow entries are assumed to be of equal size: single sizes are not known.
            size = min(size, max(1, count * most // entries.nbytes))
        for start in range(0, count, size):
            yield start, min(start + size, count)


def _bounds_by_bytes(entries: RowEntries[Any], size: int, most: int) -> Iterator[tuple[int, int]]:
    """Split entries into requests of at most `size` entries, and `most` bytes if they have more
    than one; yield as `bounds`.
    """
    columns = (entries.keys, entries.values, entries.defaults)
    rows = zip(*(column for column in columns if column is not None), strict=True)
    ends = [0, *accumulate(sum(map(estimate_bytes, row)) for row in rows)]
    count = len(entries)
    start = 0
    for end in range(1, count + 1):
        if end == count or ends[end + 1] - ends[start] > most or end - start == size:
            yield start, end
            start = end


class _Call:
    """An operation that a caller sent, and what is known so far of its outcomes."""

    __slots__ = ("_answer", "defaults_put", "error", "left", "operation", "problems", "records")

    def __init__(self, operation: Operation[Any]) -> None:
        self.operation = operation
        self._answer: asyncio.Future[Outcomes] | None = None
        self.left = 0  # the number of unanswered requests that contain its entries
        self.problems: dict[int, Problem] = {}
        self.records: list[Any] | None = None
        self.defaults_put = 0
        self.error: BaseException | None = None

    @property
    def answer(self) -> asyncio.Future[Outcomes]:
        """The future of its outcomes, made on first use: most calls are one request of their own
        and need none.
        """
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
        return self._answer

    def record(self, places: Sequence[int], outcomes: Outcomes, start: int) -> None:
        """Record a request's outcomes, from index `start` on, as those of this call's entries at
        `places`.
        """
        if outcomes.problems:
            for place, own_place in enumerate(places, start):
                if problem := outcomes.problems.get(place):
                    self.problems[own_place] = problem
        if outcomes.records is not None:
            if self.records is None:
                self.records = [None] * len(self.operation)
            for place, own_place in enumerate(places, start):
                self.records[own_place] = outcomes.records[place]

    def fail(self, error: BaseException) -> None:
        """Note an error, which the caller gets unless there was one before."""
        self.error = self.error or error

    def count_answer(self) -> None:
        """Count one of its requests as answered; after the last one, complete `answer`."""
        self.left -= 1
        if self.left or self.answer.done():
            return
        if self.error is not None:
            self.answer.set_exception(self.error)
        else:
            self.answer.set_result(
                Outcomes(len(self.operation), self.records, self.problems, self.defaults_put)
            )


class _Span(NamedTuple):
    """Consecutive entries of a request, from index `start` on, which are the entries of `call`
    at `places`.
    """

    call: _Call
    start: int
    places: Sequence[int]


@dataclass(slots=True)
class _Request:
    """One operation for the layer below, and the calls that its entries come from."""

    operation: Operation[Any]
    spans: list[_Span]

    @property
    def calls(self) -> list[_Call]:
        """The calls that its entries come from, each once."""
        return list(dict.fromkeys(span.call for span in self.spans))


class _Lanes:
    """Operations that can't share a request, each standing for those that can share one with it."""

    def __init__(self) -> None:
        self.operations: list[Operation[Any]] = []

    def number_of(self, operation: Operation[Any]) -> int:
        """Return the lane of an operation, a new one if it can't share a request with others."""
        for lane, known in enumerate(self.operations):
            if can_share_request(known, operation):
                return lane
        self.operations.append(operation)
        return len(self.operations) - 1

    def of_entries(self, provider: BatchProvider, operation: Operation[Any]) -> list[int]:
        """Return the lane of each entry of an operation."""
        lane = self.number_of(operation)
        if not provider.splits_deletes(operation):
            return [lane] * len(operation)
        deletes = self.number_of(replace(operation, kind=OperationKind.DELETE))
        values = operation.entries.values or ()
        return [deletes if value is None else lane for value in values]


def _split_into_requests(provider: BatchProvider, calls: Sequence[_Call]) -> Iterator[_Request]:
    """Yield the requests for these calls, in an order in which each key's entries keep theirs."""
    lanes = _Lanes()
    lane_of_entries: list[int] = []
    for call in calls:
        lane_of_entries += lanes.of_entries(provider, call.operation)
    first = calls[0].operation
    entries = _entries_of_all(calls)
    if len(lanes.operations) == 1:  # all can share requests, in the order of the calls
        for start, end in provider.bounds(entries):
            yield _Request(
                first.with_entries(entries.part(start, end)),
                list(_spans_between(calls, start, end)),
            )
        return
    # Of each entry, its call and its index there.
    origins = [(call, place) for call in calls for place in range(len(call.operation))]
    for lane, places in group_preserving_key_order(lane_of_entries, entries.keys):
        of_lane = lanes.operations[lane]
        sent = _pick_entries(entries, places, of_lane.kind)
        for start, end in provider.bounds(sent):
            spans = _spans_of([origins[place] for place in places[start:end]])
            yield _Request(of_lane.with_entries(sent.part(start, end)), spans)


def _entries_of_all(calls: Sequence[_Call]) -> Entries[Any]:
    """Return the entries of these calls, one call after another."""
    if len(calls) == 1:
        return calls[0].operation.entries
    return _concatenate_entries([call.operation.entries for call in calls])


def _spans_of(origins: Sequence[tuple[_Call, int]]) -> list[_Span]:
    """Return the parts of a request by call, given the call of each entry, and its place there."""
    spans: list[_Span] = []
    at = 0
    for call, of_call in groupby(origins, key=lambda origin: origin[0]):
        places = [place for _, place in of_call]
        spans.append(_Span(call, at, places))
        at += len(places)
    return spans


def _spans_between(calls: Sequence[_Call], start: int, end: int) -> Iterator[_Span]:
    """Yield the spans of a request with the entries `start` to before `end`, numbered through
    all calls in order.
    """
    first = 0  # the number of the call's first entry
    for call in calls:
        after = first + len(call.operation)
        if first < end and after > start:
            places = range(max(start - first, 0), min(end, after) - first)
            yield _Span(call, max(first - start, 0), places)
        first = after


def can_share_request(one: Operation[Any], other: Operation[Any]) -> bool:
    """Whether the entries of both operations can be in one request."""
    return (
        one.kind is other.kind
        and one.contract is other.contract
        and one.key == other.key
        and one.conditions == other.conditions
        and one.rerun is other.rerun
        and are_same_args(one.args, other.args)
    )


def _has_deletes(operation: Operation[Any]) -> bool:
    """Whether some entries of an operation are puts of None, which delete."""
    return operation.kind is OperationKind.PUT and operation.entries.null_value() is not None


_OPTIONAL = ("values", "defaults", "marks", "newest")  # the columns of entries that may be None


def _concatenate_entries(parts: Sequence[Entries[Any]]) -> RowEntries[Any]:
    """Return the entries of all parts, in order."""
    columns = [_concatenate_column(parts, name) for name in _OPTIONAL]
    return RowEntries([key for part in parts for key in part.keys], *columns)


def _concatenate_column(parts: Sequence[Entries[Any]], name: str) -> list[Any] | None:
    """Return a column of all parts, None for entries of parts that lack it; None if all do."""
    columns = [getattr(part, name) for part in parts]
    if all(values is None for values in columns):
        return None
    whole: list[Any] = []
    for part, values in zip(parts, columns, strict=True):
        whole += [None] * len(part) if values is None else values
    return whole


def _pick_entries(
    entries: Entries[Any], places: Sequence[int], kind: OperationKind
) -> Entries[Any]:
    """Return the entries at `places` for an operation of this kind; those of a delete have no
    values.
    """
    picked = entries.take(places)
    values = picked.values
    if isinstance(picked, RowEntries):
        # A column may have values only of entries that were not picked.
        columns = []
        for name in _OPTIONAL:
            column = getattr(picked, name) or ()
            has_values = any(value is not None for value in column)
            columns.append(column if has_values else None)
        picked = RowEntries(picked.keys, *columns)
    if kind is OperationKind.DELETE:
        return RowEntries(picked.keys, None, None, picked.marks, picked.newest)
    if kind is OperationKind.PUT and picked.values is None:
        # All of them are puts of None, which delete: compact batches have such puts.
        return RowEntries(picked.keys, values, picked.defaults, picked.marks, picked.newest)
    return picked


class _Gathering:
    """Calls that wait to be sent together, in the order in which they were made."""

    __slots__ = ("calls", "count", "size", "tasks", "timer", "withdrawn")

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.count = 0  # of entries
        self.size = 0  # in bytes, if the provider limits them
        self.timer: asyncio.TimerHandle | None = None  # sends them after the provider's delay
        self.withdrawn: set[_Call] = set()  # those whose callers were cancelled
        self.tasks: list[asyncio.Task[None]] = []  # the requests under way, once they are sent

    def add(self, operation: Operation[Any], size: int) -> _Call:
        """Add an operation of `size` bytes."""
        call = _Call(operation)
        self.calls.append(call)
        self.count += operation.count
        self.size += size
        return call

    def has_room(self, provider: BatchProvider, count: int, size: int) -> bool:
        """Whether `count` more entries and `size` more bytes are within the provider's limits."""
        if self.count + count > provider.size:
            return False
        return provider.bytes is None or self.size + size <= provider.bytes

    def withdraw(self, call: _Call) -> None:
        """Note that the caller of `call` was cancelled: if not sent yet, its operation is dropped.

        Once all callers were cancelled, the requests under way are cancelled too.
        """
        self.withdrawn.add(call)
        if len(self.withdrawn) == len(self.calls):
            for task in self.tasks:
                task.cancel()


_KeyAndSource = tuple[Hashable, str]


class KeyLock:
    """Issues a ticket to each request, with which it waits for all earlier requests that share one
    of its keys.

    Tickets are issued without awaiting, so two can never wait for each other. For one event loop;
    not thread-safe.

    While only one ticket is open, its keys are not recorded, so that requests made one after the
    other cost nothing extra.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, Ticket] = {}  # the last open ticket of each key
        self._alone: Ticket | None = None  # the only open ticket, if its keys are not in `_last`
        self._open: set[Ticket] = set()
        # The problems of entries that were given up in batches that are sent again as a whole, by
        # another process or event loop; see `send_unblocked`.
        self.blocked: dict[_KeyAndSource, Problem] = {}

    def take(self, entries: Entries[Any]) -> Ticket:
        """Return a ticket for a request on these keys."""
        ticket = Ticket(self, entries)
        self._open.add(ticket)
        if len(self._open) == 1:
            self._alone = ticket
            return ticket
        last = self._last
        if self._alone is not None:  # no longer
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
        """Close a released ticket, and let those behind it proceed that wait for no other."""
        finished = [ticket]
        while finished:
            ticket = finished.pop()
            self._open.discard(ticket)
            self._forget(ticket)
            for other in ticket.behind:
                other.ahead -= 1
                if other.ahead:
                    continue
                if other.released:
                    finished.append(other)
                elif other.waiting is not None and not other.waiting.done():
                    other.waiting.set_result(None)

    def _forget(self, ticket: Ticket) -> None:
        """Forget a finished ticket as the last one of its keys."""
        if not self._open:
            self._last.clear()
            self._alone = None
        elif ticket is not self._alone:
            for key in ticket.keys:
                if self._last.get(key) is ticket:
                    del self._last[key]


class Ticket:
    """A request's place in the order of its keys. Always `release` it; doing so again has no
    effect.
    """

    __slots__ = ("_entries", "ahead", "behind", "blocked", "order", "released", "waiting")

    def __init__(self, order: KeyLock, entries: Entries[Any]) -> None:
        self.order = order
        self._entries = entries
        self.ahead = 0  # how many tickets it waits for
        self.behind: list[Ticket] = []
        self.released = False
        self.waiting: asyncio.Future[None] | None = None
        self.blocked: dict[_KeyAndSource, Problem] = {}

    @property
    def keys(self) -> Sequence[Hashable]:
        """The keys of the request."""
        return self._entries.keys

    def wait_for(self, others: set[Ticket]) -> None:
        """Make `acquire` wait until these other tickets are released."""
        self.ahead = len(others)
        for other in others:
            other.behind.append(self)

    async def acquire(self) -> None:
        """Return when all earlier requests on these keys are over."""
        if self.ahead:
            self.waiting = asyncio.get_running_loop().create_future()
            await self.waiting

    def release(self) -> None:
        """Let later requests proceed; if this one was cancelled while waiting, they still wait
        for earlier ones.
        """
        if not self.released:
            self.released = True
            if not self.ahead:
                self.order._finish(self)


async def send_unblocked(ticket: Ticket, operation: Operation[Any], below: Layer) -> Outcomes:
    """Send the entries of an operation that are not blocked; the others get `Problem.unsent`
    without being sent.

    After a marked entry is given up, requests that already wait must not apply later entries of its
    key and source: the store skips messages older than the last applied one, so the entry would be
    skipped, and lost, when its batch is sent again. Requests made after the caller got the error
    are sent, unless the batch is repeated as a whole (`Operation.rerun`), since its sender makes
    more requests before all are answered. Entries rejected for their content block nothing.

    The ticket must have been acquired.
    """
    if not operation.conditions.idempotent:
        return await below.send(operation)
    if operation.rerun:
        blocked = {**ticket.order.blocked, **ticket.blocked}
    else:
        blocked = ticket.blocked
    held: dict[int, Problem] = {}
    if blocked:
        for place, key_and_source in enumerate(_keys_and_sources(operation)):
            if key_and_source in blocked:
                held[place] = blocked[key_and_source].unsent
    outcomes = await send_without_problems(operation, held, below.send)
    if outcomes.problems and (ticket.behind or operation.rerun):
        _block_followers(ticket, operation, outcomes)
    return outcomes


def _block_followers(ticket: Ticket, operation: Operation[Any], outcomes: Outcomes) -> None:
    """Block the keys and sources of the entries that were given up.

    They are blocked in all requests that wait for this one, directly or behind others. In a rerun
    they are blocked in all later requests, too.
    """
    of_entries = _keys_and_sources(operation)
    given_up = {}
    for place, problem in outcomes.problems.items():
        if is_retryable(problem):
            given_up[of_entries[place]] = problem
    if operation.rerun:
        ticket.order.blocked.update(given_up)
    if not given_up:
        return
    seen = set[Ticket]()
    to_visit = list(ticket.behind)
    while to_visit:
        follower = to_visit.pop()
        if follower not in seen:
            seen.add(follower)
            follower.blocked.update(given_up)
            to_visit.extend(follower.behind)


def _keys_and_sources(operation: Operation[Any]) -> Sequence[_KeyAndSource]:
    """Return the key and the source of each entry's mark."""
    entries = operation.entries
    return [(key, mark.source) for key, mark in zip(entries.keys, entries.marks or (), strict=True)]


class _Batches:
    """What a `BatchLayer` does in one event loop: gathers calls, and sends requests in each
    key's order.
    """

    def __init__(self, below: Layer, provider: BatchProvider, in_flight: int) -> None:
        self._below = below
        self._provider = provider
        self._order = KeyLock()
        self._slots = asyncio.Semaphore(in_flight)
        self._gathering: _Gathering | None = None

    async def send(self, operation: Operation[Any]) -> Outcomes:
        """Return an operation's outcomes; a small one waits for others to share its request."""
        if not operation.count:
            return Outcomes(0)
        provider = self._provider
        size = 0
        if provider.bytes is not None:
            size = operation.entries.nbytes
        if not provider.can_gather(operation, size):
            self._end_gathering()
            return await self._send_alone(operation)
        gathering = self._gathering
        if gathering is not None and not gathering.has_room(provider, operation.count, size):
            self._end_gathering()
            gathering = None
        if gathering is None:
            gathering = self._begin_gathering()
            call = gathering.add(operation, size)
            if not provider.delay and await self._end_after_this_turn(gathering, call):
                return await self._send_alone(operation)
        else:
            call = gathering.add(operation, size)
            is_full = not gathering.has_room(provider, 1, 1)
            if is_full:
                self._end_gathering()
        try:
            return await call.answer
        except asyncio.CancelledError:
            gathering.withdraw(call)
            raise

    def _begin_gathering(self) -> _Gathering:
        """Begin to gather operations, for the provider's delay or this turn of the event loop."""
        self._gathering = gathering = _Gathering()
        delay = self._provider.delay
        if delay:
            loop = asyncio.get_running_loop()
            gathering.timer = loop.call_later(delay, self._end_gathering, gathering)
        return gathering

    async def _end_after_this_turn(self, gathering: _Gathering, call: _Call) -> bool:
        """Gather the operations of this turn of the event loop, then send them.

        But if `call` is the only one, return True and send nothing: the caller sends it without a
        task.
        """
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            gathering.withdraw(call)
            self._end_gathering(gathering)
            raise
        if self._gathering is gathering and len(gathering.calls) == 1:
            self._gathering = None
            return True
        self._end_gathering(gathering)
        return False

    async def flush(self) -> None:
        """Send the gathered operations; return when everything requested before is answered."""
        self._end_gathering()
        await self._order.wait_for_open()

    def _end_gathering(self, only: _Gathering | None = None) -> None:
        """Send the gathered calls (`only`: if they are still these), each request in a task of its
        own.

        So the cancellation of one caller does not cancel a request that others share.
        """
        gathering = self._gathering
        if gathering is None or (only is not None and gathering is not only):
            return
        self._gathering = None
        if gathering.timer is not None:
            gathering.timer.cancel()
        calls = [call for call in gathering.calls if call not in gathering.withdrawn]
        try:
            gathering.tasks = self._start(calls) if calls else []
        except Exception as error:  # noqa: BLE001 - the callers receive it; nothing was sent
            for call in calls:
                call.answer.set_exception(error)

    def _start(self, calls: Sequence[_Call]) -> list[asyncio.Task[None]]:
        """Send the requests for these calls, each in a task, in the order of their keys."""
        requests = list(_split_into_requests(self._provider, calls))
        for request in requests:
            for call in request.calls:
                call.left += 1
        tickets = [self._order.take(request.operation.entries) for request in requests]
        tasks = []
        for request, ticket in zip(requests, tickets, strict=True):
            task = asyncio.create_task(self._answer_calls(request, ticket))
            # In a callback, because a task that is cancelled before its first step runs none of its
            # own code.
            task.add_done_callback(partial(self._finish_request, request, ticket))
            tasks.append(task)
        return tasks

    async def _answer_calls(self, request: _Request, ticket: Ticket) -> None:
        """Send a request once it is its turn, and record its outcomes with the calls that share
        it.
        """
        await ticket.acquire()
        operation = request.operation
        calls = request.calls
        async with self._slots:
            try:
                outcomes = await send_unblocked(ticket, operation, self._below)
            except Exception as error:  # noqa: BLE001 - the callers receive it
                if len(calls) > 1 and not may_have_effect(operation, error):
                    await self._send_per_call(request)
                    return
                for call in calls:
                    call.fail(error)
                return
            has_parts = len(request.spans) > 1
            if has_parts and outcomes.problems and may_send_separately(operation, outcomes):
                await self._send_per_call(request)
                return
        for call, start, places in request.spans:
            call.record(places, outcomes, start)
        calls[0].defaults_put += outcomes.defaults_put  # the outcomes do not say of which entries

    async def _send_per_call(self, request: _Request) -> None:
        """Resend a rejected request caller by caller, so that one caller's bad entry does not
        affect the others.
        """
        for call, start, places in request.spans:
            entries = request.operation.entries.part(start, start + len(places))
            part = request.operation.with_entries(entries)
            try:
                outcomes = await self._below.send(part)
            except Exception as error:  # noqa: BLE001 - the caller receives it
                call.fail(error)
            else:
                call.record(places, outcomes, 0)
                call.defaults_put += outcomes.defaults_put

    def _finish_request(self, request: _Request, ticket: Ticket, task: asyncio.Task[None]) -> None:
        """Let later requests on its keys proceed, and complete the calls of which it was the last
        one.
        """
        ticket.release()
        for call in request.calls:
            if task.cancelled():
                call.answer.cancel()
            elif (error := task.exception()) is not None:
                call.fail(error)
            call.count_answer()

    async def _send_alone(self, operation: Operation[Any]) -> Outcomes:
        """Return the outcomes of an operation that shares no request with others."""
        if self._provider.is_one_request(operation):
            ticket = self._order.take(operation.entries)
            try:
                if ticket.ahead:
                    await ticket.acquire()
                await self._slots.acquire()
                try:
                    return await send_unblocked(ticket, operation, self._below)
                finally:
                    self._slots.release()
            finally:
                ticket.release()
        call = _Call(operation)  # of several requests
        tasks = self._start([call])
        try:
            return await call.answer
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise


@validated
class BatchLayer:
    """Combines small operations into few large requests, and splits operations that exceed a
    request's limits.

    - Operations on one key take effect in the order of the calls; requests that share no key may
      overtake each other.
    - At most `in_flight` requests are under way at a time in each event loop (a Spark task has
      one).
    - A cancelled caller's operation is withdrawn if it was not sent; a request that others share
      continues.
    - An entry's problem concerns only its caller.

    Each event loop has its own batches, since calls of different threads have no order. Compact
    batches ask `function`, which writes, for entries that it will reject, and count in `meter` what
    they save.
    """

    def __init__(
        self,
        below: Layer,
        *,
        batches: BatchProvider | None = None,
        in_flight: PositiveInt = 8,
        function: TableFunction | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._below = below
        self._provider = batches or BatchProvider()
        if self._provider.compact:
            self._below = CompactLayer(below, function, meter or Meter())
        self._batches = PerLoop(lambda: _Batches(self._below, self._provider, in_flight))

    async def send(self, operation: Operation[Any]) -> Outcomes:
        return await self._batches.here().send(
            as_put(operation) if self._provider.compact else operation
        )

    async def flush(self) -> None:
        """Send waiting operations, and return when everything requested so far is answered."""
        # So that tasks that were created, but have not run yet, make their calls first.
        await asyncio.sleep(0)
        await self._batches.here().flush()

    async def close(self) -> None:
        await self.flush()
        await self._below.close()

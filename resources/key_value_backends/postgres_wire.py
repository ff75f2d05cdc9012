"""Prepared statements over one PostgreSQL connection, without what the driver does around each of them.

The driver's cursors take as long in the client as the server takes for one key. Here a request is its bytes: parameters
and columns are binary, and nothing is looked up for their types.

A `LoopWire` waits in an event loop, a `ThreadWire` in the thread of whoever asks, where its coroutines never suspend.

A server nearby answers before the event loop has begun to watch its socket, which costs more than the answer. So where
the last answer came within NEAR seconds, the next is waited for as long without the loop.
"""

from __future__ import annotations

import asyncio
import os
import select
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.pq.abc import PGresult

R = TypeVar("R")
NEAR = 0.0003
_SELECTABLE = 1024  # sockets whose number is below can be waited for by themselves
_LAST_WORD = 1.0  # seconds that a server has for the end of a request that was given up
_PREPARED = 512  # statements that a connection keeps: about a dozen for each table that is in use
_EITHER = select.POLLIN | select.POLLOUT
_BYTEA = 17
_BINARY = [1] * 16
_NONE = struct.pack(">i", -1)
_length = struct.Struct(">i").pack


class UnreadAnswer:
    """The answer to a query that was sent over a wire, which nobody has waited for. Whoever uses the wire next reads it
    first: then `answer` is there, unless it was an error."""

    def __init__(self, wire: PostgresWire) -> None:
        self.wire = wire
        self.answer: PGresult | None = None


class PostgresWire(ABC):
    """Requests over one connection in autocommit mode, which is somebody's alone meanwhile.

    One that takes longer than `patience` seconds, or is cancelled, is given up with its connection. `may_stand` tells,
    after an error, whether what the last request changed may have been committed all the same.
    """

    def __init__(self, connection: AsyncConnection[Any] | Connection[Any], patience: float) -> None:
        self.may_stand = False
        self._pg, self._patience = connection.pgconn, patience
        self._names: dict[str, bytes] = {}
        self._rows = Transformer(connection)
        self._unread: UnreadAnswer | None = None

    @property
    def closed(self) -> bool:
        """Whether the connection is closed, or was lost."""
        return self._pg.status != ConnStatus.OK

    @abstractmethod
    async def close(self) -> None:
        """Close the connection, which ends what is open in it."""

    @abstractmethod
    async def _turn(self, writing: bool = False) -> None:
        """Wait until the server has sent something or, where we are `writing`, takes more; read what there is.

        Raises psycopg.OperationalError once `patience` is over.
        """

    @abstractmethod
    async def _cancel(self) -> None:
        """Ask the server to end what it is doing for us."""

    async def ask(self, statement: str, parameters: Sequence[bytes | None], *, commits: bool = False) -> PGresult:
        """Return the answer to a statement, prepared when it first comes. Raises psycopg.Error.

        `commits` says that it changes something, and that no transaction is open which it would belong to.
        """
        await self._send(statement, parameters, commits)
        return await self._answer()

    async def ask_ahead(self, statement: str, parameters: Sequence[bytes | None]) -> UnreadAnswer:
        """Send a query, prepared when it first comes, and return at once. Raises psycopg.Error.

        `read` its answer later. Until then the server may wait for somebody to take it, and hold what it reads: it
        should be small.
        """
        await self._send(statement, parameters, False)
        await self._flush()
        self._unread = UnreadAnswer(self)
        return self._unread

    async def read(self, unread: UnreadAnswer) -> PGresult | None:
        """Return the answer to what was asked ahead over this wire; None where it has to be asked again."""
        if self._unread is unread:
            await self._read_unread()
        return unread.answer

    async def tell(self, command: bytes, *, commits: bool = False) -> None:
        """Send a command that has no parameters and no rows, such as BEGIN. Raises psycopg.Error."""
        self.may_stand = False
        if self._unread is not None:
            await self._read_unread()
        self.may_stand = commits
        self._pg.send_query(command)
        await self._answer()

    async def undo(self) -> None:
        """End an open transaction without effect; where that does not work the connection is closed, which ends it."""
        with suppress(psycopg.Error):
            if not self.closed:
                await self.tell(b"ROLLBACK")
                return
        await self.close()

    def rows(self, answer: PGresult, make: Callable[[Sequence[Any]], R]) -> list[R]:
        """Return the rows of an answer, each made of its columns by `make`."""
        self._rows.set_pgresult(answer, set_loaders=True)
        return self._rows.load_rows(0, answer.ntuples, make)

    async def _send(self, statement: str, parameters: Sequence[bytes | None], commits: bool) -> None:
        self.may_stand = False
        if self._unread is not None:
            await self._read_unread()
        name = self._names.get(statement)
        if name is None:
            name = await self._prepare(statement)
        self.may_stand = commits
        self._pg.send_query_prepared(name, parameters, _BINARY[: len(parameters)], 1)

    async def _read_unread(self) -> None:
        """Read what was asked ahead. An error is met again by whoever asks again; one that closed the connection, by
        the next request over it, which is not sent."""
        unread, self._unread = self._unread, None
        if unread is not None:
            with suppress(psycopg.Error):
                unread.answer = await self._answer()

    async def _prepare(self, statement: str) -> bytes:
        if len(self._names) >= _PREPARED:
            await self.tell(b"DEALLOCATE ALL")
            self._names.clear()
        name = b"adjunct_%d" % len(self._names)
        self._pg.send_prepare(name, statement.encode())
        await self._answer()
        self._names[statement] = name
        return name

    async def _flush(self) -> None:
        try:
            while self._pg.flush():
                await self._turn(writing=True)
        except BaseException:  # also where the caller is cancelled: it may be in the middle of anything
            await self._give_up()
            raise

    async def _answer(self) -> PGresult:
        pg, last = self._pg, None
        error: PGresult | None = None
        await self._flush()
        try:
            while True:
                while pg.is_busy():
                    await self._turn()
                answer = pg.get_result()
                if answer is None:
                    break
                last = answer
                if answer.status == ExecStatus.FATAL_ERROR:
                    error = error or answer
        except BaseException:
            await self._give_up()
            raise
        if error is not None:
            raise error_from_result(error)
        assert last is not None
        return last

    async def _give_up(self) -> None:
        with suppress(psycopg.Error):
            await self._cancel()  # so that it holds no locks any longer
        await self.close()

    def _late(self) -> psycopg.OperationalError:
        return psycopg.OperationalError(f"no answer within {self._patience:g} s")


class WirePool(Protocol):
    """Lends connections: each is the caller's alone until it is given back."""

    async def take(self) -> PostgresWire: ...

    async def take_again(self, wire: Any, /) -> bool: ...

    async def give(self, wire: Any, /) -> None: ...

    async def close(self) -> None: ...


class LoopWire(PostgresWire):
    """Requests that wait in the running event loop."""

    def __init__(self, connection: AsyncConnection[Any], patience: float) -> None:
        super().__init__(connection, patience)
        self.connection = connection
        self._near = True

    async def close(self) -> None:
        await self.connection.close()

    async def _turn(self, writing: bool = False) -> None:
        if self._near and not writing and self._came_at_once():
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        ready: asyncio.Future[bool] = loop.create_future()
        socket = self._pg.socket
        loop.add_reader(socket, _set, ready, True)
        if writing:
            loop.add_writer(socket, _set, ready, True)
        timer = loop.call_later(self._patience, _set, ready, False)
        try:
            in_time = await ready
        finally:
            timer.cancel()
            loop.remove_reader(socket)
            if writing:
                loop.remove_writer(socket)
        if not in_time:
            raise self._late()
        self._near = loop.time() - began < NEAR
        self._pg.consume_input()

    def _came_at_once(self) -> bool:
        socket = self._pg.socket
        self._near = socket < _SELECTABLE and bool(select.select((socket,), (), (), NEAR)[0])
        if self._near:
            self._pg.consume_input()
        return self._near

    async def _cancel(self) -> None:
        await self.connection.cancel_safe(timeout=_LAST_WORD)


class ThreadWire(PostgresWire):
    """Requests that wait in the thread of whoever asks."""

    def __init__(self, connection: Connection[Any], patience: float) -> None:
        super().__init__(connection, patience)
        self.connection = connection
        self._poll = select.poll()

    async def close(self) -> None:
        self.connection.close()

    async def _turn(self, writing: bool = False) -> None:
        # Each time, as the socket of a connection is not its own any more once it is closed.
        self._poll.register(self._pg.socket, _EITHER if writing else select.POLLIN)
        if not self._poll.poll(self._patience * 1000):
            raise self._late()
        self._pg.consume_input()

    async def _cancel(self) -> None:
        self.connection.cancel_safe(timeout=_LAST_WORD)


def _set(ready: asyncio.Future[bool], in_time: bool) -> None:
    if not ready.done():
        ready.set_result(in_time)


def encode_bytea_array(values: Sequence[bytes | None], before: bytes = b"") -> bytes:
    """Return an array of bytea in the server's binary form, each with the same bytes `before` it; None is null."""
    if not values:
        return struct.pack(">iii", 0, 1, _BYTEA)
    # Each is its length and its bytes: one list of both by turns, without a loop.
    parts = [b""] * (2 * len(values))
    if None in values:
        parts[::2] = [_NONE if value is None else _length(len(before) + len(value)) + before for value in values]
        parts[1::2] = [value or b"" for value in values]
    else:
        sizes = list(map(len, values))  # type: ignore[arg-type]
        heads = {size: _length(len(before) + size) + before for size in set(sizes)}
        parts[::2] = map(heads.__getitem__, sizes)
        parts[1::2] = values  # type: ignore[assignment]
    return struct.pack(">iiiii", 1, 1, _BYTEA, len(values), 1) + b"".join(parts)


def encode_int4(value: int) -> bytes:
    """Return an integer of four bytes in the server's binary form."""
    return _length(value)


class ThreadWires:
    """At most `size` connections, each made by `connect` when there is no idle one; a thread waits while all are lent.

    A child of the process has none of its parent's, and leaves them as they are.
    """

    def __init__(self, size: int, connect: Callable[[], ThreadWire]) -> None:
        self._size, self._connect = size, connect
        self._places = threading.BoundedSemaphore(size)
        self._idle: list[ThreadWire] = []
        _all.add(self)

    def __del__(self) -> None:
        for wire in self._idle:
            wire.connection.pgconn.finish()

    async def take(self) -> ThreadWire:
        """A connection that is the caller's alone, until it is given back."""
        self._places.acquire()
        try:
            return self._taken() or self._connect()
        except BaseException:
            self._places.release()
            raise

    async def take_again(self, wire: ThreadWire) -> bool:
        """Take a connection that was given back, if nobody else has it now; tell whether that is so."""
        if not self._places.acquire(blocking=False):
            return False
        try:
            self._idle.remove(wire)
        except ValueError:
            self._places.release()
            return False
        return True

    async def give(self, wire: ThreadWire) -> None:
        """Take a connection back, outside of any transaction, or closed: then the others may be lost, too."""
        try:
            if wire.closed:
                await self.close()
            else:
                self._idle.append(wire)
        finally:
            self._places.release()

    async def close(self) -> None:
        """Close the connections that are not in use."""
        while (wire := self._taken()) is not None:
            await wire.close()

    def _taken(self) -> ThreadWire | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _forget(self) -> None:
        _of_parents.extend(self._idle)
        self._places, self._idle = threading.BoundedSemaphore(self._size), []


_all: WeakSet[ThreadWires] = WeakSet()
_of_parents: list[ThreadWire] = []  # kept, as one that goes tells the server that it does


def _forget_all() -> None:
    for wires in list(_all):
        wires._forget()


os.register_at_fork(after_in_child=_forget_all)

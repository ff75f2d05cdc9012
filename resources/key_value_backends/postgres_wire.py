"""Prepared statements over one PostgreSQL connection, without the overhead of the driver's cursors.

For one key, the driver's cursors take as long in the client as the server does. Here parameters and
columns are binary, and no types are looked up.

A nearby server answers before the event loop has started to watch its socket, which costs more than
the answer. So if the last answer came within NEAR seconds, the thread first waits up to NEAR
seconds for the next one, and only then uses the event loop.
"""

from __future__ import annotations

import asyncio
import os
import select
import struct
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.pq.abc import PGresult

from dagster_adjunct.resources.key_value.segment import is_blocking

R = TypeVar("R")
NEAR = 0.0003
_SELECTABLE = 1024  # select() accepts sockets with smaller file descriptors only
_LAST_WORD = 1.0  # seconds in which the server may end a request that was given up
_PREPARED = 512  # statements that a connection keeps: about a dozen for each table that is in use
_EITHER = select.POLLIN | select.POLLOUT
_BYTEA = 17  # the OID of the type
_BINARY = [1] * 16  # the format of each parameter
_NONE = struct.pack(">i", -1)  # the length of a null
_length = struct.Struct(">i").pack


class UnreadAnswer:
    """The answer to a query that was sent ahead.

    Whoever uses the wire next reads it first. Until then, and if the query failed, `answer` is
    None.
    """

    def __init__(self, wire: PostgresWire) -> None:
        self.wire = wire
        self.answer: PGresult | None = None


class PostgresWire:
    """Sends requests over one connection in autocommit mode, for one user at a time.

    They wait in the running event loop if the connection is asynchronous, or else in the calling
    thread. If one takes longer than `patience` seconds, or is cancelled, the connection is closed.
    After an error, `may_be_applied` says whether the changes of the last request may have been
    committed.
    """

    def __init__(self, connection: AsyncConnection[Any] | Connection[Any], patience: float) -> None:
        self.may_be_applied = False
        self._connection = connection
        self._pg = connection.pgconn
        self._patience = patience
        self._names: dict[str, bytes] = {}  # of prepared statements, by their text
        self._rows = Transformer(connection)
        self._unread: UnreadAnswer | None = None
        self._in_loop = isinstance(connection, AsyncConnection)
        self._near = True  # whether the last answer arrived within NEAR seconds
        self._poll = select.poll()

    @property
    def closed(self) -> bool:
        """Whether the connection is closed, or was lost."""
        return self._pg.status != ConnStatus.OK

    def close(self) -> None:
        """Close the connection, which ends an open transaction."""
        self._pg.finish()

    async def ask(
        self, statement: str, parameters: Sequence[bytes | None], *, commits: bool = False
    ) -> PGresult:
        """Return the answer to a statement, which is prepared on first use. Raises psycopg.Error.

        `commits` says that it is a transaction of its own that changes something.
        """
        await self._send(statement, parameters, commits)
        return await self._answer()

    async def ask_ahead(self, statement: str, parameters: Sequence[bytes | None]) -> UnreadAnswer:
        """Send a query, which is prepared on first use, and return at once. Raises psycopg.Error.

        `read` its answer later. The answer should be small: the server may have to wait, with its
        locks, until it is read.
        """
        await self._send(statement, parameters, False)
        await self._flush()
        self._unread = UnreadAnswer(self)
        return self._unread

    async def read(self, unread: UnreadAnswer) -> PGresult | None:
        """Return the answer to a query sent ahead, None if it has to be sent again."""
        if self._unread is unread:
            await self._read_unread()
        return unread.answer

    async def tell(self, command: bytes, *, commits: bool = False) -> None:
        """Send a command without parameters and rows, such as BEGIN. Raises psycopg.Error.

        `commits` says that it commits changes.
        """
        await self._read_unread()
        self.may_be_applied = commits
        self._pg.send_query(command)
        await self._answer()

    async def rollback(self) -> None:
        """Roll back the open transaction; if that fails, close the connection, which ends the
        transaction, too.
        """
        with suppress(psycopg.Error):
            if not self.closed:
                await self.tell(b"ROLLBACK")
                return
        self.close()

    def rows(self, answer: PGresult, make: Callable[[Sequence[Any]], R]) -> list[R]:
        """Return the rows of an answer, each made from its columns by `make`."""
        self._rows.set_pgresult(answer, set_loaders=True)
        return self._rows.load_rows(0, answer.ntuples, make)

    async def _send(
        self, statement: str, parameters: Sequence[bytes | None], commits: bool
    ) -> None:
        """Send a statement, once the answer to a query sent ahead is read and the statement
        prepared.
        """
        self.may_be_applied = False
        if self._unread is not None:
            await self._read_unread()
        name = self._names.get(statement)
        if name is None:
            name = await self._prepare(statement)
        self.may_be_applied = commits
        self._pg.send_query_prepared(name, parameters, _BINARY[: len(parameters)], 1)

    async def _read_unread(self) -> None:
        """Read the answer to a query sent ahead. Its errors are dropped, because the query is
        sent again.
        """
        self.may_be_applied = False
        unread = self._unread
        self._unread = None
        if unread is not None:
            with suppress(psycopg.Error):
                unread.answer = await self._answer()

    async def _prepare(self, statement: str) -> bytes:
        """Prepare a statement, and return its name; if there are too many, all earlier ones are
        dropped.
        """
        if len(self._names) >= _PREPARED:
            await self.tell(b"DEALLOCATE ALL")
            self._names.clear()
        name = b"adjunct_%d" % len(self._names)
        self._pg.send_prepare(name, statement.encode())
        await self._answer()
        self._names[statement] = name
        return name

    async def _flush(self) -> None:
        """Wait until everything was sent; close the connection if that fails."""
        try:
            while self._pg.flush():
                await self._wait_and_read(writing=True)
        except BaseException:
            # Also where the caller is cancelled: it may be in the middle of anything.
            await self._give_up()
            raise

    async def _answer(self) -> PGresult:
        """Return the last answer to what was sent; raise the first error among the answers."""
        pg = self._pg
        last = None
        error: PGresult | None = None
        await self._flush()
        try:
            while True:
                while pg.is_busy():
                    await self._wait_and_read()
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
        """Cancel the request under way, and close the connection."""
        try:
            with suppress(psycopg.Error):
                # Cancel the request, so that the server does not hold its locks any longer.
                cancelling: Awaitable[None] | None = self._connection.cancel_safe(
                    timeout=_LAST_WORD
                )
                if cancelling is not None:  # the connection is asynchronous
                    await cancelling
        finally:
            self.close()

    async def _wait_and_read(self, writing: bool = False) -> None:
        """Wait until the server has sent something or, if `writing`, can receive more; read what it
        has sent.

        Raises psycopg.OperationalError after `patience` seconds.
        """
        if self._in_loop:
            is_there = not writing and self._comes_at_once()
            in_time = is_there or await self._watch(writing)
        else:
            # Register it each time: the number of a closed connection's socket may be reused.
            self._poll.register(self._pg.socket, _EITHER if writing else select.POLLIN)
            in_time = bool(self._poll.poll(self._patience * 1000))
        if not in_time:
            raise psycopg.OperationalError(f"no answer within {self._patience:g} s")
        self._pg.consume_input()

    def _comes_at_once(self) -> bool:
        """Whether the answer arrives within NEAR seconds, for which the thread waits if the last
        one did.
        """
        if self._near:
            socket = self._pg.socket
            self._near = socket < _SELECTABLE and bool(select.select((socket,), (), (), NEAR)[0])
        return self._near

    async def _watch(self, writing: bool) -> bool:
        """Wait in the event loop until the socket can be read or, if `writing`, written; return
        False if that takes more than `patience` seconds.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        ready: asyncio.Future[bool] = loop.create_future()
        socket = self._pg.socket
        loop.add_reader(socket, _complete, ready, True)
        if writing:
            loop.add_writer(socket, _complete, ready, True)
        timer = loop.call_later(self._patience, _complete, ready, False)
        try:
            in_time = await ready
        finally:
            timer.cancel()
            loop.remove_reader(socket)
            if writing:
                loop.remove_writer(socket)
        if in_time:
            self._near = loop.time() - began < NEAR
        return in_time


def _complete(ready: asyncio.Future[bool], in_time: bool) -> None:
    """Complete a future, unless it is already done."""
    if not ready.done():
        ready.set_result(in_time)


def encode_bytea_array(values: Sequence[bytes | None], before: bytes = b"") -> bytes:
    """Return an array of bytea in binary format; `before` is prepended to each value, and None
    is null.
    """
    if not values:
        return struct.pack(">iii", 0, 1, _BYTEA)
    # Lengths and values alternate in one list, which slices fill faster than a loop.
    parts = [b""] * (2 * len(values))
    if None in values:
        parts[::2] = [
            _NONE if value is None else _length(len(before) + len(value)) + before
            for value in values
        ]
        parts[1::2] = [value or b"" for value in values]
    else:
        sizes = list(map(len, values))  # type: ignore[arg-type]
        heads = {size: _length(len(before) + size) + before for size in set(sizes)}
        parts[::2] = map(heads.__getitem__, sizes)
        parts[1::2] = values  # type: ignore[assignment]
    return struct.pack(">iiiii", 1, 1, _BYTEA, len(values), 1) + b"".join(parts)


class WirePool:
    """At most `size` connections of one event loop, or of the threads without one. `connect` makes
    one if none is idle.

    A caller waits while all are in use.
    """

    def __init__(self, size: int, connect: Callable[[], Awaitable[PostgresWire]]) -> None:
        self._size = size
        self._connect = connect
        self._process = os.getpid()
        self._in_loop = not is_blocking()
        self._slots: asyncio.Semaphore | threading.Semaphore
        if self._in_loop:
            self._slots = asyncio.Semaphore(size)
        else:
            self._slots = threading.BoundedSemaphore(size)
        self._closing: AbstractAsyncContextManager[Any] = (
            asyncio.Lock() if self._in_loop else nullcontext()
        )
        self._idle: list[PostgresWire] = []

    def __del__(self) -> None:
        if self._process == os.getpid():
            # A forked child does not close the connections of its parent.
            self.drop()

    async def take(self) -> PostgresWire:
        """Return a connection for the caller alone, until it is given back."""
        await self._enter()
        try:
            return self._pop() or await self._connect()
        except BaseException:
            self._slots.release()
            raise

    async def take_again(self, wire: PostgresWire) -> bool:
        """Take this connection, which was given back, unless another caller has it; return
        whether it was taken.
        """
        if not await self._enter(wait=False):
            return False
        try:
            self._idle.remove(wire)
        except ValueError:
            self._slots.release()
            return False
        return True

    def give(self, wire: PostgresWire) -> None:
        """Take back a connection, which has no open transaction.

        If it is closed, close the idle ones, too: the server may be lost.
        """
        try:
            if wire.closed:
                self.drop()
            else:
                self._idle.append(wire)
        finally:
            self._slots.release()

    async def close(self) -> None:
        """Close all connections of an event loop, each once its request has ended.

        Of threads, only idle connections are closed.
        """
        held = 0
        async with self._closing:
            # Else two concurrent calls might each hold slots that the other waits for.
            try:
                while self._in_loop and held < self._size:
                    held += await self._enter()
                self.drop()
            finally:
                for _ in range(held):
                    self._slots.release()

    def drop(self) -> None:
        """Close the connections that are not in use."""
        while (wire := self._pop()) is not None:
            wire.close()

    async def _enter(self, *, wait: bool = True) -> bool:
        """Take one of the slots for connections; without `wait`, return False if there is none."""
        slots = self._slots
        if isinstance(slots, threading.Semaphore):
            return slots.acquire(wait)
        if not wait and slots.locked():
            return False
        return await slots.acquire()

    def _pop(self) -> PostgresWire | None:
        """Return an idle connection, None if there is none."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

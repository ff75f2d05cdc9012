"""The connections that one event loop has to a PostgreSQL server, for tables and for key-value tables.

A pool of its own, because a library's tells whoever waits only that no connection came in time: here the error of a
login, of a table that is not there or of a server that is down reaches the request that met it, at once.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from psycopg import AsyncConnection

T = TypeVar("T")
_LAST_WORD = 1.0  # seconds that a server has for the end of a request that was given up


class OverConnection(Protocol):
    """What sends requests over one connection."""

    connection: AsyncConnection[Any]


R = TypeVar("R", bound=OverConnection)


class Pool(Generic[R]):
    """At most `size` connections, each made by `connect` when there is no idle one."""

    def __init__(self, size: int, connect: Callable[[], Awaitable[R]]) -> None:
        self._size, self._connect = size, connect
        self._places = asyncio.Semaphore(size)
        self._closing = asyncio.Lock()
        self._idle: list[R] = []
        self.met = False  # whether a connection has been made since the last one was lost

    @asynccontextmanager
    async def one(self) -> AsyncIterator[R]:
        """A connection that is the caller's alone."""
        requests = await self.take()
        try:
            yield requests
        except asyncio.CancelledError:  # it may be in the middle of anything
            await requests.connection.close()
            raise
        finally:
            await self.give(requests)

    async def take(self) -> R:
        """A connection that is the caller's alone, until it is given back."""
        await self._places.acquire()
        try:
            requests = self._idle.pop() if self._idle else await self._connect()
        except BaseException:
            self._places.release()
            raise
        self.met = True
        return requests

    async def take_again(self, requests: R) -> bool:
        """Take a connection that was given back, if nobody else has it now; tell whether that is so."""
        if requests not in self._idle or self._places.locked():
            return False
        await self._places.acquire()  # which does not wait
        self._idle.remove(requests)
        return True

    async def give(self, requests: R) -> None:
        """Take a connection back, outside of any transaction, or closed."""
        try:
            if requests.connection.closed or requests.connection.broken:
                await self._drop()
                self.met = False
            else:
                self._idle.append(requests)
        finally:
            self._places.release()

    async def close(self) -> None:
        """Close all connections, after the requests that use them."""
        async with self._closing:  # two at once would each hold places that the other waits for
            for _ in range(self._size):
                await self._places.acquire()
            try:
                await self._drop()
            finally:
                for _ in range(self._size):
                    self._places.release()

    def finish(self) -> None:
        """Close the connections of an event loop that is gone, and can't be waited for."""
        while self._idle:
            self._idle.pop().connection.pgconn.finish()

    async def _drop(self) -> None:
        while self._idle:
            await self._idle.pop().connection.close()


async def given_up(requests: OverConnection, request: Awaitable[T]) -> T:
    """The answer of a request over this connection; a caller who is cancelled is free after a second.

    The driver would wait for the server's word on it, which a dead network never brings.
    """
    import psycopg

    under_way = asyncio.ensure_future(request)
    try:
        return await asyncio.shield(under_way)
    except asyncio.CancelledError:
        with suppress(psycopg.Error):
            await requests.connection.cancel_safe(timeout=_LAST_WORD)  # so that it holds no locks any longer
        with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(requests.connection.fileno())) as wire:
            wire.shutdown(socket.SHUT_RDWR)
        await asyncio.wait([under_way], timeout=_LAST_WORD)
        raise

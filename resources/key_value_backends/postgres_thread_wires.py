"""The connections to a PostgreSQL server that the threads of a process lend and give back, without an event loop."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from weakref import WeakSet

from dagster_adjunct.resources.key_value_backends.postgres_wire import ThreadWire


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

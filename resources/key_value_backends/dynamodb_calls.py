"""Calls of boto3's blocking client, from any event loop or from any thread, and what its errors mean to a table."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_adjunct.resources.backends.dynamodb_connection import Connection, code_of, problem_of
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.key_value.repeating import Pause, drive, pause_by_hand, pause_in_loop
from dagster_adjunct.resources.key_value.table_segment import ReplyLostError, TableId
from dagster_adjunct.resources.key_value_errors import KeyValueTableNotFoundError
from dagster_adjunct.resources.tables.outcomes import State
from dagster_adjunct.resources.tables.per_loop import PerLoop

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.3


class Clients:
    """Makes clients, which have a session in common."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._making = threading.Lock()

    def new(self, label: str, threads: int) -> DynamoDBClient:
        """Return a client for so many threads, whose user closes it."""
        with self._making:
            self._connection = self._connection.with_session(label)
            return self._connection.client(label, threads)


class TableCalls(ABC):
    """Calls for all segments of one table in this process. `pause` waits."""

    pause: Pause

    def __init__(self, table: TableId) -> None:
        self.table = table
        self.label = label_of(table)

    @abstractmethod
    async def call(self, do: Callable[[DynamoDBClient], T]) -> T:
        """Return what `do` returns, called with a client. Errors are boto3's: `meaning` reads them."""

    @abstractmethod
    async def together(self, asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Return what each returns, in their order; they are under way at the same time."""

    @abstractmethod
    async def close(self) -> None:
        """Give back what is open; the next call opens it again."""

    async def read(self, do: Callable[[DynamoDBClient], T]) -> T:
        """Call what changes nothing that anybody sees, or changes it to the same again: it may always be repeated."""
        try:
            return await self.call(do)
        except AdjunctError:
            raise
        except Exception as error:
            raise self.meaning(error, sent=False) from error

    def meaning(self, error: Exception, *, sent: bool) -> Exception:
        """Return the error to raise: `sent` says that the request may have had an effect, if no answer came."""
        return meaning_of(error, self.table, sent=sent)


class LoopCalls(TableCalls):
    """Calls from event loops: each of them has a client, and threads that wait."""

    pause = staticmethod(pause_in_loop)

    def __init__(self, table: TableId, clients: Clients, threads: int) -> None:
        super().__init__(table)
        self._open: PerLoop[_ClientThreads] = PerLoop(
            partial(_ClientThreads, clients, self.label, threads), _ClientThreads.end
        )

    async def call(self, do: Callable[[DynamoDBClient], T]) -> T:
        mine = self._open.here()
        return await asyncio.get_running_loop().run_in_executor(mine.threads, mine.run, do)

    async def together(self, asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        return await asyncio.gather(*asked)

    async def close(self) -> None:
        """Close the running event loop's client, once its requests have ended."""
        mine = self._open.take()
        if mine is not None:
            await asyncio.to_thread(mine.end, wait=True)


class ThreadCalls(TableCalls):
    """Calls that wait in the thread of whoever asks, and never suspend: all threads of a process share a client."""

    pause = staticmethod(pause_by_hand)

    def __init__(self, table: TableId, clients: Clients, threads: int) -> None:
        super().__init__(table)
        self._new = partial(_ClientThreads, clients, self.label, threads)
        # And the process that opened it: a child leaves its parent's alone.
        self._mine: tuple[int, _ClientThreads] | None = None
        self._opening = threading.Lock()

    async def call(self, do: Callable[[DynamoDBClient], T]) -> T:
        mine = self._here()
        with mine.places:
            return mine.run(do)

    async def together(self, asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        requests = list(asked)
        return [await requests[0]] if len(requests) == 1 else list(self._here().threads.map(drive, requests))

    async def close(self) -> None:
        """Close the client, once the requests that several threads make for one caller have ended."""
        with self._opening:
            mine, self._mine = self._mine, None
        if mine is not None and mine[0] == os.getpid():
            mine[1].end(wait=True)

    def _here(self) -> _ClientThreads:
        mine = self._mine
        if mine is None or mine[0] != os.getpid():
            with self._opening:
                if self._mine is None or self._mine[0] != os.getpid():
                    self._mine = os.getpid(), self._new()
                mine = self._mine
        return mine[1]


def meaning_of(error: Exception, table: TableId, *, sent: bool) -> Exception:
    """Return what an error of boto3 means to whoever asked for a key-value table."""
    if code_of(error) == "ResourceNotFoundException":
        return KeyValueTableNotFoundError(
            f"{label_of(table)} is not there: it was deleted, or the backend looks into another region or account.",
            "Open it again; if it should be there, look at the backend's region and credentials.",
            scope=table.scope,
            table=table.name,
        )
    problem = problem_of(error, label_of(table), sent=sent)
    assert isinstance(problem.error, AdjunctError)
    if sent and problem.state is State.UNKNOWN:
        return ReplyLostError(problem.error.problem, problem.error.next_step)
    return problem.error


def label_of(table: TableId) -> str:
    return f"key-value table {table.scope}/{table.name} in DynamoDB"


def pause_before(turn: int) -> float:
    """Return the seconds to wait before a request is sent again, for the `turn`th time, from 1."""
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * float(2 ** min(turn, 10))) * random.random()


class Patience:
    """Seconds in which something is tried again, with growing pauses, from the end of its first try on."""

    def __init__(self, seconds: float, pause: Pause) -> None:
        self._seconds = seconds
        self._until: float | None = None
        self._pause = pause
        self._turn = 0

    async def wait(self) -> bool:
        """Pause before the next try; False says, at once, that the time is over."""
        now = time.monotonic()
        if self._until is None:  # the first try may have had to connect, and to list families
            self._until = now + self._seconds
        if now >= self._until:
            return False
        self._turn += 1
        await self._pause(pause_before(self._turn))
        return True


class _ClientThreads:
    """What one event loop has open, or a process without one."""

    def __init__(self, clients: Clients, label: str, threads: int) -> None:
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix="dynamodb-key-values")
        self.places = threading.BoundedSemaphore(threads)
        self._connect = partial(clients.new, label, threads)
        self._opening = threading.Lock()
        self._client: DynamoDBClient | None = None

    def run(self, do: Callable[[DynamoDBClient], T]) -> T:
        client = self._client
        if client is None:
            with self._opening:
                client = self._client = self._client or self._connect()
        return do(client)

    def end(self, *, wait: bool = False) -> None:
        self.threads.shutdown(wait=wait)
        client, self._client = self._client, None
        if client is not None:
            client.close()

"""`SqlTable`: what SQLite's and PostgreSQL's tables share: connection pools, and outcomes of
failed requests.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from dagster_adjunct.resources.errors import AdjunctError, RunLeaseLostError, TableNotFoundError
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.table_backends import store, write_plan
from dagster_adjunct.resources.table_backends.store import StoreTable
from dagster_adjunct.resources.table_backends.write_plan import (
    BisectRejected,
    RejectedKeysError,
    Row,
    RowCodec,
    ValidEntries,
)
from dagster_adjunct.resources.tables.functions import TableUse
from dagster_adjunct.resources.tables.operation import Operation, OperationKind, Outcomes, Problem
from dagster_adjunct.resources.tables.presence import NO_TABLE, Presence
from dagster_adjunct.resources.threads import PerLoop


class SqlRequests(Protocol):
    """A connection, for one caller at a time, with the requests that can be sent over it (through
    `SqlTable._run`).

    If a write fails and `may_have_committed` is set, its outcome is unknown. An `outdated`
    connection is replaced before a request.
    """

    codec: RowCodec
    may_have_committed: bool
    has_idempotency_table: bool

    @property
    def outdated(self) -> bool:
        """Whether writes over this connection would be lost, because the table was replaced."""

    @property
    def closed(self) -> bool:
        """Whether requests can no longer be sent over this connection."""

    def get(self, keys: Sequence[Row]) -> Any:
        """The record of each key, None for missing ones, an error for those that can't be read."""

    def write(self, operation: Operation[Any], valid: ValidEntries) -> Any:
        """Write the valid entries in one transaction; return the `WritePlan`. After an error
        nothing was written.

        Raises RejectedKeysError for records that are not stored as they were sent, or can't be
        read.
        """

    def forget(self, older_than: float, most: int = ...) -> Any:
        """Purge what was last applied to keys more than `older_than` seconds ago, for at most
        `most` keys.

        Returns the number of keys.
        """

    def check(self, use: TableUse) -> Any:
        """Raise if requests for this use would be rejected: for a missing right, or as
        read-only.
        """

    def inspect(self) -> Any:
        """The `Presence` of the table."""

    def begin_run(self, fence: Fence | None) -> Any:
        """Count a run in the table's book-keeping, after creating that if the table is declared
        with `create`.

        If its writes are fenced, also store its epoch, or raise RunLeaseLostError.
        """

    def open_idempotency_table(self, *, create: bool) -> Any:
        """Check the idempotency table, after creating it if `create`.

        TableAccessError if it is missing or has other columns.
        """

    async def close(self) -> None: ...

    def finish(self) -> Any:
        """Close the connection without waiting, after its event loop was closed."""


R = TypeVar("R", bound=SqlRequests)


class Pool(Generic[R]):
    """A pool of at most `size` connections. `connect` makes one if none is idle; its argument says
    whether it creates a missing table.

    If `connect` fails, because the login is rejected, the table is missing or the server is down,
    the request that needs the connection gets the error at once. A library's pool would report only
    a timeout.
    """

    def __init__(self, size: int, connect: Callable[[bool], Awaitable[R]]) -> None:
        self._size = size
        self._connect = connect
        self._slots = asyncio.Semaphore(size)
        self._closing = asyncio.Lock()
        self._idle: list[R] = []
        self.is_connected = False  # whether a connection was made since the last one was lost

    @asynccontextmanager
    async def connection(self, *, create: bool = False) -> AsyncIterator[R]:
        """Lend a connection for a `with` block. The block must end all its transactions, or close
        the connection.

        `create`: if the pool has to connect, a missing table is created. An outdated connection is
        replaced, which never creates the table.
        """
        async with self._slots:
            requests = self._idle.pop() if self._idle else await self._connect(create)
            if requests.outdated:
                await requests.close()
                requests = await self._connect(False)  # a table that is gone now was removed
            self.is_connected = True
            try:
                yield requests
            finally:
                if requests.closed:
                    await self._drop()  # the server may be lost, or the table another one
                    self.is_connected = False
                else:
                    self._idle.append(requests)

    async def close(self) -> None:
        """Close all connections after their requests."""
        # One call at a time: two could each hold slots that the other needs.
        async with self._closing, AsyncExitStack() as slots:
            for _ in range(self._size):
                await slots.enter_async_context(self._slots)
            await self._drop()

    def finish(self) -> None:
        """Close the idle connections without waiting, after the event loop was closed."""
        while self._idle:
            self._idle.pop().finish()

    async def _drop(self) -> None:
        """Close the idle connections."""
        while self._idle:
            await self._idle.pop().close()


class SqlTable(StoreTable, Generic[R]):
    """A table of a database, with a pool of connections per event loop.

    Threads may share it, each with a `BlockingTable` of its own. What `newest_by` and `idempotent`
    need is stored in the table `<table>__adjunct`; `forget` purges old rows of it. With
    `forget_after` (seconds) each process does so once an hour, before a write with conditions.
    """

    table: str
    forget_after: float | None
    address: str = ""  # the server's address, once connected
    _pools: PerLoop[Pool[R]]

    @abstractmethod
    async def _run(self, requests: R, request: Callable[..., Any], *arguments: Any) -> Any:
        """Call `request`, a method of `requests`, and return its result; the driver's errors
        become ours.
        """

    @abstractmethod
    def _is_data_error(self, error: BaseException | None) -> bool:
        """Whether the driver's error rejects values of a request, so that its other entries may
        be valid.
        """

    async def stored_types(self) -> dict[str, str] | None:
        """Return the types of the table's columns. Of a table that is still to be created these are
        the declared ones; `create` requires columns.
        """
        try:
            async with self._pools.here().connection() as requests:
                return requests.codec.types
        except TableNotFoundError:
            if not self.create:
                raise
            return self.column_types()

    async def inspect(self) -> Presence:
        """Return whether the table exists, its id and its count of runs; creates nothing."""
        try:
            async with self._pools.here().connection() as requests:
                presence: Presence = await self._run(requests, requests.inspect)
                return presence
        except TableNotFoundError:
            return NO_TABLE

    async def begin_run(self, *, create: bool, marks: bool, fence: Fence | None = None) -> Presence:
        """Create what is missing and may be created, count the run, and make its fence known.

        Returns what the store then says about the table.
        """
        async with self._pools.here().connection(create=create and self.create) as requests:
            if marks and not requests.has_idempotency_table:
                await self._run(
                    requests, partial(requests.open_idempotency_table, create=self.create)
                )
            await self._run(requests, requests.begin_run, fence)
            presence: Presence = await self._run(requests, requests.inspect)
            return presence

    async def open(self) -> None:
        """Connect. A missing table with `create` is no error: the first write creates it."""
        if not self._pools.here().is_connected:
            await self.stored_types()

    async def check(self, use: TableUse) -> None:
        """Raise if the table, or the place where it would be created, does not allow this use."""
        try:
            async with self._pools.here().connection() as requests:
                await self._run(requests, requests.check, use)
        except TableNotFoundError:
            if not self.create:
                raise
            if use.writes:
                await self._check_creation()

    async def find_misfits(self, operation: Operation[Any]) -> Mapping[int, Problem]:
        try:
            async with self._pools.here().connection(create=self.create) as requests:
                return write_plan.validate_entries(requests.codec, operation).problems
        except AdjunctError:
            return {}  # the request reports it

    @abstractmethod
    async def _check_creation(self) -> None:
        """Raise if the first write could not create the missing table; creates nothing."""

    async def close(self) -> None:
        """Close the running event loop's connections after its requests."""
        await self._pools.here().close()

    async def send(self, operation: Operation[Any]) -> Outcomes:
        """Read or write by one connection; without a connection, its error is the problem of all
        entries.
        """
        reads = operation.kind is OperationKind.GET
        send = self._get if reads else self._write
        count = len(operation)
        may_be_created = self.create and operation.may_create
        connected = False
        try:
            async with self._pools.here().connection(
                create=may_be_created and not reads
            ) as requests:
                connected = True
                outcomes = await send(requests, operation)
                if any(problem.refuses_request for problem in outcomes.problems.values()):
                    # The table may have changed since this connection read its columns.
                    await requests.close()
                return outcomes
        except AdjunctError as error:
            if connected:
                # `_get` and `_write` return errors of requests. What they raise concerns the whole
                # operation: a lost lease, or columns of its key or order that the table lacks.
                raise
            if reads and may_be_created and isinstance(error, TableNotFoundError):
                # The first write creates the table, so it has no records yet.
                return Outcomes(count, [None] * count)
            return self._failed(count, error)

    async def forget(self, older_than: float) -> int:
        """Purge what was last applied to keys, including deleted ones, more than `older_than`
        seconds ago.

        Returns the number of keys. A message that old is applied again if it arrives again.
        """
        try:
            async with self._pools.here().connection() as requests:
                await self._run(
                    requests, partial(requests.open_idempotency_table, create=self.create)
                )
                purged: int = await self._run(requests, requests.forget, older_than)
                return purged
        except TableNotFoundError:
            if self.create:
                return 0  # the first write creates the table, so nothing was applied to it yet
            raise

    def _failed(self, count: int, error: AdjunctError) -> Outcomes:
        """The outcomes of a request that had no effect, for a reason that does not concern
        single entries.
        """
        return Outcomes.all(count, replace(self.problem_of(error, sent=False), of_request=True))

    async def _get(self, requests: R, operation: Operation[Any]) -> Outcomes:
        """Return the records of an operation's keys as its outcomes."""
        valid = write_plan.validate_entries(requests.codec, operation)
        try:
            stored = await self._run(requests, requests.get, [entry.key for entry in valid.entries])
        except AdjunctError as error:
            return self._failed(len(operation), error)
        return valid.outcomes(len(operation), stored)

    async def _write(self, requests: R, operation: Operation[Any]) -> Outcomes:
        """Write an operation, after preparing the idempotency table if it has conditions."""
        if operation.conditions:
            try:
                await self._prepare_conditions(
                    requests, create=self.create and operation.may_create
                )
            except AdjunctError as error:
                return self._failed(len(operation), error)
        return await self._write_entries(requests, operation)

    async def _prepare_conditions(self, requests: R, *, create: bool) -> None:
        """Check or create the idempotency table if this connection has not, and purge it if that
        is due.
        """
        if not requests.has_idempotency_table:
            await self._run(requests, partial(requests.open_idempotency_table, create=create))
        table = f"{self._label} {self.address}"
        if store.claim_due_purge(table, self.forget_after):
            purged = await self._run(
                requests, requests.forget, self.forget_after, store.PURGED_AT_ONCE
            )
            store.continue_purge(table, purged)

    async def _write_entries(self, requests: R, operation: Operation[Any]) -> Outcomes:
        """Write the valid entries; after a rejection, find out by bisecting which entries are
        rejected, and write the others.
        """
        bisect = BisectRejected(write_plan.validate_entries(requests.codec, operation))
        while (part := bisect.next()) is not None:
            await operation.check_fence()
            try:
                bisect.done(await self._run(requests, requests.write, operation, part))
            except RunLeaseLostError:
                raise
            except RejectedKeysError as rejected:
                bisect.rejected(rejected.errors)
            except AdjunctError as error:
                # Without a commit it had no effect.
                problem = self.problem_of(error, sent=requests.may_have_committed)
                by_data = self._is_data_error(error.__cause__)
                bisect.failed(replace(problem, of_request=not by_data), by_data=by_data)
        return bisect.outcomes(len(operation))

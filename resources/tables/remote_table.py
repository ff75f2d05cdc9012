"""`RemoteTable`: a table in some other store, reached through functions with retry and rate limit."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from dagster_adjunct.resources.errors import ConfigurationError, NullKeyError, RecordNotFoundError, TableError
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.tables.clock import Clock, SystemClock
from dagster_adjunct.resources.tables.credit_source import READ, WRITE, CreditSource
from dagster_adjunct.resources.tables.metrics import TableMetrics
from dagster_adjunct.resources.tables.order_of_a_key import KeyOrder
from dagster_adjunct.resources.tables.partial_update import (
    UpdateContract,
    UpdateMessage,
    apply_updates,
    refused,
)
from dagster_adjunct.resources.tables.rate_limit import RateLimit, SharedBucket, TokenBucket
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table_functions import (
    PutsIfAbsent,
    TableFunction,
    TableReadFunction,
    TableWriteFunction,
    UpdatesWithDefaults,
)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
U = TypeVar("U")
T = TypeVar("T")
A = TypeVar("A")


class RemoteTable(Generic[K, V, U]):
    """Records V by key K in another store, with partial updates U. All requests are async.

    A declaration until its first request opens the functions: it pickles small, without connections,
    limiter state or counts, so each executor opens its own. Use `async with table:` or `close()` to
    give connections back; in plain Python use `BlockingTable`. Promises:

    - Operations on one key happen in the order of the calls, retries included.
    - Requests go out in batches of at most `batch_size` records; `args` reach the function as they are.
    - None as a key, or in one, is NullKeyError before anything is sent.
    - What was sent may be sent again (see `RetryPolicy`): at least once, in order.

    `key` names the columns that make the key, for whoever must bring a key's records together.
    """

    def __init__(
        self,
        name: str,
        *,
        key: str | Sequence[str],
        read_function: TableReadFunction[K, V] | None = None,
        write_function: TableWriteFunction[K, V, U] | None = None,
        retry: RetryPolicy | None = None,
        rate_limit: RateLimit | None = None,
        batch_size: int = 1000,
        clock: Clock | None = None,
    ) -> None:
        self.name = check_name("table", name)
        self.key: tuple[str, ...] = (key,) if isinstance(key, str) else tuple(key)
        self.read_function = read_function
        self.write_function = write_function
        self.retry = retry or RetryPolicy()
        self.rate_limit = rate_limit or RateLimit()
        self.batch_size = batch_size
        self.clock = clock or SystemClock()
        if read_function is None and write_function is None:
            raise ConfigurationError(
                f"table {name} has neither a read nor a write function.",
                "Give it read_function=…, write_function=… or both (often the same object).",
                table=name,
            )
        if not self.key or batch_size < 1:
            raise ConfigurationError(
                f"table {name}: key={self.key} and batch_size={batch_size}; expected at least one key "
                "column and a batch of at least 1.",
                "Correct the declaration.",
                argument="key",
                table=name,
            )
        self.credit_source: CreditSource | None = None
        self._begin()

    def _begin(self) -> None:
        self._metrics = TableMetrics()
        self._counting = threading.Lock()  # threads may share the table
        self._order = KeyOrder()
        self._reading: TokenBucket | SharedBucket
        self._writing: TokenBucket | SharedBucket
        if self.credit_source is None:
            self._reading = TokenBucket(self.rate_limit.reads_per_second, self.clock)
            self._writing = TokenBucket(self.rate_limit.writes_per_second, self.clock)
        else:
            budgets = self.rate_limit.budgets(self.name)
            self._reading = SharedBucket(self.credit_source, budgets, READ)
            self._writing = SharedBucket(self.credit_source, budgets, WRITE)

    def __repr__(self) -> str:
        return (
            f"RemoteTable({self.name!r}, key={self.key}, read_function={self.read_function!r}, "
            f"write_function={self.write_function!r}, retry={self.retry}, rate_limit={self.rate_limit})"
        )

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._begin()

    def paying(self, source: CreditSource) -> RemoteTable[K, V, U]:
        """Return this table, whose requests get their credits there. It travels to tasks with the source."""
        table = copy.copy(self)
        table.credit_source = source
        table._begin()
        return table

    @property
    def metrics(self) -> TableMetrics:
        """What this table has done so far."""
        return self._metrics

    async def __aenter__(self) -> RemoteTable[K, V, U]:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give the connections back. The next request opens them again."""
        if self.credit_source is not None:
            await self.credit_source.close()
        functions: list[TableFunction | None] = [self.read_function, self.write_function]
        for function in {id(function): function for function in functions}.values():
            if function is not None:
                await function.close()

    async def get(self, key: K, *args: object) -> V | None:
        """The record of `key`, or None."""
        function = self._reader()
        self._check([key])
        async with self._order.turn([key]):
            record = await self._call(function, self._reading, 1, lambda: function.get(key, *args))
        self._count(reads=1, found=int(record is not None))
        return record

    async def get_all(self, keys: Sequence[K], *args: object) -> dict[K, V]:
        """The records of those `keys` that have one."""
        function = self._reader()
        wanted = list(dict.fromkeys(self._check(keys)))
        records: dict[K, V] = {}
        async with self._order.turn(wanted):
            for chunk in self._chunks(wanted, self._reading):
                records |= await self._send(function.get_all, chunk, args, function, self._reading)
                self._count(reads=len(chunk))
        self._count(found=len(records))
        return records

    async def put(self, key: K, value: V, *args: object) -> None:
        """Make `value` the record of `key`."""
        function = self._writer()
        self._check([key])
        self._check_values("value", [(key, value)])
        async with self._order.turn([key]):
            await self._call(function, self._writing, 1, lambda: function.put(key, value, *args))
        self._count(writes=1)

    async def put_all(self, entries: Sequence[tuple[K, V]], *args: object) -> None:
        """`put` for each entry, in order."""
        function = self._writer()
        keys = self._check([key for key, _ in entries])
        self._check_values("value", entries)
        async with self._order.turn(keys):
            for chunk in self._chunks(entries, self._writing):
                await self._send(function.put_all, chunk, args, function, self._writing)
                self._count(writes=len(chunk))

    async def delete(self, key: K, *args: object) -> None:
        """Remove the record of `key`; no error where there is none."""
        function = self._writer()
        self._check([key])
        async with self._order.turn([key]):
            await self._call(function, self._writing, 1, lambda: function.delete(key, *args))
        self._count(deletes=1)

    async def delete_all(self, keys: Sequence[K], *args: object) -> None:
        """`delete` for each key."""
        function = self._writer()
        async with self._order.turn(self._check(keys)):
            for chunk in self._chunks(keys, self._writing):
                await self._send(function.delete_all, chunk, args, function, self._writing)
                self._count(deletes=len(chunk))

    async def update(self, key: K, update: U, *args: object) -> None:
        """Apply `update` to the record of `key`; RecordNotFoundError where there is none."""
        function = self._writer()
        self._check([key])
        self._check_values("update", [(key, update)])
        async with self._order.turn([key]):
            await self._call(function, self._writing, 1, lambda: function.update(key, update, *args))
        self._count(updates=1)

    async def update_all(self, entries: Sequence[tuple[K, U]], *args: object) -> None:
        """`update` for each entry, in order.

        RecordNotFoundError names the keys without a record, after the first batch that has such keys;
        the other entries of that batch are applied, later batches are not sent.
        """
        function = self._writer()
        keys = self._check([key for key, _ in entries])
        self._check_values("update", entries)
        async with self._order.turn(keys):
            for chunk in self._chunks(entries, self._writing):
                await self._update_chunk(function, chunk, args)

    async def update_messages(
        self,
        entries: Sequence[tuple[K, UpdateMessage[U, V]]],
        contract: UpdateContract = UpdateContract.UPDATE_ONLY,
        *args: object,
    ) -> None:
        """Apply each message in order, beginning records with their defaults if `contract` says so.

        One request per batch where the function offers `UpdatesWithDefaults`, else the generic way.
        RecordNotFoundError as with `update_all`, saying what would have helped.
        """
        function = self._writer()
        keys = self._check([key for key, _ in entries])
        self._check_values("message", entries)
        with_defaults = contract is UpdateContract.UPDATE_WITH_DEFAULTS
        async with self._order.turn(keys):
            for chunk in self._chunks(entries, self._writing):
                if with_defaults and isinstance(function, UpdatesWithDefaults):
                    await self._update_at_once(function, chunk, contract, args)
                else:
                    await apply_updates(
                        chunk,
                        contract,
                        table=self.name,
                        update_all=lambda part: self._update_chunk(function, part, args),
                        put_defaults=lambda part: self._put_defaults(function, part, args),
                    )

    async def _update_at_once(
        self, function: Any, chunk: Sequence[tuple[K, UpdateMessage[U, V]]], contract: UpdateContract, args: Any
    ) -> None:
        send: Callable[..., Awaitable[int]] = function.update_with_defaults_all
        try:
            put = await self._send(send, chunk, args, function, self._writing)
        except RecordNotFoundError as error:
            self._count(updates=sum(key not in error.keys for key, _ in chunk))
            raise refused(self.name, contract, chunk, frozenset(error.keys)) from error
        self._count(updates=len(chunk), defaults_put=put)

    async def _update_chunk(
        self, function: TableWriteFunction[K, V, U], chunk: Sequence[tuple[K, U]], args: tuple[object, ...]
    ) -> None:
        try:
            await self._send(function.update_all, chunk, args, function, self._writing)
        except RecordNotFoundError as error:
            missing = frozenset(error.keys)
            self._count(updates=sum(key not in missing for key, _ in chunk) if missing else 0)
            raise
        self._count(updates=len(chunk))

    async def _put_defaults(
        self, function: TableWriteFunction[K, V, U], chunk: Sequence[tuple[K, V]], args: tuple[object, ...]
    ) -> int:
        if isinstance(function, PutsIfAbsent):
            put: int = await self._send(function.put_if_absent_all, chunk, args, function, self._writing)
        else:
            await self._send(function.put_all, chunk, args, function, self._writing)
            put = len(chunk)
        self._count(defaults_put=put)
        return put

    async def _send(
        self,
        request: Callable[..., Awaitable[T]],
        chunk: Sequence[object],
        args: tuple[object, ...],
        function: TableFunction,
        bucket: TokenBucket | SharedBucket,
    ) -> T:
        return await self._call(function, bucket, len(chunk), lambda: request(chunk, *args))

    async def _call(
        self,
        function: TableFunction,
        bucket: TokenBucket | SharedBucket,
        credits: int,
        request: Callable[[], Awaitable[T]],
    ) -> T:
        async def attempt() -> T:
            await bucket.acquire(credits)
            await function.open()
            return await request()

        self._count(requests=1)
        try:
            return await self.retry.run(
                attempt,
                is_retriable=function.is_retriable,
                clock=self.clock,
                on_retry=lambda: self._count(retries=1),
            )
        except (RecordNotFoundError, asyncio.CancelledError):
            raise
        except BaseException:
            self._count(failures=1)
            raise

    def _count(self, **counts: int) -> None:
        with self._counting:
            self._metrics += TableMetrics(**counts)

    def _chunks(self, items: Sequence[A], bucket: TokenBucket | SharedBucket) -> Iterator[Sequence[A]]:
        size = bucket.largest(self.batch_size)
        return (items[start : start + size] for start in range(0, len(items), size))

    def _reader(self) -> TableReadFunction[K, V]:
        if self.read_function is None:
            raise ConfigurationError(
                f"table {self.name} was asked for records but has no read function.",
                "Declare it with read_function=….",
                table=self.name,
            )
        return self.read_function

    def _writer(self) -> TableWriteFunction[K, V, U]:
        if self.write_function is None:
            raise ConfigurationError(
                f"table {self.name} was asked to write but has no write function.",
                "Declare it with write_function=….",
                table=self.name,
            )
        return self.write_function

    def _check(self, keys: Sequence[K]) -> Sequence[K]:
        for key in keys:
            if key is None or (isinstance(key, tuple) and None in key):
                raise NullKeyError(
                    f"table {self.name} got {key!r} as a key; {' and '.join(self.key)} must not be null.",
                    "Filter such records out before they reach the table.",
                    table=self.name,
                )
        return keys

    def _check_values(self, what: str, entries: Sequence[tuple[K, object]]) -> None:
        for key, value in entries:
            if value is None:
                raise TableError(
                    f"table {self.name} got None as the {what} for key {key!r}.",
                    "Use delete() to remove a record, or leave the entry out.",
                    table=self.name,
                )

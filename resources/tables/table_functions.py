"""Read and write functions: how a `RemoteTable` reaches one kind of store.

A function is small and picklable while it is closed, and holds its connection between `open` and
`close`. Pickling never carries the connection, so a function can be declared on a driver and opened
by each executor. Behaviour of updates: SAMZA-2709 (partial updates in the Table API).

What a store can do beyond the basic requests is said by two small protocols, `PutsIfAbsent` and
`UpdatesWithDefaults`; a function offers them by having the method.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

from dagster_adjunct.resources.errors import RecordNotFoundError, TableError, TransientError

if TYPE_CHECKING:
    from dagster_adjunct.resources.tables.partial_update import UpdateMessage

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
U = TypeVar("U")
T = TypeVar("T")

_AT_ONCE = 32  # requests in flight at a time when a *_all form is built on the single form


class TableFunction:
    """What read and write functions share: a life-cycle, and a word on which errors pass."""

    async def open(self) -> None:
        """Connect, or do nothing when connected.

        It is called before every request, so a function that lost its connection gets it back here.
        """

    async def close(self) -> None:
        """Give back what `open` took. A closed function may be opened again."""

    def is_retriable(self, error: BaseException) -> bool:
        """Whether the request that raised `error` may succeed when it is sent again as it was."""
        return isinstance(error, TransientError)


class TableReadFunction(TableFunction, ABC, Generic[K, V]):
    """Reads records by key. `args` are handed through from the caller of the table."""

    @abstractmethod
    async def get(self, key: K, *args: object) -> V | None:
        """The record of `key`, or None where there is none."""

    async def get_all(self, keys: Sequence[K], *args: object) -> dict[K, V]:
        """The records of those `keys` that have one. Built on `get` unless the store can do better."""
        values_of = await _key_by_key([(key, key) for key in keys], lambda key, _: self.get(key, *args))
        return {key: value for key, values in values_of.items() for value in values if value is not None}


class TableWriteFunction(TableFunction, ABC, Generic[K, V, U]):
    """Writes records by key: whole ones (V) with put, parts of them (U) with update.

    The `_all` forms keep the order of the entries of one key and promise nothing about the order
    between keys. As they stand here they send single requests, and one that fails does not keep the
    others from being sent; a store with batches or transactions overrides them.
    """

    @abstractmethod
    async def put(self, key: K, value: V, *args: object) -> None:
        """Make `value` the record of `key`, whatever was there."""

    @abstractmethod
    async def delete(self, key: K, *args: object) -> None:
        """Remove the record of `key`; no error where there is none."""

    async def update(self, key: K, update: U, *args: object) -> None:
        """Apply `update` to the record of `key`. RecordNotFoundError(keys=(key,)) where there is none."""
        raise TableError(
            f"{type(self).__name__} has no partial updates, and one was asked for.",
            "Put whole records, or override update() in the function.",
        )

    async def put_all(self, entries: Sequence[tuple[K, V]], *args: object) -> None:
        """`put` for each entry, in order for each key."""
        await _key_by_key(entries, lambda key, value: self.put(key, value, *args))

    async def delete_all(self, keys: Sequence[K], *args: object) -> None:
        """`delete` for each key."""
        await _key_by_key([(key, None) for key in keys], lambda key, _: self.delete(key, *args))

    async def update_all(self, entries: Sequence[tuple[K, U]], *args: object) -> None:
        """`update` for each entry, in order for each key.

        Entries whose key has a record are applied. Then, if there are others, RecordNotFoundError
        names all their keys; the entries of those keys had no effect.
        """
        await _key_by_key(entries, lambda key, update: self.update(key, update, *args))


@runtime_checkable
class PutsIfAbsent(Protocol):
    """A write function that can insert without ever replacing."""

    async def put_if_absent_all(self, entries: Sequence[tuple[Any, Any]], *args: object) -> int:
        """Insert each record whose key has none; return how many were inserted.

        With two entries for one key the first counts.
        """
        ...


@runtime_checkable
class UpdatesWithDefaults(Protocol):
    """A write function that applies updates and their defaults in one request or transaction."""

    async def update_with_defaults_all(
        self, entries: Sequence[tuple[Any, UpdateMessage[Any, Any]]], *args: object
    ) -> int:
        """Apply each message in order; where no record exists, insert the message's default first.

        Returns how many defaults were inserted. A message that meets no record and has no default
        has no effect; when the others are applied, RecordNotFoundError names the keys of such ones.
        """
        ...


async def _key_by_key(entries: Sequence[tuple[K, T]], request: Callable[[K, T], Awaitable[V]]) -> Mapping[K, list[V]]:
    """Send one request per entry: in sequence for one key, several keys at a time.

    Every key gets its turn before an error is raised. Missing records are collected into one error;
    any other error comes first, because it says more.
    """
    by_key: dict[K, list[T]] = {}
    for key, item in entries:
        by_key.setdefault(key, []).append(item)
    slots = asyncio.Semaphore(_AT_ONCE)

    async def in_sequence(key: K, items: list[T]) -> list[V]:
        async with slots:
            return [await request(key, item) for item in items]

    answers = await asyncio.gather(*(in_sequence(*pair) for pair in by_key.items()), return_exceptions=True)
    missing: list[object] = []
    results: dict[K, list[V]] = {}
    for key, answer in zip(by_key, answers, strict=True):
        if isinstance(answer, RecordNotFoundError):
            missing.append(key)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            results[key] = answer
    if missing:
        raise record_not_found(missing)
    return results


def record_not_found(keys: Sequence[object], table: str = "the table") -> RecordNotFoundError:
    """The error for updates that met no record, naming the first few of `keys`."""
    shown = ", ".join(repr(key) for key in keys[:3]) + (", …" if len(keys) > 3 else "")
    many = len(keys) > 1
    return RecordNotFoundError(
        f"{table} has no record to update for {len(keys)} key{'s' if many else ''}: {shown}.",
        "Put the record first, or send an UpdateMessage with a default under UPDATE_WITH_DEFAULTS.",
        keys=tuple(keys),
    )

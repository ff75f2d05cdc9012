"""A store as a user writes one, request by request, that tells what it was asked and fails on
plan.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from dagster_adjunct.resources.errors import TransientError
from dagster_adjunct.resources.tables.functions import (
    TableReadFunction,
    TableWriteFunction,
    record_not_found_error,
)


class Busy(TransientError):
    """What passes."""


class Broken(Exception):
    """What does not."""


class UserFunction(TableReadFunction, TableWriteFunction):
    """`asked` are the requests, (verb, key, value, args), in the order in which they came, those
    that failed too.

    `plan[verb, key]` is what befalls the next such requests: an error to raise, a number of seconds
    to take, None. `missing` makes the error of an update that meets no record.
    """

    def __init__(self) -> None:
        self.records: dict[Any, Any] = {}
        self.asked: list[tuple[str, Any, Any, tuple]] = []
        self.done: list[tuple[str, Any, Any]] = []
        self.plan: dict[tuple[str, Any], deque] = defaultdict(deque)
        self.missing: Callable[[Any], BaseException] = lambda key: record_not_found_error([key])
        self.before_update: Callable[[], None] = lambda: None

    def will(self, verb: str, key: Any, *befalls: Any) -> None:
        self.plan[verb, key].extend(befalls)

    def keys_asked(self, verb: str) -> list[Any]:
        return [key for asked, key, _, _ in self.asked if asked == verb]

    async def get(self, key, *args):
        await self._take("get", key, None, args)
        return self.records.get(key)

    async def put(self, key, value, *args):
        await self._take("put", key, value, args)
        self.records[key] = value

    async def delete(self, key, *args):
        await self._take("delete", key, None, args)
        self.records.pop(key, None)

    async def put_if_absent(self, key, value, *args):
        await self._take("put_if_absent", key, value, args)
        made = key not in self.records
        self.records.setdefault(key, value)
        return made

    async def update(self, key, update, *args):
        await self._take("update", key, update, args)
        if key not in self.records:
            raise self.missing(key)
        self.records[key] = self.records[key] | update

    async def _take(self, verb, key, value, args):
        self.asked.append((verb, key, value, args))
        await asyncio.sleep(0)
        waiting = self.plan.get((verb, key))
        befalls = waiting.popleft() if waiting else None
        if isinstance(befalls, BaseException):
            raise befalls
        if isinstance(befalls, asyncio.Event):
            await befalls.wait()
        elif befalls is not None:
            await asyncio.sleep(befalls)
        self.done.append((verb, key, value))


class WithoutPutIfAbsent(UserFunction):
    put_if_absent = TableWriteFunction.put_if_absent


class WithoutUpdate(UserFunction):
    update = TableWriteFunction.update

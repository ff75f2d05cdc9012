"""A store in memory whose requests take a while, and which notes what it was asked and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dagster_adjunct.resources.errors import TableError
from dagster_adjunct.resources.tables.functions import StoreFunction, record_not_found_error
from dagster_adjunct.resources.tables.operation import (
    Capabilities,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    State,
)

BAD = {"bad": True}


class SlowStore(StoreFunction[Any, Any, Any]):
    """Each request takes effect at once, some turns of the event loop after it began, and ends some
    turns later.

    `turns` says how many, request by request. The value BAD is refused. Two requests with one key
    under way at the same time are noted in `overlaps`.
    """

    def __init__(
        self, turns: Callable[[], int] = lambda: 2, *, at_once: bool = True, if_absent: bool = True
    ) -> None:
        self.records: dict[Any, dict[str, Any]] = {}
        self.requests: list[tuple[str, list[Any]]] = []
        self.args: list[tuple[object, ...]] = []
        self.overlaps: list[Any] = []
        self.most_under_way = 0
        self.closed = 0
        self._turns = turns
        self._at_once, self._if_absent = at_once, if_absent
        self._under_way: list[set[Any]] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            updates=True,
            puts_if_absent=self._if_absent,
            updates_with_defaults=self._at_once,
            takes_args=True,
        )

    async def close(self) -> None:
        assert not self._under_way
        self.closed += 1

    async def send(self, operation: Operation[Any]) -> Outcomes:
        keys = list(operation.entries.keys)
        self.requests.append((operation.kind.value, keys))
        self.args.append(operation.args)
        with self._noted(set(keys)):
            await self._wait()
            outcomes = self._apply(operation, keys)
            await self._wait()
        return outcomes

    @contextmanager
    def _noted(self, keys: set[Any]) -> Iterator[None]:
        self.overlaps.extend(key for others in self._under_way for key in keys & others)
        self._under_way.append(keys)
        self.most_under_way = max(self.most_under_way, len(self._under_way))
        try:
            yield
        finally:
            self._under_way.remove(keys)

    async def _wait(self) -> None:
        for _ in range(self._turns()):
            await asyncio.sleep(0)

    def _apply(self, operation: Operation[Any], keys: list[Any]) -> Outcomes:
        kind, entries, problems, begun = operation.kind, operation.entries, {}, 0
        if kind is OperationKind.GET:
            return Outcomes(
                len(keys),
                [dict(self.records[key]) if key in self.records else None for key in keys],
            )
        for place, key in enumerate(keys):
            value = None if entries.values is None else entries.values[place]
            default = None if entries.defaults is None else entries.defaults[place]
            if value == BAD:
                problems[place] = Problem(State.REFUSED, TableError(f"{key} is bad."))
            elif kind is OperationKind.DELETE:
                self.records.pop(key, None)
            elif kind is OperationKind.PUT:
                self.records[key] = dict(value)
            elif kind is OperationKind.PUT_IF_ABSENT:
                if key in self.records:
                    problems[place] = Problem(State.SKIPPED)
                else:
                    self.records[key] = dict(value)
            elif key in self.records:
                self.records[key].update(value)
            elif default is not None and self._at_once:
                self.records[key] = {**default, **value}
                begun += 1
            else:
                problems[place] = Problem(State.MISSING, record_not_found_error([key]))
        return Outcomes(len(keys), problems=problems, defaults_put=begun)

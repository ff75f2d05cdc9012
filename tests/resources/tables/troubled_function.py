"""A function that fails as the contract of outcomes allows it to, entry by entry, by chance or
on plan.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from dagster_adjunct.resources.errors import TransientError
from dagster_adjunct.resources.tables.functions import StoreFunction
from dagster_adjunct.resources.tables.operation import (
    Capabilities,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    State,
)


class Lost(TransientError):
    pass


class TroubledFunction(StoreFunction):
    """Hands operations to `inner`, and by `chance` spoils some of each.

    Of a key's entries in an operation, some first ones are done and told to be; of the next ones
    the answer is lost though they are done, unless `forgets` is False; the rest is not done and
    told to have failed. `seen` are the operations as they came in.
    """

    def __init__(
        self, inner: StoreFunction, seed: int = 0, chance: float = 0.5, *, forgets: bool = True
    ) -> None:
        self.inner = inner
        self.random = Random(seed)
        self.chance = chance
        self.forgets = forgets
        self.seen: list[Operation[Any]] = []
        self.spoilt = 0

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    async def open(self) -> None:
        await self.inner.open()

    async def close(self) -> None:
        await self.inner.close()

    async def send(self, operation: Operation[Any]) -> Outcomes:
        self.seen.append(operation)
        await asyncio.sleep(0)  # others may come between, as with any request
        if self.random.random() >= self.chance:
            return await self.inner.send(operation)
        by_key: dict[Any, list[int]] = {}
        for place, key in enumerate(operation.entries.keys):
            by_key.setdefault(key, []).append(place)
        done: list[int] = []
        problems: dict[int, Problem] = {}
        for places in by_key.values():
            reported = self.random.randint(0, len(places))
            acted = self.random.randint(reported, len(places)) if self.forgets else reported
            done += places[:acted]
            problems |= dict.fromkeys(
                places[reported:acted],
                Problem(State.UNKNOWN, Lost("the answer was lost.", "Wait.")),
            )
            problems |= dict.fromkeys(places[acted:], Problem(State.FAILED, Lost("busy.", "Wait.")))
        self.spoilt += len(problems)
        done.sort()
        answers = await self.inner.send(operation.with_entries(operation.entries.take(done)))
        reported_problems = {
            done[place]: problem for place, problem in answers.problems.items()
        } | problems
        if operation.kind is not OperationKind.GET:
            return Outcomes(
                len(operation), problems=reported_problems, defaults_put=answers.defaults_put
            )
        records: list[Any] = [None] * len(operation)
        for place, record in zip(done, answers.records or (), strict=True):
            records[place] = None if place in problems else record
        return Outcomes(len(operation), records, reported_problems)

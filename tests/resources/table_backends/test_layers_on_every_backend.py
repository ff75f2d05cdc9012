"""The layers of a table over every backend: whatever is declared, requests leave what they leave
in a dict.
"""

from __future__ import annotations

import asyncio
import random
from itertools import product
from typing import Any

import pytest

from dagster_adjunct.resources.errors import RecordNotFoundError
from dagster_adjunct.resources.tables.cache import Cache
from dagster_adjunct.resources.tables.operation import UpdateContract, UpdateMessage
from dagster_adjunct.resources.tables.rate import RateLimit
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.resources.table_backends.fresh_functions import BACKENDS, NewStore
from tests.resources.table_backends.plain_store import without_nulls
from tests.rounds import rounds

KEYS = ["k1", "k2", "k3", "ключ"]
CACHES = [None, Cache(size=2), Cache(absent=True), Cache(on_write="around")]
SIZES = [1, 3, 100]
RATES = [None, RateLimit(1e9, 1e9)]
LAYERS = list(product(CACHES, SIZES, RATES))


@pytest.fixture(scope="module", params=BACKENDS)
def new_store(request: Any, tmp_path_factory: pytest.TempPathFactory) -> NewStore:
    """Makes an empty store of one backend."""
    make: NewStore = request.param(request, tmp_path_factory.mktemp("layers"))
    return make


class Caller:
    """Asks a table and a dict for the same."""

    def __init__(self, table: RemoteTable[str, dict[str, Any], Any], seed: int) -> None:
        self.table, self.random, self.records = (
            table,
            random.Random(seed),
            dict[str, dict[str, Any]](),
        )

    def fields(self) -> dict[str, Any]:
        drawn: dict[str, Any] = {
            "a": self.random.randint(-9, 9),
            "b": self.random.choice(["", "x", "ä\n"]),
        }
        return {name: value for name, value in drawn.items() if self.random.random() < 0.7}

    async def ask(self) -> None:
        """One request; what it answers must be what the dict has when it is called."""
        call = self.random.choice([self.puts, self.deletes, self.updates, self.defaults, self.gets])
        await call(self.random.choices(KEYS, k=self.random.randint(1, 4)))

    async def puts(self, keys: list[str]) -> None:
        entries = [(key, self.random.choice([None, self.fields()])) for key in keys]
        for key, value in entries:
            self.records.pop(key, None)
            if value is not None:
                self.records[key] = dict(value)
        await self.table.put_all(
            [(key, None if value is None else {"id": key, **value}) for key, value in entries]
        )

    async def deletes(self, keys: list[str]) -> None:
        for key in keys:
            self.records.pop(key, None)
        await self.table.delete_all(keys)

    async def updates(self, keys: list[str]) -> None:
        entries = [(key, {"a": self.random.randint(-9, 9)}) for key in keys]
        missing = {key for key in keys if key not in self.records}
        for key, update in entries:
            if key in self.records:
                self.records[key] |= update
        reported = set[str]()
        try:
            await self.table.update_all(entries)
        except RecordNotFoundError as error:
            reported = set(error.keys)
        assert reported == missing

    async def defaults(self, keys: list[str]) -> None:
        messages = [
            (key, UpdateMessage({"b": self.random.choice("xyz")}, {"id": key, "a": 1}))
            for key in keys
        ]
        for key, message in messages:
            self.records[key] = self.records.get(key, {"a": 1}) | message.update
        await self.table.update_messages(messages, UpdateContract.UPDATE_WITH_DEFAULTS)

    async def gets(self, keys: list[str]) -> None:
        expected = {key: dict(self.records[key]) for key in keys if key in self.records}
        got = await self.table.get_all(keys)
        for key, record in got.items():
            assert record.get("id", key) == key
        assert {
            key: without_nulls({**record, "id": None}) for key, record in got.items()
        } == expected


@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(2, len(LAYERS) * 2)))
def test_requests_through_any_layers_leave_what_they_leave_in_a_dict(
    new_store: NewStore, seed: int
) -> None:
    cache, size, rate = LAYERS[seed * 7 % len(LAYERS)]
    store = new_store()
    table: RemoteTable[str, dict[str, Any], Any] = RemoteTable(
        "layers",
        key="id",
        read_function=store,
        write_function=store,
        cache=cache,
        batch_size=size,
        rate_limit=rate,
        retry=RetryPolicy(attempts=3),
        defaults_may_overwrite=not store.capabilities.puts_if_absent,
    )
    caller = Caller(table, seed)

    async def run() -> None:
        async with table:
            for _ in range(12):
                await asyncio.gather(*(caller.ask() for _ in range(caller.random.randint(1, 5))))
            await caller.gets(KEYS)

    asyncio.run(run())

"""Iterations in PostgreSQL, whose pages from the third on are read ahead: what that keeps, and
what it leaves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dagster_adjunct.key_value import (
    BlockingKeyValueTable,
    IteratorState,
    KeyValueTable,
    KeyValueTableConfiguration,
    TextSerializer,
)
from dagster_adjunct.resources.errors import KeyValueTableNotFoundError
from dagster_adjunct.resources.key_value.segment import run_without_loop
from dagster_adjunct.resources.key_value_backends.postgres import PostgresSegments
from tests.resources.key_value_backends.segment_stores import SegmentStore, new_table_id, postgres
from tests.servers.postgres import PostgresServer

pytestmark = pytest.mark.server

FAMILY = "f"
KEYS = [f"{number:03}" for number in range(50)]
APPLICATION = "test_postgres_pages"


class Iterated:
    """A table of 50 keys over a backend of one connection, and the pages of its family one by
    one.
    """

    def __init__(self, backend: PostgresSegments, blocking: bool) -> None:
        self.backend, self.blocking = backend, blocking
        self._runner = None if blocking else asyncio.Runner()
        self.id = new_table_id()
        backend.create(self.id, 1)
        text = TextSerializer()
        self.table = KeyValueTable(self.id, KeyValueTableConfiguration(1), backend, text, text)
        self._blocking = BlockingKeyValueTable(self.table)
        self.fill("a value")

    def fill(self, value: str) -> None:
        self.call("put_all", [(key, value) for key in KEYS], family=FAMILY)

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        if self._runner is None:
            return getattr(self._blocking, name)(*given, **named)

        return self.run(lambda: getattr(self.table, name)(*given, **named))

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            return await work()

        assert self._runner is not None
        return self._runner.run(run())

    def pages(self, **named: Any) -> Iterator[Any]:
        if self._runner is None:
            yield from self._blocking.entries(FAMILY, page_size=10, **named)
            return
        pages = self.table.entries(FAMILY, page_size=10, **named)
        while (page := self._runner.run(pages.next_page())) is not None:
            yield page

    def close(self) -> None:
        self.call("close")
        self.backend.delete(self.id, 1)
        if self._runner is not None:
            self._runner.close()


@pytest.fixture(scope="module")
def segment_store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> SegmentStore:
    return postgres(request, tmp_path_factory.mktemp("segments"))


@pytest.fixture(params=[True, False], ids=["blocking", "in a loop"])
def iterated(request: pytest.FixtureRequest, segment_store: SegmentStore) -> Iterator[Iterated]:
    connect = segment_store.backend().to_dict()["connect"]
    iterated = Iterated(
        PostgresSegments(connect={**connect, "application_name": APPLICATION}, connections=1),
        request.param,
    )
    yield iterated
    iterated.close()


def keys_of(page: Any) -> list[str]:
    return [entry.key.key for entry in page.items]


def matched_in(pages: Iterable[Any]) -> list[str]:
    return [key for page in pages for key in keys_of(page)]


def at_rest(server: PostgresServer) -> int:
    """Return how many connections the iterations have, once none of them is being answered."""
    deadline = time.monotonic() + 240
    query = f"SELECT state FROM pg_stat_activity WHERE application_name = '{APPLICATION}'"
    while set(states := server.execute(query)) > {("idle",)} or not states:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return len(states)


def remove_behind(iterated: Iterated, server: PostgresServer, place: int) -> None:
    """Somebody else removes the keys from this place on, once whatever was asked ahead has been
    answered.
    """
    at_rest(server)
    server.execute(
        f"DELETE FROM kvt_{iterated.id.incarnation} WHERE convert_from(substr(address, 8), 'UTF8')"
        f" >= '{KEYS[place]}'"
    )


def test_the_third_page_is_read_while_the_second_is_used_and_the_second_is_not(
    iterated: Iterated, postgres_server: PostgresServer
) -> None:
    pages = iterated.pages()
    assert keys_of(next(pages)) == KEYS[:10]
    remove_behind(iterated, postgres_server, 45)
    assert keys_of(next(pages)) == KEYS[10:20]
    remove_behind(iterated, postgres_server, 20)
    assert [keys_of(page) for page in pages] == [KEYS[20:30]]
    assert matched_in(iterated.pages()) == KEYS[:20]


def test_the_state_of_a_page_is_of_that_page_and_not_of_what_was_read_ahead(
    iterated: Iterated,
) -> None:
    pages = iterated.pages()
    for place in (10, 20, 30):
        state = IteratorState.from_bytes(next(pages).state.to_bytes())
        assert matched_in(iterated.pages(state=state)) == KEYS[place:]


def test_large_entries_are_not_read_ahead(
    iterated: Iterated, postgres_server: PostgresServer
) -> None:
    """A server that can't send all of an answer waits, and holds its lock on the table."""
    iterated.fill("large" * 10_000)
    pages = iterated.pages()
    next(pages), next(pages)
    remove_behind(iterated, postgres_server, 20)
    assert list(pages) == []


def test_who_iterates_may_use_the_only_connection_meanwhile(iterated: Iterated) -> None:
    matched = []
    for page in iterated.pages():
        matched += keys_of(page)
        iterated.call("put", matched[0], "again", family=FAMILY)
        iterated.call("put", f"{matched[-1][:3]}+", "new", family=FAMILY)
        assert iterated.call("get", f"{matched[-1][:3]}+", family=FAMILY).value == "new"
        assert [len(keys_of(other)) for other in iterated.pages()][:4] == [
            10
        ] * 4  # another iteration, whole
    assert matched == sorted(set(matched))
    assert set(KEYS) <= set(matched)


def test_iterations_that_are_left_leave_nothing_behind(
    iterated: Iterated, postgres_server: PostgresServer
) -> None:
    kept = []
    for number in range(20):
        pages = iterated.pages()
        next(pages), next(pages)
        if number % 2:
            kept.append(pages)  # never asked again, and never closed
    assert at_rest(postgres_server) == 1
    assert iterated.call("get", "000", family=FAMILY).value == "a value"
    # it waits for no lock of theirs, which would be held for ever
    iterated.backend.delete(iterated.id, 1)
    with pytest.raises(KeyValueTableNotFoundError):
        iterated.call("get", "000", family=FAMILY)


@pytest.mark.parametrize(
    "between", [lambda iterated: None, lambda iterated: iterated.call("exists", "x")]
)
def test_an_iteration_with_a_prefetch_resumes_where_the_connection_was_lost(
    iterated: Iterated, postgres_server: PostgresServer, between: Callable[[Iterated], Any]
) -> None:
    pages = iterated.pages()
    matched = keys_of(next(pages)) + keys_of(next(pages))
    postgres_server.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name ="
        f" '{APPLICATION}'"
    )
    between(iterated)
    assert matched + matched_in(pages) == KEYS


@pytest.mark.parametrize("connections", [1, 2])
def test_iterations_at_once_take_turns_over_few_connections_and_each_meets_all(
    segment_store: SegmentStore, connections: int
) -> None:
    """Each reads ahead over connections that others use meanwhile; somebody writes beside them."""
    backend = PostgresSegments(
        connect=segment_store.backend().to_dict()["connect"], connections=connections
    )
    iterated = Iterated(backend, blocking=True)

    def matched(number: int) -> list[str]:
        keys: list[str] = []
        for page in iterated.pages():
            keys += keys_of(page)
            if number == 0:
                iterated.call("put", KEYS[-1], "again", family=FAMILY)
        return keys

    async def matched_in_loop() -> list[str]:
        return [
            entry.key.key
            async for page in iterated.table.entries(FAMILY, page_size=7)
            for entry in page.items
        ]

    async def all_in_loop() -> list[list[str]]:
        matched_by_each = await asyncio.gather(*(matched_in_loop() for _ in range(20)))
        await iterated.table.close()
        return matched_by_each

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(matched, [0, 1, 2, 3] * 10)) == [KEYS] * 40
    assert asyncio.run(all_in_loop()) == [KEYS] * 20
    iterated.close()


def test_an_error_of_a_page_read_ahead_does_not_reach_the_next_request(iterated: Iterated) -> None:
    async def work(pool: Any) -> None:
        wire = await pool.take()
        unread = await wire.ask_ahead("SELECT 1 / ($1::text)::int", [b"0"])
        assert wire.rows(await wire.ask("SELECT $1::text", [b"x"]), tuple) == [("x",)]
        assert await wire.read(unread) is None
        other = await wire.ask_ahead("SELECT $1::text", [b"later"])
        await wire.tell(b"BEGIN")
        assert wire.rows(await wire.read(other), tuple) == [("later",)]
        await wire.rollback()
        pool.give(wire)

    async def run() -> None:
        await work(iterated.backend._pools.here())

    if iterated.blocking:
        run_without_loop(run())
    else:
        iterated.run(run)

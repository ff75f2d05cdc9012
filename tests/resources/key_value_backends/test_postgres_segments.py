"""Key-value tables in PostgreSQL where it has ways of its own: limits, locks, plans,
connections, tokens.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import psycopg
import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    KeyValueTableSealedError,
    TableAccessError,
    TableError,
    TableUnavailableError,
)
from dagster_adjunct.resources.key_value.segment import (
    ConditionsFailed,
    ReplyLostError,
    StoredEntry,
    TableId,
)
from dagster_adjunct.resources.key_value_backends import postgres as postgres_segments
from dagster_adjunct.resources.key_value_backends import postgres_segment
from dagster_adjunct.resources.key_value_backends import postgres_segment as postgres_key_values
from dagster_adjunct.resources.key_value_backends.postgres import PostgresSegments
from dagster_adjunct.resources.key_value_backends.postgres_wire import PostgresWire
from tests.resources.key_value_backends.segment_handle import (
    Handle,
    Request,
    insert,
    of,
    put,
    remove,
    replace,
    surely,
)
from tests.resources.key_value_backends.segment_stores import SegmentStore, new_table_id, postgres
from tests.servers.postgres import PostgresServer
from tests.servers.tcp_proxy import TcpProxy

pytestmark = pytest.mark.server

APPLE, PEAR, PLUM = map(of, (b"apple", b"pear", b"plum"))


@pytest.fixture(scope="module")
def segment_store(request, tmp_path_factory) -> SegmentStore:
    return postgres(request, tmp_path_factory.mktemp("segments"))


@pytest.fixture
def bare(postgres_server: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    """Somebody else, in a transaction."""
    with psycopg.connect(postgres_server.dsn()) as connection:
        yield connection


def rows_of(table: TableId) -> str:
    return f"kvt_{table.incarnation}"


def address(key: bytes) -> bytes:
    return bytes(4) + key


def lock(bare: psycopg.Connection[Any], table: TableId, key: bytes) -> None:
    query = f"SELECT FROM {rows_of(table)} WHERE address = %b FOR UPDATE"
    assert bare.execute(query, (address(key),)).rowcount == 1  # type: ignore[call-overload]


def waiting(server: PostgresServer, number: int = 1) -> None:
    """Return when so many statements wait for a lock."""
    deadline = time.monotonic() + 240
    while server.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    ) != [(number,)]:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def in_threads(
    store: SegmentStore, table: TableId, work: Callable[[Handle, int], Any], threads: int
) -> list[Any]:
    """Call `work(handle, number)` in threads with a backend and a loop of their own; return the
    results.
    """

    def thread(number: int) -> Any:
        with asyncio.Runner() as runner:
            handle = Handle(store.backend().open(table, 0), runner.run)
            try:
                return work(handle, number)
            finally:
                runner.run(handle.segment.close())

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(thread, range(threads)))


def test_the_limit_of_a_key_is_that_of_the_servers_index(backend, handle):
    longest = os.urandom(backend.limits.table_key)
    [version] = handle.write(put(longest, b"x"))
    assert handle.get(longest) == [(longest, version, b"x")]
    with pytest.raises(TableError, match="index row size"):
        handle.write(put(os.urandom(backend.limits.table_key + 1)))


def test_many_keys_of_any_length_are_read_in_several_requests(handle, monkeypatch):
    monkeypatch.setattr(postgres_segment, "_KEYS_AT_ONCE", 3)
    keys = [of(b"k" * length) for length in range(8)]
    versions = handle.write(*(put(key, key) for key in keys[:7]))
    asked = [3, 0, 7, 3, 3, 6, 1, 7, 3, 5]
    stored = {key: (key, version, key) for key, version in zip(keys, versions, strict=False)}
    entries = handle.get(*(keys[place] for place in asked))
    assert entries == [stored.get(keys[place]) for place in asked]
    assert {type(entry) for entry in entries} == {StoredEntry, type(None)}


def test_keys_that_are_read_in_several_requests_are_of_one_moment(
    segment_store, handle, table, monkeypatch
):
    keys, ask, asked = [of(b"%d" % number) for number in range(5)], PostgresWire.ask, []
    handle.write(*(put(key, b"old") for key in keys))

    async def and_then_others_write(wire: PostgresWire, *arguments: Any, **how: Any) -> Any:
        answer = await ask(wire, *arguments, **how)
        asked.append(arguments)
        if len(asked) == 1:
            in_threads(
                segment_store,
                table,
                lambda rival, _: rival.write(*(put(key, b"new") for key in keys)),
                1,
            )
        return answer

    monkeypatch.setattr(postgres_segment, "_KEYS_AT_ONCE", 2)
    monkeypatch.setattr(PostgresWire, "ask", and_then_others_write)
    assert [entry and entry.value for entry in handle.get(*keys)] == [b"old"] * 5
    assert [entry and entry.value for entry in handle.get(*keys)] == [b"new"] * 5


def test_keys_that_others_put_while_a_batch_waited_are_removed_with_it(
    segment_store, handle, table, bare, postgres_server
):
    """The batch overwrites what was put after PLUM, so it came later than PLUM and has to remove
    it.
    """
    handle.write(put(APPLE, b"0"))
    lock(bare, table, APPLE)
    batch = Request.of([put(APPLE, b"batch"), remove(PLUM)])
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(
            in_threads, segment_store, table, lambda other, _: surely(other, batch), 1
        )
        waiting(postgres_server)
        handle.write(put(PLUM, b"1"))
        bare.execute(f"UPDATE {rows_of(table)} SET value = 'later'")  # type: ignore[call-overload]
        bare.commit()
        others.result(120)
    assert handle.stored() == {APPLE: (batch.versions[0], b"batch")}


def test_what_refuses_a_batch_is_reported_as_it_stood_at_one_moment(
    segment_store, handle, table, bare, postgres_server
):
    """What others changed while the batch waited came at once with a key that its statement
    could not see.
    """
    [old] = handle.write(put(APPLE, b"0"))
    lock(bare, table, APPLE)
    batch = Request.of([replace(APPLE, old, b"batch"), insert(PLUM, b"batch")])

    def refused(other: Handle, _: int) -> dict[int, bytes | None]:
        with pytest.raises(ConditionsFailed) as failed:
            surely(other, batch)
        return failed.value.found

    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(in_threads, segment_store, table, refused, 1)
        waiting(postgres_server)
        apple, plum = b"a later version!", b"plum's version!!"
        bare.execute(f"UPDATE {rows_of(table)} SET version = %b", (apple,))  # type: ignore[call-overload]
        bare.execute(f"INSERT INTO {rows_of(table)} VALUES (%b, %b, '')", (address(PLUM), plum))  # type: ignore[call-overload]
        bare.commit()
        assert others.result(120) == [{0: apple, 1: plum}]


def test_batches_that_put_and_remove_the_same_keys_at_once_are_whole(segment_store, handle, table):
    """Whoever reads all keys, at one moment, finds what one batch left. A value tells which keys
    its batch has put.
    """
    keys = [of(b"%d" % number) for number in range(4)]
    ended, enough = threading.Event(), threading.Event()

    def work(handle: Handle, number: int) -> int:
        random, seen = Random(number), set()
        if number == 3:
            while not ended.is_set():
                entries = handle.get(*keys)
                values = {entry.value for entry in entries if entry}
                assert len(values) <= 1, entries
                for value in values:
                    assert [b"-+"[entry is not None] for entry in entries] == list(value[:4])
                seen |= values
                if len(seen) > 3:
                    enough.set()
            return len(seen)
        try:
            for turn in range(4000):
                if turn >= 40 and enough.is_set():
                    break
                chosen = bytes(random.choice(b"-+") for _ in keys)
                value = chosen + b" %d of %d" % (turn, number)
                changes = [
                    put(key, value) if sign == ord("+") else remove(key)
                    for key, sign in zip(keys, chosen, strict=True)
                ]
                surely(handle, Request.of(random.sample(changes, len(changes))))
        finally:
            ended.set()
        return 0

    assert in_threads(segment_store, table, work, 4)[3] > 3


def test_a_seal_waits_for_the_writes_under_way_and_reads_go_on_meanwhile(
    segment_store, backend, handle, table, bare, postgres_server
):
    handle.write(put(APPLE, b"0"))
    lock(bare, table, APPLE)
    write = Request.of([put(APPLE, b"under way")])
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(
            in_threads, segment_store, table, lambda other, _: other.send(write), 1
        )
        waiting(postgres_server)
        sealing = pool.submit(backend.seal, table, 1)
        waiting(postgres_server, 2)
        assert handle.value(APPLE) == b"0"
        bare.rollback()
        writing.result(120)
        sealing.result(120)
    assert handle.stored() == {APPLE: (write.versions[0], b"under way")}
    for changes in ([put(APPLE)], [insert(PEAR)], [remove(PLUM)], [put(PEAR), remove(PLUM)]):
        with pytest.raises(KeyValueTableSealedError):
            handle.write(*changes)


def test_old_requests_are_forgotten_and_recent_ones_are_not(
    segment_store, table, run, monkeypatch, postgres_server
):
    monkeypatch.setattr(postgres_segment, "WRITES_BETWEEN_PRUNING", 1)
    tokens = f"{rows_of(table)}_tokens"
    backend = segment_store.backend()
    handle = Handle(backend.open(table, 0), run)
    for _ in range(5):
        handle.write(put(APPLE))
    assert postgres_server.execute(f"SELECT count(*) FROM {tokens}") == [(5,)]
    age = (
        f"UPDATE {tokens} SET at = at - {round(2 * backend.horizon) + 1} * interval '1 second'"
        " RETURNING 1"
    )
    assert len(postgres_server.execute(age)) == 5
    handle.write(put(APPLE))
    assert postgres_server.execute(f"SELECT count(*) FROM {tokens}") == [(1,)]
    run(handle.segment.close())


def test_old_requests_are_forgotten_by_blocks_in_a_large_table(
    segment_store, table, run, monkeypatch, postgres_server
):
    monkeypatch.setattr(postgres_segment, "WRITES_BETWEEN_PRUNING", 1)
    tokens = f"{rows_of(table)}_tokens"
    postgres_server.execute(
        f"INSERT INTO {tokens} (token, at) SELECT sha224(n::text::bytea), now() - interval '1 day'"
        " * (n / 30000) FROM generate_series(1, 60000) AS n"
    )
    handle = Handle(segment_store.backend().open(table, 0), run)
    for _ in range(400):
        handle.write(put(APPLE))
    old = f"SELECT count(*) FILTER (WHERE at < now() - interval '1 hour'), count(*) FROM {tokens}"
    (left, there), *_ = postgres_server.execute(old)
    assert (left, there) == (0, 29_999 + 400)  # a block is left out with a chance of 1 in 10**19
    run(handle.segment.close())


def test_what_is_old_is_looked_for_in_a_part_of_the_table_without_an_index(table, bare):
    forget = postgres_key_values.PostgresStatements("public", table).prune.format(1200)
    bare.execute(postgres_segments.SESSION)
    plan = "\n".join(row[0] for row in bare.execute(f"EXPLAIN {forget}"))
    assert "Tid Range Scan" in plan
    assert "Seq Scan" not in plan


def test_plans_made_for_an_empty_table_go_by_the_index_and_join_without_loops(table, bare):
    statements = postgres_key_values.PostgresStatements("public", table)
    bare.execute(postgres_segments.SESSION)

    def plan(statement: str, parameters: int) -> str:
        bare.execute(f"PREPARE planned AS {statement}")  # type: ignore[call-overload]
        nulls = ", ".join(["NULL"] * parameters)
        rows = bare.execute(f"EXPLAIN EXECUTE planned ({nulls})").fetchall()  # type: ignore[call-overload]
        bare.execute("DEALLOCATE planned")
        return "\n".join(row[0] for row in rows)

    assert "Index Cond: (address = ANY ($1))" in plan(statements.get_many, 1)
    for guarded in (False, True):
        page = plan(statements.page(True, guarded), 3)
        assert "Index Cond: ((address >= $1) AND (address < $2))" in page
        assert "Sort" not in page
    batch = plan(statements.batch, 5)
    assert batch.count("Index Cond: (address = ANY ($1))") == 3
    assert "Nested Loop" not in batch
    assert "Seq Scan" not in batch


def test_a_page_ends_early_where_its_values_are_large(handle, monkeypatch):
    for module in (postgres_key_values, postgres_segment):
        monkeypatch.setattr(module, "PAGE_BYTES", 1000)
    keys = [of(b"%03d" % number) for number in range(50)]
    handle.write(*(put(key, b"v" * (1 if place >= 10 else 300)) for place, key in enumerate(keys)))
    pages = handle.pages(limit=20)
    assert [entry.key for page in pages for entry in page] == keys
    assert [len(page) for page in pages] == [4, 4, 20, 20, 2]


def test_what_takes_too_long_is_given_up_and_the_next_request_is_answered(
    segment_store, handle, table, bare, run, postgres_server
):
    handle.write(put(APPLE, b"0"))
    lock(bare, table, APPLE)
    backend = PostgresSegments(connect=segment_store.backend().connect, request_timeout=3.0)
    impatient = Handle(backend.open(table, 0), run)
    request = Request.of([put(APPLE, b"1")])
    with pytest.raises(ReplyLostError):
        impatient.send(request)
    waiting(postgres_server, 0)  # it holds no lock any longer, and waits for none
    assert impatient.value(APPLE) == b"0"
    bare.rollback()
    impatient.send(request, repeated=True)
    assert impatient.stored() == {APPLE: (request.versions[0], b"1")}
    run(impatient.segment.close())


def test_a_connection_given_up_in_the_middle_of_a_request_is_not_used_again(backend, handle, run):
    async def cancel_twice() -> None:
        pool = backend._pools.here()
        wire = await pool.take()
        giving_up = asyncio.Event()

        async def unanswered(*, timeout: float) -> None:
            giving_up.set()
            await asyncio.sleep(60)

        wire._connection.cancel_safe = unanswered
        asked = asyncio.ensure_future(wire.ask("SELECT pg_sleep(60)::text", []))
        await asyncio.sleep(0.1)
        asked.cancel()
        await giving_up.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert wire.closed
        pool.give(wire)

    run(cancel_twice())
    handle.write(put(APPLE, b"0"))
    assert handle.value(APPLE) == b"0"


def test_a_caller_who_is_cancelled_is_free_and_leaves_no_lock_behind(
    handle, table, bare, run, postgres_server
):
    handle.write(put(APPLE, b"0"), put(PEAR, b"0"))
    lock(bare, table, PEAR)
    request = Request.of([put(APPLE, b"1"), put(PEAR, b"1")])
    with pytest.raises(TimeoutError):
        run(asyncio.wait_for(handle.segment.apply(request.changes, request.token), 0.2))
    waiting(postgres_server, 0)
    [version] = handle.write(put(APPLE, b"2"))
    assert handle.get(APPLE) == [(APPLE, version, b"2")]


def test_a_connection_that_ended_while_nobody_used_it_costs_one_request(
    handle, run, postgres_server
):
    handle.write(put(APPLE, b"0"))
    end = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND"
        " datname = 'adjunct'"
    )
    postgres_server.execute(end)
    with pytest.raises(TableUnavailableError):
        handle.get(APPLE)
    handle.write(put(APPLE, b"1"))
    postgres_server.execute(end)
    request = Request.of([put(APPLE, b"2")])
    with pytest.raises(ReplyLostError):  # nobody knows whether it was sent
        handle.send(request)
    handle.send(request, repeated=True)
    assert handle.stored() == {APPLE: (request.versions[0], b"2")}


def test_a_server_that_is_out_of_reach_has_done_nothing(segment_store, table, run, postgres_server):
    with TcpProxy(postgres_server.port).running() as proxy:
        connect = {**segment_store.backend().connect, "port": str(proxy.port)}
        handle = Handle(PostgresSegments(connect=connect).open(table, 0), run)
        proxy.refuse()
        for work in (lambda: handle.write(put(APPLE)), lambda: handle.get(APPLE)):
            with pytest.raises(TableUnavailableError):
                work()
        proxy.accept()
        handle.write(put(APPLE, b"1"))
        run(handle.segment.close())


def test_as_many_requests_run_at_a_time_as_there_are_connections(
    segment_store, table, bare, run, postgres_server
):
    backend = PostgresSegments(connect=segment_store.backend().connect, connections=3)
    segments = [backend.open(table, partition) for partition in range(3)]
    handle = Handle(segments[0], run)
    handle.write(put(APPLE, b"0"), put(PEAR, b"0"))
    lock(bare, table, APPLE)
    lock(bare, table, PEAR)

    async def work() -> list[Any]:
        requests = [Request.of([put(key, b"1")]) for key in (APPLE, PEAR)]
        writes = [
            asyncio.ensure_future(segments[0].apply(request.changes, request.token))
            for request in requests
        ]
        answers = await asyncio.gather(*(segment.get([APPLE, PEAR]) for segment in segments * 3))
        assert not any(write.done() for write in writes)
        bare.rollback()
        await asyncio.gather(*writes)
        await asyncio.gather(*(segment.close() for segment in segments))
        return answers

    assert len(run(work())) == 9
    assert handle.value(APPLE) == handle.value(PEAR) == b"1"
    run(handle.segment.close())


def test_people_who_look_at_the_server_find_the_tables_name(table, postgres_server):
    comment = f"SELECT obj_description('{rows_of(table)}'::regclass)"
    assert postgres_server.execute(comment) == [
        (f"entries of key-value table {table.scope}/{table.name}",)
    ]


def test_nothing_is_left_of_a_table_that_was_deleted(backend, postgres_server):
    table = new_table_id()
    backend.create(table, 3)
    backend.seal(table, 3)
    backend.delete(table, 3)
    for query in (
        "SELECT FROM pg_class WHERE relname LIKE",
        "SELECT FROM pg_proc WHERE proname LIKE",
    ):
        assert postgres_server.execute(f"{query} '%{table.incarnation}%'") == []


def test_a_schema_that_is_missing_and_a_login_that_is_refused_are_reported(
    segment_store, postgres_server, monkeypatch
):
    missing = PostgresSegments(connect=segment_store.backend().connect, schema="nowhere")
    with pytest.raises(TableAccessError, match="nowhere"):
        missing.create(new_table_id(), 1)
    monkeypatch.setenv("KEY_VALUES_DSN", postgres_server.dsn("guarded", "wrong-secret"))
    guarded = PostgresSegments(dsn_env="KEY_VALUES_DSN")
    with pytest.raises(TableAccessError, match="rejected the login") as refused:
        guarded.create(new_table_id(), 1)
    place = guarded.location(new_table_id(), 1)
    for text in (str(refused.value), repr(guarded), str(guarded.to_dict()), place):
        assert "wrong-secret" not in text
    assert place.startswith(
        f"postgresql://127.0.0.1:{postgres_server.port}/adjunct, table public.kvt_"
    )


def test_what_can_be_no_setting_is_refused():
    with pytest.raises(ConfigurationError) as caught:
        PostgresSegments(connections=0)
    assert caught.value.argument == "connections"
    with pytest.raises(ConfigurationError) as caught:
        PostgresSegments(connect={"password": "x"})
    assert caught.value.argument == "password"
    for dsn in ("postgresql://me:hidden@there/db", "host=there password = hidden"):
        with pytest.raises(ConfigurationError) as refused:
            PostgresSegments(connect={"dbname": dsn})
        assert refused.value.argument == "dbname"
        assert "hidden" not in str(refused.value)
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError) as caught:
            PostgresSegments(request_timeout=seconds)
        assert caught.value.argument == "request_timeout"
        with pytest.raises(ConfigurationError) as caught:
            PostgresSegments(horizon=seconds)
        assert caught.value.argument == "horizon"
    with pytest.raises(ConfigurationError) as caught:
        PostgresSegments(dsn_env="NOT_SET").create(new_table_id(), 1)
    assert caught.value.setting == "NOT_SET"

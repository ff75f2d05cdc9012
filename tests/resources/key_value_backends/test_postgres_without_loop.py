"""Blocking tables in PostgreSQL, which wait in the thread of whoever asks."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from dagster_adjunct.resources.key_value_backends.postgres import PostgresSegments
from tests.resources.key_value_backends.blocking_counts import (
    Counts,
    count_up,
    count_up_in_a_child,
    counts_in,
)
from tests.resources.key_value_backends.segment_stores import SegmentStore, postgres
from tests.servers.tcp_proxy import TcpProxy

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def segment_store(request, tmp_path_factory) -> SegmentStore:
    return postgres(request, tmp_path_factory.mktemp("segments"))


@pytest.fixture
def counts(backend, table) -> Iterator[Counts]:
    with counts_in(backend, table) as counts:
        yield counts


def connected(server: Any) -> int:
    """Return how many clients are connected; the server's own workers, such as those that
    vacuum, are there too.
    """
    clients = "datname = 'adjunct' AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    return int(server.execute(f"SELECT count(*) FROM pg_stat_activity WHERE {clients}")[0][0])


def test_threads_share_few_connections_and_no_change_is_lost(segment_store, table, postgres_server):
    before = connected(postgres_server)
    threads = set(threading.enumerate())
    with counts_in(
        PostgresSegments(connect=segment_store.backend().connect, connections=2), table
    ) as counts:
        counts.put("k", 0)
        assert set(threading.enumerate()) == threads  # none has an event loop
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda _: [count_up(counts, "k") for _ in range(10)], range(6)))
        assert counts.get("k").value == 60
        assert 1 <= connected(postgres_server) - before <= 2
    deadline = time.monotonic() + 240
    while connected(postgres_server) > before:  # the server takes a moment to notice
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_child_of_the_process_and_the_process_both_go_on(counts):
    counts.put("k", 1)
    count_up_in_a_child(counts, "k")
    assert counts.get("k").value == 2
    count_up(counts, "k")
    assert counts.get("k").value == 3


def test_a_write_whose_reply_was_lost_is_no_conflict(segment_store, table, postgres_server):
    with TcpProxy(postgres_server.port).running() as proxy:
        backend = PostgresSegments(
            connect={**segment_store.backend().connect, "port": str(proxy.port)}
        )
        with counts_in(backend, table) as counts:
            version = counts.put_if_absent("lost", 1)
            for kind in ("lost-after", "lost-before"):
                proxy.next(kind, holding=b"lost")
                version = counts.replace("lost", 2, version)
            assert counts.get("lost").version == version
        assert proxy.befallen == ["lost-after", "lost-before"]


def test_who_is_interrupted_is_free_and_leaves_no_lock_behind(counts, table, postgres_server):
    counts.put("k", 1)
    with psycopg.connect(postgres_server.dsn()) as bare:
        bare.execute(f"SELECT FROM kvt_{table.incarnation} FOR UPDATE")  # type: ignore[call-overload]
        interrupting = signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupt = threading.Timer(
            0.3, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]
        )
        interrupt.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                counts.put("k", 2)
        finally:
            signal.signal(signal.SIGINT, interrupting)
        deadline = time.monotonic() + 240
        while postgres_server.execute(
            "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert counts.get("k").value == 1
    count_up(counts, "k")
    assert counts.get("k").value == 2

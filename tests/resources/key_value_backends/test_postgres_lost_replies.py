"""Writes to PostgreSQL whose replies are lost: one that happened is found, one that did not is
done once, or never.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random

import psycopg
import pytest

from dagster_adjunct.key_value import KeyValueTable, KeyValueTableConfiguration, TextSerializer
from dagster_adjunct.resources.errors import TableUnavailableError
from dagster_adjunct.resources.key_value.segment import (
    ConditionsFailed,
    ReplyLostError,
    SegmentChange,
    StoredEntry,
)
from dagster_adjunct.resources.key_value_backends.postgres import PostgresSegments
from tests.resources.key_value_backends.segment_handle import (
    Handle,
    Request,
    Stored,
    insert,
    of,
    put,
    remove,
    replace,
    surely,
)
from tests.resources.key_value_backends.segment_stores import (
    SegmentStore,
    postgres,
    postgres_without_loop,
)
from tests.servers.tcp_proxy import TcpProxy

pytestmark = pytest.mark.server

KEY, NEW, OTHER = of(b"the key"), of(b"the new key"), of(b"another key")
KINDS = [
    "put",
    "insert",
    "replace",
    "remove",
    "remove of a version",
    "batch",
    "batch of removals",
    "transaction",
]
CONDITIONAL = ["insert", "replace", "remove of a version", "batch", "transaction"]


def request_of(kind: str, version: bytes) -> Request:
    """Return a request about KEY, which has this version, or NEW, which is not there."""
    changes: dict[str, list[SegmentChange]] = {
        "put": [put(KEY, b"ours")],
        "insert": [insert(NEW, b"ours")],
        "replace": [replace(KEY, version, b"ours")],
        "remove": [remove(KEY)],
        "remove of a version": [remove(KEY, version)],
        "batch": [insert(NEW, b"ours"), replace(KEY, version, b"ours")],
        "batch of removals": [remove(NEW), remove(OTHER)],
        # A key that is not there is removed beside one that is, and has to be held meanwhile.
        "transaction": [insert(NEW, b"ours"), remove(KEY, version), remove(OTHER)],
    }
    return Request.of(changes[kind])


def after(before: Stored, request: Request) -> Stored:
    """Return what is stored once a request is done whose conditions hold."""
    stored = dict(before)
    for change in request.changes:
        stored.pop(change.key, None)
        if change.value is not None:
            stored[change.key] = (change.version, change.value)
    return stored


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(postgres, id="in a loop"),
        pytest.param(postgres_without_loop, id="in a thread", marks=pytest.mark.long),
    ],
)
def segment_store(request, tmp_path_factory) -> SegmentStore:
    return request.param(request, tmp_path_factory.mktemp("segments"))


@pytest.fixture
def proxy(postgres_server) -> Iterator[TcpProxy]:
    with TcpProxy(postgres_server.port).running() as running:
        yield running


@pytest.fixture
def troubled(segment_store, table, run, proxy) -> Iterator[Handle]:
    """The same segment, reached through the proxy; its statements are prepared."""
    handle = Handle(behind(proxy, segment_store).open(table, 0), run)
    for kind in KINDS:
        handle.write(put(KEY))
        [entry] = handle.get(KEY)
        handle.send(request_of(kind, entry.version))
        handle.write(remove(NEW))
    handle.write(remove(KEY))
    yield handle
    run(handle.segment.close())


def behind(proxy: TcpProxy, store: SegmentStore) -> PostgresSegments:
    backend = store.backend()
    return type(backend)(connect={**backend.connect, "port": str(proxy.port)})


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_whose_reply_was_lost_is_found_also_after_another_writers(
    kind, handle, troubled, proxy
):
    [version] = handle.write(put(KEY, b"before"))
    request = request_of(kind, version)
    expected = after(handle.stored(), request)
    proxy.next("lost-after", holding=b"COMMIT" if kind == "transaction" else request.changes[0].key)
    with pytest.raises(ReplyLostError):
        troubled.send(request)
    assert handle.stored() == expected
    handle.write(put(KEY, b"theirs"), put(NEW, b"theirs"))
    theirs = handle.stored()
    for _ in range(2):
        troubled.send(request, repeated=True)
        assert handle.stored() == theirs


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_that_never_arrived_is_done_by_its_first_repeat(kind, handle, troubled, proxy):
    [version] = handle.write(put(KEY, b"before"))
    request = request_of(kind, version)
    before = handle.stored()
    proxy.next("lost-before", holding=request.changes[0].key)
    with pytest.raises(ReplyLostError):
        troubled.send(request)
    assert handle.stored() == before
    troubled.send(request, repeated=True)
    assert handle.stored() == after(before, request)
    handle.write(put(KEY, b"theirs"), put(NEW, b"theirs"))
    theirs = handle.stored()
    troubled.send(request, repeated=True)
    assert handle.stored() == theirs


@pytest.mark.parametrize("kind", CONDITIONAL)
def test_after_a_repeat_with_a_failed_condition_a_late_first_attempt_does_nothing(kind, handle):
    [version] = handle.write(put(KEY, b"before"))
    request = request_of(kind, version)
    theirs = dict(
        zip((KEY, NEW), handle.write(put(KEY, b"theirs"), put(NEW, b"theirs")), strict=True)
    )
    for _ in range(2):
        with pytest.raises(ConditionsFailed) as refused:
            handle.send(request, repeated=True)
        conditional = [
            (place, change)
            for place, change in enumerate(request.changes)
            if change.expected in (version, insert(KEY)[3])
        ]
        assert refused.value.found == {place: theirs[change.key] for place, change in conditional}
    handle.write(remove(KEY), remove(NEW))
    # The condition of the insert holds again; of the others no version comes back.
    with pytest.raises(ReplyLostError if kind == "insert" else ConditionsFailed):
        handle.send(request)
    assert handle.stored() == {}


# which waits for nobody
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "batch of removals"])
def test_a_first_attempt_that_still_waits_for_a_lock_and_its_repeat_are_done_once(
    kind, segment_store, table, handle, troubled, proxy, postgres_server
):
    [version] = handle.write(put(KEY, b"before"))
    request = request_of(kind, version)
    before = handle.stored()
    rows = f"kvt_{table.incarnation}"

    def in_thread(through: TcpProxy | None, repeated: bool) -> None:
        with asyncio.Runner() as runner:
            backend = segment_store.backend() if through is None else behind(through, segment_store)
            segment = backend.open(table, 0)
            try:
                runner.run(segment.apply(request.changes, request.token, repeated=repeated))
            finally:
                runner.run(segment.close())

    with psycopg.connect(postgres_server.dsn()) as bare, ThreadPoolExecutor(2) as pool:
        # As long as this is not settled nobody can change KEY, or insert NEW.
        bare.execute(f"SELECT FROM {rows} WHERE address = %b FOR UPDATE", (bytes(4) + KEY,))  # type: ignore[call-overload]
        bare.execute(f"INSERT INTO {rows} VALUES (%b, '', '')", (bytes(4) + NEW,))  # type: ignore[call-overload]
        first = pool.submit(in_thread, proxy, False)
        waiting(postgres_server, 1)
        proxy.cut()
        with pytest.raises(ReplyLostError):
            first.result(60)
        repeat = pool.submit(in_thread, None, True)
        waiting(postgres_server, 2)
        bare.rollback()
        repeat.result(60)
    assert handle.stored() == after(before, request)
    handle.write(put(KEY, b"theirs"), put(NEW, b"theirs"))
    theirs = handle.stored()
    time.sleep(0.15)  # the first attempt, if the server has not ended it, ends now
    handle.send(request, repeated=True)
    assert handle.stored() == theirs


def surely_read(handle: Handle, *keys: bytes) -> list[StoredEntry | None]:
    while True:
        with suppress(TableUnavailableError):
            return handle.get(*keys)


def waiting(server, number: int) -> None:
    deadline = time.monotonic() + 240
    while (
        server.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")[0][0]
        < number
    ):
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    "seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
def test_transfers_are_exact_though_requests_and_replies_are_lost(
    seed, segment_store, handle, table, proxy
):
    """Accounts vanish when they are empty, and come back: inserts, replaces and removals, four
    writers at once.
    """
    accounts = [of(b"account %d" % number) for number in range(5)]
    handle.write(*(insert(account, b"10") for account in accounts))
    chance = Random(seed)
    proxy.choose = lambda request: (
        chance.choice(["lost-before", "lost-after"])
        if b"account" in request and chance.random() < 0.1
        else None
    )

    def writer(number: int) -> int:
        random, moved = Random(seed * 10 + number), 0
        with asyncio.Runner() as runner:
            own = Handle(behind(proxy, segment_store).open(table, 0), runner.run)
            while moved < 25:
                source, target = random.sample(accounts, 2)
                [paying, paid] = surely_read(own, source, target)
                if paying is None:
                    continue
                amount = random.choice([1, int(paying.value)])
                left = int(paying.value) - amount
                total = amount + (int(paid.value) if paid else 0)
                changes = [
                    (
                        replace(source, paying.version, b"%d" % left)
                        if left
                        else remove(source, paying.version)
                    ),
                    (
                        replace(target, paid.version, b"%d" % total)
                        if paid
                        else insert(target, b"%d" % total)
                    ),
                ]
                try:
                    surely(own, Request.of(changes))
                except ConditionsFailed:
                    continue
                moved += 1
            runner.run(own.segment.close())
        return moved

    with ThreadPoolExecutor(4) as pool:
        moved = list(pool.map(writer, range(4)))
    assert moved == [25] * 4
    assert {"lost-before", "lost-after"} <= set(proxy.befallen)
    assert sum(int(value or 0) for _, value in handle.stored().values()) == 50


def test_a_write_without_an_answer_is_looked_for_before_its_horizon_is_over(
    segment_store, table, proxy
):
    backend = type(segment_store.backend())(
        connect={**segment_store.backend().connect, "port": str(proxy.port)}, horizon=3.0
    )
    key_values = KeyValueTable(
        table, KeyValueTableConfiguration(1), backend, TextSerializer(), TextSerializer()
    )
    proxy.next("hangs", holding=b"patience")

    async def write() -> None:
        async with key_values:
            version = await key_values.put_if_absent("patience", "1")
            entry = await key_values.get("patience")
            assert entry is not None
            assert entry.version == version

    asyncio.run(write())
    assert proxy.befallen == ["hangs"]

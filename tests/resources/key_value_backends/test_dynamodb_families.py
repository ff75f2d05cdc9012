"""The list of families in DynamoDB Local: those without entries leave it, and no entry is in one
that is not listed.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dagster_adjunct.resources.errors import KeyValueTableSealedError
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    ANYTHING,
    ConditionsFailed,
    KeyRange,
    ReplyLostError,
    SegmentChange,
    TableId,
    TableSegment,
    family_prefix,
    make_version,
    new_token,
    run_without_loop,
    table_key,
)
from dagster_adjunct.resources.key_value_backends import dynamodb, dynamodb_layout
from dagster_adjunct.resources.key_value_backends.dynamodb import DynamoDbSegment, DynamoDbSegments
from dagster_adjunct.resources.key_value_backends.dynamodb_layout import (
    FamilyList,
    SegmentLayout,
    TableCalls,
)
from tests.rounds import rounds
from tests.servers.dynamodb import DynamoDbServer, new_name
from tests.servers.tcp_proxy import TcpProxy

WRITE = b"TransactWriteItems"


@pytest.fixture
def backend(dynamodb: DynamoDbServer) -> DynamoDbSegments:
    return DynamoDbSegments()


@pytest.fixture
def table(backend: DynamoDbSegments) -> Iterator[TableId]:
    made = TableId("tests", new_name(), random.randbytes(8).hex())
    backend.create(made, 1)
    yield made
    backend.delete(made, 1)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each family without entries is worth a term, and nothing has to settle: the server does one
    thing at a time.

    Who writes looks at the list only where a test does: else one write in some dozen would make
    requests of its own.
    """
    monkeypatch.setattr(dynamodb_layout, "PURGE_AFTER", 1_000_000_000)
    monkeypatch.setattr(dynamodb_layout, "SETTLING_SECONDS", 0)
    monkeypatch.setattr(dynamodb_layout, "MIN_EMPTY_FAMILIES", 1)
    for module in (dynamodb_layout, dynamodb):
        monkeypatch.setattr(module, "GATES", 2)


class Interrupted(TableCalls):
    """Calls of which one, counted from 0, is held up until something else was done."""

    def __init__(
        self, table: TableId, at: int = -1, meanwhile: Callable[[], Awaitable[Any]] | None = None
    ) -> None:
        backend = DynamoDbSegments()
        super().__init__(table, name_of(backend, table), backend._connect, 1)
        self._at, self._meanwhile = at, meanwhile
        self.made = 0

    async def call(self, do: Callable[[Any], Any]) -> Any:
        number, self.made = self.made, self.made + 1
        if number == self._at and self._meanwhile is not None:
            await self._meanwhile()
        return await super().call(do)

    async def at_once(self, asked: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
        return [await one for one in asked]


LAYOUT = SegmentLayout(0)


def name_of(backend: DynamoDbSegments, table: TableId) -> str:
    return backend.location(table, 0).split("table ")[1].split(",")[0]


def key(family: str, name: bytes = b"k") -> bytes:
    return table_key(family_prefix(family), name)


async def write(
    segment: TableSegment,
    at: bytes,
    value: bytes | None = b"v",
    expected: Any = ANYTHING,
    *,
    token: bytes | None = None,
    repeated: bool = False,
) -> bytes:
    token = token or new_token()
    version = make_version(token, 0)
    await segment.apply([SegmentChange(at, value, version, expected)], token, repeated=repeated)
    return version


async def keys_of(segment: TableSegment) -> list[bytes]:
    return [*(await segment.page(KeyRange(), 100_000, values=False)).keys]


def listed(server: DynamoDbServer, table: TableId) -> set[bytes]:
    """Return the families in the list, as a bare client sees it."""
    stretch = LAYOUT.families(KeyRange())
    assert stretch is not None
    client, found = server.client(), set[bytes]()
    asked: dict[str, Any] = {
        "TableName": name_of(DynamoDbSegments(), table),
        "KeyConditionExpression": "h = :h AND s >= :a",
        "ExpressionAttributeValues": {":h": {"B": stretch.hash_key}, ":a": {"B": stretch.lowest}},
        "ConsistentRead": True,
    }
    while True:
        answer = client.query(**asked)
        found |= {item["s"]["B"] for item in answer["Items"]}
        if "LastEvaluatedKey" not in answer:
            return found
        asked["ExclusiveStartKey"] = answer["LastEvaluatedKey"]


def test_families_of_jobs_that_are_over_leave_the_list_and_those_with_entries_stay(
    backend: DynamoDbSegments,
    table: TableId,
    dynamodb: DynamoDbServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dynamodb_layout, "SETTLING_SECONDS", 0)
    monkeypatch.setattr(dynamodb_layout, "PURGE_AFTER", 16)
    monkeypatch.setattr(dynamodb_layout, "FAMILIES_PER_PURGE", 64)
    monkeypatch.setattr(dynamodb_layout, "MIN_EMPTY_FAMILIES", 8)
    lasting = [key(f"customer-{number}") for number in range(20)]
    segment = backend.open(table, 0)
    for one in lasting:
        run_without_loop(write(segment, one))
    for number in range(110):
        run_without_loop(write(segment, key(f"job-{number:05d}")))
        run_without_loop(write(segment, key(f"job-{number:05d}"), None))
        if number == 80:  # the process is another one from time to time
            segment = backend.open(table, 0)
    assert run_without_loop(keys_of(segment)) == sorted(lasting)
    families = listed(dynamodb, table)
    assert {family_prefix(f"customer-{number}") for number in range(20)} <= families
    assert len(families) <= 20 + 4 * 16
    run_without_loop(segment.close())


def test_an_ordinary_put_is_one_request_also_after_families_were_forgotten(
    backend: DynamoDbSegments, table: TableId, eager: None
) -> None:
    calls = Interrupted(table)

    async def work() -> None:
        segment = DynamoDbSegment(calls, LAYOUT)
        await write(segment, key("f"))
        await write(segment, key("gone"))
        await write(segment, key("gone"), None)
        for _ in range(2):
            await FamilyList(calls, LAYOUT).purge()
        await write(segment, key("f"))  # learns of the term
        before = calls.made
        for number in range(5):
            await write(segment, key("f", b"%d" % number))
        assert calls.made == before + 5
        await calls.close()

    asyncio.run(work())


@pytest.mark.rounds
def test_no_entry_is_missed_if_an_insert_precedes_any_request_of_a_purge(
    backend: DynamoDbSegments, table: TableId, dynamodb: DynamoDbServer, eager: None
) -> None:
    outcomes = set()

    async def interleave(at: int) -> bool:
        """Insert before the request `at` into a family that the writer knows by heart; False
        where there is none.
        """
        family = f"f{at:03d}"
        writer = backend.open(table, 0)
        await write(writer, key(family))
        await write(writer, key(family), None)
        calls = Interrupted(table, at, lambda: write(writer, key(family), b"v", ABSENT))
        for _ in range(2):  # the first one moves the gates, the second one takes families away
            await FamilyList(calls, LAYOUT).purge()
        interrupted = calls.made > at
        outcomes.add(family_prefix(family) in listed(dynamodb, table))
        assert (key(family) in await keys_of(writer)) is interrupted
        await write(writer, key(family), None)
        await calls.close()
        await writer.close()
        return interrupted

    async def work() -> int:
        at = 0
        while await interleave(at):
            at += rounds(2, 1)
        return at

    assert asyncio.run(work()) >= 10
    assert outcomes == {True, False}


@pytest.mark.rounds
def test_no_entry_is_missed_if_a_purge_precedes_any_request_of_an_insert(
    backend: DynamoDbSegments, table: TableId, dynamodb: DynamoDbServer, eager: None
) -> None:

    async def work() -> None:
        for by_heart in (False, True):
            for at in range(0, 6, rounds(2, 1)):
                family = f"f{at}-{by_heart}"
                seen = set()
                plain = Interrupted(table)

                async def forget(
                    plain: Interrupted = plain, family: str = family, seen: set = seen
                ) -> None:
                    for _ in range(2):
                        await FamilyList(plain, LAYOUT).purge()
                    seen.add(family_prefix(family) in listed(dynamodb, table))

                calls = Interrupted(table, -1, forget)
                segment = DynamoDbSegment(calls, LAYOUT)
                await write(segment, key("other" if not by_heart else family))
                await write(segment, key("other" if not by_heart else family), None)
                calls._at = calls.made + at
                version = await write(segment, key(family), b"v", ABSENT)
                assert seen <= {False}
                assert await keys_of(segment) == [key(family)]
                await write(segment, key(family), None, version)
                await calls.close()
                await plain.close()

    asyncio.run(work())


def test_a_write_that_learns_a_newer_term_is_sent_again_after_a_slow_connect(
    backend: DynamoDbSegments, table: TableId, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that has much to do: a handle's first request took longer than a write may
    meet others.
    """

    async def work() -> None:
        old = Interrupted(table)
        segment = DynamoDbSegment(old, LAYOUT)
        await write(segment, key("gone"))
        await write(segment, key("gone"), None)
        for _ in range(2):
            await FamilyList(old, LAYOUT).purge()
        calls = Interrupted(table, 0, lambda: asyncio.sleep(0.3))
        monkeypatch.setattr(dynamodb, "PATIENCE", 0.2)
        await DynamoDbSegment(calls, LAYOUT).apply(
            [SegmentChange(key("f"), b"v", make_version(new_token(), 0), ANYTHING)],
            new_token(),
            repeated=False,
        )
        assert await keys_of(segment) == [key("f")]
        await calls.close()
        await old.close()

    asyncio.run(work())


def test_families_are_purged_only_after_writes_past_a_gate_have_settled(
    backend: DynamoDbSegments,
    table: TableId,
    dynamodb: DynamoDbServer,
    eager: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Interrupted(table)

    async def work() -> None:
        segment = DynamoDbSegment(calls, LAYOUT)
        await write(segment, key("gone"))
        await write(segment, key("gone"), None)
        monkeypatch.setattr(dynamodb_layout, "SETTLING_SECONDS", 60)
        for _ in range(3):
            await FamilyList(calls, LAYOUT).purge()
        assert listed(dynamodb, table) == {family_prefix("gone")}
        monkeypatch.setattr(dynamodb_layout, "SETTLING_SECONDS", 0)
        await FamilyList(calls, LAYOUT).purge()
        assert listed(dynamodb, table) == set()
        await calls.close()

    asyncio.run(work())


@pytest.mark.parametrize("trouble", ["lost-before", "lost-after"])
def test_a_lost_write_is_applied_once_though_families_are_purged_meanwhile(
    backend: DynamoDbSegments, table: TableId, dynamodb: DynamoDbServer, eager: None, trouble: Any
) -> None:
    token = new_token()

    async def work(segment: TableSegment, proxy: TcpProxy) -> None:
        await write(segment, key("f"))
        await write(segment, key("f"), None)
        proxy.next(trouble, holding=WRITE)
        with pytest.raises(ReplyLostError):
            await write(segment, key("f"), b"mine", ABSENT, token=token)
        calls = Interrupted(table)
        other = DynamoDbSegment(calls, LAYOUT)
        await write(other, key("gone"))
        await write(other, key("gone"), None)
        for _ in range(2):
            await FamilyList(calls, LAYOUT).purge()
        assert family_prefix("gone") not in listed(dynamodb, table)
        await write(segment, key("learns"))
        if trouble == "lost-after":
            await write(other, key("learns"))
            # who has not sent it does not know its term, and does not guess
            with pytest.raises(ReplyLostError):
                await write(other, key("f"), b"mine", ABSENT, token=token, repeated=True)
        version = await write(segment, key("f"), b"mine", ABSENT, token=token, repeated=True)
        (found,) = await segment.get([key("f")])
        assert found is not None
        assert (found.version, found.value) == (version, b"mine")
        assert await keys_of(segment) == [key("f"), key("learns")]
        with pytest.raises(ConditionsFailed):
            await write(segment, key("f"), b"another", ABSENT)
        await segment.close()
        await calls.close()

    with TcpProxy(dynamodb.port).running() as proxy:
        through = DynamoDbSegments(endpoint_url=f"http://127.0.0.1:{proxy.port}")
        asyncio.run(work(through.open(table, 0), proxy))


def test_a_sealed_table_stays_sealed_when_families_are_forgotten(
    backend: DynamoDbSegments, table: TableId, dynamodb: DynamoDbServer, eager: None
) -> None:
    calls = Interrupted(table)

    async def work() -> None:
        segment = DynamoDbSegment(calls, LAYOUT)
        for _ in range(2):
            await write(segment, key("gone"))
            await write(segment, key("gone"), None)
            await FamilyList(calls, LAYOUT).purge()
        await write(segment, key("kept"))
        await asyncio.to_thread(backend.seal, table, 1)
        for _ in range(2):
            await FamilyList(calls, LAYOUT).purge()
        with pytest.raises(KeyValueTableSealedError) as caught:
            await write(segment, key("kept"))
        assert caught.value.scope == "tests"
        assert await keys_of(segment) == [key("kept")]
        await calls.close()

    asyncio.run(work())


def test_writers_and_those_who_forget_at_once_lose_no_entry(
    backend: DynamoDbSegments, table: TableId, dynamodb: DynamoDbServer, eager: None
) -> None:
    over = threading.Event()

    def come_and_go(number: int) -> None:
        """Insert a key into families that others use too, look for it, remove it."""
        chosen, segment = random.Random(number), backend.open(table, 0)
        for _ in range(25):
            mine = key(f"f{chosen.randrange(3)}", b"%d" % number)
            version = run_without_loop(write(segment, mine, b"v", ABSENT))
            assert mine in run_without_loop(keys_of(segment))
            run_without_loop(write(segment, mine, None, version))

    def forget() -> None:
        segment = backend.open(table, 0)
        while not over.is_set():
            run_without_loop(FamilyList(segment._calls, LAYOUT).purge())  # type: ignore[attr-defined]

    with ThreadPoolExecutor(6) as pool:
        forgetting = [pool.submit(forget) for _ in range(2)]
        writing = [pool.submit(come_and_go, number) for number in range(4)]
        try:
            for one in writing:
                one.result(120)
        finally:
            over.set()
        for one in forgetting:
            one.result(30)
    segment = backend.open(table, 0)
    assert run_without_loop(keys_of(segment)) == []
    answer = dynamodb.client().get_item(TableName=name_of(backend, table), Key=LAYOUT.progress())
    assert int(answer["Item"]["n"]["N"]) > 2
    run_without_loop(segment.close())

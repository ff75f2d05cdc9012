"""Key-value tables in DynamoDB Local, each compared with a dict or with what a bare client sees."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    KeyValueTableNotFoundError,
    KeyValueTableSealedError,
    TableAccessError,
    TableUnavailableError,
)
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    ANYTHING,
    ConditionsFailed,
    KeyRange,
    ReplyLostError,
    SegmentChange,
    TableId,
    TableSegment,
    backend_from,
    describe_backend,
    family_prefix,
    family_range,
    make_version,
    new_token,
    table_key,
)
from dagster_adjunct.resources.key_value_backends.dynamodb import DynamoDbSegments
from tests.servers.dynamodb import DynamoDbServer, new_name
from tests.servers.tcp_proxy import TcpProxy

WRITE = b"TransactWriteItems"


@pytest.fixture
def backend(dynamodb: DynamoDbServer) -> DynamoDbSegments:
    return DynamoDbSegments()


@pytest.fixture
def table(backend: DynamoDbSegments) -> Iterator[TableId]:
    made = new_table()
    backend.create(made, 2)
    yield made
    backend.delete(made, 2)


@pytest.fixture
def proxy(dynamodb: DynamoDbServer) -> Iterator[TcpProxy]:
    with TcpProxy(dynamodb.port).running() as running:
        yield running


def behind(proxy: TcpProxy, **settings: Any) -> DynamoDbSegments:
    return DynamoDbSegments(endpoint_url=f"http://127.0.0.1:{proxy.port}", **settings)


def new_table() -> TableId:
    return TableId("tests", new_name(), random.randbytes(8).hex())


def run(segment: TableSegment, work: Callable[[TableSegment], Awaitable[Any]]) -> Any:
    async def all_of_it() -> Any:
        try:
            return await work(segment)
        finally:
            await segment.close()

    return asyncio.run(all_of_it())


def put(
    key: bytes, value: bytes | None = b"", expected: Any = ANYTHING, *, family: str | None = "f"
) -> SegmentChange:
    whole = table_key(family_prefix(family) if family else b"", key)
    return SegmentChange(whole, value, b"", expected)


async def write(
    segment: TableSegment,
    *changes: SegmentChange,
    token: bytes | None = None,
    repeated: bool = False,
):
    token = token or new_token()
    made = [
        change._replace(version=make_version(token, place)) for place, change in enumerate(changes)
    ]
    await segment.apply(made, token, repeated=repeated)
    return [change.version for change in made]


async def every_key(segment: TableSegment, within: KeyRange, limit: int) -> list[bytes]:
    keys: list[bytes] = []
    while page := await segment.page(within, limit, values=False):
        assert len(page) <= limit
        keys += page.keys
        within = within.after(keys[-1])
    return keys


def test_a_table_is_created_once_and_does_not_exist_after_its_deletion(
    backend: DynamoDbSegments, dynamodb: DynamoDbServer
) -> None:
    table = TableId("s" * 255, "t" * 255, random.randbytes(8).hex())
    backend.create(table, 1)
    kept = run(backend.open(table, 0), lambda segment: write(segment, put(b"k", b"v")))
    backend.create(table, 1)
    (entry,) = run(backend.open(table, 0), lambda segment: segment.get([put(b"k").key]))
    assert (entry.version, entry.value) == (kept[0], b"v")
    (name,) = [
        name for name in dynamodb.client().list_tables()["TableNames"] if table.incarnation in name
    ]
    assert name.startswith("adjunct-sss")
    assert "-ttt" in name
    assert len(name) == 255
    assert name in backend.location(table, 0)
    segment = backend.open(table, 0)
    backend.delete(table, 1)
    backend.delete(table, 1)
    assert not [
        name for name in dynamodb.client().list_tables()["TableNames"] if table.incarnation in name
    ]
    for work in (
        lambda segment: write(segment, put(b"k")),
        lambda segment: segment.get([put(b"k").key]),
        lambda segment: segment.page(KeyRange(), 1, values=True),
    ):
        with pytest.raises(KeyValueTableNotFoundError):
            run(segment, work)


def test_partitions_and_tables_do_not_see_each_other(
    backend: DynamoDbSegments, table: TableId
) -> None:
    run(
        backend.open(table, 0),
        lambda segment: write(segment, put(b"k", b"0"), put(b"k", b"0", family=None)),
    )
    other = backend.open(table, 1)
    assert run(other, lambda segment: segment.get([put(b"k").key, put(b"k", family=None).key])) == [
        None,
        None,
    ]
    assert run(other, lambda segment: segment.page(KeyRange(), 10, values=True)).entries() == []


FAMILIES = [None, "a", "b", "zz", "ä", "a\0", "aaa", "f" * 1022]
KEYS = [b"", b"\0", b"\0\0", b"\xff", b"\xff" * 1022, b"k", b"k\0", b"key", b"\x80", b"\x01" * 1021]


def test_any_range_of_table_keys_comes_in_their_order_whatever_the_page_size(
    backend: DynamoDbSegments, table: TableId
) -> None:
    chosen = random.Random(5)
    keys = sorted({put(key, family=family).key for family in FAMILIES for key in KEYS})
    bounds = [
        b"",
        b"\0",
        b"\0\0",
        b"\0\1",
        b"\0\2",
        b"\x80\0",
        b"\xff\xff",
        b"\0\1b",
        *chosen.sample(keys, 12),
    ]

    async def work(segment: TableSegment) -> None:
        for start in range(0, len(keys), 40):
            await write(
                segment, *(SegmentChange(key, b"v", b"") for key in keys[start : start + 40])
            )
        for limit in (1, 7, 1000):
            assert await every_key(segment, KeyRange(), limit) == keys
        for start, end in [
            (chosen.choice(bounds), chosen.choice([None, *bounds])) for _ in range(60)
        ]:
            expected = [key for key in keys if key >= start and (end is None or key < end)]
            assert await every_key(segment, KeyRange(start, end), 9) == expected, (start, end)
        for family in FAMILIES[1:]:
            within = family_range(family_prefix(family))
            assert await every_key(segment, within, 3) == sorted(
                put(key, family=family).key for key in KEYS
            )
        # Families whose keys are gone are passed over.
        await write(segment, *(SegmentChange(key, None, b"") for key in keys[1:-1:2]))
        assert await every_key(segment, KeyRange(), 2) == [
            key for key in keys if key not in keys[1:-1:2]
        ]

    run(backend.open(table, 0), work)


def test_more_small_families_than_are_listed_at_once_come_in_their_order(
    backend: DynamoDbSegments, table: TableId
) -> None:
    keys = sorted(put(b"k", family=f"{number:x}").key for number in range(230))

    async def work(segment: TableSegment) -> None:
        for start in range(0, len(keys), 99):
            await write(
                segment, *(SegmentChange(key, b"v", b"") for key in keys[start : start + 99])
            )
        assert [*(await segment.page(KeyRange(), 1000, values=True)).keys] == keys
        assert await every_key(segment, KeyRange(keys[3], keys[-3]), 150) == keys[3:-3]

    run(backend.open(table, 0), work)


def test_changes_under_conditions_do_what_they_do_to_a_dict(
    backend: DynamoDbSegments, table: TableId
) -> None:
    chosen = random.Random(11)
    keys = [
        put(key, family=family).key for family in (None, "f") for key in (b"", b"a", b"b", b"c")
    ]
    model: dict[bytes, tuple[bytes, bytes]] = {}
    past: list[bytes] = [b"never there 1234"]

    async def work(segment: TableSegment) -> None:
        for _ in range(150):
            token = new_token()
            changes = []
            for place, key in enumerate(chosen.sample(keys, chosen.randint(1, 4))):
                held = model[key][0] if key in model else chosen.choice(past)
                expected = chosen.choice(
                    [ANYTHING, ABSENT if key not in model else held, held, chosen.choice(past)]
                )
                value = chosen.choice([None, b"", b"v%d" % place])
                changes.append(SegmentChange(key, value, make_version(token, place), expected))
            failing = {
                place: model[change.key][0] if change.key in model else None
                for place, change in enumerate(changes)
                if (change.expected is ABSENT and change.key in model)
                or (
                    isinstance(change.expected, bytes)
                    and model.get(change.key, (None,))[0] != change.expected
                )
            }
            if failing:
                with pytest.raises(ConditionsFailed) as refused:
                    await segment.apply(changes, token)
                assert refused.value.found == failing
            else:
                await segment.apply(changes, token)
                for change in changes:
                    if change.value is None:
                        model.pop(change.key, None)
                    else:
                        model[change.key] = change.version, change.value
                        past.append(change.version)
        entries = await segment.get([*keys, *keys])
        assert [(e.version, e.value) if e else None for e in entries] == [
            model.get(key) for key in [*keys, *keys]
        ]

    run(backend.open(table, 1), work)


def test_a_thousand_keys_are_read_in_order_with_missing_and_repeated_ones(
    backend: DynamoDbSegments, table: TableId
) -> None:
    keys = [put(b"%d" % number).key for number in range(350)]

    async def work(segment: TableSegment) -> None:
        for start in range(0, 300, 99):
            await write(
                segment,
                *(
                    SegmentChange(key, b"=" + key, b"")
                    for key in keys[start : min(300, start + 99)]
                ),
            )
        asked = random.Random(3).choices(keys, k=1000)
        entries = await segment.get(asked)
        assert [e and e.value for e in entries] == [
            b"=" + key if keys.index(key) < 300 else None for key in asked
        ]
        bare = await segment.get(asked, values=False)
        assert [e and (e.key, e.version, e.value) for e in bare] == [
            e and (e.key, e.version, None) for e in entries
        ]
        assert await segment.get([]) == []

    run(backend.open(table, 0), work)


def test_values_within_the_limits_are_accepted_and_large_ones_make_short_pages(
    backend: DynamoDbSegments, table: TableId
) -> None:
    limits = backend.limits
    family, key = "f" * (limits.family_prefix - 2), b"k" * limits.key
    value = bytes(limits.value)

    async def work(segment: TableSegment) -> None:
        await write(segment, put(key, value, family=family), put(key, value, family=None))
        assert len(put(key, family=family).key) == limits.table_key
        share = limits.request // limits.changes
        many = [table_key(family_prefix("m"), b"%04d" % number) for number in range(limits.changes)]
        await write(segment, *(SegmentChange(one, bytes(share - len(one)), b"") for one in many))
        sizes = []
        within = KeyRange()
        while page := await segment.page(within, 1000, values=True):
            sizes.append(len(page))
            within = within.after(page.keys[-1])
        assert sum(sizes) == limits.changes + 2
        assert max(sizes) < 40
        assert len(await every_key(segment, KeyRange(), 1000)) == limits.changes + 2
        entries = await segment.get([*many, put(key, family=family).key])
        assert len(entries[0].value) == share - len(many[0])
        assert len(entries[-1].value) == limits.value

    run(backend.open(table, 0), work)


def test_nothing_is_written_to_a_sealed_table_though_it_is_read(
    backend: DynamoDbSegments, table: TableId
) -> None:
    segments = [backend.open(table, partition) for partition in range(2)]
    written: dict[int, int] = {0: 0, 1: 0}
    refused = [0]

    async def work(_: TableSegment) -> None:
        async def writer(place: int, number: int) -> None:
            while True:
                try:
                    await write(segments[place], put(b"%d %d" % (number, written[place]), b"v"))
                except KeyValueTableSealedError:
                    refused[0] += 1
                    return
                written[place] += 1

        async def sealing() -> set[bytes]:
            while not all(written.values()):
                await asyncio.sleep(0.01)
            await asyncio.to_thread(backend.seal, table, 2)
            return {
                key for segment in segments for key in await every_key(segment, KeyRange(), 1000)
            }

        writers = [writer(number % 2, number) for number in range(6)]
        *_, sealed = await asyncio.gather(*writers, sealing())
        assert refused == [6]
        assert all(written.values())
        left = {key for segment in segments for key in await every_key(segment, KeyRange(), 1000)}
        assert left == sealed
        backend.seal(table, 2)
        with pytest.raises(KeyValueTableSealedError):
            await write(segments[0], put(b"new", b"v", ABSENT, family="new"))
        with pytest.raises(KeyValueTableSealedError):
            await write(segments[0], put(b"nothing", None), repeated=True)

    run(segments[0], work)


def test_a_write_whose_reply_is_lost_is_known_though_another_wrote_since(
    backend: DynamoDbSegments, table: TableId, proxy: TcpProxy
) -> None:
    token = new_token()

    async def work(segment: TableSegment) -> None:
        await write(segment, put(b"before"))
        proxy.next("lost-after", holding=WRITE)
        with pytest.raises(ReplyLostError):
            await write(segment, put(b"k", b"mine", ABSENT), token=token)
        direct = backend.open(table, 0)
        (version,) = await write(direct, put(b"k", b"theirs"))
        await write(segment, put(b"k", b"mine", ABSENT), token=token, repeated=True)
        (entry,) = await direct.get([put(b"k").key])
        assert (entry.version, entry.value) == (version, b"theirs")
        await direct.close()

    run(behind(proxy).open(table, 0), work)


@pytest.mark.parametrize("trouble", ["lost-before", "lost-after"])
def test_a_write_whose_reply_is_lost_again_and_again_is_applied_once(
    backend: DynamoDbSegments, table: TableId, proxy: TcpProxy, trouble: Any
) -> None:
    token = new_token()

    async def work(segment: TableSegment) -> None:
        (first,) = await write(segment, put(b"k"))
        proxy.next(trouble, trouble, holding=WRITE)
        change = put(b"k", b"mine", first)
        with pytest.raises(ReplyLostError):
            await write(segment, change, token=token)
        with pytest.raises(ReplyLostError):
            await write(segment, change, token=token, repeated=True)
        (version,) = await write(segment, change, token=token, repeated=True)
        (entry,) = await segment.get([change.key])
        assert (entry.version, entry.value) == (version, b"mine")

    run(behind(proxy).open(table, 0), work)


def test_a_refusal_that_was_lost_is_reported_when_it_is_asked_for_again(
    backend: DynamoDbSegments, table: TableId, proxy: TcpProxy
) -> None:
    token = new_token()

    async def work(segment: TableSegment) -> None:
        versions = await write(segment, put(b"k"), put(b"l"))
        proxy.next("lost-after", holding=WRITE)
        changes = put(b"k", b"", ABSENT), put(b"l", None, ABSENT), put(b"m")
        with pytest.raises(ReplyLostError):
            await write(segment, *changes, token=token)
        # Also the reply to the request that keeps the first copy from being applied is lost.
        proxy.next(None, "lost-after", holding=WRITE)
        with pytest.raises(ReplyLostError):
            await write(segment, *changes, token=token, repeated=True)
        with pytest.raises(ConditionsFailed) as refused:
            await write(segment, *changes, token=token, repeated=True)
        assert refused.value.found == dict(enumerate(versions))
        assert await segment.get([put(b"m").key]) == [None]

    run(behind(proxy).open(table, 0), work)


def test_a_request_that_comes_late_is_not_applied_after_its_repeat_was_refused(
    backend: DynamoDbSegments, table: TableId, proxy: TcpProxy, dynamodb: DynamoDbServer
) -> None:
    token = new_token()

    async def work(segment: TableSegment) -> None:
        direct = backend.open(table, 0)
        await segment.get([put(b"k").key])
        await write(direct, put(b"k", b"theirs"))
        await write(segment, put(b"other"))
        proxy.hanging = True
        with pytest.raises(ReplyLostError):
            await write(segment, put(b"k", b"mine", ABSENT), token=token)
        with pytest.raises(ConditionsFailed):
            await write(direct, put(b"k", b"mine", ABSENT), token=token, repeated=True)
        await write(direct, put(b"k", None))
        came = proxy.requests
        proxy.hanging = False
        await asyncio.sleep(0.3)
        assert proxy.requests == came
        assert await direct.get([put(b"k").key]) == [None]
        await direct.close()

    run(behind(proxy, read_timeout=5.0).open(table, 0), work)


def test_a_server_out_of_reach_is_reported_as_that_and_nothing_happened(
    proxy: TcpProxy, dynamodb: DynamoDbServer
) -> None:
    backend = behind(proxy)
    table = new_table()
    backend.create(table, 1)

    async def work(segment: TableSegment) -> None:
        await write(segment, put(b"k"))
        proxy.refuse()
        for call in (
            write(segment, put(b"k")),
            segment.get([put(b"k").key]),
            segment.page(KeyRange(), 1, values=True),
        ):
            with pytest.raises(TableUnavailableError):
                await call
        proxy.accept()
        assert len(await segment.page(KeyRange(), 10, values=False)) == 1

    run(backend.open(table, 0), work)
    backend.delete(table, 1)


def test_a_backend_travels_without_secrets_and_refuses_what_can_not_work(
    dynamodb: DynamoDbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_ID", "adjuncttest")
    monkeypatch.setenv("THEIR_SECRET", "hidden-secret")
    backend = DynamoDbSegments(
        region="us-east-1",
        endpoint_url=dynamodb.endpoint,
        credentials_env=("THEIR_ID", "THEIR_SECRET"),
        prefix="p.",
    )
    described = describe_backend(backend)
    again = [backend_from(described), pickle.loads(pickle.dumps(backend))]
    assert [one.to_dict() for one in again] == [backend.to_dict()] * 2
    assert "hidden" not in f"{described}{backend!r}{pickle.dumps(backend)!r}"
    for wrong in ({"prefix": "a/b"}, {"threads": 0}, {"endpoint_url": "http://me:pw@host"}):
        with pytest.raises(ConfigurationError):
            DynamoDbSegments(**wrong)
    monkeypatch.delenv("THEIR_SECRET")
    with pytest.raises(ConfigurationError) as caught:
        backend.create(new_table(), 1)
    assert caught.value.setting == "THEIR_SECRET"
    with pytest.raises((TableAccessError, TableUnavailableError)):
        DynamoDbSegments(endpoint_url="http://127.0.0.1:1").create(new_table(), 1)

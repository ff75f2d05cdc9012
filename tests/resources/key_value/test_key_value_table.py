"""The operations of a table against a plain dictionary, what is refused before it is sent, and
what is said of it.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dagster_adjunct.errors import (
    BatchTooLargeError,
    ConditionsNotMetError,
    ConfigurationError,
    KeyTooLongError,
    KeyValueTableError,
    SerializationError,
    TableAccessError,
    ValueTooLongError,
)
from dagster_adjunct.key_value import (
    BlockingKeyValueTable,
    FailedCondition,
    FunctionSerializer,
    Insert,
    IntegerSerializer,
    KeyValueTable,
    KeyValueTableConfiguration,
    KeyVersion,
    MustBeAbsent,
    MustHaveVersion,
    Put,
    Remove,
    Replace,
    TableEntry,
    TableKey,
    TextSerializer,
)
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.key_value.segment import SegmentLimits, deleted_table_error
from dagster_adjunct.resources.key_value_backends.sqlite import SqliteSegments
from tests.resources.key_value.scripted_segments import ID, ScriptedSegments

Table = BlockingKeyValueTable[str, str]


@pytest.fixture
def backend() -> ScriptedSegments:
    return ScriptedSegments()


@pytest.fixture(params=[False, True], ids=["one after the other", "at once"])
def table(backend: ScriptedSegments, request: pytest.FixtureRequest) -> Any:
    backend.waits = request.param
    with BlockingKeyValueTable(backend.table()) as table:
        yield table


@pytest.mark.parametrize("family", [None, "f"])
def test_one_key_is_written_read_replaced_and_removed(table: Table, family: str | None) -> None:
    assert table.get("k", family=family) is None
    assert not table.exists("k", family=family)
    first = table.put_if_absent("k", "1", family=family)
    assert table.get("k", family=family) == TableEntry(TableKey(family, "k", first), "1")
    second = table.replace("k", "2", first, family=family)
    third = table.put("k", "2", family=family)
    entry = table.get("k", family=family)
    assert entry is not None
    assert (entry.key.key, entry.value, entry.version) == ("k", "2", third)
    assert len({first, second, third}) == 3
    assert table.exists("k", family=family)
    table.remove("k", version=third, family=family)
    assert table.get("k", family=family) is None
    table.remove("k", family=family)
    assert table.put_if_absent("k", "1", family=family) not in (first, second, third)


def test_keys_of_families_and_of_none_are_different_keys(table: Table) -> None:
    table.put("k", "none")
    table.put("k", "a", family="a")
    table.put("k", "b", family="b")
    asked: list[Any] = ["k", TableKey("a", "k"), TableKey("b", "k"), TableKey(None, "k")]
    assert [entry and entry.value for entry in table.get_all(asked)] == ["none", "a", "b", "none"]


def test_a_condition_that_does_not_hold_reports_the_version_found(table: Table) -> None:
    version = table.put("k", "1", family="f")
    table.remove("gone", family="f")
    old = table.replace("k", "2", version, family="f")
    newest = table.put("k", "3", family="f")
    for write, expected in (
        (lambda: table.put_if_absent("k", "4", family="f"), None),
        (lambda: table.replace("k", "4", old, family="f"), old),
        (lambda: table.remove("k", version=version, family="f"), version),
    ):
        with pytest.raises(ConditionsNotMetError) as caught:
            write()
        assert caught.value.failures == (FailedCondition("f", "k", expected, newest),)
        assert (caught.value.scope, caught.value.table) == ("scope", "table")
    with pytest.raises(ConditionsNotMetError) as caught:
        table.replace("gone", "4", old, family="f")
    assert caught.value.failures == (FailedCondition("f", "gone", old, None),)
    assert table.get("k", family="f") == TableEntry(TableKey("f", "k", newest), "3")


def test_a_batch_mixes_changes_and_returns_versions_in_their_order(table: Table) -> None:
    a, b = table.put_all([("a", "1"), ("b", "1")], family="f")
    versions = table.apply(
        [Replace("b", "2", b), Remove("a", a), Insert("c", "1"), Remove("missing"), Put("d", "1")],
        family="f",
    )
    assert [version is None for version in versions] == [False, True, False, True, False]
    entries = table.get_all(["a", "b", "c", "d"], family="f")
    assert [entry and (entry.value, entry.version) for entry in entries] == [
        None,
        ("2", versions[0]),
        ("1", versions[2]),
        ("1", versions[4]),
    ]


def test_a_batch_guards_keys_that_it_does_not_write(table: Table) -> None:
    account = table.put("account", "open", family="f")
    guarded = [MustHaveVersion("account", account), MustBeAbsent("lock")]
    versions = table.apply([Put("log/1", "paid"), *guarded], family="f")
    assert [version is None for version in versions] == [False, True, True]
    assert table.apply(guarded, family="f") == [None, None]
    assert table.get("account", family="f") == TableEntry(TableKey("f", "account", account), "open")
    assert not table.exists("lock", family="f")
    closed, lock = table.put_all([("account", "closed"), ("lock", "mine")], family="f")
    with pytest.raises(ConditionsNotMetError) as caught:
        table.apply([Put("log/2", "paid"), *guarded], family="f")
    assert caught.value.failures == (
        FailedCondition("f", "account", account, closed),
        FailedCondition("f", "lock", None, lock),
    )
    assert not table.exists("log/2", family="f")


def test_a_batch_whose_conditions_do_not_all_hold_changes_nothing_and_names_each(
    table: Table,
) -> None:
    a, b = table.put_all([("a", "1"), ("b", "1")], family="f")
    with pytest.raises(ConditionsNotMetError) as caught:
        table.apply(
            [
                Insert("a", "2"),
                Put("c", "2"),
                Replace("b", "2", b),
                Replace("d", "2", a),
                Remove("b2", b),
            ],
            family="f",
        )
    assert caught.value.failures == (
        FailedCondition("f", "a", None, a),
        FailedCondition("f", "d", a, None),
        FailedCondition("f", "b2", b, None),
    )
    entries = table.get_all(["a", "b", "c", "d"], family="f")
    assert [entry and entry.value for entry in entries] == ["1", "1", None, None]


def test_replace_all_takes_entries_as_they_were_read_and_triples(table: Table) -> None:
    table.put_all([("a", "1"), ("b", "1")], family="f")
    a, b = (entry for entry in table.get_all(["a", "b"], family="f") if entry)
    new = table.replace_all([a._replace(value="2"), ("b", "2", b.version)], family="f")
    assert [entry and entry.version for entry in table.get_all(["a", "b"], family="f")] == new
    with pytest.raises(ConditionsNotMetError):
        table.replace_all([a, ("b", "3", new[1])], family="f")
    assert [entry and entry.value for entry in table.get_all(["a", "b"], family="f")] == ["2", "2"]


def test_remove_all_takes_keys_and_keys_with_versions(table: Table) -> None:
    a, b = table.put_all([("a", "1"), ("b", "1")], family="f")
    with pytest.raises(ConditionsNotMetError):
        table.remove_all(["a", TableKey("f", "b", a)], family="f")
    assert table.exists("a", family="f")
    table.remove_all(["a", TableKey("f", "b", b), TableKey("f", "missing")], family="f")
    assert table.get_all(["a", "b"], family="f") == [None, None]


def test_a_read_that_fails_leaves_no_coroutine_of_other_partitions(
    backend: ScriptedSegments, recwarn: pytest.WarningsRecorder
) -> None:
    with BlockingKeyValueTable(backend.table(partitions=8)) as table:
        backend.script = [TableAccessError("no")]
        with pytest.raises(TableAccessError):
            table.get_all([f"k{number}" for number in range(20)])
    gc.collect()
    messages = [str(warning.message) for warning in recwarn]
    assert [
        message for message in messages if "never awaited" in message
    ] == []  # others are of what ran before


def test_an_empty_batch_does_nothing(table: Table, backend: ScriptedSegments) -> None:
    assert table.apply([], family="f") == []
    assert table.put_all([], family="f") == []
    assert table.replace_all([], family="f") == []
    table.remove_all([], family="f")
    assert table.get_all([]) == []
    assert backend.asked == []


@pytest.mark.parametrize(
    ("write", "error", "facts"),
    [
        (
            lambda t: t.apply([Put("a", "1"), Remove("a")], family="f"),
            KeyValueTableError,
            {"table": "table"},
        ),
        (lambda t: t.apply([Put("a", "1")], family=None), KeyValueTableError, {"table": "table"}),
        (lambda t: t.put_all([], family=None), KeyValueTableError, {"table": "table"}),
        (lambda t: next(t.keys(None), None), KeyValueTableError, {"table": "table"}),
        (lambda t: t.put("a", "1", family=""), SerializationError, {"table": "table"}),
        (lambda t: t.put("a", "1", family="\ud800"), SerializationError, {"table": "table"}),
        (lambda t: t.put("a", "1", family=5), SerializationError, {"table": "table"}),
        (lambda t: t.put("a", "1", family=["f"]), SerializationError, {"table": "table"}),
        (lambda t: t.put("\udfff", "1"), SerializationError, {"table": "table"}),
        (lambda t: t.put("a", 5), SerializationError, {"table": "table"}),
        (lambda t: t.put(None, "1"), SerializationError, {"table": "table"}),
        (lambda t: t.replace("a", "1", None), KeyValueTableError, {"table": "table"}),
        (lambda t: t.replace("a", "1", b"0" * 16), KeyValueTableError, {"table": "table"}),
        (lambda t: t.remove("a", version="v"), KeyValueTableError, {"table": "table"}),
        (lambda t: t.replace("a", "1", KeyVersion(b"")), KeyValueTableError, {"table": "table"}),
        (
            lambda t: t.apply([Remove("a", KeyVersion(None))], family="f"),
            KeyValueTableError,
            {"table": "table"},
        ),
        (
            lambda t: t.replace_all([TableEntry(TableKey("f", "a"), "1")], family="f"),
            KeyValueTableError,
            {"table": "table"},
        ),
        (lambda t: t.replace_all(["a"], family="f"), ConfigurationError, {"argument": "entries"}),
        (
            lambda t: t.remove_all([TableKey("g", "a")], family="f"),
            KeyValueTableError,
            {"table": "table"},
        ),
        (lambda t: t.apply(["a"], family="f"), ConfigurationError, {"argument": "changes"}),
        (
            lambda t: t.apply([MustHaveVersion("a", None)], family="f"),
            KeyValueTableError,
            {"table": "table"},
        ),
        (
            lambda t: t.apply([Put("a", "1"), MustBeAbsent("a")], family="f"),
            KeyValueTableError,
            {"table": "table"},
        ),
        (lambda t: t.get_all("abc"), ConfigurationError, {"argument": "keys"}),
        (lambda t: t.put_all(["ab"], family="f"), ConfigurationError, {"argument": "entries"}),
        (lambda t: next(t.keys("f", prefix=5), None), ConfigurationError, {"argument": "prefix"}),
        (
            lambda t: next(t.keys("f", prefix="\udfff"), None),
            ConfigurationError,
            {"argument": "prefix"},
        ),
        (lambda t: next(t.keys("f", start=5), None), SerializationError, {"table": "table"}),
        (
            lambda t: next(t.keys("f", page_size=0), None),
            ConfigurationError,
            {"argument": "page_size"},
        ),
        (
            lambda t: next(t.all_keys(partitions=[4]), None),
            ConfigurationError,
            {"argument": "partitions"},
        ),
        (
            lambda t: next(t.all_keys(partitions=[1, 1]), None),
            ConfigurationError,
            {"argument": "partitions"},
        ),
        (
            lambda t: next(t.all_keys(partitions=[True]), None),
            ConfigurationError,
            {"argument": "partitions"},
        ),
    ],
)
def test_what_a_table_does_not_take_is_refused_before_it_is_sent(
    backend: ScriptedSegments,
    write: Callable[[Table], object],
    error: type[AdjunctError],
    facts: dict[str, str],
) -> None:
    with pytest.raises(error) as caught:
        write(BlockingKeyValueTable(backend.table()))
    assert facts.items() <= caught.value.facts.items()
    assert backend.asked == []


@pytest.mark.parametrize(
    ("limits", "declared", "write", "error", "facts"),
    [
        ({"table_key": 12}, {}, lambda t: t.put("k" * 11, "v"), KeyTooLongError, {"size": 11}),
        (
            {"table_key": 12},
            {},
            lambda t: t.put("k" * 6, "v", family="fffff"),
            KeyTooLongError,
            {"size": 11},
        ),
        (
            {"family_prefix": 6},
            {},
            lambda t: t.put("k", "v", family="fffff"),
            KeyTooLongError,
            {"size": 5},
        ),
        ({"key": 3}, {}, lambda t: t.get("kkkk", family="f"), KeyTooLongError, {"size": 4}),
        ({}, {"longest_key": 3}, lambda t: t.exists("kkkk"), KeyTooLongError, {"size": 4}),
        (
            {"key": 5},
            {"longest_key": 3},
            lambda t: t.get_all(["kkkk"]),
            KeyTooLongError,
            {"size": 4},
        ),
        ({}, {}, lambda t: t.put("k" * 8191, "v"), KeyTooLongError, {"size": 8191}),
        ({"value": 3}, {}, lambda t: t.put("k", "é" * 2), ValueTooLongError, {"size": 4}),
        (
            {"value": 5},
            {"longest_value": 3},
            lambda t: t.put("k", "vvvv"),
            ValueTooLongError,
            {"size": 4},
        ),
        (
            {"changes": 2},
            {},
            lambda t: t.remove_all([*"abc"], family="f"),
            BatchTooLargeError,
            {"changes": 3},
        ),
        ({"request": 9}, {}, lambda t: t.put("kkkk", "vvvv"), BatchTooLargeError, {"size": 10}),
        (
            {"request": 20},
            {},
            lambda t: t.put_all([("a", "vvvvvvv"), ("b", "vvvvvv")], family="f"),
            BatchTooLargeError,
            {"size": 21},
        ),
    ],
)
def test_what_is_larger_than_a_limit_is_refused_and_what_is_as_large_is_not(
    limits: dict[str, int],
    declared: dict[str, int],
    write: Callable[[Table], object],
    error: type[KeyValueTableError],
    facts: dict[str, int],
) -> None:
    backend = ScriptedSegments(limits=SegmentLimits(**limits))
    with pytest.raises(error) as caught:
        write(BlockingKeyValueTable(backend.table(**declared)))
    assert (caught.value.scope, caught.value.table, backend.asked) == ("scope", "table", [])
    assert facts.items() <= caught.value.facts.items()
    one_more = SegmentLimits(**{name: limit + 1 for name, limit in limits.items()})
    if limits or declared:
        more = {name: limit + 1 for name, limit in declared.items()}
        write(BlockingKeyValueTable(ScriptedSegments(limits=one_more).table(**more)))


FAMILY = "quay"


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda t: t.put("k" * 9, "v", family=FAMILY), {"size": 9}),
        (lambda t: t.get("k" * 9, family=FAMILY), {"size": 9}),
        (lambda t: t.exists("k" * 8190, family=FAMILY), {"size": 8194}),
        (lambda t: t.get_all(["k" * 9], family=FAMILY), {"size": 9}),
        (lambda t: t.get_all([TableKey(FAMILY, "k" * 9)]), {"size": 9}),
        (lambda t: t.put("k", "v", family="f" * 100), {"size": 100, "family": "f" * 80}),
        (lambda t: t.put("k", "v" * 9, family=FAMILY), {"size": 9}),
        (lambda t: t.apply([Insert("k", "v" * 9)], family=FAMILY), {"size": 9}),
        (
            lambda t: t.put_all([(c, "v" * 8) for c in "abc"], family=FAMILY),
            {"size": 45, "changes": 3},
        ),
        (lambda t: t.put_all([(c, "") for c in "abcd"], family=FAMILY), {"changes": 4}),
        (lambda t: t.put(5, "v", family=FAMILY), {"serializer": "TextSerializer"}),
        (lambda t: t.put("k", 5, family=FAMILY), {"serializer": "TextSerializer"}),
        (lambda t: t.get_all([5], family=FAMILY), {"serializer": "TextSerializer"}),
        (lambda t: next(t.keys(FAMILY, start=5)), {"serializer": "TextSerializer"}),
        (lambda t: t.replace("k", "v", None, family=FAMILY), {}),
        (lambda t: t.remove("k", version="v", family=FAMILY), {}),
        (lambda t: t.remove_all([TableKey("g", "a")], family=FAMILY), {}),
        (lambda t: t.replace_all([TableEntry(TableKey(FAMILY, "a"), "1")], family=FAMILY), {}),
        (lambda t: t.apply([Put("a", "1"), Remove("a")], family=FAMILY), {}),
        (lambda t: next(t.entries(FAMILY, state="state")), {}),
        (lambda t: t.replace("k", "v", KeyVersion(b"0" * 16), family=FAMILY), {"failures": 1}),
    ],
)
def test_an_error_says_as_facts_all_that_is_known_of_what_it_refuses(
    call: Callable[[Table], object], facts: dict[str, Any]
) -> None:
    limits = SegmentLimits(key=8, value=8, changes=3, request=40, family_prefix=52)
    with pytest.raises(KeyValueTableError) as caught:
        call(BlockingKeyValueTable(ScriptedSegments(limits=limits).table()))
    reported = caught.value.facts
    reported |= {"failures": len(reported["failures"])} if "failures" in reported else {}
    assert reported == {"scope": "scope", "table": "table", "family": FAMILY} | facts


def test_what_ends_a_table_names_the_family_that_was_asked_for() -> None:
    backend = ScriptedSegments()
    table = BlockingKeyValueTable(backend.table())
    calls: list[Callable[[], object]] = [
        lambda: table.put("k", "v", family=FAMILY),
        lambda: table.get("k", family=FAMILY),
        lambda: next(table.keys(FAMILY)),
    ]
    for call in calls:
        backend.script = [deleted_table_error(ID, "it")]
        with pytest.raises(KeyValueTableError) as caught:
            call()
        assert caught.value.facts == {"scope": "scope", "table": "table", "family": FAMILY}


def test_reading_many_keys_keeps_order_and_repeats_and_asks_each_partition_once(
    table: Table, backend: ScriptedSegments
) -> None:
    for n in range(0, 200, 2):
        table.put(f"k{n}", str(n))
    backend.asked.clear()
    asked = [f"k{n}" for n in (*range(200), 6, 7, 6)]
    entries = table.get_all(asked)
    assert [entry and (entry.key.key, entry.value) for entry in entries] == [
        (key, key[1:]) if int(key[1:]) % 2 == 0 else None for key in asked
    ]
    assert sorted(partition for _, partition, _, _ in backend.asked) == [0, 1, 2, 3]


def test_partitions_are_read_at_once_where_the_backend_waits() -> None:
    backend = ScriptedSegments(waits=True)
    table = backend.table()
    arrived: list[int] = []

    async def read() -> None:
        for partition in range(4):
            segment = table._open.segment(partition)

            async def get(keys: Any, *, values: bool = True, partition: int = partition) -> Any:
                arrived.append(partition)
                while len(arrived) < 4:
                    await asyncio.sleep(0)
                return [None] * len(keys)

            segment.get = get  # type: ignore[method-assign]
        await asyncio.wait_for(table.get_all([f"k{n}" for n in range(100)]), 5)

    asyncio.run(read())
    assert sorted(arrived) == [0, 1, 2, 3]


def test_where_one_partition_fails_no_request_goes_on_behind_the_error() -> None:
    table = ScriptedSegments(waits=True).table()
    ended: list[int] = []

    async def read() -> None:
        for partition in range(4):

            async def get(keys: Any, *, values: bool = True, partition: int = partition) -> Any:
                if partition == 2:
                    raise TableAccessError("no entry.", "")
                try:
                    await asyncio.sleep(60)
                finally:
                    await asyncio.sleep(0)  # giving a connection back takes a moment, too
                    ended.append(partition)

            table._open.segment(partition).get = get  # type: ignore[method-assign]
        with pytest.raises(TableAccessError):
            await table.get_all([f"k{n}" for n in range(100)])
        assert sorted(ended) == [0, 1, 3]

    asyncio.run(read())


def test_without_a_loop_partitions_are_read_at_once_and_end_before_an_error() -> None:
    table = ScriptedSegments(waits=True).table()
    all_at_once, ended = threading.Barrier(4, timeout=30), []
    for partition in range(4):

        async def get(keys: Any, *, values: bool = True, partition: int = partition) -> Any:
            all_at_once.wait()
            if partition == 2:
                raise TableAccessError("no entry.", "")
            time.sleep(0.1)
            ended.append(partition)
            return [None] * len(keys)

        table._open.segment(partition).get = get  # type: ignore[method-assign]
    with pytest.raises(TableAccessError):
        BlockingKeyValueTable(table).get_all([f"k{n}" for n in range(100)])
    assert sorted(ended) == [0, 1, 3]


def test_a_serializer_that_fails_or_makes_no_bytes_is_reported_with_the_table(
    backend: ScriptedSegments,
) -> None:
    def broken(value: Any) -> Any:
        raise ZeroDivisionError("by zero")

    for write in (broken, str):
        table = KeyValueTable(
            ID,
            KeyValueTableConfiguration(4),
            backend,
            FunctionSerializer(write, bytes.decode),
            TextSerializer(),
        )
        with pytest.raises(SerializationError) as caught:
            BlockingKeyValueTable(table).get("k")
        assert (caught.value.table, caught.value.serializer) == ("table", "FunctionSerializer")
    BlockingKeyValueTable(backend.table()).put("k", "v", family="f")
    text = TextSerializer()
    unread = KeyValueTable(
        ID, KeyValueTableConfiguration(4), backend, text, FunctionSerializer(str.encode, broken)
    )
    with pytest.raises(SerializationError) as caught:
        BlockingKeyValueTable(unread).get("k", family="f")
    assert (caught.value.serializer, caught.value.family) == ("FunctionSerializer", "f")


@pytest.mark.parametrize("wrong", [TextSerializer, str, "text", None])
def test_what_is_no_serializer_is_refused_when_the_table_is_opened(
    backend: ScriptedSegments, wrong: Any
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        KeyValueTable(ID, KeyValueTableConfiguration(4), backend, TextSerializer(), wrong)
    assert caught.value.argument == "value"


def test_an_error_of_a_serializer_says_whether_it_is_about_the_key_or_the_value(
    backend: ScriptedSegments,
) -> None:
    table = BlockingKeyValueTable(backend.table())
    with pytest.raises(
        SerializationError, match="the key 1 can't be serialized: 1 is not a string"
    ):
        table.put(1, "v")  # type: ignore[arg-type]
    with pytest.raises(SerializationError, match="a value can't be serialized: 1 is not a string"):
        table.put("k", 1)  # type: ignore[arg-type]
    table.put("k", "v", family="f")
    whole = KeyValueTable(
        ID, KeyValueTableConfiguration(4), backend, TextSerializer(), IntegerSerializer()
    )
    with pytest.raises(
        SerializationError,
        match="the stored key b'k' of the family 'f' can't be read: 1 stored bytes",
    ):
        BlockingKeyValueTable(whole).get("k", family="f")
    table.put("j", "8 bytes!", family="f")
    with pytest.raises(
        SerializationError,
        match="the stored key b'k' of the family 'f' can't be read: 1 stored bytes",
    ):
        BlockingKeyValueTable(whole).get_all(["i", "j", "k"], family="f")
    table.put("k", "v")
    with pytest.raises(
        SerializationError, match="the value of the stored key b'k' can't be read: 1 stored"
    ) as unread:
        BlockingKeyValueTable(whole).get("k")
    with pytest.raises(SerializationError) as unwritten:
        BlockingKeyValueTable(whole).put("k", "v")
    assert unread.value.serializer == unwritten.value.serializer == "IntegerSerializer"


def test_a_version_travels_as_bytes() -> None:
    version = BlockingKeyValueTable(ScriptedSegments().table()).put("k", "v")
    assert KeyVersion.from_bytes(version.to_bytes()) == version
    assert pickle.loads(pickle.dumps(version)) == version
    for other in (b"", version.to_bytes() + b"0", "text", None):
        with pytest.raises(KeyValueTableError):
            KeyVersion.from_bytes(other)  # type: ignore[arg-type]


def test_a_table_is_pickled_and_closed_and_goes_on(tmp_path: Any) -> None:
    segments = SqliteSegments(tmp_path / "tables.sqlite")
    segments.create(ID, 4)
    text = TextSerializer()
    with BlockingKeyValueTable(
        KeyValueTable(ID, KeyValueTableConfiguration(4), segments, text, text)
    ) as table:
        version = table.put("k", "v")
        again = pickle.loads(pickle.dumps(table))
        assert again.get("k").version == version
        again.close()
        assert again.get("k").value == "v"
        assert asyncio.run(pickle.loads(pickle.dumps(table.table)).get("k")).value == "v"


def test_by_hand_a_table_serves_callers_inside_of_an_event_loop() -> None:
    table = BlockingKeyValueTable(ScriptedSegments().table())

    async def inside() -> Any:
        table.put("k", "v")
        return [entry.value for page in table.all_entries() for entry in page.items]

    assert asyncio.run(inside()) == ["v"]


def test_an_entry_is_a_pair_of_its_key_and_value_wherever_it_comes_from(table: Table) -> None:
    version = table.put("k", "v", family="f")
    made = TableEntry(TableKey("f", "k", version), "v")
    (in_a_page,) = [entry for page in table.entries("f") for entry in page.items]
    for entry in (made, table.get("k", family="f"), *table.get_all(["k"], family="f"), in_a_page):
        assert entry is not None
        assert entry == made
        assert hash(entry) == hash(made)
        assert (entry.key, entry.value, entry.version) == (
            TableKey("f", "k", version),
            "v",
            version,
        )
        assert [*entry] == [entry[0], entry[1]] == [entry.key, "v"]
        assert len(entry) == 2
        assert pickle.loads(pickle.dumps(entry)) == copy.deepcopy(entry) == made
        assert entry._replace(value="w") == TableEntry(entry.key, "w") != made
        assert entry != TableEntry(TableKey("f", "k"), "v")

"""A store with some of its objects in a key-value table: what goes where, what is told when a table fails, and time."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import (
    MetadataMovedError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreUnavailableError,
    TableUnavailableError,
)
from dagster_adjunct.resources.key_value_errors import KeyValueTableSealedError, OutcomeUnknownError
from dagster_adjunct.resources.metadata_tables.key_value_objects import KeyValueObjects
from dagster_adjunct.resources.metadata_tables.object_addresses import address_of, key_of
from dagster_adjunct.resources.metadata_tables.routed_keys import RoutedKeys
from dagster_adjunct.resources.metadata_tables.routed_store import RoutedStore
from dagster_adjunct.resources.metadata_tables.store_clock import StoreClock
from dagster_adjunct.resources.objects import InMemoryStore, LocalStore
from tests.faulty_store import Fault, FaultyStore
from tests.resources.objects.routed import routed_store

SEGMENTS = st.sampled_from(["a", "a-b", "a0", "b", "_x", "A"])
KEYS = st.lists(SEGMENTS, min_size=1, max_size=4).map("/".join)


@pytest.fixture
def store(tmp_path: Path) -> RoutedStore:
    return routed_store(
        LocalStore(tmp_path / "lake"), tmp_path / "tables" / "t.sqlite", below=("metadata/", "applications/")
    )


@given(KEYS)
def test_an_address_leads_back_to_its_key(key: str) -> None:
    assert key_of(*address_of(key)) == key


@settings(max_examples=25, deadline=None)
@given(keys=st.sets(KEYS, max_size=25), prefixes=st.lists(KEYS, max_size=6))
def test_listing_is_that_of_a_sorted_dictionary_wherever_the_objects_are(
    keys: set[str], prefixes: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("listing")
    store = routed_store(InMemoryStore(), folder / "t.sqlite", below=("a/", "a0/a", "b/_x/"))
    for key in keys:
        store.put(key, key.encode())
    for prefix in ["", *prefixes, *(f"{one}/" for one in prefixes)]:
        assert [item.key for item in store.list(prefix)] == sorted(key for key in keys if key.startswith(prefix))
    store.delete_many(keys)
    assert list(store.list("")) == []


def test_keys_are_routed_by_how_they_begin() -> None:
    routed = RoutedKeys(("metadata/", "applications/"), ("metadata/key-value-tables/",))
    assert routed.take("metadata/x/y")
    assert not routed.take("metadata/key-value-tables/all/CURRENT")
    assert not routed.take("metadata-too/x")
    assert routed.may_begin_with("meta")
    assert not routed.are_all_with("metadata/")
    assert not routed.are_all_with("metadata/key")
    assert routed.are_all_with("applications/x")
    assert not routed.may_begin_with("streams/")


def test_what_is_left_in_the_object_store_is_not_seen(store: RoutedStore) -> None:
    store.objects.put("metadata/old", b"old")
    assert store.head("metadata/old") is None
    assert list(store.list("")) == []
    store.put_if_absent("metadata/old", b"new")
    assert [item.size for item in store.list("meta")] == [3]
    assert store.objects.get("metadata/old").data == b"old"


def test_an_etag_of_before_a_deletion_is_never_valid_again(store: RoutedStore) -> None:
    etag = store.put("metadata/a/b", b"same")
    store.delete("metadata/a/b")
    store.put("metadata/a/b", b"same")
    for stale in (etag, "no-etag", "00" * 16):
        with pytest.raises(PreconditionFailedError):
            store.put_if_match("metadata/a/b", b"x", stale)


class FailingTable:
    """A key-value table of which one kind of request fails."""

    def __init__(self, table: Any, method: str, error: Exception) -> None:
        self._table, self._method, self._error = table, method, error

    def __getattr__(self, name: str) -> Any:
        return self._fail if name == self._method else getattr(self._table, name)

    def _fail(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (OutcomeUnknownError("nobody knows", "read"), StoreUnavailableError),
        (TableUnavailableError("down", "later"), StoreUnavailableError),
        (KeyValueTableSealedError("sealed", "x"), MetadataMovedError),
    ],
)
def test_what_a_table_says_is_told_as_a_store_tells_it(
    store: RoutedStore, raised: Exception, told: type[Exception]
) -> None:
    etag = store.put("metadata/a/b", b"x")
    requests: dict[str, Callable[[RoutedStore], object]] = {
        "put": lambda failing: failing.put("metadata/a/b", b"y"),
        "put_if_absent": lambda failing: failing.put_if_absent("metadata/a/c", b"y"),
        "replace": lambda failing: failing.put_if_match("metadata/a/b", b"y", etag),
        "apply": lambda failing: failing.delete("metadata/a/b"),
        "get": lambda failing: failing.get("metadata/a/b"),
        "entries": lambda failing: list(failing.list("metadata/a/")),
    }
    for method, request in requests.items():
        table: Any = FailingTable(store.table._table, method, raised)
        objects = KeyValueObjects(table, store.objects, StoreClock(store.objects))
        failing = RoutedStore(store.objects, store.routed, lambda objects=objects: objects, "")
        with pytest.raises(told):
            request(failing)
    assert store.get("metadata/a/b").data == b"x"


def test_long_objects_are_beside_the_table_and_go_with_their_keys(store: RoutedStore) -> None:
    def beside() -> Iterator[int]:
        return (item.size for item in store.objects.list("_adjunct/metadata/long/"))

    long = b"x" * 600_000
    etag = store.put_if_absent("applications/a/answers/1", long)
    assert (store.get("applications/a/answers/1").data, store.get_range("applications/a/answers/1", 599_999, 9)) == (
        long,
        b"x",
    )
    info = store.head("applications/a/answers/1")
    assert info is not None
    assert (info.size, info.etag) == (600_000, etag)
    with pytest.raises(Exception, match="already"):
        store.put_if_absent("applications/a/answers/1", b"y" * 700_000)
    with pytest.raises(PreconditionFailedError):
        store.put_if_match("applications/a/answers/1", b"y" * 700_000, "00" * 16)
    assert list(beside()) == [600_000], "what was refused is not left behind"
    store.delete("applications/a/answers/1")
    assert list(beside()) == []
    with pytest.raises(ObjectNotFoundError):
        store.get("applications/a/answers/1")


class Machine:
    """A machine whose clocks are wrong, and a store that is right."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.wall_is_off = -86_400.0
        self.slow = 0.0
        self.looks = 0
        self.store: Any = self

    url = "memory://right"

    def put(self, key: str, data: bytes) -> str:
        self.looks += 1
        self.passed += self.slow
        return "etag"

    def head(self, key: str) -> Any:
        machine = self

        class Info:
            # S3 tells whole seconds.
            modified = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=int(machine.passed))

        return Info

    def clocks(self) -> tuple[float, float]:
        return self.passed, self.passed + self.wall_is_off

    @property
    def right(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.passed)


def test_a_machine_with_a_wrong_clock_dates_by_the_stores() -> None:
    machine = Machine()
    clock = StoreClock(machine.store, machine.clocks)
    for seconds in [0.4, 3, 100.7, 400, 90, 7, 1000, 0.1] * 5:
        machine.passed += seconds
        assert timedelta(0) <= machine.right - clock.now() < timedelta(seconds=1)
    assert machine.looks < 20


def test_a_clock_that_was_set_or_slept_is_looked_at_again() -> None:
    machine = Machine()
    clock = StoreClock(machine.store, machine.clocks)
    clock.now()
    machine.passed += 5
    clock.now()
    assert machine.looks == 1
    machine.wall_is_off += 3600
    clock.now()
    assert machine.looks == 2


def test_a_store_that_takes_long_to_tell_the_time_is_not_believed() -> None:
    machine = Machine()
    machine.slow = 6.0
    with pytest.raises(StoreUnavailableError, match=r"took 6.0 seconds to tell the time"):
        StoreClock(machine.store, machine.clocks).now()


def test_nothing_is_written_to_the_object_store_by_reading(tmp_path: Path) -> None:
    store = routed_store(LocalStore(tmp_path / "lake"), tmp_path / "tables" / "t.sqlite")
    for _ in store.list(""):
        pass
    assert store.head("a") is None
    assert not (tmp_path / "lake").exists()


def test_a_store_that_does_not_tell_the_time_keeps_the_table_as_it_is(tmp_path: Path) -> None:
    base = LocalStore(tmp_path / "lake")
    good = routed_store(base, tmp_path / "tables" / "t.sqlite")
    good.put("a/b", b"1")
    down = FaultyStore(base, [Fault("put", 1, "lost-before")])
    good.table._clock = StoreClock(down)
    with pytest.raises(StoreUnavailableError):
        good.put("a/b", b"2")
    assert good.get("a/b").data == b"1"


def test_who_needs_data_alone_loads_neither_the_table_nor_its_drivers(tmp_path: Path) -> None:
    store = routed_store(LocalStore(tmp_path / "lake"), tmp_path / "tables" / "t.sqlite", ("metadata/",))
    store.put("data/file", b"rows")
    program = (
        "import pickle, sys\n"
        "store = pickle.loads(bytes.fromhex(sys.argv[1])).open()\n"
        "print(store.get('data/file').data, store.spark_uri('data/file'))\n"
        "print([name for name in ('mmh3', 'sqlite3', 'psycopg', 'boto3') if name in sys.modules])\n"
    )
    command = [sys.executable, "-c", program, pickle.dumps(store.descriptor).hex()]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert out == [f"b'rows' file:{tmp_path}/lake/data/file", "[]"]

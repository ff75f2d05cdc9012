"""The manager over every backend: the same answers, handles that end, races."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath

import pytest

from dagster_adjunct.resources.errors import (
    KeyValueTableError,
    KeyValueTableExistsError,
    KeyValueTableNotFoundError,
    KeyValueTableSealedError,
)
from dagster_adjunct.resources.key_value.manager import KeyValueTableManager
from dagster_adjunct.resources.key_value.segment import KeyValueTableConfiguration
from dagster_adjunct.resources.key_value.serializers import IntegerSerializer, TextSerializer
from dagster_adjunct.resources.key_value.table import BlockingKeyValueTable
from dagster_adjunct.resources.key_value_backends.objects.segment import ObjectSegments
from dagster_adjunct.resources.key_value_backends.postgres import PostgresSegments
from dagster_adjunct.resources.key_value_backends.sqlite import SqliteSegments
from dagster_adjunct.resources.objects.lake import lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore

TWO = KeyValueTableConfiguration(2)


@pytest.fixture
def managers(segment_store) -> Callable[[], KeyValueTableManager]:
    """Gives managers of one lake's tables, each with a backend of its own, as processes have."""
    lake = lake_in(InMemoryStore())
    KeyValueTableManager(lake).create_scope("plant")
    return lambda: KeyValueTableManager(lake, segment_store.backend())


def opened(manager: KeyValueTableManager) -> BlockingKeyValueTable[str, int]:
    return BlockingKeyValueTable(
        manager.open("plant", "machines", key=TextSerializer(), value=IntegerSerializer())
    )


def test_backends_accept_paths_and_numbers_where_they_need_text(tmp_path):
    assert SqliteSegments(PurePath(tmp_path, "file")).path == str(tmp_path / "file")
    assert ObjectSegments(tmp_path / "lake").to_dict()["url"] == str(tmp_path / "lake")
    postgres = PostgresSegments(
        connect={"sslrootcert": tmp_path, "port": 5433, "connect_timeout": 2.5}
    )
    assert postgres.connect == {
        "sslrootcert": str(tmp_path),
        "port": "5433",
        "connect_timeout": "2.5",
    }


def test_a_table_is_created_used_sealed_deleted_and_recreated(managers):
    manager, other = managers(), managers()
    with pytest.raises(KeyValueTableNotFoundError):
        manager.update("plant", "machines", TWO)
    assert [manager.delete("plant", "machines"), manager.create("plant", "machines", TWO)] == [
        False,
        True,
    ]
    assert other.create("plant", "machines", TWO) is False
    with pytest.raises(KeyValueTableExistsError):
        other.create("plant", "machines", KeyValueTableConfiguration(3))
    with pytest.raises(KeyValueTableError):
        other.update("plant", "machines", KeyValueTableConfiguration(3))
    locations = [segment.location for segment in manager.segments("plant", "machines")]
    assert len(set(locations)) == 2
    assert locations == [segment.location for segment in other.segments("plant", "machines")]
    with opened(manager) as table, opened(other) as far:
        versions = table.put_all([("m1", 1), ("m2", 2)], family="north")
        table.put("alone", 3)
        assert [
            e.version for e in far.get_all(["m1", "m2"], family="north") if e is not None
        ] == versions
        assert [other.seal("plant", "machines"), manager.seal("plant", "machines")] == [True, False]
        with pytest.raises(KeyValueTableSealedError):
            table.put("m1", 9, family="north")
        with pytest.raises(KeyValueTableSealedError):
            far.remove("alone")
        assert sorted(e.value for page in far.all_entries() for e in page.items) == [1, 2, 3]
        assert [other.delete("plant", "machines"), manager.delete("plant", "machines")] == [
            True,
            False,
        ]
        assert manager.create("plant", "machines", TWO) is True
        for handle in (table, far):
            with pytest.raises(KeyValueTableNotFoundError):
                handle.get("alone")
            with pytest.raises(KeyValueTableNotFoundError):
                handle.put("alone", 4)
    with opened(other) as renewed:
        assert renewed.get_all(["m1", "m2"], family="north") == [None, None]
        renewed.put("alone", 5)
    assert manager.delete("plant", "machines") is True


def test_names_at_their_limits_are_names_of_tables(managers):
    manager = managers()
    scope = "." + "s" * 254
    assert manager.create_scope(scope) is True
    for name in ("T" * 255, "t" * 255, "t" * 254 + ".", "-", "..", "a.b_c-D9"):
        assert manager.create(scope, name, KeyValueTableConfiguration(1)) is True
        opened_so = manager.open(scope, name, key=TextSerializer(), value=TextSerializer())
        with BlockingKeyValueTable(opened_so) as table:
            assert table.get("name") is None
            table.put("name", name)
            entry = table.get("name")
            assert entry is not None
            assert entry.value == name
    assert len(manager.list(scope)) == 6
    assert [manager.delete(scope, table.name) for table in manager.list(scope)] == [True] * 6
    assert manager.delete_scope(scope) is True


def test_of_managers_that_race_one_is_reported_that_it_was_the_one(managers):
    racing = [managers() for _ in range(4)]
    with ThreadPoolExecutor(len(racing)) as threads:
        for configurations in ([TWO] * 4, [TWO, KeyValueTableConfiguration(1)] * 2):

            def create(pair: tuple[KeyValueTableManager, KeyValueTableConfiguration]) -> str:
                try:
                    return str(pair[0].create("plant", "machines", pair[1]))
                except KeyValueTableExistsError:
                    return "refused"

            reported = Counter(threads.map(create, zip(racing, configurations, strict=True)))
            same = len(set(configurations)) == 1
            assert reported == (
                {"True": 1, "False": 3} if same else {"True": 1, "False": 1, "refused": 2}
            )
            with opened(racing[0]) as table:
                table.put("m1", 1)
            assert sum(threads.map(lambda manager: manager.seal("plant", "machines"), racing)) == 1
            assert (
                sum(threads.map(lambda manager: manager.delete("plant", "machines"), racing)) == 1
            )

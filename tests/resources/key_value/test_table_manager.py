"""The manager of key-value tables: what it answers, races of managers, and crashes between its
steps.
"""

from __future__ import annotations

import pickle
import secrets
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    InvalidNameError,
    KeyValueTableError,
    KeyValueTableExistsError,
    KeyValueTableNotFoundError,
    KeyValueTableSealedError,
    MalformedDocumentError,
    ScopeNotEmptyError,
    ScopeNotFoundError,
    TableAccessError,
    TableUnavailableError,
    ValueTooLongError,
)
from dagster_adjunct.resources.key_value.manager import (
    IN_SQLITE,
    NAMESPACE,
    KeyValueTableManager,
    lake_backends,
    resolve_lake_backend,
)
from dagster_adjunct.resources.key_value.segment import KeyValueTableConfiguration, backend_from
from dagster_adjunct.resources.key_value.serializers import IntegerSerializer, TextSerializer
from dagster_adjunct.resources.key_value.table import BlockingKeyValueTable
from dagster_adjunct.resources.key_value_backends.objects.segment import ObjectSegments
from dagster_adjunct.resources.key_value_backends.postgres import PostgresSegments
from dagster_adjunct.resources.key_value_backends.sqlite import SqliteSegments
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.resources.key_value.control_plane_world import Died, RememberedTables, dying

FOUR = KeyValueTableConfiguration(4)


@pytest.fixture
def lake() -> Lake:
    return lake_in(InMemoryStore())


@pytest.fixture
def backend(lake: Lake) -> RememberedTables:
    return RememberedTables(lake.url)


@pytest.fixture
def manager(lake: Lake, backend: RememberedTables) -> KeyValueTableManager:
    manager = KeyValueTableManager(lake, backend)
    manager.create_scope("plant")
    return manager


def names(manager: KeyValueTableManager, **how: Any) -> list[str]:
    return [table.name for table in manager.list("plant", **how)]


def state(manager: KeyValueTableManager, name: str = "machines") -> str | None:
    return manager.describe("plant", name).state


def manager_table(manager: KeyValueTableManager, name: str) -> BlockingKeyValueTable[str, int]:
    return BlockingKeyValueTable(
        manager.open("plant", name, key=TextSerializer(), value=IntegerSerializer())
    )


# -- scopes


def test_scopes_are_made_once_and_deleted_once(lake: Lake, backend: RememberedTables) -> None:
    manager = KeyValueTableManager(lake, backend)
    assert manager.list_scopes() == ()
    assert [manager.create_scope(scope) for scope in ("b", "a", "b", "a-b", "a.b")] == [
        True,
        True,
        False,
        True,
        True,
    ]
    assert manager.list_scopes() == ("a", "a-b", "a.b", "b")
    assert manager.list_scopes(limit=2) == ("a", "a-b")
    assert manager.list_scopes(after="a-b", limit=5) == ("a.b", "b")
    assert manager.create("a", "t", FOUR)
    assert manager.list_scopes() == ("a", "a-b", "a.b", "b")
    with pytest.raises(ScopeNotEmptyError) as caught:
        manager.delete_scope("a")
    assert caught.value.scope == "a"
    assert manager.delete("a", "t")
    assert [manager.delete_scope("a"), manager.delete_scope("a")] == [True, False]


def test_a_missing_scope_is_an_error_of_every_call(manager: KeyValueTableManager) -> None:
    calls = [
        lambda: manager.create("none", "t", FOUR),
        lambda: manager.list("none"),
        lambda: manager.describe("none", "t"),
        lambda: manager.get_configuration("none", "t"),
        lambda: manager.update("none", "t", FOUR),
        lambda: manager.seal("none", "t"),
        lambda: manager.delete("none", "t"),
        lambda: manager.segments("none", "t"),
        lambda: manager.open("none", "t", key=TextSerializer(), value=TextSerializer()),
    ]
    for call in calls:
        with pytest.raises(ScopeNotFoundError) as caught:
            call()
        assert caught.value.scope == "none"


def test_names_that_are_not_allowed_are_refused_by_every_call(
    manager: KeyValueTableManager,
) -> None:
    for bad in ("", "_a", "a/b", "a" * 256, "ü"):
        calls = [
            lambda bad=bad: manager.create_scope(bad),
            lambda bad=bad: manager.delete_scope(bad),
            lambda bad=bad: manager.list(bad),
            lambda bad=bad: manager.create("plant", bad, FOUR),
            lambda bad=bad: manager.get_configuration("plant", bad),
            lambda bad=bad: manager.update("plant", bad, FOUR),
            lambda bad=bad: manager.seal("plant", bad),
            lambda bad=bad: manager.delete(bad, "t"),
            lambda bad=bad: manager.segments("plant", bad),
        ]
        for call in calls:
            with pytest.raises(InvalidNameError):
                call()


# -- tables


def test_a_table_is_created_once_and_other_configurations_are_refused(
    manager: KeyValueTableManager, backend: RememberedTables
) -> None:
    assert manager.create("plant", "machines", FOUR) is True
    assert manager.create("plant", "machines", FOUR) is False
    assert manager.get_configuration("plant", "machines") == FOUR
    assert list(backend.tables.values()) == ["open"]
    for other in (KeyValueTableConfiguration(5), KeyValueTableConfiguration(4, longest_key=9)):
        with pytest.raises(KeyValueTableExistsError):
            manager.create("plant", "machines", other)
    with pytest.raises(
        KeyValueTableExistsError, match=r"space='memory:.*wanted: space='elsewhere'"
    ) as caught:
        KeyValueTableManager(manager.lake, RememberedTables("elsewhere")).create(
            "plant", "machines", FOUR
        )
    assert (caught.value.scope, caught.value.table) == ("plant", "machines")
    assert list(backend.tables.values()) == ["open"]


def test_limits_are_updated_and_another_number_of_partitions_is_refused(
    manager: KeyValueTableManager,
) -> None:
    with pytest.raises(KeyValueTableNotFoundError):
        manager.update("plant", "machines", FOUR)
    manager.create("plant", "machines", FOUR)
    wider = KeyValueTableConfiguration(4, longest_value=100)
    assert [
        manager.update("plant", "machines", wider),
        manager.update("plant", "machines", wider),
    ] == [True, False]
    assert manager.get_configuration("plant", "machines") == wider
    with pytest.raises(KeyValueTableError) as caught:
        manager.update("plant", "machines", KeyValueTableConfiguration(3))
    assert caught.value.table is not None
    with pytest.raises(KeyValueTableExistsError):
        manager.create("plant", "machines", FOUR)


def test_a_table_is_sealed_once_and_deleted_once(
    manager: KeyValueTableManager, backend: RememberedTables
) -> None:
    assert manager.delete("plant", "machines") is False
    with pytest.raises(KeyValueTableNotFoundError):
        manager.seal("plant", "machines")
    manager.create("plant", "machines", FOUR)
    first = manager.describe("plant", "machines").incarnation
    assert [manager.seal("plant", "machines"), manager.seal("plant", "machines")] == [True, False]
    assert list(backend.tables.values()) == ["sealed"]
    assert manager.create("plant", "machines", FOUR) is False
    assert [manager.delete("plant", "machines"), manager.delete("plant", "machines")] == [
        True,
        False,
    ]
    assert backend.tables == {}
    assert manager.create("plant", "machines", FOUR) is True
    assert manager.describe("plant", "machines").incarnation != first
    assert state(manager) == "active"


def test_tables_are_listed_in_order_and_on_from_where_one_was(
    manager: KeyValueTableManager,
) -> None:
    made = ["a", "a-b", "a.b", "b", "z9", "C"]
    manager.create_scope("plant-2")
    manager.create("plant-2", "other", FOUR)
    for name in made:
        manager.create("plant", name, FOUR)
    assert names(manager) == sorted(made)
    seen: list[str] = []
    while page := names(manager, limit=2, after=seen[-1] if seen else None):
        assert len(page) <= 2
        seen += page
    assert seen == sorted(made)
    with pytest.raises(ConfigurationError) as caught:
        manager.list("plant", limit=0)
    assert caught.value.argument == "limit"


def test_segments_tell_the_hashes_of_each_partition_and_where_it_lives(
    manager: KeyValueTableManager,
) -> None:
    manager.create("plant", "machines", KeyValueTableConfiguration(3))
    segments = manager.segments("plant", "machines")
    incarnation = manager.describe("plant", "machines").incarnation
    assert [segment.location for segment in segments] == [
        f"{manager.lake.url}/{incarnation}/{n}" for n in range(3)
    ]
    assert (segments[0].first_hash, segments[-1].last_hash) == (0, 2**52 - 1)
    with pytest.raises(KeyValueTableNotFoundError):
        manager.segments("plant", "others")


def test_an_entry_that_cannot_be_read_is_reported_of_and_stops_no_other(
    manager: KeyValueTableManager,
) -> None:
    manager.create("plant", "machines", FOUR)
    namespace = MetadataStore(manager.lake).namespace(NAMESPACE, "all")
    namespace.transact(lambda _: ({"plant/newer": {"format": 9}}, None), by="a newer release")
    machines, newer = manager.list("plant")
    assert (machines.problem, newer.state) == (None, None)
    assert "has format 9; this release of Adjunct reads format 1" in str(newer.problem)
    with pytest.raises(MalformedDocumentError, match="Upgrade dagster-adjunct"):
        manager.delete("plant", "newer")
    assert [manager.unregister("plant", "newer"), manager.unregister("plant", "newer")] == [
        True,
        False,
    ]
    assert names(manager) == ["machines"]
    assert manager.seal("plant", "machines")


@pytest.mark.parametrize("wrong", ["postgres", SqliteSegments, {"backend": "sqlite"}])
def test_what_is_no_backend_is_refused_at_once(lake: Lake, wrong: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        KeyValueTableManager(lake, wrong)
    assert caught.value.argument == "backend"


def test_an_url_is_no_lake_and_reported_how_to_open_it() -> None:
    with pytest.raises(ConfigurationError, match=r"open_lake\('folder'\)") as caught:
        KeyValueTableManager("folder")  # type: ignore[arg-type]
    assert caught.value.argument == "lake"


def test_a_setting_that_a_backend_does_not_have_is_reported_with_those_that_it_has() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'postgres'.*'dsn'.*It accepts dsn_env, connect, schema"
    ):
        backend_from({"backend": "postgres", "dsn": "PLANT_DSN"})


def test_a_missing_variable_is_an_error_before_anything_is_stored(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistyped = KeyValueTableManager(lake, PostgresSegments(dsn_env="ADJUNCT_MISTYPED"))
    mistyped.create_scope("plant")
    with pytest.raises(ConfigurationError) as caught:
        mistyped.create("plant", "t", FOUR)
    assert caught.value.setting == "ADJUNCT_MISTYPED"
    assert mistyped.list("plant") == ()
    monkeypatch.setenv("ADJUNCT_MISTYPED", "postgresql://nobody@127.0.0.1:1/none?connect_timeout=1")
    monkeypatch.setattr("dagster_adjunct.resources.key_value.manager._PATIENCE", 0.0)
    with pytest.raises(TableUnavailableError):
        mistyped.create("plant", "t", FOUR)
    monkeypatch.delenv("ADJUNCT_MISTYPED")
    with pytest.raises(ConfigurationError) as caught:
        KeyValueTableManager(lake, PostgresSegments(dsn_env="ADJUNCT_RIGHT")).create(
            "plant", "t", FOUR
        )
    assert caught.value.setting == "ADJUNCT_MISTYPED"
    assert "--unregister" in "".join(caught.value.__notes__)


def test_another_manager_finds_the_backend_of_a_table_by_itself(
    manager: KeyValueTableManager, backend: RememberedTables
) -> None:
    manager.create("plant", "machines", FOUR)
    other = pickle.loads(pickle.dumps(KeyValueTableManager(manager.lake)))
    assert other.segments("plant", "machines") == manager.segments("plant", "machines")
    assert other.delete("plant", "machines") is True
    assert backend.tables == {}


def test_a_backend_with_other_settings_is_the_same_place(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake")
    KeyValueTableManager(lake).create_scope("plant")
    assert KeyValueTableManager(lake).create("plant", "machines", FOUR) is True
    path = tmp_path / "lake.key-values.sqlite"
    patient = KeyValueTableManager(lake, SqliteSegments(path, busy_timeout=60))
    assert patient.create("plant", "machines", FOUR) is False
    with pytest.raises(KeyValueTableExistsError, match=r"elsewhere\.sqlite") as caught:
        KeyValueTableManager(lake, SqliteSegments(tmp_path / "elsewhere.sqlite")).create(
            "plant", "machines", FOUR
        )
    assert (caught.value.scope, caught.value.table) == ("plant", "machines")
    assert str(path) in patient.segments("plant", "machines")[0].location


def test_without_a_backend_tables_lie_next_to_a_local_lake_and_in_another_one(
    tmp_path: Path,
) -> None:
    def own(lake: Lake) -> dict[str, Any]:
        return resolve_lake_backend(lake, lake_backends(lake)[0])

    local = open_lake(tmp_path / "lake")
    assert own(local) == {"backend": "sqlite", "path": str(tmp_path / "lake.key-values.sqlite")}
    shared = Lake(local.store, local.id, shared=True)
    assert own(shared) == {"backend": "objects", "url": shared}
    in_memory = lake_in(InMemoryStore())
    assert own(in_memory) == {"backend": "objects", "url": in_memory}
    with pytest.raises(ConfigurationError, match="which this lake does not have"):
        resolve_lake_backend(in_memory, IN_SQLITE)


def test_a_table_is_stored_in_the_objects_of_a_lake_that_is_not_local() -> None:
    lake = open_lake(f"memory://{secrets.token_hex(8)}")
    manager = KeyValueTableManager(lake)
    manager.create_scope("plant")
    assert manager.create("plant", "machines", FOUR) is True
    assert (
        KeyValueTableManager(lake, ObjectSegments(lake)).create("plant", "machines", FOUR) is False
    )
    with manager_table(pickle.loads(pickle.dumps(manager)), "machines") as table:
        version = table.put("m1", 1)
        stored = table.get("m1")
    assert stored is not None
    assert (stored.value, stored.version) == (1, version)
    assert [item.key for item in lake.store.list("key-values/")] != []
    (entry,) = [
        value
        for key, value in MetadataStore(lake).namespace(NAMESPACE, "all").read().items()
        if "/" in key
    ]
    assert entry["backend"] == {"lake": "objects"}


@pytest.mark.parametrize("linked", [False, True])
def test_the_tables_of_a_lake_that_is_copied_are_not_those_of_the_first(
    tmp_path: Path, linked: bool
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    opened_at = tmp_path / "link" if linked else tmp_path
    manager = KeyValueTableManager(open_lake(opened_at / "lake"))
    manager.create_scope("plant")
    manager.create("plant", "machines", FOUR)
    database = opened_at / "lake.key-values.sqlite"
    given = {
        "places": SqliteSegments(database),
        "people": SqliteSegments(database, busy_timeout=3),
        "claims": SqliteSegments(opened_at / "lake" / "claims.sqlite", busy_timeout=3),
    }
    for name, backend in given.items():
        assert KeyValueTableManager(manager.lake, backend).create("plant", name, FOUR) is True
        if name != "claims":
            assert (
                KeyValueTableManager(manager.lake, backend).create("plant", "machines", FOUR)
                is False
            )
    assert (
        KeyValueTableManager(manager.lake, ObjectSegments(tmp_path / "lake")).create(
            "plant", "parts", FOUR
        )
        is True
    )
    for copy in ("lake", "lake.key-values.sqlite"):
        source, target = tmp_path / copy, tmp_path / copy.replace("lake", "copy", 1)
        shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
    copied = KeyValueTableManager(open_lake(tmp_path / "copy"))
    stored = dict(MetadataStore(copied.lake).namespace(NAMESPACE, "all").read().items())
    assert stored["plant/people"]["backend"] == {"lake": "sqlite", "busy_timeout": 3}
    assert stored["plant/claims"]["backend"] == {
        "lake": "sqlite",
        "path": "claims.sqlite",
        "busy_timeout": 3,
    }
    for name in ("machines", "places", "people", "claims", "parts"):
        assert str(tmp_path / "copy") in copied.segments("plant", name)[0].location
        assert copied.delete("plant", name) is True
        with manager_table(manager, name) as table:
            assert table.get("m1") is None


def test_a_table_is_read_when_sealed_and_its_handles_end_when_it_is_deleted(tmp_path: Path) -> None:
    manager = KeyValueTableManager(open_lake(tmp_path / "lake"))
    manager.create_scope("plant")
    manager.create("plant", "machines", KeyValueTableConfiguration(4, longest_value=5))
    with manager_table(manager, "machines") as table:
        with pytest.raises(ValueTooLongError):
            table.put("m1", 1)
        manager.update("plant", "machines", FOUR)
        with manager_table(manager, "machines") as wider:
            wider.put("m1", 1)
        assert [entry and entry.value for entry in table.get_all(["m1", "m2"])] == [1, None]
        manager.seal("plant", "machines")
        with pytest.raises(KeyValueTableSealedError):
            wider.put("m1", 2)
        assert table.get("m1") == wider.get("m1")
        manager.delete("plant", "machines")
        manager.create("plant", "machines", FOUR)
        with pytest.raises(KeyValueTableNotFoundError):
            table.get("m1")
        with manager_table(manager, "machines") as renewed:
            assert renewed.get("m1") is None


# -- races


def test_of_managers_that_race_exactly_one_is_reported_that_it_was_the_one(
    lake: Lake, backend: RememberedTables
) -> None:
    managers = [KeyValueTableManager(lake, backend) for _ in range(6)]
    with ThreadPoolExecutor(len(managers)) as threads:
        for number in range(5):
            name = f"t{number}"
            scopes = list(threads.map(lambda m, name=name: m.create_scope(name), managers))
            made = list(threads.map(lambda m, name=name: m.create(name, "t", FOUR), managers))
            sealed = list(threads.map(lambda m, name=name: m.seal(name, "t"), managers))
            deleted = list(threads.map(lambda m, name=name: m.delete(name, "t"), managers))
            assert [sum(answers) for answers in (scopes, made, sealed, deleted)] == [1, 1, 1, 1]
    assert backend.tables == {}


def test_racing_creators_of_two_configurations_make_one_of_them(
    lake: Lake, backend: RememberedTables
) -> None:
    manager = KeyValueTableManager(lake, backend)
    manager.create_scope("plant")

    def create(partitions: int) -> object:
        try:
            return KeyValueTableManager(lake, backend).create(
                "plant", "t", KeyValueTableConfiguration(partitions)
            )
        except KeyValueTableExistsError:
            return "refused"

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(create, [1, 2, 1, 2, 1, 2]))
    assert Counter(map(str, answers)) == {"True": 1, "False": 2, "refused": 3}
    won = manager.get_configuration("plant", "t").partitions
    assert {answers[at] for at in range(6) if at % 2 == won - 1} == {True, False}


_RACER = """
import sys
from tests.resources.key_value.control_plane_world import RememberedTables
from dagster_adjunct.resources.key_value.serializers import IntegerSerializer, TextSerializer
from dagster_adjunct.resources.key_value.segment import KeyValueTableConfiguration
from dagster_adjunct.resources.key_value.manager import KeyValueTableManager
from dagster_adjunct.resources.objects.lake import open_lake

manager = KeyValueTableManager(open_lake(sys.argv[1]), RememberedTables("of this process"))
print("ready", flush=True)
sys.stdin.readline()
for step in range(8):
    name = f"t{step}"
    print(manager.create_scope(name), manager.create(name, "t", KeyValueTableConfiguration(2)), manager.seal(name, "t"))
"""


@pytest.mark.lengthy
def test_of_processes_that_race_exactly_one_is_reported_that_it_was_the_one(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake")
    KeyValueTableManager(lake, RememberedTables("here")).create_scope("first")
    command = [sys.executable, "-c", _RACER, lake.url]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    reported = [racer.communicate("go\n", timeout=120)[0].splitlines() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    for answers in zip(*reported, strict=True):
        for one in zip(*(answer.split() for answer in answers), strict=True):
            assert sorted(one) == ["False", "False", "True"]


# -- crashes


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_create_that_dies_is_finished_by_the_next_call_whichever(
    manager: KeyValueTableManager, backend: RememberedTables, when: str
) -> None:
    for number, call in enumerate(("create", "seal", "update", "open", "delete")):
        name = f"t{number}"
        backend.die_at(when, "create")
        with pytest.raises(Died):
            manager.create("plant", name, FOUR)
        assert state(manager, name) == "creating"
        other = KeyValueTableManager(manager.lake, backend)
        if call == "create":
            assert other.create("plant", name, FOUR) is False
            assert state(manager, name) == "active"
        elif call == "seal":
            assert other.seal("plant", name) is True
            assert state(manager, name) == "sealed"
        elif call == "update":
            assert other.update("plant", name, KeyValueTableConfiguration(4, longest_key=3)) is True
            assert state(manager, name) == "active"
        elif call == "open":
            other.open("plant", name, key=TextSerializer(), value=TextSerializer())
            assert state(manager, name) == "active"
        elif call == "delete":
            assert other.delete("plant", name) is True
            assert name not in names(manager)
    assert sorted(backend.tables.values()) == ["open", "open", "open", "sealed"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_seal_that_dies_is_finished_by_the_next_one(
    manager: KeyValueTableManager, backend: RememberedTables, when: str
) -> None:
    manager.create("plant", "machines", FOUR)
    backend.die_at(when, "seal")
    with pytest.raises(Died):
        manager.seal("plant", "machines")
    assert state(manager) == "sealing"
    assert manager.seal("plant", "machines") is False
    assert state(manager) == "sealed"
    assert list(backend.tables.values()) == ["sealed"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("next_call", ["delete", "create", "delete_scope"])
def test_a_delete_that_dies_is_finished_by_the_next_call(
    manager: KeyValueTableManager, backend: RememberedTables, when: str, next_call: str
) -> None:
    manager.create("plant", "machines", FOUR)
    backend.die_at(when, "delete")
    with pytest.raises(Died):
        manager.delete("plant", "machines")
    assert [(table.name, table.state) for table in manager.list("plant")] == [
        ("machines", "deleting")
    ]
    with pytest.raises(KeyValueTableNotFoundError):
        manager.get_configuration("plant", "machines")
    if next_call == "delete":
        assert manager.delete("plant", "machines") is False
        assert (names(manager), backend.tables) == ([], {})
    elif next_call == "create":
        assert manager.create("plant", "machines", KeyValueTableConfiguration(9)) is True
        assert list(backend.tables.values()) == ["open"]
    else:
        assert manager.delete_scope("plant") is True
        assert (manager.list_scopes(), backend.tables) == ((), {})


def test_a_creator_that_is_late_leaves_nothing_of_a_table_that_is_deleted(
    manager: KeyValueTableManager, backend: RememberedTables
) -> None:
    late = RememberedTables(manager.lake.url)

    def delete_meanwhile(step: str) -> None:
        if step == "create":
            late.before = lambda step: None
            assert manager.delete("plant", "machines") is True

    late.before = delete_meanwhile
    assert KeyValueTableManager(manager.lake, late).create("plant", "machines", FOUR) is True
    assert (names(manager), backend.tables) == ([], {})


def test_a_sealer_that_is_late_has_sealed_the_table_before_it_was_deleted(
    manager: KeyValueTableManager, backend: RememberedTables
) -> None:
    manager.create("plant", "machines", FOUR)
    late = RememberedTables(manager.lake.url)
    late.before = lambda step: (
        None if step != "seal" else manager.delete("plant", "machines") and None
    )
    assert KeyValueTableManager(manager.lake, late).seal("plant", "machines") is True
    assert (names(manager), backend.tables) == ([], {})


def test_a_backend_that_lost_a_table_is_reported_not_hidden(
    manager: KeyValueTableManager, backend: RememberedTables
) -> None:
    manager.create("plant", "machines", FOUR)
    backend.tables.clear()
    with pytest.raises(KeyValueTableNotFoundError):
        manager.seal("plant", "machines")


def test_a_backend_that_is_out_of_reach_for_a_moment_is_asked_again(
    manager: KeyValueTableManager, backend: RememberedTables
) -> None:
    left = [1, 2]

    def unavailable(step: str) -> None:
        if left:
            left.pop()
            raise TableUnavailableError("busy.", "Ask again.")

    backend.before = unavailable
    assert manager.create("plant", "machines", FOUR) is True
    assert left == []


# -- what the backend refuses


def refusing(step: str) -> None:
    if step == "ask":
        raise TableAccessError("must be owner.", "Be it.")


@pytest.mark.parametrize("ending", ["seal", "delete"])
def test_an_ending_that_the_backend_refuses_has_not_begun(
    manager: KeyValueTableManager, backend: RememberedTables, ending: str
) -> None:
    manager.create("plant", "machines", FOUR)
    other = RememberedTables(manager.lake.url)
    busy = [1, 2]

    def refuse(step: str) -> None:
        if busy:
            busy.pop()
            raise TableUnavailableError("busy.", "Ask again.")
        refusing(step)

    other.before = refuse
    with pytest.raises(TableAccessError, match="must be owner") as refused:
        getattr(KeyValueTableManager(manager.lake, other), ending)("plant", "machines")
    assert (
        "Nothing was started: key-value table 'plant/machines' stays in the state 'active'"
        in str(refused.value.__notes__)
    )
    assert busy == []
    assert state(manager) == "active"
    assert manager.create("plant", "machines", FOUR) is False
    assert list(backend.tables.values()) == ["open"]


@pytest.mark.parametrize("ending", ["seal", "delete"])
def test_a_table_that_took_the_place_of_the_one_asked_about_is_asked_about_itself(
    manager: KeyValueTableManager, backend: RememberedTables, ending: str
) -> None:
    manager.create("plant", "machines", FOUR)
    other = RememberedTables(manager.lake.url)

    def recreated(step: str) -> None:
        other.before = refusing
        assert [manager.delete("plant", "machines"), manager.create("plant", "machines", FOUR)] == [
            True,
            True,
        ]

    other.before = recreated
    with pytest.raises(TableAccessError, match="must be owner"):
        getattr(KeyValueTableManager(manager.lake, other), ending)("plant", "machines")
    assert state(manager) == "active"
    assert list(backend.tables.values()) == ["open"]


def test_an_ending_that_was_begun_is_ended_without_asking(
    manager: KeyValueTableManager, backend: RememberedTables
) -> None:
    for ending in ("seal", "delete"):
        backend.before = lambda step: None
        manager.create("plant", ending, FOUR)
        backend.before = dying(ending)
        with pytest.raises(Died):
            getattr(manager, ending)("plant", ending)
        backend.before = refusing
        assert getattr(manager, ending)("plant", ending) is False
    assert list(backend.tables.values()) == ["sealed"]

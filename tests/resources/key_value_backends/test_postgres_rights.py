"""Roles that own key-value tables in PostgreSQL, write them and only read them, as the page
describes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from dagster_adjunct.resources.errors import (
    AdjunctError,
    TableAccessError,
    TableError,
    TableUnavailableError,
)
from dagster_adjunct.resources.key_value.manager import KeyValueTableManager
from dagster_adjunct.resources.key_value.segment import KeyValueTableConfiguration
from dagster_adjunct.resources.key_value.serializers import IntegerSerializer, TextSerializer
from dagster_adjunct.resources.key_value.table import BlockingKeyValueTable
from dagster_adjunct.resources.key_value_backends.postgres import PostgresSegments
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.resources.key_value_backends.segment_handle import Handle, Run, of, put
from tests.resources.key_value_backends.segment_stores import new_table_id, sqlite
from tests.servers.postgres import PostgresServer, running_server

pytestmark = pytest.mark.server

TWO = KeyValueTableConfiguration(2)
BY_OWNER = "ALTER DEFAULT PRIVILEGES FOR ROLE kv_owner IN SCHEMA rights GRANT"
ROLES = (
    "CREATE SCHEMA rights",
    "CREATE ROLE kv_owner LOGIN",
    "CREATE ROLE kv_writer LOGIN",
    "CREATE ROLE kv_reader LOGIN",
    "ALTER ROLE kv_reader SET default_transaction_read_only = on",
    "GRANT USAGE ON SCHEMA rights TO kv_owner, kv_writer, kv_reader",
    "GRANT CREATE ON SCHEMA rights TO kv_owner",
    f"{BY_OWNER} SELECT, INSERT, UPDATE, DELETE ON TABLES TO kv_writer",
    f"{BY_OWNER} SELECT ON TABLES TO kv_reader",
)


@pytest.fixture
def roles(postgres_server: PostgresServer) -> Iterator[None]:
    for statement in ROLES:
        postgres_server.execute(statement)
    yield
    postgres_server.execute("DROP SCHEMA rights CASCADE")
    for role in ("kv_owner", "kv_writer", "kv_reader"):
        postgres_server.execute(f"DROP OWNED BY {role}")
        postgres_server.execute(f"DROP ROLE {role}")


@dataclass(frozen=True)
class Managers:
    """Managers of the tables of one lake, each as one of the roles."""

    owner: KeyValueTableManager
    writer: KeyValueTableManager
    reader: KeyValueTableManager


def segments(server: PostgresServer, user: str, schema: str = "rights") -> PostgresSegments:
    connect = {"host": "127.0.0.1", "port": str(server.port), "user": user, "dbname": "adjunct"}
    return PostgresSegments(connect=connect, schema=schema)


@pytest.fixture
def managers(roles: None, postgres_server: PostgresServer) -> Managers:
    lake = lake_in(InMemoryStore())
    managers = Managers(
        *(
            KeyValueTableManager(lake, segments(postgres_server, role))
            for role in ("kv_owner", "kv_writer", "kv_reader")
        )
    )
    managers.owner.create_scope("plant")
    return managers


def opened(manager: KeyValueTableManager) -> BlockingKeyValueTable[str, int]:
    return BlockingKeyValueTable(
        manager.open("plant", "machines", key=TextSerializer(), value=IntegerSerializer())
    )


def refused(manager: KeyValueTableManager, ending: str, kind: type[AdjunctError]) -> AdjunctError:
    """Try to end the table in vain; return the error."""
    with pytest.raises(kind) as caught:
        getattr(manager, ending)("plant", "machines")
    assert "Nothing was started" in caught.value.__notes__[0]
    return caught.value


@pytest.mark.parametrize("ending", ["seal", "delete"])
@pytest.mark.parametrize("rights", ["", "CREATE ON SCHEMA rights"])
def test_an_ending_that_the_server_refuses_to_a_writer_has_not_begun(
    managers: Managers, postgres_server: PostgresServer, ending: str, rights: str
) -> None:
    assert managers.owner.create("plant", "machines", TWO) is True
    if rights:
        postgres_server.execute(f"GRANT {rights} TO kv_writer")
    with opened(managers.writer) as table:
        table.put_all([("m1", 1), ("m2", 2)], family="north")
        error = refused(managers.writer, ending, TableAccessError)
        assert any(words in str(error) for words in ("must be owner", "permission denied"))
        assert managers.owner.describe("plant", "machines").state == "active"
        assert managers.owner.create("plant", "machines", TWO) is False
        table.put("m3", 3, family="north")
    with opened(managers.reader) as table:
        assert sorted(entry.value for page in table.all_entries() for entry in page.items) == [
            1,
            2,
            3,
        ]
    assert getattr(managers.owner, ending)("plant", "machines") is True


def test_a_table_that_a_view_of_somebodys_needs_is_not_deleted_by_half(
    managers: Managers, postgres_server: PostgresServer
) -> None:
    managers.owner.create("plant", "machines", TWO)
    with opened(managers.writer) as table:
        table.put("m1", 1)
    place = managers.owner.segments("plant", "machines")[0].location
    name = place.split("table ")[1].split(",")[0]
    postgres_server.execute(f"CREATE VIEW rights.seen AS SELECT count(*) FROM {name}")
    assert "view rights.seen depends on" in str(refused(managers.owner, "delete", TableError))
    with opened(managers.reader) as table:
        assert table.get("m1") is not None
    postgres_server.execute("DROP VIEW rights.seen")
    assert managers.owner.delete("plant", "machines") is True


def test_a_table_whose_creation_was_begun_is_deleted_by_those_who_may(
    managers: Managers, postgres_server: PostgresServer
) -> None:
    """As long as the server has nothing of it everybody may; then it is the owner's."""
    begun = Fault("put_if_match", 1, "crash-after", below="metadata/key-value-tables/")
    made = Fault("put_if_match", 2, "crash-before", below="metadata/key-value-tables/")
    lake = managers.owner.lake
    for death in (begun, made):
        dying = KeyValueTableManager(
            Lake(FaultyStore(lake.store, [death]), lake.id), segments(postgres_server, "kv_owner")
        )
        with pytest.raises(Crash):
            dying.create("plant", "machines", TWO)
        if death is made:
            assert (
                "stays in the state 'creating'"
                in refused(managers.writer, "delete", TableAccessError).__notes__[0]
            )
            assert managers.owner.delete("plant", "machines") is True
        else:
            assert managers.writer.delete("plant", "machines") is True
        assert managers.owner.list("plant") == ()


def test_a_read_only_role_reads_and_is_reported_the_setting_when_it_writes(
    managers: Managers, postgres_server: PostgresServer
) -> None:
    managers.owner.create("plant", "machines", TWO)
    with opened(managers.writer) as table:
        table.put_all([("m1", 1), ("m2", 2)], family="north")
    with opened(managers.reader) as table:
        assert [entry and entry.value for entry in table.get_all(["m1", "m3"], family="north")] == [
            1,
            None,
        ]
        assert [
            entry.value for page in table.entries("north", page_size=1) for entry in page.items
        ] == [1, 2]
        for write in (
            lambda: table.put("m1", 9, family="north"),
            lambda: table.put_all([("m1", 9), ("m3", 9)], family="north"),
            lambda: table.remove("m1", family="north"),
        ):
            with pytest.raises(TableAccessError, match="default_transaction_read_only"):
                write()
        with opened(managers.writer) as other:
            assert [
                entry and entry.value for entry in other.get_all(["m1", "m3"], family="north")
            ] == [1, None]
        for ending in ("seal", "delete"):
            assert "default_transaction_read_only" in str(
                refused(managers.reader, ending, TableAccessError)
            )
        assert managers.owner.describe("plant", "machines").state == "active"
        # A session begins with its setting and keeps it: the handle that was refused has new ones.
        for statement in ("ALTER ROLE kv_reader RESET ALL", "GRANT kv_writer TO kv_reader"):
            postgres_server.execute(statement)
        table.put("m3", 3, family="north")


def test_a_role_whose_sessions_only_read_does_so_in_an_event_loop(
    managers: Managers, run: Run
) -> None:
    managers.owner.create("plant", "machines", TWO)
    with opened(managers.writer) as table:
        table.put("m1", 1)
    handle = managers.reader.open(
        "plant", "machines", key=TextSerializer(), value=IntegerSerializer()
    )

    async def work() -> None:
        async with handle:
            with pytest.raises(TableAccessError) as caught:
                await handle.put("m1", 2)
            assert caught.value.table == "key-value table plant/machines"
            entry = await handle.get("m1")
            assert entry is not None
            assert entry.value == 1

    run(work())


@pytest.mark.parametrize("segment_store", [sqlite], indirect=True)  # for `run`
def test_a_standby_is_not_asked(run: Run) -> None:
    """It may not have the newest yet."""
    with running_server() as server:
        backend = segments(server, "adjunct", "public")
        table = new_table_id()
        backend.create(table, 1)
        handle = Handle(backend.open(table, 0), run)
        handle.write(put(of(b"apple"), b"1"))
        run(handle.segment.close())
        (server.data / "standby.signal").touch()
        server.restart()
        assert server.execute("SELECT pg_is_in_recovery()") == [(True,)]
        for work in (lambda: handle.get(of(b"apple")), lambda: backend.create(new_table_id(), 1)):
            with pytest.raises(TableUnavailableError, match="standby"):
                work()

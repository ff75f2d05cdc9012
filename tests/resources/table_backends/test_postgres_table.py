from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import sys
import threading
import time
from datetime import UTC, datetime, timedelta, timezone

import psycopg
import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    SchemaMismatchError,
    TableAccessError,
    TableError,
    TableUnavailableError,
)
from dagster_adjunct.resources.table_backends.columns import (
    describe_function,
    function_from_description,
)
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.postgres_bookkeeping import PostgresBookkeeping
from dagster_adjunct.resources.table_backends.postgres_connection import (
    connection_settings,
    format_address,
)
from dagster_adjunct.resources.tables.operation import UpdateContract, UpdateMessage, causes
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.resources.table_backends import hammer
from tests.resources.table_backends.every_type import RECORD, TYPES, blocking
from tests.servers.postgres import GUARDED_PASSWORD, GUARDED_USER, PostgresServer

pytestmark = pytest.mark.server

VARIABLE = "ADJUNCT_TEST_DSN"


@pytest.fixture(autouse=True)
def _dsn(postgres_server: PostgresServer, monkeypatch):
    monkeypatch.setenv(VARIABLE, postgres_server.dsn())


def table_of(name: str, key="id", **settings) -> PostgresTable:
    return PostgresTable(
        name, key, **{"columns": TYPES, "create": True, "dsn_env": VARIABLE, **settings}
    )


def test_every_type_of_value_comes_back_as_it_was():
    with blocking(table_of("every_type")) as table:
        table.put(RECORD["id"], RECORD)
        table.put_all([(n, {}) for n in range(3)])
        assert table.get(RECORD["id"]) == RECORD
        assert table.get(2) == {**dict.fromkeys(TYPES), "id": 2}
        assert table.get(RECORD["id"])["at"].tzinfo is UTC
    with blocking(table_of("every_type", columns=None, create=False)) as discovered:
        assert discovered.get(RECORD["id"]) == RECORD


def test_times_without_zone_in_an_existing_table_are_utc(postgres_server):
    postgres_server.execute(
        "CREATE TABLE zoneless (id text PRIMARY KEY, at timestamp, code char(5))"
    )
    east = timezone(timedelta(hours=2))
    with blocking(table_of("zoneless", columns=None, create=False)) as table:
        table.put("a", {"at": datetime(2013, 7, 1, 2, tzinfo=east), "code": "abcde"})
        assert table.get("a") == {
            "id": "a",
            "at": datetime(2013, 7, 1, tzinfo=UTC),
            "code": "abcde",
        }
        with pytest.raises(SchemaMismatchError, match="too long"):
            table.update("a", {"code": "abcdef"})
    assert postgres_server.execute("SELECT at::text FROM zoneless") == [("2013-07-01 00:00:00",)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"s": 5}, "column 's' is text, but got 5 .int.; expected a str"),
        ({"at": datetime(2013, 7, 1)}, "expected a datetime with a time zone"),
        ({"nope": 1}, "no column 'nope'"),
        ({"small": 40_000}, "out of range"),
        ({"s": "a\0b"}, "the values do not fit"),
    ],
)
def test_a_value_that_does_not_fit_is_named_and_the_other_entries_are_written(fields, message):
    with blocking(table_of("misfits")) as table:
        with pytest.raises(SchemaMismatchError, match=message):
            table.put_all([(1, {}), (2, fields)])
        messages = [(1, UpdateMessage({"s": "x"}, {})), (2, UpdateMessage(fields, {}))]
        with pytest.raises(SchemaMismatchError, match=message):
            table.update_messages(messages, UpdateContract.UPDATE_WITH_DEFAULTS)
        assert set(table.get_all([1, 2])) == {1}


def test_keys_of_several_columns_strange_names_and_other_schemas_work():
    columns = {"ori%gin": "string", 'h"our': "timestamp", "__temp": "double"}
    hour = datetime(2013, 7, 1, tzinfo=UTC)
    store = table_of(
        "we ather; --", ["ori%gin", 'h"our'], columns=columns, schema="Other %s schema"
    )
    with blocking(store) as table:
        messages = [(("JFK", hour), UpdateMessage({"__temp": 20.5}, {"__temp": 0.0}))]
        table.update_messages(messages, UpdateContract.UPDATE_WITH_DEFAULTS)
        table.put(("LGA", hour), {"__temp": 1.0})
        table.delete(("LGA", hour))
        both = table.get_all([("LGA", hour), ("JFK", hour)])
        assert both == {("JFK", hour): {"ori%gin": "JFK", 'h"our': hour, "__temp": 20.5}}


def test_a_table_that_is_not_there_or_does_not_fit_is_named(postgres_server):
    place = f"127.0.0.1:{postgres_server.port}/adjunct"
    with (
        blocking(table_of("nowhere", columns=None, create=False)) as table,
        pytest.raises(
            TableAccessError,
            match=rf"PostgreSQL table public.nowhere at {place}: the table does not exist",
        ),
    ):
        table.get(1)
    postgres_server.execute("CREATE TABLE keyless (id text, v int)")
    with (
        blocking(table_of("keyless", columns=None, create=False)) as table,
        pytest.raises(SchemaMismatchError, match="no primary key or unique index on id"),
    ):
        table.get("a")
    with (
        blocking(table_of("keyless", columns={"id": "string", "w": "int"}, create=False)) as table,
        pytest.raises(SchemaMismatchError) as caught,
    ):
        table.get("a")
    assert (caught.value.table, caught.value.column) == ("t", "w")


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ("citext", "citext, which ignores case"),
        ("char(8)", "bpchar, which ignores blanks at the end"),
        ("name", "name, which cuts texts after 63 bytes"),
        ("timestamptz(3)", r"timestamp\(3\) with time zone, which is rounded"),
        ("text COLLATE loose", "text with the collation loose, which is not deterministic"),
    ],
)
def test_keys_that_the_server_takes_for_one_are_refused(postgres_server, column, reason):
    postgres_server.execute("CREATE EXTENSION IF NOT EXISTS citext")
    postgres_server.execute(
        "CREATE COLLATION IF NOT EXISTS loose (provider = icu, locale = 'und-u-ks-level2',"
        " deterministic = false)"
    )
    postgres_server.execute("DROP TABLE IF EXISTS alike")
    postgres_server.execute(f"CREATE TABLE alike (id {column} PRIMARY KEY, n int)")
    with (
        blocking(table_of("alike", columns=None, create=False)) as table,
        pytest.raises(
            SchemaMismatchError,
            match=f"the key column 'id' is {reason}: several keys would be one record",
        ),
    ):
        table.get("a")


def test_a_constraint_of_the_table_refuses_the_entries_that_break_it_and_no_others(postgres_server):
    postgres_server.execute("CREATE TABLE checked (id text PRIMARY KEY, n int CHECK (n < 10))")
    with blocking(table_of("checked", columns=None, create=False)) as table:
        with pytest.raises(TableError, match=r"rejected the request .*check constraint"):
            table.put_all([("a", {"n": 1}), ("b", {"n": 11})])
        assert set(table.get_all(["a", "b"])) == {"a"}
        assert table.metrics.store.retries == 0


def test_a_session_that_only_reads_is_reported_the_setting_when_it_writes(
    postgres_server, monkeypatch
):
    with blocking(table_of("read_only")) as table:
        table.put(1, {"s": "x"})
    monkeypatch.setenv(
        VARIABLE, f"{postgres_server.dsn()}?options=-c%20default_transaction_read_only%3Don"
    )
    with blocking(table_of("read_only", create=False)) as table:
        with pytest.raises(TableAccessError, match="default_transaction_read_only"):
            table.put_all([(1, {"s": "y"}), (2, {"s": "y"})])
        assert table.metrics.store.retries == 0
        assert table.get(1)["s"] == "x"


def test_an_error_quotes_no_row_of_the_table(postgres_server):
    """The server's own details do, with columns that the update did not name."""
    postgres_server.execute(
        "CREATE TABLE owned (id text PRIMARY KEY, email text, n int CHECK (n < 10), s text NOT NULL"
        " UNIQUE)"
    )
    postgres_server.execute(
        "INSERT INTO owned VALUES ('a', 'a@example.com', 1, 'one'), ('b', 'b@example.com', 1,"
        " 'two')"
    )
    columns = {"id": "string", "n": "int", "s": "string"}
    batch = pa.table({"id": ["a", "b"], "n": [11, 12]})
    with blocking(table_of("owned", columns=columns, create=False)) as table:
        for words, wrong in (
            ('check constraint "owned_n_check"', lambda: table.update("a", {"n": 11})),
            ('check constraint "owned_n_check"', lambda: table.update_all(batch)),
            ('null value in column "s"', lambda: table.update("a", {"s": None})),
            ('unique constraint "owned_s_key"', lambda: table.update("a", {"s": "two"})),
        ):
            with pytest.raises(TableError) as raised:
                wrong()
            assert words in str(raised.value)
            assert not any(
                quoted in str(raised.value) for quoted in ("@example.com", "DETAIL", "CONTEXT")
            )


def test_a_server_down_for_longer_than_the_retries_is_a_transient_error(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        monkeypatch.setenv(VARIABLE, f"postgresql://someone:hunter2@127.0.0.1:{port}/db")
        with (
            blocking(table_of("t"), retry=RetryPolicy(attempts=3, first_wait=0.01)) as table,
            pytest.raises(
                TableUnavailableError, match=rf"127.0.0.1:{port}/db can't be reached"
            ) as error,
        ):
            table.get(1)
        assert "Check that the server runs" in str(error.value)
        assert "hunter2" not in repr(error.value) + str(error.value)
        assert table.metrics.store.retries == 2


@pytest.mark.parametrize(
    "user", [f"{GUARDED_USER}:wr0ng-pass", GUARDED_USER, "nobody-of-this-name"]
)
def test_a_refused_login_is_not_tried_again_and_shows_no_password(
    postgres_server, monkeypatch, user, caplog
):
    monkeypatch.setenv(VARIABLE, f"postgresql://{user}@127.0.0.1:{postgres_server.port}/adjunct")
    with (
        caplog.at_level(logging.DEBUG),
        blocking(table_of("t")) as table,
        pytest.raises(
            TableAccessError, match=f":{postgres_server.port}/adjunct rejected the login"
        ) as error,
    ):
        table.get(1)
    assert table.metrics.store.retries == 0
    assert "wr0ng-pass" not in str(error.value) + caplog.text


def test_a_password_that_is_changed_while_a_process_runs_is_read_again(
    postgres_server, monkeypatch, tmp_path
):
    user, file = "rotated", tmp_path / "pgpass"
    postgres_server.execute(
        f"CREATE ROLE {user} LOGIN PASSWORD 'first'; CREATE TABLE for_rotated (id text PRIMARY KEY)"
    )
    postgres_server.execute(f"GRANT ALL ON for_rotated TO {user}")
    postgres_server.require_password(user)
    postgres_server.execute("SELECT pg_reload_conf()")

    def write_password(password: str) -> None:
        file.write_text(f"*:*:*:*:{password}\n")
        file.chmod(0o600)

    monkeypatch.setenv(
        VARIABLE, f"postgresql://{user}@127.0.0.1:{postgres_server.port}/adjunct?passfile={file}"
    )
    store = table_of("for_rotated", columns=None, create=False)
    write_password("wrong")
    with blocking(store) as table, pytest.raises(TableAccessError, match="rejected the login"):
        table.get("a")
    write_password("first")
    with blocking(store) as table:
        assert table.get("a") is None
    postgres_server.execute(f"ALTER ROLE {user} PASSWORD 'second'")
    with (
        blocking(store) as table,
        pytest.raises(TableUnavailableError, match="a login that it accepted before"),
    ):
        table.get("a")
    write_password("second")
    with blocking(store) as table:
        assert table.get("a") is None


def test_the_right_password_works_and_is_in_no_repr_pickle_or_description(
    postgres_server, monkeypatch, caplog
):
    postgres_server.execute(
        "CREATE TABLE for_guarded (id text PRIMARY KEY); GRANT ALL ON for_guarded TO"
        f" {GUARDED_USER}"
    )
    monkeypatch.setenv(VARIABLE, postgres_server.dsn(GUARDED_USER, GUARDED_PASSWORD))
    store = table_of("for_guarded", columns=None, create=False)
    table = RemoteTable("t", key="id", read_function=store, write_function=store)

    async def use():
        async with table:
            await table.put("a", {})
            return repr(table) + repr(pickle.dumps(table)) + repr(describe_function(store))

    with caplog.at_level(logging.DEBUG):
        displayed = asyncio.run(use())
    assert GUARDED_PASSWORD not in displayed + caplog.text
    assert VARIABLE in displayed


def test_a_password_in_the_declaration_is_refused():
    with pytest.raises(ConfigurationError) as error:
        PostgresTable("t", "id", connect={"host": "127.0.0.1", "password": "hunter2"})
    assert error.value.argument == "password"
    assert "hunter2" not in str(error.value)


def test_a_variable_that_is_not_set_or_holds_no_dsn_is_named(monkeypatch):
    monkeypatch.delenv(VARIABLE)
    with blocking(table_of("t")) as table, pytest.raises(ConfigurationError) as caught:
        table.get(1)
    assert caught.value.setting == VARIABLE
    monkeypatch.setenv(VARIABLE, "postgres//someone:hunter2@host/db")
    with blocking(table_of("t")) as table, pytest.raises(ConfigurationError) as error:
        table.get(1)
    assert error.value.setting == VARIABLE
    assert "hunter2" not in str(error.value)
    assert not [cause for cause in causes(error.value) if isinstance(cause, psycopg.Error)]


def test_libpqs_own_environment_works_when_no_variable_is_named(postgres_server, monkeypatch):
    for name, value in (("HOST", "127.0.0.1"), ("PORT", postgres_server.port), ("USER", "adjunct")):
        monkeypatch.setenv(f"PG{name}", str(value))
    with blocking(table_of("from_environment", dsn_env=None)) as table:
        table.put(1, {"s": "x"})
        assert table.get(1)["s"] == "x"
    assert (
        format_address(connection_settings("t", None, {}))
        == f"127.0.0.1:{postgres_server.port}/adjunct"
    )
    assert format_address(connection_settings("t", None, {"service": "x"})) == "service x"


def test_a_description_is_plain_and_builds_the_same_function():
    store = table_of("described")
    description = describe_function(store)
    assert description["backend"] == "postgres"
    assert describe_function(function_from_description(description)) == description


def test_a_server_that_restarts_in_the_middle_costs_retries_and_no_update(postgres_server):
    with blocking(table_of("restarted")) as table:
        done = threading.Event()

        def restart():
            time.sleep(0.3)
            postgres_server.restart()
            done.set()

        restarting = threading.Thread(target=restart)
        restarting.start()
        turn = 0
        while not done.is_set() or turn < 10:
            messages = [(n, UpdateMessage({"s": f"{turn}"}, {"f": 1.0})) for n in range(50)]
            table.update_messages(messages, UpdateContract.UPDATE_WITH_DEFAULTS)
            turn += 1
        restarting.join()
        for n in range(50):
            assert table.get(n) == {**dict.fromkeys(TYPES), "id": n, "s": f"{turn - 1}", "f": 1.0}
        assert table.metrics.store.retries >= 1
        assert table.metrics.store.failures == 0


def test_a_connection_ended_by_an_administrator_is_made_again(postgres_server):
    with blocking(table_of("ended")) as table:
        table.put(1, {})
        postgres_server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ="
            " 'adjunct'"
        )
        table.put(2, {})
        assert table.metrics.store.retries == 1
        assert set(table.get_all([1, 2])) == {1, 2}


def test_without_retries_a_lost_connection_is_a_transient_error(postgres_server):
    with blocking(table_of("lost"), retry=RetryPolicy(attempts=1)) as table:
        table.put(1, {})
        postgres_server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ="
            " 'adjunct'"
        )
        with pytest.raises(
            TableUnavailableError, match=f"at 127.0.0.1:{postgres_server.port}/adjunct"
        ):
            table.put(2, {})
        table.put(2, {})


def test_one_table_object_may_be_used_in_one_event_loop_after_another():
    store = table_of("loops")
    table = RemoteTable("t", key="id", read_function=store, write_function=store)
    asyncio.run(table.put(1, {"s": "x"}))
    assert asyncio.run(table.get(1))["s"] == "x"
    asyncio.run(table.close())


def test_an_open_table_is_used_in_a_second_loop_that_runs_next_to_the_first():
    store = table_of("two_loops")
    with blocking(store) as table:
        table.put(1, {"s": "x"})
        assert asyncio.run(store.get(1))["s"] == "x"
        asyncio.run(store.close())
        assert table.get(1)["s"] == "x"


@pytest.mark.long  # fewer: test_sql_tables.py; other orders: test_postgres_requests.py
def test_eight_processes_that_update_the_same_keys_in_other_orders_lose_nothing():
    hammer.check(*hammer.run_all(table_of("hammered", columns=hammer.columns())))


def test_the_victim_of_a_deadlock_runs_its_whole_transaction_again(postgres_server):
    patient = {"options": "-c deadlock_timeout=1s"}
    with blocking(table_of("deadlocked", connect=patient)) as table:
        table.put_all([(1, {}), (2, {})])
        with psycopg.connect(postgres_server.dsn()) as other:
            other.execute("SET deadlock_timeout = '20s'")
            other.execute("UPDATE deadlocked SET s = 'theirs' WHERE id = 2")
            messages = [(n, UpdateMessage({"f": 1.0})) for n in (2, 1)]
            ours = threading.Thread(target=table.update_messages, args=(messages,))
            ours.start()
            while postgres_server.execute("SELECT count(*) FROM pg_locks WHERE NOT granted") == [
                (0,)
            ]:
                time.sleep(0.02)  # until ours holds 1 and waits for 2
            other.execute("UPDATE deadlocked SET s = 'theirs' WHERE id = 1")
        ours.join()
        assert table.metrics.store.retries == 1
        assert {(row["s"], row["f"]) for row in table.get_all([1, 2]).values()} == {("theirs", 1.0)}


def test_without_the_driver_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with (
        blocking(table_of("t")) as table,
        pytest.raises(ConfigurationError, match=r"dagster-adjunct\[postgres\]"),
    ):
        table.get(1)


@pytest.mark.parametrize("recreated", [False, True])
def test_runs_that_begin_at_once_give_a_table_one_id(postgres_server, recreated):
    name = f"counted_{recreated}".lower()
    postgres_server.execute(f"CREATE TABLE {name} (id text PRIMARY KEY)")

    async def count_at_once() -> None:
        async with (
            await psycopg.AsyncConnection.connect(postgres_server.dsn(), autocommit=True) as one,
            await psycopg.AsyncConnection.connect(postgres_server.dsn(), autocommit=True) as other,
        ):
            first = PostgresBookkeeping(one, "public", name)
            second = PostgresBookkeeping(other, "public", name)
            await first.create()
            if recreated:
                await first.count_run()
                old = await first.presence()
                await one.execute(f"DROP TABLE {name}")
                await one.execute(f"CREATE TABLE {name} (id text PRIMARY KEY)")
            async with one.transaction():
                await first.count_run()
                found = await first.presence()
                counting = asyncio.create_task(second.count_run())
                while postgres_server.execute(
                    "SELECT count(*) FROM pg_locks WHERE NOT granted"
                ) == [(0,)]:
                    await asyncio.sleep(0.01)
            await counting
            now = await second.presence()
            assert now.id == found.id is not None
            assert now.runs == found.runs + 1
            assert not recreated or found.id != old.id

    asyncio.run(count_at_once())

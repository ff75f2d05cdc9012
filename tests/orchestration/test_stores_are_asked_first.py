"""What is wrong with a table's store, and not with a record, is told before a batch is begun,
and creates nothing.
"""

from __future__ import annotations

import socket
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.errors import (
    AdjunctError,
    ConfigurationError,
    OperatorFailedError,
    SchemaMismatchError,
    TableAccessError,
    TableNotFoundError,
    TableUnavailableError,
)
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.table_registry import check_stores, list_uses
from dagster_adjunct.orchestration.operators.table_updates import update_message
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.http import HttpTable
from dagster_adjunct.resources.table_backends.key_value_rows import KeyValueRows
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.redis import RedisTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.functions import TableUse
from dagster_adjunct.resources.tables.operation import OperationKind, UpdateContract
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.orchestration.asked_table import NotedTable
from tests.orchestration.step_world import StepWorld
from tests.servers.http_records import running_service

ONCE = RetryPolicy(attempts=1)
COLUMNS = {"k": "string", "v": "int"}


@pytest.fixture
def world(tmp_path: Path) -> StepWorld:
    world = StepWorld(open_lake(tmp_path / "lake"), tmp_path, IN_PROCESS)
    world.stream("changes", "k", 2, k="string", v="int")
    world.send("changes", *((f"k{n}", n) for n in range(20)))
    return world


def sending(
    function: Any, *, reads: bool = False, updates: bool = True, **settings: Any
) -> Application:
    """An application with an output stream, which is written before the table."""
    app = Application("app", engine="auto")
    both = {"read_function": function} if reads else {"write_function": function}
    table = app.table(RemoteTable("state", key="k", retry=ONCE, **both, **settings))
    stream = app.input_stream("lake.changes")
    stream.send_to(app.output_stream("lake.copied", partitions=1))
    if reads:
        found = stream.select("k").join(table, on="k", how="left", select={"v": "int"})
        found.send_to(app.output_stream("lake.looked", partitions=1))
    elif updates:
        stream.update(table, set=["v"], if_missing=[])
    else:
        stream.send_to(table)
    return app


def refused(world: StepWorld, app: Application, kind: type[AdjunctError]) -> AdjunctError:
    """The error of a run, which has begun no batch and written nothing."""
    with pytest.raises(kind) as caught:
        world.run(app)
    assert world.state(app).open is None
    assert "copied" not in world.streams.list_streams()
    assert "records" not in caught.value.problem
    assert "k1" not in caught.value.problem
    assert caught.value.problem.startswith(("send-to-table-3-state: ", "join-4-state: "))
    assert getattr(caught.value, "table", "state") == "state"
    return caught.value


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def away(lake: Any) -> dict[str, Any]:
    port = free_port()
    return {
        "postgres": PostgresTable(
            "t", "k", connect={"host": "127.0.0.1", "port": port}, columns=COLUMNS, create=True
        ),
        "redis": RedisTable("t", "k", columns=COLUMNS, url=f"redis://127.0.0.1:{port}"),
        "http": HttpTable(f"http://127.0.0.1:{port}", "/things/{k}", "k", puts_if_absent=True),
        "dynamodb": DynamoDbTable(
            "t",
            "k",
            columns=COLUMNS,
            region="eu-west-1",
            endpoint_url=f"http://127.0.0.1:{port}",
            create=True,
        ),
    }


@pytest.fixture
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.mark.usefixtures("_credentials")
@pytest.mark.parametrize("updates", [True, False])
@pytest.mark.parametrize("store", ["postgres", "redis", "http", "dynamodb"])
def test_a_server_that_is_away_is_the_one_cause(
    world: StepWorld, store: str, updates: bool
) -> None:
    refused(world, sending(away(world.lake)[store], updates=updates), TableUnavailableError)


@pytest.mark.usefixtures("_credentials")
@pytest.mark.parametrize("store", ["postgres", "redis", "http", "dynamodb"])
def test_a_table_that_is_only_looked_up_is_asked_too(world: StepWorld, store: str) -> None:
    refused(world, sending(away(world.lake)[store], reads=True), TableUnavailableError)


def of_variables() -> dict[str, Any]:
    headers = {"Authorization": "ADJUNCT_TEST_UNSET"}
    return {
        "postgres": PostgresTable("t", "k", dsn_env="ADJUNCT_TEST_UNSET", columns=COLUMNS),
        "redis": RedisTable("t", "k", columns=COLUMNS, url_env="ADJUNCT_TEST_UNSET"),
        "http": HttpTable(
            "http://127.0.0.1:1", "/t/{k}", "k", secret_headers=headers, puts_if_absent=True
        ),
        "dynamodb": DynamoDbTable(
            "t",
            "k",
            columns=COLUMNS,
            region="eu-west-1",
            credentials_env=("ADJUNCT_TEST_UNSET", "ADJUNCT_TEST_UNSET"),
        ),
    }


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("store", ["postgres", "redis", "http", "dynamodb"])
def test_an_unset_variable_is_named(world: StepWorld, store: str, reads: bool) -> None:
    error = refused(world, sending(of_variables()[store], reads=reads), ConfigurationError)
    assert getattr(error, "setting", None) == "ADJUNCT_TEST_UNSET"


def test_a_missing_file_or_table_or_column_of_sqlite_is_reported(world: StepWorld) -> None:
    path = world.folder / "t.sqlite"
    for exists in (False, True):
        if exists:
            sqlite3.connect(path).close()
        refused(world, sending(SqliteTable(path, "t", "k")), TableNotFoundError)
        assert path.exists() == exists
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (k TEXT PRIMARY KEY, w INT)")
    for columns in (None, COLUMNS):
        error = refused_or_planned(world, sending(SqliteTable(path, "t", "k", columns=columns)))
        assert "'v'" in error.problem


def refused_or_planned(world: StepWorld, app: Application) -> Any:
    with pytest.raises(AdjunctError) as caught:
        world.run(app)
    assert world.state(app).open is None
    return caught.value


def test_a_file_that_can_not_be_written_is_reported(
    world: StepWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = world.folder / "t.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (k TEXT PRIMARY KEY, v INT)")
    (world.folder / "plain").write_text("")
    nowhere = SqliteTable(
        world.folder / "plain" / "t.sqlite", "t", "k", columns=COLUMNS, create=True
    )
    refused(world, sending(nowhere), TableAccessError)
    store = SqliteTable(path, "t", "k")
    monkeypatch.setattr(SqliteTable, "_connect_file", lambda self, mode: read_only(self.path))
    refused(world, sending(store), TableAccessError)
    assert world.run(sending(store, reads=True)).batches == 1


def read_only(path: str) -> sqlite3.Connection:
    uri = f"file:{path}?mode=ro"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)


def test_a_table_that_another_process_writes_at_the_moment_is_no_mistake(world: StepWorld) -> None:
    path = world.folder / "t.sqlite"
    store = SqliteTable(path, "t", "k", columns=COLUMNS, create=True)
    with BlockingTable(RemoteTable("state", key="k", write_function=store)) as table:
        table.put("a", {"v": 1})
    app = sending(store)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    check_stores(app)
    connection.execute("ROLLBACK")


def test_asking_creates_nothing(world: StepWorld) -> None:
    path = world.folder / "made" / "t.sqlite"
    rows = KeyValueRows(
        str(world.folder / "other-lake"), "s", "t", "k", columns=COLUMNS, create=True
    )
    for function in (SqliteTable(path, "t", "k", columns=COLUMNS, create=True), rows):
        for settings in ({}, {"idempotent": True, "newest_by": "v"}):
            check_stores(sending(function, **settings))
    assert not path.parent.exists()
    assert not (world.folder / "other-lake").exists()


def test_a_key_value_table_that_is_not_there_is_reported(world: StepWorld) -> None:
    rows = KeyValueRows(world.lake, "s", "t", "k", columns=COLUMNS)
    app = sending(rows)
    error = refused_or_planned(world, app)
    assert error.problem.startswith("send-to-table-3-state: ")


@pytest.mark.server
@pytest.mark.parametrize(
    ("lacks", "use"),
    [
        ("INSERT", "update"),
        ("UPDATE", "update"),
        ("UPDATE", "put"),
        ("SELECT", "read"),
        ("nothing", "update"),
        ("nothing", "put"),
        ("nothing", "read"),
    ],
)
def test_rights_that_are_missing_in_postgres_are_named(
    world: StepWorld, postgres_server: Any, lacks: str, use: str
) -> None:
    name = f"rights_{lacks}_{use}".lower()
    user = f"user_{name}"
    postgres_server.execute(f"CREATE ROLE {user} LOGIN")
    postgres_server.execute(f"CREATE TABLE {name} (k text PRIMARY KEY, v int)")
    granted = [
        right
        for right in ("SELECT", "INSERT", "UPDATE")
        if right != lacks and (use != "read" or right == "SELECT")
    ]
    for right in granted:
        postgres_server.execute(f"GRANT {right} ON {name} TO {user}")
    connect = {"host": "127.0.0.1", "port": postgres_server.port, "user": user, "dbname": "adjunct"}
    app = sending(
        PostgresTable(name, "k", connect=connect), reads=use == "read", updates=use == "update"
    )
    if lacks == "nothing":
        assert world.run(app).batches == 1
    else:
        error = refused(world, app, TableAccessError)
        assert f"no right to {lacks} in public.{name}" in error.problem


@pytest.mark.server
def test_rights_to_some_columns_are_enough_where_no_others_are_written(
    world: StepWorld, postgres_server: Any
) -> None:
    postgres_server.execute("CREATE ROLE narrow LOGIN")
    postgres_server.execute("CREATE TABLE narrow_rights (k text PRIMARY KEY, v int, w int)")
    postgres_server.execute(
        "INSERT INTO narrow_rights SELECT 'k' || n, 0 FROM generate_series(0, 19) AS n"
    )
    postgres_server.execute("GRANT SELECT (k), UPDATE (v) ON narrow_rights TO narrow")
    connect = {
        "host": "127.0.0.1",
        "port": postgres_server.port,
        "user": "narrow",
        "dbname": "adjunct",
    }
    store = PostgresTable("narrow_rights", "k", connect=connect)
    app = Application("app", engine="auto")
    table = app.table(RemoteTable("state", key="k", retry=ONCE, write_function=store))
    app.input_stream("lake.changes").update(table, set=["v"])
    assert world.run(app).batches == 1
    assert postgres_server.execute("SELECT sum(v) FROM narrow_rights") == [(190,)]
    other = Application("other", engine="auto")
    table = other.table(RemoteTable("state", key="k", retry=ONCE, write_function=store))
    message = update_message(key="k", update=["v"])
    other.input_stream("lake.changes").map(*message).send_to(table, UpdateContract.UPDATE_ONLY)
    check_stores(other)


@pytest.mark.server
def test_what_postgres_would_reject_for_all_records_is_reported_first(
    world: StepWorld, postgres_server: Any
) -> None:
    connect = {
        "host": "127.0.0.1",
        "port": postgres_server.port,
        "user": "adjunct",
        "dbname": "adjunct",
    }
    postgres_server.execute("CREATE TABLE asked_first (k text PRIMARY KEY, w int)")
    dropped = PostgresTable("asked_first", "k", connect=connect, columns=COLUMNS)
    assert refused(world, sending(dropped), SchemaMismatchError).facts["column"] == "v"
    missing = PostgresTable("nowhere", "k", connect=connect, columns=COLUMNS)
    refused(world, sending(missing), TableNotFoundError)
    postgres_server.execute("CREATE ROLE makes_nothing LOGIN")
    postgres_server.execute("CREATE SCHEMA closed")
    other = PostgresTable(
        "made",
        "k",
        connect={**connect, "user": "makes_nothing"},
        columns=COLUMNS,
        create=True,
        schema="closed",
    )
    refused(world, sending(other), TableAccessError)
    postgres_server.execute("ALTER ROLE makes_nothing SET default_transaction_read_only = on")
    postgres_server.execute("GRANT ALL ON asked_first TO makes_nothing")
    postgres_server.execute("ALTER TABLE asked_first ADD COLUMN v int")
    reading = PostgresTable("asked_first", "k", connect={**connect, "user": "makes_nothing"})
    refused(world, sending(reading), TableAccessError)
    assert world.run(sending(reading, reads=True)).batches == 1


@pytest.mark.server
def test_a_wrong_password_is_reported_before_a_batch(
    world: StepWorld, postgres_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.servers.postgres import GUARDED_USER

    monkeypatch.setenv("ADJUNCT_TEST_DSN", postgres_server.dsn(GUARDED_USER, "wrong"))
    error = refused(
        world,
        sending(PostgresTable("t", "k", dsn_env="ADJUNCT_TEST_DSN", columns=COLUMNS)),
        TableAccessError,
    )
    assert "wrong" not in str(error)


def test_a_service_needs_to_answer_no_more_than_it_does(
    world: StepWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with running_service() as service:  # which does not know HEAD
        app = sending(HttpTable(service.url, "/t/{k}", "k", puts_if_absent=True), updates=False)
        assert world.run(app).batches == 1
        assert len(service.seen) == 20


class Checked(NotedTable):
    """A user's table, whose check raises."""

    def __init__(self, path: str, problems: list[Exception]) -> None:
        super().__init__(path)
        self.problems, self.uses, self.closed = problems, list[TableUse](), 0

    async def check(self, use: TableUse) -> None:
        self.uses.append(use)
        if self.problems:
            raise self.problems.pop(0)

    async def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (OSError("no route"), TableUnavailableError),
        (RuntimeError("closed"), TableAccessError),
        (TableAccessError("it is closed.", "Open it."), TableAccessError),
    ],
)
def test_a_users_table_may_say_that_it_can_not_be_used(
    world: StepWorld, raised: Exception, kind: Any
) -> None:
    function = Checked(str(world.folder / "keys"), [raised])
    app = sending(function, updates=False)
    refused(world, app, kind)
    assert not (world.folder / "keys").exists()
    assert world.run(app).batches == 1
    assert [use.kinds for use in function.uses] == [frozenset({OperationKind.PUT})] * 2


def test_a_table_that_comes_back_in_time_is_asked_again(world: StepWorld) -> None:
    function = Checked(str(world.folder / "keys"), [OSError("away"), OSError("away")])
    app = Application("app", engine="auto")
    retry = RetryPolicy(3, first_wait=0.0)
    stream = app.input_stream("lake.changes")
    stream.send_to(app.table(RemoteTable("state", key="k", write_function=function, retry=retry)))
    assert world.run(app).batches == 1
    assert len(function.uses) == 3


class Closing(NotedTable):
    """A table whose rights are taken away after it was asked."""

    async def put(self, key: Any, value: Any, *args: object) -> None:
        raise TableAccessError("the door is closed.", "Open it.")


def test_what_goes_wrong_for_all_records_later_is_one_cause_too(world: StepWorld) -> None:
    with pytest.raises(TableAccessError) as caught:
        world.run(sending(Closing(str(world.folder / "keys")), updates=False))
    assert caught.value.problem == "the door is closed. Table state lacks 20 records of this batch."


def test_a_sink_may_say_that_it_can_not_be_used(world: StepWorld) -> None:
    app = Application("app", engine="auto")
    app.input_stream("lake.changes").sink(Door(str(world.folder / "open")))
    with pytest.raises(OperatorFailedError) as caught:
        check_stores(app)
    assert "no open door" in caught.value.problem
    (world.folder / "open").write_text("")
    check_stores(app)


class Door:
    def __init__(self, path: str) -> None:
        self.path = path

    def check(self) -> None:
        if not Path(self.path).exists():
            raise RuntimeError("no open door")

    def __call__(self, records: Any, context: Any) -> None:
        pass


def test_what_is_asked_names_the_columns_of_updates(world: StepWorld) -> None:
    app = Application("app")
    store = SqliteTable(world.folder / "t.sqlite", "t", "k", columns=COLUMNS, create=True)
    table = app.table(
        RemoteTable("state", key="k", read_function=store, write_function=store, idempotent=True)
    )
    stream = app.input_stream("lake.changes")
    stream.update(table, set={"v": "v"}, if_missing={"first": "v"})
    stream.update(table, remove=["w"])
    (used,) = list_uses(app)
    assert used.function is store
    use = used.use
    assert use.columns == {"v", "first", "w"}
    assert use.kinds == {OperationKind.UPDATE, OperationKind.PUT_IF_ABSENT}
    assert use.conditions.idempotent


@pytest.mark.server
def test_what_redis_would_reject_for_all_records_is_reported_first(
    world: StepWorld, redis_server: Any
) -> None:
    address = f"127.0.0.1:{redis_server.port}"
    redis_server.client().execute_command(
        "ACL", "SETUSER", "reader", "on", "nopass", "~*", "+@read", "+@connection", "+hmget"
    )
    reader = RedisTable("asked", "k", columns=COLUMNS, url=f"redis://reader@{address}")
    refused(world, sending(reader), TableAccessError)
    for function in (reader, RedisTable("asked", "k", columns=COLUMNS, url=f"redis://{address}")):
        assert world.run(sending(function, reads=function is reader)).batches == 1
        world.send("changes", ("k1", 1))
    assert redis_server.client().keys("asked:*") == [b"asked:k1"]


@pytest.mark.server
def test_what_dynamodb_would_reject_for_all_records_is_reported_first(
    world: StepWorld, dynamodb_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dynamodb_table(dynamodb_server, monkeypatch)
    refused(world, sending(store), TableNotFoundError)
    created = dynamodb_table(dynamodb_server, monkeypatch, create=True)
    check_stores(sending(created))
    refused(world, sending(store), TableNotFoundError)
    assert world.run(sending(created)).batches == 1
    for reads in (False, True):
        check_stores(sending(store, reads=reads))
    with BlockingTable(RemoteTable("state", key="k", read_function=store)) as table:
        assert table.get("adjunct-check") is None
    world.send("changes", ("k1", 1))
    other = dynamodb_table(dynamodb_server, monkeypatch, columns={"k": "binary", "v": "int"})
    with pytest.raises(SchemaMismatchError):
        check_stores(sending(other))


def dynamodb_table(server: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> DynamoDbTable:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    where = {"region": "eu-west-1", "endpoint_url": server.endpoint}
    return DynamoDbTable("asked_first", "k", **{"columns": COLUMNS, **where, **settings})

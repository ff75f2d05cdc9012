"""A table that its store has lost between runs, batches or within a run is an error in every
store, until accepted.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError

from dagster_adjunct import Application, run_application
from dagster_adjunct.errors import (
    KeyValueTableNotFoundError,
    SchemaMismatchError,
    TableAccessError,
    TableNotFoundError,
    TableReplacedError,
)
from dagster_adjunct.orchestration.application import table_registry
from dagster_adjunct.orchestration.application.table_registry import (
    open_registered_table,
    reset_table,
)
from dagster_adjunct.orchestration.step.progress import StepEvent
from dagster_adjunct.resources.key_value.manager import KeyValueTableManager
from dagster_adjunct.resources.key_value.segment import SegmentBackend
from dagster_adjunct.resources.key_value_backends.dynamodb import DynamoDbSegments
from dagster_adjunct.resources.key_value_backends.objects.segment import ObjectSegments
from dagster_adjunct.resources.key_value_backends.postgres import PostgresSegments
from dagster_adjunct.resources.key_value_backends.sqlite import SqliteSegments
from dagster_adjunct.resources.objects import commit_log
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.key_value_rows import KeyValueRows
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.redis import RedisTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.presence import Presence, find_loss
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.orchestration.cli.commands import document
from tests.orchestration.table_runs import COLUMNS, TableRuns
from tests.servers.dynamodb import DynamoDbServer
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServerProcess

_names = count()


@dataclass
class Losing:
    """A store's table, and how somebody drops it."""

    store: Callable[[], Any]
    drop: Callable[[], object]


def sqlite_losing(request: pytest.FixtureRequest, folder: Path) -> Losing:
    def drop() -> None:
        with closing(sqlite3.connect(folder / "state.sqlite")) as connection:
            connection.execute("DROP TABLE totals")

    return Losing(
        lambda: SqliteTable(folder / "state.sqlite", "totals", "id", columns=COLUMNS, create=True),
        drop,
    )


def postgres_losing(request: pytest.FixtureRequest, folder: Path) -> Losing:
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = f"lost_{next(_names)}"
    return Losing(
        lambda: PostgresTable(name, "id", columns=COLUMNS, create=True, connect=connect(server)),
        lambda: server.execute(f"DROP TABLE {name}"),
    )


def redis_losing(request: pytest.FixtureRequest, folder: Path) -> Losing:
    server: RedisServerProcess = request.getfixturevalue("redis_server")
    name = f"lost{next(_names)}"
    return Losing(
        lambda: RedisTable(name, "id", columns=COLUMNS, url=server.url()),
        lambda: server.client().flushall(),
    )


def dynamodb_losing(request: pytest.FixtureRequest, folder: Path) -> Losing:
    server: DynamoDbServer = request.getfixturevalue("dynamodb")
    name = f"lost-{next(_names)}"
    where: dict[str, Any] = {"region": "us-east-1", "endpoint_url": server.endpoint}
    return Losing(
        lambda: DynamoDbTable(name, "id", columns=COLUMNS, create=True, **where),
        lambda: server.client().delete_table(TableName=name),
    )


def key_value_losing(request: pytest.FixtureRequest, folder: Path) -> Losing:
    url = str(folder / "lake")
    return Losing(
        lambda: KeyValueRows(url, "lost", "totals", "id", columns=COLUMNS, create=True),
        lambda: KeyValueTableManager(open_lake(url)).delete("lost", "totals"),
    )


def connect(server: PostgresServer) -> dict[str, str | int]:
    return {"host": "127.0.0.1", "port": server.port, "user": "adjunct", "dbname": "adjunct"}


STORES = [
    pytest.param(sqlite_losing, id="sqlite"),
    pytest.param(postgres_losing, id="postgres", marks=pytest.mark.server),
    pytest.param(redis_losing, id="redis", marks=pytest.mark.server),
    pytest.param(dynamodb_losing, id="dynamodb", marks=[pytest.mark.server, pytest.mark.long]),
    pytest.param(key_value_losing, id="key-value"),
]
pytestmark = pytest.mark.lengthy


@pytest.fixture(params=STORES)
def losing(request: pytest.FixtureRequest, tmp_path: Path) -> Losing:
    made: Losing = request.param(request, tmp_path)
    return made


@pytest.fixture
def runs(losing: Losing, tmp_path: Path) -> TableRuns:
    return TableRuns(tmp_path, losing.store)


def test_a_table_dropped_between_runs_is_an_error_until_it_is_accepted(
    runs: TableRuns, losing: Losing
) -> None:
    runs.send(("a", 1), ("b", 2))
    runs.run()
    losing.drop()
    runs.send(("a", 10))
    for _ in range(2):
        with pytest.raises(TableNotFoundError) as refused:
            runs.run()
        assert refused.value.table == "totals"
    document(runs, "table", "allow-recreate", "totals", "--by", "test", "--reason", "lost")
    runs.run()
    assert runs.totals() == {"a": 10}


def test_a_run_in_which_nothing_is_lost_adds_up_everything(runs: TableRuns) -> None:
    for amount in (1, 2, 4):
        runs.send(("a", amount))
        runs.run()
    runs.run()  # which has nothing to read
    assert runs.totals() == {"a": 7}


def test_a_table_dropped_before_the_first_write_of_a_run_is_an_error(
    runs: TableRuns, losing: Losing
) -> None:
    runs.send(("a", 1))
    runs.run()
    runs.send(("a", 10))
    dropped = []

    def drop_after_the_plan(event: StepEvent) -> None:
        if event.what == "planned" and not dropped:
            dropped.append(losing.drop())

    with pytest.raises(TableNotFoundError):
        runs.run(on_event=drop_after_the_plan)
    with pytest.raises(TableNotFoundError):
        runs.run()


def test_a_table_dropped_between_two_batches_of_a_run_is_an_error(
    runs: TableRuns, losing: Losing
) -> None:
    runs.send(("a", 1))

    def drop_after_a_batch(event: StepEvent) -> None:
        if event.what == "batch" and event.batch == 1:
            losing.drop()
            runs.send(("a", 10))

    with suppress(TableAccessError):
        runs.run(on_event=drop_after_a_batch)
    runs.send(("a", 100))
    with pytest.raises(TableNotFoundError):
        runs.run()


def test_a_run_that_stays_notices_that_its_table_was_dropped(
    runs: TableRuns, losing: Losing
) -> None:
    runs.send(("a", 1))

    def drop_after_the_second_batch(event: StepEvent) -> None:
        if event.what == "batch" and event.batch == 1:
            runs.send(("a", 10))
        elif event.what == "batch" and event.batch == 2:
            losing.drop()
            runs.send(("a", 100))

    with pytest.raises(TableNotFoundError):
        runs.run(on_event=drop_after_the_second_batch, follow=60.0)


def test_a_table_dropped_before_a_write_of_a_batch_is_not_created_by_it(
    runs: TableRuns, losing: Losing
) -> None:
    runs.send(("a", 1))

    def drop_before_the_output(event: StepEvent) -> None:
        if event.what == "output":
            losing.drop()

    # Redis has no tables: what a batch writes there after a loss is lost with the rest, which the
    # next run reports.
    with suppress(TableAccessError, KeyValueTableNotFoundError):
        runs.run(on_event=drop_before_the_output)
    runs.send(("a", 10))
    with pytest.raises(TableNotFoundError):
        runs.run()


@pytest.mark.parametrize(
    "losing", [store for store in STORES if store.id != "redis"], indirect=True
)
def test_a_lookup_in_a_table_dropped_during_the_run_is_an_error(
    runs: TableRuns, losing: Losing
) -> None:
    runs.send(("a", 1))
    runs.run()
    app = Application("looking", engine="auto")
    totals = app.table(runs.table())
    amounts = app.input_stream("lake.amounts", default_offset="oldest")
    amounts.send_to(app.output_stream("lake.copied", partitions=1, key="id"))
    joined = amounts.join(totals, on="id", how="left", select=["total"])
    joined.send_to(app.output_stream("lake.joined", partitions=1, key="id"))
    dropped: list[object] = []

    def drop_before_the_lookup(event: object) -> None:
        if isinstance(event, StepEvent) and event.what == "output" and not dropped:
            dropped.append(losing.drop())

    with pytest.raises((TableNotFoundError, KeyValueTableNotFoundError)):
        run_application(app, lake=runs.lake, spark=IN_PROCESS, on_event=drop_before_the_lookup)
    assert dropped


def test_a_table_created_again_by_somebody_else_is_another_one(
    runs: TableRuns, losing: Losing
) -> None:
    runs.send(("a", 1))
    runs.run()
    losing.drop()
    with BlockingTable(runs.table()) as table:
        table.put("b", {"total": 5})
    runs.send(("a", 10))
    with pytest.raises(TableNotFoundError):
        runs.run()
    reset_table(runs.lake, "totals", by="test", reason="test")
    runs.run()
    assert runs.totals() == {"a": 10, "b": 5}


def test_two_applications_write_one_table_and_both_miss_it(runs: TableRuns, losing: Losing) -> None:
    runs.send(("a", 1))
    runs.run("adding")
    runs.run("other")
    runs.send(("a", 10))
    runs.run("other")
    runs.run("adding")
    assert runs.totals() == {"a": 22}
    losing.drop()
    runs.send(("a", 100))
    for name in ("other", "adding"):
        with pytest.raises(TableNotFoundError):
            runs.run(name)


def test_old_commits_of_a_table_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_registry, "_PRUNED_EVERY", 2)
    monkeypatch.setattr(table_registry, "_KEPT", timedelta())
    monkeypatch.setattr(commit_log, "MANIFESTS_KEPT", 4)
    runs = TableRuns(tmp_path, sqlite_losing(None, tmp_path).store)  # type: ignore[arg-type]
    for amount in range(6):
        runs.send(("a", amount))
        runs.run()
    assert len(list(runs.lake.store.list("tables/totals/manifests/"))) <= 6
    (tmp_path / "state.sqlite").unlink()
    with pytest.raises(TableNotFoundError):
        runs.run()


# -- what a store lets one see besides


def postgres_runs(server: PostgresServer, folder: Path, **options: Any) -> tuple[TableRuns, str]:
    name = f"lost_{next(_names)}"
    store = lambda: PostgresTable(name, "id", columns=COLUMNS, create=True, connect=connect(server))  # noqa: E731
    return TableRuns(folder, store, options), name


@pytest.mark.server
def test_a_truncated_table_is_an_error(postgres_server: PostgresServer, tmp_path: Path) -> None:
    runs, name = postgres_runs(postgres_server, tmp_path)
    runs.send(("a", 1))
    runs.run()
    postgres_server.execute(f"TRUNCATE {name}")
    runs.send(("a", 10))
    with pytest.raises(TableReplacedError) as refused:
        runs.run()
    assert (refused.value.loss, refused.value.table) == ("truncated", "totals")


@pytest.mark.server
def test_a_vacuumed_or_deliberately_emptied_table_goes_on(
    postgres_server: PostgresServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs, name = postgres_runs(postgres_server, tmp_path)
    runs.send(("a", 1))
    runs.run()
    postgres_server.execute(f"VACUUM FULL {name}")
    runs.run()
    assert "has no rows" not in caplog.text
    postgres_server.execute(f"DELETE FROM {name}")
    runs.send(("a", 10))
    runs.run()
    assert "table totals has no rows" in caplog.text
    assert runs.totals() == {"a": 10}


@pytest.mark.server
def test_the_table_of_marks_that_is_gone_is_an_error(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    runs, name = postgres_runs(postgres_server, tmp_path, idempotent=True)
    runs.send(("a", 1))
    runs.run()
    postgres_server.execute(f"DROP TABLE {name}__adjunct")
    runs.send(("a", 10))
    with pytest.raises(TableReplacedError) as refused:
        runs.run()
    assert refused.value.loss == "marks"


@pytest.mark.server
def test_marks_of_a_dropped_table_do_not_outlive_it(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    runs, name = postgres_runs(postgres_server, tmp_path, idempotent=True)
    runs.send(("a", 1))
    runs.run()
    postgres_server.execute(f"DROP TABLE {name}")
    reset_table(runs.lake, "totals", by="test", reason="test")
    runs.send(("b", 10))
    runs.run()
    assert postgres_server.execute(f"SELECT id FROM {name}__adjunct") == [("b",)]


@pytest.mark.server
def test_another_schema_without_the_table_names_both_places(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    runs, name = postgres_runs(postgres_server, tmp_path)
    runs.send(("a", 1))
    runs.run()
    runs.store = lambda: PostgresTable(
        name,
        "id",
        schema="elsewhere",
        columns=COLUMNS,
        create=True,
        connect=connect(postgres_server),
    )
    runs.send(("a", 10))
    with pytest.raises(TableNotFoundError) as refused:
        runs.run()
    assert "schema='elsewhere'" in refused.value.problem
    assert "schema='public'" in refused.value.problem
    assert postgres_server.execute("SELECT to_regnamespace('elsewhere') IS NULL") == [(True,)]


def test_a_run_without_a_batch_does_not_say_that_another_store_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = TableRuns(tmp_path, sqlite_losing(None, tmp_path).store)  # type: ignore[arg-type]
    runs.send(("a", 1))
    runs.run()
    monkeypatch.delenv("NO_SUCH_DSN", raising=False)
    for where in ({"dsn_env": "NO_SUCH_DSN"}, {"connect": {"host": "127.0.0.1", "port": 9}}):
        runs.store = partial(PostgresTable, "totals", "id", columns=COLUMNS, **where)
        assert runs.run().step.batches == 0
        with BlockingTable(open_registered_table(runs.lake, "totals")) as written:
            assert written.get("a") == {"id": "a", "total": 1}
    runs.store = lambda: SqliteTable(tmp_path / "b.sqlite", "totals", "id", columns=COLUMNS)
    runs.send(("a", 10))
    with pytest.raises(TableNotFoundError) as refused:
        runs.run()
    assert str(tmp_path / "state.sqlite") in refused.value.problem


def test_a_table_in_a_store_that_says_nothing_is_written_with_the_first_batch(
    tmp_path: Path,
) -> None:
    runs = TableRuns(tmp_path, sqlite_losing(None, tmp_path).store)  # type: ignore[arg-type]
    runs.send(("a", 1))
    runs.run()
    runs.store = lambda: MemoryTable("says-nothing")
    runs.run()
    with BlockingTable(open_registered_table(runs.lake, "totals")) as written:
        assert written.get("a") == {"id": "a", "total": 1}
    runs.send(("a", 10))
    runs.run()
    with BlockingTable(open_registered_table(runs.lake, "totals")) as written:
        assert written.get("a") == {"total": 10}


def test_an_older_copy_of_the_file_is_an_error_until_it_is_accepted(tmp_path: Path) -> None:
    losing = sqlite_losing(None, tmp_path)  # type: ignore[arg-type]
    runs = TableRuns(tmp_path, losing.store)
    file = tmp_path / "state.sqlite"
    runs.send(("a", 1))
    runs.run()
    copy = file.read_bytes()
    runs.send(("a", 10))
    runs.run()
    newer = file.read_bytes()
    file.write_bytes(copy)
    runs.send(("a", 100))
    with pytest.raises(TableReplacedError) as refused:
        runs.run()
    assert refused.value.loss == "older"
    file.write_bytes(newer)
    runs.run()
    assert runs.totals() == {"a": 111}
    file.write_bytes(copy)
    reset_table(runs.lake, "totals", by="test", reason="test")
    runs.send(("a", 1000))
    runs.run()
    assert runs.totals() == {"a": 1001}


@pytest.mark.server
def test_an_unreachable_server_does_not_lead_to_a_new_table(
    postgres_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, name = postgres_runs(postgres_server, tmp_path)
    runs.send(("a", 1))
    runs.run()
    postgres_server.execute(f"DROP TABLE {name}")
    asked = PostgresTable.inspect

    async def unreachable_once(self: PostgresTable) -> Presence:
        monkeypatch.setattr(PostgresTable, "inspect", asked)
        raise TableAccessError("away.", "")

    monkeypatch.setattr(PostgresTable, "inspect", unreachable_once)
    runs.send(("a", 10))
    with pytest.raises(TableNotFoundError):
        runs.run()
    assert postgres_server.execute(f"SELECT to_regclass('{name}') IS NULL") == [(True,)]


@pytest.mark.parametrize(
    ("now", "loss"),
    [
        (Presence(exists=False), "gone"),
        (Presence(exists=True, id="2", runs=5, rows=True), "replaced"),
        (Presence(exists=True, id=None), "replaced"),
        (Presence(exists=True, id="1", runs=4, rows=True), "older"),
        (Presence(exists=True, id="1", runs=5, rows=False, file="f2", marks=True), "truncated"),
        (Presence(exists=True, id="1", runs=5, rows=False, file="f1", marks=True), None),
        (Presence(exists=True, id="1", runs=5, rows=True, file="f2", marks=True), None),
        (Presence(exists=True, id="1", runs=5, rows=True, file="f1", marks=False), "marks"),
        (Presence(exists=True, id="1", runs=6, rows=True, file="f1", marks=True), None),
    ],
)
def test_what_a_store_says_is_compared_with_what_it_reported(
    now: Presence, loss: str | None
) -> None:
    before = Presence(exists=True, id="1", runs=5, rows=True, file="f1", marks=True)
    assert find_loss(before, now) == loss
    assert find_loss(Presence(exists=False), now) is None


def test_the_file_of_key_value_rows_that_is_gone_is_an_error(tmp_path: Path) -> None:
    url, file = str(tmp_path / "lake"), tmp_path / "rows.sqlite"

    def store() -> KeyValueRows:
        place = SqliteSegments(file)
        return KeyValueRows(
            url, "lost", "totals", "id", columns=COLUMNS, create=True, stored_in=place
        )

    runs = TableRuns(tmp_path, store)
    runs.send(("a", 1))
    runs.run()
    for part in tmp_path.glob("rows.sqlite*"):
        part.unlink()
    runs.send(("a", 10))
    with pytest.raises(TableNotFoundError):
        runs.run()


@pytest.mark.parametrize("place", ["the lake's file", "another lake"])
def test_an_older_copy_of_key_value_rows_is_an_error_until_it_is_accepted(
    tmp_path: Path, place: str
) -> None:
    lake = tmp_path / ("lake" if place == "the lake's file" else "rows")
    files = [lake.with_name(f"{lake.name}.key-values.sqlite")]
    if place == "another lake":
        files.append(lake)
    runs = TableRuns(
        tmp_path,
        lambda: KeyValueRows(str(lake), "lost", "totals", "id", columns=COLUMNS, create=True),
    )
    runs.send(("a", 1))
    runs.run()
    older = copy_of(files, tmp_path / "older")
    runs.send(("a", 10))
    runs.run()
    newer = copy_of(files, tmp_path / "newer")
    restore(files, older)
    runs.send(("a", 100))
    with pytest.raises(TableReplacedError) as refused:
        runs.run()
    assert (refused.value.loss, refused.value.table) == ("older", "totals")
    restore(files, newer)
    runs.run()
    assert runs.totals() == {"a": 111}
    restore(files, older)
    reset_table(runs.lake, "totals", by="test", reason="test")
    runs.send(("a", 1000))
    runs.run()
    assert runs.totals() == {"a": 1001}


def copy_of(files: Sequence[Path], folder: Path) -> Path:
    """Copy files and folders into a folder."""
    folder.mkdir()
    for file in files:
        if file.is_dir():
            shutil.copytree(file, folder / file.name)
        else:
            shutil.copy(file, folder)
    return folder


def restore(files: Sequence[Path], folder: Path) -> None:
    """Replace files and folders by what `copy_of` has copied."""
    for file in files:
        if file.is_dir():
            shutil.rmtree(file)
            shutil.copytree(folder / file.name, file)
            continue
        for part in file.parent.glob(f"{file.name}*"):
            part.unlink()
        shutil.copy(folder / file.name, file)


@pytest.mark.server
def test_a_dynamodb_table_restored_from_a_backup_is_an_error(
    dynamodb: DynamoDbServer, tmp_path: Path
) -> None:
    name = f"restored-{next(_names)}"
    where: dict[str, Any] = {"region": "us-east-1", "endpoint_url": dynamodb.endpoint}
    runs = TableRuns(
        tmp_path, lambda: DynamoDbTable(name, "id", columns=COLUMNS, create=True, **where)
    )
    runs.send(("a", 1))
    runs.run()
    client = dynamodb.client()
    backup = client.scan(TableName=name)["Items"]
    runs.send(("a", 10))
    runs.run()
    described = client.describe_table(TableName=name)["Table"]
    client.delete_table(TableName=name)
    client.create_table(
        TableName=name,
        KeySchema=described["KeySchema"],
        AttributeDefinitions=described["AttributeDefinitions"],
        BillingMode="PAY_PER_REQUEST",
    )
    client.get_waiter("table_exists").wait(TableName=name)
    for item in backup:
        client.put_item(TableName=name, Item=item)
    runs.send(("a", 100))
    with pytest.raises(TableReplacedError) as refused:
        runs.run()
    assert refused.value.loss == "replaced"


KEYS: dict[str, dict[str, str]] = {
    "text": {"id": "string"},
    "number": {"id": "bigint"},
    "decimal": {"id": "decimal(38,0)"},
    "bytes": {"id": "binary"},
    "time": {"id": "timestamp"},
    "text and number": {"id": "string", "part": "bigint"},
    "number and bytes": {"id": "bigint", "part": "binary"},
}


def begin_and_look(store: DynamoDbTable, *, counts: bool) -> Presence:
    """Return what DynamoDB says of a table, after it has counted a run or not."""

    async def ask() -> Presence:
        try:
            if counts:
                return await store.begin_run(create=True, marks=False)
            return await store.inspect()
        finally:
            await store.close()

    return asyncio.run(ask())


@pytest.mark.server
@pytest.mark.parametrize("key", list(KEYS))
def test_runs_are_counted_in_a_dynamodb_table_of_any_key(
    dynamodb: DynamoDbServer, key: str
) -> None:
    where: dict[str, Any] = {"region": "us-east-1", "endpoint_url": dynamodb.endpoint}
    name = f"counted-{next(_names)}"
    columns = {**KEYS[key], "total": "bigint"}

    def store(*, create: bool) -> DynamoDbTable:
        return DynamoDbTable(name, list(KEYS[key]), columns=columns, create=create, **where)

    assert begin_and_look(store(create=True), counts=False).exists is False
    assert begin_and_look(store(create=True), counts=True).runs == 1
    assert begin_and_look(store(create=False), counts=True).runs == 2
    assert begin_and_look(store(create=False), counts=False).runs == 2
    (item,) = dynamodb.client().scan(TableName=name)["Items"]
    assert set(item) == {*KEYS[key], "adjunct_runs"}


@pytest.mark.server
def test_a_dynamodb_table_of_somebody_else_gets_no_count(dynamodb: DynamoDbServer) -> None:
    where: dict[str, Any] = {"region": "us-east-1", "endpoint_url": dynamodb.endpoint}
    name = f"counted-{next(_names)}"
    dynamodb.client().create_table(
        TableName=name,
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    store = DynamoDbTable(name, "id", columns=COLUMNS, **where)
    assert begin_and_look(store, counts=True).runs == 0
    assert dynamodb.client().scan(TableName=name)["Items"] == []


@pytest.mark.server
def test_the_key_of_a_dynamodb_tables_count_is_reserved(dynamodb: DynamoDbServer) -> None:
    where: dict[str, Any] = {"region": "us-east-1", "endpoint_url": dynamodb.endpoint}
    store = DynamoDbTable(f"counted-{next(_names)}", "id", columns=COLUMNS, create=True, **where)
    begin_and_look(store, counts=True)
    table = RemoteTable("totals", key="id", read_function=store, write_function=store)
    with BlockingTable(table) as blocking:
        with pytest.raises(SchemaMismatchError):
            blocking.put("adjunct_runs", {"total": 1})
        assert blocking.get("adjunct_runs") is None
    assert begin_and_look(store, counts=False).runs == 1


@pytest.mark.server
def test_a_writer_of_a_dynamodb_table_need_not_have_the_right_to_read(
    dynamodb: DynamoDbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"unread-{next(_names)}"
    where: dict[str, Any] = {"region": "us-east-1", "endpoint_url": dynamodb.endpoint}
    runs = TableRuns(
        tmp_path, lambda: DynamoDbTable(name, "id", columns=COLUMNS, create=True, **where)
    )
    send: Any = BaseClient._make_api_call  # type: ignore[attr-defined]

    def without_reads(client: Any, operation: str, given: Any) -> Any:
        if operation == "BatchGetItem":
            answer: Any = {"Error": {"Code": "AccessDeniedException", "Message": "no"}}
            raise ClientError(answer, operation)
        return send(client, operation, given)

    with monkeypatch.context() as patched:
        patched.setattr(BaseClient, "_make_api_call", without_reads)
        for amount in (1, 2):
            runs.send(("a", amount))
            runs.run()
    assert runs.totals() == {"a": 3}


@pytest.mark.server
@pytest.mark.parametrize("first", ["nothing", "every item"], ids=["over it", "after deleting"])
def test_old_items_written_back_into_a_dynamodb_table_are_an_error(
    dynamodb: DynamoDbServer, tmp_path: Path, first: str
) -> None:
    name = f"restored-{next(_names)}"
    where: dict[str, Any] = {"region": "us-east-1", "endpoint_url": dynamodb.endpoint}
    runs = TableRuns(
        tmp_path, lambda: DynamoDbTable(name, "id", columns=COLUMNS, create=True, **where)
    )
    client = dynamodb.client()

    def write_back(items: Sequence[Any]) -> None:
        if first == "every item":
            delete_items(client, name)
        for item in items:
            client.put_item(TableName=name, Item=item)

    runs.send(("a", 1))
    runs.run()
    older = client.scan(TableName=name)["Items"]
    runs.send(("a", 10), ("b", 1))
    runs.run()
    newer = client.scan(TableName=name)["Items"]
    write_back(older)
    runs.send(("a", 100))
    with pytest.raises(TableReplacedError) as refused:
        runs.run()
    assert (refused.value.loss, refused.value.table) == ("older", "totals")
    write_back(newer)
    runs.run()
    assert runs.totals() == {"a": 111, "b": 1}
    write_back(older)
    reset_table(runs.lake, "totals", by="test", reason="test")
    runs.send(("a", 1000))
    runs.run()
    assert runs.totals()["a"] == 1001


@pytest.mark.server
def test_a_dynamodb_table_whose_items_were_all_deleted_is_an_error(
    dynamodb: DynamoDbServer, tmp_path: Path
) -> None:
    name = f"emptied-{next(_names)}"
    where: dict[str, Any] = {"region": "us-east-1", "endpoint_url": dynamodb.endpoint}
    runs = TableRuns(
        tmp_path, lambda: DynamoDbTable(name, "id", columns=COLUMNS, create=True, **where)
    )
    runs.send(("a", 1))
    runs.run()
    delete_items(dynamodb.client(), name)
    runs.send(("a", 10))
    with pytest.raises(TableReplacedError) as refused:
        runs.run()
    assert refused.value.loss == "older"


def delete_items(client: Any, table: str) -> None:
    for item in client.scan(TableName=table)["Items"]:
        client.delete_item(TableName=table, Key={"id": item["id"]})


# -- a table that is restored alone, without its book-keeping


def sqlite_place(request: pytest.FixtureRequest, folder: Path) -> Restorable:
    def execute(*statements: str) -> None:
        with closing(sqlite3.connect(folder / "state.sqlite")) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()

    return Restorable(sqlite_losing(request, folder).store, execute, "totals")


def postgres_place(request: pytest.FixtureRequest, folder: Path) -> Restorable:
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = f"lost_{next(_names)}"

    def execute(*statements: str) -> None:
        for statement in statements:
            server.execute(statement)

    def store() -> PostgresTable:
        return PostgresTable(name, "id", columns=COLUMNS, create=True, connect=connect(server))

    return Restorable(store, execute, name)


@dataclass
class Restorable:
    """A store's table, whose name there is `name`, and how to change it with SQL."""

    store: Callable[[], Any]
    execute: Callable[..., None]
    name: str

    def copy(self, *tables: str) -> None:
        """Copy tables, replacing an earlier copy."""
        for table in tables:
            self.execute(f"DROP TABLE IF EXISTS {table}_copy")
            self.execute(f"CREATE TABLE {table}_copy AS SELECT * FROM {table}")

    def restore(self, *tables: str) -> None:
        """Drop tables and create them again from their copies, as a backup's script does."""
        for table in tables:
            columns = "name text PRIMARY KEY, value bigint NOT NULL"
            if table == self.name:
                columns = "id text PRIMARY KEY, total bigint"
            self.execute(
                f"DROP TABLE {table}",
                f"CREATE TABLE {table} ({columns})",
                f"INSERT INTO {table} SELECT * FROM {table}_copy",
            )


PLACES = [
    pytest.param(sqlite_place, id="sqlite"),
    pytest.param(postgres_place, id="postgres", marks=pytest.mark.server),
]


@pytest.mark.parametrize("make", PLACES)
def test_a_table_that_is_restored_alone_is_an_error_until_it_is_accepted(
    request: pytest.FixtureRequest, tmp_path: Path, make: Callable[..., Restorable]
) -> None:
    place = make(request, tmp_path)
    runs = TableRuns(tmp_path, place.store, {"fenced": True})
    runs.send(("a", 1))
    runs.run()
    place.copy(place.name)
    runs.send(("a", 10))
    runs.run()
    place.restore(place.name)
    runs.send(("a", 100))
    for _ in range(2):
        with pytest.raises(TableReplacedError) as refused:
            runs.run()
        assert refused.value.loss == "replaced"
    reset_table(runs.lake, "totals", by="test", reason="test")
    runs.run()
    runs.send(("a", 1000))
    runs.run()
    assert runs.totals() == {"a": 1101}


@pytest.mark.parametrize("make", PLACES)
def test_a_table_restored_with_its_book_keeping_goes_on_if_that_is_the_newest(
    request: pytest.FixtureRequest, tmp_path: Path, make: Callable[..., Restorable]
) -> None:
    place = make(request, tmp_path)
    runs = TableRuns(tmp_path, place.store)
    both = (place.name, f"{place.name}__adjunct_runs")
    runs.send(("a", 1))
    runs.run()
    place.copy(*both)
    place.restore(*both)
    runs.send(("a", 10))
    runs.run()
    assert runs.totals() == {"a": 11}
    place.restore(*both)
    with pytest.raises(TableReplacedError) as refused:
        runs.run()
    assert refused.value.loss == "older"


def test_vacuum_and_columns_that_are_added_make_no_other_sqlite_table(tmp_path: Path) -> None:
    place = sqlite_place(None, tmp_path)  # type: ignore[arg-type]
    place.execute("CREATE TABLE earlier (n int)", "CREATE TABLE more (n int)")
    runs = TableRuns(tmp_path, place.store)
    runs.send(("a", 1))
    runs.run()
    place.execute("CREATE VIEW seen AS SELECT * FROM totals", "CREATE INDEX i ON totals (total)")
    place.execute("DROP TABLE earlier", "VACUUM", "ALTER TABLE totals ADD COLUMN note text")
    place.execute("VACUUM")
    runs.send(("a", 10))
    runs.run()
    assert runs.totals() == {"a": 11}


# -- a backup from within a run


@pytest.mark.parametrize("make", PLACES)
def test_a_backup_from_between_two_batches_of_a_run_is_older(
    request: pytest.FixtureRequest, tmp_path: Path, make: Callable[..., Restorable]
) -> None:
    place = make(request, tmp_path)
    runs = TableRuns(tmp_path, place.store)
    both = (place.name, f"{place.name}__adjunct_runs")
    runs.send(("a", 1))

    def copy_after_the_first_batch(event: StepEvent) -> None:
        if event.what == "batch" and event.batch == 1:
            place.copy(*both)
            runs.send(("a", 10))

    runs.run(on_event=copy_after_the_first_batch)
    assert runs.totals() == {"a": 11}
    place.restore(*both)
    runs.send(("a", 100))
    with pytest.raises(TableReplacedError) as refused:
        runs.run()
    assert refused.value.loss == "older"


@pytest.mark.parametrize("make", PLACES)
def test_a_run_that_stays_notices_a_backup_that_is_older_than_its_last_batch(
    request: pytest.FixtureRequest, tmp_path: Path, make: Callable[..., Restorable]
) -> None:
    place = make(request, tmp_path)
    runs = TableRuns(tmp_path, place.store)
    both = (place.name, f"{place.name}__adjunct_runs")
    runs.send(("a", 1))

    def restore_after_the_second_batch(event: StepEvent) -> None:
        if event.what != "batch":
            return
        if event.batch == 1:
            place.copy(*both)
            runs.send(("a", 10))
        elif event.batch == 2:
            place.restore(*both)
            runs.send(("a", 100))

    with pytest.raises(TableReplacedError) as refused:
        runs.run(on_event=restore_after_the_second_batch, follow=30.0)
    assert refused.value.loss == "older"
    assert runs.totals() == {"a": 1}


# -- rows in key-value tables of every backend


def segments_in_postgres(request: pytest.FixtureRequest, folder: Path) -> SegmentBackend:
    return PostgresSegments(connect=connect(request.getfixturevalue("postgres_server")))


def segments_in_dynamodb(request: pytest.FixtureRequest, folder: Path) -> SegmentBackend:
    return DynamoDbSegments(endpoint_url=request.getfixturevalue("dynamodb").endpoint)


def segments_in_objects(request: pytest.FixtureRequest, folder: Path) -> SegmentBackend:
    return ObjectSegments(str(folder / "objects"))


@pytest.mark.parametrize(
    "make",
    [
        segments_in_objects,
        pytest.param(segments_in_postgres, marks=pytest.mark.server),
        pytest.param(segments_in_dynamodb, marks=pytest.mark.server),
    ],
)
def test_rows_in_every_backend_count_runs_next_to_their_entries(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    make: Callable[[pytest.FixtureRequest, Path], SegmentBackend],
) -> None:
    place = make(request, tmp_path)
    url = str(tmp_path / "lake")
    rows = KeyValueRows(
        url, "counted", "totals", "id", columns=COLUMNS, create=True, stored_in=place
    )
    runs = TableRuns(tmp_path, lambda: rows)
    for number in (1, 2, 3):
        runs.send(("a", 1))
        runs.run()
        seen = asyncio.run(rows.inspect())
        assert (seen.exists, seen.runs) == (True, number)
    assert runs.totals() == {"a": 3}
    assert asyncio.run(rows.forget(0.0)) == 0, "the count is no record with marks"
    assert asyncio.run(rows.inspect()).runs == 3

"""Tables of somebody else's, in whose columns a value would change or a record can't be created:
refused with the column, before or when something is written.
"""

from __future__ import annotations

import datetime as dt
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct import IN_PROCESS, Application, LakeStreams, Schema, open_lake, run_application
from dagster_adjunct.errors import AdjunctError, SchemaMismatchError
from dagster_adjunct.tables import BlockingTable, PostgresTable, RemoteTable, SqliteTable
from tests.servers.postgres import PostgresServer

MOMENT = dt.datetime(2026, 1, 2, 3, 4, 5, 123456, tzinfo=dt.UTC)
WHOLE = MOMENT.replace(microsecond=0)
# What the column is, what it is declared as, a value that would change, and one that is kept.
CHANGING: list[tuple[str, str, Any, Any]] = [
    ("timestamp(0)", "timestamp", MOMENT, WHOLE),
    ("timestamptz(3)", "timestamp", MOMENT, WHOLE),
    ("timestamp(0)[]", "array<timestamp>", [MOMENT], [WHOLE]),
    ("numeric(10,1)", "decimal(10,2)", Decimal("1.25"), Decimal("1.2")),
    ("char(5)", "string", "ab", "abcde"),
    ("char(3)[]", "array<string>", ["a"], ["abc"]),
    ("name", "string", "x" * 64, "x" * 63),
]
OF_ANOTHER_KIND = [
    ("real", "double"),
    ("real[]", "array<double>"),
    ("time", "timestamp"),
    ("money", "decimal(10,2)"),
    ("interval", "string"),
    ("inet", "string"),
]


@pytest.fixture
def made(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], RemoteTable[Any, Any, Any]]]:
    """Create a table with a column `v` of a type, and declare it with another one."""
    monkeypatch.setenv("CHANGING_DSN", postgres_server.dsn())

    def make(column: str, declared: str) -> RemoteTable[Any, Any, Any]:
        postgres_server.execute("DROP TABLE IF EXISTS changing")
        postgres_server.execute(f"CREATE TABLE changing (id text PRIMARY KEY, v {column})")
        columns = {"id": "string", "v": declared}
        store = PostgresTable(dsn_env="CHANGING_DSN", table="changing", key="id", columns=columns)
        return RemoteTable("t", key="id", read_function=store, write_function=store)

    yield make
    postgres_server.execute("DROP TABLE IF EXISTS changing")


def mismatch(reported: BaseException | None) -> SchemaMismatchError:
    while reported is not None and not isinstance(reported, SchemaMismatchError):
        reported = reported.__cause__
    assert reported is not None
    return reported


@pytest.mark.parametrize("case", CHANGING, ids=lambda case: case[0])
def test_a_value_that_a_column_would_change_is_rejected(made: Any, case: Any) -> None:
    column, declared, changed, kept = case
    with BlockingTable(made(column, declared)) as table:
        with pytest.raises(AdjunctError) as reported:
            table.put("a", {"v": changed})
        assert "column 'v'" in str(mismatch(reported.value))
        assert table.get("a") is None
        table.put("a", {"v": kept})
        assert table.get("a")["v"] == kept


def test_times_of_an_arrow_batch_that_a_column_would_round_are_rejected(made: Any) -> None:
    times = pa.array([WHOLE] * 299 + [MOMENT], pa.timestamp("us", "UTC"))
    rows = pa.table({"id": [f"{number}" for number in range(300)], "v": times})
    with BlockingTable(made("timestamp(0)", "timestamp")) as table:
        with pytest.raises(AdjunctError, match="299"):
            table.put_all(rows)
        assert table.get("1")["v"] == WHOLE
        assert table.get("299") is None


@pytest.mark.parametrize(("column", "declared"), OF_ANOTHER_KIND)
def test_a_column_of_another_kind_is_refused(made: Any, column: str, declared: str) -> None:
    with BlockingTable(made(column, declared)) as table, pytest.raises(AdjunctError) as reported:
        table.get("a")
    assert mismatch(reported.value).column == "v"


def sent(tmp_path: Path, store: Any) -> None:
    """Let an application send a record to the table."""
    lake = open_lake(str(tmp_path / "lake"))
    streams = LakeStreams(lake)
    streams.create("in", schema=Schema.of(id="string", v="bigint"), key=["id"], partitions=1)
    streams.append("in", [{"id": "a", "v": 1}], producer="p", sequence=1)
    app = Application("sending", engine="auto")
    table = RemoteTable("t", key="id", read_function=store, write_function=store)
    app.input_stream("lake.in").send_to(app.table(table))
    run_application(app, lake=lake, systems={"lake": streams}, spark=IN_PROCESS, run="r")


def test_a_column_of_sqlite_that_each_record_lacks_is_named_before_a_batch(tmp_path: Path) -> None:
    file = tmp_path / "t.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE t (id TEXT PRIMARY KEY, v INTEGER, town TEXT NOT NULL)")
    store = SqliteTable(file, "t", "id", columns={"id": "string", "v": "bigint"})
    with pytest.raises(SchemaMismatchError) as reported:
        sent(tmp_path, store)
    assert (reported.value.column, reported.value.table) == ("town", "t")
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("DROP TABLE t")
        connection.execute(
            "CREATE TABLE t (id TEXT PRIMARY KEY, v INTEGER, town TEXT NOT NULL DEFAULT 'x')"
        )
    sent(tmp_path, store)


def test_a_column_of_postgresql_that_each_record_lacks_is_named_before_a_batch(
    made: Any, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    store = made("bigint", "bigint").write_function
    postgres_server.execute("ALTER TABLE changing ADD town text NOT NULL")
    with pytest.raises(SchemaMismatchError) as reported:
        sent(tmp_path, store)
    assert (reported.value.column, reported.value.table) == ("town", "t")
    postgres_server.execute("ALTER TABLE changing ALTER town SET DEFAULT 'x'")
    postgres_server.execute("ALTER TABLE changing ADD at bigint GENERATED ALWAYS AS IDENTITY")
    sent(tmp_path, store)

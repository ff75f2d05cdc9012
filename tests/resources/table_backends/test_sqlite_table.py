from __future__ import annotations

import asyncio
import pickle
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    SchemaMismatchError,
    TableAccessError,
    TableError,
    TableNotFoundError,
    TableUnavailableError,
)
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.functions import is_record_rejected
from dagster_adjunct.resources.tables.operation import (
    Operation,
    OperationKind,
    RowEntries,
    State,
    UpdateContract,
    UpdateMessage,
)
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.resources.key_value_backends.test_sqlite_rights import only_reading, readable_folder
from tests.resources.table_backends import hammer
from tests.resources.table_backends.every_type import RECORD, TYPES, blocking


def test_every_type_of_value_comes_back_as_it_was(tmp_path):
    store = SqliteTable(tmp_path / "new" / "t.sqlite", "t", "id", columns=TYPES, create=True)
    with blocking(store) as table:
        table.put(RECORD["id"], RECORD)
        table.put(2, {"id": 2})
        assert table.get_all([RECORD["id"], 2]) == {
            RECORD["id"]: RECORD,
            2: {**dict.fromkeys(TYPES), "id": 2},
        }
        assert type(table.get(RECORD["id"])["ok"]) is bool
    with blocking(SqliteTable(tmp_path / "new" / "t.sqlite", "t", "id")) as discovered:
        assert discovered.get(RECORD["id"]) == RECORD


@pytest.mark.parametrize(("mode", "reads"), [("delete", True), ("wal", False)])
def test_a_file_that_may_not_be_written_is_read_and_not_written(mode, reads):
    with readable_folder() as folder:
        path = folder / "t.sqlite"
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA journal_mode = {mode}")
            connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, s TEXT)")
            connection.execute("INSERT INTO t VALUES (1, 'one')")
            connection.commit()
        with only_reading(path), blocking(SqliteTable(path, "t", "id")) as table:
            if reads:
                assert table.get(1) == {"id": 1, "s": "one"}
            with pytest.raises(TableAccessError) as refused:
                table.put(2, {"s": "two"}) if reads else table.get(1)
            assert "may write the file and its folder" in str(refused.value)
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT * FROM t").fetchall() == [(1, "one")]


def test_times_are_stored_as_text_in_utc(tmp_path):
    store = SqliteTable(tmp_path / "t.sqlite", "t", "id", columns=TYPES, create=True)
    east = timezone(timedelta(hours=2))
    with blocking(store) as table:
        table.put(1, {"at": datetime(2013, 7, 1, 2, tzinfo=east)})
        table.put(2, {"at": datetime(2013, 7, 1, 2, 0, 0, 250_000, tzinfo=east)})
        assert table.get(2)["at"] == datetime(2013, 7, 1, 0, 0, 0, 250_000, tzinfo=UTC)
    with sqlite3.connect(tmp_path / "t.sqlite") as connection:
        stored = [at for (at,) in connection.execute("SELECT at FROM t ORDER BY id")]
    assert stored == ["2013-07-01T00:00:00Z", "2013-07-01T00:00:00.250000Z"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"s": 5}, "column 's' is string, but got 5 .int.; expected a str"),
        ({"f": True}, "expected a float"),
        ({"f": float("nan")}, "expected a finite float"),
        ({"ok": 1}, "expected a bool"),
        ({"at": datetime(2013, 7, 1)}, "expected a datetime with a time zone"),
        ({"at": pd.NaT}, "got NaT .NaTType.; expected a datetime with a time zone, or None"),
        ({"day": datetime(2013, 7, 1, tzinfo=UTC)}, "expected a date without a time"),
        ({"price": 1.5}, "expected a Decimal"),
        ({"raw": "text"}, "expected bytes"),
        ({"nope": 1}, "no column 'nope'; it has id, s, f"),
        ({"id": 7}, "record for key .* has 7 as its id"),
    ],
)
def test_a_value_that_does_not_fit_is_named_and_the_other_entries_are_written(
    tmp_path, fields, message
):
    store = SqliteTable(tmp_path / "t.sqlite", "t", "id", columns=TYPES, create=True)
    with blocking(store) as table:
        with pytest.raises(SchemaMismatchError, match=message):
            table.put_all([(1, {}), (2, fields)])
        messages = [(1, UpdateMessage({"s": "x"}, {})), (2, UpdateMessage(fields, {}))]
        with pytest.raises(SchemaMismatchError) as caught:
            table.update_messages(messages, UpdateContract.UPDATE_WITH_DEFAULTS)
        assert caught.value.column == next(iter(fields))
        assert set(table.get_all([1, 2])) == {1}


@pytest.mark.parametrize(
    "equal", [("12.50", "12.5", "1.25E+1"), ("0", "-0.00", "0E+9"), ("-3", "-3.000")]
)
def test_decimals_that_are_equal_are_one_key(tmp_path, equal):
    columns = {"price": "decimal(10,2)", "n": "int"}
    with blocking(
        SqliteTable(tmp_path / "t.sqlite", "t", "price", columns=columns, create=True)
    ) as table:
        for number, text in enumerate(equal):
            table.put(Decimal(text), {"n": number})
        assert [table.get(Decimal(text))["n"] for text in equal] == [len(equal) - 1] * len(equal)


def test_decimals_are_stored_with_all_their_digits_and_no_exponent(tmp_path):
    columns = {"id": "int", "small": "decimal(20,10)", "price": "decimal(10,2)"}
    with blocking(
        SqliteTable(tmp_path / "t.sqlite", "t", "id", columns=columns, create=True)
    ) as table:
        table.put(1, {"small": Decimal("1E-10"), "price": Decimal("12.5")})
        table.put(2, {"small": Decimal("-0"), "price": Decimal("1E+2")})
    with sqlite3.connect(tmp_path / "t.sqlite") as connection:
        stored = connection.execute("SELECT small, price FROM t ORDER BY id").fetchall()
    assert stored == [("0.0000000001", "12.50"), ("0.0000000000", "100.00")]


def test_an_integer_beyond_64_bits_is_refused(tmp_path):
    with (
        blocking(
            SqliteTable(tmp_path / "t.sqlite", "t", "id", columns=TYPES, create=True)
        ) as table,
        pytest.raises(SchemaMismatchError) as caught,
    ):
        table.put(2**63, {})
    assert caught.value.column == "id"


def test_keys_of_several_columns_are_tuples(tmp_path):
    columns = {"origin": "string", "hour": "timestamp", "temp": "double"}
    hour = datetime(2013, 7, 1, tzinfo=UTC)
    store = SqliteTable(
        tmp_path / "t.sqlite", "weather", ["origin", "hour"], columns=columns, create=True
    )
    with blocking(store) as table:
        table.update_messages(
            [(("JFK", hour), UpdateMessage({"temp": 20.5}, {"temp": 0.0}))],
            UpdateContract.UPDATE_WITH_DEFAULTS,
        )
        assert table.get(("JFK", hour)) == {"origin": "JFK", "hour": hour, "temp": 20.5}
        with pytest.raises(SchemaMismatchError, match="expected a tuple of origin, hour"):
            table.get("JFK")


def test_strange_names_are_quoted(tmp_path):
    columns = {'sel"ect; --': "string", "order": "int", "50 %": "int"}
    store = SqliteTable(
        tmp_path / "t.sqlite", 'dr"op table', 'sel"ect; --', columns=columns, create=True
    )
    with blocking(store) as table:
        table.put("a", {"order": 1, "50 %": 2})
        table.update("a", {"order": 3})
        assert table.get("a") == {'sel"ect; --': "a", "order": 3, "50 %": 2}


def test_missing_files_tables_columns_and_keys_are_named(tmp_path):
    def opened(**settings):
        store = SqliteTable(
            **{"path": tmp_path / "t.sqlite", "table": "t", "key": "id", **settings}
        )
        with blocking(store) as table:
            table.get("a")

    with pytest.raises(TableAccessError, match=r"file does not exist.*create=True"):
        opened()
    with sqlite3.connect(tmp_path / "t.sqlite") as connection:
        connection.execute("CREATE TABLE t (id TEXT, v INTEGER)")
    with pytest.raises(TableNotFoundError) as caught:
        opened(table="other")
    assert caught.value.table == "t"
    with pytest.raises(SchemaMismatchError, match="no primary key or unique index on id"):
        opened()
    with sqlite3.connect(tmp_path / "t.sqlite") as connection:
        connection.execute("CREATE UNIQUE INDEX u ON t (id)")
    opened()
    with pytest.raises(SchemaMismatchError) as caught:
        opened(columns={"id": "string", "w": "int"})
    assert (caught.value.table, caught.value.column) == ("t", "w")
    (tmp_path / "text.sqlite").write_text(
        "no database at all, but long enough to be looked at" * 50
    )
    with pytest.raises(TableAccessError, match="can't be accessed") as caught:
        opened(path=tmp_path / "text.sqlite")
    assert caught.value.table == "t"


@pytest.mark.parametrize(
    ("made", "declared", "message"),
    [
        (
            "id TEXT COLLATE NOCASE PRIMARY KEY",
            None,
            "no primary key or unique index on id that distinguishes",
        ),
        (
            "id TEXT PRIMARY KEY COLLATE RTRIM",
            {"id": "string"},
            "no primary key or unique index on id that distinguishes",
        ),
        (
            "id INTEGER PRIMARY KEY",
            {"id": "string"},
            "key column 'id' is INTEGER, where '01' and '1' are one number",
        ),
        (
            "id TEXT COLLATE NOCASE, UNIQUE (id COLLATE BINARY)",
            None,
            "is compared by a collation of its own",
        ),
        (
            "id NUMERIC PRIMARY KEY",
            {"id": "string"},
            "key column 'id' is NUMERIC, where '01' and '1' are one number",
        ),
    ],
)
def test_keys_that_the_file_takes_for_one_are_refused(tmp_path, made, declared, message):
    with sqlite3.connect(tmp_path / "t.sqlite") as connection:
        connection.execute(f"CREATE TABLE t (n INTEGER, {made})")
    columns = None if declared is None else {**declared, "n": "int"}
    with (
        blocking(SqliteTable(tmp_path / "t.sqlite", "t", "id", columns=columns)) as table,
        pytest.raises(SchemaMismatchError, match=message),
    ):
        table.put_all([("A", {"n": 1}), ("a", {"n": 2})])


def test_keys_by_their_bytes_are_taken(tmp_path):
    with sqlite3.connect(tmp_path / "t.sqlite") as connection:
        connection.execute("CREATE TABLE t (id TEXT, n INTEGER)")
        connection.execute("CREATE UNIQUE INDEX loose ON t (id COLLATE NOCASE, n)")
        connection.execute("CREATE UNIQUE INDEX exact ON t (id)")
    with blocking(SqliteTable(tmp_path / "t.sqlite", "t", "id")) as table:
        table.put_all([("A", {"n": 1}), ("a", {"n": 2})])
        assert table.get_all(["A", "a"]) == {"A": {"id": "A", "n": 1}, "a": {"id": "a", "n": 2}}


def test_a_declared_int_has_32_bits(tmp_path):
    columns = {"id": "string", "n": "int", "big": "bigint"}
    with blocking(
        SqliteTable(tmp_path / "t.sqlite", "t", "id", columns=columns, create=True)
    ) as table:
        table.put("a", {"n": 2**31 - 1, "big": 2**40})
        with pytest.raises(SchemaMismatchError) as caught:
            table.put("a", {"n": 2**31})
        assert caught.value.column == "n"
    with blocking(SqliteTable(tmp_path / "t.sqlite", "t", "id")) as read:
        read.put("a", {"n": 2**31})
        assert read.get("a")["n"] == 2**31


def test_declarations_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        SqliteTable(tmp_path / "t.sqlite", "t", "id", create=True)
    assert caught.value.argument == "columns"
    with pytest.raises(ConfigurationError) as caught:
        SqliteTable(":memory:", "t", "id")
    assert caught.value.argument == "path"
    with pytest.raises(ConfigurationError) as caught:
        SqliteTable(tmp_path / "t.sqlite", "t", "id", columns={"id": "hstore"})
    assert caught.value.column == "id"
    with pytest.raises(ConfigurationError) as caught:
        SqliteTable(tmp_path / "t.sqlite", "t\n", "id")
    assert caught.value.argument == "table"


def test_a_constraint_of_the_table_refuses_the_entries_that_break_it_and_no_others(tmp_path):
    with sqlite3.connect(tmp_path / "t.sqlite") as connection:
        connection.execute("CREATE TABLE t (id TEXT PRIMARY KEY, n INTEGER CHECK (n < 10))")
    with blocking(SqliteTable(tmp_path / "t.sqlite", "t", "id")) as table:
        with pytest.raises(TableError, match=r"rejected the request \(CHECK constraint"):
            table.put_all([("a", {"n": 1}), ("b", {"n": 11})])
        assert set(table.get_all(["a", "b"])) == {"a"}


def test_a_table_locked_for_long_is_tried_again_and_then_named(tmp_path):
    path = tmp_path / "t.sqlite"
    store = SqliteTable(path, "t", "id", columns=TYPES, create=True, busy_timeout=0.05)
    with blocking(store, retry=RetryPolicy(attempts=2, first_wait=0.01)) as table:
        table.put(1, {})
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(TableUnavailableError) as caught:
            table.put(2, {})
        assert caught.value.table == "t"
        assert (table.metrics.store.retries, table.metrics.store.failures) == (1, 1)
        other.execute("COMMIT")
        other.close()
        table.put(2, {})


class FailingCommit(sqlite3.Connection):
    """A connection whose commits fail as the disk's would, once `done` says whether they happen
    all the same.
    """

    done: bool | None = None

    def execute(self, sql, *parameters):
        if sql == "COMMIT" and FailingCommit.done is not None:
            super().execute("COMMIT" if FailingCommit.done else "ROLLBACK")
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error
        return super().execute(sql, *parameters)


@pytest.mark.parametrize("done", [True, False])
def test_a_write_whose_commit_fails_may_have_been_applied(tmp_path, monkeypatch, done):
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=FailingCommit))
    store = SqliteTable(tmp_path / "t.sqlite", "t", "id", columns=TYPES, create=True)

    async def body():
        await store.put(1, {"s": "before"})
        monkeypatch.setattr(FailingCommit, "done", done)
        outcomes = await store.send(Operation(OperationKind.PUT, RowEntries([1], [{"s": "after"}])))
        monkeypatch.setattr(FailingCommit, "done", None)
        record = await store.get(1)
        await store.close()
        return outcomes, record

    outcomes, record = asyncio.run(body())
    assert outcomes.places(State.UNKNOWN) == [0]
    assert record["s"] == ("after" if done else "before")


def test_a_cancelled_request_does_not_wait_for_the_file_and_the_next_one_is_answered(tmp_path):
    store = SqliteTable(
        tmp_path / "t.sqlite", "t", "id", columns=TYPES, create=True, busy_timeout=30.0
    )

    async def body():
        await store.put(1, {})
        with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(store.put(2, {}), 0.1)
            other.execute("COMMIT")
        await store.put(3, {})
        records = await store.get_all([1, 3])
        await store.close()
        return records

    assert set(asyncio.run(body())) == {1, 3}


def test_forgetting_in_a_locked_file_may_be_tried_again(tmp_path):
    store = SqliteTable(
        tmp_path / "t.sqlite", "t", "id", columns=TYPES, create=True, busy_timeout=0.05
    )

    async def body():
        await store.put(1, {})
        await store.forget(0)
        other = sqlite3.connect(store.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(TableUnavailableError, match="is locked by another process"):
            await store.forget(0)
        other.close()
        await store.close()

    asyncio.run(body())


def test_a_table_that_is_dropped_while_it_is_open_is_no_fault_of_the_records(tmp_path):
    store = SqliteTable(tmp_path / "t.sqlite", "t", "id", columns=TYPES, create=True)

    async def body():
        await store.put(1, {})
        with sqlite3.connect(store.path) as connection:
            connection.execute("DROP TABLE t")
        outcomes = await store.send(Operation(OperationKind.PUT, RowEntries([1, 2], [{}, {}])))
        await store.close()
        return outcomes

    outcomes = asyncio.run(body())
    assert outcomes.places(State.REFUSED) == [0, 1]
    assert not any(map(is_record_rejected, outcomes.problems.values()))


def test_a_change_of_the_table_by_others_is_seen_after_one_error(tmp_path):
    with sqlite3.connect(tmp_path / "t.sqlite") as connection:
        connection.execute("CREATE TABLE t (id TEXT PRIMARY KEY, n INTEGER)")
    with blocking(SqliteTable(tmp_path / "t.sqlite", "t", "id")) as table:
        table.put("a", {"n": 1})
        with sqlite3.connect(tmp_path / "t.sqlite") as connection:
            connection.execute("ALTER TABLE t RENAME n TO m")
        with pytest.raises(TableError, match="no such column: n"):
            table.get("a")
        assert table.get("a") == {"id": "a", "m": 1}
        with sqlite3.connect(tmp_path / "t.sqlite") as connection:
            connection.execute("ALTER TABLE t RENAME id TO key")
        with pytest.raises(TableError, match="no such column: id"):
            # which would equal the key of every row, if SQLite took the name for a text
            table.delete("id")


def test_a_pickled_function_opens_the_same_file_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = SqliteTable("t.sqlite", "t", "id", columns=TYPES, create=True)
    asyncio.run(store.put(1, {"s": "x"}))
    data = pickle.dumps(store)
    asyncio.run(store.close())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    copy = pickle.loads(data)
    assert asyncio.run(copy.get(1))["s"] == "x"
    asyncio.run(copy.close())


@pytest.mark.long  # fewer: test_sql_tables.py
@pytest.mark.lengthy
def test_eight_processes_that_write_one_file_lose_nothing(tmp_path):
    store = SqliteTable(tmp_path / "t.sqlite", "t", "id", columns=hammer.columns(), create=True)
    hammer.check(*hammer.run_all(store))


@pytest.mark.lengthy
def test_ten_thousand_updates_are_applied_and_put_each_default_once(tmp_path):
    columns = {"id": "string", "n": "int", "at": "timestamp", "profile": "string"}
    at = datetime(2013, 7, 1, tzinfo=UTC)
    messages = [
        (f"N{n % 1000}", UpdateMessage({"n": n, "at": at}, {"profile": "new"}))
        for n in range(10_000)
    ]
    with blocking(
        SqliteTable(tmp_path / "t.sqlite", "t", "id", columns=columns, create=True)
    ) as table:
        table.update_messages(messages, UpdateContract.UPDATE_WITH_DEFAULTS)
        assert table.metrics.records.defaults_put == 1000
        records = table.get_all([f"N{n}" for n in range(1000)])
        assert {(r["id"], r["n"], r["profile"]) for r in records.values()} == {
            (f"N{n}", 9_000 + n, "new") for n in range(1000)
        }


def test_a_damaged_file_is_no_fault_of_the_records(tmp_path):
    path = tmp_path / "t.sqlite"
    with blocking(SqliteTable(path, "t", "id", columns=TYPES, create=True)) as table:
        table.put_all([(number, {"s": "x" * 500}) for number in range(500)])
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * (path.stat().st_size - 8192))
    with (
        blocking(SqliteTable(path, "t", "id"), retry=RetryPolicy(attempts=1)) as table,
        pytest.raises(TableAccessError, match=r"can't be accessed .*malformed") as caught,
    ):
        table.put(7, {"s": "y"})
    assert caught.value.table == "t"


@pytest.mark.parametrize("create", [True, False])
def test_a_path_out_of_reach_is_a_lasting_error(tmp_path, create):
    columns = {"k": "string"}
    function = SqliteTable(
        path=str(tmp_path / ("x" * 300)), table="t", key="k", columns=columns, create=create
    )
    with pytest.raises(TableAccessError, match="too long"):
        function.exists()
    with pytest.raises(TableAccessError, match="too long"):
        asyncio.run(function.get("a"))


def test_reading_makes_neither_a_folder_nor_a_file_nor_a_table(tmp_path):
    paths = [tmp_path / "new" / "t.sqlite", tmp_path / "other.sqlite"]
    with sqlite3.connect(paths[1]) as connection:
        connection.execute("CREATE TABLE u (id INTEGER PRIMARY KEY)")
    for path in paths:
        store = SqliteTable(path, "t", "id", columns=TYPES, create=True)
        with blocking(store) as table:
            assert table.get(1) is None
            assert table.get_all([1, 2]) == {}
            assert not store.exists()
            if path == paths[0]:
                assert list(tmp_path.iterdir()) == paths[1:]
            table.put(1, {"s": "x"})
            assert (table.get(1)["s"], store.exists()) == ("x", True)


def test_a_file_that_is_created_is_logged_once_as_its_folder_may_be_misspelt(tmp_path, caplog):
    path = tmp_path / "misspelt" / "t.sqlite"
    for _ in range(2):
        with blocking(SqliteTable(path, "t", "id", columns=TYPES, create=True)) as table:
            table.put(1, {"s": "x"})
    assert [text for text in caplog.messages if str(path) in text] == [
        f"Creating the SQLite file {path}."
    ]


def test_a_relative_path_counts_from_where_the_table_is_declared(tmp_path, monkeypatch):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(folders[0])
    store = SqliteTable("t.sqlite", "t", "id", columns=TYPES, create=True)
    assert store.to_dict()["path"] == str(folders[0] / "t.sqlite")
    monkeypatch.chdir(folders[1])
    with blocking(store) as table:
        table.put(1, {"s": "x"})
    assert ([file.name for file in folders[0].iterdir()], list(folders[1].iterdir())) == (
        ["t.sqlite"],
        [],
    )


def test_a_file_that_is_removed_while_it_is_open_takes_no_more_writes(tmp_path):
    path = tmp_path / "t.sqlite"
    with blocking(SqliteTable(path, "t", "id", columns=TYPES, create=True)) as table:
        table.put(1, {"s": "x"})
        path.rename(tmp_path / "moved.sqlite")
        with pytest.raises(TableNotFoundError) as caught:
            table.put(2, {"s": "y"})
        assert caught.value.table == "t"
        (tmp_path / "moved.sqlite").rename(path)
        table.put(3, {"s": "z"})
        assert sorted(table.get_all([1, 2, 3])) == [1, 3]


def test_decimals_sort_in_sql_as_the_plans_note_says(tmp_path: Path) -> None:
    columns = {"k": "string", "price": "decimal(10,2)", "n": "bigint"}
    store = SqliteTable(tmp_path / "t.sqlite", "prices", "k", columns=columns, create=True)
    (note,) = store.storage_notes()
    assert "CAST(price AS REAL)" in note
    values = [Decimal("10.00"), Decimal("9.00"), Decimal("-1.50"), Decimal("100.25")]
    table = RemoteTable("prices", key="k", read_function=store, write_function=store)
    with BlockingTable(table) as blocking:
        blocking.put_all([(str(n), {"price": one, "n": 1}) for n, one in enumerate(values)])

    def sorted_by(order: str) -> list[Decimal]:
        with closing(sqlite3.connect(tmp_path / "t.sqlite")) as connection:
            rows = connection.execute(f"SELECT price FROM prices ORDER BY {order}").fetchall()
        return [Decimal(price) for (price,) in rows]

    assert sorted_by("price") == sorted(values, key=str)
    assert sorted_by("CAST(price AS REAL)") == sorted(values)
    others = SqliteTable(tmp_path / "t.sqlite", "o", "k", columns={"k": "string", "n": "bigint"})
    assert others.storage_notes() == []

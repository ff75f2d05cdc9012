"""Records that a store accepts without an error but does not write, and stored records that
can't be read.
"""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import SchemaMismatchError, TableAccessError, TableError
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.arrow import Marking, Marks, Shape, split_batch
from dagster_adjunct.resources.tables.functions import is_record_rejected
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Conditions,
    Mark,
    Operation,
    OperationKind,
    Outcomes,
    RowEntries,
    State,
    UpdateContract,
    UpdateMessage,
    position_of,
)
from dagster_adjunct.resources.tables.retry import RetryPolicy
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable

COLUMNS = {"id": "bigint", "n": "bigint", "at": "timestamp"}
ONCE = RetryPolicy(attempts=1)


class Store:
    """A table in a database, and statements as its owner."""

    def __init__(self, function: Any, execute: Any, is_postgres: bool) -> None:
        self.function, self.execute, self.is_postgres = function, execute, is_postgres
        self.name = function.table

    def table(self, **settings: Any) -> BlockingTable[Any, Any, Any]:
        both = {"read_function": self.function, "write_function": self.function}
        return BlockingTable(RemoteTable("t", key="id", retry=ONCE, **both, **settings))

    def drop_when(self, condition: str, *events: str) -> None:
        """Let the database drop inserts, updates or deletes of rows for which the condition
        holds, as {row}.n > 5.
        """
        for event in events:
            row = "OLD" if event == "DELETE" else "NEW"
            when = condition.format(row=row)
            if self.is_postgres:
                function = f"drop_{self.name}_{event}"
                body = f"BEGIN IF {when} THEN RETURN NULL; END IF; RETURN {row}; END"
                self.execute(
                    f"CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$"
                )
                made = f"CREATE TRIGGER drop_{event} BEFORE {event} ON {self.name}"
                self.execute(f"{made} FOR EACH ROW EXECUTE FUNCTION {function}()")
            else:
                self.execute(
                    f"CREATE TRIGGER drop_{self.name}_{event} BEFORE {event} ON {self.name} WHEN"
                    f" {when} BEGIN SELECT RAISE(IGNORE); END"
                )

    def rows(self) -> dict[int, int]:
        return dict(self.execute(f"SELECT id, n FROM {self.name}"))


_numbers = iter(range(1000))


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.server)])
def new_store(request, tmp_path):
    def make(columns: dict[str, str] | None = COLUMNS, ddl: str = "", **more: Any) -> Store:
        name = f"dropped_{next(_numbers)}"
        if request.param == "sqlite":
            path = tmp_path / "t.sqlite"

            def execute(statement: str) -> Any:
                with sqlite3.connect(path) as connection:
                    return connection.execute(statement).fetchall()

            function: Any = SqliteTable(path, name, "id", columns=columns, create=not ddl, **more)
        else:
            server = request.getfixturevalue("postgres_server")
            execute = server.execute
            connect = {
                "host": "127.0.0.1",
                "port": str(server.port),
                "user": "adjunct",
                "dbname": "adjunct",
            }
            function = PostgresTable(
                name, "id", connect=connect, columns=columns, create=not ddl, **more
            )
        store = Store(function, execute, request.param == "postgres")
        if ddl:
            execute(ddl.format(name=name))
        else:
            with store.table() as table:
                table.put(-1, {})
                table.delete(-1)
        return store

    return make


def refused(outcomes: Outcomes, keys: list[int]) -> list[int]:
    """The keys of the entries that were rejected as records, each of which the error names."""
    for place, problem in outcomes.problems.items():
        assert problem.state is State.REFUSED
        assert is_record_rejected(problem)
        assert problem.error.keys == (keys[place],)
    return [keys[place] for place in sorted(outcomes.problems)]


def marks(count: int, source: str = "s.0", first: int = 0) -> list[Mark]:
    return [Mark(source, position_of(0, first + n)) for n in range(count)]


SETTINGS = [{}, {"idempotent": True}, {"newest_by": "n"}, {"newest_by": "n", "idempotent": True}]
SIZES = [7, 500]


def operation(
    kind: OperationKind, keys: list[int], settings: dict[str, Any], *, default: bool, arrow: bool
) -> Any:
    """An operation that sets n to the key itself for each of the keys, as rows or, as from a
    stream, as Arrow.
    """
    conditions = Conditions(settings.get("newest_by"), settings.get("idempotent", False))
    contract = UpdateContract.UPDATE_WITH_DEFAULTS
    if not arrow:
        values = None if kind is OperationKind.DELETE else [{"n": key} for key in keys]
        defaults = [{"at": None}] * len(keys) if default else None
        newest = [key + 1000 * (kind is OperationKind.DELETE) for key in keys]
        given = (marks(len(keys)), newest) if conditions else (None, None)
        entries = RowEntries(keys, values, defaults, *given)
        return Operation(kind, entries, conditions=conditions, contract=contract)
    update = kind is OperationKind.UPDATE
    n = pa.array(keys, pa.int64())
    columns: dict[str, Any] = {"id": n, "n": n}
    if update:
        columns = {"id": n, "update": pa.StructArray.from_arrays([n], ["n"])}
        if default:
            columns["default"] = pa.StructArray.from_arrays(
                [pa.nulls(len(keys), pa.int32())], ["at"]
            )
    numbers = None
    if conditions:
        columns |= {"__partition": pa.array([0] * len(keys), pa.int32()), "__offset": n}
        numbers = Marks(Marking(("__partition",), "__offset", {}, "s"), ("id",), "t")
    batch = pa.RecordBatch.from_pydict(columns)
    shape = Shape(("id",), contract if update else None, conditions)
    (part,) = split_batch(batch, shape, numbers, "t")
    return part.operation


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["put", "update", "upsert", "absent"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_record_that_a_trigger_drops_is_rejected_and_others_written(
    new_store, kind, settings, size
):
    store = new_store()
    keys = list(range(size))
    before = keys if kind == "update" else keys[::2]
    if kind == "absent":
        before = []
    with store.table() as table:
        table.put_all([(key, {"n": -1}) for key in before])
    store.drop_when("{row}.n % 3 = 1", "INSERT", "UPDATE")
    kinds = {"put": OperationKind.PUT, "absent": OperationKind.PUT_IF_ABSENT}
    request = operation(
        kinds.get(kind, OperationKind.UPDATE), keys, settings, default=kind == "upsert", arrow=False
    )
    with store.table(**settings) as table:
        outcomes = table.send(request)
    dropped = [key for key in keys if key % 3 == 1]
    assert refused(outcomes, keys) == dropped
    assert store.rows() == {key: key for key in keys if key not in dropped} | {
        key: -1 for key in dropped if key in before
    }


@pytest.mark.lengthy
@pytest.mark.parametrize("kind", ["put", "update", "upsert"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_staged_batch_reports_which_records_a_trigger_dropped(new_store, kind, settings):
    store = new_store()
    keys = list(range(500))
    before = keys[:300] if kind != "update" else keys
    with store.table() as table:
        table.put_all([(key, {"n": -1}) for key in before])
    store.drop_when("{row}.n % 50 = 1", "INSERT", "UPDATE")
    kinds = OperationKind.PUT if kind == "put" else OperationKind.UPDATE
    request = operation(kinds, keys, settings, default=kind == "upsert", arrow=True)
    with store.table(**settings) as table:
        outcomes = table.send(request)
    dropped = [key for key in keys if key % 50 == 1]
    assert refused(outcomes, keys) == dropped
    assert store.rows() == {key: key for key in keys if key not in dropped} | {
        key: -1 for key in dropped if key in before
    }


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_record_whose_deletion_a_trigger_drops_is_rejected(new_store, settings):
    store = new_store()
    keys = list(range(9))
    with store.table() as table:
        table.put_all([(key, {"n": key}) for key in keys[:7]])
    store.drop_when("{row}.n % 3 = 1", "DELETE")
    with store.table(**settings) as table:
        outcomes = table.send(
            operation(OperationKind.DELETE, keys, settings, default=False, arrow=False)
        )
    assert refused(outcomes, keys) == [1, 4]
    assert store.rows() == {1: 1, 4: 4}


def test_of_several_records_of_a_key_only_those_dropped_are_rejected(new_store):
    store = new_store()
    store.drop_when("{row}.n = 2", "INSERT", "UPDATE")
    with store.table() as table:
        puts = RowEntries([7, 7, 8, 7], [{"n": 1}, {"n": 2}, {"n": 1}, {"n": 2}])
        outcomes = table.send(Operation(OperationKind.PUT, puts))
    assert refused(outcomes, [7, 7, 8, 7]) == [7, 7]
    assert store.rows() == {7: 1, 8: 1}


def test_a_dropped_message_stores_no_mark_and_is_applied_once_the_trigger_is_gone(new_store):
    store = new_store()
    store.drop_when("{row}.n > 5", "INSERT", "UPDATE")
    entries = RowEntries(
        [1, 2], [Changes(add={"n": 9}), Changes(add={"n": 1})], [{"n": 0}] * 2, marks(2)
    )
    request = Operation(OperationKind.UPDATE, entries, conditions=Conditions(None, True))
    with store.table(idempotent=True) as table:
        assert refused(table.send(request), [1, 2]) == [1]
        for event in ("INSERT", "UPDATE"):
            store.execute(
                f"DROP TRIGGER drop_{event} ON {store.name}"
                if store.is_postgres
                else f"DROP TRIGGER drop_{store.name}_{event}"
            )
        assert table.send(request).places(State.SKIPPED) == [1]
    assert store.rows() == {1: 9, 2: 1}


@pytest.mark.lengthy
@pytest.mark.parametrize("size", SIZES)
def test_a_trigger_that_changes_the_key_is_reported_with_the_key_that_was_sent(new_store, size):
    store = new_store()
    if store.is_postgres:
        body = "BEGIN IF NEW.n = 3 THEN NEW.id := -3; END IF; RETURN NEW; END"
        store.execute(
            f"CREATE FUNCTION m_{store.name}() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$"
        )
        store.execute(
            f"CREATE TRIGGER m BEFORE INSERT OR UPDATE ON {store.name} FOR EACH ROW EXECUTE"
            f" FUNCTION m_{store.name}()"
        )
    else:
        for event in ("INSERT", "UPDATE"):
            store.execute(
                f"CREATE TRIGGER m_{store.name}_{event} AFTER {event} ON {store.name} WHEN NEW.n ="
                f" 3 AND NEW.id > 0 BEGIN UPDATE {store.name} SET id = -3 WHERE id = NEW.id; END"
            )
    keys = list(range(size))
    for settings in SETTINGS:
        for kind in (OperationKind.PUT, OperationKind.UPDATE):
            for arrow in (False, True):
                with store.table(**settings) as table:
                    outcomes = table.send(
                        operation(kind, keys, settings, default=True, arrow=arrow)
                    )
                problems = {
                    place: one
                    for place, one in outcomes.problems.items()
                    if one.state is not State.SKIPPED
                }
                assert refused(Outcomes(len(keys), problems=problems), keys) == [3]
    assert store.rows() == {key: key for key in keys if key != 3}


def test_a_direct_call_names_the_key_and_a_default_that_was_dropped(new_store):
    store = new_store()
    store.drop_when("{row}.n > 5", "INSERT", "UPDATE")
    with store.table() as table:
        with pytest.raises(TableError) as caught:
            table.put(1, {"n": 6})
        assert caught.value.keys == (1,)
        messages = [(key, UpdateMessage({"n": key}, {"n": 0})) for key in range(20)]
        with pytest.raises(TableError) as caught:
            table.update_messages(messages, UpdateContract.UPDATE_WITH_DEFAULTS)
        assert caught.value.keys == tuple(range(6, 20))
        assert store.rows() == {key: key for key in range(6)}


def test_a_table_of_keys_alone_is_written_and_reported_what_it_drops(new_store):
    store = new_store({"id": "bigint"})
    store.drop_when("{row}.id = 3", "INSERT", "UPDATE")
    with store.table() as table:
        for _ in range(2):
            outcomes = table.send(Operation(OperationKind.PUT, RowEntries([1, 2, 3], [{}] * 3)))
            assert refused(outcomes, [1, 2, 3]) == [3]
        many = pa.table({"id": list(range(300))})
        for _ in range(2):
            with pytest.raises(TableError) as caught:
                table.put_all(many)
            assert caught.value.keys == (3,)
    assert len(store.execute(f"SELECT id FROM {store.name}")) == 299


def test_a_book_keeping_table_that_may_drop_marks_is_refused(new_store):
    store = new_store()
    with store.table(idempotent=True) as table:
        entries = RowEntries([1], [{"n": 1}], marks=marks(1))
        table.send(Operation(OperationKind.PUT, entries, conditions=Conditions(None, True)))
    own = f"{store.name}__adjunct"
    if store.is_postgres:
        store.execute(
            f"CREATE FUNCTION f_{own}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL;"
            " END $$"
        )
        store.execute(
            f"CREATE TRIGGER d BEFORE UPDATE ON {own} FOR EACH ROW EXECUTE FUNCTION f_{own}()"
        )
    else:
        store.execute(
            f"CREATE TRIGGER d_{own} BEFORE UPDATE ON {own} BEGIN SELECT RAISE(IGNORE); END"
        )
    with store.table(idempotent=True) as table:
        entries = RowEntries([1], [{"n": 2}], marks=marks(1, first=5))
        outcomes = table.send(
            Operation(OperationKind.PUT, entries, conditions=Conditions(None, True))
        )
    (problem,) = outcomes.problems.values()
    assert isinstance(problem.error, TableAccessError)
    assert problem.of_request
    assert store.rows() == {1: 1}


def test_a_constraint_that_ignores_or_replaces_others_is_reported(tmp_path):
    path = tmp_path / "c.sqlite"
    for conflict in ("IGNORE", "REPLACE"):
        with sqlite3.connect(path) as connection:
            connection.execute(
                f"CREATE TABLE {conflict} (id INTEGER PRIMARY KEY, n INT UNIQUE ON CONFLICT"
                f" {conflict})"
            )
        store = SqliteTable(path, conflict, "id")
        with BlockingTable(RemoteTable("t", key="id", retry=ONCE, write_function=store)) as table:
            outcomes = table.send(
                Operation(OperationKind.PUT, RowEntries([1, 2, 3], [{"n": 5}, {"n": 6}, {"n": 5}]))
            )
        assert refused(outcomes, [1, 2, 3]) == ([3] if conflict == "IGNORE" else [1])


def test_views_are_refused_for_they_have_no_key(new_store):
    store = new_store()
    store.execute(f"CREATE VIEW v_{store.name} AS SELECT * FROM {store.name}")
    store.function.__init__(
        **{**store.function.to_dict(), "table": f"v_{store.name}", "create": False}
    )
    with store.table() as table, pytest.raises(SchemaMismatchError):
        table.put(1, {"n": 1})


@pytest.mark.server
def test_rules_that_drop_changes_fail_the_request(postgres_server):
    for number, event in enumerate(("INSERT", "UPDATE", "DELETE")):
        name = f"ruled_{number}"
        postgres_server.execute(f"CREATE TABLE {name} (id bigint PRIMARY KEY, n bigint)")
        postgres_server.execute(f"INSERT INTO {name} VALUES (1, 1)")
        postgres_server.execute(f"CREATE RULE r AS ON {event} TO {name} DO INSTEAD NOTHING")
        connect = {
            "host": "127.0.0.1",
            "port": str(postgres_server.port),
            "user": "adjunct",
            "dbname": "adjunct",
        }
        store = PostgresTable(name, "id", connect=connect)
        request = {
            "INSERT": lambda t: t.put(2, {"n": 2}),
            "UPDATE": lambda t: t.update(1, {"n": 2}),
        }.get(event, lambda t: t.delete(1))
        with BlockingTable(RemoteTable("t", key="id", retry=ONCE, write_function=store)) as table:
            with pytest.raises(TableError):
                request(table)
            big = RowEntries(list(range(300)), [{"n": 3}] * 300)
            if event != "DELETE":
                kind = OperationKind.PUT if event == "INSERT" else OperationKind.UPDATE
                assert not table.send(Operation(kind, big)).done
        assert postgres_server.execute(f"SELECT * FROM {name}") == [(1, 1)]


@pytest.mark.server
def test_rows_that_policies_hide_or_refuse_are_rejected_alone(postgres_server):
    postgres_server.execute("CREATE TABLE guarded_rows (id bigint PRIMARY KEY, n bigint)")
    postgres_server.execute("INSERT INTO guarded_rows VALUES (1, 1), (2, 100)")
    postgres_server.execute("ALTER TABLE guarded_rows ENABLE ROW LEVEL SECURITY")
    postgres_server.execute("CREATE ROLE policed LOGIN")
    postgres_server.execute("GRANT ALL ON guarded_rows TO policed")
    postgres_server.execute("CREATE POLICY p ON guarded_rows USING (n < 50)")
    postgres_server.execute("CREATE POLICY visible ON guarded_rows FOR SELECT USING (id <> 9)")
    connect = {
        "host": "127.0.0.1",
        "port": str(postgres_server.port),
        "user": "policed",
        "dbname": "adjunct",
    }
    store = PostgresTable("guarded_rows", "id", connect=connect)
    with BlockingTable(
        RemoteTable("t", key="id", retry=ONCE, read_function=store, write_function=store)
    ) as table:
        keys = [1, 2, 3, 4]
        puts = Operation(
            OperationKind.PUT, RowEntries(keys, [{"n": 2}, {"n": 2}, {"n": 99}, {"n": 4}])
        )
        outcomes = table.send(puts)
        assert outcomes.places(State.REFUSED) == [1, 2]
        assert all(map(is_record_rejected, outcomes.problems.values()))
        deletes = table.send(Operation(OperationKind.DELETE, RowEntries([1, 2])))
        assert refused(deletes, [1, 2]) == [2]
        defaults = RowEntries([2, 5], [{"n": 3}] * 2, [{"n": 0}] * 2)
        updates = table.send(Operation(OperationKind.UPDATE, defaults))
        assert refused(updates, [2, 5]) == [2]
    assert dict(postgres_server.execute("SELECT id, n FROM guarded_rows")) == {2: 100, 4: 4, 5: 3}


@pytest.mark.server
@pytest.mark.parametrize(
    ("type_", "text"),
    [
        ("date", "infinity"),
        ("date", "0044-03-15 BC"),
        ("timestamp", "-infinity"),
        ("timestamptz", "20000-01-01 00:00+00"),
        ("numeric", "NaN"),
        ("date[]", "{2013-07-01,infinity}"),
        ("numeric[]", "{1,NaN}"),
    ],
)
def test_a_row_that_python_can_not_read_is_named_and_the_others_are_served(
    postgres_server, type_, text
):
    name = f"wide_{next(_numbers)}"
    postgres_server.execute(f"CREATE TABLE {name} (id bigint PRIMARY KEY, v {type_}, n bigint)")
    postgres_server.execute(f"INSERT INTO {name} SELECT g, NULL, g FROM generate_series(1, 5) AS g")
    postgres_server.execute(f"UPDATE {name} SET v = '{text}' WHERE id = 3")
    connect = {
        "host": "127.0.0.1",
        "port": str(postgres_server.port),
        "user": "adjunct",
        "dbname": "adjunct",
    }
    store = PostgresTable(name, "id", connect=connect)
    with BlockingTable(
        RemoteTable("t", key="id", retry=ONCE, read_function=store, write_function=store)
    ) as table:
        outcomes = table.send(Operation(OperationKind.GET, RowEntries([1, 2, 3, 4, 5])))
        assert outcomes.places(State.REFUSED) == [2]
        assert isinstance(outcomes.problems[2].error, SchemaMismatchError)
        assert outcomes.problems[2].error.column == "v"
        assert [record and record["n"] for record in outcomes.records] == [1, 2, None, 4, 5]
        with pytest.raises(SchemaMismatchError) as caught:
            table.get_all([1, 2, 3])
        assert caught.value.keys == (3,)
        if type_ == "numeric":  # the sum needs the stored number
            updates = [(key, Changes(add={"v": 1})) for key in range(1, 6)]
            with pytest.raises(SchemaMismatchError) as caught:
                table.update_all(updates)
            assert caught.value.keys == (3,)
            assert caught.value.column == "v"
    done = postgres_server.execute(f"SELECT count(*) FROM {name} WHERE v::text = '1'")
    assert done == [(4 if type_ == "numeric" else 0,)]


def test_a_row_of_sqlite_that_does_not_fit_its_columns_is_named(tmp_path):
    path = tmp_path / "u.sqlite"
    columns = {"id": "int", "on_day": "date", "price": "decimal(9,2)", "doc": "json"}
    store = SqliteTable(path, "u", "id", columns=columns, create=True)
    with BlockingTable(
        RemoteTable("t", key="id", retry=ONCE, read_function=store, write_function=store)
    ) as table:
        table.put_all([(key, {"price": None}) for key in range(4)])
        for key, change in enumerate(("on_day = 'soon'", "price = 'dear'", "doc = '{'")):
            with sqlite3.connect(path) as connection:
                connection.execute(f"UPDATE u SET {change} WHERE id = {key}")
        outcomes = table.send(Operation(OperationKind.GET, RowEntries([0, 1, 2, 3])))
        assert [problem.error.column for problem in outcomes.problems.values()] == [
            "on_day",
            "price",
            "doc",
        ]
        assert outcomes.records[3]["id"] == 3
        with pytest.raises(SchemaMismatchError) as caught:
            table.update_all([(key, Changes(add={"price": 1})) for key in range(4)])
        assert caught.value.keys == (1,)


def test_many_callers_of_one_request_each_get_their_own_outcome(new_store):
    store = new_store()
    store.drop_when("{row}.n % 3 = 1", "INSERT", "UPDATE")

    async def put_all() -> list[Any]:
        table = RemoteTable("t", key="id", retry=ONCE, write_function=store.function)
        async with table:
            return await asyncio.gather(
                *(table.put(n, {"n": n}) for n in range(9)), return_exceptions=True
            )

    results = asyncio.run(put_all())
    assert [getattr(result, "keys", None) for result in results] == [
        (n,) if n % 3 == 1 else None for n in range(9)
    ]

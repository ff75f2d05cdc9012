"""What a PostgreSQL table says of its entries where networks fail, and how its requests share
connections.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

import psycopg
import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import ConfigurationError, TableError, TableUnavailableError
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.table_backends.postgres_statements import create_table
from dagster_adjunct.resources.tables.arrow import ArrowEntries
from dagster_adjunct.resources.tables.functions import is_record_rejected
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Conditions,
    Mark,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    RowEntries,
    State,
    position_of,
)
from tests.servers.tcp_proxy import TcpProxy

pytestmark = pytest.mark.server

COLUMNS = {"id": "bigint", "n": "int"}


@pytest.fixture
def table_of(postgres_server):
    """Makes tables of the server."""
    server = {
        "host": "127.0.0.1",
        "port": str(postgres_server.port),
        "user": "adjunct",
        "dbname": "adjunct",
    }
    return lambda name, **more: PostgresTable(
        name, "id", **{"columns": COLUMNS, "create": True, "connect": server, **more}
    )


@pytest.fixture
def proxied(postgres_server, table_of):
    """A proxy before the server, and what makes tables that are reached through it."""
    with TcpProxy(postgres_server.port).running() as proxy:
        connect = {
            "host": "127.0.0.1",
            "port": str(proxy.port),
            "user": "adjunct",
            "dbname": "adjunct",
        }
        yield proxy, lambda name: table_of(name, connect=connect)


def putting(keys) -> Operation:
    return Operation(OperationKind.PUT, RowEntries(keys, [{"n": 1}] * len(keys)))


@pytest.mark.parametrize("limit", ["statement_timeout", "idle_session_timeout"])
def test_a_time_limit_of_the_server_is_no_fault_of_the_records(postgres_server, table_of, limit):
    server = {
        "host": "127.0.0.1",
        "port": str(postgres_server.port),
        "user": "adjunct",
        "dbname": "adjunct",
    }
    name = f"limited_by_{limit}"
    store = table_of(name, connect={**server, "options": f"-c {limit}=200"})

    async def body():
        await store.put_all([(1, {"n": 0})])
        async with await psycopg.AsyncConnection.connect(postgres_server.dsn()) as other:
            if limit == "statement_timeout":
                await other.execute(f"SELECT * FROM {name} FOR UPDATE")
            else:
                ended = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'adjunct'"
                while (await (await other.execute(ended)).fetchone())[0]:
                    await other.rollback()
            outcomes = await store.send(putting([1, 2]))
        again = await store.send(putting([1, 2]))
        await store.close()
        return outcomes, again

    outcomes, again = asyncio.run(body())
    assert outcomes.places(State.FAILED) == [0, 1], "they may be sent again, and are no letters"
    assert isinstance(outcomes.problems[0].error, TableUnavailableError)
    assert not again.problems


def test_a_change_of_the_table_is_no_fault_of_the_records_and_is_seen(postgres_server, table_of):
    store = table_of("altered", columns=None, create=False)
    postgres_server.execute("CREATE TABLE altered (id bigint PRIMARY KEY, n int)")
    get = Operation(OperationKind.GET, RowEntries([1]))

    async def body():
        await store.send(putting([1]))
        for _ in range(8):  # the driver prepares what it has often sent
            await store.send(get)
        postgres_server.execute("ALTER TABLE altered ALTER n TYPE bigint")
        await store.send(get)  # "cached plan must not change result type"
        read = await store.send(get)
        postgres_server.execute("ALTER TABLE altered RENAME n TO m")
        whole, again = await store.send(putting([1])), await store.send(putting([1]))
        await store.close()
        return read, whole, again

    read, whole, again = asyncio.run(body())
    assert read.records == [{"id": 1, "n": 1}]
    assert whole.problems[0].state is State.REFUSED
    assert not is_record_rejected(whole.problems[0])
    assert "has no column 'n'; it has id, m" in str(again.problems[0].error)
    assert is_record_rejected(again.problems[0])


def test_values_are_the_same_whatever_the_database_sets_for_its_sessions(postgres_server, table_of):
    postgres_server.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    for setting in ("datestyle = 'German'", "extra_float_digits = -3"):
        postgres_server.execute(f"ALTER DATABASE latin SET {setting}")
    server = {
        "host": "127.0.0.1",
        "port": str(postgres_server.port),
        "user": "adjunct",
        "dbname": "latin",
    }
    columns = {"id": "bigint", "s": "string", "at": "timestamp", "f": "double"}
    store = table_of("settings", connect=server, columns=columns)
    at, f = datetime(2013, 7, 1, 5, tzinfo=UTC), 0.1 + 0.2

    def of(turn, keys, text=None):
        rows = {
            "id": keys,
            "s": [text or "é"] * len(keys),
            "at": [at] * len(keys),
            "f": [f] * len(keys),
        }
        entries = ArrowEntries.of(pa.table(rows), "id")
        marks = {"sources": pa.array(["s.0"] * len(keys)), "times": pa.array([f] * len(keys))}
        marks["positions"] = pa.array([position_of(0, turn)] * len(keys))
        return Operation(
            OperationKind.PUT, replace(entries, **marks), conditions=Conditions("f", True)
        )

    async def body():
        assert not (await store.send(of(1, range(300)))).problems, "as one batch"
        assert not (await store.send(of(2, [1, 300]))).problems, "row by row, which reads the marks"
        outcomes = await store.send(of(3, [1, 2], "Ž"))
        records = await store.get_all([0, 300])
        await store.close()
        return outcomes, records

    outcomes, records = asyncio.run(body())
    assert [{**record, "id": 0} for record in records.values()] == [
        {"id": 0, "s": "é", "at": at, "f": f}
    ] * 2
    assert all(map(is_record_rejected, outcomes.problems.values())), (
        "the database has no such character"
    )
    assert len(outcomes.problems) == 2


def test_no_later_record_overtakes_one_that_the_repeat_will_send(table_of, monkeypatch):
    """With idempotent, the repeat would skip the earlier one."""
    store, write, failures = (
        table_of("overtaken"),
        PostgresTable._write_batch,
        [TableError("a right is missing.")],
    )

    async def fails_once(self, requests, operation, batch):
        if failures:
            return Outcomes.all(
                len(operation), Problem(State.REFUSED, failures.pop(), of_request=True)
            )
        return await write(self, requests, operation, batch)

    async def body():
        monkeypatch.setattr(PostgresTable, "_write_batch", fails_once)
        both = rows(1, 0, [*range(300), *range(300)], Conditions(None, True))
        outcomes = await store.send(both), await store.send(both)
        await store.close()
        return outcomes

    failed, repeated = asyncio.run(body())
    assert failed.places(State.REFUSED) == list(range(600))
    assert repeated.places(State.SKIPPED) == list(range(300, 600)), (
        "only those of a position that was applied"
    )


@pytest.mark.parametrize("count", [1, 300])
def test_blanks_beyond_a_columns_length_are_refused_and_not_cut_off(table_of, count):
    store = table_of(f"cut_{count}", columns={"id": "varchar(5)", "s": "varchar(3)"})
    keys = [*(f"{n:05}" for n in range(count)), "00000 ", "x"]
    rows = {"id": keys, "s": [*["abc"] * (count + 1), "abc "]}

    async def body():
        outcomes = await store.send(
            Operation(OperationKind.PUT, ArrowEntries.of(pa.table(rows), "id"))
        )
        records = await store.get_all(keys)
        await store.close()
        return outcomes, records

    outcomes, records = asyncio.run(body())
    assert outcomes.places(State.REFUSED) == [count, count + 1]
    assert all(map(is_record_rejected, outcomes.problems.values()))
    assert len(records) == count


def test_a_table_is_created_without_the_right_to_create_schemas(postgres_server, table_of):
    for statement in ("CREATE ROLE maker LOGIN", "CREATE SCHEMA making AUTHORIZATION maker"):
        postgres_server.execute(statement)
    server = {
        "host": "127.0.0.1",
        "port": str(postgres_server.port),
        "user": "maker",
        "dbname": "adjunct",
    }
    store = table_of("made", schema="making", connect=server)

    async def body():
        outcomes = await store.send(putting([1]))
        await store.close()
        return outcomes

    assert not asyncio.run(body()).problems


def test_two_tables_may_be_the_first_of_their_schema_at_once(postgres_server):
    async def body():
        async with (
            await psycopg.AsyncConnection.connect(postgres_server.dsn(), autocommit=True) as one,
            await psycopg.AsyncConnection.connect(postgres_server.dsn(), autocommit=True) as other,
        ):
            async with one.transaction():
                await create_table(one, "shared", "a", {"id": "bigint"}, ["id"])
                second = asyncio.create_task(
                    create_table(other, "shared", "b", {"id": "bigint"}, ["id"])
                )
                waits = (
                    "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname ="
                    " 'adjunct'"
                )
                while not (await (await one.execute(waits)).fetchall()):
                    await asyncio.sleep(0.01)
            await second

    asyncio.run(body())
    assert postgres_server.execute(
        "SELECT count(*) FROM pg_tables WHERE schemaname = 'shared'"
    ) == [(2,)]


def adding(keys) -> Operation:
    return Operation(OperationKind.UPDATE, RowEntries(keys, [Changes(add={"n": 1})] * len(keys)))


@pytest.mark.parametrize(
    ("trouble", "holding", "state", "left"),
    [
        ("lost-before", b"UPDATE", State.FAILED, 0),
        ("lost-after", b"UPDATE", State.FAILED, 0),
        ("lost-before", b"COMMIT", State.UNKNOWN, 0),
        ("lost-after", b"COMMIT", State.UNKNOWN, 1),
    ],
)
def test_a_connection_lost_before_the_commit_had_no_effect_and_in_it_nobody_knows(
    proxied, trouble, holding, state, left
):
    proxy, make = proxied
    store = make(f"lost_{trouble[5:]}_{holding.decode().lower()}")

    async def body():
        await store.put_all([(1, {"n": 0}), (2, {"n": 0})])
        proxy.next(trouble, holding=holding)
        outcomes = await store.send(adding([1, 2]))
        again = await store.send(adding([7]))
        records = await store.get_all([1, 2])
        await store.close()
        return outcomes, again, records

    outcomes, again, records = asyncio.run(body())
    assert [outcomes.problems[place].state for place in (0, 1)] == [state, state]
    assert isinstance(outcomes.problems[0].error, TableUnavailableError)
    assert {record["n"] for record in records.values()} == {left}
    assert again.problems[0].state is State.MISSING, "the next request has a new connection"


def test_a_refused_connection_had_no_effect(proxied):
    proxy, make = proxied
    store = make("refused")
    proxy.refuse()
    outcomes = asyncio.run(store.send(adding([1])))
    assert outcomes.problems[0].state is State.FAILED
    proxy.accept()


def test_a_request_that_hangs_can_be_given_up_and_the_next_one_is_answered(proxied):
    proxy, make = proxied
    store = make("hanging")

    async def body():
        await store.put(1, {"n": 0})
        proxy.next("hangs", holding=b"UPDATE")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(store.send(adding([1])), 0.3)
        await asyncio.wait_for(store.send(adding([1])), 10)
        record = await store.get(1)
        await store.close()
        return record

    assert asyncio.run(body())["n"] == 1


def test_as_many_requests_run_at_a_time_as_there_are_connections(postgres_server, table_of):
    store = table_of("at_once", connections=3)

    async def body():
        await store.put_all([(n, {"n": 0}) for n in range(6)])
        with psycopg.connect(postgres_server.dsn()) as other:
            other.execute("SELECT * FROM at_once WHERE id < 2 FOR UPDATE")
            waiting = [asyncio.ensure_future(store.send(adding([n]))) for n in range(2)]
            done = await asyncio.gather(*(store.send(adding([n])) for n in range(2, 6)))
            assert not any(task.done() for task in waiting)
        await asyncio.gather(*waiting)
        records = await store.get_all(list(range(6)))
        await store.close()
        return done, records

    done, records = asyncio.run(body())
    assert not any(outcomes.problems for outcomes in done)
    assert [record["n"] for record in records.values()] == [1] * 6


@pytest.mark.parametrize("connections", [0, True, 2.5])
def test_a_number_of_connections_that_is_none_is_refused(connections, table_of):
    with pytest.raises(ConfigurationError) as failure:
        table_of("t", connections=connections)
    assert failure.value.argument == "connections"


def test_a_large_batch_with_a_bad_value_is_refused_for_that_value_only(postgres_server, table_of):
    postgres_server.execute(
        "CREATE TABLE checked_batch (id bigint PRIMARY KEY, n int CHECK (n <> 300))"
    )
    store = table_of("checked_batch", columns=None, create=False)
    keys = pa.StructArray.from_arrays([pa.array(range(500))], names=["id"])
    records = pa.StructArray.from_arrays([pa.array(range(500))], names=["n"])
    entries = ArrowEntries(keys, records, lambda array: array.to_pylist())

    async def body():
        outcomes = await store.send(Operation(OperationKind.PUT, entries))
        await store.close()
        return outcomes

    outcomes = asyncio.run(body())
    assert {place: problem.state for place, problem in outcomes.problems.items()} == {
        300: State.REFUSED
    }
    assert "checked_batch" in str(outcomes.problems[300].error)
    assert postgres_server.execute("SELECT count(*), sum(n) FROM checked_batch") == [
        (499, sum(range(500)) - 300)
    ]


def test_a_table_that_two_close_at_once_is_closed(table_of):
    store = table_of("closed_twice")

    async def body():
        await asyncio.gather(*(store.send(adding([n])) for n in range(4)))
        await asyncio.wait_for(asyncio.gather(store.close(), store.close(), store.close()), 10)
        return await store.get(1)

    assert asyncio.run(body()) is None


def test_a_table_whose_closing_is_cancelled_can_be_used_and_closed(postgres_server, table_of):
    store = table_of("closed_in_vain")

    async def body():
        await store.send(putting([1]))
        async with await psycopg.AsyncConnection.connect(postgres_server.dsn()) as other:
            await other.execute("SELECT * FROM closed_in_vain FOR UPDATE")
            write = asyncio.create_task(store.send(putting([1])))
            await asyncio.sleep(0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(store.close(), 0.1)
        await write
        await asyncio.wait_for(asyncio.gather(store.send(putting([2])), store.close()), 10)

    asyncio.run(body())


def test_a_mark_purged_during_the_next_write_does_not_take_that_writes_mark(
    postgres_server, table_of, monkeypatch
):
    store = table_of("forgotten_meanwhile")
    execute, written = psycopg.AsyncConnection.execute, 0

    def message(offset):
        marks = [Mark("s.0", position_of(0, offset))]
        entries = RowEntries([1], [Changes(add={"n": 1})], [{"n": 0}], marks=marks)
        return Operation(OperationKind.UPDATE, entries, conditions=Conditions(idempotent=True))

    async def forgetting(connection, query, *args, **more):
        nonlocal written
        answer = await execute(connection, query, *args, **more)
        written += "DO NOTHING" in query.as_string(None)
        if written == 2:  # the key's mark has been found to be there, and is not locked yet
            written += 1
            postgres_server.execute("DELETE FROM forgotten_meanwhile__adjunct")
        return answer

    async def body():
        await store.send(message(1))
        monkeypatch.setattr(psycopg.AsyncConnection, "execute", forgetting)
        nonlocal written
        written = 1
        for _ in range(2):
            outcomes = await store.send(message(2))
        records = await store.get(1)
        await store.close()
        return outcomes, records

    outcomes, record = asyncio.run(body())
    assert outcomes.problems[0].state is State.SKIPPED
    assert record["n"] == 2


KEYS, KNOWN = 400, 300


def rows(offset: int, time: int | list[int], keys: range, conditions: Conditions) -> Operation:
    """A batch that adds 1 to each of these keys, or sets when it was, as messages of this
    offset.
    """
    ids = pa.StructArray.from_arrays([pa.array(keys, pa.int64())], names=["id"])
    ones = pa.StructArray.from_arrays([pa.array([1] * len(keys), pa.int32())], names=["n"])
    times = pa.array(time if isinstance(time, list) else [time] * len(keys), pa.int32())
    at = pa.StructArray.from_arrays([times], names=["at"])
    entries = ArrowEntries(
        ids,
        pa.StructArray.from_arrays([ones], names=["add"]) if conditions.idempotent else at,
        lambda array: array.to_pylist(),
        pa.StructArray.from_arrays([pa.array([0] * len(keys), pa.int32())], names=["n"]),
        pa.array(["s.0"] * len(keys)),
        pa.array([position_of(0, offset)] * len(keys)),
        times if conditions.newest_by else None,
        typed=conditions.idempotent,
    )
    return Operation(OperationKind.UPDATE, entries, conditions=conditions)


EACH = [Conditions("at"), Conditions(None, True), Conditions("at", True)]


@pytest.mark.parametrize("conditions", EACH)
@pytest.mark.parametrize(
    "meanwhile",
    [
        "DELETE FROM {0}__adjunct WHERE id = 7",  # forgotten
        "DELETE FROM {0} WHERE id = 7",
        "DELETE FROM {0} WHERE id = 7; DELETE FROM {0}__adjunct WHERE id = 7",
        "UPDATE {0} SET more = 5 WHERE id = 7",
        "INSERT INTO {0} (id, n, at) VALUES (350, 10, 0)",
    ],
)
def test_a_batch_with_conditions_applies_what_others_change_while_it_waits_for_them(
    postgres_server, table_of, conditions, meanwhile
):
    name = f"meanwhile_{abs(hash((conditions, meanwhile)))}"
    store = table_of(name, columns={"id": "bigint", "n": "int", "at": "int", "more": "int"})

    async def body():
        assert not (await store.send(rows(1, 1, range(KNOWN), conditions))).problems
        async with await psycopg.AsyncConnection.connect(postgres_server.dsn()) as other:
            await other.execute(meanwhile.format(name))
            sent = asyncio.create_task(store.send(rows(2, 2, range(KEYS), conditions)))
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            while not postgres_server.execute(waits)[0][0]:
                await asyncio.sleep(0.02)
                assert not sent.done()
            await other.commit()
        first = await sent
        again = await store.send(rows(2, 2, range(KEYS), conditions))
        found = await store.get_all([*range(KEYS)])
        await store.close()
        return first, again, found

    first, again, found = asyncio.run(body())
    assert not first.problems
    assert len(again.problems) == (KEYS if conditions.idempotent else 0), "its marks are kept"
    if conditions.idempotent:
        expected = {key: 2 if key < KNOWN else 1 for key in range(KEYS)}
        if "DELETE FROM {0} " in meanwhile:
            expected[7] = 1  # begun anew
        if "INSERT" in meanwhile:
            expected[350] = 11
        assert {key: record["n"] for key, record in found.items()} == expected
    else:
        assert {record["at"] for record in found.values()} == {2}
        assert len(found) == KEYS


def test_two_writers_who_are_late_for_each_others_keys_do_not_wait_in_a_circle(table_of):
    """What is late is locked by neither: the server would have to end one of them."""
    stores = [
        table_of("in_a_circle", columns={"id": "bigint", "n": "int", "at": "int"}) for _ in range(2)
    ]
    conditions, keys = Conditions("at"), range(6000)

    async def body():
        await stores[0].send(rows(1, 0, keys, conditions))
        for turn in range(1, 6):
            new, late = [2 * turn] * 3000, [2 * turn - 3] * 3000
            both = [rows(turn, times, keys, conditions) for times in (new + late, late + new)]
            sent = [store.send(operation) for store, operation in zip(stores, both, strict=True)]
            for outcomes in await asyncio.gather(*sent):
                assert [problem.state for problem in outcomes.problems.values()] == [
                    State.SKIPPED
                ] * 3000
        for store in stores:
            await store.close()

    asyncio.run(body())


@pytest.mark.parametrize("conditions", EACH)
def test_the_statement_for_a_batch_takes_one_key_after_the_other_and_is_not_compiled(
    postgres_server, table_of, monkeypatch, conditions
):
    """A hash join would lock in no order; a merge would read the whole table; to compile takes
    longer than to run.
    """
    store = table_of(
        f"plans_{conditions.newest_by}_{conditions.idempotent}", columns=COLUMNS | {"at": "int"}
    )
    execute, plans = psycopg.AsyncCursor.execute, []

    async def explained(cursor, query, *args, **more):
        if isinstance(query, psycopg.sql.Composable) and query.as_string(None).startswith(
            "WITH staged"
        ):
            await execute(cursor, psycopg.sql.SQL("EXPLAIN ") + query, *args)
            plans.append("\n".join(line for (line,) in await cursor.fetchall()))
        return await execute(cursor, query, *args, **more)

    async def body():
        await store.send(rows(0, 0, range(8000), conditions))
        postgres_server.execute("ANALYZE")
        monkeypatch.setattr(psycopg.AsyncCursor, "execute", explained)
        outcomes = await store.send(rows(1, 1, range(8000), conditions))
        await store.close()
        return outcomes

    assert not asyncio.run(body()).problems
    (plan,) = plans
    assert "Nested Loop" in plan
    assert not any(other in plan for other in ("Hash Join", "Merge Join", "JIT"))

"""SQL tables against the best hand-written client code: rows per second into PostgreSQL, from Arrow
batches.

Both sides get the same batches and write them one after the other over one connection: whole
records (puts), partial updates that begin missing records, the same where only what is newer may
win, and increments that must not be applied twice. By hand: COPY into a staging table and one
statement, once with the CSV that Arrow writes and once row by row.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from benchmarks.timing import alternate, show
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.tables.arrow import ArrowEntries
from dagster_adjunct.resources.tables.operation import Conditions, Operation, OperationKind

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa

    from tests.servers.postgres import PostgresServer

COLUMNS = {"id": "string", "n": "bigint", "at": "timestamp", "speed": "double", "note": "string"}
KEYS, BATCH = 100_000, 10_000
NAMES = ("id", "n", "at", "speed", "note")
_CREATE = (
    "CREATE TABLE {} (id text PRIMARY KEY, n bigint, at timestamptz, speed double precision, note"
    " text)"
)
_MARKS = "CREATE TABLE hand__marks (id text, source text, position text, PRIMARY KEY (id, source))"

NONE = Conditions()


@dataclass(frozen=True)
class Case:
    """One thing to write. `hand`: the statements after COPY into the table `stage` of all
    columns and the mark's.
    """

    name: str
    goal: str
    columns: tuple[str, ...]
    hand: tuple[str, ...]
    kind: OperationKind
    conditions: Conditions = NONE
    adds: bool = False


_UPSERT = (
    "INSERT INTO hand (id, n, at, speed, note) SELECT {} FROM stage ORDER BY id ON CONFLICT (id) DO"
    " UPDATE SET {}"
)
CASES = (
    Case(
        "puts",
        "at most 1.1",
        NAMES,
        (
            _UPSERT.format(
                "id, n, at, speed, note",
                "n = excluded.n, at = excluded.at, speed = excluded.speed, note = excluded.note",
            ),
        ),
        OperationKind.PUT,
    ),
    Case(
        "updates",
        "at most 1.1",
        ("id", "at", "speed"),
        (_UPSERT.format("id, 0, at, speed, NULL", "at = excluded.at, speed = excluded.speed"),),
        OperationKind.UPDATE,
    ),
    Case(
        "newest",
        "at most 1.25",
        ("id", "at", "speed"),
        (
            _UPSERT.format(
                "id, 0, at, speed, NULL",
                "at = excluded.at, speed = excluded.speed WHERE hand.at <= excluded.at",
            ),
        ),
        OperationKind.UPDATE,
        Conditions("at"),
    ),
    Case(
        "increments",
        "at most 1.25",
        ("id", "n", "source", "position"),
        (
            (
                "CREATE TEMPORARY TABLE fresh ON COMMIT DROP AS WITH marked AS (INSERT INTO"
                " hand__marks AS m SELECT id, source, position FROM stage ORDER BY id ON CONFLICT"
                " (id, source) DO UPDATE SET position = excluded.position WHERE m.position <"
                " excluded.position RETURNING id) SELECT stage.id, stage.n FROM stage JOIN marked"
                " USING (id)"
            ),
            (
                "INSERT INTO hand (id, n) SELECT id, n FROM fresh ORDER BY id "
                "ON CONFLICT (id) DO UPDATE SET n = coalesce(hand.n, 0) + excluded.n"
            ),
        ),
        OperationKind.UPDATE,
        Conditions(None, True),
        adds=True,
    ),
)


def run(rounds: int, keys: int = KEYS) -> None:
    """Print rows per second and how much longer ours takes than the best by hand."""
    from tests.servers.postgres import running_server

    print(f"sql tables: {keys:,} rows in batches of {BATCH:,}, PostgreSQL on this machine")
    with running_server() as server:
        for case in CASES:
            _compare(server, case, rounds, keys)


def _compare(server: PostgresServer, case: Case, rounds: int, keys: int) -> None:
    with _by_hand(server.dsn(), case) as hand, _ours(server.port, case) as ours:
        first = _batches(keys, 0)
        hand(first, True)
        ours(first)
        turns = [_batches(keys, turn + 1) for turn in range(rounds)]
        measured = alternate(
            rounds,
            hand_rows=lambda turn: hand(turns[turn], False),
            hand_arrow=lambda turn: hand(_later(turns[turn]), True),
            ours=lambda turn: ours(turns[turn]),
        )
    best = min(("hand_rows", "hand_arrow"), key=lambda name: measured[name].median)
    rates = {name: f"{keys / item.median:,.0f}" for name, item in measured.items()}
    print(f"  {case.name}: rows/s {rates}")
    show(measured, "ours", best, case.goal)


def _batches(keys: int, turn: int) -> list[pa.Table]:
    """Every key once, in an order without a pattern."""
    import numpy as np
    import pyarrow as pa

    order = np.random.default_rng(turn).permutation(keys)
    at = int(datetime(2013, 7, 1, tzinfo=UTC).timestamp() * 1_000_000) + turn * 1_000_000
    table = pa.table(
        {
            "id": pa.array(np.char.add("N", order.astype(str))),
            "n": pa.array(np.ones(keys, dtype=np.int64)),
            "at": pa.array(order + at, pa.timestamp("us", tz="UTC")),
            "speed": pa.array(order * 0.5),
            "note": pa.array(np.char.add("a note about ", order.astype(str))),
            "source": pa.array(["lake.flights.3"] * keys),
            "position": pa.array(
                [f"{0:010d}:{turn * 10 * keys + row:020d}:{0:06d}" for row in range(keys)]
            ),
        }
    )
    return [table.slice(start, BATCH) for start in range(0, keys, BATCH)]


def _later(batches: list[pa.Table]) -> list[pa.Table]:
    """The same, half a turn later, so that they pass a condition again."""
    import pyarrow.compute as pc

    return [
        batch.set_column(
            6, "position", pc.replace_substring_regex(batch["position"], ":000000$", ":000001")
        )
        for batch in batches
    ]


Write = Callable[[list[Any], bool], None]


@contextmanager
def _by_hand(dsn: str, case: Case) -> Iterator[Write]:
    import psycopg

    with psycopg.connect(dsn) as connection:
        connection.execute("SET TIME ZONE 'UTC'")
        connection.execute("DROP TABLE IF EXISTS hand, hand__marks")
        connection.execute(_CREATE.format("hand"))
        connection.execute(_MARKS)
        connection.execute(
            "CREATE TEMPORARY TABLE stage (id text, n bigint, at timestamptz, speed double"
            " precision, note text, source text, position text) ON COMMIT DELETE ROWS"
        )
        connection.commit()
        yield lambda batches, as_csv: _copy(connection, batches, case, as_csv)


def _copy(
    connection: psycopg.Connection[Any], batches: list[pa.Table], case: Case, as_csv: bool
) -> None:
    import pyarrow as pa
    from pyarrow import csv

    names = ", ".join(case.columns)
    for batch in batches:
        part = batch.select(case.columns)
        # the connection's time zone is UTC; a zone takes Arrow very long to write
        if as_csv and "at" in case.columns:
            part = part.set_column(
                case.columns.index("at"), "at", part["at"].cast(pa.timestamp("us"))
            )
        with connection.cursor() as cursor:
            if as_csv:
                sink = io.BytesIO()
                csv.write_csv(
                    part, sink, csv.WriteOptions(include_header=False, quoting_style="all_valid")
                )
                with cursor.copy(f"COPY stage ({names}) FROM STDIN (FORMAT csv)") as copy:
                    copy.write(sink.getbuffer())
            else:
                with cursor.copy(f"COPY stage ({names}) FROM STDIN") as copy:
                    for row in zip(*(column.to_pylist() for column in part.columns), strict=True):
                        copy.write_row(row)
            for statement in case.hand:
                cursor.execute(statement)  # type: ignore[call-overload]
        connection.commit()


@contextmanager
def _ours(port: int, case: Case) -> Iterator[Callable[[list[Any]], None]]:
    connect = {"host": "127.0.0.1", "port": str(port), "user": "adjunct", "dbname": "adjunct"}
    table = PostgresTable(f"ours_{case.name}", "id", columns=COLUMNS, create=True, connect=connect)

    async def send_all(batches: list[Any]) -> None:
        await table.open()
        for batch in batches:
            outcomes = await table.send(_operation(batch, case))
            assert not outcomes.problems, next(iter(outcomes.problems.values()))

    with asyncio.Runner() as runner:
        yield lambda batches: runner.run(send_all(batches))
        runner.run(table.close())


def _operation(batch: Any, case: Case) -> Operation[Any]:
    import pyarrow as pa

    columns = {name: batch[name].combine_chunks() for name in batch.column_names}

    def struct(*names: str) -> Any:
        return pa.StructArray.from_arrays([columns[name] for name in names], names=list(names))

    values = [name for name in case.columns if name in NAMES and name != "id"]
    records = struct(*values)
    if case.adds:
        records = pa.StructArray.from_arrays([records], names=["add"])
    zeros = pa.StructArray.from_arrays([pa.array([0] * batch.num_rows, pa.int64())], names=["n"])
    marked = bool(case.conditions)
    entries = ArrowEntries(
        struct("id"),
        records,
        lambda array: array.to_pylist(),
        zeros if case.kind is OperationKind.UPDATE else None,
        columns["source"] if marked else None,
        columns["position"] if marked else None,
        columns["at"] if case.conditions.newest_by else None,
        typed=case.adds,
    )
    return Operation(case.kind, entries, conditions=case.conditions)

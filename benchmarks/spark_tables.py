"""Remote tables from a Spark step against hand-written client code in the same step, into
PostgreSQL.

Both sides get the same rows from the same two tasks. By hand: `mapInArrow` that copies each Arrow
batch into a staging table and upserts it with one statement. One call a row: the same task with an
upsert for each record, of fewer rows.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.timing import Measured, alternate, show
from dagster_adjunct.resources.table_backends.postgres import PostgresTable
from dagster_adjunct.resources.tables.arrow import Marking
from dagster_adjunct.resources.tables.operation import UpdateContract
from dagster_adjunct.resources.tables.spark import TableWrite, write_table
from dagster_adjunct.resources.tables.table import RemoteTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEYS, TASKS, FEWER = 300_000, 2, 20
COLUMNS = {"id": "string", "n": "bigint", "at": "timestamp", "note": "string"}
_CREATE = "CREATE TABLE {} (id text PRIMARY KEY, n bigint, at timestamptz, note text)"
_PUT = (
    "INSERT INTO hand (id, n, at, note) SELECT id, n, at, note FROM {} "
    "ON CONFLICT (id) DO UPDATE SET n = excluded.n, at = excluded.at, note = excluded.note"
)
_NEWEST = (
    "INSERT INTO hand (id, n, at) SELECT id, n, at FROM {} "
    "ON CONFLICT (id) DO UPDATE SET n = excluded.n, at = excluded.at WHERE hand.at <= excluded.at"
)
_ROW = "(SELECT %s::text AS id, %s::bigint AS n, %s::timestamptz AS at, %s::text AS note) AS one"


def run(rounds: int, keys: int = KEYS) -> None:
    """Print how much longer a step takes with a remote table than by hand, and than with one
    call a row.
    """
    from dagster_adjunct.resources.spark.session import new_session
    from tests.servers.postgres import running_server

    print(f"spark tables: {keys:,} rows from {TASKS} Spark tasks into PostgreSQL on this machine")
    spark = new_session(master=f"local[{TASKS}]")
    try:
        with running_server() as server:
            connect = {
                "host": "127.0.0.1",
                "port": str(server.port),
                "user": "adjunct",
                "dbname": "adjunct",
            }
            for name, statement, goal in (
                ("puts", _PUT, "at most 1.11"),
                ("newest", _NEWEST, "at most 1.25"),
            ):
                server.execute("DROP TABLE IF EXISTS hand")
                server.execute(_CREATE.format("hand"))
                ours, newest = _ours(connect, name), name == "newest"
                measured = alternate(
                    rounds + 1,
                    hand=lambda turn: _by_hand(_frame(spark, keys, turn), server.dsn(), statement),  # noqa: B023
                    ours=lambda turn: _write(_frame(spark, keys, turn), ours, newest),  # noqa: B023
                    a_call_a_row=lambda turn: _row_by_row(
                        _frame(spark, keys // FEWER, turn),
                        server.dsn(),
                        statement,  # noqa: B023
                    ),
                )
                warm = {one.name: Measured(one.name, one.seconds[1:]) for one in measured.values()}
                show(warm, "ours", "hand", goal)
                print(f"  {name}: {keys / warm['ours'].median:,.0f} rows/s, ", end="")
                times = warm["a_call_a_row"].median * FEWER / warm["ours"].median
                print(f"{times:.1f} times as fast as one call a row (goal: at least 5)\n")
    finally:
        spark.stop()


def _frame(spark: SparkSession, keys: int, turn: int) -> DataFrame:
    """Every key once, in an order without a pattern, as records of a stream with two partitions."""
    return spark.range(0, keys, 1, TASKS).selectExpr(
        f"concat('N', cast((id * 7919 + {turn}) % {keys} as string)) as id",
        "id as n",
        f"timestamp_seconds(1370000000 + {turn}) as at",
        "concat('a note about ', cast(id as string)) as note",
        "spark_partition_id() as __partition",
        f"id + {turn} * {keys} as __offset",
        "0 as __epoch",
    )


def _ours(connect: dict[str, str], name: str) -> RemoteTable[Any, Any, Any]:
    function = PostgresTable(f"ours_{name}", "id", columns=COLUMNS, create=True, connect=connect)
    newest_by = "at" if name == "newest" else None
    return RemoteTable(
        name,
        key="id",
        read_function=function,
        write_function=function,
        batch_size=10_000,
        newest_by=newest_by,
    )


def _write(frame: DataFrame, table: RemoteTable[Any, Any, Any], newest: bool) -> None:
    contract = None
    if newest:
        contract = UpdateContract.UPDATE_WITH_DEFAULTS
        update, default = (
            "named_struct('n', n, 'at', at) as update",
            "named_struct('id', id) as default",
        )
        frame = frame.selectExpr("id", update, default, "__partition", "__offset", "__epoch")
    else:
        frame = frame.drop("__epoch")
    marking = Marking(("__partition",), "__offset", {}, stream="lake.bench") if newest else None
    write = TableWrite(table, contract, "fail", TASKS, "lake.bench", marking)
    written = write_table(frame, write, exchange=False, what="benchmark")
    assert written.counters["updates" if newest else "writes"] == frame.count(), written.counters


Send = Callable[[Any, Any, str], None]


def _by_hand(frame: DataFrame, dsn: str, statement: str) -> None:
    _send(frame, dsn, statement, _copy)


def _row_by_row(frame: DataFrame, dsn: str, statement: str) -> None:
    _send(frame, dsn, statement, _rows)


def _send(frame: DataFrame, dsn: str, statement: str, send: Send) -> None:
    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import psycopg
        import pyarrow as pa

        count = 0
        with psycopg.connect(dsn) as connection:
            connection.execute("SET TIME ZONE 'UTC'")
            connection.execute(
                "CREATE TEMPORARY TABLE stage (id text, n bigint, at timestamptz, note text) ON"
                " COMMIT DELETE ROWS"
            )
            connection.commit()
            for batch in batches:
                send(connection, batch, statement)
                count += batch.num_rows
        yield pa.RecordBatch.from_pydict({"count": [count]})

    rows = frame.select("id", "n", "at", "note")
    assert (
        sum(row["count"] for row in rows.mapInArrow(task, "count bigint").collect()) == rows.count()
    )


def _copy(connection: Any, batch: Any, statement: str) -> None:
    import pyarrow as pa
    from pyarrow import csv

    table = pa.Table.from_batches([batch])
    # The connection's time zone is UTC; a zone takes Arrow very long to write.
    table = table.set_column(2, "at", table["at"].cast(pa.timestamp("us")))
    sink = io.BytesIO()
    csv.write_csv(table, sink, csv.WriteOptions(include_header=False, quoting_style="all_valid"))
    with connection.cursor() as cursor:
        with cursor.copy("COPY stage (id, n, at, note) FROM STDIN (FORMAT csv)") as copy:
            copy.write(sink.getbuffer())
        cursor.execute(statement.format("stage"))
    connection.commit()


def _rows(connection: Any, batch: Any, statement: str) -> None:
    query = statement.format(_ROW)
    columns = [batch.column(name).to_pylist() for name in ("id", "n", "at", "note")]
    for row in zip(*columns, strict=True):
        connection.execute(query, row)
        connection.commit()

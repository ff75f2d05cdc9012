"""Tables of every shape in a real PostgreSQL: their changes have what their snapshots have, or
they are refused.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest

from dagster_adjunct import Lake, LakeStreams, open_lake
from dagster_adjunct.errors import ConfigurationError, MalformedDocumentError, SchemaMismatchError
from dagster_adjunct.examples.postgres_changes.capture import TableCapture
from dagster_adjunct.examples.postgres_changes.slot import Slot
from tests.servers.postgres import PostgresServer

pytestmark = pytest.mark.server


@dataclass
class Shop:
    """A schema of its own, in which captures of tables are made."""

    server: PostgresServer
    lake: Lake
    folder: Path
    schema: str = field(default_factory=lambda: f"shop_{uuid.uuid4().hex[:8]}")
    slots: list[Slot] = field(default_factory=list)

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.server.execute(statement.replace("shop.", f"{self.schema}."))

    def capture(self, table: str, columns: str, *key: str) -> TableCapture:
        slot = Slot(self.server.dsn(), f"{self.schema}.{table}", f"s_{uuid.uuid4().hex[:12]}")
        self.slots.append(slot)
        return TableCapture(
            slot, self.lake, f"stream-{len(self.slots)}", columns, key or ("id",), partitions=1
        )

    def close(self) -> None:
        for slot in self.slots:
            slot.drop()
        self.server.execute(f"DROP SCHEMA {self.schema} CASCADE")

    def envelopes(self, capture: TableCapture) -> list[dict[str, Any]]:
        streams = LakeStreams(self.lake)
        table = streams.read_arrow(streams.all_ranges(capture.stream)).sort_by("__offset")
        return [json.loads(value) for value in table.column("value").to_pylist() if value]

    def keys(self, capture: TableCapture) -> list[Any]:
        streams = LakeStreams(self.lake)
        table = streams.read_arrow(streams.all_ranges(capture.stream)).sort_by("__offset")
        return table.column(capture.key[0]).to_pylist()


@pytest.fixture
def shop(logical_server: PostgresServer, tmp_path: Path) -> Iterator[Shop]:
    yield from shop_in(logical_server, tmp_path)


def shop_in(server: PostgresServer, folder: Path) -> Iterator[Shop]:
    shop = Shop(server, open_lake(folder / "lake"), folder)
    shop.run(f"CREATE SCHEMA {shop.schema}")
    yield shop
    shop.close()


REFUSED: dict[str, tuple[list[str], str, tuple[str, ...], str | None]] = {
    "a stored generated column": (
        [
            "CREATE TABLE shop.t (id int PRIMARY KEY, net numeric, gross numeric GENERATED ALWAYS AS (net * 2) STORED)"
        ],
        "id INT, net DECIMAL(9,2), gross DECIMAL(9,2)",
        (),
        "gross",
    ),
    "a column that is not there": (
        ["CREATE TABLE shop.t (id int PRIMARY KEY)"],
        "id INT, nam STRING",
        (),
        "nam",
    ),
    "a view": (
        ["CREATE TABLE shop.u (id int PRIMARY KEY)", "CREATE VIEW shop.t AS TABLE shop.u"],
        "id INT",
        (),
        None,
    ),
    "a materialized view": (
        ["CREATE MATERIALIZED VIEW shop.t AS SELECT 1 AS id"],
        "id INT",
        (),
        None,
    ),
    "an unlogged table": (
        ["CREATE UNLOGGED TABLE shop.t (id int PRIMARY KEY)"],
        "id INT",
        (),
        None,
    ),
    "a table that others inherit from": (
        ["CREATE TABLE shop.t (id int PRIMARY KEY)", "CREATE TABLE shop.c () INHERITS (shop.t)"],
        "id INT",
        (),
        None,
    ),
    "no table": ([], "id INT", (), None),
    "no primary key": (["CREATE TABLE shop.t (id int NOT NULL)"], "id INT", (), "id"),
    "a key that is not unique": (
        ["CREATE TABLE shop.t (id int PRIMARY KEY, k int NOT NULL)"],
        "k INT",
        ("k",),
        "k",
    ),
    "a part of the primary key": (
        ["CREATE TABLE shop.t (id int, k int, PRIMARY KEY (id, k))"],
        "id INT, k INT",
        ("id",),
        "id",
    ),
    "a key that may be null": (["CREATE TABLE shop.t (id int UNIQUE)"], "id INT", (), "id"),
    "a unique key that changes do not name": (
        ["CREATE TABLE shop.t (n int PRIMARY KEY, id int NOT NULL UNIQUE)"],
        "id INT, n INT",
        ("id",),
        "id",
    ),
    "replica identity nothing": (
        ["CREATE TABLE shop.t (id int PRIMARY KEY)", "ALTER TABLE shop.t REPLICA IDENTITY NOTHING"],
        "id INT",
        (),
        "id",
    ),
    "replica identity by another index": (
        [
            "CREATE TABLE shop.t (id int PRIMARY KEY, n int NOT NULL)",
            "CREATE UNIQUE INDEX other ON shop.t (n)",
            "ALTER TABLE shop.t REPLICA IDENTITY USING INDEX other",
        ],
        "id INT, n INT",
        (),
        "id",
    ),
    "a partition whose identity is nothing": (
        [
            "CREATE TABLE shop.t (id int PRIMARY KEY) PARTITION BY RANGE (id)",
            "CREATE TABLE shop.p PARTITION OF shop.t DEFAULT",
            "ALTER TABLE shop.p REPLICA IDENTITY NOTHING",
        ],
        "id INT",
        (),
        "id",
    ),
    "an unlogged partition": (
        [
            "CREATE TABLE shop.t (id int PRIMARY KEY) PARTITION BY RANGE (id)",
            "CREATE UNLOGGED TABLE shop.p PARTITION OF shop.t DEFAULT",
        ],
        "id INT",
        (),
        None,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_table_whose_changes_lack_something_is_refused_by_name(shop: Shop, case: str) -> None:
    statements, columns, key, column = REFUSED[case]
    shop.run(*statements)
    capture = shop.capture("t", columns, *key)
    with pytest.raises(ConfigurationError) as refused:
        capture.start()
    assert refused.value.column == column
    assert refused.value.table is not None
    assert refused.value.next_step
    assert not capture.slot.exists()
    assert LakeStreams(shop.lake).list_streams() == [], "nothing was made"


def test_foreign_and_temporary_tables_are_refused(shop: Shop) -> None:
    shop.run(
        "CREATE EXTENSION IF NOT EXISTS file_fdw",
        "CREATE SERVER IF NOT EXISTS files FOREIGN DATA WRAPPER file_fdw",
        "CREATE FOREIGN TABLE shop.t (id int) SERVER files OPTIONS (filename '/dev/null')",
        "CREATE TABLE shop.parts (id int) PARTITION BY RANGE (id)",
        "CREATE FOREIGN TABLE shop.p PARTITION OF shop.parts DEFAULT SERVER files OPTIONS (filename"
        " '/dev/null')",
    )
    for table in ("t", "parts"):
        with pytest.raises(ConfigurationError, match="foreign table"):
            shop.capture(table, "id INT").start()


@pytest.fixture
def shop_18(logical_server_18: PostgresServer, tmp_path: Path) -> Iterator[Shop]:
    yield from shop_in(logical_server_18, tmp_path)


GENERATED = (
    "CREATE TABLE shop.t (id int PRIMARY KEY, net numeric(9,2),"
    " gross numeric(9,2) GENERATED ALWAYS AS (net * 2) {kind}) {more}"
)


@pytest.mark.parametrize("identity", ["FULL", "DEFAULT"])
@pytest.mark.parametrize("is_partitioned", [False, True])
def test_stored_generated_columns_are_in_the_changes_of_version_18(
    shop_18: Shop, identity: str, is_partitioned: bool
) -> None:
    more = "PARTITION BY RANGE (id)" if is_partitioned else ""
    shop_18.run(GENERATED.format(kind="STORED", more=more))
    if is_partitioned:
        shop_18.run("CREATE TABLE shop.p PARTITION OF shop.t DEFAULT")
        shop_18.run(f"ALTER TABLE shop.p REPLICA IDENTITY {identity}")
    shop_18.run(f"ALTER TABLE shop.t REPLICA IDENTITY {identity}")
    capture = shop_18.capture("t", "id INT, net DECIMAL(9,2), gross DECIMAL(9,2)")
    capture.start()
    shop_18.run(
        "INSERT INTO shop.t VALUES (1, 10), (2, 2.5)",
        "UPDATE shop.t SET net = 11 WHERE id = 1",
        "DELETE FROM shop.t WHERE id = 2",
    )
    capture.read()
    capture.snapshot_into_stream()
    events = shop_18.envelopes(capture)
    assert [event["op"] for event in events] == ["c", "c", "u", "d", "r"]
    row = {"id": 1, "net": "11.00", "gross": "22.00"}
    assert [event["after"] for event in events] == [
        {"id": 1, "net": "10.00", "gross": "20.00"},
        {"id": 2, "net": "2.50", "gross": "5.00"},
        row,
        None,
        row,
    ]


@pytest.mark.parametrize("kind", ["STORED", "VIRTUAL"])
@pytest.mark.parametrize("identity", ["FULL", "DEFAULT"])
def test_a_capture_never_stops_the_updates_of_its_table(
    shop_18: Shop, kind: str, identity: str
) -> None:
    """Version 18 rejects updates of a table whose replica identity has unpublished columns."""
    shop_18.run(GENERATED.format(kind=kind, more=""))
    shop_18.run(f"ALTER TABLE shop.t REPLICA IDENTITY {identity}", "INSERT INTO shop.t VALUES (1)")
    capture = shop_18.capture("t", "id INT, net DECIMAL(9,2)")
    if (kind, identity) == ("VIRTUAL", "FULL"):
        with pytest.raises(ConfigurationError) as refused:
            capture.start()
        assert refused.value.column == "gross"
    else:
        capture.start()
    shop_18.run("UPDATE shop.t SET net = 3", "DELETE FROM shop.t")


def test_a_virtual_column_of_a_partitions_identity_is_refused(shop_18: Shop) -> None:
    shop_18.run(
        GENERATED.format(kind="VIRTUAL", more="PARTITION BY RANGE (id)"),
        "CREATE TABLE shop.p PARTITION OF shop.t DEFAULT",
        "ALTER TABLE shop.p REPLICA IDENTITY FULL",
    )
    with pytest.raises(ConfigurationError) as refused:
        shop_18.capture("t", "id INT, net DECIMAL(9,2)").start()
    assert refused.value.column == "gross"


def test_a_virtual_column_that_is_declared_is_refused(shop_18: Shop) -> None:
    shop_18.run(GENERATED.format(kind="VIRTUAL", more=""))
    with pytest.raises(ConfigurationError) as refused:
        shop_18.capture("t", "id INT, gross DECIMAL(9,2)").start()
    assert refused.value.column == "gross"


def test_a_column_that_is_generated_later_does_not_stop_updates(shop_18: Shop) -> None:
    shop_18.run("CREATE TABLE shop.t (id int PRIMARY KEY, n int)")
    shop_18.run("ALTER TABLE shop.t REPLICA IDENTITY FULL", "INSERT INTO shop.t VALUES (1, 1)")
    capture = shop_18.capture("t", "id INT, n INT")
    capture.start()
    shop_18.run(
        "ALTER TABLE shop.t ADD m int GENERATED ALWAYS AS (n + 1) STORED", "UPDATE shop.t SET n = 2"
    )
    capture.read()
    assert shop_18.envelopes(capture)[-1]["after"] == {"id": 1, "n": 2, "m": 3}


@pytest.mark.parametrize(
    "publication", ["FOR TABLE shop.t", "FOR TABLE shop.t (id, net)", "FOR TABLES IN SCHEMA shop"]
)
@pytest.mark.parametrize(
    ("identity", "columns"),
    [("DEFAULT", "id INT, gross DECIMAL(9,2)"), ("FULL", "id INT, net DECIMAL(9,2)")],
)
def test_a_publication_without_a_generated_column_is_refused(
    shop_18: Shop, publication: str, identity: str, columns: str
) -> None:
    shop_18.run(GENERATED.format(kind="STORED", more=""))
    shop_18.run(f"ALTER TABLE shop.t REPLICA IDENTITY {identity}", "INSERT INTO shop.t VALUES (1)")
    capture = shop_18.capture("t", columns)
    publication = publication.replace("SCHEMA shop", f"SCHEMA {shop_18.schema}")
    shop_18.run(f"CREATE PUBLICATION {capture.slot.name} {publication}")
    with pytest.raises(ConfigurationError, match="publish_generated_columns") as refused:
        capture.start()
    assert refused.value.column == "gross"
    for step in str(refused.value.next_step).split("; ")[:2]:
        if "SCHEMA" not in publication or "generated" in step:
            shop_18.server.execute(step)
    capture.start()
    shop_18.run("UPDATE shop.t SET net = 3")
    capture.read()
    assert shop_18.envelopes(capture)[-1]["after"]["gross"] == "6.00"


PUBLICATIONS = {
    "only inserts": "FOR TABLE shop.t WITH (publish = 'insert')",
    "no truncations": "FOR TABLE shop.t WITH (publish = 'insert, update, delete')",
    "a filter of rows": "FOR TABLE shop.t WHERE (id > 5)",
    "a list of columns": "FOR TABLE shop.t (id)",
    "another table, too": "FOR TABLE shop.t, shop.u",
    "all tables": "FOR ALL TABLES",
}


@pytest.mark.parametrize("case", PUBLICATIONS)
def test_a_publication_that_leaves_out_something_is_refused(shop: Shop, case: str) -> None:
    shop.run(
        "CREATE TABLE shop.t (id int PRIMARY KEY, n int)",
        "CREATE TABLE shop.u (id int PRIMARY KEY)",
    )
    capture = shop.capture("t", "id INT, n INT")
    shop.run(f"CREATE PUBLICATION {capture.slot.name} {PUBLICATIONS[case]}")
    with pytest.raises(ConfigurationError, match="publication"):
        capture.start()
    # One that fits, and is replaced while the capture runs.
    shop.run(f"DROP PUBLICATION {capture.slot.name}")
    capture.start()
    shop.run(
        f"DROP PUBLICATION {capture.slot.name}",
        f"CREATE PUBLICATION {capture.slot.name} {PUBLICATIONS[case]}",
    )
    with pytest.raises(ConfigurationError, match="publication"):
        capture.read()


# A type of PostgreSQL, the declared one, a value, and what a change's JSON has: Debezium's, with
# decimals as texts.
VALUES: dict[str, tuple[str, str, str, Any]] = {
    "date": ("date", "DATE", "'2026-02-03'", "2026-02-03"),
    "timestamptz": (
        "timestamptz",
        "TIMESTAMP",
        "'2026-02-03 04:05:06.7+02'",
        "2026-02-03T02:05:06.700000Z",
    ),
    "timestamp": ("timestamp", "TIMESTAMP", "'1970-01-01 00:00:01.5'", 1_500_000),
    "numeric": ("numeric(12,4)", "DECIMAL(12,4)", "-1234.5", "-1234.5000"),
    "small numeric": ("numeric", "DECIMAL(20,10)", "0.0000001", "0.0000001"),
    "bytea": ("bytea", "BINARY", r"'\x00ff'", "AP8="),
    "char(n)": ("char(5)", "STRING", "'ab'", "ab   "),
    "uuid": (
        "uuid",
        "STRING",
        "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'",
        "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
    ),
    "bigint": ("bigint", "BIGINT", "9007199254740993", 9007199254740993),
    "boolean": ("boolean", "BOOLEAN", "true", True),
    "a domain over int": ("shop.positive", "INT", "7", 7),
    "a domain over a domain": ("shop.small", "INT", "7", 7),
    "a domain over date": ("shop.day", "DATE", "'2026-02-03'", "2026-02-03"),
    "an enum": ("shop.mood", "STRING", "'so-so'", "so-so"),
    "text": ("text", "STRING", "'a\"b'", 'a"b'),
    "varchar": ("varchar(9)", "STRING", "'x'", "x"),
    "double": ("double precision", "DOUBLE", "0.1", 0.1),
    "infinity": ("double precision", "DOUBLE", "'-Infinity'", "-Infinity"),
    "int array": ("int[]", "STRING", "'{1,NULL,3}'", [1, None, 3]),
    "text array": ("text[]", "STRING", "array['a','b,c']", ["a", "b,c"]),
    "enum array": ("shop.mood[]", "STRING", "'{good,so-so}'", ["good", "so-so"]),
    "json": ("jsonb", "STRING", "'{\"a\": 1}'", '{"a": 1}'),
    "time": ("time", "STRING", "'04:05:06'", "04:05:06"),
    "interval": ("interval", "STRING", "'1 day'", "1 day"),
    "inet": ("inet", "STRING", "'10.0.0.1'", "10.0.0.1"),
    "a date as text": ("date", "STRING", "'2026-02-03'", "2026-02-03"),
}
NO_KEYS = {"boolean", "int array", "text array", "enum array", "json", "double", "infinity"}


def make_types(shop: Shop) -> None:
    shop.run(
        "CREATE DOMAIN shop.positive AS int CHECK (value > 0)",
        "CREATE DOMAIN shop.small AS shop.positive CHECK (value < 99)",
        "CREATE DOMAIN shop.day AS date",
        "CREATE TYPE shop.mood AS ENUM ('good', 'so-so')",
    )


def test_a_value_of_each_type_is_the_same_in_changes_and_in_snapshots(shop: Shop) -> None:
    make_types(shop)
    columns = ", ".join(f"c{number} {VALUES[name][0]}" for number, name in enumerate(VALUES))
    shop.run(
        f"CREATE TABLE shop.t (id int PRIMARY KEY, {columns})",
        "ALTER TABLE shop.t REPLICA IDENTITY FULL",
    )
    declared = ", ".join(f"c{number} {VALUES[name][1]}" for number, name in enumerate(VALUES))
    capture = shop.capture("t", f"id INT, {declared}")
    capture.start()
    shop.run(
        f"INSERT INTO shop.t VALUES (1, {', '.join(VALUES[name][2] for name in VALUES)})",
        "INSERT INTO shop.t (id) VALUES (2)",
        "UPDATE shop.t SET id = 3 WHERE id = 2",
    )
    capture.read()
    capture.snapshot_into_stream()
    events = shop.envelopes(capture)
    assert [event["op"] for event in events] == ["c", "c", "d", "c", "r", "r"]
    streamed, snapshot = events[0]["after"], events[4]["after"]
    expected = {"id": 1} | {f"c{number}": VALUES[name][3] for number, name in enumerate(VALUES)}
    assert streamed == expected
    assert snapshot == expected
    assert events[3]["after"] == events[5]["after"] == {"id": 3} | dict.fromkeys(list(expected)[1:])
    capture.snapshot(shop.folder / "snapshot")
    (row, _) = pq.read_table(shop.folder / "snapshot" / "rows.parquet").to_pylist()
    typed = {
        VALUES[name][1]: row[f"c{number}"]
        for number, name in enumerate(VALUES)
        if name not in NO_KEYS
    }
    assert typed["DATE"] == date(2026, 2, 3)
    assert typed["DECIMAL(12,4)"] == Decimal("-1234.5")
    assert typed["BINARY"] == b"\x00\xff"
    assert row["c1"] == datetime(2026, 2, 3, 2, 5, 6, 700_000, UTC)
    assert row["c2"] == datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC)


@pytest.mark.parametrize("name", [name for name in VALUES if name not in NO_KEYS])
def test_a_key_of_each_type_is_captured_with_its_type(shop: Shop, name: str) -> None:
    make_types(shop)
    kind, declared, value, _ = VALUES[name]
    shop.run(f"CREATE TABLE shop.t (id {kind} PRIMARY KEY, n int)")
    capture = shop.capture("t", f"id {declared}, n INT")
    capture.start()
    shop.run(
        f"INSERT INTO shop.t VALUES ({value}, 1)", "UPDATE shop.t SET n = 2", "DELETE FROM shop.t"
    )
    assert capture.read() == 3
    shop.run(f"INSERT INTO shop.t VALUES ({value}, 1)")
    capture.snapshot(shop.folder / "snapshot")
    (row,) = pq.read_table(shop.folder / "snapshot" / "rows.parquet").to_pylist()
    assert set(shop.keys(capture)) == {row["id"]}
    assert [event["op"] for event in shop.envelopes(capture)] == ["c", "u", "d", "c"]


@pytest.mark.parametrize(
    ("kind", "value"), [("date", "'infinity'"), ("date", "'0044-03-15 BC'"), ("numeric", "'NaN'")]
)
def test_a_value_that_python_does_not_have_is_refused_by_column(
    shop: Shop, kind: str, value: str
) -> None:
    shop.run(f"CREATE TABLE shop.t (id int PRIMARY KEY, v {kind})")
    capture = shop.capture("t", f"id INT, v {'DATE' if kind == 'date' else 'DECIMAL(9,2)'}")
    shop.run(f"INSERT INTO shop.t VALUES (1, {value})")
    with pytest.raises(SchemaMismatchError) as refused:
        capture.start_with_snapshot(shop.folder / "snapshot")
    assert refused.value.table is not None


def test_a_change_without_a_declared_column_is_refused_before_it_is_appended(shop: Shop) -> None:
    shop.run("CREATE TABLE shop.t (id int PRIMARY KEY, n int)")
    capture = shop.capture("t", "id INT, n INT")
    capture.start()
    shop.run(
        "INSERT INTO shop.t VALUES (1, 1)",
        "ALTER TABLE shop.t RENAME n TO m",
        "INSERT INTO shop.t VALUES (2, 2)",
    )
    with pytest.raises(ConfigurationError) as refused:
        capture.read()
    assert refused.value.column == "n"
    # Back under its old name, the changes of the time in between do not have it.
    shop.run("ALTER TABLE shop.t RENAME m TO n")
    with pytest.raises(SchemaMismatchError) as incomplete:
        capture.read()
    assert incomplete.value.column == "n"
    assert shop.envelopes(capture) == []


def test_columns_that_are_added_while_it_runs_are_in_the_changes(shop: Shop) -> None:
    shop.run("CREATE TABLE shop.t (id int PRIMARY KEY, n int)")
    capture = shop.capture("t", "id INT, n INT")
    capture.start()
    shop.run("ALTER TABLE shop.t ADD m int DEFAULT 4", "INSERT INTO shop.t VALUES (1, 1)")
    capture.read()
    assert shop.envelopes(capture)[0]["after"] == {"id": 1, "n": 1, "m": 4}


def test_a_long_value_is_not_taken_from_an_old_key(shop: Shop) -> None:
    """An update of the key has the old key, whose other columns are nulls: these are no values."""
    shop.run(
        "CREATE TABLE shop.t (id int PRIMARY KEY, note text)",
        "ALTER TABLE shop.t ALTER note SET STORAGE EXTERNAL",
    )
    capture = shop.capture("t", "id INT, note STRING")
    capture.start()
    shop.run("INSERT INTO shop.t VALUES (1, repeat('x', 9000))", "UPDATE shop.t SET id = 2")
    with pytest.raises(MalformedDocumentError):
        capture.read()


def test_partitions_have_the_replica_identity_of_their_table(shop: Shop) -> None:
    """PostgreSQL sends the old row by the identity of the partition, and says that it is by that
    of the table.
    """
    shop.run(
        "CREATE TABLE shop.t (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)",
        "CREATE TABLE shop.p PARTITION OF shop.t DEFAULT",
        "ALTER TABLE shop.p ALTER note SET STORAGE EXTERNAL",
        "ALTER TABLE shop.t REPLICA IDENTITY FULL",
    )
    capture = shop.capture("t", "id INT, note STRING")
    with pytest.raises(ConfigurationError) as refused:
        capture.start()
    shop.run(refused.value.next_step.rstrip("."))
    capture.start()
    shop.run("INSERT INTO shop.t VALUES (1, repeat('x', 9000))", "UPDATE shop.t SET id = 2")
    capture.read()
    assert [event["after"] for event in shop.envelopes(capture)][-1] == {
        "id": 2,
        "note": "x" * 9000,
    }


@pytest.fixture
def parts(shop: Shop) -> TableCapture:
    """The capture of a table with a partition of ids below 100, in which there is one row."""
    shop.run(
        "CREATE TABLE shop.parts (id int PRIMARY KEY, n int) PARTITION BY RANGE (id)",
        "CREATE TABLE shop.low PARTITION OF shop.parts FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE shop.spare (id int PRIMARY KEY, n int)",
    )
    capture = shop.capture("parts", "id INT, n INT")
    capture.start()
    shop.run("INSERT INTO shop.parts VALUES (1, 1)")
    capture.read()
    return capture


def test_changes_of_partitions_have_the_name_of_their_table(
    shop: Shop, parts: TableCapture
) -> None:
    shop.run(
        "CREATE TABLE shop.mid PARTITION OF shop.parts FOR VALUES FROM (100) TO (200)",
        "INSERT INTO shop.parts VALUES (150, 2)",
        "UPDATE shop.parts SET id = 101 WHERE id = 1",
        "DELETE FROM shop.mid WHERE id = 150",
    )
    parts.read()
    events = shop.envelopes(parts)
    assert {(event["source"]["schema"], event["source"]["table"]) for event in events} == {
        (shop.schema, "parts")
    }
    rows: dict[int, int] = {}
    for event in events:
        if event["op"] == "d":
            del rows[event["before"]["id"]]
        else:
            rows[event["after"]["id"]] = event["after"]["n"]
    assert rows == dict(shop.server.execute(f"SELECT id, n FROM {shop.schema}.parts"))  # type: ignore[arg-type]


UNTOLD = {
    "detached": ["ALTER TABLE shop.parts DETACH PARTITION shop.low"],
    "dropped": ["DROP TABLE shop.low"],
    "truncated": ["TRUNCATE shop.low"],
    "attached with rows": [
        "INSERT INTO shop.spare VALUES (300, 3)",
        "ALTER TABLE shop.parts ATTACH PARTITION shop.spare FOR VALUES FROM (300) TO (400)",
    ],
    "made, filled and attached at once": [
        "BEGIN; CREATE TABLE shop.more (id int PRIMARY KEY, n int); INSERT INTO shop.more VALUES (300, 3); "
        "ALTER TABLE shop.parts ATTACH PARTITION shop.more FOR VALUES FROM (300) TO (400); COMMIT"
    ],
    "replaced by another one": [
        "ALTER TABLE shop.parts DETACH PARTITION shop.low",
        "INSERT INTO shop.spare VALUES (3, 3)",
        "ALTER TABLE shop.parts ATTACH PARTITION shop.spare FOR VALUES FROM (0) TO (100)",
    ],
}


@pytest.mark.parametrize("case", UNTOLD)
def test_rows_that_come_or_go_with_partitions_are_refused(
    shop: Shop, parts: TableCapture, case: str
) -> None:
    shop.run(*UNTOLD[case])
    for _ in range(2):
        with pytest.raises(ConfigurationError) as refused:
            parts.read()
        assert refused.value.table == f"{shop.schema}.parts"
    # A new snapshot has them, and one may also go on.
    parts.snapshot(shop.folder / "snapshot")
    rows = pq.read_table(shop.folder / "snapshot" / "rows.parquet").to_pylist()
    assert [(row["id"], row["n"]) for row in rows] == shop.server.execute(
        f"SELECT id, n FROM {shop.schema}.parts"
    )
    shop.run("CREATE TABLE shop.last PARTITION OF shop.parts FOR VALUES FROM (900) TO (999)")
    shop.run("INSERT INTO shop.parts VALUES (950, 9)")
    assert parts.read() == 1


TOLD = {
    "a new one": ["CREATE TABLE shop.mid PARTITION OF shop.parts FOR VALUES FROM (100) TO (200)"],
    "a new one that is filled at once": [
        "BEGIN; CREATE TABLE shop.mid PARTITION OF shop.parts FOR VALUES FROM (100) TO (200); "
        "INSERT INTO shop.parts VALUES (150, 5); COMMIT"
    ],
    "an empty one": [
        "ALTER TABLE shop.parts ATTACH PARTITION shop.spare FOR VALUES FROM (100) TO (200)"
    ],
}


@pytest.mark.parametrize("case", TOLD)
def test_partitions_without_earlier_rows_may_come(
    shop: Shop, parts: TableCapture, case: str
) -> None:
    shop.run(*TOLD[case], "INSERT INTO shop.parts VALUES (151, 6)")
    assert parts.read() >= 1
    assert 151 in [event["after"]["id"] for event in shop.envelopes(parts)]


def test_a_partition_that_was_emptied_before_may_be_accepted(
    shop: Shop, parts: TableCapture
) -> None:
    shop.run("DELETE FROM shop.low", "ALTER TABLE shop.parts DETACH PARTITION shop.low")
    with pytest.raises(ConfigurationError, match="--accept-partitions"):
        parts.read()
    parts.slot.accept_partitions()
    assert parts.read() == 1
    assert shop.envelopes(parts)[-1]["op"] == "d"


def test_a_truncation_is_captured_as_one(shop: Shop) -> None:
    shop.run("CREATE TABLE shop.t (id int PRIMARY KEY, n int)")
    capture = shop.capture("t", "id INT, n INT")
    capture.start()
    shop.run(
        "INSERT INTO shop.t VALUES (1, 1)", "TRUNCATE shop.t", "INSERT INTO shop.t VALUES (2, 2)"
    )
    capture.read()
    assert [event["op"] for event in shop.envelopes(capture)] == ["c", "t", "c"]


def test_a_publication_of_partitions_is_refused_with_the_command_that_mends_it(
    shop: Shop, parts: TableCapture
) -> None:
    name = parts.slot.name
    shop.run(f"ALTER PUBLICATION {name} SET (publish_via_partition_root = false)")
    with pytest.raises(ConfigurationError) as refused:
        parts.read()
    command, _, _ = refused.value.next_step.partition(";")
    shop.run(command)
    assert parts.read() == 0


def test_advice_on_the_replica_identity_can_be_followed(shop: Shop) -> None:
    shop.run("CREATE TABLE shop.t (n int PRIMARY KEY, id int NOT NULL UNIQUE)")
    capture = shop.capture("t", "id INT, n INT", "id")
    with pytest.raises(ConfigurationError) as refused:
        capture.start()
    shop.run(refused.value.next_step.rstrip("."))
    capture.start()
    shop.run("INSERT INTO shop.t VALUES (1, 5)", "DELETE FROM shop.t")
    assert capture.read() == 2
    assert shop.keys(capture) == [5, 5, 5]


def test_the_server_would_refuse_updates_of_what_was_published(shop: Shop) -> None:
    """Why a table without a replica identity is refused: published, its owner could not update
    it any more.
    """
    shop.run("CREATE TABLE shop.t (id int NOT NULL, n int)", "INSERT INTO shop.t VALUES (1, 1)")
    with pytest.raises(ConfigurationError):
        shop.capture("t", "id INT, n INT").start()
    shop.run("UPDATE shop.t SET n = 2")
    slot = shop.slots[-1].name
    shop.run(f"CREATE PUBLICATION {slot} FOR TABLE shop.t")
    with pytest.raises(psycopg.Error):
        shop.run("UPDATE shop.t SET n = 3")

"""Applications over nested records and remote tables: puts, updates inside columns and lookups, by
Spark and in process.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct import Application, LakeStreams, Schema, open_lake, run_application
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable

ORDERS = {
    "id": "string",
    "city": "string",
    "views": "bigint",
    "customer": "struct<name:string,address:struct<city:string,`zip.code`:int>,seen:timestamp>",
    "lines": "array<struct<sku:string,price:decimal(10,2),day:date>>",
    "attributes": "map<string,array<bigint>>",
}
NESTED = ("customer", "lines", "attributes")
AT = datetime(2013, 7, 1, 5, 0, 0, 250_000, tzinfo=UTC)
FIRST: dict[str, Any] = {
    "id": "a",
    "city": "Oslo",
    "views": 2**60,
    "customer": {"name": "Ada", "address": {"city": None, "zip.code": 7}, "seen": AT},
    "lines": [{"sku": "s", "price": Decimal("0.10"), "day": date(2013, 7, 1)}, None],
    "attributes": {"b.c": [2**53 + 1, None], "a": None},
}
RECORDS: list[dict[str, Any]] = [
    FIRST,
    {**dict.fromkeys(ORDERS), "id": "b", "city": "Rome", "views": 1, "lines": [], "attributes": {}},
]


@pytest.fixture(params=["in process", pytest.param("spark", marks=pytest.mark.spark)])
def spark_or_process(request: pytest.FixtureRequest) -> Any:
    """The session in which an application runs."""
    if request.param == "spark":
        return request.getfixturevalue("spark")
    return IN_PROCESS


def table(name: str, store: Any) -> RemoteTable[Any, Any, Any]:
    return RemoteTable(name, key="id", read_function=store, write_function=store)


def test_nested_records_go_into_tables_are_changed_inside_and_looked_up(
    tmp_path: Path, spark_or_process: Any
) -> None:
    lake = open_lake(tmp_path / "lake")
    streams = LakeStreams(lake)
    arriving = {"id": "string", "city": "string", "views": "bigint"}
    streams.create("orders", schema=Schema.of(arriving), key=["id"], partitions=1)
    rows = pa.Table.from_pylist([{name: r[name] for name in arriving} for r in RECORDS])
    streams.append("orders", rows, producer="test", sequence=1)
    file = tmp_path / "t.sqlite"
    known = table("known", SqliteTable(file, "known", "id", columns=ORDERS, create=True))
    copies = table("copies", SqliteTable(file, "copies", "id", columns=ORDERS, create=True))
    kept = {**ORDERS, "counts": "struct<views:bigint,inner:struct<n:int>>"}
    changed = table("changed", SqliteTable(file, "changed", "id", columns=kept, create=True))
    plain = table("plain", MemoryTable(f"plain {tmp_path}"))
    with BlockingTable(known) as direct:
        direct.put_all([(record["id"], record) for record in RECORDS])

    app = Application("orders", engine="auto")
    orders = app.input_stream("lake.orders", default_offset="oldest")
    found = orders.join(app.table(known), on="id", select=list(NESTED))
    found.send_to(app.table(copies))
    for target in (changed, plain):
        found.update(
            app.table(target),
            set={"customer.address.city": "city", "attributes": "attributes"},
            add={"counts.views": "views", "counts.inner.n": "1"},
            if_missing=["customer", "lines"],
        )
    run_application(app, lake=lake, spark=spark_or_process, adopt=True)

    expected = {
        "a": {
            "customer": {**FIRST["customer"], "address": {"city": "Oslo", "zip.code": 7}},
            "lines": FIRST["lines"],
            "attributes": FIRST["attributes"],
            "counts": {"views": 2**60, "inner": {"n": 1}},
        },
        "b": {
            "customer": {"name": None, "address": {"city": "Rome", "zip.code": None}, "seen": None},
            "lines": [],
            "attributes": {},
            "counts": {"views": 1, "inner": {"n": 1}},
        },
    }
    with BlockingTable(changed) as stored:
        for key, record in stored.get_all(["a", "b"]).items():
            assert {name: record[name] for name in expected[key]} == expected[key]
    with BlockingTable(plain) as stored:
        assert stored.get("a") == expected["a"]
    with BlockingTable(copies) as stored:
        assert stored.get_all(["a", "b"]) == {record["id"]: record for record in RECORDS}

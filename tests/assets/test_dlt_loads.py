"""What dlt pipelines load into the lake: records of every type, versions and changes, once."""

from __future__ import annotations

import csv
import datetime as dt
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlparse

import pandas as pd
import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    SchemaMismatchError,
    StreamExistsError,
)
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets import loads
from tests.assets.conftest import World
from tests.assets.loads import Machine, resource
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.resources.small_disks import more_open_files

pytestmark = pytest.mark.lengthy  # dlt writes and moves many files

UTC = dt.UTC


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(open_lake(tmp_path / "lake"), tmp_path / "pipelines")


def refused(machine: Machine, data: Any, kind: type[AdjunctError], **options: Any) -> AdjunctError:
    """Return the error of a run that has to fail with one."""
    with pytest.raises(loads.dlt_errors.PipelineStepFailed) as failed:
        machine.run(data, **options)
    error: BaseException | None = failed.value
    while error is not None and not isinstance(error, AdjunctError):
        error = error.__cause__ or error.__context__
    assert isinstance(error, kind)
    return error


# -- what is stored


def test_every_type_of_dlt_is_stored_as_it_is(machine: Machine) -> None:
    row = {
        "id": 2**63 - 1,
        "name": "Zoë \U0001f600",
        "price": Decimal("12345678901234567890.123456789"),
        "ratio": 0.1,
        "paid": True,
        "at": dt.datetime(
            2024, 3, 31, 1, 59, 59, 999999, tzinfo=dt.timezone(dt.timedelta(hours=2))
        ),
        "local": dt.datetime(2024, 3, 31, 1, 2, 3),
        "day": dt.date(2024, 2, 29),
        "alarm": dt.time(23, 59, 59, 1),
        "raw": b"\x00\xff",
    }
    machine.run(resource([row]))
    assert machine.types("orders") == {
        "id": "bigint",
        "name": "string",
        "price": "decimal(38,9)",
        "ratio": "double",
        "paid": "boolean",
        "at": "timestamp",
        "local": "timestamp",
        "day": "date",
        "alarm": "string",
        "raw": "binary",
    }
    stored = {
        **row,
        "local": row["local"].replace(tzinfo=UTC),  # type: ignore[attr-defined]
        "alarm": "23:59:59.000001",
    }
    assert machine.records("orders") == [stored]


def test_nested_values_stay_nested_with_their_types(machine: Machine) -> None:
    rows = [
        {
            "id": 1,
            "customer": {"Name": "Ada", "since": dt.date(2020, 1, 1), "tags": []},
            "lines": [
                {"sku": "a", "price": Decimal("1.50"), "at": dt.datetime(2024, 1, 1, tzinfo=UTC)},
                {"sku": "b", "price": 2, "discounts": [{"rate": 1}, {"rate": 0.5}]},
            ],
        },
        {"id": 2, "customer": None, "lines": []},
        {"id": 3, "customer": {"Name": None}, "lines": [None, {}]},
    ]
    machine.run(resource(rows))
    line = {"sku": None, "price": None, "at": None, "discounts": None}
    assert machine.records("orders") == [
        {
            "id": 1,
            "customer": {"Name": "Ada", "since": dt.date(2020, 1, 1)},
            "lines": [
                {
                    **line,
                    "sku": "a",
                    "price": Decimal("1.50"),
                    "at": dt.datetime(2024, 1, 1, tzinfo=UTC),
                },
                {
                    **line,
                    "sku": "b",
                    "price": Decimal(2),
                    "discounts": [{"rate": 1.0}, {"rate": 0.5}],
                },
            ],
        },
        {"id": 2, "customer": None, "lines": []},
        {"id": 3, "customer": {"Name": None, "since": None}, "lines": [None, line]},
    ]


def test_nested_values_get_more_members_with_later_loads(machine: Machine) -> None:
    machine.run(resource([{"id": 1, "who": {"name": "a", "tags": []}}]))
    machine.run(resource([{"id": 2, "who": {"tags": [{"k": 1}], "mail": {"at": "x"}}}]))
    assert machine.types("orders")["who"] == (
        "struct<name:string,tags:array<struct<k:bigint>>,mail:struct<at:string>>"
    )
    assert [row["who"] for row in machine.records("orders")] == [
        {"name": "a", "tags": None, "mail": None},
        {"name": None, "tags": [{"k": 1}], "mail": {"at": "x"}},
    ]


def test_objects_with_many_names_are_maps_and_stay_so(machine: Machine) -> None:
    machine.run(resource([{"id": 1, "counts": {f"k{i}": i for i in range(100)}}]))
    machine.run(resource([{"id": 2, "counts": {"new": 5}}]))
    assert machine.types("orders")["counts"] == "map<string,bigint>"
    assert machine.records("orders")[1]["counts"] == {"new": 5}


def test_arrow_tables_keep_their_nested_types(machine: Machine) -> None:
    kind = pa.struct([("a", pa.int32()), ("at", pa.timestamp("ms", tz="UTC"))])
    at = dt.datetime(2024, 1, 1, tzinfo=UTC)
    table = pa.table(
        {"id": [1], "who": pa.array([{"a": 5, "at": at}], kind), "n": pa.array([7], pa.uint8())}
    )
    machine.run(resource(table))
    fewer = pa.table({"id": [2], "who": pa.array([{"a": 6}], pa.struct([("a", pa.int32())]))})
    machine.run(resource(fewer))
    assert machine.types("orders")["who"] == "struct<a:int,at:timestamp>"
    assert machine.records("orders") == [
        {"id": 1, "who": {"a": 5, "at": at}, "n": 7},
        {"id": 2, "who": {"a": 6, "at": None}, "n": None},
    ]


def test_times_of_arrow_tables_and_of_rows_are_stored_as_one_text(machine: Machine) -> None:
    times = [dt.time(8, 30), dt.time(8, 30, 15, 500000), dt.time(0), None]
    for unit in (pa.time32("ms"), pa.time64("us"), pa.time64("ns")):
        machine.run(resource(pa.table({"alarm": pa.array(times, unit)})))
    machine.run(resource([{"alarm": time} for time in times]))
    stored = [row["alarm"] for row in machine.records("orders")]
    texts = ["08:30:00", "08:30:15.500000", "00:00:00", None]
    assert stored[:8] == 2 * texts
    assert stored[8:12] == ["08:30:00", "08:30:15.500000000", "00:00:00", None]
    assert stored[12:] == texts


def test_declared_columns_have_the_declared_types(machine: Machine) -> None:
    machine.options = {
        "schemas": {"orders": Schema.of(price="decimal(10,2)", tags="array<string>", body="string")}
    }
    row = {"id": 1, "price": Decimal("1.5"), "tags": [], "body": {"x": [1]}}
    machine.run(resource([row]))
    assert machine.records("orders") == [
        {"id": 1, "price": Decimal("1.50"), "tags": [], "body": '{"x":[1]}'}
    ]


def test_added_columns_are_null_in_earlier_records(machine: Machine) -> None:
    machine.run(resource([{"id": 1, "a": 1}]))
    machine.run(resource([{"id": 2, "b": "x"}]))
    machine.run(resource([{"id": 3, "a": "text"}]))  # dlt puts it into a column of its own
    none = {"a": None, "b": None, "a__v_text": None}
    assert machine.records("orders") == [
        {**none, "id": 1, "a": 1},
        {**none, "id": 2, "b": "x"},
        {**none, "id": 3, "a__v_text": "text"},
    ]


@pytest.mark.parametrize(
    ("first", "bad", "column"),
    [
        ({"v": Decimal("1.5")}, {"v": Decimal("0.0000000001")}, "v"),
        ({"v": Decimal(1)}, {"v": Decimal(10**29)}, "v"),
        ({"v": {"n": 1}}, {"v": {"n": 1.5}}, "v.n"),
        ({"v": {"n": 1}}, {"v": {"n": "text"}}, "v.n"),
        ({"v": {"n": 1}}, {"v": [1]}, "v"),
        ({"v": [1]}, {"v": ["a"]}, "v[]"),
        ({"v": {"n": 1}}, {"v": {"n": 2**63}}, "v.n"),
        ({"v": "text"}, {"v": "a\ud800"}, "v"),
    ],
)
def test_a_value_that_does_not_fit_is_named_and_its_load_adds_nothing(
    machine: Machine, first: dict[str, Any], bad: dict[str, Any], column: str
) -> None:
    machine.run(resource([{"id": 0, **first}]))
    good = resource([{"id": 1}], "another")
    try:
        error = refused(
            machine, [good, resource([{"id": 1, **first}, {"id": 2, **bad}])], SchemaMismatchError
        )
    except AssertionError:  # dlt itself refuses some before they are loaded
        assert column in ("v", "v.n")
        assert "raw-another" not in machine.streams.list_streams()
        return
    assert "'orders'" in error.problem
    assert repr(column) in error.problem
    assert len(machine.records("orders")) == 1
    assert "raw-another" not in machine.streams.list_streams()
    # as the error says
    machine.pipeline().abort_packages()
    machine.run([good, resource([{"id": 3, **first}])])
    assert [row["id"] for row in machine.records("orders")] == [0, 3]
    assert [row["id"] for row in machine.records("another")] == [1]


def test_a_value_of_another_type_than_dlt_has_is_a_column_of_its_own_or_refused_by_contract(
    machine: Machine,
) -> None:
    columns = {"shelves": {"data_type": "double"}}
    rows = [{"id": 1, "shelves": 2.5}, {"id": 2, "shelves": "many"}]
    strict = {"columns": columns, "schema_contract": {"data_type": "freeze"}}
    with pytest.raises(loads.dlt_errors.PipelineStepFailed, match="contract"):
        machine.run(resource(rows, "strict", **strict))
    assert "raw-strict" not in machine.streams.list_streams()
    machine.pipeline().abort_packages()
    machine.run(resource(rows, "open", columns=columns))
    found = {row["id"]: (row["shelves"], row["shelves__v_text"]) for row in machine.records("open")}
    assert found == {1: (2.5, None), 2: (None, "many")}


def test_columns_that_were_dropped_do_not_come_back(machine: Machine) -> None:
    machine.run(resource([{"id": 1, "a": 1}]))
    machine.streams.change_columns("raw-orders", drop=["a"])
    error = refused(machine, resource([{"id": 2, "a": 2}]), SchemaMismatchError)
    assert error.column == "a"


@pytest.mark.parametrize(
    ("data", "column"),
    [
        ([{"id": 1, "v": {"a": 1, "A": 2}}], "v"),
        ([{"id": 1, "v": {"": 1}}], "v"),
        (pa.table({"id": pa.array([2**64 - 1], pa.uint64())}), "id"),
        (pa.table({"v": pa.array([[(1, 2)]], pa.map_(pa.int32(), pa.int32()))}), "v"),
        ([{"v": []}], None),
    ],
)
def test_what_no_stream_can_hold_is_refused_by_name(
    machine: Machine, data: Any, column: str | None
) -> None:
    error = refused(machine, resource(data), SchemaMismatchError)
    assert "'orders'" in error.problem
    assert error.column == column
    assert "raw-orders" not in machine.streams.list_streams()


def test_nested_integers_without_a_sign_are_stored(machine: Machine) -> None:
    row = {"b": 255, "h": [65535], "w": 2**32 - 1, "g": 2**63 - 1}
    kinds = {"b": pa.uint8(), "h": pa.list_(pa.uint16()), "w": pa.uint32(), "g": pa.uint64()}
    machine.run(resource(pa.table({"v": pa.array([row], pa.struct([*kinds.items()]))})))
    assert machine.records("orders") == [{"v": row}]


def test_a_declared_type_that_the_stream_does_not_have_is_refused(machine: Machine) -> None:
    machine.run(resource([{"id": 1}]))
    machine.options = {"schemas": {"orders": Schema.of(id="string")}}
    assert refused(machine, resource([{"id": 2}]), SchemaMismatchError).column == "id"


def test_tables_of_nested_values_are_refused(machine: Machine) -> None:
    rows = [{"id": 1, "lines": [{"sku": "a"}]}]
    error = refused(machine, resource(rows, max_table_nesting=1), ConfigurationError)
    assert "orders__lines" in error.problem
    assert "raw-orders" not in machine.streams.list_streams()


def test_a_table_with_a_name_of_dlts_own_is_refused(machine: Machine) -> None:
    refused(machine, resource([{"id": 1}], "_dlt_orders"), ConfigurationError)


def test_a_first_replacement_without_rows_and_columns_makes_no_stream(machine: Machine) -> None:
    machine.run(resource([], write_disposition="replace", primary_key="id"))
    assert "raw-orders" not in machine.streams.list_streams()


def test_a_file_that_this_process_can_not_open_is_not_gone(tmp_path: Path) -> None:
    from dagster_adjunct.assets.exchange import dlt_client

    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}')
    assert dlt_client._read_file(path) == [{"id": 1}]
    with more_open_files(0), pytest.raises(ConfigurationError) as caught:
        dlt_client._read_file(path)
    assert "ulimit -n" in caught.value.next_step
    path.unlink()
    with pytest.raises(SchemaMismatchError):
        dlt_client._read_file(path)


def test_nothing_of_dlt_is_imported_before_it_is_used() -> None:
    code = "import sys, dagster_adjunct.dlt; print('dlt' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# -- merge, replace and append


def orders_by_id(machine: Machine, world: World) -> dict[int, Any]:
    spec = unbounded_dataset("orders", input="lake.raw-orders", key="id", partitions=2)
    world.advance(spec)
    return {key: entry["v"] for key, entry in world.view(spec).items()}


@pytest.fixture
def world(machine: Machine) -> World:
    return World(machine.lake, IN_PROCESS)


def test_what_is_merged_is_applied_by_an_unbounded_dataset(machine: Machine, world: World) -> None:
    machine.options = {"partitions": 2}
    hints: dict[str, Any] = {
        "write_disposition": "merge",
        "primary_key": "id",
        "columns": {"gone": {"hard_delete": True, "data_type": "bool"}},
    }
    expected: dict[int, Any] = {}
    changes = [
        [(1, "a", None), (2, "b", False), (3, "c", None)],
        [(2, "B", None), (3, None, True), (4, "d", None)],
        [(4, "D", None), (4, "DD", None), (3, "again", None), (1, None, True)],
    ]
    for load in changes:
        machine.run(resource([{"id": i, "v": v, "gone": gone} for i, v, gone in load], **hints))
        for i, v, gone in load:
            if gone:
                expected.pop(i, None)
            else:
                expected[i] = v
        assert orders_by_id(machine, world) == expected
    assert machine.streams.info("raw-orders").partitions == 2


def test_the_last_row_of_a_key_counts_in_a_load_of_many_files(
    machine: Machine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMALIZE__DATA_WRITER__FILE_MAX_ITEMS", "2")
    monkeypatch.setenv("NORMALIZE__DATA_WRITER__BUFFER_MAX_ITEMS", "2")
    rows = ({"id": i % 5, "v": str(i)} for i in range(40))
    machine.run(resource(rows, write_disposition="merge", primary_key="id"))
    assert orders_by_id(machine, world) == {i: str(35 + i) for i in range(5)}
    assert len(machine.records("orders")) == 40


@pytest.mark.parametrize(("order", "kept"), [("asc", "low"), ("desc", "high")])
def test_of_rows_of_a_key_the_one_that_dedup_sort_chooses_counts(
    machine: Machine, world: World, order: str, kept: str
) -> None:
    rows = [
        {"id": 1, "at": 5, "v": "high"},
        {"id": 1, "at": 2, "v": "low"},
        {"id": 1, "at": 3, "v": "x"},
    ]
    machine.run(
        resource(
            rows, write_disposition="merge", primary_key="id", columns={"at": {"dedup_sort": order}}
        )
    )
    assert orders_by_id(machine, world) == {1: kept}


def test_each_replacement_is_a_version_also_an_empty_one(machine: Machine, world: World) -> None:
    machine.options = {"partitions": {"orders": 2}}
    spec = bounded_dataset("orders", input="lake.raw-orders", key="id", partitions=2)
    hints: dict[str, Any] = {"write_disposition": "replace", "primary_key": "id"}
    for load in ([(1, "a"), (2, "b")], [(2, "c")], [], [(9, "z")]):
        info = machine.run(resource([{"id": i, "v": v} for i, v in load], **hints))
        world.advance(spec)
        version = world.view(spec)
        assert version.sealed.name == info.loads_ids[0].replace(".", "-")
        assert {key: entry["v"] for key, entry in version.items()} == dict(load)


def test_records_of_another_write_disposition_are_refused(machine: Machine) -> None:
    key = {"primary_key": "id"}
    machine.run(resource([{"id": 1}], write_disposition="append", **key))
    error = refused(
        machine, resource([{"id": 2}], write_disposition="replace", **key), StreamExistsError
    )
    assert error.stream == "lake.raw-orders"
    machine.pipeline().abort_packages()
    machine.run(resource([{"id": 1}], "plans", write_disposition="replace", **key))
    error = refused(
        machine, resource([{"id": 2}], "plans", write_disposition="merge", **key), StreamExistsError
    )
    assert error.stream == "lake.raw-plans"


@pytest.mark.parametrize(
    "hints", [{}, {"primary_key": "id", "merge_key": "day"}, {"merge_key": "day"}]
)
def test_a_merge_that_no_changes_express_is_refused(
    machine: Machine, hints: dict[str, str]
) -> None:
    rows = [{"id": 1, "day": "x"}]
    error = refused(machine, resource(rows, write_disposition="merge", **hints), ConfigurationError)
    assert error.table == "orders"
    assert "raw-orders" not in machine.streams.list_streams()


def test_a_refresh_is_refused_and_deletes_nothing(machine: Machine) -> None:
    @loads.dlt.source(name="shop")
    def shop() -> Any:
        return resource([{"id": 1}])

    machine.run(shop())
    for refresh in ("drop_sources", "drop_data"):
        error = refused(machine, shop(), ConfigurationError, refresh=refresh)
        assert "refresh" in error.problem
        machine.pipeline().abort_packages()
    assert machine.records("orders") == [{"id": 1}]


# -- whose loads they are


def test_incremental_cursors_go_on_on_another_machine(machine: Machine, tmp_path: Path) -> None:
    source = [{"id": i, "at": i} for i in range(5)]

    by_at = loads.dlt.sources.incremental("at", initial_value=-1)

    @loads.dlt.resource(name="orders")
    def orders(at: Any = by_at) -> Iterator[Any]:
        yield from (row for row in source if row["at"] >= at.last_value)

    machine.run(orders())
    machine.run(orders())
    assert machine.records("orders") == source
    source += [{"id": i, "at": i} for i in range(5, 8)]
    another = Machine(machine.lake, tmp_path / "another")
    another.run(orders())
    assert machine.records("orders") == source
    source.append({"id": 8, "at": 8})
    machine.run(orders())  # its local state is older than what the other machine has loaded
    assert machine.records("orders") == source


def test_cursors_of_a_source_do_not_go_on_before_its_load_is_finished(
    machine: Machine, tmp_path: Path
) -> None:
    """dlt writes the state of two sources with the load of the first one; then the machine is
    lost.
    """

    def source(name: str, rows: list[Any]) -> Any:
        by_id = loads.dlt.sources.incremental("id", initial_value=-1)

        @loads.dlt.source(name=name)
        def made() -> Any:
            @loads.dlt.resource(name=f"from_{name}")
            def table(at: Any = by_id) -> Iterator[Any]:
                yield rows

            return table

        return made()

    def sources(count: int) -> list[Any]:
        return [source(name, [{"id": i} for i in range(count)]) for name in ("a", "b")]

    machine.run(sources(1))
    store = FaultyStore(
        machine.lake.store, [Fault("*", 1, "crash-before", below="streams/raw-from_b")]
    )
    with pytest.raises((Crash, loads.dlt_errors.PipelineStepFailed)):
        machine.run(sources(2), lake=Lake(store, machine.lake.id))
    recorded = machine.records("_dlt_loads")
    assert recorded[-1]["state"] is not None
    another = Machine(machine.lake, tmp_path / "another")
    another.run(sources(3))
    for name in ("a", "b"):
        assert {row["id"] for row in machine.records(f"from_{name}")} == {0, 1, 2}


def test_a_pipeline_that_finds_another_lake_loads_all_again(
    machine: Machine, tmp_path: Path
) -> None:
    by_id = loads.dlt.sources.incremental("id", initial_value=-1)

    @loads.dlt.resource(name="orders")
    def orders(at: Any = by_id) -> Iterator[Any]:
        yield [{"id": 1}, {"id": 2}]

    machine.run(orders())
    machine.lake = open_lake(tmp_path / "another lake")
    machine.run(orders())
    assert machine.records("orders") == [{"id": 1}, {"id": 2}]


def test_two_pipelines_load_into_one_stream_at_once(machine: Machine, tmp_path: Path) -> None:
    """In threads, each in a process of its own elsewhere: dlt keeps one active pipeline a thread."""
    failures: list[BaseException] = []

    def load(name: str) -> None:
        try:
            mine = Machine(machine.lake, tmp_path / name)
            for i in range(4):
                mine.run(resource([{"id": i, f"only_{name}": i, "by": name}]), name)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=load, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    rows = machine.records("orders")
    assert sorted((row["by"], row["id"]) for row in rows) == [
        (n, i) for n in "ab" for i in range(4)
    ]
    assert all(row[f"only_{row['by']}"] == row["id"] for row in rows)


def test_tables_whose_streams_would_be_the_same_are_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCHEMA__NAMING", "direct")
    error = refused(
        machine, [resource([{"id": 1}], "a-b"), resource([{"id": 1}], "a b")], ConfigurationError
    )
    assert error.stream == "lake.raw-a_b"


def test_a_prefix_must_be_a_name_and_leave_room(machine: Machine) -> None:
    for prefix in ("a/b", "", "x" * 70):
        machine.prefix = prefix
        with pytest.raises(ConfigurationError):
            machine.pipeline()


# -- sources


class Api(BaseHTTPRequestHandler):
    """A REST API with pages of nested records, filtered by time."""

    orders: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        asked = parse_qs(urlparse(self.path).query)
        since = asked.get("since", [""])[0]
        page = int(asked.get("page", ["1"])[0])
        found = [order for order in self.orders if order["updated_at"] >= since]
        body = {"items": found[(page - 1) * 2 : page * 2], "pages": -(-len(found) // 2) or 1}
        reply = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def api() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Api)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def order(number: int, second: int) -> dict[str, Any]:
    return {
        "id": number,
        "updated_at": f"2024-01-01T00:00:{second:02}Z",
        "customer": {"name": f"c{number}", "address": {"city": "Ulm"}},
        "lines": [{"sku": f"s{n}", "count": n} for n in range(number % 3 + 1)],
    }


def test_a_rest_api_is_followed(machine: Machine, world: World, api: str) -> None:
    from dlt.sources.rest_api import rest_api_source

    def source() -> Any:
        return rest_api_source(
            {
                "client": {
                    "base_url": api,
                    "paginator": {"type": "page_number", "base_page": 1, "total_path": "pages"},
                },
                "resources": [
                    {
                        "name": "orders",
                        "primary_key": "id",
                        "write_disposition": "merge",
                        "endpoint": {
                            "path": "orders",
                            "data_selector": "items",
                            "params": {"since": "{incremental.start_value}"},
                            "incremental": {
                                "cursor_path": "updated_at",
                                "initial_value": "2024-01-01T00:00:00Z",
                            },
                        },
                    }
                ],
            }
        )

    spec = unbounded_dataset("orders", input="lake.raw-orders", key="id", partitions=1)
    Api.orders = [order(i, i) for i in range(1, 6)]
    for change in (order(3, 10), order(6, 11), order(1, 12)):
        machine.run(source())
        world.advance(spec)
        entries = dict(world.view(spec).items())
        assert {key: (entry["customer"], entry["lines"]) for key, entry in entries.items()} == {
            each["id"]: (each["customer"], each["lines"]) for each in Api.orders
        }
        Api.orders = [each for each in Api.orders if each["id"] != change["id"]] + [change]


def test_tables_of_a_sql_database_are_loaded(machine: Machine, tmp_path: Path) -> None:
    from dlt.sources.sql_database import sql_database

    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as database:
        database.execute(
            "create table customers (id integer primary key, name text, since date,"
            " credit decimal(10,2), at datetime, photo blob, ratio real)"
        )
        database.execute("create table planes (tail varchar(10) primary key, seats integer)")
        database.executemany(
            "insert into customers values (?, ?, ?, ?, ?, ?, ?)",
            [
                (1, "Ada", "2020-01-01", "10.50", "2024-01-01 10:00:00.000000", b"\x00\x01", 0.5),
                (2, None, None, None, None, None, None),
            ],
        )
        database.executemany("insert into planes values (?, ?)", [("N1", 100), ("N2", 120)])
    for backend in ("sqlalchemy", "pyarrow"):
        machine.prefix = backend
        source = sql_database(f"sqlite:///{path}", backend=backend)
        machine.run(source, name=backend, write_disposition="replace")
        assert machine.records("customers") == [
            {
                "id": 1,
                "name": "Ada",
                "since": dt.date(2020, 1, 1),
                "credit": Decimal("10.50"),
                "at": dt.datetime(2024, 1, 1, 10, tzinfo=UTC),
                "photo": b"\x00\x01",
                "ratio": 0.5,
            },
            dict.fromkeys(("name", "since", "credit", "at", "photo", "ratio")) | {"id": 2},
        ]
        assert machine.types("customers")["credit"] == "decimal(10,2)"
        assert machine.records("planes") == [
            {"tail": "N1", "seats": 100},
            {"tail": "N2", "seats": 120},
        ]
        assert machine.streams.info(f"{backend}-planes").key == ("tail",)


def test_spreadsheets_are_loaded_as_frames(machine: Machine, world: World, tmp_path: Path) -> None:
    path = tmp_path / "planes.csv"
    spec = bounded_dataset("planes", input="lake.raw-planes", key="tailnum", partitions=1)
    for rows in ([("N1", "100", "1.5"), ("N2", "", "2")], [("N1", "90", "")]):
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("Tailnum", "Seats", "Ton miles"), *rows])
        frame = pd.read_csv(path, dtype={"Seats": "Int64"})
        machine.run(resource(frame, "planes", write_disposition="replace", primary_key="Tailnum"))
        world.advance(spec)
        entries = world.view(spec).items()
        assert {(key, entry["seats"], entry["ton_miles"]) for key, entry in entries} == {
            (tail, int(seats) if seats else None, float(ton) if ton else None)
            for tail, seats, ton in rows
        }


@pytest.mark.lengthy
def test_a_load_that_was_paused_does_not_bring_back_an_older_state(tmp_path: Path) -> None:
    known = [{"id": 1}]

    since = loads.dlt.sources.incremental[int]("id")

    @loads.dlt.resource(name="events")
    def events(newest: Any = since) -> Any:
        yield from [row for row in known if newest.last_value in (None, *range(row["id"]))]

    lake = open_lake(tmp_path / "lake")
    paused = Machine(lake, tmp_path / "paused")
    paused.run([events()])
    known.append({"id": 2})
    pipeline = paused.pipeline()
    pipeline.extract([events()])
    pipeline.normalize()
    known.append({"id": 3})
    other = Machine(lake, tmp_path / "other")
    other.run([events()])
    pipeline.load()
    assert [row["id"] for row in other.records("events")] == [1, 2, 3, 2]
    known.append({"id": 4})
    Machine(lake, tmp_path / "third").run([events()])
    assert [row["id"] for row in other.records("events")] == [1, 2, 3, 2, 4]

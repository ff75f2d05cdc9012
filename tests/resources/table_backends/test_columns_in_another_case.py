"""Records whose columns have another case than the declared ones: refused, and never read as
null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from dagster_adjunct import IN_PROCESS, Application, LakeStreams, Schema, open_lake, run_application
from dagster_adjunct.errors import AdjunctError, SchemaMismatchError
from dagster_adjunct.key_value import (
    BlockingKeyValueTable,
    JsonSerializer,
    KeyValueTableManager,
    TextSerializer,
)
from dagster_adjunct.key_value_rows import KeyValueRows
from dagster_adjunct.tables import (
    BlockingTable,
    DynamoDbTable,
    HttpTable,
    RemoteTable,
    TableReadFunction,
)
from tests.servers.dynamodb import DynamoDbServer

Look = Callable[[Any, Any], list[dict[str, Any]]]


@pytest.fixture
def looked_up(tmp_path: Path) -> Look:
    """Join a record of the key `a` with a remote table; return what arrives."""

    def look(function: Any, select: Any) -> list[dict[str, Any]]:
        lake = open_lake(str(tmp_path / "lake"))
        streams = LakeStreams(lake)
        streams.create("in", schema=Schema.of(k="string"), key=["k"], partitions=1)
        streams.append("in", [{"k": "a"}], producer="p", sequence=1)
        app = Application("looking", engine="auto")
        table = RemoteTable("places", key="k", read_function=function)
        app.input_stream("lake.in").join(
            app.table(table), on="k", how="left", select=select
        ).send_to(app.output_stream("lake.out", partitions=1, key="k"))
        run_application(app, lake=lake, systems={"lake": streams}, spark=IN_PROCESS, run="r")
        rows: list[dict[str, Any]] = streams.read_arrow(streams.all_ranges("out")).to_pylist()
        return rows

    return look


class Answering(TableReadFunction[str, dict[str, Any]]):
    """A user's own function, which always returns one record."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = dict(record)

    async def get(self, key: str, *args: object) -> dict[str, Any]:
        return self._record


def refused(call: Callable[[], object], column: str, found: str) -> None:
    with pytest.raises(AdjunctError) as reported:
        call()
    error: BaseException | None = reported.value
    while error is not None and not isinstance(error, SchemaMismatchError):
        error = error.__cause__
    assert error is not None, reported.value
    assert error.column == column
    assert repr(found) in str(reported.value)


def test_a_users_function_that_names_a_column_in_another_case_is_refused(looked_up: Look) -> None:
    select = {"City": "string", "size": "int"}
    refused(
        lambda: looked_up(Answering({"k": "a", "CITY": "Rome", "size": 1}), select), "City", "CITY"
    )


def test_columns_that_are_declared_in_two_cases_and_missing_ones_are_null(looked_up: Look) -> None:
    select = {"city": "string", "size": "int"}
    (row,) = looked_up(Answering({"k": "a", "town": "Rome"}), select)
    assert (row["city"], row["size"]) == (None, None)


@pytest.fixture
def service() -> Iterator[str]:
    """A service whose records have the column `CITY`."""

    class Service(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"k": "a", "CITY": "Rome"}).encode())

        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Service)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.lengthy
def test_a_service_that_names_a_column_in_another_case_is_refused(
    looked_up: Look, service: str
) -> None:
    table = HttpTable(service, "/{k}", "k")
    refused(lambda: looked_up(table, {"city": "string"}), "city", "CITY")


def test_an_item_of_dynamodb_with_a_column_in_another_case_is_refused(
    dynamodb: DynamoDbServer,
) -> None:
    session: Any = dynamodb.session()
    name = "columns-in-another-case"
    loose = DynamoDbTable(name, {"id": "string"}, create=True, **session)
    with BlockingTable(
        RemoteTable("t", key="id", read_function=loose, write_function=loose)
    ) as table:
        table.put("a", {"CITY": "Rome"})
        table.put("b", {"town": "Rome"})
    exact = DynamoDbTable(name, "id", columns={"id": "string", "city": "string"}, **session)
    with BlockingTable(RemoteTable("t", key="id", read_function=exact)) as table:
        refused(lambda: table.get("a"), "city", "CITY")
        assert table.get("b") == {"id": "b", "city": None}
    both = {"id": "string", "city": "string", "CITY": "string"}
    exact = DynamoDbTable(name, "id", columns=both, **session)
    with BlockingTable(RemoteTable("t", key="id", read_function=exact)) as table:
        assert table.get("a") == {"id": "a", "city": None, "CITY": "Rome"}


def test_a_row_in_a_key_value_table_with_a_column_in_another_case_is_refused(
    tmp_path: Path,
) -> None:
    lake = open_lake(str(tmp_path / "lake"))
    rows = KeyValueRows(lake, "s", "t", "k", columns={"k": "string", "city": "string"}, create=True)
    with BlockingTable(RemoteTable("t", key="k", read_function=rows, write_function=rows)) as table:
        table.put("b", {"city": "Oslo"})
        written = KeyValueTableManager(lake).open(
            "s", "t", key=TextSerializer(), value=JsonSerializer()
        )
        with BlockingKeyValueTable(written) as entries:
            entries.put("a", {"CITY": "Rome"})
        refused(lambda: table.get("a"), "city", "CITY")
        assert table.get("b") == {"k": "b", "city": "Oslo"}

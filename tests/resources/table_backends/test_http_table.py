"""`HttpTable` against a real service on loopback."""

from __future__ import annotations

import asyncio
import json
import pickle
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    SchemaMismatchError,
    TableError,
    TableUnavailableError,
)
from dagster_adjunct.resources.table_backends.columns import (
    describe_function,
    function_from_description,
)
from dagster_adjunct.resources.table_backends.http import HttpExtra, HttpTable, parse_retry_after
from dagster_adjunct.resources.tables.batching import BatchProvider
from dagster_adjunct.resources.tables.functions import is_record_rejected
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Operation,
    OperationKind,
    RowEntries,
    State,
)
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.servers.http_records import running_service

GET, PUT, ABSENT = OperationKind.GET, OperationKind.PUT, OperationKind.PUT_IF_ABSENT
DELETE, UPDATE = OperationKind.DELETE, OperationKind.UPDATE
NOW = datetime(2013, 7, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def _running():
    with running_service() as service:
        yield service


@pytest.fixture
def service(_running, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    _running.records.clear()
    _running.seen.clear()
    _running.bend, _running.delay, _running.most_at_once = lambda method, path: None, 0.0, 0
    return _running


def new_table(service, path="/planes/{tail}", key="tail", **settings):
    return HttpTable(service.url, path, key, **settings)


def send(table, *operations):
    async def all_of_them():
        await table.open()
        outcomes = [await table.send(operation) for operation in operations]
        await table.close()
        return outcomes

    return asyncio.run(all_of_them())


def states(outcomes):
    return {place: problem.state for place, problem in outcomes.problems.items()}


@pytest.mark.lengthy
def test_records_are_resources_that_are_put_got_changed_and_deleted(service):
    table = new_table(service)
    put, updated, got, deleted, again, gone = send(
        table,
        Operation(PUT, RowEntries(["a", "b", "a"], [{"n": 1}, {"n": 2}, {"n": 3}])),
        Operation(UPDATE, RowEntries(["a", "x", "a"], [{"s": "é"}, {"s": "y"}, {"t": None}])),
        Operation(GET, RowEntries(["a", "b", "x"])),
        Operation(DELETE, RowEntries(["a"])),
        Operation(DELETE, RowEntries(["a"])),
        Operation(GET, RowEntries(["a"])),
    )
    assert put.problems == deleted.problems == again.problems == {}
    assert states(updated) == {1: State.MISSING}
    assert got.records == [{"n": 3, "s": "é", "t": None}, {"n": 2}, None]
    assert gone.records == [None]
    assert service.records == {"/planes/b": {"n": 2}}


def test_changes_set_columns_and_any_other_change_is_rejected(service):
    table = new_table(service)
    set_only, added = Changes(set={"s": "x", "t": None}), Changes(set={"s": "y"}, add={"n": 1})
    _, updated, got = send(
        table,
        Operation(PUT, RowEntries(["a"], [{"n": 1}])),
        Operation(UPDATE, RowEntries(["a", "a"], [set_only, added])),
        Operation(GET, RowEntries(["a"])),
    )
    assert isinstance(updated.problems[1].error, SchemaMismatchError)
    assert got.records == [{"n": 1, "s": "x", "t": None}]


def test_compact_batches_merge_changes_that_only_set_columns(service):
    function = new_table(service)
    table = RemoteTable(
        "planes", key="tail", write_function=function, batches=BatchProvider(compact=True)
    )
    with BlockingTable(table) as planes:
        planes.put_all([("a", {"n": 1}), ("b", {"n": 2})])
        typed = [("a", Changes(set={"s": "x"})), ("a", Changes(set={"t": "y"}))]
        plain = [("b", {"s": "z"}), ("b", {"t": "w"})]
        planes.update_all([*typed, *plain])
    assert service.records == {
        "/planes/a": {"n": 1, "s": "x", "t": "y"},
        "/planes/b": {"n": 2, "s": "z", "t": "w"},
    }


@pytest.mark.parametrize(
    "key", ["a/b", "a b", "é✈", "?q=1", "#f", "%2F", "a%2Fb", "...", "{tail}", "a\\b", "a+b", ";"]
)
def test_a_key_is_one_segment_of_the_path_whatever_is_in_it(service, key):
    table = new_table(service)
    outcomes = send(
        table,
        Operation(PUT, RowEntries([key], [{"k": key}])),
        Operation(GET, RowEntries([key, "other"])),
    )
    assert outcomes[1].records == [{"k": key}, None]
    assert len(service.records) == 1
    assert next(iter(service.records)).count("/") == 2


@pytest.mark.parametrize("key", ["", ".", "..", None, 1.5, ("a", "b"), b"x"])
def test_a_key_that_would_name_another_resource_is_refused_alone(service, key):
    service.records["/planes/"] = {}
    outcomes = send(new_table(service), Operation(DELETE, RowEntries([key, "fine"])))[0]
    assert states(outcomes) == {0: State.REFUSED}
    assert isinstance(outcomes.problems[0].error, SchemaMismatchError)
    assert [path for _, path, _ in service.seen] == ["/planes/fine"]


def test_keys_of_several_columns_come_in_the_order_that_the_request_names(service):
    table = new_table(service, "/{a}/of-{b}", ["a", "b"])
    send(
        table,
        Operation(PUT, RowEntries([(1, "x/y")], [{}])),
        Operation(PUT, RowEntries([("z", 2)], [{}]), key=("b", "a")),
    )
    assert set(service.records) == {"/1/of-x%2Fy", "/2/of-z"}
    with pytest.raises(ConfigurationError) as caught:
        send(table, Operation(PUT, RowEntries([("z", 2)], [{}]), key=("b", "c")))
    assert caught.value.argument == "key"


def test_a_record_is_put_only_where_there_is_none(service):
    table = new_table(service, puts_if_absent=True)
    outcomes = send(
        table, Operation(ABSENT, RowEntries(["a", "a", "b"], [{"n": 1}, {"n": 2}, {"n": 3}]))
    )[0]
    assert states(outcomes) == {1: State.SKIPPED}
    assert service.records == {"/planes/a": {"n": 1}, "/planes/b": {"n": 3}}
    assert table.capabilities.puts_if_absent
    assert not new_table(service).capabilities.puts_if_absent


def test_calls_hand_query_parameters_and_headers_through(service):
    table = new_table(service, headers={"X-A": "declared", "X-B": "b"})
    extra = HttpExtra(params={"unit": "km", "q": "a&b"}, headers={"X-A": "given"})
    send(table, Operation(PUT, RowEntries(["k"], [{}]), (extra, HttpExtra(params={"v": "1"}))))
    method, path, headers = service.seen[0]
    assert (method, path) == ("PUT", "/planes/k?q=a%26b&unit=km&v=1")
    assert (headers["x-a"], headers["x-b"], headers["content-type"]) == (
        "given",
        "b",
        "application/json",
    )
    assert hash(extra) == hash(
        HttpExtra(params={"q": "a&b", "unit": "km"}, headers={"X-A": "given"})
    )
    wrong = send(table, Operation(GET, RowEntries(["k"]), ("km",)))[0]
    assert states(wrong) == {0: State.REFUSED}
    assert "expected an HttpExtra" in str(wrong.problems[0].error)


IN_1000_SECONDS = "in 1000 seconds, as a date"


@pytest.mark.parametrize(
    ("status", "headers", "of_write", "of_read", "wait"),
    [
        (429, {"Retry-After": "7"}, State.FAILED, State.FAILED, 7),
        (429, {}, State.FAILED, State.FAILED, None),
        (503, {"Retry-After": IN_1000_SECONDS}, State.FAILED, State.FAILED, 1000),
        (503, {}, State.UNKNOWN, State.FAILED, None),
        (503, {"Retry-After": "soon"}, State.UNKNOWN, State.FAILED, None),
        (500, {"Retry-After": "3"}, State.UNKNOWN, State.FAILED, 3),
        (504, {}, State.UNKNOWN, State.FAILED, None),
        (0, {}, State.UNKNOWN, State.FAILED, None),
        (400, {}, State.REFUSED, State.REFUSED, None),
        (403, {}, State.REFUSED, State.REFUSED, None),
        (405, {}, State.REFUSED, State.REFUSED, None),
        (409, {}, State.REFUSED, State.REFUSED, None),
        (301, {"Location": "/elsewhere"}, State.REFUSED, State.REFUSED, None),
    ],
)
def test_every_answer_says_whether_it_had_an_effect_and_may_pass(
    service, status, headers, of_write, of_read, wait
):
    if IN_1000_SECONDS in headers.values():
        headers = {
            "Retry-After": format_datetime(datetime.now(UTC) + timedelta(seconds=1000), usegmt=True)
        }
    service.bend = lambda method, path: (
        (status, headers, b"because   of\nthis") if path.endswith("/bad") else None
    )
    put, updated, got = send(
        new_table(service),
        Operation(PUT, RowEntries(["good", "bad"], [{}, {}])),
        Operation(UPDATE, RowEntries(["good", "bad"], [{}, {}])),
        Operation(GET, RowEntries(["good", "bad"])),
    )
    assert (states(put), states(updated), states(got)) == (
        {1: of_write},
        {1: of_write},
        {1: of_read},
    )
    error = put.problems[1].error
    assert isinstance(error, TableError if of_write is State.REFUSED else TableUnavailableError)
    assert is_record_rejected(put.problems[1]) == (status in (400, 409)), (
        "no letter for what concerns all records"
    )
    if status:
        assert f"{status}: because of this" in str(error)
    waited = put.problems[1].retry_after
    assert waited is None if wait is None else wait - 60 <= waited <= wait


def test_waits_are_read_as_seconds_and_as_dates():
    assert parse_retry_after("120", NOW) == 120.0
    assert parse_retry_after(format_datetime(NOW + timedelta(seconds=30), usegmt=True), NOW) == 30.0
    assert parse_retry_after("Monday, 01-Jul-13 00:00:30 GMT", NOW) == 30.0
    assert parse_retry_after(format_datetime(NOW - timedelta(days=1), usegmt=True), NOW) == 0.0
    assert [parse_retry_after(text, NOW) for text in (None, "", "-1", "1.5", "now", "²")] == [
        None
    ] * 6


@pytest.mark.lengthy
def test_a_request_has_its_time_and_its_turn_is_no_part_of_it(service):
    service.delay = 0.1
    table = new_table(service, connections=2, timeout=1.5)
    keys = [f"k{n}" for n in range(36)]  # the last ones wait for 1.7 s
    assert send(table, Operation(PUT, RowEntries(keys, [{}] * 36)))[0].problems == {}
    assert service.most_at_once == 2
    service.delay = 3.0
    put, got = send(
        table, Operation(PUT, RowEntries(["a"], [{}])), Operation(GET, RowEntries(["a"]))
    )
    assert (states(put), states(got)) == ({0: State.UNKNOWN}, {0: State.FAILED})


def test_a_service_that_is_not_there_failed_and_nothing_was_sent():
    with running_service() as gone:
        table = new_table(gone)
    outcomes = send(table, Operation(PUT, RowEntries(["a"], [{}])))[0]
    assert states(outcomes) == {0: State.FAILED}
    assert "can't be reached" in str(outcomes.problems[0].error)


def test_what_json_has_not_and_answers_that_are_no_records_are_refused(service):
    service.bend = lambda method, path: {
        "/planes/text": (200, {}, b"hello"),
        "/planes/list": (200, {}, b"[]"),
    }.get(path)
    put, got = send(
        new_table(service),
        Operation(
            PUT, RowEntries(["a", "b", "c"], [{"at": [{"x": NOW}]}, {"n": float("nan")}, {"n": 1}])
        ),
        Operation(GET, RowEntries(["text", "list", "c"])),
    )
    assert states(put) == states(got) == {0: State.REFUSED, 1: State.REFUSED}
    assert "at[0].x: it is a datetime" in str(put.problems[0].error)
    assert got.records[2] == {"n": 1}


class Bulk(HttpTable):
    """A service with one request for many records."""

    async def get_all(self, keys, *args):
        answer = await self.request("POST", "/many", args, body=json.dumps(list(keys)).encode())
        return {
            key: record for key, record in self.decode(answer.content).items() if record is not None
        }


def test_a_service_that_takes_many_at_once_gets_them_in_one_request(service):
    service.bend = lambda method, path: (
        (200, {}, b'{"a": {"n": 1}, "b": null}') if path == "/many" else None
    )
    table = Bulk(service.url, "/planes/{tail}", "tail")
    put, got = send(
        table, Operation(PUT, RowEntries(["a"], [{}])), Operation(GET, RowEntries(["a", "b", "a"]))
    )
    assert put.problems == {}
    assert got.records == [{"n": 1}, None, {"n": 1}]
    assert [method for method, _, _ in service.seen] == ["PUT", "POST"]


def test_secrets_come_from_the_environment_and_show_nowhere(service, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "Bearer correct-horse")
    table = new_table(service, secret_headers={"Authorization": "API_TOKEN"})
    service.bend = lambda method, path: (403, {}, b"no rights for Bearer correct-horse")
    problem = send(table, Operation(PUT, RowEntries(["a"], [{}])))[0].problems[0]
    assert service.seen[0][2]["authorization"] == "Bearer correct-horse"
    assert "403: no rights for ***" in str(problem.error)
    for text in (
        repr(problem),
        repr(table),
        str(describe_function(table)),
        pickle.dumps(table).decode("latin1"),
    ):
        assert "correct-horse" not in text
    assert (
        describe_function(function_from_description(describe_function(table)))
        == describe_function(pickle.loads(pickle.dumps(table)))
        == describe_function(table)
    )
    monkeypatch.delenv("API_TOKEN")
    with pytest.raises(ConfigurationError) as caught:
        asyncio.run(table.open())
    assert caught.value.setting == "API_TOKEN"


@pytest.mark.parametrize("header", ["Authorization", "cookie", "X-API-Key"])
def test_a_header_that_holds_a_secret_is_named_by_its_variable_only(header):
    with pytest.raises(ConfigurationError) as error:
        HttpTable("http://h", "/{k}", "k", headers={header: "Bearer hush"})
    assert error.value.argument == "headers"
    assert "hush" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("ftp://h", "/{k}", "k"), "invalid base_url"),
        (("http://h:port", "/{k}", "k"), "invalid base_url"),
        (("http://u:hush@h", "/{k}", "k"), "credentials in its base_url"),
        (("http://h", "/{k}", ["k", "l"]), "its path names k, and its key is k, l"),
        (("http://h", "/x", "k"), "its path names no column"),
        (("http://h", "{k}", "k"), "Use a path like"),
    ],
)
def test_declarations_that_can_not_work_say_so_without_the_secret(given, words):
    with pytest.raises(ConfigurationError, match=words) as error:
        HttpTable(*given)
    assert "hush" not in str(error.value)


def test_without_the_client_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "httpx", None)
    with pytest.raises(ConfigurationError, match=r"dagster-adjunct\[http\]"):
        asyncio.run(HttpTable("http://h", "/{k}", "k").open())


@pytest.mark.parametrize("status", [206, 207])
@pytest.mark.parametrize("kind", [GET, PUT, UPDATE, DELETE])
def test_an_answer_for_a_part_of_what_was_asked_is_no_success(service, status, kind):
    service.bend = lambda method, path: (status, {}, b'{"n": 1}') if path.endswith("b") else None
    service.records |= {f"/planes/{key}": {"n": 0} for key in "abc"}
    values = None if kind in (GET, DELETE) else [{"n": 2}] * 3
    (outcomes,) = send(new_table(service), Operation(kind, RowEntries(["a", "b", "c"], values)))
    assert states(outcomes) == {1: State.REFUSED}
    assert is_record_rejected(outcomes.problems[1])

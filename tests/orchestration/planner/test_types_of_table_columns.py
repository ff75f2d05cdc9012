"""Which of Spark's types a table's columns take: what no column takes is found before a batch, not inside one."""

from __future__ import annotations

import pytest

from dagster_adjunct.orchestration.operators.sends.refused_sends import CheckedSink, check_columns
from dagster_adjunct.orchestration.operators.spec.table_sends import TableSend
from dagster_adjunct.resources.backends import SqliteTable
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.tables import RemoteTable

COLUMNS = {"text": "string", "at": "timestamp", "j": "json", "texts": "array<string>", "n": "bigint", "key": "string"}
NEVER = [
    "map<string,int>",
    "interval day to second",
    "interval year to month",
    "interval",
    "timestamp_ntz",
    "time(6)",
    "variant",
    "array<map<string,int>>",
]


def told(column: str, sent: str | None, declared: str | None = None) -> str:
    """What is said where `sent` goes into a column of the table; "" where it may."""
    columns = COLUMNS | ({} if declared is None else {column: declared})
    store = SqliteTable("t.sqlite", "t", "key", columns=COLUMNS)
    sink = CheckedSink(RemoteTable("t", key="key", write_function=store), TableSend("t"), None)
    try:
        check_columns("send-to-2-t", sink, {"key": "string"} | {column: sent}, columns)
    except PlanningError as error:
        return f"{error.problem} {error.next_step}"
    return ""


@pytest.mark.parametrize("sent", NEVER)
@pytest.mark.parametrize("column", ["text", "at", "j", "texts", "n", "key"])
def test_types_that_no_column_takes_are_refused(column: str, sent: str) -> None:
    assert f"table t has the column '{column}' as {COLUMNS[column]}, and {sent} is sent" in told(column, sent)


@pytest.mark.parametrize("sent", ["struct<a:int>", "array<string>", "array<struct<a:int>>", "array<array<string>>"])
def test_what_has_parts_is_no_plain_value_and_may_be_json(sent: str) -> None:
    assert f"and {sent} is sent. Make a text of it: to_json(text)." in told("text", sent)
    assert told("j", sent) == ""


@pytest.mark.parametrize(
    "sent", ["struct<map:int,time:string,interval:int,date:int>", "string", "double", "array<int>"]
)
def test_json_takes_what_it_can_hold(sent: str) -> None:
    assert told("j", sent) == ""
    for part in ("timestamp_ntz", "map<string,int>", "interval day", "date", "timestamp", "decimal(9,2)", "binary"):
        assert "is sent" in told("j", f"struct<a:int,b:{part}>")
        assert "is sent" in told("j", part)


def test_a_map_is_told_how_it_becomes_an_object() -> None:
    assert "named_struct" in told("j", "map<string,int>")


@pytest.mark.parametrize("sent", [None, "void", "string collate UTF8_LCASE", "varchar(10)"])
def test_what_is_not_known_and_what_is_null_may_be_any(sent: str | None) -> None:
    assert told("text", sent) == ""


@pytest.mark.parametrize("sent", ["array<void>", "array<string>", "array<varchar(3)>", "void"])
def test_lists_take_lists_of_their_elements(sent: str) -> None:
    assert told("texts", sent) == ""


@pytest.mark.parametrize("sent", ["array<int>", "array<array<string>>", "array<binary>", "array<timestamp_ntz>"])
def test_lists_of_other_elements_are_refused(sent: str) -> None:
    assert f"as array<string>, and {sent} is sent" in told("texts", sent)


def test_a_type_that_only_the_store_knows_takes_what_comes() -> None:
    assert told("text", "map<string,int>", declared="hstore") == ""

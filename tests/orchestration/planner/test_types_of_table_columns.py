"""Which of Spark's types a table's columns take: what no column takes is found before a batch,
not inside one.
"""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.orchestration.operators.table_sinks import TableSink, check_sink_columns
from dagster_adjunct.orchestration.operators.updates import TableSend, Update
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.operation import UpdateContract
from dagster_adjunct.resources.tables.table import RemoteTable

COLUMNS = {
    "text": "string",
    "at": "timestamp",
    "j": "json",
    "texts": "array<string>",
    "n": "bigint",
    "key": "string",
}
NEVER = [
    "map<int,int>",
    "interval day to second",
    "interval year to month",
    "interval",
    "timestamp_ntz",
    "time(6)",
    "variant",
    "array<map<int,int>>",
]


def reported(column: str, sent: str | None, declared: str | None = None) -> str:
    """What is said where `sent` goes into a column of the table; "" where it may."""
    columns = COLUMNS | ({} if declared is None else {column: declared})
    store = SqliteTable("t.sqlite", "t", "key", columns=COLUMNS)
    sink = TableSink(RemoteTable("t", key="key", write_function=store), TableSend("t"))
    try:
        check_sink_columns("send-to-2-t", sink, {"key": "string"} | {column: sent}, columns)
    except PlanningError as error:
        return f"{error.problem} {error.next_step}"
    return ""


@pytest.mark.parametrize("sent", NEVER)
@pytest.mark.parametrize("column", ["text", "at", "j", "texts", "n", "key"])
def test_types_that_no_column_takes_are_refused(column: str, sent: str) -> None:
    assert (
        f"table t has the column '{column}' as {COLUMNS[column]}, and {sent} is sent"
        in reported(column, sent)
    )


@pytest.mark.parametrize(
    "sent", ["struct<a:int>", "array<string>", "array<struct<a:int>>", "array<array<string>>"]
)
def test_what_has_parts_is_no_plain_value_and_may_be_json(sent: str) -> None:
    assert f"and {sent} is sent. Convert it to text: to_json(text)." in reported("text", sent)
    assert reported("j", sent) == ""


@pytest.mark.parametrize(
    "sent",
    [
        "struct<map:int,time:string,interval:int,date:int>",
        "string",
        "double",
        "array<int>",
        "map<string,int>",
        "array<struct<a:map<string,array<double>>>>",
        "map<…>",
    ],
)
def test_json_takes_what_it_can_hold(sent: str) -> None:
    assert reported("j", sent) == ""
    for part in (
        "timestamp_ntz",
        "map<int,int>",
        "interval day",
        "date",
        "timestamp",
        "decimal(9,2)",
        "binary",
    ):
        assert "is sent" in reported("j", f"struct<a:int,b:{part}>")
        assert "is sent" in reported("j", part)


@pytest.mark.parametrize(
    ("sent", "step"),
    [
        ("map<int,int>", "Make its keys texts: transform_keys(j, (k, v) -> cast(k as string))."),
        ("date", "Cast it: cast(j as string)."),
        (
            "array<date>",
            "Cast members that are not text, numbers or booleans, for example to string.",
        ),
    ],
)
def test_what_json_does_not_hold_is_reported_how_it_becomes_something_else(
    sent: str, step: str
) -> None:
    assert reported("j", sent).endswith(f". {step}")


@pytest.mark.parametrize(
    ("sent", "path"),
    [
        ("struct<a:int,B:array<struct<`c d`:decimal(9,2)>>>", "j.B[].`c d` is decimal(9,2)"),
        ("map<string,map<string,binary>>", "j[*][*] is binary"),
    ],
)
def test_the_part_that_json_does_not_hold_is_named(sent: str, path: str) -> None:
    assert f"; {path}, which JSON does not have." in reported("j", sent)


def reported_of(update: Update, store: Any = None, **known: str) -> str:
    """What is said of an update by a stream of a text and a number, with what Spark knows of the
    update's columns.
    """
    types = {"key": "string", "word": "string", "n": "bigint"} | {
        f"update.{name}": kind for name, kind in known.items()
    }
    function = store or SqliteTable("t.sqlite", "t", "key", columns=COLUMNS)
    send = TableSend("t", UpdateContract.UPDATE_ONLY, update=update)
    sink = TableSink(RemoteTable("t", key="key", write_function=function), send)
    try:
        check_sink_columns("update-2-t", sink, types, COLUMNS)
    except PlanningError as error:
        return f"{error.problem} {error.next_step}"
    return ""


def test_members_are_added_to_json_and_nothing_else_is() -> None:
    assert reported_of(Update(add=(("j", "named_struct('n', n)"),))) == ""
    assert reported_of(Update(add=(("j", "null"),))) == ""
    assert reported_of(Update(add=(("j", "map(word, n)"),))) == ""
    reported_of_number = reported_of(Update(add=(("j", "n"),)))
    assert (
        "'j' as json, and bigint is added to it. Add members to it: named_struct('…', n)."
        in reported_of_number
    )


@pytest.mark.parametrize(
    ("column", "kind"), [("j", "struct<d:date>"), ("n", "interval day to second")]
)
def test_what_spark_alone_knows_of_what_is_added_is_refused_too(column: str, kind: str) -> None:
    update = Update(add=((column, "told_by_spark"),))
    assert reported_of(update) == ""
    assert f"'{column}' as {COLUMNS[column]}, and {kind} is sent" in reported_of(
        update, **{column: kind}
    )


def test_only_a_store_that_can_has_lists_in_json_appended_to() -> None:
    update = Update(append=(("j", "n"),))
    assert "'j' as json, and an update would append to it. Append to an array." in reported_of(
        update
    )
    assert reported_of(update, DynamoDbTable("t", "key", columns=COLUMNS)) == ""


def test_the_expression_of_an_update_is_what_is_to_be_cast() -> None:
    assert reported_of(Update(set=(("n", "word"),))).endswith(
        "is sent. Cast it: cast(word as bigint)."
    )


@pytest.mark.parametrize("sent", [None, "void", "string collate UTF8_LCASE", "varchar(10)"])
def test_what_is_not_known_and_what_is_null_may_be_any(sent: str | None) -> None:
    assert reported("text", sent) == ""


@pytest.mark.parametrize("sent", ["array<void>", "array<string>", "array<varchar(3)>", "void"])
def test_lists_take_lists_of_their_elements(sent: str) -> None:
    assert reported("texts", sent) == ""


@pytest.mark.parametrize(
    "sent", ["array<int>", "array<array<string>>", "array<binary>", "array<timestamp_ntz>"]
)
def test_lists_of_other_elements_are_refused(sent: str) -> None:
    assert f"as array<string>, and {sent} is sent" in reported("texts", sent)


def test_a_type_that_only_the_store_knows_takes_what_comes() -> None:
    assert reported("text", "map<string,int>", declared="hstore") == ""

"""What the plan finds of nested columns of remote tables, and of updates inside them."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.orchestration.operators.table_sinks import (
    TableSink,
    check_sink_columns,
    find_sink_problems,
)
from dagster_adjunct.orchestration.operators.updates import ChangedColumns, TableSend, Update
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.table_backends.columns import parse_known_column
from dagster_adjunct.resources.table_backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.table_backends.http import HttpTable
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.operation import UpdateContract
from dagster_adjunct.resources.tables.table import RemoteTable

COLUMNS = {
    "id": "string",
    "at": "timestamp",
    "address": "struct<city:string,`zip.code`:int,geo:struct<lat:double>,tags:array<string>>",
    "counts": "map<string,bigint>",
    "lines": "array<struct<price:decimal(10,2)>>",
    "doc": "json",
}
SENT = {
    "id": "string",
    "city": "string",
    "n": "int",
    "x": "double",
    "whole": "struct<city:string,geo:struct<lat:int>>",
    "other": "struct<city:string,geo:struct<lat:string>>",
    "more": "struct<city:string,town:string>",
    "lines": "array<struct<price:string>>",
    "numbers": "map<string,int>",
}


def problem(store: Any = None, **update: Any) -> PlanningError | None:
    """The plan's error for an update with these parts; None if there is none."""
    store = store or SqliteTable("t.sqlite", "t", "id", columns=COLUMNS)
    parts = {
        name: tuple(value.items()) if isinstance(value, dict) else value
        for name, value in update.items()
    }
    send = TableSend("t", UpdateContract.UPDATE_ONLY, update=Update(**parts))
    sink = TableSink(RemoteTable("t", key="id", write_function=store), send, SENT)
    try:
        check_sink("update-1", sink)
    except PlanningError as error:
        return error
    return None


def check_sink(operator: str, sink: TableSink) -> None:
    from dagster_adjunct.orchestration.operators.lookup_join import raise_first_problem

    raise_first_problem(operator, sink.table, find_sink_problems(sink))
    check_sink_columns(operator, sink, SENT, sink.columns)


@pytest.mark.parametrize(
    "update",
    [
        {"set": {"address.city": "city"}},
        {"set": {"address.`zip.code`": "n", "address.geo.lat": "n"}},
        {"add": {"address.geo.lat": "x"}, "remove": ("address.city",)},
        {"set": {"address": "whole"}},
        {"set": {"counts": "numbers"}},
        {"set": {"address": "null", "lines": "array()"}},
    ],
)
def test_values_inside_structs_may_be_set_and_added_to(update) -> None:
    assert problem(**update) is None


@pytest.mark.parametrize(
    ("update", "said"),
    [
        ({"set": {"address.town": "city"}}, "has no field 'town'; it has city"),
        ({"set": {"counts.views": "n"}}, "names a part of counts, which is map<string,bigint>"),
        ({"set": {"doc.views": "n"}}, "names a part of doc, which is json, not a struct"),
        ({"set": {"lines.price": "n"}}, "not a struct"),
        ({"set": {"address.geo": "city"}}, "which an update can't change by itself"),
        ({"set": {"id.x": "n"}}, "not a struct"),
        ({"set": {"addres.city": "city"}}, "has no column 'addres.city'"),
        ({"set": {"address.`zip.code`": "city"}}, "as int, and string is sent"),
        ({"add": {"address.city": "1"}}, "as string, and an update would add to it"),
        ({"append": {"address.tags": "city"}}, "which an update can't change by itself"),
        ({"append": {"address.city": "city"}}, "an update would append to it"),
        ({"set": {"address": "whole"}, "add": {"address.geo.lat": "1"}}, "which overlap"),
        ({"set": {"address.city": "city", "`address`.city": "city"}}, "which overlap"),
        ({"set": {"address": "other"}}, "address.geo.lat is sent as string"),
        ({"set": {"address": "more"}}, "address.town is sent, and address has city"),
        ({"set": {"address": "city"}}, "and string is sent"),
        ({"set": {"lines": "lines"}}, "lines[].price is sent as string"),
        ({"set": {"counts": "whole"}}, "counts is sent as struct"),
    ],
)
def test_what_an_update_can_not_do_inside_a_column_is_found_by_the_plan(update, said) -> None:
    found = problem(**update)
    assert found is not None
    assert said in found.problem
    assert found.next_step


@pytest.mark.parametrize(
    "store",
    [
        HttpTable("http://localhost", "/t/{id}", "id"),
        DynamoDbTable("t", key={"id": "string"}, region="eu-west-1"),
    ],
)
def test_stores_that_change_whole_columns_only_are_rejected_by_name(store) -> None:
    found = problem(store, set={"address.city": "city"})
    assert found is not None
    assert f"{type(store).__name__} can't change 'address.city'" in found.problem


def test_sends_of_a_column_and_of_a_value_inside_it_depend_on_their_order() -> None:
    whole = ChangedColumns(set=frozenset({"address"}))
    inside = ChangedColumns(set=frozenset({"address.city"}))
    summed = ChangedColumns(summed=frozenset({"address.geo.lat"}))
    assert whole.depends_on_order_with(inside)
    assert inside.depends_on_order_with(whole)
    assert whole.depends_on_order_with(summed)
    assert not inside.depends_on_order_with(summed)
    assert not summed.depends_on_order_with(summed)


def test_newest_by_is_a_column_not_a_value_inside_one() -> None:
    table = RemoteTable(
        "t", key="id", write_function=MemoryTable("planned"), newest_by="address.city"
    )
    update = Update(set=(("address.city", "city"),))
    send = TableSend("t", UpdateContract.UPDATE_ONLY, update=update)
    with pytest.raises(PlanningError) as caught:
        check_sink_columns("update-1", TableSink(table, send, SENT), SENT, None)
    assert "a value inside a column" in caught.value.problem


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ("struct<a:int,A:int>", "each name of a struct once"),
        ("map<int,string>", "keys of maps are strings"),
        ("array<struct<a:nosuch>>", "nosuch"),
        ("array<json>", "json"),
        ("struct<a:varchar(10)>", "varchar"),
    ],
)
def test_a_mistake_in_a_nested_type_is_named(declared: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_known_column("c", declared)
    assert said in caught.value.problem

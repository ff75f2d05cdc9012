"""Joins with remote tables in plans: what they bring, what is said of them, and what is refused
without Spark.
"""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.lineage import find_first_outputs, find_outputs
from dagster_adjunct.orchestration.code_location.metadata import output_columns
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, LineageNode, StreamFacts
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.table_backends.memory import MemoryTable
from dagster_adjunct.resources.tables.cache import Cache
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.asked_table import AskedTable
from tests.orchestration.planner.planning import dataset

COLUMNS = {
    "plane": "string",
    "seats": "integer",
    "price": "numeric(10,2)",
    "tags": "text[]",
    "about": "jsonb",
}
FLIGHTS = Schema.of(k="string", plane="string", number="int", share="double")


def table(
    columns: dict[str, str] | None = COLUMNS, name: str = "planes", **more: Any
) -> RemoteTable[Any, Any, Any]:
    key = more.pop("key", "plane")
    return RemoteTable(
        name, key=key, read_function=more.pop("read", AskedTable({}, columns)), **more
    )


def looked_up(planes: RemoteTable[Any, Any, Any], **join: Any) -> Application:
    app = Application("app")
    out = app.output_stream("kafka.out", partitions=4, key="k")  # the lake has no lists
    app.input_stream("lake.flights").join(app.table(planes), **{"on": "plane", **join}).send_to(out)
    return app


def planned(app: Application) -> ExecutionPlan:
    return build_plan(
        app,
        {name: StreamFacts(name, 4, ("k",), SPARK, FLIGHTS) for name in ("lake.flights", "lake.c")},
    )


def refused(app: Application, *parts: str) -> None:
    with pytest.raises(PlanningError) as caught:
        planned(app)
    for part in ("join-2-planes", *parts):
        assert part in str(caught.value)
    assert caught.value.operator == "join-2-planes"
    assert caught.value.next_step


def test_records_stay_where_they_lie_and_get_the_tables_columns() -> None:
    app = looked_up(table())
    operator = planned(app).operator("join-2-planes")
    assert operator.columns == ("k", "plane", "number", "share", "seats", "price", "tags", "about")
    assert (operator.partitions, operator.partitioned_by) == (4, ("k",))
    types = app.operators[1].spec.lookup("join", app.tables["planes"]).answers  # type: ignore[attr-defined]
    assert {answer.name: answer.value.type for answer in types} == {
        "seats": "int",
        "price": "decimal(10,2)",
        "tags": "array<string>",
        "about": "string",
    }
    assert planned(app).exchanges == ()
    assert planned(app).join_groups == ()


def test_a_plan_says_what_is_asked_how_often_and_that_it_is_recorded() -> None:
    execution_plan = planned(
        looked_up(table(cache=Cache()), how="left", select=["seats as places"])
    )
    (call,) = execution_plan.calls
    assert (call.operator, call.kind, call.of, call.recorded) == (
        "join-2-planes",
        "lookup",
        "planes",
        True,
    )
    assert "cache" in call.guarantee
    assert "left lookup in table planes on plane" in execution_plan.render()
    assert "\nCalls\n" in execution_plan.render()
    assert ExecutionPlan.from_json(execution_plan.to_json()) == execution_plan
    assert "not used" not in " ".join(execution_plan.notes)
    (plain,) = planned(looked_up(table())).calls
    assert "cache" not in plain.guarantee


def test_a_lookup_between_joins_with_datasets_keeps_their_proof() -> None:
    app = Application("app")
    flights = app.input_stream("lake.flights").join(
        app.table(table()), on="plane", select=["seats"]
    )
    flights.join(app.table(dataset("c", 4)), on="k", select=["share as c"]).send_to(
        app.output_stream("lake.out", partitions=4, key="k")
    )
    (group,) = planned(app).join_groups
    assert group.join == "join-3-c"


def test_lineage_names_the_table_and_its_columns() -> None:
    app = looked_up(table(), select=["seats as places"], prefix="x_")
    (output,) = find_outputs(app)
    assert output.upstream == (
        LineageNode("stream", "lake.flights"),
        LineageNode("table", "planes"),
    )
    assert output_columns(app, planned(app))[output.node]["places"] == (
        (LineageNode("table", "planes"), "seats"),
    )
    assert find_first_outputs(app) == {"join-2-planes": output.node}


@pytest.mark.parametrize(
    ("planes", "join", "parts"),
    [
        (table(), {"select": ["seat"]}, ("no column 'seat'", "plane, seats")),
        (table(None), {}, ("declares no columns",)),
        (
            table(None),
            {"select": ["seats"]},
            ("declares no columns", "'seats'", 'select={"seats": "string"}'),
        ),
        (table(), {"select": {"seats": "string"}}, ("'seats' as int", "the type string")),
        (table({"plane": "string", "shape": "geometry"}), {}, ("'shape' as geometry",)),
        (table({"plane": "string", "price": "numeric"}), {}, ("'price' as numeric",)),
        (
            table(),
            {"on": {"number": "plane"}},
            ("'number' is int", "'plane'", "string", "cast(number as string)"),
        ),
        (
            table({"plane": "double"}),
            {"on": {"share": "plane"}},
            ("'share' is double", "can't be a key"),
        ),
        (
            RemoteTable("planes", key="plane", write_function=MemoryTable("w")),
            {},
            ("no read function",),
        ),
        (table(), {"prefix": "", "select": ["seats as number"]}, ("both have a column 'number'",)),
    ],
)
def test_what_a_table_can_not_answer_is_refused_by_name(
    planes: RemoteTable[Any, Any, Any], join: dict[str, Any], parts: tuple[str, ...]
) -> None:
    refused(looked_up(planes, **join), *parts)


def test_arguments_are_refused_where_the_function_has_no_use_for_them() -> None:
    refused(
        looked_up(table(read=MemoryTable("m")), select={"seats": "int"}, args=("tenant",)),
        "takes none",
    )


def test_a_missing_key_column_and_wrong_arguments_are_refused() -> None:
    with pytest.raises(PlanningError) as failure:
        planned(looked_up(table(), on={"tail": "plane"}))
    assert failure.value.column == "tail"
    with pytest.raises(PlanningError) as failure:
        looked_up(table(key=("plane", "site")))
    assert failure.value.operator == "join-2-planes"
    with pytest.raises(ConfigurationError) as failure:
        looked_up(table(), how="right")
    assert failure.value.argument == "how"
    with pytest.raises(ConfigurationError) as failure:
        looked_up(table(), min_match_rate=2)
    assert failure.value.argument == "min_match_rate"
    app = Application("app")
    planes = app.table(table())
    once = app.input_stream("lake.flights").join(planes, on="plane", name="a")
    with pytest.raises(PlanningError) as failure:
        once.join(planes, on="plane", name="a", prefix="b_")
    assert failure.value.operator == "join-3-a"


PEOPLE = {"plane": "string", "home": "struct<city:string,geo:struct<lat:int>>", "about": "jsonb"}


def test_parts_of_a_tables_columns_are_looked_up_by_paths() -> None:
    select = ["home.city", "home.geo.lat as latitude", "home.geo"]
    made = planned(looked_up(table(PEOPLE), select=select)).columns["join-2-planes"].known
    added = {name: made[name] for name in ("city", "latitude", "geo")}
    assert [column.type for column in added.values()] == ["string", "int", "struct<lat:int>"]
    source = ((LineageNode("table", "planes"), "home"),)
    assert {column.sources for column in added.values()} == {source}


@pytest.mark.parametrize(
    ("select", "columns"),
    [
        (["home.town"], PEOPLE),
        (["home.city.x"], PEOPLE),
        (["about.x"], PEOPLE),
        (["house.city"], PEOPLE),
        (["home.city"], None),
    ],
)
def test_parts_that_a_table_is_not_known_to_have_are_refused(
    select: list[str], columns: dict[str, str] | None
) -> None:
    with pytest.raises(PlanningError) as caught:
        planned(looked_up(table(columns), select=select))
    assert caught.value.column == select[0]


def test_a_type_is_given_to_a_whole_column() -> None:
    with pytest.raises(ConfigurationError) as caught:
        looked_up(table(None), select={"home.city": "string"})
    assert caught.value.argument == "select"
    planned(looked_up(table(None), select={"home": "struct<city:string>"}))

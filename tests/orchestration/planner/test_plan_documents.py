"""Plans as JSON: what is written is read again, and anything else is refused by name."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import MalformedDocumentError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.planner.planning import application, catalog, dataset
from tests.orchestration.planner.test_planned_tables import last_seen, planned, tags


def several() -> ExecutionPlan:
    app = application(auto_repartition=True)
    stream = app.input_stream("lake.s").join(app.table(dataset("t", 8)), on="k", select=[])
    stream.map(lambda frame: frame).join(app.table(dataset("u", 4)), on="k", select=[])
    stream.join(app.table(dataset("b")), on="k").send_to(
        app.output_stream("lake.out", partitions=4, key="k")
    )
    app.input_stream("lake.r", broadcast=True).filter("true")
    return build_plan(app, catalog(s=8, t=1, u=1, b=1, r=3))


def everything() -> ExecutionPlan:
    """A plan of operators with something to remember or to ask."""
    app = application()
    store = SqliteTable("levels.sqlite", "levels", "k", columns={"k": "string", "level": "string"})
    levels = app.table(RemoteTable("levels", key="k", read_function=store, write_function=store))
    seen = app.local_table("seen", key="k", schema=Schema.of(k="string", n="bigint"), partitions=8)
    both = app.input_stream("lake.s").merge(app.input_stream("lake.r")).select("k")
    both.with_columns(n="cast(1 as bigint)").send_to(seen)
    joined = both.join(seen, on="k", how="left").join(levels, on="k", how="left")
    joined.sink(print)
    joined.send_to(app.output_stream("lake.out", partitions=4, key="k"))
    facts = [
        StreamFacts(f"lake.{name}", 8, ("k",), SPARK, Schema.of(k="string")) for name in ("s", "r")
    ]
    return build_plan(app, catalog(*facts))


def stored(execution_plan: ExecutionPlan) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(execution_plan.to_json()))
    return document


@pytest.mark.parametrize(
    "execution_plan",
    [several(), planned(last_seen(tags())), everything()],
    ids=["joins", "tables", "all"],
)
def test_a_plan_is_what_was_written_of_it(execution_plan: ExecutionPlan) -> None:
    again = ExecutionPlan.from_json(stored(execution_plan))
    assert again == execution_plan
    assert again.render() == execution_plan.render()
    assert again.to_mermaid() == execution_plan.to_mermaid()


def test_what_is_asked_and_remembered_is_drawn() -> None:
    lines = everything().to_mermaid().splitlines()
    boxes = [line.strip() for line in lines if ":::" in line]
    assert sum(box.startswith("n") and '[("seen<br/>' in box for box in boxes) == 1
    assert any('[["levels"]]' in box for box in boxes)
    assert sum(box.endswith(":::write") for box in boxes) == 3


def test_the_document_of_a_plan_has_the_members_of_its_format() -> None:
    """Whoever has to change these lists changes the format: only additions keep its number."""
    document = several().to_json()
    assert document["format"] == 1
    members = {
        "plan": "format application operators streams join_groups exchanges tasks notes tables",
        "operators": "id kind inputs summary partitions partitioned_by columns",
        "streams": "name role partitions partitioned_by partitioner count_from operator dataset",
        "join_groups": "join dataset streams partitions partitioned_by",
        "exchanges": "operator reason partitioned_by partitions why",
        "tasks": "name ssps buckets broadcast",
    }
    for part, names in members.items():
        assert set({"plan": [document], **document}[part][0]) >= set(names.split(" ")), part
    assert document["tasks"][2]["ssps"][0] == "lake.s.2"
    (table,) = planned(last_seen(tags())).to_json()["tables"]
    assert set(table) >= {"operator", "table", "order", "why", "replay", "streams"}


def test_what_a_later_version_adds_is_ignored_and_what_is_missing_is_refused() -> None:
    execution_plan = several()
    document = stored(execution_plan)
    document["colour"] = "green"
    for item in document["operators"]:
        item["mood"] = "calm"
    assert ExecutionPlan.from_json(document) == execution_plan
    for name in ("operators", "tables", "by_time"):
        with pytest.raises(MalformedDocumentError, match=name):
            ExecutionPlan.from_json(
                {member: value for member, value in document.items() if member != name}
            )


@pytest.mark.parametrize("number", [2, 17])
def test_a_later_format_is_refused_by_its_number(number: int) -> None:
    document = {**stored(several()), "format": number, "operators": "another thing"}
    with pytest.raises(
        MalformedDocumentError, match=rf"it has format {number}, and this version .* up to 1"
    ):
        ExecutionPlan.from_json(document)


WRONG: list[tuple[list[str | int], Any, str]] = [
    (["format"], None, "its format is None"),
    (["format"], True, "its format is True"),
    (["format"], 0, "its format is 0"),
    (["operators"], "x", "operators"),
    (["operators", 1, "partitions"], "8", "operators.1.partitions"),
    (["operators", 1, "partitions"], 8.5, "operators.1.partitions"),
    (["streams", 0, "role"], "outlet", "streams.0.role"),
    (["tasks", 0, "ssps", 0], "lake.s.02", "lake.s.02"),
    (["tasks", 0, "ssps", 0], 7, "7"),
    (["notes"], [3], "notes.0"),
    (["application"], ..., "application"),
    (["exchanges", 0, "why"], ..., "exchanges.0.why"),
]


@pytest.mark.parametrize(("path", "value", "named"), WRONG, ids=[str(path) for path, *_ in WRONG])
def test_what_is_no_plan_is_refused_and_the_wrong_member_named(
    path: list[str | int], value: Any, named: str
) -> None:
    document: Any = copy.deepcopy(stored(several()))
    part = document
    for step in path[:-1]:
        part = part[step]
    if value is ...:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    with pytest.raises(MalformedDocumentError) as refused:
        ExecutionPlan.from_json(document)
    assert named in refused.value.problem


@pytest.mark.parametrize("document", [None, [], "plan", 3, {}, {"format": {}}])
def test_what_is_no_object_of_a_plan_is_refused(document: object) -> None:
    with pytest.raises(MalformedDocumentError) as failure:
        ExecutionPlan.from_json(document)
    assert failure.value.document == "plan"

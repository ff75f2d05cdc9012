"""Drawings of plans in Mermaid and as text: whole, with texts escaped and exchanges marked."""

from __future__ import annotations

import re
from pathlib import Path

from dagster_adjunct.examples.flights.deliver import create_streams
from dagster_adjunct.examples.flights.pipeline import app as flights
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import build_plan, plan_application, systems_for
from dagster_adjunct.resources.iceberg import IcebergTable
from dagster_adjunct.resources.objects.lake import open_lake
from tests.doc_blocks import ROOT, blocks_of
from tests.orchestration.planner.planning import application, catalog, dataset
from tests.orchestration.planner.test_planned_tables import last_seen, planned, tags

NASTY = "k <> '<b>&\"]]-->|' and x = `#;` -- %% \u0007 naïve 中"


def nasty() -> ExecutionPlan:
    app = application()
    stream = (
        app.input_stream("lake.s").filter(NASTY).join(app.table(dataset("t", 8)), on="k", select=[])
    )
    stream.send_to(app.output_stream("lake.out", partitions=4, key="k"))
    return build_plan(app, catalog(s=8, t=1))


def test_a_drawing_has_every_operator_stream_dataset_and_table_by_name() -> None:
    for execution_plan in (nasty(), planned(last_seen(tags()))):
        outside = {
            edge.dataset or edge.name
            for edge in execution_plan.streams
            if edge.role != "intermediate"
        }
        names = (
            {item.id for item in execution_plan.operators}
            | outside
            | {table.table for table in execution_plan.tables}
        )
        drawn = re.findall(
            r'^  n\d+[\[(]+"(.*?)(?:<br/>|"[\])])', execution_plan.to_mermaid(), re.MULTILINE
        )
        assert sorted(drawn) == sorted(names)


def test_mermaid_sees_no_sign_of_its_own_in_a_text() -> None:
    line = next(line for line in nasty().to_mermaid().splitlines() if "filter-2" in line)
    label = re.fullmatch(r'  n\d+\["(.*)"\]:::transform', line)
    assert label is not None
    assert not set(re.sub(r"#\d+;|<br/>", "", label[1])) & set("<>\"'`|[]{}&#;%\u0007")
    decoded = re.sub(r"#(\d+);", lambda match: chr(int(match[1])), label[1])
    assert "k <> '<b>&\"]]-->|' and x = `#;`" in decoded


def test_exchanges_are_marked_on_the_way_that_moves() -> None:
    app = application()
    stream = app.input_stream("lake.s").partition_by("x", partitions=6)
    stream.send_to(app.output_stream("lake.out", partitions=4, key="k"))
    lines = build_plan(app, catalog(s=8)).to_mermaid().splitlines()
    marked = [line.strip() for line in lines if "==>" in line]
    assert marked == ['n1 ==>|"exchange: 6 by x"| n2', 'n3 ==>|"exchange: 4 by k"| n4']
    arrows = [line for line in lines if "-->" in line or "==>" in line]
    assert (
        lines[-1] == "  linkStyle"
        f" {','.join(str(at) for at, line in enumerate(arrows) if '==>' in line)} stroke:#ea580c"
    )


def test_a_plan_without_exchanges_has_no_marked_link() -> None:
    app = application()
    app.input_stream("lake.s").send_to(app.output_stream("lake.out", partitions=8, key="k"))
    drawn = build_plan(app, catalog(s=8)).to_mermaid()
    assert "exchange:" not in drawn
    assert "linkStyle" not in drawn


def test_an_output_table_is_drawn_as_a_table() -> None:
    app = application()
    app.input_stream("lake.s").send_to(app.output_table(IcebergTable("shop.visits")))
    drawn = build_plan(app, catalog(s=8)).to_mermaid()
    assert '[["iceberg:shop.visits"]]:::outside' in drawn


def test_the_drawing_of_the_example_in_the_documentation_is_the_one_of_its_plan(
    tmp_path: Path,
) -> None:
    """If not, run: adjunct plan dagster_adjunct.examples.flights.pipeline:app --format mermaid."""
    lake = open_lake(str(tmp_path / "lake"))
    create_streams(lake)
    (displayed,) = [
        block for block in blocks_of(ROOT / "docs" / "planner.md") if block.language == "mermaid"
    ]
    assert (
        displayed.text.strip()
        == plan_application(flights, systems=systems_for(flights, lake=lake)).to_mermaid().strip()
    )


def test_the_text_shows_where_each_branch_begins() -> None:
    app = application()
    stream = app.input_stream("lake.s")
    stream.filter("a").filter("b")
    last = stream.filter("c")
    last.filter("d").filter("e")
    last.filter("f")
    drawn = [
        line.split("  [")[0] for line in build_plan(app, catalog(s=4)).render().splitlines()[3:10]
    ]
    assert drawn == [
        "  input-1",
        "  +  filter-2",
        "  |  filter-3",
        "  +  filter-4",
        "  |  +  filter-5",
        "  |  |  filter-6",
        "  |  +  filter-7",
    ]

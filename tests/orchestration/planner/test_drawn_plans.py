"""Drawings of plans: whole, with texts escaped and exchanges marked, boxes apart, and links that point down."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.orchestration.drawing.graph import Graph, Link, Node
from dagster_adjunct.orchestration.drawing.layers import layered
from dagster_adjunct.orchestration.drawing.svg import svg
from dagster_adjunct.orchestration.planner import ExecutionPlan, plan
from dagster_adjunct.resources.lakes import open_lake
from tests.doc_blocks import ROOT
from tests.orchestration.planner.planning import application, catalog, dataset
from tests.orchestration.planner.test_planned_tables import last_seen, planned, tags

SVG = "{http://www.w3.org/2000/svg}"
NASTY = "k <> '<b>&\"]]-->|' and x = `#;` -- %% \u0007 naïve 中"


def nasty() -> ExecutionPlan:
    app = application()
    stream = app.input_stream("lake.s").filter(NASTY).join(app.table(dataset("t", 8)), on="k", select=[])
    stream.send_to(app.output_stream("lake.out", partitions=4, key="k"))
    return plan(app, catalog(s=8, t=1))


def texts(drawn: str) -> list[str]:
    return [part.text or "" for part in ElementTree.fromstring(drawn).iter(f"{SVG}text")]


def boxes(drawn: str) -> Iterator[tuple[float, float, float, float]]:
    """The outlines of nodes: left, top, right, bottom."""
    for group in ElementTree.fromstring(drawn).iter(f"{SVG}g"):
        shape = group.find(f"{SVG}rect")
        if shape is not None:
            x, y, width, height = (float(shape.attrib[name]) for name in ("x", "y", "width", "height"))
            yield x, y, x + width, y + height


def test_a_drawing_has_every_operator_stream_dataset_and_table_by_name() -> None:
    for execution_plan in (nasty(), planned(last_seen(tags()))):
        drawn = texts(execution_plan.to_svg())
        outside = {edge.dataset or edge.name for edge in execution_plan.streams if edge.role != "intermediate"}
        names = (
            {item.id for item in execution_plan.operators} | outside | {table.table for table in execution_plan.tables}
        )
        assert names <= set(drawn)
        assert all(name in execution_plan.to_mermaid() for name in names)


def test_texts_are_escaped_and_nothing_is_fetched_or_run() -> None:
    drawn = nasty().to_svg()
    assert any(text.startswith("k <> '<b>&\"]]-->|' and x = `#;`") for text in texts(drawn))
    tags = {part.tag.removeprefix(SVG) for part in ElementTree.fromstring(drawn).iter()}
    assert tags <= {"svg", "title", "defs", "marker", "path", "rect", "ellipse", "text", "g"}
    assert re.findall(r"(?:href|src|url)\s*[=(]\s*[\"']?(?!#)", drawn) == []
    assert "\u0007" not in drawn


def test_mermaid_sees_no_sign_of_its_own_in_a_text() -> None:
    line = next(line for line in nasty().to_mermaid().splitlines() if "filter-2" in line)
    label = re.fullmatch(r'  n\d+\["(.*)"\]:::transform', line)
    assert label is not None
    assert not set(re.sub(r"#\d+;|<br/>", "", label[1])) & set("<>\"'`|[]{}&#;%")
    decoded = re.sub(r"#(\d+);", lambda match: chr(int(match[1])), label[1])
    assert "k <> '<b>&\"]]-->|' and x = `#;`" in decoded


def test_exchanges_are_marked_on_the_way_that_moves() -> None:
    app = application()
    stream = app.input_stream("lake.s").partition_by("x", partitions=6)
    stream.send_to(app.output_stream("lake.out", partitions=4, key="k"))
    execution_plan = plan(app, catalog(s=8))
    lines = execution_plan.to_mermaid().splitlines()
    marked = [line.strip() for line in lines if "==>" in line]
    assert marked == ['n1 ==>|"exchange: 6 by x"| n2', 'n3 ==>|"exchange: 4 by k"| n4']
    assert [text for text in texts(execution_plan.to_svg()) if "exchange:" in text] == [
        "exchange: 6 by x",
        "exchange: 4 by k",
    ]
    assert "exchange:" not in plan(application_without(), catalog(s=8)).to_svg()


def application_without():  # type: ignore[no-untyped-def]
    app = application()
    app.input_stream("lake.s").send_to(app.output_stream("lake.out", partitions=8, key="k"))
    return app


def random_graph(seed: int) -> Graph:
    chance = random.Random(seed)
    nodes = tuple(Node(f"n{n}", "box", "transform", (f"node {n}" * chance.randint(1, 4),)) for n in range(40))
    ends = [(chance.randrange(40), chance.randrange(40)) for _ in range(60)]
    return Graph("g", nodes, tuple(Link(f"n{a}", f"n{b}") for a, b in ends if a != b))


@pytest.mark.parametrize("seed", range(8))
def test_no_box_lies_on_another_and_links_point_down_unless_they_close_a_cycle(seed: int) -> None:
    graph = random_graph(seed)
    placed = list(boxes(svg(graph)))
    assert len(placed) == 40
    for number, (left, top, right, bottom) in enumerate(placed):
        for other in placed[:number]:
            assert left >= other[2] or right <= other[0] or top >= other[3] or bottom <= other[1]
    layout = layered(graph)
    level = {vertex: number for number, layer in enumerate(layout.layers) for vertex in layer}
    for number, (link, path) in enumerate(zip(graph.links, layout.paths, strict=True)):
        ends = (link.target, link.source) if number in layout.upward else (link.source, link.target)
        assert (path[0], path[-1]) == ends
        assert [level[vertex] - level[path[0]] for vertex in path] == list(range(len(path)))


def test_hundreds_of_branches_are_drawn() -> None:
    app = application()
    stream = app.input_stream("lake.s")
    for _ in range(700):
        stream = stream.filter("k > 0")
        stream.send_to(app.output_stream(f"lake.out-{len(app.outputs)}", partitions=8, key="k"))
    execution_plan = plan(app, catalog(s=8))
    assert len(list(boxes(execution_plan.to_svg()))) == 2_102


def test_the_drawing_of_the_example_in_the_documentation_is_the_one_of_its_plan(tmp_path: Path) -> None:
    """Where it is not: adjunct plan dagster_adjunct.examples.flights.pipeline:app --format svg --output that file."""
    from dagster_adjunct.examples.flights.deliver import create_streams

    lake = open_lake(str(tmp_path / "lake"))
    create_streams(lake)
    drawn = tmp_path / "plan.svg"
    named = ["plan", "dagster_adjunct.examples.flights.pipeline:app", "--lake", lake.url]
    result = CliRunner().invoke(root, [*named, "--format", "svg", "--output", str(drawn)], catch_exceptions=False)
    assert "The plan of flight-delays is in" in result.output
    assert drawn.read_text() == (ROOT / "docs" / "images" / "flights-plan.svg").read_text()


def test_the_text_shows_where_each_branch_begins() -> None:
    app = application()
    stream = app.input_stream("lake.s")
    stream.filter("a").filter("b")
    last = stream.filter("c")
    last.filter("d").filter("e")
    last.filter("f")
    drawn = [line.split("  [")[0] for line in plan(app, catalog(s=4)).render().splitlines()[3:10]]
    assert drawn == [
        "  input-1",
        "  +  filter-2",
        "  |  filter-3",
        "  +  filter-4",
        "  |  +  filter-5",
        "  |  |  filter-6",
        "  |  +  filter-7",
    ]

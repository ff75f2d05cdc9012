"""Datasets from files, queries and extractors: planned by what they declare, without a stream to
ask.
"""

from __future__ import annotations

from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import (
    BY_OFFSET,
    AdjunctDataset,
    FileSource,
    QuerySource,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.orchestration.application.lineage import dataset_source, find_sources
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, LineageNode, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from tests.orchestration.planner.planning import application, catalog

FLIGHTS = StreamFacts(
    "lake.flights", 8, ("tailnum",), SPARK, Schema.of(tailnum="string", origin="string")
)
PLANES = Schema.of(tailnum="string", seats="int", model="string")
FILES = FileSource("s3://bucket/planes", "parquet", PLANES)
QUERY = QuerySource("SELECT * FROM planes", PLANES)


def planes(source: Any, **more: Any) -> AdjunctDataset:
    return bounded_dataset(
        "planes", input=source, key=more.pop("key", "tailnum"), partitions=8, **more
    )


def planned(dataset: AdjunctDataset, *streams: StreamFacts, **join: Any):
    app = application()
    app.input_stream("lake.flights").join(app.table(dataset), **{"on": "tailnum", **join})
    return build_plan(app, catalog(FLIGHTS, *streams))


@pytest.mark.parametrize("source", [FILES, QUERY])
def test_a_dataset_without_a_stream_is_co_partitioned_by_its_declaration(
    source: FileSource | QuerySource,
) -> None:
    execution_plan = planned(planes(source))
    assert execution_plan.operators[-1].columns == ("tailnum", "origin", "seats", "model")
    assert execution_plan.exchanges == ()
    (side,) = [edge for edge in execution_plan.streams if edge.role == "side-input"]
    assert (side.name, side.partitions, side.partitioned_by) == (str(source), 8, ("tailnum",))


def test_a_count_that_does_not_agree_names_the_files() -> None:
    small = bounded_dataset("planes", input=FILES, key="tailnum", partitions=4)
    with pytest.raises(PlanningError) as failure:
        planned(small)
    assert failure.value.operator == "join-2-planes"


def test_a_column_that_neither_files_nor_query_have_is_named() -> None:
    with pytest.raises(PlanningError) as failure:
        planned(planes(FILES), select=["engines"])
    assert failure.value.operator == "join-2-planes"
    assert failure.value.column == "engines"
    with pytest.raises(PlanningError) as failure:
        planned(planes(QUERY), select=["engines"])
    assert failure.value.operator == "join-2-planes"
    assert failure.value.column == "engines"


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"key": "tail"}, "dataset 'planes' .* has no column 'tail': it has tailnum, seats, model"),
        ({"columns": ["tailnum", "engines"]}, "dataset 'planes' .* has no column 'engines'"),
        (
            {"order_by": "at"},
            "dataset 'planes' .*: order_by is 'at', and changes .* have no such column",
        ),
        (
            {"order_by": ["model", "at"]},
            "dataset 'planes' .*: order_by is 'at', and changes .* have no such column",
        ),
        (
            {"extractor": Projection("tailnum string, engines int")},
            "the record has no column 'engines'",
        ),
        (
            {"key": "model"},
            r"changes of one key could arrive .* key is \(model\), .* keyed by \(tailnum\)",
        ),
    ],
)
@pytest.mark.parametrize("use", ["declared", "fed"])
def test_a_dataset_that_could_not_be_made_is_refused_whether_it_is_joined_or_not(
    use: str, declared: dict[str, Any], message: str
) -> None:
    app = application()
    made = {"key": "tailnum", "partitions": 8} | declared
    table = app.table(unbounded_dataset("planes", input="lake.planes", **made))
    flights = app.input_stream("lake.flights").map("*", "1 as seats", "'x' as model", "'x' as tail")
    if use == "fed":
        flights.send_to(table)
    with pytest.raises(PlanningError, match=message) as caught:
        build_plan(
            app, catalog(FLIGHTS, StreamFacts("lake.planes", 2, ("tailnum",), SPARK, PLANES))
        )
    assert caught.value.dataset == "planes"
    assert str(caught.value.declared_at).startswith(
        "tests/orchestration/planner/test_planned_datasets.py:"
    )


@pytest.mark.parametrize(
    "declared",
    [
        {"order_by": "meta.seq.m"},
        {"order_by": ["seats", "meta.seq.m"]},
        {"sensitive": "meta.seq.m"},
        {"history": "all", "valid_from": "meta.seq.m"},
    ],
)
def test_a_misspelt_path_of_a_dataset_is_refused_with_the_fields_where_it_breaks(
    declared: dict[str, Any],
) -> None:
    columns = Schema.of(tailnum="string", seats="int", meta={"at": "int", "seq": {"number": "int"}})
    facts = StreamFacts("lake.planes", 2, ("tailnum",), SPARK, columns)
    app = application()
    made = {"key": "tailnum", "partitions": 8} | declared
    app.table(unbounded_dataset("planes", input="lake.planes", **made))
    app.input_stream("lake.flights")
    with pytest.raises(PlanningError) as caught:
        build_plan(app, catalog(FLIGHTS, facts))
    assert caught.value.column == "meta.seq.m"
    said = f"{caught.value.problem} {caught.value.next_step}"
    assert "number" in said
    assert "tailnum" not in said


def test_what_an_extractor_makes_are_the_datasets_columns() -> None:
    chairs = Projection("tailnum string, chairs int", {"chairs": "seats * 2"})
    assert planned(planes(FILES, extractor=chairs)).operators[-1].columns == (
        "tailnum",
        "origin",
        "chairs",
    )
    stream = StreamFacts("lake.planes", 2, ("tailnum",), SPARK, PLANES)
    on_stream = planned(planes("lake.planes", extractor=chairs), stream)
    assert on_stream.operators[-1].columns == ("tailnum", "origin", "chairs")
    with pytest.raises(PlanningError) as failure:
        planned(planes(FILES, extractor=chairs), select=["seats"])
    assert failure.value.operator == "join-2-planes"
    assert failure.value.column == "seats"


def test_a_dataset_keyed_by_offset_has_the_records_position_as_its_key() -> None:
    notes = bounded_dataset("notes", input="lake.notes", key=BY_OFFSET, broadcast=True)
    app = application()
    flights = app.input_stream("lake.flights")
    flights.map("*", "0 as at", "1L as number").join(
        app.table(notes), on={"at": "source_partition", "number": "source_offset"}
    )
    execution_plan = build_plan(
        app, catalog(FLIGHTS, StreamFacts("lake.notes", 1, (), SPARK, Schema.of(text="string")))
    )
    assert execution_plan.operators[-1].columns == ("tailnum", "origin", "at", "number", "text")


def test_an_application_does_not_send_to_a_dataset_that_has_no_stream() -> None:
    app = application()
    with pytest.raises(PlanningError) as failure:
        app.input_stream("lake.flights").send_to(app.table(planes(FILES)))
    assert failure.value.operator == "input-1"
    assert failure.value.dataset == "planes"


def test_files_are_in_the_lineage_and_a_query_is_not() -> None:
    app = application()
    flights = app.input_stream("lake.flights")
    flights.join(app.table(planes(FILES)), on="tailnum")
    assert find_sources(app) == (
        LineageNode("stream", "lake.flights"),
        LineageNode("files", "s3://bucket/planes"),
    )
    assert dataset_source(planes(QUERY)) is None

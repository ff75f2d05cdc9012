"""Columns, followed as far as they are known: what is missing or double is found before anything
runs.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.orchestration.operators.records import FilterFunction
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from tests.orchestration.planner.planning import application, catalog, dataset

FLIGHTS = StreamFacts(
    "lake.flights", 8, ("tailnum",), SPARK, Schema.of(tailnum="string", origin="string", year="int")
)
PLANES = StreamFacts(
    "lake.planes", 2, ("tailnum",), SPARK, Schema.of(tailnum="string", year="int", seats="int")
)
planes = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=8)
ALL = {"on": "tailnum", "select": ["seats"]}


def columns_after(describe, *streams: StreamFacts):
    app = application()
    describe(app, app.input_stream("lake.flights"))
    return build_plan(app, catalog(*(streams or (FLIGHTS, PLANES)))).operators[-1].columns


def refused(describe, *parts: str, streams: tuple[StreamFacts, ...] = ()) -> None:
    with pytest.raises(PlanningError) as caught:
        columns_after(describe, *streams)
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.next_step


def test_columns_are_followed_through_the_operators():
    def describe(app, flights):
        out = app.output_stream("lake.out", partitions=8, key="tailnum")
        joined = flights.filter("year > 0").join(
            app.table(planes), on="tailnum", select=["seats", "year as plane_year"], prefix="p_"
        )
        joined.send_to(out).map("*", "upper(origin) as place").map("tailnum", "place", "`p_seats`")

    assert columns_after(describe) == ("tailnum", "place", "p_seats")


def test_a_join_without_select_adds_all_columns_but_the_key():
    added = columns_after(lambda app, s: s.join(app.table(planes), on="tailnum", prefix="plane_"))
    assert added == ("tailnum", "origin", "year", "plane_year", "plane_seats")


def test_a_function_or_an_unnamed_expression_ends_what_is_known():
    assert columns_after(lambda app, s: s.map(lambda frame: frame)) is None
    assert columns_after(lambda app, s: s.map("tailnum", "upper(origin)")) is None
    assert columns_after(
        lambda app, s: s.map(lambda frame: frame).map("tailnum", "cast(x as int) as y")
    ) == ("tailnum", "y")
    unknown = StreamFacts("lake.flights", 8, ("tailnum",), SPARK)
    assert columns_after(lambda app, s: s.map("*", "1 as one"), unknown, PLANES) is None


def test_a_join_key_that_the_stream_lacks_is_named_with_the_streams_columns():
    refused(
        lambda app, s: s.map("origin", "year").join(app.table(planes), **ALL),
        "join-3-planes: the stream has no column 'tailnum'; its columns there are origin, year.",
    )


def test_a_join_key_that_the_datasets_input_lacks_is_named_with_its_columns():
    wrong = StreamFacts("lake.planes", 2, ("tail",), SPARK, Schema.of(tail="string", seats="int"))
    refused(
        lambda app, s: s.join(app.table(planes), **ALL),
        "dataset 'planes' (input lake.planes) has no column 'tailnum': it has tail, seats.",
        streams=(FLIGHTS, wrong),
    )


def test_a_selected_column_that_the_dataset_lacks_is_named():
    refused(
        lambda app, s: s.join(app.table(planes), on="tailnum", select=["engines"]),
        "dataset planes (input lake.planes) has no column 'engines'; its columns there are tailnum,"
        " year, seats.",
    )
    narrow = bounded_dataset(
        "planes", input="lake.planes", key="tailnum", partitions=8, columns=["tailnum", "year"]
    )
    refused(
        lambda app, s: s.join(app.table(narrow), **ALL),
        "'seats'; its columns there are tailnum, year.",
    )


def test_two_columns_of_one_name_are_refused_with_a_way_out():
    refused(
        lambda app, s: s.join(app.table(planes), on="tailnum", select=["year"]),
        "both have a column 'year'",
        "tailnum, origin, year",
        'prefix="planes_"',
    )
    refused(lambda app, s: s.map("*", "1 as Year"), "two columns would be called 'Year'")


def test_a_column_that_an_operator_names_has_to_be_there():
    refused(lambda app, s: s.map("seats"), "map-2: the stream has no column 'seats'")
    refused(
        lambda app, s: s.partition_by("dest"), "partition-by-2: the stream has no column 'dest'"
    )
    refused(
        lambda app, s: s.send_to(app.output_stream("lake.out", partitions=2, key="dest")),
        "send-to-2: the stream has no column 'dest'",
        "key of output lake.out",
    )


def test_an_output_that_exists_otherwise_is_refused():
    there = StreamFacts("lake.out", 4, ("tailnum",), SPARK)
    refused(
        lambda app, s: s.send_to(app.output_stream("lake.out", partitions=2, key="tailnum")),
        "'lake.out' exists with 4 partitions and key (tailnum); it is declared with 2",
        streams=(FLIGHTS, there),
    )


@pytest.mark.parametrize(
    "describe",
    [
        lambda app: app.input_stream("lake.s").map("*", "k as __x"),
        lambda app: app.input_stream("lake.s").join(
            app.table(dataset("t", 8)), on="k", select=["v"], prefix="__"
        ),
    ],
)
def test_no_column_gets_a_name_of_those_that_carry_a_record_s_position(describe):
    app = application()
    describe(app)
    with pytest.raises(PlanningError) as caught:
        build_plan(app, catalog(s=8, t=8))
    assert caught.value.column in ("__x", "__v")


def test_a_filter_function_leaves_columns_as_they_are():
    from pyspark.sql.types import StructType

    class Frame:
        def __init__(self, **types):
            self.types = types
            self.schema = StructType()
            for name, kind in types.items():
                self.schema.add(name, {"int": "integer", "bigint": "long"}.get(kind, kind))

    class Calling:
        @staticmethod
        def call_frame(operator, function, frame):
            return function(frame)

    def compiled(function):
        batch = SimpleNamespace(records=Calling)
        return FilterFunction(function).compile("filter-2", [Frame(k="string", v="int")], batch)

    assert compiled(lambda frame: frame).types == {"k": "string", "v": "int"}
    for wrong, types in {
        "adds the column 'more'": {"k": "string", "v": "int", "more": "int"},
        "drops the column 'v'": {"k": "string"},
        "changes the type of column 'v' from int to bigint: ": {"k": "string", "v": "bigint"},
    }.items():
        with pytest.raises(PlanningError, match=wrong):
            compiled(lambda frame, types=types: Frame(**types))

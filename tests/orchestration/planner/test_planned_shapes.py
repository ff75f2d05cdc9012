"""Shapes of graphs that planners trip over."""

from __future__ import annotations

import pytest

from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import PartitionCountMismatchError
from tests.orchestration.planner.planning import application, catalog, dataset, streams_of_join
from tests.orchestration.planner.several_inputs import BY_K


def test_a_stream_joined_with_itself_is_one_stream():
    app = application()
    s = app.input_stream("lake.s")
    s.apply(BY_K, s)
    s.filter("a").apply(BY_K, s.filter("b"))
    groups = build_plan(app, catalog(s=7)).join_groups
    assert [(group.streams, group.partitions) for group in groups] == [(("lake.s",), 7)] * 2


def test_a_stream_that_meets_itself_behind_an_exchange_gives_that_its_count():
    app = application()
    s = app.input_stream("lake.s")
    s.partition_by("k").apply(BY_K, s)
    planned = build_plan(app, catalog(s=7, big=9))
    assert planned.stream("app-partition-by-2").partitions == 7


def test_one_input_on_two_paths_to_tables_of_other_counts():
    app = application()
    s = app.input_stream("lake.s")
    s.join(app.table(dataset("a", 7)), on="k", select=[])
    s.partition_by("k").join(app.table(dataset("b", 3)), on="k", select=[])
    planned = build_plan(app, catalog(s=7, a=1, b=1))
    assert [group.partitions for group in planned.join_groups] == [7, 3]


def test_one_input_that_feeds_a_table_and_meets_it():
    app = application()
    s, table = app.input_stream("lake.s"), app.table(dataset("t", 7))
    s.filter("a").send_to(table)
    s.join(table, on="k", select=[])
    assert streams_of_join(build_plan(app, catalog(s=7, t=1)), "join-4-t") == ("lake.s", "lake.t")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_an_intermediate_stream_of_three_joins_gets_the_one_count_that_is_known(order):
    app = application(intermediate_partitions=99)
    shared = app.input_stream("lake.s").partition_by("k")
    open_ones = [app.input_stream(f"lake.o{number}").partition_by("k") for number in range(2)]
    others = [*open_ones, app.input_stream("lake.known")]
    for number in order:
        shared.apply(BY_K, others[number])
    planned = build_plan(app, catalog(s=2, o0=3, o1=4, known=11))
    assert {edge.partitions for edge in planned.streams if edge.role == "intermediate"} == {11}


def test_257_from_a_join_or_given_are_257():
    app = application()
    app.input_stream("lake.s").partition_by("k").apply(BY_K, app.input_stream("lake.big"))
    app.input_stream("lake.r").partition_by("x", partitions=257)
    app.input_stream("lake.q").partition_by("x")
    planned = build_plan(app, catalog(s=2, big=257, r=3, q=3))
    assert [edge.partitions for edge in planned.streams if edge.role == "intermediate"] == [
        257,
        257,
        256,
    ]


def test_streams_of_one_name_in_two_systems_are_two():
    app = application()
    mine, theirs = (
        StreamFacts(f"{system}.s", count, ("k",), SPARK) for system, count in (("a", 8), ("b", 4))
    )
    app.input_stream("a.s").apply(BY_K, app.input_stream("b.s"))
    with pytest.raises(PartitionCountMismatchError) as failure:
        build_plan(app, catalog(mine, theirs))
    assert failure.value.operator == "stream-join-3"


@pytest.mark.lengthy
def test_a_chain_of_ten_thousand_is_planned():
    app = application()
    stream = app.input_stream("lake.s")
    for _ in range(10_000):
        stream = stream.filter("true")
    stream.partition_by("k").join(app.table(dataset("t", 4)), on="k", select=[])
    assert build_plan(app, catalog(s=7, t=1)).join_groups[0].partitions == 4


@pytest.mark.lengthy
@pytest.mark.parametrize("joins_first", [True, False])
def test_many_joins_and_many_writers_of_one_table_are_one_count(joins_first):
    app = application()
    table = app.table(dataset("t", 8))
    for joins in (joins_first, not joins_first):
        for number in range(300):
            moved = (app.input_stream(f"lake.s{joins}{number}")).partition_by("k")
            if joins:
                moved.join(table, on="k", select=[])
            else:
                moved.send_to(table)
    facts = catalog(
        t=1, **{f"s{joins}{number}": 3 for joins in (True, False) for number in range(300)}
    )
    planned = build_plan(app, facts)
    assert {edge.partitions for edge in planned.streams if edge.role == "intermediate"} == {8}
    assert len(planned.fed[0].streams) == len(planned.join_groups) == 300
    assert len(streams_of_join(planned, planned.join_groups[0].join)) == 302

"""Operators with several inputs: what they ask of each, whose counts agree, and what moves
before which input.
"""

from __future__ import annotations

import pytest

from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import PartitionCountMismatchError, PlanningError
from tests.orchestration.planner.planning import application, catalog, dataset, streams_of_join
from tests.orchestration.planner.several_inputs import BY_K, StreamJoin, Together, Window


def test_a_join_of_two_streams_needs_equal_counts_and_is_a_group() -> None:
    app = application()
    app.input_stream("lake.s1").apply(BY_K, app.input_stream("lake.s2"))
    group = build_plan(app, catalog(s1=16, s2=16)).join_groups[0]
    assert (group.join, group.dataset, group.streams, group.partitions) == (
        "stream-join-3", None, ("lake.s1", "lake.s2"), 16
    )  # fmt: skip
    with pytest.raises(PartitionCountMismatchError) as failure:
        build_plan(app, catalog(s1=16, s2=8))
    assert failure.value.operator == "stream-join-3"


@pytest.mark.parametrize("moves_first", [True, False])
def test_an_intermediate_stream_takes_the_count_of_the_stream_that_it_is_joined_with(
    moves_first: bool,
) -> None:
    app = application()
    s1, moved = app.input_stream("lake.s1"), app.input_stream("lake.s2").partition_by("k")
    (moved.apply(BY_K, s1) if moves_first else s1.apply(BY_K, moved)).join(
        app.table(dataset("t", 16)), on="k"
    )
    planned = build_plan(app, catalog(s1=16, s2=8, t=1))
    edge = planned.stream("app-partition-by-3")
    assert (edge.partitions, edge.count_from) == (16, "inferred from lake.s1 in stream-join-4")
    assert streams_of_join(planned, "join-5-t") == ("lake.s1", "app-partition-by-3", "lake.t")


def test_counts_travel_across_joins_of_streams_to_those_that_are_open() -> None:
    app = application(intermediate_partitions=5)
    moved = [app.input_stream(f"lake.s{number}").partition_by("k") for number in range(3)]
    both = moved[0].apply(BY_K, moved[1])
    both.apply(BY_K, moved[2].join(app.table(dataset("t", 12)), on="k", select=[]))
    execution_plan = build_plan(app, catalog(s0=3, s1=4, s2=7, t=1))
    assert [edge.partitions for edge in execution_plan.streams if edge.role == "intermediate"] == [
        12,
        12,
        12,
    ]
    alone = application(intermediate_partitions=5)
    streams = [alone.input_stream(f"lake.s{number}").partition_by("k") for number in range(2)]
    streams[0].apply(BY_K, streams[1])
    assert [edge.partitions for edge in build_plan(alone, catalog(s0=3, s1=4)).streams][-1] == 5


def test_each_input_is_partitioned_by_its_own_columns() -> None:
    app = application()
    moved = app.input_stream("lake.s2").partition_by("id")
    app.input_stream("lake.s1").apply(StreamJoin((("k",), ("id",))), moved)
    assert build_plan(app, catalog(s1=4, s2=7)).join_groups[0].partitions == 4
    wrong = application()
    wrong.input_stream("lake.s1").apply(
        StreamJoin((("k",), ("id",))), wrong.input_stream("lake.s2")
    )
    with pytest.raises(PlanningError) as failure:
        build_plan(wrong, catalog(s1=4, s2=4))
    assert failure.value.operator == "stream-join-3"


def test_a_window_asks_for_the_key_and_for_no_count() -> None:
    app = application()
    app.input_stream("lake.s").apply(Window(("k",)))
    assert build_plan(app, catalog(s=7)).join_groups[0].partitions == 7
    app.input_stream("lake.r").apply(Window(("x",)))
    with pytest.raises(PlanningError) as failure:
        build_plan(app, catalog(s=7, r=3))
    assert failure.value.operator == "window-4"


def test_only_the_input_that_lies_wrong_is_moved() -> None:
    app = application(auto_repartition=True)
    inputs = [app.input_stream(f"lake.s{number}") for number in range(3)]
    inputs[0].apply(StreamJoin((("k",),) * 3), *inputs[1:]).join(app.table(dataset("t", 6)), on="k")
    planned = build_plan(app, catalog(s0=4, s1=6, s2=6, t=1))
    (moved,) = planned.exchanges
    assert (moved.operator, moved.input, moved.partitions) == ("stream-join-4", 0, 6)
    assert planned.join_groups[0].streams == ("app-before-stream-join-4-1", "lake.s1", "lake.s2")
    assert (
        "lake.s0 moves before stream-join-4 into 6 partitions by (k), because it has 4"
        in planned.notes[0]
    )


def test_streams_that_are_joined_with_their_count_open_get_that_of_a_later_join() -> None:
    app = application(auto_repartition=True)
    a, b = (
        app.input_stream("lake.a").partition_by("k"),
        app.input_stream("lake.b").partition_by("x"),
    )
    a.apply(BY_K, b).join(app.table(dataset("t", 9)), on="k")
    planned = build_plan(app, catalog(a=2, b=3, t=1))
    assert [(one.operator, one.input, one.partitions) for one in planned.exchanges] == [
        ("partition-by-2", 0, 9), ("partition-by-4", 0, 3), ("stream-join-5", 1, 9)
    ]  # fmt: skip
    assert "stream-join-5, input 2" in planned.render()


def test_what_lies_alike_in_all_inputs_lies_so_together() -> None:
    app = application()
    both = app.input_stream("lake.s1").apply(Together(), app.input_stream("lake.s2"))
    both.join(app.table(dataset("t", 4)), on="k")
    planned = build_plan(app, catalog(s1=4, s2=4, t=1))
    assert planned.exchanges == ()
    assert planned.operator("join-4-t").partitioned_by == ("k",)
    assert streams_of_join(planned, "join-4-t") == ("lake.s1", "lake.s2", "lake.t")
    with pytest.raises(PartitionCountMismatchError) as failure:
        build_plan(app, catalog(s1=4, s2=5, t=1))
    assert failure.value.operator == "join-4-t"


def test_a_count_that_comes_from_what_is_together_is_reported_by_one_of_its_streams() -> None:
    app = application()
    both = app.input_stream("lake.s1").apply(Together(), app.input_stream("lake.s2"))
    app.input_stream("lake.s3").partition_by("k").apply(BY_K, both)
    moved = build_plan(app, catalog(s1=4, s2=4, s3=9)).stream("app-partition-by-5")
    assert (moved.partitions, moved.count_from) == (4, "inferred from lake.s1 in stream-join-6")


def test_what_is_stored_in_other_counts_is_together_in_none_that_is_known() -> None:
    app = application()
    app.input_stream("lake.s1").apply(Together(), app.input_stream("lake.s2"))
    together = build_plan(app, catalog(s1=4, s2=5)).operator("together-3")
    assert (together.partitioned_by, together.partitions) == ((), 5)
    assert build_plan(app, catalog(s1=4, s2=4)).operator("together-3").partitioned_by == ("k",)


def test_what_is_partitioned_by_other_columns_is_together_by_none() -> None:
    app = application()
    app.input_stream("lake.s1").partition_by("x").apply(
        Together(), app.input_stream("lake.s2")
    ).join(app.table(dataset("t", 4)), on="k")
    with pytest.raises(
        PlanningError, match=r"input 1 of together-4 \(.*\) breaks it: it is partitioned by \(x\)"
    ) as refused:
        build_plan(app, catalog(s1=4, s2=4, t=1))
    assert (
        'Write .partition_by("k") before together-4, on input 1 of together-4'
        in refused.value.next_step
    )


def test_branches_of_one_stream_are_together_as_they_were() -> None:
    app = application()
    s = app.input_stream("lake.s")
    s.filter("a").apply(Together(), s.filter("b")).join(app.table(dataset("t", 4)), on="k")
    assert build_plan(app, catalog(s=4, t=1)).join_groups[0].streams == ("lake.s", "lake.t")


def test_what_is_together_moves_before_the_join_where_its_streams_have_other_counts() -> None:
    app = application(auto_repartition=True)
    streams = [app.input_stream(f"lake.s{number}") for number in range(3)]
    both = streams[0].apply(Together(), *streams[1:])
    both.join(app.table(dataset("t", 4)), on="k")
    (moved,) = build_plan(app, catalog(s0=4, s1=5, s2=4, t=1)).exchanges
    assert (moved.operator, moved.partitions, moved.why) == (
        "join-5-t",
        4,
        "the stream: it has 5 partitions",
    )
    assert build_plan(app, catalog(s0=4, s1=4, s2=4, t=1)).exchanges == ()

"""Counts of joined streams: the figures and the table of cases of SAMZA-1889, with adjunct
datasets.

In this project one side of a join is always a dataset, which has a count of its own.
"""

from __future__ import annotations

import pytest

from dagster_adjunct.orchestration.planner.partition_counts import assign_counts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    PartitionCountMismatchError,
    PlanningError,
)
from tests.orchestration.planner.planning import application, catalog, dataset, streams_of_join


def test_figure_3_equal_counts_are_accepted_and_unequal_ones_refused():
    app = application()
    app.input_stream("lake.s1").join(app.table(dataset("t", 16)), on="k", select=[])
    group = build_plan(app, catalog(s1=16, t=16)).join_groups[0]
    assert (group.join, group.streams, group.partitions) == ("join-2-t", ("lake.s1", "lake.t"), 16)
    with pytest.raises(PartitionCountMismatchError) as caught:
        build_plan(app, catalog(s1=8, t=16))
    assert (
        f"{caught.value.problem} {caught.value.next_step}"
        == "join-2-t needs equal partition counts: lake.s1 has 8 (input), lake.t has 16 (dataset"
        ' t). At join-2-t: move lake.s1 with .partition_by("k") before it (the fewest'
        " changes); or rewrite dataset 't' in place (adjunct dataset repartition t --partitions"
        " 8 --reason …) and declare it with partitions=8. Or set auto_repartition=True on the"
        " application."
    )


def test_figure_4_an_intermediate_stream_gets_the_count_of_what_it_is_joined_with():
    app = application()
    app.input_stream("lake.s2").partition_by("k").join(app.table(dataset("t", 16)), on="k")
    edge = build_plan(app, catalog(s2=8, t=4)).stream("app-partition-by-2")
    assert (edge.role, edge.partitions, edge.count_from) == (
        "intermediate",
        16,
        "inferred from dataset t in join-3-t",
    )


def test_figure_5_an_intermediate_stream_that_needs_two_counts_is_rejected():
    app = application()
    moved = app.input_stream("lake.s2").partition_by("k")
    moved.join(app.table(dataset("a", 16)), on="k", select=[]).join(
        app.table(dataset("b", 8)), on="k", select=[]
    )
    with pytest.raises(PartitionCountMismatchError) as caught:
        build_plan(app, catalog(s2=8, a=1, b=1))
    assert (
        caught.value.problem
        == "join-4-b needs equal partition counts: app-partition-by-2 has 16 (inferred from dataset"
        " a in join-3-a), lake.a has 16 (dataset a), lake.b has 8 (dataset b)."
    )
    assert '.partition_by("k")' in caught.value.next_step


def fed(s1_moves: bool, s2_moves: bool, buckets: int):
    """Table T with `buckets`, fed by S1 and joined with S2, either of them behind a
    partition_by.
    """
    app = application()
    table = app.table(dataset("t", buckets))
    s1 = app.input_stream("lake.s1")
    (s1.partition_by("k") if s1_moves else s1).send_to(table)
    s2 = app.input_stream("lake.s2")
    (s2.partition_by("k") if s2_moves else s2).join(table, on="k", select=[])
    return app


def test_case_1_two_inputs_must_be_equal():
    planned = build_plan(fed(False, False, 8), catalog(s1=8, s2=8, t=8))
    assert streams_of_join(planned, "join-4-t") == ("lake.s1", "lake.s2", "lake.t")
    assert planned.join_groups[0].streams == ("lake.s2", "lake.t")
    assert [
        (fed_dataset.dataset, fed_dataset.streams, fed_dataset.sinks) for fed_dataset in planned.fed
    ] == [("t", ("lake.s1",), ("send-to-table-2-t",))]
    with pytest.raises(PartitionCountMismatchError) as caught:
        build_plan(fed(False, False, 8), catalog(s1=4, s2=8, t=8))
    assert (
        caught.value.problem
        == "join-4-t needs equal partition counts: lake.s1 has 4 (input), lake.s2 has 8 (input),"
        " lake.t has 8 (dataset t); most have 8: lake.s2, lake.t."
    )
    assert (
        'At send-to-table-2-t: move lake.s1 with .partition_by("k") before it'
        in caught.value.next_step
    )
    with pytest.raises(PartitionCountMismatchError):
        build_plan(fed(False, False, 8), catalog(s1=8, s2=4, t=8))


def test_case_2_an_intermediate_stream_is_set_to_the_tables_input():
    planned = build_plan(fed(False, True, 8), catalog(s1=8, s2=4, t=8))
    assert [edge.partitions for edge in planned.streams if edge.role == "intermediate"] == [8]


def test_case_3_the_intermediate_stream_behind_a_table_is_set_to_the_joined_input():
    planned = build_plan(fed(True, False, 8), catalog(s1=3, s2=8, t=8))
    assert [edge.partitions for edge in planned.streams if edge.role == "intermediate"] == [8]


def test_case_4_two_intermediate_streams_are_set_to_what_their_join_is_joined_with():
    app = application()
    table = app.table(dataset("t", 8))
    app.input_stream("lake.s1").partition_by("k").send_to(table)
    joined = app.input_stream("lake.s2").partition_by("k").join(table, on="k", select=[])
    joined.join(app.table(dataset("t3", 8)), on="k", select=[])
    planned = build_plan(app, catalog(s1=3, s2=5, t=8, t3=1))
    assert [edge.partitions for edge in planned.streams if edge.role == "intermediate"] == [8, 8]
    # S1 takes part in the second join too, by way of the table.
    assert streams_of_join(planned, "join-7-t3") == (
        "app-partition-by-2",
        "app-partition-by-5",
        "lake.t3",
    )


def test_cases_1_and_2_hold_for_side_inputs_with_the_count_of_the_dataset():
    app = application()
    side = app.table(dataset("t", 8))
    app.input_stream("lake.s2").partition_by("k").join(side, on="k")
    # the side input has 3; the dataset is bucketed into 8 all the same
    planned = build_plan(app, catalog(s2=4, t=3))
    edge = planned.stream("lake.t")
    assert (edge.role, edge.partitions, edge.dataset, edge.count_from) == (
        "side-input",
        8,
        "t",
        "dataset t",
    )
    assert planned.stream("app-partition-by-2").partitions == 8
    direct = application()
    direct.input_stream("lake.s2").join(direct.table(dataset("t", 8)), on="k")
    with pytest.raises(PartitionCountMismatchError) as failure:
        build_plan(direct, catalog(s2=3, t=3))
    assert failure.value.operator == "join-2-t"


def test_a_count_travels_through_a_chain_of_joins():
    groups = {"j3": ("i2", "i3"), "j2": ("i1", "i2"), "j1": ("s1", "i1")}
    counts = assign_counts(
        {"s1": 12, "i1": None, "i2": None, "i3": None, "alone": None}, groups, default=5
    )
    assert counts.partitions == {"s1": 12, "i1": 12, "i2": 12, "i3": 12, "alone": 5}
    assert counts.conflicts == ()
    assert (counts.inferred["i3"].source, counts.inferred["i3"].join) == ("i2", "j3")


def test_a_conflict_at_the_far_end_of_a_chain_is_found():
    groups = {"j1": ("i1", "i2"), "j2": ("i2", "s9"), "j3": ("s1", "i1")}
    assert assign_counts({"s1": 12, "s9": 9, "i1": None, "i2": None}, groups, default=5).conflicts


def test_a_group_of_open_counts_gets_the_default():
    counts = assign_counts({"s1": 4, "i1": None, "i2": None}, {"j": ("i1", "i2")}, default=7)
    assert (counts.partitions["i1"], counts.partitions["i2"]) == (7, 7)


def test_three_joins_in_a_row_take_one_count_from_one_exchange():
    app = application()
    stream = app.input_stream("lake.s").partition_by("k")
    for name in ("a", "b", "c"):
        stream = stream.filter("true").join(app.table(dataset(name, 8)), on="k", select=[])
    planned = build_plan(app, catalog(s=3, a=1, b=1, c=1))
    assert [group.partitions for group in planned.join_groups] == [8, 8, 8]
    assert len(planned.exchanges) == 1


def intermediate(app, streams) -> tuple[int | None, str]:
    planned = build_plan(app, streams)
    edge = next(edge for edge in planned.streams if edge.role == "intermediate")
    return edge.partitions, edge.count_from


def test_what_no_join_decides_gets_the_most_of_inputs_and_outputs_capped_at_256():
    app = application()
    app.input_stream("lake.s").partition_by("x").send_to(
        app.output_stream("lake.out", partitions=20, key="x")
    )
    assert intermediate(app, catalog(s=12)) == (20, "most of inputs and outputs, lake.out")
    assert intermediate(app, catalog(s=256)) == (256, "most of inputs and outputs, lake.s")
    assert intermediate(app, catalog(s=257)) == (
        256,
        "most of inputs and outputs, lake.s, capped at 256",
    )


def test_what_the_application_sets_comes_before_the_default():
    app = application(intermediate_partitions=7)
    app.input_stream("lake.s").partition_by("x")
    assert intermediate(app, catalog(s=12)) == (7, "intermediate_partitions of the application")


def test_a_count_given_with_partition_by_stands_and_can_conflict():
    app = application(intermediate_partitions=7)
    app.input_stream("lake.s").partition_by("k", partitions=4).join(
        app.table(dataset("t", 4)), on="k", select=[]
    )
    assert intermediate(app, catalog(s=12, t=1)) == (4, "partition_by(partitions=4)")
    app.input_stream("lake.r").partition_by("k", partitions=5).join(
        app.table(dataset("u", 4)), on="k"
    )
    with pytest.raises(PartitionCountMismatchError) as failure:
        build_plan(app, catalog(s=12, r=12, t=1, u=1))
    assert failure.value.operator == "join-6-u"


def test_a_broadcast_dataset_asks_for_nothing():
    app = application()
    app.input_stream("lake.s").join(app.table(dataset("t")), on="k")
    planned = build_plan(app, catalog(s=12, t=3))
    assert planned.join_groups == ()
    assert planned.stream("lake.t").partitions is None


def test_a_stream_that_is_not_there_is_named_with_those_that_are():
    app = application()
    app.input_stream("lake.s").join(app.table(dataset("t", 4)), on="k")
    with pytest.raises(PlanningError) as failure:
        build_plan(app, catalog(t=4))
    assert failure.value.operator == "input-1"
    assert failure.value.stream == "lake.s"
    with pytest.raises(PlanningError) as failure:
        build_plan(app, catalog(s=4))
    assert failure.value.stream == "lake.t"
    with pytest.raises(PlanningError, match="no input stream"):
        build_plan(application(), {})


@pytest.mark.parametrize("unset", [None, -1])
def test_an_intermediate_setting_of_minus_one_is_none(unset):
    app = application(intermediate_partitions=unset)
    app.input_stream("lake.s").partition_by("x")
    assert intermediate(app, catalog(s=12)) == (12, "most of inputs and outputs, lake.s")


@pytest.mark.parametrize("wrong", [0, -2, -100, 1.5, True, "8"])
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigurationError, match="intermediate_partitions is"):
        application(intermediate_partitions=wrong)
    with pytest.raises(ConfigurationError) as failure:
        application().input_stream("lake.s").partition_by("k", partitions=wrong)
    assert failure.value.argument == "partitions"


@pytest.mark.parametrize("count", [0, -1, None])
def test_a_stream_whose_count_is_not_known_is_named(count):
    with pytest.raises(ConfigurationError) as caught:
        catalog(s=count)
    assert caught.value.argument == "partitions"

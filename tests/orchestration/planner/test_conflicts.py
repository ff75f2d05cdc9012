"""Counts that can't agree: all of an application's joins in one error, what most have, and the
cheapest change.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import currentframe
from pathlib import Path

import pytest

from dagster_adjunct.orchestration.operators.stream_facts import SPARK, Catalog, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    PartitionCountMismatchError,
    PlanningError,
)
from dagster_adjunct.resources.schemas.schema import Schema
from tests.orchestration.planner.planning import application, catalog, dataset
from tests.orchestration.planner.several_inputs import BY_K, Together


def refused(app, facts) -> PartitionCountMismatchError:
    with pytest.raises(PartitionCountMismatchError) as caught:
        build_plan(app, facts)
    return caught.value


def sized(**streams: tuple[int, int]) -> Catalog:
    """Streams by name, each with its partitions and bytes."""
    sizes = {f"lake.{name}": size for name, (_, size) in streams.items()}
    return Catalog(
        catalog(**{name: count for name, (count, _) in streams.items()}), size_of=sizes.get
    )


def test_every_join_that_can_not_be_is_reported_with_its_streams():
    app = application()
    s = app.input_stream("lake.s")
    s.join(app.table(dataset("a", 4)), on="k", select=[]).join(
        app.table(dataset("b", 16)), on="k", select=[]
    )
    s.join(app.table(dataset("c", 8)), on="k", select=[])
    app.input_stream("lake.r").apply(BY_K, s)
    error = refused(app, catalog(s=8, r=5, a=1, b=1, c=1))
    assert [(join, dict(counts)) for join, counts in error.conflicts] == [
        ("join-2-a", {"lake.s": 8, "lake.a": 4}),
        ("join-3-b", {"lake.s": 8, "lake.b": 16}),
        ("stream-join-6", {"lake.s": 8, "lake.r": 5}),
    ]
    assert (error.operator, error.counts) == ("join-2-a", error.conflicts[0][1])
    for join, _ in error.conflicts:
        assert f"{join} needs equal partition counts: lake.s has 8 (input)" in error.problem
        assert f"At {join}: " in error.next_step


def test_the_lines_of_the_joins_are_reported():
    app = application()
    s = app.input_stream("lake.s")
    s.join(app.table(dataset("a", 4)), on="k", select=[])
    here = Path(__file__).name
    first = currentframe().f_lineno - 2
    one = refused(app, catalog(s=8, a=1))
    assert one.declared_at.endswith(f"{here}:{first}")
    assert str(one).startswith(f"{one.declared_at}: join-2-a needs")
    s.filter("true").join(app.table(dataset("b", 4)), on="k", select=[])
    two = refused(app, catalog(s=8, a=1, b=1))
    assert two.problem.startswith("2 joins can't be proven:\n- ")
    assert f"{here}:{first}: join-2-a needs" in two.problem
    assert f"{here}:{first + 6}: join-4-b needs" in two.problem


def test_a_mismatch_in_the_second_of_two_chained_joins_only():
    app = application()
    s = app.input_stream("lake.s").join(app.table(dataset("a", 8)), on="k", select=[])
    s.join(app.table(dataset("b", 4)), on="k", select=[])
    error = refused(app, catalog(s=8, a=1, b=1))
    assert [join for join, _ in error.conflicts] == ["join-3-b"]
    assert (
        error.problem
        == "join-3-b needs equal partition counts: lake.s has 8 (input), lake.b has 4 (dataset b)."
    )


def test_figure_5_with_two_inputs_of_different_counts():
    app = application()
    moved = app.input_stream("lake.s2").partition_by("k")
    moved.apply(BY_K, app.input_stream("lake.s1"))
    moved.apply(BY_K, app.input_stream("lake.s4"))
    error = refused(app, catalog(s1=16, s2=5, s4=8))
    assert (
        error.problem
        == "stream-join-6 needs equal partition counts: app-partition-by-2 has 16 (inferred from"
        " lake.s1 in stream-join-4), lake.s1 has 16 (input), lake.s4 has 8 (input)."
    )


@pytest.mark.parametrize("others", [8, 16])
def test_what_most_have_is_named(others):
    app = application()
    streams = [app.input_stream(f"lake.s{number}") for number in range(3)]
    streams[0].apply(replace(BY_K, columns=(("k",),) * 3), *streams[1:])
    error = refused(app, catalog(s0=4, s1=others, s2=others))
    assert f"; most have {others}: lake.s1, lake.s2." in error.problem
    assert 'move lake.s0 with .partition_by("k") before it (the fewest changes)' in error.next_step


@pytest.mark.parametrize(
    ("stream", "table", "first"), [(5_000, 40_000, "move"), (40_000, 5_000, "rewrite")]
)
def test_the_cheapest_change_comes_first(stream, table, first):
    app = application()
    app.input_stream("lake.s").join(app.table(dataset("t", 4)), on="k", select=[])
    error = refused(app, sized(s=(8, stream), t=(1, table)))
    ways = error.next_step.split("; or ")
    assert ways[0].startswith(f"At join-2-t: {first} ")
    assert ways[0].endswith("5 kB in all (the cheapest by bytes)")
    assert "40 kB in all" in ways[1]


def test_without_all_sizes_the_fewest_changes_come_first():
    app = application()
    streams = [app.input_stream(f"lake.s{number}") for number in range(3)]
    streams[0].apply(replace(BY_K, columns=(("k",),) * 3), *streams[1:])
    facts = catalog(s0=8) | sized(s1=(4, 1), s2=(4, 1))
    assert (
        'At stream-join-4: move lake.s0 with .partition_by("k") before it (the fewest'
        in refused(app, facts).next_step
    )
    facts = sized(s0=(8, 1000), s1=(4, 100), s2=(4, 100))
    assert (
        'lake.s2 with .partition_by("k") before it, 200 bytes in all (the cheapest'
        in refused(app, facts).next_step
    )


def test_a_change_that_breaks_another_join_is_not_proposed():
    app = application()
    table = app.table(dataset("t", 4))
    app.input_stream("lake.right").join(table, on="k", select=[])
    app.input_stream("lake.wrong").join(table, on="k", select=[])
    error = refused(app, sized(right=(4, 1), wrong=(8, 1_000_000), t=(1, 1)))
    assert error.next_step.startswith(
        'At join-4-t: move lake.wrong with .partition_by("k") before it, 1 MB in all. Or set'
        " auto_repartition"
    )


def test_what_an_open_count_was_inferred_from_may_be_the_cheapest_to_change():
    def described(partitions: int):
        app = application()
        moved = app.input_stream("lake.s").partition_by("k")
        joined = moved.join(app.table(dataset("small", partitions)), on="k", select=[])
        joined.join(app.table(dataset("large", 16)), on="k", select=[])
        return app

    facts = sized(s=(4, 10**9), small=(1, 1_000), large=(1, 10**9))
    assert refused(described(8), facts).next_step.startswith(
        "At join-4-large: rewrite dataset 'small' in place (adjunct dataset repartition small"
        " --partitions 16 --reason …) and declare it with partitions=16, 1 kB in all (the cheapest"
        " by bytes); or move app-partition-by-2 with "
    )
    build_plan(described(16), facts)


def test_a_stream_that_an_open_count_was_inferred_from_may_move_where_they_meet():
    app = application()
    moved = app.input_stream("lake.s2").partition_by("k")
    moved.apply(BY_K, app.input_stream("lake.s1"))
    moved.apply(BY_K, app.input_stream("lake.s4"))
    error = refused(app, sized(s1=(16, 100), s2=(5, 10**9), s4=(8, 10**9)))
    assert error.next_step.startswith(
        'At stream-join-6: move lake.s1 with .partition_by("k") before stream-join-4, 100 bytes in'
        " all (the cheapest"
    )
    mended = application()
    moved = mended.input_stream("lake.s2").partition_by("k")
    moved.apply(BY_K, mended.input_stream("lake.s1").partition_by("k"))
    moved.apply(BY_K, mended.input_stream("lake.s4"))
    build_plan(mended, catalog(s1=16, s2=5, s4=8))


def test_what_a_count_was_inferred_from_is_left_where_another_join_relies_on_it():
    app = application()
    small = app.table(dataset("small", 8))
    app.input_stream("lake.other").join(small, on="k", select=[])
    moved = app.input_stream("lake.s").partition_by("k").join(small, on="k", select=[])
    moved.join(app.table(dataset("large", 16)), on="k", select=[])
    facts = sized(s=(4, 10**9), other=(8, 10**9), small=(1, 1_000), large=(1, 10**9))
    assert "rewrite dataset 'small'" not in refused(app, facts).next_step


def test_a_count_that_was_given_is_given_again():
    app = application()
    app.input_stream("lake.s").partition_by("k", partitions=3).join(
        app.table(dataset("t", 4)), on="k", select=[]
    )
    error = refused(app, sized(s=(8, 100), t=(1, 100)))
    assert (
        "At join-3-t: write partition_by(…, partitions=4) at partition-by-2, 0 bytes in all (the"
        " cheapest" in (error.next_step)
    )


def test_proposed_changes_are_a_way_out():
    app = application()
    s = app.input_stream("lake.s")
    s.join(app.table(dataset("t", 4)), on="k", select=[])
    assert (
        'move lake.s with .partition_by("k") before it' in refused(app, catalog(s=8, t=1)).next_step
    )
    mended = application()
    mended.input_stream("lake.s").partition_by("k").join(
        mended.table(dataset("t", 4)), on="k", select=[]
    )
    build_plan(mended, catalog(s=8, t=1))


def test_a_table_fed_by_streams_of_different_counts_is_refused_where_it_is_joined():
    for joined in (False, True):
        app = application()
        table = app.table(dataset("t", 8))
        app.input_stream("lake.s1").send_to(table)
        app.input_stream("lake.s2").send_to(table)
        reading = app.input_stream("lake.s3")
        if not joined:
            build_plan(app, catalog(s1=8, s2=4, s3=8, t=1))
            continue
        for _ in range(3):
            reading.join(table, on="k", select=[])
        error = refused(app, catalog(s1=8, s2=4, s3=8, t=1))
        assert error.problem.startswith(
            "join-6-t (and 2 more joins of its table) needs equal partition counts: lake.s1 has 8"
            " (input), lake.s2 has 4 (input), lake.s3 has 8 (input), lake.t has 8 (dataset t); most"
            " have 8: lake.s1, lake.s3, lake.t."
        )
        assert (
            'At send-to-table-4-t: move lake.s2 with .partition_by("k") before it'
            in error.next_step
        )


def test_what_agrees_takes_part_too_and_is_counted_with_the_most():
    app = application()
    table = app.table(dataset("t", 8))
    for number in (1, 2, 3):
        app.input_stream(f"lake.s{number}").send_to(table)
    app.input_stream("lake.s4").join(table, on="k", select=[])
    app.input_stream("lake.s5").join(table, on="k", select=[])
    error = refused(app, catalog(s1=8, s2=8, s3=4, s4=4, s5=8, t=1))
    counted = {"lake.s1": 8, "lake.s2": 8, "lake.s3": 4, "lake.s4": 4, "lake.s5": 8, "lake.t": 8}
    assert [(join, dict(counts)) for join, counts in error.conflicts] == [("join-8-t", counted)]
    assert "; most have 8: lake.s1, lake.s2, lake.s5, lake.t." in error.problem

    app = application()
    table = app.table(dataset("t", 8))
    app.input_stream("lake.s1").send_to(table)
    app.input_stream("lake.s2").join(table, on="k", select=[])
    error = refused(app, catalog(s1=8, s2=4, t=1))
    assert dict(error.counts) == {"lake.s1": 8, "lake.s2": 4, "lake.t": 8}


def test_what_was_brought_together_before_the_join_is_reported():
    app = application()
    both = app.input_stream("lake.s1").apply(Together(), app.input_stream("lake.s2"))
    both.filter("true").join(app.table(dataset("t", 4)), on="k", select=[])
    error = refused(app, catalog(s1=4, s2=5, t=1))
    assert dict(error.counts) == {"lake.s1": 4, "lake.s2": 5, "lake.t": 4}
    assert 'At together-3: move lake.s2 with .partition_by("k") before it' in error.next_step


def test_records_that_are_partitioned_by_other_columns_are_reported_next_to_counts():
    app = application()
    by_x = StreamFacts("lake.x", 4, ("x",), SPARK)
    app.input_stream("lake.x").join(app.table(dataset("a", 4)), on="k", select=[])
    app.input_stream("lake.s").join(app.table(dataset("b", 4)), on="k", select=[])
    error = refused(app, catalog(by_x, s=8, a=1, b=1))
    assert "join-4-b needs equal partition counts" in error.problem
    assert "join-2-a: stream lake.x is not partitioned like dataset a" in error.problem
    assert 'Write .partition_by("k") before join-2-a.' in error.next_step


def test_where_only_the_columns_differ_both_joins_are_reported():
    app = application()
    facts = [StreamFacts(f"lake.{name}", 4, ("x",), SPARK) for name in ("x", "y")]
    for facts_of in facts:
        app.input_stream(facts_of.name).join(
            app.table(dataset(f"of-{facts_of.name[-1]}", 4)), on="k", select=[]
        )
    with pytest.raises(PlanningError) as caught:
        build_plan(app, catalog(*facts, **{"of-x": 1, "of-y": 1}))
    assert not isinstance(caught.value, PartitionCountMismatchError)
    assert "lake.x is not partitioned" in caught.value.problem
    assert "lake.y is not partitioned" in caught.value.problem


def test_hundreds_of_conflicts_are_counted_beyond_the_first():
    app = application()
    s = app.input_stream("lake.s")
    table = app.table(dataset("t", 4))
    for _ in range(300):
        s.filter("true").join(table, on="k", select=[])
    error = refused(app, catalog(s=8, t=1))
    assert len(error.conflicts) == 300
    assert "and 280 more: join-43-t, " in error.problem
    assert len(str(error)) < 12_000


def test_a_strict_application_is_not_reported_to_let_the_planner_move_records():
    app = application(strict=True)
    app.input_stream("lake.s").join(app.table(dataset("t", 4)), on="k", select=[])
    typed = [StreamFacts(f"lake.{name}", 8, ("k",), SPARK, Schema.of(k="int")) for name in "st"]
    assert "auto_repartition" not in refused(app, catalog(*typed)).next_step
    with pytest.raises(ConfigurationError) as failure:
        application(strict=True, auto_repartition=True)
    assert failure.value.argument == "strict"


def test_the_same_change_is_reported_once_and_one_join_is_counted_as_one():
    app = application()
    s, table = app.input_stream("lake.s"), app.table(dataset("t", 4))
    for number in range(12):
        s.filter(f"k > {number}").join(table, on="k", select=[])
    error = refused(app, catalog(s=8, t=1))
    tried, others = error.next_step.split(" At ")[:2]
    assert tried.startswith("At join-3-t, join-5-t, ")
    assert "not tried out" not in tried
    assert others.startswith("join-23-t, join-25-t: move lake.s")
    assert "(the fewest changes; not verified, because there are many conflicts)" in others

    app = application()
    app.input_stream("lake.s").join(app.table(dataset("t", 4)), on={"other": "k"}, select=[])
    assert refused(app, catalog(s=8, t=1)).problem.startswith("1 join can't be proven:\n- ")


def test_what_a_merge_brings_together_is_no_stream():
    app = application()
    merged = app.input_stream("lake.s").merge(app.input_stream("lake.r"))
    merged.join(app.table(dataset("t", 4)), on="k", select=[])
    with pytest.raises(PlanningError) as failure:
        build_plan(app, catalog(StreamFacts("lake.r", 4, ("k",), "kafka-murmur2"), s=4, t=4))
    assert failure.value.operator == "join-4-t"
    assert failure.value.dataset == "t"

"""merge, as it is planned: columns that must agree, and where the records of several streams
lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.message_stream import MessageStream
from dagster_adjunct.orchestration.code_location.metadata import output_columns
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, LineageNode, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    PartitionCountMismatchError,
    PlanningError,
)
from dagster_adjunct.resources.schemas.schema import Schema
from tests.orchestration.planner.planning import catalog, dataset

RECORDS = Schema.of(k="string", v="int")
A, B = (StreamFacts(f"lake.{name}", 4, ("k",), SPARK, RECORDS) for name in "ab")
C = StreamFacts("lake.c", 8, ("k",), SPARK, RECORDS)
OTHER = StreamFacts("kafka.a", 4, ("k",), "kafka-murmur2", Schema.of(v="int", k="string"))
NO_KEY = StreamFacts("lake.n", 1, (), SPARK, RECORDS)
ALL = catalog(
    A, B, C, NO_KEY, OTHER, StreamFacts("lake.t", 1, ("k",), SPARK, Schema.of(k="string", w="int"))
)

Inputs = Callable[[str], MessageStream]


def application() -> tuple[Application, Inputs]:
    app = Application("app")
    streams: dict[str, MessageStream] = {}

    def stream(name: str) -> MessageStream:
        if name not in streams:
            streams[name] = app.input_stream(name if "." in name else f"lake.{name}")
        return streams[name]

    return app, stream


LYING: dict[str, tuple[Callable[[Inputs], MessageStream], tuple[str, ...]]] = {
    "streams that lie alike": (lambda s: s("a").merge(s("b")), ("k",)),
    "two ways of one stream": (
        lambda s: s("a").filter("v > 0").merge(s("a").with_columns(v="v + 1")),
        ("k",),
    ),
    "one stream twice": (lambda s: s("a").merge(s("a")), ("k",)),
    "counts that differ, and nobody needs": (lambda s: s("a").merge(s("c")), ()),
    "two systems": (lambda s: s("a").merge(s("kafka.a")), ()),
    "another system twice": (lambda s: s("kafka.a").merge(s("kafka.a")), ()),
    "one that is lost": (lambda s: s("a").merge(s("b").select("upper(k) as k", "v")), ()),
    "different keys": (lambda s: s("a").partition_by("v").merge(s("b")), ()),
    "all moved": (lambda s: s("a").partition_by("v").merge(s("c").partition_by("v")), ("v",)),
}


@pytest.mark.parametrize(
    ("make", "target", "is_noted"),
    [
        (lambda s: s("a").merge(s("b")), "lake.out", True),
        (lambda s: s("a").merge(s("b")).filter("v > 0").partition_by("v"), "lake.out", True),
        (lambda s: s("a").merge(s("b")), "kafka.out", False),
        (lambda s: s("a").filter("v > 0").merge(s("a").filter("v < 0")), "lake.out", False),
        (lambda s: s("kafka.a"), "lake.out", False),
    ],
)
def test_the_plan_notes_that_merged_records_have_no_positions_of_one_input(
    make: Callable[[Inputs], MessageStream], target: str, is_noted: bool
) -> None:
    app, stream = application()
    send = make(stream).send_to(app.output_stream(target, partitions=4, key="k"))
    notes = [note for note in build_plan(app, ALL).notes if 'epochs="latest"' in note]
    assert [note.partition(":")[0] for note in notes] == [send.operator] * is_noted


@pytest.mark.parametrize("case", LYING)
def test_records_lie_as_all_inputs_do(case: str) -> None:
    make, by = LYING[case]
    app, stream = application()
    merged = make(stream)
    planned = build_plan(app, ALL).operator(merged.operator)
    assert planned.partitioned_by == by
    assert planned.columns is not None
    assert sorted(planned.columns) == ["k", "v"]


def test_the_first_input_says_the_order_of_columns() -> None:
    app, stream = application()
    one, two = stream("a").merge(stream("kafka.a")), stream("kafka.a").merge(stream("a"))
    planned = build_plan(app, ALL)
    assert (planned.operator(one.operator).columns, planned.operator(two.operator).columns) == (
        ("k", "v"),
        ("v", "k"),
    )


def test_a_join_behind_it_makes_all_counts_agree() -> None:
    app, stream = application()
    moved = stream("c").partition_by("k")
    stream("a").merge(stream("b"), moved).join(app.table(dataset("t", 4)), on="k")
    planned = build_plan(app, ALL)
    assert planned.operator(moved.operator).partitions == 4

    app, stream = application()
    stream("a").merge(stream("c")).join(app.table(dataset("t", 4)), on="k")
    with pytest.raises(PartitionCountMismatchError) as failure:
        build_plan(app, ALL)
    assert failure.value.operator == "join-4-t"


BREAKING: dict[str, tuple[Callable[[Inputs], MessageStream], str]] = {
    "the second": (
        lambda s: s("a").merge(s("b").partition_by("v")),
        "input 2 of merge-4 (app-partition-by-3)",
    ),
    "the first": (
        lambda s: s("a").partition_by("v").merge(s("b")),
        "input 1 of merge-4 (app-partition-by-2)",
    ),
    "the third": (
        lambda s: s("a").merge(s("b"), s("c").partition_by("v")),
        "input 3 of merge-5 (app-partition-by-4)",
    ),
    "one that is lost": (
        lambda s: s("a").merge(s("b").select("upper(k) as k", "v")),
        "input 2 of merge-4 (lake.b)",
    ),
    "another hash": (lambda s: s("a").merge(s("kafka.a")), "input 2 of merge-3 (kafka.a)"),
}


@pytest.mark.parametrize("case", BREAKING)
def test_the_input_of_a_merge_that_breaks_the_partitioning_is_named(case: str) -> None:
    make, named = BREAKING[case]
    app, stream = application()
    make(stream).join(app.table(dataset("t", 4)), on="k")
    with pytest.raises(PlanningError) as refused:
        build_plan(app, ALL)
    assert f"{named} breaks it" in refused.value.problem
    assert f'.partition_by("k") before {named.split()[3]}, on {named}' in refused.value.next_step


def test_moving_the_input_that_breaks_the_partitioning_of_a_merge_mends_it() -> None:
    app, stream = application()
    stream("a").merge(stream("kafka.a").partition_by("k")).join(app.table(dataset("t", 4)), on="k")
    assert build_plan(app, ALL).operator("merge-4").partitioned_by == ("k",)


def test_an_input_without_a_key_is_moved_by_that_of_the_others() -> None:
    app, stream = application()
    stream("a").merge(stream("n")).join(app.table(dataset("t", 4)), on="k")
    with pytest.raises(PartitionCountMismatchError) as refused:
        build_plan(app, ALL)
    assert 'move lake.n with .partition_by("k")' in refused.value.next_step


REFUSED: dict[str, tuple[Callable[[Inputs], MessageStream], type[AdjunctError], str]] = {
    "nothing to merge with": (lambda s: s("a").merge(), ConfigurationError, "got no other stream"),
    "a column less": (
        lambda s: s("a").merge(s("b").select("k")),
        PlanningError,
        "merge-4: .*select-3 has no 'v', unlike input-1",
    ),
    "a column more": (
        lambda s: s("a").merge(s("b").with_columns(w="1")),
        PlanningError,
        "with-columns-3 has 'w', unlike input-1",
    ),
    "another name": (
        lambda s: s("a").merge(s("b").select("k", "v as V")),
        PlanningError,
        "has no 'v' and has 'V', unlike",
    ),
    "another type": (
        lambda s: s("a").merge(s("b").with_columns(v="cast(v as bigint)")),
        PlanningError,
        "different types of 'v': bigint in with-columns-3, int in input-1",
    ),
    "the third": (
        lambda s: s("a").merge(s("b"), s("c").select("k")),
        PlanningError,
        "select-4 has no 'v'",
    ),
    "another application's": (
        lambda s: s("a").merge(Application("other").input_stream("lake.b")),
        PlanningError,
        "by application 'other'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_agree_is_refused_by_name(case: str) -> None:
    make, kind, message = REFUSED[case]
    app, stream = application()

    def planned() -> None:
        make(stream)
        build_plan(app, ALL)

    with pytest.raises(AdjunctError, match=message) as refused:
        planned()
    assert type(refused.value) is kind


def test_lineage_comes_from_all_inputs() -> None:
    app, stream = application()
    merged = stream("a").merge(stream("b").with_columns(v="v * 2"))
    merged.send_to(app.output_stream("lake.out", partitions=4, key="k"))
    planned = build_plan(app, ALL)
    assert planned.exchanges == ()
    made = output_columns(app, planned)[LineageNode("stream", "lake.out")]
    assert made["v"] == (
        (LineageNode("stream", "lake.a"), "v"),
        (LineageNode("stream", "lake.b"), "v"),
    )


def test_columns_that_are_not_known_are_left_to_the_run() -> None:
    app, stream = application()
    merged = stream("a").merge(stream("b"))
    assert build_plan(app, ALL | {"lake.b": replace(B, schema=None)}).operator(
        merged.operator
    ).columns == ("k", "v")

"""Plans of applications with local tables: where records move, which batch a join meets, and
what is refused.
"""

from __future__ import annotations

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    PartitionCountMismatchError,
    PlanningError,
)
from dagster_adjunct.resources.schemas.schema import Schema
from tests.orchestration.planner.planning import (
    application,
    catalog,
    dataset,
    exchanges_before,
    streams_of_join,
)

COUNTS = Schema.of(k="string", n="bigint")
S = StreamFacts("lake.s", 4, ("k",), SPARK, Schema.of(k="string", n="bigint"))
R = StreamFacts("lake.r", 3, ("n",), SPARK, Schema.of(k="string", n="bigint"))
STREAMS = catalog(S, R)


def counting(app: Application, partitions: int = 4) -> ExecutionPlan:
    counts = app.local_table("counts", key="k", schema=COUNTS, partitions=partitions)
    stream = app.input_stream("lake.s")
    before = stream.join(counts, on="k", how="left", select=["n as m"], name="before")
    before.map("k", "n").send_to(counts).join(counts, on="k", select=["n as o"], name="after")
    return build_plan(app, STREAMS)


def test_records_in_a_tables_buckets_move_neither_to_it_nor_for_a_join_with_it() -> None:
    planned = counting(application())
    assert planned.exchanges == ()
    assert [(group.join, group.partitions) for group in planned.join_groups] == [
        ("join-2-before", 4),
        ("join-5-after", 4),
    ]
    assert (planned.stream("counts").role, planned.stream("counts").partitions) == (
        "local-table",
        4,
    )
    assert planned.task("Partition 3").buckets == ("counts.3",)


def test_records_elsewhere_move_to_a_tables_buckets_and_continue_from_their_place() -> None:
    app = application()
    counts = app.local_table("counts", key="k", schema=COUNTS, partitions=8)
    sent = app.input_stream("lake.r").send_to(counts)
    sent.filter("n > 0").send_to(app.output_stream("lake.out", partitions=3, key="n"))
    (moved,) = build_plan(app, STREAMS).exchanges
    assert (moved.operator, moved.reason, moved.partitioned_by, moved.partitions) == (
        "send-to-table-2-counts", "local table", ("k",), 8,
    )  # fmt: skip
    assert "local table counts has 8 buckets by (k)" in moved.why


def test_a_join_needs_the_count_of_the_table_as_of_any_dataset() -> None:
    with pytest.raises(PartitionCountMismatchError) as caught:
        counting(application(), partitions=8)
    assert caught.value.counts == (("lake.s", 4), ("counts", 8))
    planned = counting(application(auto_repartition=True), partitions=8)
    assert exchanges_before(planned, "join-2-before")


def test_an_intermediate_stream_takes_the_count_of_the_table_that_it_meets() -> None:
    app = application()
    counts = app.local_table("counts", key="k", schema=COUNTS, partitions=5)
    moved = app.input_stream("lake.r").partition_by("k")
    moved.join(counts, on="k", how="left", select=["n as m"]).map("k", "n").send_to(counts)
    planned = build_plan(app, STREAMS)
    assert [(item.reason, item.partitions) for item in planned.exchanges] == [("partition_by", 5)]


def test_a_table_that_is_joined_is_fed_by_streams_of_its_count() -> None:
    for joined in (False, True):
        app = application()
        counts = app.local_table("counts", key="k", schema=COUNTS, partitions=4)
        app.input_stream("lake.r").send_to(counts)
        reading = app.input_stream("lake.s")
        if not joined:
            build_plan(app, STREAMS)
            continue
        reading.join(counts, on="k", select=["n as m"])
        with pytest.raises(PartitionCountMismatchError) as caught:
            build_plan(app, STREAMS)
        assert caught.value.counts == (("lake.r", 3), ("lake.s", 4), ("counts", 4))
        assert (
            'At send-to-table-2-counts: move lake.r with .partition_by("k") before it'
            in caught.value.next_step
        )


def test_records_moved_to_a_table_get_the_count_of_the_join_and_move_once() -> None:
    app = application()
    counts = app.local_table("counts", key="k", schema=COUNTS, partitions=4)
    app.input_stream("lake.r").partition_by("k").send_to(counts)
    app.input_stream("lake.s").join(counts, on="k", select=["n as m"])
    planned = build_plan(app, STREAMS)
    assert [(item.reason, item.partitions) for item in planned.exchanges] == [("partition_by", 4)]
    assert streams_of_join(planned, "join-5-counts") == ("app-partition-by-2", "lake.s", "counts")


def test_a_join_sees_earlier_sends_in_this_batch_and_later_ones_in_the_next() -> None:
    app = application()
    counts = app.local_table("counts", key="k", schema=COUNTS, partitions=4)
    s, r = app.input_stream("lake.s"), app.input_stream("lake.r")
    s.join(counts, on="k", select=["n as m"], name="first")
    s.send_to(counts)
    s.join(counts, on="k", select=["n as m"], name="second")
    r.send_to(counts)
    s.join(counts, on="k", select=["n as m"], name="third")
    planned = build_plan(app, {**STREAMS, **catalog(r=4)})
    first, second = "send-to-table-4-counts", "send-to-table-6-counts"
    assert [(item.join, item.sees, item.last_send) for item in planned.fed_joins] == [
        ("join-3-first", "next batch", None),
        ("join-5-second", "both", first),
        ("join-7-third", "this batch", second),
    ]
    assert [(item.table, item.sends) for item in planned.state] == [("counts", (first, second))]
    text = planned.render()
    assert "join-3-first   counts   next batch\n" in text
    assert (
        f"join-5-second  counts   this batch, up to {first}; later sends in the next batch\n"
        in text
    )
    assert "join-7-third   counts   this batch\n" in text
    assert f"local table counts, written at {first}, {second}. A startpoint that goes back" in text
    assert ExecutionPlan.from_json(planned.to_json()) == planned
    assert "counts" in planned.to_mermaid()


def test_a_dataset_fed_by_its_stream_is_joined_in_the_next_batch() -> None:
    app = application()
    fed = app.table(dataset("t", 4))
    sent = app.input_stream("lake.s").send_to(fed)
    sent.join(fed, on="k", select=[])
    planned = build_plan(app, catalog(s=4, t=4))
    assert [(item.sees, item.last_send) for item in planned.fed_joins] == [("next batch", None)]
    assert planned.state == ()


def test_many_joins_and_senders_of_one_table_are_planned_in_proportion_to_them() -> None:
    app = application()
    counts = app.local_table("counts", key="k", schema=COUNTS, partitions=4)
    stream = app.input_stream("lake.s")
    for number in range(500):
        stream.join(counts, on="k", select=["n as m"], name=f"j{number}")
        stream.filter("n > 0").send_to(counts)
    planned = build_plan(app, STREAMS)
    assert len(planned.fed_joins) == 500
    assert len(planned.to_json()["fed_joins"]) == 500


# -- refused


def test_records_need_the_columns_of_the_table_with_their_types() -> None:
    app = application()
    counts = app.local_table("counts", key="k", schema=COUNTS, partitions=4)
    app.input_stream("lake.s").map("k").send_to(counts)
    with pytest.raises(PlanningError) as failure:
        build_plan(app, STREAMS)
    assert failure.value.column == "n"
    app = application()
    counts = app.local_table("counts", key="k", schema=COUNTS, partitions=4)
    app.input_stream("lake.s").map("k", "cast(n as int) as n").send_to(counts)
    with pytest.raises(PlanningError) as failure:
        build_plan(app, STREAMS)
    assert failure.value.column == "n"


def test_only_its_owner_writes_a_table_and_others_may_join_it() -> None:
    owner = application()
    counts = owner.local_table("counts", key="k", schema=COUNTS, partitions=4)
    other = Application("other")
    theirs = other.table(counts.dataset)
    stream = other.input_stream("lake.s")
    with pytest.raises(PlanningError) as failure:
        stream.send_to(theirs)
    assert failure.value.dataset == "counts"
    stream.join(theirs, on="k", select=["n as m"])
    assert build_plan(other, STREAMS).fed_joins == ()


def test_mistakes_in_the_declaration_are_named() -> None:
    app = application()
    wrong: list[tuple[dict[str, object], str]] = [
        ({"key": "k", "schema": COUNTS, "partitions": 0}, "partitions is 0"),
        ({"key": "k", "schema": COUNTS, "partitions": None}, "partitions is None"),
        ({"key": "x", "schema": COUNTS, "partitions": 2}, "no column 'x'"),
        ({"key": (), "schema": COUNTS, "partitions": 2}, "has no key"),
        ({"key": "k", "schema": {"k": "string"}, "partitions": 2}, "expected a Schema"),
        ({"key": "k", "schema": COUNTS, "partitions": 2, "partition_by": "n"}, "not in its key"),
    ]
    for arguments, reported in wrong:
        with pytest.raises((ConfigurationError, PlanningError), match=reported):
            app.local_table("counts", **arguments)  # type: ignore[arg-type]
    counts = app.local_table("counts", key="k", schema=COUNTS, partitions=2)
    with pytest.raises(PlanningError, match="twice"):
        app.local_table("counts", key="k", schema=COUNTS, partitions=2)
    stream = app.input_stream("lake.s")
    with pytest.raises(ConfigurationError) as failure:
        stream.send_to(counts, deleted="")
    assert failure.value.argument == "deleted"
    with pytest.raises(ConfigurationError) as caught:
        stream.send_to(app.output_stream("lake.out", partitions=2), deleted="true")
    assert caught.value.argument == "deleted"


def test_what_changed_of_the_state_is_reported_in_a_plan_s_differences() -> None:
    older = counting(application())
    app = application()
    counts = app.local_table("counts", key="k", schema=COUNTS, partitions=4)
    stream = app.input_stream("lake.s").join(
        counts, on="k", how="left", select=["n as m"], name="before"
    )
    stream.map("k", "n").send_to(counts)
    stream.filter("n > 1").send_to(counts)
    lines = build_plan(app, STREAMS).differences_from(older)
    assert "join with what is written here join-5-after is gone" in lines
    assert any(
        line.startswith("local table counts sends is send-to-table-4-counts, ") for line in lines
    )


@pytest.mark.parametrize(
    ("deleted", "problem"),
    [
        ("m > 1", "the stream has no column 'm' ('m > 1'); its columns there are k, n."),
        ("upper(k)", "the condition 'upper(k)' is string: expected boolean."),
    ],
)
def test_what_deletes_is_a_condition_over_the_records_that_are_sent(
    deleted: str, problem: str
) -> None:
    app = application()
    counts = app.local_table("counts", key="k", schema=COUNTS, partitions=4)
    app.input_stream("lake.s").send_to(counts, deleted=deleted)
    with pytest.raises(PlanningError) as caught:
        build_plan(app, STREAMS)
    assert caught.value.problem == f"send-to-table-2-counts: {problem}"

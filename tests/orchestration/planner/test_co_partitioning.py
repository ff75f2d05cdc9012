"""The proof beyond equal counts, and the exchanges that `auto_repartition` puts in."""

from __future__ import annotations

import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.planner import build_plan
from dagster_adjunct.resources.errors import PartitionCountMismatchError, PlanningError
from tests.orchestration.planner.planning import (
    application,
    catalog,
    dataset,
    exchanges_before,
    streams_of_join,
)

weather = unbounded_dataset(
    "weather",
    input="lake.weather",
    key=["origin", "time_hour"],
    partition_by="origin",
    partitions=8,
)
FLIGHTS = StreamFacts("lake.flights", 8, ("tailnum",), SPARK)
WEATHER = StreamFacts("lake.weather", 2, ("origin",), SPARK)


def joined(prepare=lambda stream: stream, on=("origin", "time_hour"), **options):
    app = application(**options)
    prepare(app.input_stream("lake.flights")).join(app.table(weather), on=on, select=["temp"])
    return app


def test_equal_counts_with_another_key_are_refused_with_the_next_step():
    with pytest.raises(PlanningError) as caught:
        build_plan(joined(), catalog(FLIGHTS, WEATHER))
    assert not isinstance(caught.value, PartitionCountMismatchError)
    assert (
        f"{caught.value.problem} {caught.value.next_step}"
        == "join-2-weather: stream lake.flights is not partitioned like dataset weather, which is"
        " partitioned by (origin) with spark-murmur3: it is partitioned by (tailnum) with"
        ' spark-murmur3; needed is (origin) with spark-murmur3. Write .partition_by("origin")'
        " before join-2-weather. Or set auto_repartition=True on the application."
    )


@pytest.mark.parametrize("partitioner", ["kafka-murmur2", "unknown"])
def test_the_same_key_under_another_hash_is_refused(partitioner):
    facts = StreamFacts("lake.flights", 8, ("origin",), partitioner)
    with pytest.raises(PlanningError, match=f"by \\(origin\\) with {partitioner}; needed"):
        build_plan(joined(), catalog(facts, WEATHER))


def test_a_stream_without_a_key_is_refused():
    with pytest.raises(PlanningError) as failure:
        build_plan(joined(), catalog(StreamFacts("lake.flights", 8, (), SPARK), WEATHER))
    assert failure.value.operator == "join-2-weather"
    assert failure.value.dataset == "weather"


def test_the_columns_of_the_stream_that_stand_for_the_datasets_count():
    right = StreamFacts("lake.flights", 8, ("airport",), SPARK)
    on = {"airport": "origin", "hour": "time_hour"}
    assert build_plan(joined(on=on), catalog(right, WEATHER)).join_groups[0].partitioned_by == (
        "airport",
    )
    with pytest.raises(PlanningError) as failure:
        build_plan(joined(on=on), catalog(FLIGHTS, WEATHER))
    assert failure.value.operator == "join-2-weather"
    assert failure.value.dataset == "weather"


def test_the_order_of_partition_columns_counts():
    both = unbounded_dataset("both", input="lake.both", key=["a", "b"], partitions=8)
    app = application()
    app.input_stream("lake.s").partition_by("b", "a").join(app.table(both), on=["a", "b"])
    with pytest.raises(PlanningError) as failure:
        build_plan(app, catalog(StreamFacts("lake.both", 1), s=8))
    assert failure.value.operator == "join-3-both"
    assert failure.value.dataset == "both"


@pytest.mark.parametrize(
    "keep",
    [
        lambda s, _: s.filter("a > 1"),
        lambda s, _: s.filter(lambda frame: frame, keeps_partitioning=True),
        lambda s, _: s.map("*", "upper(a) as b"),
        lambda s, _: s.map("origin", "time_hour"),
        lambda s, _: s.map("`origin`", "time_hour"),
        lambda s, _: s.map(lambda frame: frame, keeps_partitioning=True),
        lambda s, app: s.join(app.table(dataset("x")), on="k"),
    ],
)
def test_an_operator_that_leaves_the_partition_columns_alone_keeps_the_partitioning(keep):
    app = application()
    kept = keep(app.input_stream("lake.flights").partition_by("origin"), app)
    kept.join(app.table(weather), on=("origin", "time_hour"), select=["temp"])
    planned = build_plan(app, catalog(FLIGHTS, WEATHER, x=1))
    assert planned.join_groups[0].streams == ("app-partition-by-2", "lake.weather")


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.map("upper(origin) as origin", "time_hour"),
        lambda s: s.map("*", "upper(origin) as ORIGIN"),
        lambda s: s.map(lambda frame: frame),
        lambda s: s.filter(lambda frame: frame),
    ],
)
def test_an_operator_that_may_change_the_partition_columns_is_named(change):
    app = joined(lambda stream: change(stream.partition_by("origin")))
    with pytest.raises(PlanningError) as failure:
        build_plan(app, catalog(FLIGHTS, WEATHER))
    assert failure.value.operator == "join-4-weather"
    assert failure.value.dataset == "weather"


def test_a_renamed_partition_column_still_chooses_the_partition():
    app = joined(lambda s: s.partition_by("origin").map("origin as airport", "time_hour"), on={
        "airport": "origin", "time_hour": "time_hour"})  # fmt: skip
    assert build_plan(app, catalog(FLIGHTS, WEATHER)).join_groups[0].partitioned_by == ("airport",)


def test_after_an_output_stream_its_key_and_partitions_hold():
    app = application()
    out = app.output_stream("lake.out", partitions=8, key="origin")
    app.input_stream("lake.flights").send_to(out).join(
        app.table(weather), on=["origin", "time_hour"]
    )
    planned = build_plan(app, catalog(FLIGHTS, WEATHER))
    assert planned.join_groups[0].streams == ("lake.out", "lake.weather")
    assert [item.operator for item in planned.exchanges] == ["send-to-2"]


def test_auto_repartition_inserts_the_exchange_and_says_so():
    planned = build_plan(joined(auto_repartition=True), catalog(FLIGHTS, WEATHER))
    (exchange,) = exchanges_before(planned, "join-2-weather")
    assert (exchange.reason, exchange.partitioned_by, exchange.partitions) == (
        "auto_repartition",
        ("origin",),
        8,
    )
    assert (
        planned.notes[0]
        == "auto_repartition: lake.flights moves before join-2-weather into 8 partitions by"
        " (origin), because it is partitioned by (tailnum) with spark-murmur3."
    )
    assert planned.join_groups[0].streams == ("app-before-join-2-weather", "lake.weather")
    assert planned.stream("app-before-join-2-weather").count_from == "auto_repartition"
    assert planned.operator("join-2-weather").partitioned_by == ("origin",)


def test_auto_repartition_leaves_alone_what_is_proven():
    app = joined(lambda stream: stream.partition_by("origin"), auto_repartition=True)
    planned = build_plan(app, catalog(FLIGHTS, WEATHER))
    assert [item.reason for item in planned.exchanges] == ["partition_by"]
    assert planned.stream("app-partition-by-2").partitions == 8


def test_one_exchange_serves_all_later_joins_that_need_the_same():
    app = application(auto_repartition=True)
    stream = app.input_stream("lake.s")
    for name in ("a", "b", "c"):
        stream = stream.join(app.table(dataset(name, 8)), on="k", select=[])
    planned = build_plan(app, catalog(s=3, a=1, b=1, c=1))
    assert [item.operator for item in planned.exchanges] == ["join-2-a"]
    assert "because it has 3 partitions" in planned.notes[0]


def test_an_open_count_is_the_one_that_spares_most_exchanges():
    app = application(auto_repartition=True)
    moved = app.input_stream("lake.s").partition_by("k")
    for name, partitions in (("a", 4), ("b", 8), ("c", 8)):
        moved.join(app.table(dataset(name, partitions)), on="k", select=[])
    planned = build_plan(app, catalog(s=3, a=1, b=1, c=1))
    assert planned.stream("app-partition-by-2").partitions == 8
    assert [item.operator for item in planned.exchanges if item.reason == "auto_repartition"] == [
        "join-3-a"
    ]


def test_auto_repartition_serves_a_stream_that_feeds_a_joined_dataset():
    app = application(auto_repartition=True)
    table = app.table(dataset("t", 8))
    app.input_stream("lake.s1").send_to(table).join(app.table(dataset("u", 4)), on="k", select=[])
    app.input_stream("lake.s2").join(table, on="k", select=[])
    planned = build_plan(app, catalog(s1=4, s2=8, t=8, u=1))
    groups = {group.join: group.streams for group in planned.join_groups}
    # What follows the sink goes on with the stream as it was before the sink's own exchange.
    assert groups["join-3-u"] == ("lake.s1", "lake.u")
    assert groups["join-5-t"] == ("lake.s2", "lake.t")
    assert planned.fed[0].streams == ("app-before-send-to-table-2-t",)
    assert streams_of_join(planned, "join-5-t") == (
        "app-before-send-to-table-2-t",
        "lake.s2",
        "lake.t",
    )

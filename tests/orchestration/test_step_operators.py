"""Operators on a few records: what each leaves in an output stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.resources.errors import PlanningError
from tests.orchestration.executed_plans import executed_plans
from tests.orchestration.step_world import StepWorld

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark

AIRPORTS = bounded_dataset("airports", input="lake.airports", key="faa", broadcast=True)
PLANES = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=2)
WEATHER = unbounded_dataset(
    "weather", input="lake.weather", key=["origin", "hour"], partition_by="origin", partitions=4
)


def plus_one(frame: DataFrame) -> DataFrame:
    return frame.withColumn("v", frame["v"] + 1)


def only_even(frame: DataFrame) -> DataFrame:
    return frame.where("v % 2 = 0")


def without_position(frame: DataFrame) -> DataFrame:
    return frame.select("k", "v")


def numbers(world: StepWorld, *rows: tuple[Any, ...]) -> None:
    world.stream("numbers", "k", 2, k="string", v="int")
    world.send("numbers", *rows)


def test_filters_and_maps_take_expressions_and_functions(step_world: StepWorld) -> None:
    numbers(step_world, *[(f"k{i}", i) for i in range(10)])
    app = Application("app", few_records=0)
    out = app.output_stream("lake.out", partitions=2, key="k")
    (
        app.input_stream("lake.numbers")
        .filter("v >= 3")
        .filter(only_even)
        .map(plus_one)
        .map("k", "v * 10 as v", "upper(k) as `loud name`")
        .send_to(out)
    )
    report = step_world.run(app)
    assert sorted(step_world.rows("out"), key=lambda row: row["v"]) == [
        {"k": f"k{i}", "v": (i + 1) * 10, "loud name": f"K{i}"} for i in (4, 6, 8)
    ]
    assert report.caught_up
    assert report.counters["lake.out"] == {"rows": 3, "duplicate_batches": 0}


def test_a_function_that_drops_the_position_is_refused_and_reported_how_to_keep_it(
    step_world: StepWorld,
) -> None:
    numbers(step_world, ("a", 1))
    for how in ("map", "filter"):
        app = Application(f"app-{how}", few_records=0)
        out = app.output_stream("lake.out", partitions=2, key="k")
        getattr(app.input_stream("lake.numbers"), how)(without_position).send_to(out)
        with pytest.raises(PlanningError, match=r"without __partition, __offset.*withColumn"):
            step_world.run(app)


def trips(world: StepWorld) -> None:
    world.stream(
        "trips",
        "tailnum",
        2,
        tailnum="string",
        dest="string",
        origin="string",
        hour="int",
        year="int",
    )
    world.stream("airports", "faa", 1, faa="string", name="string")
    world.stream("planes", "tailnum", 2, tailnum="string", year="int", seats="int")
    world.stream("weather", "origin", 4, origin="string", hour="int", temp="double")
    world.send("airports", ("LAX", "Los Angeles"), ("SFO", "San Francisco"), version="v1")
    world.send("planes", ("N1", 1999, 100), ("N2", 2001, 200), version="v1")
    world.send("weather", ("EWR", 5, 1.5), ("JFK", 5, 2.5))
    world.send("weather", ("EWR", 6, 9.0), deleted=[("JFK", 5, None)])
    world.send(
        "trips",
        ("N1", "LAX", "EWR", 5, 2013),
        ("N2", "XXX", "JFK", 5, 2013),
        ("N9", "SFO", "EWR", 6, 2013),
        (None, "LAX", "EWR", 7, 2013),
    )


def test_joins_select_rename_prefix_and_count_what_they_did_not_find(step_world: StepWorld) -> None:
    trips(step_world)
    app = Application("app", few_records=0)
    out = app.output_stream("lake.out", partitions=4, key="origin")
    (
        app.input_stream("lake.trips")
        .join(
            app.table(PLANES),
            on="tailnum",
            how="left",
            select=["year as built", "seats"],
            prefix="plane_",
        )
        .join(app.table(AIRPORTS), on={"dest": "faa"}, prefix="dest_")
        .partition_by("origin")
        .join(app.table(WEATHER), on=["origin", "hour"], how="left")
        .send_to(out)
    )
    report = step_world.run(app)
    rows = sorted(step_world.rows("out"), key=lambda row: row["hour"])
    trip = {"dest": "LAX", "origin": "EWR", "year": 2013, "dest_name": "Los Angeles"}
    assert rows == [
        {**trip, "tailnum": "N1", "hour": 5, "built": 1999, "plane_seats": 100, "temp": 1.5},
        {
            **trip,
            "tailnum": "N9",
            "dest": "SFO",
            "hour": 6,
            "built": None,
            "plane_seats": None,
            "temp": 9.0,
            "dest_name": "San Francisco",
        },
        {**trip, "tailnum": None, "hour": 7, "built": None, "plane_seats": None, "temp": None},
    ]
    counters = {
        name.split("-")[2]: counts
        for name, counts in report.counters.items()
        if name.startswith("join-")
    }
    assert counters == {
        "planes": {"rows": 4, "unmatched": 2},
        "airports": {"rows": 4, "unmatched": 1},
        "weather": {"rows": 3, "unmatched": 1},
    }


def test_records_with_a_null_key_go_through_streams_joins_and_outputs(
    step_world: StepWorld,
) -> None:
    step_world.stream("trips", "tailnum", 2, tailnum="string", v="int")
    step_world.stream("planes", "tailnum", 2, tailnum="string", seats="int")
    step_world.send("planes", ("N1", 1), version="v1")
    step_world.send("trips", (None, 1), ("N1", 2), (None, 3))
    app = Application("app", few_records=0)
    out = app.output_stream("lake.out", partitions=2, key="tailnum")
    app.input_stream("lake.trips").join(app.table(PLANES), on="tailnum", how="left").send_to(out)
    step_world.run(app)
    assert sorted(step_world.rows("out"), key=lambda row: row["v"]) == [
        {"tailnum": None, "v": 1, "seats": None},
        {"tailnum": "N1", "v": 2, "seats": 1},
        {"tailnum": None, "v": 3, "seats": None},
    ]
    inner = Application("inner", few_records=0)
    matched = inner.output_stream("lake.matched", partitions=2, key="tailnum")
    inner.input_stream("lake.trips").join(inner.table(PLANES), on="tailnum").send_to(matched)
    counters = step_world.run(inner).counters
    assert [counts for name, counts in counters.items() if name.startswith("join-")] == [
        {"rows": 3, "unmatched": 2}
    ]
    assert step_world.rows("matched") == [{"tailnum": "N1", "v": 2, "seats": 1}]


@pytest.mark.parametrize(
    ("mapped", "select", "message"),
    [
        (
            "cast(hash(tailnum) as bigint) as tailnum",
            ["seats"],
            r"'tailnum' is bigint and 'tailnum' .* is string",
        ),
        ("tailnum as tail", ["seats"], r"no column 'tailnum'"),
        ("tailnum", ["seats as v"], r"both (have|bring) a column 'v'"),
        ("tailnum", ["engines"], r"'engines'"),
    ],
    ids=["other-type", "no-key", "same-name", "no-such-column"],
)
@pytest.mark.parametrize("hidden", [False, True], ids=["planned", "seen-by-the-step"])
def test_a_join_that_can_not_be_says_which_column_and_why(
    step_world: StepWorld, mapped: str, select: list[str], message: str, hidden: bool
) -> None:
    step_world.stream("trips", "tailnum", 2, tailnum="string", v="int")
    step_world.stream("planes", "tailnum", 2, tailnum="string", seats="int")
    step_world.send("planes", ("N1", 1), version="v1")
    step_world.send("trips", ("N1", 2))
    app = Application("app", auto_repartition=True, few_records=0)
    stream = app.input_stream("lake.trips")
    if hidden:  # nothing is known of the columns after a function, so the planner can't say it
        stream = stream.map(
            lambda frame: frame.selectExpr(
                "__partition", "__offset", "__timestamp", "__tombstone", "__epoch", mapped, "v"
            )
        )
        stream = stream.partition_by("tailnum") if "tail" not in mapped.split() else stream
    else:
        stream = stream.map(mapped, "v")
    with pytest.raises(PlanningError, match=message):  # noqa: PT012 - some are found while describing, some later
        joined = stream.join(app.table(PLANES), on="tailnum", how="left", select=select)
        joined.send_to(app.output_stream("lake.out", partitions=2, key="v"))
        step_world.run(app)
    assert "out" not in step_world.streams.list_streams()


def test_several_outputs_share_one_branch_and_each_gets_all_of_it(step_world: StepWorld) -> None:
    trips(step_world)
    app = Application("app", few_records=0)
    enriched = app.input_stream("lake.trips").join(
        app.table(PLANES), on="tailnum", select=["seats"]
    )
    enriched.filter("seats > 150").send_to(
        app.output_stream("lake.large", partitions=2, key="tailnum")
    )
    enriched.send_to(app.output_stream("lake.all", partitions=2, key="tailnum"))
    enriched.map("tailnum as k", "seats as v", "hour as w").send_to(app.table(step_world.table()))
    report = step_world.run(app)
    assert [row["tailnum"] for row in step_world.rows("large")] == ["N2"]
    assert sorted(row["tailnum"] for row in step_world.rows("all")) == ["N1", "N2"]
    assert step_world.records() == {"N1": (100, 5), "N2": (200, 5)}
    join = next(counts for name, counts in report.counters.items() if name.startswith("join-"))
    assert join == {"rows": 4, "unmatched": 2}


def test_a_stream_goes_on_after_its_output_with_the_records_of_this_batch_only(
    step_world: StepWorld,
) -> None:
    numbers(step_world, *[(f"k{i}", i) for i in range(6)])
    app = Application("app", max_batch_records=2, few_records=0)
    first = app.input_stream("lake.numbers").send_to(
        app.output_stream("lake.first", partitions=3, key="k")
    )
    first.map("k", "v + 100 as v").send_to(app.output_stream("lake.second", partitions=3, key="k"))
    report = step_world.run(app)
    assert report.batches == 3
    assert sorted(row["v"] for row in step_world.rows("first")) == list(range(6))
    assert sorted(row["v"] for row in step_world.rows("second")) == [100 + i for i in range(6)]


def test_changes_sent_to_a_dataset_are_in_it_when_it_has_advanced(step_world: StepWorld) -> None:
    numbers(step_world, ("a", 1), ("b", 2))
    step_world.stream("largest", "k", 2, k="string", v="int")
    largest = unbounded_dataset("largest", input="lake.largest", key="k", partitions=2)
    app = Application("app", few_records=0)
    app.input_stream("lake.numbers").map("k", "v * 10 as v").send_to(app.table(largest))
    step_world.run(app)
    step_world.send("numbers", ("a", 3))
    step_world.run(app)
    step_world.advance(largest)
    view = StoredVersions(step_world.lake, largest).require_current()
    assert view.get_all(["a", "b", "c"]) == {"a": {"k": "a", "v": 30}, "b": {"k": "b", "v": 20}}


def test_an_application_that_asks_for_it_gets_the_exchange_that_its_join_lacks(
    step_world: StepWorld,
) -> None:
    trips(step_world)
    app = Application("app", auto_repartition=True, few_records=0)
    (
        app.input_stream("lake.trips")
        .join(app.table(WEATHER), on=["origin", "hour"])
        .send_to(app.output_stream("lake.out", partitions=4, key="origin"))
    )
    step_world.run(app)
    assert sorted((row["tailnum"], row["temp"]) for row in step_world.rows("out")) == [
        ("N1", 1.5),
        ("N9", 9.0),
    ]


@pytest.mark.timeout(120)
def test_a_join_whose_records_go_nowhere_does_not_keep_the_batch_waiting(
    step_world: StepWorld,
) -> None:
    trips(step_world)
    app = Application("app", few_records=0)
    trip = app.input_stream("lake.trips")
    trip.join(app.table(PLANES), on="tailnum", select=["seats"])
    trip.send_to(app.output_stream("lake.out", partitions=2, key="tailnum"))
    assert step_world.run(app).counters["lake.out"]["rows"] == 4


@pytest.mark.one_engine
def test_the_join_with_planes_merges_bucketed_scans_without_an_exchange(
    step_world: StepWorld, spark: Any
) -> None:
    assert spark.conf.get("spark.sql.autoBroadcastJoinThreshold") == "-1"
    trips(step_world)
    app = Application("app", few_records=0)
    (
        app.input_stream("lake.trips")
        .join(app.table(PLANES), on="tailnum", how="left", select=["seats"])
        .send_to(app.output_stream("lake.out", partitions=2, key="tailnum"))
    )
    with executed_plans(spark) as plans:
        step_world.run(app)
    (plan,) = (plan for plan in plans if "Join" in plan)
    assert plan.count("SortMergeJoin") == 1
    assert "Exchange" not in plan
    assert plan.count("Bucketed: true") == 2, plan

"""Change streams kept as snapshots, from a real lake stream to what readers get."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.resources.errors import BadChangeError, DatasetError, NoSealedVersionError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World

WEATHER = unbounded_dataset(
    "weather", input="lake.weather", key=["origin", "hour"], partition_by="origin", partitions=4
)
SCHEMA = Schema.of(origin="string", hour="timestamp", temp="double")


def hour(number: int) -> dt.datetime:
    return dt.datetime(2013, 1, 1, tzinfo=dt.UTC) + dt.timedelta(hours=number)


@pytest.fixture
def quick(world: World) -> World:
    world.spark = IN_PROCESS
    return world


def weather(world: World) -> World:
    world.streams.create("weather", schema=SCHEMA, key=["origin"], partitions=4)
    return world


def send(world: World, changes) -> None:
    """Append (origin, hour, temperature); None as the temperature deletes."""
    import pyarrow as pa

    world.streams.append(
        "weather",
        pa.table(
            {
                "origin": pa.array([change[0] for change in changes], pa.string()),
                "hour": pa.array(
                    [hour(change[1]) for change in changes], pa.timestamp("us", tz="UTC")
                ),
                "temp": pa.array([change[2] for change in changes], pa.float64()),
                "__tombstone": pa.array([change[2] is None for change in changes], pa.bool_()),
            }
        ),
        producer="test",
        sequence=world._next("weather"),
    )


def entries(world: World, spec=WEATHER) -> dict[tuple[str, int], float]:
    """Return what is served: by Spark where the world has it."""
    if world.spark is IN_PROCESS:
        return {
            (entry["origin"], int((entry["hour"] - hour(0)).total_seconds()) // 3600): entry["temp"]
            for _, entry in world.view(spec).items()
        }
    rows = (
        world.view(spec)
        .frame(world.spark())
        .selectExpr("origin", "unix_timestamp(hour) h", "temp")
        .collect()
    )
    begin = int(hour(0).timestamp())
    temperatures = {(row.origin, (row.h - begin) // 3600): row.temp for row in rows}
    assert len(temperatures) == len(rows), "a key stands twice in the frame"
    return temperatures


def applied(state: dict[tuple[str, int], float], changes) -> dict[tuple[str, int], float]:
    state = dict(state)
    for origin, number, temp in changes:
        state.pop((origin, number), None)
        if temp is not None:
            state[origin, number] = temp
    return state


def test_an_empty_stream_is_bootstrapped_at_once_without_spark(world: World) -> None:
    weather(world)
    with pytest.raises(NoSealedVersionError):
        world.view(WEATHER)
    report = world.advance(WEATHER)
    assert (report.action, report.rows) == ("bootstrapped", 0)
    assert world.view(WEATHER).get(("JFK", hour(0))) is None
    assert world.advance(WEATHER).action == "up-to-date"


@pytest.mark.spark
def test_the_target_is_recorded_before_anything_is_read(sparkling: World) -> None:
    world = weather(sparkling)
    send(world, [("JFK", 0, 1.0), ("JFK", 1, 2.0)])

    def late_changes_then_crash():
        send(world, [("JFK", 0, 9.0), ("EWR", 5, 5.0)])
        raise KeyboardInterrupt

    spark, world.spark = world.spark, late_changes_then_crash
    with pytest.raises(KeyboardInterrupt):
        world.advance(WEATHER)
    with pytest.raises(NoSealedVersionError) as caught:
        world.view(WEATHER)
    assert caught.value.dataset == "weather"
    world.spark = spark
    report = world.advance(WEATHER)
    assert report.action == "bootstrapped"
    assert entries(world) == {("JFK", 0): 1.0, ("JFK", 1): 2.0}, (
        "what came after the target is not in the base"
    )
    assert world.advance(WEATHER).action == "applied"
    assert entries(world) == {("JFK", 0): 9.0, ("JFK", 1): 2.0, ("EWR", 5): 5.0}


def test_a_commit_writes_only_the_changes_and_nothing_new_makes_no_commit(quick: World) -> None:
    world = weather(quick)
    send(world, [("JFK", n, 0.0) for n in range(1000)])
    world.advance(WEATHER)
    send(world, [("JFK", 3, 1.0), ("JFK", 3, 2.0), ("JFK", 4, None)])
    report = world.advance(WEATHER)
    assert (report.action, report.counters) == (
        "applied",
        {"read": 3, "changes": 2, "superseded": 1, "deleted": 1},
    )
    assert [g.rows for g in world.view(WEATHER).sealed.generations] == [1000, 2]
    log = world.lake.commit_log("datasets/weather", "dataset")
    before = log.current()
    assert world.advance(WEATHER).action == "up-to-date"
    assert log.current() == before


@pytest.mark.spark
def test_an_earlier_commit_stays_readable_by_its_id(sparkling: World) -> None:
    world = weather(sparkling)
    send(world, [("JFK", 0, 1.0)])
    first = world.advance(WEATHER).version
    held = world.view(WEATHER)
    send(world, [("JFK", 0, None), ("EWR", 0, 2.0)])
    world.advance(WEATHER)
    assert world.view(WEATHER).get(("JFK", hour(0))) is None
    for view in (held, StoredVersions(world.lake, WEATHER).version(first)):
        assert view.get(("JFK", hour(0)))["temp"] == 1.0
        assert view.frame(world.spark()).count() == 1


@pytest.mark.spark
def test_a_join_on_the_partition_column_shuffles_neither_base_nor_deltas(sparkling: World) -> None:
    world = weather(sparkling)
    send(world, [("JFK", n, 0.0) for n in range(10)])
    world.advance(WEATHER)
    send(world, [("JFK", 3, 1.0), ("LGA", 4, 1.0)])
    world.advance(WEATHER)
    stream = world.streams.read(world.spark(), world.streams.all_ranges("weather"))
    side = world.view(WEATHER).frame(world.spark()).withColumnRenamed("temp", "temperature")
    joined = stream.join(side.hint("merge"), ["origin", "hour"], "left")
    plan = joined._jdf.queryExecution().executedPlan().toString()
    assert "SortMergeJoin" in plan
    assert "Exchange hashpartitioning" not in plan
    assert joined.count() == 12


@pytest.mark.spark
def test_a_broadcast_copy_merges_its_deltas_too(sparkling: World) -> None:
    world = weather(sparkling)
    spec = unbounded_dataset(
        "everywhere", input="lake.weather", key=["origin", "hour"], broadcast=True
    )
    send(world, [("JFK", 0, 1.0), ("EWR", 0, 2.0), ("LGA", 0, 3.0)])
    world.advance(spec)
    send(world, [("JFK", 0, None), ("LGA", 0, 4.0)])
    world.advance(spec)
    assert entries(world, spec) == {("EWR", 0): 2.0, ("LGA", 0): 4.0}
    assert [len(g.files) for g in world.view(spec).sealed.generations] == [1, 1]


@pytest.mark.spark
def test_other_bucket_counts_than_the_streams_are_built_with_an_exchange(sparkling: World) -> None:
    world = weather(sparkling)
    spec = unbounded_dataset(
        "finer",
        input="lake.weather",
        key=["origin", "hour"],
        partition_by=["origin", "hour"],
        partitions=3,
    )
    changes = [("JFK", n, float(n)) for n in range(50)]
    send(world, changes)
    world.advance(spec)
    assert entries(world, spec) == applied({}, changes)
    assert world.view(spec).get({"origin": "JFK", "hour": hour(7)})["temp"] == 7.0


@pytest.mark.parametrize("key", [["hour"], ["origin"]])
def test_a_stream_whose_keys_spread_over_partitions_is_refused_by_name(world: World, key) -> None:
    world.streams.create("weather", schema=SCHEMA, key=["origin", "hour"], partitions=4)
    spec = unbounded_dataset("w", input="lake.weather", key=key, partitions=4)
    with pytest.raises(
        DatasetError, match=r"lake.weather is keyed by \(origin, hour\), in 4 partitions"
    ):
        world.advance(spec)


def test_a_null_in_the_key_commits_nothing(quick: World) -> None:
    world = weather(quick)
    send(world, [("JFK", 0, 1.0)])
    world.advance(WEATHER)
    offsets = StoredVersions(world.lake, WEATHER).manifest().offsets
    send(world, [(None, 0, 1.0)])
    with pytest.raises(BadChangeError, match="origin"):
        world.advance(WEATHER)
    assert StoredVersions(world.lake, WEATHER).manifest().offsets == offsets
    assert entries(world) == {("JFK", 0): 1.0}


def test_other_columns_need_a_rebuild(world: World) -> None:
    weather(world)
    world.advance(WEATHER)
    spec = unbounded_dataset(
        "weather",
        input="lake.weather",
        key=["origin", "hour"],
        partition_by="origin",
        partitions=4,
        columns=["origin", "hour"],
    )
    with pytest.raises(DatasetError, match="temp"):
        world.advance(spec)


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["JFK", "EWR", "LGA"]),
        st.integers(0, 5),
        st.none() | st.floats(0, 9, allow_nan=False),
    ),
    max_size=12,
)


@pytest.mark.spark
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(CHANGES, min_size=1, max_size=4))
def test_base_and_deltas_equal_a_dictionary_after_every_commit(new_world, batches) -> None:
    world = weather(new_world())
    state: dict[tuple[str, int], float] = {}
    history = []
    for changes in batches:
        if changes:
            send(world, changes)
        state = applied(state, changes)
        advance_dataset(
            WEATHER, lake=world.lake, systems=world.systems, spark=IN_PROCESS, by="test"
        )
        view = world.view(WEATHER)
        keys = [(origin, hour(n)) for origin in ("JFK", "EWR", "LGA") for n in range(6)]
        held = view.get_all(keys)
        wanted = {(origin, hour(n)): temp for (origin, n), temp in state.items()}
        assert {key: entry["temp"] for key, entry in held.items()} == wanted
        assert entries(world) == state
        history.append((view.version, wanted))
    for version, wanted in history:
        held = StoredVersions(world.lake, WEATHER).version(version).get_all(keys)
        assert {key: entry["temp"] for key, entry in held.items()} == wanted

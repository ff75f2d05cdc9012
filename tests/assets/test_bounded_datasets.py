"""Versions of bounded datasets, from a real lake stream to what readers get."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_adjunct.assets.bounded.advance import abandon_version
from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    DatasetError,
    MarkerConflictError,
    NoSealedVersionError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition
from tests.assets.conftest import World

PLANES = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=4)
SCHEMA = Schema.of(tailnum="string", seats="int", model="string")


def planes(world: World, *, partitions: int = 4) -> World:
    world.stream("planes", SCHEMA, ["tailnum"], partitions)
    return world


def entries(world: World, spec=PLANES) -> dict[str, tuple[object, ...]]:
    return {row[0]: tuple(row[1:]) for row in world.view(spec).frame(world.spark()).collect()}


def test_a_dataset_with_no_marker_yet_says_which_partitions_it_waits_for(world: World) -> None:
    planes(world)
    world.mark("planes", "v1", [0, 2])
    report = world.advance(PLANES)
    assert (report.action, report.version) == ("waiting", None)
    assert report.waiting == ("lake.planes.1", "lake.planes.3")
    assert StoredVersions(world.lake, PLANES).current() is None
    with pytest.raises(
        NoSealedVersionError, match=r"version 'v1' waits .* of lake.planes.1, lake.planes.3"
    ):
        StoredVersions(world.lake, PLANES).require_current(world.systems)


def test_an_empty_version_seals_without_spark_and_says_so(world: World) -> None:
    planes(world)
    world.mark("planes", "v1", [3, 1])
    assert world.advance(PLANES).action == "waiting"
    world.mark("planes", "v1", [0, 2])
    with pytest.raises(NoSealedVersionError, match="one is completely delivered") as caught:
        StoredVersions(world.lake, PLANES).require_current(world.systems)
    assert caught.value.next_step.startswith("Advance it")
    report = world.advance(PLANES)
    assert (report.action, report.rows) == ("sealed", 0)
    assert world.view(PLANES).get("N1") is None
    assert world.advance(PLANES).action == "up-to-date"


@pytest.mark.spark
def test_the_last_record_of_a_key_wins_and_a_tombstone_removes_it(sparkling: World) -> None:
    world = planes(sparkling)
    rows = [
        ("N1", 1, "a"),
        ("N2", 2, "b"),
        ("N1", 10, "c"),
        ("N3", 3, "d"),
        ("N3", None, None),
        ("N4", None, None),
    ]
    world.send("planes", rows, version="2005")
    report = world.advance(PLANES)
    assert (report.action, report.rows) == ("sealed", 2)
    assert report.counters == {"read": 6, "superseded": 2, "deleted": 2}
    assert entries(world) == {"N1": (10, "c"), "N2": (2, "b")}
    assert world.view(PLANES).sealed.name == "2005"


@pytest.mark.spark
def test_a_switch_leaves_a_held_view_as_it_was(sparkling: World) -> None:
    world = planes(sparkling)
    world.send("planes", [("N1", 1, "a")], version="v1")
    world.advance(PLANES)
    held = world.view(PLANES)
    world.send("planes", [("N1", 2, "b"), ("N2", 2, "b")], version="v2")
    world.advance(PLANES)
    assert held.get("N1") == {"tailnum": "N1", "seats": 1, "model": "a"}
    assert held.frame(world.spark()).count() == 1
    assert world.view(PLANES).get("N1") == {"tailnum": "N1", "seats": 2, "model": "b"}
    again = StoredVersions(world.lake, PLANES).version(held.version)
    assert (again.version, again.rows) == (held.version, 1)


@pytest.mark.spark
def test_several_complete_versions_seal_in_order_in_one_call(sparkling: World) -> None:
    world = planes(sparkling)
    for number in (1, 2, 3):
        world.send("planes", [(f"N{n}", number, "x") for n in range(number)], version=f"v{number}")
    report = world.advance(PLANES)
    assert len(report.sealed) == 3
    store = StoredVersions(world.lake, PLANES)
    assert [store.version(version).rows for version in report.sealed] == [1, 2, 3]
    assert [ref["name"] for ref in store.describe()["versions"]] == ["v1", "v2", "v3"]


@pytest.mark.spark
def test_a_version_equal_to_the_current_one_moves_the_offsets_and_nothing_else(
    sparkling: World,
) -> None:
    world = planes(sparkling)
    rows = [(f"N{n}", n, "x") for n in range(20)]
    world.send("planes", rows, version="v1")
    first = world.advance(PLANES)
    world.send("planes", rows[::-1], version="v2")
    second = world.advance(PLANES)
    assert (second.action, second.version, second.sealed) == ("unchanged", first.version, ())
    assert second.offsets != first.offsets
    assert world.advance(PLANES).action == "up-to-date"
    folders = {item.key.split("/")[3] for item in world.lake.store.list("datasets/planes/data/")}
    assert folders == {first.version.split("-")[1]}, "the files of the needless attempt are deleted"
    world.mark("planes", "v2", [0])
    world.advance(PLANES)  # a marker of the equal version that comes again is known, too


@pytest.mark.spark
def test_a_redelivery_is_dropped_and_counted_once(sparkling: World) -> None:
    world = planes(sparkling)
    world.send("planes", [("N1", 1, "a"), ("N2", 2, "b")], version="v1")
    first = world.advance(PLANES)
    world.send("planes", [("N1", 1, "a"), ("N2", 2, "b")], version="v1")
    report = world.advance(PLANES)
    assert report.version == first.version
    assert report.counters == {"redelivered": 2}
    assert world.advance(PLANES).counters == {}


def test_a_sealed_version_marked_again_with_other_counts_stays_current(world: World) -> None:
    planes(world)
    world.mark("planes", "v1", range(4), rows=dict.fromkeys(range(4), 0))
    sealed = world.advance(PLANES).version
    world.mark("planes", "v1", [2], rows={2: 7})
    for _ in range(2):
        with pytest.raises(MarkerConflictError) as caught:
            world.advance(PLANES)
        assert (caught.value.version, caught.value.expected, caught.value.found) == (
            "v1",
            "records 0",
            "records 7",
        )
    assert world.view(PLANES).version == sealed
    abandon_version(world.lake, "planes", "v1", reason="the producer counted wrong", by="operator")
    world.mark("planes", "v2", range(4))
    assert world.advance(PLANES).action == "unchanged"


def test_a_marker_that_counts_other_records_than_came_publishes_nothing(world: World) -> None:
    planes(world)
    world.mark("planes", "v1", range(4), rows={0: 0, 1: 3, 2: 0, 3: 0})
    report = world.advance(PLANES)
    assert report.action == "rejected"
    assert "lake.planes.1 expects 3 records, the partition holds 0" in report.note
    assert StoredVersions(world.lake, PLANES).current() is None
    world.mark("planes", "v2", range(4), rows=dict.fromkeys(range(4), 0))
    assert world.advance(PLANES).action == "sealed", (
        "a rejected version does not block the next one"
    )


def test_an_abandoned_version_lets_the_next_one_seal(world: World) -> None:
    planes(world)
    world.mark("planes", "v1", [0])
    world.advance(PLANES)
    world.mark("planes", "v2", range(4))
    with pytest.raises(MarkerConflictError) as caught:
        world.advance(PLANES)
    assert caught.value.facts == {"dataset": "planes"}
    with pytest.raises(ConfigurationError) as failure:
        abandon_version(world.lake, "planes", "v1", reason=" ", by="operator")
    assert failure.value.argument == "reason"
    abandon_version(world.lake, "planes", "v1", reason="the producer died", by="operator")
    assert world.advance(PLANES).action == "sealed"
    assert world.view(PLANES).sealed.name == "v2"


def test_a_first_version_that_is_contradicted_can_be_abandoned_as_the_error_says(
    world: World,
) -> None:
    planes(world)
    world.mark("planes", "v1", [0])
    world.mark("planes", "v2", range(4))
    with pytest.raises(MarkerConflictError, match="abandon_version"):
        world.advance(PLANES)
    abandon_version(world.lake, "planes", "v1", reason="the producer died", by="operator")
    assert world.advance(PLANES).action == "sealed"


@pytest.mark.spark
def test_a_null_key_publishes_nothing_and_names_the_column(sparkling: World) -> None:
    world = planes(sparkling)
    world.send("planes", [("N1", 1, "a")], version="v1")
    first = world.advance(PLANES)
    world.send("planes", [("N1", 2, "a"), (None, 3, "b")], version="v2")
    report = world.advance(PLANES)
    assert report.action == "rejected"
    assert (
        "NullKeyError: dataset 'planes', version 'v2': 1 record(s) have a null in 'tailnum'"
        in report.note
    )
    assert world.view(PLANES).version == first.version
    named = re.search(r"the key \(tailnum\): lake\.planes\.(\d) at offset (\d+)\.", report.note)
    assert named is not None, report.note
    place = {
        SystemStreamPartition("lake", "planes", int(named[1])): OffsetRange(
            named[2], str(int(named[2]) + 1)
        )
    }
    assert world.streams.read_arrow(place).column("seats").to_pylist() == [3]

    world.send("planes", [(None, number, "b") for number in range(8)], version="v3")
    note = world.advance(PLANES).note
    assert "8 record(s) have a null in 'tailnum'" in note
    assert len(re.findall(r"lake\.planes\.\d at offset \d+", note)) == 5
    assert " …" in note.partition("Next:")[0]


@pytest.mark.spark
def test_a_broadcast_dataset_is_one_file(sparkling: World) -> None:
    world = sparkling
    world.stream("airlines", Schema.of(carrier="string", name="string"), ["carrier"], 2)
    spec = bounded_dataset("airlines", input="lake.airlines", key="carrier", broadcast=True)
    world.send("airlines", [("AA", "American"), ("UA", "United"), ("DL", "Delta")], version="v1")
    world.advance(spec)
    view = world.view(spec)
    assert [len(generation.files) for generation in view.sealed.generations] == [1]
    assert view.get_all(["AA", "DL", "ZZ"]) == {
        "AA": {"carrier": "AA", "name": "American"},
        "DL": {"carrier": "DL", "name": "Delta"},
    }
    assert view.frame(world.spark()).count() == 3


@pytest.mark.spark
def test_datasets_advance_at_the_same_time_in_threads_of_one_session(sparkling: World) -> None:
    world = planes(sparkling)
    specs = [
        bounded_dataset(f"planes-{n}", input="lake.planes", key="tailnum", partitions=n)
        for n in (2, 3, 4)
    ]
    world.send("planes", [(f"N{n}", n, "x") for n in range(50)], version="v1")
    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(world.advance, specs))
    assert [(report.action, report.rows) for report in reports] == [("sealed", 50)] * 3
    with ThreadPoolExecutor(3) as pool:
        assert (
            len(
                {
                    frozenset(contents.items())
                    for contents in pool.map(lambda spec: entries(world, spec), specs)
                }
            )
            == 1
        )


@pytest.mark.spark
def test_only_declared_columns_are_stored(sparkling: World) -> None:
    world = planes(sparkling)
    spec = bounded_dataset(
        "seats", input="lake.planes", key="tailnum", partitions=8, columns=["tailnum", "seats"]
    )
    world.send("planes", [("N1", 1, "a")], version="v1")
    assert world.advance(spec).schema == Schema.of(tailnum="string", seats="int")
    assert world.view(spec).get("N1") == {"tailnum": "N1", "seats": 1}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            bounded_dataset("planes", input="lake.planes", key="model", partitions=4),
            r"key is \(model\), was",
        ),
        (
            bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=8),
            "partitions is 8, was 4",
        ),
        (
            bounded_dataset("planes", input="lake.planes", key="tailnum", broadcast=True),
            "partitions is broadcast",
        ),
        (
            bounded_dataset("planes", input="lake.other", key="tailnum", partitions=4),
            "input is lake.other, was",
        ),
    ],
)
def test_a_changed_declaration_is_refused_by_name(world: World, changed, named: str) -> None:
    planes(world)
    world.stream("other", SCHEMA, ["tailnum"], 4)
    world.mark("planes", "v1", range(4))
    sealed = world.advance(PLANES).version
    with pytest.raises(DatasetError, match=named):
        world.advance(changed)
    with pytest.raises(DatasetError, match="needs a rebuild"):
        StoredVersions(world.lake, changed).current()
    assert world.view(PLANES).version == sealed


def test_a_key_of_another_type_is_refused(world: World) -> None:
    world.stream("a", Schema.of(k="double", v="int"), ["v"], 1)
    with pytest.raises(SchemaMismatchError) as failure:
        world.advance(bounded_dataset("a", input="lake.a", key="k", partitions=1))
    assert failure.value.column == "k"


@pytest.mark.spark
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 12), st.none() | st.integers(0, 3)), max_size=15),
        min_size=1,
        max_size=3,
    )
)
def test_versions_equal_a_dictionary_of_what_was_delivered(new_world, deliveries) -> None:
    world = planes(new_world(), partitions=2)
    spec = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=3)
    for number, changes in enumerate(deliveries):
        expected: dict[str, tuple[object, ...]] = {}
        rows = []
        for key, value in changes:
            rows.append((f"N{key}", value, None if value is None else "m"))
            expected.pop(f"N{key}", None)
            if value is not None:
                expected[f"N{key}"] = (value, "m")
        world.send("planes", rows, version=f"v{number}")
        world.advance(spec)
        assert entries(world, spec) == expected
        view = world.view(spec)
        assert view.rows == len(expected)
        by_key = view.get_all([f"N{key}" for key in range(13)])
        assert {key: (entry["seats"], entry["model"]) for key, entry in by_key.items()} == expected

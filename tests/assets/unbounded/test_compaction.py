"""Compaction: what it merges, that nothing that is read changes by it, and that nothing is lost
beside it.
"""

from __future__ import annotations

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.declaration.policies import DeltaCompaction
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded import commit as served_version
from dagster_adjunct.assets.unbounded.compaction import (
    CompactionReport,
    compact_dataset,
    plan_compaction,
    read_generations,
)
from dagster_adjunct.assets.versions.version import SealedVersion
from dagster_adjunct.resources.bucketing.files import BucketFile, Generation
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    DatasetError,
    DatasetNotFoundError,
)
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.unbounded.tables import entries, faulty, left_over, send, stored, table
from tests.faulty_store import Fault

POLICY = DeltaCompaction()
COLUMNS = Schema.of(k="string", n="int")


@pytest.fixture
def quick(world: World) -> World:
    """A lake in which nothing needs Spark."""
    world.spark = IN_PROCESS
    return world


def version_of(*rows: int) -> SealedVersion:
    """Return a version whose generations hold so many rows."""
    generations = tuple(
        Generation(
            number, f"data/{number}", (BucketFile(0, f"{number}.parquet", count, 10 * count, ""),)
        )
        for number, count in enumerate(rows, 1)
    )
    return SealedVersion(
        id="v000001-a",
        number=1,
        name=None,
        sealed_at="2026-01-01T00:00:00Z",
        columns=COLUMNS,
        key=("k",),
        partition_by=("k",),
        partitions=1,
        positioned=True,
        generations=generations,
        offsets={},
        rows=rows[0] if len(rows) == 1 else None,
    )


def planned(
    *rows: int, level=None, policy: DeltaCompaction = POLICY
) -> tuple[str, list[int]] | None:
    plan = plan_compaction(version_of(*rows), policy, level)
    return (
        None if plan is None else (plan.level, [generation.id for generation in plan.generations])
    )


# -- what is due


def test_a_base_alone_is_never_compacted() -> None:
    assert [planned(10**9, level=level) for level in (None, "minor", "major")] == [None, None, None]


def test_an_operator_merges_all_that_the_level_can_merge() -> None:
    assert planned(10**6, 5, level="minor") is None, "one delta is merged already"
    assert planned(10**6, 500, 5, level="minor") == ("minor", [2, 3])
    assert planned(10**6, 5, level="major") == ("major", [1, 2])


def test_few_small_deltas_are_left_alone() -> None:
    assert planned(10**7, *[30_000] * 7) is None
    assert planned(3, 2, 2) is None, "a small table is not compacted with each commit"


def test_many_deltas_become_one() -> None:
    assert planned(10**7, *[30_000] * 8) == ("minor", list(range(2, 10)))


def test_a_large_delta_is_not_rewritten_for_a_small_ones_sake() -> None:
    assert planned(10**7, 240_000, *[30_000] * 7) == ("minor", list(range(3, 10)))
    assert planned(10**7, 240_000, 210_000, *[30_000] * 6) == ("minor", list(range(4, 10)))


def test_more_deltas_than_are_allowed_are_brought_below_the_limit() -> None:
    level, merged = planned(10**7, *[2**n for n in range(16, 4, -1)]) or ("", [])
    assert (level, 12 - len(merged) + 1) == ("minor", 7)


def test_all_is_rewritten_when_deltas_are_a_large_part_of_the_table() -> None:
    assert planned(400_000, 90_000) == ("major", [1, 2])
    assert planned(1000, *[30] * 8) == ("major", list(range(1, 10)))
    assert planned(10**9, 2_000_001) == ("major", [1, 2]), "more keys than readers broadcast"


def test_each_row_is_rewritten_a_few_times_however_many_commits_there_are() -> None:
    """1,000 commits: each delta is merged about as often as the number of deltas has digits."""
    generations, rewritten = [10**9], 0
    for _ in range(1_000):
        generations.append(1)
        plan = plan_compaction(version_of(*generations), POLICY)
        if plan is not None:
            assert plan.level == "minor"
            rewritten += plan.rows
            generations = [*generations[: plan.generations[0].id - 1], plan.rows]
        assert len(generations) <= POLICY.deltas
    assert sum(generations) == 10**9 + 1_000
    assert rewritten < 8 * 1_000


# -- refused


def test_what_cant_be_compacted_is_named(world: World) -> None:
    with pytest.raises(DatasetNotFoundError) as missing:
        compact_dataset(world.lake, "nowhere", spark=world.spark, by="test")
    assert missing.value.dataset == "nowhere"
    with pytest.raises(ConfigurationError) as failure:
        compact_dataset(world.lake, "nowhere", spark=world.spark, by="test", level="medium")  # type: ignore[arg-type]
    assert failure.value.argument == "level"


def test_a_bounded_dataset_is_refused(world: World) -> None:
    world.stream("planes", COLUMNS, ["k"], 1)
    planes = bounded_dataset("planes", input="lake.planes", key="k", broadcast=True)
    world.mark("planes", "v1", [0])
    world.advance(planes)
    with pytest.raises(DatasetError) as failure:
        compact_dataset(world.lake, "planes", spark=world.spark, by="test")
    assert failure.value.dataset == "planes"


def test_nothing_to_do_makes_no_commit_and_starts_no_spark(world: World) -> None:
    spec = table(world)
    world.advance(spec)
    before = StoredVersions(world.lake, spec).read()[0]
    for level in (None, "minor", "major"):
        report = compact_dataset(world.lake, spec.name, spark=world.spark, by="test", level=level)
        assert (report.action, report.changed) == ("nothing", False)
        assert "nothing to compact in version" in report.summary()
    assert StoredVersions(world.lake, spec).read()[0] == before


# -- what is read stays


SPREADS = {"partitioned": {"partitions": 2}, "broadcast": {"broadcast": True}}


def compact(
    world: World, spec, level=None, *, lake: Lake | None = None, policy=None
) -> CompactionReport:
    return compact_dataset(
        lake or world.lake, spec.name, spark=world.spark, by="test", level=level, policy=policy
    )


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_a_minor_compaction_makes_one_delta_and_keeps_its_tombstones(quick: World, spread) -> None:
    spec = table(quick, **spread)
    history = [
        send(quick, spec, {"a": 1, "b": 1, "c": 1, "d": 1}),
        send(quick, spec, {"a": 2, "b": None}),
        send(quick, spec, {"b": None, "c": None, "e": 2}),
        send(quick, spec, {"c": 3, "e": None}),
    ]
    report = compact(quick, spec, "minor")
    assert (report.action, report.level, report.generations, report.rows) == (
        "compacted",
        "minor",
        (4, 2),
        (7, 4),
    )
    assert report.counters == {"superseded": 3, "deleted": 0}
    assert entries(quick, spec) == {"a": 2, "c": 3, "d": 1}
    assert [g.id for g in quick.view(spec).sealed.generations] == [1, 4], (
        "the newest of what was merged"
    )
    assert {(k, t) for _, k, t in stored(quick, spec) if t} == {("b", True), ("e", True)}
    send(quick, spec, {"b": 5})
    assert entries(quick, spec) == {"a": 2, "b": 5, "c": 3, "d": 1}
    for version, expected in history:
        assert entries(quick, spec, version) == expected
    assert left_over(quick, spec) == set()


@pytest.mark.parametrize(
    ("engine", "spread"),
    [
        ("quick", "partitioned"),
        ("quick", "broadcast"),
        # by both engines: test_engines.py
        pytest.param("sparkling", "partitioned", marks=pytest.mark.long),
        pytest.param("sparkling", "broadcast", marks=pytest.mark.long),
    ],
)
def test_a_major_compaction_makes_a_base_without_tombstones_and_counts_its_rows(
    request: pytest.FixtureRequest, engine: str, spread: str
) -> None:
    world: World = request.getfixturevalue(engine)
    spec = table(world, **SPREADS[spread])
    history = [
        send(world, spec, {"a": 1, "b": 1, "c": 1, "d": 1}),
        send(world, spec, {"a": 2, "b": None, "x": None}),
        send(world, spec, {"c": None, "e": 2}),
    ]
    report = compact(world, spec, "major")
    assert (report.level, report.generations, report.rows) == ("major", (3, 1), (9, 3))
    assert report.counters == {"superseded": 3, "deleted": 3}
    view = world.view(spec)
    assert (view.version, view.rows) == (report.version, 3)
    assert entries(world, spec) == {"a": 2, "d": 1, "e": 2}
    assert not [key for _, key, tombstone in stored(world, spec) if tombstone]
    newest = StoredVersions(world.lake, spec).history()[0]
    assert (newest.action, newest.by, newest.reason) == ("compact", "test", "major: asked for")
    for version, expected in history:
        assert entries(world, spec, version) == expected
    send(world, spec, {"a": None, "b": 7})
    assert entries(world, spec) == {"b": 7, "d": 1, "e": 2}
    assert left_over(world, spec) == set()


def test_a_table_whose_entries_are_all_deleted_is_compacted_to_nothing(quick: World) -> None:
    spec = table(quick, partitions=2)
    send(quick, spec, {"a": 1})
    send(quick, spec, {"a": None})
    report = compact(quick, spec, "major")
    assert (report.rows[1], quick.view(spec).rows) == (0, 0)
    assert entries(quick, spec) == {}
    send(quick, spec, {"a": 3})
    assert entries(quick, spec) == {"a": 3}


@pytest.mark.spark
def test_the_merge_is_local_to_each_bucket(sparkling: World) -> None:
    """No exchange stands in the plan: a bucket's generations are read and written by one task."""
    for spec in (
        table(sparkling, partitions=2),
        table(sparkling, "ordered", partitions=2, order_by="n"),
    ):
        send(sparkling, spec, {"a": 1, "b": 1})
        send(sparkling, spec, {"a": 2})
        sealed = sparkling.view(spec).sealed
        rows = read_generations(
            sparkling.spark, sparkling.lake.store, "test", sealed.layout, sealed.generations
        )
        ordered = rows.sortWithinPartitions("k", "__position", "__gen")
        assert "Exchange" not in ordered._jdf.queryExecution().executedPlan().toString()


# -- inside a commit


def test_an_advance_compacts_what_has_become_due_unless_a_schedule_does(quick: World) -> None:
    eager = table(quick, "eager", partitions=1, compaction=DeltaCompaction(deltas=2))
    later = table(
        quick, "later", partitions=1, compaction=DeltaCompaction(deltas=2, inside_commit=False)
    )
    for spec, left in ((eager, 1), (later, 3)):
        for number in range(3):
            send(quick, spec, {"a": number})
        assert len(quick.view(spec).sealed.generations) == left
        assert entries(quick, spec) == {"a": 2}
    report = compact(quick, later)
    assert (report.action, report.level) == ("compacted", "major"), (
        "by the policy that was declared at the last advance"
    )
    report = quick.advance(eager)
    assert report.action == "up-to-date"


def test_the_report_of_an_advance_reports_the_version_that_its_compaction_made(
    quick: World,
) -> None:
    spec = table(quick, partitions=1, compaction=DeltaCompaction(deltas=2))
    send(quick, spec, {"a": 1, "b": 1})
    send(quick, spec, {"a": 2})
    quick.send(spec.name, [("b", None)])
    report = quick.advance(spec)
    assert (len(report.sealed), report.rows) == (2, 1)
    assert report.version == report.sealed[-1] == quick.view(spec).version


def test_footers_that_every_commit_would_repeat_are_left_out_where_they_are_large(
    quick: World, monkeypatch
) -> None:
    spec = table(quick)
    send(quick, spec, {"a": 1, "b": 1})
    send(quick, spec, {"a": 2})
    compact(quick, spec, "minor")
    assert all(
        file.footer
        for generation in quick.view(spec).sealed.generations
        for file in generation.files
    )
    monkeypatch.setattr(served_version, "MAX_FOOTER_BYTES", 10)
    compact(quick, spec, "major")
    assert [
        file.footer
        for generation in quick.view(spec).sealed.generations
        for file in generation.files
    ] == [None, None]
    assert entries(quick, spec) == {"a": 2, "b": 1}


# -- beside others


@pytest.mark.parametrize("level", ["minor", "major"])
def test_a_commit_that_lands_during_a_compaction_is_not_lost(quick: World, level) -> None:
    spec = table(quick, partitions=2)
    send(quick, spec, {"a": 1, "b": 1})
    send(quick, spec, {"a": 2})
    send(quick, spec, {"b": None})
    landed: list[str] = []
    commit = Fault(
        "put_if_match",
        1,
        "meanwhile",
        lambda: landed.append(send(quick, spec, {"b": 9, "a": None})[0]),
    )
    report = compact(quick, spec, level, lake=faulty(quick, commit))
    assert report.changed
    assert report.generations == (3, 2 if level == "major" else 3)
    assert entries(quick, spec) == {"b": 9}
    assert quick.view(spec).rows is None
    assert entries(quick, spec, landed[0]) == {"b": 9}
    assert left_over(quick, spec) == set()


def test_a_compaction_that_lands_during_a_commit_is_not_lost_either(quick: World) -> None:
    spec = table(quick, partitions=2)
    send(quick, spec, {"a": 1, "b": 1})
    send(quick, spec, {"a": 2})
    quick.send(spec.name, [("a", 3), ("b", None)])
    other = Fault("put_if_match", 1, "meanwhile", lambda: compact(quick, spec, "major"))
    report = quick.advance(spec, lake=faulty(quick, other))
    assert report.action == "applied"
    assert entries(quick, spec) == {"a": 3}
    assert len(quick.view(spec).sealed.generations) == 2
    assert entries(quick, spec, report.version) == {"a": 3}, (
        "a commit that was decided twice is found by its id"
    )


def test_of_two_compactions_at_once_one_counts_and_the_other_says_so(quick: World) -> None:
    spec = table(quick, partitions=2)
    send(quick, spec, {"a": 1, "b": 1})
    send(quick, spec, {"a": 2})
    send(quick, spec, {"a": 3})
    other = Fault("put_if_match", 1, "meanwhile", lambda: compact(quick, spec, "major"))
    report = compact(quick, spec, "minor", lake=faulty(quick, other))
    assert (report.action, report.version) == ("superseded", None)
    assert "another writer replaced these generations first" in report.summary()
    assert [len(g.files) for g in quick.view(spec).sealed.generations] == [2]
    assert entries(quick, spec) == {"a": 3, "b": 1}
    assert left_over(quick, spec) == set()


def test_a_rebuild_goes_on_next_to_a_compaction_of_the_table_that_is_served(quick: World) -> None:
    from dagster_adjunct.assets.unbounded.advance import advance_unbounded

    spec = table(quick, partitions=1, chunk=2)
    send(quick, spec, {"a": 1, "b": 1})
    send(quick, spec, {"c": 2})

    def compact_once() -> object:
        assert StoredVersions(quick.lake, spec).require_manifest().bootstrap.state == "running"
        return compact(quick, spec, "major")

    # The first swap begins the rebuild, the second is its first chunk.
    lake = faulty(quick, Fault("put_if_match", 2, "meanwhile", compact_once))
    report = advance_unbounded(
        Runtime(lake, quick.systems, quick.spark, "test"), spec, rebuild="a test of two at once"
    )
    assert report.action == "bootstrapped"
    assert entries(quick, spec) == {"a": 1, "b": 1, "c": 2}
    assert left_over(quick, spec) == set()


# -- by a column's order


def ordered(world: World, **options):
    return table(world, "prices", partitions=1, order_by="n", **options)


def change(world: World, spec, *changes: tuple[str, int, bool]) -> None:
    """Apply (key, position, deleted) in this order; the ordering column is the value."""
    import pyarrow as pa

    world.streams.append(
        spec.name,
        pa.table(
            {
                "k": pa.array([key for key, _, _ in changes], pa.string()),
                "n": pa.array([at for _, at, _ in changes], pa.int32()),
                "__tombstone": pa.array([deleted for _, _, deleted in changes], pa.bool_()),
            }
        ),
        producer="test",
        sequence=world._next(spec.name),
    )
    world.advance(spec)


def test_deletions_are_remembered_for_ever_unless_a_distance_is_declared(quick: World) -> None:
    spec = ordered(quick)
    change(quick, spec, ("a", 10, False), ("b", 10, False))
    change(quick, spec, ("a", 20, True), ("c", 1000, False))
    report = compact(quick, spec, "major")
    assert (report.horizon, report.rows, quick.view(spec).rows) == (None, (4, 3), 2)
    change(quick, spec, ("a", 15, False))
    assert entries(quick, spec) == {"b": 10, "c": 1000}
    assert StoredVersions(quick.lake, spec).require_manifest().horizon is None


def test_deletions_up_to_the_horizon_are_forgotten_and_what_comes_below_it_is_late(
    quick: World,
) -> None:
    spec = ordered(quick, keep_tombstones=100)
    change(quick, spec, ("a", 10, False), ("b", 10, False))
    change(quick, spec, ("a", 900, True), ("b", 950, True), ("c", 1000, False))
    report = compact(quick, spec, "major")
    assert (report.horizon, report.rows) == (900, (5, 2))
    assert report.counters == {"superseded": 2, "deleted": 1}
    assert [key for _, key, tombstone in stored(quick, spec) if tombstone] == ["b"]
    assert quick.view(spec).rows == 1
    change(quick, spec, ("a", 20, False), ("b", 940, False), ("d", 901, False))
    assert entries(quick, spec) == {"c": 1000, "d": 901}


def test_a_horizon_never_goes_back(quick: World) -> None:
    spec = ordered(quick, keep_tombstones=100)
    change(quick, spec, ("a", 1000, False))
    change(quick, spec, ("b", 990, False))
    assert compact(quick, spec, "major").horizon == 900
    wider = ordered(quick, keep_tombstones=500)
    change(quick, wider, ("c", 1100, False))
    assert compact(quick, wider, "major").horizon == 900


def test_a_minor_compaction_by_a_column_keeps_the_highest_whatever_came_first(quick: World) -> None:
    spec = ordered(quick)
    change(quick, spec, ("a", 50, False), ("b", 50, False))
    change(quick, spec, ("a", 40, True), ("b", 60, True))
    change(quick, spec, ("b", 55, False), ("c", 1, False))
    assert compact(quick, spec, "minor").changed
    assert entries(quick, spec) == {"a": 50, "c": 1}


def test_a_late_change_that_lands_during_a_compaction_brings_nothing_back(quick: World) -> None:
    """The deletion of `a` would be forgotten, and the change below it was committed before
    anybody could refuse it.
    """
    spec = ordered(quick, keep_tombstones=100)
    change(quick, spec, ("a", 10, False))
    change(quick, spec, ("a", 20, True), ("c", 1000, False))
    late = Fault("put_if_match", 1, "meanwhile", lambda: change(quick, spec, ("a", 15, False)))
    report = compact(quick, spec, "major", lake=faulty(quick, late))
    assert (report.action, report.horizon) == ("compacted", None), (
        "built again, with all tombstones"
    )
    assert entries(quick, spec) == {"c": 1000}
    assert left_over(quick, spec) == set()


def test_a_commit_of_late_changes_loses_against_a_compaction_that_moves_the_horizon(
    quick: World,
) -> None:
    spec = ordered(quick, keep_tombstones=100)
    change(quick, spec, ("a", 10, False))
    change(quick, spec, ("a", 20, True), ("c", 1000, False))
    lake = faulty(
        quick, Fault("put_if_match", 1, "meanwhile", lambda: compact(quick, spec, "major"))
    )
    quick.send(spec.name, [("a", 15)])
    with pytest.raises(CommitConflictError):
        quick.advance(spec, lake=lake)
    assert entries(quick, spec) == {"c": 1000}
    report = quick.advance(spec)
    assert report.counters["late"] == 1
    assert entries(quick, spec) == {"c": 1000}


def test_a_rebuild_takes_in_what_is_below_the_horizon_of_the_table_before(quick: World) -> None:
    from dagster_adjunct.assets.unbounded.advance import advance_unbounded

    spec = ordered(quick, keep_tombstones=100)
    change(quick, spec, ("a", 10, False))
    change(quick, spec, ("c", 1000, False))
    assert compact(quick, spec, "major").horizon == 900
    context = Runtime(quick.lake, quick.systems, quick.spark, "test")
    advance_unbounded(context, spec, rebuild="a test")
    assert entries(quick, spec) == {"a": 10, "c": 1000}
    assert StoredVersions(quick.lake, spec).require_manifest().horizon is None

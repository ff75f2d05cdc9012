"""A bounded dataset rewritten into other partitions: the same entries of every version, under
readers and crashes.
"""

from __future__ import annotations

from contextlib import suppress

import pyarrow as pa
import pytest

from dagster_adjunct.assets import rebucketing
from dagster_adjunct.assets.bounded.advance import advance_version_set
from dagster_adjunct.assets.declaration.dataset import bounded_dataset, version_set
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.verification import verify_version
from dagster_adjunct.assets.rebucketing import repartition_versions
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.resources.bucketing import writer
from dagster_adjunct.resources.bucketing.hashing import bucket_of_key
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    DatasetError,
    ManifestMismatchError,
    StillReadError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.cycle import (
    KEYS,
    NAME,
    PLANES,
    SCHEMA,
    WHY,
    content,
    data_and_documents,
    deliver,
    planes_in,
    publish,
    reached,
    served,
    whole,
)
from tests.faulty_store import Crash, Fault, FaultyStore, deaths

MORE = bounded_dataset(NAME, input="lake.planes", key="k", partitions=5)


ROUTES = bounded_dataset("routes", input="lake.routes", key="k", partitions=2)
BOTH = version_set("both", PLANES, ROUTES)


def deliver_both(world: World, number: int) -> None:
    deliver(world, number)
    world.send("routes", [(key, number) for key in KEYS], version=f"v{number}")


def set_in(lake: Lake) -> World:
    """Return a world with a version set of two datasets that has published two versions."""
    world = planes_in(lake)
    world.stream("routes", SCHEMA, ["k"], 2)
    for number in (1, 2):
        deliver_both(world, number)
        advance_version_set(BOTH, lake=lake, systems=world.systems, spark=IN_PROCESS, by="test")
    return world


def published() -> World:
    """Return a world in which the dataset has published two versions."""
    world = planes_in(lake_in(InMemoryStore()))
    publish(world, 1, 2)
    return world


@pytest.fixture
def planes() -> World:
    return published()


def check(lake: Lake, partitions: int, *numbers: int) -> None:
    """All versions are whole, lie where their hash says, and nothing of others is left."""
    store = StoredVersions(lake, NAME)
    refs = store.versions()
    assert [content(store.version(ref.id)) for ref in refs] == [whole(number) for number in numbers]
    for ref in refs:
        sealed = store.version(ref.id).sealed
        assert sealed.partitions == partitions
        (generation,) = sealed.generations
        assert {file.bucket for file in generation.files} == {
            bucket_of_key([k], ["string"], partitions) for k in KEYS
        }
        assert verify_version(store.version(ref.id), deep=True).ok
    assert served(lake) == whole(numbers[-1])


def test_every_version_has_the_same_entries_in_the_new_partitions(planes: World) -> None:
    lake = planes.lake
    before = StoredVersions(lake, NAME).require_manifest()
    report = repartition_versions(lake, NAME, 5, **WHY)
    assert (report.before, len(report.versions), report.pending) == (2, 2, ())
    check(lake, 5, 1, 2)
    after = StoredVersions(lake, NAME).require_manifest()
    assert (after.offsets, [ref.name for ref in after.versions]) == (before.offsets, ["v1", "v2"])
    assert data_and_documents(lake) == reached(lake), "the old ones are gone"
    assert StoredVersions(lake, NAME).history()[0].action in ("repartition", "expire")
    with pytest.raises(DatasetError, match="partitions is 2, was 5"):
        planes.advance(PLANES)
    publish(planes, 3, spec=MORE)
    check(lake, 5, 1, 2, 3)
    StoredVersions(lake, MORE).rollback(reason="x", by="ada")
    assert served(lake) == whole(2)


def test_a_reader_by_lease_keeps_the_old_copy_until_it_leaves(planes: World) -> None:
    lake = planes.lake
    view = StoredVersions(lake, NAME).require_current()
    assert repartition_versions(lake, NAME, 5, **WHY, dry_run=True).pending == ()
    with Lease.acquire(lake, NAME, [view.version], holder="a reader"):
        (planned,) = repartition_versions(lake, NAME, 5, **WHY, dry_run=True).pending
        assert planned.startswith(f"{view.version}: leased by a reader until ")
        report = repartition_versions(lake, NAME, 5, **WHY)
        assert any("a reader" in judged for judged in report.pending)
        assert content(view) == whole(2)
    check(lake, 5, 1, 2)


@pytest.mark.lengthy
@pytest.mark.rounds
# Who dies after a request leaves what one leaves who dies before the next.
@pytest.mark.parametrize(
    "kind", ["crash-before", pytest.param("crash-after", marks=pytest.mark.long)]
)
def test_a_crash_leaves_the_old_dataset_or_the_new_one(kind: str) -> None:
    seen = set()
    whole_run = published()
    counted = FaultyStore(whole_run.lake.store)
    repartition_versions(Lake(counted, whole_run.lake.id), NAME, 5, **WHY)
    for nth in deaths(counted.requests):
        world = published()
        store = FaultyStore(world.lake.store, [Fault("*", nth, kind)])  # type: ignore[arg-type]
        with pytest.raises(Crash):
            repartition_versions(Lake(store, world.lake.id), NAME, 5, **WHY)
        partitions = StoredVersions(world.lake, NAME).require_manifest().declaration.partitions
        assert partitions is not None
        seen.add(partitions)
        check(world.lake, partitions, 1, 2)
        if partitions == 2:
            repartition_versions(world.lake, NAME, 5, **WHY)
            check(world.lake, 5, 1, 2)
    assert seen == {2, 5}


def test_a_version_that_is_published_meanwhile_is_rewritten_too(planes: World) -> None:
    fault = Fault("put_if_match", 1, "meanwhile", lambda: publish(planes, 3))
    repartition_versions(
        Lake(FaultyStore(planes.lake.store, [fault]), planes.lake.id), NAME, 5, **WHY
    )
    check(planes.lake, 5, 1, 2, 3)


def test_a_build_that_is_under_way_is_not_published_in_the_old_partitions(planes: World) -> None:
    deliver(planes, 3)
    fault = Fault(
        "put_if_match", 1, "meanwhile", lambda: repartition_versions(planes.lake, NAME, 5, **WHY)
    )
    behind = World(Lake(FaultyStore(planes.lake.store, [fault]), planes.lake.id), planes.spark)
    with pytest.raises(CommitConflictError):
        behind.advance(PLANES)
    check(planes.lake, 5, 1, 2)
    planes.advance(MORE)
    check(planes.lake, 5, 1, 2, 3)


def test_a_rewrite_that_loses_a_row_commits_nothing_and_leaves_no_file(
    planes: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, read = data_and_documents(planes.lake), rebucketing._iterate_bucketed_rows
    monkeypatch.setattr(
        rebucketing,
        "_iterate_bucketed_rows",
        lambda stored, layout: (
            (rows.slice(1), buckets[1:]) for rows, buckets in read(stored, layout)
        ),
    )
    with pytest.raises(ManifestMismatchError) as failure:
        repartition_versions(planes.lake, NAME, 5, **WHY)
    assert (failure.value.dataset, failure.value.version) == (
        NAME,
        StoredVersions(planes.lake, NAME).versions()[0].id,
    )
    assert data_and_documents(planes.lake) == before
    check(planes.lake, 2, 1, 2)


@pytest.mark.lengthy
def test_a_rewrite_holds_the_rows_of_a_pass_once_and_those_of_one_bucket_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, rows, size = World(lake_in(InMemoryStore()), IN_PROCESS), 4_000, 8_000
    monkeypatch.setattr(writer, "ROWS_PER_GROUP", 100)  # what is read at once is little
    world.stream(NAME, Schema.of(k="string", text="string"), ["k"], 2)
    world.send(
        NAME,
        [(f"{number:05d}", f"{number:05d}" * (size // 5)) for number in range(rows)],
        version="v1",
    )
    world.advance(PLANES)
    before, watched = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(watched)
    try:
        repartition_versions(world.lake, NAME, 16, **WHY)
    finally:
        pa.set_memory_pool(before)
    assert verify_version(StoredVersions(world.lake, NAME).require_current(), deep=True).ok
    assert watched.max_memory() < 1.8 * rows * size


def test_a_version_that_an_open_batch_needs_keeps_its_partitions(planes: World) -> None:
    version = StoredVersions(planes.lake, NAME).require_current().version
    reason = "open batch 7 of application app"
    with pytest.raises(StillReadError) as failure:
        repartition_versions(planes.lake, NAME, 5, **WHY, roots=lambda: {version: reason})
    assert failure.value.readers == (reason,)
    check(planes.lake, 2, 1, 2)


def test_what_can_not_be_rewritten_is_refused(planes: World) -> None:
    with pytest.raises(ConfigurationError) as failure:
        repartition_versions(planes.lake, NAME, 2, **WHY)
    assert (failure.value.argument, failure.value.dataset) == ("partitions", NAME)
    with pytest.raises(ConfigurationError) as failure:
        repartition_versions(planes.lake, NAME, 3, reason="", by="ada")
    assert (failure.value.argument, failure.value.dataset) == ("reason", NAME)


@pytest.mark.lengthy
@pytest.mark.rounds
def test_a_member_of_a_version_set_is_rewritten_in_one_commit_of_the_set() -> None:
    seen = set()
    whole_run = set_in(lake_in(InMemoryStore()))
    counted = FaultyStore(whole_run.lake.store)
    repartition_versions(Lake(counted, whole_run.lake.id), NAME, 5, **WHY)
    for nth in [*deaths(counted.requests), len(counted.requests) + 1]:
        world = set_in(lake_in(InMemoryStore()))
        others = StoredVersions(world.lake, "routes").require_manifest()
        before = DatasetLog(world.lake, NAME).read()[0]
        store = FaultyStore(world.lake.store, [Fault("*", nth, "crash-after")])
        with suppress(Crash):
            repartition_versions(Lake(store, world.lake.id), NAME, 5, **WHY)
        partitions = StoredVersions(world.lake, NAME).require_manifest().declaration.partitions
        seen.add(partitions)
        check(world.lake, int(partitions or 0), 1, 2)
        assert StoredVersions(world.lake, "routes").require_manifest() == others
    assert seen == {2, 5}
    now = DatasetLog(world.lake, NAME).read()[0]
    assert now is not None
    assert before is not None
    assert now.manifest_key.startswith("version-sets/both/")
    assert now.number == before.number + 2, "the rewriting, and what was deleted after it"
    assert data_and_documents(world.lake) == reached(world.lake)
    deliver_both(world, 3)
    with pytest.raises(DatasetError, match="partitions is 2, was 5"):
        advance_version_set(
            BOTH, lake=world.lake, systems=world.systems, spark=IN_PROCESS, by="test"
        )
    reports = advance_version_set(
        version_set("both", MORE, ROUTES),
        lake=world.lake,
        systems=world.systems,
        spark=IN_PROCESS,
        by="test",
    )
    assert [report.action for report in reports] == ["sealed", "sealed"]
    check(world.lake, 5, 1, 2, 3)
    assert served(world.lake, "routes") == whole(3)


def test_a_member_is_not_rewritten_under_a_build_of_its_set(planes: World) -> None:
    world = set_in(lake_in(InMemoryStore()))
    deliver_both(world, 3)
    fault = Fault(
        "put_if_match", 1, "meanwhile", lambda: repartition_versions(world.lake, NAME, 5, **WHY)
    )
    behind = Lake(FaultyStore(world.lake.store, [fault]), world.lake.id)
    with pytest.raises(CommitConflictError):
        advance_version_set(BOTH, lake=behind, systems=world.systems, spark=IN_PROCESS, by="test")
    check(world.lake, 5, 1, 2)
    assert served(world.lake, "routes") == whole(2)


def test_a_dry_run_says_what_would_be_done_and_changes_nothing(planes: World) -> None:
    before = DatasetLog(planes.lake, NAME).read()[0]
    report = repartition_versions(
        planes.lake, NAME, 5, **WHY, dry_run=True, roots=lambda: {"v": "open batch 7"}
    )
    assert (report.before, len(report.versions), report.rows, report.holding) == (
        2,
        2,
        8,
        ("open batch 7",),
    )
    assert DatasetLog(planes.lake, NAME).read()[0] == before


@pytest.mark.spark
def test_spark_reads_the_rewritten_buckets_as_its_own(sparkling: World) -> None:
    from pyspark.sql import functions as F

    sparkling.stream(NAME, Schema.of(k="string", n="int"), ["k"], 2)
    rows = [(f"k{number}", number) for number in range(50)]
    sparkling.send(NAME, rows, version="v1")
    sparkling.advance(PLANES)
    repartition_versions(sparkling.lake, NAME, 5, **WHY)
    view = StoredVersions(sparkling.lake, MORE).require_current()
    frame = view.frame(sparkling.spark())
    assert sorted((row.k, row.n) for row in frame.collect()) == sorted(rows)
    right = F.pmod(F.hash("k"), F.lit(5)) == F.spark_partition_id()
    assert frame.where(~right).count() == 0
    joined = frame.hint("merge").join(frame.groupBy("k").agg(F.max("n").alias("most")), "k")
    assert "Exchange" not in joined._jdf.queryExecution().toString()  # type: ignore[operator]
    assert view.get("k7") == {"k": "k7", "n": 7}

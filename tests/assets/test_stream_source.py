"""Versions on a stream: what is settled, what a marker promised, and what the stream may not do
meanwhile.
"""

from __future__ import annotations

import datetime as dt
import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import (
    BY_OFFSET,
    AdjunctDataset,
    FileSource,
    QuerySource,
    bounded_dataset,
)
from dagster_adjunct.assets.declaration.extractors import Projection, PythonExtractor
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.sources.open_source import open_source
from dagster_adjunct.assets.sources.version_source import Awaiting, Delivery, VersionSource
from dagster_adjunct.assets.versions.manifest import Abandoned, DatasetManifest, Delivered
from dagster_adjunct.resources.bucketing.hashing import (
    EMPTY_CHECKSUM,
    checksums_by,
    parse_records_checksum,
    records_checksum,
)
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    DatasetError,
    MarkerConflictError,
    OffsetOutOfRangeError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import (
    PARTITION,
    OffsetRange,
    StreamSystem,
    SystemStreamPartition,
)
from tests.assets.conftest import World, no_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = Schema.of(tailnum="string", seats="int")
PLANES = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=2)


def planes(world: World) -> World:
    world.stream("planes", SCHEMA, ["tailnum"], 2)
    return world


def opened(world: World, spec: AdjunctDataset = PLANES) -> VersionSource:
    return open_source(world.systems, spec, world.lake)


def delivered(source: VersionSource, manifest: DatasetManifest | None = None) -> Delivery:
    delivery = source.next(manifest or source.first_manifest())
    assert isinstance(delivery, Delivery)
    return delivery


def after(manifest: DatasetManifest, delivery: Delivery) -> DatasetManifest:
    done = Delivered(name=delivery.version, version="v1", markers=dict(delivery.markers))
    return manifest.after(delivered=(*manifest.delivered, done), offsets=dict(delivery.offsets))


# -- which version is next


def test_versions_follow_each_other_and_all_that_an_advance_asks_costs_two_requests(
    world: World,
) -> None:
    planes(world)
    for number in (1, 2):
        world.send("planes", [(f"N{i}", number) for i in range(10)], version=f"v{number}")
    asked: list[str] = []

    class Counting(InMemoryStore):
        def get(self, key: str) -> Any:
            asked.append(key)
            return store.get(key)

    store, counting = world.lake.store, Counting()
    system = LakeStreams(Lake(counting, "lake"))
    source = open_source({"lake": system}, PLANES, world.lake)
    manifest = source.first_manifest()
    names = []
    while isinstance(answer := source.next(manifest), Delivery):
        names.append(answer.version)
        assert source.check(answer, no_spark) == 10
        manifest = after(manifest, answer)
    assert names == ["v1", "v2"]
    assert answer.idle
    assert len(asked) == 2


def test_what_arrives_after_the_source_was_opened_is_for_the_next_one(world: World) -> None:
    planes(world)
    source = opened(world)
    manifest = source.first_manifest()
    assert isinstance(source.next(manifest), Awaiting)
    world.send("planes", [("N1", 1)], version="v1")
    assert isinstance(source.next(manifest), Awaiting)
    assert delivered(opened(world), manifest).version == "v1"


def test_a_version_known_from_long_ago_is_dropped_whatever_its_markers_say(world: World) -> None:
    planes(world)
    world.send("planes", [("N1", 1), ("N2", 2)], version="v1")
    world.send("planes", [("N3", 3)], version="v2")
    source = opened(world)
    delivery = delivered(source, source.first_manifest().after(known=("v1",)))
    assert (delivery.version, delivery.redelivered) == ("v2", 2)
    ended = Abandoned(name="v2", reason="x", by="me", at=dt.datetime.now(dt.UTC))
    waiting = source.next(source.first_manifest().after(known=("v1",), abandoned=(ended,)))
    assert isinstance(waiting, Awaiting)
    assert (waiting.redelivered, waiting.idle) == (3, True)


def test_a_stream_that_ends_before_what_was_read_was_recreated(world: World) -> None:
    planes(world)
    source = opened(world)
    manifest = source.first_manifest().after(offsets={"lake.planes.0": "5", "lake.planes.1": "0"})
    with pytest.raises(OffsetOutOfRangeError) as failure:
        source.next(manifest)
    assert (failure.value.partition, failure.value.offset, failure.value.upcoming) == (0, "5", "0")


def test_another_writer_that_read_on_since_we_looked_is_no_stream_recreated(world: World) -> None:
    planes(world)
    source = opened(world)
    world.send("planes", [("N1", 1), ("N2", 1), ("N3", 1), ("N4", 1)], version="v1")
    manifest = after(source.first_manifest(), delivered(opened(world)))
    assert isinstance(answer := source.next(manifest), Awaiting)
    assert answer.idle


def test_an_unknown_system_or_key_is_refused_by_the_datasets_name(world: World) -> None:
    planes(world)
    with pytest.raises(DatasetError) as failure:
        open_source({}, PLANES, world.lake)
    assert failure.value.dataset == "planes"
    with pytest.raises(SchemaMismatchError) as caught:
        opened(world, bounded_dataset("planes", input="lake.planes", key="tail", broadcast=True))
    assert caught.value.column == "tail"


@pytest.mark.parametrize("before_seal", [True, False], ids=["before the seal", "after it"])
def test_a_marker_without_rows_that_comes_again_is_compared_with_what_was_counted(
    world: World, before_seal: bool
) -> None:
    world.spark = IN_PROCESS
    planes(world)
    world.send("planes", [(f"N{i}", i) for i in range(10)], version="v1")
    held = world.streams.upcoming([SystemStreamPartition("lake", "planes", p) for p in range(2)])
    counted = {ssp.partition: int(end) - 1 for ssp, end in held.items()}
    if not before_seal:
        assert world.advance(PLANES).action == "sealed"
    world.mark("planes", "v1", [0, 1], counted)
    world.streams.append_markers(
        "planes", "v1", producer="p", sequence=1, partitions=[0], checksum="sha256:abc"
    )
    report = world.advance(PLANES)
    assert report.action == ("sealed" if before_seal else "up-to-date")
    manifest = StoredVersions(world.lake, PLANES).require_manifest()
    assert {ssp: marker.rows for ssp, marker in manifest.delivered[0].markers.items()} == {
        f"lake.planes.{partition}": rows for partition, rows in counted.items()
    }

    world.mark("planes", "v1", [1], {1: counted[1] + 1})
    with pytest.raises(MarkerConflictError) as caught:
        world.advance(PLANES)
    assert (caught.value.version, caught.value.expected, caught.value.found) == (
        "v1",
        f"records {counted[1]}",
        f"records {counted[1] + 1}",
    )


def test_a_version_whose_marker_comes_again_with_another_count_is_not_sealed(world: World) -> None:
    planes(world)
    world.mark("planes", "v1", [0, 1])
    world.mark("planes", "v1", [0], {0: 3})
    with pytest.raises(MarkerConflictError) as failure:
        world.advance(PLANES)
    assert (failure.value.version, failure.value.found) == ("v1", "records 3")
    assert StoredVersions(world.lake, PLANES).current() is None


# -- checksums


def test_a_checksum_does_not_depend_on_order_or_other_columns_and_sees_every_value(
    spark: SparkSession,
) -> None:
    rows = [("N1", 1), ("N2", None), ("N2", None), (None, 3)]

    def checksum(rows: list[Any], partitions: int = 1) -> str:
        frame = spark.createDataFrame(rows, SCHEMA.ddl()).repartition(partitions)
        return records_checksum(frame.selectExpr("rand() other", "seats", "tailnum"), SCHEMA)

    assert checksum(rows) == checksum(rows[::-1], 3)
    assert parse_records_checksum(checksum(rows).upper()) == checksum(rows)
    assert (
        len({checksum(rows), checksum(rows[1:]), checksum([*rows[1:], ("N1", 2)]), checksum([])})
        == 4
    )
    assert checksum([]) == EMPTY_CHECKSUM
    # By hand: each value that is there behind the number of its column.
    hashes = spark.sql(
        "SELECT xxhash64(0, 'N1', 1, 1), xxhash64(0, 'N2'), xxhash64(0, 'N2'), xxhash64(1, 3)"
    ).first()
    assert hashes is not None
    assert checksum(rows) == f"r2-{sum(hashes) % 2**64:016x}"


def test_a_checksum_reports_where_nulls_stand_whatever_the_values(spark: SparkSession) -> None:
    schema = Schema.of(k="int", a="int", b="int")
    # All of these values; among them are the numbers of the columns themselves.
    rows = set(itertools.permutations((1, 2, None))) | set(itertools.permutations((0, None, None)))
    numbered = [(*row, number) for number, row in enumerate(rows)]
    frame = spark.createDataFrame(numbered, f"{schema.ddl()}, {PARTITION} int")
    assert len(set(checksums_by(PARTITION, frame, schema).values())) == len(rows) == 9


def marked(world: World, checksums: Mapping[int, str | None]) -> World:
    planes(world)
    world.send("planes", [(f"N{i}", i) for i in range(10)])
    for partition, checksum in checksums.items():
        world.streams.append_markers(
            "planes",
            "v1",
            producer="p",
            sequence=partition + 1,
            partitions=[partition],
            checksum=checksum,
        )
    return world


def test_markers_that_promise_the_records_checksum_are_compared_with_the_records(
    sparkling: World,
) -> None:
    ssps = [SystemStreamPartition("lake", "planes", p) for p in range(2)]
    planes(sparkling)
    sparkling.send("planes", [(f"N{i}", i) for i in range(10)])
    system, spark = sparkling.streams, sparkling.spark()
    right = {
        ssp.partition: records_checksum(
            system.read(spark, {ssp: OffsetRange("0", system.upcoming([ssp])[ssp])}), SCHEMA
        )
        for ssp in ssps
    }
    for partition, checksum in ((0, right[0].upper()), (1, right[0])):
        system.append_markers(
            "planes",
            "v1",
            producer="p",
            sequence=partition + 1,
            partitions=[partition],
            checksum=checksum,
        )
    source = opened(sparkling)
    with pytest.raises(MarkerConflictError) as caught:
        source.check(delivered(source), sparkling.spark)
    for part in ("'planes'", "'v1'", "lake.planes.1", right[0], right[1]):
        assert part in caught.value.problem


def test_a_checksum_of_another_form_is_its_producers_own_and_costs_nothing(world: World) -> None:
    marked(world, {0: "sha256:abc", 1: None})
    source = opened(world)
    delivery = delivered(source)
    assert source.check(delivery, no_spark) == 10
    assert delivery.markers["lake.planes.0"].checksum == "sha256:abc"


def test_a_partition_without_records_has_a_checksum_too(world: World) -> None:
    planes(world)
    for partition, checksum in ((0, EMPTY_CHECKSUM), (1, EMPTY_CHECKSUM[:-1] + "1")):
        world.streams.append_markers(
            "planes",
            "v1",
            producer="p",
            sequence=partition + 1,
            partitions=[partition],
            checksum=checksum,
        )
    source = opened(world)
    with pytest.raises(MarkerConflictError) as caught:
        source.check(delivered(source), no_spark)
    assert (caught.value.version, caught.value.expected) == ("v1", "r2-0000000000000001")


# -- schemas


class _Drifting(LakeStreams):
    """A stream whose records change their columns in the middle of a version, as one without
    strict writers does.
    """

    def read(
        self, spark: SparkSession, ranges: Mapping[SystemStreamPartition, OffsetRange]
    ) -> DataFrame:
        from pyspark.sql import functions as F

        return super().read(spark, ranges).withColumn("seats", F.col("seats").cast("string"))

    def snapshot(self, stream: str) -> StreamSystem:
        return self


def test_a_schema_that_changes_within_a_version_is_rejected_by_column(sparkling: World) -> None:
    planes(sparkling)
    sparkling.send("planes", [("N1", 1)], version="v1")
    source = open_source({"lake": _Drifting(sparkling.lake)}, PLANES, sparkling.lake)
    with pytest.raises(SchemaMismatchError) as caught:
        source.read(delivered(source), sparkling.spark)
    for part in ("'planes'", "'v1'", "lake.planes", "seats is string, expected int"):
        assert part in caught.value.problem


def test_a_lake_stream_rejects_records_of_another_schema_before_a_version(world: World) -> None:
    planes(world)
    for wrong in ({"tailnum": ["N1"], "seats": ["many"]}, {"tailnum": ["N1"]}):
        with pytest.raises(SchemaMismatchError) as caught:
            world.streams.append(
                "planes", pa.table(wrong), producer="p", sequence=1, end_of_dataset="v1"
            )
        assert (caught.value.stream, caught.value.column) == ("lake.planes", "seats")


def test_a_stream_recreated_with_other_columns_is_rejected_as_recreated(world: World) -> None:
    planes(world)
    world.send("planes", [])
    world.advance(PLANES)
    shutil.rmtree(Path(world.lake.url) / "streams")
    world.stream("planes", Schema.of(tailnum="bigint", seats="int"), ["tailnum"], 2)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        world.advance(PLANES)
    assert (caught.value.dataset, caught.value.stream) == ("planes", "lake.planes")


# -- datasets without a natural key


def test_records_without_a_key_are_kept_by_their_place_on_the_stream(sparkling: World) -> None:
    sparkling.stream("sightings", SCHEMA, [], 1)
    sparkling.send("sightings", [("N1", 1), ("N1", 1), ("N2", None)], version="v1")
    spec = bounded_dataset(
        "sightings", input="lake.sightings", key=BY_OFFSET, partitions=3, columns=["tailnum"]
    )
    report = sparkling.advance(spec)
    assert (report.action, report.rows, report.counters["superseded"]) == ("sealed", 3, 0)
    view = sparkling.view(spec)
    assert view.schema == Schema.of(
        source_partition="int", source_offset="bigint", tailnum="string"
    )
    assert view.get((0, 1)) == {"source_partition": 0, "source_offset": 1, "tailnum": "N1"}

    sparkling.send("sightings", [(None, None)], version="v2")
    report = sparkling.advance(spec)
    assert report.action == "rejected"
    assert "offset 4 of partition 0 is a tombstone" in report.note


@pytest.mark.parametrize(
    "source", [FileSource("/data", "csv", SCHEMA), QuerySource("SELECT 1", SCHEMA, name="nightly")]
)
def test_files_and_queries_without_a_key_are_refused_by_name(
    source: FileSource | QuerySource,
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        bounded_dataset("planes", input=source, key=BY_OFFSET, broadcast=True)
    assert (caught.value.dataset, caught.value.argument) == ("planes", "key")


def test_what_could_hide_entries_of_a_dataset_keyed_by_offset_is_refused(world: World) -> None:
    world.stream("odd", Schema.of(source_offset="bigint", name="string"), ["name"], 2)
    spec = bounded_dataset("odd", input="lake.odd", key=BY_OFFSET, broadcast=True)
    with pytest.raises(SchemaMismatchError) as failure:
        opened(world, spec)
    assert failure.value.column == "source_offset"
    renamed = Projection("source STRING", {"source": "name"})
    spec = bounded_dataset(
        "odd", input="lake.odd", key=BY_OFFSET, broadcast=True, extractor=renamed
    )
    assert opened(world, spec).schema.names == (*BY_OFFSET, "source")
    several = PythonExtractor("package.module:factory", "name STRING")
    spec = bounded_dataset(
        "odd", input="lake.odd", key=BY_OFFSET, broadcast=True, extractor=several
    )
    with pytest.raises(SchemaMismatchError) as failure:
        opened(world, spec)
    assert failure.value.dataset == "odd"


# -- buckets


def test_entries_keep_the_partitions_of_records_only_where_they_hash_alike(world: World) -> None:
    planes(world)

    def copartitioned(**more: Any) -> bool:
        return opened(
            world,
            bounded_dataset(
                "planes", input="lake.planes", **{"key": "tailnum", "partitions": 2} | more
            ),
        ).copartitioned

    assert copartitioned()
    assert copartitioned(extractor=Projection("tailnum STRING, n BIGINT", {"n": "seats + 1"}))
    assert copartitioned(extractor=PythonExtractor("m:f", "tailnum STRING", unchanged=("tailnum",)))
    assert not copartitioned(partitions=4)
    assert not copartitioned(extractor=Projection("tailnum STRING", {"tailnum": "upper(tailnum)"}))
    assert not copartitioned(extractor=PythonExtractor("m:f", "tailnum STRING"))
    assert not copartitioned(key="seats")
    assert not copartitioned(key=BY_OFFSET)

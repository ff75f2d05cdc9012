"""What is done with stored rows after columns were renamed, dropped and added again: history over
versions, erasure, other partition counts, markers' checksums, local tables, and crashes between.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import (
    BoundedDataset,
    LocalTable,
    OwnedBy,
    QuerySource,
    UnboundedDataset,
    bounded_dataset,
    local_table,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.policies import DeltaCompaction
from dagster_adjunct.assets.generation import ARROW
from dagster_adjunct.assets.reading import superseded
from dagster_adjunct.assets.reading.stored_versions import StoredVersions, open_stored_versions
from dagster_adjunct.assets.reading.valid_time import read_rows_over_time
from dagster_adjunct.assets.reading.verification import verify_version
from dagster_adjunct.assets.rebucketing import repartition_table, repartition_versions
from dagster_adjunct.assets.retention.erasure import erase_keys
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.unbounded.local_table import LocalTableWriter, WritingBatch
from dagster_adjunct.resources.bucketing.hashing import arrow_checksum
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.column_changes import ColumnChanges
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.faulty_store import Crash, Fault, FaultyStore

WHY: dict[str, Any] = {"reason": "test", "by": "me"}
FIRST = Schema.of(k="bigint", note="string", home={"city": "string"})
SECOND = Schema.of(k="bigint", memo="string", home={"town": "string"})
THIRD = Schema.of(k="bigint", memo="string", home={"town": "string", "city": "bigint"}, note="int")
RENAMED = {"note": "memo", "home.city": "town"}


@pytest.fixture
def steps(world: World) -> World:
    """A lake whose stream `planes` is sent and evolved by `step`."""
    world.spark = IN_PROCESS
    return world


def evolve_stream(world: World, schema: Schema, **changes: Any) -> None:
    world.streams.create(
        "planes", schema=schema, key=["k"], partitions=2, changes=ColumnChanges(**changes)
    )


def bounded(**options: Any) -> BoundedDataset:
    return bounded_dataset("planes", input="lake.planes", key="k", partitions=2, **options)


def unbounded(**options: Any) -> UnboundedDataset:
    return unbounded_dataset(
        "planes",
        input="lake.planes",
        key="k",
        partitions=2,
        compaction=DeltaCompaction(inside_commit=False),
        **options,
    )


def deliver(world: World, declare: Any, **options: Any) -> list[str]:
    """Deliver three versions, each with changed columns; return their ids."""
    versions = []
    for schema, renamed, row in (
        (FIRST, {}, (1, "a", {"city": "Oslo"})),
        (SECOND, RENAMED, (2, "b", {"town": "Rome"})),
        (THIRD, {}, (3, "c", {"town": "Bonn", "city": 4}, 5)),
    ):
        evolve_stream(world, schema, renamed=renamed)
        world.send("planes", [row], version=f"2026-01-0{len(versions) + 1}")
        report = world.advance(declare(renamed=renamed, **options))
        assert report.version is not None
        versions.append(report.version)
    return versions


def test_all_versions_over_time_have_the_columns_of_the_newest(steps: World) -> None:
    deliver(steps, bounded, valid_from="name")
    stored = open_stored_versions(steps.lake, "planes")
    reader = stored.over_time(stored.require_manifest().versions_over_time or ())
    rows = read_rows_over_time(reader).select(["k", "memo", "home", "note"]).to_pylist()
    expected = [
        {"k": 1, "memo": "a", "home": {"town": "Oslo", "city": None}, "note": None},
        {"k": 2, "memo": "b", "home": {"town": "Rome", "city": None}, "note": None},
        {"k": 3, "memo": "c", "home": {"town": "Bonn", "city": 4}, "note": 5},
    ]
    assert sorted(rows, key=lambda row: row["k"]) == expected
    assert reader.history_of(1)[0].entry == expected[0]
    first = reader.at(datetime(2026, 1, 1, 12, tzinfo=UTC))
    assert first is not None
    assert first.get(1) == expected[0], "what was valid then has the names of now"


@pytest.mark.spark
def test_spark_reads_all_versions_over_time_with_the_columns_of_the_newest(
    sparkling: World,
) -> None:
    deliver(sparkling, bounded, valid_from="name")
    stored = open_stored_versions(sparkling.lake, "planes")
    reader = stored.over_time(stored.require_manifest().versions_over_time or ())
    rows = reader.history_frame(sparkling.spark()).select("k", "memo", "home", "note").collect()
    assert sorted((row.k, row.memo, row.home.town, row.note) for row in rows) == [
        (1, "a", "Oslo", None),
        (2, "b", "Rome", None),
        (3, "c", "Bonn", 5),
    ]


@pytest.mark.spark
def test_a_mask_leaves_out_superseded_rows_of_renamed_columns(
    sparkling: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(superseded, "FEWEST_ROWS", 0)
    deliver(sparkling, unbounded)
    sparkling.send("planes", [(1, "new", None, 8)])
    sparkling.advance(unbounded())
    stored = open_stored_versions(sparkling.lake, "planes")
    sealed = stored.require_current().sealed
    superseded.try_to_write_mask(sparkling.lake.store, "planes", sealed)
    assert superseded.read_mask(sparkling.lake.store, sealed) is not None
    rows = stored.require_current().frame(sparkling.spark()).collect()
    assert sorted((row.k, row.memo, row.note) for row in rows) == [
        (1, "new", 8),
        (2, "b", None),
        (3, "c", 5),
    ]


@pytest.mark.parametrize("declare", [bounded, unbounded])
def test_erasures_and_other_partition_counts_keep_what_columns_mean(
    steps: World, declare: Any
) -> None:
    versions = deliver(steps, declare)
    erase_keys(steps.lake, "planes", [2], **WHY)
    if declare is bounded:
        repartition_versions(steps.lake, "planes", 3, **WHY)
        versions = [
            ref.id for ref in open_stored_versions(steps.lake, "planes").manifest().versions
        ]
        first = StoredVersions(steps.lake, "planes").version(versions[0])
        assert dict(first.items()) == {1: {"k": 1, "note": "a", "home": {"city": "Oslo"}}}
    else:
        compact_dataset(steps.lake, "planes", spark=IN_PROCESS, level="major", by="me")
        repartition_table(steps.lake, "planes", 3, **WHY)
    view = open_stored_versions(steps.lake, "planes").require_current()
    entries = dict(view.items())
    newest = {"k": 3, "memo": "c", "home": {"town": "Bonn", "city": 4}, "note": 5}
    assert entries[3] == newest
    if declare is unbounded:
        oldest = {"k": 1, "memo": "a", "home": {"town": "Oslo", "city": None}, "note": None}
        assert entries == {1: oldest, 3: newest}
    assert verify_version(view, deep=True).damaged == ()


def test_versions_after_a_rollback_across_a_rename_keep_what_columns_mean(steps: World) -> None:
    first, _, third = deliver(steps, bounded)
    stored = open_stored_versions(steps.lake, "planes")
    stored.rollback(first, reason="test", by="me")
    assert stored.require_current().get(1) == {"k": 1, "note": "a", "home": {"city": "Oslo"}}
    steps.send("planes", [(3, "d", {"town": "Bonn", "city": 4}, 5)], version="2026-01-04")
    fourth = steps.advance(bounded()).version
    assert fourth is not None
    diff = stored.diff(third, fourth)
    assert (diff.columns.renamed, diff.added, diff.removed, diff.changed) == ((), 0, 0, 1)
    renamed = (("note", "memo"), ("home.city", "home.town"))
    assert stored.diff(first, fourth).columns.renamed == renamed
    assert stored.require_current().get(3) == {
        "k": 3, "memo": "d", "home": {"town": "Bonn", "city": 4}, "note": 5,
    }  # fmt: skip


def test_a_rebuild_keeps_the_names_in_files(steps: World) -> None:
    deliver(steps, unbounded)
    stored = open_stored_versions(steps.lake, "planes")
    before = stored.require_current().sealed.names
    rebuild_dataset(unbounded(), lake=steps.lake, systems=steps.systems, spark=IN_PROCESS, **WHY)
    view = stored.require_current()
    assert view.sealed.names == before
    assert len(dict(view.items())) == 3


def test_a_markers_checksum_holds_for_records_whose_columns_were_renamed_since(
    steps: World,
) -> None:
    evolve_stream(steps, FIRST)
    steps.send("planes", [(key, f"t{key}", {"city": "Oslo"}) for key in range(9)])
    streams = steps.streams
    for ssp, span in streams.all_ranges("planes").items():
        records = streams.read_arrow({ssp: span}).select(FIRST.names)
        streams.append_markers(
            "planes",
            "v1",
            producer="marks",
            sequence=ssp.partition + 1,
            partitions=[ssp.partition],
            checksum=arrow_checksum(records, FIRST),
        )
    evolve_stream(steps, SECOND, renamed=RENAMED)
    report = steps.advance(bounded(renamed=RENAMED))
    assert (report.action, report.rows) == ("sealed", 9)


@pytest.mark.lengthy
def test_an_evolving_advance_that_dies_at_any_request_is_taken_up(steps: World) -> None:
    evolve_stream(steps, FIRST)
    steps.send("planes", [(1, "a", {"city": "Oslo"})])
    steps.advance(unbounded())
    evolve_stream(steps, SECOND, renamed=RENAMED)
    steps.send("planes", [(2, "b", {"town": "Rome"})])
    old = {"k": 1, "note": "a", "home": {"city": "Oslo"}}
    renamed = {"k": 1, "memo": "a", "home": {"town": "Oslo"}}
    done = {1: renamed, 2: {"k": 2, "memo": "b", "home": {"town": "Rome"}}}
    stored = open_stored_versions(steps.lake, "planes")
    nth = 0
    died = True
    while died:
        nth += 1
        store = FaultyStore(steps.lake.store, [Fault("*", nth, "crash-before")])
        died = False
        try:
            steps.advance(unbounded(renamed=RENAMED), lake=Lake(store, steps.lake.id))
        except Crash:
            died = True
        assert dict(stored.require_current().items()) in ({1: old}, {1: renamed}, done)
    assert dict(stored.require_current().items()) == done
    assert verify_version(stored.require_current(), deep=True).damaged == ()


@pytest.mark.parametrize("declare", [bounded, unbounded])
def test_a_column_that_a_stream_dropped_and_added_again_is_another_one(
    steps: World, declare: Any
) -> None:
    note = Schema.of(k="bigint", note="string", home={"city": "string", "zip": "string"})
    evolve_stream(steps, note)
    steps.send("planes", [(1, "old", {"city": "Oslo", "zip": "1"})], version="v1")
    first = steps.advance(declare()).version
    bare = Schema.of(k="bigint", home={"zip": "string"})
    evolve_stream(steps, bare, drop=("note", "home.city"))
    evolve_stream(steps, note)
    columns = steps.streams.info("planes").schema
    assert columns is not None
    assert columns.names == ("k", "home", "note")
    steps.send("planes", [(2, {"zip": "2", "city": "Rome"}, "new")], version="v2")
    second = steps.advance(declare()).version
    stored = open_stored_versions(steps.lake, "planes")
    view = stored.require_current()
    assert view.get(2) == {"k": 2, "home": {"zip": "2", "city": "Rome"}, "note": "new"}
    if declare is unbounded:
        assert view.get(1) == {"k": 1, "home": {"zip": "1", "city": None}, "note": None}
    assert first is not None
    assert second is not None
    before = stored.version(first).get(1)
    assert before == {"k": 1, "note": "old", "home": {"city": "Oslo", "zip": "1"}}
    diff = stored.diff(first, second)
    assert {*diff.columns.added} == {*diff.columns.removed} == {"note", "home.city"}
    assert steps.advance(declare()).sealed == ()


# -- local tables


def counts(schema: Schema, **options: Any) -> LocalTable:
    return local_table("counts", OwnedBy("app", schema), key=("k",), partitions=2, **options)


def write(world: World, number: int, spec: LocalTable, *rows: dict[str, Any]) -> None:
    stored = StoredVersions(world.lake, spec).current()
    table = pa.Table.from_pylist([*rows], spec.input.schema.to_arrow())
    table = table.append_column("__tombstone", pa.array([False] * len(rows), pa.bool_()))
    table = table.append_column("__offset", pa.array(range(len(rows)), pa.int64()))
    batch = WritingBatch("app", number, "run")
    pinned = None if stored is None else stored.sealed
    with LocalTableWriter(world.lake, spec, pinned, batch, ARROW) as writes:
        if rows:
            writes.send(table, order_by=("__offset",), partitioned=False)
        writes.commit()


def test_a_local_table_follows_its_columns_and_a_drop_counts_without_records(steps: World) -> None:
    write(steps, 1, counts(FIRST), {"k": 1, "note": "a", "home": {"city": "Oslo"}})
    write(steps, 2, counts(SECOND, renamed=RENAMED), {"k": 2, "memo": "b", "home": None})
    stored = open_stored_versions(steps.lake, "counts")
    assert stored.require_current().get(1) == {"k": 1, "memo": "a", "home": {"town": "Oslo"}}
    with pytest.raises(DatasetError):
        write(steps, 3, counts(Schema.of(k="bigint", memo="string")), {"k": 3, "memo": "c"})
    write(steps, 3, counts(Schema.of(k="bigint", memo="string"), drop="home"))
    again = Schema.of(k="bigint", memo="string", home="bigint")
    write(steps, 4, counts(again), {"k": 3, "memo": "c", "home": 7})
    assert dict(stored.require_current().items()) == {
        1: {"k": 1, "memo": "a", "home": None},
        2: {"k": 2, "memo": "b", "home": None},
        3: {"k": 3, "memo": "c", "home": 7},
    }


# -- declarations that contradict what is stored


def computed(schema: Schema, *rows: dict[str, Any], **options: Any) -> BoundedDataset:
    table = pa.Table.from_pylist([*rows], schema.to_arrow())
    source = QuerySource(lambda spark, asked: table, schema)
    return bounded_dataset("planes", input=source, key="k", partitions=2, **options)


@pytest.mark.parametrize(
    "changes",
    [
        {"renamed": {"k": "key"}},
        {"renamed": {"note": "home"}},
        {"renamed": {"note": "memo"}, "drop": ["note"]},
        {"drop": ["home"]},
    ],
)
def test_what_contradicts_the_columns_is_refused_before_anything_is_computed(
    steps: World, changes: dict[str, Any]
) -> None:
    row = {"k": 1, "note": "a", "home": {"city": "Oslo"}}
    steps.advance(computed(FIRST, row))
    with pytest.raises(DatasetError) as caught:
        steps.advance(computed(FIRST, **changes))
    assert caught.value.dataset == "planes"


def test_a_rename_of_what_no_version_had_is_refused(steps: World) -> None:
    steps.advance(computed(FIRST, {"k": 1, "note": "a", "home": {"city": "Oslo"}}))
    renamed = Schema.of(k="bigint", memo="string", home={"city": "string"})
    row = {"k": 1, "memo": "b", "home": {"city": "Oslo"}}
    with pytest.raises(
        DatasetError, match="no version has had nite: its columns are k, note, home"
    ):
        steps.advance(computed(renamed, row, renamed={"nite": "memo"}))
    for _ in range(2):  # the declaration stays
        steps.advance(computed(renamed, row, renamed={"note": "memo"}))
    assert open_stored_versions(steps.lake, "planes").require_current().get(1) == row


def test_a_column_that_a_version_lacks_is_the_same_one_when_it_is_back(steps: World) -> None:
    bare = Schema.of(k="bigint")
    with_note = Schema.of(k="bigint", note="string")
    first = steps.advance(computed(with_note, {"k": 1, "note": "a"})).version
    steps.advance(computed(bare, {"k": 2}))
    third = steps.advance(computed(with_note, {"k": 1, "note": "b"})).version
    assert first is not None
    assert third is not None
    diff = open_stored_versions(steps.lake, "planes").diff(first, third)
    assert (diff.columns.added, diff.columns.removed, diff.changed) == ((), (), 1)

"""Versions with deltas in Iceberg tables: rows that are no entries are position deletes, and
nothing is compacted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.exchange.iceberg import (
    IcebergSnapshot,
    register_in_iceberg,
    release_from_iceberg,
)
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.superseded import mask_key, try_to_write_mask
from dagster_adjunct.assets.reading.verification import verify_version
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.retention.erasure import erase_keys, find_keys
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.cycle import make_older
from tests.assets.unbounded.tables import Content, content, faulty, send, table
from tests.assets.unbounded.test_compaction import change, ordered
from tests.faulty_store import Crash, Fault
from tests.rounds import rounds

if TYPE_CHECKING:
    from tests.servers.s3 import S3Server

pytest.importorskip("duckdb")
pytest.importorskip("pyiceberg.catalog.sql")

NAME = "table"
TABLE = "reference.accounts"
SUPERSEDED = "dagster_adjunct.assets.exchange.position_deletes"


@dataclass
class Published:
    """A table of a change stream, and an Iceberg table with versions of it; `past` has what each
    snapshot held.
    """

    world: World
    catalog: Any
    past: dict[int, Content] = field(default_factory=dict)

    def current(self) -> VersionReader:
        return StoredVersions(self.world.lake, NAME).require_current()

    def register(
        self, view: VersionReader | None = None, lake: Lake | None = None
    ) -> IcebergSnapshot:
        """Register a version, and compare the new snapshot with what the lake holds."""
        older = view is not None
        view = view or StoredVersions(lake or self.world.lake, NAME).require_current()
        before = self.files()
        snapshot = register_in_iceberg(view, self.catalog, TABLE, replace_newer=older)
        self.past[snapshot.snapshot_id] = content(view)
        if snapshot.new:
            self.check_counts(before)
        return snapshot

    def files(self, content: int = 0) -> dict[str, int]:
        """Return the rows of each live file: data files (0) or position delete files (1)."""
        if not self.catalog.table_exists(TABLE):
            return {}
        listed = [
            f
            for f in self.catalog.load_table(TABLE).inspect.files().to_pylist()
            if f["content"] == content
        ]
        rows = {file["file_path"]: file["record_count"] for file in listed}
        assert len(rows) == len(listed), "no file is there twice"
        return rows

    def check_counts(self, before: dict[str, int]) -> None:
        snapshot = self.catalog.load_table(TABLE).current_snapshot()
        summary = {
            name: int(n)
            for name, n in snapshot.summary.additional_properties.items()
            if n.isdigit()
        }
        data, deletes = self.files(), self.files(1)
        assert (summary["total-data-files"], summary["total-records"]) == (
            len(data),
            sum(data.values()),
        )
        totals = summary["total-delete-files"], summary["total-position-deletes"]
        assert totals == (len(deletes), sum(deletes.values()))
        assert summary["total-records"] - summary["total-position-deletes"] == len(
            self.past[snapshot.snapshot_id]
        )
        assert summary.get("added-data-files", 0) == len(data.keys() - before.keys()), (
            "what stays is not added again"
        )
        assert summary.get("deleted-data-files", 0) == len(before.keys() - data.keys())

    def rows(self, snapshot: int | None = None) -> Content:
        """Return what PyIceberg reads."""
        rows = self.catalog.load_table(TABLE).scan(snapshot_id=snapshot).to_arrow().to_pylist()
        assert len({row["k"] for row in rows}) == len(rows)
        return {row["k"]: row["n"] for row in rows}

    def check_reads(self) -> None:
        """Compare all snapshots with what they held, and the current one by filters, a
        projection and DuckDB.
        """
        for snapshot, held in self.past.items():
            assert self.rows(snapshot) == held
        loaded = self.catalog.load_table(TABLE)
        now = self.past[loaded.current_snapshot().snapshot_id]
        assert sorted(
            loaded.scan().to_duckdb("t").execute("SELECT k, n FROM t").fetchall()
        ) == sorted(now.items())
        few = loaded.scan(row_filter="n >= 50", selected_fields=("k",))
        assert sorted(few.to_arrow()["k"].to_pylist()) == sorted(
            key for key, n in now.items() if n >= 50
        )
        assert few.count() == few.to_arrow().num_rows
        one = loaded.scan(row_filter="k == 'a'").to_arrow()["n"].to_pylist()
        assert one == [n for key, n in now.items() if key == "a"]
        assert loaded.scan().count() == len(now)


@pytest.fixture
def new_catalog(tmp_path: Path) -> Callable[..., Any]:
    def new(**properties: str) -> Any:
        from pyiceberg.catalog.sql import SqlCatalog

        settings = {"warehouse": str(tmp_path / "warehouse"), **properties}
        catalog = SqlCatalog("test", uri=f"sqlite:///{tmp_path}/catalog.db", **settings)
        catalog.create_namespace_if_not_exists("reference")
        return catalog

    return new


@pytest.fixture
def published(tmp_path: Path, new_catalog: Callable[..., Any]) -> Published:
    return Published(World(open_lake(tmp_path / "a läke"), IN_PROCESS), new_catalog())


def major(world: World) -> None:
    compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major")


def check_random_changes(published: Published, seed: int, steps: int) -> None:
    """Send changes, compact and register, also earlier versions, and compare each snapshot with
    a dictionary.
    """
    choice, world = random.Random(seed), published.world
    spec = table(world, NAME)
    truth: Content = {}
    versions: dict[str, Content] = {}
    for step in range(steps):
        changes = {
            key: choice.choice([None, *range(100)])
            for key in choice.sample("abcdefghij", choice.randint(1, 5))
        }
        _, held = send(
            world,
            spec,
            changes if step else {"a": 1, "b": 2, **{k: n for k, n in changes.items() if n}},
        )
        truth = held
        if level := choice.choice([None, None, "minor", "major"]):
            compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level=level)
        if choice.random() < 0.7:
            snapshot = published.register()
            versions[snapshot.version] = published.past[snapshot.snapshot_id]
            assert published.rows() == truth
        if versions and choice.random() < 0.3:
            earlier = choice.choice(list(versions))
            published.register(StoredVersions(world.lake, NAME).version(earlier))
            assert published.rows() == versions[earlier]
    published.register()
    published.check_reads()
    assert published.rows() == truth


@pytest.mark.rounds
@pytest.mark.lengthy
@pytest.mark.parametrize("seed", rounds([1], range(1, 20)))
def test_every_snapshot_is_what_a_dictionary_says(published: Published, seed: int) -> None:
    check_random_changes(published, seed, steps=12)


@pytest.mark.server
def test_snapshots_of_a_lake_on_s3_are_what_a_dictionary_says(
    versitygw: S3Server, new_catalog: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    versitygw.set_in(monkeypatch)
    catalog = new_catalog(**versitygw.warehouse())
    check_random_changes(
        Published(World(open_lake(versitygw.url()), IN_PROCESS), catalog), 3, steps=5
    )


# -- the delete file


def with_deltas(published: Published) -> AdjunctDataset:
    """Make a table whose deltas replace, delete and add rows."""
    spec = table(published.world, NAME)
    send(published.world, spec, {"a": 1, "b": 2, "c": 3})
    send(published.world, spec, {"a": 4, "b": None, "d": 5})
    return spec


def test_the_delete_file_lists_rows_in_the_order_that_the_format_asks_for(
    published: Published,
) -> None:
    with_deltas(published)
    published.register()
    total = 0
    for path in published.files(1):
        file = pq.ParquetFile(path)
        fields = [
            (f.name, f.type, f.nullable, f.metadata[b"PARQUET:field_id"]) for f in file.schema_arrow
        ]
        assert fields == [
            ("file_path", pa.string(), False, b"2147483546"),
            ("pos", pa.int64(), False, b"2147483545"),
        ]
        rows = [(row["file_path"], row["pos"]) for row in file.read().to_pylist()]
        assert rows == sorted(rows)
        assert len({where for where, _ in rows}) == 1, "each delete file is of one data file"
        assert {where for where, _ in rows} <= published.files().keys()
        total += len(rows)
    assert total == 3, "two rows of the base, and the deletion in the delta"


def test_polars_own_reader_leaves_out_the_deleted_rows(published: Published) -> None:
    polars = pytest.importorskip("polars")
    with_deltas(published)
    snapshot = published.register()
    metadata = published.catalog.load_table(TABLE).metadata_location
    rows = polars.scan_iceberg(metadata, reader_override="native").collect().rows(named=True)
    assert {row["k"]: row["n"] for row in rows} == published.past[snapshot.snapshot_id]


def test_who_may_only_lease_versions_can_register_them(published: Published) -> None:
    world = published.world
    with_deltas(published)
    before = {item.key: item.etag for item in world.lake.store.list("")}
    published.register()
    changed = {item.key for item in world.lake.store.list("") if before.get(item.key) != item.etag}
    assert all(key.startswith(f"datasets/{NAME}/leases/") for key in changed)
    assert any(key.endswith(".parquet") for key in changed)


def test_manifests_say_what_they_list(published: Published) -> None:
    """PyIceberg goes by the entries; other engines go by the manifests."""
    from pyiceberg.avro.file import AvroFile
    from pyiceberg.manifest import MANIFEST_ENTRY_SCHEMAS, ManifestEntry

    spec = with_deltas(published)
    published.register()
    send(published.world, spec, {"a": 6})
    published.register()
    loaded = published.catalog.load_table(TABLE)
    found = {}
    for manifest in loaded.current_snapshot().manifests(loaded.io):
        with AvroFile[ManifestEntry](
            loaded.io.new_input(manifest.manifest_path), MANIFEST_ENTRY_SCHEMAS[2]
        ) as file:
            said_messages = file.header.meta["content"]
        entries = manifest.fetch_manifest_entry(loaded.io, discard_deleted=False)
        found[manifest.content.name, said_messages] = {
            (entry.status.name, entry.sequence_number) for entry in entries
        }
    assert found == {
        ("DATA", "data"): {("EXISTING", 1), ("ADDED", 2)},
        ("DELETES", "deletes"): {("DELETED", 1), ("ADDED", 2)},
    }


def test_a_version_that_only_adds_rows_has_no_delete_file(published: Published) -> None:
    spec = table(published.world, NAME)
    send(published.world, spec, {"a": 1})
    send(published.world, spec, {"b": 2})
    published.register()
    published.check_reads()
    assert published.files(1) == {}
    assert operation(published) == "append"


def operation(published: Published) -> str:
    """Return what the current snapshot says that it did."""
    return published.catalog.load_table(TABLE).current_snapshot().summary.operation.value


def test_a_first_snapshot_with_deletes_is_no_append(published: Published) -> None:
    """Engines that follow what is appended (Spark's streams, Flink) read its data files without
    the deletes.
    """
    with_deltas(published)
    published.register()
    assert operation(published) == "overwrite"


@pytest.mark.lengthy
@pytest.mark.parametrize("mask", ["whole", "torn", "missing"])
def test_the_delete_file_is_the_same_whatever_became_of_the_mask(
    published: Published, monkeypatch: pytest.MonkeyPatch, mask: str
) -> None:
    with_deltas(published)
    view = published.current()
    store, key = view.store, mask_key(view.sealed)
    published.register()
    expected = {Path(path).name: rows for path, rows in published.files(1).items()}
    if mask != "missing":
        assert not try_to_write_mask(store, NAME, view.sealed)
    if mask == "torn":
        store.put(key, store.get(key).data[:-9])
    if mask == "whole":
        monkeypatch.setattr(
            f"{SUPERSEDED}.make_mask", lambda *what: pytest.fail("the mask is there")
        )
    published.catalog.drop_table(TABLE)
    published.register()
    assert {Path(path).name: rows for path, rows in published.files(1).items()} == expected


def test_a_damaged_data_file_is_named_and_nothing_is_registered(published: Published) -> None:
    with_deltas(published)
    view = published.current()
    generation = view.sealed.generations[-1]
    path = Path(view.store.url) / generation.folder / generation.files[0].name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(errors.ManifestMismatchError) as caught:
        published.register()
    assert str(caught.value.key).endswith(path.name)
    assert published.catalog.load_table(TABLE).current_snapshot() is None


# -- kinds of versions


@pytest.mark.lengthy
def test_a_column_that_a_delta_adds_is_null_in_older_rows(published: Published) -> None:
    world = published.world
    narrow = table(world, NAME, columns=["k"])
    world.send(NAME, [("a", 1), ("b", 1)])
    world.advance(narrow)
    world.send(NAME, [("a", None)])
    world.advance(narrow)
    register_in_iceberg(published.current(), published.catalog, TABLE)
    world.send(NAME, [("b", 2), ("c", 3)])
    world.advance(table(world, NAME))
    world.send(NAME, [("d", 4)])
    world.advance(table(world, NAME))
    register_in_iceberg(published.current(), published.catalog, TABLE)
    assert published.rows() == {"b": 2, "c": 3, "d": 4}
    world.send(NAME, [("c", 5)])
    world.advance(table(world, NAME))
    published.register()
    assert published.rows() == {"b": 2, "c": 5, "d": 4}


@pytest.mark.parametrize(("wide", "converts"), [("bigint", True), ("double", False)])
def test_a_widened_column_is_read_of_older_rows_where_iceberg_converts_it(
    published: Published, wide: str, converts: bool
) -> None:
    world = published.world
    send(world, table(world, NAME), {"a": 1, "b": 2})
    world.streams.create(NAME, schema=Schema.of(k="string", n=wide), key=["k"], partitions=2)
    send(world, table(world, NAME), {"a": 3})
    if not converts:
        with pytest.raises(errors.DatasetError) as caught:
            published.register()
        assert "adjunct dataset compact table --level major" in caught.value.next_step
        major(world)
    published.register()
    assert published.rows() == {"a": 3, "b": 2}
    assert published.catalog.load_table(TABLE).scan(row_filter="n >= 3").count() == 1


def test_deletions_that_a_base_keeps_are_left_out(published: Published) -> None:
    world = published.world
    spec = ordered(world)
    change(world, spec, ("a", 10, False), ("b", 10, False))
    change(world, spec, ("a", 20, True), ("c", 30, False))
    compact_dataset(world.lake, spec.name, spark=IN_PROCESS, by="test", level="major")
    view = world.view(spec)
    assert (len(view.sealed.generations), view.sealed.stored_rows, view.rows) == (1, 3, 2)
    register_in_iceberg(view, published.catalog, TABLE)
    assert published.rows() == {"b": 10, "c": 30}


def test_a_delta_that_an_erasure_left_alone_is_read_without_its_deletions(
    published: Published,
) -> None:
    world = published.world
    spec = table(world, NAME)
    send(world, spec, {"a": 1})
    send(world, spec, {"b": 2, "c": None})
    assert erase_keys(world.lake, NAME, ["a"], reason="request 7", by="ada").complete
    assert published.current().sealed.lacks_base
    published.register()
    assert published.rows() == {"b": 2}


def test_a_table_without_files_is_empty(published: Published) -> None:
    world = published.world
    spec = table(world, NAME)
    send(world, spec, {"a": 1})
    send(world, spec, {"a": 2})
    published.register()
    for key in ("a", "nobody"):
        erase_keys(world.lake, NAME, [key], reason="request 7", by="ada")
    published.register()
    assert published.rows() == {}


@pytest.mark.parametrize("kind", ["format version 1", "partitioned"])
def test_a_table_that_takes_no_position_deletes_needs_a_compacted_version(
    published: Published, kind: str
) -> None:
    from pyiceberg.partitioning import PartitionField, PartitionSpec
    from pyiceberg.schema import Schema as IcebergSchema
    from pyiceberg.transforms import BucketTransform
    from pyiceberg.types import IntegerType, NestedField, StringType

    columns = IcebergSchema(NestedField(1, "k", StringType()), NestedField(2, "n", IntegerType()))
    if kind == "partitioned":
        spec = PartitionSpec(PartitionField(1, 1000, BucketTransform(2), "bucket"))
        published.catalog.create_table(TABLE, columns, partition_spec=spec)
    else:
        published.catalog.create_table(TABLE, columns, properties={"format-version": "1"})
    with_deltas(published)
    with pytest.raises(errors.DatasetError) as caught:
        register_in_iceberg(published.current(), published.catalog, TABLE)
    assert (caught.value.dataset, caught.value.version) == (NAME, published.current().version)
    assert "adjunct dataset compact table --level major" in caught.value.next_step
    if kind == "format version 1":
        major(published.world)
        register_in_iceberg(published.current(), published.catalog, TABLE)
        assert published.rows() == {"a": 4, "c": 3, "d": 5}


def test_files_of_an_earlier_partition_spec_get_that_of_the_delete_file(
    published: Published,
) -> None:
    """Iceberg for Java applies a delete file to data files of its own spec only."""
    from pyiceberg.partitioning import PartitionField, PartitionSpec
    from pyiceberg.schema import Schema as IcebergSchema
    from pyiceberg.transforms import IdentityTransform
    from pyiceberg.types import IntegerType, NestedField, StringType

    columns = IcebergSchema(NestedField(1, "k", StringType()), NestedField(2, "n", IntegerType()))
    by_n = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "by_n"))
    published.catalog.create_table(TABLE, columns, partition_spec=by_n)
    spec = table(published.world, NAME)
    send(published.world, spec, {"a": 1, "b": 1, "c": 1})
    published.register()
    with published.catalog.load_table(TABLE).update_spec() as update:
        update.remove_field("by_n")
    send(published.world, spec, {"a": 5, "b": None})
    register_in_iceberg(published.current(), published.catalog, TABLE)
    assert published.rows() == {"a": 5, "c": 1}
    files = published.catalog.load_table(TABLE).inspect.files().to_pylist()
    assert {file["spec_id"] for file in files} == {1}
    data = [file for file in files if file["content"] == 0]
    assert len({file["file_path"] for file in data}) == len(data) == 4


# -- what happens on the way


@pytest.mark.lengthy
def test_a_registration_that_was_killed_at_any_write_is_repeated(published: Published) -> None:
    spec = with_deltas(published)
    published.register()
    number = 0
    for nth in (1, 2):
        for kind in ("crash-before", "crash-after"):
            number += 1
            send(published.world, spec, {"a": 10 + number})
            with pytest.raises(Crash):
                published.register(lake=faulty(published.world, Fault("put", nth, kind)))
            assert published.register().new
            assert not published.register().new
    published.check_reads()


@pytest.mark.lengthy
@pytest.mark.parametrize("landed", [False, True])
def test_a_commit_that_is_declared_to_have_failed_is_in_once(
    published: Published, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    from pyiceberg.exceptions import CommitFailedException

    spec = with_deltas(published)
    published.register()
    send(published.world, spec, {"a": 6})
    commit, failures = published.catalog.commit_table, [True]

    def fail_once(*arguments: Any, **options: Any) -> Any:
        failing = failures and failures.pop()
        if failing and not landed:
            raise CommitFailedException("a property was changed")
        response = commit(*arguments, **options)
        if failing:
            raise CommitFailedException("the reply was lost, and the request repeated")
        return response

    monkeypatch.setattr(published.catalog, "commit_table", fail_once)
    assert published.register().new
    assert len(published.catalog.load_table(TABLE).snapshots()) == 2
    published.check_reads()


def test_a_commit_of_unknown_outcome_is_not_registered_twice(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg.exceptions import CommitStateUnknownException

    with_deltas(published)
    commit = published.catalog.commit_table

    def lose(*arguments: Any, **options: Any) -> Any:
        response = commit(*arguments, **options)
        if any(type(update).__name__ == "AddSnapshotUpdate" for update in arguments[2]):
            raise CommitStateUnknownException("no answer")
        return response

    with monkeypatch.context() as patched:
        patched.setattr(published.catalog, "commit_table", lose)
        with pytest.raises(errors.CommitStateUnknownError):
            published.register()
    assert not published.register().new
    published.check_reads()


@pytest.mark.lengthy
def test_whoever_registers_over_an_unseen_snapshot_is_reported_so(published: Published) -> None:
    """Also where the two snapshots add no data file that the other one would miss."""
    world = published.world
    spec = table(world, NAME)
    send(world, spec, {"a": 1, "b": 2})
    first = published.current()
    send(world, spec, {"a": 3})
    published.register()
    send(world, spec, {"a": 4})
    load = published.catalog.load_table

    class Racing:
        name = "racing"

        def load_table(self, identifier: str) -> Any:
            loaded = load(identifier)
            published.register(first)
            return loaded

    with pytest.raises(errors.CommitConflictError):
        register_in_iceberg(published.current(), Racing(), TABLE)  # type: ignore[arg-type]
    assert published.rows() == {"a": 1, "b": 2}
    published.register()
    published.check_reads()


@pytest.mark.lengthy
def test_what_others_did_to_the_table_is_undone(published: Published) -> None:
    """A data file that comes back is younger than the delete file that the table still has,
    which would not apply.
    """
    with_deltas(published)
    published.register()
    gone = published.rows()
    published.catalog.load_table(TABLE).delete("k == 'a' or k == 'c'")
    assert published.rows() == {"d": 5}
    assert published.register().new
    assert published.rows() == gone == {"a": 4, "c": 3, "d": 5}
    published.check_reads()


@pytest.mark.lengthy
def test_files_of_a_lake_that_was_moved_replace_those_of_the_same_version(
    published: Published,
) -> None:
    """Its version is the current one of the table, but the table's files are where the lake was
    before.
    """
    with_deltas(published)
    published.register()
    moved = Path(published.world.lake.url).rename(
        Path(published.world.lake.url).with_name("elsewhere")
    )
    published.world.lake = open_lake(moved)
    published.past.clear()
    snapshot = published.register()
    assert snapshot.new
    assert published.files().keys() == set(snapshot.files)
    published.check_reads()
    assert not published.register().new


# -- how long it stays


@pytest.mark.lengthy
def test_the_delete_file_stays_as_long_as_its_version_is_held(published: Published) -> None:
    world = published.world
    spec = with_deltas(published)
    published.register()
    deletes = list(published.files(1))
    major(world)
    send(world, spec, {"e": 6})
    major(world)
    everything = DiscardPolicy(keep=1, grace=timedelta(0))
    published.register()
    discard(world.lake, NAME, everything, by="test")
    published.check_reads()
    published.catalog.drop_table(TABLE)
    release_from_iceberg(world.lake, NAME, TABLE)
    assert discard(world.lake, NAME, everything, by="test").discarded
    assert deletes
    assert not any(Path(path).exists() for path in deletes)


@pytest.mark.lengthy
def test_a_table_of_the_same_name_in_another_catalogue_holds_its_own_versions(
    published: Published, tmp_path: Path
) -> None:
    from pyiceberg.catalog.sql import SqlCatalog

    world = published.world
    spec = with_deltas(published)
    published.register()
    make_older(world.lake, timedelta(hours=2))
    major(world)
    send(world, spec, {"b": 5})
    other = SqlCatalog(
        "other", uri=f"sqlite:///{tmp_path}/other.db", warehouse=str(tmp_path / "other")
    )
    other.create_namespace("reference")
    for _ in range(2):
        register_in_iceberg(published.current(), other, TABLE)
    discard(world.lake, NAME, DiscardPolicy(keep=1, grace=timedelta(0)), by="test")
    published.check_reads()
    assert len(release_from_iceberg(world.lake, NAME, TABLE)) == 2


@pytest.mark.lengthy
def test_an_erasure_takes_no_delete_file_for_one_that_may_hold_a_key(published: Published) -> None:
    world = published.world
    with_deltas(published)
    published.register()
    assert verify_version(published.current(), deep=True).ok
    assert find_keys(world.lake, NAME, ["nobody"]).clean
    assert erase_keys(world.lake, NAME, ["a"], reason="request 7", by="ada").pending
    published.check_reads()
    assert published.register().new
    assert published.rows() == {"c": 3, "d": 5}
    published.check_reads()
    for snapshot in list(published.past)[:-1]:
        published.catalog.load_table(TABLE).maintenance.expire_snapshots().by_id(snapshot).commit()
        del published.past[snapshot]
    release_from_iceberg(world.lake, NAME, TABLE)
    assert erase_keys(world.lake, NAME, ["a"], reason="request 7", by="ada").complete
    published.check_reads()

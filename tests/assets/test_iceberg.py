"""Versions as snapshots of an Iceberg table, in PyIceberg's SQL catalogue, read back by
PyIceberg and DuckDB.
"""

from __future__ import annotations

import datetime as dt
import errno
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.exchange.handover import parquet_files
from dagster_adjunct.assets.exchange.iceberg import (
    IcebergSnapshot,
    IcebergTable,
    register_in_iceberg,
    release_from_iceberg,
)
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.leases import list_leases, release_versions, retain_version
from dagster_adjunct.assets.versions.manifest import BoundedManifest
from dagster_adjunct.assets.versions.switches import VersionActions
from dagster_adjunct.assets.versions.version import DatasetDeclaration, VersionRef
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    DatasetError,
    ManifestMismatchError,
    TransientError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from tests.assets.sealing import Row, view_of

if TYPE_CHECKING:
    from tests.servers.s3 import S3Server

pytest.importorskip("pyiceberg.catalog.sql")
duckdb = pytest.importorskip("duckdb")

SCHEMA = Schema.of(
    tailnum="string",
    seats="smallint",
    age="tinyint",
    miles="bigint",
    cost="decimal(9,2)",
    built="date",
    seen="timestamp",
    photo="binary",
    weight="double",
    leased="boolean",
)
TABLE = "reference.planes"


def plane(n: int) -> Row:
    return (
        f"N{n:02}", n, None if n % 3 else n % 100, n * 2**40, None, dt.date(2000, 1, 1 + n % 28),
        dt.datetime(2024, 1, 1, 0, 0, n % 60, n, dt.UTC), bytes([n]), n / 3, n % 2 == 0,
    )  # fmt: skip


@dataclass
class Published:
    """A dataset whose versions are written and committed here, without the cycle, and a
    catalogue beside it.
    """

    lake: Lake
    catalog: Any
    views: list[VersionReader] = field(default_factory=list)

    def publish(
        self, rows: list[Row], schema: Schema = SCHEMA, name: str = "planes"
    ) -> VersionReader:
        number = len(self.views) + 1
        view = view_of(
            self.lake.store,
            rows,
            schema=schema,
            key=["tailnum"],
            partitions=3,
            dataset=name,
            number=number,
        )
        log = DatasetLog(self.lake, name)
        parent, manifest = log.read()
        sealed = view.sealed
        ref = VersionRef(
            id=sealed.id,
            number=number,
            name=sealed.name,
            rows=sealed.rows,
            sealed_at=sealed.sealed_at,
            document=log.write_version(sealed),
            folders=tuple(generation.folder for generation in sealed.generations),
        )
        declaration = DatasetDeclaration(
            kind="bounded", input="query planes", key=("tailnum",), key_types=("string",),
            partition_by=("tailnum",), partitions=3, input_partitions=0,
        )  # fmt: skip
        manifest = manifest or BoundedManifest(name=name, declaration=declaration, offsets={})
        served = {
            "version": sealed,
            "head": sealed.id,
            "next_number": number + 1,
            "next_generation": number + 1,
        }
        log.commit(parent, manifest.after(versions=(*manifest.versions, ref), **served), by="test")
        self.views.append(view)
        return view

    def register(self, view: VersionReader, **more: Any) -> IcebergSnapshot:
        return register_in_iceberg(view, self.catalog, TABLE, **more)

    def rows(self, snapshot: int | None = None) -> list[Row]:
        return rows_of(self.catalog.load_table(TABLE).scan(snapshot_id=snapshot).to_arrow())

    def held(self) -> set[str]:
        return {version for lease in list_leases(self.lake, "planes") for version in lease.versions}


def rows_of(table: pa.Table) -> list[Row]:
    return sorted(tuple(row.values()) for row in table.to_pylist())


@pytest.fixture
def new_catalog(tmp_path: Path) -> Callable[..., Any]:
    def new(**properties: str) -> Any:
        from pyiceberg.catalog.sql import SqlCatalog

        catalog = SqlCatalog(
            "test",
            uri=f"sqlite:///{tmp_path}/catalog.db",
            **{"warehouse": str(tmp_path / "warehouse")} | properties,
        )
        catalog.create_namespace_if_not_exists("reference")
        return catalog

    return new


@pytest.fixture
def planes(tmp_path: Path, new_catalog: Callable[..., Any]) -> Published:
    return Published(open_lake(tmp_path / "a läke"), new_catalog())


def check_versions_follow_each_other(planes: Published) -> None:
    monday, tuesday = [plane(n) for n in range(40)], [plane(n) for n in range(5, 50)]
    first = planes.register(planes.publish(monday))
    assert planes.rows() == monday
    second = planes.register(planes.publish(tuesday), properties={"ticket": "7"})
    assert planes.rows() == tuesday
    assert planes.rows(first.snapshot_id) == monday, "earlier snapshots stay for time travel"

    table = planes.catalog.load_table(TABLE)
    assert [s.snapshot_id for s in table.snapshots()] == [first.snapshot_id, second.snapshot_id]
    assert sorted(table.inspect.files()["file_path"].to_pylist()) == sorted(
        parquet_files(planes.views[1])
    )
    assert second.files == tuple(parquet_files(planes.views[1]))
    summary = table.current_snapshot().summary.additional_properties
    assert summary["adjunct.dataset"] == "planes"
    assert (summary["adjunct.version"], summary["adjunct.version-name"]) == (
        planes.views[1].version,
        "v2",
    )
    assert (summary["ticket"], summary["total-records"], summary["deleted-records"]) == (
        "7",
        "45",
        "40",
    )

    result = table.scan(row_filter="seats >= 45").to_duckdb("planes")
    expected = [row for row in tuesday if row[1] >= 45]
    assert sorted(result.execute("FROM planes").fetchall()) == expected
    assert result.execute("SELECT max(seen), sum(miles) FROM planes").fetchall() == [
        (max(row[6] for row in expected), sum(row[3] for row in expected))
    ]


@pytest.mark.lengthy
def test_each_version_is_one_snapshot_over_the_lakes_own_files(planes: Published) -> None:
    check_versions_follow_each_other(planes)


@pytest.mark.server
def test_a_lake_on_s3_can_be_registered(
    versitygw: S3Server, new_catalog: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    versitygw.set_in(monkeypatch)
    catalog = new_catalog(**versitygw.warehouse())
    check_versions_follow_each_other(Published(open_lake(versitygw.url()), catalog))


def test_the_current_version_is_not_registered_twice(planes: Published) -> None:
    view = planes.publish([plane(1)])
    first = planes.register(view)
    again = planes.register(view)
    assert (first.new, again.new) == (True, False)
    assert again.snapshot_id == first.snapshot_id
    assert len(planes.catalog.load_table(TABLE).snapshots()) == 1


@pytest.mark.lengthy
def test_a_version_without_rows_empties_the_table(planes: Published) -> None:
    planes.register(planes.publish([plane(1)]))
    empty = planes.register(planes.publish([]))
    assert (planes.rows(), empty.files) == ([], ())
    planes.register(planes.publish([plane(2)]))
    assert planes.rows() == [plane(2)]


def test_new_columns_are_added_and_others_refused_with_the_difference(planes: Published) -> None:
    old = Schema.of(tailnum="string", seats="int")
    first = planes.publish([("N1", 1)], old)
    planes.register(first)
    wider = planes.publish(
        [("N2", "blue", 2)], Schema.of(tailnum="string", colour="string", seats="int")
    )
    planes.register(wider)
    assert planes.catalog.load_table(TABLE).scan().to_arrow().to_pylist() == [
        {"tailnum": "N2", "seats": 2, "colour": "blue"}
    ]
    retyped = planes.publish(
        [("N3", 3, "blue")], Schema.of(tailnum="string", seats="bigint", colour="string")
    )
    with pytest.raises(
        DatasetError, match=r"'reference.planes': seats is long, expected int\. Register"
    ):
        planes.register(retyped)
    narrower = planes.publish([("N3", 3)], old)
    with pytest.raises(DatasetError, match=r"colour \(string\) is missing"):
        planes.register(narrower)
    assert planes.held() == {first.version, wider.version}, "what was refused is not held"

    planes.register(first, replace_newer=True)
    assert planes.rows() == [("N1", 1, None)]


def test_a_table_of_others_is_not_replaced(planes: Published) -> None:
    view = planes.publish([plane(1)])
    foreign = planes.catalog.create_table(TABLE, pa.schema([("x", pa.int32())]))
    foreign.append(pa.table({"x": pa.array([1], pa.int32())}))
    with pytest.raises(
        DatasetError,
        match="holds data of its own, which registering dataset 'planes' would replace",
    ):
        planes.register(view)
    register_in_iceberg(view, planes.catalog, "reference.mine")
    other = view_of(
        planes.lake.store, [plane(1)], schema=SCHEMA, key=["tailnum"], dataset="other", number=9
    )
    with pytest.raises(
        DatasetError, match="holds dataset 'planes', which registering dataset 'other'"
    ):
        register_in_iceberg(other, planes.catalog, "reference.mine")
    with pytest.raises(ConfigurationError) as caught:
        register_in_iceberg(view, planes.catalog, "nowhere.planes")
    assert caught.value.table == "nowhere.planes"
    assert "create_namespace('nowhere')" in caught.value.next_step


def test_a_table_with_identifier_fields_is_refused(planes: Published) -> None:
    """They need required columns, and those of the lake's files are optional."""
    from pyiceberg.schema import Schema as IcebergSchema
    from pyiceberg.types import IntegerType, NestedField, StringType

    required = NestedField(1, "tailnum", StringType(), required=True)
    columns = IcebergSchema(
        required, NestedField(2, "seats", IntegerType()), identifier_field_ids=[1]
    )
    planes.catalog.create_table(TABLE, columns)
    with pytest.raises(DatasetError, match="tailnum is an identifier field there") as caught:
        planes.register(planes.publish([("N1", 1)], Schema.of(tailnum="string", seats="int")))
    assert caught.value.dataset == "planes"
    assert planes.held() == set()


def test_a_table_that_the_user_made_is_filled(planes: Published) -> None:
    planes.catalog.create_table(TABLE, SCHEMA.to_arrow(), properties={"owner": "ada"})
    planes.register(planes.publish([plane(1)]))
    assert planes.rows() == [plane(1)]
    properties = planes.catalog.load_table(TABLE).properties
    assert (properties["owner"], properties["gc.enabled"]) == ("ada", "false"), (
        "the files are the lake's to delete"
    )


class Racing:
    """A catalogue in which somebody else registers another version once the table is loaded."""

    def __init__(self, catalog: Any, meanwhile: Callable[[], object]) -> None:
        self._catalog, self._meanwhile = catalog, meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)

    def load_table(self, identifier: str) -> Any:
        table = self._catalog.load_table(identifier)
        self._meanwhile()
        return table


@pytest.mark.lengthy
@pytest.mark.parametrize("filled", [True, False])
def test_of_two_that_register_at_once_one_is_reported_to_do_it_again(
    planes: Published, filled: bool
) -> None:
    if filled:
        planes.register(planes.publish([plane(1)]))
    else:
        planes.catalog.create_table(TABLE, SCHEMA.to_arrow())
    theirs, mine = planes.publish([plane(2)]), planes.publish([plane(3)])
    racing = Racing(planes.catalog, lambda: planes.register(theirs))
    with pytest.raises(CommitConflictError) as caught:
        register_in_iceberg(mine, racing, TABLE)
    assert caught.value.dataset == "planes"
    assert planes.rows() == [plane(2)], "one whole version, never a mix"
    planes.register(mine)
    assert planes.rows() == [plane(3)]


def test_a_version_that_is_not_served_replaces_no_newer_one(planes: Published) -> None:
    first, second, third = (planes.publish([plane(n)]) for n in (1, 2, 3))
    for view in (first, second, third):  # in order, as when a table is filled
        planes.register(view)
    for view in (first, second):
        with pytest.raises(CommitConflictError) as caught:
            planes.register(view)
        assert caught.value.dataset == "planes"
        assert planes.rows() == [plane(3)]
    VersionActions(DatasetLog(planes.lake, "planes")).rollback("v2", reason="wrong", by="test")
    planes.register(second)
    assert planes.rows() == [plane(2)], "it is served again"
    with pytest.raises(CommitConflictError):
        planes.register(third)
    planes.register(third, replace_newer=True)
    assert planes.rows() == [plane(3)]


@pytest.mark.lengthy
def test_what_snapshots_refer_to_is_not_discarded_until_they_expire(planes: Published) -> None:
    policy = DiscardPolicy(keep=1, grace=timedelta(0))
    for n in range(1, 4):
        planes.register(planes.publish([plane(n)]))
    planes.publish([plane(4)])
    assert planes.held() == {view.version for view in planes.views[:3]}
    report = discard(planes.lake, "planes", policy, by="test")
    assert report.discarded == ()
    assert "Iceberg table reference.planes" in report.kept[0].reason
    for view in planes.views[:3]:
        assert planes.rows(snapshot_of(planes, view)) == [plane(view.sealed.number)]

    table = planes.catalog.load_table(TABLE)
    table.maintenance.expire_snapshots().by_id(snapshot_of(planes, planes.views[0])).commit()
    age(planes.lake, planes.views[0], hours=2)
    planes.register(planes.views[2])
    discard(planes.lake, "planes", policy, by="test")
    assert [Path(path).exists() for path in (parquet_files(view)[0] for view in planes.views)] == [
        False, True, True, True,
    ]  # fmt: skip
    assert planes.rows() == [plane(3)]

    planes.catalog.drop_table(TABLE)
    gone = release_from_iceberg(planes.lake, "planes", TABLE)
    assert set(gone) == {planes.views[1].version, planes.views[2].version}
    assert planes.held() == set()


def snapshot_of(planes: Published, view: VersionReader) -> int:
    snapshots = planes.catalog.load_table(TABLE).snapshots()
    return next(
        s.snapshot_id
        for s in snapshots
        if s.summary.additional_properties["adjunct.version"] == view.version
    )


def age(lake: Lake, view: VersionReader, *, hours: int) -> None:
    """Make a hold of this version look older."""
    (key,) = [lease.key for lease in list_leases(lake, "planes") if view.version in lease.versions]
    then = dt.datetime.now(dt.UTC).timestamp() - hours * 3600
    os.utime(Path(lake.url) / key, (then, then))


def test_a_version_that_is_gone_or_revoked_is_not_registered(planes: Published) -> None:
    bare = view_of(planes.lake.store, [plane(1)], schema=SCHEMA, key=["tailnum"], number=9)
    planes.publish([plane(1)])
    with pytest.raises(VersionDiscardedError) as caught:
        planes.register(bare)
    assert (caught.value.dataset, caught.value.version) == ("planes", "v000009-attempt9")
    assert planes.held() == set()

    view = planes.publish([plane(2)])
    log = DatasetLog(planes.lake, "planes")

    def revoke(manifest: BoundedManifest) -> BoundedManifest:
        first, second = manifest.versions
        revoked = second.model_copy(update={"state": "revoked", "reason": "wrong prices"})
        sealed = planes.views[0].sealed
        return manifest.after(versions=(first, revoked), version=sealed, head=sealed.id)

    log.transact(revoke, by="test")
    with pytest.raises(DatasetError, match=r"is revoked \(wrong prices\)"):
        planes.register(view)


def test_a_file_that_is_missing_or_not_the_manifests_is_named(planes: Published) -> None:
    view = planes.publish([plane(n) for n in range(9)])
    path = Path(parquet_files(view)[0])
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(ManifestMismatchError) as caught:
        planes.register(view)
    assert (caught.value.dataset, caught.value.version) == ("planes", view.version)
    path.write_bytes(Path(parquet_files(view)[1]).read_bytes())
    with pytest.raises(ManifestMismatchError) as caught:
        planes.register(view)
    assert str(path).endswith(f"/{caught.value.key}")
    path.write_bytes(whole)
    planes.register(view)
    assert planes.rows() == [plane(n) for n in range(9)]


def test_too_many_open_files_are_no_damage_of_a_version(
    planes: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = planes.publish([plane(1)])

    def describe(*given: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("pyiceberg.io.pyarrow.parquet_files_to_data_files", describe)
    with pytest.raises(ConfigurationError) as caught:
        planes.register(view)
    assert "ulimit -n" in caught.value.next_step


def test_a_hold_is_let_go_by_its_holder_and_not_while_it_settles(planes: Published) -> None:
    view, other = planes.publish([plane(1)]), planes.publish([plane(2)])
    retain_version(planes.lake, "planes", view.version, holder="a")
    retain_version(planes.lake, "planes", view.version, holder="b")
    retain_version(planes.lake, "planes", other.version, holder="a")
    assert release_versions(planes.lake, "planes", holder="a", keep=lambda: [other.version]) == ()
    assert release_versions(planes.lake, "planes", holder="a") == (view.version, other.version)
    assert planes.held() == {view.version}
    assert release_versions(planes.lake, "planes", holder="nobody") == ()


def test_without_pyiceberg_it_says_what_to_install(
    planes: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyiceberg.table", None)
    with pytest.raises(ConfigurationError, match=r'pip install "dagster-adjunct\[iceberg\]"'):
        planes.register(planes.publish([plane(1)]))


@pytest.mark.parametrize("identifier", ["planes", "", "reference.", ".planes", "a..b"])
def test_an_identifier_without_a_namespace_or_a_name_is_refused(
    planes: Published, identifier: str
) -> None:
    view = planes.publish([plane(1)])
    for attempt in (
        lambda: register_in_iceberg(view, planes.catalog, identifier),
        lambda: IcebergTable(identifier),
    ):
        with pytest.raises(ConfigurationError) as caught:
            attempt()
        assert caught.value.table == identifier


def test_a_property_that_iceberg_sets_itself_is_refused(planes: Published) -> None:
    with pytest.raises(ConfigurationError) as caught:
        planes.register(planes.publish([plane(1)]), properties={"operation": "import"})
    assert caught.value.argument == "properties"


def test_a_catalogue_that_does_not_answer_may_do_so_later(
    planes: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyiceberg.catalog
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.utils.config import Config

    place = f"sqlite:///{tmp_path}/nowhere/catalog.db"
    catalog = SqlCatalog("gone", uri=place, warehouse=str(tmp_path), init_catalog_tables="false")
    with pytest.raises(TransientError, match="'gone' does not answer"):
        register_in_iceberg(planes.publish([plane(1)]), catalog, TABLE)
    for name, value in {"TYPE": "sql", "URI": place}.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__GONE__{name}", value)
    # it is read once, when this is imported
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
    with pytest.raises(TransientError, match="'gone' does not answer"):
        IcebergTable(TABLE, "gone").open()

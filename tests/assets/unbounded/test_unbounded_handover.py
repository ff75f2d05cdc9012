"""Tables of change streams in other engines: the dataset's columns and entries, from the lake's
own files.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.exchange.handover import (
    duckdb_view,
    parquet_files,
    polars_frame,
    pyarrow_dataset,
)
from dagster_adjunct.assets.exchange.iceberg import (
    IcebergTable,
    publish_to_iceberg,
    register_in_iceberg,
    release_from_iceberg,
)
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.retention.erasure import erase_keys
from dagster_adjunct.assets.unbounded.advance import advance_unbounded
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError, NoSealedVersionError
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.unbounded.tables import Content, content, faulty, send, table
from tests.faulty_store import Fault

duckdb = pytest.importorskip("duckdb")
pytest.importorskip("polars")
pytest.importorskip("pyiceberg.catalog.sql")

NAME = "table"
TABLE = IcebergTable("reference.accounts", catalog="lakehouse")


@pytest.fixture
def quick(tmp_path: Path) -> World:
    return World(open_lake(tmp_path / "lake"), IN_PROCESS)


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A catalogue that PyIceberg's configuration names."""
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKEHOUSE__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKEHOUSE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKEHOUSE__WAREHOUSE", str(tmp_path / "warehouse"))
    configured(monkeypatch)
    opened = TABLE.open()
    opened.create_namespace("reference")
    return opened


def configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyIceberg read its configuration again: it does so once, when it is imported."""
    import pyiceberg.catalog
    from pyiceberg.utils.config import Config

    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())


def compacted(world: World, spec: AdjunctDataset, *changes: dict[str, int | None]) -> Content:
    entries: Content = {}
    for batch in changes:
        _, entries = send(world, spec, batch)
    compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major")
    return entries


def everywhere(world: World) -> Content:
    """Return what all engines see in what is served, which is the same."""
    view = StoredVersions(world.lake, NAME).require_current()
    connection = duckdb.connect()
    duckdb_view(connection, view, "v")
    columns = list(view.schema.names)
    assert [column[0] for column in connection.execute("FROM v").description] == columns
    assert (
        pyarrow_dataset(view).to_table().column_names
        == polars_frame(view).collect().columns
        == columns
    )
    rows = sorted(connection.execute("FROM v").fetchall())
    assert sorted(polars_frame(view).collect().rows()) == rows
    assert (
        sorted(tuple(row.values()) for row in pyarrow_dataset(view).to_table().to_pylist()) == rows
    )
    return {row[0]: row[1] for row in rows}


def in_iceberg(catalog: Any, snapshot: int | None = None) -> Content:
    """Return what PyIceberg and DuckDB read from the table."""
    scan = catalog.load_table(TABLE.identifier).scan(snapshot_id=snapshot)
    assert scan.to_arrow().column_names[:2] == ["k", "n"]
    rows = sorted(scan.to_duckdb("t").execute("SELECT k, n FROM t").fetchall())
    assert sorted((row["k"], row["n"]) for row in scan.to_arrow().to_pylist()) == rows
    return dict(rows)


# -- engines


@pytest.mark.lengthy
def test_a_compacted_table_is_handed_over_and_one_with_deltas_is_not(quick: World) -> None:
    spec = table(quick, NAME)
    entries = compacted(quick, spec, {"a": 1, "b": 2, "c": 3}, {"a": 4, "b": None})
    assert everywhere(quick) == entries == {"a": 4, "c": 3}
    send(quick, spec, {"a": 5})
    with pytest.raises(DatasetError, match="adjunct dataset compact table --level major"):
        parquet_files(StoredVersions(quick.lake, NAME).require_current())


@pytest.mark.lengthy
def test_files_from_before_a_column_was_added_are_read_as_they_are_now(
    quick: World, catalog: Any
) -> None:
    narrow = table(quick, NAME, columns=["k"])
    quick.send(NAME, [("a", 1), ("b", 1)])
    quick.advance(narrow)
    first = register_in_iceberg(
        StoredVersions(quick.lake, NAME).require_current(), catalog, TABLE.identifier
    )
    quick.advance(table(quick, NAME))
    assert everywhere(quick) == {"a": None, "b": None}
    second = register_in_iceberg(
        StoredVersions(quick.lake, NAME).require_current(), catalog, TABLE.identifier
    )
    assert second.new
    assert second.files == first.files
    assert in_iceberg(catalog) == {"a": None, "b": None}
    systems = {"lake": quick.streams}
    context = Runtime(quick.lake, systems, IN_PROCESS, "test")
    advance_unbounded(context, table(quick, NAME), rebuild="for the new column")
    publish_to_iceberg(quick.lake, NAME, TABLE)
    assert in_iceberg(catalog) == everywhere(quick) == {"a": 1, "b": 1}


# -- Iceberg


@pytest.mark.lengthy
def test_versions_follow_each_other_and_nobody_sees_adjunct_s_own_columns(
    quick: World, catalog: Any
) -> None:
    spec = table(quick, NAME)
    _, before = send(quick, spec, {"a": 1, "b": 2})
    first = publish_to_iceberg(quick.lake, NAME, TABLE)
    _, after = send(quick, spec, {"a": 3, "b": None, "c": 4})
    second = publish_to_iceberg(quick.lake, NAME, TABLE)
    assert (in_iceberg(catalog), in_iceberg(catalog, first.snapshot_id)) == (after, before)
    assert second.new
    assert set(second.files) > set(first.files), "nothing was compacted"
    loaded = catalog.load_table(TABLE.identifier)
    assert [field.name for field in loaded.schema().fields] == ["k", "n"]
    assert loaded.scan(row_filter="n >= 4", selected_fields=("k",)).to_arrow().to_pylist() == [
        {"k": "c"}
    ]
    known = {1, 2}
    for file in loaded.inspect.data_files().to_pylist():
        assert set(dict(file["lower_bounds"] or {})) <= known, (
            "there are no statistics of the hidden columns"
        )


@pytest.mark.lengthy
def test_what_is_registered_already_is_not_registered_again(quick: World, catalog: Any) -> None:
    spec = table(quick, NAME)
    send(quick, spec, {"a": 1})
    send(quick, spec, {"a": 2})
    first = publish_to_iceberg(quick.lake, NAME, TABLE)
    commit = StoredVersions(quick.lake, NAME).read()[0]
    again = publish_to_iceberg(quick.lake, NAME, TABLE)
    assert (first.new, again.new, again.snapshot_id) == (True, False, first.snapshot_id)
    assert StoredVersions(quick.lake, NAME).read()[0] == commit


@pytest.mark.lengthy
def test_with_a_history_a_change_that_is_committed_meanwhile_is_compacted_too(
    quick: World, catalog: Any
) -> None:
    spec = table(quick, NAME, history="all")
    send(quick, spec, {"a": 1})
    send(quick, spec, {"b": 2})
    lake = faulty(quick, Fault("put_if_match", 1, "meanwhile", lambda: send(quick, spec, {"c": 3})))
    publish_to_iceberg(lake, NAME, TABLE, spark=IN_PROCESS, by="test")
    assert in_iceberg(catalog) == {"a": 1, "b": 2, "c": 3}
    assert len(StoredVersions(quick.lake, NAME).require_current().sealed.generations) == 1


@pytest.mark.lengthy
def test_a_table_of_format_version_1_gets_compacted_versions(quick: World, catalog: Any) -> None:
    spec = table(quick, NAME)
    send(quick, spec, {"a": 1, "b": 2})
    columns = StoredVersions(quick.lake, NAME).require_current().schema.to_arrow()
    catalog.create_table(TABLE.identifier, columns, properties={"format-version": "1"})
    publish_to_iceberg(quick.lake, NAME, TABLE)
    for number in (3, 4):
        send(quick, spec, {"a": number})
        publish_to_iceberg(quick.lake, NAME, TABLE, spark=IN_PROCESS, by="test")
        assert in_iceberg(catalog) == {"a": number, "b": 2}
    assert len(StoredVersions(quick.lake, NAME).require_current().sealed.generations) == 1


@pytest.mark.lengthy
def test_what_a_snapshot_refers_to_outlives_compactions_until_it_is_let_go(
    quick: World, catalog: Any
) -> None:
    spec = table(quick, NAME)
    before = compacted(quick, spec, {"a": 1}, {"b": 2})
    first = publish_to_iceberg(quick.lake, NAME, TABLE)
    compacted(quick, spec, {"a": 3})
    everything = DiscardPolicy(keep=1, grace=timedelta(0))
    discard(quick.lake, NAME, everything, by="test")
    assert in_iceberg(catalog, first.snapshot_id) == before
    assert release_from_iceberg(quick.lake, NAME, TABLE.identifier) == (first.version,)
    assert discard(quick.lake, NAME, everything, by="test").discarded
    assert content(StoredVersions(quick.lake, NAME).require_current()) == {"a": 3, "b": 2}


@pytest.mark.lengthy
def test_an_erasure_waits_for_the_snapshots_that_hold_a_key(quick: World, catalog: Any) -> None:
    spec = table(quick, NAME)
    compacted(quick, spec, {"a": 1, "b": 2}, {"b": 3})
    publish_to_iceberg(quick.lake, NAME, TABLE)
    report = erase_keys(quick.lake, NAME, ["a"], reason="request 7", by="ada")
    assert {"Iceberg table reference.accounts" in judged.reason for judged in report.pending} == {
        True
    }
    assert publish_to_iceberg(quick.lake, NAME, TABLE).new
    assert in_iceberg(catalog) == {"b": 3}
    release_from_iceberg(quick.lake, NAME, TABLE.identifier)
    assert erase_keys(quick.lake, NAME, ["a"], reason="request 7", by="ada").complete
    assert in_iceberg(catalog) == {"b": 3}


def test_what_can_t_be_published_says_why(quick: World, catalog: Any) -> None:
    spec = table(quick, NAME)
    with pytest.raises(ConfigurationError) as caught:
        publish_to_iceberg(quick.lake, NAME, IcebergTable("a.b", "nowhere"))
    assert caught.value.setting == "PYICEBERG_CATALOG__NOWHERE__URI"
    send(quick, spec, {"a": 1})
    StoredVersions(quick.lake, NAME).log.transact(lambda now: now.after(version=None), by="test")
    with pytest.raises(NoSealedVersionError):
        publish_to_iceberg(quick.lake, NAME, TABLE)

"""A stream in other engines: the records, or the latest of them, that a read gives, from the
lake's own files.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.exchange.handover import (
    StreamView,
    duckdb_view,
    parquet_files,
    polars_frame,
    pyarrow_dataset,
    stream_view,
)
from dagster_adjunct.assets.exchange.iceberg import register_in_iceberg, release_from_iceberg
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    DatasetError,
    OffsetOutOfRangeError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import AppendOptions, SourceRange, Sources
from tests.clocks import Clock, on_clock

duckdb = pytest.importorskip("duckdb")
pytest.importorskip("polars")

SCHEMA = Schema.of(k="string", v="bigint")


class Filled:
    """A stream to which an application sent the offsets of a source, in epochs."""

    def __init__(self, lake: Lake, clock: Clock | None = None) -> None:
        self.lake, self.streams, self.sequence = (
            lake,
            LakeStreams(on_clock(lake, clock) if clock else lake),
            0,
        )
        self.streams.create(
            "s", schema=SCHEMA, key=["k"], partitions=2, compaction=CompactionPolicy(min_segments=2)
        )

    def send(self, start: int, end: int, epoch: int, **more: list[Any]) -> None:
        self.sequence += 1
        rows = range(start, end)
        columns = {
            "k": pa.array([f"k{o}" for o in rows]),
            "v": pa.array([100 * epoch + o for o in rows], pa.int64()),
            "__epoch": pa.array([epoch] * len(rows), pa.int32()),
            "__source": pa.array(["kafka.in.0"] * len(rows), pa.string()),
            "__source_offset": pa.array(rows, pa.int64()),
            "__source_epoch": pa.array([epoch] * len(rows), pa.int32()),
            "__source_reader": pa.array(["a'pp"] * len(rows), pa.string()),
            **{name: pa.array(values) for name, values in more.items()},
        }
        read = Sources("kafka.in", "a'pp", (SourceRange("kafka.in.0", start, end, epoch),))
        self.streams.append(
            "s",
            pa.table(columns),
            producer="app",
            sequence=self.sequence,
            options=AppendOptions(sources=read),
        )

    def expected(self, epochs: str) -> list[tuple[Any, ...]]:
        names = ["k", "v", "__tombstone", "__epoch"]
        whole = self.streams.all_ranges("s")
        table = self.streams.read_arrow(whole, epochs=epochs, without_position="keep")  # type: ignore[arg-type]
        return sorted(tuple(row.values()) for row in table.select(names).to_pylist())


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    filled = Filled(open_lake(tmp_path / "k=7" / "it's a läke #1, 100%"))
    plain = pa.table({"k": ["by hand"], "v": pa.array([-1], pa.int64())})
    filled.streams.append("s", plain, producer="somebody", sequence=1)
    filled.send(0, 10, 0, __tombstone=[o == 3 for o in range(10)])
    return filled


def check_all_engines(view: StreamView, expected: list[tuple[Any, ...]]) -> None:
    assert list(view.columns) == ["k", "v", "__tombstone", "__epoch"]
    table = pyarrow_dataset(view).to_table()
    table = table.set_column(3, "__epoch", pc.fill_null(table["__epoch"], 0)).select(
        list(view.columns)
    )
    assert sorted(tuple(row.values()) for row in table.to_pylist()) == expected
    assert sorted(polars_frame(view).collect().rows()) == expected
    connection = duckdb.connect()
    duckdb_view(connection, view, "s")
    assert sorted(connection.execute("SELECT * FROM s").fetchall()) == expected
    some = connection.execute(
        "SELECT count(*), sum(v) FROM s WHERE v >= 5 AND NOT __tombstone"
    ).fetchall()
    kept = [row[1] for row in expected if row[1] >= 5 and not row[2]]
    assert some == [(len(kept), sum(kept))]


@pytest.mark.lengthy
@pytest.mark.parametrize("epochs", ["all", "latest"])
def test_every_engine_gives_what_a_read_gives(filled: Filled, epochs: Any) -> None:
    view = stream_view(filled.lake, "lake.s", epochs=epochs, without_position="keep")
    check_all_engines(view, filled.expected(epochs))
    filled.send(2, 6, 1)
    filled.send(5, 12, 2)
    check_all_engines(view, [row for row in filled.expected("all") if row[3] == 0])  # as it was
    view = stream_view(filled.lake, "s", epochs=epochs, without_position="keep")
    check_all_engines(view, filled.expected(epochs))
    assert len(filled.expected("latest")) == 13
    filled.streams.maintain("s")
    check_all_engines(
        stream_view(filled.lake, "s", epochs=epochs, without_position="keep"),
        filled.expected(epochs),
    )


def test_a_view_names_the_hidden_columns_that_its_files_may_have(filled: Filled) -> None:
    view = stream_view(filled.lake, "s")
    hidden = dict(view.hidden)
    assert not hidden.keys() & view.columns.keys()
    by_hand, *sent = [set(file.open().schema_arrow.names) for file in view.files]
    assert all(columns >= hidden.keys() for columns in sent)
    assert all(columns <= {*view.columns, *hidden} for columns in sent)
    assert by_hand - view.columns.keys() == {"__row", "__timestamp"}  # it has no positions


def test_views_of_one_stream_in_a_connection_keep_their_epochs(filled: Filled) -> None:
    filled.send(2, 6, 1)
    connection = duckdb.connect()
    for epochs in ("latest", "all"):
        duckdb_view(
            connection,
            stream_view(filled.lake, "s", epochs=epochs, without_position="keep"),
            epochs,
        )
    for epochs in ("latest", "all"):
        assert sorted(
            connection.execute(f'SELECT * FROM "{epochs}"').fetchall()
        ) == filled.expected(epochs)


def test_what_files_can_t_tell_is_refused(filled: Filled, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="1 records have none"):
        stream_view(filled.lake, "s", epochs="latest")
    view = stream_view(filled.lake, "s", epochs="latest", without_position="keep")
    assert len(parquet_files(view)) == len(view.files)  # nothing is replaced: the files tell all
    filled.send(0, 1, 1)
    with pytest.raises(
        DatasetError,
        match=r"its files also have records that a replay has replaced.*(?s:.*)stream export",
    ):
        parquet_files(stream_view(filled.lake, "s", epochs="latest", without_position="keep"))
    memory = Filled(lake_in(InMemoryStore()))
    memory.send(0, 1, 0)
    with pytest.raises(ConfigurationError) as caught:
        pyarrow_dataset(stream_view(memory.lake, "s"))
    assert str(caught.value.url).startswith("memory://")


def test_an_empty_stream_has_its_columns_in_every_engine(tmp_path: Path) -> None:
    nothing = stream_view(Filled(open_lake(tmp_path / "lake")).lake, "s")
    assert pyarrow_dataset(nothing).to_table().num_rows == 0
    assert polars_frame(nothing).collect().rows() == []
    connection = duckdb.connect()
    duckdb_view(connection, nothing, "s")
    assert connection.execute("SELECT count(*) FROM s").fetchall() == [(0,)]


# -- Iceberg


@pytest.mark.lengthy
def test_an_iceberg_table_holds_the_files_of_its_snapshots(tmp_path: Path) -> None:
    sql = pytest.importorskip("pyiceberg.catalog.sql")
    clock = Clock()
    clock.now = datetime.now(UTC)
    filled = Filled(open_lake(tmp_path / "lake"), clock)
    (tmp_path / "warehouse").mkdir()
    uri = f"sqlite:///{tmp_path}/catalog.db"
    catalog = sql.SqlCatalog("me", uri=uri, warehouse=str(tmp_path / "warehouse"))
    catalog.create_namespace("out")

    def table_rows(snapshot: int | None = None) -> list[tuple[Any, ...]]:
        rows = catalog.load_table("out.s").scan(snapshot_id=snapshot).to_arrow().to_pylist()
        assert not rows or list(rows[0]) == ["k", "v", "__tombstone", "__epoch"]
        return sorted((row["k"], row["v"], row["__tombstone"], row["__epoch"] or 0) for row in rows)

    filled.send(0, 4, 0)
    view = stream_view(filled.lake, "s")
    first = register_in_iceberg(view, catalog, "out.s")
    before = filled.expected("all")
    assert (first.new, first.dataset, table_rows()) == (True, "lake.s", before)
    assert not register_in_iceberg(view, catalog, "out.s").new
    filled.send(1, 3, 1)
    second = register_in_iceberg(stream_view(filled.lake, "s"), catalog, "out.s")
    assert (second.new, table_rows(), table_rows(first.snapshot_id)) == (
        True,
        filled.expected("all"),
        before,
    )

    now = filled.expected("all")
    filled.send(4, 9, 0)
    unregistered = stream_view(filled.lake, "s")
    for _ in range(3):  # compaction drops the files, and they stay: snapshots refer to them
        clock.now += timedelta(hours=2)
        filled.streams.maintain("s", clock())
    assert len(filled.streams.state("s").state.index.tail) < 3
    assert (table_rows(), table_rows(first.snapshot_id)) == (now, before)
    with pytest.raises(
        OffsetOutOfRangeError, match=r"has changed since its commit(?s:.*)Take a new view"
    ):
        register_in_iceberg(unregistered, catalog, "out.s")
    latest = stream_view(filled.lake, "s", epochs="latest")
    with pytest.raises(DatasetError, match="a replay has replaced"):
        register_in_iceberg(latest, catalog, "out.s")
    with pytest.raises(CommitConflictError):
        register_in_iceberg(view, catalog, "out.s")
    again = register_in_iceberg(view, catalog, "out.s", replace_newer=True)  # it is held
    assert (again.new, table_rows()) == (True, before)
    assert release_from_iceberg(filled.lake, "lake.s", "out.s") == (first.version, second.version)
    clock.now += timedelta(hours=2)
    assert filled.streams.maintain("s", clock()).deleted_objects >= 2


def test_other_engines_see_records_of_before_a_change_under_the_present_names(
    tmp_path: Path,
) -> None:
    lake = open_lake(str(tmp_path), create=True)
    streams = LakeStreams(lake)
    columns = Schema.of(k="bigint", note="string", s="struct<x:int,y:int>", z="int")
    streams.create("s", schema=columns, key=["k"], partitions=2)
    row = {"k": 1, "note": "a", "s": {"x": 1, "y": 2}, "z": 3}
    streams.append("s", [row], producer="p", sequence=0)
    for changes, seen in (
        ({"drop": ["s.x", "z"]}, {"k": 1, "note": "a", "s": {"y": 2}}),
        ({"renamed": {"note": "n", "s.y": "x"}}, {"k": 1, "n": "a", "s": {"x": 2}}),
    ):
        streams.change_columns("s", **changes)
        view = stream_view(lake, "s")
        names = list(seen)
        assert pyarrow_dataset(view).to_table(columns=names).to_pylist() == [seen]
        assert polars_frame(view).select(names).collect().to_dicts() == [seen]
        connection = duckdb.connect()
        duckdb_view(connection, view, "s")
        found = connection.execute(f"SELECT {', '.join(names)} FROM s").fetchall()
        assert found == [tuple(seen.values())]
        with pytest.raises(DatasetError):
            parquet_files(view)
        folder = tmp_path / "written"  # as the error advises
        pads.write_dataset(
            pyarrow_dataset(view),
            folder,
            format="parquet",
            existing_data_behavior="delete_matching",
        )
        (written,) = folder.iterdir()
        assert pq.read_table(written, columns=names).to_pylist() == [seen]

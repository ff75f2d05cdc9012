"""Tables of other writers, and a lake whose streams read them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

from dagster_adjunct.resources.file_streams.delta import DeltaStreams, delta_stream
from dagster_adjunct.resources.file_streams.iceberg import IcebergStreams, iceberg_stream
from dagster_adjunct.resources.file_streams.log import FileLogState
from dagster_adjunct.resources.file_streams.streams import FileStreams
from dagster_adjunct.resources.iceberg import IcebergTable
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition

Row = dict[str, Any]


@dataclass
class Reader:
    """A stream, read as often as wanted."""

    system: FileStreams
    name: str

    @property
    def short(self) -> str:
        return self.name.partition(".")[2]

    @property
    def ssp(self) -> SystemStreamPartition:
        return SystemStreamPartition.parse(f"{self.name}.0")

    def state(self) -> FileLogState:
        state = self.system.file_log(self.short).read()
        assert state is not None
        return state

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Look at the table, and return all records with their offsets and times."""
        view = self.system.snapshot(self.short)
        ranges = {
            self.ssp: OffsetRange(
                view.oldest([self.ssp])[self.ssp], view.upcoming([self.ssp])[self.ssp]
            )
        }
        return view.read_arrow(ranges, columns)

    def rows(self) -> list[Row]:
        """Look at the table, and return all records, without what a read adds."""
        table = self.table()
        assert table.column("__offset").to_pylist() == list(range(table.num_rows))
        return table.select([name for name in table.column_names if name[:2] != "__"]).to_pylist()


@dataclass
class IcebergLab:
    """A catalogue with a namespace `raw`, and a lake."""

    lake: Lake
    catalog: Any

    def create(self, schema: pa.Schema, name: str = "events", **options: Any) -> Any:
        return self.catalog.create_table(f"raw.{name}", schema, **options)

    def load(self, name: str = "events") -> Any:
        return self.catalog.load_table(f"raw.{name}")

    def stream(self, table: str = "events", name: str | None = None, **options: Any) -> Reader:
        name = name or f"s{uuid4().hex}"
        declared = iceberg_stream(name, IcebergTable(f"raw.{table}", "lab"), **options)
        return Reader(IcebergStreams(self.lake), declared)


@dataclass
class DeltaLab:
    """A folder with Delta tables, and a lake."""

    lake: Lake
    url: str
    options: dict[str, str] = field(default_factory=dict)

    def place(self, name: str = "orders") -> str:
        return f"{self.url}/{name}"

    def write(self, data: pa.Table, name: str = "orders", **options: Any) -> None:
        from deltalake import write_deltalake

        chosen = {"mode": "append", "storage_options": self.options, **options}
        write_deltalake(self.place(name), data, **chosen)

    def load(self, name: str = "orders", **options: Any) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(self.place(name), storage_options=self.options, **options)

    def stream(self, table: str = "orders", name: str | None = None, **options: Any) -> Reader:
        declared = delta_stream(name or f"s{uuid4().hex}", self.place(table), **options)
        return Reader(DeltaStreams(self.lake), declared)


def forget_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let streams be declared anew, as in another process."""
    monkeypatch.setattr("dagster_adjunct.resources.file_streams.streams._declared", {})


def configure_catalog(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    """Let PyIceberg find the catalogue `lab`."""
    import pyiceberg.catalog
    from pyiceberg.utils.config import Config

    for setting, value in settings.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__LAB__{setting.upper()}", value)
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())


def iceberg_lab(monkeypatch: pytest.MonkeyPatch, folder: Path, **settings: str) -> IcebergLab:
    chosen = {"warehouse": f"{folder}/warehouse", **settings}
    configure_catalog(monkeypatch, type="sql", uri=f"sqlite:///{folder}/catalog.db", **chosen)
    catalog = IcebergTable("raw.events", "lab").open()
    catalog.create_namespace("raw")
    return IcebergLab(open_lake(f"{folder}/lake"), catalog)


@pytest.fixture
def iceberg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IcebergLab:
    return iceberg_lab(monkeypatch, tmp_path)


@pytest.fixture
def delta(tmp_path: Path) -> DeltaLab:
    return DeltaLab(open_lake(f"{tmp_path}/lake"), str(tmp_path / "tables"))


def compact(table: Any) -> None:
    """Rewrite all files of an Iceberg table into one, as a compaction does. PyIceberg has none, so
    this commits an overwrite, and calls it what it is.
    """
    from pyiceberg.io.pyarrow import _dataframe_to_data_files

    data = table.scan().to_arrow()
    old = [task.file for task in table.scan().plan_files()]
    transaction = table.transaction()
    update = transaction.update_snapshot().overwrite()
    for file in old:
        update.delete_data_file(file)
    for file in _dataframe_to_data_files(transaction.table_metadata, data, table.io):
        update.append_data_file(file)
    update.commit()
    transaction.commit_transaction()
    rewrite_metadata(table, lambda metadata: _rename_operation(metadata, table))


def _rename_operation(metadata: dict[str, Any], table: Any) -> None:
    current = table.current_snapshot().snapshot_id
    for snapshot in metadata["snapshots"]:
        if snapshot["snapshot-id"] == current:
            snapshot["summary"]["operation"] = "replace"


def rewrite_metadata(table: Any, change: Any) -> None:
    """Change the current metadata of an Iceberg table in place."""
    path = Path(table.refresh().metadata_location.removeprefix("file://"))
    metadata = json.loads(path.read_text())
    change(metadata)
    path.write_text(json.dumps(metadata))


def plain(table: pa.Table) -> list[Row]:
    """Return a table's rows in an order of their own, for comparisons."""
    return sorted(table.to_pylist(), key=repr)


def commits(folder: Path) -> Iterator[Path]:
    yield from sorted((folder / "_delta_log").glob("*.json"))

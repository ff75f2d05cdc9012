"""Iceberg and Delta tables that tests change, and what independent readers find in them."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.resources.iceberg import IcebergTable

COLUMNS = pa.schema(
    [pa.field("sku", pa.string()), pa.field("price", pa.int64()), pa.field("shop", pa.string())]
)
Rows = dict[str, tuple[int | None, str | None]]


def rows_table(rows: Rows) -> pa.Table:
    """Return entries as a table."""
    lines = [{"sku": sku, "price": price, "shop": shop} for sku, (price, shop) in rows.items()]
    return pa.Table.from_pylist(lines, COLUMNS)


def iceberg_catalog(
    folder: Path, patch: pytest.MonkeyPatch, settings: Mapping[str, str] | None = None
) -> Any:
    """Configure a catalogue named "shop" for this process and its children, and return it."""
    import pyiceberg.catalog
    from pyiceberg.catalog import load_catalog
    from pyiceberg.utils.config import Config

    folder.mkdir(parents=True, exist_ok=True)
    properties = {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/warehouse",
        **(settings or {}),
    }
    for name, value in properties.items():
        variable = name.upper().replace(".", "__").replace("-", "_")
        patch.setenv(f"PYICEBERG_CATALOG__SHOP__{variable}", value)
    patch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())
    catalog = load_catalog("shop", **properties)
    catalog.create_namespace("ref")
    return catalog


PRODUCTS = IcebergTable("ref.products", "shop")


class Iceberg:
    """The table `ref.products`, and the rows of each of its snapshots as a dictionary says."""

    def __init__(self, catalog: Any) -> None:
        self.catalog = catalog
        self.create()

    def create(self) -> None:
        self.catalog.create_table(
            "ref.products", schema=COLUMNS, properties={"format-version": "2"}
        )
        self.rows: Rows = {}
        self.history: dict[str, Rows] = {}

    @property
    def table(self) -> Any:
        return self.catalog.load_table("ref.products")

    @property
    def head(self) -> str:
        return str(self.table.current_snapshot().snapshot_id)

    def write(self, rows: Rows) -> str:
        """Insert and update rows; return the id of the snapshot."""
        from pyiceberg.expressions import In

        table = self.table
        known = [sku for sku in rows if sku in self.rows]
        if known:
            table.overwrite(rows_table(rows), overwrite_filter=In("sku", known))
        else:
            table.append(rows_table(rows))
        self.rows = self.rows | rows
        return self._noted()

    def delete(self, skus: Sequence[str]) -> str:
        from pyiceberg.expressions import In

        self.table.delete(In("sku", list(skus)))
        self.rows = {sku: row for sku, row in self.rows.items() if sku not in skus}
        return self._noted()

    def compact(self) -> str:
        """Replace all files by one, in a snapshot that replaces, as Spark's rewrite_data_files."""
        from uuid import uuid4

        from pyiceberg.io.pyarrow import _dataframe_to_data_files
        from pyiceberg.table.snapshots import Operation, Summary
        from pyiceberg.table.update.snapshot import _OverwriteFiles

        class Replace(_OverwriteFiles):
            def _summary(self, *given: Any) -> Summary:
                summary = super()._summary(*given)
                return Summary(Operation.REPLACE, **summary.additional_properties)

        table = self.table
        old = [task.file for task in table.scan().plan_files()]
        transaction = table.transaction()
        data = table.scan().to_arrow()
        with Replace(Operation.OVERWRITE, transaction, table.io, uuid4()) as replace:
            for file in old:
                replace.delete_data_file(file)
            for file in _dataframe_to_data_files(table.metadata, data, table.io, uuid4()):
                replace.append_data_file(file)
        transaction.commit_transaction()
        return self._noted()

    def tag(self, name: str, snapshot: str | None = None) -> None:
        number = int(snapshot or self.head)
        self.table.manage_snapshots().create_tag(number, name).commit()

    def expire(self, *snapshots: str) -> None:
        self.table.maintenance.expire_snapshots().by_ids([*map(int, snapshots)]).commit()

    def scanned(self, snapshot: str | None = None) -> Rows:
        """Return the rows that PyIceberg's own scan finds."""
        found = self.table.scan(snapshot_id=None if snapshot is None else int(snapshot)).to_arrow()
        return {row["sku"]: (row["price"], row["shop"]) for row in found.to_pylist()}

    def _noted(self) -> str:
        self.history[self.head] = dict(self.rows)
        return self.head


class Delta:
    """A Delta table, and the rows of each of its versions as a dictionary says."""

    def __init__(
        self, url: str, options: Mapping[str, str] | None = None, **configuration: str
    ) -> None:
        self.url = url
        self.options = None if options is None else dict(options)
        self.configuration = configuration
        self.rows: Rows = {}
        self.history: dict[str, Rows] = {}

    @property
    def table(self) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(self.url, storage_options=self.options)

    @property
    def head(self) -> str:
        return str(self.table.version())

    def write(self, rows: Rows) -> str:
        """Insert and update rows; return the number of the version."""
        from deltalake import write_deltalake

        data = rows_table(rows)
        known = [sku for sku in rows if sku in self.rows]
        if known:
            merge = self.table.merge(
                data, predicate="t.sku = s.sku", source_alias="s", target_alias="t"
            )
            merge.when_matched_update_all().when_not_matched_insert_all().execute()
        else:
            write_deltalake(
                self.url,
                data,
                mode="append",
                configuration=self.configuration or None,
                storage_options=self.options,
            )
        self.rows = self.rows | rows
        return self._noted()

    def replace_all(self, rows: Rows) -> str:
        """Overwrite the table."""
        from deltalake import write_deltalake

        write_deltalake(self.url, rows_table(rows), mode="overwrite")
        self.rows = dict(rows)
        return self._noted()

    def delete(self, skus: Sequence[str]) -> str:
        before = self.head
        listed = ", ".join(f"'{sku}'" for sku in skus)
        self.table.delete(f"sku in ({listed})")
        if self.head == before:
            return before
        self.rows = {sku: row for sku, row in self.rows.items() if sku not in skus}
        return self._noted()

    def compact(self) -> str:
        before = self.head
        self.table.optimize.compact()
        return self.head if self.head == before else self._noted()

    def vacuum(self) -> None:
        """Delete the files of all versions but the newest."""
        self.table.vacuum(
            retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True
        )

    def _noted(self) -> str:
        self.history[self.head] = dict(self.rows)
        return self.head

    def delete_by_vector(self, row: int) -> None:
        """Delete a row of the table's only file as Spark does, by a deletion vector."""
        folder = Path(self.url) / "_delta_log"
        number = self.table.version() + 1
        added: dict[str, Any] = {}
        for file in sorted(folder.glob("*.json")):
            for line in file.read_text().splitlines():
                added = json.loads(line).get("add", added)
        # A portable roaring bitmap of 64 bits, with one array container.
        bitmap = struct.pack("<IQIIIHHIH", 1681511377, 1, 0, 12346, 1, 0, 0, 16, row)
        padded = bitmap.ljust(-(-len(bitmap) // 4) * 4, b"\0")
        vector = {
            "storageType": "i",
            "pathOrInlineDv": base64.b85encode(padded).translate(_TO_Z85).decode(),
            "sizeInBytes": len(bitmap),
            "cardinality": 1,
        }
        features = ["deletionVectors"]
        actions = [
            {"commitInfo": {"timestamp": 1_800_000_000_000, "operation": "DELETE"}},
            {
                "protocol": {
                    "minReaderVersion": 3,
                    "minWriterVersion": 7,
                    "readerFeatures": features,
                    "writerFeatures": [*features, "changeDataFeed", "appendOnly", "invariants"],
                }
            },
            {
                "remove": {
                    "path": added["path"],
                    "dataChange": True,
                    "deletionTimestamp": 1_800_000_000_000,
                    "partitionValues": {},
                    "size": added["size"],
                }
            },
            {"add": added | {"deletionVector": vector, "dataChange": True}},
        ]
        text = "".join(f"{json.dumps(action)}\n" for action in actions)
        (folder / f"{number:020}.json").write_text(text)


_TO_Z85 = bytes.maketrans(
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~",
    b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#",
)

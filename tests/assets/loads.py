"""Runs of dlt pipelines into a lake, as an operator's machine does them."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dagster_adjunct.dlt import lake_destination
from dagster_adjunct.resources.lazy_modules import LazyModule
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.lake.streams import LakeStreams

# Each process that collects tests would import all of dlt. No name of a test module may be one of
# these, since pytest asks each for its attributes.
dlt: Any = LazyModule("dlt")
dlt_errors: Any = LazyModule("dlt.pipeline.exceptions")

os.environ.setdefault("RUNTIME__DLTHUB_TELEMETRY", "false")

META = ("__partition", "__offset", "__timestamp", "__epoch")


@dataclass
class Machine:
    """A machine with a working folder of dlt, from which pipelines load into a lake."""

    lake: Lake
    folder: Path
    prefix: str = "raw"
    options: dict[str, Any] = field(default_factory=dict)

    def pipeline(self, name: str = "shop", lake: Lake | None = None) -> Any:
        """Return the pipeline of this name, with what earlier runs on this machine left."""
        return dlt.pipeline(
            name,
            destination=lake_destination(lake or self.lake, self.prefix, **self.options),
            pipelines_dir=str(self.folder),
        )

    def run(self, data: Any, name: str = "shop", lake: Lake | None = None, **options: Any) -> Any:
        return self.pipeline(name, lake).run(data, **options)

    def copy(self, folder: Path) -> Machine:
        """Return another machine with a copy of the working folder."""
        shutil.copytree(self.folder, folder)
        return Machine(self.lake, folder, self.prefix, self.options)

    @property
    def streams(self) -> LakeStreams:
        return LakeStreams(self.lake)

    def records(self, table: str, *, meta: bool = False) -> list[dict[str, Any]]:
        """Return the records of a table's stream in order, with their deletions."""
        stream = f"{self.prefix}-{table}"
        found = self.streams.read_arrow(self.streams.all_ranges(stream))
        rows = found.to_pylist(maps_as_pydicts="strict")
        if meta:
            return rows
        kept = []
        for row in rows:
            plain = {name: value for name, value in row.items() if name not in META}
            if not plain.pop("__tombstone"):
                kept.append(plain)
            else:
                kept.append({**plain, "__tombstone": True})
        return kept

    def types(self, table: str) -> dict[str, str]:
        """Return the types of the columns of a table's stream."""
        return dict(self.streams.info(f"{self.prefix}-{table}").schema.types)


def resource(rows: Any, name: str = "orders", **hints: Any) -> Any:
    """Return a resource of dlt with these rows."""
    return dlt.resource(rows, name=name, **hints)

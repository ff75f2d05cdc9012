"""The diff of two versions of 3M rows, against reading both whole with pyarrow."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.seal import SCHEMA, rows
from benchmarks.timing import alternate, show
from dagster_adjunct import Lake, open_lake
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.version import SealedVersion, build_layout
from dagster_adjunct.resources.bucketing.files import Generation
from dagster_adjunct.resources.bucketing.writer import WriteOptions, write_arrow_buckets

if TYPE_CHECKING:
    import pyarrow as pa

ROWS = 3_000_000
BUCKETS = 8


def run(rounds: int) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    with TemporaryDirectory() as folder:
        lake = open_lake(Path(folder) / "lake")
        chance = np.random.default_rng(7)
        base, other = rows(0, ROWS), rows(0, ROWS, 1)
        changes = pa.array(chance.random(ROWS) < 0.005)
        columns = [
            (
                base.column(name)
                if name == "k"
                else pc.if_else(changes, other.column(name), base.column(name))
            )
            for name in base.column_names
        ]
        old = version(lake, 1, base.filter(pa.array(chance.random(ROWS) >= 0.0025)))
        new = version(
            lake, 2, pa.table(columns, base.schema).filter(pa.array(chance.random(ROWS) >= 0.0025))
        )
        every = version(lake, 3, other)
        del base, other, columns

        print(
            f"diff: {ROWS // 1_000_000}M rows x {len(SCHEMA.fields)} columns in {BUCKETS} buckets,"
            " 1% of them differ"
        )
        compare(rounds, old, new)
        print("diff: the same where every entry differs")
        compare(rounds, old, every)


def compare(rounds: int, old: VersionReader, new: VersionReader) -> None:
    """Time the diff of two versions and the bare reading of both, in turns."""
    import pyarrow.parquet as pq

    from dagster_adjunct.assets.exchange.handover import parquet_files
    from dagster_adjunct.assets.reading.diff import diff_versions

    def read(_: int) -> None:
        for view in (old, new):
            for path in parquet_files(view):
                pq.read_table(path)

    differences = diff_versions(old, new)
    counts = {
        what: getattr(differences, what) for what in ("added", "removed", "changed", "unchanged")
    }
    print("  " + ", ".join(f"{what} {count:,}" for what, count in counts.items()))
    measured = alternate(rounds, read=read, diff=lambda _: diff_versions(old, new))
    show(measured, "diff", "read", "at most 1.5")


def version(lake: Lake, number: int, table: pa.Table) -> VersionReader:
    """Write one version by the writer that seals versions, but without Spark."""
    folder = f"{lake.dataset_prefix('compared')}/data/attempt{number}"
    layout = build_layout(SCHEMA, ("k",), ("k",), BUCKETS, None)
    files = write_arrow_buckets(
        table.sort_by("k"), lake.store, folder, layout, WriteOptions("compared")
    )
    sealed = SealedVersion(
        id=f"v{number:06d}-attempt{number}",
        number=number,
        name=None,
        sealed_at=datetime.now(UTC),
        columns=SCHEMA,
        key=("k",),
        partition_by=("k",),
        partitions=BUCKETS,
        positioned=False,
        generations=(Generation(number, folder, tuple(files)),),
        rows=table.num_rows,
        offsets={},
    )
    return VersionReader(lake.store, "compared", sealed)

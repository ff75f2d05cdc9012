"""Entries by key from a version of 3M rows: warm against DuckDB's point queries on the same
files, and cold.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.seal import SCHEMA, rows
from dagster_adjunct import Lake, open_dataset, open_lake
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.manifest import BoundedManifest
from dagster_adjunct.assets.versions.version import (
    DatasetDeclaration,
    SealedVersion,
    VersionRef,
    build_layout,
)
from dagster_adjunct.resources.bucketing.files import Generation
from dagster_adjunct.resources.bucketing.writer import WriteOptions, write_arrow_buckets
from dagster_adjunct.resources.objects.lake import lake_in
from tests.faulty_store import FaultyStore

if TYPE_CHECKING:
    from dagster_adjunct.reading import Dataset

ROWS = 3_000_000
BUCKETS = 8
GETS = 100_000
QUERIES = 100
_COLD = """
import sys
from dagster_adjunct import open_dataset, open_lake
with open_dataset(open_lake(sys.argv[1]), "served") as served:
    assert served.get(sys.argv[2]) is not None
"""


def run(rounds: int) -> None:
    with TemporaryDirectory() as folder:
        lake = open_lake(Path(folder) / "lake")
        publish(lake)
        chance = random.Random(7)
        keys = [f"key-{chance.randrange(ROWS)}" for _ in range(GETS)]

        print(
            f"serving: {ROWS // 1_000_000}M rows x {len(SCHEMA.fields)} columns in"
            f" {BUCKETS} buckets, random keys"
        )
        with open_dataset(lake, "served") as served:
            began = time.perf_counter()
            for key in keys[:5000]:  # some of each row group
                served.get(key)
            print(f"  every row group read and decoded: {time.perf_counter() - began:.2f} s")
            query = duckdb_query(lake, served)
            query(keys[0])
            ours, theirs = [], []
            for _ in range(rounds):  # in turns, so that a slow moment of the machine hits both
                ours.append(rate(served.get, keys))
                theirs.append(rate(query, keys[:QUERIES]))
        print(
            f"  get, warm: {median(ours):,.0f}/s ({min(ours):,.0f}-{max(ours):,.0f}; goal: at least"
            " 10,000)"
        )
        print(
            f"  DuckDB, prepared: {median(theirs):,.0f}/s ({min(theirs):,.0f}-{max(theirs):,.0f})"
        )
        print(f"  get / DuckDB = {median(ours) / median(theirs):,.0f} (goal: at least 20)")

        counting = FaultyStore(lake.store)
        with open_dataset(lake_in(counting), "served") as served:
            assert served.get(keys[0]) is not None
            requests = [request for request, _ in counting.requests]
        print(
            f"  first get of a reader: {len(requests)} requests, {', '.join(requests)} (goal: at"
            " most 3)"
        )
        seconds = [new_process(lake, key) for key in keys[:rounds]]
        print(
            f"  a new process, imports and all: {median(seconds):.2f} s"
            f" ({min(seconds):.2f}-{max(seconds):.2f})\n"
        )


def rate(get: Callable[[str], object], keys: Sequence[str]) -> float:
    """Return how many of these keys are got in a second, each of which is there."""
    began = time.perf_counter()
    for key in keys:
        assert get(key) is not None
    return len(keys) / (time.perf_counter() - began)


def duckdb_query(lake: Lake, served: Dataset) -> Callable[[str], Any]:
    """Return a prepared point query in one connection, over the version's files, whose footers
    DuckDB may keep.
    """
    import duckdb

    connection = duckdb.connect()
    connection.execute("SET parquet_metadata_cache = true")
    files = [
        f"{lake.url}/{made.folder}/{file.name}"
        for made in served.sealed.generations
        for file in made.files
    ]
    connection.execute(f"CREATE VIEW served AS SELECT * FROM read_parquet({files!r})")
    connection.execute("PREPARE entry AS SELECT * FROM served WHERE k = $1")
    return lambda key: connection.execute(f"EXECUTE entry('{key}')").fetchone()


def new_process(lake: Lake, key: str) -> float:
    """Return how long a new process takes to its first entry, in seconds."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", _COLD, lake.url, key], check=True)
    return time.perf_counter() - began


def publish(lake: Lake) -> None:
    """Commit one sealed version, written by the writer that seals versions but without Spark."""
    log, partitions = DatasetLog(lake, "served"), {"partition_by": ("k",), "partitions": BUCKETS}
    attempt = log.attempt()
    table = rows(0, ROWS).sort_by("k")
    folder = attempt.generation(1).folder
    layout = build_layout(SCHEMA, ("k",), ("k",), BUCKETS, None)
    files = write_arrow_buckets(table, lake.store, folder, layout, WriteOptions("served"))
    now = datetime.now(UTC)
    version = SealedVersion(
        id=f"v000001-{attempt.id}",
        number=1,
        name="one",
        sealed_at=now,
        columns=SCHEMA,
        key=("k",),
        **partitions,
        positioned=False,
        generations=(Generation(1, folder, tuple(files)),),
        rows=ROWS,
        offsets={},
    )
    ref = VersionRef(
        id=version.id,
        number=1,
        name="one",
        rows=ROWS,
        sealed_at=now,
        document=log.write_version(version),
        folders=(folder,),
    )
    declaration = DatasetDeclaration(
        kind="bounded",
        input="benchmark",
        key=("k",),
        key_types=("string",),
        input_partitions=0,
        **partitions,
    )
    manifest = BoundedManifest(
        name="served",
        declaration=declaration,
        version=version,
        head=version.id,
        versions=(ref,),
        offsets={},
        next_number=2,
        next_generation=2,
    )
    log.commit(None, manifest, by="benchmark")

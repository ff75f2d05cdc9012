"""Sealed versions made straight from rows, for tests of what looks at stored versions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.version import SealedVersion, build_layout
from dagster_adjunct.resources.bucketing.files import Generation
from dagster_adjunct.resources.bucketing.writer import WriteOptions, write_arrow_buckets
from dagster_adjunct.resources.objects.store import ObjectStore
from dagster_adjunct.resources.schemas.schema import Schema

Row = tuple[Any, ...]


def table_of(schema: Schema, rows: Sequence[Row]) -> pa.Table:
    arrow = schema.to_arrow()
    return pa.table(
        [
            pa.array([row[index] for row in rows], arrow.field(name).type)
            for index, name in enumerate(schema.names)
        ],
        schema=arrow,
    )


def sealed_version(
    store: ObjectStore,
    rows: Sequence[Row],
    *,
    schema: Schema,
    key: Sequence[str],
    partitions: int | None = 2,
    dataset: str = "planes",
    number: int = 1,
    counters: dict[str, int] | None = None,
) -> SealedVersion:
    """Write rows, sorted by key, into the files of a version of their own."""
    attempt = f"attempt{number}"
    by = tuple(key) if partitions else ()
    layout = build_layout(schema, tuple(key), by, partitions, None)
    places = [schema.names.index(name) for name in key]
    ordered = sorted(rows, key=lambda row: tuple(row[place] for place in places))
    folder = f"datasets/{dataset}/data/{attempt}"
    files = write_arrow_buckets(
        table_of(schema, ordered), store, folder, layout, WriteOptions(dataset)
    )
    return SealedVersion(
        id=f"v{number:06d}-{attempt}",
        number=number,
        name=f"v{number}",
        sealed_at=datetime.now(UTC),
        columns=schema,
        key=tuple(key),
        partition_by=by,
        partitions=partitions,
        positioned=False,
        generations=(Generation(number, folder, tuple(files)),),
        rows=len(rows),
        offsets={},
        counters=(
            {"read": len(rows), "superseded": 0, "deleted": 0} if counters is None else counters
        ),
    )


def view_of(store: ObjectStore, rows: Sequence[Row], **facts: Any) -> VersionReader:
    """Return such a version, opened."""
    sealed = sealed_version(store, rows, **facts)
    return VersionReader(store, facts.get("dataset", "planes"), sealed)

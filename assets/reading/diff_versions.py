"""What differs between two versions: added, removed and changed keys, without Spark.

A key lies in the same bucket in both versions, so the files of a bucket are compared with each other and nothing is
shuffled. Where the versions lie in different buckets (a dataset that was made anew with other partitions, say), all
rows are compared at once.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.reading.arrow_comparison import common_type, compare, smallest
from dagster_adjunct.assets.reading.entries_in_arrow import read_entries
from dagster_adjunct.resources.bucketing.bucket_files import encode_key
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError
from dagster_adjunct.resources.schemas.schema import arrow_type

if TYPE_CHECKING:
    import pyarrow as pa

    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.resources.bucketing.bucket_files import BucketFile

Entry = dict[str, Any]
_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class ChangedEntry:
    """An entry that both versions have, with other values."""

    key: Entry
    old: Entry
    new: Entry


@dataclass(frozen=True, slots=True)
class VersionDiff:
    """How the version of the id `new` differs from that of `old`: keys counted and sampled, and columns.

    Samples hold the smallest keys, as dicts by column, which `Dataset.get` takes. Entries are compared in the columns
    that both versions have. One whose type changed, given as (name, old, new), is compared where both types are
    whole numbers, floating numbers or decimals; else it is left out.
    """

    old: str
    new: str
    added: int
    removed: int
    changed: int
    unchanged: int
    added_sample: tuple[Entry, ...] = ()
    removed_sample: tuple[Entry, ...] = ()
    changed_sample: tuple[ChangedEntry, ...] = ()
    columns_added: tuple[str, ...] = ()
    columns_removed: tuple[str, ...] = ()
    columns_retyped: tuple[tuple[str, str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the same as JSON-able values: times as ISO text, decimals as text, binary as base64."""
        return {
            "old": self.old,
            "new": self.new,
            "added": self.added,
            "removed": self.removed,
            "changed": self.changed,
            "unchanged": self.unchanged,
            "added_sample": [_plain(key) for key in self.added_sample],
            "removed_sample": [_plain(key) for key in self.removed_sample],
            "changed_sample": [
                {"key": _plain(entry.key), "old": _plain(entry.old), "new": _plain(entry.new)}
                for entry in self.changed_sample
            ],
            "columns_added": list(self.columns_added),
            "columns_removed": list(self.columns_removed),
            "columns_retyped": [
                {"name": name, "old": before, "new": after} for name, before, after in self.columns_retyped
            ],
        }


def diff_versions(old: VersionReader, new: VersionReader, *, sample: int = 20) -> VersionDiff:
    """Return how `new` differs from `old`, with up to `sample` keys of each kind.

    Buckets whose contents are equal by the manifests' checksums are not read. Of the others, at most four are in
    memory at a time. Raises DatasetError when the two are keyed differently, and ManifestMismatchError for a missing
    or damaged file.
    """
    if sample < 0:
        raise ConfigurationError(
            f"a diff with a sample of {sample} is asked for.", "Give 0 or more.", argument="sample"
        )
    types = _compared_types(old, new)
    key = new.sealed.key
    buckets, unchanged = _buckets_to_read(old, new)
    few = len(buckets) < _workers()
    parts = list(_pool(os.getpid()).map(partial(_diff_bucket, old, new, types, sample, few), buckets))
    nothing = tuple(_cast(view.schema.to_arrow().empty_table(), types) for view in (new, old, old, new))
    added, removed, before, after = _sampled([nothing, *(part.rows for part in parts)], key, sample)
    changed = [
        ChangedEntry({name: now[name] for name in key}, was, now)
        for was, now in zip(before.to_pylist(), after.to_pylist(), strict=True)
    ]
    mine = {field.name: field.type for field in old.schema.fields}
    theirs = {field.name: field.type for field in new.schema.fields}
    return VersionDiff(
        old.version,
        new.version,
        added=sum(part.counts[0] for part in parts),
        removed=sum(part.counts[1] for part in parts),
        changed=sum(part.counts[2] for part in parts),
        unchanged=unchanged + sum(part.counts[3] for part in parts),
        added_sample=tuple(added.select(key).to_pylist()),
        removed_sample=tuple(removed.select(key).to_pylist()),
        changed_sample=tuple(changed),
        columns_added=tuple(name for name in theirs if name not in mine),
        columns_removed=tuple(name for name in mine if name not in theirs),
        columns_retyped=tuple((n, kind, theirs[n]) for n, kind in mine.items() if theirs.get(n, kind) != kind),
    )


def _workers() -> int:
    return min(_AT_ONCE, os.cpu_count() or 1)


@lru_cache(maxsize=1)
def _pool(_: int) -> ThreadPoolExecutor:
    """Return the threads for diffs in this process. Ending them after each diff would cost a quarter of its time.

    By process id, since a forked process has none of its parent's threads.
    """
    return ThreadPoolExecutor(_workers(), thread_name_prefix="adjunct-diff")


@dataclass(frozen=True, slots=True)
class _Part:
    """One bucket's part of a diff.

    `counts` are those of added, removed, changed and unchanged; `rows` samples of the first two, and of the changed
    ones as they were and are.
    """

    counts: tuple[int, int, int, int]
    rows: tuple[pa.Table, ...]


def _diff_bucket(
    old: VersionReader,
    new: VersionReader,
    types: dict[str, pa.DataType],
    sample: int,
    threads: bool,
    bucket: int | None,
) -> _Part:
    key = new.sealed.key
    before, after = (_cast(read_entries(view, bucket, threads=threads), types) for view in (old, new))
    comparison = compare(before, after, key, [name for name in types if name not in key])
    if comparison is None:
        raise DatasetError(
            f"a key of {', '.join(key)} stands twice in version {old.version} or {new.version} of {new.dataset!r}.",
            "Only versions with unique keys can be compared: check both with the validator of unique keys.",
            version=old.version,
        )
    counts = (len(comparison.added), len(comparison.removed), len(comparison.after), comparison.unchanged)
    sides = (
        (after, comparison.added),
        (before, comparison.removed),
        (before, comparison.before),
        (after, comparison.after),
    )
    return _Part(counts, tuple(smallest(table, rows, key, sample) for table, rows in sides))


def _sampled(parts: list[tuple[pa.Table, ...]], key: tuple[str, ...], count: int) -> tuple[pa.Table, ...]:
    """Return of each kind of rows those with the smallest keys, over all parts."""
    import numpy as np
    import pyarrow as pa

    tables = [pa.concat_tables(tables) for tables in zip(*parts, strict=True)]
    return tuple(smallest(table, np.arange(table.num_rows), key, count) for table in tables)


def _cast(table: pa.Table, types: dict[str, pa.DataType]) -> pa.Table:
    for name, kind in types.items():
        if table.column(name).type != kind:
            index = table.column_names.index(name)
            table = table.set_column(index, name, table.column(name).cast(kind))
    return table


def _compared_types(old: VersionReader, new: VersionReader) -> dict[str, pa.DataType]:
    """Return the columns to compare, and the type to compare each in. Raises DatasetError where keys differ."""
    mine = {field.name: field.type for field in old.schema.fields}
    types = {
        field.name: common_type(arrow_type(mine[field.name]), arrow_type(field.type))
        for field in new.schema.fields
        if field.name in mine
    }
    if old.sealed.key != new.sealed.key or any(types[name] is None for name in new.sealed.key):
        keys = [", ".join(f"{name} {view.schema.field(name).type}" for name in view.sealed.key) for view in (old, new)]
        raise DatasetError(
            f"version {old.version} of {old.dataset!r} is keyed by ({keys[0]}) and version {new.version} of "
            f"{new.dataset!r} by ({keys[1]}).",
            "Only versions with the same key can be compared.",
            version=old.version,
        )
    return {name: kind for name, kind in types.items() if kind is not None}


def _buckets_to_read(old: VersionReader, new: VersionReader) -> tuple[list[int | None], int]:
    """Return the buckets whose contents may differ (None: all at once), and the rows of the others."""
    layouts = [
        (view.sealed.layout.partitions, [view.schema.field(name) for name in view.sealed.partition_by])
        for view in (old, new)
    ]
    if layouts[0] != layouts[1]:
        return [None], 0
    comparable = old.schema == new.schema and not (old.sealed.positioned or new.sealed.positioned)
    mine, theirs = _files(old), _files(new)
    buckets: list[int | None] = []
    unchanged = 0
    for bucket in sorted({*mine, *theirs}):
        if comparable and _same_content(mine.get(bucket, []), theirs.get(bucket, [])):
            unchanged += sum(file.rows for file in theirs[bucket])
        else:
            buckets.append(bucket)
    return buckets, unchanged


def _files(view: VersionReader) -> dict[int, list[BucketFile]]:
    by_bucket: dict[int, list[BucketFile]] = {}
    for generation in view.sealed.generations:
        for file in generation.files:
            by_bucket.setdefault(file.bucket, []).append(file)
    return by_bucket


def _same_content(old: list[BucketFile], new: list[BucketFile]) -> bool:
    """Whether one file has the rows of the other: the same bytes, or the same rows' hashes."""
    if len(old) != 1 or len(new) != 1:
        return False
    (a,), (b,) = old, new
    return a.sha256 == b.sha256 or (a.rows == b.rows and a.digest is not None and a.digest == b.digest)


def _plain(entry: Entry) -> Entry:
    """Return an entry as JSON-able values; JSON has no infinite numbers, nor NaN."""
    values = encode_key(list(entry.values()))
    texts = [str(v) if isinstance(v, float) and not math.isfinite(v) else v for v in values]
    return dict(zip(entry, texts, strict=True))

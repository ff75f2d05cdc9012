"""A generation without some of its entries: the files that hold them written anew, the others copied byte for byte.

Spark reads a generation as a whole folder, so the new one has a folder of its own with all its files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from dagster_adjunct.assets.reading.stored_files import StoredFile, files_of
from dagster_adjunct.assets.versions.sealed_version import TOMBSTONE, SealedVersion, version_id
from dagster_adjunct.resources.bucketing.bucket_files import (
    BucketFile,
    BucketLayout,
    Generation,
    attempt_of,
    bucket_file_name,
)
from dagster_adjunct.resources.bucketing.files_before_evolution import as_laid_out
from dagster_adjunct.resources.bucketing.write_over_time import TOLD, VALID_FROM, OverTimeWrite
from dagster_adjunct.resources.bucketing.writer import BucketFileWriter, WriteOptions
from dagster_adjunct.resources.errors import ObjectExistsError
from dagster_adjunct.resources.objects.object_store import telling_of_staged

if TYPE_CHECKING:
    from dagster_adjunct.assets.retention.erasing.key_set import KeySet
    from dagster_adjunct.assets.versions.dataset_log import Attempt, DatasetLog


@dataclass(frozen=True, slots=True)
class RewrittenVersion:
    """A version that held some of the keys, and the one that took its place. `rows` is how many entries went.

    Of an unbounded dataset, a generation: `old` and `new` are the folders of its files, `rows` are live rows and
    tombstones, and `state` tells one that is served from one of a table that is being built.
    """

    old: str
    new: str
    name: str | None
    state: str
    rows: int


def files_with(files: Sequence[StoredFile], layout: BucketLayout, keys: KeySet) -> dict[str, int]:
    """Return which of these files hold rows with one of the keys, by name, and how many; {} where none does.

    Only files whose bucket and key range fit are opened. Raises ManifestMismatchError where one is damaged.
    """
    buckets = keys.buckets(layout)
    rows_by_file = {}
    for stored in files:
        if stored.file.bucket in buckets and keys.may_be_in(stored.file):
            count = _count(stored, keys)
            if count:
                rows_by_file[stored.file.name] = count
    return rows_by_file


def live_rows_with(files: Sequence[StoredFile], keys: KeySet, affected: dict[str, int]) -> int:
    """Return how many rows with one of the keys, in the `affected` of these files, are no tombstones."""
    live = 0
    for stored in files:
        if stored.file.name in affected:
            tombstones = _count(stored, keys, deleted=True)
            live += affected[stored.file.name] - tombstones
    return live


def rewrite_generation(
    files: Sequence[StoredFile],
    layout: BucketLayout,
    number: int,
    keys: KeySet,
    affected: dict[str, int],
    attempt: Attempt,
) -> Generation:
    """Write a generation's files again without the rows of these keys, which are in the `affected` ones.

    Rows keep what they carry beside their columns. Files that are written have no digest, and none without rows is.
    """
    new = attempt.generation(number)
    written = []
    for stored in files:
        if stored.file.name in affected:
            file = _write_without(stored, layout, keys, new.folder)
        else:
            file = _copy(stored, new.folder)
        if file is not None and file.rows:
            written.append(file)
    new = attempt.generation(number, written)
    # A manifest that was too large with footers would be so again.
    return new.without_footers() if all(stored.file.footer is None for stored in files) else new


def rewrite_without(
    log: DatasetLog, sealed: SealedVersion, keys: KeySet, affected: dict[str, int], attempt: Attempt
) -> SealedVersion:
    """Write a version of one generation again without the entries of these keys, in the `affected` files.

    The new version has the number and the name of the old one and an id of its own. One with a file that has no
    digest has none either, so it equals nothing that is delivered later.
    """
    (generation,) = sealed.generations
    stored = files_of(log.lake.store, log.name, sealed)
    new = rewrite_generation(stored, sealed.layout, generation.id, keys, affected, attempt)
    changes = {
        "id": version_id(sealed.number, attempt.id),
        "generations": (new,),
        "rows": new.rows,
        "digest": new.digest,
        "counters": {**sealed.counters, "forgotten": sealed.counters.get("forgotten", 0) + sum(affected.values())},
    }
    return sealed.after(**changes)


def _count(stored: StoredFile, keys: KeySet, *, deleted: bool = False) -> int:
    names = [*(field.name for field in keys.fields), *([TOMBSTONE] if deleted else [])]
    file = stored.open()

    def count() -> int:
        tables = (file.read_row_group(group, columns=names) for group in range(file.num_row_groups))
        return sum(len(keys.rows_in(table.filter(table.column(TOMBSTONE)) if deleted else table)) for table in tables)

    return stored.reading(count)


def _write_without(stored: StoredFile, layout: BucketLayout, keys: KeySet, folder: str) -> BucketFile | None:
    import numpy as np

    file = stored.open()
    over_time = OverTimeWrite(told=bool(stored.file.stats.get(TOLD))) if VALID_FROM in layout.key else None
    options = WriteOptions(stored.what, over_time=over_time)
    writer = BucketFileWriter(stored.store, folder, stored.file.bucket, layout, options)
    try:
        for group in range(file.num_row_groups):
            rows = stored.reading(partial(file.read_row_group, group, columns=list(layout.columns)))
            kept = np.ones(rows.num_rows, dtype=bool)
            kept[keys.rows_in(rows)] = False
            # A table of a change stream has files from before its columns were added or widened.
            left = rows.filter(kept)
            writer.write(as_laid_out(left, layout) if layout.hidden else left)
        written = writer.finish()
    finally:
        writer.discard()
    # Readers look there whether tombstones were left out.
    return written and replace(written, stats={**stored.file.stats, **written.stats})


def _copy(stored: StoredFile, folder: str) -> BucketFile:
    """Copy a file through this machine, checking its SHA-256 on the way: a damaged one is not passed on."""
    path = stored.store.staging_dir() / f"{uuid4().hex}.parquet"
    name = bucket_file_name(stored.file.bucket, attempt_of(folder))
    try:
        stored.reading(lambda: stored.store.download(stored.key, path))
        with telling_of_staged(stored.store, path, stored.what), path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != stored.file.sha256:
            raise stored.damaged(f"its SHA-256 is {sha256}, the manifest lists {stored.file.sha256}")
        with suppress(ObjectExistsError):  # our own request, repeated on the way: only this attempt uses the name
            stored.store.upload(path, f"{folder}/{name}")
    finally:
        path.unlink(missing_ok=True)
    return replace(stored.file, name=name)

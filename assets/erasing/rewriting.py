"""A version without some of its entries: the files that hold them written anew, the others copied byte for byte.

Spark reads a version as whole folders, so the new version has a folder of its own with all its files.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

from assets.manifest import SealedVersion
from assets.reading.stored import StoredFile, files_of
from resources.bucketing.files import BucketFile, attempt_of, bucket_file_name
from resources.bucketing.writer import BucketFileWriter, WriteOptions
from resources.errors import ObjectExistsError

if TYPE_CHECKING:
    from assets.erasing.key_set import KeySet
    from assets.log import Attempt, DatasetLog


def files_with(log: DatasetLog, sealed: SealedVersion, keys: KeySet) -> dict[str, int]:
    """Return the files of a version that hold entries of these keys, by name, and how many; {} where none does.

    Only files whose bucket and key range fit are opened. Raises ManifestMismatchError where one is damaged.
    """
    buckets = keys.buckets(sealed.layout)
    found = {}
    for stored in files_of(log.lake.store, log.name, sealed):
        if stored.file.bucket in buckets and keys.may_be_in(stored.file):
            count = _count(stored, keys)
            if count:
                found[stored.file.name] = count
    return found


def rewrite_without(
    log: DatasetLog, sealed: SealedVersion, keys: KeySet, affected: dict[str, int], attempt: Attempt
) -> SealedVersion:
    """Write a version again without the entries of these keys, which are in the `affected` files.

    The new version has the number and the name of the old one and an id of its own. Files that are written have no
    digest, nor has a version with such a file, so it equals nothing that is delivered later.
    """
    (generation,) = sealed.generations
    folder = f"{attempt.folder}/{attempt.id}"
    files = []
    for stored in files_of(log.lake.store, log.name, sealed):
        if stored.file.name in affected:
            written = _write_without(stored, sealed, keys, folder)
        else:
            written = _copy(stored, folder)
        if written is not None and written.rows:
            files.append(written)
    new = attempt.generation(generation.id, files)
    known = [file.digest for file in files if file.digest is not None]
    if all(file.footer is None for file in generation.files):
        new = new.without_footers()
    changes = {
        "id": f"v{sealed.number:06d}-{attempt.id}",
        "generations": (new,),
        "rows": new.rows,
        "digest": sum(known) % 2**64 if len(known) == len(files) else None,
        "counters": {**sealed.counters, "forgotten": sealed.counters.get("forgotten", 0) + sum(affected.values())},
    }
    fields = {name: getattr(sealed, name) for name in SealedVersion.model_fields}
    return SealedVersion(**{**fields, **changes})


def _count(stored: StoredFile, keys: KeySet) -> int:
    names = [field.name for field in keys.fields]
    file = stored.open()

    def count() -> int:
        groups = (file.read_row_group(group, columns=names) for group in range(file.num_row_groups))
        return sum(len(keys.rows_in(table)) for table in groups)

    return stored.reading(count)


def _write_without(stored: StoredFile, sealed: SealedVersion, keys: KeySet, folder: str) -> BucketFile | None:
    import numpy as np

    file, layout = stored.open(), sealed.layout
    writer = BucketFileWriter(stored.store, folder, stored.file.bucket, layout, WriteOptions(stored.what))
    try:
        for group in range(file.num_row_groups):
            rows = stored.reading(partial(file.read_row_group, group, columns=list(layout.columns)))
            kept = np.ones(rows.num_rows, dtype=bool)
            kept[keys.rows_in(rows)] = False
            writer.write(rows.filter(kept))
        return writer.finish()
    finally:
        writer.discard()


def _copy(stored: StoredFile, folder: str) -> BucketFile:
    """Copy a file through this machine, checking its SHA-256 on the way: a damaged one is not passed on."""
    path = stored.store.staging_dir() / f"{uuid4().hex}.parquet"
    name = bucket_file_name(stored.file.bucket, attempt_of(folder))
    try:
        stored.reading(lambda: stored.store.download(stored.key, path))
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != stored.file.sha256:
            raise stored.damaged(f"its SHA-256 is {sha256}, the manifest lists {stored.file.sha256}")
        with suppress(ObjectExistsError):  # our own request, repeated on the way: only this attempt uses the name
            stored.store.upload(path, f"{folder}/{name}")
    finally:
        path.unlink(missing_ok=True)
    return replace(stored.file, name=name)

"""Rewrites a bounded dataset's versions into another number of partitions: the same entries, in one commit.

Every version that is retained gets a copy under a new id, so that a rollback meets the same partitions. Readers keep
the old copies until they let go, as after an erasure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from assets.erasing.replacing import Replacement, replaced
from assets.log import DatasetLog
from assets.manifest import Change, DatasetManifest, SealedVersion, VersionRef, layout_of
from assets.publishing.attempts import AttemptRenewal, attempt_key
from assets.reading.stored import StoredFile, files_of
from assets.retention.discard import delete_doomed
from assets.retention.leases import store_now
from resources.bucketing.writer import ROWS_PER_GROUP, BucketFileWriter, WriteOptions
from resources.errors import (
    CommitConflict,
    ConfigurationError,
    DatasetNotFoundError,
    ManifestMismatchError,
    StillReadError,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from assets.log import Attempt
    from assets.retention.discard import Roots
    from resources.bucketing.files import BucketFile, BucketLayout
    from resources.objects.lake import Lake

_ROUNDS = 10
_ROWS_AT_ONCE = 4_000_000


@dataclass(frozen=True, slots=True)
class RebucketReport:
    """What was rewritten: versions by their old and new ids. `pending` are old ones that somebody still reads."""

    dataset: str
    before: int
    partitions: int
    versions: dict[str, str]
    pending: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return the report in one line."""
        return (
            f"dataset {self.dataset}: {len(self.versions)} version(s) rewritten from {self.before} into "
            f"{self.partitions} partitions; declare partitions={self.partitions} where it is declared"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        return asdict(self)


def repartition_versions(
    lake: Lake, dataset: str, partitions: int, *, reason: str, by: str, roots: Roots = dict
) -> RebucketReport:
    """Rewrite every retained version of a bounded dataset into this number of partitions; names and offsets stay.

    A crash leaves the dataset as it was. `roots` gives, by version id, why applications still need a version: those of
    open batches refuse it with StillReadError, for they can't meet other partitions. Until it is declared with the new
    count, the dataset is refused when it is advanced or opened. Raises ConfigurationError for an unbounded dataset, a
    broadcast one, a member of a version set, or no change.
    """
    log = DatasetLog(lake, dataset)
    made: dict[str, Replacement] = {}
    try:
        for _ in range(_ROUNDS):
            manifest = log.read()[1]
            if manifest is None:
                raise DatasetNotFoundError(f"dataset {dataset!r} has no commit in {lake.url}.", "Advance it first.")
            before = _check(log, manifest, partitions, reason)
            _check_unused(dataset, roots())
            made = {key: each for key, each in made.items() if _stands(lake, manifest, each)}
            for ref in _documented(manifest):
                if str(ref.document) not in made:
                    made[str(ref.document)] = _rewritten(log, ref, partitions, by)
            _check_unused(dataset, roots())  # once more: writing takes a while
            after = log.transact(partial(_after, made=made, partitions=partitions, reason=reason), by=by)
            if after.declaration.partitions == partitions:
                spared, _ = delete_doomed(log, after, roots, store_now(lake, dataset), by=by)
                used = {each.old.id: each.new.id for each in made.values() if after.ref(each.new.id) is not None}
                pending = tuple(f"{each.what}: {each.reason}" for each in spared)
                return RebucketReport(dataset, before, partitions, used, pending)
        raise CommitConflict(
            f"dataset {dataset!r}: versions are published faster than they can be rewritten.",
            "Repeat it when the dataset is quiet.",
        )
    finally:
        for each in made.values():
            if each.attempt is not None:
                lake.store.delete(attempt_key(lake, dataset, each.attempt.id))


def _check(log: DatasetLog, manifest: DatasetManifest, partitions: int, reason: str) -> int:
    declared, what = manifest.declaration, f"dataset {log.name!r}"
    if not reason.strip():
        raise ConfigurationError(f"{what} can't be repartitioned without a reason.", "Say why: it is kept.")
    if log.version_set() is not None:
        raise ConfigurationError(
            f"{what} is a member of the version set {log.version_set()!r}, whose versions are one commit.",
            "Declare it under a new name with the new count, which builds it beside the old one.",
        )
    if declared.kind != "bounded" or declared.partitions is None:
        kind = "unbounded" if declared.kind != "bounded" else "broadcast: one copy, in no partitions"
        raise ConfigurationError(
            f"{what} is {kind}, and can't be rewritten into {partitions} partitions.",
            "Declare it under a new name with the new count, which builds it from its input beside the old one; or "
            f"delete it and build it anew: adjunct dataset delete {log.name} --reason ….",
        )
    if not 1 <= partitions <= 100_000 or partitions == declared.partitions:
        raise ConfigurationError(
            f"{what} has {declared.partitions} partitions, and is to have {partitions}.",
            "Name another number, from 1 to 100,000.",
        )
    return declared.partitions


def _check_unused(dataset: str, needed: Mapping[str, str]) -> None:
    if needed:
        raise StillReadError(
            f"dataset {dataset!r} can't be repartitioned now: {'; '.join(sorted(set(needed.values())))}.",
            "Let it end: run the application, or give its batch up (adjunct checkpoint abandon). Then repeat it.",
        )


def _stands(lake: Lake, manifest: DatasetManifest, each: Replacement) -> bool:
    """Whether nobody has discarded what was rewritten, which no manifest lists yet."""
    document = str(each.new.document)
    return not {*each.new.folders, document} & set(manifest.doomed) and lake.store.head(document) is not None


def _documented(manifest: DatasetManifest) -> Iterator[VersionRef]:
    return (ref for ref in manifest.versions if ref.document is not None)


def _after(
    manifest: DatasetManifest, made: dict[str, Replacement], partitions: int, reason: str
) -> DatasetManifest | None:
    """Return the manifest with the rewritten versions; None where there are more to rewrite."""
    refs = list(_documented(manifest))
    if any(str(ref.document) not in made for ref in refs):
        return None
    old = {ref.id: made[str(ref.document)] for ref in refs}
    after = replaced(manifest, old)
    doomed = [*manifest.doomed]
    doomed += [entry for each in old.values() for entry in (*each.old.folders, str(each.old.document))]
    served = old.get(manifest.version.id) if manifest.version else None
    return after.after(
        declaration=manifest.declaration.model_copy(update={"partitions": partitions}),
        doomed=tuple(dict.fromkeys(doomed)),
        # So that a build that is under way, which has the old partitions, loses its race.
        next_number=manifest.next_number + 1,
        change=Change(action="repartition", version=served.new.id if served else None, reason=reason),
    )


def _rewritten(log: DatasetLog, ref: VersionRef, partitions: int, by: str) -> Replacement:
    sealed = log.read_version(ref)
    (generation,) = sealed.generations
    layout = layout_of(sealed.columns, sealed.key, sealed.partition_by, partitions, sealed.positioned)
    attempt = log.attempt()
    # On record until the commit, so that nobody takes the new files for garbage.
    with AttemptRenewal(log.lake, log.name, attempt.id, by):
        files = _write(log, files_of(log.lake.store, log.name, sealed), layout, attempt, generation.id)
    new = attempt.generation(generation.id, files)
    if new.rows != generation.rows:
        raise ManifestMismatchError(
            f"dataset {log.name!r}: rewriting version {ref.id} wrote {new.rows} rows, the manifest lists "
            f"{generation.rows}.",
            "Nothing was committed. Check the version: adjunct dataset verify.",
        )
    fields = {name: getattr(sealed, name) for name in SealedVersion.model_fields}
    changes = {"id": f"v{sealed.number:06d}-{attempt.id}", "partitions": partitions, "generations": (new,)}
    made = SealedVersion(**{**fields, **changes})
    update = {
        "id": made.id,
        "document": log.write_version(made),
        "folders": (new.folder,),
        "bytes": new.size,
    }
    return Replacement(ref, ref.model_copy(update=update), made, attempt, 0)


def _write(
    log: DatasetLog, stored: list[StoredFile], layout: BucketLayout, attempt: Attempt, number: int
) -> list[BucketFile]:
    """Write the rows of these files into their new buckets, each in the order of its keys.

    As many buckets at a time as have about `_ROWS_AT_ONCE` rows, so that memory does not grow with the version.
    """
    import pyarrow as pa

    folder = attempt.generation(number).folder
    options = WriteOptions(f"dataset {log.name!r}")
    passes = -(-max(1, sum(each.file.rows for each in stored)) // _ROWS_AT_ONCE)
    width = -(-layout.partitions // passes)
    written: list[BucketFile] = []
    for first in range(0, layout.partitions, width):
        parts: dict[int, list[pa.Table]] = {}
        for file in stored:
            for rows, buckets in _bucketed(file, layout):
                for bucket in range(first, min(first + width, layout.partitions)):
                    mine = rows.filter(pa.array(buckets == bucket))
                    if mine.num_rows:
                        parts.setdefault(bucket, []).append(mine)
        for bucket, tables in sorted(parts.items()):
            rows = pa.concat_tables(tables).sort_by([(name, "ascending") for name in layout.key]).combine_chunks()
            writer = BucketFileWriter(log.lake.store, folder, bucket, layout, options)
            try:
                for start in range(0, rows.num_rows, ROWS_PER_GROUP):
                    writer.write(rows.slice(start, ROWS_PER_GROUP))
                done = writer.finish()
            finally:
                writer.discard()
            if done is not None and done.rows:
                written.append(done)
    return written


def _bucketed(stored: StoredFile, layout: BucketLayout) -> Iterator[tuple[pa.Table, Any]]:
    """Yield the file's rows, and the new bucket of each."""
    from resources.hashing import buckets

    if stored.sha256() != stored.file.sha256:
        raise ManifestMismatchError(
            f"{stored.what}: {stored.key} is not as it was written, so it can't be rewritten.",
            "Restore that object, or give the version up: withdraw and drop it.",
        )
    file = stored.open()
    for group in range(file.metadata.num_row_groups):
        rows = stored.reading(lambda at=group: file.read_row_group(at))  # type: ignore[misc]
        rows = rows.select([field.name for field in layout.arrow_schema()])
        yield rows, buckets([rows.column(name) for name in layout.bucket_by], layout.partitions)

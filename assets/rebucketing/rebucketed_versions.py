"""Rewrites a bounded dataset's versions into another number of partitions: the same entries, in one commit.

Every version that is retained gets a copy under a new id, so that a rollback meets the same partitions. Readers keep
the old copies until they let go, as after an erasure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.stored_files import files_of
from dagster_adjunct.assets.rebucketing.rebucket_report import RebucketReport, check, check_unused
from dagster_adjunct.assets.rebucketing.rebucketed_files import rebucketed
from dagster_adjunct.assets.retention.discard import delete_doomed
from dagster_adjunct.assets.retention.erasing.replace_versions import Replacement, replaced
from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
from dagster_adjunct.assets.versions.build_attempts import AttemptRenewal, attempt_key
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.leases import store_now
from dagster_adjunct.assets.versions.sealed_version import VersionRef, layout_of, version_id
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    DatasetNotFoundError,
    ManifestMismatchError,
)

if TYPE_CHECKING:
    from dagster_adjunct.assets.retention.discard import Roots
    from dagster_adjunct.resources.objects.commit_log import Commit
    from dagster_adjunct.resources.objects.lake import Lake


def repartition_versions(
    lake: Lake, dataset: str, partitions: int, *, reason: str, by: str, roots: Roots = dict, dry_run: bool = False
) -> RebucketReport:
    """Rewrite every retained version of a bounded dataset into this number of partitions; names and offsets stay.

    A crash leaves the dataset as it was. `roots` gives, by version id, why applications still need a version: those of
    open batches refuse it with StillReadError, for they can't meet other partitions. Until it is declared with the new
    count, the dataset is refused when it is advanced or opened. Of a member of a version set it is one commit of the
    set. `dry_run` only says what would be done. Raises ConfigurationError for an unbounded dataset, a broadcast one,
    or no change.
    """
    log = DatasetLog(lake, dataset)
    made: dict[str, Replacement] = {}

    def rewrite_once() -> tuple[int, BoundedManifest]:
        commit, manifest = _read(log, partitions)
        before = check(log, manifest, partitions, reason)
        check_unused(dataset, roots())
        # A version is rewritten once, however often the commit is tried.
        for document in [document for document, new in made.items() if not _stands(lake, manifest, new)]:
            del made[document]
        for ref in manifest.built:
            if str(ref.document) not in made:
                made[str(ref.document)] = _rewritten(log, ref, partitions, by)
        check_unused(dataset, roots())  # once more: writing takes a while
        after = _after(manifest, made, partitions, reason)
        log.commit(commit, after, by=by)
        return before, after

    if dry_run:
        return _planned(log, partitions, reason, roots)
    try:
        before, after = log.rewrite(rewrite_once, slower="its versions can be rewritten")
    finally:
        for new in made.values():
            if new.attempt is not None:
                lake.store.delete(attempt_key(lake, dataset, new.attempt.id))
    spared, _ = delete_doomed(log, after, roots, store_now(lake, dataset), by=by)
    used = [new for new in made.values() if after.ref(new.new.id) is not None]
    ids, rows = {new.old.id: new.new.id for new in used}, sum(new.sealed.stored_rows for new in used)
    pending = tuple(f"{judged.what}: {judged.reason}" for judged in spared)
    return RebucketReport(dataset, before, partitions, ids, pending, rows=rows)


def _read(log: DatasetLog, partitions: int) -> tuple[Commit | None, BoundedManifest]:
    commit, manifest = log.read()
    if manifest is None:
        raise DatasetNotFoundError(
            f"dataset {log.name!r} has no commit in {log.lake.url}.", "Advance it first.", dataset=log.name
        )
    if not isinstance(manifest, BoundedManifest):
        raise ConfigurationError(
            f"dataset {log.name!r} is unbounded: it has one table, and no versions to rewrite.",
            f"Rewrite it so: adjunct dataset repartition {log.name} --partitions {partitions} --reason ….",
            dataset=log.name,
        )
    return commit, manifest


def _planned(log: DatasetLog, partitions: int, reason: str, roots: Roots) -> RebucketReport:
    manifest = _read(log, partitions)[1]
    before = check(log, manifest, partitions, reason)
    ids = {ref.id: "" for ref in manifest.built}
    rows = sum(ref.rows or 0 for ref in manifest.built)
    holding = tuple(sorted(set(roots().values())))
    return RebucketReport(log.name, before, partitions, ids, rows=rows, holding=holding, dry_run=True)


def _stands(lake: Lake, manifest: BoundedManifest, made: Replacement) -> bool:
    """Whether nobody has discarded what was rewritten, which no manifest lists yet."""
    document = str(made.new.document)
    return not {*made.new.folders, document} & set(manifest.doomed) and lake.store.head(document) is not None


def _after(manifest: BoundedManifest, made: dict[str, Replacement], partitions: int, reason: str) -> BoundedManifest:
    """Return the manifest with the rewritten versions, `made` of all of them."""
    old = {ref.id: made[str(ref.document)] for ref in manifest.built}
    after = replaced(manifest, old)
    doomed = [*manifest.doomed]
    doomed += [entry for new in old.values() for entry in (*new.old.folders, str(new.old.document))]
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
        files = rebucketed(log, files_of(log.lake.store, log.name, sealed), layout, attempt, generation.id)
    new = attempt.generation(generation.id, files)
    if new.rows != generation.rows:
        raise ManifestMismatchError(
            f"dataset {log.name!r}: rewriting version {ref.id} wrote {new.rows} rows, the manifest lists "
            f"{generation.rows}.",
            "Nothing was committed. Check the version: adjunct dataset verify.",
            dataset=log.name,
            version=ref.id,
        )
    made = sealed.after(id=version_id(sealed.number, attempt.id), partitions=partitions, generations=(new,))
    update = {
        "id": made.id,
        "document": log.write_version(made),
        "folders": (new.folder,),
        "bytes": new.size,
    }
    return Replacement(ref, ref.model_copy(update=update), made, attempt, 0)

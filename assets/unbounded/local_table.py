"""What becomes of a local table between batches: it is compacted, and a batch that was given up is taken out again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.chosen_version import committed_version
from dagster_adjunct.assets.unbounded.compact_table import compact_due
from dagster_adjunct.assets.unbounded.local_manifest import (
    Parent,
    check_as_stored,
    first_manifest,
    schema_of,
    serving,
)
from dagster_adjunct.assets.versions.advance_report import AdvanceReport, OnStage, Stages, ignore
from dagster_adjunct.assets.versions.manifest import Change, UnboundedManifest, as_unbounded
from dagster_adjunct.assets.versions.unbounded_state import Retired, Written
from dagster_adjunct.resources.errors import DatasetError, VersionDiscardedError
from dagster_adjunct.resources.objects.commit_log import retry_conflicts

if TYPE_CHECKING:
    from collections.abc import Callable

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.dataset_log import Attempt
    from dagster_adjunct.assets.versions.sealed_version import SealedVersion
    from dagster_adjunct.assets.writing.write_context import WriteContext

_TRIES = 20


def advance_local(context: WriteContext, spec: AdjunctDataset, *, on_stage: OnStage = ignore) -> AdvanceReport:
    """Compact a local table where that is due: what is in it only its application's batches change.

    Raises DatasetError for a declaration that what is stored can't be read with.
    """
    stages, columns = Stages(spec.name, on_stage), schema_of(spec)
    stored = context.log(spec.name).read()[1]
    manifest, sealed, note = None if stored is None else as_unbounded(stored), "", "no batch has written it yet"
    if manifest is not None:
        check_as_stored(spec, manifest)
        note = f"batch {manifest.written.batch} was the last to write it" if manifest.written is not None else ""
        policy = spec.following.compaction
        compacted = None
        if policy.inside_commit:
            with stages("compact"):
                compacted = compact_due(context, spec.name, policy)
        if compacted is not None:
            manifest = compacted[1]
            assert manifest.version is not None
            sealed = manifest.version.id
    version = None if manifest is None else manifest.version
    return AdvanceReport(
        dataset=spec.name,
        kind="unbounded",
        action="up-to-date",
        version=None if version is None else version.id,
        sealed=(sealed,) if sealed else (),
        rows=None if version is None else version.rows,
        counters={},
        offsets={},
        seconds=stages.seconds,
        schema=columns,
        note=note,
    )


def undo_batch(context: WriteContext, spec: AdjunctDataset, application: str, batch: int) -> str | None:
    """Take out what a batch that was given up has written; return the version that is served then.

    Where it has written nothing, nothing of it is taken any more. Safe to repeat. Raises VersionDiscardedError where
    the version before it is gone.
    """
    log = context.log(spec.name)

    def decided() -> Callable[[], str | None]:
        commit, stored = log.read()
        now = context.now()
        manifest = first_manifest(spec, schema_of(spec), now) if stored is None else as_unbounded(stored)
        written = manifest.written
        served = None if manifest.version is None else manifest.version.id
        if written is not None and (written.batch > batch or (written.batch == batch and written.undone)):
            return lambda: served
        reason = f"batch {batch} of application {application} was given up"
        attempt = log.attempt()
        number = Parent(commit, manifest).number + 1
        after = manifest.after(
            written=Written(application=application, batch=batch, undone=True),
            change=Change(action="undo", reason=reason),
        )
        mine = written is not None and written.batch == batch and written.before != served
        if served is None or mine:
            before = None
            if written is not None and written.before is not None:
                assert commit is not None, "there is a version"
                _check_there(spec, manifest, written)
                before = committed_version(log, commit, manifest, written.before)
                _check_partitions(spec, before, written)
            after = _as_before(spec, after, before, attempt, number, context)

        def commit_undone() -> str | None:
            log.commit(commit, after, by=context.by, commit_id=attempt.id)
            return None if after.version is None else after.version.id

        return commit_undone

    return retry_conflicts(decided, attempts=_TRIES)


def _check_there(spec: AdjunctDataset, manifest: UnboundedManifest, written: Written) -> None:
    assert written.before is not None
    if not manifest.retains(written.before):
        raise VersionDiscardedError(
            f"local table {spec.name!r}: batch {written.batch} of application {written.application} was given up, and "
            f"can't be taken out of it: version {written.before}, from before the batch, is gone, as after an erasure.",
            f"Begin the table anew: adjunct dataset delete {spec.name} --reason …; with a startpoint to the oldest "
            "record it has all that the inputs still hold.",
            dataset=spec.name,
            version=written.before,
        )


def _check_partitions(spec: AdjunctDataset, before: SealedVersion, written: Written) -> None:
    if before.partitions != spec.partitions:
        raise DatasetError(
            f"local table {spec.name!r} was repartitioned, into {spec.partitions} from {before.partitions}, after "
            f"batch {written.batch} of application {written.application} had written it. That was given up, and can't "
            "be taken out any more.",
            f"Repartition it back for one run: adjunct dataset repartition {spec.name} --partitions "
            f"{before.partitions} --reason ….",
            dataset=spec.name,
        )


def _as_before(
    spec: AdjunctDataset,
    manifest: UnboundedManifest,
    before: SealedVersion | None,
    attempt: Attempt,
    number: int,
    context: WriteContext,
) -> UnboundedManifest:
    """Return the manifest serving what an earlier version serves: its generations are in use again."""
    now = context.now()
    old = before.generations if before is not None else ()
    if not old:
        old = (attempt.generation(manifest.next_generation),)
        manifest = manifest.after(next_generation=manifest.next_generation + 1)
    version = serving(spec, old, number=number, id=f"v{number:06d}-{attempt.id}", now=now, counters={})
    used = {generation.folder for generation in old}
    known = {retired.folder for retired in manifest.retired}
    served = manifest.version.generations if manifest.version is not None else ()
    gone = [
        Retired(generation=generation.id, folder=generation.folder, until=number, at=now)
        for generation in served
        if generation.files and generation.folder not in used | known
    ]
    kept = tuple(retired for retired in manifest.retired if retired.folder not in used)
    return manifest.after(version=version, retired=(*kept, *gone))

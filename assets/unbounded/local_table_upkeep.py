"""What becomes of a local table between batches: it is compacted, and a batch that was given up is taken out again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.chosen_version import committed_version
from dagster_adjunct.assets.unbounded.compact_table import compact_due
from dagster_adjunct.assets.unbounded.local_manifest import as_local, empty_table, schema_of
from dagster_adjunct.assets.unbounded.next_served_version import retire
from dagster_adjunct.assets.versions.advance_report import AdvanceReport, OnStage, Stages, ignore
from dagster_adjunct.assets.versions.common_manifest import Change
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.manifest import as_unbounded
from dagster_adjunct.assets.versions.sealed_version import version_id
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.assets.versions.unbounded_state import Written
from dagster_adjunct.resources.errors import DatasetError, VersionDiscardedError
from dagster_adjunct.resources.objects.commit_log import retry_conflicts

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.dataset_log import Attempt
    from dagster_adjunct.assets.versions.sealed_version import SealedVersion
    from dagster_adjunct.assets.writing.runtime import Runtime
    from dagster_adjunct.resources.objects.lake import Lake

_TRIES = 20


def advance_local(context: Runtime, spec: AdjunctDataset, *, on_stage: OnStage = ignore) -> AdvanceReport:
    """Compact a local table where that is due: what is in it only its application's batches change.

    Raises DatasetError for a declaration that what is stored can't be read with.
    """
    stages, columns = Stages(spec.name, on_stage), schema_of(spec)
    stored = context.log(spec.name).read()[1]
    manifest = None if stored is None else as_local(stored, spec)
    policy, compacted = spec.following.compaction, None
    if manifest is not None and policy.inside_commit:
        with stages("compact"):
            compacted = compact_due(context, manifest, policy)
    if compacted is not None:
        manifest = compacted[1]
    version = None if manifest is None else manifest.version
    return AdvanceReport(
        dataset=spec.name,
        kind="unbounded",
        action="up-to-date",
        version=None if version is None else version.id,
        sealed=(version.id,) if compacted is not None and version is not None else (),
        rows=None if version is None else version.rows,
        counters={},
        offsets={},
        seconds=stages.seconds,
        schema=columns,
        note=_last_written(manifest),
    )


def _last_written(manifest: UnboundedManifest | None) -> str:
    if manifest is None:
        return "no batch has written it yet"
    return "" if manifest.written is None else f"batch {manifest.written.batch} was the last to write it"


def undo_batch(
    context: Runtime, name: str, application: str, batch: int, *, declared: AdjunctDataset | None = None
) -> str | None:
    """Take out of an application's table what a batch that was given up has written; return what is served then.

    Where it has written nothing, nothing of it is taken any more: where nothing is stored, a table that is `declared`
    is begun for that. What is stored under the name and is not the application's is left alone. Safe to repeat.
    Raises VersionDiscardedError where the version before the batch is gone.
    """
    log = context.log(name)

    def decided() -> Callable[[], str | None]:
        commit, stored = log.read()
        attempt, number, now = log.attempt(), 1 if commit is None else commit.number + 1, context.now()
        if stored is None and declared is not None:
            manifest = empty_table(declared, attempt, number, now)
        elif stored is not None and stored.declaration.owner == application:
            manifest = as_unbounded(stored)
        else:
            return lambda: None
        last = manifest.written
        if last is not None and (last.batch > batch or (last.batch == batch and last.undone)):
            return lambda: _served(manifest)
        if last is not None and last.batch == batch and last.before != _served(manifest):
            before = _version_before(log, manifest, last, declared, attempt)
            version = before.after(id=version_id(number, attempt.id), number=number, sealed_at=now, counters={})
            manifest = _serving_again(manifest, version, now)
        undone = manifest.after(
            written=Written(application=application, batch=batch, undone=True),
            change=Change(action="undo", reason=f"batch {batch} of application {application} was given up"),
        )

        def commit_undone() -> str | None:
            log.commit(commit, undone, by=context.by, commit_id=attempt.id)
            return _served(undone)

        return commit_undone

    return retry_conflicts(decided, attempts=_TRIES)


def give_to(lake: Lake, name: str, application: str, *, owner: str, reason: str, by: str) -> bool:
    """Make a local table of the application `owner` that of another one; return whether it was one of its local tables.

    Tables of state keep their owner: it is in their names.
    """
    log = DatasetLog(lake, name)

    def decided() -> Callable[[], bool]:
        commit, stored = log.read()
        if stored is None or stored.declaration.owner != owner or stored.declaration.expires is not None:
            return lambda: False
        update = {"owner": application, "input": f"application {application}"}
        after = as_unbounded(stored).after(
            declaration=stored.declaration.model_copy(update=update), change=Change(action="rename", reason=reason)
        )

        def commit_given() -> bool:
            log.commit(commit, after, by=by, commit_id=log.attempt().id)
            return True

        return commit_given

    return retry_conflicts(decided, attempts=_TRIES)


def _served(manifest: UnboundedManifest) -> str | None:
    return None if manifest.version is None else manifest.version.id


def _version_before(
    log: DatasetLog, manifest: UnboundedManifest, written: Written, declared: AdjunctDataset | None, attempt: Attempt
) -> SealedVersion:
    """Return the version that a table had before a batch has `written` it; one without rows where it had none."""
    served = manifest.version
    assert served is not None, "a batch has written it"
    if written.before is None:
        columns = served.columns if declared is None else schema_of(declared)
        return served.after(columns=columns, generations=(attempt.generation(manifest.next_generation),), rows=0)
    by = f"batch {written.batch} of application {written.application}"
    if not manifest.retains(written.before):
        raise VersionDiscardedError(
            f"local table {manifest.name!r}: {by} was given up, and can't be taken out of it: version "
            f"{written.before}, from before the batch, is gone, as after an erasure.",
            f"Begin the table anew: adjunct dataset delete {manifest.name} --reason …; with a startpoint to the oldest "
            "record it has all that the inputs still hold.",
            dataset=manifest.name,
            version=written.before,
        )
    before = committed_version(log, manifest, written.before)
    if before.partitions != served.partitions:
        raise DatasetError(
            f"local table {manifest.name!r} was repartitioned, into {served.partitions} from {before.partitions}, "
            f"after {by} had written it. That was given up, and can't be taken out any more.",
            f"Repartition it back for one run: adjunct dataset repartition {manifest.name} --partitions "
            f"{before.partitions} --reason ….",
            dataset=manifest.name,
        )
    return before


def _serving_again(manifest: UnboundedManifest, version: SealedVersion, now: datetime) -> UnboundedManifest:
    """Return the manifest with a version whose generations may be retired: they are in use again."""
    used = {generation.folder for generation in version.generations}
    kept = tuple(retired for retired in manifest.retired if retired.folder not in used)
    newest = max(manifest.next_generation, version.generations[-1].id + 1)
    return retire(manifest.after(retired=kept, next_generation=newest), version, now)

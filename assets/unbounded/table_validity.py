"""What there is: an unbounded dataset's table and its stream at one moment, and whether the table can be continued.

A table is valid when its manifest and objects are whole, its stream has the same partitions, its offsets are still on
the stream, and it is younger than `max_age` since it was last confirmed caught up. One that is being built goes on,
unless its stream or its columns are others by now.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.assets.declaration.changes.change_order import order_in_words
from dagster_adjunct.assets.sources.opened_stream import Offsets, Source, by_partition
from dagster_adjunct.assets.sources.source_made_anew import made_anew
from dagster_adjunct.assets.versions.carried_to_rewritten_stream import carried_over
from dagster_adjunct.assets.versions.manifest import as_unbounded
from dagster_adjunct.assets.versions.stored_declaration import check_declaration
from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    MalformedDocumentError,
    OffsetOutOfRangeError,
)
from dagster_adjunct.resources.objects.removal import is_deleted

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.dataset_log import DatasetLog
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.assets.versions.stored_declaration import DatasetDeclaration
    from dagster_adjunct.assets.writing.runtime import Runtime
    from dagster_adjunct.resources.objects.commit_log import Commit

ADVANCE_AGAIN = "Nothing of this attempt is visible. Advance again: it goes on from what the other one did."


@dataclass(frozen=True, slots=True)
class SeenTable:
    """A table and its stream, as one look at `at` finds them; no file is read, and nothing is changed.

    `commit` is the current one, None before the first. `manifest` is None where there is no table. Where `damage` says
    why the current one can't be read, it is the newest that can be; where `carried`, it is not committed yet, and goes
    on in the stream as that was repartitioned. `oldest` and `ends` are the first offset that the stream holds, and the
    next that it gives, by partition. `missing` are objects of the table that are not there in full. `refusal` is set
    where what was seen is nothing to go by: its pointer is lost, or another writer committed meanwhile.
    """

    source: Source
    at: datetime
    commit: Commit | None
    manifest: UnboundedManifest | None
    oldest: Offsets
    ends: Offsets
    carried: bool = False
    damage: str = ""
    missing: tuple[str, ...] = ()
    refusal: CommitConflictError | MalformedDocumentError | None = None

    @property
    def spec(self) -> AdjunctDataset:
        """The declaration."""
        return self.source.spec

    @property
    def tells_all(self) -> bool:
        """Whether the stream, read from its oldest offset, tells of every key that it ever held."""
        return self.source.info.tells_all(self.oldest)


@dataclass(frozen=True, slots=True)
class TableContinuity:
    """Whether a table can be continued.

    `problem` says why it is not valid, `lost` that the stream has dropped what comes next, `building` that it was not
    finished. `refusal` is set where nothing can be decided at all: the stream is another one under the same name.
    """

    store: Literal["none", "building", "invalid", "valid"]
    problem: str = ""
    lost: bool = False
    building: bool = False
    refusal: OffsetOutOfRangeError | None = None


def look(context: Runtime, spec: AdjunctDataset) -> SeenTable:
    """Return what is there now.

    Raises DatasetError for an input that can't make this dataset, and for another key, spread or input than the table
    was declared with; the columns are a matter of what is done with it.
    """
    source = Source.of(context.systems, spec)
    log = context.log(spec.name)
    commit, stored, damage = log.read_or_newest()
    manifest = None if stored is None else followed(stored, source.declaration)
    carried = carried_over(manifest, source.info) if manifest is not None and not damage else None
    manifest = carried or manifest
    at = context.now()
    ends = source.system.upcoming(source.ssps)
    seen = SeenTable(
        source,
        at,
        commit,
        manifest,
        oldest=source.system.oldest(source.ssps),
        ends=ends,
        carried=carried is not None,
        damage=damage,
        missing=() if manifest is None or damage else _missing_objects(log, manifest),
    )
    if manifest is None and not damage:
        return replace(seen, refusal=_lost_pointer(log))
    state = state_of(seen)
    return replace(seen, refusal=_overtaken(log, commit)) if state.store == "invalid" else seen


def followed(stored: DatasetManifest, declared: DatasetDeclaration) -> UnboundedManifest:
    """Return the stored manifest of a table that is declared so now; DatasetError where another would be.

    How many partitions its input has is no matter of the declaration: it is found by looking.
    """
    partitions = {"input_partitions": stored.declaration.input_partitions}
    check_declaration(stored.name, stored.declaration, declared.model_copy(update=partitions))
    return as_unbounded(stored)


def state_of(seen: SeenTable) -> TableContinuity:
    """Return whether the table that was seen can be continued."""
    source, manifest = seen.source, seen.manifest
    if seen.damage:
        return TableContinuity("invalid", f"its manifest is damaged ({seen.damage})")
    if manifest is None:
        return TableContinuity("none")
    building = manifest.bootstrap.state == "running"
    offsets = by_partition(manifest.offsets)
    rebuild = f"rebuild the dataset from it (adjunct dataset rebuild {source.spec.name} MODULE:APP --reason …), or "
    rebuild += "declare it under a new name."
    refusal = made_anew(
        source.spec.name,
        str(source.spec.input),
        source.info,
        before=manifest.stream,
        read_to=offsets,
        ends=seen.ends,
        compare=source.system.compare,
        deleted_next=rebuild,
        rewritten_next=f"R{rebuild[1:]}",
    )
    if refusal is not None:
        return TableContinuity("invalid", refusal.problem, building=building, refusal=refusal)
    problem = _partitions_changed(source, offsets)
    if problem:
        return TableContinuity("invalid", problem, building=building)
    lost = [ssp for ssp, offset in offsets.items() if source.system.compare(offset, seen.oldest[ssp]) < 0]
    if lost:
        ssp, oldest = lost[0], seen.oldest[lost[0]]
        problem = f"it goes on at offset {offsets[ssp]} of {ssp}, and the stream holds nothing before {oldest} any more"
        return TableContinuity("invalid", problem, lost=True, building=building)
    if seen.missing:
        problem = f"{len(seen.missing)} of its objects are missing or cut, first {seen.missing[0]}"
        return TableContinuity("invalid", problem, building=building)
    if building:
        problem = _outdated_building(manifest, source, seen.at)
        return TableContinuity("invalid", problem, building=True) if problem else TableContinuity("building")
    behind = any(source.system.compare(offset, seen.ends[ssp]) < 0 for ssp, offset in offsets.items())
    limit, confirmed = max_age_of(source), manifest.confirmed_at
    if behind and limit is not None and confirmed is not None and seen.at - confirmed > limit:
        return TableContinuity(
            "invalid",
            f"it was last confirmed caught up {confirmed:%Y-%m-%d %H:%M} UTC, longer than {limit} ago, and has not "
            "read all that came since",
        )
    return TableContinuity("valid")


def max_age_of(source: Source) -> timedelta | None:
    """Return how long a table that is behind stays valid: as declared, else as long as the stream keeps tombstones."""
    return source.spec.following.max_age or source.info.tombstones_kept


def _missing_objects(log: DatasetLog, manifest: UnboundedManifest) -> tuple[str, ...]:
    generations = list(manifest.version.generations) if manifest.version else []
    if manifest.bootstrap.state == "running":
        generations = list(manifest.bootstrap.building)
    listed = {f"{generation.folder}/{file.name}": file.size for generation in generations for file in generation.files}
    if not listed:
        return ()
    stored = {item.key: item.size for item in log.lake.store.list(f"{log.prefix}/data/")}
    return tuple(key for key, size in listed.items() if stored.get(key) != size)


def _lost_pointer(log: DatasetLog) -> CommitConflictError | MalformedDocumentError | None:
    """Refuse to begin at number 1 where a pointer was lost: the commits that it led to would be passed over."""
    if is_deleted(log.log.current()):
        return None
    newest = next(log.log.before(sys.maxsize), None)
    if newest is None or newest.number <= 1:
        return None
    if log.log.head() is not None:
        return CommitConflictError(
            f"dataset {log.name!r}: another writer committed first, while this one looked.",
            ADVANCE_AGAIN,
            dataset=log.name,
        )
    return MalformedDocumentError(
        f"dataset {log.name!r} has no {log.log.pointer_key} in {log.lake.url}, and has had {newest.number} commits.",
        "Restore that object from a backup or an older object version; the manifests are intact. To build the "
        "dataset anew, declare it under a new name.",
        dataset=log.name,
        document=log.log.pointer_key,
    )


def _overtaken(log: DatasetLog, commit: Commit | None) -> CommitConflictError | None:
    """Refuse to go by a table that was compacted, and whose files were discarded, while it was looked at."""
    head = log.log.head()
    if commit is None or head is None or head.id == commit.id:
        return None
    return CommitConflictError(
        f"dataset {log.name!r}: another writer committed first, while this one looked at the table "
        f"(number {head.number}, after {commit.number}).",
        ADVANCE_AGAIN,
        dataset=log.name,
    )


def _outdated_building(manifest: UnboundedManifest, source: Source, now: datetime) -> str:
    """Return why a bootstrap that was begun can't go on, "" where it can."""
    bootstrap, kept = manifest.bootstrap, source.info.tombstones_kept
    if bootstrap.columns is not None and bootstrap.columns != source.schema:
        return f"other columns are declared since it began ({bootstrap.columns.difference(source.schema)})"
    before, after = manifest.declaration, source.declaration
    if (before.order_by, before.position_type) != (after.order_by, after.position_type):
        was, wanted = order_in_words(before.order_by), order_in_words(after.order_by)
        return f"it is ordered by {wanted} since it began, and was by {was}"
    if kept is not None and now - bootstrap.started_at > kept:
        return (
            f"it began {bootstrap.started_at:%Y-%m-%d %H:%M} UTC, and its stream keeps deletions for {kept} only: some "
            "may be gone that it has not read"
        )
    return ""


def _partitions_changed(source: Source, offsets: Offsets) -> str:
    added = sorted(set(source.ssps) - set(offsets))
    removed = sorted(set(offsets) - set(source.ssps))
    changes = [f"{', '.join(map(str, ssps))} {what}" for what, ssps in (("added", added), ("removed", removed)) if ssps]
    return f"the partitions of its stream have changed ({'; '.join(changes)})" if changes else ""

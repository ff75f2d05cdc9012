"""What a run does with the table that it finds: SAMZA-1278's recovery table.

                                no table      found, not valid                     valid
    marked for bootstrap        bootstrap     bootstrap beside the one served      continue
    not marked                  create        recreate empty, from the last offset continue

A table is valid when its manifest and objects are whole, its stream has the same partitions, its offsets are still on
the stream, and it is younger than `max_age` since it was last confirmed caught up. One that is being built goes
on; where it can't, it begins again, whether the dataset is marked or not: what is served is not given up for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.assets.versions.manifest import DatasetManifest, Decision
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    DatasetError,
    MalformedDocumentError,
    OffsetOutOfRangeError,
)
from dagster_adjunct.resources.objects.removal import is_deleted

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.sources.opening import Source
    from dagster_adjunct.assets.versions.log import DatasetLog
    from dagster_adjunct.resources.streams.interface.ssp import SystemStreamPartition

Offsets = Mapping["SystemStreamPartition", str]


@dataclass(frozen=True, slots=True)
class Found:
    """The table as a run finds it.

    `problem` says why it is not valid, `lost` that the stream has dropped what comes next, `building` that it was not
    finished.
    """

    store: Literal["none", "building", "invalid", "valid"]
    problem: str = ""
    lost: bool = False
    building: bool = False


def examine(
    log: DatasetLog,
    manifest: DatasetManifest | None,
    source: Source,
    offsets: Offsets,
    oldest: Offsets,
    upcoming: Offsets,
    now: datetime,
    damage: str = "",
) -> Found:
    """Look whether the table can be continued. `offsets` are the next ones to read, of the partitions it knows.

    `damage` says why the current manifest can't be read; `manifest` then is an older one, if there is any. Lists the
    folders of the table's generations. Raises OffsetOutOfRangeError for a stream that ends before what was read of it:
    it is another one under the same name.
    """
    if damage:
        return Found("invalid", f"its manifest is damaged ({damage})")
    if manifest is None:
        _check_never_there(log)
        return Found("none")
    building = manifest.bootstrap is not None and manifest.bootstrap.state == "running"
    _check_not_made_anew(source, manifest.stream, offsets, upcoming)
    problem = _partitions_changed(source, offsets)
    if problem:
        return Found("invalid", problem, building=building)
    lost = [ssp for ssp, offset in offsets.items() if source.system.compare(offset, oldest[ssp]) < 0]
    if lost:
        ssp = lost[0]
        return Found(
            "invalid",
            f"it goes on at offset {offsets[ssp]} of {ssp}, and the stream holds nothing before {oldest[ssp]} any more",
            lost=True,
            building=building,
        )
    missing = _missing_objects(log, manifest)
    if missing:
        problem = f"{len(missing)} of its objects are missing or cut, first {missing[0]}"
        return Found("invalid", problem, building=building)
    if building:
        problem = _outdated_building(manifest, source, now)
        return Found("invalid", problem, building=True) if problem else Found("building")
    behind = any(source.system.compare(offset, upcoming[ssp]) < 0 for ssp, offset in offsets.items())
    limit = max_age_of(source)
    if behind and limit is not None and manifest.confirmed_at is not None and now - manifest.confirmed_at > limit:
        return Found(
            "invalid",
            f"it was last confirmed caught up {manifest.confirmed_at:%Y-%m-%d %H:%M} UTC, longer than {limit} ago, and "
            "has not read all that came since",
        )
    return Found("valid")


def decide(spec: AdjunctDataset, found: Found, now: datetime) -> Decision:
    """Return what the run does, from the recovery table. Raises OffsetOutOfRangeError where that is declared."""
    lost = found.lost and not found.building
    if lost and spec.following.on_lost_offset == "fail":
        raise OffsetOutOfRangeError(
            f"dataset {spec.name!r} can't be continued: {found.problem}: retention has passed it.",
            "Deliver the lost changes again, or rebuild it from a complete source: adjunct dataset rebuild "
            f"{spec.name} MODULE:APP --reason …. A longer retention of the stream keeps this from happening.",
        )
    action: Literal["create", "bootstrap", "recreate", "continue", "serve-stale"]
    if found.store in ("valid", "building"):
        action = "continue"
        reason = "the table is valid" if found.store == "valid" else "its bootstrap goes on"
    elif found.building:
        action, reason = "bootstrap", f"the bootstrap that was not finished begins again: {found.problem}"
    elif lost and spec.following.on_lost_offset == "serve_stale":
        action, reason = "serve-stale", found.problem
    elif spec.bootstrap:
        action, reason = "bootstrap", found.problem or "there is no table yet"
    else:
        action = "create" if found.store == "none" else "recreate"
        reason = found.problem or "there is no table yet"
    return Decision(action=action, store=found.store, reason=reason, at=now)


def check_complete(source: Source, why: str) -> None:
    """Refuse to bootstrap from a stream that does not tell of every key any more (design, rule 9)."""
    spec = source.spec
    if spec.following.initial is not None or source.system.tells_all(source.info.name):
        return
    raise DatasetError(
        f"dataset {spec.name!r} has to be bootstrapped ({why}), and its input {spec.input} does not hold all changes: "
        "retention has dropped the oldest, and the stream is not compacted by key.",
        "Declare a bulk snapshot to begin with (initial=…), deliver the whole table into the stream again, or declare "
        "bootstrap=False, which goes on without what is lost. What was served stays served.",
    )


def max_age_of(source: Source) -> timedelta | None:
    """Return how long a table that is behind stays valid: as declared, else as long as the stream keeps tombstones."""
    return source.spec.following.max_age or source.info.tombstones_kept


def _check_never_there(log: DatasetLog) -> None:
    """Refuse to begin at number 1 where a pointer was lost: the commits that it led to would be passed over."""
    if is_deleted(log.log.current()):
        return
    later = next(log.log.before(sys.maxsize), None)
    if later is not None and later.number > 1:
        if log.log.head() is not None:
            raise CommitConflictError(
                f"dataset {log.name!r}: another writer committed first, while this one looked.",
                "Nothing of this attempt is visible. Advance again: it goes on from what the other one did.",
            )
        raise MalformedDocumentError(
            f"dataset {log.name!r} has no {log.log.pointer_key} in {log.lake.url}, and has had {later.number} commits.",
            "Restore that object from a backup or an older object version; the manifests are intact. To build the "
            "dataset anew, declare it under a new name.",
        )


def _outdated_building(manifest: DatasetManifest, source: Source, now: datetime) -> str:
    """Return why a bootstrap that was begun can't go on, "" where it can."""
    bootstrap, kept = manifest.bootstrap, source.info.tombstones_kept
    assert bootstrap is not None
    if bootstrap.columns is not None and bootstrap.columns != source.schema:
        return f"other columns are declared since it began ({bootstrap.columns.difference(source.schema)})"
    if kept is not None and now - bootstrap.started_at > kept:
        return (
            f"it began {bootstrap.started_at:%Y-%m-%d %H:%M} UTC, and its stream keeps deletions for {kept} only: some "
            "may be gone that it has not read"
        )
    return ""


def _partitions_changed(source: Source, offsets: Offsets) -> str:
    added = sorted(set(source.ssps) - set(offsets))
    removed = sorted(set(offsets) - set(source.ssps))
    said = [f"{', '.join(map(str, ssps))} {what}" for what, ssps in (("added", added), ("removed", removed)) if ssps]
    return f"the partitions of its stream have changed ({'; '.join(said)})" if said else ""


def _check_not_made_anew(source: Source, stream: str | None, offsets: Offsets, upcoming: Offsets) -> None:
    name = source.spec.name
    found = ""
    if stream is not None and source.info.identity is not None and stream != source.info.identity:
        found = f"dataset {name!r} was read from another stream under the name {source.spec.input}"
    for ssp, offset in offsets.items():
        if ssp in upcoming and source.system.compare(offset, upcoming[ssp]) > 0:
            found = f"dataset {name!r} has read {ssp} up to offset {offset}, and the stream ends at {upcoming[ssp]}"
    rewritten = source.info.repartitioned
    if found and rewritten is not None and rewritten.identity == stream:
        raise OffsetOutOfRangeError(
            f"dataset {name!r} was read from {source.spec.input} before that was rewritten into "
            f"{source.info.partitions} partition(s), and had not read all of it then.",
            "Offsets begin anew there, and none is taken for one of before. What is served stays. Rebuild the dataset "
            f"from it (adjunct dataset rebuild {name} MODULE:APP --reason …), or declare it under a new name.",
        )
    if found:
        raise OffsetOutOfRangeError(
            f"{found}.",
            f"The stream was deleted and made anew: rebuild the dataset from it (adjunct dataset rebuild {name} "
            "MODULE:APP --reason …), or declare it under a new name.",
        )


def _missing_objects(log: DatasetLog, manifest: DatasetManifest) -> list[str]:
    generations = list(manifest.version.generations) if manifest.version else []
    if manifest.bootstrap is not None and manifest.bootstrap.state == "running":
        generations = list(manifest.bootstrap.building)
    wanted = {f"{each.folder}/{file.name}": file.size for each in generations for file in each.files}
    if not wanted:
        return []
    stored = {item.key: item.size for item in log.lake.store.list(f"{log.prefix}/data/")}
    return [key for key, size in wanted.items() if stored.get(key) != size]

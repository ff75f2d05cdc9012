"""Datasets follow their input stream when it is repartitioned or gains partitions.

A dataset follows a repartitioned stream only if it had read all old partitions: then its remaining input is the same.
Positions made of offsets continue above all stored ones, because the offsets of the new partitions restart.
"""

from __future__ import annotations

from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.manifest import Change, DatasetManifest
from dagster_adjunct.resources.errors import DatasetNotFoundError
from dagster_adjunct.resources.streams.system import FIRST_OFFSET, StreamInfo

CARRY_ACTION = "carry"


def follow_repartition(manifest: DatasetManifest, info: StreamInfo) -> DatasetManifest | None:
    """Return the manifest at the corresponding position of the repartitioned stream, or None.

    None unless the dataset had read all of the old partitions and had no unfinished work when the stream was rewritten.
    """
    rewritten, stream = info.repartitioned, manifest.declaration.input
    if rewritten is None or info.identity is None or manifest.stream != rewritten.identity:
        return None
    if not has_read_all(manifest, rewritten.identity, rewritten.ended):
        return None
    offsets = {f"{stream}.{p}": offset for p, offset in enumerate(rewritten.continued_at)}
    reason = f"{stream} was repartitioned into {info.partitions}: continues where it had read to"
    return manifest.after(
        declaration=manifest.declaration.model_copy(update={"input_partitions": info.partitions}),
        offsets=offsets,
        stream=info.identity,
        positions_from=manifest.positions_from + max(map(int, rewritten.ended), default=0),
        change=Change(action=CARRY_ACTION, version=manifest.version.id if manifest.version else None, reason=reason),
        **manifest.fields_after_repartition(offsets),
    )


def follow_added_partitions(manifest: DatasetManifest, info: StreamInfo) -> DatasetManifest | None:
    """Return a bounded dataset's manifest with the partitions that were added to its stream; None if none were.

    Added partitions are read from their beginning: a version spans the partitions that the stream had when it was
    marked. Returns None if the stream may have been recreated.
    """
    had, stream = manifest.declaration.input_partitions, manifest.declaration.input
    same = info.identity is not None and manifest.stream == info.identity
    if manifest.versions_are_commits or not same or not 0 < had < info.partitions:
        return None
    added = {f"{stream}.{p}": FIRST_OFFSET for p in range(had, info.partitions)}
    return manifest.after(
        declaration=manifest.declaration.model_copy(update={"input_partitions": info.partitions}),
        offsets={**manifest.offsets, **added},
        change=Change(
            action=CARRY_ACTION,
            version=manifest.version.id if manifest.version else None,
            reason=f"{stream} had {had} partitions and has {info.partitions}: those that were added are read, too",
        ),
    )


def has_read_all(manifest: DatasetManifest, identity: str, ends: tuple[str, ...]) -> bool:
    """Whether a dataset has read its stream up to these ends and has no unfinished work."""
    stream = manifest.declaration.input
    there = manifest.offsets == {f"{stream}.{p}": end for p, end in enumerate(ends)}
    return manifest.is_settled and manifest.stream == identity and there


def commit_repartition(log: DatasetLog, stream: str, info: StreamInfo, *, by: str) -> bool:
    """Commit a dataset's position in its repartitioned stream; return whether there was anything to commit."""
    done = False

    def carry(manifest: DatasetManifest) -> DatasetManifest | None:
        nonlocal done
        after = follow_repartition(manifest, info) if manifest.declaration.input == stream else None
        done = after is not None
        return after

    try:
        log.transact(carry, by=by)
    except DatasetNotFoundError:  # deleted concurrently
        return False
    return done

"""Datasets follow their input stream when it is repartitioned or gains partitions.

A dataset follows a repartitioned stream only if it had read all old partitions: then its remaining input is the same.
Positions made of offsets continue above all stored ones, because the offsets of the new partitions restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from dagster_adjunct.assets.versions.manifest import Change, CommonManifest, DatasetManifest
from dagster_adjunct.resources.errors import DatasetNotFoundError
from dagster_adjunct.resources.streams.system import FIRST_OFFSET

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.dataset_log import DatasetLog
    from dagster_adjunct.resources.streams.system import StreamInfo


CARRY_ACTION = "carry"


M = TypeVar("M", bound=CommonManifest)


def follow_repartition(manifest: M, info: StreamInfo) -> M | None:
    """Return the manifest at the same place of its stream as that is partitioned now; None where there is none.

    That is so unless the stream was rewritten just when the dataset had read all of it, and nothing was under way.
    """
    rewritten, stream = info.repartitioned, manifest.declaration.input
    if rewritten is None or info.identity is None or manifest.stream != rewritten.identity:
        return None
    if not has_read_all(manifest, rewritten.identity, rewritten.ended):
        return None
    now = {f"{stream}.{p}": offset for p, offset in enumerate(rewritten.went_on)}
    told = f"{stream} was repartitioned into {info.partitions}: goes on where it had read to"
    return manifest.after(
        declaration=manifest.declaration.model_copy(update={"input_partitions": info.partitions}),
        offsets=now,
        stream=info.identity,
        positions_from=manifest.positions_from + max(map(int, rewritten.ended), default=0),
        change=Change(action=CARRY_ACTION, version=manifest.version.id if manifest.version else None, reason=told),
        **manifest.fields_after_repartition(now),
    )


def follow_added_partitions(manifest: DatasetManifest, info: StreamInfo) -> DatasetManifest | None:
    """Return the manifest of a dataset that arrives in versions, of a stream that has more partitions now; None else.

    What it has read stays read, and the partitions that were added are read from their beginning: a version is of those
    that the stream had when it was marked. Only of a stream that certainly was not made anew.
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


def has_read_all(manifest: CommonManifest, identity: str, ends: tuple[str, ...]) -> bool:
    """Whether a dataset has read its stream up to these ends, and nothing of it is under way."""
    stream = manifest.declaration.input
    there = manifest.offsets == {f"{stream}.{p}": end for p, end in enumerate(ends)}
    return manifest.is_settled and manifest.stream == identity and there


def commit_repartition(log: DatasetLog, stream: str, info: StreamInfo, *, by: str) -> bool:
    """Commit that a dataset goes on in its stream as it is partitioned now; return whether it did."""
    done = False

    def carry(manifest: DatasetManifest) -> DatasetManifest | None:
        nonlocal done
        after = follow_repartition(manifest, info) if manifest.declaration.input == stream else None
        done = after is not None
        return after

    try:
        log.transact(carry, by=by)
    except DatasetNotFoundError:  # deleted meanwhile
        return False
    return done
